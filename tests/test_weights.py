"""tools/weights.py and tools/sample.py: Hugging Face's files, our checkpoints, and text of them."""
import importlib.util
import json
import math
import shutil

import pytest
import torch

import moe
from common import FORMS, GPTConfig, build, get_batch, load_corpus, loss_sum
from conftest import PROOF, ROOT, run_script, run_tool
from harness import checkpoint
from tools import sample, weights


def theirs(name):
    folder = ROOT / "tests" / "data" / name
    made = json.loads((folder / "logits.json").read_text())
    return folder, torch.tensor([made["ids"]]), torch.tensor(made["logits"])


def same_again(folder, cfg, experts):
    """What goes out is what came in, to the bit."""
    state = weights.read_weights(folder)
    ours = weights.from_theirs(state, cfg, experts)
    back = weights.to_theirs(ours, cfg, experts)
    torch.testing.assert_close(back, state, rtol=0, atol=0)
    with pytest.raises(ValueError, match="shared.up.weight, which has no place"):
        weights.to_theirs({**ours, "blocks.0.mlp.shared.up.weight": torch.ones(2, 2)}, cfg, experts)
    config = weights.config_of(cfg, torch.float32, experts, 2)
    assert weights.sizes_of(config) == (cfg, experts)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "mixtral", "qwen3_moe"])
def test_logits_are_theirs(name, tmp_path):
    folder, ids, logits = theirs(name)
    weights.import_weights(folder, tmp_path / "ours")
    state, identity = weights.weights_of(tmp_path / "ours")
    cfg = weights.sizes_in(identity)
    experts = identity.get("experts", 0)
    assert experts == (4 if name in ("mixtral", "qwen3_moe") else 0)
    if name == "llama":
        assert cfg.kv_heads == 1
        assert cfg.theta == 5e3
        assert cfg.eps == 1e-6
    if experts:
        assert "it has experts" in run_tool("sample", tmp_path / "ours", "x", code=2)
        model = build(moe.mixture(cfg, experts=experts, top_k=identity["top_k"]), 0)
        missing = model.load_state_dict(state, strict=False)
        assert not missing.unexpected_keys
        assert all(".bias" in name for name in missing.missing_keys)
    else:
        model, _ = sample.load(tmp_path / "ours")
    torch.testing.assert_close(model(ids)[0], logits, rtol=1e-5, atol=1e-5)
    same_again(folder, cfg, experts)


def older(state):
    """As older files have it: without the prefix, with the causal mask and the tied head."""
    state = {name.removeprefix("transformer."): t for name, t in state.items()}
    state["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    state["lm_head.weight"] = torch.ones(19, 8)
    return state


def test_several_files_and_older_ones(tmp_path):
    folder, ids, logits = theirs("gpt2")
    state = older(weights.read_weights(folder))
    names = list(state)
    for part in (names[:9], names[9:]):
        tensors = {name: state[name] for name in part}
        file = tmp_path / f"pytorch_model-{len(part)}.bin"
        torch.save(tensors, file)
    shutil.copy(folder / "config.json", tmp_path)
    weights.import_weights(tmp_path, tmp_path / "ours")
    model, _ = sample.load(tmp_path / "ours")
    torch.testing.assert_close(model(ids)[0], logits, rtol=1e-5, atol=1e-5)


def test_safetensors_is_used_or_asked_for(saved, tmp_path):
    """Where it is installed, what goes out comes in; where it is not, a line says what is missing,
    and nothing is written."""
    if importlib.util.find_spec("safetensors") is None:
        said = run_tool("weights", "export", saved, tmp_path / "theirs", code=2)
        assert "pip install safetensors" in said
        assert not (tmp_path / "theirs").exists()
        (tmp_path / "model.safetensors").touch()
        shutil.copy(theirs("gpt2")[0] / "config.json", tmp_path)
        said = run_tool("weights", "import", tmp_path, tmp_path / "ours", code=2)
        assert "pip install safetensors" in said
        return
    run_tool("weights", "export", saved, tmp_path / "theirs")
    said = run_tool("weights", "import", tmp_path / "theirs", tmp_path / "again")
    assert "--layers 2 --width 32 --heads 4 --vocab 256 --seq 16" in said
    before, _ = weights.weights_of(saved)
    after, _ = weights.weights_of(tmp_path / "again")
    torch.testing.assert_close(after, before, rtol=0, atol=0)


REFUSED = [
    ({"activation_function": "relu"}, "activation_function is relu"),
    ({"model_type": "qwen2"}, "model_type is qwen2, not one of gpt2, "),
    ({"n_layer": 3}, "has no 'h.2.ln_1.weight'"),
    ({"n_layer": 1}, "the weights have h.1."),
    ({"n_head": 5}, "5 heads do not divide"),
]


def test_other_models_and_files_are_refused(tmp_path):
    """In a line. Nothing of a file that is not whole is taken."""
    def refused(words, folder=tmp_path):
        assert words in run_tool("weights", "import", folder, tmp_path / "ours", code=2)

    refused("config.json: No such file")
    shutil.copytree(theirs("gpt2")[0], tmp_path, dirs_exist_ok=True)
    good = (tmp_path / "config.json").read_text()
    for change, words in REFUSED:
        (tmp_path / "config.json").write_text(json.dumps({**json.loads(good), **change}))
        refused(words)
    (tmp_path / "config.json").write_text(good)
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-800])
    refused("")
    shutil.copytree(theirs("llama")[0], tmp_path / "llama")
    file = tmp_path / "llama" / "config.json"
    good = json.loads(file.read_text())
    for name, value in (("tie_word_embeddings", True), ("sliding_window", 8)):
        file.write_text(json.dumps({**good, name: value}))
        refused(name, tmp_path / "llama")
    moe = {**good, "model_type": "qwen3_moe"}  # which by default does not normalize gates
    file.write_text(json.dumps(moe))
    refused("norm_topk_prob is False", tmp_path / "llama")
    alike = {**good, "num_key_value_heads": good["num_attention_heads"]}
    left_out = {name: value for name, value in alike.items() if name != "num_key_value_heads"}
    assert weights.sizes_of(left_out) == weights.sizes_of(alike)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What two ranks of ddp have saved."""
    folder = tmp_path_factory.mktemp("saved")
    run_script("ddp", 2, *PROOF, "--steps", "3", "--no-check", "--save", str(folder))
    return folder


def test_theirs_trains(tmp_path):
    """Its base of rotary angles and its eps come with it: the same model on two ranks."""
    cfg = GPTConfig(1, 8, 2, 256, 16, FORMS["llama"], 1, 12, theta=1e3, eps=1e-3)
    state = build(cfg, 5).state_dict()
    identity = cfg.resolved()._asdict()
    identity["form"] = cfg.form.name
    checkpoint.write_whole(tmp_path, state, identity)
    flags = weights.flags_for(cfg).split()
    report = run_script("ddp", 2, *flags, "--init-from", str(tmp_path), "--steps", "1")
    assert report["args"]["kv_heads"] == 1
    x, y, valid = get_batch(load_corpus("", 16), 16, 0, 0, 8)
    loss = loss_sum(build(cfg, 5)(x), y) / valid
    assert report["loss"][0] == pytest.approx(loss.item(), rel=1e-6)


def test_what_is_drawn():
    """Temperature 0 is the likeliest; else frequencies are softmax's."""
    logits = torch.tensor([-99.0, 3.0, -99.0, 2.0])
    rng = torch.Generator().manual_seed(0)
    assert sample.choose(logits, 0, rng) == sample.choose(logits, 1e-40, rng) == 1
    drawn = [sample.choose(logits, 0.7, rng) for _ in range(4000)]
    assert set(drawn) == {1, 3}
    odds = math.exp(1 / 0.7)
    assert drawn.count(1) / 4000 == pytest.approx(odds / (1 + odds), abs=0.03)


def test_each_token_follows_from_those_before(saved):
    """At most the 16 positions that the model has, and the same ones from the same seed."""
    model, cfg = sample.load(saved)
    start = list(range(100, 112))

    def drawn(*how):
        return sample.sample(model, cfg, start, 9, *how)

    tokens = drawn(0, 0, 256)
    for i in range(12, 21):
        seen = torch.tensor([tokens[max(0, i - 16):i]])
        assert tokens[i] == model(seen)[0, -1].argmax()
    assert drawn(1.0, 1, 99) == drawn(1.0, 1, 99)
    assert drawn(1.0, 1, 99) != drawn(1.0, 2, 99)
    assert max(drawn(1.0, 1, 99)[12:]) < 99


def test_text_from_a_checkpoint(saved):
    said = run_tool("weights", "import", theirs("gpt2")[0], saved, code=2)
    assert "has checkpoints already" in said
    words = ("import ", "--tokens", "40", "--temperature", "0")
    assert run_tool("sample", saved, *words).startswith("import ")
    assert run_tool("sample", saved, "\udcff", "--tokens", "0") == "\ufffd\n"  # bytes, not UTF-8
    said = run_tool("sample", saved, "--ids", "105 109 112", "--tokens", "5", "--seed", "3")
    assert said.startswith("105 109 112 ")
    assert len(said.split()) == 8
    assert "must be 0 to 255" in run_tool("sample", saved, "--ids", "256", code=2)
