"""A variational autoencoder (Kingma and Welling 2014) on the digits in the package: its bound, and drawn pictures.

python examples/images/vae.py
"""

import argparse
import os
import time

import numpy as np

import dbrdist
import dbrdist.distributions as D
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import datasets, iterators, optimizers


class Encoder(dbrdist.Chain):
    def __init__(self, units, latent):
        super().__init__()
        with self.init_scope():
            self.hidden, self.mean, self.ln_scale = (
                L.Linear(None, units),
                L.Linear(units, latent),
                L.Linear(units, latent),
            )

    def forward(self, x):
        h = F.relu(self.hidden(x))
        return D.Normal(loc=self.mean(h), log_scale=self.ln_scale(h))


class Decoder(dbrdist.Chain):
    def __init__(self, units, latent, num_pixels):
        super().__init__()
        with self.init_scope():
            self.hidden, self.out = L.Linear(latent, units), L.Linear(units, num_pixels)

    def forward(self, z):
        h = F.relu(self.hidden(F.reshape(z, (-1, z.shape[-1]))))
        return D.Bernoulli(logit=F.reshape(self.out(h), (*z.shape[:-1], -1)))


class VAE(dbrdist.Chain):
    def __init__(self, units, latent, num_pixels):
        super().__init__()
        self.latent = latent
        with self.init_scope():
            self.encoder, self.decoder = Encoder(units, latent), Decoder(units, latent, num_pixels)

    def prior(self):
        zeros = self.xp.zeros(self.latent, np.float32)
        return D.Normal(loc=zeros, scale=zeros + 1)

    def elbo(self, x):
        """The bound on log p(x) of each image (B,): how well a sample explains it, less what the sample says of it."""
        q = self.encoder(x)
        likelihood = F.sum(self.decoder(q.sample()).log_prob(x), axis=1)
        return likelihood - F.sum(dbrdist.kl_divergence(q, self.prior()), axis=1)

    def log_likelihood(self, x, k):
        """A closer bound from k samples of importance (Burda et al. 2016), (B,)."""
        q = self.encoder(x)
        z = q.sample(k)
        weights = self.decoder(z).log_prob(F.broadcast_to(x, (k, *x.shape)))
        of_z = self.prior().log_prob(z) - q.log_prob(z)
        return F.logsumexp(F.sum(weights, axis=2) + F.sum(of_z, axis=2), axis=0) - np.log(k)


def binarized(images, rng, device):
    """Black and white draws of grey images: the grey of a pixel, from 0 to 1, is how likely it is white."""
    return (device.send(rng.random(images.shape)) < images).astype(np.float32)


def save_pictures(path, images, columns):
    """Images (N, H, W) from 0 to 1 side by side, as a PNG file."""
    from PIL import Image

    images, rows = np.pad(images, ((0, 0), (1, 1), (1, 1))), len(images) // columns
    grid = images[: rows * columns].reshape(rows, columns, *images.shape[1:]).transpose(0, 2, 1, 3)
    grid = np.clip(grid.reshape(rows * images.shape[1], -1) * 255, 0, 255).astype(np.uint8)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    Image.fromarray(grid).resize((grid.shape[1] * 4, grid.shape[0] * 4), Image.Resampling.NEAREST).save(path)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=200)
    parser.add_argument("--latent", type=int, default=10)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--out", default="result/vae")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="@numpy")
    args = parser.parse_args(argv)

    dbrdist.random.set_seed(args.seed)
    device = dbrdist.get_device(args.device)
    device.use()
    rng = np.random.default_rng(args.seed)
    train, test = (device.send(images) for images in datasets.get_digits(withlabel=False))
    test = binarized(test, rng, device)  # once for all; the training images again in each epoch
    model = VAE(args.units, args.latent, train.shape[1])
    model.to_device(device)
    optimizer = optimizers.Adam(alpha=1e-3).setup(model)
    start = time.perf_counter()
    print("epoch  bound in nats per image: training  test    seconds")
    for epoch in range(1, args.epochs + 1):
        found = []
        for x in iterators.SerialIterator(binarized(train, rng, device), args.batch, repeat=False, seed=epoch):
            loss = -F.mean(model.elbo(dbrdist.dataset.concat_examples(x)))
            model.cleargrads()
            loss.backward()
            optimizer.update()
            found.append(-float(loss.array))
        with dbrdist.using_config("train", False), dbrdist.no_backprop_mode():
            bound = float(F.mean(model.elbo(test)).array)
        if epoch % max(args.epochs // 5, 1) == 0:
            print(f"{epoch:<5}  {np.mean(found):33.2f}  {bound:.2f}  {time.perf_counter() - start:7.0f}", flush=True)

    with dbrdist.using_config("train", False), dbrdist.no_backprop_mode():
        closer = float(F.mean(model.log_likelihood(test, 100)).array)
        drawn = F.sigmoid(model.decoder(model.prior().sample(100)).logit).array
    print(f"log p(x) of the test images, from 100 samples each: {closer:.2f} nats")
    save_pictures(os.path.join(args.out, "samples.png"), dbrdist.backend.to_cpu(drawn).reshape(-1, 8, 8), 10)
    return bound, closer


if __name__ == "__main__":
    main()
