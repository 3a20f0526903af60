"""Iterators over datasets, under Chainer's module name."""

from dbrdist.core.missing_names import explained as _explained
from dbrdist.datasets.dali import DaliIterator
from dbrdist.datasets.order import OrderSampler, ShuffleOrderSampler
from dbrdist.datasets.prefetch import MultiprocessIterator, MultithreadIterator
from dbrdist.datasets.serial import Iterator, SerialIterator

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
