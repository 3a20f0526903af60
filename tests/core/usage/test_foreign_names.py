"""Names of PyTorch are answered with ours, and every name that an answer gives is there."""

from __future__ import annotations

import importlib
import re

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import datasets, iterators, optimizers
from dbrdist.core.usage import foreign_tables
from dbrdist.errors import UsageWarning

X = dbrdist.Variable(np.zeros((2, 3), np.float32))
OBJECTS = {
    "Link": L.Linear(2, 2),
    "Optimizer": optimizers.SGD(),
    "Variable": X,
    "Iterator": iterators.SerialIterator([1, 2], 1),
    "DatasetMixin": dbrdist.dataset.DatasetMixin(),
}
NAMES = {
    "dbrdist": dbrdist, "F": F, "L": L, "optimizers": optimizers, "iterators": iterators, "datasets": datasets,
    "numpy": np, "extensions": dbrdist.training.extensions,
}  # fmt: skip
MODULES = {path: importlib.import_module("dbrdist" + path) for path in foreign_tables.OF_MODULES}


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_says_what_to_write(kind):
    for name, ours in foreign_tables.OF_OBJECTS[kind].items():
        if not hasattr(OBJECTS[kind], name):
            with pytest.raises(AttributeError, match=f"no attribute {name!r}; write {re.escape(ours)}"):
                getattr(OBJECTS[kind], name)


@pytest.mark.parametrize(("kind", "name"), [
    ("Link", "eval"), ("Link", "parameters"), ("Link", "state_dict"), ("Link", "to"), ("Link", "zero_grad"),
    ("Optimizer", "step"), ("Optimizer", "zero_grad"), ("Variable", "detach"), ("Variable", "view"),
    ("Variable", "numpy"), ("Variable", "clone"), ("DatasetMixin", "map"),
])  # fmt: skip
def test_the_usual_ones_are_there(kind, name):
    assert not hasattr(OBJECTS[kind], name)
    with pytest.raises(AttributeError, match="; write "):
        getattr(OBJECTS[kind], name)


@pytest.mark.parametrize("path", MODULES)
def test_a_module_says_what_to_write(path):
    for name, ours in foreign_tables.OF_MODULES[path].items():
        if not hasattr(MODULES[path], name):
            with pytest.raises(AttributeError, match=f"PyTorch's name; write {re.escape(ours)}"):
                getattr(MODULES[path], name)


def test_an_import_says_it_too():
    with pytest.raises(ImportError, match="no_backprop_mode"):
        exec("from dbrdist import no_grad", {})


def answers():
    tables = [*foreign_tables.OF_OBJECTS.values(), *foreign_tables.OF_MODULES.values()]
    return sorted({ours for table in tables for ours in table.values()})


@pytest.mark.parametrize("ours", answers())
def test_an_answer_names_what_is_there(ours):
    for path in re.findall(r"\b(?:dbrdist|F|L|optimizers|iterators|datasets|extensions)(?:\.\w+)+", ours):
        found = NAMES[path.partition(".")[0]]
        for part in path.split(".")[1:]:
            try:
                found = getattr(found, part)
            except AttributeError:
                found = importlib.import_module(f"{found.__name__}.{part}")


def test_an_attribute_of_the_users_own_goes_first():
    class Net(dbrdist.Chain):
        training = True

        def eval(self):
            return "own"

    net = Net()
    net.weight = 3
    assert net.eval() == "own" and net.training and net.weight == 3


def test_a_setting_that_is_not_known_is_warned_of_once_and_kept():
    optimizer = optimizers.SGD()
    with pytest.raises(AttributeError, match="'SGD' object has no attribute 'momentum'"):
        optimizer.momentum  # noqa: B018
    with pytest.warns(UsageWarning) as caught:
        optimizer.momentum = 0.5
        optimizer.momentum = 0.25
    assert [str(one.message) for one in caught] == [
        "SGD has no hyperparameter 'momentum', so that setting it changes nothing; write the optimizer MomentumSGD"
    ]
    assert optimizer.momentum == 0.25
    del optimizer.momentum
    assert not hasattr(optimizer, "momentum")
