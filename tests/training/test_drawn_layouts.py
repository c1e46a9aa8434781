"""From a folder to a training: on drawn layouts `init`, `check` and two steps, whose pixels are those drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from segapp.assembly.pairs import build_pairs, build_scheme, split_names
from segapp.commands.check import check_data
from segapp.config import load_config, validate_config
from segapp.datasets.dataset import Sample, SegmentationDataset, image_sizes
from tests.support.layouts import LAYOUTS
from tests.support.layouts.judge import Verdict, compare, judged, sample_of
from tests.support.runs import FCN, events, train


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", ["EXIF-rotated", "images/masks split", "labelme", "float TIFF of four bands", "colors without a file"]
)
def test_layout_trains_on_the_pixels_that_were_drawn(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    truth, verdict = judged(LAYOUTS[name], tmp_path)
    assert verdict.config is not None, verdict.said
    config = load_config(verdict.config)
    assert check_data(config, as_json=True) == 0, capsys.readouterr().out
    pairs = build_pairs(config.data, split_names(config.data)[0])
    heights, widths = zip(*image_sizes(pairs), strict=True)
    values = config.model_dump()
    values["data"] |= {"crop_px": (max(heights), max(widths)), "scale": (1.0, 1.0), "hflip": 0.0, "photometric": False}
    values["data"] |= {"workers": 0, "cache": "none"}
    values["model"] = FCN
    values["schedule"] |= {"warmup_steps": 0}
    values["train"] |= {"epochs": 2, "batch_size": len(pairs)}
    values["eval"] |= {"every_epochs": 2}
    values["log"] |= {"every_steps": 1, "tensorboard": False}
    seen: dict[tuple[bool, int], Sample] = {}
    read = SegmentationDataset.__getitem__

    def noted(self: SegmentationDataset, key: Any) -> Sample:
        sample = read(self, key)
        seen[self.transform is not None, sample.index] = sample
        return sample

    monkeypatch.setattr(SegmentationDataset, "__getitem__", noted)  # what the steps are given, after every transform
    assert train(validate_config(values), tmp_path / "run") == 0
    assert len(events(tmp_path / "run", "step")) == 2
    scheme, trained = build_scheme(config.data), Verdict("read", verdict.said)
    samples = (
        sample_of("train" if is_training else "val", np.moveaxis(one.image.numpy(), 0, 2), one.target.numpy(), scheme,
                  truth)
        for (is_training, _), one in seen.items()
    )  # fmt: skip
    compare(truth, config, samples, trained)
    assert trained.wrong == []
