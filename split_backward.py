"""A backward in two parts, for any module: B makes the gradient of its input, W, later, those of its parameters.

    y = x A, for every Linear          B    grad_x = grad_y A^T     what the stage before waits for
                                       W    grad_A = x^T grad_y     nobody waits: x and grad_y are kept until then

A Linear is what calls F.linear(x, A, b) under autograd; other parameters' gradients are made in B, and kept: those of
norms and embeddings, and of tensor_parallel.py's column-parallel Linears, where they hide a sum over ranks. Not under
autocast, nor with torch.utils.checkpoint.

With these, the parts of one micro-batch are
    with SplitLinears(later := []):    y = module(x)                                 F
    input_gradient(x, get_gradient_edge(y), grad_y, module.parameters(), later)      B, -> grad_x
    weight_gradients(later)                                                          W, adds to .grad

Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, section 2. Needs only torch.
"""
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class WeightGradient(torch.autograd.Function):
    """W of a Linear: a root without a value, whose backward makes the gradients of weight and bias."""

    @staticmethod
    def forward(ctx, weight, bias, x, grad):
        ctx.save_for_backward(x, grad)
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        x, grad = (t.flatten(0, -2) for t in ctx.saved_tensors)
        return grad.T @ x, grad.sum(0) if ctx.needs_input_grad[1] else None, None, None


class SplitLinear(torch.autograd.Function):
    """F.linear whose backward is B alone; it leaves a WeightGradient in `later`."""

    @staticmethod
    def forward(ctx, later, x, weight, bias=None):
        ctx.later, ctx.weight, ctx.bias = later, weight, bias
        ctx.save_for_backward(x)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            root = WeightGradient.apply(ctx.weight, ctx.bias, ctx.saved_tensors[0].detach(), grad)
        ctx.later.append((root, None))
        return None, grad @ ctx.weight, None, None


class SplitLinears(TorchFunctionMode):
    """While it is entered, every F.linear is a SplitLinear, whatever module calls it."""

    def __init__(self, later):
        super().__init__()
        self.later = later

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear and not kwargs and torch.is_grad_enabled() and args[1].requires_grad:
            return SplitLinear.apply(self.later, *args)
        return func(*args, **(kwargs or {}))


def input_gradient(x, edge, grad, parameters, later):
    """B. edge: the gradient edge of y, whose gradient is `grad` -> that of x, None for a leaf of integers."""
    leaves = [x] * x.requires_grad + [p for p in parameters if p.requires_grad]
    grads = torch.autograd.grad(edge, leaves, grad, allow_unused=True)
    # those of norms and embeddings are made already, but all go to .grad in W: hooks see each parameter once
    later += [(leaf, g) for leaf, g in zip(leaves, grads) if leaf is not x and g is not None]
    return grads[0] if x.requires_grad else None


def weight_gradients(later):
    """W."""
    if later:  # else all is frozen
        torch.autograd.backward(*zip(*later))
