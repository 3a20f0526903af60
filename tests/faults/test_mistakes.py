"""Natural mistakes, which earlier versions took without a word or refused in words that did not help."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import datasets, iterators, optimizer_hooks, optimizers, serializers, training
from dbrdist.comm import create_multi_node_optimizer, run_threads, scatter_dataset
from dbrdist.training import extensions, triggers

X = np.linspace(-1, 1, 80, dtype=np.float32).reshape(20, 4)
T = (np.arange(20) % 3).astype(np.int32)
DATA = datasets.TupleDataset(X, T)
IMAGES = np.zeros((2, 3, 8, 8), np.float32)


class Net(dbrdist.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.base = L.Linear(4, 8)
            self.head = L.Linear(8, 3)

    def forward(self, x):
        return self.head(F.relu(self.base(x)))


def sgd(link):
    return optimizers.SGD(0.1).setup(link)


def trainer(model=None, data=DATA, stop=(2, "epoch"), extend=(), **options):
    model = L.Classifier(Net()) if model is None else model
    updater = training.StandardUpdater(iterators.SerialIterator(data, 5, shuffle=False), sgd(model), **options)
    return training.Trainer(updater, stop, "out", extensions=extend)


def said(program):
    """The words of the error that a program ends with and of the warnings that it gives, each in a line."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            program()
            words = []
        except Exception as error:
            words = [f"{type(error).__name__}: {error.args[0] if isinstance(error, KeyError) else error}"]
    return "\n".join([*words, *(f"warning: {w.message}" for w in given)])


# ---- frozen layers


@pytest.mark.parametrize("when", ["before setup", "by a second optimizer"])
def test_frozen_layers_stay_frozen(when):
    net = Net()
    if when == "before setup":
        net.base.disable_update()
    optimizer = sgd(net)
    if when != "before setup":
        net.base.disable_update()
        optimizer = optimizers.Adam().setup(net)
    before = net.base.W.array.copy()
    optimizer.update(lambda: F.softmax_cross_entropy(net(X), T))
    np.testing.assert_array_equal(net.base.W.array, before)


# ---- mistakes without a word


def outside(**attributes):
    """A network whose links were not made within init_scope."""
    net = dbrdist.Chain()
    for name, value in attributes.items():
        setattr(net, name, value)
    return net


class Mixed(Net):
    def __init__(self):
        super().__init__()
        self.more = L.Linear(8, 8)

    def forward(self, x):
        return self.head(self.more(F.relu(self.base(x))))


def within(name):
    net = dbrdist.Chain()
    with net.init_scope():
        setattr(net, name, L.Linear(2, 2))


def update(net, loss):
    sgd(net).update(loss)


def without_graph():
    net = Net()
    with dbrdist.no_backprop_mode():
        update(net, lambda: F.softmax_cross_entropy(net(X), T))


def from_an_array():
    net = Net()
    update(net, lambda: F.softmax_cross_entropy(net(X).array, T))


def clipped():
    net = Net()
    optimizer = sgd(net)
    optimizer.add_hook(optimizer_hooks.GradientClipping(-1))
    optimizer.update(lambda: F.softmax_cross_entropy(net(X), T))


def never_reported():
    made = trainer(stop=(3, "epoch"), extend=[extensions.LogReport()])
    made.extend(lambda trainer: None, name="own", trigger=triggers.MaxValueTrigger("validation/accuracy"))
    made.run()


def without_weights():
    serializers.save_npz("lazy.npz", dbrdist.Sequential(L.Linear(None, 3)))
    serializers.load_npz("lazy.npz", dbrdist.Sequential(L.Linear(4, 3)))


class Endless(iterators.SerialIterator):
    """Ends a loop that would go on for ever."""

    batches = 0

    def __next__(self):
        self.batches += 1
        if self.batches > 1000:
            raise StopIteration
        return super().__next__()

    next = __next__


SILENT = {
    "a network without parameters": (lambda: sgd(outside()), "no parameters"),
    "links in a list": (lambda: sgd(outside(layers=[L.Linear(2, 2)])), "init_scope"),
    "a link outside of init_scope beside others": (lambda: sgd(Mixed()), "more"),
    "a loss of an array": (from_an_array, "graph"),
    "a loss without a graph": (without_graph, "graph"),
    **{f"a child called {name}": (lambda name=name: within(name), name) for name in ("links", "copy", "params")},
    "a rate below 0": (lambda: optimizers.SGD(-1), "lr"),
    "a rate of moments above 1": (lambda: optimizers.Adam(beta1=1.5), "beta1"),
    "a decay below 0": (lambda: optimizers.AdamW(weight_decay_rate=-1), "weight_decay_rate"),
    "clipping below 0": (clipped, "GradientClipping"),
    "3.5 outputs": (lambda: L.Linear(4, 3.5), "out_size"),
    "a stride of 1.5": (lambda: L.Convolution2D(3, 4, 3, stride=1.5), "stride"),
    "a window of 2.5": (lambda: F.max_pooling_2d(IMAGES, 2.5), "ksize"),
    "a metric that nobody reports": (never_reported, "validation/accuracy"),
    "a file without weights": (without_weights, "W"),
    "an evaluator that never ends": (
        lambda: extensions.Evaluator(Endless(DATA, 5), L.Classifier(Net()))(),
        "repeat",
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_a_mistake_is_not_silent(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, words = SILENT[name]
    found = said(program)
    assert re.search(words, found), f"said: {found!r}"


# ---- several ranks


def step(comm, data, **divided):
    updater = training.StandardUpdater(iterators.SerialIterator(data, 4, **divided), sgd(L.Classifier(Net())))
    for _ in range(3):
        updater.update()


def same_examples(comm):
    model = L.Classifier(Net())
    optimizer = create_multi_node_optimizer(optimizers.SGD(0.1), comm).setup(model)
    updater = training.StandardUpdater(iterators.SerialIterator(DATA, 4), optimizer)
    for _ in range(12):
        updater.update()


def evaluated(comm):
    iterator = iterators.SerialIterator(DATA, 4, repeat=False, shuffle=False, rank=comm.rank, size=comm.size)
    evaluator = extensions.Evaluator(iterator, L.Classifier(Net()))
    evaluator()
    evaluator()


def logged(comm):
    made = trainer(extend=[extensions.LogReport()])
    made.extend(lambda trainer: comm.barrier(), name="together", trigger=(1, "iteration"))
    made.run()


OF_RANKS = {
    "an optimizer of one rank on divided data": (
        lambda comm: step(comm, DATA, rank=comm.rank, size=comm.size),
        "create_multi_node_optimizer",
    ),
    "data that is divided twice": (
        lambda comm: step(comm, scatter_dataset(DATA, comm), rank=comm.rank, size=comm.size),
        "divide",
    ),
    "all ranks on the same examples": (same_examples, "same examples.*scatter_dataset"),
    "an evaluator of one rank on its part": (evaluated, "create_multi_node_evaluator"),
    "one log of two ranks": (logged, "LogReport|log"),
}


@pytest.mark.parametrize("name", OF_RANKS)
def test_a_mistake_with_ranks_is_not_silent(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, words = OF_RANKS[name]
    found = said(lambda: run_threads(2, program))
    assert re.search(words, found), f"said: {found!r}"


# ---- mistakes whose words did not help


def train_step(model, data=DATA, **options):
    return lambda: trainer(model, data, **options).updater.update()


def loss_of(value):
    class Own(Net):
        def forward(self, x, t):
            return value

    return Own()


def hooked():
    net = Net()
    optimizer = sgd(net)
    optimizer.add_hook(optimizer_hooks.WeightDecay)
    optimizer.update(lambda: F.sum(net(X)))


def a_single_array():
    np.save("a.npy", X)
    serializers.load_npz("a.npy", Net())


V = dbrdist.Variable(X)
UNHELPFUL = {
    "no Classifier": (train_step(dbrdist.Sequential(L.Linear(4, 3))), "L.Classifier"),
    "no labels": (train_step(L.Classifier(Net()), X), r"\(input, label\)"),
    "a transform that returns nothing": (
        train_step(L.Classifier(Net()), datasets.TransformDataset(DATA, lambda example: None)),
        "None",
    ),
    "a list to a link": (lambda: L.Linear(2, 2)([[1.0, 2.0]]), "expected an array or Variable, got list"),
    "a batch of 2.5": (lambda: next(iterators.SerialIterator(DATA, 2.5)), "batch_size"),
    "a batch of text": (lambda: iterators.SerialIterator(DATA, "32"), "batch_size"),
    "a batch of None": (lambda: iterators.SerialIterator(DATA, None), "batch_size"),
    "a hook without brackets": (hooked, r"WeightDecay\("),
    "a class as layer": (lambda: dbrdist.Sequential(L.Linear, F.relu)(X), "class Linear"),
    "PrintReport alone": (lambda: trainer(extend=[extensions.PrintReport(["epoch"])]).run(), "needs a LogReport"),
    "a loss that is a float": (train_step(loss_of(1.0)), "loss.* got float"),
    "a loss that is not returned": (train_step(loss_of(None)), "return"),
    "padding as large as the window": (lambda: F.max_pooling_2d(IMAGES, 2, 2, 3), "ksize 2, stride 2, pad 3"),
    "a single array as weights": (a_single_array, "a.npy.*single array"),
    "cross_entropy": (lambda: F.cross_entropy, "PyTorch's name; write .*softmax_cross_entropy"),
    **{
        f"{type(thing).__name__}.{name}": (lambda thing=thing, name=name: getattr(thing, name), "write ")
        for thing, names in (
            (Net(), ("eval", "parameters", "state_dict", "to")),
            (V, ("detach",)),
            (optimizers.SGD(), ("zero_grad", "step")),
        )
        for name in names
    },
    "DataLoader": (lambda: datasets.DataLoader, "Iterator"),
    "no_grad": (lambda: dbrdist.no_grad, "no_backprop_mode"),
    "padding=1": (lambda: L.Convolution2D(3, 4, 3, padding=1), "'pad'"),
    "Adam(lr=...)": (lambda: optimizers.Adam(lr=0.1), "'alpha'"),
    "SGD(weight_decay=...)": (lambda: optimizers.SGD(weight_decay=0.1), "WeightDecay"),
}


@pytest.mark.parametrize("name", UNHELPFUL)
def test_the_words_of_a_refusal_help(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, words = UNHELPFUL[name]
    found = said(program)
    assert re.search(words, found), f"said: {found!r}"


def test_an_error_in_the_loop_is_said_once(tmp_path, monkeypatch, capsys):
    """The traceback has it, and no line before has the tuple that the error was made of."""
    monkeypatch.chdir(tmp_path)
    said(trainer(data=datasets.TupleDataset(X, X)).run)
    assert "ArgumentError(" not in capsys.readouterr().err


# ---- commands

CONFIG = "model: mlp\ndata: digits\nbatch: 100\nepochs: 1\nout: run\noptimizer: {name: adam, alpha: 0.01}\n"


@pytest.mark.programs
def test_the_learning_rate_has_two_names(start):
    start.file("c.yaml", CONFIG)
    code, text = start("dbrdist-train", "c.yaml", "optimizer.lr=0.002", "--dry-run")
    assert code == 0, text


@pytest.mark.programs
@pytest.mark.parametrize(("option", "entry"), [("--epochs", "epochs=3"), ("--batch-size", "batch=3")])
def test_options_of_other_commands_are_entries(start, option, entry):
    start.file("c.yaml", CONFIG)
    code, text = start("dbrdist-train", "c.yaml", option, "3")
    assert code != 0 and entry in text, text


@pytest.mark.programs
def test_an_export_takes_a_configuration_too(start):
    start.file("c.yaml", CONFIG)
    assert start("dbrdist-train", "c.yaml")[0] == 0
    code, text = start("dbrdist-train", "c.yaml", "--export", "run", "net.safetensors")
    assert code == 0 and (start.folder / "net.safetensors").exists(), text


@pytest.mark.programs
def test_a_refused_prediction_speaks_of_predictions(start):
    """A run of an own network: what to write is an option of its own, not another's."""
    start.file("own.py", "import dbrdist.links as L\n\n\ndef net():\n    return L.Linear(64, 10)\n")
    start.file("flat.py", "from dbrdist.datasets import get_digits\n\n\ndef data():\n    return get_digits(ndim=1)\n")
    start.file("c.yaml", CONFIG.replace("mlp", "'own:net'").replace("digits", "'flat:data'"))
    assert start("dbrdist-train", "c.yaml")[0] == 0
    _, text = start("dbrdist-train", "--predict", "run", "a.png")
    assert "--evaluate" not in text and "--predict" in text, text
