import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import amp_accum_ckpt
import common
import moe
from common import MLP, GPTConfig, share
from conftest import (
    PROOF, SMALL, alone, copied, dry_run_agrees, each, proves, run, script, textbook)


@pytest.mark.parametrize("world, flags", [
    (1, ["--capacity", "0.8", "--balance", "bias"]),
    (2, []),
    (2, ["--impl", "torch"]),
    (2, ["--top-k", "1", "--capacity", "1.1", "--shared"]),
    (2, ["--balance", "bias", "--shared"]),
    (2, ["--balance", "none", "--capacity", "0.5"]),
    (4, ["--ep", "2", "--shared"]),
    (2, ["--ep", "1"]),
    (4, ["--capacity", "0.7", "--clip", "0"]),
    (4, ["--ep", "2", "--capacity", "0.6", "--balance", "bias", "--top-k", "1"]),
    (4, ["--ep", "2", "--impl", "torch", "--top-k", "3", "--balance", "bias"]),
    (3, ["--experts", "9", "--batch", "6", "--vocab", "257"]),
])
def test_equals_plain(world, flags):
    report = proves("moe", world, *flags)
    textbook(report)
    assert (report["dropped"] > 0) == ("--capacity" in flags)


def test_fp32_by_default():
    """In fp32 near ties fall by rounding: the plain run follows the ranks' choices, and everything
    else must agree."""
    script("moe", 2, *SMALL, "--steps", "12", "--pad", "0.3")


RATES = ("--steps", "4", "--warmup", "2", "--decay", "cosine", "--min-lr", "1e-4")


@pytest.mark.parametrize("world, flags", [
    (2, ["--train", "blocks.1", "--capacity", "0.8"]),  # nothing goes back through block 0
    (2, ["--train", "experts", "--ep", "1"]),
    (2, ["--train", "attn", "--balance", "bias", "--shared"]),  # no expert is trained
    (4, ["--train", "router|norm", "--ep", "2"]),
])
def test_frozen_equals_plain(world, flags):
    """What is frozen is neither sent nor stepped, and the textbook's rows say so."""
    report = proves("moe", world, *RATES, "--eval-every", "2", *flags)
    textbook(report)
    assert len(report["validation"]) == 3
    assert report["check"]["validation"] < 1e-10


def test_saved_and_resumed(tmp_path):
    """2 ranks save, 4 ranks go on, with the biases: as one run that was never interrupted."""
    save = "--save", str(tmp_path)
    resume = "--resume", str(tmp_path), "--steps", "6"
    proves("moe", 2, "--balance", "bias", "--steps", "3", *save)
    resumed = proves("moe", 4, "--balance", "bias", "--ep", "2", "--impl", "torch", *resume)
    assert len(resumed["loss"]) == 3
    started = proves("moe", 1, "--init-from", str(tmp_path))
    assert len(started["loss"]) == 2


def test_capacity_is_of_the_ranks_that_saved(tmp_path):
    capacity = "--capacity", "0.8"
    proves("moe", 2, *capacity, "--save", str(tmp_path))
    said = script("moe", 1, *PROOF, *capacity, "--steps", "3", "--resume", str(tmp_path), code=2)
    assert "only 2 can go on" in said


# ---- cost ------------------------------------------------------------------------------


def round_robin(module):
    """Experts are chosen equally often, as a dry run takes them to be."""
    def route(logits, top_k, bias):
        chosen = torch.arange(logits.shape[0] * top_k).view(-1, top_k) % logits.shape[1]
        probs = logits.softmax(-1)
        gates = probs.gather(-1, chosen)
        if top_k > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        return chosen, gates, probs

    module.route = route


@pytest.mark.parametrize("world, flags", [
    (2, []),
    (4, ["--ep", "2", "--shared", "--balance", "bias"]),
    (2, ["--capacity", "0.5"]),
])
def test_cost_is_the_dry_runs(world, flags):
    real = dry_run_agrees("moe", world, *flags, ranks=[world - 1], plant=round_robin)
    textbook(real)
    layers = 2
    width = 32
    tokens = 8 * 16 // world
    top_k = 2
    experts = 8
    taken = 1
    if "--capacity" in flags:
        taken = 0.5
    for rank in real["ranks"]:
        moved = rank["collectives"]["all_to_all"]
        assert moved["calls"] == 5 * layers
        rows = 4 * tokens * top_k * width * 4 * taken
        assert moved["payload"] == layers * (rows + 8 * experts)


class HostReads(TorchDispatchMode):
    """Counts the operations that make the host wait for a device, or that bring numbers to it."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._opname in ("_local_scalar_dense", "lift_fresh", "nonzero", "_to_copy"):
            if func._opname != "_to_copy" or "device" in (kwargs or {}):
                self.found.append(func._opname)
        return func(*args, **(kwargs or {}))


def check_host_reads(linear):
    """A forward and a backward of a layer: the host reads the device once, and writes nothing."""
    torch.set_default_dtype(torch.float32)
    layer = make_layer(dist.group.WORLD, width=8, linear=linear)
    x = torch.randn(40, 8, requires_grad=True)
    reads = []
    tolist = torch.Tensor.tolist
    torch.Tensor.tolist = lambda tensor: reads.append(1) or tolist(tensor)
    with HostReads() as host:
        layer(x).square().sum().backward()
    torch.Tensor.tolist = tolist
    assert len(reads) == 1
    assert not host.found, host.found


def test_host_waits_once():
    run(check_host_reads, 2, moe.linear_by_loop)
    run(check_host_reads, 1, moe.linear_in_one_kernel)


class Operations(TorchDispatchMode):
    """Notes the name of every operation."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_one_kernel_is_the_loop(dtype, tolerance):
    """Outputs and gradients, biases' too, whose sum is a matmul and no contended addition."""
    torch.manual_seed(0)
    sizes = [3, 0, 5, 9]
    routing = moe.Routing(choices=None, sent=None, received=None, by_expert=None, sizes=sizes,
                          sizes_on_device=torch.tensor(sizes))
    grad = torch.randn(17, 16, dtype=dtype)
    results = []
    for linear in (moe.linear_by_loop, moe.linear_in_one_kernel):
        torch.manual_seed(1)
        rows = torch.randn(17, 8, dtype=dtype, requires_grad=True)
        weight = torch.randn(4, 16, 8, dtype=dtype, requires_grad=True)
        bias = torch.randn(4, 16, dtype=dtype, requires_grad=True)
        y = linear(rows, weight, bias, routing)
        with Operations() as backward:
            y.backward(grad)
        results.append((y, rows.grad, weight.grad, bias.grad))
    for loop, kernel in zip(*results):
        torch.testing.assert_close(loop, kernel, rtol=tolerance, atol=tolerance)
    assert not backward.names & {"index_add", "index_add_", "index_put", "index_put_"}


# ---- the layer against a loop over tokens ----------------------------------------------


def make_mlps(experts=4, width=6):
    return [MLP(GPTConfig(width=width)) for _ in range(experts)]


def make_layer(ep, width=6, linear=moe.linear_by_kind, **options):
    """A layer of 4 experts, the same on every rank: this rank's part of it."""
    torch.manual_seed(0)
    router = nn.Linear(width, 4, bias=False)
    mlps = make_mlps(width=width)
    mine = [mlps[e] for e in share(4, ep.size(), ep.rank())]
    ups = [mlp.up for mlp in mine]
    downs = [mlp.down for mlp in mine]
    options = {"top_k": 2, **options}
    return moe.MoE(router, moe.Experts(up=ups, down=downs, linear=linear), ep=ep, **options)


def loop_over_tokens(x, scores, experts, top_k, bias, limit=None):
    """The slowest definition, one token and one expert at a time -> outputs, choices of each
    expert. scores (N, E) are probabilities."""
    taken = [0] * len(experts)
    out = torch.zeros_like(x)
    for n in range(len(x)):
        order = sorted(range(len(experts)), key=lambda e: -(scores[n, e] + bias[e]).item())
        chosen = order[:top_k]
        total = 1
        if top_k > 1:
            total = sum(scores[n, e] for e in chosen)
        for e in chosen:
            taken[e] += 1
            if limit is None or taken[e] <= limit:
                answer = scores[n, e] / total * experts[e](x[n])
                out = out.index_add(0, torch.tensor([n]), answer.unsqueeze(0))
    return out, taken


def loop_over_ranks(x, router, mlps, top_k, bias, factor):
    """Every rank's outputs, how often each expert was chosen. Their gradients are made, too."""
    want = []
    load = torch.zeros(4)
    limit = None
    if factor:
        limit = moe.capacity(factor, top_k, 10, 4)
    for r, tokens in enumerate(x):
        if r == 1:
            tokens = tokens[:0]
        scores = router(tokens).softmax(-1)
        out, taken = loop_over_tokens(tokens, scores, mlps, top_k, bias, limit)
        want.append(out)
        load += torch.tensor(taken)
    torch.cat(want).sin().sum().backward()
    return want, load


def alone_group():
    """A group of this rank alone. Every rank makes every group."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def check_layer(forced, top_k, factor):
    """Rank 1 has no tokens at all; with `forced` all tokens choose expert 0, and no other."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    bias = torch.tensor([0.3, 0.0, -0.1, 0.2])
    if forced:
        bias = torch.tensor([9.0, 0, 0, 0])
    layer = make_layer(dist.group.WORLD, top_k=top_k, balance="bias", capacity=factor)
    layer.bias.copy_(bias)
    torch.manual_seed(0)
    router = nn.Linear(6, 4, bias=False)
    mlps = make_mlps()
    x = torch.randn(world, 10, 6, requires_grad=True)
    n = 10
    if rank == 1:
        n = 0
    mine = x[rank, :n].detach().requires_grad_()
    y = layer(mine)
    y.sin().sum().backward()
    moe.sum_gradients(layer, alone_group())
    moe.step_biases(layer, gamma=0)

    want, load = loop_over_ranks(x, router, mlps, top_k, bias, factor)
    assert layer.load.tolist() == load.tolist()
    torch.testing.assert_close(y, want[rank], rtol=0, atol=1e-13)
    torch.testing.assert_close(mine.grad, x.grad[rank, :n], rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.router.weight.grad, router.weight.grad, rtol=0, atol=1e-12)
    for i, e in enumerate(share(4, world, rank)):
        for name, p in mlps[e].named_parameters():
            stacked = layer.experts.get_parameter(name.replace(".", "_"))
            grad = p.grad
            if grad is None:
                grad = torch.zeros_like(p)
            torch.testing.assert_close(stacked.grad[i], grad, rtol=0, atol=1e-12)
            if forced and top_k == 1 and e > 0:
                assert not stacked.grad[i].any()


@pytest.mark.parametrize("world, cases", [  # forced, top_k, factor
    (2, [(True, 1, 0), (False, 2, 0.7)]),
    (4, [(True, 2, 0), (False, 1, 1.1)]),
])
def test_layer(world, cases):
    run(each, world, check_layer, cases)


# ---- the copy: section 1 in another model ----------------------------------------------


class GatedExpert(nn.Module):
    """The MLP of a Llama-like model: no biases, names of its own."""

    def __init__(self, width, hidden):
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SlowMixture(nn.Module):
    """Experts that a loop over tokens visits. Its loss is that of all tokens of a step."""

    def __init__(self, width, hidden, experts, top_k):
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(width, experts)
        self.ffn = nn.ModuleList(GatedExpert(width, hidden) for _ in range(experts))
        self.loss = 0

    def forward(self, x):
        logits = self.gate(x)
        scores = logits.softmax(-1)
        out, taken = loop_over_tokens(x, scores, self.ffn, self.top_k, [0.0] * len(self.ffn))
        load = torch.tensor(taken, dtype=x.dtype)
        switch = len(taken) * (load / load.sum() @ scores.mean(0))
        self.loss = 0.1 * switch + 1e-3 * logits.logsumexp(-1).square().mean()
        return out


class Other(nn.Module):
    """A model that is not the GPT: RMSNorm, no biases, residuals, two mixtures."""

    def __init__(self, width=7, hidden=5, experts=4, top_k=2):
        super().__init__()
        self.inp = nn.Linear(3, width, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.mix = nn.ModuleList(SlowMixture(width, hidden, experts, top_k) for _ in range(2))
        self.out = nn.Linear(width, 1, bias=False)

    def forward(self, x):  # (N, 3) -> (N, 1)
        x = self.inp(x)
        for norm, mix in zip(self.norms, self.mix):
            x = x + mix(norm(x))
        return self.out(x)


def plain_names(tensors, ep):
    """{name: tensor} of a parallel Other -> of all, gathered, under the names of the plain one."""
    names = {"up_weight": "w3", "gate_weight": "w1", "down_weight": "w2"}
    whole = {}
    for name, tensor in tensors.items():
        name = name.replace(".router.", ".gate.")
        stem, found, kind = name.partition(".experts.")
        if not found:
            whole[name] = tensor
            continue
        stacks = [torch.empty_like(tensor) for _ in range(ep.size())]
        dist.all_gather(stacks, tensor.contiguous(), group=ep)  # sharded(0) -> replicated
        for e, of_expert in enumerate(torch.cat(stacks)):
            whole[f"{stem}.ffn.{e}.{names[kind]}.weight"] = of_expert
    return whole


def copied_model(section, plain, replicas, ep):
    """A plain Other -> the same with the copy's layers.

    Ranks draw other weights, but for the first of those that hold the same: these are broadcast.
    """
    model = copy.deepcopy(plain)
    for i, mix in enumerate(model.mix):
        mine = [mix.ffn[e] for e in share(4, ep.size(), ep.rank())]
        experts = section.Experts(
            up=[expert.w3 for expert in mine], gate=[expert.w1 for expert in mine],
            down=[expert.w2 for expert in mine], activation=F.silu)
        model.mix[i] = section.MoE(mix.gate, experts, top_k=2, ep=ep, everyone=dist.group.WORLD)
    of_experts = section.expert_parameters(model)
    with torch.no_grad():
        for p in model.parameters():
            first = dist.get_rank() == 0
            if p in of_experts:
                first = replicas.rank() == 0
            if not first:
                p += 1
    section.broadcast_parameters(model, replicas, dist.group.WORLD)
    return model


def plain_step(plain, x, y):
    """Backward of the whole batch, clipped -> gradient norm"""
    loss = (plain(x) - y).square().sum() / len(x)
    (loss + sum(mix.loss for mix in plain.mix)).backward()
    for p in plain.parameters():
        if p.grad is None:  # of an expert that nobody chose. AdamW is to step it all the same
            p.grad = torch.zeros_like(p)
    return nn.utils.clip_grad_norm_(plain.parameters(), 0.1)


def check_copy(ep_size):
    section = copied("moe")
    world = dist.get_world_size()
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (world // ep_size, ep_size),
                                 mesh_dim_names=("replicas", "ep"))
    replicas = mesh.get_group("replicas")
    ep = mesh.get_group("ep")
    torch.manual_seed(0)
    plain = Other()
    model = copied_model(section, plain, replicas, ep)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-5) for m in (plain, model)]
    bounds = [0, 5, 8, 8, 15][:world + 1]  # unequal shares; one rank of four has nothing
    mine = slice(bounds[rank], bounds[rank + 1])
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(bounds[-1], 3)
        y = torch.randn(bounds[-1], 1)
        for optimizer in optimizers:
            optimizer.zero_grad()
        norm = plain_step(plain, x, y)
        ((model(x[mine]) - y[mine]).square().sum() / len(x)).backward()
        section.sum_gradients(model, replicas, dist.group.WORLD)
        our_norm = section.clip_gradients(model, section.gradient_norm(model, ep), 0.1)
        torch.testing.assert_close(our_norm, norm, rtol=1e-10, atol=0)
        ours = {name: p.grad for name, p in model.named_parameters()}
        assert_same(plain_names(ours, ep), {n: p.grad for n, p in plain.named_parameters()})
        for optimizer in optimizers:
            optimizer.step()
        section.step_biases(model)
        ours = {name: p.detach() for name, p in model.named_parameters()}
        assert_same(plain_names(ours, ep), dict(plain.named_parameters()))


def assert_same(ours, theirs, tolerance=1e-10):
    assert ours.keys() == theirs.keys()
    for name, want in theirs.items():
        gap = (ours[name] - want).abs().max().item()
        assert gap <= tolerance, (name, gap)


@pytest.mark.parametrize("world, ep_size", [(2, 2), (4, 2)])
def test_copy(world, ep_size):
    run(check_copy, world, ep_size)


# ---- several forwards a step -----------------------------------------------------------


def check_accumulation(kind):
    """Two micro-batches: the bias sees the load of both, and so does whoever reads it."""
    layer = make_layer(dist.group.WORLD, balance="bias")
    torch.manual_seed(dist.get_rank())
    halves = torch.randn(2, 20, 6)
    loads = []
    for half in halves:
        scores = (half @ layer.router.weight.T).softmax(-1)
        chosen = (scores + layer.bias).topk(2).indices
        loads.append(torch.bincount(chosen.flatten(), minlength=4))
    load = sum(loads)
    dist.all_reduce(load)  # partial -> replicated
    for half in halves:
        half = half.requires_grad_()
        if kind == "reentrant":
            y = checkpoint(layer, half, use_reentrant=True)
        elif kind == "checkpoint":
            y = checkpoint(layer, half, use_reentrant=False)
        elif kind == "full":
            y = amp_accum_ckpt.full(layer, half)
        else:
            y = layer(half)
        y.sum().backward()
        with torch.no_grad():
            layer(half)  # an evaluation in between is not counted
    moe.step_biases(layer, gamma=0.5)
    assert layer.load.tolist() == load.tolist()
    want = 0.5 * (load.double().mean() - load).sign()
    assert layer.bias.tolist() == want.tolist() and want.any()
    layer(halves[0]).sum().backward()  # the next step counts anew
    moe.step_biases(layer, gamma=0)
    assert layer.load.sum() == load.sum() / 2


def test_load_of_all_microbatches():
    run(each, 2, check_accumulation, [("plain",), ("reentrant",), ("checkpoint",), ("full",)])


def microbatch_sources(dp, tp, rows, T):
    """Two micro-batches of half of the rows each; of each, dp ranks have equal parts, which tp
    ranks share."""
    sources = []
    for m in range(2):
        of_ranks = []
        for d in range(dp):
            mine = share(rows // 2, dp, d)
            first = (m * rows // 2 + mine[0]) * T
            tokens = torch.arange(first, first + len(mine) * T)
            of_ranks += [tokens[list(share(len(tokens), tp, t))] for t in range(tp)]
        sources.append(of_ranks)
    return sources


def sum_over_axes(model, dp_group, tp_group):
    """Each kind of gradient over the axes on which it is partial."""
    for name, p in model.named_parameters():
        kind = name.split(".mlp.")[-1].split(".")[0]
        if kind == "router":
            dist.all_reduce(p.grad)  # over dp and tp: partial -> replicated
        elif kind != "experts":
            dist.all_reduce(p.grad, group=dp_group)  # over dp: partial -> replicated
        elif tp_group is not None:
            dist.all_reduce(p.grad, group=tp_group)  # over tp: partial -> replicated


def step_by_parts(model, x, y, parts, wrap):
    """Backward of each part -> the sum of their losses"""
    total = torch.zeros(())
    for part in parts:
        h = model.embed(x[part])
        for block in model.blocks:
            h = wrap(block, h)
        loss = common.loss_sum(model.head(model.norm(h)), y[part]) / y.numel()
        loss.backward()
        total += loss.detach()
    return total


def check_microbatches(dp, tp, options, wrap):
    """Two micro-batches on dp x tp ranks, tp ranks with the same tokens, against the plain GPT."""
    cfg = GPTConfig(layers=2, width=16, heads=2, vocab=256, seq=5)
    mesh = dist.init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    ep = mesh.get_group("dp")
    same_tokens = None
    if tp > 1:
        same_tokens = mesh.get_group("tp")
    options = {"experts": 4, "top_k": 2, **options}

    def build():
        model = common.build(cfg, 0, dtype=torch.float64)
        return moe.mixture(model, 0, cfg, **options)

    rows = 2 * dp * 3
    torch.manual_seed(0)
    x = torch.randint(256, (rows, cfg.seq))
    y = torch.randint(256, (rows, cfg.seq))
    plain = build()
    moe.set_sources(plain, microbatch_sources(dp, tp, rows, cfg.seq))
    loss = common.loss_sum(plain(x), y) / y.numel() + sum(b.mlp.loss for b in plain.blocks)
    loss.backward()

    model = moe.parallelize(build(), ep=ep, same_tokens=same_tokens, microbatches=2)
    mine = share(rows // 2, dp, mesh.get_local_rank("dp"))
    parts = [slice(m * rows // 2 + mine[0], m * rows // 2 + mine[-1] + 1) for m in range(2)]
    ours = step_by_parts(model, x, y, parts, wrap) / tp + moe.balancing_losses(model)
    dist.all_reduce(ours)  # partial -> replicated
    torch.testing.assert_close(ours, loss.detach(), rtol=1e-12, atol=0)
    sum_over_axes(model, ep, same_tokens)
    theirs = {name: p.grad for name, p in plain.named_parameters()}
    assert_same(moe.full_gradients(model, ep), theirs, 1e-13)
    moe.step_biases(model)
    for block, twin in zip(model.blocks, plain.blocks):
        assert block.mlp.bias.tolist() == twin.mlp.bias.tolist()


def call(block, x):
    return block(x)


@pytest.mark.parametrize("world, cases", [  # dp, tp, options, wrap
    (2, [
        (2, 1, {}, call),
        (2, 1, {"capacity": 0.9}, amp_accum_ckpt.full),
        (1, 2, {"shared": True}, call),
    ]),
    (4, [
        (2, 2, {"capacity": 0.8, "shared": True}, amp_accum_ckpt.full),
        (2, 2, {"balance": "bias", "top_k": 1}, call),
    ]),
])
def test_microbatches_equal_plain(world, cases):
    run(each, world, check_microbatches, cases)


def check_choices():
    """What the ranks' tokens have chosen in two micro-batches, in the order of the whole batch."""
    cfg = GPTConfig(layers=1, width=16, heads=2, vocab=256, seq=4)
    model = moe.mixture(common.build(cfg, 0, dtype=torch.float64), 0, cfg, experts=4, top_k=2)
    router = model.blocks[0].mlp.router
    model = moe.parallelize(model, ep=dist.group.WORLD, microbatches=2)
    layer = model.blocks[0].mlp
    layer.choices = {}
    torch.manual_seed(0)
    x = torch.randn(8, 4, 16)
    sources = microbatch_sources(2, 1, 8, 4)
    rank = dist.get_rank()
    outputs = []
    for m in range(2):
        outputs.append(layer(x.flatten(0, 1)[sources[m][rank]]))
    for y in reversed(outputs):  # in which order they go backward does not matter
        y.sum().backward()
    [mine] = moe.choices_here(model)
    assert mine.shape == (2, 8, 2) and not layer.choices
    parts = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(parts, mine)  # sharded(1) -> replicated
    joined = moe.join_choices(parts, sources)
    want = moe.route(router(x.flatten(0, 1)), 2, layer.bias)[0]
    assert torch.equal(joined, want)


def check_biases_go_along():
    """The layers begin with the biases of the plain model."""
    cfg = GPTConfig(layers=2, width=16, heads=2, vocab=256, seq=4)
    model = moe.mixture(common.build(cfg, 0, dtype=torch.float64), 0, cfg, experts=4, top_k=2)
    biases = [[0.5, 0.0, -0.25, 1.0], [0.0, 3.0, 0.0, 1e-9]]
    moe.set_biases(model, biases)
    model = moe.parallelize(model, ep=dist.group.WORLD)
    run = SimpleNamespace(start=SimpleNamespace(extra={}))
    assert moe.notes(run, model) == {"biases": biases}


def check_models():
    check_choices()
    check_biases_go_along()


def test_choices_of_microbatches_and_biases_of_models():
    run(check_models, 2)


def compares_two_steps(module):
    """Of four steps two are compared: after the last one no layer remembers choices any more."""
    common.CHECKED = 2
    train = module.train

    def watched(run, sides):
        found = train(run, sides)
        layers = module.layers_of(sides["scratch"].model)
        assert [layer.choices for layer in layers] == [None, None]
        return found

    module.train = watched


def test_choices_are_forgotten_when_no_step_is_compared():
    """A layer that remembered them for ever would fill the memory of a long run."""
    script("moe", 2, *SMALL, "--steps", "4", plant=compares_two_steps)


# ---- devices, dtypes, copies -----------------------------------------------------------


def check_dtypes():
    """The bias moves by steps that bf16 would round away; a change of dtype is the weights'."""
    layer = make_layer(dist.group.WORLD, balance="bias")
    fine = torch.tensor([1 + 1e-9, 2 / 3, -1e-12, 5.0], dtype=torch.float64)
    layer.bias.copy_(fine)
    wrapped = nn.Sequential(layer)
    for change in (lambda m: m.to(torch.bfloat16), nn.Module.float, nn.Module.half):
        change(wrapped)
        assert torch.equal(layer.bias, fine) and layer.bias.dtype == torch.float64
    assert layer.experts.up_weight.dtype == torch.float16
    assert wrapped.to("meta")[0].bias.is_meta
    twin = copy.deepcopy(make_layer(dist.group.WORLD))  # for a moving average
    assert twin.ep is dist.group.WORLD
    assert twin(torch.randn(5, 6)).shape == (5, 6)


def check_device():
    """All that is summed lies on the device of the model, frozen experts or not."""
    layer = make_layer(dist.group.WORLD).to("meta")
    model = nn.Sequential(layer, nn.Linear(6, 6, device="meta"))
    layer.experts.requires_grad_(False)
    devices = set()
    all_reduce = dist.all_reduce

    def watch(tensor, *args, **kwargs):
        devices.add(tensor.device.type)
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = watch
    moe.sum_gradients(model, dist.group.WORLD)
    norm = moe.gradient_norm(model, dist.group.WORLD)
    dist.all_reduce = all_reduce
    assert devices == {"meta"} and norm.is_meta


def check_fine_tuning():
    """Under autocast the router still chooses in fp32; frozen parameters get no gradient."""
    torch.set_default_dtype(torch.float32)  # what runs behind this check has it too
    layer = make_layer(dist.group.WORLD)
    layer.requires_grad_(False)
    layer.experts.up_bias.requires_grad_()
    layer.choices = {}
    x = torch.randn(64, 6)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).square().sum().backward()
    exact, _, _ = moe.route(layer.router(x), 2, layer.bias)
    assert torch.equal(layer.choices[0], exact)
    model = nn.Sequential(layer, nn.Linear(2, 2))  # the second is not used: its gradient is zero
    moe.sum_gradients(model, dist.group.WORLD)
    norm = moe.gradient_norm(model, dist.group.WORLD)
    assert norm == layer.experts.up_bias.grad.norm() > 0
    assert layer.router.weight.grad is None


class Sharper(nn.Linear):
    """A router with a forward and a parameter of its own."""

    def __init__(self, width, experts):
        super().__init__(width, experts)
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        return self.scale * super().forward(x)


def check_router(dtype):
    """The router is called, with its hooks, in fp32 or better; all that is its own is trained."""
    torch.manual_seed(0)
    layer = make_layer(dist.group.WORLD, balance="bias")
    layer.router = Sharper(6, 4)
    layer = layer.to(dtype)
    layer.router.weight.requires_grad_(False)
    layer.router.register_forward_hook(lambda module, inputs, out: -out)
    seen = []
    layer.router.register_full_backward_hook(lambda module, *grads: seen.append(module))
    x = torch.randn(20, 6, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        logits = layer.score(x)
        layer(x).square().sum().backward()
    exact = copy.deepcopy(layer.router).to(logits.dtype)
    want = exact(x.to(logits.dtype))
    assert logits.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(logits, want, rtol=1e-6, atol=1e-6)
    assert seen == [layer.router] and layer.router.scale.grad.abs() > 0
    moe.step_biases(layer)
    assert layer.bias.any()


HOOKS = [
    lambda linear: linear.register_forward_hook(print),
    lambda linear: linear.register_forward_pre_hook(print),
    lambda linear: linear.register_full_backward_hook(print),
    lambda linear: linear.register_full_backward_pre_hook(print),
    lambda linear: linear.weight.register_hook(print),
    lambda linear: linear.bias.register_post_accumulate_grad_hook(print),
]


@pytest.mark.parametrize("register", HOOKS)
def test_experts_with_hooks_are_refused(register):
    """What is stacked would not call them."""
    linears = [nn.Linear(6, 8), nn.Linear(6, 8)]
    register(linears[1])
    with pytest.raises(TypeError, match="up has a Linear with hooks"):
        moe.Experts(up=linears, down=[nn.Linear(8, 6), nn.Linear(8, 6)])


def check_refused():
    def experts(count=4, **more):
        return moe.Experts(up=[nn.Linear(6, 8) for _ in range(count)],
                           down=[nn.Linear(8, 6) for _ in range(count)], **more)

    world = dist.group.WORLD
    router = nn.Linear(6, 4)
    for said, wrong in [
        ("the router knows 4 experts", lambda: moe.MoE(router, experts(3), top_k=1, ep=world)),
        ("top_k 5 of 4", lambda: moe.MoE(router, experts(), top_k=5, ep=world)),
        ("balance no", lambda: moe.MoE(router, experts(), top_k=1, ep=world, balance="no")),
        ("microbatches 1", lambda: moe.MoE(router, experts(), top_k=1, ep=world, microbatches=0)),
        ("down is empty", lambda: moe.Experts(up=[nn.Linear(6, 8)], down=[])),
        ("as many Linears", lambda: experts(gate=[nn.Linear(6, 8)])),
        ("has a Conv1d", lambda: moe.Experts(up=[nn.Conv1d(1, 1, 1)], down=[nn.Linear(8, 6)])),
        ("with hooks", lambda: moe.Experts(
            up=[nn.utils.spectral_norm(nn.Linear(6, 8))], down=[nn.Linear(8, 6)])),
        ("make them alike", lambda: moe.Experts(
            up=[nn.Linear(6, 8), nn.Linear(6, 8, bias=False)], down=[nn.Linear(8, 6)] * 2)),
        ("make them alike", lambda: moe.Experts(
            up=[nn.Linear(6, 8), nn.Linear(6, 8).requires_grad_(False)],
            down=[nn.Linear(8, 6)] * 2)),
    ]:
        with pytest.raises((ValueError, TypeError), match=said):
            wrong()


def check_on_one_rank():
    check_dtypes()
    check_device()
    each(check_router, [(torch.float32,), (torch.bfloat16,), (torch.float64,)])
    check_refused()
    check_fine_tuning()


def test_dtypes_devices_routers_fine_tuning_and_refusals():
    run(check_on_one_rank, 1)


# ---- pure parts ------------------------------------------------------------------------


def test_uniform_routing_costs_alpha():
    probs = torch.full((40, 8), 1 / 8, dtype=torch.float64)
    for top_k in 1, 2:
        load = torch.full((8,), 40 * top_k // 8)
        loss = moe.balancing_loss(load, torch.zeros(40, 8), probs, top_k, alpha=0.01, beta=0)
        assert loss == 0.01
    logits = torch.zeros(40, 8, dtype=torch.float64)
    z = moe.balancing_loss(load, logits, probs, 2, alpha=0, beta=1)
    assert z.item() == pytest.approx(math.log(8) ** 2, rel=1e-14)


def test_bias_chooses_but_does_not_gate():
    torch.manual_seed(0)
    logits = torch.randn(50, 8)
    bias = torch.linspace(-0.2, 0.2, 8)
    for top_k in 1, 3:
        chosen, gates, probs = moe.route(logits, top_k, bias)
        unbiased, _, _ = moe.route(logits, top_k, torch.zeros(8))
        assert (chosen != unbiased).any()
        want = probs.gather(1, chosen)
        if top_k > 1:
            want = want / want.sum(1, keepdim=True)
        torch.testing.assert_close(gates, want)
        assert torch.equal(probs, F.softmax(logits, -1))


def test_capacity():
    for factor, top_k, tokens, experts in [
            (1.0, 1, 40, 8), (1.25, 2, 33, 8), (1.1, 2, 40, 8), (0.5, 2, 3, 8)]:
        hundredths = round(100 * factor) * top_k * tokens
        assert moe.capacity(factor, top_k, tokens, experts) == -(-hundredths // (100 * experts))


def test_names():
    stacked = "blocks.0.mlp.experts.up_weight"
    assert moe.plain_name(stacked, 5) == "blocks.0.mlp.experts.5.up.weight"
    assert moe.plain_name(stacked + ".exp_avg", 5) == "blocks.0.mlp.experts.5.up.weight.exp_avg"


def test_balance():
    """In the last 20 of 140 steps no expert has 1.3 times the mean; without balance one has."""
    flags = ("--layers", "1", "--width", "64", "--heads", "4", "--seq", "64", "--batch", "16",
             "--no-check", "--steps", "140")
    reports = alone("moe", *((*flags, "--balance", kind) for kind in ("aux", "bias", "none")))
    aux, bias, none = [max(report["load"]["last"][0]) for report in reports]
    assert aux < 1.3 and bias < 1.3, (aux, bias)
    assert none > 1.3, none


# ---- planted bugs: each must fail the check ----------------------------------------------


def no_backward(module):
    """What autograd does with a bare all_to_all_single: the graph ends there."""
    def broken(ctx, grad):
        return grad.new_zeros(sum(ctx.send), *grad.shape[1:]), None, None, None

    module.AllToAll.backward = staticmethod(broken)


def router_detached(module):
    route = module.route
    module.route = lambda logits, *rest: route(logits.detach(), *rest)


def summed_over_ep(module):
    """Gradients of different experts are added up."""
    sum_gradients = module.sum_gradients

    def broken(model, replicas):
        sum_gradients(model, module.layers_of(model)[0].ep)

    module.sum_gradients = broken


def experts_counted_twice(module):
    """The norm: as if all ranks held the same experts."""
    def broken(model, ep):
        return nn.utils.get_total_norm([p.grad for p in model.parameters()])

    module.gradient_norm = broken


def biased_gates(module):
    route = module.route

    def broken(logits, top_k, bias):
        chosen, _, probs = route(logits, top_k, bias)
        gates = (probs + bias).gather(-1, chosen)
        return chosen, gates / gates.sum(-1, keepdim=True), probs

    module.route = broken


def aux_without_factor(module):
    loss = module.balancing_loss
    module.balancing_loss = lambda load, *rest: loss(load, *rest) / len(load)


def aux_without_gradient(module):
    """The loss is printed, and nothing more."""
    def broken(ctx, grad):
        ctx.layer.add_up(ctx.count)
        return grad, None, None, None

    module.AddLoss.backward = staticmethod(broken)


def local_load(module):
    """Every rank takes f over its own tokens only."""
    loss = module.balancing_loss

    def broken(load, logits, probs, top_k):
        own = F.one_hot(probs.topk(top_k).indices, len(load)).sum((0, 1))
        return loss(dist.get_world_size() * own, logits, probs, top_k)

    module.balancing_loss = broken


def not_regrouped(module):
    """Rows of several sources are taken to be other experts'."""
    forward = module.Experts.forward

    def broken(experts, rows, routing):
        routing.sizes.reverse()
        return forward(experts, rows, routing)

    module.Experts.forward = broken


@pytest.mark.parametrize("plant, flags", [
    (no_backward, []),
    (router_detached, []),
    (summed_over_ep, []),
    (experts_counted_twice, []),
    (biased_gates, ["--balance", "bias", "--steps", "9"]),
    (aux_without_factor, []),
    (aux_without_gradient, []),
    (local_load, []),
    (not_regrouped, []),
])
def test_planted(plant, flags):
    proves("moe", 2, *flags, plant=plant)


def test_one_expert_of_a_layer_is_not_trained_alone():
    said = script("moe", 1, "--train", r"experts\.0\.", code=2)
    assert "--train: takes up.weight of some experts of block 0, not of others" in said
