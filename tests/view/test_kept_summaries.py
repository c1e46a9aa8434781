"""Kept summaries: always what the events say, made anew when in doubt, and never in the way of a run."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from segapp.run.events import CommandAnswer, EventReader, EventWriter, Val
from segapp.run.folder import RunFolder
from segapp.view import runs as view_runs
from segapp.view.runs import differing_settings, facts_of, list_runs, read_kept, read_settings, summarize
from segapp.view.source import fold_file
from segapp.view.view import EventFold, View
from tests.support.recorded_runs import RecordedRun


@pytest.fixture(autouse=True)
def _events_settle_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_runs, "_SETTLED_S", -60.0)


@pytest.fixture
def lines_read(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The lines of events that any reader has read."""
    found, read = list[bytes](), EventReader._lines

    def counted(self: EventReader, max_bytes: int | None) -> Iterator[bytes]:
        for line in read(self, max_bytes):
            found.append(line)
            yield line

    monkeypatch.setattr(EventReader, "_lines", counted)
    return found


def eventful(path: Path, epochs: int = 3, steps_per_epoch: int = 4) -> RecordedRun:
    """Return a run with commands, alerts, evaluations, and a resume that repeats steps."""
    run = RecordedRun(path, steps_per_epoch=steps_per_epoch, epochs=epochs + 3, num_devices=2, classes=["a", "b", "c"])
    for epoch in range(epochs):
        run.epoch()
        run.beat(("eval", "paused", "save")[epoch % 3])
    run.change_gpu0(3)
    run.alert("classes", "b has no pixel")
    run.write_start(resumed_from_step=run.step - 2)
    run.step -= 2
    run.train(3)
    run.write(CommandAnswer(id="f" * 12, command="stop epoch", by="bob@there", status="accepted"))
    run.change_gpu0(2, apply=False, command_id="0000000000aa")
    run.epoch()
    run.end("stopped", "by hand")
    return run


def said(path: Path) -> dict[str, Any]:
    """What the events of a run say, read again."""
    view = View()
    fold_file(view, path / "events.jsonl")
    found: dict[str, Any] = json.loads(json.dumps(facts_of(view)))
    return found | {"settings": read_settings(RunFolder(path))}


def shown(path: Path) -> dict[str, Any]:
    """What the summary of a run says."""
    summary = summarize(path)
    names = ("shown", "figures", "times", "curves", "settings")
    return {name: getattr(summary, name) for name in names}


def test_every_prefix_of_the_events_has_its_summary(tmp_path: Path) -> None:
    """The file grows line by line, by half lines in between; each summary is made, kept, and used once."""
    whole = eventful(tmp_path / "whole").folder.events.read_bytes().splitlines(keepends=True)
    run = RunFolder.create(path=tmp_path / "run")
    run.write_info()
    run.write_config("name: a\noptim: {lr: 0.014}\n")
    states, pending = set(), {}
    with run.events.open("ab", buffering=0) as file:
        for line in whole:
            for part in (line[: len(line) // 2], line[len(line) // 2 :]):
                file.write(part)
                before, expected = read_kept(run), said(run.path)
                assert before is None, "it was made from a shorter file"
                assert shown(run.path) == expected
                assert read_kept(run) == expected == shown(run.path)
            states.add(expected["times"]["end_status"])
            pending |= expected["shown"]["pending"]
    assert expected["settings"] == {"optim.lr": 0.014}
    assert expected["curves"]["epoch"] == [1, 2, 4]
    assert len(whole) > 30
    assert states == {None, "stopped"}
    assert pending == {"0123456789ab": "set gpu0_bsz=3", "f" * 12: "stop epoch", "0000000000aa": "set gpu0_bsz=2"}


def test_settings_that_tell_most_come_first() -> None:
    def run(lr: float, name: str, **others: Any) -> dict[str, Any]:
        same = {"train.epochs": 20, "data.crop_px": [512, 512]}
        return {"log.every_steps": round(lr * 1e4), "seed": lr, "optim.lr": lr, "model.name": name, **same, **others}

    runs = [run(0.1, "a"), run(0.2, "b"), run(0.3, "a", **{"data.crop_px": [512, 500]}), run(0.1, "b", extra=None)]
    found = differing_settings(runs)
    assert list(found) == ["model.name", "optim.lr", "data.crop_px", "extra", "log.every_steps", "seed"]
    assert found["optim.lr"] == [0.1, 0.2, 0.3, 0.1]
    assert found["extra"] == ["?", "?", "?", None]
    assert differing_settings(runs[:1]) == differing_settings([]) == {}


def test_curves_keep_the_last_of_many_evaluations(tmp_path: Path) -> None:
    view = View()
    vals = [Val(epoch=n, step=n, loss=None, miou=n / 1000, iou=[0.5], seq=n, t=float(n)) for n in range(1, 131)]
    EventFold(view).add([val.model_dump() for val in vals])
    curves = facts_of(view)["curves"]
    assert curves["epoch"] == list(range(1, 131, 3))
    assert (curves["miou"][-1], curves["loss"][-1]) == (0.13, None)


@pytest.mark.parametrize("has_time", [False, True])
@pytest.mark.parametrize("is_same_file", [False, True])
def test_other_events_of_the_same_size_are_read(tmp_path: Path, is_same_file: bool, has_time: bool) -> None:
    run = eventful(tmp_path / "run").folder
    before, facts = shown(run.path), run.events.stat()
    other = run.events.read_bytes().replace(
        b'"status":"stopped","reason":"by hand"', b'"status":"failed","reason":"by hand."'
    )
    assert len(other) == facts.st_size
    place = run.events if is_same_file else run.path / "new"
    place.write_bytes(other)
    if has_time:
        os.utime(place, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    if not is_same_file:
        os.replace(place, run.events)
    assert (before["times"]["end_status"], shown(run.path)["times"]["end_status"]) == ("stopped", "failed")
    assert shown(run.path) == said(run.path)


def test_events_written_while_they_are_read_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, fold = eventful(tmp_path / "run"), view_runs.fold_file

    def fold_and_write(view: View, path: Path) -> None:
        fold(view, path)
        run.writer = EventWriter(path)
        run.alert("storage", "written meanwhile")

    monkeypatch.setattr(view_runs, "fold_file", fold_and_write)
    assert shown(run.folder.path)["shown"]["num_alerts"] == 1
    assert read_kept(run.folder) is None
    monkeypatch.undo()
    assert shown(run.folder.path)["shown"]["num_alerts"] == 2


def flipped(text: bytes) -> bytes:
    """Return the text with another loss, which is still JSON."""
    at = text.index(b'"loss": ') + len(b'"loss": ')
    return text[:at] + (b"7" if text[at : at + 1] != b"7" else b"8") + text[at + 1 :]


DAMAGES = {
    "torn": lambda text: text[:-1],
    "digit": flipped,
    "zeros": lambda text: bytes(len(text)),
    "list": lambda text: b"[]",
    "version": lambda text: text.replace(b'"identity": [8,', b'"identity": [3,'),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_summary_is_made_again(tmp_path: Path, damage: Any) -> None:
    run = eventful(tmp_path / "run").folder
    first = shown(run.path)
    whole = run.summary.read_bytes()
    run.summary.write_bytes(damage(whole))
    assert run.summary.read_bytes() != whole
    assert read_kept(run) is None
    assert shown(run.path) == first == read_kept(run)


def test_summary_of_another_run_or_of_a_copy_is_not_used(tmp_path: Path) -> None:
    one, two = eventful(tmp_path / "one").folder, eventful(tmp_path / "two", epochs=2).folder
    first, second = shown(one.path), shown(two.path)
    shutil.copy2(one.summary, two.summary)
    assert shown(two.path) == second != first
    copy = RunFolder(shutil.copytree(one.path, tmp_path / "copy"))
    assert copy.summary.exists()
    assert read_kept(copy) is None
    assert shown(copy.path) == first


@pytest.mark.parametrize("why", ["read-only disk", "other user", "interrupted"])
def test_nothing_is_kept_where_it_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    run = eventful(tmp_path / "run").folder
    tried = list[str]()

    def refuse(*_: Any) -> int:
        tried.append(why)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    if why == "other user":
        monkeypatch.setattr(os, "geteuid", lambda: run.path.stat().st_uid + 1)
    elif why == "read-only disk":
        monkeypatch.setattr("segapp.run.files.open_new", refuse)
    else:
        monkeypatch.setattr("segapp.run.files.os.rename", refuse)
    before = {path.name for path in run.path.iterdir()}
    assert shown(run.path) == shown(run.path) == said(run.path)
    assert {path.name for path in run.path.iterdir()} == before
    assert len(tried) == (0 if why == "other user" else 2)
    monkeypatch.undo()
    monkeypatch.setattr(view_runs, "_SETTLED_S", -60.0)
    assert shown(run.path) == read_kept(run)
    monkeypatch.setattr(os, "geteuid", lambda: run.path.stat().st_uid + 1)
    assert read_kept(run) is None, "a summary that another user has kept"


def test_fresh_events_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writes in a row may have the same time and size."""
    monkeypatch.setattr(view_runs, "_SETTLED_S", 2.0)
    run = eventful(tmp_path / "run").folder
    summarize(run.path)
    assert not run.summary.exists()
    with mock.patch("segapp.view.runs.time.time", return_value=run.events.stat().st_ctime + 2.5):
        summarize(run.path)
    assert run.summary.exists()


def test_list_of_finished_runs_reads_no_events_again(tmp_path: Path, lines_read: list[bytes]) -> None:
    for i in range(3):
        eventful(tmp_path / f"run-{i}", steps_per_epoch=3 + 20 * i)
    first = [summary.as_json() | {"age_s": None} for summary in list_runs(tmp_path)]
    num_lines = sum(path.read_bytes().count(b"\n") for path in tmp_path.glob("*/events.jsonl"))
    assert len(lines_read) == num_lines, "each line is read once"
    lines_read.clear()
    assert [summary.as_json() | {"age_s": None} for summary in list_runs(tmp_path)] == first
    assert lines_read == []


def test_rare_events_are_found_in_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts end within lines; there are damaged and long lines and a torn end."""
    path, lines = tmp_path / "events.jsonl", eventful(tmp_path / "run", 9).folder.events.read_bytes().splitlines(True)
    lines[5:5] = [b'damaged "command"\n', b'"command"' * 400_000 + b"\n", b"x" * 3_000_000 + b"\n"]
    path.write_bytes(b"".join(lines) + lines[-1][:-9])
    real = os.pread
    for kinds in (("command", "gpu0_bsz"), ("alert",), ("oom",), ("run_start", "run_end")):
        expected = [raw for raw in EventReader(path).read_raw() if raw["type"] in kinds]
        for num_bytes in (300, 1000, 2**20):
            monkeypatch.setattr(os, "pread", lambda fd, size, at, n=num_bytes: real(fd, min(size, n), at))
            assert list(EventReader(path).read_kinds(*kinds)) == expected
        assert bool(expected) == (kinds != ("oom",))


@pytest.mark.parametrize("text", ["- a\n", "word\n", ""])
def test_config_that_is_no_mapping_has_no_settings(tmp_path: Path, text: str) -> None:
    run = RecordedRun(tmp_path / "run")
    run.folder.config_yaml.write_text(text)
    assert read_settings(run.folder) == {}
    assert summarize(tmp_path / "run").settings == {}
