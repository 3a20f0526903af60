"""What an optimizer checks of its target and of its loss: the mistakes that would let it train nothing, silently."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.core.array import random
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.model.flat import unique
from dbrdist.core.model.link import Link
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.tape.variable import Variable
from dbrdist.core.update.hyperparameter import has_entry
from dbrdist.core.update.update_rule import UpdateRule
from dbrdist.core.usage.mistakes import given_a_class, refuse, warn
from dbrdist.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dbrdist.core.files.serializer import AbstractSerializer
    from dbrdist.core.update.optimizer import GradientMethod


def saved_state(serializer: AbstractSerializer, target: Link, name: str) -> AbstractSerializer:
    """Where the state of a parameter is saved; loading, under its former path in a file of a version that had that.

    A link says which of its paths have changed: ``former_paths = {"/new": "/old"}``.
    """
    part = serializer[name]
    if getattr(serializer, "is_loading", True) and not has_entry(part, "t"):
        for path, link in target.namedlinks():
            for new, old in getattr(link, "former_paths", {}).items():
                if name == path.rstrip("/") + new:
                    return serializer[path.rstrip("/") + old]
    return part


def check_target(optimizer: str, link: object) -> None:
    """Refuse what is no link as a target."""
    where = f"{optimizer}.setup"
    if isinstance(link, type):
        raise given_a_class(where, link, "a Link")
    if not isinstance(link, Link):
        hint = ""
        if inspect.isgenerator(link) or isinstance(link, (list, tuple)):
            hint = "; the optimizer takes the network itself: setup(model)"
        raise TypeError(f"{where}: optimization target must be a link, got {type(link).__name__}{hint}")


def _warn_of_numpys_seed(optimizer: str) -> None:
    """Warn where ``numpy.random.seed`` was called, nothing was drawn since, and dbrdist was given no seed."""
    if random.is_seeded() or as_chainer[0] or "numpy.random" not in sys.modules:
        return
    state = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937" or state["state"]["pos"] != len(state["state"]["key"]):
        return
    key = state["state"]["key"]
    seeded = np.random.RandomState(int(key[0])).get_state(legacy=False)
    if np.array_equal(seeded["state"]["key"], key):
        warn(
            f"{optimizer}.setup: numpy.random.seed has no effect on dbrdist, whose initial weights, orders of examples "
            "and dropout are those of seed 0; write dbrdist.random.set_seed(n)"
        )


# ---- parameters -----------------------------------------------------------------------------------------------------


def parameters_of(where: str, link: Link) -> list[Parameter]:
    """The parameters of a link, each once; refused where something else was assigned to the attribute of one."""
    for path, owner in link.namedlinks():
        for name in owner._params:
            value = owner.__dict__.get(name)
            if not isinstance(value, Parameter):
                raise TypeError(
                    f"{where}: {path.rstrip('/')}/{name} is a parameter, and was replaced by an object of type "
                    f"{type(value).__name__}; link.{name}.array = ... gives values, link.{name} = None leaves it out"
                )
    return unique(link.params())


def check_parameters(optimizer: str, link: Link, params: Sequence[Parameter]) -> None:
    """Refuse a target without parameters, and warn of links and parameters in it that are not registered."""
    _warn_of_numpys_seed(optimizer)
    known = set(params)
    unregistered = [found for owner in link.links() for found in _unregistered(owner, known)]
    words = f"{', '.join(unregistered[:5])}{', ...' if len(unregistered) > 5 else ''}"
    how = (
        "assign links and parameters inside `with self.init_scope():`, and put several links into a ChainList or "
        "Sequential"
    )
    if not params:
        is_ours = type(link).__module__.startswith("dbrdist.")
        what = "parameters" if is_ours and not unregistered else "registered parameters"
        found = f"; not registered: {words}" if words else ""
        refuse(ValueError(
            f"{optimizer}.setup: {type(link).__name__} has no {what}, so there is nothing to train{found}; {how}"
        ))  # fmt: skip
    elif unregistered:
        warn(
            f"{optimizer}.setup: {words} will not be trained, moved or saved: not registered; {how}; where that is "
            "meant, call disable_update() of that link before setup"
        )


_MOST_LOOKED_AT = 10_000  # values of one attribute


def _unregistered(owner: Link, known: set[Parameter]) -> Iterator[str]:
    """The attributes of a link, such as ``Net.fc (Linear)``, with parameters that are not those of the target."""
    for name, value in owner.__dict__.items():
        if name.startswith("_") and name in ("_list", "_layers", "_cleared", "_hooks"):
            continue
        kinds = [type(x).__name__ for x in _parts(value) if _is_forgotten(x, known) and not _is_above(x, owner)]
        if kinds:
            what = kinds[0] if isinstance(value, (Link, Parameter)) else f"a {type(value).__name__} with {kinds[0]}"
            yield f"{type(owner).__name__}.{name} ({what})"


def _parts(value: object) -> Iterator[Link | Parameter]:
    """The links and parameters in a value of an attribute, and in its lists and dictionaries, three deep.

    What a program keeps in lists may be millions of numbers, so that no more than `_MOST_LOOKED_AT` are looked at.
    """
    waiting, num_seen = [(value, 3)], 0
    while waiting and num_seen < _MOST_LOOKED_AT:
        found, depth = waiting.pop()
        num_seen += 1
        if isinstance(found, (Link, Parameter)):
            yield found
        elif isinstance(found, dict):
            found = list(found.values())
        if depth and isinstance(found, (list, tuple, set, frozenset)) and len(found) <= 1000:
            waiting += [(x, depth - 1) for x in reversed(list(found))]


def _is_forgotten(x: Link | Parameter, known: set[Parameter]) -> bool:
    """Whether it has parameters that nobody trains: not the target's, not frozen, and without another optimizer."""
    params = [x] if isinstance(x, Parameter) else list(x.params())
    return any(
        p not in known and not p.is_frozen and p.update_rule is None and not _is_in_memory_of(p, known) for p in params
    )


def _is_above(x: Link | Parameter, owner: Link) -> bool:
    """Whether it is a network that has the owner as a part, to which that only refers."""
    return isinstance(x, Link) and any(link is owner for link in x.links())


def _is_in_memory_of(p: Parameter, known: set[Parameter]) -> bool:
    """Whether a parameter shares the memory of one of the target's, and so is trained with it."""
    return isinstance(p.lend(), np.ndarray) and any(
        isinstance(q.lend(), np.ndarray) and np.may_share_memory(p.lend(), q.lend()) for q in known
    )


def has_foreign_parts(optimizer: GradientMethod) -> bool:
    """Whether a rule or a hook of an optimizer is the user's, who may give it any hyperparameters."""
    rules = [p.update_rule for p in optimizer.target.params() if isinstance(p.update_rule, UpdateRule)]
    hooks = [optimizer.hooks, *(rule._hooks for rule in rules if rule._hooks is not None)]
    parts = [*rules, *(hook for some in hooks for hook in (*some.pre.values(), *some.post.values()))]
    return any(not str(type(part).__module__).startswith("dbrdist.") for part in parts)


_MANY_LOST = 3
_num_lost: weakref.WeakKeyDictionary[Parameter, tuple[str, int]] = weakref.WeakKeyDictionary()  # by which optimizer


def warn_of_lost_states(optimizer: str, params: Sequence[Parameter]) -> None:
    """Warn once where several setups in a row each discard a state, such as momentum, after a single update.

    Those of one kind of optimizer count: a program may try several kinds with one network.
    """
    rule = params[0].update_rule if params else None
    if not isinstance(rule, UpdateRule) or rule.t != 1 or not rule.state:
        return
    last, num_lost = _num_lost.get(params[0], ("", 0))
    num_lost = num_lost + 1 if last == optimizer else 1
    _num_lost[params[0]] = optimizer, num_lost
    if num_lost == _MANY_LOST:
        warn(
            f"{optimizer}.setup: each setup begins with empty states, so what the optimizer remembers of earlier "
            "gradients is lost at each step; call setup once, before the loop"
        )


def warn_of_another_target(optimizer: str, old: Link, new: Link) -> None:
    """A second setup before the first update: only one of the two links is trained."""
    if new is old or any(link is old for link in new.links()) or any(link is new for link in old.links()):
        return
    if _trained(old) <= _trained(new):  # such as another classifier around the same network
        return
    warn(
        f"{optimizer}.setup: the target was {type(old).__name__} and is {type(new).__name__} from now on: the first "
        "one is not trained; use one optimizer for each, or put both links into a Chain"
    )


def _trained(link: Link) -> set[Parameter]:
    return {p for p in link.params() if not p.is_frozen}


def warn_of_what_is_not_updated(
    optimizer: GradientMethod, params: Sequence[Parameter], known: Container[Parameter]
) -> None:
    """Parameters that an update of this optimizer leaves as they are, or changes by the rules of another one."""
    where = f"{type(optimizer).__name__}.update"
    if new := [p for p in params if p.update_rule is None and not p.is_frozen and p not in known]:
        names = {p: name for name, p in optimizer.target.namedparams()}
        words = f"{', '.join(names[p] for p in new[:5])}{', ...' if len(new) > 5 else ''}"
        warn(f"{where}: {words} came to the target after setup and will not be trained; call optimizer.setup again")
    rules = [p.update_rule for p in params if p.update_rule is not None]
    if rules and not any(getattr(rule, "enabled", True) for rule in rules):
        warn(f"{where}: all parameters of {type(optimizer.target).__name__} are frozen; call enable_update() of some")
    parents = [getattr(getattr(rule, "hyperparam", None), "parent", None) for rule in rules]
    if rules and all(parent is not None and parent is not optimizer.hyperparam for parent in parents):
        warn(
            f"{where}: another optimizer was set up for all parameters of {type(optimizer.target).__name__} since, and "
            "its rules and hyperparameters are used; call update() of that one"
        )


# ---- saved states ---------------------------------------------------------------------------------------------------


def check_meaning(serializer: AbstractSerializer, optimizer: str, meaning: str | None) -> None:
    """Save what the numbers of a state mean, where other optimizers' have the same names; refuse others' on loading."""
    if meaning is None:
        return
    try:
        saved = serializer("state_meaning", meaning)
    except KeyError:  # an earlier version saved
        return
    if saved is not None and str(saved) != meaning:  # a serializer that saves gives back what it got
        words = f"the saved state is that of another optimizer, in which {saved}; here {meaning}"
        refuse(CheckpointError(f"{optimizer}: {words}: take the same optimizer, or load the network alone"))


# ---- losses ---------------------------------------------------------------------------------------------------------


def loss_of(
    optimizer: str,
    target: Link,
    lossfun: Any,
    args: tuple[Any, ...],
    kwds: Mapping[str, Any],
) -> Variable:
    """``lossfun(*args, **kwds)``, which must be a loss; what is wrong with the function or its arguments is said."""
    try:
        loss = lossfun(*args, **kwds)
    except (AttributeError, TypeError, ValueError) as error:
        explain_call(f"{optimizer}.update", error, target, lossfun, args, kwds)
        raise
    if type(loss) is not Variable or loss._array.ndim:
        _check_loss(f"{optimizer}.update", target, lossfun, loss)
    return loss


def _check_loss(where: str, target: Link, lossfun: Callable[..., Variable] | None, loss: Variable | None) -> None:
    name = type(lossfun).__name__ if isinstance(lossfun, Link) else getattr(lossfun, "__name__", repr(lossfun))
    if not hasattr(loss, "backward"):
        hint = "it returns nothing: write `return loss`" if loss is None else "return the Variable, not its value"
        raise TypeError(f"{where}: expected the loss as a Variable from {name}, got {type(loss).__name__}; {hint}")
    if isinstance(loss, Variable) and loss.size != 1 and loss.grad is None:
        hint = "wrap the network in L.Classifier, or pass" if lossfun is target else "return a mean, or pass"
        raise ValueError(
            f"{where}: expected a loss of one number from {name}, got shape {loss.shape}; {hint} a function that "
            "computes the loss"
        )


def explain_no_graph(optimizer: str, error: RuntimeError, lossfun: Callable[..., Variable], loss: Variable) -> None:
    """Raise a better error where a loss function was called with a batch instead of the network's outputs."""
    if isinstance(lossfun, Link) or loss.creator is not None:
        return
    name = getattr(lossfun, "__name__", "")
    if str(getattr(lossfun, "__module__", "")).startswith("dbrdist.functions"):
        raise RuntimeError(
            f"{optimizer}.update: {name} was called with the batch itself, so that the loss depends on no parameter; "
            f"write L.Classifier(model, {name}) as the target, or lambda x, t: {name}(model(x), t) as the loss function"
        ) from error


def explain_call(
    where: str,
    error: Exception,
    target: Link,
    function: Callable[..., Variable],
    args: tuple[object, ...],
    kwds: Mapping[str, object],
) -> None:
    """Raise a better error where a loss function was called with other arguments than it takes; else do nothing."""
    if not callable(function):
        got, hint = type(function).__name__, ""
        if isinstance(function, Variable):
            got, hint = "the loss itself", "; call loss.backward(), then update() without arguments"
        raise TypeError(f"{where}: expected a function that computes the loss, got {got}{hint}") from error
    takes = _signature(_first(function)) if isinstance(function, Link) else None
    if takes is None or _binds(takes, args, kwds):
        return
    given = ", ".join([f"{len(args)} argument{'' if len(args) == 1 else 's'}"] * bool(args) + list(kwds)) or "nothing"
    whose, hint = "the link", ""
    if function is target:
        whose = "the target"
        if len(args) + len(kwds) > 1:
            hint = "; wrap it in L.Classifier(model), or pass a function that computes the loss"
    raise TypeError(
        f"{where}: {whose} {type(function).__name__} was called with {given}, and takes "
        f"({', '.join(takes.parameters)}){hint}"
    ) from error


def _first(link: Link) -> Link:
    """What takes the arguments: of a Sequential its first layer."""
    layers = getattr(link, "_layers", None)
    return _first(layers[0]) if layers and isinstance(link, Link) else link


def _signature(function: Callable[..., Variable]) -> inspect.Signature | None:
    """What a link or function takes as its inputs: settings such as ``n_batch_axes`` are none of them."""
    try:
        signature = inspect.signature(function.forward if isinstance(function, Link) else function)
    except (TypeError, ValueError):
        return None
    if isinstance(function, Link) and type(function).__module__.startswith("dbrdist."):
        plain = [p for p in signature.parameters.values() if p.default is p.empty]
        return signature.replace(parameters=plain)
    return signature


def _binds(signature: inspect.Signature, args: tuple[object, ...], kwds: Mapping[str, object]) -> bool:
    try:
        signature.bind(*args, **kwds)
    except TypeError:
        return False
    return True
