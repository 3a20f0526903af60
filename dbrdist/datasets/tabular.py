"""Tables, under Chainer's name ``dataset.tabular``."""

from dbrdist.datasets.columns import from_data
from dbrdist.datasets.tables import DelegateDataset, TabularDataset

__all__ = ["DelegateDataset", "TabularDataset", "from_data"]
