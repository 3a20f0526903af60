"""Whether the process runs a program of Chainer, by ``dbrdist.compat``: a few rules are Chainer's then."""

from __future__ import annotations

from typing import Any

order_of_chainer = [False]  # while a file that Chainer wrote is loaded: the children of a Sequential have its numbers
as_chainer = [False]  # set by dbrdist.compat
labels: dict[type[Any], str] = {}  # of function nodes, where Chainer's differ from ours; filled by dbrdist.compat
