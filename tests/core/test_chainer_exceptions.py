"""Exceptions as programs of Chainer meet them: their classes, and that they travel."""

import copy
import inspect
import pickle

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import errors
from dbrdist.core.tape.checks import ArgumentError, OperandTypeError
from dbrdist.utils import type_check

x = np.zeros((2, 3), np.float32)
OURS = [
    *(c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Exception)),
    ArgumentError,
    OperandTypeError,
    type_check.InvalidType,
    dbrdist.gradient_check.NondifferentiableError,
]


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_each_can_be_made_from_a_message_copied_and_pickled(kind):
    error = kind("what is wrong")
    for other in (error, copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert type(other) is kind and str(other) == "what is wrong"


def test_what_functions_and_links_raise_travels_with_its_words():
    with pytest.raises(ArgumentError) as raised:
        L.Linear(5, 2)(x)
    error = raised.value
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert str(other) == str(error) and other.links == error.links == ["Linear"]
        assert (other.expect, other.actual) == (error.what, error.got)
    made = type_check.InvalidType("n == 2", "3 != 2", "of f")
    assert str(pickle.loads(pickle.dumps(made))) == "of f\n\nExpect: n == 2\nActual: 3 != 2"


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.concat([x, np.zeros((2, 3, 1), np.float32)]),
        lambda: F.reshape(x, (4, 4)),
        lambda: F.linear(x, np.zeros((4, 2), np.float32)),
        lambda: F.relu(np.zeros(2, np.int32)),
        lambda: F.maximum(x, np.zeros((4, 5), np.float32)),
        lambda: F.vstack([np.zeros(3, np.float32), np.zeros((3, 4), np.float32)]),
        lambda: F.broadcast_to(x, (5, 5)),
        lambda: F.matmul(x, x),
    ],
)
def test_operands_that_do_not_fit_raise_what_chainer_raises(call):
    """``except type_check.InvalidType`` is how Chainer's programs catch it; ValueError or TypeError still do."""
    with pytest.raises(type_check.InvalidType) as raised:
        call()
    assert isinstance(raised.value, (ValueError, TypeError))


@pytest.mark.parametrize("sign", ["add", "sub", "mul", "truediv", "pow", "floordiv"])
@pytest.mark.parametrize("is_variable", [False, True])
def test_operators_raise_it_too(sign, is_variable):
    a, b = dbrdist.Variable(np.ones(2, np.float32)), np.ones(3, np.float32)
    b = dbrdist.Variable(b) if is_variable else b
    for left, right in ((a, b), (b, a)) if is_variable else ((a, b),):
        with pytest.raises(type_check.InvalidType, match="could not be broadcast"):
            getattr(left, f"__{sign}__")(right)


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.prod(x, axis="a"),
        lambda: F.logsumexp(x, 1.0),
        lambda: F.sum(x, (0, "b")),
        lambda: F.moveaxis(x, 0.5, 1),
        lambda: F.moveaxis(x, 0, (1, 2.0)),
        lambda: F.repeat(x, 2, axis=True),
        lambda: F.repeat(x, "a"),
        lambda: L.GroupNormalization(1.5)(x),
        lambda: bool(dbrdist.Variable(x)),
    ],
)
def test_arguments_of_another_type_are_type_errors(call):
    with pytest.raises(TypeError):
        call()


def test_forget_refuses_what_is_no_variable_by_its_place():
    assert F.forget(lambda v: (v, v + 1), x)[1].array.tolist() == (x + 1).tolist()
    for n, word in ((1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (12, "12th"), (21, "21st")):
        with pytest.raises(RuntimeError, match=f"{word} element of a returned tuple is not Variable, but is .*int"):
            F.forget(lambda v, n=n: (*[v] * (n - 1), 1), x)
    with pytest.raises(RuntimeError, match=r"a tuple of Variables or a Variable are expected, but .*int"):
        F.forget(lambda v: 1, x)
    with pytest.raises(TypeError, match="func must be callable"):
        F.forget(None, x)
