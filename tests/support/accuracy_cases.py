"""Accuracy of every implementation of the loss against interpolate + cross-entropy in float64."""

import itertools
import random
from unittest import mock

import torch
import torch.nn.functional as F

from segapp.losses import upsample_cross_entropy
from segapp.losses.fused import bands, pixel_sums
from tests.support.loss_cases import relative_error

SHAPES = [  # N, C, h, w, H, W
    (2, 5, 5, 7, 33, 50),
    (2, 19, 13, 25, 97, 193),
    (1, 19, 25, 25, 193, 193),
    (2, 3, 6, 6, 6, 6),
    (1, 150, 8, 8, 64, 64),
    (1, 60, 1, 1, 9, 11),
    (3, 11, 9, 12, 36, 45),
    (2, 4, 3, 5, 3, 20),
    (1, 7, 30, 40, 31, 41),
    (5, 2, 4, 3, 16, 13),
]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
IGNORED = ["none", "30 %", "a border", "all"]
WAYS = ["bands", "small bands"]


def all_cases():
    """Return 1280 cases: implementation, shape, align_corners, dtype, weighted, smoothing, ignored pixels."""
    options = itertools.product(SHAPES, [True, False], DTYPES, [False, True], [0.0, 0.1], IGNORED)
    return [(WAYS[k % 2], *case) for k, case in enumerate(options)]


def sample_of_cases(count):
    return random.Random(0).sample(all_cases(), count)


def compute(way, logits, target, weight, options):
    band_bytes = 3000 if way == "small bands" else bands.CPU_BAND_BYTES
    x = logits.requires_grad_()
    with mock.patch.object(bands, "CPU_BAND_BYTES", band_bytes), mock.patch.object(pixel_sums, "FULL_BYTES", 0):
        loss_sum, weight_sum = upsample_cross_entropy(x, target, weight=weight, implementation="sums", **options)
        return loss_sum.detach(), weight_sum, torch.autograd.grad(loss_sum, x)[0]


def errors_of(way, shape, align_corners, dtype, weighted, smoothing, ignored, seed=0):
    """Return the relative errors of the loss and of the gradient in the logits' dtype."""
    N, C, h, w, H, W = shape
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(N, C, h, w, dtype=torch.float64, generator=generator)).to(dtype)
    target = torch.randint(0, C, (N, H, W), generator=generator)
    if ignored == "30 %":
        target[torch.rand(N, H, W, generator=generator) < 0.3] = 255
    elif ignored == "a border":
        target[:, : H // 2] = 255
        target[:, :, W // 2 :] = 255
    elif ignored == "all":
        target[:] = 255
    weight = (0.1 + torch.rand(C, generator=generator)).double() if weighted else None
    options = {"align_corners": align_corners, "label_smoothing": smoothing}
    target_dtype = (torch.uint8, torch.int16, torch.int64)[seed % 3]
    loss_sum, weight_sum, gradient = compute(way, logits, target.to(target_dtype), weight, options)
    truth_logits = logits.detach().double().requires_grad_()
    values = F.interpolate(truth_logits, size=(H, W), mode="bilinear", align_corners=align_corners)
    truth = F.cross_entropy(values, target, weight, ignore_index=255, reduction="sum", label_smoothing=smoothing)
    truth.backward()
    counted = (torch.ones(C, dtype=torch.float64) if weight is None else weight)[target[target != 255]].sum()
    assert relative_error(weight_sum, counted) < 1e-6
    return relative_error(loss_sum, truth.detach()), relative_error(gradient.to(dtype), truth_logits.grad)
