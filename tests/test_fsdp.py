"""fsdp.py, and its idea and technique around a model that is not ours."""
import copy
import weakref
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from amp_accum_ckpt import sum_gradients
from common import adamw
from conftest import (
    check_differs, check_each, check_equal, copied, dry_run_agrees, idea, run_ranks, textbook)
from fsdp import FSDP, from_meta
from others import (
    WIDTH, Layer, Llama, OfTensors, as_in_files, bf16_llama, bf16_rows, compare, compare_fp32,
    gradients_of, into, llama_loss, loss_sum, micro_batches, mine, refuses,
    token_rows, trained, whole_batch)

LLAMA = ("--model", "llama-toy")
ROWS = token_rows(torch.Generator(), 2)


@pytest.mark.parametrize("world, flags", [
    (1, [*LLAMA]),
    (2, ["--impl", "torch"]),
    (2, [*LLAMA, "--train", "blocks.1|bias|head", "--eval-every", "1"]),
    (3, ["--batch", "7", "--vocab", "257", "--clip", "0"]),
    (4, ["--hsdp", "2", "--offload"]),
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


class Recomputed(Layer):
    def __call__(self, x):
        return checkpoint(super().__call__, x, use_reentrant=False)


def llama(seed=0, options=()):
    torch.manual_seed(seed)
    model = Llama(tied="tied" in options)
    if "frozen" in options:
        for part in "embed_tokens", "norm", "lm_head", "layers.1.mlp":
            model.get_submodule(part).requires_grad_(False)
    for layer in model.layers:
        layer.__class__ = Recomputed
    return model


def groups_of(model):
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    others = [p for name, p in model.named_parameters() if "norm" not in name]
    return [{"params": norms, "weight_decay": 0.0}, {"params": others, "lr": 0.001}]


def check_copy(words, *bug):
    """Steps of two micro-batches equal one process's, whatever ranks begin with.

    words: "tied"; "frozen": parts of it; "cpu": shards are there, and blocks stay gathered;
    "copies": each rank has the whole model, as a copy of HSDP
    """
    options = words.split()
    module = copied("fsdp", 2, *bug)
    inner = llama(dist.get_rank(), options)
    if "copies" in options:
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        ours = module.FSDP(inner, inner.layers, alone[dist.get_rank()], dist.group.WORLD)
    elif "cpu" in options:
        ours = module.FSDP(inner, inner.layers, reshard=False, home="cpu")
    else:
        ours = module.FSDP(inner, inner.layers)
    assert all(p.numel() == (p + 1).numel() == 0 for p in inner.parameters() if p.requires_grad)
    optimizer = adamw(ours.parameter_groups(groups_of(inner)), 1e-2)
    plain = llama(0, options)
    steps = trained(plain, adamw(groups_of(plain), 1e-2))
    for step, (_, gradients, norm, state) in enumerate(steps):
        for rows in micro_batches(step):
            llama_loss(ours, *mine(rows)).backward()
            with torch.no_grad():  # an evaluation in between
                ours(rows[0])
        compare(ours.clip_grad_norm_(0.5), norm)
        compare(ours.full_gradients(), gradients)
        ours(rows[0])  # a forward without a backward: what it gathers is old after the step
        optimizer.step()
        ours.zero_grad()
        compare(ours.full_state_dict(), state)
    first = llama(0, options)
    ours.load_full_state_dict(as_in_files(first))
    compare(ours.full_state_dict(), dict(first.state_dict()))
    with torch.no_grad():
        compare(ours(ROWS[0]), first(ROWS[0]))
        hidden = torch.ones(2, inner.lm_head.weight.shape[1])
        compare(inner.lm_head(hidden), first.lm_head(hidden))  # a loss in chunks calls it by itself


def check_idea(*bug):
    code = idea("fsdp", *bug)
    torch.manual_seed(dist.get_rank())
    inner = OfTensors()
    ours = code.shard_blocks(inner, inner.layers)
    optimizer = adamw(ours.parameters(), 1e-2)
    torch.manual_seed(0)
    plain = Llama()
    for step, (_, _, norm, _) in enumerate(trained(plain)):
        compare(code.idea_step(ours, optimizer, *mine(whole_batch(step)), 1, 0.5)[1], norm)
        with torch.no_grad():
            compare(ours(ROWS[0]), plain(ROWS[0])["logits"])


def test_copy():
    run_ranks(check_each, 2, check_copy, [("tied",), ("frozen",), ("cpu",), ("frozen copies",)])
    run_ranks(check_idea, 2)


PLANTED = [
    (check_copy, "tied", "new = gradient[part.here]", "new = gradient[part.here] / 2"),
    (check_copy, "tied",
     "self.gathering = all_gather(self.full, own, group=self.group, async_op=True)",
     "self.full.zero_()"),
    (check_copy, "tied",
     "work = reduce_scatter(own, buffer, group=self.group, async_op=True)",
     "own.copy_(buffer[self.mine]); work = dist.barrier(async_op=True)"),
    (check_copy, "tied", "part.master.grad += new", "part.master.grad = new"),
    (check_copy, "tied", "part.master.data.copy_(whole.flatten()", "(whole.flatten()"),
    (check_copy, "tied", "dist.all_reduce(square, group=self.group)", "pass"),
    (check_copy, "tied", "dist.broadcast(tensor.data, group=group, group_src=0)", "pass"),
    (check_copy, "copies", "dist.all_reduce(own, group=unit.replicas, async_op=True)",
     "dist.barrier(async_op=True)"),
    (check_copy, "copies", "dist.broadcast(tensor.data, group=replicas, group_src=0)", "pass"),
    (check_idea, "all_gather(self.full, self.shard.detach(), group=self.group)", "pass"),
    (check_idea, "reduce_scatter(self.shard.grad, leaf.grad, group=self.group)", "pass"),
    (check_idea, "dist.all_reduce(square, group=model.group)", "pass"),
    (check_idea, "nn.utils.clip_grads_with_norm_(model.parameters(), clip, norm)", "pass"),
    (check_idea, "dist.broadcast(self.full, group=group, group_src=0)", "pass"),
    (check_idea, 'reduction="sum") / valid', 'reduction="mean")'),
]


def test_planted():
    run_ranks(check_each, 2, check_differs, PLANTED)


def check_meta():
    """Each is made by its name: tied ones and second names once, frozen ones and buffers whole."""
    with torch.device("meta"):
        inner = llama(0, ["tied"])
        inner.layers[0].requires_grad_(False)
        inner.norm.again = inner.norm.weight
        inner.norm.unused = nn.Parameter(torch.ones(2))
        inner.norm.register_buffer("places", torch.arange(4))
    fill = from_meta(inner, "cpu", lambda name, tensor: tensor.fill_(len(name)))
    model = FSDP(inner, inner.layers, fill=fill)
    for name, tensor in model.full_state_dict().items():
        made_as = name.replace("lm_head", "embed_tokens").replace("again", "weight")
        assert (tensor == len(made_as)).all(), name
    llama_loss(model, *ROWS).backward()
    assert (model.full_gradients()["norm.unused"] == 0).all()
    with torch.device("meta"):
        forgotten = llama()
    from_meta(forgotten, "cpu", lambda name, tensor: tensor.zero_())
    refuses("give fill", FSDP, forgotten, forgotten.layers)


def check_bf16():
    """A module of bf16 numbers computes in bf16. Its shards, and sums of gradients, are in fp32."""
    inner = bf16_llama()
    for p in inner.parameters():
        p.grad = torch.ones_like(p)  # of no step here
    model = FSDP(inner, inner.layers)
    for rows in bf16_rows()[dist.get_rank()::2]:
        llama_loss(model, *rows).backward()
    compare_fp32(model.full_gradients())
    assert {unit.full.dtype for unit in model.units} == {torch.bfloat16}
    model.masters[0].grad[0] = float("inf")
    before = model.full_gradients()
    assert model.clip_grad_norm_(1.0) == float("inf")
    compare(model.full_gradients(), before)  # it spoils no other


def check_unused():
    """A loss of what a block returns, not the model: what came after it gets gradients of 0."""
    plain = llama()
    inner = llama()
    model = FSDP(inner, inner.layers)
    seen = []
    for layers in plain.layers, inner.layers:
        layers[0].forward = lambda x: x  # as a layer that is dropped
        layers[1].register_forward_hook(lambda layer, inputs, output: seen.append(output))
    for each in plain, model:
        each(ROWS[0])
    seen[0].square().sum().mul(dist.get_world_size()).backward()
    seen[1].square().sum().backward()
    found = model.full_gradients()
    compare({name: found.pop(name) for name in gradients_of(plain)}, gradients_of(plain))
    assert not any(gradient.any() for gradient in found.values())
    for parameters in model.parameters(), model.module.parameters():
        refuses("of model.parameter_groups", torch.optim.SGD(parameters, 0.1).step)
    refuses("make groups of", model.parameter_groups, [{"params": [nn.Parameter(torch.zeros(2))]}])
    for whole in model, model.module:
        refuses("full_state_dict", whole.state_dict)


def check_two_forwards():
    """Of one loss."""
    plain = llama()
    inner = copy.deepcopy(plain)
    model = FSDP(inner, inner.layers)
    for each, rows in (plain, ROWS), (model, mine(ROWS)):
        loss = llama_loss(each, *rows) + llama_loss(each, *rows)
        loss.backward()
    compare(model.full_gradients(), gradients_of(plain))


def add_bonus(model, is_used):
    """Before the last norm, or nothing."""
    def add(norm, inputs):
        return inputs[0] + model.bonus if is_used else None

    return model.norm.register_forward_pre_hook(add)


def check_root_of_one_rank():
    """The root trains what the first rank's rows alone use: the other rank sums zeros."""
    plain = llama(options=["frozen"])
    plain.bonus = nn.Parameter(torch.ones(WIDTH))
    inner = copy.deepcopy(plain)
    model = FSDP(inner, inner.layers)
    add_bonus(inner, dist.get_rank() == 0)
    llama_loss(model, *mine(ROWS)).backward()
    for rank in range(2):
        hook = add_bonus(plain, rank == 0)
        llama_loss(plain, *[t.chunk(2)[rank] for t in ROWS]).backward()
        hook.remove()
    compare(model.full_gradients(), gradients_of(plain))


def check_autocast():
    """Of one around two micro-batches autocast keeps the casts of weights: in the second backward
    their gradients come last."""
    plain = llama().float()
    inner = copy.deepcopy(plain)
    model = FSDP(inner, inner.layers)
    for each, rows in (plain, ROWS), (model, mine(ROWS)):
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(2):
                llama_loss(each, *rows).backward()
    found = model.full_gradients()
    for name, wanted in gradients_of(plain).items():
        assert (found[name] - wanted).norm() < 0.05 * wanted.norm(), name


def check_other_calls():
    """Of the module by itself, as by transformers' generate; of a model that torch compiles."""
    plain = llama()
    inner = copy.deepcopy(plain)
    model = FSDP(inner, inner.layers)
    refuses("in an FSDP already", FSDP, inner, inner.layers)
    refuses("replicas wants a group", FSDP, llama(), [], replicas=dist.group.WORLD)
    with torch.no_grad():
        compare(inner(ROWS[0])["logits"], plain(ROWS[0])["logits"])
    llama_loss(plain, *ROWS).backward()
    llama_loss(torch.compile(model, backend="aot_eager"), *mine(ROWS)).backward()
    compare(model.full_gradients(), gradients_of(plain))


class Dressed(Llama):
    def forward(self, tokens):
        return SimpleNamespace(**super().forward(tokens))


def check_opaque_output():
    """Of a class that torch cannot look into, where a block and the head train; a group is a
    tensor; an int stays one; a copy, and a state of another shape, raise."""
    torch.manual_seed(0)
    plain = Dressed()
    plain.requires_grad_(False)
    plain.lm_head.requires_grad_(True)
    plain.layers[0].requires_grad_(True)
    plain.steps = nn.Parameter(torch.tensor([257]), requires_grad=False)
    inner = copy.deepcopy(plain)
    model = FSDP(inner, inner.layers)
    x, y = ROWS
    loss_sum(plain(x).logits, y).backward()
    x, y = mine(ROWS)
    loss_sum(model(x).logits, y).backward()
    compare(model.full_gradients(), gradients_of(plain))
    opaque = llama()
    opaque.layers[0].forward = lambda x: SimpleNamespace(x=x)  # backward could not be seen there
    refuses("blocks return tensors", FSDP(opaque, opaque.layers), x)
    [group] = model.parameter_groups([{"params": iter([inner.lm_head.weight])}])
    assert len(group["params"]) == len(model.root_units[0].parts)
    whole = model.full_state_dict()
    one = {**whole, "steps": torch.tensor(1)}  # copy_ would spread it
    refuses("steps", model.load_full_state_dict, one)
    whole["lm_head.weight"] = whole["lm_head.weight"].t()
    refuses("for a parameter of", model.load_full_state_dict, whole)
    refuses("'more'} are not in", model.load_full_state_dict, {**whole, "more": 0})
    with pytest.raises(RuntimeError, match="copy the module before"):
        copy.deepcopy(model)
    half = FSDP(copy.deepcopy(plain), [], dtype=torch.bfloat16)
    assert half.module.steps.item() == 257


def as_nccl(collective, works, out, tensor, group, async_op=False):
    """On a stream of its own it may read and write its memory until wait() is called."""
    result = torch.empty_like(out)
    collective(result, tensor, group=group)
    owners = [t if t._base is None else t._base for t in (out, tensor)]
    memory = [(weakref.ref(t), t.untyped_storage().nbytes()) for t in owners]
    works["begun"] += 1

    def wait():
        for place, size in memory:
            assert place() is not None and place().untyped_storage().nbytes() == size
        memory[0][0]().copy_(result)
        works["waited for"] += 1
    return SimpleNamespace(wait=wait)


def check_memory(reshard, most):
    """Collectives find their memory, so many blocks are gathered at a time, and one sum kept."""
    module = copied("fsdp")
    works = Counter()
    gathered = []
    summing = []
    into("Unit", "start_sum", "before", lambda unit: summing.append(model.summing))(module)
    module.all_gather = partial(as_nccl, module.all_gather, works)
    module.reduce_scatter = partial(as_nccl, module.reduce_scatter, works)
    into("Unit", "gather", "after", lambda unit: gathered.append(
        sum(unit.full.untyped_storage().nbytes() > 0 for unit in model.block_units)))(module)
    inner = llama()
    model = module.FSDP(inner, inner.layers, reshard=reshard, dtype=torch.float32)
    llama_loss(model, *ROWS).backward()
    assert max(gathered) == most and works["begun"] == works["waited for"]
    assert summing == [None] * len(model.units)  # the sum before has ended


def check_thawed():
    inner = llama()
    inner.layers[0].requires_grad_(False)
    model = FSDP(inner, inner.layers)
    x, _ = ROWS
    inner.layers[0].requires_grad_(True)
    refuses("thawed since", model, x)
    refuses("FSDP has summed", sum_gradients, model.parameters())


def test_parts():
    for check in (check_meta, check_unused, check_bf16, check_two_forwards, check_root_of_one_rank,
                  check_autocast, check_other_calls, check_opaque_output, check_thawed):
        run_ranks(check, 2)
    run_ranks(check_each, 2, check_memory, [(True, 2), (False, 3)])
