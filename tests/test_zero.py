"""zero.py: its ladder around a model of others, its scripts, their costs, what is refused."""
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import zero
from common import adamw, clip_gradients
from conftest import (
    PROOF, SMALL, alone, check_bug_shows, check_each, check_equal, check_refused, copied,
    dry_run_agrees, idea, rewritten, run_ranks, run_script, textbook)
from others import (
    Llama, added_in_fp32, bf16_llama, bf16_rows, compare, compare_fp32, into, llama_loss,
    token_rows)


def llama(tied=False):
    """Its layers are recomputed, and have a parameter that nobody uses."""
    model = Llama(layers=2, tied=tied)
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        layer.unused = nn.Parameter(torch.ones(3))
    return model


def mine(rows):
    return [t.chunk(dist.get_world_size())[dist.get_rank()] for t in rows]


def ladder(module):
    return {1: module.ZeRO1, 2: module.ZeRO2, 3: module.ZeRO3}


def check_copy(stage, tied=False, offload="none", sums="last", plant=None, old="", new=""):
    """Two steps of two micro-batches equal one process's, whatever ranks begin with.

    sums: after each backward, or the last one (stages 2 and 3 always sum each).
    """
    module = copied("zero", old=old, new=new)
    if plant:
        plant(module)
    torch.manual_seed(0)
    plain = llama(tied)
    torch.manual_seed(dist.get_rank())
    model = llama(tied)
    for p in model.parameters():
        p.grad = torch.ones_like(p)  # of no step here
    ours = ladder(module)[stage](module.units_of(model, model.layers), offload=offload)
    reference = adamw(plain.parameters(), 1e-2)
    [group] = ours.parameter_groups()
    optimizers = [adamw(group["params"][first::2], 1e-2) for first in range(2)]
    rng = torch.Generator().manual_seed(1)
    for _ in range(2):
        ours.zero_grad()
        for p in plain.parameters():
            p.grad = torch.zeros_like(p)
        for number in range(2):
            rows = token_rows(rng, 4)
            llama_loss(plain, *rows).backward()
            ours.sync = stage >= 2 or number == 1 or sums == "each"
            llama_loss(model, *mine(rows)).backward()
            ours.reduce()
        compare(list(ours.full_gradients().values()), [p.grad for p in plain.parameters()])
        norm = clip_gradients(plain.parameters(), 1.0)
        torch.testing.assert_close(ours.clip_grad_norm_(1.0), norm, rtol=1e-10, atol=0)
        reference.step()
        for optimizer in optimizers:
            ours.step(optimizer)
        with torch.no_grad():  # an evaluation in between leaves nothing stale
            model(rows[0])
        compare(list(ours.full_parameters().values()), [p.data for p in plain.parameters()])
    check_load(module, model, ours, tied, rows[0])


def check_load(module, model, ours, tied, tokens):
    torch.manual_seed(0)
    other = llama(tied)
    module.load_full_state_dict(model, ours, other.state_dict())
    compare(module.full_state_dict(model, ours), dict(other.state_dict()))
    compare([part.master.data for part in ours.parts], [part.value for part in ours.parts])
    with torch.no_grad():
        compare(model(tokens), other(tokens))


@pytest.mark.parametrize("world, cases", [
    (1, [(3,)]),
    (2, [(1, False, "optimizer"), (1, True, "none", "each"), (2, True), (3, True),
         (3, False, "param")]),
    (4, [(1,), (3,)]),
])
def test_copy(world, cases):
    run_ranks(check_each, world, check_copy, cases)


def use_first(zero, unit, first={}):  # noqa: B006 (it remembers)
    unit.wait()
    unit.full.copy_(first.setdefault(unit, unit.full.clone()))


# a method of ZeRO, when something else is done, what, and the stage that shows it
PLANTED = {
    "only the last micro-batch counts": (
        "start_sum", "before", lambda zero, unit: unit.grad.zero_(), 2),
    "gradients are replaced": ("ready", "before", lambda zero, unit, p: unit.slots[p].zero_(), 1),
    "averaged over ranks": ("keep_sum", "after", lambda zero, unit: unit.grad.div_(2), 1),
    "a sum waits for nothing": ("ready", "before", lambda zero, unit, p: unit.missing.clear(), 1),
    "what was sent is sent again": ("keep_sum", "instead", lambda zero, unit: None, 1),
    "what was gathered first is used for ever": ("fetch", "after", use_first, 3),
    "a rank clips by the norm of its chunk": ("all_reduce", "left out", None, 2),
    "ranks begin with weights of their own": ("broadcast", "left out", None, 1),
}


def check_planted(what):
    *bug, stage = PLANTED[what]
    owner = {1: "ZeRO1", 2: "ZeRO2", 3: "ZeRO3"}[stage]
    with pytest.raises(AssertionError):
        check_copy(stage, sums="each", plant=into(owner, *bug))


def check_planted_in_load(stage, line):
    with pytest.raises(AssertionError):
        check_copy(stage, offload="optimizer", old=line, new="pass")


def test_planted():
    run_ranks(check_each, 2, check_planted, [(what,) for what in PLANTED])
    run_ranks(check_each, 2, check_planted_in_load, [
        (1, "t.data.copy_(state[name])"), (3, "part.value.copy_(numbers)"),
        (1, "part.master.data.copy_(numbers)")])


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


@pytest.mark.parametrize("old, new", [
    ("reduce_scatter(self.shard.grad, self.buffer, group=self.group)", "pass"),
    ("dist.all_reduce(square, group=self.group)", "pass"),
    ("all_gather(self.full, self.shard.detach(), group=self.group)", "pass"),
    ("zero.buffer.zero_()", "pass"),
    ("place.copy_(p.detach().flatten())", "pass"),
    ('reduction="sum") / valid', 'reduction="mean")'),
])
def test_planted_in_the_idea(old, new):
    check_bug_shows("zero", 2, "--impl", "idea", plant=partial(rewritten, old, new))


def check_the_idea_begins_alike():
    torch.manual_seed(dist.get_rank())
    model = llama()
    idea("zero").IdeaOfZeRO1(model)
    torch.manual_seed(0)
    compare([p.data for p in model.parameters()], [p.data for p in llama().parameters()])


def test_the_idea_begins_alike():
    run_ranks(check_the_idea_begins_alike, 2)


def test_resumes(tmp_path):
    """In another stage; and in bf16 to the bit, since the fp32 masters are what is saved."""
    run_script("zero", 3, *PROOF, "--stage", "3", "--no-check", "--save", str(tmp_path))
    report = check_equal("zero", 2, "--stage", "1", "--offload", "optimizer", "--steps", "4",
                         "--resume", str(tmp_path))
    assert len(report["loss"]) == 2
    flags = [*SMALL, "--no-check", "--dtype", "bf16", "--stage", "3", "--steps", "3"]
    place = tmp_path / "bf16"
    whole = run_script("zero", 2, *flags, "--save", str(place), "--save-every", "2")
    rest = run_script("zero", 2, *flags, "--resume", str(place / "2"))
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
    batches = bf16_rows(8)
    ours.zero_grad()
    for number, rows in enumerate(batches[dist.get_rank()::2], 1):
        ours.sync = stage >= 2 or number == 4
        llama_loss(model, *rows).backward()
        ours.reduce()
    found = {names[p]: gradient for p, gradient in ours.full_gradients().items()}
    compare_fp32(found, added_in_fp32(batches))
    ours.step(optimizer)
    for part, old in zip(ours.parts, before):
        assert torch.equal(part.master, old - part.grad)
        assert torch.equal(part.value, part.master.bfloat16())


def test_fp32_sums():
    run_ranks(check_each, 2, check_fp32_sums, [(1,), (2,), (3,)])


def check_overlap():
    """A unit is gathered before the one in front of it computes; sums begin during backward, and
    two units at most have memory. Between steps a parameter is empty, and to read it is safe."""
    module = copied("zero")
    model = Llama(layers=2)
    begun = []  # [(what, of which unit)]
    most = []  # units with memory then

    def has_memory(unit):
        return unit.full.untyped_storage().size() > 0

    def note(what, zero, unit):
        if what == "sum" or not has_memory(unit):
            begun.append((what, zero.units.index(unit)))

    def count(what, zero, unit):
        has = has_memory if what == "gather" else lambda unit: unit.buffer is not None
        most.append(sum(map(has, zero.units)))

    for what, name in ("gather", "fetch"), ("sum", "start_sum"):
        into("ZeRO3", name, "before", partial(note, what))(module)
        into("ZeRO3", name, "after", partial(count, what))(module)
    ours = module.ZeRO3(module.units_of(model, model.layers))
    for _ in range(2):
        assert all(p.numel() == p.clone().numel() == 0 for p in model.parameters())
        with pytest.raises(AssertionError, match="full_parameters"):
            model.state_dict()
        ours.zero_grad()
        begun.clear()
        llama_loss(model, *mine(token_rows(torch.Generator(), 4))).backward()
        assert begun[-1] == ("sum", 0)  # before reduce()
        ours.reduce()
    assert begun == [
        ("gather", 0), ("gather", 1), ("gather", 2), ("gather", 3), ("gather", 2), ("sum", 3),
        ("gather", 1), ("sum", 2), ("sum", 1), ("sum", 0)]
    assert max(most) == 2


def test_overlap():
    run_ranks(check_overlap, 2)


def check_turns(ZeRO, at_once, turns):
    """optimizer.step() is called for one unit after another, or with at_once for all together."""
    model = Llama(layers=2)
    ours = ZeRO(zero.units_of(model, model.layers))
    optimizer = torch.optim.AdamW(ours.parameter_groups())
    stepped = []  # by each call, the units whose masters have gradients

    def note(*_):
        stepped.append([number for number, unit in enumerate(ours.units)
                        if any(part.master.grad is not None for part in unit.parts)])

    optimizer.register_step_pre_hook(note)
    llama_loss(model, *token_rows(torch.Generator(), 2)).backward()
    ours.reduce()
    ours.step(optimizer, at_once)
    assert stepped == turns


def test_turns():
    turns = (False, [[0], [1], [2], [3]]), (True, [[0, 1, 2, 3]])
    run_ranks(check_each, 1, check_turns, [(ZeRO, *t) for ZeRO in ladder(zero).values()
                                           for t in turns])


def check_misuse():
    for ZeRO in ladder(zero).values():
        model = Llama(layers=1)
        ours = ZeRO(zero.units_of(model, model.layers))
        optimizer = torch.optim.SGD(ours.parameter_groups(), 0.1)
        rows = token_rows(torch.Generator(), 2)
        llama_loss(model, *rows).backward()
        with pytest.raises(AssertionError, match="call reduce"):
            ours.step(optimizer)
        with pytest.raises(AssertionError, match="reduce.. comes first"):
            ours.clip_grad_norm_(1.0)
        with pytest.raises(AssertionError, match="call reduce"):
            ours.zero_grad()  # it would forget some of them alone
        with pytest.raises(AssertionError, match="call reduce"):
            llama_loss(model, *rows).backward()
        ours.reduce()
        before = [part.grad.clone() for part in ours.parts]
        ours.reduce()  # once more: there is nothing to add
        ours.clip_grad_norm_(1e9)  # far away: nothing is scaled
        torch.testing.assert_close([part.grad for part in ours.parts], before, rtol=0, atol=0)
        with pytest.raises(AssertionError, match="not optimizer.step"):
            optimizer.step()
        with pytest.raises(AssertionError, match="of zero.parameter_groups"):
            torch.optim.SGD(model.parameters(), 0.1).step()
        ours.step(optimizer)
        with pytest.raises(AssertionError, match="in no unit"):
            ours.parameter_groups([{"params": [nn.Parameter(torch.ones(2))]}])
    mixed = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).float())]
    with pytest.raises(AssertionError, match="each dtype"):
        zero.ZeRO1([(mixed, [])])


def test_misuse():
    run_ranks(check_misuse, 1)


def test_refused_flags():
    run_ranks(check_refused, 2, "zero", [(flags.split(), words) for flags, words in [
        ("--stage 2 --offload param", "needs --stage 3"),
        ("--batch 3 --accum 2", "2 micro-batches"),
        ("--impl idea --stage 2", "the idea is --stage 1"),
        ("--impl torch --save no/such", "no dry run"),
    ]])
