"""Out of memory is answered by recomputation first: the same course, kept by resumes, undone by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from segapp import failpoints
from segapp.config import RunConfig
from segapp.errors import RunError
from segapp.models import SegmentationModel
from segapp.models.blocks import find_blocks
from segapp.run.folder import RunFolder
from segapp.session.request import TrainRequest
from segapp.session.session import run_session
from segapp.training import inbox
from segapp.training.live.apply import RecomputableBlocks
from segapp.training.step import assembler
from tests.support.fault_table import case
from tests.support.live_runs import small
from tests.support.runs import differing, events, final_state, merged, resume, train
from tests.support.scripted_runs import Sender
from tests.training.test_resume import course


@pytest.fixture(autouse=True)
def _each_poll(logical_budgets: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "POLL_S", 0.0)


@pytest.fixture(scope="module")
def undisturbed(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    """Two epochs of five steps on one device, with memory enough."""
    config, folder = small(base, 2), tmp_path_factory.mktemp("undisturbed") / "run"
    assert train(config, folder) == 0
    return config, folder


def assert_same_course(folder: Path, reference: Path) -> None:
    """Compares losses, gradients, evaluations and the last state with its BatchNorm statistics, bit by bit."""
    assert course(folder) == course(reference)
    parts = ("/model", "/optimizer", "/rng")
    assert [path for path in differing(final_state(folder), final_state(reference)) if path.startswith(parts)] == []


def adopted(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    return [(e["step"], e["fallbacks"]) for e in events(folder, "settings") if "fallbacks" in e]


def choices(folder: Path) -> list[tuple[int, str, str, list[int]]]:
    """Step, choice, reason and number of recomputed blocks on each device, of each change."""
    return [
        (e["step"], e["recompute"], e["reason"], [len(names) for names in e["blocks"]])
        for e in events(folder, "settings")
        if "blocks" in e
    ]


def test_a_step_out_of_memory_recomputes_all_blocks(undisturbed: tuple[RunConfig, Path], tmp_path: Path) -> None:
    config, reference = undisturbed
    failpoints.arm("train.backward=2:oom")
    assert train(config, tmp_path / "run") == 0
    assert_same_course(tmp_path / "run", reference)
    (oom,) = events(tmp_path / "run", "oom")
    assert adopted(tmp_path / "run") == [(1, {"is_recomputed": True})]
    assert "all 5 blocks recomputed" in oom["action"]
    assert "the same gradients and BatchNorm statistics, in about a third more time" in oom["action"]
    assert choices(tmp_path / "run") == [(1, "all", "out of memory", [5])]
    assert events(tmp_path / "run", "settings")[0]["num_blocks"] == 5
    state = final_state(tmp_path / "run")
    assert (state["live"]["settings"]["is_recomputed"], state["live"]["settings"]["recompute"]) == (True, "all")


@case("N05", how="out of memory, a crash before the next save, a resume", passes="the same course as without the crash")
@pytest.mark.slow
def test_resumes_keep_the_rung_until_a_command_undoes_it(undisturbed: tuple[RunConfig, Path], tmp_path: Path) -> None:
    """Out of memory and a crash in epoch 1, off from epoch 2 on, a crash there, and out of memory once more."""
    config, reference = undisturbed
    folder = tmp_path / "run"
    failpoints.arm("train.backward=2:oom;train.step=4:raise:RuntimeError")
    with pytest.raises(RunError, match="failpoint"):
        train(config, folder)
    failpoints.arm("train.step=8:raise:RuntimeError")
    with pytest.raises(RunError, match="failpoint"):  # anew, because nothing was saved
        run_session(TrainRequest(config, RunFolder(folder)), listener=Sender(folder, {1: ("set recompute=off",)}))
    assert choices(folder) == [*[(1, "all", "out of memory", [5])] * 2, (5, "off", "by hand", [0])]
    failpoints.arm("train.backward=3:oom")
    assert resume(config, folder) == 0  # from step 5 on
    assert_same_course(folder, reference)
    assert choices(folder)[3:] == [
        (5, "all", "out of memory", [5]),
        (5, "off", "by hand", [0]),
        (7, "all", "out of memory", [5]),
    ]
    answers = [(e["status"], e["step"], e["reason"]) for e in events(folder, "command")]
    assert answers == [
        ("accepted", 1, "from epoch 2 on, with no blocks recomputed in the backward pass"),
        ("applied", 5, "no blocks recomputed in the backward pass"),
    ]
    assert [oom["step"] for oom in events(folder, "oom")] == [1, 7]


@pytest.mark.slow
def test_blocks_that_count_their_passes_are_cut_in_pieces(
    undisturbed: tuple[RunConfig, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block with a buffer that each pass changes cannot be computed again: the rung is taken back."""
    original = assembler.build_network

    def counting(*args: Any, **kwargs: Any) -> SegmentationModel:
        model = original(*args, **kwargs)
        block = model.get_submodule(next(iter(find_blocks(model))))
        block.register_buffer("passes", torch.zeros(()))
        next(block.children()).register_forward_pre_hook(lambda *_: block.passes.add_(1) and None)
        return model

    monkeypatch.setattr(assembler, "build_network", counting)
    config = merged(undisturbed[0].model_dump(mode="json"), train={"batch_size": 4, "epochs": 1})
    failpoints.arm("train.backward=1:oom*2")
    assert train(config, tmp_path / "run") == 0
    assert adopted(tmp_path / "run") == [(0, {"is_recomputed": True}), (0, {"num_pieces": 2})]
    (alert,) = [alert for alert in events(tmp_path / "run", "alert") if alert["kind"] == "recompute"]
    assert "passes is a buffer that each forward pass changes" in alert["message"]
    assert choices(tmp_path / "run")[-1] == (0, "config", "train.recompute", [0])


def test_compiled_and_blockless_networks_have_no_rung() -> None:
    layers = RecomputableBlocks(nn.Sequential(nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1)))
    assert (layers.problem, layers.has_kept("config")) == ("the model has no blocks", False)
    blocks = nn.Sequential(*(nn.TransformerEncoderLayer(4, 1, 4) for _ in range(2)))
    assert RecomputableBlocks(blocks).has_kept("config")
    compiled = RecomputableBlocks(blocks, problem="train.compile is on")
    assert (compiled.problem, compiled.has_kept("config")) == ("train.compile is on", False)
