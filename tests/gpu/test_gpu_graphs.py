"""Steps that are captured as CUDA graphs train as eager ones do, bit for bit: ``--on whole``, or on a GPU."""

from __future__ import annotations

import contextlib
import gc
import re
import warnings
import weakref

import numpy as np
import pytest
import whole_models

import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Chain, Reporter, report, using_config
from dbrdist.core.array import backend, random
from dbrdist.errors import UsageWarning
from dbrdist.iterators import SerialIterator
from dbrdist.optimizers import (
    LARS,
    SGD,
    AdaDelta,
    AdaGrad,
    Adam,
    CorrectedMomentumSGD,
    MomentumSGD,
    NesterovAG,
    RMSprop,
)
from dbrdist.optimizers.hooks import DecoupledWeightDecay, GradientClipping, GradientNoise, WeightDecay
from dbrdist.training import ParallelUpdater, StandardUpdater, graph_of_step


@pytest.fixture(autouse=True)
def needs_graphs(on):
    if on not in ("whole", "cupy"):
        pytest.skip("needs streams that can be captured: --on whole, or a GPU")


class Net(Chain):
    """Convolution, normalization, dropout and linear layers; losses are reported."""

    def __init__(self, ratio=0.4):
        super().__init__()
        self.ratio = ratio
        with self.init_scope():
            self.conv = L.Convolution2D(3, 8, 3, pad=1, nobias=True)
            self.bn = L.BatchNormalization(8)
            self.fc = L.Linear(8 * 4 * 4, 10)

    def forward(self, x, t):
        h = F.max_pooling_2d(F.relu(self.bn(self.conv(x))), 2)
        loss = F.softmax_cross_entropy(self.fc(F.dropout(h, self.ratio)), t)
        report({"loss": loss, "accuracy": F.accuracy(self.fc(F.dropout(h, self.ratio)), t)}, self)
        return loss


def examples(count=12, shape=(3, 8, 8), dtype=np.float32):
    numbers = np.random.default_rng(4)
    return [(numbers.standard_normal(shape).astype(dtype), np.int32(k % 10)) for k in range(count)]


def updater_of(device, net, optimizer, data, capture, hooks=(), batch=4, scale=None, **options):
    optimizer.setup(net.to_device(device))
    for hook in hooks:
        optimizer.add_hook(hook)
    if scale == "dynamic":
        optimizer.loss_scaling(interval=3)
    elif scale is not None:
        optimizer.set_loss_scale(scale)
    iterator = SerialIterator(data, batch, seed=1)
    return StandardUpdater(iterator, optimizer, device=device, capture=capture, **options)


def train(device, capture, steps=8, make=Net, make_optimizer=Adam, mode="float32", rate=None, each=None, **options):
    """What is left of some steps: all parameters, states and reports."""
    random.set_seed(3)
    with using_config("dtype", mode if mode == "mixed16" else np.dtype(mode)):
        net, optimizer = make(), make_optimizer()
        data = options.pop("data", None) or examples(dtype=np.float16 if mode == "mixed16" else mode)
        updater = updater_of(device, net, optimizer, data, capture, **options)
        reporter, reports = Reporter(), []
        reporter.add_observer("main", net)
        reporter.add_observers("main", net.namedlinks(skipself=True))
        for k in range(steps):
            if rate is not None:
                setattr(optimizer, "alpha" if isinstance(optimizer, Adam) else "lr", rate(k))
            if each is not None:
                each(k, net, optimizer, updater)
            with reporter.scope({}):
                updater.update()
                reports.append(dict(reporter.observation))
    found = {n: backend.to_cpu(p.lend()) for n, p in net.namedparams()}
    found |= {f"gradient of {n}": backend.to_cpu(p.grad) for n, p in net.namedparams()}
    found |= {
        f"{n}: {k}": backend.to_cpu(v) for n, p in net.namedparams() for k, v in (p.update_rule.state or {}).items()
    }
    for path, link in net.namedlinks():
        found |= {f"{path}/{n}": backend.to_cpu(a) for n in link._persistent if backend.is_array(a := getattr(link, n))}
    for k, one in enumerate(reports):
        found |= {f"step {k}: {n}": np.asarray(float(backend.to_cpu(v))) for n, v in one.items()}
    found["counts"] = np.array([optimizer.t, *[p.update_rule.t for _, p in sorted(net.namedparams())]])
    found["scale"] = np.asarray(optimizer.loss_scale or 0.0)
    found["draws"] = np.array(random.get_state())
    return found, updater


def assert_same(found, exact):
    assert found.keys() == exact.keys()
    for name in exact:
        np.testing.assert_array_equal(found[name], exact[name], name)


@pytest.fixture
def same_products(on, monkeypatch):
    """Eager steps multiply by cuBLASLt, too: cuBLAS may take another algorithm."""
    from dbrdist.kernels.gpu import cublaslt

    monkeypatch.setattr(backend.capturing, "product", cublaslt.serve)


def both(device, **options):
    with using_config("cudnn_deterministic", True):
        eager, _ = train(device, False, **dict(options))
        captured, updater = train(device, True, **dict(options))
    assert updater._captured.num_graphs >= 1, "nothing was captured, so that nothing was compared"
    assert_same(captured, eager)
    return updater


def schedule(k):
    return 0.01 / (1 + k)


OPTIMIZERS = {
    "SGD": SGD, "MomentumSGD": MomentumSGD, "CorrectedMomentumSGD": CorrectedMomentumSGD, "NesterovAG": NesterovAG,
    "AdaGrad": AdaGrad, "RMSprop": RMSprop, "LARS": LARS, "Adam": Adam, "AMSGrad": lambda: Adam(amsgrad=True),
    "AdamW": lambda: Adam(weight_decay_rate=0.01),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_with_a_schedule(name, device, same_products):
    updater = both(device, make_optimizer=OPTIMIZERS[name], rate=schedule)
    assert updater._captured.num_graphs == 1


def test_two_hundred_steps(device, same_products):
    """With dropout, a schedule, a dynamic loss scale and Adam."""
    updater = both(device, make_optimizer=Adam, scale="dynamic", rate=schedule, steps=200)
    assert updater._captured.num_graphs == 1


def test_mixed16_with_a_dynamic_loss_scale(device, same_products):
    both(device, mode="mixed16", scale="dynamic", rate=schedule, steps=10)


@pytest.mark.parametrize("mode", ["float32", "mixed16"])
def test_a_constant_loss_scale_that_changes(mode, device, same_products):
    def each(k, net, optimizer, updater):
        optimizer.set_loss_scale(8.0 * (1 + k))

    updater = both(device, mode=mode, scale=8.0, each=each)
    assert updater._captured.num_graphs == 1


def test_overflows_leave_updates_out(device, same_products):
    """Inputs that overflow in the 5th and 6th step, and a parameter's state, counts and scale after it."""

    def each(k, net, optimizer, updater):
        net.fc.b.array[...] = np.inf if k in (5, 6) else 0

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        updater = both(device, scale="dynamic", each=each, steps=9)
    assert updater._captured.num_graphs == 1
    words = [str(w.message) for w in found if "NaN or infinity in the gradient of /fc/W" in str(w.message)]
    assert [int(re.search(r"update (\d+) is left out", w)[1]) for w in words] == [6, 7] * 2


@pytest.mark.parametrize("hooks", [(WeightDecay(1e-2),), (GradientClipping(0.1), WeightDecay(1e-2))])
def test_hooks(hooks, device, same_products):
    both(device, hooks=hooks, rate=schedule)


@pytest.mark.parametrize("mode", ["float32", "float16"])
def test_a_decay_that_follows_the_learning_rate(mode, device, same_products):
    both(device, hooks=(DecoupledWeightDecay(0.1, 0.01),), make_optimizer=MomentumSGD, rate=schedule, mode=mode)


def test_a_number_of_numpy_in_a_hook_changes(device, same_products):
    def each(k, net, optimizer, updater):
        optimizer.hooks.pre["WeightDecay"].rate = np.float64(0.1 if k < 5 else 0.3)

    both(device, hooks=(WeightDecay(0.1),), each=each, steps=10)


class Language(Chain):
    """A network of whole_models.py with its loss."""

    def __init__(self, net):
        super().__init__()
        with self.init_scope():
            self.net = net

    def forward(self, x, t):
        return F.softmax_cross_entropy(self.net(x), t.reshape(-1))


def words():
    numbers = np.random.default_rng(7)
    return [tuple(numbers.integers(0, 12, (2, 5)).astype(np.int32)) for _ in range(12)]


NETWORKS = {
    "LSTM": lambda: Language(whole_models.LanguageModel(12, 8)),
    "Transformer": lambda: Language(whole_models.Transformer(12, 16, 2, 0.3)),
}


@pytest.mark.parametrize("mode", ["float32", "mixed16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_language_models(name, mode, device, same_products):
    both(device, make=NETWORKS[name], data=words(), mode=mode, scale="dynamic", rate=schedule, steps=6)


def test_bottlenecks(device, same_products):
    def make():
        return L.Classifier(whole_models.Bottlenecks())

    both(device, make=make, data=examples(shape=(3, 16, 16)), make_optimizer=MomentumSGD, steps=6)


# ---- arguments of two steps


def launches(updater):
    """Of the graph of an updater: addresses of inputs and of the declared block by their place there."""
    [step] = updater._captured._steps.values()
    known = [("declared", step._block._device)] + [(f"input {k}", a) for k, a in enumerate(step._args)]
    ranges = [(name, a.data.ptr, a.data.ptr + max(a.nbytes, 1)) for name, a in known]

    def plain(argument):
        if isinstance(argument, tuple) and argument[0] == "at":
            for name, start, stop in ranges:
                if start <= argument[1] < stop:
                    return name, argument[1] - start
        return argument

    return [tuple(map(plain, launch)) for launch in step.graphs[0].launches]


def two_graphs(device, **options):
    """The launches of two consecutive steps, each captured."""
    _, updater = train(device, True, steps=5, **options)
    first = launches(updater)
    [step] = updater._captured._steps.values()
    step.graphs.clear()
    random.set_stream(3, 2, 17, 4)
    optimizer = updater.get_optimizer("main")
    optimizer.hyperparam.put("alpha", 0.5)
    reporter = Reporter()
    reporter.add_observer("main", optimizer.target)
    with reporter:
        step._capture(optimizer, optimizer.target, step._args, step._named)
    return first, launches(updater)


@pytest.mark.parametrize("name", ["images", *NETWORKS])
def test_no_argument_changes_outside_the_declared_block(name, device, on):
    if on != "whole":
        pytest.skip("the stand-in shows the arguments of a graph")
    options = {} if name == "images" else {"make": NETWORKS[name], "data": words()}
    first, second = two_graphs(device, scale="dynamic", **options)
    assert len(first) == len(second) > 10
    changed = [(a, b) for a, b in zip(first, second) if a != b]
    assert not changed, f"kernel arguments that change between steps outside the declared block: {changed}"


def test_a_number_that_changes_is_found(device, on):
    if on != "whole":
        pytest.skip("the stand-in shows the arguments of a graph")
    calls = []

    class Counting(Net):
        def forward(self, x, t):
            calls.append(0)
            return super().forward(x, t) * (1.0 + len(calls))

    first, second = two_graphs(device, make=Counting)
    assert [a for a, b in zip(first, second) if a != b]


# ---- what a graph is for


def warned(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = call()
    return result, [str(w.message) for w in found if w.category is UsageWarning]


def eager_words(device, **options):
    """The warnings of a run whose steps cannot be captured, which must equal an eager one."""
    with using_config("cudnn_deterministic", True):
        eager, _ = train(device, False, **dict(options))
        (captured, updater), said = warned(lambda: train(device, True, **dict(options)))
    assert_same(captured, eager)
    assert updater._captured.num_graphs == 0
    said = [w for w in said if "is not captured" in w]
    assert len(said) == 1, said
    return said[0]


def test_each_shape_has_its_graph(device, same_products):
    """10 examples in batches of 4: each epoch ends with 2."""
    from dbrdist.datasets import TupleDataset

    data = examples(10)
    with using_config("cudnn_deterministic", True):
        found = []
        for capture in (False, True):
            random.set_seed(3)
            net, optimizer = Net(), Adam()
            optimizer.setup(net.to_device(device))
            iterator = SerialIterator(TupleDataset(*zip(*data)), 5, seed=1)
            updater = StandardUpdater(iterator, optimizer, device=device, capture=capture)
            sizes = iter([5, 5, 3] * 7)
            iterator.next = lambda sizes=sizes, n=iterator.next: n()[: next(sizes)]
            for _ in range(21):
                updater.update()
            found.append({n: backend.to_cpu(p.array) for n, p in net.namedparams()})
    assert updater._captured.num_graphs == 2
    assert_same(*found[::-1])


def test_frozen_parameters_are_captured_anew(device, same_products):
    def each(k, net, optimizer, updater):
        if k in (5, 11):
            (net.conv.disable_update if k == 5 else net.conv.enable_update)()

    updater = both(device, each=each, steps=16)
    assert updater._captured.num_graphs == 1


def test_frozen_parameters_have_the_gradients_of_the_last_step(device, same_products):
    """Also after a program has cleared them between replays."""
    found = []

    def each(k, net, optimizer, updater):
        if k == 0:
            net.conv.disable_update()
        if k == 6:
            net.cleargrads()
        if k == 8:
            found.append({n: backend.to_cpu(p.grad) for n, p in net.namedparams()})

    updater = both(device, each=each, steps=9)
    assert updater._captured.num_graphs == 1
    assert_same(*found)


def test_switches_and_hooks_have_graphs_of_their_own(device, same_products):
    def each(k, net, optimizer, updater):
        if k == 5:
            optimizer.add_hook(WeightDecay(0.1), "decay")
        if k == 10:
            optimizer.set_loss_scale(4.0)

    updater = both(device, each=each, steps=15)
    assert updater._captured.num_graphs == 2  # that of the time before the hook is gone


def test_a_loss_function_without_a_hash(device, same_products):
    class Halved(list):
        def __call__(self, x, t):
            return self[0](x, t) * 0.5

    def each(k, net, optimizer, updater):
        if k == 0:
            updater.loss_func = Halved([net])

    assert both(device, each=each)._captured.num_graphs == 1


def test_gradients_that_were_cleared_are_there_again(device, same_products):
    def each(k, net, optimizer, updater):
        net.cleargrads()

    both(device, each=each)


def test_steps_race_with_nothing(device, xp, same_products):
    """Between the steps the program computes with parameters and reports, on its own stream."""

    def each(k, net, optimizer, updater):
        net.fc.W.array[...] = net.fc.W.array * np.float32(0.99)

    both(device, each=each)


# ---- what runs eagerly, and why


@pytest.mark.parametrize("name", ["Reads", "Counts"])  # refused in a capture, and before it
def test_a_refused_step_keeps_no_memory_for_a_graph(device, same_products, monkeypatch, name):
    pools = []

    class Pool(graph_of_step.PrivatePool):
        def __init__(self):
            super().__init__()
            pools.append(weakref.ref(self))

    monkeypatch.setattr(graph_of_step, "PrivatePool", Pool)
    _, said = warned(lambda: train(device, True, make=globals()[name], steps=6))
    gc.collect()
    assert len(said) == len(pools) == 1 and pools[0]() is None


class Reads(Net):
    def forward(self, x, t):
        loss = super().forward(x, t)
        if float(loss.array) > 1e6:
            raise ValueError
        return loss


class Counts(Net):
    count = 0

    def forward(self, x, t):
        self.count += 1
        return super().forward(x, t)


class CountsInside(Net):
    def __init__(self):
        super().__init__()
        self.counts = {"steps": 0}

    def forward(self, x, t):
        self.counts["steps"] += 1
        return super().forward(x, t) / self.counts["steps"]


class Remembers(Net):
    last = None

    def forward(self, x, t):
        loss = super().forward(x, t)
        before, self.last = self.last, loss
        if before is not None:
            loss = loss + 0.1 * before
        return loss


class Rebinds(Net):
    mean = None

    def forward(self, x, t):
        self.mean = x.mean(axis=0)
        return super().forward(x, t)


class Noise(Net):
    def forward(self, x, t):
        return super().forward(F.gaussian(x, x * 0.01), t)


class Uploads(Net):
    def forward(self, x, t):
        return super().forward(x * backend.get_array_module(x).asarray(np.ones(8, x.dtype)), t)


class Masks(Net):
    def forward(self, x, t):
        return super().forward(x, t) + F.sum(x[x > 3]) * 0.0


REASONS = {
    "Reads": (Reads, r"test_gpu_graphs\.py, line \d+, in forward: if float\(loss\.array\) > 1e6:"),
    "Counts": (Counts, r"it changes the attribute 'count' of the link /, from \d to \d"),
    "CountsInside": (CountsInside, r"it changes what the attribute 'counts' of the link / holds"),
    "Remembers": (Remembers, r"it computes with the Variable 'last' of the link /, from the step before"),
    "Rebinds": (Rebinds, r"it rebinds the array 'mean' of the link /"),
    "Noise": (Noise, r"copies an array from the host.*in forward: return super\(\)\.forward\(F\.gaussian"),
    "Uploads": (Uploads, r"it copies an array from the host, .*in forward: return super"),
    "Masks": (Masks, r"a read or a wait of the host .*in forward: return super"),
}


@pytest.mark.parametrize("name", REASONS)
def test_a_step_that_cannot_be_captured_says_why(name, device, on, same_products):
    make, reason = REASONS[name]
    words = eager_words(device, make=make)
    assert re.search(reason if on == "whole" else r"line|link", words), words


@pytest.mark.parametrize("options, reason", [
    ({"make_optimizer": AdaDelta}, "AdaDeltaRule has no kernel of its own for float32 on a GPU"),
    ({"hooks": (GradientNoise(0.1),)}, "the hook GradientNoise of the optimizer may compute on the host"),
    ({"make_optimizer": lambda: Adam(adabound=True)}, "AdamRule has no kernel"),
])  # fmt: skip
def test_optimizers_and_hooks_that_cannot_be_captured(options, reason, device, same_products):
    assert reason in eager_words(device, **options)


def test_hooks_of_the_program_run_eagerly(device, same_products):
    def halve(optimizer):
        for p in optimizer.target.params():
            p.grad[...] *= 0.5

    assert "the hook halve of the optimizer may compute on the host" in eager_words(device, hooks=(halve,))


def test_the_cpu_runs_eagerly(on):
    words = eager_words(backend.get_device("@numpy"))
    assert "the model is in host memory; move it to a GPU" in words


def test_parallel_updaters_refuse(device):
    optimizer = SGD().setup(Net().to_device(device))
    with pytest.raises(ValueError, match="a CUDA graph is of one device"):
        ParallelUpdater(SerialIterator(examples(), 4), optimizer, devices={"main": device}, capture=True)


def multi_node(device, **options):
    from dbrdist.comm import create_communicator, create_multi_node_optimizer

    comm = create_communicator("single")
    optimizer = create_multi_node_optimizer(Adam(), comm, **options).setup(Net().to_device(device))
    return StandardUpdater(SerialIterator(examples(), 4, seed=1), optimizer, device=device, capture=True), optimizer


def test_a_multi_node_optimizer_of_one_rank_is_captured(device, same_products):
    with using_config("cudnn_deterministic", True):
        eager, _ = train(device, False)
        random.set_seed(3)
        updater, optimizer = multi_node(device)
        _, said = warned(lambda: [updater.update() for _ in range(8)])
    assert updater._captured.num_graphs == 1
    assert not [w for w in said if "captured" in w]
    assert (optimizer.t, optimizer.num_samples) == (8, 4)
    for name, p in optimizer.target.namedparams():
        np.testing.assert_array_equal(backend.to_cpu(p.array), eager[name], name)


def test_steps_of_several_calls_run_eagerly(device, same_products):
    updater, _ = multi_node(device, accumulate=2)
    _, said = warned(lambda: [updater.update() for _ in range(8)])
    assert updater._captured.num_graphs == 0
    assert len([w for w in said if "steps with accumulate=2 are not captured" in w]) == 1


def test_an_error_of_the_step_is_raised(device, same_products):
    """After the failed capture the step runs eagerly, where the error is the program's own."""

    class Fails(Net):
        calls = []

        def forward(self, x, t):
            self.calls.append(0)
            if len(self.calls) > 3:
                raise KeyError("mine")
            return super().forward(x, t)

    with pytest.raises(KeyError, match="mine"):
        eager_words(device, make=Fails)


def test_an_own_update_says_that_it_runs_eagerly(device, on):
    """In one line, once; one that calls StandardUpdater's is captured."""

    class Own(StandardUpdater):
        def update_core(self):
            net = self.get_optimizer("main").target
            x, t = self.converter(self.get_iterator("main").next(), self.device)
            self.get_optimizer("main").update(net, x, t)

    class Counting(StandardUpdater):
        num = 0

        def update_core(self):
            super().update_core()
            self.num += 1

    for kind, num_said in ((Own, 1), (Counting, 0)):
        optimizer = SGD(0.1).setup(Net())
        updater = kind(SerialIterator(examples(), 4), optimizer, device=device, capture=True)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(5):
                updater.update()
        said = [str(w.message) for w in found if "CUDA graph" in str(w.message)]
        assert len(said) == num_said, said
        assert all("update_core of Own is the program's own" in words for words in said)
        assert updater._captured.num_graphs == 1 - num_said


def test_one_capture_at_a_time(device, monkeypatch):
    """Collection and pinned memory are switched for all threads meanwhile: a second thread waits."""
    import threading

    most, inside, lock = [0], [0], threading.Lock()

    @contextlib.contextmanager
    def record(self):
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        gate.wait(0.05)
        with lock:
            inside[0] -= 1
        raise KeyError
        yield

    def capture(step):
        with contextlib.suppress(KeyError):
            step._capture(None, None, (), {})

    gate = threading.Event()
    monkeypatch.setattr(graph_of_step.GraphOfStep, "_here", record)
    steps = [graph_of_step.GraphOfStep(None, None) for _ in range(4)]
    threads = [threading.Thread(target=capture, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1] and inside == [0]
