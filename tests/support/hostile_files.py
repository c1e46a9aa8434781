"""Hostile bytes: names, pictures, pickles, archives. Made by code, so that nobody carries them about."""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from tests.support.runs import draw_scene

CONTROL = (
    "\x1b[2J",
    "\x1b]52;c;b3duZWQ=\x07",
    "\x1b]8;;http://x\x1b\\y\x1b]8;;\x1b\\",
    "\x1bP$q\x1b\\",
    "\x9b31m",
    "\x07\x08\r",
    "\u202egnp.exe",
)
"""What drives a terminal or hides text."""

MARKUP = ("[/", "[red]x[/red]", "[@click=app.quit]x[/]", "[link=file:///etc/passwd]x[/link]")
"""What rich and Textual would take for markup."""


def is_inert(text: str) -> bool:
    """Whether a terminal can be shown a text: nothing in it but lines of visible characters."""
    return not any((ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 or c in "\u202e\u2066" for c in text)


def write_data(root: Path, num_train: int = 6, num_val: int = 3, *, seed: int = 0) -> Path:
    """A sound `folder` data set of 3 classes, 48 x 64 px."""
    rng = np.random.default_rng(seed)
    for split, count in (("train", num_train), ("val", num_val)):
        for kind in ("images", "masks"):
            (root / kind / split).mkdir(parents=True)
        for i in range(count):
            image, mask = draw_scene(rng, 48, 64)
            mask[:4, -4:], mask[-4:, -4:], mask[-4:, 4:8] = 2, 1, 0
            write_picture(root / "images" / split / f"{i:02}.png", image)
            write_picture(root / "masks" / split / f"{i:02}.png", mask)
    return root


def write_picture(path: Path, pixels: np.ndarray[Any, Any]) -> None:
    """A picture under any name."""
    is_written, data = cv2.imencode(path.suffix or ".png", pixels)
    assert is_written
    path.write_bytes(data.tobytes())


def packed_zeros(num: int) -> bytes:
    """So many zeros in zlib's format: the blocks of a megabyte that follow the first one have equal bytes."""
    packer = zlib.compressobj(9)
    if num < 2**21:
        return packer.compress(bytes(num)) + packer.flush()
    first, block = (packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    rest = packer.compress(bytes(num % 2**20)) + packer.flush()
    checksum = struct.pack(">HH", num % 65521, 1)  # Adler-32 of zeros
    return first + block * (num // 2**20 - 1) + rest[:-4] + checksum


def png_bomb(width: int, height: int) -> bytes:
    """A grey PNG of so many zeros, whole and valid, in a few kilobytes."""
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in (
            (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)),
            (b"IDAT", packed_zeros((width + 1) * height)),
            (b"IEND", b""),
        )
    )


class Canary:
    """Unpickled by Python's own pickle, it makes a file."""

    def __init__(self, path: Path) -> None:
        self._command = f"touch {path}"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


def pickles(canary: Path) -> Iterator[tuple[str, bytes]]:
    """Files that would make the canary if anything in them were run; each verified to do so where it can be."""
    payload = {"model": {"w": torch.zeros(2)}, "checkpoint": Canary(canary)}
    for name, is_zip in (("archive of torch.save", True), ("old format of torch.save", False)):
        buffer = io.BytesIO()
        torch.save(payload, buffer, _use_new_zipfile_serialization=is_zip)
        yield name, buffer.getvalue()
    yield "bare pickle", pickle.dumps(payload, protocol=2)
    yield "old tar", _tar({"sys_info": pickle.dumps(Canary(canary)), "pickle": pickle.dumps(Canary(canary))})
    inner = io.BytesIO()
    torch.save(payload, inner)
    yield "zip in a zip", _zip({"archive/data.pkl": inner.getvalue(), "archive/version": b"3\n"})
    script = {
        "archive/constants.pkl": pickle.dumps(Canary(canary)),
        "archive/data.pkl": pickle.dumps(Canary(canary)),
        "archive/version": b"3\n",
    }
    yield "TorchScript", _zip(script)
    yield "data.pkl of several", _zip({"a/data.pkl": pickle.dumps(Canary(canary)), "b/data.pkl": b"."})


def _zip(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def _tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


PYTHONS_WORDS = re.compile(
    r"NoneType|subscriptable|out of range|could not convert|invalid literal|unsupported|expected|iterable|no attribute"
    r"|unhashable|object is not|argument|Traceback|Error\b|unpack|must be|inhomogeneous|too large to|Errno"
    r"|'(int|str|list|dict|float)'|codec|padding|\bNone\b|\bTrue\b|\bFalse\b|mmap|<class|float\(|int\(|cannot cast"
    r"|unknown dimension|reshape|broadcast"
)
"""What a message to a user never says."""
