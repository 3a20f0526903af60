"""Tests of dbrdist.kernels.keys."""

from __future__ import annotations

import numpy as np

from dbrdist import using_config
from dbrdist.kernels import keys
from dbrdist.kernels.keys import update_key


def test_updates_of_nothing_have_plans_of_their_own():
    some, none = np.ones(3, "f"), np.ones(0, "f")
    found = {update_key("sgd", arrays, ()) for arrays in ((some, some), (none, some), (some,), (some, some[:1]))}
    assert len(found) == 3


def test_places_count_for_arrays_of_devices_alone(monkeypatch):
    monkeypatch.setattr(keys, "place_of", lambda x: ("place", x))
    monkeypatch.setattr(keys, "places_of", lambda *xs: ("places", *xs))
    host, there = np.zeros(1), "an array on a device"
    assert keys._place(host) is keys._places(host, there) is None
    assert keys._switches(host, there) == keys._products(host, there) == "float32"
    with using_config("float32_products", "bf16"):
        assert keys._switches(host, there) == keys._products(host, there) == "bf16"
    assert keys._products(there, host) == ("places", there, host)
    assert keys._place(there) == ("place", there) and keys._places(there, host) == ("places", there, host)
    with using_config("use_cudnn", "never"), using_config("use_cudnn_tensor_core", "always"):
        for is_deterministic in (False, True):
            with using_config("cudnn_deterministic", is_deterministic):
                expected = ("places", there, host), "never", "always", is_deterministic
                assert keys._switches(there, host) == expected
