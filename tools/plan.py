"""Which layout for my model on my cluster? Tries hybrid_3d.py's, and prints the fastest ones.

Of its choices dualpipe-v, ring and allgather are tried only where --schedule or --attn names them,
some others only where they can be of use: see layouts() in estimate.py.

    layout    dp x cp x tp x pp GPUs, micro-batches, schedule, sp, zero, ckpt, attn, and ep of the
              experts (--experts 64 --top-k 8 ..), as hybrid_3d.py has them
    memory    of the fullest stage: parameters, gradients and optimizer are exact, activations and
              what comes and goes are estimates, mostly within 6% of a dry run's peak, all
              together. CUDA, NCCL and fragmentation are not in it: take --gpu-memory less what
              they need. RMSNorm is taken for torch's fused one. Where a CPU has none, it keeps
              its input in fp32 and more, and a small Llama's dry run there peaks up to 30% higher

    time of the slowest stage, for M micro-batches; dp and adamw are those of the fullest one.
    B T are the tokens of a rank; for cp, of its cp ranks together. Numbers, unless bytes are said.
    In the form of GPT-2, whose hidden width is 4 C:
    part           what it counts                                                  source
    matmul         72 C^2 (1 + T/6C) FLOPs per token and block, and the head;      1, appendix
                   48 of the 72 for each MLP that a token visits; the last rank of
                   a ring has T (2 - 1/cp) in the place of T
    recompute      what ckpt full does again, 16 C^2 + 4 T C                       amp_accum_ckpt.py
    bound          bytes of norms, residuals and gelu, read and written            shapes
    tp             8 B T C (tp-1)/tp per block, sp 10; not overlapped              1, 3.2
    cp             hybrid_3d.py's bytes; hops travel behind attention, ulysses'    3; 4
                   and allgather's are not overlapped
    ep             4 K B T C (ep-1)/ep per block, / tp; not overlapped             moe.py
    bubble         (pp-1)/M of all above in gpipe and 1f1b. Where F = B = W,       1, 2.2; 2
                   interleaved and bfs have 1/2 of that, zb-h1 1/3, dualpipe-v
                   1/6, zb-h2 and zb-v none
    pp             B T C per boundary and direction, not overlapped                1, 3.2
    dp             2 (n-1)/n of the gradients, n = dp cp, by a ring. zero 2 has    1, 3.3; 5
                   M + 1, and zero 3 has 3 M, in the place of the 2. Experts among
                   those that hold the same ones. The last backward hides it, but
                   not the half of zero 1 that gathers parameters
    adamw          bytes of gradients and states

A group inside a node has --bandwidth-intra, one across nodes --bandwidth-inter, GB/s per GPU. The
defaults are those of A100-80GB, 8 to a node. One number is fitted: --efficiency, of matmuls. 0.67
for all ten rows of table 1 in source 1 (1.7B to 1T) gives their TFLOP/s within 8%, 3.6% on average.
(To expect the same TFLOP/s in all ten, without any model, would be 5.4% off on average at best.)
--megatron-2021 is the software of source 1, in which attention is not fused, for one.

1  Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
   Megatron-LM", arXiv:2104.04473
2  Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241
3  Liu et al. 2023, "Ring Attention with Blockwise Transformers", arXiv:2310.01889, section 3
4  Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509, section 3
5  Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, section 7

    python tools/plan.py --model llama3-70b --batch 1024 --gpus 512 --tokens 15e12 --price 2
"""
import argparse
import json
import math
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a program: the root is not there
import moe  # noqa: E402
from common import PRESETS, GPTConfig  # noqa: E402
from harness.flags import (  # noqa: E402
    ANY, FLAGS, POSITIVE, Flag, add_flag, check_bounds, refuse_file, require)
from tools.estimate import (  # noqa: E402
    CKPTS, HELD, PARTS, SCHEDULES, Layout, assess, divisors, job_of, parameters_of, search, timed)

# ---- flags ---------------------------------------------------------------------

MODELS = {**PRESETS, **moe.PRESETS}
SIZES = ("layers", "width", "heads", "vocab", "seq", "kv_heads", "hidden")
SOME = (1e-9, 1e18)  # more than nothing
OWN = {
    "model": FLAGS["model"]._replace(limits=tuple(MODELS)),
    **{name: FLAGS[name] for name in (*SIZES, "json")},
    "batch": Flag(int, "B, sequences per step", POSITIVE),
    "dtype": Flag("bf16", "of parameters and arithmetic", ("bf16", "fp32")),
    "gpus": Flag(int, "how many", POSITIVE),
    "gpu_memory": Flag(80.0, "GB of a GPU", SOME),
    "gpu_tflops": Flag(312.0, "its peak", SOME),
    "hbm": Flag(2.0, "TB/s of its memory", SOME),
    "gpus_per_node": Flag(8, "GPUs", POSITIVE),
    "bandwidth_intra": Flag(300.0, "GB/s per GPU inside a node", SOME),
    "bandwidth_inter": Flag(25.0, "GB/s per GPU across nodes", SOME),
    "efficiency": Flag(0.67, "of matmuls; fitted", SOME),
    "megatron_2021": Flag(False, "the software of Narayanan 2021"),
    "tokens": Flag(0.0, "to train on, for days and GPU-hours", (0, 1e18)),
    "price": Flag(0.0, "of a GPU for an hour, for the cost", (0, 1e18)),
    **moe.FLAGS,
    "experts": Flag(int, "E in each layer, in the place of its MLP (0: none)", ANY),
    "dp": Flag(int, "fixed", POSITIVE),
    "cp": Flag(int, "fixed", POSITIVE),
    "tp": Flag(int, "fixed", POSITIVE),
    "pp": Flag(int, "fixed", POSITIVE),
    "micro": Flag(int, "fixed", POSITIVE),
    "zero": Flag(int, "fixed", (0, 3)),
    "schedule": Flag(str, "fixed", SCHEDULES),
    "ckpt": Flag(str, "fixed", CKPTS),
    "attn": Flag(str, "fixed", ("ring", "zigzag", "allgather", "ulysses")),
    "ep": Flag(int, "fixed", POSITIVE),
    "table": Flag(False, "models by GPUs, as Markdown"),
}


def read(words=None):
    """-> the flags, in bounds. Here and in estimate.py they are called `at`.

    Besides, .cfg: sizes of the model; .fixed: {axis: value} of the axes that are given; .node: how
    many GPUs a node has.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], usage="%(prog)s [flags]",
                                     allow_abbrev=False)
    parser.error = lambda message: require(False, message)
    for name, flag in OWN.items():
        add_flag(parser, name, flag)
    parser.add_argument("--sp", help="fixed", action=argparse.BooleanOptionalAction)
    at = parser.parse_args(words)
    for name, flag in OWN.items():
        check_bounds(name, getattr(at, name), flag.limits)
    if at.table:  # which has GPUs of its own
        at.batch = at.batch or 512
        at.gpus = at.gpus or 1
    require(at.gpus and at.batch, "give both --gpus and --batch")
    given = {name: getattr(at, name) for name in SIZES if getattr(at, name) is not None}
    at.cfg = MODELS[at.model]._replace(**given)
    if at.experts is None:
        at.experts = moe.FLAGS["experts"].default if at.model in moe.PRESETS else 0
    refuse(at)
    at.fixed = {axis: getattr(at, axis) for axis in Layout._fields
                if getattr(at, axis) is not None}
    return resized(at, at.gpus)


def refuse(at):
    """What makes no sense ends here, in one line."""
    cfg = at.cfg
    heads = cfg.kv_heads or cfg.heads
    of_llama = at.kv_heads or at.hidden
    require(cfg.form == "llama" or not of_llama, "--kv-heads, --hidden: are for Llama's form")
    require(cfg.width % cfg.heads == 0, f"--heads {cfg.heads} does not divide --width {cfg.width}")
    require(cfg.heads % heads == 0, f"--kv-heads {heads} does not divide --heads {cfg.heads}")
    E = at.experts
    require(not E or at.top_k <= E, f"--top-k {at.top_k} of --experts {E}: choose {E} at most")
    require(E or not (at.ep or at.shared or at.capacity),
            "--ep, --shared and --capacity are for --experts E")
    refuse_file("--json", at.json)


def resized(at, gpus):
    """The flags for another number of GPUs, in nodes of equal size, --gpus-per-node at most."""
    node = max(n for n in divisors(gpus) if n <= at.gpus_per_node)
    return argparse.Namespace(**{**vars(at), "gpus": gpus, "node": node})


# ---- in words ------------------------------------------------------------------


def text(lay, few=False):
    """A layout -> dp 2 x tp 4, micro 8, sp. With few, without the micro-batches."""
    axes = []
    for axis in ("dp", "cp", "tp", "pp"):
        size = getattr(lay, axis)
        if size > 1:
            axes.append(f"{axis} {size}")
    words = [" x ".join(axes) or "one GPU"]
    if lay.ep:
        words.append(f"ep {lay.ep}")
    if lay.cp > 1:
        words.append(lay.attn)
    if not few:
        words.append(f"micro {lay.micro}")
    if lay.pp > 1:
        words.append(lay.schedule)
    if lay.sp:
        words.append("sp")
    if lay.zero:
        words.append(f"zero {lay.zero}")
    if lay.ckpt != "none":
        words.append(f"ckpt {lay.ckpt}")
    return ", ".join(words)


def command(lay, at):
    """-> the line that runs a layout"""
    where = "--standalone"
    if at.gpus > at.node:
        nodes = at.gpus // at.node
        where = f"--nnodes={nodes} --rdzv_backend=c10d --rdzv_endpoint=HOST:29500"
    words = [f"torchrun {where} --nproc_per_node={at.node} hybrid_3d.py"]
    for name in ("model", *SIZES):
        if getattr(at, name):
            words.append(f"--{name.replace('_', '-')} {getattr(at, name)}")
    words.append(f"--batch {at.batch}")
    for axis, value in lay._asdict().items():
        if axis not in ("sp", "cp", "attn", "ep"):
            words.append(f"--{axis} {value}")
    if lay.cp > 1:
        words.append(f"--cp {lay.cp} --attn {lay.attn}")
    if lay.ep:
        words.append(f"--experts {at.experts} --top-k {at.top_k} --ep {lay.ep}")
        words.append(f"--capacity {at.capacity:g} --balance {at.balance}")
    if lay.ep and at.shared:
        words.append("--shared")
    if lay.sp:
        words.append("--sp")
    words.append(f"--dtype {at.dtype}")
    return " ".join(words)


def advice(at, least):
    """Nothing fits -> by how much, and what would make it fit."""
    needed, lay = least
    lines = [f"nothing fits {at.gpu_memory:g} GB: {text(lay)} needs {needed / 1e9:.1f} GB"]
    for axis, value in at.fixed.items():
        lines += fits_with(f"without {as_flag(axis, value)}", at, free=[axis])
    on_more = fits_on_more(at)
    if at.fixed and not on_more:
        given = " ".join(as_flag(axis, value) for axis, value in at.fixed.items())
        on_more = fits_on_more(at, free=at.fixed, change=f" without {given}")
    return "\n".join(lines + on_more)


def fits_on_more(at, free=(), change=""):
    """-> [the line on the least of 2, 4, .. 64 times the GPUs on which something fits], or []"""
    for times in (2, 4, 8, 16, 32, 64):
        gpus = at.gpus * times
        found = fits_with(f"on {gpus} GPUs{change}", resized(at, gpus), free)
        if found:
            return found
    return []


def fits_with(change, at, free):
    fits, _ = search(at.cfg, at, free)
    if not fits:
        return []
    _, fastest = fits[0]
    return [f"  fits {change}: {text(fastest)}"]


def as_flag(axis, value):
    """-> --tp 2, --sp or --no-sp"""
    if value is True:
        return f"--{axis}"
    if value is False:
        return f"--no-{axis}"
    return f"--{axis} {value}"


# ---- tables --------------------------------------------------------------------

RARE = ("cp", "ep")  # have a column only where there are any


def show(rows, at):
    """Two tables of [(layout, memory, time)]: where the memory goes, and where the time."""
    total = parameters_of(at.cfg, at.experts, at.shared)
    print(f"{at.model}: {total:,} parameters, {at.gpus} GPUs\n")
    print(f"{'GB per GPU':>70} " + " ".join(f"{kind:>11}" for kind in HELD) + "     all")
    for i, (lay, memory, _) in enumerate(rows, 1):
        held = " ".join(f"{memory[kind] / 1e9:11.2f}" for kind in HELD)
        print(f"{i:3} {text(lay):66} {held} {memory['memory'] / 1e9:7.2f}")
    shown = []
    for part in PARTS:
        if part not in RARE or any(time[part] for _, _, time in rows):
            shown.append(part)
    head = " ".join(f"{part:>9}" for part in shown)
    head = f"\nms  {head}      step TFLOP/s    MFU       tok/s"
    if at.tokens:
        head += "     days    GPU-hours"
    if at.tokens and at.price:
        head += "           cost"
    print(head)
    for i, (_, _, time) in enumerate(rows, 1):
        times = " ".join(f"{1e3 * time[part]:9.1f}" for part in (*shown, "seconds"))
        line = f"{i:3} {times} {time['tflops']:7.1f} {time['mfu']:6.1%} {time['rate']:11,.0f}"
        if at.tokens:
            line += f" {time['days']:8.1f} {time['gpu_hours']:12,.0f}"
        if at.tokens and at.price:
            line += f" {time['cost']:14,.0f}"
        print(line)


COLUMNS = (1, 8, 64, 512)  # GPUs
IN_TABLE = {
    "gpt2": PRESETS["gpt2"],
    "gpt2-xl": PRESETS["gpt2-xl"],
    "llama3-8b": PRESETS["llama3-8b"],
    "30B": GPTConfig(48, 7168, 56, 50257, 2048),
    "llama3-70b": PRESETS["llama3-70b"],
    "gpt3-175b": PRESETS["gpt3-175b"],
}


def table(at):
    """Markdown: the fastest layout of each model on so many GPUs, and its MFU."""
    print("| model | 1 GPU | " + " | ".join(f"{n} GPUs" for n in COLUMNS[1:]) + " |")
    print("|" + "---|" * (1 + len(COLUMNS)))
    for model, cfg in IN_TABLE.items():
        cells = [cell(cfg, resized(at, gpus)) for gpus in COLUMNS]
        print(f"| {model} | " + " | ".join(cells) + " |")


def cell(cfg, at):
    fits, least = search(cfg, at)
    if least is None:
        return "no layout"
    if not fits:
        return f"needs {least[0] / 1e9:,.0f} GB"
    _, fastest = fits[0]
    mfu = timed(job_of(cfg, at, fastest))["mfu"]
    return f"{text(fastest, few=True)}: {mfu:.0%}"


# ---- run -----------------------------------------------------------------------


def main():
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it, without a traceback
    at = read()
    if at.table:
        table(at)
        return 0
    if at.gpus > at.gpus_per_node and at.node != at.gpus_per_node:
        print(f"{at.gpus} GPUs are not full nodes of {at.gpus_per_node}: "
              f"taken as {at.gpus // at.node} of {at.node}")
    fits, least = search(at.cfg, at)
    given = "".join(" " + as_flag(axis, value) for axis, value in at.fixed.items())
    require(least, f"--batch {at.batch}{given}: no layout with dp x cp x tp x pp = {at.gpus}. They "
            "have to divide the batch, the heads, --hidden and --layers, and flags that are given "
            "have to go together")
    rows = []
    for _, lay in fits[:10]:
        job = job_of(at.cfg, at, lay)
        rows.append((lay, assess(job), timed(job)))
    said = ""
    if rows:
        show(rows, at)
        print(f"\nrow 1:  {command(rows[0][0], at)}\n"
              f"its exact bytes: by python, with --dry-run {at.gpus} at the end")
    else:
        said = advice(at, least)
        print(said)
    if at.json:
        found = []
        for lay, memory, time in rows:
            found.append({**lay._asdict(), **memory, **time, "command": command(lay, at)})
        result = {"rows": found, "fit": len(fits), "advice": said, "flags": vars(at)}
        Path(at.json).write_text(json.dumps(result, indent=1))
    return int(not rows)


if __name__ == "__main__":
    sys.exit(main())
