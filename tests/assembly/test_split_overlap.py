"""Training and validation images must differ: train and check refuse an overlap and name the files."""

from pathlib import Path
from typing import Any

import pytest

from segapp.commands.check import check_data
from segapp.errors import DataError
from tests.support.runs import merged, train


def test_training_on_the_validation_images_is_refused(
    tiny: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = merged(tiny, data={"val_split": "train"})
    with pytest.raises(DataError, match=r"validation images are training images too \(.*\.png.*images of their own"):
        train(config, tmp_path / "run")
    assert check_data(config, as_json=False) == 3
    assert "training images too" in " ".join(capsys.readouterr().out.split())
