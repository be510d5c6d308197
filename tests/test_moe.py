"""moe.py in all forms of the toy; its idea and its technique in a model of somebody else."""
import copy
import tempfile
from functools import partial
from types import SimpleNamespace

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
    SMALL, alone, check_each, check_equal, check_refused, copied, dry_run_agrees, idea,
    run_ranks, run_script, textbook, with_transformers)
from ddp import BucketedDDP
from fsdp import FSDP
from others import Files, compare, gradients_of, into, refuses
from tensor_parallel import ColumnLinear, TensorParallel

LLAMA = "--model llama-toy"
MIXTRAL = "--model mixtral-toy --kv-heads 2 --hidden 40"
QWEN = "--model qwen3-moe-toy --hidden 24"
IDEA = "--impl idea"


@pytest.mark.parametrize("world, flags", [
    (1, "--capacity 0.8 --balance bias"),
    (2, f"{LLAMA} --top-k 1 --capacity 1.1 --shared --ep 1"),
    (2, f"{QWEN} --impl all"),
    (4, f"{MIXTRAL} --ep 2 --shared --balance bias --steps 3"),
    (2, "--train attn --balance bias --shared"),  # no expert is trained
    (2, "--train blocks.1 --capacity 0.8 --eval-every 1"),  # nothing goes back through block 0
    (4, f"{QWEN} --optimizer muon"),
    (2, f"{IDEA} --train blocks.1|norm --eval-every 1"),
    (4, f"{IDEA} {MIXTRAL} --ep 2"),
])
def test_equals_plain(world, flags):
    report = check_equal("moe", world, *flags.split())
    if IDEA not in flags:
        assert sum(report["load"][-1]) == pytest.approx(len(report["load"][-1]))
    if "--train" not in flags:
        textbook(report)


def test_fp32_by_default():
    assert run_script("moe", 2, *SMALL, "--steps", "6", "--pad", "0.3")["check"]["passed"]


def test_flops_are_of_the_experts_that_a_token_visits():
    runs = [(*SMALL, "--no-check", "--experts", count) for count in ("4", "8")]
    few, many = alone("moe", *runs)
    more = many["flops"]["per_token"] - few["flops"]["per_token"]
    assert more == 6 * 2 * 32 * 4  # the larger routers of two layers


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_saved_and_resumed(optimizer, tmp_path):
    """2 ranks save, 4 ranks go on, with the biases of the choice."""
    flags = f"{LLAMA} --balance bias --optimizer {optimizer}".split()
    check_equal("moe", 2, *flags, "--steps", "3", "--save", str(tmp_path))
    resumed = check_equal("moe", 4, *flags, "--ep", "2", "--steps", "5", "--resume", str(tmp_path))
    assert len(resumed["loss"]) == 2
    other = (*SMALL, *flags, "--top-k", "1", "--init-from", str(tmp_path))
    assert "saved with top_k 2, not 1" in run_script("moe", 1, *other, code=2)


# ---- cost ------------------------------------------------------------------------------


def round_robin(module):
    """Experts are chosen equally often, as a dry run takes them to be."""
    def route(logits, bias=0, *, top_k, normalize):
        chosen = torch.arange(logits.shape[:-1].numel() * top_k) % logits.shape[-1]
        chosen = chosen.view(*logits.shape[:-1], top_k)
        probs = logits.softmax(-1)
        gates = probs.gather(-1, chosen)
        return chosen, gates / gates.sum(-1, keepdim=True), probs

    module.softmax_route = route


@pytest.mark.parametrize("world, flags", [
    (2, "--capacity 0.5"),
    (4, f"{MIXTRAL} --ep 2 --shared --balance bias"),
    (2, IDEA),
])
def test_cost_is_the_dry_runs(world, flags):
    real = dry_run_agrees("moe", world, *flags.split(), ranks=[world - 1], plant=round_robin)
    textbook(real)
    if "--capacity" not in flags:  # rows to other ranks and from them, there and back; counts
        args = real["args"]
        ep = args["ep"] or world
        moving = 2 * args["batch"] * args["seq"] // world * args["top_k"] * args["layers"]
        wire = 2 * 4 * args["width"] * moving + 8 * args["layers"] * args["experts"]
        for rank in real["ranks"]:
            assert rank["collectives"]["all_to_all"]["wire"] == wire * (ep - 1) / ep


def test_calls_of_the_idea_and_of_the_technique():
    report = run_script("moe", 2, "--steps", "1", "--impl", "all", "--no-check")
    calls = {impl: figures["calls"] for impl, figures in report["sides"].items()}
    assert calls == {"idea": 141, "scratch": 26}


@pytest.mark.parametrize("model, layers, of_layer, total", [
    ("mixtral-8x7b", 32, 1_451_270_144, 46_702_792_704),
    ("qwen3-30b-a3b", 48, 623_120_640, 30_532_122_624),
])
def test_parameters_of_presets(model, layers, of_layer, total):
    flags = "--model", model, "--dry-run", "64", "--batch", "64", "--ep", "8", "--seq", "16"
    report, = alone("moe", (*flags, "--steps", "1", "--layers", "1"))
    assert report["parameters"]["total"] + (layers - 1) * of_layer == total
    assert (report["args"]["experts"], report["args"]["top_k"]) == moe.of_preset(model)


class Operations(TorchDispatchMode):
    """Notes the name of every operation, and the dtype of what travels."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.travels = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._opname)
        if func._opname == "alltoall_base_":
            self.travels.append(args[1].dtype)
        return func(*args, **(kwargs or {}))


def small_layer(experts=4, width=8, **options):
    linears = [nn.Linear(width, width, bias=False) for _ in range(experts)]
    router = nn.Linear(width, experts, bias=False)
    route = partial(moe.softmax_route, top_k=2, normalize=True)
    parts = moe.Experts(F.silu, up=linears, down=linears, gate=linears)
    return moe.MoE(router, parts, route, dist.group.WORLD, **options)


def check_kernels():
    """One kernel and the loop give one result. The host reads the device once, and writes nothing;
    no additions are contended: one is a permutation's."""
    torch.set_default_dtype(torch.float32)
    layer = small_layer()
    x = torch.randn(40, 8)
    found = []
    reads = []
    read = torch.Tensor.tolist
    torch.Tensor.tolist = lambda t: reads.append(t) or read(t)
    for in_one_kernel in True, False:
        layer.zero_grad()
        moe.StackedLinear.one_kernel_pays = lambda self, rows, pays=in_one_kernel: pays
        with Operations() as step:
            y = layer(x)
            y.square().sum().backward()
        unwanted = {"nonzero", "lift_fresh", "index_put", "index_put_", "_local_scalar_dense"}
        assert not unwanted & set(step.names)
        assert step.names.count("index_add") + step.names.count("index_add_") == 1
        found.append([y, *(p.grad for p in layer.experts.parameters())])
    assert len(reads) == 2
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_one_kernel_drops_no_bias():
    rows = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    for width, bias in (8, False), (8, True), (12, False):
        linear = moe.StackedLinear([nn.Linear(8, width, bias=bias)])
        assert linear.one_kernel_pays(rows) == (width == 8 and not bias)


# ---- the copy: in another model ----------------------------------------------------------


def other(layer):
    """A model that is not the GPT, with two mixtures, for tokens (N, 1)."""
    return nn.Sequential(nn.Embedding(11, 7), layer(shared=True), nn.RMSNorm(7),
                         layer(shared=False), nn.Linear(7, 11))


TOKENS = [  # of each step, of its two micro-batches: how many tokens each rank has
    [[5, 3, 4, 0], [3, 0, 6, 2]],
    [[9, 0, 1, 0], [6, 1, 0, 0]],
]
CFG = common.GPTConfig(width=7, hidden=5, form=common.FORMS["llama"])


def toy_layer(top_k, capacity, route=None, *, shared):
    layer = moe.ToyMoE(CFG, mlp=common.SwiGLU, experts=4, top_k=top_k, capacity=capacity,
                       shared=shared)
    layer.gamma = 0.05
    layer.route = route or layer.route
    return layer


def batch_of(step, world):
    """-> inputs, targets; of each micro-batch, of each rank, the numbers of its tokens"""
    sizes = [*step[0][:world], *step[1][:world]]
    n = sum(sizes)
    numbers = torch.arange(n).split(sizes)
    return torch.randint(11, (n, 1)), torch.randint(11, (n, 1)), [numbers[:world], numbers[world:]]


def cross_entropy(model, x, y, n):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / n


def copied_layer(section, mix, ep):
    """The copy's, with the experts that are this rank's."""
    mlps = [mix.experts[e] for e in common.share(4, ep.size(), ep.rank())]
    if not isinstance(mix, moe.ToyMoE):
        return section.IdeaOfMoE(mix.router, nn.ModuleList(mlps), mix.route, ep)
    linears = {name: [getattr(mlp, name) for mlp in mlps] for name in ("up", "down", "gate")}
    experts = section.Experts(F.silu, **linears)
    kind = section.MoE
    if mix.capacity:
        kind = partial(section.MoEWithCapacity, capacity=mix.capacity)
    return kind(mix.router, experts, mix.route, ep, shared=mix.shared, alpha=mix.alpha / 2,
                beta=mix.beta / 2, gamma=mix.gamma)


def plain_step(plain, optimizer, x, y, sources):
    """A step of the whole batch, in one forward -> all that training makes, by name."""
    optimizer.zero_grad()
    for mix in plain[1::2]:
        mix.sources = sources
    loss = cross_entropy(plain, x, y, len(x))
    for mix in plain[1::2]:
        loss = loss + getattr(mix, "loss", 0)  # the idea has none
    loss.backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    optimizer.step()
    return {"loss": loss.detach(), "norm": norm, "gradients": gradients_of(plain),
            "state": plain.state_dict()}


def our_step(section, model, optimizer, x, y, sources, replicas, ep):
    optimizer.zero_grad()
    total = 0
    for of_ranks in sources:
        mine = of_ranks[dist.get_rank()]
        loss = cross_entropy(model, x[mine], y[mine], len(x))
        loss.backward()
        total += loss.detach()
    section.sum_gradients(model, replicas)
    norm = section.gradient_norm(model, ep)
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, norm)
    optimizer.step()
    total = total + section.step_biases(model)
    return total, norm


def ideas_step(section, model, optimizer, x, y, sources, replicas, ep):
    mine = torch.cat([of_ranks[dist.get_rank()] for of_ranks in sources])
    return section.idea_step(model, optimizer, x[mine], y[mine], len(x), 0.01, replicas=replicas,
                             ep=ep)


def train_both(section, plain, step, ep_size, recompute=False):
    """Two steps of the plain model and of the copy's, whose other replicas begin with junk."""
    world = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (world // ep_size, ep_size),
                                 mesh_dim_names=("replicas", "ep"))
    replicas, ep = mesh.get_all_groups()
    model = copy.deepcopy(plain)
    for i in 1, 3:
        model[i] = copied_layer(section, model[i], ep)
        if recompute:
            model[i].forward = partial(checkpoint, model[i].forward, use_reentrant=False)
    if hasattr(section, "broadcast_parameters"):
        if replicas.rank() > 0:
            for p in model.parameters():
                p.data.add_(1)
        section.broadcast_parameters(model, replicas)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-5) for m in (plain, model)]
    for sizes in TOKENS:
        batch = batch_of(sizes, world)
        wanted = plain_step(plain, optimizers[0], *batch)
        total, norm = step(section, model, optimizers[1], *batch, replicas, ep)
        total = total.detach()
        dist.all_reduce(total)
        is_idea = not hasattr(section, "broadcast_parameters")
        gradients = moe.full_gradients(model, ep)
        if is_idea:
            state = moe.one_by_one(moe.in_stacks(model.state_dict()), ep)
        else:
            state = section.full_state_dict(model, ep)
        compare({"loss": total, "norm": norm, "gradients": gradients, "state": state}, wanted)
        if not is_idea:
            for tensor in model.state_dict().values():
                tensor.add_(1)
            section.load_full_state_dict(model, ep, wanted["state"])


DEEPSEEK = partial(moe.sigmoid_route, top_k=2, scale=2.5, groups=2, top_groups=1)


def check_copy(ep_size, kind, recompute=False, bug=()):
    section = moe if kind[1] else copied("moe", 2, *bug)  # capacity is no part of the copy
    torch.manual_seed(0)
    train_both(section, other(partial(toy_layer, *kind)), our_step, ep_size, recompute)


def check_idea(ep_size, route, recompute=False, bug=()):
    section = idea("moe", *bug)
    torch.manual_seed(0)

    def layer(shared):  # which the idea has not
        toy = toy_layer(2, 0.0, shared=False)
        return section.PlainMoE(toy.router, toy.experts, route)

    train_both(section, other(layer), ideas_step, ep_size, recompute)


SOFTMAX = partial(moe.softmax_route, top_k=3, normalize=False)


@pytest.mark.parametrize("world, cases", [  # ep, (top_k, capacity, perhaps a route), recompute
    (2, [
        (2, (3, 0.0)),
        (2, (2, 0.6), True),
        (1, (1, 1.1)),
        (2, (2, 0.0, DEEPSEEK), True),
    ]),
    (4, [
        (2, (2, 0.9), True),
        (4, (2, 0.0, DEEPSEEK)),
    ]),
])
def test_copy(world, cases):
    run_ranks(check_each, world, check_copy, cases)


@pytest.mark.parametrize("world", [2, 4])
def test_copy_of_the_idea(world):
    cases = [(2, SOFTMAX, True), (1, DEEPSEEK), (world, DEEPSEEK)]
    run_ranks(check_each, world, check_idea, cases)


# ---- planted bugs: each must fail the check ----------------------------------------------


IDEAS_BUGS = [
    ("gates.masked_fill(chosen != e, 0)", "(2 * gates).masked_fill(chosen != e, 0)"),
    ("AllToAll.apply(gradient, *ctx.way_back)",  # a bare all_to_all_single: the graph ends there
     "gradient.new_zeros(sum(ctx.way_back[1]), gradient.shape[1])"),
    ("order = chosen.flatten().argsort()", "order = torch.arange(chosen.numel())"),
    ("[order // chosen.shape[-1]]", "[order % (chosen.numel() // chosen.shape[-1])]"),
    ("zip(self.experts, arrived", "zip(self.experts[::-1], arrived"),
    ("answers[order.argsort()]", "answers[order]"),
    ("(dist.group.WORLD, replicas)", "(None, None)"),
    ("dist.all_reduce(p.grad, group=group)", "pass"),
    ("    all_reduce_gradients(model, replicas)\n", ""),
    ("dist.all_reduce(square, group=ep)", "pass"),
    ("dense + experts if ep.rank() == 0 else experts", "dense + experts"),
    ('reduction="sum") / valid', 'reduction="mean")'),
    ("    nn.utils.clip_grads_with_norm_(model.parameters(), clip, norm)\n", ""),
]


BUGS = [
    ("return ctx.trip.finish(), None", "return torch.zeros_like(ctx.trip.finish()), None"),
    ("(dist.group.WORLD, replicas)):\n        gradients",  # different experts are added up
     "(dist.group.WORLD, dist.group.WORLD)):\n        gradients"),
    ("return grad, torch.ones_like(loss)", "return grad, torch.zeros_like(loss)"),
    ("loss = balancing_loss(load,", "loss = balancing_loss(2 * rows_of_each(chosen, 4),"),  # own
    ("expert.argsort(stable=True)", "torch.arange(len(rows))"),
    ("regroup.argsort()", "regroup"),
    ("    summing.wait()\n        loss =", "    load.zero_()\n        loss ="),
]


def check_planted(check, case, bug):
    with pytest.raises(AssertionError, match="not close|keys of the mappings do not match"):
        check(2, case, bug=bug)


def test_planted():
    cases = [(check_idea, SOFTMAX, bug) for bug in IDEAS_BUGS]
    cases += [(check_copy, (2, 0.0), bug) for bug in BUGS]
    run_ranks(check_each, 2, check_planted, cases)


# ---- a model of transformers -------------------------------------------------------------


def check_transformers(block):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    cfg = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=88, moe_intermediate_size=24,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
        experts_implementation="eager")  # the others take no fp64
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Qwen3MoeForCausalLM(cfg).double())
    plain, model = models
    model.model.layers[0].mlp.requires_grad_(False)
    ep = dist.group.WORLD
    names = {**vars(moe), "ep": ep, "model": model}
    exec(block, names)
    published = names["published"](moe.full_state_dict(model, ep))
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            plain.save_pretrained(folder, state_dict=published)
            again = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float64)
        compare(dict(again.state_dict()), dict(plain.state_dict()))
    ids = torch.randint(64, (2, 9))
    x = ids[:, :-1]
    y = ids[:, 1:]
    common.loss_sum(plain(x, use_cache=False).logits, y).backward()
    own = slice(ep.rank(), ep.rank() + 1)
    common.loss_sum(model(x[own], use_cache=False).logits, y[own]).backward()
    alone = [dist.new_group([rank]) for rank in range(2)]
    moe.sum_gradients(model, alone[dist.get_rank()])
    found = moe.full_gradients(model, ep)
    wanted = of_mixture(plain, 1)
    compare({name: found[name] for name in wanted}, wanted, 1e-6)
    assert not any(".0.mlp." in name for name in found)  # what was frozen still is


def of_mixture(plain, layer):
    """-> gradients of its experts and router, by our names."""
    theirs = plain.model.layers[layer]
    wanted = {}
    name = f"model.layers.{layer}.mlp"
    wanted[f"{name}.router.weight"] = theirs.mlp.gate.weight.grad
    gate, up = theirs.mlp.experts.gate_up_proj.grad.chunk(2, 1)
    for which, stack in ("gate", gate), ("up", up), ("down", theirs.mlp.experts.down_proj.grad):
        for e, gradient in enumerate(stack):
            wanted[f"{name}.experts.{e}.{which}.weight"] = gradient
    return wanted


def test_a_model_of_transformers():
    """Their Qwen3 with experts, by the page's lines."""
    with_transformers(check_transformers, 2, "# their experts")


# ---- pure parts ------------------------------------------------------------------------


def check_layer():
    """Under autocast and in bf16 the router chooses in fp32; no change of dtype rounds a bias."""
    torch.set_default_dtype(torch.float32)
    layer = small_layer(width=6, gamma=0.1)
    assert moe.gradient_norm(layer, dist.group.WORLD) == 0  # no backward yet
    x = torch.randn(64, 6, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), Operations() as step:
        assert layer.score(x).dtype == torch.float32
        layer(x).square().sum().backward()
    # counts, rows and answers, and the gradients of both
    assert step.travels == [torch.int64, *[torch.bfloat16] * 4]
    step_of_gamma = round(0.1 / moe.UNIT)
    layer.bias_units.fill_(1001 * step_of_gamma)  # 1000 in bf16
    layer.to(torch.bfloat16)
    assert layer.score(x.bfloat16()).dtype == torch.float32
    norm = moe.gradient_norm(layer, dist.group.WORLD)
    assert norm.dtype == torch.float32
    layer.load_of_step = torch.tensor([0, 3, 2, 3])
    moe.step_biases(layer)  # those that were chosen less often than the mean grow
    moe.step_biases(layer)  # no backward since: all stay
    biases = layer.bias_units // step_of_gamma
    assert biases.tolist() == [1002, 1000, 1001, 1000]
    p = layer.router.weight
    p.data = p.data.t().contiguous().t()
    moe.broadcast_parameters(layer, dist.group.WORLD)
    assert p.is_contiguous()
    wrapped = nn.ModuleList([torch.compile(layer)])  # which has an `ep`, too
    dense, experts = moe.dense_and_experts(wrapped)
    assert len(dense) == 1 and 0 < len(experts) == len(set(experts))
    assert_refused(layer)


def assert_refused(layer):
    """What would be wrong in silence. And a MoE may itself be called experts."""
    with pytest.raises(AssertionError, match="5 logits for 4 experts"):
        moe.MoE(nn.Linear(6, 5, bias=False), layer.experts, layer.route, layer.ep)
    capped = type("Capped", (nn.Linear,), {})(6, 4)
    with pytest.raises(AssertionError, match="Capped.*its forward would not be called"):
        moe.MoE(capped, layer.experts, layer.route, layer.ep)
    normed = nn.utils.spectral_norm(nn.Linear(6, 4))  # its weight is computed
    for odd in capped, normed:
        refuses("its forward would not be called", moe.StackedLinear, [odd])
    for wrapper in BucketedDDP, partial(FSDP, blocks=[]):
        refuses("ranks have different experts", wrapper, layer)
    cut = ColumnLinear(nn.Linear(2, 2), TensorParallel())
    refuses("different pieces", moe.sum_gradients, nn.ModuleList([layer, cut]), None)
    model = nn.ModuleDict({"experts": layer})
    whole = moe.full_state_dict(model, layer.ep)
    assert "experts.3.up.weight" in moe.full_state_dict(layer, layer.ep)
    assert "experts.router.weight" in whole
    assert "experts.bias_units" in whole
    assert "experts.experts.0.up.weight" in whole
    narrow = {name: t[:1] if name.endswith("up.weight") else t for name, t in whole.items()}
    with pytest.raises(RuntimeError, match="size mismatch for experts.experts.up.weight"):
        moe.load_full_state_dict(model, layer.ep, narrow)  # copy_ would take it, for all rows
    layer.bias_units.fill_(7)  # learnt in another training, or memory that is not set yet
    of_plain = {name: t for name, t in whole.items() if not name.endswith("bias_units")}
    moe.load_full_state_dict(model, layer.ep, of_plain)
    assert not layer.bias_units.any()
    moe.load_full_state_dict(model, layer.ep, Files(whole))
    with pytest.raises(AssertionError, match="experts.shared.weight.* are not in this model"):
        moe.load_full_state_dict(model, layer.ep, {**whole, "experts.shared.weight": 0})


def check_shared_hides_the_trip():
    """The shared expert works while rows travel, its backward while gradients do."""
    order = []
    layer = small_layer(shared=nn.Linear(8, 8))
    into("Trip", "start", "after", lambda *_: order.append("start"))(moe)
    finish = moe.Trip.finish
    moe.Trip.finish = lambda trip: order.append("finish") or finish(trip)
    layer.shared.register_forward_hook(lambda *_: order.append("forward"))
    layer.shared.weight.register_hook(lambda _: order.append("backward"))
    layer(torch.randn(5, 8, requires_grad=True)).sum().backward()
    assert order == ["start", "forward", "finish", "start", "backward", "finish"]


def test_layer():
    for check in check_layer, check_shared_hides_the_trip, check_kernels:
        run_ranks(check, 1)


def test_softmax_route():
    """Gates that are not normalized are probabilities; a bias changes the choice alone."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    bias = torch.tensor([0.0, -1.0, 0.0])
    chosen, gates, probs = moe.softmax_route(logits, bias, top_k=2, normalize=False)
    assert chosen.tolist() == [[0, 2]]
    assert torch.equal(gates, probs[:, [0, 2]])
    _, gates, _ = moe.softmax_route(logits, top_k=2, normalize=True)
    # Mixtral, section 2.1: Softmax(TopK(x W)), the same number
    torch.testing.assert_close(gates, logits[:, :2].softmax(-1))


def test_sigmoid_route():
    """DeepSeek-V3, equations 13 to 16 and section 2.1.2's groups, token by token."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 12, generator=rng).double()
    bias = torch.randn(12, generator=rng).double() / 5
    chosen, gates, probs = moe.sigmoid_route(logits, bias, top_k=3, scale=2.5, groups=4,
                                             top_groups=2)
    for t, s in enumerate(logits.sigmoid().tolist()):
        biased = [s[e] + bias[e].item() for e in range(12)]
        groups = [sorted(biased[first:first + 3]) for first in range(0, 12, 3)]
        by_two_best = sorted(range(4), key=lambda g: -sum(groups[g][-2:]))
        best = by_two_best[:2]
        eligible = [e for e in range(12) if e // 3 in best]
        wanted = sorted(eligible, key=lambda e: -biased[e])[:3]
        assert sorted(chosen[t].tolist()) == sorted(wanted)
        for e, gate in zip(chosen[t].tolist(), gates[t].tolist()):
            assert gate == pytest.approx(2.5 * s[e] / sum(s[i] for i in wanted))
            assert probs[t, e].item() == pytest.approx(s[e] / sum(s))


def test_balancing_loss():
    """The formulas of the papers, in fp32, also under autocast, which would cast a matmul."""
    logits = torch.randn(40, 8)
    probs = logits.softmax(-1)
    load = torch.arange(8) * 20 // 7
    with torch.autocast("cpu", torch.bfloat16):
        found = moe.balancing_loss(load, logits, probs, load.sum() / 40, alpha=0.3, beta=0.2)
    switch = sum(8 * load[e] / load.sum() * probs[:, e].mean() for e in range(8))
    z = logits.exp().sum(-1).log().square().mean()
    torch.testing.assert_close(found, 0.3 * switch + 0.2 * z)


def test_capacity():
    assert moe.most_rows(1.25, 2, 33, 8) == 11  # 10.3
    assert moe.most_rows(1.1, 2, 40, 8) == 11
    chosen = torch.tensor([[0, 1], [1, 2], [0, 1], [1, 0]])
    kept = moe.first_in_queue(chosen, 3, 0.75)  # 2 rows
    assert kept.tolist() == [[True, True], [True, True], [True, False], [False, False]]


def test_refused():
    check_refused("moe", [
        ("--top-k 9", "choose 8 at most"),
        ("--batch 7 --dry-run 2", "take a multiple of 2"),
        ("--ep 3 --dry-run 4 --batch 12", "take a divisor of 4 ranks"),
        ("--experts 6 --dry-run 4", "and of --experts 6"),
        ("--impl torch", "torch has no such layer"),
        (f"{IDEA} --shared", "--impl idea: takes no --shared"),
    ])
