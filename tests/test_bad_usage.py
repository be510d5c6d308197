"""Bad command lines: exit code 2 on every rank, and one line on stderr that names the flag."""
import os
import re

import pytest

from conftest import SMALL, check_refused, is_clear, run_ranks, run_script, run_tool
from test_repo import TECHNIQUES
from test_tools import run_sh

# Flags and, after two spaces or more, what the line has to say. FILE is a file, FOLDER an empty
# folder, EMPTY an empty file
EVERY_FILE = """
    --nonsense 3                        unrecognized arguments: --nonsense 3
    --steps 0                           --steps 0: must be 1 or more
    --width 30                          --heads 4 does not divide --width 30
    --model gpt9                        --model: invalid choice: 'gpt9' (choose from
    --pad 1                             --pad 1.0: must be 0 or more, 0.99 or less
    --dry-run 4 --rank 4                --rank 4: is for --dry-run W, 0 to W - 1
    --data no/such/text                 --data no/such/text: No such file or directory
    --data EMPTY                        0 bytes of text, but a sequence of 128 needs 129
    --model llama-toy --kv-heads 3      --kv-heads 3 does not divide --heads 4
    --json no/such/report.json          --json no/such/report.json: no such folder
    --log-file FOLDER                   is a folder, give a file
    --warmup 20                         --warmup 20: leave a step of --steps 20
    --train (                           --train (: no regular expression
    --device cuda                       --device cuda: torch finds no GPU
    --seed 99999999999999999999         --seed 99999999999999999999: must be 0 or more,
    --save-every 2                      --save-every and --save-async want --save DIR
    --save no/such --dry-run 2          no dry run
    --save FILE/saved                   --save FILE/saved
    --resume no/such                    --resume no/such:
    --resume FOLDER                     no whole checkpoint
    --init-from FOLDER --resume FOLDER  take one of them
"""
TWO_RANKS = """
    --dry-run 4                         --dry-run is one rank alone: use python, not torchrun with 2
    --data no/such/text                 --data no/such/text: No such file or directory
"""


def lines_of(table, folder):
    """-> [(flags, what the line has to say)]"""
    (folder / "nothing").mkdir(exist_ok=True)
    (folder / "empty").touch()
    (folder / "file").write_text("no checkpoint")
    places = {"FILE": folder / "file", "FOLDER": folder / "nothing", "EMPTY": folder / "empty"}
    for name, place in places.items():
        table = table.replace(name, str(place))
    rows = re.findall(r"^ +(\S.*?) {2,}(.*)", table, re.M)
    return [(flags.split(), words) for flags, words in rows]


def test_one_rank_and_two(tmp_path):
    """One parser reads the flags of all files: one of them will do."""
    run_ranks(check_refused, 1, "ddp", lines_of(EVERY_FILE, tmp_path))
    run_ranks(check_refused, 2, "ddp", lines_of(TWO_RANKS, tmp_path))


def test_as_typed_with_run_sh():
    """Our one line, exit code 2, and nothing of torchrun's."""
    done = run_sh("fsdp", "2", "--resume", "no/such")
    assert (done.returncode, done.stdout) == (2, "")
    assert is_clear("fsdp", done.stderr, "--resume no/such: "), done.stderr


@pytest.mark.parametrize("environment, flags, words", [
    ({"RANK": "1"}, [], "RANK=1 in the environment, of WORLD_SIZE=1: unset it, or start with"),
    ({"WORLD_SIZE": "abc"}, [], "WORLD_SIZE=abc in the environment is no number"),
    ({"WORLD_SIZE": "2"}, [], "WORLD_SIZE=2 in the environment, but no MASTER_ADDR"),
    ({"MASTER_PORT": "99999"}, [], "MASTER_PORT=99999 in the environment is no number from"),
    ({"LOCAL_RANK": "1"}, ["--nonsense"], "unrecognized arguments: --nonsense"),
])
def test_stale_environments_are_refused_at_once(environment, flags, words, monkeypatch):
    """In words, though LOCAL_RANK may be another rank's; they used to hang until a timeout."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert words in run_tool("ddp", *flags, code=2)


def flags_of(name):
    """Every flag that name.py has, as --help lists them."""
    return re.findall(r"^  (--[\w-]+)", run_tool(name, "--help"), re.M)


def test_torchrun_takes_every_flag():
    """Its parser looks at the script's flags too: that is why there is no --log."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    for name in TECHNIQUES:
        for flag in flags_of(name):
            if flag != "--help":
                args = parser.parse_args(["--standalone", f"{name}.py", flag, "1"])
                assert args.training_script_args == [flag, "1"], flag


def nobody_reads(module):
    """`| head -1`, when head has ended"""
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)


def test_a_closed_pipe_ends_nothing():
    assert len(run_script("ddp", 2, *SMALL, plant=nobody_reads)["loss"]) == 2


def test_files_that_cannot_be_written():
    """They end no run, and it ends with 1."""
    flags = (*SMALL, "--no-check", "--json", "/dev/full", "--log-file", "/dev/full")
    assert run_script("ddp", 1, *flags, code=1) == (
        "ddp.py: error: --log-file /dev/full: No space left on device: the run goes on without it\n"
        "ddp.py: error: --json /dev/full: No space left on device\n")
