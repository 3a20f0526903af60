"""Tests of dbrdist.datasets.public.ptb."""

import numpy as np
import pytest

from dbrdist.dataset import set_dataset_root
from dbrdist.datasets import get_ptb_words, get_ptb_words_vocabulary
from tests.datasets.public.public_files import folder_of

TEXTS = {"train": " the cat sat \n on <unk> N the mat \n", "valid": " the mat sat \n", "test": " cat on cat \n\n"}


def ptb(**texts):
    for part, text in {**TEXTS, **texts}.items():
        (folder_of("ptb") / f"ptb.{part}.txt").write_text(text)


def test_ptb_words():
    ptb()
    words = get_ptb_words_vocabulary()
    assert list(words) == ["the", "cat", "sat", "<eos>", "on", "<unk>", "N", "mat"]
    assert list(words.values()) == list(range(8))
    for _ in range(2):
        train, valid, test = get_ptb_words()
        assert train.dtype == np.int32 and train.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 7, 3]
        assert valid.tolist() == [0, 7, 2, 3] and test.tolist() == [1, 4, 1, 3, 3]


def test_ptb_with_chainers_vocabulary_and_with_unknown_words():
    ptb(valid="the dog")
    with pytest.raises(ValueError, match=r"words of the training text in .*ptb.valid.txt, got 'dog'"):
        get_ptb_words()
    (folder_of("ptb") / "vocab.txt").write_text("dog\nthe\ncat\nsat\n<eos>\non\n<unk>\nN\nmat\n")
    (folder_of("ptb") / "train.npz").unlink()
    assert get_ptb_words()[1].tolist() == [1, 0, 4]
    (folder_of("ptb") / "test.npz").unlink()
    (folder_of("ptb") / "ptb.test.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"expected text as .*ptb.test.txt"):
        get_ptb_words()
    set_dataset_root(folder_of("elsewhere"))
    with pytest.raises(OSError, match=r"The Penn Treebank is not on this machine.*Put the files ptb.train.txt into"):
        get_ptb_words_vocabulary()
