#!/usr/bin/env python
"""Regression with plots, an evaluator of one's own, a schedule and early stopping, in the style of Chainer's examples."""
from __future__ import print_function

import argparse
import os

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import reporter
from chainer import training
from chainer.training import extensions
from chainer.training import triggers


class Regressor(chainer.Chain):

    def __init__(self, n_units, n_out):
        super(Regressor, self).__init__()
        with self.init_scope():
            self.l1 = L.Linear(None, n_units)
            self.bn1 = L.BatchNormalization(n_units)
            self.l2 = L.Linear(n_units, n_out)

    def forward(self, x):
        return self.l2(F.tanh(self.bn1(self.l1(x))))


class LossOfRegression(chainer.Chain):

    def __init__(self, predictor):
        super(LossOfRegression, self).__init__()
        with self.init_scope():
            self.predictor = predictor

    def __call__(self, x, t):
        y = self.predictor(x)
        loss = F.mean_squared_error(y, t)
        r2 = F.r2_score(y, t)
        chainer.report({'loss': loss, 'r2': r2}, self)
        return loss


class MaxErrorEvaluator(extensions.Evaluator):
    """Adds the largest error over all examples, which no mean over batches gives."""

    def evaluate(self):
        result = super(MaxErrorEvaluator, self).evaluate()
        iterator = self.get_iterator('main')
        iterator.reset()
        model = self.get_target('main').predictor
        worst = 0.0
        for batch in iterator:
            x, t = self.converter(batch, self.device)
            with chainer.no_backprop_mode(), chainer.using_config('train', False):
                worst = max(worst, float(abs(model(x).array - t).max()))
        observation = {}
        with reporter.report_scope(observation):
            reporter.report({'max_error': worst}, self.get_target('main'))
        result.update(observation)
        return result


def make_data(n, seed):
    rng = np.random.RandomState(seed)
    x = rng.uniform(-1, 1, (n, 3)).astype(np.float32)
    t = (x[:, :1] * x[:, 1:2] + np.sin(3 * x[:, 2:])).astype(np.float32)
    t += rng.randn(n, 1).astype(np.float32) * 0.1
    return chainer.datasets.TupleDataset(x, t)


def main():
    parser = argparse.ArgumentParser(description='Chainer example: regression')
    parser.add_argument('--batchsize', '-b', type=int, default=32)
    parser.add_argument('--epoch', '-e', type=int, default=40)
    parser.add_argument('--patience', type=int, default=3)
    parser.add_argument('--gpu', '-g', type=int, default=-1)
    parser.add_argument('--out', '-o', default='result')
    args = parser.parse_args()
    chainer.print_runtime_info()

    model = LossOfRegression(Regressor(24, 1))
    if args.gpu >= 0:
        chainer.cuda.get_device_from_id(args.gpu).use()
        model.to_gpu()
    optimizer = chainer.optimizers.Adam(alpha=0.02)
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer.WeightDecay(1e-5))
    optimizer.add_hook(chainer.optimizer.GradientClipping(5.0))

    train, valid = chainer.datasets.split_dataset_random(make_data(600, 0), 450, seed=0)
    train_iter = chainer.iterators.SerialIterator(train, args.batchsize)
    valid_iter = chainer.iterators.SerialIterator(valid, args.batchsize, repeat=False, shuffle=False)

    stop = triggers.EarlyStoppingTrigger(
        monitor='validation/main/loss', patience=args.patience, mode='min', max_trigger=(args.epoch, 'epoch'))
    updater = training.updaters.StandardUpdater(train_iter, optimizer, device=args.gpu)
    trainer = training.Trainer(updater, stop, out=args.out)

    trainer.extend(MaxErrorEvaluator(valid_iter, model, device=args.gpu))
    trainer.extend(extensions.ExponentialShift('alpha', 0.5), trigger=(10, 'epoch'))
    best = triggers.MinValueTrigger('validation/main/loss')
    trainer.extend(extensions.snapshot_object(model, 'best.npz'), trigger=best)
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.observe_lr())
    if extensions.PlotReport.available():
        trainer.extend(extensions.PlotReport(
            ['main/loss', 'validation/main/loss'], 'epoch', file_name='loss.png'))
        trainer.extend(extensions.PlotReport(['lr'], 'epoch', file_name='lr.png'))
    trainer.extend(extensions.PrintReport(
        ['epoch', 'main/loss', 'validation/main/loss', 'validation/main/r2', 'validation/main/max_error', 'lr']))

    @training.make_extension(trigger=(10, 'epoch'))
    def say(trainer):
        print('# {0.epoch} epochs, {0.iteration} iterations'.format(trainer.updater))

    trainer.extend(say)
    trainer.run()

    chainer.serializers.load_npz(os.path.join(args.out, 'best.npz'), model)
    result = extensions.Evaluator(valid_iter, model, device=args.gpu)()
    print('stopped after epoch', updater.epoch)
    print('best loss: {:.4f}'.format(float(result['main/loss'])))
    print('plots:', extensions.PlotReport.available())


if __name__ == '__main__':
    main()
