#!/usr/bin/env python
"""A classifier with trainer, evaluator, snapshot and resume, as Chainer's first example has them."""

import argparse
import os

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training
from chainer.datasets import tuple_dataset
from chainer.training import extensions


class MLP(chainer.Chain):
    def __init__(self, n_units, n_out):
        super(MLP, self).__init__()
        with self.init_scope():
            self.l1 = L.Linear(None, n_units)
            self.l2 = L.Linear(None, n_units)
            self.l3 = L.Linear(None, n_out)

    def forward(self, x):
        h1 = F.relu(self.l1(x))
        h2 = F.relu(self.l2(h1))
        return self.l3(h2)


def make_data(n, seed):
    rng = np.random.RandomState(seed)
    labels = rng.randint(0, 4, n).astype(np.int32)
    centers = np.array([[2, 2], [-2, 2], [-2, -2], [2, -2]], dtype=np.float32)
    points = centers[labels] + rng.randn(n, 2).astype(np.float32) * 0.5
    return tuple_dataset.TupleDataset(points, labels)


def main():
    parser = argparse.ArgumentParser(description="Chainer example: four clusters")
    parser.add_argument("--batchsize", "-b", type=int, default=20)
    parser.add_argument("--epoch", "-e", type=int, default=3)
    parser.add_argument("--device", "-d", type=str, default="-1")
    parser.add_argument("--out", "-o", default="result")
    parser.add_argument("--resume", "-r", type=str)
    parser.add_argument("--unit", "-u", type=int, default=16)
    args = parser.parse_args()

    device = chainer.get_device(args.device)
    print(f"Device: {device}")

    model = L.Classifier(MLP(args.unit, 4))
    model.to_device(device)
    device.use()

    optimizer = chainer.optimizers.Adam()
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer.WeightDecay(1e-4))

    train, test = make_data(400, 0), make_data(100, 1)
    train_iter = chainer.iterators.SerialIterator(train, args.batchsize)
    test_iter = chainer.iterators.SerialIterator(test, args.batchsize, repeat=False, shuffle=False)

    updater = training.updaters.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    trainer.extend(extensions.Evaluator(test_iter, model, device=device))
    trainer.extend(extensions.snapshot(), trigger=(1, "epoch"))
    trainer.extend(extensions.LogReport())
    trainer.extend(
        extensions.PrintReport(
            ["epoch", "main/loss", "validation/main/loss", "main/accuracy", "validation/main/accuracy", "elapsed_time"]
        )
    )

    if args.resume is not None:
        chainer.serializers.load_npz(args.resume, trainer)
        print(f"resumed at iteration {updater.iteration}")

    trainer.run()
    accuracy = trainer.observation["validation/main/accuracy"]
    print(f"accuracy {float(accuracy):.2f}")
    print(sorted(os.listdir(args.out)))


if __name__ == "__main__":
    main()
