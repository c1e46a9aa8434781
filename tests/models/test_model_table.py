"""The table of the page `choose-model`: each pair of model and encoder has its sides, and does all that a run does.

The pairs run with `pytest -m slow tests/models/test_model_table.py`, on one core in about 90 minutes.
"""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import segapp
from segapp.assembly.trained import load_trained
from segapp.commands.export import export_target
from segapp.errors import ConfigError
from segapp.export.write import write_export
from segapp.memory.peaks import SimulationJob
from segapp.models import SegmentationModel, build_model
from segapp.models.by_name import OWN
from segapp.models.names import timm_options
from segapp.planning.simulate import build_simulator
from tests.export.test_export import info_of
from tests.support import ROOT
from tests.support.runs import events, merged, train

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import segmentation_models_pytorch as smp

REFUSED = "–"
CLASSES = ["ground", "box", "disc"]
SMALL_DPT = {"decoder_intermediate_channels": [16, 16, 16, 16], "decoder_fusion_channels": 16}


def recorded() -> dict[tuple[str, str, str], str]:
    """Returns the cells of the page: library, model, encoder -> sides."""
    text = (ROOT / "segapp/docs/start/choose-model.md").read_text()
    rows = [[cell.strip(" `") for cell in row.split("|")[1:-1]] for row in re.findall(r"^\|.*\|$", text, re.M)]
    found: dict[tuple[str, str, str], str] = {}
    header: list[str] = []
    for row in rows:
        if row[0] == "encoder":
            header = row
        elif row[:1] == ["---"]:
            continue
        elif header and len(row) == len(header) == 13:
            found |= {("smp", name, row[0]): cell for name, cell in zip(header[1:], row[1:], strict=True)}
        elif row[0] in ("torchvision", "segapp") and len(row) == 4:
            found[row[0], row[1], row[2]] = row[3]
    return found


TABLE = recorded()
RUNNING = [pair for pair, cell in TABLE.items() if cell != REFUSED]


def one_of_each() -> list[tuple[str, str, str]]:
    """Returns a pair for each encoder, of the model that has the fewest so far."""
    found: list[tuple[str, str, str]] = []
    for library, encoder in dict.fromkeys((library, encoder) for library, _, encoder in RUNNING):
        pairs = [pair for pair in RUNNING if (pair[0], pair[2]) == (library, encoder)]
        found.append(min(pairs, key=lambda pair: sum(pair[1] == name for _, name, _ in found)))
    return found


def built(library: str, name: str, encoder: str, **more: Any) -> SegmentationModel:
    options = SMALL_DPT if name == "DPT" else {}
    return build_model(library, name, len(CLASSES), encoder=encoder, options=options, **more)


def sides(model: SegmentationModel) -> str:
    """Returns the cell of a network: the multiple to which images are padded, or the only size, in bold."""
    if model.fixed_size_px is None:
        assert model.suitable_size(model.size_multiple + 1, 1)[0] == 2 * model.size_multiple
        return str(model.size_multiple)
    assert model.fixed_size_px[0] == model.fixed_size_px[1]
    return f"**{model.fixed_size_px[0]}**"


def test_table_has_every_model_and_many_families() -> None:
    assert {name for library, name, _ in TABLE if library == "smp"} == {
        architecture.__name__ for architecture in smp.MODEL_ARCHITECTURES_MAPPING.values()
    }
    assert len({encoder for library, _, encoder in TABLE if library == "smp" and encoder.startswith("tu-")}) >= 24
    assert {name for library, name, _ in TABLE if library != "smp"} == {"fcn", "deeplabv3", "lraspp", *OWN}
    assert {name for _, name, _ in one_of_each()} == {name for _, name, _ in TABLE}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("pair", one_of_each(), ids="/".join)
def test_encoder_takes_the_sides_of_the_page(pair: tuple[str, str, str]) -> None:
    assert sides(built(*pair)) == TABLE[pair]


@pytest.mark.slow
@pytest.mark.parametrize("pair", [pair for pair in TABLE if pair not in RUNNING], ids="/".join)
def test_pair_without_sides_is_refused(pair: tuple[str, str, str]) -> None:
    with pytest.raises(ConfigError, match=f"smp {pair[1]} (cannot be built with|with backbone) {pair[2]}"):
        built(*pair)


def library_logits(model: SegmentationModel, images: torch.Tensor) -> torch.Tensor:
    """Returns the full output of smp's own network with the same weights, which aligns corners."""
    options = dict(SMALL_DPT) if model.name == "DPT" else {}
    if model.name == "DPT" and "dynamic_img_size" in timm_options(model.encoder_name):
        options["dynamic_img_size"] = True
    original = getattr(smp, model.name)(model.encoder_name, encoder_weights=None, classes=len(CLASSES), **options)
    result = original.load_state_dict(model.state_dict(), strict=False)
    assert not result.unexpected_keys
    assert all(key.startswith("encoder.") for key in result.missing_keys)  # parts that never run
    found: torch.Tensor = original.eval()(images)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("pair", RUNNING, ids="/".join)
def test_pair_does_all_that_a_run_does(pair: tuple[str, str, str], tiny_root: Path, tmp_path: Path) -> None:
    """One step, an evaluation, a plan, weights out and in again, a prediction, and the traced program."""
    library, name, encoder = pair
    torch.manual_seed(0)
    model = built(*pair)
    assert sides(model) == TABLE[pair]
    is_odd = model.size_divisor == 1 and model.fixed_size_px is None
    crop_px = (75, 141) if is_odd else model.suitable_size(75, 141)
    about: dict[str, Any] = {"library": library, "name": name, "encoder": encoder}
    config = merged(
        {
            "name": "pair",
            "data": {"format": "folder", "root": str(tiny_root), "classes": CLASSES, "crop_px": crop_px, "workers": 0},
            "model": about | {"options": SMALL_DPT if name == "DPT" else {}},
            "loss": {"name": "mask_classification" if name == "eomt" else "ce"},
            "optim": {"name": "adamw", "lr": 0.001},
            "log": {"tensorboard": False},
        },
        train={"steps": 1, "batch_size": 2},
        parallel={"devices": ["cpu"], "mode": "single"},
    )
    assert train(config, tmp_path / "run") == 0
    (evaluation,) = events(tmp_path / "run", "val")
    assert evaluation["num_images"] == 4

    simulator = build_simulator(config)
    job = SimulationJob("single", (2,), eval_px=simulator.facts("single").eval_px)
    (peak_mib,) = simulator.run(job).peak_mib()
    num_params = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert peak_mib > 4 * num_params * 4 / 2**20  # weights, gradients, two moments

    file = tmp_path / "net.safetensors"
    export_target(str(tmp_path / "run"), file, format=None, argmax=False)
    again, trained = built(*pair, weights=str(file)).eval(), load_trained(str(tmp_path / "run"))
    assert all(value.equal(trained.model.state_dict()[key]) for key, value in again.state_dict().items())

    photo = cv2.cvtColor(cv2.imread(str(tiny_root / "images" / "val" / "01.png")), cv2.COLOR_BGR2RGB)
    height, width = photo.shape[:2]
    mean, std = (np.array(values, np.float32) for values in (trained.config.data.mean, trained.config.data.std))
    image = torch.from_numpy((photo / np.float32(255) - mean) / std).permute(2, 0, 1)[None]
    frame = again.suitable_size(height, width)
    padded = F.pad(image, (0, frame[1] - width, 0, frame[0] - height))
    with torch.no_grad():
        logits = again(padded)[0]
        full = F.interpolate(logits, frame, mode="bilinear", align_corners=False)[..., :height, :width]
        best = full.topk(2, 1)
        is_decided = (best.values[:, 0] - best.values[:, 1] > 1e-4)[0].numpy()
        labels = segapp.load(tmp_path / "run").predict(photo)
        assert (labels == best.indices[0, 0].numpy())[is_decided].all()
        if library == "smp":
            aligned = F.interpolate(logits, frame, mode="bilinear", align_corners=True)
            expected = library_logits(again, padded)
            torch.testing.assert_close(aligned, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))

    # Programs that compute with sizes are converted, because only ONNX has other divisions.
    format = "onnx" if encoder.startswith("tu-tf_") else "pt2"
    found = write_export(trained.model, info_of(trained.model), tmp_path / f"x.{format}", format)
    assert found.agreement >= 0.9999
    assert found.max_difference is not None
    assert found.max_difference < 1e-4 * max(1.0, found.max_logit)
    shutil.rmtree(tmp_path)  # the files of all pairs would take 100 GB
