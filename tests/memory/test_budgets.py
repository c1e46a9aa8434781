"""Memory budgets of GPUs, by their allocator."""

from __future__ import annotations

import pytest
import torch

from segapp.errors import ConfigError
from segapp.memory.counters import limit_gpus
from tests.support.gpu.fake_cuda import FakeGpu

MIB = 2**20


@pytest.mark.parametrize(
    ("devices", "limits", "message"),
    [
        ([torch.device("cpu")], [900.0], "limits GPUs, each named once: leave it out on other devices"),
        ([torch.device("cuda", 0)] * 2, [900.0] * 2, "limits GPUs, each named once"),
        ([torch.device("cuda", i) for i in range(2)], [900.0], "names 1 budgets: device 1 has none"),
    ],
)
def test_budgets_that_no_allocator_keeps_are_refused(devices, limits, message):
    with pytest.raises(ConfigError, match=f"^parallel.memory_budget_mib {message}"):
        limit_gpus(limits, devices)


def test_budget_becomes_a_fraction_of_the_gpu(fake_cuda):
    fake_cuda.gpus = [FakeGpu(total=mib * MIB) for mib in (1000, 800, 900)]
    limit_gpus([9.0, 200.0, 2000.0], [torch.device("cuda", 1), torch.device("cuda", 0)], first=1)
    assert [gpu.fraction for gpu in fake_cuda.gpus] == [1.0, 0.25, None]
