"""Tensor parallel: each layer is cut over all ranks, and each rank sees every example (Shoeybi et al. 2019).

The first layer is cut by its outputs and the second by its inputs, so that the two need one sum over ranks.

mpiexec -n 2 python examples/multi_node/tensor_parallel.py
mpiexec -n 3 python examples/multi_node/tensor_parallel.py --compare
"""

import argparse

import numpy as np

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import comm as chainermn
from dbrdist import datasets, iterators, optimizers
from dbrdist.comm.functions import allreduce
from dbrdist.dataset import concat_examples


def whole_layers(units):
    """The layers before they are cut; the same on all ranks, since values follow from the seed."""
    dbrdist.random.set_seed(1)
    return L.Linear(64, units), L.Linear(units, 10)


class ParallelMLP(dbrdist.Chain):
    """64 inputs, hidden units of which each rank has a block, 10 outputs; no parameter lies on two ranks."""

    def __init__(self, comm, units):
        super().__init__()
        self.comm = comm
        first, second = whole_layers(units)
        mine = slice(units * comm.rank // comm.size, units * (comm.rank + 1) // comm.size)
        num_mine = mine.stop - mine.start
        with self.init_scope():
            self.by_outputs = L.Linear(64, num_mine, initialW=first.W.array[mine])
            self.by_inputs = L.Linear(num_mine, 10, nobias=comm.rank > 0, initialW=second.W.array[:, mine])

    def forward(self, x):
        return allreduce(self.comm, self.by_inputs(F.relu(self.by_outputs(x))))


def train(model, num_ranks, batch, epochs):
    """Adam on this rank's parameters. Gradients are those of the sum of all ranks' losses: each takes its part."""
    optimizer = optimizers.Adam().setup(model)
    train_set, test_set = datasets.get_digits()
    for examples in iterators.SerialIterator(train_set, batch):
        x, t = concat_examples(examples)
        loss = F.softmax_cross_entropy(model(x), t) / num_ranks
        model.cleargrads()
        loss.backward()
        optimizer.update()
        if optimizer.t * batch >= epochs * len(train_set):
            break
    x, t = concat_examples(test_set)
    with dbrdist.using_config("train", False), dbrdist.no_backprop_mode():
        y = model(x)
        return float(F.accuracy(y, t).array), y.array


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--units", type=int, default=100, help="hidden units over all ranks")
    parser.add_argument("--compare", action="store_true", help="train the whole model on rank 0 too")
    args = parser.parse_args()

    comm = chainermn.create_communicator()
    model = ParallelMLP(comm, args.units)
    accuracy, y = train(model, comm.size, args.batch, args.epochs)
    num_params = comm.gather_obj(model.count_params())
    if comm.rank == 0:
        print(f"accuracy {accuracy:.4f}; parameters per rank {num_params}")
        if args.compare:
            first, second = whole_layers(args.units)
            _, expected = train(dbrdist.Sequential(first, F.relu, second), 1, args.batch, args.epochs)
            print(
                f"largest difference to one rank {np.abs(y - expected).max():.1e}, outputs up to {np.abs(y).max():.1f}"
            )


if __name__ == "__main__":
    main()
