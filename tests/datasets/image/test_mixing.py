"""Mixed examples: the papers' formulas, whoever makes the batch, whatever its size."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest

from dbrdist import datasets
from dbrdist.core.array.random import generator, permutation
from dbrdist.datasets import (
    Batch,
    ByEpoch,
    CenterCrop,
    ColorJitter,
    Compose,
    CutMix,
    ImageFolder,
    MixedDataset,
    Mixup,
    Normalize,
    RandAugment,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    SubDataset,
    ToCHW,
    TupleDataset,
)
from dbrdist.datasets.loading.convert import concat_examples
from dbrdist.errors import CorruptExampleError, DatasetError
from dbrdist.iterators import MultiprocessIterator, MultithreadIterator, SerialIterator
from tests.datasets.image_files import class_folders, jpeg
from tests.each import each

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CHAIN = [RandomResizedCrop(16), RandomHorizontalFlip(), ColorJitter(), RandAugment(), RandomErasing()]
TO_FLOAT = [Normalize(MEAN, STD), ToCHW()]
MIXINGS = {"mixup": [Mixup(0.8)], "cutmix": [CutMix()], "both": [Mixup(0.8, p=0.7), CutMix(p=0.5)]}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return class_folders(tmp_path_factory.mktemp("images"), (("ant", 9), ("bee", 8), ("cat", 6)))


def arrays(n=10, shape=(3, 12, 15), dtype=np.float32):
    rng = np.random.default_rng(0)
    return TupleDataset((rng.random((n, *shape)) * 255).astype(dtype), np.arange(n, dtype=np.int32) % 4)


# ---- formulas ----
def test_partners_are_neighbours_in_the_order_of_the_epoch():
    for n in (1, 2, 9, 10):
        data = MixedDataset(arrays(n), [Mixup()], 4)
        for seed, epoch in ((0, 0), (0, 1), (5, 1)):
            order, partners = permutation(seed, epoch, n), data.partners(seed, epoch)
            for position in range(n):
                other = position ^ 1
                assert partners[order[position]] == order[other if other < n else position]
    assert data.partners(5, 1) is data.partners(5, 1)
    kept = data.partners(5, 1)
    data.partners(5, 2)
    assert data.partners(5, 1) is kept  # two epochs may meet in one batch
    for epoch in range(9):
        data.partners(5, epoch)
    assert len(data._partners) == 2


def test_one_class_and_every_bound_of_a_mixing():
    image = np.zeros((2, 2, 1), np.uint8)
    assert MixedDataset([(image, 0), (image, 0)], [Mixup(1e-9, p=0), CutMix(p=1)], 1)[0][1].tolist() == [1]
    for alpha, p in ((0, 1), (-1, 1), (1, -0.1), (1, 1.1)):
        with pytest.raises(
            ValueError, match=r"alpha: expected a number above 0, got|p: expected a number from 0 to 1, got"
        ):
            CutMix(alpha, p)


def test_mixup_is_the_papers_formula():
    plain = arrays()
    data = MixedDataset(plain, [Mixup(0.8)], 4)
    shares = []
    for epoch in range(200):
        partners = data.partners(3, epoch)
        i = epoch % 10
        image, weights = data.example_at(i, 3, epoch)
        x, a = plain[i]
        y, b = plain[int(partners[i])]
        w = float(weights[a]) if a != b else np.nan
        if a == b:
            assert weights[a] == 1
            continue
        assert weights.sum() == pytest.approx(1) and weights[b] == pytest.approx(1 - w)
        expected = w * x.astype(np.float64) + (1 - w) * y.astype(np.float64)
        assert np.allclose(image, expected, atol=1e-4)
        shares.append(w)
    reference = np.random.default_rng(0).beta(0.8, 0.8, 100_000)
    assert abs(np.mean(shares) - 0.5) < 0.1 and abs(np.std(shares) - reference.std()) < 0.06


def test_mixup_of_uint8_rounds_to_nearest():
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = rng.integers(0, 256, (2, 9, 9, 3), np.uint8)
        out = a.copy()
        seed = int(rng.integers(1000))
        w = Mixup(1.0).mix(out, b, generator(seed, "mix"), (0, 1))
        assert w == round(256 * generator(seed, "mix").beta(1, 1)) / 256
        exact = w * a.astype(np.float64) + (1 - w) * b
        assert np.array_equal(out, np.floor(exact + 0.5))


@pytest.mark.parametrize("axes", [(0, 1), (1, 2)])
def test_cutmix_is_the_papers_formula(axes):
    shape = (40, 30, 3) if axes == (0, 1) else (3, 40, 30)
    shares = []
    for i in range(500):
        out = np.zeros(shape, np.uint8)
        w = CutMix().mix(out, np.ones(shape, np.uint8), generator(i, "mix"), axes)
        plane = out[..., 0] if axes == (0, 1) else out[0]
        draws = generator(i, "mix")
        side, y, x = np.sqrt(1 - draws.beta(1, 1)), int(draws.random() * 40), int(draws.random() * 30)
        h, v = int(40 * side), int(30 * side)
        expected = np.zeros((40, 30), np.uint8)
        expected[max(y - h // 2, 0) : y + h // 2, max(x - v // 2, 0) : x + v // 2] = 1
        assert np.array_equal(plane, expected)
        assert 1 - w == pytest.approx(expected.mean())
        assert out.sum() == 3 * expected.sum()
        shares.append(w)
    assert 0.5 < np.mean(shares) < 0.75  # 1/2 without what the border cuts off


def test_each_way_is_drawn_as_often_and_with_its_probability():
    seen = []

    class Spy(Mixup):
        def __init__(self, name, p):
            super().__init__(p=p)
            self.name = name

        def mix(self, out, other, rng, axes):
            seen.append(self.name)
            return 1.0

    data = MixedDataset(arrays(), [Spy("a", 1.0), Spy("b", 0.5)], 4)
    for epoch in range(200):
        data.get_batch(np.arange(10), 0, epoch, [])
    assert abs(seen.count("a") - 1000) < 5 * 22 and abs(seen.count("b") - 500) < 5 * 19


# ---- whoever makes the batch ----
MAKERS = {
    "serial": SerialIterator,
    "1 thread": lambda *a, **k: MultithreadIterator(*a, n_threads=1, **k),
    "2 threads": lambda *a, **k: MultithreadIterator(*a, n_threads=2, **k),
    "4 threads": lambda *a, **k: MultithreadIterator(*a, n_threads=4, **k),
}


def whole_epochs(make, data, batch, **options):
    """Images and weights by (epoch, index)."""
    found = {}
    with make(data, batch, seed=5, last="short", **options) as iterator:
        while iterator.epoch < 2:
            epoch = iterator.epoch
            x, t = concat_examples(iterator.next())
            found |= {(epoch, int(i)): (x[k], t[k]) for k, i in enumerate(iterator.indices)}
    return found


def same(a, b):
    assert set(a) == set(b)
    for key in a:
        assert all(np.array_equal(u, v) for u, v in zip(a[key], b[key], strict=True)), key


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXINGS)
def test_numbers_depend_on_no_loader_batch_or_rank(root, kind):
    data = MixedDataset(ImageFolder(root, Compose(CHAIN + TO_FLOAT)), MIXINGS[kind], 3)
    expected = whole_epochs(SerialIterator, data, 8)
    assert len(expected) == 46
    for make in MAKERS.values():
        same(whole_epochs(make, data, 5), expected)
    parts = {}
    for rank in range(3):
        parts |= whole_epochs(SerialIterator, data, 7, rank=rank, size=3)
    same(parts, expected)
    alone = {(0, i): data.example_at(i, 5, 0) for i in range(23)}
    same(alone, {k: v for k, v in expected.items() if k[0] == 0})


@pytest.mark.programs
@pytest.mark.parametrize("n_processes", [1, 2, 4])
def test_loader_processes_mix_alike(root, n_processes):
    data = MixedDataset(ImageFolder(root, Compose(CHAIN + TO_FLOAT)), MIXINGS["both"], 3)
    expected = whole_epochs(SerialIterator, data, 8)
    same(whole_epochs(MultiprocessIterator, data, 8, n_processes=n_processes), expected)


def test_partners_in_a_batch_are_read_once(root):
    reads = []

    class Counting(ImageFolder):
        def get_raw(self, i, *decode):
            reads.append(int(i))
            return super().get_raw(i, *decode)

    data = MixedDataset(Counting(root, Compose([CenterCrop(16), ToCHW()])), [Mixup()], 3)
    for _ in SerialIterator(data, 6, repeat=False, seed=1):
        pass
    assert sorted(reads) == list(range(23))


def test_images_stay_uint8_until_they_are_finished(root):
    data = MixedDataset(ImageFolder(root, Compose(CHAIN + TO_FLOAT)), [Mixup()], 3)
    batch = SerialIterator(data, 8, seed=1).next()
    assert isinstance(batch, Batch) and batch.raw[0][0].dtype == np.uint8
    x, t = batch.arrays
    assert x.shape == (8, 3, 16, 16) and x.dtype == np.float32 and t.shape == (8, 3) and t.dtype == np.float32


def test_sizes_may_change_with_the_epoch(root):
    sizes = ByEpoch({0: RandomResizedCrop(8), 1: RandomResizedCrop(12)})
    data = MixedDataset(ImageFolder(root, Compose([sizes, *TO_FLOAT])), [CutMix()], 3)
    found = whole_epochs(SerialIterator, data, 8)
    assert {epoch: x.shape for (epoch, _), (x, _) in found.items()} == {0: (3, 8, 8), 1: (3, 12, 12)}
    same(whole_epochs(MAKERS["2 threads"], data, 8), found)


# ---- examples that cannot be read ----
def test_a_partner_that_cannot_be_read_leaves_an_example_alone(tmp_path):
    root = class_folders(tmp_path / "x", (("ant", 4), ("bee", 4)))
    (root / "ant" / "2.jpg").write_bytes(jpeg(2)[:-30])
    chain = Compose([CenterCrop(16), *TO_FLOAT])
    data = MixedDataset(ImageFolder(root, chain, on_corrupt="skip"), [Mixup()], 2)
    iterator = SerialIterator(data, 8, seed=0, repeat=False)
    batch = iterator.next()
    assert len(batch) == iterator.num_read == 7 and len(iterator.skipped) == 1 and "ant/2.jpg" in iterator.skipped[0]
    partner = int(data.partners(0, 0)[2])
    rows = [i for i in iterator.indices if i != 2]
    x, t = batch.arrays
    plain, label = ImageFolder(root, chain)[partner]
    assert np.array_equal(x[rows.index(partner)], plain)
    assert t[rows.index(partner)].tolist() == np.eye(2)[label].tolist()
    skipped = []
    assert len(data.get_batch(np.array([2]), 0, 0, skipped)) == 0 and len(skipped) == 1
    with pytest.raises(CorruptExampleError):
        data.example_at(2, 0, 0)
    with pytest.raises(CorruptExampleError, match=r"ant/2\.jpg"):
        MixedDataset(ImageFolder(root, chain), [Mixup()], 2).get_batch(np.arange(8), 0, 0, [])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Mixup(0), "alpha: expected a number above 0, got 0"),
        (lambda: CutMix(1.0, 2), "p: expected a number from 0 to 1, got 2"),
        (lambda: MixedDataset(arrays(), [], 4), "expected at least one way to mix and one class, got 0 ways"),
        (lambda: MixedDataset(arrays(), [Mixup()], 3)[0], "expected labels from 0 to 2 to mix, got 0 to 3"),
        (lambda: MixedDataset(arrays(dtype=np.float32)._datasets[0], [Mixup()], 4)[0], r"examples of \(image, label\)"),
        (lambda: MixedDataset(arrays(shape=(7,)), [Mixup()], 4)[0], r"examples of \(image, label\) with images"),
    ],
)
def test_what_cannot_be_mixed_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_soft_labels_are_not_mixed_again():
    data = MixedDataset(MixedDataset(arrays(), [Mixup()], 4), [Mixup()], 4)
    with pytest.raises(DatasetError, match="expected an integer label for each image to mix, got float32"):
        data.get_batch(np.arange(10), 0, 0, [])


def test_it_travels_and_may_be_split():
    data = pickle.loads(pickle.dumps(MixedDataset(arrays(), [Mixup()], 4)))
    part = SubDataset(data, 2, 6)
    for k in range(4):
        for a, b in zip(part.example_at(k, 1, 1), data.example_at(k + 2, 1, 1), strict=True):
            assert np.array_equal(a, b)
    assert np.array_equal(data[-1][0], data[9][0])
    with pytest.raises(IndexError):
        data[10]


IMAGE = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)


@each(
    case=[
        ([(IMAGE, 0), (IMAGE, 2)], 3, None),
        ([(IMAGE, 0), (IMAGE, 2)], 2, "expected labels from 0 to 1 to mix, got 0 to 2"),
        ([(IMAGE, -1), (IMAGE, 0)], 2, "expected labels from 0 to 1 to mix, got -1 to 0"),
        ([(IMAGE, 0, 1)], 3, "expected examples of (image, label) with images of one size to mix"),
        ([IMAGE], 3, "expected examples of (image, label) with images of one size to mix"),
        ([(IMAGE[0], 1)], 3, "expected examples of (image, label) with images of one size to mix"),
        ([(IMAGE, 1.0)], 3, "expected an integer label for each image to mix, got float64 of (1,)"),
        ([(IMAGE, np.array([1, 2]))], 3, "expected an integer label for each image to mix, got int64 of (1, 2)"),
    ]
)
def test_examples_that_can_be_mixed(case):
    examples, num_classes, words = case
    mixed = datasets.MixedDataset(examples, [datasets.Mixup()], num_classes)
    if words is None:
        assert len(mixed) == 2 and mixed[0][1].shape == (num_classes,)
    else:
        with pytest.raises(DatasetError, match=re.escape(words)):
            mixed[0]


@each(way=[datasets.Mixup, datasets.CutMix])
def test_a_class_in_the_place_of_a_way_to_mix_is_named(way):
    for given in (way, [way]):
        with pytest.raises(TypeError, match=rf"^MixedDataset: mixings: expected a way to mix, .*{way.__name__}"):
            datasets.MixedDataset([(np.zeros((4, 4, 3), np.uint8), 1)], given, 2)
