"""The plan chooses what is computed again: what fits, what it costs, and what a run does with it."""

import json

import pytest

from tests.support.runs import segapp

EOMT = [
    "model.encoder=tu-vit_large_patch16_dinov3",
    "model.options={num_queries: 100, num_blocks: 4}",
]


def planned(config, gpus, *overrides, cwd=None):
    done = segapp("plan", "--config", config, "--gpus", gpus, "--fit", "--json", *overrides, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def of(plan, batch, recompute):
    return next((fit for fit in plan["fits"] if (fit["batch_size"], fit["recompute"]) == (batch, recompute)), None)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_eomt_vit_l_trains_batches_of_16_on_24_gib(capsys):
    """By accumulation; the step takes at most 1.35 times that of a card on which the whole batch fits."""
    plan = planned("cityscapes-eomt-vits.yaml", "24GiB", *EOMT)
    fastest, whole = plan["fastest"], of(plan, 16, "off")
    assert fastest["fits"]
    assert fastest["batch_size"] * fastest["accumulate"] == 16
    assert fastest["step_s"] < 1.35 * whole["step_s"]
    assert max(whole["peak_mib"]) > 100_000
    with capsys.disabled():
        show(plan)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_deeplabv3_r101_trains_batches_of_8_on_two_11_gib(capsys):
    plan = planned("cityscapes.yaml", "2x11GiB", "model.name=deeplabv3_resnet101", "data.crop_px=[769,769]")
    chosen, every, nothing = (of(plan, 8, name) for name in ("chosen", "all", "off"))
    assert chosen["fits"]
    assert not nothing["fits"]
    assert nothing["step_s"] < chosen["step_s"] < every["step_s"]
    assert max(every["peak_mib"]) < max(chosen["peak_mib"]) <= 11264
    with capsys.disabled():
        show(plan)


def show(plan):
    first = plan["fits"][0]["step_s"]
    for fit in plan["fits"]:
        sets = "/".join(str(len(each)) for each in fit["sets"])
        peaks = ", ".join(f"{mib:.0f}" for mib in fit["peak_mib"])
        print(
            f"  {fit['batch_size']:3d} x {fit['accumulate']:2d} {fit['recompute']:6s} ({sets} blocks) {fit['split']} "
            f"{peaks} MiB, time {fit['step_s'] / first:.3f}, {'fits' if fit['fits'] else 'does not fit'}"
        )
    print("  ", plan["fastest"] and plan["fastest"]["words"])
