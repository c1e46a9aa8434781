"""Skimming against the full parser: the same events in the same order, also from damaged files."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segapp.run.events import Alert, EventReader, EventWriter, Heartbeat, Step, StepColumn, StepRun
from segapp.run.events.types import MAX_LINE_BYTES
from segapp.run.events.writer import RewindPoint, find_repeated


def flattened(items: list[Any]) -> list[tuple[Any, ...]]:
    """Return steps reduced to their curve, and all other events in full."""
    flat: list[tuple[Any, ...]] = []
    for item in items:
        if isinstance(item, StepRun):
            flat += [("step", *row) for row in zip(item.step, item.t, map(repr, item.loss), strict=True)]
        elif item["type"] == "step":
            loss = math.nan if item.get("loss") is None else item["loss"]
            flat.append(("step", item.get("step"), item["t"], repr(loss)))
        else:
            flat.append((item["type"], json.dumps(item, sort_keys=True)))
    return flat


def write_run(path: Path, kinds: list[int]) -> None:
    with mock.patch("segapp.run.events.writer.time.time", return_value=1.7e9 + 0.25), EventWriter(path) as writer:
        for i, kind in enumerate(kinds, start=1):
            if kind == 0:
                writer.write(Heartbeat(phase="train"))
            elif kind == 1:
                writer.write(Alert(kind="oom", message='a "step" {"v":1 in\na message'))
            else:
                losses = {2: 0.5 / i, 3: math.nan, 4: 1e-9 * i, 5: 1e30}
                writer.write(Step(epoch=1, step=i, loss=losses[kind], lr=0.1, split=[1, 2], images_per_s=3.5))


@given(kinds=st.lists(st.integers(0, 5), max_size=40), max_bytes=st.sampled_from([None, 1, 700]))
def test_skimming_equals_the_full_parser(tmp_path_factory: Any, kinds: list[int], max_bytes: int | None) -> None:
    path = tmp_path_factory.mktemp("skim") / "events.jsonl"
    write_run(path, kinds)
    reader, items = EventReader(path), []
    while part := reader.read_skimmed(max_bytes):
        items += part
    assert flattened(items) == flattened(EventReader(path).read_raw())
    assert reader.num_bytes_left == 0


@given(data=st.data())
def test_skimming_damaged_lines_adds_no_event(tmp_path_factory: Any, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("skim") / "events.jsonl"
    write_run(path, data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=12)))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            del content[at : at + data.draw(st.integers(1, 60))]
        else:
            content[at:at] = data.draw(st.binary(min_size=1, max_size=4))
        if not content:
            return
    path.write_bytes(bytes(content))
    strict = {row[:2] for row in flattened(EventReader(path).read_raw()) if row[0] != "step"}
    skimmed = flattened(EventReader(path).read_skimmed())
    assert {row[:2] for row in skimmed if row[0] != "step"} == strict


def test_step_joined_to_another_line_equals_the_full_parser(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    write_run(path, [1, 2, 0])
    content = path.read_bytes()
    second, third = (content.index(b'{"v":1,"seq":%d' % seq) for seq in (2, 3))
    cut = content.index(b'"type"', third) - 1
    path.write_bytes(content[: content.index(b',"lr"', second)] + content[cut:])
    strict = flattened(EventReader(path).read_raw())
    assert [row[0] for row in strict] == ["alert", "heartbeat"]
    assert flattened(EventReader(path).read_skimmed()) == strict


def test_last_step_of_a_run_is_parsed_in_full(tmp_path: Path) -> None:
    write_run(tmp_path / "e.jsonl", [2, 2, 2, 0, 2])
    items = EventReader(tmp_path / "e.jsonl").read_skimmed()
    runs = [item for item in items if isinstance(item, StepRun)]
    lasts = [run.last for run in runs]
    assert [last and last["step"] for last in lasts] == [3, 5]
    assert [last and last["images_per_s"] for last in lasts] == [3.5, 3.5]
    assert {run.split_text for run in runs} == {b'"split":[1,2'}


STEP = b'{"v":1,"seq":7,"t":1.5,"type":"step","epoch":1,"step":%d,"loss":0.5,'


@pytest.mark.parametrize("lines", ['"terms":{"a}":2,"lr":7},"lr":0.5', '"lr":1,"lr":null', '"a}":{"lr":3},"terms":[4]'])
def test_column_has_the_value_that_json_has(tmp_path: Path, lines: str) -> None:
    (tmp_path / "e.jsonl").write_bytes(STEP % 9 + lines.encode() + b"}\n" + STEP % 10 + b'"lr":6\n')
    fields = json.loads(f"{{{lines}}}")
    terms = fields.get("terms") if isinstance(fields.get("terms"), dict) else {}
    for name, place in (("lr", fields), ("terms.lr", terms), ("terms.a}", terms)):
        alone, column, key = StepColumn(name), StepColumn(name), name.removeprefix("terms.")
        EventReader(tmp_path / "e.jsonl").read_column(alone)
        assert len(flattened(EventReader(tmp_path / "e.jsonl").read_skimmed(None, [column]))) == 1, "the second is torn"
        expected = [(1.5, 9, math.nan if place[key] is None else place[key])] if key in place else []
        assert repr(column.rows) == repr(alone.rows) == repr([(t, n, float(value)) for t, n, value in expected])


def cpu_s_to_read(path: Path) -> float:
    """Return the time that all readers of lines take together; each must come to the last line, an ordinary one."""
    began_s, columns = time.process_time(), [StepColumn("lr"), StepColumn("terms.x"), StepColumn("lr")]
    EventReader(path).read_skimmed(None, columns[:2])
    EventReader(path).read_column(columns[2])
    assert [column.rows[-1] for column in columns] == [(1.5, 10, 0.25), (1.5, 10, 0.125), (1.5, 10, 0.25)]
    assert [event["type"] for event in EventReader(path).read_kinds("step")][-1:] == ["step"]
    with path.open("rb") as file:
        assert find_repeated(file, RewindPoint(9, 1, 0))[0] == path.read_bytes().rindex(STEP % 10)
    return time.process_time() - began_s


@pytest.mark.parametrize(
    ("start", "part", "end"),
    [
        (b"{", b'"t":1.5,"type":"step","epoch":1,"step":9,', b'"lr":1}'),
        (STEP % 9, b'"terms":{', b"}"),
        (STEP % 9, b'"type":"step","terms":{"y":1},', b'"x":1}'),
        (STEP % 9, b'"lr":', b"1}"),
        (STEP % 9 + b'"q":', b'{"terms":[', b"}"),
        (STEP % 9 + b'"lr":1e', b"9", b"}"),
        (b'{"v":1,"seq":7,"t":', b"1", b',"type":"step","epoch":1}'),
        (STEP % 9 + b'"split":[1', b"\0", b"]}"),
        (b"", b'"t":1.', b""),
    ],
)
def test_time_to_read_a_line_grows_with_its_bytes(tmp_path: Path, start: bytes, part: bytes, end: bytes) -> None:
    def cost_s(num_bytes: int, repeats: int = 3) -> float:
        line = start + part * ((num_bytes - len(start + end) - 1) // len(part)) + end + b"\n"
        (tmp_path / "e.jsonl").write_bytes(line + STEP % 10 + b'"lr":0.25,"terms":{"x":0.125}}\n')
        return min(cpu_s_to_read(tmp_path / "e.jsonl") for _ in range(repeats))

    small_s = cost_s(2**16)
    assert cost_s(10 * 2**16) < 20 * small_s
    assert cost_s(MAX_LINE_BYTES, 1) < 2 * 256 * small_s
