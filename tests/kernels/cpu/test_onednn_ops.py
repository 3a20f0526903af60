"""Sums of ranks' gradients in narrow types, against NumPy in float64."""

import ml_dtypes
import numpy as np
import pytest

from dbrdist import kernels
from dbrdist.kernels.cpu import onednn
from tests.each import each

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def terms_of(count, size, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return tuple((rng.standard_normal(size) * 10.0 ** rng.integers(-4, 4, size)).astype(dtype) for _ in range(count))


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16), np.dtype(np.float32)])
@each(count=[1, 2, 3, 4, 8, 9], size=[0, 1, 5, 1000, 4096, 5000, 32768])
def test_sums_are_rounded_once(dtype, count, size):
    terms = terms_of(count, size, dtype)
    exact = sum(t.astype(np.float64) for t in terms) / count
    largest = sum(np.abs(t.astype(np.float64)) for t in terms) / count
    out = np.empty(size, dtype)
    kernels.scaled_sum(terms, 1 / count, out)
    # Half a unit in the last place of the result, and the errors of sums in float32.
    finfo = ml_dtypes.finfo(dtype)
    error = np.abs(out.astype(np.float64) - exact)
    allowed = float(finfo.eps) / 2 * np.abs(exact) + 1e-6 * largest + float(finfo.smallest_subnormal)
    assert (error <= allowed * (2 if dtype == np.float32 else 1.0001)).all()
    kernels.scaled_sum(terms, 1 / count, terms[0])  # in place
    np.testing.assert_array_equal(terms[0], out)


def test_ties_go_to_even_and_what_is_not_finite_stays():
    size = 1 << 12
    a, b = np.zeros(size, BFLOAT16), np.zeros(size, BFLOAT16)
    a[:8] = [1, 1, np.inf, np.inf, np.nan, 3e38, -1, -np.inf]
    b[:8] = [2**-8, 3 * 2**-8, 1, -np.inf, 1, 3e38, 1, 2]
    out = np.empty(size, BFLOAT16)
    with np.errstate(over="ignore", invalid="ignore"):  # where NumPy serves
        kernels.scaled_sum((a, b), 1.0, out)
    expected = [1, 1 + 2**-6, np.inf, np.nan, np.nan, np.inf, 0, -np.inf]
    np.testing.assert_array_equal(out[:8].astype(float), np.array(expected, np.float32))
    assert not out[8:].any()


def test_onednn_serves_bfloat16_where_the_processor_has_it():
    try:
        with onednn.Builder() as b:
            row = b.memory((4096,), onednn.data_type(BFLOAT16))
            b.describe("binary", 0x1FFF0, row, row, row, b.attributes())
    except (onednn.Unavailable, onednn.Unsupported) as e:
        pytest.skip(str(e))
    for size, provider in ((4096, "onednn"), (32768, "onednn"), (2048, "numpy"), (5000, "numpy")):
        terms = terms_of(3, size, BFLOAT16)
        assert kernels.provider_of("scaled_sum", terms, 0.5, terms[0]) == provider
    strided = tuple(t[::2] for t in terms_of(2, 8192, BFLOAT16))
    assert kernels.provider_of("scaled_sum", strided, 0.5, strided[0]) == "numpy"
