"""Tests of dbrdist.core.update.targets."""

from __future__ import annotations

import numpy as np

import dbrdist.links as L
from dbrdist import Chain, optimizers
from dbrdist.core.update import targets
from tests.each import each


class Renamed(L.Linear):
    former_paths = {"/W": "/weight", "/b": "/old/bias"}


class Saver:
    """Remembers what it was asked for; it has the entries of some parts."""

    def __init__(self, is_loading, *entries, place=""):
        self.is_loading, self.entries, self.place = is_loading, entries, place

    def __getitem__(self, key):
        return Saver(self.is_loading, *self.entries, place=f"{self.place}{key}")


@each(
    **{
        "is_loading, entries, name, place": [
            (True, ("/inner/W",), "/inner/W", "/inner/W"),
            (True, (), "/inner/W", "/inner/weight"),
            (True, (), "/inner/b", "/inner/old/bias"),
            (True, (), "/W", "/weight"),
            (True, (), "/other/W", "/other/W"),  # a link that says nothing of it
            (True, (), "/inner/c", "/inner/c"),
            (False, (), "/inner/W", "/inner/W"),
        ]
    }
)
def test_a_state_is_found_under_its_former_path(is_loading, entries, name, place, monkeypatch):
    monkeypatch.setattr(targets, "has_entry", lambda part, key: key == "t" and part.place in entries)
    target = Renamed(2, 2)
    if name != "/W":
        target = Chain(inner=target, other=L.Linear(2, 2))
    assert targets.saved_state(Saver(is_loading, *entries), target, name).place == place


def test_states_that_are_lost_again_and_again_are_warned_of_once(recwarn):
    """After three setups of one kind in a row, each after one update."""
    link = L.Linear(2, 2)

    def step(make, num=1):
        optimizer = make().setup(link)
        for _ in range(num):
            for p in link.params():
                p.grad = np.ones_like(p.array)
            optimizer.update()

    def num_said():
        said = [str(w.message) for w in recwarn if "lost at each step" in str(w.message)]
        assert not said or said[0].startswith("MomentumSGD.setup: each setup begins with empty states")
        return len(said)

    counts = []
    makers = [optimizers.MomentumSGD] * 2 + [optimizers.Adam] + [optimizers.MomentumSGD] * 6
    for make in makers:
        step(make)
        counts.append(num_said())
    assert counts == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    for _ in range(4):
        step(optimizers.SGD)  # it remembers nothing
        step(optimizers.MomentumSGD, 2)
    assert num_said() == 1
