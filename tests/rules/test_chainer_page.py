"""docs/chainer.md says truly what is there, and the script it ports runs."""

import importlib
import re
import runpy
import subprocess
import sys

import pytest

sys.path.insert(0, __file__.rpartition("/")[0])
import chainer_page

import dbrdist
from dbrdist.core.array import random
from dbrdist.core.names import missing_names

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


@pytest.mark.slow
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


@pytest.mark.programs
@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("serializers", "load_npz"),
        ("gradient_check", "check_backward"),
        ("backend", "get_array_module"),
        ("reporter", "Reporter"),
        ("function_node", "FunctionNode"),
        ("variable", "Variable"),
        ("link", "Link"),
        ("link_hook", "LinkHook"),
        ("optimizer", "GradientMethod"),
        ("random", "set_seed"),
    ],
)
def test_a_module_path_of_chainer_is_the_module_itself(path, name):
    """Imported in a fresh process by its path, and no second copy of what dbrdist has."""
    program = f"from dbrdist.{path} import {name}; import dbrdist; assert dbrdist.{path}.{name} is {name}"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    ours = getattr(dbrdist, path)
    assert ours is importlib.import_module(f"dbrdist.{path}") is sys.modules[ours.__name__]


@pytest.fixture
def later(monkeypatch):
    """A name `Later` in some of Chainer's modules, which dbrdist does not have."""
    names = dict.fromkeys(("chainer", "chainer.links", "chainer.training.extensions"), frozenset({"Later"}))
    monkeypatch.setattr(missing_names, "chainer_names", lambda: names)


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        ("links", "Later", "no attribute 'Later'; Later is a name of Chainer that dbrdist does not have yet"),
        ("training.extensions", "Later", "Later is a name of Chainer that dbrdist does not have yet"),
        (
            "links",
            "Conv2d",
            "module 'dbrdist.links' has no attribute 'Conv2d'; Conv2d is PyTorch's name; write L.Convolution2D",
        ),
        ("functions", "cross_entropy", "cross_entropy is PyTorch's name; write F.softmax_cross_entropy"),
        ("optimizers", "adam_w", "did you mean 'AdamW'[?]"),
        ("datasets", "get_digit", "did you mean 'get_digits'[?]"),
        ("functions", "no_such_thing_at_all", "no attribute 'no_such_thing_at_all'$"),
    ],
)
def test_a_missing_name_is_explained(later, module, name, message):
    with pytest.raises(AttributeError, match=message):
        getattr(importlib.import_module(f"dbrdist.{module}"), name)
    assert not hasattr(importlib.import_module(f"dbrdist.{module}"), "__no_such_protocol__")


def test_a_missing_name_of_the_package_itself_is_explained(later):
    with pytest.raises(AttributeError, match="Later is a name of Chainer that dbrdist does not have yet"):
        dbrdist.Later  # noqa: B018
    with pytest.raises(AttributeError, match="did you mean 'Variable'"):
        dbrdist.variabel  # noqa: B018
