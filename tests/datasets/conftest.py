"""Fixtures of the data tests: pairs of odd sizes, whose names have gaps and whose masks hold ids with gaps."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from segapp.datasets.files import ImagePair
from segapp.datasets.layouts.formats import class_scheme
from segapp.datasets.layouts.schemes import ClassScheme
from tests.support.drawn_data import FILE_IDS, LABEL_MAP, NUM_CLASSES, draw_image, draw_mask


@pytest.fixture
def scheme() -> ClassScheme:
    return class_scheme("folder", classes=[f"class {i}" for i in range(NUM_CLASSES)], label_map=LABEL_MAP)


@pytest.fixture
def write_pairs(tmp_path: Path) -> Callable[..., tuple[ImagePair, ...]]:
    """Write drawn pairs of the given sizes and return them: 004, 007, 010, ..."""

    def write(sizes: list[tuple[int, int]], folder: str = "set") -> tuple[ImagePair, ...]:
        place = tmp_path / folder
        place.mkdir()
        pairs = []
        for i, (height, width) in enumerate(sizes):
            name = f"{3 * i + 4:03}"
            image, mask = place / f"{name}.png", place / f"{name}_mask.png"
            Image.fromarray(draw_image(i, height, width)).save(image, compress_level=1)
            Image.fromarray(FILE_IDS[draw_mask(i, height, width)]).save(mask)
            pairs.append(ImagePair(image, mask, name))
        return tuple(pairs)

    return write


@pytest.fixture
def pairs(write_pairs: Callable[..., tuple[ImagePair, ...]]) -> tuple[ImagePair, ...]:
    return write_pairs([(40 + 3 * i % 17, 50 + 5 * i % 23) for i in range(13)])


def children() -> set[str]:
    """Return the process ids of this process's children, zombies included."""
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found.update((task / "children").read_text().split())
    return found


@pytest.fixture
def no_worker_is_left() -> Iterator[None]:
    """Check that a test leaves no worker process; other tests may have left one that a library keeps."""
    before = children()
    yield
    deadline = time.monotonic() + 3
    while not (is_gone := children() <= before) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert is_gone, "a worker process is left"
