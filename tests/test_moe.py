import math

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import moe
from common import MLP, GPTConfig
from conftest import SMALL, alone, dry_run_agrees, proves, run, script, textbook


@pytest.mark.parametrize("world, flags", [
    (1, ["--capacity", "0.8", "--balance", "bias"]), (2, []), (2, ["--impl", "torch"]),
    (2, ["--top-k", "1", "--capacity", "1.1", "--shared"]), (2, ["--balance", "bias", "--shared"]),
    (2, ["--balance", "none", "--capacity", "0.5"]), (4, ["--ep", "2", "--shared"]), (2, ["--ep", "1"]),
    (4, ["--capacity", "0.7", "--clip", "0"]),
    (4, ["--ep", "2", "--capacity", "0.6", "--balance", "bias", "--top-k", "1"]),
    (4, ["--ep", "2", "--impl", "torch", "--top-k", "3", "--balance", "bias"]),
    (3, ["--experts", "9", "--batch", "6", "--vocab", "257"])])
def test_equals_plain(world, flags):
    report = proves("moe", world, *flags)
    textbook(report)
    assert (report["dropped"] > 0) == ("--capacity" in flags)


def test_fp32_by_default():
    """In fp32 near ties fall by rounding: the plain run follows the ranks' choices, and everything else must agree."""
    check = script("moe", 2, *SMALL, "--steps", "12", "--pad", "0.3")["check"]
    assert check["passed"] and check["gradient"] < 2e-3


def round_robin(module):
    """Experts chosen equally often, as a dry run takes them to be."""
    def route(logits, top_k, bias):
        chosen = torch.arange(logits.shape[0] * top_k).view(-1, top_k) % logits.shape[1]
        probs = logits.softmax(-1)
        gates = probs.gather(-1, chosen)
        return chosen, gates / gates.sum(-1, keepdim=True) if top_k > 1 else gates, probs
    if not dist.is_initialized():
        module.route = route


@pytest.mark.parametrize("world, flags", [
    (2, []), (4, ["--ep", "2", "--shared", "--balance", "bias"]), (2, ["--capacity", "0.5"])])
def test_cost_is_the_dry_runs(world, flags):
    real = dry_run_agrees("moe", world, *flags, plant=round_robin)
    textbook(real)
    layers, width, tokens, k, experts = 2, 32, 8 * 16 // world, 2, 8
    share = 0.5 if "--capacity" in flags else 1
    for rank in real["ranks"]:
        moved = rank["collectives"]["all_to_all"]
        assert moved["calls"] == 5 * layers
        assert moved["payload"] == layers * (4 * tokens * k * width * 4 * share + 8 * experts)


# ---- the layer against a loop over tokens -------------------------------------------


def loop_over_tokens(x, router, mlps, top_k, bias, limit=None):
    """The slowest definition: one token, one expert at a time -> outputs, choices of each expert."""
    probs, taken, out = (x @ router.weight.T).softmax(-1), [0] * len(mlps), []
    for n, token in enumerate(x):
        chosen = sorted(range(len(mlps)), key=lambda e: -float(probs[n, e] + bias[e]))[:top_k]
        total, y = sum(probs[n, e] for e in chosen) if top_k > 1 else 1, torch.zeros_like(token)
        for e in chosen:
            taken[e] += 1
            if limit is None or taken[e] <= limit:
                y = y + probs[n, e] / total * mlps[e](token)
        out.append(y)
    return torch.stack(out) if out else x[:0], taken


def check_layer(forced, top_k, factor):
    """Rank 1 has no tokens at all; with `forced` all tokens choose expert 0, so that all others get none."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    router, mlps = nn.Linear(6, 4, bias=False), [MLP(GPTConfig(width=6)) for _ in range(4)]
    bias = torch.tensor([9.0, 0, 0, 0] if forced else [0.3, 0.0, -0.1, 0.2])
    x = torch.randn(world, 10, 6, requires_grad=True)
    n = 10 if rank != 1 else 0
    here = 4 // world
    mine = mlps[rank * here:][:here]
    layer = moe.MoE(router, mine, None, top_k, dist.group.WORLD, balance="bias", limit=factor)
    layer.bias.copy_(bias)
    mine = x[rank, :n].detach().requires_grad_()
    y = layer(mine)
    y.sin().sum().backward()
    moe.sum_gradients(layer, dist.new_group([rank], use_local_synchronization=True), dist.group.WORLD)
    ours = {name: p.grad for name, p in layer.experts.items()}, router.weight.grad.clone()
    router.zero_grad()
    want, load = [], torch.zeros(4)
    for r in range(world):
        limit = moe.capacity(factor, top_k, 10, 4) if factor else None
        out, taken = loop_over_tokens(x[r] if r != 1 else x[r, :0], router, mlps, top_k, bias, limit)
        want.append(out)
        load += torch.tensor(taken)
    torch.testing.assert_close(y, want[rank], rtol=0, atol=1e-13)
    torch.cat(want).sin().sum().backward()
    assert layer.load.tolist() == load.tolist()
    torch.testing.assert_close(mine.grad, x.grad[rank, :n], rtol=0, atol=1e-12)
    torch.testing.assert_close(ours[1], router.weight.grad, rtol=0, atol=1e-12)
    for e, mlp in enumerate(mlps[rank * here:][:here]):
        for name, p in mlp.named_parameters():
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            torch.testing.assert_close(ours[0][name.replace(".", "_")][e], grad, rtol=0, atol=1e-12)
            if forced and top_k == 1 and rank * here + e:
                assert not ours[0][name.replace(".", "_")][e].any()


@pytest.mark.parametrize("world, forced, top_k, factor", [
    (2, True, 1, 0), (2, False, 2, 0.7), (4, True, 2, 0), (4, False, 1, 1.1)])
def test_layer(world, forced, top_k, factor):
    run(check_layer, world, forced, top_k, factor)


# ---- pure parts ------------------------------------------------------------------------


def check_fine_tuning():
    """Under autocast the router still chooses in fp32; frozen parameters get no gradient."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    router, mlps = nn.Linear(6, 4, bias=False), [MLP(GPTConfig(width=6)) for _ in range(4)]
    layer, x = moe.MoE(router.requires_grad_(False), mlps, None, 2, dist.group.WORLD), torch.randn(64, 6)
    for p in layer.experts.parameters():
        p.requires_grad_(False)
    layer.experts.up_bias.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).square().sum().backward()
    assert torch.equal(layer.chosen, moe.route(router(x), 2, layer.bias)[0])
    norm = moe.sum_gradients(nn.Sequential(layer, nn.Linear(2, 2)), dist.group.WORLD, dist.group.WORLD)
    assert norm == layer.experts.up_bias.grad.norm() > 0 and router.weight.grad is None


def test_fine_tuning():
    run(check_fine_tuning, 1)


def test_uniform_routing_costs_alpha():
    probs = torch.full((40, 8), 1 / 8, dtype=torch.float64)
    for top_k in 1, 2:
        load = torch.full((8,), 40 * top_k // 8)
        assert moe.balancing_loss(load, torch.zeros(40, 8), probs, top_k, alpha=0.01, beta=0) == 0.01
    z = moe.balancing_loss(load, torch.zeros(40, 8, dtype=torch.float64), probs, 2, alpha=0, beta=1)
    assert z.item() == pytest.approx(math.log(8) ** 2, rel=1e-14)


def test_bias_chooses_but_does_not_gate():
    torch.manual_seed(0)
    logits, bias = torch.randn(50, 8), torch.linspace(-0.2, 0.2, 8)
    for top_k in 1, 3:
        chosen, gates, probs = moe.route(logits, top_k, bias)
        assert (chosen != moe.route(logits, top_k, torch.zeros(8))[0]).any()
        want = probs.gather(1, chosen)
        torch.testing.assert_close(gates, want / want.sum(1, keepdim=True) if top_k > 1 else want)
        assert torch.equal(probs, F.softmax(logits, -1))


def test_capacity():
    for factor, top_k, tokens, experts in (1.0, 1, 40, 8), (1.25, 2, 33, 8), (1.1, 2, 40, 8), (0.5, 2, 3, 8):
        hundredths = round(100 * factor) * top_k * tokens
        assert moe.capacity(factor, top_k, tokens, experts) == -(-hundredths // (100 * experts))


def test_balance():
    """In the last 20 of 200 steps no expert has 1.3 times the mean; with neither, one has three times."""
    flags = "--layers", "1", "--width", "64", "--heads", "4", "--seq", "64", "--batch", "16", "--no-check"
    for report in alone("moe", *((*flags, "--steps", "200", "--balance", balance) for balance in ("aux", "bias"))):
        assert max(report["load"]["last"][0]) < 1.3, report["load"]


# ---- planted bugs: each must fail the check ----------------------------------------------


def no_backward(module):
    """What autograd does with a bare all_to_all_single: the graph ends there."""
    def broken(ctx, g):
        return g.new_zeros(sum(ctx.way[1]), *g.shape[1:]), None, None, None
    module.AllToAll.backward = staticmethod(broken)


def router_detached(module):
    route = module.route
    module.route = lambda logits, *rest: route(logits.detach(), *rest)


def summed_over_ep(module):
    """Gradients of different experts are added up."""
    whole = module.sum_gradients
    module.sum_gradients = lambda model, replicas, ep: whole(model, ep, ep)


def biased_gates(module):
    route = module.route

    def broken(logits, top_k, bias):
        chosen, _, probs = route(logits, top_k, bias)
        gates = (probs + bias).gather(-1, chosen)
        return chosen, gates / gates.sum(-1, keepdim=True), probs
    module.route = broken


def aux_without_factor(module):
    loss = module.balancing_loss
    module.balancing_loss = lambda load, logits, probs, k: loss(load, logits, probs, k) / len(load)


def local_load(module):
    """Every rank takes f over its own tokens only."""
    loss = module.balancing_loss
    module.balancing_loss = lambda load, logits, probs, k: loss(
        dist.get_world_size() * F.one_hot(probs.topk(k).indices, len(load)).sum((0, 1)), logits, probs, k)


def not_regrouped(module):
    """Rows of several sources stay in the order in which they came."""
    linear = module.grouped_linear
    module.grouped_linear = lambda x, w, b, sizes, one: linear(x, w, b, sizes[::-1], one)


@pytest.mark.parametrize("plant, flags", [
    (no_backward, []), (router_detached, []), (summed_over_ep, []),
    (biased_gates, ["--balance", "bias", "--steps", "9"]),
    (aux_without_factor, []), (local_load, []), (not_regrouped, [])])
def test_planted(plant, flags):
    proves("moe", 2, *flags, plant=plant)


@pytest.mark.parametrize("world, flags", [
    (2, ["--experts", "5"]), (4, ["--ep", "3"]), (1, ["--top-k", "9"]), (1, ["--capacity", "-1"]),
    (2, ["--batch", "3"])])
def test_bad_usage(world, flags):
    script("moe", world, *flags, code=2)
