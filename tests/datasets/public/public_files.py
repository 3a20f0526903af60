"""Small files in the formats in which public datasets come, made without the code that reads them."""

import gzip
import io
import struct
import tarfile
from pathlib import Path

import numpy as np

from dbrdist.dataset import get_dataset_directory


def idx(a):
    """An idx file of uint8."""
    return bytes([0, 0, 8, a.ndim]) + b"".join(struct.pack(">I", n) for n in a.shape) + a.tobytes()


def mnist(folder, num_train=7, num_test=3, packed=True):
    """The four files of MNIST; returns ((images, labels), (images, labels))."""
    rng = np.random.default_rng(0)
    parts = []
    for name, n in (("train", num_train), ("t10k", num_test)):
        x, y = rng.integers(0, 256, (n, 28, 28), np.uint8), rng.integers(0, 10, n).astype(np.uint8)
        for kind, a in (("images-idx3", x), ("labels-idx1", y)):
            data = gzip.compress(idx(a), 1) if packed else idx(a)
            (folder / (f"{name}-{kind}-ubyte" + (".gz" if packed else ""))).write_bytes(data)
        parts.append((x, y))
    return parts


def _text(s):
    return b"U" + bytes([len(s)]) + s


def _integer(i):
    return b"J" + struct.pack("<i", i)


def _bytes_array(a):
    """NumPy's array of uint8 as Python 2 pickled it."""
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + _text(b"b") + b"\x87R"
    dtype = b"cnumpy\ndtype\n" + _text(b"u1") + b"K\x00K\x01\x87R(K\x03" + _text(b"|") + b"NNN"
    dtype += _integer(-1) + _integer(-1) + b"K\x00tb"
    shape = _integer(a.shape[0]) + _integer(a.shape[1]) + b"\x86"
    return made + b"(K\x01" + shape + dtype + b"\x89T" + struct.pack("<I", a.nbytes) + a.tobytes() + b"tb"


def python2_pickle(entries):
    """A dictionary as Python 2 pickled it with protocol 2: of text, lists of integers, and arrays of uint8."""
    items = b""
    for key, value in entries.items():
        if isinstance(value, np.ndarray):
            packed = _bytes_array(value)
        elif isinstance(value, list):
            packed = b"](" + b"".join(_integer(i) for i in value) + b"e"
        else:
            packed = _text(value.encode())
        items += _text(key.encode()) + packed
    return b"\x80\x02}(" + items + b"u."


def tar_gz(path, files):
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def cifar10(num=4):
    """The files of CIFAR-10's archive, and its images and labels."""
    rng = np.random.default_rng(1)
    files, parts = {}, []
    for name in [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]:
        x, y = rng.integers(0, 256, (num, 3072), np.uint8), rng.integers(0, 10, num).tolist()
        files[f"cifar-10-batches-py/{name}"] = python2_pickle({"batch_label": name, "labels": y, "data": x})
        parts.append((x, y))
    files["cifar-10-batches-py/readme.html"] = b"<html>"
    train = np.concatenate([x for x, _ in parts[:-1]]), np.concatenate([y for _, y in parts[:-1]])
    return files, (train, parts[-1])


def cifar100(num=5):
    rng = np.random.default_rng(2)
    files, parts = {}, []
    for name in ("train", "test"):
        x, y = rng.integers(0, 256, (num, 3072), np.uint8), rng.integers(0, 100, num).tolist()
        coarse = [0] * num
        files[f"cifar-100-python/{name}"] = python2_pickle({"coarse_labels": coarse, "fine_labels": y, "data": x})
        parts.append((x, y))
    return files, parts


def folder_of(name):
    return Path(get_dataset_directory(f"pfnet/chainer/{name}"))
