"""Trainings with `data.augment`, `data.cutmix` and `data.sampling` resume bitwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import differing, merged, train
from tests.training.test_resume import course, final_state, stopped_and_resumed

MIXED = {
    "augment": ["ScaledCrop", "D4", {"OneOf": ["Blur", "GaussNoise"]}],
    "crop_px": [40, 40],
    "cutmix": 0.6,
    "classmix": 0.4,
    "sampling": "foreground",
}


@pytest.mark.slow
def test_run_with_mixed_samples_resumes_bitwise(base: dict[str, Any], tmp_path: Path) -> None:
    one = {"epochs": 1, "batch_size": 2}
    assert train(merged(base, data=MIXED, train=one), tmp_path / "whole") == 0
    stopped_and_resumed(merged(base, data={**MIXED, "workers": 2}, train=one), tmp_path / "run", "train.step=3")
    assert course(tmp_path / "run") == course(tmp_path / "whole")
    found = differing(final_state(tmp_path / "run"), final_state(tmp_path / "whole"))
    assert all(path.startswith("/checkpoint/config") or path.endswith("/workers") for path in found)
