"""What papers have published, beside what the code here says: `./run.sh papers`.

    ./run.sh papers > docs/papers.md            all of it, as Markdown; no network, no GPU
    python tools/papers.py --json papers.json   besides, a list of all numbers

"Published" stands below as it is printed in the paper, or is what a formula printed there gives.
"Ours" is never typed in: it is measured by the ledger on fake tensors, played by the simulator of
schedules, counted on a model, or worked out by tools/estimate.py, which is what tools/plan.py uses.
The exit code is 1 if a number is not as published and nothing says why.
"""
import argparse
import contextlib
import inspect
import json
import math
import multiprocessing
import sys
import time
import warnings
from collections import namedtuple
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch can do without

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn as nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
# run as a program, this lacks the root on its path; imported from the root, it lacks tools/
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import amp_accum_ckpt  # noqa: E402
import context_parallel  # noqa: E402
import ddp  # noqa: E402
import moe  # noqa: E402
import plan  # noqa: E402
import tensor_parallel  # noqa: E402
from common import GPT, PRESETS, GPTConfig, adamw, join_fake_world  # noqa: E402
from estimate import Layout, assess, timed  # noqa: E402
from gpu import peak_of  # noqa: E402
from harness.ledger import Ledger  # noqa: E402
from harness.timeline import (  # noqa: E402
    bubble_rate, chunks, costs, in_flight, longest, simulate)
from harness.usage import require  # noqa: E402
from hybrid_3d import Mesh  # noqa: E402
from pipeline_parallel import make_plans, search  # noqa: E402
from zero import ZeRO  # noqa: E402

# ---- a number, and whether ours is it ------------------------------------------

EQUAL = "equal"  # to the last bit
DIGIT = "last digit"  # papers round or cut off: less than one of the last digit printed
BELOW = "below"  # what is published is a bound

# published: text as printed. within: one of the three above, or a part of the published number
Row = namedtuple("Row", "line column published ours within why", defaults=(DIGIT, ""))
# paper, where: the source; what: what its numbers are; ours: what of this project says them
# make() -> [Row]; cost: about how much of the time it takes
Table = namedtuple("Table", "paper where what ours make cost", defaults=(1,))

SCALES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "%": 0.01}


def scale_of(published):
    return SCALES.get(published[-1], 1)


def decimals_of(published):
    """How many digits of 31.4% are behind the point."""
    _, _, behind = published.rstrip("KMBT%").partition(".")
    return len(behind)


def value_of(published):
    """31.4% -> 0.314"""
    digits = published.rstrip("KMBT%").replace(",", "")
    return float(digits) * scale_of(published)


def agrees(row):
    value = value_of(row.published)
    gap = abs(row.ours - value)
    if row.within == EQUAL:
        return gap == 0
    if row.within == BELOW:
        return row.ours < value
    if row.within == DIGIT:
        return gap < scale_of(row.published) * 10 ** -decimals_of(row.published)
    return gap <= row.within * value


def text_of(row):
    """-> 31.4 / 31.41"""
    decimals = decimals_of(row.published)
    if row.within != EQUAL:
        decimals += 1
    ours = f"{row.ours / scale_of(row.published):,.{decimals}f}"
    if row.published[-1] in SCALES:
        ours += row.published[-1]
    sign = ""
    if row.within == BELOW:
        sign = "< "
    return f"{sign}{row.published} / {ours}"


def rows_of(text, columns, ours, **more):
    """-> [Row]. text: lines "a label | 1.2 3.4"; ours(label) -> [a number for each column]"""
    rows = []
    for line in text.strip().splitlines():
        label, _, published = line.partition(" | ")
        values = ours(label.strip())
        for column, printed, value in zip(columns, published.split(), values, strict=True):
            rows.append(Row(label.strip(), column, printed, value, **more))
    return rows


def loosened(rows, within):
    """Rows that do not agree are held to this relative tolerance instead."""
    return [row if agrees(row) else row._replace(within=within) for row in rows]


def explained(rows, why):
    """Rows that do not agree get a reason."""
    return [row if agrees(row) else row._replace(why=why) for row in rows]


def numbers_in(label):
    """'7.5B, 64 GPUs' -> ['7.5B', '64'], the words that begin with a digit"""
    return [word for word in label.replace(",", "").split() if word[0].isdigit()]


# ---- being one of many ranks ---------------------------------------------------

NOTHING = {"parameters": [], "gradients": [], "optimizer": []}


@contextlib.contextmanager
def one_of(ranks):
    """This process is rank 0 of so many, without the others and without memory: a dry run."""
    join_fake_world(SimpleNamespace(rank=0, dry_run=ranks))
    try:
        with FakeTensorMode():
            yield
    finally:
        dist.destroy_process_group()


def payload(ledger):
    return sum(figures["payload"] for figures in ledger.collectives.values())


def wire(ledger):
    return sum(figures["wire"] for figures in ledger.collectives.values())


def calls(ledger, *names):
    return sum(ledger.collectives[name]["calls"] for name in names)


# ---- ZeRO ----------------------------------------------------------------------

ZERO = "Rajbhandari 2019, ZeRO, arXiv:1910.02054"
STAGES = ("P_os", "P_os+g", "P_os+g+p")
SHAPES = {  # of two matrices, which have so many numbers together
    "7.5B": (37_500, 100_000),
    "128B": (160_000, 400_000),
    "1T": (500_000, 1_000_000),
}
ZERO_1 = """
7.5B, 1 GPUs     | 120 120 120
7.5B, 4 GPUs     | 52.5 41.3 30
7.5B, 16 GPUs    | 35.6 21.6 7.5
7.5B, 64 GPUs    | 31.4 16.6 1.88
7.5B, 256 GPUs   | 30.4 15.4 0.47
7.5B, 1024 GPUs  | 30.1 15.1 0.12
128B, 1 GPUs     | 2048 2048 2048
128B, 4 GPUs     | 896 704 512
128B, 16 GPUs    | 608 368 128
128B, 64 GPUs    | 536 284 32
128B, 256 GPUs   | 518 263 8
128B, 1024 GPUs  | 513 257 2
1T, 1 GPUs       | 16000 16000 16000
1T, 4 GPUs       | 7000 5500 4000
1T, 16 GPUs      | 4750 2875 1000
1T, 64 GPUs      | 4187 2218 250
1T, 256 GPUs     | 4046 2054 62.5
1T, 1024 GPUs    | 4011 2013 15.6
"""
ZERO_2 = """
MP 1, 64 GPUs     | 2B 7.6B 14.4B 128B
MP 2, 128 GPUs    | 4B 15.2B 28.8B 256B
MP 4, 256 GPUs    | 8B 30.4B 57.6B 0.5T
MP 8, 512 GPUs    | 16B 60.8B 115.2B 1T
MP 16, 1024 GPUs  | 32B 121.6B 230.4B 2T
"""


def train_by_zero(size, ranks, stage, pairs=1):
    """A step of 2 x pairs Linears in bf16, as one of so many ranks -> its ledger."""
    rows, columns = SHAPES[size]
    columns //= pairs
    with one_of(ranks):
        model = nn.Sequential()
        for _ in range(pairs):
            model.append(nn.Linear(rows, columns, bias=False, dtype=torch.bfloat16))
            model.append(nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16))
        zero = ZeRO(model, partial(adamw, lr=1e-3), stage=stage, units=list(model))
        with Ledger(held=zero.held) as ledger:
            zero.zero_grad()
            model(torch.ones(1, rows, dtype=torch.bfloat16)).sum().backward()
            zero.reduce()
            zero.clip_grad_norm_(1.0)
            zero.step()
    return ledger


def held_by_zero(size, ranks, stage):
    memory = train_by_zero(size, ranks, stage).memory
    return memory["parameters"] + memory["gradients"] + memory["optimizer"]


def zero_memory():
    def ours(label):
        size, ranks = numbers_in(label)
        return [held_by_zero(size, int(ranks), stage) / 1e9 for stage in (1, 2, 3)]
    return rows_of(ZERO_1, STAGES, ours)


def zero_models():
    held = [held_by_zero("7.5B", 64, stage) / 7.5e9 for stage in range(4)]

    def ours(label):
        mp, _ = numbers_in(label)  # a rank has 1/mp of the model
        return [32e9 / each * int(mp) for each in held]
    return loosened(rows_of(ZERO_2, ("baseline", *STAGES), ours), 0.01)


def zero_sent():
    def ours(_):
        sent = [wire(train_by_zero("7.5B", 1024, stage, pairs=8)) for stage in range(4)]
        return [bytes_sent / 2 / 7.5e9 for bytes_sent in sent]
    rows = rows_of("7.5B, 1024 GPUs | 2 2 2 3", ("baseline", *STAGES), ours)
    return [row._replace(within=0.03) for row in rows]


# ---- parameters ----------------------------------------------------------------

GPT_2 = """
gpt2         | 117M 124M
gpt2-medium  | 345M 355M
gpt2-large   | 762M 774M
gpt2-xl      | 1542M 1558M
"""
GPT_3 = """
Small, 12 layers of 768    | 125M
Medium, 24 layers of 1024  | 350M
Large, 24 layers of 1536   | 760M
XL, 24 layers of 2048      | 1.3B
2.7B, 32 layers of 2560    | 2.7B
6.7B, 32 layers of 4096    | 6.7B
13B, 40 layers of 5140     | 13.0B
175B, 96 layers of 12288   | 175.0B
"""
MEGATRON_2019 = """
40 layers of 1536  | 1.2B
54 layers of 1920  | 2.5B
64 layers of 2304  | 4.2B
72 layers of 3072  | 8.3B
"""
MISCOUNTED = ("OpenAI has said so: \"our original parameter counts were wrong due to an error\" "
              "(README of openai/gpt-2), which is where the second column is from")
ROUNDED = ("that is 355.9M and 174.6B. The paper rounds; Narayanan 2021, table 2, has 174.6B for "
           "the latter too")


@cache
def count(layers, width, heads, vocab, seq):
    """-> how many parameters the plain GPT has"""
    with torch.device("meta"):
        model = GPT(GPTConfig(layers, width, heads, vocab, seq))
    return sum(p.numel() for p in model.parameters())


def counted(lines, vocab, seq, head_width):
    """of lines that end in "40 layers of 1536" -> [Row]"""
    def ours(label):
        layers, width = [int(number) for number in numbers_in(label)[-2:]]
        return [count(layers, width, width // head_width, vocab, seq)]
    return rows_of(lines, ["parameters"], ours)


def gpt_2():
    rows = rows_of(GPT_2, ("paper", "README"), lambda label: [count(*PRESETS[label])] * 2)
    return explained(rows, MISCOUNTED)


def gpt_3():
    return explained(counted(GPT_3, 50257, 2048, 64), ROUNDED)


# ---- Narayanan 2021: sizes, speeds, days ---------------------------------------

NARAYANAN = "Narayanan 2021, Megatron-LM on GPU clusters, arXiv:2104.04473"
# label: width, layers, heads, tp, pp, GPUs, batch
RUNS = {
    "1.7B": (2304, 24, 24, 1, 1, 32, 512),
    "3.6B": (3072, 30, 32, 2, 1, 64, 512),
    "7.5B": (4096, 36, 32, 4, 1, 128, 512),
    "18.4B": (6144, 40, 48, 8, 1, 256, 1024),
    "39.1B": (8192, 48, 64, 8, 2, 512, 1536),
    "76.1B": (10240, 60, 80, 8, 4, 1024, 1792),
    "145.6B": (12288, 80, 96, 8, 8, 1536, 2304),
    "310.1B": (16384, 96, 128, 8, 16, 1920, 2160),
    "529.6B": (20480, 105, 128, 8, 35, 2520, 2520),
    "1008.0B": (25600, 128, 160, 8, 64, 3072, 3072),
    "174.6B": (12288, 96, 96, 8, 12, 384, 1536),
}
NARAYANAN_1 = """
1.7B, 32 GPUs       | 1.7B 137 4.4
3.6B, 64 GPUs       | 3.6B 138 8.8
7.5B, 128 GPUs      | 7.5B 142 18.2
18.4B, 256 GPUs     | 18.4B 135 34.6
39.1B, 512 GPUs     | 39.1B 138 70.8
76.1B, 1024 GPUs    | 76.1B 140 143.8
145.6B, 1536 GPUs   | 145.6B 148 227.1
310.1B, 1920 GPUs   | 310.1B 155 297.4
529.6B, 2520 GPUs   | 529.6B 163 410.2
1008.0B, 3072 GPUs  | 1008.0B 163 502.0
"""
NARAYANAN_2 = """
174.6B, 384 GPUs, batch 1536   | 174.6B 153 84
174.6B, 768 GPUs, batch 1536   | 174.6B 149 43
174.6B, 1536 GPUs, batch 1536  | 174.6B 141 23
529.6B, 560 GPUs, batch 2240   | 529.6B 171 156
529.6B, 1120 GPUs, batch 2240  | 529.6B 167 80
529.6B, 2240 GPUs, batch 2240  | 529.6B 159 42
"""
MODEL_TIME = 0.08  # how well the time model of plan.py agrees with these runs


def cluster(gpus, batch, *flags):
    """plan.py's flags, as it reads them from a command line of these words."""
    words = ["plan.py", "--gpus", gpus, "--batch", batch, *flags]
    before = sys.argv
    sys.argv = [str(word) for word in words]
    try:
        return plan.read()
    finally:
        sys.argv = before


def layout(dp, tp, pp, micro, schedule="1f1b", sp=False, ckpt="full"):
    return Layout(dp=dp, tp=tp, pp=pp, micro=micro, schedule=schedule, sp=sp, zero=0, ckpt=ckpt)


def run_of(label, gpus, batch, tokens=300e9, pp=None):
    """-> what the time model says of a run as in 2021"""
    width, layers, heads, tp, stages, *_ = RUNS[label]
    pp = pp or stages
    cfg = GPTConfig(layers, width, heads, 51200, 2048)
    dp = gpus // tp // pp
    at = cluster(gpus, batch, "--megatron-2021", "--tokens", tokens)
    return timed(assess(cfg, at, layout(dp, tp, pp, batch // dp)))


def size_of(label):
    width, layers, heads, *_ = RUNS[label]
    return count(layers, width, heads, 51200, 2048)


def with_tolerance(rows, column):
    """All columns but this one are of the time model."""
    return [row if row.column == column else row._replace(within=MODEL_TIME) for row in rows]


def narayanan_1():
    def ours(label):
        size, gpus = numbers_in(label)
        *_, batch = RUNS[size]
        tflops = run_of(size, int(gpus), batch)["tflops"]
        return [size_of(size), tflops, tflops * int(gpus) / 1e3]
    columns = ("parameters", "TFLOP/s per GPU", "PFLOP/s")
    return with_tolerance(rows_of(NARAYANAN_1, columns, ours), "parameters")


def narayanan_2():
    def ours(label):
        size, gpus, batch = numbers_in(label)
        names = run_of(size, int(gpus), int(batch))
        return [size_of(size), names["tflops"], names["days"]]
    columns = ("parameters", "TFLOP/s per GPU", "days")
    return with_tolerance(rows_of(NARAYANAN_2, columns, ours), "parameters")


def narayanan_days():
    lines = "174.6B, 1024 GPUs, batch 1536, 300e9 tokens | 34"
    lines += "\n1008.0B, 3072 GPUs, batch 3072, 450e9 tokens | 84"

    def ours(label):
        size, gpus, batch, tokens = numbers_in(label)
        pp = None
        if size == "174.6B":
            pp = 8  # 1024 GPUs do not divide by tp 8 x pp 12
        return [run_of(size, int(gpus), int(batch), float(tokens), pp)["days"]]
    return rows_of(lines, ["days"], ours, within=MODEL_TIME)


# ---- Korthikanti 2022: activations ---------------------------------------------

KORTHIKANTI = "Korthikanti 2022, activation recomputation, arXiv:2205.05198"
MODELS = {  # table 3: heads, width, micro-batch
    "22B": (64, 6144, 4),
    "175B": (96, 12288, 1),
    "530B": (128, 20480, 1),
    "1T": (160, 25600, 1),
}


class Dropped(nn.Module):
    """A module and a dropout behind it, whose mask has a byte a number, as on GPUs."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return dropout(self.module(x))


def dropout(x):
    return torch.ops.aten.native_dropout(x, 0.1, True)[0]


def attend_unfused(q, k, v):
    """Attention as in the paper, which keeps the T x T matrices."""
    T, D = q.shape[-2:]
    future = torch.full((T, T), -math.inf, dtype=q.dtype).triu(1)
    weights = (q @ k.transpose(-2, -1) / math.sqrt(D) + future).softmax(-1)
    return dropout(weights) @ v


def block_of(heads, width, kind, attend):
    """The block of the toy GPT in bf16, with the paper's dropouts, cut by tensor_parallel.py."""
    torch.set_default_dtype(torch.bfloat16)
    model = GPT(GPTConfig(1, width, heads, 256, 2048))
    torch.set_default_dtype(torch.float32)
    model.blocks[0].attn.attend = attend
    if kind is not None:
        tensor_parallel.parallelize(model, kind())
    block = model.blocks[0]
    block.attn = Dropped(block.attn)
    block.mlp = Dropped(block.mlp)
    return block


def play_block(label, kind=None, ranks=1, attend=attend_unfused, forward=nn.Module.__call__,
               backward=False):
    """-> the ledger of a block's forward, and backward; bytes kept between the two; FLOPs.

    kind: how tensor_parallel.py cuts it, None: not. forward(block, x) runs it.
    """
    heads, width, micro_batch = MODELS[label]
    with one_of(ranks):
        block = block_of(heads, width, kind, attend)
        tokens = 2048
        if kind is tensor_parallel.CutSequence:
            tokens //= ranks
        x = torch.ones(micro_batch, tokens, width, dtype=torch.bfloat16, requires_grad=True)
        held = {**NOTHING, "parameters": list(block.parameters())}
        counter = FlopCounterMode(display=False)
        with Ledger(held=lambda: held) as ledger, counter:
            y = forward(block, x)
            kept = ledger.saved_bytes
            if backward:
                y.backward(torch.ones_like(y))
    return ledger, kept, counter.get_total_flops()


# What table 2 calls it: (how play_block does it, the bytes that table 2 says, by s b h).
# t: ranks, 8. A: 5 a s / h.
TABLE_2 = {
    "no parallelism": (dict(), lambda t, A: 34 + A),
    "tensor parallel": (
        dict(kind=tensor_parallel.WholeSequence, ranks=8), lambda t, A: 10 + 24 / t + A / t),
    "+ sequence parallel": (
        dict(kind=tensor_parallel.CutSequence, ranks=8), lambda t, A: 34 / t + A / t),
    "tensor, selective recompute": (
        dict(kind=tensor_parallel.WholeSequence, ranks=8,
             attend=partial(amp_accum_ckpt.full, attend_unfused)), lambda t, A: 10 + 24 / t),
    "+ sequence, selective": (
        dict(kind=tensor_parallel.CutSequence, ranks=8,
             attend=partial(amp_accum_ckpt.full, attend_unfused)), lambda t, A: 34 / t),
    "full recompute": (dict(forward=amp_accum_ckpt.full), lambda t, A: 2),
}


@cache
def kept_by(name, label):
    """-> what a block keeps, in s b h bytes"""
    how, _ = TABLE_2[name]
    _, width, micro_batch = MODELS[label]
    _, kept, _ = play_block(label, **how)
    return kept / (2048 * micro_batch * width)


def korthikanti_2():
    rows = []
    for name, (_, formula) in TABLE_2.items():
        for label, (heads, width, _) in MODELS.items():
            published = f"{formula(8, 5 * heads * 2048 / width):.2f}"
            rows.append(Row(name, label, published, kept_by(name, label)))
    return rows


HALF_AGAIN = ("the paper's equation 8 adds 12 s h FLOPs per token, as much as three forwards of "
              "attention. One has 4 s h; amp_accum_ckpt.py repeats half of it, Q K^T, since nobody "
              "wants the product with V again")


def korthikanti_savings():
    """What selective recomputation saves of a block's activations, and costs in FLOPs."""
    def ours(label):
        size, _ = label.split(",")
        saved = 1 - kept_by("+ sequence, selective", size) / kept_by("+ sequence parallel", size)
        _, _, flops = play_block(size, backward=True)
        how, _ = TABLE_2["tensor, selective recompute"]
        _, _, more = play_block(size, attend=how["attend"], backward=True)
        return [saved, more / flops - 1]
    lines = "175B, GPT-3 | 70% 2.7%\n530B, MT-NLG | 65% 1.6%"
    rows = rows_of(lines, ("activations saved", "more FLOPs"), ours)
    return explained(rows, HALF_AGAIN)


OWN_FORMULA = "the text says so; by the paper's own table 2 it is (34/8) / (10 + 24/8 + 64/8)"


def korthikanti_figure_7():
    def ours(label):
        baseline = kept_by("tensor parallel", label)
        return [kept_by("+ sequence, selective", label) / baseline]
    lines = "\n".join(f"{label} | 20%" for label in MODELS)
    return explained(rows_of(lines, ["both"], ours, within=BELOW), OWN_FORMULA)


KORTHIKANTI_5 = """
22B, 8 GPUs     | 41.5%
175B, 64 GPUs   | 51.4%
530B, 280 GPUs  | 56.0%
1T, 512 GPUs    | 56.3%
"""
TABLE_3 = {  # layers, pp, batch, schedule
    "22B": (48, 1, 4, "1f1b"),
    "175B": (96, 8, 64, "interleaved"),
    "530B": (105, 35, 280, "interleaved"),
    "1T": (128, 64, 512, "1f1b"),
}
ONE_EFFICIENCY = ("plan.py has one efficiency of matmuls for all sizes, fitted to the runs of "
                  "2021; the paper's smallest model is 10 points below its next one")


def korthikanti_5():
    def ours(label):
        size, gpus = label.removesuffix(" GPUs").split(", ")
        heads, width, micro_batch = MODELS[size]
        layers, pp, batch, schedule = TABLE_3[size]
        lay = layout(1, 8, pp, batch // micro_batch, schedule, sp=True, ckpt="none")
        cfg = GPTConfig(layers, width, heads, 51200, 2048)
        return [timed(assess(cfg, cluster(int(gpus), batch), lay))["mfu"]]
    rows = rows_of(KORTHIKANTI_5, ["MFU"], ours, within=MODEL_TIME)
    return explained(rows, ONE_EFFICIENCY)


# ---- what is sent: tensor, sequence, context parallel ----------------------------


def sent_by_block(label, kind, ranks, backward=True):
    """-> the ledger of a block; its numbers are of 2 bytes"""
    ledger, _, _ = play_block(label, kind=kind, ranks=ranks, backward=backward)
    return ledger


def tp_volume():
    """8 b s h (t-1)/t numbers per layer, 4 all-reduces (Narayanan 2021, sections 2.3 and 3.2)"""
    def ours(label):
        ranks = int(numbers_in(label)[0])
        ledger = sent_by_block("175B", tensor_parallel.WholeSequence, ranks)
        return [wire(ledger) / 2 / (2048 * 12288), calls(ledger, "all_reduce")]
    lines = [f"tp {t} | {8 * (t - 1) / t:g} 4" for t in (2, 4, 8)]
    return rows_of("\n".join(lines), ("numbers / (b s h)", "all-reduces"), ours, within=EQUAL)


MORE_GATHERS = ("the paper says so too: inputs of column-parallel Linears are gathered again in "
                "backward, which it counts apart, as gathers that computation hides: two of our "
                "six")


def sp_collectives():
    def ours(_):
        ledger = sent_by_block("175B", tensor_parallel.CutSequence, 8)
        return [calls(ledger, "all_gather"), calls(ledger, "reduce_scatter")]
    rows = rows_of("sp, tp 8 | 4 4", ("all-gathers", "reduce-scatters"), ours, within=EQUAL)
    return explained(rows, MORE_GATHERS)


def attention(kind, ranks, tokens, width):
    """A forward of attention with 64 heads -> its ledger. tokens: the whole sequence."""
    with one_of(ranks):
        shape = (1, 64, tokens // ranks, width // 64)
        q, k, v = [torch.ones(shape, dtype=torch.bfloat16) for _ in range(3)]
        with Ledger(held=lambda: NOTHING) as ledger:
            kind().attend(q, k, v)
    return ledger


def ulysses_volume():
    """4 N h / P numbers to and from attention; Megatron's sequence parallelism: 4 N h."""
    def ours(label):
        ranks, tokens, width = [int(number) for number in numbers_in(label)]
        ledger = attention(context_parallel.Ulysses, ranks, tokens, width)
        return [payload(ledger) / 2 / (tokens * width / ranks)]
    lines = "\n".join(f"P {P}, N {2048 * P}, h 8192 | 4" for P in (2, 4, 8, 16, 32, 64))
    return rows_of(lines, ["numbers / (N h / P)"], ours, within=EQUAL)


def megatron_volume():
    def ours(label):
        ranks = int(numbers_in(label)[0])
        ledger = sent_by_block("175B", tensor_parallel.CutSequence, ranks, backward=False)
        return [payload(ledger) / 2 / (2048 * 12288)]
    lines = "P 2, N 2048, h 12288 | 4\nP 4, N 2048, h 12288 | 4\nP 8, N 2048, h 12288 | 4"
    return rows_of(lines, ["numbers / (N h)"], ours, within=EQUAL)


RING = """
A100 NVLink, 312 TFLOP/s, 300 GB/s       | 1.0
A100 InfiniBand, 312 TFLOP/s, 12.5 GB/s  | 24.5
TPU-v3, 123 TFLOP/s, 112 GB/s            | 1.1
TPU-v4, 275 TFLOP/s, 268 GB/s            | 1.0
TPU-v5e, 196 TFLOP/s, 186 GB/s           | 1.1
"""
SLIP = "312e12 / 12.5e9 is 24,960: by the paper's own formula, c >= FLOP/s / bandwidth, 25.0"


WIDTH = 4096  # 64 heads of 64


def hop_of_ring():
    """-> bytes that a hop sends per token of a block, FLOPs of a block per token squared"""
    ranks = 8
    tokens = 1024
    ledger = attention(context_parallel.Ring, ranks, ranks * tokens, WIDTH)
    with one_of(ranks):
        q = torch.ones(1, 64, tokens, 64, dtype=torch.bfloat16)
        counter = FlopCounterMode(display=False)
        with counter:
            context_parallel.attend_block(q, q, q, causal=False)
    flops = counter.get_total_flops() / tokens ** 2
    return wire(ledger) / (ranks - 1) / tokens, flops


def ring_blocks():
    """The smallest block whose attention takes as long as the next block's journey."""
    bytes_of_token, flops = hop_of_ring()

    def ours(label):
        tflops, bandwidth = [float(number) for number in numbers_in(label)]
        seconds = bytes_of_token / (1e9 * bandwidth)  # of a token's journey
        tokens = seconds * 1e12 * tflops / flops  # c of them: c seconds = c^2 flops / (1e12 tflops)
        return [tokens / 1e3]
    return explained(rows_of(RING, ["thousand tokens"], ours), SLIP)


def ring_hop():
    def ours(_):
        bytes_of_token, flops = hop_of_ring()
        return [bytes_of_token / WIDTH, flops / WIDTH]
    return rows_of("a block | 4 4", ("bytes / (c d)", "FLOPs / (d c^2)"), ours, within=EQUAL)


# ---- pipelines -----------------------------------------------------------------

# Tables 9 and 5 of Qi 2023: F, B, W and a transfer in ms -> bubble rates
QI_TIMES = """
1.5B, p 8, m 24    | 18.522 18.086  9.337 0.601
1.5B, p 8, m 32    | 18.513 18.086  9.331 0.626
1.5B, p 8, m 64    | 18.546 18.097  9.321 0.762
6.2B, p 8, m 24    | 29.718 29.444 19.927 0.527
6.2B, p 8, m 32    | 29.802 29.428 19.530 0.577
6.2B, p 8, m 64    | 29.935 29.621 19.388 0.535
14.6B, p 16, m 48  | 11.347 11.248  8.132 0.377
14.6B, p 16, m 64  | 11.307 11.254  8.101 0.379
14.6B, p 16, m 128 | 11.325 11.308  8.109 0.378
28.3B, p 32, m 96  | 10.419 10.207  7.715 0.408
28.3B, p 32, m 128 | 10.408 10.204  7.703 0.408
28.3B, p 32, m 256 | 10.402 10.248  7.698 0.460
"""
QI_5 = """
1.5B, p 8, m 24     | 0.2431 0.1055 0.1585 0.1083
1.5B, p 8, m 32     | 0.1985 0.0818 0.1242 0.0837
1.5B, p 8, m 64     | 0.1240 0.0443 0.0674 0.0444
6.2B, p 8, m 24     | 0.2347 0.0808 0.1323 0.0698
6.2B, p 8, m 32     | 0.1898 0.0628 0.1045 0.0559
6.2B, p 8, m 64     | 0.1091 0.0320 0.0554 0.0294
14.6B, p 16, m 48   | 0.2552 0.1104 0.1397 0.0672
14.6B, p 16, m 64   | 0.2082 0.0852 0.1088 0.0516
14.6B, p 16, m 128  | 0.1251 0.0445 0.0576 0.0266
28.3B, p 32, m 96   | 0.2646 0.1493 0.1421 0.0641
28.3B, p 32, m 128  | 0.2168 0.1164 0.1106 0.0490
28.3B, p 32, m 256  | 0.1352 0.0624 0.0594 0.0257
"""
QI_5_AUTO = """
1.5B, p 8, m 24     | 0.1585 0.0433
1.5B, p 8, m 32     | 0.1242 0.0039
1.5B, p 8, m 64     | 0.0674 0.0026
6.2B, p 8, m 24     | 0.1323 0.0029
6.2B, p 8, m 32     | 0.1045 0.0022
6.2B, p 8, m 64     | 0.0554 0.0010
14.6B, p 16, m 48   | 0.1397 0.0066
14.6B, p 16, m 64   | 0.1088 0.0054
14.6B, p 16, m 128  | 0.0576 0.0028
28.3B, p 32, m 96   | 0.1421 0.0038
28.3B, p 32, m 128  | 0.1106 0.0029
28.3B, p 32, m 256  | 0.0594 0.0018
"""
QI_SIZES = {"1.5B": (24, 2304, 24), "6.2B": (32, 4096, 32),  # layers, width, heads
            "14.6B": (48, 5120, 40), "28.3B": (64, 6144, 48)}
# of table 8, from the program that the authors published; its transfers are of both directions
QI_TIMES_8 = """
6.2B, p 16, m 48   | 14.407 14.380 9.676 1.610
6.2B, p 16, m 64   | 14.412 14.393 9.688 1.621
6.2B, p 16, m 128  | 14.316 14.306 9.639 1.619
14.6B, p 24, m 72  | 6.763 6.969 5.251 0.755
14.6B, p 24, m 96  | 6.783 6.984 5.259 0.758
14.6B, p 24, m 192 | 6.785 6.990 5.260 0.770
28.3B, p 32, m 96  | 9.458 9.748 7.288 0.879
28.3B, p 32, m 128 | 9.469 9.744 7.306 0.892
28.3B, p 32, m 256 | 9.447 9.644 7.193 0.887
"""
QI_8 = """
6.2B, p 16, m 48    | 0.2668 0.1499 0.1536 0.0823 0.0697
6.2B, p 16, m 64    | 0.2206 0.1169 0.1198 0.0630 0.0533
6.2B, p 16, m 128   | 0.1390 0.0621 0.0637 0.0325 0.0274
14.6B, p 24, m 72   | 0.2699 0.1519 0.1439 0.0628 0.0638
14.6B, p 24, m 96   | 0.2229 0.1184 0.1121 0.0480 0.0483
14.6B, p 24, m 192  | 0.1403 0.0630 0.0595 0.0247 0.0250
28.3B, p 32, m 96   | 0.2676 0.1509 0.1429 0.0629 0.0593
28.3B, p 32, m 128  | 0.2204 0.1177 0.1111 0.0478 0.0451
28.3B, p 32, m 256  | 0.1362 0.0626 0.0593 0.0251 0.0236
"""


def times_in(text):
    """-> {label: [numbers]}"""
    found = {}
    for line in text.strip().splitlines():
        label, _, numbers = line.partition("|")
        found[label.strip()] = [float(number) for number in numbers.split()]
    return found


def rate_of(plans, times):
    """-> the bubble's part of the longest rank's time"""
    F, B, W, comm = times
    return bubble_rate(simulate(plans, costs(plans, F, B, W), comm))


def sizes_in(label):
    """-> layers, width, heads; ranks; micro-batches"""
    size, ranks, microbatches = numbers_in(label)
    return QI_SIZES[size], int(ranks), int(microbatches)


def qi_5():
    times = times_in(QI_TIMES)

    def ours(label):
        (layers, *_), p, m = sizes_in(label)
        plans = [make_plans("1f1b", p, m), make_plans("interleaved", p, m, layers // p),
                 make_plans("zb-h1", p, m), make_plans("zb-h2", p, m)]
        return [rate_of(one, times[label]) for one in plans]
    return loosened(rows_of(QI_5, ("1F1B", "1F1B-I", "ZB-H1", "ZB-H2"), ours), 0.05)


SEARCH = "our search (pipeline_parallel.py, --schedule auto) ends with a slightly longer plan"


def qi_5_auto():
    times = times_in(QI_TIMES)

    def ours(label):
        (_, width, heads), p, m = sizes_in(label)
        # W needs 32 of the (34 + 5 a s / h) s b h bytes that a block keeps; s is 1024
        waiting = 32 * width / (34 * width + 5 * heads * 1024)
        plans = [search(p, m, limit, times[label], waiting) for limit in (p, 2 * p)]
        return [rate_of(one, times[label]) for one in plans]
    return explained(rows_of(QI_5_AUTO, ("ZB-1p", "ZB-2p"), ours), SEARCH)


def qi_8():
    times = times_in(QI_TIMES_8)

    def ours(label):
        (layers, *_), p, m = sizes_in(label)
        F, B, W, both = times[label]
        plans = [make_plans("1f1b", p, m), make_plans("interleaved", p, m, layers // p)]
        plans += [make_plans(name, p, m) for name in ("zb-h1", "zb-h2", "zb-v")]
        return [rate_of(one, (F, B, W, both / 2)) for one in plans]
    columns = ("1F1B", "1F1B-I", "ZB-H1", "ZB-H2", "ZB-V")
    return loosened(rows_of(QI_8, columns, ours), 0.05)


def qi_memory():
    """Micro-batches in flight, the most of any rank."""
    def ours(label):
        p = int(numbers_in(label)[0])
        names = ("1f1b", "zb-h1", "zb-h2", "zb-v")
        return [max(map(in_flight, make_plans(name, p, 4 * p))) for name in names]
    lines = [f"p {p} | {p} {p} {2 * p - 1} {p}" for p in (4, 8, 16)]
    return rows_of("\n".join(lines), ("1F1B", "ZB-H1", "ZB-H2", "ZB-V"), ours, within=EQUAL)


DEEPSEEK_2 = """
1F1B      | 21 8
ZB1P      | 7 8
DualPipe  | 6 9
"""
OURS_2 = {"1F1B": ("1f1b", 8), "ZB1P": ("zb-h1", 8), "DualPipe": ("dualpipe-v", 4)}


def deepseek_2():
    """8 stages, 20 micro-batches, F = W = 1, B = 2; dualpipe-v has two stages on each of 4 ranks"""
    def ours(label):
        name, ranks = OURS_2[label]
        plans = make_plans(name, ranks, 20)
        stages = chunks(plans[0])
        # costs() takes a rank's times for all its stages, and B without W
        played = simulate(plans, costs(plans, stages, stages, stages), joined=True)
        busy = 20 * 3 * stages
        return [longest(played) - busy, stages * max(map(in_flight, plans))]
    return rows_of(DEEPSEEK_2, ("bubble", "activations"), ours, within=EQUAL)


# ---- experts -------------------------------------------------------------------


def uniform_loss(experts, top_k, **coefficients):
    """-> the balancing loss of E tokens that choose all experts equally often"""
    tokens = experts
    logits = torch.zeros(tokens, experts, dtype=torch.float64)
    load = torch.full((experts,), tokens * top_k // experts)
    loss = moe.balancing_loss(load, logits, logits.softmax(-1), top_k, **coefficients)
    return loss.item()


def default_of(function, name):
    return inspect.signature(function).parameters[name].default


def switch_loss():
    def ours(label):
        return [uniform_loss(int(numbers_in(label)[0]), 1, alpha=0.01, beta=0.0)]
    lines = "\n".join(f"N {N} | 0.010000" for N in (2, 8, 64, 256, 2048))
    return rows_of(lines, ["loss"], ours)


E_SQUARED = ("GShard's loss is a mean over experts, Switch's and ours a sum times E: E^2 times as "
             "much, which its constant k makes up for")


def gshard_loss():
    def ours(label):
        return [uniform_loss(int(numbers_in(label)[0]), 2, alpha=1.0, beta=0.0)]
    lines = "\n".join(f"E {E} | {1 / E ** 2:.7f}" for E in (8, 128, 512))
    return explained(rows_of(lines, ["loss / k"], ours), E_SQUARED)


def gshard_capacity():
    """C = 2 N / (G E), with N / G tokens in a group"""
    def ours(label):
        experts, tokens = [int(number) for number in numbers_in(label)]
        return [moe.capacity(1.0, 2, tokens, experts)]
    lines = "E 128, N/G 1024 | 16\nE 512, N/G 1024 | 4\nE 8, N/G 4096 | 1024"
    return rows_of(lines, ["tokens"], ours, within=EQUAL)


def switch_capacity():
    """Tokens per batch / experts x capacity factor"""
    def ours(label):
        factor, tokens, experts = [float(number) for number in numbers_in(label)]
        return [moe.capacity(factor, 1, int(tokens), int(experts))]
    lines = "factor 1.0, T 1024, N 64 | 16\nfactor 1.25, T 1024, N 64 | 20"
    return rows_of(lines + "\nfactor 2.0, T 1024, N 64 | 32", ["tokens"], ours, within=EQUAL)


SHORT_RUNS = ("chosen for runs of some hundred steps, in which the paper's would do nothing; "
              "an argument sets it")
COEFFICIENTS = """
Switch's alpha, section 2.2               | 0.01
ST-MoE's c_z, eq. 6                       | 0.001
DeepSeek-V3's bias speed, section 4.2     | 0.001
"""


def coefficients():
    def ours(label):
        name, _, _ = label.partition(",")
        defaults = {
            "Switch's alpha": default_of(moe.balancing_loss, "alpha"),
            "ST-MoE's c_z": default_of(moe.balancing_loss, "beta"),
            "DeepSeek-V3's bias speed": default_of(moe.step_biases, "gamma"),
        }
        return [defaults[name]]
    return explained(rows_of(COEFFICIENTS, ["default"], ours, within=EQUAL), SHORT_RUNS)


def deepseek_loss():
    def ours(label):
        experts, top_k, _ = numbers_in(label)
        return [uniform_loss(int(experts), int(top_k), alpha=1e-4, beta=0.0)]
    return rows_of("N_r 256, K_r 8, alpha 0.0001 | 0.000100", ["loss"], ours)


# ---- Llama 3 -------------------------------------------------------------------

LLAMA_4 = """
tp 8, cp 1, pp 16, dp 64    | 8192 1 8 8 128
tp 8, cp 1, pp 16, dp 128   | 16384 1 8 8 128
tp 8, cp 16, pp 16, dp 8    | 16384 1 8 128 2048
"""
LLAMA_SPEED = """
430 TFLOP/s  | 43%
400 TFLOP/s  | 41%
380 TFLOP/s  | 38%
"""
ORDER = ("hybrid_3d.py has pipelines outermost, as Narayanan 2021, section 3, where gradients are "
         "summed among near ranks; Llama 3 has data outermost, whose messages FSDP sends ahead")


def llama_4():
    """GPUs, and how far apart neighbours on an axis are."""
    def ours(label):
        tp, cp, pp, dp = [int(number) for number in numbers_in(label)]
        join_fake_world(SimpleNamespace(rank=0, dry_run=tp * cp * pp * dp))
        mesh = Mesh(dp, cp, tp, pp)
        ranks = {axis: dist.get_process_group_ranks(group) for axis, group in mesh.group.items()}
        world = dist.get_world_size()
        dist.destroy_process_group()
        # The ranks of "data" go by dp, and then by cp: number cp is the next on dp, and number 1
        # the next on cp. If cp is 1, number 1 is the next on dp, as far away as one on cp would be
        strides = [ranks["tp"][1], ranks["data"][1], ranks["pp"][1], ranks["data"][cp]]
        return [world, *strides]
    columns = ("GPUs", "tp apart", "cp apart", "pp apart", "dp apart")
    return explained(rows_of(LLAMA_4, columns, ours, within=EQUAL), ORDER)


def llama_mfu():
    def ours(label):
        return [float(numbers_in(label)[0]) / peak_of("NVIDIA H100 80GB HBM3")]
    return rows_of(LLAMA_SPEED, ["MFU"], ours)


# ---- defaults of PyTorch -------------------------------------------------------

SCALER = """
scale     | 65536
growth    | 2.0
backoff   | 0.5
interval  | 2000
"""
MEGABYTES = "a MB is 1e6 bytes here, everywhere; there it is 2^20"


def scaler_defaults():
    def ours(label):
        return [default_of(amp_accum_ckpt.LossScaler.__init__, label)]
    return rows_of(SCALER, ["default"], ours, within=EQUAL)


def ddp_defaults():
    def ours(label):
        return [1e6 * default_of(ddp.BucketedDDP.__init__, label)]
    lines = "bucket_mb | 26,214,400\nfirst_bucket_mb | 1,048,576"
    return explained(rows_of(lines, ["bytes"], ours, within=EQUAL), MEGABYTES)


# ---- all of them ---------------------------------------------------------------

QI = "Qi 2023, zero bubble pipelines, arXiv:2401.10241"
LLAMA = "Llama team 2024, Llama 3, arXiv:2407.21783"
ULYSSES = "Jacobs 2023, DeepSpeed Ulysses, arXiv:2309.14509"
LIU = "Liu 2023, ring attention, arXiv:2310.01889"
DEEPSEEK = "DeepSeek-V3 2024, arXiv:2412.19437"
SWITCH = "Fedus 2021, Switch Transformers, arXiv:2101.03961"
GSHARD = "Lepikhin 2020, GShard, arXiv:2006.16668"
LEDGER_OF_TP = "the ledger of a block that tensor_parallel.py cuts, forward and backward"
PLAYED = "pipeline_parallel.py's plans, played by harness/timeline.py"
COUNTED = "the parameters of common.GPT"
UNIFORM = "moe.balancing_loss of tokens that choose all experts equally often"

TABLES = [
    Table(
        ZERO,
        "table 1",
        "GB of model states per GPU",
        "the ledger of a step of two Linears, which have so many parameters, by zero.py as rank 0",
        zero_memory,
        cost=8,
    ),
    Table(
        ZERO,
        "table 2",
        "the largest model for 32 GB",
        "from the bytes per parameter of the same step on 64 GPUs",
        zero_models,
    ),
    Table(
        ZERO,
        "section 7",
        "numbers sent per step and parameter",
        ("the ledger. The paper leaves out (N-1)/N, and zero.py gathers the unit where forward "
         "turns round once, not twice"),
        zero_sent,
        cost=5,
    ),
    Table(
        "GPT-2 (Radford 2019) and GPT-3 (Brown 2020, arXiv:2005.14165)",
        "GPT-2, table 2",
        "parameters",
        COUNTED,
        gpt_2,
    ),
    Table(
        "GPT-2 (Radford 2019) and GPT-3 (Brown 2020, arXiv:2005.14165)",
        "GPT-3, table 2.1",
        "parameters",
        COUNTED,
        gpt_3,
    ),
    Table(
        "Shoeybi 2019, Megatron-LM, arXiv:1909.08053",
        "table 1",
        "parameters",
        COUNTED,
        partial(counted, MEGATRON_2019, 51200, 1024, 96),
    ),
    Table(
        NARAYANAN,
        "table 1",
        "sizes and speed",
        f"{COUNTED}; plan.py's time model, with one efficiency for all",
        narayanan_1,
        cost=3,
    ),
    Table(
        NARAYANAN,
        "table 2, PTD-P",
        "speed, and days for 300e9 tokens",
        "the same; nothing is fitted to these",
        narayanan_2,
    ),
    Table(
        NARAYANAN,
        "section 5.1",
        "days",
        "the same",
        narayanan_days,
    ),
    Table(
        NARAYANAN,
        "sections 2.3 and 3.2",
        "communication of a layer with tensor parallelism",
        LEDGER_OF_TP,
        tp_volume,
        cost=2,
    ),
    Table(
        KORTHIKANTI,
        "table 2",
        "activations of a layer in s b h bytes, t = 8",
        ("what autograd keeps of a block by tensor_parallel.py, with the paper's attention and "
         "dropouts; recomputation is amp_accum_ckpt.full, of attention or of the block"),
        korthikanti_2,
        cost=8,
    ),
    Table(
        KORTHIKANTI,
        "section 5",
        "selective recomputation",
        "the same; FLOPs by torch's counter",
        korthikanti_savings,
        cost=4,
    ),
    Table(
        KORTHIKANTI,
        "figure 7 and its text",
        "both techniques, part of tensor parallelism's bytes",
        "the same",
        korthikanti_figure_7,
    ),
    Table(
        KORTHIKANTI,
        "section 4.2.2",
        "collectives of a layer with sequence parallelism",
        LEDGER_OF_TP,
        sp_collectives,
    ),
    Table(
        KORTHIKANTI,
        "table 5",
        "model FLOPs utilization",
        "plan.py's time model, which has two chunks per rank where the paper has three",
        korthikanti_5,
    ),
    Table(
        QI,
        "table 5, with the times of table 9",
        "bubble rates",
        f"{PLAYED}; a layer is a stage of 1F1B-I",
        qi_5,
        cost=17,
    ),
    Table(
        QI,
        "table 5",
        "bubble rates of schedules found by search",
        "pipeline_parallel.search, played",
        qi_5_auto,
        cost=14,
    ),
    Table(
        QI,
        "table 8, with the times of the authors' program",
        "bubble rates",
        f"{PLAYED}; a rank's layers are stages of 1F1B-I",
        qi_8,
        cost=40,
    ),
    Table(
        QI,
        "sections 2 and 6",
        "activations in micro-batches, m = 4 p",
        "harness.timeline's in_flight of the plans",
        qi_memory,
    ),
    Table(
        DEEPSEEK,
        "table 2, PP = 8",
        "bubble for F = W = 1 and B = 2, and activations of a stage",
        f"{PLAYED}; DualPipe is dualpipe-v, half of it, on 4 ranks",
        deepseek_2,
    ),
    Table(
        DEEPSEEK,
        "section 4.2",
        "balancing loss at uniform load",
        UNIFORM,
        deepseek_loss,
    ),
    Table(
        SWITCH,
        "section 2.2",
        "balancing loss at uniform load, alpha = 0.01",
        UNIFORM,
        switch_loss,
    ),
    Table(
        SWITCH,
        "section 2.2",
        "expert capacity",
        "moe.capacity",
        switch_capacity,
    ),
    Table(
        GSHARD,
        "algorithm 1",
        "balancing loss at uniform load",
        f"{UNIFORM}, alpha = 1",
        gshard_loss,
    ),
    Table(
        GSHARD,
        "top-2 gating",
        "expert capacity 2 N / (G E)",
        "moe.capacity",
        gshard_capacity,
    ),
    Table(
        "Switch, ST-MoE (Zoph 2022, arXiv:2202.08906), DeepSeek-V3",
        "their sections",
        "coefficients",
        "defaults of moe.py",
        coefficients,
    ),
    Table(
        LIU,
        "section 3.2",
        "a block of c tokens, d wide, in bf16",
        "the ledger of context_parallel.Ring and torch's counter of FLOPs",
        ring_hop,
    ),
    Table(
        LIU,
        "table 2",
        "the smallest block that hides a hop",
        "from the same",
        ring_blocks,
    ),
    Table(
        ULYSSES,
        "section 3.2",
        "numbers sent for attention, forward",
        "the ledger of context_parallel.Ulysses",
        ulysses_volume,
    ),
    Table(
        ULYSSES,
        "section 3.2",
        "Megatron's sequence parallelism, a layer forward",
        "the ledger of a block that tensor_parallel.py cuts",
        megatron_volume,
    ),
    Table(
        LLAMA,
        "table 4 and section 3.3.2",
        "GPUs, and how far apart neighbours on an axis are, by the order tp, cp, pp, dp",
        "hybrid_3d.Mesh",
        llama_4,
    ),
    Table(
        LLAMA,
        "table 4",
        "BF16 MFU",
        "by tools/gpu.py's peak of an H100",
        llama_mfu,
    ),
    Table(
        "PyTorch's documentation",
        "torch.amp.GradScaler",
        "defaults",
        "amp_accum_ckpt.LossScaler's",
        scaler_defaults,
    ),
    Table(
        "PyTorch's documentation",
        "DistributedDataParallel, 25 MiB and a first bucket of 1 MiB",
        "defaults",
        "ddp.BucketedDDP's",
        ddp_defaults,
    ),
]

INTRO = """# Published numbers, and ours

Each cell is "published / ours". Published is what the paper prints, or what a formula printed there
gives. Ours is never typed in: the code here says it, on fake tensors, in the simulator of
schedules, or by the formulas of tools/estimate.py. Where no tolerance is named, it is the last
digit that is shown of the published number, since papers round or cut off. A letter says why a
number is not the same. `./run.sh papers > docs/papers.md` makes this page anew."""


def lines_of(table, rows):
    """-> a table in Markdown, aligned, and what has to be said of it."""
    columns = list(dict.fromkeys(row.column for row in rows))
    reasons = list(dict.fromkeys(row.why for row in rows if row.why))
    grid = [["", *columns]]
    for label in dict.fromkeys(row.line for row in rows):
        cells = [cell(row, reasons) for row in rows if row.line == label]
        grid.append([label, *cells])
    widths = [max(map(len, column)) for column in zip(*grid)]
    lines = [f"### {table.where}: {table.what}", "", f"Ours: {table.ours}.{tolerances(rows)}", ""]
    for number, texts in enumerate(grid):
        padded = [text.ljust(width) for text, width in zip(texts, widths)]
        lines.append("| " + " | ".join(padded) + " |")
        if number == 0:
            lines.append("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    lines.append("")
    for letter, why in zip("abcdefgh", reasons):
        lines += [f"({letter}) {why}.", ""]
    return lines


def cell(row, reasons):
    text = text_of(row)
    if row.why:
        letter = "abcdefgh"[reasons.index(row.why)]
        return f"{text} ({letter})"
    if not agrees(row):
        return f"{text} DIFFERS"
    return text


def tolerances(rows):
    """-> " Within 8%: days." """
    columns = {}  # {tolerance: {column: True}}: a dict keeps their order, and each once
    for row in rows:
        if isinstance(row.within, float):
            columns.setdefault(row.within, {})[row.column] = True
    texts = [f" Within {part:.0%}: {', '.join(names)}." for part, names in columns.items()]
    return "".join(texts)


def closing(rows, papers):
    """-> the last line"""
    same = 0
    near = 0
    differ = 0
    for row in rows:
        if not agrees(row):
            differ += 1
        elif isinstance(row.within, float):
            near += 1
        else:
            same += 1
    unexplained = sum(not agrees(row) and not row.why for row in rows)
    text = (f"{len(rows)} numbers from {papers} sources: {same} are the same to the last digit "
            f"printed, {near} within the tolerance named, {differ} are not, for the reasons given.")
    if unexplained:
        text += f" Of {unexplained} nobody knows why."
    return text


def rows_of_table(number):
    try:
        return TABLES[number].make()
    except SystemExit as end:  # a pool would wait for ever for the process that has left
        raise RuntimeError(f"{TABLES[number].where}: exit code {end.code}") from end


def make_all():
    """Yields each table with its rows, in order; two processes make them."""
    numbers = range(len(TABLES))
    # with a thread each: a forked process hangs where it waits for threads that its parent had
    with multiprocessing.get_context("fork").Pool(2, torch.set_num_threads, (1,)) as pool:
        yield from zip(TABLES, pool.imap(rows_of_table, numbers))


def show_progress(done, began):
    """done: how many tables"""
    if not sys.stderr.isatty():
        return
    left = sum(table.cost for table in TABLES[done:])
    past = sum(table.cost for table in TABLES[:done])
    seconds = (time.monotonic() - began) * left / past
    line = f"[{done} of {len(TABLES)} tables, about {seconds:.0f} s left]"
    if done == len(TABLES):
        line = ""
    print(f"\r{line:50}\r", end="", file=sys.stderr, flush=True)


def show_all():
    """Prints the page -> [(table, its rows)]"""
    began = time.monotonic()
    found = []
    paper = None
    print(INTRO)
    for table, rows in make_all():
        found.append((table, rows))
        if table.paper != paper:
            paper = table.paper
            print(f"\n## {paper}")
        print("\n" + "\n".join(lines_of(table, rows)).rstrip(), flush=True)
        show_progress(len(found), began)
    rows = [row for _, some in found for row in some]
    papers = len({table.paper for table, _ in found})
    print("\n" + closing(rows, papers))
    return found


def as_dict(table, row):
    figures = {"paper": table.paper, "where": table.where, "what": table.what, **row._asdict()}
    figures["value"] = value_of(row.published)
    figures["agrees"] = agrees(row)
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], usage="%(prog)s [flags]",
                                     allow_abbrev=False)
    parser.error = lambda message: require(False, message)
    parser.add_argument("--json", metavar="FILE", help="all numbers, besides")
    at = parser.parse_args()
    folder = Path(at.json or ".").absolute().parent
    require(folder.is_dir(), f"--json {at.json}: no such folder")
    found = show_all()
    figures = [as_dict(table, row) for table, rows in found for row in rows]
    if at.json:
        Path(at.json).write_text(json.dumps(figures, indent=1))
    return int(any(not one["agrees"] and not one["why"] for one in figures))


if __name__ == "__main__":
    sys.exit(main())
