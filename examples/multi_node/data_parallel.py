"""Data parallel: every rank has the whole model and its share of the digits; gradients are averaged.

mpiexec -n 2 python examples/multi_node/data_parallel.py
mpiexec -n 4 python examples/multi_node/data_parallel.py --batch-normalization
"""

import argparse

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import comm as chainermn
from dbrdist import datasets, iterators, optimizers, training
from dbrdist.comm.links import create_mnbn_model
from dbrdist.training import extensions


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64, help="examples per step on each rank")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-normalization", action="store_true", help="with the statistics of all ranks' batches")
    parser.add_argument("--out", default="result/data_parallel")
    args = parser.parse_args()

    comm = chainermn.create_communicator()
    layers = [L.Linear(64, 100), F.relu, L.Linear(100, 10)]
    if args.batch_normalization:
        layers.insert(1, L.BatchNormalization(100))
    model = create_mnbn_model(L.Classifier(dbrdist.Sequential(*layers)), comm)
    optimizer = chainermn.create_multi_node_optimizer(optimizers.Adam(), comm).setup(model)

    train, test = datasets.get_digits() if comm.rank == 0 else (None, None)
    train = chainermn.scatter_dataset(train, comm, shuffle=True)
    test = chainermn.scatter_dataset(test, comm)
    train_iterator = iterators.SerialIterator(train, args.batch)
    test_iterator = iterators.SerialIterator(test, args.batch, repeat=False, shuffle=False)

    trainer = training.Trainer(training.StandardUpdater(train_iterator, optimizer), (args.epochs, "epoch"), args.out)
    trainer.extend(chainermn.create_multi_node_evaluator(extensions.Evaluator(test_iterator, model), comm))
    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.PrintReport(["epoch", "main/loss", "validation/main/accuracy"]))
    trainer.run()
    if comm.rank == 0:
        print(f"accuracy {trainer.observation['validation/main/accuracy']:.4f}")


if __name__ == "__main__":
    main()
