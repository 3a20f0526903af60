"""docs/pytorch.md: its script trains, and each idiom of its table evaluates."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import iterators, optimizers
from dbrdist.comm import create_multi_node_optimizer
from dbrdist.comm.communicators.threads import ThreadCommunicator
from dbrdist.core.array import random

PAGE = (Path(__file__).parents[2] / "docs" / "pytorch.md").read_text()
ROWS = [line.strip("|").split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
IDIOMS = [code for row in ROWS for code in re.findall(r"`([^`]+)`", row[1])]
OF_A_SHELL = ("mpiexec", "dbrdist-launch")
OF_A_GPU = ("to_device",)


@pytest.fixture
def fresh():
    state = random.get_state()
    random.set_seed(0)
    yield
    random.set_state(state)


def test_the_loop_trains(tmp_path, monkeypatch, capsys, fresh):
    (script,) = re.findall(r"^```python\n(# loop.py.*?)^```$", PAGE, re.M | re.S)
    monkeypatch.chdir(tmp_path)
    exec(compile(script, "loop.py", "exec"), {})
    assert float(capsys.readouterr().out.split()[-1]) > 0.7
    assert (tmp_path / "net.npz").exists()


@pytest.fixture
def names(tmp_path, monkeypatch, fresh):
    """What the expressions of the table speak of."""
    monkeypatch.chdir(tmp_path)
    a = np.arange(8, dtype=np.float32).reshape(2, 4)
    m = dbrdist.Sequential(L.Linear(4, 4))
    x = dbrdist.Variable(a)
    y = F.sum(x**2)
    y.backward()
    dbrdist.serializers.save_npz("m.npz", m)
    optimizer = optimizers.SGD(0.1).setup(m)
    modules = {"dbrdist": dbrdist, "F": F, "L": L, "iterators": iterators, "optimizers": optimizers}
    created = {"create_multi_node_optimizer": create_multi_node_optimizer, "comm": ThreadCommunicator()}
    values = {"a": a, "m": m, "x": x, "y": y, "t": np.array([1, -1]), "optimizer": optimizer, "train": list(range(100))}
    return {**modules, **created, **values}


@pytest.mark.parametrize("code", [code for code in IDIOMS if not code.startswith(OF_A_SHELL)])
def test_an_idiom_evaluates(code, names):
    if any(word in code for word in OF_A_GPU):
        compile(code, "pytorch.md", "eval")
        return
    if code == "x.array.item()":
        names["x"] = F.sum(names["x"])
    if "using_config" in code or "no_backprop_mode" in code:  # blocks, which warn where they are not entered
        code = f"with {code}: pass"
    exec(compile(code, "pytorch.md", "exec"), names)


def test_the_idioms_mean_what_pytorchs_do(names):
    """Values of those that compute."""
    a = names["a"]
    expected = {
        "F.reshape(x, (2, -1))": a.reshape(2, -1),
        "F.transpose(x, (1, 0))": a.T,
        "F.concat([x, x], axis=1)": np.hstack([a, a]),
        "F.stack([x, x])": np.stack([a, a]),
        "F.mean(x, axis=1)": a.mean(1),
        "F.sum(x, axis=(0, 1))": a.sum(),
        "F.mean_squared_error(x, x.array)": np.float32(0),
        "F.softmax_cross_entropy(x, t, ignore_label=-1)": np.log(np.exp(a[0]).sum()) - a[0, 1],
        "dbrdist.grad([y], [x], enable_double_backprop=True)": 2 * a,
    }
    for code, value in expected.items():
        assert code in IDIOMS
        got = eval(code, names)
        got = got[0] if isinstance(got, list) else got
        np.testing.assert_allclose(got.array, value, rtol=1e-6)


def test_the_table_is_read():
    assert len(ROWS) > 25 and len(IDIOMS) > 35
