"""JPEGs that decode without an error although a part of their data is wrong."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from segapp.datasets.files import ImagePair, jpeg_damage, read_bytes
from segapp.datasets.images.pixel_format import RGB8
from segapp.datasets.inspection import examine
from segapp.datasets.layouts.formats import class_scheme
from tests.conftest import CAMVID
from tests.support.drawn_folders import draw_mask


def photo(seed: int, **save: object) -> bytes:
    """Returns a JPEG with edges and noise."""
    rng = np.random.default_rng(seed)
    pixels = np.kron(rng.integers(0, 255, (6, 8, 3)), np.ones((16, 16, 1))) + rng.normal(0, 9, (96, 128, 3))
    buffer = io.BytesIO()
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    image.convert(str(save.pop("mode", "RGB"))).save(buffer, "JPEG", **save)
    return buffer.getvalue()


def damaged(data: bytes, num_bytes: int = 200) -> bytes:
    """Returns the data with zeros in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes(num_bytes) + data[middle + num_bytes :]


@pytest.mark.parametrize(
    "save", [{}, {"progressive": True}, {"mode": "L"}, {"mode": "CMYK"}, {"quality": 20, "optimize": True}]
)
def test_sound_files_have_no_damage(save: dict[str, object]) -> None:
    assert jpeg_damage(photo(0, **save)) is None


def test_zeroed_bytes_are_noticed() -> None:
    found = [jpeg_damage(damaged(photo(seed))) for seed in range(20)]
    assert sum(one is not None for one in found) >= 17
    assert all(one is None or one.startswith("Corrupt JPEG data") for one in found)
    assert jpeg_damage(b"no JPEG") is None


@pytest.mark.skipif(not CAMVID.is_dir(), reason="needs ../shared/camvid")
def test_no_camvid_image_is_damaged_until_its_bytes_are_zeroed() -> None:
    files = sorted((CAMVID / "val").glob("*.jpg"))
    assert [path.name for path in files if jpeg_damage(read_bytes(path)) is not None] == []
    assert sum(jpeg_damage(damaged(read_bytes(path))) is not None for path in files) >= 0.9 * len(files)


def test_check_names_the_damaged_image(tmp_path: Path) -> None:
    pairs = []
    for number in range(3):
        path = tmp_path / f"{number}.jpg"
        path.write_bytes(photo(number))
        draw_mask(tmp_path / f"{number}.png", size=(96, 128))
        pairs.append(ImagePair(path, tmp_path / f"{number}.png", str(number)))
    seed = next(seed for seed in range(20) if jpeg_damage(damaged(photo(seed))))
    pairs[1].image.write_bytes(damaged(photo(seed)))
    scheme = class_scheme("list", classes=("a", "b", "c"))
    (report,) = examine({"train": pairs}, scheme, crop_px=(64, 64), pixels=RGB8, threads=1)
    named = [(one.severity, one.pair) for one in report.findings if one.kind == "damaged"]
    assert named == [("warning", pairs[1])]
