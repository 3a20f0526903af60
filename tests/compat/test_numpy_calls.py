"""What NumPy 1 did with arrays is done for programs, and nothing else changes in them."""

import ast
import warnings

import numpy as np
import pytest

from dbrdist.compat.numpy_1 import numpy_calls


def execute(source, **names):
    """The names of a module with this source, compiled as a program's file."""
    names.update(numpy_calls.HELPERS, np=np)
    exec(numpy_calls.compiled(source, "program.py"), names)
    return names


def value(expression, **names):
    return execute(f"import math\nvalue = {expression}", **names)["value"]


@pytest.mark.parametrize("expression, expected", [
    ("int(np.array([3]))", 3),
    ("float(np.array([[2.5]]))", 2.5),
    ("complex(np.array([1j]))", 1j),
    ("math.sqrt(np.array([4.0]))", 2.0),
    ("math.pow(np.array([2.0]), np.array([3.0]))", 8.0),
    ("'%d of %.1f' % (np.array([3]), np.array([2.5]))", "3 of 2.5"),
    ("'%d' % np.array([3])", "3"),
    ("np.array(7.0, copy=False)", 7.0),
    ("np.fromstring(b'AB', dtype=np.uint8).tolist()", [65, 66]),
    ("np.arange(3, dtype='u1').tostring()", b"\0\1\2"),
    ("np.array([3, 9, 5]).ptp()", 6),
    ("np.array([1, 256], '<i2').newbyteorder().tolist()", [256, 1]),
])  # fmt: skip
def test_values_are_those_of_numpy_1(expression, expected):
    assert value(expression) == expected
    with pytest.raises((TypeError, ValueError, AttributeError)):  # NumPy 2 alone refuses it
        eval(expression, {"np": np, "math": __import__("math")})


@pytest.mark.parametrize("expression, expected", [
    ("int('ff', 16)", 255), ("int('12')", 12), ("float('1e3')", 1000.0), ("math.floor(2.5)", 2),
    ("'%s has %s' % ('it', [1])", "it has [1]"), ("'%(a)d' % {'a': 3}", "3"), ("5 % 3", 2),
    ("np.array([[1, 2], [3, 4]]).tolist()", [[1, 2], [3, 4]]), ("np.asarray([1], dtype='f').dtype.name", "float32"),
])  # fmt: skip
def test_what_numpy_2_accepts_stays(expression, expected):
    assert value(expression) == expected


@pytest.mark.parametrize("expression, error", [
    ("int(np.zeros(2))", TypeError), ("int([1])", TypeError), ("int('x')", ValueError), ("'%d' % 'x'", TypeError),
    ("math.sqrt(-1)", ValueError), ("np.array([1, [2, 3]], dtype='f')", ValueError), ("[].tostring()", AttributeError),
])  # fmt: skip
def test_errors_stay(expression, error):
    with pytest.raises(error):
        value(expression)


@pytest.mark.parametrize("call", ["np.array({})", "np.asarray({})", "np.random.permutation({})"])
def test_sequences_of_different_lengths_become_objects_with_a_warning(call):
    with pytest.warns(UserWarning, match="array of objects, as in NumPy 1.23") as found:
        a = value(call.format("[[1], [2, 3]]"))
    assert a.dtype == object and sorted(len(x) for x in a) == [1, 2]
    assert found[0].filename == "program.py"


def test_elements_take_arrays_of_one_element():
    names = execute(
        """
a = np.zeros(4)
a[0] = np.array([1.0])
a[1] = np.array([[2.0]])
a[2:] = np.array([3.0, 4.0])
d = {}
d["x"] = kept = np.array([5.0])
order = []
def note(x):
    order.append(x)
    return x
d[note("index")] = note("value")
"""
    )
    assert names["a"].tolist() == [1, 2, 3, 4] and names["d"]["x"] is names["kept"]
    assert names["order"] == ["value", "index"]  # as Python evaluates an assignment
    with pytest.raises(ValueError, match="sequence"):
        execute("a = np.zeros(2)\na[0] = np.zeros(3)")


def test_itemset():
    a = execute("a = np.zeros((2, 2))\na.itemset((0, 1), 3)\nb = np.zeros(())\nb.itemset(4)")
    assert a["a"].tolist() == [[0, 3], [0, 0]] and a["b"] == 4


def test_lines_and_docstrings_stay():
    source = (
        '"""What it is."""\nfrom __future__ import annotations\n\n\ndef f(x: Unknown):\n    return int(\n        x)\n'
    )
    names = execute(source)
    assert names["__doc__"] == "What it is." and names["f"].__code__.co_firstlineno == 5
    with pytest.raises(TypeError) as caught:
        names["f"]([])
    assert caught.traceback[1].lineno + 1 == 6


def test_other_code_is_not_touched():
    source = "y = f(x, *z, **w)\na[1:2] = b\na.b = int\nq = x @ y % 3"
    changed = numpy_calls._Change().visit(ast.parse(source))
    assert ast.unparse(changed) == source


def test_no_warning_without_cause():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert value("np.array([[1], [2]])").shape == (2, 1)


def test_stop_iteration_ends_a_generator_as_before_python_3_7():
    source = """
def pairs(it):
    "Two at a time."
    while True:
        yield next(it), next(it)

def first(n):
    for i in range(9):
        if i == n:
            raise StopIteration()
        yield i

def plain(it):
    def inner():
        yield 1
    return next(it)
"""
    names = execute(source)
    assert list(names["pairs"](iter(range(5)))) == [(0, 1), (2, 3)] and list(names["first"](2)) == [0, 1]
    assert list(names["first"](20)) == list(range(9))
    with pytest.raises(StopIteration):
        names["plain"](iter(()))
    with pytest.raises(RuntimeError, match="generator raised StopIteration"):
        exec(source, own := {}) or list(own["pairs"](iter(())))


def test_a_generator_keeps_its_docstring():
    assert execute("def numbers():\n    'the numbers'\n    yield 1")["numbers"].__doc__ == "the numbers"


@pytest.mark.parametrize("decorator", ["contextlib.contextmanager", "contextmanager"])
def test_the_end_of_an_iterator_leaves_a_with_block(decorator):
    """A loop that ends by StopIteration went on for ever with the last batch."""
    names = execute(f"""
import contextlib
from contextlib import contextmanager

@{decorator}
def timer():
    'a timer'
    yield

def first(it):
    with timer():
        return next(it)
""")
    assert names["first"](iter([3])) == 3
    with pytest.raises(StopIteration):
        names["first"](iter([]))
