"""What a network accepts is measured on a copy, which leaves nothing behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segapp.errors import ConfigError
from segapp.losses import CriterionCE, PlainCriterion
from segapp.models import SegmentationModel, build_model, inspection
from segapp.models.by_name import PythonModel
from segapp.models.inspection import draws_numbers, inspect_model
from segapp.parallel import mask_by_sample
from tests.support.runs import MODEL

SIZES = {  # divisor and only size; the comments say what the library claims or refuses
    ("Unet", "tu-hrnet_w18_small"): (32, None),  # any size
    ("Unet", "tu-dla34"): (32, None),  # any size
    ("FPN", "tu-mobilevitv2_050"): (64, None),  # multiples of 32
    ("DPT", "tu-test_vit"): (32, None),  # multiples of 16
    ("FPN", "tu-coat_lite_tiny"): (32, (224, 224)),
    ("FPN", "tu-coatnet_nano_rw_224"): (32, (224, 224)),
    ("Unet", "tu-botnet26t_256"): (1, (256, 256)),
    ("FPN", "tu-halonet26t"): (256, None),
    ("FPN", "tu-hiera_tiny_224"): (32, (96, 64)),  # with the option img_size
}


LIKE_OTHERS = ("tu-hrnet_w18_small", "tu-coatnet_nano_rw_224", "tu-mobilevitv2_050")  # dla34, coat_lite, halonet


@pytest.mark.parametrize(
    ("name", "encoder"),
    [pytest.param(*pair, marks=pytest.mark.slow if pair[1] in LIKE_OTHERS else ()) for pair in SIZES],
)
def test_size_that_is_said_to_run_runs_and_others_do_not(name: str, encoder: str) -> None:
    with torch.device("meta"):  # shapes only
        size = {"img_size": [96, 64], "embed_dim": 32, "stages": [1, 1, 1, 1]} if "hiera" in encoder else {}
        model = build_model("smp", name, 3, encoder=encoder, options=size).eval()
        divisor, fixed = SIZES[name, encoder]
        assert (model.size_divisor, model.fixed_size_px) == (divisor, fixed)
        wanted = model.suitable_size(97, 290)
        (logits,) = model(torch.zeros(1, 3, *wanted))
        assert logits.shape[-2:] == (wanted[0] // model.logits_stride, wanted[1] // model.logits_stride)
        refused = (wanted[0] + 32, wanted[1]) if fixed else (5 * divisor // 2, 3 * divisor)
        with pytest.raises((RuntimeError, AssertionError, ValueError)):
            model.compute_logits(torch.zeros(1, 3, *refused))
        said = rf"takes {fixed[0]}x{fixed[1]} px only: .*img_size" if fixed else f"takes multiples of {divisor}: pad"
        with pytest.raises(ValueError, match=said):
            model(torch.zeros(1, 3, *refused))


class Awkward(nn.Module):
    """Layers under two names, a weight in two layers, counts and a cache; for multiples of 12, of which it says 3."""

    size_divisor = 3

    def __init__(self, needs_value: bool, refusal: str | None = None) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, stride=3), nn.BatchNorm2d(4))
        self.same = self.first
        self.second, self.third = nn.Conv2d(4, 4, 4, stride=4), nn.Conv2d(4, 4, 1, bias=False)
        self.fourth = nn.Conv2d(4, 4, 1, bias=False)
        self.fourth.weight = self.third.weight
        self.pooled, self.turned = nn.BatchNorm2d(4), nn.Identity()
        self.head, self.unused = nn.Conv2d(4, 2, 1), nn.Conv2d(4, 2, 1)
        self.register_buffer("calls", torch.zeros(()))
        self.cache: dict[str, Any] = {}
        self.grid: Tensor | None = None
        self.needs_value, self.refusal = needs_value, refusal

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        assert self.refusal is None, self.refusal
        features = self.same(images)
        self.turned(F.avg_pool2d(features, 16).permute(0, 2, 3, 1))
        if self.needs_value and not self.calls.add_(1).item():
            raise ValueError("impossible")
        whole = self.pooled(F.adaptive_avg_pool2d(self.fourth(self.third(self.second(features))), 1))
        self.grid = features.detach().new_ones(features.shape[-2:])
        self.cache["shape"] = self.grid
        merged = features * F.interpolate(self.second(features) + whole, scale_factor=4) * self.grid
        return self.head(merged), self.head(whole)


def values_of(model: nn.Module) -> dict[str, Any]:
    """Returns all tensors that modules hold, by module and attribute, and all modes."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found[f"{name} training"] = module.training
        assert not module._forward_hooks, name
        for key, value in {**vars(module), **module._parameters, **module._buffers}.items():
            if isinstance(value, Tensor):
                assert not value.is_meta, f"{name}.{key}"
                found[f"{name}.{key}"] = (id(value), value.detach().clone())
    return found


@pytest.mark.parametrize("needs_value", [False, True])
@pytest.mark.parametrize("is_training", [False, True])
def test_inspection_measures_and_leaves_nothing_behind(needs_value: bool, is_training: bool) -> None:
    model = PythonModel(Awkward(needs_value), name="own:Awkward", num_classes=2, in_channels=3).train(is_training)
    before, state = values_of(model), torch.get_rng_state()
    inspect_model(model)
    assert (model.size_divisor, model.fixed_size_px, model.min_train_batch) == (12, None, 2)
    assert (model.logits_stride, model.coarsest_stride) == (3, 48)
    assert model.network.cache == {}
    assert model.network.grid is None
    assert not model.network.same[0].weight.is_meta
    assert isinstance(model.network.unused, nn.Identity)
    after = values_of(model)
    assert {name for name in before if name not in after} == {"network.unused.weight", "network.unused.bias"}
    assert all(same(before[name], after[name]) for name in before.keys() & after.keys())
    assert torch.get_rng_state().equal(state), "the inspection drew random numbers"


def same(one: Any, other: Any) -> bool:
    """Returns True for equal modes, and for one tensor with equal values."""
    return one[0] == other[0] and one[1].equal(other[1]) if isinstance(one, tuple) else one == other


def test_networks_that_are_alike_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an ensemble; another depth or number of classes is another network."""
    measured: list[int] = []
    measure_one = inspection._measure

    def measure(model: SegmentationModel) -> set[str]:
        measured.append(model.num_classes)
        return measure_one(model)

    monkeypatch.setattr(inspection, "_measure", measure)
    monkeypatch.setattr(inspection, "_MEASURED", {})
    built = [
        build_model("smp", "Unet", num_classes, encoder="tu-test_resnet", options={"encoder_depth": depth, **options})
        for num_classes, depth, options in (
            (3, 3, {"decoder_channels": [8, 6, 4]}),
            (3, 4, {"decoder_channels": [8, 6, 4, 4]}),
            (5, 3, {"decoder_channels": [8, 6, 4]}),
            (3, 3, {"decoder_channels": [8, 6, 4]}),
        )
    ]
    assert measured == [3, 3, 5]
    assert [model.coarsest_stride for model in built] == [8, 16, 8, 8]
    first, *_, last = built
    assert (last.size_divisor, last.called_modules) == (first.size_divisor, first.called_modules)
    assert {**last.state_dict()}.keys() == {**first.state_dict()}.keys()
    needed = [[parameter.requires_grad for parameter in model.parameters()] for model in (first, last)]
    assert needed[0] == needed[1]


class Positions(nn.Module):
    """Adds a value for each row and column of its map, of which there may be twelve along an axis."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 2, 8, stride=8)
        self.tables = nn.ParameterList(torch.zeros(12 if each == axis else 999) for each in (0, 1))

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.patches(images)
        places = (torch.arange(side, device=features.device) for side in features.shape[-2:])
        rows, columns = (table[each] for table, each in zip(self.tables, places, strict=True))
        return features + rows[:, None] + columns


@pytest.mark.parametrize("axis", [0, 1])
def test_table_for_one_size_makes_it_the_only_size(axis: int) -> None:
    """Sizes that the probe tries run on the meta device, where no index is out of bounds."""
    model = PythonModel(Positions(axis), name="own:Positions", num_classes=2, in_channels=3)
    model.usual_size_px = 96, 80
    inspect_model(model)
    assert model.fixed_size_px == (96, 80)
    shapes_only = copy.deepcopy(model).to("meta")
    shapes_only.fixed_size_px = None
    with pytest.raises(ConfigError, match=r"cannot run on images of 65x193 px: .* meta tensor"):
        inspect_model(shapes_only)  # its values are not there, and a guess would be wrong
    model.fixed_size_px, model.size_divisor, model.coarsest_stride = None, 6, 4
    assert (model.size_multiple, model.suitable_size(13, 12)) == (12, (24, 12))


@pytest.mark.parametrize(
    ("refusal", "reason"), [("no way", "AssertionError: no way"), ("", "AssertionError: assert self.refusal is None")]
)
def test_refused_network_has_size_and_reason(refusal: str, reason: str) -> None:
    model = PythonModel(Awkward(False, refusal), name="own:Awkward", num_classes=2, in_channels=3)
    with pytest.raises(ConfigError, match=rf"own:Awkward cannot run on images of 69x453 px: {reason}.*fixed_size_px"):
        inspect_model(model)


def test_step_that_cannot_be_tried_counts_as_drawing() -> None:
    """The layers of dropout have their masks by sample; what draws is told from what does not by a trial."""
    model = build_model("smp", MODEL["name"], 3, encoder=MODEL["encoder"], options=MODEL["options"])
    mask_by_sample(model)
    broken, drawing = (PlainCriterion(loss) for loss in (lambda *_: None, lambda x, _: x.mean() * torch.rand(())))
    assert [draws_numbers(model, each) for each in (CriterionCE(), drawing, broken)] == [False, True, True]
