import itertools
import json
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining import schedules as theirs

import pipeline_parallel
from common import GPTConfig, adamw, build, freeze, loss_sum
from conftest import (
    ROOT, SMALL, copied, dry_run_agrees, each, proves, run, script, some, textbook)
from ddp import BucketedDDP
from harness.ledger import Ledger
from harness.timeline import (
    bubble_rate, chunks, compare, costs, grid, in_flight, longest, measured, simulate,
    typical_times)
from pipeline_parallel import (
    AT_WORK, SCHEDULES, Action, Boundary, Pipeline, SplitLinears, Stages, homes, input_gradient,
    make_groups, make_plans, route_of, search, source, split_layers, split_of, stages_of, vee,
    without_backward)

SYNCHRONOUS = [name for name in SCHEDULES if name != "pipedream"]
FREE = ("interleaved", "bfs")  # schedules whose number of stages per rank is free
V_SHAPED = ("zb-v", "dualpipe-v")
SPLIT = ("zb-h1", "zb-h2", "zb-v", "auto")  # schedules in which every B leaves a W


def possible(name, p, m):
    if name == "interleaved":
        return m % p == 0
    if name == "dualpipe-v":
        return m >= 2 * p
    return True


def stages_per_rank(name, free):
    if name in FREE:
        return free
    if name in V_SHAPED:
        return [2]
    return [1]


def cases(ranks=range(1, 9), microbatches=range(1, 17), free=range(1, 5)):
    for name, p, m in itertools.product(SCHEDULES, ranks, microbatches):
        if possible(name, p, m):
            for v in stages_per_rank(name, free):
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


def check_complete(name, p, m, plan):
    """Every action once; F, B and W of a micro-batch in this order."""
    at = {action[:3]: i for i, action in enumerate(plan)}
    assert len(at) == len(plan)
    split = split_of(plan)
    for stage, microbatch in itertools.product(stages_of(plan), range(m)):
        kinds = "FB"
        if (microbatch, stage) in split:
            kinds = "FBW"
        order = [at.pop((kind, microbatch, stage)) for kind in kinds]
        assert order == sorted(order)
    updates = 0
    if name == "pipedream":
        updates = m - 1
    assert len(at) == updates
    if name in SPLIT:
        assert len(split) == m * chunks(plan)


def test_every_schedule_is_complete_and_in_order():
    for name, p, m, v in cases():
        plans = make_plans(name, p, m, v)
        assert homes(plans).keys() == set(range(p * v))
        for rank, plan in enumerate(plans):
            check_complete(name, p, m, plan)
            assert chunks(plan) == v
            if name == "auto" or (name == "zb-v" and m < 2 * p - 1):
                assert in_flight(plan) <= min(m, p)
            else:
                flying = promised(name, p, m, v, rank)
                assert in_flight(plan) == pytest.approx(flying, abs=1e-12), (name, p, m, v, rank)
        assert simulate(plans, lambda rank, action: 1.0)


def rendezvous(plans):
    """The executor's rules at their strictest -> do all ranks come to their end?

    A transfer is over when both ranks have come to it; a rank comes to its next send when its last
    one is over and the tensor is made, to its next receive when it has come to all before it.
    """
    ranks = len(plans)
    home = homes(plans)
    last = max(home)
    routes = [[move for move in route_of(plans) if rank in move.link] for rank in range(ranks)]
    at = [0] * ranks
    done = [0] * ranks
    sending = [None] * ranks
    made = set()
    met = Counter()
    moved = True
    while moved:
        moved = False
        for rank, plan in enumerate(plans):
            while at[rank] < len(routes[rank]):
                tensor, sender, _ = routes[rank][at[rank]]
                busy = sending[rank] is not None and met[sending[rank]] < 2
                if sender == rank and (tensor not in made or busy):
                    break
                if sender == rank:
                    sending[rank] = tensor
                met[tensor] += 1
                at[rank] += 1
                moved = True
            waits = at[rank] < len(routes[rank]) and routes[rank][at[rank]].key in made
            if done[rank] == len(plan) or waits:
                continue
            action = plan[done[rank]]
            tensor = source(action, last)
            if tensor is None or home[tensor[2]] == rank or met[tensor] == 2:
                made.add(action[:3])
                done[rank] += 1
                moved = True
    finished = all(count == len(plan) for count, plan in zip(done, plans))
    return finished and all(count == 2 for count in met.values())


def test_no_schedule_ever_blocks():
    for case in cases(range(1, 9, 2), (1, 2, 3, 5, 8, 16), (1, 2, 3)):
        assert rendezvous(make_plans(*case)), case


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


@pytest.mark.parametrize("F, B, W", [(1, 0.5, 0.5), (1, 1, 1), (1, 1.2, 0.9), (2, 2, 1.5)])
def test_bubbles_are_those_of_the_papers(F, B, W):
    formulas = {"naive", "gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-h2", "pipedream"}
    for name, p, m, v in cases(microbatches=range(1, 17, 3)):
        enough = {"zb-h1": p, "zb-h2": 2 * p - 1, "interleaved": p, "bfs": p}.get(name, 1)
        if name not in formulas or m < enough:
            continue
        plans = make_plans(name, p, m, v)
        played = simulate(plans, costs(plans, F, B, W))
        want = bubble_of(name, p, m, v, F, B, W)
        work = m * (F + B + W)
        idle = longest(played) - work
        assert idle == pytest.approx(want, abs=1e-9), (name, p, m, v)
        rate = want / (work + want)
        assert bubble_rate(played) == pytest.approx(rate)


def test_v_shaped_schedules_where_all_actions_are_equal():
    for p, m in itertools.product(range(1, 9), range(1, 33)):
        if m >= 2 * p - 1:
            plans = make_plans("zb-v", p, m)
            assert bubble_rate(simulate(plans, costs(plans, 1, 1, 1))) == pytest.approx(0)
        if m >= 2 * p:
            plans = make_plans("dualpipe-v", p, m)
            played = simulate(plans, costs(plans, 1, 1, 1), joined=True)
            assert longest(played) - 3 * m == pytest.approx(p - 1)


# ---- figures of the papers -----------------------------------------------------

QI_2023 = """ model  p   m     F      B      W    comm    1F1B  1F1B-I ZB-H1  ZB-H2  ZB-1p  ZB-2p
1.5B   8  24  18.522 18.086  9.337 0.601  0.2431 0.1055 0.1585 0.1083 0.1585 0.0433
1.5B   8  32  18.513 18.086  9.331 0.626  0.1985 0.0818 0.1242 0.0837 0.1242 0.0039
1.5B   8  64  18.546 18.097  9.321 0.762  0.1240 0.0443 0.0674 0.0444 0.0674 0.0026
6.2B   8  24  29.718 29.444 19.927 0.527  0.2347 0.0808 0.1323 0.0698 0.1323 0.0029
6.2B   8  32  29.802 29.428 19.530 0.577  0.1898 0.0628 0.1045 0.0559 0.1045 0.0022
6.2B   8  64  29.935 29.621 19.388 0.535  0.1091 0.0320 0.0554 0.0294 0.0554 0.0010
14.6B 16  48  11.347 11.248  8.132 0.377  0.2552 0.1104 0.1397 0.0672 0.1397 0.0066
14.6B 16  64  11.307 11.254  8.101 0.379  0.2082 0.0852 0.1088 0.0516 0.1088 0.0054
14.6B 16 128  11.325 11.308  8.109 0.378  0.1251 0.0445 0.0576 0.0266 0.0576 0.0028
28.3B 32  96  10.419 10.207  7.715 0.408  0.2646 0.1493 0.1421 0.0641 0.1421 0.0038
28.3B 32 128  10.408 10.204  7.703 0.408  0.2168 0.1164 0.1106 0.0490 0.1106 0.0029
28.3B 32 256  10.402 10.248  7.698 0.460  0.1352 0.0624 0.0594 0.0257 0.0594 0.0018
"""  # tables 9 and 5
WIDTH_AND_HEADS = {"1.5B": (2304, 24), "6.2B": (4096, 32), "14.6B": (5120, 40), "28.3B": (6144, 48)}
LAYERS = {"1.5B": 24, "6.2B": 32, "14.6B": 48, "28.3B": 64}  # the two at the ends have embeddings
ROWS = [line.split() for line in QI_2023.splitlines()[1:]]


def rate_of(plans, times):
    """The rate by its definition, (cost - M (F + B + W)) / cost."""
    F, B, W, comm = times
    played = simulate(plans, costs(plans, F, B, W), comm)
    count = sum(action.kind == "F" for action in plans[0]) / chunks(plans[0])
    work = count * (F + B + W)
    assert bubble_rate(played) == pytest.approx(1 - work / longest(played))
    return bubble_rate(played)


@pytest.mark.parametrize("row", some(ROWS, every=4), ids=lambda row: f"{row[0]}-{row[2]}")
def test_table_5_of_qi_2023(row):
    model, p, m, *figures = row
    p = int(p)
    m = int(m)
    figures = [float(figure) for figure in figures]
    times = figures[:4]
    one_f, interleaved, h1, h2, *_ = figures[4:]
    for name, rate in (("1f1b", one_f), ("zb-h1", h1), ("zb-h2", h2)):
        assert rate_of(make_plans(name, p, m), times) == pytest.approx(rate, abs=5.1e-5), name
    # each layer is a stage
    plans = make_plans("interleaved", p, m, LAYERS[model] // p)
    assert rate_of(plans, times) == pytest.approx(interleaved, rel=0.05)


@pytest.mark.parametrize("row", some(ROWS[:9], every=4), ids=lambda row: f"{row[0]}-{row[2]}")
def test_automatic_schedules_of_qi_2023(row):
    """ZB-1p and ZB-2p: the limit is in bytes there, of which W keeps 32 C of 34 C + 5 H T."""
    model, p, m, *figures = row
    p = int(p)
    figures = [float(figure) for figure in figures]
    width, heads = WIDTH_AND_HEADS[model]
    waiting = 32 * width / (34 * width + 5 * heads * 1024)
    for limit, rate in ((p, figures[8]), (2 * p, figures[9])):
        plans = search(p, int(m), limit, figures[:4], waiting)
        assert rate_of(plans, figures[:4]) <= 1.1 * rate


# The profile is in the program that the authors published (v_schedule.py), with transfers of both
# directions in one figure: half of it gives three columns of the table to all digits
QI_2023_V = """ p  m     F      B      W    comm   1F1B   ZB-H1  ZB-H2  ZB-V
16  48  14.407 14.380  9.676 1.610  0.2668 0.1536 0.0823 0.0697
16  64  14.412 14.393  9.688 1.621  0.2206 0.1198 0.0630 0.0533
16 128  14.316 14.306  9.639 1.619  0.1390 0.0637 0.0325 0.0274
24  72   6.763  6.969  5.251 0.755  0.2699 0.1439 0.0628 0.0638
24  96   6.783  6.984  5.259 0.758  0.2229 0.1121 0.0480 0.0483
24 192   6.785  6.990  5.260 0.770  0.1403 0.0595 0.0247 0.0250
32  96   9.458  9.748  7.288 0.879  0.2676 0.1429 0.0629 0.0593
32 128   9.469  9.744  7.306 0.892  0.2204 0.1111 0.0478 0.0451
32 256   9.447  9.644  7.193 0.887  0.1362 0.0593 0.0251 0.0236
"""  # table 8
V_ROWS = QI_2023_V.splitlines()[1:]


@pytest.mark.parametrize("line", some(V_ROWS, every=4), ids=lambda line: line[:6])
def test_table_8_of_qi_2023(line):
    p, m, *figures = [float(figure) for figure in line.split()]
    F, B, W, both, *rates = figures
    times = F, B, W, both / 2
    for name, rate in zip(("1f1b", "zb-h1", "zb-h2"), rates):
        found = rate_of(make_plans(name, int(p), int(m)), times)
        assert found == pytest.approx(rate, abs=5.1e-5), name
    assert rate_of(make_plans("zb-v", int(p), int(m)), times) == pytest.approx(rates[3], rel=0.1)


def test_table_2_of_deepseek_v3():
    """8 stages, F = W = 1, a whole backward of 2: bubbles of 21, 7 and 6."""
    def bubble(name, ranks, joined=False):
        plans = make_plans(name, ranks, 20)
        times = chunks(plans[0]), chunks(plans[0]), chunks(plans[0])
        played = simulate(plans, costs(plans, *times), joined=joined)
        return longest(played) - 20 * sum(times)
    assert bubble("1f1b", 8) == 21
    assert bubble("zb-h1", 8) == 7
    assert bubble("dualpipe-v", 4, joined=True) == 6
    assert bubble("dualpipe-v", 4) == 3  # a model that has nothing to hide need not wait for pairs


def test_the_search_keeps_to_its_limit():
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        p, m, limit = torch.randint(1, 9, (3,), generator=generator).tolist()
        times = (0.1 + torch.rand(4, generator=generator)).tolist()
        plans = make_plans("auto", p, m, limit=limit, times=times)
        for rank, plan in enumerate(plans):
            check_complete("auto", p, m, plan)
            assert in_flight(plan) <= limit
        rate_of(plans, times)


def test_the_search_is_better_where_times_are_not_equal():
    times = 18.5, 18.1, 9.3, 0.6
    found = rate_of(make_plans("auto", 8, 32, limit=24, times=times), times)
    assert found < 0.5 * rate_of(make_plans("zb-h2", 8, 32), times)


# ---- transfers -----------------------------------------------------------------


def test_transfers_take_time_but_nobodys():
    plans = make_plans("gpipe", 3, 4)
    late = simulate(plans, costs(plans, 1, 1, 1), comm=0.25)
    assert longest(late) == 4 * 3 + 2 * 3 + 4 * 0.25
    starts = [start for action, start, _ in late[1] if action.kind == "F"]
    assert starts == [1.25, 2.25, 3.25, 4.25]


def test_nothing_is_sent_between_stages_of_one_rank():
    for name in V_SHAPED:
        plans = make_plans(name, 3, 8)
        home = homes(plans)
        moves = route_of(plans)
        assert all(move.sender != move.receiver for move in moves)
        assert len(moves) == 8 * 2 * 4  # 6 stages have 5 boundaries; one of them is within rank 2
        assert home == {0: 0, 5: 0, 1: 1, 4: 1, 2: 2, 3: 2}
    assert route_of(make_plans("zb-v", 1, 4)) == []


@pytest.mark.parametrize("name, p, m, v, least", [
    ("zb-h1", 8, 32, 1, 0.03), ("interleaved", 8, 32, 2, 0.03), ("zb-v", 8, 32, 2, 0.005)])
def test_one_line_for_all_transfers_would_block(name, p, m, v, least):
    """What a group for each pair of ranks and direction is for: a receive that waits for its tensor
    does not hold up the sends behind it."""
    plans = make_plans(name, p, m, v)
    cost = costs(plans, 1, 1, 1)
    own_lines = longest(simulate(plans, cost, comm=0.05))
    one_line = longest(simulate(plans, cost, comm=0.05, route=route_of(plans)))
    assert one_line > (1 + least) * own_lines


def test_the_route_is_in_the_order_of_a_simulation():
    for name, p, m, v in cases((1, 2, 3, 4), (1, 4, 8), (1, 2)):
        plans = make_plans(name, p, m, v)
        ends = {}
        for done in simulate(plans, costs(plans, v, v, v)):
            ends |= {action[:3]: end for action, _, end in done}
        times = [ends[move.key] for move in route_of(plans)]
        assert times == sorted(times)


# ---- torch's own lists ---------------------------------------------------------

KINDS = {"F": "F", "B": "B", "I": "B", "W": "W"}


def listed(name, p, m, v):
    """What torch's schedules do, as they list it: {rank: [their actions]}."""
    if name in ("gpipe", "1f1b"):
        kind = getattr(theirs, AT_WORK[name])
        return kind._get_pipeline_order(SimpleNamespace(_n_microbatches=m, _num_stages=p))
    kind = getattr(theirs, AT_WORK[name])
    self = SimpleNamespace(
        n_local_stages=v, microbatches_per_round=p, pp_group_size=p, _n_microbatches=m,
        num_stages=p * v, _num_stages=p * v, _stages=[None] * v)
    return {rank: kind._calculate_single_rank_operations(self, rank) for rank in range(p)}


def flat(actions):
    """Without gaps, and with pairs as the two actions they are."""
    for action in actions:
        if action and action.sub_actions:
            yield from action.sub_actions
        elif action and action.computation_type.value in KINDS:
            yield action


def their_plans(name, p, m, v):
    """The same as our actions; micro-batches of F and B by counting: torch's 1F1B begins with
    number 1 on the last rank, and its BFS goes backward from the last."""
    plans = []
    theirs_by_rank = listed(name, p, m, v)
    for rank in range(p):
        count = Counter()
        plan = []
        for action in flat(theirs_by_rank[rank]):
            kind = KINDS[action.computation_type.value]
            microbatch = count[kind, action.stage_index]
            if kind == "W":
                microbatch = action.microbatch_index
            plan.append(Action(kind, microbatch, action.stage_index))
            count[kind, action.stage_index] += 1
        plans.append(plan)
    return plans


def without_pairs(plans):
    return [[Action(*action[:3]) for action in plan] for plan in plans]


@pytest.mark.parametrize("name, v", [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("bfs", 2),
    ("zb-h1", 1),
    ("zb-v", 2),
    ("dualpipe-v", 2)])
def test_torchs_schedules_are_ours(name, v):
    for p, m in [(1, 2), (2, 4), (3, 9), (4, 8), (8, 16)]:
        ours = without_pairs(make_plans(name, p, m, v))
        torchs = their_plans(name, p, m, v)
        if name == "zb-v":  # its Ws are in another order: one stage's, then the other's
            rates = [rate_of(plans, (1, 0.8, 0.7, 0.1)) for plans in (ours, torchs)]
            assert rates[0] == pytest.approx(rates[1])
            ours = [[action for action in plan if action.kind != "W"] for plan in ours]
            torchs = [[action for action in plan if action.kind != "W"] for plan in torchs]
        assert ours == torchs


def test_pairs_of_dualpipe_v_are_torchs():
    for p, m in [(1, 2), (2, 6), (4, 8), (5, 20)]:
        plans = make_plans("dualpipe-v", p, m)
        for rank, actions in listed("dualpipe-v", p, m, 2).items():
            pairs = [action.sub_actions for action in actions if action.sub_actions]
            theirs_first = [(pair[0].stage_index, pair[0].microbatch_index) for pair in pairs]
            ours = [(action.stage, action.microbatch) for action in plans[rank] if action.joined]
            assert ours == theirs_first


@pytest.mark.parametrize("name", SCHEDULES)
def test_torchs_validation_accepts_ours(name):
    whole = {"F": theirs.FORWARD, "B": theirs.FULL_BACKWARD, "W": theirs.BACKWARD_WEIGHT}
    for other, p, m, v in cases((1, 2, 3, 8), (1, 4, 8, 16), (1, 2, 4)):
        if other != name:
            continue
        their_lists = {}
        plans = make_plans(name, p, m, v)
        for rank, plan in enumerate(plans):
            split = split_of(plan)
            their_lists[rank] = []
            for action in plan:
                if action.kind == "U":
                    continue
                kind = whole[action.kind]
                if action.kind == "B" and (action.microbatch, action.stage) in split:
                    kind = theirs.BACKWARD_INPUT
                their_lists[rank].append(theirs._Action(action.stage, kind, action.microbatch))
        assert theirs._validate_schedule(their_lists, p, p * v, m) == homes(plans)


# ---- drawing and reading ---------------------------------------------------------


@pytest.mark.parametrize("p, m", [(4, 6), (2, 3), (3, 7)])
def test_interleaved_with_micro_batches_left_over(p, m):
    plans = make_plans("interleaved", p, m, 2)
    for rank, plan in enumerate(plans):
        stages = [rank, rank + p]
        assert sorted(plan) == sorted(Action(*a) for a in itertools.product("FB", range(m), stages))
    simulate(plans, costs(plans, 1, 1, 1))


def test_deadlock_names_the_first_stuck_actions():
    plans = make_plans("1f1b", 3, 4)
    first = Action("B", 0, 1)
    plans[1] = [first, *[action for action in plans[1] if action != first]]
    stuck = "deadlock: rank 0 waits to do B0, rank 1 waits to do B0, rank 2 waits to do F0"
    with pytest.raises(RuntimeError, match=f"^{stuck}$"):
        simulate(plans, lambda rank, action: 1)
    with pytest.raises(ValueError, match="rank 0 would wait for ever to do B0"):
        route_of(plans)


def test_what_a_schedule_cannot_do_is_refused():
    """By make_plans itself, which is there to be copied."""
    with pytest.raises(ValueError, match="8 micro-batches or more, not 7"):
        make_plans("dualpipe-v", 4, 7)
    with pytest.raises(ValueError, match="rank 0 would wait for ever to do F4 of stage 8"):
        route_of(make_plans("interleaved", 4, 5, 3))
    with pytest.raises(ValueError, match="waiting 0.0"):
        search(2, 4, 2, (1, 1, 1, 0), waiting=0.0)


def test_a_stage_of_the_ends_may_have_no_layers():
    proves("pipeline_parallel", 3, "--layers-per-stage", "0,2,0")


PICTURES = {  # function: the plans that its docstring draws, in which F = B = W
    "naive": ("naive", 2),
    "gpipe": ("gpipe", 4),
    "interleaved": ("interleaved", 4),
    "looped_bfs": ("bfs", 2),
    "zb_h1": ("zb-h1", 4),
    "zb_h2": ("zb-h2", 4),
    "zb_v": ("zb-v", 4),
    "dualpipe_v": ("dualpipe-v", 4),
}


@pytest.mark.parametrize("function", PICTURES)
def test_pictures_are_what_the_functions_do(function):
    name, m = PICTURES[function]
    plans = make_plans(name, 2, m)
    times = [chunks(plans[0])] * 3
    drawn = grid(simulate(plans, costs(plans, *times)))
    text = getattr(pipeline_parallel, function).__doc__
    for row in drawn.split("\n"):
        assert row.strip() in [line.strip() for line in text.split("\n")]


def test_pictures_of_1f1b_and_pipedream():
    plans = make_plans("1f1b", 2, 4)
    for row in grid(simulate(plans, costs(plans, 1, 1, 1))).split("\n"):
        assert row.strip() in pipeline_parallel.__doc__
    source = (ROOT / "pipeline_parallel.py").read_text()
    for plan in make_plans("pipedream", 2, 4):
        words = " ".join(f"{a.kind}{a.microbatch}" if a.kind != "U" else "U" for a in plan)
        assert words in source


def test_grid():
    plans = make_plans("1f1b", 2, 2)
    rows = ["  rank 0   F0 F1 ...B0 ...B1 ", "  rank 1   ...F0 B0 F1 B1 ..."]
    assert grid(simulate(plans, costs(plans, 1, 0.5, 0.5))).split("\n") == rows
    plans = make_plans("interleaved", 2, 2)
    assert "f0" in grid(simulate(plans, lambda rank, action: 1))
    plans = make_plans("gpipe", 2, 64)  # no room for numbers: no wrong ones
    assert len(re.findall(r"F1\b", grid(simulate(plans, costs(plans, 1, 1, 1))))) <= 2


@pytest.mark.parametrize("name", SCHEDULES)
def test_simulate_draws_it_in_less_than_120_columns(name, capsys, monkeypatch, tmp_path):
    report = tmp_path / "report.json"
    flags = ["--simulate", "--schedule", name, "--pp", "4", "--micro", "16", "--json", str(report)]
    monkeypatch.setattr("sys.argv", ["pipeline_parallel.py", *flags])
    assert pipeline_parallel.main() == 0
    said = capsys.readouterr().out
    assert "rank 3" in said and max(map(len, said.split("\n"))) < 120
    rate = json.loads(report.read_text())["bubble_rate"]
    assert f"bubble rate {rate:.4f}" in said and "post-validation" in said


def simulated(folder, flags):
    """main() --simulate with these flags -> its --json report."""
    path = folder / "report.json"
    words = ["pipeline_parallel.py", "--simulate", "--json", str(path), *flags.split()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", words)
        assert pipeline_parallel.main() == 0
    return json.loads(path.read_text())


def test_simulate_prints_json(tmp_path):
    report = simulated(tmp_path, "--pp 4 --micro 8 --times 1,1,1,0 --schedule zb-h1")
    assert report["bubble_rate"] == pytest.approx(3 / 27)
    assert report["in_flight"] == [4, 4, 4, 4]
    flags = "--schedule interleaved --pp 2 --chunks 3 --times 1,0.5,0.5,0"
    report = simulated(tmp_path, flags)
    assert report["bubble_rate"] == pytest.approx(1 / 13)
    report = simulated(tmp_path, "--schedule dualpipe-v --pp 4 --micro 20 --times 2,2,2,0")
    assert report["joined_bubble_rate"] == pytest.approx(6 / 126)
    flags = "--schedule dualpipe-v --pp 2 --times 2,2,2,0"
    uneven = simulated(tmp_path, flags + " --layers 8 --layers-per-stage 1,1,1,5")
    even = simulated(tmp_path, flags)
    assert uneven["joined_bubble_rate"] > even["joined_bubble_rate"]


def test_uneven_stages(tmp_path):
    one = make_plans("1f1b", 4, 8)
    assert split_layers(9, one) == [2, 2, 2, 3]
    # a head worth five layers: 16 + 5 are 5.25 a rank
    assert split_layers(16, one, head=5.0) == [5, 5, 5, 1]
    assert split_layers(16, one, head=9.0) == [6, 5, 5, 0]
    both_ends = make_plans("zb-v", 2, 8)  # rank 0 has the first and the last of four
    layers = split_layers(12, both_ends, head=2.0)
    assert sum(layers) == 12 and layers[0] + layers[3] + 2 == layers[1] + layers[2]
    report = simulated(tmp_path, "--pp 2 --layers-per-stage 3,1")
    even = simulated(tmp_path, "--pp 2 --layers-per-stage 2,2")
    assert report["bubble_rate"] > even["bubble_rate"]


def test_times_of_a_measured_step():
    """typical_times finds what the step was made of, compare puts both beside each other."""
    plans = make_plans("zb-h1", 3, 6)
    played = simulate(plans, costs(plans, 3.0, 2.0, 1.0), comm=0.25)
    reports = [json.dumps([span for _, *span in done]) for done in played]
    again = measured(plans, reports)
    assert again == [[(action, *span) for action, *span in done] for done in played]
    assert typical_times(plans, again) == pytest.approx((3.0, 2.0, 1.0, 0.25))
    text, figures = compare(plans, again)
    assert figures["measured_ms"] > figures["planned_ms"] > 0 and text.count("rank 2") == 2


# ---- gradients and training ----------------------------------------------------


def trained(model, step, clip, batches):
    optimizer = adamw(model.parameters(), 1e-2)
    return [step(model, optimizer, x, y, valid, clip) for x, y, valid in batches]


def plain_step(model, optimizer, x, y, valid, clip):
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.detach(), norm


def summed(loss):
    """Over all ranks: the last stage's alone is not 0."""
    loss = loss.clone()
    dist.all_reduce(loss)
    return loss


def cpu(*size):
    return Boundary(torch.Size(size), torch.float64, torch.device("cpu"))


def batches_of(cfg, rows):
    """Two batches, the second half of each with targets that are ignored."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(2):
        text = torch.randint(cfg.vocab, (rows, cfg.seq + 1), generator=generator)
        x = text[:, :-1]
        y = text[:, 1:].clone()
        y[rows // 2:, 2:] = -100
        found.append((x, y, (y != -100).sum().item()))
    return found


def compare_with_plain(model, found, plain, want):
    for (loss, norm), (plain_loss, plain_norm) in zip(found, want, strict=True):
        torch.testing.assert_close([summed(loss), norm], [plain_loss, plain_norm],
                                   rtol=1e-12, atol=1e-12)
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    ours = pipeline_parallel.full_gradients(model)
    torch.testing.assert_close(ours, gradients, rtol=1e-10, atol=1e-12)
    state = pipeline_parallel.full_state_dict(model)
    torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-10, atol=1e-12)


MICRO = {1: [4], 2: [1, 4, 8], 3: [1, 6], 4: [1, 4, 8]}  # numbers of micro-batches, by ranks


def check_all_equal_plain(names, train=""):
    """Every schedule and number of micro-batches in one process group, two steps of each."""
    p = dist.get_world_size()
    cfg = GPTConfig(layers=2 * p + 1, width=8, heads=2, vocab=257, seq=5)
    rows = 8
    if p == 3:
        rows = 12  # which 6 micro-batches divide; interleaved wants a multiple of 3
    batches = batches_of(cfg, rows)
    plain = build(cfg, 0, dtype=torch.float64)
    if train:
        freeze(plain, train)
    want = trained(plain, plain_step, 0.5, batches)
    x, y, _ = batches[0]
    want_loss = loss_sum(plain(x), y).detach()
    for name, m in itertools.product(names, MICRO[p]):
        if not possible(name, p, m):
            continue
        model = build(cfg, 0, dtype=torch.float64)
        if train:
            freeze(model, train)
        boundary = cpu(rows // m, 5, 8)
        model = pipeline_parallel.parallelize(model, make_plans(name, p, m), boundary)
        ours = trained(model, pipeline_parallel.train_step, 0.5, batches)
        compare_with_plain(model, ours, plain, want)
        torch.testing.assert_close(summed(pipeline_parallel.evaluate(model, x, y)), want_loss)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_schedule_equals_one_process(world):
    run(check_all_equal_plain, world, SYNCHRONOUS)


def test_frozen_parameters_equal_one_process():
    names = ["1f1b", "zb-h1", "zb-v", "interleaved"]
    trained = ["blocks.[2-9]|norm$", "tok", "blocks.0.*up|pos", "head|norm1"]
    run(each, 2, check_all_equal_plain, [(names, train) for train in trained])


@pytest.mark.parametrize("world, flags", [
    (2, ["--schedule", "interleaved"]),
    (2, ["--schedule", "zb-v", "--micro", "8"]),
    (4, ["--schedule", "zb-h1", "--micro", "8", "--vocab", "257", "--clip", "0"]),
    (2, ["--schedule", "auto", "--limit", "3"]),
    (2, ["--schedule", "auto", "--times", "2,1,1,0.1"]),
    (2, ["--layers-per-stage", "1,4"]),
    (2, ["--layers-per-stage", "balanced", "--vocab", "999"]),
    (2, ["--eval-every", "1", "--warmup", "1", "--decay", "cosine", "--schedule", "zb-h2"]),
    (2, ["--train", "blocks.[34]|norm", "--schedule", "zb-h1", "--eval-every", "2"]),
    (1, ["--schedule", "pipedream"]),
    (2, ["--schedule", "pipedream", "--micro", "8"]),
    (4, ["--schedule", "pipedream"]),
    (4, ["--schedule", "pipedream", "--micro", "1"]),
    (2, ["--schedule", "pipedream", "--train", "blocks.[34]", "--eval-every", "1"])])
def test_script_proves_itself(world, flags):
    report = proves("pipeline_parallel", world, "--layers", "5", *flags)
    assert len(report["in_flight"]) == world and 0 <= report["bubble_rate"] < 1


@pytest.mark.parametrize("name", AT_WORK)
def test_torchs_own_proves_itself(name):
    flags = ("--layers", "5", "--impl", "torch", "--schedule", name, "--eval-every", "1")
    if SCHEDULES[name].place is vee and torch.__version__ < (2, 13):
        assert "take torch 2.13" in script("pipeline_parallel", 2, *SMALL, *flags, code=2)
        return
    proves("pipeline_parallel", 2, *flags)


def test_what_is_saved_goes_on_with_any_schedule(tmp_path):
    flags = ("--layers", "5", "--steps", "2")
    saved = str(tmp_path / "saved")
    report = proves("pipeline_parallel", 2, *flags, "--schedule", "1f1b", "--save", saved)
    again = proves("pipeline_parallel", 3, "--layers", "5", "--steps", "4", "--schedule", "zb-h1",
                   "--resume", saved)
    assert len(report["loss"]) == 2 and len(again["loss"]) == 2
    v_shaped = ("--schedule", "zb-v", "--init-from", saved)
    assert proves("pipeline_parallel", 2, *flags, *v_shaped)["loss"][0] < report["loss"][0]


# ---- other models ----------------------------------------------------------------


class Odd(nn.Module):
    """Not a GPT: a frozen Linear, one without bias, a parameter of no Linear, one that is not used.
    """

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 5)
        self.b = nn.Linear(5, 5, bias=False)
        self.norm = nn.LayerNorm(5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.unused = nn.Linear(5, 5)

    def forward(self, x):
        x = F.linear(x, self.a.weight, bias=self.a.bias)
        return self.frozen(torch.tanh(self.b(self.norm(x))))


def check_any_module(name, v):
    """The executor on other modules, each wrapped for data parallelism, whose reduction the last
    backward starts."""
    p = dist.get_world_size()
    m = 4
    torch.manual_seed(0)
    everything = [Odd() for _ in range(p * v)]
    x = torch.randn(m, 3, 5)
    nn.Sequential(*everything)(x).square().sum().backward()
    want = [{n: q.grad for n, q in module.named_parameters()} for module in everything]
    for module in everything:
        module.zero_grad()
    plans = make_plans(name, p, m, v)
    mine = stages_of(plans[dist.get_rank()])
    alone = [dist.new_group([rank]) for rank in range(p)][dist.get_rank()]
    modules = {n: BucketedDDP(everything[n], alone, average=False) for n in mine}
    calls = []

    def before(stage, last):
        calls.append(("before", stage, last))
        modules[stage].sync = last

    def after(stage, last):
        calls.append(("after", stage, last))
    pipeline = Pipeline(modules, plans, make_groups(plans), cpu(3, 5), before, after)
    inputs = list(x)
    pipeline.step(inputs, lambda out, mb: out.square().sum())
    assert not any(t.requires_grad for t in inputs)
    each = [(word, n, i == m - 1) for word in ("before", "after") for n in mine for i in range(m)]
    assert sorted(calls) == sorted(each)
    for n in mine:
        for parameter, q in everything[n].named_parameters():
            torch.testing.assert_close(q.grad, want[n][parameter])


def test_any_module():
    run(each, 2, check_any_module, [
        ("1f1b", 1), ("interleaved", 2), ("bfs", 3), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2),
        ("dualpipe-v", 2),
    ])


class WeightNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))

    def forward(self, x):
        return self.a(x)


class LowRank(nn.Module):
    """W + A B: a weight that is computed."""

    def __init__(self):
        super().__init__()
        self.W = nn.Parameter(torch.randn(5, 5))
        self.A = nn.Parameter(torch.randn(5, 2))
        self.B = nn.Parameter(torch.randn(2, 5))

    def forward(self, x):
        return F.linear(x, self.W + self.A @ self.B)


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, x):
        weights = {name: 2 * p for name, p in self.a.named_parameters()}
        return torch.func.functional_call(self.a, weights, (x,))


class Flat(nn.Module):
    """A Linear whose input has one dimension."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(15, 15)

    def forward(self, x):
        return self.a(x.flatten()).view(3, 5)


class InPlaceBehind(nn.Module):
    """An in-place operation behind a Linear, whose output is a view."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, x):
        y = self.a(x.view(1, 3, 5))
        y.mul_(2).relu_()
        return y[0]


class InPlaceFirst(nn.Module):
    """Begins with an in-place operation."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, x):
        return self.a(x.mul_(2)) + 1


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.a(x).double()


KINDS_OF_STAGES = [
    WeightNorm, LowRank, Functional, Flat, InPlaceBehind, InPlaceFirst, Autocast]


def check_stage(kind, name, first_frozen=False):
    p = dist.get_world_size()
    m = 4
    torch.manual_seed(0)
    plans = make_plans(name, p, m)
    everything = [kind() for _ in homes(plans)]
    everything[0].requires_grad_(not first_frozen)
    x = torch.randn(m, 3, 5)
    for row in x:
        out = row.clone()
        for module in everything:
            out = module(out)
        out.square().sum().backward()
    mine = stages_of(plans[dist.get_rank()])
    want = {n: {q: q.grad for q in everything[n].parameters()} for n in mine}
    for module in everything:
        module.zero_grad()
    modules = {n: everything[n] for n in mine}
    pipeline = Pipeline(modules, plans, make_groups(plans), cpu(3, 5))
    pipeline.step([row.clone() for row in x], lambda out, mb: out.square().sum())
    for n in mine:
        for q, grad in want[n].items():
            torch.testing.assert_close(q.grad, grad)


def test_w_apart_from_b_in_any_stage():
    cases = [(kind, "zb-h1") for kind in KINDS_OF_STAGES]
    run(each, 2, check_stage, [*cases, (InPlaceFirst, "1f1b"), (InPlaceFirst, "zb-v")])


def test_a_first_stage_with_nothing_to_train():
    names = ("1f1b", "zb-h1", "zb-v", "dualpipe-v")
    run(each, 2, check_stage, [(LowRank, name, True) for name in names])


def check_nothing_goes_to_frozen_stages():
    """Where nothing is trained, neither in a stage nor before it, no gradients are sent to it, and
    no activations are kept.
    """
    p = dist.get_world_size()
    layers = [(str(i), nn.Linear(5, 5)) for i in range(p)]
    for _, layer in layers[:-1]:
        layer.requires_grad_(False)
    whole = [pipeline_parallel.Chain([layer]) for layer in layers]
    plans = without_backward(make_plans("zb-h1", p, 4), p - 1)
    stages = Stages(whole, plans)
    pipeline = Pipeline(stages.here, plans, stages.groups, cpu(3, 5))
    optimizer = torch.optim.AdamW(stages.parameters())
    with Ledger(stages, optimizer) as ledger:
        pipeline.step(list(torch.randn(4, 3, 5)), lambda out, mb: out.square().sum())
    rank = dist.get_rank()
    calls = {kind: count["calls"] for kind, count in ledger.collectives.items()}
    table = {0: {"send": 4}, 1: {"recv": 4, "send": 4}, 2: {"recv": 4}}
    assert calls == table[rank]
    flying = {0: 0, 1: 0, 2: 3}[rank]
    assert in_flight(plans[rank]) == pipeline.most == flying
    assert (ledger.memory["activations"] > 0) == (rank == 2)
    with pytest.raises(ValueError, match="has something to train, but no B in the plan"):
        Pipeline({rank: nn.Linear(5, 5)}, without_backward(plans, p), stages.groups, cpu(3, 5))
    plans[2] = [action for action in plans[2] if action.kind == "F" or action.microbatch != 1]
    if rank < 2:
        Pipeline({rank: nn.Identity()}, plans, stages.groups, cpu(3, 5))
    else:
        with pytest.raises(ValueError, match="has no B of micro-batch 1 in stage 2"):
            Pipeline({2: nn.Linear(5, 5)}, plans, stages.groups, cpu(3, 5))


def test_nothing_goes_to_frozen_stages():
    run(check_nothing_goes_to_frozen_stages, 3)


def check_steps_that_are_refused():
    plans = make_plans("gpipe", 1, 2)
    pipeline = Pipeline({0: nn.Linear(5, 5)}, plans, make_groups(plans), cpu(3, 5))
    for count in (1, 3):
        with pytest.raises(ValueError, match=f"{count} inputs for a plan of 2 micro-batches"):
            pipeline.step(list(torch.zeros(count, 3, 5)), lambda out, mb: out.sum())
        with pytest.raises(ValueError, match=f"{count} inputs for a plan of 2 micro-batches"):
            pipeline.evaluate(list(torch.zeros(count, 3, 5)), lambda out, mb: out.sum())
    wrong = r"the plan is for the stages \[0\], the modules are \[1\]"
    with pytest.raises(ValueError, match=wrong):
        Pipeline({1: nn.Linear(5, 5)}, plans, make_groups(plans), cpu(3, 5))
    plans = make_plans("pipedream", 1, 2)
    pipeline = Pipeline({0: nn.Linear(5, 5)}, plans, make_groups(plans), cpu(3, 5))
    with pytest.raises(ValueError, match="the plan has updates"):
        pipeline.step(list(torch.zeros(2, 3, 5)), lambda out, mb: out.sum())


def test_a_step_with_wrong_inputs_or_without_its_update_is_refused():
    run(check_steps_that_are_refused, 1)


def test_hooks_that_a_split_backward_would_call_twice_are_refused():
    module = Odd()
    for p in (module.norm.weight, module.a.weight):
        handle = p.register_hook(lambda grad: grad)
        later = []
        with SplitLinears(later):
            edge = get_gradient_edge(module(torch.ones(3, 5)).sum())
        with pytest.raises(ValueError, match="register_post_accumulate_grad_hook"):
            input_gradient(edge, None, later)
        handle.remove()
        input_gradient(edge, None, later)


def check_two_pipelines():
    """Ranks 0, 1 and ranks 2, 3 each train with another half of the batch."""
    cfg = GPTConfig(layers=2, width=8, heads=2, seq=4)
    plans = make_plans("zb-h1", 2, 2)
    half = dist.get_rank() // 2
    groups = make_groups(plans, [(0, 1)], pipelines=[[0, 1], [2, 3]])
    x = torch.randint(256, (2, 4), generator=torch.Generator().manual_seed(half))
    plain = build(cfg, 0, dtype=torch.float64)
    loss_sum(plain(x), x).backward()
    model = build(cfg, 0, dtype=torch.float64)
    model = pipeline_parallel.parallelize(model, plans, cpu(1, 4, 8), groups=groups)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    pipeline_parallel.train_step(model, optimizer, x, x, 1, 0)
    found = pipeline_parallel.full_gradients(model)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(found[name], p.grad)


def test_two_pipelines():
    run(check_two_pipelines, 4)


def check_every_rank_makes_every_group():
    """Subgroups of NCCL are made by all ranks of the world; each direction of a link has one."""
    made = []
    new_group = dist.new_group
    get_backend = dist.get_backend

    def note(ranks, *more, **options):
        assert not more and not options
        made.append(list(ranks))
        return new_group(ranks)
    dist.new_group = note
    dist.get_backend = lambda *group: "nccl"  # what gloo carries here, but with NCCL's groups
    plans = make_plans("zb-h1", 2, 4)
    groups = make_groups(plans, [(0, 1)], pipelines=[[0, 1], [2, 3]])
    dist.get_backend = get_backend
    assert made == [[0, 1], [0, 1], [1, 0], [0, 1], [2, 3], [2, 3], [3, 2], [2, 3]]  # on all ranks
    assert set(groups.links) == {(0, 1), (1, 0)}
    assert groups.links[0, 1] is not groups.links[1, 0]
    torch.manual_seed(0)
    everything = [nn.Linear(5, 5), nn.Linear(5, 5)]
    pipeline = Pipeline({groups.rank: everything[groups.rank]}, plans, groups, cpu(3, 5))
    x = torch.randn(4, 3, 5)
    loss = pipeline.step(list(x), lambda out, mb: out.square().sum())
    if groups.rank == 1:
        want = everything[1](everything[0](x)).square().sum()
        torch.testing.assert_close(loss, want.detach())


def test_every_rank_makes_every_group():
    run(check_every_rank_makes_every_group, 4)


def check_by_host():
    """gloo cannot move the memory of a GPU: its tensors go through the CPU."""
    plans = make_plans("1f1b", 2, 4)
    groups = make_groups(plans)
    gpu = Boundary(torch.Size((3, 5)), torch.float64, torch.device("cuda", 0))
    assert pipeline_parallel.Mail(groups, gpu).by_host
    torch.manual_seed(0)
    modules = [nn.Linear(5, 5), nn.Linear(5, 5)]
    pipeline = Pipeline({groups.rank: modules[groups.rank]}, plans, groups, cpu(3, 5))
    assert not pipeline.mail.by_host
    pipeline.mail.by_host = True
    moved = []
    arrived = []
    to_cpu = torch.Tensor.cpu
    to_device = torch.Tensor.to
    torch.Tensor.cpu = lambda t: moved.append(t.shape) or to_cpu(t)
    torch.Tensor.to = lambda t, *place: arrived.append(t.shape) or to_device(t, *place)
    pipeline.step(list(torch.randn(4, 3, 5)), lambda out, mb: out.sum())
    torch.Tensor.cpu = to_cpu
    torch.Tensor.to = to_device
    assert moved == [torch.Size((3, 5))] * 4
    assert [size for size in arrived if size] == moved  # what was sent does not come back
    assert modules[groups.rank].weight.grad is not None


class NoWaiting:
    """A clock whose marks are numbers, while nothing may wait for a device."""

    def __init__(self):
        self.time = 0

    def mark(self):
        self.time += 1
        return self.time


def check_the_clock():
    def forbidden(*args):
        raise AssertionError("a step waits for the device")
    torch.cuda.synchronize = forbidden
    torch.cuda.Stream.synchronize = forbidden
    plans = make_plans("1f1b", 2, 3)
    groups = make_groups(plans)
    pipeline = Pipeline({groups.rank: nn.Linear(5, 5)}, plans, groups, cpu(3, 5))
    pipeline.step(list(torch.zeros(3, 3, 5)), lambda out, mb: out.sum())
    assert pipeline.played == [] and pipeline.clock is None
    pipeline.clock = NoWaiting()
    pipeline.step(list(torch.zeros(3, 3, 5)), lambda out, mb: out.sum())
    assert [action for action, _, _ in pipeline.played] == plans[groups.rank]
    assert [mark for _, *marks in pipeline.played for mark in marks] == list(range(1, 13))


def check_shapes_are_asserted(size, dtype):
    plans = make_plans("gpipe", 2, 1)
    boundary = Boundary(torch.Size(size), dtype, torch.device("cpu"))
    groups = make_groups(plans)
    pipeline = Pipeline({groups.rank: nn.Linear(5, 5)}, plans, groups, boundary)
    if groups.rank == 0:
        with pytest.raises(ValueError, match="but the boundary is"):
            pipeline.step([torch.zeros(3, 5)], None)


def check_parameters_outside_of_the_stage(name):
    """The loss has a parameter of its own: a split backward finds it as an ordinary one does."""
    plans = make_plans(name, 2, 4)
    groups = make_groups(plans)
    torch.manual_seed(0)
    modules = [nn.Linear(5, 5), nn.Linear(5, 5)]
    scale = nn.Parameter(torch.ones(5))
    x = torch.randn(4, 3, 5)
    (modules[1](modules[0](x)) * scale).square().sum().backward()
    want = scale.grad
    scale.grad = None
    pipeline = Pipeline({groups.rank: modules[groups.rank]}, plans, groups, cpu(3, 5))
    pipeline.step(list(x), lambda out, mb: (out * scale).square().sum())
    if groups.rank == 1:
        torch.testing.assert_close(scale.grad, want)


def check_one_dtype_of_the_loss():
    """Whatever torch's default is, all ranks may sum their losses."""
    torch.set_default_dtype(torch.float32)  # what runs behind this check has it too
    plans = make_plans("1f1b", 2, 4)
    groups = make_groups(plans)
    module = nn.Linear(5, 5, dtype=torch.float64)
    pipeline = Pipeline({groups.rank: module}, plans, groups, cpu(3, 5))
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    loss = pipeline.step(list(x), lambda out, mb: out.square().sum())
    assert loss.dtype == pipeline.evaluate(list(x), lambda out, mb: out.sum()).dtype
    assert loss.dtype == torch.float64
    assert (summed(loss) > 0) and (loss > 0) == (groups.rank == 1)


def check_norm_of_half_precision():
    """Squares of what fp16 can hold are more than it can hold."""
    layers = []
    for name in "01":
        layers.append((name, nn.Linear(5, 5, bias=False, dtype=torch.float16)))
    whole = [pipeline_parallel.Chain([layer]) for layer in layers]
    stages = Stages(whole, make_plans("1f1b", 2, 2))
    for p in stages.parameters():
        p.grad = torch.full_like(p, 100)
    norm = stages.sum_and_clip(1.0)
    assert norm.item() == pytest.approx(100 * 50 ** 0.5)
    for p in stages.parameters():
        torch.testing.assert_close(p.grad, torch.full_like(p, 50 ** -0.5), rtol=1e-3, atol=0)


def check_tied_parameters():
    """A trained one needs a group that sums its gradient; a frozen one is saved once, without."""
    plans = make_plans("1f1b", 2, 2)
    layers = [("first", nn.Linear(5, 5)), ("second", nn.Linear(5, 5))]
    layers[1][1].weight = layers[0][1].weight
    whole = [pipeline_parallel.Chain([layer]) for layer in layers]
    with pytest.raises(ValueError, match="no group to sum its gradient"):
        Stages(whole, plans, make_groups(plans))
    stages = Stages(whole, plans, make_groups(plans, [(0, 1)]))
    assert set(stages.tied) == {layers[0][1].weight}
    layers[0][1].weight.requires_grad_(False)
    frozen = Stages(whole, plans, make_groups(plans))
    assert not frozen.tied
    writes = {}
    for piece in pipeline_parallel.pieces(frozen, None):
        writes[piece.name] = piece.writes
    if dist.get_rank() == 0:
        assert writes == {"first.weight": True, "first.bias": True}
    else:  # rank 0 has written it
        assert writes == {"first.weight": False, "second.bias": True}


def test_trained_names_are_in_order():
    """Ranks that gather in different orders would take one gradient for another."""
    run(check_trained_names, 1)


def check_trained_names():
    layers = [(str(i), nn.Linear(5, 5)) for i in range(20)]
    stages = Stages([pipeline_parallel.Chain(layers)], make_plans("1f1b", 1, 1))
    assert list(stages.trained) == list(stages.origins)


def check_stages_with_equal_names():
    plans = make_plans("1f1b", 2, 2)
    with pytest.raises(ValueError, match="two stages have a 'weight'"):
        Stages([nn.Linear(5, 5), nn.Linear(5, 5)], plans)


def check_on_two_ranks():
    check_by_host()
    check_the_clock()
    each(check_shapes_are_asserted, [((3, 4), torch.float64), ((3, 5), torch.float32)])
    each(check_parameters_outside_of_the_stage, [("1f1b",), ("zb-h1",)])
    check_norm_of_half_precision()
    check_tied_parameters()
    check_stages_with_equal_names()
    check_one_dtype_of_the_loss()


def test_host_clock_shapes_parameters_and_dtypes():
    run(check_on_two_ranks, 2)


# ---- the copy --------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.gain * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


class Gated(nn.Module):
    def __init__(self, width, wide):
        super().__init__()
        self.rms = RMSNorm(width)
        self.gate = nn.Linear(width, wide, bias=False)
        self.value = nn.Linear(width, wide, bias=False)
        self.back = nn.Linear(wide, width, bias=False)

    def forward(self, x):
        y = self.rms(x)
        return x + self.back(F.silu(self.gate(y)) * self.value(y))


class Readout(nn.Module):
    """Scores by the table of the embedding, which it shares."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, x):
        return x @ self.table.T


class Lookup(nn.Module):
    def __init__(self, count, width):
        super().__init__()
        self.table = nn.Parameter(torch.randn(count, width))
        self.register_buffer("calls", torch.tensor(7))  # of another dtype than the parameters

    def forward(self, ids):
        return self.table[ids]


def other_model():
    torch.manual_seed(0)
    lookup = Lookup(11, 7)
    blocks = [Gated(7, 9) for _ in range(6)]
    return nn.Sequential(lookup, *blocks, RMSNorm(7), Readout(lookup.table))


def check_copy(name):
    """Section 1 alone trains a model that is not ours: 3 steps with clipping equal one process."""
    module = copied("pipeline_parallel")
    p = dist.get_world_size()
    m = 8
    plain = other_model()
    model = other_model()
    plans = module.make_plans(name, p, m)
    count = len(module.homes(plans))
    layers = list(model.named_children())
    cuts = [len(layers) * n // count for n in range(count + 1)]
    whole = [module.Chain(layers[a:b]) for a, b in zip(cuts, cuts[1:])]
    stages = module.Stages(whole, plans)
    boundary = module.Boundary(torch.Size((2, 5, 7)), torch.float64, torch.device("cpu"))
    pipeline = module.Pipeline(stages.here, plans, stages.groups, boundary)
    optimizer = torch.optim.AdamW(stages.parameters(), 1e-2)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), 1e-2)
    for step in range(3):
        ids = torch.randint(11, (16, 6), generator=torch.Generator().manual_seed(step))
        x = ids[:, :-1]
        targets = ids[:, 1:].split(2)

        def loss_of(out, microbatch):
            labels = targets[microbatch].flatten()
            return F.cross_entropy(out.flatten(0, 1), labels, reduction="sum") / 80
        optimizer.zero_grad()
        loss = pipeline.step(x.split(2), loss_of)
        norm = stages.sum_and_clip(0.5)
        optimizer.step()

        plain_optimizer.zero_grad()
        want = sum(loss_of(plain(rows), i) for i, rows in enumerate(x.split(2)))
        want.backward()
        want_norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        plain_optimizer.step()
        torch.testing.assert_close([summed(loss), norm], [want.detach(), want_norm])
        wanted = {name: q.grad for name, q in plain.named_parameters()}
        torch.testing.assert_close(stages.full_gradients(), wanted, rtol=1e-10, atol=1e-12)
        state = stages.full_state_dict()
        torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("world, names", [
    (2, ["1f1b", "zb-v", "dualpipe-v"]),
    (3, ["auto"]),
    (4, ["zb-h1", "interleaved"])])
def test_the_copy_trains_another_model(world, names):
    run(each, world, check_copy, [(name,) for name in names])


# ---- cost ------------------------------------------------------------------------


def check_activations():
    """Each schedule keeps as many micro-batches as the docstring says, in multiples of naive's one.
    """
    p = dist.get_world_size()
    rank = dist.get_rank()
    cfg = GPTConfig(layers=8, width=16, heads=2, seq=8)
    m = 8
    x = torch.zeros(m, cfg.seq, dtype=torch.int64)
    kept = {}
    for name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v"):
        plans = make_plans(name, p, m)
        model = build(cfg, 0, dtype=torch.float64)
        model = pipeline_parallel.parallelize(model, plans, cpu(1, cfg.seq, cfg.width))
        optimizer = adamw(model.parameters(), 1e-3)
        with Ledger(model, optimizer) as ledger:
            pipeline_parallel.train_step(model, optimizer, x, x.clone(), x.numel(), 1.0)
        kept[name] = ledger.memory["activations"]
        assert model.pipeline.most / chunks(plans[rank]) == in_flight(plans[rank])
    whole = 0
    if rank in (0, p - 1):  # inputs on the first stage, targets on the last, of the whole batch
        whole = x.nbytes
    one = kept["naive"] - whole
    assert kept["gpipe"] == m * one + whole
    assert kept["1f1b"] == (p - rank) * one + whole
    assert kept["zb-h1"] <= 1.03 * p * one + whole
    assert kept["zb-h2"] <= 1.03 * (2 * p - 1) * one + whole
    if 0 < rank < p - 1:
        assert kept["zb-v"] <= 1.03 * p * one


def test_activations_are_what_the_schedule_promises():
    run(check_activations, 4)


@pytest.mark.parametrize("world, schedule, ranks", [
    (4, "1f1b", [0, 1]),
    (2, "zb-h1", [1]),
    (2, "interleaved", [0]),
    (2, "zb-v", [0, 1]),
    (2, "dualpipe-v", [1]),
    (2, "pipedream", [0])])
def test_cost(world, schedule, ranks):
    """Bytes sent and held, as the textbook has them and as a dry run counts them."""
    flags = ("--layers", "4", "--schedule", schedule)
    real = dry_run_agrees("pipeline_parallel", world, *flags, ranks=ranks)
    textbook(real)
    boundary = 4 * 8 * 16 * 32
    last = world - 1
    for one in real["ranks"]:
        rank = one["rank"]
        crossed = {"interleaved": 3, "zb-v": 2, "dualpipe-v": 2}.get(schedule, 1)
        if 0 < rank < last:
            crossed = 2
        collectives = one["collectives"]
        assert collectives["send"]["wire"] == crossed * boundary
        assert collectives["recv"]["payload"] == crossed * boundary
        tied = 0
        if rank in (0, last) and schedule not in V_SHAPED:
            tied = 4 * 256 * 32
        assert collectives["all_reduce"]["wire"] == tied + 4 * 2 * last / world


def test_cost_of_frozen_layers():
    """Nothing is sent to a rank that trains nothing, nor held for it."""
    flags = ("--layers", "4", "--schedule", "zb-h1", "--train", "blocks.[23]")
    real = dry_run_agrees("pipeline_parallel", 2, *flags)
    textbook(real)
    first, last = real["ranks"]
    assert "recv" not in first["collectives"] and "send" not in last["collectives"]
    assert first["memory"]["gradients"] == first["memory"]["optimizer"] == 0


def test_both_times_both_and_measures_the_schedule():
    flags = ("--steps", "4", "--layers", "2", "--width", "32", "--impl", "both")
    report = script("pipeline_parallel", 2, *flags)
    assert report["ms_per_step"] > 0 and report["torch_ms_per_step"] > 0
    assert report["measured_ms"] > 0 and report["planned_ms"] > 0
    assert report["in_flight"] == [2, 1]


# ---- planted bugs: each must fail the check ------------------------------------


def not_divided(module):
    """Each micro-batch counts as the whole batch: gradients are M times too large, which clipping
    and AdamW hide."""
    step = module.train_step

    def broken(model, optimizer, x, y, valid, clip):
        return step(model, optimizer, x, y, valid / 4, clip)
    module.train_step = broken


def tied_not_summed(module):
    module.Stages.sum_tied_gradients = lambda self: None


def tied_counted_twice(module):
    """The norm takes both copies of the tied embedding."""
    made = module.Stages.__init__

    def broken(self, *args):
        made(self, *args)
        self.elsewhere = set()
    module.Stages.__init__ = broken


def last_microbatch_only(module):
    backward = module.Pipeline.backward

    def broken(self, action, grad):
        for p in self.modules[action.stage].parameters():
            p.grad = None
        return backward(self, action, grad)
    module.Pipeline.backward = broken


def weight_gradient_forgotten(module):
    weights = module.weight_gradients
    done = []

    def broken(later):
        done.append(later)
        if len(done) % 4:
            weights(later)
    module.weight_gradients = broken


def newest_weights(module):
    """A reference without staleness: both stages take their weights when the last stage does."""
    step = module.stale_step

    def broken(*args):
        *rest, plans = args
        first = [Action(action.kind, action.microbatch, 0) for action in plans[-1]]
        return step(*rest, [first, plans[-1]])
    module.stale_step = broken


@pytest.mark.parametrize("plant, schedule", [
    (not_divided, "1f1b"),
    (tied_not_summed, "1f1b"),
    (tied_counted_twice, "zb-h2"),
    (last_microbatch_only, "gpipe"),
    (weight_gradient_forgotten, "zb-h1"),
    (newest_weights, "pipedream")])
def test_planted(plant, schedule):
    proves("pipeline_parallel", 2, "--schedule", schedule, "--layers", "4", plant=plant)


def deadlock(module):
    module.make_plans = lambda *args: [plan[::-1] for plan in make_plans(*args)]


def test_a_deadlock_is_found():
    said = script("pipeline_parallel", 1, "--simulate", "--pp", "4", plant=deadlock, code=2)
    assert "deadlock" in said
