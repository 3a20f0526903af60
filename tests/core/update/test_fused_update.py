"""Tests of dbrdist.core.update.fused_update; whole updates are in tests/optimizers."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock, call

import numpy as np

from dbrdist.core.update.fused_update import update_all


def part(**said):
    found = Mock()
    found.configure_mock(places=(), run=SimpleNamespace(data=np.zeros(2)), **said)
    return found


def test_what_is_done_with_each_part():
    gpu, plain, other = (
        part(is_on_gpu=True),
        part(is_on_gpu=False, is_plain=True),
        part(is_on_gpu=False, is_plain=False),
    )
    here, view = Mock(), object()
    other.places = [(here, SimpleNamespace(gradient=view), view), (here, SimpleNamespace(gradient=None), view)]
    update_all([gpu, plain, other])
    assert gpu.mock_calls == [call.collect(), call.begin(None), call.update(True)]
    assert plain.mock_calls == [call.step(plain.run)]
    assert other.mock_calls == [call.begin(None), call.update(True)]
    assert here.mock_calls == [call.collect_gradient()]
