"""Tests of dbrdist.kernels.table: declarations of kernels, and the keys of their calls."""

from __future__ import annotations

import inspect
import subprocess
import sys

import numpy as np
import pytest

from dbrdist import kernels, using_config
from dbrdist.core.array import elementwise
from dbrdist.kernels import device_dispatch, dispatch, fused_dispatch, providers, table


def test_updates_of_nothing_have_plans_of_their_own():
    some, none = np.ones(3, "f"), np.ones(0, "f")
    found = {
        table.KEYS["update"]("sgd", arrays, ()) for arrays in ((some, some), (none, some), (some,), (some, some[:1]))
    }
    assert len(found) == 3


def test_places_count_for_arrays_of_devices_alone(monkeypatch):
    monkeypatch.setattr(dispatch, "place_of", lambda x: ("place", x))
    monkeypatch.setattr(dispatch, "places_of", lambda *xs: ("places", *xs))
    host, there = np.zeros(1), "an array on a device"
    assert dispatch._place(host) is dispatch._places(host, there) is None
    assert dispatch._switches(host, there) == dispatch._products(host, there) == "float32"
    with using_config("float32_products", "bf16"):
        assert dispatch._switches(host, there) == dispatch._products(host, there) == "bf16"
    assert dispatch._products(there, host) == ("places", there, host)
    assert dispatch._place(there) == ("place", there) and dispatch._places(there, host) == ("places", there, host)
    with using_config("use_cudnn", "never"), using_config("use_cudnn_tensor_core", "always"):
        for is_deterministic in (False, True):
            with using_config("cudnn_deterministic", is_deterministic):
                expected = ("places", there, host), "never", "always", is_deterministic
                assert dispatch._switches(there, host) == expected


ARRAYS = {
    "conv_forward": lambda x: (np.ones((1, 2, 3, 3), "f"), np.ones((2, 2, 1, 1), "f"), None, kernels.ConvGeometry()),
    "linear": lambda x: (x, x, None),
    "matmul": lambda x: (x, x),
    "softmax": lambda x: (x, 1),
    "add": lambda x: (x, x),
    "relu_forward": lambda x: (x,),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_a_key_begins_with_the_name_of_its_kernel(name):
    assert table.KEYS[name](*ARRAYS[name](np.ones((3, 3), "f")))[0] == name


def test_every_kernel_has_a_reference_and_every_row_a_declaration():
    after_forward = {
        "bn_backward",
        "pool_backward",
        "pool_indices",
        "bn_mask",
        "bn_vectors",
    }  # whose provider is that of a forward pass
    providers.add_rows_of_gpus()
    assert kernels.plan_conv_bn and kernels.plan_fused_block  # loads what is declared for devices
    assert table.KEYS.keys() <= providers.PROVIDERS["numpy"].keys()
    for name, rows in providers.PROVIDERS.items():
        assert rows.keys() <= table.KEYS.keys() | after_forward, name
    assert providers.light < table.KEYS.keys()


@pytest.fixture
def new_kernel(monkeypatch):
    """A kernel that is declared here, with two providers."""
    monkeypatch.setattr(table, "KEYS", dict(table.KEYS))
    monkeypatch.setattr(providers, "light", set(providers.light))
    planned = []

    def plan(a, b=2):
        planned.append(a)
        return lambda a, b: (a, b)

    for rows in providers.PROVIDERS.values():
        monkeypatch.setitem(rows, "new", plan)

    @table.kernel(is_light=True)
    def new(a: int, b: int = 2) -> tuple[int, int]:
        """Its docstring."""
        return "new", a % 2

    yield new, planned
    table.forget()


def test_a_declared_kernel_runs_the_plan_of_its_key(new_kernel):
    new, planned = new_kernel
    assert (new(1), new(3, b=5), new(b=1, a=2)) == ((1, 2), (3, 5), (2, 1))
    assert planned == [1, 2]  # one for each key
    assert (new.__doc__, new.__name__, new.__module__) == ("Its docstring.", "new", __name__)
    assert str(inspect.signature(new)) == "(a: 'int', b: 'int' = 2) -> 'tuple[int, int]'"
    assert "new" in providers.light and table.provider_of("new", 1) == next(iter(providers.PROVIDERS))
    with pytest.raises(TypeError, match=r"new\(\) missing 1 required positional argument: 'a'"):
        new()


def test_public_functions_are_those_that_a_module_defines():
    names = table.public_names(dispatch)
    assert {"conv_forward", "relu_forward", "bn_vectors", "row"} < names.keys()
    assert not {"number", "partial", "masked", "kernel", "_pair", "_relu_forward"} & names.keys()
    assert all(getattr(kernels, name) is value for name, value in names.items())


def test_kernels_of_devices_are_names_of_the_room_too():
    for module in (device_dispatch, fused_dispatch):
        names = table.public_names(module)
        assert len(names) > 5 and all(getattr(kernels, name) is value for name, value in names.items())
    for name in ("no_such_kernel", "_mean_of_images"):
        with pytest.raises(AttributeError, match=f"module 'dbrdist.kernels' has no attribute '{name}'"):
            getattr(kernels, name)


def test_core_has_means_of_images_from_the_kernels_of_devices(monkeypatch):
    seen = []
    for name in ("mean_of_images", "mean_of_images_backward"):
        monkeypatch.setattr(kernels, name, lambda *arrays, name=name: seen.append((name, *arrays)) or name)
        assert elementwise.kernels[name](1, 2) == name
    assert seen == [("mean_of_images", 1, 2), ("mean_of_images_backward", 1, 2)]


@pytest.mark.programs
def test_the_provider_of_a_kernel_of_devices_is_known_before_any_has_run():
    asked = "kernels.provider_of('masked', np.ones(3, 'f'), np.ones(3, '?'), 1.0)"
    code = f"import numpy as np; from dbrdist import kernels; print({asked})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "numpy\n"
