"""Tests of dbrdist.cli.builders.probe."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dbrdist.cli.builders import probe

ORIGIN = SimpleNamespace(where=lambda path: f"run.yaml:{'.'.join(map(str, path))}")


@pytest.mark.parametrize(("length", "number", "reads"), [(150, 1, 100), (150, 40, 3), (7, 4, 2), (0, 4, 0)])
def test_a_hundred_examples_are_tried_where_all_are_corrupt(monkeypatch, length, number, reads):
    read = []
    monkeypatch.setattr(
        probe, "get_batch", lambda data, indices, seed, epoch, skipped: read.append(list(indices)) or []
    )
    settings = SimpleNamespace(seed=3, transforms=SimpleNamespace(train=()))
    look = probe.Look(settings, ORIGIN, "train", range(length), None, None)
    assert look.arguments(number) is None and len(read) == reads
    assert [i for indices in read for i in indices] == list(range(min(length, reads * number)))
