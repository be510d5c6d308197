"""What the nine scripts share, and nothing about parallelism.

  GPT          GPT-2, plain, written so that each script can change one thing
  get_batch    real text; any rank can make any part of any step's global batch
  arguments    the flags every script takes; bad usage is one line and exit code 2
  Side         one implementation of a technique, ready to train
  Run          one run of a script: process group, steps, rate, clock, checkpoints, the plain GPT's
               steps, report; main() of ddp.py shows the order of use

The instruments that a run uses are in harness/: the ledger of bytes, the comparison with one
process, checkpoints, the guard against silent failures.
"""
import argparse
import contextlib
import gc
import json
import math
import os
import random
import re
import socket
import statistics
import sys
import sysconfig
import zlib
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from harness import checkpoint, guard, report
from harness.clock import Clock
from harness.compare import Trace, compare
from harness.ledger import Ledger, held_by
from harness.profiler import profiled
from harness.usage import ANY, POSITIVE, launched, program, require

# ---- the GPT -----------------------------------------------------------------
# B batch   T sequence   C width   H heads   D = C/H head width   V vocabulary   L layers

GPTConfig = namedtuple("GPTConfig", "layers width heads vocab seq", defaults=(4, 128, 4, 256, 128))
PRESETS = {
    "toy": GPTConfig(),
    "gpt2": GPTConfig(12, 768, 12, 50257, 1024),
    "gpt2-medium": GPTConfig(24, 1024, 16, 50257, 1024),
    "gpt2-large": GPTConfig(36, 1280, 20, 50257, 1024),
    "gpt2-xl": GPTConfig(48, 1600, 25, 50257, 1024),
    "gpt3-175b": GPTConfig(96, 12288, 96, 50257, 2048),
}


def attend(q, k, v):
    """Causal attention: three (B, H, T, D) -> (B, H, T, D)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.head_dim = cfg.width // cfg.heads
        # q, k, v apart, not fused: a slice of rows is then a set of heads
        self.q = nn.Linear(cfg.width, cfg.width)
        self.k = nn.Linear(cfg.width, cfg.width)
        self.v = nn.Linear(cfg.width, cfg.width)
        self.out = nn.Linear(cfg.width, cfg.width)
        self.attend = attend  # an attribute, so that it can be exchanged

    def forward(self, x):  # (B, T, C)
        B, T, _ = x.shape
        q = self.q(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        k = self.k(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        v = self.v(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        y = self.attend(q, k, v)  # (B, H, T, D); H is however many heads this rank holds
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.up = nn.Linear(cfg.width, 4 * cfg.width)
        self.down = nn.Linear(4 * cfg.width, cfg.width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm1 = nn.LayerNorm(cfg.width)
        self.attn = Attention(cfg)
        self.norm2 = nn.LayerNorm(cfg.width)
        self.mlp = MLP(cfg)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tok = nn.Embedding(cfg.vocab, cfg.width)
        self.pos = nn.Embedding(cfg.seq, cfg.width)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.norm = nn.LayerNorm(cfg.width)
        self.head = nn.Linear(cfg.width, cfg.vocab, bias=False)
        self.head.weight = self.tok.weight  # tied: one parameter, called tok.weight

    def embed(self, idx):  # (B, T) -> (B, T, C)
        return self.tok(idx) + self.pos(torch.arange(idx.shape[1], device=idx.device))

    def forward(self, idx):  # (B, T) -> (B, T, V)
        x = self.embed(idx)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def init_weights(module, layers, seed, prefix=""):
    """GPT-2's N(0, 0.02), smaller by 1/sqrt(2L) on residual projections.

    Every parameter is drawn by its own full name, which named_parameters(prefix=prefix) gives: any
    part of the model can be made anywhere, in any order, with the same values.
    """
    for name, p in module.named_parameters(prefix=prefix):
        if p.dim() == 2:
            std = 0.02
            if name.endswith(("out.weight", "down.weight")):
                std = 0.02 / math.sqrt(2 * layers)
            rng = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            drawn = torch.empty(p.shape, dtype=torch.float32).normal_(0, std, generator=rng)
            p.copy_(drawn)
        elif "norm" in name and name.endswith("weight"):
            p.fill_(1.0)
        else:
            p.zero_()


def build(cfg, seed, device="cpu", dtype=torch.float32):
    """The plain GPT, with the same weights on every rank and device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = GPT(cfg)
    finally:
        torch.set_default_dtype(before)
    init_weights(model, cfg.layers, seed)
    return model


def freeze(model, pattern):
    """Train the parameters whose names the regular expression finds, and no others -> how many."""
    found = 0
    for name, p in model.named_parameters():
        p.requires_grad_(re.search(pattern, name) is not None)
        found += p.requires_grad
    return found


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

    If the norm is inf or nan they stay as they are: guard.fault then says whose fault it is.
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
    """The rate of a step, from --lr, --warmup, --decay and --min-lr: a pure function.

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

IGNORE = -100  # a target that is not predicted
HELD_OUT = 20  # the last 1/20 of the text is held out for validation
EVAL_BATCHES = 8  # validation reads at most this many batches of the held-out text


def load_corpus(path, seq):
    """The bytes of a text file or of a folder's files, in order -> (n,) uint8.

    path "" stands for the standard library's sources. A path that cannot be read ends every rank
    with one line and exit code 2.
    """
    root = Path(path or sysconfig.get_paths()["stdlib"])
    require(root.exists(), f"--data {path}: no such file or folder")
    require(root.is_file() or root.is_dir(), f"--data {path}: every rank reads it, so a pipe "
            "does not do; give a file or a folder")
    try:
        files = [root]
        if root.is_dir():
            pattern = "**/*" if path else "*.py"
            files = sorted(file for file in root.glob(pattern) if file.is_file())
        text = bytearray(b"\n".join(file.read_bytes() for file in files))
    except OSError as error:
        require(False, f"--data {path}: {error.strerror}: {error.filename or path}")
    require(len(text) > seq, f"--data {root}: {len(text)} bytes in {len(files)} files, but "
            f"--seq {seq} needs {seq + 1}")
    return torch.frombuffer(text, dtype=torch.uint8)


def hold_out(corpus, seq, flag):
    """-> the text to train on, and its end, which is not trained on: one window at least.

    flag: what the user has said to get this, for the line that says that the text is too short.
    """
    size = max(len(corpus) // HELD_OUT, seq + 1)
    require(len(corpus) - size > seq,
            f"{flag}: {len(corpus)} bytes of text are too few to hold out {seq} + 1 of them")
    return corpus[:-size], corpus[-size:]


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
        # targets, which is pad on average; each keeps at least one
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
    """T bytes from each start, and the T that begin one later: inputs, targets (len(starts), T)."""
    text = torch.stack([corpus[start:start + seq + 1] for start in starts]).long()
    # two copies, since targets may be overwritten; contiguous() would not copy a single row
    return text[:, :-1].clone(), text[:, 1:].clone()


def count_windows(text, seq):
    """How many windows lie end to end in a text."""
    return (len(text) - 1) // seq


def held_out_batches(text, seq, batch):
    """How many batches of windows, end to end, validation reads of this text."""
    return min(EVAL_BATCHES, -(-count_windows(text, seq) // batch))


def held_out_batch(text, seq, k, batch, rows=None):
    """Batch k of the held-out text's windows -> inputs, targets (rows, T), valid.

    valid: targets of the whole batch. Rows beyond the last window have none.
    """
    count = count_windows(text, seq)
    if rows is None:
        rows = range(batch)
    numbers = [k * batch + i for i in rows]
    # a row beyond the last window reads some other window, and all of its targets are ignored
    x, y = windows(text, seq, [seq * (number % count) for number in numbers])
    for number, row in zip(numbers, y):
        if number >= count:
            row[:] = IGNORE
    full_rows = min(batch, count - k * batch)
    return x, y, full_rows * seq


def share(n, parts, i):
    """Part i of n things in `parts` nearly equal runs -> range."""
    return range(i * n // parts, (i + 1) * n // parts)


# ---- flags -------------------------------------------------------------------

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}

# default: a value, or a type for a flag that has none; True makes --name and --no-name
# limits: the choices, the bounds of a number, or None
Flag = namedtuple("Flag", "default help limits", defaults=(None,))

MODEL_FLAGS = {
    "impl": Flag("scratch", "ours, torch's own, or both in turn", ("scratch", "torch", "both")),
    "model": Flag("toy", "a preset, whose sizes the next five override", tuple(PRESETS)),
    "layers": Flag(int, "L, transformer blocks", POSITIVE),
    "width": Flag(int, "C, embedding width", POSITIVE),
    "heads": Flag(int, "H, attention heads", POSITIVE),
    "vocab": Flag(int, "V; text is bytes: 256 or more", (256, sys.maxsize)),
    "seq": Flag(int, "T, sequence length", POSITIVE),
    "dtype": Flag("fp32", "of parameters and arithmetic", tuple(DTYPES)),
    "device": Flag("auto", "auto: GPUs where there are any", ("auto", "cpu", "cuda")),
}
TRAINING_FLAGS = {
    "batch": Flag(int, "B, sequences per step over all ranks (8, or one per rank)", POSITIVE),
    "steps": Flag(20, "optimizer steps", POSITIVE),
    "lr": Flag(1e-3, "AdamW learning rate", (1e-12, 1e3)),
    "warmup": Flag(0, "steps in which the rate climbs to --lr", ANY),
    "decay": Flag("none", "how it falls to --min-lr afterwards", ("none", "linear", "cosine")),
    "min_lr": Flag(0.0, "where --decay ends, one step after the last", (0, 1e3)),
    "clip": Flag(1.0, "largest gradient norm, 0: no clipping", ANY),
    "seed": Flag(0, "of weights and batches", ANY),
    "data": Flag("", "text FILE or folder (default: Python's own sources)"),
    "pad": Flag(0.0, "fraction of targets to ignore, unevenly (above 0.25: less)", (0, 0.99)),
    "train": Flag("", "regular expression: train parameters it finds, freeze the others"),
    "eval_every": Flag(0, "steps between losses on text that is held out", ANY),
}
RUN_FLAGS = {
    "check": Flag(True, "replay the steps with the plain GPT and compare"),
    "watch": Flag(0, "compare all ranks' parameters after every so many steps", ANY),
    "timeout": Flag(int, "seconds until ranks give up a collective (30, NCCL 600)", (1, 10**6)),
    "dry_run": Flag(int, "be one of so many ranks, without the others or memory", POSITIVE),
    "rank": Flag(0, "which one (dry run only)", ANY),
    "json": Flag("", "FILE for the report"),
    "log": Flag("", "FILE for a line of JSON per step (--log-file through torchrun)"),
    "profile": Flag("", "folder for a torch.profiler trace of each rank"),
    "save": Flag("", "folder for checkpoints, each in a folder named by its steps"),
    "save_every": Flag(0, "steps between checkpoints (0: one, at the end)", ANY),
    "resume": Flag("", "go on from the newest checkpoint in this folder, on any ranks"),
    "init_from": Flag("", "start with the weights of the newest checkpoint in this folder"),
}
FLAGS = {**MODEL_FLAGS, **TRAINING_FLAGS, **RUN_FLAGS}


def arguments(doc, **own):
    """The common flags and a script's own, e.g. micro=Flag(4, "micro-batches", POSITIVE) -> args.

    Every value is in its bounds. args.cfg is the GPTConfig. args.world_size is the number of ranks,
    in a dry run that of --dry-run: a script can `require` what it needs before anything is built.
    """
    flags = {**own, **FLAGS}  # in this order in --help
    args = parse(doc, flags)
    for name, flag in flags.items():
        check_bounds(name, getattr(args, name), flag.limits)
    try:
        launch = launched()
    except ValueError as error:
        require(False, error)
    resolve(args, launch)
    refuse(args, launch)
    return args


def parse(doc, flags):
    def wide(prog):
        return argparse.HelpFormatter(prog, max_help_position=30, width=100)

    parser = argparse.ArgumentParser(
        description=doc.split("\n")[0],
        usage="%(prog)s [flags]",
        allow_abbrev=False,
        formatter_class=wide,
    )
    parser.error = lambda message: require(False, message)
    for name, flag in flags.items():
        add_flag(parser, name, flag)
    return parser.parse_args()


# A second name for a flag: torchrun takes --log for an abbreviation of several flags of its own
SECOND_NAMES = {"log": "--log-file"}


def add_flag(parser, name, flag):
    options = ["--" + name.replace("_", "-")]
    if name in SECOND_NAMES:
        options.append(SECOND_NAMES[name])
    settings = {"help": flag.help}
    if flag.default is True:
        settings["default"] = True
        settings["action"] = argparse.BooleanOptionalAction
    elif flag.default is False:
        settings["action"] = "store_true"
    elif isinstance(flag.default, type):
        settings["type"] = flag.default
        settings["metavar"] = name[0].upper()
    else:
        settings["default"] = flag.default
        settings["type"] = type(flag.default)
        settings["metavar"] = name[0].upper()
        if flag.default != "":
            settings["help"] += f" ({flag.default})"
    if flag.limits and isinstance(flag.limits[0], str):
        settings["choices"] = flag.limits
        settings["metavar"] = None  # which shows the choices
    parser.add_argument(*options, **settings)


def check_bounds(name, value, limits):
    if limits is None or not isinstance(value, (int, float)):
        return
    low, high = limits
    bounds = f"{low:g} or more"
    if high < sys.maxsize or value > high:  # sys.maxsize is told only to those who exceed it
        bounds += f", {high:g} or less"
    require(low <= value <= high, f"--{name.replace('_', '-')} {value}: must be {bounds}")


def resolve(args, launch):
    """Fill in what presets and defaults leave to be said, so that a report shows what was used."""
    preset = PRESETS[args.model]
    for name in GPTConfig._fields:
        if getattr(args, name) is None:
            setattr(args, name, getattr(preset, name))
    args.cfg = GPTConfig(*(getattr(args, name) for name in GPTConfig._fields))
    args.world_size = args.dry_run or launch.world_size
    if args.batch is None:
        args.batch = max(8, args.world_size)


def refuse(args, launch):
    """What no script can do ends here, in one line."""
    cfg = args.cfg
    ranks = launch.world_size
    require(cfg.width % cfg.heads == 0, f"--heads {cfg.heads} does not divide --width {cfg.width}")
    require(not args.dry_run or ranks == 1,
            f"--dry-run is one rank alone: use python, not torchrun with {ranks}")
    ranks_to_choose_from = args.dry_run or 1  # without a dry run there is the default alone, 0
    require(args.rank < ranks_to_choose_from,
            f"--rank {args.rank}: is for --dry-run, up to {args.world_size - 1}")
    if args.device == "cuda" and args.dry_run:
        require(torch.backends.cuda.is_built(), "--device cuda: this torch has no CUDA")
    elif args.device == "cuda":
        require(torch.cuda.is_available(), "--device cuda: torch finds no GPU")
    require(args.min_lr <= args.lr, f"--min-lr {args.min_lr} is above --lr {args.lr}")
    require(args.warmup < args.steps,
            f"--warmup {args.warmup}: leave a step of --steps {args.steps} for the full rate")
    try:
        re.compile(args.train)
    except re.error as error:
        require(False, f"--train {args.train}: no regular expression: {error}")
    for flag in ("json", "log"):
        refuse_file("--" + flag, getattr(args, flag))
    require(not os.path.isfile(args.profile), f"--profile {args.profile}: is a file, give a folder")


def refuse_file(flag, path):
    """Can this file be written?"""
    if not path:
        return
    require(not os.path.isdir(path), f"{flag} {path}: is a folder, give a file")
    folder = os.path.dirname(os.path.abspath(path))
    require(os.path.isdir(folder) and os.access(folder, os.W_OK),
            f"{flag} {path}: no such folder to write to")


# ---- the process group -------------------------------------------------------


def choose_device(args, launch):
    """-> the device of this rank. In a dry run it is the CPU, unless --device cuda asks."""
    if args.dry_run:
        if args.device == "cuda":
            return torch.device("cuda", 0)
        return torch.device("cpu")
    if args.device == "cpu" or not torch.cuda.is_available():
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


def join_fake_world(args):
    """Be one of the ranks of a dry run: collectives return at once and move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(
        "fake", store=FakeStore(), rank=args.rank, world_size=args.dry_run
    )


def join_world(args, device, launch):
    """Join the world that torchrun describes in the environment -> the store that all ranks see."""
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 0}
    for name, value in alone.items():
        os.environ.setdefault(name, str(value))  # plain `python script.py` is a world of one
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    world = next(dist.rendezvous("env://"))
    # the same three, but nothing that dead ranks have set before a restart is in this store
    store, rank, world_size = guard.among_the_living(*world)
    backend = choose_backend(device, store, launch)
    args.timeout = args.timeout or TIMEOUT[backend]
    timeout = timedelta(seconds=args.timeout)
    guard.prepare(timeout)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout
    )
    return store


# ---- a run -------------------------------------------------------------------

TIMEOUT = {"gloo": 30, "nccl": 600}  # seconds
BLOCK = 5  # steps of one implementation before it is the other's turn
CHECKED = 300  # steps of one run that are compared, at most


@dataclass(kw_only=True)
class Side:
    """One implementation of a technique, ready to train: what a run steps, judges and saves."""

    model: object  # what main() trains: a module, or a ZeRO around one
    optimizer: torch.optim.Optimizer
    # main() calls it for every step, with arguments that the script chooses -> this rank's part of
    # the loss, the gradient norm. None where main() has another way
    train_step: Callable | None = None
    # () -> {the plain GPT's name: whole tensor}, on every rank. full_gradients leaves out what is
    # frozen
    full_gradients: Callable
    full_state_dict: Callable
    # (k) -> this rank's part of the sum of token losses of held-out batch k
    evaluate: Callable
    # () -> [checkpoint.Piece], what this rank holds of parameters and AdamW states. A script that
    # gives none refuses --save, --resume and --init-from itself
    pieces: Callable | None = None
    # () -> a small dict that is saved with the pieces, and is run.start.extra when a run resumes
    extra: Callable | None = None
    # () -> {"parameters", "gradients", "optimizer": [tensors]} for the ledger, if model and
    # optimizer do not say it
    held: Callable | None = None
    # True where a step whose norm is inf is skipped (fp16 with loss scaling): it is no fault then
    may_overflow: bool = False

    def all_held(self):
        if self.held:
            return self.held()
        return held_by(self.model, self.optimizer)

    def release(self):
        """Give the memory back. The side is of no use afterwards."""
        for tensors in self.all_held().values():
            for t in tensors:
                local = getattr(t, "_local_tensor", t)  # of a DTensor: this rank's
                local.untyped_storage().resize_(0)


class Run:
    """One run of a script, real or dry: main() of ddp.py shows the order of use.

    impls: the names of what is trained; None takes them from --impl. build(cfg, seed, device,
    dtype) makes the plain model, if it is not the GPT.
    """

    def __init__(self, args, impls=None, build=build):
        self.args = args
        self.cfg = args.cfg
        self.dry = bool(args.dry_run)
        self.dtype = DTYPES[args.dtype]
        self.build_plain = build
        self.impls = impls or (args.impl,)
        if self.impls == ("both",):
            self.impls = ("scratch", "torch")
        self.sides = {}  # {impl: Side}, from begin() on
        # May plain() repeat this training from step 0 on, so that a resumed run is compared with
        # one that was never interrupted? See plain_first(). moe.py and hybrid_3d.py set it to False
        # where earlier runs of the training have routed tokens in another way
        self.replays = True
        self.start = checkpoint.begin(args)  # the checkpoint to start from; bad: exit code 2
        self.corpus = load_corpus(args.data, self.cfg.seq)
        self.held_out_text = None  # unless --eval-every
        if args.eval_every:
            texts = hold_out(self.corpus, self.cfg.seq, "--eval-every")
            self.corpus, self.held_out_text = texts
        self.join()
        self.plan_steps()
        self.open_books()

    def join(self):
        """The process group."""
        launch = launched()
        self.device = choose_device(self.args, launch)
        self.store = None  # what ranks see without a collective; none in a dry run
        self.fake = None  # the FakeTensorMode of a dry run, while it is entered
        if self.dry:
            join_fake_world(self.args)
        else:
            self.store = join_world(self.args, self.device, launch)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def plan_steps(self):
        self.first = self.start.steps  # the first step
        self.last = self.args.steps - 1
        if self.dry:  # one step that makes AdamW's states, one that has them
            self.last = min(self.args.steps, 2) - 1
        self.checked = min(self.last, self.first + CHECKED - 1)  # the last step that is compared
        self.step = self.first  # the one under way
        self.saved = self.first  # the newest checkpoint was written after so many steps
        self.request = None  # a guard.Request that listens for SIGTERM; None where nothing is saved
        self.stopping = False  # has any rank heard SIGTERM?
        if self.args.save and not self.dry:
            self.request = guard.Request()

    def open_books(self):
        self.clock = Clock("cpu" if self.dry else self.device)
        self.marks = None  # the clock's marks before and after a step
        self.trace = {impl: Trace() for impl in self.impls}
        self.times = {impl: [] for impl in self.impls}  # ms of every step
        self.ledger = {}  # {impl: Ledger} of the last step
        self.rows = []  # of the textbook
        self.extra = {}  # a script's own keys of the report
        self.table = report.Table(self.first, self.last, bool(self.args.eval_every))
        self.step_log = None  # --log, on rank 0

    def __enter__(self):
        if self.dry:
            from torch._subclasses.fake_tensor import FakeTensorMode

            self.fake = FakeTensorMode()
            self.corpus = self.fake.from_tensor(self.corpus)
            if self.held_out_text is not None:
                self.held_out_text = self.fake.from_tensor(self.held_out_text)
            self.fake.__enter__()
        return self

    def __exit__(self, kind, *_):
        if self.dry:
            self.fake.__exit__(None, None, None)
        if kind is KeyboardInterrupt:
            done = self.first + len(self.times[self.impls[0]])
            self.say(f"interrupted after {done} of {self.args.steps} steps")
            os._exit(130)
        if kind not in (None, SystemExit):
            guard.testify(self.rank, self.step)
            return  # the other ranks may still wait in a collective
        # a closure or a cycle may keep a group alive beyond destroy; gloo would abort at exit
        gc.collect()
        dist.destroy_process_group()

    def say(self, *words):
        if self.dry or self.rank == 0:
            report.say(*words)

    def show_held(self):
        """What this rank holds in a step, by kind, as bars."""
        memory = self.ledger[self.impls[0]].memory
        self.say("\nheld in one step")
        for line in report.bars(list(memory.items())):
            self.say(line)

    # -- what is trained, and on what

    def build(self):
        """The plain model, with this run's weights, device and dtype; --train freezes the rest."""
        model = self.build_plain(self.cfg, self.args.seed, self.device, self.dtype)
        return self.freeze(model)

    def freeze(self, model):
        """With --train freezes what it does not find -> the model."""
        if self.args.train:
            found = freeze(model, self.args.train)
            require(found, f"--train {self.args.train}: matches no parameter's name")
        return model

    def batch(self, step, rows=None):
        """Rows (default: all) of a step's global batch -> inputs, targets, valid in all of it."""
        args = self.args
        x, y, valid = get_batch(
            self.corpus, self.cfg.seq, args.seed, step, args.batch, args.pad, rows
        )
        return x.to(self.device), y.to(self.device), valid

    def held_out(self, k, rows=None):
        """Rows of held-out batch k, which has as many as a global batch -> inputs, targets."""
        x, y, _ = held_out_batch(self.held_out_text, self.cfg.seq, k, self.args.batch, rows)
        return x.to(self.device), y.to(self.device)

    def rate(self, step):
        return learning_rate(step, self.args)

    def set_rate(self, optimizer, step):
        for group in optimizer.param_groups:
            group["lr"] = self.rate(step)

    # -- the steps

    def begin(self, sides):
        """sides: {impl: Side}, built. Loads the checkpoint that they start from."""
        self.sides = sides
        for side in sides.values():
            if not self.dry:
                checkpoint.restore(self.start, side.pieces, side.optimizer)
        if self.args.log and self.rank == 0 and not self.dry:
            self.step_log = report.StepLog(self.args.log, self.first)

    def steps(self):
        """Yields (impl, step) in order.

        With --impl both the two take turns of BLOCK steps, so that both meet the same noise.
        """
        if self.dry:
            self.say("dry run: no values")
        elif self.rank == 0:
            self.table.head()
        if self.args.check and not self.dry and self.checked < self.last:
            count = self.checked + 1 - self.first
            self.say(f"the check covers the first {count} steps; the others run unchecked")
        self.validate_first()
        for first in range(self.first, self.last + 1, BLOCK):
            for impl in self.impls:
                for step in range(first, min(first + BLOCK, self.last + 1)):
                    self.step = step
                    yield impl, step
                    if self.stopping and step < self.last:
                        self.say(f"stopped by SIGTERM; {self.args.save} has all {step + 1} "
                                 "steps: --resume it")
                        sys.exit(0)

    @contextlib.contextmanager
    def measure(self, impl, step):
        """Times a step. The last one is watched by the ledger, the one before by the profiler."""
        is_last = step == self.last
        on_gpu = self.device.type == "cuda" and not self.dry
        with contextlib.ExitStack() as stack:
            if is_last:
                ledger = Ledger(held=self.sides[impl].all_held, device=self.device)
                self.ledger[impl] = stack.enter_context(ledger)
            if self.args.profile and step == max(self.first, self.last - 1):
                stack.enter_context(self.profiler(impl))
            if is_last and on_gpu:
                torch.cuda.reset_peak_memory_stats()
            before = self.clock.mark()
            yield
            self.marks = before, self.clock.mark()
            if is_last and on_gpu and impl == self.impls[0]:
                self.extra["allocator_peak"] = torch.cuda.max_memory_allocated()

    def profiler(self, impl):
        name = f"{Path(program()).stem}-{impl}-rank{self.rank}.json"
        return profiled(Path(self.args.profile, name), self.say)

    def ms(self, impl):
        """The median over the steps, without the first and the last if there are others.

        The first is a warmup, and the ledger slows the last one down.
        """
        times = self.times.get(impl)
        if self.dry or not times:
            return None
        return statistics.median(times[1:-1] or times)

    def log(self, impl, step, loss, norm):
        """After a step: judge it, note it, save it. Collectives: every rank calls it.

        loss: this rank's part; the parts of all ranks add up to the loss of the global batch.
        """
        if self.dry:
            return
        side = self.sides[impl]
        loss = self.sum_losses(loss)
        self.times[impl].append(self.clock.ms(*self.marks))
        self.trace[impl].log(step, loss, norm)
        self.look_for_faults(side, step, loss, norm)
        if self.keeps(step):
            self.trace[impl].keep(step, side.full_gradients(), side.full_state_dict())
        validation = None
        if self.validates(step):
            validation = self.validate(impl, step)
        if impl == self.impls[0]:
            self.tell(impl, step, loss, norm, validation)
        if checkpoint.due(self.args, step, self.stopping):
            self.save(side, step)  # there is one side: checkpoint.begin() refuses --impl both here
        if self.rank == 0:
            self.table.progress(step, self.times[impl][-1], len(self.impls))

    def save(self, side, step):
        extra = {}
        if side.extra:
            extra.update(side.extra())
        if self.is_tuning():
            extra["tuning"] = True
        identity = checkpoint.identity(self.args)
        steps = step + 1
        written = checkpoint.write(
            self.args.save, steps, side.pieces(), identity, keep=self.saved, extra=extra
        )
        if written:
            self.saved = steps
        elif step == self.last or self.stopping:
            sys.exit(1)  # what is wrong has been said

    def sum_losses(self, part):
        """This rank's part -> the loss of the global batch.

        The same all-reduce sets self.stopping: it tells all ranks whether any has heard SIGTERM.
        """
        heard = bool(self.request and self.request.made)
        both = torch.stack([part.detach().double(), part.new_tensor(heard, dtype=torch.float64)])
        dist.all_reduce(both)  # partial -> replicated
        loss, asked = both.unbind()
        self.stopping = asked.item() > 0
        return loss

    def look_for_faults(self, side, step, loss, norm):
        watched = bool(self.args.watch) and (step + 1) % self.args.watch == 0
        if side.may_overflow:
            norm = 0.0
        fault = guard.fault(loss, norm, watched, side.full_gradients, side.full_state_dict)
        require(not fault, f"step {step}: {fault}", code=1)

    def tell(self, impl, step, loss, norm, validation):
        """A line of the table, a line of --log."""
        if self.rank != 0:
            return
        ms = self.times[impl][-1]
        speed = 1e3 * self.args.batch * self.cfg.seq / ms
        if self.table.is_due(step) or validation is not None:
            self.table.row(step, loss.item(), float(norm), self.rate(step), speed, validation)
        if self.step_log:
            figures = dict(
                step=step, loss=loss.item(), norm=float(norm), rate=self.rate(step), ms=ms,
                tokens=(step + 1) * self.args.batch * self.cfg.seq,
            )
            if validation is not None:
                figures["validation"] = validation
            self.step_log.write(**figures)

    # -- held-out text

    def validates(self, step):
        """Is the loss on held-out text due after this step?"""
        every = self.args.eval_every
        return bool(every) and ((step + 1) % every == 0 or step == self.last)

    def validate_first(self):
        """Before the first step."""
        if not self.args.eval_every or self.dry:
            return
        for impl in self.impls:
            loss = self.validate(impl, self.first - 1)
            if self.rank == 0 and impl == self.impls[0]:
                self.table.before(loss)

    def held_out_targets(self):
        """-> how many batches are read, how many valid targets they have."""
        seq = self.cfg.seq
        batches = held_out_batches(self.held_out_text, seq, self.args.batch)
        count = min(count_windows(self.held_out_text, seq), batches * self.args.batch)
        return batches, count * seq

    def validate(self, impl, step):
        """-> the loss on held-out text, a number, after this step."""
        batches, targets = self.held_out_targets()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for k in range(batches):
                total += self.sides[impl].evaluate(k)
        dist.all_reduce(total)  # partial -> replicated
        loss = total.cpu() / targets
        self.trace[impl].validation[step] = loss
        return loss.item()

    # -- the plain run

    def keeps(self, step):
        """Is this a step of which every gradient and parameter is compared?"""
        return self.args.check and not self.dry and step in (self.first, self.checked)

    def plain(self, model=None, extra_loss=None):
        """The same steps by the plain GPT (or this model) in this process -> Trace.

        extra_loss(model), after a forward, is added to the loss.
        """
        if model is None:
            model = self.build()
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer = adamw(trainable.values(), self.args.lr)
        trace = Trace()
        begin = self.plain_start(model, optimizer)
        for step in range(begin, self.checked + 1):
            if step == self.first and self.args.eval_every:
                trace.validation[step - 1] = self.validate_plain(model)
            self.set_rate(optimizer, step)
            optimizer.zero_grad()
            x, y, valid = self.batch(step)
            loss = loss_sum(model(x), y) / valid
            if extra_loss:
                loss = loss + extra_loss(model)
            loss.backward()
            norm = clip_gradients(trainable.values(), self.args.clip)
            optimizer.step()
            if step >= self.first:
                trace.log(step, loss, norm)
                if self.validates(step):
                    trace.validation[step] = self.validate_plain(model)
            if self.keeps(step):
                gradients = {name: p.grad for name, p in trainable.items()}
                trace.keep(step, gradients, model.state_dict())
        return trace

    def plain_start(self, model, optimizer):
        """Load what the plain run begins with -> plain_first()."""
        first = self.plain_first()
        if first > 0:
            checkpoint.read_plain(self.start, model, optimizer)
        elif self.start.flag == "--init-from":  # step 0 begins with the checkpoint's weights
            checkpoint.read_plain(self.start, model)
        return first

    def plain_first(self):
        """-> the step at which the plain run begins.

        As a rule it is 0, so that a resumed run is compared with one that was never interrupted.
        It is self.first, where this run resumes, if that is beyond CHECKED, or if what came before
        cannot be replayed: where the training began from other weights (--init-from), for one.
        """
        if self.first > CHECKED or self.is_tuning() or not self.replays:
            return self.first
        return 0

    def is_tuning(self):
        """Has this training, here or in a run before this one, begun with --init-from?"""
        return self.start.flag == "--init-from" or "tuning" in self.start.extra

    def validate_plain(self, model):
        batches, targets = self.held_out_targets()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for k in range(batches):
                x, y = self.held_out(k)
                total += loss_sum(model(x), y)
        return total.cpu() / targets

    # -- the report

    def textbook(self, what, formula, expected, measured, unit="bytes"):
        """A row of the report. Rows that make up the bytes a rank sends in a step begin "wire"."""
        row = {"what": what, "formula": formula}
        row["expected"] = round(float(expected), 6)
        row["measured"] = round(float(measured), 6)
        row["unit"] = unit
        self.rows.append(row)

    def finish(self, total, own, plain=None, judged_as=None):
        """Check, gather, print, write --json -> exit code.

        total: parameters in all; own: how many are on this rank. plain: () -> the Trace to compare
        with (default: self.plain). judged_as: the dtype whose tolerance counts (default: --dtype).
        """
        impl = self.impls[0]
        mine = dict(
            rank=self.rank, own=own, memory=self.ledger[impl].memory,
            collectives=self.ledger[impl].collectives,
        )
        if self.dry:
            self.publish([mine], total, None, None)
            return 0
        # by the store, not by collectives: these may wait for as long as the plain run takes
        self.store.set(f"rank {self.rank}", json.dumps(mine))
        if self.rank == 0:
            ranks = [json.loads(self.store.get(f"rank {r}")) for r in range(self.world_size)]
            check, plain_loss = self.check(plain or self.plain, judged_as or self.args.dtype)
            unwritten = self.publish(ranks, total, check, plain_loss)
            wrong = bool(check) and not check["passed"]
            self.store.set("failed", str(int(wrong or unwritten)))
        self.store.wait(["failed"], timedelta(days=1))
        failed = int(self.store.get("failed"))
        dist.barrier()  # rank 0 may be the store: it leaves when all have read
        return failed

    def check(self, plain, dtype):
        """-> the report's check, the plain run's losses; both None without --check."""
        if not self.args.check:
            return None, None
        if self.device.type == "cuda":
            for side in self.sides.values():
                side.release()  # the plain GPT does not meet the trained ones in memory
        try:
            trace = plain()
        except torch.OutOfMemoryError:
            self.say("not checked: the plain GPT does not fit on one device")
            return None, None
        check = compare(self.trace[self.impls[0]].until(self.checked), trace, dtype)
        return check, [loss.item() for loss in trace.loss.values()]

    def publish(self, ranks, total, check, plain_loss):
        """Print the report, write it to --json -> True if it could not be written."""
        impl = self.impls[0]
        ms = self.ms(impl)
        args = {name: value for name, value in vars(self.args).items() if name != "cfg"}
        per_rank = []
        for rank in ranks:
            per_rank.append(rank.pop("own"))  # it is not reported among `ranks`, but under its name
        result = dict(
            script=Path(program()).stem, impl=self.args.impl, world_size=self.world_size,
            backend=dist.get_backend(), device=self.device.type, dtype=self.args.dtype,
            dry_run=self.dry, torch=torch.__version__, args=args,
            parameters=dict(total=total, per_rank=per_rank), ranks=ranks, textbook=self.rows,
            loss=[loss.item() for loss in self.trace[impl].loss.values()],
            plain_loss=plain_loss, check=check, ms_per_step=ms, tokens_per_second=None,
        )
        if self.trace[impl].validation:
            result["validation"] = {s: v.item() for s, v in self.trace[impl].validation.items()}
        if ms:
            result["tokens_per_second"] = 1e3 * self.args.batch * self.cfg.seq / ms
        if self.args.impl == "both":
            theirs = self.ms("torch")
            result["torch_ms_per_step"] = theirs
            result["speedup"] = None
            if ms:
                result["speedup"] = theirs / ms
        result.update(self.extra)
        report.show(result)
        if not self.args.json:
            return False
        trouble = report.write_json(self.args.json, result)
        if trouble:
            print(f"{program()}: error: {trouble}", file=sys.stderr, flush=True)
        return bool(trouble)
