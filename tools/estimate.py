"""What a layout of hybrid_3d.py costs: bytes of its fullest stage and seconds of a step. search()
looks for the fastest layout.

Parameters, gradients and optimizer are counted on the model itself. Bytes that are sent are those
of hybrid_3d.py's textbook. Activations are what a block keeps for backward times the micro-batches
in flight. What comes and goes besides (logits, gradients inside of a block, what ZeRO gathers) is
its largest tensors alone. All together are mostly within 6% of the peak of a dry run, which is
exact, and within 12%. RMSNorm is taken for torch's fused one: see plan.py.
plan.py says where each term of the time model is from.

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
from common import Block, share
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
    return cfg._replace(kv_heads=cfg.kv_heads or cfg.heads, hidden=cfg.hidden or 4 * cfg.width)


@cache
def counts(cfg):
    """-> the Count of a block without its MLP, and that of an MLP"""
    with torch.device("meta"):
        block = Block(cfg)
    mlp = count("blocks.0.mlp", block.mlp)
    block.mlp = None
    return count("blocks.0", block), mlp


def count(prefix, module):
    cut = 0
    whole = 0
    multiplied = 0
    for name, p in module.named_parameters(prefix):
        if hybrid_3d.kind_of(name) == "matrix":
            cut += p.numel()
        else:
            whole += p.numel()
        if p.dim() == 2:
            multiplied += p.numel()
    return Count(cut, whole, multiplied)


def parameters_of(cfg, experts=0, shared=False):
    """-> how many parameters the whole model has"""
    cfg = resolved(cfg)
    rest, mlp = counts(cfg)
    block = rest.cut + rest.whole
    mlps = 1
    if experts:
        mlps = experts + shared
        block += experts * cfg.width
    block += mlps * (mlp.cut + mlp.whole)
    ends = cfg.vocab * cfg.width
    if cfg.form == "gpt2":
        ends += cfg.seq * cfg.width + 2 * cfg.width
    else:
        ends += cfg.vocab * cfg.width + cfg.width
    return cfg.layers * block + ends


def visits(at):
    """How many MLPs a token visits."""
    if not at.experts:
        return 1
    return routed(at) + at.shared


def routed(at):
    """How many experts a token visits, if all are chosen equally often: a capacity of 1 or more
    then drops nothing, and 0 means no limit."""
    if 0 < at.capacity < 1:
        return at.capacity * at.top_k
    return at.top_k


# ---- a job ---------------------------------------------------------------------


def job_of(cfg, at, lay):
    """-> a layout with its model and cluster. hybrid_3d's functions take it for their args.

    Besides the sizes and the layout's axes:
    b         bytes of a number          tokens   of a micro-batch on a rank
    x         bytes of a micro-batch between two blocks
    cut       tp with sp, else 1: what is outside of tp's Linears is cut by it
    data      dp x cp, the ranks that hold different tokens; copies: those with the same experts
    dense     parameters of a block on a rank, without experts; expert: of its experts
    vee       has rank 0 the embedding and the head?
    blocks    of each rank of pp
    """
    cfg = resolved(cfg)
    job = SimpleNamespace(**lay._asdict(), **cfg._asdict(), cfg=cfg, at=at, batch=at.batch)
    job.experts = at.experts
    job.shared = at.shared
    job.has_mlp = at.shared or not at.experts  # one that tp cuts
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
    job.matmuls = 2 * (rest.multiplied + visits(at) * mlp.multiplied)
    job.of_head = 2 * cfg.width * cfg.vocab
    job.vee = lay.schedule in VEES
    job.v = 2 if job.vee or lay.schedule in ("interleaved", "bfs") else 1
    job.blocks = blocks_of(cfg.layers, lay.pp, job.v, job.vee)
    return job


@cache
def blocks_of(layers, pp, v, vee):
    """-> how many blocks each rank has"""
    found = []
    for rank in range(pp):
        chunks = range(rank, pp * v, pp)
        if vee:
            chunks = [rank, 2 * pp - 1 - rank]
        found.append(sum(len(share(layers, pp * v, chunk)) for chunk in chunks))
    return found


def ends(job, stage):
    """-> has the stage the embedding? has it the head?"""
    return stage == 0, stage == (0 if job.vee else job.pp - 1)


# ---- memory of a stage, in bytes -------------------------------------------------

HELD = ("parameters", "gradients", "optimizer", "activations", "working")


def assess(job, stage=None):
    """-> {what: bytes} of HELD and "memory", all of it; of the fullest stage, or of this one."""
    # rank 0 has the embedding and most in flight, the last one the head
    stages = {0, job.blocks.index(max(job.blocks)), job.pp - 1}
    if stage is not None:
        stages = {stage}
    return max((held(job, one) for one in stages), key=lambda found: found["memory"])


def held(job, stage):
    """-> the same of a stage"""
    outside = outside_of_blocks(job, stage)
    found = states(job, stage, outside)
    kept = kept_by_block(job)
    logits = 0
    if ends(job, stage)[1]:
        logits = 4 * job.tokens * job.vocab / job.tp  # in fp32
    found["activations"] = in_flight(job, stage) * job.blocks[stage] * kept
    if logits:  # and the last norm's input and result
        found["activations"] += before_loss(job) * (logits + 2 * job.x / job.cut)
    found["working"] = working(job, stage, outside, kept, logits)
    found["memory"] = sum(found.values())
    return found


def outside_of_blocks(job, stage):
    """-> how many parameters a stage has there"""
    C = job.width
    first, last = ends(job, stage)
    padded = -(-job.vocab // job.tp) * job.tp
    embedding = padded * C / job.tp
    tied = job.form == "gpt2"
    total = 0
    if first:
        total += embedding
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


def states(job, stage, outside):
    """Parameters, gradients and AdamW's states."""
    whole = job.blocks[stage] * (job.dense + job.expert) + outside
    cut = cut_by_zero(job, stage)
    per_parameter = 12 if job.b == 2 else 8  # with bf16 a copy in fp32 besides
    found = {"parameters": job.b * whole, "gradients": job.b * whole}
    found["optimizer"] = per_parameter * (cut if job.zero else whole)
    if job.zero == 3:
        found["parameters"] = job.b * cut
    if job.zero >= 2:
        found["gradients"] = job.b * cut
        if job.form == "gpt2" and job.pp > 1:  # the tied one stays whole until stages have summed
            found["gradients"] += job.b * outside * (1 - 1 / job.data)
    return found


def in_flight(job, stage):
    """Micro-batches between their first forward and their last backward."""
    M = job.micro
    pp = job.pp
    if job.schedule in ("gpipe", "bfs"):
        return M
    if job.schedule == "1f1b":
        return min(M, pp - stage)
    if job.schedule == "interleaved":  # counted in chunks, two of which are a rank's part
        return min(2 * M, 3 * pp - 2 * stage - 1) / 2
    if job.schedule == "zb-h2":
        return min(M, 2 * pp - 1)
    if job.schedule == "dualpipe-v":
        return pp + 1 / 2  # with 2 pp micro-batches or more: see schedules()
    return min(M, pp)


def kept_by_block(job):
    """What a block keeps of a micro-batch for backward (Korthikanti 2022, section 4)."""
    if job.ckpt == "full":
        return job.x / job.cut
    outside = 4  # the inputs of two norms and their results, in units of x
    inside = 2 + 2 * job.kv_heads / job.heads  # q, what attention makes; k, v
    if job.attn == "ulysses" and job.cp > 1:
        inside += 1  # what it makes, before and behind the all-to-all
    if job.has_mlp:
        inside += kept_by_mlp(job)
    else:
        outside -= 1
    if job.ckpt == "selective":
        outside -= 2 if job.has_mlp else 1
    total = outside * job.x / job.cut + inside * job.x / job.tp
    if job.experts:
        # a row to an expert: sorted, in its MLP, its answer, back again; K answers of a token
        rows = routed(job.at) * (3 + kept_by_mlp(job)) + job.at.top_k
        router = 0 if job.ckpt == "selective" else 4 / job.b  # its input in fp32
        total += (rows + router) * job.x / job.tp
    return total


def kept_by_mlp(job):
    """In units of x: up and gelu's result; gate, up, silu's result and their product."""
    tensors = 2 if job.form == "gpt2" else 4
    if job.ckpt == "selective":
        tensors //= 2
    return tensors * job.hidden / job.width


def before_loss(job):
    """Micro-batches whose logits are there, and whose backward has not begun."""
    if job.schedule in ("gpipe", "bfs"):
        return job.micro
    return 1


def working(job, stage, outside, kept, logits):
    """What comes and goes beside the activations: the most of the loss and a block's backward."""
    # log-probabilities and their gradient. tp's cross-entropy makes it in their place
    at_loss = logits * (1 if job.tp > 1 else 2)
    inside = in_backward(job, stage, kept)
    gathered = 0
    unit = job.b * (job.dense + job.expert)
    if job.zero == 3:  # a block in use, the next one on its way, and what is outside of blocks
        gathered = min(2, job.blocks[stage]) * unit + job.b * outside
    if job.zero >= 2:  # gradients of a block are whole until ranks have summed them
        inside += unit
        if job.pp == 1:
            inside += job.b * outside
    return max(at_loss, inside) + gathered


def in_backward(job, stage, kept):
    """What is made again of a block, and gradients of its widest tensors."""
    again = 0
    if job.ckpt == "full":
        whole = SimpleNamespace(**vars(job))
        whole.ckpt = "none"
        again = kept_by_block(whole) - kept
    # a tensor of all the hidden widths that a token visits
    hidden = visits(job.at) * job.hidden / job.width * job.x / job.tp
    if job.ckpt == "selective":
        again = hidden
    of_mlp = 1 if job.form == "gpt2" else 2
    wide = 2 * job.x + of_mlp * hidden
    total = again + wide
    if job.schedule in SPLIT:
        # from B to W gradients of all Linears wait: out and down; q, k, v; up and gate
        of_qkv = (1 + 2 * job.kv_heads / job.heads) * job.x / job.tp
        total += job.blocks[stage] / job.v * (wide + of_qkv)
    if job.cp > 1 and job.attn != "ulysses":
        # keys and values of another rank, and two pairs of gradients in fp32 or more
        pairs = 1 + 2 * max(job.b, 4) / job.b
        total += pairs * 2 * job.kv_heads / job.heads * job.x / job.tp
    return total

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
    heavy, mean, peak = shares(job)
    most = max(job.blocks)
    speed = 1e12 * at.gpu_tflops * at.efficiency
    own = job.micro * job.tokens  # a rank's tokens of a step
    found = {
        "matmul": 3 * own * forward(job) / job.tp * heavy / speed,
        "recompute": own * forward_again(job) / job.tp * most / speed,
        "bound": own * most * memory_traffic(job) / (1e12 * at.hbm),
        "tp": bytes_on_tp(job, most) / bandwidth(at, job.tp),
        "cp": seconds_on_cp(job, most, speed),
        "ep": bytes_on_ep(job, most) / bandwidth(at, job.tp * job.ep),
    }
    work = sum(found.values())
    found["bubble"] = (job.pp - 1) / job.micro * IDLE[job.schedule] * mean / heavy * work
    found["pp"] = bytes_on_pp(job) / bandwidth(at, at.gpus)
    found["dp"] = seconds_on_dp(job, peak, work)
    stepped = cut_by_zero(job, peak)
    if not job.zero:
        stepped = job.blocks[peak] * (job.dense + job.expert) + outside_of_blocks(job, peak)
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


def shares(job):
    """-> the work of the heaviest rank and that of an average one, in blocks, where the head counts
    as so many as its FLOPs are; the rank with the most blocks"""
    head = job.of_head / forward(job, job.seq)
    head_rank = 0 if job.vee else job.pp - 1
    heavy = max(max(job.blocks), job.blocks[head_rank] + head)
    return heavy, (job.layers + head) / job.pp, job.blocks.index(max(job.blocks))


def bandwidth(at, neighbours):
    """Bytes a second among so many ranks in a row: inside a node, if they divide it."""
    if at.node % neighbours == 0:
        return 1e9 * at.bandwidth_intra
    return 1e9 * at.bandwidth_inter


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
        of_mlp = 2 if job.form == "gpt2" else 5  # gelu; silu and the product with up
        numbers = 10 * C / job.cut + of_mlp * visits(job.at) * job.hidden / job.tp
        if job.experts:  # rows are picked, sorted, put back and added up
            numbers += 8 * routed(job.at) * C / job.tp
    passes = 3 if job.ckpt == "none" else 4
    return passes * job.b * numbers


def bytes_on_tp(job, blocks):
    """Nothing hides them."""
    sent = hybrid_3d.sent_on_tp(job, job.b, blocks, False, False)
    if job.at.megatron_2021 and job.ckpt == "full":  # both all-reduces of a block again, not one
        sent += 2 * blocks * (job.tp - 1) / job.tp * job.micro * job.x
    return sent


def seconds_on_cp(job, blocks, speed):
    """Hops travel behind attention, other collectives do not."""
    seconds = hybrid_3d.sent_on_cp(job, job.b, blocks) / bandwidth(job.at, job.tp * job.cp)
    if job.attn in ("ring", "zigzag"):
        attention = 3 * job.micro * job.tokens * (forward(job) - job.matmuls) / job.tp
        seconds -= min(seconds, blocks * attention / speed)
    return seconds


def bytes_on_ep(job, blocks):
    """Rows to experts and back, in forward and backward, which nothing hides."""
    if not job.experts:
        return 0
    times = 6 if job.ckpt == "full" else 4
    rows = job.micro * job.tokens / job.tp * routed(job.at)
    return blocks * times * rows * job.b * job.width * (job.ep - 1) / job.ep


def bytes_on_pp(job):
    """Of a rank whose stages all have two neighbours; nothing hides them."""
    if job.pp == 1:
        return 0
    sent = hybrid_3d.sent_on_pp(job, job.b, 2 * job.v)
    if job.at.megatron_2021:  # what all ranks of tp have is sent once (Narayanan 2021, 4.1)
        sent *= job.cut / job.tp
    return sent


def seconds_on_dp(job, rank, work):
    """What is left of the sums over copies when backward has hidden its part of them."""
    moved = {2: job.micro + 1, 3: 3 * job.micro}.get(job.zero, 2)
    of_ends = moved
    if job.pp > 1 and job.form == "gpt2":  # tied: summed once
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

    Not there: with pp 1 another schedule than 1f1b; others than gpipe and 1f1b with too few
    micro-batches to fill the pipeline; ckpt full where backward is in two actions, for W would
    wait with all that was made again. Not there unless `fixed` names them: bfs where interleaved
    is possible, and zb-h2 where zb-v is, since interleaved and zb-v take the same time with less
    memory; dualpipe-v, ring and allgather, which hide less; cp for short sequences.
    """
    cfg = resolved(cfg)
    for dp, cp, tp, pp in meshes(cfg, at.gpus, fixed):
        if at.batch % dp:
            continue
        for micro in divisors(at.batch // dp):
            for schedule in schedules(cfg, pp, micro, fixed):
                for sp, ckpt, attn, ep, zero in choices(cfg, at, (dp, cp, tp, pp), schedule, fixed):
                    lay = Layout(dp=dp, tp=tp, pp=pp, micro=micro, schedule=schedule, sp=sp,
                                 zero=zero, ckpt=ckpt, cp=cp, attn=attn, ep=ep)
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
    """-> those worth a try; zb-h2, bfs and dualpipe-v also where `fixed` names them"""
    if pp == 1:
        return ["1f1b"]
    several = 2 * pp <= cfg.layers  # can every rank have two chunks?
    least = {"bfs": pp, "zb-h1": pp, "zb-v": 2 * pp - 1, "zb-h2": 2 * pp - 1, "dualpipe-v": 2 * pp}
    possible = ["gpipe", "1f1b", "zb-h1"]
    if several and micro % pp == 0:
        possible.append("interleaved")
    elif several:
        possible.append("bfs")
    if several:
        possible.append("zb-v")
    else:
        possible.append("zb-h2")
    wanted = fixed.get("schedule")
    if wanted == "zb-h2" or (wanted in ("bfs", "dualpipe-v") and several):
        possible = [wanted]
    return [name for name in possible if micro >= least.get(name, 1)]


def choices(cfg, at, mesh, schedule, fixed):
    """-> all (sp, ckpt, attn, ep, zero)"""
    dp, cp, tp, pp = mesh
    sps = [False]
    if tp > 1 and cfg.seq // cp % tp == 0:
        sps.append(True)
    if tp > 1 and at.experts:  # whose ranks would all route the same tokens
        sps.remove(False)
    ckpts = list(CKPTS)
    if schedule in SPLIT:
        ckpts.remove("full")
    eps = [None]
    if at.experts:
        eps = divisors(math.gcd(dp * cp, at.experts))
    zeros = [0]
    if dp * cp > 1:
        zeros += [1, 2]
    if dp * cp > 1 and pp == 1:
        zeros.append(3)
    return itertools.product(sps, ckpts, attentions(cfg, cp, tp, fixed), eps, zeros)


def attentions(cfg, cp, tp, fixed):
    """-> the choices of attn that hybrid_3d.py can run: the fixed one, or those worth a try"""
    wanted = fixed.get("attn")
    if cp == 1:
        return [wanted or "zigzag"]  # which nothing uses
    runs = {
        "ring": cfg.seq % cp == 0,
        "zigzag": cfg.seq % (2 * cp) == 0,
        "allgather": cfg.seq % (2 * cp) == 0,
        "ulysses": cfg.seq % cp == 0 and cfg.kv_heads // tp % cp == 0,
    }
    tried = [wanted] if wanted else ["zigzag", "ulysses"]
    return [name for name in tried if runs[name]]


def search(cfg, at, free=()):
    """-> [(seconds, layout)] of what fits, fastest first; (bytes, layout) of what needs least of
    all that was tried, None if there is no layout

    at.fixed: {axis: value} to be kept, but for the axes that are free.
    """
    fixed = {axis: value for axis, value in at.fixed.items() if axis not in free}
    fits = []
    least = None
    for lay in layouts(cfg, at, fixed):
        job = job_of(cfg, at, lay)
        needed = (assess(job)["memory"], lay)
        if needed[0] <= 1e9 * at.gpu_memory:
            fits.append((timed(job)["seconds"], lay))
        if least is None or needed < least:
            least = needed
    fits.sort(key=lambda found: (found[0], found[1].cp))  # of equals the one that cuts less
    return fits, least
