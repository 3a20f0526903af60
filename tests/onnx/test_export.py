"""Exported files compute in onnxruntime what the model computes; what no file can represent is refused by name."""

from __future__ import annotations

import builtins
import os

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import models
from dbrdist.links.model.vision.resnet import ResNetLayers
from dbrdist.links.model.vision.vgg import VGGLayers
from tests.each import each
from tests.functions.cases import CASES
from tests.onnx.examples import FURTHER, function_of, small_inputs

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="the package onnxruntime is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

from dbrdist.onnx import OperatorError, export  # noqa: E402

# Cases whose functions, or arguments, have no counterpart: the error must name the function.
REFUSED = {
    "batch_inv", "cholesky", "connectionist_temporal_classification", "decov", "decorrelated_batch_normalization",
    "deformable_convolution_2d_sampler", "deformable_convolution_2d_sampler_strided", "digamma", "erfcinv", "erfcx",
    "erfinv", "fft", "fft_one_used", "ifft", "inv", "lgamma", "log_ndtr", "ndtri", "polygamma", "polygamma_orders",
    "roi_max_align_2d", "roi_max_align_2d_ratio", "roi_max_pooling_2d", "roi_pooling_2d",
    "softmax_cross_entropy_ignore",
    "softmax_cross_entropy_unnormalized", "sparse_matmul", "sparse_matmul_batch", "sparse_matmul_right",
    "sparse_matmul_right_batch", "spatial_transformer_sampler", "zeta",
}  # fmt: skip


def run(path, **inputs):
    """What onnxruntime makes of a file."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def arrays(value):
    found = value if isinstance(value, (tuple, list)) else (value,)
    return [a for v in found for a in (arrays(v) if isinstance(v, (tuple, list)) else [v.array])]


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.slow
@each(case=[case for case in CASES if case.name not in REFUSED])
def test_a_function_gives_the_same_in_onnxruntime(case, tmp_path):
    for xs in small_inputs(case):
        names = [f"x{i}" for i in range(len(xs))]
        export(case.function, tuple(xs), tmp_path / "f.onnx", input_names=names, check=False)
        with dbrdist.using_config("train", False):
            wanted = arrays(case.function(*map(dbrdist.Variable, xs)))
        for y, w in zip(run(tmp_path / "f.onnx", **dict(zip(names, xs))), wanted, strict=True):
            scale = max(np.max(np.abs(w), initial=0), 1)
            np.testing.assert_allclose(y, w, rtol=0, atol=1e-5 * scale)
            assert y.dtype == w.dtype


@pytest.mark.slow
def test_images_are_sampled_at_fixed_places(tmp_path):
    x, grid = random(2, 3, 6, 7), np.tanh(random(2, 2, 5, 4, seed=1)) * 1.3
    W, offset = random(4, 3, 3, 3, seed=2), random(2, 18, 4, 5, seed=3)
    for function in (
        lambda x: F.spatial_transformer_sampler(x, grid),
        lambda x: F.deformable_convolution_2d_sampler(x, offset, W),
    ):
        export(function, (x,), tmp_path / "f.onnx", input_names=["x"])
        (y,) = run(tmp_path / "f.onnx", x=x)
        np.testing.assert_allclose(y, function(dbrdist.Variable(x)).array, rtol=1e-5, atol=1e-5)


@each(case=[case for case in CASES if case.name in REFUSED])
def test_a_function_without_operators_is_refused_by_name(case, tmp_path):
    if case.needs:
        pytest.importorskip(case.needs)
    with pytest.raises(OperatorError, match=r"onnx\.export: "):
        for xs in small_inputs(case):
            export(case.function, tuple(xs), tmp_path / "f.onnx")
    assert list(tmp_path.iterdir()) == [] or case.name in {"pad_sequence_length"}


def test_at_least_120_functions_are_exported():
    names = {function_of(case.name) for case in CASES if case.name not in REFUSED} | {
        k for k, v in FURTHER.items() if v
    }
    assert len(names - {None}) >= 190


@each(axis=[None, 1, (0, -1)], keepdims=[False, True])
def test_means_with_weights(axis, keepdims, tmp_path):
    def function(x):
        return F.mean(x, axis, weights=F.sigmoid(x), keepdims=keepdims)

    x = random(3, 4)
    export(function, x, tmp_path / "f.onnx", input_names=["x"], check=False)
    np.testing.assert_allclose(run(tmp_path / "f.onnx", x=x)[0], function(dbrdist.Variable(x)).array, rtol=1e-5)


@each(name=[name for name, function in FURTHER.items() if function])
def test_functions_without_derivatives(name, tmp_path):
    x = random(3, 4)
    export(FURTHER[name], x, tmp_path / "f.onnx", check=False)
    y = FURTHER[name](dbrdist.Variable(x)).array
    found = run(tmp_path / "f.onnx", x=x[::-1].copy())[0]
    np.testing.assert_array_equal(found, FURTHER[name](dbrdist.Variable(x[::-1].copy())).array)
    assert found.dtype == y.dtype


# ---- models ---------------------------------------------------------------------------------------------------------

MODELS = {
    "MLP": (lambda: models.MLP(), (2, 784)),
    "LeNet": (lambda: models.LeNet(), (2, 1, 28, 28)),
    "ResNet20": (lambda: models.ResNet20(10), (2, 3, 16, 16)),
    "ResNet18": (lambda: models.ResNet18(10), (1, 3, 32, 32)),
    "ResNet50": (lambda: models.ResNet50(10), (1, 3, 32, 32)),
    "ResNetD": (lambda: models.ResNet(10, (1, 1, 1, 1), variant="d", blur_pooling="all"), (1, 3, 32, 32)),
    "ResNet of Chainer": (lambda: models.ResNet(10, (1, 1, 1, 1), variant="chainer"), (1, 3, 32, 32)),
    "stochastic depth": (lambda: models.ResNet(10, (1, 1, 1, 1), stochastic_depth=0.5), (1, 3, 32, 32)),
    "TransformerBlock": (lambda: L.TransformerBlock(8, 2), (2, 5, 8)),
    "TransformerBlock, normalization first": (
        lambda: L.TransformerBlock(8, 2, norm_first=True, activation=F.gelu), (2, 5, 8)
    ),
    "GoogLeNet": (lambda: layer(L.GoogLeNet(None), "prob"), (1, 3, 224, 224)),
    "VGGLayers": (lambda: layer(Thin(None, 16), "prob"), (1, 3, 224, 224)),
    "ResNetLayers": (lambda: layer(ThinResNet(None, 50), "prob"), (1, 3, 224, 224)),
}  # fmt: skip


class Thin(VGGLayers):
    channels, hidden_size = (4, 4, 8, 8, 8), 16


class ThinResNet(ResNetLayers):
    channels = (4, 8, 8, 8)


def layer(model, name):
    """A network of Chainer's as a function of images."""
    return lambda x: model(x, layers=[name])[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_our_models_with_any_batch(name, tmp_path):
    make, shape = MODELS[name]
    model, x = make(), random(*shape)
    with dbrdist.using_config("train", name[0] == "R"):
        model(x)  # initializes, and moves running statistics
    export(model, x, tmp_path / "m.onnx", dynamic_batch=True, check=False)
    more = random(shape[0] + 3, *shape[1:], seed=1)
    with dbrdist.using_config("train", False):
        wanted = model(more).array
    np.testing.assert_allclose(run(tmp_path / "m.onnx", x=more)[0], wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


def test_parameters_keep_their_paths_and_the_metadata_are_stored(tmp_path):
    model = models.LeNet()
    x = random(2, 1, 28, 28)
    model(x)
    export(model, x, tmp_path / "m.onnx", metadata={"mean": "0.5"})
    file = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(file)
    names = {tensor.name for tensor in file.graph.initializer}
    assert {path.strip("/").replace("/", ".") for path, _ in model.namedparams()} <= names
    assert {p.key: p.value for p in file.metadata_props} == {"mean": "0.5"}


class Sequences(dbrdist.Chain):
    def __init__(self, link):
        super().__init__()
        with self.init_scope():
            self.link = link

    def forward(self, xs):
        states = (None,) * (2 if "LSTM" in type(self.link).__name__ else 1)
        return self.link(*states, xs)


@pytest.mark.slow
@each(kind=["NStepLSTM", "NStepBiLSTM", "NStepGRU", "NStepBiGRU", "NStepRNNTanh", "NStepRNNReLU", "NStepBiRNNTanh"])
@each(lengths=[(4, 4), (4, 3, 1), (2, 5, 1, 5)])
def test_recurrent_layers_over_sequences(kind, lengths, tmp_path):
    model = Sequences(getattr(L, kind)(2, 5, 4, 0.0))
    xs = [random(n, 5, seed=n) for n in lengths]
    export(model, (xs,), tmp_path / "m.onnx", check=False)
    wanted = arrays(model(xs))
    found = run(tmp_path / "m.onnx", **{f"x{i}": x for i, x in enumerate(xs)})
    for y, w in zip(found, wanted, strict=True):
        np.testing.assert_allclose(y, w, atol=1e-5)


class Tokens(dbrdist.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.embed, self.lstm = L.EmbedID(20, 8, ignore_label=-1), L.LSTM(8, 8)
            self.attention, self.norm = L.MultiHeadAttention(8, 2), L.RMSNormalization(8)
            self.out = L.Linear(8, 20)

    def forward(self, ids):
        self.lstm.reset_state()
        h = F.stack([self.lstm(self.embed(ids[:, t])) for t in range(ids.shape[1])], 1)
        return self.out(self.norm(h + self.attention(h, is_causal=True)), n_batch_axes=2)


@pytest.mark.slow
@each(dynamic=[False, True])
def test_a_language_model_of_ids_with_attention(dynamic, tmp_path):
    model = Tokens()
    ids = np.random.default_rng(0).integers(-1, 20, (3, 5)).astype(np.int32)
    model(ids)
    export(model, ids, tmp_path / "m.onnx", dynamic_batch=dynamic, check=False)
    other = np.random.default_rng(1).integers(-1, 20, (6 if dynamic else 3, 5)).astype(np.int32)
    np.testing.assert_allclose(run(tmp_path / "m.onnx", x=other)[0], model(other).array, atol=1e-5)


def test_exports_leave_the_model_as_it_was(tmp_path):
    model = dbrdist.Sequential(L.BatchNormalization(4), L.LSTM(4, 3))
    x = random(5, 4)
    model(x)
    state, mean = model[1].h, model[0].avg_mean.copy()
    export(model, x, tmp_path / "m.onnx", train=True)
    assert model[1].h is state
    np.testing.assert_array_equal(model[0].avg_mean, mean)
    assert dbrdist.config.train is True


# ---- what is refused ------------------------------------------------------------------------------------------------


class Net(dbrdist.Chain):
    def __init__(self, function):
        super().__init__()
        self.function = function
        with self.init_scope():
            self.out = L.Linear(4, 4)

    def forward(self, x):
        return self.function(self.out(x))


@each(
    what=["array", "number", "branch", "dropout", "unknown", "own", "random"]
)  # each is a value or a call that the file would freeze
def test_values_outside_of_the_graph_are_refused_with_function_and_layer(what, tmp_path):
    class Own(dbrdist.FunctionNode):
        def forward(self, xs):
            return (xs[0] * 2,)

    functions = {
        "array": lambda x: x * x.array.max(axis=1, keepdims=True),
        "number": lambda x: x * float(x.array.max()),
        "branch": lambda x: F.sin(x) if x.array[0, 0] > 0 else F.cos(x),
        "dropout": lambda x: F.dropout(x),
        "unknown": lambda x: F.erfinv(F.tanh(x) * 0.5),
        "own": lambda x: Own().apply((x,))[0],
        "random": lambda x: x + F.gaussian(np.zeros((2, 4), "f"), np.zeros((2, 4), "f")).array,
    }
    words = {
        "array": "depends on the values", "number": "(depends on the values|for these inputs)",
        "branch": "control flow",
        "dropout": "train=False", "unknown": "erfinv in layer /", "own": "Own in layer /: no converter",
        "random": "depends on the values",
    }  # fmt: skip
    x = random(2, 4)
    x[0, 0], x[1, 1] = 5, -5
    model = Net(functions[what])
    model.out.W.array[...] = np.eye(4)
    with pytest.raises(OperatorError, match=words[what]):
        export(model, x, tmp_path / "m.onnx", train=what == "dropout")
    assert list(tmp_path.iterdir()) == []


def test_a_layer_is_named_by_its_path(tmp_path):
    model = dbrdist.Sequential(L.Linear(4, 4), dbrdist.Sequential(L.Linear(4, 4), Net(F.erfinv)))
    with pytest.raises(OperatorError, match=r"erfinv in layer /1/1"):
        export(model, random(2, 4) * 0.01, tmp_path / "m.onnx")


def test_a_batch_that_the_graph_depends_on(tmp_path):
    with pytest.raises(OperatorError, match="dynamic_batch"):
        export(
            lambda x: x * np.arange(len(x), dtype="f")[:, None], random(3, 2), tmp_path / "m.onnx", dynamic_batch=True
        )
    with pytest.raises(OperatorError, match="first axis"):
        export(F.exp, np.ones((), "f"), tmp_path / "m.onnx", dynamic_batch=True)
    with pytest.raises(OperatorError, match=r"took a batch of 3, but not one of 4, which dynamic_batch needs: "):
        export(lambda x: F.reshape(x, (3, 8)), random(3, 4, 2), tmp_path / "m.onnx", dynamic_batch=True)


@each(names=[["a"], ["a", "a"], ["a", "b", "c"]])
def test_names_of_inputs_are_checked(names, tmp_path):
    with pytest.raises(ValueError, match="input_names: expected 2 different names"):
        export(F.add, (random(2), random(2)), tmp_path / "m.onnx", input_names=names)


def test_what_is_no_model_or_no_input(tmp_path):
    with pytest.raises(TypeError, match="at least one NumPy array"):
        export(F.exp, [], tmp_path / "m.onnx")
    with pytest.raises(TypeError, match="the model returned NoneType"):
        export(lambda x: None, random(2), tmp_path / "m.onnx")
    with pytest.raises(FileNotFoundError):
        export(F.exp, random(2), tmp_path / "missing" / "m.onnx")


def test_nothing_is_left_and_an_older_file_stays_if_the_disk_is_full(tmp_path, monkeypatch):
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        export(F.exp, random(2), path)
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"] and path.read_bytes() == b"old"


def test_without_the_package_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name, *rest):
        if name.split(".")[0] == "onnx":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ImportError, match=r"pip install 'dbrdist\[onnx\]'"):
        export(F.exp, random(2), tmp_path / "m.onnx")


def test_nested_arguments_and_results(tmp_path):
    def model(pair, *, scale):
        return {"sum": pair[0] + pair[1], "more": [pair[0] * scale, (scale,)]}

    a, b, s = random(2, 3), random(2, 3, seed=1), random(3, seed=2)
    export(model, {"pair": [a, b], "scale": s}, tmp_path / "m.onnx", output_names=["p", "q", "r"], check=False)
    p, q, r = run(tmp_path / "m.onnx", x0=a, x1=b, x2=s)
    np.testing.assert_allclose((p, q), (a + b, a * s), rtol=1e-6)
    np.testing.assert_array_equal(r, s)


PARTS_OF_AXES = {
    "channels": lambda x: x[:, [0, 2, -1]],
    "mask": lambda x: x[:, np.array([True, False, True, True]), ::-1],
    "last axis": lambda x: x[..., np.array([[1, 0]])],
    "slices": lambda x: x[:, 1:, np.array([2, 0]), 1:],
}


@each(name=PARTS_OF_AXES)
def test_indices_along_one_axis_leave_the_batch_open(name, tmp_path):
    export(PARTS_OF_AXES[name], random(3, 4, 3, 2), tmp_path / "f.onnx", dynamic_batch=True, check=False)
    x = random(5, 4, 3, 2, seed=1)
    np.testing.assert_array_equal(run(tmp_path / "f.onnx", x=x)[0], PARTS_OF_AXES[name](dbrdist.Variable(x)).array)


def largest(x):
    """A number of a program, which depends on the values of x."""
    return int(x.array[0].argmax())


@each(
    function=[
        lambda x: x[:, largest(x)],
        lambda x: x[:, : largest(x) + 1],
        lambda x: x[:, x.array[0].argsort().tolist()],
        lambda x: x[:, x.array[0].argsort()],
        lambda x: F.sum(F.tile(x, (1, largest(x) + 1)), axis=1),
        lambda x: F.sum(F.pad(x, ((0, 0), (largest(x), 1)), "edge"), axis=1),
        lambda x: F.sum(F.split_axis(x, [largest(x) + 1], 1)[0], axis=1),
        lambda x: F.scatter_add(x, (slice(None), largest(x)), x[:, 0]),
        lambda x: F.as_strided(x, (2, 2), (5, 1), largest(x)),
    ]
)
def test_indices_and_sizes_that_depend_on_values_are_refused(function, tmp_path):
    """They were constants of the file, which only onnxruntime's results could show."""
    with pytest.raises(OperatorError, match=r"(?s)for these inputs and .* for others|depends on the values"):
        export(function, random(3, 5, seed=2), tmp_path / "f.onnx", check=False)


def test_a_number_that_depends_on_the_batch_is_refused_in_words(tmp_path):
    with pytest.raises(OperatorError, match=r"div: a constant of shape \(\) depends on the batch; export without dyn"):
        export(lambda x: x / len(x), random(3, 4), tmp_path / "f.onnx", dynamic_batch=True)
