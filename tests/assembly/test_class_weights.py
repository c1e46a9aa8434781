"""Class weights against values computed by hand, and the invalidation of their cache."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from segapp.datasets.targets import ClassFrequencies, cached_frequencies, class_weights

#: 100 valid pixels in two images of 50: class 0 in both, class 1 in one, class 2 in none.
COUNTS = ClassFrequencies((80, 20, 0), (2, 1, 0), (100, 50, 0), 7, 2, ((0, 1), (0,)))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("inverse", [1.25 / 3.125, 5 / 3.125, 0.0]),  # one over the share, with mean one
        ("enet", [1 / math.log(1.82), 1 / math.log(1.22), 0.0]),
        ("median-frequency", [0.75, 1.5, 0.0]),  # frequencies 80/100 and 20/50 in the images that have it, median 0.6
    ],
)
def test_weights_of_a_rule_by_hand(rule: str, expected: list[float]) -> None:
    assert class_weights(rule, COUNTS) == pytest.approx(expected)


def test_masks_without_valid_pixels_and_unknown_rule_are_refused() -> None:
    with pytest.raises(ValueError, match="no valid pixel"):
        class_weights("enet", ClassFrequencies((0,), (0,), (0,), 9, 1, ((),)))


def test_class_counts_are_cached_until_a_mask_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mask = tmp_path / "m.png"
    mask.write_bytes(b"one")
    calls: list[int] = []

    def count() -> ClassFrequencies:
        calls.append(1)
        return COUNTS

    for _ in range(2):
        assert cached_frequencies([mask], "key", count) == COUNTS
    assert len(calls) == 1
    cached_frequencies([mask], "other key", count)
    assert len(calls) == 2
    mask.write_bytes(b"other")
    os.utime(mask, ns=(1, 1))
    cached_frequencies([mask], "key", count)
    assert len(calls) == 3
    for file in (tmp_path / "cache" / "segapp").iterdir():
        file.write_text("{broken")
    assert cached_frequencies([mask], "key", count) == COUNTS
    assert len(calls) == 4
