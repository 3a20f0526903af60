"""What datasets and converters are built from, under Chainer's module name."""

from dbrdist.core.missing_names import explained as _explained
from dbrdist.datasets import convert, download, tabular
from dbrdist.datasets.base import DatasetMixin
from dbrdist.datasets.convert import Converter, concat_examples, converter, to_device
from dbrdist.datasets.download import (
    cache_or_load_file,
    cached_download,
    get_dataset_directory,
    get_dataset_root,
    set_dataset_root,
)
from dbrdist.datasets.serial import Iterator
from dbrdist.datasets.tabular import TabularDataset
from dbrdist.datasets.transfer import ConcatWithAsyncTransfer

__all__ = [
    "ConcatWithAsyncTransfer",
    "Converter",
    "DatasetMixin",
    "Iterator",
    "TabularDataset",
    "cache_or_load_file",
    "cached_download",
    "concat_examples",
    "convert",
    "converter",
    "download",
    "get_dataset_directory",
    "get_dataset_root",
    "set_dataset_root",
    "tabular",
    "to_device",
]

__getattr__ = _explained(__name__)
