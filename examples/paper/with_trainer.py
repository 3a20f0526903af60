"""The same training with a trainer and extensions, as in the second program of Chainer's paper (Tokui et al. 2019).

python examples/paper/with_trainer.py
"""

import argparse

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import datasets, iterators, optimizers, training
from dbrdist.training import extensions


class MLP(dbrdist.Chain):
    def __init__(self, units, classes):
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(None, units)
            self.l2 = L.Linear(units, units)
            self.l3 = L.Linear(units, classes)

    def forward(self, x):
        h1 = F.relu(self.l1(x))
        h2 = F.relu(self.l2(h1))
        return self.l3(h2)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", default="result/paper")
    parser.add_argument("--resume", action="store_true", help="continue from the newest snapshot in --out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="@numpy")
    args = parser.parse_args(argv)

    dbrdist.random.set_seed(args.seed)
    device = dbrdist.get_device(args.device)
    device.use()

    # Data, network, optimizer
    train, test = datasets.get_digits()
    model = L.Classifier(MLP(args.units, 10))
    optimizer = optimizers.MomentumSGD(lr=0.05)
    optimizer.setup(model)

    # The loop is the trainer's; what else is to be done are extensions.
    train_iter = iterators.SerialIterator(train, args.batch)
    test_iter = iterators.SerialIterator(test, args.batch, repeat=False, shuffle=False)
    updater = training.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epochs, "epoch"), out=args.out)
    trainer.extend(extensions.Evaluator(test_iter, model, device=device))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(["epoch", "main/loss", "validation/main/loss", "validation/main/accuracy"]))
    trainer.extend(extensions.snapshot(n_retains=1, autoload=args.resume), trigger=(1, "epoch"))
    trainer.run()
    return extensions.Evaluator(test_iter, model, device=device)()["main/accuracy"]


if __name__ == "__main__":
    main()
