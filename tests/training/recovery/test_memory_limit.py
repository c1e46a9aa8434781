"""Which logical device a tensor counts for."""

from __future__ import annotations

import pytest
import torch

from segapp.training.recovery.memory_limit import MemoryLimit

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
