r"""Data parallelism: every rank holds the whole model and a part of the batch; gradients are summed over ranks.

    rank 0   rows 0..3   forward | backward: block 3   block 2   block 1   block 0 | step
    rank 1   rows 4..7   forward | backward: block 3   block 2   block 1   block 0 | step
                                                  \_________\_________\_________\
                                   all-reduce        bucket 0  bucket 1   bucket 2      meanwhile

Gradients are views into flat buckets, filled in the order in which backward makes them. A full bucket's all-reduce
starts at once, so that all but the last travel while backward still runs.

    on each rank, P parameters of 4 bytes, N ranks     plain GPT     here
    parameters, gradients, AdamW states                16 P          16 P
    activations                                        whole batch   1/N
    sent per step                                      -             4 P * 2 (N-1)/N, by all-reduces of 4 P in all

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv:2006.15704, section 3.
At work: torch.nn.parallel.DistributedDataParallel (section 3 below).

    torchrun --standalone --nproc_per_node=2 ddp.py
"""
import contextlib
import math
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from common import (
    ANY, Flag, Run, Side, adamw, arguments, clip_gradients, get_batch, loss_sum, require, share)
from harness.checkpoint import pieces_of

# ---- 1. the technique (copy this; it needs only torch) -----------------------


def all_reduce_gradients(module, group=None):
    """The naive form, after backward: one all-reduce (a sum) for each parameter; all ranks must have used the same."""
    for p in module.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, group=group)  # partial -> replicated


class Bucket:
    """Parameters of one dtype and device; their gradients lie side by side in one flat tensor, for one all-reduce."""

    def __init__(self, parameters):
        self.parameters, sizes = parameters, [p.numel() for p in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        pieces = self.flat.split(sizes)
        # with the strides of p, which optimizers that go by memory rely on
        self.views = [t.as_strided(p.shape, torch.empty_like(p).stride()) for t, p in zip(pieces, parameters)]
        self.missing, self.work = len(parameters), None

    def take(self, i):
        """Move a gradient that autograd has just made into the bucket, and leave a view of it in its place.

        Adding 0.0 is a copy that turns -0.0 into 0.0, see `finish`.
        """
        p, view = self.parameters[i], self.views[i]
        if p.grad is not view:
            torch.add(p.grad, 0.0, out=view)
            p.grad = view

    def start(self, group):
        for i, p in enumerate(self.parameters):
            if p.grad is None:
                self.views[i].fill_(-0.0)  # not used by this rank's backward: adds nothing, and says so
            else:
                self.take(i)
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)  # partial -> replicated, while backward runs

    def finish(self, divisor):
        """Wait for the sum. A parameter that no rank used keeps the gradient None, as it would in one process.

        A sum is -0.0 if and only if every summand is: the sign of zero tells used from unused, without a collective.
        """
        self.work.wait()
        for p, view in zip(self.parameters, self.views):
            if p.grad is None and not (view.eq(0) & view.signbit()).all():
                p.grad = view
        if divisor != 1:
            self.flat.div_(divisor)


class BucketedDDP(nn.Module):
    """Data parallelism for any module: when loss.backward() returns, gradients are reduced over `group`.

    Parameters and buffers are broadcast from the group's rank 0 at the start. Gradients are views into flat buckets of
    at most bucket_mb (MB = 1e6 bytes), the first of first_bucket_mb so that communication starts early, and none above
    a quarter of the whole, so that the last to start, which nothing hides, is small; a larger parameter has one of its
    own, as GPT-2's embedding. Frozen parameters are left out, tied ones counted once, dtypes do not share a bucket, and
    parameters unused by some ranks get the others' gradient. average=False sums; then call zero_grad before the next
    synchronized backward. After a backward that ended in an exception, on every rank, go on with zero_grad.

    Every rank must run the same number of synchronized backwards. With reentrant checkpointing hooks fire twice: use
    use_reentrant=False. Unlike DistributedDataParallel it does not broadcast buffers again in every forward.
    """

    def __init__(self, module, group=None, bucket_mb=25, first_bucket_mb=1, average=True):
        super().__init__()
        self.module, self.group, self.sync, self.queued = module, group, True, False
        self.divisor = dist.get_world_size(group) if average else 1
        with torch.no_grad():
            for t in [*module.parameters(), *module.buffers()]:
                dist.broadcast(t, group=group, group_src=0)  # rank 0's -> replicated
        self.buckets = [Bucket(run) for run in self.layout(bucket_mb * 1e6, first_bucket_mb * 1e6)]
        self.started = 0  # buckets of this backward whose all-reduce is under way
        for bucket in self.buckets:
            for i, p in enumerate(bucket.parameters):
                p.register_post_accumulate_grad_hook(lambda _, bucket=bucket, i=i: self.ready(bucket, i))

    def layout(self, bytes_each, bytes_first):
        """Trainable parameters in reverse, roughly the order of their gradients -> lists, each one bucket's."""
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        bytes_each = min(bytes_each, sum(p.nbytes for p in parameters) / 4)
        buckets, last, room = [], {}, {}
        for p in reversed(parameters):
            kind = p.dtype, p.device
            if room.get(kind, 0) < p.nbytes:
                room[kind] = bytes_each if buckets else min(bytes_each, bytes_first)
                last[kind] = []
                buckets.append(last[kind])
            last[kind].append(p)
            room[kind] -= p.nbytes
        return buckets

    def forward(self, *args, **kwargs):
        if self.queued:  # the backward before ended in an exception
            self.reset()
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self):
        """Backwards in here only accumulate; the first one after it reduces the sum."""
        self.sync, before = False, self.sync
        try:
            yield
        finally:
            self.sync = before

    def ready(self, bucket, i):
        """Autograd's call when a parameter's gradient is complete: of a tied one, the sum over all its uses."""
        bucket.take(i)
        if not self.sync:
            return
        if not self.queued:
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)  # when this backward is over
            self.queued = True
        bucket.missing -= 1
        # always in the order of the list: ranks may make their gradients in different orders, but must agree on calls
        while self.started < len(self.buckets) and not self.buckets[self.started].missing:
            self.start_next()

    def start_next(self):
        self.buckets[self.started].start(self.group)
        self.started += 1

    def finish(self):
        while self.started < len(self.buckets):  # those with parameters that this backward did not use
            self.start_next()
        for bucket in self.buckets:
            bucket.finish(self.divisor)
        self.reset()

    def reset(self):
        self.started, self.queued = 0, False
        for bucket in self.buckets:
            if bucket.work:
                bucket.work.wait()
            bucket.missing, bucket.work = len(bucket.parameters), None


# ---- 2. the toy GPT, parallelized --------------------------------------------


def parallelize(model, group=None, bucket_mb=25.0):
    """The toy divides by the global batch's valid targets, so gradients are summed, not averaged."""
    return BucketedDDP(model, group, bucket_mb, average=False) if bucket_mb else model


def full_state_dict(model):
    return getattr(model, "module", model).state_dict()


def full_gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def evaluate(model, x, y):
    """x, y: this rank's rows of held-out text -> its part of the sum of token losses."""
    return loss_sum(model(x), y)


def train_step(model, optimizer, x, y, valid, clip):
    """x, y: this rank's rows (B/N, T); valid: of the whole batch -> this rank's part of the loss, gradient norm."""
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    loss.backward()  # partial -> replicated, inside BucketedDDP
    if not isinstance(model, BucketedDDP):
        all_reduce_gradients(model)
    norm = clip_gradients(model.parameters(), clip)  # replicated: no communication
    optimizer.step()
    return loss, norm


# ---- 3. at work: the same with torch's own API -------------------------------


class Sequences(Dataset):
    """Every sequence of the run in order: number i is row i % batch of its step i // batch."""

    def __init__(self, run):
        self.corpus, self.args, self.seq, self.first = run.corpus, run.args, run.cfg.seq, run.first

    def __len__(self):
        return self.args.batch * (self.args.steps - self.first)

    def __getitem__(self, i):
        a, (step, row) = self.args, divmod(i, self.args.batch)
        x, y, valid = get_batch(self.corpus, self.seq, a.seed, self.first + step, a.batch, a.pad, rows=[row])
        return x[0], y[0], valid


def loader_at_work(run):
    """This rank's batches: the sampler deals rows out in turn, so that each step's B rows are the plain run's."""
    data = Sequences(run)
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=run.args.batch // run.world_size, sampler=sampler)
    sampler.set_epoch(0)  # before every epoch; with shuffle=True it is what makes epochs differ
    for x, y, valid in loader:
        yield x.to(run.device), y.to(run.device), valid[0].item()


def train_step_at_work(model, optimizer, x, y, valid, clip):
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    (loss * dist.get_world_size()).backward()  # DistributedDataParallel averages; the sum is wanted here
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    optimizer.step()
    return loss, norm


# ---- 4. run ------------------------------------------------------------------


def refuse(args):
    """What cannot run ends here, in one line, before anything is built."""
    n = args.world_size
    scratch = args.impl == "scratch"
    require(args.batch >= n, f"--batch {args.batch} sequences for {n} ranks: give each at least one")
    require(scratch or not args.dry_run,
            "--dry-run needs --impl scratch: torch's C++ reducer wants real ranks")
    require(scratch or args.batch % n == 0,
            f"--batch {args.batch}: torch's sampler wants a multiple of {n}")


def set_up(run, impl):
    """-> a Side: the model of this implementation, and what a run does with it."""
    rows = share(run.args.batch, run.world_size, run.rank)  # of every batch, this rank's
    plain = run.build()
    if impl == "scratch":
        model = parallelize(plain, None, run.args.bucket_mb)
        step = train_step
    else:
        model = DistributedDataParallel(plain, gradient_as_bucket_view=True)
        step = train_step_at_work
    optimizer = adamw(plain.parameters(), run.args.lr)
    return Side(
        model=model,
        optimizer=optimizer,
        train_step=step,
        full_gradients=lambda: full_gradients(plain),
        full_state_dict=plain.state_dict,
        evaluate=lambda k: evaluate(plain, *run.held_out(k, rows)),
        pieces=lambda: pieces_of(plain.named_parameters(), optimizer, writes=run.rank == 0),
    )


def batches_of(run, impl):
    """This rank's rows of every step's batch: inputs, targets, valid targets of the whole batch."""
    if impl == "torch":
        yield from loader_at_work(run)
    rows = share(run.args.batch, run.world_size, run.rank)
    for step in range(run.first, run.last + 1):
        yield run.batch(step, rows)


def account(run, model):
    """The textbook's rows: P parameters that are trained, of b bytes, and F that are frozen."""
    n = run.world_size
    b = run.dtype.itemsize
    trained = [p for p in model.parameters() if p.requires_grad]
    size = b * sum(p.numel() for p in trained)
    whole = b * sum(p.numel() for p in model.parameters())
    counters = 4 * len(trained)
    ledger = run.ledger[run.impls[0]]
    held = ledger.memory
    reduced = ledger.collectives["all_reduce"]
    run.textbook("gradients all-reduced", "b P", size, reduced["payload"])
    run.textbook("wire all_reduce", "2 (N-1)/N b P", 2 * (n - 1) * size / n, reduced["wire"])
    run.textbook("parameters held", "b (P + F)", whole, held["parameters"])
    run.textbook("gradients held", "b P", size, held["gradients"])
    run.textbook("AdamW states held", "2 b P + 4 per tensor (step counter)", 2 * size + counters,
                 held["optimizer"])


def main():
    args = arguments(__doc__, bucket_mb=Flag(25.0, "largest bucket in MB; 0: the naive form", ANY))
    refuse(args)
    run = Run(args)
    with run:
        sides = {impl: set_up(run, impl) for impl in run.impls}
        run.begin(sides)
        model = sides[run.impls[0]].model
        total = sum(p.numel() for p in model.parameters())
        run.say(f"ddp: {run.world_size} ranks on {run.device.type}, {args.dtype}, "
                f"{total:,} parameters, all of them on each rank")
        batches = {impl: batches_of(run, impl) for impl in run.impls}
        for impl, step in run.steps():
            side = sides[impl]
            run.set_rate(side.optimizer, step)
            x, y, valid = next(batches[impl])
            with run.measure(impl, step):
                loss, norm = side.train_step(side.model, side.optimizer, x, y, valid, args.clip)
            run.log(impl, step, loss, norm)
        account(run, model)
        return run.finish(total, total)


if __name__ == "__main__":
    sys.exit(main())
