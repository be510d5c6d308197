"""Kills: a run loses its ranks again and again, and ends as the run that lost none.

    python tools/soak.py [KILLS]        ./run.sh soak

torchrun --max-restarts starts the ranks again, which go on from the newest whole checkpoint. One of
them is killed with SIGKILL at a random moment after each new checkpoint; every fourth time while
one is being written. ddp loses ranks, and then hybrid_3d with dp, tp and ZeRO-1.
"""
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from harness.checkpoint import numbered  # noqa: E402
from harness.usage import require  # noqa: E402

HYBRID = ("--dp", "2", "--tp", "2", "--pp", "1", "--zero", "1")
USUAL = (("ddp", 2), ("hybrid_3d", 4, *HYBRID))
PATIENCE = 240  # seconds in which something has to happen


def torchrun(restarts, folder, out, name, ranks, *flags):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
        f"--max-restarts={restarts}", f"{name}.py", "--no-check", "--save", str(folder), *flags,
    ]
    return subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})


def wait_for(happened, job, pause=0.002):
    """Asks every `pause` seconds until happened() or the job's end -> has it happened?"""
    end = time.monotonic() + PATIENCE
    while job.poll() is None:
        if happened():
            return True
        assert time.monotonic() < end, "nothing goes on"
        time.sleep(pause)
    return happened()


def ranks_of(job):
    """-> the process ids of torchrun's ranks."""
    command = ["ps", "-o", "pid=", "--ppid", str(job.pid)]
    return subprocess.run(command, capture_output=True, text=True).stdout.split()


def kill_again_and_again(job, folder, kills, pace, rng):
    """-> the newest checkpoint at each kill. pace: seconds between two checkpoints."""
    def newest():  # the steps behind it
        return max(numbered(folder), default=0)

    seen = []
    while len(seen) < kills:
        before = newest()
        if not wait_for(lambda before=before: newest() > before, job):
            break  # it came to its end
        if len(seen) % 4 == 3:  # until one is being written
            wait_for(lambda: any(Path(folder).glob(".[0-9]*")), job)
        else:
            time.sleep(rng.uniform(0, pace))
        behind = newest()
        ranks = ranks_of(job)
        if ranks:
            os.kill(int(rng.choice(ranks)), signal.SIGKILL)
            # else another rank may still publish a checkpoint, and a kill hit what is ending
            wait_for(lambda ranks=ranks: not set(ranks) & set(ranks_of(job)), job, pause=0.05)
            seen.append(behind)
            print(f"kill {len(seen):3d} with checkpoint {behind} behind it", flush=True)
    return seen


def parameters_of(folder, steps):
    """-> the files of a checkpoint that hold tensors: {name: bytes}"""
    files = Path(folder, str(steps)).glob("*.distcp")
    return {path.name: path.read_bytes() for path in files}


def soak(kills, seed, name, ranks, *flags, steps=200, every=5):
    """-> how often ranks were killed; raises AssertionError if anything is lost.

    Two runs are made, one that is killed and one that is not.
    """
    rng = random.Random(seed)
    flags = ("--steps", str(steps), "--save-every", str(every), *flags)
    with (
        tempfile.TemporaryDirectory() as whole,
        tempfile.TemporaryDirectory() as killed,
        tempfile.TemporaryFile("w+") as out,
    ):
        start = time.monotonic()
        job = torchrun(0, whole, out, name, ranks, *flags)
        assert job.wait() == 0, "the run that nobody kills failed"
        pace = every / steps * (time.monotonic() - start)
        job = torchrun(kills + 3, killed, out, name, ranks, *flags)
        seen = kill_again_and_again(job, killed, kills, pace, rng)
        assert job.wait() == 0, "the run did not survive"
        out.seek(0)
        # what harness/checkpoint.py has said at each restart
        taken = [int(number) for number in re.findall(r"--save takes \S+?/(\d+),", out.read())]
        none_older = all(later >= earlier for earlier, later in zip(seen, taken))
        assert len(taken) == len(seen) and none_older, f"lost: {seen}, resumed {taken}"
        same = parameters_of(whole, steps) == parameters_of(killed, steps)
        assert same, "the parameters are not those of the run that was never killed"
        return len(seen)


def main(words):
    good = len(words) < 2 and all(word.isdecimal() and int(word) for word in words)
    require(good, "usage: soak.py [KILLS], KILLS at least 1")
    kills = int((words or [20])[0])
    missed = False
    for name, ranks, *flags in USUAL:
        print(f"{name} on {ranks} ranks {' '.join(flags)}", flush=True)
        done = soak(kills, 0, name, ranks, *flags)
        print(f"{done} kills: nothing lost but the steps since a checkpoint, "
              "final parameters identical bit for bit", flush=True)
        missed = missed or done < kills
    return int(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
