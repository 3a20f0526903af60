"""A generative adversarial network of convolutions (DCGAN, Radford et al. 2016), on the digits or on your own images.

python examples/images/dcgan.py
python examples/images/dcgan.py --images cifar10/train/horse --size 32
"""

import argparse
import itertools
import os
import time

import numpy as np

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import datasets, initializers, iterators, optimizers, training
from dbrdist.training import extensions

START = 4  # width of the generator's first layer, before it doubles until the size of the images is reached


class Generator(dbrdist.Chain):
    def __init__(self, size, channels, width, latent):
        super().__init__()
        self.latent = latent
        W = initializers.Normal(0.02)
        widths = [width * 2**i for i in range(int(np.log2(size // START)), -1, -1)]
        self.first = widths[0]
        with self.init_scope():
            self.l0 = L.Linear(latent, widths[0] * START**2, initialW=W)
            self.bn0 = L.BatchNormalization(widths[0])
            pairs = itertools.pairwise(widths)
            self.ups = dbrdist.ChainList(*(L.Deconvolution2D(a, b, 4, 2, 1, initialW=W) for a, b in pairs))
            self.bns = dbrdist.ChainList(*(L.BatchNormalization(b) for b in widths[1:]))
            self.out = L.Convolution2D(widths[-1], channels, 3, pad=1, initialW=W)

    def forward(self, z):
        """Normal numbers (N, latent) -> images (N, C, H, W) from 0 to 1."""
        h = F.relu(self.bn0(F.reshape(self.l0(z), (len(z), self.first, START, START))))
        for up, bn in zip(self.ups, self.bns):
            h = F.relu(bn(up(h)))
        return F.sigmoid(self.out(h))


class Discriminator(dbrdist.Chain):
    def __init__(self, size, channels, width):
        super().__init__()
        W = initializers.Normal(0.02)
        widths = [width * 2**i for i in range(int(np.log2(size // START)) + 1)]
        with self.init_scope():
            self.first = L.Convolution2D(channels, width, 3, pad=1, initialW=W)
            pairs = itertools.pairwise(widths)
            self.downs = dbrdist.ChainList(*(L.Convolution2D(a, b, 4, 2, 1, initialW=W) for a, b in pairs))
            self.bns = dbrdist.ChainList(*(L.BatchNormalization(b) for b in widths[1:]))
            self.out = L.Linear(None, 1, initialW=W)

    def forward(self, x):
        """Images (N, C, H, W) -> scores (N, 1), positive where they look real."""
        h = F.leaky_relu(self.first(x * 2 - 1))
        for down, bn in zip(self.downs, self.bns):
            h = F.leaky_relu(bn(down(h)))
        return self.out(h)


class GANUpdater(training.StandardUpdater):
    """Each step teaches the discriminator on real and drawn images, then the generator to be taken for real."""

    def __init__(self, iterator, generator, discriminator, latents, **kwargs):
        self.generator, self.discriminator, self.latents = generator, discriminator, latents
        super().__init__(iterator, **kwargs)

    def update_core(self):
        x = self.converter(self.get_iterator("main").next(), self.device)
        drawn = self.generator(self.latents(len(x)))
        y_drawn, y_real = self.discriminator(drawn), self.discriminator(x)
        loss_dis = F.mean(F.softplus(-y_real)) + F.mean(F.softplus(y_drawn))
        loss_gen = F.mean(F.softplus(-y_drawn))

        self.generator.cleargrads()
        loss_gen.backward()
        self.get_optimizer("gen").update()
        self.discriminator.cleargrads()
        drawn.unchain_backward()
        loss_dis.backward()
        self.get_optimizer("dis").update()
        dbrdist.report({"loss": loss_gen}, self.generator)
        dbrdist.report({"loss": loss_dis, "real": F.mean(F.sigmoid(y_real))}, self.discriminator)


def save_pictures(path, images, columns=10):
    """Images (N, C, H, W) from 0 to 1 side by side, as a PNG file."""
    from PIL import Image

    images = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    n, c, h, w = images.shape
    grid = images.reshape(n // columns, columns, c, h, w).transpose(0, 3, 1, 4, 2).reshape(-1, columns * w, c)
    grid = (grid * 255).astype(np.uint8).repeat(3, axis=0).repeat(3, axis=1)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    Image.fromarray(grid.squeeze(2) if c == 1 else grid).save(path)


def read_images(folder, size):
    """The images of a folder (N, 3, size, size) from 0 to 1; without one, the digits (N, 1, 8, 8)."""
    if folder is None:
        return datasets.get_digits(withlabel=False, ndim=3)[0]
    names = sorted(name for name in os.listdir(folder) if name.lower().endswith((".jpg", ".jpeg", ".png")))
    from PIL import Image

    images = [Image.open(os.path.join(folder, name)).convert("RGB").resize((size, size)) for name in names]
    return np.stack([np.asarray(image, np.float32).transpose(2, 0, 1) / 255 for image in images])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", help="a folder of JPEG or PNG files; without it, the digits of 8x8 pixels")
    parser.add_argument("--size", type=int, default=8, help="width of the images: 8, 16, 32, 64")
    parser.add_argument("--width", type=int, default=32, help="channels of the layer next to the image")
    parser.add_argument("--latent", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--out", default="result/dcgan")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="@numpy")
    args = parser.parse_args(argv)
    if args.images is not None and not os.path.isdir(args.images):
        parser.error(
            f"{args.images}: no such folder; one with JPEG or PNG files is needed, such as a class of CIFAR-10"
        )

    dbrdist.random.set_seed(args.seed)
    device = dbrdist.get_device(args.device)
    device.use()
    images = read_images(args.images, args.size)
    generator = Generator(args.size, images.shape[1], args.width, args.latent)
    discriminator = Discriminator(args.size, images.shape[1], args.width)
    rng = np.random.default_rng(args.seed)

    def latents(number):
        return device.send(rng.standard_normal((number, args.latent)).astype(np.float32))

    chosen = {
        "gen": optimizers.Adam(alpha=2e-4, beta1=0.5).setup(generator),
        "dis": optimizers.Adam(alpha=2e-4, beta1=0.5).setup(discriminator),
    }
    updater = GANUpdater(
        iterators.SerialIterator(images, args.batch), generator, discriminator, latents, optimizer=chosen, device=device
    )
    trainer = training.Trainer(updater, (args.epochs, "epoch"), args.out)
    fixed = latents(100)

    def draw(trainer):
        with dbrdist.using_config("train", False), dbrdist.no_backprop_mode():
            drawn = dbrdist.backend.to_cpu(generator(fixed).array)
        save_pictures(os.path.join(args.out, "samples.png"), drawn)

    often = (max(args.epochs // 5, 1), "epoch")
    trainer.extend(draw, trigger=often, name="draw")
    trainer.extend(extensions.LogReport(trigger=often))
    trainer.extend(extensions.PrintReport(["epoch", "gen/loss", "dis/loss", "dis/real", "elapsed_time"]))
    start = time.perf_counter()
    trainer.run()
    print(
        f"{updater.iteration} updates in {time.perf_counter() - start:.0f} s; {os.path.join(args.out, 'samples.png')}"
    )
    return generator


if __name__ == "__main__":
    main()
