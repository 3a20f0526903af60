"""The digits that ship with the package are the original ones, split as documented."""

import hashlib

import numpy as np
import pytest

from dbrdist.datasets import get_cifar100, get_digits, get_mnist
from dbrdist.datasets.public import digits
from tests.each import each


def test_the_file_is_the_original():
    with np.load(digits._FILE, allow_pickle=False) as f:
        images, labels = f["images"], f["labels"]
    assert (images.shape, images.dtype, images.max()) == ((1797, 8, 8), np.uint8, 16)
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    checksum = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    assert checksum == "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


def test_the_split_is_fixed_and_stratified():
    train, test = get_digits()
    assert (len(train), len(test)) == (1442, 355)
    of_train, of_test = (np.bincount([y for _, y in part]) for part in (train, test))
    assert np.all(of_test == (of_train + of_test) // 5)
    assert [int(y) for _, y in test[:6]] == [5, 0, 9, 8, 7, 1]


@pytest.mark.parametrize(("ndim", "shape"), [(1, (64,)), (2, (8, 8)), (3, (1, 8, 8))])
def test_shapes(ndim, shape):
    train, _ = get_digits(ndim=ndim)
    image, label = train[0]
    assert (image.shape, image.dtype, label.dtype) == (shape, np.float32, np.int32)


def test_scale_and_type():
    train, _ = get_digits(withlabel=False, scale=255.0, dtype=np.float64)
    assert (train.dtype, train.min(), train.max(), train.shape) == (np.float64, 0.0, 255.0, (1442, 64))
    with pytest.raises(ValueError, match="ndim 1, 2 or 3, got 4"):
        get_digits(ndim=4)


def test_the_licence_and_the_source_are_named():
    text = (digits._FILE.parent / "digits.txt").read_text()
    assert "CC BY 4.0" in text and "Alpaydin" in text and "Kaynak" in text


@each(ndim=[0, 4, -1])
def test_numbers_of_axes_that_there_are_not(ndim):
    for get in (get_mnist, get_digits):
        with pytest.raises(ValueError, match=rf"expected ndim 1, 2 or 3.*, got {ndim}"):
            get(ndim=ndim)
    with pytest.raises(ValueError, match=rf"expected ndim 1 or 3 for CIFAR-100, got {ndim}"):
        get_cifar100(ndim=ndim)
