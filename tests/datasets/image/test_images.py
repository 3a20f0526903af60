"""Decoding and resizing: every decoder gives the same pixels and the same verdict; NumPy resizes as OpenCV does."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.datasets.image import images, opencv
from dbrdist.datasets.public import pickled
from tests.each import each

Pillow = pytest.importorskip("PIL.Image", reason="needs Pillow to write test images")


def picture(h=40, w=56, c=3):
    y, x = np.mgrid[:h, :w]
    channels = [127 + 100 * np.sin(x / (5 + k) + y / 9) for k in range(c)]
    return np.stack(channels, -1).astype(np.uint8)


def encoded(pixels, kind, mode=None, **options):
    file = io.BytesIO()
    image = Pillow.fromarray(pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
    (image.convert(mode) if mode else image).save(file, kind, **options)
    return file.getvalue()


@pytest.fixture(params=["simplejpeg", "opencv", "pillow"])
def only(request, monkeypatch):
    """One decoder alone, as if no other were installed."""
    module, _ = images._DECODERS[request.param]
    pytest.importorskip(module, reason=f"{request.param} is not installed")
    monkeypatch.setattr(images, "_installed", lambda: (request.param,))
    return request.param


@pytest.fixture(params=["opencv", "pillow"])
def only_png(request, monkeypatch):
    """One decoder of PNGs alone."""
    pytest.importorskip(images._DECODERS[request.param][0], reason=f"{request.param} is not installed")
    monkeypatch.setattr(images, "_installed", lambda: (request.param,))


def test_a_jpeg_has_its_pixels(only):
    pixels = images.decode(encoded(picture(), "jpeg", quality=98))
    assert (pixels.shape, pixels.dtype) == ((40, 56, 3), np.uint8)
    assert np.abs(pixels.astype(int) - picture()).mean() < 3


def test_a_jpeg_is_written_by_the_library_that_is_there(only, monkeypatch):
    """In its colours, at the quality asked for, with half the resolution of colours."""
    foreign = {"simplejpeg": ["_cv2"], "opencv": ["_simplejpeg"], "pillow": ["_cv2", "_simplejpeg"]}[only]
    for name in foreign:
        monkeypatch.setattr(images, name, None)
    if only != "pillow":
        monkeypatch.setattr(Pillow, "fromarray", None)
    data, short = (images.encode_jpeg(picture(), quality) for quality in (95, 20))
    monkeypatch.undo()
    read = Pillow.open(io.BytesIO(data))
    assert (read.format, read.size, read.mode) == ("JPEG", (56, 40), "RGB")
    assert np.abs(np.asarray(read).astype(int) - picture()).mean() < 4
    assert [sampling[1:3] for sampling in read.layer] == [(2, 2), (1, 1), (1, 1)]
    assert len(short) < len(data)


def test_a_png_has_exactly_its_pixels(only_png):
    assert np.array_equal(images.decode(encoded(picture(), "png")), picture())


def test_simplejpeg_alone_cannot_read_png(monkeypatch):
    monkeypatch.setattr(images, "_installed", lambda: ("simplejpeg",))
    with pytest.raises(ImportError, match="expected OpenCV or Pillow to decode PNG"):
        images.decode(encoded(picture(), "png"))


def test_gray_files_become_rgb_or_keep_their_channel(only):
    data = encoded(picture(c=1), "jpeg", quality=95)
    assert images.decode(data).shape == (40, 56, 3)
    assert images.decode(data, keep_channels=True).shape == (40, 56, 1)


def test_transparency_is_kept_on_demand_only(only_png):
    data = encoded(picture(c=4), "png")
    assert np.array_equal(images.decode(data), picture()[..., :3])
    assert np.array_equal(images.decode(data, keep_channels=True), picture(c=4))


def test_every_decoder_keeps_the_same_channels(only_png):
    gray, coloured = Pillow.fromarray(picture()).convert("L"), Pillow.fromarray(picture())
    transparent = np.zeros((40, 56, 4), np.uint8)
    cases = [(gray.convert("1"), {}, 1), (gray.convert("LA"), {}, 4), (coloured.quantize(8), {}, 3)]
    cases += [(coloured.quantize(8), {"transparency": 3}, 4), (Pillow.fromarray(transparent), {}, 4)]
    for image, options, channels in cases:
        file = io.BytesIO()
        image.save(file, "png", **options)
        found = images.decode(file.getvalue(), keep_channels=True)
        expected = np.asarray(Pillow.open(io.BytesIO(file.getvalue())).convert({1: "L", 3: "RGB", 4: "RGBA"}[channels]))
        assert np.array_equal(found, expected.reshape(40, 56, channels))


def test_the_orientation_tag_is_not_applied(only):
    exif = Pillow.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    assert images.decode(encoded(picture(), "jpeg", exif=exif)).shape == (40, 56, 3)


def test_sixteen_bits_become_eight(only_png):
    file = io.BytesIO()
    Pillow.fromarray(picture(c=1)[:, :, 0].astype(np.uint16) * 256 + 7).save(file, "png")
    assert np.array_equal(images.decode(file.getvalue(), keep_channels=True), picture(c=1))
    colours = images.decode(file.getvalue())
    assert colours.shape == (40, 56, 3) and np.abs(colours.astype(int) - picture(c=1)).max() <= 1


def test_corrupt_files_are_refused(only):
    jpeg = encoded(picture(), "jpeg")
    for data in (
        jpeg[: len(jpeg) // 2],
        jpeg[:-2],
        jpeg[:3],
        b"",
        b"GIF89a" + bytes(100),
        jpeg[:20] + b"\xff\xda\xff\xd9",
    ):
        with pytest.raises(images.ImageDecodeError):
            images.decode(data)


def test_the_verdict_on_a_truncated_file_says_so():
    jpeg = encoded(picture(), "jpeg")
    with pytest.raises(images.ImageDecodeError, match=r"cut short: its \d+ bytes have no end marker"):
        images.decode(jpeg[:-20])
    with pytest.raises(images.ImageDecodeError, match="neither JPEG nor PNG: it starts with b'hello' and has 5 bytes"):
        images.decode(b"hello")


def test_cmyk_is_read_by_the_next_decoder():
    pytest.importorskip("cv2", reason="needs a second decoder")
    pixels = images.decode(encoded(picture(), "jpeg", mode="CMYK", quality=95))
    assert pixels.shape == (40, 56, 3)


def test_decoders_agree():
    data = encoded(picture(), "jpeg", quality=90)
    decoded = [images._DECODERS[name][1](data, False, False).astype(int) for name in images._installed()]
    for pixels in decoded[1:]:
        assert np.abs(pixels - decoded[0]).mean() < 2.0


def test_the_first_installed_decoder_is_named():
    names = {"simplejpeg": "simplejpeg", "cv2": "opencv", "PIL": "pillow"}
    expected = next(name for module, name in names.items() if opencv.importlib.util.find_spec(module))
    assert images.decoder() == expected


def test_no_decoder_is_an_error_that_names_the_extra(monkeypatch):
    images._installed.cache_clear()
    monkeypatch.setattr(opencv.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"install dbrdist\[image\]"):
        images.decoder()
    monkeypatch.undo()
    images._installed.cache_clear()


@pytest.mark.parametrize("method", ["linear", "area"])
@pytest.mark.parametrize("size", [(20, 28), (17, 23), (80, 100), (40, 20), (1, 1), (100, 10)])
@pytest.mark.parametrize("channels", [1, 3])
def test_numpy_resizes_as_opencv_does(size, method, channels):
    pytest.importorskip("cv2", reason="needs OpenCV to compare with")
    source = picture(c=channels)
    ours, theirs = images.resize_numpy(source, *size, _shrinks(method, size)), images.resize(source, *size, method)
    assert ours.shape == theirs.shape == (*size, channels)
    assert np.abs(ours.astype(int) - theirs).max() <= 2


def _shrinks(method, size):
    return method if size[0] <= 40 and size[1] <= 56 else "linear"


def test_resize_without_opencv(monkeypatch):
    monkeypatch.setattr(images, "resizer", lambda: "numpy")
    constant = np.full((9, 7, 3), 200, np.uint8)
    assert np.array_equal(images.resize(constant, 5, 4, "area"), np.full((5, 4, 3), 200, np.uint8))
    ramp = np.arange(0, 80, 10, dtype=np.uint8).reshape(1, 8, 1)
    assert images.resize(ramp, 1, 4, "area").ravel().tolist() == [5, 25, 45, 65]
    assert images.resize(ramp, 1, 8) is ramp


def test_resize_refuses_unknown_methods():
    with pytest.raises(ValueError, match="'linear', 'area', 'bilinear' or 'bicubic', got 'cubic'"):
        images.resize(picture(), 3, 3, "cubic")


@pytest.mark.programs
def test_opencv_is_not_loaded_by_import():
    import subprocess

    code = "import sys, dbrdist.datasets; print([m for m in ('cv2', 'PIL', 'simplejpeg') if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": "."}
    )
    assert out.stdout.strip() == "[]"


# ---- windows ----
def encoded_files():
    """JPEGs with each way to thin out colours, and what the window's own decoder leaves to others."""
    simplejpeg = pytest.importorskip("simplejpeg")
    rng = np.random.default_rng(3)
    pixels = np.ascontiguousarray((np.kron(rng.integers(0, 256, (11, 13, 3)), np.ones((4, 4, 1))))[:41, :51], np.uint8)
    pixels += rng.integers(0, 9, pixels.shape, np.uint8)
    files = {way: simplejpeg.encode_jpeg(pixels, 92, "RGB", way) for way in ("444", "422", "420", "440", "411")}
    for name, kind, mode, options in (
        ("gray", "JPEG", "L", {}),
        ("restarts", "JPEG", "RGB", {"restart_marker_blocks": 2}),
        ("progressive", "JPEG", "RGB", {"progressive": True}),
        ("CMYK", "JPEG", "CMYK", {}),
        ("PNG", "PNG", "RGB", {}),
    ):
        file = io.BytesIO()
        Pillow.fromarray(pixels).convert(mode).save(file, kind, **options)
        files[name] = file.getvalue()
    return files


def test_a_window_has_the_pixels_of_the_whole_image(monkeypatch):
    """Rows below it are not decoded, and those above them are as they are without that."""
    simplejpeg = pytest.importorskip("simplejpeg")
    plain, heights = simplejpeg.decode_jpeg, []
    monkeypatch.setattr(
        simplejpeg, "decode_jpeg", lambda *a, **b: [heights.append(len(found := plain(*a, **b))), found][1]
    )
    for name, data in encoded_files().items():
        for fast in (False, True):
            whole = images.decode(data, fast=fast)
            image = images.Encoded(data, fast)
            assert image.shape == whole.shape == (41, 51, 3)
            for bottom in range(1, 42):
                heights.clear()
                top, left, right = bottom // 3, bottom // 2, 51 - bottom // 4
                window = image[top:bottom, left:right]
                assert np.array_equal(window, whole[top:bottom, left:right]), (name, fast, bottom)
                if name in ("444", "422", "420", "gray", "restarts"):
                    assert heights[0] <= min(bottom + 2, 41), (name, bottom)


def test_a_window_of_a_damaged_file_is_that_of_the_whole_image():
    """Not so of progressive ones, which libjpeg-turbo fills up with what its memory held before."""
    rng, files = np.random.default_rng(0), encoded_files()
    num_decoded = 0
    for _ in range(300):
        data = bytearray(files[str(rng.choice(["444", "420", "gray", "restarts"]))])
        for at in rng.integers(2, len(data), rng.integers(1, 4)):
            data[at] ^= 1 << int(rng.integers(8))
        bottom = int(rng.integers(1, 42))
        try:
            whole = images.decode(bytes(data))
        except images.ImageDecodeError:
            with pytest.raises(images.ImageDecodeError):
                images.Encoded(bytes(data))[:bottom, :]
            continue
        window = images.Encoded(bytes(data))[:bottom, :]
        assert np.array_equal(window, whole[:bottom])
        num_decoded += 1
    assert num_decoded > 150


def segments(data):
    """(marker, begin, end) of each segment of a JPEG up to its scan."""
    at, found = 2, []
    while not found or found[-1][0] != 0xDA:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4])
        found.append((data[at + 1], at, end))
        at = end
    return found


@pytest.mark.slow
def test_a_file_that_ends_within_its_header_is_corrupt_and_no_error_in_reading_it():
    """Where the end marker comes before the scan, or the header says more colours than it describes, or none."""
    pytest.importorskip("simplejpeg")
    for name in ("420", "gray"):
        data = encoded_files()[name]
        places = {marker: (begin, end) for marker, begin, end in segments(data)}
        (frame, _), (scan, end) = places[0xC0], places[0xDA]
        damaged = [data[:at] + bytes(n) + b"\xff\xd9" for at in range(2, end) for n in (0, 1, 2, 5, 9)]
        for num_components in (0, 4, 255):
            other = bytearray(data)
            other[frame + 9] = other[scan + 4] = num_components
            damaged += [bytes(other), bytes(other[: frame + 16]) + b"\xff\xd9"]
        refused = 0
        for other in damaged:
            try:
                whole = images.decode(other)
            except images.ImageDecodeError:
                refused += 1
                with pytest.raises(images.ImageDecodeError):
                    images.Encoded(other)[:7, :]
            else:
                assert np.array_equal(images.Encoded(other)[:7, :], whole[:7])
        assert refused > len(damaged) // 2


def test_pixels_that_the_decoder_left_out_are_not_what_memory_held():
    """An error behind a warning: simplejpeg says nothing, and wrote nothing."""
    simplejpeg = pytest.importorskip("simplejpeg")
    data = bytearray(encoded_files()["420"])
    places = {marker: (begin, end) for marker, begin, end in segments(data)}
    table = slice(places[0xC4][0] + 5, places[0xC4][0] + 21)  # how many codes there are of each length
    data[table] = bytes([sum(data[table]), *15 * [0]])  # more than there can be of one bit
    data[places[0xDA][1] - 2] = 17  # a warning
    for value in (3, 200):
        room = np.full((41, 51, 3), value, np.uint8)
        simplejpeg.decode_jpeg(bytes(data), "RGB", strict=False, buffer=room)
        assert (room == value).all()
    for decode in (images.decode, lambda data: images.Encoded(data)[:7, :]):
        with pytest.raises(images.ImageDecodeError, match="has not read it to its end"):
            decode(bytes(data))


def test_an_image_may_end_with_the_pixel_by_which_its_end_is_known(monkeypatch):
    simplejpeg = pytest.importorskip("simplejpeg")
    for mark in images._MARKS:
        pixels = np.zeros((4, 5, 3), np.uint8)
        pixels[-1, -1] = list(mark)

        def decode(*_, buffer, pixels=pixels, **__):
            buffer[:] = pixels.ravel()
            return buffer.reshape(pixels.shape)

        monkeypatch.setattr(simplejpeg, "decode_jpeg", decode)
        assert np.array_equal(images._decode_into(np.empty(60, np.uint8), (4, 5, 3), b"", "RGB", False), pixels)


def test_garbage_between_segments_leaves_pixels_as_they_are():
    """What stands where a scan would be is none then, and may be followed by several."""
    pytest.importorskip("simplejpeg")
    for name, data in encoded_files().items():
        if name == "PNG":
            continue
        whole = images.decode(data)
        for _, begin, _ in segments(data)[1:]:
            for garbage in (b"\0\0\0\0\1", b"\3\3\3\3\3\3", b"\xff\xff"):
                other = data[:begin] + garbage + data[begin:]
                assert np.array_equal(images.Encoded(other)[:7, :], whole[:7]), (name, begin)


IMAGE = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)


def test_images_have_a_limit_of_pixels(monkeypatch):
    pil = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    pil.fromarray(IMAGE).save(file, "PNG")
    for limit in (20, 19):
        monkeypatch.setattr(images, "MAX_PIXELS", limit)
        if limit == 20:
            np.testing.assert_array_equal(images.decode(file.getvalue()), IMAGE)
        else:
            with pytest.raises(images.ImageDecodeError, match="it claims 4x5 pixels, more than the limit of 19"):
                images.decode(file.getvalue())


@each(is_there=[False, True])
def test_images_are_resized_by_the_library_that_is_there(is_there):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opencv.importlib.util, "find_spec", lambda name: (name == "cv2" and is_there) or None)
        assert images.resizer.__wrapped__() == ("opencv" if is_there else "numpy")


def test_a_writer_is_flushed_where_it_can_be():
    calls = []
    with_flush = SimpleNamespace(write=calls.append, flush=lambda: calls.append("flush"))
    pickled.PickleDatasetWriter(with_flush).flush()
    pickled.PickleDatasetWriter(SimpleNamespace(write=calls.append)).flush()
    assert calls == ["flush"] and images.MAX_PIXELS == 100_000_000


BASELINE, EXTENDED, PROGRESSIVE = 0xC0, 0xC1, 0xC2
END = b"\xff\xd9"


def segment(marker, body=b"", length=None):
    return bytes([0xFF, marker]) + (len(body) + 2 if length is None else length).to_bytes(2) + body


def frame(factors=(0x22, 0x11, 0x11), kind=BASELINE, num_components=None, height=40, width=56):
    """The header of a frame: precision, height, width, and number, factors and table of each component."""
    components = b"".join(bytes([k + 1, factor, 0]) for k, factor in enumerate(factors))
    number = len(factors) if num_components is None else num_components
    return segment(kind, bytes([8]) + height.to_bytes(2) + width.to_bytes(2) + bytes([number]) + components)


def scan(num_components=3, marker=0xDA):
    return segment(marker, bytes([num_components, *2 * num_components * [0], 0, 63, 0]))


@each(
    **{"head, following, more": [
        (frame(), scan(), 2),
        (frame(kind=EXTENDED), scan(), 2),
        (frame((0x21, 0x12, 0x11)), scan(), 2),
        (frame((0x41, 0x11, 0x13)), scan(), 3),
        (frame((0x4F,)), scan(1), 15),
        (frame((0x11, 0x14), num_components=1), scan(1), 1),
        (frame((), num_components=0), scan(0), 0),
        (frame(kind=PROGRESSIVE), scan(), None),
        (frame(kind=0xC3), scan(), None),
        (frame(), scan(2), None),
        (frame((0x11,)), scan(3), None),
        (frame(), scan(marker=0xDB), None),
        (frame(kind=PROGRESSIVE), scan(2, marker=0xDB), None),
    ]}
)  # fmt: skip
def test_how_many_rows_of_a_jpeg_are_needed(head, following, more):
    for garbage in (b"", b"\1\2\3\4\5"):
        data = garbage + head + following
        found = images._last_row(data, len(garbage), len(garbage) + len(head), 7)
        assert found == (0xFFFF if more is None else 7 + more)


@each(marker=range(0xC0, 0xD0))
def test_the_size_is_that_of_a_frame(marker):
    """ITU-T T.81, table B.1: C4, C8 and CC mark tables, an extension and arithmetic coding."""
    data = b"\xff\xd8" + segment(0xE0, bytes(5)) + frame(kind=marker, height=300, width=2) + scan() + END
    place = 0 if marker in (0xC4, 0xC8, 0xCC) else 2 + 9
    assert images._check_jpeg(data) == (place, 2 + 9 + 19)
    assert images._size(data, place) == ((300, 2) if place else (0, 0))


def test_segments_of_a_jpeg_are_gone_through_to_the_scan():
    start, body = b"\xff\xd8", bytes(20)
    first = segment(0xE1, body)
    for between in (b"", b"\xff", b"\xff\xff\xff", first, segment(0x00, body), segment(0x01)):
        data = start + first + between + frame() + scan() + body + END
        place = 2 + len(first) + len(between)
        assert images._check_jpeg(data) == (place, place + len(frame())), between
    for stop in (b"\xfe\xff\0\4\0\0", b"\0\0\0\4\0\0", scan()):
        assert images._check_jpeg(start + first + stop + frame() + body + END) == (0, 2 + len(first))
    two = start + frame(height=1) + frame(height=2) + scan() + END
    assert images._size(two, images._check_jpeg(two)[0]) == (2, 56)


def test_the_end_of_a_jpeg_stands_behind_its_scan():
    start = b"\xff\xd8" + frame()
    thumbnail = segment(0xE1, END + bytes(20))
    assert images._check_jpeg(start + thumbnail + scan() + END)[0] == 2
    for data in (start + thumbnail + scan(), start + segment(0xE1, bytes(30), length=60) + END):
        with pytest.raises(images.ImageDecodeError, match=f"cut short: its {len(data)} bytes have no end marker"):
            images._check_jpeg(data)


def test_a_frame_has_its_size_and_its_number_of_components():
    """What is read of it lies within the file."""
    short = segment(BASELINE, bytes(3), length=2)
    for num_behind, is_read in ((3, True), (2, False)):
        data = b"\xff\xd8" + segment(0xE0, bytes(4)) + short + bytes(num_behind - 2) + END
        assert images._check_jpeg(data)[0] == (10 if is_read else 0)


needs_opencv = pytest.mark.skipif(images.resizer() != "opencv", reason="OpenCV is missing")


@needs_opencv
@each(dtype=["f2", "f4", "f8", "u2", "i4"], channels=[1, 2, 3, 4])
def test_values_are_looked_up(dtype, channels):
    rng = np.random.default_rng(channels)
    table = rng.integers(0, 2000, (256, channels)).astype(dtype)
    for shape in ((5, 7), (2, 5, 7), (2, 1, 3, 2)):
        x = rng.integers(0, 256, (*shape, channels), np.uint8)
        found = images.lookup(x, table)
        assert found.dtype == table.dtype
        np.testing.assert_array_equal(found, table[x, np.arange(channels)])


@needs_opencv
@each(reason=["five channels", "no values", "a stride", "one byte", "sixteen bytes", "no OpenCV"])
def test_what_is_not_looked_up(reason, monkeypatch):
    x, table = np.zeros((4, 6, 3), np.uint8), np.ones((256, 3), np.float32)
    assert images.lookup(x, table) is not None
    if reason == "five channels":
        x, table = np.zeros((4, 6, 5), np.uint8), np.ones((256, 5), np.float32)
    elif reason == "no OpenCV":
        monkeypatch.setattr(images, "resizer", lambda: "numpy")
        monkeypatch.setattr(images, "_cv2", None)
    else:
        x = {"no values": x[:0], "a stride": x[:, ::2]}.get(reason, x)
        table = table.astype({"one byte": "u1", "sixteen bytes": "c16"}.get(reason, "f4"))
    assert images.lookup(x, table) is None


@each(size=[(4, 3), (2, 6), (2, 3), (1, 1)], way=["opencv", "numpy"])
def test_means_over_areas_of_one_side_or_of_both(size, way):
    image = np.random.default_rng(3).integers(0, 256, (4, 6, 3), np.uint8)
    (h, w), (height, width) = image.shape[:2], size
    expected = image.reshape(height, h // height, width, w // width, 3).mean((1, 3))
    if way == "opencv" and images.resizer() != "opencv":
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "resizer", lambda: way)
        found = images.resize(image, height, width, "area")
    np.testing.assert_allclose(found, expected, atol=0.51)
