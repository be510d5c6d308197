"""hybrid_3d: layouts of all axes equal one process in all forms, and models of others; their bytes
are the docstring's; bugs that are planted in the table show."""
import copy
import gc
import re
import shutil
import subprocess
import sys
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import hybrid_3d
import moe
import tensor_parallel
from amp_accum_ckpt import full
from common import adamw, loss_sum, share
from conftest import (
    GAPS, PROOF, ROOT, SMALL, alone, check_bug_shows, check_dry_runs, check_each, check_equal,
    check_refused, rewritten, run_ranks, run_script, run_tool, textbook,
    with_transformers)
from harness.flags import arguments
from harness.prove import prove
from others import (
    MLP, WIDTH, Llama, bf16_llama, bf16_rows, compare, compare_fp32, joined,
    refuses, token_rows, trained, whole_batch)
from pipeline_parallel import Chain, assert_carves, carve, homes, make_plans, split_layers
from tensor_parallel import (
    ColumnLinear, RowLinear, SequenceParallel, TensorParallel, VocabEmbedding, cut_model, inside,
    key_values, load_full_state_dict)
from tools.ranks import TECHNIQUES

FORMS = {
    "gpt2": ("--layers", "3", "--vocab", "257"),
    "llama": ("--model", "llama-toy", "--layers", "3", "--vocab", "257", "--hidden", "48"),
    "qwen3": ("--model", "qwen3-toy", "--layers", "3", "--vocab", "257", "--hidden", "48"),
}


@pytest.mark.parametrize("form, world, flags", [
    ("gpt2", 8, "--dp 2 --tp 2 --pp 2 --sp --zero 1 --eval-every 1 --warmup 1 --decay cosine"),
    ("llama", 4, "--dp 1 --cp 2 --tp 2 --pp 1 --sp --ckpt full --micro 2"),
    ("gpt2", 4, "--dp 2 --tp 1 --pp 2 --zero 2 --schedule zb-h1 --ckpt selective"),
    ("llama", 4, "--dp 2 --cp 2 --pp 1 --zero 3 --attn allgather --ckpt full --micro 2"),
    ("gpt2", 4, "--dp 1 --cp 2 --tp 1 --pp 2 --zero 1 --attn ring --experts 4 --ep 2 --capacity 1"),
    ("llama", 4, "--tp 2 --pp 1 --sp --zero 2 --experts 4 --shared --balance bias --micro 2"),
    ("gpt2", 4, "--dp 2 --tp 1 --pp 2 --schedule zb-h2 --experts 4 --top-k 1 --balance none"),
    ("llama", 4, "--dp 1 --tp 2 --pp 2 --sp --schedule dualpipe-v --layers 4 --micro 4"),
    ("qwen3", 4, "--tp 4 --pp 1 --zero 1 --schedule zb-h1 --micro 2"),  # 2 heads of keys, values
])
def test_equals_one_process(form, world, flags):
    """A dry run of the last rank measures the same bytes."""
    flags = (*FORMS[form], *flags.split())
    report = check_equal("hybrid_3d", world, *flags)
    textbook(report)
    sent = sum(of_kind["wire"] for of_kind in report["ranks"][0]["collectives"].values())
    assert sum(report["sent"].values()) == sent  # nothing but along an axis
    if "--eval-every" in flags:
        assert len(report["validation"]) == 3  # before the first step, and after each
    if "--zero" in flags and "--experts" not in flags:
        check_dry_runs(report, "hybrid_3d", *PROOF, *flags, ranks=[world - 1])


@pytest.mark.parametrize("flags, tp, pp, data, S", [
    ("--zero 2", 8, 2, 4 + 1, 0), ("--zero 1 --sp", 10, 1, 2, 2 * 2 * 128)])
def test_bytes_are_the_docstrings(flags, tp, pp, data, S):
    """Of a rank in the middle, with two layers and their norms, in fp32."""
    layout = "--model llama-toy --layers 6 --batch 16 --dp 2 --cp 2 --tp 2 --pp 3 --micro 4"
    words = f"{layout} {flags} --dry-run 24 --rank 9".split()
    report, = alone("hybrid_3d", words)
    A = 16 // (2 * 4) * 128 // 2 * 128
    of_layers = 4 * 6 / 3 * A / 2  # M L/pp A (tp-1)/tp
    P, = report["parameters"]["per_rank"]
    norms = 2 * 2 * 128
    wanted = {"tp": tp * of_layers, "pp": 4 * pp * A,
              "cp": 6 * of_layers * 2 / 4,
              "data": (data * (P - norms) + 2 * (norms - S)) * 3 / 4,
              "peers": 2 * S * 7 / 8}
    found = {axis: report["sent"][axis] / 4 for axis in wanted}
    assert found == pytest.approx(wanted, rel=1e-6)


IDEA = ("--vocab", "260", "--impl", "idea")  # tp divides it


@pytest.mark.parametrize("form, world, flags", [
    ("gpt2", 8, "--dp 2 --tp 2 --pp 2"),
    ("qwen3", 4, "--dp 1 --tp 2 --pp 2"),
    ("llama", 4, "--dp 2 --tp 2 --pp 1 --micro 2"),
    ("gpt2", 4, "--dp 2 --tp 1 --pp 2 --eval-every 2"),
])
def test_idea(form, world, flags):
    report = check_equal("hybrid_3d", world, *FORMS[form], *IDEA, *flags.split())
    assert max(report["check"][kind] for kind in GAPS) < 1e-12
    textbook(report)


def test_what_the_technique_adds():
    """The table at the head of part 2."""
    layout = "--dp 2 --tp 2 --pp 2 --dry-run 8 "
    runs = [layout + more for more in ("--impl idea", "", "--zero 1", "--zero 1 --sp")]
    reports = alone("hybrid_3d", *map(str.split, runs))
    ranks = [report["ranks"][0] for report in reports]
    sums = [rank["collectives"]["all_reduce"] for rank in ranks]
    # over tp: without those over data (33, 4), one over ends, and the norm's
    assert [(c["calls"] - data - 2, round(c["wire"] / 1e6, 1)) for c, data in zip(sums, (33, 4))] \
        == [(52, 4.4), (40, 3.5)]
    assert [round(rank["memory"]["peak"] / 1e6, 1) for rank in ranks[1:]] == [6.7, 5.7, 5.2]


def test_table_of_the_docstring():
    """That of text_of shows some lines of what a run prints."""
    flags = "--dry-run 8 --dp 2 --tp 2 --pp 2 --zero 1 --model qwen3-toy".split()
    said = run_tool("hybrid_3d", *flags).splitlines()
    table = re.search(r" +gradient of.*", hybrid_3d.text_of.__doc__, re.S)[0].split("\n")
    shown = [line.strip() for line in table if line.strip()]
    assert len(shown) == 5 and set(shown) <= set(said)


@pytest.mark.parametrize("form, flags, old, new", [
    ("llama", "--tp 2 --pp 1", '"cut": {"tp": "cut"', '"cut": {"tp": "same"'),
    ("llama", "--tp 2 --pp 1", '{"tp": "same"', '{"tp": "cut"'),
    ("llama", "--dp 2 --pp 1", '"tp": "cut", "dp": "sum"', '"tp": "cut", "dp": "cut"'),
    ("gpt2", "--dp 2 --pp 1", '"tp": "same", "dp": "sum"', '"tp": "same", "dp": "same"'),
    ("gpt2", "--tp 1 --pp 2", '{"tp": "cut", "ends": "sum"}', '{"tp": "cut", "ends": "cut"}'),
    ("gpt2", "--tp 1 --pp 2", "        if all(", "        if True or all("),
    ("llama", "--tp 2 --pp 1", "    dist.all_reduce(square)", "    pass"),
    ("llama", "--dp 2 --pp 1", "dist.all_reduce(p.grad", "dict(x=p.grad"),
    ("llama", "--tp 2 --pp 1", 'loss / model.group["tp"].size()', "loss"),
    ("llama", "--dp 2 --pp 1", "model, x, y, valid)\n    sum", "model, x, y, 1)\n    sum"),
])
def test_planted_bugs_in_the_idea(form, flags, old, new):
    flags = (*FORMS[form], *IDEA, *flags.split(), "--micro", "2")
    check_bug_shows("hybrid_3d", 2, *flags, plant=partial(rewritten, old, new))


@pytest.mark.parametrize("flags, more", [
    ("--layers 4", 1), ("--layers 8 --experts 4 --ep 1", 1.01)])
def test_zero_bubble_needs_no_more_memory(flags, more):
    """ZeRO-2 lends a block's gradients their memory in its W, not when B makes those of norms; in
    its B those of experts, which no W makes: there it was 1.09 times as much."""
    layout = "--dp 2 --tp 1 --pp 2 --zero 2 --dry-run 4 --width 64 --micro 2"
    flags = (*SMALL, *layout.split(), *flags.split())
    usual, split = alone("hybrid_3d", flags, (*flags, "--schedule", "zb-h1"))
    peaks = [dry["ranks"][0]["memory"]["peak"] for dry in (usual, split)]
    assert peaks[1] <= more * peaks[0], peaks


@pytest.mark.parametrize("form, flags", [
    ("llama", "--impl torch --dp 1 --tp 2 --pp 2 --sp"),
    ("gpt2", "--impl torch --dp 2 --tp 1 --pp 2 --train attn|norm"),
    ("gpt2", "--dp 2 --tp 1 --pp 2 --zero 1 --train blocks.2|norm"),
    ("gpt2", "--dp 1 --tp 2 --pp 2 --schedule zb-h1 --train attn"),  # the front has no gradients
    ("llama", "--dp 1 --tp 1 --pp 4 --layers 4 --zero 2 --train blocks.2"),  # nor have most stages
    ("gpt2", "--dp 4 --tp 1 --pp 1 --clip 50"),  # more than the norm: nothing is scaled
])
def test_torch_and_frozen_layers_equal_one_process(form, flags):
    check_equal("hybrid_3d", 4, *FORMS[form], *flags.split())


def test_autocast():
    flags = "--dp 1 --tp 2 --pp 2 --sp --schedule zb-h1 --amp bf16".split()
    report = run_script("hybrid_3d", 4, *SMALL, *FORMS["llama"], *flags)
    assert report["check"]["tolerance"] == 2e-2


def test_64_ranks():
    """Every axis."""
    dry = run_script(
        "hybrid_3d", 1, *SMALL, *FORMS["llama"], *"--layers 4 --dp 4 --cp 2 --tp 2 --pp 4 --sp "
        "--zero 1 --experts 4 --ep 4 --batch 16 --dry-run 64 --rank 33".split())
    textbook(dry)
    assert all(dry["sent"][axis] for axis in "data replicas norm pp tp cp ep".split())


@pytest.mark.parametrize("form, flags, old, new", [
    ("llama", "--tp 2 --sp", "summed if tp.cuts_x", "same if tp.cuts_x"),  # not summed
    ("gpt2", "--tp 2", 'same = {"tp": "same"', 'same = {"tp": "cut"'),  # norms count twice
    ("qwen3", "--tp 2", '"inside": summed', '"inside": same'),
    ("llama", "--tp 2 --sp --experts 4", '{"replicas": total', '{"data": total'),
    ("gpt2", "--dp 2 --experts 4",  # different experts are summed, like copies of one
     '"replicas": by_expert.movedim(2, 1).flatten(2)', '"replicas": ranks.flatten(1)'),
    ("gpt2", "--tp 1 --pp 2", "kind(of_zero, self.group[axis]",
     'kind(of_zero, self.group["data"]'),
])
def test_planted_bugs(form, flags, old, new):
    flags = (*FORMS[form], *flags.split(), "--micro", "2")
    check_bug_shows("hybrid_3d", 2, *flags, plant=partial(rewritten, old, new, last=2))


# ---- models that are not ours --------------------------------------------------

T = 8
LLAMA = {
    "embed_tokens": VocabEmbedding, "lm_head": ColumnLinear, "*.[qkv]_proj": ColumnLinear,
    "*.[qk]_norm": inside, "*.o_proj": RowLinear, "*.gate_proj": ColumnLinear,
    "*.up_proj": ColumnLinear, "*.down_proj": RowLinear,
}
DENSE = {name: kind for name, kind in LLAMA.items() if not re.search("gate|up|down", name)}
OF_RESTING = {"*.[kv]_proj": key_values(heads=1), **DENSE}
# its blocks have a second argument
CHAIN = Chain(first=["embed_tokens"], layers="layers", last=["norm", "lm_head"],
              call=lambda forward, x: forward(x, positions=torch.arange(T))["logits"])
ROUTE = partial(moe.softmax_route, top_k=2, normalize=True)


RESTING = {3: 0, 5: 1}  # {layer: the copy that does not use its MLP}


class Rests(nn.Module):
    """An MLP that gets no gradient on one of two copies."""

    def __init__(self, mlp, number):
        super().__init__()
        self.mlp = mlp
        self.resting = RESTING.get(number)
        self.copy = None  # whose rows does it get? None: those of both in turn, see trained()
        self.calls = 0

    def forward(self, x):
        copy = self.calls % 2 if self.copy is None else self.copy
        self.calls += 1
        return torch.zeros_like(x) if copy == self.resting else self.mlp(x)


def make(tied=False, experts=False, rests=False, train=""):
    torch.manual_seed(0)
    sizes = dict(layers=8, kv_heads=1) if rests else dict(layers=4)
    model = Llama(tied=tied, **sizes)
    for number, layer in enumerate(model.layers):
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            nn.init.normal_(norm.weight, 1, 0.1)
        if experts:
            mlps = nn.ModuleList(MLP(0.0) for _ in range(4))
            layer.mlp = moe.PlainMoE(nn.Linear(WIDTH, 4, bias=False), mlps, ROUTE)
        if rests:
            layer.mlp = Rests(layer.mlp, number)
    for name, p in model.named_parameters():
        p.requires_grad_(bool(re.search(train, name)))
    return model


class Mixture(moe.MoE):
    """Its experts have a name of their own."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._modules["bank"] = self._modules.pop("experts")

    experts = property(lambda self: self.bank)


def share_out(model, mesh):
    ep = mesh.group["ep"]
    for layer in model.layers:
        plain = layer.mlp
        mine = [plain.experts[e] for e in share(4, ep.size(), ep.rank())]
        names = "up", "down", "gate"
        linears = {name: [getattr(mlp, f"{name}_proj") for mlp in mine] for name in names}
        layer.mlp = Mixture(plain.router, moe.Experts(F.silu, **linears), ROUTE, ep)


def plain(**kind):
    for loss, gradients, _, state in trained(make(**kind)):
        yield loss, gradients, state


def plan_of(experts=False, rests=False, **_):
    if rests:
        return OF_RESTING
    return DENSE if experts else LLAMA


def wrap(layers, recompute):
    for layer in layers:
        layer.forward = partial(recompute, layer.forward)


def rest(layers, copy):
    for layer in layers:
        if isinstance(layer.mlp, Rests):
            layer.mlp.copy = copy


def change(weight):
    """All begin with the first rank's, which lies in memory otherwise."""
    weight.data += dist.get_rank()
    if dist.get_rank() == 0:
        weight.data = weight.data.t().contiguous().t()


def fill(here, state, tp):
    """A rank gets its stages alone."""
    for stage in here:
        load_full_state_dict(stage, tp, state)
        assert not any(type(t) is nn.Parameter for t in stage.buffers())


def parallel(dp=1, tp=1, ep=1, pp=1, schedule="1f1b", sp=False, zero=0, recompute=None,
             device="cpu", layers=None, **kind):
    with torch.device(device):
        model = make(**kind)
    if kind.get("tied") and device != "meta":
        change(model.lm_head.weight)
    experts = kind.get("experts")
    plans = make_plans(schedule, pp, 4 if kind.get("rests") else 2)
    mesh = hybrid_3d.Mesh(plans, dp=dp, tp=tp, ep=ep)
    ranks = (SequenceParallel if sp else TensorParallel)(mesh.group["tp"])
    if tp > 1:
        cut_model(model, ranks, plan_of(**kind))
    if experts:
        share_out(model, mesh)
    if recompute:
        wrap(model.layers, recompute)
    rest(model.layers, mesh.place["dp"])
    stages = carve(model, CHAIN, layers or split_layers(len(model.layers), len(homes(plans))))
    if device == "meta":
        state = Stacked(make(**kind).state_dict(), mesh)
        fill([stages[stage] for stage in mesh.stages], state, ranks)
    hybrid = hybrid_3d.Hybrid(
        stages, mesh, ranks, layers=model.layers, head=model.lm_head, zero=zero)
    groups = [{"params": [p for p in hybrid.parameters() if (p.dim() == 2) == matrices]}
              for matrices in (True, False)]  # as for other decays
    optimizer = adamw(hybrid.parameter_groups(groups), 1e-2)
    here = set(hybrid.parameters())
    elsewhere = [weakref.ref(p) for p in model.parameters() if p not in here]
    del model, stages
    gc.collect()
    assert all(p() is None for p in elsewhere)  # nothing holds them
    state = hybrid.full_state_dict()
    other = {name: t + 1 for name, t in state.items()}
    ignored = {"lm_head.weight": None} if kind.get("tied") else {}  # it goes by its first name
    assert not ignored.keys() & dict(hybrid.named_parameters()).keys()  # for groups by name
    hybrid.load_full_state_dict({**other, **ignored})
    compare(hybrid.full_state_dict(), other)
    hybrid.load_full_state_dict(state)
    for loss, *found in steps_of(hybrid, optimizer):
        yield loss, *map(by_expert, found)


def steps_of(hybrid, optimizer):
    """Those of others.trained -> after each loss, gradients, the state."""
    copies = hybrid.group["dp"]
    for step in range(2):
        x, y = [t.chunk(copies.size())[copies.rank()] for t in whole_batch(step)]
        loss, _ = hybrid_3d.train_step(hybrid, optimizer, x, y, torch.tensor(1), 0.5)
        dist.all_reduce(loss)
        yield loss, hybrid.full_gradients(), hybrid.full_state_dict()


class Stacked:
    """The plain model's state, read as a rank of ep has it."""

    def __init__(self, state, mesh):
        self.state = state
        self.ep = mesh.group["ep"]

    def __getitem__(self, name):
        if name.endswith("bias_units"):  # a counter, which the plain model has not
            return torch.zeros(4)
        where, bank, which = name.partition(".bank.")
        if not bank:
            return self.state[name]
        mine = share(4, self.ep.size(), self.ep.rank())
        which = which.replace(".", "_proj.")
        return torch.stack([self.state[f"{where}.experts.{e}.{which}"] for e in mine])


def by_expert(tensors):
    """Stacks of `bank` -> the plain model's experts, without counters."""
    named = {name.replace(".bank.", ".experts."): t for name, t in tensors.items()}
    return {re.sub(r"(experts\.\d+\.\w+)", r"\1_proj", name): t
            for name, t in moe.one_by_one(named).items() if t.is_floating_point()}


def check_model(options):
    """fp64 gaps of loss, every gradient and every parameter."""
    known = ("tied", "experts", "rests", "train")
    kind = {name: value for name, value in options.items() if name in known}
    assert prove(partial(plain, **kind), partial(parallel, **options), 1e-12)


def twice(logits, y):
    return 2 * loss_sum(logits, y)


def hybrid_of(model, mesh, tp=None, layers=(4,), **options):
    return hybrid_3d.Hybrid(
        carve(model, CHAIN, layers), mesh, tp or TensorParallel(mesh.group["tp"]),
        layers=model.layers, head=model.lm_head, **options)


def bf16_hybrid(level):
    mesh = hybrid_3d.Mesh(make_plans("1f1b", 1, 4), dp=2)
    return hybrid_of(bf16_llama(), mesh, layers=[2], loss=twice, zero=level,
                     reduce_dtype=torch.float32)


def check_fp32_sums(level):
    """Of bf16 gradients, over micro-batches and copies; and of another loss than the usual one."""
    hybrid = bf16_hybrid(level)
    x, y = joined(bf16_rows()[dist.get_rank()::2])
    optimizer = torch.optim.SGD(hybrid.parameter_groups(), 0.0)
    hybrid_3d.train_step(hybrid, optimizer, x, y, 1, 0)
    compare_fp32(hybrid.full_gradients(), lambda model, x, y: twice(model(x)["logits"], y))


def check_two_models():
    """As for DPO: of one tp, which goes on to know what is cut of both."""
    plans = make_plans("1f1b", 2, 2)
    mesh = hybrid_3d.Mesh(plans, tp=2)
    tp = TensorParallel(mesh.group["tp"])
    hybrids = [hybrid_of(cut_model(make(), tp, LLAMA), mesh, tp, [2, 2]) for _ in range(2)]
    for hybrid in hybrids:
        compare(hybrid.full_state_dict(), make().state_dict())


def all_say(judge):
    """-> what it raises on all ranks together, since each has other parts."""
    said = ""
    try:
        judge()
    except AssertionError as error:
        said = str(error)
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, said)
    return "".join(of_ranks)


def check_sent_first(zero):
    """What a B sends is on its way before the last sum that it has begun is waited for."""
    mesh = hybrid_3d.Mesh(make_plans("1f1b", 1, 2), dp=2)
    hybrid = hybrid_of(make(), mesh, zero=zero)
    events = []
    mail = hybrid.pipeline.mail
    put = mail.put
    mail.put = lambda action, result: (events.append(action), put(action, result))
    ours = hybrid.zeros[-1]  # without what is late
    keep_sum = ours.keep_sum
    ours.keep_sum = lambda unit: (events.append(ours.units.index(unit)), keep_sum(unit))
    inputs, loss_of = hybrid.in_microbatches(*whole_batch(0), 1)
    hybrid.pipeline.step(inputs, loss_of)
    hybrid.pipeline.end_sums()
    assert len(events) == 4 + len(ours.units) * (1 if zero < 2 else 2)
    *_, last = [event for event in events if event in (0, ("B", 1, 0))]
    assert last == 0, events


FORGETFUL = {name: kind for name, kind in LLAMA.items() if kind is not inside}


def check_alike(zero, plan, rows, words):
    """An `inside` that the plan forgets, and rows that differ, show in nothing else."""
    mesh = hybrid_3d.Mesh(make_plans("1f1b", 1, 2), dp=2, tp=2)
    tp = TensorParallel(mesh.group["tp"])
    model = make(train="norm|gate_proj.bias")  # ranks of tp have 11 and 10 numbers of a bias
    hybrid = hybrid_of(cut_model(model, tp, plan), mesh, tp, zero=zero)
    optimizer = adamw(hybrid.parameter_groups(), 1e-2)
    seed = mesh.place["dp"] if rows == "same" else dist.get_rank()
    x, y = token_rows(torch.Generator().manual_seed(seed), 4)
    hybrid_3d.train_step(hybrid, optimizer, x, y, 1, 1.0)
    said = all_say(partial(hybrid_3d.assert_alike, hybrid, x, y))
    assert re.search(words, said), said
    refuses("hybrid_3d.py has its own", tensor_parallel.assert_alike, hybrid, tp)


def check_transformers(block):
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    names = {}
    exec(block, names)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=88, num_hidden_layers=4,
                 num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32)
    normed = Qwen3Config(**sizes, head_dim=8, tie_word_embeddings=True)
    llama = LlamaConfig(**sizes)
    plans = names["PLAN"], {**names["PLAN"], "*.[qk]_norm": inside}
    makes = partial(LlamaForCausalLM, llama), partial(Qwen3ForCausalLM, normed)
    for make, plan, zero in zip(makes, plans, (0, 1)):
        hybrid_of = partial(names["hybrid_of"], plan=plan, dp=1, zero=zero)
        assert prove(partial(plain_transformer, make),
                     partial(train_transformer, make, hybrid_of), 1e-12)


def check_gpt2(block):
    from transformers import GPT2Config, GPT2LMHeadModel

    names = {}
    exec(block, names)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4))
    assert_carves(model, names["CHAIN"], torch.randn(2, 5, 32))
    y = x = torch.arange(10).view(2, 5)
    model.eval()
    for stage in carve(model, names["CHAIN"], [1, 0, 2]):
        y = stage(y)
    torch.testing.assert_close(y, model(x).logits)


def in_fp64(make):
    """Their RMSNorm computes in fp32, where rounding would hide mistakes."""
    torch.manual_seed(0)
    model = make().double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(F.rms_norm, normalized_shape=module.weight.shape,
                                     weight=module.weight, eps=module.variance_epsilon)
    return model


def plain_transformer(make):
    model = in_fp64(make)
    own = dict(model.named_parameters())  # a tied one once
    for loss, gradients, _, state in trained(
            model, loss_of=lambda model, x, y: loss_sum(model(x, use_cache=False).logits, y)):
        yield loss, gradients, {name: state[name] for name in own}


def train_transformer(make, hybrid_of):
    own = dict(in_fp64(make).named_parameters())
    hybrid = hybrid_of(in_fp64(make))
    optimizer = adamw(hybrid.parameter_groups(), 1e-2)
    for loss, gradients, state in steps_of(hybrid, optimizer):
        yield loss, gradients, {name: state[name] for name in own}


def test_models_of_transformers():
    """Their own Llama and Qwen3, by the page's lines."""
    with_transformers(check_transformers, 4, "# LlamaForCausalLM")
    with_transformers(check_gpt2, 1, "# GPT2LMHeadModel")


def test_ten_files_alone(tmp_path):
    """Nothing but torch and the other nine is needed to import it."""
    for name in (*TECHNIQUES, "common"):
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    words = [sys.executable, "-c", "import hybrid_3d; print(hybrid_3d.__file__)"]
    said = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) in said


def check_two_ties():
    """Each keeps its own weight, in whatever order the stages have them."""
    torch.manual_seed(0)
    first = nn.ModuleDict({"words": nn.Embedding(8, 4), "more": nn.Embedding(8, 4)})
    last = nn.ModuleDict({"more_of_head": nn.Linear(4, 8, False), "head": nn.Linear(4, 8, False)})
    last["more_of_head"].weight = first["more"].weight
    last["head"].weight = first["words"].weight
    begun = copy.deepcopy({**first.state_dict(), **last.state_dict()})
    plans = make_plans("1f1b", 2, 2)
    mesh = hybrid_3d.Mesh(plans)
    hybrid = hybrid_3d.Hybrid([first, last], mesh, TensorParallel(mesh.group["tp"]),
                              layers=[], head=last["head"])
    compare(hybrid.full_state_dict(), begun)


def check_vectors_of_experts():
    """They are in a unit, too, and late ones of two dtypes."""
    mesh = hybrid_3d.Mesh(make_plans("1f1b", 1, 2), dp=2, ep=2)
    model = make(experts=True)
    share_out(model, mesh)
    stack = model.layers[0].mlp.bank.up
    stack.scale = nn.Parameter(torch.ones(2))
    model.norm.float()
    hybrid = hybrid_of(model, mesh)
    assert stack.scale in {part.parameter for part in hybrid.parts}


def check_asserts():
    refuses("experts with tp > 1 want SequenceParallel", next, parallel(tp=2, experts=True))
    for refused in hybrid_3d.Hybrid.state_dict, hybrid_3d.Hybrid.load_state_dict:
        with pytest.raises(RuntimeError, match="load_full_state_dict"):
            refused(None, {})
    model = make()
    plans = make_plans("1f1b", 1, 2)
    by_dp = hybrid_3d.Mesh(plans, dp=2)
    alone = TensorParallel(by_dp.group["tp"])
    for mesh, tp, words in [
        (by_dp, TensorParallel(), "tp: of mesh"),
        (hybrid_3d.Mesh(plans, cp=2), alone, "ring: where the mesh has cp"),
    ]:
        refuses(words, hybrid_3d.Hybrid, [model], mesh, tp, layers=[], head=model.lm_head)
    with pytest.raises(AssertionError, match="two stages have a weight"):
        hybrid_3d.table_of([nn.Linear(2, 2), nn.Linear(2, 2)], alone, alone, zero=0)
    norm = nn.ModuleDict({"norm": nn.LayerNorm(2)})
    two = SimpleNamespace(size=2, cuts_x=True, cuts={}, inside=set())
    refuses("norm.weight: tied, but ranks of tp", hybrid_3d.table_of, [norm, norm], two, alone, 0)
    of_norms = hybrid_of(make(train="norm"), by_dp)
    norm = of_norms.stages[0].layers[0].input_norm
    refuses("masters would not know", norm.load_state_dict, norm.state_dict())
    hybrid = bf16_hybrid(0)
    x, y = whole_batch(0)
    inputs, loss_of = hybrid.in_microbatches(x, y, 1)
    hybrid.pipeline.step(inputs, loss_of)
    refuses("copies sum once a step", hybrid.pipeline.step, inputs, loss_of)


@pytest.mark.parametrize("world, check, cases", [
    (8, check_model, [(dict(dp=2, tp=2, pp=2, recompute=full),)]),
    (4, check_model, [
        (dict(dp=2, pp=2, schedule="zb-v", zero=2, tied=True),),
        (dict(tp=2, pp=2, sp=True, zero=1, tied=True),),
        # what one copy does not use: both begin the same sums, in order, before they wait
        (dict(dp=2, pp=2, schedule="interleaved", zero=2, rests=True),),
        (dict(dp=2, pp=2, schedule="zb-v", zero=1, rests=True, train="norm"),),
        (dict(dp=2, tp=2, sp=True, zero=1, rests=True),),
        # ranks of tp have 11 and 10 columns of an MLP, and chunks of other lengths
        (dict(dp=2, tp=2, sp=True, zero=1, train="norm|up_proj.bias"),),
        (dict(dp=2, tp=2, sp=True, zero=1,
              train="^(?!.*(k_proj|down_proj))"),),
        (dict(tp=2, pp=2, schedule="zb-h1", device="meta", tied=True),),
        (dict(dp=2, ep=2, tp=2, sp=True, experts=True),),
        (dict(dp=2, ep=2, pp=2, device="meta", experts=True),)]),
    (2, check_model, [
        # what names would not tell: experts of another name without tp, norms of q and k
        (dict(dp=2, ep=2, zero=1, experts=True),),
        (dict(tp=2),),
        (dict(pp=2, layers=[0, 4]),),
        # two stages on a rank: copies agree on the order of sums
        (dict(dp=2, schedule="interleaved", rests=True),),
        (dict(dp=2, schedule="zb-v", zero=1, rests=True),)]),
    (2, check_fp32_sums, [(0,), (1,), (2,)]),
    (2, check_sent_first, [(0,), (1,), (2,), (3,)]),
    (4, check_two_models, [()]),
    (4, check_alike, [
        (0, LLAMA, "same", "^$"),
        (1, LLAMA, "same", "^$"),  # though ranks of tp have other parts of norms
        (1, FORGETFUL, "same", "[qk]_norm.weight differs"),
        (2, LLAMA, "other", "x differs between ranks")]),
    (2, check_two_ties, [()]),
    (2, check_vectors_of_experts, [()]),
    (2, check_asserts, [()]),
])
def test_models_of_others(world, check, cases):
    run_ranks(check_each, world, check, cases)


EXPERTS = ("--experts", "4", "--balance", "bias")


def test_resume(tmp_path):
    """Of experts, saved on one layout; of all else see test_survival.py's relay."""
    run_script("hybrid_3d", 4, *PROOF, *FORMS["llama"], *EXPERTS, *"--dp 2 --tp 2 --pp 1 --sp "
               "--zero 1 --no-check --save".split(), str(tmp_path))
    report = check_equal("hybrid_3d", 4, *FORMS["llama"], *EXPERTS, *"--dp 2 --tp 1 --pp 2 --ep 1 "
                         "--zero 2 --steps 4 --resume".split(), str(tmp_path))
    assert len(report["loss"]) == 2


REFUSED = """
    --dry-run 8 --dp 2 --tp 2 --pp 1 | --dp 2 x --cp 1 x --tp 2 x --pp 1: their product is not 8
    --dry-run 8 --tp 8 | heads: 4 does not divide into 8 equal parts
    --dry-run 4 --cp 4 --model llama-toy --attn ulysses | values: 2 does not divide into 4 equal
    --dry-run 2 --tp 2 --sp --seq 15 | --seq 15 does not divide into 2 equal parts
    --dry-run 2 --cp 2 --seq 18 | --seq 18 does not divide into 4 equal parts
    --micro 3 | --batch 8 does not divide into 3 equal parts
    --dry-run 8 --pp 8 | --layers 4 for 8 stages
    --dry-run 2 --pp 2 --schedule interleaved --micro 1 | interleaved takes multiples of 2
    --dry-run 2 --pp 2 --zero 3 | right behind its forward: --pp 1 --schedule 1f1b
    --dry-run 2 --tp 2 --experts 4 | its ranks would all route the same tokens; add --sp
    --dry-run 2 --dp 2 --experts 3 | --experts 3 does not divide into 2 equal parts
    --dry-run 2 --dp 2 --experts 3 --ep 3 | dp x cp = 2 does not divide into 3 equal parts
    --shared | --ep, --shared and --capacity are for --experts E
    --impl torch --ckpt selective | --impl torch: takes no --ckpt
    --impl both --zero 2 | --impl both: takes no --zero 2
    --impl idea --zero 1 | --impl idea: takes no --zero
    --impl idea --dry-run 2 --tp 2 --vocab 257 | --impl idea: --tp 2 must divide --vocab
    --impl torch --schedule interleaved | both ends of the model on one rank
"""


def test_refusals():
    lines = [line.split(" | ") for line in REFUSED.strip().splitlines()]
    check_refused("hybrid_3d", lines)


@pytest.mark.parametrize("flags, dp, tp, pp", [
    ("", 2, 2, 2),
    ("--pp 2", 4, 1, 2),
    ("--cp 2 --tp 2", 2, 2, 1),
])
def test_axes_that_are_left_out(flags, dp, tp, pp, monkeypatch):
    monkeypatch.setattr("sys.argv", ["hybrid_3d.py", "--dry-run", "8", *flags.split()])
    args = arguments("", hybrid_3d.FLAGS)
    hybrid_3d.layout(args)
    assert (args.dp, args.tp, args.pp) == (dp, tp, pp)
