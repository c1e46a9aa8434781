"""Distillation losses between student and teacher maps, with one value per image, and the criterion that adds them.

The terms are defined in Liu et al., "Structured Knowledge Distillation for Semantic Segmentation" (CVPR 2019; TPAMI
2020), sections 3.1 and 3.2. In plain torch, with temperature T, and with s and t for the unit vectors (N, K, cells) of
the regions of both maps:

    logs = (F.log_softmax(logits / T, 1) for logits in (student, teacher))
    pixel_wise = F.kl_div(*logs, reduction="none", log_target=True).sum(1).mean((1, 2)) * T**2
    pair_wise = (s.mT @ s - t.mT @ t).square().mean((1, 2))

The published code takes means or sums over a device's chunk; here each term is one value
per image, so the loss does not depend on the batch split.

Shapes: N images, C classes, K channels, h x w of the student's logits.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from segapp.accelerator import wide_dtype
from segapp.chunks import check_flag, check_number
from segapp.losses.additive import AdditiveCriterion, LossStatistics, as_whole, reciprocal_or_zero


def pixel_wise_divergence(
    student: Tensor, teacher: Tensor, *, temperature: float = 1.0, align_corners: bool = True
) -> Tensor:
    """Return each image's mean over the pixels of KL(teacher || student), times the temperature squared.

    Equation 2 of Liu et al.; the temperature is as in Hinton et al. 2015, "Distilling the Knowledge in a Neural
    Network", section 2: its square keeps the magnitude of the gradient independent of it.

    Args:
        student: logits (N, C, h, w).
        teacher: logits (N, C, h', w'), resized bilinearly to the student's size; no gradient flows into them.
        temperature: divisor of the logits, > 0.
        align_corners: as in `F.interpolate`, but True by default.

    Returns:
        (N,) in float32 or better, >= 0.

    Raises:
        ValueError: the numbers of images or classes differ, or the temperature is not above 0.
    """
    check_number("temperature", temperature, above=True)
    check_flag("align_corners", align_corners)
    if student.shape[:2] != teacher.shape[:2]:
        raise ValueError(
            f"student's logits have shape {tuple(student.shape)}, teacher's {tuple(teacher.shape)}: N and C must agree"
        )
    wide = torch.promote_types(student.dtype, torch.float32)
    teacher = teacher.detach().to(wide)
    if teacher.shape[2:] != student.shape[2:]:
        teacher = F.interpolate(teacher, student.shape[2:], mode="bilinear", align_corners=align_corners)
    teacher = F.log_softmax(teacher / temperature, 1)
    log_probability = F.log_softmax(student.to(wide) / temperature, 1)
    return F.kl_div(log_probability, teacher, reduction="none", log_target=True).sum(1).mean((1, 2)) * temperature**2


def node_features(features: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return one feature vector per cell of a grid: the maximum over the cell, normalized to length 1.

    Args:
        features: (N, K, h, w).
        grid: cells along height and width; cells overlap if the map has fewer pixels.

    Returns:
        (N, K, cells).
    """
    wide = features.to(torch.promote_types(features.dtype, torch.float32))
    nodes = F.adaptive_max_pool2d(wide, grid).flatten(2)
    # 1e-16 keeps the derivative of the square root finite at 0; a node of zeros stays 0.
    return nodes / (nodes.square().sum(1, keepdim=True) + 1e-16).sqrt()


def pair_wise_difference(student: Tensor, teacher: Tensor) -> Tensor:
    """Return each image's mean over all pairs of nodes of the squared difference of the cosine similarities.

    Equation 3 of Liu et al. Student and teacher may have different numbers of channels.

    Args:
        student: (N, K, cells), from `node_features`.
        teacher: (N, K', cells).

    Returns:
        (N,) in float32 or better, 0 to 4.

    Raises:
        ValueError: the numbers of images or nodes differ.
    """
    if (len(student), student.size(2)) != (len(teacher), teacher.size(2)):
        raise ValueError(f"student has nodes {tuple(student.shape)} and teacher {tuple(teacher.shape)}: use one grid")
    teacher = teacher.detach().to(student.dtype)
    difference = student.transpose(1, 2) @ student - teacher.transpose(1, 2) @ teacher
    return difference.square().mean((1, 2))


class CriterionDistilled(AdditiveCriterion):
    """Criterion of the target, plus the weighted mean over the images of each distillation term.

    Use it when a larger trained model can teach a smaller one. It takes outputs (outputs for `task`, values of the
    terms (N, terms)), ignores further elements, and takes the target of `task`.

    Args:
        task: the criterion of the target.
        factors: name of each distillation term -> its weight, in the order of the values.

    Example:
        >>> import torch
        >>> from segapp.losses import CriterionCE, CriterionDistilled
        >>> criterion = CriterionDistilled(CriterionCE(), {"pixel_wise": 10.0})
        >>> logits, target = torch.zeros(2, 3, 4, 4), torch.zeros(2, 8, 8, dtype=torch.uint8)
        >>> values = torch.tensor([[0.1], [0.3]])
        >>> round(float(criterion((logits, values), target) - criterion.task(logits, target)), 6)
        2.0
    """

    def __init__(self, task: AdditiveCriterion, factors: Mapping[str, float]) -> None:
        super().__init__()
        self._task = task
        self.factors = {name: check_number(name, factor, least=-math.inf) for name, factor in factors.items()}
        # No buffer, because not every device has float64.
        self._factors = torch.tensor(list(self.factors.values()), dtype=torch.float64)
        self.is_linear = task.is_linear
        self.num_statistics = task.num_statistics + 2

    @property
    def task(self) -> AdditiveCriterion:
        """The criterion of the target."""
        return self._task

    def statistics(self, outputs: Any, target: Tensor) -> LossStatistics:
        """Return the task's statistics, the terms' sums (terms,) and the number of images."""
        heads, values = as_whole(outputs)[:2]
        count = torch.tensor(len(values), dtype=wide_dtype(values.device), device=values.device)
        return (*self._task.statistics(heads, target), values.sum(0), count)

    def target_statistics(self, target: Tensor) -> LossStatistics:
        """Return the task's target statistics, terms' sums of 0 and the number of images."""
        count = torch.tensor(len(target), dtype=wide_dtype(target.device), device=target.device)
        sums = torch.zeros(len(self.factors), device=target.device)
        return (*self._task.target_statistics(target), sums, count)

    def terms(self, totals: LossStatistics) -> dict[str, Tensor]:
        """Return each term's mean over the images, by name, without weights."""
        return dict(zip(self.factors, _means(totals).unbind(), strict=True))

    def finalize(self, totals: LossStatistics) -> Tensor:
        """Return the task's loss plus the sum over the terms of weight x mean."""
        task = self._task.finalize(totals[:-2])
        device = totals[-2].device
        factors = self._factors.to(device, wide_dtype(device), non_blocking=True)
        return task + (_means(totals) * factors).sum().to(task)


def _means(totals: LossStatistics) -> Tensor:
    sums, count = totals[-2:]
    return sums * reciprocal_or_zero(count)
