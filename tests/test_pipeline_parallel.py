"""pipeline_parallel.py: its schedules on paper, and trained."""
import itertools
import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import pipeline_parallel
from conftest import (
    ROOT, SMALL, alone, check_each, check_equal, check_refused, copied, dry_run_agrees, idea,
    run_ranks, textbook)
from harness.timeline import chunks, costs, grid, in_flight, longest, simulate
from others import VOCABULARY, Llama
from pipeline_parallel import (
    SCHEDULES, Mail, chunks_of, full_gradients, full_state_dict, make_plans)

LLAMA = ("--model", "llama-toy")
TORCHS = "zb-v" if torch.__version__ >= (2, 13) else "gpipe"  # see refuse_at_work


# ---- schedules, without processes ----------------------------------------------


def cases(ranks, microbatches):
    for name, p, m in itertools.product(SCHEDULES, ranks, microbatches):
        needed = {"interleaved": m % p == 0, "dualpipe-v": m >= 2 * p}
        if needed.get(name, True):
            yield name, p, m, chunks_of(name, 3)


def check_complete(m, plan):
    """Every action once; F, B and W of a micro-batch in this order."""
    at = {action: i for i, action in enumerate(plan)}
    assert len(at) == len(plan)
    before = {"B": "F", "W": "B", "U": "B"}
    for kind, microbatch, stage in at:
        if kind in before:
            assert at[before[kind], microbatch, stage] < at[kind, microbatch, stage]
    count = Counter(action.kind for action in plan)
    assert count["F"] == count["B"] == m * chunks(plan)
    assert count["U"] in (0, m - 1)


def check_promised(name, p, m, v, plans):
    """Micro-batches in flight on each rank and the bubble as a time, as the docstring has them."""
    times = {"zb-v": (1, 1, 1), "dualpipe-v": (1, 1, 1)}
    F, B, W = times.get(name, (2, 2, 1.5))
    whole = F + B + W
    played = simulate(plans, costs(plans, F, B, W))
    for r, plan in enumerate(plans):
        table = {
            "naive": (1, m * (p - 1) * whole),
            "gpipe": (m, (p - 1) * whole),
            "interleaved": (p + (p - 1 - 2 * r) / v, (p - 1) * whole / v),
            "bfs": (m, (p - 1) * whole / v),
            "zb-h1": (p, (p - 1) * (F + B - W)),
            "zb-h2": (2 * p - 1, (p - 1) * (F + B - 2 * W)),
            "zb-v": (p, 0),
            "dualpipe-v": (p + 0.5, (p - 1) * F / 2),
        }
        flying, bubble = table.get(name, (p - r, (p - 1) * whole))
        assert in_flight(plan) == pytest.approx(flying)
        assert longest(played) - m * whole == pytest.approx(bubble, abs=1e-9)


def test_every_schedule_is_complete_and_keeps_what_is_promised():
    for name, p, m, v in cases(range(1, 6), [1, 3, 10]):
        plans = make_plans(name, p, m, v)
        for plan in plans:
            check_complete(m, plan)
        if m >= 2 * p - 1:
            check_promised(name, p, m, v, plans)


def test_the_search_finds_what_is_published():
    """Qi 2023, tables 5 and 9: 1.5B, p = 8, m = 24, twice the memory of 1F1B."""
    flags = "--simulate --schedule auto --pp 8 --micro 24 --limit 16 --width 2304 --heads 24"
    [report] = alone("pipeline_parallel", (
        *flags.split(), "--seq", "1024", "--times", "18.522,18.086,9.337,0.601"))
    assert round(report["bubble_rate"], 4) == 0.0433


def play(mail, plan):
    for kinds in ("FBWU", "F"):
        actions = [action for action in plan if action.kind in kinds]
        mail.open(actions)
        for action in actions:
            mail.take(action)
            mail.put(action, torch.empty(1, dtype=torch.float32))
        mail.finish_send()
        assert not mail.inbox and not mail.coming


def deliver(plans, monkeypatch):
    """The Mail of all ranks, in threads, with transfers that end when both ranks have come."""
    lock = threading.Lock()
    count = Counter()  # {(operation, link): how many there were}
    begun = defaultdict(threading.Event)  # {(operation, link, number)}
    other = {dist.isend: dist.irecv, dist.irecv: dist.isend}

    def begin(self, operation, tensor, peer, link):
        with lock:
            number = count[operation, link]
            count[operation, link] += 1
            begun[operation, link, number].set()
            met = begun[other[operation], link, number]
        return SimpleNamespace(wait=lambda: met.wait(20) or pytest.fail("deadlock"))

    monkeypatch.setattr(Mail, "begin", begin)
    monkeypatch.setattr(dist, "get_backend", lambda: "fake")
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: range(len(plans)))
    mails = []
    for rank in range(len(plans)):
        monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
        mails.append(Mail(plans, (1,), torch.float32, "cpu"))
    with ThreadPoolExecutor(len(plans)) as pool:
        list(pool.map(play, mails, plans))


def test_no_schedule_ever_blocks(monkeypatch):
    for case in cases((2, 3, 4), (1, 4, 12)):
        deliver(make_plans(*case), monkeypatch)


def test_pictures_are_what_the_schedules_do():
    text = (ROOT / "pipeline_parallel.py").read_text()
    text = text.replace("    U ", "    ")  # an update takes no time: no grid draws it
    for name in SCHEDULES:
        plans = make_plans(name, 2, {"naive": 2, "bfs": 2}.get(name, 4))
        v = chunks(plans[0])
        for row in grid(simulate(plans, costs(plans, v, v, v))).split("\n"):
            assert row.strip() in text, name


# ---- trained: parts 1 and 2 alone, and a model that is not ours --------------------------


def stranger():
    """Embedding and head are tied."""
    torch.manual_seed(0)
    inner = [nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True) for _ in range(6)]
    model = nn.Sequential(nn.Embedding(11, 8), *inner, nn.Linear(8, 11, bias=False))
    model[-1].weight = model[0].weight
    return model


def batch_of(step):
    """-> micro-batches, loss_of(output, m)"""
    ids = torch.randint(11, (16, 6), generator=torch.Generator().manual_seed(step))
    targets = ids[:, 1:].split(2)

    def loss_of(out, m):
        return F.cross_entropy(out.flatten(0, 1), targets[m].flatten(), reduction="sum") / 80
    return ids[:, :-1].split(2), loss_of


def plain_step(plain, optimizer, inputs, loss_of, layers):
    loss = sum(loss_of(plain(x), m) for m, x in enumerate(inputs))
    loss.backward()
    return loss.detach()


def stale_step(plain, optimizer, inputs, loss_of, layers):
    """PipeDream. versions[n] are the weights after n updates: in micro-batch m stage r of p, a
    range of layers, has seen those of all but the last p - r micro-batches before it and itself."""
    named = dict(plain.named_parameters())
    names = [[name for name in named if int(name.split(".")[0]) in own] for own in layers]
    tied = plain[0].weight
    kept = torch.zeros_like(tied)
    versions = []
    losses = []
    for m, x in enumerate(inputs):
        if m > 0:  # the update after the micro-batch before; that of the tied one is at the end
            kept += tied.grad
            tied.grad = None
            for own in names:
                nn.utils.clip_grad_norm_([named[name] for name in own], 0.5)
            optimizer.step()
        versions.append({name: p.detach().clone().requires_grad_() for name, p in named.items()})
        seen = {}
        for rank, own in enumerate(names):
            version = versions[max(0, m - (len(names) - 1 - rank))]
            seen.update({name: version[name] for name in own})
        losses.append(loss_of(torch.func.functional_call(plain, seen, (x,)), m))
        for name, grad in zip(seen, torch.autograd.grad(losses[-1], list(seen.values()))):
            named[name].grad = grad
    tied.grad += kept
    return sum(losses).detach()


def piped(module, name, dp):
    """-> this rank's stages of the stranger, all stages, a Mail, the layers of each stage, plans"""
    model = stranger()
    model[0].weight.data += dist.get_rank()  # copies of a tied one begin as the first rank's
    p = dist.get_world_size() // dp
    plans = module.make_plans(name, p, 8)
    size = 8 // len(module.homes(plans))
    layers = [range(first, first + size) for first in range(0, 8, size)]
    whole = [model[own.start:own.stop] for own in layers]
    pipelines = [list(range(copy, p * dp, dp)) for copy in range(dp)]
    stages = module.Stages(whole, plans, pipelines if dp > 1 else None)
    group, _ = dist.new_subgroups_by_enumeration(pipelines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda: "nccl")  # then each link has a group of its own
        links = module.make_links(plans, pipelines)
        mail = module.Mail(plans, (2, 5, 8), torch.float64, "cpu", group, links)
    return stages, whole, mail, layers, plans


def check_copy(name, plant=None, dp=1):
    """2 steps with clipping equal one process's. dp: so many pipelines share the batch."""
    module = pipeline_parallel if name == "pipedream" else copied("pipeline_parallel")
    if plant:
        plant(module)
    close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
    plain = stranger()
    stages, whole, mail, layers, plans = piped(module, name, dp)
    called = {p: n for stage in whole[::-1] for n, p in stage.named_parameters()}
    reference_step = stale_step if name == "pipedream" else plain_step
    optimizer = torch.optim.AdamW(stages.parameters(), 1e-2, eps=1e-5)
    reference = torch.optim.AdamW(plain.parameters(), 1e-2, eps=1e-5)
    if name == "pipedream":
        pipeline = module.PipeDream(stages, plans, mail, optimizer, 0.5)
    else:
        pipeline = module.SplitPipeline(stages.here, plans, mail)
    copy = dist.get_rank() % dp
    for step in range(2):
        batches = [batch_of(2 * step + number) for number in range(dp)]
        optimizer.zero_grad()
        reference.zero_grad()
        loss = pipeline.step(*batches[copy])
        dist.all_reduce(loss)
        close(loss, sum(reference_step(plain, reference, *batch, layers) for batch in batches))
        norm = stages.sum_and_clip(0.5)
        close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        optimizer.step()
        reference.step()
        wanted = {name: q.grad for name, q in plain.named_parameters()}
        close(full_gradients(stages, called, mail.group), wanted)
        close(full_state_dict(stages, mail.group), dict(plain.state_dict()))


@pytest.mark.parametrize("world, names", [
    (1, ["interleaved"]),
    (2, SCHEDULES),
    (4, ["interleaved", "zb-h2", "zb-v", "dualpipe-v", "pipedream"])])
def test_every_schedule_equals_one_process(world, names):
    run_ranks(check_each, world, check_copy, [(name,) for name in names])


def check_chain():
    """A chain's stages are the whole model, in pieces: its own forward, parameters by its names."""
    module = copied("pipeline_parallel")
    model = Llama(layers=3, tied=True)
    chain = module.Chain(first=["embed_tokens"], layers="layers", last=["norm", "lm_head"],
                         call=lambda forward, x: forward(x)["logits"])
    stages = module.carve(model, chain, [0, 1, 2])
    x = torch.arange(8).view(2, 4) % VOCABULARY
    y = x
    for stage in stages:
        y = stage(y)
    assert torch.equal(y, model(x)["logits"])
    names = {name for stage in stages for name, _ in stage.named_parameters()}
    assert names == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert "forward" not in vars(model) and len(model.layers) == 3


def test_a_chain_is_cut_into_stages():
    run_ranks(check_chain, 1)


def test_copies_of_a_pipeline_are_summed():
    run_ranks(check_each, 4, check_copy, [(name, None, 2) for name in ("1f1b", "zb-v")])


def others_on_meta(module):
    """Gives Stages those of other ranks on the meta device."""

    class OfMeta(module.Stages):
        def __init__(self, whole, plans, pipelines):
            for stage, rank in module.homes(plans).items():
                if rank != dist.get_rank():
                    whole[stage].to("meta")
            first = whole[0][0]
            last = whole[-1][-1]
            if first.weight.is_meta:  # to() has untied them
                first.weight = last.weight
            else:
                last.weight = first.weight
            super().__init__(whole, plans, pipelines)
            assert not any(p.is_meta for p in self.parameters())
    module.Stages = OfMeta


def test_stages_of_other_ranks_may_be_on_the_meta_device():
    cases = [(name, others_on_meta) for name in ("1f1b", "zb-v", "pipedream")]
    run_ranks(check_each, 2, check_copy, cases)


# Planted bugs: what is done after a method, and the schedule that shows it.
PLANTED = {
    "copies of a tied parameter keep their own gradients": (
        "Stages", "__init__", lambda stages, *_: stages.shared.clear(), "1f1b"),
    "the norm has them twice": (
        "Stages", "__init__", lambda stages, *_: stages.counted.extend(stages.shared), "zb-h2"),
    "gradients are not added up": (
        "Pipeline", "forward", lambda self, m, stage, *_: self.modules[stage].zero_grad(), "naive"),
    "a W forgets a layer": (
        "SplitPipeline", "backward", lambda self, m, stage, _: self.ws[m, stage].pop(), "zb-h1"),
    "the receiver has an order of its own": (
        "Mail", "open", lambda mail, *_: mail.coming.rotate(-1), "gpipe"),
}


def check_planted(what):
    owner, method, change, name = PLANTED[what]

    def plant(module):
        do = getattr(getattr(module, owner), method)

        def broken(self, *args):
            result = do(self, *args)
            change(self, *args)
            return result
        setattr(getattr(module, owner), method, broken)
    with pytest.raises(AssertionError):
        check_copy(name, plant)


def test_planted_bugs_are_seen():
    run_ranks(check_each, 2, check_planted, [(what,) for what in PLANTED])


# ---- the idea, around a model of somebody else ------------------------------------


def check_idea(schedule="1f1b", *bug):
    """2 steps equal one process's, with a tied embedding."""
    module = idea("pipeline_parallel", *bug)
    rank = dist.get_rank()
    p = dist.get_world_size()
    plain = stranger()
    model = stranger()
    stage = model[rank * 8 // p:(rank + 1) * 8 // p]
    ends = dist.new_group(sorted({0, p - 1}))
    shared = {model[0].weight: ends} if rank in (0, p - 1) else {}
    close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
    optimizer = torch.optim.AdamW(stage.parameters(), 1e-2, eps=1e-5)
    reference = torch.optim.AdamW(plain.parameters(), 1e-2, eps=1e-5)
    plan = module.idea_plan(8, warmup=8 if schedule == "gpipe" else p - 1 - rank)
    trained = module.IdeaOfPipeline(
        stage, shared, torch.empty(2, 5, 8), dist.group.WORLD, dist.new_group())
    for step in range(2):
        ids = torch.randint(11, (16, 6), generator=torch.Generator().manual_seed(step))
        x = ids[:, :-1]
        y = ids[:, 1:]
        loss, norm = module.idea_step(trained, optimizer, x, y, 80, 0.5, plan)
        dist.all_reduce(loss)
        reference.zero_grad()
        close(loss, plain_step(plain, reference, *batch_of(step), None))
        close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        reference.step()
        first = rank * 8 // p
        wanted = plain[first:first + 8 // p]
        for ours, theirs in zip(stage.parameters(), wanted.parameters(), strict=True):
            close(ours.grad, theirs.grad)
            close(ours.data, theirs.data)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_idea_equals_one_process(world):
    run_ranks(check_each, world, check_idea, [("1f1b",), ("gpipe",)])


def check_idea_planted(old, new):
    with pytest.raises(AssertionError, match="not close"):
        check_idea("1f1b", old, new)


IDEA_PLANTED = [
    ("        dist.all_reduce(p.grad, group=group)", "        pass"),
    ("if p not in model.shared or model.pp.rank() == 0]", "]"),
    ("    dist.all_reduce(square, group=model.pp)", "    pass"),
    ("loss += y.detach()", "loss = y.detach()"),
    ("    optimizer.zero_grad()\n", ""),
    ("y.backward(dy)", "y.backward(None if dy is None else dy / 2)"),
    ("targets[m]", "targets[0]"),
    ('reduction="sum") / valid', 'reduction="mean")'),
    ("if 0 <= m < microbatches]", 'if 0 <= m < microbatches - (kind == "B")]'),
]


def test_bugs_planted_in_the_idea_are_seen():
    run_ranks(check_each, 2, check_idea_planted, IDEA_PLANTED)


# ---- the toy GPT: proof, cost, links, refusals ------------------------------------


@pytest.mark.parametrize("world, flags", [
    (4, [*LLAMA, "--schedule", "zb-h1", "--micro", "8", "--vocab", "257", "--eval-every", "1"]),
    (2, ["--schedule", "auto", "--limit", "3"]),
    (1, ["--impl", "idea"]),
    (2, [*LLAMA, "--impl", "all", "--schedule", "gpipe"]),
    (4, ["--impl", "idea", "--model", "qwen3-toy", "--micro", "2"]),
    (2, ["--schedule", "zb-v", "--optimizer", "muon", "--model", "qwen3-toy"]),
    (2, ["--schedule", "zb-v", "--train", "1.attn.v.bias|blocks.[23]"]),
    (2, [*LLAMA, "--impl", "both", "--schedule", TORCHS, "--steps", "3"])])
def test_script_proves_itself(world, flags):
    report = check_equal("pipeline_parallel", world, "--layers", "4", *flags)
    assert "both" not in flags or report["measured_ms"] > 0 and report["planned_ms"] > 0


def test_what_is_saved_goes_on_with_any_schedule(tmp_path):
    flags = ("--layers", "4", "--save", str(tmp_path))
    check_equal("pipeline_parallel", 2, *flags, "--layers-per-stage", "0,4")
    check_equal("pipeline_parallel", 2, *flags, "--steps", "4", "--schedule", "zb-v", "--resume",
                str(tmp_path))


def test_activations_are_what_the_schedule_promises():
    """On rank 1 of 4. zb-h1's Ws wait, with a part of what 1f1b frees."""
    flags = (*SMALL, "--layers", "4", "--micro", "8", "--dry-run", "4", "--rank", "1")
    names = ("naive", "gpipe", "1f1b", "zb-h1")
    reports = alone("pipeline_parallel", *[(*flags, "--schedule", name) for name in names])
    kept = [report["ranks"][0]["memory"]["activations"] for report in reports]
    one = kept[0]
    assert kept[1:3] == [8 * one, 3 * one]
    assert 3 * one < kept[3] <= 1.03 * 4 * one


def test_peaks_are_those_of_the_table():
    """What each addition buys, on ranks 0, 0, 1, 1 of 2: megabytes."""
    runs = [(0, "--impl", "idea"), (0,), (1,), (1, "--schedule", "zb-h1")]
    flags = ("--micro", "16", "--batch", "16", "--dry-run", "2", "--rank")
    reports = alone("pipeline_parallel", *[(*flags, str(rank), *more) for rank, *more in runs])
    peaks = [f"{report['ranks'][0]['memory']['peak'] / 1e6:.2f}" for report in reports]
    text = (ROOT / "pipeline_parallel.py").read_text()
    assert f"{peaks[0]} -> {peaks[1]} MB" in text and f"{peaks[2]} -> {peaks[3]} MB" in text


@pytest.mark.parametrize("world, flags, rank", [
    (4, ["--schedule", "1f1b"], 1),
    (4, ["--impl", "idea"], 3),
    (2, [*LLAMA, "--schedule", "zb-v"], 0)])
def test_cost(world, flags, rank):
    textbook(dry_run_agrees("pipeline_parallel", world, "--layers", "4", *flags, ranks=[rank]))


def test_what_cannot_run_is_refused():
    run_ranks(check_refused, 2, "pipeline_parallel", [(flags.split(), words) for flags, words in [
        ("--layers 1", "--layers 1 for 2 stages"),
        ("--micro 3", "--micro 3 cannot cut --batch 8"),
        ("--schedule interleaved --micro 3 --batch 9", "interleaved takes multiples of 2"),
        ("--schedule dualpipe-v --micro 2", "dualpipe-v needs 4 or more micro-batches, not 2"),
        ("--schedule pipedream --save NONE", "pipedream takes no --save"),
        ("--schedule naive --impl idea", "the idea has 1f1b and gpipe"),
        ("--schedule naive --impl torch", "torch has gpipe, 1f1b"),
        ("--impl torch --micro 1", "torch's 1f1b wants 2 or more"),
        ("--impl torch --schedule zb-h1 --micro 5 --batch 5", "take a multiple of 2"),
        ("--layers-per-stage 1,1", "they are 2, --layers 4"),
        ("--limit 4", "--limit is for --schedule auto, not for 1f1b"),
        ("--pp 4", "--pp is for --simulate only"),
    ]])
