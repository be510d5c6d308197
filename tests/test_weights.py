"""tools/weights.py and tools/sample.py: GPT-2's files, our checkpoints, and text from them."""
import json
import math
import random
import struct

import pytest
import torch

import moe
from conftest import PROOF, ROOT, program, script
from common import GPT, GPTConfig, build, get_batch, load_corpus, loss_sum
from harness import checkpoint
from tools import sample, weights

CONFIG = {
    "model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    "n_layer": 3, "n_embd": 12, "n_head": 3, "vocab_size": 301, "n_positions": 10,
}


# ---- GPT-2, as its authors wrote it ----------------------------------------------


MATRICES = {  # rows and columns of the weight, in widths
    "attn.c_attn": (1, 3),
    "attn.c_proj": (1, 1),
    "mlp.c_fc": (1, 4),
    "mlp.c_proj": (4, 1),
}


def random_gpt2(prefix=""):
    """Weights under Hugging Face's names, and the buffers of older files."""
    rng = torch.Generator().manual_seed(0)
    width = CONFIG["n_embd"]
    state = {}

    def draw(name, *shape):
        drawn = torch.randn(shape, dtype=torch.float64, generator=rng)
        state[prefix + name] = 0.3 * drawn

    draw("wte.weight", CONFIG["vocab_size"], width)
    draw("wpe.weight", CONFIG["n_positions"], width)
    for i in range(CONFIG["n_layer"]):
        draw(f"h.{i}.attn.bias", 1, 1, 10, 10)  # once the causal mask
        for norm in ("ln_1", "ln_2"):
            draw(f"h.{i}.{norm}.weight", width)
            draw(f"h.{i}.{norm}.bias", width)
        for name, (rows, columns) in MATRICES.items():
            draw(f"h.{i}.{name}.weight", rows * width, columns * width)
            draw(f"h.{i}.{name}.bias", columns * width)
    draw("ln_f.weight", width)
    draw("ln_f.bias", width)
    return state


def conv1d(x, state, name):
    return x @ state[f"{name}.weight"] + state[f"{name}.bias"]


def layer_norm(x, state, name):
    centered = x - x.mean(-1, keepdim=True)
    variance = centered.square().mean(-1, keepdim=True)
    normal = centered / torch.sqrt(variance + 1e-5)
    return normal * state[f"{name}.weight"] + state[f"{name}.bias"]


def gelu_new(x):
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)
    return 0.5 * x * (1 + torch.tanh(inner))


def attention(x, state, name):
    """One sequence, head by head. x: (T, C)."""
    T, C = x.shape
    width = C // CONFIG["n_head"]
    q, k, v = conv1d(x, state, f"{name}.c_attn").split(C, dim=1)
    future = torch.ones(T, T).triu(1).bool()
    heads = []
    for begin in range(0, C, width):
        head = slice(begin, begin + width)
        scores = q[:, head] @ k[:, head].T / math.sqrt(width)
        scores[future] = -math.inf
        heads.append(scores.softmax(1) @ v[:, head])
    return conv1d(torch.cat(heads, dim=1), state, f"{name}.c_proj")


def logits_of(state, ids):
    """GPT-2's forward of one sequence, from its definition -> (T, V)."""
    x = state["wte.weight"][ids] + state["wpe.weight"][:len(ids)]
    for i in range(CONFIG["n_layer"]):
        normal = layer_norm(x, state, f"h.{i}.ln_1")
        x = x + attention(normal, state, f"h.{i}.attn")
        normal = layer_norm(x, state, f"h.{i}.ln_2")
        hidden = gelu_new(conv1d(normal, state, f"h.{i}.mlp.c_fc"))
        x = x + conv1d(hidden, state, f"h.{i}.mlp.c_proj")
    return layer_norm(x, state, "ln_f") @ state["wte.weight"].T


# ---- files ---------------------------------------------------------------------


def write_safetensors(path, state, blanks=0):
    """float64, as the format is described. blanks: the data may begin at any byte."""
    header = {}
    data = b""
    for name, t in state.items():
        begin = len(data)
        data += struct.pack(f"<{t.numel()}d", *t.flatten().tolist())
        offsets = [begin, len(data)]
        header[name] = {"dtype": "F64", "shape": list(t.shape), "data_offsets": offsets}
    text = json.dumps(header).encode() + b" " * blanks
    size = struct.pack("<Q", len(text))
    path.write_bytes(size + text + data)


def in_one_file(folder, state):
    write_safetensors(folder / "model.safetensors", state, blanks=1)


def in_two_files(folder, state):
    names = list(state)
    index = {}
    for part, some in enumerate((names[:9], names[9:])):
        file = f"model-{part}.safetensors"
        write_safetensors(folder / file, {name: state[name] for name in some})
        index.update(dict.fromkeys(some, file))
    text = json.dumps({"weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


def as_pickle(folder, state):
    torch.save(state, folder / "pytorch_model.bin")


def tool(name, *words, code=0):
    """A program in tools/ -> what it says."""
    ended, said, errors = program(f"tools/{name}.py", *words)
    assert ended == code, errors
    if code:
        assert errors.count("error: ") == 1 and errors.count("\n") == 1, errors
        return errors
    return said


@pytest.mark.parametrize("write", [in_one_file, in_two_files, as_pickle])
@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_gpt2_comes_in_and_goes_out(write, prefix, tmp_path):
    """Logits equal to 1e-12, and what goes out is what came in, to the bit."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write(folder, random_gpt2(prefix))
    weights.import_weights(folder, tmp_path / "ours")
    model, _ = sample.load(tmp_path / "ours")
    ids = torch.randint(CONFIG["vocab_size"], (10,))
    state = random_gpt2()
    expected = logits_of(state, ids)
    gap = (model(ids[None])[0] - expected).abs().max()
    assert gap <= 1e-12 * expected.abs().max()
    weights.export_weights(tmp_path / "ours", tmp_path / "back")
    back = weights.read_weights(tmp_path / "back")
    for name, t in state.items():
        if not name.endswith(".attn.bias"):
            assert torch.equal(back.pop(f"transformer.{name}"), t), name
    assert not back
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert weights.sizes_of(config) == weights.sizes_of(CONFIG)
    assert config["torch_dtype"] == "float64"


def test_safetensors_of_any_dtype(tmp_path):
    state = {
        "a": torch.randn(3, 5).bfloat16(),
        "b": torch.arange(7),
        "c": torch.randn(()),
        "d": torch.tensor([True, False]),
    }
    weights.write_safetensors(tmp_path / "x", state)
    again = weights.read_safetensors(tmp_path / "x")
    assert again.keys() == state.keys()
    for name, t in state.items():
        assert torch.equal(again[name], t) and again[name].dtype == t.dtype


@pytest.mark.parametrize("change, says", [
    ({"activation_function": "relu"}, "activation_function is relu"),
    ({"n_inner": 13}, "n_inner is 13"),
    ({"model_type": "bert"}, "model_type is bert"),
    ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
    ({"n_layer": 4}, "has no tensor 'h.3.ln_1.weight'"),
    ({"n_layer": 2}, "the weights have h.2.ln_1.weight, which a GPT-2 of 2 layers has not"),
    ({"n_embd": None}, "n_embd is None, no size"),
    ({"n_head": 0}, "n_head is 0, no size"),
    ({"n_head": 5}, "5 heads do not divide a width of 12"),
    ({"n_layer": True}, "n_layer is True, no size"),
])
def test_other_models_are_refused(change, says, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    in_one_file(tmp_path, random_gpt2())
    assert says in tool("weights", "import", tmp_path, tmp_path / "ours", code=2)


def test_buffers_and_a_tied_head_are_not_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    more = {"h.0.attn.masked_bias": torch.tensor(-1e4), "lm_head.weight": torch.zeros(301, 12)}
    as_pickle(tmp_path, {**random_gpt2(), **more})
    weights.import_weights(tmp_path, tmp_path / "ours")


@pytest.mark.parametrize("left", [0, 1, 5000])
def test_a_pickle_that_is_cut_off(left, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    as_pickle(tmp_path, random_gpt2())
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:left])
    said = tool("weights", "import", tmp_path, tmp_path / "ours", code=2)
    assert f"{file} is no whole file of torch.save's: " in said


def test_files_that_are_no_weights(tmp_path):
    assert "no config.json" in tool("weights", "import", tmp_path, tmp_path / "ours", code=2)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert "has none of" in tool("weights", "import", tmp_path, tmp_path / "ours", code=2)
    in_one_file(tmp_path, random_gpt2())
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b'"F64"', b'"I16"'))
    said = tool("weights", "import", tmp_path, tmp_path / "ours", code=2)
    assert "is of dtype I16" in said and "no tensor" not in said
    file.write_bytes(whole[:-8])
    assert "is not whole" in tool("weights", "import", tmp_path, tmp_path / "ours", code=2)
    file.write_bytes(file.read_bytes()[:100])
    assert "no whole safetensors" in tool("weights", "import", tmp_path, tmp_path / "ours", code=2)
    (tmp_path / "config.json").write_text("{nothing}")
    assert "is no JSON" in tool("weights", "import", tmp_path, tmp_path / "ours", code=2)


# ---- our checkpoints -------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What two ranks of ddp have saved."""
    folder = tmp_path_factory.mktemp("saved")
    script("ddp", 2, *PROOF, "--steps", "3", "--no-check", "--save", str(folder))
    return folder


def test_a_plain_file(saved, tmp_path):
    """torch.load and load_state_dict are all that it takes."""
    tool("weights", "plain", saved, tmp_path / "plain.pt")
    model = GPT(GPTConfig(2, 32, 4, 256, 16)).double()
    model.load_state_dict(torch.load(tmp_path / "plain.pt"))
    ids = torch.randint(256, (2, 16))
    assert torch.equal(model(ids), sample.load(saved)[0](ids))
    assert "is there already" in tool("weights", "plain", saved, tmp_path / "plain.pt", code=2)


HYBRID = ("--dp", "2", "--tp", "2", "--pp", "2", "--zero", "2")


def test_from_script_to_script_to_a_plain_file(saved, tmp_path):
    """ddp on 2 ranks, hybrid_3d on 8, fsdp on 4, a plain file: the same logits.

    The rate between them is so small that no number moves.
    """
    still = (*PROOF, "--steps", "1", "--lr", "1e-12", "--no-check")
    hybrid = tmp_path / "hybrid"
    sharded = tmp_path / "sharded"
    script("hybrid_3d", 8, *still, *HYBRID, "--init-from", str(saved), "--save", str(hybrid))
    script("fsdp", 4, *still, "--init-from", str(hybrid), "--save", str(sharded))
    weights.save_plain(sharded, tmp_path / "plain.pt")
    model = build(GPTConfig(2, 32, 4, 256, 16), 0, dtype=torch.float64)
    ids = torch.randint(256, (2, 16))
    fresh = model(ids)
    model.load_state_dict(torch.load(tmp_path / "plain.pt"))
    first = sample.load(saved)[0](ids)
    torch.testing.assert_close(model(ids), first, rtol=0, atol=1e-8)
    assert (fresh - first).abs().max() > 1e-3


def test_ours_goes_out_and_trains_on(saved, tmp_path):
    """Exported and imported, it is the same model: --init-from of both gives the same losses."""
    tool("weights", "export", saved, tmp_path / "theirs")
    said = tool("weights", "import", tmp_path / "theirs", tmp_path / "again")
    flags = (*PROOF, "--no-check", "--init-from")
    assert "--layers 2 --width 32 --heads 4 --vocab 256 --seq 16" in said
    direct = script("ddp", 1, *flags, str(saved))
    around = script("ddp", 1, *flags, str(tmp_path / "again"))
    assert direct["loss"] == around["loss"]
    said = tool("weights", "import", tmp_path / "theirs", tmp_path / "again", code=2)
    assert "has checkpoints already" in said


# ---- Llama's form: folders that Hugging Face's own code has made, see data/make.py -------


def theirs(name):
    folder = ROOT / "tests" / "data" / name
    made = json.loads((folder / "logits.json").read_text())
    return folder, torch.tensor([made["ids"]]), torch.tensor(made["logits"])


def test_llama(tmp_path):
    """Logits as theirs; what goes out is what came in; the cache of key-value heads."""
    folder, ids, logits = theirs("llama")
    weights.import_weights(folder, tmp_path / "ours")
    model, cfg = sample.load(tmp_path / "ours")
    assert (cfg.kv_heads, cfg.theta, cfg.eps) == (1, 5e3, 1e-6)
    torch.testing.assert_close(model(ids)[0], logits, rtol=1e-5, atol=1e-5)
    reader = sample.Reader(model, cfg.seq)
    for token, row in zip(ids[0].tolist(), logits):
        torch.testing.assert_close(reader.read([token]), row, rtol=1e-5, atol=1e-5)
    same_again(folder, tmp_path)


def same_again(folder, tmp_path):
    weights.export_weights(tmp_path / "ours", tmp_path / "back")
    back = weights.read_weights(tmp_path / "back")
    for name, t in weights.read_weights(folder).items():
        assert torch.equal(back.pop(name), t), name
    assert not back
    configs = [json.loads((place / "config.json").read_text())
               for place in (folder, tmp_path / "back")]
    assert weights.sizes_of(configs[0]) == weights.sizes_of(configs[1])


def test_mixtral(tmp_path):
    folder, ids, logits = theirs("mixtral")
    weights.import_weights(folder, tmp_path / "ours")
    state, identity = weights.weights_of(tmp_path / "ours")
    cfg = weights.sizes_in(identity)
    assert (identity["experts"], identity["top_k"]) == (4, 2)
    options = {
        "experts": 4,
        "top_k": 2,
        "shared": False,
        "balance": "none",
        "capacity": 0.0,
    }
    model = moe.mixture(build(cfg, 0), 0, cfg, **options)
    missing = model.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert all(name.endswith("bias_steps") for name in missing.missing_keys)
    moe.set_sources(model, [[torch.arange(16)]])
    torch.testing.assert_close(model(ids)[0], logits, rtol=1e-5, atol=1e-5)
    same_again(folder, tmp_path)


def test_what_is_no_llama_of_ours(tmp_path):
    said = tool("weights", "import", theirs("qwen2")[0], tmp_path / "ours", code=2)
    assert "self_attn.k_proj.bias, which has no place" in said or "q_proj.bias" in said


def test_theirs_trains(tmp_path):
    """Its base of rotary angles and its eps come with it: the same model on two ranks."""
    cfg = GPTConfig(1, 8, 2, 256, 16, "llama", 1, 12, 1e3, 1e-3)
    state = build(cfg, 5).state_dict()
    checkpoint.write_whole(tmp_path, state, cfg._asdict())
    flags = weights.flags_for(cfg).split()
    report = script("ddp", 2, *flags, "--init-from", str(tmp_path), "--steps", "1")
    assert (report["args"]["kv_heads"], report["check"]["passed"]) == (1, True)
    model = build(cfg, 5)
    corpus = load_corpus("", 16)
    x, y, valid = get_batch(corpus, 16, 0, 0, 8)
    loss = loss_sum(model(x), y) / valid
    assert report["loss"][0] == pytest.approx(loss.item(), rel=1e-6)


# ---- text ------------------------------------------------------------------------


def plain_logits(state, window):
    """The plain forward of the window's tokens -> logits of what follows."""
    model = build(GPTConfig(2, 32, 4, 256, 16), 0, dtype=torch.float64)
    model.load_state_dict(state)
    return model(torch.tensor([window]))[0, -1]


def test_the_cache_equals_the_whole_forward(saved):
    """Token by token and by several, and past the 16 positions that the model has."""
    cached = sample.Reader(sample.load(saved)[0], 16)
    uncached = sample.Reader(sample.load(saved)[0], 16, cached=False)
    state = sample.load(saved)[0].state_dict()
    full = 0
    rng = random.Random(0)
    for count in [1] * 30 + [3, 7, 1, 2, 7, 1, 16, 5]:
        tokens = [rng.randrange(256) for _ in range(count)]
        logits = cached.read(tokens)
        full += len(cached.window) == 16
        others = (uncached.read(tokens), plain_logits(state, cached.window))
        for other in others:
            torch.testing.assert_close(logits, other, rtol=0, atol=1e-12)
    assert full >= 2


@pytest.mark.parametrize("seq", [1, 3])
def test_a_context_may_be_short(seq):
    """Each position is one that the model has."""
    model = build(GPTConfig(1, 8, 2, 256, seq), 0).requires_grad_(False)
    cached = list(sample.sample(model, seq, [1, 2], 5, temperature=0))
    uncached = list(sample.sample(model, seq, [1, 2], 5, temperature=0, cached=False))
    assert cached == uncached
    assert len(cached) == 5


def test_what_is_drawn():
    """Temperature 0 is the likeliest; top-k draws from these alone; frequencies are softmax's."""
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])
    rng = torch.Generator().manual_seed(0)
    assert sample.choose(logits, 0, 0, rng) == 1
    drawn = [sample.choose(logits, 0.7, 2, rng) for _ in range(4000)]
    assert set(drawn) == {1, 3}
    likeliest = torch.tensor([3.0, 2.0]) / 0.7
    expected = likeliest.softmax(0)[0].item()
    assert drawn.count(1) / 4000 == pytest.approx(expected, abs=0.03)
    everything = [sample.choose(logits, 2.0, 0, rng) for _ in range(2000)]
    assert set(everything) == {0, 1, 2, 3}


def test_text_from_a_checkpoint(saved):
    words = (saved, "import ", "--tokens", "40", "--temperature", "0")
    text = tool("sample", *words)
    assert text.startswith("import ")
    assert text == tool("sample", *words, "--no-cache")
    said = tool("sample", saved, "--ids", "105 109 112", "--tokens", "5", "--seed", "3")
    assert said.startswith("105 109 112 ")
    assert len(said.split()) == 8
    assert "must be 0 to 255" in tool("sample", saved, "--ids", "256", code=2)
    assert "No such file" in tool("sample", saved / "none", "x", code=2)
    assert "must be 0 or more" in tool("sample", saved, "x", "--top-k", "-1", code=2)


def test_checkpoints_with_experts_are_refused(tmp_path):
    state = build(GPTConfig(1, 8, 2, 256, 4), 0).state_dict()
    identity = {**GPTConfig(1, 8, 2, 256, 4)._asdict(), "experts": 4}
    checkpoint.write_whole(tmp_path, state, identity)
    assert "it has experts" in tool("sample", tmp_path, "x", code=2)


def test_half_a_character_at_the_end_is_shown(monkeypatch, capsys):
    """Of its two bytes only the first one is drawn."""
    model = build(GPTConfig(1, 8, 2, 256, 4), 0)
    cfg = GPTConfig(1, 8, 2, 256, 4)
    monkeypatch.setattr(sample, "load", lambda folder, device: (model, cfg))
    monkeypatch.setattr(sample, "sample", lambda *args, **options: iter([97, 0xC3]))
    monkeypatch.setattr("sys.argv", ["sample.py", "there", "x"])
    sample.main()
    assert capsys.readouterr().out == "xa\ufffd\n"
