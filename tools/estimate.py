"""What a layout of hybrid_3d.py costs: bytes of its fullest stage and seconds of a step. search()
looks for the fastest layout.

Parameters, gradients and optimizer are counted on the model itself. Bytes that are sent are those
of hybrid_3d.py's textbook. Activations are what a block keeps for backward times the micro-batches
in flight. What comes and goes besides (logits, gradients inside of a block, what ZeRO gathers) is
its largest tensors alone: a dry run has the exact peak, see plan.py, which also says where each
term of the time model is from.

    cfg   common.GPTConfig          at   plan.py's flags: the cluster and the batch
    lay   a Layout                  job  all of these, with what several formulas need: see job_of

Letters are those of common.py. A stage is here all that a rank of pp holds, its chunks together.
"""
import itertools
import math
from collections import namedtuple
from functools import cache
from types import SimpleNamespace

import torch

import hybrid_3d
from common import GPT, Block, share
from harness.flags import DTYPES

Layout = namedtuple("Layout", "dp tp pp micro schedule sp zero ckpt cp attn ep",
                    defaults=(1, "zigzag", None))  # ep: None without experts
SCHEDULES = hybrid_3d.SCHEDULES
VEES = ("zb-v", "dualpipe-v")  # down the ranks and up again: the first has embedding and head
# backward in two actions: B, gradients of inputs, and W, of weights
SPLIT = ("zb-h1", "zb-h2", *VEES)
CKPTS = ("none", "selective", "full")

# ---- the model -----------------------------------------------------------------

# cut: how many parameters tp cuts. whole: those that all its ranks have. multiplied: those of
# matrices, by which every token is multiplied
Count = namedtuple("Count", "cut whole multiplied")


def resolved(cfg):
    """The same sizes with kv_heads and hidden filled in."""
    return cfg.resolved()


@cache
def counts(cfg):
    """-> the Count of a block without its MLP, and that of an MLP"""
    with torch.device("meta"):
        block = Block(cfg)
    mlp = count("blocks.0.mlp", block.mlp)
    block.mlp = None
    return count("blocks.0", block), mlp


def count(prefix, module):
    named = dict(module.named_parameters(prefix))
    cut = sum(p.numel() for name, p in named.items() if hybrid_3d.kind_of(name) == "matrix")
    total = sum(p.numel() for p in named.values())
    return Count(cut, total - cut, sum(p.numel() for p in named.values() if p.dim() == 2))


def parameters_of(cfg, experts=0, shared=False):
    """-> how many parameters the whole model has"""
    with torch.device("meta"):
        model = GPT(cfg)
    total = sum(p.numel() for p in model.parameters())
    if experts:  # and a router, in the place of an MLP
        mlp = sum(p.numel() for p in model.blocks[0].mlp.parameters())
        total += cfg.layers * (experts * cfg.width + (experts + shared - 1) * mlp)
    return total


# ---- a job ---------------------------------------------------------------------


def job_of(cfg, at, lay):
    """-> a layout with its model and cluster. hybrid_3d's functions take it for their args.

    Besides the sizes and the layout's axes:
    b         bytes of a number          tokens   of a micro-batch on a rank
    x         bytes of a micro-batch between two blocks
    cut       tp with sp, else 1: what is outside of tp's Linears is cut by it
    data      dp x cp, the ranks that hold different tokens; copies: those with the same experts
    dense     parameters of a block on a rank, without experts; expert: of its experts
    routed    experts that a token visits, all being chosen equally often; visits: MLPs, all told
    vee       has rank 0 the embedding and the head?
    blocks    of each rank of pp; most: of the rank that has most
    """
    cfg = resolved(cfg)
    job = SimpleNamespace(**lay._asdict(), **cfg._asdict(), cfg=cfg, at=at, batch=at.batch,
                          experts=at.experts, shared=at.shared)
    job.has_mlp = at.shared or not at.experts  # one that tp cuts
    job.routed = at.top_k if at.experts else 0
    job.visits = job.routed + job.has_mlp
    job.ep = lay.ep or 1
    job.b = DTYPES[at.dtype].itemsize
    job.tokens = at.batch * cfg.seq / (lay.dp * lay.cp * lay.micro)
    job.x = job.b * job.tokens * cfg.width
    job.cut = lay.tp if lay.sp else 1
    job.data = lay.dp * lay.cp
    job.copies = job.data // job.ep
    rest, mlp = counts(cfg)
    job.dense = rest.cut / lay.tp + rest.whole + at.experts * cfg.width
    if job.has_mlp:
        job.dense += mlp.cut / lay.tp + mlp.whole
    job.expert = at.experts / job.ep * (mlp.cut + mlp.whole)
    # FLOPs of a token's forward
    job.matmuls = 2 * (rest.multiplied + job.visits * mlp.multiplied)
    job.of_head = 2 * cfg.width * cfg.vocab
    job.vee = lay.schedule in VEES
    job.v = 2 if job.vee or lay.schedule in ("interleaved", "bfs") else 1
    job.blocks = blocks_of(cfg.layers, lay.pp, job.v, job.vee)
    job.most = max(job.blocks)
    return job


@cache
def blocks_of(layers, pp, v, vee):
    """-> how many blocks each rank has"""
    found = []
    for rank in range(pp):
        chunks = [rank, 2 * pp - 1 - rank] if vee else range(rank, pp * v, pp)
        found.append(sum(len(share(layers, pp * v, chunk)) for chunk in chunks))
    return found


def ends(job, stage):
    """-> has the stage the embedding? has it the head?"""
    return stage == 0, stage == (0 if job.vee else job.pp - 1)


# ---- memory of a stage, in bytes -------------------------------------------------

HELD = ("parameters", "gradients", "optimizer", "activations", "working")


def assess(job, stage=None):
    """-> {what: bytes} of HELD and "memory", all of it; of the fullest stage, or of this one."""
    if stage is not None:
        return held(job, stage)
    # rank 0 has the embedding and most in flight, the last one the head
    stages = {0, job.blocks.index(job.most), job.pp - 1}
    return max((held(job, one) for one in stages), key=lambda found: found["memory"])


def held(job, stage):
    """-> the same of a stage"""
    found = states(job, stage)
    has_head = ends(job, stage)[1]
    logits = 4 * job.tokens * job.vocab / job.tp if has_head else 0  # in fp32
    found["activations"] = in_flight(job, stage) * job.blocks[stage] * kept_by_block(job, job.ckpt)
    if logits and job.schedule in ("gpipe", "bfs"):  # backward begins when all are there
        found["activations"] += (job.micro - 1) * (logits + 2 * job.x / job.cut)
    found["working"] = working(job, stage, logits)
    found["memory"] = sum(found.values())
    return found


def outside_of_blocks(job, stage):
    """-> how many parameters a stage has there"""
    C = job.width
    first, last = ends(job, stage)
    embedding = -(-job.vocab // job.tp) * C  # with padding
    tied = job.form.tied
    total = embedding if first else 0
    if first and tied:
        total += job.seq * C / job.tp  # positions
    if last:
        total += C * (2 if tied else 1)  # the last norm
    if last and not (first and tied):
        total += embedding  # the head
    return total


def cut_by_zero(job, stage):
    """-> a rank's part of a stage's parameters, whose copies ZeRO shares out"""
    dense = job.blocks[stage] * job.dense + outside_of_blocks(job, stage)
    return dense / job.data + job.blocks[stage] * job.expert / job.copies


def states(job, stage):
    """Parameters, gradients and AdamW's states."""
    outside = outside_of_blocks(job, stage)
    whole = job.blocks[stage] * (job.dense + job.expert) + outside
    cut = cut_by_zero(job, stage)
    per_parameter = 12 if job.b == 2 else 8  # with bf16 a copy in fp32 besides
    found = {"parameters": job.b * whole, "gradients": job.b * whole}
    found["optimizer"] = per_parameter * (cut if job.zero else whole)
    if job.zero == 3:
        found["parameters"] = job.b * cut
    if job.zero >= 2:
        found["gradients"] = job.b * cut
        if job.form.tied and job.pp > 1:  # the tied one stays whole until stages have summed
            found["gradients"] += job.b * outside * (1 - 1 / job.data)
    return found


def in_flight(job, stage):
    """Micro-batches between their first forward and their last backward."""
    M = job.micro
    pp = job.pp
    return {
        "gpipe": M, "bfs": M, "1f1b": min(M, pp - stage),
        # counted in chunks, two of which are a rank's part
        "interleaved": min(2 * M, 3 * pp - 2 * stage - 1) / 2,
        "zb-h1": min(M, pp), "zb-h2": min(M, 2 * pp - 1), "zb-v": min(M, pp),
        "dualpipe-v": pp + 1 / 2,  # with 2 pp micro-batches or more: see schedules()
    }[job.schedule]


def kept_by_block(job, ckpt):
    """What a block keeps of a micro-batch for backward (Korthikanti 2022, section 4)."""
    if ckpt == "full":
        return job.x / job.cut
    # the inputs of norms and their results, in units of x; experts keep their own
    outside = 4 if job.has_mlp else 3
    inside = 2 + 2 * job.kv_heads / job.heads  # q, what attention makes; k, v
    # up and gelu's result; gate, up, silu's result and their product
    of_mlp = (2 if job.form.learned_positions else 4) * job.hidden / job.width
    if ckpt == "selective":
        of_mlp /= 2
        outside = 2
    if job.has_mlp:
        inside += of_mlp
    # a row to an expert: sorted, in its MLP, its answer, back again; K answers of a token
    inside += job.routed * (3 + of_mlp) + job.routed
    if job.experts and ckpt == "none":
        inside += 4 / job.b  # the router's input in fp32
    return outside * job.x / job.cut + inside * job.x / job.tp


def working(job, stage, logits):
    """What comes and goes beside the activations: the most of the loss and a block's backward."""
    # the last norm's input and result, logits, log-probabilities, and the gradient, which tp's
    # cross-entropy makes in the place of these
    at_loss = 2 * job.x / job.cut + logits * (2 if job.tp > 1 else 3)
    # gradients of a block's widest tensors, and what it makes again
    hidden = job.visits * job.hidden / job.width * job.x / job.tp
    inside = 2 * job.x + (1 if job.form.learned_positions else 2) * hidden
    inside += kept_by_block(job, "none") - kept_by_block(job, job.ckpt)
    if job.schedule in SPLIT:  # from B to W gradients of all Linears wait
        inside *= 1 + job.blocks[stage] / job.v
    unit = job.b * (job.dense + job.expert)
    outside = job.b * outside_of_blocks(job, stage)
    if job.zero >= 2:  # gradients of a block are whole until ranks have summed them
        inside += unit
    if job.zero >= 2 and job.pp == 1:
        inside += outside
    most = max(at_loss, inside)
    if job.zero == 3:  # a block in use, the next one on its way, and what is outside of blocks
        most += min(2, job.blocks[stage]) * unit + outside
    return most


# ---- seconds of a step -----------------------------------------------------------

# The bubble is IDLE (pp - 1) times a micro-batch's F + B + W, as tests/test_plan.py simulates it
IDLE = {"gpipe": 1, "1f1b": 1, "interleaved": 1 / 2, "bfs": 1 / 2, "zb-h1": 1 / 3, "zb-h2": 0,
        "zb-v": 0, "dualpipe-v": 1 / 6}
PARTS = ("matmul", "recompute", "bound", "tp", "cp", "ep", "bubble", "pp", "dp", "adamw")


def timed(job):
    """-> {part: seconds} of PARTS, "seconds" of a step, and what follows from it: "tflops" and
    "mfu" of a GPU, "rate" in tokens a second, "days" and "gpu_hours" for at.tokens, their "cost".
    """
    at = job.at
    # the work of the heaviest rank and that of an average one, in blocks; the head is some of them
    head = job.of_head / forward(job, job.seq)
    heavy = max(job.most, job.blocks[0 if job.vee else -1] + head)
    mean = (job.layers + head) / job.pp
    speed = 1e12 * at.gpu_tflops * at.efficiency
    own = job.micro * job.tokens  # a rank's tokens of a step
    on_tp = hybrid_3d.sent_on_tp(job, job.b, job.most, False, False)  # nothing hides it
    if at.megatron_2021 and job.ckpt == "full":  # both all-reduces of a block again, not one
        on_tp += 2 * job.most * (job.tp - 1) / job.tp * job.micro * job.x
    found = {
        "matmul": 3 * own * forward(job) / job.tp * heavy / speed,
        "recompute": own * forward_again(job) / job.tp * job.most / speed,
        "bound": own * job.most * memory_traffic(job) / (1e12 * at.hbm),
        "tp": on_tp / bandwidth(at, job.tp),
        "cp": seconds_on_cp(job, speed),
        "ep": bytes_on_ep(job, job.most) / bandwidth(at, job.tp * job.ep),
    }
    work = sum(found.values())
    found["bubble"] = (job.pp - 1) / job.micro * IDLE[job.schedule] * mean / heavy * work
    # of a rank whose stages all have two neighbours; nothing hides it
    on_pp = hybrid_3d.sent_on_pp(job, job.b, 2 * job.v) if job.pp > 1 else 0
    if at.megatron_2021:  # what all ranks of tp have is sent once (Narayanan 2021, 4.1)
        on_pp *= job.cut / job.tp
    found["pp"] = on_pp / bandwidth(at, at.gpus)
    fullest = job.blocks.index(job.most)
    found["dp"] = seconds_on_dp(job, fullest, work)
    stepped = cut_by_zero(job, fullest)
    if not job.zero:
        stepped = job.most * (job.dense + job.expert) + outside_of_blocks(job, fullest)
    # AdamW reads and writes gradients and states
    found["adamw"] = (24 + 2 * job.b) * stepped / (1e12 * at.hbm)
    found["seconds"] = sum(found.values())
    return with_rates(job, found)


def with_rates(job, found):
    at = job.at
    tokens = job.batch * job.seq
    flops = tokens * (3 * job.layers * forward(job, job.seq) + 3 * job.of_head)
    counted = 1
    if at.megatron_2021:  # that paper counts what is computed again
        counted += found["recompute"] / found["matmul"]
    found["mfu"] = flops / found["seconds"] / at.gpus / 1e12 / at.gpu_tflops
    found["tflops"] = found["mfu"] * at.gpu_tflops * counted
    found["rate"] = tokens / found["seconds"]
    found["days"] = at.tokens / found["rate"] / 86400
    found["gpu_hours"] = found["days"] * 24 * at.gpus
    found["cost"] = found["gpu_hours"] * at.price
    return found


def bandwidth(at, neighbours):
    """Bytes a second among so many ranks in a row: inside a node, if they divide it."""
    return 1e9 * (at.bandwidth_inter if at.node % neighbours else at.bandwidth_intra)


def forward(job, keys=None):
    """FLOPs of a token in a block. keys: of its attention, as papers count them: T, where causal
    attention sees half of T on average. A ring's last rank sees nearly all of T."""
    if keys is None:
        keys = job.seq
        if job.attn == "ring":
            keys *= 2 - 1 / job.cp
    return job.matmuls + 4 * keys * job.width


def forward_again(job):
    """FLOPs that ckpt full repeats: all but the last matmul. Megatron repeated that as well in
    2021, and so do experts, whose gates want its result."""
    if job.ckpt != "full":
        return 0
    flops = forward(job)
    if job.has_mlp and not job.at.megatron_2021:
        flops -= 2 * job.width * job.hidden
    return flops


def memory_traffic(job):
    """Bytes per token and block of what is no matmul: norms, residuals, gelu, read and written."""
    C = job.width
    if job.at.megatron_2021:  # and, unfused, the attention's T x T
        numbers = 11 * C / job.cut + (8 * C + 5.5 * job.heads * job.seq) / job.tp
    else:
        of_mlp = 2 if job.form.learned_positions else 5  # gelu; silu and the product with up
        numbers = 10 * C / job.cut + of_mlp * job.visits * job.hidden / job.tp
        numbers += 8 * job.routed * C / job.tp  # rows are picked, sorted, put back and added up
    passes = 3 if job.ckpt == "none" else 4
    return passes * job.b * numbers


def seconds_on_cp(job, speed):
    """Hops travel behind attention, other collectives do not."""
    seconds = hybrid_3d.sent_on_cp(job, job.b, job.most) / bandwidth(job.at, job.tp * job.cp)
    if job.attn in ("ring", "zigzag"):
        attention = 3 * job.micro * job.tokens * (forward(job) - job.matmuls) / job.tp
        seconds -= min(seconds, job.most * attention / speed)
    return seconds


def bytes_on_ep(job, blocks):
    """Rows to experts and back, in forward and backward, which nothing hides."""
    times = 6 if job.ckpt == "full" else 4
    rows = job.micro * job.tokens / job.tp * job.routed
    return blocks * times * rows * job.b * job.width * (job.ep - 1) / job.ep


def seconds_on_dp(job, rank, work):
    """What is left of the sums over copies when backward has hidden its part of them."""
    moved = {2: job.micro + 1, 3: 3 * job.micro}.get(job.zero, 2)
    of_ends = moved
    if job.pp > 1 and job.form.tied:  # tied: summed once
        of_ends = 2
    dense = moved * job.blocks[rank] * job.dense + of_ends * outside_of_blocks(job, rank)
    experts = moved * job.blocks[rank] * job.expert
    sent = dense * (job.data - 1) / job.data + experts * (job.copies - 1) / job.copies
    seconds = job.b * sent / bandwidth(job.at, job.tp * job.data)
    if job.at.megatron_2021:
        return seconds
    # The last backward hides them; with ZeRO-2 each one does, with ZeRO-3 forward does, too.
    # Nothing hides the parameters that ZeRO-1 and 2 gather
    behind = {1: seconds / 2, 2: seconds * job.micro / (job.micro + 1)}.get(job.zero, seconds)
    room = {2: 2 / 3 * work, 3: work}.get(job.zero, 2 / 3 * work / job.micro)
    return seconds - min(behind, room)


# ---- the search ------------------------------------------------------------------


@cache
def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


LONG = 8192  # tokens of a sequence from which on it is cut, unless --cp says otherwise
SHORT = 2048  # tokens of a part, at least


def layouts(cfg, at, fixed):
    """What hybrid_3d.py runs and may gain something in this model of time and memory.

    Not there: with pp 1 another schedule than 1f1b; schedules with too few micro-batches to fill
    the pipeline; ckpt full where backward is in two actions, for W would wait with all that was
    made again. Not there unless `fixed` names them: bfs, zb-h2 and dualpipe-v, to which interleaved
    and zb-v are equal or better; ring and allgather, which hide less; cp for short sequences.
    """
    cfg = resolved(cfg)
    for dp, cp, tp, pp in meshes(cfg, at.gpus, fixed):
        if at.batch % dp:
            continue
        for micro in divisors(at.batch // dp):
            for schedule in schedules(cfg, pp, micro, fixed):
                for sp, ckpt, attn, ep, zero in choices(cfg, at, (dp, cp, tp, pp), schedule, fixed):
                    lay = Layout(dp, tp, pp, micro, schedule, sp, zero, ckpt, cp, attn, ep)
                    if all(getattr(lay, axis) == value for axis, value in fixed.items()):
                        yield lay


def meshes(cfg, gpus, fixed):
    """dp x cp x tp x pp = gpus"""
    for tp in divisors(gpus):
        for pp in divisors(gpus // tp):
            if cfg.kv_heads % tp or cfg.hidden % tp or pp > cfg.layers:
                continue
            for cp in divisors(gpus // tp // pp):
                dp = gpus // tp // pp // cp
                is_useful = cp == 1 or (cfg.seq >= LONG and cfg.seq // cp >= SHORT)
                if is_useful or "cp" in fixed:
                    yield dp, cp, tp, pp


def schedules(cfg, pp, micro, fixed):
    """-> the fixed one if it can run, or those worth a try"""
    if pp == 1:
        return ["1f1b"]
    least = {"bfs": pp, "zb-h1": pp, "zb-v": 2 * pp - 1, "zb-h2": 2 * pp - 1, "dualpipe-v": 2 * pp}
    wanted = ["gpipe", "1f1b", "zb-h1", "interleaved", "zb-v"]
    if "schedule" in fixed:
        wanted = [fixed["schedule"]]
    found = []
    for name in wanted:
        two_chunks = name in ("interleaved", "bfs", *VEES)
        runs = (2 * pp <= cfg.layers or not two_chunks) and micro >= least.get(name, 1)
        if runs and (name != "interleaved" or micro % pp == 0):
            found.append(name)
    return found


def choices(cfg, at, mesh, schedule, fixed):
    """-> all (sp, ckpt, attn, ep, zero)"""
    dp, cp, tp, pp = mesh
    data = dp * cp
    sps = [False]
    if tp > 1 and cfg.seq // cp % tp == 0:
        sps.append(True)
    if tp > 1 and at.experts:  # whose ranks would all route the same tokens
        sps.remove(False)
    ckpts = CKPTS[:2] if schedule in SPLIT else CKPTS
    eps = divisors(math.gcd(data, at.experts)) if at.experts else [None]
    zeros = [0]
    if data > 1:
        zeros = [0, 1, 2] if pp > 1 else [0, 1, 2, 3]
    return itertools.product(sps, ckpts, attentions(cfg, cp, tp, fixed), eps, zeros)


def attentions(cfg, cp, tp, fixed):
    """-> the choices of attn that hybrid_3d.py can run: the fixed one, or those worth a try"""
    wanted = fixed.get("attn")
    if cp == 1:
        return [wanted or "zigzag"]  # which nothing uses
    tried = [wanted] if wanted else ["zigzag", "ulysses"]
    runs = {"zigzag": cfg.seq % (2 * cp) == 0, "allgather": cfg.seq % (2 * cp) == 0,
            "ring": True, "ulysses": cfg.kv_heads // tp % cp == 0}
    return [name for name in tried if cfg.seq % cp == 0 and runs[name]]


def search(cfg, at):
    """-> [(seconds, layout)] of what fits, fastest first; (bytes, layout) of what needs least of
    all that was tried, None if there is no layout

    at.fixed: {axis: value} to be kept
    """
    fits = []
    tried = []
    for lay in layouts(cfg, at, at.fixed):
        job = job_of(cfg, at, lay)
        needed = assess(job)["memory"]
        tried.append((needed, lay))
        if needed <= 1e9 * at.gpu_memory:
            fits.append((timed(job)["seconds"], lay))
    fits.sort(key=lambda found: (found[0], found[1].cp))  # of equals the one that cuts less
    return fits, min(tried, default=None)
