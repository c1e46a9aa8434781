"""Loss and gradient on bands, with one and many threads, against interpolate + cross-entropy in float64."""

import itertools
import random
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from segapp.losses import upsample_cross_entropy
from segapp.losses.fused import bands, pixel_sums
from tests.support.loss_cases import relative_error

SHAPES = [  # N, C, h, w, H, W
    (2, 5, 5, 7, 33, 50),
    (2, 19, 13, 25, 61, 93),
    (2, 3, 6, 6, 6, 6),
    (1, 150, 8, 8, 64, 64),
    (1, 60, 1, 1, 9, 11),
    (2, 4, 3, 5, 3, 20),
    (1, 7, 30, 40, 31, 41),
    (5, 2, 4, 3, 16, 13),
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
IGNORED = ["none", "30 %", "a border", "all"]
CASES = [*itertools.product(SHAPES, [True, False], TOLERANCE, [False, True], [0.0, 0.1], IGNORED)]


def check(number, shape, align_corners, dtype, weighted, smoothing, ignored):
    N, C, h, w, H, W = shape
    generator = torch.Generator().manual_seed(number)
    logits = (3 * torch.randn(N, C, h, w, dtype=torch.float64, generator=generator)).to(dtype).requires_grad_()
    target = torch.randint(0, C, (N, H, W), generator=generator)
    if ignored == "30 %":
        target[torch.rand(N, H, W, generator=generator) < 0.3] = 255
    elif ignored == "a border":
        target[:, : H // 2] = 255
        target[:, :, W // 2 :] = 255
    elif ignored == "all":
        target[:] = 255
    weight = (0.1 + torch.rand(C, generator=generator)).double() if weighted else torch.ones(C).double()
    options = {"weight": weight if weighted else None, "label_smoothing": smoothing}
    ids = target.to((torch.uint8, torch.int16, torch.int64, torch.int32)[number // 2 % 4])
    limits = {"CPU_BAND_BYTES": 3000, "MIN_PART_BYTES": 1, "MIN_SHARED_BYTES": 1}
    limits = limits if number % 2 else {"CPU_BAND_BYTES": bands.CPU_BAND_BYTES}
    torch.set_num_threads((1, 2, 5, 40)[number % 4])  # the last is more than most cases have rows
    with mock.patch.multiple(bands, **limits), mock.patch.object(pixel_sums, "FULL_BYTES", 0):  # nothing at once
        loss_sum, weight_sum = upsample_cross_entropy(
            logits, ids, align_corners=align_corners, implementation="sums", **options
        )
        (gradient,) = torch.autograd.grad(loss_sum, logits)
    theirs = logits.detach().double().requires_grad_()
    values = F.interpolate(theirs, size=(H, W), mode="bilinear", align_corners=align_corners)
    truth = F.cross_entropy(values, target, ignore_index=255, reduction="sum", **options)
    truth.backward()
    assert relative_error(weight_sum, weight[target[target != 255]].sum()) < 1e-6
    assert relative_error(loss_sum.detach(), truth.detach()) <= min(TOLERANCE[dtype], 1e-6)
    assert relative_error(gradient.to(dtype), theirs.grad) <= TOLERANCE[dtype]


@pytest.mark.usefixtures("set_threads")
def test_sampled_losses_match_float64_reference():
    for number, case in enumerate(random.Random(0).sample(CASES, 36)):
        check(number, *case)
