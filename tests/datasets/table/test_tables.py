"""Tests of dbrdist.datasets.table.tables."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist.datasets.table import tables
from dbrdist.datasets.table.tabular import DelegateDataset
from tests.datasets.table.table_examples import Table
from tests.each import each


@each(start=[-1, 0, 3, 7], stop=[-1, 0, 3, 7], step=[-2, -1, 1, 3])
def test_a_range_of_rows_is_the_slice_with_the_same_rows(start, stop, step):
    rows = range(8)[start:stop:step]
    found = tables._plain(rows)
    assert isinstance(found, slice) and list(range(8))[found] == list(rows)
    assert tables._plain(np.array([3, 1])) == [3, 1]


def test_delegates():
    class Named(DelegateDataset):
        keys = ("a", "b", "c")

    data = Named(Table())
    assert data.asdict()[1]["c"] == 1 and data.slice[[2], "b"].fetch() == ["c"] and len(data) == 10
    with pytest.raises(TypeError, match="expected a TabularDataset, got list"):
        DelegateDataset([1])
