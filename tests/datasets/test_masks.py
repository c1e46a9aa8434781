"""Decoding against Pillow, OpenCV and pixels written by hand; errors for damage and wrong ids."""

import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from PIL import Image, ImageOps

from segapp.datasets import files
from segapp.datasets.files import ImagePair, check_pairs, is_complete, read_header
from segapp.datasets.images.reading import read_image
from segapp.datasets.layouts.formats import class_scheme
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.masks import read_mask
from segapp.errors import DataError
from segapp.onboarding.content import stored_pixels
from tests.support.drawn_data import draw_image, draw_mask
from tests.support.drawn_folders import exif_of
from tests.support.fault_table import case


def save(array: np.ndarray, path: Path, mode: str | None = None, **options: object) -> Path:
    image = Image.fromarray(array)
    (image.convert(mode) if mode else image).save(path, **options)
    return path


def jpeg_bytes(array: np.ndarray, **options: object) -> bytes:
    buffer = BytesIO()
    Image.fromarray(array).save(buffer, "JPEG", quality=95, **options)
    return buffer.getvalue()


def names(count: int) -> list[str]:
    return [f"class {i}" for i in range(count)]


def png(ids: np.ndarray, bits: int, color_type: int) -> bytes:
    """Return a PNG encoded by hand, because libraries differ in low bit depths."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    if bits == 16:
        rows = [row.astype(">u2").tobytes() for row in ids]
    else:
        shifts = np.arange(bits - 1, -1, -1)
        rows = [np.packbits((row[:, None] >> shifts & 1).astype(np.uint8).ravel()).tobytes() for row in ids]
    header = struct.pack(">IIBBBBB", *ids.shape[::-1], bits, color_type, 0, 0, 0)
    palette = chunk(b"PLTE", bytes(range(255, 255 - 3 * min(1 << bits, 60), -1))) if color_type == 3 else b""
    body = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + palette + body + chunk(b"IEND", b"")


# --- images


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tif", ".ppm", ".webp"])
def test_lossless_images_are_decoded_exactly(suffix: str, tmp_path: Path) -> None:
    options = {"lossless": True} if suffix == ".webp" else {}
    for size in ((23, 31), (1, 1), (1, 300), (300, 1)):
        image = draw_image(0, *size)
        np.testing.assert_array_equal(read_image(save(image, tmp_path / f"a{suffix}", **options)), image)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_other_image_modes_match_pillow(mode: str, tmp_path: Path) -> None:
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    save(draw_image(1, 40, 50), path, mode, **({"quality": 95} if mode == "CMYK" else {}))
    expected = np.array(Image.open(path).convert("RGB")).astype(int)
    difference = np.abs(read_image(path).astype(int) - expected)
    assert difference.max() <= (6 if mode == "CMYK" else 0)  # the rule from CMYK to RGB is rounded in other places


@pytest.mark.parametrize(
    ("orientation", "suffix"), [*((each, ".jpg") for each in range(1, 9)), (6, ".png"), (7, ".webp"), (8, ".tif")]
)
def test_exif_rotation_matches_pillow(orientation: int, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    options = {".jpg": {"quality": 95}, ".webp": {"lossless": True}}.get(suffix, {})
    save(draw_image(2, 24, 40), path, exif=exif_of(orientation), **options)
    expected = np.array(ImageOps.exif_transpose(Image.open(path)).convert("RGB"))
    result = read_image(path)
    assert result.shape == expected.shape
    assert np.abs(result.astype(int) - expected).max() <= 3
    header = read_header(path)
    assert (header.height_px, header.width_px) == expected.shape[:2]


# --- damage


def test_truncated_jpeg_with_embedded_preview_is_refused(tmp_path: Path) -> None:
    preview = jpeg_bytes(draw_image(0, 20, 20))
    data = jpeg_bytes(draw_image(7, 90, 90), exif=b"Exif\0\0" + preview)
    assert is_complete(data, "JPEG")
    assert is_complete(data + b"appended by a camera", "MPO")
    cut = data[: len(data) // 2]
    assert b"\xff\xd9" in cut
    assert not is_complete(cut, "JPEG")
    (tmp_path / "a.jpg").write_bytes(cut)
    with pytest.raises(DataError, match="truncated JPEG"):
        read_image(tmp_path / "a.jpg")


@case("F47", how="EIO at the first read of a mask", passes="tried again")
def test_transient_storage_error_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails at some reads is only made here, in place of `open` in the module that reads."""
    path = save(draw_image(0, 4, 7), tmp_path / "a.png")
    errors: list[OSError] = [OSError(5, "Input/output error"), OSError(5, "Input/output error")]

    def failing_open(*args: object, **kwargs: object) -> object:
        if errors:
            raise errors.pop()
        return open(*args, **kwargs)  # type: ignore[call-overload]

    waited_s: list[float] = []
    monkeypatch.setattr(files.time, "sleep", waited_s.append)
    monkeypatch.setattr(files, "open", failing_open, raising=False)
    assert read_image(path).shape == (4, 7, 3)
    assert waited_s == [0.05, 0.1]
    for error, said in ((OSError(5, "Input/output error"), "Input/output error"), (PermissionError(13, "no"), "perm")):
        errors[:] = [error] * 9
        with pytest.raises(DataError, match=said):
            read_image(path)


# --- masks


def test_grey_and_palette_masks_keep_their_ids(scheme: ClassScheme, tmp_path: Path) -> None:
    ids = draw_mask(0, 30, 40)
    indexed = Image.fromarray(ids).convert("P")
    indexed.putdata(ids.ravel().tolist())
    indexed.putpalette(np.random.default_rng(0).integers(0, 256, 768, dtype=np.uint8).tobytes())
    for suffix in (".png", ".tif"):
        indexed.save(tmp_path / f"palette{suffix}")
        save(ids, tmp_path / f"grey{suffix}")
    save(ids, tmp_path / "alpha.png", transparency=0)
    for path in sorted(tmp_path.iterdir()):
        result = read_mask(path, scheme)
        assert result.dtype == np.uint8
        np.testing.assert_array_equal(result, ids, err_msg=path.name)


@pytest.mark.parametrize(
    ("bits", "color_type"),
    [(1, 0), (2, 0), (4, 0), (8, 0), (16, 0), (1, 3), (2, 3), (4, 3), (8, 3), *((each, None) for each in (1, 2, 4, 8))],
)
def test_every_bit_depth_keeps_the_ids(bits: int, color_type: int | None, tmp_path: Path) -> None:
    """Of PNGs, and of TIFFs as GDAL writes them with NBITS."""
    count = min(1 << bits, 12)
    ids = np.random.default_rng(bits).integers(0, count, (9, 16))
    path = tmp_path / ("a.tif" if color_type is None else "a.png")
    if color_type is None:
        rasterio = pytest.importorskip("rasterio", reason="the extra geo is not installed")
        profile = {"driver": "GTiff", "height": 9, "width": 16, "count": 1, "dtype": "uint8", "nbits": bits}
        with rasterio.open(path, "w", **profile, transform=rasterio.Affine.scale(2)) as file:
            file.write(ids.astype(np.uint8), 1)
    else:
        path.write_bytes(png(ids, bits, color_type))
    for multilabel in (None, "bits"):
        scheme = class_scheme("folder", classes=names(4 if multilabel else 12), multilabel=multilabel)
        np.testing.assert_array_equal(read_mask(path, scheme), ids)
    np.testing.assert_array_equal(stored_pixels(path, as_rgb=False)[0], ids)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
@pytest.mark.parametrize("ignore_index", [255, -1])
def test_mask_colours_become_ids(mode: str, ignore_index: int, tmp_path: Path) -> None:
    palette = [(10, 20, 30), (255, 0, 0), (0, 0, 0), (9, 9, 9)]
    ids = np.random.default_rng(0).integers(0, 4, (12, 15))
    image = Image.fromarray(np.array(palette, np.uint8)[ids])
    image = image.quantize(8, dither=Image.Dither.NONE) if mode == "P" else image.convert(mode)
    image.save(tmp_path / "a.png")
    scheme = class_scheme("folder", classes=names(3), palette=palette, rgb=True, ignore_index=ignore_index)
    assert scheme.palette == tuple(palette[:3])
    np.testing.assert_array_equal(read_mask(tmp_path / "a.png", scheme), np.where(ids == 3, ignore_index, ids))


def test_several_colours_may_share_a_class(tmp_path: Path) -> None:
    palette = [(0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 3, 3)]
    path = save(np.array(palette, np.uint8)[None], tmp_path / "a.png")
    scheme = class_scheme("folder", classes=names(2), palette=palette, rgb=True, label_map={0: 1, 1: 0, 2: 0, 3: 255})
    np.testing.assert_array_equal(read_mask(path, scheme), [[1, 0, 0, 255]])
    assert scheme.palette == ((1, 1, 1), (0, 0, 0))
    save(np.array([[0, 255, 255]], np.uint8), path)  # gray, read by color
    scheme = class_scheme("folder", classes=names(2), palette=[(0, 0, 0), (255, 255, 255)], rgb=True)
    np.testing.assert_array_equal(read_mask(path, scheme), [[0, 1, 1]])


def test_unknown_colours_are_named_with_their_counts(tmp_path: Path) -> None:
    pixels = np.zeros((4, 4, 3), np.uint8)
    scheme = class_scheme("folder", classes=names(1), palette=[(0, 0, 0)], rgb=True)
    pixels[0, :3], pixels[1:3], pixels[3, :2], pixels[3, 2] = (1, 2, 3), (9, 0, 255), (0, 7, 0), (255, 255, 254)
    four = r"\[9, 0, 255\] \(8 px\), \[1, 2, 3\] \(3 px\), \[0, 7, 0\] \(2 px\), \[255, 255, 254\] \(1 px\)\. Add"
    with pytest.raises(DataError, match=rf"a\.png: .*not in the palette: {four} them"):
        read_mask(save(pixels, tmp_path / "a.png"), scheme)
    pixels[3, 3] = 1
    with pytest.raises(DataError, match="smoothed"):  # more than four times as many as in the palette
        read_mask(save(pixels, tmp_path / "a.png"), scheme)


@pytest.mark.parametrize(
    ("ids", "num_classes", "ignore_index", "message"),
    [
        ([[0, 3, 3, 254]], 3, 255, r"outside the 3 classes: 3 \(2 px\), 254 \(1 px\)"),
        ([[0, 255, 255, 0]], 2, -1, r"255 \(2 px\)\. A black and white mask: set data.label_map"),
        ([[1, 2, 3, 3]], 3, 255, r"3 \(2 px\)\. The ids seem to start at 1: set data.label_map: {1: 0, 2: 1, 3: 2}$"),
        (
            [[0, 2, 3, 3]],
            3,
            250,
            r"One class more than in data.classes: if 0 is unlabeled, set data.label_map: {0: 250, 1: 0, 2: 1, 3: 2}; "
            r"if 3 is a class, add its name to data.classes; to ignore it, set data.label_map: {3: 250}$",
        ),
        ([[0, 1, 2, 255]], 3, -1, r"255 usually marks ignored pixels"),
        ([[7, 26, 33, 0]], 19, 255, r"Cityscapes label ids"),
        ([[14, 38, 52, 75]], 5, 255, r"gray levels"),
        ([[257, 514, 0, 771]], 5, 255, r"scaled to 16 bits"),
        ([[7, 34, 8, 7]], None, 255, r"34 \(1 px\)\. Add them to data\.label_map"),
    ],
)
def test_wrong_ids_are_named_with_the_likely_cause(
    ids: list[list[int]], num_classes: int | None, ignore_index: int, message: str, tmp_path: Path
) -> None:
    path = save(np.array(ids, np.uint16 if max(ids[0]) > 255 else np.uint8), tmp_path / "mask.png")
    scheme = class_scheme("cityscapes")
    if num_classes is not None:
        scheme = class_scheme("folder", classes=names(num_classes), ignore_index=ignore_index)
    with pytest.raises(DataError, match=rf"mask\.png: the mask holds ids {message}|mask\.png: .*{message}"):
        read_mask(path, scheme)


@pytest.mark.parametrize(
    ("num_classes", "ignore_index"), [(5, 255), (5, 5), (254, 254), (254, 255), (255, 255), (256, -1)]
)
def test_ids_at_the_range_limits_are_checked(num_classes: int, ignore_index: int, tmp_path: Path) -> None:
    scheme = class_scheme("folder", classes=names(num_classes), ignore_index=ignore_index)
    borders = {0, *range(num_classes - 2, num_classes + 3), ignore_index, 77, 253, 254, 255}
    for value in borders & set(range(256)):
        path = save(np.full((2, 2), value, np.uint8), tmp_path / "a.png")
        if value < num_classes or value == ignore_index:
            assert (read_mask(path, scheme) == value).all()
        else:
            with pytest.raises(DataError, match=rf" {value} \(4 px\)"):
                read_mask(path, scheme)


def test_ids_of_sixteen_bits_are_exact_and_wider_ones_refused(tmp_path: Path) -> None:
    ids = np.array([[0, 255, 256, 299], [1000, 7, 0, 300]], np.uint16)
    scheme = class_scheme("folder", classes=names(301), ignore_index=1000)
    for suffix in (".png", ".tif"):
        result = read_mask(save(ids, tmp_path / f"a{suffix}"), scheme)
        assert result.dtype == np.int16
        np.testing.assert_array_equal(result, ids)
    path = save(np.array([[0, 70_000, 65_536, -3]], np.int32), tmp_path / "a.tif")
    with pytest.raises(DataError, match=r"-3 \(1 px\), 65536 \(1 px\), 70000 \(1 px\)"):
        read_mask(path, class_scheme("folder", classes=names(2)))
    path = save(np.array([[1, 65_535]], np.int32), tmp_path / "b.tif")
    scheme = class_scheme("folder", classes=names(2), label_map={65_535: 0})
    np.testing.assert_array_equal(read_mask(path, scheme), [[1, 0]])


def float_mask(path: Path, *values: float) -> Path:
    """Write a float TIFF of 3 x 5 pixels whose first pixels have the values, and the others 2."""
    pixels = np.full((3, 5), 2, np.float32)
    pixels.flat[: len(values)] = values
    Image.fromarray(pixels).save(path)
    return path


def test_nan_in_a_float_mask_is_ignored(tmp_path: Path) -> None:
    path = float_mask(tmp_path / "a.tif", np.nan, 1, np.nan, 1, 2)
    for ignore_index in (255, -100, 3):
        # 0 is no value of the masks: NaN must not become it on the way
        scheme = class_scheme("folder", classes=names(2), label_map={1: 0, 2: 1}, ignore_index=ignore_index)
        np.testing.assert_array_equal(read_mask(path, scheme)[0], [ignore_index, 0, ignore_index, 0, 1])
    path = float_mask(tmp_path / "b.tif", np.nan, 0, 3)
    bits = class_scheme("folder", classes=names(2), multilabel="bits")
    np.testing.assert_array_equal(read_mask(path, bits)[0], [bits.ignore_index, 0, 3, 2, 2])
    one = class_scheme("folder", classes=names(1), multilabel="channels")
    np.testing.assert_array_equal(read_mask(path, one)[0], [one.ignore_index, 0, 1, 1, 1])


@pytest.mark.parametrize("multilabel", [None, "bits"])
@pytest.mark.parametrize(("value", "shown"), [(1.5, "1.5"), (np.inf, "inf"), (-np.inf, "-inf"), (1e-3, "0.001")])
def test_float_that_is_no_id_is_refused_by_name_and_value(
    value: float, shown: str, multilabel: Literal["bits"] | None, tmp_path: Path
) -> None:
    path = float_mask(tmp_path / "a.tif", 0, np.nan, 1, value)
    scheme = class_scheme("folder", classes=names(3), multilabel=multilabel)
    with pytest.raises(DataError, match=rf"a\.tif: the mask holds {shown}, and class ids are whole numbers"):
        read_mask(path, scheme)


# --- the check of headers


def test_check_pairs_reports_all_problems_at_once(write_pairs: Callable[..., tuple[ImagePair, ...]]) -> None:
    pairs = write_pairs([(20, 30)] * 9)
    pairs[1].image.unlink()
    pairs[2].mask.write_bytes(b"")
    pairs[3].image.write_bytes(b"not an image")
    save(draw_mask(0, 30, 20), pairs[4].mask)
    pairs[5].image.write_bytes(pairs[5].image.read_bytes()[:-20])
    pairs[6].mask.write_bytes(jpeg_bytes(draw_mask(0, 20, 30)))
    pairs[7].image.write_bytes(jpeg_bytes(draw_image(0, 20, 30))[:-30])
    with pytest.raises(DataError) as error:
        check_pairs(pairs)
    message = str(error.value)
    assert message.startswith("7 of 9 image and mask pairs cannot be used")
    assert message.endswith("and 2 more")
    for text in (
        "007.png: the file does not exist",
        "010_mask.png: the file is empty",
        "013.png: no readable image",
        "016_mask.png: the mask has 20x30 pixels, its image",
        "the EXIF orientation of one is lost",
        "019.png: cannot be decoded (truncated PNG",
    ):
        assert text in message
    with pytest.raises(DataError, match=r"^7 of 9 .*(\n  .+){7}$"):
        check_pairs(pairs, max_named=7)
    with pytest.raises(DataError, match=r"^\S+022_mask\.png: the mask is a JPEG"):  # one problem, without a count
        check_pairs(pairs[6:7])
    with pytest.raises(DataError, match=r"025\.png: .*truncated JPEG"):
        check_pairs(pairs[7:8])
