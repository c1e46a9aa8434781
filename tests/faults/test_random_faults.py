"""Random faults on random configs: nothing promised is lost, every end has its exit code (F26).

`SEGAPP_FAULT_MINUTES` says for how long (default 60); `SEGAPP_FAULT_SEED` repeats one round: its config, its faults and
their moments.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import time
from collections.abc import Callable

import pytest

from tests.support.fault_runs import FaultRun, Invariants, case
from tests.support.random_faults import KINDS, Campaign, plan_round

MINUTES = float(os.environ.get("SEGAPP_FAULT_MINUTES", "60"))
ONE_SEED = os.environ.get("SEGAPP_FAULT_SEED")


def carry_out(campaign: Campaign, new_run: Callable[..., FaultRun], seed: int) -> None:
    """One round; a failure names its seed."""
    each = plan_round(seed)
    print(each, flush=True)
    run = new_run(f"round-{seed}", **each.sections)
    try:
        campaign.carry_out(each, run)
    except BaseException as error:
        error.add_note(f"repeat it with {each}")
        raise
    shutil.rmtree(run.work)


def test_seed_determines_config_faults_and_moments() -> None:
    random.seed(1)
    first = [plan_round(seed) for seed in range(200)]
    random.seed(2)
    assert first == [plan_round(seed) for seed in range(200)]
    assert len({str(each.sections) for each in first}) > 150
    assert {fault.kind for each in first for fault in each.faults} == set(KINDS)


@pytest.mark.faults_long
@pytest.mark.timeout(2 * 3600)
@case(
    "F02",
    how="random kills, full and slow disks, SIGSTOPs, clock jumps, removed and corrupted files on random configs",
    passes="nothing promised lost, every end has its exit code, exact at the end",
)
def test_random_faults_lose_nothing_that_was_promised(
    new_run: Callable[..., FaultRun], invariants: Invariants, record_property: Callable[[str, object], None]
) -> None:
    campaign, end_s = Campaign(invariants), time.monotonic() + 60 * MINUTES
    if ONE_SEED is not None:
        carry_out(campaign, new_run, int(ONE_SEED))
    while ONE_SEED is None and time.monotonic() < end_s:
        carry_out(campaign, new_run, secrets.randbits(32))
        print(campaign.figure(), flush=True)
    record_property("figure", f"{MINUTES:g} min: {campaign.figure()}" if ONE_SEED is None else campaign.figure())
