"""Files that a slow storage answers late are read side by side, in the order of the pairs, a few at a time."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import cv2
import numpy as np
import pytest

from segapp.datasets import resources
from segapp.datasets.files import ImagePair, check_pairs
from segapp.datasets.resources import READERS, evenly_spread, side_by_side
from segapp.errors import DataError


@pytest.fixture
def pairs(tmp_path: Path) -> list[ImagePair]:
    """70 pairs of 70 sizes; the image of pair 41 is missing, and the mask of pair 8 has another size."""
    found = []
    for number in range(70):
        image, mask = tmp_path / f"{(number * 37) % 70}.png", tmp_path / f"{number}_mask.png"
        size = (20 + number, 91 - number)
        cv2.imwrite(str(image), np.zeros((*size, 3), np.uint8))
        cv2.imwrite(str(mask), np.zeros((size[0] + (number == 8), size[1]), np.uint8))
        found.append(ImagePair(image, mask, str(number)))
    found[41].image.unlink()
    return found


def test_bad_pairs_are_named_in_their_order(pairs: list[ImagePair]) -> None:
    usable = [pair for number, pair in enumerate(pairs) if number not in (8, 41)]
    assert check_pairs(usable) == tuple((20 + int(pair.name), 91 - int(pair.name)) for pair in usable)
    with pytest.raises(DataError) as caught:
        check_pairs(pairs)
    lines = str(caught.value).splitlines()
    assert "2 of 70" in lines[0]
    assert [("8_mask.png" in line, "47.png" in line) for line in lines[1:]] == [(True, False), (False, True)]


def test_results_keep_their_order_and_an_error_ends_the_work() -> None:
    seen: list[int] = []
    seventh_began = threading.Event()

    def halve(number: int) -> float:
        seen.append(number)
        time.sleep(0.003 if number < 4 else 0)  # the first four are timed
        if number == 6:
            seventh_began.set()
        if number in (4, 5):
            assert seventh_began.wait(10)  # items 4 and 5 end after item 6 has begun
        if number == 300:
            raise ValueError("odd")
        return number / 2

    results = side_by_side(halve, range(100_000), 3, 1)
    assert [next(results) for _ in range(8)] == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]
    assert max(seen) <= 8 + 2 * 3 + 3 + 1
    with pytest.raises(ValueError, match="odd"):
        list(results)
    assert max(seen) < 320
    assert list(side_by_side(halve, [], READERS)) == []


def test_fast_items_take_no_thread_and_each_block_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[int, bool] = {}
    now_s = 0.0
    monkeypatch.setattr(resources.time, "perf_counter", lambda: now_s)

    def note(number: int) -> int:
        nonlocal now_s
        threads[number] = threading.current_thread() is not threading.main_thread()
        if number % 1024 < 4:  # the items of a block that are timed
            now_s += 0.0011 if number // 1024 == 1 else 0.0009
        return number

    assert list(side_by_side(note, range(2100), 3)) == [*range(2100)]
    assert {number for number, is_other in threads.items() if is_other} == {*range(1028, 2048)}


def test_some_items_are_spread_over_the_whole_sequence() -> None:
    """Between one and two times as many, which a whole step leaves at the end."""
    assert evenly_spread(range(9), 6) == [0, 1, 3, 4, 6, 7]
    assert [*evenly_spread("abc", 5)] == ["a", "b", "c"]
