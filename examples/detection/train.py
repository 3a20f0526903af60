"""Train a detector of drawn objects, and measure it on pictures that it has not seen.

python examples/detection/train.py
mpiexec -n 2 python examples/detection/train.py
"""

import argparse
import time

import numpy as np
from boxes import eval_detection_voc, flip, flip_bbox
from ssd import SSD, multibox_loss

import dbrdist
from dbrdist import comm as multi_node
from dbrdist import iterators, optimizers, training
from dbrdist.training import extensions

NAMES = ("rectangle", "ellipse", "triangle")


class DrawnObjects(dbrdist.dataset.DatasetMixin):
    """Pictures (3, 64, 64) of one to three objects on a noisy ground, each drawn from its index and ``seed``.

    An example is (picture, boxes, labels).
    """

    def __init__(self, number, seed, size=64):
        self.number, self.seed, self.size = number, seed, size

    def __len__(self):
        return self.number

    def get_example(self, i):
        rng, size = np.random.default_rng((self.seed, i)), self.size
        img = rng.uniform(0, 1, (3, 1, 1)) + rng.normal(0, 0.1, (3, size, size))
        ground = img.mean(axis=(1, 2))
        bbox, labels = [], []
        taken = np.zeros((size, size), bool)
        for _ in range(rng.integers(1, 4)):
            h, w = rng.integers(12, 41, 2)
            y, x = rng.integers(0, size - h + 1), rng.integers(0, size - w + 1)
            if taken[y : y + h, x : x + w].any():  # objects do not overlap
                continue
            taken[y : y + h, x : x + w] = True
            label = rng.integers(len(NAMES))
            color = ground + rng.choice([-1, 1], 3) * rng.uniform(0.35, 0.7, 3)
            mask = _drawn(NAMES[label], h, w)
            part = img[:, y : y + h, x : x + w]
            part[:, mask] = color[:, None] + rng.normal(0, 0.05, (3, mask.sum()))
            bbox.append((y, x, y + h, x + w))
            labels.append(label)
        return img.astype(np.float32), np.array(bbox, np.float32), np.array(labels, np.int32)


def _drawn(name, h, w):
    """Which pixels of a box belong to the object."""
    y, x = (np.mgrid[:h, :w] + 0.5) / np.array([h, w])[:, None, None]
    if name == "ellipse":
        return (2 * y - 1) ** 2 + (2 * x - 1) ** 2 <= 1
    return abs(2 * x - 1) <= y if name == "triangle" else np.ones((h, w), bool)


class Encoded(dbrdist.dataset.DatasetMixin):
    """Training examples (picture, offsets, labels of the default boxes); in each epoch half of them are mirrored."""

    def __init__(self, drawn, coder, seed):
        self.drawn, self.coder, self.rng = drawn, coder, np.random.default_rng(seed)

    def __len__(self):
        return len(self.drawn)

    def get_example(self, i):
        img, bbox, label = self.drawn[i]
        if self.rng.random() < 0.5:
            img, bbox = flip(img, x_flip=True), flip_bbox(bbox, img.shape[1:], x_flip=True)
        return (np.ascontiguousarray(img), *self.coder.encode(bbox, label))


class TrainChain(dbrdist.Chain):
    """The loss of a batch."""

    def __init__(self, model):
        super().__init__()
        with self.init_scope():
            self.model = model

    def forward(self, imgs, offsets, labels):
        place, label = multibox_loss(*self.model(imgs), offsets, labels)
        dbrdist.report({"loss": place + label, "loss/place": place, "loss/label": label}, self)
        return place + label


def evaluate(model, drawn, batch=50):
    """Mean average precision, and that of each label."""
    examples = [drawn[i] for i in range(len(drawn))]
    found = [model.predict([img for img, _, _ in examples[i : i + batch]], 0.05) for i in range(0, len(drawn), batch)]
    bboxes, labels, scores = ([x for part in parts for x in part] for parts in zip(*found))
    _, true_bboxes, true_labels = zip(*examples)
    return eval_detection_voc(bboxes, labels, scores, true_bboxes, true_labels)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--pictures", type=int, default=2000, help="for training")
    parser.add_argument("--test-pictures", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32, help="over all ranks")
    parser.add_argument("--alpha", type=float, default=2e-3, help="learning rate; it falls to 0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="result/detection")
    args = parser.parse_args(argv)

    comm = multi_node.create_communicator()
    dbrdist.random.set_seed(args.seed)
    begun = time.perf_counter()
    model = SSD(len(NAMES))
    data = Encoded(DrawnObjects(args.pictures, 1 + args.seed), model.coder, args.seed + comm.rank)
    test = DrawnObjects(args.test_pictures, 10_000 + args.seed)
    optimizer = multi_node.create_multi_node_optimizer(optimizers.Adam(alpha=args.alpha), comm)
    optimizer.setup(TrainChain(model))
    iterator = iterators.SerialIterator(data, args.batch, rank=comm.rank, size=comm.size)
    trainer = training.Trainer(training.StandardUpdater(iterator, optimizer), (args.epochs, "epoch"), args.out)
    schedule = dbrdist.optimizers.schedules.cosine(args.alpha, args.epochs)
    trainer.extend(extensions.FollowSchedule(schedule, "alpha"))
    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        trainer.extend(
            extensions.PrintReport(["epoch", "main/loss", "main/loss/place", "main/loss/label", "elapsed_time"])
        )
    trainer.run()
    result = evaluate(model, test)
    if comm.rank == 0:
        for name, ap in zip(NAMES, result["ap"]):
            print(f"average precision of {name}: {ap:.3f}")
        print(f"mean average precision on {len(test)} unseen pictures: {result['map']:.3f}")
        print(f"{time.perf_counter() - begun:.0f} s")
    return result["map"]


if __name__ == "__main__":
    main()
