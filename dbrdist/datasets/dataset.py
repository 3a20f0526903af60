"""What users build datasets and converters from: ``dbrdist.dataset`` is this module."""

from dbrdist.datasets.base import DatasetMixin
from dbrdist.datasets.convert import Converter, concat_examples, converter, to_device
from dbrdist.datasets.serial import Iterator

__all__ = ["Converter", "DatasetMixin", "Iterator", "concat_examples", "converter", "to_device"]
