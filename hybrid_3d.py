"""Data, tensor and pipeline parallelism in one run; context, expert parallelism and ZeRO by flags.

                     copy 0 (rows 0..3)      copy 1 (rows 4..7)
    stage 0          ranks 0 1  ---- dp ---- ranks 2 3        tp: neighbours, who talk in each layer
      embedding,        |  |                    |  |          dp: once per step, during backward
      layers 0 1       pp pp                   pp pp          pp: to the next stage per micro-batch;
    stage 1             |  |                    |  |              once per step between both ends,
      layers, head   ranks 4 5  ---- dp ---- ranks 6 7            if the head is tied

    rank = ((pp_rank dp + dp_rank) cp + cp_rank) tp + tp_rank
    data = dp x cp = replicas x ep: ep neighbours share out the experts, replicas hold the same ones

What becomes of a gradient along each axis. cut: each rank has its own part. same: all have the
same. sum: each has a summand, and a step adds them up. The norm counts each number once.

    kind of parameter           tp                 data    replicas    ep     ends
    matrix                      cut                sum
    outside: norms, router,     same (--sp: sum)   sum
      biases of RowLinears
    inside: norms of q, k       sum                sum
    expert                      sum (wants --sp)           sum         cut
    tied: embedding and head    cut                sum                        sum

    numbers that a rank sends in a step (tp, pp: of a middle stage), A = B/(dp M) * T/cp * C
    tp    M L/pp 8 A (tp-1)/tp; --sp: 10 for 8, and the sums over tp of the table above
    pp    M 2 A; --sp: 1/tp of it
    cp    M L/pp 6 A (cp-1)/tp K/H, if H heads share K heads of keys and values; not with ulysses
    data  k P (n-1)/n, of P parameters here, n = dp cp; k is 2, in ZeRO-2 M + 1, in ZeRO-3 3 M
    ends  V C/tp by the first stage and the last, if the embedding is tied; ZeRO: 1/(dp cp) of it

Not for: optimizers of whole matrices, several ties, pipedream, ZeRO-3 of several stages. Narayanan
2021, arXiv:2104.04473, 3; Llama 3, arXiv:2407.21783, 3.3.2. Section 3: torch's own.

    plans = pipeline_parallel.make_plans("1f1b", ranks=2, microbatches=4)
    boundary = (B // dp // 4, T, C), dtype, device  # what a stage sends to the next
    model = parallelize(gpt, Mesh(plans, dp=2, tp=2), plans, [2, 2], boundary)  # 2 layers each
    optimizer = AdamW(model.parameter_groups(), lr=1e-3)  # x, y: rows of model.mesh.place["dp"]
    loss, norm = train_step(model, optimizer, x, y, valid, clip=1.0)  # loss: this rank's part

    torchrun --standalone --nproc_per_node=8 hybrid_3d.py --dp 2 --tp 2 --pp 2
"""
import math
from collections import Counter, defaultdict
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
from pipeline_parallel import CHAIN, HandsOn, Mail, Pipeline, SplitLinear, carve
from tensor_parallel import (
    ColumnLinear, ColumnParallel, CutSequence, RowLinear, WholeSequence,
    vocab_parallel_cross_entropy)
from zero import ZeRO1, ZeRO2, ZeRO3, units_of
from common import loss_sum

# imports of sections 1 and 2 end here; the rest is for sections 3 and 4
import sys
from itertools import product

from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

import amp_accum_ckpt
from common import adamw, build, share
from harness.checkpoint import of_stack, of_whole
from harness.flags import ANY, POSITIVE, Flag, arguments, require
from harness.run import Run, Side, whole
from harness.usage import refusing
from zero import held, pieces_of_each

# ---- 1. the technique (copy this, the files that it imports, and what they import) ----
# For another model write anew what is of the toy: pipeline_parallel's CHAIN, and of section 2
# kind_of, within_layers, has_experts, blocks_of, around_layers, in_microbatches.


def parallelize(model, mesh, plans, layers, boundary, *, sp=False, ring=None, recompute=None,
                autocast=None, zero=0):
    """A plain model, with the same weights on all ranks -> Hybrid: this rank's part of it.

    plans      pipeline_parallel's, of all ranks
    layers     [how many each stage gets]
    boundary   size, dtype and device of what goes from stage to stage: (rows of a micro-batch,
               T/cp, C), with sp (rows of a micro-batch, T/cp/tp, C)
    sp         are norms and residuals cut over tp, along T?
    ring       for cp > 1 a class of context_parallel, which is called with the group
    recompute  amp_accum_ckpt's full or selective
    autocast   torch.autocast(..), which decorates forwards
    zero       ZeRO's stage, 0: nothing is cut, copies sum whole gradients
    """
    splits = any(action.kind == "W" for action in plans[0])  # are backwards split into B and W?
    at_once = len(plans) == 1 and plans[0][1].kind == "B" and not splits  # actions F B F B ..
    assert zero < 3 or at_once, "ZeRO-3 wants one stage, and each backward right behind its forward"
    assert sp or mesh.size["tp"] == 1 or not has_experts(model), "experts with tp > 1 want sp=True"
    origins = origins_of(model, layers, plans)  # before tp cuts what they describe
    # 1. Within a layer: ranks share its matrices (tp), its sequence (cp) and its experts (ep).
    tp = within_layers(model, mesh, plans, splits, sp, ring)  # changes the model
    # 2. Between layers: of all stages this rank keeps those that its plan names (pp).
    here, tied = between_layers(model, layers, plans[mesh.place["pp"]])
    # 3. Around layers: what a block computes again in backward, and in which precision.
    around_layers(here, recompute, autocast)
    # 4. Copies of it all: they sum gradients (dp, cp), and share out what all of them hold (ZeRO).
    hybrid = Hybrid(here, tied, mesh, tp, kinds_of_parameters(sp), origins, zero, splits)

    links = pipeline_parallel.make_links(plans, mesh.pipelines)
    mail = Mail(plans, mesh.pipeline, mesh.group["pp"], links, *boundary)
    hybrid.pipeline = SummingPipeline(here, plans, mail, hybrid.zeros_of)
    return hybrid


# ---- who is who, and has what of the plain model


class Mesh:
    """The sizes of the axes, this rank's place on them, and its group along each.

    plans: a pipeline's, one for each of its ranks. tp varies fastest, since its ranks talk most,
    and pp slowest (Narayanan 2021, section 3). "peers" are all ranks with the same stages, "ends"
    those of a pipeline with the first stage and the last.
    """

    def __init__(self, plans, dp=1, cp=1, tp=1, ep=1):
        pp = len(plans)
        ranks = torch.arange(pp * dp * cp * tp).view(pp, dp, cp, tp)
        assert ranks.numel() == dist.get_world_size(), f"{list(ranks.shape)} are not all the ranks"
        place = (ranks == dist.get_rank()).nonzero()[0].tolist()
        self.place = dict(zip(("pp", "dp", "cp", "tp"), place))
        self.pipelines = ranks.flatten(1).T.tolist()  # a list of ranks for each pipeline
        [self.pipeline] = [line for line in self.pipelines if dist.get_rank() in line]
        self.size = {}
        self.group = {}
        self.add("pp", ranks, [0])
        self.add("cp", ranks, [2])
        self.add("tp", ranks, [3])
        self.add("data", ranks, [1, 2])
        self.add("peers", ranks, [1, 2, 3])
        by_expert = ranks.view(pp, -1, ep, tp)  # (pp, replicas, ep, tp)
        self.add("replicas", by_expert, [1])
        self.add("ep", by_expert, [2])
        home = pipeline_parallel.homes(plans)
        ends = {home[0], home[max(home)]}  # a single place if one rank has both
        self.add("ends", ranks[sorted(ends)], [0])

    def add(self, axis, ranks, dims):
        """A group for each set of ranks with all coordinates in common but those of `dims`.

        Torch wants every rank to call new_group, also those that are not in the group.
        Ranks of middle stages get no "ends".
        """
        others = [dim for dim in range(ranks.dim()) if dim not in dims]
        self.size[axis] = math.prod(ranks.shape[dim] for dim in dims)
        rows = ranks.permute(*others, *dims).reshape(-1, self.size[axis])  # a group each
        for row in rows.tolist():
            group = dist.new_group(row)
            if dist.get_rank() in row:
                self.group[axis] = group


def between_layers(model, layers, plan):
    """-> this rank's {stage: module}, {parameter of several stages: its name in the first}"""
    stages = carve(model, CHAIN, layers)
    count = Counter(p for stage in stages for p in stage.parameters())
    tied = {p: name for name, p in model.named_parameters() if count[p] > 1}
    return {action.stage: stages[action.stage] for action in plan}, tied


def origins_of(model, layers, plans):
    """Before the model is cut -> {name: (first place along pp that has it, a meta tensor like it)}

    requires_grad marks what full_gradients returns: what is trained, a tied one once.
    """
    home = pipeline_parallel.homes(plans)
    wanted = [name for name, p in model.named_parameters() if p.requires_grad]
    found = {}
    for number, stage in enumerate(carve(model, CHAIN, layers)):
        for name, t in stage.state_dict().items():
            like = t.to("meta").requires_grad_(name in wanted)
            found.setdefault(name, (home[number], like))
    return found


def trained(origins):
    return {name: origin for name, origin in origins.items() if origin[1].requires_grad}


# ---- what becomes of a gradient


def kinds_of_parameters(sp):
    """-> {kind: {axis: what becomes of a gradient along it}}, the docstring's table."""
    outside = "sum" if sp else "same"  # with sp a rank has seen a part of the tokens
    return {
        "matrix": {"tp": "cut", "data": "sum"},
        "outside": {"tp": outside, "data": "sum"},
        "inside": {"tp": "sum", "data": "sum"},  # a rank has seen its own heads
        "expert": {"tp": "sum", "replicas": "sum", "ep": "cut"},  # with sp each has own tokens
        "tied": {"tp": "cut", "data": "sum", "ends": "sum"},
    }


# `model` is a Hybrid, below. model.parts: zero.py's Parts. model.along: {parameter: its row above}.


def sum_gradients_plainly(model):
    """For reading: what SummingPipeline and sum_gradients do together in ZeRO-1."""
    for zero in model.zeros:
        for unit in zero.units:
            zero.start_sum(unit)  # over data or replicas: partial -> sharded
            zero.finish_sum(unit)
    for part in model.parts:
        for axis, what in model.along[part.parameter].items():
            if what == "sum" and axis in ("tp", "ends"):
                dist.all_reduce(part.grad, group=model.mesh.group[axis])  # partial -> replicated


def sum_gradients(model):
    """Ends the sums along data and replicas, which backwards have begun; sums along tp and ends."""
    for zero in model.zeros:
        if not isinstance(zero, ZeRO2):  # ZeRO-2 and 3 have summed after each backward
            zero.sync = True  # the last actions of a stage have set it, but "tied" is no stage
            zero.reduce()  # partial -> sharded
    for axis in ("tp", "ends"):
        partial_sums = summands(model, axis)
        if partial_sums and model.mesh.size[axis] > 1:  # middle stages have none for "ends"
            # partial -> replicated
            tensor_parallel.sum_over_ranks(partial_sums, model.mesh.group[axis])


def summands(model, axis):
    """-> the gradients that are to be summed along this axis."""
    return [part.grad for part in model.parts if model.along[part.parameter].get(axis) == "sum"]


class ZeRO0(ZeRO1):
    """Nothing is cut: copies sum whole gradients, and each steps all of them."""

    def place(self):
        return 1, 0

    def start_sum(self, unit):
        unit.missing = set(unit.shapes)
        # partial -> replicated
        unit.reducing = dist.all_reduce(unit.buffer, group=self.group, async_op=True)

    def renew(self, unit):
        """There are no chunks of others."""

    def gathered(self, chunks):
        found = {}
        for unit, chunk in zip(self.units, chunks):
            found.update(unit.views(chunk.clone()))
        return found


class SummingPipeline(Pipeline):
    """Sums a stage's gradients over its copies, while a backward of the stage still runs.

    ZeRO-1 sums once in a step, during the stage's last B (and last W, if Bs leave Ws). ZeRO-2 and 3
    sum for each micro-batch, during its B (its W, if there is one).
    """

    def __init__(self, modules, plans, mail, zeros_of):
        super().__init__(modules, plans, mail)
        self.zeros_of = zeros_of  # {stage: [ZeRO]}
        # Of each stage the last B, which completes the gradients of norms and embeddings, and the
        # last W, which completes those of Linears; without Ws the last B does both.
        last_b = {action.stage: action for action in self.plan if action.kind == "B"}
        last_of_all = {action.stage: action for action in self.plan if action.kind in "BW"}
        self.last = {*last_b.values(), *last_of_all.values()}

    def do(self, action, taken, loss_fn, update):
        kind, m, stage = action
        zeros = self.zeros_of.get(stage, []) if kind in "BW" else []
        for zero in zeros:
            if isinstance(zero, ZeRO2):  # a micro-batch's gradients are complete after its last
                zero.sync = not (kind == "B" and (m, stage) in self.leaves_w)
            else:
                zero.sync = action in self.last
        made = super().do(action, taken, loss_fn, update)
        for zero in zeros:
            if isinstance(zero, ZeRO2):
                zero.reduce()  # if sync: partial -> sharded
        return made


class Hybrid(nn.Module):
    """This rank's stages, and the ZeROs that sum and step their parameters.

    here     {stage: module}, which tp has cut already
    tied     {parameter that several stages have: its name in the first}
    kinds    {kind: {axis: what becomes of a gradient}}
    origins  {name in the plain model: (first place along pp that has it, a meta tensor like it)}
    number   of ZeRO's stage, 0 to 3
    splits   has a backward two parts, B and W?
    """

    def __init__(self, here, tied, mesh, tp, kinds, origins, number, splits):
        super().__init__()
        self.stages = nn.ModuleList(here.values())
        self.mesh = mesh
        self.tp = tp
        self.origins = origins
        self.number = number
        self.pipeline = None  # parallelize sets it: a SummingPipeline needs zeros_of
        self.names = {}  # {parameter: its name in the plain model}
        self.along = {}  # {parameter: {axis: what becomes of its gradient}}
        # {stage: [ZeRO]}. "tied" is no stage: sum_gradients sums what it has, as in ZeRO-1
        self.zeros_of = defaultdict(list)
        apart = kinds["outside"] if splits and number == 2 else None
        for (stage, axis), units in self.lay_out(here, tied, kinds, apart).items():
            own_number = min(number, 1) if stage == "tied" else number
            cut = (ZeRO0, ZeRO1, ZeRO2, ZeRO3)[own_number]
            self.zeros_of[stage].append(cut(units, mesh.group[axis]))
        self.zeros = [zero for zeros in self.zeros_of.values() for zero in zeros]
        self.units = [unit for zero in self.zeros for unit in zero.units]
        self.parts = [part for zero in self.zeros for part in zero.parts]
        # this rank counts these in the norm
        self.counted = [part for part in self.parts if self.is_first(part.parameter)]

    def lay_out(self, here, tied, kinds, apart):
        """-> {(stage, axis of copies): [(parameters, sites)]}. Fills self.names, self.along.

        apart: a kind, of which a stage's parameters become a unit of their own. Norms get gradients
        in B. In a unit with matrices, which get theirs in W, they would make ZeRO-2 hold the whole
        buffer from B to W.
        """
        units = defaultdict(list)
        for stage, module in here.items():
            new = {p: name for name, p in module.named_parameters() if p not in self.along}
            for p, name in new.items():  # not the other end of the tied one
                kind = kinds["tied" if p in tied else kind_of(name)]
                is_cut = self.tp.size > 1 and kind.get("tp") == "cut"
                assert is_cut == (p in self.tp.cuts), f"{name}: kind_of and tp's plan disagree"
                self.names[p] = tied.get(p, name)
                self.along[p] = kind
            outside = [p for p in new if p.requires_grad and self.along[p] is apart]
            if outside:
                units[stage, "data"].append((outside, []))
            for parameters, sites in units_of(module, blocks_of(module)):
                found = defaultdict(list)
                for p in parameters:
                    if p in new and self.along[p] is not apart:
                        copies = "replicas" if "replicas" in self.along[p] else "data"
                        found["tied" if p in tied else stage, copies].append(p)
                for where, some in found.items():
                    units[where].append((some, sites))
        return units

    def is_first(self, p):
        """Is this the first of the ranks that hold the same piece of p's gradient?"""
        repeated = {axis for axis, what in self.along[p].items() if what != "cut"}
        if self.number and p.requires_grad:
            repeated -= {"data", "replicas"}  # ZeRO cuts its gradient there
        return all(dist.get_rank(self.mesh.group[axis]) == 0 for axis in repeated)

    def parameter_groups(self):
        """For an elementwise optimizer. Make several likewise, of parts that names tell apart."""
        return [{"params": [part.master for part in self.parts]}]

    def zero_grad(self):
        for zero in self.zeros:
            zero.zero_grad()
            zero.sync = False  # until SummingPipeline or sum_gradients sets it

    def full_state_dict(self):
        """-> {name in the plain model: parameter or buffer}, on every rank."""
        return self.gather(self.origins, ZeRO1.full_parameters)

    def full_gradients(self):
        """-> {name in the plain model: gradient} of what is trained, on every rank."""
        return self.gather(trained(self.origins), ZeRO1.full_gradients)

    def gather(self, origins, of_zero):
        """-> {name in the plain model: tensor} of origins' names. of_zero(zero): {parameter: ..}"""
        found = {}
        for zero in self.zeros:
            found.update(of_zero(zero))  # over data or replicas: sharded -> replicated
        mine = {}
        for stage in self.stages:
            for name, t in stage.state_dict(keep_vars=True).items():
                t_here = found.get(t, t)  # ZeRO has neither buffers nor what is frozen
                # over tp: sharded -> replicated
                mine[name] = tensor_parallel.unshard(t_here, self.tp.cuts.get(t), self.tp)
        mine = moe.gather_experts(mine, self.mesh.group["ep"])  # over ep: sharded -> replicated
        # over pp: on one stage -> replicated
        return pipeline_parallel.gather(mine, origins, self.mesh.group["pp"])


# ---- the rest of a step


def gradient_norm(model):
    """Of the whole model. Where several ranks hold the same numbers, the first one counts them."""
    p = next(model.parameters())
    square = torch.zeros((), dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)
    if model.counted:
        norms = torch._foreach_norm([part.grad for part in model.counted], dtype=square.dtype)
        square = torch.stack(norms).square().sum()
    dist.all_reduce(square)  # over all ranks: partial -> replicated
    return square.sqrt()


def step(model, optimizer, norm, clip):
    """Clips the summed gradients to a norm of `clip` (0: does not), and steps the parameters."""
    if clip and model.parts:
        finite = norm.nan_to_num(0, posinf=0)  # inf, nan -> 0: nothing is scaled
        scale = (clip / (finite + 1e-6)).clamp(max=1)
        torch._foreach_mul_([part.grad for part in model.parts], scale)
    for zero in model.zeros:
        zero.step(optimizer)
    moe.step_biases(model)


# ---- a backward in two parts, of what tp has cut


class SplitColumns(torch.autograd.Function):
    """ColumnParallel in schedules with Ws: its backward makes dx alone, and leaves the rest to W.

    If W is put off, the sum of dx over tp hides behind nothing. Other Linears: SplitLinear.
    """

    @staticmethod
    def forward(ctx, tp, x, parameters):
        # W goes back through these (or autocast's copies of them). ctx.saved_tensors are others
        ctx.parameters = parameters
        return ColumnParallel.forward(ctx, tp, x, *parameters)  # stores tp and x in ctx, too

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


def split_columns(tp, x, *parameters):
    if not any(p is not None and p.requires_grad for p in parameters):
        return ColumnParallel.apply(tp, x, *parameters)  # no W
    if torch.is_grad_enabled() and not x.requires_grad:
        x = x.detach().requires_grad_()  # else autograd, which sees x alone, would skip backward
    return SplitColumns.apply(tp, x, parameters)  # in a tuple: see SplitLinear


def add_gradients(tp, x, dys, parameters):
    """W of some Linears that read the same x."""
    x = tp.gather(x).wait()  # sharded(T) -> replicated
    gradients = tensor_parallel.weight_gradients(x, dys, parameters[1::2])
    for p, gradient in zip(parameters, gradients):
        if gradient is not None and p.requires_grad:
            # adds to p.grad, calls ZeRO's hook, and goes through a cast that autocast has made
            torch.autograd.backward(p, gradient)


# ---- 2. the toy GPT, parallelized --------------------------------------------

KIND_BY_NAME = [  # the first pattern that fits a parameter's name
    ("*.experts.*", "expert"),
    ("*.router.*", "outside"),
    ("*.[qk]_norm.*", "inside"),
    ("*norm*", "outside"),
    ("*.out.bias", "outside"),  # row biases, added to the sum over tp
    ("*.down.bias", "outside"),
    ("*", "matrix"),  # embeddings, positions and biases of columns are cut like matrices
]


def kind_of(name):
    return next(kind for pattern, kind in KIND_BY_NAME if fnmatchcase(name, pattern))


def within_layers(model, mesh, plans, splits, sp, ring):
    """-> tensor_parallel's WholeSequence or CutSequence"""
    tp = CutSequence(mesh.group["tp"]) if sp else WholeSequence(mesh.group["tp"])
    if tp.size > 1:
        tensor_parallel.cut_model(model, tp, replacements(model))
    for module in model.modules():
        if splits and isinstance(module, ColumnLinear):
            module.product = split_columns
        if splits and isinstance(module, RowLinear):
            module.product = partial(pipeline_parallel.split_linear, bias=None)
    if mesh.size["cp"] > 1:
        context_parallel.parallelize(model, ring(mesh.group["cp"]))
    if has_experts(model):
        microbatches = 1 + max(action.microbatch for action in plans[0])
        moe.parallelize(model, mesh.group["ep"], mesh.group["peers"], microbatches)
    return tp


def replacements(model):
    """-> tensor_parallel's plan. Of experts it cuts the shared one alone."""
    plan = tensor_parallel.plan_of(model)
    if not has_experts(model):
        return plan
    if model.blocks[0].mlp.shared is None:
        return {name: how for name, how in plan.items() if ".mlp" not in name}
    return {name.replace(".mlp", ".mlp.shared"): how for name, how in plan.items()}


def has_experts(model):
    return hasattr(model.blocks[0].mlp, "experts")


def blocks_of(stage):
    return [block for block in stage.blocks if not isinstance(block, HandsOn)]


def around_layers(here, recompute, autocast):
    for stage in here.values():
        if recompute:
            for block in blocks_of(stage):
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
        if isinstance(zero, ZeRO3):
            zero.free_units()  # which reduce() would have done
    return loss


def in_microbatches(model, x, y, valid):
    """-> what Pipeline.step takes: inputs, and a function -> a micro-batch's part of the loss."""
    targets = y.chunk(model.pipeline.microbatches)

    def loss_of(logits, m):
        if model.tp.size == 1:
            return loss_sum(logits, targets[m]) / valid
        vocab = model.origins["tok.weight"][1].shape[0]  # V, as in the plain model
        return vocab_parallel_cross_entropy(logits, targets[m], vocab, model.tp) / valid

    return x.chunk(model.pipeline.microbatches), loss_of


# ---- 3. at work: the same with torch's own API -------------------------------


def local(t):
    """A DTensor's part on this rank; an ordinary tensor is that already."""
    return t.to_local() if isinstance(t, DTensor) else t


class AtWork(nn.Module):
    """This rank's stages of the toy GPT, and torch's schedule, which runs them."""

    def __init__(self, here, mesh, device_mesh, origins):
        super().__init__()
        self.stages = nn.ModuleList(here.values())
        self.mesh = mesh
        self.device_mesh = device_mesh  # torch's, of pp, dp and tp
        self.origins = origins  # as Hybrid's
        self.valid = 1  # targets of the batch under way
        self.schedule = None  # torch's, which calls loss_of
        self.tied = None  # the embedding or head, if it is tied to another rank's

    def loss_of(self, logits, targets):
        """What torch's schedule calls on the last stage."""
        if self.mesh.size["tp"] > 1:
            vocab = self.origins["tok.weight"][1].shape[0]  # V, as in the plain model
            uncut = torch.empty(*targets.shape, vocab, device="meta")
            logits = DTensor.from_local(logits, self.device_mesh["tp"], [Shard(2)],
                                        shape=uncut.shape, stride=uncut.stride())
        # fully_shard averages over dp
        return loss_sum(logits, targets) * self.mesh.size["data"] / self.valid

    def run(self, run_schedule, x, y, valid):
        """-> this rank's part of the loss. run_schedule: the schedule's step, or its eval."""
        self.valid = valid
        losses = []
        with loss_parallel():  # for logits that are DTensors
            run_schedule(x, target=y, losses=losses, return_outputs=False)
        total = sum((local(loss.detach()) for loss in losses), torch.zeros((), device=x.device))
        # loss_of has multiplied by dp, and each rank of tp has the whole
        return total / (self.mesh.size["data"] * self.mesh.size["tp"])

    def evaluate(self, x, y):
        return self.run(self.schedule.eval, x, y, 1)

    def full_state_dict(self):
        return self.gather(self.origins, whole)

    def full_gradients(self):
        return self.gather(trained(self.origins), lambda p: whole(p if p.grad is None else p.grad))

    def gather(self, origins, whole_of):
        """-> {name in the plain model: tensor} of origins' names, on every rank."""
        mine = {}
        for stage in self.stages:
            for name, p in stage.state_dict(keep_vars=True).items():
                mine[name] = whole_of(p)  # over dp, tp: sharded -> replicated
        # over pp: on one stage -> replicated
        return pipeline_parallel.gather(mine, origins, self.mesh.group["pp"])


def parallelize_at_work(model, mesh, plans, layers, boundary, args):
    """The plain GPT -> AtWork."""
    size, _, device = boundary
    sizes = args.pp, args.dp, args.tp
    device_mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "dp", "tp"))
    origins = origins_of(model, layers, plans)
    if args.tp > 1:
        tensor_parallel.parallelize_at_work(model, device_mesh["tp"], args.sp)
    columns = len(local(model.head.weight))  # before fully_shard cuts it again
    here, tied = between_layers(model, layers, plans[mesh.place["pp"]])
    at_work = AtWork(here, mesh, device_mesh, origins)
    for number, stage in here.items():
        is_last = number == len(layers) - 1
        if args.dp > 1:
            for unit in [*blocks_of(stage), stage]:
                fully_shard(unit, mesh=device_mesh["dp"], reshard_after_forward=False)
        if is_last and args.tp > 1:
            # the pipeline takes ordinary tensors; loss_of makes DTensors again
            stage.register_forward_hook(lambda module, inputs, logits: logits.to_local())
        if tied and (number == 0 or is_last):
            at_work.tied = stage.tok.weight if number == 0 else stage.head.weight
    logits = size[0], args.seq, columns
    at_work.schedule = pipeline_parallel.schedule_at_work(
        args.schedule, here, plans, boundary, logits, at_work.loss_of, mesh.group["pp"])
    return at_work


def train_step_at_work(model, optimizer, x, y, valid, clip):
    optimizer.zero_grad()
    loss = model.run(model.schedule.step, x, y, valid)
    trained_here = [p for p in model.parameters() if p.requires_grad]
    for p in trained_here:
        if isinstance(p, DTensor):
            # the gradient of a cut embedding comes replicated
            p.grad = p.grad.redistribute(placements=p.placements)
    if model.tied is not None and model.tied.requires_grad:
        # partial -> replicated
        dist.all_reduce(local(model.tied.grad), group=model.mesh.group["ends"])
    # the tied one counts on the first stage only
    is_first = model.mesh.place["pp"] == 0
    counted = [p.grad for p in trained_here if is_first or p is not model.tied]
    square = torch.zeros((), dtype=next(model.parameters()).dtype, device=x.device)
    if counted:
        square = whole(nn.utils.get_total_norm(counted)).square()
    dist.all_reduce(square, group=model.mesh.group["pp"])  # partial -> replicated
    norm = square.sqrt()
    if clip and trained_here:
        scale = (clip / (norm + 1e-6)).clamp(max=1)
        torch._foreach_mul_([local(p.grad) for p in trained_here], scale)
    optimizer.step()
    return loss, norm


# ---- 4. run ------------------------------------------------------------------

NOT_HERE = ("naive", "pipedream")  # the first never overlaps, the second trains something else
SCHEDULES = tuple(name for name in pipeline_parallel.SCHEDULES if name not in NOT_HERE)
FLAGS = {  # int: layout() finds the number
    "dp": Flag(int, "copies, which share the batch (the ranks that are left)", POSITIVE),
    "tp": Flag(int, "ranks that share a layer (1; 2 if neither --dp nor --pp is given)", POSITIVE),
    "pp": Flag(int, "ranks of a pipeline (likewise)", POSITIVE),
    "cp": Flag(1, "ranks that share each sequence", POSITIVE),
    "attn": Flag("zigzag", "how keys reach other ranks' queries", tuple(context_parallel.KINDS)),
    "micro": Flag(int, "M, micro-batches of a copy (4, or 2 or 1 if 4 do not fit)", POSITIVE),
    "schedule": Flag("1f1b", "order of the work", SCHEDULES),
    "chunks": Flag(2, "stages of a rank, for interleaved and bfs", POSITIVE),
    "sp": Flag(False, "cut norms and residuals over tp, along T"),
    "zero": Flag(0, "cut over dp x cp: 1 optimizer, 2 gradients, 3 parameters", (0, 3)),
    "ckpt": Flag("none", "what blocks compute again in backward", ("none", "full", "selective")),
    "amp": Flag("off", "autocast to", ("off", "bf16"), course=True),
    **{flag[2:].replace("-", "_"): settings for flag, settings in moe.FLAGS.items()},
    "experts": Flag(0, "E in each layer, in the place of its MLP (0: none)", ANY, course=True),
}


def layout(args):
    """Fills in what the flags leave open -> plans. What cannot run ends here, in one line."""
    ranks = args.world_size // args.cp
    usual = 1
    if ranks % 4 == 0 and not (args.dp or args.tp or args.pp):
        usual = 2
    args.tp = args.tp or usual
    args.pp = args.pp or usual
    args.dp = args.dp or max(1, ranks // (args.tp * args.pp))
    args.sp = args.sp and args.tp > 1
    args.micro = args.micro or math.gcd(4, args.batch // args.dp)
    require(args.experts or not (args.ep or args.shared or args.capacity),
            "--ep, --shared and --capacity are for --experts E")
    args.ep = (args.ep or args.dp * args.cp) if args.experts else 1
    args.top_k = args.top_k or moe.of_preset(args.model)[1]
    refuse(args)
    with refusing():
        plans = pipeline_parallel.make_plans(args.schedule, args.pp, args.micro, args.chunks)
    if args.impl != "scratch":
        refuse_torch(args, pipeline_parallel.homes(plans))
    return plans


def refuse(args):
    tp = args.tp
    copies = args.dp * args.cp
    stages = args.pp * pipeline_parallel.chunks_of(args.schedule, args.chunks)
    axes = f"--dp {args.dp} x --cp {args.cp} x --tp {tp} x --pp {args.pp}"
    require(copies * tp * args.pp == args.world_size,
            f"{axes}: their product is not {args.world_size}, the number of ranks")
    sharing = tp * args.cp if args.attn == "ulysses" else tp  # ranks that share the heads
    chunks = 1  # of the sequence, on a rank
    if args.cp > 1:
        chunks = len(context_parallel.KINDS[args.attn].chunks(0, args.cp))
    for what, size, parts in (
        ("heads of keys and values:", args.kv_heads, sharing),
        ("--hidden", args.hidden, tp),
        ("--seq", args.seq, args.cp * math.lcm(chunks, tp if args.sp else 1)),
        ("--batch", args.batch, args.dp * args.micro),
        ("--experts", args.experts, args.ep),
        ("dp x cp =", copies, args.ep),
    ):
        require(size % parts == 0, f"{what} {size} does not divide into {parts} equal parts, as "
                f"{axes}, --micro {args.micro}, --ep {args.ep} want it")
    require(args.top_k <= args.experts or not args.experts,
            f"--top-k {args.top_k} of --experts {args.experts}: choose fewer")
    require(stages <= args.layers, pipeline_parallel.too_few(args.layers, stages))
    require(args.zero < 3 or (args.pp == 1 and args.schedule == "1f1b"),
            "--zero 3 wants each backward right behind its forward: --pp 1 --schedule 1f1b")
    require(not args.experts or tp == 1 or args.sp,
            f"--experts with --tp {tp}: its ranks would all route the same tokens; add --sp")


def refuse_torch(args, home):
    """What section 3 does not show. home: {stage: place along pp}"""
    ours = (args.dry_run, args.save, args.resume, args.init_from, args.experts, args.cp > 1,
            args.zero > 1, args.ckpt != "none", args.amp != "off", args.dtype == "bf16")
    require(not any(ours), "--dry-run, --save, --resume, --init-from, --experts, --cp, --zero 2, "
            "3, --ckpt, --amp and --dtype bf16 want --impl scratch")
    require(args.seq % args.tp == 0, f"--seq {args.seq}: torch wants a multiple of --tp {args.tp}")
    pipeline_parallel.refuse_at_work(args.schedule, args.micro, args.pp)
    require(len(home) == 1 or home[0] != home[max(home)], f"--schedule {args.schedule} --pp "
            f"{args.pp}: both ends of the model on one rank want --impl scratch")


# ---- bytes that a rank sends in a step. b: of a number, w: of one in fp32 or better


def tokens_of(args):
    """Of a micro-batch on a rank, not yet cut over tp."""
    return args.batch // args.dp // args.micro * (args.seq // args.cp)


def sent_on_tp(args, b, layers, is_first, is_last):
    """By so many layers, the embedding and the head, without the sums of gradients."""
    x = b * tokens_of(args) * args.width  # between two blocks, before --sp cuts it
    half = 5 if args.sp else 4  # f and g of half a block, in forward and backward
    halves = 1 if args.experts and not args.shared else 2
    block = half * halves
    if args.ckpt == "full":  # all again but the MLP's g, the last. f sends nothing without --sp
        block += (1 + halves) if args.sp else 2
    sent = layers * block * x
    if is_first:
        sent += 2 * x
        if args.cfg.form.learned_positions:
            sent += 2 * b * args.seq // args.cp * args.width  # positions
    if is_last:
        sent += (half - 2) * x  # f alone
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
    P = sum(unit.full.nbytes for unit in zero.units)
    sent = 2 * P
    if isinstance(zero, ZeRO2):
        sent = (micro + 1) * P
    if isinstance(zero, ZeRO3):
        order = zero.expected  # of use in a micro-batch
        for last, unit in zip([None, *order], order):
            if unit is not last:
                sent += micro * unit.full.nbytes
        sent -= P  # step() gathers nothing
    ranks = dist.get_world_size(zero.group)
    return sent * (ranks - 1) / ranks


def sent_by_sums(model, axis):
    """By sum_gradients along an axis that it sums after backward."""
    n = model.mesh.size[axis]
    return 2 * (n - 1) / n * sum(grad.nbytes for grad in summands(model, axis))


def textbook(run, plans, layers, model):
    """-> rows: the docstring's table of what is sent, at this rank's place"""
    args = run.args
    group = model.mesh.group
    b = run.dtype.itemsize
    place = model.mesh.place["pp"]
    home = pipeline_parallel.homes(plans)
    here = model.pipeline.modules  # {stage: module}
    neighbours = sum(home.get(stage + side, place) != place for stage in here for side in (-1, 1))
    blocks = sum(layers[stage] for stage in here)
    links = model.pipeline.mail.links  # {two places: group}; gloo has none but group["pp"]
    rows = []

    def row(axis, formula, expected, *groups):
        sent = sum(run.ledger["scratch"].groups[each.group_name] for each in groups)
        rows.append((f"wire {axis}", formula, expected, sent))

    for axis in ("data", "replicas"):
        zeros = [zero for zero in model.zeros if zero.group is group[axis]]
        if zeros:  # only experts have replicas
            sent = sum(sent_by_zero(zero, args.micro) for zero in zeros)
            row(axis, "k P b (n-1)/n", sent, group[axis])
    on_ends = sent_by_sums(model, "ends")
    if on_ends:  # if they are tied
        row("ends", "2 (n-1)/n b V C/tp, ZeRO: /data", on_ends, group["ends"])
    world = dist.group.WORLD
    row("norm", "2 w (n-1)/n", 2 * max(b, 4) * (world.size() - 1) / world.size(), world)
    if args.amp == "off":  # which would halve some
        on_tp = sent_on_tp(args, b, blocks, 0 in here, len(layers) - 1 in here)
        row("tp", "M L/pp 8 A b (tp-1)/tp, --sp 10, + ends + sums",
            on_tp + sent_by_sums(model, "tp"), group["tp"])
        row("cp", "M L/pp (4 b + 2 w) A (cp-1)/tp K/H", sent_on_cp(args, b, blocks), group["cp"])
        row("pp", "M A b, --sp /tp, per neighbour", sent_on_pp(args, b, neighbours),
            group["pp"], *(links[link] for link in links if place in link))
    return rows


# ---- checkpoints: who holds what of the plain model


def pieces(model, optimizer):
    """-> [Piece]: the boxes of the plain model's tensors that this rank holds"""
    found = []
    ep_rank = dist.get_rank(model.mesh.group["ep"])
    here = pieces_of_each(model.units, model.names, optimizer)
    for p, boxes in here.items():
        if p in model.tp.cuts:
            dim, plain_size, _ = model.tp.cuts[p]
            boxes = [of_whole(box, dim, plain_size, model.tp.rank) for box in boxes]
        if "ep" in model.along[p]:  # a stack of experts' weights: a box becomes one per expert
            boxes = [each for box in boxes for each in of_stack(box, ep_rank, moe.plain_name)]
        found += boxes
    return [box for box in found if box.tensor.numel()]  # of padding nothing is left


def notes(model):
    """What a checkpoint holds besides: the biases of all layers' experts."""
    biases = {name: origin for name, origin in model.origins.items() if "bias_units" in name}
    mine = {name: t for stage in model.stages for name, t in stage.named_buffers()}
    found = pipeline_parallel.gather(mine, biases, model.mesh.group["pp"])
    return {"bias_units": [units.tolist() for units in found.values()]}


# ---- a run


def build_plain(args, cfg, seed, device, dtype):
    if not args.experts:
        return build(cfg, seed, device, dtype)
    routed = None if args.dry_run else sources(args, device)  # a dry run's are not looked at
    return moe.build_plain(args, cfg, seed, device, dtype, routed)


def sources(args, device):
    """-> [micro-batch][rank]: the tokens that the rank routes, numbered 0 to B T - 1"""
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
    kind = context_parallel.KINDS[args.attn]
    return kind.positions_of(cp_rank, args.cp, args.seq, device)


def set_up(run, impl, mesh, plans, layers, boundary):
    """-> Side"""
    args = run.args
    plain = run.build()
    if impl == "torch":
        model = parallelize_at_work(plain, mesh, plans, layers, boundary, args)
        optimizer = adamw(model.parameters(), args.lr)
        return Side(model=model, optimizer=optimizer, train_step=train_step_at_work)
    moe.set_biases(plain, run)
    autocast = torch.autocast(run.device.type, torch.bfloat16) if args.amp == "bf16" else None

    model = parallelize(
        plain, mesh, plans, layers, boundary, sp=args.sp, ring=context_parallel.KINDS[args.attn],
        recompute=amp_accum_ckpt.CHECKPOINT[args.ckpt], autocast=autocast, zero=args.zero)
    optimizer = adamw(model.parameter_groups(), args.lr)
    tokens = tokens_of_rank(args, mesh.place["cp"], run.device)
    return Side(
        model=model, optimizer=optimizer, train_step=train_step,
        evaluate=lambda x, y: evaluate(model, x[:, tokens], y[:, tokens]),
        pieces=partial(pieces, model, optimizer),
        held=partial(held, model, model, optimizer),  # a Hybrid has units, as a ZeRO has
        extra=partial(notes, model) if args.experts else None)


def picture(run, plans, layers):
    """Which ranks have which layers."""
    each = run.world_size // len(plans)
    for place, plan in enumerate(plans):
        stages = sorted({action.stage for action in plan})
        words = " ".join(f"{sum(layers[:s])}..{sum(layers[:s + 1]) - 1}" for s in stages)
        run.say(f"  layers {words}:  ranks {place * each}..{(place + 1) * each - 1}")


def main():
    args = arguments(__doc__, presets=moe.PRESETS, **FLAGS)
    plans = layout(args)
    layers = pipeline_parallel.split_layers(args.layers, len(pipeline_parallel.homes(plans)))
    run = Run(args, build=partial(build_plain, args))
    mesh = Mesh(plans, args.dp, args.cp, args.tp, args.ep)
    length = args.seq // args.cp // (args.tp if args.sp else 1)
    size = args.batch // args.dp // args.micro, length, args.width
    boundary = size, run.dtype, run.device  # of what goes from stage to stage
    if run.dry and args.experts:  # nobody knows what tokens would choose
        tokens = tokens_of(args) // args.tp
        moe.read_counts = moe.balanced_counts(args, tokens, mesh.group["ep"])
    with run:
        sides = {impl: set_up(run, impl, mesh, plans, layers, boundary) for impl in run.impls}
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
        return run.finish(plain, judged_as)


if __name__ == "__main__":
    sys.exit(main())
