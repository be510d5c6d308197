"""The tables of run.sh, the launcher, gpu.py as far as it goes without one."""
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from conftest import ROOT, SMALL, run_tool
from tools import bench, gpu, launch
from tools.ranks import Failed, measured


def report(ms, ranks=2, exit_code=0, check=None, **sides):
    """sides: {impl: how much slower its blocks are}"""
    figures = {}
    for impl, factor in {"scratch": 1.0, **sides}.items():
        blocks = [ms * factor * noise for noise in (0.99, 1.0, 1.02)]
        figures[impl] = dict(calls=5, wire=3e6, held=4e6, peak=5e6, ms_per_step=ms * factor,
                             block_ms=blocks)
    return dict(world_size=ranks, ms_per_step=ms, tokens_per_second=1e6 / ms, check=check,
                exit_code=exit_code, sides=figures,
                ranks=[{"collectives": {"all_reduce": {"wire": 3e6}, "recv": {"wire": 0}}}],
                textbook=[{"what": "wire all_reduce", "expected": 3e6}])


GAPS = dict(loss=1e-9, gradient=2e-5, grad_norm=0, parameter=0, passed=True)


def lines_of(label, columns, found):
    """The lines of bench's table; the exit code is the report's."""
    lines, code = bench.lines_of(label, columns, lambda: found)
    assert code == found["exit_code"]
    return lines


def test_the_table():
    """A line for each side; what the noise does not tell apart is equal."""
    idea, ours, torchs = lines_of("ddp", bench.BENCH, report(60.0, idea=1.2, torch=1.005))
    assert idea.split()[:3] == "ddp 2 idea".split() and "0.84 (" in idea
    assert ours.split() == "2 ours - 5 3.00 5.00 60.0 1.00 (1.00..1.00)".split()
    assert torchs.split()[1] == "torch" and torchs.endswith("ran")
    assert bench.beside_torch([100.0, 100.0], [98.0, 104.0]) == "equal (0.98..1.04)"
    check = {**GAPS, "others": {"torch": {**GAPS, "gradient": 3e-5}}}
    ours, torchs = lines_of("", bench.BENCH, report(60.0, check=check, torch=1.0))
    assert "2.0e-05" in ours and "3.0e-05" in torchs
    line, = lines_of("zero", bench.CHECK, report(60.0, exit_code=1, check=GAPS))
    assert line.split() == "zero 2 2.0e-05 3.00 3.00 4.00 5.00 60.0 16,667 FAILED".split()


def test_bench_takes_the_sides_that_there_are(monkeypatch, capsys):
    """A side that is refused is left out; a run that fails is a line and the exit code."""
    def measure(ranks, file, words):
        if "all" in words:
            raise Failed("exit code 2: it has no idea", 2)
        if "--stage 3" in " ".join(words):
            raise Failed("exit code 1: broken", 1)
        return report(60.0, ranks, torch=1.5)

    monkeypatch.setattr(bench, "measured", measure)
    assert bench.main(["bench", "zero", "--steps", "10"]) == 1
    said = capsys.readouterr().out
    assert "1.50 (" in said and "zero --stage 3" in said and "FAILED: exit code 1" in said


@pytest.mark.parametrize("gpus, on_cpus", [(0, []), (1, [8, 4]), (4, [8]), (8, [])])
def test_the_first_command_on_few_gpus(gpus, on_cpus, monkeypatch, capsys):
    """hybrid_3d, which has more ranks, runs on CPUs."""
    asked = []

    def measure(ranks, file, flags, shown):
        if "--device cpu" in " ".join(flags):
            asked.append(ranks)
        return report(60.0, ranks, check=GAPS)

    monkeypatch.setattr(bench, "measured", measure)
    monkeypatch.setattr(bench.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(bench, "USUAL", gpus or 2)
    assert bench.check() == 0 and asked == on_cpus
    assert "All equal one process" in capsys.readouterr().out


def test_scale(monkeypatch, capsys):
    """The batch stays, also where there are more ranks than 8, the usual one."""
    times = {1: 100.0, 16: 40.0}

    def measure(ranks, file, flags):
        assert flags[:2] == ["--batch", 16]
        return report(times[ranks], ranks)

    monkeypatch.setattr(bench, "rank_counts", lambda: [1, 16])
    monkeypatch.setattr(bench, "measured", measure)
    assert bench.main(["scale", "ddp"]) == 0
    last = capsys.readouterr().out.splitlines()[-1].split()
    assert last == "16 40.0 25,000 2.50 16%".split()


def test_what_a_run_has_measured():
    """Bad usage leaves none, but its line and its exit code."""
    words = [*SMALL, "--dtype", "fp64"]
    assert measured(2, "ddp", words)["exit_code"] == 0
    with pytest.raises(Failed, match="2: ddp.py: error: --resume no/such: ") as failure:
        measured(2, "ddp", [*words, "--resume", "no/such"])
    assert failure.value.code == 2


def test_exit_codes_of_the_launcher(capsys):
    words = {2: "", 1: "ended with exit code 1", -9: "was ended by SIGKILL", 130: ""}
    for exitcode, says in words.items():
        failure = SimpleNamespace(exitcode=exitcode)
        assert launch.explain("ddp", 3, failure) == max(1, exitcode)
        said = capsys.readouterr().err
        assert says in said and bool(said) == bool(says)


@pytest.mark.parametrize("tool, words", [
    (launch, ""),
    (launch, "nope"),
    (launch, "ddp 0"),
    (launch, "ddp 20000000"),
    (bench, "all"),
    (bench, "scale nope"),
    (bench, "bench nope"),
])
def test_bad_words_end_in_a_line(tool, words, capsys):
    with pytest.raises(SystemExit) as end:
        sys.exit(tool.main(words.split()))
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def run_sh(*words, **environment):
    return subprocess.run(["./run.sh", *words], cwd=ROOT, capture_output=True, text=True,
                          timeout=120, env={**os.environ, "PYTHON": sys.executable, **environment})


def test_one_help_for_all_ranks(monkeypatch):
    """A rank for each of N, but for --help, which one of them prints."""
    started = []
    monkeypatch.setattr(launch.torchrun, "run", started.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert launch.main(["ddp", "2", "--steps", "3"]) == 0
    assert launch.main(["ddp.py", "2", "--help"]) == 0
    assert [words.nproc_per_node for words in started] == ["2", "1"]
    assert started[0].training_script_args == ["--steps", "3"]


def test_only_the_tests_need_pytest(tmp_path):
    """A Python without it runs everything else, and a missing one is said in a line."""
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh
case "$*" in *pytest*) exit 1 ;; -c*) exit 0 ;; *) echo "$@" ;; esac
""")
    python.chmod(0o755)
    assert run_sh("scale", PYTHON=str(python)).stdout == "tools/bench.py scale\n"
    assert run_sh("ddp", "2", PYTHON=str(python)).stdout == "tools/launch.py ddp 2\n"
    done = run_sh("test", PYTHON=str(python))
    assert done.returncode == 2 and "lacks one of: numpy, torch, pytest" in done.stderr


def test_gpu_runs_every_file_and_says_where_there_is_none():
    for label in ("nccl Llama", "nccl fp64", "nccl fp32", "nccl bf16", "gloo x2 fp64"):
        files = {case.file for case in gpu.cases() if case.label == label}
        missing = set(launch.TECHNIQUES) - files
        assert missing <= {"amp_accum_ckpt", "pipeline_parallel"}, label
    assert "no GPU" in run_tool("gpu", code=2)
