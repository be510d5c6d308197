"""The memory of one device, saved in three ways: narrower numbers, fewer sequences, fewer tensors.

    --amp bf16|fp16   matmuls and attention in 2 bytes a number; weights, gradients, loss in 4
    --accum M         M micro-batches in turn: gradients add up, and ranks communicate once
    --ckpt none       keeps x0 [all that block 0 made] x1 [all that block 1 made] x2 ..
           selective  keeps x0 [matmuls, attention   ] x1 [matmuls, attention   ] x2 ..
           full       keeps x0                         x1                         x2 ..

What is not kept for backward is made again when backward wants it, with full a block at a time.
Bytes of t tokens on a CPU. T: sequence length, F: MLP's hidden width, D = C/H: a head's, K: number
of key-value heads, W: of weights in matrices, s: 4 H + 16 (Llama 4 H + 8), of softmax and norms.

    a block keeps    with none                                  selective
    GPT-2  fp32      t (64 C + s)                               t (40 C + s)
           autocast  t (40 C + s) + 2 W                         t (24 C + s)
    Llama  fp32      t (36 C + 16 F + 8 K D + s) + 8 T D        t (16 C + 8 F + 8 K D + s) + 8 T D
           autocast  t (32 C + 8 F + 4 K D + s) + 2 W + 4 T D   t (12 C + 4 F + 4 K D + s) + 8 T D
    full: 4 C t, its input. The block that is being made again keeps the rest of `none`, too

Selective keeps cosines and sines as they are before their cast, in fp32. It does no matmul again.
Full does all but the last: no gradient needs its result. P parameters, their gradients and AdamW
take the plain GPT's 16 P; dp ranks all-reduce 4 P a step.

    replicate(model, group)                                  # at the start
    for block in model.blocks:
        block.forward = partial(full, block.forward)         # or selective
    scaler = LossScaler(optimizer)                           # for fp16; else None
    loss = accumulate(part_of_loss, microbatches, scaler)    # see train_step, with its autocast
    norm = update(model.parameters(), optimizer, 1.0, scaler, group)

Not for: a forward that changes in place what it has made, draws from a generator of its own, counts
its calls (BatchNorm's statistics) or calls torch.autograd.grad; blocks that only some ranks use;
fp16 with an optimizer that is not fused.

Micikevicius 2018, "Mixed Precision Training", arXiv:1710.03740, section 3. Chen 2016, "Training
Deep Nets with Sublinear Memory Cost", arXiv:1604.06174, section 4. Korthikanti 2022,
arXiv:2205.05198, section 5. At work: torch.amp, torch.utils.checkpoint, DDP's no_sync (section 3).

    torchrun --standalone --nproc_per_node=2 amp_accum_ckpt.py --amp bf16 --accum 2 --ckpt full
"""
import math
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

# section 1 needs what stands above, the others what follows
import shutil
import sys
from collections import namedtuple
from contextlib import nullcontext
from itertools import product

from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from common import adamw, loss_sum, share
from harness.flags import POSITIVE, Flag, arguments, require
from harness.run import Run, Side

# ---- 1. the technique (copy this; it needs only torch) -----------------------
# Autograd hands every tensor that it keeps for backward to a pair of hooks: pack takes it, and
# unpack must give it back. They decide what is kept, and what is made again. Of several pairs it
# calls the innermost alone, a checkpoint's own. So that hands what it keeps to the pair around it.


def hooks_around():
    """The pair that stands around a checkpoint: save_on_cpu's, or another checkpoint's."""
    # False: while torch.compile traces, say that there is none
    return torch._C._autograd._top_saved_tensors_default_hooks(False) or (unchanged, unchanged)


def unchanged(tensor):
    return tensor


class Kept:
    """A tensor that a checkpoint keeps, in the care of the hooks around it."""

    def __init__(self, tensor, hooks):
        pack, self.unpack = hooks
        self.packed = pack(tensor)
        self.requires_grad = tensor.requires_grad
        self.version = tensor._version  # grows with every change in place

    def restore(self):
        tensor = self.unpack(self.packed)  # perhaps a copy, of version 0
        assert tensor._version <= self.version, "changed in place, but backward needs what it was"
        return tensor.detach().requires_grad_(self.requires_grad)  # as forward had it


def restore(kept):
    """-> the tensor that was kept. What is no tensor, such as a shape, was not."""
    return kept.restore() if isinstance(kept, (Kept, Recipe)) else kept


def full(forward, *inputs, **keywords):
    """forward(*inputs, **keywords), keeping its inputs alone (Chen 4). The first is a tensor.

    The graph is built as always, but holds numbers in the place of tensors. When backward wants the
    first one, forward runs again, with the same random numbers and autocast, until it has made the
    last tensor that has a number. So the last matmul, and an all-reduce of its result, run once.
    Collectives before it run twice, on every rank in the same order.
    """
    # torch.compile of a model around this leaves it out: it would compile the first forward alone
    forward = torch.compiler.disable(partial(forward, **keywords))
    call = Call(forward, inputs)
    with saved_tensors_hooks(call.number, call.fetch):
        return forward(*inputs)


class Enough(Exception):
    """The second forward has made every tensor that backward may ask for."""


class Call:
    """A call of a checkpointed forward: how to repeat it, and what the repetition has made."""

    def __init__(self, forward, inputs):
        self.forward = forward
        hooks = hooks_around()
        self.inputs = [Kept(x, hooks) if isinstance(x, torch.Tensor) else x for x in inputs]
        self.states = random_states()
        device = inputs[0].device.type
        self.autocast = torch.autocast(
            device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        self.layouts = []  # of all tensors that autograd wanted to keep
        self.made = {}  # {number: Kept} of the repetition, what has not been fetched yet

    def number(self, tensor):
        self.layouts.append(layout(tensor))
        return len(self.layouts) - 1

    def fetch(self, number):
        if number not in self.made:
            self.repeat()
        return self.made.pop(number).restore()

    def repeat(self):
        made = {}
        self.made = made
        layouts = self.layouts
        hooks = hooks_around()

        def keep(tensor):  # it names made, not self: the second graph would keep self alive
            number = len(made)  # which has all so far: fetch takes none out before the end
            assert layout(tensor) == layouts[number], "forward made others when it ran again"
            made[number] = Kept(tensor.detach(), hooks)  # without the second graph behind it
            if len(made) == len(layouts):
                raise Enough

        inputs = [restore(x) for x in self.inputs]
        before = random_states()
        set_random_states(*self.states)
        try:
            # the second graph is for packing: no backward unpacks it
            with torch.enable_grad(), self.autocast, saved_tensors_hooks(keep, unchanged):
                self.forward(*inputs)
        except Enough:
            pass
        assert len(made) == len(layouts), "forward made fewer when it ran again"
        set_random_states(*before)


def layout(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype


def random_states():
    """The states of the random numbers of the CPU and, if one is in use, of the GPU."""
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), gpu


def set_random_states(cpu, gpu):
    torch.set_rng_state(cpu)
    if gpu is not None:
        torch.cuda.set_rng_state(gpu)


# Selective checkpointing makes again what is cheap: what reads its inputs once and computes next to
# nothing. Matmuls, attention, sums over ranks, and all else that is not in this list, are dear.
aten = torch.ops.aten
CHEAP = {
    aten.native_layer_norm.default, aten._fused_rms_norm.default,
    aten.gelu.default, aten.silu.default,
    aten.mul.Tensor,  # of SwiGLU, and of an RMSNorm in steps
    aten._to_copy.default,  # autocast makes copies of activations and weights in another dtype
    aten.view.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int,
    aten.unsqueeze.default, aten.expand.default, aten.clone.default,  # heads of K, V repeated (GQA)
}


class Recipe:
    """How to make a tensor again: a cheap operation, and its inputs, which may be recipes, too."""

    def __init__(self, op, inputs, keywords, result):
        self.op = op
        self.inputs = inputs  # tensors; when the recipe is kept, Kept and Recipes in their place
        self.keywords = keywords
        self.versions = versions(result, inputs)
        self.result = None  # made once for all who want it: q, k and v want the same norm's

    def restore(self):
        if self.result is None:
            inputs = [restore(x) for x in self.inputs]
            self.result = first(self.op(*inputs, **self.keywords))
        return self.result


def versions(result, inputs):
    return [x._version for x in (result, *inputs) if isinstance(x, torch.Tensor)]


def first(outputs):  # norms return their statistics besides
    return outputs[0] if isinstance(outputs, tuple) else outputs


class WriteRecipes(TorchDispatchMode):
    """Sees every operation, and gives the results of cheap ones a recipe.

    Not inside autograd Functions (gradients off): collectives write in place and raise no version.
    """

    def __init__(self):
        super().__init__()
        self.hooks = hooks_around()

    def __torch_dispatch__(self, op, types, inputs=(), keywords=None):
        keywords = keywords or {}
        outputs = op(*inputs, **keywords)
        if op in CHEAP and torch.is_grad_enabled():
            result = first(outputs)
            result.recipe = Recipe(op, inputs, keywords, result)
        return outputs

    def keep(self, tensor):
        """-> its recipe. The tensor itself, if it has none, or if it or an input has changed."""
        recipe = getattr(tensor, "recipe", None)
        if recipe is None or recipe.versions != versions(tensor, recipe.inputs):
            return Kept(tensor, self.hooks)
        recipe.inputs = [self.keep(x) if isinstance(x, torch.Tensor) else x for x in recipe.inputs]
        recipe.versions = versions(tensor, recipe.inputs)  # no tensors are left among them
        return recipe


def selective(forward, *inputs, **keywords):
    """Keep what matmuls, attention and sums make, but no norm, GELU, SwiGLU or cast (Chen 4.2).

    These are made again from what is kept, without running forward: no collective runs twice. What
    is unknown is kept. A compiled forward runs uncompiled in here: compilers choose by themselves.
    """
    writer = WriteRecipes()
    with saved_tensors_hooks(writer.keep, restore), writer:
        return forward(*inputs, **keywords)


class LossScaler:
    """Scales the loss, and with it the gradients, up as far as nothing overflows.

    The smallest number of fp16 is 6e-8: without scaling, small gradients would become zero.
    (loss * scaler.scale).backward(); divide the gradients by it; clip; step. Nothing waits for the
    device. (Micikevicius 2018, section 3.2)
    """

    def __init__(self, optimizer, scale=65536.0, interval=2000):
        assert optimizer.defaults.get("fused"), "take AdamW(.., fused=True): others never skip"
        self.optimizer = optimizer
        self.interval = interval  # good steps until the scale doubles; an overflow halves it
        device = optimizer.param_groups[0]["params"][0].device
        self.scale = torch.full((), scale, device=device)
        self.good = torch.zeros_like(self.scale)  # steps without overflow since it changed

    def step(self, norm):
        """Step the optimizer, unless a gradient has overflowed; then adjust the scale.

        norm: of the gradients of all ranks; where one has overflowed, it is inf or nan on all of
        them. A fused optimizer skips by itself, so that the host need not know.
        """
        overflow = norm.isfinite().logical_not()
        self.optimizer.found_inf = overflow.float()
        self.optimizer.step()
        del self.optimizer.found_inf  # else a later step without this scaler would skip, too
        self.good = torch.where(overflow, 0.0, self.good + 1)
        grow = self.good >= self.interval
        factor = torch.where(grow, 2.0, 1.0)
        self.scale = self.scale * torch.where(overflow, 0.5, factor)
        self.good = torch.where(grow, 0.0, self.good)


# The rest of a correct train step: ranks hold equal weights, and each has its part of the batch.


@torch.no_grad()
def replicate(module, group=None):
    """Give all ranks of the group the weights and buffers of its first rank."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor, group=group, group_src=0)  # the first rank's -> replicated


def accumulate(part_of_loss, microbatches, scaler=None):
    """Run backward for one micro-batch after the other, so that their gradients add up.

    part_of_loss(*microbatch) -> the sum of its token losses, divided by the valid targets of the
    whole global batch: means of micro-batches must not be averaged, they weigh differently.
    -> this rank's part of the loss.
    """
    loss = 0.0
    for microbatch in microbatches:
        part = part_of_loss(*microbatch)
        if scaler is None:
            part.backward()
        else:
            (part * scaler.scale).backward()
        loss = loss + part.detach()
    return loss


def sum_over_ranks(tensors, group=None):
    """Sum each tensor over the ranks, in its place, by one all-reduce for all of them."""
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat, group=group)  # partial -> replicated
    parts = flat.split([t.numel() for t in tensors])
    torch._foreach_copy_(tensors, [part.view_as(t) for t, part in zip(tensors, parts)])


def update(parameters, optimizer, clip, scaler=None, group=None):
    """After the last micro-batch: sum over ranks, unscale, clip (0: do not), step -> the norm."""
    trained = [p for p in parameters if p.grad is not None]
    gradients = [p.grad for p in trained]
    sum_over_ranks(gradients, group)  # partial -> replicated
    if scaler is not None:
        torch._foreach_mul_(gradients, 1 / scaler.scale)
    norm = nn.utils.get_total_norm(gradients)
    # inf and nan are passed on as 0, which clips nothing: one can see whose fault they are
    finite = norm.nan_to_num(0, posinf=0)
    nn.utils.clip_grads_with_norm_(trained, clip or math.inf, finite)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(norm)
    return norm


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


def train_step(model, optimizer, x, y, valid, clip, accum, autocast, scaler=None, group=None):
    """x, y: this rank's rows, in `accum` micro-batches; valid: targets of the whole batch.

    -> this rank's part of the loss, the norm.
    """

    def part_of_loss(x, y):
        with autocast():
            return loss_sum(model(x), y) / valid

    optimizer.zero_grad()
    microbatches = zip(x.tensor_split(accum), y.tensor_split(accum))
    loss = accumulate(part_of_loss, microbatches, scaler)
    norm = update(model.parameters(), optimizer, clip, scaler, group)
    return loss, norm


def evaluate(model, autocast, x, y):
    """-> this rank's part of the sum of token losses."""
    with autocast():
        return loss_sum(model(x), y)


# ---- 3. at work: the same with torch's own API -------------------------------

MATMULS = [op.default for op in (
    aten.mm, aten.addmm, aten.bmm, aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_flash_attention_for_cpu)]
full_at_work = partial(checkpoint, use_reentrant=False)
keep_matmuls = partial(create_selective_checkpoint_contexts, MATMULS)
selective_at_work = partial(full_at_work, context_fn=keep_matmuls)
CHECKPOINT_AT_WORK = {"none": None, "full": full_at_work, "selective": selective_at_work}


def train_step_at_work(model, optimizer, x, y, valid, clip, accum, autocast, scaler):
    ranks = dist.get_world_size()
    optimizer.zero_grad()
    loss = 0.0
    microbatches = zip(x.tensor_split(accum), y.tensor_split(accum))
    for i, (x, y) in enumerate(microbatches):
        only_adds_up = ranks > 1 and i < accum - 1  # DDP does not communicate then
        with model.no_sync() if only_adds_up else nullcontext():
            with autocast():
                part = loss_sum(model(x), y) / valid
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
    "amp": Flag("off", "autocast to", tuple(AMP), course=True),
    "accum": Flag(1, "M, micro-batches", POSITIVE),
    "ckpt": Flag("none", "keep less for backward", tuple(CHECKPOINT)),
    "compile": Flag(False, "torch.compile blocks"),
    "sweep": Flag(False, "every --amp, --accum 1 and M, every --ckpt, in one table"),
}
# what a run trains: one plan for each implementation, or with --sweep each combination
Plan = namedtuple("Plan", "amp accum ckpt")


def refuse(args):
    """What cannot run ends here, in one line, before anything is built."""
    dp = args.world_size
    require(args.batch >= dp * args.accum,
            f"--batch {args.batch}: fewer than {dp} ranks x --accum {args.accum}")
    fits = args.dtype == "fp32" or (args.dtype == "fp64" and args.amp == "off")
    require(fits, f"--dtype {args.dtype} --amp {args.amp}: take fp32 with any --amp, or fp64 with "
            "--amp off")
    require(args.impl == "scratch" or not (args.dry_run or args.sweep),
            "--dry-run and --sweep want --impl scratch")
    compiles = shutil.which("c++") and not args.dry_run
    require(compiles or not args.compile, "--compile needs c++, and no --dry-run")
    require(not (args.sweep and args.save), "--save wants one plan: leave out --sweep")


def plans_of(args):
    """-> {name: Plan}"""
    plan = Plan(args.amp, args.accum, args.ckpt)
    if args.impl == "both":
        return {"scratch": plan, "torch": plan}
    if args.sweep:
        every = product(AMP, sorted({1, args.accum}), CHECKPOINT)
        return {" ".join(map(str, plan)): Plan(*plan) for plan in every}
    return {args.impl: plan}


def set_up(run, name, plan):
    """-> a Side: the model of this plan, and what a run does with it."""
    fp16 = plan.amp == "fp16"
    start = {"scale": 65536.0, "good": 0, **run.start.extra}  # a resumed run has its own
    if name == "torch":
        step = train_step_at_work
        model = parallelize(run.build(), CHECKPOINT_AT_WORK[plan.ckpt], run.args.compile)
        if run.world_size > 1:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = adamw(model.parameters(), run.args.lr)
        scaler = torch.amp.GradScaler(run.device.type, start["scale"], enabled=fp16)
        scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": int(start["good"])})
    else:
        step = train_step
        model = parallelize(run.build(), CHECKPOINT[plan.ckpt], run.args.compile)
        optimizer = adamw(model.parameters(), run.args.lr)
        scaler = None
        if fp16:
            scaler = LossScaler(optimizer, start["scale"])
            scaler.good.fill_(start["good"])
    autocast = partial(torch.autocast, run.device.type, AMP[plan.amp], enabled=plan.amp != "off")
    return Side(
        model=model,
        optimizer=optimizer,
        train_step=partial(step, accum=plan.accum, autocast=autocast, scaler=scaler),
        evaluate=partial(evaluate, model, autocast),
        extra=partial(state_of, scaler, optimizer) if fp16 else None,
        may_overflow=fp16,
    )


def state_of(scaler, optimizer):
    """-> what a checkpoint holds besides: the scaler's state, AdamW's steps without overflow."""
    steps = [state["step"] for state in optimizer.state.values()]
    found = {"updates": int(max(steps, default=0))}
    if isinstance(scaler, LossScaler):
        return {**found, "scale": scaler.scale.item(), "good": scaler.good.item()}
    state = scaler.state_dict()
    return {**found, "scale": state["scale"], "good": state["_growth_tracker"]}


# What the textbook says, where all is trained: the docstring's table.
# Bytes that a block keeps for C, F, K D of each token, and besides for W and T D
KEPT = {
    # (form, autocast, selective): (C, F, K D, W, T D)
    ("gpt2", False, False): (64, 0, 0, 0, 0),
    ("gpt2", False, True): (40, 0, 0, 0, 0),
    ("gpt2", True, False): (40, 0, 0, 2, 0),
    ("gpt2", True, True): (24, 0, 0, 0, 0),
    ("llama", False, False): (36, 16, 8, 0, 8),
    ("llama", False, True): (16, 8, 8, 0, 8),
    ("llama", True, False): (32, 8, 4, 2, 4),
    ("llama", True, True): (12, 4, 4, 0, 8),
}
OF_NORMS = {"gpt2": 16, "llama": 8}


def kept_by_block(run, plan, t):
    """-> bytes that a block keeps of t tokens"""
    cfg = run.cfg
    D = cfg.width // cfg.heads
    block = run.sides[run.impls[0]].model.blocks[0]
    W = sum(p.numel() for p in block.parameters() if p.dim() == 2)
    sizes = t * cfg.width, t * cfg.hidden, t * cfg.kv_heads * D, W, cfg.seq * D
    coefficients = KEPT[cfg.form, plan.amp != "off", plan.ckpt == "selective"]
    kept = sum(bytes_each * size for bytes_each, size in zip(coefficients, sizes))
    kept += t * (4 * cfg.heads + OF_NORMS[cfg.form])  # softmax and norms
    return kept * run.dtype.itemsize // 4  # in fp64 twice as many


def kept_by_head(run, plan, t, rows):
    """-> bytes that the final norm, the head and the loss keep. rows: of all micro-batches."""
    cfg = run.cfg
    b = run.dtype.itemsize
    low = b if plan.amp == "off" else 2
    norm = b * (cfg.width + 2)  # its input, mean and deviation
    if cfg.form == "llama":
        norm = b * (2 * cfg.width + 1)  # its input, the input over its root mean square, that root
    kept = t * (norm + low * cfg.width + b * cfg.vocab)  # the head's input, log-probabilities
    kept += b  # a scalar of cross_entropy's
    kept += 8 * rows * cfg.seq  # targets: a micro-batch's are a view, which keeps all of them
    if plan.amp != "off":
        kept += low * cfg.vocab * cfg.width  # the head's weight, cast
    if plan.amp == "fp16":
        kept += 4  # the scale
    return kept


def activations(run, plan):
    """-> formula, and the most bytes that a step keeps for backward at one time."""
    cfg = run.cfg
    rows = len(share(run.args.batch, run.world_size, run.rank))
    t = math.ceil(rows / plan.accum) * cfg.seq  # tokens of the largest micro-batch
    block = kept_by_block(run, plan, t)
    head = kept_by_head(run, plan, t, rows)
    indices = 8 * rows * cfg.seq
    if cfg.form == "gpt2":
        indices += 8 * cfg.seq  # positions
    if plan.ckpt != "full":
        return f"on a CPU: L {block} + head", cfg.layers * block + head + indices
    x = run.dtype.itemsize * t * cfg.width  # a block's input, which it keeps
    # the block that is made again keeps the rest; the head's are gone when the first one is
    most = cfg.layers * x + max(block - x, head)
    return "on a CPU: L b C t + max(block - b C t, head)", most + indices


def compare_plans(run, plans):
    """Prints what each plan keeps and takes. Losses are compared with those of the first one."""
    run.say(f"\n{'amp  M ckpt':16} {'MB kept':>9} {'textbook':>9} {'peak':>9} {'ms/step':>9} "
            f"{'loss gap':>8}")
    run.extra["plans"] = {}
    losses = run.trace[run.impls[0]].loss
    for name, plan in plans.items():
        gaps = [abs(loss / losses[step] - 1) for step, loss in run.trace[name].loss.items()]
        row = dict(
            kept=run.ledger[name].memory["activations"],
            textbook=activations(run, plan)[1],
            peak=run.ledger[name].memory["peak"],
            ms=run.ms(name) or 0.0,
            gap=float(max(gaps, default=0.0)),
        )
        run.extra["plans"][name] = row
        run.say(f"{name:16} {row['kept'] / 1e6:9.3f} {row['textbook'] / 1e6:9.3f} "
                f"{row['peak'] / 1e6:9.3f} {row['ms']:9.1f} {row['gap']:8.1e}")


def main():
    args = arguments(__doc__, **FLAGS)
    refuse(args)
    plans = plans_of(args)
    with Run(args, impls=tuple(plans)) as run:
        sides = {name: set_up(run, name, plan) for name, plan in plans.items()}
        rows = share(args.batch, run.world_size, run.rank)
        for name, step, x, y, valid in run.steps(sides, rows):
            side = sides[name]
            with run.measure(name, step):
                loss, norm = side.train_step(side.model, side.optimizer, x, y, valid, args.clip)
            run.log(name, step, loss, norm)
            if side.extra and not run.dry:
                run.extra.setdefault(f"scale {name}", []).append(side.extra()["scale"])

        dp = run.world_size
        total = sum(p.numel() for p in sides[run.impls[0]].model.parameters())
        sent = 2 * (dp - 1) / dp * run.dtype.itemsize * total
        run.textbook([("wire all_reduce", "2 (dp-1)/dp b P", sent)])
        if run.impls[0] != "torch":
            run.textbook([("held activations", *activations(run, plans[run.impls[0]]))])
        if args.sweep:
            compare_plans(run, plans)
        judged_as = args.dtype
        if plans[run.impls[0]].amp != "off":
            judged_as = "bf16"  # only losses are judged, to 2%
        return run.finish(total, total, judged_as=judged_as)


if __name__ == "__main__":
    sys.exit(main())
