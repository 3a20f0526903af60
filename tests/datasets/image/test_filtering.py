"""Filtered resizing against Pillow, on smooth, noisy and extreme images."""

import numpy as np
import pytest

from dbrdist import kernels
from dbrdist.datasets import CenterResizedCrop, RandomResizedCrop, Resize
from dbrdist.datasets.image import filtering
from dbrdist.datasets.image.images import resize
from tests.each import each
from tests.kernels.cpu.test_loops import compiled

Pillow = pytest.importorskip("PIL.Image")
FLAGS = {"bilinear": Pillow.Resampling.BILINEAR, "bicubic": Pillow.Resampling.BICUBIC}


def images():
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (61, 83, 3)).astype(np.uint8)
    yield noise
    yield rng.integers(0, 2, (61, 83, 3)).astype(np.uint8) * 255  # cubics overshoot, and are cut off
    y, x = np.mgrid[:61, :83]
    yield np.stack([x * 3, y * 4, x + y], 2).astype(np.uint8)
    yield noise[:, :, :1]


@each(
    image=list(images()),
    method=["bilinear", "bicubic"],
    size=[(30, 41), (61, 20), (17, 83), (64, 64), (150, 200), (1, 1), (61, 84), (150, 60)],
    resizer=[filtering.resize, filtering.resize_numpy, resize],
)
def test_results_are_within_one_of_pillows(image, method, size, resizer):
    height, width = size
    source = Pillow.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    expected = np.array(source.resize((width, height), FLAGS[method])).reshape(height, width, -1).astype(int)
    made = resizer(image, height, width, method)
    assert made.dtype == np.uint8
    assert made.shape == expected.shape
    by_pillow = method == "bicubic" and resizer is not filtering.resize_numpy
    assert np.abs(made.astype(int) - expected).max() <= (0 if by_pillow else 1)


@pytest.mark.torch
@each(method=["bilinear", "bicubic"], size=[(30, 41), (17, 83), (100, 20)])
def test_results_are_within_one_of_torchvisions_way(method, size):
    """torch's interpolate with antialias, which torchvision takes for tensors."""
    torch = pytest.importorskip("torch")
    image = list(images())[0 if method == "bilinear" else 2]  # it does not cut off between both directions
    x = torch.from_numpy(image.transpose(2, 0, 1)[None].astype(np.float32))
    y = torch.nn.functional.interpolate(x, size, mode=method, antialias=True, align_corners=False)
    expected = np.clip(np.rint(y[0].numpy().transpose(1, 2, 0)), 0, 255)
    assert np.abs(filtering.resize_numpy(image, *size, method) - expected).max() <= 1


def by_integers(image, new, method):
    """Along the first axis, pixel by pixel, in whole numbers of weights that are rounded as the module says."""
    one = 1 << (16 if method == "bilinear" else 15)
    old, scale = len(image), len(image) / new
    stretch = max(scale, 1.0)
    reach = stretch * (1 if method == "bilinear" else 2)
    found = np.empty((new, *image.shape[1:]), np.uint8)
    for i in range(new):
        centre = (i + 0.5) * scale
        pixels = range(max(int(np.floor(centre - reach + 0.5)), 0), min(int(np.floor(centre + reach + 0.5)), old))
        shares = [share(abs(p + 0.5 - centre) / stretch, method) for p in pixels]
        whole = [round(one * s / sum(shares)) for s in shares]
        whole[whole.index(max(whole))] += one - sum(whole)
        total = sum(k * image[p].astype(int) for k, p in zip(whole, pixels))
        found[i] = np.clip((total + one // 2) // one, 0, 255)
    return found


def share(x, method):
    if method == "bilinear":
        return max(1 - x, 0)
    return 1.5 * x**3 - 2.5 * x**2 + 1 if x < 1 else -0.5 * (x - 1) * max(2 - x, 0) ** 2


@each(method=["bilinear", "bicubic"], size=[(5, 7), (9, 3), (61, 9), (7, 83), (130, 90)], image=list(images()))
def test_sums_are_exact(method, size, image):
    columns = by_integers(image.transpose(1, 0, 2), size[1], method) if size[1] != 83 else image.transpose(1, 0, 2)
    expected = by_integers(columns.transpose(1, 0, 2), size[0], method) if size[0] != 61 else columns.transpose(1, 0, 2)
    np.testing.assert_array_equal(filtering.resize_numpy(image, *size, method), expected)


@each(image=list(images()), method=["bilinear", "bicubic"])
def test_opencv_parts_and_memory_change_nothing(monkeypatch, image, method):
    large = np.tile(image, (3, 2, 1))
    expected = filtering.resize_numpy(large, 40, 50, method)
    out = np.empty_like(expected)
    assert filtering.resize_numpy(large, 40, 50, method, out) is out
    np.testing.assert_array_equal(out, expected)
    window = np.tile(image, (4, 3, 1))[: len(large), : large.shape[1]]  # rows that do not follow each other
    np.testing.assert_array_equal(filtering.resize_numpy(window, 40, 50, method), expected)
    with monkeypatch.context() as m:
        m.setattr(filtering, "_PRODUCT", 1)
        np.testing.assert_array_equal(filtering.resize_numpy(large, 40, 50, method), expected)
        m.setattr(filtering, "cv2_or_none", lambda: None)
        np.testing.assert_array_equal(filtering.resize_numpy(large, 40, 50, method), expected)


@each(
    method=["bilinear", "bicubic"], size=[(30, 41), (90, 20), (61, 20), (1, 1)], dtype=["float32", "float64", "int16"]
)
def test_other_types_of_pixels(method, size, dtype):
    """Pillow resizes floating numbers of one channel, with a filter of the same weights."""
    image = (next(images()).astype(dtype) - 100) * 3
    planes = [Pillow.fromarray(image[:, :, k].astype(np.float32)).resize(size[::-1], FLAGS[method]) for k in range(3)]
    expected = np.stack([np.array(plane) for plane in planes], 2)
    made = resize(image, *size, method)
    assert made.dtype == dtype
    np.testing.assert_allclose(made, expected, atol=0.51 if dtype == "int16" else 2e-3)


@each(dtype=["uint8", "int16", "uint32", "int64", "uint64"], method=["bilinear", "bicubic"])
def test_the_largest_integers_stay_so(dtype, method):
    for value in (np.iinfo(dtype).min, np.iinfo(dtype).max):
        made = resize(np.full((4, 5, 3), value, dtype), 7, 3, method)
        np.testing.assert_allclose(made.astype(np.float64), np.full((7, 3, 3), float(value)), rtol=1e-12)


@each(method=["bilinear", "bicubic"], size=[(100, 5), (41, 60), (10, 5)], value=[np.nan, np.inf])
def test_a_number_that_is_not_finite_spoils_what_it_is_part_of_alone(method, size, value):
    image = next(images()).astype(np.float32)[:41, :30, :1]
    expected = resize(image, *size, method)
    spoilt = image.copy()
    spoilt[20, 15] = value
    made, mask = resize(spoilt, *size, method), resize((spoilt != image).astype(np.float64), *size, method) != 0
    assert 0 < mask.sum() < 0.5 * mask.size
    np.testing.assert_array_equal(np.isfinite(made), ~mask)
    np.testing.assert_allclose(made[~mask], expected[~mask], rtol=1e-6, atol=1e-4)


@each(length=[8000, 65500, 200_000], new=[1, 2, 3])
def test_very_long_images(length, new):
    """Weights are then a few of the smallest ones, and the pixel with the largest had most of the sum."""
    image = np.zeros((length, 3, 1), np.uint8)
    image[length // 2, 0] = 255
    image[length // 2 :, 1] = 255
    image[:, 2, 0] = np.random.default_rng(0).integers(0, 256, length)
    source = Pillow.fromarray(image[:, :, 0])
    expected = np.array(source.resize((3, new), FLAGS["bilinear"])).astype(int)
    assert np.abs(resize(image, new, 3, "bilinear")[:, :, 0] - expected).max() <= 1
    assert filtering._weights(length, new, "bilinear", 16)[2].min() >= 0


def test_no_thread_keeps_much_memory(monkeypatch):
    image = np.tile(next(images()), (3, 3, 1))
    expected = filtering.resize_numpy(image, 40, 50, "bilinear")
    monkeypatch.setattr(filtering, "_rooms", filtering._Rooms())
    monkeypatch.setattr(filtering, "_MAX_ROOM_BYTES", 10_000)
    np.testing.assert_array_equal(filtering.resize_numpy(image, 40, 50, "bilinear"), expected)
    kept = [room._all.nbytes for room in vars(filtering._rooms).values()]
    assert len(kept) == 4 and max(kept) <= 10_000


def test_pixels_that_are_no_numbers_are_refused():
    with pytest.raises(TypeError, match="expected an image of integers or floating numbers to resize, got bool"):
        resize(np.ones((4, 4, 3), bool), 2, 2, "bilinear")


def test_products_are_too_small_for_threads_of_openblas():
    """It divides products of more than 262,144 multiplications, and one caller then waits for another."""
    for old, new in [(10, 224), (300, 224), (500, 64), (4000, 224), (20000, 224)]:
        _, _, weights = filtering._weights(old, new, "bilinear", 16)
        step = max(filtering._PRODUCT // (weights.shape[1] * weights.shape[2]), 32)
        assert weights.shape[1] * weights.shape[2] * step <= 262144 or step == 32


def test_without_pillow_numpy_serves(monkeypatch):
    image = next(images())
    expected = filtering.resize_numpy(image, 20, 30, "bicubic")
    monkeypatch.setattr(filtering, "_pillow", lambda: None)
    np.testing.assert_array_equal(resize(image, 20, 30, "bicubic"), expected)


def test_transforms_take_the_methods():
    image = next(images())
    expected = np.array(Pillow.fromarray(image).resize((44, 32), FLAGS["bicubic"]))
    np.testing.assert_array_equal(Resize(32, "bicubic")(image), expected)
    expected = filtering.resize_numpy(image[5:56, 16:67], 20, 20, "bilinear")
    found = CenterResizedCrop(20, 51 / 61, "bilinear")(image)
    np.testing.assert_array_equal(found, expected)
    whole = RandomResizedCrop(16, (1, 1), (83 / 61, 83 / 61), "bilinear")(image, np.random.default_rng(0))
    np.testing.assert_array_equal(whole, filtering.resize_numpy(image, 16, 16, "bilinear"))


@compiled
@each(image=list(images()), method=["bilinear", "bicubic"], size=[(5, 7), (61, 9), (7, 83), (130, 90), (64, 64)])
def test_the_compiled_loop_gives_the_bytes_of_products(image, method, size):
    found = {}
    for provider in ("loops", "numpy"):
        with kernels.use(provider):
            found[provider] = filtering.resize_numpy(image, *size, method)
            arguments = (image[:, :, 0].copy(), *filtering._taps(61, 30, method, 16), np.empty((30, 83), np.uint8))
            assert kernels.provider_of("filter_rows", *arguments) == provider
    np.testing.assert_array_equal(found["loops"], found["numpy"])
