"""A small Transformer that models characters (Vaswani et al. 2017; layer normalization first, as in GPT-2).

python examples/text/transformer.py tinyshakespeare.txt
"""

import argparse
import os
import time

import numpy as np

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import initializers, optimizers


class Transformer(dbrdist.Chain):
    def __init__(self, num_characters, context, units, heads, layers, dropout):
        super().__init__()
        self.context, self.dropout = context, dropout
        W = initializers.Normal(0.02)

        def block():
            return L.TransformerBlock(units, heads, None, dropout, F.gelu, norm_first=True, initialW=W)

        with self.init_scope():
            self.embed = L.EmbedID(num_characters, units, initialW=W)
            self.places = L.EmbedID(context, units, initialW=W)
            self.blocks = dbrdist.ChainList(*(block() for _ in range(layers)))
            self.norm, self.out = L.LayerNormalization(units), L.Linear(units, num_characters, initialW=W)

    def forward(self, x):
        """x (B, T) with T up to the context -> scores (B * T, characters) of what follows each position."""
        places = self.places(self.xp.arange(x.shape[1]))
        h = F.dropout(self.embed(x) + F.broadcast_to(places, (*x.shape, places.shape[1])), self.dropout)
        for block in self.blocks:
            h = block(h, is_causal=True)  # no position sees what comes after it
        return self.out(self.norm(F.reshape(h, (x.size, -1))))


def pieces(ids, starts, steps):
    """Inputs and targets (B, steps) from these places of the text."""
    at = starts[:, None] + np.arange(steps)
    return ids[at], ids[at + 1]


def bits_per_character(model, ids, batch=64):
    """The mean of -log2 p(character), each from the characters before it in its piece of the text."""
    nats, count, starts = 0.0, 0, np.arange(0, len(ids) - model.context, model.context)
    with dbrdist.using_config("train", False), dbrdist.no_backprop_mode():
        for i in range(0, len(starts), batch):
            x, t = pieces(ids, starts[i : i + batch], model.context)
            nats += float(F.softmax_cross_entropy(model(x), t.ravel()).array) * t.size
            count += t.size
    return nats / count / np.log(2)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="a file of text; the last tenth is for testing")
    parser.add_argument("--units", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=64, help="characters that the model sees")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--updates", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="@numpy")
    args = parser.parse_args(argv)
    if not os.path.exists(args.text):
        parser.error(f"{args.text}: no such file; any text of a megabyte does, such as tinyshakespeare.txt of char-rnn")

    dbrdist.random.set_seed(args.seed)
    device = dbrdist.get_device(args.device)
    device.use()
    with open(args.text, encoding="utf-8") as f:
        text = f.read()
    characters = sorted(set(text))
    ids = device.send(np.array([characters.index(c) for c in text], np.int32))
    train, test = ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]

    model = Transformer(len(characters), args.context, args.units, args.heads, args.layers, args.dropout)
    model.to_device(device)
    optimizer = optimizers.AdamW(alpha=2e-3, beta2=0.99, weight_decay_rate=1e-4).setup(model)
    optimizer.add_hook(optimizers.GradientClipping(1.0))
    rng, start = np.random.default_rng(args.seed), time.perf_counter()
    print("update  bits per character of the test text  seconds")
    for update in range(1, args.updates + 1):
        optimizer.alpha = 2e-3 * min(update / 100, 0.5 + 0.5 * np.cos(np.pi * update / args.updates) + 0.01)
        x, t = pieces(train, rng.integers(0, len(train) - args.context, args.batch), args.context)
        loss = F.softmax_cross_entropy(model(x), t.ravel())
        model.cleargrads()
        loss.backward()
        optimizer.update()
        if update % max(args.updates // 4, 1) == 0:
            bits = bits_per_character(model, test)
            print(f"{update:<6}  {bits:36.3f}  {time.perf_counter() - start:7.0f}", flush=True)
    return bits


if __name__ == "__main__":
    main()
