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
    --data no/such/text                 --data no/such/text: no such file or folder
    --data EMPTY                        0 bytes in 1 files, but --seq 128 needs 129
    --data FOLDER                       0 bytes in 0 files, but --seq 128 needs 129
    --seq 100000000                     --seq 100000000 needs 100000001
    --json no/such/report.json          --json no/such/report.json: no such folder
    --json FILE/report.json             report.json: no such folder
    --json FOLDER                       is a folder, give a file
    --profile FILE                      is a file, give a folder
    --log FOLDER                        is a folder, give a file
    --log no/such/log                   --log no/such/log: no such folder
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

ONE_RANK = {
    "ddp": """
        --bucket-mb -1                                      --bucket-mb -1.0: must be 0 or more
        --bucket-mb x                                       --bucket-mb: invalid float value: 'x'
        --bucket-mb nan                                     --bucket-mb nan: must be
        --dry-run 8 --batch 7                               --batch 7 sequences for 8 ranks
        --dry-run 2 --impl torch                            --dry-run needs --impl scratch
        --dry-run 2 --impl both                             --dry-run needs --impl scratch
        --stage 1                                           unrecognized arguments: --stage 1
    """,
    "zero": """
        --stage 4                                           --stage 4: must be 0 or more, 3 or less
        --stage -1                                          --stage -1: must be 0 or more, 3 or less
        --stage all                                         --stage: invalid int value: 'all'
        --offload disk                                      --offload: invalid choice: 'disk'
        --offload optimizer --stage 0              --offload optimizer with --stage 0: needs stage 1
        --offload param --stage 2                      --offload param with --stage 2: needs stage 3
        --accum 0                                           --accum 0: must be 1 or more
        --accum 9                                    --batch 8: fewer than 1 ranks x 9 micro-batches
        --dry-run 4 --accum 2 --batch 7              --batch 7: fewer than 4 ranks x 2 micro-batches
        --impl torch --stage 0                   --impl torch --stage 0: torch's has stages 1 to 3
        --impl torch --offload optimizer         --impl torch: --offload is for --impl scratch
        --impl both --accum 2                    --impl both: --accum is for --impl scratch
        --impl torch --stage 1 --dry-run 2                  has no dry run and is not saved
        --impl torch --stage 1 --save there                 has no dry run and is not saved
        --hsdp 2                                            unrecognized arguments: --hsdp 2
    """,
    "fsdp": """
        --dry-run 4 --batch 3                               --batch 3 sequences for 4 ranks
        --dry-run 4 --hsdp 3                                --hsdp 3 does not divide 4 ranks
        --hsdp 2                                            --hsdp 2 does not divide 1 ranks
        --hsdp -1                                           --hsdp -1: must be 0 or more
        --reshard=no                          --reshard/--no-reshard: ignored explicit argument 'no'
        --offload param                                     unrecognized arguments: param
        --offload --impl torch                              --offload is for --impl scratch
    """,
    "tensor_parallel": """
        --dry-run 3                                         --heads 4, --width 128: 3 ranks
        --dry-run 8 --heads 3 --width 9                     --heads 3, --width 9: 8 ranks
        --dry-run 2 --heads 1                               --heads 1, --width 128: 2 ranks
        --dry-run 2 --sp --seq 127                          --seq 127 does not divide by 2 ranks
        --sp 2                                              unrecognized arguments: 2
        --tp 2                                              unrecognized arguments: --tp 2
    """,
    "pipeline_parallel": """
        --schedule zb-w                     --schedule: invalid choice: 'zb-w' (choose from 'naive',
        --dry-run 8                                         --layers 4 for 8 stages
        --dry-run 4 --schedule interleaved                  --layers 4 for 8 stages
        --dry-run 2 --schedule interleaved --chunks 3       --layers 4 for 6 stages
        --dry-run 2 --schedule interleaved --micro 3 --batch 9  interleaved needs a multiple of
        --micro 0                                           --micro 0: must be 1 or more
        --micro 3                                           --batch 8 does not divide into --micro 3
        --chunks 0                                          --chunks 0: must be 1 or more
        --impl torch --schedule naive    --schedule naive: torch has gpipe, 1f1b, interleaved, bfs
        --impl both --schedule pipedream    --schedule pipedream: torch has gpipe, 1f1b, interleaved
        --schedule pipedream --save NONE                    pipedream takes no --save and no
        --schedule pipedream --resume NONE                  pipedream takes no --save and no
        --impl torch --dry-run 2                            --dry-run needs --impl scratch
        --pp 4                                              --pp is for --simulate only
        --times 1,1,1,0                                     --times is for --simulate and
        --limit 4                               --limit is for --schedule auto, not for 1f1b
        --dry-run 2 --schedule auto             --dry-run --schedule auto needs --times
        --dry-run 2 --schedule dualpipe-v --micro 2         --micro 2: dualpipe-v
        --dry-run 2 --layers-per-stage 1,1      they are 2, but --layers 4
        --dry-run 2 --layers-per-stage 4        --layers-per-stage 4: 2 numbers are needed
        --dry-run 2 --layers-per-stage two,two  --layers-per-stage two,two: 2 numbers are needed
        --simulate --pp 0                                   --pp 0: must be 1 or more
        --simulate --pp x                                   --pp: invalid int value: 'x'
        --simulate --pp 4 --micro 0                         --micro 0: must be 1 or more
        --simulate --pp 4 --micro 6 --schedule interleaved  interleaved needs a multiple of the 4
        --simulate --schedule dualpipe                      --schedule: invalid choice: 'dualpipe'
        --simulate --times                                  --times: expected one argument
        --simulate --times 1,2,3                            --times 1,2,3: four are needed
        --simulate --times 1,2,3,4,5                        --times 1,2,3,4,5: four are needed
        --simulate --times 1,2,3,x                      --times 1,2,3,x: F,B,W,COMM are four numbers
        --simulate --times=-1,1,1,0                         numbers from 0 to 1e9
        --simulate --times nan,1,1,0                        --times nan,1,1,0:
        --simulate --times 0,0,0,0                          F + B + W 1e-9 or more
        --simulate --times 5e-324,0,0,0                     F + B + W 1e-9 or more
        --simulate --json no/such/report.json             --json no/such/report.json: no such folder
    """,
    "context_parallel": """
        --attn spiral                          --attn: invalid choice: 'spiral' (choose from 'ring',
        --dry-run 2 --attn ring --seq 15       --seq 15 does not divide into 2 chunks, for ring on 2
        --dry-run 2 --attn zigzag --seq 18   --seq 18 does not divide into 4 chunks, for zigzag on 2
        --dry-run 2 --attn allgather --seq 18  --seq 18 does not divide into 4 chunks, for allgather
        --dry-run 3 --attn ulysses --seq 18      --heads 4 does not divide over 3 ranks, for ulysses
        --dry-run 3 --attn ulysses --seq 16                 --seq 16 does not divide into 3 chunks
        --impl torch --dtype fp64                  --impl torch: torch's context_parallel needs GPUs
        --impl torch --device cpu                  --impl torch: torch's context_parallel needs GPUs
        --impl both --dry-run 2                             take --impl scratch
    """,
    "moe": """
        --experts 0                                         --experts 0: must be 1 or more
        --dry-run 2 --experts 5                        --experts 5 for 2 ranks: take a multiple of 2
        --dry-run 4 --ep 2 --experts 5                 --experts 5 for 2 ranks: take a multiple of 2
        --dry-run 4 --ep 3                                  --ep 3 does not divide the 4 ranks
        --ep 2                                              --ep 2 does not divide the 1 ranks
        --ep -2                                             --ep -2: must be 0 or more
        --top-k 0                                           --top-k 0: must be 1 or more
        --top-k 9                                         --top-k 9 of --experts 8: choose 8 at most
        --top_k 2                                           unrecognized arguments: --top_k 2
        --capacity -1                                       --capacity -1.0: must be 0 or more
        --capacity nan                                      --capacity nan: must be
        --balance loss                         --balance: invalid choice: 'loss' (choose from 'aux',
        --shared 2                                          unrecognized arguments: 2
        --dry-run 2 --batch 3                  --batch 3 sequences for 2 ranks: take a multiple of 2
        --impl torch --dtype bf16 --width 36                wants a multiple of 8 in bf16
        --impl torch --width 6 --heads 2                    wants a multiple of 4 in fp32
    """,
    "amp_accum_ckpt": """
        --amp fp8                           --amp: invalid choice: 'fp8' (choose from 'off', 'bf16',
        --amp bf16 --dtype fp64                             --dtype fp64
        --dtype bf16                                --dtype bf16 --amp off: take fp32 with any --amp
        --ckpt all                        --ckpt: invalid choice: 'all' (choose from 'none', 'full',
        --accum 0                                           --accum 0: must be 1 or more
        --accum 9                                          --batch 8: fewer than 1 ranks x --accum 9
        --dry-run 2 --batch 5 --accum 3                    --batch 5: fewer than 2 ranks x --accum 3
        --growth 0                                          --growth 0: must be 1 or more
        --peak -1                                           --peak -1.0: must be 0 or more
        --impl torch --dry-run 2                           --dry-run and --sweep want --impl scratch
        --impl both --sweep                                --dry-run and --sweep want --impl scratch
        --compile --dry-run 2                               --compile
        --sweep --save no/such                              --save wants one plan
    """,
    "hybrid_3d": """
        --dry-run 2 --dp 2 --tp 2      --dp 2 x --tp 2 x --pp 1: their product is not 2
        --dry-run 4 --dp 3      --dp 3 x --tp 1 x --pp 1: their product is not 4
        --dry-run 8 --dp 2 --tp 2 --pp 1      --dp 2 x --tp 2 x --pp 1: their product is not 8
        --dp 0                                              --dp 0: must be 1 or more
        --tp x                                              --tp: invalid int value: 'x'
        --dry-run 8 --tp 8                                  --heads 4 do not divide over --tp 8
        --dry-run 8 --pp 8                                  --layers 4 for 8 stages
        --dry-run 4 --pp 4 --schedule interleaved           --layers 4 for 8 stages
        --dry-run 2 --pp 2 --schedule naive                 --schedule: invalid choice: 'naive'
        --dry-run 2 --pp 2 --schedule interleaved --micro 1  --micro 1: interleaved
        --dry-run 2 --dp 2 --batch 7                        --batch 7 does not divide into --dp 2
        --micro 3                                  --batch 8 does not divide into --dp 1 x --micro 3
        --dry-run 2 --tp 2 --sp --seq 15                    --seq 15 does not divide over --tp 2
        --schedule zb-h1 --ckpt full                  --schedule zb-h1 cannot split what --ckpt full
        --zero 4                                            --zero 4: must be 0 or more, 3 or less
        --dry-run 2 --pp 2 --zero 3                         take --pp 1 --schedule 1f1b, or --zero 2
        --dry-run 2 --dp 4 --pp 1      --dp 4 x --tp 1 x --pp 1: their product is not 2
        --dp 1 --tp 4 --schedule interleaved   --dp 1 x --tp 4 x --pp 1: their product is not 1
        --dry-run 2 --cp 2 --seq 30                         --seq 30 does not divide into 4 chunks
        --dry-run 2 --cp 2 --heads 1 --attn ulysses         which ulysses wants
        --dry-run 8 --cp 2 --tp 4 --sp --seq 36             which --sp wants
        --dry-run 2 --dp 2 --experts 3                      --experts 3 for --ep 2: take a multiple
        --experts 2 --top-k 3                               --top-k 3 of --experts 2: choose 2
        --dry-run 2 --dp 2 --experts 4 --ep 3               --ep 3 does not divide dp x cp = 2
        --ep 2                                              --ep is for --experts E
        --shared                                            --shared is for --experts E
        --limit 2                                           --limit and --times are for
        --layers-per-stage 3                                --layers-per-stage 3
        --ckpt some                                         --ckpt: invalid choice: 'some'
        --impl torch --dry-run 2                            --dry-run, --save, --resume
        --impl torch --ckpt selective                       --ckpt, --amp, --dtype bf16 want
        --impl both --dtype bf16                            --ckpt, --amp, --dtype bf16 want
        --impl torch --experts 4                   --cp, --experts and --zero 2, 3 want
        --impl torch --schedule zb-v --eval-every 1 --micro 2  does not know V-shaped ones
    """}

TWO_RANKS = {  # the same for all files, and what only shows with real ranks
    "ddp": "--impl torch --batch 3                --batch 3: torch's sampler wants a multiple of 2",
    "zero": "--batch 3 --accum 2                   --batch 3: fewer than 2 ranks x 2 micro-batches",
    "fsdp": "--batch 1                                          --batch 1 sequences for 2 ranks",
    "tensor_parallel": "--heads 1                               --heads 1, --width 128: 2 ranks",
    "pipeline_parallel": """
        --layers 1                                          --layers 1 for 2 stages
        --impl torch --schedule 1f1b --micro 1              --micro 1: torch's 1f1b wants 2 or more
        --impl torch --schedule zb-h1 --micro 5 --batch 5   --micro 5: torch's zb-h1 wants 2 rounds
    """,
    "context_parallel": "--seq 30                           --seq 30 does not divide into 4 chunks",
    "moe": "--experts 3                              --experts 3 for 2 ranks: take a multiple of 2",
    "amp_accum_ckpt": "--batch 1                         --batch 1: fewer than 2 ranks x --accum 1",
    "hybrid_3d": """
        --tp 2 --heads 1                                    --heads 1 do not divide over --tp 2
        --impl torch --pp 2 --micro 1                       --micro 1: torch's 1f1b wants
        --impl torch --dp 2 --pp 1 --schedule interleaved   fully_shard would untie the embedding
    """}
EVERY_TWO = """
    --dry-run 4                         --dry-run is one rank alone: use python, not torchrun with 2
    --heads 3                           --heads 3 does not divide --width 128
    --nonsense                          unrecognized arguments: --nonsense
    --data no/such/text                 --data no/such/text: no such file or folder
"""


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


@pytest.mark.parametrize("name", ONE_RANK)
def test_one_rank(name, tmp_path):
    run(check_refused, 1, name, lines_of(EVERY_FILE + SAVES + ONE_RANK[name], tmp_path))


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(name, tmp_path):
    run(check_refused, 2, name, lines_of(EVERY_TWO + TWO_RANKS[name], tmp_path))


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

    sys.modules["common"].load_corpus = gone


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


@pytest.mark.parametrize("name", ONE_RANK)
def test_torchrun_takes_every_flag(name):
    """Its parser looks at the script's flags too; --log is why there is --log-file."""
    parser = torchruns_parser()
    for flag in flags_of(name):
        if flag in ("--log", "--help"):
            continue
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
    """`>&-`: Python has no sys.stdout then. Nor does torch say that NumPy is missing."""
    path = tmp_path / "report.json"
    words = shlex.join([sys.executable, *QUICK, "--json", str(path)])
    environment = {**os.environ, "PYTHONWARNINGS": ""}
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
    assert "a pipe does not do" in script("ddp", 1, "--data", str(tmp_path / "pipe"), code=2)
