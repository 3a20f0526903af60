"""Tests of dbrdist.cli.configuration.components."""

import pytest

from dbrdist.cli.configuration import components
from tests.each import each


@each(
    value=[
        1, 7, [[0, 1]], [[0, 128], [10, 224]], ((0, 3), (1, 1)),
        0, -1, 1.5, True, [], [[0, 0]], [[1, 5]], [[0, 5], [0, 6]], [[0, 5], [3, 6], [2, 7]], [[0, 5, 6]], "x",
    ]
)  # fmt: skip
def test_sizes_over_the_epochs(value):
    good = (1, 7, [[0, 1]], [[0, 128], [10, 224]], ((0, 3), (1, 1)))
    if any(type(value) is type(g) and value == g for g in good):
        assert components._sizes(value) == (value if isinstance(value, int) else tuple(map(tuple, value)))
    else:
        with pytest.raises(Exception, match="expected a size of at least 1, or pairs"):
            components._sizes(value)
