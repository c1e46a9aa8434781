"""Memory budgets: of GPUs by their allocator, of logical devices in tests by which device a tensor counts for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from segapp.errors import ConfigError
from segapp.memory.counters import limit_gpus
from tests.support.budgets import MemoryLimit

MIB = 2**20


def test_tensors_of_no_other_tensor_count_for_the_first_device() -> None:
    limit = MemoryLimit([4.0, 4.0], ["cpu", "cpu"])
    with limit.enforced():
        drawn = torch.zeros(MIB // 4)
        assert limit.live == [MIB, 0]
        doubled = drawn * 2
        assert limit.live == [2 * MIB, 0]
        limit.place([doubled, doubled, None], 1)
        assert limit.live == [MIB, MIB]
        beside = doubled + 1  # where its input is
        assert limit.live == [MIB, 2 * MIB]
        joined = doubled + drawn  # of equal parts of both
        assert limit.live == [2 * MIB, 2 * MIB]
        del joined, beside
    assert limit.live == [MIB, MIB]
    assert limit.peaks == [2 * MIB, 2 * MIB]


def test_tensor_over_the_limit_is_refused() -> None:
    limit = MemoryLimit([1.5, 9.0], ["first", "second"], phase=lambda: "forward")
    with pytest.raises(torch.OutOfMemoryError, match="first"), limit.enforced():
        torch.zeros(MIB // 2)


@pytest.mark.parametrize(
    ("devices", "limits", "message"),
    [
        ([torch.device("cpu")], [900.0], "limits GPUs, each named once: leave it out on other devices"),
        ([torch.device("cuda", 0)] * 2, [900.0] * 2, "limits GPUs, each named once"),
        ([torch.device("cuda", i) for i in range(2)], [900.0], "names 1 budgets: device 1 has none"),
    ],
)
def test_budgets_that_no_allocator_keeps_are_refused(
    devices: list[torch.device], limits: list[float], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^parallel.memory_budget_mib {message}"):
        limit_gpus(limits, devices)


def test_budget_becomes_a_fraction_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fractions = {}
    total = SimpleNamespace(total_memory=1000 * MIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: total)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda f, device: fractions.update({device: f}))
    gpus = [torch.device("cuda", 1), torch.device("cuda", 0)]
    limit_gpus([9.0, 250.0, 2000.0], gpus, first=1)
    assert fractions == {gpus[0]: 0.25, gpus[1]: 1.0}
