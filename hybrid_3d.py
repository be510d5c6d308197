"""Data, tensor and pipeline parallelism in one run; context, expert parallelism and ZeRO by flags.

                     copy 0 (rows 0..3)      copy 1 (rows 4..7)
    stage 0          ranks 0 1  ---- dp ---- ranks 2 3        tp: neighbours, who talk in each layer
      embedding,        |  |                    |  |          dp: once per step, during backward
      layers 0 1       pp pp                   pp pp          pp: to the next stage per micro-batch;
    stage 1             |  |                    |  |              the embedding once per step: the
      layers, head   ranks 4 5  ---- dp ---- ranks 6 7            last stage's head is tied to it

    rank = ((pp_rank dp + dp_rank) cp + cp_rank) tp + tp_rank
    dp x cp = replicas x ep: ep neighbours share out the experts, replicas hold the same ones

Here is said who is who (Mesh), in which order techniques are applied (parallelize), what becomes
of a gradient along each axis (Kind). cut: each rank has its own part. S: each has a summand, which
sum_gradients adds up. 1: in the end all have the same, and the norm counts it once.

    parameter        tp               replicas         ep        first and last stage
    matrix           cut              S 1              S 1       -
    norm, row bias   1, --sp: S 1     S 1              S 1       -
    embedding        cut              S 1              S 1       S 1
    router           S 1              S 1              S 1       -
    expert           S 1              S 1              cut       -

    numbers (plain MLPs)   plain GPT    one rank of a middle stage
    held, 4 per weight     48 C^2 L     48 C^2 L / (tp pp); zero 1, 2, 3: 2, 3, 4 of the 4 / (dp cp)
    activations, M >= pp   16 B T C L   (4 + 12/tp) B/(dp M) T/cp C L/pp (pp - stage); --sp: 16/tp
    sent on tp, per step   -            8 B/dp T/cp C L/pp (tp-1)/tp; --sp: 10, and small sums
    sent on dp x cp        -            k gradients (n-1)/n, n = dp cp; k = 2; zero 2: M+1, 3: 3 M
    sent on pp, per step   -            2 B/dp T/cp C; --sp: / tp

Narayanan 2021, arXiv:2104.04473, section 3; Llama team 2024, arXiv:2407.21783, section 3.3.2.
At work: DeviceMesh, fully_shard, parallelize_module, torch.distributed.pipelining (section 3).

    torchrun --standalone --nproc_per_node=8 hybrid_3d.py --dp 2 --tp 2 --pp 2
    mesh = Mesh(dp=2, tp=2, pp=2)  # tp and stages are made with its groups: see parallelize
    model = Hybrid(stages, blocks, kind_of, mesh, tp, make_optimizer)
    pipeline = Pipeline(stages.here, plans, stages.groups, boundary,
                        model.before_backward, model.after_backward)
    model.zero_grad(); pipeline.step(inputs, loss_of); sum_gradients(model)
    step(model, gradient_norm(model), clip)
"""
import harness  # before torch, which warns where NumPy is missing

import contextlib
import math
import re
import sys
from collections import Counter, defaultdict, namedtuple
from fnmatch import fnmatchcase
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

import amp_accum_ckpt
import context_parallel
import moe
import pipeline_parallel
import tensor_parallel
from common import (
    ANY, DTYPES, POSITIVE, Flag, Run, Side, adamw, arguments, build, loss_sum, require, share)
from harness.checkpoint import STATES, Piece, run_pieces
from harness.timeline import bubble_rate, in_flight
from pipeline_parallel import Boundary, Pipeline, Stages
from tensor_parallel import CutSequence, WholeSequence, unshard, vocab_parallel_cross_entropy
from zero import ZeRO

# ---- 1. the technique (copy this; it needs torch and the files of the techniques) ---


class Mesh:
    """Who is who: sizes of the axes, this rank's place on each, groups along those that need one.

    tp varies fastest, since its ranks talk most, and pp slowest (Narayanan 2021, section 3). The
    dp x cp ranks of the axis "data" hold the same dense parameters. With ep there are three more
    groups: experts are shared out among the ranks of "ep", neighbours on "data"; the dp x cp / ep
    ranks of "replicas" hold the same ones; "stage" is all ranks with the same place on pp.
    """

    def __init__(self, dp=1, cp=1, tp=1, pp=1, ep=None):
        ranks = torch.arange(pp * dp * cp * tp).view(pp, dp, cp, tp)
        place = (ranks == dist.get_rank()).nonzero()[0].tolist()
        self.size = {"pp": pp, "dp": dp, "cp": cp, "tp": tp, "data": dp * cp}
        self.place = dict(zip(("pp", "dp", "cp", "tp"), place))
        self.place["data"] = self.place["dp"] * cp + self.place["cp"]
        self.pipelines = ranks.flatten(1).T.tolist()  # ranks of each pipeline, by place on pp
        self.group = {  # {axis: ProcessGroup}
            "pp": group_along(ranks, [0]),
            "tp": group_along(ranks, [3]),
            "data": group_along(ranks, [1, 2]),
        }
        if cp > 1:
            self.group["cp"] = group_along(ranks, [2])
        if ep:
            by_expert = ranks.view(pp, dp * cp // ep, ep, tp)
            self.size["ep"] = ep
            self.size["replicas"] = dp * cp // ep
            self.place["ep"] = self.place["data"] % ep
            self.place["replicas"] = self.place["data"] // ep
            self.group["stage"] = group_along(ranks, [1, 2, 3])
            self.group["replicas"] = group_along(by_expert, [1])
            self.group["ep"] = group_along(by_expert, [2])


def group_along(ranks, dims):
    """ranks: all of them, with a dimension for each axis. -> the group of those that differ from
    this rank in the dimensions `dims` alone.

    Every rank makes every group, in one order: NCCL splits a group off the world's communicator,
    and all ranks have to take part in that.
    """
    others = [dim for dim in range(ranks.dim()) if dim not in dims]
    count = math.prod(ranks.shape[dim] for dim in dims)
    rows = ranks.permute(*others, *dims).reshape(-1, count)  # a group each
    for row in rows.tolist():
        group = dist.new_group(row)
        if dist.get_rank() in row:
            mine = group
    return mine


# summed: the axes along which ranks hold a summand of a gradient, after backward
# alike: the axes along which they hold the same sum afterwards, so that it counts once in the norm
Kind = namedtuple("Kind", "summed alike")


def kinds_of_parameters(sequence_parallel):
    """-> {name: Kind}, the docstring's table.

    "data" is dp x cp, which is replicas x ep. "stages" are those that share a tied parameter.
    """
    kinds = {
        "matrix": Kind(summed=["data"], alike=["data"]),
        "norm": Kind(summed=["data"], alike=["data", "tp"]),
        "row bias": Kind(summed=["data"], alike=["data", "tp"]),
        "embedding": Kind(summed=["stages", "data"], alike=["stages", "data"]),
        # tp leaves experts whole. Each of its ranks routes a part of the tokens, with and without
        # --sp, and so has a summand of these gradients
        "router": Kind(summed=["data", "tp"], alike=["data", "tp"]),
        "expert": Kind(summed=["replicas", "tp"], alike=["replicas", "tp"]),
    }
    if sequence_parallel:  # norms and row biases have seen this rank's positions only
        kinds["norm"].summed.append("tp")
        kinds["row bias"].summed.append("tp")
    return kinds


class Optimizers:
    """Several optimizers as one, for whatever sets learning rates, saves and loads."""

    def __init__(self, optimizers):
        self.param_groups = []  # of all of them
        self.state = defaultdict(dict)  # {parameter: its states}, which they share
        for optimizer in optimizers:
            self.param_groups += optimizer.param_groups
            optimizer.state = self.state  # none has stepped yet


class Hybrid(nn.Module):
    """This rank's stages of a model, and the ZeROs that sum and step their parameters.

    stages          pipeline_parallel's Stages, whose modules tp has cut already
    blocks          {number of a stage: [modules in it]}, each of which ZeRO holds together. What is
                    in none of them is an edge, such as the embedding
    kind_of         function: the name of a parameter -> the name of its Kind
    tp              tensor_parallel's WholeSequence or CutSequence
    make_optimizer  function: torch's list of parameter groups -> optimizer
    zero_stage      0 to 3
    edges_wait      True: ZeRO is 1 at most for edges. It has to be True if zero_stage is 2 or 3 and
                    an edge is tied to another rank's stage: its gradient stays whole until the
                    stages have summed it
    """

    def __init__(self, stages, blocks, kind_of, mesh, tp, make_optimizer, zero_stage=0,
                 edges_wait=True):
        super().__init__()
        self.stages = stages
        self.mesh = mesh
        self.tp = tp
        self.zero_stage = zero_stage
        kinds = kinds_of_parameters(isinstance(tp, CutSequence))
        self.names = {p: name for name, p in stages.named().items()}
        self.kind = {p: kinds[kind_of(name)] for p, name in self.names.items()}
        self.cuts = tensor_parallel.cuts(self)  # {parameter: Cut}, of those that tp has cut
        self.check_kinds()

        self.inner = {number: [] for number in stages.here}  # {stage: [ZeRO]}, of its blocks
        in_blocks = set()
        for number, modules in blocks.items():
            # each block is a unit of ZeRO's
            self.inner[number] = self.zeros_of(modules, modules, zero_stage, make_optimizer)
            for module in modules:
                in_blocks.update(module.modules())
        # modules outside of blocks that have parameters of their own, not only in modules inside
        edges = [m for m in self.modules() if m not in in_blocks and has_parameters(m)]
        if stages.tied and zero_stage > 1 and not edges_wait:
            raise ValueError("a parameter is tied between stages: edges_wait has to be True")
        if edges_wait:
            zero_stage = min(zero_stage, 1)
        # all edges together are one unit
        self.edges = self.zeros_of(edges, [tuple(edges)], zero_stage, make_optimizer)
        self.zeros = self.edges + [each for zeros in self.inner.values() for each in zeros]
        self.check_zeros()
        self.optimizer = Optimizers([zero.optimizer for zero in self.zeros])
        # for each of self.parts(): the share of its square that this rank brings to the norm
        shares = [1 / self.holders(part.parameter) for part in self.parts()]
        self.shares = torch.tensor(shares, dtype=stages.dtype, device=stages.device)

    def check_kinds(self):
        """Raises a ValueError where a kind is not what tp and the stages have made of it."""
        for p, name in self.names.items():
            is_whole = "tp" in self.kind[p].alike
            is_cut = p in self.cuts
            if self.tp.size > 1 and is_whole == is_cut:  # it must be one of the two
                raise ValueError(f"{name} is cut over tp and of a kind that is whole, or the other "
                                 "way round: give it another kind")
            if p in self.stages.tied and "stages" not in self.kind[p].summed:
                raise ValueError(f"{name} is in several stages: its kind is embedding")

    def zeros_of(self, modules, units, zero_stage, make_optimizer):
        """-> [ZeRO]: one for the dense parameters in these modules, which are alike on all ranks of
        data, and one for the experts, alike on replicas.

        units: modules or tuples of modules, whose dense parameters lie together in ZeRO. A unit may
        have experts inside as well: a ZeRO takes no parameters but those of the module that it
        gets. Each module of experts is a unit of its own.
        """
        inside = [m for module in modules for m in module.modules() if has_parameters(m)]
        dense = [m for m in inside if not self.is_expert(m)]
        experts = [m for m in inside if self.is_expert(m)]
        zeros = []
        if dense:
            group = self.mesh.group["data"]
            zeros.append(ZeRO(nn.ModuleList(dense), make_optimizer, group, zero_stage, units))
        if experts:
            group = self.mesh.group["replicas"]
            module = nn.ModuleList(experts)
            zeros.append(ZeRO(module, make_optimizer, group, zero_stage, experts))
        return zeros

    def is_expert(self, module):
        """Are its own parameters, not those of modules inside it, an expert's?"""
        own = list(module.parameters(recurse=False))
        of_experts = ["replicas" in self.kind[p].summed for p in own]
        if any(of_experts) and not all(of_experts):
            names = ", ".join(self.names[p] for p in own)
            raise ValueError(f"{names} are in one module, and not all of them are of experts: give "
                             "these a module of their own")
        return any(of_experts)

    def check_zeros(self):
        """Raises a ValueError where two ZeROs would step one parameter. Either it is tied, or the
        module that has it lies inside of another one with parameters of its own, whose ZeRO takes
        all that is inside."""
        count = Counter(p for zero in self.zeros for p in zero.module.parameters())
        for p, zeros in count.items():
            if zeros > 1:
                raise ValueError(f"{self.names[p]} is in a block and in an edge, or in modules of "
                                 "two kinds: tie it to nothing outside of its block, and give what "
                                 "a stage has besides its blocks a module of its own")

    def parts(self):
        """-> [zero.Part]: what this rank sums, clips and steps, a piece of a parameter each."""
        return [part for zero in self.zeros for part in zero.parts]

    def holders(self, p):
        """How many ranks hold the same summed gradient of a parameter, or the same piece of it.

        Along "stages" ZeRO cuts a tied parameter at different places, since each stage lays it end
        to end with other edges. But the pieces of one stage's ranks together are the whole
        gradient, and so are those of another's. The sum of squares is right if each stage brings
        an equal share of its own.
        """
        count = 1
        for axis in self.axes_alike(p, self.zero_stage):
            if axis != "stages":
                count *= self.mesh.size[axis]
            elif p in self.stages.tied:
                count *= self.stages.tied[p].size()
        return count

    def axes_alike(self, p, zero_stage):
        """-> the axes along which ranks hold the same of a parameter, with this stage of ZeRO.

        Stages 1, 2 and 3 give the same answer. So holders() may pass the zero_stage of the blocks
        for an edge, too, even if the ZeRO of edges has a lower one.
        """
        axes = self.kind[p].alike
        if zero_stage > 0:  # ZeRO has cut it along "data" or "replicas"
            axes = [axis for axis in axes if axis in ("stages", "tp")]
        return axes

    def zero_grad(self):
        for zero in self.zeros:
            zero.zero_grad()
            zero.sync = False

    def before_backward(self, stage, is_last):
        """To be called before a backward adds to a stage's gradients; is_last: for the last time in
        this step. ZeRO-0 and 1 then sum them over ranks while it runs. Those of edges wait for
        sum_gradients: another stage may have a summand of them."""
        for zero in self.inner[stage]:
            zero.sync = is_last

    def after_backward(self, stage, is_last):
        """To be called after a backward: ZeRO-2 and 3 sum after each, they have no room to wait."""
        # `stage` numbers parts of the model; zero.stage is ZeRO's, 0 to 3. It is 2 or 3 for edges
        # only where edges_wait is False: no other stage has a summand of their gradients
        for zero in self.inner[stage] + self.edges:
            if zero.stage >= 2:
                zero.reduce()  # partial -> sharded

    def held(self):
        """-> {kind: [tensors]} that this rank keeps between steps, for a ledger."""
        kept = defaultdict(list)
        for zero in self.zeros:
            for kind, tensors in zero.held().items():
                kept[kind] += tensors
        kept["parameters"] += self.buffers()
        return kept


def has_parameters(module):
    """Has it some of its own, not those of modules inside it?"""
    return any(True for _ in module.parameters(recurse=False))


def sum_gradients(model):
    """After backward: each gradient becomes the sum over all axes that its kind says."""
    model.stages.sum_tied_gradients()  # over the stages that share it: partial -> replicated
    for zero in model.zeros:
        if zero.stage < 2:
            take_tied_gradients(zero, model.stages.tied)
            zero.sync = True
            # what no backward has summed yet, those of edges above all, over data or replicas
            zero.reduce()  # partial -> replicated, in ZeRO-1 sharded
    over_tp = [part.grad for part in model.parts() if "tp" in model.kind[part.parameter].summed]
    tensor_parallel.sum_over_ranks(over_tp, model.tp)  # over tp: partial -> replicated


def take_tied_gradients(zero, tied):
    """The summed gradients of tied parameters go to ZeRO's memory, if they are not there yet.

    Where backward has made a gradient, it lies there, and was summed in its place. Where it has
    made none, sum_tied_gradients() has summed into a new tensor.
    """
    for flat in zero.flats:
        for p in tied:
            if p in flat.starts:
                flat.take_gradient(p)


def gradient_norm(model):
    """Of the whole model, each number once: all ranks that hold it alike bring equal shares."""
    gradients = [part.grad for part in model.parts()]
    square = torch.zeros((), dtype=model.stages.dtype, device=model.stages.device)
    if gradients:
        norms = torch._foreach_norm(gradients, dtype=model.stages.dtype)
        square = (torch.stack(norms).square() * model.shares).sum()
    dist.all_reduce(square)  # over all ranks: partial -> replicated
    return square.sqrt()


def step(model, norm, clip):
    """Clips the summed gradients to a norm of `clip` (0: does not), and steps the parameters."""
    for zero in model.zeros:
        zero.scale_to_norm(clip, norm)
        zero.step()
    moe.step_biases(model)


def gather(model, tensors, origins):
    """-> {name: whole tensor}, of all stages and experts, on every rank.

    tensors: {parameter or buffer of this rank: itself, or a tensor that is cut like it}.
    origins: {name: Origin} of what is wanted, in the same order on all ranks.
    """
    mine = {}
    for stage in model.stages:
        for name, t in stage.state_dict(keep_vars=True).items():
            if t in tensors:
                cut = model.cuts.get(t)
                mine[name] = unshard(tensors[t], cut, model.tp)  # over tp: sharded -> replicated
    if "ep" in model.mesh.group:
        mine = moe.gather_experts(mine, model.mesh.group["ep"])  # over ep: sharded -> replicated
    groups = model.stages.groups
    device = model.stages.device
    return pipeline_parallel.gather(mine, origins, groups, device)  # on one stage -> replicated


# ---- 2. the toy GPT, parallelized --------------------------------------------

KIND_BY_NAME = [  # the first pattern that fits a parameter's name
    ("*.experts.*", "expert"),
    ("*.router.*", "router"),
    ("tok.*", "embedding"),
    ("head.*", "embedding"),
    ("*norm*", "norm"),
    ("*.out.bias", "row bias"),
    ("*.down.bias", "row bias"),
    ("*", "matrix"),  # and biases of columns, and positions, which are cut in the same way
]
SHARED_EXPERT = {  # tensor_parallel's plan for the expert that every token visits
    "blocks.*.mlp.shared.up": tensor_parallel.ColumnLinear,
    "blocks.*.mlp.shared.down": tensor_parallel.RowLinear,
}


def kind_of(name):
    for pattern, kind in KIND_BY_NAME:
        if fnmatchcase(name, pattern):
            return kind


class PipelinedLoss:
    """The toy GPT's loss: its batch cut into micro-batches, which a pipeline runs."""

    def __init__(self, pipeline, rows, vocab, tp):
        self.pipeline = pipeline
        self.rows = rows  # of a micro-batch
        self.vocab = vocab  # V
        self.tp = tp

    def part_of(self, y, valid):
        """-> what the last stage calls: (logits, number of the micro-batch) -> its part of the loss
        """
        targets = y.split(self.rows)

        def loss_of(logits, m):
            if self.tp.size == 1:
                return loss_sum(logits, targets[m]) / valid
            loss = vocab_parallel_cross_entropy(logits, targets[m], self.vocab, self.tp.group)
            return loss / valid

        return loss_of

    def step(self, x, y, valid):
        """-> this rank's part of the loss, whose gradients are added to .grad"""
        loss = self.pipeline.step(x.split(self.rows), self.part_of(y, valid))
        return loss / self.tp.size  # each rank of tp has the whole

    def evaluate(self, x, y):
        """-> this rank's part of the sum of losses, without a graph"""
        loss = self.pipeline.evaluate(x.split(self.rows), self.part_of(y, 1))
        return loss / self.tp.size


def parallelize(model, mesh, plans, groups, boundary, layers, *, sp=False, zero=0, ckpt="none",
                attn="zigzag", amp="off", lr=1e-3, dry=False):
    """The plain GPT, or one with mixtures of experts -> Hybrid, PipelinedLoss.

    layers: how many each stage gets. The order: within a layer (tp, cp, ep), around it (--ckpt),
    between layers (pp), copies of it all (dp, ZeRO).
    """
    vocab = len(model.tok.weight)
    tp = WholeSequence(mesh.group["tp"])
    if sp:
        tp = CutSequence(mesh.group["tp"])
    if tp.size > 1:
        tensor_parallel.parallelize(model, tp, plan_of(model))
    if mesh.size["cp"] > 1:
        context_parallel.parallelize(model, context_parallel.KINDS[attn](mesh.group["cp"]))
    if "ep" in mesh.group:
        # Without --sp all ranks of tp come to the router with the same tokens: each routes a part.
        # In a dry run nobody can read what was chosen: experts are taken to be balanced
        same_tokens = None
        if tp.size > 1 and not sp:
            same_tokens = tp.group
        moe.parallelize(
            model, ep=mesh.group["ep"], everyone=mesh.group["stage"], same_tokens=same_tokens,
            microbatches=count_microbatches(plans), balanced=dry)
    amp_accum_ckpt.parallelize(model, amp_accum_ckpt.CHECKPOINT[ckpt])

    all_stages = pipeline_parallel.carve(model, layers)
    # no backward in the first stages, as far as all that they have is frozen (--train)
    plans = pipeline_parallel.trim(all_stages, plans)
    stages = Stages(all_stages, plans, groups)
    blocks = {number: list(stage.blocks.values()) for number, stage in stages.here.items()}
    if amp == "bf16":
        for stage in stages:
            autocast = torch.autocast(boundary.device.type, torch.bfloat16)
            stage.forward = autocast(stage.forward)
    hybrid = Hybrid(stages, blocks, kind_of, mesh, tp, partial(adamw, lr=lr), zero,
                    edges_wait=len(layers) > 1)
    pipeline = Pipeline(stages.here, plans, groups, boundary, hybrid.before_backward,
                        hybrid.after_backward, split=partial(leave_weights, tp))
    return hybrid, PipelinedLoss(pipeline, boundary.size[0], vocab, tp)


@contextlib.contextmanager
def leave_weights(tp, later):
    """The context of the forward of a micro-batch whose B leaves a W: `later` gets what W is to do.

    SplitLinears is for calls of F.linear, tp.defer_weights for the Linears that tp cuts by columns,
    which are an autograd function of tensor_parallel's own. Where a B has no W, the backward of
    that autograd function hides the sum of dx over tp behind the gradients of its weights. Here
    these come later, in the W, and nothing hides the sum.
    """
    with pipeline_parallel.SplitLinears(later), tp.defer_weights(later):
        yield


def plan_of(model):
    """What tensor_parallel cuts: experts stay whole."""
    plan = {**tensor_parallel.EMBEDDINGS, **tensor_parallel.ATTENTION}
    mlp = model.blocks[0].mlp
    if not isinstance(mlp, moe.PlainMoE):
        plan.update(tensor_parallel.MLP)
    elif mlp.shared is not None:
        plan.update(SHARED_EXPERT)
    return plan


def count_microbatches(plans):
    return len({action.microbatch for action in plans[0]})


# all      {name: Origin}: where the plain model's tensors will be
# trained  the same, of parameters that are trained
Origins = namedtuple("Origins", "all trained")


def origins_of(model, plans, groups, layers):
    """-> Origins of the plain model's tensors, before it is cut."""
    stages = Stages(pipeline_parallel.carve(model, layers), plans, groups)
    return Origins(stages.origins, stages.trained)


def full_state_dict(model, origins):
    found = {buffer: buffer for buffer in model.buffers()}  # none is cut
    for zero in model.zeros:
        state = zero.full_state_dict()  # over data or replicas: sharded -> replicated
        for name, p in zero.module.named_parameters():
            found[p] = state[name]
    return gather(model, found, origins.all)


def full_gradients(model, origins):
    gradients = {}
    for zero in model.zeros:
        parameters = dict(zero.module.named_parameters())
        for name, gradient in zero.full_gradients().items():  # sharded -> replicated
            gradients[parameters[name]] = gradient
    return gather(model, gradients, origins.trained)


def pieces(model):
    """-> [Piece] of the plain model's tensors: masters as the parameters, and AdamW's states."""
    found = []
    for zero in model.zeros:
        for part in zero.parts:
            p = part.parameter
            writes = is_first(model, p, zero.stage)
            for suffix, numbers in states_of(part, model.optimizer).items():
                numbers = numbers[:part.size]  # without padding
                found += boxes(model, p, suffix, part.first, numbers, writes)
        found += pieces_that_follow(model, zero)
        for p in zero.frozen:
            found += boxes(model, p, "", 0, p.detach().flatten(), is_first(model, p, 0))
    return found


def states_of(part, optimizer):
    """-> {what is added to the parameter's name: 1-D tensor}: the master, and AdamW's states"""
    held = {"": part.master.detach()}
    states = optimizer.state.get(part.master, {})
    for kind in STATES:
        if kind in states:
            held["." + kind] = states[kind]
    return held


def pieces_that_follow(model, zero):
    """The parameters that compute: they are loaded like their masters, and never saved."""
    found = []
    for flat in zero.flats:
        if flat.stage < 3:
            for p, numbers in flat.places.items():  # a view of the tensor that forward reads
                found += boxes(model, p, "", 0, numbers.flatten(), False)
            continue
        for part in flat.parts:
            found += boxes(model, part.parameter, "", part.first, part.shard[:part.size], False)
    return found


def is_first(model, p, zero_stage):
    """Is this the first of the ranks that hold the same piece of this parameter?"""
    place = dict(model.mesh.place)
    # along "stages", which Mesh does not know: 0 on the first rank of the pipeline that has it
    first_holder = model.stages.origins[model.names[p]].rank
    place["stages"] = int(place["pp"] != first_holder)
    return all(place[axis] == 0 for axis in model.axes_alike(p, zero_stage))


def boxes(model, p, suffix, first, numbers, writes):
    """Elements first, first + 1, .. of this rank's p.flatten() -> [Piece] of the plain tensors.

    A Piece is a box, a slice in each dimension of a whole tensor; a run of elements is one box or
    several. Where tp has cut p, a box is moved to its place in the whole, and loses its padding.
    Where p is a stack of experts, a box of the stack is a box of each of its experts.
    """
    name = model.names[p]
    cut = model.cuts.get(p)
    found = []
    for piece in run_pieces(name + suffix, p.shape, first, numbers, writes):
        if cut is not None:
            piece = moved_along_tp(piece, cut, model.tp.rank * p.shape[cut.dim])
        if kind_of(name) == "expert":
            found += of_each_expert(piece, name, suffix, model.mesh.place["ep"] * len(p))
        else:
            found.append(piece)
    return [piece for piece in found if piece.tensor.numel()]


def moved_along_tp(piece, cut, distance):
    """A box of this rank's part -> the box of the whole parameter, without padding."""
    start = list(piece.start)
    start[cut.dim] += distance
    shape = list(piece.shape)
    shape[cut.dim] = cut.whole
    room = max(0, cut.whole - start[cut.dim])  # behind it is padding
    length = min(room, piece.tensor.shape[cut.dim])
    tensor = piece.tensor.narrow(cut.dim, 0, length)
    return Piece(piece.name, tuple(shape), tuple(start), tensor, piece.writes)


def of_each_expert(piece, name, suffix, first_expert):
    """A box of this rank's stack of experts -> [Piece], a box of each expert in it."""
    found = []
    for i, tensor in enumerate(piece.tensor):
        whole_name = moe.plain_name(name, first_expert + piece.start[0] + i) + suffix
        found.append(Piece(whole_name, piece.shape[1:], piece.start[1:], tensor, piece.writes))
    return found


def train_step(model, loss_by_pipeline, x, y, valid, clip):
    """x, y: this rank's rows and tokens (B/dp, T/cp); valid: targets of the whole batch.

    -> this rank's part of the loss, the gradient norm."""
    model.zero_grad()
    loss = loss_by_pipeline.step(x, y, valid)
    sum_gradients(model)
    norm = gradient_norm(model)
    step(model, norm, clip)
    return loss + moe.balancing_losses(model), norm


def evaluate(model, loss_by_pipeline, x, y):
    """x, y: this rank's rows and tokens of held-out text -> its part of the sum of token losses."""
    loss = loss_by_pipeline.evaluate(x, y)
    for zero in model.zeros:
        zero.free_units()  # ZeRO-3's, which a backward would have freed
    return loss


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

    def __init__(self, stages, mesh, groups, vocab):
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.mesh = mesh  # torch's, of pp, dp and tp
        self.groups = groups  # of the pipeline
        self.vocab = vocab  # V
        self.first = any(stage.first for stage in stages)
        self.last = any(stage.last for stage in stages)
        self.valid = 1  # targets of the batch under way
        self.schedule = None  # made by schedule_at_work, which needs loss_of

    def tied(self):
        """-> the tied embedding here, if another rank has it too; the group of the two"""
        if self.first == self.last:  # both ends are here, or none
            return None, None
        if self.first:
            tied = self.stages[0].tok.weight
        else:
            tied = self.stages[-1].head.weight
        [group] = self.groups.sharing.values()  # nothing else is tied
        return tied, group

    def loss_of(self, logits, targets):
        """What torch's schedule calls on the last stage."""
        if self.mesh["tp"].size() > 1:
            shape = *targets.shape, self.vocab
            stride = targets.shape[1] * self.vocab, self.vocab, 1
            logits = DTensor.from_local(
                logits, self.mesh["tp"], [Shard(2)], shape=torch.Size(shape), stride=stride)
        # fully_shard averages over dp
        return loss_sum(logits, targets) * self.mesh["dp"].size() / self.valid

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
        if self.mesh["tp"].size() > 1:
            context = loss_parallel()  # the logits are cut
        with context:
            run_schedule(*inputs, **named, return_outputs=False)
        total = torch.zeros((), device=x.device)
        for loss in losses:
            total = total + local(loss.detach())
        # loss_of has multiplied by dp, and each rank of tp has the whole
        return total / (self.mesh["dp"].size() * self.mesh["tp"].size())

    def evaluate(self, x, y):
        return self.run(self.schedule.eval, x, y, 1)


def parallelize_at_work(model, mesh, plans, groups, boundary, layers, name, sp):
    """The plain GPT -> AtWork. mesh: torch's DeviceMesh of pp, dp and tp; name: of the schedule."""
    vocab = len(model.tok.weight)
    if mesh["tp"].size() > 1:
        tensor_parallel.parallelize_at_work(model, mesh["tp"], sp)
    columns = len(local(model.head.weight))  # before fully_shard cuts it again
    all_stages = pipeline_parallel.carve(model, layers)
    numbers = pipeline_parallel.stages_of(plans[groups.rank])
    here = {number: all_stages[number] for number in numbers}
    for stage in here.values():
        if stage.last and mesh["tp"].size() > 1:
            # torch's pipeline takes ordinary tensors; loss_of makes a DTensor of them again
            stage.register_forward_hook(lambda module, inputs, logits: logits.to_local())
        if mesh["dp"].size() > 1:
            for unit in [*stage.blocks.values(), stage]:
                fully_shard(unit, mesh=mesh["dp"], reshard_after_forward=False)
    at_work = AtWork(here.values(), mesh, groups, vocab)
    tokens = len(model.pos.weight)
    parts = []
    for number, stage in here.items():
        shapes = shapes_at_work(stage, boundary, tokens, columns)
        parts.append(stage_at_work(stage, number, len(all_stages), groups, boundary, shapes))
    at_work.schedule = schedule_at_work(name, parts, count_microbatches(plans), at_work.loss_of)
    return at_work


def shapes_at_work(stage, boundary, tokens, columns):
    """-> what a stage takes and gives. Without it torch asks other ranks, and that takes NumPy."""
    edge = torch.empty(boundary.size, dtype=boundary.dtype, device=boundary.device)
    edge.requires_grad_()
    taken = edge
    given = edge
    if stage.first:
        taken = edge.new_empty(len(edge), tokens, dtype=torch.int64)
    if stage.last:
        given = edge.new_empty(len(edge), tokens, columns)
    return taken, given


def stage_at_work(stage, number, count, groups, boundary, shapes):
    from torch.distributed import pipelining  # takes as long to import as all the rest

    taken, given = shapes
    return pipelining.PipelineStage(
        stage, number, count, boundary.device, input_args=taken, output_args=given,
        group=groups.group)


def schedule_at_work(name, parts, microbatches, loss_of):
    from torch.distributed.pipelining import schedules

    if name in pipeline_parallel.ONE_STAGE:
        [parts] = parts
    make = getattr(schedules, pipeline_parallel.AT_WORK[name])
    return make(parts, microbatches, loss_fn=loss_of, scale_grads=False)  # gradients are a sum


def gather_at_work(model, tensors, origins):
    """{name: tensor} of this rank's stages -> {name: whole tensor} of all, on every rank."""
    mine = {name: whole(t) for name, t in tensors.items()}
    device = next(model.parameters()).device
    return pipeline_parallel.gather(mine, origins, model.groups, device)


def full_state_dict_at_work(model, origins):
    found = {}
    for stage in model.stages:
        found.update(stage.state_dict())
    return gather_at_work(model, found, origins.all)


def full_gradients_at_work(model, origins):
    found = {}
    for stage in model.stages:
        for name, p in stage.named_parameters(remove_duplicate=False):
            if p.requires_grad:
                found[name] = p.grad
    return gather_at_work(model, found, origins.trained)


def train_step_at_work(model, optimizer, x, y, valid, clip):
    optimizer.zero_grad()
    loss = model.run(model.schedule.step, x, y, valid)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        if isinstance(p, DTensor):
            # the gradient of a cut embedding comes replicated
            p.grad = p.grad.redistribute(placements=p.placements)
    tied, sharing = model.tied()
    if tied is not None and tied.requires_grad:
        dist.all_reduce(local(tied.grad), group=sharing)  # partial -> replicated
    # the tied one counts on the first stage only
    counted = [p.grad for p in parameters if p is not tied or model.first]
    square = torch.zeros((), dtype=next(model.parameters()).dtype, device=x.device)
    if counted:
        square = whole(nn.utils.get_total_norm(counted)).square()
    dist.all_reduce(square, group=model.groups.group)  # over pp: partial -> replicated
    norm = square.sqrt()
    if clip and parameters:
        scale = (clip / (norm + 1e-6)).clamp(max=1)
        torch._foreach_mul_([local(p.grad) for p in parameters], scale)
    optimizer.step()
    return loss, norm


# ---- 4. run ------------------------------------------------------------------

NOT_HERE = ("naive", "pipedream")  # one never overlaps, the other trains something else
SCHEDULES = tuple(name for name in pipeline_parallel.SCHEDULES if name not in NOT_HERE)
PIPELINE_FLAGS = {name: pipeline_parallel.FLAGS[name]
                  for name in ("chunks", "limit", "layers_per_stage", "times")}
FLAGS = {
    "dp": Flag(int, "copies, which share the batch", POSITIVE),
    "tp": Flag(int, "ranks that share each layer", POSITIVE),
    "pp": Flag(int, "ranks of a pipeline; of dp, tp, pp those left out are chosen", POSITIVE),
    "cp": Flag(1, "ranks that share each sequence", POSITIVE),
    "attn": Flag("zigzag", "--cp: how queries meet other ranks' keys",
                 tuple(context_parallel.KINDS)),
    "micro": Flag(int, "M, micro-batches of a copy (4, or 2 or 1 if 4 do not fit)", POSITIVE),
    "schedule": Flag("1f1b", "order of the work", SCHEDULES),
    **PIPELINE_FLAGS,
    "sp": Flag(False, "cut norms and residuals over tp, along T"),
    "zero": Flag(0, "over dp x cp: cut optimizer (1), gradients (2), parameters (3); --impl torch "
                 "cuts all", (0, 3)),
    "ckpt": Flag("none", "what blocks compute again in backward", ("none", "full", "selective")),
    "amp": Flag("off", "autocast to", ("off", "bf16")),
    "experts": Flag(0, "E in each layer, in the place of its MLP (0: none)", ANY),
    "top_k": Flag(2, "K, experts per token", POSITIVE),
    "ep": Flag(0, "ranks of dp x cp that share out the experts (0: all)", ANY),
    "shared": Flag(False, "an expert for every token besides"),
    "capacity": Flag(0.0, "A: an expert takes A times its share (0: everything)", ANY),
    "balance": Flag("aux", "a loss, a bias in the choice, or nothing", ("aux", "bias", "none")),
}

Layout = namedtuple("Layout", "dp cp tp pp ep sp micro")  # ep: None without experts


def layout(args):
    """-> the Layout that the flags ask for. What cannot run ends here, in one line.

    It also fills in args, so that a report shows what was used.
    """
    args.dp, args.tp, args.pp = axes(args)
    refuse_axes(args)
    data = args.dp * args.cp
    args.micro = args.micro or math.gcd(4, args.batch // args.dp)
    require(args.batch % (args.dp * args.micro) == 0, f"--batch {args.batch} does not divide into "
            f"--dp {args.dp} x --micro {args.micro} micro-batches")
    refuse_schedule(args)
    ep = None
    if args.experts:
        args.ep = args.ep or data
        ep = args.ep
        refuse_experts(args, data)
    for flag in ("ep", "shared", "capacity"):
        require(args.experts or not getattr(args, flag), f"--{flag} is for --experts E")
    if args.impl != "scratch":
        refuse_torch(args)
    args.sp = args.sp and args.tp > 1
    return Layout(args.dp, args.cp, args.tp, args.pp, ep, args.sp, args.micro)


def axes(args):
    """-> dp, tp, pp. Their product is to be ranks / cp. If all three are left out, and 4 divides
    ranks / cp, pp and tp are 2.

    Of those that are still open, the last in the order pp, tp, dp gets all the ranks that remain,
    and the others are 1. On 8 ranks, --pp 2 alone makes dp 4 and tp 1; --dp 2 alone tp 4 and pp 1.
    """
    ranks = args.world_size // args.cp
    sizes = {"pp": args.pp, "tp": args.tp, "dp": args.dp}
    if not any(sizes.values()) and ranks % 4 == 0:
        sizes["pp"] = 2
        sizes["tp"] = 2
    missing = [axis for axis, size in sizes.items() if size is None]
    for axis in missing:
        sizes[axis] = 1
    if missing:
        sizes[missing[-1]] = max(1, ranks // math.prod(sizes.values()))
    return sizes["dp"], sizes["tp"], sizes["pp"]


def refuse_axes(args):
    cfg = args.cfg
    dp = args.dp
    cp = args.cp
    tp = args.tp
    pp = args.pp
    given = f"--dp {dp} x --tp {tp} x --pp {pp}"
    cut = f"--tp {tp}"
    if cp > 1:
        given = f"--dp {dp} x --cp {cp} x --tp {tp} x --pp {pp}"
        cut = f"--cp {cp} x --tp {tp}"
    require(dp * cp * tp * pp == args.world_size,
            f"{given}: their product is not {args.world_size}, the number of ranks")
    require(cfg.heads % tp == 0, f"--heads {cfg.heads} do not divide over --tp {tp}")
    pieces_of_sequence = context_parallel.KINDS[args.attn](cp_rank=0, cp=cp).chunk_count
    require(cp == 1 or cfg.seq % pieces_of_sequence == 0, f"--seq {cfg.seq} does not divide into "
            f"{pieces_of_sequence} chunks, for --attn {args.attn} with --cp {cp}")
    require(args.attn != "ulysses" or cfg.heads // tp % cp == 0,
            f"--heads {cfg.heads} do not divide over {cut}, which ulysses wants")
    if cp > 1 and args.attn != "ulysses" and context_parallel.is_on_gpu(args):
        dtype = torch.bfloat16 if args.amp == "bf16" else DTYPES[args.dtype]
        context_parallel.refuse_head_width(cfg, dtype)
    require(not args.sp or cfg.seq // cp % tp == 0,
            f"--seq {cfg.seq} does not divide over {cut}, which --sp wants")
    require(args.batch % dp == 0, f"--batch {args.batch} does not divide into --dp {dp}")


def refuse_schedule(args):
    name = args.schedule
    pp = args.pp
    stages = pp * pipeline_parallel.chunks_of(name, args.chunks)
    require(args.layers_per_stage or stages <= args.layers,
            pipeline_parallel.too_few(args.layers, stages))
    require(name != "interleaved" or args.micro % pp == 0,
            f"--micro {args.micro}: interleaved needs a multiple of --pp {pp}")
    require(name == "auto" or not (args.limit or args.times),
            f"--limit and --times are for --schedule auto, not for {name}")
    plans = plans_of(args)
    splits = any(pipeline_parallel.split_of(plan) for plan in plans)
    require(not splits or args.ckpt != "full",
            f"--schedule {name} cannot split what --ckpt full runs twice")
    pipeline_parallel.read_layers(args, plans)
    require(args.zero < 3 or (pp == 1 and name == "1f1b"),
            f"--zero 3 --pp {pp} --schedule {name}: ZeRO-3 wants the backward of a micro-batch "
            "right behind its forward; take --pp 1 --schedule 1f1b, or --zero 2")


def plans_of(args):
    """-> what each rank of a pipeline does, in order"""
    return pipeline_parallel.read_plans(args, times_of(args))


def times_of(args):
    """-> F, B, W and COMM; without --times those of matmuls alone: F, B and W take the same"""
    return pipeline_parallel.read_times(args.times or "1,1,1,0")


def refuse_experts(args, data):
    E = args.experts
    ep = args.ep
    require(args.top_k <= E, f"--top-k {args.top_k} of --experts {E}: choose {E} at most")
    require(data % ep == 0, f"--ep {ep} does not divide dp x cp = {data}: take a divisor")
    require(E % ep == 0, f"--experts {E} for --ep {ep}: take a multiple")


def refuse_torch(args):
    """What section 3 does not show."""
    tp = args.tp
    pp = args.pp
    ours = args.dry_run or args.save or args.resume or args.init_from
    require(not ours and args.dtype != "bf16" and args.ckpt == "none" and args.amp == "off",
            "--dry-run, --save, --resume, --init-from, --ckpt, --amp, --dtype bf16 want --impl "
            "scratch")
    require(args.cp == 1 and not args.experts and args.zero < 2,
            "--cp, --experts and --zero 2, 3 want --impl scratch")
    name = args.schedule
    at_work = pipeline_parallel.AT_WORK
    require(name in at_work, f"--schedule {name}: torch has {', '.join(at_work)} only")
    require(args.cfg.seq > (tp - 1) * -(-args.cfg.seq // tp), f"--seq {args.cfg.seq}: torch leaves "
            f"the last of --tp {tp} no positions: take a multiple of {tp}")
    is_vee = pipeline_parallel.SCHEDULES[name].place is pipeline_parallel.vee
    require(not is_vee or not args.eval_every,
            f"--schedule {name} --eval-every: eval() of torch's schedule does not know V-shaped "
            "ones; take --impl scratch")
    pipeline_parallel.refuse_at_work(name, args.micro, pp)
    home = pipeline_parallel.homes(plans_of(args))
    one_rank_has_both = len(home) > 1 and home[0] == home[max(home)]
    require(not one_rank_has_both or args.dp == 1,
            f"--schedule {name} --pp {pp} --dp {args.dp}: fully_shard would untie the embedding "
            "from the head, which is in another stage of that rank; take --impl scratch")


def ranges(layers):
    """How many layers each stage has -> [range of them]"""
    found = []
    for count in layers:
        first = found[-1].stop if found else 0
        found.append(range(first, first + count))
    return found


# What main() has laid out, for the functions below
Setting = namedtuple("Setting", "lay mesh plans groups layers batches")


class Sizes:
    """The letters of the textbook's rows, for this rank. The functions below call it `at`."""

    def __init__(self, run, setting):
        args = run.args
        cfg = run.cfg
        lay = setting.lay
        layers = ranges(setting.layers)
        self.args = args
        self.lay = lay
        self.b = run.dtype.itemsize  # bytes of a number
        self.w = max(self.b, 4)  # of a number in AdamW's states, in the norm and in the loss
        self.C = cfg.width
        self.H = cfg.heads
        self.E = args.experts
        self.tp = lay.tp
        self.M = lay.micro
        self.T = cfg.seq // lay.cp  # tokens of a sequence here
        self.N = args.batch // lay.dp // lay.micro * self.T  # tokens of a micro-batch here
        self.x = self.b * self.N * self.C  # bytes between two blocks, before --sp cuts them
        self.cut = lay.tp if lay.sp else 1  # into how many parts tp cuts what is between blocks
        self.again = 0  # how often forward runs again in backward
        if args.ckpt == "full":
            self.again = 1
        self.V = -(-cfg.vocab // lay.tp)  # rows of the embedding here, padding included
        first = setting.mesh.place["tp"] * self.V
        self.columns = max(0, min(self.V, cfg.vocab - first))  # of the logits here
        self.S = -(-cfg.seq // lay.tp)  # rows of the positions here, padding included
        self.plan = setting.plans[setting.mesh.place["pp"]]  # what is done here
        self.homes = pipeline_parallel.homes(setting.plans)  # {stage: pp rank}
        self.stages = pipeline_parallel.stages_of(self.plan)  # here
        self.last = len(layers) - 1  # the last stage of all
        self.blocks = [i for number in self.stages for i in layers[number]]  # here

    def is_trained(self, name):
        return re.search(self.args.train, name) is not None


# Parameters that ZeRO lays end to end: one of its units, on this rank.
# trained     how many numbers the trained ones of them have here
# frozen      how many the frozen ones have
# ranks       how many ranks hold the same ones
# zero_stage  0 to 3
# moved       how often a step gathers it from its chunks, or sums it into them
Unit = namedtuple("Unit", "trained frozen ranks zero_stage moved")


def unit_of(at, numbers, ranks, zero_stage, turn=False):
    """numbers: {the plain model's name of a tensor: how many of its numbers are here}.

    turn: is it where forward turns into backward, so that ZeRO-3 need not gather it again?
    """
    trained = sum(n for name, n in numbers.items() if at.is_trained(name))
    frozen = sum(numbers.values()) - trained
    moved = 2  # gradients are summed and parameters gathered once; an all-reduce sends as much
    if zero_stage == 2:
        moved = at.M + 1  # gradients are summed in each micro-batch, parameters gathered once
    elif zero_stage == 3 and turn:
        moved = 2 * at.M  # in each: gradients summed, parameters gathered in forward
    elif zero_stage == 3:
        moved = 3 * at.M  # in each: the same, and parameters gathered in backward
    return Unit(trained, frozen, ranks, zero_stage, moved)


def padded(unit):
    """Its trained numbers, with padding to equal chunks."""
    if unit.zero_stage == 0:
        return unit.trained
    return -(-unit.trained // unit.ranks) * unit.ranks


def mlp(at, prefix, ranks):
    """{name: numbers} of an MLP that is cut over so many ranks"""
    C = at.C
    return {
        f"{prefix}.up.weight": 4 * C * C // ranks, f"{prefix}.up.bias": 4 * C // ranks,
        f"{prefix}.down.weight": 4 * C * C // ranks, f"{prefix}.down.bias": C,
    }


def dense(at, i):
    """{name: numbers} of block i, without experts"""
    C = at.C
    numbers = {}
    for norm in ("norm1", "norm2"):
        numbers[f"blocks.{i}.{norm}.weight"] = C
        numbers[f"blocks.{i}.{norm}.bias"] = C
    for matrix in ("q", "k", "v", "out"):
        numbers[f"blocks.{i}.attn.{matrix}.weight"] = C * C // at.tp
        numbers[f"blocks.{i}.attn.{matrix}.bias"] = C // at.tp
    numbers[f"blocks.{i}.attn.out.bias"] = C  # not C/tp: whole on every rank
    if not at.E:
        return {**numbers, **mlp(at, f"blocks.{i}.mlp", at.tp)}
    numbers[f"blocks.{i}.mlp.router.weight"] = at.E * C
    if at.args.shared:
        numbers.update(mlp(at, f"blocks.{i}.mlp.shared", at.tp))
    return numbers


def experts(at, i):
    """{name: numbers} of this rank's experts in block i; which ones they are does not matter"""
    numbers = {}
    for e in range(at.E // at.lay.ep):
        numbers.update(mlp(at, f"blocks.{i}.mlp.experts.{e}", 1))
    return numbers


def edges(at):
    """{name: numbers} of this rank's parameters outside of blocks"""
    numbers = {}
    if 0 in at.stages:
        numbers["pos.weight"] = at.S * at.C
    if at.last in at.stages:
        numbers["norm.weight"] = at.C
        numbers["norm.bias"] = at.C
    if 0 in at.stages or at.last in at.stages:
        numbers["tok.weight"] = at.V * at.C
    return numbers


def dense_units(at):
    """-> [Unit]: this rank's blocks, without experts, and its edges"""
    ranks = at.lay.dp * at.lay.cp
    zero_stage = at.args.zero
    found = []
    for i in at.blocks:
        found.append(unit_of(at, dense(at, i), ranks, zero_stage, turn=(i == at.blocks[-1])))
    if at.last > 0:
        zero_stage = min(zero_stage, 1)  # edges wait for the sum of the tied embedding
    # turn: a ZeRO frees a unit only when it comes to the next one. Edges are the one unit of their
    # ZeRO, so they stay gathered from their first use in forward to the last in backward
    found.append(unit_of(at, edges(at), ranks, zero_stage, turn=True))
    return found


def expert_units(at):
    if not at.E:
        return []
    ranks = at.lay.dp * at.lay.cp // at.lay.ep
    found = []
    for i in at.blocks:
        found.append(unit_of(at, experts(at, i), ranks, at.args.zero, turn=(i == at.blocks[-1])))
    return found


# In the formulas of the rows below: L_s blocks here, B' rows of a micro-batch, T' tokens of a
# sequence here, t = tp with --sp and else 1; Z the ranks that ZeRO cuts over. Padding counts in
# these: V' rows of the embedding and S' positions, over all of tp, and P' trained numbers here.
# ends: what the first and the last stage have or send besides.


def account_held(run, at, model, own):
    b = at.b
    w = at.w
    units = dense_units(at) + expert_units(at)
    numbers = sum(unit.trained + unit.frozen for unit in units)
    what = "L_s [(12 C + 7) C/tp + 6 C], first (V' + S') C/tp, last V' C/tp + 2 C; V' once if both"
    if at.E:
        what = "L_s [(4 C + 3) C/tp + 5 C + E C + E/ep (8 C + 5) C], first, last"
        if at.args.shared:
            what += " + L_s [(8 C + 4) C/tp + C] (shared)"
    run.textbook("parameters", f"b ({what})", b * numbers, b * own)
    held = 4 * len(model.parts())  # AdamW's count of steps, one for each part
    for unit in units:
        length = padded(unit)
        chunk = length
        if unit.zero_stage >= 1:
            chunk = length // unit.ranks  # a rank's own
        parameters = chunk if unit.zero_stage >= 3 else length
        gradients = chunk if unit.zero_stage >= 2 else length
        states = 3 * chunk if b == 2 else 2 * chunk  # bf16 has a master in fp32
        held += b * (unit.frozen + parameters + gradients) + w * states
    for buffer in model.buffers():
        held += buffer.nbytes
    memory = run.ledger["scratch"].memory
    formula = "2 b P'"
    if at.args.zero == 2:
        formula = "b P' + b P'/Z (tied ends: b P')"
    elif at.args.zero == 3:
        formula = "2 b P'/Z"
    formula += " + (2 w, bf16 3 w) P'/Z + 4 per tensor (step)"
    if at.args.train:
        formula += " + b frozen"
    if at.E:
        formula += " + 8 E L_s (biases)"
    run.textbook("held", formula, held,
                 memory["parameters"] + memory["gradients"] + memory["optimizer"])


def account_activations(run, at):
    """The row of activations, for layouts in which all that autograd keeps is known here."""
    args = at.args
    if args.ckpt != "none" or args.schedule not in ("gpipe", "1f1b") or at.E:
        return
    if at.lay.cp > 1 and args.attn == "ulysses":
        return
    if at.tp == 1 and (0 in at.stages or at.last in at.stages):  # ends that tp has not cut
        return
    b = at.b
    w = at.w
    norm = 2 * at.x  # input and output
    norm += 2 * b * at.N  # mean and 1/deviation of each token
    norm //= at.cut
    block = 2 * norm
    block += 12 * at.x // at.tp  # q, k, v: 3; heads: 1; the MLP's up: 4, and its gelu: 4
    block += w * at.H // at.tp * at.N  # attention: log of the sum of each row and head
    of_microbatch = len(at.blocks) * block
    ids = 8 + 1  # bytes of an id, and of whether another rank has it
    if 0 in at.stages:
        of_microbatch += ids * (at.N + at.T)
    if at.last in at.stages:
        of_microbatch += norm + (w * at.columns + w + ids) * at.N  # logits, log of the sum; targets
    formula = ("kept x (L_s [(4/t + 12/tp) b B' T' C + 4 b B' T'/t (norms) + w B' T' H/tp], "
               "first + ids, last + logits)")
    run.textbook(
        "activations", formula,
        int(in_flight(at.plan)) * of_microbatch, run.ledger["scratch"].memory["activations"])


def sent_on_tp_by_block(at):
    """What f and g of a block send in forward and backward, but for the factor (tp-1)/tp."""
    x = at.x
    # a block that runs again stops before the MLP's g: nothing in it needs that result
    if at.cut == 1:  # all-reduces, which send 2 x: g in forward, f in backward
        attention = 4 * x + 2 * x * at.again  # its g, if the block runs again
        mlp = 4 * x
    else:  # f and g gather or scatter, which sends x: 2 in forward, 3 in backward
        attention = 5 * x + 2 * x * at.again  # its f and g, if the block runs again
        mlp = 5 * x + x * at.again  # its f
    if not at.E:
        return attention + mlp
    block = attention + joined_experts(at)
    if at.args.shared:
        block += mlp
    return block


def sent_on_tp(at, model):
    """Of blocks, of the embedding and the head; the loss; sums of gradients."""
    x = at.x
    head = 2 * x  # an all-reduce: f
    if at.cut > 1:
        head = 3 * x
    of_microbatch = len(at.blocks) * sent_on_tp_by_block(at)
    if 0 in at.stages:
        # tokens and positions, each with g: an all-reduce, or with --sp a scatter and a gather
        of_microbatch += 2 * (x + at.b * at.T * at.C)
    if at.last in at.stages:
        of_microbatch += head + 2 * 3 * at.w * at.N  # and all-reduces of three numbers a token
    gradients = 0
    for part in model.parts():
        if "tp" in model.kind[part.parameter].summed:
            gradients += 2 * part.grad.nbytes
    return (at.tp - 1) / at.tp * (at.M * of_microbatch + gradients)


def joined_experts(at):
    """Without --sp each rank of tp routes a part of the tokens: all-gathers of what experts make,
    and of the gradients of what they take."""
    if at.cut > 1:
        return 0
    x = at.b * -(-at.N // at.tp) * at.tp * at.C  # with padding to equal parts
    if at.args.shared:
        # A block that runs again stops once it has all tensors that backward needs. The shared
        # expert, which runs last, keeps some: so the all-gather before it is done again, too
        return 2 * x + x * at.again
    return 2 * x


def sent_on_cp(at):
    cp = at.lay.cp
    one = at.N * at.C // at.tp  # numbers of one of q, k, v
    passes = 2 + at.again  # forward and backward
    if at.args.attn == "ulysses":  # q, k, v and the output: all but 1/cp goes elsewhere
        layer = 4 * at.b * one * passes / cp
    else:  # K and V go to all other ranks, and their gradients
        layer = 2 * at.b * one * passes + 2 * at.w * one
    return at.M * len(at.blocks) * (cp - 1) * layer


def sent_by_zero(at, chosen):
    """Of some units: gradients to the ranks that sum them, parameters to those that need them."""
    sent = 0
    for unit in chosen:
        sent += unit.moved * at.b * padded(unit) * (unit.ranks - 1) / unit.ranks
    return sent


def sent_on_ep(at, model):
    """Rows of tokens, to experts and back, in forward and in backward. Before that each rank says
    how many will come for every expert."""
    ep = at.lay.ep
    rows = 0
    for layer in moe.layers_of(model):
        # layer.sent, layer.received: rows to and from each rank of ep, of all micro-batches of the
        # last step. What a forward that runs again sends is not among them
        stay = layer.sent[model.mesh.place["ep"]]  # for this rank's own experts
        rows += sum(layer.sent) - stay
        rows += sum(layer.received) - stay
    counts = 8 * at.E * (ep - 1) / ep * len(at.blocks) * at.M
    return at.b * at.C * rows * (2 + at.again) + counts * (1 + at.again)


def sent_on_pp(at):
    """To the stage behind in forward, to the stage before in backward, if another rank has it."""
    sent = 0
    for number in at.stages:
        for neighbour in (number - 1, number + 1):
            if neighbour in at.homes and at.homes[neighbour] != at.homes[number]:
                sent += at.M * at.x // at.cut
    return sent


def account(run, setting, model, own):
    """Bytes on this rank: of what it holds, and of what it sends along each axis in a step."""
    at = Sizes(run, setting)
    account_held(run, at, model, own)
    if not run.args.train and run.args.amp == "off":
        # what frozen layers need not send, or autocast halves, has no short formula
        account_activations(run, at)
        account_activations_sent(run, at, model, setting.groups)
    account_gradients_sent(run, at, model)


def wire(run, axis, formula, expected, *groups):
    """A row of the bytes sent along an axis, which has groups of its own."""
    sent = sum(run.ledger["scratch"].groups[group.group_name] for group in groups)
    run.textbook(f"wire {axis}", formula, expected, sent)


def account_activations_sent(run, at, model, groups):
    lay = at.lay
    group = model.mesh.group
    times = sent_on_tp_by_block(at) / at.x
    wire(run, "tp", f"(tp-1)/tp [M b B' T' C {times:g} L_s + ends + sums of gradients]",
         sent_on_tp(at, model), group["tp"])
    wire(run, "pp", "M b B' T' C/t per neighbour", sent_on_pp(at), groups.group,
         *groups.links.values())
    if lay.cp > 1:
        passes = 2 + at.again
        formula = f"M L_s (cp-1) B' T' C/tp ({2 * passes} b + 2 w)"
        if at.args.attn == "ulysses":
            formula = f"M L_s {4 * passes} (cp-1)/cp b B' T' C/tp"
        wire(run, "cp", formula, sent_on_cp(at), group["cp"])
    if lay.ep:
        of_blocks = "M L_s"
        if at.again:
            of_blocks = "2 M L_s"
        wire(run, "ep", f"{2 + at.again} b C (rows out + rows in - 2 rows staying) "
             f"+ {of_blocks} (ep-1)/ep 8 E", sent_on_ep(at, model), group["ep"])
        n = lay.dp * lay.cp * lay.tp
        loads = 8 * at.E * at.M * len(at.blocks) * (1 + at.again)
        wire(run, "load", f"2 (n-1)/n 8 E {of_blocks}, n = dp cp tp", 2 * (n - 1) / n * loads,
             group["stage"])


def account_gradients_sent(run, at, model):
    groups = model.mesh.group
    formula = "2 (n-1)/n b P'"
    if at.args.zero == 2:
        formula = "(M+1) (n-1)/n b P', for ends that are tied 2 in the place of M+1"
    elif at.args.zero == 3:
        formula = "3 M (n-1)/n b P', for the last block and for the ends 2 M"
    wire(run, "dp", f"{formula}, n = dp cp", sent_by_zero(at, dense_units(at)), groups["data"])
    if at.lay.ep:
        wire(run, "replicas", f"{formula}, n = dp cp/ep", sent_by_zero(at, expert_units(at)),
             groups["replicas"])
    for group in model.stages.tied.values():
        wire(run, "tied", "b V' C/tp", at.b * at.V * at.C, group)
    n = run.world_size
    wire(run, "norm", "2 w (n-1)/n", 2 * at.w * (n - 1) / n, dist.group.WORLD)


def in_words(lay):
    words = f"dp {lay.dp} x tp {lay.tp} x pp {lay.pp}"
    if lay.cp > 1:
        words = f"dp {lay.dp} x cp {lay.cp} x tp {lay.tp} x pp {lay.pp}"
    if lay.ep:
        words += f", ep {lay.ep}"
    return words


def picture(run, setting):
    """Who is where: ranks of pp as rows, copies as columns."""
    lay = setting.lay
    layers = ranges(setting.layers)
    homes = pipeline_parallel.homes(setting.plans)
    for rank in range(lay.pp):
        mine = [number for number in sorted(homes) if homes[number] == rank]
        runs = [numbers_of(layers[number]) for number in mine]
        copies = []
        for data in range(lay.dp * lay.cp):
            first = (rank * lay.dp * lay.cp + data) * lay.tp
            name = f"copy {data // lay.cp}"
            if lay.cp > 1:
                name += f", part {data % lay.cp}"
            copies.append(f"{name}: ranks {first}..{first + lay.tp - 1}")
        if run.world_size > 32:  # one line, this rank's
            if rank != setting.mesh.place["pp"]:
                continue
            copies = [copies[setting.mesh.place["data"]]]
        run.say(f"  pp rank {rank}, layers {' '.join(runs)}:  " + "   ".join(copies))


def numbers_of(layers):
    """A range of layers, in words: "2..3"."""
    if not layers:
        return "none"
    return f"{layers.start}..{layers.stop - 1}"


def say_costs(run, setting):
    """The bubble and the FLOPs."""
    flops = flops_of_step(run.cfg, run.args)
    played = pipeline_parallel.simulated(
        run.args, setting.plans, setting.layers, times_of(run.args))
    idle = bubble_rate(played)
    run.extra["bubble_rate"] = idle
    by = "matmuls alone"
    if run.args.times:
        by = "by --times"
    run.say(f"  {run.args.schedule}: bubble {idle:.1%} ({by}); "
            f"model FLOPs {flops:.3g} per step")


def flops_of_step(cfg, args):
    """Matmuls of forward, and twice as many in backward (Narayanan 2021, section 5.1)."""
    L, C, _, V, T = cfg
    mlps = 1  # that a token visits in a layer
    if args.experts:
        mlps = args.top_k
        if args.shared:
            mlps += 1
    router = 2 * C * args.experts
    layer = 8 * C * C + 4 * T * C + 16 * C * C * mlps + router
    return 3 * args.batch * T * (L * layer + 2 * V * C)


def plain_model(args, lay):
    """-> what makes the plain model of a Run: the GPT, or one with mixtures of experts"""
    if not args.experts:
        return build
    return partial(build_mixture, args, lay)


def build_mixture(args, lay, cfg, seed, device, dtype):
    which = None  # all experts
    if args.dry_run:  # a rank's own: the plain model may be too large
        data_rank = args.rank // lay.tp % (lay.dp * lay.cp)  # as in Mesh
        ep_rank = data_rank % lay.ep
        which = share(args.experts, lay.ep, ep_rank)
    model = build(cfg, seed, device, dtype)
    return moe.mixture(
        model, seed, cfg, experts=args.experts, top_k=args.top_k, shared=args.shared,
        balance=args.balance, capacity=args.capacity, which=which)


def count(plain):
    """-> parameters of the plain model, experts that build_mixture has left out included"""
    total = sum(p.numel() for p in plain.parameters())
    for block in plain.blocks:
        if isinstance(block.mlp, moe.PlainMoE):
            made = list(block.mlp.experts.values())
            left_out = block.mlp.E - len(made)
            total += left_out * sum(p.numel() for p in made[0].parameters())
    return total


class Batches:
    """Which rows and tokens of every batch are a rank's."""

    def __init__(self, run, lay, mesh):
        self.run = run
        self.lay = lay
        self.mesh = mesh
        self.rows = share(run.args.batch, lay.dp, mesh.place["dp"])
        self.tokens = None  # (T/cp,), or None: all
        if lay.cp > 1:
            self.tokens = self.tokens_of(mesh.place["cp"])

    def tokens_of(self, cp_rank):
        ring = context_parallel.KINDS[self.run.args.attn](cp_rank=cp_rank, cp=self.lay.cp)
        return ring.positions(self.run.cfg.seq, self.run.device)

    def cut(self, x):  # (B/dp, T) -> (B/dp, T/cp)
        if self.tokens is None:
            return x
        return x[:, self.tokens]

    def of_step(self, step):
        x, y, valid = self.run.batch(step, self.rows)
        return self.cut(x), self.cut(y), valid

    def held_out(self, k):
        x, y = self.run.held_out(k, self.rows)
        return self.cut(x), self.cut(y)

    def routed(self, m, dp_rank, cp_rank, tp_rank):
        """-> (N,): the tokens that a rank routes to experts in micro-batch m, in its order, by
        their numbers in the B T tokens of the batch."""
        lay = self.lay
        T = self.run.cfg.seq
        device = self.run.device
        tokens = torch.arange(T, device=device)
        if lay.cp > 1:
            tokens = self.tokens_of(cp_rank)
        if lay.sp:
            tokens = tokens.chunk(lay.tp)[tp_rank]
        rows = self.run.args.batch // lay.dp // lay.micro
        first = (dp_rank * lay.micro + m) * rows
        starts = T * torch.arange(first, first + rows, device=device)
        numbers = (starts.unsqueeze(1) + tokens).flatten()
        if not lay.sp:  # ranks of tp bring the same tokens: each routes some of them
            mine = share(len(numbers), lay.tp, tp_rank)
            numbers = numbers[mine.start:mine.stop]
        return numbers

    def routed_here(self):
        place = self.mesh.place
        places = place["dp"], place["cp"], place["tp"]
        return [self.routed(m, *places) for m in range(self.lay.micro)]

    def routed_everywhere(self):
        """-> of each micro-batch, of each rank, what it routes"""
        lay = self.lay
        found = []
        for m in range(lay.micro):
            of_ranks = []
            for dp_rank in range(lay.dp):
                for cp_rank in range(lay.cp):
                    for tp_rank in range(lay.tp):
                        of_ranks.append(self.routed(m, dp_rank, cp_rank, tp_rank))
            found.append(of_ranks)
        return found


class Choices:
    """Which experts the tokens of each step have chosen, if there are experts.

    Rounding decides near ties, so the plain model is told the ranks' choices. In fp64 there are no
    ties, and it chooses itself.
    """

    def __init__(self, run, batches, model):
        self.run = run
        self.batches = batches
        self.steps = []  # of each step, (L, B T, K)
        rounds = run.args.dtype != "fp64"
        self.told = bool(run.args.experts) and run.args.check and rounds and not run.dry
        moe.remember_choices(model, self.told)

    def add(self, model, is_last):
        """Notes the choices of the step that has just run, from all ranks. A token of a layer is
        routed by one of them, so that the sum is its choice.

        is_last: no further step is compared, and layers need not remember more.
        """
        args = self.run.args
        table = torch.zeros(args.layers, args.batch * args.seq, args.top_k, dtype=torch.int64,
                            device=self.run.device)
        mine = self.batches.routed_here()
        for number, of_layer in zip(layers_here(model), moe.choices_here(model)):
            for tokens, chosen in zip(mine, of_layer):
                table[number, tokens] = chosen
        dist.all_reduce(table)  # partial -> replicated
        self.steps.append(table)
        if is_last:
            moe.remember_choices(model, False)

    def plain_trace(self):
        """The same steps by the plain model."""
        run = self.run
        model = run.build()
        # which tokens are balanced together, and compete for room in an expert
        moe.set_sources(model, self.batches.routed_everywhere())
        # A plain layer takes a step's choices from a list. Where it finds None it chooses itself.
        if run.plain_first() > 0:  # the plain run begins where this one does
            before = []
            moe.set_biases(model, run.start.extra["biases"])
        else:  # it also repeats the steps before this run, whose choices are not known here
            before = [None] * run.first
        for i, block in enumerate(model.blocks):
            if self.told:
                block.mlp.choices = before + [table[i] for table in self.steps]
        return run.plain(model, extra_loss=moe.plain_balancing_losses)


def layers_here(model):
    """-> [number of a layer], in the order of moe.layers_of(model)"""
    return [int(name) for stage in model.stages for name in stage.blocks]


def routed_together(args, lay):
    """-> [what decides which tokens are balanced together, or compete for room in an expert].

    The check of a resumed run replays all steps from step 0 on, but only if this list was the same
    in all runs of the training (run.replays in main). Lists that differ count as different routing,
    even if a case can be found in which they route alike.
    """
    if args.capacity:  # a rank drops the last of its own
        return [lay.dp, lay.cp, lay.tp, lay.micro, lay.sp, args.attn]
    if args.balance == "aux":  # the loss of a micro-batch is that of all its tokens
        return [lay.dp, lay.micro]
    return []


def notes(run, model, lay):
    """What a checkpoint notes besides weights and AdamW's states."""
    return {"biases": biases(run, model), "routed": routings(run, lay)}


def routings(run, lay):
    """-> how tokens were routed together in this training, here and in the runs before this one"""
    found = list(run.start.extra.get("routed", []))
    mine = routed_together(run.args, lay)
    # A checkpoint with steps and no such list was written by moe.py, whose steps were routed in
    # moe.py's way. That is noted, unless `mine` is empty: then no way makes a difference
    if run.start.steps and not found and mine:
        found.append(moe.ROUTED_HERE)
    if mine not in found:
        found.append(mine)
    return found


def biases(run, model):
    """-> that of each expert, of all layers"""
    table = torch.zeros(run.cfg.layers, run.args.experts, dtype=torch.float64, device=run.device)
    for number, layer in zip(layers_here(model), moe.layers_of(model)):
        table[number] = layer.bias
    dist.all_reduce(table, group=model.mesh.group["pp"])  # on one stage -> replicated
    return table.tolist()


def set_biases(model, values):
    for number, layer in zip(layers_here(model), moe.layers_of(model)):
        layer.bias.copy_(torch.tensor(values[number], dtype=torch.float64))


def boundary_of(run, lay):
    """What goes from stage to stage."""
    rows = run.args.batch // lay.dp // lay.micro
    tokens = run.cfg.seq // lay.cp
    if lay.sp:
        tokens //= lay.tp
    return Boundary((rows, tokens, run.cfg.width), run.dtype, run.device)


def set_up(run, setting):
    """-> Side"""
    args = run.args
    lay = setting.lay
    plain = run.build()
    if args.experts:
        moe.refuse_mixed(plain)
    origins = origins_of(plain, setting.plans, setting.groups, setting.layers)
    model, loss_by_pipeline = parallelize(
        plain, setting.mesh, setting.plans, setting.groups, boundary_of(run, lay), setting.layers,
        sp=lay.sp, zero=args.zero, ckpt=args.ckpt, attn=args.attn, amp=args.amp, lr=args.lr,
        dry=run.dry)
    extra = None
    if args.experts:
        extra = partial(notes, run, model, lay)
        # a fresh start has none, nor a run without experts, whose checkpoint begin() will refuse
        if "biases" in run.start.extra:
            set_biases(model, run.start.extra["biases"])
    return Side(
        model=model,
        optimizer=model.optimizer,
        train_step=lambda x, y, valid: train_step(
            model, loss_by_pipeline, x, y, valid, args.clip),
        full_gradients=lambda: full_gradients(model, origins),
        full_state_dict=lambda: full_state_dict(model, origins),
        evaluate=lambda k: evaluate(model, loss_by_pipeline, *setting.batches.held_out(k)),
        pieces=lambda: pieces(model),
        extra=extra,
        held=model.held,
    )


def set_up_at_work(run, setting):
    """-> Side"""
    args = run.args
    lay = setting.lay
    names = ("pp", "dp", "tp")
    mesh = init_device_mesh(run.device.type, (lay.pp, lay.dp, lay.tp), mesh_dim_names=names)
    plain = run.build()
    origins = origins_of(plain, setting.plans, setting.groups, setting.layers)
    model = parallelize_at_work(
        plain, mesh, setting.plans, setting.groups, boundary_of(run, lay), setting.layers,
        args.schedule, lay.sp)
    optimizer = adamw(model.parameters(), args.lr)
    return Side(
        model=model,
        optimizer=optimizer,
        train_step=lambda x, y, valid: train_step_at_work(model, optimizer, x, y, valid, args.clip),
        full_gradients=lambda: full_gradients_at_work(model, origins),
        full_state_dict=lambda: full_state_dict_at_work(model, origins),
        evaluate=lambda k: model.evaluate(*setting.batches.held_out(k)),
    )


SET_UP = {"scratch": set_up, "torch": set_up_at_work}


def main():
    args = arguments(__doc__, **FLAGS)
    lay = layout(args)
    plans = plans_of(args)
    layers = pipeline_parallel.read_layers(args, plans)
    run = Run(args, build=plain_model(args, lay))
    # steps that were routed in another way cannot be replayed in this one
    run.replays = not args.experts or len(routings(run, lay)) == 1
    mesh = Mesh(lay.dp, lay.cp, lay.tp, lay.pp, lay.ep)
    shared = [(0, len(layers) - 1)]  # the stages of the tied embedding
    groups = pipeline_parallel.make_groups(plans, shared, mesh.pipelines, mesh.group["pp"])
    with run:
        batches = Batches(run, lay, mesh)
        setting = Setting(lay, mesh, plans, groups, layers, batches)
        sides = {impl: SET_UP[impl](run, setting) for impl in run.impls}
        run.begin(sides)
        model = sides[run.impls[0]].model
        total = count(run.build())
        own = sum(local(p).numel() for p in model.parameters())
        run.say(f"hybrid_3d: {run.world_size} ranks = {in_words(lay)} on {run.device.type}, "
                f"{args.dtype}, {total:,} parameters, {own:,} on rank {run.rank}")
        picture(run, setting)
        say_costs(run, setting)
        choices = Choices(run, batches, model)
        for impl, step in run.steps():
            side = sides[impl]
            run.set_rate(side.optimizer, step)
            x, y, valid = batches.of_step(step)
            with run.measure(impl, step):
                loss, norm = side.train_step(x, y, valid)
            run.log(impl, step, loss, norm)
            if choices.told and step <= run.checked:
                choices.add(model, is_last=step == run.checked)
        if "scratch" in run.impls:
            account(run, setting, sides["scratch"].model, own)
        plain = choices.plain_trace if args.experts else None
        judged_as = "bf16" if args.amp == "bf16" else None
        return run.finish(total, own, plain, judged_as)


if __name__ == "__main__":
    sys.exit(main())
