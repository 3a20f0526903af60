"""Tests of dbrdist.kernels.providers."""

from __future__ import annotations

import inspect
import sys
import types
import warnings
from pathlib import Path

from dbrdist.kernels import providers
from dbrdist.kernels.cpu import onednn
from tests.each import each

OF_GPUS = ("cudnn", "cuda")
FOLDER = Path(providers.__file__).parent / "gpu"


def refuse(*arguments):
    raise onednn.Unavailable("it is gone")


@each(
    **{"system, machine, name, warns": [
        ("Linux", "x86_64", "onednn", True), ("Linux", "aarch64", "onednn", False),
        ("Darwin", "x86_64", "onednn", False),
        ("Linux", "x86_64", "cudnn", True), ("Linux", "aarch64", "cudnn", True), ("Windows", "AMD64", "cudnn", False),
    ]}
)  # fmt: skip
def test_a_missing_library_is_warned_of_once_where_it_could_be_installed(system, machine, name, warns, monkeypatch):
    kernel = "conv_forward"
    monkeypatch.setattr(providers.platform, "system", lambda: system)
    monkeypatch.setattr(providers.platform, "machine", lambda: machine)
    monkeypatch.setattr(providers, "_warned", set())
    monkeypatch.setattr(providers, "_forced", None)
    rows = {kernel: refuse, "add": refuse}
    monkeypatch.setattr(providers, "PROVIDERS", {name: rows, "numpy": dict.fromkeys(rows, lambda *a: "plan")})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert providers.choose("add", ()) == ("numpy", "plan")  # NumPy's own is not much slower
        assert not caught
        for _ in range(2):
            assert providers.choose(kernel, ()) == ("numpy", "plan")
    said = {"onednn": "oneDNN is not available (it is gone)", "cudnn": "cuDNN is not available (it is gone)"}[name]
    assert [str(w.message).startswith(said) for w in caught] == [True] * warns


def test_rows_of_gpus_are_added_once_cupy_is_loaded(monkeypatch):
    added = []
    monkeypatch.setattr(providers, "add_rows_of_gpus", lambda: added.append(1))
    monkeypatch.setattr(providers, "PROVIDERS", {"numpy": {"add": lambda *a: "plan"}})
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    providers.choose("add", ())
    assert not added
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    providers.choose("add", ())
    assert added


def test_the_rows_of_gpus_are_those_of_their_files():
    providers.add_rows_of_gpus()
    found = {provider: set(map(inspect.getmodule, providers.PROVIDERS[provider].values())) for provider in OF_GPUS}
    for provider, modules in found.items():
        files = {path.stem for path in FOLDER.glob(f"{provider}_*.py") if "\nROWS" in path.read_text()}
        assert {module.__name__.rpartition(".")[2] for module in modules} == files
