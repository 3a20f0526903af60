"""Tables, under Chainer's name ``dataset.tabular``."""

from dbrdist.datasets.table.columns import from_data
from dbrdist.datasets.table.tables import DelegateDataset, TabularDataset

__all__ = ["DelegateDataset", "TabularDataset", "from_data"]
