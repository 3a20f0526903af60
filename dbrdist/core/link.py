"""Links: functions with parameters, and chains of them."""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import numpy as np

from dbrdist.core.backend import is_array, to_device
from dbrdist.core.changes import Watch, note_change
from dbrdist.core.checks import ArgumentError
from dbrdist.core.device_resident import DeviceResident, DeviceResidentsVisitor
from dbrdist.core.flat import unique
from dbrdist.core.link_hook import ForwardPostprocessArgs, ForwardPreprocessArgs, LinkHook, seen, thread
from dbrdist.core.node import VariableNode, note_assignment
from dbrdist.core.parameter import Parameter

L = TypeVar("L", bound="Link")


class Link(DeviceResident):
    """A callable with parameters.

    Parameters are assigned within ``with self.init_scope():``, persistent values (saved, not trained) are registered
    with ``add_persistent`` or ``register_persistent``; ``forward`` computes. Parameters are listed in the order of
    their registration.
    """

    repeated_class: ClassVar[Callable[..., Any]]  # handed down by core.chain
    forward: Any  # the computation; links that can be called define it
    name: str | None = None
    _changed_at: int | None = None
    _cleared: tuple[int, Watch, list[VariableNode], list[Link]] | None = None  # what cleargrads of a container clears

    def __init__(self, **params: Any) -> None:
        self._params: list[str] = []
        self._persistent: list[str] = []
        self._within_init_scope = False
        self._hooks: dict[str, LinkHook] | None = None
        for name, value in params.items():
            has_dtype = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple)
            shape, dtype = value if has_dtype else (value, np.float32)
            self.add_param(name, shape, dtype=dtype)

    @classmethod
    def from_params(cls, *args: Any, **kwargs: Any) -> Any:
        """A link made from given parameters; only links that define it have it."""
        raise NotImplementedError(f"{cls.__name__} defines no from_params()")

    # ---- construction -----------------------------------------------------------------------------------------------

    @property
    def within_init_scope(self) -> bool:
        """True within ``with self.init_scope():``."""
        return getattr(self, "_within_init_scope", False)

    @contextmanager
    def init_scope(self) -> Iterator[None]:
        """Within the block, assigned parameters (and in a Chain, links) are registered."""
        if "_params" not in self.__dict__:
            raise RuntimeError(f"{type(self).__name__}: call super().__init__() before init_scope()")
        old, self._within_init_scope = self._within_init_scope, True
        try:
            yield
        finally:
            self._within_init_scope = old

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, Parameter):
            if self.within_init_scope:
                value.name = name
                if name not in self._params:
                    self._params.append(name)
                if name in self._persistent:
                    self._persistent.remove(name)
            note_change(self)

    def __delattr__(self, name: str) -> None:
        if name in self._params:
            self._params.remove(name)
        if name in self._persistent:
            self._persistent.remove(name)
        super().__delattr__(name)
        note_change(self)

    def add_param(self, name: str, shape: Any = None, dtype: Any = np.float32, initializer: Any = None) -> None:
        """Register a parameter; without a shape it is initialised later."""
        if name in self.__dict__:
            raise AttributeError(f"{type(self).__name__}: cannot register parameter {name!r}: the attribute exists")
        if initializer is None:
            initializer = _TypedNaN(dtype)
        with self.init_scope():
            setattr(self, name, Parameter(initializer, shape))

    def add_persistent(self, name: str, value: Any) -> None:
        """Register a value that is saved and copied with the link, but not trained."""
        if name in self.__dict__:
            raise AttributeError(f"{type(self).__name__}: cannot register persistent {name!r}: the attribute exists")
        setattr(self, name, value)
        self.register_persistent(name)

    def register_persistent(self, name: str) -> None:
        """Make an existing attribute persistent."""
        if not hasattr(self, name):
            raise AttributeError(f"{type(self).__name__}: expected an attribute {name!r} to register, there is none")
        if name not in self._persistent:
            self._persistent.append(name)

    # ---- the call ---------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._hooks is None and not (seen and thread.hooks):
            try:
                if len(args) == 1 and not kwargs:  # nearly always, and half the time of the general call
                    return self.forward(args[0])
                return self.forward(*args, **kwargs)
            except ArgumentError as e:
                e.within(self)
                raise
            except AttributeError:
                self._require_forward()
                raise
        self._require_forward()
        return self._call_with_hooks([*thread.hooks.values(), *(self._hooks or {}).values()], args, kwargs)

    def _call_with_hooks(self, hooks: list[LinkHook], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = ForwardPreprocessArgs(self, "forward", args, kwargs)
        begun: list[LinkHook] = []
        try:
            for hook in hooks:
                hook.forward_preprocess(before)
                begun.append(hook)
            out = self.forward(*args, **kwargs)
        except BaseException as e:
            for hook in begun:
                hook.forward_failed(before)
            if isinstance(e, ArgumentError):
                e.within(self)
            raise
        after = ForwardPostprocessArgs(self, "forward", args, kwargs, out)
        for hook in hooks:
            hook.forward_postprocess(after)
        return out

    def _require_forward(self) -> None:
        if not hasattr(self, "forward"):
            raise TypeError(f"{type(self).__name__} defines no forward(), so it cannot be called")

    @property
    def local_link_hooks(self) -> dict[str, LinkHook]:
        """The hooks of this link only."""
        if self._hooks is None:
            self._hooks = {}
        return self._hooks

    def add_hook(self: L, hook: LinkHook, name: str | None = None) -> L:
        """Call a hook before and after this link's forward."""
        name = hook.name if name is None else name
        if name in self.local_link_hooks:
            raise KeyError(f"{type(self).__name__} already has a hook named {name!r}")
        hook.added(self)  # which may refuse the link
        self.local_link_hooks[name] = hook
        return self

    def delete_hook(self, name: str) -> None:
        """Remove a hook."""
        if name not in self.local_link_hooks:
            raise KeyError(f"{type(self).__name__} has no hook named {name!r}")
        self.local_link_hooks.pop(name).deleted(self)

    # ---- walking ----------------------------------------------------------------------------------------------------

    def params(self, include_uninit: bool = True) -> Iterator[Parameter]:
        """All parameters of this link and its children, in the order of registration."""
        for name in self._params:
            p = self.__dict__[name]
            if include_uninit or p.is_initialized:
                yield p

    def namedparams(self, include_uninit: bool = True) -> Iterator[tuple[str, Parameter]]:
        """All parameters with their paths, such as ``/l1/W``."""
        for name in self._params:
            p = self.__dict__[name]
            if include_uninit or p.is_initialized:
                yield "/" + name, p

    def children(self) -> Iterator[Link]:
        """The links directly below."""
        return iter(())

    def links(self, skipself: bool = False) -> Iterator[Link]:
        """This link and all below it."""
        if not skipself:
            yield self

    def namedlinks(self, skipself: bool = False) -> Iterator[tuple[str, Link]]:
        """This link and all below it with their paths."""
        if not skipself:
            yield "/", self

    def count_params(self) -> int:
        """The number of trained values; uninitialised parameters count as none."""
        return sum(p.size for p in unique(self.params(include_uninit=False)))

    @property
    def printable_specs(self) -> Iterator[tuple[str, Any]]:
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
        """Fill all gradients with zeros."""
        for p in self.params(include_uninit=False):
            p.zerograd()

    def addgrads(self, link: Link) -> None:
        """Add another link's gradients, parameter by parameter."""
        theirs = dict(link.namedparams())
        names = {p: name for name, p in self.namedparams()}  # a parameter of several links has one gradient
        for p, name in names.items():
            p.addgrad(theirs[name])

    @property
    def update_enabled(self) -> bool:
        """True if any parameter is updated by the optimizer."""
        return any(p.update_rule is not None and p.update_rule.enabled for p in self.params())

    def enable_update(self) -> None:
        """Let the optimizer update all parameters."""
        for p in self.params():
            if p.update_rule is not None:
                p.update_rule.enabled = True

    def disable_update(self) -> None:
        """Freeze all parameters."""
        for p in self.params():
            if p.update_rule is not None:
                p.update_rule.enabled = False

    # ---- devices ----------------------------------------------------------------------------------------------------

    def device_resident_accept(self, visitor: DeviceResidentsVisitor) -> None:
        """Let a visitor go through this link's parameters and persistent arrays, and through its children."""
        super().device_resident_accept(visitor)
        for name in self._params:
            visitor.visit_variable(self.__dict__[name])
        for name in self._persistent:
            value = getattr(self, name)
            if is_array(value):
                setattr(self, name, visitor.visit_array(value))

    # ---- copies -----------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_cleared"}  # of its own parameters

    def copy(self: L, mode: str = "share") -> L:
        """A copy whose parameters share arrays (``share``), are copied (``copy``) or initialised again (``init``)."""
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
        """Copy the values of another link with the same structure into this one."""
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
                    mine[...] = to_device(theirs, self._device)
                else:
                    setattr(self, name, copying.deepcopy(theirs))

    def repeat(self, n_repeat: int, mode: str = "init") -> Any:
        """A Sequential of ``n_repeat`` copies of this link, none below 1; see :meth:`copy` for ``mode``."""
        return Link.repeated_class(*[self.copy(mode) for _ in range(n_repeat)])

    # ---- saving -----------------------------------------------------------------------------------------------------

    def serialize(self, serializer: Any) -> None:
        """Save or load parameters and persistent values."""
        for name in self._params:
            p = self.__dict__[name]
            value = serializer(name, p.array)
            if value is None or not serializer.is_loading:
                continue
            if p.array is None:
                p.initialize(value.shape)
                filled: Any = p.array
                filled[...] = to_device(value, p.device)
            note_assignment(p.node)
        for name in self._persistent:
            old = getattr(self, name)
            value = serializer(name, old)
            if value is not old:
                setattr(self, name, value)


class _TypedNaN:
    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    def __call__(self, array: Any) -> None:
        array[...] = np.nan


def _join(prefix: str, pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for path, value in pairs:
        yield prefix + path, value
