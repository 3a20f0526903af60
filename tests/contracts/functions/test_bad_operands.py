"""Every operation of ``cases.py`` is given None, lists, text, other ranks and sizes: what it refuses names it.

Which of these an operation takes is its own affair (and tested elsewhere); here an error has to name the function and
show what it was given, whoever raised it.
"""

from __future__ import annotations

import inspect
import pickle
import re
import traceback

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable
from dbrdist.core.tape.named_errors import naming_errors
from tests.each import each
from tests.functions import cases
from tests.functions.cases import every_case

NAMED = re.compile(rf"^({'|'.join([*F.__all__, 'CooMatrix'])}): ", re.MULTILINE)


def refused(call):
    """The error of a call; None where it is served, or where nothing of ours was called."""
    try:
        call()
    except Warning:  # it was served
        return None
    except Exception as e:
        frames = traceback.walk_tb(e.__traceback__)
        return e if any(f.f_globals["__name__"].startswith("dbrdist.") for f, _ in frames) else None
    return None


def said(error):
    """The words of an error with its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def others(xs, i):
    """Values that are not what operand ``i`` should be."""
    x = xs[i]
    yield "none", None
    yield "list", x.tolist()
    yield "text", np.full(x.shape, "a")
    yield "complex", x.astype(np.complex64)
    yield "one axis more", x[None]
    if x.ndim:
        yield "longer", np.concatenate([x, x], axis=-1)
        yield "no rows", x[:0]
        yield "no columns", x[..., :0]
        if len(x):
            yield "one axis less", np.asarray(x[0])


@every_case
@each(i=lambda case: range(len(case.shapes[0])))
def test_errors_name_the_function_and_what_it_got(case, i):
    xs = [np.asarray(x, np.float32) for x in case.inputs(case.shapes[0])]
    wrapped = [Variable(x) for x in xs]
    for what, x in others(xs, i):
        operand = Variable(x) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x
        failed = refused(lambda given=[*wrapped[:i], operand, *wrapped[i + 1 :]]: case.function(*given))
        if failed is None or _indexes_or_uses_operators(case):
            continue
        words = said(failed)
        if what == "complex" and words.startswith("ufunc '"):  # SciPy's real functions say it well
            continue
        assert NAMED.search(words), (what, words)
        assert "shape" in words or "got" in words, (what, words)


def _indexes_or_uses_operators(case):
    """Where the function is an operator of Variables, which NumPy's words and Python's serve."""
    return case in cases.ARITHMETIC or case.name.startswith(("get_item", "n_step", "forget"))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: F.softmax(None), "softmax: x: expected an array or Variable, got NoneType None; convert it first"),
        (lambda: F.softmax([1.0]), "softmax: x: expected an array or Variable, got list [1.0]; convert it first"),
        (lambda: F.concat([None]), "concat: xs[0]: expected an array or Variable, got NoneType None; convert it first"),
        (lambda: F.max(np.zeros((3, 0))), "got x: shape (3, 0) and dtype float64"),
        (lambda: F.minimum(np.zeros(2), np.zeros(3)), "minimum: operands could not be broadcast"),
        (lambda: F.vstack([np.zeros((1, 2)), np.zeros((1, 3))]), "vstack: concat: xs[1]: expected shape (1, 2)"),
        (
            lambda: F.transpose(np.zeros((2, 3)), (0, 5)),
            "axis 5 is out of bounds for array of dimension 2\ntranspose: got x: shape (2, 3)",
        ),
        (
            lambda: F.linear(np.zeros((2, 3)), np.zeros(3)),
            "linear: W: expected 2 axes: outputs, inputs, got shape (3,)",
        ),
        (
            lambda: F.linear(np.zeros((2, 3)), np.zeros((4, 3)), np.zeros((4, 1))),
            "linear: b: expected shape (4,) for W of shape (4, 3), got shape (4, 1)",
        ),
    ],
)
def test_sentences(call, words):
    with pytest.raises((ValueError, TypeError, IndexError)) as e:
        call()
    assert words in said(e.value)


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (np.exceptions.AxisError, lambda: F.transpose(np.zeros((2, 3)), (0, 5))),
        (FloatingPointError, lambda: F.prod(np.full(3, 1e200))),
    ],
)
def test_who_catches_an_error_of_numpy_by_its_type_still_does(kind, call):
    with np.errstate(all="raise"), pytest.raises(kind):
        call()


def test_what_is_wrong_with_the_call_itself_stays_in_pythons_words():
    with pytest.raises(TypeError, match=r"softmax\(\) missing 1 required positional argument: 'x'"):
        F.softmax()


def test_errors_of_the_users_own_code_stay_as_they_are():
    def own(x):
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        F.forget(own, np.zeros(2))
    error = KeyError("theirs")

    def raises(x):
        raise error

    with pytest.raises(KeyError) as e:
        naming_errors(raises)(1)
    assert e.value is error


def test_the_cause_of_an_error_is_kept():
    with pytest.raises(ValueError, match="max: zero-size") as e:
        F.max(np.zeros(0))
    assert str(e.value.__cause__).startswith("zero-size array")


def test_functions_are_pickled_by_their_public_name_and_keep_their_signature():
    for name in F.__all__:
        function = getattr(F, name)
        assert pickle.loads(pickle.dumps(function)) is function
        assert function.__name__ == name or callable(getattr(dbrdist.functions, function.__name__))
    assert str(inspect.signature(F.softmax)).startswith("(x: 'Operand', axis: 'int' = 1)")


def test_weights_without_elements_give_an_empty_or_a_zero_result():
    x = Variable(np.ones((1, 2, 5, 5), np.float32))
    for shape, expected in (((0, 2, 3, 3), (1, 0, 3, 3)), ((3, 2, 3, 0), (1, 3, 3, 6))):
        W = Variable(np.ones(shape, np.float32))
        y = F.convolution_2d(x, W)
        assert y.shape == expected and not y.array.any()
        y.grad = np.ones(expected, np.float32)
        x.cleargrad()
        y.backward()
        assert x.grad.shape == x.shape and not x.grad.any() and W.grad.shape == shape


SWAPPED = {
    "convolution_2d": lambda x, W: F.convolution_2d(x[:1, :, ::2], W, pad=1),
    "deconvolution_2d": lambda x, W: F.deconvolution_2d(x[:1, :, ::2], W, pad=1),
    "batch_normalization": lambda x, W: F.relu(F.batch_normalization(x, W[:, 0, 0, 0], W[:, 1, 0, 0])),
    "max_pooling_2d": lambda x, W: F.max_pooling_2d(x, 2),
    "average_pooling_2d": lambda x, W: F.average_pooling_2d(x, 2),
    "linear": lambda x, W: F.linear(x, F.reshape(F.concat([W] * 8), (-1, x.size // len(x)))),
    "softmax": lambda x, W: F.softmax(x),
    "log_softmax": lambda x, W: F.log_softmax(x, axis=3),
    "relu": lambda x, W: F.relu(x) + F.relu(x),
    "gelu": lambda x, W: F.gelu(x),
    "tanh": lambda x, W: F.tanh(x),
}


@each(name=list(SWAPPED))
def test_arrays_of_the_other_byte_order_are_computed_as_well(name):
    """Such as files have; a library that is told their type by its name would read other numbers."""
    rng = np.random.default_rng(0)
    x, W = rng.standard_normal((4, 16, 24, 24)), rng.standard_normal((16, 16, 3, 3))
    results = []
    for dtype in (np.dtype("f").newbyteorder(), np.dtype("d")):
        xs = [Variable(a.astype("f").astype(dtype)) for a in (x, W)]
        y = SWAPPED[name](*xs)
        y.grad = np.cos(np.arange(y.size)).reshape(y.shape).astype(y.dtype)
        y.backward()
        results.append([a.astype("d") for a in (y.array, *[v.grad for v in xs if v.grad is not None])])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1, np.abs(b).max()))


SEEDED = {
    "batch_normalization": lambda x: F.batch_normalization(x, np.ones(3, "f"), np.zeros(3, "f")),
    "max_pooling_2d": lambda x: F.max_pooling_2d(x, 2),
    "average_pooling_2d": lambda x: F.average_pooling_2d(x, 2),
    "convolution_2d": lambda x: F.convolution_2d(x, np.ones((2, 3, 3, 3), "f")),
}


@each(name=list(SEEDED), dtype=["float16", "float64", ">f4"], way=["grad", "vjp", "grad twice"])
def test_gradients_of_outputs_may_be_of_another_type(name, dtype, way):
    function, x = SEEDED[name], np.random.default_rng(0).standard_normal((2, 3, 8, 8), np.float32)
    v = Variable(x)
    y = function(v)
    gy = np.cos(np.arange(y.size)).reshape(y.shape).astype("e")  # exact in all of them

    def gradient(gy):
        if way == "vjp":
            return np.asarray(dbrdist.vjp(function, x)[1](gy)[0].array)
        return dbrdist.grad([y], [v], [Variable(gy)], enable_double_backprop=way == "grad twice")[0].array

    found = gradient(gy.astype(dtype))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, gradient(gy.astype("f")))
