"""A run's own check: what it has done beside what one process does, by prove.py's comparison."""
import copy

import torch

from harness.prove import differences

# {kind of gap: the attribute of a Trace with what is compared}
KINDS = {"loss": "loss", "gradient": "gradients", "grad_norm": "norm", "parameter": "state",
         "validation": "validation"}
# The largest gap that passes: in fp64 right code shows 1e-12, wrong code about 1. In fp32 rounding
# errors grow with the steps, and the limit is multiplied by these, 20 at least and 200 at most.
LIMITS = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 2e-2}


class Trace:
    """What training did."""

    def __init__(self):
        self.loss = {}  # {step: loss of the global batch}
        self.norm = {}  # {step: gradient norm before clipping}
        self.validation = {}  # {step: loss on held-out text after it}
        self.gradients = {}  # {"name, step 3": tensor}, of the steps that are compared in full
        self.state = {}  # {"name, step 3": tensor} after these steps

    def until(self, last):
        """-> the same, with the numbers of each step up to `last` alone."""
        cut = copy.copy(self)
        for kind in ("loss", "norm", "validation"):
            steps = getattr(self, kind)
            setattr(cut, kind, {step: value for step, value in steps.items() if step <= last})
        return cut

    def log(self, step, loss, norm):
        self.loss[step] = loss.detach().cpu()
        self.norm[step] = torch.as_tensor(norm).cpu()

    def keep(self, step, gradients, state):
        for kept, tensors in ((self.gradients, gradients), (self.state, state)):
            for name, t in tensors.items():
                kept[f"{name}, step {step}"] = t.detach().to("cpu", copy=True)


def compare(ours, plain, dtype, ranks):
    """Two traces -> the report's `check`.

    In bf16 single tensors are mostly rounding, and only the losses are held to the tolerance.
    """
    limit = LIMITS[dtype]
    if dtype == "fp32":
        limit *= min(max(len(plain.loss), 20), 200)
    found = {}
    for kind, attribute in KINDS.items():
        theirs = getattr(plain, attribute)
        if theirs or kind != "validation":
            found[kind] = differences(getattr(ours, attribute), theirs, limit, ranks)
    worst = {kind: max(of_kind, key=lambda name: of_kind[name][0])
             for kind, of_kind in found.items()}
    gaps = {kind: found[kind][name][0] for kind, name in worst.items()}
    judged = [kind for kind in found if dtype != "bf16" or kind in ("loss", "validation")]
    return {
        **gaps,
        "gradient_worst": worst["gradient"].rpartition(", step ")[0],
        "gradients_compared": len({name.rpartition(", step ")[0] for name in plain.gradients}),
        "tolerance": limit,
        "judged": judged,
        "passed": all(gaps[kind] <= limit for kind in judged),
        "differ": [f"{kind} {name} {words}" for kind in judged
                   for name, (_, words, _) in found[kind].items() if words],
    }
