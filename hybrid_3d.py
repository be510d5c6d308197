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
    expert (tp > 1: --sp)       sum                        sum         cut
    tied: embedding and head    cut                sum                        sum

    numbers that a rank of a middle stage sends in a step of M micro-batches, A = B/(dp M) T/cp C
    tp    M L/pp 8 A (tp-1)/tp; --sp: 10 for 8, and the sums over tp of the table above
    pp    M 2 A; --sp: 1/tp of it
    cp    M L/pp 6 A (cp-1)/tp K/H, K of H heads: keys and values twice, gradients (fp32) once
    data  k P (n-1)/n, of P parameters here, n = dp cp; k is 2, ZeRO-2: M + 1, ZeRO-3: 3 M
    ends  V C/tp by the first stage and the last, if the embedding is tied; ZeRO: 1/(dp cp) of it

Not for: norms of q and k (which need a row of the table), optimizers that look at whole matrices,
several ties between stages.
Narayanan 2021, arXiv:2104.04473, section 3; Llama team 2024, arXiv:2407.21783, section 3.3.2.
At work: DeviceMesh, fully_shard, parallelize_module, torch.distributed.pipelining (section 3).

    torchrun --standalone --nproc_per_node=8 hybrid_3d.py --dp 2 --tp 2 --pp 2
    mesh = Mesh(dp=2, tp=2, pp=2)  # loss_of gets logits cut by vocabulary: see in_microbatches
    model = parallelize(plain, mesh, plans, layers, boundary)
    optimizer = AdamW(model.parameter_groups(), lr=1e-3)
    model.zero_grad(); loss = model.pipeline.step(inputs, loss_of); sum_gradients(model)
    step(model, optimizer, gradient_norm(model), clip)
"""
import math
from collections import Counter, defaultdict, namedtuple
from fnmatch import fnmatchcase
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd.function import once_differentiable

import context_parallel
import moe
import pipeline_parallel
import tensor_parallel
from pipeline_parallel import Mail, Pipeline, SplitLinear, carve
from tensor_parallel import (
    ColumnParallel, CutSequence, WholeSequence, vocab_parallel_cross_entropy)
from zero import Unit, ZeRO

import contextlib
import sys
from itertools import product

from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

import amp_accum_ckpt
from common import adamw, build, loss_sum, share
from harness.checkpoint import Piece, parts_pieces, pieces_of, run_pieces
from harness.flags import ANY, POSITIVE, Flag, arguments, require
from harness.run import Run, Side, whole
from zero import held

# ---- 1. the technique (copy this; it needs torch and the files of the techniques) ---
# For another model write what section 2 has for the toy: kind_of, unit_of, origins_of,
# within_layers, between_layers, around_layers.


def parallelize(model, mesh, plans, layers, boundary, *, sp=False, attend=None, recompute=None,
                autocast=None, zero=0):
    """A plain model -> Hybrid: this rank's part of it, with the Pipeline that runs it.

    plans: pipeline_parallel's, of all ranks. layers: how many each stage gets. boundary: the size,
    dtype and device of what goes from stage to stage. sp: norms and residuals are cut over tp,
    along T. attend: one of context_parallel's classes, for cp > 1. recompute: amp_accum_ckpt's full
    or selective. autocast: torch.autocast(..), which decorates forwards. zero: ZeRO's level.
    """
    home = pipeline_parallel.homes(plans)
    assert mesh.ends == {home[0], home[max(home)]}, f"the ends of these plans are not {mesh.ends}"
    origins = origins_of(model, layers, plans)
    microbatches = 1 + max(action.microbatch for action in plans[0])
    splits = any(action.kind == "W" for action in plans[0])  # has a backward two parts, B and W?
    # 1. Within a layer: ranks share its matrices (tp), its sequence (cp) and its experts (ep).
    tp = within_layers(model, mesh, microbatches, splits, sp, attend)
    # 2. Between layers: of all stages this rank keeps those that its plan names (pp).
    here, tied = between_layers(model, layers, plans[mesh.place["pp"]])
    # 3. Around layers: what a block computes again in backward, and in which precision.
    around_layers(here, recompute, autocast)
    # 4. Copies of it all: they sum gradients (dp, cp), and share out what all of them hold (ZeRO).
    hybrid = Hybrid(here, tied, mesh, tp, kinds_of_parameters(sp), origins, zero, splits)

    links = pipeline_parallel.make_links(plans, mesh.pipelines)
    mail = Mail(plans, mesh.pipeline, mesh.group["pp"], links, *boundary)
    hybrid.pipeline = Pipeline(here, plans, mail, hybrid.before_backward, hybrid.after_backward)
    return hybrid


# ---- who is who


class Mesh:
    """The sizes of the axes, this rank's place on them, and its group along each.

    tp varies fastest, since its ranks talk most, and pp slowest (Narayanan 2021, section 3).
    "peers" are all ranks with the same stages. ends: the places along pp of the first and of the
    last stage (-1: the last place); the group "ends" joins their ranks.
    """

    def __init__(self, dp=1, cp=1, tp=1, pp=1, ep=1, ends=(0, -1)):
        ranks = torch.arange(pp * dp * cp * tp).view(pp, dp, cp, tp)
        place = (ranks == dist.get_rank()).nonzero()[0].tolist()
        self.place = dict(zip(("pp", "dp", "cp", "tp"), place))
        self.pipelines = ranks.flatten(1).T.tolist()  # [[ranks of a pipeline, first place first]]
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
        self.ends = {end % pp for end in ends}
        self.add("ends", ranks[sorted(self.ends)], [0])

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
        # without sp all ranks of tp would have the same tokens: tp > 1 wants sp
        "expert": Kind(summed=["replicas", "tp"], same=[], cut=["ep"]),
        "tied": Kind(summed=["data", "ends"], same=[], cut=["tp"]),
    }


def sum_gradients_plainly(model):
    """After backward each gradient becomes its sum over all axes for which the table says so.

    To be read, and for tests of level 0 without the pipeline's two hooks. A run has sum_gradients.
    """
    for part in model.parts:
        for axis in model.kind[part.parameter].summed:
            dist.all_reduce(part.grad, group=model.mesh.group[axis])  # partial -> replicated


def sum_gradients(model):
    """The same, in one call an axis. Along data and replicas backward has begun it."""
    for zero in model.zeros:
        if zero.level < 2:  # else after_backward has summed
            zero.sync = True  # for "tied", which belongs to no stage, no backward has set it
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
    origins  {name in the plain model: (first place along pp that has it, a meta tensor like it)}
    level    ZeRO's, 0 to 3
    splits   has a backward two parts, B and W?
    """

    def __init__(self, here, tied, mesh, tp, kinds, origins, level, splits):
        super().__init__()
        self.stages = nn.ModuleList(here.values())
        self.mesh = mesh
        self.tp = tp
        self.origins = origins
        self.level = level
        self.pipeline = None  # the Pipeline that runs the stages, and calls the two hooks below
        self.names = {}  # {parameter: its name in the plain model}
        self.kind = {}  # {parameter: Kind}
        # {stage: [ZeRO]}. Those of "tied" are summed after the last backward of all stages
        self.zeros_of = defaultdict(list)
        for (stage, axis), units in self.lay_out(here, tied, kinds, splits).items():
            # the tied one's gradient stays whole until the last backward of all stages
            own_level = min(level, 1) if stage == "tied" else level
            zero = ZeRO(list(units.values()), mesh.group[axis], own_level)
            self.zeros_of[stage].append(zero)
        self.zeros = [zero for zeros in self.zeros_of.values() for zero in zeros]
        self.flats = [flat for zero in self.zeros for flat in zero.flats]
        self.parts = [part for zero in self.zeros for part in zero.parts]
        # 1/n for each part: after sum_gradients n ranks hold the same numbers, and each brings 1/n
        shares = [1 / math.prod(mesh.size[axis] for axis in self.same_along(part.parameter))
                  for part in self.parts]
        p = next(self.parameters())
        wide = torch.promote_types(p.dtype, torch.float32)
        self.shares = torch.tensor(shares, dtype=wide, device=p.device)

    def lay_out(self, here, tied, kinds, splits):
        """-> {(stage, axis of copies): {name of a module: Unit}} of what is trained."""
        units = defaultdict(dict)
        for stage, module in here.items():
            for name, p in module.named_parameters():
                if p in self.kind:  # the other end of the tied one
                    continue
                kind = kinds["tied" if p in tied else kind_of(name)]
                if self.tp.size > 1:
                    assert (p in self.tp.cuts) == ("tp" in kind.cut), f"{name}: another kind?"
                self.names[p] = tied.get(p, name)
                self.kind[p] = kind
                if p.requires_grad:
                    site = unit_of(name)
                    if splits and self.level == 2 and kind is kinds["outside"]:
                        # B makes these gradients already. In a block's unit they would bring its
                        # buffer to life before W: so they have a unit of the whole stage.
                        site = ""
                    where = "tied" if p in tied else stage
                    [copies] = [axis for axis in kind.summed if axis in COPIES]
                    own = units[where, copies]
                    stays = not site.startswith("blocks.")
                    unit = own.setdefault(site, Unit([], [module.get_submodule(site)], stays))
                    unit.parameters.append(p)
        return units

    def same_along(self, p):
        """-> the axes along which, gradients being summed, ranks hold the same numbers of p's."""
        axes = self.kind[p].summed + self.kind[p].same
        if self.level and p.requires_grad:  # ZeRO has cut it
            axes = [axis for axis in axes if axis not in COPIES]
        return axes

    def parameter_groups(self):
        """What an elementwise optimizer takes."""
        return [{"params": [part.master for part in self.parts]}]

    def zero_grad(self):
        for zero in self.zeros:
            zero.zero_grad()
            zero.sync = False  # until before_backward, or sum_gradients, says so

    def before_backward(self, stage, is_last, is_whole):
        """Before a backward that adds to a stage's gradients. ZeRO-0 and 1 sum over copies during
        the last one, ZeRO-2 and 3 during each that completes the gradients of a micro-batch."""
        for zero in self.zeros_of[stage]:
            zero.sync = is_whole if zero.level >= 2 else is_last

    def after_backward(self, stage):
        for zero in self.zeros_of[stage]:
            if zero.sync and zero.level >= 2:  # which have no room for the next micro-batch's
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
        finite = norm.nan_to_num(0, posinf=0)  # inf and nan: gradients stay as they are
        scale = (clip / (finite + 1e-6)).clamp(max=1)
        torch._foreach_mul_([part.grad for part in model.parts], scale)
    for zero in model.zeros:
        zero.step(optimizer)
    moe.step_biases(model)


def full_state_dict(model):
    """-> {name in the plain model: parameter or buffer}, on every rank."""
    # over data or replicas: sharded -> replicated
    found = {p: whole for zero in model.zeros for p, whole in zero.full_parameters().items()}
    return gather(model, found, model.origins)


def full_gradients(model):
    """-> {name in the plain model: gradient} of what is trained, on every rank."""
    # over data or replicas: sharded -> replicated
    found = {p: whole for zero in model.zeros for p, whole in zero.full_gradients().items()}
    return gather(model, found, trained(model.origins))


def gather(model, found, origins):
    """found: {parameter of this rank: itself or its gradient, whole along data or replicas}

    -> {name in the plain model: tensor} of origins' names, of all stages, on every rank.
    """
    mine = {}
    for stage in model.stages:
        for name, t in stage.state_dict(keep_vars=True).items():
            t_here = found.get(t, t)  # not found: a buffer, or frozen, and whole here already
            # over tp: sharded -> replicated
            mine[name] = tensor_parallel.unshard(t_here, model.tp.cuts.get(t), model.tp)
    mine = moe.gather_experts(mine, model.mesh.group["ep"])  # over ep: sharded -> replicated
    # over pp: on one stage -> replicated
    return pipeline_parallel.gather(mine, origins, model.mesh.group["pp"])


# ---- 2. the toy GPT, parallelized --------------------------------------------

KIND_BY_NAME = [  # the first pattern that fits a parameter's name
    ("*.experts.*", "expert"),
    ("*.router.*", "outside"),
    ("*norm*", "outside"),
    ("*.out.bias", "outside"),  # row biases, added to the sum over tp
    ("*.down.bias", "outside"),
    ("*", "matrix"),  # and biases of columns, embeddings and positions: cut like matrices
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
    return ".".join(words[:2]) if words[0] == "blocks" else words[0]


def origins_of(model, layers, plans):
    """Before the model is cut -> {name: (first place along pp that has it, a meta tensor like it)}

    The meta tensor requires a gradient if the parameter is trained; a tied one under its first
    name alone.
    """
    home = pipeline_parallel.homes(plans)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    found = {}
    for number, stage in enumerate(carve(model, layers)):
        for name, t in stage.state_dict().items():
            like = t.to("meta").requires_grad_(name in names)
            found.setdefault(name, (home[number], like))
    return found


def trained(origins):
    return {name: origin for name, origin in origins.items() if origin[1].requires_grad}


def within_layers(model, mesh, microbatches, splits, sp, attend):
    """-> tensor_parallel's WholeSequence or CutSequence"""
    tp = CutSequence(mesh.group["tp"]) if sp else WholeSequence(mesh.group["tp"])
    if splits:
        tp.column_parallel = split_columns
        tp.linear = pipeline_parallel.split_linear
    if tp.size > 1:
        tensor_parallel.cut_model(model, tp, replacements(model))
    if mesh.size["cp"] > 1:
        context_parallel.parallelize(model, attend(mesh.group["cp"]))
    if has_experts(model):
        moe.parallelize(model, mesh.group["ep"], mesh.group["peers"], microbatches)
    return tp


def replacements(model):
    """-> tensor_parallel's plan. Of experts it cuts the shared one alone."""
    plan = tensor_parallel.PLANS["llama" if model.pos is None else "gpt2"]
    if not has_experts(model):
        return plan
    if model.blocks[0].mlp.shared is None:
        return {name: kind for name, kind in plan.items() if ".mlp" not in name}
    return {name.replace(".mlp", ".mlp.shared"): kind for name, kind in plan.items()}


def has_experts(model):
    return hasattr(model.blocks[0].mlp, "experts")


def split_columns(tp, x, *parameters):
    if not any(p is not None and p.requires_grad for p in parameters):
        return ColumnParallel.apply(tp, x, *parameters)  # no W
    if torch.is_grad_enabled() and not x.requires_grad:
        x = x.detach().requires_grad_()  # as in pipeline_parallel.split_linear
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
    @once_differentiable
    def backward(ctx, *dys):
        x, *_ = ctx.saved_tensors
        reducing = ctx.tp.reduce(tensor_parallel.input_gradient(dys, ctx.parameters[::2]))
        make = partial(add_gradients, ctx.tp, x, dys, ctx.parameters)
        if SplitLinear.later is None:
            make()
        else:
            SplitLinear.later.append(make)
        return None, reducing.wait(), None


def add_gradients(tp, x, dys, parameters):
    """W of some Linears that read the same x."""
    x = tp.gather(x).wait()  # sharded(T) -> replicated
    gradients = tensor_parallel.weight_gradients(x, dys, parameters[1::2])
    for p, gradient in zip(parameters, gradients):
        if gradient is not None and p.requires_grad:
            # adds to p.grad, calls ZeRO's hook, and goes through a cast that autocast has made
            torch.autograd.backward(p, gradient)


def between_layers(model, layers, plan):
    """-> this rank's {stage: module}, {parameter of several stages: its name in the first}"""
    stages = carve(model, layers)
    count = Counter(p for stage in stages for p in stage.parameters())
    tied = {p: name for name, p in model.named_parameters() if count[p] > 1}
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
    loss = model.pipeline.step(inputs, loss_of) / model.tp.size  # every rank of tp has all of it
    sum_gradients(model)
    norm = gradient_norm(model)
    balancing = moe.balancing_losses(model)  # before step(), which forgets them
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
    """-> what Pipeline.step takes: inputs, and a function -> a micro-batch's part of the loss."""
    targets = y.chunk(model.pipeline.microbatches)
    vocab = len(model.origins["tok.weight"][1])  # V, as in the plain model

    def loss_of(logits, m):
        if model.tp.size == 1:
            return loss_sum(logits, targets[m]) / valid
        return vocab_parallel_cross_entropy(logits, targets[m], vocab, model.tp) / valid

    return x.chunk(model.pipeline.microbatches), loss_of


# ---- 3. at work: the same with torch's own API -------------------------------


def local(t):
    """A DTensor's part on this rank; an ordinary tensor is that already."""
    if isinstance(t, DTensor):
        return t.to_local()
    return t


class AtWork(nn.Module):
    """This rank's stages of the toy GPT, and torch's schedule, which runs them."""

    def __init__(self, here, mesh, device_mesh, origins):
        super().__init__()
        self.stages = nn.ModuleList(here.values())
        self.first = self.stages[0].first
        self.last = self.stages[-1].last
        self.mesh = mesh
        self.device_mesh = device_mesh  # torch's, of pp, dp and tp
        self.tp = WholeSequence(mesh.group["tp"])  # without cuts: DTensors know theirs
        self.origins = origins
        self.valid = 1  # targets of the batch under way
        self.schedule = None  # torch's, which calls loss_of
        self.tied = None  # the embedding or head, if it is tied to another rank's

    def loss_of(self, logits, targets):
        """What torch's schedule calls on the last stage."""
        if self.mesh.size["tp"] > 1:
            vocab = len(self.origins["tok.weight"][1])  # V, as in the plain model
            shape = torch.Size((*targets.shape, vocab))
            stride = targets.shape[1] * vocab, vocab, 1
            logits = DTensor.from_local(
                logits, self.device_mesh["tp"], [Shard(2)], shape=shape, stride=stride)
        # fully_shard averages over dp
        return loss_sum(logits, targets) * self.mesh.size["data"] / self.valid

    def run(self, run_schedule, x, y, valid):
        """-> this rank's part of the loss. run_schedule: the schedule's step, or its eval."""
        self.valid = valid
        inputs = [x] if self.first else []
        losses = []
        context = contextlib.nullcontext()
        if self.mesh.size["tp"] > 1:
            context = loss_parallel()  # the logits are cut
        with context:
            run_schedule(*inputs, target=y, losses=losses, return_outputs=False)
        total = sum((local(loss.detach()) for loss in losses), torch.zeros((), device=x.device))
        # loss_of has multiplied by dp, and each rank of tp has the whole
        return total / (self.mesh.size["data"] * self.mesh.size["tp"])

    def evaluate(self, x, y):
        return self.run(self.schedule.eval, x, y, 1)

    def full_state_dict(self):
        found = {p: whole(p) for p in self.parameters()}  # over dp, tp: sharded -> replicated
        return gather(self, found, self.origins)

    def full_gradients(self):
        # likewise
        found = {p: whole(p.grad) for p in self.parameters() if p.requires_grad}
        return gather(self, found, trained(self.origins))


def parallelize_at_work(model, mesh, device_mesh, plans, layers, boundary, args):
    """The plain GPT -> AtWork. device_mesh: torch's, of pp, dp and tp."""
    from torch.distributed.pipelining import PipelineStage, schedules  # long to import

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
    at_work = AtWork(here, mesh, device_mesh, origins)
    if tied and at_work.first != at_work.last:
        stages = at_work.stages
        at_work.tied = stages[0].tok.weight if at_work.first else stages[-1].head.weight
    parts = []
    for number, stage in here.items():
        shapes = shapes_at_work(stage, boundary, args.seq, columns)
        parts.append(PipelineStage(
            stage, number, len(layers), boundary[-1], *shapes, group=mesh.group["pp"]))
    if args.schedule in pipeline_parallel.ONE_STAGE:
        [parts] = parts  # these classes take the stage itself, not a list
    make = getattr(schedules, pipeline_parallel.AT_WORK[args.schedule])
    # scale_grads: they are a sum
    at_work.schedule = make(parts, args.micro, loss_fn=at_work.loss_of, scale_grads=False)
    return at_work


def shapes_at_work(stage, boundary, T, columns):
    """-> what a stage takes and gives. Without it torch asks other ranks, and that takes NumPy."""
    size, dtype, device = boundary
    edge = torch.empty(size, dtype=dtype, device=device, requires_grad=True)
    taken = edge.new_empty(size[0], T, dtype=torch.int64) if stage.first else edge
    given = edge.new_empty(size[0], T, columns) if stage.last else edge
    return taken, given


def train_step_at_work(model, optimizer, x, y, valid, clip):
    optimizer.zero_grad()
    loss = model.run(model.schedule.step, x, y, valid)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        if isinstance(p, DTensor):
            # the gradient of a cut embedding comes replicated
            p.grad = p.grad.redistribute(placements=p.placements)
    if model.tied is not None and model.tied.requires_grad:
        dist.all_reduce(local(model.tied.grad), group=model.mesh.group["ends"])  # -> replicated
    # the tied one counts on the first stage only
    counted = [p.grad for p in parameters if p is not model.tied or model.first]
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

NOT_HERE = ("naive", "pipedream")  # the first never overlaps, the second trains something else
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
    "amp": Flag("off", "autocast to", ("off", "bf16"), course=True),
    **moe.FLAGS,
    "experts": Flag(0, "E in each layer, in the place of its MLP (0: none)", ANY, course=True),
}


def layout(args):
    """Fills in what the flags leave open. What cannot run ends here, in one line."""
    fill_axes(args)
    args.sp = args.sp and args.tp > 1
    args.micro = args.micro or math.gcd(4, args.batch // args.dp)
    require(args.experts or not (args.ep or args.shared or args.capacity),
            "--ep, --shared and --capacity are for --experts E")
    args.ep = (args.ep or args.dp * args.cp) if args.experts else 1
    refuse(args)
    if args.impl != "scratch":
        refuse_torch(args)


def fill_axes(args):
    """dp, tp and pp that are left out. If all are, and 4 divides the ranks, tp and pp are 2. Else
    the last one left out, in the order pp, tp, dp, gets all other ranks, the ones before it 1."""
    ranks = args.world_size // args.cp
    missing = [axis for axis in ("pp", "tp", "dp") if getattr(args, axis) is None]
    for axis in missing:
        setattr(args, axis, 1)
    if len(missing) == 3 and ranks % 4 == 0:
        args.pp = 2
        args.tp = 2
    if missing:
        setattr(args, missing[-1], max(1, ranks // (args.dp * args.tp * args.pp)))


def refuse(args):
    tp = args.tp
    copies = args.dp * args.cp
    stages = args.pp * pipeline_parallel.chunks_of(args.schedule, args.chunks)
    sharing = tp * args.cp if args.attn == "ulysses" else tp  # ranks that share the heads
    tokens = args.cp * tp if args.sp else args.cp
    axes = f"--dp {args.dp} x --cp {args.cp} x --tp {tp} x --pp {args.pp}"
    require(copies * tp * args.pp == args.world_size,
            f"{axes}: their product is not {args.world_size}, the number of ranks")
    require(args.kv_heads % sharing == 0,
            f"--heads {args.heads}, --kv-heads {args.kv_heads}: do not divide over {sharing} ranks")
    chunks = args.cp * len(context_parallel.on_paper(args.attn, 0, args.cp).chunks())
    require(args.seq % tokens == 0, f"--seq {args.seq} does not divide over {tokens} ranks")
    require(args.cp == 1 or args.seq % chunks == 0,
            f"--seq {args.seq} does not divide into {chunks} chunks")
    require(args.hidden % tp == 0, f"--hidden {args.hidden} does not divide over --tp {tp}")
    require(args.top_k <= args.experts or not args.experts,
            f"--top-k {args.top_k} of --experts {args.experts}: choose fewer")
    require(args.batch % (args.dp * args.micro) == 0, f"--batch {args.batch} does not divide into "
            f"--dp {args.dp} x --micro {args.micro} micro-batches")
    require(stages <= args.layers, pipeline_parallel.too_few(args.layers, stages))
    pipeline_parallel.refuse_microbatches(args.schedule, args.micro, args.pp)
    require(args.zero < 3 or (args.pp == 1 and args.schedule == "1f1b"),
            "--zero 3 wants each backward right behind its forward: --pp 1 --schedule 1f1b")
    require(not args.experts or tp == 1 or args.sp,
            f"--experts with --tp {tp}: its ranks would all route the same tokens; add --sp")
    require(copies % args.ep == 0 and args.experts % args.ep == 0,
            f"--ep {args.ep} has to divide dp x cp = {copies} and --experts {args.experts}")


def refuse_torch(args):
    """What section 3 does not show."""
    ours = (args.dry_run, args.save, args.resume, args.init_from, args.experts, args.cp > 1,
            args.zero > 1, args.ckpt != "none", args.amp != "off", args.dtype == "bf16")
    require(not any(ours), "--dry-run, --save, --resume, --init-from, --experts, --cp, --zero 2, "
            "3, --ckpt, --amp and --dtype bf16 want --impl scratch")
    require(args.seq % args.tp == 0, f"--seq {args.seq}: torch wants a multiple of --tp {args.tp}")
    pipeline_parallel.refuse_at_work(args.schedule, args.micro, args.pp)
    home = pipeline_parallel.homes(plans_of(args))
    ends_on_one_rank = len(home) > 1 and home[0] == home[max(home)]
    require(not ends_on_one_rank or (args.dp == 1 and not args.eval_every),
            f"--schedule {args.schedule} --pp {args.pp}: fully_shard would untie the embedding, "
            "torch's eval() does not know V-shaped ones; take --dp 1 without --eval-every")


def plans_of(args):
    """-> what each rank of a pipeline does, in order"""
    return pipeline_parallel.make_plans(args.schedule, args.pp, args.micro, args.chunks)


# ---- bytes that a rank sends in a step. b: of a number


def tokens_of(args):
    """Of a micro-batch on a rank, not yet cut over tp."""
    return args.batch // args.dp // args.micro * (args.seq // args.cp)


def sent_on_tp(args, b, layers, is_first, is_last):
    """By so many layers, the embedding and the head, without the sums of gradients."""
    x = b * tokens_of(args) * args.width  # between two blocks, before --sp cuts it
    half = 5 if args.sp else 4  # f and g of half a block, in units of (tp-1)/tp numbers
    halves = 1 if args.experts and not args.shared else 2
    block = half * halves
    if args.ckpt == "full":  # once more, but for the last g
        block += (1 + halves) if args.sp else 2
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


def sent_by_zero(zero, micro):
    blocks = [flat for flat in zero.flats if not flat.stays]
    sent = 0
    for flat in zero.flats:
        moves = (2, 2, micro + 1, 3 * micro)[flat.level]
        if flat.level == 3 and (flat.stays or flat is blocks[-1]):
            moves -= micro  # one gather is for forward and backward
        sent += moves * flat.full.nbytes
    ranks = dist.get_world_size(zero.group)
    return sent * (ranks - 1) / ranks


def sent_by_sums(model, axis):
    """By sum_gradients along an axis that it sums after backward."""
    n = model.mesh.size[axis]
    summed = [part.grad.nbytes for part in model.parts if axis in model.kind[part.parameter].summed]
    return 2 * (n - 1) / n * sum(summed)


def textbook(run, plans, layers, model):
    """-> rows: the docstring's table of what is sent, at this rank's place"""
    args = run.args
    group = model.mesh.group
    b = run.dtype.itemsize
    place = model.mesh.place["pp"]
    home = pipeline_parallel.homes(plans)
    here = [stage for stage in home if home[stage] == place]
    beside = [home.get(stage + step) for stage in here for step in (-1, 1)]
    neighbours = sum(rank not in (None, place) for rank in beside)
    blocks = sum(layers[stage] for stage in here)
    links = model.pipeline.mail.links  # {its two places: group}; with gloo none, but group["pp"]
    world = dist.get_world_size()
    rows = []

    def row(axis, formula, expected, *groups):
        sent = sum(run.ledger["scratch"].groups[each.group_name] for each in groups)
        rows.append((f"wire {axis}", formula, expected, sent))

    for axis in COPIES:
        zeros = [zero for zero in model.zeros if zero.group is group[axis]]
        if axis == "data" or args.experts:  # only experts have replicas
            sent = sum(sent_by_zero(zero, args.micro) for zero in zeros)
            row(axis, "k P b (n-1)/n", sent, group[axis])
    on_ends = sent_by_sums(model, "ends")
    if on_ends:  # if they are tied
        row("ends", "2 (n-1)/n b V C/tp, ZeRO: /data", on_ends, group["ends"])
    row("norm", "2 w (n-1)/n", 2 * max(b, 4) * (world - 1) / world, dist.group.WORLD)
    if args.amp == "off":  # which would halve some
        on_tp = sent_on_tp(args, b, blocks, 0 in here, len(layers) - 1 in here)
        row("tp", "M L/pp 8 A b (tp-1)/tp, --sp 10, + ends + sums",
            on_tp + sent_by_sums(model, "tp"), group["tp"])
        row("cp", "M L/pp (4 b + 2 w) A (cp-1)/tp K/H", sent_on_cp(args, b, blocks), group["cp"])
        row("pp", "M A b, --sp /tp, per neighbour", sent_on_pp(args, b, neighbours),
            group["pp"], *(links[ends] for ends in links if place in ends))
    return rows


# ---- checkpoints: who holds what of the plain model


def pieces(model, optimizer):
    """-> [Piece] of the plain model's tensors: masters as the parameters, and AdamW's states."""
    found = []  # (parameter, pieces of its tensor on this rank)
    for flat in model.flats:
        for part in flat.parts:
            p = part.parameter
            place = model.names[p], flat.shapes[p], part.first
            found.append((p, parts_pieces([(*place, part.master)], optimizer, is_first(model, p))))
            # part.shard, which forward reads, is loaded likewise, and never saved
            found.append((p, run_pieces(*place, part.shard, False)))
    for p, name in model.names.items():  # in level 3 those that are trained have no elements
        writes = not p.requires_grad and is_first(model, p)
        found.append((p, pieces_of([(name, p)], None, writes)))
    of_plain = [piece for p, own in found for box in own for piece in in_plain(model, p, box)]
    return [piece for piece in of_plain if piece.tensor.numel()]


def is_first(model, p):
    """Is this the first of the ranks that hold the same piece of this parameter?"""
    return all(dist.get_rank(model.mesh.group[axis]) == 0 for axis in model.same_along(p))


def in_plain(model, p, piece):
    """A box of this rank's p -> boxes of the plain model's tensors: of a stack, one per expert."""
    if p in model.tp.cuts:
        return [tensor_parallel.of_whole(piece, model.tp.cuts[p], model.tp.rank)]
    if "ep" not in model.kind[p].cut:
        return [piece]
    name, shape, start, stack, writes = piece
    first = dist.get_rank(model.mesh.group["ep"]) * shape[0] + start[0]
    return [Piece(moe.plain_name(name, number), shape[1:], start[1:], of_expert, writes)
            for number, of_expert in enumerate(stack, first)]


def notes(model):
    """What a checkpoint holds besides: the biases of all layers' experts."""
    biases = {name: origin for name, origin in model.origins.items() if "bias_steps" in name}
    mine = {name: t for stage in model.stages for name, t in stage.named_buffers()}
    found = pipeline_parallel.gather(mine, biases, model.mesh.group["pp"])
    return {"bias_steps": [steps.tolist() for steps in found.values()]}


# ---- a run


def build_plain(args, cfg, seed, device, dtype):
    """The plain model. If it has experts, it is told which tokens are routed together."""
    model = build(cfg, seed, device, dtype)
    if args.experts:
        moe.mixture(model, seed, cfg, experts=args.experts, top_k=args.top_k, shared=args.shared,
                    balance=args.balance, capacity=args.capacity,
                    sources=None if args.dry_run else sources(args, device))
    return model


def sources(args, device):
    """-> [[the tokens, of 0 to B T - 1, that a rank routes], of each rank] of each micro-batch"""
    numbers = torch.arange(args.batch * args.seq, device=device)
    numbers = numbers.view(args.dp, args.micro, -1, args.seq)
    found = [[] for _ in range(args.micro)]
    for dp_rank, m, cp_rank in product(range(args.dp), range(args.micro), range(args.cp)):
        here = numbers[dp_rank, m][:, tokens_of_rank(args, cp_rank, device)]  # (B', T')
        found[m] += [piece.flatten() for piece in here.chunk(args.tp, 1)]
    return found


def tokens_of_rank(args, cp_rank, device):
    """-> which tokens of every sequence, an index"""
    if args.cp == 1:
        return slice(None)
    return context_parallel.on_paper(args.attn, cp_rank, args.cp).positions(args.seq, device)


def boundary_of(run):
    """-> size, dtype and device of what goes from stage to stage"""
    args = run.args
    tokens = args.seq // args.cp // (args.tp if args.sp else 1)
    return (args.batch // args.dp // args.micro, tokens, args.width), run.dtype, run.device


def set_up(run, mesh, plans, layers):
    """-> Side"""
    args = run.args
    plain = run.build()
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
    return Side(
        model=model, optimizer=optimizer, train_step=train_step,
        full_gradients=partial(full_gradients, model),
        full_state_dict=partial(full_state_dict, model),
        evaluate=lambda x, y: evaluate(model, x[:, tokens], y[:, tokens]),
        pieces=partial(pieces, model, optimizer),
        held=partial(held, model=model, zero=model, optimizer=optimizer),
        extra=partial(notes, model) if args.experts else None)


def set_up_at_work(run, mesh, plans, layers):
    """-> Side"""
    args = run.args
    sizes = (args.pp, args.dp, args.tp)
    device_mesh = init_device_mesh(run.device.type, sizes, mesh_dim_names=("pp", "dp", "tp"))
    model = parallelize_at_work(
        run.build(), mesh, device_mesh, plans, layers, boundary_of(run), args)
    optimizer = adamw(model.parameters(), args.lr)
    return Side(model=model, optimizer=optimizer, train_step=train_step_at_work)


SET_UP = {"scratch": set_up, "torch": set_up_at_work}


def picture(run, plans, layers):
    """Which ranks have which layers."""
    each = run.world_size // len(plans)
    for place, plan in enumerate(plans):
        stages = sorted({action.stage for action in plan})
        words = " ".join(f"{sum(layers[:s])}..{sum(layers[:s + 1]) - 1}" for s in stages)
        run.say(f"  layers {words}:  ranks {place * each}..{(place + 1) * each - 1}")


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
        moe.Routing.read = moe.balanced_counts  # nobody knows what tokens would choose
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
        plain = partial(moe.plain_trace, run) if args.experts else run.plain
        judged_as = "bf16" if args.amp == "bf16" else args.dtype
        own = run.ledger[run.impls[0]].memory["parameters"] // run.dtype.itemsize
        return run.finish(total, own, plain, judged_as)


if __name__ == "__main__":
    sys.exit(main())
