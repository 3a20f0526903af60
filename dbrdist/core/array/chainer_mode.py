"""Whether the process runs a program of Chainer, by ``dbrdist.compat``: a few rules are Chainer's then."""

from __future__ import annotations

import threading

as_chainer = [False]  # set by dbrdist.compat
labels: dict[type, str] = {}  # of function nodes, where Chainer's differ from ours; filled by dbrdist.compat


class _Loading(threading.local):
    """What this thread loads: others, which may be ranks, have networks of their own."""

    file_of_chainer = False  # the children of a Sequential have Chainer's numbers while this is True


loading = _Loading()
