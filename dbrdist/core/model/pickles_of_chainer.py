"""Pickles that Chainer wrote: what its objects kept, as ours keep it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from dbrdist.core.array.backend import DeviceSpec
from dbrdist.core.array.types import Array
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.tape.variable import Variable

if TYPE_CHECKING:
    from dbrdist.core.update.optimizer import GradientMethod

_UNUSED = ("_device", "_overridden_to_methods", "_Link__init_done", "_device_id", "_cpu", "_hooks")


# What the rules of parameters kept, until an optimizer is made of it.
_rules: weakref.WeakKeyDictionary[Parameter, dict[str, Any]] = weakref.WeakKeyDictionary()


class PickledHooks:
    """What Chainer pickles as the hooks of an optimizer or a rule."""


def is_link_state(state: object) -> bool:
    """Whether Chainer pickled this state of a link: it keeps the names of parameters in a set."""
    return isinstance(state, dict) and isinstance(state.get("_params"), (set, frozenset))


def link_state(state: dict[str, Any]) -> dict[str, Any]:
    """The attributes of one of our links; parameters and children are in the order in which they were assigned."""
    own = {name: value for name, value in state.items() if name not in _UNUSED}
    own["_hooks"] = None
    for names in ("_params", "_persistent", "_children"):
        if isinstance(state.get(names), (set, frozenset)):
            own[names] = [name for name in state if name in state[names]]
    if isinstance(state.get("_children"), list):  # of a ChainList, or of a Sequential, which has functions besides
        layers = own.get("_layers", own.pop("_children"))
        own.pop("_children", None)
        own["_list"] = [layer for layer in layers if hasattr(layer, "namedparams")]
        for i, link in enumerate(own["_list"]):
            link.name = str(i)
    return own


def recover_parameter(array: Array | None, name: str | None, grad: Any, *others: Any) -> Parameter:
    """What ``chainer.variable._recover_parameter`` gives; the rule's state waits for an optimizer.

    ``others`` are the initializer, the rule and the device; Chainer 7 says in front whether there is a gradient.
    """
    initializer, update_rule, *_ = others[1:] if isinstance(others[0], bool) else others
    param = Parameter(initializer if array is None else array, name=name)
    if array is not None:
        param.initializer = initializer
        param.grad = grad
    if update_rule is not None:
        _rules[param] = vars(update_rule)
    return param


def set_up(optimizer: Any, state: dict[str, Any]) -> None:
    """Make an optimizer of ours what Chainer's was: its numbers, hooks and target, and the state of each parameter."""
    optimizer.__init__()
    for name, value in vars(state["hyperparam"]).items():
        if name != "_parent":
            setattr(optimizer.hyperparam, name, value)
    if state.get("_use_fp32_update"):
        optimizer.use_fp32_update()
    if state.get("target") is not None:
        optimizer.setup(state["target"])
    hooks = vars(state["_hookable"])
    for timing in ("pre", "post"):
        for name, hook in hooks.get(f"_{timing}_update_hooks", {}).items():
            optimizer.add_hook(hook, name, timing)
    _set_loss_scale(optimizer, state)
    optimizer.t, optimizer.epoch = state["t"], state["epoch"]
    for param in () if optimizer.target is None else optimizer.target.params():
        saved = _rules.get(param)
        if saved is not None and param.update_rule is not None:
            param.update_rule.follow_chainer(saved)


def _set_loss_scale(optimizer: GradientMethod, state: dict[str, Any]) -> None:
    scale = state.get("_loss_scale")
    if scale is None:
        return
    optimizer.set_loss_scale(scale)
    if state.get("_loss_scaling_is_dynamic"):
        optimizer._loss_scale_growth = state["_loss_scaling_multiplier"]
        optimizer._was_unsafe = state["_loss_scaling_isnan_ever"]


def create_variable(
    array: Array, name: str | None, grad: Array | None, requires_grad: bool, *device: DeviceSpec
) -> Variable:
    """What ``chainer.variable._create_variable`` gives."""
    return Variable(array, name=name, grad=grad, requires_grad=requires_grad)
