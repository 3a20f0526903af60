"""A step on several devices is that of one device with the whole batch; devices may be the same CPU."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import iterators, optimizer_hooks, optimizers
from dbrdist.core.model.reporter import report
from dbrdist.datasets.loading.convert import concat_examples
from dbrdist.datasets.loading.serial import SerialIterator
from dbrdist.training import ParallelUpdater, StandardUpdater, Trainer, extensions, updaters
from dbrdist.training.extensions import snapshots
from tests.each import each, fresh_chance
from tests.training.training_helpers import Line, OwnIterator, examples, saved


class Net(dbrdist.Chain):
    """Sizes that are known at the first batch, dropout, and a parameter that takes no part."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(None, 20)
            self.l2 = L.Linear(20, 3)
            self.idle = dbrdist.Parameter(np.ones(2, np.float32))

    def forward(self, x):
        return self.l2(F.dropout(F.tanh(self.l1(x)), 0.3))


def digits(n=50):
    rng = np.random.default_rng(0)
    return [(x, np.int32(i % 3)) for i, x in enumerate(rng.normal(size=(n, 7)).astype(np.float32))]


def devices(num):
    return {["main", "second", "third", "fourth"][i]: "@numpy" for i in range(num)}


def trained(make_updater, make_optimizer=lambda: optimizers.SGD(0.5), batch=8, steps=15, net=None, hook=None):
    """The classifier after some steps."""
    fresh_chance()
    model = L.Classifier(Net() if net is None else net())
    optimizer = make_optimizer().setup(model)
    if hook is not None:
        optimizer.add_hook(hook)
    updater = make_updater(SerialIterator(digits(), batch, seed=3), optimizer)
    for _ in range(steps):
        updater.update()
    return model, updater


def assert_equal_models(one, other, tolerance=1e-5):
    theirs = dict(other.namedparams())
    for path, p in one.namedparams():
        np.testing.assert_allclose(p.array, theirs[path].array, rtol=tolerance, atol=tolerance, err_msg=path)


@pytest.mark.slow
@each(
    num=[1, 2, 3, 4],
    make_optimizer=[
        lambda: optimizers.SGD(0.5), lambda: optimizers.MomentumSGD(0.1), lambda: optimizers.Adam(0.01),
    ],
)  # fmt: skip
def test_steps_are_those_of_one_device(num, make_optimizer):
    """50 examples in batches of 8: the last batch of an epoch runs into the next; dropout draws the same."""
    whole, one = trained(StandardUpdater, make_optimizer)
    parts, several = trained(lambda i, o: ParallelUpdater(i, o, devices=devices(num)), make_optimizer)
    assert_equal_models(whole, parts)
    assert (several.epoch, several.iteration) == (one.epoch, one.iteration) == (2, 15)


@pytest.mark.slow
@each(batch=[1, 2, 3, 7])
def test_batches_smaller_than_the_devices_or_not_divisible(batch):
    whole, _ = trained(StandardUpdater, batch=batch)
    parts, _ = trained(lambda i, o: ParallelUpdater(i, o, devices=devices(4)), batch=batch)
    assert_equal_models(whole, parts)


def test_the_copies_are_copies():
    """Without the gradients of the others, or with the main model's alone, the result would be another."""
    _, updater = trained(lambda i, o: ParallelUpdater(i, o, devices=devices(3)), steps=2)
    models = list(updater._models.values())
    assert len({id(p.array) for m in models for p in m.params()}) == 3 * len(list(models[0].params()))
    grads = [m.predictor.l2.W.grad for m in models]
    assert not np.allclose(grads[1], grads[2]) and not np.allclose(grads[0], grads[1])


def test_what_is_initialized_later_is_the_same():
    """The copies' own initial values count for nothing."""
    later = []
    for make in (StandardUpdater, lambda i, o: ParallelUpdater(i, o, devices=devices(3))):
        trained(make, steps=1)
        later.append(L.Linear(3, 2).W.array)
    np.testing.assert_array_equal(*later)


def test_hooks_and_loss_scales_see_the_whole_gradient():
    for hook, scale in ((optimizer_hooks.WeightDecay(0.1), None), (optimizer_hooks.GradientClipping(0.05), 128.0)):
        whole, _ = trained(lambda i, o, s=scale: StandardUpdater(i, o, loss_scale=s), hook=hook)
        parts, _ = trained(lambda i, o, s=scale: ParallelUpdater(i, o, devices=devices(2), loss_scale=s), hook=hook)
        assert_equal_models(whole, parts)


def test_a_dynamic_loss_scale():
    def make():
        optimizer = optimizers.SGD(0.5)
        optimizer.loss_scaling(interval=3)
        return optimizer

    whole, one = trained(StandardUpdater, make)
    parts, several = trained(lambda i, o: ParallelUpdater(i, o, devices=devices(3)), make)
    assert_equal_models(whole, parts)
    scales = [u.get_optimizer("main")._loss_scale for u in (one, several)]
    assert scales[0] == scales[1] != 1


def test_parameters_that_are_frozen_stay():
    def freeze(updater):
        def make(iterator, optimizer):
            optimizer.target.predictor.l2.disable_update()
            return updater(iterator, optimizer)

        return make

    whole, _ = trained(freeze(StandardUpdater))
    parts, _ = trained(freeze(lambda i, o: ParallelUpdater(i, o, devices=devices(2))))
    assert_equal_models(whole, parts)
    np.testing.assert_array_equal(parts.predictor.idle.array, 1)


def test_a_loss_function_and_a_converter_of_ones_own():
    given = []

    def converter(batch, device):
        given.append((len(batch), device.name))
        x, t = (np.stack(part) for part in zip(*batch))
        return {"t": t, "x": x}

    fresh_chance()
    model = L.Linear(7, 3)
    optimizer = optimizers.SGD(0.1).setup(model)

    def loss_func(x, t):
        return F.softmax_cross_entropy(model(x), t)

    updater = ParallelUpdater(
        SerialIterator(digits(), 5, seed=1), optimizer, converter, devices=devices(2), loss_func=loss_func
    )
    before = model.W.array.copy()
    updater.update()
    assert given == [(3, "@numpy"), (2, "@numpy")] and not np.array_equal(model.W.array, before)


def test_models_of_ones_own():
    fresh_chance()
    main, other = Line(), Line()
    other.w.array[...] = 100  # a copy takes the main model's values before it computes
    optimizer = optimizers.SGD(0.1).setup(main)
    updater = ParallelUpdater(
        SerialIterator(examples(), 10, shuffle=False), optimizer, models={"other": other, "main": main}
    )
    updater.update()
    data = np.array(examples())[:, :, 0]
    slope = np.mean(2 * (0.5 * data[:, 0] - data[:, 1]) * data[:, 0])
    assert main.w.array[0] == pytest.approx(0.5 - 0.1 * slope)


def make_trainer(out, stop, num=2):
    fresh_chance()
    model = L.Classifier(Net())
    optimizer = optimizers.MomentumSGD(0.1).setup(model)
    updater = ParallelUpdater(SerialIterator(digits(), 8, seed=0), optimizer, devices=devices(num))
    trainer = Trainer(updater, (stop, "iteration"), out=str(out))
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    trainer.extend(extensions.snapshot(), trigger=(5, "iteration"))
    return trainer


def test_a_run_reports_each_copy_and_resumes(tmp_path):
    trainer = make_trainer(tmp_path, 10)
    trainer.extend(extensions.PrintReport(["main/loss", "second/loss", "second/accuracy"], out=io.StringIO()))
    trainer.run()
    log = trainer.get_extension("LogReport").log
    assert {"main/loss", "second/loss", "main/accuracy", "second/accuracy"} <= set(log[0])
    assert log[0]["main/loss"] != log[0]["second/loss"]
    resumed = make_trainer(tmp_path, 10)
    snapshots.load(str(tmp_path / "snapshot_iter_5"), resumed)
    resumed.run()
    ours, theirs = (saved(t.updater.get_optimizer("main").target) for t in (resumed, trainer))
    assert ours.keys() == theirs.keys()
    for key in ours:
        np.testing.assert_array_equal(ours[key], theirs[key], key)


@each(auto=[True, False])
def test_the_optimizer_counts_epochs_where_it_is_to(auto):
    told = []

    class Counting(optimizers.SGD):
        def new_epoch(self, auto=False):
            told.append(auto)
            super().new_epoch(auto)

    _, updater = trained(
        lambda i, o: ParallelUpdater(i, o, devices=devices(2), auto_new_epoch=auto), lambda: Counting(0.5)
    )
    assert updater.epoch == 2
    assert told == [True, True] * auto and updater.get_optimizer("main").epoch == 2 * auto


def test_batch_normalization_sees_its_block():
    class WithBN(dbrdist.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.bn = L.BatchNormalization()
                self.l = L.Linear(None, 3)

        def forward(self, x):
            return self.l(self.bn(x))

    seen = []

    def converter(batch, device):
        seen.append(np.stack([x for x, _ in batch]))
        return concat_examples(batch, device)

    model, _ = trained(lambda i, o: ParallelUpdater(i, o, converter, devices=devices(2)), net=WithBN, steps=2)
    first, _, second, _ = seen
    expected = 0.9 * (0.1 * first.mean(0)) + 0.1 * second.mean(0)
    np.testing.assert_allclose(model.predictor.bn.avg_mean, expected, rtol=1e-5, atol=1e-6)


# ---- an iterator for each device ------------------------------------------------------------------------------------
class Fixed:
    """Batches in a fixed order."""

    is_new_epoch, epoch, epoch_detail, previous_epoch_detail = False, 0, 0.0, 0.0

    def __init__(self, batches):
        self.batches = iter(batches)

    def next(self):
        return next(self.batches)

    def finalize(self):
        self.batches = None

    def serialize(self, serializer):
        pass


@each(given=[["@numpy"] * 3, {"a": "@numpy", "main": "@numpy", "b": "@numpy"}, ("@numpy", -1, "native")])
def test_iterators_of_their_own_make_one_batch(given):
    data = digits()
    batches = [[data[7 * i : 7 * i + 3], data[7 * i + 3 : 7 * i + 5], data[7 * i + 5 : 7 * i + 7]] for i in range(6)]

    def run(make_updater):
        fresh_chance()
        model = L.Classifier(Net())
        updater = make_updater(optimizers.SGD(0.5).setup(model))
        for _ in range(6):
            updater.update()
        return model, updater

    iterators = [Fixed([b[i] for b in batches]) for i in range(3)]
    together = Fixed([[*a, *b, *c] for a, b, c in batches])
    whole, _ = run(lambda o: StandardUpdater(together, o))
    parts, several = run(lambda o: updaters.MultiprocessParallelUpdater(iterators, o, devices=given))
    assert_equal_models(whole, parts)
    several.finalize()
    assert [iterator.batches for iterator in iterators] == [None] * 3
    assert updaters.MultiprocessParallelUpdater.available()


# ---- what is refused ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda i, o: ParallelUpdater(i, o), ValueError, "ParallelUpdater: expected models or devices, got neither"),
        (lambda i, o: ParallelUpdater(i, o, devices={"a": -1}), KeyError, "expected a device named 'main', got a"),
        (lambda i, o: ParallelUpdater(i, o, devices={}), KeyError, "expected a device named 'main', got none"),
        (
            lambda i, o: ParallelUpdater(i, o, models={"main": Line()}),
            ValueError,
            "expected the optimizer's target as 'm",
        ),
        (
            lambda i, o: ParallelUpdater(i, o, models={"main": o.target}, devices=devices(2)),
            ValueError,
            "expected a device for each model, got ['main', 'second'] for ['main']",
        ),
        (
            lambda i, o: updaters.MultiprocessParallelUpdater([i, i], o, devices=[-1]),
            ValueError,
            "MultiprocessParallelUpdater: devices: expected one for each of the 2 iterators, got 1",
        ),
        (
            lambda i, o: updaters.MultiprocessParallelUpdater([i], o),
            ValueError,
            "expected one for each of the 1 iterators, got None",
        ),
        (lambda i, o: ParallelUpdater(i, optimizers.SGD(), devices=devices(1)), RuntimeError, "has no target"),
    ],
)
def test_bad_arguments_are_refused(make, error, words):
    with pytest.raises(error, match=re.escape(words)):
        make(SerialIterator(examples(), 2), optimizers.SGD().setup(Line()))


def test_the_names_of_chainer():
    assert updaters.ParallelUpdater is ParallelUpdater


class Inner(dbrdist.Chain):
    def forward(self, loss):
        report({"twice": loss * 2}, self)
        return loss


class Outer(Line):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.inner = Inner()

    def forward(self, x, t):
        return self.inner(super().forward(x, t))


def test_copies_of_a_model_and_their_parts_report_under_their_names(tmp_path):
    optimizer = optimizers.SGD(0.0).setup(Outer())
    iterator = iterators.SerialIterator(examples(4), 4, shuffle=False)
    updater = ParallelUpdater(iterator, optimizer, devices={"main": "@numpy", "other": "@numpy"})
    trainer = Trainer(updater, (1, "iteration"), out=str(tmp_path))
    seen = {}
    trainer.extend(lambda t: seen.update(t.observation), name="see", trigger=(1, "iteration"))
    trainer.run()
    x, y = (np.concatenate([e[k] for e in examples(4)]) for k in (0, 1))
    for name, part in (("main", slice(2)), ("other", slice(2, None))):
        loss = float(np.mean((0.5 * x[part] - y[part]) ** 2))
        assert {key: round(float(seen[f"{name}/{key}"]), 9) for key in ("loss", "inner/twice")} == {
            "loss": round(loss, 9), "inner/twice": round(2 * loss, 9)
        }  # fmt: skip


def test_chance_of_a_step_without_an_epoch_or_a_row(monkeypatch):
    """A program's own iterator may count neither: the first of each."""
    from dbrdist.training import parallel_updater

    streams = []
    monkeypatch.setattr(parallel_updater.random, "set_stream", lambda *words: streams.append(words))

    own = OwnIterator()
    updater = ParallelUpdater(own, optimizers.SGD(0.1).setup(Line()), devices={"main": "@numpy", "second": "@numpy"})
    updater.update()
    own.epoch, own.row = 3, 5
    updater.update()
    seed = parallel_updater.random.get_seed()
    assert streams == [(seed, 0, 0, 0), (seed, 0, 0, 1), (seed, 3, 1, 5), (seed, 3, 1, 6)]
