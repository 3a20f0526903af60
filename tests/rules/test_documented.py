"""Every public name documents all of its arguments, and the examples in docstrings run."""

from __future__ import annotations

import doctest
import inspect
import warnings

import documented
import pytest

import dbrdist

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
# Public names without an example: base classes of tests, and errors.
WITHOUT_EXAMPLE = {
    "onnx.OperatorError", "testing.FunctionTestCase", "testing.FunctionTestError", "testing.InitializerArgument",
    "testing.LinkInitializersTestCase", "testing.LinkTestCase", "testing.LinkTestError",
    "testing.distribution_unittest", "testing.inject_backend_tests", "testing.save_and_load_hdf5",
    "testing.unary_math_function_unittest",
}  # fmt: skip


@pytest.mark.slow
def test_public_names_document_every_argument():
    names = documented.public()
    assert len(names) > 600
    assert {name: found for name, value in names.items() if (found := documented.missing(value))} == {}


@pytest.mark.slow
def test_public_methods_describe_every_argument():
    methods = documented.methods()
    assert len(methods) > 550
    assert {name: found for name, entry in methods.items() if (found := documented.missing_of_method(*entry))} == {}


def test_what_counts_as_described_in_a_method():
    class Base:
        def f(self, x, axis, *_):
            """The sum of ``x`` over an axis."""

        @classmethod
        def g(cls, size):
            """``size``."""

    class Derived(Base):
        def f(self, x, axis, key):
            """Another sum.

            Args:
                axis: the axis to sum over.
            """

    assert documented.parameters_of(Base.__dict__["f"]) == ["x", "axis"]
    assert documented.missing_of_method(Base, "f", Base.__dict__["f"]) == ["axis"]
    assert documented.missing_of_method(Base, "g", Base.__dict__["g"]) == ["size"]
    assert documented.missing_of_method(Derived, "f", Derived.__dict__["f"]) == ["key"]


def test_public_names_have_an_example():
    without = {name for name, value in documented.public().items() if not documented.has_example(value)}
    assert without == WITHOUT_EXAMPLE


@pytest.mark.slow
@pytest.mark.parametrize("module", documented.MODULES)
def test_examples_run(module):
    pytest.importorskip("scipy", reason="SciPy is not installed")
    pytest.importorskip("PIL", reason="Pillow is not installed")
    parser, count = doctest.DocTestParser(), 0
    for name, value in documented.public().items():
        doc = inspect.getdoc(value) or ""
        if name.rpartition(".")[0] != module or ">>>" not in doc:
            continue
        values: dict = {}
        exec(documented.PRELUDE, values)
        words: list[str] = []
        runner = doctest.DocTestRunner(optionflags=FLAGS)
        dbrdist.random.set_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            runner.run(parser.get_doctest(doc, values, name, None, None), out=words.append)
        count += runner.tries
        assert runner.failures == 0, "".join(words)
    assert count > 0


def test_what_counts_as_described():
    def f(x, axis=0, *, eps=1.0):
        """One line.

        Args:
            x, axis: an array
                and its axis.
            eps: a number.

        Returns:
            other: not an argument.
        """

    def g(x):
        """x: not in a section."""

    def h(rate=1, **kwargs):
        """One line.

        Args:
            rate: the rate; default 1.
        """

    assert documented.missing(f) == [] and documented.missing(g) == ["x"]
    assert documented.missing(h) == ["rate", "kwargs"]
    assert documented.described(inspect.getdoc(f)) == {"x", "axis", "eps"}
