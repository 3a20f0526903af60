"""Two networks against each other: an updater of one's own with two optimizers, and its evaluation."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import reporter, training
from chainer.training import extension, extensions


class Generator(chainer.Chain):
    def __init__(self, n_hidden):
        super(Generator, self).__init__()
        self.n_hidden = n_hidden
        with self.init_scope():
            w = chainer.initializers.Normal(0.2)
            self.l1 = L.Linear(n_hidden, 16, initialW=w)
            self.l2 = L.Linear(16, 2, initialW=w)

    def make_hidden(self, batchsize):
        return np.random.uniform(-1, 1, (batchsize, self.n_hidden)).astype(np.float32)

    def forward(self, z):
        return self.l2(F.leaky_relu(self.l1(z)))


class Discriminator(chainer.Chain):
    def __init__(self):
        super(Discriminator, self).__init__()
        with self.init_scope():
            self.l1 = L.Linear(2, 16)
            self.l2 = L.Linear(16, 1)

    def forward(self, x):
        return self.l2(F.leaky_relu(self.l1(x)))


class GANUpdater(training.updaters.StandardUpdater):
    def __init__(self, *args, **kwargs):
        self.gen, self.dis = kwargs.pop("models")
        super(GANUpdater, self).__init__(*args, **kwargs)

    def loss_dis(self, dis, y_fake, y_real):
        batchsize = len(y_fake)
        loss = F.sum(F.softplus(-y_real)) / batchsize + F.sum(F.softplus(y_fake)) / batchsize
        chainer.report({"loss": loss}, dis)
        return loss

    def loss_gen(self, gen, y_fake):
        loss = F.sum(F.softplus(-y_fake)) / len(y_fake)
        chainer.report({"loss": loss}, gen)
        return loss

    def update_core(self):
        gen_optimizer = self.get_optimizer("gen")
        dis_optimizer = self.get_optimizer("dis")
        batch = self.get_iterator("main").next()
        x_real = chainer.Variable(self.converter(batch, self.device))
        y_real = self.dis(x_real)
        x_fake = self.gen(chainer.Variable(self.gen.make_hidden(len(batch))))
        y_fake = self.dis(x_fake)
        dis_optimizer.update(self.loss_dis, self.dis, y_fake, y_real)
        gen_optimizer.update(self.loss_gen, self.gen, y_fake)


@extension.make_extension(trigger=(1, "epoch"), priority=extension.PRIORITY_EDITOR)
def mean_of_samples(trainer):
    gen = trainer.updater.gen
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        samples = gen(gen.make_hidden(200)).array
    reporter.report({"samples/mean": samples.mean()})


def main():
    np.random.seed(0)
    chainer.global_config.autotune = True
    data = (np.random.randn(500, 2) * 0.3 + [2, -1]).astype(np.float32)
    gen, dis = Generator(4), Discriminator()

    def make_optimizer(model, alpha=0.005, beta1=0.5):
        optimizer = chainer.optimizers.Adam(alpha=alpha, beta1=beta1)
        optimizer.setup(model)
        optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.0001), "hook_dec")
        return optimizer

    updater = GANUpdater(
        models=(gen, dis),
        iterator=chainer.iterators.SerialIterator(data, 50),
        optimizer={"gen": make_optimizer(gen), "dis": make_optimizer(dis)},
        device=-1,
    )
    trainer = training.Trainer(updater, (20, "epoch"), out="gan")
    trainer.extend(mean_of_samples)
    trainer.extend(extensions.snapshot_object(gen, "gen_iter_{.updater.iteration}.npz"), trigger=(100, "iteration"))
    trainer.extend(extensions.LogReport(trigger=(5, "epoch")))
    trainer.extend(extensions.PrintReport(["epoch", "gen/loss", "dis/loss", "samples/mean"]))
    trainer.run()

    copy = Generator(4)
    chainer.serializers.load_npz("gan/gen_iter_200.npz", copy)
    for (name, p), (_, q) in zip(sorted(gen.namedparams()), sorted(copy.namedparams())):
        np.testing.assert_array_equal(p.array, q.array, err_msg=name)
    print(f"the generator moved to {abs(gen(gen.make_hidden(500)).array[:, 0].mean()):.1f}")


if __name__ == "__main__":
    main()
