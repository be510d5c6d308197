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
import itertools
import json
import math
import re
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from common import FORMS, GPTConfig  # noqa: E402
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
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    data = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)[8 + length:]
    state = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = DTYPES[entry["dtype"]]
        begin, end = entry["data_offsets"]
        if end > len(data) or end - begin != math.prod(entry["shape"]) * dtype.itemsize:
            raise ValueError(f"{name} of {path.name} is not whole")
        part = data[begin:end].clone()  # the file's own bytes need not be aligned
        state[name] = part.view(dtype).view(entry["shape"])
    return state


def write_safetensors(path, state):
    names = {dtype: name for name, dtype in DTYPES.items()}
    header = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, t in state.items():
        offsets = [offset, offset + t.nbytes]
        header[name] = {"dtype": names[t.dtype], "shape": list(t.shape), "data_offsets": offsets}
        offset += t.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for t in state.values():
            t = t.contiguous()
            file.write(ctypes.string_at(t.data_ptr(), t.nbytes))  # NumPy may be missing


def read_weights(folder):
    """Hugging Face's folder -> {name: tensor} as it is there."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        files = [folder / name]
        index = folder / f"{name}.index.json"
        if index.exists():  # several parts
            parts = json.loads(index.read_text())["weight_map"].values()
            files = [folder / Path(part).name for part in sorted(set(parts))]
        if files[0].exists():
            break
    if files[0].suffix == ".safetensors":
        parts = map(read_safetensors, files)
    else:
        parts = [torch.load(path, map_location="cpu", weights_only=True) for path in files]
    return {name: t for part in parts for name, t in part.items()}


# ---- config.json -----------------------------------------------------------------

# What our GPT computes. Other values would be another model under the same names.
GPT2 = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
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
    sizes = {name: config[name] for name in (GPT2_SIZES if is_gpt2 else LLAMA_SIZES)}
    for name, size in sizes.items():
        require(type(size) is int and size > 0, f"config.json: {name} is {size}, no size")
    if is_gpt2:
        _, width, heads, *_ = sizes.values()
        require(width % heads == 0, f"config.json: {heads} heads do not divide a width of {width}")
        inner = config.get("n_inner") or 4 * width
        require(inner == 4 * width, f"config.json: n_inner is {inner}, and must be 4 x {width}")
        return GPTConfig(*sizes.values(), kv_heads=heads, hidden=inner)
    return llama_sizes(config, list(sizes.values()))


def llama_sizes(config, sizes):
    layers, width, heads, vocab, seq, kv_heads, hidden = sizes
    head_dim = config.get("head_dim") or width // heads
    require(head_dim * heads == width,
            f"config.json: head_dim is {head_dim}, not {width} / {heads}")
    window = config.get("sliding_window")
    require(window is None or window >= seq or config["model_type"] == "qwen2",
            f"config.json: sliding_window is {window}, less than its {seq} positions")
    rotary = config.get("rope_parameters") or {}
    kind = rotary.get("rope_type", "default")
    require(kind == "default", f"config.json: rope_type is {kind}, and must be default")
    theta = rotary.get("rope_theta", config.get("rope_theta", 1e4))
    return GPTConfig(*sizes[:5], FORMS["llama"], kv_heads, hidden, theta=float(theta),
                     eps=config["rms_norm_eps"])


def config_of(cfg, dtype, experts, top_k):
    """GPTConfig -> config.json. experts: how many a layer has, 0: an MLP."""
    fixed = LLAMA
    sizes = dict(zip(LLAMA_SIZES, (*cfg[:5], cfg.kv_heads, cfg.hidden)))
    more = {"architectures": ["LlamaForCausalLM"], "rope_theta": cfg.theta,
            "rms_norm_eps": cfg.eps, "head_dim": cfg.width // cfg.heads}
    if experts:
        more.update(architectures=["MixtralForCausalLM"], model_type="mixtral",
                    num_local_experts=experts, num_experts_per_tok=top_k)
    if cfg.form.learned_positions:
        fixed = GPT2
        sizes = dict(zip(GPT2_SIZES, cfg))
        more = {"architectures": ["GPT2LMHeadModel"], "n_ctx": cfg.seq, "n_inner": None,
                "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    plain = {name: possible[0] for name, possible in fixed.items()}
    return {**plain, **sizes, "torch_dtype": str(dtype).removeprefix("torch."), **more}


# ---- names ---------------------------------------------------------------------

GPT2_ENDS = {"wte.weight": "tok.weight", "wpe.weight": "pos.weight",
             "ln_f.weight": "norm.weight", "ln_f.bias": "norm.bias"}
GPT2_BLOCK = {"ln_1": ["norm1"], "ln_2": ["norm2"], "attn.c_attn": ["attn.q", "attn.k", "attn.v"],
              "attn.c_proj": ["attn.out"], "mlp.c_fc": ["mlp.up"], "mlp.c_proj": ["mlp.down"]}
LLAMA_ENDS = {"model.embed_tokens.weight": "tok.weight", "model.norm.weight": "norm.weight",
              "lm_head.weight": "head.weight"}
LLAMA_BLOCK = {
    "input_layernorm": "norm1", "post_attention_layernorm": "norm2", "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k", "self_attn.v_proj": "attn.v", "self_attn.o_proj": "attn.out",
}
MLP = {"mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"}
EXPERT = {"w1": "gate", "w3": "up", "w2": "down"}
# not read: the causal mask and angles, which older files hold, and GPT-2's head, which is wte
NOT_READ = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|lm_head\.weight|.*rotary_emb\.inv_freq")


def names_of(cfg, experts):
    """-> {their name: [ours]}; in one tensor of GPT-2's q, k and v are one beside the other."""
    found = {}
    if cfg.form.learned_positions:
        for i, kind in itertools.product(range(cfg.layers), ("weight", "bias")):
            for theirs, ours in GPT2_BLOCK.items():
                found[f"h.{i}.{theirs}.{kind}"] = [f"blocks.{i}.{name}.{kind}" for name in ours]
        return {**{theirs: [ours] for theirs, ours in GPT2_ENDS.items()}, **found}
    block = {**LLAMA_BLOCK, **MLP}
    if experts:
        block = {**LLAMA_BLOCK, "block_sparse_moe.gate": "mlp.router"}
    for e in range(experts):
        for theirs, ours in EXPERT.items():
            block[f"block_sparse_moe.experts.{e}.{theirs}"] = f"mlp.experts.{e}.{ours}"
    for i in range(cfg.layers):
        for theirs, ours in block.items():
            found[f"model.layers.{i}.{theirs}.weight"] = [f"blocks.{i}.{ours}.weight"]
    return {**{theirs: [ours] for theirs, ours in LLAMA_ENDS.items()}, **found}


def turned(theirs, t):
    """GPT-2's matrices are (in, out), as in Y = X A."""
    return t.t() if theirs.startswith("h.") else t


def from_theirs(state, cfg, experts):
    """Their tensors -> ours, by the names of the plain GPT. KeyError if one is missing, ValueError
    if one has no place here."""
    state = {name.removeprefix("transformer."): t for name, t in state.items()}
    ours = {}
    for theirs, names in names_of(cfg, experts).items():
        parts = turned(theirs, state.pop(theirs)).chunk(len(names))
        ours.update(zip(names, parts))
    for name in state:
        if not NOT_READ.fullmatch(name):
            raise ValueError(f"the weights have {name}, which has no place in this model")
    return {name: t.contiguous() for name, t in ours.items()}


def to_theirs(state, cfg, experts):
    """The inverse."""
    prefix = "transformer." if cfg.form.learned_positions else ""
    theirs = {}
    for name, ours in names_of(cfg, experts).items():
        theirs[prefix + name] = turned(name, torch.cat([state[part] for part in ours]))
    return theirs


# ---- our checkpoints -----------------------------------------------------------


def weights_of(folder):
    """A folder of checkpoints, or one -> the newest one's weights, by name, and the identity of
    the model."""
    # in the place of a flag, for the line of an error: "checkpoints in DIR: no checkpoint there"
    place, notes = checkpoint.newest(folder, "checkpoints in")
    return checkpoint.read_whole(place), notes["identity"]


def sizes_in(identity):
    """-> GPTConfig of a checkpoint."""
    found = {name: identity[name] for name in GPTConfig._fields if name in identity}
    return GPTConfig(**{**found, "form": FORMS[found["form"]]})


# ---- what the program does -----------------------------------------------------


def import_weights(source, target):
    folder = Path(source)
    require(not checkpoint.numbered(target), f"{target}: has checkpoints already")
    config = json.loads((folder / "config.json").read_text())
    cfg = sizes_of(config)
    identity = {**cfg.resolved()._asdict(), "form": cfg.form.name}
    words = flags_for(cfg)
    experts = config.get("num_local_experts", 0)
    if experts:
        identity |= {"experts": experts, "top_k": config["num_experts_per_tok"]}
        words += f" --experts {experts} --top-k {identity['top_k']}"
    state = from_theirs(read_weights(folder), cfg, experts)
    checkpoint.write_whole(target, state, identity)
    print(f"{sum(t.numel() for t in state.values()):,} parameters\n--init-from {target}{words}")


def flags_for(cfg):
    """What a run has to be told beside --init-from."""
    words = ""
    for name in ("layers", "width", "heads", "vocab", "seq"):
        words += f" --{name} {getattr(cfg, name)}"
    if not cfg.form.learned_positions:
        words += f" --model llama-toy --kv-heads {cfg.kv_heads} --hidden {cfg.hidden}"
    return words


def export_weights(source, target):
    state, identity = weights_of(source)
    cfg = sizes_in(identity)
    experts = identity.get("experts", 0)
    require(not experts or not cfg.form.learned_positions,
            f"{source}: GPT-2 with experts has no format there")
    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    require(not any(folder.iterdir()), f"{target}: is not empty")
    config = config_of(cfg, state["tok.weight"].dtype, experts, identity.get("top_k"))
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    write_safetensors(folder / "model.safetensors", to_theirs(state, cfg, experts))
    print(f"{sum(t.numel() for t in state.values()):,} parameters in {target}")


def save_plain(source, target):
    require(not Path(target).exists(), f"{target}: is there already")
    state, identity = weights_of(source)
    if FORMS[identity.get("form", "gpt2")].tied and "tok.weight" in state:
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
    except KeyError as missing:
        require(False, f"{args.source}: has no {missing}")
    except (ValueError, AttributeError, TypeError) as error:  # the last two: JSON of another kind
        require(False, f"{args.source}: {error}")


if __name__ == "__main__":
    main()
