"""A page-locked ring of batches on one card: 1,000 batches arrive with the bytes of the data set.

If a card passes, `segapp.datasets.pool.RINGS_FOR_GPUS` may be true. `SEGAPP_GPU_TESTS_ON=cpu` tries the body.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from segapp.datasets import pool
from segapp.datasets.dataset import Sample, SegmentationDataset
from segapp.datasets.files import ImagePair
from segapp.datasets.layouts.formats import class_scheme
from segapp.datasets.loader import TrainLoader
from segapp.datasets.pool import LoadOptions

DEVICE = torch.device(os.environ.get("SEGAPP_GPU_TESTS_ON", "cuda:0"))
IS_GPU = DEVICE.type == "cuda"
BATCH, NUM_IMAGES, NUM_BATCHES, SIDE_PX = 8, 40, 1000, 128
WORK_SIDE = 2048 if IS_GPU else 16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(IS_GPU and not torch.cuda.is_available(), reason="needs a CUDA device and sees none"),
]


class Constant(SegmentationDataset):
    """Samples whose every value is a function of epoch and image: no file is read."""

    def __getitem__(self, key: tuple[int, ...]) -> Sample:
        value = (31 * key[0] + 7 * key[1]) % 251
        image, target = np.full((3, SIDE_PX, SIDE_PX), value, np.uint8), np.full((SIDE_PX, SIDE_PX), value, np.uint8)
        return Sample(torch.from_numpy(image), torch.from_numpy(target), key[1])


class Crop:
    crop_px = (SIDE_PX, SIDE_PX)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_thousand_batches_have_the_bytes_of_the_data_set(monkeypatch: pytest.MonkeyPatch, accumulate: int) -> None:
    """Each step of the card takes longer than the loading, so its copies are behind the host; none may be late."""
    monkeypatch.setattr(pool, "RINGS_FOR_GPUS", True)
    pairs = [ImagePair(Path(f"{index}.png"), None, str(index)) for index in range(NUM_IMAGES)]
    dataset = Constant(pairs, class_scheme("list", classes=["a", "b"]), Crop())
    options = LoadOptions(4, pin_memory=IS_GPU, accumulate=accumulate, devices=(DEVICE,))
    loader = TrainLoader(dataset, BATCH, options=options)
    num_wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    work, group, num_batches = torch.ones(WORK_SIDE, WORK_SIDE, device=DEVICE), [], 0
    for epoch in range(1, NUM_BATCHES * BATCH // NUM_IMAGES + 1):
        for batch in loader.epoch(epoch, last_epoch=NUM_BATCHES):
            assert batch.images.is_pinned() == IS_GPU
            group.append(batch)
            num_batches += 1
            if len(group) < accumulate:
                continue
            for _ in range(20):
                work = (work @ work).clamp(-1, 1)
            for each in group:
                values = torch.tensor([(31 * each.epoch + 7 * index) % 251 for index in each.indices])
                expected = (values.pin_memory() if IS_GPU else values).to(DEVICE, non_blocking=True)
                for tensor in (each.images, each.target):
                    received = tensor.to(DEVICE, non_blocking=True).flatten(1)
                    num_wrong += (received != expected[:, None]).sum()
            group = []
    loader.close()
    assert num_batches == NUM_BATCHES
    assert int(num_wrong) == 0
