"""Public datasets from files in their true formats, and downloads from a server that is a function. No network."""

import gzip
import hashlib
import io
import os
import pickle
import subprocess
import sys
from email.message import Message
from pathlib import Path
from urllib import request

import numpy as np
import pytest
from public_files import cifar10, cifar100, idx, mnist, python2_pickle, tar_gz

import dbrdist
from dbrdist.core import dataset_root
from dbrdist.dataset import (
    cache_or_load_file,
    cached_download,
    download,
    get_dataset_directory,
    get_dataset_root,
    set_dataset_root,
)
from dbrdist.datasets import (
    TupleDataset,
    get_cifar10,
    get_cifar100,
    get_fashion_mnist,
    get_fashion_mnist_labels,
    get_kuzushiji_mnist,
    get_kuzushiji_mnist_labels,
    get_mnist,
    get_ptb_words,
    get_ptb_words_vocabulary,
    get_svhn,
)
from tests.each import each

ROOT = Path(__file__).parents[2]
FAMILY = {"mnist": get_mnist, "fashion-mnist": get_fashion_mnist, "kuzushiji_mnist": get_kuzushiji_mnist}


class Server:
    """What answers instead of the network: files by address, and the addresses that were asked for."""

    def __init__(self):
        self.files = {}
        self.asked = []
        self.length = None

    def __call__(self, url, timeout):
        assert timeout > 0
        self.asked.append(url)
        if url not in self.files:
            raise request.URLError("no network in a test")
        answer = io.BytesIO(self.files[url])
        answer.headers = Message()
        answer.headers["Content-Length"] = self.length or str(len(self.files[url]))
        return answer


@pytest.fixture(autouse=True)
def server(monkeypatch, tmp_path):
    server = Server()
    monkeypatch.setattr(request, "urlopen", server)
    monkeypatch.setattr(dataset_root, "_root", str(tmp_path / "root"))
    return server


def folder_of(name):
    return Path(get_dataset_directory(f"pfnet/chainer/{name}"))


# ---- where they lie -------------------------------------------------------------------------------------------------


def test_the_root(monkeypatch, tmp_path):
    set_dataset_root(tmp_path / "a")
    assert get_dataset_root() == str(tmp_path / "a")
    assert get_dataset_directory("x/y", create_directory=False) == str(tmp_path / "a/x/y")
    assert not os.path.exists(tmp_path / "a")
    assert os.path.isdir(get_dataset_directory("x/y")) and os.path.isdir(get_dataset_directory("x/y"))
    monkeypatch.setattr(dataset_root, "_root", None)
    monkeypatch.setenv("CHAINER_DATASET_ROOT", str(tmp_path / "b"))
    assert get_dataset_root() == str(tmp_path / "b")
    monkeypatch.delenv("CHAINER_DATASET_ROOT")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert get_dataset_root() == str(tmp_path / ".chainer/dataset")


def test_downloads_are_kept(server, capsys):
    server.files["https://a.example/x"] = b"some bytes"
    path = cached_download("https://a.example/x")
    assert Path(path).read_bytes() == b"some bytes" and path.startswith(get_dataset_root())
    assert cached_download("https://a.example/x") == path and len(server.asked) == 1
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]  # no locks, no halves
    assert "Downloading from https://a.example/x" in capsys.readouterr().err


def test_downloads_that_fail_leave_nothing(server):
    with pytest.raises(OSError, match=r"expected to download https://a.example/x, but that failed: .*no network"):
        cached_download("https://a.example/x")
    server.files["https://a.example/x"] = b"half"
    server.length = "8"
    with pytest.raises(OSError, match=r"expected 8 bytes from https://a.example/x, got 4"):
        cached_download("https://a.example/x")
    server.length = None
    with pytest.raises(OSError, match=f"MD5 checksum 0123 from .*, got {hashlib.md5(b'half').hexdigest()}"):
        download.download("https://a.example/x", "0123")
    assert os.listdir(os.path.join(get_dataset_root(), "_dl_cache")) == []


def test_cache_or_load_file(tmp_path):
    calls = []

    def create(path):
        calls.append(path)
        assert not os.path.exists(path) and os.path.basename(path) == "made.txt"
        Path(path).write_text("content")
        return "made"

    path = str(tmp_path / "new" / "made.txt")
    assert cache_or_load_file(path, create, lambda p: Path(p).read_text()) == "made"
    assert cache_or_load_file(path, create, lambda p: Path(p).read_text()) == "content"
    assert len(calls) == 1 and os.listdir(tmp_path / "new") == ["made.txt"]

    def fail(path):
        Path(path).write_text("half")
        raise KeyError("no")

    with pytest.raises(KeyError):
        cache_or_load_file(tmp_path / "b", fail, None)
    with pytest.raises(FileNotFoundError, match="expected the creator to write the file that it was given, b"):
        cache_or_load_file(tmp_path / "b", lambda path: 1, None)
    assert sorted(os.listdir(tmp_path)) == ["new"]


def test_a_lock_that_its_holder_has_removed_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    lock, inodes = tmp_path / "x.lock", []

    def flock(file, _):
        inodes.append(os.fstat(file.fileno()).st_ino)
        if len(inodes) == 1:  # the process that had it is done
            os.remove(lock)
            (tmp_path / "keeps-the-inode").touch()

    monkeypatch.setattr(download.fcntl, "flock", flock)
    with download._alone_with(str(tmp_path / "x")):
        assert os.stat(lock).st_ino == inodes[-1] and len(inodes) == 2
    assert not lock.exists()


PROCESS = """
import os, sys, time
from dbrdist.dataset import cache_or_load_file
folder, number = sys.argv[1], sys.argv[2]

def create(path):
    with open(os.path.join(folder, "created"), "a") as f:
        f.write("x")
    open(path, "w").write("from one of them")
    time.sleep(0.2)
    return "from one of them"

open(os.path.join(folder, "ready" + number), "w").close()
while sum(os.path.exists(os.path.join(folder, f"ready{k}")) for k in range(3)) < 3:
    time.sleep(0.01)
print(cache_or_load_file(os.path.join(folder, "file"), create, lambda path: open(path).read()))
"""


@pytest.mark.programs
def test_several_processes_make_a_file_once(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path), str(k)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for k in range(3)
    ]
    try:
        assert [p.communicate(timeout=100)[0] for p in processes] == ["from one of them\n"] * 3
    finally:
        for p in processes:
            p.kill()
    assert (tmp_path / "created").read_text() == "x"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["created", "file", "ready0", "ready1", "ready2"]


# ---- MNIST and its family -------------------------------------------------------------------------------------------


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
    ours = [s._replace(md5=download._md5_of(tmp_path / s.name)) for s in dbrdist.datasets.mnist._MNIST]
    monkeypatch.setattr(dbrdist.datasets.mnist, "_MNIST", ours)
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


# ---- CIFAR ----------------------------------------------------------------------------------------------------------


def check_cifar(found, parts):
    for data, (x, y) in zip(found, parts):
        assert [int(label) for _, label in data] == list(y) and data[0][1].dtype == np.int32
        image = data[1][0]
        assert image.shape == (3, 32, 32) and image.dtype == np.float32
        np.testing.assert_allclose(image.reshape(-1), x[1] / 255.0, rtol=1e-6)


def test_cifar10_from_the_archive_and_from_the_folder(tmp_path):
    files, parts = cifar10()
    tar_gz(folder_of("cifar") / "cifar-10-python.tar.gz", files)
    for _ in range(2):
        check_cifar(get_cifar10(), parts)
    set_dataset_root(tmp_path / "other")
    for name, data in files.items():
        (folder_of("cifar") / name).parent.mkdir(exist_ok=True)
        (folder_of("cifar") / name).write_bytes(data)
    check_cifar(get_cifar10(), parts)
    images = get_cifar10(withlabel=False, ndim=1, scale=255.0, dtype=np.float64)[1]
    np.testing.assert_allclose(images, parts[1][0])
    with pytest.raises(ValueError, match="expected ndim 1 or 3 for CIFAR-10, got 2"):
        get_cifar10(ndim=2)


def test_cifar100():
    files, parts = cifar100()
    tar_gz(folder_of("cifar") / "cifar-100-python.tar.gz", files)
    check_cifar(get_cifar100(), parts)


def hostile(module, name, *arguments):
    """A pickle that calls a function."""

    class Call:
        def __reduce__(self):
            return eval(name, vars(__import__(module))), arguments

    return pickle.dumps(Call(), 2)


IMAGES = np.zeros((2, 3072), np.uint8)
WRONG_CIFAR = {
    "system": (
        hostile("os", "mkdir", "made-by-the-pickle"),
        "refused the pickle in .*train: it refers to .*mkdir, which",
    ),
    "eval": (hostile("builtins", "eval", "1"), "refused the pickle .*: it refers to builtins.eval"),
    "cut": (
        python2_pickle({"data": IMAGES, "fine_labels": [0, 1]})[:-50],
        "a pickle in cifar-100-python/train that can be read: ",
    ),
    "text": (b"<html>", "a pickle in cifar-100-python/train that can be read: "),
    "list": (pickle.dumps([1], 2), "a dictionary with 'data' and 'fine_labels' as .*, got a list"),
    "keys": (python2_pickle({"data": IMAGES}), r"got one with \['data'\]"),
    "shape": (python2_pickle({"data": IMAGES[:, :5], "fine_labels": [1, 2]}), r"got uint8 of \(2, 5\)"),
    "fewer": (python2_pickle({"data": IMAGES, "fine_labels": [1]}), "expected 1 images of 3072 bytes"),
    "label": (python2_pickle({"data": IMAGES, "fine_labels": [1, 100]}), "labels from 0 to 99"),
    "negative": (python2_pickle({"data": IMAGES, "fine_labels": [1, -1]}), "labels from 0 to 99"),
    "no array": (python2_pickle({"data": "abc", "fine_labels": [1]}), "one for each label, got str"),
}


@each(kind=list(WRONG_CIFAR))
def test_hostile_pickles_are_refused_in_words(kind, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    data, words = WRONG_CIFAR[kind]
    tar_gz(folder_of("cifar") / "cifar-100-python.tar.gz", {**cifar100()[0], "cifar-100-python/train": data})
    with pytest.raises(ValueError, match=words):
        get_cifar100()
    assert not Path("made-by-the-pickle").exists()


def test_damaged_archives_are_refused_in_words():
    archive = folder_of("cifar") / "cifar-10-python.tar.gz"
    files, _ = cifar10()
    tar_gz(archive, files)
    for data in (archive.read_bytes()[:-4000], b"", b"<html>"):
        archive.write_bytes(data)
        with pytest.raises(ValueError, match=r"expected a .tar.gz file, but .* is damaged|expected the file cifar-10"):
            get_cifar10()
    del files["cifar-10-batches-py/test_batch"]
    tar_gz(archive, files)
    with pytest.raises(ValueError, match=r"expected the file cifar-10-batches-py/test_batch in .*, which lacks it"):
        get_cifar10()


def test_random_damage_is_refused_in_words(tmp_path):
    rng = np.random.default_rng(0)
    data = python2_pickle({"data": IMAGES, "fine_labels": [1, 99]})
    num_refused = 0
    for _ in range(300):
        broken = bytearray(data)
        at = int(rng.integers(0, 200) if rng.random() < 0.8 else rng.integers(0, len(data)))
        broken[at] = rng.integers(0, 256)
        try:
            dbrdist.datasets.cifar._batch("a file", bytes(broken), "fine_labels", 100)
        except ValueError:
            num_refused += 1
    assert num_refused > 100


# ---- SVHN -----------------------------------------------------------------------------------------------------------


def svhn(part, num, seed):
    io_ = pytest.importorskip("scipy.io")
    rng = np.random.default_rng(seed)
    x, y = rng.integers(0, 256, (32, 32, 3, num), np.uint8), rng.integers(1, 11, (num, 1)).astype(np.uint8)
    y[0] = 10
    io_.savemat(folder_of("svhn") / f"{part}_32x32.mat", {"X": x, "y": y})
    return x, y


def test_svhn():
    files = [svhn("train", 6, 0), svhn("test", 3, 1), svhn("extra", 4, 2)]
    for n, found in ((2, get_svhn()), (3, get_svhn(add_extra=True))):
        assert len(found) == n
        for data, (x, y) in zip(found, files):
            assert [int(label) for _, label in data] == (y.ravel() % 10).tolist() and data[0][1] == 0
            image = data[2][0]
            assert image.shape == (3, 32, 32) and image.dtype == np.float32 and image.flags.c_contiguous
            np.testing.assert_allclose(image[1, 5, 7], x[5, 7, 1, 2] / 255.0, rtol=1e-6)
    images = get_svhn(withlabel=False, scale=255.0, dtype=np.float64)[0]
    np.testing.assert_allclose(images, files[0][0].transpose(3, 2, 0, 1))


def test_svhn_needs_scipy_once(monkeypatch):
    svhn("train", 6, 0), svhn("test", 3, 1)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "scipy", None)
        with pytest.raises(ImportError, match=r"expected SciPy, which reads MATLAB files such as .*dbrdist\[scipy\]"):
            get_svhn()
    get_svhn()
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert len(get_svhn()[0]) == 6


def test_damaged_mat_files_are_refused_in_words():
    x, y = svhn("train", 6, 0)
    path = folder_of("svhn") / "train_32x32.mat"
    from scipy import io as mat

    whole = path.read_bytes()
    for data in (whole[: len(whole) // 2], b"<html>", b"", b"\0" * 500):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"expected a MATLAB file, but|expected the arrays X and y"):
            get_svhn()
    for wrong, words in (
        ({"X": x}, r"the arrays X and y in .*, which has \['X'\]"),
        ({"X": x, "y": y[:5]}, r"bytes \(32, 32, 3, N\) and N labels .* got uint8 of \(32, 32, 3, 6\) and 5 labels"),
        ({"X": x, "y": y * 0}, "6 labels from 0 to 0"),
        ({"X": x.astype(float), "y": y}, "got float64"),
    ):
        mat.savemat(path, wrong)
        with pytest.raises(ValueError, match=words):
            get_svhn()


# ---- Penn Treebank --------------------------------------------------------------------------------------------------

TEXTS = {"train": " the cat sat \n on <unk> N the mat \n", "valid": " the mat sat \n", "test": " cat on cat \n\n"}


def ptb(**texts):
    for part, text in {**TEXTS, **texts}.items():
        (folder_of("ptb") / f"ptb.{part}.txt").write_text(text)


def test_ptb_words():
    ptb()
    words = get_ptb_words_vocabulary()
    assert list(words) == ["the", "cat", "sat", "<eos>", "on", "<unk>", "N", "mat"]
    assert list(words.values()) == list(range(8))
    for _ in range(2):
        train, valid, test = get_ptb_words()
        assert train.dtype == np.int32 and train.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 7, 3]
        assert valid.tolist() == [0, 7, 2, 3] and test.tolist() == [1, 4, 1, 3, 3]


def test_ptb_with_chainers_vocabulary_and_with_unknown_words():
    ptb(valid="the dog")
    with pytest.raises(ValueError, match=r"words of the training text in .*ptb.valid.txt, got 'dog'"):
        get_ptb_words()
    (folder_of("ptb") / "vocab.txt").write_text("dog\nthe\ncat\nsat\n<eos>\non\n<unk>\nN\nmat\n")
    (folder_of("ptb") / "train.npz").unlink()
    assert get_ptb_words()[1].tolist() == [1, 0, 4]
    (folder_of("ptb") / "test.npz").unlink()
    (folder_of("ptb") / "ptb.test.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"expected text as .*ptb.test.txt"):
        get_ptb_words()
    set_dataset_root(folder_of("elsewhere"))
    with pytest.raises(OSError, match=r"The Penn Treebank is not on this machine.*Put the files ptb.train.txt into"):
        get_ptb_words_vocabulary()
