"""The table of run.sh, the launcher, gpu.py as far as it goes without one, and soak's words."""
from types import SimpleNamespace

import pytest

from conftest import ALL
from tools import bench, gpu, launch, soak


def report(ms, ranks=2, exit_code=0, **more):
    memory = {"parameters": 1e6, "gradients": 1e6, "optimizer": 2e6, "peak": 5000000}
    collectives = {"all_reduce": {"wire": 3e6}}
    return dict(
        world_size=ranks, ms_per_step=ms, tokens_per_second=1e6 / ms, check=None,
        exit_code=exit_code,
        ranks=[{"memory": memory, "collectives": collectives}],
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
    del reports["fsdp"]
    reports["zero"] = {**report(70.0), "check": {**CHECK, "passed": True}}
    assert bench.table("title", reports, timed=False)
    reports["ddp"] = report(60.0, exit_code=1)  # it has written its report, and then failed
    assert not bench.table("title", reports, timed=False)


def failing(code):
    def run(*args, **options):
        raise launch.Failed("no", code)
    return run


def test_a_run_that_fails_is_a_row_and_a_flag_that_is_refused_is_the_end(monkeypatch):
    rows = [bench.Row("ddp", "ddp", 2), bench.Row("zero", "zero", 2)]
    monkeypatch.setattr(bench, "report", failing(1))
    assert bench.run_all(rows, []) == {"ddp": None, "zero": None}
    monkeypatch.setattr(bench, "report", failing(2))
    with pytest.raises(bench.Refused):
        bench.run_all(rows, ["--bogus"])


@pytest.mark.parametrize("flags, batches", [
    ([], [16, 16, 16]), (["--batch-per-rank", "2"], [2, 4, 32])])
def test_scale(flags, batches, monkeypatch, capsys):
    """The batch stays, also where there are more ranks than 8, the usual one."""
    seen = []
    times = {1: 100.0, 2: 60.0, 16: 40.0}

    def measure(ranks, script, flags):
        places = [i for i, word in enumerate(flags) if word == "--batch"]
        seen.append(int(flags[places[-1] + 1]))  # of two flags the later one counts
        return report(times[ranks], ranks)

    monkeypatch.setattr(bench, "rank_counts", lambda: [1, 2, 16])
    monkeypatch.setattr(bench, "report", measure)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert bench.main(["scale", "ddp", *flags]) == 0
    assert seen == batches
    last = capsys.readouterr().out.splitlines()[-1].split()
    assert last == ["16", "40.0", "25,000", "2.50", "16%"]


def test_reports():
    """Of what gloo moves on three ranks, with ALL=1; and none of a flag that is refused."""
    if ALL:
        rates = launch.report(3, "tools/bench.py", ["gloo"])["GB/s"]
        assert set(rates) == {"all_reduce", "all_gather", "all_to_all"}
        assert min(rates.values()) > 0
    with pytest.raises(launch.Failed, match="ddp.py: error: .*--bogus") as failure:
        launch.report(1, "ddp.py", ["--bogus"])
    assert failure.value.code == 2


@pytest.mark.parametrize("exitcode, code, words", [
    (2, 2, ""),
    (1, 1, "rank 3 of ddp.py ended with exit code 1"),
    (-9, 1, "rank 3 of ddp.py was ended by SIGKILL"),
    (130, 130, ""),
])
def test_exit_codes_of_the_launcher(exitcode, code, words, capsys):
    assert launch.explain("ddp.py", 3, SimpleNamespace(exitcode=exitcode)) == code
    said = capsys.readouterr().err
    assert words in said and bool(said) == bool(words)


@pytest.mark.parametrize("words", ["", "2", "x ddp.py", "0 ddp.py", "20000000 ddp.py"])
def test_bad_launches_end_in_a_line(words, capsys):
    assert launch.main(words.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("run.sh: error: ") and said.count("\n") == 1


@pytest.mark.parametrize("tool, words", [
    (bench, "all"), (bench, "scale"), (bench, "scale nope"),
    (soak, "x"), (soak, "-1"), (soak, "3 0 nope"), (soak, "3 0 ddp two"),
])
def test_bad_words_end_in_a_line(tool, words, capsys):
    with pytest.raises(SystemExit) as end:
        tool.main(words.split())
    assert end.value.code == 2
    said = capsys.readouterr()
    assert "usage: " in said.err or "nope" in said.err
    assert said.err.count("\n") == 1 and not said.out


# ---- tools/gpu.py --------------------------------------------------------------


def test_every_file_is_run_on_a_gpu():
    for label in ("nccl Llama", "nccl fp64", "nccl fp32", "nccl bf16", "gloo x2 fp64"):
        files = {case.file for case in gpu.cases() if case.label == label}
        missing = {*bench.FILES, "hybrid_3d"} - files
        assert missing <= {"amp_accum_ckpt", "pipeline_parallel"}, label


def test_a_dry_run_that_fails_on_a_gpu_is_a_failure(monkeypatch):
    ran = {**report(7.0, 1), "allocator_peak": 9e6, "check": {**CHECK, "passed": True}}
    monkeypatch.setattr(gpu, "report", lambda ranks, script, flags, limit: ran)
    case = gpu.Case("nccl fp32", "ddp", 1, gpu.STEPS)
    assert gpu.run(case)[1]

    def no_dry_run(ranks, script, flags, limit):
        if "--dry-run" in flags:
            raise launch.Failed("exit code 1: no", 1)
        return ran

    monkeypatch.setattr(gpu, "report", no_dry_run)
    line, passed = gpu.run(case)
    assert line.endswith("FAILED: exit code 1: no") and not passed


def test_no_gpu_is_said(capsys):
    assert gpu.main() == 2
    assert "no GPU" in capsys.readouterr().err
