"""Tests of conversion_loops.h: other types of floating-point numbers, with the bits of NumPy and ml_dtypes."""

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import kernels
from dbrdist.core.array import backend
from dbrdist.kernels.cpu import loops
from tests.each import each
from tests.kernels.cpu.test_loops import compiled

PAIRS = [("f", "e"), ("e", "f"), ("f", "bfloat16"), ("bfloat16", "f"), ("f", "d"), ("d", "f")]
EDGES = [  # of float32: 0, the smallest of float16, half of it, the smallest normal one, the largest, infinity and NaN
    0, 1, 0x00800000, 0x33000000, 0x33800000, 0x38800000, 0x387FE000, 0x477FEFFF, 0x477FF000, 0x47800000, 0x7F7FFFFF,
    0x7F800000, 0x7F801FFF, 0x7F802000, 0x7FC00000,
]  # fmt: skip


def bits_of_everything(dtype):
    """All numbers of 16 bits; of wider types random bits, and those around the places where rounding changes."""
    rng = np.random.default_rng(0)
    if dtype.itemsize == 2:
        return np.arange(1 << 16, dtype=np.uint16).view(dtype)
    if dtype.itemsize == 8:
        wide = rng.integers(0, 1 << 63, 20_000, np.int64).view("d"), rng.standard_normal(9999)
        ends = [np.nan, np.inf, -0.0, 1e-45, 7e-46, 1e-46, 1.1754943e-38, 3.4028235677973366e38, 3.5e38]
        return np.concatenate([*wide, ends, np.negative(ends)])
    near = [np.arange(max(e - 5, 0), e + 6) for e in EDGES]
    parts = rng.integers(0, 1 << 31, 50_000), rng.integers(0x32000000, 0x48000000, 50_003), *near
    size = np.concatenate(parts).astype(np.uint32)
    return np.concatenate([size, size | np.uint32(1 << 31)]).view("f")


def as_bits(a):
    return a.view(f"u{a.dtype.itemsize}")


@compiled
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(pair=PAIRS)
def test_a_conversion_has_the_bits_of_numpys_with_every_set_of_instructions(pair):
    """The payload of NaN as well."""
    source, target = map(backend.as_dtype, pair)
    x = bits_of_everything(source)
    wanted = as_bits(x.astype(target))
    assert kernels.provider_of("convert", x, target) == "loops"
    before = loops._found.use_level(0)
    try:
        for level in range(before + 1):
            loops._found.use_level(level)
            np.testing.assert_array_equal(as_bits(kernels.convert(x, target)), wanted)
    finally:
        loops._found.use_level(before)


@compiled
@each(size=[8192, 8193, 8207, 65_535, 65_537, 300_001])
def test_the_gradient_of_a_cast_is_cast_back(size):
    x = np.random.default_rng(0).standard_normal(size).astype("f")
    v = dbrdist.Variable(x)
    y = F.cast(v, "float16")
    np.testing.assert_array_equal(y.array, x.astype("e"))
    gy = np.random.default_rng(1).standard_normal(size).astype("e")
    dbrdist.backward([y], [gy])
    np.testing.assert_array_equal(v.grad, gy.astype("f"))


@compiled
def test_layouts_stay_and_what_is_not_dense_or_native_is_numpys():
    images = backend.channels_last(np.random.default_rng(0).standard_normal((4, 8, 20, 30)).astype("f"))
    y = F.cast(images, "float16").array
    assert backend.is_channels_last(y)
    np.testing.assert_array_equal(y, images.astype("e"))
    x = np.random.default_rng(0).standard_normal((300, 100)).astype("f")
    unaligned = np.zeros(x.nbytes + 1, np.uint8)[1:].view("f").reshape(x.shape)
    unaligned[...] = x
    for other in (x[:, ::2], x[::-1], x.T, x.astype(">f4"), np.broadcast_to(x[0], x.shape), unaligned):
        np.testing.assert_array_equal(F.cast(other, "float16").array, other.astype("e"))
        assert kernels.convert(other, np.dtype("e")) is None
    assert kernels.convert(x, np.dtype(">f2")) is None
    assert F.cast(x[:0], "float16").shape == (0, 100)
