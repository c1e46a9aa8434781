"""PNG files with kornia-rs and without it: the same pixels or the same error, for every kind of file and of damage."""

from __future__ import annotations

import io
import struct
import threading
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from segapp.datasets.images import png
from segapp.datasets.images.png import decode_png
from segapp.datasets.images.reading import read_image
from segapp.datasets.layouts.formats import class_scheme
from segapp.datasets.masks import read_mask
from segapp.errors import DataError
from tests.support.drawn_data import draw_image, draw_mask

pytest.importorskip("kornia_rs", reason="the extra png is not installed")

GRAY, RGB = draw_image(3, 23, 31)[..., 0], draw_image(3, 23, 31)
IDS = draw_mask(3, 23, 31) % 5


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def saved(image: Image.Image, *before_pixels: bytes, after_pixels: bytes = b"", **options: Any) -> bytes:
    """Return a PNG with chunks between IHDR and the pixels, which are in three chunks, and after them."""
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    data = file.getvalue()
    at, size = data.index(b"IDAT") - 4, int.from_bytes(data[data.index(b"IDAT") - 4 :][:4])
    stored = data[at + 8 : at + 8 + size]
    parts = [chunk(b"IDAT", part) for part in (stored[:50], stored[50:-2], stored[-2:])]
    return data[:at] + b"".join([*before_pixels, *parts, after_pixels]) + data[at + 12 + size :]


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()[6:]


def by_hand(rows: Iterable[Any], bits: int, color_type: int, *, interlaced: bool = False) -> bytes:
    """Return a PNG of a kind that no library here writes."""
    header = struct.pack(">IIBBBBB", *RGB.shape[1::-1], bits, color_type, 0, 0, interlaced)
    body = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    chunks = {b"IHDR": header, b"IDAT": body, b"IEND": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks.items())


ADAM7 = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
PASSES = [row for y, x, down, right in ADAM7 for row in RGB[y::down, x::right]]


def animated() -> bytes:
    """Its first frame is not the picture that other programs show."""
    file = io.BytesIO()
    frames = [Image.fromarray(np.full((9, 7, 3), value, np.uint8)) for value in (30, 80)]
    Image.fromarray(RGB[:9, :7]).save(file, "PNG", save_all=True, append_images=frames, default_image=True)
    return file.getvalue()


rgb, gray = Image.fromarray(RGB), Image.fromarray(GRAY)
text = PngInfo()
text.add_text("Software", "drawn")
KINDS: dict[str, tuple[bytes, bool]] = {  # and whether kornia-rs decodes it
    "RGB": (saved(rgb), True),
    "gray": (saved(gray), True),
    "text and resolution": (saved(rgb, pnginfo=text, dpi=(72, 72)), True),
    "gAMA": (saved(rgb, chunk(b"gAMA", struct.pack(">I", 100_000))), True),
    "gAMA of gray": (saved(gray, chunk(b"gAMA", struct.pack(">I", 30_000))), True),
    "sRGB": (saved(rgb, chunk(b"sRGB", b"\1")), True),
    "iCCP": (saved(rgb, icc_profile=b"a profile that no program knows"), True),
    "bKGD": (saved(rgb, chunk(b"bKGD", bytes((0, 7, 0, 8, 0, 9)))), True),
    "sBIT": (saved(rgb, chunk(b"sBIT", b"\5\6\5")), True),
    "tRNS": (saved(rgb, transparency=tuple(RGB[0, 0].tolist())), True),
    "tRNS of gray": (saved(gray, transparency=int(GRAY[0, 0])), True),
    "data after the end": (saved(rgb) + b"appended", True),
    "interlaced": (by_hand(PASSES, 8, 2, interlaced=True), True),
    "eXIf": (saved(rgb, exif=exif(6)), False),
    "eXIf after the pixels": (saved(gray, after_pixels=chunk(b"eXIf", exif(8))), False),
    "animation": (animated(), False),
    "palette": (saved(rgb.quantize(37)), False),
    "gray with alpha": (saved(Image.merge("LA", [gray, gray])), False),
    "RGBA": (saved(rgb.convert("RGBA")), False),
    "16 bits of RGB": (by_hand(RGB.astype(">u2") * 257, 16, 2), False),
    "4 bits of gray": (by_hand(GRAY[:, :16], 4, 0), False),
    "16 bits": (saved(Image.fromarray(GRAY.astype(np.uint16) * 257)), False),
    "1 bit": (saved(gray.convert("1")), False),
    "2 bits": (saved(rgb.quantize(4), bits=2), False),
    "4 bits": (saved(rgb.quantize(13), bits=4), False),
}


def outcomes(path: Path, read: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what a reader gives with and without the package: type, shape and bytes, or the error."""
    found: list[Any] = []
    for decoder in (png.decode_image_png_u8, None):
        with monkeypatch.context() as patch:
            patch.setattr(png, "decode_image_png_u8", decoder)
            try:
                pixels = read(path)
                found.append((pixels.dtype, pixels.shape, pixels.tobytes()))
            except Exception as error:
                found.append((type(error), str(error)))
    return found


def read_ids(path: Path) -> Any:
    return read_mask(path, class_scheme("folder", classes=[f"class {i}" for i in range(256)], ignore_index=-1))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_png_has_the_same_pixels(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, is_taken = KINDS[kind]
    (tmp_path / "a.png").write_bytes(data)
    decoded = decode_png(data, Image.open(io.BytesIO(data)))
    assert (decoded is not None) == is_taken
    for read in (read_image, read_ids):
        ours, other = outcomes(tmp_path / "a.png", read, monkeypatch)
        assert ours == other
    if kind not in {
        "16 bits",
        "16 bits of RGB",
        "animation",
    }:  # Pillow cuts values off, and shows the picture for other programs
        shown = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
        np.testing.assert_array_equal(read_image(tmp_path / "a.png"), shown)


@pytest.mark.parametrize("step", [40, pytest.param(1, marks=pytest.mark.slow)])
def test_camvid_as_png_has_the_pixels_of_the_jpegs(step: int, camvid: Path, tmp_path: Path) -> None:
    paths = [*sorted(camvid.glob("*/*.jpg")), *sorted(camvid.glob("*annot/*.png"))]
    assert len(paths) == 936
    for path in paths[::step]:
        image = Image.open(path)
        image.save(tmp_path / "a.png")
        assert decode_png((tmp_path / "a.png").read_bytes(), Image.open(tmp_path / "a.png")) is not None
        read = read_image if image.mode == "RGB" else read_ids
        np.testing.assert_array_equal(read(tmp_path / "a.png"), np.asarray(image), err_msg=str(path))


@pytest.mark.parametrize("kind", ["RGB", "gray", "text and resolution"])
def test_each_changed_byte_has_the_same_outcome(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a small file: every byte changed in one of its bits or in all, and every length of a file cut off."""
    pixels, options = (IDS if kind == "gray" else RGB)[:4, :5], {"pnginfo": text} if kind[0] == "t" else {}
    data, path = saved(Image.fromarray(pixels), **options), tmp_path / "a.png"
    read = read_ids if kind == "gray" else read_image
    changed = [data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :] for at in range(len(data)) for bits in (32, 255)]
    results = []
    for each in [data, *changed, *(data[:length] for length in range(len(data)))]:
        path.write_bytes(each)
        ours, other = outcomes(path, read, monkeypatch)
        assert ours == other, each
        results.append(ours)
    assert results[0][2] == pixels.astype(results[0][0]).tobytes()
    assert {result[0] for result in results if result != results[0]} == {DataError}


def test_a_panic_and_a_reader_thread_leave_it_to_opencv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, found = KINDS["RGB"][0], []
    thread = threading.Thread(target=lambda: found.append(decode_png(data, Image.open(io.BytesIO(data)))))
    thread.start()
    thread.join()
    assert found == [None], "it would hold the lock of the interpreter"
    (tmp_path / "a.png").write_bytes(data)

    def ended_by(error: BaseException) -> None:
        def decode(*_: object) -> None:
            raise error

        monkeypatch.setattr(png, "decode_image_png_u8", decode)
        np.testing.assert_array_equal(read_image(tmp_path / "a.png"), RGB)

    ended_by(type("PanicException", (BaseException,), {})("PyObject pointer is null"))
    ended_by(ValueError("of another release"))
    with pytest.raises(KeyboardInterrupt):
        ended_by(KeyboardInterrupt())
