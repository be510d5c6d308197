"""Data parallelism: every rank has the whole model and a part of the batch; gradients are summed.

    rank 0    rows 0..3   forward | backward: block 3 | block 2 | block 1 | block 0 |         | step
    rank 1    rows 4..7   forward | backward: block 3 | block 2 | block 1 | block 0 |         | step
    all-reduce of the gradients of                    | block 3 | block 2 | block 1 | block 0 |

    model = BucketedDDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    valid = (y != -100).sum()  # x, y: this rank's rows
    dist.all_reduce(valid)  # targets of all ranks
    loss = loss_sum(model(x), y) / valid
    loss.backward()  # now gradients are the same on all ranks
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

    on each rank, P parameters of 4 bytes   plain GPT     here, on N ranks
    parameters, gradients, AdamW states     16 P          16 P
    activations                             whole batch   1/N
    sent per step (ring all-reduce of 4 P)  -             2 (N-1)/N * 4 P

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
arXiv:2006.15704, section 3. At work: torch.nn.parallel.DistributedDataParallel, part 4 below.

Not for: sparse embedding gradients; BatchNorm (buffers are made equal once); parameters added,
cast, frozen or thawed after wrapping; a deepcopy that is trained; second derivatives; reentrant
checkpointing; backwards that raise, ranks with different numbers of them, or one backward through
two models of one group. Parameters that no rank has used get gradients of 0.

    torchrun --standalone --nproc_per_node=2 ddp.py
"""
import contextlib
import weakref

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

# imports of parts 1 and 2 end here; the rest is for parts 3 to 5
import sys

from torch.nn.parallel import DistributedDataParallel

from common import clip_gradients, loss_sum, share

# ---- 1. the idea -------------------------------------------------------------


def begin_alike(model, group=None):
    """Once, before the first step."""
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.contiguous()  # a broadcast sends memory, whatever the strides
        dist.broadcast(tensor.data, group=group, group_src=0)  # the first rank's -> replicated


def all_reduce_gradients(model, group=None):
    """After backward: partial (each rank has a summand) -> replicated (each has the sum)."""
    for p in model.parameters():
        if p.requires_grad:
            if p.grad is None:  # not used by this rank's rows; the others wait for its summand
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=group)  # partial -> replicated


def idea_step(model, optimizer, x, y, valid, clip):
    """x, y: this rank's rows (B/N, T); valid: the number of targets in all ranks' rows; clip: the
    largest norm (math.inf: no clipping)."""
    optimizer.zero_grad()
    # A sum over this rank's tokens, divided by the number of targets on all ranks: so gradients add
    # up to the whole batch's. A mean of the ranks' means would weigh tokens by where they are.
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / valid
    loss.backward()
    all_reduce_gradients(model)
    # from here on every rank does the same, and they stay alike
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss, norm


# ---- 2. the technique (copy this; of part 1 it takes begin_alike) ------------

# What it adds to the idea, and what that buys. Calls are those of part 3's toy.
#     one tensor for many gradients     68 calls -> 5, each larger
#     sent while backward still runs    4 of 5 buckets begin before it is over
# Which needs one order of buckets (ranks may make gradients in different ones), no_sync() (of M
# backwards the last one sends), and finish() (nothing is left to call after backward).


class Bucket:
    """Some parameters, whose gradients travel side by side in a flat tensor, by one all-reduce."""

    def __init__(self, parameters, group):
        # a function, which a deepcopy (for averages of weights) shares; of a group it would raise
        self.all_reduce = lambda flat: dist.all_reduce(flat, group=group, async_op=True)
        self.parameters = parameters
        self.missing = len(parameters)  # gradients of this backward that have not come yet

    def start(self):
        """Moves gradients into a flat tensor, of which they become views, and begins its sum.

        -> the Work of the all-reduce
        """
        for p in self.parameters:
            if p.grad is None:  # not used by this rank's rows; the others wait for its summand
                p.grad = torch.zeros_like(p)
            assert not hasattr(p.grad, "is_sum"), "summed twice: zero_grad() (to None) is missing"
        flat = torch.cat([p.grad.flatten() for p in self.parameters])
        pieces = flat.split([p.numel() for p in self.parameters])
        for p, piece in zip(self.parameters, pieces):
            p.grad = piece.view_as(p)
            p.grad.is_sum = True  # a mark that zero_grad() takes away with the gradient
        self.missing = len(self.parameters)  # of the next backward
        # partial -> replicated, while backward goes on
        return self.all_reduce(flat)


class BucketedDDP(nn.Module):
    """Data parallelism for a module: when loss.backward() returns, gradients are summed.

    group: the ranks, each with rows of its own
    bucket_mb: the largest MB (1e6 bytes) of parameters in a bucket, never over a quarter of all
        that train. A larger parameter has a bucket of its own. All in a bucket have one dtype

    All ranks begin with the first one's parameters and buffers. Frozen parameters are left out:
    freeze before wrapping. Between two zero_grad() (to None, torch's default) only the last
    backward is outside of no_sync(): else a sum would be added to, which raises.
    """

    def __init__(self, module, group=None, bucket_mb=25):
        super().__init__()
        assert not any(hasattr(m, "is_of_experts") for m in module.modules()), (
            "ranks have different experts: take moe.py's broadcast_parameters and sum_gradients")
        self.module = module
        self.sync = True  # False within no_sync()
        self.to_start = []  # buckets that this backward has still to send; empty between backwards
        self.works = []  # of its all-reduces; likewise
        begin_alike(module, group)  # the first rank's -> replicated
        self.buckets = [Bucket(parameters, group) for parameters in self.layout(bucket_mb * 1e6)]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        ready = weakref.WeakMethod(self.ready)  # a hook with self in it would keep it for ever
        for p in self.bucket_of:
            assert not hasattr(p, "is_summed"), "wrapped already: two sums; wrap a deepcopy"
            p.is_summed = True
            p.grad = None  # left from before: it is of no step here
            p.register_post_accumulate_grad_hook(lambda p: ready()(p))

    def layout(self, limit):
        """limit: bytes of a bucket -> [parameters of a bucket, all of one dtype]"""
        parameters = [p for p in self.module.parameters() if p.requires_grad]  # a tied one once
        assert parameters, "all parameters are frozen: nothing to sum"
        # at most a quarter of the whole, since the last bucket travels when backward is over
        limit = min(limit, sum(p.nbytes for p in parameters) / 4)
        buckets = []
        room = 0  # bytes left in the last bucket
        for p in reversed(parameters):  # roughly the order in which gradients are made
            if not buckets or p.nbytes > room or p.dtype != buckets[-1][0].dtype:
                buckets.append([])
                room = limit
            buckets[-1].append(p)
            room -= p.nbytes
        return buckets

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def ready(self, p):
        """Autograd's call when p's gradient is complete: once in a backward, also if p is tied."""
        assert not hasattr(p.grad, "is_sum"), (
            "added to a sum: zero_grad() (to None) or no_sync() is missing")
        if not self.sync:
            return
        if not self.to_start:  # the first gradient of this backward
            self.to_start = list(self.buckets)
            # autograd calls finish when all of this backward is over
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        self.bucket_of[p].missing -= 1
        # A bucket waits for the one before it, even if it is full first: ranks may make their
        # gradients in different orders, but must agree on the order of collectives
        while self.to_start and self.to_start[0].missing == 0:
            self.works.append(self.to_start.pop(0).start())

    def finish(self):
        for bucket in self.to_start:  # this backward has not used all parameters
            self.works.append(bucket.start())
        self.to_start = []
        for work in self.works:
            work.wait()  # on GPUs the stream waits for it, not the host
        self.works = []

    @contextlib.contextmanager
    def no_sync(self):
        """Backwards in here only accumulate; a step needs one after it, which sends the sum."""
        self.sync = False
        try:
            yield
        finally:
            self.sync = True


# ---- 3. the toy GPT, parallelized --------------------------------------------


def parallelize(model, group=None, bucket_mb=25.0):
    return BucketedDDP(model, group, bucket_mb)


def train_step(model, optimizer, x, y, valid, clip):
    """x, y: this rank's rows (B/N, T); valid: targets of the whole batch.

    -> this rank's part of the loss, gradient norm.
    """
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    loss.backward()  # BucketedDDP: partial -> replicated
    norm = clip_gradients(model.parameters(), clip)
    optimizer.step()
    return loss, norm


# ---- 4. at work: the same with torch's own API -------------------------------


def train_step_at_work(model, optimizer, x, y, valid, clip):
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    (loss * dist.get_world_size()).backward()  # DistributedDataParallel averages; we want the sum
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss, norm


# ---- 5. run ------------------------------------------------------------------

FLAGS = {"--bucket-mb": dict(type=float, default=25.0, least=0, help="our largest bucket in MB")}
VARIANTS = ("",)  # flags with which the file is worth running


def set_up(run, impl):
    """-> a Side: what the run steps, judges and saves, see harness/run.py."""
    model = run.build()
    optimizer = run.optimizer(model.named_parameters())  # wrappers keep the parameters
    if impl == "torch":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return run.side(model, optimizer, train_step_at_work)
    if impl == "idea":
        begin_alike(model)
        return run.side(model, optimizer, idea_step)
    model = parallelize(model, None, run.args.bucket_mb)
    return run.side(model, optimizer, train_step)


def textbook(run, parameters):
    n = run.world_size
    size = run.dtype.itemsize * sum(p.numel() for p in parameters)  # b P
    return [
        ("payload all_reduce", "b P", size),
        ("wire all_reduce", "2 (N-1)/N b P", 2 * (n - 1) * size / n),
        ("held parameters", "b P", size),
        ("held gradients", "b P", size),
        ("held optimizer", "2 b P + 4 per tensor (step counter)", 2 * size + 4 * len(parameters)),
    ]


def main():
    from harness.flags import arguments, require  # not above: ddp.py is imported without harness/
    from harness.run import Run

    args = arguments(__doc__, FLAGS)
    n = args.world_size
    require(args.batch >= n, f"--batch {args.batch} for {n} ranks: give each at least one sequence")
    require(args.impl in ("idea", "scratch") or not args.dry_run,
            "--dry-run needs --impl scratch or idea: torch's C++ reducer wants real ranks")
    with Run(args) as run:
        sides = {impl: set_up(run, impl) for impl in run.impls}
        run.train(sides, rows=share(args.batch, n, run.rank))
        run.textbook(textbook(run, list(sides[run.impls[0]].model.parameters())))
        return run.finish()


if __name__ == "__main__":
    sys.exit(main())
