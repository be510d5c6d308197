"""How the folders beside this file were made: python tests/data/make.py tests/data

Random weights of tiny models and the logits that Hugging Face's implementation gives for some
tokens: transformers 5.23.0 with torch 2.14.1. The names are those in model.safetensors, which
save_pretrained writes; here they are kept by torch.save, so that the tests need neither library.
"""
import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

torch.manual_seed(0)
SIZES = dict(
    hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, vocab_size=19, max_position_embeddings=16, initializer_range=0.5,
)
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 18, 3]
MODELS = {
    "llama": LlamaForCausalLM(LlamaConfig(
        **SIZES, rms_norm_eps=1e-6, rope_theta=5e3, tie_word_embeddings=False)),
    "mixtral": MixtralForCausalLM(MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, rms_norm_eps=1e-5,
        sliding_window=None, rope_theta=1e4, tie_word_embeddings=False)),
    "gpt2": GPT2LMHeadModel(GPT2Config(
        n_embd=8, n_layer=2, n_head=2, n_positions=16, vocab_size=19, initializer_range=0.5)),
    "qwen3": Qwen3ForCausalLM(Qwen3Config(  # tied, as up to 4B
        **SIZES, head_dim=6, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=True)),
    "qwen3_moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(
        **SIZES, head_dim=6, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
        norm_topk_prob=True, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=False)),
}

for name, model in MODELS.items():
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:  # they begin as ones: one would be like another
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    folder = Path(sys.argv[1], name)
    shutil.rmtree(folder, ignore_errors=True)
    model.float().eval().save_pretrained(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    for unused in ("generation_config.json", "model.safetensors"):
        (folder / unused).unlink(missing_ok=True)
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0]
    rows = [[round(x, 6) for x in row] for row in logits.tolist()]
    made = {"transformers": transformers.__version__, "ids": IDS, "logits": rows}
    (folder / "logits.json").write_text(json.dumps(made))
