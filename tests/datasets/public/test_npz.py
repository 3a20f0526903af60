"""Tests of dbrdist.datasets.public.npz."""

import numpy as np
import pytest

from dbrdist.datasets import NpzDataset


def test_npz(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, x=np.arange(12.0).reshape(4, 3), y=np.arange(4))
    data = NpzDataset(path, shape=(3,))
    image, label = data[2]
    assert (len(data), image.tolist(), image.dtype, label, label.dtype) == (4, [6, 7, 8], np.float32, 2, np.int32)
    assert NpzDataset(path, y=None)[1][0].tolist() == [3, 4, 5]
    assert NpzDataset(path, x="y", y="x", dtype=np.float64)[1][1].dtype == np.float64


@pytest.mark.parametrize(
    ("arrays", "options", "error", "message"),
    [
        ({"x": np.ones(3)}, {}, KeyError, r"the keys \['x', 'y'\] in .*data.npz, which has \['x'\]"),
        ({"x": np.ones(3), "y": np.ones(2)}, {}, ValueError, "one length in .*, got {'x': 3, 'y': 2}"),
        (
            {"x": np.ones((3, 2)), "y": np.ones(3)},
            {"shape": (3,)},
            ValueError,
            r"shape \(3,\) under 'x' in .*, got \(2,\)",
        ),
        ({"x": np.array(["a"]), "y": np.ones(1)}, {}, ValueError, "expected numbers .* under 'x'"),
        ({"x": np.float32(1), "y": np.ones(1)}, {}, ValueError, r"under 'x' in .*, got float32 of \(\)"),
        ({"x": np.array([None]), "y": np.ones(1)}, {}, ValueError, "array of numbers under 'x' in .*: Object arrays"),
    ],
)
def test_npz_files_that_do_not_fit_are_refused(tmp_path, arrays, options, error, message):
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(error, match=message):
        NpzDataset(tmp_path / "data.npz", **options)


def test_files_that_are_no_npz_are_refused(tmp_path):
    path = tmp_path / "data.npz"
    np.save(tmp_path / "data.npy", np.ones(3))
    np.savez(path, x=np.ones(300), y=np.ones(300))
    path.write_bytes(path.read_bytes()[:500])
    for name in ("data.npz", "data.npy"):
        with pytest.raises(ValueError, match=rf"expected an \.npz file.*{name}"):
            NpzDataset(tmp_path / name)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"expected an \.npz file"):
        NpzDataset(path)
    with pytest.raises(FileNotFoundError):
        NpzDataset(tmp_path / "nowhere.npz")


@pytest.mark.parametrize("label", [2**31, 2**40, -(2**31) - 1])
def test_labels_that_int32_lacks_are_refused(tmp_path, label):
    np.savez(tmp_path / "data.npz", x=np.zeros((2, 3)), y=np.array([0, label]))
    with pytest.raises(ValueError, match=r"expected labels of at most 2,147,483,647 under 'y' in .*data\.npz, got"):
        NpzDataset(tmp_path / "data.npz")
    np.savez(tmp_path / "data.npz", x=np.zeros((2, 3)), y=np.array([-1, 2**31 - 1]))
    assert NpzDataset(tmp_path / "data.npz")[1][1] == 2**31 - 1
