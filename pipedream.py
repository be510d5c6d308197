"""PipeDream: an update after every micro-batch, while others are under way. Stash and update need only torch.

    stage 0, in order   F0 F1 B0 U F2 B1 U F3 B2 U B3    F1 sees no update, F2 one, F3 two
    stage 1, in order   F0 B0 U F1 B1 U F2 B2 U F3 B3    F1 sees one, F2 two, F3 three

A micro-batch's backward uses the weights of its forward (Stash), which on stage 0 are one update old by then. All of it
can be said by one process that keeps every version and gives each stage those of its age (stale_step).

Harlap et al. 2018, "PipeDream", arXiv:1806.03377, section 3. Ours drains, and is synchronous, at the end of a step.
"""
import math

import torch
import torch.nn as nn

from harness.compare import Trace


class Stash(nn.Module):
    """Weight stashing: a micro-batch's backward uses the weights of its forward, copied until then."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        weights = {name: p.clone() for name, p in self.module.named_parameters()}
        return torch.func.functional_call(self.module, weights, (x,))


def update(stages, tied, optimizer, clip):
    """U within a step. Each of `stages`, lists of parameters, has its own norm: none waits to hear the others'. The
    tied embedding, which two stages would have to agree on, waits for the end of the step."""
    waiting = [p.grad for p in tied]
    for p in tied:
        p.grad = None
    for parameters in stages:
        nn.utils.clip_grad_norm_(parameters, clip or math.inf)
    optimizer.step()
    optimizer.zero_grad()
    for p, grad in zip(tied, waiting):
        p.grad = grad


def stale_step(model, optimizer, x, y, valid, clip, loss_sum, stages, plans):
    """A step of PipeDream in one process -> loss, norm. stages: the parameters of `model` in each, plans: of each.

    loss_sum(model(x), y) / valid, in micro-batches, each stage's parameters as old as its plan says.
    """
    optimizer.zero_grad()
    names = {p: name for name, p in model.named_parameters()}
    tied, total, versions = [p for p in names if sum(p in set(s) for s in stages) > 1], 0.0, []
    M = 1 + max(a.microbatch for a in plans[0])
    for m, (xs, ys) in enumerate(zip(x.chunk(M), y.chunk(M))):
        versions.append({p: p.detach().clone() for p in names})  # after m updates
        seen = {}
        for parameters, plan in zip(stages, plans):
            age = [a.kind for a in plan[:plan.index(("F", m, 0))]].count("U")
            seen |= {p: versions[age][p].requires_grad_() for p in parameters}
        logits = torch.func.functional_call(model, {names[p]: old for p, old in seen.items()}, (xs,))
        loss = loss_sum(logits, ys) / valid
        for p, grad in zip(seen, torch.autograd.grad(loss, list(seen.values()))):
            p.grad = grad if p.grad is None else p.grad + grad
        total += loss.detach()
        if m < M - 1:
            update(stages, tied, optimizer, clip)
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    optimizer.step()
    return total, norm


def stale_training(run, model, optimizer, loss_sum, stages, plans):
    """The steps of a run -> what they did, a Trace."""
    trace = Trace()
    for step in range(run.last + 1):
        loss, norm = stale_step(model, optimizer, *run.batch(step), run.args.clip, loss_sum, stages, plans)
        trace.log(step, loss, norm)
        if run.keeps(step):
            trace.keep(step, {name: p.grad for name, p in model.named_parameters()}, model.state_dict())
    return trace
