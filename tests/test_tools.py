"""The table of run.sh, the profiler's summary, and the launcher, without long runs."""
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.profiler import exposed_time, union
from tools import everything, gpu, launch, scale, soak


def event(name, start, length, kind="cpu_op"):
    return {"ph": "X", "name": name, "cat": kind, "ts": start, "dur": length}


def test_union():
    assert union([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]


def test_what_nothing_hides():
    """Of 10 units 4 are of transport, 1 of which a multiplication hides."""
    events = [
        event("aten::mm", 0, 5),
        event("gloo:all_reduce", 4, 4, "user_annotation"),
        event("aten::add", 8, 2),
        {"ph": "M", "name": "process_name"},
    ]
    assert exposed_time(events) == (10, 3)


def test_gpu_kernels_are_what_counts():
    events = [
        event("aten::mm", 0, 100),
        event("gemm", 10, 5, "kernel"),
        event("ncclDevKernel_AllReduce", 12, 6, "kernel"),
    ]
    assert exposed_time(events) == (8, 3)


def report(ms, ranks=2, exit_code=0, **more):
    memory = {"parameters": 1e6, "gradients": 1e6, "optimizer": 2e6, "peak": 5e6}
    collectives = {"all_reduce": {"wire": 3e6}}
    return dict(
        world_size=ranks, ms_per_step=ms, tokens_per_second=1e6 / ms, check=None,
        exit_code=exit_code,
        ranks=[{"memory": memory, "collectives": collectives}],
        textbook=[{"what": "wire all_reduce", "expected": 3e6}], **more,
    )


def test_the_table(capsys):
    check = dict(loss=1e-9, gradient=2e-5, grad_norm=0, parameter=0, passed=False)
    reports = {
        "one_process": report(100.0, 1),
        "ddp": report(60.0, speedup=1.25),
        "zero": {**report(70.0, exit_code=1), "check": check},
        "fsdp": None,
    }
    assert not everything.table("title", reports, timed=True)
    lines = capsys.readouterr().out.splitlines()
    assert "1.25x" in lines[4] and "83%" in lines[4] and lines[4].endswith("ran")
    assert "2.0e-05" in lines[5] and lines[5].endswith("FAILED")
    assert lines[6].split() == ["fsdp", "FAILED"]
    del reports["fsdp"]
    reports["zero"] = {**report(70.0), "check": {**check, "passed": True}}
    assert everything.table("title", reports, timed=False)
    reports["ddp"] = report(60.0, exit_code=1)  # it has written its report, and then failed
    assert not everything.table("title", reports, timed=False)


def runs(monkeypatch, code, text):
    """-> the environments of subprocess.run's calls, which end so and leave this report"""
    seen = []

    def fake(command, env=None, **options):
        seen.append(env or dict(os.environ))
        Path(command[command.index("--json") + 1]).write_text(text)
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr("subprocess.run", fake)
    return seen


def test_the_report_of_a_failed_check_is_shown(monkeypatch):
    runs(monkeypatch, 1, '{"check": {"passed": false}}')
    found = everything.run_all([everything.Row("ddp", "ddp", 2)], [])
    assert found == {"ddp": {"check": {"passed": False}, "exit_code": 1}}


def test_threads_are_as_many_as_the_user_says(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    seen = runs(monkeypatch, 0, "{}")
    everything.run_all(everything.check_rows(), [])
    assert {one["OMP_NUM_THREADS"] for one in seen} == {"3"}


@pytest.mark.parametrize("flags, half", [
    ([], "4"), (["--batch", "16"], "8"), (["--batch=6"], "3"), (["--batch", "1"], "1")])
def test_processes_apart_have_half_of_the_batch(flags, half, monkeypatch):
    started = []

    def other(command, **options):
        started.append(command)
        return SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr("subprocess.Popen", other)
    runs(monkeypatch, 0, '{"ms_per_step": 7}')
    assert everything.apart([*everything.BENCH_SIZES.split(), *flags]) == 7
    [command] = started
    assert command[-2:] == ["--batch", half]


def test_a_bench_that_cannot_run_ends_with_code_1(monkeypatch, capsys):
    """What is wrong is said by the script."""
    monkeypatch.setattr(everything, "BENCH", [everything.Row("ddp", "ddp", 2)])
    monkeypatch.setattr("subprocess.Popen", lambda command, **options: SimpleNamespace(
        wait=lambda: 2))
    monkeypatch.setattr("subprocess.run", lambda command, **options: SimpleNamespace(returncode=2))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert everything.main(["bench", "--lr", "nope"]) == 1
    assert "apart" not in capsys.readouterr().out


def test_processes_apart_have_at_least_one_sequence(monkeypatch, capsys):
    monkeypatch.setattr(everything, "apart", lambda sizes: 7)
    monkeypatch.setattr("subprocess.run", lambda command, **options: SimpleNamespace(returncode=0))
    assert everything.limits(["--batch", "1"])
    said = "\ntwo processes apart, with a batch of 1 each, take 7.0 ms a step\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("flags, batches", [
    ([], [16, 16, 16, 16, 16]), (["--batch", "32"], [32, 32, 32, 32, 32]),
    (["--batch-per-rank", "2"], [2, 4, 8, 16, 32])])
def test_scale_keeps_the_batch(flags, batches, monkeypatch):
    """Also where there are more ranks than 8, the usual batch."""
    seen = []

    def measure(file, ranks, flags):
        places = [i for i, word in enumerate(flags) if word == "--batch"]
        seen.append(int(flags[places[-1] + 1]))  # of two flags the later one counts
        return report(60.0, ranks)

    monkeypatch.setattr(scale, "rank_counts", lambda: [1, 2, 4, 8, 16])
    monkeypatch.setattr(scale, "measure", measure)
    assert scale.main(["ddp", *flags]) == 0
    assert seen == batches


def test_bandwidth_on_three_ranks():
    launch_it = [sys.executable, "tools/launch.py", "3", "tools/bandwidth.py"]
    done = subprocess.run(launch_it, cwd=everything.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("gloo moves 16.8 MB at, in GB/s, all_reduce ")


def test_bench_rows_name_files_and_baselines():
    labels = [row.label for row in everything.BENCH]
    for row in everything.BENCH:
        assert (everything.ROOT / f"{row.file}.py").exists()
        assert everything.baseline(row.label) in labels


class Failure:
    def __init__(self, exitcode):
        self.exitcode = exitcode


@pytest.mark.parametrize("exitcode, code, words", [
    (2, 2, ""),
    (1, 1, "rank 3 of ddp.py ended with exit code 1"),
    (-9, 1, "rank 3 of ddp.py was ended by SIGKILL"),
    (130, 130, ""),
])
def test_exit_codes_of_the_launcher(exitcode, code, words, capsys):
    assert launch.explain("ddp.py", 3, Failure(exitcode)) == code
    said = capsys.readouterr().err
    assert words in said and bool(said) == bool(words)


def test_bad_launches(capsys):
    for words in ([], ["2"], ["x", "ddp.py"], ["0", "ddp.py"]):
        assert launch.main(words) == 2
        assert "usage" in capsys.readouterr().err


def test_scale_doubles_the_ranks(monkeypatch, capsys):
    monkeypatch.setattr(scale, "rank_counts", lambda: [1, 2, 4])
    times = {1: 100.0, 2: 60.0, 4: 40.0}
    monkeypatch.setattr(scale, "measure", lambda file, ranks, flags: report(times[ranks], ranks))
    assert scale.main(["ddp", "--width", "64"]) == 0
    last = capsys.readouterr().out.splitlines()[-1].split()
    assert last == ["4", "40.0", "25,000", "2.50", "62%"]


def test_scale_takes_no_flag_for_another():
    args, flags = scale.arguments(["ddp", "--batch", "16"])
    assert args.batch_per_rank == 0
    assert flags == ["--batch", "16"]


def test_everything_refuses_other_words(capsys):
    assert everything.main(["all"]) == 2
    assert "usage" in capsys.readouterr().err
    assert sys.modules["tools.everything"] is everything


@pytest.mark.parametrize("words", ["x", "3 x", "3 0 ddp", "3 0 ddp two"])
def test_soak_wants_numbers(words, capsys):
    assert soak.main(words.split()) == 2
    said = capsys.readouterr()
    assert said.err.startswith("soak.py: error: usage: ") and said.err.count("\n") == 1
    assert not said.out


# ---- tools/gpu.py, as far as it goes without one -----------------------------------


def test_every_file_is_run_on_a_gpu():
    for label in ("nccl fp64", "nccl fp32", "nccl bf16", "gloo x2 fp64", "gloo x4 fp64"):
        files = {case.file for case in gpu.cases() if case.label == label}
        missing = set(everything.FILES) | {"hybrid_3d"}
        missing -= files
        assert missing <= {"amp_accum_ckpt"}, label


def test_cards_are_known_by_their_longest_name():
    assert gpu.peak_of("NVIDIA H100 PCIe") == 756
    assert gpu.peak_of("NVIDIA H100 80GB HBM3") == 989
    assert gpu.peak_of("NVIDIA A100-SXM4-80GB") == 312
    assert gpu.peak_of("NVIDIA L4") == 121
    assert gpu.peak_of("NVIDIA L40S") == 362
    assert gpu.peak_of("NVIDIA L40") is None
    assert gpu.peak_of("GeForce 256") is None


class Endless:
    """A process that goes on until it is asked to end, which takes it a while."""

    def __init__(self):
        self.asked = []

    def communicate(self, timeout=None):
        self.asked.append("wait")
        if "terminate" not in self.asked:
            raise subprocess.TimeoutExpired("python", timeout)

    def terminate(self):
        self.asked.append("terminate")


def test_a_gpu_run_without_end_can_end_its_ranks(monkeypatch):
    """It is asked to, and not killed: else its ranks would stay."""
    job = Endless()
    monkeypatch.setattr("subprocess.Popen", lambda words, **options: job)
    assert gpu.report_of(["python"]) == "no end after 300 s"
    assert job.asked == ["wait", "terminate", "wait"]


@pytest.mark.parametrize("planned, passes", [("exit code 1: no", False), (None, True)])
def test_a_dry_run_that_fails_on_a_gpu_is_a_failure(planned, passes, monkeypatch):
    gaps = dict.fromkeys(("loss", "gradient", "grad_norm", "parameter"), 0.0)
    ran = {**report(7.0, 1), "allocator_peak": 9e6}
    ran["check"] = {**gaps, "passed": True}
    ran["ranks"] = [{"memory": {"peak": 5}}]
    monkeypatch.setattr(gpu, "launch", lambda ranks, file, flags: ran)
    monkeypatch.setattr(gpu, "dry", lambda file, flags: planned or ran)
    line, passed = gpu.run(gpu.Case("nccl fp32", "ddp", 1, gpu.STEPS))
    assert passed == passes
    assert ("dry run FAILED: exit code 1: no" in line) == (not passes)


def test_no_gpu_is_said(capsys):
    assert gpu.main() == 2
    assert "no GPU" in capsys.readouterr().err
