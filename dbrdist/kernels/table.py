"""The table of kernels, and the plans that serve their calls.

A kernel is declared once, by a function whose signature and docstring are the kernel's and whose body gives the key of
a call: the kernel's name, then everything that a plan depends on (types, shapes, strides, numbers), and nothing else.
From it comes the public function, which runs the plan that is kept for the key.

A provider is a file with ``ROWS``: for a kernel's name a planner, which takes the kernel's arguments and returns a
plan, a function of the same arguments made for their types, shapes and layouts; where it raises Unsupported, the next
provider is asked (see providers.py). So no call changes who serves another one. Plans belong to one thread, as the
memory objects of native libraries do.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from dbrdist.core.array.backend import places_of
from dbrdist.core.array.config import config
from dbrdist.core.names.moved import loaded
from dbrdist.kernels import providers
from dbrdist.kernels.unsupported import Unsupported

if TYPE_CHECKING:
    from collections.abc import Hashable

    from dbrdist.core.array.types import Array

Plan = Callable[..., Any]
F = TypeVar("F", bound=Callable[..., Any])

_GENERATION = 1024  # plans after which those that were not used since the last time are forgotten

KEYS: dict[str, Callable[..., Any]] = {}  # what makes the key of a call, by the kernel's name
FORMULA = "numpy"  # the provider of what no other one serves
_form = operator.attrgetter("shape", "strides", "dtype")


class ThreadPlans(threading.local):
    """The plans of a thread."""

    def __init__(self) -> None:
        self.plans: dict[Any, Plan] = {}
        self.older: dict[Any, Plan] = {}  # of the generation before
        self.names: dict[int, str] = {}  # of providers, by the id of a plan that is kept

    def find(self, key: Any, arguments: tuple[Any, ...], provider: str | None = None) -> Plan:
        """The plan for ``key`` from the generation before, or a new one, of the given provider where there is one."""
        plan = self.older.get(key)
        if plan is None:
            if provider is None:
                name, plan = providers.choose(key[0], arguments)
            else:
                name, plan = provider, plan_of_provider(provider, key[0], arguments)
            self.names[id(plan)] = name
        self._keep(key, plan)
        return plan

    def compose(self, key: Any, planner: Callable[..., Plan], arguments: tuple[Any, ...]) -> Plan:
        """As :meth:`find`, for what is made of the plans of others."""
        plan = self.older.get(key) or planner(*arguments)
        self._keep(key, plan)
        return plan

    def _keep(self, key: Any, plan: Plan) -> None:
        if len(self.plans) >= _GENERATION:
            self.older, self.plans = self.plans, {}
            kept = {id(plan), *map(id, self.older.values())}
            self.names = {i: name for i, name in self.names.items() if i in kept}
        self.plans[key] = plan


def plan_of_provider(name: str, kernel: str, arguments: tuple[Any, ...]) -> Plan:
    """The plan of the provider that made what the arguments hold, so that no other can take its place."""
    try:
        plan: Plan = providers.PROVIDERS[name][kernel](*arguments)
    except Unsupported as e:
        raise ValueError(f"{kernel}: forward ran on the provider {name!r}, which cannot run backward here: {e}") from e
    return plan


_local = ThreadPlans()


def planned(key: Hashable, arguments: tuple[Any, ...], provider: str | None = None) -> Plan:
    """The plan for a call, of the given provider where there is one."""
    return _local.plans.get(key) or _local.find(key, arguments, provider)


def composed(key: Hashable, planner: Callable[..., Plan], arguments: tuple[Any, ...]) -> Plan:
    """The plan for a call that several kernels serve: what ``planner`` makes of their plans, kept as theirs are.

    ``key`` has all that decides which plans those are.
    """
    return _local.plans.get(key) or _local.compose(key, planner, arguments)


def server_of(plan: Plan) -> str:
    """The name of the provider that made a plan of this thread."""
    return _local.names[id(plan)]


def plan_of(name: str, *arguments: Any) -> Any:
    """The plan of a kernel, or None where none but NumPy's formula serves."""
    plan = planned(KEYS[name](*arguments), arguments)
    return None if server_of(plan) == FORMULA else plan


def forget() -> None:
    """Drop the plans of all threads."""
    global _local
    _local = ThreadPlans()


os.register_at_fork(after_in_child=forget)


def lies(*arrays: Array | None) -> tuple[Any, ...]:
    """Shape, strides and dtype of each array: a part of a call's key."""
    if type(None) not in map(type, arrays):
        return tuple(map(_form, arrays))
    return tuple([None if a is None else (a.shape, a.strides, a.dtype) for a in arrays])


def switches(*arrays: Array | None) -> tuple[Any, ...]:
    """Where arrays are, and the settings that plans of cuDNN depend on: a part of a call's key."""
    return places_of(*arrays), config.use_cudnn, config.use_cudnn_tensor_core, config.cudnn_deterministic


def key_of(name: str, is_light: bool = False) -> Callable[[F], F]:
    """Declare the kernel ``name`` by what makes the key of a call; its public function is written out.

    ``is_light``: NumPy's own code is not much slower, so that a missing library is not worth a warning.
    """

    def declare(key: F) -> F:
        KEYS[name] = key
        if is_light:
            providers.light.add(name)
        return key

    return declare


def kernel(is_light: bool = False) -> Callable[[F], F]:
    """Declare a kernel: ``@kernel() def name(...)``, whose body gives the key, becomes the public function.

    The function is made from the signature, since a closure over any arguments would cost 105 ns a call.
    """

    def declare(key: F) -> F:
        name = key.__name__.lstrip("_")
        key_of(name, is_light)(key)
        names = key.__code__.co_varnames[: key.__code__.co_argcount]
        code = _code_for(len(names)).replace(co_name=key.__name__, co_varnames=(*names, "key", "local", "plan"))
        scope = {"make_key": key, "table": globals()}
        made: Any = FunctionType(code, scope, key.__name__, key.__defaults__)
        return functools.update_wrapper(made, key)

    return declare


@functools.cache
def _code_for(num_parameters: int) -> CodeType:
    """The code of a public function with so many parameters; compiling it for each kernel took 2 ms of each import."""
    scope: dict[str, Any] = {}
    exec(_SOURCE.format(arguments=", ".join(f"a{i}" for i in range(num_parameters))), scope)
    code: CodeType = scope["function"].__code__
    return code


_SOURCE = """
def function({arguments}):
    key = make_key({arguments})
    local = table["_local"]
    plan = local.plans.get(key) or local.find(key, ({arguments},))
    return plan({arguments})
"""


@contextlib.contextmanager
def use(*names: str) -> Iterator[None]:
    """Let the providers ``names`` serve all threads where they can, and NumPy the rest, for comparisons."""
    before = providers.take_only(frozenset(names))
    forget()
    try:
        yield
    finally:
        providers.take_only(before)
        forget()


def provider_of(kernel: str, *arguments: Any) -> str:
    """Name of the provider that serves ``kernel``, such as ``'conv_forward'``, for exactly these arguments."""
    if kernel not in KEYS:
        loaded("dbrdist.kernels.device_dispatch")  # with fused_dispatch, what is declared for devices alone
        loaded("dbrdist.kernels.fused_dispatch")
    return server_of(planned(KEYS[kernel](*arguments), arguments))


def public_names(module: ModuleType) -> dict[str, Any]:
    """The functions that a module defines, but for those with an underscore."""
    own = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    return {name: value for name, value in own.items() if not name.startswith("_")}
