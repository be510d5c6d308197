"""Structures of models that people train, written out small and plain; and two optimizers.

The models are what section 1 of a technique file must serve besides the toy GPT. Sizes are odd
where the structure allows it. Each model has `blocks()`, the modules that are worth a unit of their
own, in the order in which they run. Between them they return all that models do: tensors, tuples,
lists, dicts and dataclasses. A Structure adds the inputs and a loss that is a sum over rows, so
that the gradients of parts of a batch add up to those of the whole.
"""
import math
from collections import namedtuple
from dataclasses import dataclass

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


# ---- BERT: an encoder with a classifier --------------------------------------


@dataclass
class ClassifierOutput:
    logits: torch.Tensor  # (B, classes)
    hidden: torch.Tensor  # (B, T, C)
    attentions: tuple = None


class BertLayer(nn.Module):
    """Norms come after the sums, unlike GPT-2's."""

    def __init__(self, width, head_dim):
        super().__init__()
        self.head_dim = head_dim
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.dense = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width)
        self.intermediate = nn.Linear(width, 3 * width)
        self.output = nn.Linear(3 * width, width)
        self.output_norm = nn.LayerNorm(width)

    def forward(self, hidden, attention_mask=None):
        q = heads_of(self.query(hidden), self.head_dim)
        k = heads_of(self.key(hidden), self.head_dim)
        v = heads_of(self.value(hidden), self.head_dim)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        hidden = self.attention_norm(hidden + self.dense(joined(attended)))
        return self.output_norm(hidden + self.output(F.gelu(self.intermediate(hidden))))


class Bert(nn.Module):
    def __init__(self, layers=3, width=10, head_dim=5, classes=3, longest=16):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.positions = nn.Embedding(longest, width)
        self.kinds = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("position_ids", torch.arange(longest).expand(1, -1))
        self.layers = nn.ModuleList(BertLayer(width, head_dim) for _ in range(layers))
        self.pooler = nn.Linear(width, width)
        self.classifier = nn.Linear(width, classes)

    def blocks(self):
        return list(self.layers)

    def forward(self, tokens, kinds):
        positions = self.position_ids[:, :tokens.shape[1]]
        hidden = self.norm(self.words(tokens) + self.positions(positions) + self.kinds(kinds))
        mask = (tokens != 0)[:, None, None, :]  # (B, 1, 1, T): padding is not looked at
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask)
        pooled = torch.tanh(self.pooler(hidden[:, 0]))
        return ClassifierOutput(self.classifier(pooled), hidden)


def bert_rows(rng, rows):
    tokens = torch.randint(1, VOCABULARY, (rows, 7), generator=rng)
    tokens[::2, 5:] = 0
    kinds = torch.randint(0, 2, (rows, 7), generator=rng)
    labels = torch.randint(0, 3, (rows,), generator=rng)
    return tokens, kinds, labels


def bert_loss(model, tokens, kinds, labels):
    return F.cross_entropy(model(tokens, kinds).logits, labels, reduction="sum")


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


# ---- T5: encoder and decoder, embeddings tied, a position bias shared by all blocks


class T5Attention(nn.Module):
    """The first block of a stack makes the position bias, the others are given it."""

    def __init__(self, width, heads, head_dim, makes_bias):
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(width, heads * head_dim, bias=False)
        self.k = nn.Linear(width, heads * head_dim, bias=False)
        self.v = nn.Linear(width, heads * head_dim, bias=False)
        self.o = nn.Linear(heads * head_dim, width, bias=False)
        if makes_bias:
            self.relative_bias = nn.Embedding(5, heads)

    def bias_of(self, T):
        position = torch.arange(T)
        distance = position[None, :] - position[:, None]
        buckets = distance.clamp(-2, 2) + 2  # 0 to 4
        return self.relative_bias(buckets).permute(2, 0, 1)  # (H, T, T)

    def forward(self, x, others, bias):
        q = heads_of(self.q(x), self.head_dim)
        k = heads_of(self.k(others), self.head_dim)
        v = heads_of(self.v(others), self.head_dim)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return self.o(joined(y))


class T5Block(nn.Module):
    def __init__(self, width, heads, head_dim, first, decoder):
        super().__init__()
        self.decoder = decoder
        self.first = first
        self.norm = nn.RMSNorm(width)
        self.attention = T5Attention(width, heads, head_dim, makes_bias=first)
        if decoder:
            self.cross_norm = nn.RMSNorm(width)
            self.cross = T5Attention(width, heads, head_dim, makes_bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.wi = nn.Linear(width, 2 * width, bias=False)
        self.wo = nn.Linear(2 * width, width, bias=False)

    def forward(self, x, bias=None, encoded=None):
        if self.first:
            bias = self.attention.bias_of(x.shape[1])
            if self.decoder:
                future = torch.ones_like(bias, dtype=torch.bool).triu(1)
                bias = bias.masked_fill(future, -math.inf)
        normed = self.norm(x)
        x = x + self.attention(normed, normed, bias)
        if self.decoder:
            x = x + self.cross(self.cross_norm(x), encoded, None)
        x = x + self.wo(F.relu(self.wi(self.mlp_norm(x))))
        return x, bias


class T5(nn.Module):
    def __init__(self, layers=2, width=10, heads=2, head_dim=3):
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.ModuleList()
        self.decoder = nn.ModuleList()
        for i in range(layers):
            first = i == 0
            self.encoder.append(T5Block(width, heads, head_dim, first, decoder=False))
            self.decoder.append(T5Block(width, heads, head_dim, first, decoder=True))
        self.encoder_norm = nn.RMSNorm(width)
        self.decoder_norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.lm_head.weight = self.shared.weight

    def blocks(self):
        return [*self.encoder, *self.decoder]

    def forward(self, tokens, decoder_tokens):
        x = self.shared(tokens)
        bias = None
        for block in self.encoder:
            x, bias = block(x, bias)
        encoded = self.encoder_norm(x)
        y = self.shared(decoder_tokens)
        bias = None
        for block in self.decoder:
            y, bias = block(y, bias, encoded=encoded)
        y = self.decoder_norm(y) * y.shape[-1] ** -0.5
        return self.lm_head(y), encoded


def t5_rows(rng, rows):
    tokens = torch.randint(0, VOCABULARY, (rows, 5), generator=rng)
    decoder_tokens, targets = token_rows(rng, rows, T=4)
    return tokens, decoder_tokens, targets


def t5_loss(model, tokens, decoder_tokens, targets):
    logits, _ = model(tokens, decoder_tokens)
    return token_losses(logits, targets)


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

    def forward(self, x):
        x = x + self.self_attn(self.input_norm(x))
        out, router_logits = self.moe(self.post_norm(x))
        return [x + out, router_logits]


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
            x, logits = layer(x)
            router_logits.append(logits)
        return {"logits": self.lm_head(self.norm(x)), "router_logits": router_logits}


def mixtral_loss(model, tokens, targets):
    """With the z-loss of the router (Zoph et al. 2022), which is a sum over tokens."""
    out = model(tokens)
    loss = token_losses(out["logits"], targets)
    for router_logits in out["router_logits"]:
        loss = loss + 0.1 * router_logits.logsumexp(-1).square().sum()
    return loss


# ---- ViT: patches, a class token, fused q, k, v ------------------------------


class ViTBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        up = nn.Linear(width, 2 * width)
        down = nn.Linear(2 * width, width)
        self.mlp = nn.Sequential(up, nn.GELU(), down)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x):
        B, T, C = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.scale * self.proj(joined(y))
        return x + self.scale * self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, layers=3, width=10, heads=2, classes=3):
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=4, stride=4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 5, width))
        self.layers = nn.ModuleList(ViTBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def blocks(self):
        return list(self.layers)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)  # (B, patches, C)
        cls_tokens = self.cls_token.expand(len(x), -1, -1)
        x = torch.cat([cls_tokens, x], dim=1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


def image_rows(rng, rows):
    images = torch.randn(rows, 3, 8, 8, generator=rng)
    labels = torch.randint(0, 3, (rows,), generator=rng)
    return images, labels


def image_loss(model, images, labels):
    return F.cross_entropy(model(images), labels, reduction="sum")


# ---- ResNet: convolutions and BatchNorm --------------------------------------


class Residual(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Identity()
        if stride > 1 or channels != out:
            conv = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(out))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out, inplace=True)


class ResNet(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.layers = nn.Sequential()
        self.layers.append(Residual(4, 4, stride=1))
        self.layers.append(Residual(4, 6, stride=2))
        self.layers.append(Residual(6, 7, stride=2))
        self.fc = nn.Linear(7, classes)

    def blocks(self):
        return list(self.layers)

    def forward(self, images):
        x = F.relu(self.bn1(self.conv1(images)))
        x = self.layers(x)
        return self.fc(x.mean((2, 3)))


# ---- LSTM: a language model with a state -------------------------------------


class LSTMModel(nn.Module):
    def __init__(self, width=6, hidden=7):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.lower = nn.LSTM(width, hidden, num_layers=2, batch_first=True)
        self.upper = nn.LSTM(hidden, hidden, batch_first=True, bidirectional=True)
        self.decoder = nn.Linear(2 * hidden, VOCABULARY)

    def blocks(self):
        return [self.lower, self.upper]

    def forward(self, tokens, state=None):
        x, state = self.lower(self.embed(tokens), state)
        x, _ = self.upper(x)
        return self.decoder(x), state


def lstm_loss(model, tokens, targets):
    logits, (_, cells) = model(tokens)
    return token_losses(logits, targets) + cells.square().sum()


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
    "bert": Structure(Bert, bert_rows, bert_loss),
    "llama": Structure(Llama, token_rows, llama_loss),
    "t5": Structure(T5, t5_rows, t5_loss),
    "mixtral": Structure(Mixtral, token_rows, mixtral_loss),
    "vit": Structure(ViT, image_rows, image_loss),
    "resnet": Structure(ResNet, image_rows, image_loss),
    "lstm": Structure(LSTMModel, token_rows, lstm_loss),
    "lora": Structure(lora, token_rows, llama_loss),
}


# ---- optimizers that look at whole parameters, under no name that is known -------------------


class Layerwise(torch.optim.SGD):
    """As LAMB and LARS: an update is as large as the whole parameter's norm says."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad / p.grad.norm() * p.data.norm(), alpha=group["lr"])


class DecayByShape(torch.optim.SGD):
    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() > 1:
                    p.data.mul_(0.9)
