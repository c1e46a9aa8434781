"""From a folder to a training: on every drawn layout `init`, `check` and two steps, whose pixels are those drawn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from segapp.assembly.pairs import build_pairs, build_scheme, split_names
from segapp.commands.check import check_data
from segapp.config import RunConfig, load_config, validate_config
from segapp.datasets.dataset import Sample as TrainingSample
from segapp.datasets.dataset import SegmentationDataset, image_sizes
from tests.support.layouts import LAYOUTS, UNMENDED
from tests.support.layouts.canvas import Truth
from tests.support.layouts.judge import Sample, Verdict, answered, compare, judged, problems, sample_of
from tests.support.layouts.layout import Read, Refuse
from tests.support.runs import events, train

IN_EVERY_RUN = [
    "images/masks split",
    "b_rgb_nofile",
]
EXIT_DATA = 3


def two_steps(config: RunConfig, size_px: tuple[int, int], num_train: int) -> RunConfig:
    """Returns the config that `init` wrote with a small network, two steps of all images and no augmentation."""
    values = config.model_dump()
    values["data"] |= {
        "crop_px": size_px,
        "scale": (1.0, 1.0),
        "hflip": 0.0,
        "photometric": False,
    }
    values["data"] |= {"workers": 0, "cache": "none"}
    values["model"] = {"library": "torchvision", "name": "fcn", "encoder": "mobilenet_v3_small", "aux": False}
    values["loss"] = {"name": "bce" if config.data.multilabel else "ce"}
    values["schedule"] |= {"warmup_steps": 0}
    values["train"] |= {"epochs": 2, "batch_size": num_train}
    values["eval"] |= {"every_epochs": 2}
    values["log"] |= {"every_steps": 1, "tensorboard": False}
    return validate_config(values)


@contextlib.contextmanager
def noting(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[tuple[bool, int], TrainingSample]]:
    """Notes the samples that are read in the block: (is training, index) -> sample."""
    seen: dict[tuple[bool, int], TrainingSample] = {}
    read = SegmentationDataset.__getitem__

    def noted(self: SegmentationDataset, key: Any) -> TrainingSample:
        sample = read(self, key)
        seen[self.transform is not None, sample.index] = sample
        return sample

    with monkeypatch.context() as patch:
        patch.setattr(SegmentationDataset, "__getitem__", noted)
        yield seen


def of_training(seen: dict[tuple[bool, int], TrainingSample], config: RunConfig, truth: Truth) -> Iterator[Sample]:
    """Yields what a training read as samples to be judged."""
    scheme = build_scheme(config.data)
    for (is_training, _), sample in seen.items():
        image = np.moveaxis(sample.image.numpy(), 0, 2)
        yield sample_of("train" if is_training else "val", image, sample.target.numpy(), scheme, truth)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in IN_EVERY_RUN else [pytest.mark.slow])
        for name in LAYOUTS
        if name not in UNMENDED
    ],
)
def test_layout_trains_on_the_pixels_that_were_drawn(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = LAYOUTS[name]
    truth, verdict = judged(layout, tmp_path)
    if isinstance(layout.expected, Refuse):
        assert problems(layout, verdict) == []
        return
    final: Verdict | None = verdict
    if verdict.question is not None:
        final = answered(layout, truth, tmp_path, verdict)
    assert final is not None, verdict.said
    assert final.config is not None, verdict.said
    config = load_config(final.config)
    capsys.readouterr()
    code = check_data(config, as_json=True)
    said = capsys.readouterr().out
    if isinstance(layout.expected, Read) and layout.expected.check_names:
        assert code == EXIT_DATA
        assert [word for word in layout.expected.check_names if word not in said] == []
        return
    assert code == 0, said
    pairs = build_pairs(config.data, split_names(config.data)[0])
    heights, widths = zip(*image_sizes(pairs), strict=True)
    short = two_steps(config, (max(heights), max(widths)), len(pairs))
    with noting(monkeypatch) as seen:
        assert train(short, tmp_path / "run") == 0
    assert len(events(tmp_path / "run", "step")) == 2
    trained = Verdict("read", final.said, num_true=final.num_true)
    compare(truth, config, of_training(seen, config, truth), trained, layout.tolerance)
    assert trained.wrong == []
