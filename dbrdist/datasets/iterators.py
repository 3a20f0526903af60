"""The iterators with Chainer's names: ``dbrdist.iterators`` is this module."""

from dbrdist.datasets.order import OrderSampler, ShuffleOrderSampler
from dbrdist.datasets.prefetch import MultiprocessIterator, MultithreadIterator
from dbrdist.datasets.serial import SerialIterator

__all__ = [
    "MultiprocessIterator",
    "MultithreadIterator",
    "OrderSampler",
    "SerialIterator",
    "ShuffleOrderSampler",
]
