"""A training loop written by hand, as in the first program of Chainer's paper (Tokui et al. 2019), on the digits.

python examples/paper/by_hand.py
"""

import argparse

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import datasets, iterators, optimizers
from dbrdist.dataset import concat_examples


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


def evaluate(model, dataset, device):
    """The part of the examples that the network classes right."""
    x, t = concat_examples(dataset[:], device)
    with dbrdist.using_config("train", False), dbrdist.no_backprop_mode():
        return float(F.accuracy(model(x), t).array)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="@numpy")
    args = parser.parse_args(argv)

    dbrdist.random.set_seed(args.seed)
    device = dbrdist.get_device(args.device)
    device.use()

    # Data, network, optimizer
    train, test = datasets.get_digits()
    model = MLP(args.units, 10)
    model.to_device(device)
    optimizer = optimizers.MomentumSGD(lr=0.05)
    optimizer.setup(model)

    # The loop
    iterator = iterators.SerialIterator(train, args.batch)
    while iterator.epoch < args.epochs:
        x, t = concat_examples(iterator.next(), device)
        loss = F.softmax_cross_entropy(model(x), t)
        model.cleargrads()
        loss.backward()
        optimizer.update()
        if iterator.is_new_epoch:
            accuracy = evaluate(model, test, device)
            print(f"epoch {iterator.epoch}: loss {float(loss.array):.4f}, test accuracy {100 * accuracy:.2f} %")
    return evaluate(model, test, device)


if __name__ == "__main__":
    main()
