"""Names of `chainer` itself: objects with a device, types of arrays, marks without effect."""

from __future__ import annotations

import subprocess
import sys
import weakref

import numpy as np
import pytest

import dbrdist
from dbrdist.core.device_resident import DeviceResidentsVisitor
from dbrdist.utils import WalkerAlias


class Table(dbrdist.DeviceResident):
    """Values that a link owns beside its parameters."""

    def __init__(self):
        self.values = np.arange(3)

    def device_resident_accept(self, visitor):
        super().device_resident_accept(visitor)
        self.values = visitor.visit_array(self.values)


class WithTable(dbrdist.Chain):
    def __init__(self):
        super().__init__()
        self.table = Table()
        with self.init_scope():
            self.inner = dbrdist.Link(W=(2, 2))
            self.many = dbrdist.ChainList(dbrdist.Link(b=3))
        self.inner.add_persistent("count", np.zeros(1))
        self.inner.add_persistent("name_of", "words")

    def device_resident_accept(self, visitor):
        super().device_resident_accept(visitor)
        self.table.device_resident_accept(visitor)


class Noting(DeviceResidentsVisitor):
    def __init__(self):
        self.objects, self.params, self.arrays = [], [], []

    def visit_device_resident(self, device_resident):
        self.objects.append(type(device_resident).__name__)

    def visit_variable(self, param):
        self.params.append(param.name)

    def visit_array(self, arr):
        self.arrays.append(arr)
        return arr + 1


def test_a_visitor_sees_all_that_a_chain_owns():
    model, visitor = WithTable(), Noting()
    model.device_resident_accept(visitor)
    assert visitor.objects == ["WithTable", "Link", "ChainList", "Link", "Table"]
    assert visitor.params == ["W", "b"] and [a.tolist() for a in visitor.arrays] == [[0], [0, 1, 2]]
    assert model.inner.count.tolist() == [1] and model.table.values.tolist() == [1, 2, 3]


def test_everything_moves_with_the_link(monkeypatch):
    """To a place that stands for a GPU: what matters is that all of it is asked to move, the table too."""
    moved = []
    monkeypatch.setattr("dbrdist.core.device_resident.to_device", lambda a, device: moved.append(a.size) or a)
    model = WithTable()
    assert model.to_device("@numpy") is model and moved == [1, 3]
    assert model.to_cpu() is model and isinstance(model, dbrdist.DeviceResident)
    assert model.device == model.inner.device == model.table.device == dbrdist.get_device("@numpy")
    assert model.xp is np


def test_a_sampler_is_an_object_with_a_device():
    sampler = WalkerAlias([1.0, 3.0])
    assert sampler.to_cpu() is sampler and sampler.device.name == "@numpy" and not sampler.use_gpu
    assert sampler.sample((5,)).shape == (5,)


def test_a_visitor_says_what_to_define():
    for name in ("visit_device_resident", "visit_variable", "visit_array"):
        with pytest.raises(NotImplementedError, match=f"DeviceResidentsVisitor must define {name}"):
            getattr(DeviceResidentsVisitor(), name)(None)


def test_types_of_arrays():
    assert dbrdist.get_cpu_array_types() == (np.ndarray,)
    assert np.ndarray in dbrdist.get_array_types()
    assert dbrdist.is_arrays_compatible([np.zeros(1), None, np.zeros((2, 2), np.int8)])
    assert dbrdist.is_arrays_compatible([]) and dbrdist.is_arrays_compatible(iter([None]))


def test_cudnn_is_asked_for_in_vain_without_a_gpu():
    assert dbrdist.should_use_cudnn is dbrdist.backends.cuda.should_use_cudnn
    assert dbrdist.should_use_cudnn_tensor_core is dbrdist.backends.cuda.should_use_cudnn_tensor_core
    with pytest.raises(ValueError, match="level: expected '==always' or '>=auto'"):
        dbrdist.should_use_cudnn("always")


def test_the_mode_of_computation_can_be_set():
    assert dbrdist.get_compute_mode() is None
    with dbrdist.using_config("compute_mode", "cudnn_fast"):
        assert dbrdist.get_compute_mode() == "cudnn_fast"


def test_static_graphs_are_taken_and_change_nothing():
    def forward(self, x):
        return x

    assert dbrdist.static_graph(forward) is forward is dbrdist.static_graph()(forward)
    assert dbrdist.static_graph(verbosity_level=1, enable_double_backprop=True)(forward) is forward
    assert dbrdist.static_code(forward) is forward is dbrdist.static_code(unused=1)(forward)
    with pytest.raises(TypeError, match=r"static_graph\(\) got unknown arguments: verbose"):
        dbrdist.static_graph(verbose=1)
    for mark in (dbrdist.static_graph, dbrdist.static_code):
        with pytest.raises(TypeError, match=f"{mark.__name__}: expected a function to decorate, got"):
            mark(3)


def test_layouts_are_none():
    x = dbrdist.Variable(np.zeros((1, 2, 3, 3), np.float32))
    y = x + x
    assert y.as_layout(None) is y and y.layout is None
    assert y.creator_node.input_layouts == (None, None) and y.creator_node.output_layouts == (None,)
    y.creator_node.check_layout_forward((x.array, x.array))
    with pytest.raises(ValueError, match="as_layout: expected None, got 3; shapes are NCHW"):
        y.as_layout(3)


class Double(dbrdist.Function):
    def forward(self, xs):
        return xs[0] * 2, xs[0] * 3

    def backward(self, xs, gys):
        return (gys[0] * 2 + gys[1] * 3,)


def test_a_function_of_the_old_style_knows_its_outputs_and_its_caller():
    function, x = Double(), dbrdist.Variable(np.ones(2, np.float32))
    assert function.outputs == () and function.stack is None
    y, z = function(x)
    assert [type(r) for r in function.outputs] == [weakref.ref] * 2
    assert [r() for r in function.outputs] == [y.node, z.node]
    assert y.creator_node.function is function is y.creator
    del y
    assert function.outputs[0]() is None and function.outputs[1]() is z.node
    with dbrdist.DebugMode(True):
        y, _ = function(x)
    assert any("function(x)" in frame.line for frame in function.stack)
    with pytest.raises(AttributeError):
        y.creator_node.function = None


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
