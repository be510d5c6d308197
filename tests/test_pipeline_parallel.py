import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.pipelining import schedules as theirs

import pipedream
import pipeline_parallel
from harness import timeline as schedules
from common import GPTConfig, adamw, build, loss_sum
from conftest import dry_run_agrees, proves, run, script, textbook
from ddp import BucketedDDP
from harness.ledger import Ledger
from harness.timeline import (
    SCHEDULES,
    Action,
    bubble_rate,
    chunks,
    costs,
    grid,
    in_flight,
    is_split,
    longest,
    make_plans,
    simulate,
    source,
    transfers,
)

SYNCHRONOUS = [name for name in SCHEDULES if name != "pipedream"]


# ---- schedules, without processes ----------------------------------------------


def cases(stages=range(1, 9), microbatches=range(1, 17), virtual=range(1, 5)):
    for name, p, m in itertools.product(SCHEDULES, stages, microbatches):
        for v in virtual if name == "interleaved" else [1]:
            if name != "interleaved" or m % p == 0:
                yield name, p, m, v


def rendezvous(plans):
    """The executor's rules at their strictest: a transfer is over when both ranks have come to it; a rank comes to its
    next send when its last is over and the tensor made, to its next receive when it has come to all before it."""
    ranks, last = len(plans), len(plans) * chunks(plans[0]) - 1
    routes = [[move for move in transfers(plans) if rank in move[1:]] for rank in range(ranks)]
    at, done, made, met, moved = [0] * ranks, [0] * ranks, set(), Counter(), True
    sending = [None] * ranks
    while moved:
        moved = False
        for r, plan in enumerate(plans):
            while at[r] < len(routes[r]):
                key, here, _ = routes[r][at[r]]
                if here == r and (key not in made or (sending[r] and met[sending[r]] < 2)):
                    break
                sending[r] = key if here == r else sending[r]
                met[key] += 1
                at[r], moved = at[r] + 1, True
            if done[r] < len(plan):
                a = plan[done[r]]
                stage = a.chunk * ranks + r
                there = source(a, stage, last)
                blocked_send = at[r] < len(routes[r]) and routes[r][at[r]][0] in made  # waits for its last send first
                if not blocked_send and (there is None or there % ranks == r or met[a.kind, a.microbatch, there] == 2):
                    made.add((a.kind, a.microbatch, stage))
                    done[r], moved = done[r] + 1, True
    return all(n == len(plan) for n, plan in zip(done, plans)) and all(n == 2 for n in met.values())


def test_every_schedule_is_complete_in_order_and_never_blocks():
    for name, p, m, v in cases():
        plans = make_plans(name, p, m, v)
        for stage, plan in enumerate(plans):
            at = {a: i for i, a in enumerate(plan)}
            assert len(at) == len(plan)
            backward = "BW" if name == "zb-h1" else "B"
            for mb, c in itertools.product(range(m), range(v)):
                order = [at[Action(kind, mb, c)] for kind in "F" + backward]
                assert order == sorted(order)
            updates = m - 1 if name == "pipedream" else 0
            assert len(plan) == m * v * (1 + len(backward)) + updates
            promised = {"naive": 1, "gpipe": m, "zb-h1": min(m, p),
                        "interleaved": min(m, p + (p - 1 - 2 * stage) / v)}.get(name, min(m, p - stage))
            assert in_flight(plan) == pytest.approx(promised, abs=1e-12), (name, p, m, v, stage)
        assert simulate(plans, lambda rank, a: 1.0)
    for case in cases(range(1, 9, 2), (1, 2, 3, 5, 8, 16), (1, 2, 3)):
        assert rendezvous(make_plans(*case)), case


@pytest.mark.parametrize("F, B, W", [(1, 0.5, 0.5), (1, 1, 1), (1, 1.2, 0.9), (2, 2, 1.5)])
def test_bubbles_are_those_of_the_papers(F, B, W):
    for name, p, m, v in cases(microbatches=range(1, 17, 3)):
        if m < p and name in ("zb-h1", "interleaved"):
            continue
        plans = make_plans(name, p, m, v)
        bubble = longest(simulate(plans, costs(plans, F, B, W))) - m * (F + B + W)
        want = {"naive": m * (p - 1) * (F + B + W), "interleaved": (p - 1) * (F + B + W) / v,
                "zb-h1": (p - 1) * (F + B - W)}.get(name, (p - 1) * (F + B + W))
        assert bubble == pytest.approx(want, abs=1e-9), (name, p, m, v)
        if F == B + W:
            rate = {"naive": (p - 1) / p, "interleaved": (p - 1) / (v * m + p - 1),
                    "zb-h1": want / (m * 2 + want)}.get(name, (p - 1) / (m + p - 1))
            assert bubble_rate(simulate(plans, costs(plans, F, B, W))) == pytest.approx(rate)


def test_transfers_take_time_but_nobodys():
    plans = make_plans("gpipe", 3, 4)
    late = simulate(plans, costs(plans, 1, 1, 1), comm=0.25)
    assert longest(late) == 4 * 3 + 2 * 3 + 4 * 0.25
    assert [start for a, start, _ in late[1] if a.kind == "F"] == [1.25, 2.25, 3.25, 4.25]


def their_plans(name, p, m, v):
    """What torch's schedules do, as they list it -> our actions for each rank."""
    if name in ("gpipe", "1f1b"):
        listed = {"gpipe": theirs.ScheduleGPipe, "1f1b": theirs.Schedule1F1B}[name]._get_pipeline_order(
            SimpleNamespace(_n_microbatches=m, _num_stages=p))
    else:
        kind = theirs.ScheduleInterleaved1F1B if name == "interleaved" else theirs.ScheduleInterleavedZeroBubble
        self = SimpleNamespace(n_local_stages=v, microbatches_per_round=p, pp_group_size=p, _n_microbatches=m)
        listed = {rank: kind._calculate_single_rank_operations(self, rank) for rank in range(p)}
    plans = []
    for rank in range(p):
        count, plan = Counter(), []
        for a in listed[rank]:
            kind = a and {"F": "F", "B": "B", "I": "B", "W": "W"}.get(a.computation_type.value)
            if kind:  # micro-batches by counting: torch's list of 1F1B begins with micro-batch 1 on the last stage
                plan.append(Action(kind, count[kind, a.stage_index], a.stage_index // p))
                count[kind, a.stage_index] += 1
        plans.append(plan)
    return plans


@pytest.mark.parametrize("name, v", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1)])
def test_torchs_schedules_are_ours(name, v):
    for p, m in [(1, 2), (2, 4), (3, 9), (4, 8), (8, 16)]:
        ours, torchs = make_plans(name, p, m, v), their_plans(name, p, m, v)
        rates = [bubble_rate(simulate(plans, costs(plans, 1, 0.8, 0.7), 0.1)) for plans in (ours, torchs)]
        assert rates[0] == pytest.approx(rates[1])
        assert ours == torchs


@pytest.mark.parametrize("name", SCHEDULES)
def test_torchs_validation_accepts_ours(name):
    kinds = {"F": theirs.FORWARD, "B": theirs.FULL_BACKWARD, "W": theirs.BACKWARD_WEIGHT}
    for _, p, m, v in (case for case in cases((1, 2, 3, 8), (1, 4, 8, 16), (1, 2, 4)) if case[0] == name):
        plans = make_plans(name, p, m, v)
        listed = {rank: [theirs._Action(a.chunk * p + rank, theirs.BACKWARD_INPUT if a.kind == "B" and is_split(plan)
                                        else kinds[a.kind], a.microbatch) for a in plan if a.kind != "U"]
                  for rank, plan in enumerate(plans)}
        homes = theirs._validate_schedule(listed, p, p * v, m)
        assert homes == {stage: stage % p for stage in range(p * v)}


@pytest.mark.parametrize("p, m", [(4, 6), (2, 3), (3, 7)])
def test_interleaved_with_micro_batches_left_over(p, m):
    plans = make_plans("interleaved", p, m, 2)
    everything = sorted(Action(*a) for a in itertools.product("FB", range(m), range(2)))
    assert all(sorted(plan) == everything for plan in plans)
    simulate(plans, costs(plans, 1, 1, 1))


def test_deadlock_names_the_first_stuck_actions():
    plans = make_plans("1f1b", 3, 4)
    plans[1] = [Action("B", 0), *[a for a in plans[1] if a != Action("B", 0)]]
    stuck = "deadlock: stage 0 waits to do B0, stage 1 waits to do B0, stage 2 waits to do F0"
    with pytest.raises(RuntimeError, match=f"^{stuck}$"):
        simulate(plans, lambda rank, a: 1)


def test_grid():
    plans = make_plans("1f1b", 2, 2)
    rows = ["  stage 0   F0 F1 ...B0 ...B1 ", "  stage 1   ...F0 B0 F1 B1 ..."]
    assert grid(simulate(plans, costs(plans, 1, 0.5, 0.5))).split("\n") == rows
    plans = make_plans("1f1b", 2, 4)
    for row in grid(simulate(plans, costs(plans, 1, 1, 1))).split("\n"):
        assert row.strip() in pipeline_parallel.__doc__
    assert "f0" in grid(simulate(make_plans("interleaved", 2, 2, 2), lambda rank, a: 1))
    for plan in make_plans("pipedream", 2, 4):
        assert " ".join("U" if a.kind == "U" else f"{a.kind}{a.microbatch}" for a in plan) in pipedream.__doc__


def test_simulate_prints_json():
    flags = ("--simulate", "--pp", "4", "--micro", "8", "--times", "1,1,1,0")
    report = script("pipeline_parallel", 1, *flags, "--schedule", "zb-h1")
    assert report["bubble_rate"] == pytest.approx(3 / 27) and report["in_flight"] == [4, 4, 4, 4]
    report = script("pipeline_parallel", 1, "--simulate", "--schedule", "interleaved", "--pp", "2", "--virtual", "3",
                    "--times", "1,0.5,0.5,0")
    assert report["bubble_rate"] == pytest.approx(1 / 13)


# ---- gradients and training ----------------------------------------------------


def trained(model, step_fn, clip, batches):
    optimizer = adamw(model.parameters(), 1e-2)
    return [step_fn(model, optimizer, x, y, valid, clip) for x, y, valid in batches]


def plain_step(model, optimizer, x, y, valid, clip):
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.detach(), norm


def check_all_equal_plain(names, virtual=2):
    """Every schedule and number of micro-batches in one process group, two steps of each."""
    p = dist.get_world_size()
    cfg = GPTConfig(layers=5 if p < 4 else 9, width=8, heads=2, vocab=257, seq=5)
    rng = torch.Generator().manual_seed(0)
    text = [torch.randint(cfg.vocab, (8, 6), generator=rng) for _ in range(2)]
    batches = [(t[:, :-1], t[:, 1:].clone(), 33) for t in text]
    for _, y, _ in batches:
        y[5:, 2:] = -100
    plain = build(cfg, 0, dtype=torch.float64)
    want = trained(plain, plain_step, 0.5, batches)
    for name, m in itertools.product(names, (1, 4, 8)):
        if name == "interleaved" and m % p:
            continue
        plans = make_plans(name, p, m, virtual)
        boundary = dict(size=(8 // m, cfg.seq, cfg.width), dtype=torch.float64, device=torch.device("cpu"))
        model = pipeline_parallel.parallelize(build(cfg, 0, dtype=torch.float64), plans, None, boundary, name)
        ours = trained(model, pipeline_parallel.train_step, 0.5, batches)
        for (loss, norm), (plain_loss, plain_norm) in zip(ours, want):
            loss = loss.clone()
            dist.all_reduce(loss)
            torch.testing.assert_close([loss, norm], [plain_loss, plain_norm], rtol=1e-12, atol=1e-12)
        gradients = {n: q.grad for n, q in plain.named_parameters()}
        torch.testing.assert_close(pipeline_parallel.full_gradients(model), gradients, rtol=1e-10, atol=1e-12)
        state = pipeline_parallel.full_state_dict(model)
        torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_schedule_equals_one_process(world):
    run(check_all_equal_plain, world, SYNCHRONOUS)


@pytest.mark.parametrize("world, flags", [
    (2, ["--schedule", "interleaved"]), (4, ["--schedule", "zb-h1", "--micro", "8", "--vocab", "257", "--clip", "0"]),
    (1, ["--schedule", "pipedream"]), (2, ["--schedule", "pipedream", "--micro", "8"]),
    (4, ["--schedule", "pipedream"]), (4, ["--schedule", "pipedream", "--micro", "1"]),
    (2, ["--schedule", "gpipe", "--impl", "torch"]), (2, ["--schedule", "1f1b", "--impl", "torch"]),
    (2, ["--schedule", "interleaved", "--impl", "torch"]), (2, ["--schedule", "zb-h1", "--impl", "torch"])])
def test_script_proves_itself(world, flags):
    report = proves("pipeline_parallel", world, "--layers", "5", *flags)
    assert len(report["in_flight"]) == world and 0 <= report["bubble_rate"] < 1


class Odd(nn.Module):
    """Not a GPT: boundary (3, 5), a frozen Linear, one without bias, a parameter of no Linear, one that is not used."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(5, 5), nn.Linear(5, 5, bias=False), nn.LayerNorm(5)
        self.frozen, self.unused = nn.Linear(5, 5).requires_grad_(False), nn.Linear(5, 5)

    def forward(self, x):
        x = nn.functional.linear(x, self.a.weight, bias=self.a.bias)
        return self.frozen(torch.tanh(self.b(self.norm(x))))


def check_any_module(name, v):
    """The executor on other modules, each wrapped for data parallelism, whose reduction the last backward starts."""
    p, m = dist.get_world_size(), 4
    torch.manual_seed(0)
    everything, x = [Odd() for _ in range(p * v)], torch.randn(m, 3, 5)
    nn.Sequential(*everything)(x).square().sum().backward()
    want = [{n: q.grad for n, q in module.named_parameters()} for module in everything]
    for module in everything:
        module.zero_grad()
    alone = [dist.new_group([rank]) for rank in range(p)][dist.get_rank()]
    mine = [BucketedDDP(module, alone, average=False) for module in everything[dist.get_rank()::p]]
    calls = []

    def sync(chunk, last):
        calls.append((chunk, last))
        mine[chunk].sync = last
    boundary = dict(size=(3, 5), dtype=torch.float64, device=torch.device("cpu"))
    pipeline = pipeline_parallel.Pipeline(mine, make_plans(name, p, m, v), None, boundary, sync)
    inputs = list(x)
    pipeline.step(inputs, lambda out, mb: out.square().sum())
    assert not any(t.requires_grad for t in inputs)
    assert sorted(calls) == sorted((c, i == m - 1) for c in range(v) for i in range(m))
    for module, grads in zip(mine, want[dist.get_rank()::p]):
        for n, q in module.module.named_parameters():
            if grads[n] is None:
                assert q.grad is None, n
            else:
                torch.testing.assert_close(q.grad, grads[n])


@pytest.mark.parametrize("name, v", [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)])
def test_any_module(name, v):
    run(check_any_module, 2, name, v)


def check_two_pipelines():
    """Ranks 0, 1 and ranks 2, 3 each train with another half of the batch."""
    cfg, plans = GPTConfig(layers=2, width=8, heads=2, seq=4), make_plans("zb-h1", 2, 2)
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    half = dist.get_rank() // 2
    x = torch.randint(256, (2, 4), generator=torch.Generator().manual_seed(half))
    boundary = dict(size=(1, 4, 8), dtype=torch.float64, device=torch.device("cpu"))
    plain, model = build(cfg, 0, dtype=torch.float64), build(cfg, 0, dtype=torch.float64)
    loss_sum(plain(x), x).backward()
    model = pipeline_parallel.parallelize(model, plans, halves[half], boundary, "zb-h1")
    pipeline_parallel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.0), x, x, 1, 0)
    found = pipeline_parallel.full_gradients(model)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(found[name], p.grad)


def test_two_pipelines():
    run(check_two_pipelines, 4)


def check_shapes_are_asserted(size, dtype):
    boundary = dict(size=size, dtype=dtype, device=torch.device("cpu"))
    pipeline = pipeline_parallel.Pipeline([nn.Linear(5, 5)], make_plans("gpipe", 2, 1), None, boundary)
    if dist.get_rank() == 0:
        with pytest.raises(AssertionError, match="not"):
            pipeline.step(torch.zeros(1, 3, 5), None)


@pytest.mark.parametrize("size, dtype", [((3, 4), torch.float64), ((3, 5), torch.float32)])
def test_shapes_are_asserted(size, dtype):
    run(check_shapes_are_asserted, 2, size, dtype)


# ---- cost ------------------------------------------------------------------------


def check_activations():
    """gpipe keeps M micro-batches, 1f1b p - s of them whatever M is, zb-h1 p: in multiples of naive's one."""
    p, s, cfg = dist.get_world_size(), dist.get_rank(), GPTConfig(layers=5, width=16, heads=2, seq=8)
    for m in 4, 8:
        x, kept = torch.zeros(m, cfg.seq, dtype=torch.int64), {}
        boundary = dict(size=(1, cfg.seq, cfg.width), dtype=torch.float64, device=torch.device("cpu"))
        for name in ("naive", "gpipe", "1f1b", "zb-h1"):
            model = pipeline_parallel.parallelize(build(cfg, 0, dtype=torch.float64), make_plans(name, p, m), None,
                                                  boundary, name)
            optimizer = adamw(model.parameters(), 1e-3)
            with Ledger(model, optimizer) as ledger:
                pipeline_parallel.train_step(model, optimizer, x, x.clone(), x.numel(), 1.0)
            kept[name] = ledger.memory["activations"]
        whole = x.nbytes if s in (0, p - 1) else 0  # inputs on the first stage, targets on the last, of the whole batch
        one = kept["naive"] - whole
        assert kept["gpipe"] == m * one + whole and kept["1f1b"] == (p - s) * one + whole
        assert kept["zb-h1"] <= 1.03 * p * one + whole


def test_activations_are_what_the_schedule_promises():
    run(check_activations, 4)


@pytest.mark.parametrize("world, schedule, ranks", [
    (4, "1f1b", [0, 1]), (2, "zb-h1", [1]), (2, "interleaved", [0]), (2, "pipedream", [0])])
def test_cost(world, schedule, ranks):
    """Bytes sent and held, as the textbook has them and as a dry run counts them."""
    real = dry_run_agrees("pipeline_parallel", world, "--layers", "4", "--schedule", schedule, ranks=ranks)
    textbook(real)
    boundary, last = 4 * 8 * 16 * 32, world - 1
    for r in real["ranks"]:
        crossed = 3 if schedule == "interleaved" else 1 + (0 < r["rank"] < last)
        assert r["collectives"]["send"]["wire"] == r["collectives"]["recv"]["payload"] == crossed * boundary
        tied = 4 * 256 * 32 * (r["rank"] in (0, last))
        assert r["collectives"]["all_reduce"]["wire"] == tied + 4 * 2 * last / world


def test_both_times_both_and_measures_the_schedule():
    report = script("pipeline_parallel", 2, "--steps", "4", "--layers", "2", "--width", "32", "--impl", "both")
    assert report["speedup"] == report["torch_ms_per_step"] / report["ms_per_step"] > 0
    assert report["measured_ms"] > 0 and 0 < report["planned_ms"] and report["in_flight"] == [2, 1]


# ---- planted bugs: each must fail the check ------------------------------------


def not_divided(module):
    """Each micro-batch counts as the whole batch: gradients are M times too large, which clipping and AdamW hide."""
    step = module.train_step
    module.train_step = lambda model, o, x, y, valid, clip: step(model, o, x, y, valid / 4, clip)


def tied_not_summed(module):
    carve = module.carve

    def broken(*args):
        stages = carve(*args)
        stages.tied = []
        return stages
    module.carve = broken


def last_microbatch_only(module):
    backward = module.Pipeline.backward

    def broken(self, a, *grad):
        for p in self.modules[a.chunk].parameters():
            p.grad = None
        return backward(self, a, *grad)
    module.Pipeline.backward = broken


def weight_gradient_forgotten(module):
    weights, done = module.weight_gradients, []

    def broken(later):
        done.append(later)
        if len(done) % 4:
            weights(later)
    module.weight_gradients = broken


def newest_weights(module):
    """A reference without staleness: both stages take their weights when the last stage does."""
    plain = module.plain_pipedream
    module.plain_pipedream = lambda run, plans: plain(run, [plans[-1]] * 2)


@pytest.mark.parametrize("plant, schedule", [
    (not_divided, "1f1b"), (tied_not_summed, "1f1b"), (last_microbatch_only, "gpipe"),
    (weight_gradient_forgotten, "zb-h1"), (newest_weights, "pipedream")])
def test_planted(plant, schedule):
    proves("pipeline_parallel", 2, "--schedule", schedule, plant=plant)



def deadlock(module):
    schedules.make_plans = lambda *args: [plan[::-1] for plan in make_plans(*args)]


@pytest.mark.parametrize("world, flags, plant", [
    (2, ["--layers", "1"], None), (2, ["--micro", "3"], None), (1, ["--impl", "torch", "--schedule", "naive"], None),
    (2, ["--schedule", "interleaved", "--micro", "3", "--batch", "9"], None), (1, ["--pp", "4"], None),
    (1, ["--simulate", "--times", "1,2,3"], None), (1, ["--simulate", "--times", "a,b,c,d"], None),
    (1, ["--simulate", "--times", "0,0,0,0"], None), (1, ["--simulate", "--times", "1,nan,1,0"], None),
    (1, ["--simulate", "--pp", "4"], deadlock), (1, ["--impl", "torch", "--dry-run", "2"], None)])
def test_bad_usage(world, flags, plant):
    script("pipeline_parallel", world, *flags, plant=plant, code=2)
