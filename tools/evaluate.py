"""How well checkpoints know texts: the loss on the last 5% of each text.

    python tools/evaluate.py CHECKPOINTS --data TEXTS       a row for each, a column for each

It is the loss that --eval-every shows: of up to 8 batches, in nats per byte. A run that had this
flag has not seen that part of its text; one without it was trained on it, too. Beside the loss
stands the perplexity, e to the loss: among how many bytes the model is undecided.
"""
import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from common import load_corpus, loss_sum  # noqa: E402
from harness.usage import require  # noqa: E402
from harness.validate import HeldOut  # noqa: E402
from tools.sample import load  # noqa: E402


@torch.no_grad()
def loss_on(model, seq, path, batch):
    """-> the loss per token on the held-out end of a text."""
    try:
        text = HeldOut(load_corpus(path, seq), seq, batch)
    except (OSError, ValueError) as error:
        require(False, f"--data {path}: {error}")
    losses = [loss_sum(model(x), y) for x, y in map(text.batch, range(text.batches))]
    return sum(losses).item() / text.targets


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.error = lambda message: require(False, message)
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="what --save wrote")
    parser.add_argument("--data", nargs="+", required=True, metavar="TEXT", help="files, folders")
    parser.add_argument("--batch", type=int, default=8, help="windows at a time, as in the run (8)")
    args = parser.parse_args()
    require(args.batch > 0, f"--batch {args.batch}: must be 1 or more")
    first = max(len(folder) for folder in args.checkpoints)  # width of the first column
    widths = [max(18, len(path)) for path in args.data]
    heads = [path.rjust(width) for path, width in zip(args.data, widths)]
    print("  ".join([" " * first, *heads]))
    for folder in args.checkpoints:
        model, cfg = load(folder)
        require(cfg.vocab >= 256, f"{folder}: its tokens are no bytes")
        cells = [folder.ljust(first)]
        for path, width in zip(args.data, widths):
            loss = loss_on(model, cfg.seq, path, args.batch)
            cells.append(f"{loss:.4f}  ({math.exp(loss):.2f})".rjust(width))
        print("  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
