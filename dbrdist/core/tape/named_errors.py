"""Public functions run on the device of their arrays, and their errors name them and what they were given.

Most checks of a function say so themselves (``core.checks``). This is for what they leave over: a list or None where an
array belongs, shapes that NumPy cannot broadcast, an axis without elements. It costs nothing until something fails.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import TYPE_CHECKING

from dbrdist.core.array.current_device import On, elsewhere_in
from dbrdist.core.tape.checks import ArgumentError, OperandTypeError, describe
from dbrdist.core.usage.foreign_names import UnknownArgumentError, explained_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import ParamSpec, TypeVar

    from dbrdist.core.model.link import Link

    P = ParamSpec("P")
    R = TypeVar("R")

_RAISED = (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError)
_CONVERT = "convert it first"
_modules = sys.modules
_OURS = ("dbrdist", "numpy", "scipy", "cupy", "ml_dtypes")


def naming_errors(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, whose errors name it and its arguments."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if "cupy" in _modules:  # what a function does besides calls of the tape runs where its arrays are, too
                number = elsewhere_in((*args, *kwargs.values()))
                if number is not None:
                    with On(number):
                        return function(*args, **kwargs)
            return function(*args, **kwargs)
        except _RAISED as error:
            better = _named_error(call, args, kwargs, error)
            if better is None:
                raise
            raise better from error

    return call


def _named_error(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], error: Exception
) -> Exception | None:
    """A better error for ``error``; None where it already says it, after a word was put in front, or where it was
    raised by somebody else's code."""
    name = function.__name__
    if isinstance(error, ArgumentError) and error.argument is not None:
        if error.function != name and not error.function.startswith(f"{name}: ") and not error.links:
            error.function = f"{name}: {error.function}"
        if error.hint == _CONVERT and not error.links:
            error.hint = _layer_of(name, args, kwargs) or error.hint
        return None
    if str(error).startswith(f"{name}: ") or not _is_ours(error):
        return None
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:  # wrong arguments: Python names the function
        if not isinstance(error, TypeError):
            return None
        words = explained_arguments(name, function, error, kwargs, True)
        return _explained_count(function, args, kwargs, error) if words is None else UnknownArgumentError(words)
    for argument, x in _operands(function, given):
        what = _why_no_operand(x, error)
        if what:
            return OperandTypeError(name, argument, what, _seen(x), _layer_of(name, args, kwargs) or _CONVERT)
    got = f"got {', '.join(f'{k}: {_seen(x)}' for k, x in given.items())}"
    kind = _public_kind(error)
    if kind not in _RAISED:  # such as AxisError or FloatingPointError: whoever catches them still does
        error.add_note(f"{name}: {got}")
        return None
    words = str(error.args[0]) if len(error.args) == 1 else str(error)
    if kind is ValueError:  # most often shapes that do not go together, for which Chainer has a class of its own
        kind = ArgumentError
    return kind(f"{name}: {words}; {got}")


def _layer_of(name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> str:
    """What was meant where a setting is in the place of the input, as in ``Sequential(F.dropout(0.5))``."""
    is_setting = len(args) == 1 and type(args[0]) in (int, float) and not kwargs
    return f"as a layer pass lambda x: F.{name}(x, {args[0]})" if is_setting else ""


def _explained_count(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], error: TypeError
) -> TypeError | None:
    """A better error for arguments that are too few or too many: a layer that is called too early, or loose axes."""
    name, parameters = function.__name__, list(inspect.signature(function).parameters.values())
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    has_input = any(hasattr(x, "shape") or isinstance(x, (list, tuple)) for x in (*args, *kwargs.values()))
    if has_input:
        takes = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        last = takes[-1] if takes else ""
        if last in ("shape", "axes", "reps") and len(args) > len(takes):
            numbers = ", ".join(str(x) for x in args[len(takes) - 1 :])
            return TypeError(f"{error}; write {name}({', '.join(takes[:-1])}, ({numbers}))")
        return None
    if not needed or needed[0] in kwargs or len(args) >= len(needed):
        return None
    given = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())])
    layer = f"lambda x: F.{name}(x, {given})" if given else f"the function itself, F.{name}"
    return TypeError(f"{error}; as a layer of Sequential, or as an activation, pass {layer}")


def explain_operand(link: Link, error: AttributeError, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """Raise a better error where a link of ours failed because an input was no array; else do nothing."""
    try:
        given = inspect.signature(link.forward).bind(*args, **kwargs).arguments
    except TypeError:
        return
    for argument, x in _operands(link.forward, given):
        if error.obj is x and not hasattr(x, "dtype"):
            better = OperandTypeError(type(link).__name__, argument, "an array or Variable", _seen(x), _CONVERT)
            better.within(link)
            raise better from error


def no_forward(link: Link) -> TypeError:
    """The error where a link defines no forward, with what it may have defined instead."""
    import difflib  # loaded for errors alone

    classes = [cls for cls in type(link).__mro__ if not cls.__module__.startswith(("dbrdist.", "builtins"))]
    own = [name for cls in classes for name in vars(cls)]
    close = [name for name in own if difflib.SequenceMatcher(None, name.lower(), "forward").ratio() > 0.75]
    close += [name for name in own if name.strip("_").endswith("call") or name == "predict"]
    hint = f"; it defines {close[0]}()" if close else ""
    return TypeError(f"{type(link).__name__} defines no forward(), so it cannot be called{hint}")


def _public_kind(error: Exception) -> type[Exception]:
    """The type that a program can name: NumPy's errors of its ufuncs have private ones."""
    if isinstance(error, ArgumentError):
        return ValueError
    return next(k for k in type(error).__mro__ if "._" not in k.__module__)


def _is_ours(error: Exception) -> bool:
    """Whether a module of ours, or one that computes for us, raised ``error``: not a callable of the user's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] in _OURS


def _operands(function: Callable[..., object], given: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """The arguments that have no default value, and the elements of those that are lists of arrays."""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in given or parameter.kind is parameter.VAR_KEYWORD:
            continue
        x = given[parameter.name]
        if parameter.default is parameter.empty:
            yield parameter.name, x
        if isinstance(x, (list, tuple)):
            yield from ((f"{parameter.name}[{i}]", one) for i, one in enumerate(x))


def _why_no_operand(x: object, error: Exception) -> str:
    """What was expected in the place of ``x`` if it is at fault for ``error``; otherwise nothing."""
    if x is None or (not hasattr(x, "strides") and not hasattr(x, "grad") and _misses_an_array(x, error)):
        return "an array or Variable"
    dtype = getattr(x, "dtype", None)
    if dtype is not None and getattr(dtype, "kind", "f") in "USOMm":
        return "an array of numbers"
    return ""


def _misses_an_array(x: object, error: Exception) -> bool:
    """Whether ``error`` says that ``x`` is not the array that it should be."""
    if isinstance(error, AttributeError):
        return error.obj is x
    return isinstance(error, TypeError) and str(error).startswith("expected an array of")


def _seen(x: object) -> str:
    """An argument as an error shows it: shape and type of an array, a short form of anything else."""
    if isinstance(x, type):
        return x.__name__
    if isinstance(x, (list, tuple)) and any(hasattr(one, "dtype") for one in x):
        return f"[{', '.join(_seen(one) for one in x[:4])}{', ...' if len(x) > 4 else ''}]"
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return describe(x)
    return f"{type(x).__name__} {x!r:.40}"
