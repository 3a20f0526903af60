"""Small functions of the core, each called by itself, where a wrong one would hardly show in a whole step."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import FunctionNode, Variable
from dbrdist.core import (
    arrays,
    backend,
    checks,
    elementwise,
    flat,
    fusion,
    gradient_check,
    ops,
    parameter,
    reporter,
    safetensors,
    sparse,
    thread_pools,
    walk,
)
from dbrdist.core.node import make_node
from dbrdist.core.update_rule import FP32_PARAM, Hyperparameter, UpdateRule
from dbrdist.optimizers import SGD
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


@each(
    **{
        "file, name, variables, getter, setter": [
            ("libopenblas64_p-r0-0cf96a72.3.23.so", "OpenBLAS", ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS"),
             "openblas_get_num_threads", "openblas_set_num_threads"),
            ("libscipy_openblas64_-99b71e71.so", "OpenBLAS", ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS"),
             "scipy_openblas_get_num_threads64_", "scipy_openblas_set_num_threads64_"),
            ("libmkl_rt.so.2", "MKL", ("MKL_NUM_THREADS",), "MKL_Get_Max_Threads", "MKL_Set_Num_Threads"),
            ("libblis.so.4", "BLIS", ("BLIS_NUM_THREADS",), "bli_thread_get_num_threads", "bli_thread_set_num_threads"),
            *((f, "OpenMP", (), "omp_get_max_threads", "omp_set_num_threads")
              for f in ("libgomp.so.1", "libgomp-a34b3233.so.1.0.0", "libomp.so", "libiomp5.so")),
            *((f, None, None, None, None) for f in ("libc.so.6", "libgompx.so", "libmkl_core.so", "libcompress.so")),
        ]
    }
)  # fmt: skip
def test_libraries_with_threads_are_known_by_their_files(file, name, variables, getter, setter):
    found = [k for k in thread_pools._KINDS if re.search(k.file, file)]
    assert [k.name for k in found] == ([] if name is None else [name])
    for k in found:
        assert k.variables == variables and getter in k.getters and setter in k.setters
        assert not set(k.getters) & set(k.setters)


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


def test_small_integers_are_not_rounded_as_16_bits_of_a_float():
    a, b = np.array([7, 300], np.int16), np.array([2, 1000], np.int16)
    for xs in ((a, b), (a, 2), (a, np.float32(2)), (a[0], b[0])):
        y, exact = elementwise.fused(lambda x, y: x / y, *xs), xs[0] / xs[1]
        assert y.dtype == exact.dtype and np.array_equal(y, exact)


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
    made = make_node(None, 0, 0, True, (), np.dtype("f"))
    made.view, made.gradient = view, gradient
    return made


def test_a_gradient_is_written_where_it_belongs_once():
    plain, first, second, full = node(), node("a"), node("b"), node("c", "there")
    assert walk.views((plain, full), (0, 1)) is None
    assert walk.views((plain, first), (0, 1)) == [None, "a"]
    assert walk.views((first, plain, second), (0, 2)) == ["a", "b"]
    assert walk.views((first, second, second, first), (0, 1, 2, 3)) == ["a", "b", None, None]
    assert walk.views((first, second), (1,)) == ["b"]


class Notes(FunctionNode):
    """Hands its input on twice or once, and its gradient with a note of its name."""

    def __init__(self, name, noted, count=1):
        self.name, self.noted, self.count = name, noted, count

    def forward(self, xs):
        return tuple(xs[0] * (k + 1) for k in range(self.count))

    def backward(self, wanted, gys):
        self.noted.append(self.name)
        return (sum(g * (k + 1) for k, g in enumerate(gys) if g is not None),)


def test_functions_of_one_rank_come_in_the_order_in_which_they_were_reached():
    noted, x = [], Variable(np.ones(2, "f"))
    parts = [Notes(name, noted).apply((x,))[0] for name in "abcd"]
    total = Notes("sum", noted).apply((F.concat([F.stack(parts[:2]), F.stack(parts[2:])], 0),))[0]
    F.sum(total).backward()
    assert noted == ["sum", "a", "b", "c", "d"]
    assert x.grad.tolist() == [4, 4]


@each(used=[(0,), (1,), (2, 0)])
def test_some_outputs_of_a_function_are_enough(used):
    x = Variable(np.ones(2, "f"))
    ys = Notes("three", [], 3).apply((x,))
    for k in used:
        ys[k].grad = np.full(2, 10, "f")
    dbrdist.core.backprop.backward([ys[k] for k in used])
    assert x.grad.tolist() == [10 * sum(k + 1 for k in used)] * 2


def test_slopes_may_differ_by_the_tolerance():
    problem = types.SimpleNamespace(checked=[Variable(np.zeros(3, "f"))])
    gradient_check._compare("first-order", 1.5, 1.0, 0.5, 0.0, problem)
    gradient_check._compare("first-order", 1.5, -1.0, 0.5, 2.0, problem)
    for numbers in ((1.625, 1.0, 0.5, 0.0), (-1.5, 1.0, 0.5, 0.5), (1.0, float("nan"), 1.0, 1.0)):
        with pytest.raises(AssertionError, match=r"first-order backward: .*parameters: \(3,\) float32"):
            gradient_check._compare("first-order", *numbers, problem)


def test_what_lies_as_images_has_its_channels_innermost():
    planes = np.zeros((2, 3, 4, 5), "f")
    pixels = np.ascontiguousarray(planes.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    for a, is_so in (
        (planes, False), (pixels, True), (pixels[:, :, :, :1], True), (pixels[:, :, :1], True),
        (pixels[:, :, :1, :1], False), (pixels[:, :1], False), (planes[..., ::4][..., :1], False),
        (np.zeros((2, 3, 3, 5), "f")[..., ::5], False), (np.zeros((2, 3, 5, 3), "f")[:, :, ::5], False),
        (np.broadcast_to(pixels[:, :, :1, :1], planes.shape), True), (pixels[:, ::-1], False),
        (np.zeros((5, 2, 3, 3), "f").transpose(1, 2, 3, 0)[..., :1], False),
        (np.broadcast_to(planes[:, :, :1, :1], planes.shape), False),
    ):  # fmt: skip
        assert backend.lies_as_images(a) == is_so, (a.shape, a.strides)


def test_slices_and_numbers_are_basic_and_arrays_are_not():
    for index in (3, np.int64(1), None, ..., slice(2), (0, None, ..., slice(1, 2), np.int32(1))):
        assert arrays._is_basic(index)
    for index in ([0], np.zeros(1, int), (0, [1]), (slice(2), np.array([True])), np.ones(2, bool)):
        assert not arrays._is_basic(index)


@each(first=["f", "d", "e", "i8"], second=["f", "d", "e", "i8"])
def test_products_are_written_into_memory_of_their_type(first, second):
    a, b = np.arange(6).reshape(2, 3).astype(first), np.arange(12).reshape(3, 4).astype(second)
    exact, kind = np.arange(6).reshape(2, 3) @ np.arange(12).reshape(3, 4), np.result_type(a, b)
    for room in (None, np.full((2, 4), 7, "f"), np.full((2, 4), 7, "d")):
        y = ops.matmul(a, b, room)
        assert y.dtype == kind and np.array_equal(y, exact)
        if first == second and room is not None and room.dtype == kind:
            assert y is room
        elif room is not None:
            assert (room == 7).all()


# ---- a rule of one parameter alone


@each(of=["grad", "grad_var"])
def test_a_hook_before_the_update_may_give_another_gradient(of):
    p = dbrdist.Parameter(np.array([1, 2], "f"))
    rule = p.update_rule = SGD(1).create_update_rule()
    rule.hyperparam.lr = 0.5
    rule.add_hook(lambda rule, p: setattr(p, of, getattr(p, of) * 10), "tenfold", "pre")
    p.grad = np.array([1, -1], "f")
    p.update()
    assert p.array.tolist() == [-4, 7] and rule.t == 1


@each(dtype=["float16", "bfloat16"])
def test_a_copy_in_float32_follows_what_is_assigned_between_updates(dtype):
    dtype = backend.as_dtype(dtype)
    p = dbrdist.Parameter(np.array([1, 2], dtype))
    rule = p.update_rule = SGD(1).create_update_rule()
    rule.use_fp32_update()
    rule.add_hook(lambda rule, p: None, "none", "pre")  # updated alone
    small = 2.0**-14  # lost in 16 bits beside 1, and kept in float32
    for _ in range(2):
        p.grad = np.array([small, 0], dtype)
        rule.hyperparam.lr = 1
        rule.update(p)
    assert p.array.astype("f").tolist() == [1, 2]
    np.testing.assert_array_equal(rule.state[FP32_PARAM], np.array([1 - 2 * small, 2], "f"))
    p.array[1] = 5
    p.grad = np.array([0, 1], dtype)
    rule.update(p)
    assert p.array.astype("f").tolist() == [1, 4]
    np.testing.assert_array_equal(rule.state[FP32_PARAM], np.array([1 - 2 * small, 4], "f"))


def test_gradients_are_brought_into_flat_memory_wherever_they_lie():
    params = [dbrdist.Parameter(np.zeros(2, "f")) for _ in range(4)]
    flat.gather(params)
    first, second, third, fourth = params
    first.grad_var = Variable(np.array([1, 2], "f"))
    second.node.gradient = np.array([3, 4], "f")
    third.node.view[...] = 9  # left from before; there is none now
    fourth.grad = np.array([5, 6], "f")
    flat.collect_gradients(params)
    assert [p.grad.tolist() for p in params] == [[1, 2], [3, 4], [0, 0], [5, 6]]
    assert all(p.node.gradient is p.node.view for p in params)


def test_a_rule_without_an_optimizer_serves_among_others():
    class Minus(UpdateRule):
        def step(self, hp, t, p, g, *state):
            assert isinstance(hp, Hyperparameter)
            p -= g

    link = dbrdist.Link()
    with link.init_scope():
        link.a, link.b = (dbrdist.Parameter(np.zeros(2, "f")) for _ in range(2))
    optimizer = SGD(0.5).setup(link)
    link.b.update_rule = Minus()
    for p in link.params():
        p.grad = np.ones(2, "f")
    optimizer.update()
    assert link.a.array.tolist() == [-0.5, -0.5] and link.b.array.tolist() == [-1, -1]


# ---- names, files and what waits ------------------------------------------------------------------------------------


def test_a_thousand_names_of_an_observer_are_kept():
    names = reporter._Names("main/")
    for i in range(1000):
        assert names[str(i)] == f"main/{i}"
    assert names["999"] is names["999"] and len(names) == 1000
    assert names["more"] == "main/more" and len(names) == 1000 and "more" not in names


def test_a_header_longer_than_its_file_is_named():
    for length in (3, 10, 11):
        data = length.to_bytes(8, "little") + b"{}"
        with pytest.raises(ValueError, match=rf"^its header claims {length} bytes$"):
            safetensors._parse(data)
    assert safetensors._parse((2).to_bytes(8, "little") + b"{}") == {}


class Waiting:
    """A normalization that waits for a ReLU."""

    def __init__(self, x):
        self.x, self.gamma, self.rectified, self.mask = x, Variable(x), "its ReLU", "its mask"
        self.taken, self.is_finished = False, False

    def output(self):
        return self.x

    def finish(self):
        self.is_finished = True


def test_only_the_relu_of_what_waits_is_there_already(monkeypatch):
    me, x, other = threading.get_ident(), np.zeros(1), np.zeros(1)
    for at, asked, found in ((me, x, ("its ReLU", "its mask")), (me, other, (None, None)), (me + 1, x, (None, None))):
        pending = Waiting(x)
        monkeypatch.setattr(fusion, "waiting", {at: pending})
        assert fusion.take(asked) == found
        is_taken = found[0] is not None
        assert pending.taken == is_taken and pending.is_finished == (not is_taken)
        assert bool(fusion.waiting) == is_taken
        assert fusion.expects_relu(pending.gamma, None) is is_taken
    pending = Waiting(x)
    monkeypatch.setattr(fusion, "waiting", {me: pending})
    fusion.take(x)
    assert fusion.take(x) == (None, "its mask") and pending.is_finished  # a second one is computed


def test_what_waits_is_written_before_gradients_are_computed(monkeypatch):
    x, pending = Variable(np.ones(2, "f")), Waiting(np.zeros(1))
    y = F.sum(x * x)
    monkeypatch.setattr(fusion, "waiting", {threading.get_ident(): pending})
    y.backward()
    assert pending.is_finished and not pending.taken and not fusion.waiting
    assert x.grad.tolist() == [2, 2]
