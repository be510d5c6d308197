"""The flags that every script takes, and what none of them can do. Bad usage is one line."""
import argparse
import os
import re
import sys
from collections import namedtuple
from functools import partial

import torch

from common import PRESETS, GPTConfig, launched
from harness.usage import ANY, POSITIVE, require

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}

# default: a value, or a type for a flag that has none; True makes --name and --no-name
# limits: the choices, the bounds of a number, or None
# course: does what is trained depend on it, so that no checkpoint goes on with another value?
Flag = namedtuple("Flag", "default help limits course", defaults=(None, False))

MODEL_FLAGS = {
    "impl": Flag("scratch", "ours, torch's own, or both in turn", ("scratch", "torch", "both")),
    "model": Flag("toy", "a preset, whose sizes the next seven override", tuple(PRESETS)),
    "layers": Flag(int, "L, transformer blocks", POSITIVE),
    "width": Flag(int, "C, embedding width", POSITIVE),
    "heads": Flag(int, "H, attention heads", POSITIVE),
    "vocab": Flag(int, "V; text is bytes: 256 or more", (256, sys.maxsize)),
    "seq": Flag(int, "T, sequence length", POSITIVE),
    "kv_heads": Flag(int, "K, key-value heads (Llama's form)", POSITIVE),
    "hidden": Flag(int, "F, hidden width of the MLP (Llama's form)", POSITIVE),
    "dtype": Flag("fp32", "of parameters and arithmetic", tuple(DTYPES)),
    "device": Flag("auto", "auto: GPUs where there are any", ("auto", "cpu", "cuda")),
}
TRAINING_FLAGS = {
    "batch": Flag(int, "B, sequences per step over all ranks (8, or one per rank)", POSITIVE),
    "steps": Flag(20, "optimizer steps", POSITIVE),
    "lr": Flag(1e-3, "AdamW learning rate", (1e-12, 1e3)),
    "warmup": Flag(0, "steps in which the rate climbs to --lr", ANY),
    "decay": Flag("none", "how it falls to --min-lr afterwards", ("none", "linear", "cosine")),
    "min_lr": Flag(0.0, "where --decay ends, one step after the last", (0, 1e3)),
    "clip": Flag(1.0, "largest gradient norm, 0: no clipping", ANY),
    "seed": Flag(0, "of weights and batches", ANY),
    "data": Flag("", "text FILE or folder (default: Python's own sources)"),
    "pad": Flag(0.0, "fraction of targets to ignore, unevenly (above 0.25: less)", (0, 0.99)),
    "train": Flag("", "regular expression: train parameters it finds, freeze the others"),
    "eval_every": Flag(0, "steps between losses on text that is held out", ANY),
}
RUN_FLAGS = {
    "check": Flag(True, "replay the steps with the plain GPT and compare"),
    "timeout": Flag(int, "seconds until ranks give up a collective (30, NCCL 600)", (1, 10**6)),
    "dry_run": Flag(int, "be one of so many ranks, without the others or memory", POSITIVE),
    "rank": Flag(0, "which one (dry run only)", ANY),
    "json": Flag("", "FILE for the report"),
    "log_file": Flag("", "FILE for a line of JSON per step"),
    "profile": Flag("", "folder for a torch.profiler trace of each rank"),
    "save": Flag("", "folder for checkpoints, each in a folder named by its steps"),
    "save_every": Flag(0, "steps between checkpoints (0: one, at the end)", ANY),
    "save_async": Flag(False, "train on while a checkpoint is written, from a copy"),
    "resume": Flag("", "go on from the newest checkpoint in this folder, on any ranks"),
    "init_from": Flag("", "start with the weights of the newest checkpoint in this folder"),
}
FLAGS = {**MODEL_FLAGS, **TRAINING_FLAGS, **RUN_FLAGS}


def arguments(doc, presets=None, **own):
    """The common flags and a script's own, e.g. micro=Flag(4, "micro-batches", POSITIVE) -> args.

    presets: {name: GPTConfig} besides those of common.py. args.cfg is the GPTConfig,
    args.world_size the number of ranks, in a dry run that of --dry-run.
    """
    presets = {**PRESETS, **(presets or {})}
    flags = {**own, **FLAGS}  # in this order in --help
    flags["model"] = FLAGS["model"]._replace(limits=tuple(presets))
    args = parse(doc, flags)
    for name, flag in flags.items():
        check_bounds(name, getattr(args, name), flag.limits)
    args.course = [name for name, flag in flags.items() if flag.course]
    try:
        launch = launched()
    except ValueError as error:
        require(False, error)
    resolve(args, launch, presets[args.model])
    refuse(args, launch)
    return args


def parse(doc, flags):
    wide = partial(argparse.HelpFormatter, max_help_position=30, width=100)
    parser = argparse.ArgumentParser(description=doc.split("\n")[0], usage="%(prog)s [flags]",
                                     allow_abbrev=False, formatter_class=wide)
    parser.error = lambda message: require(False, message)
    for name, flag in flags.items():
        add_flag(parser, name, flag)
    return parser.parse_args()


def add_flag(parser, name, flag):
    settings = dict(help=flag.help, type=flag.default, metavar=name[0].upper())
    if flag.default is True:
        settings = dict(help=flag.help, default=True, action=argparse.BooleanOptionalAction)
    elif flag.default is False:
        settings = dict(help=flag.help, action="store_true")
    elif not isinstance(flag.default, type):
        settings.update(type=type(flag.default), default=flag.default)
        if flag.default != "":
            settings["help"] += f" ({flag.default})"
    if flag.limits and isinstance(flag.limits[0], str):
        settings.update(choices=flag.limits, metavar=None)  # which shows the choices
    parser.add_argument("--" + name.replace("_", "-"), **settings)


def check_bounds(name, value, limits):
    if limits is None or not isinstance(value, (int, float)):
        return
    low, high = limits
    bounds = f"{low:g} or more"
    if high < sys.maxsize or value > high:  # sys.maxsize is told only to those who exceed it
        bounds += f", {high:g} or less"
    require(low <= value <= high, f"--{name.replace('_', '-')} {value}: must be {bounds}")


def resolve(args, launch, preset):
    """Fill in what presets and defaults leave to be said, so that a report shows what was used."""
    gpt2 = preset.form == "gpt2"
    for name in ("kv_heads", "hidden"):
        require(not gpt2 or getattr(args, name) is None,
                f"--{name.replace('_', '-')}: is for Llama's form, such as --model llama-toy")
    for name in ("layers", "width", "heads", "vocab", "seq", "kv_heads", "hidden"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(preset, name))
    if gpt2:
        args.kv_heads = args.heads
        args.hidden = 4 * args.width
    sizes = {name: getattr(args, name) for name in GPTConfig._fields if hasattr(args, name)}
    args.cfg = preset._replace(**sizes)
    args.world_size = args.dry_run or launch.world_size
    if args.batch is None:
        args.batch = max(8, args.world_size)


def refuse(args, launch):
    """What no script can do ends here, in one line."""
    cfg = args.cfg
    ranks = launch.world_size
    require(cfg.width % cfg.heads == 0, f"--heads {cfg.heads} does not divide --width {cfg.width}")
    require(cfg.heads % cfg.kv_heads == 0,
            f"--kv-heads {cfg.kv_heads} does not divide --heads {cfg.heads}")
    require(cfg.form == "gpt2" or cfg.width // cfg.heads % 2 == 0,
            f"--heads {cfg.heads} of --width {cfg.width}: rotary positions want an even head width")
    require(not args.dry_run or ranks == 1,
            f"--dry-run is one rank alone: use python, not torchrun with {ranks}")
    ranks_to_choose_from = args.dry_run or 1  # without a dry run there is the default alone, 0
    require(args.rank < ranks_to_choose_from,
            f"--rank {args.rank}: is for --dry-run, up to {args.world_size - 1}")
    require(args.device != "cuda" or torch.cuda.is_available(),
            "--device cuda: torch finds no GPU, which it wants in a dry run, too")
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


def refuse_file(flag, path):
    """Can this file be written?"""
    if not path:
        return
    require(not os.path.isdir(path), f"{flag} {path}: is a folder, give a file")
    folder = os.path.dirname(os.path.abspath(path))
    require(os.path.isdir(folder) and os.access(folder, os.W_OK),
            f"{flag} {path}: no such folder to write to")
