"""The dtypes that tests/gpu asserts and that its figures use, as CUDA's autocast gives them; without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from segapp.assembly.network import build_network
from tests.gpu.figures_training import LARGE, SMALL, WITH_DROPOUT, figures_config
from tests.support.parallel_cases import SmallNet
from tests.support.replica_checks import Noted, check_autocast_dtypes


@contextlib.contextmanager
def fake_cuda(dtype: torch.dtype | None) -> Iterator[None]:
    """Make all tensors on a CUDA device that does not exist, with autocast in a dtype; None: without autocast.

    `torch.autocast` itself would switch itself off on a machine without CUDA. A backward pass needs the device.
    """
    was = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with FakeTensorMode(), torch.device("cuda"):
        torch.set_autocast_enabled("cuda", dtype is not None)
        torch.set_autocast_dtype("cuda", dtype or was[1])
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", was[0])
            torch.set_autocast_dtype("cuda", was[1])
            torch.clear_autocast_cache()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_dtypes_of_replicas_are_those_of_autocast(dtype: torch.dtype | None) -> None:
    with fake_cuda(dtype):
        net = SmallNet(width=16)
        net.head = Noted(net.head)
        outputs = [net(torch.randn(n, 3, 32, 32)) for n in (1, 3, 2)]
        check_autocast_dtypes(net.head, outputs, dtype or torch.float32)
        with pytest.raises(AssertionError):  # it tells the dtypes apart
            check_autocast_dtypes(net.head, outputs, torch.float64)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model", "dtype"), [(WITH_DROPOUT, torch.float16), (LARGE, torch.bfloat16), (SMALL, torch.float16)]
)
def test_networks_of_the_figures_run_under_autocast(model: dict[str, str], dtype: torch.dtype) -> None:
    config = figures_config(True, model)
    with fake_cuda(dtype):
        outputs = build_network(config.model, 19).train()(torch.randn(2, 3, 64, 64))
        assert {logits.dtype for logits in outputs} == {dtype}
        assert {logits.device.type for logits in outputs} == {"cuda"}
