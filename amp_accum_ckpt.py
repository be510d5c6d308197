"""The memory of one device, saved in three ways: narrower numbers, fewer sequences, fewer tensors.

    --amp bf16|fp16   matmuls and attention in 2 bytes a number; weights, gradients, loss in 4
    --accum M         M micro-batches in turn: gradients add up, and ranks communicate once
    --ckpt none       keeps x0 [all that block 0 made] x1 [all that block 1 made] x2 ..
    --ckpt selective  keeps x0 [matmuls, attention   ] x1 [matmuls, attention   ] x2 ..
    --ckpt full       keeps x0                         x1                         x2 ..

Backward makes the rest again. On a CPU a block keeps, of a micro-batch of t tokens, in bytes:

                     --ckpt none                                --ckpt selective
    GPT-2  fp32      t (64 C + s)                               t (40 C + s)
           autocast  t (40 C + s) + 2 W                         t (24 C + s)
    Llama  fp32      t (36 C + 16 F + 8 K D + s) + 8 T D        t (16 C + 8 F + 8 K D + s) + 8 T D
           autocast  t (32 C + 8 F + 4 K D + s) + 2 W + 4 T D   t (12 C + 4 F + 4 K D + s) + 8 T D

C: width, H: heads of width D, K: key-value heads, F: the MLP's hidden width (GPT-2: 4 C), T: tokens
of a sequence, W: a block's weights. 2 W: their copies in 2 bytes. 8 T D: cosines and sines, for q
and for k; 4 T D: their copies in 2 bytes. s = 4 H + 16 (Llama: 4 H + 8): statistics of softmax and
norms. Selective keeps no copies, but what they are made from, and repeats no matmul. With full a
block keeps its input, 4 C t. It runs again but for its last matmul, holding then as much as none.
Weights, gradients and AdamW's states of P parameters take 16 P bytes, as in the plain GPT, and 20 P
in update(), which has gradients twice. dp ranks share the batch, and all-reduce 4 P bytes a step.

    replicate(model)                                  # with several ranks: all begin alike
    for block in model.blocks:
        block.forward = partial(full, block.forward)  # or selective
    scaler = LossScaler("cuda")  # for fp16, with AdamW(.., fused=True); bf16, fp32: scaler = None
    def part_of_loss(x, y):
        with torch.autocast("cuda", torch.float16):   # bf16: torch.bfloat16; fp32: no autocast
            return loss_sum(model(x), y) / valid      # valid: targets of the whole global batch
    optimizer.zero_grad()                             # every step begins here
    loss = accumulate(part_of_loss, zip(x.chunk(2), y.chunk(2)), scaler)
    norm = update(model.parameters(), optimizer, 1.0, scaler)

Not for: weights of two dtypes; blocks that only some ranks use; checkpointed forwards that change
tensors in place or, with full, count calls (BatchNorm), call autograd.grad, own a random generator.
Micikevicius 2018, arXiv:1710.03740, section 3. Chen 2016, arXiv:1604.06174, section 4. Korthikanti
2022, arXiv:2205.05198, section 5. At work: torch.amp, torch.utils.checkpoint, DDP's no_sync.
    torchrun --standalone --nproc_per_node=2 amp_accum_ckpt.py --amp bf16 --accum 2 --ckpt full
"""
import math
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

# imports of section 1 end here; the rest is for sections 2 to 4
import shutil
import sys
from contextlib import nullcontext
from itertools import product

from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from common import adamw, loss_sum, share
from harness.flags import POSITIVE, Flag, arguments, require
from harness.run import Run, Side

# ---- 1. the technique (copy this; it needs only torch) -----------------------
# What ranks hold, in comments: partial = each has a summand, replicated = all have the same.

# Fewer sequences: every rank has all weights and a part of the batch, cut into micro-batches.


@torch.no_grad()
def replicate(module, group=None):
    """Give all ranks of the group the weights and buffers of its first rank."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor, group=group, group_src=0)  # the first rank's -> replicated


def accumulate(part_of_loss, microbatches, scaler=None):
    """Run backward of one micro-batch after the other: gradients add up -> this rank's loss.

    part_of_loss(*microbatch) -> the sum of its token losses, divided by the valid targets of the
    whole global batch. (A mean of means would be wrong: micro-batches have unequally many targets)
    """
    loss = 0.0
    for microbatch in microbatches:
        part = part_of_loss(*microbatch)
        loss = loss + part.detach()
        if scaler is not None:
            part = part * scaler.scale
        part.backward()
    return loss


def update(parameters, optimizer, clip, scaler=None, group=None):
    """After the last micro-batch: sum over ranks, unscale, clip (0: do not), step -> the norm."""
    trained = [p for p in parameters if p.grad is not None]
    assert trained, "no parameter has a gradient: accumulate() comes first"
    flat = torch.cat([p.grad.flatten() for p in trained])
    if dist.is_initialized():
        dist.all_reduce(flat, group=group)  # partial -> replicated, all gradients in one call
    if scaler is not None:
        flat /= scaler.scale
    for p, part in zip(trained, flat.split([p.numel() for p in trained])):
        p.grad = part.view_as(p)  # a piece of flat: nothing is copied back
    norm = nn.utils.get_total_norm([p.grad for p in trained])
    finite = norm.nan_to_num(0, posinf=0)  # inf or nan counts as 0: nothing is scaled
    nn.utils.clip_grads_with_norm_(trained, clip or math.inf, finite)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer, norm)
    return norm


# Narrower numbers: for bf16, torch.autocast around forward and loss is enough. fp16 has no number
# between 0 and 6e-8, so that small gradients would become 0 if the loss were not scaled.


class LossScaler:
    """Scales the loss, and so the gradients, up as far as nothing overflows (Micikevicius 3.2)."""

    def __init__(self, device, scale=65536.0, good_steps=0, interval=2000):
        self.interval = interval  # so many good steps in turn double the scale
        self.scale = torch.full((), scale, device=device)
        self.good_steps = torch.full((), good_steps, device=device)  # since the scale's last change

    def step(self, optimizer, norm):
        """Step, unless the norm of all ranks' gradients is inf or nan. Set the next scale."""
        assert optimizer.defaults.get("fused"), "take fused=True: other optimizers skip no step"
        overflow = norm.isfinite().logical_not()
        optimizer.found_inf = overflow.float()  # fused optimizers read it, and skip the step
        optimizer.step()
        del optimizer.found_inf  # else a later step without this scaler would skip, too
        good_steps = torch.where(overflow, 0, self.good_steps + 1)
        doubles = good_steps >= self.interval
        factor = torch.where(overflow, 0.5, torch.where(doubles, 2.0, 1.0))
        self.scale = (self.scale * factor).clamp(1.0, 2.0 ** 100)  # 0 and inf would never change
        self.good_steps = torch.where(doubles, 0, good_steps)


# Fewer tensors: what autograd keeps for backward goes through a pair of hooks. Autograd keeps what
# pack(tensor) returns, from which unpack has to make the tensor. Where pairs are nested, autograd
# calls the innermost alone, so a checkpoint hands the tensors that it keeps to the pair around it.


def hooks_around():
    """-> pack, unpack: the pair in force (save_on_cpu's, an outer checkpoint's), or a default."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # torch has no public way
    # Detached: softmax keeps its result, whose grad_fn is softmax, a cycle that no more than a
    # backward would break. A tensor's version counts its changes in place.
    return hooks or (lambda tensor: (tensor.detach(), tensor._version), unless_changed)


def unless_changed(packed):
    tensor, version = packed
    assert tensor._version == version, "changed in place, but backward needs what it was"
    return tensor


class Kept:
    """A tensor that a checkpoint keeps, in the care of the hooks around it."""

    def __init__(self, tensor, hooks):
        pack, self.unpack = hooks
        self.packed = pack(tensor)
        self.requires_grad = tensor.requires_grad

    def restore(self):
        tensor = self.unpack(self.packed)
        return tensor.detach().requires_grad_(self.requires_grad)  # as forward had it


@torch.compiler.disable  # else a torch.compile around it could compile one of forward's two runs
def full(forward, *inputs, **keywords):
    """forward(*inputs, **keywords), which keeps only these (Chen 4). inputs[0] has to be a tensor.

    The graph is built as always, but holds an index in the place of each tensor. When backward
    wants the first of these tensors, forward runs again, with the same random numbers and autocast,
    until it has made the one with the last index. If that is the last matmul's input, this matmul
    and an all-reduce after it are not repeated. Other collectives are, in one order on all ranks.
    """
    if not torch.is_grad_enabled():
        return forward(*inputs, **keywords)
    call = Call(forward, inputs, keywords)
    with saved_tensors_hooks(call.pack, call.unpack):
        return forward(*inputs, **keywords)


class Enough(BaseException):  # not an Exception: forward might catch those
    """The second run of forward has made every tensor that has an index."""


class Call:
    """A call of forward under `full`: how to repeat it, and what the repetition has made."""

    def __init__(self, forward, inputs, keywords):
        self.forward = forward
        self.keywords = keywords  # held as they are: no hooks, and no check for changes
        hooks = hooks_around()
        self.inputs = [Kept(x, hooks) if torch.is_tensor(x) else x for x in inputs]
        self.states = random_states()
        device = inputs[0].device.type  # below, torch.autocast takes the dtype now in force
        self.autocast = torch.autocast(device, enabled=torch.is_autocast_enabled(device))
        self.shapes = []  # of the tensors 0, 1, .. that autograd wanted to keep
        self.made = {}  # {index: Kept}: what repeat() has made and backward has yet to take

    def pack(self, tensor):  # -> its index
        self.shapes.append(tensor.shape)
        return len(self.shapes) - 1

    def unpack(self, index):
        if index not in self.made:
            self.repeat()
        return self.made.pop(index).restore()

    @torch.compiler.disable  # as full
    def repeat(self):
        made = []  # a Kept for each tensor that has an index, in order
        hooks = hooks_around()

        @torch.compiler.disable  # compiled with a compiled forward, it froze a tensor's _version
        def record(tensor):
            assert tensor.shape == self.shapes[len(made)], "forward made others when it ran again"
            made.append(Kept(tensor.detach(), hooks))  # alone, without the second graph
            if len(made) == len(self.shapes):
                raise Enough

        recording = saved_tensors_hooks(record, lambda packed: packed)  # has no backward
        inputs = [x.restore() if isinstance(x, Kept) else x for x in self.inputs]
        before = random_states()
        set_random_states(*self.states)
        # Backward runs with gradients off, but autograd calls hooks only with gradients on.
        with suppress(Enough), torch.enable_grad(), self.autocast, recording:
            self.forward(*inputs, **self.keywords)
        set_random_states(*before)
        assert len(made) == len(self.shapes), "forward made fewer when it ran again"
        self.made = dict(enumerate(made))


def random_states():
    """The states of the random numbers of the CPU and, if one is in use, of the GPU."""
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), gpu


def set_random_states(cpu, gpu):
    torch.set_rng_state(cpu)
    if gpu is not None:
        torch.cuda.set_rng_state(gpu)


# Selective checkpointing does not keep the results of cheap operations, but makes them again.
# Autograd keeps the others as ever: of matmuls, attention, dropout, additions, sums over ranks.
aten = torch.ops.aten
CHEAP = {
    aten.native_layer_norm.default, aten._fused_rms_norm.default,
    aten.gelu.default, aten.silu.default, aten.mul.Tensor,  # mul: in SwiGLU, handmade norms
    aten._to_copy.default,  # autocast makes copies of activations and weights in another dtype
    aten.view.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int,
    aten.unsqueeze.default, aten.expand.default, aten.clone.default,  # heads of K, V repeated (GQA)
    aten.detach.default,  # zero bubble's Linear detaches its input (pipeline_parallel.py)
}


class Recipe:
    """How to make a tensor again: a cheap operation, and what it was given."""

    def __init__(self, op, inputs, keywords):
        self.op = op
        self.inputs = inputs  # the first keep() puts a Kept or Recipe in the place of each tensor
        self.keywords = keywords
        self.read = [(x, x._version) for x in inputs if torch.is_tensor(x)]  # as op read them
        self.result = None  # made once (q, k and v ask for a norm's), held until the graph is freed

    def restore(self):
        if self.result is None:
            inputs = [restored(x) for x in self.inputs]
            self.result = first(self.op(*inputs, **self.keywords))
        return self.result


def restored(x):  # what never was a tensor stays as it is
    return x.restore() if isinstance(x, (Kept, Recipe)) else x


def first(outputs):  # norms return their statistics besides
    return outputs[0] if isinstance(outputs, tuple) else outputs


class WriteRecipes(TorchDispatchMode):
    """Sees every operation, and gives the results of cheap ones a recipe."""

    def __torch_dispatch__(self, op, types, inputs=(), keywords=None):
        keywords = keywords or {}
        outputs = op(*inputs, **keywords)
        # Not in pack and in autograd Functions, where gradients are off: a Function's collective
        # may overwrite a tensor and leave its version as it is.
        if op in CHEAP and torch.is_grad_enabled():
            first(outputs).recipe = Recipe(op, inputs, keywords)
        return outputs


def keep(x, hooks):
    """-> x's recipe; a Kept if there is none, or if x or what the recipe read was changed."""
    recipe = getattr(x, "recipe", None)
    if recipe is None or x._version > 0 or any(y._version > then for y, then in recipe.read):
        return Kept(x, hooks)
    recipe.inputs = [keep(y, hooks) if torch.is_tensor(y) else y for y in recipe.inputs]
    recipe.read = []  # compared once, they need not stay alive
    return recipe


def selective(forward, *inputs, **keywords):
    """Keep what matmuls, attention, additions, sums over ranks make, but nothing CHEAP (Chen 4.2).

    The rest is made again from what is kept, without running forward: no collective runs twice.
    A compiled forward runs uncompiled, since torch.compile steps aside in a TorchDispatchMode.
    """
    pack = partial(keep, hooks=hooks_around())
    with saved_tensors_hooks(pack, restored), WriteRecipes():
        return forward(*inputs, **keywords)


# ---- 2. the toy GPT, parallelized --------------------------------------------

CHECKPOINT = {"none": None, "full": full, "selective": selective}


def parallelize(model, checkpointing=None, compiled=False):
    """checkpointing: full or selective, or one like them; None keeps everything."""
    for block in model.blocks:
        if compiled:
            block.forward = torch.compile(block.forward)
        if checkpointing is not None:
            block.forward = partial(checkpointing, block.forward)
    return model


def train_step(model, optimizer, x, y, valid, clip, accum, autocast, scaler):
    """x, y: this rank's rows; valid: the whole batch's targets -> its part of the loss, norm."""

    def part_of_loss(x, y):
        return sum_of_losses(model, autocast, x, y) / valid

    optimizer.zero_grad()
    microbatches = zip(x.tensor_split(accum), y.tensor_split(accum))
    loss = accumulate(part_of_loss, microbatches, scaler)
    norm = update(model.parameters(), optimizer, clip, scaler)
    return loss, norm


def sum_of_losses(model, autocast, x, y):
    with autocast():  # torch.autocast, on or off
        return loss_sum(model(x), y)


# ---- 3. at work: the same with torch's own API -------------------------------

MATMULS_AND_ATTENTION = [op.default for op in (
    aten.mm, aten.addmm, aten.bmm, aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_flash_attention_for_cpu)]
full_at_work = partial(checkpoint, use_reentrant=False)
keep_matmuls = partial(create_selective_checkpoint_contexts, MATMULS_AND_ATTENTION)
selective_at_work = partial(full_at_work, context_fn=keep_matmuls)
CHECKPOINT_AT_WORK = {"none": None, "full": full_at_work, "selective": selective_at_work}


def train_step_at_work(model, optimizer, x, y, valid, clip, accum, autocast, scaler):
    ranks = dist.get_world_size()
    optimizer.zero_grad()
    loss = 0.0
    microbatches = zip(x.tensor_split(accum), y.tensor_split(accum))
    for i, (inputs, targets) in enumerate(microbatches):
        only_adds_up = ranks > 1 and i < accum - 1  # DDP does not communicate then
        with model.no_sync() if only_adds_up else nullcontext():
            part = sum_of_losses(model, autocast, inputs, targets) / valid
            scaler.scale(part * ranks).backward()  # DDP averages; the sum is wanted
        loss = loss + part.detach()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    scaler.step(optimizer)
    scaler.update()
    return loss, norm


# ---- 4. run ------------------------------------------------------------------

AMP = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FLAGS = {
    "amp": Flag("off", "autocast to", tuple(AMP), course=True),  # a resumed run needs the same
    "accum": Flag(1, "M, micro-batches", POSITIVE),
    "ckpt": Flag("none", "keep less for backward", tuple(CHECKPOINT)),
    "compile": Flag(False, "torch.compile blocks; our --ckpt selective undoes it"),
    "sweep": Flag(False, "every --amp with every --ckpt, in one table"),
}


def refuse(args):
    dp = args.world_size
    require(args.batch >= dp * args.accum,
            f"--batch {args.batch}: fewer than {dp} ranks x --accum {args.accum}")
    fits = args.dtype == "fp32" or (args.dtype == "fp64" and args.amp == "off")
    require(fits, f"--dtype {args.dtype} --amp {args.amp}: take fp32, or fp64 with --amp off")
    require(args.impl == "scratch" or not (args.dry_run or args.sweep),
            "--dry-run and --sweep want --impl scratch")
    require(not (args.sweep and args.save), "--sweep trains several models: leave out --save")
    compiles = shutil.which("c++") and not args.dry_run
    require(compiles or not args.compile, "--compile needs c++, and no --dry-run")


def plans_of(args):
    """-> {name: (--amp, --ckpt)} of what is trained side by side"""
    if args.sweep:
        return {f"{amp} {ckpt}": (amp, ckpt) for amp, ckpt in product(AMP, CHECKPOINT)}
    impls = ("scratch", "torch") if args.impl == "both" else (args.impl,)
    return {impl: (args.amp, args.ckpt) for impl in impls}


def set_up(run, name, amp, ckpt):
    """-> a Side: the model, and what a run does with it."""
    args = run.args
    fp16 = amp == "fp16"
    scale = run.start.extra.get("scale", 65536.0)  # a resumed run has its checkpoint's
    good = run.start.extra.get("good", 0)  # steps since the scale has changed
    if name == "torch":
        step = train_step_at_work
        model = parallelize(run.build(), CHECKPOINT_AT_WORK[ckpt], args.compile)
        if run.world_size > 1:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = adamw(model.parameters(), args.lr)
        scaler = torch.amp.GradScaler(run.device.type, scale, enabled=fp16)
        # GradScaler has no argument for its count of good steps
        scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": int(good)})
    else:
        step = train_step
        model = parallelize(run.build(), CHECKPOINT[ckpt], args.compile)
        optimizer = adamw(model.parameters(), args.lr)
        scaler = LossScaler(run.device, scale, good) if fp16 else None
    autocast = partial(torch.autocast, run.device.type, AMP[amp], enabled=amp != "off")
    return Side(model=model, optimizer=optimizer, may_overflow=fp16,
                train_step=partial(step, accum=args.accum, autocast=autocast, scaler=scaler),
                evaluate=partial(sum_of_losses, model, autocast),
                extra=partial(state_of, scaler, optimizer) if fp16 else None)


def state_of(scaler, optimizer):
    """-> what --save writes besides: how many updates were made, the scaler's state."""
    updates = [int(state["step"]) for state in optimizer.state.values()]
    ours = isinstance(scaler, LossScaler)
    scale = scaler.scale if ours else scaler.get_scale()
    good = scaler.good_steps if ours else scaler.state_dict()["_growth_tracker"]
    return {"updates": max(updates, default=0), "scale": float(scale), "good": int(good)}


def kept_by_block(cfg, t, cheap_too):
    """-> how many numbers a block keeps of t tokens without autocast: the docstring's table"""
    C = cfg.width
    F = cfg.hidden
    D = C // cfg.heads
    if cfg.form.learned_positions:
        cheap = t * 6 * C
        kept = t * (10 * C + cfg.heads + 4)
    else:
        cheap = t * (5 * C + 2 * F)
        kept = t * (4 * C + 2 * F + 2 * cfg.kv_heads * D + cfg.heads + 2) + 2 * cfg.seq * D
    return kept + cheap if cheap_too else kept


def activations(run, ckpt):
    """-> formula, the most bytes that a step keeps for backward: without autocast, on a CPU"""
    cfg = run.cfg
    C = cfg.width
    b = run.dtype.itemsize
    rows = len(share(run.args.batch, run.world_size, run.rank))
    t = math.ceil(rows / run.args.accum) * cfg.seq  # tokens of the largest micro-batch
    block = b * kept_by_block(cfg, t, ckpt != "selective")
    ids = 8 * rows * cfg.seq  # int64, all of them: micro-batches are views
    gpt2 = cfg.form.learned_positions
    inputs = ids + 8 * cfg.seq if gpt2 else ids  # GPT-2 has positions, too
    # LayerNorm keeps its input, mean, deviation; RMSNorm input, normalized input, root mean square
    norm = C + 2 if gpt2 else 2 * C + 1
    # what this norm keeps, the head's input, log-probabilities; one number for the loss; targets
    head = b * t * (norm + C + cfg.vocab) + b + ids
    if ckpt != "full":
        return f"ids + L {block} + head", inputs + cfg.layers * block + head
    x = b * t * C  # a block's input
    # beside every block's x: first what the head keeps, later the rest of a block that runs again
    most = max(block - x, head)
    return "ids + L b C t + max(block - b C t, head)", inputs + cfg.layers * x + most


def compare(run):
    """Prints what each plan keeps and takes, and how far its losses are from the first one's."""
    run.say(f"\n{'amp, ckpt':16} {'MB kept':>9} {'peak':>9} {'ms/step':>9} {'loss gap':>9}")
    run.extra["plans"] = {}
    losses = run.trace[run.impls[0]].loss
    for name in run.impls:
        memory = run.ledger[name].memory
        ms = run.ms(name) or 0.0
        gaps = [float(abs(loss / losses[k] - 1)) for k, loss in run.trace[name].loss.items()]
        run.extra["plans"][name] = {
            "kept": memory["activations"], "peak": memory["peak"], "ms": ms, "gap": max(gaps)}
        run.say(f"{name:16} {memory['activations'] / 1e6:9.3f} {memory['peak'] / 1e6:9.3f} "
                f"{ms:9.1f} {max(gaps):9.1e}")


def main():
    args = arguments(__doc__, **FLAGS)
    refuse(args)
    plans = plans_of(args)
    amp, ckpt = next(iter(plans.values()))  # of the one that is compared with the plain run
    with Run(args, impls=tuple(plans)) as run:
        sides = {name: set_up(run, name, *plan) for name, plan in plans.items()}
        rows = share(args.batch, run.world_size, run.rank)
        for impl, step, x, y, valid in run.steps(sides, rows):
            side = sides[impl]
            with run.measure(impl, step):
                loss, norm = side.train_step(side.model, side.optimizer, x, y, valid, args.clip)
            run.log(impl, step, loss, norm)
            if side.extra and not run.dry:
                run.extra.setdefault(f"scale {impl}", []).append(side.extra()["scale"])

        dp = run.world_size
        sent = 2 * (dp - 1) / dp * run.dtype.itemsize * run.total
        run.textbook([("wire all_reduce", "2 (dp-1)/dp b P", sent)])
        if amp == "off" and args.impl != "torch" and run.device.type == "cpu":
            run.textbook([("held activations", *activations(run, ckpt))])
        if args.sweep:
            compare(run)
        # with autocast only losses are judged, to 2%
        return run.finish(judged_as=args.dtype if amp == "off" else "bf16")


if __name__ == "__main__":
    sys.exit(main())
