"""Import paths of Chainer: each is there, serves our names, and says so where it has none."""

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import dbrdist.comm.functions
import dbrdist.comm.links
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import compat
from dbrdist.compat import finder
from dbrdist.compat.numpy_1 import numpy_names

ROOT = Path(__file__).parents[2]


def run(*words, cwd=None, **environment):
    """A Python process with this checkout: (exit code, output and errors)."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        **environment,
    }
    found = subprocess.run([sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=60)
    return found.returncode, found.stdout + found.stderr


def test_every_path_imports(installed):
    for path in sorted(finder.paths()):
        module = importlib.import_module(path)
        assert module.__name__ == path and sys.modules[path] is module


def test_names_are_ours_at_every_depth(installed):
    import chainer
    import chainer.functions as F
    import chainermn
    from chainer import serializers, training
    from chainer.functions.loss.vae import gaussian_kl_divergence
    from chainer.training.extensions import evaluator

    assert F.relu is dbrdist.functions.relu and chainer.links.Linear is dbrdist.links.Linear
    assert gaussian_kl_divergence is dbrdist.functions.gaussian_kl_divergence
    assert chainer.functions.activation.relu.relu is dbrdist.functions.relu
    assert evaluator.Evaluator is training.extensions.Evaluator is dbrdist.training.extensions.Evaluator
    assert serializers.load_npz is dbrdist.serializers.load_npz
    assert chainer.config is dbrdist.config and chainer.Variable is dbrdist.Variable
    assert chainer.variable.Parameter is dbrdist.Parameter and chainer.link.Chain is dbrdist.Chain
    assert chainer.optimizer.WeightDecay is dbrdist.optimizer_hooks.WeightDecay
    assert chainer.configuration.using_config is dbrdist.using_config
    assert chainer.cuda.to_cpu is chainer.backends.cuda.to_cpu is dbrdist.backends.cuda.to_cpu
    assert chainermn.create_communicator is dbrdist.comm.create_communicator
    assert "relu" in dir(F) and "activation" in dir(F) and chainer.__version__.startswith("7.")


def test_names_of_data_at_every_depth(installed):
    import chainer
    from chainer.dataset import convert, download, tabular
    from chainer.dataset.convert import ConcatWithAsyncTransfer, Conveyor, concat_examples_func  # noqa: F401
    from chainer.dataset.tabular.delegate_dataset import DelegateDataset
    from chainer.dataset.tabular.from_data import from_data
    from chainer.datasets.pickle_dataset import open_pickle_dataset  # noqa: F401
    from chainer.iterators.dali_iterator import DaliIterator  # noqa: F401

    assert issubclass(DelegateDataset, chainer.dataset.TabularDataset) and tabular.from_data is from_data
    assert convert.concat_examples is chainer.dataset.concat_examples
    assert download.get_dataset_root() == chainer.dataset.get_dataset_root()
    assert chainer.datasets.svhn.get_svhn is dbrdist.datasets.get_svhn
    assert chainer.datasets.fashion_mnist.get_fashion_mnist is dbrdist.datasets.get_fashion_mnist


def test_functions_that_hide_the_module_of_their_name(installed):
    import chainer.utils
    from chainer.dataset.tabular.from_data import from_data
    from chainer.utils.experimental import experimental

    assert chainer.utils.experimental is experimental is dbrdist.utils.experimental
    assert chainer.dataset.tabular.from_data is from_data
    assert sys.modules["chainer.utils.experimental"].experimental is experimental


def test_a_function_of_the_name_of_a_module_is_the_function(installed):
    """Whether the module was imported before or not."""
    import chainermn
    import chainermn.functions
    import chainermn.links

    from dbrdist.compat import communication

    ours = dbrdist.comm.functions
    for _ in range(2):
        assert chainermn.functions.pseudo_connect is communication.pseudo_connect
        assert chainermn.links.create_mnbn_model is dbrdist.comm.links.create_mnbn_model
        from chainermn.functions.pseudo_connect import pseudo_connect
        from chainermn.links.create_mnbn_model import create_mnbn_model

        assert (
            pseudo_connect is communication.pseudo_connect and create_mnbn_model is dbrdist.comm.links.create_mnbn_model
        )
    from chainermn.functions.point_to_point_communication import Recv, send

    assert send is chainermn.functions.send is ours.send and Recv is ours.Recv


def test_our_own_modules_stay_as_they_are(installed):
    before = {name: module for name, module in sys.modules.items() if name.startswith("dbrdist")}
    import chainer.functions.activation.relu
    import chainer.functions.loss.vae  # noqa: F401

    assert dbrdist.functions.activation is sys.modules["dbrdist.functions.activation"]
    assert dbrdist.functions.loss.__spec__.name == "dbrdist.functions.loss"
    assert all(sys.modules[name] is module for name, module in before.items())


def test_missing_names_say_so(installed):
    import chainer
    import chainer.links as L

    with pytest.raises(AttributeError, match=r"'chainer.links' has no attribute 'Linaer'; did you mean 'Linear'\?"):
        _ = L.Linaer
    with pytest.raises(ImportError, match=r"cannot import name 'Linaer': .* did you mean 'Linear'\?"):
        from chainer.links import Linaer  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"'chainer.functoins'.*did you mean 'chainer.functions'\?"):
        import chainer.functoins
    assert not hasattr(chainer, "no_such_name") and not hasattr(L, "__wrapped__")


def test_a_name_of_chainer_that_is_not_there_yet(installed, monkeypatch):
    import chainer.links as L

    monkeypatch.delattr(dbrdist.links, "Linear")
    with pytest.raises(AttributeError, match="Linear is a name of Chainer that dbrdist does not have yet"):
        _ = L.Linear
    with pytest.raises(ImportError, match="Linear is a name of Chainer that dbrdist does not have yet"):
        from chainer.links import Linear  # noqa: F401


def test_rooms_import_names_with_words_too():
    with pytest.raises(ImportError, match=r"module 'dbrdist.links' has no attribute 'Linaer'; did you mean 'Linear'\?"):
        from dbrdist.links import Linaer  # noqa: F401


def test_uninstall_leaves_nothing():
    compat.install()
    compat.install()  # twice is once
    import chainer

    compat.uninstall()
    assert not [name for name in sys.modules if name.split(".")[0] in ("chainer", "chainermn")]
    with pytest.raises(ModuleNotFoundError):
        import chainer  # noqa: F401


@pytest.mark.programs
def test_chainer_imported_before_is_an_error(tmp_path):
    (tmp_path / "chainer.py").write_text("")
    code, text = run("-c", "import chainer, dbrdist.compat\ndbrdist.compat.install()", cwd=tmp_path)
    assert code == 1 and "RuntimeError: chainer was imported already, from" in text


@pytest.mark.programs
def test_an_installed_chainer_is_named_and_passed_over(tmp_path):
    (tmp_path / "chainer.py").write_text("raise SystemExit('the wrong one')")
    code, text = run(
        "-c", "import dbrdist.compat as c\nc.install()\nimport chainer\nprint(chainer.Chain)", cwd=tmp_path
    )
    assert code == 0 and "dbrdist.core.model.chain.Chain" in text
    assert f"the Chainer installed in {tmp_path / 'chainer.py'} is not used" in text


@pytest.mark.programs
def test_scripts_and_modules_with_arguments(tmp_path):
    (tmp_path / "other.py").write_text("NAME = 'other'")
    (tmp_path / "script.py").write_text("import chainer, other, sys\nprint(other.NAME, sys.argv[1:], __name__)")
    code, text = run("-m", "dbrdist.compat", str(tmp_path / "script.py"), "-x", "3")
    assert (code, text) == (0, "other ['-x', '3'] __main__\n")
    code, text = run("-m", "dbrdist.compat", "-m", "script", "y", cwd=tmp_path)
    assert (code, text) == (0, "other ['y'] __main__\n")


@pytest.mark.programs
@pytest.mark.parametrize("words, code, message", [
    ((), 2, "usage: python -m dbrdist.compat"),
    (("--help",), 0, "usage: python -m dbrdist.compat"),
    (("absent.py",), 1, "dbrdist.compat: absent.py: no such file"),
    (("--wrong", "x.py"), 1, "expected a script or -m module, got --wrong"),
    (("-m",), 1, "expected a script or -m module, got -m"),
])  # fmt: skip
def test_command_line(words, code, message, tmp_path):
    found, text = run("-m", "dbrdist.compat", *words, cwd=tmp_path)
    assert found == code and message in text and "Traceback" not in text


@pytest.mark.programs
def test_numpy_names_are_for_the_script_alone(tmp_path):
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
        import numpy as np
        assert np.int is int and np.float_ is np.float64 and np.NaN != np.NaN and np.product([2, 3]) == 6
        assert np.asfarray([1]).dtype == float and np.asscalar(np.ones(1)) == 1
        other = "try:\\n    np.int\\nexcept AttributeError:\\n    print('others do not see it')"
        exec(compile(other, np.__file__, "exec"), {"np": np})
    """)
    )
    for option in ((), ("--numpy-names",)):
        code, text = run("-m", "dbrdist.compat", *option, str(tmp_path / "script.py"))
        assert (code, text) == (0, "others do not see it\n")
    code, text = run("-m", "dbrdist.compat", "--numpy2", str(tmp_path / "script.py"))
    assert code == 1 and "numpy" in text and "has no attribute 'int'" in text


def test_every_numpy_name_is_usable():
    old = {"alltrue": ([True],), "asfarray": ([1],), "msort": (np.array([2, 1]),), "trapz": ([1.0, 3.0],)}
    assert {name: float(np.sum(numpy_names.NAMES[name](*x))) for name, x in old.items()} == {
        "alltrue": 1.0, "asfarray": 1.0, "msort": 3.0, "trapz": 2.0,
    }  # fmt: skip
    assert numpy_names.NAMES["PINF"] == float("inf") == -numpy_names.NAMES["NINF"]


@pytest.mark.programs
def test_spawned_processes_have_the_names(tmp_path):
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
        import multiprocessing
        from collections import Iterable
        import chainer
        import numpy as np

        def work(x):
            assert isinstance(x, Iterable) and np.float is float
            return chainer.functions.square(x).array.tolist()

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(work, [np.full(2, 3.0)]))
    """)
    )
    code, text = run("-m", "dbrdist.compat", str(tmp_path / "script.py"))
    assert (code, text) == (0, "[[9.0, 9.0]]\n")


def test_star_imports_give_all_public_names(installed):
    names = {}
    exec("from chainer.links import *\nfrom chainer.functions import *\nfrom chainer import *", names)
    assert names["Linear"] is L.Linear and names["relu"] is F.relu and names["Chain"] is dbrdist.Chain
    assert names["optimizers"].Adam is dbrdist.optimizers.Adam and "_rooms" not in names


@pytest.mark.slow
def test_star_imports_hide_no_module_of_python(installed):
    names = {"random": 1, "profile": 2, "max": 3}
    exec("from chainer import *\nfrom chainer.training.triggers import *\nfrom chainer.training import *", names)
    exec("from chainer.functions.math.basic_math import *", names)
    assert (names["random"], names["profile"], names["max"]) == (1, 2, 3) and "json" not in names
    exec("from chainer.functions import *", names)
    assert names["max"] is F.max  # as in Chainer


def test_modules_that_chainers_modules_import(installed):
    from chainer.backend import cuda
    from chainer.functions.activation.relu import numpy, type_check

    assert cuda.cupy is not None and numpy is np and type_check.expect
    with pytest.raises(ImportError):
        from chainer.functions import cuda
    link = L.Linear(2, 2)
    with cuda.get_device_from_id(link._device_id):  # of programs for Chainer 3
        assert link._device_id is None


@pytest.mark.programs
def test_pillow_is_there_as_after_an_import_of_chainer(tmp_path):
    pytest.importorskip("PIL", reason="Pillow is not installed")
    script = tmp_path / "open_image.py"
    script.write_text("import chainer\nimport PIL\nprint(PIL.Image.new('L', (2, 3)).size)\n")
    done = subprocess.run([sys.executable, "-m", "dbrdist.compat", script], capture_output=True, text=True, check=True)
    assert done.stdout == "(2, 3)\n"
