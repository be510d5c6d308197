"""Everything the scripts share, and nothing about parallelism.

  GPT          GPT-2, plain, written so that each script can change one thing
  get_batch    real text; any rank can make any part of any step's global batch
  arguments    the flags every script takes; bad usage is one line and exit code 2
  Run          one run of a script: process group, steps, clock, the plain GPT's steps, report

measure.py counts bytes and compares training runs; guard.py sees to it that no run fails silently.
"""
import argparse
import contextlib
import gc
import json
import math
import os
import random
import statistics
import sys
import sysconfig
import time
import zlib
from collections import namedtuple
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from harness import guard
from harness.compare import Trace, compare
from harness.ledger import Ledger
from harness.report import show
from harness.usage import ANY, POSITIVE, require

# ---- the GPT -----------------------------------------------------------------
# B batch   T sequence   C width   H heads   D = C/H head width   V vocabulary   L layers

GPTConfig = namedtuple("GPTConfig", "layers width heads vocab seq", defaults=(4, 128, 4, 256, 128))
PRESETS = {"toy": GPTConfig(), "gpt2": GPTConfig(12, 768, 12, 50257, 1024),
           "gpt2-medium": GPTConfig(24, 1024, 16, 50257, 1024), "gpt2-large": GPTConfig(36, 1280, 20, 50257, 1024),
           "gpt2-xl": GPTConfig(48, 1600, 25, 50257, 1024), "gpt3-175b": GPTConfig(96, 12288, 96, 50257, 2048)}


def attend(q, k, v):
    """Causal attention: three (B, H, T, D) -> (B, H, T, D)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.head_dim = cfg.width // cfg.heads
        # q, k, v apart, not fused: a slice of rows is then a set of heads
        self.q, self.k, self.v, self.out = (nn.Linear(cfg.width, cfg.width) for _ in range(4))
        self.attend = attend  # an attribute, so that it can be exchanged

    def forward(self, x):  # (B, T, C)
        B, T, _ = x.shape
        q, k, v = (f(x).view(B, T, -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = self.attend(q, k, v)  # (B, H, T, D); H is however many heads this rank holds
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.up, self.down = nn.Linear(cfg.width, 4 * cfg.width), nn.Linear(4 * cfg.width, cfg.width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(cfg.width), Attention(cfg)
        self.norm2, self.mlp = nn.LayerNorm(cfg.width), MLP(cfg)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tok, self.pos = nn.Embedding(cfg.vocab, cfg.width), nn.Embedding(cfg.seq, cfg.width)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.norm, self.head = nn.LayerNorm(cfg.width), nn.Linear(cfg.width, cfg.vocab, bias=False)
        self.head.weight = self.tok.weight  # tied: one parameter, called tok.weight

    def embed(self, idx, start=0):  # (B, T) -> (B, T, C)
        return self.tok(idx) + self.pos(torch.arange(start, start + idx.shape[1], device=idx.device))

    def forward(self, idx, start=0):  # (B, T) -> (B, T, V); start is the global position of idx[:, 0]
        x = self.embed(idx, start)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def init_weights(module, layers, seed, prefix=""):
    """GPT-2's N(0, 0.02), smaller by 1/sqrt(2L) on residual projections. Every parameter is drawn by its own full name
    (prefix + its name in module): any part of the model can be made anywhere, in any order, with the same values."""
    for name, p in module.named_parameters(prefix=prefix):
        if p.dim() == 2:
            std = 0.02 / math.sqrt(2 * layers) if name.endswith(("out.weight", "down.weight")) else 0.02
            rng = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            p.copy_(torch.empty(p.shape, dtype=torch.float32).normal_(0, std, generator=rng))
        else:
            p.fill_("norm" in name and name.endswith("weight"))


def build(cfg, seed, device="cpu", dtype=torch.float32):
    """The plain GPT, with the same weights on every rank and device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = GPT(cfg)
    torch.set_default_dtype(before)
    init_weights(model, cfg.layers, seed)
    return model


def loss_sum(logits, targets):
    """(.., V), (..) -> sum of token losses, in fp32 or better. Divide it by the valid targets of the global batch."""
    logits = logits.float() if logits.dtype.itemsize == 2 else logits
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def clip_gradients(parameters, clip, norm=None):
    """To a norm of at most clip (0: any) -> the norm. If that is inf or nan they stay: guard.fault says whose it is."""
    parameters = list(parameters)
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]) if norm is None else norm
    nn.utils.clip_grads_with_norm_(parameters, clip or math.inf, norm.nan_to_num(0, posinf=0))
    return norm


def adamw(parameters, lr):
    # Llama's eps. With 1e-8, Adam makes whole steps of the rounding errors in gradients that are zero (key biases)
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), eps=1e-5, fused=True)


# ---- data --------------------------------------------------------------------

IGNORE = -100  # a target that is not predicted


def load_corpus(path, seq):
    """The bytes of a text file, of a folder's files, or (path "") of the standard library's sources -> (n,) uint8."""
    root = Path(path or sysconfig.get_paths()["stdlib"])
    require(root.exists(), f"--data {path}: no such file or folder")
    try:
        files = [root] if root.is_file() else sorted(f for f in root.glob("**/*" if path else "*.py") if f.is_file())
        text = bytearray(b"\n".join(f.read_bytes() for f in files))
    except OSError as error:
        require(False, f"--data {path}: {error.strerror}: {error.filename or path}")
    require(len(text) > seq, f"--data {root}: {len(text)} bytes in {len(files)} files, but --seq {seq} needs {seq + 1}")
    return torch.frombuffer(text, dtype=torch.uint8)


def get_batch(corpus, seq, seed, step, batch, pad=0.0, rows=None):
    """A pure function: rows (default: all) of a step's global batch -> inputs, targets (rows, T) int64, valid.

    valid is the number of targets that are not IGNORE in the whole global batch, whatever `rows` is.
    """
    rng = random.Random(f"{seed} {step}")
    starts = [rng.randrange(len(corpus) - seq) for _ in range(batch)]
    # uneven on purpose: half of the sequences lose nothing, the others up to 4 x pad of their targets, but one is left
    tails = [min(seq - 1, int(4 * pad * seq * rng.random() * rng.randrange(2))) for _ in range(batch)]
    rows = range(batch) if rows is None else rows
    text = torch.stack([corpus[starts[i]:starts[i] + seq + 1] for i in rows]).long()
    x, y = text[:, :-1].clone(), text[:, 1:].clone()  # not contiguous(): of a single row that is no copy
    for i, row in zip(rows, y):
        row[seq - tails[i]:] = IGNORE
    return x, y, batch * seq - sum(tails)


def share(n, parts, i):
    """Part i of n things in `parts` nearly equal runs -> range."""
    return range(i * n // parts, (i + 1) * n // parts)


# ---- flags -------------------------------------------------------------------

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
FLAGS = {  # name: (default, help[, choices or bounds]); a type as default: none unless given
    "impl": ("scratch", "ours, torch's own, or both in turn and timed", ("scratch", "torch", "both")),
    "model": ("toy", "a preset, whose sizes the next five override", tuple(PRESETS)),
    "layers": (int, "L, transformer blocks", POSITIVE), "width": (int, "C, embedding width", POSITIVE),
    "heads": (int, "H, attention heads", POSITIVE), "vocab": (int, "V; text is bytes: 256 or more", (256, sys.maxsize)),
    "seq": (int, "T, sequence length", POSITIVE),
    "batch": (int, "B, sequences per step over all ranks (8, or one per rank)", POSITIVE),
    "steps": (20, "optimizer steps", POSITIVE), "lr": (1e-3, "AdamW learning rate", (1e-12, 1e3)),
    "clip": (1.0, "largest gradient norm, 0: no clipping", ANY), "seed": (0, "of weights and batches", ANY),
    "data": ("", "text FILE or folder (default: Python's own sources)"),
    "pad": (0.0, "fraction of targets to ignore, unevenly (above 0.25: less)", (0, 0.99)),
    "dtype": ("fp32", "of parameters and arithmetic", tuple(DTYPES)),
    "device": ("auto", "auto: GPUs where there are any", ("auto", "cpu", "cuda")),
    "check": (True, "replay the steps with the plain GPT and compare"),
    "watch": (0, "compare all ranks' parameters after every so many steps", ANY),
    "timeout": (int, "seconds until ranks give up a collective (30, over NCCL 600)", (1, 10**6)),
    "dry_run": (int, "be one of this many ranks, without the others and without memory", POSITIVE),
    "rank": (0, "which one (dry run only)", ANY), "json": ("", "FILE for the report"),
    "profile": ("", "folder for a torch.profiler trace of each rank"),
}


def arguments(doc, **own):
    """The common flags plus a script's own, e.g. micro=(4, "micro-batches", POSITIVE) -> args, all of them in bounds.

    args.cfg is the GPTConfig and args.world_size the ranks, those of a dry run too, so that a script can `require`
    what it needs before anything is built. A default of True makes --name and --no-name.
    """
    parser = argparse.ArgumentParser(description=doc.split("\n")[0], usage="%(prog)s [flags]", allow_abbrev=False,
                                     formatter_class=lambda prog: argparse.HelpFormatter(prog, 2, 30, 110))
    parser.error, flags = lambda message: require(False, message), {**own, **FLAGS}
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    for name, (default, text, *limits) in flags.items():
        options = {"help": text, "default": None if isinstance(default, type) else default}
        if isinstance(default, bool):
            options["action"] = argparse.BooleanOptionalAction if default else "store_true"
        else:
            options["type"] = default if isinstance(default, type) else type(default)
            options["help"] += f" ({default})" if options["default"] not in (None, "") else ""
            options["choices"] = limits[0] if limits and isinstance(limits[0][0], str) else None
            options["metavar"] = None if options["choices"] else name[0].upper()
        parser.add_argument("--" + name.replace("_", "-"), **options)
    args = parser.parse_args()
    for name, (_, _, *limits) in flags.items():
        value = getattr(args, name)
        if limits and isinstance(value, (int, float)):
            low, high = limits[0]
            require(low <= value <= high, f"--{name.replace('_', '-')} {value}: must be {low:g} or more"
                    + f", {high:g} or less" * (high < sys.maxsize or value > high))
    args.cfg = cfg = GPTConfig(*(getattr(args, n) or size for n, size in PRESETS[args.model]._asdict().items()))
    args.world_size = args.dry_run or ranks
    args.batch = args.batch or max(8, args.world_size)
    require(cfg.width % cfg.heads == 0, f"--heads {cfg.heads} does not divide --width {cfg.width}")
    require(not args.dry_run or ranks == 1, f"--dry-run is one rank alone: use python, not torchrun with {ranks}")
    require(args.rank < (args.dry_run or 1), f"--rank {args.rank}: is for --dry-run, up to {args.world_size - 1}")
    require(args.device != "cuda" or torch.cuda.is_available(), "--device cuda: torch finds no GPU")
    folder = os.path.dirname(os.path.abspath(args.json or "x"))
    require(os.path.isdir(folder) and os.access(folder, os.W_OK), f"--json {args.json}: no such folder to write to")
    require(not os.path.isdir(args.json), f"--json {args.json}: is a folder, give a file")
    require(not os.path.isfile(args.profile), f"--profile {args.profile}: is a file, give a folder")
    return args


# ---- a run -------------------------------------------------------------------

BLOCK = 5  # steps of one implementation before it is the other's turn


class Run:
    """One run of a script, real or dry: main() of ddp.py shows the order of use."""

    def __init__(self, args):
        self.args, self.cfg, self.dry = args, args.cfg, bool(args.dry_run)
        self.impls = ("scratch", "torch") if args.impl == "both" else (args.impl,)
        self.corpus = load_corpus(args.data, self.cfg.seq)
        self.device, self.dtype = torch.device("cpu"), DTYPES[args.dtype]
        if self.dry:
            from torch.testing._internal.distributed.fake_pg import FakeStore
            dist.init_process_group("fake", store=FakeStore(), rank=args.rank, world_size=args.dry_run)
        else:
            alone = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
            for name, value in alone.items():
                os.environ.setdefault(name, value)  # plain `python script.py` is a world of one
            gpus = torch.cuda.device_count() if args.device != "cpu" else 0
            if gpus:
                self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
                torch.cuda.set_device(self.device)
            # NCCL wants a GPU for every rank; gloo shares
            backend = "nccl" if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) <= gpus else "gloo"
            timeout = timedelta(seconds=args.timeout or {"gloo": 30, "nccl": 600}[backend])
            guard.prepare(timeout)
            self.store, rank, world_size = guard.among_the_living(*next(dist.rendezvous("env://")))
            dist.init_process_group(backend, store=self.store, rank=rank, world_size=world_size, timeout=timeout)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.first, self.last = 0, (min(args.steps, 2) if self.dry else args.steps) - 1  # a resumed run sets first
        self.trace, self.times = {i: Trace() for i in self.impls}, {i: [] for i in self.impls}
        self.ledger, self.rows, self.extra, self.saved, self.initial, self.step = {}, [], {}, [], None, 0
        self.request, self.stopping = guard.Request() if getattr(args, "save", "") else None, False

    def __enter__(self):
        if self.dry:
            from torch._subclasses.fake_tensor import FakeTensorMode
            self.fake = FakeTensorMode()
            self.corpus = self.fake.from_tensor(self.corpus)
            self.fake.__enter__()
        return self

    def __exit__(self, kind, *_):
        if self.dry:
            self.fake.__exit__(None, None, None)
        if kind is KeyboardInterrupt:
            self.say(f"interrupted after {len(self.times[self.impls[0]])} of {self.args.steps} steps")
            os._exit(130)
        if kind not in (None, SystemExit):
            guard.testify(self.rank, self.step)
        else:  # after an exception the other ranks may still wait in a collective
            gc.collect()  # a group that outlives destroy, in a closure or a cycle, makes gloo abort at exit
            dist.destroy_process_group()

    def say(self, *words):
        if self.dry or self.rank == 0:
            print(*words, flush=True)

    def batch(self, step, rows=None):
        x, y, valid = get_batch(self.corpus, self.cfg.seq, self.args.seed, step, self.args.batch, self.args.pad, rows)
        return x.to(self.device), y.to(self.device), valid

    def steps(self):
        """(impl, step) in order; with --impl both in alternating blocks, so that both meet the same noise."""
        self.say("dry run: no values" if self.dry else f"{'step':>6} {'loss':>9} {'norm':>9} {'tok/s':>9}")
        for start in range(self.first, self.last + 1, BLOCK):
            for impl in self.impls:
                for step in range(start, min(start + BLOCK, self.last + 1)):
                    self.step = step
                    yield impl, step
                    if self.stopping:
                        self.say(f"stopped by SIGTERM; {self.args.save} has all {self.step + 1} steps: --resume it")
                        sys.exit(0)

    def go_on(self, start, state, *of):
        """From a checkpoint.Start, whose values the model has; where those are weights alone, the plain GPT has too."""
        self.first = start.steps
        if start.folder and not start.steps:
            self.initial = {name: t.detach().clone() for name, t in state(*of).items()}

    @contextlib.contextmanager
    def measure(self, impl, step, model, optimizer):
        """Times a step. The last one is watched by the ledger, the one before by the profiler."""
        with contextlib.ExitStack() as stack:
            if step == self.last:
                self.ledger[impl] = stack.enter_context(Ledger(model, optimizer))
            if self.args.profile and step == max(0, self.last - 1):
                file = Path(self.args.profile, f"{Path(sys.argv[0]).stem}-{impl}-rank{self.rank}.json")
                file.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(torch.profiler.profile(on_trace_ready=lambda p: p.export_chrome_trace(str(file))))
            start = time.perf_counter()
            yield
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            self.times[impl].append(1e3 * (time.perf_counter() - start))

    def ms(self, impl):
        """Median of the timed steps: not the first, which warms up, nor the last, which the ledger slows down."""
        times = self.times.get(impl)
        return None if self.dry or not times else statistics.median(times[1:-1] or times)

    def log(self, impl, step, loss, norm, gradients, state, *of):
        """loss: this rank's part; the parts of all add up to the loss of the global batch. gradients(*of), state(*of):
        the plain GPT's, by name; collectives."""
        if self.dry:
            return
        asked = loss.new_tensor(bool(self.request and self.request.made), dtype=torch.float64)
        loss, asked = both = torch.stack([loss.detach().double(), asked])  # two views of it
        dist.all_reduce(both)  # partial -> replicated
        self.trace[impl].log(step, loss, norm)
        self.stopping = asked.item() > 0
        watched, skips = self.args.watch and (step + 1) % self.args.watch == 0, getattr(self.args, "amp", "") == "fp16"
        wrong = guard.fault(loss, 0.0 if skips else norm, watched, lambda: gradients(*of), lambda: state(*of))
        require(not wrong, f"step {step}: {wrong}", code=1)
        if self.keeps(step):
            self.trace[impl].keep(step, gradients(*of), state(*of))
        if impl == self.impls[0] and (step == self.last or step % max(1, (self.last + 1) // 10) == 0):
            speed = 1e3 * self.args.batch * self.cfg.seq / self.times[impl][-1]
            self.say(f"\r{step:6d} {loss.item():9.4f} {float(norm):9.4f} {speed:9,.0f}"[not sys.stdout.isatty():])
        elif self.rank == 0 and sys.stdout.isatty():
            left = sum(map(sum, self.times.values())) / 1e3 / (step + 1 - self.first) * (self.last - step)
            print(f"\r{step:6d} of {self.last + 1}, {left:.0f} s left   ", end="", flush=True)

    def keeps(self, step):
        """Is this a step of which every gradient and parameter is compared?"""
        return self.args.check and not self.dry and step in (self.first, self.last)

    def plain(self, model=None):
        """The same steps by the plain GPT (or this model) in this process -> Trace. A module's `loss` is added."""
        model, trace = model or build(self.cfg, self.args.seed, self.device, self.dtype), Trace()
        model.load_state_dict(self.initial or model.state_dict())
        optimizer = adamw(model.parameters(), self.args.lr)
        for step in range(self.last + 1):
            x, y, valid = self.batch(step)
            optimizer.zero_grad()
            loss = loss_sum(model(x), y) / valid + sum(getattr(m, "loss", 0) for m in model.modules())
            loss.backward()
            norm = clip_gradients(model.parameters(), self.args.clip)
            optimizer.step()
            if step >= self.first:
                trace.log(step, loss, norm)
            if self.keeps(step):
                trace.keep(step, {n: p.grad for n, p in model.named_parameters()}, model.state_dict())
        return trace

    def textbook(self, what, formula, expected, measured):
        """A row of the report. The rows that make up the bytes a rank sends in a step are called "wire ..."."""
        figures = {kind: round(float(n), 6) for kind, n in (("expected", expected), ("measured", measured))}
        self.rows.append({"what": what, "formula": formula, **figures})

    def finish(self, total, own, plain=None):
        """Checks, gathers, prints, writes --json -> exit code. total: parameters in all; own: how many are here."""
        args, impl = self.args, self.impls[0]
        mine = dict(rank=self.rank, own=own, memory=self.ledger[impl].memory, collectives=self.ledger[impl].collectives)
        ranks, check, losses, failed, trace = [mine], None, None, 0, self.trace[impl]
        if not self.dry:  # by the store, not by collectives: these may wait for as long as the plain run takes
            self.store.set(f"rank {self.rank}", json.dumps(mine))
            if self.rank == 0:
                ranks = [json.loads(self.store.get(f"rank {r}")) for r in range(self.world_size)]
                if args.check:
                    plain = plain or self.plain()
                    check = compare(trace, plain, getattr(args, "judged_as", args.dtype))
                    losses = [x.item() for x in plain.loss.values()]
                self.store.set("failed", str(int(bool(check) and not check["passed"])))
            self.store.wait(["failed"], timedelta(days=1))
            failed = int(self.store.get("failed"))
            dist.barrier()  # rank 0 may be the store: it leaves when all have read
        ms = self.ms(impl)
        report = dict(
            script=Path(sys.argv[0]).stem, impl=args.impl, world_size=self.world_size, backend=dist.get_backend(),
            device=self.device.type, dtype=args.dtype, dry_run=self.dry, torch=torch.__version__,
            args={k: v for k, v in vars(args).items() if k != "cfg"},
            parameters=dict(total=total, per_rank=[r.pop("own") for r in ranks]), ranks=ranks, textbook=self.rows,
            loss=[x.item() for x in trace.loss.values()], plain_loss=losses, check=check, ms_per_step=ms,
            tokens_per_second=ms and 1e3 * args.batch * self.cfg.seq / ms, **self.extra)
        if args.impl == "both":
            theirs = self.ms("torch")
            report.update(torch_ms_per_step=theirs, speedup=ms and theirs / ms)
        if self.dry or self.rank == 0:
            show(report)
            if args.json:
                Path(args.json).write_text(json.dumps(report, indent=1))
        return failed
