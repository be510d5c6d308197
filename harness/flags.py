"""The flags that every script takes, and what none of them can do. Bad usage ends in one line on
stderr and exit code 2 on every rank, and leaves no rank behind."""
import argparse
import contextlib
import os
import re
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from common import PRESETS, launched

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
IMPLS = ("idea", "scratch", "torch", "both", "all")
SIZES = ("layers", "width", "heads", "vocab", "seq", "kv_heads", "hidden", "head_dim")  # flags

# {flag: what argparse's add_argument takes}, and besides
#   least, most    the bounds of a number; least is 0 where it is not said
#   course         True: what is trained depends on it, so that no checkpoint goes on with another;
#                  "model": nor are weights taken from one, since no shape shows it
FLAGS = {
    # the model
    "--impl": dict(default="scratch", choices=IMPLS, help="part 1, part 2, torch's own; both: the "
                   "last two in turn; all: these three"),
    "--model": dict(default="toy", choices=tuple(PRESETS), help="a preset; see the next eight"),
    "--layers": dict(type=int, metavar="L", least=1, help="transformer blocks"),
    "--width": dict(type=int, metavar="C", least=1, help="embedding width"),
    "--heads": dict(type=int, metavar="H", least=1, help="attention heads"),
    "--vocab": dict(type=int, metavar="V", least=256, help="words; text is bytes: 256 or more"),
    "--seq": dict(type=int, metavar="T", least=1, help="sequence length"),
    "--kv-heads": dict(type=int, metavar="K", least=1, help="key-value heads (not GPT-2's form)"),
    "--hidden": dict(type=int, metavar="F", least=1, help="width inside the MLP (likewise)"),
    "--head-dim": dict(type=int, metavar="D", least=1, help="width of a head (likewise)"),
    "--dtype": dict(default="fp32", choices=tuple(DTYPES), help="of parameters and arithmetic"),
    "--device": dict(default="auto", choices=("auto", "cpu", "cuda"), help="auto: GPUs, if any"),
    # its training
    "--batch": dict(type=int, metavar="B", least=1, help="sequences of all ranks (8, or one each)"),
    "--steps": dict(type=int, default=20, least=1, help="optimizer steps"),
    "--optimizer": dict(default="adamw", choices=("adamw", "muon"), course=True,
                        help="muon: of hidden matrices, AdamW of the rest"),
    "--lr": dict(type=float, default=1e-3, least=1e-12, most=1e3, help="learning rate"),
    "--warmup": dict(type=int, default=0, help="steps in which the rate climbs to --lr"),
    "--decay": dict(default="none", choices=("none", "linear", "cosine"), help="how it falls to "
                    "--min-lr after that"),
    "--min-lr": dict(type=float, default=0.0, most=1e3, help="of --decay, a step after the last"),
    "--clip": dict(type=float, default=1.0, help="largest gradient norm, 0: no clipping"),
    "--seed": dict(type=int, default=0, help="of weights and batches"),
    "--data": dict(default="", metavar="PATH", help="text, folder, or token ids in FILE.bin, .u32 "
                   "(default: Python's own sources)"),
    "--pad": dict(type=float, default=0.0, most=0.99, help="fraction of targets to "
                  "ignore, unevenly (above 0.25: less)"),
    "--train": dict(default="", metavar="REGEX", help="names of parameters; others are frozen"),
    "--eval-every": dict(type=int, default=0, help="steps between held-out losses"),
    # the run
    "--check": dict(action=argparse.BooleanOptionalAction, default=True,
                    help="compare with the plain GPT's steps"),
    "--timeout": dict(type=int, metavar="S", least=1, most=10**6, help="of a collective (30, NCCL "
                      "600) and of the start (300)"),
    "--dry-run": dict(type=int, metavar="W", least=1, help="be one of W ranks, without memory"),
    "--rank": dict(type=int, default=0, help="which one (dry run only)"),
    "--json": dict(default="", metavar="FILE", help="for the report"),
    "--log-file": dict(default="", metavar="FILE", help="for a line of JSON per step"),
    "--profile": dict(default="", metavar="DIR", help="for a torch.profiler trace of each rank"),
    "--save": dict(default="", metavar="DIR", help="for checkpoints, in folders named by steps"),
    "--save-every": dict(type=int, default=0, help="steps between them (0: one, at the end)"),
    "--save-async": dict(action="store_true", help="train on while one is written, from a copy"),
    "--resume": dict(default="", metavar="DIR", help="go on from the newest in it, on any ranks"),
    "--init-from": dict(default="", metavar="DIR", help="start with the newest one's weights"),
}


def arguments(doc, own=None, presets=None):
    """The common flags and a script's own, as FLAGS above -> args.

    presets: {name: GPTConfig} besides those of common.py. args.cfg is the GPTConfig,
    args.world_size the number of ranks, in a dry run that of --dry-run.
    """
    presets = {**PRESETS, **(presets or {})}
    flags = {**(own or {}), **FLAGS}  # in this order in --help
    flags["--model"] = {**FLAGS["--model"], "choices": tuple(presets)}
    args = parse(doc, flags)
    of_course = {variable(name): flag["course"] for name, flag in flags.items() if "course" in flag}
    args.course = list(of_course)
    args.of_model = [name for name, course in of_course.items() if course == "model"]
    try:
        launch = launched()
    except ValueError as error:
        require(False, error)
    # what presets and defaults leave to be said: a report shows what was used
    args.cfg = config_of(args, presets[args.model])
    for name in SIZES:
        setattr(args, name, getattr(args.cfg, name))
    args.world_size = args.dry_run or launch.world_size
    args.batch = args.batch or max(8, args.world_size)
    refuse(args, launch)
    return args


def variable(flag):
    return flag.removeprefix("--").replace("-", "_")


def parse(doc, flags, words=None):
    """Flags as FLAGS has them, or arguments without a name -> argparse's result, in bounds."""
    wide = partial(argparse.HelpFormatter, max_help_position=30, width=100)
    words_of = [f"[{name}]" if flag.get("nargs") == "?" else name
                for name, flag in flags.items() if name[0] != "-"]
    parser = argparse.ArgumentParser(
        description=doc.split("\n")[0], usage=" ".join(["%(prog)s", *words_of, "[flags]"]),
        allow_abbrev=False, formatter_class=wide)
    parser.error = lambda message: require(False, message)
    for name, flag in flags.items():
        settings = {key: flag[key] for key in flag if key not in ("least", "most", "course")}
        if str(settings.get("default")).strip() not in ("None", "", "True", "False"):
            settings["help"] += " (%(default)s)"
        if name[0] == "-" and "choices" not in settings and "action" not in settings:
            settings.setdefault("metavar", "X" if settings.get("type") is float else "N")
        parser.add_argument(name, **settings)
    args = parser.parse_args(words)
    for name, flag in flags.items():
        check_bounds(name, getattr(args, variable(name)), **flag)
    return args


def check_bounds(name, value, least=0, most=sys.maxsize, **_):
    if type(value) not in (int, float):
        return
    bounds = f"{least} or more"
    if most < sys.maxsize or value > most:  # sys.maxsize is told only to those who exceed it
        bounds += f", {most} or less"
    require(least <= value <= most, f"{name} {value}: must be {bounds}")


def config_of(args, preset):
    """A preset with the sizes that flags give -> GPTConfig. Those that do not fit are refused."""
    given = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    for name in ("kv_heads", "hidden", "head_dim"):
        require(not preset.form.learned_positions or name not in given,
                f"--{name.replace('_', '-')}: is for other forms, such as --model llama-toy")
    cfg = preset._replace(**given)
    require(cfg.head_dim or cfg.width % cfg.heads == 0,
            f"--heads {cfg.heads} does not divide --width {cfg.width}")
    cfg = cfg.resolved()
    require(cfg.heads % cfg.kv_heads == 0,
            f"--kv-heads {cfg.kv_heads} does not divide --heads {cfg.heads}")
    require(cfg.form.learned_positions or cfg.head_dim % 2 == 0,
            f"heads of width {cfg.head_dim}: rotary positions want an even one")
    return cfg


def refuse(args, launch):
    """What no script can do ends here, in one line."""
    ranks = launch.world_size
    require(not args.dry_run or ranks == 1,
            f"--dry-run is one rank alone: use python, not torchrun with {ranks}")
    require(args.rank < (args.dry_run or 1),  # without a dry run there is the default alone, 0
            f"--rank {args.rank}: is for --dry-run W, 0 to W - 1")
    require(args.device != "cuda" or torch.cuda.is_available(), "--device cuda: torch finds no GPU")
    require(args.optimizer == "adamw" or args.impl == "scratch", "--optimizer: for --impl scratch")
    require(args.min_lr <= args.lr, f"--min-lr {args.min_lr} is above --lr {args.lr}")
    require(args.warmup < args.steps,
            f"--warmup {args.warmup}: leave a step of --steps {args.steps} for the full rate")
    try:
        re.compile(args.train)
    except re.error as error:
        require(False, f"--train {args.train}: no regular expression: {error}")
    refuse_file("--json", args.json)
    refuse_file("--log-file", args.log_file)
    require(not os.path.isfile(args.profile), f"--profile {args.profile}: is a file, give a folder")


def refuse_flags(args, own, flags):
    """What args.impl does not know must be left as it is by default. own: the script's FLAGS."""
    known = {**own, **FLAGS}
    for flag in flags.split():
        usual = known[flag].get("default")
        require((getattr(args, variable(flag)) or None) == (usual or None),
                f"--impl {args.impl}: takes no {flag}")


def refuse_file(flag, path):
    """Can this file be written?"""
    if not path:
        return
    require(not os.path.isdir(path), f"{flag} {path}: is a folder, give a file")
    folder = os.path.dirname(os.path.abspath(path))
    require(os.path.isdir(folder) and os.access(folder, os.W_OK),
            f"{flag} {path}: no such folder to write to")


# ---- bad usage ---------------------------------------------------------------

PATIENCE = 5  # seconds in which ranks that leave wait for each other


def program():
    """The name of the script that runs."""
    return Path(sys.argv[0]).name


def require(condition, message, code=2):
    """Go on if the condition holds; else end every rank, after one line on stderr.

    Under torchrun the first rank that sees the fault speaks. Without torchrun, ranks cannot know
    who is the first, and the first one of each machine speaks.
    """
    if condition:
        return
    # the store of torchrun's agent is there before the ranks are, unless it keeps it to itself
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        alone = os.environ.get("WORLD_SIZE", "1") == "1"  # whatever a stale LOCAL_RANK says
        if alone or os.environ.get("LOCAL_RANK", "0") == "0":
            complain(message)
        sys.exit(code)
    store = next(dist.rendezvous("env://"))[0]
    key = f"leaving, attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    leaving = store.add(key, 1)
    if leaving == 1:
        complain(message)
    end = time.monotonic() + PATIENCE
    while leaving < int(os.environ["WORLD_SIZE"]) and time.monotonic() < end:
        time.sleep(0.01)  # torchrun ends all ranks as soon as one has left: leave together
        leaving = store.add(key, 0)
    print(end="", flush=True)  # what stdout still holds
    os._exit(code)


@contextlib.contextmanager
def refusing():
    """What a technique asserts in here is bad usage: see require."""
    try:
        yield
    except AssertionError as error:
        require(False, str(error))


def complain(message):
    print(f"{program()}: error: {message}", file=sys.stderr, flush=True)
