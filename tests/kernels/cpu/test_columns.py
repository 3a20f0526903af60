"""Tests of dbrdist.kernels.cpu.columns."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist import kernels
from dbrdist.core.array import backend
from dbrdist.kernels import ConvGeometry
from dbrdist.kernels.cpu import columns, onednn
from tests.each import each
from tests.kernels.provider_helpers import IMAGE, POINT, WEIGHTS, serves

F32 = np.dtype("f")


def test_places_of_columns_are_kept_and_cannot_be_changed():
    g = kernels.ConvGeometry(1, 1, 1, 1)
    index, is_padded = columns._gather((1, 2, 3, 3), (2, 2), (4, 4), g)
    assert is_padded and not index.flags.writeable
    assert columns._gather((1, 2, 3, 3), (2, 2), (4, 4), g)[0] is index
    assert not columns._scatter((1, 2, 3, 3), (2, 2), (4, 4), g).flags.writeable
    assert not columns._gather((1, 2, 3, 3), (2, 2), (2, 2), kernels.ConvGeometry())[1]


def test_small_convolutions_of_one_type_are_columns():
    with kernels.use("columns"):
        assert serves() == ["columns"] * 3
        assert serves(g=kernels.ConvGeometry(1, 1, 1, 1)) == ["columns"] * 3
        assert serves(IMAGE.astype("d"), WEIGHTS.astype("d"), gy_dtype="d") == ["columns"] * 3
        assert serves(IMAGE.astype("e"), WEIGHTS.astype("e"), gy_dtype="e") == ["numpy"] * 3
        assert serves(W=WEIGHTS.astype("d")) == ["numpy"] * 3
        assert serves(gy_dtype="d") == ["columns", "numpy", "numpy"]
        assert serves(W=WEIGHTS[:, :4], g=POINT._replace(groups=2)) == ["numpy"] * 3
        for num_pixels, name in ((768, "columns"), (769, "numpy")):  # columns of 3 << 11 elements at most
            x = backend.channels_last(np.ones((1, 8, num_pixels, 1), "f"))
            assert serves(x, np.ones((2, 8, 1, 1), "f")) == [name] * 3


def test_gradients_of_weights_are_columns_only_where_they_are_written_in_their_type():
    gy = np.ones((1, 6, 2, 2), "f")
    with kernels.use("columns"):
        for target, name in (("f", "columns"), ("d", "numpy")):
            out = np.empty(WEIGHTS.shape, target)
            assert kernels.provider_of("conv_backward_weight", IMAGE, gy, WEIGHTS.shape, POINT, F32, out) == name
            dtype = np.dtype(target)
            assert kernels.provider_of("conv_backward_weight", IMAGE, gy, WEIGHTS.shape, POINT, dtype, None) == name


def refuses(planner, *arguments):
    with pytest.raises(onednn.Unsupported):
        planner(*arguments)


WINDOWS = [
    ((2, 3, 4, 5), (2, 3), (1, 1, 0, 0, 1, 1)),
    ((1, 2, 5, 4), (3, 2), (2, 1, 1, 2, 1, 1)),
    ((1, 1, 6, 7), (2, 2), (1, 2, 2, 1, 2, 3)),
    ((2, 1, 7, 7), (1, 2), (3, 3, 0, 0, 1, 1)),
    ((1, 1, 1, 1), (1, 1), (4, 4, 2, 2, 1, 1)),
]


@each(**{"x_shape, kernel, window": WINDOWS})
def test_columns_are_the_pixels_of_each_window_and_back(x_shape, kernel, window):
    g = ConvGeometry(*window)
    (n, c, h, w), (kh, kw), (oh, ow) = x_shape, kernel, g.out_hw(*x_shape[2:], *kernel)
    index, is_padded = columns._gather(x_shape, kernel, (oh, ow), g)
    expected = np.full((n, oh, ow, c, kh, kw), n * c * h * w)
    seen_by = {}
    for place in np.ndindex(*expected.shape):
        i, p, q, channel, u, v = place
        row, column = p * g.sh + u * g.dh - g.ph, q * g.sw + v * g.dw - g.pw
        if 0 <= row < h and 0 <= column < w:
            expected[place] = ((i * h + row) * w + column) * c + channel
            seen_by.setdefault(expected[place], []).append(int(np.ravel_multi_index(place, expected.shape)))
    np.testing.assert_array_equal(index, expected.reshape(n * oh * ow, c * kh * kw))
    assert is_padded == (expected == n * c * h * w).any()
    back = columns._scatter(x_shape, kernel, (oh, ow), g)
    assert back.shape == (max(map(len, seen_by.values()), default=1), n * c * h * w)
    for place, row in enumerate(back.T.tolist()):
        there = seen_by.get(place, [])
        assert row == there + [expected.size] * (len(back) - len(there))


def test_convolutions_without_pixels_or_filters_are_no_columns():
    x, W, g = np.ones((1, 2, 3, 3), "f"), np.ones((4, 2, 2, 2), "f"), ConvGeometry()
    columns._plan_forward(x, W, None, g)
    refuses(columns._plan_forward, x[:0], W, None, g)
    refuses(columns._plan_forward, x, W[:0], None, g)
    refuses(columns._plan_forward, x[:, :0], W[:, :0], None, g)
    refuses(columns._plan_forward, x.view(np.ma.MaskedArray), W, None, g)
    refuses(columns._plan_backward_weight, x, x.astype("d"), W.shape, g, F32, None)
