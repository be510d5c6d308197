"""hybrid_3d: layouts of all axes equal one process, their bytes are the textbook's, planted bugs
show."""
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn

import hybrid_3d
import pipeline_parallel
from common import GPTConfig
from conftest import ALL, GAPS, PROOF, SMALL, alone, each, proves, run, script, some, textbook
from pipeline_parallel import Boundary, Chain, Pipeline, Stages, make_groups, make_plans
from tensor_parallel import WholeSequence

ODD = ("--layers", "5", "--vocab", "257")


def on(world, flags):
    """A run on so many ranks, with sizes that do not divide evenly."""
    return "hybrid_3d", world, *ODD, *flags.split()


# ---- equal to one process --------------------------------------------------------

HELD_OUT = " --eval-every 1 --warmup 1 --decay cosine"
THREE_AXES = [
    (2, "--dp 1 --tp 2 --pp 1 --ckpt full"),
    (2, "--dp 2 --tp 1 --pp 1 --zero 1"),
    (4, "--dp 1 --tp 2 --pp 2 --schedule gpipe --sp --ckpt full"),
    (4, "--dp 2 --tp 1 --pp 2 --schedule interleaved --ckpt selective"),
    (2, "--dp 1 --tp 1 --pp 2 --schedule zb-h1"),
    (8, "--dp 1 --tp 2 --pp 4 --clip 0"),
]
# every axis, ZeRO stage, attention, --ckpt and --balance; of schedules 1f1b, interleaved and zb-h1
ALL_AXES = [
    (8, "--dp 2 --tp 2 --pp 2 --sp --zero 1" + HELD_OUT),
    (8, "--dp 2 --cp 2 --tp 2 --pp 1 --zero 2 --attn ring"),
    (8, "--dp 1 --cp 2 --tp 2 --pp 2 --sp --attn ulysses"),
    (4, "--dp 2 --cp 2 --tp 1 --pp 1 --zero 3 --ckpt full --attn allgather"),
    (4, "--dp 2 --tp 2 --pp 1 --zero 3 --sp --experts 4" + HELD_OUT),
    (8, "--dp 2 --cp 2 --tp 1 --pp 2 --zero 1 --experts 8 --ep 4 --capacity 1"),
    (8, "--dp 2 --tp 2 --pp 2 --sp --experts 4 --shared --top-k 1 --balance none"),
    (4, "--dp 2 --tp 2 --pp 1 --zero 2 --experts 4 --ep 1 --balance bias --ckpt full"),
    (8, "--dp 4 --tp 1 --pp 2 --zero 2 --experts 4 --ep 2 --schedule interleaved"),
    (4, "--dp 1 --cp 2 --tp 1 --pp 2 --schedule zb-h1 --experts 4 --ckpt selective"),
    (16, "--dp 2 --cp 2 --tp 2 --pp 2 --sp --zero 1 --experts 4 --ep 2"),
    (1, "--dp 1 --tp 1 --pp 1 --experts 4 --shared --zero 3"),
]


def leaves_all_linears_for_w(module):
    """B makes no gradient of a matrix but of the embeddings, which have other numbers of rows."""
    input_gradient = pipeline_parallel.input_gradient

    def watched(edge, grad, later):
        input_gradient(edge, grad, later)
        made = [leaf for leaf, _ in later if leaf.is_leaf and leaf.dim() > 1]
        assert not {len(leaf) for leaf in made} & {16, 32, 64}, [leaf.shape for leaf in made]

    pipeline_parallel.input_gradient = watched


@pytest.mark.parametrize("flags", ["", "--sp"])
def test_w_of_what_tp_cuts_is_apart(flags):
    words = f"--dp 1 --tp 2 --pp 2 --schedule zb-h1 {flags}"
    name, world, *flags = on(4, words)
    report = script(name, world, *PROOF, *flags, plant=leaves_all_linears_for_w)
    assert max(report["check"][gap] for gap in GAPS) <= 1e-10


NO_LAYERS = 2, "--dp 1 --tp 1 --pp 2 --experts 4 --layers-per-stage 0,5"


def test_a_stage_without_layers():
    """In fp32, too, where the plain run is told which experts were chosen."""
    name, world, *flags = on(*NO_LAYERS)
    proves(name, world, *flags)
    script(name, world, *SMALL, *flags)


def same_bytes(dry, real, experts):
    """A dry run's rank measures what the real one does; where tokens choose their experts, all but
    what depends on their choice."""
    if experts:
        for rank in dry, real:
            for kind in "activations", "peak":
                rank["memory"].pop(kind)
            rank["collectives"].pop("all_to_all")
    assert dry == real


def check_bytes(real, *flags):
    """Held, kept and sent along each axis: the textbook's, on every rank, real and dry."""
    textbook(real)
    sent = sum(figures["wire"] for figures in real["ranks"][0]["collectives"].values())
    rows = [row["expected"] for row in real["textbook"] if row["what"].startswith("wire")]
    assert math.isclose(sum(rows), sent)
    if torch.__version__ < (2, 13):
        return  # its fake attention keeps the log-sums of fp64 in fp32: a dry run counts too little
    world = real["world_size"]
    dry_flags = (*flags, "--dry-run", str(world))
    ranks = range(world)
    if not ALL and world > 2:
        ranks = [0, world - 1]  # of the first stage and the last
    reports = alone("hybrid_3d", *((*dry_flags, "--rank", str(rank)) for rank in ranks))
    for rank, dry in zip(ranks, reports):
        textbook(dry)
        same_bytes(dry["ranks"][0], real["ranks"][rank], "--experts" in flags)


COUNTED = some(ALL_AXES[:7] + ALL_AXES[9:11], every=3)


@pytest.mark.parametrize("world, flags", some(THREE_AXES, every=2) + ALL_AXES)
def test_equals_one_process(world, flags):
    name, world, *words = on(world, flags)
    report = proves(name, world, *words)
    if HELD_OUT in flags:
        assert len(report["validation"]) == 3  # before the first step, and after each
    if (world, flags) in COUNTED:
        check_bytes(report, *PROOF, *words)


@pytest.mark.parametrize("world, flags", some([
    (4, "--dp 1 --tp 2 --pp 2"),
    (4, "--dp 2 --tp 1 --pp 2"),
    (2, "--dp 1 --tp 1 --pp 2 --schedule interleaved"),
], every=2))
def test_torch_equals_one_process(world, flags):
    proves(*on(world, flags + " --impl torch"))


@pytest.mark.parametrize("world, flags", some([
    (4, r"--dp 2 --tp 1 --pp 2 --zero 1 --train blocks\.(2|3)|norm"),
    (4, "--dp 2 --tp 2 --pp 1 --sp --zero 3 --train attn|tok"),
    (4, "--dp 1 --cp 2 --tp 1 --pp 2 --experts 4 --train mlp"),
    (4, "--dp 1 --tp 2 --pp 2 --impl torch --train attn|norm"),
    (4, "--dp 2 --tp 1 --pp 2 --impl torch --train tok|blocks.0.*mlp"),
    (2, "--dp 1 --tp 1 --pp 2 --impl torch --train blocks.4"),
], every=2))
def test_frozen_layers(world, flags):
    proves(*on(world, flags))


@pytest.mark.parametrize("world, flags", some([
    (4, "--dp 2 --tp 1 --pp 2 --zero 1"),
    (2, "--dp 1 --cp 2 --tp 1 --pp 1"),
    (4, "--dp 2 --tp 1 --pp 2 --experts 4"),
], every=2))
def test_autocast(world, flags):
    name, world, *flags = on(world, flags)
    report = script(name, world, *SMALL, *flags, "--amp", "bf16")
    assert report["check"]["tolerance"] == 2e-2


def test_choices_in_fp32():
    """The plain model is told what the ranks' tokens have chosen: rounding could choose others."""
    name, world, *flags = on(4, "--dp 1 --tp 2 --pp 2 --sp --experts 4 --capacity 1")
    script(name, world, *SMALL, *flags)


# ---- bytes -----------------------------------------------------------------------


@pytest.mark.parametrize("world, flags", some([
    (4, "--dp 1 --tp 2 --pp 2 --sp"),
    (2, "--dp 2 --tp 1 --pp 1 --zero 1 --dtype bf16"),
    (2, "--dp 1 --tp 1 --pp 2 --schedule interleaved --ckpt selective"),
], every=3))
def test_bytes(world, flags):
    """In fp32; other layouts' bytes are those of the runs that prove themselves."""
    name, world, *flags = on(world, flags)
    real = script(name, world, *SMALL, *flags, "--no-check")
    check_bytes(real, *SMALL, *flags)


def test_175_billion():
    """512 ranks, of which a middle stage's holds 12 layers; here with a batch of 8."""
    dry = script(
        "hybrid_3d", 1, *"--dry-run 512 --dp 8 --tp 8 --pp 8 --model gpt3-175b --batch 8 --micro 1 "
        "--sp --dtype bf16 --rank 200".split())
    textbook(dry)
    assert dry["parameters"]["total"] == 174_604_259_328
    assert dry["parameters"]["per_rank"] == [2_718_922_752]


def test_16_384_ranks():
    """Llama 3's mesh for long sequences, with a layer for each stage."""
    dry = script(
        "hybrid_3d", 1, *"--dry-run 16384 --dp 8 --cp 16 --tp 8 --pp 16 --layers 16 --width 16384 "
        "--heads 128 --seq 131072 --batch 8 --micro 1 --sp --zero 1 --attn allgather --dtype bf16 "
        "--rank 5000".split())
    textbook(dry)


def test_2_048_ranks():
    """DeepSeek-V3's mesh, with a layer for each stage."""
    dry = script(
        "hybrid_3d", 1, *"--dry-run 2048 --dp 128 --tp 1 --pp 16 --layers 16 --width 7168 "
        "--heads 128 --seq 4096 --batch 128 --micro 1 --zero 1 --experts 256 --top-k 8 --ep 64 "
        "--shared --dtype bf16 --rank 1000".split())
    textbook(dry)


def test_flops_are_those_of_the_experts_that_a_token_visits():
    cfg = GPTConfig(layers=3, width=16, heads=2, vocab=97, seq=10)
    L = cfg.layers
    C = cfg.width
    V = cfg.vocab
    T = cfg.seq
    tokens = 8 * T
    mlp = 3 * tokens * L * 16 * C * C
    router = 3 * tokens * L * 2 * C * 4

    def flops(**flags):
        args = {"batch": 8, "experts": 0, "top_k": 2, "shared": False, **flags}
        return hybrid_3d.flops_of_step(cfg, SimpleNamespace(**args))

    plain = 72 * tokens * L * C * C * (1 + T / (6 * C) + V / (12 * L * C))
    assert flops() == pytest.approx(plain)
    assert flops(experts=4, top_k=1) == flops() + router
    assert flops(experts=4, shared=True) == flops() + router + 2 * mlp


def test_the_layers_of_a_stage_in_words():
    """--layers-per-stage may give the ends none: they have the embedding and the head."""
    found = [hybrid_3d.numbers_of(layers) for layers in hybrid_3d.ranges([0, 3, 1])]
    assert found == ["none", "0..2", "3..3"]


# ---- saved and resumed -----------------------------------------------------------


def goes_on(folder, world, flags):
    """Resumed at step 2: losses and parameters of one process that never stopped."""
    report = proves(*on(world, flags), "--steps", "5", "--resume", folder)
    assert len(report["loss"]) == len(report["plain_loss"]) == 3


def test_resume(tmp_path):
    """Saved on one layout, gone on with on others."""
    place = str(tmp_path)
    name, world, *flags = on(8, "--dp 2 --tp 2 --pp 2 --sp --zero 1")
    script(name, world, *PROOF, *flags, "--no-check", "--save", place)
    goes_on(place, 4, "--dp 4 --tp 1 --pp 1 --zero 1")
    goes_on(place, 2, "--dp 1 --tp 2 --pp 1")
    goes_on(place, 1, "--dp 1 --tp 1 --pp 1")
    goes_on(place, 8, "--dp 1 --cp 2 --tp 2 --pp 2 --zero 1")
    goes_on(place, 4, "--dp 2 --cp 1 --tp 2 --pp 1 --sp --zero 3")
    proves(*on(2, "--dp 1 --tp 1 --pp 2"), "--steps", "5", "--resume", place,
           plant=without_optimizer)


def test_resume_with_experts(tmp_path):
    place = str(tmp_path)
    experts = " --experts 4 --balance bias"
    name, world, *flags = on(8, "--dp 1 --cp 2 --tp 2 --pp 2 --zero 1" + experts)
    script(name, world, *PROOF, *flags, "--no-check", "--save", place)
    goes_on(place, 8, "--dp 2 --tp 2 --pp 2 --ep 2 --sp --zero 1" + experts)
    goes_on(place, 2, "--dp 2 --tp 1 --pp 1 --ep 1 --zero 2" + experts)


def test_resume_where_tokens_are_balanced_in_other_company(tmp_path):
    """Steps that were balanced by other micro-batches cannot be replayed: the check starts here."""
    place = str(tmp_path)
    name, world, *flags = on(1, "--dp 1 --tp 1 --pp 1 --experts 4")
    script(name, world, *PROOF, *flags, "--no-check", "--save", place)
    goes_on(place, 2, f"--dp 2 --tp 1 --pp 1 --experts 4 --save {place}")
    # also where both layouts are behind it
    back = script(name, world, *PROOF, *flags, "--steps", "7", "--resume", place)
    assert len(back["plain_loss"]) == 2


MIXED = ("--experts", "4", "--layers", "2", "--batch", "8")


@pytest.mark.parametrize("balance", ["aux", "bias"])
def test_goes_on_from_moe_and_back(balance, tmp_path):
    """There a batch is balanced as a whole, here by micro-batches. A bias does not see that."""
    flags = (*PROOF, *MIXED, "--balance", balance, "--save", str(tmp_path))
    resume = ("--resume", str(tmp_path), "--steps")
    script("moe", 1, *flags)
    there = script("hybrid_3d", 2, *flags, "--dp", "2", "--micro", "4", *resume, "4")
    back = script("moe", 2, *flags, *resume, "6")
    again = script("hybrid_3d", 1, *flags, "--micro", "4", *resume, "8")
    for report in there, back, again:
        assert max(report["check"][gap] for gap in GAPS) <= 1e-10


def test_experts_do_not_go_on_from_plain_mlps(tmp_path):
    script("ddp", 1, *SMALL, "--save", str(tmp_path))
    resume = (*SMALL, "--experts", "4", "--resume", str(tmp_path), "--steps", "3")
    for name in "hybrid_3d", "moe":
        assert "it has plain MLPs" in script(name, 1, *resume, code=2)


def without_optimizer(module):
    """A resumed run starts with fresh AdamW states."""
    begin = module.Run.begin

    def broken(run, sides):
        begin(run, sides)
        for side in sides.values():
            side.optimizer.state.clear()

    module.Run.begin = broken


# ---- planted bugs: each must fail the check ------------------------------------


def tied_not_summed(module):
    """Each stage keeps its own gradient of the tied embedding, which ZeRO-1 then sums over dp."""
    module.Stages.sum_tied_gradients = lambda stages: None


def plant_in_kinds(change, module):
    """A bug in the docstring's table; change: {name: Kind} -> None"""
    right = module.kinds_of_parameters

    def broken(sequence_parallel):
        kinds = right(sequence_parallel)
        change(kinds)
        return kinds

    module.kinds_of_parameters = broken


def norms_not_over_tp(kinds):
    """Norms of sequence parallelism keep each tp rank's own gradient."""
    kinds["norm"].summed.remove("tp")


def norms_count_twice(module):
    """The gradient norm counts norms on every tp rank."""
    holders = module.Hybrid.holders

    def broken(hybrid, p):
        if "norm" in hybrid.names[p]:
            return holders(hybrid, p) / hybrid.tp.size
        return holders(hybrid, p)

    module.Hybrid.holders = broken


def norms_of_another_kind(kinds):
    """Norms, which every tp rank has whole, are said to be cut."""
    kinds["norm"].alike.remove("tp")


def test_a_kind_that_contradicts_what_tp_cut_is_refused():
    plant = partial(plant_in_kinds, norms_of_another_kind)
    said = script(*on(2, "--dp 1 --tp 2 --pp 1"), *PROOF, plant=plant, code=1)
    assert "norm1.weight is cut over tp and of a kind that is whole, or the other way round" in said


def router_counts_ep_times(kinds):
    kinds["router"].alike[:] = ["replicas", "tp"]


def experts_not_over_tp(kinds):
    kinds["expert"].summed.remove("tp")


def plant_in_mesh(change, module):
    """A bug in who belongs to which group; change: Mesh -> None"""
    make = module.Mesh.__init__

    def broken(mesh, *sizes):
        make(mesh, *sizes)
        change(mesh)

    module.Mesh.__init__ = broken


def experts_over_data(mesh):
    """Different experts are summed, like copies of one."""
    mesh.group["replicas"] = mesh.group["data"]


def dense_not_over_cp(mesh):
    """Each part of a sequence keeps its own gradients."""
    mesh.group["data"] = mesh.group["tp"]


def own_balance(mesh):
    """Each rank balances the experts by its own tokens' choices."""
    mesh.group["stage"] = mesh.group["tp"]


def whole_positions(module):
    """All ranks of cp take the positions of the first."""
    module.context_parallel.cut_positions = lambda embedding, ring: None


def mean_over_micro(module):
    """Every micro-batch is divided by its own valid targets."""
    loss_sum = module.loss_sum

    def broken(logits, targets):
        return loss_sum(logits, targets) / (targets >= 0).sum() * targets.numel()

    module.loss_sum = broken


@pytest.mark.parametrize("plant, world, flags", [
    (tied_not_summed, 4, "--dp 2 --tp 1 --pp 2 --zero 1"),
    (partial(plant_in_kinds, norms_not_over_tp), 2, "--dp 1 --tp 2 --pp 1 --sp"),
    (norms_count_twice, 2, "--dp 1 --tp 2 --pp 1"),
    (partial(plant_in_kinds, router_counts_ep_times), 2, "--dp 2 --tp 1 --pp 1 --experts 4"),
    (partial(plant_in_kinds, experts_not_over_tp), 2, "--dp 1 --tp 2 --pp 1 --experts 4"),
    (partial(plant_in_mesh, experts_over_data), 2, "--dp 2 --tp 1 --pp 1 --experts 4"),
    (partial(plant_in_mesh, dense_not_over_cp), 2, "--dp 1 --cp 2 --tp 1 --pp 1"),
    (partial(plant_in_mesh, own_balance), 2, "--dp 2 --tp 1 --pp 1 --experts 4"),
    (whole_positions, 2, "--dp 1 --cp 2 --tp 1 --pp 1"),
    (mean_over_micro, 1, "--dp 1 --tp 1 --pp 1"),
])
def test_planted(plant, world, flags):
    proves(*on(world, flags), plant=plant)


# ---- in your own code ------------------------------------------------------------


class Mixture(nn.Module):
    """A router and experts in one module, which their gradients' sums tell apart."""

    def __init__(self):
        super().__init__()
        self.router = nn.Parameter(torch.randn(5, 2))
        self.experts = nn.Parameter(torch.randn(2, 5, 5))

    def forward(self, x):
        gates = (x @ self.router).softmax(-1)
        return torch.einsum("nd,edf,ne->nf", x, self.experts, gates)


def kind_of(name):
    if "experts" in name:
        return "expert"
    if "tied" in name:
        return "embedding"
    return "norm"  # whole on every rank of tp


def hybrid(layers, pp, blocks, shared=(), **options):
    """-> Hybrid, its Pipeline. layers: those of all stages, one each; blocks: numbers of those
    that ZeRO holds together; shared: the stages that a tied parameter is in."""
    mesh = hybrid_3d.Mesh(dp=torch.distributed.get_world_size() // pp, pp=pp, ep=1)
    plans = make_plans("1f1b", pp, 4)
    groups = make_groups(plans, shared, mesh.pipelines, mesh.group["pp"])
    stages = Stages([Chain([layer]) for layer in layers], plans, groups)
    of_stages = {}
    for number, stage in stages.here.items():
        if number in blocks:
            of_stages[number] = list(stage.values())
    model = hybrid_3d.Hybrid(
        stages, of_stages, kind_of, mesh, WholeSequence(mesh.group["tp"]),
        partial(torch.optim.SGD, lr=0.1), **options)
    boundary = Boundary((2, 5), torch.float64, "cpu")
    pipeline = Pipeline(stages.here, plans, groups, boundary,
                        model.before_backward, model.after_backward)
    return model, pipeline


def check_own_code(zero):
    """The docstring's lines train somebody's model as one process does."""
    torch.manual_seed(0)
    layers = [("first", nn.Linear(5, 5)), ("second", nn.Linear(5, 5))]
    plain = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    for layer, (_, other) in zip(plain, layers):
        layer.load_state_dict(other.state_dict())
    x = torch.randn(4 * 2 * 2, 5)  # 4 micro-batches of 2 rows of 2 copies
    loss = plain(x).square().sum()
    loss.backward()
    want = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()

    model, pipeline = hybrid(layers, 2, [0, 1], zero_stage=zero)
    rows = x.chunk(2)[model.mesh.place["dp"]]
    model.zero_grad()
    pipeline.step(rows.split(2), lambda out, m: out.square().sum())
    hybrid_3d.sum_gradients(model)
    norm = hybrid_3d.gradient_norm(model)
    torch.testing.assert_close(norm, want)
    hybrid_3d.step(model, norm, 0.5)
    for part in model.parts():
        number = model.mesh.place["pp"]
        name = model.names[part.parameter].split(".")[1]
        whole = getattr(plain[number], name).flatten()
        run = slice(part.first, part.first + part.size)
        torch.testing.assert_close(part.shard[:part.size], whole[run].detach())


def test_own_code():
    run(each, 4, check_own_code, [(0,), (1,), (2,)])


class Tied(nn.Module):
    """Uses its parameter only if it is told to."""

    def __init__(self, tied):
        super().__init__()
        self.tied = tied
        self.bias = nn.Parameter(torch.zeros(5))
        self.uses = True

    def forward(self, x):
        if self.uses:
            x = x * self.tied
        return x + self.bias


def check_a_stage_that_does_not_use_what_is_tied(zero):
    """In the second step the second stage does not: what the first has of the gradient counts."""
    torch.manual_seed(0)
    tied = nn.Parameter(torch.randn(5))
    ours = [("first", Tied(tied)), ("second", Tied(tied))]
    model, pipeline = hybrid(ours, 2, [], [(0, 1)], zero_stage=zero)
    plain_tied = nn.Parameter(tied.detach().clone())
    plain = nn.Sequential(Tied(plain_tied), Tied(plain_tied))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    x = torch.randn(4, 2, 5)
    for uses in (True, False):
        ours[1][1].uses = uses
        plain[1].uses = uses
        optimizer.zero_grad()
        plain(x).square().sum().backward()
        optimizer.step()
        model.zero_grad()
        pipeline.step(list(x), lambda out, m: out.square().sum())
        hybrid_3d.sum_gradients(model)
        hybrid_3d.step(model, hybrid_3d.gradient_norm(model), 0)
        torch.testing.assert_close(tied, plain_tied)


def test_a_stage_that_does_not_use_what_is_tied():
    run(each, 2, check_a_stage_that_does_not_use_what_is_tied, [(0,), (1,)])


def check_models_that_are_refused():
    """Their gradients would be summed over the wrong ranks, or stepped twice."""
    with pytest.raises(ValueError, match="moe.router, moe.experts are in one module"):
        hybrid([("moe", Mixture())], 1, [0])
    with pytest.raises(ValueError, match="moe.router, moe.experts are in one module"):
        hybrid([("moe", Mixture())], 1, [])
    stage = nn.Sequential(nn.Linear(5, 5))
    stage.gain = nn.Parameter(torch.ones(5))
    mesh = hybrid_3d.Mesh()
    plans = make_plans("1f1b", 1, 1)
    stages = Stages([stage], plans)
    with pytest.raises(ValueError, match="0.weight is in a block and in an edge"):
        hybrid_3d.Hybrid(stages, {0: [stage[0]]}, kind_of, mesh,
                         WholeSequence(mesh.group["tp"]), partial(torch.optim.SGD, lr=0.1))


def test_models_that_are_refused():
    run(check_models_that_are_refused, 1)
