"""One step under torch.profiler: a trace to look at, and how much of the communication nothing
hides.

Open the trace, a file for each rank, at ui.perfetto.dev or chrome://tracing.
"""
import contextlib
import json
import math

import torch


@contextlib.contextmanager
def profiled(path, say):
    """Profile what is inside -> a trace in this file; its summary goes to say(line).

    Yields a dict that has milliseconds at the end: "communication", and of it what is "exposed".
    """
    found = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile() as profile:
        yield found
    profile.export_chrome_trace(str(path))
    moving, exposed = exposed_time(json.loads(path.read_text())["traceEvents"])
    found.update(communication=moving / 1e3, exposed=exposed / 1e3)
    say(f"\nprofile of one step, in {path}\n  communication {moving / 1e3:.3f} ms, of it "
        f"{exposed / 1e3:.3f} that no computation hides")


# ---- what is hidden ------------------------------------------------------------


def exposed_time(events):
    """A trace's events -> microseconds with transport, and with transport but no computation.

    GPU kernels compute, where there are any, else torch's operators on CPUs. A host that only waits
    for a collective runs none of these.
    """
    timed = [event for event in events if event.get("ph") == "X" and event.get("dur", 0) > 0]
    kernels = [event for event in timed if event.get("cat") == "kernel"]
    working = kernels or [event for event in timed if event["name"].startswith("aten::")]
    moving = [span(event) for event in timed if is_transport(event)]
    busy = [span(event) for event in working if not is_transport(event)]
    return covered(moving), covered(moving + busy) - covered(busy)


def is_transport(event):
    """Gloo's threads move bytes on the host, NCCL's kernels on the GPU, which the host launches."""
    if event.get("cat") == "kernel":
        return "nccl" in event["name"].lower()
    return "gloo:" in event["name"]


def span(event):
    return event["ts"], event["ts"] + event["dur"]


def covered(spans):
    """How long at least one of them lasts."""
    total = 0.0
    last = -math.inf  # the end of those so far
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total
