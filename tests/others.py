"""Structures of models that people train, written out small and plain.

They are what section 1 of a technique file must serve besides the toy GPT. Sizes are odd where the
structure allows it. Each model has `blocks()`, the modules that are worth a unit of their own, in
the order in which they run. A Structure adds the inputs and a loss that is a sum over rows, so that
the gradients of parts of a batch add up to those of the whole.
"""
import math
from collections import namedtuple

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCABULARY = 29


def heads_of(x, head_dim):
    """(B, T, H D) -> (B, H, T, D)."""
    B, T, _ = x.shape
    return x.view(B, T, -1, head_dim).transpose(1, 2)


def joined(x):
    """(B, H, T, D) -> (B, T, H D)."""
    B, _, T, _ = x.shape
    return x.transpose(1, 2).reshape(B, T, -1)


def token_losses(logits, targets):
    """(B, T, V), (B, T) -> the sum over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


# ---- Llama: RMSNorm, rotary positions, grouped queries, SwiGLU, no biases ----


def rotary(T, head_dim, like):
    """-> cosines and sines of the angles of T positions, two (T, D)."""
    exponents = torch.arange(0, head_dim, 2, device=like.device) / head_dim
    rates = 10000.0 ** -exponents
    positions = torch.arange(T, device=like.device)
    angles = positions[:, None] * rates
    angles = torch.cat([angles, angles], dim=1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotated(x, angles):
    """(B, H, T, D), turned by each position's angles."""
    cosines, sines = angles
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-second, first], dim=-1) * sines


class LlamaAttention(nn.Module):
    """Several heads of q share a head of k and v."""

    def __init__(self, width, heads, kv_heads, head_dim):
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)

    def forward(self, x):
        q = heads_of(self.q_proj(x), self.head_dim)
        k = heads_of(self.k_proj(x), self.head_dim)
        v = heads_of(self.v_proj(x), self.head_dim)
        angles = rotary(x.shape[1], self.head_dim, x)
        y = F.scaled_dot_product_attention(rotated(q, angles), rotated(k, angles), v,
                                           is_causal=True, enable_gqa=True)
        return self.o_proj(joined(y))


class LlamaMLP(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    def __init__(self, width, heads, kv_heads, head_dim, mlp):
        super().__init__()
        self.input_norm = nn.RMSNorm(width)
        self.self_attn = LlamaAttention(width, heads, kv_heads, head_dim)
        self.post_norm = nn.RMSNorm(width)
        self.mlp = mlp

    def forward(self, x):
        x = x + self.self_attn(self.input_norm(x))
        return x + self.mlp(self.post_norm(x))


class Llama(nn.Module):
    def __init__(self, layers=3, width=12, heads=4, kv_heads=2, head_dim=4, hidden=20):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            mlp = LlamaMLP(width, hidden)
            self.layers.append(LlamaLayer(width, heads, kv_heads, head_dim, mlp))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def blocks(self):
        return list(self.layers)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.lm_head(self.norm(x)), "layers": len(self.layers)}


def token_rows(rng, rows, T=6):
    tokens = torch.randint(0, VOCABULARY, (rows, T + 1), generator=rng)
    return tokens[:, :-1], tokens[:, 1:]


def llama_loss(model, tokens, targets):
    return token_losses(model(tokens)["logits"], targets)


# ---- Mixtral: Llama with experts, the loss of the router among the outputs ---


class Experts(nn.Module):
    """A router picks two experts per token; an expert that no token picked does not run."""

    def __init__(self, width, hidden, experts):
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(LlamaMLP(width, hidden) for _ in range(experts))

    def forward(self, x):
        tokens = x.flatten(0, 1)  # (N, C)
        router_logits = self.gate(tokens)  # (N, E)
        weights, chosen = router_logits.softmax(-1).topk(2)  # (N, 2)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == i)  # tokens that picked it, as first or second
            if len(rows):
                weighted = expert(tokens[rows]) * weights[rows, slots, None]
                out = out.index_add(0, rows, weighted)
        return out.view_as(x), router_logits


class MixtralLayer(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.input_norm = nn.RMSNorm(width)
        self.self_attn = LlamaAttention(width, 4, 2, 4)
        self.post_norm = nn.RMSNorm(width)
        self.moe = Experts(width, 10, experts)
        self.router_logits = None  # (N, E) of the last forward

    def forward(self, x):
        x = x + self.self_attn(self.input_norm(x))
        out, self.router_logits = self.moe(self.post_norm(x))
        return x + out


class Mixtral(nn.Module):
    def __init__(self, layers=2, width=9, experts=4):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(MixtralLayer(width, experts) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def blocks(self):
        return list(self.layers)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        router_logits = []
        for layer in self.layers:
            x = layer(x)
            router_logits.append(layer.router_logits)
        return {"logits": self.lm_head(self.norm(x)), "router_logits": router_logits}


def mixtral_loss(model, tokens, targets):
    """With the z-loss of the router (Zoph et al. 2022), which is a sum over tokens."""
    out = model(tokens)
    loss = token_losses(out["logits"], targets)
    for router_logits in out["router_logits"]:
        loss = loss + 0.1 * router_logits.logsumexp(-1).square().sum()
    return loss


# ---- LoRA: adapters on a frozen Llama ----------------------------------------


class LoRALinear(nn.Module):
    """Y = X W^T + X A^T B^T, of which A and B alone are trained (Hu et al. 2021)."""

    def __init__(self, linear, rank=2):
        super().__init__()
        self.base = linear
        self.A = nn.Parameter(torch.randn(rank, linear.in_features) / 10)
        self.B = nn.Parameter(torch.randn(linear.out_features, rank) / 10)

    def forward(self, x):
        return self.base(x) + x @ self.A.T @ self.B.T


def lora():
    """All but the adapters is frozen. Block 1 has none, nor has what is outside the blocks."""
    model = Llama()
    model.requires_grad_(False)
    for layer in (model.layers[0], model.layers[2]):
        layer.self_attn.q_proj = LoRALinear(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LoRALinear(layer.self_attn.v_proj)
    return model


# ---- all of them -------------------------------------------------------------

# build() -> model
# rows(generator, how many) -> inputs and targets, each with the rows in dimension 0
# loss(model, *inputs and targets) -> a sum over rows
Structure = namedtuple("Structure", "build rows loss")

STRUCTURES = {
    "llama": Structure(Llama, token_rows, llama_loss),
    "mixtral": Structure(Mixtral, token_rows, mixtral_loss),
    "lora": Structure(lora, token_rows, llama_loss),
}
