"""Pictures of training samples: which samples, their captions, and the colours of their masks."""

from __future__ import annotations

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import torch

from segapp.commands.check import augmented_samples
from segapp.datasets.dataset import Sample
from segapp.datasets.images.pixel_format import RGB8
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.sampling import SampleKey
from segapp.errors import DataError

PALETTE = ((200, 30, 30), (20, 60, 220))


class FourImages:
    """Images of one grey each, with two classes above an ignored lower half; the third cannot be read."""

    scheme = ClassScheme(("road", "sky"), PALETTE)
    pixels = RGB8
    pairs = tuple(SimpleNamespace(image=Path(f"{i}.png")) for i in range(4))

    def __getitem__(self, key: SampleKey) -> Sample:
        if key.image == 2:
            raise DataError("2.png: cannot be read")
        target = torch.full((480, 640), 255, dtype=torch.uint8)
        target[:240, :320], target[:240, 320:] = 0, 1
        return Sample(torch.full((3, 480, 640), 50 * key.image, dtype=torch.uint8), target, key.image)


def test_pictures_of_the_first_epoch_show_ignored_pixels_grey() -> None:
    def order(epoch: int) -> list[SampleKey]:
        return [
            SampleKey(epoch, image, aim=1 if image == 3 else None) for image in ((3, 2, 1, 0) if epoch == 1 else (0,))
        ]

    dataset: Any = FourImages()
    found = list(augmented_samples(dataset, order, 3))  # type: ignore[arg-type]
    assert [caption for caption, _ in found] == ["3.png, aimed at sky", "1.png"]
    for (_, pictures), grey in zip(found, (150, 50), strict=True):
        decoded = [np.frombuffer(base64.b64decode(each.split(",")[1]), np.uint8) for each in pictures]
        picture = np.concatenate([cv2.imdecode(each, cv2.IMREAD_COLOR) for each in decoded], 1)[..., ::-1].astype(int)
        assert picture.shape == (240, 640, 3)  # of half the size, side by side
        for (row, column), color in {
            (60, 160): (grey,) * 3, (60, 400): PALETTE[0], (60, 560): PALETTE[1], (180, 400): (128,) * 3,
        }.items():  # fmt: skip
            np.testing.assert_allclose(picture[row, column], color, atol=4)
