"""All layouts of hybrid_3d.py, and what each costs in bytes and seconds: a function per formula.

Memory is that of hybrid_3d's dry runs, within 2%: tests/test_plan.py compares them. The time model
is the textbook's, of the slowest stage: plan.py says where each term is from.

A formula is a function. Its parameters are the names of what it needs: results of the functions
above it; the model's B T C H V L (V: padded to divide by tp); the layout's dp tp pp micro sp zero
ckpt schedule; the flags of plan.py; and

    b      bytes of a number                   stage, blocks   a rank's place on pp, its blocks
    v      chunks of layers per rank           first, last     1 or 0: has it embedding, head?
    cut    tp with sp, else 1                  most, mean      blocks of the fullest stage, and of
    skip   see SKIP                                            all on average
                                               heavy           most, or the last stage's with the
                                                               head's work

    evaluate([N, x], {"B": 8, "T": 128, ..})   adds {"N": .., "x": ..}
"""
import inspect
import itertools
from collections import namedtuple
from functools import cache

from common import DTYPES, share

Layout = namedtuple("Layout", "dp tp pp micro schedule sp zero ckpt")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
CKPTS = ("none", "selective", "full")

# ---- memory of a stage, in bytes ---------------------------------------------


def N(B, T, dp, micro):
    """tokens of a micro-batch"""
    return B * T / (dp * micro)


def x(b, N, C):
    """a micro-batch between two blocks"""
    return b * N * C


def block(C, tp):
    """how many parameters a block has"""
    return (12 * C + 7) * C / tp + 6 * C


def edges(first, last, pp, V, T, C, tp):
    """how many are outside the blocks: embeddings, last norm, the head's copy of tok"""
    count = 0
    if first:
        count += (V + T) * C / tp
    if last:
        count += 2 * C
    if last and pp > 1:
        count += V * C / tp
    return count


def parameters(b, blocks, block, edges):
    """of a stage"""
    return b * (blocks * block + edges)


def gradients(parameters):
    """as many"""
    return parameters


def optimizer(parameters, b, dp, zero):
    """AdamW in fp32; with bf16 a copy of the parameters besides"""
    per_parameter = 8
    if b == 2:
        per_parameter = 12
    shards = 1
    if zero:
        shards = dp
    return per_parameter * parameters / b / shards


def flight(schedule, micro, pp, stage):
    """micro-batches in flight: between their first forward and their last backward"""
    if schedule == "gpipe":
        return micro
    if schedule == "1f1b":
        return min(micro, pp - stage)
    if schedule == "zb-h1":
        return min(micro, pp)
    return min(2 * micro, 3 * pp - 2 * stage - 1) / 2  # of interleaved's chunks, half a stage each


def whole(x, cut, tp, b, N, H):
    """what a block keeps for backward: Korthikanti 2022, section 4"""
    return 4 * x / cut + 12 * x / tp + 4 * b * N / cut + 4 * N * H / tp


def kept(ckpt, whole, x, cut, tp):
    """what it keeps with checkpointing"""
    if ckpt == "none":
        return whole
    if ckpt == "selective":
        return whole - 2 * x / cut - 4 * x / tp
    return x / cut


def late(schedule, stage, flight):
    """micro-batches in flight whose B is done, but not W"""
    if schedule != "zb-h1":
        return 0
    return min(stage, flight - 1)


def waits(blocks, x, tp, b, C, first, V, last, N):
    """what W of such a micro-batch waits with: inputs and gradients of Linears, or their product"""
    if tp == 1:
        linears = 16 * x
        head = b * N * V + x
    else:
        linears = 2 * x + 5 * x / tp + 7 * b * C * C / tp
        head = b * V * C / tp
    total = blocks * linears
    if first:
        total += b * V * C / tp
    if last:
        total += head
    return total


def activations(flight, late, blocks, kept, waits):
    """of all micro-batches in flight"""
    return (flight - late) * blocks * kept + late * waits


def logits(last, N, V, tp, x, cut):
    """of the last stage: what the loss of a micro-batch keeps"""
    if not last:
        return 0
    return 4 * N * V / tp + 2 * x / cut


def queue(schedule, micro):
    """micro-batches whose loss is done, but not B"""
    if schedule == "gpipe":
        return micro
    return 1


def loss(queue, logits, last, tp, N, V, x, pp, v, cut):
    """log-probabilities, and what backward makes of them"""
    if not last:
        return queue * logits
    copies = 2
    if tp > 1:  # tensor_parallel.py makes the gradient in the place of the softmax
        copies = 1
    boundaries = 1
    if v > 1:
        boundaries += min(pp, 3)
    return queue * logits + copies * 4 * N * V / tp + x / 4 + boundaries * x / cut


def waiting(pp, v, micro, first, flight, queue):
    """received from other stages and not used yet: micro-batches"""
    if pp == 1:
        return 0
    if v > 1:
        return min(3, micro - 1)
    if first:
        return flight
    if queue == 1:
        return 2
    return 1


def again(ckpt, whole, schedule, tp, x):
    """made again for the backward of a block"""
    if ckpt == "full":
        return whole
    if ckpt == "selective" and (schedule != "zb-h1" or tp > 1):
        return 4 * x / tp
    return 0


def inside(again, x, tp, waiting, cut, sp, queue, logits, schedule, waits, blocks, kept):
    """what comes and goes in the backward of a block"""
    total = again + 5 * x / tp + x / 4 + (1 + waiting) * x / cut + (queue - 1) * logits
    if sp:
        total += 2 * x
    if schedule == "zb-h1":
        total += max(0, waits - blocks * kept)
    return total


def step(b, block, edges, dp, zero):
    """what comes and goes in AdamW: with bf16 the gradients in fp32, a unit at a time"""
    if b != 2:
        return 0
    shards = 1
    if zero:
        shards = dp
    return 4 * max(block, edges) / shards


def working(loss, inside, step, activations):
    """what comes and goes, at most. AdamW has no activations beside it"""
    return max(loss, inside, step - activations)


MEMORY = [
    N, x, block, edges, parameters, gradients, optimizer, flight, whole, kept, late, waits,
    activations, logits, queue, loss, waiting, again, inside, step, working,
]
HELD = ("parameters", "gradients", "optimizer", "activations", "working")

# ---- seconds of a step, all micro-batches ------------------------------------

# While a pipeline fills or drains, a stage idles 1/SKIP of a micro-batch's time
SKIP = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 3}
# (F + B + W) / (F + B - W): W is without q, k, v and up, 5/12 of F, and B is 19/12
SKIP_TP = {**SKIP, "zb-h1": 36 / 26}


def own(B, T, dp):
    """tokens of a copy"""
    return B * T / dp


def speed(gpu_tflops, efficiency):
    """FLOPs a second of matmuls"""
    return 1e12 * gpu_tflops * efficiency


def matmul(own, C, T, tp, heavy, speed):
    """forward and backward of the heaviest stage"""
    return own * (72 * C * C + 12 * T * C) / tp * heavy / speed


def recompute(ckpt, megatron_2021, own, C, T, tp, most, speed):
    """what ckpt full does again: all but the last matmul, which Megatron 2021 repeated as well"""
    if ckpt != "full":
        return 0
    matmuls = 16
    if megatron_2021:
        matmuls = 24
    return own * (matmuls * C * C + 4 * T * C) / tp * most / speed


def traffic(megatron_2021, C, cut, tp, H, T):
    """norms, residuals, gelu, read and written: bytes per token and pass of a block, in bf16"""
    if megatron_2021:  # and, unfused, the attention's T x T
        return 22 * C / cut + (16 * C + 11 * H * T) / tp
    return 20 * C / cut + 16 * C / tp


def bound(own, most, traffic, b, ckpt, hbm):
    """memory-bound work"""
    passes = 3
    if ckpt != "none":
        passes = 4
    return own * most * traffic * b / 2 * passes / (1e12 * hbm)


def numbers(sp, ckpt, megatron_2021):
    """sent on tp per token and block, in C, as tensor_parallel.py says"""
    if sp:
        forward_again = 3
        count = 10
    else:
        forward_again = 2
        count = 8
        if megatron_2021:
            forward_again = 4
    if ckpt == "full":
        count += forward_again
    return count


def tp_time(own, most, b, C, numbers, tp, tp_bandwidth):
    """sends on tp, which nothing hides"""
    return own * most * b * C * numbers * (tp - 1) / tp / tp_bandwidth


def calls(micro, most, tp, numbers, sp, pp, v, dp):
    """collectives"""
    per_micro = 0
    if tp > 1:
        each = 2  # numbers of an all-reduce
        if sp:
            each = 1
        per_micro += most * numbers / each
    if pp > 1:
        per_micro += 2 * v
    count = micro * per_micro
    if dp > 1:
        count += 2
    return count


def launch(micro, most, overhead, calls, latency):
    """starting kernels and collectives"""
    return micro * most * overhead + calls * latency


def work(matmul, recompute, bound, tp_time, launch):
    """what a stage does, without waiting"""
    return matmul + recompute + bound + tp_time + launch


def bubble(mean, heavy, pp, micro, skip, share, work):
    """waiting for other stages. Ranks that take turns: the others work in one's waiting time"""
    alone = 1 + (pp - 1) / (micro * skip) * mean / heavy
    return max(mean / heavy, alone / share) * work - work


def pp_time(pp, v, own, b, C, megatron_2021, tp, cut, pp_bandwidth):
    """sends between stages, both ways, which nothing hides"""
    if pp == 1:
        return 0
    parts = cut
    if megatron_2021:
        parts = tp
    return 2 * v * own * b * C / parts / pp_bandwidth


def sums(dp, parameters, dp_bandwidth):
    """gradients over dp, by a ring"""
    return 2 * (dp - 1) / dp * parameters / dp_bandwidth


def hidden(megatron_2021, share, sums, zero, work, micro):
    """of these, behind the last backward. Not the half of zero 1 that gathers parameters"""
    if megatron_2021:
        return 0
    return max(0, 2 - share) * min(sums / (1 + zero), 2 / 3 * work / micro)


def dp_time(sums, hidden):
    """what is left of them"""
    return sums - hidden


def adamw(b, parameters, dp, zero, hbm):
    """reads and writes gradients and states"""
    shards = 1
    if zero:
        shards = dp
    return (24 + 2 * b) * parameters / b / shards / (1e12 * hbm)


TIME = [
    own, speed, matmul, recompute, traffic, bound, numbers, tp_time, calls, launch, work, bubble,
    pp_time, sums, hidden, dp_time, adamw,
]
PARTS = ("matmul", "recompute", "bound", "launch", "tp_time", "bubble", "pp_time", "dp_time",
         "adamw")

# ---- evaluation --------------------------------------------------------------


@cache
def needs(formula):
    """-> the names of its parameters"""
    return tuple(inspect.signature(formula).parameters)


def evaluate(formulas, names):
    """Adds each formula's result to {name: value}, in order -> names"""
    for formula in formulas:
        arguments = map(names.__getitem__, needs(formula))
        names[formula.__name__] = formula(*arguments)
    return names


@cache
def stages(layers, pp, v):
    """-> how many blocks each rank has, and which ranks may be the fullest"""
    counts = []
    for rank in range(pp):
        chunks = range(rank, pp * v, pp)
        counts.append(sum(len(share(layers, pp * v, chunk)) for chunk in chunks))
    fullest = {0, counts.index(max(counts)), pp - 1}
    return counts, sorted(fullest)


def assess(cfg, at, lay, stage=None):
    """-> {name: value} of MEMORY, for the fullest stage or this one. at: plan.py's flags."""
    v = 1
    if lay.schedule == "interleaved":
        v = 2
    counts, candidates = stages(cfg.layers, lay.pp, v)
    if stage is not None:
        candidates = [stage]
    common = known(cfg, at, lay, v, counts)
    fullest = None
    for s in candidates:
        names = dict(common)
        names["stage"] = s
        names["first"] = int(s == 0)
        names["last"] = int(s == lay.pp - 1)
        names["blocks"] = counts[s]
        evaluate(MEMORY, names)
        names["memory"] = sum(names[kind] for kind in HELD)
        if fullest is None or names["memory"] > fullest["memory"]:
            fullest = names
    return fullest


def known(cfg, at, lay, v, counts):
    """What formulas need to know of the model, the layout and the cluster -> {name: value}"""
    names = dict(vars(at))
    names.update(lay._asdict())
    names.update(B=at.batch, T=cfg.seq, C=cfg.width, H=cfg.heads, L=cfg.layers)
    names["V"] = -(-cfg.vocab // lay.tp) * lay.tp  # rounded up
    names["b"] = DTYPES[at.dtype].itemsize
    names["v"] = v
    names["cut"] = 1
    if lay.sp:
        names["cut"] = lay.tp
    head = cfg.vocab / (12 * cfg.width + 2 * cfg.seq)  # its work, in blocks
    names["most"] = max(counts)
    names["heavy"] = max(max(counts), counts[-1] + head)
    names["mean"] = (cfg.layers + head) / lay.pp
    skips = SKIP_TP
    if lay.tp == 1:
        skips = SKIP
    names["skip"] = skips[lay.schedule]
    names["tp_bandwidth"] = bandwidth(at, lay.tp)
    names["dp_bandwidth"] = bandwidth(at, lay.tp * lay.dp)
    names["pp_bandwidth"] = bandwidth(at, lay.tp * lay.dp * lay.pp)
    return names


def bandwidth(at, neighbours):
    """Bytes a second among so many ranks in a row: inside a node, if they divide it."""
    if at.node % neighbours == 0:
        return 1e9 * at.bandwidth_intra
    return 1e9 * at.bandwidth_inter


def timed(names):
    """Adds TIME, and what follows from it -> names"""
    evaluate(TIME, names)
    L, C, T, V = (names[name] for name in "LCTV")
    names["seconds"] = sum(names[part] for part in PARTS)
    tokens = names["B"] * T
    # Narayanan 2021, 5.1
    flops = 72 * tokens * L * C * C * (1 + T / (6 * C) + V / (12 * L * C))
    done = 1  # in its units
    if names["megatron_2021"]:  # that paper counts what is computed again
        done += names["recompute"] / names["matmul"]
    tflops = flops / names["seconds"] / names["gpus"] / 1e12
    names["mfu"] = tflops / names["gpu_tflops"]
    names["tflops"] = tflops * done
    names["rate"] = tokens / names["seconds"]
    names["days"] = names["tokens"] / names["rate"] / 86400
    return names


# ---- the search --------------------------------------------------------------


@cache
def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def layouts(cfg, batch, gpus):
    """All that hybrid_3d.py runs, but zb-h1 with fewer micro-batches than stages: it gains nothing.
    """
    for dp, tp, pp in meshes(cfg, gpus):
        if batch % dp:
            continue
        for micro in divisors(batch // dp):
            for schedule in schedules(cfg, pp, micro):
                for sp, zero, ckpt in choices(cfg, dp, tp, schedule):
                    yield Layout(dp, tp, pp, micro, schedule, sp, zero, ckpt)


def meshes(cfg, gpus):
    """dp x tp x pp = gpus"""
    for tp in divisors(gpus):
        for pp in divisors(gpus // tp):
            if cfg.heads % tp == 0 and pp <= cfg.layers:
                yield gpus // tp // pp, tp, pp


def schedules(cfg, pp, micro):
    if pp == 1:
        return ["1f1b"]
    possible = ["gpipe", "1f1b"]
    if micro % pp == 0 and 2 * pp <= cfg.layers:
        possible.append("interleaved")
    if micro >= pp:
        possible.append("zb-h1")
    return possible


def choices(cfg, dp, tp, schedule):
    """-> all (sp, zero, ckpt)"""
    sps = [False]
    if tp > 1 and cfg.seq % tp == 0:
        sps.append(True)
    zeros = [0]
    if dp > 1:
        zeros.append(1)
    ckpts = list(CKPTS)
    if schedule == "zb-h1":
        ckpts.remove("full")
    return itertools.product(sps, zeros, ckpts)


def is_as_fixed(lay, fixed, free):
    """Does a layout have the values that are given, but for the axes that are free?"""
    for axis, value in fixed.items():
        if axis not in free and getattr(lay, axis) != value:
            return False
    return True


def search(cfg, at, free=()):
    """-> [(seconds, layout)] of what fits, fastest first; (bytes, layout) of what needs least

    at.fixed: {axis: value} to be kept, but for the axes that are free.
    """
    fits = []
    least = None
    for lay in layouts(cfg, at.batch, at.gpus):
        if not is_as_fixed(lay, at.fixed, free):
            continue
        names = assess(cfg, at, lay)
        needed = (names["memory"], lay)
        if names["memory"] <= 1e9 * at.gpu_memory:
            fits.append((timed(names)["seconds"], lay))
        if least is None or needed < least:
            least = needed
    return sorted(fits), least
