"""Tests of dbrdist.testing.attr."""

from dbrdist.testing import attr
from tests.testing.testing_helpers import run


def test_attr_marks_for_pytest():
    @attr.slow
    def test_it():
        pass

    @attr.multi_gpu(3)
    def test_gpus():
        pass

    assert [mark.name for mark in test_it.pytestmark] == ["slow"]
    assert {mark.name for mark in test_gpus.pytestmark} == {"gpu", "multi_gpu"}
    assert {mark.name for mark in attr.cudnn(run).pytestmark} == {"gpu", "cudnn"}
