"""Tests of dbrdist.core.names.later: files of a room that are loaded when one of their names is first read."""

from __future__ import annotations

import pickle
import subprocess
import sys
import types

import pytest

import dbrdist.functions as F
import dbrdist.links as L
from dbrdist.core.names import later


def run(program: str) -> list[str]:
    """Words that a program prints in a process of its own, where nothing has been named yet."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.programs
def test_a_name_loads_its_file_and_nothing_else():
    before, after, other = run(
        "import sys, dbrdist.functions as F\n"
        "print('dbrdist.functions.linalg' in sys.modules)\n"
        "assert 'cholesky' in dir(F) and 'linalg' in dir(F) and 'inv' not in vars(F)\n"
        "F.cholesky; print('dbrdist.functions.linalg' in sys.modules and 'inv' in vars(F))\n"
        "print('dbrdist.functions.regions' in sys.modules)"
    )
    assert (before, after, other) == ("False", "True", "False")


@pytest.mark.programs
def test_every_way_to_a_name_finds_the_same():
    names = run(
        "import pickle\n"
        f"link = pickle.loads({pickle.dumps(L.LSTM(2, 3))!r})\n"  # by the path of its file, before its room is named
        f"forget = pickle.loads({pickle.dumps(F.forget)!r})\n"
        "import dbrdist\n"
        "from dbrdist.links.rnn import LSTM\n"
        "from dbrdist.functions import *\n"
        "assert LSTM is dbrdist.links.LSTM is type(link) and forget is dbrdist.functions.forget\n"
        "assert dbrdist.links.model.vision.vgg.VGG16Layers is dbrdist.links.VGG16Layers\n"
        "assert dbrdist.functions.linalg.inv is dbrdist.functions.inv.__wrapped__\n"
        "print(cholesky.__module__, dbrdist.gradient_check.__name__, dbrdist.function.Function is dbrdist.Function)"
    )
    assert names == ["dbrdist.functions", "dbrdist.core.tape.gradient_check", "True"]


@pytest.mark.programs
def test_constructors_explain_themselves_whichever_way_their_file_is_loaded():
    words = run(
        "from dbrdist.links.rnn import LSTM\n"
        "try:\n    LSTM(2, 3, dropout=0.5)\nexcept TypeError as error:\n    print(type(error).__name__, error)"
    )
    assert words[0] == "UnknownArgumentError" and "LSTM" in " ".join(words) and "dropout" in " ".join(words)
    for name in L.__all__:
        made = getattr(L, name)
        own = made.__dict__.get("__init__") if isinstance(made, type) else None
        assert own is None or hasattr(own, "__wrapped__"), name


@pytest.mark.programs
def test_threads_that_come_at_once_get_the_same_function():
    (num,) = run(
        "import threading, dbrdist.functions as F\n"
        "found, gate = [], threading.Barrier(8)\n"
        "def read():\n    gate.wait()\n    found.append(F.roi_pooling_2d)\n"
        "threads = [threading.Thread(target=read) for _ in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "print(len(set(map(id, found))))"
    )
    assert num == "1"


@pytest.mark.programs
def test_a_profile_counts_functions_that_are_loaded_while_it_runs():
    seconds = run(
        "import numpy as np, dbrdist, dbrdist.functions as F\n"
        "x = dbrdist.Variable(np.eye(2, dtype='f'))\n"
        "with dbrdist.profile() as p:\n    F.sum(F.inv(x)).backward()\n"
        "(entry,) = [e for e in p.by_function() if e.function.startswith('Inv')]\n"
        "print(entry.calls['forward'] > 0, entry.calls['backward'] > 0)"
    )
    assert seconds == ["True", "True"]


def test_names_that_no_file_has_are_missing():
    with pytest.raises(AttributeError, match="did you mean 'cholesky'"):
        F.choleski  # noqa: B018
    with pytest.raises(ImportError, match="did you mean 'NaryTreeLSTM'"):
        from dbrdist.links import NaryTreeLSTMs  # noqa: F401
    assert not hasattr(L, "model_") and not hasattr(F, "_linalg")


@pytest.mark.programs
def test_functions_of_rows_are_in_files_that_are_loaded_with_the_room():
    """Their names are in no table, so that a file of them cannot wait; other tests declare rows of their own."""
    late, without_name = run(
        "import dbrdist.functions as F\n"
        "from dbrdist.core.tape.elementwise_table import PUBLIC\n"
        "first = set(PUBLIC)\n"
        "assert first and all(hasattr(F, name) for name in F.__all__)\n"
        "print(len(set(PUBLIC) - first), len(first - set(F.__all__)))"
    )
    assert (late, without_name) == ("0", "0")


def test_a_room_serves_its_table(monkeypatch):
    room = types.ModuleType("a_room")
    monkeypatch.setitem(sys.modules, "a_room", room)
    files = {"a_room.deep.file": types.SimpleNamespace(one=1, two=2), "a_room.other": types.SimpleNamespace(three=3)}
    loads = []

    def loaded(path):
        loads.append(path)
        monkeypatch.setitem(sys.modules, "a_room.deep", "the package")
        return files[path]

    monkeypatch.setattr(later, "loaded", loaded)
    table = {"deep.file": "one two", "other": "three"}
    room.__getattr__, room.__dir__ = later.loaded_when_named("a_room", table, str.upper, lambda value: -value)
    assert {"one", "two", "three", "deep", "other", "__name__"} <= set(dir(room)) and "file" not in dir(room)
    assert room.two == -2 and loads == ["a_room.deep.file"] and vars(room)["one"] == -1 and room.one == -1
    assert loads == ["a_room.deep.file"]
    assert room.deep == "the package" and room.four == "FOUR" and room.dee == "DEE"
    assert loads == ["a_room.deep.file"] * 2
