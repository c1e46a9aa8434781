"""Loss and gradient of every implementation against interpolate + cross-entropy in float64."""

import pytest
import torch

from tests.support.accuracy_cases import TOLERANCE, all_cases, errors_of, sample_of_cases


def check(case, seed):
    loss_error, gradient_error = errors_of(*case, seed=seed)
    tolerance = TOLERANCE[case[3]]
    assert loss_error <= min(tolerance, 1e-6), (case, loss_error)
    assert gradient_error <= tolerance, (case, gradient_error)
    return loss_error, gradient_error


def test_sampled_losses_match_float64_reference():
    for seed, case in enumerate(sample_of_cases(160)):
        check(case, seed)


@pytest.mark.slow
def test_all_losses_match_float64_reference():
    cases = all_cases()
    assert len(cases) >= 1500
    worst = {}
    for seed, case in enumerate(cases):
        errors = check(case, seed)
        worst[case[3]] = [max(pair) for pair in zip(worst.get(case[3], (0.0, 0.0)), errors, strict=True)]
    print(f"\n{len(cases)} cases; worst relative error of loss, gradient:")
    for dtype, (loss_error, gradient_error) in worst.items():
        print(f"  {dtype}: {loss_error:.1e}, {gradient_error:.1e}")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["bands", "cells"])
@pytest.mark.parametrize("align_corners", [True, False])
def test_loss_of_large_crop_in_float32_is_accurate(way, align_corners):
    shape = (1, 19, 97, 193, 769, 1537)
    check((way, shape, align_corners, torch.float32, True, 0.1, "30 %"), 0)
