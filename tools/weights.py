"""Weights from elsewhere, and for elsewhere: as Hugging Face keeps them.

    python tools/weights.py import FOLDER DIR       their weights -> for --init-from DIR
    python tools/weights.py export DIR FOLDER       back: config.json and model.safetensors

GPT-2, Llama (Mistral), Mixtral, Qwen3 and Qwen3-MoE. FOLDER has a config.json beside
model.safetensors, for which `pip install safetensors` is needed, or pytorch_model.bin, whole or in
several parts. DIR is what --save of any script has written: the newest checkpoint in it is taken.

What differs there, for a layer of width C:

    GPT-2      h.3.attn.c_attn.weight   (C, 3C)    blocks.3.attn.q.weight, k, v   (C, C) each
               h.3.mlp.c_fc.weight      (C, 4C)    blocks.3.mlp.up.weight         (4C, C)
    Llama      model.layers.3.self_attn.q_proj     blocks.3.attn.q                the same shape
    Mixtral    ..block_sparse_moe.experts.5.w1     blocks.3.mlp.experts.5.gate    the same shape
    Qwen3-MoE  ..mlp.experts.5.gate_proj           blocks.3.mlp.experts.5.gate    the same shape

GPT-2's matrices are transposed (Y = X A, a Conv1D), and q, k and v are one beside the other. Pairs
of rotary positions are the two halves of a head, there as here. Biases of q, k and v (Qwen2),
Llama's head tied to the embedding, stretched rotary positions and sliding windows are refused.
"""
import json
import re
import sys
from collections import namedtuple
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

import moe  # noqa: E402
from common import FORMS, GPT, PRESETS, GPTConfig  # noqa: E402
from harness import checkpoint  # noqa: E402
from harness.flags import parse, require  # noqa: E402

# ---- their files ---------------------------------------------------------------


def safetensors():
    """The library, which only this tool needs."""
    try:
        import safetensors.torch
    except ImportError:
        require(False, "model.safetensors wants the library of that name: pip install safetensors")
    return safetensors.torch


def read_weights(folder):
    """Hugging Face's folder -> {name: tensor} as it is there, in one file or in several parts."""
    state = {}
    for name in ("model.safetensors", "model-*.safetensors"):
        for path in folder.glob(name):
            state.update(safetensors().load_file(path))
    if state:
        return state
    for name in ("pytorch_model.bin", "pytorch_model-*.bin"):
        for path in folder.glob(name):
            state.update(torch.load(path, map_location="cpu", weights_only=True))
    return state


# ---- the models ------------------------------------------------------------------

# What our GPT computes. Other values would be another model under the same names.
GPT2 = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "tie_word_embeddings": (True,),
}
LLAMA = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "tie_word_embeddings": (False,),
    "rope_scaling": (None,),
    "use_sliding_window": (False,),
}
QWEN3 = {**LLAMA, "tie_word_embeddings": (False, True)}
QWEN3_MOE = {**QWEN3, "norm_topk_prob": (True,), "decoder_sparse_step": (1,),
             "mlp_only_layers": ([], None)}
# what their classes take where config.json is silent, if it is not what must_be begins with
SILENT = {"mistral": {"sliding_window": 4096}, "mixtral": {"rope_theta": 1e6},
          "qwen3_moe": {"norm_topk_prob": False}}
# {ours: theirs}
GPT2_SIZES = {"layers": "n_layer", "width": "n_embd", "heads": "n_head", "vocab": "vocab_size",
              "seq": "n_positions"}
SIZES = {"layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
         "vocab": "vocab_size", "seq": "max_position_embeddings",
         "kv_heads": "num_key_value_heads", "hidden": "intermediate_size"}
QWEN3_MOE_SIZES = {**SIZES, "hidden": "moe_intermediate_size"}  # of an expert
# {a word of our names: theirs}; what is not here is called the same
GPT2_WORDS = {"tok": "wte", "pos": "wpe", "norm": "ln_f", "blocks": "h", "norm1": "ln_1",
              "norm2": "ln_2", "q": "c_attn", "k": "c_attn", "v": "c_attn", "out": "c_proj",
              "up": "c_fc", "down": "c_proj"}
WORDS = {"tok": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
         "blocks": "model.layers", "norm1": "input_layernorm",
         "norm2": "post_attention_layernorm", "attn": "self_attn", "q": "q_proj", "k": "k_proj",
         "v": "v_proj", "out": "o_proj", "gate": "gate_proj", "up": "up_proj",
         "down": "down_proj", "router": "gate"}
MIXTRAL_WORDS = {**WORDS, "mlp": "block_sparse_moe", "gate": "w1", "up": "w3", "down": "w2"}

# experts: what config.json calls their number; new files say either for both
Kind = namedtuple("Kind", "architecture must_be sizes words experts", defaults=(None,))
KINDS = {  # by model_type
    "gpt2": Kind("GPT2LMHeadModel", GPT2, GPT2_SIZES, GPT2_WORDS),
    "llama": Kind("LlamaForCausalLM", LLAMA, SIZES, WORDS),
    "mistral": Kind("MistralForCausalLM", LLAMA, SIZES, WORDS),
    "mixtral": Kind("MixtralForCausalLM", LLAMA, SIZES, MIXTRAL_WORDS, "num_local_experts"),
    "qwen3": Kind("Qwen3ForCausalLM", QWEN3, SIZES, WORDS),
    "qwen3_moe": Kind("Qwen3MoeForCausalLM", QWEN3_MOE, QWEN3_MOE_SIZES, WORDS, "num_experts"),
}


def kind_of(cfg, experts):
    """-> the model_type of what ours would be there"""
    if cfg.form.learned_positions:
        return "gpt2"
    if cfg.form.qk_norm:
        return "qwen3_moe" if experts else "qwen3"
    return "mixtral" if experts else "llama"


# ---- config.json -----------------------------------------------------------------


def refuse(name, value, possible):
    require(value in possible, f"config.json: {name} is {value}, and must be {possible[0]}")


def sizes_of(config):
    """config.json -> GPTConfig, how many experts a layer has. What our GPT is not is bad usage."""
    name = config.get("model_type")
    require(name in KINDS, f"config.json: model_type is {name}, not one of {', '.join(KINDS)}")
    kind = KINDS[name]
    config = {**SILENT.get(name, {}), **config}
    if name == "llama":  # the first ones had no heads of keys and values
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
    for setting, possible in kind.must_be.items():
        refuse(setting, config.get(setting, possible[0]), possible)
    sizes = {ours: config[theirs] for ours, theirs in kind.sizes.items()}
    width = sizes["width"]
    heads = sizes["heads"]
    if name == "gpt2":
        require(width % heads == 0, f"config.json: {heads} heads do not divide a width of {width}")
        refuse("n_inner", config.get("n_inner") or 4 * width, (4 * width,))
        return GPTConfig(**sizes).resolved(), 0
    form = "llama"
    if kind.must_be in (QWEN3, QWEN3_MOE):
        form = "qwen3-tied" if config.get("tie_word_embeddings") else "qwen3"
    else:
        window = config.get("sliding_window")
        require(window is None or window >= sizes["seq"],
                f"config.json: a sliding_window of {window} is shorter than {sizes['seq']}")
    rotary = config.get("rope_parameters") or {}
    refuse("rope_type", rotary.get("rope_type", "default"), ("default",))
    experts = 0
    if kind.experts:
        experts = config.get("num_experts") or config["num_local_experts"]
    return GPTConfig(
        **sizes, form=FORMS[form], head_dim=config.get("head_dim") or width // heads,
        theta=float(rotary.get("rope_theta", config.get("rope_theta", 1e4))),
        eps=config["rms_norm_eps"]), experts


def config_of(cfg, dtype, experts, top_k):
    """The inverse -> config.json. experts: how many a layer has, 0: an MLP."""
    name = kind_of(cfg, experts)
    kind = KINDS[name]
    config = {setting: possible[0] for setting, possible in kind.must_be.items()}
    config.update({theirs: getattr(cfg, ours) for ours, theirs in kind.sizes.items()})
    config.update(model_type=name, architectures=[kind.architecture],
                  torch_dtype=str(dtype).removeprefix("torch."))
    if name == "gpt2":
        return {**config, "n_ctx": cfg.seq, "n_inner": None,
                "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    config.update(tie_word_embeddings=cfg.form.tied, rope_theta=cfg.theta, rms_norm_eps=cfg.eps,
                  head_dim=cfg.head_dim, intermediate_size=cfg.hidden)
    if experts:
        config.update({kind.experts: experts, "num_experts_per_tok": top_k})
    return config


# ---- names ---------------------------------------------------------------------

# not read: the causal mask and angles, which older files hold, and a head that is the embedding
NOT_READ = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|lm_head\.weight|.*rotary_emb\.inv_freq")


def names_of(cfg, experts):
    """-> {their name: [ours]}; in one tensor of GPT-2's q, k and v are one beside the other."""
    words = KINDS[kind_of(cfg, experts)].words
    if experts:
        cfg = moe.mixture(cfg, experts=experts, top_k=1)
    with torch.device("meta"):
        plain = GPT(cfg)
    found = {}
    for name, _ in plain.named_parameters():
        theirs = ".".join(words.get(word, word) for word in name.split("."))
        found.setdefault(theirs, []).append(name)
    return found


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
    """The inverse. ValueError if theirs has no place for one of ours: a shared expert."""
    prefix = "transformer." if cfg.form.learned_positions else ""
    state = dict(state)
    theirs = {}
    for name, ours in names_of(cfg, experts).items():
        whole = turned(name, torch.cat([state.pop(part) for part in ours]))
        theirs[prefix + name] = whole.contiguous()
    for name in state:
        raise ValueError(f"the weights have {name}, which has no place in theirs")
    return theirs


# ---- our checkpoints -----------------------------------------------------------


def weights_of(folder):
    """A folder of checkpoints, or one -> the newest one's weights, by name, and the identity of
    the model."""
    # in the place of a flag, for the line of an error, "checkpoints in DIR: no whole .."
    place, notes = checkpoint.newest(folder, "checkpoints in")
    with checkpoint.loading("checkpoints in", place):
        return checkpoint.read_whole(place), notes["identity"]


def sizes_in(identity):
    """-> GPTConfig of a checkpoint."""
    found = {name: identity[name] for name in GPTConfig._fields if name in identity}
    return GPTConfig(**{**found, "form": FORMS[found["form"]]})


def import_weights(source, target):
    folder = Path(source)
    require(not checkpoint.numbered(target), f"{target}: has checkpoints already")
    config = json.loads((folder / "config.json").read_text())
    cfg, experts = sizes_of(config)
    identity = {**cfg._asdict(), "form": cfg.form.name}
    words = flags_for(cfg)
    if experts:
        identity |= {"experts": experts, "top_k": config["num_experts_per_tok"]}
        words += f" --experts {experts} --top-k {identity['top_k']}"
    state = from_theirs(read_weights(folder), cfg, experts)
    checkpoint.write_whole(target, state, identity)
    print(f"{sum(t.numel() for t in state.values()):,} parameters\n--init-from {target}{words}")


def flags_for(cfg):
    """What a run has to be told beside --init-from."""
    preset = next(name for name, preset in PRESETS.items() if preset.form == cfg.form)
    names = list(GPT2_SIZES)
    if not cfg.form.learned_positions:
        names = [*SIZES, "head_dim"]
    sizes = [f" --{name.replace('_', '-')} {getattr(cfg.resolved(), name)}" for name in names]
    return f" --model {preset}" + "".join(sizes)


def export_weights(source, target):
    state, identity = weights_of(source)
    library = safetensors()
    cfg = sizes_in(identity).resolved()
    experts = identity.get("experts", 0)
    require(not experts or not cfg.form.learned_positions,
            f"{source}: GPT-2 with experts has no format there")
    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    require(not any(folder.iterdir()), f"{target}: is not empty")
    config = config_of(cfg, state["tok.weight"].dtype, experts, identity.get("top_k"))
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    theirs = to_theirs(state, cfg, experts)
    library.save_file(theirs, folder / "model.safetensors", metadata={"format": "pt"})
    print(f"{sum(t.numel() for t in state.values()):,} parameters in {target}")


TASKS = {"import": import_weights, "export": export_weights}


def main():
    args = parse(__doc__, {
        "task": dict(choices=TASKS, help="from their files, or to them"),
        "source": dict(help="import: a folder of theirs; export: what --save has written"),
        "target": dict(help="a new folder")})
    try:
        TASKS[args.task](args.source, args.target)
    except KeyError as missing:
        require(False, f"{args.source}: has no {missing}")
    except Exception as error:  # not there, of another kind than it says, or not whole
        require(False, f"{getattr(error, 'filename', args.source)}: {checkpoint.reason(error)}")


if __name__ == "__main__":
    main()
