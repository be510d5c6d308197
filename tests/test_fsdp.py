"""fsdp.py, and its idea and technique around a model that is not ours."""
import weakref
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from conftest import (
    PROOF, check_each, check_equal, copied, dry_run_agrees, idea, rewritten, run_ranks, run_script,
    textbook)
from fsdp import FSDP, from_meta, full_gradients
from others import (
    Layer, Llama, added_in_fp32, bf16_llama, bf16_rows, compare, compare_fp32, gradients_of, into,
    llama_loss, loss_sum, token_rows)

LLAMA = ("--model", "llama-toy")
ROWS = token_rows(torch.Generator().manual_seed(1), 2)


@pytest.mark.parametrize("world, flags", [
    (1, [*LLAMA]),
    (2, ["--impl", "torch"]),
    (2, [*LLAMA, "--train", "blocks.1|bias|head", "--eval-every", "1"]),
    (3, ["--batch", "7", "--vocab", "257", "--clip", "0"]),
    (4, ["--hsdp", "2", "--offload"]),
    (1, ["--impl", "idea"]),
    (2, ["--impl", "idea", *LLAMA, "--eval-every", "1"]),
    (4, ["--impl", "idea", "--vocab", "257"]),
])
def test_equals_one_process(world, flags):
    check_equal("fsdp", world, *flags)


@pytest.mark.parametrize("world, flags, gathers", [
    (2, [*LLAMA, "--no-reshard", "--dtype", "bf16"], 3),
    (4, ["--hsdp", "2"], 4),
    (4, ["--impl", "idea", "--vocab", "257"], 6),
])
def test_cost(world, flags, gathers):
    real = dry_run_agrees("fsdp", world, *flags, ranks=[world - 1])
    textbook(real)
    sent = real["ranks"][0]["collectives"]
    assert sent["all_gather"]["calls"] == gathers


def test_dry_run_of_a_frozen_model():
    """With blocks that stay whole, and no root."""
    dry_run_agrees("fsdp", 2, "--train", "blocks.1")


def test_resume(tmp_path):
    """Saved by replicas on 4 ranks, resumed on 3."""
    flags = [*PROOF, "--train", "blocks|head"]
    run_script("fsdp", 4, *flags, "--hsdp", "2", "--no-check", "--save", str(tmp_path))
    rest = run_script("fsdp", 3, *flags, "--steps", "4", "--resume", str(tmp_path))
    assert rest["check"]["passed"] and len(rest["loss"]) == 2


class Recomputed(Layer):
    def __call__(self, x):
        return checkpoint(super().__call__, x, use_reentrant=False)


def llama(tied=False, frozen=()):
    model = Llama()
    if tied:
        model.lm_head.weight = model.embed_tokens.weight
    for part in frozen:
        model.get_submodule(part).requires_grad_(False)
    for p in model.parameters():
        p.grad = torch.ones_like(p)  # of no step here
    for layer in model.layers:
        layer.__class__ = Recomputed
    return model


def groups_of(model):
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    others = [p for name, p in model.named_parameters() if "norm" not in name]
    return [{"params": norms, "weight_decay": 0.0}, {"params": others, "lr": 0.01}]


def backward(model, rows):
    """Two micro-batches, with an evaluation between them."""
    for tokens, targets in zip(*(t.chunk(2) for t in rows)):
        llama_loss(model, tokens, targets).backward()
        with torch.no_grad():
            model(tokens)


def check_copy(model_is, options=None, copies=False, old="", new=""):
    """Two steps equal those of one process: gradients, norms, parameters.

    copies: each rank has the whole model, as a copy of HSDP.
    """
    n = dist.get_world_size()
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = llama(**model_is)
    plain.zero_grad()
    torch.manual_seed(rank)  # all ranks get the first one's weights
    inner = llama(**model_is)
    module = copied("fsdp", old=old, new=new)
    if copies:
        alone = [dist.new_group([i]) for i in range(n)]
        ours = module.HSDP(inner, inner.layers, alone[rank], dist.group.WORLD, **(options or {}))
    else:
        ours = module.FSDP(inner, inner.layers, **(options or {}))
    optimizer = torch.optim.AdamW(groups_of(plain), lr=0.1, eps=1e-5)
    assert all(p.numel() == (p + 1).numel() == 0 for p in inner.parameters() if p.requires_grad)
    our_optimizer = torch.optim.AdamW(ours.parameter_groups(groups_of(inner)), lr=0.1, eps=1e-5)
    rng = torch.Generator().manual_seed(1)
    for _ in range(2):
        rows = token_rows(rng, 8 * n)
        backward(plain, rows)
        backward(ours, [t.chunk(n)[rank] for t in rows])
        compare(full_gradients(ours), gradients_of(plain))
        compare(ours.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        for each_one, model in (optimizer, plain), (our_optimizer, ours):
            each_one.step()
            model.zero_grad()
    compare(ours.full_state_dict(), dict(plain.state_dict()))
    torch.manual_seed(0)
    first = llama(**model_is)
    ours.load_full_state_dict(first.state_dict())
    compare(ours.full_state_dict(), dict(first.state_dict()))
    with torch.no_grad():
        compare(ours(rows[0]), first(rows[0]))
    assert all(unit.full.untyped_storage().nbytes() == 0 for unit in ours.units)


def test_copy():
    run_ranks(check_each, 2, check_copy, [
              (dict(tied=True),),
              (dict(frozen=["embed_tokens", "norm", "lm_head", "layers.1.mlp"]),),
              ({}, dict(reshard=False, home="cpu")),
              (dict(frozen=["layers.1", "norm"]), {}, True),
    ])


PLANTED = {
    "gradient[part.span]": "gradient[part.span] / 2",
    "self.gathering = all_gather(self.full, self.sending, group=self.group, async_op=True)":
        "self.full.zero_()",
    "self.reducing = reduce_scatter(self.sum, self.buffer, group=self.group, async_op=True)":
        "self.sum.copy_(self.buffer[self.mine]); self.reducing = dist.barrier(async_op=True)",
    "part.master.grad += new": "part.master.grad = new",
    "part.value.copy_(state[name].flatten()[part.first:part.first + len(part.value)])": "pass",
    "dist.all_reduce(square, group=self.group)": "pass",
    "dist.broadcast(whole, group=self.group, group_src=0)": "pass",
}
OF_COPIES = "dist.all_reduce(self.sum, group=self.replicas, async_op=True)"
NOT_SUMMED = "dist.barrier(async_op=True)"


def check_planted(old, new, copies=False):
    copied("fsdp", old=old, new=new)  # there is such a line
    with pytest.raises(AssertionError):
        check_copy(dict(tied=True), {}, copies, old, new)


def test_planted():
    run_ranks(check_each, 2, check_planted, [*PLANTED.items(), (OF_COPIES, NOT_SUMMED, True)])


@pytest.mark.parametrize("old, new", [
    ("full.register_post_accumulate_grad_hook(self.reduce)", "pass"),
    ("output.register_hook(self.gather)", "pass"),
    ("all_gather(self.full, self.shard.detach(), group=self.group)", "pass"),
    ("reduce_scatter(self.shard.grad, full.grad, group=self.group)", "pass"),
    ("dist.all_reduce(square, group=model.group)", "pass"),
    ("nn.utils.clip_grads_with_norm_(model.parameters(), clip, norm)", "pass"),
    ('reduction="sum") / valid', 'reduction="mean")'),
])
def test_planted_in_the_idea(old, new):
    """It fails the check, or stops with an error."""
    run_script("fsdp", 2, *PROOF, "--impl", "idea", plant=partial(rewritten, old, new), code=1)


class OfTensors(Llama):
    def forward(self, tokens):
        return super().forward(tokens)["logits"]


def check_the_idea(old="", new=""):
    """Alone, around a model of others; ranks begin with weights of their own."""
    n = dist.get_world_size()
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = OfTensors()
    torch.manual_seed(rank)
    inner = OfTensors()
    module = idea("fsdp", old, new)
    ours = module.shard_blocks(inner, inner.layers)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, eps=1e-5)
    our_optimizer = torch.optim.AdamW(ours.parameters(), lr=0.1, eps=1e-5)
    rng = torch.Generator().manual_seed(1)
    for _ in range(3):
        x, y = token_rows(rng, 4 * n)
        valid = (y >= 0).sum()
        optimizer.zero_grad()
        (loss_sum(plain(x), y) / valid).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        mine = [t.chunk(n)[rank] for t in (x, y)]
        _, our_norm = module.idea_step(ours, our_optimizer, *mine, valid, 0.5)
        compare(our_norm, norm)
        with torch.no_grad():
            compare(ours(x), plain(x))


def check_idea_without_broadcast():
    with pytest.raises(AssertionError):
        check_the_idea("dist.broadcast(self.full, group=group, group_src=0)", "pass")


def test_the_idea():
    run_ranks(check_the_idea, 2)
    run_ranks(check_idea_without_broadcast, 2)


def check_meta():
    """Each is made by its name: tied ones and second names once, frozen ones and buffers whole."""
    with torch.device("meta"):
        inner = llama(tied=True, frozen=["layers.0"])
        inner.norm.again = inner.norm.weight
        inner.norm.unused = nn.Parameter(torch.ones(2))
        inner.norm.register_buffer("places", torch.arange(4))
    fill = from_meta(inner, "cpu", lambda name, tensor: tensor.fill_(len(name)))
    model = FSDP(inner, inner.layers, fill=fill)
    for name, tensor in model.full_state_dict().items():
        made_as = name.replace("lm_head", "embed_tokens").replace("again", "weight")
        assert (tensor == len(made_as)).all(), name
    llama_loss(model, *ROWS).backward()
    assert (full_gradients(model)["norm.unused"] == 0).all()


def check_bf16():
    """A module of bf16 numbers computes in bf16. Its shards, and sums of gradients, are in fp32."""
    inner = bf16_llama()
    model = FSDP(inner, inner.layers)
    batches = bf16_rows(8)
    for rows in batches[dist.get_rank()::2]:
        llama_loss(model, *rows).backward()
    compare_fp32(full_gradients(model), added_in_fp32(batches))
    assert {unit.full.dtype for unit in model.units} == {torch.bfloat16}
    model.masters[0].grad[0] = float("inf")
    before = full_gradients(model)
    assert model.clip_grad_norm_(1.0) == float("inf")
    torch.testing.assert_close(full_gradients(model), before)  # it spoils no other


def check_unused():
    """A loss of what a block returns, not the model: what came after it gets gradients of 0."""
    torch.manual_seed(0)
    plain = llama()
    plain.zero_grad()
    inner = llama()
    inner.load_state_dict(plain.state_dict())
    model = FSDP(inner, inner.layers)
    seen = []
    for layers in plain.layers, inner.layers:
        layers[0].forward = lambda x: x  # as a layer that is dropped
        layers[1].register_forward_hook(lambda layer, inputs, output: seen.append(output))
    plain(ROWS[0])
    model(ROWS[0])
    for output in seen:
        output.square().sum().backward()
    total = dist.get_world_size()
    wanted = {name: total * gradient for name, gradient in gradients_of(plain).items()}
    found = full_gradients(model)
    compare({name: found.pop(name) for name in wanted}, wanted)
    assert not any(gradient.any() for gradient in found.values())
    with pytest.raises(AssertionError, match="in no unit"):
        model.parameter_groups([{"params": [nn.Parameter(torch.zeros(2))]}])


def as_nccl(collective, works, out, tensor, group, async_op=False):
    """On a stream of its own it may read and write its memory until wait() is called."""
    result = torch.empty_like(out)
    collective(result, tensor, group=group)
    memory = [(weakref.ref(t), t.untyped_storage().nbytes()) for t in (out, tensor)]
    works["begun"] += 1

    def wait():
        for place, size in memory:
            assert place() is not None and place().untyped_storage().nbytes() == size
        memory[0][0]().copy_(result)
        works["waited for"] += 1
    return SimpleNamespace(wait=wait)


def check_memory(reshard, most):
    """Collectives find their memory, and so many blocks are gathered at a time."""
    module = copied("fsdp")
    works = Counter()
    gathered = []
    module.all_gather = partial(as_nccl, module.all_gather, works)
    module.reduce_scatter = partial(as_nccl, module.reduce_scatter, works)
    into("Unit", "gather", "after", lambda unit: gathered.append(
        sum(unit.full.untyped_storage().nbytes() > 0 for unit in model.block_units)))(module)
    inner = llama()
    model = module.FSDP(inner, inner.layers, reshard=reshard, dtype=torch.float32)
    llama_loss(model, *ROWS).backward()
    assert max(gathered) == most and works["begun"] == works["waited for"]


def test_parts():
    run_ranks(check_meta, 2)
    run_ranks(check_unused, 2)
    run_ranks(check_bf16, 2)
    run_ranks(check_each, 2, check_memory, [(True, 2), (False, 3)])
