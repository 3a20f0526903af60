"""Tests of dbrdist.functions.rnn."""

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist import Variable
from tests.each import each


@pytest.mark.slow
@each(kind=["lstm", "gru", "rnn"], dtype=["float32", "float16"])
def test_many_units_in_narrow_types(kind, dtype):
    """As many units and steps as kernels take over; the expected values are those of float64."""
    units, gates = 128, {"lstm": 4, "gru": 3, "rnn": 1}[kind]
    rng = np.random.default_rng(0)
    counts = [32] * 5 + [30, 5]

    def draw(*shape):
        return (rng.standard_normal(shape) / 8).astype(dtype)

    states = [draw(1, 32, units) for _ in range(2 if kind == "lstm" else 1)]
    ws = [[draw(units, units) for _ in range(2 * gates)]]
    bs = [[draw(units) for _ in range(2 * gates)]]
    xs = [draw(n, units) for n in counts]
    weights = draw(sum(counts), units)

    def results(dtype):
        def cast(v):
            return [cast(w) for w in v] if isinstance(v, list) else Variable(v.astype(dtype))

        given = [cast(v) for v in (states, ws, bs, xs)]
        *last, ys = getattr(F, f"n_step_{kind}")(1, 0.0, *given[0], *given[1:])
        (F.sum(F.concat(ys, axis=0) * weights.astype(dtype)) + F.sum(last[0]) / 64).backward()
        flat = [*given[0], *given[3], *(w for table in given[1:3] for row in table for w in row)]
        return [*(v.array for v in (*ys, *last)), *(v.grad for v in flat)]

    tolerance = {"float32": 2e-5, "float16": 2e-2}[dtype]
    for found, expected in zip(results(dtype), results("float64")):
        assert found.dtype == dtype
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * max(np.abs(expected).max(), 1))
