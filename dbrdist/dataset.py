"""What datasets and converters are built from, under Chainer's module name."""

from dbrdist.core.names.missing_names import explained as _explained
from dbrdist.datasets.loading import convert
from dbrdist.datasets.loading.base import DatasetMixin
from dbrdist.datasets.loading.convert import Converter, concat_examples, converter, to_device
from dbrdist.datasets.loading.serial import Iterator
from dbrdist.datasets.loading.transfer import ConcatWithAsyncTransfer
from dbrdist.datasets.public import download
from dbrdist.datasets.public.download import (
    cache_or_load_file,
    cached_download,
    get_dataset_directory,
    get_dataset_root,
    set_dataset_root,
)
from dbrdist.datasets.table import tabular
from dbrdist.datasets.table.tabular import TabularDataset

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
