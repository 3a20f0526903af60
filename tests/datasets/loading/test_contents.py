"""Tests of dbrdist.datasets.loading.contents: what ranks compare of their datasets without reading them."""

import numpy as np

from dbrdist import datasets
from dbrdist.datasets.loading.contents import are_alike, known_example, known_examples


def told(dataset):
    return [known.tolist() if isinstance(known, np.ndarray) else known for known in known_examples(dataset)]


def test_examples_from_the_first_to_the_last_are_known():
    found = told(list(range(100)))
    assert found[0] == [0.0] and found[-1] == [99.0] and found == sorted(found) and 2 < len(found) < 100
    assert told([]) == [] and told([5]) == [[5.0]] and told([5, 7]) == [[5.0], [7.0]]


def test_words_numbers_and_arrays_are_known_and_folders_are_not():
    example = ("/data/a/x.jpg", True, 2.5, np.array([[1, 2]], np.int16), {"k": [3, "b/y.png"]}, object())
    assert told([example]) == ["x.jpg", "True", [2.5], "int16 (1, 2)", [1.0, 2.0], [3.0], "y.png"]


def test_datasets_tell_what_they_are_made_of():
    pairs = datasets.TupleDataset([1.5, 2.5, 3.5], np.array([7, 8, 9]))
    assert known_example(pairs, 2) == [3.5, 9] and known_example(object(), 0) is None
    assert told(datasets.TupleDataset([1.5], ["a"])) == [[1.5], "a"]


def test_rounding_makes_no_difference_and_another_example_does():
    one, same, other = (known_examples([value, 3.0]) for value in (1.0, 1.0 + 1e-15, 1.5))
    assert are_alike(one, one) and are_alike(one, same) and not are_alike(one, other)
    assert not are_alike(one, one[:1]) and not are_alike(known_examples(["a"]), known_examples(["b"]))
