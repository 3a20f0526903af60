"""A language model of words: two layers of LSTM with dropout and truncated backpropagation (Zaremba et al. 2014).

python examples/text/ptb_lstm.py ptb.train.txt ptb.test.txt
"""

import argparse
import os

import numpy as np

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import optimizers, training
from dbrdist.training import extensions


class WordLSTM(dbrdist.Chain):
    def __init__(self, num_words, units, layers=2, dropout=0.5):
        super().__init__()
        self.dropout = dropout
        self.reset_state()
        with self.init_scope():
            self.embed = L.EmbedID(num_words, units, initialW=dbrdist.initializers.Uniform(0.1))
            self.rnn = L.NStepLSTM(layers, units, units, dropout)
            self.out = L.Linear(units, num_words)

    def reset_state(self):
        self.state = None, None

    def forward(self, x, t):
        loss = self.loss(x, t)
        dbrdist.report({"loss": loss}, self)
        return loss

    def loss(self, x, t):
        """x, t (B, T): the loss per word. The state continues from the batch before, and the graph ends there."""
        h = F.dropout(self.embed(x), self.dropout)
        hx, cx, ys = self.rnn(*self.state, list(F.separate(h, axis=0)))
        self.state = hx.array, cx.array
        y = self.out(F.dropout(F.concat(ys, axis=0), self.dropout))
        return F.softmax_cross_entropy(y, t.ravel())


class StreamIterator(dbrdist.dataset.Iterator):
    """The text as parallel streams; an example is the next piece of one of them with the words that follow."""

    def __init__(self, ids, batch, steps):
        self.batch, self.steps, self.length = batch, steps, (len(ids) - 1) // batch
        size = self.length * batch
        self.x, self.t = ids[:size].reshape(batch, -1), ids[1 : size + 1].reshape(batch, -1)
        self.position = self.epoch = 0
        self.is_new_epoch, self.previous_epoch_detail = False, 0.0

    def __next__(self):
        self.previous_epoch_detail = self.epoch_detail
        piece = slice(self.position, self.position + self.steps)
        self.position += self.steps
        self.is_new_epoch = self.position >= self.length
        if self.is_new_epoch:
            self.position, self.epoch = 0, self.epoch + 1
        return list(zip(self.x[:, piece], self.t[:, piece]))

    next = __next__

    @property
    def epoch_detail(self):
        return self.epoch + self.position / self.length

    def serialize(self, serializer):
        self.position = serializer("position", self.position)
        self.epoch = serializer("epoch", self.epoch)


def perplexity(model, ids, device, batch=20, steps=35):
    """exp of the mean of -log p(word) over the text."""
    model, nats, count = model.copy(), 0.0, 0
    model.reset_state()
    streams = StreamIterator(ids, batch, steps)
    with dbrdist.using_config("train", False), dbrdist.no_backprop_mode():
        while streams.epoch == 0:
            x, t = dbrdist.dataset.concat_examples(next(streams), device)
            nats += float(model.loss(x, t).array) * t.size
            count += t.size
    return float(np.exp(nats / count))


def read(path, vocabulary, grow):
    """The words of a file as numbers; a line's end is a word. Without `grow`, unknown words become <unk>."""
    with open(path, encoding="utf-8") as f:
        words = f.read().replace("\n", " <eos> ").split()
    for word in words if grow else ():
        vocabulary.setdefault(word, len(vocabulary))
    return np.array([vocabulary.get(word, vocabulary["<unk>"]) for word in words], np.int32)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", help="text to train on, such as ptb.train.txt of the Penn Treebank by Mikolov")
    parser.add_argument("test", help="text to test on, such as ptb.test.txt")
    parser.add_argument("--units", type=int, default=200)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--batch", type=int, default=20, help="parallel streams")
    parser.add_argument("--steps", type=int, default=35, help="length of backpropagation")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--out", default="result/ptb_lstm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="@numpy")
    args = parser.parse_args(argv)
    for path in (args.train, args.test):
        if not os.path.exists(path):
            parser.error(
                f"{path}: no such file; the Penn Treebank as word models use it has ptb.{{train,valid,test}}.txt"
            )

    dbrdist.random.set_seed(args.seed)
    device = dbrdist.get_device(args.device)
    device.use()
    vocabulary = {"<unk>": 0}
    train, test = read(args.train, vocabulary, grow=True), read(args.test, vocabulary, grow=False)
    model = WordLSTM(len(vocabulary), args.units, dropout=args.dropout)
    optimizer = optimizers.Adam(alpha=2e-3).setup(model)
    optimizer.add_hook(optimizers.GradientClipping(5.0))

    updater = training.StandardUpdater(StreamIterator(train, args.batch, args.steps), optimizer, device=device)
    trainer = training.Trainer(updater, (args.epochs, "epoch"), args.out)

    def with_perplexities(result):
        result["perplexity"] = np.exp(result["main/loss"])
        result["test perplexity"] = perplexity(model, test, device)

    trainer.extend(extensions.LogReport(postprocess=with_perplexities))
    trainer.extend(extensions.PrintReport(["epoch", "perplexity", "test perplexity", "elapsed_time"]))
    trainer.extend(lambda _: model.reset_state(), trigger=(1, "epoch"), name="reset_state")
    trainer.extend(extensions.snapshot(n_retains=1), trigger=(1, "epoch"))
    trainer.run()
    return perplexity(model, test, device)


if __name__ == "__main__":
    main()
