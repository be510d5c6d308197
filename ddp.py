"""Data parallelism: every rank has the whole model and a part of the batch; gradients are summed.

    rank 0    rows 0..3   forward | backward: block 3 | block 2 | block 1 | block 0 |         | step
    rank 1    rows 4..7   forward | backward: block 3 | block 2 | block 1 | block 0 |         | step
    all-reduce of bucket                              | 0       | 1       | 2       | 3       |

Gradients are views into flat buckets, filled in the order in which backward makes them. The
all-reduce of a bucket starts as soon as it is full: all but the last travel while backward runs.

    on each rank, P parameters of 4 bytes   plain GPT     here, on N ranks
    parameters, gradients, AdamW states     16 P          16 P
    activations                             whole batch   1/N
    sent per step (ring all-reduce of 4 P)  -             2 (N-1)/N * 4 P

    model = BucketedDDP(model, average=False)  # sums gradients over ranks; by default it averages
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = token_losses.sum() / valid_targets_of_all_ranks  # token_losses: of this rank's rows
    loss.backward()  # now gradients are the same on all ranks
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

Not for: sparse embedding gradients, second derivatives (create_graph=True), reentrant
checkpointing, parameters added, frozen or thawed after wrapping or with gradients before it,
BatchNorm (buffers are made equal once). All ranks must make the same number of backwards. Each
backward must reach at least one trained parameter; those not reached get gradients of 0.

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
arXiv:2006.15704, section 3. At work: torch.nn.parallel.DistributedDataParallel, section 3 below.

    torchrun --standalone --nproc_per_node=2 ddp.py
"""
import contextlib
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn

# imports of section 1 end here; the rest is for sections 2 to 4
import sys

from torch.nn.parallel import DistributedDataParallel

from common import adamw, clip_gradients, loss_sum, share
from harness.flags import ANY, Flag, arguments, require
from harness.run import Run, Side

# ---- 1. the technique (copy this; it needs only torch) -----------------------


def all_reduce_gradients(module, group=None):
    """The naive form: sums gradients after backward. The ranks must begin with equal parameters."""
    for p in module.parameters():
        if p.grad is not None:  # must be so on all ranks or on none
            dist.all_reduce(p.grad, group=group)  # partial (a summand each) -> replicated (the sum)


class Bucket:
    """Gradients of some parameters, side by side in one flat tensor, for one all-reduce."""

    def __init__(self, parameters, group, average):
        sizes = [p.numel() for p in parameters]
        self.group = group
        self.average = average
        self.flat = parameters[0].new_zeros(sum(sizes))
        self.views = {p: piece.view_as(p) for p, piece in zip(parameters, self.flat.split(sizes))}
        self.missing = len(parameters)  # gradients yet to come; not counted in no_sync()
        self.work = None  # Work of the last all-reduce

    def take(self, p):
        """Move a gradient that autograd has made into the bucket, and leave a view in its place."""
        view = self.views[p]
        if p.grad is view:
            return  # backward has found the view there, and has added to it
        view.copy_(p.grad)
        p.grad = view

    def start(self):
        for p, view in self.views.items():
            if p.grad is None:  # this rank has not used it
                p.grad = view.zero_()
        # partial -> replicated, while backward goes on
        self.work = dist.all_reduce(self.flat, group=self.group, async_op=True)

    def finish(self):
        self.work.wait()  # on GPUs the stream waits for it, not the host
        if self.average:
            self.flat.div_(dist.get_world_size(self.group))
        self.missing = len(self.views)


class BucketedDDP(nn.Module):
    """Data parallelism for a module: when loss.backward() returns, gradients are reduced.

    group: the ranks, each with rows of its own
    bucket_mb: limit of a bucket (MB = 1e6 bytes), but at most a quarter of all trained parameters.
        A larger parameter has a bucket of its own. All in a bucket have one dtype
    first_bucket_mb: limit of the first bucket: a small one, so that communication starts early
    average: False sums gradients instead

    All ranks begin with the first one's parameters and buffers. Tied parameters are counted once.
    Frozen ones are left out: freeze before wrapping. Of several backwards before a zero_grad() all
    but the last belong into no_sync(), since a sum must not be summed again.
    """

    def __init__(self, module, group=None, bucket_mb=25, first_bucket_mb=1, average=True):
        super().__init__()
        wrapped = any(hasattr(p, "is_in_bucket") for p in module.parameters())
        assert not wrapped, "in a BucketedDDP already: gradients would be summed twice"
        self.module = module
        self.sync = True  # False within no_sync()
        self.queued = False  # True within a backward, until autograd has called finish()
        self.started = 0  # buckets of this backward whose all-reduce has been started
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.data, group=group, group_src=0)  # the first rank's -> replicated
        self.buckets = []
        for parameters in self.layout(bucket_mb * 1e6, first_bucket_mb * 1e6):
            bucket = Bucket(parameters, group, average)
            self.buckets.append(bucket)
            for p in parameters:
                p.is_in_bucket = True
                p.register_post_accumulate_grad_hook(partial(self.ready, bucket))

    def layout(self, bytes_each, bytes_first):
        """-> for each bucket a list of trained parameters, all of one dtype."""
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        assert parameters, "all parameters are frozen: nothing to sum"
        # at most a quarter of the whole, since the last bucket travels when backward is over
        bytes_each = min(bytes_each, sum(p.nbytes for p in parameters) / 4)
        room = min(bytes_each, bytes_first)  # bytes left in buckets[-1]
        buckets = [[]]
        for p in reversed(parameters):  # roughly the order in which gradients are made
            if buckets[-1] and (p.nbytes > room or p.dtype != buckets[-1][0].dtype):
                buckets.append([])
                room = bytes_each
            buckets[-1].append(p)
            room -= p.nbytes
        return buckets

    def forward(self, *args, **kwargs):
        assert not self.queued, "BucketedDDP: a backward has raised. Make the model anew"
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self):
        """Backwards in here only accumulate; the first one after it reduces the sum."""
        before = self.sync  # False if one no_sync() is in another
        self.sync = False
        try:
            yield
        finally:
            self.sync = before

    def ready(self, bucket, p):
        """Autograd's call when p's gradient is complete: once in a backward, also if p is tied."""
        bucket.take(p)
        if not self.sync:
            return
        if not self.queued:
            # autograd calls finish when all of this backward is over
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
            self.queued = True
        bucket.missing -= 1
        # Bucket i + 1 waits for bucket i, even if it is full first: ranks may make their gradients
        # in different orders, but must agree on the order of collectives
        while self.started < len(self.buckets) and self.buckets[self.started].missing == 0:
            self.start_next()

    def start_next(self):
        self.buckets[self.started].start()
        self.started += 1

    def finish(self):
        while self.started < len(self.buckets):  # this backward has not used all parameters
            self.start_next()
        for bucket in self.buckets:
            bucket.finish()
        self.started = 0
        self.queued = False


# ---- 2. the toy GPT, parallelized --------------------------------------------


def parallelize(model, group=None, bucket_mb=25.0):
    """The toy divides by the global batch's valid targets: gradients are summed, not averaged."""
    return BucketedDDP(model, group, bucket_mb, average=False)


def full_state_dict(model):
    return model.module.state_dict()


def full_gradients(model):
    return {name: p.grad for name, p in model.module.named_parameters() if p.requires_grad}


def train_step(model, optimizer, x, y, valid, clip, naive=False):
    """x, y: this rank's rows (B/N, T); valid: targets of the whole batch; naive: model is plain.

    -> this rank's part of the loss, gradient norm.
    """
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    loss.backward()  # BucketedDDP: partial -> replicated
    if naive:
        all_reduce_gradients(model)  # partial -> replicated
    norm = clip_gradients(model.parameters(), clip)
    optimizer.step()
    return loss, norm


# ---- 3. at work: the same with torch's own API -------------------------------


def train_step_at_work(model, optimizer, x, y, valid, clip):
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    (loss * dist.get_world_size()).backward()  # DistributedDataParallel averages; we want the sum
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
    optimizer.step()
    return loss, norm


# ---- 4. run ------------------------------------------------------------------


def refuse(args):
    n = args.world_size
    require(args.batch >= n, f"--batch {args.batch} for {n} ranks: give each at least one sequence")
    require(args.impl == "scratch" or not args.dry_run,
            "--dry-run needs --impl scratch: torch's C++ reducer wants real ranks")


def set_up(run, impl):
    plain = run.build()
    optimizer = adamw(plain.parameters(), run.args.lr)  # wrappers keep the parameters
    if impl == "torch":
        model = DistributedDataParallel(plain, gradient_as_bucket_view=True)
        return Side(model=model, optimizer=optimizer, train_step=train_step_at_work)
    if run.args.bucket_mb:
        model = parallelize(plain, None, run.args.bucket_mb)
        return Side(model=model, optimizer=optimizer, train_step=train_step)
    return Side(model=plain, optimizer=optimizer, train_step=partial(train_step, naive=True))


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
    args = arguments(__doc__, bucket_mb=Flag(25.0, "our largest bucket in MB; 0: naive form", ANY))
    refuse(args)
    with Run(args) as run:
        sides = {impl: set_up(run, impl) for impl in run.impls}
        parameters = list(sides[run.impls[0]].model.parameters())
        rows = share(args.batch, run.world_size, run.rank)  # of every batch, this rank's
        for impl, step, x, y, valid in run.steps(sides, rows):
            side = sides[impl]
            with run.measure(impl, step):
                loss, norm = side.train_step(side.model, side.optimizer, x, y, valid, args.clip)
            run.log(impl, step, loss, norm)
        run.textbook(textbook(run, parameters))
        return run.finish()


if __name__ == "__main__":
    sys.exit(main())
