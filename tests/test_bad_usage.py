"""Bad command lines: exit code 2 on every rank, and one line on stderr that names the flag."""
import argparse
import contextlib
import importlib
import io
import os
import re
import shlex
import subprocess
import sys
import time

import pytest

from conftest import ROOT, check_refused, is_clear, program, run, script

# Flags and, after two spaces or more, what the line has to say. FILE is a file, FOLDER an empty
# folder, EMPTY an empty file
EVERY_FILE = """
    --nonsense                          unrecognized arguments: --nonsense
    --nonsense 3                        unrecognized arguments: --nonsense 3
    stray                               unrecognized arguments: stray
    --step 3                            unrecognized arguments: --step 3
    --no-checks                         unrecognized arguments: --no-checks
    --check=yes                         --check/--no-check: ignored explicit argument 'yes'
    --steps                             --steps: expected one argument
    --steps x                           --steps: invalid int value: 'x'
    --steps 1.5                         --steps: invalid int value: '1.5'
    --steps 0                           --steps 0: must be 1 or more
    --steps -1                          --steps -1: must be 1 or more
    --layers 0                          --layers 0: must be 1 or more
    --width 0                           --width 0: must be 1 or more
    --heads 0                           --heads 0: must be 1 or more
    --seq 0                             --seq 0: must be 1 or more
    --batch 0                           --batch 0: must be 1 or more
    --batch -8                          --batch -8: must be 1 or more
    --vocab 255                         --vocab 255: must be 256 or more
    --heads 3                           --heads 3 does not divide --width 128
    --width 30                          --heads 4 does not divide --width 30
    --model gpt2 --heads 5              --heads 5 does not divide --width 768
    --model gpt9                        --model: invalid choice: 'gpt9' (choose from
    --dtype fp8                         --dtype: invalid choice: 'fp8' (choose from
    --impl ours                         --impl: invalid choice: 'ours' (choose from
    --device tpu                        --device: invalid choice: 'tpu' (choose from
    --lr 0                              --lr 0.0: must be 1e-12 or more
    --lr -1                             --lr -1.0: must be 1e-12 or more
    --lr inf                            --lr inf: must be
    --lr nan                            --lr nan: must be
    --lr fast                           --lr: invalid float value: 'fast'
    --clip -1                           --clip -1.0: must be 0 or more
    --clip nan                          --clip nan: must be
    --clip inf                          --clip inf: must be
    --pad 1                             --pad 1.0: must be 0 or more, 0.99 or less
    --pad -0.1                          --pad -0.1: must be 0 or more, 0.99 or less
    --pad nan                           --pad nan: must be
    --seed -1                           --seed -1: must be 0 or more
    --seed 9999999999999999999999       --seed 9999999999999999999999: must be
    --watch -1                          --watch -1: must be 0 or more
    --watch all                         --watch: invalid int value: 'all'
    --timeout 0                         --timeout 0: must be 1 or more
    --timeout soon                      --timeout: invalid int value: 'soon'
    --timeout 99999999999               --timeout 99999999999: must be 1 or more, 1e+06 or less
    --rank 1                            --rank 1: is for --dry-run, up to 0
    --rank -1                           --rank -1: must be 0 or more
    --dry-run                           --dry-run: expected one argument
    --dry-run 0                         --dry-run 0: must be 1 or more
    --dry-run x                         --dry-run: invalid int value: 'x'
    --dry-run 4 --rank 4                --rank 4: is for --dry-run, up to 3
    --data                              --data: expected one argument
    --data no/such/text                 --data no/such/text: No such file or directory
    --data EMPTY                        0 bytes of text, but a sequence of 128 needs 129
    --data FOLDER                       0 bytes of text, but a sequence of 128 needs 129
    --seq 100000000                     but a sequence of 100000000 needs 100000001
    --kv-heads 2                        --kv-heads: is for Llama's form
    --model llama-toy --kv-heads 3      --kv-heads 3 does not divide --heads 4
    --model llama-toy --width 20        rotary positions want an even head width
    --json no/such/report.json          --json no/such/report.json: no such folder
    --json FILE/report.json             report.json: no such folder
    --json FOLDER                       is a folder, give a file
    --profile FILE                      is a file, give a folder
    --log-file FOLDER                   is a folder, give a file
    --log-file no/such/log              --log-file no/such/log: no such folder
    --warmup -1                         --warmup -1: must be 0 or more
    --warmup 20                         --warmup 20: leave a step of --steps 20
    --decay fast                        --decay: invalid choice: 'fast' (choose from
    --min-lr 1                          --min-lr 1.0 is above --lr 0.001
    --eval-every -1                     --eval-every -1: must be 0 or more
    --train (                           --train (: no regular expression
    --device cuda                       --device cuda: torch finds no GPU
"""

SAVES = """
    --save-every 2                      --save-every wants --save DIR
    --save-every -1 --save no/such      --save-every -1: must be 0 or more
    --save no/such --dry-run 2          no dry run
    --save no/such --impl both          --impl
    --save FILE                         --save FILE
    --save FILE/saved                   --save FILE/saved
    --resume no/such                    --resume no/such:
    --resume FOLDER                     no whole checkpoint
    --resume FILE                       --resume FILE:
    --resume no/such --dry-run 2        no dry run
    --init-from no/such                 --init-from no/such:
    --init-from FILE                    --init-from FILE:
    --init-from FOLDER --resume FOLDER  take one of them
"""

TWO_RANKS = """
    --dry-run 4                         --dry-run is one rank alone: use python, not torchrun with 2
    --heads 3                           --heads 3 does not divide --width 128
    --nonsense                          unrecognized arguments: --nonsense
    --data no/such/text                 --data no/such/text: No such file or directory
"""
FILES = (
    "ddp zero fsdp tensor_parallel pipeline_parallel context_parallel moe amp_accum_ckpt hybrid_3d"
).split()


# ---- the tests -----------------------------------------------------------------


def lines_of(table, folder):
    """-> [(flags, what the line has to say)]"""
    (folder / "nothing").mkdir(exist_ok=True)
    (folder / "empty").touch()
    places = {
        "FILE": str(ROOT / "README.md"),
        "FOLDER": str(folder / "nothing"),
        "EMPTY": str(folder / "empty"),
    }

    def put(text):
        return re.sub("FILE|FOLDER|EMPTY", lambda word: places[word[0]], text)

    found = []
    for line in table.splitlines():
        if line.strip():
            flags, words = re.split(" {2,}", line.strip())
            found.append(([put(flag) for flag in flags.split()], put(words)))
    return found


def test_one_rank(tmp_path):
    """One parser reads the flags of all files: one of them will do."""
    run(check_refused, 1, "ddp", lines_of(EVERY_FILE + SAVES, tmp_path))


def test_two_ranks(tmp_path):
    run(check_refused, 2, "ddp", lines_of(TWO_RANKS, tmp_path))


def typed(*words, **environment):
    """What a user types, and what comes of it."""
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONWARNINGS": "ignore", **environment},
    )


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
LINE = ("fsdp.py", "--resume", "no/such")
WANT = "fsdp.py: error: --resume no/such: "


def test_as_typed_with_torchrun():
    """One line beside torchrun's own report, although it ends all ranks when one has exited."""
    done = typed(*TORCHRUN, *LINE)
    ours = [line for line in done.stderr.splitlines() if ".py: error: " in line]
    assert (done.returncode, done.stdout) == (1, "")
    assert len(ours) == 1 and ours[0].startswith(WANT), done.stderr
    assert done.stderr.count("exitcode  : 2") == 2, done.stderr


def test_as_typed_with_run_sh():
    """Our one line, exit code 2, and nothing of torchrun's."""
    done = subprocess.run(
        ["./run.sh", "fsdp", "2", *LINE[1:]], cwd=ROOT, capture_output=True, text=True,
        timeout=120, env={**os.environ, "PYTHON": sys.executable},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(WANT) and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("environment, flags, words", [
    ({"RANK": "1"}, [],
     "RANK=1 in the environment, of WORLD_SIZE=1: unset it, or start with torchrun"),
    ({"WORLD_SIZE": "abc"}, [], "WORLD_SIZE=abc in the environment is no number"),
    ({"WORLD_SIZE": "2"}, [], "WORLD_SIZE=2 in the environment, but no MASTER_ADDR"),
    ({"WORLD_SIZE": "2", "MASTER_ADDR": "a"}, [], "but no MASTER_PORT: unset it"),
    ({"LOCAL_RANK": "-1"}, [], "LOCAL_RANK=-1 in the environment is no number"),
    ({"LOCAL_RANK": "1"}, ["--nonsense"], "unrecognized arguments: --nonsense"),
    ({"LOCAL_RANK": "1", "WORLD_SIZE": "1"}, ["--steps", "0"], "--steps 0: must be 1 or more"),
])
def test_stale_environments_are_refused_at_once(environment, flags, words, monkeypatch, capsys):
    """In words, though LOCAL_RANK may be another rank's; they used to hang until a timeout."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["ddp.py", *flags])
    with pytest.raises(SystemExit) as end:
        importlib.import_module("ddp").main()
    assert end.value.code == 2
    assert is_clear("ddp", capsys.readouterr().err, words)


def test_the_first_rank_that_sees_a_fault_speaks():
    """Rank 1 has no text: its line is said, it leaves, and torchrun would end the other."""
    with pytest.raises(AssertionError) as ended:
        script("ddp", 2, "--data", "README.md", plant=forget_the_text)
    assert "exit codes [-9, 2]\nddp.py: error: --data README.md: gone" in str(ended.value)


def forget_the_text(module):
    """On rank 1 alone, as if the file were not there; rank 0 would wait for it."""
    from harness import usage

    def gone(path, seq):
        usage.PATIENCE = 0  # rank 0 will not come
        usage.require(os.environ["RANK"] != "1", "--data README.md: gone")
        time.sleep(60)

    sys.modules["harness.run"].load_corpus = gone


def torchruns_parser():
    from torch.distributed.run import get_args_parser

    return get_args_parser()


def flags_of(name):
    """Every flag that name.py has, as its own parser lists them."""
    found = []
    add = argparse.ArgumentParser.add_argument

    def note(parser, *words, **options):
        found.extend(word for word in words if word.startswith("--"))
        return add(parser, *words, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "add_argument", note)
        patch.setattr(sys, "argv", [f"{name}.py", "--help"])
        with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()):
            importlib.import_module(name).main()
    return found


def test_torchrun_takes_every_flag():
    """Its parser looks at the script's flags too: that is why there is no --log."""
    parser = torchruns_parser()
    for name in FILES:
        for flag in flags_of(name):
            if flag != "--help":
                args = parser.parse_args(["--standalone", f"{name}.py", flag, "1"])
                assert args.training_script_args == [flag, "1"], flag


# ---- the terminal --------------------------------------------------------------

QUICK = ("ddp.py", "--steps", "2", "--layers", "1", "--width", "32", "--seq", "8")


def test_a_closed_stdout_ends_nothing(tmp_path):
    """`| head -1`: the run goes on, and its report is written."""
    path = tmp_path / "report.json"
    words = " ".join(shlex.quote(word) for word in (sys.executable, *QUICK, "--json", str(path)))
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {words} | head -1"], cwd=ROOT, text=True,
        capture_output=True, env=environment,
    )
    assert done.returncode == 0 and path.exists()
    assert done.stderr == "stdout is closed: the run goes on without it\n", done.stderr


def test_a_run_without_a_stdout(tmp_path):
    """`>&-`: Python has no sys.stdout then."""
    path = tmp_path / "report.json"
    words = shlex.join([sys.executable, *QUICK, "--json", str(path)])
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(["bash", "-c", f"{words} >&-"], cwd=ROOT, text=True, capture_output=True,
                          env=environment)
    assert done.returncode == 0 and path.exists()
    assert done.stderr == "stdout is closed: the run goes on without it\n", done.stderr


def test_a_report_that_cannot_be_written():
    code, _, said = program(*QUICK, "--no-check", "--json", "/dev/full")
    assert code == 1
    assert said == "ddp.py: error: --json /dev/full: No space left on device\n"


def test_a_pipe_is_no_text(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    said = script("ddp", 1, "--data", str(tmp_path / "pipe"), code=2)
    assert "no file or folder" in said
