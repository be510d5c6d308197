"""hybrid_3d: layouts of all axes equal one process in both forms, their bytes are the textbook's,
bugs that are planted in the table show."""
from functools import partial
from types import SimpleNamespace

import pytest

import hybrid_3d
from conftest import PROOF, SMALL, alone, check_refused, proves, script, textbook
from harness.flags import arguments
from pipeline_parallel import homes, make_plans, split_layers

FORMS = {
    "gpt2": ("--layers", "3", "--vocab", "257"),
    "llama": ("--model", "llama-toy", "--layers", "3", "--vocab", "257", "--hidden", "48"),
    "qwen3": ("--model", "qwen3-toy", "--layers", "3", "--vocab", "257", "--hidden", "48"),
}


@pytest.mark.parametrize("form, world, flags", [
    ("gpt2", 8, "--dp 2 --tp 2 --pp 2 --sp --zero 1 --eval-every 1 --warmup 1 --decay cosine"),
    ("llama", 4, "--dp 1 --cp 2 --tp 2 --pp 1 --sp --ckpt full"),
    ("gpt2", 4, "--dp 2 --tp 1 --pp 2 --zero 2 --schedule zb-h1 --ckpt selective"),
    ("llama", 4, "--dp 2 --cp 2 --tp 1 --pp 1 --zero 3 --attn allgather --ckpt full"),
    ("gpt2", 4, "--dp 1 --cp 2 --tp 1 --pp 2 --zero 1 --attn ring --experts 4 --ep 2 --capacity 1"),
    ("llama", 4, "--dp 2 --tp 2 --pp 1 --sp --zero 2 --experts 4 --shared --balance bias"),
    ("gpt2", 4, "--dp 2 --tp 1 --pp 2 --schedule zb-h2 --experts 4 --top-k 1 --balance none"),
    ("llama", 4, "--dp 1 --tp 2 --pp 2 --sp --schedule dualpipe-v --layers 4 --micro 4"),
    ("qwen3", 4, "--dp 1 --tp 4 --pp 1 --zero 1 --schedule zb-h1"),  # 2 heads of keys and values
])
def test_equals_one_process(form, world, flags):
    """And the bytes along each axis are the docstring's, but for those of experts, whose number
    depends on the tokens. A dry run of the last rank measures the same."""
    flags = (*FORMS[form], *flags.split())
    report = proves("hybrid_3d", world, *flags)
    textbook(report)
    if "--eval-every" in flags:
        assert len(report["validation"]) == 3  # before the first step, and after each
    if "--experts" not in flags:
        check_sent(report)
    if "--zero" in flags and "--experts" not in flags:
        last = str(world - 1)
        dry = script("hybrid_3d", 1, *PROOF, *flags, "--dry-run", str(world), "--rank", last)
        textbook(dry)
        assert dry["ranks"][0] == report["ranks"][-1]


def check_sent(report):
    """Of rank 0: nothing is sent but along an axis, and on tp and cp what the docstring says."""
    sent = report["sent"]
    assert sum(sent.values()) == sum(c["wire"] for c in report["ranks"][0]["collectives"].values())
    args = SimpleNamespace(**report["args"])
    plans = make_plans(args.schedule, args.pp, args.micro)
    layers = split_layers(args.layers, len(homes(plans)))
    here = {action.stage for action in plans[0]}
    blocks = sum(layers[stage] for stage in here)
    A = args.batch // args.dp // args.micro * args.seq // args.cp * args.width
    half = 5 if args.sp else 4  # f and g of half a block, in forward and backward
    again = 0
    if args.ckpt == "full":  # all but the MLP's g, the last. f sends nothing without --sp
        again = 3 if args.sp else 2
    numbers = (blocks * (2 * half + again) + 2) * A  # 2: the embedding
    if args.model == "toy":
        numbers += 2 * args.seq // args.cp * args.width  # positions
    if len(layers) - 1 in here:
        numbers += (half - 2) * A + 2 * 3 * A // args.width  # f of the head; a token's loss
    on_tp = (args.tp - 1) / args.tp * args.micro * 8 * numbers
    # with --sp norms and row biases are summed, too, and norms of q and k always
    is_more = args.sp or args.model == "qwen3-toy"
    assert on_tp <= sent["tp"] <= on_tp * (1.15 if is_more else 1)
    passes = 4 if args.ckpt == "full" else 3  # k and v in forward, again, backward
    keys = args.cp * A // args.width * args.kv_heads * args.head_dim // args.tp
    on_cp = (args.cp - 1) / args.cp * args.micro * blocks * 8 * 2 * keys * passes
    assert sent["cp"] == on_cp


def test_zero_bubble_needs_no_more_memory():
    """ZeRO-2 lends a block's gradients their memory in its W, not when B makes those of norms."""
    flags = (*SMALL, "--layers", "4", *"--dp 2 --tp 1 --pp 2 --zero 2 --dry-run 4".split())
    usual, split = alone("hybrid_3d", flags, (*flags, "--schedule", "zb-h1"))
    peaks = [dry["ranks"][0]["memory"]["peak"] for dry in (usual, split)]
    assert peaks[1] <= peaks[0], peaks


@pytest.mark.parametrize("form, flags", [
    ("llama", "--impl torch --dp 1 --tp 2 --pp 2 --sp"),
    ("gpt2", "--impl torch --dp 2 --tp 1 --pp 2 --train attn|norm"),
    ("gpt2", "--dp 2 --tp 1 --pp 2 --zero 1 --train blocks.2|norm"),
    ("gpt2", "--dp 1 --tp 2 --pp 2 --schedule zb-h1 --train attn"),  # the front has no gradients
    ("gpt2", "--dp 4 --tp 1 --pp 1 --clip 50"),  # more than the norm: nothing is scaled
])
def test_torch_and_frozen_layers_equal_one_process(form, flags):
    proves("hybrid_3d", 4, *FORMS[form], *flags.split())


def test_autocast():
    flags = "--dp 1 --tp 2 --pp 2 --sp --schedule zb-h1 --amp bf16".split()
    report = script("hybrid_3d", 4, *SMALL, *FORMS["llama"], *flags)
    assert report["check"]["tolerance"] == 2e-2


def test_64_ranks():
    """Every axis."""
    dry = script(
        "hybrid_3d", 1, *SMALL, *FORMS["llama"], *"--layers 4 --dp 4 --cp 2 --tp 2 --pp 4 --sp "
        "--zero 1 --experts 4 --ep 4 --batch 16 --dry-run 64 --rank 33".split())
    textbook(dry)
    axes = "data replicas norm pp".split()
    assert [row["what"] for row in dry["textbook"]] == [f"wire {axis}" for axis in axes]
    assert all(dry["sent"][axis] for axis in (*axes, "tp", "cp", "ep"))


def change_table(module, kind, row):
    right = module.fates
    module.fates = lambda *how: {**right(*how), kind: row}


def experts_over_data(module):
    """Different experts are summed, like copies of one."""
    right = module.Mesh

    def mesh(*sizes):
        made = right(*sizes)
        made.group["replicas"] = made.group["data"]
        return made

    module.Mesh = mesh


def not_summed_over_ends(module):
    right = module.summands
    module.summands = lambda model, axis: [] if axis == "ends" else right(model, axis)


@pytest.mark.parametrize("kind, row, form, flags", [
    ("whole", {"data": "sum"}, "llama", "--tp 2 --sp"),  # norms are not summed
    ("whole", {"data": "sum"}, "gpt2", "--tp 2"),  # norms count twice
    ("inside", {"tp": "same", "data": "sum"}, "qwen3", "--tp 2"),
    ("expert", {"replicas": "sum", "ep": "cut"}, "llama", "--tp 2 --sp --experts 4"),
])
def test_planted_bugs(kind, row, form, flags):
    plant = partial(change_table, kind=kind, row=row)
    proves("hybrid_3d", 2, *FORMS[form], *flags.split(), plant=plant)


@pytest.mark.parametrize("plant, flags", [
    (experts_over_data, "--dp 2 --experts 4"),
    (not_summed_over_ends, "--pp 2 --tp 1"),
])
def test_planted_bugs_elsewhere(plant, flags):
    proves("hybrid_3d", 2, *FORMS["gpt2"], *flags.split(), plant=plant)


def experts_without_sp(module):
    right = module.parallelize
    module.parallelize = lambda *args, **options: right(*args, **{**options, "sp": False})


def half_a_mesh(module):
    right = module.Mesh
    module.Mesh = lambda plans, dp, cp, tp, ep: right(plans, dp, cp, tp // 2, ep)


@pytest.mark.parametrize("plant, said", [
    (experts_without_sp, "experts with tp > 1 want CutSequence"),
    (half_a_mesh, "[1, 1, 1, 1] are not all the ranks"),
])
def test_asserts_of_parallelize(plant, said):
    flags = "--dp 1 --tp 2 --sp --experts 4".split()
    assert said in script("hybrid_3d", 2, *SMALL, *FORMS["llama"], *flags, plant=plant, code=1)


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
    save(folder, "gpt2", 4, "--dp 2 --tp 1 --pp 2 --zero 1")
    goes_on(folder, "gpt2", 4, "--dp 2 --tp 2 --pp 1 --sp --zero 3")
    goes_on(folder, "gpt2", 4, "--dp 1 --cp 2 --tp 1 --pp 2 --zero 2")


def test_resume_with_experts(tmp_path):
    folder = str(tmp_path)
    experts = " --experts 4 --balance bias"
    save(folder, "llama", 4, "--dp 2 --tp 2 --pp 1 --sp --zero 1" + experts)
    goes_on(folder, "llama", 4, "--dp 2 --tp 1 --pp 2 --ep 1 --zero 2" + experts)


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
    --impl torch --ckpt selective | --ckpt, --amp and --dtype bf16 want --impl scratch
    --impl torch --schedule interleaved | both ends of the model on one rank
"""


def test_refusals():
    lines = [line.split(" | ") for line in REFUSED.strip().splitlines()]
    check_refused("hybrid_3d", [(flags.split(), words) for flags, words in lines])


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
