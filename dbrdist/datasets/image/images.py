"""Decoding and resizing images: simplejpeg, OpenCV or Pillow decode, OpenCV or NumPy resizes.

What counts as corrupt is the same for all decoders: a file that is no JPEG or PNG, a JPEG whose end is missing, or data
that no installed decoder can read. Damage that libjpeg conceals is passed over (some photographs of ImageNet have it).
The turn that a camera's EXIF tag asks for is not applied. Images are (H, W, C) arrays of uint8.
"""

from __future__ import annotations

import functools
import io
import math
import struct
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from dbrdist.core.array.types import Array, ByteArray, Module
from dbrdist.datasets.image import filtering
from dbrdist.datasets.image.opencv import cv2 as _cv2
from dbrdist.datasets.image.opencv import is_installed

Image: TypeAlias = ByteArray  # (H, W, C)
PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"


MAX_PIXELS = 100_000_000  # what a file may claim, before memory is taken for it: 300 MB as RGB
MAX_JPEG_SIDE = 65_500  # libjpeg writes no longer ones


class ImageDecodeError(ValueError):
    """The bytes are not an image that can be read, or a transform makes too large a one of it."""


def check_pixels(height: int, width: int, words: str) -> None:
    """Raise ImageDecodeError for more pixels than memory should be taken for; ``words`` say where they come from."""
    if height * width > MAX_PIXELS:
        raise ImageDecodeError(f"{words}, more than the limit of {MAX_PIXELS:,} pixels")


class _Room(threading.local):
    """Memory of this thread into which images are decoded that are needed only until the next one.

    Fresh memory for each costs a tenth of the time of decoding copies of 256 pixels.
    """

    pixels: Any = None

    def of(self, num_bytes: int) -> Any:
        """Memory of at least this size."""
        if self.pixels is None or self.pixels.size < num_bytes:
            self.pixels = np.empty(num_bytes, np.uint8)
        return self.pixels


_MAX_ROOM_BYTES = 1 << 23  # keeping more would be a waste
_room = _Room()


class Encoded:
    """An image whose pixels are decoded when a window is asked for, and only those down to its last row.

    ``image[top:bottom, left:right]`` has the values that :func:`decode` gives, in memory that this thread uses again
    for its next image. What a random part of a photograph leaves out below is a seventh of the decoder's time.

    Args:
        data: a file's bytes. Raises ImageDecodeError where they are seen to be corrupt at once.
        fast: as for :func:`decode`.
        refuse: makes the exception to raise of an ImageDecodeError that comes later.
    """

    def __init__(self, data: bytes, fast: bool = False, refuse: Callable[[ImageDecodeError], Exception] | None = None):
        self._data, self._fast, self._refuse = data, fast, refuse
        self._pixels: Any = None
        self._frame = 0
        if decoder() == "simplejpeg" and data.startswith(_JPEG):
            self._frame, self._scan = _check_jpeg(data)
        height, width = _size(data, self._frame)
        if 0 < 3 * height * width <= _MAX_ROOM_BYTES:
            self.shape = height, width, 3
        else:
            self._pixels = decode(data, fast=fast)
            self.shape = self._pixels.shape

    def __getitem__(self, window: tuple[slice, slice]) -> Image:
        if self._pixels is None:
            found = self._decoded(window[0].stop)
            if found is not None:
                return found[window]
            try:
                self._pixels = self._whole()
            except ImageDecodeError as e:
                raise (e if self._refuse is None else self._refuse(e)) from e
        return self._pixels[window]

    def _whole(self) -> Image:
        pixels = decode(self._data, fast=self._fast)
        if pixels.shape != self.shape:
            raise ImageDecodeError(f"its header says {self.shape[:2]}, but {pixels.shape[:2]} is what it holds")
        return pixels

    def _decoded(self, bottom: int) -> Image | None:
        """The rows down to ``bottom``, and a few more; None where simplejpeg cannot read it."""
        data, fast, (height, width, _) = self._data, self._fast, self.shape
        end = min(_last_row(data, self._frame, self._scan, bottom), height)
        if end < height:  # the decoder believes the header and ends there
            at = self._frame + 5
            data = b"".join((data[:at], end.to_bytes(2, "big"), memoryview(data)[at + 2 :]))
        try:
            return _decode_into(_room.of(3 * height * width), (end, width, 3), data, "RGB", fast)
        except Exception:  # whatever it is, the other decoders say so, or can read it
            return None


def _last_row(data: bytes, frame: int, scan: int, bottom: int) -> int:
    """How many rows a JPEG must have so that those above ``bottom`` are as they are in the whole image.

    Colours of fewer rows are interpolated, so that a row depends on the colours of the next one. Where several scans
    follow each other (progressive JPEGs), all rows are wanted.
    """
    num_components, is_scan = data[frame + 9], data.startswith(_SCAN_BYTES, scan)
    if data[frame + 1] not in _BASELINE or not is_scan or not data.startswith(data[frame + 9 : frame + 10], scan + 4):
        return _MAX_ROWS
    factors = data[frame + 11 : frame + 11 + 3 * num_components : 3]  # fewer in a damaged file, or none
    return bottom + max([factor & 15 for factor in factors], default=0)


@functools.cache
def _simplejpeg() -> Module:
    import simplejpeg

    return simplejpeg


def _decode_simplejpeg(data: bytes, keep: bool, fast: bool) -> Image:
    simplejpeg = _simplejpeg()
    if not data.startswith(_JPEG):
        raise ImageDecodeError("not a JPEG")
    gray = keep and simplejpeg.decode_jpeg_header(data)[2].lower() == "gray"
    shape = *_size(data, _check_jpeg(data)[0]), 1 if gray else 3
    return _decode_into(np.empty(math.prod(shape), np.uint8), shape, data, "GRAY" if gray else "RGB", fast)


_MARKS = (b"\x13\xb7\x5a", b"\x9c\x41\xe6")  # either, for an image may end with one


def _decode_into(room: Array, shape: tuple[int, int, int], data: bytes, colours: str, fast: bool) -> Image:
    """The pixels, in ``room``.

    Behind a warning simplejpeg passes over any error too, and leaves the rows from there on as they were in memory: the
    last pixel tells whether it has come to the end.
    """
    last = slice(math.prod(shape) - shape[2], math.prod(shape))
    for mark in _MARKS:
        room[last] = memoryview(mark)[: shape[2]]
        found = _simplejpeg().decode_jpeg(data, colours, fast, fast, strict=False, buffer=room)
        if found.shape != shape:
            break
        if room[last].tobytes() != mark[: shape[2]]:
            return found
    raise ImageDecodeError("simplejpeg has not read it to its end")


def _decode_cv2(data: bytes, keep: bool, fast: bool) -> Image:
    cv2 = _cv2()
    flags = (cv2.IMREAD_UNCHANGED if keep else cv2.IMREAD_COLOR) | cv2.IMREAD_IGNORE_ORIENTATION
    if keep and data.startswith(_JPEG):
        flags = cv2.IMREAD_ANYCOLOR | cv2.IMREAD_IGNORE_ORIENTATION
    image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    if image is None:
        raise ImageDecodeError("OpenCV cannot read it")
    if image.dtype == np.uint16:
        image = (image >> 8).astype(np.uint8)
    if image.ndim == 2:
        return image[:, :, None]
    return cv2.cvtColor(image, cv2.COLOR_BGRA2RGBA if image.shape[2] == 4 else cv2.COLOR_BGR2RGB)


def _decode_pillow(data: bytes, keep: bool, fast: bool) -> Image:
    from PIL import Image as Pillow

    with Pillow.open(io.BytesIO(data)) as image:
        if image.mode.startswith("I;16"):  # 16-bit gray: Pillow's own conversion clips instead of scaling
            pixels = (np.asarray(image) >> 8).astype(np.uint8)[:, :, None]
            return pixels if keep else np.repeat(pixels, 3, axis=2)
        mode = _kept_mode(image) if keep else "RGB"
        pixels = np.array(image.convert(mode))
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def _kept_mode(image: Any) -> str:
    """The mode in which Pillow gives what OpenCV gives with all channels."""
    if image.mode in ("1", "L"):
        return "L"
    return "RGBA" if image.has_transparency_data else "RGB"


_DECODERS: dict[str, tuple[str, Callable[[bytes, bool, bool], Image]]] = {
    "simplejpeg": ("simplejpeg", _decode_simplejpeg),
    "opencv": ("cv2", _decode_cv2),
    "pillow": ("PIL", _decode_pillow),
}


@functools.cache
def _installed() -> tuple[str, ...]:
    found = tuple(name for name, (module, _) in _DECODERS.items() if is_installed(module))
    if not found:
        raise ImportError("expected simplejpeg, OpenCV or Pillow to decode images, found none: install dbrdist[image]")
    return found


def decoder() -> str:
    """The decoder of JPEGs: ``'simplejpeg'``, ``'opencv'`` or ``'pillow'``, the first installed, chosen once.

    The next decoder in this row reads what simplejpeg does not: PNG, and JPEG in CMYK.
    """
    return _installed()[0]


@functools.cache
def resizer() -> str:
    """What resizes images: ``'opencv'``, or ``'numpy'`` (the same formula, slower) where that is missing."""
    return "opencv" if is_installed("cv2") else "numpy"


# ---- decoding -------------------------------------------------------------------------------------------------------


def decode(data: bytes, keep_channels: bool = False, fast: bool = False) -> Image:
    """The pixels of a JPEG or PNG file's bytes: (H, W, 3) RGB of uint8.

    With ``keep_channels`` gray images give (H, W, 1) and PNGs with transparency (H, W, 4). With ``fast`` simplejpeg
    takes libjpeg-turbo's fast transform and repeats colours instead of interpolating them; no other decoder has that.
    Raises ImageDecodeError (a
    ValueError) with the reason where the bytes are corrupt.
    """
    if data.startswith(_JPEG):
        height, width = _size(data, _check_jpeg(data)[0])
    elif data.startswith(PNG):
        height, width = int.from_bytes(data[20:24]), int.from_bytes(data[16:20])
    else:
        raise ImageDecodeError(f"neither JPEG nor PNG: it starts with {data[:8]!r} and has {len(data)} bytes")
    check_pixels(height, width, f"it claims {height}x{width} pixels")
    reasons = []
    for name in _installed():
        if name == "simplejpeg" and data.startswith(PNG):
            continue
        try:
            return _DECODERS[name][1](data, keep_channels, fast)
        except Exception as e:  # each library has its own exceptions for bad data
            reasons.append(f"{name}: {' '.join(str(e).split())}")
    if not reasons:
        raise ImportError("expected OpenCV or Pillow to decode PNG files, found neither: install dbrdist[image]")
    raise ImageDecodeError("; ".join(reasons))


_SIZES = frozenset({*range(0xFFC0, 0xFFD0)} - {0xFFC4, 0xFFC8, 0xFFCC})  # markers of a frame, which holds the size
_SCAN, _PADDING = 0xFFDA, 0xFFFF
_SCAN_BYTES = _SCAN.to_bytes(2)
_BASELINE = (0xC0, 0xC1)  # the second bytes of the markers of frames with Huffman codes, in one go
_MAX_ROWS = 0xFFFF
_segment = struct.Struct(">HH").unpack_from  # marker and length


def _size(data: bytes, frame: int) -> tuple[int, int]:
    """Height and width from the header of a frame at this position; (0, 0) for the position 0."""
    return _segment(data, frame + 5) if frame else (0, 0)


def _check_jpeg(data: bytes) -> tuple[int, int]:
    """Where the header of the frame is in a JPEG whose end is there, and the scan behind it; 0 without a frame."""
    position, frame, last = 2, 0, len(data) - 9
    while position < last:
        marker, length = _segment(data, position)
        if marker == _SCAN or marker < 0xFF00:
            break
        if marker == _PADDING:
            position += 1
            continue
        if marker in _SIZES:
            frame = position
        position += 2 + length
    if data.rfind(b"\xff\xd9") <= position:  # thumbnails, whose ends lie in front of the scan, do not count
        raise ImageDecodeError(f"the JPEG is cut short: its {len(data)} bytes have no end marker")
    return frame, position


# ---- encoding -------------------------------------------------------------------------------------------------------


def encode_jpeg(image: Image, quality: int) -> bytes:
    """The bytes of a JPEG file with half the colour resolution (4:2:0); ``image`` (H, W, 3) RGB of uint8."""
    kind = decoder()
    if kind == "simplejpeg":
        return bytes(_simplejpeg().encode_jpeg(np.ascontiguousarray(image), quality, "RGB", "420"))
    if kind == "opencv":
        cv2 = _cv2()
        return bytes(cv2.imencode(".jpg", image[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality])[1])
    from PIL import Image as Pillow

    file = io.BytesIO()
    Pillow.fromarray(image).save(file, "JPEG", quality=quality, subsampling="4:2:0")
    return file.getvalue()


# ---- resizing -------------------------------------------------------------------------------------------------------


METHODS = ("linear", "area", "bilinear", "bicubic")
ANY_METHOD = "'linear', 'area', 'bilinear' or 'bicubic'"
_FILTERED = ("bilinear", "bicubic")


def resize(image: Image, height: int, width: int, method: str = "linear", out: Array | None = None) -> Image:
    """``image`` (H, W, C) of uint8 at another size, as (height, width, C) of uint8.

    Args:
        out: memory that may take the result; used where it fits.
        method: ``'linear'``: bilinear between pixel centres, without a filter against aliasing when it shrinks;
            ``'area'``: means over the covered area where both sides shrink, else as ``'linear'``; ``'bilinear'`` and
            ``'bicubic'`` with such a filter, as Pillow and torchvision (``antialias=True``) resize, within 1 of 255.

    Raises:
        ImageDecodeError: the result would have more than ``MAX_PIXELS``.
    """
    if method not in METHODS:
        raise ValueError(f"expected the method {ANY_METHOD}, got {method!r}")
    h, w = image.shape[:2]
    if (h, w) == (height, width):
        return image
    check_pixels(height, width, f"an image of {h}x{w} pixels becomes one of {height}x{width}")
    if method in _FILTERED:
        return filtering.resize(image, height, width, method, out)
    if method == "area" and (height > h or width > w):
        method = "linear"
    if resizer() == "opencv":
        return _resize_cv2(image, height, width, method, out)
    return resize_numpy(image, height, width, method)


def _resize_cv2(image: Image, height: int, width: int, method: str, room: Array | None) -> Image:
    cv2 = _cv2()
    flag = cv2.INTER_LINEAR if method == "linear" else cv2.INTER_AREA
    if _fits(room, (height, width, image.shape[2])) and not np.may_share_memory(image, room):
        cv2.resize(image, (width, height), dst=room, interpolation=flag)
        return room
    out = cv2.resize(image, (width, height), interpolation=flag)
    return out if out.ndim == 3 else out[:, :, None]  # OpenCV drops an axis of one channel


def resize_numpy(image: Image, height: int, width: int, method: str) -> Image:
    """The reference for :func:`resize`: two products with the weights of rows and of columns."""
    h, w, c = image.shape
    rows = _weights(h, height, method) @ image.reshape(h, w * c).astype(np.float32)
    columns = np.einsum("xw,hwc->hxc", _weights(w, width, method), rows.reshape(height, w, c), optimize=True)
    return np.clip(np.rint(columns), 0, 255).astype(np.uint8)


@functools.lru_cache(maxsize=64)
def _weights(old: int, new: int, method: str) -> Any:
    """(new, old) weights of old pixels in each new one along an axis; each row sums to 1."""
    scale = old / new
    at = np.arange(new)[:, None] * scale
    pixel = np.arange(old)[None, :]
    if method == "area":
        covered = np.minimum(at + scale, pixel + 1) - np.maximum(at, pixel)
        weights = np.maximum(covered, 0) / scale
    else:
        centre = np.clip(at + scale / 2 - 0.5, 0, old - 1)
        weights = np.maximum(1 - np.abs(centre - pixel), 0)
    return weights.astype(np.float32)


# ---- mirrors and tables ---------------------------------------------------------------------------------------------


_UINT8 = np.dtype(np.uint8)


def _fits(room: Array | None, shape: tuple[int, ...]) -> bool:
    """Whether OpenCV writes an image of this shape straight into ``room``."""
    return room is not None and room.shape == shape and shape[2] == 3 and room.dtype == _UINT8


def mirror(image: Image, out: Array | None = None) -> Image:
    """``image`` (H, W, C) with left and right exchanged, in memory of its own, or in ``out`` where that fits."""
    if resizer() == "opencv" and image.dtype == np.uint8:
        if _fits(out, image.shape) and (image is out or not np.may_share_memory(image, out)):
            _cv2().flip(image, 1, dst=out)
            return out
        return _cv2().flip(image, 1).reshape(image.shape)  # OpenCV drops an axis of one channel
    return image[:, ::-1]


def lookup(images: Array, table: Array) -> Array | None:
    """``table[value, channel]`` for each value of ``images`` (..., C) of uint8; None where there is no OpenCV for it.

    ``table`` is (256, C) of any type of 2, 4 or 8 bytes.
    """
    c = images.shape[-1]
    if resizer() != "opencv" or c > 4 or not images.size or not images.flags.c_contiguous:
        return None
    bits = {2: np.uint16, 4: np.float32, 8: np.float64}.get(table.dtype.itemsize)
    if bits is None:
        return None
    rows = images.reshape(-1, images.shape[-2], c)
    found = _cv2().LUT(rows, np.ascontiguousarray(table).view(bits).reshape(1, 256, c))
    return found.view(table.dtype).reshape(images.shape)
