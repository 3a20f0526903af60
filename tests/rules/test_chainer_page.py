"""docs/chainer.md says truly what is there, and the script it ports runs."""

import re
import runpy
import sys

import pytest

sys.path.insert(0, __file__.rpartition("/")[0])
import chainer_page

import dbrdist
from dbrdist.core import random

PAGE = chainer_page.PAGE.read_text()


def test_the_lists_are_those_of_today():
    made = chainer_page.with_lists(PAGE)
    assert made == PAGE, "names were exported since: run `python tests/rules/chainer_page.py --write`"


@pytest.fixture
def fresh():
    state = random.get_state()
    random.set_seed(0)
    yield
    random.set_state(state)


def test_a_ported_script_runs(tmp_path, monkeypatch, capsys, fresh):
    """The page's script, changed as the page says, and nothing else."""
    (script,) = re.findall(r"^```python\n(# train_digits.py.*?)^```$", PAGE, re.M | re.S)
    assert "dbrdist" not in script.replace("from dbrdist.datasets import get_digits", "")
    for pattern, ours in ((r"\bchainermn\b", "dbrdist.comm"), (r"\bchainer\b", "dbrdist")):
        script = re.sub(pattern, ours, script)
    (tmp_path / "train_digits.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("train_digits.py", run_name="__main__")
    last = capsys.readouterr().out.splitlines()[-1]
    assert float(last.split()[-1]) > 0.9
    assert (tmp_path / "model.npz").exists()
    assert dbrdist.config.train
