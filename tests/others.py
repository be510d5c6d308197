"""A Llama as others write it, small and plain: what section 1 must serve besides the toy GPT.

The loss is a sum over rows, so that the gradients of parts of a batch add up to those of the whole.
"""
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
    angles = torch.cat([angles, angles], dim=1).to(like.dtype)
    return angles.cos(), angles.sin()


def rotated(x, angles):
    """(B, H, T, D), turned by each position's angles."""
    cosines, sines = angles
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x * cosines + turned * sines


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
        q = rotated(q, angles)
        k = rotated(k, angles)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
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
        return {"logits": self.lm_head(self.norm(x))}


def token_rows(rng, rows, T=6):
    tokens = torch.randint(0, VOCABULARY, (rows, T + 1), generator=rng)
    return tokens[:, :-1], tokens[:, 1:]


def llama_loss(model, tokens, targets):
    return token_losses(model(tokens)["logits"], targets)
