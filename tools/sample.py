"""Text from a checkpoint of any script that holds the plain GPT; or how well it knows texts.

    python tools/sample.py DIR "def forward(" [--tokens 200] [--temperature 0.8] [--top-k 40]
    python tools/sample.py DIR --ids "15496 995"            a model whose tokens are not bytes
    python tools/sample.py DIR --data TEXTS                 the loss on the last 5% of each text

DIR is what --save has written, or tools/weights.py from elsewhere; a mixture of experts is refused.
The models of this repository predict bytes: a prompt is text, unless --ids gives token ids. Every
token is a forward of all that is before it: no keys and values are kept.

The loss of --data is the one that --eval-every shows: of up to 8 batches, in nats per byte. A run
that had this flag has not seen that part of its text; one without it was trained on it, too. Beside
the loss stands the perplexity, e to the loss: among how many bytes the model is undecided.
"""
import argparse
import codecs
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from common import GPT, load_corpus, loss_sum  # noqa: E402
from harness.usage import require  # noqa: E402
from harness.validate import HeldOut  # noqa: E402
from tools.weights import sizes_in, weights_of  # noqa: E402

BYTES = 256


def choose(logits, temperature, top_k, rng):
    """A token, drawn from the top_k likeliest (0: from all). Temperature 0: the likeliest."""
    if temperature == 0:
        return logits.argmax().item()
    logits = logits.float() / temperature
    if 0 < top_k < len(logits):
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial(logits.softmax(0).cpu(), 1, generator=rng).item()


@torch.no_grad()
def sample(model, seq, tokens, args, vocab=None):
    """Yields args.tokens tokens that follow the tokens of a prompt.

    seq: positions that the model knows. vocab: only the first so many tokens may be drawn.
    """
    rng = torch.Generator().manual_seed(args.seed)
    for _ in range(args.tokens):
        ids = torch.tensor([tokens[-seq:]], device=model.tok.weight.device)  # (1, T)
        logits = model(ids)[0, -1]  # (V)
        token = choose(logits[:vocab], args.temperature, args.top_k, rng)
        yield token
        tokens = [*tokens, token]


def load(folder, device="cpu"):
    """-> the plain GPT with a checkpoint's weights, its GPTConfig."""
    state, identity = weights_of(folder)
    require(not identity.get("experts"), f"{folder}: it has experts, which the plain GPT has not")
    cfg = sizes_in(identity)
    with torch.device("meta"):
        model = GPT(cfg)
    if cfg.form == "gpt2":
        state["head.weight"] = state["tok.weight"]
    model.load_state_dict(state, assign=True)
    if cfg.form == "gpt2":
        model.head.weight = model.tok.weight
    return model.to(device).requires_grad_(False), cfg


@torch.no_grad()
def loss_on(model, seq, path):
    """-> the loss per token on the held-out end of a text."""
    try:
        text = HeldOut(load_corpus(path, seq), seq, batch=8)
    except (OSError, ValueError) as error:
        require(False, f"--data {path}: {error}")
    device = model.tok.weight.device
    total = 0.0
    for k in range(text.batches):
        x, y = text.batch(k)
        total += loss_sum(model(x.to(device)), y.to(device)).item()
    return total / text.targets


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.error = lambda message: require(False, message)
    parser.add_argument("folder", help="what --save has written")
    parser.add_argument("prompt", nargs="?", default="\n", help="text that is gone on with")
    parser.add_argument("--ids", default="", help="token ids instead, which are printed as ids")
    parser.add_argument("--data", nargs="+", metavar="TEXT", help="the loss on these, no text")
    parser.add_argument("--tokens", type=int, default=200, help="how many (200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest (0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="from so many; 0: from all (0)")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing (0)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    require(args.tokens >= 0, f"--tokens {args.tokens}: must be 0 or more")
    require(args.temperature >= 0, f"--temperature {args.temperature}: must be 0 or more")
    require(args.top_k >= 0, f"--top-k {args.top_k}: must be 0 or more")
    return args


def print_losses(model, cfg, args):
    require(cfg.vocab >= BYTES, f"{args.folder}: its tokens are no bytes")
    for path in args.data:
        loss = loss_on(model, cfg.seq, path)
        print(f"{args.folder:14} {path:18} {loss:.4f}  ({math.exp(loss):.2f})", flush=True)


def print_ids(model, cfg, args):
    words = args.ids.replace(",", " ").split()
    good = all(word.isdecimal() and int(word) < cfg.vocab for word in words)
    require(words and good, f"--ids {args.ids}: must be 0 to {cfg.vocab - 1}")
    print(*words, end="", flush=True)
    for token in sample(model, cfg.seq, list(map(int, words)), args):
        print(f" {token}", end="", flush=True)
    print()


def print_text(model, cfg, args):
    require(args.prompt, "an empty prompt: give a character to begin with")
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    print(args.prompt, end="", flush=True)
    for token in sample(model, cfg.seq, list(args.prompt.encode()), args, vocab=BYTES):
        print(decoder.decode(bytes([token])), end="", flush=True)
    print(decoder.decode(b"", final=True))  # of a character that is not whole


def main():
    args = arguments()
    model, cfg = load(args.folder, args.device)
    if args.data:
        print_losses(model, cfg, args)
    elif args.ids:
        print_ids(model, cfg, args)
    else:
        print_text(model, cfg, args)


if __name__ == "__main__":
    main()
