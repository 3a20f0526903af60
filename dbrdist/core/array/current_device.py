"""The current device of a thread follows the arrays that it computes with, as in Chainer.

CuPy computes on the current device whatever device its operands are on: with arrays of another one it raises, or it
reads them over the bus on a stream that nothing orders with theirs. So functions, backward passes and updates switch to
the device of their arrays, and back. Nothing is done, or loaded, for arrays in host memory.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TypeAlias

    from dbrdist.core.array.types import Array, CudaStream, Number, Raised
    from dbrdist.core.tape.deferred import Deferred
    from dbrdist.core.tape.variable import Operand

    Placed: TypeAlias = Operand | Deferred | Number | str | None  # what is on a device, or on none


gpu_arrays: set[type] = set()  # CuPy's class, once an array of it has been met


def number_of(x: object) -> int | None:
    """The number of the GPU that holds an array, a Variable or a deferred gradient; None for anything else."""
    if type(x) in gpu_arrays:
        return x.data.device_id  # type: ignore[attr-defined]
    a = getattr(x, "_array", x)
    if a is None or isinstance(a, (np.ndarray, np.generic)):  # whose data of bfloat16 Python cannot show
        return None
    data = getattr(a, "data", None)
    if data is None and hasattr(a, "part"):
        return number_of(a.part)
    return getattr(data, "device_id", None)


def is_of_gpu(kind: type) -> bool:
    """Whether a type is CuPy's own class of arrays: what is asked of its objects needs no detours."""
    if kind in gpu_arrays:
        return True
    cupy = sys.modules.get("cupy")
    if cupy is None or kind is not cupy.ndarray or issubclass(kind, np.ndarray):
        return False
    gpu_arrays.add(kind)
    return True


def current_number() -> int:
    """The number of this thread's current GPU."""
    return int(sys.modules["cupy"].cuda.runtime.getDevice())


def elsewhere(arrays: Iterable[Placed]) -> int | None:
    """The number of the first GPU among those of the arrays, where that is not this thread's; else None."""
    for x in arrays:
        number = x.data.device_id if type(x) in gpu_arrays else number_of(x)  # type: ignore[union-attr]
        if number is not None:
            return None if number == sys.modules["cupy"].cuda.runtime.getDevice() else number
    return None


def elsewhere_in(values: Iterable[object]) -> int | None:
    """As :func:`elsewhere`, for arguments of functions: arrays may also be in lists, tuples and dictionaries."""
    number = _first_number(values)
    return None if number is None or number == current_number() else number


def _first_number(values: Iterable[object]) -> int | None:
    for x in values:
        if isinstance(x, (list, tuple)):
            number = _first_number(x)
        else:
            number = _first_number(x.values()) if isinstance(x, dict) else number_of(x)
        if number is not None:
            return number
    return None


def use(number: int) -> int:
    """Make a GPU this thread's current one; returns the one before."""
    cuda = sys.modules["cupy"].cuda
    before = int(cuda.runtime.getDevice())
    cuda.Device(number).use()
    return before


class On:
    """A context in which the device of the first array on a GPU is this thread's current one: ``with on(x): ...``."""

    __slots__ = ("_before", "_number")

    def __init__(self, number: int | None) -> None:
        self._number = number
        self._before = -1

    def __enter__(self) -> None:
        if self._number is not None:
            self._before = use(self._number)

    def __exit__(self, *exc: Raised) -> None:
        if self._number is not None:
            use(self._before)


HERE = On(None)


def on(*arrays: Operand | str | Number | None) -> On:
    """The context for these arrays or Variables; it does nothing for arrays of the host or the current device."""
    number = elsewhere(arrays)
    return HERE if number is None else On(number)


class Visitor:
    """What computes with the arrays of one device after the other, and comes back to the first at the end."""

    home: int | None = None  # the device to come back to; None while it has not been left

    def visit(self, arrays: Iterable[Placed]) -> None:
        """Make the device of these arrays the current one."""
        number = elsewhere(arrays)
        if number is not None:
            before = use(number)
            if self.home is None:
                self.home = before

    def go_home(self) -> None:
        """Make the first device the current one again."""
        if self.home is not None:
            use(self.home)
            self.home = None


def several(arrays: Iterable[Placed]) -> list[int]:
    """The numbers of the GPUs that hold the arrays, where these are more than one; else an empty list."""
    numbers = {number for number in map(number_of, arrays) if number is not None}
    return sorted(numbers) if len(numbers) > 1 else []


class MakerStream:
    """The device and the stream on which an array was made: what completes it later runs there."""

    __slots__ = ("device", "stream")

    def __init__(self, device: int, stream: CudaStream) -> None:
        self.device = device
        self.stream = stream

    @classmethod
    def of(cls, a: Array) -> MakerStream | None:
        """Where this thread makes arrays now, if ``a`` is on a GPU."""
        number = number_of(a)
        return None if number is None else cls(number, sys.modules["cupy"].cuda.get_current_stream())

    def run(self, work: Callable[[], None]) -> None:
        """Call ``work`` on this device and stream; what this thread starts next there waits for it."""
        cuda = sys.modules["cupy"].cuda
        with On(self.device if self.device != cuda.runtime.getDevice() else None):
            mine = cuda.get_current_stream()
            if mine.ptr == self.stream.ptr:
                work()
                return
            with self.stream:
                work()
                done = cuda.Event()
                done.record(self.stream)
            mine.wait_event(done)
