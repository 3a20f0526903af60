"""Tests of dbrdist.core.array.spans; traces of several ranks are in tests/comm/run/test_trace.py."""

from __future__ import annotations

from dbrdist.core.array import spans


def test_a_recording_that_ends_during_a_pause_does_not_come_back():
    recorder = spans.Recorder()
    spans.record(recorder)
    try:
        with spans.step(1):
            spans.pause()
        with spans.step(2):
            assert spans.recording() is recorder and not spans.recorders
        spans.record(None)
        assert spans.recording() is None
        spans.resume()
        assert spans.recording() is None and not spans.recorders
    finally:
        spans.resume()
        spans.record(None)
    assert [span.step for span in recorder.spans] == [1]
