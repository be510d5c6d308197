"""fsdp.py, and its section 1 around a model that is not ours."""
import copy
import types
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from conftest import PROOF, SMALL, copied, dry_run_agrees, each, proves, run, script, textbook
from fsdp import FSDP
from others import Llama, llama_loss, token_rows

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


def test_bf16():
    """bf16 computes and travels to be used; shards, gradients, sums and AdamW's states are fp32."""
    report = script("fsdp", 2, *SMALL, "--dtype", "bf16")
    textbook(report)
    assert report["check"]["passed"]
    memory = report["ranks"][0]["memory"]
    assert memory["parameters"] == memory["gradients"] == 2 * report["parameters"]["total"]


@pytest.mark.parametrize("world, flags", [
    (2, []), (2, [*LLAMA, "--no-reshard"]), (4, ["--hsdp", "2"]),
])
def test_cost(world, flags):
    """The docstring's table; the calls and bytes are those of fully_shard."""
    real = dry_run_agrees("fsdp", world, *flags, ranks=[world - 1])
    textbook(real)
    theirs = script("fsdp", world, *SMALL, *flags, "--no-check", "--impl", "torch")
    gathers = 3 if "--no-reshard" in flags else 4
    sent = real["ranks"][0]["collectives"]
    other = theirs["ranks"][0]["collectives"]
    assert sent["all_gather"]["calls"] == gathers
    assert sent["reduce_scatter"]["calls"] == 3
    for kind in "all_gather", "reduce_scatter":
        ours = sent[kind]["payload"]
        assert sent[kind]["calls"] == other[kind]["calls"]
        assert 0 <= other[kind]["payload"] - ours < 0.05 * ours


def test_frozen_cost_nothing():
    """Nothing of them is sent, summed or stepped; they are held whole."""
    real = script("fsdp", 2, *SMALL, "--train", "blocks.1", "--no-check")
    sent = real["ranks"][0]["collectives"]
    assert sent["all_gather"]["calls"] == 1 and sent["reduce_scatter"]["calls"] == 1
    assert sent["reduce_scatter"]["payload"] == 2 * real["ranks"][0]["memory"]["gradients"]


# ---- the copy: section 1 alone, on a Llama of others ----------------------------


class Recomputed(nn.Module):
    """A layer under activation checkpointing."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


def llama(tied=False, frozen=(), recomputed=False):
    model = Llama()
    if tied:
        model.lm_head.weight = model.embed_tokens.weight
    for part in frozen:
        model.get_submodule(part).requires_grad_(False)
    if recomputed:
        model.layers = nn.ModuleList(Recomputed(layer) for layer in model.layers)
    return model


def groups_of(model):
    """Norms are not decayed."""
    kinds = {True: [], False: []}
    for name, p in model.named_parameters():
        kinds["norm" in name].append(p)
    return [{"params": kinds[True], "weight_decay": 0.0}, {"params": kinds[False], "lr": 0.01}]


def backward(model, rows, weight, together=False):
    """Two micro-batches, with an evaluation between them; or both in one backward."""
    losses = []
    for tokens, targets in zip(*(t.chunk(2) for t in rows)):
        losses.append(llama_loss(model, tokens, targets) * weight)
        if not together:
            losses.pop().backward()
            with torch.no_grad():
                model(tokens)
    if together:
        sum(losses).backward()


def check_trains(model_is, together=False, replicas=False, plant=None, **options):
    """Three steps equal those of one process: gradients, norms, parameters."""
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
    close = dict(rtol=1e-10, atol=1e-11)
    for _ in range(3):
        rows = token_rows(rng, 8 * n)
        backward(plain, rows, 1 / n)
        want = {name: p.grad.clone() for name, p in plain.named_parameters() if p.requires_grad}
        backward(ours, [t.chunk(n)[rank] for t in rows], 1 / n, together)
        torch.testing.assert_close(ours.full_gradients(), want, **close)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(ours.clip_grad_norm_(0.5), norm, **close)
        for each_one, model in (optimizer, plain), (our_optimizer, ours):
            each_one.step()
            model.zero_grad()
    state = ours.full_state_dict()
    assert list(state) == list(plain.state_dict())
    torch.testing.assert_close(state, dict(plain.state_dict()), **close)
    assert all(unit.full.untyped_storage().nbytes() == 0 for unit in ours.units)


def check_all():
    check_trains(dict(tied=True, recomputed=True))
    check_trains(dict(frozen=["embed_tokens", "layers.0"]), together=True)
    check_trains(dict(frozen=["embed_tokens", "norm", "lm_head", "layers.1.mlp"]))
    check_trains({}, reshard=False, home="cpu")
    check_trains(dict(recomputed=True), reshard=False)


def test_copy():
    run(check_all, 2)
    run(check_trains, 4, dict(tied=True), False, True)


def check_autocast():
    """Both ranks have the same rows: exactly twice one process's gradients."""
    torch.manual_seed(0)
    plain = llama(recomputed=True).float()
    inner = copy.deepcopy(plain)
    ours = FSDP(inner, inner.layers)
    rows = token_rows(torch.Generator().manual_seed(1), 4)
    for model in plain, ours:
        with torch.autocast("cpu", torch.bfloat16):
            loss = llama_loss(model, *rows)
        loss.backward()
    want = {name: 2 * p.grad for name, p in plain.named_parameters()}
    torch.testing.assert_close(ours.full_gradients(), want, rtol=0, atol=0)


def test_autocast():
    run(check_autocast, 2)


# ---- pure parts, and what is refused ---------------------------------------------


def check_meta():
    """Values are made where they are kept, tied ones once, frozen ones whole."""
    made = []

    def init(name, parameter):
        made.append(name)
        parameter.data.fill_(sum(map(ord, name)))

    with torch.device("meta"):
        inner = llama(tied=True, frozen=["norm"])
    inner.register_buffer("angles", torch.ones(5))
    model = FSDP(inner, inner.layers, device="cpu", init=init)
    state = model.full_state_dict()
    for name, p in inner.named_parameters(remove_duplicate=False):
        first = name.replace("lm_head", "embed_tokens")
        assert (state[name] == sum(map(ord, first))).all(), name
    assert "norm.weight" in made and "lm_head.weight" not in made
    assert len(made) < len(list(inner.parameters()))  # the others lie on the other rank
    assert not inner.norm.weight.requires_grad
    doubled = {name: 2 * t for name, t in state.items()}
    model.load_full_state_dict(doubled)
    torch.testing.assert_close(model.full_state_dict(), doubled, rtol=0, atol=0)


def test_meta_and_load():
    run(check_meta, 2)


def check_reading_and_refused():
    """Between steps a parameter has no elements: whoever reads it gets nothing, and no crash."""
    tokens, targets = token_rows(torch.Generator().manual_seed(1), 2)
    inner = llama()
    model = FSDP(inner, inner.layers)
    for _ in range(2):
        for p in inner.parameters():
            assert p.numel() == 0 and "[]" in str(p) and (p + 1).numel() == 0
        assert inner.lm_head.weight.dim() == 2  # groups may be made by it
        llama_loss(model, tokens, targets).backward()
    state = model.full_state_dict()
    wrong = {**state, "norm.weight": torch.ones(1)}
    mixed = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.float32))
    for call, error, words in [
        (lambda: inner(tokens), RuntimeError, ""),  # around FSDP
        (inner.layers[0].state_dict, RuntimeError, "full_state_dict"),
        (lambda: inner.load_state_dict(state), RuntimeError, "size mismatch"),
        (lambda: model.load_full_state_dict(wrong), AssertionError, "is given for"),
        (lambda: model.to(torch.float32), RuntimeError, "when it is made"),
        (lambda: FSDP(mixed, []), AssertionError, "one dtype"),
        (lambda: model.parameter_groups(groups_of(llama())), KeyError, ""),
    ]:
        with pytest.raises(error, match=words):
            call()


def test_reading_and_refused():
    run(check_reading_and_refused, 1)


# ---- memory and order -----------------------------------------------------------------


def check_transient(reshard, recomputed):
    """Of the blocks at most two are gathered at a time, each twice, but the last one once."""
    inner = llama(recomputed=recomputed)
    model = FSDP(inner, inner.layers, reshard=reshard)
    counts = []

    def here():
        return sum(unit.full.untyped_storage().nbytes() > 0 for unit in model.blocks)

    def watched(start):
        def call():
            before = here()
            start()
            if here() > before:
                counts.append(here())

        return call

    for unit in model.blocks:
        unit.start_gather = watched(unit.start_gather)
    tokens, targets = token_rows(torch.Generator().manual_seed(1), 2)
    llama_loss(model, tokens, targets).backward()
    assert here() == 0
    if reshard:
        assert counts == [1, 2, 2, 2, 2]  # 0, 1, 2 in forward; 1, 0 in backward
    else:
        assert counts == [1, 2, 3]


def test_transient():
    run(each, 2, check_transient, [(True, False), (True, True), (False, True)])


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


def check_memory_outlives_collectives():
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
    inner = llama()
    model = module.FSDP(inner, inner.layers, dtype=torch.float32)
    rows = token_rows(torch.Generator().manual_seed(1), 4)
    model.root.start_gather()  # as if a forward had broken off
    llama_loss(model, *rows).backward()
    assert len(works) > 8 and all(work.waited for work in works)


def test_memory_outlives_collectives():
    run(check_memory_outlives_collectives, 2)


# ---- checkpoints ---------------------------------------------------------------


def test_resume(tmp_path):
    """Saved by replicas on 4 ranks, resumed on 3."""
    flags = [*PROOF, *LLAMA, "--train", "blocks|head"]
    script("fsdp", 4, *flags, "--hsdp", "2", "--no-check", "--save", str(tmp_path))
    rest = script("fsdp", 3, *flags, "--steps", "4", "--resume", str(tmp_path))
    assert rest["check"]["passed"] and len(rest["loss"]) == len(rest["plain_loss"]) == 2


# ---- planted bugs: each must fail the check ------------------------------------


def own_gradient(flat):
    flat.reducing.wait()
    flat.sum.copy_(flat.buffer.chunk(dist.get_world_size())[dist.get_rank()])
    flat.reducing = types.SimpleNamespace(wait=lambda: None)  # gloo's would write the sum again


def average(flat):
    if flat.sum is not None:
        flat.sum.div_(2)


FIRST = {}  # {Flat: what it gathered first}


def use_old(flat):
    flat.wait()
    flat.full.copy_(FIRST.setdefault(flat, flat.full.clone()))


# what is done before or after a method of Flat
PLANTED = {
    "averaged over ranks": ("collect", "before", average),
    "a unit once gathered is not gathered again": ("start_gather", "after", use_old),
    "a shard gets this rank's gradient, not the sum": ("finish_reduce", "before", own_gradient),
    "replicas keep their sums to themselves": (
        "finish_reduce", "before", lambda flat: setattr(flat, "replicas", None)),
}


def check_planted(what, replicas=False):
    name, when, bug = PLANTED[what]

    def plant(module):
        method = getattr(module.Flat, name)

        def broken(flat):
            if when == "before":
                bug(flat)
            method(flat)
            if when == "after":
                bug(flat)

        setattr(module.Flat, name, broken)

    with pytest.raises(AssertionError):
        check_trains(dict(tied=True), replicas=replicas, plant=plant)


def check_silent_ranks():
    """They do not tell each other the norms of their shards."""
    def plant(module):
        silent = {**vars(dist), "all_reduce": lambda *_, **__: None}
        module.dist = types.SimpleNamespace(**silent)

    with pytest.raises(AssertionError):
        check_trains({}, plant=plant)


def test_planted():
    *cases, with_replicas = PLANTED
    run(each, 2, check_planted, [(what,) for what in cases])
    run(check_planted, 4, with_replicas, True)
    run(check_silent_ranks, 2)


# ---- models of others --------------------------------------------------------------------


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
