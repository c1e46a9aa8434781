"""`segapp init`: classes, options, refusals; training accepts the configs that it writes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from segapp.__main__ import main
from segapp.config import RunConfig, load_config
from segapp.errors import ConfigError, DataError
from segapp.onboarding.init import InitRequest, as_dict, propose_config
from tests.support.drawn_folders import BINARY, draw, draw_image, draw_mask, listing, names_read, proposed, save
from tests.support.fake_smi import FOUR, smi_of
from tests.support.runs import segapp

NAMES = "abcdefg"


def draw_split(root: Path, val: str = "hij") -> None:
    """Draws seven images to train with and three to validate on, the first smaller than all others."""
    draw(root, NAMES, "images/train/{}.jpg", "masks/train/{}.png")
    draw(root, val, "images/val/{}.jpg", "masks/val/{}.png")
    draw_image(root / "images/train/a.jpg", (40, 50))
    draw_mask(root / "masks/train/a.png", size=(40, 50))


def test_values_of_the_config_come_from_the_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    draw_split(tmp_path / "d")
    config, _, _ = proposed(tmp_path / "d", tmp_path / "made.yaml")
    assert (config.data.crop_px, config.data.workers, config.data.cache) == ((32, 64), "auto", "auto")
    assert (config.train.batch_size, config.train.epochs, config.eval.every_epochs) == (4, 2000, 100)
    assert (config.schedule.warmup_steps, config.eval.slide) == ("5%", False)


def test_images_linked_from_another_disk_are_allowed_and_warned(tmp_path: Path) -> None:
    draw_split(tmp_path / "d")
    assert not proposed(tmp_path / "d", tmp_path / "made.yaml")[0].data.allow_outside_root
    (tmp_path / "d" / "images").rename(tmp_path / "disk")
    (tmp_path / "d" / "images").symlink_to(tmp_path / "disk")
    assert proposed(tmp_path / "d", tmp_path / "made.yaml", force=True)[0].data.allow_outside_root
    assert "if you do not trust them" in (tmp_path / "made.yaml").read_text()


def test_demo_data_are_recognised_as_cityscapes(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3] / "data" / "demo"
    result = propose_config(InitRequest(root, tmp_path / "x.yaml"))
    assert load_config(result.configs[0]).data.format == "cityscapes"
    assert "72 training images (train), 20 validation images (val)" in " ".join(result.lines)


@pytest.mark.slow
def test_real_camvid_is_recognised(camvid: Path, tmp_path: Path) -> None:
    config = load_config(propose_config(InitRequest(camvid, tmp_path / "x.yaml")).configs[0])
    assert config.data.format == "camvid"
    assert (config.data.crop_px, config.model.name) == ((256, 256), "lraspp_mobilenet_v3_large")
    assert (config.loss.class_weights, config.loss.plus, config.data.augment) == ("enet", [], None)
    text = (tmp_path / "x.yaml").read_text()
    assert re.search(r"\n# class +pixels +4 px +8 px +16 px +32 px\n", text)
    # By avg_pool2d and interpolate of torch in float64, over the same 200 masks: IoU 0.564 at stride 4
    assert re.search(r"\n# pole +1\.00% +0\.721 +0\.423 ", text)
    assert "class_weights: enet  # the rarest of 11 classes has 0.30% of the pixels" in text


@pytest.mark.parametrize(
    ("visible", "batch_size", "device"),
    [
        ("GPU-2,GPU-9", 7, "the 2 GPUs of this machine\n"),
        ("GPU-2,7", 7, "the 1 GPU of this machine (CUDA_VISIBLE_DEVICES='GPU-2,7' ends for CUDA at '7'"),
        ("NoDev", 4, "the CPU of this machine, which has no GPU (CUDA_VISIBLE_DEVICES='NoDev' hides every GPU"),
    ],
)
def test_first_comment_names_the_device_that_is_assumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, batch_size: int, device: str
) -> None:
    smi_of(tmp_path, FOUR, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    draw_split(tmp_path / "d")  # seven to train with
    assert proposed(tmp_path / "d", tmp_path / "made.yaml")[0].train.batch_size == batch_size
    assert (tmp_path / "made.yaml").read_text().startswith(f"# For {device}")


def test_gpus_of_another_machine_are_assumed_and_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    draw_split(tmp_path / "d")
    out = tmp_path / "made.yaml"
    with pytest.raises(SystemExit):
        main(["init", str(tmp_path / "d"), "--out", str(out), "--gpus", "2x24GiB,11GiB", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["device"] == "3 GPUs (24.0 GiB, 24.0 GiB, 11.0 GiB), as --gpus says"
    assert said["images"]["sizes"] == [{"size_px": [48, 64], "images": 9}, {"size_px": [40, 50], "images": 1}]
    assert (said["images"]["train"], said["images"]["val"]) == (7, 3)
    assert said["classes"] == ["class_0", "class_1", "class_2"]
    assert sum(said["fingerprint"]["shares"]) == pytest.approx(1)
    assert [*said["fingerprint"]["kept"]] == ["4", "8", "16", "32"]
    config = load_config(out)
    assert (config.train.batch_size, config.model.encoder, config.optim.lr) == (7, "resnet50", 4.7e-4)


@pytest.mark.slow
def test_config_for_a_gpu_fits_it_by_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    draw_split(tmp_path / "d")
    for words in (["init", str(tmp_path / "d"), "--gpus", "11GiB"], ["plan", "--config", "d.yaml", "--gpus", "11GiB"]):
        with pytest.raises(SystemExit, match=r"^0$"):
            main(words)


def striped(folder: Path, width_px: int) -> Path:
    """Draws eight images with vertical stripes of a class on the other one."""
    for number in range(8):
        mask = np.zeros((96, 320), np.uint8)
        for left in range(3 + number, 320, round(width_px / 0.4)):
            mask[:, left : left + width_px] = 1
        for part, pixels in (("images", 90 + 100 * (mask > 0)), ("masks", mask)):
            save(folder / part / f"{number}.png", pixels.astype(np.uint8))
    return folder


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("width_px", "is_cached", "model"),
    [
        (100, False, ("torchvision", "lraspp_mobilenet_v3_large", None, 2e-3)),
        (100, True, ("smp", "DeepLabV3Plus", "tu-tf_efficientnet_lite0", 1e-3)),
        (3, True, ("smp", "Unet", "tu-tf_efficientnet_lite0", 1e-3)),
        (3, False, ("smp", "Unet", "resnet18", 2e-3)),
    ],
)
def test_model_has_the_coarsest_stride_that_keeps_every_class(
    width_px: int, is_cached: bool, model: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder depends on the weights that can be had; the config says the Dice that decided."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    problem = None if is_cached else "no route to host"
    monkeypatch.setattr("segapp.onboarding.init.weights_problem", lambda encoder: problem)
    config, result, _ = proposed(striped(tmp_path / "d", width_px), tmp_path / "made.yaml", is_tried=True)
    section = config.model
    assert (section.library, section.name, section.encoder, config.optim.lr) == model
    assert section.weights_backbone == ("imagenet" if is_cached else None)
    assert ("no route to host" in (tmp_path / "made.yaml").read_text()) == (not is_cached)
    assert result.facts.fingerprint is not None
    kept = result.facts.fingerprint.kept[4 if is_cached else 8]
    said = min(filter(None, kept)) if is_cached else sum(filter(None, kept)) / 2
    assert f" {said:.3f}" in (tmp_path / "made.yaml").read_text()


def test_folder_without_data_set_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        propose_config(InitRequest(tmp_path / "nothing"))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(b"x")
    with pytest.raises(DataError, match=r"holds a\.jpg"):
        propose_config(InitRequest(tmp_path / "photos"))
    for name in NAMES:
        draw_image(tmp_path / "d/images" / f"{name}.png")
        draw_image(tmp_path / "d/masks" / f"{name}.png")
    with pytest.raises(DataError, match="neither ids nor"):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "out.yaml"))


def test_answer_of_the_command_is_used_and_a_config_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two likely layouts are a question, exit code 3; the config that an answer made is not replaced."""
    draw(tmp_path / "my data", NAMES, "images/{}.jpg", "masks/{}_mask.png")
    draw(tmp_path / "my data", NAMES, "images/{}.jpg", "labels/{}.png", BINARY)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["init", "my data"])
    assert ended.value.code == 3
    assert re.search(r"2 ways: answer with --layout (masks|labels) .*--layout (masks|labels) ", capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["my data"]
    with pytest.raises(SystemExit) as ended:
        main(["init", "my data", "--layout", "labels"])
    assert ended.value.code == 0
    assert "segapp train --config my-data.yaml" in capsys.readouterr().out
    written = (tmp_path / "my-data.yaml").read_text()
    assert load_config(tmp_path / "my-data.yaml").data.label_map == {255: 1}
    with pytest.raises(SystemExit) as ended:
        main(["init", "my data", "--layout", "masks"])
    assert (ended.value.code, len(capsys.readouterr().err.strip().splitlines())) == (2, 1)
    assert (tmp_path / "my-data.yaml").read_text() == written
    with pytest.raises(ConfigError, match=r"--layout depth: no such layout of .*: use one of masks, labels"):
        propose_config(InitRequest(tmp_path / "my data", tmp_path / "b.yaml", layout="depth"))


def test_slices_of_a_patient_stay_on_one_side(tmp_path: Path) -> None:
    """The word patient is the group, not the beginning of the name; folds use it too, and --group another."""
    names = [f"slice{s}_patient{p:02}_4" for s in range(3) for p in range(6)]
    draw(tmp_path / "d", names, "images/{}.png", "masks/{}.png")

    def sides(config: RunConfig, position: int) -> tuple[set[str], set[str]]:
        train, val = ({name.split("_")[position] for name in own} for own in names_read(config).values())
        assert not train & val
        return train, val

    config, result, found = proposed(tmp_path / "d", tmp_path / "made.yaml")
    train, val = sides(config, 1)
    assert sorted(train | val) == [f"patient{p:02}" for p in range(6)]
    said = "\n".join(result.lines)
    assert "15 training and 3 validation images, 6 groups (patient in the name) divided by --val-share 0.2" in said
    assert "patient00: 3 images such as images/slice0_patient00_4.png; patient01: 3 images such as" in said
    assert proposed(tmp_path / "d", tmp_path / "again.yaml")[2] == found
    assert any(proposed(tmp_path / "d", tmp_path / f"{s}.yaml", seed=s)[2] != found for s in (1, 2))
    config, _, found = proposed(tmp_path / "d", tmp_path / "b.yaml", val_share=0.34, group=r"(slice\d)_")
    assert (len(sides(config, 0)[1]), len(found["val"])) == (1, 6)
    result = propose_config(InitRequest(tmp_path / "d", tmp_path / "folds.yaml", folds=3))
    assert [len(sides(load_config(path), 1)[1]) for path in result.configs] == [2, 2, 2]
    assert any("6 groups (patient in the name) were divided" in line for line in result.lines)


def test_patients_in_both_published_splits_are_a_warning(tmp_path: Path) -> None:
    for split, patients in (("train", range(4)), ("val", range(3, 6))):
        names = [f"patient{p:02}_{split[0]}{k}" for p in patients for k in range(2)]
        draw(tmp_path / "d", names, f"images/{split}/{{}}.png", f"masks/{split}/{{}}.png")
    _, result, _ = proposed(tmp_path / "d", tmp_path / "made.yaml")
    (warning,) = [line for line in result.lines if line.startswith("warning: ")]
    assert "1 of the 3 groups of val (patient in the name) are in train too" in warning
    assert "patient03_v0.png: scores on val are too good; divide anew with segapp init --folds 5 --group" in warning


def test_folds_are_configs_that_together_validate_on_all(tmp_path: Path) -> None:
    names = [f"{scene}/{number:04}" for scene in "abcdefg" for number in range(3)]
    draw(tmp_path / "d", names, "images/{}.jpg", "masks/{}.png")
    result = propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml", folds=5))
    assert [Path(path).name for path in as_dict(result)["configs"]] == [f"made-fold{i}.yaml" for i in range(5)]
    validated: list[str] = []
    for path in result.configs:
        config = load_config(path)
        names_read(config)
        lists = [(tmp_path / "made-lists" / f"{split}.txt").read_text().splitlines() for split in
                 (config.data.train_split, config.data.val_split)]  # fmt: skip
        assert len(lists[0]) + len(lists[1]) == 21
        scenes = [{line.split("/")[1] for line in own} for own in lists]
        assert not scenes[0] & scenes[1]
        validated += lists[1]
    assert len(set(validated)) == len(validated) == 21
    with pytest.raises(ConfigError, match="only 7 groups"):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "b.yaml", folds=9))


@pytest.mark.parametrize("order", [(None, 3), (3, None)], ids=["folds later", "folds first"])
def test_lists_of_folds_are_next_to_those_of_one_config(order: tuple[int | None, ...], tmp_path: Path) -> None:
    draw(tmp_path / "d", "abcdef", "images/{}.jpg", "masks/{}.png")
    results = [propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml", folds=folds)) for folds in order]
    configs = [path for result in results for path in result.configs]
    assert len(configs) == 4
    for path in configs:
        names = names_read(load_config(path))
        assert sorted(names["train"] + names["val"]) == [f"{name}.jpg" for name in "abcdef"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into read-only folders")
def test_folder_without_write_permission_is_read(tmp_path: Path) -> None:
    draw(tmp_path / "d", "abcdef", "images/{}.jpg", "masks/{}.png")
    for folder in (tmp_path / "d", tmp_path / "d" / "images", tmp_path / "d" / "masks"):
        folder.chmod(0o555)
    proposed(tmp_path / "d", tmp_path / "made.yaml")


def test_nothing_is_written_into_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw(tmp_path / "d", "abcdef", "images/{}.jpg", "masks/{}.png")
    before = listing(tmp_path / "d")
    monkeypatch.chdir(tmp_path / "d")
    with pytest.raises(ConfigError, match=r"lies in the data folder .* --out \.\./d\.yaml"):
        propose_config(InitRequest(Path()))
    assert listing(tmp_path / "d") == before
    propose_config(InitRequest(Path(), Path("../d.yaml")))
    assert listing(tmp_path / "d") == before


@pytest.mark.parametrize("fault", ["file.before_rename=3:kill", "file.before_fsync=3:raise:ENOSPC"])
def test_failure_leaves_no_config_and_a_retry_works(fault: str, tmp_path: Path) -> None:
    draw(tmp_path / "d", "abcdef", "images/{}.jpg", "masks/{}.png")
    failed = segapp("init", "d", cwd=tmp_path, SEGAPP_FAILPOINTS=fault)
    assert failed.returncode != 0
    assert not (tmp_path / "d.yaml").exists()
    if "ENOSPC" in fault:
        assert [path.name for path in tmp_path.iterdir()] == ["d"]
    assert segapp("init", "d", cwd=tmp_path).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "d-lists", "d.yaml"]
