"""A Llama as others write it, small and plain: what the technique must serve besides the toy GPT.

The loss is a sum over tokens, so that the gradients of parts of a batch add up to the whole's.
"""
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from common import adamw

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

    def forward(self, x, positions=None):
        q, k, v = [proj(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)  # (B, heads, T, D)
                   for proj in (self.q_proj, self.k_proj, self.v_proj)]
        if positions is None:
            positions = torch.arange(q.shape[2])  # of q, since x may be a piece
        q = turned(self.q_norm(q), positions).to(v.dtype)
        k = turned(self.k_norm(k), positions).to(v.dtype)
        y = self.attend(q, k, v)
        return self.o_proj(y.transpose(1, 2).flatten(2))


def turned(x, positions):
    """By angles that grow with the position."""
    angles = positions[:, None] / torch.tensor([1.0, 100.0])
    cos = angles.cos()
    sin = angles.sin()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class MLP(nn.Module):
    """Of 21 columns 2 ranks have 11 each, and the last is padding."""

    def __init__(self, dropout):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, 21)
        self.up_proj = nn.Linear(WIDTH, 21)
        self.drop_inside = nn.Dropout(dropout)
        self.down_proj = nn.Linear(21, WIDTH)
        self.drop_outside = nn.Dropout(dropout)

    def forward(self, x):
        y = self.drop_inside(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return self.drop_outside(self.down_proj(y))


class Layer(nn.Module):
    def __init__(self, heads, kv_heads, dropout):
        super().__init__()
        self.input_norm = nn.RMSNorm(WIDTH)
        self.self_attn = Attention(heads, kv_heads)
        self.post_norm = nn.RMSNorm(WIDTH)
        self.mlp = MLP(dropout)

    def forward(self, x, **positions):
        x = x + self.self_attn(self.input_norm(x), **positions)
        return x + self.mlp(self.post_norm(x))


class Llama(nn.Module):
    def __init__(self, layers=3, heads=4, kv_heads=2, tied=False, dropout=0.0):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(heads, kv_heads, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens, **positions):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, **positions)
        return {"logits": self.lm_head(self.norm(x))}


class OfTensors(Llama):
    """For the ideas, whose step takes logits."""

    def forward(self, tokens):
        return super().forward(tokens)["logits"]


def recomputed(seed, kind=Llama, **options):
    """Its layers are recomputed, and have a parameter that nobody uses."""
    torch.manual_seed(seed)
    model = kind(**options)
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        layer.unused = nn.Parameter(torch.ones(3))
    return model


def as_in_files(model):
    """Its state, where a tied head is once, as safetensors has it."""
    tied = model.lm_head.weight is model.embed_tokens.weight
    left_out = "lm_head.weight" if tied else None
    return {name: t for name, t in model.state_dict().items() if name != left_out}


def into(owner, name, when, bug):
    """-> plant(module): bug(self, ..) runs before or after a method of a class, or instead."""

    def plant(module):
        method = getattr(getattr(module, owner), name)

        def broken(self, *args):
            if when == "before":
                bug(self, *args)
            made = None if when == "instead" else method(self, *args)
            if when != "before":
                bug(self, *args)
            return made
        setattr(getattr(module, owner), name, broken)
    return plant


def token_rows(rng, rows, T=8):
    """-> tokens, targets, some of which are ignored."""
    text = torch.randint(VOCABULARY, (rows, T + 1), generator=rng)
    targets = text[:, 1:]
    return text[:, :-1], targets.masked_fill(targets > 26, -100)


def micro_batches(step):
    """-> the two of a step, of 4 rows."""
    rng = torch.Generator().manual_seed(step)
    return [token_rows(rng, 4) for _ in range(2)]


def mine(rows):
    """This rank's."""
    return [t.chunk(dist.get_world_size())[dist.get_rank()] for t in rows]


def joined(batches):
    return [torch.cat(rows) for rows in zip(*batches)]


def whole_batch(step):
    return joined(micro_batches(step))


def loss_sum(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def llama_loss(model, tokens, targets):
    logits = model(tokens)
    return loss_sum(logits if isinstance(model, OfTensors) else logits["logits"], targets)


def trained(model, optimizer=None, loss_of=llama_loss):
    """In one process: two clipped steps -> after each loss, gradients, norm before, state."""
    optimizer = optimizer or adamw(model.parameters(), 1e-2)
    for step in range(2):
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        total = 0
        for rows in micro_batches(step):
            loss = loss_of(model, *rows)
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        gradients = gradients_of(model)
        optimizer.step()
        yield total, gradients, norm, dict(model.state_dict())


def gradients_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(found, wanted, atol=1e-11, rtol=0):
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)


def refuses(words, misuse, *args, **options):
    with pytest.raises(AssertionError, match=words):
        misuse(*args, **options)


# ---- sums of bf16 gradients, in fp32 -------------------------------------------


def bf16_llama():
    torch.manual_seed(0)
    return Llama(layers=2).bfloat16()


def bf16_rows():
    return [token_rows(torch.Generator().manual_seed(i), 2) for i in range(8)]


def compare_fp32(found, loss_of=llama_loss):
    """found: {name: what the gradients of bf16_rows(), each in bf16, add up to in fp32}."""
    wanted = {}
    for rows in bf16_rows():
        model = bf16_llama()
        loss_of(model, *rows).backward()
        for name, gradient in gradients_of(model).items():
            wanted[name] = wanted.get(name, 0) + gradient.float()
    compare(found, wanted, 1e-5, 1e-5)


class Files(dict):
    """Whole tensors are read one by one."""

    def __getitem__(self, name):
        return super().__getitem__(name).clone()

    items = keys = values = None
