"""Names that programs of Chainer's time use: classes of nodes, ChainerX, iDeep, CuPy, private helpers."""

import importlib
import importlib.util
import warnings

import numpy as np
import pytest

from dbrdist import FunctionNode
from dbrdist.compat import absent, names, nodes


def rng():
    return np.random.RandomState(0)


def test_chainerx_can_be_imported_and_is_not_available(installed):
    import chainer
    import chainerx

    x = rng().randn(2, 3).astype("f")
    assert chainerx.is_available() is False and not isinstance(x, chainerx.ndarray)
    device = chainer.get_device(-1)
    assert device.xp is not chainerx and not isinstance(device, chainer.backend.ChainerxDevice)
    for call in (chainerx.ndarray, chainer.backend.ChainerxDevice):
        with pytest.raises(RuntimeError, match="ChainerX is not part of dbrdist: use NumPy's arrays"):
            call((2, 3))
    for name in ("array", "Device", "float32", "using_device"):
        with pytest.raises(AttributeError, match=f"'chainerx' has no attribute '{name}': ChainerX is not part of"):
            getattr(chainerx, name)
    with pytest.raises(ImportError, match=r"cannot import name 'zeros': .*ChainerX is not part of dbrdist"):
        from chainerx import zeros  # noqa: F401


def test_ideep_is_not_available(installed):
    from chainer.backends import intel64

    assert intel64.is_ideep_available() is False and intel64.should_use_ideep(">=auto") is False
    assert not isinstance(rng().randn(2), intel64.mdarray) and not intel64.inputs_all_ready(())
    for call in (intel64.check_ideep_available, intel64.Intel64Device):
        with pytest.raises(RuntimeError, match=r"iDeep is not part of dbrdist.*use the device '@numpy'"):
            call()
    with pytest.raises(ValueError, match="expected '==always' or '>=auto', got 'always'"):
        intel64.should_use_ideep("always")


@pytest.mark.parametrize("path", ["chainer.cuda", "chainer.backends.cuda"])
def test_cupy_can_be_compared_without_cupy(installed, path):
    cuda = importlib.import_module(path)
    assert (np is cuda.cupy) is False and cuda.get_array_module(rng().randn(2)) is not cuda.cupy
    if importlib.util.find_spec("cupy"):
        pytest.skip("CuPy is installed here: its names are CuPy's")
    assert not hasattr(cuda.cupy, "random") and cuda.cupy is cuda.cupy
    with pytest.raises(AttributeError, match=r"cupy.zeros: CuPy is not installed; install dbrdist\[cuda12x\]"):
        cuda.cupy.zeros(3)


@pytest.mark.parametrize("path, name, words", [
    ("chainer.links.caffe", "CaffeFunction", "Caffe's files are not supported: convert them"),
    ("chainer.links.caffe.caffe_function", "CaffeFunction", "Caffe's files are not supported"),
    ("chainer.exporters.caffe", "export", "export to Caffe is not supported: dbrdist-train --export"),
    ("chainer.links", "TheanoFunction", "Theano is not supported: write the function as a chainer.FunctionNode"),
    ("chainer.links.theano.theano_function", "TheanoFunction", "Theano is not supported"),
    ("chainer.backend", "to_chx", "ChainerX is not part of dbrdist"),
    ("chainer", "FunctionSet", "Chainer 2 removed it: write a chainer.Chain"),
    ("chainer.functions", "Convolution2D", "Chainer 2 removed it: write chainer.links.Convolution2D"),
])  # fmt: skip
def test_what_does_not_exist_is_named_with_an_alternative(installed, path, name, words):
    with pytest.raises(AttributeError, match=words):
        getattr(importlib.import_module(path), name)


def test_every_reason_is_about_a_name_that_is_not_there(installed):
    for key in absent._REASONS:
        path, _, name = key.rpartition(".")
        assert absent.reason(path or key, name) is not None
        if path:
            assert not hasattr(importlib.import_module(path), name) or absent.reason(key, "anything") is not None


def test_nodes_are_instances_of_the_classes_behind_the_functions(installed):
    """Each class of the tables stands for what the function gives; the pairs are written down here by hand."""
    import chainer
    import chainer.functions as F

    v = chainer.Variable(abs(rng().randn(2, 3)).astype("f") / 2 + 0.1)
    image = chainer.Variable(rng().randn(2, 3, 6, 6).astype("f"))
    found = {
        "activation.relu.ReLU": F.relu(v), "activation.sigmoid.Sigmoid": F.sigmoid(v),
        "activation.tanh.Tanh": F.tanh(v), "activation.leaky_relu.LeakyReLU": F.leaky_relu(v),
        "activation.elu.ELU": F.elu(v), "activation.softmax.Softmax": F.softmax(v),
        "activation.log_softmax.LogSoftmax": F.log_softmax(v), "activation.clipped_relu.ClippedReLU": F.clipped_relu(v),
        "array.concat.Concat": F.concat([v, v]), "array.reshape.Reshape": F.reshape(v, (3, 2)),
        "array.transpose.Transpose": F.transpose(v), "array.get_item.GetItem": v[0],
        "array.broadcast.BroadcastTo": F.broadcast_to(v, (2, 2, 3)), "array.cast.Cast": F.cast(v, "d"),
        "array.split_axis.SplitAxis": F.split_axis(v, 3, 1)[0],
        "connection.convolution_2d.Convolution2DFunction": F.convolution_2d(image, np.ones((4, 3, 3, 3), "f")),
        "connection.deconvolution_2d.Deconvolution2DFunction": F.deconvolution_2d(image, np.ones((3, 4, 3, 3), "f")),
        "connection.linear.LinearFunction": F.linear(v, np.ones((4, 3), "f")),
        "loss.softmax_cross_entropy.SoftmaxCrossEntropy": F.softmax_cross_entropy(v, np.zeros(2, "i")),
        "loss.mean_squared_error.MeanSquaredError": F.mean_squared_error(v, v),
        "math.basic_math.Add": v + v, "math.basic_math.AddConstant": v + 1, "math.basic_math.Sub": v - v,
        "math.basic_math.Mul": v * v, "math.basic_math.MulConstant": v * 2, "math.basic_math.Div": v / v,
        "math.basic_math.Neg": -v, "math.basic_math.PowVarConst": v**2, "math.exponential.Exp": F.exp(v),
        "math.exponential.Log": F.log(v), "math.sqrt.Sqrt": F.sqrt(v), "math.sum.Sum": F.sum(v),
        "math.matmul.MatMul": F.matmul(v, v.T), "math.minmax.Max": F.max(v), "math.clip.Clip": F.clip(v, 0.0, 1.0),
        "math.maximum.Maximum": F.maximum(v, v * 2), "math.square.Square": F.square(v),
        "noise.dropout.Dropout": F.dropout(v),
        "normalization.batch_normalization.BatchNormalization": F.batch_normalization(v, *[np.ones(3, "f")] * 2),
        "normalization.batch_normalization.FixedBatchNormalization":
            F.fixed_batch_normalization(v, *[np.ones(3, "f")] * 4),
        "pooling.max_pooling_nd.MaxPoolingND": F.max_pooling_2d(image, 2),
        "pooling.average_pooling_2d.AveragePooling2D": F.average_pooling_2d(image, 2),
        "rnn.lstm.LSTM": F.lstm(v[:, :1], np.ones((2, 4), "f"))[1],
    }  # fmt: skip
    for path, y in found.items():
        module, _, name = f"chainer.functions.{path}".rpartition(".")
        y.array  # noqa: B018 (what waits is computed)
        assert isinstance(y.creator, getattr(importlib.import_module(module), name)), path


@pytest.mark.slow
def test_every_class_of_the_tables_exists_in_chainer(installed):
    tables = {**nodes._BY_ROW, **nodes._BY_CLASS}
    for path in tables:
        module, _, name = f"chainer.functions.{path}".rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), name), FunctionNode), path


def test_labels_are_chainers_under_compat_alone(installed):
    import chainer
    import chainer.functions as F

    from dbrdist import compat

    v = chainer.Variable(rng().randn(2, 3).astype("f"))
    made = [
        F.relu(v),
        v + v,
        v * v,
        -v,
        F.sigmoid(v),
        F.convolution_2d(v[None, :, :, None], np.ones((1, 2, 1, 1), "f")),
    ]
    labels = ["ReLU", "_ + _", "_ * _", "-_", "Sigmoid", "Convolution2DFunction"]
    assert [y.creator.label for y in made] == labels
    compat.uninstall()
    assert [y.creator.label for y in made[1:]] == ["add", "mul", "neg", "sigmoid", "Convolution2D"]


def test_a_relu_of_ones_own(installed):
    """Guided backpropagation, as programs that explain networks write it."""
    import chainer
    import chainer.functions as F
    import chainer.links as L
    from chainer.functions.activation.relu import ReLU

    class GuidedReLU(ReLU):
        def backward(self, indexes, gys):
            (y,) = self.get_retained_outputs()
            return (gys[0] * (y.array > 0) * (gys[0].array > 0),)

    x = rng().randn(4, 3).astype("f")
    gy = rng().randn(4, 3).astype("f")
    for before in (lambda v: v, L.BatchNormalization(3)):
        v = chainer.Variable(x)
        h = before(v)
        y = GuidedReLU().apply((h,))[0]
        y.grad = gy
        y.backward(retain_grad=True)
        np.testing.assert_array_equal(h.grad, gy * (h.array > 0) * (gy > 0))
        np.testing.assert_array_equal(y.array, F.relu(h.array).array)


def test_helpers_of_chainers_modules(installed):
    import chainer
    from chainer.functions.connection.convolution_2d import _pair
    from chainer.initializers import _get_initializer
    from chainer.utils import conv
    from chainer.variable import VariableNode

    assert isinstance(chainer.Variable(np.zeros(2, "f")).node, VariableNode)
    assert _pair(3) == (3, 3) and _pair((1, 2)) == (1, 2)
    assert _get_initializer(0.5).fill_value == 0.5 and isinstance(
        _get_initializer(None), chainer.initializers.LeCunNormal
    )
    assert chainer.initializer.get_fans((3, 4, 5, 5)) == (100, 75)
    assert chainer.utils.conv_nd.as_tuple(2, 3) == (2, 2, 2) and chainer.utils.conv_nd.as_tuple([1, 2], 2) == (1, 2)
    with pytest.raises(ValueError, match="expected 2 values, got 3"):
        chainer.utils.conv_nd.as_tuple([1, 2, 3], 2)
    chainer.cuda.set_max_workspace_size(1 << 20)
    assert chainer.backends.cuda.get_max_workspace_size() == 1 << 20
    x = rng().randn(2, 3, 5, 6)
    col = conv.im2col_cpu(x, 3, 2, 2, 1, 1, 0, dx=2)
    assert col.shape == (2, 3, 3, 2, 3, 4)
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (0, 0)))
    assert col[1, 2, 2, 1, 1, 3] == padded[1, 2, 1 * 2 + 2, 3 * 1 + 1 * 2]
    y = rng().randn(*col.shape)
    back = conv.col2im_cpu(y, 2, 1, 1, 0, 5, 6, dx=2)
    np.testing.assert_allclose((back * x).sum(), (y * col).sum())  # the transpose of a linear function


def test_every_private_name_is_found(installed):
    for key in names._BY_PATH:
        path, _, name = key.rpartition(".")
        assert getattr(importlib.import_module(path), name) is not None


def test_a_switch_that_programs_set(installed):
    import chainer

    import dbrdist

    before = getattr(dbrdist, "disable_experimental_feature_warning", False)
    chainer.disable_experimental_feature_warning = True
    try:
        assert dbrdist.disable_experimental_feature_warning is True
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert chainer.disable_experimental_feature_warning is True
    finally:
        dbrdist.disable_experimental_feature_warning = before


def test_helpers_of_products_that_functions_of_programs_import(installed):
    from chainer.functions.math.matmul import _check_ndim, _get_check_index, _matmul
    from chainer.utils import type_check

    a, b = np.arange(24.0).reshape(2, 3, 4), np.arange(30.0).reshape(2, 5, 3)
    np.testing.assert_array_equal(_matmul(a, b, transa=True, transb=True), np.einsum("nij,nki->njk", a, b))
    np.testing.assert_array_equal(_matmul(a, b, True, True, transout=True), np.einsum("nij,nki->nkj", a, b))
    assert _matmul(a[0, 0], a[0, 0]) == 14
    assert [_get_check_index(t, r, 7, 8) for t in (0, 1) for r in (0, 1)] == [8, 7, 7, 8]
    (a_type,) = type_check.get_types((a,), "in_types", False)
    _check_ndim(a_type, 2, 3)
    with pytest.raises(type_check.InvalidType):
        _check_ndim(a_type)


@pytest.mark.parametrize("name, words", [
    ("to_chx", "ChainerX is not part of dbrdist"), ("from_chx", "ChainerX"), ("to_intel64", "iDeep is not part"),
])  # fmt: skip
def test_methods_for_chainerx_and_ideep_say_what_to_use(installed, name, words):
    import chainer

    for owner in (chainer.links.Linear(2, 3), chainer.Variable(np.ones(2, "f")), chainer.Parameter(0, (2,))):
        assert not hasattr(owner, name)
        with pytest.raises(AttributeError, match=f"has no attribute '{name}': {words}"):
            getattr(owner, name)


@pytest.mark.slow
def test_to_gpu_without_cupy_names_cupy(installed):
    import chainer

    if chainer.cuda.available:
        pytest.skip("CuPy is installed")
    for device in (None, 0, 1):
        with pytest.warns(DeprecationWarning, match="to_gpu"), pytest.raises(ImportError, match="expected CuPy"):
            chainer.links.Linear(2, 3).to_gpu(device)
        with pytest.raises(ImportError, match="expected CuPy"):
            chainer.Variable(np.ones(2, "f")).to_gpu(device)
