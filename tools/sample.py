"""Text from a checkpoint of any script that holds the plain GPT; a mixture of experts is refused.

    python tools/sample.py DIR "def forward(" [--tokens 200] [--temperature 0.8]
    python tools/sample.py DIR --ids "15496 995"            a model whose tokens are not bytes

DIR is what --save has written, or tools/weights.py from elsewhere. Each token is drawn after a
forward over all before it, at most the --seq positions that the model knows. Serving programs keep
the keys and values of earlier tokens instead, and compute one position.
"""
import os
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


def choose(logits, temperature, rng):
    """A token that is drawn. Temperature 0: the likeliest."""
    if temperature < 1e-6:  # for fp32 that is 0
        return logits.argmax().item()
    odds = (logits.float() / temperature).softmax(0)
    return torch.multinomial(odds.cpu(), 1, generator=rng).item()


def sample(model, cfg, tokens, count, temperature, seed, possible):
    """-> these tokens and `count` that go on with them, each one of the first `possible` ones."""
    rng = torch.Generator().manual_seed(seed)
    for _ in range(count):
        seen = torch.tensor([tokens[-cfg.seq:]], device=model.tok.weight.device)  # (1, T)
        logits = model(seen)[0, -1]
        tokens = [*tokens, choose(logits[:possible], temperature, rng)]
    return tokens


FLAGS = {
    "folder": dict(help="what --save has written"),
    "prompt": dict(nargs="?", default="\n", help="text that is gone on with"),
    "--ids": dict(default="", help="token ids instead, which are printed as ids"),
    "--tokens": dict(type=int, default=200, least=0, help="how many"),
    "--temperature": dict(type=float, default=0.8, least=0, help="0: the likeliest"),
    "--seed": dict(type=int, default=0, help="of the drawing"),
}


def main():
    args = parse(__doc__, FLAGS)
    model, cfg = load(args.folder, "cuda" if torch.cuda.is_available() else "cpu")
    prompt = list(os.fsencode(args.prompt))
    possible = BYTES
    if args.ids:
        possible = cfg.vocab
        prompt = [int(word) if word.isdecimal() else possible for word in args.ids.split()]
    require(prompt and max(prompt) < possible,
            f"a prompt's bytes or ids: one or more, which must be 0 to {possible - 1}")
    tokens = sample(model, cfg, prompt, args.tokens, args.temperature, args.seed, possible)
    if args.ids:
        print(*tokens)
    else:
        print(bytes(tokens).decode(errors="replace"))


if __name__ == "__main__":
    main()
