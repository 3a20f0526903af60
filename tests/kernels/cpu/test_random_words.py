"""Tests of random_words.h: the words of NumPy's Philox."""

import numpy as np

import dbrdist
import dbrdist.functions as F
from dbrdist import kernels
from dbrdist.core.array import random
from tests.each import each
from tests.kernels.cpu.test_loops import compiled

_LAST = (1 << 64) - 1


@compiled
@each(
    counter=[(0, 0, 0, 0), (5, 1, 2, 3), (_LAST - 2, 0, 7, 0), (_LAST - 2, _LAST, _LAST, _LAST), (_LAST, 3, _LAST, 1)],
    num_words=[4, 12, 1024, 40_000, 300_004],
)
def test_words_are_those_of_numpys_generator(counter, num_words):
    """Also where a counter runs over into the next word."""
    counter, key = np.array(counter, np.uint64), np.array([9, _LAST - 1], np.uint64)
    words = np.zeros(num_words, np.uint64)
    assert kernels.philox(words, counter, key)
    np.testing.assert_array_equal(words, np.random.Philox(counter=counter, key=key).random_raw(num_words))


@compiled
def test_what_is_no_whole_number_of_blocks_or_not_dense_is_refused():
    counter, key = np.zeros(4, np.uint64), np.zeros(2, np.uint64)
    for words in (np.zeros(6, np.uint64), np.zeros(16, np.uint64)[::2], np.zeros(8, np.uint32)):
        assert not kernels.philox(words, counter, key)
        assert not words.any()
    assert not kernels.philox(np.zeros(8, np.uint64), key, key)


@compiled
@each(**{"num_words, is_by_loop": [(1 << 10, True), (1 << 12, True), ((1 << 10) - 4, False)]})
def test_many_words_come_from_the_loop(monkeypatch, num_words, is_by_loop):
    """NumPy's own generator takes several times as long for them."""
    made = []
    monkeypatch.setitem(random.kernels, "philox", lambda *args: made.append(args[0].size) or kernels.philox(*args))
    random.set_seed(4)
    words = random.raw_words(num_words // 4, 4)
    assert made == ([num_words] if is_by_loop else []) and words.size >= num_words


@compiled
def test_a_draw_is_the_same_without_a_loop():
    random.set_seed(3)
    with dbrdist.using_config("train", True):
        start = random.get_state()
        found = F.dropout(np.ones((300, 301), "f"), 0.3).array, random.raw_words(100, 999)
        random.set_state(start)
        with kernels.use("columns", "onednn"):
            wanted = F.dropout(np.ones((300, 301), "f"), 0.3).array, random.raw_words(100, 999)
    for a, b in zip(found, wanted):
        np.testing.assert_array_equal(a, b)
