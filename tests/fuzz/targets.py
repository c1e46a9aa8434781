"""What the fuzzer runs: for each reader of foreign bytes, seeds, and a function that holds it against a property.

A target gets any bytes. It may refuse them with the error its reader promises; everything else that is raised, and
every accepted input that breaks the property, is a finding. Nothing here needs the fuzzer: hypothesis and plain
mutation run the same targets in the tests.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import random
import shutil
import struct
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from segapp.config import dump_config, load_config
from segapp.datasets.files import MAX_PIXELS, check_pairs, read_header, tiff_tags
from segapp.datasets.images.reading import read_image
from segapp.datasets.layouts.formats import DataLocation, class_scheme, find_pairs
from segapp.datasets.masks import read_mask
from segapp.errors import CheckpointError, ConfigError, DataError, SegappError
from segapp.models.weights import read_weights_file
from segapp.run.words import printable
from tests.support import ROOT


@dataclass(frozen=True)
class Target:
    """One reader under test.

    Attributes:
        run: takes any bytes; raises where the reader breaks its promise.
        seeds: gives inputs to begin with.
        words: pieces that a mutation may put in.
    """

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    words: tuple[bytes, ...] = ()


@cache
def _folder() -> Path:
    """A folder in memory where there is one: the targets write their input as the file that users have."""
    shm = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="segapp-fuzz-", dir=shm if shm.is_dir() else None)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _written(name: str, data: bytes) -> Path:
    path = _folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _check_message(error: SegappError) -> None:
    """What is refused is refused with words, and they repeat no control character."""
    assert str(error)
    assert all(printable(line) == line for line in str(error).split("\n"))


def config(data: bytes) -> None:
    """A config file, then override words behind NULs; what is accepted reads back as itself."""
    text, *words = data.split(b"\0")
    path = _written("config.yaml", text)
    try:
        accepted = load_config(path, [word.decode("utf-8", "surrogateescape") for word in words])
    except ConfigError:
        return  # its words are made printable where they are printed
    assert load_config(_written("again.yaml", dump_config(accepted).encode())) == accepted


def _config_seeds() -> list[bytes]:
    shipped = [path.read_bytes() for path in sorted((ROOT / "configs").glob("*.yaml"))]
    minimal = b"name: x\ndata: {format: camvid, root: d}\n"
    return [*shipped, minimal, minimal + b"\0train.epochs=3\0optim.lr=1e-3\0data.crop_px=[64, 96]"]


_SCHEMES = (
    class_scheme("folder", classes=["a", "b", "c"]),
    class_scheme("cityscapes"),
    class_scheme("folder", classes=[f"c{i}" for i in range(300)]),
    class_scheme("folder", classes=["a", "b"], palette=[[0, 0, 0], [128, 0, 0]], rgb=True),
)


def mask(data: bytes) -> None:
    """An image file, read by its header, as an image and as a mask: what comes back holds nothing but known ids."""
    path = _written("mask.png", data)
    try:
        header = read_header(path)
    except DataError:
        header = None
    if header is not None and header.height_px * header.width_px > 2**20:
        tags = tiff_tags(path) if header.format == "TIFF" else None
        assert header.height_px * header.width_px <= MAX_PIXELS or (tags is not None and tags.can_be_read_in_windows)
        return  # decoding it is allowed, and slow
    try:
        pixels = read_image(path)
    except DataError:
        pass
    else:
        assert pixels.dtype == np.uint8
        assert pixels.ndim == 3
        assert pixels.shape[2] == 3
        assert header is None or pixels.shape[:2] == (header.height_px, header.width_px)
    for scheme in _SCHEMES:
        try:
            ids = read_mask(path, scheme)
        except DataError as error:
            _check_message(error)
            continue
        assert ids.ndim == 2
        assert np.isin(ids, [*range(scheme.num_classes), scheme.ignore_index]).all()


def _mask_seeds() -> list[bytes]:
    ids = np.arange(63, dtype=np.uint8).reshape(7, 9) % 3
    grey, color = Image.fromarray(ids), Image.fromarray(np.stack([ids * 60, ids, ids], -1))
    palette = grey.convert("P")
    wide = Image.fromarray(ids.astype(np.uint16))
    forms = [(grey, f) for f in ("PNG", "BMP", "TIFF", "GIF", "WEBP", "PPM", "JPEG")]
    forms += [(color, f) for f in ("PNG", "JPEG", "WEBP")]
    forms += [(palette, "PNG"), (wide, "PNG"), (grey.convert("1"), "PNG"), (color.convert("RGBA"), "PNG")]
    seeds = []
    for image, form in forms:
        buffer = io.BytesIO()
        image.save(buffer, form, **({"lossless": True} if form == "WEBP" else {}))
        seeds.append(buffer.getvalue())
    return seeds


def weights(data: bytes) -> None:
    """A weights file: tensors or a refusal, and no code is run."""
    try:
        state = read_weights_file(_written("weights.pth", data))
    except CheckpointError:
        return
    assert state
    assert all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in state.items())


def _weights_seeds() -> list[bytes]:
    state = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.zeros(2, dtype=torch.float16)}
    seeds = []
    for content, is_zip in ((state, True), (state, False), ({"model": state, "step": 3}, True)):
        buffer = io.BytesIO()
        torch.save(content, buffer, _use_new_zipfile_serialization=is_zip)
        seeds.append(buffer.getvalue())
    return seeds


def lists(data: bytes) -> None:
    """A list of pairs: every file that it leads to lies below the root, or it is refused."""
    root = _folder() / "data"
    if not root.exists():
        root.mkdir()
        for image in _mask_seeds()[:2]:
            (root / f"{len(image)}.png").write_bytes(image)
        (root / "out").symlink_to("/etc")
    (root / "train.txt").write_bytes(data)
    try:
        pairs = find_pairs(DataLocation("list", root), "train")
    except DataError as error:
        _check_message(error)
        return
    inside = root.resolve()
    for pair in pairs:
        for path in (pair.image, pair.mask):
            assert path is None or path.resolve().is_relative_to(inside), path
    with contextlib.suppress(DataError):
        check_pairs(pairs)


def _list_seeds() -> list[bytes]:
    return [b"80.png 80.png\n", b"\xef\xbb\xbf# pairs\r\na b.png\tc.png\r\n", b"../x.png y.png\n", b"/etc/passwd a\n"]


TARGETS: dict[str, Target] = {
    "config": Target(
        config,
        _config_seeds,
        (b"name", b"data", b"root", b"folder", b"null", b".nan", b"1e-3", b"!!", b"&a", b"*a", b"? ", b"\0optim."),
    ),
    "mask": Target(
        mask, _mask_seeds, (b"IHDR", b"IDAT", b"PLTE", b"tRNS", b"eXIf", b"acTL", b"IEND", b"\xff\xd9", b"\xff\xda")
    ),
    "weights": Target(weights, _weights_seeds, (b"ctorch\n", b"cos\nsystem\n", b"R.", b"\x80\x02")),
    "list": Target(lists, _list_seeds, (b"../", b"/etc/", b"\t", b"\r\n", b"out/passwd", b"./")),
}


def with_checksums(data: bytes) -> bytes:
    """The data with the checksums of a PNG's chunks, or of a zip's files, put right: decoders look no further else."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return _png_with_checksums(data)
    return _zip_with_checksums(data) if data.startswith(b"PK\x03\x04") else data


def _png_with_checksums(data: bytes) -> bytes:
    fixed, offset = bytearray(data), 8
    while offset + 12 <= len(fixed):
        (length,) = struct.unpack_from(">I", fixed, offset)
        end = offset + 8 + length
        if end + 4 > len(fixed):
            break
        struct.pack_into(">I", fixed, end, zlib.crc32(fixed[offset + 4 : end]))
        offset = end + 4
    return bytes(fixed)


def _zip_with_checksums(data: bytes) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                infos = archive.infolist()
        except Exception:
            return data
    fixed = bytearray(data)
    for info in infos:
        start = info.header_offset + 30 + len(info.filename)
        body = fixed[start : start + info.compress_size]
        at = data.find(struct.pack("<I", info.CRC))
        while at >= 0:
            struct.pack_into("<I", fixed, at, zlib.crc32(body))
            at = data.find(struct.pack("<I", info.CRC), at + 4)
    return bytes(fixed)


def mutate(data: bytes, rng: random.Random, words: tuple[bytes, ...]) -> bytes:
    """A few random changes: bytes, cuts, copies, words; half of the time with the checksums put right."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randint(0, len(changed))
        kind = rng.randrange(6)
        if kind == 0 and changed:
            changed[at % len(changed)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 1:
            changed[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 4)))
        elif kind == 2:
            del changed[at : at + rng.randint(1, 16)]
        elif kind == 3:
            start = rng.randint(0, len(changed))
            changed[at:at] = changed[start : start + rng.randint(1, 32)]
        elif kind == 4 and words:
            changed[at:at] = rng.choice(words)
        elif kind == 5 and rng.random() < 0.3:
            del changed[at:]
    return with_checksums(bytes(changed)) if rng.random() < 0.5 else bytes(changed)
