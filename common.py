"""What the nine scripts share: a plain GPT, real text, the loop that trains it in one process, and
the way into a process group. It knows no technique, and needs torch alone.

    GPT           GPT-2's form, Llama's and Qwen3's, plain, so that a script can change one thing
    plain_steps   training in one process, with which every technique is compared
    get_batch     a pure function of text, seed and step: any rank makes any part of any batch
    join_world    the process group that torchrun describes, or a world of one
"""
import bisect
import itertools
import math
import mmap
import os
import random
import re
import socket
import sysconfig
import warnings
import zlib
from collections import namedtuple
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

# ---- the GPT -----------------------------------------------------------------
# B batch   T sequence   C width   H heads   K key-value heads   D head width
# F hidden width of the MLP   V vocabulary   L layers


def attend(q, k, v):
    """Causal attention: q (B, H, T, D), k and v (B, K, T, D) -> (B, H, T, D)."""
    shared = q.shape[1] != k.shape[1]  # H/K heads share a key-value head
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)


def positions(length, device):
    """The positions of the tokens that a model is given -> (T,)."""
    return torch.arange(length, device=device)


def rotate(x, positions, theta):
    """Rotary positions (Su 2021, RoFormer, arXiv:2104.09864, section 3.4.2).

    x (B, H, T, D), positions (T,). Numbers i and i + D/2 of a head are a point in the plane, which
    is turned by position * theta ** (-2 i / D).
    """
    half = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    exponents = torch.arange(half, device=x.device, dtype=wide) / half
    angles = positions[:, None] * theta ** -exponents  # (T, D/2)
    cos = angles.cos().to(x.dtype)
    sin = angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        bias = cfg.form.bias
        self.head_dim = cfg.head_dim or cfg.width // cfg.heads
        of_q = cfg.heads * self.head_dim
        of_kv = (cfg.kv_heads or cfg.heads) * self.head_dim
        # q, k, v apart, not fused: a slice of rows is then a set of heads
        self.q = nn.Linear(cfg.width, of_q, bias)
        self.k = nn.Linear(cfg.width, of_kv, bias)
        self.v = nn.Linear(cfg.width, of_kv, bias)
        self.out = nn.Linear(of_q, cfg.width, bias)
        # attributes, so that they can be exchanged
        self.attend = attend
        self.positions = positions
        self.rotate = None
        if not cfg.form.learned_positions:
            self.rotate = partial(rotate, theta=cfg.theta)
        norm = cfg.form.norm if cfg.form.qk_norm else nn.Identity
        self.q_norm = norm(self.head_dim, cfg.eps)
        self.k_norm = norm(self.head_dim, cfg.eps)

    def project(self, x):  # a method, so that it can be exchanged
        return self.q(x), self.k(x), self.v(x)

    def forward(self, x):  # (B, T, C)
        # (B, H, T, D); H, K and T are however many this rank has
        q, k, v = [y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in self.project(x)]
        q = self.q_norm(q)  # of each head by itself
        k = self.k_norm(k)
        if self.rotate:
            where = self.positions(q.shape[2], q.device)
            q = self.rotate(q, where)
            k = self.rotate(k, where)
        y = self.attend(q, k, v)  # (B, H, T, D)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """GPT-2's."""

    def __init__(self, cfg):
        super().__init__()
        hidden = cfg.hidden or 4 * cfg.width
        self.up = nn.Linear(cfg.width, hidden)
        self.down = nn.Linear(hidden, cfg.width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class SwiGLU(nn.Module):
    """Llama's MLP (Shazeer 2020, GLU Variants Improve Transformer, arXiv:2002.05202)."""

    def __init__(self, cfg):
        super().__init__()
        hidden = cfg.hidden or 4 * cfg.width
        self.gate = nn.Linear(cfg.width, hidden, bias=False)
        self.up = nn.Linear(cfg.width, hidden, bias=False)
        self.down = nn.Linear(hidden, cfg.width, bias=False)

    def project(self, x):  # likewise
        return self.gate(x), self.up(x)

    def forward(self, x):
        gate, up = self.project(x)
        return self.down(F.silu(gate) * up)


# norm, mlp          classes, of (width, eps) and of (cfg)
# bias               do the Linears of attention have one?
# learned_positions  a table that is added to the token embeddings; else rotary positions
# qk_norm            a norm of each head's q and k, before they are rotated
# tied               is the head the token embedding?
Form = namedtuple("Form", "name norm mlp bias learned_positions qk_norm tied")
FORMS = {form.name: form for form in (
    Form("gpt2", nn.LayerNorm, MLP, True, True, False, True),
    Form("llama", nn.RMSNorm, SwiGLU, False, False, False, False),
    Form("qwen3", nn.RMSNorm, SwiGLU, False, False, True, False),
    Form("qwen3-tied", nn.RMSNorm, SwiGLU, False, False, True, True),
)}


class GPTConfig(NamedTuple):
    layers: int = 4
    width: int = 128
    heads: int = 4
    vocab: int = 256
    seq: int = 128
    form: Form = FORMS["gpt2"]
    kv_heads: int = 0  # 0: as many as heads
    hidden: int = 0  # F, 0: 4 C
    head_dim: int = 0  # D, 0: C/H
    theta: float = 5e5  # base of the rotary angles
    eps: float = 1e-5  # of the norms

    def resolved(self):
        """With what each 0 stands for."""
        return self._replace(kv_heads=self.kv_heads or self.heads,
                             hidden=self.hidden or 4 * self.width,
                             head_dim=self.head_dim or self.width // self.heads)


GPT2 = partial(GPTConfig, vocab=50257, seq=1024)
LLAMA3 = partial(GPTConfig, vocab=128256, seq=8192, form=FORMS["llama"], kv_heads=8)
PRESETS = {
    "toy": GPTConfig(),
    "gpt2": GPT2(12, 768, 12),
    "gpt2-medium": GPT2(24, 1024, 16),
    "gpt2-large": GPT2(36, 1280, 20),
    "gpt2-xl": GPT2(48, 1600, 25),
    "gpt3-175b": GPT2(96, 12288, 96, seq=2048),
    "llama-toy": GPTConfig(form=FORMS["llama"], kv_heads=2, hidden=352),
    "llama3-8b": LLAMA3(32, 4096, 32, hidden=14336),
    "llama3-70b": LLAMA3(80, 8192, 64, hidden=28672),
    "llama3-405b": LLAMA3(126, 16384, 128, hidden=53248),
    "qwen3-toy": GPTConfig(form=FORMS["qwen3-tied"], kv_heads=2, hidden=352, head_dim=48,
                           theta=1e6, eps=1e-6),
    "qwen3-8b": GPTConfig(36, 4096, 32, 151936, 40960, FORMS["qwen3"], kv_heads=8, hidden=12288,
                          head_dim=128, theta=1e6, eps=1e-6),
}


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm1 = cfg.form.norm(cfg.width, cfg.eps)
        self.attn = Attention(cfg)
        self.norm2 = cfg.form.norm(cfg.width, cfg.eps)
        self.mlp = cfg.form.mlp(cfg)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Positions are learned here, or rotary, in the blocks. The head is the token embedding, or has
    a matrix of its own."""

    def __init__(self, cfg):
        super().__init__()
        self.tok = nn.Embedding(cfg.vocab, cfg.width)
        self.pos = None
        if cfg.form.learned_positions:
            self.pos = nn.Embedding(cfg.seq, cfg.width)
        self.positions = positions  # an attribute, so that it can be exchanged
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.norm = cfg.form.norm(cfg.width, cfg.eps)
        self.head = nn.Linear(cfg.width, cfg.vocab, bias=False)
        if cfg.form.tied:
            self.head.weight = self.tok.weight  # tied: one parameter, called tok.weight

    def embed(self, idx):  # (B, T) -> (B, T, C)
        if self.pos is None:
            return self.tok(idx)
        return self.tok(idx) + self.pos(self.positions(idx.shape[1], idx.device))

    def forward(self, idx):  # (B, T) -> (B, T, V)
        x = self.embed(idx)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def init_weight(name, p, layers, seed):
    """GPT-2's N(0, 0.02), smaller by 1/sqrt(2L) on residual projections.

    It depends on the parameter's full name: any part of the model can be made anywhere, in any
    order, with the same values.
    """
    if p.dim() == 2:
        std = 0.02
        if name.endswith(("out.weight", "down.weight")):
            std = 0.02 / math.sqrt(2 * layers)
        rng = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        drawn = torch.empty(p.shape, dtype=torch.float32).normal_(0, std, generator=rng)
        p.copy_(drawn)
    else:
        p.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)


def build(cfg, seed, device="cpu", dtype=torch.float32):
    """The plain GPT, with the same weights on every rank and device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = GPT(cfg)
    torch.set_default_dtype(before)
    for name, p in model.named_parameters():
        init_weight(name, p, cfg.layers, seed)
    return model


def freeze(model, pattern):
    """Train the parameters whose names the regular expression finds, and no others -> how many."""
    for name, p in model.named_parameters():
        p.requires_grad_(re.search(pattern, name) is not None)
    return sum(p.requires_grad for p in model.parameters())


# ---- training in one process ---------------------------------------------------

IGNORE = -100  # a target that is not predicted


def plain_steps(model, optimizer, batches, clip, extra_loss=None):
    """The training loop with which every technique is compared. A generator.

    batches: for each step its rate, inputs and targets (B, T), and how many targets are valid.
    extra_loss(model), after a forward, is added to the loss. Yields loss and gradient norm of each
    step, with the gradients, which are clipped, and the new parameters in place.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    for rate, x, y, valid in batches:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = loss_sum(model(x), y) / valid
        if extra_loss:
            loss = loss + extra_loss(model)
        loss.backward()
        norm = clip_gradients(trained, clip)
        optimizer.step()
        yield loss, norm


def loss_sum(logits, targets):
    """(.., V), (..) -> sum of token losses, in fp32 or better.

    Divide it by the valid targets of the global batch.
    """
    if logits.dtype.itemsize == 2:
        logits = logits.float()
    flat = logits.flatten(0, -2)  # (B T, V)
    return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, reduction="sum")


def clip_gradients(parameters, clip):
    """Scale the gradients down to a norm of at most clip (0: no limit) -> the norm before.

    If the norm is inf or nan they stay as they are, so that one can see whose fault it is.
    """
    parameters = [p for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    # inf and nan are passed on as 0, since gradients of norm 0 are not scaled
    finite = norm.nan_to_num(0, posinf=0)
    nn.utils.clip_grads_with_norm_(parameters, clip or math.inf, finite)
    return norm


def adamw(parameters, lr):
    # Llama's eps. With 1e-8 Adam makes whole steps of the rounding errors in gradients that are
    # zero (key biases)
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), eps=1e-5, fused=True)


def learning_rate(step, args):
    """The rate of a step, from args' lr, warmup, decay, min_lr and steps: a pure function.

    It climbs in a straight line for `warmup` steps, the last of which has the full rate. Then it
    stays, or falls in a straight line or along half a cosine (Loshchilov 2017, "SGDR",
    arXiv:1608.03983, equation 5). The step after the last would have min_lr.
    """
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / (args.steps - args.warmup)  # of the fall, from 0 to nearly 1
    if args.decay == "linear":
        return args.lr + (args.min_lr - args.lr) * done
    if args.decay == "cosine":
        return args.min_lr + (args.lr - args.min_lr) * (1 + math.cos(math.pi * done)) / 2
    return args.lr


# ---- data --------------------------------------------------------------------


WIDTHS = {".bin": torch.uint16, ".u32": torch.uint32}  # of token ids; other files are bytes


class Text:
    """The bytes or tokens of files, end to end: mapped, what nobody asks for is not read."""

    def __init__(self, parts):
        self.parts = parts  # [(n,) of one dtype]
        self.ends = [0, *itertools.accumulate(map(len, parts))]

    def __len__(self):
        return self.ends[-1]

    def between(self, low, high):
        """-> the Text of its elements low to high - 1"""
        parts = []
        i = bisect.bisect(self.ends, low) - 1
        while low < high:
            begin = self.ends[i]
            parts.append(self.parts[i][low - begin:high - begin])
            low = self.ends[i + 1]
            i += 1
        return Text(parts)


def load_corpus(path, seq):
    """A text file, or a folder's files in order with a newline between -> Text.

    Also a file FILE.bin of token ids: little-endian uint16, nanoGPT's format; FILE.u32 of uint32.
    path "" stands for the standard library's sources. Raises OSError for what cannot be read,
    ValueError for a text without a window of seq + 1 elements.
    """
    root = Path(path or sysconfig.get_paths()["stdlib"])
    files = [root]
    if root.is_dir():
        pattern = "**/*" if path else "*.py"
        files = sorted(file for file in root.glob(pattern) if file.is_file())
    parts = []
    for file in files:
        if not file.is_file() and file.exists():
            raise ValueError("a pipe or device, no file or folder: every rank reads it")
        if root.is_dir() and file.suffix in WIDTHS:
            raise ValueError(f"{file.name} has token ids, a folder bytes: give this file itself")
        with file.open("rb") as opened:
            if file.stat().st_size:
                parts.append(mapped(opened, WIDTHS.get(root.suffix, torch.uint8)))
                parts.append(torch.tensor([10], dtype=torch.uint8))  # a newline
    corpus = Text(parts[:-1])
    if len(corpus) <= seq:
        unit = "tokens" if root.suffix in WIDTHS else "bytes"
        raise ValueError(f"{len(corpus)} {unit} of text, but a sequence of {seq} needs {seq + 1}")
    return corpus


def mapped(file, dtype):
    """An open file -> a tensor of its elements, which takes no memory."""
    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that it must not be written to
        return torch.frombuffer(memory, dtype=dtype)


def get_batch(corpus, seq, seed, step, batch, pad=0.0, rows=None):
    """A pure function: rows (default: all) of a step's global batch of `batch` sequences.

    -> inputs, targets (rows, T) int64, valid: the number of targets that are not IGNORE in the
    whole global batch, whatever `rows` is.
    """
    rng = random.Random(f"{seed} {step}")
    starts = [rng.randrange(len(corpus) - seq) for _ in range(batch)]
    tails = []
    for _ in range(batch):
        # uneven on purpose: one sequence in two loses nothing, the other up to 4 x pad of its
        # targets, but each keeps one. On average pad is lost, above 0.25 less
        tail = int(4 * pad * seq * rng.random())
        if rng.randrange(2) == 0:
            tail = 0
        tails.append(min(seq - 1, tail))
    if rows is None:
        rows = range(batch)
    x, y = windows(corpus, seq, [starts[i] for i in rows])
    for i, row in zip(rows, y):
        row[seq - tails[i]:] = IGNORE
    return x, y, batch * seq - sum(tails)


def windows(corpus, seq, starts):
    """T elements from each start, and T that begin one later: inputs, targets (len(starts), T)."""
    found = []
    for start in starts:
        parts = corpus.between(start, start + seq + 1).parts
        found.append(torch.cat([part.long() for part in parts]))
    text = torch.stack(found)
    # two copies, since targets may be overwritten; contiguous() would not copy a single row
    return text[:, :-1].clone(), text[:, 1:].clone()


def share(n, parts, i):
    """Part i of n things in `parts` nearly equal runs -> range."""
    return range(i * n // parts, (i + 1) * n // parts)


# ---- the process group ---------------------------------------------------------

Launch = namedtuple("Launch", "rank world_size local_rank local_world_size")
ALONE = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0}
REMEDY = "unset it, or start with torchrun"


def launched():
    """What the environment says of this process and the others -> Launch.

    A plain `python script.py` is a world of one. Raises ValueError if the variables contradict each
    other: ranks that believed them would wait for ever.
    """
    numbers = []
    for name, value in ALONE.items():
        text = os.environ.get(name, str(value))
        if not text.isdecimal() or int(text) > 65535:
            raise ValueError(f"{name}={text} in the environment is no number from 0 to 65535: "
                             f"{REMEDY}")
        numbers.append(int(text))
    found = Launch(*numbers[:4])
    world_size = f"WORLD_SIZE={found.world_size}"
    if found.rank >= found.world_size:
        raise ValueError(f"RANK={found.rank} in the environment, of {world_size}: {REMEDY}")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if found.world_size > 1 and not os.environ.get(name):
            raise ValueError(f"{world_size} in the environment, but no {name}: {REMEDY}")
    return found


def choose_device(launch, name="auto"):
    """-> the device of this rank: a GPU if there is one, unless name is "cpu"."""
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    # LOCAL_RANK is the device, never RANK; ranks may share one
    device = torch.device("cuda", launch.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def choose_backend(device, store, launch):
    """NCCL wants a GPU for every rank; gloo shares GPUs, and works on CPUs.

    All nodes must be alike, with a GPU for every rank or without: a rank asks the others only if
    it sees fewer GPUs than its node has ranks.
    """
    if device.type == "cpu":
        return "gloo"
    if launch.local_world_size <= torch.cuda.device_count():
        return "nccl"
    # some launchers show each process one GPU only, and every process a different one
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", "")
    store.set(f"gpu of {launch.rank}", f"{socket.gethostname()} {uuid}")
    gpus = {store.get(f"gpu of {rank}") for rank in range(launch.world_size)}
    if len(gpus) == launch.world_size:
        return "nccl"
    return "gloo"


def rendezvous(timeout=None):
    """Find the world that torchrun describes -> the store that all ranks see.

    A plain `python script.py` is a world of one. timeout: a timedelta.
    """
    for name, value in {**ALONE, "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, str(value))
    options = {"timeout": timeout} if timeout else {}
    # one, whatever WORLD_SIZE says: else rank 0 would wait here for the others, in silence
    return next(dist.rendezvous("env://?world_size=1", **options))[0]


def join_world(store, launch, backend, timeout=None):
    """The process group of the ranks that see this store. timeout: a timedelta."""
    dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size,
                            timeout=timeout)


def join_fake_world(rank, world_size):
    """Be one of many ranks that are not there: collectives return at once and move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
