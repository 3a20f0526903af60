"""Links: functions with parameters, and chains of them."""

from __future__ import annotations

import copy as copying
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from dbrdist.core.array.backend import device_of, fill, is_array, to_device
from dbrdist.core.array.config import BlockMethod, config
from dbrdist.core.array.current_device import HERE, On, current_number
from dbrdist.core.model import pickles_of_chainer
from dbrdist.core.model.device_resident import DeviceResident, DeviceResidentsVisitor
from dbrdist.core.model.flat import unique
from dbrdist.core.model.link_hook import (
    ForwardPostprocessArgs,
    ForwardPreprocessArgs,
    LinkHook,
    seen,
    thread,
    with_attributes,
)
from dbrdist.core.model.makers import note_maker
from dbrdist.core.model.parameter import InitialValue, Parameter
from dbrdist.core.model.versions import Watch, note_change
from dbrdist.core.tape.checks import ArgumentError
from dbrdist.core.tape.named_errors import explain_operand, no_forward
from dbrdist.core.tape.node import VariableNode, note_assignment
from dbrdist.core.tape.repeats import are_used, note_state
from dbrdist.core.tape.variable import Variable
from dbrdist.core.usage.foreign_names import Foreign, add_hints, add_switches
from dbrdist.core.usage.mistakes import NO_INIT, given_a_class, missing_init, refuse, refuse_no_values, warn

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from dbrdist.core.array.types import Array, PerAxis
    from dbrdist.core.files.serializer import AbstractSerializer
L = TypeVar("L", bound="Link")
T = TypeVar("T")
_NEVER_REGISTERED = {Variable, type(None), bool, int, float, str}  # types of what a link keeps from call to call
_OWN_ATTRIBUTES = frozenset({"_children", "_hooks", "_layers", "_list", "_params", "_persistent", "_within_init_scope"})


class _SetByInit:
    """An attribute that ``Link.__init__`` sets: whoever forgot to call it is told so."""

    def __get__(self, obj: Link | None, owner: type[Link]) -> Any:
        if obj is None:
            return self
        raise AttributeError(NO_INIT)


class Link(DeviceResident):
    """A callable with parameters.

    Parameters are assigned within ``with self.init_scope():``, persistent values (saved, not trained) are registered
    with ``add_persistent`` or ``register_persistent``; ``forward`` computes. Parameters are listed in the order of
    their registration.

    Args:
        params: parameters by name: their shape, or a pair of shape and type.

    Example:
        >>> class Shift(dbrdist.Link):
        ...     def __init__(self, n):
        ...         super().__init__()
        ...         with self.init_scope():
        ...             self.b = dbrdist.Parameter(0.0, (n,))
        ...     def forward(self, x):
        ...         return x + self.b
        >>> [name for name, param in Shift(3).namedparams()]
        ['/b']
    """

    repeated_class: ClassVar[Callable[..., Link]]  # handed down by core.chain
    _params: Any = _SetByInit()
    forward: Any  # the computation; links that can be called define it
    name: str | None = None
    _left_out: tuple[str, ...] = ()  # parameters in whose place there is None now
    _changed_at: int | None = None
    _cleared: tuple[int, Watch, list[VariableNode], list[Link]] | None = None  # what cleargrads of a container clears

    def __init__(self, **params: Any) -> None:
        self._params = []
        self._persistent: list[str] = []
        self._within_init_scope = False
        self._hooks: dict[str, LinkHook] | None = None
        for name, value in params.items():
            has_dtype = isinstance(value, tuple) and len(value) == 2 and not isinstance(value[1], (int, np.integer))
            shape, dtype = value if has_dtype else (value, np.float32)
            self.add_param(name, shape, dtype=dtype)

    @classmethod
    def from_params(cls: type[L], *args: Array, **kwargs: object) -> L:
        """A link made from given parameters (``*args``, ``**kwargs``); only links that define it have it."""
        raise NotImplementedError(f"{cls.__name__} defines no from_params(): this link does not implement it")

    # ---- construction -----------------------------------------------------------------------------------------------

    @property
    def within_init_scope(self) -> bool:
        """True within ``with self.init_scope():``."""
        return getattr(self, "_within_init_scope", False)

    @BlockMethod("self.init_scope()")
    def init_scope(self) -> Iterator[None]:
        """Within the block, assigned parameters (and in a Chain, links) are registered."""
        if "_params" not in self.__dict__:
            raise missing_init()
        old, self._within_init_scope = self._within_init_scope, True
        try:
            yield
        finally:
            self._within_init_scope = old

    def __setattr__(self, name: str, value: Any) -> None:
        if are_used[0] and config.__dict__["_repeats"] is not None:
            note_state(self, name, value)
        if value is None:
            self._leave_out(name)
        if type(value) not in _NEVER_REGISTERED or self.__dict__.get("_within_init_scope"):
            self._assign(name, value)
        else:  # what steps keep
            super().__setattr__(name, value)

    def _assign(self, name: str, value: Any) -> None:
        """Set an attribute, and register it where that is meant."""
        if isinstance(value, Parameter):
            if self.within_init_scope:
                self._check_name(name, "parameter")
        elif isinstance(value, Variable):
            if self.within_init_scope:
                warn(
                    f"{type(self).__name__}.{name}: a Variable is not registered, so it is not trained; assign a "
                    "dbrdist.Parameter"
                )
        elif type(value) is np.ndarray and name in self.__dict__.get("_params", ()):
            refuse(TypeError(
                f"{type(self).__name__}.{name} is a parameter, got an array; assign to its array: .{name}.array = ..."
            ))  # fmt: skip
        super().__setattr__(name, value)
        if isinstance(value, Parameter):
            if self.within_init_scope or name in self._left_out:
                value.name = name
                self._left_out = tuple(other for other in self._left_out if other != name)
                if name not in self._params:
                    self._params.append(name)
                    if len(self._params) == 1:
                        note_maker(self, Link)
                if name in self._persistent:
                    self._persistent.remove(name)
            note_change(self)

    def _leave_out(self, name: str) -> None:
        """Have no parameter ``name`` until there is one again: None was assigned, as to ``linear.b``."""
        if name in self.__dict__.get("_params", ()):
            self._params.remove(name)
            self._left_out = (*self._left_out, name)
            note_change(self)

    def _check_name(self, name: str, what: str) -> None:
        """Refuse the name of a method or property for what is registered: it would hide it."""
        if name in _OWN_ATTRIBUTES:
            raise AttributeError(
                f"{type(self).__name__}: cannot register {what} {name!r}: every link has that attribute"
            )
        for cls in type(self).__mro__:
            if name in cls.__dict__:
                hidden = cls.__dict__[name]
                if isinstance(hidden, Foreign) or (hidden is None and cls is not Link):
                    return
                if cls is Link or hasattr(type(hidden), "__get__"):
                    refuse(AttributeError(
                        f"{type(self).__name__}: cannot register {what} {name!r}: the attribute exists: "
                        f"{cls.__name__}.{name}; take another name"
                    ))  # fmt: skip
                return

    def __delattr__(self, name: str) -> None:
        if name in self._params:
            self._params.remove(name)
        if name in self._persistent:
            self._persistent.remove(name)
        super().__delattr__(name)
        note_change(self)

    def add_param(
        self, name: str, shape: PerAxis | None = None, dtype: DTypeLike = np.float32, initializer: InitialValue = None
    ) -> None:
        """Register a parameter; without a shape it is initialised later.

        Args:
            name: its attribute; one in use is an AttributeError.
            shape: None to initialise it later.
            dtype: its type where ``initializer`` has none; default float32.
            initializer: an initializer, a number or an array; None fills with NaN, to be filled by you.
        """
        if name in self.__dict__:
            raise AttributeError(f"{type(self).__name__}: cannot register parameter {name!r}: the attribute exists")
        with self.init_scope():
            setattr(self, name, Parameter(_TypedNaN(dtype) if initializer is None else initializer, shape))

    def add_persistent(self, name: str, value: Array | int | str | None) -> None:
        """Register ``value``, which is saved and copied with the link, but not trained, as the attribute ``name``."""
        if name in self.__dict__:
            raise AttributeError(f"{type(self).__name__}: cannot register persistent {name!r}: the attribute exists")
        setattr(self, name, value)
        self.register_persistent(name)

    @property
    def persistent_names(self) -> tuple[str, ...]:
        """The attributes of this link alone that are saved but not trained."""
        return tuple(self._persistent)

    def register_persistent(self, name: str) -> None:
        """Make the existing attribute ``name`` persistent."""
        if not hasattr(self, name):
            raise AttributeError(f"{type(self).__name__}: expected an attribute {name!r} to register, there is none")
        if name not in self._persistent:
            self._persistent.append(name)

    # ---- the call ---------------------------------------------------------------------------------------------------

    def __call__(self, *args: object, **kwargs: object) -> Any:
        try:
            if self._gpu is not None:
                return self._call_on(self._gpu, args, kwargs)
            if self._hooks is None and not (seen and thread.hooks):
                if len(args) == 1 and not kwargs:  # nearly always, and half the time of the general call
                    return self.forward(args[0])
                return self.forward(*args, **kwargs)
        except ArgumentError as e:
            e.within(self)
            raise
        except AttributeError as e:
            if "_params" not in self.__dict__:
                raise missing_init() from e
            self._require_forward()
            if type(self).__module__.startswith("dbrdist."):
                explain_operand(self, e, args, kwargs)
            raise
        self._require_forward()
        return self._call_with_hooks([*thread.hooks.values(), *(self._hooks or {}).values()], args, kwargs)

    def _call_on(self, number: int, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        """The call with the link's GPU as the current device."""
        with HERE if current_number() == number else On(number):
            if self._hooks is None and not (seen and thread.hooks):
                return self.forward(*args, **kwargs)
            self._require_forward()
            return self._call_with_hooks([*thread.hooks.values(), *(self._hooks or {}).values()], args, kwargs)

    def _call_with_hooks(
        self, hooks: list[LinkHook], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Variable | dict[str, Variable]:
        before = ForwardPreprocessArgs(self, "forward", args, kwargs)
        begun: list[LinkHook] = []
        caller: Any = self
        own = dict(self.__dict__)
        try:
            for hook in hooks:
                hook.forward_preprocess(before)
                begun.append(hook)
                if replaced := hook.stand_ins(before, caller):
                    caller = with_attributes(caller, replaced)
            out = caller.forward(*args, **kwargs)
        except BaseException as e:
            for hook in begun:
                hook.forward_failed(before)
            if isinstance(e, ArgumentError):
                e.within(self)
            raise
        finally:
            if caller is not self:
                self._take_over(own, caller.__dict__)
        after = ForwardPostprocessArgs(self, "forward", args, kwargs, out)
        for hook in hooks:
            hook.forward_postprocess(after)
        return out

    def _take_over(self, before: dict[str, object], after: dict[str, Any]) -> None:
        """Set the attributes that a call changed in a copy of this link; its stand-ins stay behind."""
        stand_ins = after["_stand_ins"]
        for name, value in after.items():
            if name not in stand_ins and name != "_stand_ins" and before.get(name, after) is not value:
                self.__dict__[name] = value

    def _require_forward(self) -> None:
        if not hasattr(self, "forward"):
            raise no_forward(self)

    @property
    def local_link_hooks(self) -> dict[str, LinkHook]:
        """The hooks of this link only."""
        if self._hooks is None:
            self._hooks = {}
        return self._hooks

    def add_hook(self: L, hook: LinkHook, name: str | None = None) -> L:
        """Call ``hook`` before and after forward, as ``name`` or by its own name; one in use is a KeyError."""
        if isinstance(hook, type):
            raise given_a_class(f"{type(self).__name__}.add_hook", hook, "a hook")
        if not hasattr(hook, "added"):
            kind = type(hook).__name__
            hint = "; hooks of optimizers belong to optimizer.add_hook" if hasattr(hook, "timing") else ""
            raise TypeError(f"{type(self).__name__}.add_hook: expected a LinkHook, got {kind}{hint}")
        name = hook.name if name is None else name
        if name in self.local_link_hooks:
            raise KeyError(f"{type(self).__name__} already has a hook named {name!r}")
        hook.added(self)  # which may refuse the link
        self.local_link_hooks[name] = hook
        return self

    def delete_hook(self, name: str) -> None:
        """Remove the hook called ``name``; a KeyError where there is none."""
        if name not in self.local_link_hooks:
            raise KeyError(f"{type(self).__name__} has no hook named {name!r}")
        self.local_link_hooks.pop(name).deleted(self)

    # ---- walking ----------------------------------------------------------------------------------------------------

    def params(self, include_uninit: bool = True) -> Iterator[Parameter]:
        """All parameters of this link and its children, in the order of registration.

        Args:
            include_uninit: whether parameters without a shape are listed.
        """
        for name in self._params:
            p = self.__dict__[name]
            if include_uninit or p.is_initialized:
                yield p

    def namedparams(self, include_uninit: bool = True) -> Iterator[tuple[str, Parameter]]:
        """All parameters with their paths, such as ``/l1/W``.

        Args:
            include_uninit: whether parameters without a shape are listed.
        """
        for name in self._params:
            p = self.__dict__[name]
            if include_uninit or p.is_initialized:
                yield "/" + name, p

    def children(self) -> Iterator[Link]:
        """The links directly below."""
        return iter(())

    def links(self, skipself: bool = False) -> Iterator[Link]:
        """This link and all below it.

        Args:
            skipself: leave this link itself out.
        """
        if not skipself:
            yield self

    def namedlinks(self, skipself: bool = False) -> Iterator[tuple[str, Link]]:
        """This link and all below it with their paths.

        Args:
            skipself: leave this link itself out.
        """
        if not skipself:
            yield "/", self

    def count_params(self) -> int:
        """The number of trained values; parameters without a shape count as none, with a warning."""
        late = [name for name, p in self.namedparams() if not p.is_initialized]
        if late:
            warn(f"{type(self).__name__}.count_params: not counted, since they have no shape yet: {', '.join(late)}")
        return sum(p.size for p in unique(self.params(include_uninit=False)))

    @property
    def printable_specs(self) -> Iterator[tuple[str, object]]:
        """Pairs shown by ``repr``."""
        return iter(())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.printable_specs)})"

    # ---- gradients --------------------------------------------------------------------------------------------------

    def cleargrads(self) -> None:
        """Forget all gradients."""
        values = self.__dict__
        for name in self._params:
            values[name].node.gradient = None

    def zerograds(self) -> None:
        """Fill all gradients with zeros; deprecated: :meth:`cleargrads` takes less time."""
        warnings.warn("Link.zerograds is deprecated. Use Link.cleargrads instead.", DeprecationWarning, stacklevel=2)
        for p in self.params():
            p.zero_gradient()

    def addgrads(self, link: Link) -> None:
        """Add the gradients of another ``link`` with the same structure, parameter by parameter."""
        theirs = dict(link.namedparams())
        names = {p: name for name, p in self.namedparams()}  # a parameter of several links has one gradient
        for p, name in names.items():
            p.addgrad(theirs[name])

    @property
    def update_enabled(self) -> bool:
        """True if any parameter is updated by the optimizer."""
        rules = [p.update_rule for p in self.params()]
        return any(rule is not None and getattr(rule, "enabled", True) for rule in rules)

    def enable_update(self) -> None:
        """Let optimizers update all parameters."""
        for p in self.params():
            p.freeze(False)

    def disable_update(self) -> None:
        """Freeze all parameters: for the optimizer that they have, and for every one that is set up later."""
        for p in self.params():
            p.freeze(True)

    @property
    def _device_id(self) -> int | None:
        """The number of the GPU, or None: what programs of Chainer 3 look at."""
        return self._gpu

    # ---- devices ----------------------------------------------------------------------------------------------------

    def device_resident_accept(self, visitor: DeviceResidentsVisitor) -> None:
        """Let a ``visitor`` see this link's parameters and persistent arrays, and its children."""
        super().device_resident_accept(visitor)
        for name in self._params:
            visitor.visit_variable(self.__dict__[name])
        for name in self._persistent:
            value = getattr(self, name)
            if is_array(value):
                setattr(self, name, visitor.visit_array(value))

    # ---- copies -----------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_cleared"}  # of its own parameters

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(pickles_of_chainer.link_state(state) if pickles_of_chainer.is_link_state(state) else state)

    def copy(self: L, mode: str = "share") -> L:
        """A copy that by ``mode`` shares arrays (``share``, default), copies (``copy``) or initialises (``init``)."""
        if mode == "copy":
            return copying.deepcopy(self)
        if mode not in ("share", "init"):
            raise ValueError(f"mode: expected 'share', 'copy' or 'init', got {mode!r}")
        new = copying.copy(self)
        new._params, new._persistent = list(self._params), list(self._persistent)
        new.name, new._hooks = None, None if self._hooks is None else dict(self._hooks)
        for name in new._params:
            old = new.__dict__[name]
            new.__dict__[name] = copying.copy(old) if mode == "share" else old.anew()
        if mode == "init":
            for name in new._persistent:
                setattr(new, name, copying.deepcopy(getattr(new, name)))
        return new

    def copyparams(self, link: Link, copy_persistent: bool = True) -> None:
        """Copy values of ``link``, of the same structure; with ``copy_persistent`` (default) persistent ones, too."""
        for name in self._params:
            source, target = link.__dict__[name], self.__dict__[name]
            if source.is_initialized and not target.is_initialized:
                target.initialize(source.shape)
            target.copydata(source)
        if copy_persistent:
            for name in self._persistent:
                mine, theirs = getattr(self, name), getattr(link, name)
                if is_array(mine):
                    if mine.shape != theirs.shape:
                        raise ValueError(f"copyparams: {name}: expected shape {mine.shape}, got {theirs.shape}")
                    fill(mine, to_device(theirs, device_of(mine)))
                else:
                    setattr(self, name, copying.deepcopy(theirs))

    def repeat(self, n_repeat: int, mode: str = "init") -> Link:
        """A Sequential of ``n_repeat`` copies of this link, none below 1; see :meth:`copy` for ``mode``."""
        if not isinstance(n_repeat, (int, np.integer)) or isinstance(n_repeat, bool):
            got = f"{type(n_repeat).__name__} {n_repeat!r:.40}"
            raise TypeError(f"{type(self).__name__}.repeat: n_repeat: expected an integer, got {got}")
        if n_repeat < 0:
            words = f"expected an integer of 0 or more, got {n_repeat}, which makes an empty Sequential"
            warn(f"{type(self).__name__}.repeat: n_repeat: {words}")
        return Link.repeated_class(*[self.copy(mode) for _ in range(n_repeat)])

    # ---- saving -----------------------------------------------------------------------------------------------------

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load parameters and persistent values by ``serializer``."""
        is_loading = getattr(serializer, "is_loading", None)  # None: a program's own, which does not say
        is_ours = type(serializer).__module__.startswith("dbrdist.")
        for name in self._params:
            p = self.__dict__[name]
            before = p.lend(to_write=is_loading is not False) if is_ours else p.array
            value = serializer(name, before)
            if value is None or is_loading is False:
                if value is None and is_loading and before is not None:
                    refuse_no_values(f"{self.name or type(self).__name__}/{name}", getattr(serializer, "strict", True))
                continue
            if before is None:
                p.initialize(value.shape)
                filled: Any = p.array
                filled[...] = to_device(value, p.device)
            note_assignment(p)
        for name in self._persistent:
            old = getattr(self, name)
            value = serializer(name, old)
            if value is not old:
                setattr(self, name, value)


add_hints(Link, "Link")
add_switches(Link)


class _TypedNaN:
    def __init__(self, dtype: DTypeLike) -> None:
        self.dtype = dtype

    def __call__(self, array: Array) -> None:
        array[...] = np.nan


def _join(prefix: str, pairs: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    return ((prefix + path, value) for path, value in pairs)
