"""Data, tensor and pipeline parallelism in one run, for models of yours; cp, experts, ZeRO.

                     copy 0 (rows 0..3)      copy 1 (rows 4..7)
    stage 0          ranks 0 1  ---- dp ---- ranks 2 3       tp: in each layer, with a neighbour
                       |  |                    |  |          pp: there and back, each micro-batch
                       pp pp                   pp pp         dp: under backward, once in a step
    stage 1          ranks 4 5  ---- dp ---- ranks 6 7

    plans = make_plans("1f1b", ranks=2, microbatches=4)
    mesh = Mesh(plans, dp=2, tp=2)
    tp = TensorParallel(mesh.group["tp"])  # or SequenceParallel
    cut_model(model, tp, {"blocks.*.up": ColumnLinear, "blocks.*.down": RowLinear, ..})
    chain = Chain(first=["words"], layers="blocks", last=["norm", "head"])
    stages = carve(model, chain, [2, 2])  # of two layers each
    hybrid = Hybrid(stages, mesh, tp, layers=model.blocks, head=model.head, zero=1)
    optimizer = AdamW(hybrid.parameter_groups(), lr=1e-3)
    loss, norm = train_step(hybrid, optimizer, x, y, valid, clip=1.0)
    assert_alike(hybrid, x, y)  # once, after the first step

cut_model and its plan are tensor_parallel.py's, make_plans, Chain and carve pipeline_parallel.py's.
x, y: the rows of copy number mesh.place["dp"], the same on all its ranks. loss is this rank's part:
an all-reduce over all ranks makes it whole. A bf16 model: give Hybrid reduce_dtype=torch.float32.
print(hybrid) says what becomes of each gradient. docs/your-model.md has whole programs.

B sequences of T words make a step, in M micro-batches. L layers have width C, H heads, K with keys
and values; a rank has P parameters. n = dp cp. A = B/(dp M) T/cp C goes from stage to stage. Then a
rank with one stage, not the first or the last, sends in a step, in elements:
    tp     M L/pp 8 A (tp-1)/tp; --sp: 10 A in the place of 8 A
    pp     M 2 A; --sp: 1/tp of it
    cp     M L/pp 6 A (cp-1)/tp K/H; not with ulysses
    data   2 (P - S) (n-1)/n; of matrices with ZeRO-2 M + 1 in the place of 2, ZeRO-3 3 M
    peers  2 S (n tp - 1)/(n tp); S of the P are summed over tp, too: with --sp those of norms
First and last stage send V C/(n tp) more if the embedding is the head of V words.

Narayanan 2021, arXiv:2104.04473, section 3; Llama 3 2024, arXiv:2407.21783, 3.3.2. At work: part 4.
Not for: what its files are not for; optimizers of whole matrices, but see --optimizer muon; ties
other than of the first stage to the last; stages whose first parameters differ in dtype; pipedream;
ZeRO-3 of several stages; with Ws, Linears that run twice in a stage; with experts, cp or ZeRO-3:
weights that some ranks do not use.
    torchrun --standalone --nproc_per_node=8 hybrid_3d.py --dp 2 --tp 2 --pp 2
"""
import re
from collections import defaultdict, namedtuple
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn

import tensor_parallel
from common import loss_sum
from pipeline_parallel import (
    Mail, SplitPipeline, gather, homes, make_plans, names_of, split, split_linear)
from tensor_parallel import (
    ColumnLinear, ColumnParallel, Cut, RowLinear, TensorParallel, assert_same,
    vocab_parallel_cross_entropy)
from zero import ZeRO1, ZeRO2, ZeRO3, units_of
from zero import load_full_state_dict as load_parts

# part 1 alone
from pipeline_parallel import IdeaOfPipeline, idea_plan, run_pipeline
from tensor_parallel import cross_entropy_by_words

# imports of parts 1 and 2 end here; the rest is for parts 3 to 5
import math
import sys
from collections import Counter
from itertools import product

from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

import context_parallel
import moe
import pipeline_parallel
from common import adamw, share
from moe import one_by_one
from pipeline_parallel import CHAIN, HandsOn, carve
from tensor_parallel import SequenceParallel

# ---- 1. the idea -------------------------------------------------------------

# The ranks are a grid with three axes: dp cuts the batch, tp and pp the model, each as in its file:
#     grid = make_grid(dp=2, tp=2, pp=2)
#     cut_by_name(model, plan, grid["tp"])  # tensor_parallel.py's idea; the plan cuts the head, too
#     hybrid = IdeaOfHybrid([stage0, stage1], grid, boundary)  # slices of an nn.Sequential, say
#     loss, norm = idea_step(hybrid, optimizer, x, y, valid, clip)
# What is new is what becomes of a parameter's gradient along each axis but pp, where each rank has
# its own layers. It is
#     cut   if each rank has its own part of it
#     same  if all ranks have the same
#     sum   if each rank has a summand: a step adds them up
FATES = {
    "cut": {"tp": "cut", "dp": "sum"},
    "whole": {"tp": "same", "dp": "sum"},  # what cut_by_name has left whole, such as norms
    "tied": {"tp": "cut", "ends": "sum"},  # the embedding, if it is the head, too
}


def make_grid(dp, tp, pp):
    """-> {axis: group of the ranks whose places differ from this rank's along this axis alone}."""
    ranks = torch.arange(pp * dp * tp).view(pp, dp, tp)  # tp last: who talks most is close
    lines = {  # along the last dim: each is a group
        "tp": ranks,
        "dp": ranks.movedim(1, -1),
        "pp": ranks.movedim(0, -1),
        "back": ranks.movedim(0, -1),  # pp's once more, see IdeaOfPipeline
        "ends": ranks[sorted({0, pp - 1})].flatten(0, 1).T,  # all copies of first and last stage
    }
    grid = {}
    for axis, of_axis in lines.items():
        grid[axis], _ = dist.new_subgroups_by_enumeration(of_axis.flatten(0, -2).tolist())
    return grid


class IdeaOfHybrid:
    """This rank's stage of a model that all ranks have made alike, and cut_by_name has cut.

    stages: all of them, from tensor to tensor. boundary: a tensor like those between two stages,
    (rows of a micro-batch, T, C).
    """

    def __init__(self, stages, grid, boundary):
        self.group = grid
        self.boundary = boundary
        self.stage = stages[grid["pp"].rank()]
        of_stages = [set(stage.parameters()) for stage in stages]
        self.fate = {}  # {parameter: {axis: what becomes of its gradient}}
        for p in self.stage.parameters():
            kind = "cut" if hasattr(p, "cut") else "whole"  # cut_by_name has marked it
            if sum(p in parameters for parameters in of_stages) > 1:
                kind = "tied"
            self.fate[p] = FATES[kind]

    def trained(self):
        return [p for p in self.stage.parameters() if p.requires_grad]


def idea_step(model, optimizer, x, y, valid, clip):
    """x, y: this copy's rows (B/dp, T); valid: how many targets there are in the whole batch.

    -> this rank's part of the loss, the norm of the whole gradient.
    """
    optimizer.zero_grad()
    loss = run_microbatches(model, x, y, valid)
    sum_by_fate(model)
    norm = norm_by_fate(model)
    nn.utils.clip_grads_with_norm_(model.trained(), clip, norm)
    optimizer.step()
    return loss / model.group["tp"].size(), norm  # every rank of tp has the whole loss


def sum_by_fate(model):
    for p in model.trained():
        for axis, fate in model.fate[p].items():
            if fate == "sum":
                dist.all_reduce(p.grad, group=model.group[axis])  # partial -> replicated


def norm_by_fate(model):
    """Of the ranks that have the same numbers the first one counts them."""
    square = model.boundary.new_zeros(())
    for p in model.trained():
        alike = [axis for axis, fate in model.fate[p].items() if fate != "cut"]
        if all(model.group[axis].rank() == 0 for axis in alike):
            square += p.grad.square().sum()
    dist.all_reduce(square)  # over all ranks: partial -> replicated
    return square.sqrt()


def run_microbatches(model, x, y, valid):
    """Forward and backward of this copy's rows -> their loss on the last stage, 0 on others."""
    grid = model.group
    rows = len(model.boundary)  # of a micro-batch
    inputs = x.split(rows)
    targets = y.split(rows)

    def loss_of(logits, m):
        logits = logits.flatten(0, 1)
        return cross_entropy_by_words(logits, targets[m].flatten(), grid["tp"]) / valid

    pp = grid["pp"]
    plan = idea_plan(len(inputs), warmup=pp.size() - 1 - pp.rank())  # 1F1B
    shared = {}  # here: what is tied is summed by its fate
    pipeline = IdeaOfPipeline(model.stage, shared, model.boundary, pp, grid["back"])
    return run_pipeline(pipeline, plan, inputs, loss_of)


# ---- 2. the technique (copy this; of part 1 it takes nothing) ----------------

# It needs common.py, pipeline_parallel.py, tensor_parallel.py and zero.py; to recompute layers also
# amp_accum_ckpt.py (layer.forward = partial(full, layer.forward) before carve), for cp
# context_parallel.py, for experts moe.py. This whole file needs them all.
# What it adds to the idea, on rank 0 of the toy, dp 2 tp 2 pp 2:
#     a buffer for a layer's gradients    33 all-reduces over dp -> 4, all but one under way
#                                         while backward makes the next layer's gradients
#     one sum of dx for q, k and v        52 all-reduces over tp -> 40 (36, and 4 of positions, cut
#                                         here); all all-reduces together send 4.4 MB -> 3.5
#     ZeRO                                peak 6.7 MB -> 5.7 with ZeRO-1: states are cut
#     --sp                                peak 5.7 MB -> 5.2: norms and residuals are cut
#     cp, ep; schedules with W            longer sequences, more experts; smaller bubbles

# Words of the other files:
#     tp.cuts       {parameter: how cut_model has cut it}
#     tp.inside     whole parameters of which each rank makes a summand: norms of q and k, k and v
#                   of few heads
#     unit          parameters whose gradients travel together, in chunks of ranks (zero.py)
#     B, W          backward for a stage's input, and for its weights (pipeline_parallel.py)
#     part          what this rank has of a parameter in its chunk of a unit
#     master        what the optimizer steps: of a part, in fp32 at least


# ---- 2.1 who is who ----


class Mesh:
    """This rank's place along pp, dp, cp and tp, its stages, its group along each axis, the sizes.

    plans: of a pipeline's ranks: pp is len(plans), and they say which ranks have which stages. tp
    varies fastest, since its ranks talk most, and pp slowest (Narayanan 2021, section 3). Besides
    these four axes there are the groups

    data      dp x cp, all ranks with the same parameters and other tokens: the idea's dp
    peers     data x tp, all ranks that have the same stages
    ends      data of the first stage and of the last together, which share what is tied (the group
              of other stages is None)

    and for experts

    ep        ranks of data that have different experts, together all
    replicas  ranks of data and tp that have the same experts
    """

    def __init__(self, plans, dp=1, cp=1, tp=1, ep=1):
        pp = len(plans)
        ranks = torch.arange(dist.get_world_size()).view(pp, dp, cp, tp)
        self.pipelines = ranks.flatten(1).T.tolist()  # a list of ranks for each pipeline
        by_expert = ranks.view(pp, -1, ep, tp)  # (pp, replicas, ep, tp)
        home = homes(plans)  # {stage: place along pp}
        ends = sorted({home[0], home[max(home)]})  # a single place if one rank has both
        lines = {  # along the last dim
            "pp": ranks.movedim(0, -1),
            "dp": ranks.movedim(1, -1),
            "cp": ranks.movedim(2, -1),
            "tp": ranks,
            "data": ranks.flatten(1, 2).movedim(1, -1),
            "replicas": by_expert.movedim(2, 1).flatten(2),
            "ep": by_expert.movedim(2, -1),
            "peers": ranks.flatten(1),
            "ends": ranks[ends].flatten(0, 2).T,
        }
        self.size = {axis: of_axis.shape[-1] for axis, of_axis in lines.items()}
        self.group = {}
        for axis, of_axis in lines.items():  # each line is a group, and every rank makes them all
            groups = of_axis.flatten(0, -2).tolist()
            self.group[axis], _ = dist.new_subgroups_by_enumeration(groups)
        self.place = {axis: group.rank() for axis, group in self.group.items() if group}
        self.plans = plans
        self.stages = [stage for stage in home if home[stage] == self.place["pp"]]  # of this rank


# ---- 2.2 what becomes of a gradient ----


def fates(tp, zero):
    """-> {kind of parameter: {axis: what becomes of its gradient}}"""
    # ranks of data have seen other tokens. scatter: of the sum each rank keeps a part
    total = "scatter" if zero else "sum"
    same = {"tp": "same", "data": total}
    summed = {"peers": total} if tp.size > 1 else same  # ranks of tp have summands, too
    return {
        "cut": {"tp": "cut", "data": total},  # matrices, embeddings, biases of ColumnLinears
        # norms, biases of RowLinears: with sp, ranks of tp have seen other tokens
        "whole": summed if tp.cuts_x else same,
        "inside": summed,  # norms of q and k, k and v of few heads: each rank sees its own heads
        "expert": {"replicas": total, "ep": "cut"},  # wants sp: ranks of tp send their own tokens
    }


def kind_of(p, tp, ep):
    if p in ep.cuts:
        return "expert"
    if p in tp.cuts:
        return "cut"
    return "inside" if p in tp.inside else "whole"


# of a parameter. name: in the first stage that has it; kind, fate: see fates
Row = namedtuple("Row", "name kind fate")


def table_of(stages, tp, ep, zero):
    """All stages of a model -> {parameter: its Row}."""
    of_kind = fates(tp, zero)
    of_stages = [set(stage.parameters()) for stage in stages]
    table = {}
    for p, name in names_of(stages).items():
        numbers = [number for number, ps in enumerate(of_stages) if p in ps]
        kind = kind_of(p, tp, ep)
        fate = of_kind[kind]
        if len(numbers) > 1:
            assert numbers == [0, len(stages) - 1], f"{name} is in stages {numbers}"
            assert "data" in fate, f"{name}: tied, but ranks of tp or ep differ in it"
            kind += ", tied"
            fate = {"tp": fate["tp"], "ends": fate["data"]}  # copies of both stages
        table[p] = Row(name, kind, fate)
    return table


def is_late(p, row):
    """Is its gradient summed after the pipeline's step? For what is tied one stage would wait for
    the other. What is summed over peers (with sp routers, adapters) would be so between others'
    sums over data: copies that use different ones would wait for each other for ever. Vectors, such
    as norms, would wait in B for their layer's W, and are little."""
    return "ends" in row.fate or "peers" in row.fate or p.dim() < 2


def alike(fate):
    """-> the axes along which ranks have the same of a gradient, once it is summed. Not where it is
    scattered: there they have parts of it."""
    return [axis for axis, what in fate.items() if what in ("same", "sum")]


# ---- 2.3 a step ----

# The way of a gradient, such as that of a matrix, with ZeRO-1:
#     B of a micro-batch      autograd calls ZeRO's hook, which adds it to its unit's buffer
#     B of the last one       meanwhile a reduce-scatter over data: part.grad, this rank's part
#     next action, or end     waits for the sum
#     after the pipeline      only now sums what is late: what is tied, norms, biases, ..
#     gradient_norm           of ranks with the same numbers the first one counts them
#     begin_step .. end_step  master.grad; AdamW steps master; an all-gather over data: new weights


def train_step(model, optimizer, x, y, valid, clip):
    """x, y: this copy's rows (B/dp, T), the same on all its ranks; y: the next tokens, or -100.
    valid: how many targets there are in the whole batch. If each copy knows its own:
        valid = (y != -100).sum()
        dist.all_reduce(valid, group=mesh.group["dp"])

    clip: the largest norm (0: any) -> this rank's part of the loss, the norm of the whole gradient.
    For autocast see Chain's call.
    """
    for zero in model.zeros:
        zero.zero_grad()
    inputs, loss_of = model.in_microbatches(x, y, valid)
    loss = model.pipeline.step(inputs, loss_of)  # every rank of tp has all of it
    model.pipeline.end_sums()  # copies have begun all but those of what is late
    for zero in model.late:
        zero.reduce()  # partial -> sharded
    norm = gradient_norm(model)
    if clip:
        finite = norm.nan_to_num(0, posinf=0)  # inf, nan -> 0: then nothing is scaled
        nn.utils.clip_grads_with_norm_(model.parts, clip, finite)  # it reads their grad
    for zero in model.zeros:
        zero.begin_step()
    optimizer.step()
    for zero in model.zeros:
        zero.end_step()
    return loss / model.tp.size, norm


def gradient_norm(model):
    """Of the whole model. Of the ranks that hold the same numbers the first one counts them."""
    p = next(model.parameters())
    square = torch.zeros((), dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)
    counted = []
    for part in model.parts:
        axes = alike(model.table[part.parameter].fate)
        if all(dist.get_rank(model.group[axis]) == 0 for axis in axes):
            counted.append(part.grad)
    if counted:
        square = torch.stack(torch._foreach_norm(counted, dtype=square.dtype)).square().sum()
    dist.all_reduce(square)  # over all ranks: partial -> replicated
    return square.sqrt()


def evaluate(model, x, y):
    """-> this rank's part of the sum of token losses. Whoever calls it calls eval() before."""
    inputs, loss_of = model.in_microbatches(x, y, 1)
    return model.pipeline.evaluate(inputs, loss_of) / model.tp.size


# ---- 2.4 this rank's part of the model ----


class Hybrid(nn.Module):
    """This rank's stages, the pipeline that plays them, and their copies' sums and steps.

    stages   all stages of the model, as carve returns them, or slices of an nn.Sequential. Copies
             begin with the first one's trained weights; what is frozen, and buffers, must be alike.
             A tied parameter is one object in both stages
    tp       a TensorParallel, also of one rank: what cut_model was called with, before carve, if
             there are several. Hybrid makes it forget what is on other stages
    layers   the model's: the parameters of each are a unit
    head     what makes the logits: an nn.Linear, or what cut_model has put in its place
    loss     (logits, targets) -> the sum over a micro-batch's tokens. Logits are cut by words if
             the head is. None: cross-entropy, where a target of -100 does not count
    zero     the level of ZeRO. 0: nothing is cut, and copies sum whole gradients
    reduce_dtype  of gradients that are added up and summed over copies, such as torch.float32 where
             the model is in bf16
    ring     such as context_parallel.py's Zigzag(mesh.group["cp"]), whose attend the layers have;
             for cp > 1
    """

    def __init__(self, stages, mesh, tp, *, layers, head, loss=None, zero=0,
                 reduce_dtype=None, ring=None):
        super().__init__()
        guard(mesh, tp, zero, ring)  # only refuses
        self.tp = tp
        self.ring = ring
        self.loss = loss or loss_sum
        if loss is None and head.weight in tp.cuts:
            vocab = tp.cuts[head.weight].plain_size
            self.loss = partial(vocab_parallel_cross_entropy, vocab=vocab, tp=tp)
        self.width = head.weight.shape[1]  # C
        self.group = mesh.group
        here = {stage: stages[stage] for stage in mesh.stages}
        self.stages = nn.ModuleList(here.values())
        mine = set(self.stages.parameters())
        self.ep = experts_of(stages, mesh, tp)
        table = table_of(stages, tp, self.ep, zero)
        self.table = {p: row for p, row in table.items() if p in mine}  # ties in one order
        for p in table.keys() - mine:  # so that other stages can be freed
            tp.cuts.pop(p, None)
            tp.inside.discard(p)
            self.ep.cuts.pop(p, None)
        p = next(self.parameters())
        mail = Mail(mesh.plans, (), p.dtype, p.device, mesh.pipelines)  # each batch sets its size
        zeros = self.make_zeros(here, layers, zero, reduce_dtype)
        self.pipeline = SummingPipeline(here, mail, zeros)
        self.zeros = [*zeros.values()]
        self.late = [zeros[number, axis] for number, axis in zeros if number is None]
        self.units = [unit for each in self.zeros for unit in each.units]
        self.parts = [part for each in self.zeros for part in each.parts]

    def make_zeros(self, here, layers, level, reduce_dtype):
        """-> {(stage, axis): what sums gradients over copies, and cuts what they share}. What is
        late is of no stage: (None, axis)."""
        sets = [(None, [*self.table], [*self.stages])]  # (stage, parameters, who reads them)
        for number, stage in here.items():
            sets += [(number, *unit) for unit in units_of(stage, layers)]
        units = defaultdict(list)
        for axis in "ends", "peers", "data", "replicas":
            for number, parameters, sites in sets:
                of_dtype = defaultdict(list)  # a unit has one dtype
                for p in parameters:
                    row = self.table[p]
                    is_here = axis in row.fate and is_late(p, row) == (number is None)
                    if p.requires_grad and is_here:
                        of_dtype[p.dtype].append(p)
                for unit in of_dtype.values():
                    units[number, axis].append((unit, sites))
        zeros = {}
        for (number, axis), of_zero in units.items():
            # late: not over ZeRO-1: backwards only add to it, and it is summed once, in train_step
            kind = LADDER[min(level, 1) if number is None else level]
            zeros[number, axis] = kind(of_zero, self.group[axis], reduce_dtype=reduce_dtype)
        return zeros

    def in_microbatches(self, x, y, valid):
        """-> what Pipeline.step takes: inputs, and what makes a micro-batch's part of the loss."""
        if self.ring:  # (B/dp, T) -> (B/dp, T/cp)
            tokens = self.ring.positions(x.shape[1], x.device)
            x = x[:, tokens]
            y = y[:, tokens]
        M = self.pipeline.microbatches  # divides the rows
        rows, length = x.shape
        if self.tp.cuts_x:
            length = length // self.tp.size
        self.pipeline.mail.size = torch.Size((rows // M, length, self.width))
        targets = y.chunk(M)

        def loss_of(logits, m):
            return self.loss(logits, targets[m]) / valid

        return x.chunk(M), loss_of

    def named_parameters(self, *args, **options):
        """By the whole model's names. What is tied has one, on all ranks."""
        for _, p in super().named_parameters(*args, **options):
            yield self.table[p].name, p

    # groups: of hybrid.named_parameters(), by name or p.dim(). Masters are flat
    parameter_groups = ZeRO1.parameter_groups

    # -- the whole: {name: tensor} on every rank. All must call it

    def full_state_dict(self):
        trained = {p: t for zero in self.zeros for p, t in zero.full_parameters().items()}
        mine = {}
        for stage in self.stages:
            for name, t in stage.state_dict(keep_vars=True).items():
                here = trained.get(t, t)  # frozen ones and buffers: t itself
                # over tp or ep: sharded -> replicated
                mine[name] = tensor_parallel.unshard(here, *self.cut_of(t))
        return gather(mine, self.group["pp"])  # over pp: on one stage -> replicated

    def full_gradients(self):
        mine = {}
        for zero in self.zeros:
            for p, gradient in zero.full_gradients().items():
                mine[self.table[p].name] = tensor_parallel.unshard(gradient, *self.cut_of(p))
        return gather(mine, self.group["pp"])

    def load_full_state_dict(self, state):
        """full_state_dict's inverse. state: {name: whole tensor}, the same on all ranks. What is
        tied goes by its name in the first stage."""
        mine = {}
        for name, t in self.stages.state_dict(keep_vars=True).items():
            _, _, of_model = name.partition(".")  # without the stage's place here
            known = self.table[t].name if t in self.table else of_model
            cut, ranks = self.cut_of(t)
            mine[name] = tensor_parallel.shard(state[known], cut, ranks) if cut else state[known]
        load_parts(self.stages, self, mine)

    def refuse(self, *_, **__):
        raise RuntimeError("pieces, without masters: take full_state_dict, load_full_state_dict")

    state_dict = load_state_dict = refuse

    def cut_of(self, t):
        """-> how a parameter is cut (None: it is whole), and by which ranks."""
        ranks = self.ep if t in self.ep.cuts else self.tp
        return ranks.cuts.get(t), ranks

    def __repr__(self):
        rows = [row for p, row in self.table.items() if p.requires_grad]
        axes = [axis for axis, group in self.group.items() if group and group.size() > 1
                and any(axis in row.fate for row in rows)]
        return text_of(rows, axes)


# ---- 2.5 how copies sum, under backward ----


class ZeRO0(ZeRO1):
    """Nothing is cut: a unit has one chunk, all of it. Where ZeRO1 reduce-scatters, copies
    all-reduce, and where it gathers others' chunks there is nothing to do."""

    def place_of_rank(self):
        return 1, 0

    def ready(self, p):
        assert self.now != "summed", "copies sum once a step: take more micro-batches, or zero=1"
        super().ready(p)

    def start_sum(self, unit):
        # partial -> replicated
        return dist.all_reduce(unit.buffer, group=self.group, async_op=True)

    def renew(self, unit):
        pass

    def whole(self, unit, chunk):
        return unit.views(chunk.clone())


LADDER = ZeRO0, ZeRO1, ZeRO2, ZeRO3


class SummingPipeline(SplitPipeline):
    """Sums gradients over copies while the backward that completes them still runs.

    F0 F1 B0 B1          ZeRO-0 and 1: B1      ZeRO-2 and 3: B0, B1
    F0 F1 B0 W0 B1 W1    B1, W1                ZeRO-2: W0, W1

    B makes experts' gradients, W those of Linears: experts are summed in B, other units in W.
    """

    def __init__(self, modules, mail, zeros):
        super().__init__(modules, mail)
        self.zeros = zeros  # {(stage, axis): ZeRO}
        if self.split:
            split_cut(modules)

    def end_sums(self):
        for zero in self.zeros.values():
            if zero.summing:
                zero.reduce()  # partial -> sharded

    def do(self, action, received, loss_of):
        self.end_sums()  # not in the action that begins them: what it makes is sent first
        kind, m, stage = action
        for (number, axis), zero in self.zeros.items():  # what is late is of no stage
            has_w = axis != "replicas" and (m, stage) in self.split
            completes = number == stage and kind == ("W" if has_w else "B")
            each = isinstance(zero, ZeRO2)  # it sums in each micro-batch
            zero.sync = completes and (each or m == self.microbatches - 1)
        made = super().do(action, received, loss_of)
        for zero in self.zeros.values():
            # also what this copy's rows have not used: copies begin the same sums, in order, before
            # they wait for what other stages send
            while zero.sync and zero.pending:
                zero.sum_next()
        return made


# ---- 2.6 schedules with Ws: a backward in two parts, of what tp has cut ----


def split_cut(modules):
    """SplitPipeline has split the other Linears. The forward of a cut one calls its multiply."""
    for module in nn.ModuleList(modules.values()).modules():
        if isinstance(module, ColumnLinear):
            module.multiply = split_columns
        if isinstance(module, RowLinear):
            module.multiply = partial(split_linear, bias=None)  # it adds its bias after the sum


def split_columns(tp, x, *weights):
    """ColumnParallel. Its own backward is W: it gathers x again. Nothing hides B's sum over tp."""

    def gradient_of_x(*dys):
        summand = tensor_parallel.input_gradient(dys, weights)
        return tp.reduce(summand)()  # partial -> replicated or sharded(T)

    return split(partial(ColumnParallel.apply, tp), gradient_of_x, x, *weights)


# ---- 2.7 experts ----


def experts_of(stages, mesh, tp):
    """-> ep, which cuts stacks of experts as tp cuts matrices. Mixtures learn whom they serve."""
    ep = TensorParallel(mesh.group["ep"])
    for module in nn.ModuleList(stages).modules():
        if getattr(module, "is_of_experts", False):  # a StackedLinear of moe.py
            assert tp.size == 1 or tp.cuts_x, (
                "experts with tp > 1 want SequenceParallel: else its ranks route the same tokens")
            for p in module.parameters():
                ep.cuts[p] = Cut(0, len(p) * ep.size)
        if hasattr(module, "everyone"):  # a MoE
            module.everyone = mesh.group["peers"]
    return ep


# ---- 2.8 mistakes that nobody would see ----


def guard(mesh, tp, zero, ring):
    assert tp.size == mesh.size["tp"], "tp: of mesh.group['tp']"
    assert (ring is None) == (mesh.size["cp"] == 1), "ring: where the mesh has cp, there alone"
    alternates = mesh.plans == make_plans("1f1b", 1, len(mesh.plans[0]) // 2)
    assert zero < 3 or alternates, "ZeRO-3 wants one stage, and each B right after its F"


def assert_alike(model, x, y):
    """Once, after the first train_step, with its x and y: raises if the ranks of a copy have got
    different rows, or if ranks of tp have different gradients of what is the same on all (with
    SequenceParallel nothing is). Then the plan lacks an `inside`, or dropout differed."""
    same = {"x": x.double(), "y": y.double()}
    for axis in ("pp", "cp"):
        assert_same(same, model.group[axis])
    for zero in model.zeros:
        for unit in zero.units:
            for p, gradient in zero.whole(unit, unit.grad).items():  # sharded -> replicated
                if model.table[p].fate.get("tp") == "same":
                    same[model.table[p].name] = gradient
    assert_same(same, model.group["tp"])


# ---- 2.9 what print(hybrid) shows ----


def text_of(rows, axes):
    """The table of gradients: a line for each name, in which a layer's number is a *. Such as, of a
    tied Qwen3 with ZeRO:

    gradient of                  kind       tp    data     peers    ends     counted in the norm by
    tok.weight                   cut, tied  cut   -        -        scatter  each its own
    blocks.*.norm1.weight        whole      same  scatter  -        -        first of tp
    blocks.*.attn.q.weight       cut        cut   scatter  -        -        each its own
    blocks.*.attn.q_norm.weight  inside     -     -        scatter  -        each its own
    """
    lines = {}  # {line: None}: each once, in order
    for row in rows:
        name = re.sub(r"(^|\.)\d+\.", r"\1*.", row.name, count=1)
        what = [row.fate.get(axis, "-") for axis in axes]
        firsts = [axis for axis in axes if axis in alike(row.fate)]
        counted = "first of " + ", ".join(firsts) if firsts else "each its own"
        lines[(name, row.kind, *what, counted)] = None
    lines = [("gradient of", "kind", *axes, "counted in the norm by"), *lines]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


# ---- 3. the toy GPT, parallelized --------------------------------------------


def parallelize(model, mesh, layers, *, sp=False, ring=None, recompute=None, autocast=None,
                zero=0):
    """The plain GPT, with the same weights on all ranks -> Hybrid: this rank's part of it.

    layers     [how many each stage gets]
    sp         are norms and residuals cut over tp, along T?
    ring       context_parallel's, for cp > 1
    recompute  amp_accum_ckpt's full or selective
    autocast   torch.autocast(..), which decorates forwards
    """
    tp = SequenceParallel(mesh.group["tp"]) if sp else TensorParallel(mesh.group["tp"])
    # 1. Within a layer: ranks share its matrices (tp), its sequence (cp) and its experts (ep).
    if tp.size > 1:
        tensor_parallel.cut_model(model, tp, plan_of(model))
    if ring:
        context_parallel.parallelize(model, ring)
    if has_experts(model):
        microbatches = 1 + max(action.microbatch for action in mesh.plans[0])
        moe.parallelize(model, mesh.group["ep"], microbatches)
    # 2. Around a layer: what it computes again in backward.
    if recompute:
        for block in model.blocks:
            block.forward = partial(recompute, block.forward)
    # 3. Between layers: stages (pp).
    stages = carve(model, CHAIN, layers)
    if autocast:
        for stage in stages:
            stage.forward = autocast(stage.forward)
    # 4. Copies of it all (dp, cp), which sum gradients.
    return Hybrid(stages, mesh, tp, layers=model.blocks, head=model.head, zero=zero, ring=ring)


def plan_of(model):
    """-> tensor_parallel's plan. Of experts it cuts the shared one alone."""
    plan = tensor_parallel.plan_of(model)
    if not has_experts(model):
        return plan
    if model.blocks[0].mlp.shared is None:
        return {name: how for name, how in plan.items() if ".mlp" not in name}
    return {name.replace(".mlp", ".mlp.shared"): how for name, how in plan.items()}


def has_experts(model):
    return hasattr(model.blocks[0].mlp, "experts")


def step_with_experts(model, *others):
    """As train_step."""
    loss, norm = train_step(model, *others)
    return loss + moe.step_biases(model), norm


def parallelize_idea(gpt, grid, tp, layers, boundary):
    tensor_parallel.parallelize_idea(gpt, tp)  # tp, a TensorParallel, learns what is cut
    return IdeaOfHybrid(carve(gpt, CHAIN, layers), grid, boundary)


def gather_idea(model, tp, named, tensor_of):
    """-> {name: tensor_of(p), whole}, on every rank. named: [(name, p)] of this rank's stage."""
    mine = {name: tensor_parallel.unshard(tensor_of(p), tp.cuts.get(p), tp) for name, p in named}
    return gather(mine, model.group["pp"])  # over pp: on one stage -> replicated


def evaluate_idea(model, x, y):
    """-> this rank's part of the sum of token losses. The idea has no forward by itself."""
    with torch.enable_grad():
        loss = run_microbatches(model, x, y, 1)
    return loss / model.group["tp"].size()


# ---- 4. at work: the same with torch's own API -------------------------------


def local(t):
    """A DTensor's part on this rank; an ordinary tensor is that already."""
    return t.to_local() if isinstance(t, DTensor) else t


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


class AtWork(nn.Module):
    """This rank's stages of the toy GPT, and torch's schedule, which runs them."""

    def __init__(self, model, mesh, layers, boundary, args):
        """model: the plain GPT. boundary: (size, dtype, device) of what stages hand on."""
        super().__init__()
        self.mesh = mesh
        self.vocab = args.vocab
        self.valid = 1  # targets of the batch under way
        self.trained = {name for name, p in model.named_parameters() if p.requires_grad}
        size, _, device = boundary
        sizes = args.pp, args.dp, args.tp
        self.device_mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "dp", "tp"))
        if args.tp > 1:
            tensor_parallel.parallelize_at_work(model, self.device_mesh["tp"], args.sp)
        logits = size[0], args.seq, len(local(model.head.weight))  # before fully_shard cuts it, too
        is_tied = model.head.weight is model.tok.weight and args.pp > 1
        stages = carve(model, CHAIN, layers)
        here = {stage: stages[stage] for stage in mesh.stages}
        self.stages = nn.ModuleList(here.values())
        self.tied = None  # the embedding or head, if it is tied to another rank's
        for number, stage in here.items():
            is_last = number == len(layers) - 1
            if args.dp > 1:
                blocks = [module for module in stage.blocks if not isinstance(module, HandsOn)]
                for unit in [*blocks, stage]:
                    fully_shard(unit, mesh=self.device_mesh["dp"], reshard_after_forward=False)
            if is_last and args.tp > 1:
                # the pipeline takes ordinary tensors; loss_of makes DTensors again
                stage.register_forward_hook(lambda module, inputs, logits: logits.to_local())
            if is_tied and (number == 0 or is_last):
                self.tied = stage.tok.weight if number == 0 else stage.head.weight
        if is_tied:
            pairs = self.device_mesh.mesh[[0, -1]].flatten(1).T.tolist()  # first stage's, last's
            self.ends, _ = dist.new_subgroups_by_enumeration(pairs)
        self.schedule = pipeline_parallel.schedule_at_work(
            args.schedule, here, mesh.plans, boundary, logits, self.loss_of, mesh.group["pp"])

    def loss_of(self, logits, targets):
        """What torch's schedule calls on the last stage."""
        if self.mesh.size["tp"] > 1:
            uncut = torch.empty(*targets.shape, self.vocab, device="meta")
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
        mine = {}
        for stage in self.stages:
            for name, p in stage.state_dict(keep_vars=True).items():
                mine[name] = whole(p)  # over dp, tp: sharded -> replicated
        return gather(mine, self.mesh.group["pp"])  # over pp: on one stage -> replicated

    def full_gradients(self):
        mine = {}
        for stage in self.stages:
            for name, p in stage.named_parameters():
                if name in self.trained:  # a tied head goes by the embedding's name
                    mine[name] = whole(torch.zeros_like(p) if p.grad is None else p.grad)
        return gather(mine, self.mesh.group["pp"])


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
        dist.all_reduce(local(model.tied.grad), group=model.ends)
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


# ---- 5. run ------------------------------------------------------------------

NOT_HERE = ("naive", "pipedream")  # the first never overlaps, the second trains something else
SCHEDULES = tuple(name for name in pipeline_parallel.SCHEDULES if name not in NOT_HERE)
FLAGS = {  # layout() finds those that have no default
    "--dp": dict(type=int, least=1, help="copies, which share the batch (the ranks that are left)"),
    "--tp": dict(type=int, least=1, help="ranks that share a layer (1; 2 if no axis is given, and "
                 "4 divides the ranks)"),
    "--pp": dict(type=int, least=1, help="ranks of a pipeline (likewise)"),
    "--cp": dict(type=int, default=1, least=1, help="ranks that share each sequence"),
    "--attn": dict(default="zigzag", choices=tuple(context_parallel.KINDS), help="how keys reach "
                   "other ranks' queries"),
    "--micro": dict(type=int, metavar="M", least=1, help="micro-batches of a copy (4, or 2 or 1 if "
                    "4 do not fit)"),
    "--schedule": dict(default="1f1b", choices=SCHEDULES, help="order of the work"),
    "--chunks": dict(type=int, default=2, least=1, help="stages of a rank, for interleaved, bfs"),
    "--sp": dict(action="store_true", help="cut norms and residuals over tp, along T"),
    "--zero": dict(type=int, default=0, choices=(0, 1, 2, 3), help="cut over dp x cp: 1 optimizer, "
                   "2 gradients, 3 parameters"),
    "--ckpt": dict(default="none", choices=("none", "full", "selective"), help="what blocks "
                   "compute again in backward"),
    "--amp": dict(default="off", choices=("off", "bf16"), course=True, help="autocast to"),
    **moe.FLAGS,
    "--experts": dict(type=int, default=0, metavar="E", least=0, course=True, help="in each layer, "
                      "in the place of its MLP (0: none)"),
}
VARIANTS = ("",)  # flags with which the file is worth running: none; tools/gpu.py has layouts


def layout(args):
    """Fills in what the flags leave open -> plans. What cannot run ends here, in one line."""
    from harness.flags import refuse_flags, refusing, require

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
    refuse(args, require)
    with refusing():
        plans = pipeline_parallel.make_plans(args.schedule, args.pp, args.micro, args.chunks)
    if args.impl in ("torch", "both", "all"):
        refuse_at_work(args, require, homes(plans))
    if args.impl in ("idea", "all"):
        refuse_flags(args, FLAGS, "--cp --attn --schedule --sp --zero --ckpt --amp --experts "
                     "--train --save --resume --init-from")
        require(args.vocab % args.tp == 0 and args.kv_heads % args.tp == 0, f"--impl {args.impl}: "
                f"--tp {args.tp} must divide --vocab, and heads of keys and values")
    return plans


def refuse(args, require):
    tp = args.tp
    copies = args.dp * args.cp
    stages = args.pp * pipeline_parallel.chunks_of(args.schedule, args.chunks)
    axes = f"--dp {args.dp} x --cp {args.cp} x --tp {tp} x --pp {args.pp}"
    require(copies * tp * args.pp == args.world_size,
            f"{axes}: their product is not {args.world_size}, the number of ranks")
    sharing = tp * args.cp if args.attn == "ulysses" else tp  # ranks that share the heads
    chunks = 1  # of the sequence, on a rank
    if args.cp > 1:
        chunks = context_parallel.KINDS[args.attn].chunks_each
    for what, size, parts in (
        ("heads:", args.heads, sharing),
        ("heads of keys and values, or tp:", max(args.kv_heads, tp), min(args.kv_heads, tp)),
        ("heads of keys and values:", max(args.kv_heads, tp), sharing),
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


def refuse_at_work(args, require, home):
    """What part 4 does not show. home: {stage: place along pp}"""
    from harness.flags import refuse_flags

    refuse_flags(args, FLAGS, "--dry-run --cp --attn --ckpt --amp --experts --save --resume "
                 "--init-from")
    require(args.zero < 2 and args.dtype != "bf16",
            f"--impl {args.impl}: takes no --zero 2, no --zero 3 and no --dtype bf16")
    require(args.seq % args.tp == 0, f"--seq {args.seq}: torch wants a multiple of --tp {args.tp}")
    pipeline_parallel.refuse_at_work(require, args.schedule, args.micro, args.pp)
    require(len(home) == 1 or home[0] != home[max(home)], f"--schedule {args.schedule} --pp "
            f"{args.pp}: both ends of the model on one rank want --impl scratch")


def pieces(model, optimizer):
    """-> {parameter: [Piece]}: the boxes of the plain model's tensors that this rank holds"""
    from harness.checkpoint import of_cuts, of_stacks, pieces_of_units

    found = of_cuts(pieces_of_units(model.units, model.named_parameters(), optimizer), model.tp)
    return of_stacks(found, model.ep.rank, moe.plain_name)


def notes(model):
    """What a checkpoint holds besides: the biases of all layers' experts."""
    mine = {}
    for stage in model.stages:
        for name, buffer in stage.named_buffers():
            if name.endswith("bias_units"):
                mine[int(re.search(r"\d+", name)[0])] = buffer
    found = gather(mine, model.group["pp"])
    return {"bias_units": [found[layer].tolist() for layer in sorted(found)]}


def sources(args, device, ring):
    """-> [micro-batch][rank]: the tokens that the rank routes, numbered 0 to B T - 1"""
    numbers = torch.arange(args.batch * args.seq, device=device)
    numbers = numbers.view(args.dp, args.micro, -1, args.seq)
    found = [[] for _ in range(args.micro)]
    for dp_rank, m, cp_rank in product(range(args.dp), range(args.micro), range(args.cp)):
        here = numbers[dp_rank, m]
        if ring:
            here = here[:, ring.positions(args.seq, device, cp_rank)]  # (B', T')
        found[m] += [piece.flatten() for piece in here.chunk(args.tp, 1)]
    return found


# Each of these returns a Side: what the run steps, judges and saves, see harness/run.py.


def set_up_ours(run, plain, mesh, layers, ring):
    from amp_accum_ckpt import CHECKPOINT
    from harness.ledger import held_by
    from harness.whole import wholes_of_units_of_cuts

    args = run.args
    autocast = torch.autocast(run.device.type, torch.bfloat16) if args.amp == "bf16" else None
    model = parallelize(
        plain, mesh, layers, sp=args.sp, ring=ring, autocast=autocast, zero=args.zero,
        recompute=CHECKPOINT[args.ckpt])
    names = {p: row.name for p, row in model.table.items()}
    named = [(name, p) for p, name in names.items()]
    moe.name_experts(model, names, mesh.group["ep"], args.experts)
    optimizer = run.optimizer(
        named, groups=model.parameter_groups, names=names,
        wholes=partial(wholes_of_units_of_cuts, model.zeros, model.tp, names))
    step = step_with_experts if args.experts else train_step
    return run.side(
        model, optimizer, step,
        evaluate=partial(evaluate, model), pieces=partial(pieces, model, optimizer),
        full_gradients=lambda: one_by_one(model.full_gradients()),
        full_state_dict=lambda: one_by_one(model.full_state_dict()),
        held=partial(held_by, model, optimizer, model.units),
        extra=partial(notes, model) if args.experts else dict)


def set_up_at_work(run, plain, mesh, layers):
    args = run.args
    size = args.batch // args.dp // args.micro, args.seq // (args.tp if args.sp else 1), args.width
    boundary = size, run.dtype, run.device
    model = AtWork(plain, mesh, layers, boundary, args)
    return run.side(model, adamw(model.parameters(), args.lr), train_step_at_work,
                    evaluate=model.evaluate, full_state_dict=model.full_state_dict,
                    full_gradients=model.full_gradients)


def set_up_idea(run, plain, mesh, layers, grid):
    args = run.args
    boundary = plain.tok.weight.new_empty(args.batch // args.dp // args.micro, args.seq, args.width)
    tp = TensorParallel(grid["tp"])
    model = parallelize_idea(plain, grid, tp, layers, boundary)
    names = {p: name for name, p in plain.named_parameters()}  # a tied head goes by tok's
    state = model.stage.state_dict(keep_vars=True)
    trained = [(names[p], p) for p in model.trained()]
    return run.side(model, adamw(model.trained(), args.lr), idea_step, held_of=model.stage,
                    evaluate=partial(evaluate_idea, model),
                    full_gradients=partial(gather_idea, model, tp, trained, lambda p: p.grad),
                    full_state_dict=partial(gather_idea, model, tp, state.items(), lambda p: p))


def picture(run, plans, layers):
    """Which ranks have which layers."""
    each = run.world_size // len(plans)
    for place, plan in enumerate(plans):
        stages = sorted({action.stage for action in plan})
        words = " ".join(f"{sum(layers[:s])}..{sum(layers[:s + 1]) - 1}" for s in stages)
        run.say(f"  layers {words}:  ranks {place * each}..{(place + 1) * each - 1}")


def textbook(run, model):
    """Prints what was sent along each axis, for the docstring's table -> rows of what is exact."""
    from harness.report import human

    groups = [("norm", dist.group.WORLD), *model.group.items()]
    if isinstance(model, Hybrid):
        groups += [("pp", link) for link in {*model.pipeline.mail.links.values()}]
    by_group = run.sides[run.impls[0]].ledger.groups
    sent = Counter()  # {axis: bytes that this rank has sent along it in the last step}
    for axis, group in groups:
        if group:  # a middle stage is not among the ends
            sent[axis] += by_group[group.group_name]
    run.extra["sent"] = dict(sent)
    for axis, size in sent.items():
        if size:
            run.say(f"  sent along {axis:9} {human(size):>12}")
    n = run.world_size
    norm = 2 * (n - 1) / n * max(run.dtype.itemsize, 4)
    return [("wire norm", "2 (n-1)/n max(b, 4)", norm, sent["norm"])]


def main():
    from harness.flags import arguments, require
    from harness.run import Run

    args = arguments(__doc__, FLAGS, presets=moe.PRESETS)
    plans = layout(args)
    layers = pipeline_parallel.split_layers(args.layers, len(homes(plans)))
    run = Run(args)
    mesh = Mesh(plans, args.dp, args.cp, args.tp, args.ep)
    ring = context_parallel.KINDS[args.attn](mesh.group["cp"]) if args.cp > 1 else None
    if args.experts:
        routed = None if run.dry else sources(args, run.device, ring)  # a dry run looks at none
        run.build_plain = partial(moe.build_plain, sources=routed)
        tokens = args.batch // args.dp // args.micro * (args.seq // args.cp) // args.tp
        moe.expect_balanced(args, tokens, mesh.group["ep"])
        if run.dry:
            moe.read_counts = moe.balanced_counts
    pipeline_parallel.refuse_shared_gpus(run, args.pp, require)
    grid = make_grid(args.dp, args.tp, args.pp) if "idea" in run.impls else None
    set_up = {"scratch": partial(set_up_ours, ring=ring), "torch": set_up_at_work,
              "idea": partial(set_up_idea, grid=grid)}
    with run:
        sides = {impl: set_up[impl](run, run.build(), mesh, layers) for impl in run.impls}
        picture(run, plans, layers)
        run.train(sides, rows=share(args.batch, args.dp, mesh.place["dp"]))
        model = sides[run.impls[0]].model
        if args.impl != "torch":
            run.textbook(textbook(run, model))
        if isinstance(model, Hybrid):
            run.say(model)
        plain = partial(moe.plain_trace, run) if args.experts else run.plain
        return run.finish(plain, "bf16" if args.amp == "bf16" else args.dtype)


if __name__ == "__main__":
    sys.exit(main())
