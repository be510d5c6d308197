"""The table of run.sh, the launcher, gpu.py as far as it goes without one."""
import sys
from types import SimpleNamespace

import pytest

from tools import bench, gpu, launch


def report(ms, ranks=2, exit_code=0, **more):
    memory = {"parameters": 1e6, "gradients": 1e6, "optimizer": 2e6, "peak": 5000000}
    sent = {"all_reduce": {"wire": 3e6}}
    return dict(
        world_size=ranks, ms_per_step=ms, tokens_per_second=1e6 / ms, check=None,
        exit_code=exit_code, ranks=[{"memory": memory, "collectives": sent}],
        textbook=[{"what": "wire all_reduce", "expected": 3e6}], **more,
    )


CHECK = dict(loss=1e-9, gradient=2e-5, grad_norm=0, parameter=0, passed=False)


def test_the_table(capsys):
    reports = {
        "one_process": report(100.0, 1),
        "ddp": report(60.0, speedup=1.25),
        "zero": {**report(70.0, exit_code=1), "check": CHECK},
        "fsdp": None,
    }
    assert not bench.table("title", reports, timed=True)
    lines = capsys.readouterr().out.splitlines()
    assert "1.25x" in lines[4] and "83%" in lines[4] and lines[4].endswith("ran")
    assert "2.0e-05" in lines[5] and lines[5].endswith("FAILED")
    assert lines[6].split() == ["fsdp", "FAILED"]
    assert bench.table("title", {"ddp": report(60.0)}, timed=False)
    assert not bench.table("title", {"ddp": report(60.0, exit_code=1)}, timed=False)


def test_scale(monkeypatch, capsys):
    """The batch stays, also where there are more ranks than 8, the usual one."""
    times = {1: 100.0, 16: 40.0}

    def measure(ranks, script, flags):
        assert flags[:2] == ["--batch", 16]
        return report(times[ranks], ranks)

    monkeypatch.setattr(bench, "rank_counts", lambda: [1, 16])
    monkeypatch.setattr(bench, "report", measure)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert bench.main(["scale", "ddp"]) == 0
    last = capsys.readouterr().out.splitlines()[-1].split()
    assert last == "16 40.0 25,000 2.50 16%".split()


def test_exit_codes_of_the_launcher(capsys):
    words = {2: "", 1: "ended with exit code 1", -9: "was ended by SIGKILL", 130: ""}
    for exitcode, says in words.items():
        failure = SimpleNamespace(exitcode=exitcode)
        assert launch.explain("ddp.py", 3, failure) == max(1, exitcode)
        said = capsys.readouterr().err
        assert says in said and bool(said) == bool(says)


@pytest.mark.parametrize("tool, words", [
    (launch, "2"),
    (launch, "x ddp.py"),
    (launch, "0 ddp.py"),
    (launch, "20000000 ddp.py"),
    (bench, "all"),
    (bench, "scale nope"),
])
def test_bad_words_end_in_a_line(tool, words, capsys):
    with pytest.raises(SystemExit) as end:
        sys.exit(tool.main(words.split()))
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_gpu_runs_every_file_and_says_where_there_is_none(capsys):
    for label in ("nccl Llama", "nccl fp64", "nccl fp32", "nccl bf16", "gloo x2 fp64"):
        files = {case.file for case in gpu.cases() if case.label == label}
        missing = {*bench.FILES, "hybrid_3d"} - files
        assert missing <= {"amp_accum_ckpt", "pipeline_parallel"}, label
    assert gpu.main() == 2
    assert "no GPU" in capsys.readouterr().err
