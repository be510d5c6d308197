"""Kills: a training run loses its ranks again and again, and ends with the parameters of the run that lost none.

    python tools/soak.py [KILLS] [SEED] [FILE flags...]        ./run.sh soak

torchrun --max-restarts starts the ranks again, which go on from the newest whole checkpoint. One of them is killed with
SIGKILL at a random moment after each new checkpoint; every fourth time while one is being written.
"""
import json
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


def torchrun(restarts, folder, out, name, *flags):
    words = ["--standalone", "--nproc_per_node=2", f"--max-restarts={restarts}", f"{name}.py", "--no-check",
             "--save", str(folder), *flags]
    return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *words], cwd=ROOT, stdout=out,
                            stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"})


def newest(folder):
    return max((int(p.name) for p in Path(folder).glob("[0-9]*")), default=0)


def wait_for(happened, job, limit=120):
    """-> whether it has happened before the job was over."""
    end = time.monotonic() + limit
    while not (found := happened()) and job.poll() is None:
        assert time.monotonic() < end, "nothing goes on"
        time.sleep(0.002)
    return found


def kill_one(job, rng):
    ranks = subprocess.run(["ps", "-o", "pid=", "--ppid", str(job.pid)], capture_output=True, text=True).stdout.split()
    if ranks:
        os.kill(int(rng.choice(ranks)), signal.SIGKILL)


def soak(kills=20, seed=0, name="ddp", *flags, steps=200, every=5, undisturbed=None):
    """-> how often ranks were killed; raises AssertionError if anything is lost.

    undisturbed(folder, flags) is the run that nobody kills; by default torchrun's, too.
    """
    rng, flags = random.Random(seed), ("--steps", str(steps), "--save-every", str(every), *flags)
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as killed, \
            tempfile.TemporaryFile("w+") as out:
        start = time.monotonic()
        if undisturbed:
            undisturbed(whole, flags)
        else:
            assert torchrun(0, whole, out, name, *flags).wait() == 0
        pace = (time.monotonic() - start) / steps * every
        job, seen, done = torchrun(kills + 3, killed, out, name, *flags), [], 0
        while done < kills:
            before = newest(killed)
            if not wait_for(lambda before=before: newest(killed) > before, job):
                break
            if done % 4 == 3:
                wait_for(lambda: any(Path(killed).glob(".[0-9]*")), job)
            else:
                time.sleep(rng.uniform(0, pace))
            seen.append(newest(killed))
            kill_one(job, rng)
            done += 1
            print(f"kill {done:3d} with checkpoint {seen[-1]} behind it", flush=True)
        assert job.wait() == 0
        out.seek(0)
        taken = [int(n) for n in re.findall(r"--save takes \S+?/(\d+),", out.read())]
        assert len(taken) == done and all(b >= a for a, b in zip(seen, taken)), f"lost: {seen}, resumed {taken}"
        sums = [json.loads(Path(place, str(steps), "notes.json").read_bytes().rpartition(b"\n")[0])["files"]
                for place in (whole, killed)]
        mine = [{k: v for k, v in files.items() if k.endswith(".distcp")} for files in sums]
        assert mine[0] == mine[1], "the parameters are not those of the run that was never killed"
        return done


if __name__ == "__main__":
    words = sys.argv[1:]
    done = soak(int(words[0]) if words else 20, int(words[1]) if words[1:] else 0, *words[2:])
    print(f"{done} kills: nothing lost but the steps since a checkpoint, final parameters identical bit for bit")
    sys.exit(done < int(words[0] if words else 20))
