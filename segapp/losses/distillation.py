"""What a student learns from a teacher's maps: terms of one value an image, and the criterion that adds them.

The terms are those of Liu et al., "Structured Knowledge Distillation for Semantic Segmentation" (CVPR 2019; TPAMI
2020), sections 3.1 and 3.2. There they are means over a device's share of the batch, or sums; here each gives one value
an image, so that the loss does not depend on how a batch is divided.

Legend: N images, C classes, h and w the height and width of the student's logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from segapp.losses.additive import AdditiveCriterion, Statistics, reciprocal_or_zero


def pixel_wise_divergence(
    student: Tensor, teacher: Tensor, temperature: float = 1.0, *, align_corners: bool = True
) -> Tensor:
    """Each image's mean over the pixels of KL(teacher || student), times the temperature squared.

    Equation 2 of Liu et al.; temperature as in Hinton et al. 2015, "Distilling the Knowledge in a Neural Network",
    section 2, whose square keeps the size of the gradient.

    Args:
        student: logits (N, C, h, w).
        teacher: logits (N, C, h', w'), brought to the student's size bilinearly; no gradient flows into them.
        temperature: what the logits are divided by, > 0.
        align_corners: of that interpolation.

    Returns:
        (N,) in float32 or better, >= 0.

    Raises:
        ValueError: the numbers of images or classes differ.
    """
    if student.shape[:2] != teacher.shape[:2]:
        raise ValueError(f"student's logits are {tuple(student.shape)} and teacher's {tuple(teacher.shape)}")
    wide = torch.promote_types(student.dtype, torch.float32)
    teacher = teacher.detach().to(wide)
    if teacher.shape[2:] != student.shape[2:]:
        teacher = F.interpolate(teacher, student.shape[2:], mode="bilinear", align_corners=align_corners)
    told = F.log_softmax(teacher / temperature, 1)
    learned = F.log_softmax(student.to(wide) / temperature, 1)
    return F.kl_div(learned, told, reduction="none", log_target=True).sum(1).mean((1, 2)) * temperature**2


def node_features(features: Tensor, grid: tuple[int, int]) -> Tensor:
    """The features of an image's nodes: its largest ones in each cell of a grid, of length 1.

    Args:
        features: (N, K, h, w).
        grid: cells along height and width; where the map has fewer pixels, they share them.

    Returns:
        (N, K, cells).
    """
    wide = features.to(torch.promote_types(features.dtype, torch.float32))
    nodes = F.adaptive_max_pool2d(wide, grid).flatten(2)
    # The least that the square root can be differentiated at: a node whose features are all 0 stays 0.
    return nodes / (nodes.square().sum(1, keepdim=True) + 1e-16).sqrt()


def pair_wise_difference(student: Tensor, teacher: Tensor) -> Tensor:
    """Each image's mean over all pairs of nodes of the squared difference of the two cosine similarities.

    Equation 3 of Liu et al. Student and teacher may have other numbers of channels.

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
    """A criterion of the target, plus weighted means over the images of what is learned from a teacher.

    Its outputs are what the model returned for `task`, then the terms' values (N, terms), one row an image; what comes
    after these is not looked at.

    Args:
        task: the criterion of the target.
        factors: name -> weight of each term, in the order of the values.

    Example:
        >>> from segapp.losses import CriterionCE
        >>> criterion = CriterionDistilled(CriterionCE(), {"pixel_wise": 10.0})
        >>> logits, target = torch.zeros(2, 3, 4, 4), torch.zeros(2, 8, 8, dtype=torch.uint8)
        >>> values = torch.tensor([[0.1], [0.3]])
        >>> round(float(criterion((logits, values), target) - criterion.task(logits, target)), 6)
        2.0
    """

    factors: Tensor

    def __init__(self, task: AdditiveCriterion, factors: Mapping[str, float]) -> None:
        super().__init__()
        self._task = task
        self.names = tuple(factors)
        self.register_buffer("factors", torch.tensor(list(factors.values()), dtype=torch.float64), persistent=False)
        self.is_linear = task.is_linear
        self.num_statistics = task.num_statistics + 2

    @property
    def task(self) -> AdditiveCriterion:
        """The criterion of the target."""
        return self._task

    def statistics(self, outputs: Any, target: Tensor) -> Statistics:
        """The task's statistics, the terms' sums (terms,) and the number of images."""
        heads, values = outputs[:2]
        count = torch.tensor(len(values), dtype=torch.float64, device=values.device)
        return (*self._task.statistics(heads, target), values.sum(0), count)

    def target_statistics(self, target: Tensor) -> Statistics:
        """The task's, with the terms' sums 0."""
        count = torch.tensor(len(target), dtype=torch.float64, device=target.device)
        sums = torch.zeros(len(self.names), device=target.device)
        return (*self._task.target_statistics(target), sums, count)

    def terms(self, totals: Statistics) -> dict[str, Tensor]:
        """Each term's mean over the images, by name, not weighted."""
        return dict(zip(self.names, _means(totals).unbind(), strict=True))

    def finalize(self, totals: Statistics) -> Tensor:
        """The task's loss + the sum over the terms of weight x mean."""
        task = self._task.finalize(totals[:-2])
        return task + (_means(totals) * self.factors.to(totals[-2].device)).sum().to(task)


def _means(totals: Statistics) -> Tensor:
    sums, count = totals[-2:]
    return sums * reciprocal_or_zero(count)
