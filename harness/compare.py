"""How far a training run is from the plain run, which is that of one process."""
import math

import torch

# {kind of gap: the attribute of a Trace with what is compared}
KINDS = {"loss": "loss", "gradient": "gradients", "grad_norm": "norm", "parameter": "state"}
# the largest gap that passes. That of fp32 is multiplied by the steps: see tolerance()
LIMITS = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 2e-2}
# No denominator is below this part of the largest tensor's. Key biases need it: their gradient is
# zero in exact arithmetic.
FLOOR = 1e-4


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


def worst_gap(ours, plain):
    """Two {name: tensor} -> the largest gap max|ours - plain| / max|plain|, and whose it is.

    NaN is infinitely far. No denominator is below FLOOR times the largest max|plain|; if all of
    them are 0, what differs is infinitely far. Raises AssertionError unless names and shapes are
    the same.
    """
    if ours.keys() != plain.keys():
        raise AssertionError(f"not the plain GPT's tensors: {sorted(ours.keys() ^ plain.keys())}")
    sizes = {}
    for name, t in plain.items():
        if ours[name].shape != t.shape:
            shapes = f"{tuple(ours[name].shape)}, not {tuple(t.shape)}"
            raise AssertionError(f"not the plain GPT's shape: {name} is {shapes}")
        sizes[name] = largest(t)
    floor = FLOOR * max(sizes.values())
    worst = -1.0
    for name, t in plain.items():
        difference = largest(ours[name].double() - t.double())
        denominator = max(sizes[name], floor)
        if difference == 0:
            gap = 0.0
        elif math.isfinite(difference) and denominator > 0:
            gap = difference / denominator
        else:
            gap = math.inf
        if gap > worst:
            worst = gap
            whose = name
    return worst, whose


def largest(t):
    """-> max|t|, of a tensor without elements 0."""
    if t.numel() == 0:
        return 0.0
    return t.abs().max().item()


def tolerance(dtype, steps):
    """The largest gap that right code may show.

    fp64 proves: right code shows 1e-12, wrong code about 1. In fp32 rounding errors grow with the
    steps, so the tolerance does too, from 20 steps to 200 and no further.
    """
    if dtype == "fp32":
        return LIMITS[dtype] * min(max(steps, 20), 200)
    return LIMITS[dtype]


def compare(ours, plain, dtype):
    """Two traces -> the report's `check`.

    In bf16 single tensors are mostly rounding, and only the losses are held to the tolerance.
    """
    limit = tolerance(dtype, len(plain.loss))
    gaps = {}
    for kind, attribute in KINDS.items():
        gaps[kind], name = worst_gap(getattr(ours, attribute), getattr(plain, attribute))
        if kind == "gradient":
            worst_gradient = name
    judged = [*KINDS]
    if dtype == "bf16":
        judged = ["loss"]
    if plain.validation:
        gaps["validation"], _ = worst_gap(ours.validation, plain.validation)
        judged.append("validation")
    return {
        **gaps,
        "gradient_worst": worst_gradient,
        "gradients_compared": len({name.rpartition(", step ")[0] for name in plain.gradients}),
        "tolerance": limit,
        "judged": judged,
        "passed": all(gaps[kind] <= limit for kind in judged),
    }
