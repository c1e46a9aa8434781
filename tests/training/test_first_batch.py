"""The picture of the first batch: in a run, kept by its later starts, and drawn by `segapp check`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from segapp import failpoints
from segapp.__main__ import main
from segapp.commands.check import _check_place as check_data_place
from segapp.config import RunConfig, dump_config
from segapp.datasets.files import ImagePair
from segapp.datasets.pool import Batch
from segapp.errors import ConfigError, RunError
from segapp.training import validation
from segapp.training.step.engine import StepEngine
from tests.support.runs import events, merged, resume, train


@pytest.fixture
def config(base: dict[str, Any]) -> RunConfig:
    """Three of ten images in a micro-batch, two of these in a step; most are mixed; mean and std are unusual."""
    data: dict[str, Any] = {"cutmix": 0.4, "classmix": 0.4, "mean": [0.1, 0.6, 0.3], "std": [0.3, 0.1, 0.2]}
    data |= {"sampling": "class-balanced", "scale": [0.5, 0.8]}  # so small that crops are padded
    return merged(base, data=data, train={"batch_size": 3, "accumulate": 2, "epochs": 2})


def picture_of(folder: Path) -> NDArray[Any]:
    return np.asarray(cv2.imread(str(folder / "first_batch.png")))[..., ::-1].astype(int)


def checked(*words: str, config: RunConfig) -> int:
    Path("tiny.yaml").write_text(dump_config(config))
    with pytest.raises(SystemExit) as ended:
        main(["check", "--config", "tiny.yaml", *words])
    return int(str(ended.value.code))


def test_first_batch_has_the_tensors_that_go_into_the_step(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[Batch] = []
    step = StepEngine.step

    def spied(self: StepEngine, batches: list[Batch], *args: Any, **options: Any) -> Any:
        fed.extend(Batch(each.images.clone(), each.target.clone(), each.indices) for each in batches)
        return step(self, batches, *args, **options)

    monkeypatch.setattr(StepEngine, "step", spied)
    assert train(config, tmp_path / "run") == 0
    palette = np.zeros((256, 3))
    palette[:3] = events(tmp_path / "run", "run_start")[0]["palette"]
    found = picture_of(tmp_path / "run" / "samples")
    assert found.shape == (40, 3 * 58 - 2, 3)
    for number in range(3):
        image, ids = fed[0].images[number].permute(1, 2, 0).numpy(), fed[0].target[number].numpy()
        own, valid = found[:, 58 * number :][:, :56], ids != 255
        np.testing.assert_allclose(own[valid], ((image + palette[ids]) / 2)[valid], atol=1.01)
        grays = 2 * own[~valid] - image[~valid]
        assert (np.minimum(abs(grays - 110), abs(grays - 190)) <= 2).all()
    assert (fed[0].target == 255).any()
    # The check draws the same without a training, also if mean and std are those of the weights; another seed differs.
    raw = config.model_dump(mode="json")
    raw["data"] |= {"mean": None, "std": None}
    tuned = merged(raw, model={"weights": str(tmp_path / "run")}, train={"epochs": 1})
    assert train(tuned, tmp_path / "tuned") == 0
    for name, each in (("run", config), ("tuned", tuned)):
        assert checked("--pictures", "new/look", "--json", config=each) == 0
        np.testing.assert_array_equal(picture_of(Path("new/look")), picture_of(tmp_path / name / "samples"))
    assert checked("--pictures", "new/look", "seed=4", config=config) == 0
    assert (picture_of(Path("new/look")) != found).any()


def test_only_starts_from_the_first_step_draw_the_picture(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure before the first save, from an earlier checkpoint, and where there is no picture."""
    folder, drawn = tmp_path / "run", []
    draw = validation.draw_batch
    monkeypatch.setattr(validation, "draw_batch", lambda *args: drawn.append(1) or draw(*args))
    failpoints.arm("train.step=2:raise:RuntimeError")
    with pytest.raises(RunError):
        train(config, folder)
    failpoints.arm("")
    assert picture_of(folder / "samples").any()
    path = folder / "samples" / "first_batch.png"
    path.write_bytes(b"the first")
    assert resume(config, folder) == 0
    longer = merged(config.model_dump(mode="json"), train={"epochs": 3})
    earlier = folder / "checkpoints" / "epoch_0001.pt"
    assert resume(longer, folder, checkpoint=earlier) == 0
    assert [event.get("resumed_from_step") for event in events(folder, "run_start")] == [None, None, 2]
    assert (picture_of(folder / "samples").any(), len(drawn)) == (True, 2), "the second start may have another config"
    path.unlink()
    assert resume(longer, folder, checkpoint=earlier) == 0
    assert not path.exists()


def test_batch_that_cannot_be_drawn_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inference: Any = type("Inference", (), {"preprocessing": torch.nn.Identity()})
    dataset: Any = type("Images", (list,), {"scheme": None})([0, 1, 2])
    samples = validation.SamplePictures(tmp_path, dataset, inference, torch.device("cpu"))
    empty = Batch(torch.zeros(0, 3, 5, 7), torch.zeros(0, 5, 7), ())
    assert samples.draw_first(empty) == ["there is no picture of the first batch: the main rank has no samples"]
    batch = Batch(torch.zeros(1, 3, 5, 7), torch.zeros(1, 5, 7), (0,))
    monkeypatch.setattr(validation, "draw_batch", lambda *_: (_ for _ in ()).throw(MemoryError))
    assert samples.draw_first(batch) == ["there is no picture of the first batch: MemoryError"]
    assert list(tmp_path.iterdir()) == []


def test_check_writes_no_picture_into_data_or_over_others(
    config: RunConfig, tmp_path: Path, tiny_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = shutil.copytree(tiny_root, tmp_path / "data")
    config = merged(config.model_dump(mode="json"), data={"root": str(root)})
    (tmp_path / "link").symlink_to(root / "images")
    before = sorted(root.rglob("*"))
    for folder in (root, root / "new", tmp_path / "link" / "val"):
        assert checked("--pictures", str(folder), config=config) == 2
        assert f"--pictures {folder} lies in the data folder {root}" in capsys.readouterr().err
    assert sorted(root.rglob("*")) == before
    pair = ImagePair(root / "images" / "a.png", tmp_path / "elsewhere" / "a.png", "a")
    with pytest.raises(ConfigError, match=r"lies in the data folder .*elsewhere"):
        check_data_place(tmp_path / "elsewhere" / "new", config.data, {"train": [pair]})
    own, run = tmp_path / "own", tmp_path / "run"
    own.mkdir()
    (own / "notes.txt").write_text("mine")
    assert checked("--pictures", str(own), config=config) == 0
    assert checked("--pictures", str(own), config=config) == 0, "it replaces its own picture"
    assert train(config, run) == 0
    of_run = (run / "samples" / "first_batch.png").read_bytes()
    assert checked("--pictures", str(run / "samples"), config=config) == 2
    assert "first_batch.png was not written by segapp: remove" in capsys.readouterr().err
    assert (run / "samples" / "first_batch.png").read_bytes() == of_run
    assert sorted(path.name for path in own.iterdir()) == ["first_batch.png", "notes.txt"]
    (root / "images" / "train" / "03.png").write_bytes(b"")
    assert checked("--pictures", "gone", config=config) == 3
    assert "batch: the first batch cannot be drawn: " in capsys.readouterr().out
    assert not Path("gone").exists()
