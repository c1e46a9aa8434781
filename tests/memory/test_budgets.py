"""Memory budgets of GPUs, by their allocator."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from segapp.errors import ConfigError
from segapp.memory.counters import limit_gpus

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


def test_budget_becomes_a_fraction_of_the_gpu(monkeypatch):
    fractions = {}
    total = SimpleNamespace(total_memory=1000 * MIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: total)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda f, device: fractions.update({device: f}))
    gpus = [torch.device("cuda", 1), torch.device("cuda", 0)]
    limit_gpus([9.0, 250.0, 2000.0], gpus, first=1)
    assert fractions == {gpus[0]: 0.25, gpus[1]: 1.0}
