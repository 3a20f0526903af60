"""Copies of weights that are laid out for several calls at once are never older than the weights: ``--on whole``.

Each case trains a small network until its weights are laid out together, writes to them in some way, and compares the
next pass with one in float64 on the host, of the values that are in memory then.
"""

from __future__ import annotations

import copy
import functools
import pickle
import threading

import numpy as np
import pytest
from support import images, put

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Chain, FunctionHook, FunctionNode, optimizers, serializers, using_config
from dbrdist.comm.gradients.model import _take_values
from dbrdist.core.array import backend
from dbrdist.core.model import flat
from dbrdist.core.model.flat import Run
from dbrdist.core.model.weight_copies import WeightCopies
from dbrdist.functions.connection import LinearFunction
from dbrdist.functions.convolution import Convolution2D
from dbrdist.optimizers import hooks
from dbrdist.training.captured_step import CapturedSteps
from dbrdist.training.extensions import WeightAverage

TOGETHER = "all_to_channels_last"


class Net(Chain):
    """Two convolutions, and what a case does between them."""

    def __init__(self):
        super().__init__()
        self.between = None
        with self.init_scope():
            self.one = L.Convolution2D(8, 8, 3, pad=1)
            self.two = L.Convolution2D(8, 8, 3, pad=1)

    def forward(self, x):
        h = F.tanh(self.one(x))
        if self.between is not None:
            self.between()
        return self.two(h)


def values_of(net):
    return {name: backend.to_cpu(p._array).astype("d") for name, p in net.namedparams()}


def as_on_the_host(values, x):
    """The network by the formula of a convolution, in float64."""
    for name in ("one", "two"):
        W, b = values[f"/{name}/W"], values[f"/{name}/b"]
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
        x = np.einsum("nchwij,ocij->nohw", windows, W) + b[:, None, None]
        if name == "one":
            x = np.tanh(x)
    return x


class Case:
    """A network that has been trained until its weights are laid out together."""

    def __init__(self, device, optimizer=None, dtype=np.float32, setup=lambda case: None):
        self.device, numbers = device, np.random.default_rng(3)
        self.x = put(device, images(numbers, (2, 8, 4, 5), dtype))
        with using_config("dtype", dtype):
            self.net = Net()
        for p in self.net.params():
            p.array[...] = numbers.standard_normal(p.shape) / 6
        self.net.to_device(device)
        self.optimizer = (optimizer or optimizers.SGD(0.01)).setup(self.net)
        setup(self)
        for _ in range(3):
            self.train()

    def train(self):
        self.net.cleargrads()
        self.loss = F.sum(self.net(self.x) ** 2)
        self.loss.backward()
        self.optimizer.update()

    def look(self, tolerance=1e-5):
        """A pass now, beside the host's of what is in memory after it."""
        y = backend.to_cpu(self.net(self.x).array)
        expected = as_on_the_host(values_of(self.net), backend.to_cpu(self.x).astype("d"))
        np.testing.assert_allclose(y, expected, rtol=0, atol=tolerance * abs(expected).max())
        return y


@pytest.fixture
def case(device, launched):
    made = Case(device)
    before = launched().count(TOGETHER)
    made.look()
    assert launched().count(TOGETHER) == before + 1  # so that there are copies that could be stale
    return made


def test_weights_are_laid_out_in_one_launch(case, launched):
    for _ in range(2):
        before = launched()
        case.train()
        case.look()
        names = launched()[len(before) :]
        assert names.count(TOGETHER) == 1 and names.count("to_channels_last") == 0


def test_passes_between_updates_share_copies(case, launched):
    before = len(launched())
    for _ in range(3):
        case.look()
        with dbrdist.no_backprop_mode():
            case.look()
    assert not {TOGETHER, "to_channels_last"} & set(launched()[before:])


# ---- writes between two passes, and within one


def _user_function(case):
    class Writes(FunctionNode):
        def forward(self, xs):
            xs[0][...] *= 3
            return (xs[0].copy(),)

    Writes().apply((case.net.two.W,))


def _shown_to_a_hook(case):
    class Writes(FunctionHook):
        name = "writes"

        def forward_preprocess(self, function, in_data):
            if len(in_data) > 1:
                in_data[1][...] *= 2

    with Writes():
        case.net(case.x)


def _shown_to_a_hook_of_backward(case):
    class Writes(FunctionHook):
        name = "writes"

        def backward_preprocess(self, function, in_data, out_grad):
            if function.label == "Convolution2D":
                in_data[1][...] *= 2

    with Writes():
        case.loss = F.sum(case.net(case.x))
        case.loss.backward()


def _retained(case):
    call = case.net(case.x).creator
    call.get_retained_inputs()[1].array[...] *= 2


def _by_input_data(case):
    case.net(case.x).creator.input_data[1][...] *= 2


def _saved(case, path):
    serializers.save_npz(path, case.net)
    case.net.two.W.array[...] *= 2
    case.train()
    case.look()
    serializers.load_npz(path, case.net)


def _loaded(case, path):
    other = copy.deepcopy(case.net)
    other.two.W.array[...] *= 2
    serializers.save_npz(path, other)
    serializers.load_npz(path, case.net)


def _copied(case):
    other = copy.deepcopy(case.net)
    other.two.W.array[...] *= 2
    case.net.copyparams(other)


def _second_optimizer(case):
    rules = [p.update_rule for p in case.net.params()]
    other = optimizers.Adam(0.1).setup(case.net)
    other.update()
    for p, rule in zip(case.net.params(), rules):
        p.update_rule = rule


def _averages(case):
    average = WeightAverage(case.net, decay=0.5)
    average.initialize(None)
    case.train()
    case.look()
    with average.applied():
        case.look()


def _broadcast(case):
    _take_values(case.net.two.W, case.net.two.W.xp.full(case.net.two.W.shape, 0.25, np.float32))


def _assigned(case):
    case.net.two.W.array = case.net.two.W.xp.full(case.net.two.W.shape, 0.25, np.float32)


def _assigned_of_another_type(case):
    W = case.net.two.W
    W.array = W.xp.full(W.shape, 0.25, np.float64)


def _moved_there_and_back(case):
    case.net.to_device("@numpy")
    case.net.two.W.array[...] *= 2
    case.net.to_device(case.device)


def _moved_memory(case):
    arena = case.net.two.W.slot.arena
    arena.move_data(arena.data.copy())
    arena.data[...] *= 2


def _two_passes(case):
    case.net(case.x)
    case.net.two.W.array[...] *= 2
    case.net(case.x)
    case.net.one.W.array[...] *= 2


def _view_of(function):
    def write(case):
        function(case.net.two.W).array[...] *= 2

    return write


def _array(case):
    case.net.two.W.array[...] *= 2


def _data(case):
    case.net.two.W.data[...] = 0.125


def _a_part(case):
    case.net.two.W.array[1:3, ::2] = 0.5


def _copydata(case):
    case.net.two.W.copydata(dbrdist.Variable(case.net.one.W.array * 2))


def _run(case):
    slot = case.net.two.W.slot
    for run in case.optimizer.runs():
        run.data[slot.start - run.start : slot.stop - run.start] *= 2


def _arena(case):
    slot = case.net.two.W.slot
    slot.arena.data[slot.start : slot.stop] *= 2


def _initialized(case):
    case.net.two.W.initialize(case.net.two.W.shape)


def _all_of_a_links(case):
    for p in case.net.params():
        p.array.clip(-0.1, 0.1, out=p.array)


def _update_of_one(case):
    case.net.two.W.update_rule.hyperparam.lr = 0.5
    case.net.two.W.update()


def _twice_differentiated(case):
    y = F.sum(case.net(case.x) ** 2)
    (g,) = dbrdist.grad([y], [case.net.two.W], enable_double_backprop=True)
    F.sum(g**2).backward()
    case.optimizer.update()


WRITES = {
    f.__name__.strip("_"): f
    for f in (
        _array, _data, _a_part, _copydata, _run, _arena, _initialized, _all_of_a_links, _update_of_one, _two_passes,
        _user_function, _shown_to_a_hook, _shown_to_a_hook_of_backward, _retained, _by_input_data, _copied,
        _second_optimizer, _averages, _broadcast, _assigned, _moved_there_and_back, _moved_memory,
        _twice_differentiated,
    )
} | {
    "reshape": _view_of(lambda W: F.reshape(W, (8, 72))),
    "transpose": _view_of(lambda W: F.transpose(W, (1, 0, 2, 3))),
    "get_item": _view_of(lambda W: W[1:]),
    "expand_dims": _view_of(lambda W: F.expand_dims(W, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_a_pass_after_a_write(name, case):
    before = case.look()
    WRITES[name](case)
    assert abs(case.look() - before).max() > 1e-3 or name == "averages"
    case.train()
    case.look()


WITHIN = ["array", "data", "a_part", "copydata", "reshape", "user_function", "arena", "run", "broadcast", "assigned"]


@pytest.mark.parametrize("name", WITHIN)
def test_a_write_within_a_pass(name, case):
    case.net.between = lambda: WRITES[name](case)
    case.look()
    case.train()
    case.look()


@pytest.mark.parametrize("load", [_saved, _loaded])
def test_a_snapshot(load, case, tmp_path):
    load(case, str(tmp_path / "file.npz"))
    case.look()
    case.train()
    case.look()


HELD = {
    "a run that it made": lambda case: Run([case.net.two.W]).data,
    "runs that it made": lambda case: flat.runs(case.net.params())[0].data[case.net.two.W.slot.start :],
    "array": lambda case: case.net.two.W.array,
    "the arena": lambda case: case.net.two.W.slot.arena.data[case.net.two.W.slot.start :],
    "the run, then another plan": lambda case: _planned_again(case, HELD["the run"](case)),
    "the run, then another optimizer": lambda case: _another_optimizer(case, HELD["the run"](case)),
    "the run of a hook called once": lambda case: _called_once(case),
    "the data of a node": lambda case: case.net(case.x).creator.input_data[1],
    "a part": lambda case: case.net.two.W.array[2:4],
    "the run": lambda case: next(iter(case.optimizer.runs())).data[case.net.two.W.slot.start :],
    "a variable": lambda case: F.reshape(case.net.two.W, (64, 9)).array,
    "retained": lambda case: case.net(case.x).creator.get_retained_inputs()[1].array,
    "retained, as an array": lambda case: case.net(case.x).creator.retained_inputs()[1],
}


def _planned_again(case, held):
    case.net.one.disable_update()
    case.train()
    case.net.one.enable_update()
    return held


def _another_optimizer(case, held):
    case.optimizer = optimizers.MomentumSGD(0.01).setup(case.net)
    return held


def _called_once(case):
    hook = Own(0.1)
    case.optimizer.call_hook(hook)
    return hook.held[case.net.two.W.slot.start :]


@pytest.mark.parametrize("when", ["before", "within"])
@pytest.mark.parametrize("name", HELD)
def test_what_a_program_holds_may_be_written_at_any_time(name, when, case):
    held = HELD[name](case)
    for _ in range(3):
        case.train()  # updates do not make it forgotten
        case.look()
    if when == "within":
        case.net.between = lambda: held.__imul__(2)
    else:
        held *= 2
    case.look()


def test_a_program_has_the_array_before_the_first_update(device, launched):
    held = []
    case = Case(device, setup=lambda case: held.append(case.net.two.W.array))
    case.net.between = lambda: held[0].__imul__(2)
    case.look()
    assert TOGETHER in launched()  # the other layer's


# ---- updates of other kinds


class Own(hooks.WeightDecay):
    """A program's hook, which keeps what it is shown, and writes there at any time."""

    def flat(self, run):
        self.held = run.data


def test_a_hook_of_the_program(device, launched):
    hook = Own(0.1)
    case = Case(device, setup=lambda case: case.optimizer.add_hook(hook))
    case.look()
    hook.held *= 2
    case.look()
    assert TOGETHER not in launched()
    case.optimizer.remove_hook(hook.name)
    for _ in range(3):
        case.train()
        case.look()
    hook.held *= 2
    case.look()


@pytest.mark.parametrize("timing", ["pre", "post"])
def test_a_function_as_hook(timing, device, launched):
    def double(optimizer):
        for p in optimizer.target.params():
            p.array[...] *= 1.1

    double.name = "double"
    case = Case(device, setup=lambda case: case.optimizer.add_hook(double, timing=timing))
    case.look()
    case.train()
    case.look()


def test_hooks_of_dbrdist(device, launched):
    def add(case):
        for hook in (hooks.WeightDecay(0.01), hooks.GradientClipping(0.5), hooks.DecoupledWeightDecay(0.01, 0.01)):
            case.optimizer.add_hook(hook)

    case = Case(device, setup=add)
    for _ in range(2):
        case.train()
        case.look()
    assert TOGETHER in launched()


class OwnRule(optimizers.gradient_descent.SGDRule):
    """A program's rule, which keeps what it is shown."""

    def step_run(self, hp, t, run, state):
        super().step_run(hp, t, run, state)
        type(self).held = run.data


def test_a_rule_of_the_program(device, launched):
    class Optimizer(optimizers.SGD):
        rule_class = OwnRule

    case = Case(device, Optimizer(0.01))
    case.look()
    OwnRule.held *= 2
    case.look()
    case.optimizer = optimizers.SGD(0.01).setup(case.net)
    for _ in range(3):
        case.train()
        case.look()
    OwnRule.held *= 2
    case.look()


def _of_one_rule(case, keep):
    for p in case.net.params():
        step_run = p.update_rule.step_run
        p.update_rule.step_run = lambda hp, t, run, state, own=step_run: keep(run.data, own(hp, t, run, state))


def _of_all_rules(case, keep):
    kind = type(case.net.two.W.update_rule)
    step_run = kind.step_run
    kind.step_run = lambda self, hp, t, run, state: keep(run.data, step_run(self, hp, t, run, state))


def _of_a_formula(case, keep):
    for p in case.net.params():
        step = p.update_rule.step
        p.update_rule.step = lambda hp, t, data, g, *state, own=step: keep(data, own(hp, t, data, g, *state))
        p.update_rule.kernel = lambda hp, t, state: None


def _of_a_hook(case, keep):
    hook = hooks.WeightDecay(0.001)
    hook.flat = lambda run: keep(run.data, None)
    case.optimizer.add_hook(hook)


def _of_hooks_of_a_rule(case, keep):
    for p in case.net.params():
        p.update_rule.add_hook(lambda rule, p: keep(p.array, None), "keeps")


@pytest.mark.parametrize("replace", [_of_one_rule, _of_all_rules, _of_a_formula, _of_a_hook, _of_hooks_of_a_rule])
@pytest.mark.parametrize("when", ["before the first update", "later"])
def test_a_function_in_the_place_of_one_of_dbrdist(replace, when, device, launched, monkeypatch):
    """It may keep the memory that it is shown, and write there at any time."""
    held = []

    def keep(data, result):
        held.append(data)
        return result

    monkeypatch.setattr(optimizers.gradient_descent.SGDRule, "step_run", optimizers.gradient_descent.SGDRule.step_run)
    case = Case(device, setup=(lambda case: replace(case, keep)) if when != "later" else lambda case: None)
    if when == "later":
        replace(case, keep)
    for _ in range(3):
        case.train()
        case.look()
    assert held
    for data in held[-4:]:
        data *= 2
    case.look()


@pytest.mark.parametrize("what", ["a rule", "the class of rules", "a hook", "the class of hooks"])
def test_a_function_that_wraps_one_of_dbrdist(what, case, monkeypatch):
    """``functools.wraps`` gives it the name of our module."""
    held, hook = [], hooks.WeightDecay(0.001)
    rule = case.net.two.W.update_rule
    name = "step_run" if "rule" in what else "piece" if "class" in what else "flat"
    owner = {"a rule": rule, "the class of rules": type(rule), "a hook": hook}.get(what, hooks.WeightDecay)
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*arguments):
        result = original(*arguments)
        held.extend(a if isinstance(a, case.net.xp.ndarray) else a.data for a in arguments if hasattr(a, "data"))
        return result

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, wrapper)
        for p in case.net.params() if what == "a rule" else ():
            patched.setattr(p.update_rule, name, wrapper)
        if "hook" in what:
            case.optimizer.add_hook(hook)
        case.train()
    for _ in range(2):
        case.train()
        case.look()
    assert held
    held[0] *= 2
    case.look()


def test_a_forward_in_the_place_of_one_of_dbrdist(case, monkeypatch):
    held, original = [], Convolution2D.forward

    @functools.wraps(original)
    def forward(self, xs):
        held.append(xs[1])
        return original(self, xs)

    with monkeypatch.context() as patched:
        patched.setattr(Convolution2D, "forward", forward)
        case.train()
    for _ in range(2):
        case.train()
        case.look()
    held[-1] *= 2
    case.look()


def test_a_call_whose_forward_is_the_programs(case):
    held, call = [], case.net(case.x).creator
    again = Convolution2D(call.geometry)
    again.forward = lambda xs: held.append(xs[1]) or call.forward(xs)
    again.apply((case.net.one(case.x), case.net.two.W, case.net.two.b))
    case.train()
    case.look()
    held[0] *= 2
    case.look()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_of_a_network_and_its_optimizer(duplicate, case):
    net, optimizer = case.net, case.optimizer
    case.net, case.optimizer = duplicate((net, optimizer))
    for _ in range(3):
        case.look()
        case.train()
    case.net.two.W.array[...] *= 2
    case.look()
    case.net, case.optimizer = net, optimizer
    case.look()
    case.train()
    case.look()


@pytest.mark.parametrize("make", [optimizers.AdaDelta, optimizers.Adam, optimizers.LARS, optimizers.MomentumSGD])
def test_other_optimizers(make, device, launched):
    case = Case(device, make())
    for _ in range(2):
        case.train()
        case.look()
    assert TOGETHER in launched()


def test_sixteen_bits_updated_in_float32(device, launched):
    optimizer = optimizers.MomentumSGD(0.01)
    optimizer.use_fp32_update()
    case = Case(device, optimizer, np.float16)
    for _ in range(2):
        case.train()
        case.look(5e-3)
    case.net.two.W.array[...] *= 2
    case.look(5e-3)
    assert TOGETHER in launched()


def test_a_dynamic_loss_scale_leaves_an_update_out(device, launched):
    case = Case(device, setup=lambda case: case.optimizer.loss_scaling())
    case.net.cleargrads()
    case.net(case.x)
    for p in case.net.params():
        p.grad = p.xp.full(p.shape, np.nan, np.float32)
    with pytest.warns(RuntimeWarning, match="left out"):
        case.optimizer.update()
    case.look()


def test_frozen_weights(case):
    case.net.two.disable_update()
    case.train()
    case.look()
    case.net.two.W.array[...] *= 2
    case.look()
    case.net.two.enable_update()
    case.train()
    case.look()


def test_another_type(case):
    case.look()
    wide, case.x = case.x, case.x.astype(np.float16)
    for _ in range(2):
        case.net.two.W.array[...] *= 1.5
        case.look(5e-3)
        case.train()
        case.look(5e-3)
    case.x = wide
    case.look()


def test_weights_that_links_share(device, launched):
    case = Case(device)
    twin = case.net.copy("share")
    twin.two.W.array[...] *= 2
    case.look()
    case.train()
    twin.two.W.array[...] *= 2
    case.look()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_of_a_network(duplicate, case):
    before, own = case.look(), case.net
    case.net = duplicate(own)
    case.net.two.W.array[...] *= 2
    assert abs(case.look() - before).max() > 1e-3
    case.net = own
    np.testing.assert_allclose(case.look(), before, rtol=0, atol=1e-5)


def test_another_type_of_weights(case):
    _assigned_of_another_type(case)
    assert case.net.two.W.copy_for_reading() is None


def test_a_function_that_is_called_again_reads_the_weights_that_it_is_given(case):
    """The first call, of one type, does not read the copy that it could have."""
    x, other = case.x[:, :, 0, 0], case.x[:, :, 0, 1].astype(np.float16)
    links = Chain(first=L.Linear(8, 4), second=L.Linear(8, 4)).to_device(case.device)
    optimizer = optimizers.SGD(0.01).setup(links)
    links.cleargrads()
    F.sum(links.first(x) + links.second(x)).backward()
    optimizer.update()
    function = LinearFunction()
    with dbrdist.no_backprop_mode():
        function.apply((x, links.first.W))
        y = function.apply((other, backend.to_device(backend.to_cpu(links.second.W.array), case.device)))[0]
    expected = backend.to_cpu(other).astype("d") @ backend.to_cpu(links.second.W.array).astype("d").T
    np.testing.assert_allclose(backend.to_cpu(y.array), expected, rtol=0, atol=5e-3 * abs(expected).max())


def test_a_load_that_ends_early(case):
    """What was read before an error is in the weights."""

    class Ends(serializers.DictionarySerializer):
        is_loading = True

        def __call__(self, key, value):
            if key == "b":
                raise KeyError(key)
            value *= 2
            return value

    Ends.__module__ = "dbrdist.made_up"
    with pytest.raises(KeyError):
        case.net.two.serialize(Ends({}))
    case.look()


@pytest.mark.parametrize("where", ["hook", "rule"])
def test_an_update_that_ends_early(where, device, launched, monkeypatch):
    case = Case(device, optimizers.SGD(0.01))
    case.net.two.W.update_rule.hyperparam.lr = 0.02  # a part of its own
    for _ in range(2):
        case.train()
    rule, calls = type(case.net.two.W.update_rule), []
    if where == "rule":
        step_run = rule.step_run

        def ends(self, *arguments):
            calls.append(None)
            if len(calls) > 1:
                raise KeyboardInterrupt
            return step_run(self, *arguments)

        monkeypatch.setattr(rule, "step_run", ends)
    else:

        def ends(optimizer):
            for run in optimizer.runs():
                run.data[...] *= 2
            raise KeyboardInterrupt

        ends.name = "ends"
        case.optimizer.add_hook(ends)
    with pytest.raises(KeyboardInterrupt):
        case.train()
    case.look()


def test_a_forgotten_function_that_hands_out_weights_when_it_is_computed_again(case):
    held = []

    def part(h):
        if dbrdist.config.enable_backprop:
            held.append(F.reshape(case.net.two.W, (8, 72)).array)
        return case.net.two(h)

    case.net.cleargrads()
    F.sum(F.forget(part, case.net.one(case.x))).backward()
    case.optimizer.update()
    case.look()
    held[-1].__imul__(2)
    case.look()


# ---- threads, streams, graphs


def test_another_thread(case, launched):
    before, found = len(launched()), []
    thread = threading.Thread(target=lambda: found.append(case.look()))
    thread.start()
    thread.join()
    assert found and "to_channels_last" in launched()[before:]


def test_an_update_while_another_thread_lays_out_weights(case, monkeypatch):
    """What that thread laid out is of the time before the update, also where it is done with it after the update."""
    make, begun, updated, done = WeightCopies._make, threading.Event(), threading.Event(), threading.Event()
    found = []

    def slow(self):
        made = make(self)
        if threading.current_thread() is thread:
            begun.set()
            assert updated.wait(60)
        return made

    def look():
        case.net(case.x)
        case.look()
        done.set()

    thread = threading.Thread(target=lambda: found.append(_error_of(look)))
    case.train()
    monkeypatch.setattr(WeightCopies, "_make", slow)
    thread.start()
    assert begun.wait(60)
    case.optimizer.hyperparam.lr = 10.0
    case.train()
    updated.set()
    thread.join(60)
    assert found == [None] and done.is_set()


def _error_of(function):
    try:
        function()
    except BaseException as error:
        return error
    return None


def test_another_stream(case, launched):
    cuda = case.device.xp.cuda
    stream, ready = cuda.Stream(non_blocking=True), cuda.Event()
    ready.record()
    stream.wait_event(ready)
    before = len(launched())
    with stream:
        case.net(case.x)
    assert launched()[before:].count("to_channels_last") == 2
    stream.synchronize()


def test_a_graph_keeps_its_copies(device, launched):
    """The gradient of the input is that of the weights at the call, though they were updated since."""
    case = Case(device)
    x = dbrdist.Variable(case.x)
    y = case.net(x)
    old = values_of(case.net)
    case.net.cleargrads()
    F.sum(case.net(case.x)).backward()
    case.optimizer.hyperparam.lr = 10.0
    case.optimizer.update()
    case.look()
    y.grad = y.xp.ones(y.shape, np.float32)
    y.backward()
    h = np.tanh(_single(old, "one", backend.to_cpu(case.x).astype("d")))
    gh = _transposed(old["/two/W"], np.ones(y.shape)) * (1 - h**2)
    expected = _transposed(old["/one/W"], gh)
    np.testing.assert_allclose(backend.to_cpu(x.grad), expected, rtol=0, atol=1e-5 * abs(expected).max())


def _single(values, name, x):
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    return np.einsum("nchwij,ocij->nohw", windows, values[f"/{name}/W"]) + values[f"/{name}/b"][:, None, None]


def _transposed(W, gy):
    padded = np.pad(gy, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    return np.einsum("nohwij,ocij->nchw", windows, W[:, :, ::-1, ::-1])


@pytest.mark.parametrize("write", ["array", "held", "copydata"])
def test_captured_steps_read_what_was_written_between_them(write, device, launched):
    class Trained(Net):
        def forward(self, x):
            return F.sum(super().forward(x) ** 2)

    def train(steps):
        numbers = np.random.default_rng(3)
        x = put(device, images(numbers, (2, 8, 4, 5), np.float32))
        net = Trained()
        for p in net.params():
            p.array[...] = numbers.standard_normal(p.shape) / 6
        optimizer = optimizers.SGD(0.001).setup(net.to_device(device))
        held = net.two.W.array if write == "held" else None
        for k in range(8):
            steps(optimizer, net, x)
            if k > 2:
                if write == "copydata":
                    net.two.W.copydata(dbrdist.Variable(net.one.W.array * 2))
                else:
                    (net.two.W.array if held is None else held).__imul__(1.25)
                net(x)  # an eager pass between replays
        return values_of(net)

    captured = CapturedSteps()
    found = train(lambda optimizer, net, x: captured.update(optimizer, net, (x,), {}, {}))
    expected = train(lambda optimizer, net, x: optimizer.update(net, x))
    assert captured.num_graphs == 1
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-3 * abs(value).max(), err_msg=name)


def test_replays_are_seen_by_another_optimizer_of_the_network(device, launched):
    class Trained(Net):
        def forward(self, x):
            return F.sum(super().forward(x) ** 2)

    numbers, captured = np.random.default_rng(3), CapturedSteps()
    x = put(device, images(numbers, (2, 8, 4, 5), np.float32))
    net = Trained().to_device(device)
    first = optimizers.SGD(0.01).setup(net)
    for _ in range(5):
        captured.update(first, net, (x,), {}, {})
    assert captured.num_graphs == 1
    second = optimizers.SGD(0.0)
    second.target = net  # with the rules that are there
    for _ in range(3):
        second.update(net, x)
        net(x)
        captured.update(first, net, (x,), {}, {})
        found = float(net(x).array)
        y = as_on_the_host(values_of(net), backend.to_cpu(x).astype("d"))
        np.testing.assert_allclose(found, (y**2).sum(), rtol=1e-5)


@pytest.mark.parametrize("what", ["a pass", "an update"])
def test_a_graph_of_the_program(what, device, launched):
    case = Case(device)
    xp = case.device.xp
    xp.cuda.Device().synchronize()
    stream, pool = xp.cuda.Stream(non_blocking=True), xp.cuda.MemoryPool()
    with stream, xp.cuda.using_allocator(pool.malloc):
        for _ in range(2):
            case.train()
            case.look()
        case.net.cleargrads()
        F.sum(case.net(case.x)).backward()
        stream.begin_capture()
        y = case.net(case.x).array if what == "a pass" else case.optimizer.update()
        graph = stream.end_capture()
        for _ in range(2):
            if what == "a pass":
                case.train()
            graph.launch(stream)
            stream.synchronize()
            if what == "a pass":
                expected = as_on_the_host(values_of(case.net), backend.to_cpu(case.x).astype("d"))
                np.testing.assert_allclose(backend.to_cpu(y), expected, rtol=0, atol=1e-5 * abs(expected).max())
            case.look()
            graph.launch(stream)
            case.look()


@pytest.mark.parametrize("write", ["copydata", "write", "array", "averages"])
def test_a_graph_of_the_program_with_a_write(write, case):
    """Each replay writes to the weights, unnoticed."""
    W, xp = case.net.two.W, case.device.xp
    average = WeightAverage(case.net, decay=0.5)
    average.initialize(None)
    average({})
    values = xp.full(W.shape, 0.25, np.float32)
    writes = {
        "copydata": lambda: W.copydata(dbrdist.Variable(values)),
        "write": lambda: W.write(values),
        "array": lambda: setattr(W, "array", values),
        "averages": lambda: average._set(average._averages),
    }
    xp.cuda.Device().synchronize()
    stream, pool = xp.cuda.Stream(non_blocking=True), xp.cuda.MemoryPool()
    with stream, xp.cuda.using_allocator(pool.malloc):
        stream.begin_capture()
        writes[write]()
        graph = stream.end_capture()
        for _ in range(2):
            case.train()
            case.look()
            graph.launch(stream)
            stream.synchronize()
            case.look()
