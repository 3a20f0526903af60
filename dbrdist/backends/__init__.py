"""Kinds of devices, under Chainer's paths."""

from dbrdist.backends import cuda as cuda
from dbrdist.backends import intel64 as intel64
