"""Kinds of devices, under Chainer's paths."""

from dbrdist.backends import cuda as cuda
