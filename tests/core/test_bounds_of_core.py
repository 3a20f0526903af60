"""Bounds and refusals of optimizers' rules, devices, saved files and checks: just within, and just outside."""

from __future__ import annotations

import io
import json
import sys
import types
import zipfile

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Parameter, Variable, gradient_check, optimizers
from dbrdist.core import backend, missing_names, named_errors, rows, safetensors, serializer, update_rule
from dbrdist.core.gradient_check import Kinks
from dbrdist.core.sparse import CooMatrix, to_coo
from dbrdist.errors import CheckpointError
from dbrdist.utils import type_check as T
from tests.each import each


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


# ---- optimizers and their rules -------------------------------------------------------------------------------------


def with_gradients(optimizer=None, dtype=np.float32):
    link = L.Linear(2, 3, initialW=dbrdist.initializers.Constant(1.0), initial_bias=1.0)
    for p in link.params():
        p.array = p.array.astype(dtype)
        p.grad = np.ones_like(p.array)
    return link, (optimizer or optimizers.SGD(lr=0.5)).setup(link)


@each(interval=[0, -1])
def test_an_interval_of_a_loss_scale_is_one_update_at_least(interval):
    _, optimizer = with_gradients()
    with pytest.raises(ValueError, match=f"interval: expected 1 or more updates, got {interval}"):
        optimizer.loss_scaling(interval)
    optimizer.loss_scaling(1)
    optimizer.check_nan_in_grads()
    optimizer.update_loss_scale()
    assert optimizer._loss_scale == 2.0


def test_a_constant_loss_scale_does_not_move():
    _, optimizer = with_gradients()
    optimizer.loss_scaling(scale=8.0)
    optimizer.check_nan_in_grads()
    optimizer.update_loss_scale()
    assert optimizer._loss_scale == 8.0
    with pytest.raises(ValueError, match="loss_scale: expected a number above 0 or None, got 0"):
        optimizer.set_loss_scale(0)
    optimizer.set_loss_scale(None)
    optimizer.update_loss_scale()
    assert optimizer._loss_scale is None


def test_a_dynamic_loss_scale_halves_then_grows_by_its_interval():
    link, optimizer = with_gradients()
    optimizer.loss_scaling(4)
    seen = []
    for bad in (False, False, True, False, False, False, False):
        link.b.grad[0] = np.inf if bad else 1
        if bad:
            with pytest.warns(
                RuntimeWarning, match=r"NaN or infinity in the gradient of /b at loss scale 4.0: update 1 "
            ):
                optimizer.check_nan_in_grads()
        else:
            optimizer.check_nan_in_grads()
        assert optimizer.is_safe_to_update() is not bad
        optimizer.update_loss_scale()
        seen.append(optimizer._loss_scale)
    np.testing.assert_allclose(seen, [2, 4, 2, *(2 * 2 ** (n / 4) for n in (1, 2, 3, 4))], rtol=1e-12)


def test_unsafe_gradients_are_found_where_parameters_are_not_updated_together():
    link, optimizer = with_gradients()
    link.W.update_rule.enabled = False
    optimizer.loss_scaling()
    link.W.grad[0] = np.nan
    with pytest.warns(RuntimeWarning, match="gradient of /W"):
        optimizer.check_nan_in_grads()
    assert not optimizer.is_safe_to_update()


def test_members_kept_for_old_programs():
    link, optimizer = with_gradients()
    optimizer.use_cleargrads()
    with pytest.raises(ValueError, match=r"use_cleargrads: .* False is not supported"):
        optimizer.use_cleargrads(False)
    link.cleargrads()
    optimizer.reallocate_cleared_grads()
    assert link.W.grad.tolist() == [[0, 0]] * 3
    with pytest.raises(RuntimeError, match=r"SGD: it has no target yet; call optimizer.setup\(link\) first"):
        optimizers.SGD().update()
    with pytest.raises(NotImplementedError):
        dbrdist.Optimizer().update()


def test_a_hook_has_a_name_a_time_and_can_be_called():
    def hook(*args): ...

    for owner in (with_gradients()[1], with_gradients()[0].W.update_rule):
        with pytest.raises(TypeError, match="hook: expected a callable, got int"):
            owner.add_hook(3)
        with pytest.raises(ValueError, match="timing: expected 'pre', 'post' or 'auto', got 'later'"):
            owner.add_hook(hook, timing="later")
        with pytest.raises(ValueError, match=r"hook: it has no name attribute, so give add_hook\(hook, name=...\)"):
            owner.add_hook(type("Nameless", (), {"__call__": hook})())
        with pytest.raises(KeyError, match="no hook named 'hook'"):
            owner.remove_hook("hook")
        for timing in ("pre", "post"):
            owner.add_hook(hook, timing=timing)
            for again in ("pre", "post"):
                with pytest.raises(KeyError, match="a hook named 'hook' is already there"):
                    owner.add_hook(hook, timing=again)
            owner.remove_hook("hook")
        owner.add_hook(hook, "other")
        owner.remove_hook("other")


def test_a_hook_of_one_rule_is_called_before_or_after_its_update_alone():
    link, optimizer = with_gradients()
    seen = []
    for timing in ("pre", "post"):
        link.W.update_rule.add_hook(
            lambda rule, p, timing=timing: seen.append((timing, p.name, float(p.array[0, 0]))), timing, timing
        )
    optimizer.update()
    assert seen == [("pre", "W", 1.0), ("post", "W", 0.5)]


def test_a_rule_updates_one_parameter_unless_it_is_off():
    link, _ = with_gradients()
    link.W.update()
    assert link.W.array[0, 0] == 0.5 and link.W.update_rule.t == 1 and link.b.array[0] == 1
    link.W.update_rule.enabled = False
    link.W.update()
    assert link.W.array[0, 0] == 0.5 and link.W.update_rule.t == 1
    link.W.update_rule.enabled = True
    link.W.cleargrad()
    link.W.update()
    assert link.W.array[0, 0] == 0.5 and link.W.update_rule.t == 2
    Parameter(ones(2)).update()  # no rule
    late = L.Linear(None, 3)
    optimizers.SGD().setup(late)
    late.W.update()
    assert late.W.update_rule.t == 0


def test_a_rule_without_a_formula_says_so():
    rule = dbrdist.UpdateRule()
    p = Parameter(ones(2))
    p.update_rule, p.grad = rule, ones(2)
    with pytest.raises(NotImplementedError, match="UpdateRule defines neither step nor update_core"):
        p.update()


def test_numbers_of_rules_are_shown_by_name():
    hp = update_rule.Hyperparameter()
    hp.b, hp.a = 2, 1.5
    assert repr(hp) == "Hyperparameter(a=1.5, b=2)"


@each(size=[update_rule.CHUNK_ELEMENTS - 1, update_rule.CHUNK_ELEMENTS, update_rule.CHUNK_ELEMENTS + 1, 5])
def test_lent_memory_has_size_and_type(size):
    for dtype in (np.float32, np.float64):
        a = update_rule.workspace(np.empty(size, dtype))
        a[:] = 1
        assert a.shape == (size,) and a.dtype == dtype
        again = update_rule.workspace(np.empty(size, dtype))
        assert again.shape == (size,) and np.shares_memory(a, again) == (size <= update_rule.CHUNK_ELEMENTS)


def test_lent_memory_is_forgotten_from_some_number_on(monkeypatch):
    monkeypatch.setattr(update_rule, "_MAX_LENT", 3)
    monkeypatch.setattr(update_rule, "_scratch", update_rule._Scratch())
    for n in range(1, 9):
        assert update_rule.workspace(np.empty(n)).shape == (n,)
        assert len(update_rule._scratch.lent) <= 3
    assert sorted(update_rule._scratch.lent) == [7, 8]


# ---- devices --------------------------------------------------------------------------------------------------------


def test_devices_by_name_and_number():
    for spec in ("@numpy", "cpu", "native", None, np, -1, "-1", np.int64(-1), backend.Device("numpy")):
        assert dbrdist.get_device(spec) == backend.Device("numpy")
    for spec, n in ((0, 0), ("0", 0), ("@cupy:1", 1), ("cuda", 0), ("gpu:2", 2), (("@cupy", 3), 3), (np.int32(4), 4)):
        device = dbrdist.get_device(spec)
        assert (device.module, device.index, device.name) == ("cupy", n, f"@cupy:{n}")
    for spec in ("tpu", "@cupy:x", "@numpy:0", "cuda:-1", ("@cupy", 0, 0), (), 1.5, ["@numpy"]):
        with pytest.raises(ValueError, match="expected a device such as '@numpy', '@cupy:0' or a GPU number, got"):
            dbrdist.get_device(spec)


def test_devices_are_values():
    cpu, gpu = backend.Device("numpy"), backend.Device("cupy", 1)
    assert cpu == backend.Device("numpy") != gpu and cpu != "@numpy" and gpu != backend.Device("cupy", 0)
    assert len({cpu, backend.Device("numpy"), gpu, backend.Device("cupy", 1)}) == 2
    assert repr(gpu) == "<Device @cupy:1>" and str(cpu) == "@numpy" and cpu.xp is np
    cpu.use()
    a, b = ones(2), ones(3)
    sent = cpu.send({"a": a, "b": [b, (a,)]})
    assert sent["a"] is a and sent["b"][0] is b and sent["b"][1][0] is a and type(sent["b"][1]) is tuple
    with dbrdist.using_device("@numpy") as used:
        assert used == cpu


def test_what_goes_together():
    assert backend.is_arrays_compatible([]) and backend.is_arrays_compatible([None, ones(1), ones(2)])
    assert not backend.lies_as_images(ones(2, 3, 4, 5))
    assert backend.lies_as_images(ones(2, 4, 5, 3).transpose(0, 3, 1, 2))
    assert not backend.lies_as_images(ones(2, 4, 5, 1).transpose(0, 3, 1, 2))
    assert not backend.lies_as_images(ones(2, 1, 1, 3).transpose(0, 3, 1, 2))
    assert backend.lies_as_images(ones(2, 5, 1, 3).transpose(0, 3, 1, 2))
    assert backend.lies_as_images(ones(2, 1, 5, 3).transpose(0, 3, 1, 2))


# ---- saved files ----------------------------------------------------------------------------------------------------


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


def archive(num_entries, num_bytes=0):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as z:
        for i in range(num_entries):
            z.writestr(f"e{i}", bytes(num_bytes))
    return file


def test_archives_have_limits(monkeypatch):
    monkeypatch.setattr(serializer, "_MAX_ENTRIES", 3)
    serializer.check_archive_size(archive(3))
    with pytest.raises(CheckpointError, match="expected at most 3 entries in an archive, found 4"):
        serializer.check_archive_size(archive(4))
    monkeypatch.setattr(serializer, "_MIN_LIMIT_BYTES", 1000)
    monkeypatch.setattr(serializer, "_MAX_FACTOR", 0)
    serializer.check_archive_size(archive(1, 1000))
    with pytest.raises(CheckpointError, match="to unpack to at most 1,000, but it claims 1,001"):
        serializer.check_archive_size(archive(1, 1001))
    small = archive(1, 5000)
    size = len(small.getvalue())
    monkeypatch.setattr(serializer, "_MAX_FACTOR", 5000 / size)
    serializer.check_archive_size(small)
    other = io.BytesIO(b"no archive")
    other.read()
    serializer.check_archive_size(other)
    assert other.tell() == 0


def test_serializers_have_to_define_both_of_their_members():
    for call in (lambda s: s["a"], lambda s: s("a", 1)):
        with pytest.raises(NotImplementedError):
            call(dbrdist.AbstractSerializer())


# ---- sparse matrices ------------------------------------------------------------------------------------------------


def test_sparse_matrices_are_refused_by_what_is_wrong_in_them():
    zero = np.zeros(2, np.int32)
    one = CooMatrix(ones(2), zero, zero, (1, 1))
    assert one.to_dense().tolist() == [[2]] and one.order == "C"
    for arguments, words in (
        ((ones(), zero, zero, (1, 1)), "data: expected 1 axis, or 2 for a batch"),
        ((ones(1, 1, 2), zero, zero, (1, 1)), "data: expected 1 axis, or 2 for a batch"),
        ((ones(2), zero[:1], zero, (1, 1)), r"row: expected integers of shape \(2,\) to match data"),
        ((ones(2), zero, zero.astype("f"), (1, 1)), r"col: expected integers of shape \(2,\) to match data"),
        ((ones(2), zero, zero, (1,)), "shape: expected two numbers from 1 on"),
        ((ones(2), zero, zero, (0, 1)), "shape: expected two numbers from 1 on"),
        ((ones(2), zero, zero, (1, 0)), "shape: expected two numbers from 1 on"),
        ((ones(2), zero, zero, (1, 1), "K"), "order: expected 'C', 'F', 'other' or None, got 'K'"),
        ((ones(2), zero + 1, zero, (1, 2)), r"row: expected numbers below 1 for shape \(1, 2\)"),
        ((ones(2), zero, zero + 1, (2, 1)), r"col: expected numbers below 1 for shape \(2, 1\)"),
    ):
        with pytest.raises((ValueError, TypeError), match="CooMatrix: " + words):
            CooMatrix(*arguments)
    assert CooMatrix(ones(0), zero[:0], zero[:0], (1, 1)).to_dense().tolist() == [[0]]
    assert CooMatrix(ones(1), zero[:1] - 1, zero[:1] - 1, (1, 1)).to_dense().tolist() == [[0]]
    x = np.array([[0, 2.0], [0, 0]])
    assert to_coo(x, 3).row.tolist() == [0, -1, -1] and to_coo(x, 1).data.array.tolist() == [2]
    assert to_coo(np.stack([x, x + 1])).to_dense().tolist() == [x.tolist(), (x + 1).tolist()]


# ---- checks of types ------------------------------------------------------------------------------------------------


def test_expressions_are_written_as_they_were():
    x = T.Variable(np.arange(24).reshape(2, 3, 4), "x")
    for made, written in (
        (x[0], "x[0]"), (x[1, 2], "x[1, 2]"), (x[..., 0], "x[..., 0]"), (x[1:], "x[1:]"), (x[:2], "x[:2]"),
        (x[0:2], "x[0:2]"), (x[::2], "x[::2]"), (x[0, :1], "x[0, :1]"), (x.shape[0], "x.shape[0]"),
        ((x.ndim + 1) * 2, "(x.ndim + 1) * 2"), (x.ndim - (x.ndim - 1), "x.ndim - (x.ndim - 1)"),
    ):  # fmt: skip
        assert str(made) == written
    assert (x[0, :1]).eval().tolist() == [[0, 1, 2, 3]]
    with pytest.raises(RuntimeError, match="has no truth value of its own"):
        bool(x.ndim == 3)
    with pytest.raises(AttributeError, match="__array__"):
        x.__array__  # noqa: B018
    for kind in (T.Expr, T.Testable):
        with pytest.raises(NotImplementedError):
            (kind().eval if kind is T.Expr else kind().expect)()
    with pytest.raises(NotImplementedError):
        str(T.Expr())


@each(sign=["==", "!=", "<", "<=", ">", ">="], n=[2, 3, 4])
def test_comparisons_hold_or_say_the_opposite(sign, n):
    left = T.Variable(n, "n")
    holds = {"==": n == 3, "!=": n != 3, "<": n < 3, "<=": n <= 3, ">": n > 3, ">=": n >= 3}[sign]
    opposite = {"==": "!=", "!=": "==", "<": ">=", "<=": ">", ">": "<=", ">=": "<"}[sign]
    test = {
        "==": left == 3, "!=": left != 3, "<": left < 3, "<=": left <= 3, ">": left > 3, ">=": left >= 3
    }[sign]  # fmt: skip
    if holds:
        T.expect(test)
    else:
        with pytest.raises(T.InvalidType, match=f"n {sign} 3[\\s\\S]*{n} {opposite} 3"):
            T.expect(test)
        with dbrdist.using_config("type_check", False):
            T.expect(test)


def test_what_is_expected_is_a_comparison():
    T.expect(True, np.bool_(True))
    with pytest.raises(T.InvalidType, match="a comparison that holds"):
        T.expect(True, False)
    with pytest.raises(TypeError, match=r"type_check.expect: expected comparisons, got int"):
        T.expect(1)
    assert repr(T.TypeInfo((2, 3), np.dtype("f4"))) == "TypeInfo((2, 3), float32)"
    info = T.TypeInfo((2, 3), np.dtype("f4"))
    assert (info.ndim, info.size, T.TypeInfo((), "f4").size) == (2, 6, 1)
    in_types = T.TypeInfoTuple((info, info))
    assert str(in_types) == "in_types" and in_types.size().eval() == 2 and str(in_types.size()) == "in_types.size"
    assert T.prod(T.Variable((2, 3), "s")).eval() == 6
    T.expect_broadcast_shapes("words", (2, 1), (3,))
    with pytest.raises(T.InvalidType, match="words"):
        T.expect_broadcast_shapes("words", (2,), (3,))


# ---- other checks ---------------------------------------------------------------------------------------------------


def test_names_that_are_missing_tell_what_is_near():
    module = types.SimpleNamespace(relu=1, _relu6=2)
    here = vars(module)
    error = missing_names.absent("chainer.functions", "relv", here, "dbrdist.functions")
    assert isinstance(error, AttributeError) and error.name == "relv"
    assert str(error) == "module 'dbrdist.functions' has no attribute 'relv'; did you mean 'relu'?"
    assert str(missing_names.absent("chainer.functions", "ReLU", here)).endswith(
        "module 'chainer.functions' has no attribute 'ReLU'; did you mean 'relu'?"
    )
    assert str(missing_names.absent("chainer.functions", "_relu", here)).endswith("has no attribute '_relu'")
    assert str(missing_names.absent("chainer.functions", "zzzz", here)).endswith("has no attribute 'zzzz'")
    assert "is a name of Chainer" not in str(missing_names.absent("chainer.links", "softmax_cross_entropy", here))
    with pytest.raises(
        ImportError, match=r"cannot import name 'relv': module 'dbrdist.functions' has no attribute 'relv'"
    ):
        from dbrdist.functions import relv  # noqa: F401
    with pytest.raises(AttributeError, match="did you mean 'relu'"):
        F.relv  # noqa: B018
    near = missing_names.no_module("chainer.fonctions", ["chainer.functions", "chainer.links"])
    assert str(near) == "No module named 'chainer.fonctions' in Chainer 7.8.1; did you mean 'chainer.functions'?"
    assert near.name == "chainer.fonctions"
    assert str(missing_names.no_module("zzz", ["chainer.links"])) == "No module named 'zzz' in Chainer 7.8.1"


def test_arguments_in_messages_are_short():
    for value, shown in (
        (int, "int"),
        ([ones(1)] * 4, f"[{', '.join(['shape (1,) and dtype float32'] * 4)}]"),
        ([ones(1)] * 5, f"[{', '.join(['shape (1,) and dtype float32'] * 4)}, ...]"),
        ([1, 2], "list [1, 2]"),
        ("a" * 60, "str '" + "a" * 39),
        (None, "NoneType None"),
    ):
        assert named_errors._seen(value) == shown


@each(**{"error, kind, words": [
    (KeyError("a b"), KeyError, "f: a b; got x: int 1"), (ValueError("a", 2), ValueError, "f: ('a', 2); got x: int 1"),
    (ValueError(), ValueError, "f: ; got x: int 1"), (TypeError("f: as it is"), TypeError, "f: as it is"),
    (type("_Own", (TypeError,), {"__module__": "numpy._core"})("a"), TypeError, "f: a; got x: int 1"),
    (ZeroDivisionError("a"), ZeroDivisionError, "a"),
]})  # fmt: skip
def test_errors_keep_their_kind_and_words(error, kind, words):
    def f(x):
        exec("raise error", {"__name__": "numpy.made", "error": error})

    with pytest.raises(kind) as raised:
        named_errors.naming_errors(f)(1)
    assert type(raised.value) is kind and raised.value.args == (words,)
    assert getattr(raised.value, "__notes__", []) == (["f: got x: int 1"] if words == "a" else [])


def test_debug_mode_ends_with_its_block():
    for outer in (False, True):
        with dbrdist.using_config("debug", outer):
            for debug in (True, False):
                mode = dbrdist.DebugMode(debug)
                with mode:
                    assert dbrdist.is_debug() is debug
                assert dbrdist.is_debug() is outer
                with pytest.raises(ValueError, match="x"), dbrdist.DebugMode(debug):
                    raise ValueError("x")
                assert dbrdist.is_debug() is outer


def test_nothing_is_registered_before_a_link_is_made():
    class Early(dbrdist.Chain):
        def __init__(self):
            assert not self.within_init_scope
            self.before = 1
            super().__init__()
            with self.init_scope():
                assert self.within_init_scope
            assert not self.within_init_scope

    assert Early().before == 1


def test_a_default_that_was_never_there_cannot_be_forgotten():
    with pytest.raises(AttributeError, match="no configuration entry named 'nothing'"):
        del dbrdist.global_config.nothing
    dbrdist.global_config.something = 3
    assert dbrdist.config.something == 3
    del dbrdist.global_config.something
    assert not hasattr(dbrdist.config, "something")


def test_rows_take_their_arguments_once_and_whole():
    with pytest.raises(TypeError, match="elu: expected an argument 'x', got none"):
        F.elu()
    with pytest.raises(TypeError, match=r"elu: expected the arguments x, alpha, got {'beta': 1}"):
        F.elu(ones(1), beta=1)
    with pytest.raises(TypeError, match="elu: expected the arguments x, alpha, got 3"):
        F.elu(ones(1), 1.0, 2.0)
    assert F.elu(-ones(1), alpha=np.float64(2)).dtype == np.float32
    rows.Row("f", np.exp, (lambda gy, x, y: gy,), "f", ("x",), "float", (0, 1), {}, None, False, False)
    for given in ((), (lambda w: w,), (lambda x: x, lambda x: x)):
        with pytest.raises(TypeError, match=r"row 'f': expected a derivative by each of .*x.*, got names "):
            rows.Row("f", np.exp, given, "f", ("x",), "float", (0, 1), {}, None, False, False)


@each(difference=[0.0, 0.9, 1.1])
def test_kinks_are_told_from_rounding(difference):
    kinks = Kinks(atol=1.0, rtol=0.0)
    right = 1 + difference
    values = {-2: -2.0, -1: -1.0, 1: right, 2: 2 * right}
    if difference > 1:
        with pytest.raises(
            gradient_check.NondifferentiableError, match=r"got 1 to the left and 2.1 to the right within 2"
        ):
            kinks.look(values, 0.0, 1.0)
    else:
        kinks.look(values, 0.0, 1.0)


def test_gradients_are_checked_for_some_inputs_only():
    x, y, g = np.array([1.0, 2.0]), np.array([3.0, 4.0]), np.array([0.5, -1.0])

    def wrong_by_second(a, b):
        return a * a + Variable(b.array)

    gradient_check.check_backward(wrong_by_second, (x, y), g, no_grads=[False, True])
    with pytest.raises(AssertionError):
        gradient_check.check_backward(wrong_by_second, (x, y), g)
    square = lambda a, b: a * a * b  # noqa: E731
    gradient_check.check_double_backward(square, (x, y), g, (g,), no_grads=[False, True])
    gradient_check.check_double_backward(square, (x, y), g, (g, g), no_grads=[False, True])
    gradient_check.check_double_backward(square, (x, y), g, (g, g), no_grads=[False, False])


def test_no_cupy_is_said_in_words(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"CuPy|cupy"):
        backend.import_cupy()
    assert "upy" in backend.why_no_nccl().lower()
