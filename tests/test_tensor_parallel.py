"""tensor_parallel.py, and its section 1 in a model that is not ours."""
import copy
import types
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from conftest import check_refused, copied, dry_run_agrees, each, proves, run, textbook
from others import Llama, compare, gradients_of, llama_loss, loss_sum, token_rows

LLAMA = ["--model", "llama-toy"]
ODD = ["--vocab", "257"]
SOME_FROZEN = ["--train", r"blocks\.1\.|norm1", *ODD, "--warmup", "1", "--eval-every", "1"]


section = copied("tensor_parallel")
PLAN = {
    "embed_tokens": section.VocabEmbedding,
    **dict.fromkeys(["*.[qkv]_proj", "*.gate_proj", "*.up_proj", "lm_head"], section.ColumnLinear),
    **dict.fromkeys(["*.o_proj", "*.down_proj"], section.RowLinear),
    "*.[qk]_norm": section.inside,
}
ROWS = [token_rows(torch.Generator().manual_seed(step), 4) for step in range(2)]
DROPOUTS = {"*.drop_inside": section.inside_dropout, "*.drop_outside": section.outside_dropout}


def both(kind, tied=False):
    torch.manual_seed(0)
    plain = Llama(layers=2, tied=tied)
    tp = getattr(section, kind)()
    return plain, section.cut_model(copy.deepcopy(plain), tp, PLAN), tp


def backward(output, y, tp):
    section.vocab_parallel_cross_entropy(output["logits"], y, 29, tp).backward()


def check_copy(kind, tied, frozen):
    """Two steps of two micro-batches, recomputed in backward: gradients, norms, parameters."""
    plain, model, tp = both(kind, tied)
    for m in plain, model:
        for name, p in m.named_parameters():
            p.requires_grad_(not name.startswith(frozen))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for x, y in zip(*(t.chunk(2) for t in ROWS[step])):
            llama_loss(plain, x, y).backward()
            backward(checkpoint(model, x, use_reentrant=False), y, tp)
        section.sum_gradients(model, tp)
        norm = section.gradient_norm(model, tp)
        want = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        torch.testing.assert_close(norm, want, rtol=1e-10, atol=0)
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        compare(section.full_gradients(model, tp), gradients_of(plain))
        for optimizer in optimizers:
            optimizer.step()
    state = section.full_state_dict(model, tp)
    compare(state, dict(plain.state_dict()))
    for name, p in model.named_parameters():
        assert (state[name].data_ptr() == p.data_ptr()) == (p not in tp.cuts), name


def check_dropout(kind):
    """Masks of what is cut differ, of what is whole they do not; under autocast, and recomputed."""
    tp = getattr(section, kind)()
    torch.manual_seed(tp.rank)  # cut_model gives all the first rank's weights and random state
    model = section.cut_model(Llama(dropout=0.4).float(), tp, {**PLAN, **DROPOUTS})
    x, y = ROWS[0]
    gradients = []
    for forward in model, partial(checkpoint, model, use_reentrant=False):
        model.zero_grad()
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            output = forward(x)
        backward(output, y, tp)
        gradients.append(gradients_of(model))
    compare(*gradients)
    assert output["logits"].dtype == torch.bfloat16
    mlp = model.layers[0].mlp
    everything = section.outside_dropout(nn.Dropout(1.0), tp)
    assert (everything(torch.ones(40)) == 0).all()
    for drop, same in (mlp.drop_inside, False), (mlp.drop_outside, kind == "WholeSequence"):
        mask = drop(torch.ones(40))
        assert mask.unique().tolist() == pytest.approx([0, 1 / (1 - 0.4)])
        total = mask.clone()
        dist.all_reduce(total)
        assert torch.equal(total, 2 * mask) == same


def check_kept():
    """g writes into what a matmul has made: whoever has kept that must hear of it. x is kept as it
    came: gathered, it is tp times as large."""
    _, model, tp = both("WholeSequence")
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    x, y = ROWS[0]
    output = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
    with pytest.raises(RuntimeError, match="mutated"):
        backward(output, y, tp)
    _, model, tp = both("CutSequence")
    output = model(x)
    kept, *_ = output["logits"].grad_fn.saved_tensors
    assert kept.shape[1] == x.shape[1] // tp.size


def check_loss():
    """F.cross_entropy itself, with huge logits in bf16; an id that does not exist keeps its row."""
    tp = section.WholeSequence()
    logits = (1e4 * torch.randn(2, 5, 7)).bfloat16().requires_grad_()
    targets = torch.full((2, 5), 6)
    want = loss_sum(logits.float(), targets)
    want.backward()
    cut = section.Cut(2, 7)
    mine = section.shard(logits.detach(), cut, tp).requires_grad_()
    got = section.vocab_parallel_cross_entropy(mine, targets, 7, tp)
    got.backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(mine.grad, section.shard(logits.grad, cut, tp))
    rows, _ = section.locate(torch.tensor([0, 3, 4, 6, -1, 7]), 7, tp)
    assert rows.tolist() == [[0, 3, 0, 0, -1, 7], [0, 0, 0, 2, -5, 3]][tp.rank]


def check_half():
    """The squares of a norm are summed in fp32: fp16 ends at 65504."""
    _, model, tp = both("WholeSequence")
    model.half()
    count = 0
    for p in model.parameters():
        p.grad = torch.full_like(p, 2000)
        count += p.numel() * (tp.size if p in tp.cuts else 1)
    want = 2000 * torch.tensor(count, dtype=torch.float32).sqrt()
    torch.testing.assert_close(section.gradient_norm(model, tp), want)


def check_two_names():
    """Of one module, and of a block and all that is in it."""
    plain = Llama()
    plain.layers[1] = plain.layers[0]
    plain.head = plain.lm_head
    tp = section.WholeSequence()
    model = section.cut_model(copy.deepcopy(plain), tp, {**PLAN, "head": section.ColumnLinear})
    assert model.head.weight is model.lm_head.weight
    x, y = ROWS[0]
    llama_loss(plain, x, y).backward()
    backward(model(x), y, tp)
    section.sum_gradients(model, tp)
    compare(section.full_gradients(model, tp), gradients_of(plain))


def check_refusals():
    tp = section.WholeSequence()
    column = section.ColumnLinear
    padded = Llama()
    padded.embed_tokens.padding_idx = 0
    for words, plan, model in [
        ("lm_head: two patterns", {"lm_head": column, "lm_*": section.RowLinear}, Llama()),
        ("q_norm: two patterns", {"*.q_norm": section.inside, "*_norm": section.inside}, Llama()),
        ("called nowhere.*", {"nowhere.*": column}, Llama()),
        ("ColumnLinear.* is for .*Linear.* not RMSNorm", {"norm": column}, Llama()),
        ("padding_idx would be lost", PLAN, padded),
        ("layers.0.mlp.drop_inside: the plan must call it", {}, Llama(dropout=0.1)),
        (r"embed_tokens shares \['weight'\]", {"lm_head": column}, Llama(tied=True)),
    ]:
        with pytest.raises(AssertionError, match=words):
            section.cut_model(model, tp, plan)
    with pytest.raises(AssertionError, match="Is the head cut"):
        section.vocab_parallel_cross_entropy(torch.ones(2, 31), torch.ones(2).long(), 31, tp)


def test_section_one_alone():
    """It trains as the plain model does; what would be silently wrong raises."""
    run(each, 2, check_copy, [
        ("WholeSequence", False, "nothing"), ("CutSequence", True, "layers.0")])
    run(each, 2, check_dropout, [("WholeSequence",), ("CutSequence",)])
    for check in check_kept, check_loss, check_half, check_two_names, check_refusals:
        run(check, 2)


def test_refused_flags():
    check_refused("tensor_parallel", [
        (["--dry-run", "2", "--heads", "3", "--width", "12"], "3 heads"),
        (["--dry-run", "2", "--seq", "15", "--sp"], "2 ranks cannot cut --seq 15 evenly"),
        (["--dry-run", "2", *LLAMA, "--hidden", "51", "--impl", "torch"], "cut --hidden 51 evenly"),
    ])


@pytest.mark.parametrize("world, flags", [
    (4, ODD),
    (4, [*ODD, *LLAMA, "--kv-heads", "4", "--hidden", "51", "--sp"]),
    (2, [*SOME_FROZEN, "--sp", "--impl", "both"]),
    (2, [*ODD, *LLAMA, "--sp", "--impl", "torch"]),
])
def test_equals_one_process(world, flags):
    proves("tensor_parallel", world, *flags)


def test_resume(tmp_path):
    """On another number of ranks."""
    proves("tensor_parallel", 2, *ODD, *LLAMA, "--save", str(tmp_path))
    report = proves("tensor_parallel", 1, *ODD, *LLAMA, "--steps", "4", "--resume", str(tmp_path))
    assert len(report["loss"]) == 2


@pytest.mark.parametrize("world, flags", [(4, ["--sp"]), (2, [*LLAMA, "--dtype", "bf16"])])
def test_cost(world, flags):
    textbook(dry_run_agrees("tensor_parallel", world, *ODD, *flags, ranks=[world - 1]))


def f_without_all_reduce(module):
    backward = module.ColumnParallel.backward

    def broken(ctx, *dys):
        ctx.tp = types.SimpleNamespace(gather=ctx.tp.gather, reduce=module.Pending)
        return backward(ctx, *dys)

    module.ColumnParallel.backward = staticmethod(broken)


def row_bias_on_every_rank(module):
    def forward(self, y):
        return module.ReduceFromTP.apply(F.linear(y, self.weight, self.bias), self.tp)

    module.RowLinear.forward = forward


def norms_not_summed(module):
    module.sum_gradients = lambda model, tp: None


def replicated_counted_on_each_rank(module):
    norm = module.gradient_norm
    module.gradient_norm = lambda model, tp: norm(
        model, types.SimpleNamespace(cuts=set(model.parameters()), group=tp.group))


@pytest.mark.parametrize("plant, flags", [
    (f_without_all_reduce, []),
    (row_bias_on_every_rank, []),
    (norms_not_summed, [*LLAMA, "--sp"]),
    (replicated_counted_on_each_rank, []),
])
def test_planted(plant, flags):
    proves("tensor_parallel", 2, *flags, plant=plant)
