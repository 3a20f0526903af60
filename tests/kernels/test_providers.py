"""Tests of dbrdist.kernels.providers."""

from __future__ import annotations

import warnings

from dbrdist.kernels import providers
from dbrdist.kernels.cpu import onednn
from tests.each import each


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
