import contextlib
import copy
import functools
import math
import textwrap
import types
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import others
import tensor_parallel
from common import GPTConfig, adamw, build, freeze, loss_sum
from conftest import (
    PROOF,
    SMALL,
    alone,
    copied,
    dry_run_agrees,
    each,
    proves,
    run,
    script,
    some,
    textbook,
)
from tensor_parallel import (
    ColumnLinear,
    Cut,
    CutSequence,
    Inside,
    InsideDropout,
    OutsideDropout,
    Pending,
    ReduceFromTP,
    RowLinear,
    VocabEmbedding,
    WholeSequence,
    clip_gradients,
    cut_model,
    cuts,
    evaluate,
    extent,
    full_gradients,
    full_state_dict,
    gradient_norm,
    key_value_linear,
    outside,
    parallelize,
    partial_parameters,
    shard,
    sum_gradients,
    train_step,
    unshard,
    vocab_parallel_cross_entropy,
    without_padding,
)

SP = ["--sp"]
ODD = ["--heads", "6", "--width", "24", "--seq", "15"]
SOME_FROZEN = ["--train", r"blocks\.1\.|norm1", "--vocab", "257"]
KINDS = [(WholeSequence,), (CutSequence,)]


# ---- the program: equal to one process ---------------------------------------------


@pytest.mark.parametrize("world, flags", [
    (1, []),
    (3, ODD),
    (3, [*ODD, *SP]),
    (4, ["--vocab", "257"]),
    (4, ["--vocab", "257", *SP]),
    (2, ["--vocab", "257", "--impl", "torch"]),
    (2, ["--vocab", "257", "--impl", "torch", *SP]),
])
def test_equals_one_process(world, flags):
    proves("tensor_parallel", world, *flags)


@pytest.mark.parametrize("flags", [[], SP, ["--impl", "torch"]])
def test_frozen_layers_rates_and_held_out_text_equal_one_process(flags):
    rates = ["--warmup", "1", "--decay", "cosine"]
    report = proves("tensor_parallel", 2, *SOME_FROZEN, *rates, "--eval-every", "1", *flags)
    if "torch" not in flags:
        textbook(report)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder in which 4 ranks with a cut sequence have left a checkpoint."""
    folder = str(tmp_path_factory.mktemp("saved"))
    flags = [*PROOF, "--vocab", "257", "--no-check", "--save", folder]
    script("tensor_parallel", 4, *flags, *SP)
    return folder


@pytest.mark.parametrize("world, flags", [
    (2, []), (1, SP), (2, ["--impl", "torch"]),
])
def test_goes_on_from_a_checkpoint_of_another_layout(world, flags, saved):
    resumed = ["--vocab", "257", "--steps", "4", "--resume", saved]
    report = proves("tensor_parallel", world, *resumed, *flags)
    assert len(report["loss"]) == 2


def test_bf16():
    textbook(script("tensor_parallel", 2, *SMALL, "--dtype", "bf16"))


def test_both_times_both():
    sizes = ["--layers", "1", "--width", "32"]
    report = script("tensor_parallel", 2, "--steps", "4", *sizes, "--impl", "both")
    assert report["speedup"] > 0
    textbook(report)


# ---- what it costs: the docstring's table ------------------------------------------

# conftest's SMALL
B = 8
T = 16
C = 32


@pytest.mark.parametrize("world, flags", some([
    (1, []),
    (2, []),
    (4, []),
    (2, SP),
    (4, SP),
    (2, SOME_FROZEN),
    (2, [*SP, *SOME_FROZEN]),
    (2, ["--train", "pos|blocks.0.mlp.down.bias"]),
    (2, [*SP, "--train", "pos|blocks.0.mlp.down.bias"]),
    (2, [*SP, "--train", "blocks.1.attn.out.weight"]),
], every=2))
def test_cost(world, flags):
    flags = ["--vocab", "257", *flags]
    textbook(dry_run_agrees("tensor_parallel", world, *flags, ranks=[world - 1]))


LAYOUTS = [(1,), (2,), (4,), (2, *SP), (4, *SP)]


@functools.cache
def of_blocks():
    """Dry runs of two blocks and of three -> {layout: the figures of both}"""
    runs = []
    for world, *flags in LAYOUTS:
        dry = ["--dry-run", str(world), "--width", "32", "--heads", "4", "--seq", "16", *flags]
        runs += [(*dry, "--layers", "2"), (*dry, "--layers", "3")]
    figures = [report["ranks"][0] for report in alone("tensor_parallel", *runs)]
    pairs = zip(figures[::2], figures[1::2])
    return dict(zip(LAYOUTS, pairs))


def of_a_block(*layout):
    """A third block is what is added to two -> calls, bytes sent, bytes that autograd keeps."""
    two, three = of_blocks()[layout]
    calls = {}
    sent = 0
    for kind, figures in three["collectives"].items():
        before = two["collectives"][kind]
        calls[kind] = figures["calls"] - before["calls"]
        sent += figures["wire"] - before["wire"]
    kept = three["memory"]["activations"] - two["memory"]["activations"]
    return calls, sent, kept


@pytest.mark.parametrize("tp", [2, 4])
def test_a_block(tp):
    x = 4 * B * T * C
    calls, sent, kept = of_a_block(tp)
    assert calls == {"all_reduce": 4}
    assert sent == 8 * x * (tp - 1) / tp
    # mean and 1/std of two LayerNorms; attention's log-sum-exp, of the heads here
    statistics = 4 * (4 * B * T + B * T * 4 / tp)
    assert kept - statistics == 4 * x + 12 * x / tp


@pytest.mark.parametrize("tp", [2, 4])
def test_a_block_of_a_cut_sequence(tp):
    x = 4 * B * T * C
    calls, sent, kept = of_a_block(tp, "--sp")
    # gradients of two norms (4 C) and two row biases (2 C), in the step's one all-reduce
    norms = 2 * 4 * 6 * C * (tp - 1) / tp
    assert calls == {"all_gather": 6, "reduce_scatter": 4, "all_reduce": 0}
    assert sent == 10 * x * (tp - 1) / tp + norms
    assert kept == of_a_block(1)[2] / tp


def test_no_rank_has_whole_logits():
    """Three numbers per token are sent for the loss: 50,000 more words cost no byte more."""
    flags = "--dry-run", "4", "--layers", "1", "--vocab"
    reports = alone("tensor_parallel", (*flags, "256"), (*flags, "50256"))
    few, many = [report["ranks"][0] for report in reports]
    assert few["collectives"] == many["collectives"]
    kept = many["memory"]["activations"] - few["memory"]["activations"]
    assert kept == 4 * 8 * 128 * 50000 / 4  # the logits, cut


def test_gpt3_dry():
    """A slice of 2 of 96 layers, for time's sake. All: 174.6e9 parameters, 21.8e9 of them here."""
    report = script("tensor_parallel", 1, "--dry-run", "8", "--model", "gpt3-175b", "--layers", "2")
    textbook(report)
    total = report["parameters"]["total"]
    [own] = report["parameters"]["per_rank"]
    per_layer = 12 * 12288 ** 2 + 13 * 12288
    whole = 6 * 12288  # numbers of a layer that are not cut
    assert total + 94 * per_layer == 174_604_259_328
    assert own + 94 * (per_layer - whole) // 8 + 94 * whole == 21_831_757_824


class HostReads(TorchDispatchMode):
    """Counts the reads of a tensor's value by the host, each of which waits for the device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return operation(*args, **(kwargs or {}))


def check_no_host_reads(kind):
    tp = kind()
    model = parallelize(build(GPTConfig(2, 8, 2, 257, 4), 0, dtype=torch.float64), tp)
    optimizer = adamw(model.parameters(), 1e-3)
    x = torch.arange(8).view(2, 4)
    with HostReads() as reads:
        train_step(model, optimizer, x, x, 8, 1.0, tp)
    assert reads.count == 0
    with reads:
        x.sum().item()
    assert reads.count == 1


def test_the_host_waits_for_nothing_in_a_step():
    run(each, 2, check_no_host_reads, KINDS)


# ---- section 1 on models of others -------------------------------------------------


def same_everywhere(make, *args, **keywords):
    torch.manual_seed(0)
    return make(*args, **keywords)


class LlamaAttention(others.LlamaAttention):
    """Takes T from q instead of x, which may be cut."""

    def forward(self, x):
        q = others.heads_of(self.q_proj(x), self.head_dim)
        k = others.heads_of(self.k_proj(x), self.head_dim)
        v = others.heads_of(self.v_proj(x), self.head_dim)
        angles = others.rotary(q.shape[2], self.head_dim, q)
        q = others.rotated(q, angles)
        k = others.rotated(k, angles)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(others.joined(y))


def llama_plan(module, kv_heads):
    """module: tensor_parallel, or the copy of its section 1."""
    return {
        "embed_tokens": module.VocabEmbedding,
        "layers.*.self_attn.q_proj": module.ColumnLinear,
        "layers.*.self_attn.k_proj": module.key_value_linear(kv_heads),
        "layers.*.self_attn.v_proj": module.key_value_linear(kv_heads),
        "layers.*.self_attn.o_proj": module.RowLinear,
        "layers.*.mlp.gate_proj": module.ColumnLinear,
        "layers.*.mlp.up_proj": module.ColumnLinear,
        "layers.*.mlp.down_proj": module.RowLinear,
        "lm_head": module.ColumnLinear,
    }


def llama(kv_heads, attention=LlamaAttention):
    model = others.Llama(layers=2, width=12, heads=4, kv_heads=kv_heads, head_dim=4, hidden=19)
    for layer in model.layers:
        layer.self_attn = attention(width=12, heads=4, kv_heads=kv_heads, head_dim=4)
    return model


def check_copy(kind, kv_heads, tied):
    """Section 1 alone, on a Llama: grouped queries, RMSNorm, SwiGLU, no biases, odd sizes."""
    section = copied("tensor_parallel")
    tp = getattr(section, kind)()
    attention = LlamaAttention if kind == "CutSequence" else others.LlamaAttention
    plain = same_everywhere(llama, kv_heads, attention)
    if tied:
        plain.lm_head.weight = plain.embed_tokens.weight
    model = section.cut_model(copy.deepcopy(plain), tp, llama_plan(section, kv_heads))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    rng = torch.Generator().manual_seed(0)
    for _ in range(3):
        tokens, targets = others.token_rows(rng, rows=3, T=8)
        for optimizer in optimizers:
            optimizer.zero_grad()
        others.llama_loss(plain, tokens, targets).backward()
        logits = model(tokens)["logits"]
        section.vocab_parallel_cross_entropy(logits, targets, others.VOCABULARY).backward()
        section.sum_gradients(model, tp)
        norm = section.gradient_norm(model, tp)
        want = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        torch.testing.assert_close(norm, want, rtol=1e-10, atol=0)
        section.clip_gradients(model, norm, 1.0)
        compare_gradients(plain, section.full_gradients(model, tp))
        for optimizer in optimizers:
            optimizer.step()
    compare(section.full_state_dict(model, tp), plain.state_dict())


class Embedded(nn.Module):
    """Has the names of the docstring's plan."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(6, 7), "down": nn.Linear(7, 6)})
                                    for _ in range(2))
        self.head = nn.Linear(6, 11)

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer["down"](F.gelu(layer["up"](x)))
        return self.head(x)


def check_usage():
    """The docstring's lines for code of one's own, with section 1 and torch alone."""
    lines = tensor_parallel.__doc__.split("a vocabulary of V:\n\n")[1]
    lines = lines.replace("...}", '"head": ColumnLinear}')
    plain = same_everywhere(Embedded)
    x, y = token_batch()
    known = vars(copied("tensor_parallel"))
    known.update(model=copy.deepcopy(plain), group=None, x=x, y=y, V=11, valid=y.numel())
    exec(textwrap.dedent(lines), known)
    F.cross_entropy(plain(x).flatten(0, 1), y.flatten()).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    compare_gradients(plain, known["full_gradients"](known["model"], known["tp"]))


def test_the_docstrings_usage():
    run(check_usage, 2)


def compare_gradients(plain, gradients):
    compare(gradients, {name: p.grad for name, p in plain.named_parameters()})


def compare(tensors, wanted):
    """Every one, by name; those that are None in `wanted` may not be there."""
    names = {name for name, want in wanted.items() if want is not None}
    assert tensors.keys() == names
    for name in names:
        gap = (tensors[name] - wanted[name]).abs().max().item()
        assert gap < 1e-10, f"{name}: {gap}"


@pytest.mark.parametrize("world, cases", [
    (2, [(2, True), (1, False)]),
    (4, [(2, False)]),
])
def test_the_copy_trains_a_llama(world, cases):
    kinds = ["WholeSequence", "CutSequence"]
    run(each, world, check_copy, [(kind, *case) for kind in kinds for case in cases])


class Net(nn.Module):
    """An embedding, a Linear pair with any activation between them, a norm, a head."""

    def __init__(self, activation, hidden=7, vocab=11, padding_idx=None, dropout=0.0, bias=True):
        super().__init__()
        self.words = nn.Embedding(vocab, 6, padding_idx=padding_idx)
        self.up = nn.Linear(6, hidden, bias=bias)
        self.inner_norm = nn.Identity()
        self.activation = activation
        self.drop_inside = nn.Dropout(dropout)
        self.down = nn.Linear(hidden, 6, bias=bias)
        self.drop_outside = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, vocab, bias=bias)

    def forward(self, tokens):
        x = self.words(tokens)
        y = self.drop_inside(self.activation(self.inner_norm(self.up(x))))
        x = x + self.drop_outside(self.down(y))
        return self.head(self.norm(x))


NET = {
    "words": VocabEmbedding,
    "up": ColumnLinear,
    "down": RowLinear,
    "norm": outside,
    "head": ColumnLinear,
}
DROPOUTS = {"drop_inside": InsideDropout, "drop_outside": OutsideDropout}


def token_batch(vocab=11):
    rng = torch.Generator().manual_seed(1)
    x = torch.randint(vocab, (3, 12), generator=rng)
    y = torch.randint(vocab, (3, 12), generator=rng)
    return x, y


def train(plain, model, tp, steps=3):
    """Both models, the same steps; each gradient, norm and parameter is compared."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    x, y = token_batch()
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(plain(x).flatten(0, 1), y.flatten(), reduction="sum").backward()
        vocab_parallel_cross_entropy(model(x), y, 11, tp.group).backward()
        sum_gradients(model, tp)
        norm = gradient_norm(model, tp)
        want = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        torch.testing.assert_close(norm, want, rtol=1e-10, atol=0)
        clip_gradients(model, norm, 1.0)
        compare_gradients(plain, full_gradients(model, tp))
        for optimizer in optimizers:
            optimizer.step()
    compare(full_state_dict(model, tp), plain.state_dict())


def square_root(x):
    return x.abs().sqrt()  # its slope at 0 is infinite


def check_activations(kind):
    """Those that are not 0 at 0, where the hidden size does not divide."""
    tp = kind()
    for activation in torch.sigmoid, F.softplus, torch.cos, square_root:
        plain = same_everywhere(Net, activation)
        train(plain, cut_model(copy.deepcopy(plain), tp, NET), tp)


def test_padding_gets_no_gradient_from_any_activation():
    run(each, 3, check_activations, KINDS)


def check_computed_padding():
    """A planted bug: if padding is computed with, the check above must fail."""
    tensor_parallel.without_padding = lambda p, cut, tp: p
    with pytest.raises(AssertionError):
        check_activations(WholeSequence)


def test_padding_that_is_computed_with_shows():
    run(check_computed_padding, 2)


def check_padding_idx():
    tp = WholeSequence()
    for padding_idx in 0, 4, 10:
        plain = same_everywhere(Net, F.gelu, padding_idx=padding_idx)
        model = cut_model(copy.deepcopy(plain), tp, NET)
        train(plain, model, tp)
        gradient = full_gradients(model, tp)["words.weight"]
        assert not gradient[padding_idx].any()


def test_padding_idx_gets_no_gradient():
    run(check_padding_idx, 3)


class TrainingNorm(nn.LayerNorm):
    """A norm that does nothing but in training."""

    def forward(self, x):
        if not self.training:
            return x
        return super().forward(x)


def check_mode_inside():
    """What stands inside follows train() and eval(), also when it was cut in eval()."""
    x = torch.ones(2, 6)
    net = same_everywhere(Net, F.gelu, hidden=6)
    net.inner_norm = TrainingNorm(6)
    model = cut_model(net.eval(), WholeSequence(), {**NET, "inner_norm": Inside})
    assert model.inner_norm(x) is x
    model.train()
    assert model.inner_norm(x) is not x
    model.eval()
    assert model.inner_norm(x) is x


def test_a_module_inside_follows_train_and_eval():
    run(check_mode_inside, 2)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(4)
        self.drop = nn.Dropout(0.5)
        self.down = nn.Linear(8, 6)

    def forward(self, x):
        y = self.norm(self.up(x).unflatten(-1, (-1, 4))).flatten(-2)
        return self.down(self.drop(F.gelu(y)))


class CutMLP(MLP):
    """A kind of one's own, which puts several cut modules in the place of one."""

    def __init__(self, plain, tp):
        nn.Module.__init__(self)
        self.up = ColumnLinear(plain.up, tp)
        self.norm = Inside(plain.norm, tp)
        self.drop = InsideDropout(plain.drop, tp)
        self.down = RowLinear(plain.down, tp)


def check_own_kind():
    """It needs no names for what it has made, and each part keeps its mode."""
    tp = WholeSequence()
    plain = nn.Sequential(same_everywhere(MLP)).eval()
    plain[0].up.train()
    model = cut_model(copy.deepcopy(plain), tp, {"0": CutMLP})
    assert [part.training for part in model[0].children()] == [True, False, False, False]
    x = torch.arange(18.0).view(3, 6).sin()
    for net in plain, model:
        net(x).square().sum().backward()
    compare_gradients(plain, full_gradients(model, tp))
    model.train()
    assert model[0].drop.training


def test_a_kind_of_ones_own():
    run(check_own_kind, 2)


def check_all_cut():
    """No norm, bias or buffer: ranks hold nothing alike that could be compared."""
    tp = WholeSequence()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 4, bias=False))
    model = cut_model(copy.deepcopy(plain), tp, {"0": ColumnLinear, "1": RowLinear})
    compare(full_state_dict(model, tp), plain.state_dict())


def test_a_model_that_is_all_cut():
    run(check_all_cut, 2)


class PairNorm(nn.Module):
    """Normalizes each pair of numbers, as some models do it with each head's q."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(2)

    def forward(self, x):
        return self.norm(x.unflatten(-1, (-1, 2))).flatten(-2)


def check_norm_inside(kind):
    """A norm of the hidden units would be cut; one of each pair of them is used inside, whole."""
    tp = kind()
    plain = same_everywhere(Net, F.gelu, hidden=8)
    plain.up = nn.Sequential(nn.Linear(6, 8))
    plain.inner_norm = PairNorm()
    plan = {**NET, "up.0": ColumnLinear, "inner_norm.norm": Inside}
    del plan["up"]
    train(plain, cut_model(copy.deepcopy(plain), tp, plan), tp)


def test_a_norm_inside_gets_the_gradient_of_all_ranks():
    run(each, 2, check_norm_inside, KINDS)


def check_frozen(kind):
    """What is frozen stays as it is and has no gradient; the others' are the plain model's."""
    tp = kind()
    for pattern in "up", "down", "words|bias", "norm", "head.weight":
        plain = same_everywhere(Net, torch.sigmoid)
        freeze(plain, pattern)
        model = cut_model(copy.deepcopy(plain), tp, NET)
        train(plain, model, tp)
        for name, p in model.named_parameters():
            assert p.requires_grad == plain.get_parameter(name).requires_grad


def test_frozen_parameters():
    run(each, 2, check_frozen, KINDS)


def check_deepcopy():
    """A copy of a cut model, such as a moving average of its weights, is cut over the same ranks.

    They are two of three.
    """
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return
    tp = WholeSequence(group)
    plain = same_everywhere(Net, F.gelu)
    model = cut_model(copy.deepcopy(plain), tp, NET)
    average = torch.optim.swa_utils.AveragedModel(model)
    compare(full_state_dict(average.module, tp), plain.state_dict())
    again = copy.deepcopy(model)
    assert set(cuts(again).values()) == set(cuts(model).values())
    assert not set(cuts(again)) & set(cuts(model))
    train(plain, again, tp)


def test_a_deepcopy_is_cut_too():
    run(check_deepcopy, 3)


def check_autocast(kind):
    """As the plain model under autocast: the same dtypes, values to what bf16 can tell apart."""
    tp = kind()
    plain = same_everywhere(Net, F.gelu, hidden=8).float()
    model = cut_model(copy.deepcopy(plain), tp, NET)
    x, y = token_batch()
    with torch.autocast("cpu", torch.bfloat16):
        want = plain(x)
        logits = model(x)
        loss = vocab_parallel_cross_entropy(logits, y, 11)
    assert logits.dtype == want.dtype == torch.bfloat16
    F.cross_entropy(want.float().flatten(0, 1), y.flatten(), reduction="sum").backward()
    loss.backward()
    sum_gradients(model, tp)
    gradients = full_gradients(model, tp)
    for name, p in plain.named_parameters():
        assert gradients[name].dtype == p.grad.dtype == torch.float32
        gap = (gradients[name] - p.grad).norm() / p.grad.norm()
        assert gap < 0.02, f"{name}: {gap}"


def test_autocast():
    run(each, 2, check_autocast, KINDS)


# ---- dropout


def check_dropout(kind):
    """Copies stay equal; masks of cut things differ, of whole ones they do not."""
    tp = kind()
    torch.manual_seed(0)
    model = cut_model(same_everywhere(Net, F.gelu, dropout=0.4), tp, {**NET, **DROPOUTS})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = token_batch()
    for _ in range(3):
        optimizer.zero_grad()
        vocab_parallel_cross_entropy(model(x), y, 11).backward()
        sum_gradients(model, tp)
        optimizer.step()
    table = cuts(model)
    for name, p in model.named_parameters():
        if p not in table:
            assert len(distinct(p, tp)) == 1, name
    ones = torch.ones(40)
    assert len(distinct(model.drop_inside(ones), tp)) == tp.size
    expected = tp.size if kind is CutSequence else 1
    assert len(distinct(model.drop_outside(ones), tp)) == expected
    assert not InsideDropout(nn.Dropout(1.0), tp)(ones).any(), "at a rate of 1 all is 0"
    many = model.drop_inside(torch.ones(100_000))
    assert abs(many.mean().item() - 1) < 0.02
    assert set(many.unique().tolist()) == {0.0, 1 / 0.6}
    model.eval()
    assert model.drop_inside(ones) is ones
    evaluated = same_everywhere(Net, F.gelu, dropout=0.4).eval()
    evaluated = cut_model(evaluated, tp, {**NET, **DROPOUTS})
    assert evaluated.drop_inside(ones) is ones, "cut in eval(), it must stay in eval()"


def distinct(t, tp):
    """The different values that ranks have of a tensor."""
    parts = [torch.empty_like(t) for _ in range(tp.size)]
    dist.all_gather(parts, t.detach())
    return {tuple(part.flatten().tolist()) for part in parts}


def test_dropout_keeps_copies_equal():
    run(each, 2, check_dropout, KINDS)


def check_dropout_again():
    """A checkpointed forward draws the same mask when it runs again."""
    tp = WholeSequence()
    torch.manual_seed(0)
    model = cut_model(same_everywhere(Net, F.gelu, dropout=0.4), tp, {**NET, **DROPOUTS})
    x, y = token_batch()
    gradients = []
    for forward in model, functools.partial(checkpoint, model, use_reentrant=False):
        model.zero_grad()
        torch.manual_seed(1)
        vocab_parallel_cross_entropy(forward(x), y, 11).backward()
        gradients.append(full_gradients(model, tp))
    compare(*gradients)


def test_dropout_under_checkpointing():
    run(check_dropout_again, 2)


# ---- what is refused


def keep_matmuls(context, operation, *args, **keywords):
    if operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def check_kept_summands():
    """g writes into what a matmul has made: whoever has kept that must hear of it."""
    tp = WholeSequence()
    model = cut_model(same_everywhere(Net, F.gelu), tp, NET)
    x, y = token_batch()
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_matmuls)
    logits = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
    with refused(RuntimeError, "mutated"):
        vocab_parallel_cross_entropy(logits, y, 11).backward()
    kept = torch.ones(2, 3, requires_grad=True).exp()  # whose backward reads it
    with refused(RuntimeError, "modified by an inplace operation"):
        ReduceFromTP.apply(kept, tp).sum().backward()


def test_a_summand_that_was_kept_raises():
    run(check_kept_summands, 2)


@contextlib.contextmanager
def refused(kind, *words):
    with pytest.raises(kind) as caught:
        yield
    for word in words:
        assert word in str(caught.value), str(caught.value)


def check_refused_changes():
    """A module that does more than its kind: what stands in its place would not do it."""
    tp = WholeSequence()
    with refused(TypeError, "of its own"):
        ColumnLinear(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), tp)
    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda module, inputs, y: 2 * y)
    with refused(TypeError, "hooks"):
        RowLinear(hooked, tp)
    masked = nn.Linear(4, 4)
    masked.weight.register_hook(lambda gradient: 0 * gradient)
    with refused(TypeError, "hooks"):
        ColumnLinear(masked, tp)
    watched = nn.Linear(4, 4)
    watched.register_full_backward_hook(lambda module, dx, dy: None)
    with refused(TypeError, "hooks"):
        ColumnLinear(watched, tp)
    changed = nn.Linear(4, 4)
    changed.forward = types.MethodType(nn.Identity.forward, changed)
    with refused(TypeError, "of its own"):
        ColumnLinear(changed, tp)
    wrapped = nn.Linear(4, 4)
    wrapped.forward = functools.partial(nn.Linear.forward, wrapped)
    with refused(TypeError, "of its own"):
        RowLinear(wrapped, tp)
    for dropout in nn.Dropout1d(0.1), nn.Dropout2d(0.1), nn.AlphaDropout(0.1):
        with refused(TypeError, type(dropout).__name__, "take an nn.Dropout"):
            InsideDropout(dropout, tp)


def check_refusals():
    tp = WholeSequence()
    with refused(ValueError, "called nowhere.*"):
        cut_model(Net(F.gelu), tp, {"nowhere.*": ColumnLinear})
    with refused(TypeError, "LayerNorm"):
        cut_model(Net(F.gelu), tp, {"norm": ColumnLinear})
    for option in "max_norm", "scale_grad_by_freq", "sparse":
        with refused(ValueError, option):
            VocabEmbedding(nn.Embedding(4, 4, **{option: 1}), tp)
    with refused(ValueError, "3 heads of k and v on 2 ranks"):
        key_value_linear(3)(nn.Linear(4, 6), tp)
    with refused(TypeError, "Inside"):
        Inside(nn.BatchNorm1d(4), tp)
    dropping = nn.LayerNorm(4)
    dropping.dropout = 0.1
    with refused(ValueError, "dropout is 0.1"):
        Inside(dropping, tp)
    with refused(ValueError, "7 positions"):
        CutSequence().reduce(torch.zeros(2, 7, 4))
    for columns in 4, 7:  # 6 are right
        with refused(ValueError, "columns of logits"):
            targets = torch.zeros(3, dtype=torch.int64)
            vocab_parallel_cross_entropy(torch.zeros(3, columns), targets, 11)


def check_refused_models():
    tp = WholeSequence()
    with refused(ValueError, "norm", "two patterns"):
        cut_model(same_everywhere(Net, F.gelu), tp, {**NET, "nor*": outside})
    tied = same_everywhere(Net, F.gelu, bias=False)
    tied.head.weight = tied.words.weight
    with refused(ValueError, "words.weight and head.weight"):
        cut_model(tied, tp, {"words": VocabEmbedding})
    unnamed = {**NET}
    del unnamed["norm"]
    with refused(ValueError, "norm has parameters", "Inside"):
        cut_model(same_everywhere(Net, F.gelu), tp, unnamed)
    with refused(ValueError, "drop_inside drops 0.1", "OutsideDropout"):
        cut_model(same_everywhere(Net, F.gelu, dropout=0.1), tp, NET)
    functional = same_everywhere(Net, F.gelu)
    functional.attention_dropout = 0.1
    with refused(ValueError, "attention_dropout is 0.1"):
        cut_model(functional, tp, NET)
    pooled = same_everywhere(Net, F.gelu)
    pooled.mixer = nn.Sequential(nn.Conv1d(6, 6, 3))
    with refused(ValueError, "mixer.0 (Conv1d)", "WholeSequence"):
        cut_model(pooled, CutSequence(), {**NET, "mixer.0": outside})
    three_heads = build(GPTConfig(1, 6, 3, 11, 4), 0)
    with refused(ValueError, "3 heads do not divide over 2 ranks"):
        parallelize(three_heads, tp)


def check_refused_ranks():
    """What ranks hold alike must be alike when it begins, also where one of them thinks it is."""
    tp = WholeSequence()
    torch.manual_seed(tp.rank)
    with refused(ValueError, "is not the same on all ranks"):
        cut_model(Net(F.gelu), tp, NET)
    mlp = nn.Sequential(nn.Linear(4, 8, bias=False), nn.GELU(), nn.Linear(8, 4, bias=False))
    with refused(ValueError, "0.weight is not the same on all ranks"):  # of which nothing is whole
        cut_model(mlp, tp, {"0": ColumnLinear, "2": RowLinear})
    with refused(TypeError, "replaces an nn.Linear, but this GELU"):
        cut_model(nn.Sequential(nn.GELU()), tp, {"0": ColumnLinear})
    with refused(ValueError, "default generator"):
        net = same_everywhere(Net, F.gelu, dropout=0.4)
        torch.manual_seed(tp.rank)
        cut_model(net, tp, {**NET, **DROPOUTS})
    one = same_everywhere(Net, F.gelu)
    one.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool))
    if tp.rank == 1:
        one.mask[3, 3] = False
    with refused(ValueError, "mask is not the same"):
        cut_model(one, tp, NET)


def check_second_derivatives():
    """Each function of ours raises, or a model with others between them would be silently wrong."""
    tp = WholeSequence()
    x = torch.ones(3, 4, requires_grad=True)
    linear = ColumnLinear(nn.Linear(4, 4), tp)
    targets = torch.zeros(3, dtype=torch.int64)
    results = [linear(x), ReduceFromTP.apply(x + 1, tp), tp.inside(x),
               vocab_parallel_cross_entropy(x, targets, 8)]
    for y in results:
        with refused(RuntimeError, "create_graph"):
            torch.autograd.grad(y.sum(), x, create_graph=True)
    later = []
    with tp.defer_weights(later):
        y = linear(x)
    y.sum().backward()
    with refused(RuntimeError, "create_graph"):
        torch.autograd.backward(*zip(*later), create_graph=True)


def test_second_derivatives_are_refused():
    run(check_second_derivatives, 2)


def check_all_refusals():
    check_refused_changes()
    check_refusals()
    check_refused_models()
    check_refused_ranks()


def test_what_cannot_be_right_is_refused():
    run(check_all_refusals, 2)


# ---- the parts, on their own -------------------------------------------------------


def check_loss():
    """F.cross_entropy itself, in fp64 and bf16, with huge logits, ignored targets, empty ranks."""
    cases = [(8, torch.float64, 1), (7, torch.float64, 1e4), (2, torch.float64, 1)]
    cases.append((8, torch.bfloat16, 1))
    for vocab, dtype, scale in cases:
        torch.manual_seed(0)
        logits = (scale * torch.randn(2, 5, vocab)).to(dtype)
        ignored = torch.tensor([0, 1, 0, 0, 1], dtype=torch.bool)
        targets = torch.randint(vocab, (2, 5)).masked_fill_(ignored, -100)
        compare_loss(logits, targets)
        compare_loss(logits, targets.masked_fill(ignored, 1), ignore_index=1)


def compare_loss(logits, targets, **options):
    """Values and gradients, of cut logits with and without padding."""
    vocab = logits.shape[-1]
    plain = logits.detach().requires_grad_()
    wide = plain.to(torch.promote_types(logits.dtype, torch.float32))
    want = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="sum", **options)
    want.backward()
    tp = WholeSequence()
    cut = Cut(2, vocab)
    padded = shard(logits.detach(), cut, tp)
    for mine in padded.clone(), without_padding(padded, cut, tp).clone():
        mine.requires_grad_()
        got = vocab_parallel_cross_entropy(mine, targets, vocab, **options)
        got.backward()
        torch.testing.assert_close(got, want)
        wanted = shard(plain.grad, cut, tp)[..., :mine.shape[-1]]
        torch.testing.assert_close(mine.grad, wanted)


def check_infinite_logits():
    """Where all logits of a rank are -inf, as under a mask, the others' have the whole softmax."""
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 8)
    targets = torch.full((2, 5), 7)
    logits[..., :4] = -math.inf  # all of rank 0's
    compare_loss(logits, targets)
    targets[0, 0] = 0  # itself at -inf: the loss is infinite
    compare_loss(logits, targets)


def check_targets_out_of_range():
    logits = torch.randn(3, math.ceil(7 / dist.get_world_size()))
    for target in 7, 8, 1000, -1, -99:
        targets = torch.tensor([0, target, 6])
        with pytest.raises(IndexError):
            F.cross_entropy(torch.randn(3, 7), targets)
        with pytest.raises(IndexError):
            vocab_parallel_cross_entropy(logits, targets, 7)


def check_shards():
    """A shard and its cut make the whole again; no rank has more than the first."""
    tp = WholeSequence()
    for shape, dim in ((3, 7), 0), ((7, 3), 1), ((8, 5), 0), ((1, 5), 0), ((5,), 0):
        torch.manual_seed(0)
        whole = torch.randn(shape)
        cut = Cut(dim, shape[dim])
        piece = shard(whole, cut, tp)
        assert piece.is_contiguous()
        assert piece.shape[dim] == math.ceil(shape[dim] / tp.size)
        assert without_padding(piece, cut, tp).shape[dim] == len(extent(cut, tp))
        torch.testing.assert_close(unshard(piece, cut, tp), whole, rtol=0, atol=0)


def check_embedding():
    torch.manual_seed(0)
    plain = nn.Embedding(7, 4)
    tp = CutSequence()
    mine = VocabEmbedding(plain, tp)
    ids = torch.randint(7, (2, 12))
    got = mine(ids)
    want = plain(ids)
    torch.testing.assert_close(got, want.chunk(tp.size, 1)[tp.rank])
    torch.testing.assert_close(mine(ids[0]), want[0].chunk(tp.size, 0)[tp.rank])  # without B
    got.square().sum().backward()
    want.square().sum().backward()
    gradient = unshard(mine.weight.grad, mine.cuts["weight"], tp)
    torch.testing.assert_close(gradient, plain.weight.grad)
    for wrong in 7, 8, 100, -1:
        with pytest.raises(IndexError):
            mine(torch.tensor([0, wrong, 0]))


def check_parts():
    check_loss()
    check_infinite_logits()
    check_targets_out_of_range()
    check_shards()
    check_embedding()


@pytest.mark.parametrize("world", [2, 3])
def test_loss_shards_and_embedding(world):
    run(check_parts, world)


def check_whole_parameters(kind):
    """Who is cut, and of whose gradient there is a summand only, is known by parameter."""
    tp = kind()
    model = parallelize(build(GPTConfig(2, 8, 2, 257, 4), 0), tp)
    names = {p: name for name, p in model.named_parameters()}
    cut = {names[p] for p in cuts(model)}
    whole = set(names.values()) - cut
    assert len(whole) == 6 * 2 + 2
    assert all("norm" in name or name.endswith(("out.bias", "down.bias")) for name in whole)
    assert cuts(model)[model.tok.weight] == Cut(0, 257)
    assert cuts(model.blocks[1])[model.blocks[1].mlp.down.weight] == Cut(1, 32)
    partial = {names[p] for p in partial_parameters(model, tp)}
    assert partial == (whole if kind is CutSequence else set())
    assert model.head.weight is model.tok.weight


def test_cuts_are_known_by_parameter():
    run(each, 2, check_whole_parameters, KINDS)


def check_evaluate():
    """The ranks' parts add up to the plain sum; no graph is kept."""
    tp = WholeSequence()
    plain = build(GPTConfig(1, 8, 2, 257, 4), 0, dtype=torch.float64)
    model = parallelize(copy.deepcopy(plain), tp)
    x = torch.arange(8).view(2, 4)
    part = evaluate(model, x, x, tp)
    assert not part.requires_grad
    torch.testing.assert_close(tp.size * part, loss_sum(plain(x), x).detach())


def test_evaluate():
    run(check_evaluate, 2)


# ---- weights later


def check_later(kind):
    """B alone gives dx; what it leaves in `later` gives the gradients of the weights."""
    tp = kind()
    plain = same_everywhere(llama, 1).layers[0]
    layer = cut_model(copy.deepcopy(plain), tp, layer_plan())
    plain.mlp.up_proj.requires_grad_(False)
    layer.mlp.up_proj.requires_grad_(False)
    x = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(0)).requires_grad_()
    plain(x).square().sum().backward()
    part = x.detach()  # what this rank has of x
    want = x.grad
    if kind is CutSequence:
        part = part.chunk(tp.size, 1)[tp.rank]
        want = want.chunk(tp.size, 1)[tp.rank]
    part.requires_grad_()
    later = []
    with tp.defer_weights(later):
        y = layer(part)
    assert tp.later is None
    leaves = [part, *(p for p in layer.parameters() if p.requires_grad)]
    dx, *made = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
    torch.testing.assert_close(dx, want)
    for p, gradient in zip(leaves[1:], made):
        p.grad = gradient
    columns = [m.weight for m in layer.modules() if isinstance(m, ColumnLinear)]
    assert len(later) == 4  # q, k, v and gate; up is frozen
    assert all(p.grad is None for p in columns)
    torch.autograd.backward(*zip(*later))
    sum_gradients(layer, tp)
    compare_gradients(plain, full_gradients(layer, tp))


def layer_plan():
    """llama_plan's part for one layer alone."""
    whole = llama_plan(tensor_parallel, kv_heads=1)
    return {name[len("layers.*."):]: kind for name, kind in whole.items() if "layers" in name}


def test_weights_later():
    run(each, 2, check_later, KINDS)


# ---- collectives that are under way


class SlowWork:
    """A collective that reads its tensor as late as it may: when it is waited for."""

    def __init__(self, reads):
        self.reads = reads

    def wait(self):
        assert self.reads() is not None, "freed while a collective reads it"


def test_what_a_collective_reads_lives_until_the_wait():
    reads = torch.zeros(3)
    pending = Pending(torch.ones(3), SlowWork(weakref.ref(reads)), reads)
    seen = weakref.ref(reads)
    del reads
    assert seen() is not None
    assert pending.wait().sum() == 3
    assert seen() is None  # not longer than that


# ---- planted bugs: each must fail the check ----------------------------------------


def f_without_all_reduce(module):
    """Every rank goes on with its own part of the gradient."""
    backward = module.ColumnParallel.backward

    def broken(ctx, *dys):
        ctx.tp = types.SimpleNamespace(gather=ctx.tp.gather, reduce=module.Pending)
        return backward(ctx, *dys)

    module.ColumnParallel.backward = staticmethod(broken)


def row_bias_on_every_rank(module):
    def forward(self, y):
        return module.ReduceFromTP.apply(F.linear(y, self.used("weight"), self.bias), self.tp)

    module.RowLinear.forward = forward


def norms_not_summed(module):
    module.sum_gradients = lambda model, tp: None


def highest_not_shared(module):
    """Each rank subtracts the maximum of its own columns."""
    all_reduce = dist.all_reduce

    def broken(x, op=dist.ReduceOp.SUM, *args, **kwargs):
        if op == dist.ReduceOp.MAX:
            return None
        return all_reduce(x, op, *args, **kwargs)

    module.dist = types.SimpleNamespace(**{**vars(dist), "all_reduce": broken})


def replicated_counted_on_each_rank(module):
    """The norm's all-reduce adds up what every rank has whole, too."""
    def broken(model, tp):
        square = nn.utils.get_total_norm([p.grad for p in model.parameters()]).square()
        dist.all_reduce(square)
        return square.sqrt()

    module.gradient_norm = broken


def not_gathered_again(module):
    """Weight gradients are made from this rank's own positions, tp times."""
    backward = module.ColumnParallel.backward

    def broken(ctx, *dys):
        tp = ctx.tp

        def gather(x):
            return module.Pending(x.repeat(1, tp.size, 1))

        ctx.tp = types.SimpleNamespace(gather=gather, reduce=tp.reduce)
        return backward(ctx, *dys)

    module.ColumnParallel.backward = staticmethod(broken)


def padding_not_masked(module):
    """The head makes a logit for the padding, and the loss counts it."""
    loss = module.vocab_parallel_cross_entropy

    def broken(logits, targets, vocab, group):
        return loss(logits, targets, vocab + 1, group)

    module.without_padding = lambda p, cut, tp: p
    module.vocab_parallel_cross_entropy = broken


def tie_cut(module):
    """The head goes its own way."""
    parallelize = module.parallelize
    gradients = module.full_gradients

    def broken(model, tp):
        model = parallelize(model, tp)
        model.head.weight = nn.Parameter(model.tok.weight.detach().clone())
        return model

    def without_head(model, tp):
        found = gradients(model, tp)
        del found["head.weight"]
        return found

    module.parallelize = broken
    module.full_gradients = without_head


@pytest.mark.parametrize("plant, flags", [
    (f_without_all_reduce, []),
    (row_bias_on_every_rank, []),
    (norms_not_summed, SP),
    (highest_not_shared, []),
    (replicated_counted_on_each_rank, []),
    (not_gathered_again, SP),
    (tie_cut, []),
    (padding_not_masked, ["--vocab", "257"]),
])
def test_planted(plant, flags):
    proves("tensor_parallel", 2, *flags, plant=plant)
