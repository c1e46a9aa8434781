"""The CUDA kernels, interpreted on the CPU, against float64: a script for TRITON_INTERPRET=1."""

import itertools
import sys

import pytest
import torch
import torch.nn.functional as F

from segapp.losses.fused import block_sizes, kernels
from segapp.losses.fused.checks import raise_reported
from segapp.losses.fused.pixel_sums import PixelOptions
from segapp.losses.fused.triton_cross_entropy import cross_entropy_by_triton
from tests.support.gpu.as_on_cuda import call_functions_directly

SHAPES = [  # N, C, h, w, H, W
    (2, 5, 3, 7, 13, 70),
    (1, 19, 3, 6, 24, 48),
    (2, 3, 4, 6, 4, 6),
    (1, 150, 2, 3, 16, 20),
    (1, 60, 1, 1, 9, 11),
    (2, 7, 4, 50, 5, 75),
    (1, 3, 3, 65, 3, 66),
    (1, 300, 2, 3, 8, 12),
]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
TARGETS = [torch.uint8, torch.int16, torch.int64]


def cases(every):
    options = itertools.product(SHAPES, [True, False], DTYPES, [False, True], [0.0, 0.1])
    return list(options)[::every]


def check(case, seed):
    (N, C, h, w, H, W), align_corners, dtype, weighted, smoothing = case
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(N, h, w, C, dtype=torch.float64, generator=generator)).to(dtype).permute(0, 3, 1, 2)
    target = torch.randint(0, C, (N, H, W), generator=generator)
    target[torch.rand(N, H, W, generator=generator) < 0.3] = 255
    target[:, : H // 3] = 255
    weight = (0.1 + torch.rand(C, generator=generator)).double() if weighted else None
    options = PixelOptions(align_corners, 255, label_smoothing=smoothing)
    # In some cases threads take several cells, as they do in large images; in the others they share cells.
    block_sizes._MANY_THREADS = 1 if seed % 5 % 2 else 1 << 15
    ids = target.to(TARGETS[seed % 3] if C <= 256 else TARGETS[1 + seed % 2])
    loss_sum, weight_sum, gradient = cross_entropy_by_triton(logits, ids, weight, options, with_gradient=True)
    x = logits.double().requires_grad_()
    values = F.interpolate(x, (H, W), mode="bilinear", align_corners=align_corners)
    truth = F.cross_entropy(values, target, weight, ignore_index=255, reduction="sum", label_smoothing=smoothing)
    truth.backward()
    count = (torch.ones(C).double() if weight is None else weight)[target[target != 255]].sum()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    for mine, theirs in ((loss_sum, truth.detach()), (weight_sum, count), (gradient.double(), x.grad)):
        error = float((mine - theirs).abs().max() / theirs.abs().max())
        assert error < tolerance, (case, error)


def check_edges():
    options = PixelOptions(True, 255, label_smoothing=0.1)
    logits = torch.randn(1, 4, 2, 3)
    ignored = torch.full((1, 5, 7), 255, dtype=torch.uint8)
    loss_sum, weight_sum, gradient = cross_entropy_by_triton(logits, ignored, None, options, with_gradient=True)
    assert float(loss_sum) == float(weight_sum) == float(gradient.abs().max()) == 0.0
    far = 1000 * logits
    loss_sum, _, gradient = cross_entropy_by_triton(far, ignored % 4, None, options, with_gradient=True)
    assert torch.isfinite(loss_sum)
    assert torch.isfinite(gradient).all()
    assert cross_entropy_by_triton(logits, ignored % 4, None, options, with_gradient=False)[2] is None
    for ids, named in (([-7, 1 << 40], "-7, 1099511627776"), ([-1, 0], "-1"), ([3, 4], "4")):
        bad = (ignored % 4).long()
        bad[0, 3, 4], bad[0, 4, 6] = ids
        assert torch.isnan(cross_entropy_by_triton(logits, bad, None, options, with_gradient=True)[0])
        with pytest.raises(ValueError, match=f"ids {named}: classes are 0 to 3"):
            raise_reported()
    cross_entropy_by_triton(logits, ignored, None, options, with_gradient=True)
    assert kernels.has_kernels(logits.device), "the trial before the first use"


if __name__ == "__main__":
    call_functions_directly()
    chosen = cases(int(sys.argv[1]))
    for seed, case in enumerate(chosen):
        check(case, seed)
    check_edges()
    print(len(chosen), "cases")
