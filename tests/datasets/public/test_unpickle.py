"""Tests of dbrdist.datasets.public.unpickle."""

from __future__ import annotations

import io
import pickle

import pytest

from dbrdist.datasets.public import unpickle


class Own:
    """A class of the program's."""


def test_classes_of_the_program_are_refused_unless_they_are_asked_for():
    data = pickle.dumps([Own()])
    with pytest.raises(unpickle.RefusedPickle, match=r"it refers to \S+\.Own, which plain data does not need"):
        unpickle.DataUnpickler(io.BytesIO(data), frozenset()).load()
    for allowed, classes in ((frozenset(), True), (frozenset({(__name__, "Own")}), False)):
        assert type(unpickle.DataUnpickler(io.BytesIO(data), allowed, classes).load()[0]) is Own
