"""Small functions of the core, each called by itself, where a wrong one would hardly show in a whole step."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable
from dbrdist.core import backend, checks, elementwise, parameter, sparse, thread_pools, walk
from dbrdist.core.update_rule import Hyperparameter, UpdateRule
from tests.each import each

# ---- errors ---------------------------------------------------------------------------------------------------------


def test_an_error_has_its_parts_in_the_order_of_its_sentence():
    error = checks.expected("linear", "x", "shape (N, 3)", np.zeros((2, 4), "f"), "transpose it")
    parts = ("linear", "x", "shape (N, 3)", "shape (2, 4) and dtype float32", "transpose it")
    assert error.args == parts
    assert (error.function, error.argument, error.what, error.got, error.hint) == parts
    assert str(error) == "linear: x: expected shape (N, 3), got shape (2, 4) and dtype float32; transpose it"


def test_operands_beyond_the_last_name_are_numbered():
    operands = checks.Operands("concat", x="float", rest="integer")
    operands.check(5, np.zeros(1, "i"))
    with pytest.raises(checks.OperandTypeError, match="concat: operand 2: expected integers, got shape") as caught:
        operands.check(2, np.zeros(1))
    assert caught.value.args[:3] == ("concat", "operand 2", "integers")


# ---- libraries that are loaded --------------------------------------------------------------------------------------


def kind(getters, setters):
    return thread_pools._Kind("Mine", "mine", ("MINE",), getters, setters)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the maps of Linux")
def test_a_pool_is_a_loaded_library_with_a_getter_and_a_setter(tmp_path):
    with open("/proc/self/maps") as maps:
        libc = next(line.split()[-1] for line in maps if Path(line.split()[-1]).name.startswith(("libc.so", "libc-")))
    found = thread_pools._opened(kind(("no_such", "getpid"), ("srand",)), libc)
    assert (found.name, found.variables) == ("Mine", ("MINE",))
    assert found.size() == os.getpid() and found.resize.__name__ == "srand"
    assert thread_pools._opened(kind(("getpid",), ("no_such",)), libc) is None
    assert thread_pools._opened(kind(("no_such",), ("srand",)), libc) is None
    assert thread_pools._opened(kind(("getpid",), ("srand",)), str(tmp_path / "libgone.so")) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the maps of Linux")
def test_a_library_that_is_not_loaded_stays_so(tmp_path):
    folder = Path(importlib.import_module("_ctypes").__file__).parent
    name = next(iter(sorted(folder.glob("_testcapi*.so")) or sorted(folder.glob("_queue*.so"))), None)
    if name is None:
        pytest.skip("Python has no extension modules in files")
    path = tmp_path / "libopenblas.so"
    shutil.copy(name, path)
    names = (f"PyInit_{name.name.partition('.')[0]}",)
    assert thread_pools._opened(kind(names, names), str(path)) is None
    assert str(path) not in Path("/proc/self/maps").read_text()


# ---- arrays and values ----------------------------------------------------------------------------------------------


@each(dtype=["float16", "bfloat16"])
def test_numbers_of_16_bits_are_rounded_once(dtype):
    """A formula on arrays without axes, or on NumPy's numbers, as on arrays of one element."""
    dtype = backend.as_dtype(dtype)
    values = np.linspace(0.1, 2, 60).astype(dtype)

    def formula(x, y):
        return (x * y + x) * y - x / 3

    for x, y in zip(values, values[::-1], strict=True):
        whole = elementwise.fused(formula, np.array([x], dtype), np.array([y], dtype))
        exact = formula(np.float32(x), np.float32(y)).astype(dtype)
        assert elementwise.fused(formula, x, y) == exact == whole[0]
        assert elementwise.fused(formula, np.array(x), 0.75).dtype == dtype
    wide = elementwise.fused(formula, np.float32(0.3), values[0])
    assert wide.dtype == np.float32 and wide == formula(np.float32(0.3), values[0])


def test_arrays_are_alike_in_shape_type_and_place(monkeypatch):
    class OnDevice(types.SimpleNamespace):
        shape, dtype = (2,), np.dtype("f")

    first, second = OnDevice(at="a"), OnDevice(at="b")
    monkeypatch.setattr(parameter, "is_array", lambda a: isinstance(a, (np.ndarray, OnDevice)))
    monkeypatch.setattr(parameter, "device_of", lambda a: getattr(a, "at", "host"))
    host = np.zeros(2, "f")
    assert parameter._alike(host, host + 1) and parameter._alike(first, OnDevice(at="a"))
    for other in (first, np.zeros(3, "f"), np.zeros(2)):
        assert not parameter._alike(host, other)
        assert not parameter._alike(other, host)
    assert not parameter._alike(first, second) and not parameter._alike(None, host)


def test_ranks_count_the_functions_on_the_way():
    x = Variable(np.ones(3, "f"))
    y = F.relu(x) + np.ones(3, "f")
    assert (x.rank, F.relu(x).rank, y.rank, (2.0 - x).rank) == (0, 1, 2, 1)
    assert (np.ones(3, "f") * x).rank == 1
    with dbrdist.no_backprop_mode():
        assert F.relu(x).rank == 0


def test_entries_of_batches_have_their_places_in_each_matrix():
    dense = np.zeros((3, 2, 4), "f")
    dense[0, 1, 3], dense[0, 0, 2], dense[2, 1, 0] = 1, 2, 3
    found = sparse.to_coo(dense)
    assert found.data.array.tolist() == [[2, 1], [0, 0], [3, 0]]
    assert found.row.tolist() == [[0, 1], [-1, -1], [1, -1]] and found.row.dtype == np.int32
    assert found.col.tolist() == [[2, 3], [-1, -1], [0, -1]]
    np.testing.assert_array_equal(found.to_dense(), dense)
    assert sparse.to_coo(dense, ldnz=5).data.shape == (3, 5)
    for empty, shape in ((dense[:0], (0, 0)), (dense[1:2], (1, 0)), (dense[1], (0,))):
        assert sparse.to_coo(empty).data.shape == shape
    assert sparse.to_coo(dense[:0], ldnz=2).data.shape == (0, 2)


# ---- what an update is made of --------------------------------------------------------------------------------------


def test_numbers_of_a_rule_are_themselves_unless_an_array_is_among_them():
    parent = Hyperparameter()
    parent.lr = 0.5
    child = Hyperparameter(parent)
    child.decay = 2
    assert child.in_numbers() is child and parent.in_numbers() is parent
    parent.lr = np.array([0.25], np.float64)
    found = child.in_numbers()
    assert found is not child and found.get_dict() == {"lr": 0.25, "decay": 2}
    assert type(found.lr) is float


class Records(dict):
    """A serializer that loads what it was given, or notes what it is told."""

    def __init__(self, is_loading, **values):
        super().__init__(values)
        self.is_loading = is_loading

    def __call__(self, name, value):
        if not self.is_loading:
            self[name] = value
        return self.get(name, value)


def test_a_divided_state_is_saved_as_a_whole_or_not_at_all():
    rule = UpdateRule()
    rule.t, rule._state, rule.piece = 4, {"v": np.ones(2)}, slice(0, 2)
    with pytest.raises(RuntimeError, match=r"divided over ranks; save it inside `with optimizer.whole_state\(\):`"):
        rule.serialize(Records(is_loading=False))
    rule.serialize(Records(is_loading=True, t=9, v=np.full(5, 3.0)))
    assert rule.piece is None and rule.t == 9 and rule.state["v"].tolist() == [3.0] * 5
    written = Records(is_loading=False)
    rule.serialize(written)
    assert written["t"] == 9 and written["v"].tolist() == [3.0] * 5


def test_an_optimizer_begins_at_zero_with_each_target():
    made = dbrdist.Optimizer()
    assert (made.target, made.t, made.epoch, made.is_safe_to_update()) == (None, 0, 0, True)
    made.t, made.epoch = 5, 7
    link = dbrdist.links.Linear(2, 3)
    assert made.setup(link) is made
    made.add_hook(lambda one: None, "mine")
    assert (made.target, made.t, made.epoch) == (link, 0, 0)
    made.new_epoch()
    made.new_epoch(auto=True)
    assert made.epoch == 2
    made.setup(link).add_hook(lambda one: None, "mine")  # hooks of the target before are gone
    with pytest.raises(TypeError, match="expected a Link, got int"):
        made.setup(3)


# ---- where first contributions may be written -----------------------------------------------------------------------


def node(view=None, gradient=None):
    return types.SimpleNamespace(view=view, gradient=gradient)


def test_a_gradient_is_written_where_it_belongs_once():
    plain, first, second, full = node(), node("a"), node("b"), node("c", "there")
    assert walk.views((plain, full), (0, 1)) is None
    assert walk.views((plain, first), (0, 1)) == [None, "a"]
    assert walk.views((first, plain, second), (0, 2)) == ["a", "b"]
    assert walk.views((first, second, second, first), (0, 1, 2, 3)) == ["a", "b", None, None]
    assert walk.views((first, second), (1,)) == ["b"]
