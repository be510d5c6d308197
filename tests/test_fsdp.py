"""fsdp.py, and its section 1 around a model that is not ours."""
import weakref
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from conftest import PROOF, copied, dry_run_agrees, each, proves, run, script, textbook
from fsdp import FSDP
from others import Layer, Llama, compare, gradients_of, into_flat, llama_loss, token_rows

LLAMA = ("--model", "llama-toy")
ROWS = token_rows(torch.Generator().manual_seed(1), 2)


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


class Recomputed(Layer):
    def __call__(self, x):
        return checkpoint(super().__call__, x, use_reentrant=False)


def llama(tied=False, frozen=()):
    model = Llama()
    if tied:
        model.lm_head.weight = model.embed_tokens.weight
    for part in frozen:
        model.get_submodule(part).requires_grad_(False)
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


def check_copy(model_is, options={}, plant=None):
    """Two steps equal those of one process: gradients, norms, parameters."""
    n = dist.get_world_size()
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = llama(**model_is)
    torch.manual_seed(rank)  # all ranks get the first one's weights
    inner = llama(**model_is)
    module = copied("fsdp")
    if plant:
        plant(module)
    ours = module.FSDP(inner, inner.layers, **options)
    optimizer = torch.optim.AdamW(groups_of(plain), lr=0.1, eps=1e-5)
    our_optimizer = torch.optim.AdamW(ours.parameter_groups(groups_of(inner)), lr=0.1, eps=1e-5)
    rng = torch.Generator().manual_seed(1)
    for _ in range(2):
        rows = token_rows(rng, 8 * n)
        backward(plain, rows)
        backward(ours, [t.chunk(n)[rank] for t in rows])
        compare(ours.full_gradients(), gradients_of(plain))
        compare(ours.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        for each_one, model in (optimizer, plain), (our_optimizer, ours):
            each_one.step()
            model.zero_grad()
    compare(ours.full_state_dict(), dict(plain.state_dict()))
    assert all(unit.full.untyped_storage().nbytes() == 0 for unit in ours.units)


def test_copy():
    run(each, 2, check_copy, [
        (dict(tied=True),),
        (dict(frozen=["embed_tokens", "norm", "lm_head", "layers.1.mlp"]),),
        ({}, dict(reshard=False, home="cpu")),
    ])


def unsummed(module):
    def own(out, tensor, group, async_op):
        out.copy_(tensor.chunk(2)[dist.get_rank(group)])
        return SimpleNamespace(wait=lambda: None)
    module.reduce_scatter = own


def use_first(flat, first={}):
    flat.wait()
    flat.full.copy_(first.setdefault(flat, flat.full.clone()))


PLANTED = {
    "averaged over ranks": into_flat("continue_sum", "after", lambda flat: flat.sum.div_(2)),
    "a unit once gathered is not gathered again": into_flat("start_gather", "after", use_first),
    "a shard gets this rank's gradient, not the sum": unsummed,
    "a rank clips by the norm of its shards": into_flat("all_reduce", "left out", None),
}


def check_planted(what):
    with pytest.raises(AssertionError):
        check_copy(dict(tied=True), plant=PLANTED[what])


def replicas_keep_their_sums(module):
    into_flat("continue_sum", "before", lambda flat: setattr(flat, "replicas", None))(module)


def test_planted():
    run(each, 2, check_planted, [(what,) for what in PLANTED])
    proves("fsdp", 4, "--hsdp", "2", plant=replicas_keep_their_sums)


def check_meta():
    """Each is made by its name: tied ones and second names once, frozen ones and buffers whole."""
    with torch.device("meta"):
        inner = llama(tied=True, frozen=["layers.0"])
        inner.norm.again = inner.norm.weight
        inner.norm.unused = nn.Parameter(torch.ones(2))
        inner.norm.register_buffer("places", torch.arange(4))
    model = FSDP(inner, inner.layers, device="cpu",
                 init=lambda name, tensor: tensor.fill_(len(name)))
    for name, tensor in model.full_state_dict().items():
        made_as = name.replace("lm_head", "embed_tokens").replace("again", "weight")
        assert (tensor == len(made_as)).all(), name
    llama_loss(model, *ROWS).backward()
    assert (model.full_gradients()["norm.unused"] == 0).all()


def check_refused():
    """Between steps a parameter has no elements: whoever reads it gets nothing, and no crash."""
    inner = llama()
    model = FSDP(inner, inner.layers)
    assert all(p.numel() == (p + 1).numel() == 0 for p in inner.parameters())
    with pytest.raises(RuntimeError, match="full_state_dict"):
        model.state_dict()
    with pytest.raises(RuntimeError, match="cannot be moved"):
        model.to(torch.float32)
    llama_loss(model, *ROWS).backward()
    with pytest.raises(AssertionError, match="a list"):  # it would be an empty list
        model.parameter_groups([{"params": inner.norm.weight}])
    model.pieces[0].grad[0] = float("inf")
    before = model.full_gradients()
    assert model.clip_grad_norm_(1.0) == float("inf")
    torch.testing.assert_close(model.full_gradients(), before)  # it spoils no other
    logits = model(ROWS[0])["logits"]
    logits.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits.sum().backward()
    with pytest.raises(AssertionError, match="a backward has raised"):
        model(ROWS[0])


def check_block_output():
    """A loss of what a block returns, and not of what the model returns."""
    torch.manual_seed(0)
    plain = llama()
    inner = llama()
    inner.load_state_dict(plain.state_dict())
    model = FSDP(inner, inner.layers)
    seen = []
    for layers in plain.layers, inner.layers:
        layers[1].register_forward_hook(lambda layer, inputs, output: seen.append(output))
    plain(ROWS[0])
    model(ROWS[0])
    for output in seen:
        output.square().sum().backward()
    total = dist.get_world_size()
    wanted = {name: total * gradient for name, gradient in gradients_of(plain).items()}
    found = model.full_gradients()
    compare({name: found.pop(name) for name in wanted}, wanted)
    assert not any(gradient.any() for gradient in found.values())  # of what came after the block


def check_half():
    """Neither the square of a norm nor a sum of squares ends at 65504, where fp16 does."""
    inner = llama().half()
    model = FSDP(inner, inner.layers)
    count = 0
    for p in model.pieces:
        p.grad = torch.full_like(p, 2000)
        count += p.numel()
    total = torch.tensor(count, dtype=torch.float32)
    dist.all_reduce(total)
    torch.testing.assert_close(model.clip_grad_norm_(1.0), 2000 * total.sqrt())
    want = torch.full_like(model.pieces[0], 1 / total.sqrt())
    torch.testing.assert_close(model.pieces[0].grad, want)


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
    into_flat("start_gather", "after", lambda flat: gathered.append(
        sum(unit.full.untyped_storage().nbytes() > 0 for unit in model.block_units)))(module)
    inner = llama()
    model = module.FSDP(inner, inner.layers, reshard=reshard, dtype=torch.float32)
    llama_loss(model, *ROWS).backward()
    assert max(gathered) == most and works["begun"] == works["waited for"]


def test_parts():
    run(check_meta, 2)
    run(check_refused, 2)
    run(check_block_output, 2)
    run(check_half, 2)
    run(each, 2, check_memory, [(True, 2), (False, 3)])
