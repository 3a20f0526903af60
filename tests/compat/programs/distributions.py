"""A variational autoencoder written with distributions, on points of a ring."""

import chainer
import chainer.distributions as D
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import reporter, training
from chainer.training import extensions


class Encoder(chainer.Chain):
    def __init__(self, n_latent, n_h):
        super(Encoder, self).__init__()
        with self.init_scope():
            self.linear = L.Linear(2, n_h)
            self.mu = L.Linear(n_h, n_latent)
            self.ln_sigma = L.Linear(n_h, n_latent)

    def forward(self, x):
        h = F.tanh(self.linear(x))
        return D.Independent(D.Normal(loc=self.mu(h), log_scale=self.ln_sigma(h)))


class Decoder(chainer.Chain):
    def __init__(self, n_latent, n_h):
        super(Decoder, self).__init__()
        with self.init_scope():
            self.linear = L.Linear(n_latent, n_h)
            self.output = L.Linear(n_h, 2)

    def forward(self, z):
        h = F.tanh(self.linear(F.reshape(z, (-1, z.shape[-1]))))
        loc = F.reshape(self.output(h), z.shape[:-1] + (2,))
        return D.Independent(D.Normal(loc, scale=np.full(loc.shape, 0.1, np.float32)), reinterpreted_batch_ndims=1)


class Prior(chainer.Link):
    def __init__(self, n_latent):
        super(Prior, self).__init__()
        self.loc = np.zeros(n_latent, np.float32)
        self.scale = np.ones(n_latent, np.float32)
        self.register_persistent("loc")
        self.register_persistent("scale")

    def forward(self, n):
        shape = (n, len(self.loc))
        return D.Independent(D.Normal(np.broadcast_to(self.loc, shape), scale=np.broadcast_to(self.scale, shape)))


class AvgELBOLoss(chainer.Chain):
    def __init__(self, encoder, decoder, prior, k=1):
        super(AvgELBOLoss, self).__init__()
        self.k = k
        with self.init_scope():
            self.encoder, self.decoder, self.prior = encoder, decoder, prior

    def __call__(self, x):
        q_z = self.encoder(x)
        z = q_z.sample(self.k)
        p_x = self.decoder(z)
        reconstruction = F.mean(p_x.log_prob(F.broadcast_to(x[None, :], (self.k,) + x.shape)))
        kl_penalty = F.mean(chainer.kl_divergence(q_z, self.prior(len(x))))
        loss = -(reconstruction - kl_penalty)
        reporter.report({"loss": loss, "reconstruction": reconstruction, "kl_penalty": kl_penalty}, self)
        return loss


def main():
    rng = np.random.RandomState(0)
    angle = rng.uniform(0, 2 * np.pi, 600)
    ring = np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    train, test = chainer.datasets.split_dataset(ring, 500)

    model = AvgELBOLoss(Encoder(2, 32), Decoder(2, 32), Prior(2), k=4)
    optimizer = chainer.optimizers.Adam(0.005)
    optimizer.setup(model)
    train_iter = chainer.iterators.SerialIterator(train, 50)
    test_iter = chainer.iterators.SerialIterator(test, 50, repeat=False, shuffle=False)
    updater = training.updaters.StandardUpdater(train_iter, optimizer, loss_func=model)
    trainer = training.Trainer(updater, (40, "epoch"), out="vae")
    trainer.extend(extensions.Evaluator(test_iter, model))
    trainer.extend(extensions.LogReport(trigger=(10, "epoch")))
    trainer.extend(extensions.PrintReport(["epoch", "main/loss", "validation/main/loss", "main/kl_penalty"]))
    trainer.run()

    with chainer.using_config("train", False), chainer.no_backprop_mode():
        mean = model.decoder(model.encoder(ring).mean[None]).mean.array[0]
        log_prob = D.MultivariateNormal(mean, scale_tril=np.tile(np.eye(2, dtype="f"), (600, 1, 1))).log_prob(ring)
    print(f"distance {float(np.linalg.norm(mean - ring, axis=1).mean()):.2f}")
    assert log_prob.shape == (600,)


if __name__ == "__main__":
    main()
