"""Sequence to sequence (Sutskever et al. 2014): dates as people write them, of any length, to 2026-11-22.

python examples/text/seq2seq.py
"""

import argparse
import datetime
import time

import numpy as np

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import iterators, optimizers

FORMATS = [
    "{d} {month} {y}",
    "{month} {d}, {y}",
    "{weekday}, {d} {month} {y}",
    "{d}.{m}.{y}",
    "{m}/{d}/{y}",
    "{d}-{mon}-{y}",
]
FORMATS += ["the {d} of {month} {y}", "{weekday} {month} {d} {y}", "{mon} {d} {y}"]
LETTERS = "\n 0123456789abcdefghijklmnopqrstuvwxyz.,/-"
END = 0  # ends the target, and begins the decoder's input


def written(day, form):
    """A day as one of the formats has it."""
    names = {"month": f"{day:%B}", "mon": f"{day:%b}", "weekday": f"{day:%A}"}
    return form.format(d=day.day, m=day.month, y=day.year, **names).lower()


def numbers(text):
    return np.array([LETTERS.index(c) for c in text], np.int32)


def make_pairs(number, rng, first=datetime.date(1900, 1, 1), num_days=73_000):
    """Pairs of a written date and what it means: (L,) and (10,) numbers of letters."""
    days = [first + datetime.timedelta(int(d)) for d in rng.integers(0, num_days, number)]
    return [(numbers(written(day, FORMATS[rng.integers(len(FORMATS))])), numbers(day.isoformat())) for day in days]


def as_sequences(batch, device):
    """The converter of a batch of pairs: lists of arrays, since their lengths differ."""
    return [[device.send(pair[i]) for pair in batch] for i in (0, 1)]


class Seq2Seq(dbrdist.Chain):
    """An LSTM reads the source in both directions; its last state is where the one that writes begins."""

    def __init__(self, units, layers=1):
        super().__init__()
        with self.init_scope():
            self.embed_x, self.embed_y = L.EmbedID(len(LETTERS), units), L.EmbedID(len(LETTERS), units)
            self.encoder = L.NStepBiLSTM(layers, units, units // 2, dropout=0.0)
            self.decoder = L.NStepLSTM(layers, units, units, dropout=0.0)
            self.out = L.Linear(units, len(LETTERS))

    def encode(self, xs):
        """The sources (L_i,) -> the decoder's first state and cell, each (layers, N, units)."""
        pieces = F.split_axis(self.embed_x(self.xp.concatenate(xs)), np.cumsum([len(x) for x in xs[:-1]]), axis=0)
        hx, cx, _ = self.encoder(None, None, list(pieces))
        return [F.concat([s[0::2], s[1::2]], axis=2) for s in (hx, cx)]  # both directions side by side

    def forward(self, xs, ts):
        """The loss per letter of the targets (M_i,) with their ends."""
        xp, end = self.xp, self.xp.full(1, END, np.int32)
        inputs = [self.embed_y(xp.concatenate([end, t])) for t in ts]
        targets = xp.concatenate([xp.concatenate([t, end]) for t in ts])
        _, _, ys = self.decoder(*self.encode(xs), inputs)
        return F.softmax_cross_entropy(self.out(F.concat(ys, axis=0)), targets)

    def translate(self, xs, limit=20):
        """The likeliest letter each time, until the end: texts."""
        with dbrdist.using_config("train", False), dbrdist.no_backprop_mode():
            state, letters, found = self.encode(xs), self.xp.full(len(xs), END, np.int32), []
            for _ in range(limit):
                *state, ys = self.decoder(*state, list(F.separate(F.expand_dims(self.embed_y(letters), 1), axis=0)))
                letters = self.out(F.concat(ys, axis=0)).array.argmax(axis=1)
                found.append(dbrdist.backend.to_cpu(letters))
        return ["".join(LETTERS[i] for i in row).split(LETTERS[END])[0] for row in np.stack(found, axis=1)]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=128)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=10000, help="written dates to learn from")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="@numpy")
    args = parser.parse_args(argv)

    dbrdist.random.set_seed(args.seed)
    device = dbrdist.get_device(args.device)
    device.use()
    rng, start = np.random.default_rng(args.seed), time.perf_counter()
    train = make_pairs(args.pairs, rng)
    known = {bytes(x) for x, _ in train}
    test = [pair for pair in make_pairs(1000, rng) if bytes(pair[0]) not in known]
    xs, _ = as_sequences(test, device)
    wanted = ["".join(LETTERS[i] for i in t) for _, t in test]

    model = Seq2Seq(args.units)
    model.to_device(device)
    optimizer = optimizers.Adam(alpha=2e-3).setup(model)
    optimizer.add_hook(optimizers.GradientClipping(5.0))
    print("epoch  loss    test dates right  seconds")
    for epoch in range(1, args.epochs + 1):
        losses = []
        for batch in iterators.SerialIterator(train, args.batch, repeat=False, seed=epoch):
            loss = model(*as_sequences(batch, device))
            model.cleargrads()
            loss.backward()
            optimizer.update()
            losses.append(float(loss.array))
        right = np.mean([y == t for y, t in zip(model.translate(xs), wanted)])
        print(
            f"{epoch:<5}  {np.mean(losses):.4f}  {100 * right:14.1f} %  {time.perf_counter() - start:7.0f}", flush=True
        )
    for i in range(3):
        print(f"{''.join(LETTERS[c] for c in test[i][0])} -> {model.translate(xs[i : i + 1])[0]}")
    return right


if __name__ == "__main__":
    main()
