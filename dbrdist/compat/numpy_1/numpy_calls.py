"""What programs of NumPy 1's time do with arrays and NumPy 2 refuses, for those programs alone.

The source of such a program is changed as it is compiled: expressions that NumPy 2 may refuse go through a function of
this file, which tries them as they are and does what NumPy 1.23 did only where they fail. Line numbers stay.

- an array of one element is a number: ``int(a)``, ``float(a)``, ``math.sqrt(a)``, ``"%d" % a``, ``b[0] = a``;
- ``np.array`` of sequences of different lengths is an array of objects, also inside ``np.random.permutation``;
- ``float32 array * numpy.float64 scalar`` stays in float32, see :mod:`numpy_types`;
- ``np.array(a, copy=False)`` copies where it must; ``np.fromstring`` reads bytes; ``a.tostring()``, ``a.itemset()``,
  ``a.ptp()`` and ``a.newbyteorder()`` are there;
- StopIteration within a generator ends it, as before Python 3.7.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dbrdist.compat.numpy_1.numpy_types import FUNCTIONS, OPERATORS, of_two, operate
from dbrdist.core.array.types import Array

_PREFIX = "_dbrdist_compat_"
_NUMBER_NAMES = ("int", "float", "complex", "round")
_SEQUENCE_CALLS = ("array", "asarray", "asanyarray", "permutation", "choice", "fromstring")
_METHODS: dict[str, Callable[..., Any]] = {
    "itemset": lambda a, *args: a.__setitem__(args[0] if len(args) > 1 else (0,) * a.ndim, args[-1]),
    "newbyteorder": lambda a, *args: a.view(a.dtype.newbyteorder(*args)),
    "ptp": lambda a, *args, **kwds: np.ptp(a, *args, **kwds),
    "tostring": lambda a, *args: a.tobytes(*args),
}


# ---- what the changed expressions call ------------------------------------------------------------------------------


def _scalar(x: Array | str | Sequence[int]) -> Any:
    """An array of one element as a number, and anything else as it is."""
    return x.reshape(-1)[0] if isinstance(x, np.ndarray) and x.ndim and x.size == 1 else x


def number(function: Callable[..., Any], *args: Any, **kwds: Any) -> Any:
    """``function(*args)`` for ``int``, ``float`` and functions of ``math``."""
    try:
        return function(*args, **kwds)
    except TypeError:
        scalars = [_scalar(a) for a in args]
        if all(a is b for a, b in zip(args, scalars)):
            raise
        return function(*scalars, **kwds)


def text(template: str, values: Any) -> str:
    """``template % values``."""
    try:
        return template % values
    except TypeError:
        scalars = tuple(_scalar(v) for v in values) if isinstance(values, tuple) else _scalar(values)
        return template % scalars


def put(value: Any, a: Any, index: Any) -> None:
    """``a[index] = value``."""
    try:
        a[index] = value
    except ValueError:
        scalar = _scalar(value)
        if not isinstance(a, np.ndarray) or scalar is value:
            raise
        a[index] = scalar


def sequences(function: Callable[..., Any], *args: Any, **kwds: Any) -> Any:
    """``function(*args)`` for NumPy's functions that make an array of their first argument."""
    try:
        return function(*args, **kwds)
    except ValueError as error:
        again = _as_numpy_1(function, str(error), args, kwds)
        if again is None:
            raise
        return again()


def _as_numpy_1(function: Any, error: str, args: Any, kwds: dict[str, Any]) -> Callable[[], Any] | None:
    """The call that NumPy 1.23 would have made, or None."""
    if function is np.fromstring and "frombuffer" in error:
        return lambda: np.frombuffer(*args, **{k: v for k, v in kwds.items() if k != "sep"}).copy()
    if function is np.array and kwds.get("copy") is False:
        return lambda: np.array(*args, **{**kwds, "copy": None})
    module = getattr(function, "__module__", None) or type(getattr(function, "__self__", None)).__module__
    if "inhomogeneous" not in error or not str(module).startswith("numpy"):
        return None
    if function in (np.array, np.asarray, np.asanyarray):
        if len(args) > 1 or kwds.get("dtype") is not None:
            return None
        _warn_of_objects()
        return lambda: function(*args, **{**kwds, "dtype": object})
    _warn_of_objects()
    return lambda: function(np.array(args[0], dtype=object), *args[1:], **kwds)


def _warn_of_objects() -> None:
    warnings.warn(
        "sequences of different lengths become an array of objects, as in NumPy 1.23; NumPy 2 refuses them, so give "
        "dtype=object",
        UserWarning,
        stacklevel=4,
    )


def method(a: Any, name: str) -> Callable[..., Any]:
    """The method ``a.name`` that NumPy 2 removed from arrays."""
    if isinstance(a, (np.ndarray, np.generic)) and not hasattr(a, name):
        return lambda *args, **kwds: _METHODS[name](a, *args, **kwds)
    return getattr(a, name)  # type: ignore[no-any-return]


HELPERS = {_PREFIX + f.__name__: f for f in (number, text, put, sequences, method, of_two, operate)}


# ---- the change -----------------------------------------------------------------------------------------------------


class _Change(ast.NodeTransformer):
    """Expressions that NumPy 2 may refuse become calls of the helpers."""

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        function = node.func
        helper = None
        if isinstance(function, ast.Name) and function.id in _NUMBER_NAMES and node.args:
            helper = number
        elif isinstance(function, ast.Attribute):
            if isinstance(function.value, ast.Name) and function.value.id == "math":
                helper = number
            elif function.attr in _SEQUENCE_CALLS:
                helper = sequences
            elif function.attr in FUNCTIONS and _is_numpy(function.value):
                helper = of_two
            elif function.attr in _METHODS:
                node.func = _call(method, [function.value, ast.Constant(function.attr)], function)
        if helper is None:
            return node
        return _call(helper, [function, *node.args], node, node.keywords)

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        is_template = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
        if is_template and isinstance(node.op, ast.Mod):
            return _call(text, [node.left, node.right], node)
        name = type(node.op).__name__
        if name not in OPERATORS or _is_plain(node.left) or _is_plain(node.right):
            return node
        return _call(operate, [ast.Constant(name), node.left, node.right], node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        self.generic_visit(node)
        target = node.targets[0]
        if len(node.targets) > 1 or not isinstance(target, ast.Subscript) or isinstance(node.value, ast.Constant):
            return node
        if any(isinstance(part, (ast.Slice, ast.Starred)) for part in ast.walk(target.slice)):
            return node
        return ast.copy_location(ast.Expr(_call(put, [node.value, target.value, target.slice], node)), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        self.generic_visit(node)
        if _yields(node) and not _is_context(node):  # before Python 3.7, StopIteration within a generator ended it
            handler = ast.ExceptHandler(ast.Name("StopIteration", ast.Load()), None, [ast.Return(None)])
            first = int(ast.get_docstring(node) is not None)
            body = ast.Try(node.body[first:], [handler], [], [])
            node.body[first:] = [ast.copy_location(body, node.body[first])]
        return node


def _yields(node: ast.FunctionDef) -> bool:
    """Whether a function is a generator, leaving out the functions within it."""
    parts: list[ast.AST] = list(node.body)
    while parts:
        part = parts.pop()
        if isinstance(part, (ast.Yield, ast.YieldFrom)):
            return True
        if not isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            parts.extend(ast.iter_child_nodes(part))
    return False


def _is_context(node: ast.FunctionDef) -> bool:
    """Whether a generator is a context manager, into which a ``with`` throws StopIteration, and gets it back."""
    names = [str(getattr(d, "attr", getattr(d, "id", ""))) for d in node.decorator_list]
    return any(name.endswith("contextmanager") for name in names)


def _is_numpy(node: ast.expr) -> bool:
    """Whether this is NumPy by its usual names: ``np``, ``numpy``, ``xp``, ``self.xp``."""
    return getattr(node, "id", None) in ("np", "numpy", "xp") or getattr(node, "attr", None) == "xp"


def _is_plain(node: ast.expr) -> bool:
    """Whether NumPy 1 and 2 agree on any result with this operand: floats, small numbers, texts, lists."""
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and isinstance(getattr(node.operand, "value", None), float)
    if isinstance(node, ast.Constant):
        return type(node.value) is not int or 0 <= node.value < 128
    return isinstance(node, (ast.JoinedStr, ast.List, ast.ListComp, ast.Tuple))


def _call(helper: Callable[..., Any], args: list[Any], at: ast.AST, keywords: Any = ()) -> Any:
    """A call of a helper, at the place of the expression that it replaces."""
    for a in args:
        if isinstance(a, (ast.Attribute, ast.Name, ast.Subscript)):
            a.ctx = ast.Load()
    call = ast.Call(ast.Name(_PREFIX + helper.__name__, ast.Load()), args, list(keywords))
    return ast.copy_location(call, at)


def compiled(source: bytes | str, path: str) -> Any:
    """The code of a program's file, changed as this module says."""
    tree = ast.parse(source, path)
    return compile(ast.fix_missing_locations(_Change().visit(tree)), path, "exec", dont_inherit=True)
