"""ChainerMN's model parallel example in small, in its own style; started by mpiexec with two processes."""

import argparse

import chainer
import chainer.cuda
import chainer.functions as F
import chainer.links as L
import chainermn
import chainermn.datasets
import chainermn.functions
import numpy as np
from chainer import training
from chainer.training import extensions


class MLP0SubA(chainer.Chain):
    def __init__(self, comm, n_out):
        super(MLP0SubA, self).__init__(l1=L.Linear(2, n_out))

    def __call__(self, x):
        return F.relu(self.l1(x))


class MLP0SubB(chainer.Chain):
    def __init__(self, comm):
        super(MLP0SubB, self).__init__()

    def __call__(self, y):
        return y


class MLP0(chainermn.MultiNodeChainList):
    # Model on worker 0.
    def __init__(self, comm, n_out):
        super(MLP0, self).__init__(comm=comm)
        self.add_link(MLP0SubA(comm, n_out), rank_in=None, rank_out=1)
        self.add_link(MLP0SubB(comm), rank_in=1, rank_out=None)


class MLP1Sub(chainer.Chain):
    def __init__(self, n_units, n_out):
        super(MLP1Sub, self).__init__(l2=L.Linear(None, n_units), l3=L.Linear(None, n_out))

    def __call__(self, h0):
        h1 = F.relu(self.l2(h0))
        return self.l3(h1)


class MLP1(chainermn.MultiNodeChainList):
    # Model on worker 1.
    def __init__(self, comm, n_units, n_out):
        super(MLP1, self).__init__(comm=comm)
        self.add_link(MLP1Sub(n_units, n_out), rank_in=0, rank_out=0)


def make_data(n, seed):
    rng = np.random.RandomState(seed)
    x = rng.uniform(-1, 1, (n, 2)).astype(np.float32)
    t = (x[:, 0] * x[:, 1] > 0).astype(np.int32)
    return chainer.datasets.TupleDataset(x, t)


def check_functions(comm):
    # The other communication functions, as a program may call them by their full names.
    x = chainer.Variable(np.full((2,), comm.rank + 1, np.float32))
    ys = chainermn.functions.allgather(comm, x)
    loss = sum(F.sum(y * y) for y in ys)
    phi = chainermn.functions.gather(comm, x, root=1)
    if comm.rank == 1:
        loss = loss + F.sum(phi[0])
    else:
        loss = chainermn.functions.pseudo_connect(phi, loss)
    loss.backward()
    expected = 2 * comm.size * (comm.rank + 1) + (comm.rank == 0)
    assert x.grad.tolist() == [expected, expected], x.grad
    a, b = chainermn.functions.alltoall(comm, (x, x * 2))
    z = chainermn.functions.scatter(comm, (a, b) if comm.rank == 0 else None, root=0)
    z = chainermn.functions.bcast(comm, z if comm.rank == 1 else chainer.Variable(np.zeros(1, "f")), root=1)
    assert z.data.tolist() == [2.0, 2.0], z


def main():
    parser = argparse.ArgumentParser(description="ChainerMN example: model parallel")
    parser.add_argument("--batchsize", "-b", type=int, default=50)
    parser.add_argument("--epoch", "-e", type=int, default=15)
    parser.add_argument("--gpu", "-g", action="store_true")
    parser.add_argument("--out", "-o", default="result")
    parser.add_argument("--unit", "-u", type=int, default=32)
    args = parser.parse_args()

    if args.gpu:
        comm = chainermn.create_communicator("hierarchical")
        device = comm.intra_rank
        chainer.cuda.get_device(device).use()
    else:
        comm = chainermn.create_communicator("naive")
        device = -1
    if comm.size != 2:
        raise ValueError("This example can only be executed on exactly 2 processes.")
    check_functions(comm)

    if comm.rank == 0:
        model = L.Classifier(MLP0(comm, args.unit))
    elif comm.rank == 1:
        model = MLP1(comm, args.unit, 2)
    if device >= 0:
        model.to_gpu()
    optimizer = chainer.optimizers.Adam(alpha=0.01)
    optimizer.setup(model)

    # Iterate dataset only on worker 0.
    train, test = make_data(600, 0), make_data(100, 1)
    if comm.rank == 1:
        train = chainermn.datasets.create_empty_dataset(train)
        test = chainermn.datasets.create_empty_dataset(test)

    train_iter = chainer.iterators.SerialIterator(train, args.batchsize, shuffle=False)
    test_iter = chainer.iterators.SerialIterator(test, args.batchsize, repeat=False, shuffle=False)
    updater = training.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    trainer.extend(extensions.Evaluator(test_iter, model, device=device))

    # Some display and output extentions are necessary only for worker 0.
    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.PrintReport(["epoch", "main/loss", "validation/main/accuracy"]))
    trainer.run()
    if comm.rank == 0:
        print("accuracy {:.2f}".format(float(trainer.observation["validation/main/accuracy"])))


if __name__ == "__main__":
    main()
