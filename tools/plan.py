"""Which layout for my model on my cluster? Tries hybrid_3d.py's, and prints the fastest ones.

Of its choices some are tried only where --schedule or --attn names them: see layouts() in
estimate.py.

    layout    dp x cp x tp x pp GPUs, micro-batches, schedule, sp, zero, ckpt, attn, and ep of the
              experts (--experts 64 --top-k 8 ..), as hybrid_3d.py has them
    memory    of the fullest stage: parameters, gradients and optimizer are exact, activations and
              what comes and goes are estimates, all together within 11% of a dry run's peak,
              which --exact N adds for the best N. CUDA, NCCL and fragmentation are not in it:
              take --gpu-memory less what they need. RMSNorm is taken for torch's fused one. A
              CPU has none: the norm keeps its input in fp32 and more, and a small Llama's dry
              run there peaks up to a third higher

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
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import moe  # noqa: E402
from common import PRESETS  # noqa: E402
from harness.flags import (  # noqa: E402
    ANY, FLAGS, POSITIVE, Flag, add_flag, check_bounds, refuse_file, require)
from tools.estimate import (  # noqa: E402
    CKPTS, HELD, PARTS, SCHEDULES, Layout, assess, divisors, held, job_of, parameters_of, search,
    timed)
from tools.launch import report  # noqa: E402

# ---- flags ---------------------------------------------------------------------

MODELS = {**PRESETS, **moe.PRESETS}
SIZES = ("layers", "width", "heads", "vocab", "seq", "kv_heads", "hidden")
SOME = (1e-9, 1e18)  # more than nothing
OWN = {
    "model": {**FLAGS["--model"], "choices": tuple(MODELS)},
    **{name: FLAGS["--" + name.replace("_", "-")] for name in (*SIZES, "json")},
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
    "experts": Flag(int, "E in each layer, in the place of its MLP (0: none)", ANY),
    "top_k": moe.FLAGS["top_k"],
    "shared": moe.FLAGS["shared"],
    **dict.fromkeys(("dp", "cp", "tp", "pp", "micro", "ep"), Flag(int, "fixed", POSITIVE)),
    "zero": Flag(int, "fixed", (0, 3)),
    "schedule": Flag(str, "fixed", SCHEDULES),
    "ckpt": Flag(str, "fixed", CKPTS),
    "attn": Flag(str, "fixed", ("ring", "zigzag", "allgather", "ulysses")),
    "exact": Flag(0, "so many rows get the peak of a dry run, which takes minutes", ANY),
}


def read(words=None):
    """-> the flags, in bounds. Here and in estimate.py they are called `at`.

    Besides, .cfg: sizes of the model; .fixed: {axis: value} of the axes that are given; .node: how
    many GPUs a node has, all nodes being of one size.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], usage="%(prog)s [flags]",
                                     allow_abbrev=False)
    parser.error = lambda message: require(False, message)
    for name, flag in OWN.items():
        add_flag(parser, "--" + name.replace("_", "-"), flag)
    parser.add_argument("--sp", help="fixed", action=argparse.BooleanOptionalAction)
    at = parser.parse_args(words)
    for name, flag in OWN.items():
        check_bounds("--" + name.replace("_", "-"), getattr(at, name), flag.get("least"),
                     flag.get("most"))
    require(at.gpus and at.batch, "give both --gpus and --batch")
    given = {name: value for name, value in vars(at).items() if value is not None}
    at.cfg = MODELS[at.model]._replace(**{name: given[name] for name in SIZES if name in given})
    at.fixed = {axis: given[axis] for axis in Layout._fields if axis in given}
    if at.experts is None:
        at.experts = moe.FLAGS["experts"]["default"] if at.model in moe.PRESETS else 0
    refuse(at)
    at.node = max(n for n in divisors(at.gpus) if n <= at.gpus_per_node)
    return at


def refuse(at):
    """What makes no sense ends here, in one line."""
    cfg = at.cfg
    E = at.experts
    kv_heads = cfg.kv_heads or cfg.heads
    of_llama = at.kv_heads or at.hidden
    require(not cfg.form.learned_positions or not of_llama,
            "--kv-heads, --hidden: are for Llama's form")
    require(cfg.width % cfg.heads == 0, f"--heads {cfg.heads} does not divide --width {cfg.width}")
    require(cfg.heads % kv_heads == 0, f"--kv-heads {kv_heads} does not divide --heads {cfg.heads}")
    require(not E or at.top_k <= E, f"--top-k {at.top_k} of --experts {E}: choose {E} at most")
    require(E or not (at.ep or at.shared), "--ep and --shared are for --experts E")
    refuse_file("--json", at.json)


# ---- in words ------------------------------------------------------------------


def text(lay):
    """A layout -> dp 2 x tp 4, micro 8, sp"""
    sizes = {axis: getattr(lay, axis) for axis in ("dp", "cp", "tp", "pp")}
    axes = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    words = [  # is it said? as what?
        (True, " x ".join(axes) or "one GPU"), (lay.ep, f"ep {lay.ep}"), (lay.cp > 1, lay.attn),
        (True, f"micro {lay.micro}"), (lay.pp > 1, lay.schedule), (lay.sp, "sp"),
        (lay.zero, f"zero {lay.zero}"), (lay.ckpt != "none", f"ckpt {lay.ckpt}"),
    ]
    return ", ".join(word for is_said, word in words if is_said)


def flags_of(lay, at):
    """-> the words for hybrid_3d.py"""
    names = ["model", *SIZES, "batch", "dtype"]
    left_out = set()
    if lay.cp == 1:
        left_out |= {"cp", "attn"}
    if lay.ep:
        names += ["experts", "top_k", "shared"]
    words = [as_flag(name, getattr(at, name)) for name in names if getattr(at, name)]
    for axis, value in lay._asdict().items():
        if axis not in left_out and value is not None and value is not False:
            words.append(as_flag(axis, value))
    return " ".join(words)


def command(lay, at):
    """-> the line that runs a layout"""
    where = "--standalone"
    if at.gpus > at.node:
        where = f"--nnodes={at.gpus // at.node} --rdzv_backend=c10d --rdzv_endpoint=HOST:29500"
    return f"torchrun {where} --nproc_per_node={at.node} hybrid_3d.py {flags_of(lay, at)}"


def as_flag(name, value):
    """-> --tp 2, --sp or --no-sp"""
    name = name.replace("_", "-")
    if value is False:
        return f"--no-{name}"
    return f"--{name}" if value is True else f"--{name} {value}"


# ---- tables --------------------------------------------------------------------


def show(rows, at):
    """Two tables of [(layout, memory, time)]: where the memory goes, and where the time."""
    total = parameters_of(at.cfg, at.experts, at.shared)
    print(f"{at.model}: {total:,} parameters, {at.gpus} GPUs\n")
    print(f"{'GB per GPU':>70} " + " ".join(f"{kind:>11}" for kind in HELD) + "     all")
    for i, (lay, memory, _) in enumerate(rows, 1):
        cells = " ".join(f"{memory[kind] / 1e9:11.2f}" for kind in HELD)
        print(f"{i:3} {text(lay):66} {cells} {memory['memory'] / 1e9:7.2f}")
    shown = [part for part in PARTS if any(time[part] for _, _, time in rows)]
    head = " ".join(f"{part:>9}" for part in shown)
    print(f"\nms  {head}      step TFLOP/s    MFU       tok/s")
    for i, (_, _, time) in enumerate(rows, 1):
        times = " ".join(f"{1e3 * time[part]:9.1f}" for part in (*shown, "seconds"))
        print(f"{i:3} {times} {time['tflops']:7.1f} {time['mfu']:6.1%} {time['rate']:11,.0f}")
    lay, _, time = rows[0]
    if at.tokens:
        print(f"\nrow 1 takes {time['days']:.1f} days, {time['gpu_hours']:,.0f} GPU-hours, "
              f"which cost {time['cost']:,.0f}")
    print(f"\nrow 1:  {command(lay, at)}")


def exact_peak(lay, at):
    """-> what a dry run of the fullest stage's first rank says, in bytes"""
    job = job_of(at.cfg, at, lay)
    fullest = max(range(lay.pp), key=lambda stage: held(job, stage)["memory"])
    rank = fullest * at.gpus // lay.pp
    flags = f"{flags_of(lay, at)} --dry-run {at.gpus} --rank {rank}"
    return report(1, "hybrid_3d.py", flags.split())["ranks"][0]["memory"]["peak"]


# ---- run -----------------------------------------------------------------------


def main():
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it, without a traceback
    at = read()
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
    else:
        needed, lay = least
        said = f"nothing fits {at.gpu_memory:g} GB: {text(lay)} needs {needed / 1e9:.1f} GB"
        print(said)
    for i, (lay, memory, _) in enumerate(rows[:at.exact], 1):
        memory["exact"] = exact_peak(lay, at)
        print(f"row {i}: a dry run peaks at {memory['exact'] / 1e9:.2f} GB", flush=True)
    if at.json:
        found = [{**lay._asdict(), **memory, **time, "command": command(lay, at)}
                 for lay, memory, time in rows]
        flags = {name: value for name, value in vars(at).items() if name != "cfg"}
        result = {"rows": found, "fit": len(fits), "advice": said, "flags": flags}
        Path(at.json).write_text(json.dumps(result, indent=1))
    return int(not rows)


if __name__ == "__main__":
    sys.exit(main())
