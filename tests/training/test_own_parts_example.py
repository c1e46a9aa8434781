"""The example of own parts in the repository: on the demo data, with splits that agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from segapp.config import load_config
from tests.support.runs import alerts, events, train


@pytest.mark.usefixtures("repository_root")
def test_example_trains_alike_on_one_and_two_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "none"))
    short = ["train.steps=6", "log.every_steps=1", "log.tensorboard=false", "eval.every_epochs=100"]
    dp = ["parallel.mode=dp", "parallel.devices=[cpu,cpu]"]
    splits = {"one": [], "even": dp, "uneven": [*dp, "parallel.gpu0_bsz=1"], "none": [*dp, "parallel.gpu0_bsz=0"]}
    losses = {}
    for name, words in splits.items():
        assert train(load_config("segapp/docs/examples/own_parts.yaml", [*short, *words]), tmp_path / name) == 0
        losses[name] = [event["loss"] for event in events(tmp_path / name, "step")]
        assert alerts(tmp_path / name) == []
        assert (tmp_path / name / "parts" / "own_parts.py").is_file()
    assert len(losses["one"]) == 6
    assert losses["one"][-1] < losses["one"][0]
    for name in ("even", "uneven", "none"):
        assert losses[name] == pytest.approx(losses["one"], rel=2e-4)
