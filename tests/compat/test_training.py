"""Runs of Chainer's programs: triggers, tables and snapshots as Chainer's."""

import numpy as np
import pytest

import dbrdist
from dbrdist import compat
from tests.compat.test_habits import trainer
from tests.each import each


@each(shuffle=[True, False])
def test_a_run_goes_on_from_the_snapshot_that_it_wrote(shuffle, tmp_path, installed):
    import chainer
    from chainer.training import extensions

    from tests.compat.test_habits import examples

    def run(stop):
        iterator = chainer.iterators.SerialIterator(examples(), 6, shuffle=shuffle)
        made = trainer(tmp_path / str(shuffle), iterator, stop=(stop, "iteration"))
        made.extend(extensions.snapshot(n_retains=1, autoload=True), trigger=(2, "iteration"))
        made.run()
        return made.updater

    assert run(4).iteration == 4
    updater = run(6)
    assert updater.iteration == 6 and updater.epoch_detail == pytest.approx(36 / 20)


class Position:
    iteration, epoch_detail = 0, 0.0

    def go(self, steps):
        self.iteration += steps
        self.epoch_detail = self.iteration / 4


class Run:
    def __init__(self):
        self.updater = Position()


@each(made=[lambda t: t.IntervalTrigger(2, "iteration"), lambda t: t.ManualScheduleTrigger([2, 7], "iteration")])
def test_a_trigger_that_is_called_late_counts_from_the_beginning(made, installed, tmp_path):
    from chainer.serializers import load_npz, save_npz
    from chainer.training import triggers

    run, trigger = Run(), made(triggers)
    run.updater.go(3)
    assert trigger(run) and not trigger(run)  # the point at 2 lies behind
    fresh, path = made(triggers), tmp_path / "t.npz"
    save_npz(str(path), fresh)  # it was never called: 2 lies behind it, too
    again = made(triggers)
    load_npz(str(path), again)
    assert again(run)
    np.savez(path, other=0)  # of Chainer 3, which saved no triggers
    late = made(triggers)
    with pytest.warns(UserWarning, match="Chainer 3"):
        load_npz(str(path), late)
    assert not late(run)
    run.updater.go(4)
    assert late(run)


def table(data, record):
    class Table(dbrdist.dataset.TabularDataset):
        keys, mode = ("a", "b"), tuple

        def __len__(self):
            return len(data)

        def get_examples(self, indices, key_indices):
            record.append((indices, key_indices))
            rows = data if indices is None else data[indices]
            return tuple(list(rows * n) for n in (key_indices or (0, 1)))

    return Table()


@each(part=[slice(9, 2, -2), slice(1, 6, 3), slice(6, None), slice(3, 0, -1), [5, 0, 7], None])
def test_tables_side_by_side_are_asked_for_slices_as_slices(part, installed):
    data, record = np.arange(10), []
    both = table(data[:6], record).concat(table(data[6:], record))
    values, _ = both.get_examples(part, (1, 0))
    assert list(values) == list(data if part is None else data[part])
    kinds = {type(rows) for rows, _ in record}
    assert kinds == {type(part)} and {columns for _, columns in record} == {(1, 0)}


def test_no_rows_of_tables_side_by_side_ask_nothing(installed):
    record = []
    both = table(np.arange(3), record).concat(table(np.arange(2), record))
    assert both.get_examples([], None) == ([], []) and not record


def test_a_converter_of_a_table_gets_its_columns_as_arguments(installed):
    t = table(np.arange(3), [])
    assert t.with_converter(lambda a, b: (list(a), list(b))).convert(t.fetch()) == ([0, 0, 0], [0, 1, 2])
    named = t.asdict().with_converter(lambda **columns: sorted(columns))
    assert named.convert(named.fetch()) == ["a", "b"]


def test_natively_a_converter_gets_what_was_fetched():
    t = table(np.arange(3), [])
    assert t.with_converter(lambda columns: len(columns)).convert(t.fetch()) == 2


@each(size=[3, 5000])
def test_nesterov_has_chainers_formula(size, installed):
    """With the new velocity where the method has the old one; a size on either side of the compiled loops."""
    import chainer

    rng = np.random.RandomState(0)
    link = chainer.Link(x=(size,))
    p, v = rng.uniform(-1, 1, size), np.zeros(size)
    link.x.array[...] = p
    optimizer = chainer.optimizers.NesterovAG(lr=0.1, momentum=0.9).setup(link)
    for _ in range(3):
        g = rng.uniform(-1, 1, size)
        link.x.grad = g.astype("f")
        optimizer.update()
        v = 0.9 * v - 0.1 * g
        p = p + 0.81 * v - 1.9 * 0.1 * g
        np.testing.assert_allclose(link.x.array, p, atol=1e-5)


@each(is_chainers=[True, False])
def test_a_short_last_batch_weighs_as_in_chainer(is_chainers):
    if is_chainers:
        compat.install()
    try:
        data = [np.array(v, "f") for v in (1, 1, 4)]
        it = dbrdist.iterators.SerialIterator(data, 2, repeat=False, shuffle=False)

        class Reports(dbrdist.Link):
            def forward(self, x):
                dbrdist.report({"mean": float(x.mean())}, self)

        result = dbrdist.training.extensions.Evaluator(it, Reports())()
    finally:
        compat.uninstall()
    assert result["main/mean"] == (2.5 if is_chainers else 2.0)
