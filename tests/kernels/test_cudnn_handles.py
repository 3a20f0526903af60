"""What cuDNN's handles do without cuDNN."""

from __future__ import annotations

from dbrdist.kernels import cudnn


def test_handles_of_an_ended_thread_wait_for_the_next(monkeypatch):
    """Also at the end of the program, when the names of modules are gone."""
    idle, handle = cudnn._idle, cudnn.Handle(None)
    monkeypatch.setattr(cudnn, "_idle", None)
    owned = cudnn._Owned({-7: handle})
    del owned
    assert idle.pop(-7) == [handle]
