#!/usr/bin/env python
"""Sentences of different lengths, classed by an n-step LSTM, with a converter of its own, as Chainer's example has it."""
import argparse
import json
import os

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
from chainer import training
from chainer.training import extensions

embed_init = chainer.initializers.Uniform(.25)


def sequence_embed(embed, xs, dropout=0.):
    """One call of the embedding for sequences of all lengths."""
    x_len = [len(x) for x in xs]
    x_section = numpy.cumsum(x_len[:-1])
    ex = embed(F.concat(xs, axis=0))
    ex = F.dropout(ex, ratio=dropout)
    exs = F.split_axis(ex, x_section, 0)
    return exs


class TextClassifier(chainer.Chain):

    def __init__(self, encoder, n_class, dropout=0.1):
        super(TextClassifier, self).__init__()
        with self.init_scope():
            self.encoder = encoder
            self.output = L.Linear(encoder.out_units, n_class)
        self.dropout = dropout

    def forward(self, xs, ys):
        concat_outputs = self.predict(xs)
        concat_truths = F.concat(ys, axis=0)
        loss = F.softmax_cross_entropy(concat_outputs, concat_truths)
        accuracy = F.accuracy(concat_outputs, concat_truths)
        chainer.reporter.report({'loss': loss.array}, self)
        chainer.reporter.report({'accuracy': accuracy.array}, self)
        return loss

    def predict(self, xs, softmax=False, argmax=False):
        concat_encodings = F.dropout(self.encoder(xs), ratio=self.dropout)
        concat_outputs = self.output(concat_encodings)
        if softmax:
            return F.softmax(concat_outputs).array
        elif argmax:
            return self.xp.argmax(concat_outputs.array, axis=1)
        else:
            return concat_outputs


class RNNEncoder(chainer.Chain):

    def __init__(self, n_layers, n_vocab, n_units, dropout=0.1):
        super(RNNEncoder, self).__init__(
            embed=L.EmbedID(n_vocab, n_units, initialW=embed_init),
            encoder=L.NStepLSTM(n_layers, n_units, n_units, dropout),
        )
        self.n_layers = n_layers
        self.out_units = n_units
        self.dropout = dropout

    def forward(self, xs):
        exs = sequence_embed(self.embed, xs, self.dropout)
        last_h, last_c, ys = self.encoder(None, None, exs)
        assert last_h.shape == (self.n_layers, len(xs), self.out_units)
        return last_h[-1]


@chainer.dataset.converter()
def convert_seq(batch, device=None, with_label=True):
    def to_device_batch(batch):
        if device is None:
            return batch
        return [device.send(x) for x in batch]

    if with_label:
        return {'xs': to_device_batch([x for x, _ in batch]), 'ys': to_device_batch([y for _, y in batch])}
    return to_device_batch([x for x in batch])


def make_sentences(n, rng):
    """Whether the last of the words 0 and 1 in a sentence of 2 to 12 words is a 1."""
    pairs = []
    for _ in range(n):
        words = rng.randint(0, 8, rng.randint(2, 13)).astype(numpy.int32)
        words[rng.randint(len(words))] = rng.randint(2)
        label = [w for w in words if w < 2][-1]
        pairs.append((words, numpy.array([label], numpy.int32)))
    return pairs


def main():
    parser = argparse.ArgumentParser(description='Chainer example: Text Classification')
    parser.add_argument('--batchsize', '-b', type=int, default=32)
    parser.add_argument('--epoch', '-e', type=int, default=6)
    parser.add_argument('--device', '-d', type=str, default='-1')
    parser.add_argument('--out', '-o', default='result')
    parser.add_argument('--unit', '-u', type=int, default=24)
    parser.add_argument('--layer', '-l', type=int, default=1)
    parser.add_argument('--dropout', type=float, default=0.1)
    parser.add_argument('--resume', '-r', type=str)
    args = parser.parse_args()
    print(json.dumps(args.__dict__, indent=2, sort_keys=True))

    device = chainer.get_device(args.device)
    device.use()
    rng = numpy.random.RandomState(0)
    train, test = make_sentences(800, rng), make_sentences(200, rng)
    train_iter = chainer.iterators.SerialIterator(train, args.batchsize)
    test_iter = chainer.iterators.SerialIterator(test, args.batchsize, repeat=False, shuffle=False)

    encoder = RNNEncoder(n_layers=args.layer, n_vocab=8, n_units=args.unit, dropout=args.dropout)
    model = TextClassifier(encoder, n_class=2)
    model.to_device(device)
    optimizer = chainer.optimizers.Adam(alpha=0.01)
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer.WeightDecay(1e-4))

    updater = training.updaters.StandardUpdater(train_iter, optimizer, converter=convert_seq, device=device)
    trainer = training.Trainer(updater, (args.epoch, 'epoch'), out=args.out)
    trainer.extend(extensions.Evaluator(test_iter, model, converter=convert_seq, device=device))
    record_trigger = training.triggers.MaxValueTrigger('validation/main/accuracy', (1, 'epoch'))
    trainer.extend(extensions.snapshot_object(model, 'best_model.npz'), trigger=record_trigger)
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(
        ['epoch', 'main/loss', 'validation/main/loss', 'main/accuracy', 'validation/main/accuracy', 'elapsed_time']))
    trainer.extend(extensions.snapshot(filename='snapshot'), trigger=(1, 'epoch'))
    if args.resume is not None:
        chainer.serializers.load_npz(args.resume, trainer)
    trainer.run()

    chainer.serializers.load_npz(os.path.join(args.out, 'best_model.npz'), model)
    xs = convert_seq([x for x, _ in test], device, with_label=False)
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        found = model.predict(xs, argmax=True)
        likely = model.predict(xs, softmax=True)
    assert (likely.argmax(axis=1) == found).all()
    print('accuracy of the best: {:.3f}'.format(numpy.mean([f == y[0] for f, (_, y) in zip(found, test)])))


if __name__ == '__main__':
    main()
