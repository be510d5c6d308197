"""How far training is from that of one process."""
import math

import torch

# ---- ours against the plain GPT ----------------------------------------------


class Trace:
    """What training did: every step's loss and gradient norm; some steps' gradients and state_dict, by name."""

    def __init__(self):
        self.loss, self.norm, self.gradients, self.state = {}, {}, {}, {}

    def log(self, step, loss, norm):
        self.loss[step], self.norm[step] = loss.detach().cpu(), torch.as_tensor(norm).cpu()

    def keep(self, step, gradients, state):
        for kept, tensors in (self.gradients, gradients), (self.state, state):
            kept.update({f"{name}, step {step}": t.detach().to("cpu", copy=True) for name, t in tensors.items()})


def worst_gap(ours, plain):
    """Two {name: tensor} -> the largest gap max|ours - plain| / max|plain|, and whose it is. NaN is infinitely far.

    No denominator is below 1e-4 of the largest: key biases have zero gradient in exact arithmetic.
    """
    if ours.keys() != plain.keys() or any(ours[n].shape != plain[n].shape for n in plain):
        raise AssertionError(f"not the plain GPT's tensors: {sorted(ours.keys() ^ plain.keys()) or 'other shapes'}")
    size = {name: t.abs().max().item() for name, t in plain.items()}
    floor = 1e-4 * max(size.values())
    gaps = {n: (ours[n].double() - t.double()).abs().max().item() / max(size[n], floor) for n, t in plain.items()}
    return max((gap if math.isfinite(gap) else math.inf, name) for name, gap in gaps.items())


def compare(ours, plain, dtype):
    """Two traces -> the report's `check`. fp64 proves: right code shows 1e-12, wrong code about 1. In fp32 rounding
    grows with the steps. In bf16 single tensors are mostly rounding, and only the loss is held to the tolerance."""
    limit = {"fp64": 1e-10, "fp32": 1e-4 * max(20, len(plain.loss)), "bf16": 2e-2}[dtype]
    kinds = {"loss": "loss", "gradient": "gradients", "grad_norm": "norm", "parameter": "state"}
    gaps = {key: worst_gap(getattr(ours, kind), getattr(plain, kind)) for key, kind in kinds.items()}
    passed = all(gaps[key][0] <= limit for key in (["loss"] if dtype == "bf16" else kinds))
    return {**{key: gap for key, (gap, _) in gaps.items()}, "gradient_worst": gaps["gradient"][1],
            "tolerance": limit, "passed": passed}
