"""Choose the number of data workers from the cost of a sample, and give advice if a device waits for data."""

from __future__ import annotations

import math
import time
from typing import Literal

from segapp.datasets.dataset import SegmentationDataset

GPU_PX_PER_S, CPU_PX_PER_S = 120e6, 5e6
"""Crop pixels that a device trains on per second, an upper estimate: DeepLabV3-ResNet50 in bf16 takes 2.3 TFLOP for an
image of 768x768, and an H200 processes about 200 per second; on the CPU, a small network on some cores."""

WAITING_FRAC = 0.2
"""Share of the time spent waiting for data from which advice is given; the TUI marks the same share."""

_MARGIN = 1.25


def sample_seconds(dataset: SegmentationDataset, num_samples: int = 3) -> float | None:
    """Return the shortest time in seconds to load one of a few training samples; None if one cannot be loaded.

    The larger of elapsed time and processor time counts: the storage may be slow, and several threads here may share
    work that a worker does in one thread.
    """
    step = max(1, len(dataset) // num_samples)
    times_s = []
    for index in range(0, len(dataset), step)[:num_samples]:
        began_s, work_s = time.perf_counter(), time.process_time()
        try:
            dataset[0, index]
        except Exception:  # the loader reports the file when it reads it
            return None
        times_s.append(max(time.perf_counter() - began_s, time.process_time() - work_s))
    return min(times_s)


def most_workers(cores: float, batch_bytes: int = 0, shared_bytes: int | None = None) -> int:
    """Return the largest useful number of workers, at least 1.

    Args:
        cores: processors of this rank; one is left to the training thread.
        batch_bytes: bytes of a batch; each worker holds up to two in shared memory.
        shared_bytes: free shared memory of this rank, half of which is used; None: not limited.

    >>> most_workers(16), most_workers(16, 20 * 2**20, 64 * 2**20), most_workers(16, 20 * 2**20, 2**30)
    (15, 1, 12)
    """
    most = math.floor(cores) - 1
    if shared_bytes is not None and batch_bytes:
        most = min(most, shared_bytes // 2 // (2 * batch_bytes))
    return max(1, most)


def plan_workers(sample_s: float | None, crop_px: tuple[int, int], most: int, device_type: str) -> int:
    """Return the number of workers that keep a device busy.

    Args:
        sample_s: time to load a sample in one process, seconds; None: unknown.
        crop_px: height and width of a sample.
        most: upper limit, which is returned if `sample_s` is unknown.
        device_type: `torch.device.type`; every type except "cpu" is a GPU.

    >>> plan_workers(0.053, (768, 768), 15, "cuda"), plan_workers(0.004, (768, 768), 15, "cuda")
    (14, 2)
    >>> plan_workers(0.053, (768, 768), 3, "cuda"), plan_workers(0.053, (768, 768), 1, "cpu")
    (3, 1)
    """
    if sample_s is None:
        return most
    images_per_s = (CPU_PX_PER_S if device_type == "cpu" else GPU_PX_PER_S) / (crop_px[0] * crop_px[1])
    return min(most, max(1, math.ceil(_MARGIN * images_per_s * sample_s)))


def wait_advice(
    wait_frac: float, workers: int, cores: float, cache: Literal["none", "ram", "disk"], *, is_filling: bool = False
) -> str | None:
    """Return a sentence that says that the device waits for data and what to change; None if it rarely waits.

    Workers and processors are counted per rank; `is_filling` means that the cache does not hold every image yet.
    """
    if wait_frac < WAITING_FRAC:
        return None
    moves = []
    if cache == "none":
        moves.append("set data.cache: disk (or ram), which decodes each image once")
    elif is_filling:
        moves.append("the wait should end when data.cache holds every image")
    most = most_workers(cores)
    if workers < most:
        moves.append(f"raise data.workers to {most}")
    if not moves:
        moves.append("use a machine with more processors or a faster disk, or lower data.resize_px or data.crop_px")
    return (
        f"the device waits for data {wait_frac:.0%} of the time ({workers} data workers, {cores:g} processors): "
        + ", or ".join(moves)
    )
