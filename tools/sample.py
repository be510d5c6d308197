"""Text from a checkpoint of any script that holds the plain GPT; a mixture of experts is refused.

    python tools/sample.py DIR "def forward(" [--tokens 200] [--temperature 0.8] [--top-k 40]
    python tools/sample.py DIR --ids "15496 995"            a model whose tokens are not bytes

DIR is what --save has written, or tools/weights.py from elsewhere. Keys and values of the tokens so
far are kept (a cache), so that a step computes one position:

    tokens    a  b  c  d     new: e
    cache     k  k  k  k     k of e is added
              v  v  v  v     v of e is added

A model knows --seq positions. When they are used up, the last half of the tokens becomes the
beginning, and its keys and values are computed anew, since their positions are others.
"""
import argparse
import codecs
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from common import GPT  # noqa: E402
from harness.flags import check_bounds, require  # noqa: E402
from tools.weights import sizes_in, weights_of  # noqa: E402

BYTES = 256


class Cache:
    """Keys and values of one attention layer; `attend` takes the place of the plain one."""

    def __init__(self):
        self.keys = None  # (B, K, t, D) of the t tokens so far; None: there are none
        self.values = None  # (B, K, t, D)

    def attend(self, q, k, v):
        """q (B, H, T, D), k and v (B, K, T, D) of the T newest tokens -> (B, H, T, D)."""
        if self.keys is not None:
            k = torch.cat((self.keys, k), dim=2)  # (B, K, t + T, D)
            v = torch.cat((self.values, v), dim=2)
        self.keys = k
        self.values = v
        new = q.shape[2]
        total = k.shape[2]
        seen = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


class Reader:
    """Reads tokens, and says what may come next."""

    def __init__(self, model, seq):
        self.model = model
        self.seq = seq  # positions that the model knows
        self.window = []  # the tokens that are seen, at most seq
        self.done = 0  # how many of them are in the caches
        for module in (model, *(block.attn for block in model.blocks)):
            module.positions = self.positions

    def positions(self, length, device):
        return torch.arange(self.done, self.done + length, device=device)

    @torch.no_grad()
    def read(self, tokens):
        """-> logits (V) of the token that follows."""
        self.window += tokens
        if len(self.window) > self.seq:
            self.window = self.window[-(self.seq // 2 + 1):]
            self.done = 0
        if self.done == 0:
            for block in self.model.blocks:
                block.attn.attend = Cache().attend  # new and empty
        device = self.model.tok.weight.device
        ids = torch.tensor([self.window[self.done:]], device=device)  # (1, T)
        logits = self.model(ids)[0, -1]
        self.done = len(self.window)
        return logits


def choose(logits, temperature, top_k, rng):
    """A token, drawn from the top_k likeliest (0: from all). Temperature 0: the likeliest."""
    if temperature == 0:
        return logits.argmax().item()
    logits = logits.float() / temperature
    if 0 < top_k < len(logits):
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial(logits.softmax(0).cpu(), 1, generator=rng).item()


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
        model.head.weight = model.tok.weight
    return model.to(device).requires_grad_(False), cfg


def ids_in(text, vocab):
    words = text.replace(",", " ").split()
    require(all(word.isdecimal() for word in words), f"--ids {text}: are no numbers")
    ids = [int(word) for word in words]
    require(max(ids, default=0) < vocab, f"--ids {text}: must be 0 to {vocab - 1}")
    return ids


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.error = lambda message: require(False, message)
    parser.add_argument("folder", help="what --save has written")
    parser.add_argument("prompt", nargs="?", default="\n", help="text that is gone on with")
    parser.add_argument("--ids", default="", help="token ids instead, which are printed as ids")
    parser.add_argument("--tokens", type=int, default=200, help="how many (200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest (0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="from so many; 0: from all (0)")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing (0)")
    args = parser.parse_args()
    for name in ("tokens", "temperature", "top_k"):
        check_bounds("--" + name.replace("_", "-"), getattr(args, name), 0)
    model, cfg = load(args.folder, "cuda" if torch.cuda.is_available() else "cpu")
    new = ids_in(args.ids, cfg.vocab) if args.ids else list(args.prompt.encode())
    require(new, "an empty prompt: give a character to begin with")
    print(" ".join(map(str, new)) if args.ids else args.prompt, end="", flush=True)
    rng = torch.Generator().manual_seed(args.seed)
    reader = Reader(model, cfg.seq)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    possible = cfg.vocab if args.ids else BYTES
    for _ in range(args.tokens):
        token = choose(reader.read(new)[:possible], args.temperature, args.top_k, rng)
        print(f" {token}" if args.ids else decoder.decode(bytes([token])), end="", flush=True)
        new = [token]
    print(decoder.decode(b"", final=True))  # of a character that is not whole


if __name__ == "__main__":
    main()
