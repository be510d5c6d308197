"""All layouts of hybrid_3d.py, and what each costs in bytes and seconds: formulas as data, to be shown and tested.

Memory is that of hybrid_3d's dry runs, within 2%: tests/test_plan.py compares them. The time model is the textbook's,
of the slowest stage: plan.py says where each term is from.

A formula may use those above it; the model's B T C H V L (V: padded to divide by tp); the layout's dp tp pp micro sp
zero ckpt schedule; the flags of plan.py; and

    b      bytes of a number                   stage, blocks   a rank's place on pp, and how many blocks it has
    v      chunks of layers per rank           first, last     1 or 0: does it have the embedding, the head
    cut    tp with sp, else 1                  most, mean      blocks of the fullest stage, and of all on average
    skip   see SKIP                            heavy           most, or the last stage's with the head's work
"""
from collections import namedtuple
from functools import cache

from common import DTYPES, share

Layout = namedtuple("Layout", "dp tp pp micro schedule sp zero ckpt")
SKIP = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 3}  # a filling stage idles 1/SKIP of a micro-batch's time
SKIP_TP = SKIP | {"zb-h1": 36 / 26}  # (F + B + W) / (F + B - W), W without q, k, v and up: 5/12 of F, and B 19/12

MEMORY = {  # bytes of a stage
    "N": "B*T/(dp*micro)", "x": "b*N*C",  # tokens of a micro-batch, and its bytes between two blocks
    "block": "(12*C + 7)*C/tp + 6*C", "edges": "first*(V + T)*C/tp + last*(2*C + (pp > 1)*V*C/tp)",
    "parameters": "b*(blocks*block + edges)", "gradients": "parameters",
    "optimizer": "(8 + 4*(b == 2))*parameters/b/(dp if zero else 1)",  # AdamW in fp32, for bf16 with a copy
    "flight": "{'gpipe': micro, '1f1b': min(micro, pp - stage), 'zb-h1': min(micro, pp), "
              "'interleaved': min(2*micro, 3*pp - 2*stage - 1)/2}[schedule]",  # micro-batches between F and the end
    "whole": "4*x/cut + 12*x/tp + 4*b*N/cut + 4*N*H/tp",  # kept by a block: Korthikanti 2022, section 4
    "kept": "{'none': whole, 'selective': whole - 2*x/cut - 4*x/tp, 'full': x/cut}[ckpt]",
    "late": "(schedule == 'zb-h1')*min(stage, flight - 1)",  # of them, those whose B is done and W is not
    "waits": "blocks*(16*x if tp == 1 else 2*x + 5*x/tp + 7*b*C*C/tp) + first*b*V*C/tp"
             " + last*(b*N*V + x if tp == 1 else b*V*C/tp)",  # inputs and gradients of Linears, or their product
    "activations": "(flight - late)*blocks*kept + late*waits",
    # loss: log-probabilities and what backward makes of them; waiting: received, not yet used
    "logits": "last*(4*N*V/tp + 2*x/cut)", "queue": "micro if schedule == 'gpipe' else 1",  # whose loss is done, not B
    "loss": "queue*logits + last*((2 + (tp > 1))*4*N*V/tp + x/4 + (1 + min(pp, 3)*(v > 1))*x/cut)",
    "waiting": "0 if pp == 1 else min(3, micro - 1) if v > 1 else flight if first else 1 + (queue == 1)",
    "again": "whole if ckpt == 'full' else (ckpt == 'selective')*(schedule != 'zb-h1' or tp > 1)*4*x/tp",
    "inside": "again + 5*x/tp + x/4 + (1 + waiting)*x/cut + 2*x*sp + (queue - 1)*logits"
              " + (schedule == 'zb-h1')*max(0, waits - blocks*kept)",  # backward of a block
    "step": "4*(b == 2)*max(block, edges)/(dp if zero else 1)",  # gradients in fp32, a unit at a time
    "working": "max(loss, inside, step - activations)"}
HELD = "parameters", "gradients", "optimizer", "activations", "working"

TIME = {  # seconds of a step, all micro-batches
    "own": "B*T/dp", "speed": "1e12*gpu_tflops*efficiency", "full": "ckpt == 'full'",
    "matmul": "own*(72*C*C + 12*T*C)/tp*heavy/speed",
    "recompute": "full*own*((24 if megatron_2021 else 16)*C*C + 4*T*C)/tp*most/speed",
    "traffic": "(22 if megatron_2021 else 20)*C/cut + (16*C + 11*H*T*megatron_2021)/tp",  # of a pass, bytes in bf16
    "bound": "own*most*traffic*b/2*(3 + (ckpt != 'none'))/(1e12*hbm)",
    "numbers": "10 + 3*full if sp else 8 + (4 if megatron_2021 else 2)*full",  # sent on tp, as tensor_parallel.py says
    "tp_time": "own*most*b*C*numbers*(tp - 1)/tp/tp_bandwidth",
    "calls": "micro*(most*(tp > 1)*numbers/(2 - sp) + (pp > 1)*2*v) + 2*(dp > 1)",  # an all-reduce is two numbers
    "launch": "micro*most*overhead + calls*latency", "work": "matmul + recompute + bound + tp_time + launch",
    # ranks that take turns: a waiting rank's time is the others', as far as there is work for them
    "bubble": "max(mean/heavy, (1 + (pp - 1)/(micro*skip)*mean/heavy)/share)*work - work",
    "pp_time": "(pp > 1)*2*v*own*b*C/(tp if megatron_2021 else cut)/pp_bandwidth",
    "sums": "2*(dp - 1)/dp*parameters/dp_bandwidth",
    "hidden": "0 if megatron_2021 else max(0, 2 - share)*min(sums/(1 + zero), 2/3*work/micro)",
    "dp_time": "sums - hidden", "adamw": "(24 + 2*b)*parameters/b/(dp if zero else 1)/(1e12*hbm)"}
PARTS = "matmul", "recompute", "bound", "launch", "tp_time", "bubble", "pp_time", "dp_time", "adamw"
CODE = {name: compile(text, name, "eval") for name, text in (MEMORY | TIME).items()}


def evaluate(formulas, names):
    for name in formulas:
        names[name] = eval(CODE[name], names)
    return names


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def layouts(cfg, batch, gpus):
    """All that hybrid_3d.py runs, but zb-h1 with fewer micro-batches than stages, which has nothing to gain."""
    ways = [(tp, pp, gpus // tp // pp) for tp in divisors(gpus) for pp in divisors(gpus // tp)]
    for tp, pp, dp in [way for way in ways if cfg.heads % way[0] == 0 and way[1] <= cfg.layers]:
        for micro in divisors(batch // dp) if batch % dp == 0 else ():
            for schedule in SKIP if pp > 1 else ("1f1b",):
                possible = {"interleaved": micro % pp == 0 and 2 * pp <= cfg.layers, "zb-h1": micro >= pp}
                if not possible.get(schedule, True):
                    continue
                for sp in (False, True) if tp > 1 and cfg.seq % tp == 0 else (False,):
                    for zero in (0, 1) if dp > 1 else (0,):
                        for ckpt in ("none", "selective", "full")[:2 + (schedule != "zb-h1")]:
                            yield Layout(dp, tp, pp, micro, schedule, sp, zero, ckpt)


@cache
def stages(layers, pp, v):
    """-> blocks of each rank, and which ranks may be the fullest"""
    counts = [sum(len(share(layers, pp * v, i)) for i in range(rank, pp * v, pp)) for rank in range(pp)]
    return counts, sorted({0, counts.index(max(counts)), pp - 1})


def assess(cfg, at, lay, stage=None):
    """-> all names of MEMORY and TIME, of the fullest stage or this one. at: the command line's flags."""
    v, rates = 1 + (lay.schedule == "interleaved"), (1e9 * at.bandwidth_inter, 1e9 * at.bandwidth_intra)
    counts, fullest = stages(cfg.layers, lay.pp, v)
    head = cfg.vocab / (12 * cfg.width + 2 * cfg.seq)  # its work, in blocks
    known = dict(vars(at), **lay._asdict(), B=at.batch, T=cfg.seq, C=cfg.width, H=cfg.heads, L=cfg.layers, v=v,
                 V=-(-cfg.vocab // lay.tp) * lay.tp, b=DTYPES[at.dtype].itemsize, cut=lay.tp if lay.sp else 1,
                 most=max(counts), heavy=max(max(counts), counts[-1] + head), mean=(cfg.layers + head) / lay.pp,
                 skip=(SKIP if lay.tp == 1 else SKIP_TP)[lay.schedule], tp_bandwidth=rates[at.node % lay.tp == 0],
                 dp_bandwidth=rates[at.node % (lay.tp * lay.dp) == 0],
                 pp_bandwidth=rates[at.node % (lay.tp * lay.dp * lay.pp) == 0])
    found = [evaluate(MEMORY, dict(known, stage=s, first=int(s == 0), last=int(s == lay.pp - 1), blocks=counts[s]))
             for s in (fullest if stage is None else [stage])]
    for names in found:
        names["memory"] = sum(names[kind] for kind in HELD)
    return max(found, key=lambda names: names["memory"])


def timed(names):
    """Adds TIME, and what follows from it."""
    L, C, T, V, n = (names[k] for k in ("L", "C", "T", "V", "gpus"))
    evaluate(TIME, names)
    names["seconds"] = sum(names[part] for part in PARTS)
    flops = 72 * names["B"] * T * L * C * C * (1 + T / (6 * C) + V / (12 * L * C))  # Narayanan 2021, 5.1
    names["mfu"] = flops / names["seconds"] / n / 1e12 / names["gpu_tflops"]
    counted = names["megatron_2021"] and names["recompute"] / names["matmul"]  # that paper counts recomputation in
    names["tflops"] = flops * (1 + counted) / names["seconds"] / n / 1e12
    names["rate"] = names["B"] * T / names["seconds"]
    names["days"] = names["tokens"] / names["rate"] / 86400
    return names


def search(cfg, at, free=()):
    """-> what fits, fastest first, and what needs the least memory. Fixed axes are kept, but those that are `free`."""
    fits, least = [], None
    for lay in layouts(cfg, at.batch, at.gpus):
        if all(axis in free or getattr(lay, axis) == value for axis, value in at.fixed.items()):
            names = assess(cfg, at, lay)
            if names["memory"] <= 1e9 * at.gpu_memory:
                fits.append((timed(names)["seconds"], lay))
            least = min(least or (names["memory"], lay), (names["memory"], lay))
    return sorted(fits), least
