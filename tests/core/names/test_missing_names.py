"""Tests of dbrdist.core.names.missing_names."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

import dbrdist.functions as F
from dbrdist.core.names import missing_names


def test_names_that_are_missing_tell_what_is_near():
    module = types.SimpleNamespace(relu=1, _relu6=2)
    here = vars(module)
    error = missing_names.absent("chainer.functions", "relv", here, "dbrdist.functions")
    assert isinstance(error, AttributeError) and error.name == "relv"
    assert str(error) == "module 'dbrdist.functions' has no attribute 'relv'; did you mean 'relu'?"
    assert str(missing_names.absent("chainer.functions", "ReLU", here)).endswith(
        "module 'chainer.functions' has no attribute 'ReLU'; did you mean 'relu'?"
    )
    assert str(missing_names.absent("chainer.functions", "_relu", here)).endswith("has no attribute '_relu'")
    assert str(missing_names.absent("chainer.functions", "zzzz", here)).endswith("has no attribute 'zzzz'")
    assert "is a name of Chainer" not in str(missing_names.absent("chainer.links", "softmax_cross_entropy", here))
    with pytest.raises(
        ImportError, match=r"cannot import name 'relv': module 'dbrdist.functions' has no attribute 'relv'"
    ):
        from dbrdist.functions import relv  # noqa: F401
    with pytest.raises(AttributeError, match="did you mean 'relu'"):
        F.relv  # noqa: B018
    near = missing_names.no_module("chainer.fonctions", ["chainer.functions", "chainer.links"])
    assert str(near) == "No module named 'chainer.fonctions' in Chainer 7.8.1; did you mean 'chainer.functions'?"
    assert near.name == "chainer.fonctions"
    assert str(missing_names.no_module("zzz", ["chainer.links"])) == "No module named 'zzz' in Chainer 7.8.1"


@pytest.mark.programs
def test_the_paths_of_chainer():
    """In a process of its own: `install` changes what all imports find."""
    program = (
        "import dbrdist.compat as c; c.install()\n"
        "import chainer, chainer.computational_graph as graph, numpy as np\n"
        "from chainer.device_resident import DeviceResident, DeviceResidentsVisitor\n"
        "from chainer.graph_optimizations.static_graph import static_graph\n"
        "from chainer.graph_optimizations.static_graph_utilities import static_code\n"
        "from chainer.training.extensions.snapshot_writers import ThreadQueueWriter\n"
        "from chainer.training.extensions.variable_statistics_plot import Reservoir, Statistician\n"
        "from chainer.training.extensions.computational_graph import is_graphviz_available\n"
        "from chainer.training import extensions\n"
        "import chainer.links as L\n"
        "from chainer.utils.imgproc import oversample\n"
        "assert L.model.vision.resnet.prepare(np.zeros((3, 4, 4)), None).shape == (3, 4, 4)\n"
        "from chainer.links.model.vision.vgg import VGGLayers, prepare\n"
        "extensions.snapshot_writers.SimpleWriter; chainer.Initializer; chainer.training.IntervalTrigger\n"
        "assert static_graph is chainer.static_graph and DeviceResident is chainer.DeviceResident\n"
        "x = chainer.Variable(np.zeros(2, 'f'))\n"
        "print(len(graph.build_computational_graph([x * x]).edges))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (out.stdout, out.stderr) == ("3\n", "")


def test_chainers_names_are_read_by_module():
    names = missing_names.chainer_names.__wrapped__()
    assert {"chainer", "chainer.functions", "chainer.links", "chainer.training.extensions"} <= names.keys()
    assert {"relu", "softmax_cross_entropy"} <= names["chainer.functions"] and "Linear" in names["chainer.links"]
    assert "Linear" not in names["chainer.functions"] and "relu" not in names["chainer.links"]
    everything = {name for each in names.values() for name in each}
    assert all(name.isidentifier() for name in everything), [n for n in everything if not n.isidentifier()]
