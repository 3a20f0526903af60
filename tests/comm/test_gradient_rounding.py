"""16-bit gradients: as they are rounded for virtual workers, and as communicators send them."""

import numpy as np
import pytest

from dbrdist import Link, Parameter
from dbrdist.comm import run_threads
from dbrdist.comm.protocol.wire_type import round_to
from dbrdist.core.array.backend import as_dtype
from tests.each import each


@each(size=[1, 7, 1000], scale=[1e-30, 1e-8, 1.0, 1e6])
def test_float16_rounds_once_whatever_the_size(size, scale):
    """Relative to the largest element: half a unit in the last place of 11 bits for those within 2^-14 of it."""
    x = (np.random.default_rng(size).standard_normal(size) * scale).astype(np.float32)
    rounded = [x.copy()]
    round_to(as_dtype("float16"), rounded)
    large = np.abs(x) > np.abs(x).max() * 2.0**-14
    assert (np.abs(rounded[0] - x)[large] <= np.abs(x)[large] * 2.0**-11).all()
    exponent = 14 - np.floor(np.log2(np.abs(x).max().astype(float)))
    expected = (x.astype(float) * 2.0 ** min(exponent, 120)).astype(np.float16).astype(float) / 2.0 ** min(
        exponent, 120
    )
    np.testing.assert_array_equal(rounded[0], expected.astype(np.float32))


def test_arrays_share_one_scale_and_zeros_stay():
    a, b = np.array([1.0, 0.0], np.float32), np.array([2.0**-20, 3e-9], np.float32)
    round_to(as_dtype("float16"), [a, b])
    assert a.tolist() == [1.0, 0.0]
    assert b[0] == 2.0**-20
    assert b[1] == np.float32(float(np.float16(np.float32(3e-9) * 2**14)) / 2**14)


def test_bfloat16_keeps_8_bits():
    x = np.array([1 + 2.0**-9, 1 + 2.0**-7, -3e38, 1e-38], np.float32)
    rounded = x.copy()
    round_to(as_dtype("bfloat16"), [rounded])
    np.testing.assert_array_equal(rounded, x.astype(as_dtype("bfloat16")).astype(np.float32))


@each(num_ranks=[2, 4], dtype=["float16", "bfloat16"])
def test_the_mean_of_equal_gradients_is_exact_for_powers_of_two(num_ranks, dtype):
    x = np.array([1.0, 0.5, 2.0**-20, 1024.0, -65504.0], np.float32).astype(as_dtype(dtype)).astype(np.float32)

    def mean(comm):
        comm.set_config("allreduce_grad_dtype", dtype)
        link = Link()
        with link.init_scope():
            link.p = Parameter(np.zeros_like(x))
        link.p.grad = x.copy()
        comm.multi_node_mean_grad(link)
        return link.p.grad.copy()

    for found in run_threads(num_ranks, mean):
        np.testing.assert_array_equal(found, x)


def test_averaging_the_statistics_of_batches_is_not_pooling_them():
    """Golden numbers: the variance of the pooled batch is the mean of variances plus the variance of means."""
    x = np.random.RandomState(0).randn(4, 32) + 0.5 * np.arange(4)[:, None]
    found = x.mean(1).mean(), x.var(1).mean(), x.mean(1).var(), x.var()
    assert found == pytest.approx((0.885820, 0.963440, 0.487493, 1.450933), abs=5e-7)
    assert x.var(1).mean() + x.mean(1).var() == pytest.approx(x.var(), rel=1e-14)
