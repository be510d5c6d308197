"""What papers have published, beside what the code here says. docs/papers.md is this table:

    python tests/test_papers.py > docs/papers.md
"""
import contextlib
import inspect
import math
import sys
from collections import namedtuple
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from conftest import ROOT  # first: it finds what is ours
from torch._subclasses.fake_tensor import FakeTensorMode

import amp_accum_ckpt
import context_parallel
import tensor_parallel
from common import GPTConfig, adamw, build, join_fake_world
from harness.ledger import Ledger, held_by
from harness.timeline import bubble_rate, chunks, costs, in_flight, longest, search, simulate
from pipeline_parallel import late_ws, make_plans
from tools import estimate, plan
from tools.estimate import Layout, job_of, timed
from tools.plan import TIE
from zero import ZeRO1, ZeRO2, ZeRO3, units_of

# ---- a number, and whether ours is it --------------------------------------------

EQUAL = "equal"  # to the last bit
DIGIT = "last digit"  # papers round or cut off: less than one of the last digit printed
SCALES = {"M": 1e6, "B": 1e9, "%": 0.01}

# published: text as printed. within: one of the two above, or a part of the published number.
# why: ours is another one, for this reason
Row = namedtuple("Row", "what published ours within why", defaults=(DIGIT, ""))


def digits_of(published):
    """31.4% -> 0.01, what the last letter stands for; 1, how many digits are behind the point"""
    _, _, behind = published.rstrip("MB%").partition(".")
    return SCALES.get(published[-1], 1), len(behind)


def agrees(row):
    scale, digits = digits_of(row.published)
    value = scale * float(row.published.rstrip("MB%"))
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
    said = row.why or row.within
    if isinstance(said, float):
        said = f"within {said:.0%}"
    return f"| {row.what} | {row.published} | {ours} | {said} |"


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


def train_by_zero(ranks, ladder, pairs=1):
    """A step of 7.5B parameters in bf16, in 2 x pairs Linears, as one of so many ranks -> ledger"""
    with one_of(ranks):
        model = nn.Sequential()
        for _ in range(pairs):
            model.append(nn.Linear(37_500, 100_000 // pairs, bias=False, dtype=torch.bfloat16))
            model.append(nn.Linear(100_000 // pairs, 37_500, bias=False, dtype=torch.bfloat16))
        zero = ladder(units_of(model, list(model)))
        optimizer = adamw(zero.parameter_groups(), lr=1e-3)
        with Ledger(held=partial(held_by, model, optimizer, zero.units)) as ledger:
            zero.zero_grad()
            model(torch.ones(1, 37_500, dtype=torch.bfloat16)).sum().backward()
            zero.reduce()
            zero.clip_grad_norm_(1.0)
            zero.step(optimizer)
    return ledger


def zero_rows():
    """Rajbhandari 2019, ZeRO, arXiv:1910.02054

    Ours: the ledger of a step of Linears of 7.5B parameters by zero.py, as rank 0; the paper
    leaves out (N-1)/N.
    """
    ladder = {"P_os": (ZeRO1, "31.4"), "P_os+g": (ZeRO2, "16.6"), "P_os+g+p": (ZeRO3, "1.88")}
    for label, (zero, published) in ladder.items():
        memory = train_by_zero(64, zero).memory
        states = sum(memory[kind] for kind in NOTHING) / 1e9
        yield Row(f"table 1: GB of model states per GPU, of 64, {label}", published, states)
    for label, published in (("P_os", "2"), ("P_os+g+p", "3")):
        sent = wire(train_by_zero(1024, ladder[label][0], pairs=8)) / 2 / 7.5e9
        what = f"section 7: numbers sent per parameter, of 1024 GPUs, {label}"
        yield Row(what, published, sent, 0.03)


# ---- tensor, sequence and context parallel ----------------------------------------

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


def play_block(kind=None, attend=attend_unfused, forward=nn.Module.__call__):
    """A block of 175B's GPT in bf16 with the paper's dropouts -> the ledger of its forward and
    backward; s b h bytes kept between the two.

    kind: how tensor_parallel.py cuts it into 8, None: not. forward(block, x) runs it.
    """
    heads, width = OF_175B
    with one_of(8):
        model = build(GPTConfig(1, width, heads, 256, 2048), 0, dtype=torch.bfloat16)
        if kind is not None:
            tensor_parallel.parallelize(model, kind())
        block = model.blocks[0]
        block.attn.attend = attend
        block.attn = nn.Sequential(block.attn, Dropout())
        block.mlp = nn.Sequential(block.mlp, Dropout())
        tokens = 2048 // 8 if kind is tensor_parallel.SequenceParallel else 2048
        x = torch.ones(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)
        with Ledger(held=lambda: {**NOTHING, "parameters": list(block.parameters())}) as ledger:
            y = forward(block, x)
            kept = ledger.saved_bytes
            y.backward(torch.ones_like(y))
    return ledger, kept / (2048 * width)


def korthikanti_rows():
    """Korthikanti 2022, activation recomputation, arXiv:2205.05198

    Ours: what autograd keeps of a block of 175B by tensor_parallel.py on 8 ranks, with the
    paper's attention and dropouts; MFU by plan.py's time model.
    """
    # table 2, where t = 8 ranks and 5 a s / h = 80
    cut = tensor_parallel.SequenceParallel
    again = partial(amp_accum_ckpt.full, attend_unfused)
    for label, how, published in (
            ("no parallelism", {}, 34 + 80),
            ("tensor parallel", {"kind": tensor_parallel.TensorParallel}, 10 + 24 / 8 + 80 / 8),
            ("+ sequence parallel", {"kind": cut}, 34 / 8 + 80 / 8),
            ("+ selective recompute", {"kind": cut, "attend": again}, 34 / 8),
            ("full recompute", {"forward": amp_accum_ckpt.full}, 2)):
        yield Row(f"table 2: s b h bytes that a layer keeps, {label}", f"{published:.2f}",
                  play_block(**how)[1])
    cfg = GPTConfig(105, 20480, 128, 51200, 2048)
    lay = Layout(1, 8, 35, 280, "interleaved", sp=True, zero=0, ckpt="none")
    job = job_of(cfg, plan.read(["--gpus", "280", "--batch", "280"]), lay)
    yield Row("table 5: MFU of 530B on 280 GPUs (plan.py, 2 chunks for 3)", "56.0%",
              timed(job)["mfu"], TIE)


MORE_GATHERS = ("the paper counts two of them apart: inputs that are gathered again in backward, "
                "hidden behind computation")


def collective_rows():
    """Collectives of a layer

    Ours: ledgers of that block and of context_parallel.py's attention on 8 ranks.
    """
    whole, _ = play_block(tensor_parallel.TensorParallel)
    cut, _ = play_block(tensor_parallel.SequenceParallel)
    calls = {name: figures["calls"] for name, figures in cut.collectives.items()}
    numbers = wire(whole) / 2 / (2048 * OF_175B[1])
    yield Row("Narayanan 2021, 3.2: tensor parallel, numbers / (b s h), t = 8", "7", numbers, EQUAL)
    words = "Korthikanti 2022, 4.2.2: sequence parallel"
    yield Row(f"{words}, reduce-scatters", "4", calls["reduce_scatter"], EQUAL)
    yield Row(f"{words}, all-gathers", "4", calls["all_gather"], EQUAL, MORE_GATHERS)
    ledger = attention(context_parallel.Ulysses, 2048, 8192)
    sent = sum(figures["payload"] for figures in ledger.collectives.values()) / 2
    yield Row("Jacobs 2023, 3.2: Ulysses, numbers / (N h / P)", "4", sent / (2048 * 8192), EQUAL)
    sent = wire(attention(context_parallel.Ring, 1024, 4096)) / 7
    yield Row("Liu 2023, 3.2: ring, bytes of a block / (c d)", "4", sent / (1024 * 4096), EQUAL)


def attention(kind, tokens, width):
    """A forward of attention with 64 heads on 8 ranks -> its ledger. tokens: of a rank."""
    with one_of(8):
        shape = (1, 64, tokens, width // 64)
        q, k, v = [torch.ones(shape, dtype=torch.bfloat16) for _ in range(3)]
        with Ledger(held=lambda: NOTHING) as ledger:
            kind().attend(q, k, v)
    return ledger


# ---- pipelines -------------------------------------------------------------------


def rate_of(plans, F, B, W, comm):
    """-> the bubble's part of the longest rank's time"""
    return bubble_rate(simulate(plans, costs(plans, F, B, W), comm))


def qi_rows():
    """Qi 2023, zero bubble pipelines, arXiv:2401.10241

    Ours: pipeline_parallel.py's plans, played with the paper's times.
    """
    # F, B, W and a transfer in ms, of table 9
    times = (29.718, 29.444, 19.927, 0.527)
    what = "tables 5 and 9: bubble rate of 6.2B, p = 8, m = 24, "
    for label, name, published, chunks_of_rank in (
            ("1F1B", "1f1b", "0.2347", 1), ("1F1B-I", "interleaved", "0.0808", 4),
            ("ZB-H1", "zb-h1", "0.1323", 1), ("ZB-H2", "zb-h2", "0.0698", 1)):
        plans = make_plans(name, 8, 24, chunks_of_rank)
        yield Row(what + label, published, rate_of(plans, *times), 0.05)
    # W needs 32 of the (34 + 5 a s / h) s b h bytes that a block keeps: 32 heads, s 1024, h 4096
    waiting = 32 / (34 + 5 * 32 * 1024 / 4096)
    found = search(late_ws, 8, 24, 16, times, waiting)
    yield Row(f"{what}ZB-2p (our search, --schedule auto)", "0.0029", rate_of(found, *times))
    rate = rate_of(make_plans("zb-v", 16, 48), 14.407, 14.380, 9.676, 1.610 / 2)
    yield Row("table 8: bubble rate of 6.2B, p = 16, m = 48, ZB-V", "0.0697", rate, 0.05)
    flying = max(map(in_flight, make_plans("zb-h2", 8, 32)))
    yield Row("section 2: activations in micro-batches, p = 8, ZB-H2", "15", flying, EQUAL)


def deepseek_rows():
    """DeepSeek-V3 2024, arXiv:2412.19437

    Ours: the plan dualpipe-v, half of DualPipe, played: two stages on each of 4 ranks.
    """
    plans = make_plans("dualpipe-v", 4, 20)
    stages = chunks(plans[0])
    # costs() takes a rank's times for all its stages, and B without W
    played = simulate(plans, costs(plans, stages, stages, stages))
    what = "table 2: DualPipe, PP = 8, 20 micro-batches, F = W = 1, B = 2, "
    why = "there what an F makes is sent when the B beside it is done, too"
    yield Row(what + "bubble", "6", longest(played) - 20 * 3 * stages, EQUAL, why)
    yield Row(what + "activations", "9", stages * max(map(in_flight, plans)), EQUAL)


# ---- the time model of plan.py ------------------------------------------------------

# label: heads, width, layers, tp, pp, GPUs, batch, TFLOP/s per GPU; the last is of table 2
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


@contextlib.contextmanager
def megatron_2021():
    """The software of that paper: attention's T x T goes to memory, all matmuls and all-reduces of
    a block are made again, nothing is hidden."""
    def memory_traffic(job):
        numbers = 11 * job.width + (8 * job.width + 5.5 * job.heads * job.seq) / job.tp
        return 4 * job.b * numbers

    def bytes_on_tp(job, blocks):  # 12, not 8 and 2
        return (job.tp - 1) / job.tp * job.micro * blocks * 12 * job.x

    def seconds_on_dp(job, rank, arithmetic):
        return estimate.bytes_on_dp(job, rank) / estimate.bandwidth(job.at, job.tp * job.data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "memory_traffic", memory_traffic)
        patch.setattr(estimate, "forward_again", estimate.forward)
        patch.setattr(estimate, "bytes_on_tp", bytes_on_tp)
        patch.setattr(estimate, "seconds_on_dp", seconds_on_dp)
        yield


def run_of_2021(label):
    """-> TFLOP/s of a GPU by plan.py's model, with one efficiency for all"""
    heads, width, layers, tp, pp, gpus, batch, _ = RUNS[label]
    cfg = GPTConfig(layers, width, heads, 51200, 2048)
    dp = gpus // tp // pp
    lay = Layout(dp, tp, pp, batch // dp, "1f1b", sp=False, zero=0, ckpt="full")
    with megatron_2021():
        time = timed(job_of(cfg, plan.read(["--gpus", str(gpus), "--batch", str(batch)]), lay))
    # section 5.1 counts what is computed again
    flops = 96 * batch * 2048 * layers * width**2
    flops *= 1 + 2048 / (6 * width) + 51200 / (16 * layers * width)
    return flops / time["seconds"] / gpus / 1e12


def narayanan_rows():
    """Narayanan 2021, Megatron-LM on GPU clusters, arXiv:2104.04473

    Ours: plan.py's time model with that software's habits; one efficiency, fitted to the ten
    models of table 1.
    """
    for label in RUNS:
        gpus, _, published = RUNS[label][5:]
        what = f"tables 1 and 2: TFLOP/s of a GPU, {label} on {gpus}"
        yield Row(what, published, run_of_2021(label), TIE)


H100 = "--gpu-tflops 989 --hbm 3.35 --bandwidth-intra 450 --bandwidth-inter 50"
CHUNKS = "with 16 micro-batches on 16 ranks more than two chunks would make the bubble smaller"


def llama_rows():
    """Llama team 2024, Llama 3, arXiv:2407.21783

    Ours: plan.py's time model with H100's rates and two chunks.
    """
    # tp is 8, pp 16. The paper's first version prints dp 4 in the last row: not 16,384 GPUs
    for gpus, cp, dp, seq, micro, published, why in (
            (8192, 1, 64, 8192, 32, "43%", ""), (16384, 1, 128, 8192, 16, "41%", CHUNKS),
            (16384, 16, 8, 131072, 16, "38%", "")):
        words = f"--model llama3-405b --gpus {gpus} --batch {dp * micro} --seq {seq} {H100}"
        at = plan.read(words.split())
        lay = Layout(dp, 8, 16, micro, "interleaved", True, 1, "none", cp, "allgather")
        yield Row(f"table 4: MFU of 405B on {gpus} GPUs, T = {seq}", published,
                  timed(job_of(at.cfg, at, lay))["mfu"], TIE, why)


# ---- all of them -----------------------------------------------------------------

TABLES = (zero_rows, korthikanti_rows, collective_rows, qi_rows, deepseek_rows, narayanan_rows,
          llama_rows)
INTRO = """# Published numbers, and ours

Published is what a paper prints, or what a formula printed there gives. Ours is never typed in: the
code here says it, on fake tensors, in the simulator of schedules, or by tools/estimate.py. "Last
digit" is that of the published number, since papers round or cut off. A test compares them all;
`python tests/test_papers.py > docs/papers.md` makes this page.
"""


def section(make, rows):
    """-> a table's part of the page; its head is the docstring of what makes the rows."""
    paper, ours = inspect.getdoc(make).split("\n\n")
    lines = "\n".join(map(line_of, rows))
    return f"{paper}\n\n{ours}\n\n| | published | ours | |\n|---|---|---|---|\n{lines}\n"


@pytest.mark.parametrize("number, make", list(enumerate(TABLES, 1)))
def test_each_number_is_as_published_or_says_why_not(number, make):
    """The page has these lines and no others."""
    parts = (ROOT / "docs" / "papers.md").read_text().split("\n## ")
    assert parts[0] == INTRO
    assert len(parts) == 1 + len(TABLES)
    rows = list(make())
    assert parts[number] == section(make, rows)
    for row in rows:
        assert agrees(row) != bool(row.why), row


if __name__ == "__main__":
    sys.stdout.write("\n## ".join([INTRO, *[section(make, make()) for make in TABLES]]))
