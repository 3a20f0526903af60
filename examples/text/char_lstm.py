"""A language model of characters: an LSTM and truncated backpropagation through time.

python examples/text/char_lstm.py tinyshakespeare.txt
"""

import argparse
import os
import time

import numpy as np

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import optimizers


class CharLSTM(dbrdist.Chain):
    def __init__(self, num_characters, units, layers=1):
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(num_characters, units)
            self.rnn = L.NStepLSTM(layers, units, units, dropout=0.0)
            self.out = L.Linear(units, num_characters)

    def forward(self, x, state=(None, None)):
        """x (T, B) -> scores (T * B, characters) and the state after the last step."""
        *state, ys = self.rnn(*state, list(F.separate(self.embed(x), axis=1)))  # one sequence (T, U) per stream
        return self.out(F.reshape(F.stack(ys, axis=1), (x.size, -1))), state


def windows(ids, batch, steps):
    """The text as parallel streams, cut into pairs of inputs and targets (T, batch), one window after the other."""
    length = (len(ids) - 1) // batch
    x, t = (ids[i : i + length * batch].reshape(batch, length).T for i in (0, 1))
    for i in range(0, length, steps):
        yield x[i : i + steps], t[i : i + steps]


def train_epoch(model, optimizer, ids, batch, steps):
    """One pass over the text. The bits per character that the model needed on its way."""
    state, nats = (None, None), 0.0
    for x, t in windows(ids, batch, steps):
        y, state = model(x, state)
        loss = F.softmax_cross_entropy(y, t.ravel())
        model.cleargrads()
        loss.backward()
        optimizer.update()
        state = [s.array for s in state]  # the next window continues from the values: the graph is cut here
        nats += float(loss.array) * t.size
    return nats / (len(ids) - 1) / np.log(2)


def bits_per_character(model, ids, batch=50, steps=200):
    """The mean of -log2 p(character) over the text, read as `batch` streams."""
    state, nats, count = (None, None), 0.0, 0
    with dbrdist.using_config("train", False), dbrdist.no_backprop_mode():
        for x, t in windows(ids, batch, steps):
            y, state = model(x, state)
            nats += float(F.softmax_cross_entropy(y, t.ravel()).array) * t.size
            count += t.size
    return nats / count / np.log(2)


def sample(model, characters, length, device, rng):
    """A text drawn from the model, character by character."""
    state, found = (None, None), [characters.index("\n")]
    with dbrdist.using_config("train", False), dbrdist.no_backprop_mode():
        for _ in range(length):
            y, state = model(device.send(np.array([[found[-1]]])), state)
            p = dbrdist.backend.to_cpu(F.softmax(y).array)[0].astype(float)
            found.append(int(rng.choice(len(p), p=p / p.sum())))
    return "".join(characters[i] for i in found)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="a file of text; the last tenth is for testing")
    parser.add_argument("--units", type=int, default=128)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32, help="parallel streams")
    parser.add_argument("--steps", type=int, default=64, help="length of backpropagation")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--sample", type=int, default=300, help="characters to write at the end")
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

    model = CharLSTM(len(characters), args.units, args.layers)
    model.to_device(device)
    optimizer = optimizers.Adam(alpha=2e-3).setup(model)
    optimizer.add_hook(optimizers.GradientClipping(5.0))
    start = time.perf_counter()
    print("epoch  bits per character: training  test   seconds")
    for epoch in range(1, args.epochs + 1):
        found = train_epoch(model, optimizer, train, args.batch, args.steps), bits_per_character(model, test)
        print(f"{epoch:<5}  {found[0]:28.3f}  {found[1]:.3f}  {time.perf_counter() - start:7.0f}", flush=True)
    print(sample(model, characters, args.sample, device, np.random.default_rng(args.seed)))
    return found[1]


if __name__ == "__main__":
    main()
