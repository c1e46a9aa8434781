"""Training and validation images must differ: train, check and init refuse an overlap and name the files."""

from pathlib import Path
from typing import Any

import pytest

from segapp.commands.check import check_data
from segapp.errors import DataError
from segapp.onboarding.init import InitRequest, propose_config
from tests.support.runs import merged, train


def config_of(tiny: dict[str, Any], **data: Any) -> Any:
    return merged(tiny, data=data, train={"epochs": 1, "batch_size": 3, "ema": None})


def test_training_on_the_validation_images_is_refused(tiny: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"validation images are training images too \(.*\.png.*images of their own"):
        train(config_of(tiny, val_split="train"), tmp_path / "run")


def test_check_reports_the_overlap_as_an_error(tiny: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert check_data(config_of(tiny, val_split="train"), as_json=False) == 3
    assert "training images too" in " ".join(capsys.readouterr().out.split())


def test_init_refuses_lists_with_a_common_image(tiny_root: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    for kind, name in (("images", "images/train"), ("masks", "masks/train")):
        (root / kind).mkdir(parents=True)
        for file in sorted((tiny_root / name).rglob("*.png")):
            (root / kind / file.name).write_bytes(file.read_bytes())
    names = sorted(path.stem for path in (root / "images").iterdir())
    (root / "train.txt").write_text("\n".join(names))
    (root / "val.txt").write_text(names[0])
    with pytest.raises(DataError, match=f"1 validation images are also training images, such as .*{names[0]}"):
        propose_config(InitRequest(root, tmp_path / "made.yaml"))
    assert not (tmp_path / "made.yaml").exists()
