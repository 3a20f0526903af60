"""Iterators over datasets, under Chainer's module name."""

from dbrdist.datasets.order import OrderSampler, ShuffleOrderSampler
from dbrdist.datasets.prefetch import MultiprocessIterator, MultithreadIterator
from dbrdist.datasets.serial import Iterator, SerialIterator

__all__ = [
    "Iterator",
    "MultiprocessIterator",
    "MultithreadIterator",
    "OrderSampler",
    "SerialIterator",
    "ShuffleOrderSampler",
]
