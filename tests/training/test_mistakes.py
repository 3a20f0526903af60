"""Mistakes with trainers, ranks, files and arguments: each is refused, or warned of once at the user's line."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import datasets, iterators, optimizers, serializers, training
from dbrdist.comm import create_multi_node_optimizer, run_threads
from dbrdist.errors import CheckpointError, UsageWarning
from dbrdist.training import extensions, triggers
from tests.training.mistaken import (
    DATA,
    IMAGES,
    NET,
    Net,
    X,
    sgd,
    trainer,
    update,
)


def loop(update):
    class Own(training.StandardUpdater):
        def update(self):
            update(self)

    iterator = iterators.SerialIterator(DATA, 5)
    return training.Trainer(Own(iterator, sgd(L.Classifier(Net()))), (3, "iteration"))


def loaded(value, saved):
    """A network whose entry n has the saved value in the place of ``value``, an array of its type."""
    net = dbrdist.Link()
    net.add_persistent("n", np.full(3, value))
    np.savez("saved.npz", n=np.full(3, saved))
    serializers.load_npz("saved.npz", net)
    return net.n


REFUSED = {
    "epochs as a unit": (lambda: trainer(stop=(2, "epochs")), ValueError, "got 'epochs'; did you mean 'epoch'"),
    "steps": (lambda: trainer(stop=(2, "steps")), ValueError, "did you mean 'iteration'"),
    "Epoch": (lambda: trainer().extend(print, name="p", trigger=(2, "Epoch")), ValueError, "did you mean 'epoch'"),
    "unit first": (lambda: trainer(stop=("epoch", 2)), ValueError, r"write \(2, 'epoch'\)"),
    "a number of epochs": (lambda: trainer(stop=20), TypeError, r"write \(20, 'epoch'\) or \(20, 'iteration'\)"),
    "a unit alone": (lambda: trainer(stop="epoch"), TypeError, r"write \(1, 'epoch'\)"),
    "trigger of snapshot": (
        lambda: extensions.snapshot(trigger=(1, "epoch")),
        TypeError,
        r"write trainer\.extend\(\.\.\., trigger=",
    ),
    "network to snapshot": (lambda: extensions.snapshot(NET), TypeError, r"savefun: .*got Net; .*snapshot_object\("),
    "network as condition": (lambda: extensions.snapshot(condition=NET), TypeError, "condition: expected a function"),
    "no main iterator": (
        lambda: training.StandardUpdater({"train": iterators.SerialIterator(DATA, 5)}, sgd(NET)).update(),
        KeyError,
        "no iterator is called 'main': the main one must be called 'main'; there are train",
    ),
    "no main optimizer": (
        lambda: training.StandardUpdater(iterators.SerialIterator(DATA, 5), {"opt": sgd(NET)}).update(),
        KeyError,
        "no optimizer is called 'main'.*there are opt",
    ),
    # data
    "a share of a dataset": (
        lambda: datasets.split_dataset(DATA, 0.8),
        TypeError,
        r"write int\(0\.8 \* len\(dataset\)",
    ),
    "text as seed": (lambda: datasets.split_dataset_random(DATA, 5, seed="a"), TypeError, "seed: expected an integer"),
    "transform of entries": (
        lambda: datasets.TransformDataset(DATA, lambda x, t: (x, t))[0],
        TypeError,
        r"write def transform\(example\): x, t = example",
    ),
    "mixing and data swapped": (
        lambda: datasets.MixedDataset(datasets.CutMix(), DATA, 3),
        TypeError,
        r"write MixedDataset\(dataset, \[Mixup\(\), CutMix\(\)\], num_classes\)",
    ),
    "class of mixing": (lambda: datasets.MixedDataset(DATA, datasets.CutMix, 3), TypeError, "the class CutMix; write"),
    "transform as mixing": (lambda: datasets.MixedDataset(DATA, [len], 3), TypeError, "mixings: expected ways to mix"),
    "appended": (lambda: DATA.append(DATA[0]), AttributeError, "write dbrdist.datasets.ConcatenatedDataset"),
    "mapped": (lambda: DATA.map(len), AttributeError, "write dbrdist.datasets.TransformDataset"),
    # trainers
    "snapshot without brackets": (
        lambda: trainer(extend=[extensions.snapshot]),
        TypeError,
        r"got the function snapshot; write snapshot\(\.\.\.\)",
    ),
    "observe_lr without brackets": (lambda: trainer(extend=[extensions.observe_lr]), TypeError, "write observe_lr"),
    "trigger as extension": (
        lambda: trainer(extend=[triggers.EarlyStoppingTrigger(monitor="main/loss")]),
        TypeError,
        "got a trigger, EarlyStoppingTrigger; pass it as trigger= of extend, or as the stop trigger",
    ),
    "text as keys": (lambda: extensions.LogReport("main/loss"), TypeError, r"keys: .*write \['main/loss'\]"),
    "patience below 0": (
        lambda: triggers.EarlyStoppingTrigger(monitor="main/loss", patience=-1),
        ValueError,
        "EarlyStoppingTrigger: patience: expected 0 or more, got -1",
    ),
    "name of a schedule": (
        lambda: extensions.FollowSchedule("cosine", "lr"),
        TypeError,
        "FollowSchedule: schedule: expected a function of the epochs done, got str",
    ),
    "a bar that is never drawn": (lambda: extensions.ProgressBar(update_interval=0), ValueError, "update_interval"),
    "arguments of snapshot_object": (
        lambda: extensions.snapshot_object("net", NET),
        TypeError,
        r"target: .*got str; write snapshot_object\(object, filename\)",
    ),
    "a number as snapshot": (lambda: extensions.snapshot_object(3, "net"), TypeError, "target: .*got int"),
    "a link as file name": (lambda: extensions.snapshot_object(NET, 3), TypeError, "filename: expected a format text"),
    "a name in a format": (
        lambda: extensions.snapshot(filename="snapshot_{iteration}"),
        ValueError,
        r"such as \{.updater.iteration\}, got \{iteration\}",
    ),
    "iterator class": (
        lambda: training.StandardUpdater(iterators.SerialIterator, sgd(NET)),
        TypeError,
        "SerialIterator",
    ),
    "optimizer class": (
        lambda: training.StandardUpdater(iterators.SerialIterator(X, 2), optimizers.SGD),
        TypeError,
        "the class SGD",
    ),
    "dataset as iterator": (
        lambda: training.StandardUpdater(DATA, sgd(NET)),
        TypeError,
        "got TupleDataset; write iterators",
    ),
    "link as optimizer": (
        lambda: training.StandardUpdater(iterators.SerialIterator(X, 2), NET),
        TypeError,
        "expected an optimizer, got Net",
    ),
    "optimizer as updater": (lambda: training.Trainer(sgd(NET)), TypeError, "expected an updater, got SGD"),
    "updater class": (lambda: training.Trainer(training.StandardUpdater), TypeError, "the class StandardUpdater"),
    "trigger class": (lambda: trainer(stop=triggers.EarlyStoppingTrigger), TypeError, "the class EarlyStoppingTrigger"),
    "extension class": (lambda: trainer().extend(extensions.LogReport), TypeError, r"write LogReport\(\)"),
    "PrintReport alone": (
        lambda: trainer(extend=[extensions.PrintReport(["epoch"])]).run(),
        ValueError,
        "PrintReport needs a LogReport",
    ),
    "evaluator repeats": (
        lambda: extensions.Evaluator(iterators.SerialIterator(DATA, 2), NET),
        ValueError,
        "write|repeat=False",
    ),
    "evaluator over data": (
        lambda: extensions.Evaluator(DATA, NET),
        TypeError,
        "expected an iterator, got TupleDataset",
    ),
    "evaluator swapped": (
        lambda: extensions.Evaluator(NET, iterators.SerialIterator(DATA, 2, repeat=False)),
        TypeError,
        "expected a link, got SerialIterator",
    ),
    "evaluator class": (
        lambda: extensions.Evaluator(iterators.SerialIterator(DATA, 2, False), Net),
        TypeError,
        "the class Net",
    ),
    "unknown hyperparameter": (
        lambda: trainer(extend=[extensions.ExponentialShift("rate", 0.5, 1)]).run(),
        AttributeError,
        "SGD has no hyperparameter 'rate'; it has lr",
    ),
    "schedule of unknown": (
        lambda: trainer(extend=[extensions.FollowSchedule(optimizers.schedules.constant(1), "rate")]).run(),
        AttributeError,
        "FollowSchedule: SGD has no hyperparameter 'rate'",
    ),
    # files
    "swapped load": (lambda: serializers.load_npz(NET, "a.npz"), TypeError, r"write load_npz\(file, object\)"),
    "swapped save": (lambda: serializers.save_npz(NET, "a.npz"), TypeError, r"write save_npz\(file, object\)"),
    "save a class": (lambda: serializers.save_npz("a.npz", Net), TypeError, "the class Net"),
    "save a list": (lambda: serializers.save_npz("a.npz", [NET]), TypeError, "such as a link, got list"),
    # arguments
    "padding": (lambda: L.Convolution2D(3, 4, 3, padding=1), TypeError, "'padding'; did you mean 'pad'"),
    "kernel_size": (lambda: L.Convolution2D(3, 4, kernel_size=3), TypeError, "'kernel_size'; did you mean 'ksize'"),
    "in_channels": (lambda: L.Linear(in_channels=3), TypeError, "did you mean 'in_size'"),
    "in_features": (lambda: L.Linear(in_features=3, out_features=4), TypeError, "did you mean 'in_size'"),
    "bias": (lambda: L.Linear(3, 4, bias=False), TypeError, "did you mean 'nobias'"),
    "num_features": (lambda: L.BatchNormalization(num_features=3), TypeError, "did you mean 'size'"),
    "Adam lr": (lambda: optimizers.Adam(lr=0.1), TypeError, "did you mean 'alpha'"),
    "betas": (lambda: optimizers.Adam(betas=(0.9, 0.99)), TypeError, "beta1 and beta2"),
    "weight_decay": (lambda: optimizers.SGD(weight_decay=0.1), TypeError, r"add_hook\(WeightDecay\(rate\)\)"),
    "weight_decay of AdamW": (
        lambda: optimizers.AdamW(weight_decay=0.1),
        TypeError,
        "did you mean 'weight_decay_rate'",
    ),
    "momentum": (lambda: optimizers.SGD(momentum=0.9), TypeError, "the optimizer MomentumSGD"),
    "typing error": (lambda: optimizers.MomentumSGD(momentun=0.9), TypeError, "did you mean 'momentum'"),
    "p": (lambda: F.dropout(X, p=0.5), TypeError, "did you mean 'ratio'"),
    "dim": (lambda: F.softmax(X, dim=1), TypeError, "did you mean 'axis'"),
    "kernel_size of a function": (lambda: F.max_pooling_2d(IMAGES, kernel_size=2), TypeError, "did you mean 'ksize'"),
    "num_workers": (
        lambda: iterators.MultiprocessIterator(DATA, 4, num_workers=2),
        TypeError,
        "did you mean 'n_processes'",
    ),
    "drop_last": (lambda: iterators.SerialIterator(DATA, 4, drop_last=True), TypeError, "last='drop'"),
    "epochs": (lambda: training.Trainer(None, epochs=3), TypeError, r"stop_trigger=\(epochs, 'epoch'\)"),
    "loss_fn": (lambda: trainer(loss_fn=print), TypeError, "unknown arguments: loss_fn; did you mean 'loss_func'"),
    "three sizes of two axes": (
        lambda: L.Convolution2D(3, 4, (3, 3, 3)),
        ValueError,
        r"expected a number, or one for rows and one for columns, got \(3, 3, 3\)",
    ),
    "three sizes of a pool": (
        lambda: F.max_pooling_2d(IMAGES, (2, 2, 2)),
        ValueError,
        "one for rows and one for columns",
    ),
    "no out_channels": (lambda: L.Convolution2D(3, None, 3), ValueError, "out_channels: expected an integer, got None"),
    "no out_channels of 3-d": (lambda: L.Deconvolution3D(3, None, 3), ValueError, "out_channels: expected an integer"),
    "an argument left out": (
        lambda: L.NStepLSTM(1, 4, 3),
        TypeError,
        r"NStepLSTM\(\) missing 1 required positional argument: 'dropout'; it takes n_layers, in_size, out_size, d",
    ),
    "arguments too many": (
        lambda: L.LayerNormalization(4, 1e-5, None, None, 5),
        TypeError,
        r"LayerNormalization\(\) takes from .* were given; it takes size, eps",
    ),
    "loss as converter": (
        lambda: trainer(converter=F.softmax_cross_entropy),
        TypeError,
        "StandardUpdater: converter: .*; a loss is given as loss_func=softmax_cross_entropy",
    ),
    "network as converter": (
        lambda: extensions.Evaluator(iterators.SerialIterator(DATA, 5, repeat=False), NET, L.Classifier(NET)),
        TypeError,
        "Evaluator: converter: .* got Classifier; a loss is given as eval_func=Classifier",
    ),
    "device as converter": (
        lambda: trainer(converter="cpu").updater.update(),
        TypeError,
        "converter: expected a function .* got str 'cpu'",
    ),
    "examples as iterator": (
        lambda: extensions.Evaluator(list(DATA), NET),
        TypeError,
        "expected an iterator, got a list of examples; write iterators.SerialIterator",
    ),
    "priority in words": (lambda: trainer().extend(print, priority="high"), TypeError, "priority: expected a number"),
    "a file as folder": (
        lambda: (Path("a").touch(), trainer(out="a/b").run()),
        NotADirectoryError,
        "out: expected a folder, and 'a/b' is a file, or below one",
    ),
    "points in words": (
        lambda: triggers.ManualScheduleTrigger([2, "5"], "epoch"),
        TypeError,
        "points: expected numbers",
    ),
    "ranges of LinearShift": (
        lambda: extensions.LinearShift("lr", (0, 1000), (0.1, 0.01)),
        ValueError,
        "time_range: expected the first call and then the last",
    ),
    "noise in words": (
        lambda: dbrdist.optimizer_hooks.GradientNoise(0.1, "normal"),
        TypeError,
        "noise_func: expected a function, got 'normal'",
    ),
    "dynamic": (lambda: sgd(NET).loss_scaling("dynamic"), TypeError, r"got 'dynamic'; loss_scaling\(\) is dynamic"),
    "scale in words": (lambda: sgd(NET).loss_scaling(scale="128"), TypeError, "loss_scale: expected a number .*'128'"),
    "numbers of a wider type": (
        lambda: loaded(np.int32(0), np.int64(2**40)),
        CheckpointError,
        "n: the saved state has int64 numbers that int32 cannot hold",
    ),
    "filename of LogReport": (lambda: extensions.LogReport(file_name="a"), TypeError, "did you mean 'filename'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        program()


# ---- warnings -------------------------------------------------------------------------------------------------------


def beside():
    net = Net()
    net.extra = L.Linear(2, 2)
    return net


def listed():
    net = Net()
    net.blocks = [L.Linear(2, 2), L.Linear(2, 2)]
    return net


def no_gradient():
    sgd(Net()).update()


def keys(extension, stop=(2, "epoch"), **options):
    def run():
        made = trainer(stop=stop)
        made.extend(extension(), **options)
        made.run()

    return run


class Reports(L.Classifier):
    """Reports a value beside the loss."""

    def __init__(self, value):
        super().__init__(Net())
        self.value = value

    def forward(self, x, t):
        loss = super().forward(x, t)
        dbrdist.report({"y": self.value}, self)
        return loss


def runs(extension, stop, **options):
    def run():
        made = trainer(stop=stop)
        made.extend(extension(), **options)
        made.run()

    return run


def manual(*points, unit="epoch"):
    return triggers.ManualScheduleTrigger(list(points), unit)


def rarely_shifted():
    shift = extensions.ExponentialShift("lr", 0.5)
    shift.trigger = (10, "epoch")
    return shift


def several_batches():
    """With an updater whose steps take five batches each, 8 of them are 10 epochs."""

    class Updater(training.StandardUpdater):
        def update_core(self):
            for _ in range(5):
                super().update_core()

    called, optimizer = [], optimizers.SGD(0.1).setup(L.Classifier(Net()))
    made = training.Trainer(Updater(iterators.SerialIterator(DATA, 4), optimizer), (8, "iteration"))
    made.extend(lambda trainer: called.append(trainer.updater.epoch), name="mine", trigger=(5, "epoch"))
    made.run()
    assert called == [5]


class Trains(training.StandardUpdater):
    def update_core(self):
        pass


def without_updates():
    training.Trainer(Trains(iterators.SerialIterator(DATA, 5), sgd(L.Classifier(Net()))), (3, "iteration"), "a").run()


def without_count():
    """An updater that counts no iteration would never end."""

    def update(updater):
        updater.update_core()
        updater.num_calls = getattr(updater, "num_calls", 0) + 1
        updater.iteration = 3 if updater.num_calls == 150 else 0

    made = loop(update)
    made.out = "a"
    made.run()


WARNED = {
    "no updates": (without_updates, "Trains: 3 steps, and no optimizer has updated anything"),
    "no count of steps": (without_count, "Own.update: 100 calls, and the iteration is still 0.*override update_core"),
    "a rate that grows": (
        runs(lambda: extensions.ExponentialShift("lr", 2, init=1e-15), (10, "epoch")),
        "multiplies the rate by 2 after each iteration, some 40 times",
    ),
    "step first": (lambda: extensions.StepShift("lr", 10, 0.1), r"write StepShift\(attr, gamma, step\)"),
    "one fold": (lambda: datasets.get_cross_validation_datasets(DATA, 1), "none are left to train on"),
    "list of datasets": (
        lambda: datasets.ConcatenatedDataset([DATA, DATA]),
        r"a list of 2 datasets has 2 examples; write ConcatenatedDataset\(\*datasets\)",
    ),
    **{
        f"never called, {i}": (
            runs(lambda: training.make_extension()(lambda trainer: None), stop, trigger=trigger, name="mine"),
            "mine is never called in this run, which ends after",
        )
        for i, (stop, trigger) in enumerate(
            (
                ((2, "epoch"), (3, "epoch")),
                ((8, "iteration"), (9, "iteration")),
                ((2, "epoch"), (100, "iteration")),
                ((8, "iteration"), (10, "epoch")),
                ((2, "epoch"), manual(30, 60)),
                ((5, "iteration"), manual(7, unit="iteration")),
            )
        )
    },
    "a rate that vanishes": (
        runs(lambda: extensions.ExponentialShift("lr", 0.5), (10, "epoch")),
        r"multiplies the rate by 0.5 after each iteration, some 40 times in this run.*trigger=\(1, 'epoch'\)",
    ),
    "evaluation of nothing": (
        lambda: extensions.Evaluator(iterators.SerialIterator([], 2, repeat=False), L.Classifier(NET))(None),
        "Evaluator: the dataset is empty, so nothing is evaluated and reported",
    ),
    **{
        f"{name} reported": (
            lambda value=value: trainer(Reports(value), extend=[extensions.LogReport()]).run(),
            f"report: 'main/y' is {words} and has no mean, so logs leave it out",
        )
        for name, value, words in (
            ("array", X, r"an array of shape \(20, 4\)"),
            ("text", "y", "of type str"),
            ("None", None, "of type NoneType"),
            ("list", [1.0, 2.0], "of type list"),
        )
    },
    "a printf format": (
        lambda: extensions.snapshot(filename="snapshot_%d"),
        "'snapshot_%d' is not formatted with %.*updater.iteration",
    ),
    "link beside": (lambda: sgd(beside()), r"Net.extra \(Linear\) will not be trained"),
    "list beside": (lambda: sgd(listed()), r"Net.blocks \(a list with Linear\) will not be trained"),
    "no gradient": (no_gradient, "no parameter of the target has a gradient"),
    "loss of something else": (update(lambda: F.sum(dbrdist.Variable(X))), "no parameter of the target has a gradient"),
    "best of nothing": (
        keys(extensions.LogReport, trigger=triggers.MaxValueTrigger("validation/accuracy")),
        "MaxValueTrigger: nobody has reported 'validation/accuracy' so far; reported are main/accuracy, main/loss",
    ),
    "early stop of nothing": (
        lambda: trainer(stop=triggers.EarlyStoppingTrigger(monitor="val_loss", max_trigger=(2, "epoch"))).run(),
        "EarlyStoppingTrigger: nothing reported 'val_loss'",
    ),
    "log of nothing": (
        keys(lambda: extensions.LogReport(["loss"])),
        "LogReport: nobody has reported 'loss'.*did you mean 'main/loss'",
    ),
    "curve of nothing": (keys(lambda: extensions.PlotReport(["loss"])), "PlotReport: nobody has reported 'loss'"),
    "save without values": (lambda: serializers.save_npz("a.npz", L.Linear(3)), "save_npz: /W: no values are saved"),
    "values of a wider type": (
        lambda: loaded(np.float32(0), 1e300),
        "n: the saved state has numbers that float32 cannot hold, which become infinite",
    ),
    "negative rate assigned": (
        lambda: setattr(sgd(Net()), "lr", -1),
        "SGD: lr: expected a number of 0 or more, got -1",
    ),
}


@pytest.mark.parametrize("name", WARNED)
def test_a_mistake_is_warned_of_once_at_the_users_line(name, tmp_path, monkeypatch):
    if name == "curve of nothing":
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    program, words = WARNED[name]
    with pytest.warns(UsageWarning, match=words) as given:
        program()
    assert len(given) == 1 and Path(given[0].filename).parent == Path(__file__).parent
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", UsageWarning)  # which turns them off
        program()


def few_updates():
    """Gradients of several batches before each update."""

    class Accumulates(training.StandardUpdater):
        def update_core(self):
            if self.iteration % 3 == 2:
                super().update_core()

    iterator = iterators.SerialIterator(DATA, 5)
    training.Trainer(Accumulates(iterator, sgd(L.Classifier(Net()))), (6, "iteration"), "a").run()


def own(update_core, num_steps=4, optimizer=None):
    """A run of an updater that calls ``update_core(updater, model, arrays)``."""

    class Own(training.StandardUpdater):
        def update_core(self):
            arrays = dbrdist.dataset.concat_examples(self.get_iterator("main").next())
            update_core(self, model, *arrays)

    model = L.Classifier(Net())
    updater = Own(iterators.SerialIterator(DATA, 5), sgd(model) if optimizer is None else optimizer)
    training.Trainer(updater, (num_steps, "iteration"), "a").run()


def by_hand(change):
    def update_core(updater, model, x, t):
        model.cleargrads()
        model(x, t).backward()
        for p in model.params():
            change(p)

    own(update_core)


def descend(p):
    p.array -= 0.01 * p.grad


def collects_first(updater, model, x, t):
    """As with a memory of examples that is filled before training begins."""
    if updater.iteration >= 150:
        updater.get_optimizer("main").update(model, x, t)


class Uncounted(optimizers.SGD):
    """An optimizer of one's own that does not count."""

    def update(self, lossfun=None, *args, **kwargs):
        for p in self.target.params():
            p.array += 0.1


def uncounted():
    optimizer = Uncounted().setup(L.Classifier(Net()))
    own(lambda updater, *args: optimizer.update(), optimizer=optimizer)
    iterator = iterators.SerialIterator(DATA, 5)
    training.Trainer(training.StandardUpdater(iterator, optimizer), (3, "iteration"), "a").run()


def mocks():
    """An updater that is a mock, and one whose optimizer is one."""
    calls = []
    training.Trainer(mock.MagicMock(), lambda trainer: calls.append(trainer) or len(calls) > 5, "a").run()
    optimizer = mock.MagicMock(target=L.Linear(2, 2))
    own(lambda updater, *args: optimizer.update(), optimizer=optimizer)


NOT_WARNED = {
    "parameters changed by hand": lambda: by_hand(descend),
    "parameters that update themselves": lambda: by_hand(lambda p: p.update()),
    "examples collected before training": lambda: own(collects_first, 160),
    "no optimizers": lambda: own(lambda updater, *args: None, optimizer={}),
    "optimizers that do not count": uncounted,
    "mocks": mocks,
    "a wider type of small numbers": lambda: [loaded(np.int32(0), np.int64(-7)), loaded(np.float16(0), 65504.0)],
    "infinite values of a wider type": lambda: loaded(np.float32(0), np.inf),
    "batches in a list": lambda: extensions.Evaluator([list(DATA)], L.Classifier(NET))(),
    "tuples of inputs in a list": lambda: extensions.Evaluator([(X[0], X[1])], NET, eval_func=lambda x: None)(),
    "a change in one call": lambda: extensions.LinearShift("lr", (0.1, 0.0), (5, 5)),
    "a search for the best rate": runs(
        lambda: extensions.ExponentialShift("lr", 10 ** (8 / 40), init=1e-7), (10, "epoch")
    ),
    "updates in some of the steps": few_updates,
    "a list of numbers as a dataset": lambda: datasets.ConcatenatedDataset([1, 2]),
    "a rate that grows slowly": runs(lambda: extensions.ExponentialShift("lr", 1.2), (10, "epoch")),
    "a slow decay at each iteration": runs(lambda: extensions.ExponentialShift("lr", 0.9999), (10, "epoch")),
    "a decay with an end": runs(lambda: extensions.ExponentialShift("lr", 0.5, target=0.01), (10, "epoch")),
    "a decay that was told when": runs(
        lambda: extensions.ExponentialShift("lr", 0.5), (10, "epoch"), trigger=(1, "iteration")
    ),
    "called at the end": runs(extensions.LogReport, (2, "epoch"), trigger=(2, "epoch")),
    "a short run with the usual log": runs(extensions.LogReport, (2, "iteration")),
    "some points too late": runs(extensions.LogReport, (2, "epoch"), trigger=manual(1, 30)),
    "a rate that falls after this part of a run": runs(
        lambda: extensions.ExponentialShift("lr", 0.5), (2, "epoch"), trigger=(30, "epoch")
    ),
    "a trial run within the first epoch": runs(extensions.LogReport, (3, "iteration"), trigger=(1000, "iteration")),
    "called before the training": runs(
        extensions.LogReport, (2, "epoch"), trigger=(9, "epoch"), call_before_training=True
    ),
    "a decay with a trigger of its own": runs(rarely_shifted, (30, "epoch")),
    "several batches in each update": several_batches,
    "an epoch that is about as long": runs(extensions.LogReport, (4, "iteration"), trigger=(1, "epoch")),
}


@pytest.mark.parametrize("name", NOT_WARNED)
def test_what_is_right_is_not_warned_of(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NOT_WARNED[name]()


@pytest.mark.parametrize("saved", ["MomentumSGD", "NesterovAG", "CorrectedMomentumSGD", "CorrectedNesterovAG"])
def test_velocities_of_other_meaning(saved, tmp_path):
    """Some contain the learning rate; a file that does not say so, of an earlier version, is taken as it is."""
    model = Net()
    optimizer = getattr(optimizers, saved)(0.1).setup(model)
    F.sum(model(X)).backward()
    optimizer.update()
    serializers.save_npz(tmp_path / "a.npz", optimizer)
    with np.load(tmp_path / "a.npz") as file:
        np.savez(tmp_path / "old.npz", **{k: v for k, v in file.items() if k != "state_meaning"})
    for name in ("MomentumSGD", "NesterovAG", "CorrectedMomentumSGD", "CorrectedNesterovAG"):
        other = getattr(optimizers, name)(0.1).setup(Net())
        serializers.load_npz(tmp_path / "old.npz", other)
        if name.startswith("Corrected") == saved.startswith("Corrected"):
            serializers.load_npz(tmp_path / "a.npz", other)
        else:
            with pytest.raises(CheckpointError, match=f"{name}: .*another optimizer, in which v .*rate; here v"):
                serializers.load_npz(tmp_path / "a.npz", other)


def test_two_log_reports_to_one_file_are_warned_of(tmp_path):
    made = trainer(stop=(3, "epoch"), out=tmp_path, extend=[extensions.LogReport(), extensions.LogReport()])
    with pytest.warns(UsageWarning, match="another process or LogReport writes to .*on one rank only") as given:
        made.run()
    assert 1 <= len(given) <= 2


def test_two_log_reports_to_two_files_are_right(tmp_path):
    logs = [extensions.LogReport(), extensions.LogReport(filename="b.jsonl")]
    trainer(stop=(3, "epoch"), out=tmp_path, extend=logs).run()


# ---- several ranks --------------------------------------------------------------------------------------------------


def on_ranks(program):
    """The words of the warnings of two ranks."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        run_threads(2, program)
    return [str(w.message) for w in given if w.category is UsageWarning]


def rank_step(comm, data, joint, **divided):
    model = L.Classifier(Net())
    actual = optimizers.SGD(0.1)
    optimizer = create_multi_node_optimizer(actual, comm).setup(model) if joint else actual.setup(model)
    updater = training.StandardUpdater(iterators.SerialIterator(data, 4, **divided), optimizer)
    for _ in range(3):
        updater.update()


def test_a_plain_optimizer_on_divided_data():
    words = on_ranks(lambda comm: rank_step(comm, DATA, False, rank=comm.rank, size=2))
    assert len(words) == 2 and "SGD does not average their gradients, so the ranks drift apart" in words[0]
    words = on_ranks(lambda comm: rank_step(comm, dbrdist.comm.scatter_dataset(DATA, comm), False))
    assert len(words) == 2 and "create_multi_node_optimizer" in words[0]
    assert on_ranks(lambda comm: rank_step(comm, DATA, True, rank=comm.rank, size=2)) == []
    assert on_ranks(lambda comm: rank_step(comm, dbrdist.comm.scatter_dataset(DATA, comm), True)) == []


def test_data_divided_twice():
    def divided_twice(comm):
        rank_step(comm, dbrdist.comm.scatter_dataset(DATA, comm), True, rank=comm.rank, size=2)

    words = on_ranks(divided_twice)
    assert len(words) == 2 and "the iterator divides it again" in words[0]


def test_an_evaluator_of_one_ranks_part():
    def evaluate(comm, joint):
        iterator = iterators.SerialIterator(DATA, 4, False, False, rank=comm.rank, size=2)
        evaluator = extensions.Evaluator(iterator, L.Classifier(Net()))
        if joint:
            evaluator = dbrdist.comm.create_multi_node_evaluator(evaluator, comm)
        evaluator()
        evaluator()

    words = on_ranks(lambda comm: evaluate(comm, False))
    assert len(words) == 2 and "create_multi_node_evaluator" in words[0]
    assert on_ranks(lambda comm: evaluate(comm, True)) == []


# ---- files ----------------------------------------------------------------------------------------------------------


def test_files_without_weights(tmp_path):
    path = tmp_path / "lazy.npz"
    with pytest.warns(UsageWarning, match="save_npz"):
        serializers.save_npz(path, dbrdist.Sequential(L.Linear(None, 3)))
    model = dbrdist.Sequential(L.Linear(4, 3))
    with pytest.raises(CheckpointError, match="0/W: the file has no values for this parameter"):
        serializers.load_npz(path, model)
    with pytest.warns(UsageWarning, match="no values for this parameter"):
        serializers.load_npz(path, model, strict=False)
    serializers.load_npz(path, dbrdist.Sequential(L.Linear(None, 3)))  # which has none either


def test_files_of_other_kinds(tmp_path):
    np.save(tmp_path / "a.npy", X)
    (tmp_path / "a.txt").write_text("hello, world")
    (tmp_path / "a.h5").write_bytes(b"\x89HDF\r\n\x1a\n")
    (tmp_path / "a.pkl").write_bytes(b"\x80\x04K\x01.")
    (tmp_path / "a.npz").write_bytes(b"")
    words = {
        "a.npy": "holds a single array",
        "a.txt": "begins with b'hello, w'",
        "a.h5": "HDF5 file; use load_hdf5",
        "a.pkl": "pickle",
        "a.npz": "empty",
    }
    for name, what in words.items():
        with pytest.raises(CheckpointError, match=f"{name}: .*{what}"):
            serializers.load_npz(tmp_path / name, NET)


def test_a_file_of_torch_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "net.pt", "w") as archive:
        archive.writestr("net/data.pkl", b"\x80\x02.")
    with pytest.raises(CheckpointError, match=r"net.pt: it is a file of torch.save"):
        serializers.load_npz(tmp_path / "net.pt", NET)


def test_nothing_that_fits(tmp_path):
    np.savez(tmp_path / "a.npz", x=X)
    with pytest.warns(UsageWarning, match="nothing is loaded from .*it has x, .*the object l1/W"):
        serializers.load_npz(tmp_path / "a.npz", Net(), strict=False)


# ---- errors of the loop ---------------------------------------------------------------------------------------------


def test_an_error_in_the_loop_is_said_once(tmp_path, capsys):
    made = trainer(data=datasets.TupleDataset(X, X), out=tmp_path)
    with pytest.raises(ValueError, match="softmax_cross_entropy") as caught:
        made.run()
    assert caught.value.__notes__ == ["in the training loop at iteration 0"]
    assert capsys.readouterr().err == ""
