"""Tests of dbrdist.datasets.datasets."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

from dbrdist import dataset, datasets, iterators
from dbrdist.datasets.image import folder, images, pixels, shards, transforms
from dbrdist.datasets.loading import serial
from tests.datasets.loader_examples import Fixed
from tests.each import each

IMAGE = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)

REFUSED = {
    "expected at least one thread, got n_threads=0": lambda: iterators.MultithreadIterator([1], 1, n_threads=0),
    "expected at least 1 for n_processes, n_prefetch and maxtasksperchild, got -1, 1 and None": (
        lambda: iterators.MultiprocessIterator([1], 1, n_processes=-1)),
    "expected at least 1 for n_processes, n_prefetch and maxtasksperchild, got 1, 0 and None": (
        lambda: iterators.MultiprocessIterator([1], 1, n_processes=1, n_prefetch=0)),
    "expected at least 1 for n_processes, n_prefetch and maxtasksperchild, got 1, 1 and 0": (
        lambda: iterators.MultiprocessIterator([1], 1, n_processes=1, maxtasksperchild=0)),
    "expected a batch size of at least 1, got 0": lambda: iterators.SerialIterator([1], 0),
    "expected a dataset with examples, got an empty one": lambda: iterators.SerialIterator([], 1),
    "expected a full batch with last='drop', got 1 examples for batches of 2": (
        lambda: iterators.SerialIterator([1], 2, last="drop")),
    "expected at least one example per rank, got 1 examples for 2 ranks": (
        lambda: iterators.SerialIterator([1], 2, rank=0, size=2)),
    "expected a global batch of at least one example per rank, got batch_size=1 for 2 ranks": (
        lambda: iterators.SerialIterator([1, 2], 1, rank=0, size=2)),
    "expected at least as many virtual workers as ranks, got virtual_workers=1 for 2 ranks": (
        lambda: serial.check_workers(1, 2, 4)),
    "expected a global batch of at least one example per virtual worker, got batch_size=1 for virtual_workers=2": (
        lambda: serial.check_workers(2, 2, 1)),
    "get_cross_validation_datasets got unknown arguments ['folds']": (
        lambda: datasets.get_cross_validation_datasets([1, 2], 2, folds=2)),
    "expected the number of folds, n_folds=...": lambda: datasets.get_cross_validation_datasets([1, 2]),
    "RandAugment: num_ops: expected an integer of 0 or more, got -1": lambda: datasets.RandAugment(-1),
    "expected at least one way to mix and one class, got 1 ways and 0 classes": (
        lambda: datasets.MixedDataset([], [datasets.Mixup()], 0)),
    "expected at least one way to mix and one class, got 0 ways and 1 classes": (
        lambda: datasets.MixedDataset([], [], 1)),
    "expected a positive size or a pair (height, width), got (1, 2, 3)": lambda: transforms.CenterCrop((1, 2, 3)),
    "expected a positive size or a pair (height, width), got (0, 2)": lambda: transforms.CenterCrop((0, 2)),
    "expected a positive size or a pair (height, width), got (1.5, 2)": lambda: transforms.CenterCrop((1.5, 2)),
    "expected a positive size or a pair (height, width), got -1": lambda: transforms.CenterCrop(-1),
    "expected 0 < scale <= 1 and 0 < ratio, each (low, high), got (0, 1) and": (
        lambda: transforms.RandomResizedCrop(2, (0, 1))),
    "expected 0 < scale <= 1 and 0 < ratio, each (low, high), got (0.5, 1.1) and": (
        lambda: transforms.RandomResizedCrop(2, (0.5, 1.1))),
    "expected 0 < scale <= 1 and 0 < ratio, each (low, high), got (0.6, 0.5) and": (
        lambda: transforms.RandomResizedCrop(2, (0.6, 0.5))),
    "expected 0 < scale <= 1 and 0 < ratio, each (low, high), got (0.08, 1.0) and (0, 1)": (
        lambda: transforms.RandomResizedCrop(2, ratio=(0, 1))),
    "expected 0 < scale <= 1 and 0 < ratio, each (low, high), got (0.08, 1.0) and (2, 1)": (
        lambda: transforms.RandomResizedCrop(2, ratio=(2, 1))),
    "expected an image of at least 5x2 for CenterCrop, got 4x5": lambda: transforms.CenterCrop((5, 2))(IMAGE),
    "expected an image of at least 4x6 for CenterCrop, got 4x5": lambda: transforms.CenterCrop((4, 6))(IMAGE),
    "expected an image of at least 7x5 with padding 1 for RandomCrop, got 4x5": (
        lambda: transforms.RandomCrop((7, 5), 1).image(IMAGE, Fixed(0, 0))),
    "expected an image of at least 4x8 with padding 1 for RandomCrop, got 4x5": (
        lambda: transforms.RandomCrop((4, 8), 1).image(IMAGE, Fixed(0, 0))),
    "expected an image (H, W, C) of uint8 for RandAugment, got float32": (
        lambda: datasets.RandAugment(1).image(IMAGE.astype("f"), Fixed(0, 0))),
    "expected an image (H, W, C) of uint8 for RandAugment, got uint8 of (4, 5)": (
        lambda: datasets.RandAugment(1).image(IMAGE[..., 0], Fixed(0, 0))),
    "expected the method 'linear', 'area', 'bilinear' or 'bicubic', got 'cubic'": (
        lambda: images.resize(IMAGE, 2, 2, "cubic")),
}  # fmt: skip


@pytest.mark.parametrize("block", range(3))
@each(words=lambda block: list(REFUSED)[block::3])
def test_refused(block, words):
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(words)}"):
        REFUSED[words]()


def test_taken():
    serial.check_workers(2, 2, 2)
    assert next(iterators.SerialIterator([1], 1, last="drop", shuffle=False)) == [1]
    assert next(iterators.SerialIterator([1, 2], 2, rank=1, size=2, shuffle=False)) == [2]
    with iterators.MultithreadIterator([1, 2], 2, shuffle=False, n_threads=1) as iterator:
        assert next(iterator) == [1, 2]
    with iterators.MultiprocessIterator([1], 1, n_processes=1, n_prefetch=1, maxtasksperchild=1) as iterator:
        assert (iterator.n_processes, iterator.n_prefetch, iterator.maxtasksperchild) == (1, 1, 1)
    np.testing.assert_array_equal(datasets.RandAugment(0).image(IMAGE, Fixed()), IMAGE)
    np.testing.assert_array_equal(transforms.CenterCrop((4, 5))(IMAGE), IMAGE)
    np.testing.assert_array_equal(transforms.CenterCrop((3, 4))(IMAGE), IMAGE[:3, :4])
    np.testing.assert_array_equal(transforms.CenterCrop((2, 2))(IMAGE), IMAGE[1:3, 1:3])
    cropped = transforms.RandomCrop((6, 7), 1).image(IMAGE, Fixed(0.999, 0.999))
    np.testing.assert_array_equal(cropped, np.pad(IMAGE, ((1, 1), (1, 1), (0, 0))))
    for draw, top in ((0.0, 0), (0.49, 0), (0.5, 1), (0.999, 1)):
        np.testing.assert_array_equal(transforms.RandomCrop((3, 5)).image(IMAGE, Fixed(draw, 0)), IMAGE[top : top + 3])
    transforms.RandomResizedCrop(2, (1, 1), (1, 1))
    assert images.resize(IMAGE, 4, 5) is IMAGE


IMAGES = {"withlabel": True, "ndim": 3, "scale": 1.0}
VECTORS = {"withlabel": True, "ndim": 1, "scale": 1.0}
DEFAULTS = {
    datasets.CenterResizedCrop: {"ratio": 224 / 256, "method": "linear"},
    datasets.ColorJitter: {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.0},
    datasets.CutMix: {"alpha": 1.0, "p": 1.0},
    datasets.Mixup: {"alpha": 0.2, "p": 1.0},
    datasets.Normalize: {"scale": 255.0},
    datasets.PCALighting: {"std": 0.1},
    datasets.PickleDataset: {"trusted": False},
    datasets.PickleDatasetWriter: {"protocol": 5},
    datasets.RandAugment: {"num_ops": 2, "magnitude": 9, "fill": 0},
    datasets.RandomCrop: {"padding": 0},
    datasets.RandomErasing: {"p": 0.5, "area": (0.02, 1 / 3), "ratio": (0.3, 1 / 0.3), "value": 0},
    datasets.RandomHorizontalFlip: {"p": 0.5},
    datasets.RandomResizedCrop: {"scale": (0.08, 1.0), "ratio": (3 / 4, 4 / 3), "method": "linear"},
    datasets.ImageFolder: {"cache": False},
    datasets.ImageIndex: {"check": False},
    datasets.get_cifar10: IMAGES,
    datasets.get_cifar100: IMAGES,
    datasets.get_cifar10_folders: {"augment": True},
    datasets.get_digits: VECTORS,
    datasets.get_fashion_mnist: {**VECTORS, "rgb_format": False},
    datasets.get_kuzushiji_mnist: {**VECTORS, "rgb_format": False},
    datasets.get_mnist: {**VECTORS, "rgb_format": False},
    datasets.get_svhn: {"withlabel": True, "scale": 1.0, "add_extra": False},
    datasets.open_pickle_dataset: {"trusted": False},
    datasets.open_pickle_dataset_writer: {"protocol": 5},
    iterators.MultiprocessIterator: {"repeat": True, "n_prefetch": 1, "dataset_timeout": 30.0, "last": "wrap"},
    iterators.MultithreadIterator: {"repeat": True, "n_threads": 1, "last": "wrap"},
    iterators.SerialIterator: {"repeat": True, "last": "wrap"},
    iterators.DaliIterator: {"repeat": True},
    dataset.get_dataset_directory: {"create_directory": True},
    folder.read_image: {"keep_channels": False},
    images.Encoded: {"fast": False},
    images.decode: {"keep_channels": False, "fast": False},
    pixels.affine: {"fill": 0},
    shards.check_images: {"num_threads": 1},
    shards.prepare_shards: {"size": 256, "quality": 90, "shard_bytes": 1 << 28, "num_threads": 1},
}


@pytest.mark.parametrize("thing", DEFAULTS, ids=lambda thing: thing.__name__)
def test_documented_defaults(thing):
    parameters = inspect.signature(thing).parameters
    assert {name: parameters[name].default for name in DEFAULTS[thing]} == DEFAULTS[thing]
