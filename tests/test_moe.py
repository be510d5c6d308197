import copy
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
    SMALL, alone, check_refused, copied, dry_run_agrees, each, proves, run, script, textbook)
from others import compare, gradients_of

LLAMA = "--model", "llama-toy"
MIXTRAL = "--model", "mixtral-toy", "--kv-heads", "2", "--hidden", "40"


@pytest.mark.parametrize("world, flags", [
    (1, ["--capacity", "0.8", "--balance", "bias"]),
    (2, [*LLAMA, "--top-k", "1", "--capacity", "1.1", "--shared", "--ep", "1"]),
    (2, [*MIXTRAL, "--balance", "none", "--impl", "torch"]),
    (4, [*MIXTRAL, "--ep", "2", "--shared", "--balance", "bias", "--steps", "3"]),
    (2, ["--train", "attn", "--balance", "bias", "--shared"]),  # no expert is trained
    # nothing goes back through block 0
    (2, ["--train", "blocks.1", "--capacity", "0.8", "--eval-every", "1"]),
])
def test_equals_plain(world, flags):
    report = proves("moe", world, *flags)
    assert (report["dropped"] > 0) == ("--capacity" in flags)
    assert sum(report["load"][1]) == pytest.approx(8)
    if "--train" not in flags:
        textbook(report)


def test_fp32_by_default():
    assert script("moe", 2, *SMALL, "--steps", "6", "--pad", "0.3")["check"]["passed"]


def test_saved_and_resumed(tmp_path):
    """2 ranks save, 4 ranks go on, with the biases of the choice."""
    flags = *LLAMA, "--balance", "bias"
    proves("moe", 2, *flags, "--steps", "3", "--save", str(tmp_path))
    resumed = proves("moe", 4, *flags, "--ep", "2", "--steps", "5", "--resume", str(tmp_path))
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


@pytest.mark.parametrize("world, flags", [
    (2, ["--capacity", "0.5"]),
    (4, [*MIXTRAL, "--ep", "2", "--shared", "--balance", "bias"]),
])
def test_cost_is_the_dry_runs(world, flags):
    real = dry_run_agrees("moe", world, *flags, ranks=[world - 1], plant=round_robin)
    textbook(real)
    for rank in real["ranks"]:
        assert rank["collectives"]["all_to_all"]["calls"] == 5 * 2  # of 2 layers


def test_mixtral_has_46_702_792_704_parameters():
    flags = "--model", "mixtral-8x7b", "--dry-run", "64", "--batch", "64", "--ep", "8"
    report, = alone("moe", (*flags, "--steps", "1", "--layers", "1"))
    assert report["parameters"]["total"] + 31 * 1_451_270_144 == 46_702_792_704


class Operations(TorchDispatchMode):
    """Notes the name of every operation."""

    names = frozenset()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names |= {func._opname}
        return func(*args, **(kwargs or {}))


def check_kernels():
    """One kernel and the loop give one result. The host reads the device once, and writes nothing;
    the biases' gradients are no contended additions."""
    torch.set_default_dtype(torch.float32)
    linears = [nn.Linear(8, 8) for _ in range(4)]
    router = nn.Linear(8, 4, bias=False)
    x = torch.randn(40, 8)
    found = []
    reads = []
    read = moe.read_counts
    moe.read_counts = lambda *args: reads.append(args) or read(*args)
    for in_one_kernel in True, False:
        layer = moe.MoE(router, moe.Experts(F.silu, linears, linears, linears), top_k=2,
                        normalize=True, ep=dist.group.WORLD)
        layer.experts.one_kernel_pays = lambda rows: in_one_kernel
        with Operations() as step:
            y = layer(x)
            y.square().sum().backward()
        unwanted = {"nonzero", "lift_fresh", "index_add", "index_add_", "index_put", "index_put_"}
        assert not step.names & unwanted
        found.append([y, *(p.grad for p in layer.experts.parameters())])
    assert len(reads) == 2
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_one_kernel_is_the_loop():
    run(check_kernels, 1)


# ---- the copy: section 1 in another model ------------------------------------------------


class Other(nn.Module):
    """A model that is not the GPT, with two mixtures."""

    def __init__(self, top_k, factor):
        super().__init__()
        cfg = common.GPTConfig(width=7, hidden=5, form=common.FORMS["llama"])
        self.inp = nn.Linear(3, 7, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(7), nn.RMSNorm(7)])
        self.mix = nn.ModuleList(
            moe.PlainMoE(cfg, experts=4, top_k=top_k, capacity=factor) for _ in range(2))
        for mix in self.mix:
            mix.gamma = 0.05
        self.out = nn.Linear(7, 1, bias=False)

    def forward(self, x):  # (N, 3) -> (N, 1)
        x = self.inp(x)
        for norm, mix in zip(self.norms, self.mix):
            x = x + mix(norm(x))
        return self.out(x)


TOKENS = [  # of each step, of its two micro-batches: how many tokens each rank has
    [[5, 3, 4, 0], [3, 0, 6, 2]],
    [[9, 0, 1, 0], [6, 1, 0, 0]],
]


def sources_of(step, world):
    """-> of each micro-batch, of each rank, the numbers of its tokens; how many there are"""
    sizes = [*step[0][:world], *step[1][:world]]
    numbers = torch.arange(sum(sizes)).split(sizes)
    return [numbers[:world], numbers[world:]], sum(sizes)


def copied_model(section, plain, replicas, ep):
    """Other with the copy's layers, and the plain one's weights on the ranks that broadcast."""
    model = copy.deepcopy(plain)
    for i, mix in enumerate(model.mix):
        mlps = [mix.experts[e] for e in common.share(4, ep.size(), ep.rank())]
        experts = section.Experts(F.silu, [mlp.up for mlp in mlps], [mlp.down for mlp in mlps],
                                  [mlp.gate for mlp in mlps])
        model.mix[i] = section.MoE(
            mix.router, experts, top_k=mix.top_k, normalize=True, capacity=mix.capacity,
            ep=ep, alpha=mix.alpha / 2, beta=mix.beta / 2, gamma=mix.gamma)
    if replicas.rank() > 0:
        for p in model.parameters():
            p.data.add_(1)
    section.broadcast_parameters(model, replicas)
    return model


def plain_step(plain, optimizer, x, y, sources):
    """A step of the whole batch, in one forward -> all that training makes, by name."""
    optimizer.zero_grad()
    for mix in plain.mix:
        mix.sources = sources
    loss = (plain(x) - y).square().sum() + sum(mix.loss for mix in plain.mix)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    optimizer.step()
    return {"loss": loss.detach(), "norm": norm, "gradients": gradients_of(plain),
            "state": plain.state_dict()}


def our_step(section, model, optimizer, x, y, sources, replicas, ep):
    optimizer.zero_grad()
    total = 0
    for of_ranks in sources:
        mine = of_ranks[dist.get_rank()]
        loss = (model(x[mine]) - y[mine]).square().sum()
        loss.backward()
        total += loss.detach()
    section.sum_gradients(model, replicas)
    norm = section.gradient_norm(model, ep)
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
    optimizer.step()
    total = total + section.balancing_losses(model)
    section.step_biases(model)
    dist.all_reduce(total)
    return {"loss": total, "norm": norm, "gradients": moe.full_gradients(model, ep),
            "state": moe.full_state_dict(model, ep)}


def check_copy(ep_size, kind, recompute=False, plant=lambda section: None):
    """Two steps of the plain model and of the copy's."""
    section = copied("moe")
    plant(section)
    world = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (world // ep_size, ep_size),
                                 mesh_dim_names=("replicas", "ep"))
    groups = mesh.get_group("replicas"), mesh.get_group("ep")
    torch.manual_seed(0)
    plain = Other(*kind)
    model = copied_model(section, plain, *groups)
    if recompute:
        for mix in model.mix:
            mix.forward = partial(checkpoint, mix.forward, use_reentrant=False)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-5) for m in (plain, model)]
    for step in TOKENS:
        sources, n = sources_of(step, world)
        batch = torch.randn(n, 3), torch.randn(n, 1), sources
        wanted = plain_step(plain, optimizers[0], *batch)
        compare(our_step(section, model, optimizers[1], *batch, *groups), wanted)


@pytest.mark.parametrize("world, cases", [  # ep, (top_k, capacity), recompute
    (2, [(2, (3, 0.0)), (2, (2, 0.6), True), (1, (1, 1.1))]),
    (4, [(2, (2, 0.9), True), (4, (2, 0.0))]),
])
def test_copy(world, cases):
    run(each, world, check_copy, cases)


# ---- planted bugs: each must fail the check ----------------------------------------------


def no_backward(section):
    """What autograd does with a bare all_to_all_single: the graph ends there."""
    def broken(ctx, grad):
        send = ctx.way_back[0]
        return grad.new_zeros(sum(send), *grad.shape[1:]), None, None, None

    section.AllToAll.backward = staticmethod(broken)


def summed_over_all(section):
    """Gradients of different experts are added up."""
    section.dense_and_experts = lambda model: (list(model.parameters()), [])


def experts_counted_like_dense(section):
    def broken(model, ep):
        return nn.utils.get_total_norm([p.grad for p in model.parameters()])

    section.gradient_norm = broken


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


def check_planted(plant):
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check_copy(2, (2, 0.0), plant=plant)


def test_planted():
    planted = (no_backward, summed_over_all, experts_counted_like_dense, aux_without_gradient,
               local_load, not_regrouped)
    run(each, 2, check_planted, [(plant,) for plant in planted])


# ---- pure parts ------------------------------------------------------------------------


def check_layer():
    """Under autocast and in bf16 the router chooses in fp32; no change of dtype rounds a bias."""
    torch.set_default_dtype(torch.float32)
    linears = [nn.Linear(6, 6) for _ in range(4)]
    experts = moe.Experts(F.gelu, linears, linears)
    make = partial(moe.MoE, experts=experts, top_k=2, normalize=True, ep=dist.group.WORLD,
                   gamma=0.1)
    layer = make(nn.Linear(6, 4, bias=False))
    assert moe.gradient_norm(layer, dist.group.WORLD) == 0  # no backward yet
    x = torch.randn(64, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.score(x).dtype == torch.float32
        layer(x).square().sum().backward()
    layer.bias_steps.fill_(1001)  # 1000 in bf16
    layer.to(torch.bfloat16)
    assert layer.score(x.bfloat16()).dtype == torch.float32
    norm = moe.gradient_norm(layer, dist.group.WORLD)
    assert norm.dtype == torch.float32
    layer.load = torch.tensor([0, 3, 2, 3])
    moe.step_biases(layer)  # those that were chosen less often than the mean grow
    moe.step_biases(layer)  # no backward since: all stay
    assert layer.bias_steps.tolist() == [1002, 1000, 1001, 1000]
    with pytest.raises(AssertionError, match="5 logits for 4 experts"):
        make(nn.Linear(6, 5, bias=False))
    with pytest.raises(AssertionError, match="a router without bias"):
        make(nn.Linear(6, 4))


def test_dtypes_bias_and_asserts():
    run(check_layer, 1)


def test_route():
    """Gates that are not normalized are probabilities; a bias changes the choice alone."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    chosen, gates, probs = moe.route(logits, 2, torch.tensor([0.0, -1.0, 0.0]), normalize=False)
    assert chosen.tolist() == [[0, 2]]
    assert torch.equal(gates, probs[:, [0, 2]])


def test_balancing_loss():
    """The formulas of the papers."""
    logits = torch.randn(40, 8).double()
    probs = logits.softmax(-1)
    load = torch.arange(8) * 20 // 7
    found = moe.balancing_loss(load, logits, probs, load.sum() / 40, alpha=0.3, beta=0.2)
    switch = sum(8 * load[e] / load.sum() * probs[:, e].mean() for e in range(8))
    z = logits.exp().sum(-1).log().square().mean()
    torch.testing.assert_close(found, 0.3 * switch + 0.2 * z)


def test_most_rows():
    assert moe.most_rows(1.25, 2, 33, 8) == 11  # 10.3
    assert moe.most_rows(1.1, 2, 40, 8) == 11


def test_refused():
    check_refused("moe", [
        (["--top-k", "9"], "choose 8 at most"),
        (["--batch", "7", "--dry-run", "2"], "take a multiple of 2"),
        (["--ep", "3", "--dry-run", "4", "--batch", "12"], "take a divisor of 4 ranks"),
        (["--experts", "6", "--dry-run", "4"], "and of --experts 6"),
        (["--impl", "torch", "--dry-run", "2"], "take --dtype bf16 or fp64"),
    ])
