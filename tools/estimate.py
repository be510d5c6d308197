"""What a layout of hybrid_3d.py costs: bytes of its fullest stage, and seconds of a step.

    cfg   common.GPTConfig          at   plan.py's flags: the cluster and the batch
    lay   a Layout                  job  all of these, with what several formulas need: see job_of

Parameters, gradients and optimizer are counted on the model. Activations are what a block keeps for
backward (Korthikanti 2022, section 4) times the micro-batches in flight; what comes and goes beside
them is its largest tensors alone: a dry run has the exact peak. Letters are those of common.py. A
stage is here all that a rank of pp holds, its chunks together. plan.py says where each term of the
time is from; tests/test_plan.py holds all of it beside dry runs, the simulator and papers.
"""
from collections import Counter, namedtuple
from functools import cache
from types import SimpleNamespace

import torch

from common import Block, share
from harness.flags import DTYPES

Layout = namedtuple("Layout", "dp tp pp micro schedule sp zero ckpt cp attn ep",
                    defaults=(1, "zigzag", None))  # ep: None without experts
# The bubble is so many times (pp - 1) of a micro-batch's F + B + W, where F = B = W
IDLE = {"1f1b": 1, "interleaved": 1 / 2, "zb-v": 0}

# ---- a job ---------------------------------------------------------------------


@cache
def counts(cfg):
    """-> numbers in matrices and in vectors: of a block without its MLP, of an MLP."""
    found = Counter()
    with torch.device("meta"):
        block = Block(cfg)
    for name, p in block.named_parameters():
        found[name.startswith("mlp."), p.dim()] += p.numel()
    return found[False, 2], found[False, 1], found[True, 2], found[True, 1]


def parameters_of(cfg, at):
    """-> how many parameters the whole model has"""
    one_gpu = Layout(1, 1, 1, 1, "1f1b", sp=False, zero=0, ckpt="none")
    return int(parameters_on(job_of(cfg, at, one_gpu), 0, is_cut=False))


def job_of(cfg, at, lay):
    """-> a layout with its model and cluster. Besides the sizes and the layout's axes:

    b         bytes of a number          x     bytes of a micro-batch between two blocks
    cut       tp with sp, else 1: what is outside of tp's Linears is cut by it
    data      dp x cp, the ranks that hold different tokens; copies: those of tp, too, with the same
              experts
    dense     parameters of a block on a rank, without experts; expert: of its experts
    routed    experts that a token visits, all being chosen equally often; visits: MLPs, all told
    q, kv     width of all heads, of all key-value heads, by C; f: of an MLP's hidden tensors
    blocks    of each rank of pp         head_at  the one with the head; rank 0 has the embedding
    """
    job = SimpleNamespace(**lay._asdict(), **cfg.resolved()._asdict(), at=at)
    job.has_mlp = at.shared or not at.experts  # one that tp cuts
    job.routed = at.top_k if at.experts else 0
    job.visits = job.routed + job.has_mlp
    job.ep = lay.ep or 1
    job.b = DTYPES[at.dtype].itemsize
    job.tokens = at.batch * cfg.seq / (lay.dp * lay.cp * lay.micro)  # of a micro-batch on a rank
    job.x = job.b * job.tokens * cfg.width
    job.cut = lay.tp if lay.sp else 1
    job.data = lay.dp * lay.cp
    job.copies = lay.tp * job.data // job.ep
    matrices, vectors, of_mlp, vectors_of_mlp = counts(cfg)
    job.dense = matrices / lay.tp + vectors + at.experts * cfg.width
    if job.has_mlp:
        job.dense += of_mlp / lay.tp + vectors_of_mlp
    job.expert = at.experts / job.ep * (of_mlp + vectors_of_mlp)
    job.q = job.heads * job.head_dim / cfg.width
    job.kv = job.kv_heads * job.head_dim / cfg.width
    job.f = job.hidden / cfg.width
    job.gated = of_mlp > 2 * job.hidden * cfg.width  # gate, up and down
    job.matmuls = 2 * (matrices + job.visits * of_mlp)  # FLOPs of a token's forward in a block
    job.of_head = 2 * cfg.width * cfg.vocab
    job.vee = lay.schedule == "zb-v"  # down the ranks and up again
    job.head_at = 0 if job.vee else lay.pp - 1
    job.v = 1 if lay.schedule == "1f1b" else 2  # chunks of a rank
    job.blocks = blocks_of(cfg.layers, lay.pp, job.v, job.vee)
    return job


@cache
def blocks_of(layers, pp, v, vee):
    """-> how many blocks each rank has"""
    found = []
    for rank in range(pp):
        chunks = [rank, 2 * pp - 1 - rank] if vee else range(rank, pp * v, pp)
        found.append(sum(len(share(layers, pp * v, chunk)) for chunk in chunks))
    return found


# ---- memory of a stage, in bytes -------------------------------------------------


def assess(job):
    """-> what the fullest stage holds: {what: bytes}, and "memory", all of it."""
    # rank 0 has the embedding and most in flight, the last one the head
    stages = {0, job.blocks.index(max(job.blocks)), job.pp - 1}
    return max((held(job, one) for one in stages), key=lambda found: found["memory"])


def held(job, stage):
    """-> the same of a stage"""
    found = states(job, stage)
    logits = 0
    if stage == job.head_at:
        logits = 4 * job.tokens * job.vocab / job.tp  # in fp32
    found["activations"] = in_flight(job, stage) * job.blocks[stage] * kept_by_block(job, job.ckpt)
    found["working"] = working(job, stage, logits)
    found["memory"] = sum(found.values())
    return found


def embedding(job):
    return -(-job.vocab // job.tp) * job.width  # of the first ranks of tp


def outside_of_blocks(job, stage):
    """-> how many parameters a stage has there"""
    total = 0
    if stage == 0:
        total += embedding(job)
        if job.form.learned_positions:
            total += job.seq * job.width / job.tp
    if stage == job.head_at:
        total += job.width * (2 if job.form.bias else 1)  # the last norm
        if not (stage == 0 and job.form.tied):
            total += embedding(job)  # the head
    return total


def tied_on(job, stage):
    """-> how many of these another stage has, too: in a ZeRO-1 of their own over both stages"""
    is_tied = job.form.tied and job.head_at > 0 and stage in (0, job.head_at)
    return embedding(job) if is_tied else 0


def parameters_on(job, stage, is_cut):
    """-> how many a rank of a stage has; is_cut: its part where ZeRO shares out their copies"""
    dense = job.blocks[stage] * job.dense + outside_of_blocks(job, stage)
    experts = job.blocks[stage] * job.expert
    if is_cut:
        return (dense - tied_on(job, stage) / 2) / job.data + experts / job.copies
    return dense + experts


def states(job, stage):
    """Parameters, gradients and AdamW's states."""
    per_parameter = 12 if job.b == 2 else 8  # with bf16 a copy in fp32 besides
    found = {
        "parameters": job.b * parameters_on(job, stage, job.zero == 3),
        "gradients": job.b * parameters_on(job, stage, job.zero >= 2),
        "optimizer": per_parameter * parameters_on(job, stage, job.zero >= 1),
    }
    if job.zero >= 2:  # of what is tied only the optimizer's states are cut
        found["gradients"] += job.b * tied_on(job, stage) * (1 - 1 / (2 * job.data))
    return found


def in_flight(job, stage):
    """Micro-batches between their first forward and their last backward."""
    if job.schedule == "1f1b":
        return min(job.micro, job.pp - stage)
    if job.schedule == "zb-v":
        return min(job.micro, job.pp)
    # counted in chunks, two of which are a rank's part
    return min(2 * job.micro, 3 * job.pp - 2 * stage - 1) / 2


def kept_by_block(job, ckpt):
    """What a block keeps of a micro-batch for backward."""
    if ckpt == "full":
        return job.x / job.cut
    outside = 4 if job.has_mlp else 3  # the inputs of norms and their results; experts keep theirs
    inside = 2 * job.q + 2 * job.kv  # q, what attention makes; k, v
    if job.form.qk_norm:
        inside += job.q + job.kv  # these before their norms, too
    of_mlp = 2 * job.f  # up, gelu's result
    if job.gated:
        of_mlp = 4 * job.f  # gate, up, silu's result, their product
    if ckpt == "selective":
        of_mlp /= 2
        outside = 2
    if job.has_mlp:
        inside += of_mlp
    # a row to an expert: sorted, in its MLP, its answer, back again; K answers of a token
    inside += job.routed * (3 + of_mlp) + job.routed
    if job.routed and ckpt == "none":
        inside += 4 / job.b  # the router's input in fp32
    return outside * job.x / job.cut + inside * job.x / job.tp


def working(job, stage, logits):
    """What comes and goes beside the activations: the most of the loss and a block's backward."""
    # the last norm's input and result, logits, log-probabilities, and the gradient, which tp's
    # cross-entropy makes in the place of these
    at_loss = 2 * job.x / job.cut + logits * (2 if job.tp > 1 else 3)
    # gradients of a block's widest tensors, and what it makes again
    hidden = job.visits * job.f * job.x / job.tp
    inside = 2 * job.x + hidden
    if job.gated:
        inside += hidden
    inside += kept_by_block(job, "none") - kept_by_block(job, job.ckpt)
    if job.schedule == "zb-v":  # from B to W gradients of all Linears wait
        inside *= 1 + job.blocks[stage] / job.v
    unit = job.b * (job.dense + job.expert)
    outside = job.b * outside_of_blocks(job, stage)
    if job.zero >= 2:  # gradients of a block are whole until ranks have summed them
        inside += unit
        if job.pp == 1:
            inside += outside
    most = max(at_loss, inside)
    if job.zero == 3:  # a block in use, the next one on its way, and what is outside of blocks
        most += min(2, job.blocks[stage]) * unit + outside
    return most


# ---- seconds of a step -----------------------------------------------------------

PARTS = ("matmul", "recompute", "bound", "tp", "cp", "ep", "bubble", "pp", "dp", "adamw")


def timed(job):
    """-> {part: seconds} of PARTS, "seconds" of a step, "mfu" and "rate", tokens a second."""
    at = job.at
    most = max(job.blocks)
    # the work of the heaviest rank and that of an average one, in blocks; the head is some of them
    head = job.of_head / forward(job)
    heavy = max(most, job.blocks[job.head_at] + head)
    mean = (job.layers + head) / job.pp
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
    arithmetic = found["matmul"] + found["recompute"] + found["bound"]
    idle = (job.pp - 1) / job.micro * IDLE[job.schedule] * mean / heavy
    found["bubble"] = idle * sum(found.values())
    # a rank whose stages all have two neighbours
    found["pp"] = 0
    if job.pp > 1:
        found["pp"] = 2 * job.v * job.micro * job.x / job.cut / bandwidth(at, at.gpus)
    fullest = job.blocks.index(most)
    found["dp"] = seconds_on_dp(job, fullest, arithmetic)
    stepped = parameters_on(job, fullest, job.zero >= 1)
    # AdamW reads and writes gradients and states
    found["adamw"] = (24 + 2 * job.b) * stepped / (1e12 * at.hbm)
    found["seconds"] = sum(found.values())
    found["rate"] = at.batch * job.seq / found["seconds"]
    flops = 3 * (job.layers * forward(job) + job.of_head)  # of a token
    found["mfu"] = flops * found["rate"] / at.gpus / 1e12 / at.gpu_tflops
    return found


def bandwidth(at, neighbours):
    """Bytes a second among so many ranks in a row: inside a node, if they divide it."""
    return 1e9 * (at.bandwidth_inter if at.node % neighbours else at.bandwidth_intra)


def forward(job):
    """FLOPs of a token in a block. Attention counts T keys, as in papers, where causal attention
    sees half of T on average."""
    return job.matmuls + 4 * job.seq * job.q * job.width


def forward_again(job):
    """FLOPs that ckpt full repeats: all but the last matmul, which experts' gates want."""
    if job.ckpt != "full":
        return 0
    return forward(job) - 2 * job.width * job.hidden * job.has_mlp


def memory_traffic(job):
    """Bytes per token and block of what is no matmul: norms, residuals, gelu, read and written."""
    C = job.width
    of_mlp = 5 if job.gated else 2  # silu and the product with up; gelu
    numbers = 10 * C / job.cut + of_mlp * job.visits * job.hidden / job.tp
    numbers += 8 * job.routed * C / job.tp  # rows are picked, sorted, put back and added up
    passes = 3 if job.ckpt == "none" else 4
    return passes * job.b * numbers


def bytes_on_tp(job, blocks):
    """Nothing hides them. f and g of half a block, in forward and backward, 4 times x."""
    half = 5 if job.sp else 4
    halves = 1 + job.has_mlp
    times = half * halves
    if job.ckpt == "full":  # all again but the last; f sends nothing without --sp
        times += (1 + halves) if job.sp else 2
    return (job.tp - 1) / job.tp * job.micro * blocks * times * job.x


def seconds_on_cp(job, blocks, speed):
    """K and V to all other ranks, and their gradients; ulysses: q, k, v and what attention makes.
    Hops travel behind attention, other collectives do not."""
    passes = 3 if job.ckpt == "full" else 2  # forward, again, backward
    numbers = job.cp * 2 * job.kv * (job.b * passes + max(job.b, 4)) / job.b
    if job.attn == "ulysses":
        numbers = 2 * (job.q + job.kv) * passes
    sent = (job.cp - 1) / job.cp * job.micro * blocks * numbers * job.x / job.tp
    seconds = sent / bandwidth(job.at, job.tp * job.cp)
    if job.attn == "zigzag":
        attention = 3 * job.micro * job.tokens * (forward(job) - job.matmuls) / job.tp
        seconds -= min(seconds, blocks * attention / speed)
    return seconds


def bytes_on_ep(job, blocks):
    """Rows to experts and back, in forward and backward, which nothing hides."""
    times = 6 if job.ckpt == "full" else 4
    rows = job.micro * job.tokens / job.tp * job.routed
    return blocks * times * rows * job.b * job.width * (job.ep - 1) / job.ep


def bytes_on_dp(job, rank):
    """The sums over copies, and what ZeRO gathers."""
    moved = {2: job.micro + 1, 3: 3 * job.micro}.get(job.zero, 2)
    tied = tied_on(job, rank)
    dense = moved * (job.blocks[rank] * job.dense + outside_of_blocks(job, rank) - tied)
    experts = moved * job.blocks[rank] * job.expert
    sent = dense * (job.data - 1) / job.data + experts * (job.copies - 1) / job.copies
    sent += 2 * tied * (2 * job.data - 1) / (2 * job.data)  # summed once, over both stages
    return job.b * sent


def seconds_on_dp(job, rank, arithmetic):
    """What hides behind arithmetic is that of the last backward; with ZeRO-2 of each one, with
    ZeRO-3 of forward, too. A unit travels alone: the last that is summed, or the first gathered.
    Nothing hides the parameters that ZeRO-1 and 2 gather."""
    seconds = bytes_on_dp(job, rank) / bandwidth(job.at, job.tp * job.data)
    rounds = job.micro if job.zero >= 2 else 1
    sums = {1: 1 / 2, 2: job.micro / (job.micro + 1)}.get(job.zero, 1)  # of all these bytes
    behind = seconds * sums * (1 - 1 / (1 + job.blocks[rank]))
    room = arithmetic * rounds / job.micro
    if job.zero < 3:
        room *= 2 / 3  # backward's
    return seconds - min(behind, room)
