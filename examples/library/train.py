"""Train on the digits with the library, on any number of ranks.

python examples/library/train.py
mpiexec -n 2 python examples/library/train.py --epochs 20
"""

import argparse

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import datasets, iterators, optimizers, training
from dbrdist.comm import create_communicator, create_multi_node_evaluator, create_multi_node_optimizer
from dbrdist.training import extensions


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64, help="examples per step over all ranks")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", default="result/library")
    args = parser.parse_args()

    comm = create_communicator()  # from here on, a failure on one rank ends the job
    train, test = datasets.get_digits()
    model = L.Classifier(dbrdist.Sequential(L.Linear(None, 100), F.relu, L.Linear(100, 10)))
    optimizer = create_multi_node_optimizer(optimizers.MomentumSGD(lr=0.1), comm).setup(model)

    # All ranks hold all examples; each takes its block of every batch.
    share = {"rank": comm.rank, "size": comm.size, "seed": 0}
    train_iterator = iterators.SerialIterator(train, args.batch, last="short", **share)
    test_iterator = iterators.SerialIterator(test, args.batch, repeat=False, shuffle=False, **share)

    trainer = training.Trainer(training.StandardUpdater(train_iterator, optimizer), (args.epochs, "epoch"), args.out)
    trainer.extend(create_multi_node_evaluator(extensions.Evaluator(test_iterator, model), comm))
    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        columns = ["epoch", "main/loss", "validation/main/loss", "validation/main/accuracy"]
        trainer.extend(extensions.PrintReport(columns))
        trainer.extend(extensions.snapshot(n_retains=1), trigger=(args.epochs, "epoch"))
    trainer.run()


if __name__ == "__main__":
    main()
