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


def test_after_a_pause_the_rest_of_a_step_belongs_to_none():
    recorder = spans.Recorder()
    spans.record(recorder)
    try:
        with spans.step(1):
            spans.pause()
        assert recorder.is_pausing
        with spans.step(2):
            spans.resume()
            assert spans.recorders == [recorder] and (recorder.is_pausing, recorder.step) == (False, -1)
        with spans.step(3):
            assert recorder.step == 3
        spans.pause()
        spans.resume()  # before a step has begun
        assert not recorder.is_pausing and spans.recorders == [recorder]
        with spans.step(4):
            pass
    finally:
        spans.record(None)
    assert [span.step for span in recorder.spans] == [1, 3, 4]
