"""The dtypes that tests/gpu asserts and that its figures use, as CUDA's autocast gives them; without a GPU."""

from __future__ import annotations

import pytest
import torch

from segapp.assembly.network import build_network
from tests.gpu.figures_training import LARGE, SMALL, WITH_DROPOUT, figures_config
from tests.support.gpu.fake_cuda import fake_cuda
from tests.support.parallel_cases import SmallNet
from tests.support.replica_checks import Noted, check_autocast_dtypes

HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", [None, *HALVES])
def test_dtypes_of_replicas_are_those_of_autocast(dtype: torch.dtype | None) -> None:
    with fake_cuda(dtype):
        net = SmallNet(width=16)
        net.head = Noted(net.head)
        outputs = [net(torch.randn(n, 3, 32, 32)) for n in (1, 3, 2)]
        check_autocast_dtypes(net.head, outputs, dtype or torch.float32)
        with pytest.raises(AssertionError):  # it tells the dtypes apart
            check_autocast_dtypes(net.head, outputs, torch.float64)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("model", [LARGE, SMALL, WITH_DROPOUT], ids=lambda model: model["name"])
def test_networks_of_the_figures_run_under_autocast(model: dict[str, str], dtype: torch.dtype) -> None:
    config = figures_config(True, model)
    with fake_cuda(dtype):
        outputs = build_network(config.model, 19).train()(torch.randn(2, 3, 64, 64))
        assert {logits.dtype for logits in outputs} == {dtype}
        assert {logits.device.type for logits in outputs} == {"cuda"}
