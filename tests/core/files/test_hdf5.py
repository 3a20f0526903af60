"""HDF5 files, with h5py where it is installed and with a stand-in for it."""

from __future__ import annotations

import importlib
import os
import sys

import numpy as np
import pytest

import dbrdist
import dbrdist.links as L
from dbrdist import serializers, testing
from dbrdist.core.files.hdf5 import HDF5Serializer
from dbrdist.errors import CheckpointError
from tests.core.files import hdf5_stand_in


@pytest.fixture(
    params=["h5py", "stand-in"],
)
def h5py(request, monkeypatch):
    if request.param == "h5py":
        return pytest.importorskip("h5py")
    monkeypatch.setitem(sys.modules, "h5py", hdf5_stand_in)
    return hdf5_stand_in


class Things:
    """Entries of all kinds, in parts."""

    def __init__(self, **values):
        self.values = values

    def serialize(self, serializer):
        for name, value in self.values.items():
            where = serializer["part"]["deep"] if name.startswith("deep") else serializer
            self.values[name] = where(name, value)


@pytest.mark.usefixtures("h5py")
def test_all_kinds_come_back(tmp_path):
    saved = {
        "x": np.arange(6.0).reshape(2, 3),
        "deep_bits": np.array([1.5, -2.0], dbrdist.core.array.backend.as_dtype("bfloat16")),
        "one": np.float32(3),
        "nothing": np.zeros((0, 2)),
        "number": 7,
        "rate": 0.5,
        "deep_flag": True,
        "words": "gradient ü",
        "deep_none": None,
        "listed": [1, 2, 3],
    }
    serializers.save_hdf5(tmp_path / "things.h5", Things(**saved))
    fresh = Things(**{
        **{k: np.zeros_like(v) for k, v in saved.items() if isinstance(v, np.ndarray)},
        "number": 0, "rate": 0.0, "deep_flag": False, "words": "", "deep_none": 3, "listed": [0], "one": np.float32(0),
    })  # fmt: skip
    kept = fresh.values["x"]
    serializers.load_hdf5(tmp_path / "things.h5", fresh)
    assert fresh.values["x"] is kept
    for name, value in saved.items():
        found = fresh.values[name]
        assert type(found) is type(value) or name == "one", name
        np.testing.assert_array_equal(found, value)
    assert fresh.values["deep_bits"].dtype.name == "bfloat16"
    assert os.listdir(tmp_path) == ["things.h5"]


@pytest.mark.usefixtures("h5py")
def test_a_chain_and_its_late_parameters(tmp_path):
    a = dbrdist.Sequential(L.Linear(3, 4), L.BatchNormalization(4))
    b = dbrdist.Sequential(L.Linear(None, 4), L.BatchNormalization(4))
    a[1].avg_mean[...] = 5
    testing.save_and_load_hdf5(a, b)
    for p, q in zip(a.params(), b.params(), strict=True):
        np.testing.assert_array_equal(p.array, q.array)
    assert (b[1].avg_mean == 5).all()


@pytest.mark.usefixtures("h5py")
def test_a_dictionary_and_compression(tmp_path, h5py):
    path = tmp_path / "arrays.h5"
    serializers.save_hdf5(path, {"/l1/W": np.ones((3, 2)), "t": 4}, compression=9)
    with h5py.File(path, "r") as file:
        assert file["l1/W"].shape == (3, 2) and file["t"][()] == 4
        link = serializers.HDF5Deserializer(file)["l1"]
        assert link("W", np.zeros((3, 2))).sum() == 6


@pytest.mark.usefixtures("h5py")
def test_what_is_missing_or_does_not_fit(tmp_path, h5py):
    path = tmp_path / "link.h5"
    serializers.save_hdf5(path, L.Linear(3, 2))
    with pytest.raises(CheckpointError, match=r"link.h5: W: expected shape \(2, 4\).*found \(2, 3\)"):
        serializers.load_hdf5(path, L.Linear(4, 2))
    with pytest.raises(CheckpointError, match="0/W: expected this entry in the saved state"):
        serializers.load_hdf5(path, dbrdist.Sequential(L.Linear(3, 2)))
    with h5py.File(path, "r") as file:
        loose = serializers.HDF5Deserializer(file, strict=False)
        assert loose("absent", 3) == loose["no"]["such"]("part", 3) == 3
    with pytest.raises(FileNotFoundError, match="found nothing at"):
        serializers.load_hdf5(tmp_path / "none.h5", L.Linear(3, 2))
    path.write_bytes(b"no HDF5")
    with pytest.raises(CheckpointError, match="cannot be read as an HDF5 file"):
        serializers.load_hdf5(path, L.Linear(3, 2))


@pytest.mark.usefixtures("h5py")
def test_a_save_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.h5"
    serializers.save_hdf5(path, {"x": np.ones(2)})
    before = path.read_bytes()
    with pytest.raises(TypeError, match="/y: expected an array, a number, a string or None, got object"):
        serializers.save_hdf5(path, {"x": np.zeros(2), "y": object()})
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["file.h5"]


@pytest.mark.usefixtures("h5py")
def test_without_h5py_the_error_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    importlib.invalidate_caches()
    for call in (
        lambda: serializers.save_hdf5(tmp_path / "x", {}),
        lambda: serializers.load_hdf5(tmp_path / "x", {}),
        lambda: serializers.HDF5Serializer(None),
        lambda: serializers.HDF5Deserializer(None),
    ):
        with pytest.raises(RuntimeError, match=r"pip install 'dbrdist\[hdf5\]'"):
            call()
    assert os.listdir(tmp_path) == []


def test_arrays_of_more_than_one_element_are_compressed():
    made = {}

    class Group:
        name = "/"

        def create_dataset(self, key, **options):
            made[key] = options

    serializer = HDF5Serializer.__new__(HDF5Serializer)
    serializer.group, serializer.compression = Group(), 7
    for key, value in (("none", np.zeros(0)), ("one", np.ones(1)), ("two", np.ones(2)), ("number", 3)):
        serializer(key, value)
    assert {key: options["compression"] for key, options in made.items()} == {
        "none": None, "one": None, "two": 7, "number": None
    }  # fmt: skip
