"""Tests of dbrdist.comm.protocol.arguments."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist.comm.protocol import arguments


def test_tags_and_ranks_at_their_bounds():
    for number in (0, arguments.MAX_TAG, np.int64(3)):
        assert arguments.tag(number, "send") == number
    for number in (-1, arguments.MAX_TAG + 1):
        with pytest.raises(ValueError, match=f"send expected a tag from 0 to 32767, got {number}"):
            arguments.tag(number, "send")


def test_colours_and_keys_fit_into_64_bits():
    assert arguments.color_and_key(None, 3) == (0, 0, 3) and arguments.color_and_key(np.True_, False) == (1, 1, 0)
    most, least = 2**63 - 1, -(2**63)
    assert arguments.color_and_key(most, least) == (1, most, least)
    for number in (most + 1, least - 1):
        with pytest.raises(ValueError, match=f"split: color expected a number of 64 bits, got {number}"):
            arguments.color_and_key(number, 0)
        with pytest.raises(ValueError, match=f"split: key expected a number of 64 bits, got {number}"):
            arguments.color_and_key(0, number)


def test_numbers_of_examples():
    assert arguments.num_samples(None, "update") is None and arguments.num_samples(np.int8(0), "update") == 0
    with pytest.raises(ValueError, match="update expected num_samples of 0 or more, or None, got -1"):
        arguments.num_samples(-1, "update")
