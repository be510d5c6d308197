import contextlib
import copy
import functools
import math
import textwrap
import types
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


from conftest import PROOF, SMALL, alone, copied, dry_run_agrees, each, proves, run, script, textbook

SP = ["--sp"]
LLAMA = ["--model", "llama-toy"]
KINDS = ["WholeSequence", "CutSequence"]


# ---- section 1 alone, on a model that is not ours -----------------------------------


class Attention(nn.Module):
    """Grouped queries, norms of each head's q and k, rotary positions."""

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(12, 16, bias=False)
        self.k_proj = nn.Linear(12, 8, bias=False)
        self.v_proj = nn.Linear(12, 8, bias=False)
        self.q_norm = nn.RMSNorm(4)
        self.k_norm = nn.RMSNorm(4)
        self.o_proj = nn.Linear(16, 12, bias=False)

    def forward(self, x):
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, 4))).transpose(-3, -2)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, 4))).transpose(-3, -2)
        v = self.v_proj(x).unflatten(-1, (-1, 4)).transpose(-3, -2)
        angles = torch.arange(q.shape[-2])[:, None] / torch.tensor([1.0, 100.0])  # T is read from q
        y = F.scaled_dot_product_attention(turned(q, angles), turned(k, angles), v,
                                           is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(-3, -2).flatten(-2))


def turned(x, angles):
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(),
                      first * angles.sin() + second * angles.cos()], -1)


class Layer(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.input_norm = nn.RMSNorm(12)
        self.self_attn = Attention()
        self.post_norm = nn.RMSNorm(12)
        self.gate_proj = nn.Linear(12, 20)
        self.up_proj = nn.Linear(12, 20)
        self.drop_inside = nn.Dropout(dropout)
        self.down_proj = nn.Linear(20, 12)
        self.drop_outside = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.self_attn(self.input_norm(x))
        y = self.post_norm(x)
        y = self.drop_inside(F.silu(self.gate_proj(y)) * self.up_proj(y))
        return x + self.drop_outside(self.down_proj(y))


class Llama(nn.Module):
    def __init__(self, tied, dropout=0.0):
        super().__init__()
        self.embed_tokens = nn.Embedding(29, 12)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(2))
        self.norm = nn.RMSNorm(12)
        self.lm_head = nn.Linear(12, 29, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def plan_of(section):
    return {
        "embed_tokens": section.VocabEmbedding,
        "*.[qkv]_proj": section.ColumnLinear,
        "*.[qk]_norm": section.inside,
        "*.o_proj": section.RowLinear,
        "*.gate_proj": section.ColumnLinear,
        "*.up_proj": section.ColumnLinear,
        "*.down_proj": section.RowLinear,
        "lm_head": section.ColumnLinear,
    }


DROPOUTS = {"*.drop_inside": "InsideDropout", "*.drop_outside": "OutsideDropout"}


def both(section, kind, tied=False):
    """-> a plain model, its cut copy, and tp."""
    torch.manual_seed(0)
    plain = Llama(tied)
    tp = getattr(section, kind)()
    return plain, section.cut_model(copy.deepcopy(plain), tp, plan_of(section)), tp


def token_batch(seed=0):
    tokens = torch.randint(29, (4, 9), generator=torch.Generator().manual_seed(seed))
    targets = tokens[:, 1:].masked_fill(tokens[:, 1:] > 26, -100)
    return tokens[:, :-1], targets


def plain_loss(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")


def compare(tensors, wanted):
    """Every one, by name; those that are None in `wanted` may not be there."""
    assert tensors.keys() == {name for name, want in wanted.items() if want is not None}
    for name, got in tensors.items():
        gap = (got - wanted[name]).abs().max().item()
        assert gap < 1e-10, f"{name}: {gap}"


def compare_gradients(plain, gradients):
    compare(gradients, {name: p.grad for name, p in plain.named_parameters()})


def check_copy(kind, tied, frozen):
    """Three steps of two micro-batches, recomputed in backward: gradients, norms, parameters."""
    section = copied("tensor_parallel")
    plain, model, tp = both(section, kind, tied)
    for m in plain, model:
        for name, p in m.named_parameters():
            p.requires_grad_(frozen is None or frozen not in name)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for x, y in zip(*(t.chunk(2) for t in token_batch(step))):
            plain_loss(plain, x, y).backward()
            logits = checkpoint(model, x, use_reentrant=False)
            section.vocab_parallel_cross_entropy(logits, y, 29, tp).backward()
        section.sum_gradients(model, tp)
        norm = section.gradient_norm(model, tp)
        want = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        torch.testing.assert_close(norm, want, rtol=1e-10, atol=0)
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        compare_gradients(plain, section.full_gradients(model, tp))
        for optimizer in optimizers:
            optimizer.step()
    compare(section.full_state_dict(model, tp), plain.state_dict())


CASES = [(False, None), (True, "layers.0"), (False, "_proj"), (False, "norm"), (False, "embed")]


@pytest.mark.parametrize("world", [1, 2])
def test_the_copy_trains_a_llama(world):
    run(each, world, check_copy, [(kind, *case) for kind in KINDS for case in CASES])
