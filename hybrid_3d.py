"""DP x TP x PP: stages of layers, matrices cut over the ranks of a stage, and copies of it all that share the batch.

                     copy 0 (rows 0..3)      copy 1 (rows 4..7)        rank = (stage * dp + copy) * tp + slice
    stage 0          ranks 0 1  ---- dp ---- ranks 2 3                 tp: neighbours, who talk in every layer
      embedding,        |  |                    |  |                   dp: once per step, while backward runs
      layers 0 1       pp pp                   pp pp                   pp: between stages, once per micro-batch,
    stage 1             |  |                    |  |                       and once per step the tied embedding,
      layers, head   ranks 4 5  ---- dp ---- ranks 6 7                     which first and last stage both hold

Each technique is in its own file. This one says who is who (make_mesh), in which order they are applied (parallelize),
over which axes a gradient is summed (sum_gradients), what its norm is (gradient_norm), and what of it all is saved, so
that any other layout can go on (layouts.py).

    in numbers; T, P, D ranks; S tokens   plain GPT       one rank of a middle stage
    parameters, gradients                 12 C C L        12 C C L / (T P)
    AdamW states                          24 C C L        24 C C L / (T P), --zero 1: / D too
    activations, 1f1b                     16 B S C L      (4 + 12/T) B/(D M) S C L/P (P - stage), --sp: 16/T
    sends on tp, per step                 -               8 B/D S C L/P (T-1)/T, --sp: 10
    sends on dp, per step                 -               2 (D-1)/D of its gradients
    sends on pp, per step                 -               2 B/D S C, --sp: / T

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
arXiv:2104.04473, section 3. At work: DeviceMesh, fully_shard, parallelize_module, torch.distributed.pipelining.

    torchrun --standalone --nproc_per_node=8 hybrid_3d.py --dp 2 --tp 2 --pp 2
    python hybrid_3d.py --dry-run 512 --dp 8 --tp 8 --pp 8 --model gpt3-175b --batch 512 --micro 64 --sp --dtype bf16
"""
import contextlib
import sys
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

import amp_accum_ckpt
import pipeline_parallel
import tensor_parallel
import zero
from common import POSITIVE, Run, adamw, arguments, build, loss_sum, share
from harness import checkpoint
from harness.resharding import gather, layout, restore, sharded_state, whole_shape
from pipeline_parallel import Pipeline, Stage
from harness.timeline import bubble_rate, chunks, costs, in_flight, make_plans, simulate
from tensor_parallel import CutSequence, WholeSequence, unshard, vocab_parallel_cross_entropy, whole
from zero import ZeRO

# ---- 1. the technique (copy this; it needs torch and the files it imports) ---


def make_mesh(device, dp, tp, pp):
    """-> the ranks by pp, dp, tp, and this rank's group of first and last stage, which share the tied embedding.

    tp varies fastest: it talks most, so its ranks are neighbours; pp talks least (Narayanan 2021, section 3).
    """
    mesh, ends = init_device_mesh(device, (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp")), None
    if pp > 1:
        ends, _ = dist.new_subgroups_by_enumeration(mesh.mesh[[0, -1]].flatten(1).T.tolist())
    return mesh, ends


class Hybrid(nn.ModuleList):
    """This rank's stages of a model. homes: {name: (pp rank that has it, whole shape)} of all; tied: held twice."""

    def __init__(self, stages, homes, tied, mesh, ends):
        super().__init__(stages)
        self.homes, self.mesh, self.ends, self.group = homes, mesh, ends, mesh.get_group("pp")
        self.names = {p: name for stage in stages[::-1] for name, p in stage.named_parameters()}
        self.tied = [p for p, name in self.names.items() if name in tied]
        self.cuts = tensor_parallel.cuts(self)

    def optimize(self, zero, make_optimizer):
        """Over dp: blocks, and apart from them the edges, whose gradients wait for the sum of the tied ones."""
        blocks = nn.ModuleList(block for stage in self for block in stage.blocks.values())
        edges = nn.ModuleList(m for stage in self for name, m in stage.named_children() if name != "blocks")
        self.zeros = [ZeRO(part, make_optimizer, self.mesh.get_group("dp"), zero, units)
                      for part, units in ((blocks, list(zip(blocks))), (edges, [tuple(edges)])) if len(part)]
        self.flats = [flat for part in self.zeros for flat in part.flats]
        self.held = lambda: {kind: [t for part in self.zeros for t in part.held()[kind]]
                             for kind in ("parameters", "gradients", "optimizer")}

    def sync(self, chunk, last):
        """Before each backward: in a chunk's last one its blocks' gradients begin to be summed over dp."""
        for part, now in zip(self.zeros, (last, False)):
            part.sync = now

    def gradients(self):
        """-> [(parameter, this rank's piece of its gradient)]"""
        return [(part.parameter, part.grad) for zero in self.zeros for part in zero.parts]


def sum_gradients(model):
    """After backward: each gradient over the axes on which its copies have seen different things."""
    for p in model.tied:
        dist.all_reduce(p.grad, group=model.ends)  # over pp: partial -> replicated, before dp ranks cut it each its way
    for part in model.zeros:
        part.sync = True
        part.reduce()  # over dp: partial -> replicated, --zero 1: sharded
    uncut = [grad for p, grad in model.gradients() if p not in model.cuts]
    if isinstance(model.tp, CutSequence):
        tensor_parallel.sum_over_ranks(uncut, model.tp)  # over tp, norms and row biases: partial -> replicated


def gradient_norm(model):
    """Every number of the model's gradient once: a rank brings its part of those that others hold as well."""
    squares, tied, copies = [], set(model.tied), 1 if model.zeros[0].stage else model.mesh["dp"].size()
    for p, grad in model.gradients():
        holders = copies * (1 if p in model.cuts else model.tp.size) * (1 + (p in tied))
        norm = torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
        squares.append(norm.square() / holders)
    square = torch.stack(squares).sum()
    dist.all_reduce(square)  # over all axes: partial -> replicated
    return square.sqrt()


# ---- 2. the toy GPT, parallelized --------------------------------------------


def carve(model, mesh, ends, virtual, wrap=lambda stage: None):
    """-> this rank's stages of a model whose layers are cut already; wrap(stage) is called for each."""
    ranks, rank = mesh["pp"].size(), mesh.get_local_rank("pp")
    stages = [Stage(model, i, ranks * virtual) for i in range(ranks * virtual)]
    table = tensor_parallel.cuts(model)
    homes = {name: (i % ranks, whole_shape(p, table.get(p))) for i, stage in enumerate(stages)
             for name, p in stage.state_dict(keep_vars=True).items()}
    for stage in stages[rank::ranks]:
        wrap(stage)
    return Hybrid(stages[rank::ranks], homes, ("tok.weight", "head.weight") if ranks > 1 else (), mesh, ends)


def parallelize(model, mesh, ends, plans, boundary, sp=False, zero=0, ckpt="none", lr=1e-3):
    """The order of application: within a layer (tp), around it (ckpt), between layers (pp), copies of it all (dp)."""
    tp, vocab = (CutSequence if sp else WholeSequence)(mesh.get_group("tp")), len(model.tok.weight)
    if tp.size > 1:
        tensor_parallel.parallelize(model, tp)
    amp_accum_ckpt.parallelize(model, getattr(amp_accum_ckpt, ckpt, None))
    model, rows = carve(model, mesh, ends, chunks(plans[0])), boundary["size"][0]
    model.optimize(zero, partial(adamw, lr=lr))
    model.tp = tp
    pipeline = Pipeline(list(model), plans, model.group, boundary, model.sync)

    loss_of = loss_sum if tp.size == 1 else partial(vocab_parallel_cross_entropy, vocab=vocab, group=tp.group)

    def run(x, y, valid):
        targets = y.split(rows)
        return pipeline.step(x.split(rows), lambda logits, m: loss_of(logits, targets[m]) / valid) / tp.size
    model.run = run
    return model


def full_state_dict(model):
    mine = {name: p for stage in model for name, p in stage.state_dict(keep_vars=True).items()}
    return gather(model, {name: whole(unshard(p, model.cuts.get(p), model.tp)).detach() for name, p in mine.items()})


def full_gradients(model):
    mine = {p: p.grad for p in model.names}
    for part in getattr(model, "zeros", ()):
        parameters = dict(part.module.named_parameters())
        mine |= {parameters[name]: grad for name, grad in zero.full_gradients(part).items()}  # over dp: -> replicated
    found = gather(model, {model.names[p]: whole(unshard(grad, model.cuts.get(p), model.tp)) for p, grad in mine.items()})
    return {name: grad for name, grad in found.items() if name != "head.weight"}  # is tok.weight


def train_step(model, _, x, y, valid, clip):
    """x, y: the rows of this dp rank (B/D, T) -> this rank's part of the loss, gradient norm."""
    for part in model.zeros:
        part.zero_grad()
    loss = model.run(x, y, valid)
    sum_gradients(model)
    norm = gradient_norm(model)
    for _, grad in model.gradients() if clip else ():
        grad *= (clip / (norm.nan_to_num(0, posinf=0) + 1e-6)).clamp(max=1)
    for part in model.zeros:
        part.step()
    return loss, norm


# ---- 3. at work: the same with torch's own API -------------------------------


def local(t):
    return getattr(t, "_local_tensor", t)


def parallelize_at_work(model, mesh, ends, plans, boundary, schedule, sp):
    from torch.distributed import pipelining  # takes as long to import as all the rest
    (_, D, T), (V, _), S = mesh.shape, model.tok.weight.shape, len(model.pos.weight)
    if T > 1:
        tensor_parallel.parallelize_at_work(model, mesh["tp"], sp)
    columns, valid_targets, several = len(local(model.head.weight)), [1], schedule in ("interleaved", "zb-h1")

    def wrap(stage):
        if stage.last and T > 1:
            stage.register_forward_hook(lambda module, x, logits: logits.to_local())  # tensors go from stage to stage
        for part in [*stage.blocks.values(), stage] if D > 1 else ():
            fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)

    def loss(logits, targets):
        if T > 1:
            whole = torch.empty(*targets.shape, V, device="meta")
            logits = DTensor.from_local(logits, mesh["tp"], [Shard(2)], shape=whole.shape, stride=whole.stride())
        return loss_sum(logits, targets) * D / valid_targets[0]  # fully_shard averages over D

    model = carve(model, mesh, ends, chunks(plans[0]), wrap)
    edge = torch.empty(**boundary, requires_grad=True)  # told all shapes, torch need not ask ranks, which takes NumPy
    ids = torch.empty(len(edge), S, dtype=torch.int64, device=edge.device)
    logits, count = edge.new_empty(len(edge), S, columns), len(plans)
    parts = [pipelining.PipelineStage(
        stage, mesh.get_local_rank("pp") + i * count, count * len(model), edge.device, group=model.group,
        input_args=ids if stage.first else edge, output_args=logits if stage.last else edge)
        for i, stage in enumerate(model)]
    order = getattr(pipelining, pipeline_parallel.AT_WORK[schedule])(
        parts if several else parts[0], len({a.microbatch for a in plans[0]}), loss_fn=loss, scale_grads=False)  # a sum

    def run(x, y, valid):
        valid_targets[0], losses, last = valid, [], parts[-1].is_last
        with loss_parallel() if T > 1 else contextlib.nullcontext():
            order.step(*([x] if parts[0].is_first else []), target=y if last else None, losses=losses if last else None,
                       return_outputs=False)
        return sum((local(part.detach()) for part in losses), torch.zeros((), device=x.device)) / (D * T)
    model.run, model.tp = run, None
    return model


def train_step_at_work(model, optimizer, x, y, valid, clip):
    optimizer.zero_grad()
    loss = model.run(x, y, valid)
    for p in model.parameters():
        if isinstance(p, DTensor):
            p.grad = p.grad.redistribute(placements=p.placements)  # of a cut embedding it is replicated
    for p in model.tied:
        dist.all_reduce(local(p.grad), group=model.ends)  # partial -> replicated
    counted = set(model.parameters()) - set(model.tied if model.mesh.get_local_rank("pp") else ())
    square = whole(nn.utils.get_total_norm([p.grad for p in counted])).square()
    dist.all_reduce(square, group=model.group)  # partial -> replicated
    scale = ((clip or float("inf")) / (square.sqrt() + 1e-6)).clamp(max=1)
    torch._foreach_mul_([local(p.grad) for p in model.parameters()], scale)
    optimizer.step()
    return loss, square.sqrt()


# ---- 4. run ------------------------------------------------------------------

FLAGS = dict(
    dp=(int, "D, copies, which share the batch", POSITIVE), tp=(int, "T, ranks of a layer", POSITIVE),
    pp=(int, "P, stages; of the three, those left out follow from the number of ranks", POSITIVE),
    micro=(int, "M, micro-batches of a copy (4, or as many as divide its rows)", POSITIVE),
    schedule=("1f1b", "order of the work", ("gpipe", "1f1b", "interleaved", "zb-h1")),
    sp=(False, "cut norms and residuals over tp, along T"), zero=(0, "1: cut optimizer states over dp", (0, 1)),
    ckpt=("none", "what blocks compute again in backward", ("none", "full", "selective")), **checkpoint.FLAGS)


def account(run, model, plan, rows, own):
    """The textbook's rows for this rank; V', P' with padding; b, w: bytes of a number, of one in the optimizer."""
    mesh, (_, C, H, V, S), args, ledger = model.mesh, run.cfg, run.args, run.ledger["scratch"]
    _, D, T = mesh.shape
    L, first, last = sum(len(stage.blocks) for stage in model), model[0].first, model[-1].last
    V, sp = -(-V // T), args.sp and T > 1
    b, w, M, N = run.dtype.itemsize, max(run.dtype.itemsize, 4), args.batch // D // rows, rows * S
    x, t, Z, block = b * N * C, T if sp else 1, D if args.zero else 1, (12 * C + 7) * C // T + 6 * C
    P = L * block + first * (V - (-S // T)) * C + last * (2 + V * (not first)) * C
    padded, pairs = L * -(-block // Z) * Z + -(-(P - L * block) // Z) * Z, model.gradients()
    run.textbook("parameters", "b (L_s [(12 C + 7) C/T + 6 C], first (V'+S') C/T, last V' C/T + 2 C)", b * P, b * own)
    run.textbook("held", "2 b P' + (2 w, bf16 3 w) P'/Z + 4 per tensor (step)",
                 2 * b * padded + (2 + (b == 2)) * w * padded // Z + 4 * len(pairs),
                 sum(ledger.memory[kind] for kind in ("parameters", "gradients", "optimizer")))
    if args.ckpt == "none" and args.schedule in ("gpipe", "1f1b") and (T > 1 or not first and not last):
        micro = L * (4 * x // t + 12 * x // T + 4 * b * N // t + w * H // T * N) + first * 9 * (N + S)
        micro += last * (2 * (x + b * N) // t + (w * V + 9 + w) * N)
        run.textbook("activations", "kept x (L_s [(4/t + 12/T) b B' S C + 4 b B' S/t (norms) + w B' S H/T], first + "
                     "ids, last + logits)", int(in_flight(plan)) * micro, ledger.memory["activations"])
    full, uncut = args.ckpt == "full", sum(grad.nbytes for p, grad in pairs if p not in model.cuts)
    tp = M * (L * x * (10 + 3 * full if sp else 8 + 2 * full) + first * 2 * (x + b * S * C)
              + last * ((2 + sp) * x + 6 * w * N)) + sp * 2 * uncut
    hops, groups = sum((not stage.last) + (not stage.first) for stage in model) if mesh.size(0) > 1 else 0, {}
    for axis, group, formula, sent in (
            ("tp", mesh.get_group("tp"), "(T-1)/T [M b B' S C (8 L_s, --sp 10 L_s) + ends]", tp * (T - 1) / T),
            ("dp", mesh.get_group("dp"), "2 (D-1)/D b P'", 2 * (D - 1) * b * padded / D),
            ("pp", model.group, "M b B' S C/t per neighbour", hops * M * x // t),
            ("tied", model.ends, "b V' C/T", b * V * C * len(model.tied)),
            ("norm", dist.group.WORLD, "2 w (n-1)/n", 2 * (run.world_size - 1) * w / run.world_size)):
        if group is not None:  # axes that are all ranks have one group
            groups.setdefault(group.group_name, []).append((axis, formula, sent))
    for name, (axes, formulas, sent) in ((name, zip(*axis)) for name, axis in groups.items()):
        run.textbook("wire " + ", ".join(axes), " + ".join(formulas), sum(sent), ledger.groups[name])


def picture(run, model, plans):
    """Who is where, the bubble, the FLOPs."""
    (P, D, T), (L, C, _, V, S), near = model.mesh.shape, run.cfg, run.world_size <= 32
    for s in range(P) if near else [model.mesh.get_local_rank("pp")]:
        firsts = range(s * D * T, (s + 1) * D * T, T) if near else [run.rank - run.rank % T]
        layers = [share(L, P * len(model), c * P + s) for c in range(len(model))]
        run.say(f"  stage {s}, layers {' '.join(f'{r[0]}..{r[-1]}' for r in layers)}:  " + "   ".join(
            f"copy {i // T % D}: ranks {i}..{i + T - 1}" for i in firsts))
    flops = 72 * run.args.batch * S * L * C * C * (1 + S / (6 * C) + V / (12 * L * C))  # Narayanan 2021, 5.1
    late = 1.0 if T == 1 else 5 / 12  # tensor_parallel.py makes the gradients of q, k, v and up in B
    idle = run.extra["bubble_rate"] = bubble_rate(simulate(plans, costs(plans, 1.0, 2.0 - late, late)))
    run.say(f"  {run.args.schedule}: bubble {idle:.1%} (matmuls alone); model FLOPs {flops:.3g} per step")


def main():
    args = arguments(__doc__, **FLAGS)
    cfg, (D, T, P, M, virtual) = args.cfg, layout(args)
    start = checkpoint.begin(args)
    rows, sp, plans = args.batch // D // M, args.sp and T > 1, make_plans(args.schedule, P, M, virtual)
    run, sides = Run(args), {}
    mesh, ends = make_mesh(run.device.type, D, T, P)
    dp_rows = share(args.batch, D, mesh.get_local_rank("dp"))
    boundary = dict(size=(rows, cfg.seq // (T if sp else 1), cfg.width), dtype=run.dtype, device=run.device)
    with run:
        for impl in run.impls:
            model, optimizer = build(cfg, args.seed, run.device, run.dtype), None
            total = sum(p.numel() for p in model.parameters())
            if impl == "scratch":
                model = parallelize(model, mesh, ends, plans, boundary, sp, args.zero, args.ckpt, args.lr)
            else:
                model = parallelize_at_work(model, mesh, ends, plans, boundary, args.schedule, sp)
                optimizer = adamw(model.parameters(), args.lr)
            sides[impl] = model, optimizer, train_step if impl == "scratch" else train_step_at_work
        model = sides[run.impls[0]][0]
        own = sum(local(p).numel() for p in model.parameters())
        restore(model, start)
        run.go_on(start, full_state_dict, model)
        run.say(f"hybrid_3d: {run.world_size} ranks = dp {D} x tp {T} x pp {P} on {run.device.type}, {args.dtype}, "
                f"{total:,} parameters, {own:,} on rank {run.rank}")
        picture(run, model, plans)
        for impl, step in run.steps():
            model, optimizer, step_fn = sides[impl]
            x, y, valid = run.batch(step, dp_rows)
            with run.measure(impl, step, model, optimizer):
                loss, norm = step_fn(model, optimizer, x, y, valid, args.clip)
            run.log(impl, step, loss, norm, full_gradients, full_state_dict, model)
            if checkpoint.due(run, step):
                checkpoint.write(run, step, sharded_state(model))
        if "scratch" in run.impls:
            account(run, sides["scratch"][0], plans[mesh.get_local_rank("pp")], rows, own)
        return run.finish(total, own)


if __name__ == "__main__":
    sys.exit(main())
