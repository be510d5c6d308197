"""tensor_parallel.py in all forms of the toy; its idea and its technique in a model of others."""
import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import tensor_parallel
from amp_accum_ckpt import selective_at_work
from common import adamw
from conftest import (
    PROOF, alone, check_bug_shows, check_differs, check_dry_runs, check_each, check_equal,
    check_refused, copied, dry_run_agrees, idea, rewritten, run_ranks, textbook)
from others import (
    Files, WIDTH, Llama, OfTensors, as_in_files, compare, gradients_of, llama_loss, loss_sum,
    micro_batches, refuses, trained, whole_batch)

LLAMA = ["--model", "llama-toy"]
QWEN = ["--model", "qwen3-toy"]
ODD = ["--vocab", "257"]
ONE = ["--steps", "1"]
IDEA = ["--impl", "idea"]
SOME_FROZEN = ["--train", r"blocks\.1\.|norm", *ODD, "--warmup", "1", "--eval-every", "1"]

section = copied("tensor_parallel")
COLUMNS = ["*.q_proj", "*.gate_proj", "*.up_proj", "lm_head"]
ROWS = ["*.o_proj", "*.down_proj"]
BATCH = micro_batches(0)[0]


def plan(kv_heads):
    return {
        "embed_tokens": section.VocabEmbedding, "*.[kv]_proj": section.key_values(kv_heads),
        **dict.fromkeys(COLUMNS, section.ColumnLinear), **dict.fromkeys(ROWS, section.RowLinear),
        "*.[qk]_norm": section.inside,
    }


def both(kind, tied=False, kv_heads=2):
    torch.manual_seed(0)
    plain = Llama(layers=2, tied=tied, kv_heads=kv_heads)
    tp = getattr(section, kind)()
    return plain, section.cut_model(copy.deepcopy(plain), tp, plan(kv_heads)), tp


def backward(output, y, tp):
    section.vocab_parallel_cross_entropy(output["logits"], y, 29, tp).backward()


def check_copy(kind, tied, frozen, kv_heads=2):
    """Steps of two micro-batches, recomputed in backward, equal one process's."""
    plain, model, tp = both(kind, tied, kv_heads)
    for m in plain, model:
        for name, p in m.named_parameters():
            p.requires_grad_(not name.startswith(frozen))
    assert section.gradient_norm(model, tp) == 0
    optimizer = adamw(model.parameters(), 1e-2)
    for step, (_, gradients, norm, state) in enumerate(trained(plain)):
        optimizer.zero_grad()
        for x, y in micro_batches(step):
            backward(checkpoint(model, x, use_reentrant=False), y, tp)
        section.sum_gradients(model, tp)
        found = section.gradient_norm(model, tp)
        compare(found, norm)
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, found)
        compare(section.full_gradients(model, tp), gradients)
        optimizer.step()
        whole = section.full_state_dict(model, tp)
        compare(whole, state)
    section.assert_alike(model, tp)
    assert all(t.is_contiguous() for t in whole.values())
    for name, p in model.named_parameters():
        assert (whole[name].data_ptr() == p.data_ptr()) == (p not in tp.cuts), name


def check_meta(kind, tied):
    """Cut where it has no memory, then filled; and filled again."""
    plain, model, tp = both(kind, tied)
    with torch.device("meta"):
        empty = Llama(layers=2, tied=tied)
    other = getattr(section, kind)()
    section.cut_model(empty, other, plan(2))
    empty.norm.weight.requires_grad_(False)
    for _ in range(2):
        section.load_full_state_dict(empty, other, Files(as_in_files(plain)))
    compare(section.full_state_dict(empty, other), dict(plain.state_dict()))
    assert not empty.norm.weight.requires_grad
    model.norm.weight.requires_grad_(False)
    x, y = BATCH
    for m, its in (model, tp), (empty, other):
        output = m(x)
        logits = section.unshard(output["logits"], section.Cut(2, 29), its)  # to sample of them
        compare(logits.detach(), plain(x)["logits"].detach())
        backward(output, y, its)
        section.sum_gradients(m, its)
    assert section.gradient_norm(model, tp) == section.gradient_norm(empty, other)


def check_kept():
    """x is kept as it came: gathered, it is tp times as large. Under autocast, what is cast."""
    _, model, tp = both("SequenceParallel")
    x, y = BATCH
    logits = model(x)["logits"]
    kept, *_ = logits.grad_fn.saved_tensors  # torch 2.11 has them while logits are there
    assert kept.shape[1] == x.shape[1] // tp.size
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    assert output["logits"].dtype == torch.bfloat16
    backward(output, y, tp)


def check_gradients(plain, model, tp):
    x, y = BATCH
    llama_loss(plain, x, y).backward()
    backward(model(x), y, tp)
    section.sum_gradients(model, tp)
    compare(section.full_gradients(model, tp), gradients_of(plain))


def check_kept_matmuls(kind):
    """torch's selective checkpointing keeps what a RowLinear adds: g may not write there."""
    plain, model, tp = both(kind)
    for layer in model.layers:
        layer.forward = partial(selective_at_work, layer.forward)
    check_gradients(plain, model, tp)


def check_order():
    """The sum of dx is under way while weights' gradients are made."""
    code = copied("tensor_parallel")
    events = []

    class Watched(code.TensorParallel):
        def reduce(self, *args):
            events.append("sum begins")
            wait = super().reduce(*args)
            return lambda: events.append("sum ends") or wait()

        def gather(self, x):
            return lambda: events.append("x is read") or x

    x = torch.ones(2, 4, requires_grad=True)
    y = code.ColumnLinear(nn.Linear(4, 8), Watched())(x)
    events.clear()
    y.sum().backward()
    assert events == ["sum begins", "x is read", "sum ends"]


def check_loss():
    """F.cross_entropy itself, with huge logits in bf16."""
    tp = section.TensorParallel()
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


def check_half():
    """The squares of a norm are summed in fp32: fp16 ends at 65504."""
    plain, model, tp = both("TensorParallel", kv_heads=1)
    model.half()
    for p in model.parameters():
        p.grad = torch.full_like(p, 2000)
    count = sum(p.numel() for p in plain.parameters())
    want = 2000 * torch.tensor(count, dtype=torch.float32).sqrt()
    torch.testing.assert_close(section.gradient_norm(model, tp), want)


def check_two_names():
    """Of one module, and of a block and all that is in it."""
    plain = Llama()
    plain.layers[1] = plain.layers[0]
    plain.head = plain.lm_head
    tp = section.TensorParallel()
    cuts = {**plan(2), "head": section.ColumnLinear}
    model = section.cut_model(copy.deepcopy(plain), tp, cuts)
    assert model.head.weight is model.lm_head.weight
    check_gradients(plain, model, tp)


def check_in_turn():
    """Cut by several calls with one tp: what is cut stays this rank's piece."""
    plain = Llama()
    tp = section.TensorParallel()
    model = copy.deepcopy(plain)
    of_layers = {name: how for name, how in plan(2).items() if name.startswith("*.")}
    for layer in model.layers:
        section.cut_model(layer, tp, of_layers)
    ends = {name: how for name, how in plan(2).items() if name not in of_layers}
    section.cut_model(model, tp, ends)
    compare(section.full_state_dict(model, tp), dict(plain.state_dict()))
    refuses("no gradients: if ZeRO or FSDP has them", section.sum_gradients, model, tp)


def check_refusals():
    tp = section.TensorParallel()
    normed = Llama()
    nn.utils.spectral_norm(normed.lm_head)  # its weight is computed
    padded = Llama()
    padded.embed_tokens.padding_idx = 0
    scaled = Llama()
    scaled.embed_tokens = type("Scaled", (nn.Embedding,), {})(8, 12)
    for words, cuts, model in [
        ("called nowhere.*", {"nowhere.*": section.ColumnLinear}, Llama()),
        ("q_proj, or none is left", {"*.q_proj": section.ColumnLinear,
                                     "*.0.*.q_proj": section.RowLinear}, Llama()),
        ("Scaled.*: only a plain", plan(2), scaled),
        ("padding_idx=0.*: only a plain", plan(2), padded),
        ("out_features=29.*: only a plain", plan(2), normed),
        ("3 heads on 2 ranks", plan(3), Llama()),
        ("layers.0.mlp.drop_inside: ranks would draw", {}, Llama(dropout=0.1)),
        (r"embed_tokens shares \['weight'\]", {"lm_head": section.ColumnLinear}, Llama(tied=True)),
    ]:
        refuses(words, section.cut_model, model, tp, cuts)
    model = section.cut_model(Llama(), tp, plan(2))
    section.inside(model.layers[0].self_attn, tp)  # and what is cut in it
    assert not any(section.is_summand(p, tp) for p in tp.cuts)
    larger = Llama().state_dict()
    larger["lm_head.weight"] = torch.ones(32, 12)  # a padded vocabulary
    refuses("not 29 to cut", section.load_full_state_dict, model, tp, larger)
    one = {**Llama().state_dict(), "norm.weight": torch.ones(1)}
    refuses(r"norm.weight: \(1,\), not \(12,\)", section.load_full_state_dict, model, tp, one)
    code = idea("tensor_parallel")
    with pytest.raises(AssertionError, match="on 2 ranks"):  # else ids would be found twice
        code.cut_by_name(Llama(), {"embed_tokens": code.vocab_embedding}, tp.group)
    with pytest.raises(AssertionError, match="is the head cut"):
        section.vocab_parallel_cross_entropy(torch.ones(2, 31), torch.ones(2).long(), 31, tp)


def check_alike():
    """What nothing else would see is named: an `inside` forgotten, dropout outside."""
    right = plan(2)
    forgotten = {name: kind for name, kind in right.items() if kind is not section.inside}
    torch.manual_seed(dist.get_rank())
    for each, p, name in (forgotten, 0.0, "[qk]_norm.weight"), (right, 0.5, "mlp.down_proj.bias"):
        tp = section.TensorParallel()
        model = section.cut_model(Llama(layers=1), tp, each)
        model.layers[0].register_forward_hook(lambda layer, inputs, y, p=p: F.dropout(y, p))
        backward(model(BATCH[0]), BATCH[1], tp)
        section.sum_gradients(model, tp)
        refuses(f"{name} differs between ranks", section.assert_alike, model, tp)


def test_copy():
    """It trains as the plain model does."""
    run_ranks(check_each, 2, check_copy, [
        ("TensorParallel", False, "nothing"), ("SequenceParallel", True, "layers.0"),
        ("TensorParallel", True, "layers.1", 1), ("SequenceParallel", False, "nothing", 1)])


def check_parts():
    check_meta("TensorParallel", True)
    check_meta("SequenceParallel", False)
    check_kept_matmuls("TensorParallel")
    check_kept_matmuls("SequenceParallel")
    for check in (check_kept, check_order, check_loss, check_half, check_two_names, check_in_turn,
                  check_refusals):
        check()


class Even(OfTensors):
    """Sizes that 4 ranks divide; tied, with a frozen layer."""

    def __init__(self):
        super().__init__(layers=2, kv_heads=4)
        self.embed_tokens = nn.Embedding(32, WIDTH)
        self.lm_head = nn.Linear(WIDTH, 32, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        for layer in self.layers:
            layer.mlp.gate_proj = nn.Linear(WIDTH, 20)
            layer.mlp.up_proj = nn.Linear(WIDTH, 20)
            layer.mlp.down_proj = nn.Linear(20, WIDTH)
        self.layers[0].requires_grad_(False)


def check_idea(*bug):
    code = idea("tensor_parallel", *bug)
    group = dist.group.WORLD
    torch.manual_seed(0)
    plain = Even()
    model = copy.deepcopy(plain)
    code.cut_by_name(model, {
        "embed_tokens": code.vocab_embedding, "*.[qk]_norm": tensor_parallel.norm_inside,
        **dict.fromkeys([*COLUMNS, "*.[kv]_proj"], code.column_linear),
        **dict.fromkeys(ROWS, code.row_linear)}, group)
    optimizer = adamw(model.parameters(), 1e-2)
    for step, (loss, _, norm, _) in enumerate(trained(plain)):
        found = code.idea_step(model, optimizer, *whole_batch(step), 1, 0.5, group)
        compare(found, (loss, norm))
        for p, whole in zip(model.parameters(), plain.parameters()):
            if hasattr(p, "cut"):
                whole = whole.chunk(group.size(), p.cut)[group.rank()]
            compare(p, whole)


@pytest.mark.parametrize("world, check", [
    (4, check_idea), (2, check_parts), (2, check_alike)])
def test_parts(world, check):
    """The idea trains as the plain model does, too; what would be silently wrong raises."""
    run_ranks(check, world)


BUGS_IN_THE_IDEA = [
    ("return summed(dx, ctx.group), None", "return dx, None"),  # f
    ("return summed(y, group)", "return y.clone()"),  # g
    ("x = ReduceFromTP.apply(F.linear(y, linear.weight), group)",
     "x = ReduceFromTP.apply(F.linear(y, linear.weight, linear.bias), group)"),
    ("rows = ids - rank * words", "rows = ids"),
    (".masked_fill(~here.unsqueeze(-1), 0)", ""),
    ("return ReduceFromTP.apply(y, group)", "return y"),
    ("    dist.all_reduce(most, dist.ReduceOp.MAX, group)", "    pass"),
    ("ReduceFromTP.apply(logits.exp().sum(1), group)", "logits.exp().sum(1)"),
    (".squeeze(1).masked_fill(~here, 0)", ".squeeze(1)"),
    ("target_logit = ReduceFromTP.apply(own_logit, group)", "target_logit = own_logit"),
    (".masked_fill(targets == ignore_index, 0)", ""),
    (" or group.rank() == 0)", " or True)"),
    ("return summed(square, group).sqrt()", "return square.sqrt()"),
    ("    nn.utils.clip_grads_with_norm_(", "    (lambda *_: None)("),
    ("y.flatten(), group) / valid", "y.flatten(), group) / y.numel()"),
]
BUGS = [  # and where they show, if not in check_bug's usual case
    ("ctx.tp.reduce(input_gradient(dys", "(lambda dx: lambda: dx)(input_gradient(dys"),  # f
    ("x = ToOutside.apply(summand, self.tp)", "x = summand"),  # g
    ("self.multiply(y, self.weight)", "self.multiply(y, self.weight, self.bias)"),
    (".masked_fill(~here.unsqueeze(-1), 0)  # (.., T, C)", ""),
    ("else y + bias.to(y.dtype)", "else y"),
    ("targets.unsqueeze(1), words, tp.rank)", "targets.unsqueeze(1), logits.shape[1], tp.rank)"),
    ("self.tp.each(self.tp.cuts[self.weight].plain_size)", "len(self.weight)"),
    ("dist.all_reduce(sums, group=tp.group)", "pass"),
    ("dlogits.scatter_add_(1, column, -here.to(dlogits.dtype))", "pass"),
    ("(p in tp.inside or tp.cuts_x)", "tp.cuts_x"),
    ("super().__init__(inside(plain, tp), tp)", "super().__init__(plain, tp)", "TensorParallel", 1),
    ("(p in tp.inside or tp.cuts_x)", "p in tp.inside", "SequenceParallel"),
    ("trained if tp.rank == 0 or p in tp.cuts]", "trained]"),
]


def check_bug(old, new, kind="TensorParallel", kv_heads=2):
    global section
    section = copied("tensor_parallel", 2, old, new)
    check_copy(kind, False, "nothing", kv_heads)


def test_planted():
    run_ranks(check_each, 2, check_differs, [
        *[(check_idea, *bug) for bug in BUGS_IN_THE_IDEA], *[(check_bug, *bug) for bug in BUGS]])
    plant = partial(rewritten, "lambda gradient: summed(gradient, group)",
                    "lambda gradient: gradient", last=3)  # of norms of heads
    check_bug_shows("tensor_parallel", 2, *QWEN, *IDEA, plant=plant)


def test_refused_flags():
    check_refused("tensor_parallel", [
        ("--dry-run 2 --heads 3 --width 12", "2 ranks cannot share 3 heads"),
        ("--dry-run 4 --model llama-toy --impl idea", "4 heads, 2 of keys and values, evenly"),
        ("--dry-run 2 --seq 15 --sp", "2 ranks cannot cut --seq 15 evenly"),
        ("--dry-run 2 --model llama-toy --hidden 51 --impl torch", "cut --hidden 51 evenly"),
        ("--dry-run 2 --impl idea --sp", "--impl idea: no --sp in the idea"),
        ("--dry-run 2 --impl idea --vocab 257", "2 ranks cannot cut --vocab 257 evenly"),
    ])


@pytest.mark.parametrize("world, flags", [
    (4, [*QWEN, *ODD, "--kv-heads", "1", "--train", "attn"]),
    (2, [*QWEN, *SOME_FROZEN, "--sp", "--impl", "both"]),
    (2, [*ODD, *LLAMA, "--sp", "--impl", "torch"]),
    (2, [*QWEN, "--train", r"blocks\.1\.|norm", "--eval-every", "1", "--impl", "all"]),
    (1, IDEA),
])
def test_equals_one_process(world, flags):
    check_equal("tensor_parallel", world, *flags)


@pytest.mark.parametrize("world, flags", [
    (4, [*ODD, "--seq", "9"]),  # the last rank has no position
    (4, [*ODD, *LLAMA, "--kv-heads", "4", "--hidden", "51", "--sp"]),
    (4, [*LLAMA, *ODD, "--sp"]),  # 2 heads of keys and values
    (4, [*LLAMA, "--heads", "8", "--kv-heads", "2"]),  # pairs sum their gradients
    (4, [*QWEN, "--kv-heads", "1"]),
    (4, [*LLAMA, *IDEA, "--kv-heads", "4"]),
    (4, IDEA),
    (2, [*QWEN, *IDEA]),
])
def test_equals_one_process_at_the_cost_that_is_said(world, flags):
    report = check_equal("tensor_parallel", world, *flags)
    textbook(report)
    check_dry_runs(report, "tensor_parallel", *PROOF, *flags, ranks=[world - 1])


def test_cost_in_bf16():
    flags = *QWEN, *ODD, "--dtype", "bf16"
    textbook(dry_run_agrees("tensor_parallel", 2, *flags, ranks=[1]))


def test_figures_of_the_toy():
    """Calls, bytes and memory, as the docstring and part 2 say."""
    cases = [
        ([*IDEA, *ONE], {"all_reduce": 4 * 6 + 2 + 4}, 13.6),  # embedding and head; loss and norm
        ([*IDEA, *ONE, *LLAMA], {"all_reduce": 4 * 7 + 2 + 4}, 15.7),
        ([], {"all_reduce": 4 * 4 + 3 + 3}, 9.5),  # positions, too
        (["--sp"], {"all_gather": 4 * 6 + 4, "reduce_scatter": 4 * 4 + 3, "all_reduce": 4}, 11.9),
        ([*LLAMA, *ONE, "--dry-run", "4"], {"all_reduce": 4 * 4 + 2 + 4}, None),  # 2 heads of keys
    ]
    words = ["--vocab", "16384"]
    lines = [*[flags for flags, _, _ in cases], words, [*words, *IDEA]]
    reports = alone("tensor_parallel", *[["--dry-run", "2", *flags] for flags in lines])
    ranks = [report["ranks"][0] for report in reports]
    for (flags, calls, sent), rank in zip(cases, ranks):
        found = rank["collectives"]
        assert {kind: found[kind]["calls"] for kind in found} == calls, flags
        wire = sum(figures["wire"] for figures in found.values())
        assert sent in (None, round(wire / 1e6, 1)), flags
    _, _, whole, cut, _, ours, ideas = [rank["memory"] for rank in ranks]
    assert [round(m["activations"] / 1e6, 1) for m in (whole, cut)] == [22.7, 17.9]
    assert [round(m["peak"] / 1e6) for m in (ours, ideas)] == [107, 207]
