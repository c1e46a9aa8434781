"""Steps of an export against values worked by hand: crops and sizes of the check, input values, poolings, rounding."""

from __future__ import annotations

import json
import math
import operator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.preprocessing import Preprocessing
from segapp.errors import RunError
from segapp.export import write
from segapp.export.write import ExportInfo, ExportNetwork, check_export, write_weights
from tests.export.test_export import SmallNet, info_of


@pytest.mark.parametrize(
    ("shape", "wanted", "scale", "corner"),
    [
        ((101, 90), (41, 30), 1.0, (30, 30)),
        ((40, 100), (60, 50), 1.5, (0, 50)),  # enlarged to 60 x 150
        ((100, 40), (50, 60), 1.5, (50, 0)),
        ((20, 30), (20, 30), 1.0, (0, 0)),
    ],
)
def test_picture_of_the_check_is_a_middle_without_distortion(shape, wanted, scale, corner):
    picture = np.stack(np.mgrid[: shape[0], : shape[1]], -1).astype(np.float32)  # each pixel holds its row and column
    found = write._center_crop(picture, *wanted)
    sides = [
        np.clip((np.arange(wanted[i]) + corner[i] + 0.5) / scale - 0.5, 0, shape[i] - 1) for i in range(2)
    ]  # pixel centers
    np.testing.assert_allclose(found, np.stack(np.meshgrid(*sides, indexing="ij"), -1), atol=0.02)


@pytest.mark.parametrize("divisor", [1, 4, 32])
def test_sizes_of_the_check_are_odd_and_of_both_orientations(divisor):
    model = SmallNet()
    model.size_divisor = divisor
    first, *others = write.check_sizes(model, info_of(model))
    assert (first[1] % divisor, first[2] % divisor) == (0, 0)
    assert all(height % 2 and width % 2 for _, height, width in others)
    assert {size[0] for size in (first, *others)} == {1, 2}
    assert {height > width for _, height, width in others} == {True, False}


@pytest.mark.parametrize(("output", "multilabel"), [("logits", False), ("labels", False), ("logits", True)])
def test_check_counts_the_pixels_that_differ(output, multilabel):
    model = SmallNet()
    info = info_of(model, output=output, multilabel=multilabel)
    network = write.build_network(model, info)

    def altered(images: np.ndarray) -> np.ndarray:
        outputs = network(torch.from_numpy(images)).numpy()
        if output == "labels":
            outputs[0, 0, :4] = (outputs[0, 0, :4] + 1) % 3
        else:
            outputs[0, :, 0, :4] = [[1e3], [-1e3], [-1e3]] if images.shape[1] == 8 else outputs[0, :, 0, :4]
        return outputs

    pictures = [np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)]
    sizes = [(2, 8, 12), (1, 10, 7), (1, 5, 3)]
    same = check_export(lambda images: network(torch.from_numpy(images)).numpy(), info, model, sizes, pictures)
    assert (same.agreement, same.max_difference) == (1.0, None if output == "labels" else 0.0)
    assert same.sizes == tuple(sizes)
    found = check_export(altered, info, model, sizes, pictures)
    reference = write.build_network(model, info_of(model))
    logits = [
        reference(torch.from_numpy(np.stack([write._center_crop(pictures[0], *size[1:])] * size[0]))) for size in sizes
    ]
    assert found.max_logit == pytest.approx(max(float(each.abs().max()) for each in logits))
    corner = logits[0][0, :, 0, :4]
    if multilabel:
        num_wrong, num = int((corner > 0).ne(torch.tensor([[True], [False], [False]])).sum()), 3 * (192 + 70 + 15)
    else:
        num_wrong, num = 4 + 4 + 3 if output == "labels" else int((corner.argmax(0) != 0).sum()), 192 + 70 + 15
    assert num_wrong > 0
    assert found.agreement == pytest.approx(1 - num_wrong / num, abs=1e-12)
    nothing = check_export(lambda images: network(torch.from_numpy(images)).numpy() * np.nan, info, model, sizes)
    assert nothing.agreement == 0


@pytest.mark.parametrize("is_used_twice", [False, True])
def test_quotients_are_exact_where_division_truncates(is_used_twice):
    """As ONNX's Div does, in place of Python's `//`."""
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    a.meta["val"], b.meta["val"] = 7, 2
    quotient = graph.call_function(operator.truediv, (a, b))
    rounded = graph.call_function(math.ceil, (quotient,))
    floored = graph.call_function(operator.floordiv, (a, b))
    result = graph.output((rounded, floored, quotient if is_used_twice else a))
    write._divide_in_integers(graph)
    assert [node.meta["val"] for node in result.args[0][:2]] == [4, 3]
    targets = {node.target for node in graph.nodes}
    assert math.ceil not in targets
    assert (operator.truediv in targets) == is_used_twice
    for node in graph.nodes:
        if node.target is operator.floordiv:
            node.target = lambda over, under: math.trunc(over / under)
    module = torch.fx.GraphModule(nn.Module(), graph)
    for over, under in ((7, 2), (8, 2), (1, 32), (32, 32), (33, 32), (641, 3), (-7, 2), (-8, 2), (-1, 32), (0, 3)):
        kept = over / under if is_used_twice else over
        assert module(over, under) == (math.ceil(over / under), over // under, kept)


def test_values_are_scaled_by_hand_and_missing_ones_are_lowest():
    """In images of 7 x 10 px, which are padded to multiples of 4."""
    model = SmallNet().double().eval()
    ranges = ((-50.0, 150.0), (0.0, 4000.0), (0.25, 0.75))
    low, high = np.array(ranges).T
    images = np.random.default_rng(0).uniform(low - 0.1 * (high - low), high + 0.1 * (high - low), (2, 7, 10, 3))
    images[0, 2, 3, 1] = images[1, 6, 0] = np.nan
    info = info_of(model)
    values = np.clip(np.where(np.isnan(images), 0, (images - low) / (high - low)), 0, 1)
    normalized = torch.from_numpy((values - info.mean) / info.std).permute(0, 3, 1, 2)
    with torch.no_grad():
        logits = model(F.pad(normalized, (0, 2, 0, 1)))[0]
        expected = F.interpolate(logits, (8, 12), mode="bilinear", align_corners=True)[..., :7, :10]
    pixels = PixelFormat((1, 2, 3), "float32", ranges, info.mean, info.std)
    found = ExportNetwork(model, Preprocessing(pixels))(torch.from_numpy(images).float())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_metadata_is_json_from_which_the_same_facts_are_read():
    info = info_of(SmallNet(), file_ids=(7, 8, 11), multilabel=True, ignore_index=9, fixed_size_px=(3, 5))
    read = {name: json.loads(text) for name, text in info.as_properties().items()}
    assert (read["file_ids"], read["fixed_size_px"], read["multilabel"]) == ([7, 8, 11], [3, 5], True)
    assert ExportInfo.model_validate({**read, "other": "{"}) == info


def test_weights_are_those_of_the_network_and_nothing_else_stays(tmp_path):
    model = SmallNet()
    path = tmp_path / "new" / "x.safetensors"
    assert write_weights(model, info_of(model), path, {"more": "text"}) == 4
    found = safetensors.torch.load_file(path)
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["more"] == "text"
    assert [each.name for each in path.parent.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize("change", [lambda back: back.popitem(), lambda back: back["head.bias"].add_(1)])
def test_weights_that_read_back_otherwise_are_refused(tmp_path, monkeypatch, change):
    load = safetensors.torch.load_file

    def load_changed(path: Path, device: str) -> dict[str, torch.Tensor]:
        back = load(path, device=device)
        change(back)
        return back

    monkeypatch.setattr(safetensors.torch, "load_file", load_changed)
    model = SmallNet()
    with pytest.raises(RunError, match="differ from the weights written"):
        write_weights(model, info_of(model), tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []
