"""A step on the CPU that cannot fit into the free memory is refused; one that fits is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from segapp.config import RunConfig
from segapp.errors import OutOfMemoryError, RunError
from segapp.training.planning import auto
from segapp.training.planning.auto import MOST_BYTES_PER_PX, check_host_memory
from tests.support.runs import merged, train

GIB = 2**30


def with_memory(monkeypatch: pytest.MonkeyPatch, free: int | None, needed: int | Exception) -> list[int]:
    """Sets the free memory and the prediction; returns the list of predictions asked for, by images."""
    asked: list[int] = []

    def predict(_: RunConfig, num_images: int) -> int:
        asked.append(num_images)
        if isinstance(needed, Exception):
            raise needed
        return needed

    monkeypatch.setattr(auto, "available_bytes", lambda: free)
    monkeypatch.setattr(auto, "simulated_bytes", predict)
    return asked


@pytest.mark.parametrize(
    ("free", "needed", "words"),
    [
        (
            8 * GIB,
            9 * GIB,
            "a step of 4 crops of 4000 x 4000 px needs 9.0 GiB of memory at least, and 8.0 GiB are free",
        ),
        (
            8 * GIB,
            9 * GIB,
            "train.batch_size to 3 or less, with train.accumulate = 2 for the same number",
        ),
        (8 * GIB, 40 * GIB, "are free: lower data.crop_px = [4000, 4000]"),
        (8 * GIB, 8 * GIB, None),
        (None, 99 * GIB, None),
        (8 * GIB, RunError("data-dependent shapes"), None),
    ],
)
def test_refusal_says_both_figures_and_the_next_move(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, free: int | None, needed: Any, words: str | None
) -> None:
    asked = with_memory(monkeypatch, free, needed)
    config = merged(tiny, data={"crop_px": [4000, 4000]}, train={"batch_size": 4})
    if words is None:
        check_host_memory(config, 4)
    else:
        with pytest.raises(OutOfMemoryError) as raised:
            check_host_memory(config, 4)
        assert words in str(raised.value)
        assert raised.value.exit_code == 6
    assert asked == ([] if free is None else [4])


def test_small_crops_are_not_simulated(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    least = 2 * 32 * 32 * MOST_BYTES_PER_PX
    assert with_memory(monkeypatch, least, 0) == []
    check_host_memory(merged(tiny), 2)
    asked = with_memory(monkeypatch, least - 1, 0)
    check_host_memory(merged(tiny), 2)
    assert asked == [2]


def test_batches_that_workers_load_ahead_are_not_free(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two training batches of 4 and two validation batches of 2 crops for each of 3 workers, 4 bytes per pixel."""
    config = merged(tiny, data={"crop_px": [4000, 4000], "workers": 3}, eval={"batch_size": 2})
    loaded = 2 * 3 * (4 + 2) * 4000 * 4000 * 4
    with_memory(monkeypatch, 8 * GIB + loaded, 8 * GIB)
    check_host_memory(config, 4)
    with_memory(monkeypatch, 8 * GIB + loaded - 1, 8 * GIB)
    with pytest.raises(
        OutOfMemoryError, match="GiB are free next to the batches that 3 data workers load ahead: lower"
    ):
        check_host_memory(config, 4)


@pytest.mark.slow
def test_a_run_that_cannot_fit_ends_before_its_first_step(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prediction is a real one; two logical devices count together."""
    monkeypatch.setattr(auto, "available_bytes", lambda: 20 * 2**20)
    config = merged(tiny, data={"crop_px": [256, 256]}, train={"batch_size": 4}, parallel={"devices": ["cpu", "cpu"]})
    with pytest.raises(OutOfMemoryError, match="a step of 4 crops of 256 x 256 px needs ") as raised:
        train(config, tmp_path / "run")
    assert raised.value.exit_code == 6
    assert not (tmp_path / "run").exists()
