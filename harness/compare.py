"""A run's own check: what it has done beside what one process does, by prove.py's comparison."""
import torch

from harness.prove import differences

# {kind of gap: the attribute of a Trace with what is compared}
KINDS = {"loss": "loss", "gradient": "gradients", "grad_norm": "norm", "parameter": "state"}
# the largest gap that passes. That of fp32 is multiplied by the steps: see tolerance()
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
        cut = Trace()
        for kind in ("loss", "norm", "validation"):
            steps = getattr(self, kind)
            setattr(cut, kind, {step: value for step, value in steps.items() if step <= last})
        cut.gradients = self.gradients
        cut.state = self.state
        return cut

    def log(self, step, loss, norm):
        self.loss[step] = loss.detach().cpu()
        self.norm[step] = torch.as_tensor(norm).cpu()

    def keep(self, step, gradients, state):
        for name, t in gradients.items():
            self.gradients[f"{name}, step {step}"] = t.detach().to("cpu", copy=True)
        for name, t in state.items():
            self.state[f"{name}, step {step}"] = t.detach().to("cpu", copy=True)


def tolerance(dtype, steps):
    """The largest gap that right code may show.

    fp64 proves: right code shows 1e-12, wrong code about 1. In fp32 rounding errors grow with the
    steps, so the tolerance does too, from 20 steps to 200 and no further.
    """
    if dtype == "fp32":
        return LIMITS[dtype] * min(max(steps, 20), 200)
    return LIMITS[dtype]


def compare(ours, plain, dtype, ranks):
    """Two traces -> the report's `check`.

    In bf16 single tensors are mostly rounding, and only the losses are held to the tolerance.
    """
    limit = tolerance(dtype, len(plain.loss))
    found = {}
    for kind, attribute in {**KINDS, "validation": "validation"}.items():
        theirs = getattr(plain, attribute)
        if theirs or kind != "validation":
            found[kind] = differences(getattr(ours, attribute), theirs, limit, ranks)
    worst = {kind: max(of_kind, key=lambda name: of_kind[name][0])
             for kind, of_kind in found.items()}
    gaps = {kind: found[kind][name][0] for kind, name in worst.items()}
    judged = list(found)
    if dtype == "bf16":
        judged = [kind for kind in found if kind in ("loss", "validation")]
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
