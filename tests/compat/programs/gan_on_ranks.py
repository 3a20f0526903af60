"""Two networks against each other on several ranks: both forward passes first, then one update and the other."""

import argparse
import tempfile

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
from chainer import training
from chainer.training import extensions


class Generator(chainer.Chain):
    def __init__(self, rng):
        super(Generator, self).__init__()
        with self.init_scope():
            self.l1 = L.Linear(3, 8, initialW=rng.randn(8, 3).astype("f"))
            self.l2 = L.Linear(8, 2, initialW=rng.randn(2, 8).astype("f"))

    def __call__(self, z):
        return self.l2(F.tanh(self.l1(z)))


class Discriminator(chainer.Chain):
    def __init__(self, rng):
        super(Discriminator, self).__init__()
        with self.init_scope():
            self.l1 = L.Linear(2, 8, initialW=rng.randn(8, 2).astype("f"))
            self.l2 = L.Linear(8, 1, initialW=rng.randn(1, 8).astype("f"))

    def __call__(self, x):
        return self.l2(F.leaky_relu(self.l1(x)))


class Updater(training.StandardUpdater):
    def __init__(self, *args, **kwargs):
        self.gen, self.dis = kwargs.pop("models")
        super(Updater, self).__init__(*args, **kwargs)

    def update_core(self):
        x, z = self.converter(self.get_iterator("main").next(), self.device)
        y_real = self.dis(x)
        x_fake = self.gen(z)
        y_fake = self.dis(x_fake)
        self.get_optimizer("dis").update(self.loss_dis, y_real, y_fake)
        self.get_optimizer("gen").update(self.loss_gen, y_fake)

    def loss_dis(self, y_real, y_fake):
        loss = F.sum(F.softplus(-y_real)) / len(y_real) + F.sum(F.softplus(y_fake)) / len(y_fake)
        chainer.report({"loss": loss}, self.dis)
        return loss

    def loss_gen(self, y_fake):
        loss = F.sum(F.softplus(-y_fake)) / len(y_fake)
        chainer.report({"loss": loss}, self.gen)
        return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--communicator", default="naive")
    parser.add_argument("--seed-per-rank", action="store_true")
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    comm = chainermn.create_communicator(args.communicator)
    rng = np.random.RandomState(comm.rank if args.seed_per_rank else 0)
    gen, dis = Generator(rng), Discriminator(rng)
    data = np.random.RandomState(7)
    examples = chainer.datasets.TupleDataset(data.randn(48, 2).astype("f") + 1, data.randn(48, 3).astype("f"))
    examples = chainermn.scatter_dataset(examples, comm)

    def make_optimizer(model):
        optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(0.05, beta1=0.5), comm)
        optimizer.setup(model)
        return optimizer

    iterator = chainer.iterators.SerialIterator(examples, len(examples), shuffle=False)
    optimizers = {"gen": make_optimizer(gen), "dis": make_optimizer(dis)}
    trainer = training.Trainer(
        Updater(iterator, optimizers, models=(gen, dis)), (args.steps, "iteration"), out=tempfile.mkdtemp()
    )
    if comm.rank == 0:
        trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    trainer.run()
    sums = [float(abs(p.array).sum()) for model in (gen, dis) for _, p in sorted(model.namedparams())]
    print("rank", comm.rank, "updates", optimizers["gen"].t, optimizers["dis"].t, flush=True)
    print("values", comm.rank, *("%.6f" % s for s in sums), flush=True)


if __name__ == "__main__":
    main()
