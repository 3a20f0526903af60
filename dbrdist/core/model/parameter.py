"""Parameters: variables that a link owns, and their place in flat memory."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from dbrdist.core.array.backend import (
    Array,
    CpuDevice,
    Device,
    DeviceSpec,
    device_of,
    fill,
    get_array_module,
    get_device,
    is_array,
    is_floating,
    on,
    to_device,
)
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.config import get_dtype
from dbrdist.core.array.ownership import is_private
from dbrdist.core.array.types import DType, PerAxis
from dbrdist.core.model.slots import Kept as Kept
from dbrdist.core.model.slots import Peers as Peers
from dbrdist.core.model.slots import Slot as Slot
from dbrdist.core.model.versions import note_change
from dbrdist.core.tape import deferred
from dbrdist.core.tape.node import note_assignment
from dbrdist.core.tape.variable import Variable
from dbrdist.core.tape.variable_words import warn_of_zerograd
from dbrdist.core.usage.foreign_names import add_hints
from dbrdist.core.usage.mistakes import given_a_class

if TYPE_CHECKING:
    from dbrdist.core.model.weight_copies import Reader
    from dbrdist.core.update.update_rule import UpdateRule


# The gradient of a parameter of a program of Chainer that has no array yet: with which numbers it will begin.
InitialValue: TypeAlias = "Callable[[Array], None] | Array | float | None"  # None: the default
_NOT_CLEARED = np.array(np.nan, np.float32)
_ZEROED = np.array(0, np.float32)


class Parameter(Variable):
    """A variable that a link owns and an optimizer updates.

    From ``optimizer.setup`` on (or from the first update, where some parameter of the model has no shape before),
    array and gradient are views into flat memory (``core.flat``):

    - Assigning an array of the same shape, type and device copies into the view. Any other array takes the parameter
      out of flat memory until the next update, and its gradient is dropped.
    - ``grad`` is overwritten by the first backward after ``cleargrads``: to keep a gradient, copy it.

    Assigning new values between forward and backward makes backward raise if it needs the old ones. An update by an
    optimizer, and a change in place (``p.array[...] = 0``), do not count as assignments.

    Args:
        initializer: a number, an array (used as it is), a callable that fills an array, or None for NaN.
        shape: None leaves the parameter uninitialised until ``initialize(shape)``.
        name: shown in messages.
        layout: None; Chainer's other layouts are not supported, since strides carry the layout.

    Raises:
        ValueError: ``layout`` is not None.

    Example:
        >>> dbrdist.Parameter(0.5, (2,)).array
        array([0.5, 0.5], dtype=float32)
    """

    __slots__ = (
        "_changed_at", "_kept", "_update_rule", "initial_device", "initializer", "is_frozen", "on_initialize", "peers",
        "slot",
    )  # fmt: skip

    def __init__(
        self, initializer: Any = None, shape: PerAxis | None = None, name: str | None = None, *, layout: None = None
    ) -> None:
        super().__init__(None, name=name)
        if layout is not None:
            raise ValueError(f"layout: dbrdist keeps layouts in strides; expected None, got {layout!r}")
        self.slot: Slot | None = None
        self.peers: Peers | None = None  # all that share the array, this one included
        self._changed_at: int | None = None
        self._kept: Kept | None = None
        self._update_rule: UpdateRule | None = None
        self.is_frozen = False  # by disable_update(): for the rule that it has, and for those that come
        self.on_initialize: Callable[[Parameter], None] | None = None
        self.initial_device: Device = CpuDevice()
        if isinstance(initializer, type):
            raise given_a_class("Parameter", initializer, "an initializer, a number or an array")
        if isinstance(initializer, (tuple, str)):
            hint = f"; write Parameter(shape={initializer!r})" if isinstance(initializer, tuple) else ""
            raise TypeError(f"Parameter: expected an array, a number or an initializer, got {initializer!r}{hint}")
        self.initializer = _fill_with_nan if initializer is None and as_chainer[0] else initializer
        if is_array(initializer):
            if shape is not None and _as_shape(shape) != initializer.shape:
                words = f"expected an array of shape {_as_shape(shape)}, got {initializer.shape}"
                raise ValueError(f"parameter {name or ''}: {words}")
            self._take(initializer)
            self._begin_gradient()
            return
        if as_chainer[0]:
            self.node.gradient = _NOT_CLEARED
        if shape is not None:
            self.initialize(shape)

    # ---- the array --------------------------------------------------------------------------------------------------

    @property
    def is_initialized(self) -> bool:
        """True once the shape is known and the array is there."""
        return self._array is not None

    @property
    def dtype(self) -> DType:
        """The type of the array, or the type it will have."""
        if self._array is not None:
            return self._array.dtype
        return get_dtype(getattr(self.initializer, "dtype", None), map_mixed16=np.float32)

    @property
    def shape(self) -> Any:
        return None if self._array is None else self._array.shape

    def initialize(self, shape: PerAxis) -> None:
        """Fill an array of this ``shape`` with initial values, and drop the gradient.

        A parameter that has an array already gets new values of the type that it has.
        """
        first = _NOT_CLEARED if self._array is not None else self.node.gradient  # in a program of Chainer
        a = to_device(self._draw(_as_shape(shape), self.dtype), self.device)
        if self._array is None:
            self._take(a)
        else:
            self.array = a
        self.node.gradient = None
        if first is not None:
            self._begin_gradient(first)
        if self.on_initialize is not None:
            self.on_initialize(self)

    def _begin_gradient(self, first: Array = _NOT_CLEARED) -> None:
        """None until it is written; in a program of Chainer NaN, which it may fill: ``p.grad[...] = 0``."""
        if as_chainer[0] and is_floating(self._array.dtype):
            with on(self._array):
                self.node.gradient = get_array_module(self._array).full_like(self._array, float(first))

    def _draw(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """Initial values, in host memory."""
        init = self.initializer
        a: Array = np.empty(shape, dtype)
        if init is None:
            a.fill(np.nan)
        elif callable(init):
            init(a)
        elif is_array(init) and init.ndim and init.shape != shape:
            raise ValueError(
                f"parameter {self.name or ''}: it was made from an array of shape {init.shape}, so it cannot be "
                f"initialised with shape {shape}; assign an array instead"
            )
        else:
            a[...] = init
        return a

    def _take(self, a: Array) -> None:
        """Use ``a`` itself as the array, and drop a gradient of another shape, type or device."""
        self.release()
        if self.node.gradient is not None and (self._array is None or not _alike(a, self.grad)):
            self.node.gradient = None
        self._array = a
        self.node.shape, self.node.dtype = a.shape, a.dtype
        note_change(self)

    @property
    def array(self) -> Array:
        """The array, or None before initialisation."""
        if self._kept is not None:
            self.release()
        self.node.is_handed_out = True
        return self._array

    @array.setter
    def array(self, a: Array) -> None:
        old = self._array
        if a is old:
            return
        if a is not None and not is_array(a):
            raise TypeError(
                f"parameter {self.name or ''}: expected an array of NumPy or CuPy, got {type(a).__name__}; convert it"
            )
        if old is not None:
            note_assignment(self)
        if self.slot is not None and not self.is_shared and _alike(a, old):
            self.write(a)
            return
        self.leave_arena()
        if a is None:
            self._array = self.node.gradient = None
        else:
            self._take(a)

    def keep(self) -> Kept | None:
        """Where a kernel may keep what it makes of the array until somebody can write to that; None where one can now.

        Until then the array is read-only, so that nobody who came to it by another way writes to it unnoticed. Asking
        for ``array`` ends it. Parameters in flat memory, which others write to, have no such place, nor have those on a
        device, whose arrays cannot be read-only.
        """
        is_here = self.slot is None and type(self._array) is np.ndarray
        if self._kept is None and is_here and is_private(self) and self._array.flags.writeable:
            self._array.flags.writeable = False
            self._kept = Kept()
            if not is_private(self):  # another thread has taken it since
                self.release()
        return self._kept

    def copy_for_reading(self) -> Reader | None:
        """By which a kernel of a device reads a copy of the weights; None where it makes its own at each call."""
        slot = None if self.node.view is None else self.slot
        copies = None if slot is None else slot.copies
        return None if copies is None or slot is None else copies.reader_of(self, slot)

    def lend(self, to_write: bool = False) -> Array:
        """The array, for code that keeps no reference to it.

        Args:
            to_write: whether that code may write there.
        """
        self.release()
        if to_write and self.slot is not None:
            self.slot.arena.note_write()
        return self._array

    def write(self, values: Array | float) -> None:
        """Copy ``values`` into the array: a write that is no assignment, of code that keeps no reference to it."""
        self.release()
        if self.slot is not None:
            self.slot.arena.note_write()
        fill(self._array, values)

    def release(self) -> None:
        """Forget what was kept, and let the array be written to."""
        if self._kept is not None:
            self._kept = None
            self._array.flags.writeable = True

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
        if deferred.waiting:  # a rule asks during a backward pass
            deferred.write_all()
        g: Any = None if self._array is None else self.node.gradient
        return g.array if isinstance(g, Variable) else g

    @grad.setter
    def grad(self, g: Array) -> None:
        self._check_gradient(g)
        view = self.node.view
        if g is not None and view is not None and not isinstance(g, Variable):
            if g is not view:
                fill(view, g)
            g = view
        self.node.gradient = g

    def cleargrad(self) -> None:
        """Forget the gradient."""
        self.node.gradient = None

    def zerograd(self) -> None:
        """Fill the gradient with zeros, which is deprecated; a parameter without a shape has none."""
        warn_of_zerograd()
        self.zero_gradient()

    def zero_gradient(self) -> None:
        """Fill the gradient with zeros; in a program of Chainer, that of a parameter without a shape begins so."""
        if self._array is not None:
            with on(self.array):
                self.grad = self.xp.zeros_like(self.array)
        elif as_chainer[0]:
            self.node.gradient = _ZEROED

    def addgrad(self, var: Variable) -> None:
        """Add the gradient of ``var`` to this one's; a parameter without a shape gets that of ``var``."""
        g = var.grad
        if g is None:
            return
        if self._array is None:
            self.initialize(g.shape)
            self.node.gradient = None
        self._expect_shape(g.shape, "addgrad expected a gradient")
        super().addgrad(var)

    def copydata(self, var: Variable) -> None:
        """Copy the values of ``var``, of the same shape; this parameter's type and device stay."""
        source = var.array
        if source is None:
            return
        if self._array is None:
            self.initialize(source.shape)
        self._expect_shape(source.shape, "copydata expected an array")
        self.write(to_device(source, self.device))
        note_assignment(self)

    def _expect_shape(self, shape: tuple[int, ...], words: str) -> None:
        if shape != self.shape:
            raise ValueError(f"parameter {self.name or ''}: {words} of shape {self.shape}, got {shape}")

    # ---- flat memory ------------------------------------------------------------------------------------------------

    def enter_arena(self, slot: Slot, data_view: Array, grad_view: Array, is_guest: bool = False) -> None:
        """Move to ``data_view`` and ``grad_view`` in flat memory, at ``slot``; called by ``core.flat``.

        With ``is_guest`` the array is in the flat memory of a parameter that shares it: only the gradient moves.
        """
        self.release()
        if not is_guest:
            fill(data_view, self._array)
            for peer in self._others():
                peer.slot, peer.node.view, peer._array = None, None, data_view
                note_change(peer)
        g = self.grad
        if g is not None:
            fill(grad_view, g)
            g = grad_view
        self._array = data_view
        self.node.gradient = g
        self.node.view = grad_view
        self.node.is_handed_out = False
        self.slot = slot
        note_change(self)

    def move_gradient(self, view: Array) -> None:
        """Keep the gradient in ``view``, which has its values already; called by ``core.flat``."""
        node = self.node
        if node.gradient is node.view:
            node.gradient = view
        node.view = view
        note_change(self)

    def move_array(self, view: Array) -> None:
        """Keep the array in ``view``, which has its values already; called by ``core.flat``."""
        self._array = view
        note_change(self)

    def leave_arena(self) -> None:
        """Give up the place in flat memory, and the memory shared with others; the values stay what they are."""
        if self.peers is not None:
            self.peers.members.discard(self)
            self.peers = None
        self.slot = None
        self.node.view = None
        note_change(self)

    @property
    def is_shared(self) -> bool:
        """True if another parameter uses the same array."""
        return self.peers is not None and len(self.peers.members) > 1

    def _others(self) -> list[Parameter]:
        """The parameters that share the array."""
        return [] if self.peers is None else [p for p in self.peers.members if p is not self]

    def __copy__(self) -> Parameter:
        """Another parameter over the same array, with its own gradient; they share until one gets another array."""
        new = Parameter.__new__(type(self))
        new.__setstate__({**self.__getstate__(), "grad": None, "peers": None})
        new.initializer = self.initializer
        if self._array is not None:
            if self.peers is None:
                self.peers = Peers()
                self.peers.members.add(self)
            new.peers = self.peers
            self.peers.members.add(new)
        return new

    def anew(self) -> Parameter:
        """A parameter of the same name, shape, type and device with new initial values."""
        if is_array(self.initializer):
            raise ValueError(
                f"parameter {self.name}: mode 'init' needs an initializer, but the parameter was made from an array; "
                "use mode='copy'"
            )
        new = Parameter(self.initializer, name=self.name)
        new.initial_device = self.device
        if self._array is not None:
            new._take(to_device(new._draw(self.shape, self.dtype), self.device))
        return new

    def host(self) -> Parameter | None:
        """A parameter that shares the array and has a place in flat memory."""
        return next((p for p in self._others() if p.slot is not None), None)

    def collect_gradient(self) -> None:
        """Copy the gradient into flat memory, or zeros if there is none."""
        node = self.node
        g, view = node.gradient, node.view
        if g is view:
            return
        if g is None:
            fill(view, 0)
        else:
            fill(view, g.array if isinstance(g, Variable) else g)
        node.gradient = view

    # ---- devices, update, copies ------------------------------------------------------------------------------------

    @property
    def device(self) -> Device:
        """Where the array lies."""
        return self.initial_device if self._array is None else device_of(self._array)

    def to_device(self, device: DeviceSpec) -> None:
        """Move array and gradient to ``device``; another device takes the parameter out of flat memory."""
        device = self.initial_device = get_device(device)
        if self._array is None or device == device_of(self._array):
            return
        g = self.grad
        self.leave_arena()
        self._take(to_device(self._array, device))
        self.node.gradient = None if g is None else to_device(g, device)

    @property
    def update_rule(self) -> Any:
        """How an optimizer updates it; None before one is set up."""
        return self._update_rule

    @update_rule.setter
    def update_rule(self, rule: UpdateRule | None) -> None:
        self._update_rule = rule
        note_change(self)

    def freeze(self, is_frozen: bool) -> None:
        """If ``is_frozen``, leave it out of updates, also of optimizers set up later; or let it take part again."""
        self.is_frozen = is_frozen
        if self._update_rule is not None:
            self._update_rule.enabled = not is_frozen

    def update(self) -> None:
        """Apply the update rule to this parameter only."""
        if self.update_rule is not None:
            self.update_rule.update(self)
            note_change(self)  # its rule has counted one update more than its neighbours'

    def __getstate__(self) -> dict[str, object]:
        state = super().__getstate__()
        state["initializer"] = None if is_array(self.initializer) else self.initializer
        state["update_rule"] = self.update_rule
        state["initial_device"] = self.initial_device
        state["peers"] = self.peers
        state["is_frozen"] = self.is_frozen
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.slot = self.on_initialize = self._changed_at = self._kept = None
        self.initializer = state["initializer"]
        self._update_rule = state["update_rule"]
        self.is_frozen = state.get("is_frozen", False)
        self.initial_device = state["initial_device"]
        peers = self.peers = state["peers"]
        if peers is not None:
            for other in peers.members:  # the array of all of them
                self._array = other._array
                break
            peers.members.add(self)


class _FillWithNaN:
    """What None means as an initializer, for programs of Chainer that look at it."""

    dtype = None

    def __call__(self, array: Array) -> None:
        array[...] = np.nan


_fill_with_nan = _FillWithNaN()


def _as_shape(shape: Any) -> tuple[int, ...]:
    try:
        return (operator.index(shape),)
    except TypeError:
        return tuple(int(n) for n in shape)


def _alike(a: Array, b: Array) -> bool:
    return (
        is_array(a)
        and a.shape == b.shape
        and a.dtype == b.dtype
        and ((isinstance(a, np.ndarray) and isinstance(b, np.ndarray)) or device_of(a) == device_of(b))
    )


add_hints(Parameter, "Parameter")
