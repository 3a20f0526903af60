"""Model parallel: the first and last layers on rank 0, those between on rank 1, which exchange activations.

mpiexec -n 2 python examples/multi_node/model_parallel.py
mpiexec -n 2 python examples/multi_node/model_parallel.py --micro-batches 4
"""

import argparse

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import comm as chainermn
from dbrdist import datasets, iterators, optimizers, training
from dbrdist.training import extensions


class First(dbrdist.Chain):
    def __init__(self, units):
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(64, units)

    def forward(self, x):
        return F.relu(self.l1(x))


class Middle(dbrdist.Chain):
    def __init__(self, units):
        super().__init__()
        with self.init_scope():
            self.l2 = L.Linear(units, units)
            self.l3 = L.Linear(units, 10)

    def forward(self, h):
        return self.l3(F.relu(self.l2(h)))


class Ends(chainermn.MultiNodeChainList):
    """On rank 0: data come in, and the output is back here for the loss."""

    def __init__(self, comm, units):
        super().__init__(comm)
        self.add_link(First(units), rank_in=None, rank_out=1)
        self.add_link(dbrdist.Sequential(F.identity), rank_in=1, rank_out=None)


class Between(chainermn.MultiNodeChainList):
    """On rank 1."""

    def __init__(self, comm, units):
        super().__init__(comm)
        self.add_link(Middle(units), rank_in=0, rank_out=0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--units", type=int, default=100)
    parser.add_argument("--micro-batches", type=int, default=1, help="parts of a batch, to keep both ranks at work")
    parser.add_argument("--out", default="result/model_parallel")
    args = parser.parse_args()

    comm = chainermn.create_communicator()
    if comm.size != 2:
        raise SystemExit(f"this model lies on 2 ranks, got {comm.size}")
    is_first = comm.rank == 0
    parts = (Ends if is_first else Between)(comm, args.units).pipeline(args.micro_batches)
    model = L.Classifier(parts) if is_first else parts
    optimizer = optimizers.Adam().setup(model)  # of this rank's own layers: nothing is averaged

    train, test = datasets.get_digits()
    if not is_first:  # which only counts the steps
        train, test = chainermn.create_empty_dataset(train), chainermn.create_empty_dataset(test)
    train_iterator = iterators.SerialIterator(train, args.batch)
    test_iterator = iterators.SerialIterator(test, args.batch, repeat=False, shuffle=False)

    trainer = training.Trainer(training.StandardUpdater(train_iterator, optimizer), (args.epochs, "epoch"), args.out)
    trainer.extend(extensions.Evaluator(test_iterator, model))
    if is_first:
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.PrintReport(["epoch", "main/loss", "validation/main/accuracy"]))
    trainer.run()
    if is_first:
        print(f"accuracy {trainer.observation['validation/main/accuracy']:.4f}")


if __name__ == "__main__":
    main()
