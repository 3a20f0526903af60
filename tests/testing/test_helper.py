"""Tests of dbrdist.testing.helper."""

import os
import unittest
import warnings

import numpy as np
import pytest

import dbrdist
import dbrdist.links as L
from dbrdist import testing
from tests.testing.testing_helpers import run


def test_assert_warns():
    with testing.assert_warns(DeprecationWarning):
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    with (
        pytest.raises(AssertionError, match="of type FutureWarning, got UserWarning"),
        testing.assert_warns(FutureWarning),
    ):
        warnings.warn("other", UserWarning, stacklevel=1)


def test_patch_counts_calls_and_still_calls():
    with testing.patch("os.path.basename") as counted:
        assert os.path.basename("a/b") == "b"
    counted.assert_called_once_with("a/b")
    with testing.patch("os.path.basename", return_value=3):
        assert os.path.basename("a/b") == 3
    with testing.patch("os.path.basename", new=len):
        assert os.path.basename("a/b") == 3
    assert os.path.basename("a/b") == "b"


@pytest.mark.parametrize(
    ("requirements", "met"),
    [
        (["numpy"], True),
        (["numpy>=1.10"], True),
        (["numpy >= 1.10, <1.11"], False),
        (["numpy>=1.10", "no-such-package"], False),
        (["numpy<1000", "pytest!=1.0"], True),
        (["numpy==0.1"], False),
        (["numpy>0.1,<=999.0.0rc1"], True),
    ],
)
def test_requirements(requirements, met):
    class Case(unittest.TestCase):
        @testing.with_requires(*requirements)
        def test_with(self):
            pass

        @testing.without_requires(*requirements)
        def test_without(self):
            pass

    ((skipped, reason),) = run(Case).skipped
    assert skipped._testMethodName == ("test_without" if met else "test_with")
    assert requirements[-1] in reason


@pytest.mark.parametrize("requirement", ["numpy=>1", "numpy>=", "a b", "numpy>=x"])
def test_a_requirement_that_cannot_be_read(requirement):
    with pytest.raises(ValueError, match=r"expected a (requirement|version) such as"):
        testing.with_requires(requirement)


def test_save_and_load():
    a, b = L.Linear(3, 2), L.Linear(3, 2)
    b.W.array[...] = 0
    testing.save_and_load_npz(a, b)
    assert (a.W.array == b.W.array).all()
    paths = []
    testing.save_and_load(a, b, "name", lambda path, x: paths.append(path), lambda path, x: paths.append(path))
    assert paths[0] == paths[1] and os.path.basename(paths[0]) == "name"
    assert not os.path.exists(os.path.dirname(paths[0]))


def test_a_trainer_that_only_counts(tmp_path):
    seen = []

    def look(trainer):
        u = trainer.updater
        seen.append((u.iteration, u.epoch, u.epoch_detail, u.previous_epoch_detail, u.is_new_epoch))

    look.trigger = (1, "iteration")
    trainer = testing.get_trainer_with_mock_updater((2, "epoch"), iter_per_epoch=2, extensions=[look])
    trainer.out = str(tmp_path)
    trainer.run()
    assert seen == [(1, 0, 0.5, 0.0, False), (2, 1, 1.0, 0.5, True), (3, 1, 1.5, 1.0, False), (4, 2, 2.0, 1.5, True)]
    assert trainer.updater.update_core.call_count == 4


def test_run_module_does_nothing_in_an_imported_module():
    assert testing.run_module("tests.some_module", __file__) is None


def test_assert_allclose_is_that_of_the_gradient_check():
    testing.assert_allclose(dbrdist.Variable(np.ones(2)), np.ones(2))
    with pytest.raises(AssertionError):
        testing.assert_allclose(1.0, 1.1)
