"""Tests of dbrdist.utils.marks."""

import warnings

import pytest

import dbrdist
from dbrdist import utils


def test_marks():
    with pytest.warns(FutureWarning, match="f is experimental"):
        utils.experimental("f")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        utils.nondeterministic("f")
    with dbrdist.using_config("debug", True), pytest.warns(UserWarning, match="f may give slightly other numbers"):
        utils.nondeterministic("f")


def test_final():
    class Base(utils.enable_final()):
        @utils.final
        def f(self):
            pass

        @utils.final(action=DeprecationWarning)
        def g(self):
            pass

        def h(self):
            pass

    with pytest.raises(TypeError, match=r"Wrong.f overrides Base.f, which is final"):

        class Wrong(Base):
            def f(self):
                pass

    with pytest.warns(DeprecationWarning, match=r"Old.g overrides Base.g"):

        class Old(Base):
            def g(self):
                pass

            def h(self):
                pass
