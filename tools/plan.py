"""Which layout for my model on my cluster? Tries hybrid_3d.py's, and prints the fastest ones.

    python tools/plan.py --model llama3-70b --batch 1024 --gpus 512 --tokens 15e12 --price 2

A layout is dp x cp x tp x pp GPUs, micro-batches, schedule, sp, zero, ckpt, attn, and ep of the
experts (--experts 64 --top-k 8 ..), as hybrid_3d.py has them, and each is a flag that fixes it. Of
its schedules 1f1b, interleaved and zb-v are tried, to which the others are equal or worse in this
model; allgather only if it is named; cp on sequences of 8,192 tokens or more, or if it is named.

Memory is that of the fullest stage, within 12% of a dry run's peak (the printed line with python
and --dry-run; CPUs, without a fused RMSNorm, may take a third more). A tenth of --gpu-memory stays
free, for CUDA, NCCL and fragmentation.

Time is a model with one fitted number, --efficiency of matmuls. With 0.67 it is within TIE of the
published runs in docs/papers.md, no closer: so layouts within TIE of the fastest are called equal,
and stand in the order of how much they cut and need; of each mesh there is one row. A group inside
a node has --bandwidth-intra, one across nodes --bandwidth-inter. The defaults are A100-80GB.
"""
import argparse
import math
import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import moe  # noqa: E402
from common import PRESETS  # noqa: E402
from harness.flags import FLAGS, SIZES, config_of, parse, require  # noqa: E402
from tools.estimate import IDLE, PARTS, Layout, assess, job_of, parameters_of, timed  # noqa: E402

TIE = 0.08
SPARE = 0.1  # of a GPU's memory
LONG = 8192  # tokens of a sequence from which on it is cut, unless --cp says otherwise
SHORT = 2048  # tokens of a part, at least
SHOWN = 10  # rows

# ---- flags ---------------------------------------------------------------------

MODELS = {**PRESETS, **moe.PRESETS}
CKPTS = ("none", "selective", "full")
MESH = ("dp", "cp", "tp", "pp")


def number(default, help, least=1e-9, most=1e18):
    return dict(type=float, default=default, least=least, most=most, help=help)


def as_flag(name, value=None):
    """-> --tp, --tp 2, --sp or --no-sp"""
    flag = "--" + name.replace("_", "-")
    if value is None or value is True:
        return flag
    return f"--no-{flag[2:]}" if value is False else f"{flag} {value}"


OWN = {
    "--model": {**FLAGS["--model"], "choices": tuple(MODELS)},
    **{as_flag(name): FLAGS[as_flag(name)] for name in SIZES},
    "--batch": dict(type=int, least=1, most=10**6, help="B, sequences per step"),
    "--dtype": dict(default="bf16", choices=("bf16", "fp32"), help="of parameters and arithmetic"),
    "--gpus": dict(type=int, least=1, most=10**6, help="how many"),
    "--gpu-memory": number(80.0, "GB of a GPU"),
    "--gpu-tflops": number(312.0, "its peak"),
    "--hbm": number(2.0, "TB/s of its memory"),
    "--gpus-per-node": dict(type=int, default=8, least=1, help="GPUs"),
    "--bandwidth-intra": number(300.0, "GB/s per GPU inside a node"),
    "--bandwidth-inter": number(25.0, "GB/s per GPU across nodes"),
    "--efficiency": number(0.67, "of matmuls; fitted", most=1),
    "--tokens": number(0.0, "to train on, for days and GPU-hours", 0),
    "--price": number(0.0, "of a GPU for an hour, for the cost", 0),
    "--experts": dict(type=int, least=0, help="E in each layer, in the place of its MLP (0: none)"),
    "--top-k": dict(type=int, least=1, help="K, experts per token (2, or the preset's)"),
    "--shared": dict(action="store_true", help="one for every token"),
    **{as_flag(axis): dict(type=int, least=1, help="fixed") for axis in (*MESH, "micro", "ep")},
    "--zero": dict(type=int, most=3, help="fixed"),
    "--schedule": dict(choices=tuple(IDLE), help="fixed"),
    "--ckpt": dict(choices=CKPTS, help="fixed"),
    "--attn": dict(choices=("zigzag", "allgather", "ulysses"), help="fixed"),
    "--sp": dict(action=argparse.BooleanOptionalAction, help="fixed"),
}


def read(words=None):
    """-> the flags, in bounds. Here and in estimate.py they are called `at`.

    Besides, .cfg: sizes of the model; .fixed: {axis: value} of the axes that are given; .node: how
    many GPUs a node has, all nodes being of one size. What makes no sense ends here, in one line.
    """
    at = parse(__doc__, OWN, words)
    require(at.gpus and at.batch, "give both --gpus and --batch")
    at.cfg = config_of(at, MODELS[at.model])
    axes = {axis: getattr(at, axis) for axis in Layout._fields}
    at.fixed = {axis: value for axis, value in axes.items() if value is not None}
    if at.experts is None:
        at.experts = moe.of_preset(at.model)[0] if at.model in moe.PRESETS else 0
    at.top_k = at.top_k or moe.of_preset(at.model)[1]
    at.node = max(n for n in divisors(at.gpus) if n <= at.gpus_per_node)
    require(not at.experts or at.top_k <= at.experts,
            f"--top-k {at.top_k} of --experts {at.experts}: choose fewer")
    require(at.experts or not (at.ep or at.shared), "--ep and --shared are for --experts E")
    require(at.tokens or not at.price, "--price wants --tokens")
    return at


# ---- the search ------------------------------------------------------------------


def divisors(n):
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    large = [n // d for d in small]
    return sorted({*small, *large})


def layouts(cfg, at):
    """What hybrid_3d.py runs and may gain something in this model of time and memory."""
    cfg = cfg.resolved()

    def tried(axis, values):
        return [value for value in values if at.fixed.get(axis, value) == value]

    for cp, tp, pp in product(*[tried(axis, divisors(at.gpus)) for axis in ("cp", "tp", "pp")]):
        dp, left = divmod(at.gpus, cp * tp * pp)
        if left or not tried("dp", [dp]) or at.batch % dp or pp > cfg.layers:
            continue
        attns = ["zigzag", "ulysses"] if cp > 1 else ["zigzag"]
        eps = divisors(math.gcd(dp * cp, at.experts)) if at.experts else [None]
        rest = product(
            tried("micro", divisors(at.batch // dp)), tried("schedule", IDLE),
            tried("sp", [False, True]), tried("zero", range(4)), tried("ckpt", CKPTS),
            [at.attn] if at.attn else attns, tried("ep", eps))
        for micro, schedule, sp, zero, ckpt, attn, ep in rest:
            lay = Layout(dp, tp, pp, micro, schedule, sp, zero, ckpt, cp, attn, ep)
            if runs(cfg, at, lay):
                yield lay


def runs(cfg, at, lay):
    """Can hybrid_3d.py run it, and is it worth a try?"""
    chunks = 2 if lay.attn in ("zigzag", "allgather") else 1  # of a sequence, on a rank of cp
    stages = lay.pp if lay.schedule == "1f1b" else 2 * lay.pp
    return all((
        cfg.kv_heads % lay.tp == 0 and cfg.hidden % lay.tp == 0,
        lay.tp > 1 or not lay.sp,
        not lay.sp or cfg.seq // lay.cp % lay.tp == 0,
        lay.sp or lay.tp == 1 or not at.experts,  # whose ranks would all route the same tokens
        lay.cp == 1 or cfg.seq % (chunks * lay.cp) == 0,
        lay.cp == 1 or lay.attn != "ulysses" or cfg.kv_heads // lay.tp % lay.cp == 0,
        lay.cp == 1 or "cp" in at.fixed or (cfg.seq >= LONG and cfg.seq // lay.cp >= SHORT),
        stages <= cfg.layers,
        lay.pp > 1 or lay.schedule == "1f1b",
        lay.schedule != "interleaved" or lay.micro % lay.pp == 0,
        # fewer do not fill the pipeline; W would wait with all that full has made again
        lay.schedule != "zb-v" or (lay.micro >= 2 * lay.pp - 1 and lay.ckpt != "full"),
        lay.zero == 0 or lay.dp * lay.cp > 1,
        lay.zero < 3 or lay.pp == 1,
    ))


def search(cfg, at):
    """-> [(tie, layout, memory, time)], one of each mesh, best first; the least bytes, its layout.

    tie: 0 for what is as fast as the fastest, 1 for the next such class, ..
    """
    fits = []
    least = None
    for lay in layouts(cfg, at):
        job = job_of(cfg, at, lay)
        memory = assess(job)
        if least is None or memory["memory"] < least[0]:
            least = memory["memory"], lay
        if memory["memory"] <= (1 - SPARE) * 1e9 * at.gpu_memory:
            fits.append((lay, memory, timed(job)))
    fastest = min((time["seconds"] for *_, time in fits), default=1)

    def tie_of(time):
        return math.floor(math.log(time["seconds"] / fastest) / math.log(1 + TIE) + 1e-9)

    rows = [(tie_of(time), lay, memory, time) for lay, memory, time in fits]
    of_meshes = {}
    for row in sorted(rows, key=lambda row: (row[0], effort(row[1]))):
        of_meshes.setdefault(mesh_of(row[1]), row)
    return list(of_meshes.values()), least


def mesh_of(lay):
    return tuple(getattr(lay, axis) for axis in MESH)


def effort(lay):
    """Of equals the one comes first that cuts less along fewer axes, and needs less machinery."""
    axes = sum(size > 1 for size in (lay.cp, lay.tp, lay.pp, lay.ep or 1))
    return axes, lay.pp, lay.cp, lay.tp, lay.zero, CKPTS.index(lay.ckpt), lay.schedule, lay.micro


# ---- in words ------------------------------------------------------------------


def text(lay):
    """A layout -> dp 2 x tp 4, micro 8, sp"""
    axes = [f"{axis} {size}" for axis, size in zip(MESH, mesh_of(lay)) if size > 1]
    words = [  # is it said? as what?
        (True, " x ".join(axes) or "one GPU"), (lay.ep, f"ep {lay.ep}"), (lay.cp > 1, lay.attn),
        (True, f"micro {lay.micro}"), (lay.pp > 1, lay.schedule), (lay.sp, "sp"),
        (lay.zero, f"zero {lay.zero}"), (lay.ckpt != "none", f"ckpt {lay.ckpt}"),
    ]
    return ", ".join(word for is_said, word in words if is_said)


def flags_of(lay, at):
    """-> the words for hybrid_3d.py"""
    values = {name: getattr(at, name) for name in ("model", *SIZES, "batch", "dtype")}
    if lay.ep:
        values.update(experts=at.experts, top_k=at.top_k, shared=at.shared)
    values.update(lay._asdict())
    if lay.cp == 1:
        del values["attn"]
    return " ".join(as_flag(name, value) for name, value in values.items() if value)


def command(lay, at):
    """-> the line that runs a layout"""
    where = "--standalone"
    if at.gpus > at.node:
        where = f"--nnodes={at.gpus // at.node} --rdzv_backend=c10d --rdzv_endpoint=HOST:29500"
    return f"torchrun {where} --nproc_per_node={at.node} hybrid_3d.py {flags_of(lay, at)}"


def two_digits(value):
    """-> 39.6 as 40, 0.0123 as 0.012: the third would be made up"""
    digits = 1 - math.floor(math.log10(value)) if value else 0
    return f"{round(value, digits):,.{max(digits, 0)}f}"


def show(rows, at):
    """A table of the rows."""
    total = parameters_of(at.cfg, at)
    print(f"{at.model}: {total:,} parameters, {at.gpus} GPUs. = means: within {TIE:.0%}, which is "
          "all that is known of the time\n")
    print(f"{'':4} {'':70} {'GB':>7} {'s/step':>7} {'MFU':>4} {'tok/s':>10}   of the time")
    ties = [tie for tie, *_ in rows]
    for tie, lay, memory, time in rows[:SHOWN]:
        place = f"{ties.index(tie) + 1}{'=' if ties.count(tie) > 1 else ' '}"
        shares = {part: time[part] / time["seconds"] for part in PARTS}
        words = ", ".join(f"{part} {share:.0%}" for part, share in shares.items() if share >= 0.005)
        print(f"{place:>4} {text(lay):70} {two_digits(memory['memory'] / 1e9):>7} "
              f"{two_digits(time['seconds']):>7} {time['mfu']:4.0%} "
              f"{two_digits(time['rate']):>10}   {words}")
    _, lay, memory, time = rows[0]
    kinds = [f"{kind} {size / 1e9:.1f}" for kind, size in memory.items() if kind != "memory"]
    print(f"\nthe first row holds, in GB: {', '.join(kinds)}")
    if at.tokens:
        hours = at.tokens / time["rate"] / 3600
        words = f"{two_digits(hours / 24)} days, {two_digits(hours * at.gpus)} GPU-hours"
        if at.price:
            words += f", which cost {two_digits(hours * at.gpus * at.price)}"
        print(f"it takes {words}")
    print(command(lay, at))


def main():
    at = read()
    rows, least = search(at.cfg, at)
    given = "".join(" " + as_flag(axis, value) for axis, value in at.fixed.items())
    require(least, f"--batch {at.batch}{given}: no layout with dp x cp x tp x pp = {at.gpus}. They "
            "have to divide the batch, the heads, --hidden and --layers, and flags that are given "
            "have to go together")
    if rows:
        show(rows, at)
    else:
        needed, lay = least
        print(f"nothing fits {at.gpu_memory:g} GB, of which {SPARE:.0%} stays free: {text(lay)} "
              f"needs {two_digits(needed / 1e9)} GB")
    return int(not rows)


if __name__ == "__main__":
    sys.exit(main())
