"""zero.py: its ladder around a model of others, its scripts, their costs, what is refused."""
import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import zero
from common import adamw
from conftest import (
    ROOT, SMALL, alone, check_differs, check_each, check_equal, check_refused, copied,
    dry_run_agrees, idea, run_ranks, run_script, textbook)
from others import (
    Llama, OfTensors, as_in_files, bf16_llama, bf16_rows, compare, compare_fp32, into,
    llama_loss, micro_batches, mine, recomputed, refuses, token_rows, trained, whole_batch)

ROWS = token_rows(torch.Generator(), 4)
llama = partial(recomputed, layers=2)


def ladder(module):
    return {"1": module.ZeRO1, "2": module.ZeRO2, "3": module.ZeRO3}


def check_copy(words, *bug):
    """Steps of two micro-batches equal one process's, whatever ranks begin with.

    words: the stage; how offload is called; "tied"; "each": stage 1 sums after each backward, too
    """
    stage, *options = words.split()
    tied = "tied" in options
    module = copied("zero", 2, *bug)
    model = llama(dist.get_rank(), tied=tied)
    for p in model.parameters():
        p.grad = torch.ones_like(p)  # of no step here
    [offload] = {"optimizer", "param"} & set(options) or ["none"]
    ours = ladder(module)[stage](module.units_of(model, model.layers), offload=offload)
    [group] = ours.parameter_groups()
    optimizers = [adamw(group["params"][first::2], 1e-2) for first in range(2)]
    for step, (_, gradients, norm, state) in enumerate(trained(llama(0, tied=tied))):
        ours.zero_grad()
        for number, rows in enumerate(micro_batches(step)):
            ours.sync = stage != "1" or number == 1 or "each" in options
            llama_loss(model, *mine(rows)).backward()
            if ours.sync:
                ours.reduce()
        compare(ours.clip_grad_norm_(0.5), norm)
        compare(list(ours.full_gradients().values()), list(gradients.values()))
        for optimizer in optimizers:
            ours.step(optimizer)
        with torch.no_grad():  # an evaluation in between leaves nothing stale
            model(rows[0])
        compare(module.full_state_dict(model, ours), state)
    other = llama(0, tied=tied)
    module.load_full_state_dict(model, ours, as_in_files(other))
    compare(module.full_state_dict(model, ours), dict(other.state_dict()))
    compare([unit.masters for unit in ours.units], [unit.shard for unit in ours.units])
    with torch.no_grad():
        compare(model(rows[0]), other(rows[0]))


def check_idea(*bug):
    code = idea("zero", *bug)
    model = llama(dist.get_rank(), kind=OfTensors)
    ours = code.IdeaOfZeRO1(model)
    optimizer = adamw([ours.shard], 1e-2)
    for step, (_, _, norm, state) in enumerate(trained(llama(0))):
        rows = mine(whole_batch(step))
        compare(code.idea_step(model, ours, optimizer, *rows, 1, 0.5)[1], norm)
        compare(dict(model.state_dict()), state)


@pytest.mark.parametrize("world, cases", [
    (1, ["3"]),
    (2, ["1 optimizer", "1 tied each", "2 tied", "3 tied", "3 param"]),
    (4, ["1", "3"]),
])
def test_copy(world, cases):
    run_ranks(check_each, world, check_copy, [(case,) for case in cases])
    run_ranks(check_idea, world)


PLANTED = [
    (check_copy, "2", "unit.grad += unit.buffer[unit.mine]",
     "unit.grad.copy_(unit.buffer[unit.mine])"),
    (check_copy, "1", "[unit.spans[p]].add_(", "[unit.spans[p]].copy_("),
    (check_copy, "1", "self.arrived.add(p)", "self.arrived.update(unit.shapes)"),
    (check_copy, "1 each", "unit.buffer[:unit.mine.start].zero_()", "pass"),
    (check_copy, "1 each", "unit.buffer[unit.mine.stop:].zero_()", "unit.grad.div_(2)"),
    (check_copy, "3", "self.full[self.mine].copy_(self.shard)", "pass"),
    (check_copy, "3", "self.gathering = all_gather(self.full, own, group=group, async_op=True)",
     "pass"),
    (check_copy, "1", "unit.gather(self.group)", "pass"),
    (check_copy, "2", "dist.all_reduce(square, group=self.group)  # partial -> replicated\n"
     "        norm = square.sqrt()\n        if max", "norm = square.sqrt()\n        if max"),
    (check_copy, "1", "dist.broadcast(unit.full, group=group, group_src=0)", "pass"),
    (check_copy, "1 optimizer", "t.data.copy_(state[name])", "pass"),
    (check_copy, "1 optimizer", "unit.masters.copy_(whole[unit.mine])", "pass"),
    (check_copy, "3 optimizer", "(unit.masters)\n    for t", "(0)\n    for t"),
    (check_idea, "reduce_scatter(self.shard.grad, self.buffer, group=self.group)", "pass"),
    (check_idea, "dist.all_reduce(square, group=self.group)", "pass"),
    (check_idea, "all_gather(self.full, self.shard.detach(), group=self.group)", "pass"),
    (check_idea, "dist.broadcast(self.full, group=group, group_src=0)", "pass"),
    (check_idea, "zero.buffer.zero_()", "pass"),
    (check_idea, "place.copy_(p.detach().flatten())", "pass"),
    (check_idea, 'reduction="sum") / valid', 'reduction="mean")'),
]


def test_planted():
    run_ranks(check_each, 2, check_differs, PLANTED)


@pytest.mark.parametrize("world, flags", [
    (3, ["--stage", "3", "--accum", "2", "--batch", "9", "--train", r"blocks\.1|norm",
         "--eval-every", "1"]),
    (4, ["--stage", "3", "--offload", "param", "--vocab", "257", "--model", "llama-toy"]),
    (2, ["--stage", "3", "--impl", "both", "--model", "llama-toy"]),
    (2, ["--stage", "1", "--impl", "all"]),
    (1, ["--impl", "idea", "--model", "llama-toy"]),
    (4, ["--impl", "idea", "--vocab", "257", "--train", r"blocks\.1|norm", "--eval-every", "1"]),
])
def test_script_equals_one_process(world, flags):
    check_equal("zero", world, *flags)


def test_resume(tmp_path):
    """In bf16 to the bit, since the fp32 masters are what is saved."""
    flags = [*SMALL, "--no-check", "--dtype", "bf16", "--stage", "3", "--steps", "3"]
    whole = run_script("zero", 2, *flags, "--save", str(tmp_path), "--save-every", "2")
    rest = run_script("zero", 2, *flags, "--resume", str(tmp_path / "2"))
    assert rest["loss"] == whole["loss"][2:]


@pytest.mark.parametrize("world, flags", [
    (2, ["--stage", "1", "--offload", "optimizer", "--model", "llama-toy"]),
    (4, ["--stage", "3", "--vocab", "257", "--width", "33", "--heads", "3"]),
    (2, ["--impl", "idea"]),
])
def test_cost(world, flags):
    textbook(dry_run_agrees("zero", world, *flags, ranks=[world - 1]))


HELD = [0, 4 + 12 / 4, 2 + 14 / 4, 16 / 4]  # on 4 ranks
SENT = [0, 2, 2 + 1, 3 * 2]  # with 2 micro-batches


def test_sixteen_bytes():
    """The docstring's table, in bf16; width 64 needs no padding."""
    size = [*SMALL, "--width", "64", "--dtype", "bf16", "--dry-run", "4", "--accum", "2"]
    reports = alone("zero", *([*size, "--stage", str(stage)] for stage in (1, 2, 3)))
    for stage, report in enumerate(reports, 1):
        textbook(report)
        total = report["parameters"]["total"]
        memory = report["ranks"][0]["memory"]
        held = memory["parameters"] + memory["gradients"] + memory["optimizer"]
        assert 0 <= held - HELD[stage] * total < 4 * 40  # step counters
        collectives = report["ranks"][0]["collectives"]
        sent = sum(collective["wire"] for collective in collectives.values())
        assert 0 <= sent - SENT[stage] * 2 * total * 3 / 4 < 10  # the norm


def check_fp32_sums(stage):
    """Of bf16 gradients, over micro-batches and ranks; and the step is fp32's."""
    model = bf16_llama()
    names = {p: name for name, p in model.named_parameters()}
    units = zero.units_of(model, model.layers)
    ours = ladder(copied("zero"))[stage](units, reduce_dtype=torch.float32)
    optimizer = torch.optim.SGD(ours.parameter_groups(), lr=1.0)
    before = [part.master.detach().clone() for part in ours.parts]
    ours.zero_grad()
    for number, rows in enumerate(bf16_rows()[dist.get_rank()::2], 1):
        ours.sync = stage != "1" or number == 4
        llama_loss(model, *rows).backward()
        if ours.sync:
            ours.reduce()
    compare_fp32({names[p]: gradient for p, gradient in ours.full_gradients().items()})
    ours.step(optimizer)
    for part, old in zip(ours.parts, before):
        assert torch.equal(part.master, old - part.grad)
    for unit in ours.units:
        assert torch.equal(unit.shard, unit.masters.bfloat16())
    stepped = [part.master.clone() for part in ours.parts]
    refuses("load_full_state_dict", model.load_state_dict, bf16_llama().state_dict())
    zero.load_full_state_dict(model, ours, zero.full_state_dict(model, ours))
    for part, master in zip(ours.parts, stepped):
        assert torch.equal(part.master, master)  # not rounded to bf16 on its way


def check_overlap():
    """A unit is gathered before the one in front of it computes; sums begin during backward, and
    two units at most have memory. Between steps a parameter is empty: to read it is safe."""
    module = copied("zero")
    model = Llama(layers=2)
    begun = []  # [(what, of which unit)]
    most = []  # units with memory then

    def has_memory(unit):
        return unit.full.untyped_storage().size() > 0

    def before_gather(unit, group):
        begun.append(("gather", ours.units.index(unit)))

    def before_sum(zero, unit):
        begun.append(("sum", zero.units.index(unit)))

    def count(*_):
        most.append(sum(map(has_memory, ours.units)))
        most.append(sum(unit.buffer is not None for unit in ours.units))

    for owner, name, note in ("Unit", "gather", before_gather), ("ZeRO3", "start_sum", before_sum):
        into(owner, name, "before", note)(module)
        into(owner, name, "after", count)(module)
    ours = module.ZeRO3(module.units_of(model, model.layers))
    for _ in range(2):
        assert all(p.numel() == p.clone().numel() == 0 for p in model.parameters())
        refuses("full_parameters", model.state_dict)
        ours.zero_grad()
        begun.clear()
        llama_loss(model, *mine(ROWS)).backward()
        assert begun[-1] == ("sum", 0)  # before reduce()
        ours.reduce()
    assert begun == [
        ("gather", 0), ("gather", 1), ("gather", 2), ("gather", 3), ("gather", 2), ("sum", 3),
        ("gather", 1), ("sum", 2), ("sum", 1), ("sum", 0)]
    assert max(most) == 2


def test_overlap_and_fp32_sums():
    run_ranks(check_overlap, 2)
    run_ranks(check_each, 2, check_fp32_sums, [*"123"])


def check_identity():
    """In stage 3 a layer that hands its input on, as one that is dropped."""
    plain = llama(0)
    model = llama(0)
    for each in plain, model:
        each.layers[1].forward = lambda x: x
    ours = zero.ZeRO3(zero.units_of(model, model.layers))
    llama_loss(plain, *ROWS).backward()
    llama_loss(model, *mine(ROWS)).backward()
    ours.reduce()
    found = zero.full_gradients(model, ours)
    for name, p in plain.named_parameters():
        compare(found[name], torch.zeros_like(p) if p.grad is None else p.grad)


def check_misuse(stage):
    model = Llama(layers=1)
    ours = ladder(zero)[stage](zero.units_of(model, model.layers))
    optimizer = torch.optim.SGD(ours.parameter_groups(), 0.1)
    of_model = torch.optim.SGD(model.parameters(), 0.1)
    llama_loss(model, *ROWS).backward()
    refuses("call reduce", ours.step, optimizer)
    refuses("call reduce", ours.clip_grad_norm_, 1.0)
    refuses("call reduce", ours.zero_grad)  # it would forget some of them alone
    refuses("call reduce", llama_loss(model, *ROWS).backward)
    ours.reduce()
    refuse_later(stage, model, ours, optimizer, of_model)


def refuse_later(stage, model, ours, optimizer, of_model):
    refuses("not optimizer.step", optimizer.step)
    for part in model.layers[0], model.layers[0].input_norm:
        refuses("masters would not know", part.load_state_dict, {}, False)
    refuses("of the parameter_groups", of_model.step)
    refuses("or of another ZeRO", ladder(zero)[stage], zero.units_of(model, model.layers))
    ours.step(optimizer)
    refuses("not optimizer.step", optimizer.step)
    optimizer.zero_grad()
    refuses("call zero.zero_grad", llama_loss(model, *ROWS).backward)
    refuses("in no unit", ours.parameter_groups, [{"params": [nn.Parameter(torch.ones(2))]}])
    [group] = ours.parameter_groups([{"params": iter([model.lm_head.weight])}])
    assert len(group["params"]) == 1
    model.register_buffer("scale", torch.ones(2))
    whole = zero.full_state_dict(model, ours)
    one = {**whole, "scale": torch.ones(1)}  # copy_ would spread it
    refuses("scale", zero.load_full_state_dict, model, ours, one)
    whole["lm_head.weight"] = whole["lm_head.weight"][:1]
    refuses("lm_head.weight", zero.load_full_state_dict, model, ours, whole)
    refuses("'more'} are not in", zero.load_full_state_dict, model, ours, {**whole, "more": 0})
    ours.zero_grad()
    if stage == "3":
        with pytest.raises(RuntimeError, match="before ZeRO3"):
            copy.deepcopy(model)
        model = Llama(layers=1)
        model.layers[0].forward = lambda x: (x,)
        zero.ZeRO3(zero.units_of(model, model.layers))
        refuses("a Layer returns one tensor", model, ROWS[0])
    else:
        refuses("would not know", model.load_state_dict, model.state_dict())
        copy.deepcopy(model).load_state_dict(model.state_dict())  # an average of weights, say
        model.float().double()  # all is as before, but elsewhere
        refuses("before ZeRO", llama_loss(model, *ROWS).backward)
    model = Llama(layers=1).float()
    ours = ladder(zero)[stage](zero.units_of(model, model.layers), reduce_dtype=torch.float64)
    llama_loss(model, *ROWS).backward()
    ours.reduce()
    assert ours.clip_grad_norm_(1.0).dtype == torch.float64
    mixed = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).float())]
    refuses("one for each", zero.ZeRO1, [(mixed, [])])


def check_frozen_later(stage):
    """It stays, whatever momentum it has."""
    model = llama(0)
    ours = ladder(zero)[stage](zero.units_of(model, model.layers))
    optimizer = torch.optim.AdamW(ours.parameter_groups())
    for _ in range(2):
        before = ours.full_parameters()
        ours.zero_grad()
        llama_loss(model, *mine(ROWS)).backward()
        ours.reduce()
        ours.step(optimizer)
        after = ours.full_parameters()
        moved = {p for p in after if not torch.equal(after[p], before[p])}
        assert moved == {p for p in after if p.requires_grad}
        model.layers[0].requires_grad_(False)


def test_steps():
    run_ranks(check_each, 1, check_misuse, [*"123"])
    run_ranks(check_identity, 2)
    run_ranks(check_each, 2, check_frozen_later, [*"123"])


def test_refused_flags():
    run_ranks(check_refused, 2, "zero", [
        ("--stage 2 --offload param", "needs --stage 3"),
        ("--batch 3 --accum 2", "2 micro-batches"),
        ("--impl idea --stage 2", "the idea is --stage 1"),
        ("--impl torch --save no/such", "no dry run"),
    ])


def test_what_is_held():
    """What stages 2 and 3 buy, as part 2 says: megabytes."""
    reports = alone("zero", *[["--dry-run", "2", "--stage", stage] for stage in "123"])
    held = []
    for report in reports:
        memory = report["ranks"][0]["memory"]
        held.append(sum(memory[kind] for kind in ("parameters", "gradients", "optimizer")) / 1e6)
    text = (ROOT / "zero.py").read_text()
    assert f"{held[0]:.1f} MB held -> {held[1]:.1f}" in text and f"{held[2]:.1f} MB held" in text
