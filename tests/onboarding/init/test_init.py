"""`segapp init`: classes, options, refusals; training accepts the configs that it writes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from segapp.config import RunConfig, load_config
from segapp.datasets.layouts.formats import DataLocation, find_pairs
from segapp.errors import ConfigError, DataError
from segapp.onboarding.init import InitRequest, propose_config
from segapp.onboarding.layout import OpenQuestionError
from tests.support import drawn_folders
from tests.support.drawn_folders import BINARY, listing
from tests.support.fake_smi import FOUR, smi_of
from tests.support.runs import segapp


def draw(
    root: Path, images: str, masks: str, names: str, values: np.ndarray, size: tuple[int, int] = (80, 112)
) -> None:
    rng = np.random.default_rng(len(names))
    for folder in (images, masks):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name in names:
        cv2.imwrite(str(root / images / f"{name}.jpg"), rng.integers(0, 255, (*size, 3), np.uint8))
        mask = values[rng.integers(0, len(values), size)]
        mask.flat[: len(values)] = 0
        mask.reshape(-1, *values.shape[1:])[: len(values)] = values
        cv2.imwrite(str(root / masks / f"{name}.png"), mask[..., ::-1] if mask.ndim == 3 else mask)


def proposed(root: Path, tmp_path: Path, **request: object) -> RunConfig:
    return drawn_folders.proposed(root, tmp_path / "made.yaml", **request)[0]


def both(root: Path, images: str, masks: str, values: np.ndarray, splits: tuple[str, str] = ("train", "val")) -> None:
    draw(root, f"{images}/{splits[0]}", f"{masks}/{splits[0]}", "abcdef", values)
    draw(root, f"{images}/{splits[1]}", f"{masks}/{splits[1]}", "gh", values)


def test_init_of_ids_from_0_with_ignored_pixels(tmp_path: Path) -> None:
    both(tmp_path / "d", "images", "masks", np.array([0, 1, 2, 255], np.uint8))
    config = proposed(tmp_path / "d", tmp_path)
    assert config.data.format == "list"
    assert config.data.classes == ["class_0", "class_1", "class_2"]
    assert config.data.crop_px == (64, 96)
    assert (
        "25.0% of the pixels" in (tmp_path / "made.yaml").read_text()
        or "is ignored" in (tmp_path / "made.yaml").read_text()
    )


def test_init_of_black_and_white_masks(tmp_path: Path) -> None:
    both(tmp_path / "d", "imgs", "labels", np.array([0, 255], np.uint8))
    config = proposed(tmp_path / "d", tmp_path)
    assert config.data.label_map == {255: 1}
    assert config.data.classes == ["background", "object"]


def test_init_of_ids_with_gaps(tmp_path: Path) -> None:
    both(tmp_path / "d", "images", "masks", np.array([3, 40, 200], np.uint8))
    config = proposed(tmp_path / "d", tmp_path)
    assert config.data.label_map == {3: 0, 40: 1, 200: 2}


def test_init_of_coloured_masks_and_split_named_valid(tmp_path: Path) -> None:
    colors = np.array([[0, 0, 0], [255, 0, 0], [0, 128, 255]], np.uint8)
    both(tmp_path / "d", "images", "masks", colors, ("train", "valid"))
    config = proposed(tmp_path / "d", tmp_path)
    assert config.data.rgb_masks
    assert set(config.data.palette or []) == {(0, 0, 0), (255, 0, 0), (0, 128, 255)}
    assert len((tmp_path / "made-lists" / "val.txt").read_text().splitlines()) == 2


def test_init_without_splits_divides_by_file_name(tmp_path: Path) -> None:
    root = tmp_path / "d"
    draw(root, "images", "masks", "abcdefghij", np.array([0, 1], np.uint8))
    config, _, names = drawn_folders.proposed(root, tmp_path / "made.yaml", val_share=0.3)
    assert (len(names["train"]), len(names["val"])) == (7, 3)
    assert sorted(names["train"] + names["val"]) == [f"{letter}.jpg" for letter in "abcdefghij"]
    assert config.data.format == "list"
    again = drawn_folders.proposed(root, tmp_path / "again.yaml", val_share=0.3)[2]
    other = drawn_folders.proposed(root, tmp_path / "other.yaml", val_share=0.3, seed=1)[2]
    assert again == names
    assert other != names


def test_images_linked_from_another_disk_are_allowed_and_warned(tmp_path: Path) -> None:
    both(tmp_path / "d", "images", "masks", np.array([0, 1], np.uint8))
    assert not proposed(tmp_path / "d", tmp_path).data.allow_outside_root
    (tmp_path / "d" / "images").rename(tmp_path / "disk")
    (tmp_path / "d" / "images").symlink_to(tmp_path / "disk")
    (tmp_path / "made.yaml").unlink()
    assert proposed(tmp_path / "d", tmp_path).data.allow_outside_root
    assert "if you do not trust them" in (tmp_path / "made.yaml").read_text()


def test_demo_data_are_recognised_as_cityscapes(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3] / "data" / "demo"
    result = propose_config(InitRequest(root, tmp_path / "x.yaml"))
    assert load_config(result.configs[0]).data.format == "cityscapes"
    assert "72 training images (train), 20 validation images (val)" in " ".join(result.lines)


def test_real_camvid_is_recognised(camvid: Path, tmp_path: Path) -> None:
    config = load_config(propose_config(InitRequest(camvid, tmp_path / "x.yaml")).configs[0])
    assert config.data.format == "camvid"
    assert config.data.crop_px == (352, 480)
    assert config.loss.class_weights == "enet"


@pytest.mark.parametrize(
    ("visible", "batch_size", "reason"),
    [
        ("GPU-2,GPU-9", 6, "8 for each of 2 GPUs; the largest that fits"),
        ("GPU-2,7", 6, "8 for each of 1 GPUs (CUDA_VISIBLE_DEVICES='GPU-2,7' ends for CUDA at '7'"),
        (
            "NoDevFiles",
            4,
            "small, because there is no GPU (CUDA_VISIBLE_DEVICES='NoDevFiles' hides every GPU: unset it",
        ),
    ],
)
def test_batch_is_for_the_gpus_that_cuda_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, batch_size: int, reason: str
) -> None:
    smi_of(tmp_path, FOUR, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    both(tmp_path / "d", "images", "masks", np.array([0, 1, 2, 255], np.uint8))  # six to train with
    assert proposed(tmp_path / "d", tmp_path).train.batch_size == batch_size
    lines = (tmp_path / "made.yaml").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("  batch_size: ")]
    assert line.startswith(f"  batch_size: {batch_size}  # {reason}")


def test_folder_without_data_set_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        propose_config(InitRequest(tmp_path / "nothing"))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(b"x")
    with pytest.raises(DataError, match=r"holds a\.jpg"):
        propose_config(InitRequest(tmp_path / "photos"))
    noise = np.random.default_rng(0).integers(0, 255, (500, 3)).astype(np.uint8)
    both(tmp_path / "d", "images", "masks", noise)
    with pytest.raises(DataError, match="neither ids nor"):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "out.yaml"))


def test_config_of_unsplit_masks_with_an_ending_trains(tmp_path: Path) -> None:
    names = [f"{i:03}" for i in range(12)]
    drawn_folders.draw(tmp_path / "my data", names, "images/{}.jpg", "masks/{}_mask.png", BINARY)
    done = segapp("init", "my data", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "segapp train --config my-data.yaml" in done.stdout
    again = segapp("init", "my data", cwd=tmp_path)
    assert (again.returncode, len(again.stderr.strip().splitlines())) == (2, 1)
    small = ["train.epochs=1", "data.crop_px=[32,32]", "train.batch_size=2", "data.workers=0", "log.tensorboard=false"]
    done = segapp("train", "--config", "my-data.yaml", "--plain", *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_stray_grey_pixels_leave_the_object_a_class(tmp_path: Path) -> None:
    both(tmp_path / "d", "images", "masks", BINARY)
    path = tmp_path / "d" / "masks" / "train" / "a.png"
    mask = np.asarray(Image.open(path)).copy()
    mask[5, 5], mask[6, 6] = 128, 7
    Image.fromarray(mask).save(path)
    config, result, _ = drawn_folders.proposed(tmp_path / "d", tmp_path / "made.yaml")
    assert config.data.label_map == {255: 1, 7: -1, 128: -1}
    assert "stray value 7, 128 is ignored: 0.003% of the pixels" in " ".join(result.lines)


def test_smoothed_black_and_white_masks_keep_the_object(tmp_path: Path) -> None:
    both(tmp_path / "d", "images", "masks", BINARY)
    for path in (tmp_path / "d" / "masks").rglob("*.png"):
        mask = np.zeros((80, 112), np.uint8)
        cv2.circle(mask, (50, 40), 25, 255, -1, cv2.LINE_AA)
        mask[(mask > 0) & (mask < 255) & (np.arange(112) > 30)] = 255
        Image.fromarray(mask).save(path)
    config, result, _ = drawn_folders.proposed(tmp_path / "d", tmp_path / "made.yaml")
    assert config.data.label_map is not None
    assert config.data.label_map[255] == 1
    assert set(config.data.label_map.values()) == {1, -1}
    assert re.search(r"\.\.\. is ignored: 0\.\d+% of the pixels", " ".join(result.lines))


def test_jpeg_masks_are_refused_with_a_command(tmp_path: Path) -> None:
    both(tmp_path / "d", "images", "masks", np.array([[0, 0, 0], [255, 0, 0], [0, 128, 255]], np.uint8))
    for path in sorted((tmp_path / "d" / "masks").rglob("*.png")):
        mask = np.zeros((80, 112, 3), np.uint8)
        mask[:, 40:], mask[60:] = (255, 0, 0), (0, 128, 255)
        Image.fromarray(mask).save(path.with_suffix(".jpg"), quality=70)
        path.unlink()
    with pytest.raises(DataError, match=r"8 of 8 masks are JPEGs.*magick mogrify"):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml"))


def test_large_images_are_evaluated_in_windows_workers_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both(tmp_path / "d", "images", "masks", np.arange(3, dtype=np.uint8))
    config = proposed(tmp_path / "d", tmp_path)
    assert (config.data.workers, config.eval.slide) == ("auto", False)
    monkeypatch.setattr("segapp.onboarding.init.LARGE_PX", 80 * 112 - 1)
    assert proposed(tmp_path / "d", tmp_path, force=True).eval.slide


def test_masks_that_cannot_be_read_are_told_with_the_reason(tmp_path: Path) -> None:
    both(tmp_path / "d", "images", "masks", np.arange(3, dtype=np.uint8))
    for path in (tmp_path / "d" / "masks").rglob("*.png"):
        path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(DataError, match=r"none of 8 masks can be read, such as .*\(.*(truncated|cut|damaged)"):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml"))


def readable_in_two_ways(root: Path) -> None:
    names = [f"{i:04}" for i in range(10)]
    drawn_folders.draw(root, names, "images/{}.jpg", "masks/{}.png")
    drawn_folders.draw(root, names, "images/{}.jpg", "labels/{}.png", BINARY)


def test_two_likely_layouts_are_named_and_one_is_taken(tmp_path: Path) -> None:
    readable_in_two_ways(tmp_path / "d")
    with pytest.raises(OpenQuestionError, match=r"2 ways.*--layout (masks|labels) .*--layout (masks|labels) "):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml"))
    assert not (tmp_path / "made.yaml").exists()
    config, _, _ = drawn_folders.proposed(tmp_path / "d", tmp_path / "made.yaml", layout="labels")
    assert config.data.label_map == {255: 1}
    with pytest.raises(ConfigError, match=r"--layout depth: no such layout of .*: use one of masks, labels"):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "b.yaml", layout="depth"))
    done = segapp("init", "d", "--out", "c.yaml", cwd=tmp_path)
    assert done.returncode == 3
    assert "answer with --layout" in done.stderr


def test_scenes_and_groups_stay_on_one_side(tmp_path: Path) -> None:
    names = [f"{video}_{number:04}" for video in ("bay", "cove", "dune", "elm", "fen") for number in range(4)]
    drawn_folders.draw(tmp_path / "d", names, "images/{}.jpg", "masks/{}.png")
    _, result, found = drawn_folders.proposed(tmp_path / "d", tmp_path / "made.yaml", val_share=0.4)
    videos = [{name.partition("_")[0] for name in found[split]} for split in ("train", "val")]
    assert len(found["val"]) == 8
    assert not videos[0] & videos[1]
    assert "5 groups (beginning of the name)" in " ".join(result.lines)
    _, _, found = drawn_folders.proposed(tmp_path / "d", tmp_path / "b.yaml", val_share=0.25, group=r"_(\d+)\.")
    numbers = [{name.partition("_")[2] for name in found[split]} for split in ("train", "val")]
    assert (len(numbers[1]), numbers[0] & numbers[1]) == (1, set())
    for expression, problem in (("(", "not a regular expression"), ("xyz", "matches nothing in images/")):
        with pytest.raises(ConfigError, match=problem):
            propose_config(InitRequest(tmp_path / "d", tmp_path / "c.yaml", group=expression))


def test_slices_of_a_patient_stay_on_one_side(tmp_path: Path) -> None:
    """The word patient is the group, not the beginning of the name; folds use it too."""
    names = [f"slice{s}_patient{p:02}_{k}" for s in range(3) for p in range(6) for k in range(2)]
    drawn_folders.draw(tmp_path / "d", names, "images/{}.png", "masks/{}.png")
    _, result, found = drawn_folders.proposed(tmp_path / "d", tmp_path / "made.yaml")
    patients = [{name.split("_")[1] for name in found[split]} for split in ("train", "val")]
    assert sorted(patients[0] | patients[1]) == [f"patient{p:02}" for p in range(6)]
    assert not patients[0] & patients[1]
    said = "\n".join(result.lines)
    assert "30 training and 6 validation images, 6 groups (patient in the name) divided by --val-share 0.2" in said
    assert "patient00: 6 images such as images/slice0_patient00_0.png; patient01: 6 images such as" in said
    result = propose_config(InitRequest(tmp_path / "d", tmp_path / "folds.yaml", folds=3))
    for path in result.configs:
        own = drawn_folders.names_read(load_config(path))
        assert not {n.split("_")[1] for n in own["train"]} & {n.split("_")[1] for n in own["val"]}
    assert any("6 groups (patient in the name) were divided" in line for line in result.lines)


def test_two_words_that_may_be_the_group_are_a_question(tmp_path: Path) -> None:
    names = [f"{place}_{i:02}_{k}" for place in ("barn", "lake", "mill") for i in range(5) for k in range(2)]
    drawn_folders.draw(tmp_path / "d", names, "images/{}.png", "masks/{}.png")
    with pytest.raises(
        OpenQuestionError, match=r"--group '.*' \(beginning of the name: 3 groups; barn: 10 ima"
    ) as raised:
        propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml"))
    for position, answer in enumerate([*raised.value.answers][:2]):
        out = tmp_path / f"{position}.yaml"
        _, _, found = drawn_folders.proposed(tmp_path / "d", out, group=answer)
        assert not {n.split("_")[position] for n in found["train"]} & {n.split("_")[position] for n in found["val"]}


def test_patients_in_both_published_splits_are_a_warning(tmp_path: Path) -> None:
    for split, patients in (("train", range(4)), ("val", range(3, 6))):
        names = [f"patient{p:02}_{split[0]}{k}" for p in patients for k in range(2)]
        drawn_folders.draw(tmp_path / "d", names, f"images/{split}/{{}}.png", f"masks/{split}/{{}}.png")
    _, result, _ = drawn_folders.proposed(tmp_path / "d", tmp_path / "made.yaml")
    (warning,) = [line for line in result.lines if line.startswith("warning: ")]
    assert "1 of the 3 groups of val (patient in the name) are in train too" in warning
    assert "patient03_v0.png: scores on val are too good; divide anew with segapp init --folds 5 --group" in warning


def test_folds_are_configs_that_together_validate_on_all(tmp_path: Path) -> None:
    names = [f"{scene}/{number:04}" for scene in "abcdefg" for number in range(3)]
    drawn_folders.draw(tmp_path / "d", names, "images/{}.jpg", "masks/{}.png")
    result = propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml", folds=5))
    assert [path.name for path in result.configs] == [f"made-fold{i}.yaml" for i in range(5)]
    validated: list[str] = []
    for path in result.configs:
        config = load_config(path)
        drawn_folders.names_read(config)
        lists = [(tmp_path / "made-lists" / f"{split}.txt").read_text().splitlines() for split in
                 (config.data.train_split, config.data.val_split)]  # fmt: skip
        assert len(lists[0]) + len(lists[1]) == 21
        scenes = [{line.split("/")[1] for line in own} for own in lists]
        assert not scenes[0] & scenes[1]
        validated += lists[1]
    assert len(set(validated)) == len(validated) == 21
    with pytest.raises(ConfigError, match="only 7 groups"):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "b.yaml", folds=9))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into read-only folders")
def test_folder_without_write_permission_is_read(tmp_path: Path) -> None:
    drawn_folders.draw(tmp_path / "d", "abcdef", "images/{}.jpg", "masks/{}.png")
    for folder in (tmp_path / "d", tmp_path / "d" / "images", tmp_path / "d" / "masks"):
        folder.chmod(0o555)
    proposed(tmp_path / "d", tmp_path)


def test_nothing_is_written_into_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn_folders.draw(tmp_path / "d", "abcdef", "images/{}.jpg", "masks/{}.png")
    before = listing(tmp_path / "d")
    monkeypatch.chdir(tmp_path / "d")
    with pytest.raises(ConfigError, match=r"lies in the data folder .* --out \.\./d\.yaml"):
        propose_config(InitRequest(Path()))
    assert listing(tmp_path / "d") == before
    propose_config(InitRequest(Path(), Path("../d.yaml")))
    assert listing(tmp_path / "d") == before


@pytest.mark.parametrize(
    "fault", ["file.before_write=2:kill", "file.before_rename=3:kill", "file.before_fsync=3:raise:ENOSPC"]
)
def test_failure_leaves_no_config_and_a_retry_works(fault: str, tmp_path: Path) -> None:
    drawn_folders.draw(tmp_path / "d", "abcdef", "images/{}.jpg", "masks/{}.png")
    failed = segapp("init", "d", cwd=tmp_path, SEGAPP_FAILPOINTS=fault)
    assert failed.returncode != 0
    assert not (tmp_path / "d.yaml").exists()
    if "ENOSPC" in fault:
        assert [path.name for path in tmp_path.iterdir()] == ["d"]
    assert segapp("init", "d", cwd=tmp_path).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "d-lists", "d.yaml"]


def test_a_single_pair_cannot_be_divided(tmp_path: Path) -> None:
    drawn_folders.draw(tmp_path / "d", "a", "images/{}.jpg", "masks/{}.png")
    with pytest.raises(DataError, match="is the only image with a mask: cut both into tiles"):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml"))
    assert not (tmp_path / "made.yaml").exists()


def test_pairing_error_names_the_ending_of_the_masks(tmp_path: Path) -> None:
    drawn_folders.draw(tmp_path / "d", "ab", "images/train/{}.jpg", "masks/train/{}_mask.png")
    with pytest.raises(DataError, match=r"set data\.mask_suffix: _mask\.png"):
        find_pairs(DataLocation("folder", tmp_path / "d"), "train")
