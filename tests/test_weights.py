"""tools/weights.py and tools/sample.py: Hugging Face's files, our checkpoints, and text of them."""
import json
import math
import shutil
import sys

import pytest
import torch

import moe
from conftest import PROOF, ROOT, program, script
from common import GPTConfig, build, get_batch, load_corpus, loss_sum
from harness import checkpoint
from tools import sample, weights


def tool(name, *words, code=0):
    """A program in tools/ -> what it says; with code=2 that is a line."""
    ended, said, errors = program(f"tools/{name}.py", *words)
    assert ended == code and errors.count("\n") == code // 2, errors
    return errors or said


# ---- folders that Hugging Face's own code has made, see data/make.py ---------------


def theirs(name):
    folder = ROOT / "tests" / "data" / name
    made = json.loads((folder / "logits.json").read_text())
    ids = torch.tensor([made["ids"]])
    return folder, ids, torch.tensor(made["logits"])


def same_again(folder, tmp_path):
    """What goes out is what came in, to the bit."""
    tool("weights", "export", tmp_path / "ours", tmp_path / "back")
    assert "has checkpoints already" in tool("weights", "import", folder, tmp_path / "ours", code=2)
    back = weights.read_weights(tmp_path / "back")
    for name, t in weights.read_weights(folder).items():
        assert torch.equal(back.pop(name), t), name
    assert not back
    assert sizes_in(folder) == sizes_in(tmp_path / "back")


def sizes_in(folder):
    config = (folder / "config.json").read_text()
    return weights.sizes_of(json.loads(config))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_logits_are_theirs(name, tmp_path):
    folder, ids, logits = theirs(name)
    weights.import_weights(folder, tmp_path / "ours")
    model, cfg = sample.load(tmp_path / "ours")
    if name == "llama":
        assert (cfg.kv_heads, cfg.theta, cfg.eps) == (1, 5e3, 1e-6)
    torch.testing.assert_close(model(ids)[0], logits, rtol=1e-5, atol=1e-5)
    same_again(folder, tmp_path)


def test_mixtral(tmp_path):
    folder, ids, logits = theirs("mixtral")
    weights.import_weights(folder, tmp_path / "ours")
    assert "it has experts" in tool("sample", tmp_path / "ours", "x", code=2)
    state, identity = weights.weights_of(tmp_path / "ours")
    assert (identity["experts"], identity["top_k"]) == (4, 2)
    cfg = weights.sizes_in(identity)
    model = build(cfg, 0)
    moe.mixture(model, 0, cfg, experts=4, top_k=2, shared=False, balance="none", capacity=0.0)
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    moe.set_sources(model, [[torch.arange(16)]])
    torch.testing.assert_close(model(ids)[0], logits, rtol=1e-5, atol=1e-5)
    same_again(folder, tmp_path)


def older(state):
    """As older files have it: without the prefix, with the causal mask and the tied head."""
    state = {name.removeprefix("transformer."): t for name, t in state.items()}
    return {**state, "h.0.attn.bias": torch.ones(1, 1, 16, 16), "lm_head.weight": torch.ones(19, 8)}


def in_two_files(folder, state):
    names = list(state)
    index = {}
    for part, some in enumerate((names[:9], names[9:])):
        file = f"model-{part}.safetensors"
        weights.write_safetensors(folder / file, {name: state[name] for name in some})
        index.update(dict.fromkeys(some, file))
    text = json.dumps({"weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


def test_several_files_older_files_and_pickles(tmp_path):
    folder, ids, logits = theirs("gpt2")
    state = older(weights.read_weights(folder))
    for kind in ("parts", "pickle"):
        shutil.copytree(folder, tmp_path / kind, ignore=lambda *_: ["model.safetensors"])
    in_two_files(tmp_path / "parts", state)
    torch.save(state, tmp_path / "pickle" / "pytorch_model.bin")
    for kind in ("parts", "pickle"):
        weights.import_weights(tmp_path / kind, tmp_path / "ours" / kind)
        model, _ = sample.load(tmp_path / "ours" / kind)
        torch.testing.assert_close(model(ids)[0], logits, rtol=1e-5, atol=1e-5)


REFUSED = [
    ({"activation_function": "relu"}, "activation_function is relu"),
    ({"n_inner": 13}, "n_inner is 13"),
    ({"model_type": "qwen2"}, "model_type is qwen2"),
    ({"n_layer": 3}, "has no 'h.2.ln_1.weight'"),
    ({"n_layer": 1}, "the weights have h.1."),
]


def refused(capsys, *words):
    """What weights.py says of an import that ends in a line."""
    sys.argv = ["weights.py", "import", *map(str, words)]
    with pytest.raises(SystemExit) as end:
        weights.main()
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1
    return said


def test_other_models_and_files_are_refused(tmp_path, capsys):
    """In a line. Nothing of a file that is not whole is taken."""
    words = (tmp_path, tmp_path / "ours")
    shutil.copytree(theirs("gpt2")[0], tmp_path, dirs_exist_ok=True)
    good = (tmp_path / "config.json").read_text()
    for change, says in REFUSED:
        wrong = {**json.loads(good), **change}
        (tmp_path / "config.json").write_text(json.dumps(wrong))
        assert says in refused(capsys, *words)
    (tmp_path / "config.json").write_text(good)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    assert "is not whole" in refused(capsys, *words)
    file.unlink()
    assert "No such file" in refused(capsys, *words)


# ---- our checkpoints -------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):  # by two ranks of ddp
    folder = tmp_path_factory.mktemp("saved")
    script("ddp", 2, *PROOF, "--steps", "3", "--no-check", "--save", str(folder))
    return folder


def test_from_script_to_script_to_a_plain_file(saved, tmp_path):
    """ddp on 2 ranks, hybrid_3d on 8 at a rate that moves no number, a plain file."""
    flags = "--steps 1 --lr 1e-12 --no-check --dp 2 --tp 2 --pp 2 --zero 2 --init-from".split()
    script("hybrid_3d", 8, *PROOF, *flags, str(saved), "--save", str(tmp_path / "hybrid"))
    weights.save_plain(tmp_path / "hybrid", tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt")
    for name, t in sample.load(saved)[0].state_dict().items():
        torch.testing.assert_close(plain.pop(name), t, rtol=0, atol=1e-8)
    assert not plain


def test_theirs_trains(tmp_path):
    """Its base of rotary angles and its eps come with it: the same model on two ranks."""
    cfg = GPTConfig(1, 8, 2, 256, 16, "llama", 1, 12, 1e3, 1e-3)
    state = build(cfg, 5).state_dict()
    checkpoint.write_whole(tmp_path, state, cfg._asdict())
    flags = weights.flags_for(cfg).split()
    report = script("ddp", 2, *flags, "--init-from", str(tmp_path), "--steps", "1")
    x, y, valid = get_batch(load_corpus("", 16), 16, 0, 0, 8)
    loss = loss_sum(build(cfg, 5)(x), y) / valid
    assert report["loss"][0] == pytest.approx(loss.item(), rel=1e-6)


def test_what_is_drawn():
    """Temperature 0 is the likeliest; top-k draws from these alone, as often as softmax says."""
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])
    rng = torch.Generator().manual_seed(0)
    assert sample.choose(logits, 0, 0, rng) == 1
    drawn = [sample.choose(logits, 0.7, 2, rng) for _ in range(2000)]
    assert set(drawn) == {1, 3}
    expected = 1 / (1 + math.exp(-1 / 0.7))
    assert drawn.count(1) / 2000 == pytest.approx(expected, abs=0.04)


def test_text_from_a_checkpoint(saved):
    """The likeliest bytes, also past the 16 positions that the model has; and ids."""
    said = tool("sample", saved, "--ids", "105 109 112", "--tokens", "20", "--temperature", "0")
    ids = list(map(int, said.split()))
    model = sample.load(saved)[0]
    for i in range(3, 23):
        first = max(0, i - 16)
        window = torch.tensor([ids[first:i]])
        logits = model(window)[0, -1]
        assert ids[i] == logits.argmax()
    text = tool("sample", saved, "imp", "--tokens", "20", "--temperature", "0")
    assert text == bytes(ids).decode(errors="replace") + "\n"
    assert "must be 0 to 255" in tool("sample", saved, "--ids", "256", code=2)


def test_the_loss_on_a_text(saved):
    """It is the one that --eval-every shows."""
    flags = (*PROOF, "--no-check", "--lr", "1e-12", "--steps", "1", "--eval-every", "1")
    report = script("ddp", 1, *flags, "--init-from", str(saved))
    model, cfg = sample.load(saved)
    loss = sample.loss_on(model, cfg.seq, "")
    assert loss == pytest.approx(report["validation"]["0"], rel=1e-9)
