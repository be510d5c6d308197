"""Layouts of hybrid_3d.py, and what each costs in bytes and seconds: a function per formula.

Not all that it runs are tried: layouts() says which ones are not. An interleaved rank has two
chunks, layers are shared out evenly, auto has no --limit, and --amp is off.

Memory is that of hybrid_3d's dry runs, within 3%: tests/test_plan.py compares them. The time model
is the textbook's, of the slowest stage: plan.py says where each term is from.

A formula is a function. Its parameters name what it needs: results of the functions above it, flags
of plan.py, values of the layout (dp cp tp pp ep micro schedule sp zero ckpt attn), sizes of the
model (B T C H L, V padded to divide by tp; E experts, K of them per token, shared, capacity), and

    b              bytes of a number
    v              chunks of layers on a rank
    cut            tp with sp, else 1
    data           dp x cp, the ranks that hold different tokens
    tp_bandwidth   bytes a second among the ranks of tp; so for cp, ep, dp, pp. See bandwidth()
    copies         data / ep, the ranks that hold the same experts
    stage, blocks  a rank's place on pp, how many blocks it has. A stage is here all that a rank of
                   pp holds, its v chunks together
    first, last    1 if it has the embedding, the head, else 0
    most           blocks of the fullest stage
    heavy          blocks of the stage with the most work. The head counts as a number of blocks:
                   its work over that of a block
    mean           blocks of a stage on average, the head counted in the same way
    idle           see IDLE

In MEMORY a number without a reason is what dry runs have shown.

    evaluate([N, x], {"B": 8, "T": 128, ..})   adds {"N": .., "x": ..}
"""
import inspect
import itertools
import math
from collections import namedtuple
from functools import cache

import common

Layout = namedtuple("Layout", "dp tp pp micro schedule sp zero ckpt cp attn ep",
                    defaults=(1, "zigzag", None))  # ep: None without experts
VEES = ("zb-v", "dualpipe-v")  # down the ranks and up again: the first has embedding and head
# backward in two actions: B, gradients of inputs, and W, of weights
SPLIT = ("zb-h1", "zb-h2", "auto", *VEES)
# Of these, the ones that have B and W apart where memory is fullest. dualpipe-v has not: it splits
# only its first and its last backwards, and is fullest between them
APART = ("zb-h1", "zb-h2", "auto", "zb-v")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "bfs", *SPLIT)
CKPTS = ("none", "selective", "full")

# ---- memory of a stage, in bytes ---------------------------------------------


def N(B, T, dp, cp, micro):
    """tokens of a micro-batch"""
    return B * T / (dp * cp * micro)


def x(b, N, C):
    """a micro-batch between two blocks"""
    return b * N * C


def block(C, tp, E, shared):
    """how many parameters a block has, without experts"""
    mlp = (8 * C + 4) * C / tp + C  # up, down, up's bias; down's bias
    count = (4 * C + 3) * C / tp + 5 * C  # q, k, v, out, 3 biases; out's bias, 2 norms
    if E:
        count += E * C  # the router
    if shared or not E:
        count += mlp
    return count


def expert(C, E, ep):
    """how many parameters the experts of a block have that are on a rank"""
    return E / ep * (8 * C + 5) * C


def edges(first, last, V, T, C, tp):
    """how many are outside the blocks: embeddings, last norm, the head's copy of tok. tp cuts the
    table of positions, too"""
    count = 0
    if first:
        count += (V + T) * C / tp
    if last:
        count += 2 * C
    if last and not first:
        count += V * C / tp
    return count


def own_edges(edges, zero, pp, v, data):
    """of the edges, gradients that a rank keeps. ZeRO-3, which has pp 1 (see choices), cuts them.
    ZeRO-2 does, too, but not where stages share tied ones: there they stay whole until stages have
    summed them"""
    if zero < 2 or pp * v > 1:
        return edges
    return edges / data


def parameters(b, blocks, block, expert, edges, zero, data, copies):
    """of a stage"""
    if zero == 3:
        return b * ((blocks * block + edges) / data + blocks * expert / copies)
    return b * (blocks * (block + expert) + edges)


def gradients(b, blocks, block, expert, own_edges, zero, data, copies):
    """of a stage: as many bytes as whole parameters have; ZeRO-2 and 3 keep a part"""
    if zero >= 2:
        return b * (blocks * (block / data + expert / copies) + own_edges)
    return b * (blocks * (block + expert) + own_edges)


def stepped(blocks, block, expert, edges, zero, data, copies):
    """how many parameters a rank steps"""
    if zero:
        return (blocks * block + edges) / data + blocks * expert / copies
    return blocks * (block + expert) + edges


def optimizer(stepped, b):
    """AdamW in fp32; with bf16 a copy of the parameters besides"""
    per_parameter = 8
    if b == 2:
        per_parameter = 12
    return per_parameter * stepped


def flight(schedule, micro, pp, stage):
    """micro-batches in flight, between their first forward and their last backward, as
    tests/test_plan.py counts them in the plans"""
    if schedule in ("gpipe", "bfs"):
        return micro
    if schedule == "1f1b":
        return min(micro, pp - stage)
    if schedule == "interleaved":  # counted in chunks, two of which are a rank's part
        return min(2 * micro, 3 * pp - 2 * stage - 1) / 2
    if schedule == "zb-h2":
        return min(micro, 2 * pp - 1)
    if schedule == "dualpipe-v":
        return pp + 1 / 2  # with 2 pp micro-batches or more: see schedules
    return min(micro, pp)


def routed(N, tp, K, capacity):
    """rows to experts from a rank of tp, where all experts are chosen equally often: then a
    capacity of 1 or more drops nothing, and 0 means no limit"""
    taken = K
    if 0 < capacity < 1:
        taken = capacity * K
    return N / tp * taken


def whole(x, cut, tp, b, N, H, C, E, K, shared, routed, attn, cp):
    """what a block keeps for backward: Korthikanti 2022, section 4; of experts, rows in and out"""
    # inputs of two norms, the first one's result; q, k, v, heads; statistics of norms; log-sum-exps
    total = 3 * x / cut + 4 * x / tp + 4 * b * N / cut + 4 * N * H / tp
    if attn == "ulysses" and cp > 1:
        total += x / tp  # heads before their all-to-all, and behind it
    if shared or not E:
        total += x / cut + 8 * x / tp  # the second norm's result; up, gelu
    if E:
        # rows sorted 1, up 4, gelu 4, down 1, back again 1; K answers of a token
        rows = 11 * b * routed * C + b * N / tp * K * C
        router = 4 * N / tp * C  # its input in fp32
        # 3 int64 of a row; logits and choices of a token
        numbers = 24 * routed + N / tp * (12 * E + 24 * K)
        total += rows + router + numbers
    return total


def kept(ckpt, whole, x, cut, tp, E, shared, N, C, sp):
    """what a block keeps with ckpt. Selective makes norms, gelu and casts of them again, but only
    if nothing but view(), transposes and casts is between them and what wants them (origin() in
    amp_accum_ckpt.py). In experts split() is between, and so gelu's result is kept"""
    if ckpt == "none":
        return whole
    if ckpt == "full":
        return x / cut
    total = whole - x / cut  # the first norm's
    if shared or not E:
        total -= x / cut + 4 * x / tp  # the second one's, and gelu's
    if E and (tp == 1 or sp):
        # The router's input in fp32, cast from the norm's result. With tp and without sp moe.py's
        # CutRows is between the two, and the cast is kept
        total -= 4 * N / tp * C
    return total


def late(schedule, stage, flight):
    """micro-batches whose B is done, but not their W, when the most are in flight. In zb-v there
    are none: only the backward under way has a W to come"""
    if schedule in ("zb-h1", "auto"):
        return min(stage, flight - 1)
    if schedule == "zb-h2":
        return min(2 * stage, flight - 1)
    return 0


def waits(blocks, x, tp, cut, b, C, first, V, last, N, E, shared, expert):
    """bytes that a micro-batch keeps between its B and its W: inputs and gradients of Linears, and
    gradients of the weights of experts and embedding, which B has made already"""
    q_k_v = x / cut + 3 * x / tp  # the input that they share, and the gradient of each
    out = x / tp + x  # its input, and its gradient, which is whole
    up = x / cut + 4 * x / tp
    down = 4 * x / tp + x
    head = x / cut + b * N * V / tp
    linears = q_k_v + out + b * expert
    if shared or not E:
        linears += up + down
    total = blocks * linears
    if first:
        total += b * V * C / tp  # the embedding
    if last:
        total += head
    return total


def activations(flight, late, blocks, kept, waits):
    """of all micro-batches in flight"""
    return (flight - late) * blocks * kept + late * waits


def logits(last, N, V, tp, x, cut):
    """what the loss of a micro-batch keeps, where the head is"""
    if not last:
        return 0
    return 4 * N * V / tp + 2 * x / cut  # probabilities in fp32; the last norm's input and result


def queue(schedule, micro):
    """micro-batches whose loss is done, but not B"""
    if schedule in ("gpipe", "bfs"):
        return micro
    return 1


def left_over(E, cp, tp, attn, x, b, routed, C):
    """bytes of a block's last collective when the loss is made: the ledger holds a collective's
    tensors until the next one. None with tp, where the loss has collectives of its own"""
    if tp > 1:
        return 0
    if E:
        return b * routed * C
    if cp == 1 or attn == "ulysses":
        return 0
    if attn == "allgather":
        return 2 * cp * x
    return 2 * x


def gathered(zero, b, blocks, block, expert, edges):
    """ZeRO-3: a block in use and the next one, on its way, and what is outside the blocks"""
    if zero < 3:
        return 0
    return b * (min(2, blocks) * (block + expert) + edges)


def passing(pp, tp, cp, E):
    """how many micro-batches' gradients are held in backward, by a message on its way or by the
    ledger, which holds a collective's tensors until the next one"""
    if pp * tp * cp > 1 or E:
        return 1
    return 0


def loss(queue, logits, last, tp, N, V, x, pp, v, cut, left_over, gathered, passing):
    """what comes and goes at the loss: log-probabilities, and what backward makes of them"""
    if not last:
        return 0
    tensors = 2
    if tp > 1:  # tensor_parallel.py makes the gradient in the place of the softmax
        tensors = 1
    boundaries = passing
    if v > 1:
        boundaries += min(pp, 3)
    held = queue * logits + left_over + gathered
    return held + tensors * 4 * N * V / tp + boundaries * x / cut


def waiting(pp, v, micro, first, flight, queue, passing):
    """how many tensors of x / cut: the gradient that passes, and receives that have been started,
    which have a tensor each from then on. pipeline_parallel.Mail starts a rank's transfers in
    order, up to a send whose tensor is not made yet"""
    if pp == 1:
        return passing
    if v > 1:
        return passing + min(3, micro - 1)
    if first:  # it sends no gradients: once its last F is sent, all receives to come are started
        return passing + flight
    if queue == 1:  # not gpipe: between backwards there are forwards, which receive as well
        return passing + 2
    return passing + 1


def again(ckpt, whole, schedule, tp, x, cut, E, shared):
    """bytes made again for the backward of a block: all with full. With selective gelu's result:
    norms and casts, which `kept` leaves out as well, are made when it has gone, and need less"""
    if ckpt == "full":
        return whole - x / cut  # its input was kept
    if E and not shared:
        return 0
    if ckpt == "none":
        return 0
    if schedule in APART:  # gelu's result stays for W: `waits` has it, as the input of down
        return 0
    return 4 * x / tp


def buffers(zero, b, blocks, block, expert, v, kept, edges, own_edges):
    """ZeRO-2 and 3: gradients that are whole until ranks have summed them. A block's first gradient
    makes room for all of the block's, while those of the block after it may be on their way"""
    if zero < 2:
        return 0
    unit = b * (block + expert)  # gradients of a block, whole
    total = unit  # in the backward of a stage's last block
    if blocks > v:  # a chunk has two blocks or more
        # one block earlier: two blocks' gradients are whole, the last one's activations have gone
        two = 2 * unit - kept
        if zero == 3 and blocks == 2:
            # `gathered` counts the parameters of two blocks, but there is no block before this one
            # that would be gathered now
            two -= unit
        total = max(unit, two)
    if own_edges < edges:  # edges make room when backward comes to the last norm
        total += b * edges
    return total


def tied(b, V, C, tp, pp, v):
    """the head's gradient of the tied weight, which autograd keeps until it has the embedding's"""
    if pp * v > 1:
        return 0
    return b * V * C / tp


def ring(cp, attn, x, tp, cut, b, E, routed, C):
    """in the backward of attention over cp: K and V of others, and their gradients in fp32, less
    what has gone by then: gelu's result, and the second norm's or with experts their rows"""
    if cp == 1 or attn == "ulysses":
        return 0
    wide = max(b, 4) / b  # a number in fp32, counted in numbers of b bytes
    # Tensors of x / tp: K and V that travel, and what a hop computes, less the 4 of gelu's result.
    # With experts gelu's result is among the rows below, and dry runs show the same 3 and 10
    here = 3
    if wide > 1:  # in bf16
        here = 10
    # Pairs of gradients of K and V: one is made here, one comes and one goes
    travels = 2 * min(cp, 3) * wide
    if attn == "allgather":  # K and V of all ranks, and their gradients
        travels = 2 * cp + 2 * cp * wide
    gone = x / cut
    if E:
        gone = 11 * b * routed * C
    return (here + travels) * x / tp - gone


def mlp_gradients(x, tp, cut, zero, b, C, E, shared, routed, schedule, expert):
    """gradients in the backward of an MLP. Experts make theirs one by one, and stack them"""
    total = x / cut + 4 * x / tp  # of the block's result, and of gelu's
    if cut > 1:
        total += 2 * x  # of the block's, gathered: x. Dry runs show twice that
    if (shared or not E) and schedule not in APART:
        down = 4 * b * C * C / tp  # of its weight, which moves to its place among the gradients
        if zero >= 2 and tp == 1:
            # 1. down's backward makes the gradient of gelu's result, 4 x, and `down`.
            # 2. gelu's result goes, but `activations` counts its 4 x to the end. That pays for the
            #    4 x of its gradient: both are left out from here on.
            # 3. The room that `buffers` counts is made, and `down` is copied into it: x + down.
            # 4. The first copy of `down` goes, and gelu's backward makes 4 x more: x + 4 x.
            # Moment 1 has x + 4 x + down, but not yet that room, which is larger than `down`: so it
            # has less than 4. (With tp, dry runs have both `down` and the 4 x at once)
            total = x + max(4 * x, down)
        else:
            total += down
    if not E:
        return total
    rows = 10 * b * routed * C
    if schedule in APART:
        return max(total, rows)
    stacked = b * expert - 8 * b * routed * C  # when most rows have gone
    if zero >= 2:
        rows -= b * expert  # `buffers` counts room for these experts' gradients: not made yet
    return max(total, rows, stacked)


def split(schedule, waits, blocks, kept, v):
    """what B leaves for W, less the activations that it frees. Of v chunks on a rank, one is at
    work"""
    if schedule not in APART:
        return 0
    return max(0, waits - blocks * kept) / v


def attention(ring, split, schedule, E, x, tp, b, expert):
    """what comes and goes when backward is done with the MLP, and has come to attention over cp"""
    if ring == 0 or schedule not in APART:
        return ring
    if E:
        return ring + max(split, b * expert)  # the experts' gradients are there, and wait for W
    # `ring` takes gelu's result, 4 x / tp, for gone. But it is there, and waits for W
    return ring + split + 4 * x / tp


def weights(schedule, split, blocks, v, block, b, expert, E, shared, C, tp, zero):
    """what comes and goes in W. Block by block gradients move to their places: those of experts,
    which B has made, and those of Linears, made in W. The largest move counts. With ZeRO-2 the
    whole gradients of all of a chunk's blocks are there at the end: ranks sum the last block first,
    W comes to it last, and until then none is summed or freed"""
    if schedule not in APART:
        return 0
    moves = b * expert / 2  # the experts' gradients of up or down, a second time
    if shared or not E:
        moves = max(moves, 4 * b * C * C / tp)  # the gradient of down's weight
    total = split + moves
    if zero >= 2:
        total += blocks / v * b * (block + expert)
    return total


def inside(again, mlp_gradients, split, attention, schedule, buffers, weights, waiting, x, cut,
           queue, logits, gathered, tied):
    """what comes and goes in the backward of a block: the most of its MLP, attention and W"""
    most = again + max(mlp_gradients + split, attention)
    if schedule in APART:  # only W has gradients for ZeRO
        most = max(most, weights)
    else:
        most += buffers
    return most + waiting * x / cut + (queue - 1) * logits + gathered + tied


def step(b, block, expert, edges, zero, data, copies):
    """what comes and goes in AdamW: with bf16 the gradients in fp32, a unit at a time"""
    if b != 2:
        return 0
    if zero:
        return 4 * max(block / data, expert / copies, edges / data)
    return 4 * max(block, expert, edges)


def over_tp(b, blocks, expert, copies, zero):
    """gradients of experts, side by side, to be summed over tp; laid so even where tp is 1"""
    if zero:
        expert = expert / copies
    return b * blocks * expert


def working(loss, inside, step, over_tp, activations):
    """the most that comes and goes beside the activations. AdamW and sums over tp come when these
    are gone, and have their room: only what they need beyond it counts"""
    return max(loss, inside, step - activations, over_tp - activations)


MEMORY = [
    N, x, block, expert, edges, own_edges, parameters, gradients, stepped, optimizer, flight,
    routed, whole, kept, late, waits, activations, logits, queue, left_over, gathered, passing,
    loss, waiting, again, buffers, tied, ring, mlp_gradients, split, attention, weights, inside,
    step, over_tp, working,
]
HELD = ("parameters", "gradients", "optimizer", "activations", "working")

# ---- seconds of a step, all micro-batches ------------------------------------

# The bubble is IDLE (pp - 1) times a micro-batch's F + B + W, as tests/test_plan.py simulates it
IDLE = {"gpipe": 1, "1f1b": 1, "interleaved": 1 / 2, "bfs": 1 / 2, "zb-h1": 1 / 3, "auto": 1 / 3,
        "zb-h2": 0, "zb-v": 0, "dualpipe-v": 1 / 6}


def own(B, T, dp, cp):
    """tokens of a rank, of all its micro-batches"""
    return B * T / (dp * cp)


def mlps(E, K, capacity, shared):
    """MLPs that a token visits"""
    if not E:
        return 1
    if 0 < capacity < 1:
        K = capacity * K
    return K + shared


def keys(T, attn, cp):
    """keys of a query as papers count them: T, where causal attention sees half of T on average. A
    ring's last rank sees nearly all of T, and counts nearly twice as many"""
    if attn == "ring":
        return T * (2 - 1 / cp)
    return T


def speed(gpu_tflops, efficiency):
    """FLOPs a second of matmuls"""
    return 1e12 * gpu_tflops * efficiency


def matmul(own, C, mlps, keys, tp, heavy, speed):
    """forward and backward of the heaviest stage"""
    return own * ((24 + 48 * mlps) * C * C + 12 * keys * C) / tp * heavy / speed


def recompute(ckpt, megatron_2021, own, C, mlps, keys, tp, most, speed, E, shared):
    """what ckpt full does again: all but the last matmul, which Megatron 2021 repeated as well"""
    if ckpt != "full":
        return 0
    # C C FLOPs per token: 8 of attention, 16 of each MLP, less 8 of the last matmul. That of
    # experts is done again, too: the gradients of the gates need its result
    matmuls = 16 * mlps
    if megatron_2021 or (E and not shared):
        matmuls = 8 + 16 * mlps
    return own * (matmuls * C * C + 4 * keys * C) / tp * most / speed


def traffic(megatron_2021, C, cut, tp, H, T, mlps, E, shared):
    """norms, residuals, gelu, read and written: bytes per token and pass of a block, in bf16"""
    if megatron_2021:  # and, unfused, the attention's T x T
        return 22 * C / cut + (16 * C + 11 * H * T) / tp
    total = 20 * C / cut + 16 * mlps * C / tp
    if E:  # rows are picked, sorted, put back and added up; not those of the shared expert
        total += 16 * (mlps - shared) * C / tp
    return total


def bound(own, most, traffic, b, ckpt, hbm):
    """memory-bound work"""
    passes = 3
    if ckpt != "none":
        passes = 4
    return own * most * traffic * b / 2 * passes / (1e12 * hbm)


def numbers(sp, ckpt, megatron_2021, E, shared):
    """numbers sent on tp per token and block, divided by C: see tensor_parallel.py. An all-gather
    or a reduce-scatter sends 1, an all-reduce 2"""
    has_mlp = shared or not E  # that tp cuts
    if sp:
        # forward gathers and scatters; backward gathers, gathers the input again, and scatters
        count = 5  # of attention
        if has_mlp:
            count += 5
        forward_again = 2  # of attention, what forward sends
        if has_mlp:
            forward_again += 1  # the MLP's input; what is behind the last matmul is not done again
    else:
        count = 4  # of attention, an all-reduce in forward and one in backward
        if has_mlp:
            count += 4
        if E:
            count += 2  # an all-gather in forward, JoinRows, and one in backward, CutRows
        forward_again = 2  # of attention; the MLP's is behind the last matmul, not done again
        if E and shared:
            forward_again += 1  # JoinRows: the shared expert runs behind it
        if megatron_2021:
            forward_again = 4  # which did that, too
    if ckpt == "full":
        count += forward_again
    return count


def tp_time(own, most, b, C, numbers, tp, tp_bandwidth):
    """sends on tp, which nothing hides"""
    return own * most * b * C * numbers * (tp - 1) / tp / tp_bandwidth


def cp_sent(own, b, C, tp, cp, attn, ckpt):
    """bytes that a block sends on cp, as context_parallel.py says: keys, values, their gradients"""
    passes = 2
    if ckpt == "full":
        passes = 3
    if attn == "ulysses":
        return own * C / tp * 4 * b * passes * (cp - 1) / cp
    return own * C / tp * (2 * b * passes + 2 * max(b, 4)) * (cp - 1)


def cp_time(cp_sent, most, cp_bandwidth, attn, own, keys, C, tp, speed, share):
    """sends on cp. Hops travel behind the attention of a block"""
    seconds = most * cp_sent / cp_bandwidth
    if attn in ("ring", "zigzag"):
        attention = most * own * 12 * keys * C / tp / speed
        # ranks that take turns on a core hide nothing: the factor is 1 at share 1, 0 from 2 on
        seconds -= min(seconds, max(0, 2 - share) * attention)
    return seconds


def ep_time(own, most, b, C, tp, K, capacity, E, ckpt, ep, ep_bandwidth):
    """rows to experts and back, forward and backward, which nothing hides"""
    if not E:
        return 0
    if 0 < capacity < 1:  # see routed
        K = capacity * K
    times = 4
    if ckpt == "full":
        times = 6
    return own / tp * most * K * b * C * times * (ep - 1) / ep / ep_bandwidth


def calls(micro, most, tp, numbers, sp, pp, v, cp, attn, E, data, zero, ckpt):
    """how many collectives a rank starts in a step"""
    again = 0
    if ckpt == "full":
        again = 1
    per_micro = 0
    if cp > 1:
        each_way = cp - 1  # hops
        ways = 3  # K and V in forward; K and V again, and their gradients, in backward
        if attn == "allgather":
            each_way = 1
        elif attn == "ulysses":
            each_way = 4
            ways = 2
        per_micro += (ways + again) * most * each_way
    if E:  # forward: counts, loads, rows out and back; backward: rows out and back
        per_micro += (4 + 2 + 4 * again) * most
    if tp > 1:
        each = 2  # an all-reduce counts 2 in `numbers`, a gather or a scatter 1
        if sp:
            each = 1
        per_micro += most * numbers / each
        if E and not sp:
            # `numbers` has 2 for JoinRows and CutRows, which `each` takes for one all-reduce
            per_micro += most
    if pp > 1:
        per_micro += 2 * v
    count = micro * per_micro
    if data > 1:
        units = most + 1  # of ZeRO: blocks and edges
        if E:
            units += most
        count += units * {0: 1, 1: 2, 2: micro + 1, 3: 3 * micro}[zero]
    return count


def launch(micro, most, overhead, calls, latency):
    """starting kernels and collectives"""
    return micro * most * overhead + calls * latency


def work(matmul, recompute, bound, tp_time, cp_time, ep_time, launch):
    """what a stage does, without waiting"""
    return matmul + recompute + bound + tp_time + cp_time + ep_time + launch


def bubble(mean, heavy, pp, micro, idle, share, work):
    """waiting for other stages: the span of a step, less the heaviest stage's work. It is negative
    where ranks share a core, and the heaviest stage has it to itself while others wait"""
    # Two lower bounds of the span, in units of `work`; the larger one is taken. `work` is measured
    # while all `share` ranks of a core are busy.
    # First, the core: in the time `work` it does `heavy` blocks for each of its ranks. They have
    # `mean` blocks each, on average, so that it is busy at least this long
    busy = mean / heavy
    # Second, the pipeline's own chain, if every rank kept that speed. At best each rank has the
    # core to itself whenever it works, and is `share` times as fast
    chain = 1 + (pp - 1) / micro * idle * mean / heavy
    span = max(busy, chain / share)
    return span * work - work


def pp_time(pp, v, own, b, C, megatron_2021, tp, cut, pp_bandwidth):
    """sends between stages, both ways, which nothing hides"""
    if pp == 1:
        return 0
    parts = cut
    if megatron_2021:
        parts = tp  # what all ranks of tp have is sent once (Narayanan 2021, section 4.1)
    return 2 * v * own * b * C / parts / pp_bandwidth


def moved(zero, micro):
    """how often a step sends a parameter or its gradient over dp, a half of an all-reduce each"""
    if zero == 2:
        return micro + 1
    if zero == 3:
        return 3 * micro
    return 2


def sums(moved, b, blocks, block, expert, edges, pp, v, data, copies, dp_bandwidth):
    """gradients over dp x cp, of experts over those that hold the same ones, by rings"""
    times = moved
    if pp * v > 1:  # edges are tied: whole, summed once
        times = 2
    dense = (moved * blocks * block + times * edges) * (data - 1) / data
    experts = moved * blocks * expert * (copies - 1) / copies
    return b * (dense + experts) / dp_bandwidth


def hidden(megatron_2021, share, sums, zero, work, micro):
    """seconds of the sums that are hidden: in ZeRO-0 and 1 behind the last backward, in 2 behind
    each, in 3 behind forward, too. Nothing hides the parameters that ZeRO-1 and 2 gather"""
    if megatron_2021:
        return 0
    behind = sums
    room = 2 / 3 * work / micro
    if zero == 1:
        behind = sums / 2
    elif zero == 2:
        behind = sums * micro / (micro + 1)
        room = 2 / 3 * work
    elif zero == 3:
        room = work
    # less where ranks take turns, as in cp_time
    return max(0, 2 - share) * min(behind, room)


def dp_time(sums, hidden):
    """the part of the sums that nothing hides"""
    return sums - hidden


def adamw(b, stepped, hbm):
    """reads and writes gradients and states"""
    return (24 + 2 * b) * stepped / (1e12 * hbm)


TIME = [
    own, speed, mlps, keys, matmul, recompute, traffic, bound, numbers, tp_time, cp_sent, cp_time,
    ep_time, calls, launch, work, bubble, pp_time, moved, sums, hidden, dp_time, adamw,
]
PARTS = ("matmul", "recompute", "bound", "launch", "tp_time", "cp_time", "ep_time", "bubble",
         "pp_time", "dp_time", "adamw")

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


def sorted_by_stage():
    """-> the formulas of MEMORY that are alike in all stages, and the others"""
    known_by_stage = {"stage", "first", "last", "blocks"}
    alike = []
    by_stage = []
    for formula in MEMORY:
        if known_by_stage.isdisjoint(needs(formula)):
            alike.append(formula)
        else:
            by_stage.append(formula)
            known_by_stage.add(formula.__name__)
    return alike, by_stage


ALIKE, BY_STAGE = sorted_by_stage()


@cache
def stages(layers, pp, v, vee=False):
    """-> how many blocks each rank has, and which ranks may be the fullest"""
    counts = []
    for rank in range(pp):
        chunks = range(rank, pp * v, pp)
        if vee:
            chunks = [rank, 2 * pp - 1 - rank]
        counts.append(sum(len(common.share(layers, pp * v, chunk)) for chunk in chunks))
    # rank 0 has the embedding and most in flight, the last one the head
    fullest = {0, counts.index(max(counts)), pp - 1}
    return counts, sorted(fullest)


def assess(cfg, at, lay, stage=None):
    """-> {name: value} of MEMORY, for the fullest stage or this one. at: plan.py's flags."""
    vee = lay.schedule in VEES
    v = 1
    if vee or lay.schedule in ("interleaved", "bfs"):
        v = 2
    counts, candidates = stages(cfg.layers, lay.pp, v, vee)
    if stage is not None:
        candidates = [stage]
    head_rank = lay.pp - 1
    if vee:
        head_rank = 0
    everywhere = evaluate(ALIKE, known(cfg, at, lay, v, counts, head_rank))
    fullest = None
    for s in candidates:
        names = dict(everywhere)
        names["stage"] = s
        names["first"] = int(s == 0)
        names["last"] = int(s == head_rank)
        names["blocks"] = counts[s]
        evaluate(BY_STAGE, names)
        names["memory"] = sum(names[kind] for kind in HELD)
        if fullest is None or names["memory"] > fullest["memory"]:
            fullest = names
    return fullest


def known(cfg, at, lay, v, counts, head_rank):
    """What formulas need to know of the model, the layout and the cluster -> {name: value}"""
    names = dict(vars(at))
    names.update(lay._asdict())
    names.update(B=at.batch, T=cfg.seq, C=cfg.width, H=cfg.heads, L=cfg.layers)
    names.update(E=at.experts, K=at.top_k, shared=int(at.shared), v=v)
    names["V"] = -(-cfg.vocab // lay.tp) * lay.tp  # rounded up
    names["b"] = common.DTYPES[at.dtype].itemsize
    names["cut"] = 1
    if lay.sp:
        names["cut"] = lay.tp
    names["ep"] = lay.ep or 1
    names["data"] = lay.dp * lay.cp
    names["copies"] = names["data"] // names["ep"]
    # FLOPs of a token's forward, divided by 2 C: matmuls of a block, 2 T of its attention, V of the
    # head
    matmuls = (4 + 8 * mlps(at.experts, at.top_k, at.capacity, names["shared"])) * cfg.width
    head = cfg.vocab / (matmuls + 2 * cfg.seq)  # the head's work, in blocks
    names["most"] = max(counts)
    names["heavy"] = max(max(counts), counts[head_rank] + head)
    names["mean"] = (cfg.layers + head) / lay.pp
    names["idle"] = IDLE[lay.schedule]
    names["tp_bandwidth"] = bandwidth(at, lay.tp)
    names["cp_bandwidth"] = bandwidth(at, lay.tp * lay.cp)
    names["ep_bandwidth"] = bandwidth(at, lay.tp * names["ep"])
    names["dp_bandwidth"] = bandwidth(at, lay.tp * names["data"])
    names["pp_bandwidth"] = bandwidth(at, lay.tp * names["data"] * lay.pp)
    return names


def bandwidth(at, neighbours):
    """Bytes a second among so many ranks in a row: inside a node, if they divide it."""
    if at.node % neighbours == 0:
        return 1e9 * at.bandwidth_intra
    return 1e9 * at.bandwidth_inter


def timed(names):
    """Adds TIME, and what follows from it -> names"""
    evaluate(TIME, names)
    L, C, T, V, mlps = (names[name] for name in ("L", "C", "T", "V", "mlps"))
    names["seconds"] = sum(names[part] for part in PARTS)
    of_step = names["B"] * T  # tokens; names["tokens"] are those of the whole training
    # counted as in Narayanan 2021, 5.1, with all MLPs that a token visits
    block = (24 + 48 * mlps) * C * C + 12 * C * T
    flops = of_step * (L * block + 6 * C * V)
    counted = 1  # FLOPs that tflops counts, over those of the model
    if names["megatron_2021"]:  # that paper counts what is computed again
        counted += names["recompute"] / names["matmul"]
    tflops = flops / names["seconds"] / names["gpus"] / 1e12
    names["mfu"] = tflops / names["gpu_tflops"]
    names["tflops"] = tflops * counted
    names["rate"] = of_step / names["seconds"]
    names["days"] = names["tokens"] / names["rate"] / 86400
    return names


# ---- the search --------------------------------------------------------------


@cache
def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


LONG = 8192  # tokens of a sequence from which on it is cut, unless --cp says otherwise
SHORT = 2048  # tokens of a part, at least


def layouts(cfg, at, fixed):
    """What hybrid_3d.py runs and may gain something in this model of time and memory.

    Not there: with pp 1 another schedule than 1f1b; others than gpipe and 1f1b with too few
    micro-batches to fill the pipeline. Not there unless `fixed` names them: bfs where interleaved
    is possible, and zb-h2 where zb-v is, since interleaved and zb-v take the same time with less
    memory; auto, which is zb-h1 by search; dualpipe-v, ring and allgather, which hide less; cp for
    short sequences.
    """
    for dp, cp, tp, pp in meshes(cfg, at.gpus, fixed):
        if at.batch % dp:
            continue
        for micro in divisors(at.batch // dp):
            for schedule in schedules(cfg, pp, micro, fixed):
                for sp, ckpt, attn, ep, zero in choices(cfg, at, (dp, cp, tp, pp), schedule, fixed):
                    yield Layout(dp=dp, tp=tp, pp=pp, micro=micro, schedule=schedule, sp=sp,
                                 zero=zero, ckpt=ckpt, cp=cp, attn=attn, ep=ep)


def meshes(cfg, gpus, fixed):
    """dp x cp x tp x pp = gpus"""
    for tp in divisors(gpus):
        for pp in divisors(gpus // tp):
            if cfg.heads % tp or pp > cfg.layers:
                continue
            for cp in divisors(gpus // tp // pp):
                dp = gpus // tp // pp // cp
                is_useful = cp == 1 or (cfg.seq >= LONG and cfg.seq // cp >= SHORT)
                if is_useful or "cp" in fixed:
                    yield dp, cp, tp, pp


def schedules(cfg, pp, micro, fixed):
    """-> those worth a try; zb-h2, auto, bfs and dualpipe-v also where `fixed` names them"""
    if pp == 1:
        return ["1f1b"]
    several = 2 * pp <= cfg.layers  # can every rank have two chunks?
    least = {"bfs": pp, "zb-h1": pp, "auto": pp, "zb-v": 2 * pp - 1, "zb-h2": 2 * pp - 1,
             "dualpipe-v": 2 * pp}
    possible = ["gpipe", "1f1b"]
    if several and micro % pp == 0:
        possible.append("interleaved")
    elif several:
        possible.append("bfs")
    possible.append("zb-h1")
    if several:
        possible.append("zb-v")
    else:
        possible.append("zb-h2")
    wanted = fixed.get("schedule")
    if wanted in ("zb-h2", "auto") or (wanted in ("bfs", "dualpipe-v") and several):
        possible = [wanted]
    return [name for name in possible if micro >= least.get(name, 1)]


def choices(cfg, at, mesh, schedule, fixed):
    """-> all (sp, ckpt, attn, ep, zero)"""
    dp, cp, tp, pp = mesh
    sps = [False]
    if tp > 1 and cfg.seq // cp % tp == 0:
        sps.append(True)
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
        "ulysses": cfg.seq % cp == 0 and cfg.heads // tp % cp == 0,
    }
    tried = ["zigzag", "ulysses"]
    if wanted:
        tried = [wanted]
    return [name for name in tried if runs[name]]


def is_as_fixed(lay, fixed):
    """Does a layout have the values that are given?"""
    for axis, value in fixed.items():
        if getattr(lay, axis) != value:
            return False
    return True


def search(cfg, at, free=()):
    """-> [(seconds, layout)] of what fits, fastest first; (bytes, layout) of what needs least of
    all that was tried, None if there is no layout

    at.fixed: {axis: value} to be kept, but for the axes that are free.
    """
    fixed = {axis: value for axis, value in at.fixed.items() if axis not in free}
    fits = []
    least = None
    for lay in layouts(cfg, at, fixed):
        if not is_as_fixed(lay, fixed):
            continue
        names = assess(cfg, at, lay)
        needed = (names["memory"], lay)
        if names["memory"] <= 1e9 * at.gpu_memory:
            fits.append((timed(names)["seconds"], lay))
        if least is None or needed < least:
            least = needed
    return sorted(fits), least
