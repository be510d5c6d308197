"""A run's own check: what it has done beside what one process does, by prove.py's comparison."""
import math

import torch

from harness.prove import TOLERANCES, differences

KINDS = ("loss", "gradient", "grad_norm", "parameter", "validation")


class Trace:
    """What training did: for each of KINDS {name: tensor}."""

    def __init__(self):
        self.loss = {}  # {step: of the global batch}
        self.grad_norm = {}  # {step: before clipping}
        self.validation = {}  # {step: loss on held-out text after it}
        self.gradient = {}  # {"name, step 3": tensor}, of the steps that are compared in full
        self.parameter = {}  # {"name, step 3": tensor} after these steps

    def log(self, step, loss, norm):
        self.loss[step] = loss.detach().cpu()
        self.grad_norm[step] = torch.as_tensor(norm).cpu()

    def keep(self, step, gradients, state):
        for kept, tensors in ((self.gradient, gradients), (self.parameter, state)):
            for name, t in tensors.items():
                kept[f"{name}, step {step}"] = t.detach().to("cpu", copy=True)

    def of(self, kind, last):
        """-> {name: tensor} of a kind; where names are steps, of those up to `last` alone."""
        tensors = getattr(self, kind)
        return {name: t for name, t in tensors.items() if isinstance(name, str) or name <= last}


def compare(ours, plain, last, dtype, ranks):
    """Two traces up to step `last` -> the report's `check`.

    In bf16 single tensors are mostly rounding, and only the losses are held to the tolerance. In
    fp32 rounding errors grow with the steps, and the tolerance with them, up to tenfold.
    """
    judged = [kind for kind in KINDS if getattr(plain, kind) or kind != "validation"]
    found = {}
    if dtype == "bf16":
        limit = TOLERANCES["half precision"]["loss"]
    else:
        limit = TOLERANCES[dtype]["gradient"]
    if dtype == "fp32":
        limit *= min(max(len(plain.loss) / 20, 1), 10)
    for kind in judged:
        found[kind] = differences(ours.of(kind, last), getattr(plain, kind), limit, ranks)
    if dtype == "bf16":
        judged = [kind for kind in judged if kind in ("loss", "validation")]
    gaps = {kind: max(gap for gap, _, _ in of_kind.values()) for kind, of_kind in found.items()}
    worst = max(found["gradient"], key=lambda name: found["gradient"][name][0])
    return {
        **gaps,
        "gradient_worst": worst.rpartition(", step ")[0],
        "gradients_compared": len({name.rpartition(", step ")[0] for name in plain.gradient}),
        "tolerance": limit,
        "judged": judged,
        "passed": all(gaps[kind] <= limit for kind in judged),
        "differ": [f"{kind} {name} {words}" for kind in judged
                   for name, (_, words, _) in found[kind].items() if words],
    }


def fault(loss, norm, gradients, state):
    """At the end of a step -> what is inf or nan, in words, the same on all ranks, or "".

    loss, norm: of the whole batch. gradients(), state() -> {name: tensor} of all parameters, whole.
    """
    if math.isfinite(loss) and math.isfinite(norm):
        return ""
    found = "all gradients and parameters are finite"
    for tensors in (state(), gradients()):  # these come first where both are not
        names = [name for name, t in tensors.items() if not t.isfinite().all()]
        if names:
            found = f"not finite: {names[0]} and {len(names) - 1} more"
    return f"loss {loss:g}, gradient norm {norm:g}; {found}"
