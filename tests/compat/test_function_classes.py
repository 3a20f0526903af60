"""Classes of Chainer's functions for which no node stands here: they call the function, and can be subclassed."""

import importlib

import numpy as np
import pytest

import dbrdist
from tests.each import each

X = np.random.RandomState(0).randn(2, 3, 4, 4).astype("f")
ROIS = np.array([[0, 0, 0, 3, 3], [1, 1, 1, 2, 2]], "f")


def made(path, *args, **kwargs):
    module, _, name = f"chainer.functions.{path}".rpartition(".")
    return getattr(importlib.import_module(module), name)(*args, **kwargs)


@each(case=[
    (lambda: made("array.expand_dims.ExpandDims", 1), (X,), X[:, None]),
    (lambda: made("array.stack.Stack", 1), (X, X + 1), np.stack([X, X + 1], 1)),
    (lambda: made("array.hstack.Hstack"), (X[0, 0], X[1, 0]), np.hstack([X[0, 0], X[1, 0]])),
    (lambda: made("array.swapaxes.Swapaxes", 1, 2), (X,), X.swapaxes(1, 2)),
    (lambda: made("array.tile.Tile", (2,)), (X[0, 0, 0],), np.tile(X[0, 0, 0], 2)),
    (lambda: made("array.fliplr.FlipLR"), (X,), X[:, ::-1]),
    (lambda: made("math.identity.Identity"), (X,), X),
    (lambda: made("connection.embed_id.EmbedIDFunction", 1), (np.array([0, 1]), X[0, 0]), X[0, 0][:2] * [[1], [0]]),
    (lambda: made("loss.mean_absolute_error.MeanAbsoluteError"), (X, X + 2), np.float32(2)),
    (lambda: made("connection.convolution_nd.ConvolutionND", 2, 1, 0), (X, np.ones((1, 3, 4, 4), "f")),
     X.sum((1, 2, 3)).reshape(2, 1, 1, 1)),
    (lambda: made("pooling.average_pooling_nd.AveragePoolingND", 2, 4, 1, 0, False, None), (X,),
     X.mean((2, 3), keepdims=True)),
    (lambda: made("pooling.average_pooling_nd.AveragePoolingND", 2, 4, cover_all=False), (X,),
     X.mean((2, 3), keepdims=True)),
    (lambda: made("pooling.roi_pooling_2d.ROIPooling2D", 1, 1, 1.0), (X, ROIS),
     np.stack([X[0].max((1, 2)), X[1][:, 1:3, 1:3].max((1, 2))])[:, :, None, None]),
])  # fmt: skip
def test_classes_call_their_function(case, installed):
    make, inputs, expected = case
    (y,) = make().apply(inputs)
    np.testing.assert_allclose(y.array, expected, rtol=1e-5, atol=1e-6)


def test_several_results(installed):
    a, b = made("array.broadcast.Broadcast").apply((X[0], X[0, 0, 0]))
    assert a.shape == b.shape == X[0].shape


def test_a_subclass_with_a_forward_of_its_own_is_a_node(installed):
    from chainer.functions.connection.convolution_nd import ConvolutionND

    class Doubled(ConvolutionND):
        def forward(self, inputs):
            return (inputs[0] * 2,)

        def backward(self, indexes, grads):
            return (grads[0] * 2,)

    x = dbrdist.Variable(X)
    (y,) = Doubled(2).apply((x,))
    y.grad = np.ones_like(X)
    y.backward()
    np.testing.assert_array_equal(x.grad, np.full_like(X, 2))


def test_the_base_of_poolings_of_a_program(installed):
    from chainer.functions.pooling.pooling_2d import Pooling2D

    pool = Pooling2D((2, 3), pad=1)
    assert (pool.kh, pool.kw, pool.sy, pool.sx, pool.ph, pool.pw, pool.cover_all) == (2, 3, 2, 3, 1, 1, True)
    assert Pooling2D(2, 1, cover_all=False).sy == 1


def test_other_classes_can_be_named_and_compared_with_but_not_made(installed):
    from chainer.functions.activation.tanh import TanhGrad

    y = dbrdist.functions.tanh(dbrdist.Variable(X))
    assert not isinstance(y.creator, TanhGrad)
    with pytest.raises(NotImplementedError, match=r"TanhGrad: dbrdist has no such class of a function"):
        TanhGrad(X)
    with pytest.raises(ImportError):
        from chainer.functions.activation.tanh import TanhGradient  # noqa: F401


def test_rules_and_bases_by_chainers_paths(installed):
    import chainer.links as L
    from chainer import optimizers
    from chainer.links.rnn import lstm, n_step_rnn
    from chainer.optimizers.momentum_sgd import MomentumSGDRule
    from chainer.utils.array import as_mat, as_vec

    assert optimizers.MomentumSGD.rule_class is MomentumSGDRule
    assert issubclass(L.LSTM, lstm.LSTMBase) and issubclass(L.NStepLSTM, n_step_rnn.NStepRNNBase)
    xs = [X[0, 0, 0, :2], X[0, 0, 0], X[0, 0, 0, :3]]
    order = n_step_rnn.argsort_list_descent(xs)
    assert order.tolist() == [1, 2, 0]
    by_length = n_step_rnn.permutate_list(xs, order, inv=False)
    assert [len(x) for x in by_length] == [4, 3, 2]
    assert all(a is b for a, b in zip(n_step_rnn.permutate_list(by_length, order, inv=True), xs))
    assert as_mat(X).shape == (2, 48) and as_vec(X).shape == (96,)


def test_average_pooling_does_not_cover_all_as_in_chainer(installed):
    with pytest.raises(ValueError, match="cover_all"):
        made("pooling.average_pooling_nd.AveragePoolingND", 2, 4, 1, 0, True)
