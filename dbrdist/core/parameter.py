"""Parameters: variables that a link owns, and their place in flat memory."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from dbrdist.core import fusion
from dbrdist.core.backend import Array, Device, device_of, get_device, is_array, to_device
from dbrdist.core.config import get_dtype
from dbrdist.core.variable import Variable

_versions = itertools.count(1)  # next() is atomic: two threads never hand out the same version
_version = 0


def layout_version() -> int:
    """Changes whenever a parameter enters or leaves flat memory or its rule changes: plans made before are stale."""
    return _version


def invalidate_layout() -> None:
    """Make all plans over flat memory stale."""
    global _version
    _version = next(_versions)


class Slot:
    """A parameter's place in an arena: the how-manieth it is, and which elements."""

    __slots__ = ("arena", "index", "start", "stop")

    def __init__(self, arena: Any, index: int, start: int, stop: int) -> None:
        self.arena = arena
        self.index = index
        self.start = start
        self.stop = stop


class Parameter(Variable):
    """A variable that a link owns and an optimizer updates.

    Args:
        initializer: a number, an array (taken over as it is), a callable that fills an array, or None for NaN.
        shape: None leaves the parameter uninitialised until ``initialize(shape)``.
        name: shown in messages.

    Once an optimizer or a communicator has used it, array and gradient are views into flat memory (``core.flat``).
    Assigning an array of the same shape, type and device copies into the view; any other array takes the parameter out
    of its arena, and flat memory is planned anew before the next update.
    """

    __slots__ = ("_update_rule", "initial_device", "initializer", "on_initialize", "peers", "slot")

    def __init__(
        self, initializer: Any = None, shape: Any = None, name: str | None = None, *, layout: Any = None
    ) -> None:
        super().__init__(None, name=name)
        if layout is not None:
            raise ValueError(f"layout: dbrdist keeps layouts in strides; expected None, got {layout!r}")
        self.slot: Slot | None = None
        self.peers: weakref.WeakSet[Parameter] | None = None  # all that share the array, this one included
        self._update_rule: Any = None
        self.on_initialize: Callable[[Parameter], None] | None = None
        self.initial_device = Device("numpy")
        self.initializer = initializer
        if is_array(initializer):
            if shape is not None and _as_shape(shape) != initializer.shape:
                raise ValueError(
                    f"parameter {name or ''}: expected an array of shape {_as_shape(shape)}, got {initializer.shape}"
                )
            self._take(initializer)
        elif shape is not None:
            self.initialize(shape)

    # ---- the array --------------------------------------------------------------------------------------------------

    @property
    def is_initialized(self) -> bool:
        """True once the shape is known and the array is there."""
        return self._array is not None

    @property
    def dtype(self) -> Any:
        """The type of the array, or that which it will have."""
        if self._array is not None:
            return self._array.dtype
        return get_dtype(getattr(self.initializer, "dtype", None), map_mixed16=np.float32)

    @property
    def shape(self) -> Any:
        return None if self._array is None else self._array.shape

    def initialize(self, shape: Any) -> None:
        """Allocate the array and fill it with the initial values."""
        shape = _as_shape(shape)
        init = self.initializer
        a: Array = np.empty(shape, self.dtype)
        if init is None:
            a.fill(np.nan)
        elif callable(init):
            init(a)
        else:
            a[...] = init
        self._take(to_device(a, self.initial_device))
        if self.on_initialize is not None:
            self.on_initialize(self)

    def _take(self, a: Array) -> None:
        self._array = a
        self.node.shape, self.node.dtype = a.shape, a.dtype
        invalidate_layout()

    @property
    def array(self) -> Array:
        """The array, or None before initialisation."""
        fusion.flush()  # whoever reads it may change it in place, and a pending pass must see the old values
        return self._array

    @array.setter
    def array(self, a: Array) -> None:
        fusion.flush()
        if a is self._array:
            return
        if self.slot is not None and len(self.peers or ()) <= 1 and _alike(a, self._array):
            self._array[...] = a
            return
        self.leave_arena()
        if a is None:
            self._array = None
            return
        self._take(a)

    @property
    def data(self) -> Array:
        """Chainer's older name of :attr:`array`."""
        return self.array

    @data.setter
    def data(self, a: Array) -> None:
        self.array = a

    @property
    def grad(self) -> Array:
        """The gradient as an array; None from ``cleargrads`` until it is written."""
        g = self.node.gradient
        return g.array if isinstance(g, Variable) else g

    @grad.setter
    def grad(self, g: Array) -> None:
        self._check_gradient(g)
        view = self.node.view
        if g is not None and view is not None:
            if g is not view:
                view[...] = g
            g = view
        self.node.gradient = g

    def cleargrad(self) -> None:
        """Forget the gradient."""
        self.node.gradient = None

    # ---- flat memory ------------------------------------------------------------------------------------------------

    def enter_arena(self, slot: Slot, data_view: Array, grad_view: Array, is_guest: bool = False) -> None:
        """Move array and gradient into flat memory; called by ``core.flat``.

        A guest's array is in the flat memory of a parameter that shares it: only its gradient moves.
        """
        if not is_guest:
            data_view[...] = self._array
            for peer in self.peers or ():
                if peer is not self:
                    peer.slot, peer.node.view, peer._array = None, None, data_view
        g = self.grad
        if g is not None:
            grad_view[...] = g
            g = grad_view
        self._array = data_view
        self.node.gradient = g
        self.node.view = grad_view
        self.slot = slot

    def leave_arena(self) -> None:
        """Give up the place in flat memory, and the memory shared with others; the values stay what they are."""
        if self.peers is not None:
            self.peers.discard(self)
            self.peers = None
        self.slot = None
        self.node.view = None
        invalidate_layout()

    def share(self, other: Parameter) -> None:
        """Use another parameter's array from now on, as ``Link.copy()`` does, until one of both gets another array."""
        if other.peers is None:
            other.peers = weakref.WeakSet([other])
        other.peers.add(self)
        self.peers = other.peers
        self._take(other._array)

    def host(self) -> Parameter | None:
        """A parameter that shares the array and has a place in flat memory."""
        return next((p for p in self.peers or () if p.slot is not None and p is not self), None)

    def collect_gradient(self) -> None:
        """Make the view in flat memory hold the gradient: zero where none arrived."""
        node = self.node
        g, view = node.gradient, node.view
        if g is view:
            return
        if g is None:
            view[...] = 0
        else:
            view[...] = g.array if isinstance(g, Variable) else g
        node.gradient = view

    # ---- devices, update, copies ------------------------------------------------------------------------------------

    @property
    def device(self) -> Device:
        """Where the array lies."""
        return self.initial_device if self._array is None else device_of(self._array)

    def to_device(self, device: Any) -> None:
        """Move array and gradient; another device takes the parameter out of flat memory."""
        device = self.initial_device = get_device(device)
        if self._array is None or device == device_of(self._array):
            return
        g = self.grad
        self.leave_arena()
        self._take(to_device(self._array, device))
        self.node.gradient = None if g is None else to_device(g, device)

    @property
    def update_rule(self) -> Any:
        """How an optimizer updates it; None where no optimizer has been set up."""
        return self._update_rule

    @update_rule.setter
    def update_rule(self, rule: Any) -> None:
        self._update_rule = rule
        invalidate_layout()

    def update(self) -> None:
        """Apply the update rule to this parameter alone."""
        if self.update_rule is not None:
            self.update_rule.update(self)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["initializer"] = None if is_array(self.initializer) else self.initializer
        state["update_rule"] = self.update_rule
        state["initial_device"] = self.initial_device
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.slot = self.peers = None
        self.on_initialize = None
        self.initializer = state["initializer"]
        self.update_rule = state["update_rule"]
        self.initial_device = state["initial_device"]


def _as_shape(shape: Any) -> tuple[int, ...]:
    return (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(n) for n in shape)


def _alike(a: Any, b: Any) -> bool:
    return (
        is_array(a)
        and a.shape == b.shape
        and a.dtype == b.dtype
        and ((isinstance(a, np.ndarray) and isinstance(b, np.ndarray)) or device_of(a) == device_of(b))
    )
