"""`segapp init` on folders of many layouts; training accepts the configs that it writes."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from segapp.build.data import build_dataset, build_scheme
from segapp.commands.init import propose_config
from segapp.config import RunConfig, load_config
from segapp.datasets.layouts.survey import find_layout, flat_folders, write_split_lists
from segapp.errors import ConfigError, DataError
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


def proposed(root: Path, tmp_path: Path, val_share: float | None = None) -> RunConfig:
    out = propose_config(root, tmp_path / "made.yaml", val_share=val_share, force=False)
    config = load_config(out)
    for split in ("train", config.data.val_split or "val"):
        dataset = build_dataset(config.data, build_scheme(config.data), split, is_training=False, seed=0)
        for index in range(len(dataset)):
            dataset.read(index)  # every id of every mask is known
    return config


def both(root: Path, images: str, masks: str, values: np.ndarray, splits: tuple[str, str] = ("train", "val")) -> None:
    draw(root, f"{images}/{splits[0]}", f"{masks}/{splits[0]}", "abcdef", values)
    draw(root, f"{images}/{splits[1]}", f"{masks}/{splits[1]}", "gh", values)


def test_init_of_ids_from_0_with_ignored_pixels(tmp_path: Path) -> None:
    both(tmp_path / "d", "images", "masks", np.array([0, 1, 2, 255], np.uint8))
    config = proposed(tmp_path / "d", tmp_path)
    assert config.data.format == "folder"
    assert config.data.classes == ["class_0", "class_1", "class_2"]
    assert config.data.crop_px == (64, 96)
    assert (
        "25.0% of the pixels" in (tmp_path / "made.yaml").read_text()
        or "is ignored" in (tmp_path / "made.yaml").read_text()
    )


def test_init_of_black_and_white_masks(tmp_path: Path) -> None:
    both(tmp_path / "d", "imgs", "labels", np.array([0, 255], np.uint8))
    config = proposed(tmp_path / "d", tmp_path)
    assert (config.data.image_dir, config.data.mask_dir) == ("imgs", "labels")
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
    assert config.data.val_split == "valid"


def test_init_without_splits_divides_by_file_name(tmp_path: Path) -> None:
    root = tmp_path / "d"
    draw(root, "images", "masks", "abcdefghij", np.array([0, 1], np.uint8))
    with pytest.raises(DataError, match="--val-share"):
        propose_config(root, tmp_path / "made.yaml", val_share=None, force=False)
    config = proposed(root, tmp_path, val_share=0.3)
    train, val = ((root / f"{split}.txt").read_text().split() for split in ("train", "val"))
    assert (len(train), len(val)) == (7, 3)
    assert sorted(train + val) == list("abcdefghij")
    assert config.data.format == "folder"
    with pytest.raises(ConfigError, match="already exists"):
        write_split_lists(root, {"image_dir": "images", "mask_dir": "masks"}, 0.3)


def test_images_linked_from_another_disk_are_allowed_and_warned(tmp_path: Path) -> None:
    both(tmp_path / "d", "images", "masks", np.array([0, 1], np.uint8))
    assert not proposed(tmp_path / "d", tmp_path).data.allow_outside_root
    (tmp_path / "d" / "images").rename(tmp_path / "disk")
    (tmp_path / "d" / "images").symlink_to(tmp_path / "disk")
    (tmp_path / "made.yaml").unlink()
    assert proposed(tmp_path / "d", tmp_path).data.allow_outside_root
    assert "if you do not trust them" in (tmp_path / "made.yaml").read_text()


def test_demo_data_are_recognised_as_cityscapes(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2] / "data" / "demo"
    found = find_layout(root)
    assert (found.format, len(found.pairs), found.num_val) == ("cityscapes", 72, 20)


def test_real_camvid_is_recognised(camvid: Path, tmp_path: Path) -> None:
    config = load_config(propose_config(camvid, tmp_path / "x.yaml", val_share=None, force=False))
    assert config.data.format == "camvid"
    assert config.data.crop_px == (352, 480)
    assert config.loss.class_weights == "enet"


def test_folder_without_data_set_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        propose_config(tmp_path / "nothing", None, val_share=None, force=False)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(b"x")
    with pytest.raises(DataError, match=r"holds a\.jpg"):
        propose_config(tmp_path / "photos", None, val_share=None, force=False)
    assert flat_folders(tmp_path / "photos") is None
    noise = np.random.default_rng(0).integers(0, 255, (500, 3)).astype(np.uint8)
    both(tmp_path / "d", "images", "masks", noise)
    with pytest.raises(DataError, match="neither ids nor"):
        propose_config(tmp_path / "d", tmp_path / "out.yaml", val_share=None, force=False)


def test_config_written_by_init_trains(tmp_path: Path) -> None:
    both(tmp_path / "my data", "images", "masks", np.array([0, 1], np.uint8))
    done = segapp("init", "my data", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "segapp train --config my-data.yaml" in done.stdout
    again = segapp("init", "my data", cwd=tmp_path)
    assert (again.returncode, len(again.stderr.strip().splitlines())) == (2, 1)
    small = ["train.epochs=1", "data.crop_px=[32,32]", "train.batch_size=2", "data.workers=0", "log.tensorboard=false"]
    done = segapp("train", "--config", "my-data.yaml", "--plain", *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
