"""The plan chooses what is computed again: what fits, what it costs, and what a run does with it."""

import json

import pytest

from segapp.config import dump_config
from segapp.memory.plan import SavedMemoryPlan, read_saved_plan
from segapp.planning.plan import _short_names
from segapp.run.folder import RunFolder
from segapp.session.request import TrainRequest
from segapp.session.session import run_session
from segapp.training.step import assembler
from tests.support import ROOT
from tests.support.runs import events, merged, segapp, train

FP32 = "train.precision=fp32"
EOMT = [
    "model.encoder=tu-vit_large_patch16_dinov3",
    "model.options={num_queries: 100, num_blocks: 4}",
]


def planned(config, gpus, *overrides):
    done = segapp("plan", "--config", config, "--gpus", gpus, "--fit", "--json", *overrides, cwd=ROOT, timeout_s=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def of(plan, batch, recompute):
    return next((fit for fit in plan["fits"] if (fit["batch_size"], fit["recompute"]) == (batch, recompute)), None)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_eomt_vit_l_trains_batches_of_16_on_24_gib():
    """By accumulation; the step takes at most 1.35 times that of a card on which the whole batch fits."""
    plan = planned("cityscapes-eomt-vits.yaml", "24GiB", *EOMT)
    fastest, whole = plan["fastest"], of(plan, 16, "off")
    assert fastest["fits"]
    assert fastest["batch_size"] * fastest["accumulate"] == 16
    assert fastest["step_s"] < 1.35 * whole["step_s"]
    assert max(whole["peak_mib"]) > 100_000


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_deeplabv3_r101_trains_batches_of_8_on_two_11_gib():
    plan = planned("cityscapes.yaml", "2x11GiB", "model.name=deeplabv3_resnet101", "data.crop_px=[769,769]", FP32)
    chosen, every, nothing = (of(plan, 8, name) for name in ("chosen", "all", "off"))
    assert chosen["fits"]
    assert not nothing["fits"]
    assert nothing["step_s"] < chosen["step_s"] < every["step_s"]
    assert max(every["peak_mib"]) < max(chosen["peak_mib"]) <= 11264


UNET = {
    "library": "smp",
    "name": "Unet",
    "encoder": "tu-test_resnet",
    "options": {"encoder_depth": 3, "decoder_channels": [16, 8, 8]},
}


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
def test_run_takes_its_blocks_from_the_saved_plan(tiny, tmp_path, seen_blocks):
    """Also when it is resumed and when gpu0_bsz is another, and with the losses of a run without."""
    blocks = (("encoder.model.layer1.0",), ())
    planned = SavedMemoryPlan(4, 1, 2, (2, 2), ((2, 2),), ((10.0, 10.0),), 1.0, recompute=blocks)
    folder = RunFolder.create(path=tmp_path / "run")
    planned.write(folder.saved_plan)
    budgets = {"memory_budget_mib": [500.0, 500.0]}
    assert train(two_devices(tiny, parallel=budgets), folder.path) == 0
    for number, gpu0_bsz in enumerate((None, 1), start=2):
        config = two_devices(tiny, parallel={"gpu0_bsz": gpu0_bsz, **budgets}, train={"epochs": number})
        assert run_session(TrainRequest(config, RunFolder(folder.path))) == 0
    assert seen_blocks == [blocks] * 3
    assert [event["choice"] for event in events(folder.path, "recompute")] == ["config"] * 3  # one for each start
    assert read_saved_plan(folder.saved_plan) == planned
    assert train(two_devices(tiny, train={"recompute": "off"}), tmp_path / "whole") == 0
    losses = [[event["loss"] for event in events(each, "step")] for each in (folder.path, tmp_path / "whole")]
    assert losses[0][:2] == losses[1]


def test_unknown_memory_computes_nothing_again_and_says_so(tiny, tmp_path, seen_blocks, capsys):
    assert train(merged(tiny, model=UNET, train={"epochs": 1, "recompute": "auto"}), tmp_path / "run") == 0
    assert not any(map(any, seen_blocks))
    assert "train.recompute = auto: the memory of the devices is unknown" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_rank_takes_its_own_blocks(tiny, tmp_path):
    blocks = (("encoder.model.layer1.0",), ("encoder.model.layer2.0",))
    folder = RunFolder.create(path=tmp_path / "run")
    SavedMemoryPlan(4, 1, None, (2, 2), ((2, 2),), ((10.0, 10.0),), 1.0, recompute=blocks).write(folder.saved_plan)
    (tmp_path / "ddp.yaml").write_text(dump_config(two_devices(tiny, parallel={"mode": "ddp"})))
    done = segapp("train", "--config", "ddp.yaml", "--run", str(folder.path), cwd=tmp_path, timeout_s=500)
    assert done.returncode == 0, done.stderr
    assert [event["blocks"] for event in events(folder.path, "recompute")] == [[list(names) for names in blocks]]


def test_modules_with_chosen_blocks_alone_are_named_whole() -> None:
    blocks = [f"a.{stage}.{block}" for stage in (1, 2) for block in (0, 1, 10)]
    assert _short_names(blocks, blocks) == ("a",)
    assert _short_names([*blocks[:3], "a.2.1"], blocks) == ("a.1", "a.2.1")
