"""What papers have published, beside what the code here says: `./run.sh papers`.

    ./run.sh papers > docs/papers.md     all of it, as Markdown; no network, no GPU

INTRO, at the end, says what the two are. The exit code is 1 if a number is not as published and
nothing says why.
"""
import contextlib
import math
import sys
from collections import namedtuple
from functools import cache, partial
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import amp_accum_ckpt  # noqa: E402
import context_parallel  # noqa: E402
import moe  # noqa: E402
import tensor_parallel  # noqa: E402
from common import PRESETS, GPTConfig, adamw, build, join_fake_world  # noqa: E402
from harness.flags import require  # noqa: E402
from harness.ledger import Ledger  # noqa: E402
from harness.timeline import (  # noqa: E402
    bubble_rate, chunks, costs, in_flight, longest, simulate, span)
from pipeline_parallel import make_plans, search  # noqa: E402
from tools import plan  # noqa: E402
from tools.estimate import Layout, job_of, parameters_of, timed  # noqa: E402
from hybrid_3d import ZeRO0  # noqa: E402
from zero import ZeRO1, ZeRO2, ZeRO3, held, units_of  # noqa: E402

# ---- a number, and whether ours is it --------------------------------------------

EQUAL = "equal"  # to the last bit
DIGIT = "last digit"  # papers round or cut off: less than one of the last digit printed

# published: text as printed. within: one of the two above, or a part of the published number
Row = namedtuple("Row", "what published ours within why", defaults=(DIGIT, ""))
# where: in the paper; ours: what of this project says them
Table = namedtuple("Table", "paper where ours make")
TABLES = []
SCALES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "%": 0.01}


def table(paper, where, ours):
    """Registers a function without arguments that makes the rows of a table."""
    def register(make):
        TABLES.append(Table(paper, where, ours, make))
        return make
    return register


def digits_of(published):
    """31.4% -> 0.01, what the last letter stands for; 1, how many digits are behind the point"""
    _, _, behind = published.rstrip("KMBT%").partition(".")
    return SCALES.get(published[-1], 1), len(behind)


def agrees(row):
    scale, digits = digits_of(row.published)
    value = scale * float(row.published.rstrip("KMBT%"))
    gap = abs(row.ours - value)
    if row.within == EQUAL:
        return gap == 0
    if row.within == DIGIT:
        return gap < scale * 10 ** -digits
    return gap <= row.within * value


def line_of(row):
    """-> a line of Markdown"""
    scale, digits = digits_of(row.published)
    if row.within != EQUAL:
        digits += 1
    ours = f"{row.ours / scale:,.{digits}f}"
    if row.published[-1] in SCALES:
        ours += row.published[-1]
    said = row.why or "DIFFERS"
    if agrees(row):
        said = row.within
        if row.within not in (EQUAL, DIGIT):
            said = f"within {row.within:.0%}"
    return f"| {row.what} | {row.published} | {ours} | {said} |"


def rows_of(whats, published, ours, within=DIGIT, why=""):
    """-> [Row]. whats: "a, b"; published: "1.2 3.4"; ours: a number for each of them. What does
    not agree gets the reason."""
    rows = []
    for what, printed, value in zip(whats.split(", "), published.split(), ours, strict=True):
        row = Row(what, printed, value, within)
        rows.append(row if agrees(row) else row._replace(why=why))
    return rows


# ---- being one of many ranks -----------------------------------------------------

NOTHING = {"parameters": [], "gradients": [], "optimizer": []}


@contextlib.contextmanager
def one_of(ranks):
    """This process is rank 0 of so many, without the others and without memory: a dry run."""
    join_fake_world(0, ranks)
    try:
        with FakeTensorMode():
            yield
    finally:
        dist.destroy_process_group()


def wire(ledger):
    return sum(figures["wire"] for figures in ledger.collectives.values())


# ---- ZeRO ------------------------------------------------------------------------

ZERO = "Rajbhandari 2019, ZeRO, arXiv:1910.02054"
STAGES = "P_os, P_os+g, P_os+g+p"
LADDER = (ZeRO0, ZeRO1, ZeRO2, ZeRO3)


def train_by_zero(ranks, ladder, pairs=1):
    """A step of 7.5B parameters in bf16, in 2 x pairs Linears, as one of so many ranks -> ledger"""
    with one_of(ranks):
        model = nn.Sequential()
        for _ in range(pairs):
            model.append(nn.Linear(37_500, 100_000 // pairs, bias=False, dtype=torch.bfloat16))
            model.append(nn.Linear(100_000 // pairs, 37_500, bias=False, dtype=torch.bfloat16))
        zero = ladder(units_of(model, list(model)))
        optimizer = adamw(zero.parameter_groups(), lr=1e-3)
        with Ledger(held=lambda: held(model, zero, optimizer)) as ledger:
            zero.zero_grad()
            model(torch.ones(1, 37_500, dtype=torch.bfloat16)).sum().backward()
            zero.reduce()
            zero.clip_grad_norm_(1.0)
            zero.step(optimizer)
    return ledger


@table(ZERO, "table 1: GB of model states per GPU, of 64",
       "the ledger of a step of Linears of so many parameters, by zero.py as rank 0")
def zero_memory():
    memories = [train_by_zero(64, ladder).memory for ladder in LADDER[1:]]
    ours = [sum(memory[kind] for kind in NOTHING) / 1e9 for memory in memories]
    return rows_of(STAGES, "31.4 16.6 1.88", ours)


@table(ZERO, "section 7: numbers sent per step and parameter, 1024 GPUs",
       "the same ledger. The paper leaves out (N-1)/N, and zero.py gathers the unit where forward "
       "turns round once, not twice")
def zero_sent():
    ours = [wire(train_by_zero(1024, ladder, pairs=8)) / 2 / 7.5e9 for ladder in LADDER]
    return rows_of(f"baseline, {STAGES}", "2 2 2 3", ours, within=0.03)


# ---- parameters ------------------------------------------------------------------

ROUNDED = "the paper rounds; Narayanan 2021, table 2, has 174.6B for the same model"
MIXTRAL = moe.PRESETS["mixtral-8x7b"]


@table("Models", "parameters", "counted on common.py's GPT, in both forms")
def parameters():
    sizes = {
        "GPT-2 XL (README of openai/gpt-2)": ("1558M", PRESETS["gpt2-xl"]),
        "GPT-3 175B (Brown 2020; table 2.1)": ("175.0B", PRESETS["gpt3-175b"]),
        "Megatron (Narayanan 2021; table 1)": ("1008.0B", GPTConfig(128, 25600, 160, 51200, 2048)),
        "Llama 3 8B (Llama team 2024)": ("8B", PRESETS["llama3-8b"]),
        "Llama 3 70B (Llama team 2024)": ("70B", PRESETS["llama3-70b"]),
        "Llama 3 405B (Llama team 2024)": ("405B", PRESETS["llama3-405b"]),
    }
    rows = []
    for label, (published, cfg) in sizes.items():
        rows += rows_of(label, published, [parameters_of(cfg)], why=ROUNDED)
    ours = [parameters_of(MIXTRAL, experts) for experts in (8, 2)]  # a token visits 2 of the 8
    return rows + rows_of("Mixtral 8x7B (Jiang 2024), of it a token visits", "47B 13B", ours)


# ---- Narayanan 2021: speeds, days ------------------------------------------------

NARAYANAN = "Narayanan 2021, Megatron-LM on GPU clusters, arXiv:2104.04473"
TIME_MODEL = 0.08  # how well the time model of plan.py agrees with these runs
# label: heads, width, layers, tp, pp, GPUs, batch, TFLOP/s per GPU
RUNS = {
    "1.7B": (24, 2304, 24, 1, 1, 32, 512, "137"),
    "3.6B": (32, 3072, 30, 2, 1, 64, 512, "138"),
    "7.5B": (32, 4096, 36, 4, 1, 128, 512, "142"),
    "18.4B": (48, 6144, 40, 8, 1, 256, 1024, "135"),
    "39.1B": (64, 8192, 48, 8, 2, 512, 1536, "138"),
    "76.1B": (80, 10240, 60, 8, 4, 1024, 1792, "140"),
    "145.6B": (96, 12288, 80, 8, 8, 1536, 2304, "148"),
    "310.1B": (128, 16384, 96, 8, 16, 1920, 2160, "155"),
    "529.6B": (128, 20480, 105, 8, 35, 2520, 2520, "163"),
    "1008.0B": (160, 25600, 128, 8, 64, 3072, 3072, "163"),
    "174.6B": (96, 12288, 96, 8, 12, 1536, 1536, "141"),
}


def job_in_2021(label, tokens=300e9):
    """-> a run of Narayanan 2021, as estimate.py takes it"""
    heads, width, layers, tp, pp, gpus, batch, _ = RUNS[label]
    cfg = GPTConfig(layers, width, heads, 51200, 2048)
    dp = gpus // tp // pp
    words = f"--gpus {gpus} --batch {batch} --megatron-2021 --tokens {tokens}"
    return job_of(cfg, plan.read(words.split()), layout(dp, tp, pp, batch // dp, ckpt="full"))


def layout(dp, tp, pp, micro, schedule="1f1b", sp=False, ckpt="none"):
    return Layout(dp=dp, tp=tp, pp=pp, micro=micro, schedule=schedule, sp=sp, zero=0, ckpt=ckpt)


@table(NARAYANAN, "tables 1 and 2, PTD-P: TFLOP/s of a GPU",
       "plan.py's time model, with one efficiency for all, fitted to table 1; 174.6B is of table 2")
def narayanan_speed():
    labels = [f"{label} on {run[5]} GPUs" for label, run in RUNS.items()]
    published = [run[-1] for run in RUNS.values()]
    ours = [timed(job_in_2021(label))["tflops"] for label in RUNS]
    return rows_of(", ".join(labels), " ".join(published), ours, TIME_MODEL)


@table(NARAYANAN, "section 5.1 and table 2: days", "the same; nothing is fitted to these")
def narayanan_days():
    return [Row("174.6B on 1536 GPUs, 300e9 tokens", "23",
                timed(job_in_2021("174.6B"))["days"], TIME_MODEL),
            Row("1008.0B on 3072 GPUs, 450e9 tokens", "84",
                timed(job_in_2021("1008.0B", 450e9))["days"], TIME_MODEL)]


# ---- Llama 3 405B ----------------------------------------------------------------

H100 = "--gpu-tflops 989 --hbm 3.35 --bandwidth-intra 450 --bandwidth-inter 50"
# GPUs, cp, dp, sequence length, batch of a dp rank, MFU. tp is 8, pp 16. The first version of the
# paper prints dp 4 in the last row, which is not 16,384 GPUs
MESHES = (
    (8192, 1, 64, 8192, 32, "43%"),
    (16384, 1, 128, 8192, 16, "41%"),
    (16384, 16, 8, 131072, 16, "38%"),
)
CHUNKS = "with 16 micro-batches on 16 ranks more than two chunks would make the bubble smaller"


@table("Llama team 2024, Llama 3, arXiv:2407.21783", "table 4: MFU of 405B",
       "plan.py's time model with H100's rates, interleaved with two chunks, attn allgather. The "
       "dry runs are in docs/production.md")
def llama_meshes():
    rows = []
    for gpus, cp, dp, seq, micro, published in MESHES:
        words = f"--model llama3-405b --gpus {gpus} --batch {dp * micro} --seq {seq} {H100}"
        at = plan.read(words.split())
        lay = layout(dp, 8, 16, micro, "interleaved", sp=True)
        lay = lay._replace(cp=cp, attn="allgather", zero=1)
        ours = [timed(job_of(at.cfg, at, lay))["mfu"]]
        rows += rows_of(f"dp {dp} cp {cp} T {seq}", published, ours, TIME_MODEL, CHUNKS)
    return rows


# ---- Korthikanti 2022: activations -----------------------------------------------

KORTHIKANTI = "Korthikanti 2022, activation recomputation, arXiv:2205.05198"
OF_175B = (96, 12288)  # heads, width; one sequence of 2048


class Dropout(nn.Module):
    """Its mask has a byte a number, as on GPUs."""

    def forward(self, x):
        return torch.ops.aten.native_dropout(x, 0.1, True)[0]


def attend_unfused(q, k, v):
    """Attention as in the paper, which keeps the T x T matrices."""
    T, D = q.shape[-2:]
    future = torch.full((T, T), -math.inf, dtype=q.dtype).triu(1)
    weights = (q @ k.transpose(-2, -1) / math.sqrt(D) + future).softmax(-1)
    return Dropout()(weights) @ v


@cache
def play_block(kind=None, ranks=1, attend=attend_unfused, forward=nn.Module.__call__):
    """A block of 175B's GPT in bf16 with the paper's dropouts -> the ledger of its forward and
    backward; s b h bytes kept between the two.

    kind: how tensor_parallel.py cuts it, None: not. forward(block, x) runs it.
    """
    heads, width = OF_175B
    with one_of(ranks):
        model = build(GPTConfig(1, width, heads, 256, 2048), 0, dtype=torch.bfloat16)
        if kind is not None:
            tensor_parallel.parallelize(model, kind())
        block = model.blocks[0]
        block.attn.attend = attend
        block.attn = nn.Sequential(block.attn, Dropout())
        block.mlp = nn.Sequential(block.mlp, Dropout())
        tokens = 2048 // ranks if kind is tensor_parallel.CutSequence else 2048
        x = torch.ones(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)
        with Ledger(held=lambda: {**NOTHING, "parameters": list(block.parameters())}) as ledger:
            y = forward(block, x)
            kept = ledger.saved_bytes
            y.backward(torch.ones_like(y))
    return ledger, kept / (2048 * width)


WHOLE = {"kind": tensor_parallel.WholeSequence, "ranks": 8}
CUT = {"kind": tensor_parallel.CutSequence, "ranks": 8}
AGAIN = partial(amp_accum_ckpt.full, attend_unfused)
# What table 2 calls it: how play_block does it, and the bytes that table 2 says, by s b h, where
# t = 8 ranks and 5 a s / h = 80
TABLE_2 = {
    "no parallelism": ({}, 34 + 80),
    "tensor parallel": (WHOLE, 10 + 24 / 8 + 80 / 8),
    "+ sequence parallel": (CUT, 34 / 8 + 80 / 8),
    "tensor parallel and selective recompute": ({**WHOLE, "attend": AGAIN}, 10 + 24 / 8),
    "+ sequence parallel and selective": ({**CUT, "attend": AGAIN}, 34 / 8),
    "full recompute": ({"forward": amp_accum_ckpt.full}, 2),
}


@table(KORTHIKANTI, "table 2: activations of a layer of 175B in s b h bytes, t = 8",
       "what autograd keeps of a block by tensor_parallel.py, with the paper's attention and "
       "dropouts; recomputation is amp_accum_ckpt.full, of attention or of the block")
def korthikanti_2():
    published = [f"{kept:.2f}" for _, kept in TABLE_2.values()]
    ours = [play_block(**how)[1] for how, _ in TABLE_2.values()]
    return rows_of(", ".join(TABLE_2), " ".join(published), ours)


@table(KORTHIKANTI, "table 5: model FLOPs utilization", "plan.py's time model, with two chunks per "
       "rank where the paper has three")
def korthikanti_5():
    cfg = GPTConfig(105, 20480, 128, 51200, 2048)
    lay = layout(1, 8, 35, 280, "interleaved", sp=True)
    job = job_of(cfg, plan.read(["--gpus", "280", "--batch", "280"]), lay)
    return rows_of("530B on 280 GPUs", "56.0%", [timed(job)["mfu"]], TIME_MODEL)


# ---- what is sent: tensor, sequence, context parallel ------------------------------

MORE_GATHERS = ("the paper says so too: inputs of column-parallel Linears are gathered again in "
                "backward, which it counts apart, as gathers that computation hides: two of our "
                "six")


@table("Collectives of a layer", "Narayanan 2021, 3.2; Korthikanti 2022, 4.2.2: t = 8. Jacobs "
       "2023, 3.2: attention's forward, P = 8",
       "ledgers of a block that tensor_parallel.py cuts, and of context_parallel.Ulysses")
def collectives():
    whole, _ = play_block(**WHOLE)
    cut, _ = play_block(**CUT)
    calls = {name: figures["calls"] for name, figures in cut.collectives.items()}
    numbers = wire(whole) / 2 / (2048 * OF_175B[1])
    rows = rows_of("tensor parallel: numbers / (b s h), all-reduces", "7 4",
                   [numbers, whole.collectives["all_reduce"]["calls"]], EQUAL)
    rows += rows_of("sequence parallel: all-gathers, reduce-scatters", "4 4",
                    [calls["all_gather"], calls["reduce_scatter"]], EQUAL, MORE_GATHERS)
    ledger = attention(context_parallel.Ulysses, 8, 2048, 8192)
    sent = sum(figures["payload"] for figures in ledger.collectives.values()) / 2
    return rows + rows_of("Ulysses: numbers / (N h / P)", "4", [sent / (2048 * 8192)], EQUAL)


def attention(kind, ranks, tokens, width):
    """A forward of attention with 64 heads -> its ledger. tokens: of a rank."""
    with one_of(ranks):
        shape = (1, 64, tokens, width // 64)
        q, k, v = [torch.ones(shape, dtype=torch.bfloat16) for _ in range(3)]
        with Ledger(held=lambda: NOTHING) as ledger:
            kind().attend(q, k, v)
    return ledger


@table("Liu 2023, ring attention, arXiv:2310.01889", "section 3.2: a block of c tokens, d wide, "
       "in bf16", "the ledger of context_parallel.Ring")
def ring():
    sent = wire(attention(context_parallel.Ring, 8, 1024, 4096)) / 7
    return rows_of("bytes / (c d)", "4", [sent / 1024 / 4096], EQUAL)


# ---- pipelines -------------------------------------------------------------------

QI = "Qi 2023, zero bubble pipelines, arXiv:2401.10241"
SEARCH = "our search (pipeline_parallel.py, --schedule auto) ends with a slightly longer plan"


def rate_of(plans, F, B, W, comm):
    """-> the bubble's part of the longest rank's time"""
    return bubble_rate(simulate(plans, costs(plans, F, B, W), comm))


@table(QI, "tables 5 and 9: bubble rates of 6.2B, p = 8, m = 24",
       "pipeline_parallel.py's plans and its search, played by harness/timeline.py; a layer is a "
       "stage of 1F1B-I, as there")
def qi_5():
    times = (29.718, 29.444, 19.927, 0.527)  # F, B, W and a transfer in ms, of table 9
    plans = [make_plans("1f1b", 8, 24), make_plans("interleaved", 8, 24, 32 // 8),
             make_plans("zb-h1", 8, 24), make_plans("zb-h2", 8, 24)]
    rows = rows_of("1F1B, 1F1B-I, ZB-H1, ZB-H2", "0.2347 0.0808 0.1323 0.0698",
                   [rate_of(one, *times) for one in plans], within=0.05)
    # W needs 32 of the (34 + 5 a s / h) s b h bytes that a block keeps: 32 heads, s 1024, h 4096
    waiting = 32 / (34 + 5 * 32 * 1024 / 4096)
    found = [search(8, 24, limit, partial(span, times=times), waiting) for limit in (8, 16)]
    return rows + rows_of("ZB-1p, ZB-2p", "0.1323 0.0029",
                          [rate_of(one, *times) for one in found], why=SEARCH)


@table(QI, "table 8: bubble rate of 6.2B, p = 16, m = 48",
       "the same, with the times of the authors' program")
def qi_8():
    rate = rate_of(make_plans("zb-v", 16, 48), 14.407, 14.380, 9.676, 1.610 / 2)
    return rows_of("ZB-V", "0.0697", [rate], within=0.05)


@table(QI, "sections 2 and 6: activations in micro-batches, p = 8, m = 32",
       "harness.timeline's in_flight of the plans")
def qi_memory():
    names = ("1f1b", "zb-h1", "zb-h2", "zb-v")
    ours = [max(map(in_flight, make_plans(name, 8, 32))) for name in names]
    return rows_of("1F1B, ZB-H1, ZB-H2, ZB-V", "8 8 15 8", ours, EQUAL)


@table("DeepSeek-V3 2024, arXiv:2412.19437", "table 2, PP = 8: bubble of 20 micro-batches, F = W "
       "= 1, B = 2; activations of a stage",
       "plans, played; DualPipe is dualpipe-v, half of it: two stages on each of 4 ranks")
def deepseek_2():
    rows = []
    for label, name, ranks, published in (
            ("1F1B", "1f1b", 8, "21 8"), ("ZB1P", "zb-h1", 8, "7 8"),
            ("DualPipe", "dualpipe-v", 4, "6 9")):
        plans = make_plans(name, ranks, 20)
        stages = chunks(plans[0])
        # costs() takes a rank's times for all its stages, and B without W
        played = simulate(plans, costs(plans, stages, stages, stages), joined=True)
        bubble = longest(played) - 20 * 3 * stages
        ours = [bubble, stages * max(map(in_flight, plans))]
        rows += rows_of(f"{label}: bubble, activations", published, ours, EQUAL)
    return rows


# ---- experts ---------------------------------------------------------------------


@table("Experts", "Fedus 2021 (Switch), 2.2; Lepikhin 2020 (GShard), algorithm 1",
       "moe.balancing_loss of tokens that choose all experts equally often; moe.most_rows")
def experts():
    logits = torch.zeros(64, 64, dtype=torch.float64)
    load = torch.ones(64, dtype=torch.int64)
    loss = moe.balancing_loss(load, logits, logits.softmax(-1), 1, alpha=0.01, beta=0.0).item()
    rows = rows_of("Switch: loss at uniform load (alpha 0.01; N 64)", "0.010000", [loss])
    names = ("Switch: rows of an expert (factor 1.25; T 1024; N 64), "
             "GShard: rows of an expert (N/G 1024; E 128)")
    ours = [moe.most_rows(1.25, 1, 1024, 64), moe.most_rows(1.0, 2, 1024, 128)]
    return rows + rows_of(names, "20 16", ours, EQUAL)


# ---- all of them -----------------------------------------------------------------

INTRO = """# Published numbers, and ours

Published is what a paper prints, or what a formula printed there gives. Ours is never typed in: the
code here says it, on fake tensors, in the simulator of schedules, or by the formulas of
tools/estimate.py. "Last digit" is that of the published number, since papers round or cut off.
`./run.sh papers > docs/papers.md` makes this page anew."""


def lines_of(table, rows):
    """-> a table in Markdown"""
    head = [f"### {table.where}", "", f"Ours: {table.ours}.", "", "| | published | ours | |",
            "|---|---|---|---|"]
    return head + [line_of(row) for row in rows]


def closing(rows):
    """-> the last line"""
    differ = sum(not agrees(row) for row in rows)
    near = sum(agrees(row) and row.within not in (EQUAL, DIGIT) for row in rows)
    return (f"{len(rows)} numbers: {len(rows) - near - differ} are the same to the last digit "
            f"printed, {near} within the tolerance named, {differ} are not, for the reasons given.")


def main():
    require(not sys.argv[1:], f"{' '.join(sys.argv[1:])}: it takes no flags")
    found = []
    print(INTRO)
    for paper, tables in groupby(TABLES, lambda one: one.paper):
        print(f"\n## {paper}")
        for one in tables:
            rows = one.make()
            found += rows
            print("\n" + "\n".join(lines_of(one, rows)), flush=True)
    print("\n" + closing(found))
    return int(any(not agrees(row) and not row.why for row in found))


if __name__ == "__main__":
    sys.exit(main())
