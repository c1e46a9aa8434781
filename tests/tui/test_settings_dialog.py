"""The dialog of the live settings: each value is checked alone, and what is sent changes that setting only."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from segapp.tui.app import MonitorApp
from segapp.tui.dialogs import SettingScreen
from tests.support.recorded_runs import RecordedRun, folded
from tests.support.screens import press, run_screen, screen_text
from tests.tui.test_screen import sent

CASES = [
    ("gpu0_bsz", " 2 ", {"gpu0_bsz": 2}, "split 2·10·10·10"),
    ("gpu0_bsz", "none", {"gpu0_bsz": None}, "split 8·8·8·8"),
    ("gpu0_bsz", "2 lr_factor=0.001", None, "write a whole number"),
    ("gpu0_bsz", "99999999999999999999", None, "gpu0_bsz=99999999999999999999: write a whole number"),
    ("gpu0_bsz", "33", None, "refused: gpu0_bsz=33 is more than the batch of 32"),
    ("shares", "5,8,9,10", {"shares": [5, 8, 9, 10]}, "split 5·8·9·10"),
    ("shares", "5,8,9", None, "refused"),
    ("shares", "5,8,9,11", None, "refused"),
    ("lr_factor", "0.25", {"lr_factor": 0.25}, "the scheduled learning rate times 0.25, now times 1"),
    ("lr_factor", "0", None, "lr_factor=0: write a number above 0, at most 100"),
    ("lr_factor", "1; stop", None, "write a number above 0"),
    ("recompute", "all", {"recompute": "all"}, "not predicted"),
    ("recompute", "some", None, "recompute=some: write off, all, or config"),
]


@pytest.mark.parametrize(("name", "text", "changes", "words"), CASES)
def test_value_is_checked_by_the_rules_of_its_setting(
    tmp_path: Path, name: str, text: str, changes: dict[str, object] | None, words: str
) -> None:
    run = RecordedRun(tmp_path / "run")
    run.epoch()
    command, meaning = SettingScreen(folded(run), ["recompute", name][name == "recompute" :]).check("x")
    assert command is None
    assert meaning.startswith("recompute=x"), "the first setting is shown first"
    command, meaning = SettingScreen(folded(run), [name]).check(text)
    assert (None if command is None else command.changes) == changes
    assert words in meaning


def test_dialog_goes_through_the_settings_of_the_run(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        titles = []
        await press(app, pilot, "b")
        for _ in range(5):
            titles.append(next(row for row in screen_text(app).splitlines() if " is " in row).split("─")[1].strip())
            await press(app, pilot, "down")
        assert titles == ["gpu0_bsz is 4", "shares is 4·10·9·9", "lr_factor is 1.0", "recompute is config", titles[0]]
        await press(app, pilot, *"0.5")  # of shares, as the text of another setting is gone
        assert "shares=['0.5']" in screen_text(app) or "write one whole number" in screen_text(app)
        await press(app, pilot, "down", *"0.5", "enter")
        await press(app, pilot, "b", "up", *"off", "enter")
        assert sent(fresh) == ["set lr_factor=0.5", "set recompute=off"]

    run_screen(fresh, act)


def test_run_on_one_device_offers_no_split(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", num_devices=1)
    run.epoch()
    run.shift_to_now()
    run.hold()

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        assert "b lr_factor" in screen_text(app), "the key names the setting that it opens"
        await press(app, pilot, "b")
        assert "lr_factor is 1.0" in screen_text(app)
        await press(app, pilot, "down")
        assert "recompute is config" in screen_text(app)
        await press(app, pilot, "down")
        assert "lr_factor is 1.0" in screen_text(app)

    run_screen(run, act)
    run.folder.release()
