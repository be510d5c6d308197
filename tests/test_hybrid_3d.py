"""hybrid_3d: layouts of all axes equal one process in both forms, their bytes are the textbook's,
bugs that are planted in the table show."""



import pytest
import torch
import torch.distributed as dist

import context_parallel
import hybrid_3d
import moe
import pipeline_parallel
from common import IGNORE, PRESETS, adamw, build, loss_sum
from conftest import (
    PROOF, SMALL, alone, check_refused, each, proves, run, script, some, textbook)

FORMS = {
    "gpt2": ("--layers", "3", "--vocab", "257"),
    "llama": ("--model", "llama-toy", "--layers", "3", "--vocab", "257", "--hidden", "48"),
}

# ---- equal to one process --------------------------------------------------------

LAYOUTS = [
    (8, "--dp 2 --tp 2 --pp 2 --sp --zero 1 --eval-every 1 --warmup 1 --decay cosine"),
    (8, "--dp 1 --cp 2 --tp 2 --pp 2 --sp --ckpt full"),
    (4, "--dp 2 --tp 1 --pp 2 --zero 2 --schedule zb-h1 --ckpt selective"),
    (4, "--dp 2 --cp 2 --tp 1 --pp 1 --zero 3 --attn allgather --ckpt full"),
    (8, "--dp 2 --cp 2 --tp 1 --pp 2 --zero 1 --attn ring --experts 4 --ep 2 --capacity 1"),
    (4, "--dp 2 --tp 2 --pp 1 --sp --zero 2 --experts 4 --shared --balance bias"),
    (4, "--dp 1 --tp 2 --pp 2 --schedule interleaved --layers 4 --micro 2"),
    (4, "--dp 2 --tp 1 --pp 2 --schedule zb-h1 --experts 4 --ep 1 --top-k 1 --balance none"),
]
IN_BOTH_FORMS = []  # one after the other, so that every second one is of the other form
for i, layout in enumerate(LAYOUTS):
    forms = ["gpt2", "llama"]
    if i % 2:
        forms.reverse()
    IN_BOTH_FORMS += [(form, *layout) for form in forms]


@pytest.mark.parametrize("form, world, flags", some(IN_BOTH_FORMS, every=2))
def test_equals_one_process(form, world, flags):
    report = proves("hybrid_3d", world, *FORMS[form], *flags.split())
    textbook(report)
    if "--eval-every" in flags:
        assert len(report["validation"]) == 3  # before the first step, and after each


@pytest.mark.parametrize("form, world, flags", some([
    ("llama", 4, "--dp 1 --tp 2 --pp 2 --sp"),
    ("gpt2", 4, "--dp 2 --tp 1 --pp 2"),
    ("gpt2", 4, "--dp 1 --tp 2 --pp 2 --train attn|norm"),
], every=2))
def test_torch_equals_one_process(form, world, flags):
    proves("hybrid_3d", world, *FORMS[form], "--impl", "torch", *flags.split())


def test_frozen_layers():
    proves("hybrid_3d", 4, *FORMS["gpt2"], *"--dp 2 --tp 1 --pp 2 --zero 1".split(),
           "--train", r"blocks\.2|norm")


def test_autocast():
    flags = "--dp 1 --tp 2 --pp 2 --sp --schedule zb-h1 --amp bf16".split()
    report = script("hybrid_3d", 4, *SMALL, *FORMS["llama"], *flags)
    assert report["check"]["tolerance"] == 2e-2


# ---- the table, in one world -----------------------------------------------------

CFG = PRESETS["toy"]._replace(layers=2, width=16, heads=4, vocab=32, seq=8, kv_heads=4, hidden=64)
CFGS = {
    "gpt2": CFG,
    "llama": PRESETS["llama-toy"]._replace(
        layers=2, width=16, heads=4, vocab=32, seq=8, kv_heads=2, hidden=24),
}
MICRO = 2
SIZES = {"dp": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1}


def batch():
    """-> inputs, targets (8, T), how many of these are valid"""
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(CFG.vocab, (8, CFG.seq), generator=rng)
    y = torch.randint(CFG.vocab, (8, CFG.seq), generator=rng)
    y[::3, 5:] = IGNORE
    return x, y, (y != IGNORE).sum()


def plain_of(form, experts):
    model = build(CFGS[form], 0, "cpu", torch.float64)
    if experts:
        moe.mixture(model, 0, CFGS[form], experts=experts, top_k=2, balance="none")
    return model


def train_plain(form, experts):
    """-> loss, norm, {name: gradient}, {name: tensor} after a step in one process"""
    model = plain_of(form, experts)
    optimizer = adamw(model.parameters(), 1e-3)
    x, y, valid = batch()
    loss = loss_sum(model(x), y) / valid
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach(), norm, gradients, model.state_dict()


def hybrid(form, experts, schedule, plant, options, sizes):
    """-> Hybrid, laid out on so many ranks. plant(kinds, mesh): puts in a bug"""
    plans = pipeline_parallel.make_plans(schedule, sizes["pp"], MICRO)
    home = pipeline_parallel.homes(plans)
    layers = pipeline_parallel.split_layers(CFG.layers, len(home))
    mesh = hybrid_3d.Mesh(**sizes, ends=(home[0], home[len(home) - 1]))
    kinds = hybrid_3d.kinds_of_parameters(options.get("sp", False))
    if plant:
        plant(kinds, mesh)
    tokens = CFG.seq // sizes["cp"]
    if options.get("sp"):
        tokens //= sizes["tp"]
    boundary = (8 // sizes["dp"] // MICRO, tokens, CFG.width), torch.float64, "cpu"
    right = hybrid_3d.kinds_of_parameters
    hybrid_3d.kinds_of_parameters = lambda sp: kinds
    try:
        return hybrid_3d.parallelize(
            plain_of(form, experts), mesh, plans, layers, boundary,
            attend=context_parallel.Zigzag, **options)
    finally:
        hybrid_3d.kinds_of_parameters = right


def train_hybrid(model, sum_gradients):
    """The same step -> loss, norm, {name: gradient}, {name: tensor}"""
    mesh = model.mesh
    optimizer = adamw(model.parameter_groups(), 1e-3)
    x, y, valid = batch()
    x = x.chunk(mesh.size["data"] // mesh.size["cp"])[mesh.place["dp"]]
    y = y.chunk(mesh.size["data"] // mesh.size["cp"])[mesh.place["dp"]]
    if mesh.size["cp"] > 1:
        own = context_parallel.Zigzag(mesh.group["cp"]).positions(CFG.seq)
        x = x[:, own]
        y = y[:, own]
    model.zero_grad()
    inputs, loss_of = hybrid_3d.in_microbatches(model, x, y, valid)
    loss = torch.as_tensor(model.pipeline.step(inputs, loss_of) / model.tp.size)
    sum_gradients(model)
    norm = hybrid_3d.gradient_norm(model)
    gradients = hybrid_3d.full_gradients(model)
    hybrid_3d.step(model, optimizer, norm, 0.5)
    dist.all_reduce(loss)
    return loss, norm, gradients, hybrid_3d.full_state_dict(model)


def worst_gap(ours, plain):
    """Of loss, norm, gradients and parameters, in parts of the largest number of each."""
    gaps = []
    for mine, want in zip(ours, plain):
        if not isinstance(want, dict):
            mine = {"": mine}
            want = {"": want}
        assert mine.keys() == want.keys()
        largest = max(t.abs().max() for t in want.values())
        gaps += [(mine[name] - t).abs().max() / largest for name, t in want.items()]
    return max(gaps).item()


def sum_plainly(model):
    hybrid_3d.sum_gradients_plainly(model)
    for flat in model.flats:
        flat.filled.clear()  # else ZeRO would say that it has not summed them


def check(form, sizes, options, schedule="1f1b", experts=0, plant=None, plainly=False):
    model = hybrid(form, experts, schedule, plant, options, {**SIZES, **sizes})
    sum_gradients = hybrid_3d.sum_gradients
    if plainly:
        sum_gradients = sum_plainly
        model.pipeline.before = None
        model.pipeline.after = None
    gap = worst_gap(train_hybrid(model, sum_gradients), train_plain(form, experts))
    if plant:
        assert gap > 1e-5, f"the planted bug shows only {gap}"
    else:
        assert gap < 1e-12, gap


def test_the_table_executed_plainly():
    run(each, 4, check, [
        ("gpt2", {"tp": 2, "pp": 2}, {"sp": True}, "1f1b", 0, None, True),
        ("llama", {"dp": 2, "cp": 2}, {}, "1f1b", 4, None, True),
    ])


def test_schedules():
    run(each, 4, check, [
        ("gpt2", {"dp": 2, "pp": 2}, {"zero": 1}, "bfs"),
        ("llama", {"dp": 2, "pp": 2}, {"zero": 2}, "zb-h2"),
    ])


def both_ends_keep_their_own(kinds, mesh):
    kinds["tied"].summed.remove("ends")


def norms_not_over_tp(kinds, mesh):
    kinds["outside"].summed.remove("tp")
    kinds["outside"].same.append("tp")


def norms_count_twice(kinds, mesh):
    kinds["outside"].same.remove("tp")


def experts_not_over_tp(kinds, mesh):
    kinds["expert"].summed.remove("tp")
    kinds["expert"].same.append("tp")


def experts_over_data(kinds, mesh):
    """Different experts are summed, like copies of one."""
    mesh.group["replicas"] = mesh.group["data"]


def dense_not_over_cp(kinds, mesh):
    """Each part of a sequence keeps its own gradients."""
    mesh.group["data"] = mesh.group["tp"]


def test_planted_bugs():
    tied = both_ends_keep_their_own
    run(each, 4, check, [
        ("gpt2", {"dp": 2, "pp": 2}, {"zero": 1}, "1f1b", 0, tied),
        ("llama", {"dp": 2, "tp": 2}, {"sp": True}, "1f1b", 0, norms_not_over_tp),
        ("gpt2", {"dp": 2, "tp": 2}, {}, "1f1b", 0, norms_count_twice),
        ("llama", {"dp": 2, "ep": 2, "tp": 2}, {"sp": True}, "1f1b", 4, experts_not_over_tp),
        ("gpt2", {"dp": 4, "ep": 2}, {}, "1f1b", 4, experts_over_data),
        ("llama", {"cp": 2, "dp": 2}, {}, "1f1b", 0, dense_not_over_cp),
    ])


def check_wrong_kind():
    with pytest.raises(AssertionError, match="norm1.weight: another kind?"):
        check("gpt2", {"tp": 2}, {}, plant=norms_are_cut)


def norms_are_cut(kinds, mesh):
    kinds["outside"] = kinds["matrix"]


def test_a_kind_that_contradicts_what_tp_cut():
    run(check_wrong_kind, 2)


def mean_over_micro(module):
    """Every micro-batch is divided by its own valid targets."""
    right = module.loss_sum

    def broken(logits, targets):
        return right(logits, targets) / (targets >= 0).sum() * targets.numel()

    module.loss_sum = broken


def positions_of_the_first(module):
    """All ranks of cp take the positions of the first."""
    module.context_parallel.count_as = lambda model, ring: None


@pytest.mark.parametrize("plant, form, world, flags", [
    (mean_over_micro, "gpt2", 1, "--micro 2"),
    (positions_of_the_first, "llama", 2, "--dp 1 --cp 2 --tp 1 --pp 1"),
])
def test_planted_in_the_script(plant, form, world, flags):
    proves("hybrid_3d", world, *FORMS[form], *flags.split(), plant=plant)


# ---- bytes -----------------------------------------------------------------------


@pytest.mark.parametrize("form, world, flags", some([
    ("gpt2", 8, "--dp 2 --tp 2 --pp 2 --sp --zero 1"),
    ("llama", 4, "--dp 2 --tp 1 --pp 2 --zero 2 --dtype bf16"),
    ("llama", 4, "--dp 2 --cp 2 --tp 1 --pp 1 --zero 3 --ckpt full"),
], every=2))
def test_a_dry_run_measures_the_same(form, world, flags):
    flags = (*SMALL, *FORMS[form], *flags.split())
    real = script("hybrid_3d", world, *flags, "--no-check")
    textbook(real)
    ranks = (0, world - 1)  # of the first stage and the last
    words = (*flags, "--dry-run", str(world), "--rank")
    for rank, dry in zip(ranks, alone("hybrid_3d", *((*words, str(rank)) for rank in ranks))):
        textbook(dry)
        assert dry["ranks"][0] == real["ranks"][rank]


def test_64_ranks():
    """Every axis; all that is sent but the norm and the experts' rows has a row."""
    dry = script(
        "hybrid_3d", 1, *SMALL, *FORMS["llama"], *"--layers 4 --dp 4 --cp 2 --tp 2 --pp 4 --sp "
        "--zero 1 --experts 4 --ep 4 --batch 16 --dry-run 64 --rank 33".split())
    textbook(dry)
    assert {row["what"] for row in dry["textbook"]} >= {
        "wire data", "wire replicas", "wire tp", "wire cp", "wire pp"}


def test_405_billion():
    """Llama 3's first mesh (arXiv:2407.21783, table 4), with a layer for each stage."""
    dry = script(
        "hybrid_3d", 1, *"--dry-run 16384 --model llama3-405b --layers 16 --dp 128 --tp 8 --pp 16 "
        "--batch 2048 --micro 1 --sp --zero 1 --dtype bf16 --rank 5000".split())
    textbook(dry)


# ---- saved and resumed -----------------------------------------------------------


def goes_on(folder, form, world, flags):
    """Resumed at step 2: losses and parameters of one process that never stopped."""
    words = (*FORMS[form], *flags.split(), "--steps", "4", "--resume", folder)
    report = proves("hybrid_3d", world, *words)
    assert len(report["loss"]) == 2


def save(folder, form, world, flags):
    script("hybrid_3d", world, *PROOF, *FORMS[form], *flags.split(), "--no-check", "--save", folder)


def test_resume(tmp_path):
    """Saved on one layout, gone on with on others."""
    folder = str(tmp_path)
    save(folder, "gpt2", 8, "--dp 2 --tp 2 --pp 2 --sp --zero 1")
    goes_on(folder, "gpt2", 4, "--dp 2 --tp 2 --pp 1 --sp --zero 3")
    goes_on(folder, "gpt2", 4, "--dp 1 --cp 2 --tp 1 --pp 2 --zero 2")


def test_resume_with_experts(tmp_path):
    folder = str(tmp_path)
    experts = " --experts 4 --balance bias"
    save(folder, "llama", 4, "--dp 2 --tp 2 --pp 1 --sp --zero 1" + experts)
    goes_on(folder, "llama", 4, "--dp 2 --tp 1 --pp 2 --ep 1 --zero 2" + experts)


def without_optimizer(module):
    """A resumed run starts with fresh AdamW states."""
    begin = module.Run.begin

    def broken(run, sides, rows):
        begin(run, sides, rows)
        for side in sides.values():
            side.optimizer.state.clear()

    module.Run.begin = broken


def test_resume_without_optimizer(tmp_path):
    save(str(tmp_path), "gpt2", 1, "--micro 1")
    proves("hybrid_3d", 2, *FORMS["gpt2"], *"--dp 1 --tp 1 --pp 2 --steps 4".split(),
           "--resume", str(tmp_path), plant=without_optimizer)


# ---- refusals --------------------------------------------------------------------

REFUSED = """
    --dry-run 8 --dp 2 --tp 2 --pp 1 | --dp 2 x --cp 1 x --tp 2 x --pp 1: their product is not 8
    --dry-run 8 --tp 8 | --heads 4, --kv-heads 4: do not divide over 8 ranks
    --dry-run 4 --tp 4 --model llama-toy | --kv-heads 2: do not divide over 4 ranks
    --dry-run 4 --cp 4 --model llama-toy --attn ulysses | --kv-heads 2: do not divide over 4 ranks
    --dry-run 2 --tp 2 --sp --seq 15 | --seq 15 does not divide over 2 ranks
    --micro 3 | --batch 8 does not divide into --dp 1 x --micro 3 micro-batches
    --dry-run 8 --pp 8 | --layers 4 for 8 stages
    --dry-run 2 --pp 2 --schedule interleaved --micro 1 | --micro 1: interleaved needs a multiple
    --dry-run 4 --dp 1 --tp 1 --pp 4 --schedule dualpipe-v --layers 8 | dualpipe-v needs 8 or more
    --dry-run 2 --pp 2 --zero 3 | right behind its forward: --pp 1 --schedule 1f1b
    --dry-run 2 --tp 2 --experts 4 | its ranks would all route the same tokens; add --sp
    --dry-run 2 --dp 2 --experts 3 | --ep 2 has to divide dp x cp = 2 and --experts 3
    --dry-run 2 --dp 2 --experts 4 --ep 3 | --ep 3 has to divide dp x cp = 2
    --shared | --ep, --shared and --capacity are for --experts E
    --impl torch --ckpt selective | --ckpt, --amp and --dtype bf16 want --impl scratch
    --impl torch --experts 4 | --experts, --cp, --zero 2, 3, --ckpt, --amp and --dtype bf16 want
"""


def test_refusals():
    lines = [line.split(" | ") for line in REFUSED.strip().splitlines()]
    run(check_refused, 1, "hybrid_3d", [(flags.split(), words) for flags, words in lines])


@pytest.mark.parametrize("flags, dp, tp, pp", [
    ("", 2, 2, 2),
    ("--pp 2", 4, 1, 2),
    ("--dp 2", 2, 4, 1),
    ("--cp 2 --tp 2", 2, 2, 1),
])
def test_axes_that_are_left_out(flags, dp, tp, pp, monkeypatch):
    words = ["hybrid_3d.py", "--dry-run", "8", *flags.split()]
    monkeypatch.setattr("sys.argv", words)
    args = hybrid_3d.arguments("", **hybrid_3d.FLAGS)
    hybrid_3d.layout(args)
    assert (args.dp, args.tp, args.pp) == (dp, tp, pp)
