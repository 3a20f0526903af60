"""Dual parallel: the model is cut over pairs of ranks, and the data are divided over the pairs.

Ranks 0 and 1 hold one model, ranks 2 and 3 another; gradients are averaged over ranks 0, 2, ... and over 1, 3, ...

mpiexec -n 4 python examples/multi_node/dual_parallel.py
"""

import argparse

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import comm as chainermn
from dbrdist import datasets, iterators, optimizers, training
from dbrdist.training import extensions


class Front(chainermn.MultiNodeChainList):
    """On the first rank of a pair: the first layer, and the output back for the loss."""

    def __init__(self, comm):
        super().__init__(comm)
        self.add_link(dbrdist.Sequential(L.Linear(64, 100), F.relu), rank_in=None, rank_out=1)
        self.add_link(dbrdist.Sequential(F.identity), rank_in=1, rank_out=None)


class Back(chainermn.MultiNodeChainList):
    """On the second."""

    def __init__(self, comm):
        super().__init__(comm)
        self.add_link(dbrdist.Sequential(L.Linear(100, 100), F.relu, L.Linear(100, 10)), rank_in=0, rank_out=0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64, help="examples per step for each pair of ranks")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", default="result/dual_parallel")
    args = parser.parse_args()

    comm = chainermn.create_communicator()
    if comm.size % 2:
        raise SystemExit(f"ranks work in pairs, got {comm.size}")
    model_comm = comm.split(comm.rank // 2, comm.rank)  # this pair
    data_comm = comm.split(comm.rank % 2, comm.rank)  # all with the same layers
    is_front = model_comm.rank == 0
    model = L.Classifier(Front(model_comm)) if is_front else Back(model_comm)
    optimizer = chainermn.create_multi_node_optimizer(optimizers.Adam(), data_comm).setup(model)

    train, test = datasets.get_digits()
    train = chainermn.scatter_dataset(train, data_comm, shuffle=True)  # the same order on both ranks of a pair
    test = chainermn.scatter_dataset(test, data_comm)
    if not is_front:
        train, test = chainermn.create_empty_dataset(train), chainermn.create_empty_dataset(test)
    train_iterator = iterators.SerialIterator(train, args.batch)
    test_iterator = iterators.SerialIterator(test, args.batch, repeat=False, shuffle=False)

    trainer = training.Trainer(training.StandardUpdater(train_iterator, optimizer), (args.epochs, "epoch"), args.out)
    evaluator = extensions.Evaluator(test_iterator, model)
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, data_comm) if is_front else evaluator)
    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.PrintReport(["epoch", "main/loss", "validation/main/accuracy"]))
    trainer.run()
    if comm.rank == 0:
        print(f"accuracy {trainer.observation['validation/main/accuracy']:.4f}")


if __name__ == "__main__":
    main()
