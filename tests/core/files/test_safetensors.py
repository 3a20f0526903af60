"""Tests of dbrdist.core.files.safetensors."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dbrdist.core.files import safetensors
from dbrdist.errors import CheckpointError


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def tensors(tmp_path, header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return str(path)


def entry(start, end, shape, dtype="F32"):
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}}


def test_safetensors_that_lie_at_the_edges_of_the_file(tmp_path):
    body = np.arange(2, dtype="<f4").tobytes()
    assert safetensors.load(tensors(tmp_path, entry(0, 8, [2]), body))["x"].tolist() == [0, 1]
    assert safetensors.load(tensors(tmp_path, entry(4, 8, []), body))["x"].tolist() == 1
    assert safetensors.load(tensors(tmp_path, entry(8, 8, [0, 3]), body))["x"].shape == (0, 3)
    assert safetensors.load(tensors(tmp_path, b"{}")) == {}
    for start, end, shape in ((0, 12, [3]), (4, 0, [1]), (-4, 4, [2]), (0, 8, [-2]), (0, 8, [-1, -2]), (0, 8, [-1])):
        with pytest.raises(CheckpointError, match="x does not lie within the file"):
            safetensors.load(tensors(tmp_path, entry(start, end, shape), body))
    for header in (b"", b"{"):
        with pytest.raises(CheckpointError, match=f"its header claims {len(header)} bytes"):
            safetensors.load(tensors(tmp_path, header, body))


def test_safetensors_have_types_that_the_format_knows(tmp_path):
    with pytest.raises(TypeError, match=r"z: expected one of .*float32.*, got complex64"):
        safetensors.save(str(tmp_path / "x"), {"z": ones(1, dtype=np.complex64)})
    assert not (tmp_path / "x").exists()
    for facts in (None, {}, {"epoch": "3"}):
        safetensors.save(str(tmp_path / "x"), {"b": ones(2, 0), "a": np.array(2.5)}, facts)
        read = safetensors.load(str(tmp_path / "x"))
        assert list(read) == ["a", "b"] and read["a"] == 2.5 and read["b"].shape == (2, 0)
        assert ((tmp_path / "x").read_bytes().find(b"__metadata__") >= 0) == bool(facts)


def test_a_header_longer_than_its_file_is_named():
    for length in (3, 10, 11):
        data = length.to_bytes(8, "little") + b"{}"
        with pytest.raises(ValueError, match=rf"^its header claims {length} bytes$"):
            safetensors._parse(data)
    assert safetensors._parse((2).to_bytes(8, "little") + b"{}") == {}


def test_a_file_for_which_there_is_no_memory_is_named(tmp_path, monkeypatch):
    def parse(data):
        raise MemoryError

    monkeypatch.setattr(safetensors, "_parse", parse)
    (tmp_path / "w.safetensors").write_bytes(bytes(1234))
    with pytest.raises(CheckpointError, match=r"w.safetensors: there is no memory for its 1,234 bytes"):
        safetensors.load(str(tmp_path / "w.safetensors"))
