import math

import pytest

from conftest import PROOF, dry_run_agrees, proves, script, textbook

ODD = ("--layers", "5", "--vocab", "257")


def on(dp, tp, pp, *flags):
    return "hybrid_3d", dp * tp * pp, *ODD, "--dp", str(dp), "--tp", str(tp), "--pp", str(pp), *flags


@pytest.mark.parametrize("layout, flags", [
    ((1, 1, 1), []), ((2, 1, 1), ["--zero", "1"]), ((1, 2, 1), ["--ckpt", "full"]),
    ((1, 1, 2), ["--schedule", "zb-h1"]),
    ((4, 2, 1), ["--sp", "--zero", "1"]), ((2, 1, 2), ["--schedule", "interleaved", "--ckpt", "selective"]),
    ((1, 2, 2), ["--schedule", "gpipe", "--sp", "--ckpt", "full"]), ((2, 2, 2), ["--sp", "--zero", "1"]),
    ((1, 2, 4), ["--clip", "0"]), ((1, 2, 2), ["--impl", "torch"]), ((2, 1, 2), ["--impl", "torch"])])
def test_equals_one_process(layout, flags):
    proves(*on(*layout, *flags))


@pytest.mark.parametrize("layout, flags", [
    ((1, 2, 2), ["--sp"]), ((2, 1, 1), ["--zero", "1", "--dtype", "bf16"]),
    ((1, 1, 2), ["--schedule", "interleaved", "--ckpt", "selective"])])
def test_cost(layout, flags):
    """The textbook's bytes, parameters and activations on every rank, real and dry."""
    name, world, *flags = on(*layout, *flags)
    real = dry_run_agrees(name, world, *flags, ranks=sorted({0, world - 1}))
    textbook(real)
    sent = sum(c["wire"] for c in real["ranks"][0]["collectives"].values())
    wire = [row["expected"] for row in real["textbook"] if row["what"].startswith("wire")]
    assert math.isclose(sum(wire), sent)


def test_large():
    """175 billion parameters on 512 ranks, of which a middle stage's holds 12 layers; here with a batch of 8."""
    dry = script("hybrid_3d", 1, "--dry-run", "512", "--dp", "8", "--tp", "8", "--pp", "8", "--model", "gpt3-175b",
                 "--batch", "8", "--micro", "1", "--sp", "--dtype", "bf16", "--rank", "200")
    textbook(dry)
    assert dry["parameters"]["total"] == 174_604_259_328 and dry["parameters"]["per_rank"] == [2_718_922_752]


def test_resume(tmp_path):
    """Saved on one layout, gone on with on others: losses and parameters of one process that never stopped."""
    name, world, *layout = on(2, 2, 2, "--sp", "--zero", "1")
    script(name, world, *PROOF, *layout, "--no-check", "--save", str(tmp_path))
    for layout in on(4, 1, 1, "--zero", "1"), on(1, 2, 1), on(1, 1, 2), on(1, 1, 1):
        on_goes = proves(*layout, "--steps", "5", "--resume", str(tmp_path / "2"))
        assert len(on_goes["loss"]) == len(on_goes["plain_loss"]) == 3
    script("hybrid_3d", 1, *PROOF, *ODD, "--resume", str(tmp_path / "2"), "--width", "64", code=2)
    proves(*on(1, 1, 2, "--steps", "5", "--resume", str(tmp_path / "2")), plant=without_optimizer)


# ---- planted bugs: each must fail the check ------------------------------------


def without_optimizer(module):
    """A resumed run starts with fresh AdamW states."""
    restore = module.restore

    def broken(model, start):
        restore(model, start)
        for zero in model.zeros:
            zero.optimizer.state.clear()
    module.restore = broken


def dp_before_tied(module):
    """Under ZeRO-1 the tied embedding is cut over dp before first and last stage have summed its gradients."""
    total = module.sum_gradients

    def broken(model):
        model.tied, tied = [], model.tied
        total(model)
        model.tied = tied
    module.sum_gradients = broken


def over_replicas(module):
    """The norm counts what several ranks hold several times."""
    norm = module.gradient_norm
    module.gradient_norm = lambda model: norm(model) * 2 ** 0.5


def not_over_tp(module):
    """Norms and row biases of sequence parallelism keep each tp rank's own gradient."""
    module.CutSequence = type("CutSequence", (module.CutSequence,), {})
    total, cut = module.sum_gradients, module.CutSequence

    def broken(model):
        module.CutSequence = ()
        total(model)
        module.CutSequence = cut
    module.sum_gradients = broken


def mean_over_micro(module):
    """Every micro-batch is divided by its own valid targets."""
    loss = module.loss_sum
    module.loss_sum = lambda logits, targets: loss(logits, targets) / (targets >= 0).sum() * targets.numel()


@pytest.mark.parametrize("plant, layout, flags", [
    (dp_before_tied, (2, 1, 2), ["--zero", "1"]), (over_replicas, (2, 1, 1), []), (not_over_tp, (1, 2, 1), ["--sp"]),
    (mean_over_micro, (1, 1, 1), [])])
def test_planted(plant, layout, flags):
    proves(*on(*layout, *flags), plant=plant)


@pytest.mark.parametrize("world, flags", [
    (2, ["--dp", "2", "--tp", "2"]), (1, ["--heads", "4", "--tp", "8", "--dry-run", "8"]),
    (1, ["--pp", "8", "--dry-run", "8"]), (1, ["--micro", "3"]), (1, ["--schedule", "zb-h1", "--ckpt", "full"]),
    (1, ["--impl", "torch", "--dry-run", "2"])])
def test_bad_usage(world, flags):
    script("hybrid_3d", world, *flags, code=2)
