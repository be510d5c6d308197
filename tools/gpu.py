"""What needs a GPU: every file on one card, in under ten minutes, as one table.

    ./run.sh gpu            python tools/gpu.py

    nccl    a world of one rank, in fp64, fp32 and bf16, with the check on
    gloo    2 and 4 ranks that share the card, in fp64, with the check on
    peak    the ledger's peak beside the allocator's, and beside the dry run's

Every file runs with its VARIANTS and with MORE, in GPT-2's form, and in fp64 on one rank in Llama's
too; hybrid_3d with dp and tp alone. Pipelines want a card for each rank: gloo sends CPU tensors
alone. Exit code 1 if any run failed, dry ones included; 2 where there is no GPU.
"""
import sys
from collections import namedtuple
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch  # noqa: E402

from harness.flags import parse, require  # noqa: E402
from tools.ranks import TECHNIQUES, Failed, measured, variants, worst_gap  # noqa: E402

Case = namedtuple("Case", "label file ranks flags")

# beside a file's VARIANTS: copies to and from the CPU, streams, scaled losses
MORE = {
    "zero": ("--stage 1 --offload optimizer", "--stage 3 --offload param", "--stage 2 --accum 2"),
    "fsdp": ("--offload",),
    "moe": ("--balance bias --capacity 1.25 --shared",),
}
MIXED = ("--amp bf16", "--amp fp16 --ckpt full", "--amp bf16 --ckpt selective --accum 2")
HYBRID = {1: "--dp 1 --tp 1 --pp 1", 2: "--dp 1 --tp 2 --pp 1", 4: "--dp 2 --tp 2 --pp 1"}


def each(label, ranks, dtype, without="", flags=""):
    """-> a Case of each variant but those of one file"""
    found = []
    for file in TECHNIQUES:
        worth = (*variants(file), *MORE.get(file, ()))
        if file == "hybrid_3d":
            worth = (HYBRID[ranks],)
        if file != without:
            found += [Case(label, file, ranks, f"{own} --dtype {dtype} {flags}") for own in worth]
    return found


def cases():
    found = each("nccl Llama", 1, "fp64", flags="--model llama-toy")
    found += each("nccl fp64", 1, "fp64")
    found += each("nccl fp32", 1, "fp32")
    found += each("nccl bf16", 1, "bf16", without="amp_accum_ckpt")  # it has --amp bf16
    found += [Case("nccl amp", "amp_accum_ckpt", 1, flags) for flags in MIXED]
    for ranks in (2, 4):  # of a pipeline gloo sends CPU tensors alone
        found += each(f"gloo x{ranks} fp64", ranks, "fp64", without="pipeline_parallel")
    return found


def measure(case, more=""):
    """-> the report of a case on the card"""
    words = f"--device cuda --steps 3 {case.flags} {more}"
    return measured(case.ranks, case.file, words.split())


def words_of(case, found):
    """-> what is said of a run: gap and peaks, in fp32 with the dry run's."""
    ledger = found["ranks"][0]["memory"]["peak"]
    words = (f"{worst_gap(found['check']):9.1e}  peak {ledger / 1e6:8.3f} MB, "
             f"allocator {found['allocator_peak'] / 1e6:8.3f}")
    if case.label == "nccl fp32":
        planned = measure(case, "--dry-run 1")["ranks"][0]["memory"]["peak"]
        words += f", dry run {planned - ledger:+d} bytes"
    return words


def main():
    parse(__doc__, {})
    require(torch.cuda.is_available(), "torch finds no GPU here")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    good = True
    for case in cases():
        verdict = "passed"
        try:
            found = measure(case)
            words = words_of(case, found)
            if found["exit_code"]:
                verdict = "FAILED"
        except Failed as failure:
            words = failure
            verdict = "FAILED"
        good = good and verdict == "passed"
        print(f"{case.label:14} {case.file:18} {case.flags.strip():72} {verdict} {words}",
              flush=True)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
