"""The plan chooses what is computed again: what fits, and what a run does with it."""

import json
from dataclasses import replace

import pytest

from segapp.memory.plan import SavedMemoryPlan, read_saved_plan
from segapp.run.folder import RunFolder
from segapp.training.step import assembler
from tests.support import ROOT
from tests.support.budgets import use_plan
from tests.support.runs import UNET, events, losses, merged, resume, segapp, train


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_deeplabv3_r101_trains_batches_of_8_on_two_11_gib():
    words = ("plan", "--config", "cityscapes.yaml", "--gpus", "2x11GiB", "--json", "model.name=deeplabv3_resnet101")
    plans = {}
    for recompute in ("off", "auto", "all"):
        own = ("data.crop_px=[769,769]", "train.precision=fp32", f"train.recompute={recompute}")
        done = segapp(*words, *own, cwd=ROOT, timeout_s=900)
        assert done.returncode == 0, done.stderr
        plans[recompute] = json.loads(done.stdout)
    peaks = {recompute: max(plan["current"]["peak_mib"]) for recompute, plan in plans.items()}
    assert peaks["all"] < peaks["auto"] <= 11264 < peaks["off"]
    assert {len(names) for names in plans["auto"]["recompute"]} == {29}, "of 33"
    assert "the memory plan chose 29/29 blocks to recompute" in plans["auto"]["notes"][-1]


def two_devices(tiny, **sections):
    parallel = {"mode": "dp", "devices": ["cpu", "cpu"], **sections.pop("parallel", {})}
    train_section = {"epochs": 1, "batch_size": 4, "recompute": "auto", **sections.pop("train", {})}
    return merged(tiny, model=UNET, train=train_section, parallel=parallel, eval={"every_epochs": 9}, **sections)


@pytest.fixture
def seen_blocks(monkeypatch):
    """The blocks that each engine of this test computes again."""
    seen, own = [], assembler.set_recompute

    def spy(model, sets, *others):
        own(model, sets, *others)
        seen.append(tuple(map(tuple, sets)))

    monkeypatch.setattr(assembler, "set_recompute", spy)
    return seen


@pytest.mark.usefixtures("logical_budgets")
def test_run_takes_its_blocks_from_the_saved_plan(tiny, tmp_path, monkeypatch, seen_blocks, capsys):
    """Also when it is resumed and when gpu0_bsz is another, and with the losses of a run without."""
    blocks = ((), ("encoder.model.layer1.0",))
    planned = SavedMemoryPlan(4, 1, 2, (2, 2), ((2, 2),), ((10.0, 10.0),), 1.0, recompute=blocks)
    planned = replace(planned, notes=("its first note", "its last note"))
    folder = RunFolder.create(path=tmp_path / "run")
    use_plan(monkeypatch, planned)
    budgets = {"memory_budget_mib": [500.0, 500.0]}
    assert train(two_devices(tiny, parallel=budgets), folder.path) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line in planned.notes] == [*planned.notes]
    for number, gpu0_bsz in enumerate((None, 1), start=2):
        config = two_devices(tiny, parallel={"gpu0_bsz": gpu0_bsz, **budgets}, train={"epochs": number})
        assert resume(config, folder.path) == 0
    assert seen_blocks == [blocks] * 3
    assert [event["recompute"] for event in events(folder.path, "settings")] == ["config"] * 3  # one for each start
    assert read_saved_plan(folder.saved_plan) == planned
    assert train(two_devices(tiny, train={"recompute": "off"}), tmp_path / "whole") == 0
    assert losses(folder.path)[:2] == losses(tmp_path / "whole")


def test_unknown_memory_computes_nothing_again_and_says_so(tiny, tmp_path, seen_blocks, capsys):
    assert train(merged(tiny, model=UNET, train={"epochs": 1, "recompute": "auto"}), tmp_path / "run") == 0
    assert not any(map(any, seen_blocks))
    assert "train.recompute = auto: the memory of the devices is unknown" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_rank_takes_its_own_blocks(tiny, tmp_path):
    blocks = (("encoder.model.layer1.0",), ("encoder.model.layer2.0",))
    folder = RunFolder(tmp_path / "run")
    assert train(two_devices(tiny), folder.path) == 0
    SavedMemoryPlan(4, 1, None, (2, 2), ((2, 2),), ((10.0, 10.0),), 1.0, recompute=blocks).write(folder.saved_plan)
    words = "--resume", "run", "parallel.mode=ddp", "train.epochs=2"
    done = segapp("train", *words, cwd=tmp_path, timeout_s=500)
    assert done.returncode == 0, done.stderr
    assert events(folder.path, "settings")[-1]["blocks"] == [list(names) for names in blocks]
