"""What datasets and converters are built from, under Chainer's module name."""

from dbrdist.core.missing_names import explained as _explained
from dbrdist.datasets import convert, tabular
from dbrdist.datasets.base import DatasetMixin
from dbrdist.datasets.convert import Converter, concat_examples, converter, to_device
from dbrdist.datasets.serial import Iterator
from dbrdist.datasets.tabular import TabularDataset

__all__ = [
    "Converter",
    "DatasetMixin",
    "Iterator",
    "TabularDataset",
    "concat_examples",
    "convert",
    "converter",
    "tabular",
    "to_device",
]

__getattr__ = _explained(__name__)
