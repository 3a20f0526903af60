"""Tests of dbrdist.datasets.public.svhn."""

import sys

import numpy as np
import pytest

from dbrdist.datasets import get_svhn
from dbrdist.datasets.public import svhn
from tests.datasets.public.public_files import folder_of


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


def mat_file(part, num, seed):
    io_ = pytest.importorskip("scipy.io")
    rng = np.random.default_rng(seed)
    x, y = rng.integers(0, 256, (32, 32, 3, num), np.uint8), rng.integers(1, 11, (num, 1)).astype(np.uint8)
    y[0] = 10
    io_.savemat(folder_of("svhn") / f"{part}_32x32.mat", {"X": x, "y": y})
    return x, y


def test_svhn():
    files = [mat_file("train", 6, 0), mat_file("test", 3, 1), mat_file("extra", 4, 2)]
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
    mat_file("train", 6, 0), mat_file("test", 3, 1)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "scipy", None)
        with pytest.raises(ImportError, match=r"expected SciPy, which reads MATLAB files such as .*dbrdist\[scipy\]"):
            get_svhn()
    get_svhn()
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert len(get_svhn()[0]) == 6


def test_damaged_mat_files_are_refused_in_words():
    x, y = mat_file("train", 6, 0)
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
