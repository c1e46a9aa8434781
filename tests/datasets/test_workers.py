"""`data.workers: auto`, and what is said where the device waits for data."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from segapp.assembly.data import build_load_options
from segapp.config import RunConfig, validate_config
from segapp.datasets import loader, resources
from segapp.datasets.augment import TrainTransform
from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.files import ImagePair
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.loader import GPU_PX_PER_S, most_workers, plan_workers, sample_seconds, wait_advice
from segapp.datasets.pool import Batch
from segapp.datasets.resources import available_bytes, usable_cores


@pytest.mark.parametrize(
    ("sample_s", "cores", "shared_mib", "device", "expected"),
    [
        (0.053, 64, None, "cuda", 14),
        (0.053, 8, None, "cuda", 7),
        (0.0042, 64, None, "cuda", 2),
        (0.053, 1, None, "cuda", 1),
        (0.053, 0.5, None, "cuda", 1),
        (None, 8, None, "cuda", 7),
        (0.053, 16, None, "cpu", 1),
        (0.053, 64, 64, "cuda", 1),  # Docker's default
        (0.053, 64, 400, "cuda", 10),
    ],
)
def test_workers_by_hand(
    sample_s: float | None, cores: float, shared_mib: int | None, device: str, expected: int
) -> None:
    most = most_workers(cores, 10 * 2**20, None if shared_mib is None else shared_mib * 2**20)
    assert plan_workers(sample_s, (768, 768), most, device) == expected
    if sample_s and device == "cuda" and expected < int(most):  # enough for the device, and one fewer is not
        needed = sample_s * GPU_PX_PER_S / 768**2
        assert needed <= expected <= max(1, 1.25 * needed + 1)


def test_cores_and_memory_are_those_of_affinity_and_group(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(resources, "_GROUP", tmp_path)
    assert usable_cores() == len(os.sched_getaffinity(0))
    (tmp_path / "cpu.max").write_text("50000 100000\n")  # type: ignore[operator]
    assert usable_cores() == 0.5
    (tmp_path / "cpu.max").write_text("max 100000\n")  # type: ignore[operator]
    assert usable_cores() == len(os.sched_getaffinity(0))
    for name, text in (("max", "7000"), ("current", "6000"), ("stat", "anon 2000\nfile 4000\nshmem 1500\n")):
        (tmp_path / f"memory.{name}").write_text(text)  # type: ignore[operator]
    assert available_bytes() == 7000 - 6000 + 4000 - 1500, "shared memory is not free"
    (tmp_path / "memory.current").write_text("9501")  # type: ignore[operator]
    assert available_bytes() == 0


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/\n", {"": 7000}, 6100),
        ("0::/job/step\n", {"": 9000, "job": 7000, "job/step": 8000}, 6100),
        ("0::/job/step\n", {"": 7000, "job/step": 8000, "other": 1}, 6100),
        ("0::/job/step\n", {"job/step": "max", "job": 7000}, 6100),
        ("4:cpu,memory:/job/step\n1:name=systemd:/\n0::/\n", {"memory/job/step": 7000, "memory": 9000}, 6100),
        ("4:memory:/../../outside\n", {"memory": 7000}, 6100),
    ],
)
def test_memory_of_groups_on_the_way_counts(
    groups: str, limits: dict[str, int | str], expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(resources, "_GROUP", tmp_path / "groups")
    monkeypatch.setattr(resources, "_OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text(groups)
    for name, limit in limits.items():
        folder, is_old = tmp_path / "groups" / name, name.startswith("memory")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ("memory.limit_in_bytes" if is_old else "memory.max")).write_text(f"{limit}\n")
        (folder / ("memory.usage_in_bytes" if is_old else "memory.current")).write_text("1000\n")
        kinds = "cache 1\ntotal_cache 300\ntotal_shmem 200\n" if is_old else "file 300\nshmem 200\n"
        (folder / "memory.stat").write_text(kinds)
    assert available_bytes() == expected


@pytest.fixture
def dataset(write_pairs: Callable[..., tuple[ImagePair, ...]], scheme: ClassScheme) -> SegmentationDataset:
    return SegmentationDataset(write_pairs([(40, 50)] * 4), scheme, TrainTransform((24, 32)))


def run_config(hang_timeout_s: float = 35, **data: object) -> RunConfig:
    section = {"format": "folder", "root": ".", "classes": ["a", "b"], "crop_px": [24, 32], **data}
    return validate_config({"name": "x", "data": section, "train": {"hang_timeout_s": hang_timeout_s}})


def test_ranks_of_a_machine_divide_its_cores(dataset: SegmentationDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "usable_cores", lambda: 48.0)
    monkeypatch.setattr("segapp.assembly.data.sample_seconds", lambda _: 1000.0)
    config, device, found = run_config(), torch.device("cuda"), []
    for ranks in ("", "1", "8"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        found.append(build_load_options(config, dataset, device, 8).workers)
    assert found == [47, 47, 5]
    monkeypatch.setattr("segapp.assembly.data.shared_bytes_of_rank", lambda: 12 * 8 * 24 * 32 * 4)
    assert build_load_options(config, dataset, device, 8).workers == 3
    # Each worker also loads two validation images of as many pixels as the batch ahead.
    assert build_load_options(config, dataset, device, 8, further_px=8 * 24 * 32).workers == 1
    assert build_load_options(run_config(workers=7), dataset, device, 8).workers == 7


@pytest.mark.parametrize(("device", "is_pinned"), [("cuda", True), ("cpu", False)])
def test_batches_for_a_gpu_are_page_locked(device: str, is_pinned: bool, dataset: SegmentationDataset) -> None:
    options = build_load_options(run_config(workers=1), dataset, torch.device(device), 8)
    assert (options.pin_memory, options.timeout_s) == (is_pinned, 7)


def test_cost_of_a_sample_is_that_of_the_fastest(
    write_pairs: Callable[..., tuple[ImagePair, ...]], scheme: ClassScheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(image: np.ndarray, mask: np.ndarray, seed: int, aim: int | None) -> tuple[np.ndarray, np.ndarray]:
        time.sleep(0.1 * (image.shape[1] != 51))
        return image, mask

    dataset = SegmentationDataset(write_pairs([(40, 50), (40, 51), (40, 52)]), scheme, slow)
    seconds = sample_seconds(dataset)
    assert seconds is not None
    assert 0 < seconds < 0.1
    handed_over = []

    def slow_collate(parts: list[Batch], *, shared: bool) -> None:
        handed_over.append((parts[0].images.shape[1:], parts[0].indices, shared))
        time.sleep(0.05)

    monkeypatch.setattr(loader, "collate", slow_collate)
    assert (sample_seconds(dataset) or 0) >= 0.05
    assert handed_over == [((3, 40, 50 + index), (index,), True) for index in range(3)]
    dataset.pairs[2].image.unlink()
    assert sample_seconds(dataset) is None  # the loader names the file


@pytest.mark.parametrize(
    ("workers", "cache", "is_filling", "expected"),
    [
        (4, "none", False, "set data.cache: disk (or ram), which decodes each image once, or raise data.workers to 7"),
        (4, "disk", True, "the wait should end when data.cache holds every image, or raise data.workers to 7"),
        (4, "ram", False, "raise data.workers to 7"),
        (7, "disk", False, "use a machine with more processors"),
    ],
)
def test_advice_by_hand(workers: int, cache: str, is_filling: bool, expected: str) -> None:
    advice = wait_advice(0.4, workers, 8, cache, is_filling=is_filling)  # type: ignore[arg-type]
    said = f"the device waits for data 40% of the time ({workers} data workers, 8 processors): {expected}"
    assert (advice or "").startswith(said)
    assert wait_advice(0.1, workers, 8, cache, is_filling=is_filling) is None  # type: ignore[arg-type]
