"""pipeline_parallel.py: its schedules on paper, and trained."""
import itertools
import json
import re
import threading
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import pipeline_parallel
from conftest import (
    ROOT, check_refused, copied, dry_run_agrees, each, proves, run, textbook)
from harness.ledger import Ledger
from harness.timeline import (
    bubble_rate, chunks, costs, grid, in_flight, longest, simulate, span, typical_times)
from pipeline_parallel import (
    SCHEDULES, Action, Mail, Pipeline, homes, key, make_links, make_plans, search)

LLAMA = ("--model", "llama-toy")
SPLIT = ("zb-h1", "zb-h2", "zb-v", "auto")  # schedules in which every B leaves a W


def plans_of(name, p, m, v=2):
    if name == "auto":
        return search(p, m, p, partial(span, times=(1, 1, 1, 0.1)))
    return make_plans(name, p, m, v)


def cases(ranks, microbatches):
    stages = {"interleaved": [1, 2, 3], "bfs": [1, 3], "zb-v": [2], "dualpipe-v": [2]}
    for name, p, m in itertools.product([*SCHEDULES, "auto"], ranks, microbatches):
        needed = {"interleaved": m % p == 0, "dualpipe-v": m >= 2 * p}
        if needed.get(name, True):
            for v in stages.get(name, [1]):
                yield name, p, m, v


# ---- schedules, without processes ----------------------------------------------


def promised(name, p, m, v, rank):
    """Micro-batches in flight on a rank, as the docstring has them."""
    table = {
        "naive": 1,
        "gpipe": m,
        "bfs": m,
        "interleaved": min(m, p + (p - 1 - 2 * rank) / v),
        "zb-h1": min(m, p),
        "zb-h2": min(m, 2 * p - 1),
        "zb-v": min(m, p),
        "dualpipe-v": p + 0.5,
    }
    return table.get(name, min(m, p - rank))


def check_complete(name, m, plan):
    """Every action once; F, B and W of a micro-batch in this order."""
    at = {key(action): i for i, action in enumerate(plan)}
    assert len(at) == len(plan)
    split = {(a.microbatch, a.stage) for a in plan if a.kind == "W"}
    assert name not in SPLIT or len(split) == m * chunks(plan)
    for stage, microbatch in itertools.product({a.stage for a in plan}, range(m)):
        kinds = "FB"
        if (microbatch, stage) in split:
            kinds = "FBW"
        order = [at.pop((kind, microbatch, stage)) for kind in kinds]
        assert order == sorted(order)
    updates = {"pipedream": m - 1}
    assert len(at) == updates.get(name, 0)


def test_every_schedule_is_complete_and_keeps_what_is_promised():
    for name, p, m, v in cases(range(1, 7), (1, 3, 8, 12)):
        plans = plans_of(name, p, m, v)
        assert homes(plans).keys() == set(range(p * v))
        for rank, plan in enumerate(plans):
            check_complete(name, m, plan)
            if name == "auto" or (name == "zb-v" and m < 2 * p - 1):
                assert in_flight(plan) <= min(m, p)
            else:
                assert in_flight(plan) == pytest.approx(promised(name, p, m, v, rank), abs=1e-12)
        assert simulate(plans, lambda rank, action: 1.0)


def deliver(plans, monkeypatch):
    """Play the Mail of all ranks, in threads -> how many ended well. Transfers are at their
    strictest: each ends when both ranks have come to it."""
    local = threading.local()
    lock = threading.Lock()
    count = Counter()  # {(link, send or receive): how many there were}
    half = {}  # {(link, number): its Event} of transfers to which one rank has come
    done = []

    def begin(self, operation, tensor, peer, link):
        with lock:
            transfer = link, count[link, operation]
            count[link, operation] += 1
            both = half.pop(transfer, None)
            if both:
                both.set()
            else:
                half[transfer] = both = threading.Event()
        return SimpleNamespace(wait=lambda: both.wait(20) or pytest.fail("deadlock"))

    def play(rank):
        local.rank = rank
        mail = Mail(plans, list(range(len(plans))), None, {}, (1,), torch.float32, "cpu")
        for kinds in ("FBWU", "F"):
            mail.open(kinds)
            for action in [action for action in plans[rank] if action.kind in kinds]:
                mail.take(action)
                mail.put(action, torch.empty(1, dtype=torch.float32))
            mail.finish_send()
            assert not mail.here and not mail.coming
        done.append(rank)

    monkeypatch.setattr(dist, "get_rank", lambda group=None: local.rank)
    monkeypatch.setattr(Mail, "begin", begin)
    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(len(plans))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(done)


def test_no_schedule_ever_blocks(monkeypatch):
    for case in cases((2, 3, 6), (1, 4, 6, 12)):
        plans = plans_of(*case)
        assert deliver(plans, monkeypatch) == len(plans), case


def bubble_of(name, p, m, v, F, B, W):
    """As the docstring has them."""
    whole = F + B + W
    table = {
        "naive": m * (p - 1) * whole,
        "interleaved": (p - 1) * whole / v,
        "bfs": (p - 1) * whole / v,
        "zb-h1": (p - 1) * (F + B - W),
        "zb-h2": (p - 1) * (F + B - 2 * W),
    }
    return table.get(name, (p - 1) * whole)


def test_bubbles_are_those_of_the_papers():
    for name, p, m, v in cases(range(1, 7), (12, 16)):
        if name in ("zb-v", "dualpipe-v", "auto"):
            continue
        plans = make_plans(name, p, m, v)
        for F, B, W in [(1, 0.5, 0.5), (1, 1.2, 0.9), (2, 2, 1.5)]:
            played = simulate(plans, costs(plans, F, B, W))
            idle = longest(played) - m * (F + B + W)
            assert idle == pytest.approx(bubble_of(name, p, m, v, F, B, W), abs=1e-9), (name, p, m)


def test_v_shaped_schedules_where_all_actions_are_equal():
    for p in range(1, 9):
        plans = make_plans("zb-v", p, 16)
        assert bubble_rate(simulate(plans, costs(plans, 1, 1, 1))) == pytest.approx(0)
        plans = make_plans("dualpipe-v", p, 16)
        played = simulate(plans, costs(plans, 1, 1, 1), joined=True)
        assert longest(played) - 3 * 16 == pytest.approx(p - 1)


def simulated(folder, flags):
    """main() --simulate with these flags -> its --json report."""
    path = folder / "report.json"
    words = ["pipeline_parallel.py", "--simulate", "--json", str(path), *flags.split()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", words)
        assert pipeline_parallel.main() == 0
    return json.loads(path.read_text())


def test_simulate_reaches_published_figures(tmp_path):
    qi = "--schedule auto --pp 8 --micro 24 --times 18.522,18.086,9.337,0.601"
    assert simulated(tmp_path, qi + " --limit 16")["bubble_rate"] == pytest.approx(0.0433, abs=5e-5)
    # table 2 of DeepSeek-V3: 8 stages, F = W = 1, a whole backward of 2: bubbles of 21, 7 and 6
    for name, bubble in (("1f1b", 21), ("zb-h1", 7)):
        report = simulated(tmp_path, f"--schedule {name} --pp 8 --micro 20")
        assert report["bubble_rate"] == pytest.approx(bubble / (60 + bubble))
    report = simulated(tmp_path, "--schedule dualpipe-v --pp 4 --micro 20 --times 2,2,2,0")
    assert report["joined_bubble_rate"] == pytest.approx(6 / 126)
    uneven = simulated(tmp_path, "--pp 2 --layers-per-stage 3,1")["bubble_rate"]
    assert uneven > simulated(tmp_path, "--pp 2 --layers-per-stage 2,2")["bubble_rate"]


def test_pictures_are_what_the_schedules_do():
    text = (ROOT / "pipeline_parallel.py").read_text()
    for name in SCHEDULES:
        plans = make_plans(name, 2, {"naive": 2, "bfs": 2}.get(name, 4))
        v = chunks(plans[0])
        drawn = grid(simulate(plans, costs(plans, v, v, v)))
        picture = pipeline_parallel.__doc__
        if name != "1f1b":  # the comment above its row of the table
            [picture] = re.findall(rf'((?:    #.*\n)+)    "{name}": ', text)
        if name == "pipedream":  # its updates take no time, so that the grid does not draw them
            picture = picture.replace("    U ", "    ")
        for row in drawn.split("\n"):
            assert row.strip() in picture, name


def test_times_of_a_measured_step():
    """typical_times finds what the step was made of."""
    plans = make_plans("zb-h1", 3, 6)
    played = simulate(plans, costs(plans, 3.0, 2.0, 1.0), comm=0.25)
    assert typical_times(plans, played) == pytest.approx((3.0, 2.0, 1.0, 0.25))
    with pytest.raises(RuntimeError, match="deadlock: rank 0 waits to do W5, rank 1 waits to"):
        simulate([plan[::-1] for plan in plans], lambda rank, action: 1)


# ---- trained: section 1 alone, and a model that is not ours --------------------------


def stranger(wraps=(), frozen=None):
    """frozen: a pattern of names. Embedding and head are tied."""
    torch.manual_seed(0)
    inner = [nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True) for _ in range(6)]
    model = nn.Sequential(nn.Embedding(11, 8), *inner, nn.Linear(8, 11, bias=False))
    model[-1].weight = model[0].weight
    for layer in inner:
        if "checkpoint" in wraps:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        if "autocast" in wraps:
            layer.forward = torch.autocast("cpu", torch.bfloat16)(layer.forward)
    for name, p in model.named_parameters():
        p.requires_grad = not (frozen and re.match(frozen, name))
    return model


def plain_step(plain, optimizer, inputs, loss_of):
    losses = [loss_of(plain(x), m) for m, x in enumerate(inputs)]
    sum(losses).backward()
    return sum(losses).detach()


def stale_step(plain, optimizer, inputs, loss_of, plans, layers):
    """PipeDream. versions[n] are the weights after n updates. In micro-batch m a stage, which is a
    range of layers, uses versions[n] if its rank's plan has n Us before its F of m."""
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
        for rank, plan in enumerate(plans):
            before = plan[:plan.index(Action("F", m, rank))]
            version = versions[[action.kind for action in before].count("U")]
            seen.update({name: version[name] for name in names[rank]})
        losses.append(loss_of(torch.func.functional_call(plain, seen, (x,)), m))
        for name, grad in zip(seen, torch.autograd.grad(losses[-1], list(seen.values()))):
            named[name].grad = grad
    tied.grad += kept
    return sum(losses).detach()


def piped(module, name, wraps=(), frozen=None, dtype=torch.float64):
    """-> this rank's stages of the stranger, a Pipeline, calls, plans, the layers of each stage"""
    p = dist.get_world_size()
    model = stranger(wraps, frozen).to(dtype)
    plans = plans_of(name, p, 8)
    if name != "auto":
        plans = module.make_plans(name, p, 8)
    count = len(module.homes(plans))
    layers = [range(8 * n // count, 8 * (n + 1) // count) for n in range(count)]
    stages = module.Stages([model[own.start:own.stop] for own in layers], plans)
    mail = module.Mail(plans, list(range(p)), None, {}, (2, 5, 8), dtype, "cpu")
    calls = []  # (stage, is_last, is_whole) of each B and W
    pipeline = module.Pipeline(stages.here, plans, mail, lambda *call: calls.append(call))
    return stages, pipeline, calls, plans, layers


def check_copy(name, wraps=(), frozen=None, plant=None):
    """2 steps with clipping equal one process; hooks see each gradient as often as a backward."""
    module = copied("pipeline_parallel")
    if plant:
        plant(module)
    dtype = torch.float64
    tolerance = {"rtol": 1e-10, "atol": 1e-12}
    if "autocast" in wraps:
        dtype = torch.float32
        tolerance = {"rtol": 1e-3, "atol": 1e-5}
    plain = stranger(wraps, frozen).to(dtype)
    stages, pipeline, calls, plans, layers = piped(module, name, wraps, frozen, dtype)
    hooked = Counter()  # {name: how often its gradient was added to}
    for q, q_name in stages.names.items():
        if q.requires_grad:
            q.register_post_accumulate_grad_hook(lambda _, name=q_name: hooked.update([name]))
    left = Counter()  # {stage: how many Linears' Ws its Bs have left}
    backward = pipeline.backward

    def watched(m, stage, grad):
        made = backward(m, stage, grad)
        left[stage] += len(pipeline.left.get((m, stage), []))
        return made
    pipeline.backward = watched
    step = plain_step
    if name == "pipedream":
        step = partial(stale_step, plans=plans, layers=layers)
    train(module, stages, pipeline, plain, step, tolerance)
    if not frozen:
        check_calls(pipeline, stages, calls, left, hooked)


def batch_of(step):
    """-> micro-batches, loss_of(output, m)"""
    ids = torch.randint(11, (16, 6), generator=torch.Generator().manual_seed(step))
    targets = ids[:, 1:].split(2)

    def loss_of(out, m):
        return F.cross_entropy(out.flatten(0, 1), targets[m].flatten(), reduction="sum") / 80
    return ids[:, :-1].split(2), loss_of


def train(module, stages, pipeline, plain, plain_step, tolerance):
    optimizer = torch.optim.AdamW(stages.parameters(), 1e-2, eps=1e-5)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), 1e-2, eps=1e-5)
    for step in range(2):
        inputs, loss_of = batch_of(step)
        optimizer.zero_grad()
        update = partial(module.update_stage, stages, optimizer, 0.5)
        loss = pipeline.step(inputs, loss_of, update)
        norm = stages.sum_and_clip(0.5)
        plain_optimizer.zero_grad()
        want = [plain_step(plain, plain_optimizer, inputs, loss_of)]
        want.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        dist.all_reduce(loss)
        torch.testing.assert_close([loss, norm], want, **tolerance)
        wanted = {name: q.grad for name, q in plain.named_parameters() if q.requires_grad}
        torch.testing.assert_close(stages.full_gradients(), wanted, **tolerance)
        optimizer.step()
        plain_optimizer.step()
        torch.testing.assert_close(stages.full_state_dict(), dict(plain.state_dict()), **tolerance)
    loss = pipeline.evaluate(inputs, loss_of)
    dist.all_reduce(loss)
    with torch.no_grad():
        wanted = sum(loss_of(plain(x), m) for m, x in enumerate(inputs))
    torch.testing.assert_close(loss, wanted, **tolerance)


def check_calls(pipeline, stages, calls, left, hooked):
    """What hybrid_3d.py relies on, over 2 steps of 8 micro-batches."""
    tied = hooked.pop("0.weight", 0)  # where one stage has both ends, its B and W both add to it
    assert all(count == 16 for count in hooked.values()) and tied in (0, 16, 32)
    for stage, module in stages.here.items():
        kinds = [a.kind for a in pipeline.plan if a.stage == stage and a.kind in "BW"]
        linears = [one for one in module.modules() if type(one) is nn.Linear]
        assert left[stage] == 2 * kinds.count("W") * len(linears)
        mine = [call for call in calls if call[0] == stage]
        lasts = [i == len(kinds) - 1 or (kind == "B" and "B" not in kinds[i + 1:])
                 for i, kind in enumerate(kinds)]
        assert [is_last for _, is_last, _ in mine] == 2 * lasts
        assert sum(is_whole for _, _, is_whole in mine) == 16
        own = dict(module.named_parameters())
        layers = [name for name in hooked if name in own and "linear1.weight" in name]
        assert layers == sorted(layers, reverse=True)  # sums over data can begin early


@pytest.mark.parametrize("world, cases", [
    (1, [("interleaved",), ("zb-h1",)]),
    (2, [*[(name,) for name in [*SCHEDULES, "auto"]], ("zb-h1", ["autocast"]), ("zb-h1", ["checkpoint"]),
         ("zb-v", ["autocast", "checkpoint"]), ("1f1b", (), "[0-3]"),
         ("zb-h1", (), "[0-2]|.*linear1|.*norm"), ("zb-v", (), "[5-7]|.*linear2.weight")]),
    (4, [(name,) for name in ("1f1b", "interleaved", "bfs", "zb-h2", "zb-v", "dualpipe-v",
                              "pipedream")])])
def test_every_schedule_equals_one_process(world, cases):
    run(each, world, check_copy, cases)


# ---- planted bugs: each must be seen ----------------------------------------------


def stages_with(change, module):
    make = module.Stages.__init__

    def broken(self, *args):
        make(self, *args)
        change(self)
    module.Stages.__init__ = broken


def tied_not_summed(module):
    stages_with(lambda stages: stages.tied.clear(), module)


def tied_counted_twice(module):
    stages_with(lambda stages: setattr(stages, "counted", list(stages.parameters())), module)


def last_microbatch_only(module):
    backward = module.Pipeline.backward

    def broken(self, m, stage, grad):
        self.modules[stage].zero_grad()
        return backward(self, m, stage, grad)
    module.Pipeline.backward = broken


def weights_forgotten(module):
    do = module.Pipeline.do

    def broken(self, action, *rest):
        if action.kind == "W" and action.microbatch == 3:
            return None
        return do(self, action, *rest)
    module.Pipeline.do = broken


def wrong_order(module):
    """The receiver reads a link in its own order, not the sender's."""
    receive = module.Mail.receive

    def broken(self):
        self.coming.rotate(-1)
        receive(self)
    module.Mail.receive = broken


def never_updated(module):
    module.update_stage = lambda *args: None


def not_divided(module):
    """Each micro-batch counts as the whole batch: clipping and AdamW hide it."""
    loss_of = module.PipelinedGPT.in_microbatches
    module.PipelinedGPT.in_microbatches = (
        lambda self, x, y, valid: loss_of(self, x, y, valid / 4))


def check_planted(plant, name):
    with pytest.raises(AssertionError):
        check_copy(name, plant=plant)


def test_planted_bugs_are_seen():
    run(each, 2, check_planted, [
        (tied_not_summed, "1f1b"), (tied_counted_twice, "zb-h2"), (last_microbatch_only, "gpipe"),
        (weights_forgotten, "zb-h1"), (wrong_order, "gpipe"), (never_updated, "pipedream")])
    proves("pipeline_parallel", 2, plant=not_divided)


# ---- the toy GPT: proof, cost, links, refusals ------------------------------------


@pytest.mark.parametrize("world, flags", [
    (1, []),
    (2, [*LLAMA, "--schedule", "zb-v", "--eval-every", "1"]),
    (4, [*LLAMA, "--schedule", "zb-h1", "--micro", "8", "--vocab", "257", "--clip", "0"]),
    (2, ["--schedule", "auto", "--limit", "3"]),
    (2, ["--layers-per-stage", "0,4", "--train", "blocks.[34]|norm"]),
    (2, ["--impl", "torch", "--schedule", "interleaved"]),
    (2, [*LLAMA, "--impl", "torch", "--schedule", "zb-v"])])
def test_script_proves_itself(world, flags):
    report = proves("pipeline_parallel", world, "--layers", "4", *flags)
    assert len(report["in_flight"]) == world and 0 <= report["bubble_rate"] < 1


def test_what_is_saved_goes_on_with_any_schedule(tmp_path):
    flags = ("--layers", "4", "--steps", "2")
    proves("pipeline_parallel", 2, *flags, "--schedule", "1f1b", "--save", str(tmp_path))
    again = proves("pipeline_parallel", 2, "--layers", "4", "--steps", "4", "--schedule", "zb-v",
                   "--resume", str(tmp_path))
    assert len(again["loss"]) == 2


def test_both_times_both_and_measures_the_schedule():
    report = proves("pipeline_parallel", 2, "--steps", "3", "--impl", "both")
    for figure in ("ms_per_step", "torch_ms_per_step", "measured_ms", "planned_ms"):
        assert report[figure] > 0


def check_activations():
    """Each schedule keeps as many micro-batches as the docstring says, in multiples of naive's one.
    """
    kept = {}
    for name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v"):
        stages, pipeline, *_ = piped(pipeline_parallel, name)
        inputs, loss_of = batch_of(0)
        with Ledger(stages, torch.optim.AdamW(stages.parameters())) as ledger:
            pipeline.step(inputs, loss_of)
        kept[name] = ledger.memory["activations"]
    rank = dist.get_rank()
    if rank in (1, 2):  # without an embedding or a head
        one = kept["naive"]
        assert [kept["gpipe"], kept["1f1b"]] == [8 * one, (4 - rank) * one]
        for name, most in (("zb-h1", 4), ("zb-h2", 7), ("zb-v", 4)):
            assert one < kept[name] <= 1.03 * most * one, (name, kept)


def test_activations_are_what_the_schedule_promises():
    run(check_activations, 4)


@pytest.mark.parametrize("world, flags, rank, neighbours", [
    (4, ["--schedule", "1f1b"], 1, 2),
    (2, [*LLAMA, "--schedule", "zb-v"], 0, 2)])
def test_cost(world, flags, rank, neighbours):
    """Bytes sent and held, as the textbook has them and as a dry run counts them."""
    real = dry_run_agrees("pipeline_parallel", world, "--layers", "4", *flags, ranks=[rank])
    textbook(real)
    sent = real["ranks"][rank]["collectives"]["send"]["wire"]
    assert sent == 4 * 8 * 16 * 32 * neighbours


def check_links():
    """With NCCL every rank makes every group, each direction of a link has one."""
    made = []
    new_group = dist.new_group

    def note(ranks):
        made.append(list(ranks))
        return new_group(ranks)
    plans = make_plans("zb-h1", 2, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", note)
        patch.setattr(dist, "get_backend", lambda *group: "nccl")  # which gloo plays here
        links = make_links(plans, [[0, 1], [2, 3]])
    assert made == [[0, 1], [1, 0], [2, 3], [3, 2]]  # on all ranks
    first = dist.get_rank() // 2 * 2
    pair = [first, first + 1]
    mail = Mail(plans, pair, None, links, (3, 5), torch.float64, "cpu")
    stage = nn.Linear(5, 5)  # the same on both
    loss = Pipeline({mail.rank: stage}, plans, mail).step(torch.ones(4, 3, 5), lambda y, m: y.sum())
    if mail.rank == 1:
        torch.testing.assert_close(loss, 4 * stage(stage(torch.ones(3, 5))).sum().detach())
    made = [Action("F", 0, 0), Action("B", 0, 1)]
    for size, dtype in (((3, 4), torch.float64), ((3, 5), torch.float32)):
        wrong = Mail(plans, pair, None, links, size, dtype, "cpu")
        with pytest.raises(AssertionError, match=r"not torch.Size\(\[3, .\]\), torch.float"):
            wrong.put(made[mail.rank], torch.ones(3, 5))


def test_every_rank_makes_every_link_and_kinds_are_checked():
    run(check_links, 4)


def test_what_cannot_run_is_refused():
    run(check_refused, 2, "pipeline_parallel", [(flags.split(), words) for flags, words in [
        ("--layers 1", "--layers 1 for 2 stages"),
        ("--micro 3", "--batch 8 does not divide into --micro 3"),
        ("--schedule interleaved --micro 3 --batch 9", "interleaved takes multiples of 2"),
        ("--schedule dualpipe-v --micro 2", "dualpipe-v needs 4 or more"),
        ("--schedule pipedream --save NONE", "pipedream takes no --save"),
        ("--schedule naive --impl torch", "torch has gpipe, 1f1b"),
        ("--impl torch --micro 1", "torch's 1f1b wants 2 or more"),
        ("--layers-per-stage 1,1", "they are 2, --layers 4"),
        ("--layers-per-stage two,two", "2 numbers are needed"),
        ("--limit 4", "--limit is for --schedule auto, not for 1f1b"),
        ("--pp 4", "--pp is for --simulate only"),
        ("--times 1,1,1,0", "--times is for --simulate and"),
        ("--simulate --times 1,2,3", "4 numbers are needed"),
        ("--simulate --times 0,0,0,0", "F + B + W 1e-9 or more"),
    ]])
