"""Convolution, normalization, addition and ReLU as one function, beside the functions that it stands for."""

from __future__ import annotations

import numpy as np
import pytest
from dbrdist.gradient_check import check_backward, check_double_backward

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable
from dbrdist.functions.residual import (
    NormalizedConvolution,
    RectifiedConvolution,
    Site,
    convolution_bn_of_batch,
)
from dbrdist.kernels import Block, ConvGeometry
from dbrdist.links import convolution_bn

KINDS = ["plain", "rectified", "residual", "part"]
EPS, DECAY = 1e-3, 0.7


class Case:
    """Operands of a kind whose sums are not near 0, where the ReLU has no derivative."""

    def __init__(self, kind):
        rng = np.random.default_rng(3)
        ksize, self.stride = (1, 2) if kind == "part" else (3, 1)
        pad = ksize // 2
        self.relu = kind != "plain"
        x, W = rng.standard_normal((3, 2, 5, 4)), rng.standard_normal((4, 2, ksize, ksize))
        gamma, beta = rng.standard_normal((2, 4))
        h = F.convolution_2d(x, W, stride=self.stride, pad=pad)
        sums = F.batch_normalization(h, gamma, beta, eps=EPS).array
        self.xs, self.pad = [x, W, gamma, beta], pad
        if kind in ("residual", "part"):
            r = rng.standard_normal(h.shape)
            self.xs.append(r + np.where(abs(sums + r) < 0.2, np.copysign(0.4, sums + r), 0))
        elif kind == "rectified":
            self.xs[3] = beta + 0.0123  # with these numbers no sum is nearer to 0 than 0.005
        block = Block(ConvGeometry(self.stride, self.stride, pad, pad), EPS, self.relu, len(self.xs) > 4)
        count = h.size // 4
        self.site = Site(block, count / (count - 1), False)
        self.gy = rng.standard_normal(h.shape)
        self.ggs = tuple(rng.standard_normal(v.shape) for v in self.xs)

    def running(self):
        return np.zeros(4), np.ones(4)

    def block(self, *xs, running=None):
        kind = RectifiedConvolution if self.relu else NormalizedConvolution
        return kind(self.site, running or self.running(), DECAY).apply(xs)[0]

    def parts(self, x, W, gamma, beta, *added, running=None):
        mean, var = running or self.running()
        h = F.convolution_2d(x, W, stride=self.stride, pad=self.pad)
        y = F.batch_normalization(h, gamma, beta, eps=EPS, running_mean=mean, running_var=var, decay=DECAY)
        for r in added:
            y = y + r
        return F.relu(y) if self.relu else y

    def outcome(self, function):
        xs, running = [Variable(v.copy()) for v in self.xs], self.running()
        y = function(*xs, running=running)
        y.grad = self.gy
        y.backward()
        return [y.array, *running, *(v.grad for v in xs)]


@pytest.mark.parametrize("kind", KINDS)
def test_values_statistics_and_gradients_are_those_of_the_parts(kind):
    case = Case(kind)
    for found, expected in zip(case.outcome(case.block), case.outcome(case.parts)):
        np.testing.assert_allclose(found, expected, 1e-11, 1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_differences(kind):
    case = Case(kind)
    xs = tuple(case.xs)
    check_backward(case.block, xs, case.gy, atol=1e-5, rtol=1e-5, dtype="d")
    check_double_backward(case.block, xs, case.gy, case.ggs, atol=1e-4, rtol=1e-4, dtype="d")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wanted", [(0,), (1,), (2, 3), (3,), (1, 2, 3)])
def test_gradients_of_some_inputs(kind, wanted):
    case = Case(kind)
    results = []
    for function in (case.block, case.parts):
        xs = [Variable(v, requires_grad=i in wanted) for i, v in enumerate(case.xs)]
        y = function(*xs)
        y.grad = case.gy
        y.backward()
        results.append([v.grad for v in xs])
    for i, (found, expected) in enumerate(zip(*results)):
        assert (found is not None) == (expected is not None) == (i in wanted)
        if found is not None:
            np.testing.assert_allclose(found, expected, 1e-11, 1e-11)


@pytest.mark.parametrize("kind", ["rectified", "residual"])
def test_gradients_of_two_losses_are_added(kind):
    case = Case(kind)
    results = []
    for function in (case.block, case.parts):
        xs = [Variable(v) for v in case.xs]
        y = function(*xs)
        (F.sum(y * 2.0) + F.sum(y * y)).backward()
        results.append([v.grad for v in xs])
    for found, expected in zip(*results):
        np.testing.assert_allclose(found, expected, 1e-11, 1e-11)


def test_a_function_that_was_cut_out_of_the_graph_holds_nothing():
    case = Case("residual")
    y = case.block(*[Variable(v) for v in case.xs])
    function = y.creator
    assert function.left is not None
    y.unchain_backward()
    assert function.left is None and not function._kept_xs


def test_a_twin_computes_the_same_and_moves_no_statistics():
    case, running = Case("residual"), (np.zeros(4), np.ones(4))
    y = case.block(*[Variable(v) for v in case.xs], running=running)
    mean = running[0].copy()
    again = y.creator.twin().apply(tuple(case.xs))[0]
    np.testing.assert_array_equal(again.array, y.array)
    np.testing.assert_array_equal(running[0], mean)


def test_arrays_of_the_host_are_left_to_the_separate_functions():
    case = Case("residual")
    x, W, gamma, beta, r = case.xs
    W, gamma, beta = map(dbrdist.Parameter, (W, gamma, beta))
    options = {"stride": (1, 1), "pad": (1, 1), "dilate": (1, 1), "groups": 1}
    assert convolution_bn_of_batch(x, W, (gamma, beta), case.running(), EPS, DECAY, True, r, **options) is None
    conv, bn = dbrdist.links.Convolution2D(2, 4, 3, nobias=True), dbrdist.links.BatchNormalization(4)
    y = convolution_bn.conv_bn(conv, bn, x.astype("f"), relu=True)
    assert type(y.creator).__name__ == "ReLU"
