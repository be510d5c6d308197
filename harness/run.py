"""One run of a script, real or dry: main() of ddp.py shows the order of use."""
import contextlib
import gc
import json
import math
import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from common import build, freeze, get_batch, learning_rate, load_corpus
from common import choose_device, join_fake_world, launched
from common import loss_sum, plain_steps
from harness import checkpoint, report
from harness.checkpoint import pieces_of
from harness.compare import Trace, compare, fault
from harness.flags import DTYPES, complain, program, require
from harness.ledger import Ledger, held_by, nbytes, storage_of
from harness.meet import meet
from harness.optimizers import optimizer_of
from harness.profiler import profiled

BLOCK = 5  # steps of one implementation before it is the other's turn
PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}  # bf16, FLOP/s
CHECKED = 300  # steps of one run that are compared, at most
HELD_OUT = 20  # with --eval-every the last 1/20 of the text is not trained on
BATCHES = 8  # of it, always the same
HELD = ("parameters", "gradients", "optimizer")  # between steps

# ---- what is trained -----------------------------------------------------------


@dataclass(kw_only=True)
class Side:
    """One implementation of a technique, ready to train: what a run steps, judges and saves.

    Where a function is not given, it is what is right for a module with whole parameters, or
    DTensors, on every rank.
    """

    model: object  # what main() trains: a module, or a ZeRO around one
    optimizer: torch.optim.Optimizer
    # model, optimizer, x, y, valid, clip -> this rank's part of the loss, norm
    train_step: Callable
    # () -> {the plain GPT's name: whole tensor}, on every rank. Gradients: of what is trained
    full_gradients: Callable | None = None
    full_state_dict: Callable | None = None
    evaluate: Callable | None = None  # x, y -> this rank's part of the sum of token losses (copies)
    pieces: Callable | None = None  # () -> {parameter: [checkpoint.Piece]}, with AdamW's states
    held: Callable | None = None  # () -> {"parameters", "gradients", "optimizer": [tensors]}
    # () -> a small dict that is saved with the pieces, and is run.start.extra when a run resumes
    extra: Callable = dict
    # True where a step whose norm is inf is skipped (fp16 with loss scaling): it is no fault then
    may_overflow: bool = False
    copies: int = 1  # so many ranks return the same part of the loss
    held_of: torch.nn.Module | None = None  # what is held, evaluated and saved (model)
    watch: Callable = contextlib.nullcontext  # step -> what is entered around it
    # what the run notes of it
    trace: Trace = field(default_factory=Trace)
    times: list = field(default_factory=list)  # ms of every step; none in a dry run
    ledger: Ledger | None = None  # of the last step

    def __post_init__(self):
        forward = self.held_of or self.model
        module = getattr(forward, "module", forward)  # what DistributedDataParallel is around
        self.full_gradients = self.full_gradients or partial(gradients_of, module)
        self.full_state_dict = self.full_state_dict or (lambda: whole(module.state_dict()))
        self.evaluate = self.evaluate or (lambda x, y: loss_sum(forward(x), y))
        self.pieces = self.pieces or (lambda: pieces_of(module.named_parameters(), self.optimizer))
        self.held = self.held or partial(held_by, forward, self.optimizer)

    def release(self):
        """Give the memory back. The side is of no use afterwards."""
        for tensors in self.held().values():
            for t in tensors:
                storage_of(t).resize_(0)

    def ms(self):
        """The median over the steps, or None. If there are others, not of the first, a warmup, and
        the last, which the ledger slows down."""
        return statistics.median(self.times[1:-1] or self.times) if self.times else None

    def figures(self):
        """What bench shows of it, on this rank."""
        memory = self.ledger.memory
        of_all = self.ledger.collectives.values()
        times = self.times[:-1] or self.times  # the ledger slows the last one down
        blocks = [statistics.median(times[i:i + BLOCK]) for i in range(0, len(times), BLOCK)]
        held = sum(memory[kind] for kind in HELD)
        return dict(calls=sum(c["calls"] for c in of_all), wire=sum(c["wire"] for c in of_all),
                    held=held, peak=memory["peak"], ms_per_step=self.ms(), block_ms=blocks)


def gradients_of(module):
    return whole({name: p.grad for name, p in module.named_parameters() if p.requires_grad})


def whole(named):
    """{name: tensor}, of which DTensors become whole"""
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in named.items()}


# ---- a run ---------------------------------------------------------------------


def hold_out(corpus, seq):
    """A Text -> what is trained on, and its end, which is not: one window at least."""
    rest = len(corpus) - max(len(corpus) // HELD_OUT, seq + 1)
    if rest <= seq:
        raise ValueError(f"{len(corpus)} bytes of text are too few to hold out {seq} + 1")
    return corpus.between(0, rest), corpus.between(rest, len(corpus))


class Run:
    """impls: the names of what is trained; None takes them from --impl. build_plain(run) makes the
    plain model, if it is not the GPT.
    """

    def __init__(self, args, impls=None, build_plain=None):
        self.args = args
        self.script = Path(program()).stem
        self.dry = bool(args.dry_run)
        self.dtype = DTYPES[args.dtype]
        self.build_plain = build_plain or Run.build_gpt
        several = {"both": ("scratch", "torch"), "all": ("scratch", "torch", "idea")}
        self.impls = impls or several.get(args.impl, (args.impl,))
        self.start = checkpoint.begin(args)  # the checkpoint to start from; bad: exit code 2
        self.cfg = args.cfg
        # May plain() repeat this training from step 0 on? Not if it began with weights from
        # elsewhere, in this run or in one before it
        self.replays = self.start.flag != "--init-from" and self.start.extra.get("replays", True)
        self.first = self.start.steps  # the first step
        self.last = args.steps - 1
        if self.dry:  # one step that makes AdamW's states, one that has them
            self.last = min(args.steps, 2) - 1
        self.checked = min(self.last, self.first + CHECKED - 1)  # the last step that is compared
        self.load_text()
        self.join()
        self.open_books()

    def load_text(self):
        args = self.args
        self.text = f"--data {args.data or '(the default)'}"
        try:
            self.corpus = load_corpus(args.data, self.cfg.seq)  # a common.Text
            if args.eval_every:
                self.corpus, self.held_out = hold_out(self.corpus, self.cfg.seq)
            self.refuse_unknown(*get_batch(self.corpus, self.cfg.seq, args.seed, 0, 1)[:2])
        except (OSError, ValueError, RuntimeError) as error:
            require(False, f"{self.text}: {checkpoint.reason(error)}")
        now = len(self.corpus)
        then = self.start.extra.get("text", now)
        require(then == now, f"{self.text}: {now} tokens, but {then} in {self.start.folder}")

    def join(self):
        """The process group."""
        launch = launched()
        self.store = None  # what ranks see without a collective; none in a dry run
        self.fake = contextlib.nullcontext()
        if self.dry:
            from torch._subclasses.fake_tensor import FakeTensorMode

            self.device = torch.device("cuda:0" if self.args.device == "cuda" else "cpu")
            join_fake_world(self.args.rank, self.args.dry_run)
            self.fake = FakeTensorMode()
            self.corpus.parts = [self.fake.from_tensor(part) for part in self.corpus.parts]
        else:
            self.device = choose_device(launch, self.args.device)
            self.store = meet(self.args, launch, self.device)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.on_gpu = self.device.type == "cuda" and not self.dry

    def open_books(self):
        self.sides = {}  # {impl: Side}, from train() on
        self.rows = None  # this rank's of every batch, from train() on
        self.step = self.first  # the one under way
        self.saver = None  # of checkpoints
        if self.args.save:
            self.saver = checkpoint.Saver(self.args.save, self.args.save_async)
        self.log = None  # --log-file, on rank 0
        self.failed = False  # could a file not be written?
        self.profile = {}  # milliseconds of communication in the last step, if --profile knows
        self.book = []  # rows of the textbook
        self.extra = {}  # a script's own keys of the report
        self.total = 0  # parameters, known when the plain model has been built
        self.own = 0  # those on this rank, known from train() on
        self.idle = 0  # of the total, what a token is not multiplied with, besides embeddings

    @property
    def main(self):
        """The side that the report is about."""
        return self.sides[self.impls[0]]

    def __enter__(self):
        self.fake.__enter__()
        return self

    def __exit__(self, kind, error, _):
        self.fake.__exit__(None, None, None)
        if " by peer" in str(error):  # another rank has ended, which may have heard Ctrl-C first
            try:
                time.sleep(1)
            except KeyboardInterrupt:
                kind = KeyboardInterrupt
        if kind is KeyboardInterrupt:
            self.say(f"interrupted after {self.step} of {self.args.steps} steps")
            os._exit(130)
        if kind not in (None, SystemExit):
            why = kind.__name__
            if " by peer" in str(error):
                why += ": another rank has ended"
            if "imed out" in str(error):
                why += ": a collective that another rank has not come to; is it slow, --timeout S"
            complain(f"rank {self.rank}, step {self.step}: {why}")
            return  # the other ranks may still wait in a collective
        self.finish_saving()
        # a closure or a cycle may keep a group alive beyond destroy; gloo would abort at exit
        gc.collect()
        dist.destroy_process_group()

    def say(self, *words):
        if self.dry or self.rank == 0:
            try:
                print(*words, flush=True)
            except BrokenPipeError:  # nobody reads (`| head -1`): the run is worth more
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    # -- what is trained, and on what

    def build(self):
        """The plain model, with this run's weights, device and dtype; --train freezes the rest."""
        return self.freeze(self.build_plain(self))

    def build_gpt(self):
        return build(self.cfg, self.args.seed, self.device, self.dtype)

    def freeze(self, model):
        """The plain model; with --train freezes what it does not find -> the model."""
        if self.args.train:
            found = freeze(model, self.args.train)
            require(found, f"--train {self.args.train}: matches no parameter's name")
        self.total = sum(p.numel() for p in model.parameters())
        return model

    def batch(self, step, rows=None):
        """Rows (default: all) of a step's global batch -> inputs, targets, valid in all of it."""
        return self.batch_of(self.corpus, step, self.args.pad, rows)

    def batch_of(self, corpus, step, pad, rows=None):
        args = self.args
        x, y, valid = get_batch(corpus, self.cfg.seq, args.seed, step, args.batch, pad, rows)
        if not self.dry:
            self.refuse_unknown(x, y)
        return x.to(self.device), y.to(self.device), valid

    def refuse_unknown(self, x, y):
        largest = max(x.max().item(), y.max().item())
        require(largest < self.cfg.vocab,
                f"{self.text}: token {largest} is beyond --vocab {self.cfg.vocab}")

    def optimizer(self, named, **ways):
        """What --optimizer says, for (name, parameter) pairs. ways: see optimizer_of."""
        return optimizer_of(self.args, named, **ways)

    def side(self, model, optimizer, train_step, **functions):
        """-> a Side. main() needs no import for it."""
        return Side(model=model, optimizer=optimizer, train_step=train_step, **functions)

    # -- the steps

    def train(self, sides, rows):
        """All steps. sides: {impl: Side}. rows: this rank's of every batch.

        With several sides they take turns of BLOCK steps, so that all meet the same noise.
        """
        self.sides = sides
        self.rows = rows
        self.begin()
        for first in range(self.first, self.last + 1, BLOCK):
            for impl in self.impls:
                for step in range(first, min(first + BLOCK, self.last + 1)):
                    self.step = step
                    self.train_one_step(impl, sides[impl], step)

    def begin(self):
        """Loads the checkpoint that the sides start from, and says what is trained."""
        held = self.main.held()["parameters"]
        for dtype in {t.dtype for t in held if t.is_floating_point()}:
            self.own += nbytes(t for t in held if t.dtype == dtype) // dtype.itemsize
        where = f"{self.world_size} ranks on {self.device.type}, {self.args.dtype}"
        self.say(f"{self.script}: {where}, {self.total:,} parameters, {self.own:,} of them here")
        if self.dry:
            self.say("dry run: no values")
            return
        if self.start.folder:
            behind = f"{self.first} steps behind it" if self.first else "its weights alone"
            self.say(f"{self.start.flag} takes {self.start.folder}, {behind}")
            checkpoint.restore(self.start, self.main)  # there is one side: see checkpoint.begin()
        if self.args.log_file and self.rank == 0:
            path = Path(self.args.log_file)
            if self.first and path.is_file():  # a full disk has cut off its last line, perhaps
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
            self.log = path.open("a" if self.first else "w", buffering=1)  # by lines
        if self.args.check and self.checked < self.last:
            count = self.checked + 1 - self.first
            self.say(f"the check covers the first {count} steps; the others run unchecked")
        self.say(report.head(self.args.eval_every))
        if self.args.eval_every:
            losses = [self.validate(self.sides[impl], self.first - 1) for impl in self.impls]
            self.say(f"{'start':>6}{losses[0]:49.4f}")

    def train_one_step(self, impl, side, step):
        for group in side.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.args)
        x, y, valid = self.batch(step, self.rows)
        clip = self.args.clip or math.inf
        with side.watch(step), self.measure(impl, side, step):
            before = self.mark()
            loss, norm = side.train_step(side.model, side.optimizer, x, y, valid, clip)
            after = self.mark()
        if self.dry:
            return
        loss = loss.detach().double() / side.copies
        dist.all_reduce(loss)  # partial -> replicated
        side.times.append(self.between(before, after))
        side.trace.log(step, loss, norm)
        self.judge(side, step, loss, norm)
        validation = self.validate(side, step) if self.validates(step) else None
        if self.rank == 0 and side is self.main:
            self.tell(side, step, loss.item(), float(norm), validation)
        if self.saver:
            self.save(side, step)  # there is one side: see checkpoint.begin()

    def mark(self):
        """-> seconds on CPUs; on GPUs an event in the current stream, for which nobody waits."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start, end):
        """-> milliseconds between two marks, when the work of a GPU has come to the second."""
        if not self.on_gpu:
            return 1e3 * (end - start)
        end.synchronize()
        return start.elapsed_time(end)

    @contextlib.contextmanager
    def measure(self, impl, side, step):
        """The last step is watched by the ledger, the one before by --profile's profiler."""
        is_last = step == self.last
        with contextlib.ExitStack() as stack:
            if is_last:
                side.ledger = stack.enter_context(Ledger(held=side.held, device=self.device))
            self.profile = {}
            if self.args.profile and step == max(self.first, self.last - 1):
                name = f"{self.script}-{impl}-rank{self.rank}.json"
                trace = profiled(Path(self.args.profile, name), self.say)
                self.profile = stack.enter_context(trace)
            if self.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            yield
            if is_last and self.on_gpu and side is self.main:
                self.extra["allocator_peak"] = torch.cuda.max_memory_allocated()

    def judge(self, side, step, loss, norm):
        """Ends a run with values that are not finite; keeps the tensors that are compared."""
        judged = 0.0 if side.may_overflow else norm
        words = fault(loss, judged, side.full_gradients, side.full_state_dict)
        if words:
            self.finish_saving()
            require(False, f"step {step}: {words}", code=1)
        if self.keeps(step):
            side.trace.keep(step, side.full_gradients(), side.full_state_dict())

    def save(self, side, step):
        """If it is due."""
        if step < self.last and (step + 1) % (self.args.save_every or self.args.steps):
            return
        extra = {**side.extra(), "replays": self.replays, "text": len(self.corpus)}
        if side.may_overflow:  # skipped steps are no updates
            states = side.optimizer.state.values()
            extra["updates"] = max((int(state.get("step", 0)) for state in states), default=0)
        notes = {"identity": checkpoint.identity(self.args), "extra": extra}
        self.saver.save(step + 1, checkpoint.all_pieces(side.pieces(), side.optimizer), notes)
        if step == self.last:
            self.finish_saving()

    def finish_saving(self):
        """With --save-async waits for the last checkpoint."""
        if self.saver:
            self.saver.wait()

    def tell(self, side, step, loss, norm, validation):
        """On rank 0: a line of the table, a line of --log-file."""
        ms = side.times[-1]
        rate = learning_rate(step, self.args)
        of_step = self.args.batch * self.cfg.seq  # tokens
        often = max(1, self.args.steps // 10)
        if validation is not None or step in (self.first, self.last) or step % often == 0:
            speed = 1e3 * of_step / ms
            self.say(report.row(step, loss, norm, rate, speed, validation))
        if not self.log:
            return
        figures = dict(step=step, loss=loss, norm=norm, rate=rate, ms=ms,
                       tokens=(step + 1) * of_step, **self.profile)
        figures["held"] = sum(nbytes(tensors) for tensors in side.held().values())
        if validation is not None:
            figures["validation"] = validation
        # in bytes, since the process began
        figures["process_peak"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if self.on_gpu:  # in this step
            figures["allocator_peak"] = torch.cuda.max_memory_allocated()
        try:
            self.log.write(json.dumps(figures) + "\n")
        except OSError as error:
            complain(f"--log-file {self.log.name}: {error.strerror}: the run goes on without it")
            self.log = None
            self.failed = True

    # -- held-out text

    def validates(self, step):
        """Is the loss on held-out text due after this step? It is before the first one, too."""
        every = self.args.eval_every
        if not every or step < self.first:
            return every > 0 and step == self.first - 1
        return (step + 1) % every == 0 or step == self.last

    def validate(self, side, step):
        """-> the loss on held-out text, a number, after this step."""
        loss = self.on_held_out(side.evaluate, self.rows) / side.copies
        dist.all_reduce(loss)  # partial -> replicated
        side.trace.validation[step] = loss.cpu()
        return loss.item()

    @torch.no_grad()
    def on_held_out(self, evaluate, rows=None):
        """evaluate(inputs, targets) of rows of each held-out batch -> their part of the loss."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for k in range(BATCHES):
            x, y, valid = self.batch_of(self.held_out, k, 0, rows)
            total += evaluate(x, y) / valid
        return total / BATCHES

    # -- the plain run

    def keeps(self, step):
        """Is this a step of which every gradient and parameter is compared?"""
        return self.args.check and not self.dry and step in (self.first, self.checked)

    def plain(self, model=None, extra_loss=None):
        """The same steps by the plain GPT (or this model) in this process -> Trace.

        extra_loss(model), after a forward, is added to the loss.
        """
        if model is None:
            model = self.build()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer = self.optimizer(trained.items())
        begin = self.first
        if self.replays and self.first <= CHECKED:
            begin = 0  # so that a resumed run is compared with one that was never interrupted
        elif self.start.folder:
            checkpoint.read_plain(self.start, model, optimizer)
        trace = Trace()

        def validate(step):
            if self.validates(step):
                loss = self.on_held_out(lambda x, y: loss_sum(model(x), y))
                trace.validation[step] = loss.cpu()

        validate(begin - 1)
        steps = range(begin, self.checked + 1)
        batches = ((learning_rate(step, self.args), *self.batch(step)) for step in steps)
        plain = plain_steps(model, optimizer, batches, self.args.clip, extra_loss)
        for step, (loss, norm) in zip(steps, plain):
            if step >= self.first:
                trace.log(step, loss, norm)
            if self.keeps(step):
                gradients = {name: p.grad for name, p in trained.items()}
                trace.keep(step, gradients, model.state_dict())
            validate(step)
        return trace

    # -- the report

    def textbook(self, rows):
        """The rows of the textbook: (what, formula, expected), or with what was measured.

        what: "calls", "payload" or "wire" and a collective, or "held" and a kind of memory, of
        which "states" are parameters, gradients and AdamW states: measured by the ledger. With
        --train the textbook has no rows: it trains everything.
        """
        if self.args.train:
            return
        ledger = self.main.ledger
        found = {f"held {kind}": size for kind, size in ledger.memory.items()}
        found["held states"] = sum(found[f"held {kind}"] for kind in HELD)
        for kind, figures in ledger.collectives.items():
            found.update({f"{figure} {kind}": number for figure, number in figures.items()})
        for what, formula, expected, *measured in rows:
            if self.args.optimizer == "muon" and what in ("held optimizer", "held states"):
                continue  # these are AdamW's
            [number] = measured or [found.get(what, 0)]
            self.book.append(dict(what=what, formula=formula, expected=round(float(expected), 6),
                                  measured=round(float(number), 6)))

    def finish(self, plain=None, judged_as=None):
        """Check, gather, print, write --json -> exit code.

        plain: () -> the Trace to compare with (default: self.plain). judged_as: the dtype whose
        tolerance counts (default: --dtype).
        """
        if self.args.optimizer == "muon" and self.args.dtype == "fp32":
            judged_as = "bf16"  # in which torch's Muon orthogonalizes
        ledger = self.main.ledger
        mine = dict(rank=self.rank, own=self.own, memory=ledger.memory,
                    collectives=ledger.collectives)
        if self.dry:
            self.publish([mine], None, None)
            return 0
        # by the store, not by collectives: these may wait for as long as the plain run takes
        self.store.set(f"rank {self.rank}", json.dumps(mine))
        if self.rank == 0:
            ranks = [json.loads(self.store.get(f"rank {r}")) for r in range(self.world_size)]
            check, plain_loss = self.check(plain or self.plain, judged_as or self.args.dtype)
            self.publish(ranks, check, plain_loss)
            failed = self.failed or (check and not check["passed"])
            self.store.set("failed", str(int(bool(failed))))
        self.store.wait(["failed"], timedelta(days=1))
        failed = int(self.store.get("failed"))
        dist.barrier()  # rank 0 may be the store: it leaves when all have read
        return failed

    def check(self, plain, dtype):
        """-> the report's check, the plain run's losses; both None without --check."""
        if not self.args.check:
            return None, None
        if self.on_gpu:
            for side in self.sides.values():
                side.release()  # the plain GPT does not meet the trained ones in memory
        try:
            trace = plain()
        except torch.OutOfMemoryError:
            self.say("not checked: the plain GPT does not fit on one device")
            return None, None
        checks = {impl: compare(self.sides[impl].trace, trace, self.checked, dtype, self.world_size)
                  for impl in self.impls}
        check = checks.pop(self.impls[0])
        for impl, other in checks.items():
            check["passed"] = check["passed"] and other["passed"]
            check["differ"] += [f"{impl}: {line}" for line in other["differ"]]
            check.setdefault("others", {})[impl] = other
        return check, [loss.item() for loss in trace.loss.values()]

    def flops(self, tokens_per_second):
        """-> floating-point operations per second that the model needs, and of the GPUs' peak.

        6 for each parameter that a token is multiplied with, 12 L H D T for scores and sums of
        attention (Chowdhery 2022, PaLM, arXiv:2204.02311, appendix B). Recomputation is no need.
        --train is not looked at.
        """
        cfg = self.cfg
        multiplied = self.total - self.idle
        if not cfg.form.tied:
            multiplied -= cfg.vocab * cfg.width
        if cfg.form.learned_positions:
            multiplied -= cfg.seq * cfg.width
        of_token = 6 * multiplied
        of_token += 12 * cfg.layers * cfg.heads * cfg.head_dim * cfg.seq
        found = dict(per_token=of_token, per_second=of_token * tokens_per_second)
        if self.on_gpu:
            name = torch.cuda.get_device_name(self.device)
            for gpu, peak in PEAKS.items():
                if gpu in name:
                    found["utilization"] = found["per_second"] / (peak * self.world_size)
        return found

    def publish(self, ranks, check, plain_loss):
        """Print the report, write it to --json."""
        side = self.main
        ms = side.ms()
        args = {name: value for name, value in vars(self.args).items() if name != "cfg"}
        # not reported among `ranks`, but under its name
        per_rank = [rank.pop("own") for rank in ranks]
        result = dict(
            script=self.script, impl=self.args.impl, world_size=self.world_size,
            backend=dist.get_backend(), device=self.device.type, dtype=self.args.dtype,
            dry_run=self.dry, torch=torch.__version__, args=args,
            parameters=dict(total=self.total, per_rank=per_rank), ranks=ranks, textbook=self.book,
            loss=[loss.item() for loss in side.trace.loss.values()],
            plain_loss=plain_loss, check=check, ms_per_step=ms,
            tokens_per_second=ms and 1e3 * self.args.batch * self.cfg.seq / ms,
            sides={impl: self.sides[impl].figures() for impl in self.impls},
        )
        if side.trace.validation:
            result["validation"] = {s: v.item() for s, v in side.trace.validation.items()}
        if self.args.impl in ("both", "all") and "torch" in self.impls:
            theirs = self.sides["torch"].ms()
            result.update(torch_ms_per_step=theirs, speedup=ms and theirs / ms)
        if ms:
            result["flops"] = self.flops(result["tokens_per_second"])
        result.update(self.extra)
        report.show(result)
        if self.args.json:
            try:
                Path(self.args.json).write_text(json.dumps(result, indent=1))
            except OSError as error:
                complain(f"--json {self.args.json}: {error.strerror}")
                self.failed = True
