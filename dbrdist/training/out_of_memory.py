"""What to say where a step runs out of a GPU's memory: what held it, and which batch cannot fit."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from dbrdist.core.array import backend
from dbrdist.core.array.gpu import device_memory
from dbrdist.core.array.types import Array, Number

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dbrdist.core.update.optimizer import Optimizer


class Held(NamedTuple):
    """Bytes on one device that a step needs whatever its batch is."""

    parameters: int
    gradients: int
    state: int

    @property
    def fixed(self) -> int:
        """All of them."""
        return sum(self)


def held_by(optimizers: Iterable[Optimizer]) -> Held:
    """What parameters, their gradients and the state of their updates take on the current device."""
    sizes = [0, 0, 0]
    number = int(backend.import_cupy().cuda.runtime.getDevice())
    seen: set[int] = set()
    for optimizer in optimizers:
        for p in optimizer.target.params(include_uninit=False):
            if id(p) in seen:
                continue
            seen.add(id(p))
            state = getattr(p.update_rule, "state", None) or {}
            for i, arrays in enumerate(((p.lend(),), (p.node.gradient,), state.values())):
                sizes[i] += sum(a.nbytes for a in arrays if _is_on(a, number))
    return Held(*sizes)


def _is_on(a: Array | Number | None, number: int) -> bool:
    return backend.is_array(a) and getattr(getattr(a, "device", None), "id", None) == number and hasattr(a, "nbytes")


def explain(error: BaseException, optimizers: Iterable[Optimizer], num_examples: int, what: str = "a step") -> None:
    """Add to an error of CuPy's a note with what held the memory, and with a bound of the batch; others stay alone."""
    if device_memory.is_out_of_memory(error) and not hasattr(error, "num_examples"):
        vars(error)["num_examples"] = num_examples
        with contextlib.suppress(Exception):  # the error itself is what matters
            memory, held = device_memory.look(), held_by(optimizers)
            most = most_examples(memory, held, device_memory.wanted_bytes(error), num_examples)
            vars(error)["most_examples"] = most
            error.add_note(words(error, memory, held, num_examples, what))


def words(
    error: BaseException, memory: device_memory.DeviceMemory, held: Held, num_examples: int, what: str = "a step"
) -> str:
    """The sentences of the note."""
    wanted = device_memory.wanted_bytes(error)
    rest = max(memory.used - held.fixed, 0)
    others = max(memory.whole - memory.free - memory.held, 0)
    device = backend.current_device().name
    examples = "1 example" if num_examples == 1 else f"{num_examples:,} examples"
    lines = (
        f"{device}: {what} with {examples} asked for {size(wanted)} more. Of {size(memory.whole)}, "
        f"parameters hold {size(held.parameters)}, gradients {size(held.gradients)}, the optimizer's state "
        f"{size(held.state)}, activations and other arrays {size(rest)}; {size(memory.held - memory.used)} is free in "
        f"CuPy's pool, {size(memory.free)} on the device, and CUDA and other processes hold {size(others)}."
    )
    return f"{lines} {_advice(memory, held, wanted, num_examples)}"


def _advice(memory: device_memory.DeviceMemory, held: Held, wanted: int, num_examples: int) -> str:
    most = most_examples(memory, held, wanted, num_examples)
    less = "Numbers of 16 bits (dtype: mixed16) take half of the activations' memory."
    if num_examples < 2 or most < 1:
        return f"Even one example does not fit beside the rest: use a smaller network or input. {less}"
    tried = 1 << (most.bit_length() - 1)
    return f"A batch above {most:,} cannot fit, since the step had not ended; try {tried:,}. {less}"


def most_examples(memory: device_memory.DeviceMemory, held: Held, wanted: int, num_examples: int) -> int:
    """An upper bound of the batch that fits: the step needs what it had by then and what it asked for, at least."""
    needed = memory.used + wanted - held.fixed
    room = memory.held + memory.free - held.fixed
    if needed <= 0:
        return num_examples - 1
    return min(int(num_examples * max(room, 0) / needed), num_examples - 1)


def size(num_bytes: float) -> str:
    """A number of bytes with three digits and its unit; 0 as it is."""
    if num_bytes <= 0:
        return "0 bytes"
    for unit in ("kB", "MB"):
        num_bytes /= 1000
        if num_bytes < 999.5:
            return f"{max(num_bytes, 1):.3g} {unit}"
    return f"{num_bytes / 1000:.3g} GB"
