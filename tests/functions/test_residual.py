"""The end of a residual block as one function, beside the functions that it stands for."""

from __future__ import annotations

import numpy as np
import pytest
from dbrdist.gradient_check import check_backward, check_double_backward

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable
from dbrdist.core.array.backend import channels_last
from dbrdist.functions.residual import RectifiedSum, batch_normalization_add_relu
from tests.each import each

SHAPES = [(3, 4, 5, 2), (6, 4)]


def drawn(shape, seed=0):
    """x, gamma, beta and r, with sums that are not near 0, where the ReLU has no derivative."""
    rng = np.random.default_rng(seed)
    x, r = rng.standard_normal((2, *shape))
    gamma, beta = rng.standard_normal((2, shape[1]))
    sums = F.batch_normalization(x, gamma, beta).array + r
    return x, gamma, beta, r + np.where(abs(sums) < 0.1, np.copysign(0.2, sums), 0)


@pytest.mark.parametrize("shape", SHAPES)
def test_values_statistics_and_gradients_are_those_of_the_parts(shape):
    gy = np.random.default_rng(1).standard_normal(shape)

    def run(function):
        xs = [Variable(v.copy()) for v in drawn(shape)]
        running = np.zeros(shape[1]), np.ones(shape[1])
        y = function(*xs, running_mean=running[0], running_var=running[1], decay=0.7, eps=1e-3)
        y.grad = gy
        y.backward()
        return [y.array, *running, *(v.grad for v in xs)]

    def parts(x, gamma, beta, r, **options):
        return F.relu(F.batch_normalization(x, gamma, beta, **options) + r)

    for found, expected in zip(run(batch_normalization_add_relu), run(parts)):
        np.testing.assert_allclose(found, expected, 1e-12, 1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_differences(shape):
    gy, *ggs = (np.random.default_rng(2 + k).standard_normal(s) for k, s in enumerate([shape, shape, 4, 4, shape]))
    check_backward(batch_normalization_add_relu, drawn(shape), gy, atol=1e-5, rtol=1e-5, dtype="d")
    check_double_backward(
        batch_normalization_add_relu, drawn(shape), gy, tuple(ggs), atol=1e-4, rtol=1e-4, dtype="d"
    )  # fmt: skip


def test_two_gradients_are_added():
    x, gamma, beta, r = (Variable(v) for v in drawn((3, 4, 5, 2)))
    y = batch_normalization_add_relu(x, gamma, beta, r)
    (F.sum(y * 2.0) + F.sum(y * y)).backward()
    np.testing.assert_allclose(r.grad, (2 + 2 * y.array) * (y.array > 0), 1e-12)


def test_a_residual_that_broadcasts_is_added_by_itself():
    x, gamma, beta, _ = drawn((3, 4, 5, 2))
    r = Variable(np.full((1, 4, 1, 1), 0.3))
    y = batch_normalization_add_relu(x, gamma, beta, r)
    assert not isinstance(y.creator, RectifiedSum)
    np.testing.assert_array_equal(y.array, F.relu(F.batch_normalization(x, gamma, beta) + r).array)
    F.sum(y).backward()
    np.testing.assert_allclose(r.grad, (y.array > 0).sum((0, 2, 3), keepdims=True))


def test_a_number_is_added_too():
    x, gamma, beta, _ = drawn((3, 4, 5, 2))
    expected = F.relu(F.batch_normalization(x, gamma, beta) + 0.3).array
    np.testing.assert_array_equal(batch_normalization_add_relu(x, gamma, beta, 0.3).array, expected)


def test_a_link_on_the_host_is_one_function():
    bn = dbrdist.links.BatchNormalization(4, dtype="d")
    x, _, _, r = drawn((3, 4, 5, 2))
    y = bn.add_relu(x, r)
    assert type(y.creator).__name__ == "RectifiedSum"
    np.testing.assert_allclose(y.array, np.maximum((x - x.mean((0, 2, 3), keepdims=True)) / np.sqrt(
        x.var((0, 2, 3), keepdims=True) + bn.eps) + r, 0), 1e-12)  # fmt: skip
    np.testing.assert_allclose(bn.avg_mean, 0.1 * x.mean((0, 2, 3)), 1e-12)


class Seen(dbrdist.LinkHook):
    name = "seen"

    def __init__(self):
        self.links = []

    def forward_postprocess(self, args):
        self.links.append(args.link)


def test_the_parts_of_a_link_are_called_where_a_hook_looks_on():
    bn, (x, _, _, r), seen = dbrdist.links.BatchNormalization(4, dtype="d"), drawn((6, 4)), Seen()
    with seen:
        bn.add_relu(x, r)
    bn.add_hook(seen)
    bn.add_relu(x, r)
    bn.delete_hook("seen")
    assert seen.links == [bn, bn]
    with dbrdist.function_hooks.TimerHook() as timer:
        bn.add_relu(x, r)
    assert [name for name, _ in timer.call_history] == ["BatchNormalization", "add", "ReLU"]
    bn.forward = lambda x: 2 * x
    np.testing.assert_array_equal(bn.add_relu(Variable(x), r).array, np.maximum(2 * x + r, 0))


@each(num_gradients=[1, 2])
def test_large_images_give_the_bits_of_the_parts_on_the_host(num_gradients):
    shape = 8, 16, 64, 48  # of which two gradients are added where they are masked
    values = [a.astype("f") for a in drawn(shape)]
    gys = [np.random.default_rng(seed).standard_normal(shape, "f") for seed in range(num_gradients)]

    def run(function):
        xs = [Variable(channels_last(v) if v.ndim == 4 else v.copy()) for v in values]
        y = function(*xs, eps=1e-3)
        sum(F.sum(y * channels_last(gy)) for gy in gys).backward()
        return [y.array, *(v.grad for v in xs)]

    def parts(x, gamma, beta, r, **options):
        return F.relu(F.batch_normalization(x, gamma, beta, **options) + r)

    for a, b in zip(run(batch_normalization_add_relu), run(parts)):
        np.testing.assert_array_equal(a, b)
