"""Section 1 of the data parallel files around structures of real models, see others.py.

Three AdamW steps in fp64 on two ranks, with clipping, two parameter groups and a schedule of the
rate, equal those of one process: every gradient by name, the norm, every parameter and buffer.
"""
from collections import namedtuple

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from conftest import run
from ddp import BucketedDDP
from fsdp import FSDP
from others import STRUCTURES
from zero import ZeRO, units_of

ROWS = 6
CLIP = 1.0

# model: to be called as the structure is. optimizer: what a schedule of the rate is told
# clip() -> the norm. gradients(), after a backward, and state() -> {name: whole tensor}
Wrapped = namedtuple("Wrapped", "model optimizer clip gradients state step zero_grad")


def groups_of(module):
    """Weight decay for matrices only, and another rate for all else: what everybody uses.

    By name, since FSDP's parameters have no shape between steps.
    """
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    matrices = [p for name, p in trained if "norm" not in name]
    others = [p for name, p in trained if "norm" in name]
    return [{"params": matrices, "weight_decay": 0.1, "lr": 0.01},
            {"params": others, "weight_decay": 0.0, "lr": 0.02}]


def gradients_of(module):
    return {name: p.grad for name, p in module.named_parameters() if p.requires_grad}


def by_nothing(module, structure):
    """The plain model, in one process."""
    optimizer = torch.optim.AdamW(groups_of(module), eps=1e-5)
    return Wrapped(
        model=module,
        optimizer=optimizer,
        clip=lambda: nn.utils.clip_grad_norm_(module.parameters(), CLIP),
        gradients=lambda: gradients_of(module),
        state=module.state_dict,
        step=optimizer.step,
        zero_grad=optimizer.zero_grad,
    )


def by_ddp(module, structure):
    return by_nothing(module, structure)._replace(model=BucketedDDP(module, average=False))


def by_fsdp(module, structure):
    model = FSDP(module, module.blocks())
    optimizer = torch.optim.AdamW(model.parameter_groups(groups_of(module)), eps=1e-5)
    return Wrapped(
        model=model,
        optimizer=optimizer,
        clip=lambda: model.clip_grad_norm_(CLIP),
        gradients=model.full_gradients,
        state=model.full_state_dict,
        step=optimizer.step,
        zero_grad=optimizer.zero_grad,
    )


def by_zero(level):
    def wrap(module, structure):
        groups = groups_of(module)
        names = {p: name for name, p in module.named_parameters()}
        zero = ZeRO(units_of(module, module.blocks()), level=level)
        optimizer = torch.optim.AdamW(zero.parameter_groups(groups), eps=1e-5)
        zero.zero_grad()

        def gradients():
            zero.reduce()
            return {names[p]: g for p, g in zero.full_gradients().items()}

        def state():
            found = zero.full_parameters()
            tensors = dict(names_of_state(module))
            return {name: found.get(t, t).detach() for name, t in tensors.items()}

        return Wrapped(
            model=module,
            optimizer=optimizer,
            clip=lambda: zero.clip_grad_norm_(CLIP),
            gradients=gradients,
            state=state,
            step=lambda: zero.step(optimizer),
            zero_grad=zero.zero_grad,
        )

    return wrap


def names_of_state(module):
    """What a state_dict would have."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers()


WRAPPERS = {
    "ddp": by_ddp, "fsdp": by_fsdp,
    "zero 0": by_zero(0), "zero 1": by_zero(1), "zero 2": by_zero(2), "zero 3": by_zero(3),
}


def share_of(rows):
    return [t.chunk(dist.get_world_size())[dist.get_rank()] for t in rows]


def step(side, structure, rows):
    """-> gradients by name and the norm, before clipping."""
    loss = structure.loss(side.model, *rows) / ROWS
    loss.backward()
    gradients = {name: g.clone() for name, g in side.gradients().items()}
    norm = side.clip()
    side.step()
    side.zero_grad()
    return gradients, norm


def check_structure(name, wrapper):
    structure = STRUCTURES[name]
    sides = []
    for wrap in (by_nothing, WRAPPERS[wrapper]):
        torch.manual_seed(0)
        sides.append(wrap(structure.build(), structure))
    plain, ours = sides
    schedules = []
    for side in sides:
        schedules.append(torch.optim.lr_scheduler.CosineAnnealingLR(side.optimizer, T_max=4))
    rng = torch.Generator().manual_seed(1)
    for _ in range(3):
        rows = structure.rows(rng, ROWS)
        want, want_norm = step(plain, structure, rows)
        found, norm = step(ours, structure, share_of(rows))
        assert found.keys() == want.keys(), name
        assert_equal(name, found, want)
        assert_equal(name, {"norm": norm}, {"norm": want_norm})
        for schedule in schedules:
            schedule.step()
    found = ours.state()
    want = plain.state()
    assert found.keys() == want.keys(), name
    assert_equal(name, found, want)


def assert_equal(name, found, want):
    """Gap of a tensor: over its largest element, or a part in 10^4 of the largest of all."""
    largest = max(t.abs().max().item() for t in want.values())
    for key, tensor in want.items():
        gap = (found[key] - tensor).abs().max().item()
        scale = max(tensor.abs().max().item(), 1e-4 * largest)
        assert gap <= 1e-10 * scale, f"{name}: {key} differs by {gap / scale:.1e}"


def check_all(wrapper):
    for name in STRUCTURES:
        check_structure(name, wrapper)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_trains_as_one_process(wrapper):
    run(check_all, 2, wrapper)
