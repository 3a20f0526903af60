"""Chance is a pure function of seed, purpose, epoch, sample and draw: the same whatever the number of ranks."""

from __future__ import annotations

import sys
import threading
import zlib

import numpy as np
import pytest

from dbrdist import random
from tests.each import each, fresh_chance


@pytest.fixture(autouse=True)
def restore():
    state = random.get_state()
    yield
    random.set_state(state)


def philox4x64(counter, key, rounds=10):
    """Salmon et al. 2011, section 3.3, on Python's integers."""
    m = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
    w = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
    mask = (1 << 64) - 1
    c, k = list(counter), list(key)
    for _ in range(rounds):
        a, b = m[0] * c[0], m[1] * c[2]
        c = [(b >> 64) ^ c[1] ^ k[0], b & mask, (a >> 64) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + w[0]) & mask, (k[1] + w[1]) & mask]
    return c


def test_philox_known_answer():
    """The first vector of the authors' file kat_vectors, philox 4x64 10: counter and key zero."""
    known = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert philox4x64((0, 0, 0, 0), (0, 0)) == known


def test_raw_words_are_philox_of_seed_purpose_row_draw_iteration_epoch():
    import zlib

    key = (7, zlib.crc32(b"forward"))
    random.set_stream(seed=7, epoch=3, iteration=11, row=5)
    random.raw_words(1, 1)  # the first draw
    words = random.raw_words(2, 6)  # the second; two blocks of four words a row
    for i in range(2):
        row = 5 + i
        # NumPy's generator counts up before its first block
        blocks = [philox4x64((row * 2 + j + 1, 1, 11, 3), key) for j in range(2)]
        assert words[i].tolist() == (blocks[0] + blocks[1])[:6]


@pytest.mark.parametrize("words_per_row", [1, 4, 7, 64])
@pytest.mark.parametrize("shares", [(12,), (6, 6), (5, 4, 3), (0, 12), (1, 10, 1)])
def test_the_ranks_together_draw_what_one_draws(words_per_row, shares):
    def draws(row, n):
        random.set_stream(1, 2, 3, row)
        return [random.raw_words(n, words_per_row) for _ in range(3)]

    whole = draws(0, 12)
    starts = np.cumsum((0,) + shares)[:-1]
    parts = [draws(int(row), n) for row, n in zip(starts, shares)]
    for draw in range(3):
        np.testing.assert_array_equal(np.concatenate([p[draw] for p in parts]), whole[draw])
    assert whole[0].dtype == np.uint64 and whole[0].shape == (12, words_per_row)


def test_draws_differ_by_each_of_their_coordinates():
    def first(seed=0, epoch=0, iteration=0, row=0, skip=0):
        random.set_stream(seed, epoch, iteration, row)
        for _ in range(skip):
            random.raw_words(1, 4)
        return tuple(random.raw_words(1, 4)[0])

    different = [first(), first(seed=1), first(epoch=1), first(iteration=1), first(row=1), first(skip=1)]
    assert len(set(different)) == len(different)
    assert first() == different[0]


def test_generator_is_pure_and_differs_by_purpose():
    def numbers(*args, **kwargs):
        return tuple(random.generator(*args, **kwargs).random(3))

    different = [
        numbers(0, "crop"), numbers(0, "flip"), numbers(1, "crop"), numbers(0, "crop", epoch=1),
        numbers(0, "crop", sample=1), numbers(0, "crop", part=1),
    ]  # fmt: skip
    assert len(set(different)) == 6
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    assert numbers(0, "crop") == different[0]
    np.testing.assert_array_equal(np.random.get_state()[1], before)


def test_uniform_numbers_look_uniform():
    random.set_stream(0, 0, 0)
    u = random.raw_words(1000, 50) / 2.0**64
    assert abs(u.mean() - 0.5) < 0.005 and abs(u.var() - 1 / 12) < 0.002
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.02


def test_permutation():
    a, b = random.permutation(0, 0, 100), random.permutation(0, 1, 100)
    assert a.dtype == np.int64
    np.testing.assert_array_equal(np.sort(a), np.arange(100))
    assert not np.array_equal(a, b)
    np.testing.assert_array_equal(a, random.permutation(0, 0, 100))


def test_state_goes_back_and_forth():
    random.set_stream(4, 5, 6, 7)
    random.raw_words(2, 2)
    random.next_initializer_generator()
    state = random.get_state()
    expected = random.raw_words(3, 3), random.next_initializer_generator().random()
    random.set_state(state)
    np.testing.assert_array_equal(random.raw_words(3, 3), expected[0])
    assert random.next_initializer_generator().random() == expected[1]
    assert all(isinstance(n, int) for n in state)


def test_streams_are_per_thread_and_initial_values_equal_in_each():
    random.set_stream(0, 0, 0)
    random.raw_words(1, 1)

    def work(out):
        out.append((random.get_state(), random.next_initializer_generator().random(), random.raw_words(1, 1)[0, 0]))

    outs = [[], []]
    for out in outs:
        thread = threading.Thread(target=work, args=(out,))
        thread.start()
        thread.join()
    assert outs[0] == outs[1]
    assert random.get_state()[4] == 1


def test_set_seed():
    default = random.Stream.default_seed
    try:
        random.set_seed(123)
        assert random.get_seed() == 123 and random.get_state() == (123, 0, 0, 0, 0, 0, 0, 0)
        seen = []
        thread = threading.Thread(target=lambda: seen.append(random.get_seed()))
        thread.start()
        thread.join()
        assert seen == [123]
        with pytest.raises(ValueError, match="expected a seed"):
            random.set_seed(-1)
    finally:
        random.Stream.default_seed = default


def test_orders_of_seeds_and_epochs_in_turn_are_those_of_fresh_generators():
    """One generator makes all orders of a seed: what it made before must not show."""
    for seed, epoch in [(0, 0), (0, 3), (2**63 + 1, 3), (0, 3), (0, 0), (2**63 + 1, 0)]:
        expected = random.generator(seed, "order", epoch).permutation(37)
        np.testing.assert_array_equal(random.permutation(seed, epoch, 37), expected)


def test_seeds_may_be_numbers_of_numpy():
    for seed in (np.int64(7), np.uint8(7), np.array(7)):
        np.testing.assert_array_equal(random.permutation(seed, 2, 9), random.permutation(7, 2, 9))
        assert random.generator(seed, "split").random() == random.generator(7, "split").random()
        random.set_seed(seed)
        assert random.raw_words(1, 4).tolist() == (random.set_seed(7), random.raw_words(1, 4).tolist())[1]
    with pytest.raises(TypeError, match="integer"):
        random.permutation(7.5, 0, 3)


def test_seeds_of_iterators_and_initial_values_go_on_by_one():
    """They decide what a run of an older version is resumed with."""
    random.set_seed(7)
    wanted = [
        random.generator(7, "iterator", sample=n, part=p).integers(2**63) for n, p in ((1, 0), (2, 0), (0, 1), (1, 1))
    ]
    assert random.next_iterator_seed(False) == 7
    found = [random.next_iterator_seed(is_divided) for is_divided in (False, False, True, True)]
    assert found == wanted
    for n in range(3):
        assert random.next_initializer_generator().random() == random.generator(7, "initialize", sample=n).random()


def test_seeds_of_generators_count_modulo_two_to_the_64():
    for seed, same in ((-1, 2**64 - 1), (2**64 + 5, 5), (2**65, 0), (2**64 - 1, 2**128 - 1)):
        assert random.generator(seed, "split").random() == random.generator(same, "split").random()
    assert random.generator(2**64 - 1, "split").random() != random.generator(2**63 - 1, "split").random()


def test_no_test_leaves_its_seed_to_the_threads_of_later_ones():
    random.set_seed(7)
    fresh_chance()
    seeds = []
    thread = threading.Thread(target=lambda: seeds.append(random.get_seed()))
    thread.start()
    thread.join()
    assert seeds == [0] and random.get_seed() == 0


def test_a_position_of_another_length_is_refused():
    state = random.get_state()
    for other in (state[:-1], (*state, 0)):
        with pytest.raises(ValueError, match="zip"):
            random.set_state(other)
    random.set_state(state)


def test_a_seed_is_this_threads_own_whatever_others_set_meanwhile():
    """Ranks that are threads set seeds of their own: none takes that of another, nor its first numbers."""
    wrong, interval = [], sys.getswitchinterval()

    def work(rank):
        for _ in range(3000):
            random.set_seed(rank)
            if random.get_seed() != rank:
                wrong.append((rank, random.get_seed()))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(1, 5)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


@each(num=[1024, 1023])
def test_many_words_are_drawn_by_the_compiled_loop(num, monkeypatch):
    """Where it does not refuse; NumPy draws the same."""
    taken = []

    def philox(words, counter, key, can=True):
        taken.append((words.shape, words.dtype, list(counter), counter.dtype, list(key), key.dtype))
        words[:] = 7
        return can

    plain = random._words(-3, (0, 1, 2, 3), num)
    monkeypatch.setattr(random, "kernels", {"philox": philox})
    made = random._words(-3, (0, 1, 2, 3), num)
    whole = np.dtype(np.uint64)
    called = ((1024,), whole, [0, 1, 2, 3], whole, [(1 << 64) - 3, zlib.crc32(b"forward")], whole)
    assert taken == ([called] if num == 1024 else [])
    assert (made == 7).all() if num == 1024 else (made == plain).all()
    monkeypatch.setattr(random, "kernels", {"philox": lambda *a: philox(*a, can=False)})
    np.testing.assert_array_equal(random._words(-3, (0, 1, 2, 3), num), plain)
    monkeypatch.setattr(random, "kernels", {})
    np.testing.assert_array_equal(random._words(-3, (0, 1, 2, 3), num), plain)
