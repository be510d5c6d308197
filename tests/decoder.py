"""A small decoder of Llama's form with modules of other names than the toy GPT's."""
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCABULARY = 29
WIDTH = 12
HEAD_DIM = 4


class Attention(nn.Module):
    """Grouped queries, norms of each head's q and k, rotary positions."""

    def __init__(self, heads, kv_heads):
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, heads * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(WIDTH, kv_heads * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(WIDTH, kv_heads * HEAD_DIM, bias=False)
        self.q_norm = nn.RMSNorm(HEAD_DIM)
        self.k_norm = nn.RMSNorm(HEAD_DIM)
        self.o_proj = nn.Linear(heads * HEAD_DIM, WIDTH, bias=False)
        self.attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)

    def forward(self, x, positions):
        q = self.q_norm(by_head(self.q_proj(x)))
        k = self.k_norm(by_head(self.k_proj(x)))
        v = by_head(self.v_proj(x))
        if positions is None:
            positions = torch.arange(q.shape[2])  # of q, since x may be a piece
        q = turned(q, positions).to(v.dtype)
        k = turned(k, positions).to(v.dtype)
        y = self.attend(q, k, v)
        return self.o_proj(y.transpose(1, 2).flatten(2))


def by_head(x):
    return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)  # (B, heads, T, D)


def turned(x, positions):
    """By angles that grow with the position."""
    angles = positions[:, None] / torch.tensor([1.0, 100.0])
    cos = angles.cos()
    sin = angles.sin()
    a, b = x.chunk(2, -1)
    first = a * cos - b * sin
    second = a * sin + b * cos
    return torch.cat([first, second], -1)


class Layer(nn.Module):
    """Of the MLP's 21 columns, 2 ranks have 11 each, and the last is padding."""

    def __init__(self, heads, kv_heads, dropout):
        super().__init__()
        self.input_norm = nn.RMSNorm(WIDTH)
        self.attn = Attention(heads, kv_heads)
        self.post_norm = nn.RMSNorm(WIDTH)
        self.gate_proj = nn.Linear(WIDTH, 21)
        self.up_proj = nn.Linear(WIDTH, 21)
        self.drop_inside = nn.Dropout(dropout)
        self.down_proj = nn.Linear(21, WIDTH)
        self.drop_outside = nn.Dropout(dropout)

    def forward(self, x, positions):
        x = x + self.attn(self.input_norm(x), positions)
        y = self.post_norm(x)
        y = self.drop_inside(F.silu(self.gate_proj(y)) * self.up_proj(y))
        return x + self.drop_outside(self.down_proj(y))


class Decoder(nn.Module):
    def __init__(self, tied=False, dropout=0.0, heads=4, kv_heads=2):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Layer(heads, kv_heads, dropout) for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens, positions=None):
        x = self.embed_tokens(tokens)
        for block in self.blocks:
            x = block(x, positions)
        return self.lm_head(self.norm(x))


def batch(seed, B=4, T=8):
    """-> tokens, targets, some of which are ignored"""
    rng = torch.Generator().manual_seed(seed)
    text = torch.randint(VOCABULARY, (B, T + 1), generator=rng)
    targets = text[:, 1:]
    return text[:, :-1], targets.masked_fill(targets > 26, -100)


def loss_sum(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def gradients_of(model):
    named = model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def compare(found, wanted):
    """Every tensor, by name."""
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        gap = (tensor - wanted[name]).abs().max().item()
        assert gap < 1e-10, f"{name}: {gap}"
