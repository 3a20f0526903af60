"""The import paths of Chainer, ChainerMN and ChainerX, each served by the module of ours that has its names."""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.abc import Loader, MetaPathFinder
from multiprocessing import spawn
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy

from dbrdist import functions
from dbrdist.compat import absent, names, node_arguments, nodes
from dbrdist.core.array.chainer_mode import as_chainer, labels
from dbrdist.core.array.config import global_config
from dbrdist.core.array.types import Module
from dbrdist.core.names import missing_names

_PACKAGES = ("chainer", "chainermn", "chainerx")
_LAST = {"chainer": "dbrdist", "chainermn": "dbrdist.comm", "chainerx": "dbrdist.compat.chainerx"}
# Where names of a path are besides its own module.
_ALSO = {
    "chainer.backend": "dbrdist.compat.backend",
    "chainer.dataset.convert": "dbrdist.datasets.loading.transfer",
    "chainer.link": "dbrdist",
    "chainer.optimizer": "dbrdist.optimizer_hooks",
    "chainer.variable": "dbrdist",
}
# Names that do something else under Chainer's paths than natively, and where they are.
_INSTEAD = {
    ("chainer", "backward"): "dbrdist.compat.backprop",
    ("chainer.iterators", "MultiprocessIterator"): "dbrdist.compat.iterators",
    ("chainer.iterators.multiprocess_iterator", "MultiprocessIterator"): "dbrdist.compat.iterators",
    ("chainermn.functions", "pseudo_connect"): "dbrdist.compat.communication",
    ("chainermn.functions.pseudo_connect", "pseudo_connect"): "dbrdist.compat.communication",
    ("chainer.links.connection.parameter", "Parameter"): "dbrdist.links",  # not the parameters of links
    ("chainer.serializers.npz", "serialize"): "dbrdist.compat.functions",
    ("chainer.training.extensions", "LogReport"): "dbrdist.compat.extensions",
    ("chainer.training.extensions.log_report", "LogReport"): "dbrdist.compat.extensions",
}
_INSTEAD |= {
    (path, name): "dbrdist.compat.functions"
    for name, module in (
        ("batch_matmul", "math.matmul"),
        ("fixed_batch_renormalization", "normalization.batch_renormalization"),
        ("maximum", "math.maximum"),
        ("minimum", "math.minimum"),
    )
    for path in ("chainer.functions", f"chainer.functions.{module}")
}
# What programs set in a module of Chainer, and a module of ours reads.
_SWITCHES = {("chainer", "disable_experimental_feature_warning")}
# Where a path leads to another place than the one that its own name tells.
_MOVED = {
    "chainer.cuda": "dbrdist.backends.cuda",
    "chainer._backend": "dbrdist.backend",
    "chainer.backends._cpu": "dbrdist.backend",
    "chainer.training._updater": "dbrdist.training",
    "chainer.backends.intel64": "dbrdist.compat.intel64",
    "chainer.configuration": "dbrdist.core.array.config",
    "chainer.dataset.convert": "dbrdist.datasets.loading.convert",
    "chainer.dataset.tabular": "dbrdist.datasets.table.tabular",
    "chainer.initializer": "dbrdist.initializers",
    "chainer.device_resident": "dbrdist.core.model.device_resident",
    "chainer.graph_optimizations.static_graph": "dbrdist.core.chainer.static_graph",
    "chainer.graph_optimizations.static_graph_utilities": "dbrdist.core.chainer.static_graph",
    "chainer.sequential": "dbrdist.core.model.chain",
    "chainer.serializer": "dbrdist.serializers",
    "chainermn.communicators": "dbrdist.comm",
}
# Private names that Chainer's own test cases call, of which projects carry copies.
_CALLED_BY_COPIES = {
    ("chainer.gradient_check", "_check_backward_with_params"): "check_backward_with_params",
}


@functools.cache
def paths() -> frozenset[str]:
    """Every module of Chainer 7.8.1, its ChainerMN, and ChainerX itself."""
    text = Path(__file__).with_name("modules.txt").read_text(encoding="utf-8")
    return frozenset(text.split())


def _ours(path: str) -> ModuleType | None:
    """The module of ours that stands for a path, or None."""
    package, dot, rest = path.partition(".")
    name = _MOVED.get(path) or _LAST[package] + dot + rest
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name + ".").startswith(error.name + "."):
            raise  # ours is there, but something that it needs is not
        return None


def _rooms(path: str) -> Iterator[ModuleType]:
    """Where the names of a path may be: its own module, then those around it; the root for the first floor alone."""
    parts = path.split(".")
    for n in range(len(parts), min(len(parts), 2) - 1, -1):
        module = _ours(".".join(parts[:n]))
        if module is not None:
            yield module
    if path in _ALSO:
        yield importlib.import_module(_ALSO[path])
    if len(parts) == 2 or parts[0] == "chainermn":
        yield importlib.import_module(_LAST[parts[0]])


def _is_over_a_module(path: str, name: str) -> bool:
    """Whether a package of Chainer has a function of the name of one of its modules, which hides the module."""
    return name in missing_names.chainer_names().get(path, ()) or (path, name) == (
        "chainer.dataset.tabular",
        "from_data",
    )


def _is_there(module: ModuleType, name: str) -> bool:
    try:
        getattr(module, name)
    except (AttributeError, ImportError):
        return False
    return True


def _is_for_star(path: str, name: str) -> bool:
    """Unless our module's own name would hide a module of Python's, or a builtin, where Chainer's has no such name."""
    if name not in sys.stdlib_module_names and not hasattr(builtins, name):
        return True
    return f"{path}.{name}" in paths() or name in missing_names.chainer_names().get(path, ())


def _imported(path: str, name: str) -> Module | Alias | None:
    """A module that Chainer's module imports, and programs take from there: ``from chainer.backend import cuda``."""
    if not path.startswith("chainer.") or any(other.startswith(path + ".") for other in paths()):  # a package has none
        return None
    if name == "numpy":
        return numpy
    for room in ("chainer", "chainer.backends", "chainer.utils"):
        if f"{room}.{name}" in paths() and f"{room}.{name}" != path:
            return importlib.import_module(f"{room}.{name}")
    return None


def _public(found: Any) -> Any:
    """The function of ``dbrdist.functions`` that stands before ``found`` to explain its errors, else ``found``."""
    shown = getattr(functions, found.__name__, None) if isinstance(found, FunctionType) else None
    return shown if getattr(shown, "__wrapped__", None) is found else found


class Alias(ModuleType):
    """A module of Chainer whose names are looked up in ours when they are first used."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Alias) and _is_over_a_module(self.__name__, name):  # set by the import of a module
            return
        super().__setattr__(name, value)
        self._hand_down(name, value)
        if (self.__name__, name) in _SWITCHES:
            setattr(importlib.import_module(_LAST[self.__name__]), name, value)

    def _hand_down(self, name: str, value: Any) -> None:
        """Where a program replaces a function deep inside Chainer, ours is replaced for those who call it, too."""
        if self.__name__.count(".") < 2 or not callable(value) or isinstance(value, type):
            return
        for room in _rooms(self.__name__):
            own = getattr(room, name) if name in dir(room) else None  # also where its file is loaded later
            if callable(own):
                _replaced.setdefault((room, name), own)
                setattr(room, name, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        for room in _rooms(self.__name__):
            if (room, name) in _replaced:
                setattr(room, name, _replaced.pop((room, name)))

    def __getattr__(self, name: str) -> Any:
        path = self.__name__
        if f"{path}.{name}" in paths() and not _is_over_a_module(path, name):
            return importlib.import_module(f"{path}.{name}")
        if name == "__all__":  # of `from chainer.links import *`
            return [n for n in self.__dir__() if not n.startswith("_") and _is_for_star(path, n) and _is_there(self, n)]
        if name.startswith("__"):  # asked for by Python itself
            raise AttributeError(f"module {path!r} has no attribute {name!r}")
        name = _CALLED_BY_COPIES.get((path, name), name)
        instead = _INSTEAD.get((path, name))
        rooms = _rooms(path) if instead is None else iter([importlib.import_module(instead)])
        for room in rooms:
            try:
                found = getattr(room, name)
            except (AttributeError, ImportError):
                continue
            self.__dict__[name] = found = _public(found)
            return found
        other = nodes.find(path, name) or names.find(path, name) or _imported(path, name)
        if other is not None:
            self.__dict__[name] = other
            return other
        raise missing_names.absent(path, name, self.__dir__(), reason=absent.reason(path, name))

    def __dir__(self) -> list[str]:
        children = {p.rpartition(".")[2] for p in paths() if p.rpartition(".")[0] == self.__name__}
        room = next(_rooms(self.__name__), None)
        return sorted(children.union(self.__dict__, (n for n in dir(room) if not n.startswith("_"))))


class _Loader(Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Alias(spec.name, f"{spec.name}, served by dbrdist (dbrdist.compat).")

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in _PACKAGES:
            module.__dict__["__version__"] = "7.8.1"  # what scripts compare with


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in _PACKAGES:
            return None
        if fullname not in paths():
            raise missing_names.no_module(fullname, paths())
        return importlib.machinery.ModuleSpec(fullname, _Loader(), is_package=True)


class _InstalledFirst:
    """Travels to a spawned process and serves the names there before it imports the program again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _install_spawned, tuple(_also_spawned)


_also_spawned: list[Callable[[], None]] = []


def call_here_and_in_spawned(*functions: Callable[[], None]) -> None:
    """Call functions of modules, in this process and in those that it spawns, before they import the program."""
    for function in functions:
        function()
    _also_spawned.extend(f for f in functions if f not in _also_spawned)


def _install_spawned(*functions: Callable[[], None]) -> None:
    install()
    call_here_and_in_spawned(*functions)


_finder = _Finder()
_replaced: dict[tuple[ModuleType, str], Any] = {}  # functions of ours that a program replaced, as they were
_prepare_spawned = spawn.get_preparation_data


def _prepare_spawned_with_names(name: str) -> dict[str, Any]:
    return {"dbrdist.compat": _InstalledFirst(), **_prepare_spawned(name)}


def install() -> None:
    """Serve ``import chainer`` and ``import chainermn`` from now on, in this process and in those that it spawns.

    An installed Chainer is passed over, with a warning; one that was imported before is an error (RuntimeError).
    """
    if _finder in sys.meta_path:
        return
    for package in _PACKAGES:
        if package in sys.modules:
            where = getattr(sys.modules[package], "__file__", None)
            raise RuntimeError(
                f"{package} was imported already, from {where}; call dbrdist.compat.install() before the first "
                f"`import {package}`"
            )
    installed = importlib.util.find_spec("chainer")
    if installed is not None:
        warnings.warn(
            f"dbrdist.compat serves `import chainer`; the Chainer installed in {installed.origin} is not used",
            stacklevel=2,
        )
    sys.meta_path.insert(0, _finder)
    global_config.stale_parameters = "warn"  # Chainer computes with whatever values parameters have
    as_chainer[0] = True
    labels.update(nodes.chainer_labels())
    node_arguments.serve()
    absent.serve()
    spawn.get_preparation_data = _prepare_spawned_with_names  # type: ignore[assignment]
    with contextlib.suppress(ImportError):  # Chainer imports it, so that programs may say `import PIL; PIL.Image.open`
        importlib.import_module("PIL.Image")


def uninstall() -> None:
    """Take the names away again, also from ``sys.modules``."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
        global_config.stale_parameters = "refuse"
        as_chainer[0] = False
        labels.clear()
        node_arguments.withdraw()
        absent.withdraw()
        for (room, name), value in _replaced.items():
            setattr(room, name, value)
        _replaced.clear()
        spawn.get_preparation_data = _prepare_spawned
        for name in [name for name, module in sys.modules.items() if isinstance(module, Alias)]:
            del sys.modules[name]
