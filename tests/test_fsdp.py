"""fsdp.py and checkpoint.py."""
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from conftest import PROOF, SMALL, dry_run_agrees, proves, run, script, textbook
from fsdp import FSDP, Unit

BLOCK = 12 * 32 * 32 + 13 * 32  # parameters of a block of width 32
ROOT = (256 + 16 + 2) * 32


@pytest.mark.parametrize("world, flags", [
    (1, []), (2, []), (4, ["--no-reshard"]), (3, ["--batch", "7", "--vocab", "257", "--clip", "0"]),
    (4, ["--hsdp", "2"]), (4, ["--hsdp", "1", "--offload"]), (2, ["--offload"]), (2, ["--impl", "torch"])])
def test_equals_one_process(world, flags):
    proves("fsdp", world, *flags)


def test_bf16():
    """bf16 computes and travels to be used; shards, gradients, their sums and AdamW's states are fp32."""
    report = script("fsdp", 2, *SMALL, "--dtype", "bf16")
    textbook(report)
    rank, P = report["ranks"][0], 2 * BLOCK + ROOT
    assert report["check"]["passed"] and rank["memory"]["parameters"] == rank["memory"]["gradients"] == 4 * P / 2
    assert rank["collectives"]["all_gather"]["payload"] == 2 * (P + 2 * BLOCK)
    assert rank["collectives"]["reduce_scatter"]["payload"] == 4 * P


@pytest.mark.parametrize("world, flags", [(2, []), (3, ["--no-reshard"]), (4, ["--hsdp", "2"])])
def test_cost(world, flags):
    """The docstring's table; the calls and bytes are those of fully_shard."""
    real = dry_run_agrees("fsdp", world, *flags, ranks=[world - 1])
    textbook(real)
    theirs = script("fsdp", world, *SMALL, *flags, "--no-check", "--impl", "torch")
    n, again = (2, 2) if "--hsdp" in flags else (world, 2 * (not flags))
    for rank, other in zip(real["ranks"], theirs["ranks"]):
        sent, held, P = rank["collectives"], rank["memory"], sum(-(-size // n) * n for size in (BLOCK, BLOCK, ROOT))
        assert sent["all_gather"]["calls"] == 3 + again and sent["reduce_scatter"]["calls"] == 3
        assert held["parameters"] + held["gradients"] + held["optimizer"] == 16 * P // n + 12
        for kind in "all_gather", "reduce_scatter":
            assert sent[kind]["calls"] == other["collectives"][kind]["calls"]
            assert 0 <= other["collectives"][kind]["payload"] - sent[kind]["payload"] < 0.05 * sent[kind]["payload"]


def test_both_times_both():
    report = script("fsdp", 2, *SMALL, "--no-check", "--impl", "both")
    assert report["speedup"] == report["torch_ms_per_step"] / report["ms_per_step"] > 0


# ---- FSDP as a drop-in ---------------------------------------------------------


class Awkward(nn.Module):
    """A frozen layer, an unused one, a weight tied across blocks, a block that runs twice, more than one output."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5)) for _ in range(4))
        self.blocks[3][2].weight = self.blocks[0][2].weight
        self.blocks[1][0].requires_grad_(False)
        self.blocks[2].unused = nn.Linear(3, 3)
        self.blocks[2].forward = lambda x: self.blocks[2][2](self.blocks[2][1](self.blocks[2][0](x)))
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        x = self.first(x)
        for i in 0, 1, 2, 3, 1:
            x = x + self.blocks[i](x)
        return self.last(x), x


def step(model, optimizer, x):
    for part in x.chunk(2):  # gradients add up over two backwards
        a, b = model(part)
        (a.square().sum() + b.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()


def check_drop_in(reshard):
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = Awkward()
    torch.manual_seed(0)
    inner = Awkward()
    ours = FSDP(inner, inner.blocks, reshard=reshard)
    optimizers = [torch.optim.AdamW(p, lr=0.1) for p in (plain.parameters(), ours.shards)]
    x = torch.randn(3, 4 * n, 5)
    for data in x:
        with torch.no_grad():
            torch.testing.assert_close(ours(data), plain(data))
        step(plain, optimizers[0], data)
        step(ours, optimizers[1], data[[i for i in range(4 * n) if i % n == rank]])
    found = {name: t for unit in ours.units for name, t in unit.whole(unit.shard).items()}
    for name, want in plain.state_dict().items():
        if name in found and "unused" not in name:  # with a gradient of zero AdamW's decay moves it
            torch.testing.assert_close(found[name], want, rtol=1e-9, atol=1e-10)
    assert "blocks.3.2.weight" in found and "blocks.1.0.weight" not in found
    assert all(unit.full.untyped_storage().nbytes() == 0 for unit in ours.units)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("reshard", [True, False])
def test_drop_in(world, reshard):
    run(check_drop_in, world, reshard)


class Named(nn.Sequential):
    """Its output is a dict, with something in it that is no tensor."""

    def forward(self, x, breaks=False):
        for i, block in enumerate(self):
            x = block(x)
            if breaks and i == 1:
                x.register_hook(lambda _: 1 / 0)
        return {"x": x, "about": "it"}


def check_exception():
    """A backward that breaks off, on all ranks, leaves nothing behind that spoils the next."""
    def gradients(breaks):
        torch.manual_seed(0)
        module = Named(*(nn.Linear(3, 3) for _ in range(4)))
        model = FSDP(module, module[:3])
        if breaks:
            with pytest.raises(ZeroDivisionError):
                model(x, True)["x"].sum().backward()
            model.zero_grad()
        model(x)["x"].square().sum().backward()
        return [unit.whole(unit.shard.grad) for unit in model.units]
    x = torch.full((1, 3), 1.0 + dist.get_rank())
    torch.testing.assert_close(gradients(True), gradients(False))


def test_exception():
    run(check_exception, 2)


def check_one_dtype():
    blocks = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.float32)), nn.Linear(3, 3))
    with pytest.raises(AssertionError, match="one dtype"):
        FSDP(blocks, blocks[:1])
    with pytest.raises(AssertionError, match="to train"):
        FSDP(blocks, blocks[:1].requires_grad_(False))


def test_one_dtype():
    run(check_one_dtype, 1)


class Checkpointed(nn.Sequential):
    def forward(self, x):
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def check_transient(reshard, container=nn.Sequential):
    """Of the blocks never more than two are gathered; and all of them once more in backward."""
    blocks = container(*(nn.Linear(5, 5) for _ in range(6)))
    model = FSDP(nn.Sequential(blocks, nn.Linear(5, 3)), blocks, reshard=reshard)
    here, most, start, free = set(), [], Unit.start, Unit.free

    def watched_start(unit):
        start(unit)
        here.update({unit} - {model.units[-1]})
        most.append(len(here))

    def watched_free(unit):
        free(unit)
        here.discard(unit)
    Unit.start, Unit.free = watched_start, watched_free
    with set_checkpoint_early_stop(False):
        model(torch.randn(3, 5)).sum().backward()
    assert max(most) == (2 if reshard else 6) and not here


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("container", [nn.Sequential, Checkpointed])
def test_transient(reshard, container):
    run(check_transient, 2, reshard, container)


def check_layout():
    """11 + 3 elements on this many ranks: every rank's run, padding at the end, and back."""
    module = nn.ModuleDict({"a": nn.Linear(11, 1, bias=False), "b": nn.Linear(3, 1, bias=False)})
    for i, p in enumerate(module.parameters()):
        p.data.copy_(torch.arange(p.numel()) + 100 * i)
    want = {name: t.clone() for name, t in module.state_dict().items()}
    n, rank = dist.get_world_size(), dist.get_rank()
    unit = FSDP(module, []).units[-1]
    flat, each = torch.cat([*(t.flatten() for t in want.values()), torch.zeros(14)]), -(-14 // n)
    assert torch.equal(unit.shard, flat[rank * each:(rank + 1) * each])
    for name, t in unit.whole(unit.shard).items():
        assert torch.equal(t, want[name])


@pytest.mark.parametrize("world", [1, 3, 4])
def test_layout(world):
    run(check_layout, world)


# ---- checkpoints ---------------------------------------------------------------


def test_resume(tmp_path):
    """Saved on 4 ranks, resumed on 2 and 1, from replicas too: the losses of the run that was not interrupted."""
    flags, save = [*PROOF, "--steps", "6"], ["--save", str(tmp_path), "--save-every", "2"]
    whole = script("fsdp", 4, *flags, *save)
    for world, steps, more in (2, 4, []), (1, 4, []), (4, 4, ["--hsdp", "2"]):
        rest = script("fsdp", world, *flags, "--resume", str(tmp_path / str(steps)), *more)
        assert rest["check"]["passed"] and len(rest["loss"]) == len(rest["plain_loss"]) == 6 - steps
        assert rest["loss"] == pytest.approx(whole["loss"][steps:], rel=1e-10, abs=0)


def test_resume_torchs_own(tmp_path):
    flags = [*PROOF, "--impl", "torch"]
    script("fsdp", 3, *flags, "--save", str(tmp_path))
    assert script("fsdp", 2, *flags, "--steps", "5", "--resume", str(tmp_path))["check"]["passed"]


def truncate(folder):
    file = folder / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])


def flip(folder):
    file = folder / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def flip_contents(folder):
    file = folder / ".metadata"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_bad_checkpoints(tmp_path):
    script("fsdp", 2, *SMALL, "--no-check", "--save", str(tmp_path / "good"))
    for i, damage in enumerate((truncate, flip, flip_contents, lambda f: (f / "__1_0.distcp").unlink(),
                                lambda f: (f / ".metadata").unlink(), shutil.rmtree)):
        shutil.copytree(tmp_path / "good", tmp_path / str(i))
        damage(tmp_path / str(i) / "2")
        script("fsdp", 1, *SMALL, "--steps", "5", "--resume", str(tmp_path / str(i)), code=2)
    good = ["--resume", str(tmp_path / "good"), "--steps", "5"]
    assert "width 32, not 64" in script("fsdp", 1, *SMALL, *good, "--width", "64", code=2)
    assert "dtype fp32, not fp64" in script("fsdp", 1, *SMALL, *good, "--dtype", "fp64", code=2)
    script("fsdp", 1, *SMALL, *good, "--steps", "2", code=2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert "holds step 2 already" in script("fsdp", 1, *SMALL, "--save", str(tmp_path / "good"), code=2)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


# ---- planted bugs: each must fail the check ------------------------------------


def mean(module):
    """Gradients are averaged, not summed."""
    keep = module.Unit.keep

    def broken(self):
        if self.part is not None:
            self.part.div_(dist.get_world_size())
        keep(self)
    module.Unit.keep = broken


def stale(module):
    """A block once gathered is not gathered again after the optimizer's step."""
    start, seen = module.Unit.start, {}

    def broken(self):
        start(self)
        self.wait()
        self.full.copy_(seen.setdefault(self, self.full.clone()))
    module.Unit.start = broken


def own_gradient(module):
    """The shard gets this rank's gradient in place of the sum."""
    reduced = module.Unit.across_replicas

    def broken(self):
        flat = self.flat
        reduced(self)
        if flat is not None:
            self.part.copy_(flat[:self.part.numel()])
    module.Unit.across_replicas = broken


def tied_twice(module):
    """The head's weight is a parameter of its own, not the embedding's."""
    parallelize, full_gradients = module.parallelize, module.full_gradients

    def broken(model, *args, **options):
        model.head.weight = nn.Parameter(model.tok.weight.detach().clone())
        return parallelize(model, *args, **options)
    module.parallelize = broken
    module.full_gradients = lambda model: {k: t for k, t in full_gradients(model).items() if k != "head.weight"}


def padding_counted(module):
    """The padding is not zero, and enters the norm."""
    keep = module.Unit.keep

    def broken(self):
        keep(self)
        if dist.get_rank() == dist.get_world_size() - 1 and self.shard.grad is not None:
            self.shard.grad[self.shard.numel() - (self.full.numel() - self.size):] = 1.0
    module.Unit.keep = broken


def last_backward_only(module):
    """Gradients of the parts of a batch replace each other."""
    keep = module.Unit.keep

    def forgetful(self):
        self.shard.grad = None
        keep(self)

    def in_parts(model, optimizer, x, y, valid, clip):
        optimizer.zero_grad()
        loss = sum(backward(module.loss_sum(model(a), b) / valid) for a, b in zip(x.split(1), y.split(1)))
        norm = model.clip_grad_norm_(clip)
        optimizer.step()
        return loss, norm
    module.Unit.keep, module.train_step = forgetful, in_parts


def backward(loss):
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("plant", [mean, stale, own_gradient, tied_twice, padding_counted, last_backward_only])
def test_planted(plant):
    proves("fsdp", 3 if plant is padding_counted else 2, plant=plant)


@pytest.mark.parametrize("world, flags", [
    (2, ["--batch", "1"]), (4, ["--hsdp", "3"]), (2, ["--hsdp", "-1"]), (1, ["--save-every", "2"]),
    (1, ["--resume", "no/such/folder"]), (1, ["--save", "x", "--dry-run", "2"]), (1, ["--save", "x", "--impl", "both"]),
    (2, ["--offload", "--impl", "torch"])])
def test_bad_usage(world, flags):
    script("fsdp", world, *flags, code=2)
