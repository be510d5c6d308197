"""fsdp.py, and its section 1 around a model that is not ours."""
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from conftest import PROOF, copied, dry_run_agrees, each, proves, run, script, textbook
from fsdp import FSDP
from others import Llama, into_flat, llama_loss, token_rows

LLAMA = ("--model", "llama-toy")


@pytest.mark.parametrize("world, flags", [
    (1, [*LLAMA]),
    (2, ["--impl", "torch"]),
    (2, [*LLAMA, "--train", "blocks.1|bias|head", "--eval-every", "1"]),
    (3, ["--batch", "7", "--vocab", "257", "--clip", "0"]),
    (4, ["--hsdp", "2", "--offload"]),
])
def test_equals_one_process(world, flags):
    proves("fsdp", world, *flags)


@pytest.mark.parametrize("world, flags, gathers", [
    (2, [*LLAMA, "--no-reshard", "--dtype", "bf16"], 3),
    (4, ["--hsdp", "2"], 4),
])
def test_cost(world, flags, gathers):
    real = dry_run_agrees("fsdp", world, *flags, ranks=[world - 1])
    textbook(real)
    sent = real["ranks"][0]["collectives"]
    assert sent["all_gather"]["calls"] == gathers


def test_resume(tmp_path):
    """Saved by replicas on 4 ranks, resumed on 3."""
    flags = [*PROOF, "--train", "blocks|head"]
    script("fsdp", 4, *flags, "--hsdp", "2", "--no-check", "--save", str(tmp_path))
    rest = script("fsdp", 3, *flags, "--steps", "4", "--resume", str(tmp_path))
    assert rest["check"]["passed"] and len(rest["loss"]) == 2


# ---- the copy: section 1 alone, on a Llama of others ----------------------------


class Recomputed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


def llama(tied=False, frozen=()):
    model = Llama()
    if tied:
        model.lm_head.weight = model.embed_tokens.weight
    for part in frozen:
        model.get_submodule(part).requires_grad_(False)
    model.layers = nn.ModuleList(Recomputed(layer) for layer in model.layers)
    return model


def groups_of(model):
    kinds = {True: [], False: []}
    for name, p in model.named_parameters():
        kinds["norm" in name].append(p)
    return [{"params": kinds[True], "weight_decay": 0.0}, {"params": kinds[False], "lr": 0.01}]


def backward(model, rows):
    """Two micro-batches, with an evaluation between them."""
    for tokens, targets in zip(*(t.chunk(2) for t in rows)):
        llama_loss(model, tokens, targets).backward()
        with torch.no_grad():
            model(tokens)


def check_copy(model_is, replicas=False, plant=None, **options):
    """Two steps equal those of one process: gradients, norms, parameters."""
    n = dist.get_world_size()
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = llama(**model_is)
    torch.manual_seed(rank)  # all ranks get the first one's weights
    inner = llama(**model_is)
    if replicas:
        mesh = dist.init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("replicate", "shard"))
        options["replicas"] = mesh["replicate"].get_group()
        options["group"] = mesh["shard"].get_group()
    module = copied("fsdp")
    if plant:
        plant(module)
    ours = module.FSDP(inner, inner.layers, **options)
    optimizer = torch.optim.AdamW(groups_of(plain), lr=0.1, eps=1e-5)
    our_optimizer = torch.optim.AdamW(ours.parameter_groups(groups_of(inner)), lr=0.1, eps=1e-5)
    rng = torch.Generator().manual_seed(1)
    close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-11)
    for _ in range(2):
        rows = token_rows(rng, 8 * n)
        backward(plain, rows)
        want = {name: p.grad.clone() for name, p in plain.named_parameters() if p.requires_grad}
        backward(ours, [t.chunk(n)[rank] for t in rows])
        close(ours.full_gradients(), want)
        close(ours.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        for each_one, model in (optimizer, plain), (our_optimizer, ours):
            each_one.step()
            model.zero_grad()
    close(ours.full_state_dict(), dict(plain.state_dict()))
    assert all(unit.full.untyped_storage().nbytes() == 0 for unit in ours.units)


def check_all():
    check_copy(dict(tied=True))
    check_copy(dict(frozen=["embed_tokens", "norm", "lm_head", "layers.1.mlp"]))
    check_copy({}, reshard=False, home="cpu")


def test_copy():
    run(check_all, 2)
    run(check_copy, 4, dict(tied=True), True)


# ---- planted bugs: each must show ------------------------------------------------


def own_gradient(flat):
    flat.reducing.wait()
    flat.sum.copy_(flat.buffer.chunk(dist.get_world_size())[dist.get_rank()])
    flat.reducing = SimpleNamespace(wait=lambda: None)  # gloo's would write the sum again


def average(flat):
    if flat.sum is not None:
        flat.sum.div_(2)


def use_first(flat, first={}):
    flat.wait()
    flat.full.copy_(first.setdefault(flat, flat.full.clone()))


# a method of Flat, what is done before or after it
PLANTED = {
    "averaged over ranks": ("collect", "before", average),
    "a unit once gathered is not gathered again": ("start_gather", "after", use_first),
    "a shard gets this rank's gradient, not the sum": ("finish_reduce", "before", own_gradient),
    "a rank clips by the norm of its shards": ("all_reduce", "left out", None),
    "replicas keep their sums to themselves": (
        "finish_reduce", "before", lambda flat: setattr(flat, "replicas", None)),
}


def check_planted(what, replicas=False):
    name, when, bug = PLANTED[what]
    plant = into_flat(name, when, bug)
    with pytest.raises(AssertionError):
        check_copy(dict(tied=True), replicas, plant)


def test_planted():
    *cases, with_replicas = PLANTED
    run(each, 2, check_planted, [(what,) for what in cases])
    run(check_planted, 4, with_replicas, True)


# ---- pure parts, memory, and what is refused --------------------------------------


def check_meta():
    """Tied parameters are made once, frozen ones whole."""
    with torch.device("meta"):
        inner = llama(tied=True, frozen=["norm"])
    model = FSDP(inner, inner.layers, device="cpu",
                 init=lambda name, parameter: parameter.data.fill_(len(name)))
    state = model.full_state_dict()
    for name, tensor in state.items():
        assert (tensor == len(name.replace("lm_head", "embed_tokens"))).all(), name
    doubled = {name: 2 * t for name, t in state.items()}
    model.load_full_state_dict(doubled)
    torch.testing.assert_close(model.full_state_dict(), doubled)


def check_refused():
    """Between steps a parameter has no elements: whoever reads it gets nothing, and no crash."""
    inner = llama()
    model = FSDP(inner, inner.layers)
    assert all(p.numel() == (p + 1).numel() == 0 for p in inner.parameters())
    with pytest.raises(RuntimeError, match="full_state_dict"):
        inner.layers[0].state_dict()
    with pytest.raises(RuntimeError, match="when it is made"):
        model.to(torch.float32)


def watched(collective, waited):
    """On NCCL's own stream a collective may read and write its memory until wait() is called."""
    def call(out, tensor, group, async_op=False):
        result = torch.empty_like(out)
        collective(result, tensor, group=group)
        places = [weakref.ref(out), weakref.ref(tensor)]
        sizes = [t.untyped_storage().nbytes() for t in (out, tensor)]
        number = len(waited)
        waited.append(False)

        def wait():
            for place, size in zip(places, sizes):
                assert place() is not None and place().untyped_storage().nbytes() == size
            places[0]().copy_(result)
            waited[number] = True
        return SimpleNamespace(wait=wait)
    return call


def check_memory(reshard):
    """Of the blocks at most two are gathered at a time; collectives find their memory."""
    module = copied("fsdp")
    waited = []
    counts = []
    module.all_gather = watched(module.all_gather, waited)
    module.reduce_scatter = watched(module.reduce_scatter, waited)
    inner = llama()
    model = module.FSDP(inner, inner.layers, reshard=reshard, dtype=torch.float32)

    def gathered(start):
        before = len(waited)
        start()
        if len(waited) > before:
            counts.append(sum(unit.full.untyped_storage().nbytes() > 0 for unit in model.blocks))
    for unit in model.blocks:
        unit.start_gather = lambda start=unit.start_gather: gathered(start)
    llama_loss(model, *token_rows(torch.Generator().manual_seed(1), 2)).backward()
    expected = {True: [1, 2, 2, 2, 2], False: [1, 2, 3]}  # 0, 1, 2 in forward; 1, 0 in backward
    assert counts == expected[reshard] and all(waited)


def test_pure_parts():
    run(check_meta, 2)
    run(check_refused, 1)
    run(each, 2, check_memory, [(True,), (False,)])


def check_buffers_and_names():
    """Buffers on the meta device, whole numbers among them; a parameter with two names in a module;
    one without a gradient; an inf gradient does not spoil the others."""
    with torch.device("meta"):
        inner = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Module())
        inner[0].again = inner[0].weight
        inner[0].register_buffer("places", torch.arange(4))
        inner[1].unused = nn.Parameter(torch.ones(2))
    inner.forward = lambda x: inner[0](x) @ inner[0].again
    model = FSDP(inner, [], device="cpu", init=lambda name, tensor: tensor.fill_(2))
    assert torch.equal(inner[0].places, torch.full((4,), 2))
    model(torch.ones(1, 3)).sum().backward()
    found = model.full_gradients()
    assert (found["0.weight"] == 2 * (6 + 6)).all() and (found["1.unused"] == 0).all()
    if dist.get_rank() == 0:
        model.shards[0].grad[0] = float("inf")
    before = [p.grad.clone() for p in model.shards]
    assert model.clip_grad_norm_(1.0) == float("inf")
    torch.testing.assert_close([p.grad for p in model.shards], before, rtol=0, atol=0)


def test_buffers_and_names():
    run(check_buffers_and_names, 2)
