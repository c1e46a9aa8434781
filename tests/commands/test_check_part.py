"""Checks of own parts: parts that keep the rules, and parts that break one each."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import albumentations as A
import pytest
import yaml

from segapp.commands.check_part import check_part
from segapp.config import RunConfig, load_config
from segapp.errors import ConfigError
from tests.support.runs import MODEL, merged, train

pytestmark = pytest.mark.usefixtures("trusted_code")

OWN = "tests.support.own_parts"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (f"{OWN}:Net", "model"),
        (f"{OWN}:LogSoftmaxNet", "model"),  # its outputs only look like probabilities
        (f"{OWN}:ReluNet", "model"),
        (f"{OWN}:ce", "loss"),
        (f"{OWN}:additive_ce", "loss"),
        (f"{OWN}:largest_pixel", "loss"),  # no mean: of a plain loss, exactness is not asked
        ("torch.nn:CrossEntropyLoss", "loss"),
        *((f"{OWN}:{name}", "loss") for name in ("focal", "worst_class")),  # shapes follow values
        ("torch.optim:RMSprop", "optim"),
        (f"{OWN}:falling", "schedule"),
        ("albumentations:HorizontalFlip", "transform"),
    ],
)
def test_good_parts_pass(name: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        if kind == "loss":
            warnings.simplefilter("error")
        assert check_part(name, kind, None) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "FAILED" not in said
    assert ("a divided step" in said) == ("additive" in name)


RGB = "return uint8 RGB of shape (H, W, 3)"
BROKEN_PARTS = {
    "model": {
        "WrongChannels": "return (1, 3, h, w)",
        "MixingNet": "FAILED images do not depend on the others in their batch",
        "NoisyNet": "FAILED evaluation draws no random numbers",
        "nothing": "has no 'nothing'",
        "SoftmaxNet": "FAILED it returns logits, not probabilities",
        "SigmoidNet": "FAILED it returns logits, not probabilities",
        "FixedNet": "correct it, or set its attribute fixed_size_px to the only height and width",
        "RaisingNet": "KeyError: 'logits' (tests/support/own_parts.py, line ",
        "NothingNet": "outputs are a NoneType: give logits",
    },
    "loss": {
        "NearlyExact": "FAILED a divided step gives the same loss and gradient (off by 1e-03)",
        "GradientOfNothing": "FAILED without a valid pixel, loss and gradient are 0",
        "summed": "FAILED it is a mean: images that are given twice do not double it",
        "per_pixel": "the loss returned a tensor of shape (4, 16, 24): return a scalar tensor",
        "without_ignore": "IndexError: Target 255 is out of bounds.",
        "negative_log": "FAILED loss and gradient are finite",
    },
    "schedule": {
        "negative": "give a number from 0 on",
        "counting": "FAILED it gives numbers from 0 on that depend only on the step",
    },
    "optim": {
        "HalfStill": "FAILED a step changes the parameters of every group",
        "HalfConstant": "FAILED it follows the schedule, group['lr']",
        "HalfForgetful": "FAILED a resumed step is the same",
    },
    "data": {
        "ChannelsFirst": f"the image is uint8 of shape (3, 48, 64): {RGB}",
        "FloatImages": f"the image is float32 of shape (48, 64, 3): {RGB}, or change",
        "OtherSizes": "the mask is uint8 of shape (24, 32): return class ids, integers of shape (48, 64)",
        "TorchStyle": "TorchStyle has no method image_and_mask: rename __getitem__",
        "StrangeId": "the mask holds ids outside",
        "FloatMasks": "the mask is float64 of shape (48, 64): return class ids, integers",
        "RandomData": "FAILED it repeats its result: no random numbers are drawn",
        "OneSplit": "FAILED the argument `split` chooses the images: val has others than train",
    },
}
BROKEN_TRANSFORMS = {
    "normalized": "Normalize",
    "resized": "can give images of 32 x 32 px, but all must end with data.crop_px",
    "smoothed": "puts 1 into masks that do not have it",
    "unseeded": "gives different results for one seed",
    "wrong_argument": "Argument(s) 'probability' are not valid",
    "no_transform": "makes a list: return a transform of albumentations, a list of them",
    "nothing_back": "(TypeError: it returns a NoneType: return (image, mask))",
    "always": "own_parts:always changes every training image, but none in evaluation and predict: change only some",
    "failing": "IndexError: index 5000 is out of bounds",
}


@pytest.mark.usefixtures("repository_root")
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in BROKEN_PARTS.items() for name in names])
def test_broken_rule_is_named(kind: str, name: str, tiny: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    config = merged(tiny, data={"format": f"{OWN}:{name}"}) if kind == "data" else None
    assert check_part(f"{OWN}:{name}", kind, config) == 2
    assert BROKEN_PARTS[kind][name] in capsys.readouterr().out


def test_data_are_read_as_the_config_says(tiny: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    for name, code in (("FolderData", 0), ("FloatImages", 2)):
        assert check_part(None, None, merged(tiny, data={"format": f"{OWN}:{name}"})) == code
    assert "the image is float32 of shape (48, 64, 3)" in capsys.readouterr().out


def test_kind_chooses_among_the_parts_of_a_config(tiny: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    config = merged({**tiny, "model": {"library": "python", "name": f"{OWN}:Net"}})
    with pytest.raises(ConfigError, match=r"^give MODULE:FACTORY with its kind, --as .*, or --config FILE"):
        check_part(None, "loss", config)
    assert check_part(f"{OWN}:Net", "loss", config) == 2  # a name may be checked as what the config does not say
    assert capsys.readouterr().out.startswith(f"{OWN}:Net as loss\n  FAILED ")
    loss = {"name": f"{OWN}:ce", "plus": [{"name": f"{OWN}:largest_pixel"}, {"name": f"{OWN}:ce"}]}
    both = merged({**config.model_dump(), "loss": loss})
    for name, names in ((None, ["ce", "largest_pixel", "ce"]), (f"{OWN}:ce", ["ce", "ce"])):
        assert check_part(name, "loss", both) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if " as " in line] == [f"{OWN}:{each} as loss" for each in names]


@pytest.mark.usefixtures("repository_root")
def test_all_parts_of_the_example_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_part(None, None, load_config("segapp/docs/examples/own_parts.yaml")) == 0
    assert capsys.readouterr().out.count(" as ") == 5


def of_size(tiny: dict[str, Any], crop_px: int, **options: Any) -> RunConfig:
    """Return a config of the network of one size."""
    network = {"library": "python", "name": f"{OWN}:FixedNet", "options": options}
    return merged({**tiny, "model": network}, data={"crop_px": [crop_px, crop_px]})


def test_model_of_one_size_is_refused_with_the_sizes(tiny: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert check_part(None, None, of_size(tiny, 32, side=64)) == 2
    assert "FixedNet cannot run on images of 65x193 px: RuntimeError: " in capsys.readouterr().out
    assert check_part(None, None, of_size(tiny, 64, side=128, is_said=True)) == 2
    said = capsys.readouterr().out
    assert f"fails with ValueError: images of 64x64 px: python {OWN}:FixedNet" in said
    assert "takes 128x128 px only: crop to it with data.crop_px" in said
    assert check_part(None, None, of_size(tiny, 128, side=128, is_said=True)) == 0


def test_check_part_takes_overrides_as_other_commands_do(tiny: dict[str, Any], command: Any) -> None:
    Path("own.yaml").write_text(yaml.safe_dump({**tiny, "model": {"library": "python", "name": f"{OWN}:Net"}}))
    for words, checked in (
        (["--config", "own.yaml", f"schedule.name={OWN}:falling"], ["Net as model", "falling as schedule"]),
        ([f"{OWN}:Net", "--config", "own.yaml"], ["Net as model"]),
    ):
        code, out, _ = command("check-part", *words)
        assert code == 0
        assert [line for line in out.splitlines() if " as " in line] == [f"{OWN}:{each}" for each in checked]
    for words, message in (
        (["model.options.width=4"], "--config FILE is missing"),
        (["own.yaml"], "write --config own.yaml"),
        (["a:b", "c:d"], "a:b, c:d: name one component"),
    ):
        code, _, said = command("check-part", *words)
        assert (code, message in said) == (2, True), said
    with pytest.raises(ConfigError, match=r"with its kind, --as model\|loss"):
        check_part(f"{OWN}:Net", None, None)


SAVED = """import albumentations as A
from pathlib import Path

def saved():
    return A.load(Path(__file__).with_name("saved.json"))

def darkened(share):
    def apply(image, mask, seed):
        return image - (seed % 3 * share * image).astype(image.dtype), mask
    return apply
"""


OWN_STEP = {"saved": {"FILE:saved": None}, "darkened": {"FILE:darkened": {"share": 0.25}}}
TWO_CROPS = [OWN_STEP["saved"], {"RandomCrop": {"height": 32, "width": 40}}]


@pytest.mark.parametrize(
    ("entries", "crop_px", "problem"),
    [
        ([{"ScaledCrop": {}}, OWN_STEP["darkened"]], (24, 40), None),
        ([{"ScaledCrop": {}}, {"FILE:darkened": {}}], (24, 40), "share"),
        ([OWN_STEP["darkened"], {"RandomCrop": {}}], (24, 40), "height"),
        ([OWN_STEP["saved"], OWN_STEP["darkened"]], (32, 40), None),
        ([OWN_STEP["saved"]], (32, 48), "32 x 40 px"),
        ([{"OneOf": {"p": 1, "transforms": TWO_CROPS}}], (32, 40), None),
        ([{"OneOf": {"transforms": TWO_CROPS}}], (32, 40), "px"),
        ([{"OneOf": {"transforms": TWO_CROPS}}, {"ScaledCrop": {}}], (32, 40), None),
        *(([{"ScaledCrop": {}}, {f"{OWN}:{name}": {}}], (24, 40), each) for name, each in BROKEN_TRANSFORMS.items()),
    ],
)
def test_transform_has_one_verdict(
    entries: list[Any],
    crop_px: tuple[int, int],
    problem: str | None,
    tiny: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(file := f"{tmp_path.name}.py").write_text(SAVED)
    A.save(A.Compose([A.RandomCrop(32, 40), A.HorizontalFlip(), A.GaussianBlur(p=0.3)]), "saved.json")
    entries = yaml.safe_load(yaml.safe_dump(entries).replace("FILE", file))
    config = merged({**tiny, "model": MODEL}, data={"augment": entries, "crop_px": [*crop_px]}, train={"steps": 1})
    assert check_part(None, None, config) == (0 if problem is None else 2)
    said = capsys.readouterr().out
    if problem is None:
        assert said.endswith(f"one result for each seed, in crops of {crop_px[0]}x{crop_px[1]} px\n")
        assert train(config, tmp_path / "run") == 0
        return
    with pytest.raises(ConfigError) as error:
        train(config, tmp_path / "run")
    assert f"FAILED {error.value}\n".replace("\n  data", "\n         data") in said
    assert problem in said


def test_transform_is_tried_in_crops_of_512_px_without_a_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "import albumentations as A\ndef cropped(crop_px):\n    return A.CenterCrop(*crop_px, pad_if_needed=True)\n"
    for side, code in ((512, 0), (500, 2)):
        Path(f"side_{side}.py").write_text(text.replace("*crop_px", f"{side}, crop_px[1]"))
        assert check_part(f"side_{side}.py:cropped", "transform", None) == code
    assert "in crops of 512x512 px" in capsys.readouterr().out
