"""Text from a checkpoint of any script that holds the plain GPT; a mixture of experts is refused.

    python tools/sample.py DIR "def forward(" [--tokens 200] [--temperature 0.8] [--top-k 40]
    python tools/sample.py DIR --ids "15496 995"            a model whose tokens are not bytes

DIR is what --save has written, or tools/weights.py from elsewhere. Each token is drawn after a
forward over all before it, at most the --seq positions that the model knows. Serving programs keep
the keys and values of earlier tokens instead, and compute one position.
"""
import codecs
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

from common import GPT  # noqa: E402
from harness.flags import parse, require  # noqa: E402
from tools.weights import sizes_in, weights_of  # noqa: E402

BYTES = 256


def load(folder, device="cpu"):
    """-> the plain GPT with a checkpoint's weights, its GPTConfig."""
    state, identity = weights_of(folder)
    require(not identity.get("experts"), f"{folder}: it has experts, which the plain GPT has not")
    cfg = sizes_in(identity)
    with torch.device("meta"):
        model = GPT(cfg)
    if cfg.form.tied:
        state["head.weight"] = state["tok.weight"]
    model.load_state_dict(state, assign=True)
    if cfg.form.tied:
        model.head.weight = model.tok.weight  # else a GPU would have it twice
    return model.to(device).requires_grad_(False), cfg


def choose(logits, temperature, top_k, rng):
    """A token, drawn from the top_k likeliest (0: from all). Temperature 0: the likeliest."""
    if temperature == 0:
        return logits.argmax().item()
    logits = logits.float() / temperature
    if 0 < top_k < len(logits):
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial(logits.softmax(0).cpu(), 1, generator=rng).item()


def sample(model, cfg, tokens, count, temperature, top_k, seed, possible):
    """Yields `count` tokens that go on with these, each one of the first `possible` ones."""
    rng = torch.Generator().manual_seed(seed)
    device = model.tok.weight.device
    for _ in range(count):
        seen = torch.tensor([tokens[-cfg.seq:]], device=device)  # (1, T)
        logits = model(seen)[0, -1]
        tokens = [*tokens, choose(logits[:possible], temperature, top_k, rng)]
        yield tokens[-1]


def ids_in(text, vocab):
    words = text.replace(",", " ").split()
    require(all(word.isdecimal() for word in words), f"--ids {text}: are no numbers")
    ids = [int(word) for word in words]
    require(max(ids, default=0) < vocab, f"--ids {text}: must be 0 to {vocab - 1}")
    return ids


FLAGS = {
    "folder": dict(help="what --save has written"),
    "prompt": dict(nargs="?", default="\n", help="text that is gone on with"),
    "--ids": dict(default="", help="token ids instead, which are printed as ids"),
    "--tokens": dict(type=int, default=200, least=0, help="how many"),
    "--temperature": dict(type=float, default=0.8, least=0, help="0: the likeliest"),
    "--top-k": dict(type=int, default=0, least=0, help="from so many; 0: from all"),
    "--seed": dict(type=int, default=0, help="of the drawing"),
}


def main():
    args = parse(__doc__, FLAGS)
    model, cfg = load(args.folder, "cuda" if torch.cuda.is_available() else "cpu")
    prompt = ids_in(args.ids, cfg.vocab) if args.ids else list(args.prompt.encode())
    require(prompt, "an empty prompt: give a character to begin with")
    possible = cfg.vocab if args.ids else BYTES
    drawn = sample(model, cfg, prompt, args.tokens, args.temperature, args.top_k, args.seed,
                   possible)
    if args.ids:
        print(*prompt, *drawn)
        return
    print(args.prompt, end="", flush=True)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in drawn:
        print(decoder.decode(bytes([token])), end="", flush=True)
    print(decoder.decode(b"", final=True))  # of a character that is not whole


if __name__ == "__main__":
    main()
