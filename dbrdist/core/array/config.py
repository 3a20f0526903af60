"""Run-wide switches: per thread, over defaults of the process.

A read is one plain attribute read: every thread's values lie in its own dictionary, and a change of a default is
written into the dictionaries of all threads that have not set the value themselves.
"""

from __future__ import annotations

import sys
import threading
import weakref
from contextlib import ContextDecorator, contextmanager
from functools import update_wrapper
from inspect import signature
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from dbrdist.core.array.backend import as_dtype
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.user_line import warn_user
from dbrdist.errors import UsageWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import NoReturn, TextIO

    from numpy.typing import DTypeLike

    from dbrdist.core.array.types import DType, Raised

P = ParamSpec("P")
R = TypeVar("R")

_DEFAULTS: dict[str, Any] = {
    "train": True,
    "enable_backprop": True,
    "keep_graph_on_report": False,
    "debug": False,
    "dtype": "float32",
    # How oneDNN multiplies float32 arrays in products and convolutions: in "float32", or in "bf16", which rounds the
    # operands to bfloat16 and adds up in float32.
    "float32_products": "float32",
    # Whether convolutions of residual blocks on a GPU in float16 make the sums for the statistics that come next, and
    # normalize what they read, so that activations within a block are never written.
    "fused_convolutions": False,
    # Backward through a function whose parameters were assigned new values since its forward pass: "refuse" it, or as
    # in Chainer compute with the new values and "warn".
    "stale_parameters": "refuse",
    # Switches that Chainer programs set or read; use_cudnn, use_cudnn_tensor_core and cudnn_deterministic choose among
    # the kernels of convolutions on a GPU, the others change nothing.
    "autotune": False,
    "compute_mode": None,
    "cudnn_deterministic": False,
    "cudnn_fast_batch_normalization": False,
    "in_recomputing": False,
    "lazy_grad_sum": False,
    "type_check": True,
    "use_cudnn": "auto",
    "use_cudnn_tensor_core": "auto",
    "use_ideep": "never",
    "use_static_graph": True,
    "warn_nondeterministic": False,
}
_lock = threading.Lock()


class _ThreadValues:
    """What one thread sees, and which names it has set itself."""

    __slots__ = ("__weakref__", "own", "values")

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.own: set[str] = set()


class GlobalConfig:
    """The defaults of the process, as ``dbrdist.global_config``."""

    def __init__(self) -> None:
        self.__dict__["_defaults"] = {}
        self.__dict__["_threads"] = weakref.WeakSet()  # of _ThreadValues, which follow these defaults

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_defaults"][name]
        except KeyError:
            raise AttributeError(f"no configuration entry named {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if type(value) is str or name not in _DEFAULTS or name in _CHECKED:
            _check_entry(name, value)
        with _lock:
            self._defaults[name] = value
            for record in list(self._threads):
                if name not in record.own:
                    record.values[name] = value

    def __delattr__(self, name: str) -> None:
        """Forget a default that a program added."""
        with _lock:
            if name not in self._defaults:
                raise AttributeError(f"no configuration entry named {name!r}")
            del self._defaults[name]
            for record in list(self._threads):
                if name not in record.own:
                    record.values.pop(name, None)

    def show(self, file: TextIO | None = None) -> None:
        """Print all defaults, one a line, to ``file`` (default: standard output)."""
        _print_entries(dict(self._defaults), file)


global_config = GlobalConfig()
global_config.__dict__["_defaults"] = _DEFAULTS


class LocalConfig(threading.local):
    """The configuration of the current thread, as ``dbrdist.config``, over the defaults of a :class:`GlobalConfig`.

    ``config.train`` switches layers such as dropout and batch normalization, ``config.enable_backprop`` the recording
    of the graph, ``config.dtype`` the type of new parameters, ``config.debug`` the checks for NaN;
    ``config.float32_products = "bf16"`` lets products and convolutions of float32 round their operands to bfloat16.
    """

    def __init__(self, global_config: GlobalConfig = global_config) -> None:
        values = self.__dict__
        record = _ThreadValues(values)
        with _lock:
            values.update(global_config._defaults)
            global_config._threads.add(record)
        values["_global"] = global_config
        values["_record"] = record
        values["_function_hooks"] = {}  # of core.graph, here so that one look at the thread's values finds all
        values["_captured"] = None  # likewise: a list for the Variables that a call uses which records no graph
        values["_repeats"] = None  # likewise: what calls kept for their repetition
        values["_observer"] = None  # of core.array.observed: called with computations that are no functions

    def __setattr__(self, name: str, value: Any) -> None:
        if type(value) is str or name not in _DEFAULTS or name in _CHECKED:
            _check_entry(name, value)
        values = self.__dict__  # outside the lock: the first look at it in a thread runs __init__, which takes the lock
        with _lock:  # a change of the default in another thread must not come in between
            values[name] = value
            values["_record"].own.add(name)

    def __delattr__(self, name: str) -> None:
        """Forget this thread's own value; the default holds again."""
        values = self.__dict__
        with _lock:
            if name not in values["_record"].own:
                raise AttributeError(f"config.{name}: this thread has not set it, so there is nothing to delete")
            values["_record"].own.discard(name)
            defaults = values["_global"]._defaults
            if name in defaults:
                values[name] = defaults[name]
            else:
                del values[name]

    def show(self, file: TextIO | None = None) -> None:
        """Print all switches of this thread, one a line, to ``file`` (default: standard output)."""
        _print_entries({name: value for name, value in self.__dict__.items() if not name.startswith("_")}, file)


def _print_entries(entries: dict[str, Any], file: TextIO | None) -> None:
    width = max(map(len, entries), default=0)
    for name, value in sorted(entries.items()):
        print(f"{name:<{width}} {value}", file=file)


class _MixedType:
    """Parameters in float32, computations in 16 bits; NumPy takes it as its 16-bit type, and it equals its name."""

    def __init__(self, name: str, narrow: str) -> None:
        self.name = name
        self._narrow = narrow

    @property
    def dtype(self) -> DType:
        """The type of computations."""
        return as_dtype(self._narrow)

    def __eq__(self, other: object) -> bool:
        return other is self or (isinstance(other, str) and other == self.name)

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"dtype({self.name!r})"

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        return self.name


mixed16 = _MixedType("mixed16", "float16")
mixedbf16 = _MixedType("mixedbf16", "bfloat16")

config = LocalConfig(global_config)


class BlockFunction(Generic[P, R]):
    """A function that gives a ``with`` block. Python's own words for a slip name neither it nor what to write.

    Args:
        function: gives the block.
        written: what stands between ``with`` and the colon, in the errors.
    """

    __name__: str

    def __init__(self, function: Callable[P, R], written: str) -> None:
        update_wrapper(self, function)
        self._function = function
        self._written = written

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return self._function(*args, **kwargs)
        except TypeError:
            try:
                signature(self._function).bind(*args, **kwargs)
            except TypeError as e:
                words = f"{self.__name__}: {e}; write `with {self._written}:`"
            else:
                raise
            raise TypeError(words) from None

    def __enter__(self) -> NoReturn:
        raise TypeError(f"the parentheses are missing; write `with {self._written}:`")

    def __exit__(self, *exc: Raised) -> None:
        """Only there so that Python calls ``__enter__``."""

    def __repr__(self) -> str:
        return f"<function {self.__name__}>"

    def __reduce__(self) -> str:
        return self.__name__


class BlockMethod:
    """A method that gives a ``with`` block, as a decorator of what yields once."""

    def __init__(self, written: str) -> None:
        self._written = written

    def __call__(self, function: Callable[..., Iterator[None]]) -> BlockMethod:
        self.__doc__ = function.__doc__
        self._function = contextmanager(function)
        return self

    def __get__(self, obj: Any, owner: type) -> Any:
        return self._function if obj is None else BlockFunction(self._function.__get__(obj, owner), self._written)


class SwitchBlock(ContextDecorator):
    """What :func:`using_config` gives: a ``with`` block, or a decorator, within which one entry is set."""

    def __init__(self, name: str, value: Any, config: GlobalConfig | LocalConfig) -> None:
        self._is_used = False
        self._arguments = name, value, config

    def _recreate_cm(self) -> SwitchBlock:  # of a decorated function, whose calls may nest
        self._is_used = True
        return SwitchBlock(*self._arguments)

    def __enter__(self) -> None:
        if self._is_used:
            raise RuntimeError("using_config: a block can be entered once; write using_config(...) for each")
        self._is_used = True
        name, value, config = self._arguments
        values = config.__dict__
        self._had_own = isinstance(config, GlobalConfig) or name in values["_record"].own
        self._old = getattr(config, name, _missing)
        setattr(config, name, value)

    def __exit__(self, *exc: Raised) -> None:
        name, _, config = self._arguments
        if self._had_own and self._old is not _missing:
            setattr(config, name, self._old)
        elif isinstance(config, GlobalConfig) or name in config._record.own:  # unless the block deleted it
            delattr(config, name)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:  # modules may have gone by then
        if not self._is_used and not is_finalizing():
            name, value, _ = self._arguments
            warn_user(
                f"using_config({name!r}, {value!r}) was not entered, so it changed nothing; write `with "
                f"using_config({name!r}, {value!r}):`, or assign dbrdist.config.{name}",
                UsageWarning,
            )


def _using_config(name: str, value: Any, config: GlobalConfig | LocalConfig = config) -> SwitchBlock:
    """Set one configuration entry within a ``with`` block, for this thread.

    Args:
        name: the entry, such as ``"train"``, ``"enable_backprop"`` or ``"dtype"``.
        value: its value within the block.
        config: the configuration to change; by default that of the thread.

    Raises:
        ValueError, AttributeError: there is no such entry, or the value is not allowed.

    Example:
        >>> with dbrdist.using_config("train", False):
        ...     dbrdist.config.train
        False
    """
    if not isinstance(name, str):
        raise TypeError(
            f"using_config: name: expected the name of an entry, got {name!r}; write `with {_USING_CONFIG}:`"
        )
    if not isinstance(config, (GlobalConfig, LocalConfig)):
        raise TypeError(
            f"using_config: config: expected dbrdist.config or dbrdist.global_config, got {config!r}; give one entry "
            f"and its value, `with {_USING_CONFIG}:`"
        )
    return SwitchBlock(name, value, config)


_USING_CONFIG = 'dbrdist.using_config("train", False)'
_using_config.__name__ = _using_config.__qualname__ = "using_config"
using_config = BlockFunction(_using_config, _USING_CONFIG)
_missing = object()
_SWITCHES = frozenset({"train", "enable_backprop", "debug", "fused_convolutions"})
_CHOICES = {"float32_products": ("float32", "bf16")}
_CHECKED = frozenset({*_CHOICES, "dtype"})  # whatever the type of the value


def _check_entry(name: str, value: Any) -> None:
    """Refuse a text where a switch is meant, such as "False", which is true; warn of misspelt names."""
    if name in _DEFAULTS:
        if name in _SWITCHES:
            words = f"config.{name}: expected True or False, got the text {value!r}"
            if not as_chainer[0]:
                raise TypeError(words)
            warn_user(f"{words} (accepted, as Chainer did)", UsageWarning)
        elif name == "dtype":
            _check_type(value)
        elif name in _CHOICES and value not in _CHOICES[name]:
            raise ValueError(f"config.{name}: expected one of {_CHOICES[name]}, got {value!r}")
    elif not name.startswith("_"):
        known = {entry.replace("_", ""): entry for entry in _DEFAULTS}
        import difflib  # loaded for errors alone

        word = name.rpartition(".")[2]  # of "config.train"
        close = difflib.get_close_matches(word.lower().replace("_", ""), known, 1, 0.75)
        if close and close[0][0] == word[:1].lower():  # as nobody mistypes the first letter
            entry = known[close[0]]
            warn_user(
                f"config.{name}: there is no such entry, so it changes nothing; did you mean {entry!r}?", UsageWarning
            )


def _check_type(value: DTypeLike) -> None:
    """Refuse a type of parameters that has no fractions."""
    dtype = get_dtype(value)
    if dtype.kind in "biuSUOcMm":
        words = f"config.dtype: expected a floating type, got {dtype}"
        if not as_chainer[0]:
            raise TypeError(words)
        warn_user(f"{words} (accepted, as Chainer did)", UsageWarning)


class _Mode(BlockFunction[[], SwitchBlock]):
    """A block without arguments, which may be a decorator as well."""

    def __init__(self, function: Callable[[], SwitchBlock]) -> None:
        super().__init__(function, f"dbrdist.{function.__name__}()")

    def __call__(self, *wrong: Any) -> SwitchBlock:
        if wrong:
            raise TypeError(f"{self.__name__} takes no arguments; write `@dbrdist.{self.__name__}()` as a decorator")
        return self._function()


@_Mode
def no_backprop_mode() -> SwitchBlock:
    """Within the ``with`` block this thread records no graph.

    Example:
        >>> with dbrdist.no_backprop_mode():
        ...     F.sin(dbrdist.Variable(np.ones(1))).requires_grad
        False
    """
    return using_config("enable_backprop", False)


@_Mode
def force_backprop_mode() -> SwitchBlock:
    """Within the ``with`` block this thread records the graph, also inside :func:`no_backprop_mode`.

    Example:
        >>> with dbrdist.no_backprop_mode(), dbrdist.force_backprop_mode():
        ...     F.sin(dbrdist.Variable(np.ones(1))).requires_grad
        True
    """
    return using_config("enable_backprop", True)


def is_debug() -> bool:
    """True if this thread checks for NaN.

    Example:
        >>> dbrdist.is_debug()
        False
    """
    return bool(config.debug)


def get_compute_mode() -> str:
    """The configured mode, None or "cudnn_fast"; memory layouts are chosen without it.

    Example:
        >>> dbrdist.get_compute_mode()
    """
    return config.compute_mode


class DebugMode:
    """Switch the checks for NaN on or off within a ``with`` block, for this thread.

    Args:
        debug: True checks the outputs and gradients of each function.

    Example:
        >>> with dbrdist.DebugMode(True):
        ...     dbrdist.is_debug()
        True
    """

    def __init__(self, debug: bool) -> None:
        self._block = using_config("debug", bool(debug))

    def __enter__(self) -> None:
        self._block.__enter__()

    def __exit__(self, *exc: Raised) -> None:
        self._block.__exit__(*exc)


def set_debug(debug: bool) -> None:
    """Switch the checks for NaN on or off, for this thread.

    Args:
        debug: True checks the outputs and gradients of each function.

    Example:
        >>> dbrdist.set_debug(False)
    """
    config.debug = debug


MIXED = (mixed16, mixedbf16)  # float32 parameters, and 16 bits in between


def get_dtype(dtype: Any | None = None, map_mixed16: DTypeLike | None = None) -> DType:
    """The type that an argument ``dtype`` stands for.

    Args:
        dtype: a type or its name; None is ``config.dtype``.
        map_mixed16: the type for a mixed one; None is that of the 16 bits in which it computes.

    Example:
        >>> dbrdist.get_dtype(), dbrdist.get_dtype("mixed16"), dbrdist.get_dtype("mixed16", np.float32)
        (dtype('float32'), dtype('float16'), dtype('float32'))
    """
    chosen = config.dtype if dtype is None else dtype
    if chosen in MIXED:
        if map_mixed16 is not None:
            return as_dtype(map_mixed16)
        chosen = "float16" if chosen == mixed16 else "bfloat16"
    return as_dtype(chosen)
