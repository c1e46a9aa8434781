"""Time and memory of each loss over cross-entropy, for the page `choose-loss`; run with `-m benchmark -n 0 -s`.

One forward and backward pass of 2 x 19 x 64 x 128 logits against targets of 512 x 1024 on the CPU. The memory is the
most that the operators returned and held at the same time, without the logits and the target.
"""

import statistics
import time

import pytest
import torch
from torch import Tensor

from segapp.losses import (
    AdditiveCriterion,
    CriterionBCE,
    CriterionCE,
    CriterionDice,
    CriterionFocal,
    CriterionLovasz,
    CriterionOHEM,
    CriterionTversky,
)
from segapp.memory.ledger import StorageLedger

pytestmark = pytest.mark.benchmark

CLASSES, ROUNDS = 19, 5
CRITERIA: dict[str, AdditiveCriterion] = {
    "ce": CriterionCE(),
    "ohem": CriterionOHEM(),
    "focal": CriterionFocal(),
    "bce": CriterionBCE(),
    "dice": CriterionDice(),
    "tversky": CriterionTversky(),
    "lovasz": CriterionLovasz(),
    "ce at full resolution": CriterionCE(implementation="reference"),
}


def seconds(criterion: AdditiveCriterion, logits: Tensor, target: Tensor) -> float:
    start = time.perf_counter()
    criterion(logits, target).backward()
    return time.perf_counter() - start


def test_time_and_memory_of_each_loss() -> None:
    logits = torch.randn(2, CLASSES, 64, 128, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ids = torch.randint(0, CLASSES, (2, 512, 1024), generator=torch.Generator().manual_seed(1))
    times: dict[str, list[float]] = {name: [] for name in CRITERIA}
    for _ in range(ROUNDS + 1):
        for name, criterion in CRITERIA.items():
            times[name].append(seconds(criterion, logits, ids))
    for name, criterion in CRITERIA.items():
        ledger = StorageLedger()
        ledger.tag((logits, ids), "arguments")
        with ledger:
            seconds(criterion, logits, ids)
        (phases,) = ledger.peaks().values()
        mib = max(sum(peak.values()) - peak["arguments"] for peak in phases.values()) / 2**20
        ratio = statistics.median(own / ce for own, ce in zip(times[name][1:], times["ce"][1:], strict=True))
        print(f"{name:22} {1e3 * statistics.median(times[name][1:]):6.0f} ms  x {ratio:.1f}  {mib:6.1f} MiB")
