"""The examples under `segapp/docs/examples`: short, and exact on three logical devices."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from segapp.docs.pages import FOLDER

SCRIPTS = sorted((FOLDER / "examples").glob("*.py"))


def output_of(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a script as a program, and return what it prints."""
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(FOLDER / "examples" / name), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_examples_are_short(path: Path) -> None:
    assert len(SCRIPTS) == 3
    assert len(path.read_text().splitlines()) <= 60


def test_balanced_data_parallel_has_the_loss_of_one_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = output_of("balanced_data_parallel.py", monkeypatch, capsys)
    assert "split of 8 images: 1 4 3" in shown
    losses = [(float(a), float(b)) for a, b in re.findall(r"([\d.]+) on several devices ([\d.]+) on one", shown)]
    assert len(losses) == 4
    assert all(several == pytest.approx(one, abs=2e-5) for several, one in losses)
    assert losses[-1][0] < 0.6 * losses[0][0]


def test_critic_has_the_penalty_of_one_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = output_of("wgan_gp.py", monkeypatch, capsys)
    penalties = [(float(a), float(b)) for a, b in re.findall(r"penalty ([\d.]+), on one device ([\d.]+)", shown)]
    assert len(penalties) == 4
    assert all(several == pytest.approx(one, rel=1e-4) for several, one in penalties)
    assert float(re.findall(r"distance (-?[\d.]+)", shown)[-1]) > 0.01
