"""Iterators over datasets, under Chainer's module name."""

from dbrdist.core.names.missing_names import explained as _explained
from dbrdist.datasets.loading.dali import DaliIterator
from dbrdist.datasets.loading.order import OrderSampler, ShuffleOrderSampler
from dbrdist.datasets.loading.prefetch import MultiprocessIterator, MultithreadIterator
from dbrdist.datasets.loading.serial import Iterator, SerialIterator

__all__ = [
    "DaliIterator",
    "Iterator",
    "MultiprocessIterator",
    "MultithreadIterator",
    "OrderSampler",
    "SerialIterator",
    "ShuffleOrderSampler",
]

__getattr__ = _explained(__name__)
