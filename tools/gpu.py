"""What needs a GPU: every file on one card, in under ten minutes, as one table.

    ./run.sh gpu            python tools/gpu.py

    nccl    a world of one rank, in fp64, fp32 and bf16, with the check on
    gloo    2 and 4 ranks that share the card, in fp64, with the check on
    peak    the ledger's peak beside the allocator's, and beside the dry run's
    MFU     GPT-2 124M and 350M in bf16, plain and compiled: FLOPs of the model over the card's

The flags are those of VARIANTS, MIXED and HYBRID: of the schedules gpipe, 1f1b and zb-h1, of
hybrid_3d dp, tp and pp alone; no --hsdp and no --ep. All of them in GPT-2's form, and in fp64 on
one rank in Llama's too. Pipelines want a card for each rank: gloo sends CPU tensors alone.

Exit code 1 if any run failed, dry ones included; 2 where there is no GPU.
"""
import sys
from collections import namedtuple
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch  # noqa: E402

from tools.launch import Failed, report, worst_gap  # noqa: E402

Case = namedtuple("Case", "label file ranks flags")

# Dense bf16 TFLOP/s without sparsity, from data sheets; the first that fits
PEAK_TFLOPS = {"H100 PCIe": 756, "H100": 989, "H200": 989, "A100": 312, "L40S": 362, "L4 ": 121,
               "RTX 4090": 165, "RTX 3090": 71}

# of every file but hybrid_3d; the same ones on one rank and on several
VARIANTS = {
    "ddp": ("", "--impl idea"),
    "zero": ("--impl idea", "--stage 1", "--stage 2 --accum 2", "--stage 3",
             "--stage 1 --offload optimizer", "--stage 3 --offload param"),
    "fsdp": ("", "--no-reshard", "--offload"),
    "tensor_parallel": ("", "--sp"),
    "pipeline_parallel": ("--schedule gpipe", "--schedule 1f1b", "--schedule zb-h1"),
    "context_parallel": ("--attn zigzag", "--attn ring", "--attn allgather", "--attn ulysses"),
    "moe": ("", "--balance bias --capacity 1.25 --shared"),
    "amp_accum_ckpt": ("--accum 2", "--ckpt full", "--ckpt selective"),
}
MIXED = ("--amp bf16", "--amp fp16 --ckpt full", "--amp bf16 --ckpt selective --accum 2")
STEPS = "--steps 3"
HYBRID = {1: "--dp 1 --tp 1 --pp 1", 2: "--dp 1 --tp 2 --pp 1", 4: "--dp 2 --tp 2 --pp 1"}


def each(label, ranks, flags, without=""):
    """-> a Case of each variant but those of one file"""
    files = {**VARIANTS, "hybrid_3d": [HYBRID[ranks]]}
    found = []
    for file, variants in files.items():
        if file != without:
            found += [Case(label, file, ranks, f"{own} {flags} {STEPS}") for own in variants]
    return found


def cases():
    found = each("nccl Llama", 1, "--model llama-toy --dtype fp64")
    found += each("nccl fp64", 1, "--dtype fp64")
    found += each("nccl fp32", 1, "--dtype fp32")
    found += each("nccl bf16", 1, "--dtype bf16", without="amp_accum_ckpt")  # it has --amp bf16
    found += [Case("nccl amp", "amp_accum_ckpt", 1, f"{flags} {STEPS}") for flags in MIXED]
    for ranks in (2, 4):  # of a pipeline gloo sends CPU tensors alone
        label = f"gloo x{ranks} fp64"
        found += each(label, ranks, "--dtype fp64", without="pipeline_parallel")
    return found


# ---- running -----------------------------------------------------------------


def measure(ranks, file, flags):
    """-> the report of a file on the card"""
    return report(ranks, f"{file}.py", ["--device", "cuda", *flags.split()])


def run(case):
    """-> the line of a case, has it passed?"""
    line = f"{case.label:14} {case.file:18} {case.flags.replace(STEPS, '').strip():42}"
    try:
        found = measure(case.ranks, case.file, case.flags)
        passed = found["check"]["passed"]
        line += f" {worst_gap(found):9.1e} {'passed' if passed else 'FAILED'}"
        return line + peaks(found, case), passed
    except Failed as failure:
        return f"{line} FAILED: {failure}", False


def peaks(found, case):
    """The ledger's peak beside the allocator's; of one rank in fp32, beside the dry run's too."""
    ledger = found["ranks"][0]["memory"]["peak"]
    allocator = found["allocator_peak"]
    text = f"  peak {ledger / 1e6:8.3f} MB, allocator {allocator / 1e6:8.3f}"
    if case.label != "nccl fp32":
        return text
    planned = measure(1, case.file, f"{case.flags} --dry-run 1")
    difference = planned["ranks"][0]["memory"]["peak"] - ledger
    return f"{text}, dry run {difference:+d} bytes"


# ---- how much of the card is used ----------------------------------------------


def utilization(model, batch, flag, peak):
    """-> a line: ms, tokens per second and MFU of GPT-2 in bf16 on one card; has it run?"""
    flags = f"--model {model} --batch {batch} --amp bf16 {flag}"
    line = f"{'MFU':14} {model:18} {flags:42}"
    try:
        found = measure(1, "amp_accum_ckpt", f"{flags} --no-check --steps 12")
    except Failed as failure:
        return f"{line} FAILED: {failure}", False
    layers, width, seq = (found["args"][k] for k in ("layers", "width", "seq"))
    flops = 6 * found["parameters"]["total"] + 12 * layers * width * seq  # a token's
    speed = found["tokens_per_second"]
    share = speed * flops / (1e12 * peak)
    return f"{line} {found['ms_per_step']:9.1f} ms {speed:11,.0f} tok/s {share:7.1%}", True


def main():
    if not torch.cuda.is_available():
        print("gpu.py: error: torch finds no GPU here", file=sys.stderr)
        return 2
    card = torch.cuda.get_device_name()
    print(f"{card}, torch {torch.__version__}")
    jobs = [partial(run, case) for case in cases()]
    peak = next((PEAK_TFLOPS[name] for name in PEAK_TFLOPS if name in card + " "), None)
    if peak is None:
        print(f"no data sheet of {card} is known here: MFU is left out")
    else:
        jobs += [partial(utilization, model, batch, flag, peak)
                 for model, batch in (("gpt2", 32), ("gpt2-medium", 16))
                 for flag in ("", "--compile")]
    good = True
    for job in jobs:
        line, passed = job()
        print(line, flush=True)
        good = good and passed
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
