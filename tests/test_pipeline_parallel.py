"""pipeline_parallel.py: its schedules on paper, and trained in both forms of the toy."""
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
from torch.distributed.pipelining import schedules as theirs
from torch.utils.checkpoint import checkpoint

import pipeline_parallel
from common import GPTConfig, adamw, build, clip_gradients, freeze, loss_sum
from conftest import (
    ROOT, SMALL, check_refused, copied, dry_run_agrees, each, proves, run, script,
    textbook)
from harness.ledger import Ledger
from harness.timeline import (
    bubble_rate, chunks, compare, costs, grid, in_flight, longest, measured, simulate, span,
    typical_times)
from pipeline_parallel import (
    AT_WORK, SCHEDULES, Action, Mail, Pipeline, Stash, homes, key, make_links, make_plans,
    parallelize, search, source, split_layers, train_step)

LLAMA = ("--model", "llama-toy")
SYNCHRONOUS = [name for name in SCHEDULES if name != "pipedream"] + ["auto"]
SPLIT = ("zb-h1", "zb-h2", "zb-v", "auto")  # schedules in which every B leaves a W


def plans_of(name, p, m, v=2, limit=None, times=(1, 1, 1, 0.1)):
    if name == "auto":
        return search(p, m, limit or p, partial(span, times=times))
    return make_plans(name, p, m, v)


def possible(name, p, m):
    if name == "interleaved":
        return m % p == 0
    return name != "dualpipe-v" or m >= 2 * p


def cases(ranks, microbatches):
    stages = {"interleaved": [1, 2, 3], "bfs": [1, 2, 3], "zb-v": [2], "dualpipe-v": [2]}
    for name, p, m in itertools.product([*SCHEDULES, "auto"], ranks, microbatches):
        if possible(name, p, m):
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
    for name, p, m, v in cases(range(1, 9), (1, 2, 3, 7, 8, 16)):
        plans = plans_of(name, p, m, v)
        assert homes(plans).keys() == set(range(p * v))
        for rank, plan in enumerate(plans):
            check_complete(name, m, plan)
            if name == "auto" or (name == "zb-v" and m < 2 * p - 1):
                assert in_flight(plan) <= min(m, p)
            else:
                assert in_flight(plan) == pytest.approx(promised(name, p, m, v, rank), abs=1e-12)
        assert simulate(plans, lambda rank, action: 1.0)


class Meeting:
    """A transfer at its strictest: it ends when both ranks have come to it."""

    def __init__(self):
        self.both = threading.Event()

    def wait(self):
        assert self.both.wait(20), "deadlock"


def play_mail(mail, kinds):
    """A step, or its forwards, as Pipeline.play does it."""
    mail.open(kinds)
    for action in [a for a in mail.plans[mail.rank] if a.kind in kinds]:
        need = source(action, max(mail.home))
        if need:
            mail.take(need)
        mail.put(action, torch.empty(1, dtype=torch.float32))
    mail.finish_send()
    assert not mail.here and not any(mail.moving.values())


def deliver(plans, monkeypatch):
    """Play the Mail of all ranks, in threads -> the exceptions."""
    local = threading.local()
    lock = threading.Lock()
    count = Counter()  # {(link, send or receive): how many there were}
    half = {}  # {(link, number): Meeting} to which one rank has come
    errors = []

    def begin(self, operation, tensor, peer, link):
        with lock:
            number = count[link, operation]
            count[link, operation] += 1
            if (link, number) not in half:
                half[link, number] = Meeting()
                return half[link, number]
            meeting = half.pop((link, number))
            meeting.both.set()
            return meeting

    def play(rank):
        local.rank = rank
        try:
            mail = Mail(plans, list(range(len(plans))), None, {}, (1,), torch.float32, "cpu")
            for kinds in ("FBWU", "F"):
                play_mail(mail, kinds)
        except Exception as error:
            errors.append(error)

    monkeypatch.setattr(dist, "get_rank", lambda group=None: local.rank)
    monkeypatch.setattr(Mail, "begin", begin)
    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(len(plans))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_no_schedule_ever_blocks(monkeypatch):
    for case in cases((2, 3, 5, 8), (1, 2, 5, 8, 16)):
        assert deliver(plans_of(*case), monkeypatch) == [], case


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


@pytest.mark.parametrize("F, B, W", [(1, 0.5, 0.5), (1, 1.2, 0.9), (2, 2, 1.5)])
def test_bubbles_are_those_of_the_papers(F, B, W):
    for name, p, m, v in cases(range(1, 9), (7, 16)):
        if name in ("zb-v", "dualpipe-v", "auto") or m < 2 * p - 1:
            continue
        plans = make_plans(name, p, m, v)
        played = simulate(plans, costs(plans, F, B, W))
        idle = longest(played) - m * (F + B + W)
        assert idle == pytest.approx(bubble_of(name, p, m, v, F, B, W), abs=1e-9), (name, p, m, v)


def test_v_shaped_schedules_where_all_actions_are_equal():
    for p in range(1, 9):
        plans = make_plans("zb-v", p, 16)
        assert bubble_rate(simulate(plans, costs(plans, 1, 1, 1))) == pytest.approx(0)
        plans = make_plans("dualpipe-v", p, 16)
        played = simulate(plans, costs(plans, 1, 1, 1), joined=True)
        assert longest(played) - 3 * 16 == pytest.approx(p - 1)


def rate_of(plans, times):
    F, B, W, comm = times
    return bubble_rate(simulate(plans, costs(plans, F, B, W), comm))


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
    for sizes in ("", " --width 2304 --heads 24 --seq 1024"):
        report = simulated(tmp_path, qi + " --limit 16" + sizes)
        assert report["bubble_rate"] == pytest.approx(0.0433, abs=5e-5)
    # table 2 of DeepSeek-V3: 8 stages, F = W = 1, a whole backward of 2: bubbles of 21, 7 and 6
    for name, bubble in (("1f1b", 21), ("zb-h1", 7)):
        report = simulated(tmp_path, f"--schedule {name} --pp 8 --micro 20")
        assert report["bubble_rate"] == pytest.approx(bubble / (60 + bubble))
    report = simulated(tmp_path, "--schedule dualpipe-v --pp 4 --micro 20 --times 2,2,2,0")
    assert report["joined_bubble_rate"] == pytest.approx(6 / 126)
    assert report["in_flight"] == [4.5] * 4
    uneven = simulated(tmp_path, "--pp 2 --layers-per-stage 3,1")["bubble_rate"]
    assert uneven > simulated(tmp_path, "--pp 2 --layers-per-stage 2,2")["bubble_rate"]


def test_the_search_keeps_to_its_limit_and_finds_better_plans():
    generator = torch.Generator().manual_seed(0)
    for _ in range(15):
        p, m, limit = torch.randint(1, 9, (3,), generator=generator).tolist()
        times = (0.1 + torch.rand(4, generator=generator)).tolist()
        plans = plans_of("auto", p, m, limit=limit, times=times)
        for plan in plans:
            check_complete("auto", m, plan)
            assert in_flight(plan) <= limit
        if limit >= 2 * p:  # zb-h1 and zb-h2 are in the family
            others = [rate_of(make_plans(name, p, m), times) for name in ("zb-h1", "zb-h2")]
            assert rate_of(plans, times) <= min(others) + 1e-9


def their_plan(name, p, m, v, rank):
    """What torch's schedule does, as our actions; micro-batches by counting: torch's 1F1B begins
    with number 1 on the last rank, and its BFS goes backward from the last."""
    kind = getattr(theirs, AT_WORK[name])
    if name in ("gpipe", "1f1b"):
        sizes = SimpleNamespace(_n_microbatches=m, _num_stages=p)
        listed = kind._get_pipeline_order(sizes)[rank]
    else:
        sizes = SimpleNamespace(
            n_local_stages=v, microbatches_per_round=p, pp_group_size=p, _n_microbatches=m,
            num_stages=p * v, _num_stages=p * v, _stages=[None] * v)
        listed = kind._calculate_single_rank_operations(sizes, rank)
    count = Counter()
    plan = []
    for action in filter(None, listed):
        for one in action.sub_actions or [action]:
            letter = one.computation_type.value.replace("I", "B")
            if letter in ("F", "B"):
                plan.append(Action(letter, count[letter, one.stage_index], one.stage_index))
                count[letter, one.stage_index] += 1
    return plan


@pytest.mark.parametrize("name, v", [
    ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("bfs", 2), ("zb-h1", 1),
    ("zb-v", 2), ("dualpipe-v", 2)])
def test_torchs_schedules_are_ours(name, v):
    """But for their Ws: those of zb-v are in another order."""
    for p, m in [(1, 2), (2, 4), (3, 9), (4, 8)]:
        for rank, plan in enumerate(make_plans(name, p, m, v)):
            ours = [Action(*key(action)) for action in plan if action.kind != "W"]
            assert ours == their_plan(name, p, m, v, rank)


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
    """typical_times finds what the step was made of, compare puts both beside each other."""
    plans = make_plans("zb-h1", 3, 6)
    played = simulate(plans, costs(plans, 3.0, 2.0, 1.0), comm=0.25)
    reports = [json.dumps([times for _, *times in done]) for done in played]
    again = measured(plans, reports)
    assert typical_times(plans, again) == pytest.approx((3.0, 2.0, 1.0, 0.25))
    text, figures = compare(plans, again)
    assert figures["measured_ms"] > figures["planned_ms"] > 0 and text.count("rank 2") == 2
    with pytest.raises(RuntimeError, match="deadlock: rank 0 waits to do W5, rank 1 waits to"):
        simulate([plan[::-1] for plan in plans], lambda rank, action: 1)


# ---- training: every schedule, both forms ----------------------------------------

CONFIGS = {
    "gpt2": GPTConfig(8, 8, 2, 259, 5),
    "llama": GPTConfig(8, 8, 2, 259, 5, "llama", 1, 12),
}


def batches(rows):
    """Two batches, the second half of each with targets that are ignored."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        text = torch.randint(259, (rows, 6), generator=generator)
        x = text[:, :-1]
        y = text[:, 1:].clone()
        y[rows // 2:, 2:] = -100
        yield x, y, (y != -100).sum().item()


def plain_step(model, optimizer, x, y, valid, clip):
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    loss.backward()
    norm = clip_gradients(model.parameters(), clip)
    optimizer.step()
    return loss.detach(), norm


def built(form, train):
    model = build(CONFIGS[form], 0, dtype=torch.float64)
    if train:
        freeze(model, train)
    return model


def pipelined(model, name, m, rows, wrap=None):
    plans = plans_of(name, dist.get_world_size(), m)
    layers = split_layers(len(model.blocks), len(homes(plans)))
    boundary = (rows // m, 5, 8), torch.float64, "cpu"
    return parallelize(model, plans, layers, boundary, wrap)


def trained(model, step, rows):
    optimizer = adamw(model.parameters(), 1e-2)
    return [step(model, optimizer, *batch, 0.5) for batch in batches(rows)]


def worst_gap(model, found, plain, want):
    """Of losses, norms, and every gradient and parameter, by name."""
    gaps = []
    for (loss, norm), (plain_loss, plain_norm) in zip(found, want, strict=True):
        loss = loss.clone()
        dist.all_reduce(loss)  # over all ranks: the last stage's alone is not 0
        gaps += [abs(loss - plain_loss), abs(norm - plain_norm)]
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    for ours, theirs in ((model.full_gradients(), wanted),
                         (model.full_state_dict(), dict(plain.state_dict()))):
        assert ours.keys() == theirs.keys()
        gaps += [(ours[name] - theirs[name]).abs().max() for name in ours]
    return max(gap.item() for gap in gaps)


def check_equal(form, names, microbatches, train=""):
    rows = 12 if dist.get_world_size() == 3 else 8
    plain = built(form, train)
    want = trained(plain, plain_step, rows)
    for name, m in itertools.product(names, microbatches):
        if possible(name, dist.get_world_size(), m):
            model = pipelined(built(form, train), name, m, rows)
            gap = worst_gap(model, trained(model, train_step, rows), plain, want)
            assert gap < 1e-12, (name, m, gap)
    x, y, _ = next(batches(rows))
    loss = model.evaluate(x, y)
    dist.all_reduce(loss)
    with torch.no_grad():
        torch.testing.assert_close(loss, loss_sum(plain(x), y))


@pytest.mark.parametrize("world, forms, microbatches", [
    (1, ["llama"], [4]),
    (2, ["gpt2", "llama"], [1, 4]),
    (3, ["llama"], [6]),
    (4, ["gpt2", "llama"], [8])])
def test_every_schedule_equals_one_process(world, forms, microbatches):
    run(each, world, check_equal, [(form, SYNCHRONOUS, microbatches) for form in forms])


def test_frozen_parameters_equal_one_process():
    names = ["1f1b", "zb-h1", "zb-v"]
    patterns = ["blocks.[5-9]|norm$", "tok", "blocks.0.*up|pos", "head|norm1"]
    run(each, 2, check_equal, [("gpt2", names, [4], pattern) for pattern in patterns])


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
    assert report["ms_per_step"] > 0
    assert report["torch_ms_per_step"] > 0
    assert report["measured_ms"] > 0
    assert report["planned_ms"] > 0
    assert report["in_flight"] == [2, 1]


# ---- PipeDream: an oracle in one process -------------------------------------------


def stale_step(model, optimizer, x, y, valid, clip, plans, stages):
    """stages: the names in each stage. versions[n] are the weights after n updates. In micro-batch
    m a stage uses versions[n] if its rank's plan has n Us before its F of m."""
    named = dict(model.named_parameters())
    optimizer.zero_grad()
    versions = []
    total = 0.0
    m = 1 + max(action.microbatch for action in plans[0])
    for microbatch, (rows, targets) in enumerate(zip(x.chunk(m), y.chunk(m))):
        versions.append({name: p.detach().clone() for name, p in named.items()})
        seen = {}
        for rank, names in enumerate(stages):
            begin = plans[rank].index(Action("F", microbatch, rank))
            updates = sum(action.kind == "U" for action in plans[rank][:begin])
            seen.update({name: versions[updates][name].requires_grad_() for name in names})
        loss = loss_sum(torch.func.functional_call(model, seen, (rows,)), targets) / valid
        for name, grad in zip(seen, torch.autograd.grad(loss, list(seen.values()))):
            p = named[name]
            if p.grad is not None:  # of the tied one, kept until the end
                grad = grad + p.grad
            p.grad = grad
        total += loss.detach()
        if microbatch < m - 1:
            kept = named["tok.weight"].grad
            for names in stages:
                inner = [named[name] for name in names if name != "tok.weight"]
                nn.utils.clip_grad_norm_(inner, clip)
            named["tok.weight"].grad = None
            optimizer.step()
            optimizer.zero_grad()
            named["tok.weight"].grad = kept
    norm = clip_gradients(model.parameters(), clip)
    optimizer.step()
    return total, norm


def check_pipedream(planted=False):
    p = dist.get_world_size()
    plans = make_plans("pipedream", p, 8)
    model = pipelined(built("gpt2", ""), "pipedream", 8, 8, wrap=Stash)
    stages = [[] for _ in range(p)]
    for name in model.trained:
        rank, _ = model.origins[name]
        stages[rank].append(name)
    if planted:  # a reference without staleness: all stages take the last one's weights
        plans = [[action._replace(stage=rank) for action in plans[-1]] for rank in range(p)]
    plain = built("gpt2", "")
    want = trained(plain, partial(stale_step, plans=plans, stages=stages), 8)
    gap = worst_gap(model, trained(model, train_step, 8), plain, want)
    assert (gap > 1e-6) == planted and (gap < 1e-12) != planted, gap


def test_pipedream_equals_its_oracle():
    run(each, 2, check_pipedream, [(False,), (True,)])
    run(check_pipedream, 4)
    assert script("pipeline_parallel", 2, *SMALL, "--schedule", "pipedream")["check"] is None


# ---- planted bugs: each must be seen ------------------------------------------------


def not_divided():
    """Each micro-batch counts as the whole batch: clipping and AdamW hide it."""
    loss_of = pipeline_parallel.PipelinedGPT.in_microbatches
    return pipeline_parallel.PipelinedGPT, "in_microbatches", (
        lambda self, x, y, valid: loss_of(self, x, y, valid / 4))


def stages_with(change):
    made = pipeline_parallel.Stages.__init__

    def broken(self, *args):
        made(self, *args)
        change(self)
    return pipeline_parallel.Stages, "__init__", broken


def tied_not_summed():
    return stages_with(lambda stages: stages.tied.clear())


def tied_counted_twice():
    return stages_with(lambda stages: setattr(stages, "counted", list(stages.parameters())))


def last_microbatch_only():
    backward = Pipeline.backward

    def broken(self, m, stage, grad):
        for p in self.modules[stage].parameters():
            p.grad = None
        return backward(self, m, stage, grad)
    return Pipeline, "backward", broken


def weights_forgotten():
    do = Pipeline.do

    def broken(self, action, *rest):
        if action.kind == "W" and action.microbatch == 3:
            return None
        return do(self, action, *rest)
    return Pipeline, "do", broken


def wrong_order():
    """The receiver reads a link in its own order, not the sender's."""
    receive = Mail.receive

    def broken(self, sender):
        coming = self.coming[sender]
        if len(coming) > 1:
            coming.rotate(-1)
        receive(self, sender)
    return Mail, "receive", broken


def check_planted(plant, name):
    plain = built("gpt2", "")
    want = trained(plain, plain_step, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*plant())
        model = pipelined(built("gpt2", ""), name, 4, 8)
        gap = worst_gap(model, trained(model, train_step, 8), plain, want)
    assert gap > 1e-6, (plant.__name__, gap)


def test_planted_bugs_are_seen():
    run(each, 2, check_planted, [
        (not_divided, "1f1b"), (tied_not_summed, "1f1b"), (tied_counted_twice, "zb-h2"),
        (last_microbatch_only, "gpipe"), (weights_forgotten, "zb-h1"), (wrong_order, "gpipe")])


# ---- the copy: section 1 alone, a Llama-like model that is not ours -------------------


class Layer(nn.Module):
    def __init__(self, width, wide):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 2 * width, bias=False)  # 4 heads, 2 of keys and values
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * wide, bias=False)
        self.back = nn.Linear(wide, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        B, T, C = x.shape
        heads = self.qkv(self.attention_norm(x)).view(B, T, 8, C // 4).transpose(1, 2)
        q, k, v = heads.split([4, 2, 2], dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        return x + self.dropout(self.back(F.silu(gate) * up))


def stranger(wraps, tied):
    torch.manual_seed(0)
    layers = [nn.Embedding(11, 8), *[Layer(8, 12) for _ in range(6)], nn.Linear(8, 11, bias=False)]
    if tied:
        layers[-1].weight = layers[0].weight
    for layer in layers[1:-1]:
        layer.eval()  # dropout draws other numbers on other ranks
        if "checkpoint" in wraps:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        if "autocast" in wraps:
            layer.forward = torch.autocast("cpu", torch.bfloat16)(layer.forward)
    return nn.Sequential(*layers)


def check_copy(name, wraps, tied):
    """3 steps with clipping equal one process; hooks see each gradient as often as a backward."""
    module = copied("pipeline_parallel")
    p = dist.get_world_size()
    dtype = torch.float64
    tolerance = {"rtol": 1e-10, "atol": 1e-12}
    if "autocast" in wraps:
        dtype = torch.float32
        tolerance = {"rtol": 1e-3, "atol": 1e-5}
    plain = stranger(wraps, tied).to(dtype)
    layers = list(stranger(wraps, tied).to(dtype).named_children())
    plans = module.make_plans(name, p, 8)
    count = len(module.homes(plans))
    cuts = [len(layers) * n // count for n in range(count + 1)]
    stages = module.Stages([module.Chain(layers[a:b]) for a, b in zip(cuts, cuts[1:])], plans)
    mail = module.Mail(plans, list(range(p)), None, {}, (2, 5, 8), dtype, "cpu")
    before = []  # (stage, is_last, is_whole) of each B and W
    left = Counter()  # {does W wait?: Linears}
    hooked = Counter()  # {name: how often its gradient was added to}
    pipeline = module.Pipeline(stages.here, plans, mail, lambda *args: before.append(args))
    for q, q_name in stages.names.items():
        q.register_post_accumulate_grad_hook(lambda _, name=q_name: hooked.update([name]))
    note = module.WeightGradient.apply

    def watched(*args):
        left[module.SplitLinear.later is not None] += 1
        return note(*args)
    module.WeightGradient.apply = watched
    train_copy(stages, pipeline, plain, tolerance)
    check_calls(pipeline, stages, before, left, hooked)


def train_copy(stages, pipeline, plain, tolerance):
    optimizer = torch.optim.AdamW(stages.parameters(), 1e-2, eps=1e-5)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), 1e-2, eps=1e-5)
    for step in range(3):
        ids = torch.randint(11, (16, 6), generator=torch.Generator().manual_seed(step))
        inputs = ids[:, :-1].split(2)
        targets = ids[:, 1:].split(2)

        def loss_of(out, m):
            out = out.flatten(0, 1)
            return F.cross_entropy(out, targets[m].flatten(), reduction="sum") / 80
        optimizer.zero_grad()
        loss = pipeline.step(inputs, loss_of)
        norm = stages.sum_and_clip(0.5)
        plain_optimizer.zero_grad()
        parts = [loss_of(plain(x), m) for m, x in enumerate(inputs)]
        sum(parts).backward()
        want_norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        dist.all_reduce(loss)
        want = [sum(parts).detach(), want_norm]
        torch.testing.assert_close([loss, norm], want, **tolerance)
        wanted = {name: q.grad for name, q in plain.named_parameters()}
        torch.testing.assert_close(stages.full_gradients(), wanted, **tolerance)
        optimizer.step()
        plain_optimizer.step()
        torch.testing.assert_close(stages.full_state_dict(), dict(plain.state_dict()), **tolerance)


def check_calls(pipeline, stages, before, left, hooked):
    """What hybrid_3d.py relies on, over 3 steps of 8 micro-batches."""
    uses = Counter(q for stage in stages for q in stage.parameters())  # stages here that hold it
    assert all(hooked[name] == 24 * uses[q] for q, name in stages.names.items())
    linears = sum(type(one) is nn.Linear for one in stages.modules())
    if len(pipeline.apart) == 8 * len(stages):
        assert left == {True: 24 * linears}  # every Linear of every micro-batch
    for stage in stages.here:
        kinds = [a.kind for a in pipeline.plan if a.stage == stage and a.kind in "BW"]
        mine = [call for call in before if call[0] == stage]
        lasts = [i == len(kinds) - 1 or (kind == "B" and "B" not in kinds[i + 1:])
                 for i, kind in enumerate(kinds)]
        assert [is_last for _, is_last, _ in mine] == 3 * lasts
        assert sum(is_whole for _, _, is_whole in mine) == 24


@pytest.mark.parametrize("world, cases", [
    (2, [("1f1b", (), True), ("zb-v", (), False), ("dualpipe-v", (), True),
         ("zb-h1", ("autocast",), True), ("zb-h1", ("checkpoint",), True),
         ("zb-v", ("autocast", "checkpoint"), False)]),
    (4, [("zb-h1", (), True), ("interleaved", (), False)])])
def test_the_copy_trains_another_model(world, cases):
    run(each, world, check_copy, cases)


# ---- cost, groups, refusals ------------------------------------------------------------


def check_activations():
    """Each schedule keeps as many micro-batches as the docstring says, in multiples of naive's one.
    """
    p = dist.get_world_size()
    rank = dist.get_rank()
    x = torch.zeros(8, 5, dtype=torch.int64)
    kept = {}
    for name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v"):
        model = pipelined(built("gpt2", ""), name, 8, 8)
        optimizer = adamw(model.parameters(), 1e-3)
        with Ledger(model, optimizer) as ledger:
            train_step(model, optimizer, x, x.clone(), x.numel(), 1.0)
        kept[name] = ledger.memory["activations"]
    whole = 0
    if rank in (0, p - 1):  # inputs on the first stage, targets on the last, of the whole batch
        whole = x.nbytes
    one = kept["naive"] - whole
    assert kept["gpipe"] == 8 * one + whole
    assert kept["1f1b"] == (p - rank) * one + whole
    assert one < kept["zb-h1"] <= 1.03 * p * one + whole
    assert one < kept["zb-h2"] <= 1.03 * (2 * p - 1) * one + whole
    if 0 < rank < p - 1:
        assert kept["zb-v"] <= 1.03 * p * one


def test_activations_are_what_the_schedule_promises():
    run(check_activations, 4)


@pytest.mark.parametrize("world, flags, rank, neighbours", [
    (4, ["--schedule", "1f1b"], 1, 2),
    (2, ["--schedule", "zb-h1"], 1, 1),
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
    torch.manual_seed(0)
    whole = [nn.Linear(5, 5), nn.Linear(5, 5)]
    pipeline = Pipeline({mail.rank: whole[mail.rank]}, plans, mail)
    x = torch.randn(4, 3, 5)
    loss = pipeline.step(x, lambda out, m: out.square().sum())
    if mail.rank == 1:
        torch.testing.assert_close(loss, whole[1](whole[0](x)).square().sum().detach())
    made = [Action("F", 0, 0), Action("B", 0, 1)]
    for size, dtype in (((3, 4), torch.float64), ((3, 5), torch.float32)):
        wrong = Mail(plans, pair, None, links, size, dtype, "cpu")
        with pytest.raises(AssertionError, match=r"not torch.Size\(\[3, .\]\), torch.float"):
            wrong.put(made[mail.rank], x[0])


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
