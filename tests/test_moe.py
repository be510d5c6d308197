import copy
import math
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import common
import moe
from conftest import (
    SMALL, alone, copied, dry_run_agrees, each, is_clear, outcome, proves, run, script, textbook)

LLAMA = "--model", "llama-toy"
MIXTRAL = "--model", "mixtral-toy", "--kv-heads", "2", "--hidden", "40"


@pytest.mark.parametrize("world, flags", [
    (1, ["--capacity", "0.8", "--balance", "bias"]),
    (2, ["--eval-every", "1"]),
    (2, [*LLAMA, "--top-k", "1", "--capacity", "1.1", "--shared", "--ep", "1"]),
    (2, [*MIXTRAL, "--balance", "none", "--impl", "torch"]),
    (4, [*MIXTRAL, "--ep", "2", "--shared", "--balance", "bias", "--steps", "3"]),
    (3, ["--experts", "9", "--batch", "6", "--vocab", "257", "--capacity", "0.7"]),
])
def test_equals_plain(world, flags):
    report = proves("moe", world, *flags)
    textbook(report)
    assert (report["dropped"] > 0) == ("--capacity" in flags)


@pytest.mark.parametrize("flags", [
    ["--train", "blocks.1", "--capacity", "0.8"],  # nothing goes back through block 0
    ["--train", "attn", "--balance", "bias", "--shared"],  # no expert is trained
])
def test_frozen_equals_plain(flags):
    proves("moe", 2, *flags)


def test_fp32_by_default():
    """Near ties of the router fall by rounding: the losses are judged."""
    report = script("moe", 2, *SMALL, "--steps", "6", "--pad", "0.3")
    assert report["check"]["passed"]


def test_saved_and_resumed(tmp_path):
    """2 ranks save, 4 ranks go on, with the biases: as one run that was never interrupted."""
    flags = *LLAMA, "--balance", "bias"
    proves("moe", 2, *flags, "--steps", "3", "--save", str(tmp_path))
    resume = "--resume", str(tmp_path), "--steps", "5"
    resumed = proves("moe", 4, *flags, "--ep", "2", *resume)
    assert len(resumed["loss"]) == 2


# ---- cost ------------------------------------------------------------------------------


def round_robin(module):
    """Experts are chosen equally often, as a dry run takes them to be."""
    def route(logits, top_k, bias, normalize):
        chosen = torch.arange(logits.shape[0] * top_k).view(-1, top_k) % logits.shape[1]
        probs = logits.softmax(-1)
        gates = probs.gather(-1, chosen)
        return chosen, gates / gates.sum(-1, keepdim=True), probs

    module.route = route


@pytest.mark.parametrize("world, flags, taken", [
    (2, ["--capacity", "0.5"], 0.5),
    (4, [*MIXTRAL, "--ep", "2", "--shared", "--balance", "bias"], 1),
])
def test_cost_is_the_dry_runs(world, flags, taken):
    real = dry_run_agrees("moe", world, *flags, ranks=[world - 1], plant=round_robin)
    textbook(real)
    layers = 2
    rows = 4 * 2 * taken * 8 * 16 // world  # 4 times K N
    for rank in real["ranks"]:
        moved = rank["collectives"]["all_to_all"]
        assert moved["calls"] == 5 * layers
        assert moved["payload"] == layers * (rows * 32 * 4 + 8 * 8)


def test_mixtral_has_46_702_792_704_parameters():
    flags = "--model", "mixtral-8x7b", "--dry-run", "64", "--batch", "64", "--ep", "8"
    report, = alone("moe", (*flags, "--steps", "1", "--layers", "1"))
    layer = 1_451_270_144
    assert report["parameters"]["total"] + 31 * layer == 46_702_792_704


class Operations(TorchDispatchMode):
    """Notes the name of every operation."""

    names = frozenset()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names |= {func._opname}
        return func(*args, **(kwargs or {}))


def check_host_reads(in_one_kernel):
    """A forward and a backward of a layer: the host reads the device once, and writes nothing."""
    torch.set_default_dtype(torch.float32)
    section = copied("moe")
    section.suits_one_kernel = lambda weight: in_one_kernel
    linears = [nn.Linear(8, 8) for _ in range(4 // dist.get_world_size())]
    experts = section.Experts(F.gelu, linears, linears)
    router = nn.Linear(8, 4, bias=False)
    layer = section.MoE(router, experts, top_k=2, normalize=True, ep=dist.group.WORLD)
    reads = []
    tolist = torch.Tensor.tolist
    torch.Tensor.tolist = lambda tensor: reads.append(tensor) or tolist(tensor)
    with Operations() as step:
        layer(torch.randn(40, 8, requires_grad=True)).sum().backward()
    torch.Tensor.tolist = tolist
    assert len(reads) == 1  # in read_counts
    assert not step.names & {"_local_scalar_dense", "lift_fresh", "nonzero"}


def test_host_waits_once():
    run(check_host_reads, 2, False)
    run(check_host_reads, 1, True)


class Sizes(moe.Routing):
    """Of rows that have arrived already."""

    def __init__(self, sizes):
        self.sizes = sizes
        self.ends = torch.tensor(sizes).cumsum(0).int()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_one_kernel_is_the_loop(dtype, tolerance):
    """Outputs and gradients, biases' too, whose sum is a matmul and no contended addition."""
    torch.manual_seed(0)
    linear = moe.StackedLinear([nn.Linear(8, 16, dtype=dtype) for _ in range(4)])
    grad = torch.randn(17, 16, dtype=dtype)
    inputs = torch.randn(17, 8, dtype=dtype)
    results = []
    for call in linear, linear.in_one_kernel:
        linear.zero_grad()
        rows = inputs.clone().requires_grad_()
        y = call(rows, Sizes([3, 0, 5, 9]))
        with Operations() as backward:
            y.backward(grad)
        results.append((y, rows.grad, linear.weight.grad, linear.bias.grad))
    for loop, kernel in zip(*results):
        torch.testing.assert_close(loop, kernel, rtol=tolerance, atol=tolerance)
    assert not backward.names & {"index_add", "index_add_", "index_put", "index_put_"}


# ---- the copy: section 1 in another model, against a loop over tokens --------------------


SIZES = common.GPTConfig(width=7, hidden=5)


class SlowMixture(nn.Module):
    """The slowest definition: one token and one expert at a time, rank after rank."""

    def __init__(self, top_k, normalize, factor):
        super().__init__()
        self.top_k = top_k
        self.normalize = normalize
        self.factor = factor  # of the capacity, or 0
        self.score = nn.Linear(7, 4, bias=False)
        self.ffn = nn.ModuleList(common.SwiGLU(SIZES) for _ in range(4))
        self.sizes = []  # how many of the tokens are each rank's
        self.bias = torch.zeros(4)
        self.load = torch.zeros(4)

    def forward(self, x):
        logits = self.score(x)
        scores = logits.softmax(-1)
        chosen = (scores + self.bias).topk(self.top_k).indices
        out = []
        for numbers in torch.arange(len(x)).split(self.sizes):
            taken = [0] * 4
            most = len(numbers)
            if self.factor:
                most = moe.capacity(self.factor, self.top_k, most, 4)
            for n in numbers:
                out.append(self.of_token(x[n], scores[n], chosen[n].tolist(), taken, most))
        load = torch.bincount(chosen.flatten(), minlength=4).double()
        self.load = self.load + load
        switch = 4 * (load / load.sum() @ scores.mean(0))
        self.loss = 0.1 * switch + 1e-3 * logits.logsumexp(-1).square().mean()
        return torch.stack(out)

    def of_token(self, x, scores, chosen, taken, most):
        total = 1
        if self.normalize and self.top_k > 1:
            total = scores[chosen].sum()
        y = torch.zeros_like(x)
        for e in chosen:
            taken[e] += 1
            if taken[e] <= most:
                y = y + scores[e] / total * self.ffn[e](x)
        return y


class Other(nn.Module):
    """A model that is not the GPT: RMSNorm, no biases, residuals, two mixtures."""

    def __init__(self, *kind):
        super().__init__()
        self.inp = nn.Linear(3, 7, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(7), nn.RMSNorm(7)])
        self.mix = nn.ModuleList([SlowMixture(*kind), SlowMixture(*kind)])
        self.out = nn.Linear(7, 1, bias=False)
        self.recompute = False

    def forward(self, x):  # (N, 3) -> (N, 1)
        x = self.inp(x)
        for norm, mix in zip(self.norms, self.mix):
            if self.recompute:
                x = x + checkpoint(mix, norm(x), use_reentrant=False)
            else:
                x = x + mix(norm(x))
        return self.out(x)


def plain_names(tensors, ep):
    """{name: tensor} of a parallel Other -> of all, gathered, under the names of the plain one."""
    whole = {}
    for name, tensor in moe.gather_experts(tensors, ep).items():
        whole[name.replace(".router.", ".score.").replace(".experts.", ".ffn.")] = tensor
    return whole


TOKENS = [  # of each step, of its two micro-batches: how many tokens each rank has
    [[5, 3, 4, 0], [3, 0, 6, 2]],
    [[4, 4, 1, 1], [2, 2, 3, 3]],
    [[9, 0, 1, 0], [6, 1, 0, 0]],
]


def copied_model(section, plain, replicas, ep):
    """Other with the copy's layers, and the plain one's weights on the ranks that broadcast."""
    model = copy.deepcopy(plain)
    for i, mix in enumerate(model.mix):
        mlps = [mix.ffn[e] for e in common.share(4, ep.size(), ep.rank())]
        experts = section.Experts(F.silu, [mlp.up for mlp in mlps], [mlp.down for mlp in mlps],
                                  [mlp.gate for mlp in mlps])
        model.mix[i] = section.MoE(
            mix.score, experts, top_k=mix.top_k, normalize=mix.normalize, capacity=mix.factor,
            ep=ep, alpha=0.1 / 2, beta=1e-3 / 2, gamma=0.05)
    if replicas.rank() > 0:
        for p in model.parameters():
            p.data.add_(1)
    section.broadcast_parameters(model, replicas)
    return model


def results(total, norm, biases, gradients, state):
    found = {"loss": total, "norm": norm, **state}
    for i, bias in enumerate(biases):
        found[f"bias {i}"] = bias
    for name, gradient in gradients.items():
        found[f"gradient of {name}"] = gradient
    return found


def plain_step(plain, optimizer, batches):
    """A step of the whole batch, all ranks' tokens in order."""
    optimizer.zero_grad()
    total = 0
    for x, y, sizes in batches:
        for mix in plain.mix:
            mix.sizes = sizes
        loss = (plain(x) - y).square().sum() + sum(mix.loss for mix in plain.mix) / 2
        loss.backward()
        total += loss.detach()
    for p in plain.parameters():
        if p.grad is None:  # of an expert that nobody chose. AdamW is to step it all the same
            p.grad = torch.zeros_like(p)
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    optimizer.step()
    for mix in plain.mix:
        mix.bias = mix.bias + 0.05 * (mix.load.mean() - mix.load).sign()
        mix.load = torch.zeros(4)
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    return results(total, norm, [mix.bias for mix in plain.mix], gradients, plain.state_dict())


def our_step(section, model, optimizer, batches, replicas, ep):
    rank = dist.get_rank()
    optimizer.zero_grad()
    total = 0
    for x, y, sizes in batches:
        loss = (model(x.split(sizes)[rank]) - y.split(sizes)[rank]).square().sum()
        loss.backward()
        total += loss.detach()
    section.sum_gradients(model, replicas)
    norm = section.gradient_norm(model, ep)
    section.clip_gradients(model, norm, 0.1)
    optimizer.step()
    total = total + section.balancing_losses(model)
    section.step_biases(model)
    dist.all_reduce(total)
    biases = [layer.gamma * layer.bias_steps for layer in model.mix]
    gradients = plain_names({name: p.grad for name, p in model.named_parameters()}, ep)
    state = plain_names(dict(model.named_parameters()), ep)
    return results(total, norm, biases, gradients, state)


def gap_of_copy(section, ep_size, kind, recompute=False):
    """Three steps of the plain model and of the copy's, two micro-batches each -> worst gap."""
    world = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (world // ep_size, ep_size),
                                 mesh_dim_names=("replicas", "ep"))
    replicas = mesh.get_group("replicas")
    ep = mesh.get_group("ep")
    torch.manual_seed(0)
    plain = Other(*kind)
    model = copied_model(section, plain, replicas, ep)
    model.recompute = recompute
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-5) for m in (plain, model)]
    gaps = []
    for step in TOKENS:
        batches = []
        for sizes in step:
            n = sum(sizes[:world])
            batches.append((torch.randn(n, 3), torch.randn(n, 1), sizes[:world]))
        want = plain_step(plain, optimizers[0], batches)
        found = our_step(section, model, optimizers[1], batches, replicas, ep)
        assert found.keys() == want.keys()
        gaps += [(found[name] - want[name]).abs().max() for name in want]
    gap = torch.stack(gaps).max().detach()
    dist.all_reduce(gap, op=dist.ReduceOp.MAX)
    return gap.item()


def check_copy(*case):
    gap = gap_of_copy(copied("moe"), *case)
    assert gap < 1e-12, gap


@pytest.mark.parametrize("world, cases", [  # ep, (top_k, normalize, capacity), recompute
    (2, [(2, (2, True, 0.0)), (2, (2, False, 0.6), True), (1, (1, True, 1.1))]),
    (4, [(2, (2, True, 0.9), True), (4, (3, False, 0.0))]),
])
def test_copy(world, cases):
    run(each, world, check_copy, cases)


# ---- planted bugs: each must fail the check ----------------------------------------------


def no_backward(section):
    """What autograd does with a bare all_to_all_single: the graph ends there."""
    def broken(ctx, grad):
        return grad.new_zeros(sum(ctx.send), *grad.shape[1:]), None, None, None

    section.AllToAll.backward = staticmethod(broken)


def summed_over_all(section):
    """Gradients of different experts are added up."""
    section.dense_and_experts = lambda model: (list(model.parameters()), [])


def experts_counted_like_dense(section):
    def broken(model, ep):
        return nn.utils.get_total_norm([p.grad for p in model.parameters()])

    section.gradient_norm = broken


def biased_gates(section):
    route = section.route

    def broken(logits, top_k, bias, normalize):
        chosen, _, probs = route(logits, top_k, bias, normalize)
        gates = (probs + bias).gather(-1, chosen)
        return chosen, gates / gates.sum(-1, keepdim=True), probs

    section.route = broken


def aux_without_gradient(section):
    """The loss is printed, and nothing more."""
    backward = section.AddLoss.backward
    section.AddLoss.backward = staticmethod(
        lambda ctx, grad: (backward(ctx, grad)[0], None, None, None))


def local_load(section):
    """Every rank takes f over its own tokens only."""
    loss = section.balancing_loss

    def broken(load, logits, probs, top_k, *rest):
        own = F.one_hot(probs.topk(top_k).indices, len(load)).sum((0, 1))
        return loss(dist.get_world_size() * own, logits, probs, top_k, *rest)

    section.balancing_loss = broken


def not_regrouped(section):
    """Rows of several sources are taken to be other experts'."""
    section.transpose_blocks = lambda rows, grid: rows


PLANTED = [no_backward, summed_over_all, experts_counted_like_dense, biased_gates,
           aux_without_gradient, local_load, not_regrouped]


def check_planted(plant):
    section = copied("moe")
    plant(section)
    gap = gap_of_copy(section, 2, (2, True, 0.0))
    assert not gap < 1e-6, gap


def test_planted():
    run(each, 2, check_planted, [(plant,) for plant in PLANTED])


# ---- pure parts ------------------------------------------------------------------------


def check_dtypes():
    """Under autocast and in bf16 the router chooses in fp32; no change of dtype rounds a bias."""
    torch.set_default_dtype(torch.float32)
    cfg = common.GPTConfig(width=6, hidden=24)
    experts = moe.experts_of([common.MLP(cfg) for _ in range(4)])
    make = partial(moe.MoE, experts=experts, top_k=2, normalize=True, ep=dist.group.WORLD)
    layer = make(nn.Linear(6, 4, bias=False))
    x = torch.randn(64, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.score(x).dtype == torch.float32
        layer(x).square().sum().backward()
    layer.bias_steps.fill_(1001)  # 1000 in bf16
    layer.to(torch.bfloat16)
    assert layer.bias_steps.tolist() == [1001] * 4
    assert layer.score(x.bfloat16()).dtype == torch.float32
    with pytest.raises(AssertionError, match="5 logits for 4 experts"):
        make(nn.Linear(6, 5, bias=False))
    with pytest.raises(AssertionError, match="a router without bias"):
        make(nn.Linear(6, 4))


def test_dtypes_and_asserts():
    run(check_dtypes, 1)


def test_uniform_routing_costs_alpha():
    probs = torch.full((40, 8), 1 / 8, dtype=torch.float64)
    logits = torch.zeros(40, 8, dtype=torch.float64)
    for top_k in 1, 2:
        load = torch.full((8,), 40 * top_k // 8)
        assert moe.balancing_loss(load, logits, probs, top_k, alpha=0.01, beta=0) == 0.01
    z = moe.balancing_loss(load, logits, probs, 2, alpha=0, beta=1)
    assert z.item() == pytest.approx(math.log(8) ** 2, rel=1e-14)


def test_capacity():
    assert moe.capacity(1.25, 2, 33, 8) == 11  # 10.3
    assert moe.capacity(1.1, 2, 40, 8) == 11


def test_balance():
    """In the last 7 of 70 steps no expert has twice the mean; without balance one has."""
    flags = ("--layers", "1", "--width", "32", "--heads", "2", "--seq", "64", "--batch", "16",
             "--no-check", "--steps", "70")
    reports = alone("moe", *((*flags, "--balance", kind) for kind in ("aux", "bias", "none")))
    aux, bias, none = [max(report["load"][0]) for report in reports]
    assert aux < 2 and bias < 2 < none, (aux, bias, none)


REFUSED = """
    --top-k 9                                  choose 8 at most
    --batch 7 --dry-run 2                      take a multiple of 2
    --ep 3 --dry-run 4 --batch 12              take a divisor of 4
    --experts 6 --dry-run 4                    take a multiple of 4
    --impl torch --dtype bf16 --width 36       take multiples of 8
    --impl torch --dry-run 2                   take --dtype bf16 or fp64
"""


def test_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)  # outcome() changes it
    for line in REFUSED.strip().splitlines():
        flags, words = line.strip().split("   ", 1)
        code, _, said = outcome("moe", flags.split())
        assert code == 2 and is_clear("moe", said, words.strip()), (code, said)
