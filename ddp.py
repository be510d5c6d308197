r"""Data parallelism: every rank has the whole model and a part of the batch; gradients are summed.

    rank 0   rows 0..3   forward | backward: block 3   block 2   block 1   block 0 | step
    rank 1   rows 4..7   forward | backward: block 3   block 2   block 1   block 0 | step
                                                  \_________\_________\_________\
                                   all-reduce        bucket 0  bucket 1  bucket 2

Gradients are views into flat buckets, filled in the order in which backward makes them. The
all-reduce of a bucket starts as soon as it is full, so that all but the last travel while backward
still runs.

    on each rank, P parameters of 4 bytes   plain GPT     here, on N ranks
    parameters, gradients, AdamW states     16 P          16 P
    activations                             whole batch   1/N
    sent per step                           -             2 (N-1)/N * 4 P
      by                                    -             all-reduces of 4 P in all

    model = BucketedDDP(model)  # any module; gradients are averaged, with average=False summed
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(x).mean().backward()  # x: this rank's rows; now gradients are the same on all ranks
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    state = model.module.state_dict()  # what to save

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
arXiv:2006.15704, section 3. At work: torch.nn.parallel.DistributedDataParallel, section 3 below.

    torchrun --standalone --nproc_per_node=2 ddp.py
"""
import harness  # before torch, which warns where NumPy is missing

import contextlib
import math
import sys
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from common import (
    ANY, Flag, Run, Side, adamw, arguments, clip_gradients, get_batch, loss_sum, require, share,
)
from harness.checkpoint import pieces_of

# ---- 1. the technique (copy this; it needs only torch) -----------------------


def all_reduce_gradients(module, group=None):
    """The naive form, after backward: an all-reduce for each parameter.

    All ranks must have used the same parameters.
    """
    for p in module.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, group=group)  # partial -> replicated


class Bucket:
    """Gradients of some parameters, side by side in one flat tensor, for one all-reduce.

    The parameters are of one dtype and on one device. Here -0.0 stands for "this rank has not used
    the parameter", so a gradient of -0.0 is stored as 0.0. A sum is -0.0 only if every summand is:
    so the sign of zero tells what no rank has used, without another collective.
    """

    def __init__(self, parameters, group, average):
        first = parameters[0]
        sizes = [p.numel() for p in parameters]
        self.parameters = parameters
        self.group = group
        self.average = average
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self.views = []  # into flat, the gradient of each parameter, in its shape
        for p, piece in zip(parameters, self.flat.split(sizes)):
            # in p's order in memory (channels_last, ..): fused optimizers do not look at strides
            strides = torch.empty_like(p).stride()
            self.views.append(piece.as_strided(p.shape, strides))
        self.reduced = [False] * len(parameters)  # has the view been summed over ranks already?
        self.missing = len(parameters)  # gradients that this backward has not made yet
        self.work = None  # Work of an all-reduce that is under way

    def take(self, i):
        """Move a gradient that autograd has made into the bucket, and leave a view in its place."""
        p = self.parameters[i]
        if p.grad is not self.views[i]:
            # a copy in which -0.0 becomes 0.0: it is a gradient, not the sign of none
            torch.add(p.grad, 0.0, out=self.views[i])
            p.grad = self.views[i]
            self.reduced[i] = False
        elif self.reduced[i] and not self.average:
            # The view has the old sum on every rank, and summing would count it N times. An old
            # average is allowed: it is alike on all ranks, so their mean leaves it as it is.
            refuse_sum_of_sums()

    def start(self):
        """Begin to sum. What this rank has not used is -0.0 here."""
        for i, p in enumerate(self.parameters):
            if p.grad is None:
                real(self.views[i]).fill_(-0.0)
            else:
                self.take(i)
        work = dist.all_reduce(self.flat, group=self.group, async_op=True)
        self.work = work  # partial -> replicated, while backward goes on

    def finish(self):
        """Wait for the sum. What no rank has used keeps the gradient None, as in one process."""
        self.work.wait()
        self.work = None
        for i, p in enumerate(self.parameters):
            if p.grad is None and used_somewhere(self.views[i]):
                p.grad = self.views[i]
            self.reduced[i] = True
        if self.average:
            self.flat.div_(dist.get_world_size(self.group))

    def reset(self):
        """Begin anew, also after a backward that ended in an exception."""
        if self.work:
            self.work.wait()
        self.work = None
        self.missing = len(self.parameters)


class BucketedDDP(nn.Module):
    """Data parallelism for any module: when loss.backward() returns, gradients are reduced.

    group: the ranks, each with rows of its own. average=False sums gradients instead; then call
        zero_grad() before the next backward that is synchronized
    bucket_mb: the largest bucket (MB = 1e6 bytes). The first is of first_bucket_mb, so that
        communication starts early. No bucket is above a quarter of the whole: the last one is full
        only when backward is over, so nothing hides its all-reduce. A larger parameter, such as
        GPT-2's embedding, has a bucket of its own

    All ranks begin with the first one's parameters and buffers; then each has buffers of its own
    (DistributedDataParallel sends them again in every forward). Frozen parameters are left out,
    tied ones counted once, dtypes do not share a bucket. A parameter that only some ranks use gets
    their gradient on all; one that no rank uses keeps None. Sparse gradients of embeddings stay
    sparse. Gradients are replicated: their norm and clipping need no communication.

    Every rank must run the same number of synchronized backwards. With reentrant checkpointing
    hooks fire twice: use use_reentrant=False. After a backward that ended in an exception, on every
    rank, go on with zero_grad() and a new forward.
    """

    def __init__(self, module, group=None, bucket_mb=25, first_bucket_mb=1, average=True):
        super().__init__()
        self.module = module
        self.group = group
        self.average = average
        self.sync = True  # False within no_sync()
        self.queued = False  # will autograd call finish() when this backward is over?
        self.started = 0  # buckets of this backward whose all-reduce has been started
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(tensor, group)
        self.frozen = [p for p in module.parameters() if not p.requires_grad]
        self.sparse = parameters_with_sparse_gradients(module)
        self.sums = {}  # {parameter of self.sparse: its latest sum over ranks}, if not averaged
        self.hooks = []  # handles of the hooks on the parameters
        self.buckets = []
        for parameters in self.layout(bucket_mb * 1e6, first_bucket_mb * 1e6):
            self.buckets.append(Bucket(parameters, group, average))
        for bucket in self.buckets:
            for i, p in enumerate(bucket.parameters):
                hook = p.register_post_accumulate_grad_hook(partial(self.ready, bucket, i))
                self.hooks.append(hook)
        for p in self.sparse:
            self.hooks.append(p.register_post_accumulate_grad_hook(self.ready_sparse))

    def layout(self, bytes_each, bytes_first):
        """Trained parameters -> lists of them, a bucket's each.

        They are taken in reverse, which is roughly the order in which their gradients are made.
        """
        elsewhere = {*self.frozen, *self.sparse}
        parameters = [p for p in self.module.parameters() if p not in elsewhere]
        bytes_each = min(bytes_each, sum(p.nbytes for p in parameters) / 4)
        room = min(bytes_each, bytes_first)  # bytes for the bucket that is opened next
        buckets = []
        open_bucket = {}  # {(dtype, device): the bucket that is being filled}
        room_left = {}  # {(dtype, device): bytes}
        for p in reversed(parameters):
            kind = p.dtype, p.device
            if kind not in open_bucket or room_left[kind] < p.nbytes:
                open_bucket[kind] = []
                buckets.append(open_bucket[kind])
                room_left[kind] = room
                room = bytes_each
            open_bucket[kind].append(p)
            room_left[kind] -= p.nbytes
        return buckets

    def forward(self, *args, **kwargs):
        if any(p.requires_grad for p in self.frozen):
            raise RuntimeError("BucketedDDP: a parameter that was frozen when BucketedDDP was made "
                               "is trained now: thaw it before, or BucketedDDP(model.unwrap())")
        in_backward = torch._C._current_graph_task_id() != -1  # a checkpoint runs forward again
        if self.queued and not in_backward:  # the backward before ended in an exception
            self.reset()
        return self.module(*args, **kwargs)

    def unwrap(self):
        """-> the module, whose gradients are not reduced any more. Another one may wrap it then."""
        for hook in self.hooks:
            hook.remove()
        return self.module

    @contextlib.contextmanager
    def no_sync(self):
        """Backwards in here only accumulate; the first one after it reduces the sum."""
        before = self.sync
        self.sync = False
        try:
            yield
        finally:
            self.sync = before

    def ready(self, bucket, i, p):
        """Autograd's call when a gradient is complete: of a tied parameter, the sum of all uses."""
        refuse_graph()
        bucket.take(i)
        if not self.sync:
            return
        self.expect_end()
        bucket.missing -= 1
        # in the order of the list: ranks may make their gradients in different orders, but must
        # agree on collectives
        while self.started < len(self.buckets) and self.buckets[self.started].missing == 0:
            self.start_next()

    def ready_sparse(self, p):
        refuse_graph()
        self.refuse_sum(p)
        if self.sync:
            self.expect_end()

    def expect_end(self):
        if not self.queued:
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
            self.queued = True

    def start_next(self):
        self.buckets[self.started].start()
        self.started += 1

    def finish(self):
        """Autograd's call when this backward is over."""
        while self.started < len(self.buckets):  # those with parameters that it did not use
            self.start_next()
        for bucket in self.buckets:
            bucket.finish()
        for p in self.sparse:
            self.reduce_sparse(p)
        self.reset()

    def refuse_sum(self, p):
        """Raises if p.grad is an old sum over ranks, or one to which backward has added since.

        Autograd adds in place: p.grad is still the object that reduce_sparse has put there.
        """
        if p.grad is not None and p.grad is self.sums.get(p) and not self.average:
            refuse_sum_of_sums()

    def reduce_sparse(self, p):
        # ready_sparse refuses early, but autograd calls it only for what this backward has used
        self.refuse_sum(p)
        total = sum_of_rows(p, self.group)
        if total is not None and self.average:
            total = total / dist.get_world_size(self.group)
        p.grad = total
        if not self.average:
            self.sums[p] = total

    def reset(self):
        self.started = 0
        self.queued = False
        for bucket in self.buckets:
            bucket.reset()

    def __reduce_ex__(self, protocol):
        raise TypeError("BucketedDDP: its hooks cannot be copied: copy the module inside")


# what Bucket and BucketedDDP use


def real(tensor):
    """A complex tensor as its real and imaginary parts; any other as it is."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor


def used_somewhere(total):
    """Has any rank added a gradient to this sum? The host waits for the answer."""
    numbers = real(total)
    return not (numbers.eq(0) & numbers.signbit()).all()


def broadcast(tensor, group):
    """The first rank's values -> replicated, whatever the tensor's strides."""
    values = tensor.detach()
    dense = values.contiguous()  # values itself, unless it has other strides
    dist.broadcast(dense, group=group, group_src=0)  # the first rank's -> replicated
    values.copy_(dense)


def parameters_with_sparse_gradients(module):
    found = {}  # {parameter: True}: a set that keeps its order
    for owner in module.modules():
        if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.sparse:
            if owner.weight.requires_grad:
                found[owner.weight] = True
    return list(found)


def sum_of_rows(parameter, group):
    """A sparse gradient, with some rows of the whole -> the sum over ranks, of all their rows.

    A rank that has not used the parameter has None. The host must know how many rows there are.
    """
    count = -1  # this rank has not used the parameter; 0 is a gradient without rows
    rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
    values = torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    if parameter.grad is not None:
        if not parameter.grad.is_sparse:
            raise RuntimeError("BucketedDDP: a gradient of Embedding(sparse=True) is dense, since "
                               "its weight is also used elsewhere: take sparse=False")
        gradient = parameter.grad.coalesce()
        [rows] = gradient.indices()  # (1, count) -> (count,)
        values = gradient.values()
        count = len(rows)
    own_count = torch.tensor([count], device=parameter.device)
    gathered = [torch.empty_like(own_count) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own_count, group=group)  # sharded -> replicated
    counts = torch.cat(gathered).tolist()
    if max(counts) < 0:
        return None  # no rank has used it
    rows = gather_rows(rows, counts, group)
    values = gather_rows(values, counts, group)
    indices = rows[None]  # (1, rows of all ranks)
    return torch.sparse_coo_tensor(indices, values, parameter.shape).coalesce()


def gather_rows(tensor, counts, group):
    """counts[rank] rows on each rank, or -1 for none -> the rows of all, one after the other."""
    padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
    padded[:len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)  # sharded -> replicated
    return torch.cat([part[:max(count, 0)] for part, count in zip(parts, counts)])


def refuse_graph():
    if torch.is_grad_enabled():
        raise RuntimeError("BucketedDDP: backward with create_graph=True: sums over ranks are no "
                           "part of the graph")


def refuse_sum_of_sums():
    raise RuntimeError("BucketedDDP: with average=False, gradients that are sums over ranks would "
                       "be summed again: call zero_grad(set_to_none=True) before this backward")


# ---- 2. the toy GPT, parallelized --------------------------------------------


def parallelize(model, group=None, bucket_mb=25.0):
    """The toy divides by the global batch's valid targets: gradients are summed, not averaged."""
    return BucketedDDP(model, group, bucket_mb, average=False)


def full_state_dict(model):
    """model: the plain one, which is inside BucketedDDP."""
    return model.state_dict()


def full_gradients(model):
    """model: the plain one, which is inside BucketedDDP."""
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def evaluate(model, x, y):
    """x, y: this rank's rows of held-out text -> its part of the sum of token losses."""
    return loss_sum(model(x), y)


def train_step(model, optimizer, x, y, valid, clip):
    """x, y: this rank's rows (B/N, T); valid: targets of the whole batch.

    -> this rank's part of the loss, gradient norm.
    """
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    loss.backward()  # partial -> replicated, inside BucketedDDP
    norm = clip_gradients(model.parameters(), clip)
    optimizer.step()
    return loss, norm


def train_step_naive(model, optimizer, x, y, valid, clip):
    """The same with a plain model: nothing travels before backward is over."""
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    loss.backward()
    all_reduce_gradients(model)  # partial -> replicated
    norm = clip_gradients(model.parameters(), clip)
    optimizer.step()
    return loss, norm


# ---- 3. at work: the same with torch's own API -------------------------------


class Sequences(Dataset):
    """Every sequence of the run in order: number i is row i % batch of its step i // batch."""

    def __init__(self, corpus, args, first):
        self.corpus = corpus  # (n,) uint8
        self.args = args
        self.first = first  # the run's first step

    def __len__(self):
        return self.args.batch * (self.args.steps - self.first)

    def __getitem__(self, i):
        args = self.args
        step = self.first + i // args.batch
        row = i % args.batch
        x, y, valid = get_batch(
            self.corpus, args.seq, args.seed, step, args.batch, args.pad, rows=[row]
        )
        return x[0], y[0], valid


def loader_at_work(run):
    """This rank's rows of every step's batch: the sampler deals rows out to the ranks in turn."""
    data = Sequences(run.corpus, run.args, run.first)
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=run.args.batch // run.world_size, sampler=sampler)
    # With shuffle=True all epochs would have the same order without this, which is called before
    # each of them. This run is one epoch, and shuffles nothing.
    sampler.set_epoch(0)
    for x, y, valid in loader:
        yield x.to(run.device), y.to(run.device), valid[0].item()


def train_step_at_work(model, optimizer, x, y, valid, clip):
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    (loss * dist.get_world_size()).backward()  # DistributedDataParallel averages; we want the sum
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    optimizer.step()
    return loss, norm


# ---- 4. run ------------------------------------------------------------------


def refuse(args):
    """What cannot run ends here, in one line, before anything is built."""
    n = args.world_size
    scratch = args.impl == "scratch"
    require(args.batch >= n,
            f"--batch {args.batch} sequences for {n} ranks: give each at least one")
    require(scratch or not args.dry_run,
            "--dry-run needs --impl scratch: torch's C++ reducer wants real ranks")
    require(scratch or args.batch % n == 0,
            f"--batch {args.batch}: torch's sampler wants a multiple of {n}")


def set_up(run, impl):
    """-> a Side: the model of this implementation, and what a run does with it."""
    rows = share(run.args.batch, run.world_size, run.rank)  # of every batch, this rank's
    plain = run.build()  # its parameters are trained in all three cases
    if impl == "scratch" and run.args.bucket_mb:
        model = parallelize(plain, None, run.args.bucket_mb)
        step = train_step
    elif impl == "scratch":
        model = plain
        step = train_step_naive
    else:
        model = DistributedDataParallel(plain, gradient_as_bucket_view=True)
        step = train_step_at_work
    optimizer = adamw(plain.parameters(), run.args.lr)
    return Side(
        model=model,
        optimizer=optimizer,
        train_step=step,
        full_gradients=lambda: full_gradients(plain),
        full_state_dict=lambda: full_state_dict(plain),
        evaluate=lambda k: evaluate(plain, *run.held_out(k, rows)),
        pieces=lambda: pieces_of(plain.named_parameters(), optimizer, writes=run.rank == 0),
    )


def batches_of(run, impl):
    """This rank's rows of every step's batch: inputs, targets, valid targets of the whole batch."""
    if impl == "torch":
        yield from loader_at_work(run)
    else:
        rows = share(run.args.batch, run.world_size, run.rank)
        for step in range(run.first, run.last + 1):
            yield run.batch(step, rows)


def account(run, model):
    """The textbook's rows: P parameters that are trained, of b bytes, and F that are frozen."""
    n = run.world_size
    b = run.dtype.itemsize
    trained = [p for p in model.parameters() if p.requires_grad]
    size = b * sum(p.numel() for p in trained)  # b P
    whole = b * sum(p.numel() for p in model.parameters())  # b (P + F)
    counters = 4 * len(trained)  # AdamW's step, 4 bytes for each tensor
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
        return run.finish(total, own=total)  # every rank has all parameters


if __name__ == "__main__":
    sys.exit(main())
