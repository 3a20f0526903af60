"""Why a GPU cannot be used: drivers, packages of CuPy, visible devices, in the words of one check."""

from __future__ import annotations

import importlib.metadata
import sys
import types

import pytest

import dbrdist
import dbrdist.links as L
from dbrdist.core.array.gpu import presence
from tests.each import each


@pytest.fixture
def machine(monkeypatch):
    """A function that says what is there: CUDA of the driver, packages of CuPy, what counting GPUs gives or raises."""

    def has(driver, wheels, counted, built=13000):
        def count():
            if isinstance(counted, Exception):
                raise counted
            return counted

        module = types.ModuleType("cupy")
        module.ndarray = type("ndarray", (), {})
        module.cuda = types.SimpleNamespace(
            runtime=types.SimpleNamespace(getDeviceCount=count, runtimeGetVersion=lambda: built),
            is_available=lambda: False,
        )
        monkeypatch.setitem(sys.modules, "cupy", module)
        monkeypatch.setattr(presence, "driver_cuda", lambda: driver)
        monkeypatch.setattr(presence, "cupy_wheels", lambda: wheels)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return has


OLD_DRIVER = RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version")


@each(
    case=[
        (None, OLD_DRIVER, "install NVIDIA's driver, or one that is new enough"),
        ((12, 4), OLD_DRIVER, "supports CUDA 12.4, and cupy-cuda13x 14.2.0 needs 13; or remove what is there (pip "
         "uninstall cupy-cuda13x) and install dbrdist[cuda12x] (this driver supports CUDA 12.4)"),
        ((11, 8), OLD_DRIVER, "install a newer driver: this one supports CUDA 11.8"),
        ((13, 1), RuntimeError("cudaErrorNoDevice: none"), "--gpus-per-task=1); CUDA_VISIBLE_DEVICES is not set"),
        ((13, 1), RuntimeError("cudaErrorInitializationError: initialization error"), "with the method 'spawn'"),
        ((13, 1), RuntimeError("cudaErrorSystemDriverMismatch: x"), "reload the driver"),
        ((13, 1), RuntimeError("cudaErrorUnknown: unknown error"), "nvidia-smi says"),
        ((13, 1), 0, "let this process see one"),
    ]
)  # fmt: skip
def test_all_that_use_a_gpu_say_the_same(machine, case):
    driver, counted, words = case
    machine(driver, ["cupy-cuda13x 14.2.0"], counted)
    assert words in presence.why_no_gpu()
    for use in (
        lambda: dbrdist.get_device("@cupy:0").use(),
        lambda: dbrdist.get_device("@cupy:0").send(1.0),
        lambda: L.Linear(2, 2).to_device(0),
        lambda: presence.require_gpu(),
    ):
        with pytest.raises(RuntimeError) as info:
            use()
        assert words in str(info.value)
    assert words in presence.why_no_nccl()


def test_a_wheel_that_cannot_be_loaded_is_named_with_the_one_to_install(monkeypatch):
    monkeypatch.setattr(presence, "driver_cuda", lambda: (12, 9))
    monkeypatch.setattr(presence, "cupy_wheels", lambda: ["cupy-cuda13x 14.2.0"])
    error = ImportError("libcudart.so.13: cannot open shared object file\n\nmore")
    words = presence._why_no_cupy(error)
    assert words == (
        ": libcudart.so.13: cannot open shared object file; found cupy-cuda13x 14.2.0; remove what is there (pip "
        "uninstall cupy-cuda13x) and install dbrdist[cuda12x] (this driver supports CUDA 12.9)"
    )
    monkeypatch.setattr(presence, "cupy_wheels", list)
    assert presence._why_no_cupy(error) == "; install dbrdist[cuda12x] (this driver supports CUDA 12.9)"


def test_nccl_names_the_package_for_the_driver(machine, monkeypatch):
    machine((12, 2), [], 1)
    cuda_module = sys.modules["cupy"].cuda
    cuda_module.is_available = lambda: True
    cuda_module.nccl = types.SimpleNamespace(available=False)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda_module)
    assert presence.why_no_nccl() == "CuPy finds no NCCL library (libnccl.so.2); install nvidia-nccl-cu12"


def test_packages_of_cupy_are_found_by_their_names(monkeypatch):
    def distribution(name, version):
        return types.SimpleNamespace(metadata={"Name": name}, version=version)

    there = [distribution(*d) for d in [("cupy-cuda12x", "14.0"), ("Cupy", "13"), ("cupyish", "1"), ("numpy", "2")]]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: there)
    assert presence.cupy_wheels() == ["cupy 13", "cupy-cuda12x 14.0"]


@each(
    **{
        "given, version": [
            (12040, (12, 4)), (11080, (11, 8)), (13000, (13, 0)), (12090, (12, 9)), (0, None), (None, None),
        ]
    }
)  # fmt: skip
def test_the_version_of_a_driver(monkeypatch, given, version):
    asked = []

    def library(name):
        asked.append(name)
        if given is None or name != "libcuda.so.1":
            raise OSError

        def get(pointer):
            pointer._obj.value = given
            return 0

        return types.SimpleNamespace(cuDriverGetVersion=get)

    monkeypatch.setattr(presence.ctypes, "CDLL", library)
    assert presence.driver_cuda.__wrapped__() == version
    assert asked == ["libcuda.so.1"] + ["nvcuda.dll"] * (version is None)


@each(index=[0, 3])
def test_without_cupy_no_gpu_can_be_used(monkeypatch, index):
    def missing():
        raise ImportError("no CuPy")

    monkeypatch.setattr(presence, "import_cupy", missing)
    monkeypatch.setattr(presence, "why_no_gpu", lambda number: None)
    with pytest.raises(ImportError, match="no CuPy"):
        presence.require_gpu(index)
    monkeypatch.setattr(presence, "import_cupy", lambda: None)
    presence.require_gpu(index)
    monkeypatch.setattr(presence, "why_no_gpu", lambda number: f"there is no number {number}")
    words = f"^the device @cupy:{index} cannot be used: there is no number {index}; '@numpy' computes on the CPU$"
    with pytest.raises(RuntimeError, match=words):
        presence.require_gpu(index)
