"""Text from a checkpoint of any script that holds the plain GPT.

    python tools/sample.py DIR "def forward(" [--tokens 200] [--temperature 0.8] [--top-k 40]
    python tools/sample.py DIR --ids "15496 995"            a model whose tokens are not bytes

DIR is what --save has written, or tools/weights.py from elsewhere; a mixture of experts is refused.
The models of this repository predict bytes: a prompt is text, unless --ids gives token ids.

Each token costs a whole forward of those before it, at most --seq: nothing is cached.
"""
import argparse
import codecs
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from common import GPT  # noqa: E402
from harness.usage import require  # noqa: E402
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
def sample(model, seq, prompt, count, temperature=0.8, top_k=0, seed=0, vocab=None):
    """Yields `count` tokens that follow the prompt, each from the last `seq` before it.

    vocab: only the first so many tokens may be drawn.
    """
    rng = torch.Generator().manual_seed(seed)
    device = model.tok.weight.device
    tokens = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([tokens[-seq:]], device=device))[0, -1]  # (V)
        tokens.append(choose(logits[:vocab], temperature, top_k, rng))
        yield tokens[-1]


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


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.error = lambda message: require(False, message)
    parser.add_argument("folder", help="what --save has written")
    parser.add_argument("prompt", nargs="?", default="\n", help="text that is gone on with")
    parser.add_argument("--ids", default="", help="token ids instead, which are printed as ids")
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


def main():
    args = arguments()
    model, cfg = load(args.folder, args.device)
    vocab = cfg.vocab
    prompt = list(args.prompt.encode())
    if args.ids:
        words = args.ids.replace(",", " ").split()
        require(all(word.isdecimal() for word in words), f"--ids {args.ids}: are no numbers")
        prompt = [int(word) for word in words]
        require(all(token < vocab for token in prompt),
                f"--ids {args.ids}: must be 0 to {vocab - 1}")
    require(prompt, "an empty prompt: give a character to begin with")
    known = BYTES  # tokens that may be drawn: text is bytes
    if args.ids:
        known = None
    drawn = sample(model, cfg.seq, prompt, args.tokens, temperature=args.temperature,
                   top_k=args.top_k, seed=args.seed, vocab=known)
    if args.ids:
        print(*prompt, end="", flush=True)
        for token in drawn:
            print(f" {token}", end="", flush=True)
    else:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        print(args.prompt, end="", flush=True)
        for token in drawn:
            print(decoder.decode(bytes([token])), end="", flush=True)
        print(decoder.decode(b"", final=True), end="")  # of a character that is not whole
    print()


if __name__ == "__main__":
    main()
