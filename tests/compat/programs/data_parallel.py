"""ChainerMN's data parallel example in small; started by mpiexec."""

import argparse

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
from chainer import training
from chainer.training import extensions


class MLP(chainer.Chain):
    def __init__(self, n_units, n_out):
        super(MLP, self).__init__(
            l1=L.Linear(2, n_units),
            l2=L.Linear(n_units, n_out),
        )

    def __call__(self, x):
        return self.l2(F.relu(self.l1(x)))


def make_data(n, seed):
    rng = np.random.RandomState(seed)
    x = rng.uniform(-1, 1, (n, 2)).astype(np.float32)
    t = (x[:, 0] * x[:, 1] > 0).astype(np.int32)
    return chainer.datasets.TupleDataset(x, t)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--communicator", default="naive")
    parser.add_argument("--epoch", type=int, default=20)
    parser.add_argument("--out", default="result")
    args = parser.parse_args()

    comm = chainermn.create_communicator(args.communicator)
    device = -1
    if comm.rank == 0:
        print("==========================================")
        print(f"Num process (COMM_WORLD): {comm.size}")
        print(f"Using {args.communicator} communicator")
        print("==========================================")

    model = L.Classifier(MLP(32, 2))
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(alpha=0.01), comm)
    optimizer.setup(model)

    if comm.rank == 0:
        train, test = make_data(601, 0), make_data(101, 1)
    else:
        train, test = None, None
    train = chainermn.scatter_dataset(train, comm, shuffle=True)
    test = chainermn.scatter_dataset(test, comm)

    train_iter = chainer.iterators.SerialIterator(train, 50)
    test_iter = chainer.iterators.SerialIterator(test, 50, repeat=False, shuffle=False)
    updater = training.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    evaluator = extensions.Evaluator(test_iter, model, device=device)
    evaluator = chainermn.create_multi_node_evaluator(evaluator, comm)
    trainer.extend(evaluator)

    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        trainer.extend(
            extensions.PrintReport(["epoch", "main/loss", "validation/main/loss", "validation/main/accuracy"])
        )
    trainer.run()

    weights = comm.gather_obj(model.predictor.l1.W.array.tolist())
    if comm.rank == 0:
        assert all(w == weights[0] for w in weights)
        print("accuracy {:.2f}".format(float(trainer.observation["validation/main/accuracy"])))
    assert comm.allreduce_obj(1) == comm.size


if __name__ == "__main__":
    main()
