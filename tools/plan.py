"""Which layout for my model on my cluster? Goes through all that hybrid_3d.py runs and prints the fastest that fit.

    layout    dp x tp x pp GPUs, micro-batches, schedule, sp, zero, ckpt, as hybrid_3d.py has them
    memory    of the fullest stage, within 2% the peak of hybrid_3d's dry run: parameters, gradients, optimizer,
              activations of the micro-batches in flight, and what comes and goes in the loss, a block's backward or
              AdamW. CUDA, NCCL and fragmentation are not in it: --gpu-memory is what they leave.

    time of the slowest stage      what it counts                                              source
    matmul                         72 C^2 (1 + T/6C) FLOPs per token and block, the head       Narayanan, appendix
    recompute                      what ckpt full does again, 16 C^2 + 4 T C                   amp_accum_ckpt.py
    memory-bound                   bytes of norms, residuals and gelu, read and written        data types and shapes
    launch                         blocks of all micro-batches, and collectives                measured, 0 by default
    tp                             8 B T C (t-1)/t per block, sp 10; not overlapped            Narayanan, 3.2
    bubble                         (p-1)/M of those, / v, / 3 zb-h1 (F = B = W), tp / 1.4      Narayanan, 2.2; Qi 2023
    pp                             B T C per boundary and direction, not overlapped            Narayanan, 3.2
    dp                             2 (d-1)/d of the gradients, ring; the last backward hides   Narayanan, 3.3
                                   it, but not the half of zero 1 that gathers parameters
    adamw                          bytes of gradients and states

A group inside a node has --bandwidth-intra, one across nodes --bandwidth-inter, GB/s per GPU. Defaults: A100-80GB, 8 to
a node. One number is fitted: --efficiency, of matmuls. 0.67 for all ten rows of Narayanan's table 1 (1.7B to 1T) gives
their TFLOP/s within 8%, 3.5% on average; the best constant guess is 5.4% off. --megatron-2021: unfused attention, etc.
--calibrate measures all on this machine, and how many ranks share a core: they fill each other's bubbles, hide nothing.

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
arXiv:2104.04473; Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241.

    python plan.py --model gpt3-175b --batch 1536 --gpus 1024 --tokens 300e9
    torchrun --standalone --nproc_per_node=4 tools/plan.py --calibrate --dtype fp32 --batch 8 --try 3
"""
import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a program: the root is not there
from common import DTYPES, FLAGS, PRESETS, Block, GPTConfig  # noqa: E402
from estimate import HELD, MEMORY, PARTS, SKIP, TIME, Layout, assess, divisors, search, timed  # noqa: E402

from harness.usage import require  # noqa: E402

# ---- the search ------------------------------------------------------------


def resized(at, gpus):
    """The flags for another number of GPUs, in equal nodes of so many that they divide."""
    return argparse.Namespace(**dict(vars(at), gpus=gpus, node=max(n for n in divisors(gpus) if n <= at.gpus_per_node)))


def advice(cfg, at, least):
    """Nothing fits: by how much, and what would make it fit."""
    lines = [f"nothing fits {at.gpu_memory:g} GB: {text(least[1])} needs {least[0] / 1e9:.1f} GB"]
    for change, free, gpus in ([(f"without --{axis} {value}", [axis], at.gpus) for axis, value in at.fixed.items()]
                               + [(f"on {at.gpus * n} GPUs", at.fixed, at.gpus * n) for n in (2, 4, 8, 16, 32, 64)]):
        fits, _ = search(cfg, resized(at, gpus), free)
        lines += [f"  fits {change}: {text(lay)}" for _, lay in fits[:1]]
        if fits and gpus > at.gpus:
            break
    return "\n".join(lines)


# ---- what is printed ---------------------------------------------------------


def text(lay, few=False):
    axes = [f"{axis} {getattr(lay, axis)}" for axis in ("dp", "tp", "pp") if getattr(lay, axis) > 1] or ["one GPU"]
    return " x ".join(axes) + f", micro {lay.micro}" * (not few) + f", {lay.schedule}" * (lay.pp > 1) + \
        ", sp" * lay.sp + ", zero 1" * lay.zero + f", ckpt {lay.ckpt}" * (lay.ckpt != "none")


def command(lay, at):
    nodes = at.gpus // at.node
    where = f"--nnodes={nodes} --rdzv_backend=c10d --rdzv_endpoint=HOST:29500" if nodes > 1 else "--standalone"
    sizes = [f"--{name} {getattr(at, name)}" for name in ("model", *GPTConfig._fields) if getattr(at, name)]
    own = [f"--{axis} {value}" for axis, value in lay._asdict().items() if axis != "sp"] + ["--sp"] * lay.sp
    return " ".join([f"torchrun {where} --nproc_per_node={at.node} hybrid_3d.py", *sizes, f"--batch {at.batch}", *own,
                     f"--dtype {at.dtype}"])


def show(rows, at):
    """Two tables: where the memory goes, and where the time."""
    print(f"{'GB per GPU':>70} " + " ".join(f"{kind:>11}" for kind in HELD) + "     all")
    for i, (names, lay) in enumerate(rows, 1):
        print(f"{i:3} {text(lay):66} " + " ".join(f"{names[kind] / 1e9:11.2f}" for kind in HELD)
              + f" {names['memory'] / 1e9:7.2f}")
    print("\nms  " + " ".join(f"{part.removesuffix('_time'):>9}" for part in PARTS)
          + "      step TFLOP/s    MFU       tok/s" + "     days" * (at.tokens > 0))
    for i, (names, _) in enumerate(rows, 1):
        print(f"{i:3} " + " ".join(f"{1e3 * names[part]:9.1f}" for part in (*PARTS, "seconds"))
              + f" {names['tflops']:7.1f} {names['mfu']:6.1%} {names['rate']:11,.0f}"
              + f" {names['days']:8.1f}" * (at.tokens > 0))


def explain(names):
    """Every formula, with the numbers put in."""
    def number(match):
        value = names.get(match[0], match[0])
        return f"{value:.6g}" if isinstance(value, (int, float)) else f"'{value}'" if match[0] in names else value

    for name, formula in (MEMORY | TIME).items():
        put = re.sub(r"(?<!')\b[A-Za-z]\w*\b(?!')", number, formula)
        print(f"  {name:12} = {formula}\n  {'':12} = {put} = {names[name]:.6g}")


def table(at):
    """Markdown: the fastest layout of each model on 1, 8, 64 and 512 GPUs, and its MFU."""
    sizes, models = (1, 8, 64, 512), {name: PRESETS[name] for name in ("gpt2", "gpt2-xl", "gpt3-175b")}
    models |= {"7B": GPTConfig(32, 4096, 32, 50257, 2048), "30B": GPTConfig(48, 7168, 56, 50257, 2048)}
    print("| model | " + " | ".join(f"{n} GPU{'s' * (n > 1)}" for n in sizes) + " |\n|" + "---|" * (1 + len(sizes)))
    for model, cfg in sorted(models.items(), key=lambda item: item[1].width):
        line = f"| {model} |"
        for gpus in sizes:
            fits, least = search(cfg, here := resized(at, gpus))
            line += f" {text(fits[0][1], few=True)}: {timed(assess(cfg, here, fits[0][1]))['mfu']:.0%} |" if fits else \
                f" needs {least[0] / 1e9:,.0f} GB |"
        print(line)


# ---- this machine ------------------------------------------------------------


def calibrate(cfg, at):
    """On all ranks at once: matmuls of the model's size, copies, a block of one token, all-reduces; then matmuls on
    rank 0 while the others wait -> the flags whose place they take."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    gpus, dtype = torch.cuda.device_count(), DTYPES[at.dtype]
    device = f"cuda:{rank % gpus}" if gpus else "cpu"
    if ranks > 1:
        dist.init_process_group("nccl" if ranks <= gpus else "gloo")

    def rate(amount, job, times=0):
        """For half a second, so that all ranks are at it; a collective as often on every rank."""
        job()  # not counted
        n, start = 0, time.perf_counter()
        while n < times or not times and time.perf_counter() < start + 0.5:
            job()
            if gpus:
                torch.cuda.synchronize(device)
            n += 1
        return amount * n / (time.perf_counter() - start)

    rows, C, block = max(1, at.batch // at.gpus) * cfg.seq, cfg.width, Block(cfg).to(device, dtype)
    token, x, w = (torch.randn(shape, device=device, dtype=dtype) for shape in ((1, 1, C), (rows, C), (C, 4 * C)))
    large, matmul = torch.zeros(2, 1 << 23, device=device), (8 * rows * C * C / 1e12, lambda: x @ w)
    flags = dict(efficiency=1.0, gpu_tflops=rate(*matmul), overhead=1 / rate(1, lambda: block(token).sum().backward()),
                 hbm=rate(large.nbytes / 1e12, lambda: large[0].copy_(large[1])))
    if ranks > 1:
        sent = 2 * (ranks - 1) / ranks * large.nbytes / 1e9
        flags["bandwidth_intra"] = flags["bandwidth_inter"] = rate(sent, lambda: dist.all_reduce(large), 15)
        flags["latency"] = 1 / rate(1, lambda: dist.all_reduce(large[0, :1]), 99)
        if rank == 0:
            flags["share"] = max(1.0, rate(*matmul) / flags["gpu_tflops"])  # the others wait below
        dist.barrier()
        dist.destroy_process_group()
    return flags


def attempt(lay, at):
    """Really runs a layout, on this machine -> ms per step"""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.json")
        flags = [*shlex.split(command(lay, at))[1:], "--no-check", "--json", str(file)]
        done = subprocess.run([sys.executable, "-m", "torch.distributed.run", *flags], cwd=Path(__file__).parent,
                              capture_output=True)
        return float("inf") if done.returncode else json.loads(file.read_text())["ms_per_step"]


# ---- run ---------------------------------------------------------------------

OWN = {
    "model": ("toy", "a preset, whose sizes the next five override", tuple(PRESETS)),
    **{name: FLAGS[name][:2] for name in (*GPTConfig._fields, "json")}, "batch": (int, "B, sequences per step"),
    "dtype": ("bf16", "of parameters and arithmetic", ("bf16", "fp32")), "gpus": (int, "G; the ranks, under torchrun"),
    "gpu_memory": (80.0, "GB of a GPU"), "gpu_tflops": (312.0, "its peak"), "hbm": (2.0, "TB/s of its memory"),
    "gpus_per_node": (8, "GPUs"), "bandwidth_intra": (300.0, "GB/s per GPU inside a node"),
    "bandwidth_inter": (25.0, "GB/s per GPU across nodes"), "efficiency": (0.67, "of matmuls; fitted"),
    "overhead": (0.0, "s to start the kernels of a block"), "latency": (0.0, "s to start a collective"),
    "share": (1.0, "ranks that take turns on a GPU or core"),
    "megatron_2021": (False, "the software of Narayanan 2021"), "tokens": (0.0, "to train on, for the days"),
    **{axis: (int, "fixed") for axis in ("dp", "tp", "pp", "micro")}, "sp": (None, "fixed"),
    "zero": (int, "fixed", (0, 1)), "schedule": (str, "fixed", tuple(SKIP)),
    "ckpt": (str, "fixed", ("none", "selective", "full")),
    "explain": (0, "ROW: its formulas, with the numbers put in"), "try": (0, "run so many rows on this machine"),
    "calibrate": (False, "measure speed and bandwidth of the ranks"), "table": (False, "models by GPUs, as Markdown")}


def read():
    """-> flags, all of them in bounds; fixed: the axes that are given."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], usage="%(prog)s [flags]", allow_abbrev=False)
    parser.error = lambda message: require(False, message)
    for name, (default, help, *choices) in OWN.items():
        kind = default if isinstance(default, type) else type(default)
        options = dict(type=kind, default=None if kind is default else default, choices=choices[0] if choices else None)
        if default is False or default is None:
            options = dict(action="store_true" if default is False else argparse.BooleanOptionalAction)
        parser.add_argument("--" + name.replace("_", "-"), help=help, **options)
    at = parser.parse_args()
    at.batch, at.gpus = at.batch or 512 * at.table, at.gpus or int(os.environ.get("WORLD_SIZE", 0)) + at.table
    require(at.gpus > 0 and at.batch > 0, f"--gpus {at.gpus} --batch {at.batch}: give both, 1 or more")
    for name, value in vars(at).items():
        nothing = value in (None, False) and OWN[name][0] in (int, None, 0)  # not given, or 0 where that means no
        require(nothing or not isinstance(value, (int, float)) or 0 < value < 1e18,
                f"--{name.replace('_', '-')} {value}: must be more than 0")
    at.cfg = GPTConfig(*(getattr(at, name) or size for name, size in PRESETS[at.model]._asdict().items()))
    require(at.cfg.width % at.cfg.heads == 0, f"--heads {at.cfg.heads} does not divide --width {at.cfg.width}")
    require(Path(at.json or ".").absolute().parent.is_dir(), f"--json {at.json}: no such folder")
    at.fixed = {axis: getattr(at, axis) for axis in Layout._fields if getattr(at, axis) is not None}
    return resized(at, at.gpus)


def main():
    at = read()
    if at.calibrate:
        vars(at).update(measured := calibrate(at.cfg, at))
        if os.environ.get("RANK", "0") != "0":
            return 0
        print("measured: " + "  ".join(f"{name} {value:.4g}" for name, value in measured.items()))
    if at.table:
        return table(at)
    if at.gpus > at.gpus_per_node != at.node:
        print(f"{at.gpus} GPUs are not full nodes of {at.gpus_per_node}: taken as {at.gpus // at.node} of {at.node}")
    fits, least = search(at.cfg, at)
    given = "".join(f" --{axis} {value}" for axis, value in at.fixed.items())
    require(least, f"--batch {at.batch}{given}: no dp x tp x pp = {at.gpus} divides batch, --heads {at.cfg.heads} and "
            f"--layers {at.cfg.layers}; take other --gpus or a --batch that is a multiple of them")
    rows = [(timed(assess(at.cfg, at, lay)), lay) for _, lay in fits[:10]]
    require(at.explain <= len(rows), f"--explain {at.explain}: there are {len(rows)} rows")
    said = "" if rows else advice(at.cfg, at, least)
    if rows:
        show(rows, at)
    print(said or f"\nrow {at.explain or 1}:  {command(rows[max(0, at.explain - 1)][1], at)}")
    for names, _ in rows[at.explain - 1:at.explain]:
        explain(names)
    for seconds, lay in fits[:vars(at)["try"]]:
        print(f"{attempt(lay, at):9.1f} ms, {1e3 * seconds:9.1f} expected: {text(lay)}", flush=True)
    if at.json:
        found = [{key: value for key, value in names.items() if isinstance(value, (int, float, str))}
                 | {"command": command(lay, at)} for names, lay in rows]
        Path(at.json).write_text(json.dumps(dict(rows=found, fit=len(fits), advice=said, flags=vars(at)), indent=1))
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
