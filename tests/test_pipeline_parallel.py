"""pipeline_parallel.py: its schedules on paper, and trained."""
import copy
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
from common import adamw
from conftest import (
    PROOF, ROOT, SMALL, alone, check_differs, check_each, check_equal, check_refused, copied,
    dry_run_agrees, idea, run_ranks, run_script, textbook)
from harness.timeline import chunks, costs, grid, in_flight, longest, simulate
from others import VOCABULARY, Llama, compare, refuses
from pipeline_parallel import (
    SCHEDULES, Mail, Pipeline, SplitPipeline, Stages, chunks_of, make_plans)

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
    before = {"B": "F", "W": "B"}
    for kind, microbatch, stage in at:
        if kind in before:
            assert at[before[kind], microbatch, stage] < at[kind, microbatch, stage]
    count = Counter(action.kind for action in plan)
    assert count["F"] == count["B"] == m * chunks(plan)


def check_promised(name, p, m, v, plans):
    """Micro-batches in flight on each rank; the bubble and a step as times, as the docstring."""
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
    more = {"zb-h2": (p - 1) * F, "zb-v": (p - 1) * F / 2}  # of a step, from the first start on
    if name in more:
        assert max(done[-1][2] for done in played) - m * whole == pytest.approx(more[name])


def test_every_schedule_is_complete_and_keeps_what_is_promised():
    for name, p, m, v in cases(range(1, 6), [1, 3, 10]):
        plans = make_plans(name, p, m, v)
        for plan in plans:
            check_complete(m, plan)
        if m >= 2 * p - 1:
            check_promised(name, p, m, v, plans)


def play(mail, plan):
    for kinds in ("FBW", "F"):
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
    monkeypatch.setattr(pipeline_parallel, "make_links", lambda *_: None)
    mails = []
    for rank in range(len(plans)):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        mails.append(Mail(plans, (1,), torch.float32, "cpu", [range(len(plans))]))
    with ThreadPoolExecutor(len(plans)) as pool:
        list(pool.map(play, mails, plans))


def check_ws_without_a_split_pipeline():
    """Its Bs do all the work: Ws find none."""
    layer = nn.Linear(1, 1)
    mail = Mail(make_plans("zb-h1", 1, 2), (1,), torch.float64, "cpu")
    Pipeline({0: layer}, mail).step(torch.tensor([[2.0], [3.0]]), lambda y, m: y.sum())
    assert layer.weight.grad == 5 and layer.bias.grad == 2
    split = SplitPipeline({0: nn.Linear(1, 1)}, mail)
    x = torch.ones(1, requires_grad=True)
    y = 2 * x
    y.register_hook(lambda grad: 1 / 0)
    split.kept[0, 0] = x, torch.autograd.graph.get_gradient_edge(y)
    with pytest.raises(ZeroDivisionError):  # in a B, and somebody goes on
        split.backward(0, 0, None)
    assert pipeline_parallel.Split.later is None


def test_no_schedule_ever_blocks(monkeypatch):
    for case in cases((2, 3, 4), (1, 4, 12)):
        deliver(make_plans(*case), monkeypatch)


def test_pictures_are_what_the_schedules_do():
    text = (ROOT / "pipeline_parallel.py").read_text()
    for name in SCHEDULES:
        plans = make_plans(name, 2, {"naive": 2, "bfs": 2}.get(name, 4))
        v = chunks(plans[0])
        for row in grid(simulate(plans, costs(plans, v, v, v))).split("\n"):
            assert row.strip() in text, name


# ---- trained: parts 1 and 2 alone, and a model that is not ours --------------------------


def stranger():
    """Embedding and head are tied, and two layers in the middle, see ties()."""
    torch.manual_seed(0)
    inner = [nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True) for _ in range(6)]
    model = nn.Sequential(nn.Embedding(11, 8), *inner, nn.Linear(8, 11, bias=False))
    for one, other in ties(model):
        other.weight = one.weight
    inner[1].linear1.forward = partial(doubled, inner[1].linear1)
    return model


def ties(layers):
    """-> the pairs of modules that have one weight"""
    return [(layers[0], layers[7]), (layers[3].linear1, layers[4].linear1)]


def doubled(linear, x):
    """A forward that somebody has put in the place of a Linear's own, as for adapters."""
    return 2 * F.linear(x, linear.weight, linear.bias)


def batch_of(number):
    """-> x, y: 8 micro-batches of 2"""
    ids = torch.randint(11, (16, 6), generator=torch.Generator().manual_seed(number))
    return ids[:, :-1], ids[:, 1:]


# (x, y) -> inputs, loss_of
in_microbatches = partial(
    pipeline_parallel.in_microbatches, SimpleNamespace(microbatches=8), valid=80)


def plain_step(plain, optimizer, inputs, loss_of):
    loss = sum(loss_of(plain(x), m) for m, x in enumerate(inputs))
    loss.backward()
    return loss.detach()


def stale_step(plain, optimizer, inputs, loss_of, layers):
    """PipeDream. versions[n] are the weights after n updates: in micro-batch m stage r of p, a
    range of layers, has seen those of all but the last p - r micro-batches before it and itself.
    What is tied is updated once, at the end."""
    named = dict(plain.named_parameters())
    names = [[name for name in named if int(name.split(".")[0]) in own] for own in layers]
    kept = {one.weight: torch.zeros_like(one.weight) for one, _ in ties(plain)}
    versions = []
    losses = []
    for m, x in enumerate(inputs):
        if m > 0:  # the update after the micro-batch before
            for tied in kept:
                kept[tied] += tied.grad
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
    for tied in kept:
        tied.grad += kept[tied]
    return sum(losses).detach()


def check_steps(step, own, reference_step=plain_step, dp=1):
    """2 steps with clipping equal one process's: loss, norm, gradients, parameters.

    step(x, y) -> this rank's part of the loss, the norm. own: [(module, its layers)] of this rank
    """
    plain = stranger()
    reference = adamw(plain.parameters(), 1e-2)
    for number in range(2):
        batches = [batch_of(2 * number + copy) for copy in range(dp)]
        reference.zero_grad()
        loss, norm = step(*batches[dist.get_rank() % dp])
        dist.all_reduce(loss)
        compare(loss, sum(reference_step(plain, reference, *in_microbatches(*b)) for b in batches))
        compare(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        reference.step()
        for module, layers in own:
            wanted = plain[layers.start:layers.stop].parameters()
            for ours, theirs in zip(module.parameters(), wanted, strict=True):
                compare(ours.grad, theirs.grad)
                compare(ours.data, theirs.data)


def piped(module, name, dp):
    """-> this rank's stages of the stranger, a Mail, the layers of each stage, plans. Stages of
    other ranks are on the meta device."""
    model = stranger()
    model[0].weight.data *= 1 + dist.get_rank()  # copies of a tied one begin as the first rank's
    p = dist.get_world_size() // dp
    plans = module.make_plans(name, p, 8)
    size = 8 // len(module.homes(plans))
    layers = [range(first, first + size) for first in range(0, 8, size)]
    whole = [model[own.start:own.stop] for own in layers]
    pipelines = [list(range(copy, p * dp, dp)) for copy in range(dp)]
    others_to_meta(whole, module.homes(plans), place=dist.get_rank() // dp)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda: "nccl")  # then each link has a group of its own
        mail = module.Mail(plans, (2, 5, 8), torch.float64, "cpu", pipelines if dp > 1 else None)
    return module.Stages(whole, mail), mail, layers


def others_to_meta(whole, home, place):
    """Stages of other places go to the meta device, and what is tied is tied anew."""
    for number, stage in enumerate(whole):
        if home[number] != place:
            stage.to("meta")
    for one, other in ties([layer for stage in whole for layer in stage]):
        if one.weight.is_meta:
            one.weight = other.weight
        else:
            other.weight = one.weight


def check_copy(name, old="", new="", dp=1):
    """dp: so many pipelines share the batch."""
    module = pipeline_parallel
    if name not in ("dualpipe-v", "pipedream"):  # they are in part 3
        module = copied("pipeline_parallel", 2, old, new)
    stages, mail, layers = piped(module, name, dp)
    assert not any(p.is_meta for p in stages.parameters())
    optimizer = adamw(stages.parameters(), 1e-2)
    reference_step = plain_step
    if name == "pipedream":
        pipeline = module.PipeDream(stages, mail, optimizer, 0.5)
        reference_step = partial(stale_step, layers=layers)
    else:
        pipeline = module.SplitPipeline(stages.here, mail)
    train_step = pipeline_parallel.train_step
    step = partial(train_step, pipeline, stages, optimizer, valid=80, clip=0.5)
    own = [(stage, layers[number]) for number, stage in stages.here.items()]
    check_steps(step, own, reference_step, dp)


@pytest.mark.parametrize("world, cases", [
    (1, [("interleaved",)]),
    (2, list(zip(SCHEDULES))),
    (4, [("interleaved",), ("zb-h2",), ("zb-v",), ("dualpipe-v",), ("pipedream",),
         ("1f1b", "", "", 2), ("zb-v", "", "", 2)])])  # two pipelines, whose gradients are summed
def test_every_schedule_equals_one_process(world, cases):
    run_ranks(check_each, world, check_copy, cases)


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
    assert len(model.layers) == 3
    module.assert_carves(model, chain, torch.randn(2, 4, 12))
    with pytest.raises(AssertionError, match="name modules for what"):  # all stages would norm
        module.assert_carves(model, chain._replace(last=["lm_head"]), torch.randn(2, 4, 12))
    nothing = module.HandsOn()(x).unsqueeze(0)  # as GPT-2's positions are used
    assert nothing == 0 and (nothing + torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16
    model.layers[2].kind = "full"  # as a forward of transformers reads
    model.config = object()
    stage, _ = module.carve(model, chain, [2, 1])
    assert stage.layers[2].kind == "full"
    assert stage.config is model.config  # layers have the same
    assert module.HandsOn(torch.compile(model.layers[2])).kind == "full"
    whole = {name: t + 1 for name, t in model.state_dict().items()}
    for stage in stages:
        assert not stage.load_state_dict(whole, strict=False).missing_keys
    compare(model.state_dict(), whole)
    unknown = chain._replace(first=["embed"])
    with pytest.raises(AttributeError, match="no attribute 'embed'"):  # all stages would embed
        module.carve(model, unknown, [1, 2])
    model.scale = nn.Parameter(torch.ones(()))
    parameter = chain._replace(last=["scale"])
    refuses("scale is no module", module.carve, model, parameter, [1, 2])
    model.forward = partial(model.forward)
    refuses("replace it after carve", module.carve, model, chain, [1, 2])


def check_unused():
    layer = nn.Linear(2, 2)
    mail = Mail(make_plans("1f1b", 1, 1), (1,), torch.float32, "cpu", [[0], [1]])
    stages = Stages([layer], mail)
    if dist.get_rank() == 0:
        layer.weight.grad = torch.ones(2, 2)
        layer.bias.grad = torch.ones(2)
    stages.reduce()
    assert (layer.weight.grad == 1).all() and (layer.bias.grad == 1).all()


def check_computed_weights():
    """Each forward computes them anew, and its W goes back through that."""
    layer = nn.utils.spectral_norm(nn.Linear(2, 2))
    layer.eval()
    plain = copy.deepcopy(layer)
    mail = Mail(make_plans("zb-h1", 1, 2), (1, 2), torch.float32, "cpu")
    pipeline = SplitPipeline({0: layer}, mail)
    x = torch.ones(2, 1, 2)
    pipeline.step(x, lambda y, m: y.sum())
    plain(x).sum().backward()
    torch.testing.assert_close(layer.weight_orig.grad, plain.weight_orig.grad)


# ---- the idea, around a model of somebody else ------------------------------------


def check_idea(schedule="1f1b", *bug):
    module = idea("pipeline_parallel", *bug)
    rank = dist.get_rank()
    p = dist.get_world_size()
    model = stranger()
    size = 8 // p
    layers = range(rank * size, (rank + 1) * size)
    stage = model[layers.start:layers.stop]
    optimizer = adamw(stage.parameters(), 1e-2)
    shared = {}
    ranks_of_ties = [{0, p - 1}, {3 // size, 4 // size}]
    for (one, _), homes in zip(ties(model), ranks_of_ties):
        group = dist.new_group(sorted(homes))
        if rank in homes:
            shared[one.weight] = group
    trained = module.IdeaOfPipeline(
        stage, shared, torch.empty(2, 5, 8), dist.group.WORLD, dist.new_group())
    plan = module.idea_plan(8, warmup=8 if schedule == "gpipe" else p - 1 - rank)
    step = partial(module.idea_step, trained, optimizer, valid=80, clip=0.5, plan=plan)
    check_steps(step, [(stage, layers)])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_idea_equals_one_process(world):
    run_ranks(check_each, world, check_idea, [("1f1b",), ("gpipe",)])


# ---- planted bugs ------------------------------------------------------------------

PLANTED = [  # a check, the schedule that shows the bug, what stands in the place of what
    (check_idea, "1f1b", "dist.all_reduce(p.grad, group=group)  # partial (", "pass  # ("),
    (check_idea, "1f1b", "if p not in model.shared or model.shared[p].rank() == 0]", "]"),
    (check_idea, "1f1b", "    dist.all_reduce(square, group=model.pp)", "    pass"),
    (check_idea, "1f1b", "loss += y.detach()", "loss = y.detach()"),
    (check_idea, "1f1b", "    optimizer.zero_grad()\n", ""),
    (check_idea, "1f1b", "y.backward(dy)", "y.backward(None if dy is None else dy / 2)"),
    (check_idea, "1f1b", "targets[m]", "targets[0]"),
    (check_idea, "1f1b", 'reduction="sum") / valid', 'reduction="mean")'),
    (check_idea, "1f1b", "+ warmup for m in range(microbatches)",
     "+ warmup for m in range(microbatches - 1)"),
    (check_copy, "1f1b", "dist.all_reduce(p.grad, group=group)  # partial -> replicated", "pass"),
    (check_copy, "zb-h2", "dist.get_rank(self.shared[p]) == 0]", "True]"),
    (check_copy, "1f1b", "dist.all_reduce(square)  # partial -> replicated", "pass"),
    (check_copy, "1f1b", "dist.broadcast(p.data, group=group, group_src=0)", "pass"),
    (check_copy, "1f1b", "self.loss += y.detach()", "self.loss = y.detach()"),
    (check_copy, "naive", "        y = self.modules[stage](x)",
     "        self.modules[stage].zero_grad()\n        y = self.modules[stage](x)"),
    (check_copy, "zb-h1", "ws = self.ws.pop((m, stage))", "ws = self.ws.pop((m, stage))[:-1]"),
    (check_copy, "gpipe", "key=self.turn.get))", "key=self.turn.get, reverse=True))"),
]


def test_planted_bugs_are_seen():
    run_ranks(check_each, 2, check_differs, PLANTED)
    # what ranks 1 and 2 share would count nowhere
    in_the_middle = (check_idea, "1f1b", "model.shared[p].rank() == 0]", "model.pp.rank() == 0]")
    run_ranks(check_each, 4, check_differs, [in_the_middle])


# ---- the toy GPT: proof, cost, links, refusals ------------------------------------


@pytest.mark.parametrize("world, flags", [
    (4, "--model llama-toy --schedule zb-h1 --micro 8 --vocab 257 --eval-every 1"),
    (2, "--schedule auto --limit 3"),
    (1, "--impl idea"),
    (2, "--model llama-toy --impl all --schedule gpipe"),
    (4, "--impl idea --model qwen3-toy --micro 2"),
    (2, "--schedule zb-v --optimizer muon --model qwen3-toy"),
    (2, "--schedule zb-v --train 1.attn.v.bias|blocks.[23]"),
    (2, f"--model llama-toy --impl both --schedule {TORCHS} --steps 3")])
def test_script_proves_itself(world, flags):
    report = check_equal("pipeline_parallel", world, "--layers", "4", *flags.split())
    assert "both" not in flags or report["measured_ms"] > 0 and report["planned_ms"] > 0


def check_strides():
    """What ranks share begins as on the first one, though it lies in memory otherwise there."""
    both = nn.Linear(2, 3)
    saved = torch.arange(6.0).view(2, 3)
    if dist.get_rank() == 0:
        both.weight.data = saved.t()
    mail = Mail(make_plans("1f1b", 2, 1), (1,), torch.float64, "cpu")
    Stages([both, nn.Sequential(both)], mail)
    assert torch.equal(both.weight, saved.t())
    refuses("two stages have a weight", Stages, [both, nn.Linear(3, 3)], mail)
    alone = make_plans("1f1b", 1, 1)
    with pytest.raises(AssertionError, match="plans of 1 ranks for a pipeline of 2"):
        Mail(alone, (1,), torch.float64, "cpu")  # without pipelines
    refuses("1 stages for plans of 2", Stages, [both], mail)
    tok = nn.Embedding(2, 2)
    head = nn.Linear(2, 2)
    head.weight = tok.weight
    first = nn.ModuleDict({"tok": tok})
    last = nn.ModuleDict({"head": head})
    stages = Stages([first, last], mail)
    assert len(stages.names) == 1 + dist.get_rank()  # others' would keep their memory
    here = dict(stages.named_parameters())
    assert here["tok.weight"] is tok.weight  # on both
    both.tp = None  # as a cut one has it
    copies = Mail(alone, (1,), torch.float64, "cpu", [[0], [1]])
    refuses("take hybrid_3d.py", Stages, [both], copies)


@pytest.mark.parametrize("world, check", [
    (1, check_ws_without_a_split_pipeline), (1, check_chain), (1, check_computed_weights),
    (2, check_unused), (2, check_strides)])
def test_parts(world, check):
    run_ranks(check, world)


def no_split(module):
    module.Split.apply = None


def test_torchs_side_is_torchs():
    """Its schedules split Bs by themselves: they get plain Linears."""
    flags = "--layers 4 --impl torch --schedule zb-h1".split()
    report = run_script("pipeline_parallel", 2, *PROOF, *flags, plant=no_split)
    assert report["check"]["passed"]


def reports_of(flags, *runs):
    """Of dry runs -> what their rank holds."""
    reports = alone("pipeline_parallel", *[(*flags, *more) for more in runs])
    return [report["ranks"][0]["memory"] for report in reports]


def test_activations_are_what_the_schedule_promises():
    """On rank 1 of 3. zb-h1's Ws wait, with a part of what 1f1b frees."""
    flags = (*SMALL, *"--layers 3 --micro 5 --batch 5 --dry-run 3 --rank 1 --schedule".split())
    held = reports_of(flags, ["naive"], ["gpipe"], ["1f1b"], ["zb-h1"])
    one, gpipe, f1b1, zb_h1 = [memory["activations"] for memory in held]
    assert (gpipe, f1b1) == (5 * one, 2 * one)
    assert 2 * one < zb_h1 <= 1.03 * 3 * one


def test_peaks_are_those_of_the_table():
    """What each addition buys, on ranks 0, 0, 1, 1 of 2: megabytes."""
    flags = ("--micro", "8", "--dry-run", "2", "--rank")
    held = reports_of(flags, ["0", "--impl", "idea"], ["0"], ["1"], ["1", "--schedule", "zb-h1"])
    peaks = [f"{memory['peak'] / 1e6:.2f}" for memory in held]
    text = (ROOT / "pipeline_parallel.py").read_text()
    assert f"{peaks[0]} -> {peaks[1]} MB" in text and f"{peaks[2]} -> {peaks[3]} MB" in text


@pytest.mark.parametrize("world, flags, rank", [
    (4, "--schedule 1f1b", 1), (4, "--impl idea", 3), (2, "--model llama-toy --schedule zb-v", 0)])
def test_cost(world, flags, rank):
    flags = "--layers", "4", *flags.split()
    textbook(dry_run_agrees("pipeline_parallel", world, *flags, ranks=[rank]))


def test_what_cannot_run_is_refused():
    run_ranks(check_refused, 2, "pipeline_parallel", [
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
    ])
