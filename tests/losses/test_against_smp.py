"""Every criterion against segmentation_models_pytorch's (smp's) loss on drawn cases in float64: values and gradients.

OHEM has no counterpart there: its pixels are chosen by hand from smp's. smp knows neither low-resolution logits (they
are upsampled for it) nor steps without a valid pixel.
"""

import importlib.util
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from segapp.config.options import LOSSES
from segapp.losses import (
    CriterionBCE,
    CriterionCE,
    CriterionDice,
    CriterionFocal,
    CriterionLovasz,
    CriterionOHEM,
    CriterionTversky,
    overlap,
)
from tests.support.loss_cases import relative_error


def load_smps_losses() -> ModuleType:
    """Return `segmentation_models_pytorch.losses` by itself: the import of the package takes many seconds."""
    package = importlib.util.find_spec("segmentation_models_pytorch")
    assert package
    assert package.origin
    folder = Path(package.origin).parent / "losses"
    spec = importlib.util.spec_from_file_location(
        "smp_losses", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


smp = load_smps_losses()
ON_BANDS, AT_ONCE = 0, 1 << 60
"""Values of FULL_BYTES: the logits are upsampled band by band, or all together."""


@dataclass(frozen=True)
class Case:
    """Logits (N, C, h, w), class ids (N, H, W) with 255 for ignored pixels, one weight a class, and the upsampling."""

    logits: Tensor
    ids: Tensor
    weight: Tensor
    align_corners: bool
    full_bytes: int

    @property
    def valid(self) -> Tensor:
        return self.ids != 255

    @property
    def num_valid(self) -> int:
        return int(self.valid.sum())

    @property
    def num_classes(self) -> int:
        return self.logits.shape[1]

    def target(self, *, has_sets: bool) -> tuple[Tensor, Tensor]:
        """A target, and the classes of each pixel as smp takes them, (N, C, H, W): its class, or drawn sets as bits."""
        classes = torch.arange(self.num_classes).view(1, -1, 1, 1)
        generator = torch.Generator().manual_seed(self.ids.numel())
        bits = torch.randint(0, 1 << self.num_classes, self.ids.shape, generator=generator)
        own = (bits.unsqueeze(1) >> classes) & 1 if has_sets else self.ids.unsqueeze(1) == classes
        maps = torch.where(self.valid.unsqueeze(1), own.double(), 255.0)
        return torch.where(self.valid, bits, 255) if has_sets else self.ids, maps

    def upsampled(self, logits: Tensor) -> Tensor:
        return F.interpolate(logits, self.ids.shape[1:], mode="bilinear", align_corners=self.align_corners)


@st.composite
def cases(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    N, C = draw(st.integers(1, 3)), draw(st.integers(2, 6))
    low, high = (draw(st.tuples(st.integers(1, most), st.integers(1, most))) for most in (7, 47))
    sigma, ignored = draw(st.sampled_from([0.3, 2.0, 6.0])), draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
    logits = sigma * torch.randn(N, C, *low, dtype=torch.float64, generator=generator)
    ids = torch.randint(0, draw(st.integers(1, C)), (N, *high), generator=generator)  # the last classes may be absent
    ids[torch.rand(ids.shape, generator=generator) < ignored] = 255
    weight = torch.tensor(draw(st.lists(st.integers(1, 16), min_size=C, max_size=C))).double() / 8
    return Case(logits, ids, weight, draw(st.booleans()), draw(st.sampled_from([ON_BANDS, AT_ONCE])))


def present(maps):
    """The classes with a pixel, of maps (N, C, H, W) with 255 for ignored pixels."""
    return (maps == 1).any(0).flatten(1).any(1).nonzero().flatten().tolist()


def assert_equal(criterion, target, truth, case, tolerance=1e-12):
    """Compare with a function of upsampled logits; without a valid pixel, loss and gradient are 0."""
    mine, theirs = case.logits.clone().requires_grad_(), case.logits.clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("segapp.losses.fused.pixel_sums.FULL_BYTES", case.full_bytes)
        patch.setattr(criterion, "takes_any_aspect", True)
        loss = criterion(mine, target)
    loss.backward()
    expected = truth(case.upsampled(theirs)) if case.num_valid else theirs.sum() * 0.0
    expected.backward()
    assert relative_error(loss.detach(), expected.detach()) < tolerance
    scale = theirs.grad.abs().max().clamp_min(1e-4)  # terms that cancel are rounded
    assert (mine.grad - theirs.grad).abs().max() <= tolerance * scale


drawn = settings(max_examples=25)
smoothings = st.sampled_from([0.0, 0.1, 1.0])
smooths = st.sampled_from([0.25, 1.0, 8.0])
exponents = st.sampled_from([0.5, 1.0, 2.0, 3.5])


def test_every_criterion_is_compared():
    names = [name.removeprefix("test_") for name in globals() if name.endswith("_definition")]
    compared = {name.partition("_has_")[0].removesuffix("_of_sets") for name in names}
    assert compared == LOSSES.keys() - {"mask_classification"}, "write test_NAME_has_..._definition for a new loss"


@drawn
@given(cases(), smoothings, st.sampled_from(["auto", "reference", "sums"]))
def test_ce_has_smps_definition(case, label_smoothing, way):
    """smp divides by all pixels, also ignored ones, and has no class weights (test_accuracy.py: torch's)."""
    theirs = smp.SoftCrossEntropyLoss("sum", label_smoothing, 255)
    ours = CriterionCE(label_smoothing=label_smoothing, align_corners=case.align_corners, implementation=way)
    assert_equal(ours, case.ids, lambda values: theirs(values, case.ids) / case.num_valid, case)


@drawn
@given(cases(), st.floats(0.05, 1.0), st.integers(0, 30), st.booleans())
def test_ohem_has_hrnets_definition(case, threshold, min_kept, is_weighted):
    """The mean of smp's losses of the pixels below the threshold; where they are too few: test_criteria.py."""
    pixel_losses = smp.SoftCrossEntropyLoss(None, 0.0, 255)
    hard = pixel_losses(case.upsampled(case.logits), case.ids)[:, 0] > -math.log(threshold)
    weight = case.weight if is_weighted else torch.ones_like(case.weight)
    weights = torch.where(case.valid & hard, weight[case.ids % 255], 0.0)
    ours = CriterionOHEM(
        threshold=threshold, min_kept=min(min_kept, int(hard.sum())), weight=weight, align_corners=case.align_corners
    )

    def truth(values):
        return (pixel_losses(values, case.ids)[:, 0] * weights).sum() / weights.sum().clamp_min(1e-9)

    assert_equal(ours, case.ids, truth, case)


@drawn
@given(cases(), smoothings, st.sampled_from([1.0, 0.25, 3.0]), st.booleans())
def test_bce_has_smps_definition(case, label_smoothing, pos_weight, has_sets):
    """smp divides by all pixels, takes half of our smoothing, and does not divide by the sum of the weights."""
    target, maps = case.target(has_sets=has_sets)
    shares = (case.weight / case.weight.sum()).view(1, -1, 1, 1)
    theirs = smp.SoftBCEWithLogitsLoss(shares, 255, "sum", label_smoothing / 2, torch.tensor(pos_weight))
    options = {"multilabel": has_sets, "align_corners": case.align_corners}
    ours = CriterionBCE(weight=case.weight, pos_weight=pos_weight, label_smoothing=label_smoothing, **options)
    assert_equal(ours, target, lambda values: theirs(values, maps) / case.num_valid, case)


@drawn
@given(cases(), smooths, st.booleans())
def test_dice_has_smps_definition(case, smooth, has_sets):
    """smp halves the fraction, and so our smooth; it counts an absent class as 0 in the mean, which ours leaves out."""
    target, maps = case.target(has_sets=has_sets)
    theirs = smp.DiceLoss("multilabel" if has_sets else "multiclass", smooth=smooth / 2, ignore_index=255)
    ours = CriterionDice(smooth=smooth, multilabel=has_sets, align_corners=case.align_corners)
    factor = case.num_classes / max(1, len(present(maps)))
    assert_equal(ours, target, lambda values: theirs(values, maps if has_sets else target) * factor, case)


@drawn
@given(cases(), st.tuples(st.floats(0.1, 1), st.floats(0.1, 1)), exponents, smooths, st.booleans())
def test_tversky_has_smps_definition(case, weights, gamma, smooth, has_sets):
    """smp takes the mean over the classes to the power of gamma, ours (focal Tversky, eq. 4) the loss of each class."""
    target, maps = case.target(has_sets=has_sets)
    mode, (alpha, beta) = "multilabel" if has_sets else "multiclass", weights
    options = {"smooth": smooth, "alpha": alpha, "beta": beta, "gamma": gamma, "ignore_index": 255}
    ours = CriterionTversky(
        alpha=alpha, beta=beta, gamma=gamma, smooth=smooth, multilabel=has_sets, align_corners=case.align_corners
    )

    def truth(values):
        losses = [smp.TverskyLoss(mode, [c], **options)(values, maps if has_sets else target) for c in present(maps)]
        return torch.stack(losses).mean() if losses else values.sum() * 0.0

    assert_equal(ours, target, truth, case, 1e-11)


@drawn
@given(cases(), exponents)
def test_focal_has_smps_definition(case, gamma):
    """Softmax form, by smp's function for it, which has no class weights: ours is their weighted mean."""
    ours = CriterionFocal(gamma=gamma, weight=case.weight, align_corners=case.align_corners)
    weights = torch.where(case.valid, case.weight[case.ids % 255], 0.0)

    def truth(values):
        losses = smp._functional.softmax_focal_loss_with_logits(values, case.ids % 255, gamma, "none")
        return (losses * weights).sum() / weights.sum()

    assert_equal(ours, case.ids, truth, case, 1e-10)


@drawn
@given(cases(), exponents, st.booleans())
def test_focal_of_sets_has_smps_definition(case, gamma, has_sets):
    """Sigmoid form: smp's binary loss of each class, and its loss of several classes with one class per pixel."""
    target, maps = case.target(has_sets=True)
    shares = case.weight / case.weight.sum()
    ours = CriterionFocal(gamma=gamma, weight=case.weight, multilabel=True, align_corners=case.align_corners)
    if has_sets:
        each = smp.FocalLoss("binary", gamma=gamma, ignore_index=255)

        def truth(values):
            return sum(shares[c] * each(values[:, c], maps[:, c]) for c in range(case.num_classes))
    else:
        target = torch.where(case.valid, 1 << case.ids % 255, 255)
        every = smp.FocalLoss("multiclass", gamma=gamma, ignore_index=255, class_weights=case.weight.tolist())

        def truth(values):
            return every(values, case.ids)

    assert_equal(ours, target, truth, case, 1e-9)  # smp subtracts e^-loss from 1


@drawn
@given(cases(), st.sampled_from(["present", "all"]), st.integers(1, 3), st.integers(1, 2))
def test_lovasz_has_smps_definition(case, classes, classes_at_once, images_at_once):
    """smp takes images without a valid pixel into the mean, and its slopes in float32, for which float64 is put."""
    of_an_image = case.ids[0].numel()
    sorted_bytes = classes_at_once * overlap.BYTES_OF_A_SORTED_PIXEL * images_at_once * of_an_image
    ours = CriterionLovasz(classes=classes, align_corners=case.align_corners)
    images = [number for number in range(len(case.ids)) if case.valid[number].any()]

    def truth(values):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "float", Tensor.double)
            return smp.lovasz._lovasz_softmax(values.softmax(1)[images], case.ids[images], classes, True, 255)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "HELD_BYTES", images_at_once * case.num_classes * of_an_image * 8)
        patch.setattr(overlap, "CPU_SORT_BYTES", sorted_bytes)
        assert_equal(ours, case.ids, truth, case, 1e-10)
