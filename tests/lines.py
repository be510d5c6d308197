"""Which lines of a section 1 does ordinary training never run?

    python tests/lines.py            all nine files, by their own tests less planted bugs, refusals
    python tests/lines.py zero fsdp  these

Every rank that a test starts notes the lines that it runs, if LINES_TO names a folder.
"""
import atexit
import inspect
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = (
    "ddp zero fsdp tensor_parallel pipeline_parallel context_parallel moe amp_accum_ckpt hybrid_3d"
).split()
PATHS = {str(ROOT / f"{name}.py"): name for name in FILES}


def watch():
    """From here on this process notes what it runs of the nine files."""
    folder = os.environ.get("LINES_TO")
    if not folder:
        return
    run = set()

    def trace(frame, event, _):
        if frame.f_code.co_filename not in PATHS:
            return None
        run.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    def write():
        sys.settrace(None)
        text = "\n".join(f"{PATHS[path]} {line}" for path, line in run)
        Path(folder, f"{os.getpid()}").write_text(text)

    threading.settrace(trace)
    sys.settrace(trace)
    end = os._exit  # a process of multiprocessing ends here, without atexit

    def write_and_end(code):
        write()
        end(code)

    os._exit = write_and_end
    atexit.register(write)


def lines_of(code):
    """-> the lines of all functions in a code object."""
    found = set()
    for inner in code.co_consts:
        if inspect.iscode(inner):
            found |= lines_of(inner)
            if inner.co_flags & inspect.CO_OPTIMIZED:  # a function; classes ran when imported
                found |= {line for _, _, line in inner.co_lines() if line}
    return found


def lines_run(name):
    """-> the lines that ranks have run in the file's own tests, as "zero 123"."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", f"tests/test_{name}.py", "-k",
                   "not planted and not refuse"]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "LINES_TO": folder},
                              capture_output=True, text=True)
        if done.returncode:
            print(done.stdout[-2000:])
        return {line for path in Path(folder).iterdir() for line in path.read_text().splitlines()}


def main():
    from conftest import section_one  # which imports this file

    for name in sys.argv[1:] or FILES:
        run = lines_run(name)
        every = lines_of(compile(section_one(name), name, "exec"))
        missed = [str(line) for line in sorted(every) if f"{name} {line}" not in run]
        print(f"{name:18} {len(every)} lines, never run {len(missed)} "
              f"({len(missed) / len(every):.1%}): {', '.join(missed) or 'none'}", flush=True)


if __name__ == "__main__":
    main()
