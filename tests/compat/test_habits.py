"""Habits of programs written from 2016 to 2020: what Chainer accepted is accepted, with Chainer's values."""

import json

import numpy as np
import pytest

from dbrdist.errors import StaleParametersError

X = np.random.RandomState(0).randn(20, 3).astype("f")
T = (X[:, 0] > 0).astype("i")


def examples():
    import chainer

    return chainer.datasets.TupleDataset(X, T)


def trainer(tmp_path, iterator=None, updater=None, stop=(2, "epoch"), **options):
    import chainer
    import chainer.links as L
    from chainer import training

    optimizer = chainer.optimizers.SGD(0.1)
    optimizer.setup(L.Classifier(L.Linear(3, 2)))
    iterator = chainer.iterators.SerialIterator(examples(), 5) if iterator is None else iterator
    made = (updater or training.StandardUpdater)(iterator, optimizer, **options)
    return training.Trainer(made, stop, out=str(tmp_path))


# ---- Variables and arrays -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index, expected", [
    ([[0, 1], [2, 0]], X[(0, 1), (2, 0)]),
    ([range(3), [0, 1, 2]], X[(0, 1, 2), (0, 1, 2)]),
    ([slice(0, 2), slice(1, 3)], X[0:2, 1:3]),
    ([None, 1], X[None, 1]),
    ([Ellipsis, 0], X[..., 0]),
    ([1, 2], X[np.array([1, 2])]),
    ([np.array([0, 1]), 2], X[np.array([0, 1]), 2]),
])  # fmt: skip
def test_a_list_of_indices_is_a_tuple_of_them(installed, index, expected):
    import chainer
    import chainer.functions as F

    v = chainer.Variable(X)
    np.testing.assert_array_equal(F.get_item(v, index).array, expected)
    y = v[index]
    y.grad = np.ones_like(y.array)
    y.backward()
    mask = np.zeros_like(X)
    np.add.at(mask, tuple(index) if not all(isinstance(i, int) for i in index) else np.array(index), 1)
    np.testing.assert_array_equal(v.grad, mask)


def test_natively_a_list_is_an_array_of_indices():
    import dbrdist

    assert dbrdist.Variable(X)[[[0, 1], [2, 0]]].shape == (2, 2, 3)


@pytest.mark.parametrize("operator", ["+", "-", "*", "/", "**", "//", "@"])
@pytest.mark.parametrize("in_place", [False, True])
def test_operators_between_arrays_and_variables(operator, in_place):
    """Also in place: the array's name is bound to a Variable then. Independent of compat."""
    import dbrdist

    a = abs(X[:3]) + 1
    v = dbrdist.Variable(abs(X[3:6]) + 1)
    names = {"a": a.copy(), "v": v, "w": v.array}
    exec(f"w = names_a {operator} w".replace("names_a", "a"), names)
    expected = names["w"]
    exec(f"a {operator}= v" if in_place else f"a = a {operator} v", names)
    assert isinstance(names["a"], dbrdist.Variable) and names["a"].dtype == np.float32
    np.testing.assert_allclose(names["a"].array, expected, rtol=1e-6)
    assert dbrdist.Variable(X).sum().array == np.sum(dbrdist.Variable(X)).array


def test_functions_of_numpy_say_what_to_use():
    import dbrdist

    with pytest.raises(TypeError, match=r"numpy.exp takes arrays, got a Variable: use dbrdist.functions"):
        np.exp(dbrdist.Variable(X))


def test_old_functions_may_return_lists(installed):
    import chainer

    class Scale(chainer.Function):
        def forward(self, xs):
            return [xs[0] * 3]

        def backward(self, xs, gys):
            return [gys[0] * 3]

    v = chainer.Variable(X)
    y = Scale()(v)
    y.grad = X
    y.backward()
    np.testing.assert_array_equal(v.grad, X * 3)


def test_the_creator_can_be_set():
    import dbrdist
    from dbrdist import functions as F

    y = F.exp(dbrdist.Variable(X))
    z = dbrdist.Variable(y.array)
    z.creator = y.creator
    assert z.creator is y.creator and z.rank == 1
    z.creator = None
    assert z.creator is None and z.creator_node is None


def test_backward_after_new_values_of_a_parameter_computes_as_chainer_and_warns(installed):
    import chainer
    import chainer.functions as F
    import chainer.links as L

    for in_flat_memory in (False, True):
        link = L.Linear(3, 1, nobias=True, initialW=np.ones((1, 3), "f"))
        if in_flat_memory:
            chainer.optimizers.SGD().setup(link)
        link.cleargrads()
        v = chainer.Variable(X)
        loss = F.sum(link(v))
        link.W.array = np.full((1, 3), 5.0, "f")
        with pytest.warns(RuntimeWarning, match="assigned new values after forward.*as in Chainer") as found:
            loss.backward()
        assert found[0].filename == __file__
        np.testing.assert_array_equal(v.grad, np.full_like(X, 5.0))  # with the new values
        np.testing.assert_allclose(link.W.grad, X.sum(0, keepdims=True), rtol=1e-5)


def test_natively_that_is_an_error():
    import dbrdist
    from dbrdist import functions as F
    from dbrdist import links as L

    link = L.Linear(3, 1)
    loss = F.sum(link(dbrdist.Variable(X)))
    link.W.array = np.full((1, 3), 5.0, "f")
    with pytest.raises(StaleParametersError, match=r"parameter W of shape .* was assigned new values after forward"):
        loss.backward()


# ---- own iterators, updaters, converters, extensions ----------------------------------------------------------------


def test_an_iterator_without_newer_attributes(installed, tmp_path):
    import chainer
    from chainer.training import extensions

    class Iterator(chainer.dataset.Iterator):
        """As in Chainer 1: no previous_epoch_detail, no reset."""

        def __init__(self):
            self.epoch, self.is_new_epoch, self.at = 0, False, 0

        def __next__(self):
            self.at += 5
            self.is_new_epoch = self.at == 20
            if self.is_new_epoch:
                self.at, self.epoch = 0, self.epoch + 1
            return [(x, t) for x, t in zip(X[:5], T[:5])]

        @property
        def epoch_detail(self):
            return self.epoch + self.at / 20

    called = []
    run = trainer(tmp_path, Iterator())
    run.extend(lambda t: called.append(t.updater.iteration), name="call", trigger=(1, "epoch"))
    run.extend(extensions.LogReport())
    run.run()
    assert called == [4, 8] and [e["iteration"] for e in json.loads((tmp_path / "log").read_text())] == [4, 8]


def test_an_iterator_with_nothing_but_batches(installed, tmp_path):
    class Iterator:
        is_new_epoch = False

        def next(self):
            return [(x, t) for x, t in zip(X[:5], T[:5])]

    run = trainer(tmp_path, Iterator(), stop=(3, "iteration"))
    run.run()
    assert run.updater.iteration == 3


@pytest.mark.parametrize("device", [None, -1, "@numpy"])
def test_functions_that_convert_get_the_number_of_the_device(installed, tmp_path, device):
    import chainer
    from chainer.training import extensions

    seen = []

    def convert(batch, device):
        seen.append(device)
        if device is not None and device >= 0:
            raise AssertionError("not the CPU")
        return chainer.dataset.concat_examples(batch, device)

    @chainer.dataset.converter()
    def newer(batch, device):
        seen.append(str(device))
        return chainer.dataset.concat_examples(batch, device)

    run = trainer(tmp_path, stop=(1, "iteration"), converter=convert, device=device)
    test = chainer.iterators.SerialIterator(examples(), 20, repeat=False, shuffle=False)
    model = run.updater.get_optimizer("main").target
    run.extend(extensions.Evaluator(test, model, converter=newer, device=device), trigger=(1, "iteration"))
    run.run()
    assert seen == ([None, "None"] if device is None else [-1, "@numpy"])


def test_an_updater_that_does_everything_itself(installed, tmp_path):
    import chainer
    from chainer import training

    class Updater(training.StandardUpdater):
        def __init__(self, iterator, optimizer):
            self._iterators = {"main": iterator}
            self._optimizers = {"main": optimizer}
            self.converter = chainer.dataset.concat_examples
            self.device, self.iteration = None, 0

        def update(self):
            optimizer = self._optimizers["main"]
            optimizer.update(optimizer.target, *self.converter(self._iterators["main"].next()))
            self.iteration += 1

    Updater.device = None
    run = trainer(tmp_path, updater=Updater)
    run.run()
    assert run.updater.iteration == 8 and run.updater.epoch == 2


@pytest.mark.parametrize("attribute, value", [("default_name", "val"), ("name", "val")])
def test_the_name_of_an_extension_can_be_set(tmp_path, attribute, value, installed):
    import chainer
    from chainer.training import extensions

    run = trainer(tmp_path)
    test = chainer.iterators.SerialIterator(examples(), 20, repeat=False, shuffle=False)
    evaluator = extensions.Evaluator(test, run.updater.get_optimizer("main").target)
    setattr(evaluator, attribute, value)
    evaluator.trigger, evaluator.priority = (1, "epoch"), 250
    run.extend(evaluator)
    run.run()
    assert run.get_extension("val") is evaluator and "val/main/loss" in run.observation


def test_every_class_attribute_of_an_extension_can_be_set():
    """By script: of each extension and trigger, what Chainer has as a plain attribute."""
    from dbrdist import comm
    from dbrdist.training import extensions, triggers

    rooms = (extensions, triggers, comm.extensions)
    found = {c for room in rooms for c in vars(room).values() if isinstance(c, type)}
    classes = {c for c in found if c.__module__.startswith("dbrdist.") and not getattr(c, "__abstractmethods__", ())}
    assert len(classes) > 25
    for cls in classes:
        made = cls.__new__(cls)
        for attribute in ("default_name", "trigger", "priority", "name"):
            setattr(made, attribute, "x")
            assert getattr(made, attribute) == "x", cls


def test_the_learning_rate_of_adam_is_its_step_size(installed):
    import chainer
    import chainer.links as L

    optimizer = chainer.optimizers.Adam(alpha=0.1, beta1=0.8, beta2=0.99)
    with pytest.raises(RuntimeError, match="there was none yet"):
        optimizer.alpha_t  # noqa: B018
    model = L.Classifier(L.Linear(3, 2))
    optimizer.setup(model)
    for _ in range(3):
        optimizer.update(model, X, T)
    expected = 0.1 * np.sqrt(1 - 0.99**3) / (1 - 0.8**3)
    assert optimizer.alpha_t == pytest.approx(expected) and optimizer.lr == pytest.approx(expected)
    assert optimizer.alpha == 0.1


def test_unknown_arguments_of_recurrent_links_are_refused():
    from dbrdist import links as L

    for link, states in ((L.NStepLSTM(1, 3, 2, 0.0), (None, None)), (L.NStepGRU(1, 3, 2, 0.0), (None,))):
        with pytest.raises(TypeError, match=r"unexpected argument 'train'; use dbrdist\.using_config"):
            link(*states, [X], train=False)


# ---- output files ---------------------------------------------------------------------------------------------------


def test_the_log_is_chainers_list(installed, tmp_path):
    from chainer.training import extensions

    run = trainer(tmp_path)
    run.extend(extensions.LogReport(postprocess=lambda entry: entry.update(extra=entry["epoch"] * 10)))
    run.extend(extensions.snapshot(filename="snap"))
    run.run()
    log = json.loads((tmp_path / "log").read_text())
    assert [e["epoch"] for e in log] == [1, 2] and [e["extra"] for e in log] == [10, 20]
    assert sorted(log[0]) == ["elapsed_time", "epoch", "extra", "iteration", "main/accuracy", "main/loss"]
    assert not (tmp_path / "log.jsonl").exists() and log == run.get_extension("LogReport").log

    import chainer

    there = tmp_path / "elsewhere"  # the entries come with the snapshot
    again = trainer(there, stop=(3, "epoch"))
    again.extend(extensions.LogReport())
    again.extend(extensions.snapshot(filename="snap"))
    chainer.serializers.load_npz(str(tmp_path / "snap"), again)
    again.run()
    assert [e["epoch"] for e in json.loads((there / "log").read_text())] == [1, 2, 3]


@pytest.mark.parametrize("options, files", [
    ({"log_name": "train"}, ["train"]), ({"filename": "log_{iteration}"}, ["log_4", "log_8"]),
    ({"log_name": None}, []), ({"filename": "a", "log_name": "b"}, ["a"]),
])  # fmt: skip
def test_names_of_the_log(installed, tmp_path, options, files):
    from chainer.training import extensions

    run = trainer(tmp_path)
    run.extend(extensions.LogReport(**options))
    run.run()
    assert sorted(p.name for p in tmp_path.iterdir()) == files and len(run.get_extension("LogReport").log) == 2


def test_natively_the_log_has_lines(tmp_path):
    from dbrdist import optimizers, training
    from dbrdist.datasets import TupleDataset
    from dbrdist.iterators import SerialIterator
    from dbrdist.links import Classifier, Linear
    from dbrdist.training import extensions

    optimizer = optimizers.SGD(0.1).setup(Classifier(Linear(3, 2)))
    updater = training.StandardUpdater(SerialIterator(TupleDataset(X, T), 5), optimizer)
    run = training.Trainer(updater, (1, "epoch"), out=tmp_path)
    run.extend(extensions.LogReport())
    run.run()
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]


# ---- workers --------------------------------------------------------------------------------------------------------


def test_a_dataset_that_cannot_be_pickled_is_read_in_this_process(installed):
    import chainer

    data = chainer.datasets.TransformDataset(X, lambda x: x * 2)
    plain = chainer.iterators.SerialIterator(data, 4, seed=3)
    other = chainer.iterators.MultiprocessIterator(data, 4, n_processes=2, seed=3)
    with pytest.warns(UserWarning, match="reads its batches in this process, because the dataset cannot be pickled"):
        first = next(other)
    batches = [first, *(next(other) for _ in range(6))]
    for batch in batches:
        np.testing.assert_array_equal(batch, next(plain))
    other.finalize()


# ---- datasets -------------------------------------------------------------------------------------------------------


def test_a_list_of_indices_gives_columns_of_tuple_and_dictionary_datasets(installed):
    import chainer

    for index in ([3, 1, 2], np.array([3, 1, 2])):
        x, t = examples()[index]
        np.testing.assert_array_equal(x, X[[3, 1, 2]])
        np.testing.assert_array_equal(t, T[[3, 1, 2]])
        found = chainer.datasets.DictDataset(a=X, b=T)[index]
        np.testing.assert_array_equal(found["a"], X[[3, 1, 2]])
        assert len(chainer.datasets.SubDataset(examples(), 0, 5)[index]) == 3  # a list of examples
    assert [t for _, t in examples()[1:3]] == T[1:3].tolist()
