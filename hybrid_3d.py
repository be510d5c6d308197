"""Data, tensor and pipeline parallelism in one run; context, expert parallelism and ZeRO by flags.

                     copy 0 (rows 0..3)      copy 1 (rows 4..7)
    stage 0          ranks 0 1  ---- dp ---- ranks 2 3        tp: neighbours, who talk in each layer
      embedding,        |  |                    |  |          dp: once per step, during backward
      layers 0 1       pp pp                   pp pp          pp: to the next stage per micro-batch;
    stage 1             |  |                    |  |              once per step both ends, where the
      layers, head   ranks 4 5  ---- dp ---- ranks 6 7            head is tied to the embedding

    rank = ((pp_rank dp + dp_rank) cp + cp_rank) tp + tp_rank
    data = dp x cp = replicas x ep: ep neighbours share out the experts, replicas hold the same ones

What becomes of a gradient along each axis. cut: each rank has its own part. same: all have the
same. sum: each has a summand, and sum_gradients makes the sum. The norm counts each number once.

    kind of parameter           tp                 data    replicas    ep     ends
    matrix                      cut                sum
    outside: norm, row bias,    same, --sp: sum    sum
      router
    expert                      sum (with --sp)            sum         cut
    tied: embedding and head    cut                sum                        sum

    numbers that a rank of a middle stage sends in a step of M micro-batches, x = B/(dp M) T/cp C
    tp    M L/pp 8 x (tp-1)/tp; --sp: 10, and the small sums of the table
    pp    M 2 x; --sp: 1/tp of it
    cp    M L/pp 6 x (cp-1)/tp K/H: keys and values twice, their gradients (fp32 or wider) once
    data  k P (n-1)/n, of P parameters here, n = dp cp; k is 2, ZeRO-2: M + 1, ZeRO-3: 3 M

Not for: parameters that are whole, but used inside of what tp cuts (norms of q and k need a row of
the table), optimizers that look at whole matrices, several ties between stages.
Narayanan 2021, arXiv:2104.04473, section 3; Llama team 2024, arXiv:2407.21783, section 3.3.2.
At work: DeviceMesh, fully_shard, parallelize_module, torch.distributed.pipelining (section 3).

    torchrun --standalone --nproc_per_node=8 hybrid_3d.py --dp 2 --tp 2 --pp 2
    mesh = Mesh(dp=2, tp=2, pp=2)
    model = parallelize(plain, mesh, plans, layers, boundary)
    optimizer = AdamW(model.parameter_groups(), lr=1e-3)
    model.zero_grad(); model.pipeline.step(inputs, loss_of); sum_gradients(model)
    step(model, optimizer, gradient_norm(model), clip)
"""
import math
from collections import defaultdict, namedtuple
from fnmatch import fnmatchcase
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn

import context_parallel
import moe
import pipeline_parallel
import tensor_parallel
from pipeline_parallel import Mail, Pipeline, SplitLinear, carve
from tensor_parallel import (
    ColumnParallel, CutSequence, WholeSequence, vocab_parallel_cross_entropy)
from zero import Unit, ZeRO, held

import contextlib
import sys
from itertools import accumulate

from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

import amp_accum_ckpt
from common import adamw, build, loss_sum, share
from harness.checkpoint import Piece, parts_pieces, pieces_of, run_pieces
from harness.flags import ANY, POSITIVE, Flag, arguments, require
from harness.run import Run, Side

# ---- 1. the technique (copy this; it needs torch and the files of the techniques) ---


def parallelize(model, mesh, plans, layers, boundary, *, sp=False, attend=None, recompute=None,
                autocast=None, zero=0):
    """A plain model -> Hybrid: this rank's part of it, with the Pipeline that runs it.

    plans      pipeline_parallel's, of all ranks
    layers     how many each stage gets
    boundary   the size, dtype and device of what goes from stage to stage
    sp         norms and residuals are cut over tp, along T
    attend     one of context_parallel's classes, for cp > 1
    recompute  amp_accum_ckpt's full or selective; autocast: a context, such as torch.autocast
    zero       ZeRO's level
    """
    origins = origins_of(model, layers, plans)
    # 1. Within a layer: ranks share its matrices (tp), its sequence (cp) and its experts (ep).
    tp = within_layers(model, mesh, plans, sp, attend)
    # 2. Between layers: of all stages this rank keeps those that its plan names (pp).
    here, tied = between_layers(model, layers, plans[mesh.place["pp"]])
    # 3. Around layers: what a block computes again in backward, and in which precision.
    around_layers(here, recompute, autocast)
    # 4. Copies of it all: they sum gradients (dp, cp), and share out what all of them hold (ZeRO).
    hybrid = Hybrid(here, tied, mesh, tp, kinds_of_parameters(sp), origins, level=zero)

    links = pipeline_parallel.make_links(plans, mesh.pipelines)
    mail = Mail(plans, mesh.pipeline, mesh.group["pp"], links, *boundary)
    hybrid.pipeline = Pipeline(
        here, plans, mail, hybrid.before_backward, hybrid.after_backward)
    return hybrid


# ---- who is who


class Mesh:
    """The sizes of the axes, this rank's place on them, and its group along each.

    tp varies fastest, since its ranks talk most, and pp slowest (Narayanan 2021, section 3).
    "peers" are all ranks with the same stages. "ends" are the ranks of the first and the last
    stage, `ends` of a pipeline: one rank, if it has both.
    """

    def __init__(self, dp=1, cp=1, tp=1, pp=1, ep=1, ends=(0, -1)):
        ranks = torch.arange(pp * dp * cp * tp).view(pp, dp, cp, tp)
        place = (ranks == dist.get_rank()).nonzero()[0].tolist()
        self.place = dict(zip(("pp", "dp", "cp", "tp"), place))
        self.pipelines = ranks.flatten(1).T.tolist()
        [self.pipeline] = [line for line in self.pipelines if dist.get_rank() in line]
        self.size = {}
        self.group = {}
        self.add("pp", ranks, [0])
        self.add("cp", ranks, [2])
        self.add("tp", ranks, [3])
        self.add("data", ranks, [1, 2])
        self.add("peers", ranks, [1, 2, 3])
        by_expert = ranks.view(pp, -1, ep, tp)
        self.add("replicas", by_expert, [1])
        self.add("ep", by_expert, [2])
        both = sorted({end % pp for end in ends})
        self.add("ends", ranks[both], [0])

    def add(self, axis, ranks, dims):
        """A group for each set of ranks that differ in the dimensions `dims` of `ranks` alone.

        Every rank makes every group, in one order: NCCL splits a group off the world's
        communicator, and all ranks have to take part in that.
        """
        others = [dim for dim in range(ranks.dim()) if dim not in dims]
        self.size[axis] = math.prod(ranks.shape[dim] for dim in dims)
        rows = ranks.permute(*others, *dims).reshape(-1, self.size[axis])  # a group each
        for row in rows.tolist():
            group = dist.new_group(row)
            if dist.get_rank() in row:
                self.group[axis] = group


# ---- what becomes of a gradient

# summed  the axes along which, after backward, each rank has a summand
# same    the axes along which all have the same already
# cut     the axes along which each has its own part
Kind = namedtuple("Kind", "summed same cut")

COPIES = ("data", "replicas")  # the axes whose ranks hold copies, which ZeRO may cut


def kinds_of_parameters(sp):
    """-> {name of a kind: Kind}, the docstring's table."""
    outside = Kind(summed=["data"], same=["tp"], cut=[])
    if sp:  # a rank has seen a part of the tokens
        outside = Kind(summed=["data", "tp"], same=[], cut=[])
    return {
        "matrix": Kind(summed=["data"], same=[], cut=["tp"]),
        "outside": outside,
        "expert": Kind(summed=["replicas", "tp"], same=[], cut=["ep"]),  # with tp: --sp alone
        "tied": Kind(summed=["data", "ends"], same=[], cut=["tp"]),
    }


def sum_gradients_plainly(model):
    """After backward each gradient becomes its sum over all axes for which the table says so.

    Where level is 0 and the pipeline has no hooks, these are the gradients of sum_gradients.
    """
    for part in model.parts:
        for axis in model.kind[part.parameter].summed:
            dist.all_reduce(part.grad, group=model.mesh.group[axis])  # partial -> replicated


def sum_gradients(model):
    """The same, in one call an axis. Along data and replicas the last backward has begun it, and
    what is left is done here."""
    for zero in model.zeros:
        if zero.level < 2:  # else after_backward has summed
            zero.sync = True
            zero.reduce()  # partial -> replicated, in ZeRO-1 sharded
    for axis in ("tp", "ends"):
        summands = [part.grad for part in model.parts if axis in model.kind[part.parameter].summed]
        if summands and model.mesh.size[axis] > 1:
            # partial -> replicated
            tensor_parallel.sum_over_ranks(summands, model.mesh.group[axis])


class Hybrid(nn.Module):
    """This rank's stages, and the ZeROs that sum and step their parameters.

    here     {stage: module}, which tp has cut already
    tied     {parameter that several stages have: its name in the first}
    kinds    {name of a kind: Kind}
    origins  {name in the plain model: Origin}
    level    ZeRO's, 0 to 3
    """

    def __init__(self, here, tied, mesh, tp, kinds, origins, level):
        super().__init__()
        self.stages = nn.ModuleList(here.values())
        self.mesh = mesh
        self.tp = tp
        self.origins = origins
        self.level = level
        self.pipeline = None  # the Pipeline that runs the stages, and calls the two hooks below
        self.names = {}  # {parameter: its name in the plain model}
        self.kind = {}  # {parameter: Kind}
        self.zeros_of = defaultdict(list)  # {stage: [ZeRO]}; "tied": they wait for all stages
        for (stage, axis), units in self.lay_out(here, tied, kinds).items():
            own_level = level
            if stage == "tied":
                own_level = min(level, 1)  # a gradient stays whole until the last backward
            zero = ZeRO(list(units.values()), mesh.group[axis], own_level)
            self.zeros_of[stage].append(zero)
        self.zeros = [zero for zeros in self.zeros_of.values() for zero in zeros]
        self.flats = [flat for zero in self.zeros for flat in zero.flats]
        self.parts = [part for zero in self.zeros for part in zero.parts]
        shares = [1 / self.holders(part.parameter) for part in self.parts]
        p = next(self.parameters())
        wide = torch.promote_types(p.dtype, torch.float32)
        self.shares = torch.tensor(shares, dtype=wide, device=p.device)

    def lay_out(self, here, tied, kinds):
        """-> {(stage, axis of copies): {name of a module: Unit}} of what is trained."""
        units = defaultdict(dict)
        for stage, module in here.items():
            for name, p in module.named_parameters():
                if p in self.kind:  # the other end of the tied one
                    continue
                kind = kinds["tied" if p in tied else kind_of(name)]
                is_cut = p in self.tp.cuts
                assert self.tp.size == 1 or is_cut == ("tp" in kind.cut), f"{name}: another kind?"
                self.names[p] = tied.get(p, name)
                self.kind[p] = kind
                if p.requires_grad:
                    place = ("tied" if p in tied else stage), kind.summed[0]
                    site = module.get_submodule(unit_of(name))
                    unit = Unit([], [site], stays=not in_block(name))
                    units[place].setdefault(unit_of(name), unit).parameters.append(p)
        return units

    def holders(self, p):
        """How many ranks hold the same number of the summed gradient."""
        axes = self.kind[p].summed + self.kind[p].same
        if self.level:  # ZeRO has cut it
            axes = [axis for axis in axes if axis not in COPIES]
        return math.prod(self.mesh.size[axis] for axis in axes)

    def parameter_groups(self):
        """What an elementwise optimizer takes."""
        return [{"params": [part.master for part in self.parts]}]

    def zero_grad(self):
        for zero in self.zeros:
            zero.zero_grad()
            zero.sync = False

    def before_backward(self, stage, is_last, is_whole):
        """Before a backward that adds to a stage's gradients. ZeRO-0 and 1 sum over copies during
        the last one, ZeRO-2 and 3 during each one after which a micro-batch's are whole."""
        for zero in self.zeros_of[stage]:
            zero.sync = is_whole if zero.level >= 2 else is_last

    def after_backward(self, stage):
        for zero in self.zeros_of[stage]:
            if zero.sync and zero.level >= 2:  # it has no room to wait
                zero.reduce()  # partial -> sharded


# ---- the rest of a step


def gradient_norm(model):
    """Of the whole model: of n ranks that hold a number, each brings 1/n of its square."""
    square = model.shares.new_zeros(())
    if model.parts:
        norms = torch._foreach_norm([part.grad for part in model.parts], dtype=square.dtype)
        square = (torch.stack(norms).square() * model.shares).sum()
    dist.all_reduce(square)  # over all ranks: partial -> replicated
    return square.sqrt()


def step(model, optimizer, norm, clip):
    """Clips the summed gradients to a norm of `clip` (0: does not), and steps the parameters."""
    if clip and model.parts:
        finite = norm.nan_to_num(0, posinf=0)  # else every gradient would become nan
        scale = (clip / (finite + 1e-6)).clamp(max=1)
        torch._foreach_mul_([part.grad for part in model.parts], scale)
    for zero in model.zeros:
        zero.step(optimizer)
    moe.step_biases(model)


def full_state_dict(model):
    """-> {name in the plain model: parameter or buffer}, on every rank."""
    found = {}
    for zero in model.zeros:
        found.update(zero.full_parameters())  # over data or replicas: sharded -> replicated
    return gather(model, found, list(model.origins))


def full_gradients(model):
    """-> {name in the plain model: gradient} of what is trained, on every rank."""
    found = {}
    for zero in model.zeros:
        found.update(zero.full_gradients())  # over data or replicas: sharded -> replicated
    trained = [name for name, origin in model.origins.items() if origin.is_trained]
    return gather(model, found, trained)


def gather(model, found, names):
    """found: {parameter of this rank: itself or its gradient, whole along data or replicas}

    -> {name in the plain model: tensor} of these names, of all stages and experts, on every rank.
    """
    mine = {}
    for stage in model.stages:
        for name, t in stage.state_dict(keep_vars=True).items():
            # over tp: sharded -> replicated
            mine[name] = tensor_parallel.unshard(found.get(t, t), model.tp.cuts.get(t), model.tp)
    mine = moe.gather_experts(mine, model.mesh.group["ep"])  # over ep: sharded -> replicated
    origins = {name: model.origins[name][:2] for name in names}
    # over pp: on one stage -> replicated
    return pipeline_parallel.gather(mine, origins, model.mesh.group["pp"])


# ---- 2. the toy GPT, parallelized --------------------------------------------

KIND_BY_NAME = [  # the first pattern that fits a parameter's name
    ("*.experts.*", "expert"),
    ("*.router.*", "outside"),
    ("*norm*", "outside"),
    ("*.out.bias", "outside"),  # row biases, added to the sum over tp
    ("*.down.bias", "outside"),
    ("*", "matrix"),  # and biases of columns, embeddings and positions, which are cut as they are
]


def kind_of(name):
    for pattern, kind in KIND_BY_NAME:
        if fnmatchcase(name, pattern):
            return kind


def unit_of(name):
    """-> the module whose parameters ZeRO keeps together: a block, or one outside of blocks.

    The embedding and the head are alone, so that ZeRO cuts the tied weight alike at both ends.
    """
    words = name.split(".")
    if in_block(name):
        return f"blocks.{words[1]}"
    return words[0]


def in_block(name):
    return name.startswith("blocks.")


# rank: the first of a pipeline that has a tensor. like: one like it, without memory. is_trained: of
# a parameter by its first name
Origin = namedtuple("Origin", "rank like is_trained")


def origins_of(model, layers, plans):
    """-> {name in the plain model: Origin}, before the model is cut."""
    home = pipeline_parallel.homes(plans)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    found = {}
    for number, stage in enumerate(carve(model, layers)):
        for name, t in stage.state_dict().items():
            found.setdefault(name, Origin(home[number], t.to("meta"), name in trained))
    return found


def within_layers(model, mesh, plans, sp, attend):
    """-> tensor_parallel's WholeSequence or CutSequence"""
    tp = WholeSequence(mesh.group["tp"])
    if sp:
        tp = CutSequence(mesh.group["tp"])
    if any(action.kind == "W" for action in plans[0]):
        tp.column_parallel = split_columns
        tp.linear = pipeline_parallel.split_linear
    if tp.size > 1:
        tensor_parallel.cut_model(model, tp, replacements(model))
    if mesh.size["cp"] > 1:
        context_parallel.parallelize(model, attend(mesh.group["cp"]))
    if has_experts(model):
        microbatches = 1 + max(action.microbatch for action in plans[0])
        moe.parallelize(model, mesh.group["ep"], mesh.group["peers"], microbatches)
    return tp


def replacements(model):
    """-> tensor_parallel's plan, by which experts stay as they are"""
    found = {}
    for pattern, kind in tensor_parallel.PLANS[form_of(model)].items():
        if has_experts(model) and ".mlp" in pattern:
            if model.blocks[0].mlp.shared is None:
                continue
            pattern = pattern.replace(".mlp", ".mlp.shared")
        found[pattern] = kind
    return found


def form_of(model):
    return "llama" if model.pos is None else "gpt2"


def has_experts(model):
    return hasattr(model.blocks[0].mlp, "experts")


def split_columns(tp, x, *parameters):
    return SplitColumns.apply(tp, x, parameters)  # in a tuple: autograd does not see them


class SplitColumns(torch.autograd.Function):
    """tp's Linears cut by columns, for zero-bubble schedules, as SplitLinear is for ordinary ones.

    If the gradients of weights come later, nothing hides the sum of dx over tp.
    """

    @staticmethod
    def forward(ctx, tp, x, parameters):
        ctx.parameters = parameters
        return ColumnParallel.forward(ctx, tp, x, *parameters)

    @staticmethod
    def backward(ctx, *dys):
        x = ctx.saved_tensors[0]
        dx = ctx.tp.reduce(tensor_parallel.input_gradient(dys, ctx.parameters[::2]))
        make = partial(add_gradients, ctx.tp, x, dys, ctx.parameters)
        if SplitLinear.later is None:
            make()
        else:
            SplitLinear.later.append(make)
        return None, dx.wait(), None


def add_gradients(tp, x, dys, parameters):
    """W of some Linears that read the same x."""
    x = tp.gather(x).wait()  # sharded(T) -> replicated
    gradients = tensor_parallel.weight_gradients(x, dys, parameters[1::2])
    for p, gradient in zip(parameters, gradients):
        if gradient is not None and p.requires_grad:
            torch.autograd.backward(p, gradient)


def between_layers(model, layers, plan):
    """-> {stage: module} of this rank, {parameter that several stages have: its name in the first}
    """
    stages = carve(model, layers)
    first = {}  # {parameter: the first stage that has it, its name there}
    tied = {}
    for number, stage in enumerate(stages):
        for name, p in stage.named_parameters():
            first_number, first_name = first.setdefault(p, (number, name))
            if number != first_number:
                tied[p] = first_name
    return {action.stage: stages[action.stage] for action in plan}, tied


def around_layers(here, recompute, autocast):
    for stage in here.values():
        if recompute:
            for block in stage.blocks.values():
                block.forward = partial(recompute, block.forward)
        if autocast:
            stage.forward = autocast(stage.forward)


def train_step(model, optimizer, x, y, valid, clip):
    """x, y: this rank's rows and tokens (B/dp, T/cp); valid: targets of the whole batch.

    -> this rank's part of the loss, the gradient norm."""
    model.zero_grad()
    inputs, loss_of = in_microbatches(model, x, y, valid)
    loss = model.pipeline.step(inputs, loss_of) / model.tp.size
    sum_gradients(model)
    norm = gradient_norm(model)
    balancing = moe.balancing_losses(model)
    step(model, optimizer, norm, clip)
    return loss + balancing, norm


def evaluate(model, x, y):
    """-> this rank's part of the sum of token losses."""
    inputs, loss_of = in_microbatches(model, x, y, 1)
    loss = model.pipeline.evaluate(inputs, loss_of) / model.tp.size
    for zero in model.zeros:
        zero.free_units()  # ZeRO-3's, which reduce() would have freed
    return loss


def in_microbatches(model, x, y, valid):
    """-> what Pipeline.step takes: the inputs, and (logits, number of a micro-batch) -> its part of
    the loss, which every rank of tp has."""
    targets = y.chunk(model.pipeline.microbatches)
    vocab = len(model.origins["tok.weight"].like)  # V, as in the plain model

    def loss_of(logits, m):
        if model.tp.size == 1:
            return loss_sum(logits, targets[m]) / valid
        loss = vocab_parallel_cross_entropy(logits, targets[m], vocab, model.tp)
        return loss / valid

    return x.chunk(model.pipeline.microbatches), loss_of


# ---- 3. at work: the same with torch's own API -------------------------------


def local(t):
    """A DTensor's part on this rank; an ordinary tensor is that already."""
    if isinstance(t, DTensor):
        return t.to_local()
    return t


def whole(t):
    """A DTensor, sharded or (a norm) partial -> replicated; an ordinary tensor is whole already."""
    if isinstance(t, DTensor):
        return t.full_tensor()
    return t


class AtWork(nn.Module):
    """This rank's stages of the toy GPT, and torch's schedule, which runs them."""

    def __init__(self, here, ends_are_tied, mesh, device_mesh, origins):
        super().__init__()
        self.stages = nn.ModuleList(here.values())
        self.first = self.stages[0].first
        self.last = self.stages[-1].last
        # the embedding is tied to the head, which another rank has
        self.ends_are_tied = ends_are_tied and self.first != self.last
        self.mesh = mesh
        self.device_mesh = device_mesh  # torch's, of pp, dp and tp
        self.origins = origins
        self.valid = 1  # targets of the batch under way
        self.schedule = None  # made by schedule_at_work, which needs loss_of

    def tied(self):
        """-> the embedding or head here, if it is tied to another rank's, else None"""
        if not self.ends_are_tied:
            return None
        if self.first:
            return self.stages[0].tok.weight
        return self.stages[-1].head.weight

    def loss_of(self, logits, targets):
        """What torch's schedule calls on the last stage."""
        if self.mesh.size["tp"] > 1:
            vocab = len(self.origins["tok.weight"].like)  # V, as in the plain model
            shape = torch.Size((*targets.shape, vocab))
            stride = targets.shape[1] * vocab, vocab, 1
            logits = DTensor.from_local(
                logits, self.device_mesh["tp"], [Shard(2)], shape=shape, stride=stride)
        # fully_shard averages over dp
        return loss_sum(logits, targets) * self.mesh.size["data"] / self.valid

    def run(self, run_schedule, x, y, valid):
        """-> this rank's part of the loss. run_schedule: the schedule's step, or its eval."""
        self.valid = valid
        inputs = []
        named = {}
        losses = []
        if self.first:
            inputs.append(x)
        if self.last:
            named = {"target": y, "losses": losses}
        context = contextlib.nullcontext()
        if self.mesh.size["tp"] > 1:
            context = loss_parallel()  # the logits are cut
        with context:
            run_schedule(*inputs, **named, return_outputs=False)
        total = torch.zeros((), device=x.device)
        for loss in losses:
            total = total + local(loss.detach())
        # loss_of has multiplied by dp, and each rank of tp has the whole
        return total / (self.mesh.size["data"] * self.mesh.size["tp"])

    def evaluate(self, x, y):
        return self.run(self.schedule.eval, x, y, 1)


def parallelize_at_work(model, mesh, device_mesh, plans, layers, boundary, args):
    """The plain GPT -> AtWork. device_mesh: torch's, of pp, dp and tp."""
    origins = origins_of(model, layers, plans)
    if mesh.size["tp"] > 1:
        tensor_parallel.parallelize_at_work(model, device_mesh["tp"], args.sp)
    columns = len(local(model.head.weight))  # before fully_shard cuts it again
    here, tied = between_layers(model, layers, plans[mesh.place["pp"]])
    for stage in here.values():
        if stage.last and mesh.size["tp"] > 1:
            # torch's pipeline takes ordinary tensors; loss_of makes a DTensor of them again
            stage.register_forward_hook(lambda module, inputs, logits: logits.to_local())
        if mesh.size["data"] > 1:
            for unit in [*stage.blocks.values(), stage]:
                fully_shard(unit, mesh=device_mesh["dp"], reshard_after_forward=False)
    at_work = AtWork(here, bool(tied), mesh, device_mesh, origins)
    parts = []
    for number, stage in here.items():
        shapes = shapes_at_work(stage, boundary, args.seq, columns)
        parts.append(stage_at_work(stage, number, len(layers), mesh.group["pp"], shapes))
    at_work.schedule = schedule_at_work(args, parts, at_work.loss_of)
    return at_work


def shapes_at_work(stage, boundary, T, columns):
    """-> what a stage takes and gives. Without it torch asks other ranks, and that takes NumPy."""
    size, dtype, device = boundary
    edge = torch.empty(size, dtype=dtype, device=device, requires_grad=True)
    taken = edge
    given = edge
    if stage.first:
        taken = edge.new_empty(size[0], T, dtype=torch.int64)
    if stage.last:
        given = edge.new_empty(size[0], T, columns)
    return taken, given


def stage_at_work(stage, number, count, group, shapes):
    from torch.distributed import pipelining  # takes as long to import as all the rest

    taken, given = shapes
    return pipelining.PipelineStage(
        stage, number, count, taken.device, input_args=taken, output_args=given, group=group)


def schedule_at_work(args, parts, loss_of):
    from torch.distributed.pipelining import schedules

    if args.schedule in pipeline_parallel.ONE_STAGE:
        [parts] = parts
    make = getattr(schedules, pipeline_parallel.AT_WORK[args.schedule])
    return make(parts, args.micro, loss_fn=loss_of, scale_grads=False)  # gradients are a sum


def full_state_dict_at_work(model):
    mine = {}
    for stage in model.stages:
        mine.update({name: whole(t) for name, t in stage.state_dict().items()})
    origins = {name: origin[:2] for name, origin in model.origins.items()}
    return pipeline_parallel.gather(mine, origins, model.mesh.group["pp"])


def full_gradients_at_work(model):
    mine = {"any": torch.zeros((), device=next(model.parameters()).device)}
    for stage in model.stages:
        for name, p in stage.named_parameters(remove_duplicate=False):
            if p.requires_grad:
                mine[name] = whole(p.grad)
    origins = {name: origin[:2] for name, origin in model.origins.items() if origin.is_trained}
    return pipeline_parallel.gather(mine, origins, model.mesh.group["pp"])


def train_step_at_work(model, optimizer, x, y, valid, clip):
    optimizer.zero_grad()
    loss = model.run(model.schedule.step, x, y, valid)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        if isinstance(p, DTensor):
            # the gradient of a cut embedding comes replicated
            p.grad = p.grad.redistribute(placements=p.placements)
    tied = model.tied()
    if tied is not None and tied.requires_grad:
        dist.all_reduce(local(tied.grad), group=model.mesh.group["ends"])  # partial -> replicated
    # the tied one counts on the first stage only
    counted = [p.grad for p in parameters if p is not tied or model.first]
    square = torch.zeros((), dtype=next(model.parameters()).dtype, device=x.device)
    if counted:
        square = whole(nn.utils.get_total_norm(counted)).square()
    dist.all_reduce(square, group=model.mesh.group["pp"])  # partial -> replicated
    norm = square.sqrt()
    if clip and parameters:
        scale = (clip / (norm + 1e-6)).clamp(max=1)
        torch._foreach_mul_([local(p.grad) for p in parameters], scale)
    optimizer.step()
    return loss, norm


# ---- 4. run ------------------------------------------------------------------

# naive never overlaps, pipedream trains something else, auto wants --limit and --times
NOT_HERE = ("naive", "pipedream")
SCHEDULES = tuple(name for name in pipeline_parallel.SCHEDULES if name not in NOT_HERE)
FLAGS = {
    "dp": Flag(int, "copies, which share the batch", POSITIVE),
    "tp": Flag(int, "ranks that share each layer", POSITIVE),
    "pp": Flag(int, "ranks of a pipeline; of dp, tp, pp those left out are chosen", POSITIVE),
    "cp": Flag(1, "ranks that share each sequence", POSITIVE),
    "attn": Flag("zigzag", "--cp: how queries meet other ranks' keys",
                 tuple(context_parallel.KINDS)),
    "micro": Flag(int, "M, micro-batches of a copy (4, or 2 or 1 if 4 do not fit)", POSITIVE),
    "schedule": Flag("1f1b", "order of the work", SCHEDULES),
    "chunks": Flag(2, "stages of a rank, for interleaved and bfs", POSITIVE),
    "sp": Flag(False, "cut norms and residuals over tp, along T"),
    "zero": Flag(0, "over dp x cp: cut optimizer (1), gradients (2), parameters (3); --impl torch "
                 "cuts all", (0, 3)),
    "ckpt": Flag("none", "what blocks compute again in backward", ("none", "full", "selective")),
    "amp": Flag("off", "autocast to", ("off", "bf16")),
    **moe.FLAGS,
    "experts": Flag(0, "E in each layer, in the place of its MLP (0: none)", ANY),
}


def layout(args):
    """Fills in what the flags leave open. What cannot run ends here, in one line."""
    fill_axes(args)
    args.micro = args.micro or math.gcd(4, args.batch // args.dp)
    for flag in ("ep", "shared", "capacity"):
        require(args.experts or not getattr(args, flag), f"--{flag} is for --experts E")
    args.ep = args.ep or args.dp * args.cp
    if not args.experts:
        args.ep = 1
    refuse_sizes(args)
    refuse_together(args)
    if args.impl != "scratch":
        refuse_torch(args)
    args.sp = args.sp and args.tp > 1


def fill_axes(args):
    """dp, tp and pp that are left out. If all are, and 4 divides the ranks, tp and pp are 2. The
    last that is open in the order pp, tp, dp gets the ranks that remain, the others are 1."""
    ranks = args.world_size // args.cp
    missing = [axis for axis in ("pp", "tp", "dp") if getattr(args, axis) is None]
    for axis in missing:
        setattr(args, axis, 1)
    if len(missing) == 3 and ranks % 4 == 0:
        args.pp = 2
        args.tp = 2
    if missing:
        setattr(args, missing[-1], max(1, ranks // (args.dp * args.tp * args.pp)))


def refuse_sizes(args):
    """What does not divide."""
    cfg = args.cfg
    tp = args.tp
    data = args.dp * args.cp
    heads = f"--heads {cfg.heads}, --kv-heads {cfg.kv_heads}"
    chunks = args.cp * len(context_parallel.on_paper(args.attn, 0, args.cp).chunks())
    stages = args.pp * pipeline_parallel.chunks_of(args.schedule, args.chunks)
    require(data * tp * args.pp == args.world_size,
            f"--dp {args.dp} x --cp {args.cp} x --tp {tp} x --pp {args.pp}: their product is not "
            f"{args.world_size}, the number of ranks")
    require(cfg.kv_heads % tp == 0, f"{heads}: do not divide over --tp {tp}")
    require(cfg.hidden % tp == 0, f"--hidden {cfg.hidden} does not divide over --tp {tp}")
    require(args.cp == 1 or cfg.seq % chunks == 0, f"--seq {cfg.seq} does not divide into "
            f"{chunks} chunks, for --attn {args.attn} with --cp {args.cp}")
    require(args.attn != "ulysses" or cfg.kv_heads // tp % args.cp == 0,
            f"{heads}: do not divide over --cp {args.cp} x --tp {tp}, which ulysses wants")
    require(not args.sp or cfg.seq // args.cp % tp == 0,
            f"--seq {cfg.seq} does not divide over --cp {args.cp} x --tp {tp}, which --sp wants")
    require(args.batch % (args.dp * args.micro) == 0, f"--batch {args.batch} does not divide into "
            f"--dp {args.dp} x --micro {args.micro} micro-batches")
    require(stages <= args.layers, pipeline_parallel.too_few(args.layers, stages))
    require(args.schedule != "interleaved" or args.micro % args.pp == 0,
            f"--micro {args.micro}: interleaved needs a multiple of --pp {args.pp}")
    require(not args.experts or args.top_k <= args.experts,
            f"--top-k {args.top_k} of --experts {args.experts}: choose {args.experts} at most")
    require(data % args.ep == 0, f"--ep {args.ep} does not divide dp x cp = {data}: take a divisor")
    require(args.experts % args.ep == 0,
            f"--experts {args.experts} for --ep {args.ep}: take a multiple")


def refuse_together(args):
    """What does not go together."""
    name = args.schedule
    require(args.pp > 1 or not any(action.kind == "W" for action in plans_of(args)[0]),
            f"--schedule {name} --pp 1: no rank waits that W could serve; take 1f1b")
    require(args.zero < 3 or (args.pp == 1 and name == "1f1b"),
            f"--zero 3 --pp {args.pp} --schedule {name}: ZeRO-3 wants each backward right "
            "behind its forward; take --pp 1 --schedule 1f1b, or --zero 2")
    require(not args.experts or args.tp == 1 or args.sp, f"--experts {args.experts} --tp {args.tp}:"
            " its ranks would all route the same tokens; add --sp")


def refuse_torch(args):
    """What section 3 does not show."""
    name = args.schedule
    ours = args.dry_run or args.save or args.resume or args.init_from
    require(not ours and args.dtype != "bf16" and args.ckpt == "none" and args.amp == "off",
            "--dry-run, --save, --resume, --init-from, --ckpt, --amp, --dtype bf16 want --impl "
            "scratch")
    require(args.cp == 1 and not args.experts and args.zero < 2,
            "--cp, --experts and --zero 2, 3 want --impl scratch")
    at_work = pipeline_parallel.AT_WORK
    require(name in at_work, f"--schedule {name}: torch has {', '.join(at_work)} only")
    require(args.cfg.seq % args.tp == 0, f"--seq {args.cfg.seq}: torch wants a multiple of --tp")
    pipeline_parallel.refuse_at_work(name, args.micro, args.pp)
    home = pipeline_parallel.homes(plans_of(args))
    ends_on_one_rank = len(home) > 1 and home[0] == home[max(home)]
    require(not ends_on_one_rank or (args.dp == 1 and not args.eval_every),
            f"--schedule {name} --pp {args.pp}: torch's eval() does not know V-shaped ones, and "
            "fully_shard would untie the embedding; take --dp 1 without --eval-every")


def plans_of(args):
    """-> what each rank of a pipeline does, in order"""
    return pipeline_parallel.make_plans(args.schedule, args.pp, args.micro, args.chunks)


# ---- bytes. b: of a number; B', T': rows of a micro-batch and tokens of a sequence on this rank


def tokens_of(args):
    """Of a micro-batch on a rank."""
    return args.batch // args.dp // args.micro * (args.seq // args.cp)


def sent_on_tp(args, b, layers, is_first, is_last):
    """By so many layers, the embedding and the head in a step, but for the sums of gradients."""
    x = b * tokens_of(args) * args.width  # between two blocks, before --sp cuts it
    half = 5 if args.sp else 4  # f and g of half a block
    halves = 1 if args.experts and not args.shared else 2
    block = half * halves
    if args.ckpt == "full":  # once more, but for the last g
        block += 1 + halves if args.sp else 2
    sent = layers * block * x
    if is_first:
        sent += 2 * x
    if is_first and args.cfg.form == "gpt2":
        sent += 2 * b * args.seq // args.cp * args.width  # positions
    if is_last:
        sent += (half - 2) * x
        sent += 2 * 3 * max(b, 4) * tokens_of(args)  # three numbers of a token's loss
    return (args.tp - 1) / args.tp * args.micro * sent


def sent_on_cp(args, b, layers):
    """K and V to all other ranks, and their gradients; ulysses: q, k, v and the output."""
    queries = tokens_of(args) * args.width // args.tp
    keys = queries * args.kv_heads // args.heads
    passes = 3 if args.ckpt == "full" else 2  # forward, again, backward
    sent = args.cp * 2 * keys * (b * passes + max(b, 4))
    if args.attn == "ulysses":
        sent = 2 * (queries + keys) * b * passes
    return (args.cp - 1) / args.cp * args.micro * layers * sent


def sent_on_pp(args, b, neighbours):
    """neighbours: how many stages before and behind those of this rank are on another one."""
    cut = args.tp if args.sp else 1
    return neighbours * args.micro * b * tokens_of(args) * args.width // cut


def sent_by_zero(model, axis, micro):
    sent = 0
    for zero in model.zeros:
        if zero.group is not model.mesh.group[axis]:
            continue
        blocks = [flat for flat in zero.flats if not flat.stays]
        for flat in zero.flats:
            moved = 2  # an all-reduce sends twice; or a sum and a gather
            if flat.level == 2:
                moved = micro + 1
            elif flat.level == 3 and (flat.stays or flat is blocks[-1]):
                moved = 2 * micro
            elif flat.level == 3:  # a sum, and gathers in forward and backward
                moved = 3 * micro
            n = model.mesh.size[axis]
            sent += moved * flat.full.nbytes * (n - 1) / n
    return sent


def sent_by_sums(model, axis):
    """By sum_gradients, along tp or ends."""
    summed = [part for part in model.parts if axis in model.kind[part.parameter].summed]
    n = model.mesh.size[axis]
    return 2 * (n - 1) / n * sum(part.grad.nbytes for part in summed)


def bytes_held(model, b):
    """Parameters, gradients and AdamW's states, with padding."""
    held = 4 * len(model.parts)  # counts of steps
    for flat in model.flats:
        parameters = flat.chunk if flat.level == 3 else len(flat.full)
        gradients = flat.chunk if flat.level >= 2 else len(flat.full)
        states = 3 if b == 2 else 2  # bf16 has masters
        held += b * (parameters + gradients) + states * max(b, 4) * flat.chunk
    return held + sum(buffer.nbytes for buffer in model.buffers())


def textbook(run, plans, layers, model):
    """-> rows: what a rank holds, and what it sends along each axis."""
    args = run.args
    mesh = model.mesh
    b = run.dtype.itemsize
    rank = mesh.place["pp"]
    home = pipeline_parallel.homes(plans)
    here = [stage for stage in home if home[stage] == rank]
    ends = 0 in here, len(layers) - 1 in here
    blocks = sum(layers[stage] for stage in here)
    beside = [home.get(stage + step, rank) for stage in here for step in (-1, 1)]
    neighbours = sum(other != rank for other in beside)
    ledger = run.ledger["scratch"]

    def wire(axis, formula, expected):
        return f"wire {axis}", formula, expected, ledger.groups[mesh.group[axis].group_name]

    by_zero = "2 b P (n-1)/n; ZeRO-2: M + 1, ZeRO-3: 3 M (ends: 2 M) for the 2; n = dp cp"
    rows = [
        ("held states", "2 b P + 2 w P, of it cut: ZeRO", bytes_held(model, b)),
        wire("data", by_zero, sent_by_zero(model, "data", args.micro)),
    ]
    if args.experts:
        replicas = sent_by_zero(model, "replicas", args.micro)
        rows.append(wire("replicas", by_zero + "/ep", replicas))
    if mesh.size["ends"] > 1 and any(ends):
        rows.append(wire("ends", "b V C/tp; ZeRO: /(dp cp)", sent_by_sums(model, "ends")))
    if args.amp == "off":  # which would halve some
        on_tp = sent_on_tp(args, b, blocks, *ends) + sent_by_sums(model, "tp")
        rows.append(wire("tp", "M (tp-1)/tp (8, --sp 10) L b B' T' C + ends + sums", on_tp))
        on_cp = sent_on_cp(args, b, blocks)
        rows.append(wire("cp", "M (cp-1) L (4 b + 2 w) B' T' C_k/tp", on_cp))
        on_pp = sent_on_pp(args, b, neighbours)
        links = model.pipeline.mail.links  # of gloo none: it sends in the group of all
        groups = [mesh.group["pp"], *(links[link] for link in links if rank in link)]
        sent = sum(ledger.groups[group.group_name] for group in groups)
        rows.append(("wire pp", "M b B' T' C, --sp /tp, per neighbour", on_pp, sent))
    return rows


# ---- checkpoints: who holds what of the plain model


def pieces(model, optimizer):
    """-> [Piece] of the plain model's tensors: masters as the parameters, and AdamW's states."""
    found = []
    for flat in model.flats:
        for part in flat.parts:
            p = part.parameter
            run = model.names[p], flat.shapes[p], part.first
            writes = is_first(model, p, flat.level)
            found += in_plain(model, p, parts_pieces([(*run, part.master)], optimizer, writes))
            # what computes is loaded likewise, and not saved
            found += in_plain(model, p, run_pieces(*run, flat.shard[part.span], False))
        if flat.level < 3:
            for p, place in flat.places.items():
                found += in_plain(model, p, pieces_of([(model.names[p], place)], None, False))
    for p, name in model.names.items():
        if not p.requires_grad:
            found += in_plain(model, p, pieces_of([(name, p)], None, is_first(model, p, 0)))
    return found


def is_first(model, p, level):
    """Is this the first of the ranks that hold the same piece of this parameter?"""
    axes = model.kind[p].summed + model.kind[p].same
    if level:  # ZeRO has cut it
        axes = [axis for axis in axes if axis not in COPIES]
    return all(dist.get_rank(model.mesh.group[axis]) == 0 for axis in axes)


def in_plain(model, p, pieces):
    """Boxes of this rank's p -> boxes of the plain model's tensors.

    What tp has cut is moved to its place in the whole, and loses its padding. A box of a stack of
    experts is one of each expert.
    """
    cut = model.tp.cuts.get(p)
    if cut is not None:
        pieces = [moved_along_tp(piece, cut, model.tp.rank) for piece in pieces]
    found = []
    for name, shape, start, tensor, writes in pieces:
        if "ep" not in model.kind[p].cut:
            found.append(Piece(name, shape, start, tensor, writes))
            continue
        first = dist.get_rank(model.mesh.group["ep"]) * shape[0] + start[0]
        for i, of_expert in enumerate(tensor):
            of_name = moe.plain_name(name, first + i)
            found.append(Piece(of_name, shape[1:], start[1:], of_expert, writes))
    return [piece for piece in found if piece.tensor.numel()]


def moved_along_tp(piece, cut, tp_rank):
    start = list(piece.start)
    start[cut.dim] += tp_rank * piece.shape[cut.dim]
    shape = list(piece.shape)
    shape[cut.dim] = cut.whole
    room = max(0, cut.whole - start[cut.dim])  # behind it is padding
    tensor = piece.tensor.narrow(cut.dim, 0, min(room, piece.tensor.shape[cut.dim]))
    return Piece(piece.name, tuple(shape), tuple(start), tensor, piece.writes)


def notes(model):
    """What a checkpoint holds besides: the biases of all layers' experts."""
    names = [name for name in model.origins if name.endswith("bias_steps")]
    return {"bias_steps": [biases.tolist() for biases in gather(model, {}, names).values()]}


# ---- a run


def build_plain(args, cfg, seed, device, dtype):
    """The plain model. If it has experts, it is told which tokens are routed together."""
    model = build(cfg, seed, device, dtype)
    if args.experts:
        moe.mixture(model, seed, cfg, experts=args.experts, top_k=args.top_k, shared=args.shared,
                    balance=args.balance, capacity=args.capacity)
        if not args.dry_run:
            moe.set_sources(model, sources(args, device))
    return model


def sources(args, device):
    """-> of each micro-batch, of each rank, the tokens that it routes: their numbers of all B T."""
    numbers = torch.arange(args.batch * args.seq, device=device)
    numbers = numbers.view(args.dp, args.micro, -1, args.seq)
    pieces_of_sequence = args.tp if args.sp else 1
    found = [[] for _ in range(args.micro)]
    for dp_rank in range(args.dp):
        for m in range(args.micro):
            for cp_rank in range(args.cp):
                here = numbers[dp_rank, m][:, tokens_of_rank(args, cp_rank, device)]  # (B', T')
                found[m] += [piece.flatten() for piece in here.chunk(pieces_of_sequence, 1)]
    return found


def tokens_of_rank(args, cp_rank, device):
    """-> which tokens of every sequence, an index"""
    if args.cp == 1:
        return slice(None)
    return context_parallel.on_paper(args.attn, cp_rank, args.cp).positions(args.seq, device)


def boundary_of(run):
    """-> size, dtype and device of what goes from stage to stage"""
    args = run.args
    tokens = args.seq // args.cp
    if args.sp:
        tokens //= args.tp
    return (args.batch // args.dp // args.micro, tokens, args.width), run.dtype, run.device


def set_up(run, mesh, plans, layers):
    """-> Side"""
    args = run.args
    plain = run.build()
    extra = None
    if args.experts:
        moe.set_biases(plain, run)
    autocast = None
    if args.amp == "bf16":
        autocast = torch.autocast(run.device.type, torch.bfloat16)

    def attend(group):
        return context_parallel.for_proofs(context_parallel.KINDS[args.attn](group))

    model = parallelize(
        plain, mesh, plans, layers, boundary_of(run), sp=args.sp, attend=attend,
        recompute=amp_accum_ckpt.CHECKPOINT[args.ckpt], autocast=autocast, zero=args.zero)
    optimizer = adamw(model.parameter_groups(), args.lr)
    tokens = tokens_of_rank(args, mesh.place["cp"], run.device)
    if args.experts:
        extra = partial(notes, model)
    return Side(
        model=model, optimizer=optimizer, train_step=train_step,
        full_gradients=partial(full_gradients, model),
        full_state_dict=partial(full_state_dict, model),
        evaluate=lambda x, y: evaluate(model, x[:, tokens], y[:, tokens]),
        pieces=partial(pieces, model, optimizer),
        held=partial(held, model, model, optimizer),  # the second for its flats
        extra=extra,
    )


def set_up_at_work(run, mesh, plans, layers):
    """-> Side"""
    args = run.args
    sizes = (args.pp, args.dp, args.tp)
    device_mesh = init_device_mesh(run.device.type, sizes, mesh_dim_names=("pp", "dp", "tp"))
    model = parallelize_at_work(run.build(), mesh, device_mesh, plans, layers, boundary_of(run),
                                args)
    optimizer = adamw(model.parameters(), args.lr)
    return Side(
        model=model, optimizer=optimizer, train_step=train_step_at_work,
        full_gradients=partial(full_gradients_at_work, model),
        full_state_dict=partial(full_state_dict_at_work, model),
    )


SET_UP = {"scratch": set_up, "torch": set_up_at_work}


def picture(run, plans, layers):
    """Who is where: ranks of pp as rows, copies as columns. On many ranks: this one's."""
    args = run.args
    data = args.dp * args.cp
    ends = list(accumulate(layers))
    for rank, plan in enumerate(plans):
        stages = sorted({action.stage for action in plan})
        words = " ".join(f"{ends[s] - layers[s]}..{ends[s] - 1}" for s in stages)
        copies = [range(first, first + args.tp)
                  for first in range(rank * data * args.tp, (rank + 1) * data * args.tp, args.tp)]
        if run.world_size > 32:
            copies = [ranks for ranks in copies if run.rank in ranks]
        if copies:
            columns = "   ".join(f"ranks {ranks[0]}..{ranks[-1]}" for ranks in copies)
            run.say(f"  layers {words}:  {columns}")


def main():
    args = arguments(__doc__, presets=moe.PRESETS, **FLAGS)
    layout(args)
    plans = plans_of(args)
    home = pipeline_parallel.homes(plans)
    layers = pipeline_parallel.split_layers(args.layers, len(home))
    run = Run(args, build=partial(build_plain, args))
    ends = home[0], home[len(home) - 1]
    mesh = Mesh(args.dp, args.cp, args.tp, args.pp, args.ep, ends)
    if run.dry:
        moe.read_counts = moe.balanced_counts  # nobody knows what tokens would choose
    with run:
        total = sum(p.numel() for p in run.build().parameters())
        sides = {impl: SET_UP[impl](run, mesh, plans, layers) for impl in run.impls}
        run.say(f"hybrid_3d: {run.world_size} ranks on {run.device.type}, {args.dtype}, "
                f"{total:,} parameters")
        picture(run, plans, layers)
        rows = share(args.batch, args.dp, mesh.place["dp"])
        tokens = tokens_of_rank(args, mesh.place["cp"], run.device)
        for impl, step, x, y, valid in run.steps(sides, rows):
            side = sides[impl]
            x = x[:, tokens]
            y = y[:, tokens]
            with run.measure(impl, step):
                loss, norm = side.train_step(side.model, side.optimizer, x, y, valid, args.clip)
            run.log(impl, step, loss, norm)
        if "scratch" in run.impls:
            run.textbook(textbook(run, plans, layers, sides["scratch"].model))
        plain = None
        if args.experts:
            plain = partial(moe.plain_trace, run)
        judged_as = None
        if args.amp == "bf16":
            judged_as = "bf16"
        own = run.ledger[run.impls[0]].memory["parameters"] // run.dtype.itemsize
        return run.finish(total, own, plain, judged_as)


if __name__ == "__main__":
    sys.exit(main())
