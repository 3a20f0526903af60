"""Backward passes: one walk for every order.

The walk visits functions from the last to the first (a heap by rank, no recursion), adds what arrives at each output
and asks the function's rule. In a first-order pass gradients are bare arrays, and a parameter's first contribution is
written straight into flat memory; in a higher-order pass they are Variables and the same rules record a graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from dbrdist.core.array.backend import copy, get_array_module, on
from dbrdist.core.array.config import config, using_config
from dbrdist.core.array.declared import DeclaredNumber
from dbrdist.core.tape import deferred, fusion, ops
from dbrdist.core.tape.call import hooked, variable
from dbrdist.core.tape.deferred import plain
from dbrdist.core.tape.function_node import FunctionNode, get_function_hooks, has_nan
from dbrdist.core.tape.node import VariableNode
from dbrdist.core.tape.variable import Variable
from dbrdist.core.tape.walk import PlainWalk, Seeds, fitted, miscount, views
from dbrdist.core.usage.mistakes import refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
    from typing import Any

    from dbrdist.core.array.types import Array
    from dbrdist.core.tape.deferred import Gradient
    from dbrdist.core.tape.variable import Operand


class ObservingWalk(PlainWalk):
    """A pass that records a graph (``higher``), keeps the gradients of variables on the way, or has hooks to call."""

    def __init__(self, higher: bool, keep: bool = False) -> None:
        super().__init__()
        self.higher = higher
        # Intermediate nodes that keep their gradient; one output may have several, since rules revive retained outputs.
        self.kept: dict[Hashable, set[VariableNode]] | None = {} if keep else None

    def run(self, seeds: Seeds) -> None:
        for node, g in seeds:
            self.deliver(node, g)
        while self.heap:
            function, gys = self.next()
            self.visit(gys)
            function.heed_new_values()
            wanted = self.select(function, gys)
            if not wanted:
                continue
            for i, gx in zip(wanted, self.ask(function, wanted, gys)):
                if gx is not None:
                    self.land(function, i, gx)
            self.visited(function)

    def visited(self, function: FunctionNode) -> None:
        """All that a function gives its inputs has landed."""

    def land(self, function: FunctionNode, i: int, gx: Gradient) -> None:
        """Take what a rule returned for input ``i``."""
        node = function.inputs[i]
        if gx is node.view:  # the rule wrote the first contribution where it belongs
            node.gradient = gx
            if deferred.waiting:  # somebody looks on
                deferred.write_all()
            return
        if gx.shape != node.shape or gx.dtype != node.dtype:
            self.visit((gx,))
            gx = fitted(function, i, gx)
        self.deliver(node, gx)

    def views(self, function: FunctionNode, wanted: tuple[int, ...]) -> list[Array | None] | None:
        """Where in flat memory a rule may write the first contributions of a first-order pass."""
        return None if self.higher else views(function.inputs, wanted)

    def deliver(self, node: VariableNode, g: Gradient) -> None:
        if self.kept is not None and node.living_creator() is not None:
            self.kept.setdefault((node.creator_node, node.index), set()).add(node)
        super().deliver(node, g)

    def settle(self, node: VariableNode, g: Any) -> None:
        if not self.higher:
            super().settle(node, g)
            return
        self.visit((g,))
        old = node.gradient
        node.gradient = g if old is None else ops.add(_as_variable(old), g)

    def select(self, function: FunctionNode, gys: tuple[Any, ...]) -> tuple[int, ...]:
        """Which inputs take a gradient; intermediate gradients are kept here where asked."""
        if self.kept is not None:
            for i, g in enumerate(gys):
                if g is not None:
                    for node in self.kept.get((function, i), ()):
                        node.gradient = g if self.higher else copy(plain(g))
        return function.wanted

    def ask(self, function: FunctionNode, wanted: tuple[int, ...], gys: tuple[Any, ...]) -> tuple[Gradient | None, ...]:
        """The function's rule, between its hooks."""
        hooks = function.active_hooks() if function._hooks is not None or get_function_hooks() else ()
        if hooks:
            gys = tuple([plain(g) for g in gys])
        for hook in hooks:
            hook.backward_preprocess(function, function.input_data, gys)
        gxs: tuple[Gradient | None, ...]
        if self.higher:
            gxs = function.derive_variables(wanted, gys)
        elif function.writes:
            rule: Callable[..., tuple[Operand | None, ...]] = function.derive
            gxs = rule(wanted, gys, self.views(function, wanted))
        else:
            gxs = function.derive(wanted, gys)
        for hook in hooks:
            hook.backward_postprocess(function, function.input_data, gys)
        if len(gxs) != len(wanted):
            raise miscount(function, wanted, gxs)
        if config.debug:
            _check_nan(function, wanted, gxs)
        return gxs


class Listener(Protocol):
    """Hears of leaves in flat memory during a first-order pass."""

    def expect(self, used: set[VariableNode]) -> None:
        """The pass may reach these leaves, and no others."""

    def ready(self, node: VariableNode) -> None:
        """The gradient of a leaf is complete: all functions that use it have been visited."""


class AnnouncingWalk(ObservingWalk):
    """A first-order pass that tells a listener when the gradient of a leaf is complete.

    A leaf behind functions that no gradient reaches is announced by :meth:`Listener.expect` only. A rule that a user
    wrote may reach any leaf, by a backward pass of its own: nothing is announced before the last such rule is through.
    """

    def __init__(self, listener: Listener, ends: Sequence[VariableNode], is_watched: bool) -> None:
        super().__init__(False)
        self.listener = listener
        self.is_watched = is_watched  # by hooks, which may keep the gradients that they are shown
        self.left: dict[VariableNode, int] = {}  # how many functions behind the ends use each leaf in flat memory
        self.num_foreign = 0
        self.complete: list[VariableNode] = []  # and not yet announced
        for function in _behind(ends):
            self.num_foreign += _is_foreign(function)
            for leaf in _leaves(function):
                self.left[leaf] = self.left.get(leaf, 0) + 1
        if not self.num_foreign:
            listener.expect(set(self.left))

    def land(self, function: FunctionNode, i: int, gx: Gradient) -> None:
        self.is_new = function.gives_new and not self.is_watched
        super().land(function, i, gx)

    def visited(self, function: FunctionNode) -> None:
        left = self.left
        for node in _leaves(function):
            left[node] -= 1
            if not left[node]:
                self.complete.append(node)
        if self.num_foreign and _is_foreign(function):
            self.num_foreign -= 1
            if not self.num_foreign:
                self.listener.expect(set(left))
        if not self.num_foreign:
            for node in self.complete:
                self.listener.ready(node)
            self.complete.clear()


def _is_foreign(function: FunctionNode) -> bool:
    """Whether the rule is a user's."""
    return function.as_called is not function or not type(function).__module__.startswith("dbrdist.")


def _behind(ends: Sequence[VariableNode]) -> Iterator[FunctionNode]:
    """The functions behind ``ends``, each once."""
    stack = [c for c in (node.living_creator() for node in ends) if c is not None]
    seen = set(stack)
    while stack:
        function = stack.pop()
        yield function
        for i in function.wanted:
            creator = function.inputs[i].creator_node
            if creator is not None and creator not in seen:
                seen.add(creator)
                stack.append(creator)


def _leaves(function: FunctionNode) -> dict[VariableNode, None]:
    """The leaves in flat memory among the inputs that take a gradient, each once, in one order on all ranks."""
    nodes = function.inputs
    return dict.fromkeys([nodes[i] for i in function.wanted if nodes[i].view is not None])


class TargetWalk(ObservingWalk):
    """A pass that collects the gradients of chosen variables and visits only functions on the way to them."""

    def __init__(self, higher: bool, keep: bool, ends: Sequence[VariableNode], targets: Sequence[VariableNode]) -> None:
        super().__init__(higher, keep)
        self.found: dict[Hashable, Operand | None] = {_key(node): None for node in targets}
        self.useful = _on_the_way(ends, self.found)

    def deliver(self, node: VariableNode, g: Gradient) -> None:
        if node.creator_node in self.useful:
            super().deliver(node, g)
        else:
            self.settle(node, g)

    def settle(self, node: VariableNode, g: Gradient) -> None:
        key = _key(node)
        if key in self.found:
            self.visit((g,))
            old = self.found[key]
            self.found[key] = plain(g) if old is None else ops.add(old, plain(g))

    def views(self, function: FunctionNode, wanted: tuple[int, ...]) -> None:
        """Nothing is written into flat memory: what is collected must outlive the next backward."""

    def select(self, function: FunctionNode, gys: tuple[Any, ...]) -> tuple[int, ...]:
        super().select(function, gys)
        for i, g in enumerate(gys):
            if g is not None and (function, i) in self.found:
                self.found[function, i] = plain(g)
        nodes = function.inputs
        return tuple(i for i in function.wanted if nodes[i].creator_node in self.useful or _key(nodes[i]) in self.found)


def _key(node: VariableNode) -> Hashable:
    """What identifies a variable in the graph: its creator and index, or the leaf's node."""
    creator = node.living_creator()
    return node if creator is None else (creator, node.index)


def _on_the_way(ends: Sequence[VariableNode], targets: Mapping[Hashable, Gradient | None]) -> set[FunctionNode]:
    """The functions between ``ends`` and the targets, found without recursion."""
    order: list[FunctionNode] = []
    seen: set[FunctionNode] = set()
    stack = [c for c in (node.living_creator() for node in ends) if c is not None]
    while stack:
        function = stack.pop()
        if function in seen:
            continue
        seen.add(function)
        order.append(function)
        stack.extend(c for c in (n.living_creator() for n in function.inputs) if c is not None)
    useful: set[FunctionNode] = set()
    for function in sorted(order, key=lambda f: f.rank):
        if any(_key(n) in targets or n.creator_node in useful for n in function.inputs):
            useful.add(function)
    return useful


def _as_variable(g: Operand) -> Variable:
    """An array as a constant: a gradient collected at a Variable that nobody knows would be a reference cycle."""
    if isinstance(g, Variable):
        return g
    return variable(np.asarray(g) if np.isscalar(g) else g, False)


def _check_nan(function: FunctionNode, wanted: tuple[int, ...], gxs: tuple[Gradient | None, ...]) -> None:
    for i, gx in zip(wanted, gxs):
        a = plain(gx)
        if has_nan(a.array if isinstance(a, Variable) else a):
            raise RuntimeError(
                f"NaN is detected on backward computation of {function.label}: in the gradient of input {i}"
                f"{function.called_at()}"
            )


_float32 = np.dtype(np.float32)
_one_in_float32 = np.array(1.0, _float32)


def _seed(
    node: VariableNode, array: Array, given: Operand | None, scale: float | DeclaredNumber | None, higher: bool
) -> Operand:
    if type(array) is np.ndarray:
        if given is None and scale is None and not higher and not array.ndim:  # a loss, nearly always
            dtype = array.dtype  # a copy takes half the time of making one
            one = node.gradient = _one_in_float32.copy() if dtype is _float32 else np.array(1.0, dtype)
            return one
        return _seed_here(node, array, given, scale, higher)
    with on(array):
        return _seed_here(node, array, given, scale, higher)


def _seed_here(
    node: VariableNode, array: Array, given: Operand | None, scale: float | DeclaredNumber | None, higher: bool
) -> Operand:
    """The gradient with which a pass starts: what was given, or one for a single element."""
    if given is None:
        given = node.gradient = _one(array)
    elif not hasattr(given, "shape"):
        raise TypeError(f"grad_outputs: expected arrays, Variables or None, got {type(given).__name__}")
    elif given.shape != array.shape:
        raise ValueError(f"grad_outputs: expected shape {array.shape} to match the output, got {given.shape}")
    if isinstance(given, Variable) and not higher:
        given = given.array
    if given.dtype != array.dtype:  # kernels take the gradient to be of the output's type
        given = ops.cast(given, array.dtype)
    if scale is not None:
        kind = given.dtype
        given = ops.mul(given, scale.as_type(kind) if isinstance(scale, DeclaredNumber) else kind.type(scale))
    return _as_variable(given) if higher else given


def _one(array: Array) -> Operand:
    """The gradient of a single element, in its shape and type."""
    if array.size != 1:
        raise ValueError(
            f"backward needs the gradient of an output with shape {array.shape}: "
            "set its grad first, or reduce it to one number"
        )
    if type(array) is np.ndarray:
        return np.ones(array.shape, array.dtype)
    return get_array_module(array).ones_like(array)


def see_that_all_are_variables(name: str, xs: object) -> None:
    """Refuse what is no Variable, in the words of the argument ``name``."""
    if not isinstance(xs, (tuple, list)):
        raise TypeError(f"{name}: expected a tuple or list of Variables, got {type(xs).__name__}")
    for i, x in enumerate(xs):
        if not isinstance(x, Variable):
            raise TypeError(f"{name}[{i}]: expected a Variable, got {type(x).__name__}")


def _see_that_each_has_one(
    name: str, grads: Sequence[Operand | None] | None, what: str, xs: Sequence[Variable]
) -> None:
    if grads is not None and not isinstance(grads, (tuple, list)):
        raise TypeError(f"{name}: expected a tuple or list, one for each {what}, got {type(grads).__name__}")
    if grads is not None and len(grads) != len(xs):
        raise ValueError(f"{name}: expected {len(xs)}, one for each {what}, got {len(grads)}")


class BackwardWatch(Protocol):
    """What looks at gradients before and after each backward pass from ``outputs``."""

    def before(self, outputs: Sequence[Variable]) -> None: ...

    def after(self) -> None: ...


watching_backward: list[BackwardWatch] = []  # for mistakes, in a program's first steps


def backward(
    outputs: Sequence[Variable],
    grad_outputs: Sequence[Operand | None] | None = None,
    *,
    retain_grad: bool = False,
    enable_double_backprop: bool = False,
    loss_scale: float | None = None,
    listener: Listener | None = None,
) -> None:
    """Backpropagate from several outputs, filling ``grad`` of every leaf.

    The graph stays, so that two losses may share it and backward may be called again; gradients of leaves add up.

    Args:
        outputs: the Variables to begin with.
        grad_outputs: their gradients; None takes their own ``grad``, and one where an output has a single element.
        retain_grad: fill ``grad`` of every variable, not only of leaves.
        enable_double_backprop: make the gradients differentiable themselves.
        loss_scale: factor of the gradients on the way, for 16-bit types; None for none.
        listener: notified during a first-order pass when gradients in flat memory are complete.

    Raises:
        TypeError, ValueError: an output is no Variable, or has no gradient to begin with.

    Example:
        >>> x = dbrdist.Variable(np.array(3.0))
        >>> dbrdist.backward([x * x, 2.0 * x])
        >>> x.grad
        array(8.)
    """
    if type(outputs) not in (list, tuple) or len(outputs) != 1 or type(outputs[0]) is not Variable:
        see_that_all_are_variables("outputs", outputs)
    if grad_outputs is not None:
        _see_that_each_has_one("grad_outputs", grad_outputs, "output", outputs)
    backward_of_variables(outputs, grad_outputs, retain_grad, enable_double_backprop, loss_scale, listener)


def backward_of_variables(
    outputs: Sequence[Variable],
    grad_outputs: Sequence[Operand | None] | None,
    retain_grad: bool,
    enable_double_backprop: bool,
    loss_scale: float | None,
    listener: Listener | None,
) -> None:
    """:func:`backward` of what are Variables."""
    watches = tuple(watching_backward) if watching_backward else ()
    for watch in watches:
        watch.before(outputs)
    if fusion.waiting:
        fusion.settle()
    higher = enable_double_backprop
    seeds = []
    for i, y in enumerate(outputs):
        node = y.node
        g = node.gradient if grad_outputs is None else grad_outputs[i]
        creator = node.creator_node
        if grad_outputs is not None or (creator is not None and creator.wanted):  # a leaf's own gradient is there
            seeds.append((node, _seed(node, y._array, g, loss_scale, higher)))
    if not seeds and not any(y.node.requires_grad for y in outputs):
        _refuse_no_graph()
    switches = config.__dict__
    is_watched = retain_grad or hooked[0] or switches["debug"] or switches["_function_hooks"]
    if higher:
        with using_config("enable_backprop", True):
            _run(ObservingWalk(higher, retain_grad), seeds)
    elif listener is not None:
        _run(AnnouncingWalk(listener, [node for node, _ in seeds], is_watched), seeds)
    elif is_watched:
        _run(ObservingWalk(higher, retain_grad), seeds)
    else:
        walk = PlainWalk()
        try:  # as _run, in two calls less
            walk.run(seeds)
        finally:
            if walk.home is not None:
                walk.go_home()
            if deferred.waiting:
                deferred.write_all()
    for watch in watches:
        watch.after()


def _run(walk: PlainWalk, seeds: Seeds) -> None:
    """Run a walk, which visits the devices of gradients, and come back to this thread's device."""
    try:
        walk.run(seeds)
    finally:
        walk.go_home()


def _refuse_no_graph() -> None:
    """Where no gradient can be asked for, there is nothing to do, which nobody means."""
    within = "" if config.enable_backprop else " (backward itself is called within no_backprop_mode)"
    words = (
        "backward: the output has no graph, so no parameter can get a gradient: it was computed within "
        f"no_backprop_mode, or from arrays (x.array) alone{within}"
    )
    refuse(RuntimeError(words))


def grad(
    outputs: Sequence[Variable],
    inputs: Sequence[Variable],
    grad_outputs: Sequence[Operand | None] | None = None,
    grad_inputs: Sequence[Operand | None] | None = None,
    set_grad: bool = False,
    retain_grad: bool = False,
    enable_double_backprop: bool = False,
    loss_scale: float | None = None,
) -> list[Variable | None]:
    """The gradients of outputs by inputs, as Variables; None for inputs that the outputs do not depend on.

    Only functions between both are visited, and no other ``grad`` is touched.

    Args:
        outputs: the Variables to begin with.
        inputs: the Variables by which to differentiate.
        grad_outputs: gradients of the outputs; None is one for each element.
        grad_inputs: added to the gradients of the inputs, and passed on from there.
        set_grad: store the results in ``grad`` of the inputs.
        retain_grad: store the gradients of the variables between outputs and inputs in their ``grad``.
        enable_double_backprop: make the results differentiable themselves.
        loss_scale: factor of the gradients on the way, for 16-bit types; None for none.

    Raises:
        TypeError, ValueError: an output or input is no Variable, or the numbers of gradients differ.

    Example:
        >>> x = dbrdist.Variable(np.array(3.0))
        >>> (gx,) = dbrdist.grad([x * x], [x], enable_double_backprop=True)
        >>> (ggx,) = dbrdist.grad([gx], [x])
        >>> gx.array, ggx.array
        (array(6.), array(2.))
    """
    see_that_all_are_variables("outputs", outputs)
    see_that_all_are_variables("inputs", inputs)
    _see_that_each_has_one("grad_outputs", grad_outputs, "output", outputs)
    _see_that_each_has_one("grad_inputs", grad_inputs, "input", inputs)
    fusion.settle()
    higher = enable_double_backprop
    given = [None] * len(outputs) if grad_outputs is None else grad_outputs
    seeds = []
    for y, g in zip(outputs, given):
        if g is None:
            with on(y):
                g = get_array_module(y).ones_like(y.array)
        seeds.append((y.node, _seed(y.node, y.array, g, loss_scale, higher)))
    for x, g in zip(inputs, grad_inputs or ()):
        if g is not None:  # it goes on from there to the inputs behind
            seeds.append((x.node, _seed(x.node, x.array, g, None, higher)))
    walk = TargetWalk(higher, retain_grad, [y.node for y in outputs], [x.node for x in inputs])
    with using_config("enable_backprop", higher):
        _run(walk, seeds)
        found = [walk.found[_key(x.node)] for x in inputs]
    results = [None if g is None else _as_variable(g) for g in found]
    for x, g in zip(inputs, results):
        if set_grad or (retain_grad and x.node.living_creator() is not None):
            x.grad_var = g
    return results
