"""Tests of dbrdist.core.names.constructors; classes of the modules themselves are in test_later.py."""

from __future__ import annotations

import pytest

from dbrdist.core.names.constructors import explain_constructors


def made(module, base=object):
    class Made(base):
        def __init__(self, size):
            self.size = size

    Made.__module__ = module
    return Made


def test_classes_of_ours_explain_themselves_once():
    """With those that they are made of; not those of the core, nor of a program."""
    ours, core, other = made("dbrdist.links.x"), made("dbrdist.core.x"), made("program")
    derived = made("program", made("dbrdist.links.y"))
    explain_constructors({"ours": ours, "core": core, "other": other, "derived": derived, "number": 3})
    base = derived.__base__
    for cls, is_explained in ((ours, True), (core, False), (other, False), (derived, False), (base, True)):
        assert hasattr(cls.__init__, "__wrapped__") is is_explained
        assert cls(2).size == 2
    first = ours.__init__
    explain_constructors({"ours": ours})
    assert ours.__init__ is first
    with pytest.raises(TypeError, match="did you mean 'size'"):
        ours(sise=2)
