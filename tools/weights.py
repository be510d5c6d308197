"""Weights from elsewhere, and for elsewhere: as Hugging Face keeps them, and plain files.

    python tools/weights.py import FOLDER DIR       GPT-2, Llama, Mixtral -> for --init-from DIR
    python tools/weights.py export DIR FOLDER       back: config.json and model.safetensors
    python tools/weights.py plain DIR FILE.pt       the plain GPT's state_dict, for torch.load

FOLDER has a config.json beside model.safetensors or pytorch_model.bin, whole or in several parts.
DIR is what --save of any script has written, on any number of ranks: the newest checkpoint in it is
taken. Nothing but torch is needed, and nothing in these files can run code.

What differs there, for a layer of width C:

    GPT-2   h.3.attn.c_attn.weight   (C, 3C)    blocks.3.attn.q.weight, k, v   (C, C) each
            h.3.mlp.c_fc.weight      (C, 4C)    blocks.3.mlp.up.weight         (4C, C)
    Llama   model.layers.3.self_attn.q_proj     blocks.3.attn.q                the same shape
    Mixtral ..block_sparse_moe.experts.5.w1     blocks.3.mlp.experts.5.gate    the same shape

GPT-2's matrices are transposed (Y = X A, a Conv1D), and q, k and v are one beside the other. Pairs
of rotary positions are the two halves of a head, there as here. Biases of q, k and v (Qwen2), heads
tied to the embedding, stretched rotary positions and sliding windows are refused.
"""
import argparse
import ctypes
import json
import math
import re
import struct
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch can do without
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from common import GPTConfig  # noqa: E402
from harness import checkpoint  # noqa: E402
from harness.usage import require  # noqa: E402

# ---- safetensors ---------------------------------------------------------------
# 8 bytes: the size of the header; the header, JSON: {name: {dtype, shape, data_offsets}}; the data

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool,
}


def read_safetensors(path):
    """-> {name: tensor}. The file is mapped, not read, until a tensor is copied out of it."""
    size = Path(path).stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise ValueError(f"{path} is no whole safetensors file")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"{path}: its header has no names")
    data = torch.from_file(str(path), size=size, dtype=torch.uint8)[8 + length:]
    state = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{path}: {name} is of dtype {entry['dtype']}, which is unknown here: "
                             f"save it as one of {', '.join(DTYPES)}")
        dtype = DTYPES[entry["dtype"]]
        begin, end = entry["data_offsets"]
        if end > len(data) or end - begin != math.prod(entry["shape"]) * dtype.itemsize:
            raise ValueError(f"{path}: {name} is not whole")
        part = data[begin:end].clone()  # the file's own bytes need not be aligned
        state[name] = part.view(dtype).view(entry["shape"])
    return state


def write_safetensors(path, state):
    names = {dtype: name for name, dtype in DTYPES.items()}
    header = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, t in state.items():
        header[name] = {
            "dtype": names[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [offset, offset + t.nbytes],
        }
        offset += t.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for t in state.values():
            t = t.contiguous()
            file.write(ctypes.string_at(t.data_ptr(), t.nbytes))  # NumPy may be missing


# ---- Hugging Face's folder -----------------------------------------------------

MODELS = ("model.safetensors", "pytorch_model.bin")


def files_of(folder):
    """-> the files that hold the weights."""
    for name in MODELS:
        if (folder / name).exists():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.exists():
            table = json.loads(index.read_text())
            if not (isinstance(table, dict) and isinstance(table.get("weight_map"), dict)):
                raise ValueError(f"{index}: has no weight_map")
            parts = set(map(str, table["weight_map"].values()))
            return [folder / Path(part).name for part in sorted(parts)]
    require(False, f"{folder}: has none of {', '.join(MODELS)}")


def read_weights(folder):
    """-> {name: tensor} as it is there."""
    state = {}
    for path in files_of(folder):
        if path.suffix == ".safetensors":
            state.update(read_safetensors(path))
        else:
            state.update(read_pickled(path))
    return state


def read_pickled(path):
    """-> {name: tensor} of a file that torch.save has written; ValueError if it is not whole."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes can make torch.load raise anything
        if getattr(error, "filename", None):
            raise  # the operating system's: it cannot be opened
        why = str(error).splitlines() or ["it ends too early"]
        raise ValueError(f"{path} is no whole file of torch.save's: {why[0]}") from error


# What our GPT computes. Other values would be another model under the same names.
GPT2 = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
LLAMA = {
    "model_type": ("llama", "mistral", "mixtral", "qwen2"),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "tie_word_embeddings": (False,),
    "rope_scaling": (None,),
    "use_sliding_window": (False,),
}
GPT2_SIZES = ("n_layer", "n_embd", "n_head", "vocab_size", "n_positions")
LLAMA_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size",
               "max_position_embeddings", "num_key_value_heads", "intermediate_size")


def sizes_of(config):
    """config.json -> GPTConfig. What our GPT is not is bad usage."""
    is_gpt2 = config.get("model_type") == "gpt2"
    for name, possible in (GPT2 if is_gpt2 else LLAMA).items():
        value = config.get(name, possible[0])
        require(value in possible, f"config.json: {name} is {value}, and must be {possible[0]}")
    sizes = []
    names = GPT2_SIZES if is_gpt2 else LLAMA_SIZES
    for name in names:
        value = config.get(name)
        require(type(value) is int and value > 0, f"config.json: {name} is {value}, no size")
        sizes.append(value)
    layers, width, heads, *rest = sizes
    require(width % heads == 0, f"config.json: {heads} heads do not divide a width of {width}")
    if is_gpt2:
        inner = config.get("n_inner") or 4 * width
        require(inner == 4 * width, f"config.json: n_inner is {inner}, and must be 4 x {width}")
        return GPTConfig(*sizes, kv_heads=heads, hidden=inner)
    return llama_sizes(config, sizes)


def llama_sizes(config, sizes):
    layers, width, heads, vocab, seq, kv_heads, hidden = sizes
    head_dim = config.get("head_dim") or width // heads
    require(head_dim * heads == width,
            f"config.json: head_dim is {head_dim}, not {width} / {heads}")
    require(heads % kv_heads == 0, f"config.json: {kv_heads} key-value heads for {heads} heads")
    window = config.get("sliding_window")
    require(window is None or window >= seq or config["model_type"] == "qwen2",
            f"config.json: sliding_window is {window}, less than its {seq} positions")
    rotary = config.get("rope_parameters") or {}
    kind = rotary.get("rope_type", "default")
    require(kind == "default", f"config.json: rope_type is {kind}, and must be default")
    theta = rotary.get("rope_theta", config.get("rope_theta", 1e4))
    return GPTConfig(*sizes[:5], "llama", kv_heads, hidden, float(theta), config["rms_norm_eps"])


def config_of(cfg, dtype, experts):
    """GPTConfig -> config.json. experts: (E, K) or None."""
    kind = {"torch_dtype": str(dtype).removeprefix("torch.")}
    if cfg.form == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"],
            **dict(zip(GPT2_SIZES, cfg)), "n_ctx": cfg.seq, "n_inner": None,
            "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, **kind,
            **{name: possible[0] for name, possible in GPT2.items()},
        }
    found = {"architectures": ["LlamaForCausalLM"],
             **{name: possible[0] for name, possible in LLAMA.items()}}
    if experts:
        found["architectures"] = ["MixtralForCausalLM"]
        found["model_type"] = "mixtral"
        found["num_local_experts"], found["num_experts_per_tok"] = experts
    sizes = (*cfg[:5], cfg.kv_heads, cfg.hidden)
    return {**found, **dict(zip(LLAMA_SIZES, sizes)), "rope_theta": cfg.theta,
            "rms_norm_eps": cfg.eps, "head_dim": cfg.width // cfg.heads, **kind}


# ---- names ---------------------------------------------------------------------

ENDS = {"wte.weight": "tok.weight", "wpe.weight": "pos.weight",
        "ln_f.weight": "norm.weight", "ln_f.bias": "norm.bias"}
NORMS = {"ln_1": "norm1", "ln_2": "norm2"}
MATRICES = {"attn.c_proj": "attn.out", "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}
FUSED = ("attn.q", "attn.k", "attn.v")  # one beside the other in attn.c_attn
# not read: the causal mask, which older files hold, and the head, which is wte.weight
NOT_READ = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|lm_head\.weight")


def from_theirs(state, layers):
    """Their tensors -> ours, by the names of the plain GPT.

    Raises KeyError if one is missing, ValueError if one has no place here.
    """
    state = {name.removeprefix("transformer."): t for name, t in state.items()}
    ours = {our_name: state.pop(name) for name, our_name in ENDS.items()}
    for i in range(layers):
        their_block = f"h.{i}"
        our_block = f"blocks.{i}"
        for kind in ("weight", "bias"):
            for name, our_name in NORMS.items():
                ours[f"{our_block}.{our_name}.{kind}"] = state.pop(f"{their_block}.{name}.{kind}")
            for name, our_name in MATRICES.items():
                theirs = state.pop(f"{their_block}.{name}.{kind}")
                ours[f"{our_block}.{our_name}.{kind}"] = theirs.t()  # of a bias: itself
            fused = state.pop(f"{their_block}.attn.c_attn.{kind}").t()  # (3C, C), or (3C)
            for our_name, part in zip(FUSED, fused.chunk(3)):
                ours[f"{our_block}.{our_name}.{kind}"] = part
    for name in state:
        if not NOT_READ.fullmatch(name):
            raise ValueError(f"the weights have {name}, which a GPT-2 of {layers} layers has not")
    return {name: t.contiguous() for name, t in ours.items()}


def to_theirs(state, layers):
    """The inverse."""
    theirs = {name: state[our_name] for name, our_name in ENDS.items()}
    for i in range(layers):
        their_block = f"h.{i}"
        our_block = f"blocks.{i}"
        for kind in ("weight", "bias"):
            for name, our_name in NORMS.items():
                theirs[f"{their_block}.{name}.{kind}"] = state[f"{our_block}.{our_name}.{kind}"]
            for name, our_name in MATRICES.items():
                theirs[f"{their_block}.{name}.{kind}"] = state[f"{our_block}.{our_name}.{kind}"].t()
            parts = [state[f"{our_block}.{our_name}.{kind}"] for our_name in FUSED]
            theirs[f"{their_block}.attn.c_attn.{kind}"] = torch.cat(parts).t()
    return {f"transformer.{name}": t.contiguous() for name, t in theirs.items()}


LLAMA_ENDS = {"tok.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
              "head.weight": "lm_head.weight"}
LLAMA_BLOCK = {
    "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
    "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj",
    "attn.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}
EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}


def llama_names(layers, experts):
    """-> {our name: theirs}. experts: how many a layer has, 0: an MLP."""
    names = dict(LLAMA_ENDS)
    for i in range(layers):
        ours = f"blocks.{i}"
        theirs = f"model.layers.{i}"
        for ours_part, theirs_part in LLAMA_BLOCK.items():
            if not (experts and ours_part.startswith("mlp.")):
                names[f"{ours}.{ours_part}.weight"] = f"{theirs}.{theirs_part}.weight"
        if experts:
            names[f"{ours}.mlp.router.weight"] = f"{theirs}.block_sparse_moe.gate.weight"
        for e in range(experts):
            for ours_part, theirs_part in EXPERT.items():
                names[f"{ours}.mlp.experts.{e}.{ours_part}.weight"] = (
                    f"{theirs}.block_sparse_moe.experts.{e}.{theirs_part}.weight")
    return names


def from_llama(state, layers, experts):
    """As from_theirs."""
    state = dict(state)
    ours = {name: state.pop(theirs) for name, theirs in llama_names(layers, experts).items()}
    for name in state:
        if not name.endswith("rotary_emb.inv_freq"):  # older files have it
            raise ValueError(f"the weights have {name}, which has no place in this model")
    return {name: t.contiguous() for name, t in ours.items()}


def to_llama(state, layers, experts):
    names = llama_names(layers, experts)
    return {theirs: state[name].contiguous() for name, theirs in names.items()}


# ---- our checkpoints -----------------------------------------------------------


def weights_of(folder):
    """A folder of checkpoints, or one -> the newest one's weights, by name, and the identity of
    the model."""
    # in the place of a flag, for the line of an error: "checkpoints in DIR: no checkpoint there"
    passed = {}
    while True:
        place, notes = checkpoint.newest(folder, "checkpoints in", passed)
        wrong = checkpoint.damage(place, notes["files"])
        if not wrong:
            break
        passed[place] = wrong
    state = checkpoint.read_whole(place)
    weights = {name: t for name, t in state.items() if not checkpoint.is_state(name)}
    return weights, notes["identity"]


def sizes_in(identity):
    """-> GPTConfig of a checkpoint."""
    return GPTConfig(**{name: identity[name] for name in GPTConfig._fields if name in identity})


def plain_sizes(folder, identity):
    """-> GPTConfig of a checkpoint that holds the plain GPT."""
    require(not identity.get("experts"), f"{folder}: it has experts, which the plain GPT has not")
    return sizes_in(identity)


# ---- what the program does -----------------------------------------------------


def import_weights(source, target):
    folder = Path(source)
    require((folder / "config.json").is_file(), f"{source}: has no config.json")
    require(not checkpoint.numbered(target), f"{target}: has checkpoints already")
    try:
        config = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        require(False, f"{source}: config.json is no JSON: {error}")
    require(isinstance(config, dict), f"{source}: config.json has no names")
    cfg = sizes_of(config)
    identity = cfg._asdict()
    words = flags_for(cfg)
    experts = config.get("num_local_experts", 0)
    if experts:
        identity["experts"] = experts
        identity["top_k"] = config.get("num_experts_per_tok", 2)
        words += f" --experts {experts} --top-k {identity['top_k']}"
    try:
        state = read_weights(folder)
        if cfg.form == "gpt2":
            state = from_theirs(state, cfg.layers)
        else:
            state = from_llama(state, cfg.layers, experts)
    except KeyError as missing:
        require(False, f"{source}: has no tensor {missing}")
    except ValueError as error:
        require(False, str(error))
    checkpoint.write_whole(target, state, identity)
    print(f"{sum(t.numel() for t in state.values()):,} parameters\n--init-from {target}{words}")


def flags_for(cfg):
    """What a run has to be told beside --init-from."""
    names = ["layers", "width", "heads", "vocab", "seq"]
    words = ""
    if cfg.form == "llama":
        names += ["kv_heads", "hidden"]
        words = " --model llama-toy"
    for name in names:
        words += f" --{name.replace('_', '-')} {getattr(cfg, name)}"
    return words


def export_weights(source, target):
    state, identity = weights_of(source)
    cfg = sizes_in(identity)
    experts = identity.get("experts", 0)
    require(not experts or cfg.form == "llama", f"{source}: GPT-2 with experts has no format there")
    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    require(not any(folder.iterdir()), f"{target}: is not empty")
    chosen = (experts, identity["top_k"]) if experts else None
    config = config_of(cfg, state["tok.weight"].dtype, chosen)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    if cfg.form == "gpt2":
        theirs = to_theirs(state, cfg.layers)
    else:
        theirs = to_llama(state, cfg.layers, experts)
    write_safetensors(folder / "model.safetensors", theirs)
    print(f"{sum(t.numel() for t in state.values()):,} parameters in {target}")


def save_plain(source, target):
    require(not Path(target).exists(), f"{target}: is there already")
    state, identity = weights_of(source)
    if identity.get("form", "gpt2") == "gpt2" and "tok.weight" in state:
        state["head.weight"] = state["tok.weight"]  # tied: one tensor, in the file as well
    torch.save(state, target)
    print(f"{len(state)} tensors in {target}")


TASKS = {"import": import_weights, "export": export_weights, "plain": save_plain}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.error = lambda message: require(False, message)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("source")
    parser.add_argument("target")
    args = parser.parse_args()
    try:
        TASKS[args.task](args.source, args.target)
    except OSError as error:
        require(False, f"{error.filename}: {error.strerror}")


if __name__ == "__main__":
    main()
