"""Which statements of a section 1 does ordinary training never run? Named by their first lines.

    python tests/lines.py            all nine files, by their own tests less planted bugs, refusals
    python tests/lines.py zero fsdp  these

Every rank that a test starts notes the lines that it runs, if LINES_TO names a folder.
"""
import ast
import inspect
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def watch():
    """From here on this process notes what it runs of the files in the root."""
    if "LINES_TO" not in os.environ:
        return
    file = open(Path(os.environ["LINES_TO"], f"{os.getpid()}"), "w")
    noted = set()

    def trace(frame, event, _):
        folder, name = os.path.split(frame.f_code.co_filename)
        if folder != str(ROOT):
            return None
        line = f"{name} {frame.f_lineno}"
        if line not in noted:
            noted.add(line)
            print(line, file=file, flush=True)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)


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
    """-> the lines that ranks have run in the file's own tests, as "zero.py 123"."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", f"tests/test_{name}.py", "-k",
                   "not planted and not refuse"]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "LINES_TO": folder}, stdout=2)
        return {line for path in Path(folder).iterdir() for line in path.read_text().splitlines()}


def main():
    from conftest import section_one  # which imports this file
    from test_repo import TECHNIQUES

    for name in sys.argv[1:] or TECHNIQUES:
        run = lines_run(name)
        tree = ast.parse(section_one(name))
        begins = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)}
        every = lines_of(compile(tree, name, "exec")) & begins
        missed = [str(line) for line in sorted(every) if f"{name}.py {line}" not in run]
        print(f"{name:18} {len(every)} statements, never run {len(missed)} "
              f"({len(missed) / len(every):.1%}): {', '.join(missed) or 'none'}", flush=True)


if __name__ == "__main__":
    main()
