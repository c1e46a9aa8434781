"""`data.augment`: lists of transforms, their problems, and equal samples in any process."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import yaml

from segapp.config import RunConfig, dump_config, explain_config, load_config, validate_config
from segapp.datasets.augment import TrainTransform
from segapp.datasets.augment.pipeline import check_transform
from segapp.datasets.files import ImagePair
from segapp.errors import ConfigError
from tests.support.drawn_data import draw_image, draw_mask

WritePairs = Callable[..., tuple[ImagePair, ...]]
CROP = (24, 32)


def config(augment: Any, **data: Any) -> RunConfig:
    keys = {"format": "camvid", "root": "data", "crop_px": CROP, "augment": augment, **data}
    return validate_config({"name": "a", "data": keys})


def problems(augment: Any, **options: Any) -> str:
    try:
        transform = TrainTransform(CROP, config(augment).data.transforms, **options)
        check_transform(transform, [(60, 80), (40, 90)], (3, np.uint8), np.uint8)
    except ConfigError as error:
        return str(error)
    return ""


# --- the built-in recipe is such a list


@pytest.mark.parametrize("keys", [{}, {"scale": [0.7, 1.1], "hflip": 0.2, "photometric": 0.3}, {"photometric": False}])
def test_printed_recipe_gives_the_same_samples(keys: dict[str, Any], tmp_path: Path) -> None:
    before = config(None, **keys)
    printed = explain_config(before)
    assert printed.startswith(dump_config(before))
    (tmp_path / "printed.yaml").write_text(printed)
    assert load_config(tmp_path / "printed.yaml") == before
    comment = [line.removeprefix("# ") for line in printed.splitlines() if line.startswith("#   ")]
    pasted = config(yaml.safe_load("\n".join(comment))["augment"])
    image, mask = draw_image(0, 60, 80), draw_mask(0, 60, 80)
    for seed in range(10):
        results = [TrainTransform(CROP, each.data.transforms)(image, mask, seed) for each in (before, pasted)]
        for one, other in zip(*results, strict=True):
            np.testing.assert_array_equal(one, other)
    assert explain_config(pasted) == dump_config(pasted)


def test_keys_of_the_recipe_are_refused_beside_a_list() -> None:
    with pytest.raises(ConfigError, match=r"data.hflip: is for the built-in transforms"):
        config(["ScaledCrop"], hflip=0.0)
    with pytest.raises(ConfigError, match=r"data.augment: is empty"):
        config([])


# --- forms of the list


def test_every_form_of_an_entry_means_the_same() -> None:
    listed = config(["VerticalFlip", {"OneOf": ["Blur", {"GaussNoise": {"p": 1}}]}, {"Rotate": None}])
    assert listed.data.augment == [
        {"VerticalFlip": {}},
        {"OneOf": {"transforms": [{"Blur": {}}, {"GaussNoise": {"p": 1}}]}},
        {"Rotate": {}},
    ]
    assert validate_config(yaml.safe_load(dump_config(listed))) == listed


@pytest.mark.parametrize(
    "value", [3, "list.json", {"Blur": {}}, [3], [{"Blur": {}, "Rotate": {}}], [{"Blur": 3}], [["Blur"]]]
)
def test_other_forms_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"config: data.augment = .*expected"):
        config(value)


def test_own_transforms_stand_in_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted_code: None) -> None:
    (tmp_path / "my_transforms.py").write_text(
        "import albumentations as A\n"
        "def flips(p=0.5): return [A.HorizontalFlip(p=p), A.VerticalFlip(p=p)]\n"
        "def number(): return 3\n"
        "def tensors(): return A.ToTensorV2()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    image, mask = draw_image(0, 60, 80), draw_mask(0, 60, 80)
    assert config("my_transforms:flips").data.transforms == [{"my_transforms:flips": {}}]
    named = [{"HorizontalFlip": {"p": 0.3}}, {"VerticalFlip": {"p": 0.3}}]
    for seed in range(6):
        both = ({"my_transforms:flips": {"p": 0.3}}, {"Sequential": {"transforms": named, "p": 1}})
        found = [TrainTransform(CROP, [{"NoOp": {}}, each])(image, mask, seed) for each in both]
        for one, other in zip(*found, strict=True):
            np.testing.assert_array_equal(one, other)
    assert "ToTensorV2 makes tensors: leave it out" in problems(["ScaledCrop", "my_transforms:tensors"])
    assert problems([{"my_transforms:flips": {"q": 1}}, "my_transforms:number"]).splitlines() == [
        "2 problems in data.augment:",
        "  data.augment[0].q is not an argument of my_transforms:flips: it takes p",
        "  data.augment[1] = my_transforms:number makes a int: return a transform of albumentations, a list of them, "
        "or a function of (image, mask, seed)",
    ]


# --- problems, before the training


def test_all_problems_are_named_at_once() -> None:
    found = problems(
        [
            "ScaledCrop",
            {"GausNoise": {}},
            {"Rotate": {"limits": 30}},
            {"OneOf": ["Blur", {"GaussNoise": {"std_range": [0.5, 0.1], "p": 2, "mean_range": [0, None]}}]},
            {"RandomCrop": {"height": 24}},
            {"Affine": {"mask_interpolation": 1}},
            "Normalize",
            {"OneOf": []},
            {"SomeOf": {"transforms": ["Blur"], "p": "often"}},
        ]
    )
    assert found.splitlines() == [
        "10 problems in data.augment:",
        "  data.augment[1]: GausNoise is not a transform of albumentations 2.0.8: did you mean GaussNoise or ISONoise?",
        "  data.augment[2]: Rotate.limits is not an argument: did you mean limit?",
        "  data.augment[3]: OneOf[1]: GaussNoise.p = 2: input should be less than or equal to 1",
        "  data.augment[3]: OneOf[1]: GaussNoise.std_range = [0.5, 0.1]: first value should be less than the second "
        "value, got (0.5, 0.1) instead",
        "  data.augment[3]: OneOf[1]: GaussNoise.mean_range = None: input should be a valid number",
        "  data.augment[4]: RandomCrop.width is missing: add it",
        "  data.augment[5]: Affine.mask_interpolation would mix class ids: leave it out",
        "  data.augment[6]: Normalize cannot be used: images are normalized on the device with data.mean and data.std: "
        "leave it out",
        "  data.augment[7]: OneOf.transforms: a list of at least one transform is expected",
        "  data.augment[8]: SomeOf.p = 'often': a probability is expected, 0 to 1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        (["ScaledCrop", {"Transpose": {"p": 0.01}}], r"data.augment\[1\]: Transpose can give images of 32 x 24 px"),
        (
            ["ScaledCrop", {"OneOf": ["Blur", "RandomRotate90"]}],
            r"data.augment\[1\]: OneOf \(Blur, RandomRotate90\) can give images of 32 x 24",
        ),
        (["Blur"], "no transform makes crops of data.crop_px"),
        (
            [{"RandomCrop": {"height": 50, "width": 32}}],
            r"RandomCrop fails on a 40 x 90 px image with 3 bands of uint8",
        ),
        (["ScaledCrop", {"OneOf": ["NoOp", {"ToFloat": {"p": 0.01}}]}], "ToFloat cannot be used: .* data.value_range"),
        (["ScaledCrop", {"GridElasticDeform": {"num_grid_xy": [3, 3], "magnitude": 5}}], "puts 0 into masks"),
        (["ScaledCrop", "FDA"], "FDA fails on .*fda_metadata"),
    ],
)
def test_unusable_list_is_refused_and_named(augment: Any, message: str) -> None:
    found = problems(augment)
    assert re.search(message, found)
    assert not found.startswith("1 problem")


CROPPED: dict[str, Any] = {"RandomCrop": {"height": 24, "width": 32}}
RESIZED: dict[str, Any] = {"Resize": {"height": 24, "width": 32}}
LARGER: dict[str, Any] = {"RandomCrop": {"height": 36, "width": 38}}
GRAY: dict[str, Any] = {"ToGray": {"p": 1.0}}
CLIPPED: dict[str, Any] = {"CLAHE": {"clip_limit": [2, 6], "p": 1.0}}
FLIPPED: dict[str, Any] = {"HorizontalFlip": {"p": 0.5}}


def of(kind: str, *transforms: Any, **arguments: Any) -> dict[str, Any]:
    return {kind: {"transforms": [*transforms], **arguments}}


@pytest.mark.parametrize(
    ("augment", "found"),
    [
        ([RESIZED], "0 Resize resize_px"),
        (["RandomRotate90", RESIZED], "1 Resize resize_px"),
        ([{"SmallestMaxSize": {"max_size": [50, 50]}}, CROPPED], "0 SmallestMaxSize resize_px"),
        ([{"CenterCrop": {"height": 40, "width": 40}}, CROPPED], "0 CenterCrop resize_px"),
        ([of("OneOf", RESIZED, {"Resize": {**RESIZED["Resize"], "interpolation": 3}}, p=1)], "0 Resize resize_px"),
        ([of("Sequential", of("OneOf", {"ToGray": {"p": 0.3}}, p=1), CROPPED, p=1)], "0 ToGray p=0.5"),
        ([CROPPED, of("SomeOf", FLIPPED, CLIPPED, n=2)], "1 CLAHE p=0.5"),
        ([CROPPED, of("OneOrOther", CLIPPED, FLIPPED, p=1)], "1 CLAHE p=0.5"),
        ([CROPPED, of("OneOf", CLIPPED, {"Sharpen": {"p": 1.0}}, p=1)], "1 CLAHE p=0.5"),
        ([CROPPED, {"RandomGamma": {"gamma_limit": [150, 150], "p": 1.0}}], "1 RandomGamma p=0.5"),
        (
            [CROPPED, "tests.datasets.test_augment_list:darkened"],
            "1 tests.datasets.test_augment_list:darkened change only some",
        ),
        ([CROPPED, {"tests.datasets.test_augment_list:darkened": {"share": 0.95}}], ""),
        ([LARGER, RESIZED], ""),
        ([{"Resize": {"height": 60, "width": 80}}, CROPPED], ""),  # as an image of another size is
        ([{"PadIfNeeded": {"min_height": 72, "min_width": 64}}, CROPPED], ""),
        ([of("OneOf", of("Sequential", LARGER, RESIZED, p=1), {"RandomResizedCrop": {"size": CROP}}, p=1)], ""),
        ([{"SmallestMaxSize": {"max_size": [50, 58]}}, CROPPED, {"CLAHE": {"p": 0.99}}], ""),
        ([CROPPED, of("OneOf", GRAY, FLIPPED, p=1), of("SomeOf", GRAY, FLIPPED, n=1), of("Sequential", GRAY)], ""),
        ([CROPPED, of("OneOf", {"HorizontalFlip": {"p": 1.0}}, {"VerticalFlip": {"p": 1.0}}, p=1)], ""),
        (["ScaledCrop", {"ColorJitter": {"p": 1.0}}, {"GaussNoise": {"p": 1.0}}], ""),
        ([CROPPED, *[of("OneOf", GRAY, FLIPPED, CLIPPED, p=1)] * 16], ""),
        ([of("OneOf", CROPPED, LARGER, p=1), RESIZED], ""),
        ([of("OneOf", CROPPED, RESIZED, p=1), RESIZED], "1 Resize resize_px"),
    ],
)
def test_change_of_every_image_is_refused_with_its_cure(augment: Any, found: str, trusted_code: None) -> None:
    said = problems(augment)
    number, name, cure = found.split(maxsplit=2) if found else ("", "", "")
    pattern = rf"data.augment\[{number}\]: {name} changes every training image, .* predict: (use (data\.)?)?{cure}"
    assert bool(re.match(pattern, said)) if found else said == ""
    transform = TrainTransform(CROP, config(augment).data.transforms)
    samples = [transform(draw_image(0, 60, 80), draw_mask(0, 60, 80), seed)[0] for seed in range(8)]
    if "ToGray" in found:  # of the training only: the images of the evaluation have colors
        assert all(np.ptp(sample, axis=2).max() == 0 for sample in samples)


def darkened(share: float = 1.0) -> Callable[..., Any]:
    """Make a function that halves the values of a share of the images."""
    return lambda image, mask, seed: (image // 2 if np.random.default_rng(seed).random() < share else image, mask)


def test_transform_for_rgb_is_refused_for_other_images() -> None:
    transform = TrainTransform(CROP, [{"RandomCrop": {"height": 24, "width": 32}}, {"HueSaturationValue": {}}])
    check_transform(transform, [(60, 80)], (3, np.uint8), np.uint8)
    with pytest.raises(ConfigError, match=r"data.augment\[1\]: HueSaturationValue fails on .* 5 bands of uint16"):
        check_transform(transform, [(60, 80)], (5, np.uint16), np.uint8)


def test_image_that_a_random_crop_only_pads_is_accepted() -> None:
    transform = TrainTransform(CROP, [{"RandomCrop": {"height": 24, "width": 32, "pad_if_needed": True}}])
    for sizes_px in ([(20, 24)], [(20, 24), (60, 80)]):
        check_transform(transform, sizes_px, (3, np.uint8), np.uint8)


def test_first_resize_is_not_repeated_by_the_crop() -> None:
    image, mask = draw_image(0, 60, 80), draw_mask(0, 60, 80)
    plain = [{"ScaledCrop": {"scale": [1, 1], "cat_max_ratio": 1}}]
    for listed in (plain, [{"NoOp": {}}, *plain]):
        transform = TrainTransform(CROP, listed, resize_px=CROP)
        np.testing.assert_array_equal(transform(image, mask, 0)[0], cv2.resize(image, CROP[::-1]))
        check_transform(transform, [(60, 80)], (3, np.uint8), np.uint8)


# --- masks


@pytest.mark.parametrize(
    "listed",
    [
        {"Affine": {"rotate": [-20, 20], "shear": [-5, 5], "p": 1.0}},
        {"OneOf": {"transforms": [{"Rotate": {"limit": 30}}, {"GridDistortion": {}}], "p": 1.0}},
    ],
)
def test_masks_get_no_other_classes(listed: dict[str, Any]) -> None:
    mask = np.full((71, 90), 2, np.int16)
    mask[20:50, 30:60] = 4
    transform = TrainTransform(CROP, [{"ScaledCrop": {}}, listed], ignore_index=-1)
    check_transform(transform, [(71, 90)], (3, np.uint8), mask.dtype)
    found = [np.unique(transform(draw_image(0, 71, 90), mask, seed)[1]) for seed in range(12)]
    assert set(np.concatenate(found)) == {2, 4, -1}


def test_nested_transforms_draw_independently() -> None:
    """albumentations would give all of them one random stream: both or neither would flip."""
    flips = [{"Sequential": {"transforms": [{"HorizontalFlip": {}}, {"VerticalFlip": {}}], "p": 1.0}}]
    transform = TrainTransform((8, 8), [{"RandomCrop": {"height": 8, "width": 8}}, *flips])
    image = np.zeros((8, 8, 3), np.uint8)
    image[0, 0] = 1
    places = [np.argwhere(transform(image, image[..., 0], seed)[1])[0] for seed in range(200)]
    corners, counts = np.unique(np.array(places), axis=0, return_counts=True)
    assert len(corners) == 4
    assert counts.min() > 30
