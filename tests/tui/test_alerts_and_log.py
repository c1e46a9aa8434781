"""Alerts that stay until they are seen, whole events, the event log, trainer.log, and what reaches the terminal."""

from __future__ import annotations

import re
from pathlib import Path

from textual.pilot import Pilot
from textual.widgets import OptionList

from segapp.run.events import Alert, EpochStart
from segapp.tui.app import MonitorApp
from segapp.view.source import LiveSource, LogTail
from segapp.view.view import NUM_WHOLE_EVENTS, EventFold, View
from tests.support.recorded_runs import RecordedRun, folded
from tests.support.screens import press, run_screen, screen_text, settle

DISK_FULL = (
    "cannot write a checkpoint in /data/runs/camvid/checkpoints: no space left on device: 117 MB are needed and 9 MB "
    "are free: delete files, or choose another folder with --run"
)


def test_alert_stays_in_the_banner_until_it_is_seen(fresh: RecordedRun) -> None:
    kinds = ["checkpoint", "storage", "hang", "grace", "oom", "reverted", "non_finite", "disk"]
    for kind in ["compile", *kinds[:-1]]:
        fresh.alert(kind, f"{kind} message")
    assert list(folded(fresh).alerts) == kinds[:-1], "others are only logged"
    assert folded(fresh).log[-len(kinds)].text == "compile message"
    fresh.alert(kinds[-1], DISK_FULL)

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        for _ in range(2):
            text = screen_text(app)
            assert "disk: cannot write" in text
            assert "choose another folder with --run" in " ".join(text.split())  # the remedy, behind a line break
            fresh.train(3)
            await settle(app, pilot)
        for kind in reversed(kinds):
            assert f"{kind}: " in screen_text(app).split("4 Events")[0], kind
            await press(app, pilot, "a")
            assert f"{kind}: " not in screen_text(app).split("4 Events")[0], kind
        assert "a dismiss" not in screen_text(app)

    run_screen(fresh, act)


def test_alerts_count_and_come_back_after_they_are_seen(fresh: RecordedRun) -> None:
    for kind in ("checkpoint", "hang", "checkpoint", "checkpoint"):
        fresh.alert(kind, f"{kind} message")

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        assert "checkpoint (3 times): checkpoint message  a dismiss, d details  1 more" in screen_text(app)
        await press(app, pilot, "a")
        assert "hang: hang message  a dismiss, d details" in screen_text(app)
        assert " more" not in screen_text(app)
        await press(app, pilot, "escape")
        assert "hang: hang message" in screen_text(app), "esc closes what the user has opened, and no alert"
        await press(app, pilot, "a")
        assert "a dismiss" not in screen_text(app)
        fresh.clock.now_s += 600
        fresh.alert("hang", "no progress for 1200 s")
        await settle(app, pilot)
        assert "hang (2 times): no progress for 1200 s" in screen_text(app)

    run_screen(fresh, act)


def test_dismissed_alert_stays_dismissed(fresh: RecordedRun, tmp_path: Path) -> None:
    fact = "classes without a pixel in the training images: pole, sign; the model cannot learn them" + " and so on" * 20
    fresh.alert("classes", fact)
    fresh.alert("hang", "no progress")

    async def dismiss(app: MonitorApp, pilot: Pilot[None]) -> None:
        assert "hang: no progress" in screen_text(app)
        await press(app, pilot, "a")
        banner = screen_text(app).split("1 Loss")[0]
        assert "classes: classes without a pixel" in banner
        assert len(banner.splitlines()) == 4, "a fact takes one line"
        await press(app, pilot, "a")
        assert "a dismiss" not in screen_text(app)

    async def see(app: MonitorApp, pilot: Pilot[None]) -> None:
        assert "a dismiss" not in screen_text(app)
        fresh.clock.now_s += 60
        fresh.write_start(resumed_from_step=20)
        fresh.alert("classes", fact)
        fresh.train(3)
        await settle(app, pilot)
        assert "a dismiss" not in screen_text(app), "each start repeats what is known of the data"
        fresh.alert("hang", "no progress")
        await settle(app, pilot)
        assert "hang (2 times): no progress" in screen_text(app), "that is another one"
        fresh.alert("classes", "classes without a pixel in the training images: car")
        await settle(app, pilot)
        assert "car" in screen_text(app).split("1 Loss")[0]

    async def see_other(app: MonitorApp, pilot: Pilot[None]) -> None:
        assert "classes: classes without a pixel" in screen_text(app)

    run_screen(fresh, dismiss)
    run_screen(fresh, see)
    other = RecordedRun(tmp_path / "other", steps_per_epoch=20)
    other.epoch()
    other.alert("classes", fact)
    run_screen(other, see_other)


def test_beginnings_of_epochs_are_one_line_that_counts(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", steps_per_epoch=2, epochs=400)
    for _ in range(3):
        run.epoch(val=False)
    run.epoch()

    def epochs(app: MonitorApp) -> list[str]:
        return re.findall(r"epoch (\d+) begins", screen_text(app))

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        assert epochs(app) == ["4"]
        await press(app, pilot, "4", "up")
        selected = app.columns.events.selected
        assert selected is not None
        assert selected.kind == "val"
        run.epoch(val=False)
        await settle(app, pilot)
        assert epochs(app) == ["5"]
        assert app.columns.events.selected == selected
        assert [line.kind for line in app.shown.view.log] == ["start", "val", "best", "epoch"]
        run.write(EpochStart(epoch=6, lr=0.01, step=run.step, num_unfrozen=2_000_000))
        run.write(EpochStart(epoch=7, lr=0.01, step=run.step))
        await settle(app, pilot)
        assert epochs(app) == ["7"]
        assert ["2.0 M frozen parameters are unfrozen" in line.text for line in app.shown.view.log[-2:]] == [
            True,
            False,
        ]

    run_screen(run, act)


def test_log_follows_its_end_through_bursts(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", steps_per_epoch=2, epochs=400)
    for _ in range(30):
        run.epoch()

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        assert "30 begins" not in screen_text(app).splitlines()[-2]
        for burst in (1, 3, 20):
            for i in range(burst):
                run.alert("compile", f"note {burst} {i}")
            await settle(app, pilot)
            assert f"note {burst} {burst - 1}" in screen_text(app)
        await press(app, pilot, "4", "up", "up")
        run.alert("compile", "unseen note")
        await settle(app, pilot)
        assert "unseen note" not in screen_text(app)
        for i in range(12):
            run.alert("compile", f"later note {i}")
        await settle(app, pilot)
        await settle(app, pilot)
        assert "─ 13 newer, End ─" in screen_text(app)
        await press(app, pilot, "end")
        assert "newer" not in screen_text(app)
        await press(app, pilot, "slash", *"note", "enter")
        assert "later note 11" in screen_text(app), "what is found begins at its end"
        await press(app, pilot, "escape")
        run.alert("compile", "last note")
        await settle(app, pilot)
        assert "last note" in screen_text(app)

    run_screen(run, act)


def test_log_is_searched_for_texts_and_kinds(fresh: RecordedRun) -> None:
    fresh.alert("hang", "no progress")

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        lines = app.query_one("#event-lines", OptionList)
        await press(app, pilot, "4", "f")
        assert lines.size.height > 25
        await press(app, pilot, "f", "slash", *"MIOU", "enter")
        assert lines.option_count == 1
        assert "/MIOU 1 of" in screen_text(app)
        await press(app, pilot, "escape", "slash", *"val", "enter")  # the word in front of the line of an evaluation
        assert "/val 1 of" in screen_text(app)
        await press(app, pilot, "escape", "slash", *"alert", "enter")
        assert lines.option_count == 1
        assert "no progress" in screen_text(app).split("4 Events")[1]
        await press(app, pilot, "enter")
        assert "type: alert" in screen_text(app)
        await press(app, pilot, "escape")
        assert len(app.screen_stack) == 1

    run_screen(fresh, act)


def test_long_log_keeps_the_last_events_whole() -> None:
    view = View()
    EventFold(view).add([Alert(kind="compile", message=f"note {i}", t=i, seq=i).model_dump() for i in range(1500)])
    assert 1000 <= len(view.log) <= 1200
    assert view.log[-1].text == "note 1499"
    assert sum(line.event is not None for line in view.log) == NUM_WHOLE_EVENTS


def test_run_is_busy_and_not_crashed_while_it_is_read(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run")
    run.train(1)
    run.end()
    first, step, *rest = run.folder.events.read_text().splitlines(keepends=True)
    run.folder.events.write_text("".join([first, *[step] * 8000, *rest]))
    clock = iter(range(10**6))
    source, states = LiveSource(run.folder, monotonic=lambda: float(next(clock))), []  # one block in each poll
    while source.poll():
        states.append(source.status())
    assert {status.state for status in states} == {"busy"}
    assert all(status.loaded_frac < 1 for status in states)
    assert source.status().state == "finished"
    info = run.folder.read_info()
    assert info is not None
    assert (source.status().pid, source.status().host) == (info.process.pid, info.process.host)


def test_tail_reads_whole_lines_of_the_end_only(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail(path, max_bytes=100)
    assert tail.read() == []
    path.write_bytes(b"".join(b"line %03d\n" % i for i in range(50)) + b"half")
    assert tail.read()[-1] == "line 049"
    with path.open("ab") as file:
        file.write(b" and half\n\xff\xfe\n")
    first, second = tail.read()
    assert first == "half and half"
    assert "�" in second or "\\x" in second
    path.write_bytes(b"new\n")
    assert tail.read() == ["new"]
    for text in ("a", "b", "c", "d\n"):  # of a long line, the end is kept
        with path.open("a") as file:
            file.write(text.rjust(90, "-"))
        lines = tail.read()
    assert [line.strip("-") for line in lines] == ["b" + "-" * 89 + "c" + "-" * 88 + "d"]
