"""Which layout for my model on my cluster? Tries hybrid_3d.py's, and prints the fastest ones.

Of its choices dualpipe-v, auto, ring and allgather are tried only where --schedule or --attn names
them, some others only where they can be of use: see layouts() in estimate.py.

    layout    dp x cp x tp x pp GPUs, micro-batches, schedule, sp, zero, ckpt, attn, and ep of the
              experts (--experts 64 --top-k 8 ..), as hybrid_3d.py has them
    memory    of the fullest stage: the peak of hybrid_3d's dry run, within 3%. It is parameters,
              gradients, optimizer, activations of the micro-batches in flight, and what comes and
              goes in the loss, a block's backward or AdamW. CUDA, NCCL and fragmentation are not
              in it: take --gpu-memory less what they need.

    time of the slowest stage, for M micro-batches; dp and adamw alone are those of the fullest one.
    B T are the tokens of a rank; for cp, of its cp ranks together. Numbers, unless bytes are said
    part           what it counts                                                  source
    matmul         72 C^2 (1 + T/6C) FLOPs per token and block, and the head;      1, appendix
                   48 of the 72 for each MLP that a token visits; the last rank of
                   a ring has T (2 - 1/cp) in the place of T
    recompute      what ckpt full does again, 16 C^2 + 4 T C                       amp_accum_ckpt.py
    memory-bound   bytes of norms, residuals and gelu, read and written            shapes
    launch         blocks of all micro-batches, collectives                        measured; else 0
    tp             8 B T C (tp-1)/tp per block, sp 10; not overlapped              1, 3.2
    cp             (cp-1) 16 B T C/(cp tp) bytes per block in bf16, ulysses' are   3; 4
                   1/cp of that; hops travel behind attention, the others are not
                   overlapped
    ep             4 K B T C (ep-1)/ep per block, / tp; not overlapped             moe.py
    bubble         (pp-1)/M of all above in gpipe and 1f1b. Where F = B = W,       1, 2.2; 2
                   interleaved and bfs have 1/2 of that, zb-h1 and auto 1/3,
                   dualpipe-v 1/6, zb-h2 and zb-v none
    pp             B T C per boundary and direction, not overlapped                1, 3.2
    dp             2 (n-1)/n of the gradients, n = dp cp, by a ring. zero 2 has    1, 3.3; 5
                   M + 1, and zero 3 has 3 M, in the place of the 2. Experts among
                   those that hold the same ones. The last backward hides it, but
                   not the half of zero 1 that gathers parameters
    adamw          bytes of gradients and states

A group inside a node has --bandwidth-intra, one across nodes --bandwidth-inter, GB/s per GPU. The
defaults are those of A100-80GB, 8 to a node. One number is fitted: --efficiency, of matmuls. 0.67
for all ten rows of table 1 in source 1 (1.7B to 1T) gives their TFLOP/s within 8%, 3.5% on average.
(To expect the same TFLOP/s in all ten, without any model, would be 5.4% off on average at best.)
--megatron-2021 is the software of source 1, in which attention is not fused, for one. --calibrate
measures all of this on this machine, and how many ranks share a core: such ranks fill each other's
bubbles, and hide nothing.

1  Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
   Megatron-LM", arXiv:2104.04473
2  Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241
3  Liu et al. 2023, "Ring Attention with Blockwise Transformers", arXiv:2310.01889, section 3
4  Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509, section 3
5  Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, section 7

    python tools/plan.py --model gpt3-175b --batch 1536 --gpus 1024 --tokens 300e9
    torchrun --standalone --nproc_per_node=4 tools/plan.py --calibrate --dtype fp32 --batch 8
"""
import argparse
import ast
import inspect
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a program: the root is not there
import harness  # noqa: E402, F401, before torch, which warns where NumPy is missing
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import DTYPES, FLAGS, PRESETS, Block, Flag, GPTConfig, add_flag  # noqa: E402
from estimate import (  # noqa: E402
    CKPTS, HELD, MEMORY, PARTS, SCHEDULES, TIME, Layout, assess, divisors, needs, search, timed)

from harness.usage import launched, require  # noqa: E402

# ---- flags -------------------------------------------------------------------

OWN = {
    "model": FLAGS["model"],
    # refuse() has their bounds
    **{name: FLAGS[name]._replace(limits=None) for name in (*GPTConfig._fields, "json")},
    "batch": Flag(int, "B, sequences per step"),
    "dtype": Flag("bf16", "of parameters and arithmetic", ("bf16", "fp32")),
    "gpus": Flag(int, "how many; the ranks, under torchrun"),
    "gpu_memory": Flag(80.0, "GB of a GPU"),
    "gpu_tflops": Flag(312.0, "its peak"),
    "hbm": Flag(2.0, "TB/s of its memory"),
    "gpus_per_node": Flag(8, "GPUs"),
    "bandwidth_intra": Flag(300.0, "GB/s per GPU inside a node"),
    "bandwidth_inter": Flag(25.0, "GB/s per GPU across nodes"),
    "efficiency": Flag(0.67, "of matmuls; fitted"),
    "overhead": Flag(0.0, "s to start the kernels of a block"),
    "latency": Flag(0.0, "s to start a collective"),
    "share": Flag(1.0, "ranks that take turns on a GPU or core"),
    "megatron_2021": Flag(False, "the software of Narayanan 2021"),
    "tokens": Flag(0.0, "to train on, for the days"),
    "experts": Flag(0, "E in each layer, in the place of its MLP (0: none)"),
    "top_k": Flag(2, "K, experts per token"),
    "shared": Flag(False, "an expert for every token besides"),
    "capacity": Flag(0.0, "A: an expert takes A times its share (0: everything)"),
    "balance": Flag("aux", "how experts are balanced, which costs nothing",
                    ("aux", "bias", "none")),
    "dp": Flag(int, "fixed"),
    "cp": Flag(int, "fixed"),
    "tp": Flag(int, "fixed"),
    "pp": Flag(int, "fixed"),
    "micro": Flag(int, "fixed"),
    "zero": Flag(int, "fixed"),
    "schedule": Flag(str, "fixed", SCHEDULES),
    "ckpt": Flag(str, "fixed", CKPTS),
    "attn": Flag(str, "fixed", ("ring", "zigzag", "allgather", "ulysses")),
    "ep": Flag(int, "fixed"),
    "explain": Flag(0, "ROW: its formulas, with the numbers put in"),
    "try": Flag(0, "run so many rows on this machine"),
    "calibrate": Flag(False, "measure speed and bandwidth of the ranks"),
    "table": Flag(False, "models by GPUs, as Markdown"),
}
ZERO_MEANS_NONE = ("overhead", "latency", "tokens", "explain", "try", "experts", "capacity")


def read():
    """-> the flags, all of them in bounds. Here and in estimate.py they are called `at`.

    Besides, .cfg: sizes of the model; .fixed: {axis: value} of the axes that are given; .node: how
    many GPUs a node has.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], usage="%(prog)s [flags]",
                                     allow_abbrev=False)
    parser.error = lambda message: require(False, message)
    for name, flag in OWN.items():
        add_flag(parser, name, flag)
    parser.add_argument("--sp", help="fixed", action=argparse.BooleanOptionalAction)
    at = parser.parse_args()
    fill_in(at)
    refuse(at)
    at.fixed = {}
    for axis in Layout._fields:
        if getattr(at, axis) is not None:
            at.fixed[axis] = getattr(at, axis)
    return resized(at, at.gpus)


def fill_in(at):
    """Fills in what the flags leave open, from the launcher, --table and the preset."""
    if at.gpus is None and "WORLD_SIZE" in os.environ:
        at.gpus = ranks_here().world_size
    if at.table:  # which has batches and GPUs of its own
        at.batch = at.batch or 512
        at.gpus = at.gpus or 1
    at.batch = at.batch or 0  # refuse() says that it is missing
    at.gpus = at.gpus or 0
    preset = PRESETS[at.model]
    sizes = [getattr(at, name) or getattr(preset, name) for name in GPTConfig._fields]
    at.cfg = GPTConfig(*sizes)


def ranks_here():
    """-> what the launcher says of this process; bad usage if that makes no sense"""
    try:
        return launched()
    except ValueError as error:
        require(False, error)


def refuse(at):
    """What makes no sense ends here, in one line."""
    for name, value in vars(at).items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if value == 0 and name in ("zero", *ZERO_MEANS_NONE):
            continue
        needed = "must be more than 0"
        if name in ("gpus", "batch"):
            needed = "give both --gpus and --batch, 1 or more"
        require(0 < value < 1e18, f"--{name.replace('_', '-')} {value}: {needed}")
    require(at.zero in (None, 0, 1, 2, 3), f"--zero {at.zero}: take 0, 1, 2 or 3")
    cfg = at.cfg
    E = at.experts
    require(not E or at.top_k <= E, f"--top-k {at.top_k} of --experts {E}: choose {E} at most")
    require(E or not (at.ep or at.shared or at.capacity),
            "--ep, --shared and --capacity are for --experts E")
    least, _ = FLAGS["vocab"].limits
    require(cfg.vocab >= least, f"--vocab {cfg.vocab}: must be {least} or more")
    require(cfg.width % cfg.heads == 0, f"--heads {cfg.heads} does not divide --width {cfg.width}")
    if at.json:
        require(Path(at.json).absolute().parent.is_dir(), f"--json {at.json}: no such folder")
        require(not Path(at.json).is_dir(), f"--json {at.json}: is a folder, give a file")


def resized(at, gpus):
    """The flags for another number of GPUs, in nodes of equal size, --gpus-per-node at most."""
    node = max(n for n in divisors(gpus) if n <= at.gpus_per_node)
    return argparse.Namespace(**{**vars(at), "gpus": gpus, "node": node})


# ---- in words ----------------------------------------------------------------


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
    nodes = at.gpus // at.node
    where = "--standalone"
    if nodes > 1:
        where = f"--nnodes={nodes} --rdzv_backend=c10d --rdzv_endpoint=HOST:29500"
    words = [f"torchrun {where} --nproc_per_node={at.node} hybrid_3d.py"]
    for name in ("model", *GPTConfig._fields):
        if getattr(at, name):
            words.append(f"--{name} {getattr(at, name)}")
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


def advice(cfg, at, least):
    """Nothing fits -> by how much, and what would make it fit."""
    needed, lay = least
    lines = [f"nothing fits {at.gpu_memory:g} GB: {text(lay)} needs {needed / 1e9:.1f} GB"]
    for axis, value in at.fixed.items():
        fits, _ = search(cfg, at, free=[axis])
        lines += fits_with(f"without {as_flag(axis, value)}", fits)
    on_more = fits_on_more(cfg, at)
    if at.fixed and not on_more:
        given = " ".join(as_flag(axis, value) for axis, value in at.fixed.items())
        on_more = fits_on_more(cfg, at, free=at.fixed, change=f" without {given}")
    return "\n".join(lines + on_more)


def fits_on_more(cfg, at, free=(), change=""):
    """-> [the line on the least of 2, 4, .. 64 times the GPUs on which something fits], or []"""
    for times in (2, 4, 8, 16, 32, 64):
        gpus = at.gpus * times
        fits, _ = search(cfg, resized(at, gpus), free=free)
        if fits:
            return fits_with(f"on {gpus} GPUs{change}", fits)
    return []


def as_flag(axis, value):
    """-> --tp 2, --sp or --no-sp"""
    if value is True:
        return f"--{axis}"
    if value is False:
        return f"--no-{axis}"
    return f"--{axis} {value}"


def fits_with(change, fits):
    if not fits:
        return []
    _, fastest = fits[0]
    return [f"  fits {change}: {text(fastest)}"]


# ---- tables ------------------------------------------------------------------


RARE = ("cp_time", "ep_time")  # have a column only where there are any


def show(rows, at):
    """Two tables of [(names, layout)]: where the memory goes, and where the time."""
    print(f"{'GB per GPU':>70} " + " ".join(f"{kind:>11}" for kind in HELD) + "     all")
    for i, (names, lay) in enumerate(rows, 1):
        held = " ".join(f"{names[kind] / 1e9:11.2f}" for kind in HELD)
        print(f"{i:3} {text(lay):66} {held} {names['memory'] / 1e9:7.2f}")
    shown = []
    for part in PARTS:
        if part not in RARE or any(names[part] for names, _ in rows):
            shown.append(part)
    parts = " ".join(f"{part.removesuffix('_time'):>9}" for part in shown)
    head = f"\nms  {parts}      step TFLOP/s    MFU       tok/s"
    if at.tokens:
        head += "     days"
    print(head)
    for i, (names, _) in enumerate(rows, 1):
        times = " ".join(f"{1e3 * names[part]:9.1f}" for part in (*shown, "seconds"))
        line = f"{i:3} {times} {names['tflops']:7.1f} {names['mfu']:6.1%} {names['rate']:11,.0f}"
        if at.tokens:
            line += f" {names['days']:8.1f}"
        print(line)


MODELS = {
    "gpt2": PRESETS["gpt2"],
    "gpt2-xl": PRESETS["gpt2-xl"],
    "7B": GPTConfig(32, 4096, 32, 50257, 2048),
    "30B": GPTConfig(48, 7168, 56, 50257, 2048),
    "gpt3-175b": PRESETS["gpt3-175b"],
}


def table(at):
    """Markdown: the fastest layout of each model on 1, 8, 64 and 512 GPUs, and its MFU."""
    sizes = (8, 64, 512)
    print("| model | 1 GPU | " + " | ".join(f"{n} GPUs" for n in sizes) + " |")
    print("|" + "---|" * (2 + len(sizes)))
    for model, cfg in MODELS.items():
        cells = [cell(cfg, resized(at, gpus)) for gpus in (1, *sizes)]
        print(f"| {model} | " + " | ".join(cells) + " |")


def cell(cfg, at):
    fits, least = search(cfg, at)
    if least is None:
        return "no layout"
    if not fits:
        return f"needs {least[0] / 1e9:,.0f} GB"
    _, fastest = fits[0]
    mfu = timed(assess(cfg, at, fastest))["mfu"]
    return f"{text(fastest, few=True)}: {mfu:.0%}"


# ---- formulas, explained -----------------------------------------------------


def explain(names):
    """Every formula: what it is, and each line of it that was executed, with the numbers put in."""
    for formula in (*MEMORY, *TIME):
        print(f"  {formula.__name__:12} {' '.join(formula.__doc__.split())}")
        for line in executed(formula, [names[name] for name in needs(formula)]):
            print(f"  {'':12}   {line}")


def executed(formula, arguments):
    """-> the assignments of a function, and what it returns, in the order of their execution"""
    statements = statements_of(formula)
    lines = []

    def watch(frame, event, _):
        number = frame.f_lineno - formula.__code__.co_firstlineno + 1
        if event == "line" and number in statements:
            lines.append(worked_out(statements[number], frame.f_locals))
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    result = formula(*arguments)
    sys.settrace(before)
    lines[-1] += f" = {as_text(result)}"
    return lines


def statements_of(function):
    """-> {number of a line: the assignment or return that begins there}"""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    kinds = (ast.Assign, ast.AugAssign, ast.Return)
    return {node.lineno: node for node in ast.walk(tree) if isinstance(node, kinds)}


def worked_out(statement, values):
    """A statement -> its formula and, where they differ, the same with the numbers put in:

    total = 2 * x     total = 2 * x = 2 * 4096
    total += 2 * x    total + 2 * x = 30 + 2 * 4096
    return x / tp     x / tp = 4096 / 2
    return total      result
    """
    value = statement.value
    if isinstance(statement, ast.Return) and isinstance(value, (ast.Name, ast.Constant)):
        return "result"
    if isinstance(statement, ast.AugAssign):
        value = ast.BinOp(statement.target, statement.op, value)
    formula = ast.unparse(value)
    numbers = ast.unparse(PutIn(values).visit(ast.parse(formula, mode="eval")))
    # constants are written as they are in `numbers`: else 8.0 would differ from 8
    formula = ast.unparse(PutIn({}).visit(ast.parse(formula, mode="eval")))
    if numbers != formula:
        formula = f"{formula} = {numbers}"
    if isinstance(statement, ast.Assign):
        formula = f"{statement.targets[0].id} = {formula}"
    return formula


class PutIn(ast.NodeTransformer):
    """Replaces names by their numbers. A number becomes an ast.Name, so that unparse writes what
    as_text has made of it, with few digits."""

    def __init__(self, values):
        self.values = values

    def visit_Name(self, node):
        value = self.values.get(node.id)
        if isinstance(value, (int, float)):
            return ast.Name(as_text(value))
        return node

    def visit_Constant(self, node):
        if isinstance(node.value, (int, float)):
            return ast.Name(as_text(node.value))
        return node


def as_text(number):
    return f"{number:.6g}"


# ---- this machine ------------------------------------------------------------


class Rates:
    """How much of something is done in a second on this device, while all ranks are at it."""

    def __init__(self, device):
        self.device = device

    def do(self, job, enough):
        """Does the job until enough(how often it was done) is true -> times a second."""
        self.once(job)  # not counted
        done = 0
        start = time.perf_counter()
        while not enough(done):
            self.once(job)
            done += 1
        return done / (time.perf_counter() - start)

    def once(self, job):
        job()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def for_a_while(self, job):
        """Half a second. Ranks need not do it equally often."""
        end = time.perf_counter() + 0.5
        return self.do(job, lambda done: done > 0 and time.perf_counter() > end)

    def so_often(self, times, job):
        """A collective, which ranks must do equally often."""
        return self.do(job, lambda done: done == times)


def calibrate(cfg, at):
    """Measures this machine -> {flag: value}, which replace what the flags say. All ranks at once
    do matmuls of the model's size, copies, a block of one token and all-reduces; then rank 0 does
    the matmuls alone."""
    launch = ranks_here()
    ranks = launch.world_size
    gpus = torch.cuda.device_count()
    device = torch.device("cpu")
    if gpus:
        device = torch.device("cuda", launch.local_rank % gpus)
        torch.cuda.set_device(device)
    if ranks > 1:
        backend = "gloo"
        if gpus >= launch.local_world_size:
            backend = "nccl"
        dist.init_process_group(backend)

    options = {"device": device, "dtype": DTYPES[at.dtype]}
    rows = max(1, at.batch // at.gpus) * cfg.seq
    C = cfg.width
    x = torch.randn(rows, C, **options)
    weight = torch.randn(C, 4 * C, **options)
    token = torch.randn(1, 1, C, **options)
    block = Block(cfg).to(**options)
    large = torch.zeros(2, 1 << 23, device=device)  # half of it is read, half is written
    rates = Rates(device)
    flops = 8 * rows * C * C
    tflops = flops / 1e12 * rates.for_a_while(lambda: x @ weight)
    flags = {"efficiency": 1.0, "gpu_tflops": tflops}
    flags["overhead"] = 1 / rates.for_a_while(lambda: block(token).sum().backward())
    flags["hbm"] = large.nbytes / 1e12 * rates.for_a_while(lambda: large[0].copy_(large[1]))
    if ranks > 1:
        flags.update(calibrate_collectives(rates, large, ranks))
        if launch.rank == 0:  # the others wait below
            alone = flops / 1e12 * rates.for_a_while(lambda: x @ weight)
            flags["share"] = max(1.0, alone / tflops)
        dist.barrier()
        dist.destroy_process_group()
    return flags


def calibrate_collectives(rates, large, ranks):
    """-> bandwidths and latency of all-reduces"""
    gigabytes = 2 * (ranks - 1) / ranks * large.nbytes / 1e9  # that a rank sends in a ring
    times = rates.so_often(15, lambda: dist.all_reduce(large))  # partial -> replicated
    small = large[0, :1]
    starts = rates.so_often(99, lambda: dist.all_reduce(small))  # partial -> replicated
    bandwidth = gigabytes * times
    return {"bandwidth_intra": bandwidth, "bandwidth_inter": bandwidth, "latency": 1 / starts}


def attempt(lay, at):
    """Really runs a layout, on this machine -> ms per step, inf if it fails"""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.json")
        _, *words = shlex.split(command(lay, at))  # without "torchrun"
        line = [sys.executable, "-m", "torch.distributed.run", *words, "--no-check"]
        done = subprocess.run([*line, "--json", str(file)], cwd=ROOT, capture_output=True)
        if done.returncode:
            return float("inf")
        return json.loads(file.read_text())["ms_per_step"]


# ---- run ---------------------------------------------------------------------


def main():
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it, without a traceback
    at = read()
    if at.calibrate:
        measured = calibrate(at.cfg, at)
        if ranks_here().rank > 0:
            return 0
        vars(at).update(measured)
        print("measured: " + "  ".join(f"{name} {value:.4g}" for name, value in measured.items()))
    if at.table:
        table(at)
        return 0
    if at.gpus > at.gpus_per_node and at.node != at.gpus_per_node:
        nodes = at.gpus // at.node
        print(f"{at.gpus} GPUs are not full nodes of {at.gpus_per_node}: "
              f"taken as {nodes} of {at.node}")
    fits, least = search(at.cfg, at)
    refuse_impossible(at, least)
    rows = [(timed(assess(at.cfg, at, lay)), lay) for _, lay in fits[:10]]
    require(not rows or at.explain <= len(rows),
            f"--explain {at.explain}: there are {len(rows)} rows")
    said = ""
    if rows:
        show(rows, at)
        row = at.explain or 1
        names, lay = rows[row - 1]
        print(f"\nrow {row}:  {command(lay, at)}")
        if at.explain:
            explain(names)
    else:
        said = advice(at.cfg, at, least)
        print(said)
    for seconds, lay in fits[:getattr(at, "try")]:
        print(f"{attempt(lay, at):9.1f} ms, {1e3 * seconds:9.1f} expected: {text(lay)}", flush=True)
    if at.json:
        write(at, rows, len(fits), said)
    return int(not rows)


def refuse_impossible(at, least):
    """No layout at all, whether it fits or not."""
    given = "".join(" " + as_flag(axis, value) for axis, value in at.fixed.items())
    require(least, f"--batch {at.batch}{given}: no layout with dp x cp x tp x pp = {at.gpus}. They "
            f"have to divide the batch, --heads {at.cfg.heads} and --layers {at.cfg.layers}, and "
            "flags that are given have to go together")


def write(at, rows, fit, said):
    found = []
    for names, lay in rows:
        row = {name: value for name, value in names.items() if isinstance(value, (int, float, str))}
        row["command"] = command(lay, at)
        found.append(row)
    result = {"rows": found, "fit": fit, "advice": said, "flags": vars(at)}
    Path(at.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    sys.exit(main())
