"""fsdp.py, alone and around modules of others."""
import copy
import dataclasses
import itertools
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import fsdp
from conftest import PROOF, SMALL, copied, dry_run_agrees, each, proves, run, script, textbook
from fsdp import FSDP
from others import DecayByShape, Layerwise

BLOCK = 12 * 32 * 32 + 13 * 32  # parameters of a block of width 32
ROOT = (256 + 16 + 2) * 32


@pytest.mark.parametrize("world, flags", [
    (1, []),
    (4, ["--no-reshard"]),
    (3, ["--batch", "7", "--vocab", "257", "--clip", "0"]),
    (4, ["--hsdp", "2"]),
    (4, ["--hsdp", "1", "--offload"]),
    (2, ["--impl", "torch"]),
    (2, ["--warmup", "1", "--decay", "cosine", "--eval-every", "1"]),
])
def test_equals_one_process(world, flags):
    proves("fsdp", world, *flags)


def test_bf16():
    """bf16 computes and travels to be used; shards, gradients, sums and AdamW's states are fp32."""
    report = script("fsdp", 2, *SMALL, "--dtype", "bf16")
    textbook(report)
    assert report["check"]["passed"]
    [rank, _] = report["ranks"]
    P = 2 * BLOCK + ROOT
    assert rank["memory"]["parameters"] == 4 * P / 2
    assert rank["memory"]["gradients"] == 4 * P / 2
    assert rank["collectives"]["all_gather"]["payload"] == 2 * (P + 2 * BLOCK)
    assert rank["collectives"]["reduce_scatter"]["payload"] == 4 * P


def test_frozen_ones_in_bf16_count_as_much():
    """They are kept in what computes, in half of the bytes."""
    counts = []
    for dtype in ("bf16", "fp32"):
        flags = (*SMALL, "--no-check", "--train", "blocks.1", "--dtype", dtype)
        counts.append(script("fsdp", 2, *flags)["parameters"])
    assert counts[0] == counts[1]


def padded(size, n):
    return -(-size // n) * n


@pytest.mark.parametrize("world, flags", [(2, []), (3, ["--no-reshard"]), (4, ["--hsdp", "2"])])
def test_cost(world, flags):
    """The docstring's table; the calls and bytes are those of fully_shard."""
    real = dry_run_agrees("fsdp", world, *flags, ranks=[world - 1])
    textbook(real)
    theirs = script("fsdp", world, *SMALL, *flags, "--no-check", "--impl", "torch")
    n = 2 if "--hsdp" in flags else world
    P = 2 * padded(BLOCK, n) + padded(ROOT, n)
    gathers = 3 if "--no-reshard" in flags else 5
    for rank, other in zip(real["ranks"], theirs["ranks"]):
        sent = rank["collectives"]
        held = rank["memory"]
        assert sent["all_gather"]["calls"] == gathers
        assert sent["reduce_scatter"]["calls"] == 3
        assert held["parameters"] + held["gradients"] + held["optimizer"] == 16 * P // n + 12
        for kind in "all_gather", "reduce_scatter":
            ours = sent[kind]["payload"]
            assert sent[kind]["calls"] == other["collectives"][kind]["calls"]
            assert 0 <= other["collectives"][kind]["payload"] - ours < 0.05 * ours


@pytest.mark.parametrize("train", ["blocks.1", "tok|norm", "bias"])
def test_frozen_cost_nothing(train):
    """Nothing of them is sent, summed or stepped; they are held whole."""
    real = dry_run_agrees("fsdp", 2, "--train", train, ranks=[1])
    textbook(real)
    proves("fsdp", 2, "--train", train)
    if train == "blocks.1":
        sent = real["ranks"][0]["collectives"]
        assert sent["all_gather"]["calls"] == 2 and sent["reduce_scatter"]["calls"] == 1
        assert sent["reduce_scatter"]["payload"] == 4 * BLOCK
        assert real["ranks"][0]["memory"]["gradients"] == 4 * BLOCK / 2


def test_both_times_both():
    report = script("fsdp", 2, *SMALL, "--no-check", "--impl", "both")
    assert report["ms_per_step"] > 0 and report["torch_ms_per_step"] > 0


# ---- against one process, on modules of others -----------------------------------


def equal_training(build, rows, blocks_of, loss_of, wrap=FSDP, **options):
    """Trains two copies, one in one process and one by FSDP: they remain equal.

    Compared are gradients and the norm of every step, then parameters and buffers.
    rows: (steps, B, ..), of which each rank takes its part. blocks_of(module), loss_of(model, rows)
    """
    rank = dist.get_rank()
    n = dist.get_world_size()
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(rank)  # FSDP gives all ranks the first one's weights
    inner = build()
    ours = wrap(inner, blocks_of(inner), **options)
    trained = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1, eps=1e-5)
    our_optimizer = ours.optimizer(torch.optim.AdamW, lr=0.1, eps=1e-5)
    for data in rows:
        loss_of(plain, data).backward()
        want = {name: p.grad.clone() for name, p in plain.named_parameters() if p.requires_grad}
        want_norm = nn.utils.clip_grad_norm_(trained, 0.5)
        loss_of(ours, data.chunk(n)[rank]).backward()
        torch.testing.assert_close(ours.full_gradients(), want, rtol=1e-10, atol=1e-10)
        norm = ours.clip_grad_norm_(0.5)
        torch.testing.assert_close(norm, want_norm, rtol=1e-10, atol=1e-10)
        optimizer.step()
        optimizer.zero_grad()
        our_optimizer.step()
        our_optimizer.zero_grad()
    state = ours.full_state_dict()
    assert list(state) == list(plain.state_dict())
    torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-9, atol=1e-9)
    assert all(unit.full.untyped_storage().nbytes() == 0 for unit in ours.units)
    return ours


class Gated(nn.Module):
    """Nothing of the GPT: no biases, RMSNorm, other names, odd sizes."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(5, 7, bias=False)
        self.layers = nn.ModuleList()
        for _ in range(3):
            gate = nn.Linear(7, 11, bias=False)
            back = nn.Linear(11, 7, bias=False)
            self.layers.append(nn.Sequential(nn.RMSNorm(7), gate, nn.SiLU(), back))
        self.leave = nn.Linear(7, 3, bias=False)

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.leave(x)


def check_copy():
    """Section 1 alone, as somebody would copy it."""
    rows = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(1))
    equal_training(Gated, rows, lambda m: m.layers, lambda m, x: m(x).square().sum(),
                   wrap=copied("fsdp").FSDP)


def test_copy():
    run(check_copy, 4)


class Awkward(nn.Module):
    """A frozen layer, a weight tied across blocks, a block that runs twice, two outputs."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(4):
            self.blocks.append(nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5)))
        self.blocks[3][2].weight = self.blocks[0][2].weight
        self.blocks[1][0].requires_grad_(False)
        self.first = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        x = self.first(x)
        for i in 0, 1, 2, 3, 1:
            x = x + self.blocks[i](x)
        return self.last(x), x


def awkward_loss(model, x):
    a, b = model(x)
    return a.square().sum() + b.sum()


def check_drop_in(reshard):
    rows = torch.randn(3, 12, 5, generator=torch.Generator().manual_seed(1))
    ours = equal_training(Awkward, rows, lambda m: m.blocks, awkward_loss, reshard=reshard)
    found = {name for unit in ours.units for names in unit.names for name in names}
    assert "blocks.3.2.weight" in found and "blocks.1.0.weight" not in found


@pytest.mark.parametrize("world, reshard", [(1, True), (2, False), (3, True)])
def test_drop_in(world, reshard):
    run(check_drop_in, world, reshard)


def check_gradients_add_up():
    """Over two backwards; over two forwards before one backward; over a graph that is kept."""
    def several(model, x):
        first, second = x.chunk(2)
        awkward_loss(model, first).backward()
        with torch.no_grad():
            model(second)
        awkward_loss(model, second).backward()

    def together(model, x):
        first, second = x.chunk(2)
        (awkward_loss(model, first) + awkward_loss(model, second)).backward()

    def kept(model, x):
        loss = awkward_loss(model, x) / 2
        loss.backward(retain_graph=True)
        loss.backward()

    torch.manual_seed(0)
    inner = Awkward()
    model = FSDP(inner, inner.blocks)
    x = torch.randn(4, 5)
    found = []
    for backwards in several, together, kept:
        backwards(model, x)
        found.append(model.full_gradients())
        model.zero_grad()
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])


def test_gradients_add_up():
    run(check_gradients_add_up, 2)


# ---- what modules return ----------------------------------------------------------


@dataclasses.dataclass
class Result:
    x: torch.Tensor
    about: str = "it"
    more: object = None


def as_dataclass(x):
    return Result(x)


def as_nested(x):
    return {"all": [Result(None, more=(1, x))]}


def as_list(x):
    return [None, x]


def as_dict(x):
    return {"x": x, "about": "it"}


def opened(value):
    """The last tensor in what a module returns."""
    return fsdp.tensors_in(value)[-1]


class Returning(nn.Module):
    """A block, or a root, that returns its tensor in some other form."""

    def __init__(self, inner, form):
        super().__init__()
        self.inner = inner
        self.form = form

    def forward(self, x):
        return self.form(self.inner(opened(x)))


def check_outputs():
    for form in as_dataclass, as_nested, as_list, as_dict:
        def build():
            layers = [Returning(nn.Linear(5, 5), form) for _ in range(3)]
            return nn.Sequential(nn.Linear(5, 5), *layers, Returning(nn.Linear(5, 2), form))

        rows = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1))
        equal_training(build, rows, lambda m: m[1:4], lambda m, x: opened(m(x)).square().sum())


def test_outputs_may_be_dataclasses_lists_and_dicts():
    run(check_outputs, 2)


class Hidden(nn.Module):
    """Its output is found on itself, not in what it returns."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.head = nn.Linear(5, 2)
        self.output = None  # (B, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        self.output = self.head(x)


def hidden_loss(model, x):
    model(x)
    return getattr(model, "module", model).output.square().sum()


def check_hidden_output():
    rows = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1))
    equal_training(Hidden, rows, lambda m: m.blocks, hidden_loss)


def test_output_of_the_root_need_not_be_found():
    run(check_hidden_output, 2)


class HandsOn(nn.Module):
    """Returns a parameter of the root beside its output: a leaf, whose gradient comes early."""

    def __init__(self, adds):
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.adds = adds

    def forward(self, x, bias):
        x = self.linear(x)
        if self.adds:
            x = x + bias
        return x, bias


class OneBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(5))
        self.blocks = nn.ModuleList(HandsOn(adds) for adds in (False, True, True))

    def forward(self, x):
        bias = self.bias
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


def check_a_leaf_that_is_handed_on():
    rows = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1))
    equal_training(OneBias, rows, lambda m: m.blocks, lambda m, x: m(x).square().sum())


def test_a_parameter_may_be_handed_on_from_block_to_block():
    run(check_a_leaf_that_is_handed_on, 2)


# ---- frozen parameters --------------------------------------------------------------


def partly_frozen(mask):
    """Of six parts those of the mask are trained, all else is. The last weight is the first one."""
    blocks = [nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)) for _ in range(3)]
    model = nn.Sequential(nn.Linear(3, 3), *blocks, nn.Linear(3, 3))
    model[4].weight = model[0].weight
    parts = [model[0], model[1], model[2][0], model[2][2], model[3][0].weight, model[4].bias]
    for part, trained in zip(parts, mask):
        part.requires_grad_(trained)
    return model


def check_frozen():
    rows = torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(1))
    for mask in itertools.product((True, False), repeat=6):
        ours = equal_training(lambda: partly_frozen(mask), rows, lambda m: m[1:4],
                              lambda m, x: m(x).square().sum())
        sharded = sum(unit.size for unit in ours.units)
        assert sharded == sum(p.numel() for p in ours.module.parameters() if p.requires_grad)


def test_frozen_in_every_mix():
    run(check_frozen, 2)


def check_clips_in_any_dtype():
    """A norm of 600.2: in fp16 its square would be inf, and in fp64 one unit has nearly all of it.
    """
    mixed = torch.float32, torch.float64
    for dtypes, tolerance in ([torch.float16] * 2, 1e-2), (mixed, 1e-14):
        module = nn.Sequential(*(nn.Linear(2, 2, bias=False, dtype=d) for d in dtypes))
        model = FSDP(module, [*module])
        for unit, size in zip(model.units, (1e-6, 300.1)):
            unit.shard.grad = torch.full_like(unit.shard, size)
        norm = model.clip_grad_norm_(1.0)
        assert norm.item() == pytest.approx(600.2, rel=tolerance)
        clipped = model.clip_grad_norm_(1.0)
        assert clipped.item() == pytest.approx(1.0, rel=max(tolerance, 1e-6))


def test_clips_in_any_dtype():
    run(check_clips_in_any_dtype, 1)


def check_blocks_alone():
    """Nothing to train outside the blocks."""
    rows = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1))

    def build():
        return nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))

    ours = equal_training(build, rows, lambda m: m, lambda m, x: m(x).square().sum())
    assert ours.root is None


def test_blocks_alone():
    run(check_blocks_alone, 2)


def check_one_layer_run_often():
    """As ALBERT does: the list of blocks names the same module several times."""
    rows = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1))

    def build():
        layer = nn.Linear(3, 3)
        return nn.Sequential(nn.Linear(3, 3), layer, nn.Tanh(), layer, nn.Tanh(), layer)

    equal_training(build, rows, lambda m: [m[1], m[3], m[5]], lambda m, x: m(x).square().sum())


def test_one_layer_run_often():
    run(check_one_layer_run_often, 2)


# ---- optimizers: groups, schedules, and those that are refused -------------------------


def groups_of(module):
    """Three groups: matrices of the layers, the rest of these, and `leave`; `enter` is in none."""
    layers = list(module.layers.parameters())
    return [
        {"params": [p for p in layers if p.dim() >= 2], "weight_decay": 0.3},
        {"params": [p for p in layers if p.dim() < 2], "weight_decay": 0.0, "lr": 0.05},
        {"params": [module.leave.weight], "betas": (0.8, 0.9), "name": "leave"},
    ]


def check_groups(home, reshard):
    """Three steps with three groups and a schedule equal those of one process."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    torch.manual_seed(0)
    plain = Gated()
    torch.manual_seed(0)
    inner = Gated()
    ours = FSDP(inner, inner.layers, home=home, reshard=reshard)
    optimizers = [
        torch.optim.AdamW(groups_of(plain), lr=0.1),
        ours.optimizer(torch.optim.AdamW, groups_of(inner), lr=0.1),
    ]
    for group, want in zip(optimizers[1].param_groups, optimizers[0].param_groups):
        assert {**group, "params": 0} == {**want, "params": 0}
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in optimizers]
    for x in torch.randn(3, 12, 5, generator=torch.Generator().manual_seed(1)):
        for model, rows in (plain, x), (ours, x.chunk(n)[rank]):
            for part in rows.chunk(2):  # gradients add up over two backwards
                model(part).square().sum().backward()
        norm = ours.clip_grad_norm_(1.0)
        want = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        torch.testing.assert_close(norm, want)
        for optimizer, schedule in zip(optimizers, schedules):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        plain.zero_grad()  # what is in no group
        ours.zero_grad()
    torch.testing.assert_close(ours.full_state_dict(), dict(plain.state_dict()))
    with pytest.raises(RuntimeError, match="once"):
        ours.parameter_groups(groups_of(inner))


@pytest.mark.parametrize("world, home, reshard", [
    (1, None, True), (3, "cpu", False), (4, None, True),
])
def test_parameter_groups(world, home, reshard):
    run(check_groups, world, home, reshard)


def check_wrong_groups():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = list(module.parameters())
    ours = FSDP(module, [module[1]])
    with pytest.raises(ValueError, match="after FSDP"):
        ours.parameter_groups([{"params": before}])
    with pytest.raises(ValueError, match="two groups"):
        ours.parameter_groups([{"params": module.parameters()}, {"params": [module[1].bias]}])
    ours(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="before the first backward"):
        ours.parameter_groups([{"params": module.parameters()}])


def test_wrong_groups_are_refused():
    run(check_wrong_groups, 1)


ELEMENTWISE = "SGD Adam AdamW NAdam RAdam Adamax Adadelta Adagrad RMSprop Rprop ASGD".split()


def check_optimizers():
    def wrapped():
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        return FSDP(module, [module[1]])

    for name in ELEMENTWISE:
        assert wrapped().optimizer(getattr(torch.optim, name), lr=0.1)
    wrapped().optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
    for kind in Layerwise, DecayByShape, torch.optim.Adafactor:
        for lr in 0.1, 0.0:  # a schedule may begin with 0
            with pytest.raises(ValueError, match="elementwise"):
                wrapped().optimizer(kind, lr=lr)
    for name in "Muon", "LBFGS":  # these say so themselves, in the trial step
        with pytest.raises((ValueError, TypeError)):
            wrapped().optimizer(getattr(torch.optim, name), lr=0.1)


def test_optimizers_that_are_not_elementwise_are_refused():
    run(check_optimizers, 1)


# ---- the beginning: equal weights, the meta device ---------------------------------------


class Strided(nn.Module):
    """Parameters and buffers whose memory is not one run."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 7)[:, :3])
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.frozen = nn.Parameter(torch.randn(5, 6).T, requires_grad=False)
        self.register_buffer("table", torch.randn(6, 5)[:, ::2])
        self.register_buffer("count", torch.tensor(dist.get_rank()))


def check_all_begin_alike():
    torch.manual_seed(dist.get_rank())
    module = Strided()
    replicas = dist.new_group([0, 2]), dist.new_group([1, 3])
    shards = dist.new_group([0, 1]), dist.new_group([2, 3])
    rank = dist.get_rank()
    ours = FSDP(module, [module.conv], group=shards[rank // 2], replicas=replicas[rank % 2])
    torch.manual_seed(0)
    want = Strided().state_dict()
    want["count"].zero_()
    assert list(ours.full_state_dict()) == list(want)
    for name, tensor in ours.full_state_dict().items():
        assert torch.equal(tensor, want[name]), name


def test_all_begin_with_the_first_ranks_weights_and_buffers():
    run(check_all_begin_alike, 4)


def check_meta():
    """Values are made where they are kept, frozen ones whole; without init it is refused."""
    def init(holder, prefix):
        [(name, p)] = holder.named_parameters(prefix=prefix)
        p.data.fill_(sum(map(ord, name)))

    def build():
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        module[2].weight = module[0].weight
        module[2].keys = nn.Parameter(torch.ones(3))  # a name that containers have methods of
        module[1].bias.requires_grad_(False)
        return module

    with torch.device("meta"):
        module = build()
        refused = build()
    ours = FSDP(module, [module[1]], device="cpu", init=init)
    for name, tensor in ours.full_state_dict().items():
        name = name.replace("2.weight", "0.weight")
        assert torch.equal(tensor, torch.full_like(tensor, sum(map(ord, name)))), name
    ours(torch.ones(2, 3)).sum().backward()
    assert not module[1].bias.is_meta and not module[1].bias.requires_grad
    with pytest.raises(ValueError, match="init="):
        FSDP(refused, [refused[1]], device="cpu")


def test_meta():
    run(check_meta, 2)


def check_layout():
    """11 + 3 elements on this many ranks: every rank's run, padding at the end, and back."""
    module = nn.ModuleDict({"a": nn.Linear(11, 1, bias=False), "b": nn.Linear(3, 1, bias=False)})
    for i, p in enumerate(module.parameters()):
        p.data.copy_(torch.arange(p.numel()) + 100 * i)
    want = {name: t.clone() for name, t in module.state_dict().items()}
    rank = dist.get_rank()
    [unit] = FSDP(module, []).units
    flat = torch.cat([*(t.flatten() for t in want.values()), torch.zeros(14)])
    each = -(-14 // dist.get_world_size())
    assert torch.equal(unit.shard, flat[rank * each:(rank + 1) * each])
    for name, t in unit.gathered(unit.shard).items():
        assert torch.equal(t, want[name])


@pytest.mark.parametrize("world", [1, 3, 4])
def test_layout(world):
    run(check_layout, world)


def check_state():
    """A state is gathered from one model and loaded into another, with buffers and tied weights."""
    def build():
        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        module[2].weight = module[0].weight
        module[0].bias.requires_grad_(False)
        return module

    torch.manual_seed(0)
    first = FSDP(build(), [])
    first(torch.randn(4, 3)).sum().backward()
    second = FSDP(build(), [])
    state = first.full_state_dict()
    second.load_full_state_dict(state)
    torch.testing.assert_close(second.full_state_dict(), state, rtol=0, atol=0)
    plain = build()
    plain.load_state_dict(state)
    second.load_full_state_dict({name: 2 * t for name, t in state.items()})
    wrong = {**state, "2.bias": torch.ones(2)}
    with pytest.raises(ValueError, match="2.bias is"):
        second.load_full_state_dict(wrong)
    with pytest.raises(ValueError, match="running_mean is"):
        second.load_full_state_dict({**state, "1.running_mean": torch.ones(1)})
    assert torch.equal(second.full_state_dict()["0.weight"], 2 * state["0.weight"])
    with pytest.raises(KeyError, match="more"):
        second.load_full_state_dict({**state, "more": state["0.bias"]})
    with pytest.raises(ValueError, match="0.weight is"):
        second.load_full_state_dict({**state, "0.weight": torch.ones(2, 3)})


class Extra(nn.Linear):
    """Its state_dict has more than tensors."""

    def get_extra_state(self):
        return {"scale": 1}


def check_wrapped_state():
    """What CheckpointWrapper wraps has its names in the state_dict, and other ones elsewhere."""
    def build():
        module = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3))
        module[1] = checkpoint_wrapper(module[1])
        module[2].weight = module[1][0].weight
        return module

    plain = build()
    model = FSDP(build(), [])
    model.load_full_state_dict(plain.state_dict())
    torch.testing.assert_close(model.full_state_dict(), plain.state_dict(), rtol=0, atol=0)
    model(torch.ones(2, 3)).sum().backward()
    plain(torch.ones(2, 3)).sum().backward()
    want = {name: p.grad * dist.get_world_size() for name, p in plain.named_parameters()}
    torch.testing.assert_close(model.full_gradients(), want)
    with pytest.raises(ValueError, match="0._extra_state"):
        FSDP(nn.Sequential(Extra(3, 3)), [])


def test_state_round_trip():
    run(check_state, 3)
    run(check_wrapped_state, 2)


# ---- refused, in words --------------------------------------------------------------


class Opaque:
    def __init__(self, x):
        self.x = x


class OwnParameter(nn.Linear):
    def forward(self, x):
        return super().forward(x), self.weight.T


def pair():
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def check_refused_at_construction():
    module = pair()
    with pytest.raises(ValueError, match="no part of the module"):
        FSDP(module, [nn.Linear(3, 3)])
    nested = nn.Sequential(module, nn.Linear(3, 3))
    with pytest.raises(ValueError, match="only one can be a block"):
        FSDP(nested, [module[1], module])
    with pytest.raises(ValueError, match="no parameter to train"):
        FSDP(pair().requires_grad_(False), [])
    with pytest.raises(ValueError, match="sparse=False"):
        FSDP(nn.Embedding(5, 3, sparse=True), [])
    mixed = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.float32))
    with pytest.raises(ValueError, match="one dtype"):
        FSDP(mixed, [])
    with pytest.raises(ValueError, match="FSDP already"):
        FSDP(nn.Sequential(FSDP(pair(), []), nn.Linear(3, 3)), [])
    module.register_buffer("table", torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match="table is on the meta device"):
        FSDP(module, [])


def check_refused_later():
    x = torch.ones(2, 3)
    module = pair()
    plain = copy.deepcopy(module)
    model = FSDP(module, [module[1]])
    for call in (module.state_dict, module[1].state_dict, model.state_dict,
                 lambda: module.load_state_dict(model.full_state_dict()),
                 lambda: model.load_state_dict({}, strict=False)):
        with pytest.raises(RuntimeError, match="full_state_dict"):
            call()
    with pytest.raises(RuntimeError, match="when it is made"):
        model.to(torch.float32)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="create_graph"):
        model(x).sum().backward(create_graph=True)
    inputs = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    module[1].bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match="requires_grad has changed"):
        model(x)
    module[1].bias.requires_grad_(True)
    model(x).sum().backward()
    plain(x).sum().backward()
    want = {name: p.grad for name, p in plain.named_parameters()}
    torch.testing.assert_close(model.full_gradients(), want)  # still right after all that

    module = nn.Sequential(nn.Linear(3, 3), Returning(nn.Linear(3, 3), Opaque))
    with pytest.raises(TypeError, match="Opaque"):
        FSDP(module, [module[1]])(x)
    module = nn.Sequential(nn.Linear(3, 3), OwnParameter(3, 3))
    with pytest.raises(RuntimeError, match="return a clone"):
        FSDP(module, [module[1]])(x)
    module = pair()
    module[0].bias.requires_grad_(False)
    model = FSDP(module, [])
    module[0].bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match="requires_grad has changed"):
        model(x)


@pytest.mark.parametrize("check", [check_refused_at_construction, check_refused_later])
def test_refused(check):
    run(check, 1)


class Breaking(nn.Sequential):
    def forward(self, x, breaks=False):
        for i, block in enumerate(self):
            x = block(x)
            if breaks and i == 1:
                x.register_hook(lambda _: 1 / 0)
        return x


def check_exception():
    """A backward that breaks off, on all ranks, leaves nothing behind that spoils the next."""
    def gradients(breaks):
        torch.manual_seed(0)
        module = Breaking(*(nn.Linear(3, 3) for _ in range(4)))
        model = FSDP(module, module[:3])
        if breaks:
            with pytest.raises(ZeroDivisionError):
                model(x, True).sum().backward()
            model.zero_grad()
        model(x).square().sum().backward()
        return model.full_gradients()

    x = torch.full((1, 3), 1.0 + dist.get_rank())
    torch.testing.assert_close(gradients(True), gradients(False))


def test_exception():
    run(check_exception, 2)


# ---- memory and order -----------------------------------------------------------------


class Checkpointed(nn.Sequential):
    reentrant = False

    def forward(self, x):
        for block in self:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Reentrant(Checkpointed):
    reentrant = True


class Gathered:
    """Watches which of these units are gathered: how often in all, how many at a time."""

    def __init__(self, units):
        self.here = set()
        self.most = 0
        self.count = 0
        for unit in units:
            unit.start_gather = self.watched(unit, unit.start_gather, self.here.add)
            unit.free = self.watched(unit, unit.free, self.here.discard)

    def watched(self, unit, method, then):
        def call():
            before = len(self.here)
            method()
            then(unit)
            self.count += len(self.here) > before
            self.most = max(self.most, len(self.here))

        return call


def check_transient(reshard, container):
    """Of the blocks never more than two are gathered; and all of them once more in backward."""
    torch.manual_seed(0)
    blocks = container(*(nn.Linear(5, 5) for _ in range(6)))
    plain = nn.Sequential(nn.Linear(5, 5), blocks, nn.Linear(5, 3))
    x = torch.randn(3, 5)
    plain(x).sum().backward()
    want = {name: 2 * p.grad for name, p in plain.named_parameters()}  # of two ranks
    plain.zero_grad()
    model = FSDP(plain, blocks, reshard=reshard)
    watch = Gathered(model.blocks)
    with set_checkpoint_early_stop(False):
        loss = model(x).sum()
        assert watch.count == 6
        loss.backward()
    torch.testing.assert_close(model.full_gradients(), want)
    assert watch.most == (2 if reshard else 6) and not watch.here
    assert watch.count == (12 if reshard else 6)
    with torch.no_grad():
        model(x)
    assert not watch.here and model.root.full.untyped_storage().nbytes() == 0


def test_transient():
    containers = nn.Sequential, Checkpointed, Reentrant
    run(each, 2, check_transient, [*itertools.product((True, False), containers)])


class Pending:
    """Stands for a collective's Work, which does not hold the memory itself, as torch's does.

    What the collective reads and writes must be there, in full size, until wait().
    """

    def __init__(self, result, out, tensor):
        self.result = result  # is put into out by wait()
        self.places = [weakref.ref(out), weakref.ref(tensor)]
        self.sizes = [t.untyped_storage().nbytes() for t in (out, tensor)]
        self.waited = False

    def wait(self):
        for place, size in zip(self.places, self.sizes):
            memory = place()
            assert memory is not None, "freed before wait()"
            assert memory.untyped_storage().nbytes() == size, "resized before wait()"
        self.places[0]().copy_(self.result)
        self.waited = True


def no_owner(module):
    """A gather's input is let go of as soon as it is under way."""
    start = module.Unit.start_gather

    def broken(self):
        start(self)
        self.sending = None

    module.Unit.start_gather = broken


def no_wait(module):
    """A unit is freed while it is still gathered."""
    def broken(self):
        self.full.untyped_storage().resize_(0)
        self.wait()

    module.Unit.free = broken


def no_end(module):
    """A broken backward's sums are dropped without a wait."""
    def broken(self):
        self.reducing = None
        self.flat = None
        self.part = None
        reset(self)

    reset = module.Unit.reset
    module.Unit.reset = broken


def check_memory_outlives_collectives(plant):
    """On NCCL's own stream a collective may still read or write until wait() has been called."""
    module = copied("fsdp")
    works = []

    def watched(collective):
        def call(out, tensor, group, async_op=False):
            result = torch.empty_like(out)
            collective(result, tensor, group=group)
            works.append(Pending(result, out, tensor))
            return works[-1]

        return call

    module.all_gather = watched(module.all_gather)
    module.reduce_scatter = watched(module.reduce_scatter)
    if plant:
        plant(module)
    torch.manual_seed(0)
    inner = Breaking(*(nn.Linear(3, 3) for _ in range(5)))
    model = module.FSDP(inner, inner[:4], dtype=torch.float32)
    x = torch.randn(4, 3, dtype=torch.float32)
    with pytest.raises(ZeroDivisionError):
        model(x, True).sum().backward()
    model(x).sum().backward()
    assert len(works) > 12
    assert all(work.waited for work in works), "dropped before wait()"


def test_memory_outlives_collectives():
    run(check_memory_outlives_collectives, 2, None)


def check_memory_that_goes_early(plant, words):
    with pytest.raises(AssertionError, match=words):
        check_memory_outlives_collectives(plant)


def test_memory_that_goes_early_is_found():
    run(each, 2, check_memory_that_goes_early, [
        (no_owner, r"freed before wait\(\)"),
        (no_wait, r"resized before wait\(\)"),
        (no_end, r"dropped before wait\(\)"),
    ])


class NoHostReads(TorchDispatchMode):
    """A value that the host reads would stop it until the device is done."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert "local_scalar_dense" not in str(operation) and "nonzero" not in str(operation)
        return operation(*args, **(kwargs or {}))


def check_no_host_reads():
    torch.manual_seed(0)
    inner = Awkward()
    model = FSDP(inner, inner.blocks)
    optimizer = model.optimizer(torch.optim.AdamW, lr=0.1, fused=True)
    for _ in range(2):
        with NoHostReads():
            awkward_loss(model, torch.ones(2, 5)).backward()
            model.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(AssertionError), NoHostReads():
        torch.ones(1).item()


def test_no_host_reads_in_a_step():
    run(check_no_host_reads, 2)


# ---- checkpoints ---------------------------------------------------------------


def test_resume(tmp_path):
    """Saved by replicas on 4 ranks, resumed on other ranks: as the run that went through."""
    flags = [*PROOF, "--steps", "6"]
    save = ["--save", str(tmp_path), "--save-every", "2"]
    whole = script("fsdp", 4, *flags, "--hsdp", "2", "--no-check", *save)
    for world, *more in (2,), (1,), (4, "--hsdp", "2"):
        rest = script("fsdp", world, *flags, "--resume", str(tmp_path / "4"), *more)
        assert rest["check"]["passed"] and len(rest["loss"]) == len(rest["plain_loss"]) == 2
        assert rest["loss"] == pytest.approx(whole["loss"][4:], rel=1e-10, abs=0)


def test_resume_torchs_own_and_frozen(tmp_path):
    flags = [*PROOF, "--train", "blocks.1|norm"]
    script("fsdp", 3, *flags, "--impl", "torch", "--save", str(tmp_path))
    rest = script("fsdp", 2, *flags, "--steps", "5", "--resume", str(tmp_path))
    assert rest["check"]["passed"]


# ---- planted bugs: each must fail the check ------------------------------------


def mean(module):
    """Gradients are averaged, not summed."""
    collect = module.Unit.collect

    def broken(self):
        if self.part is not None:
            self.part.div_(dist.get_world_size())
        collect(self)

    module.Unit.collect = broken


def stale(module):
    """A block once gathered is not gathered again after the optimizer's step."""
    start = module.Unit.start_gather
    seen = {}

    def broken(self):
        start(self)
        self.wait()
        self.full.copy_(seen.setdefault(self, self.full.clone()))

    module.Unit.start_gather = broken


def own_gradient(module):
    """The shard gets its part of this rank's gradient in place of the sum."""
    finish_reduce = module.Unit.finish_reduce

    def broken(self):
        flat = self.flat
        finish_reduce(self)
        if flat is not None:
            self.part.copy_(flat.chunk(dist.get_world_size())[dist.get_rank()])

    module.Unit.finish_reduce = broken


def tied_twice(module):
    """The head's weight is a parameter of its own, not the embedding's."""
    parallelize = module.parallelize
    full_gradients = module.full_gradients

    def broken(model, *args, **options):
        model.head.weight = nn.Parameter(model.tok.weight.detach().clone())
        return parallelize(model, *args, **options)

    def without_head(model):
        found = full_gradients(model)
        del found["head.weight"]
        return found

    module.parallelize = broken
    module.full_gradients = without_head


def padding_counted(module):
    """The padding is not zero, and enters the norm."""
    collect = module.Unit.collect

    def broken(self):
        collect(self)
        last = dist.get_rank() == dist.get_world_size() - 1
        if last and self.shard.grad is not None:
            padding = self.full.numel() - self.size
            self.shard.grad[self.shard.numel() - padding:] = 1.0

    module.Unit.collect = broken


def norm_of_own_shards(module):
    """Ranks do not tell each other the norms of their shards."""
    clip = module.FSDP.clip_grad_norm_

    def broken(self, max_norm):
        all_reduce = dist.all_reduce
        dist.all_reduce = lambda tensor, group: None
        norm = clip(self, max_norm)
        dist.all_reduce = all_reduce
        return norm

    module.FSDP.clip_grad_norm_ = broken


def last_backward_only(module):
    """Gradients of the parts of a batch replace each other."""
    collect = module.Unit.collect

    def forgetful(self):
        self.shard.grad = None
        collect(self)

    def in_parts(model, optimizer, x, y, valid, clip):
        optimizer.zero_grad()
        total = 0
        for xs, ys in zip(x.split(1), y.split(1)):
            loss = module.loss_sum(model(xs), ys) / valid
            loss.backward()
            total += loss.detach()
        norm = model.clip_grad_norm_(clip)
        optimizer.step()
        return total, norm

    module.Unit.collect = forgetful
    module.train_step = in_parts


@pytest.mark.parametrize("world, plant", [
    (2, mean), (2, stale), (2, own_gradient), (2, tied_twice), (3, padding_counted),
    (2, norm_of_own_shards), (2, last_backward_only),
])
def test_planted(world, plant):
    proves("fsdp", world, plant=plant)
