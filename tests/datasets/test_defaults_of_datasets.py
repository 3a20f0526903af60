"""What datasets, iterators and transforms do where nobody says otherwise: the values that are documented."""

import inspect

import pytest

from dbrdist import dataset, datasets, iterators
from dbrdist.datasets import folder, images, pixels, shards

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
