import errno
import json
import math
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segapp import failpoints
from segapp.errors import StorageError
from segapp.run.events import (
    EVENT_TYPES,
    Alert,
    Checkpoint,
    CommandAnswer,
    EpochStart,
    EventReader,
    EventWriter,
    Gpu0Bsz,
    Heartbeat,
    Memory,
    Oom,
    RunEnd,
    RunStart,
    Settings,
    Step,
    Topology,
    Val,
    Weights,
    read_answers,
)
from segapp.run.events.writer import RewindPoint, is_repeated


def step(number: int, **fields: object) -> Step:
    return Step(epoch=fields.pop("epoch", 1), step=number, loss=fields.pop("loss", 0.5), lr=0.1, **fields)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, *events: object) -> None:
    with EventWriter(path) as writer:
        for event in events:
            writer.write(event)


def write_steps(path: Path, count: int) -> None:
    write(path, *map(step, range(1, count + 1)))


EXAMPLES = [
    RunStart(classes=["road", "sky"], num_params=10, batch_size=4, epochs=2, steps_per_epoch=3, devices=["cuda:0"]),
    Weights(source="a.pt", message="two\nlines", num_taken=3, num_tensors=4, missing={"fc.bias": "not in the file"}),
    EpochStart(epoch=1, lr=0.1, split=[1, 3]),
    step(1, split=[1, 3]),
    Memory(devices=[{"uuid": "GPU-1", "used_mib": 10.0, "phase": "forward"}]),
    Val(epoch=1, step=3, loss=0.1, miou=0.5, iou=[0.5, None], pixel_accuracy=0.9),
    Checkpoint(path="checkpoints/last.pt", epoch=1, step=3, is_best=True),
    CommandAnswer(id="a", command="pause", by="me@here", status="applied"),
    Gpu0Bsz(status="pending", old=None, new=1, split=[1, 3], predicted_mib=[1.0, 2.0], epoch=2),
    Settings(step=5, recompute="all", blocks=[["layer1.0"], []], num_blocks=4, reason="by hand"),
    Settings(step=5, reason="without b cpu", topology=Topology(ranks=2, machines=1, old_ranks=3, old_machines=2)),
    Settings(step=6, reason="out of memory", fallbacks={"num_pieces": 2, "window_px": [32, 48]}, failed_split=[3, 1]),
    Alert(kind="oom", message="so"),
    Oom(device="cuda:0", index=0, phase="backward", step=3, action="in pieces", largest=[{"mib": 8.0, "what": "f32"}]),
    Heartbeat(pid=1),
    RunEnd(status="finished", reason="all epochs done", exit_code=0),
]


def test_every_event_type_is_read_back_as_written(tmp_path):
    write(tmp_path / "e.jsonl", *EXAMPLES)
    found = EventReader(tmp_path / "e.jsonl").read()
    assert {event.type for event in found} == set(EVENT_TYPES)
    assert [event.model_dump(exclude={"seq", "t"}) for event in found] == [
        event.model_dump(exclude={"seq", "t"}) for event in EXAMPLES
    ]
    assert [event.seq for event in found] == list(range(1, len(EXAMPLES) + 1))


def test_events_that_others_rely_on_are_synced_as_written(tmp_path, monkeypatch):
    """Starts, checkpoints and the end survive a power cut; the many others wait for the kernel, or `Inbox` for them."""
    path, synced, real_fsync = tmp_path / "events.jsonl", [], os.fsync

    def spy_fsync(fd):
        assert os.path.samestat(os.fstat(fd), path.stat())
        synced.append(lines(path)[-1]["type"])
        return real_fsync(fd)

    with EventWriter(path) as writer:
        monkeypatch.setattr(os, "fsync", spy_fsync)
        for event in EXAMPLES:
            writer.write(event)
        assert synced == ["run_start", "checkpoint", "run_end"]
        writer.write(step(9))
    assert synced[3:] == ["step"], "closing the file syncs the rest"


@pytest.mark.parametrize(
    "tail", [b'\n{"v":1,"seq":4,"ty', b"\n" + bytes(5000), b'\n{"v":1,"seq":3,"t":1}', b"\n\xff\xfe", b""]
)
def test_torn_last_line_loses_no_other_event(tmp_path, tail):
    """Nor does a last line without its end; `seq` continues over restarts."""
    path = tmp_path / "e.jsonl"
    write_steps(path, 3)
    path.write_bytes(path.read_bytes()[:-1] + tail)
    for count in (1, 2):
        write_steps(path, count)
    assert [(raw["seq"], raw["step"]) for raw in lines(path)] == [(1, 1), (2, 2), (3, 3), (4, 1), (5, 1), (6, 2)]


def test_non_finite_numbers_are_null_with_one_alert_per_field(tmp_path):
    path = tmp_path / "e.jsonl"
    not_finite = Val(epoch=1, step=2, loss=0.1, miou=math.nan, iou=[math.nan, 0.5])
    write(path, step(1, loss=math.nan), step(2, loss=math.inf, grad_norm=-math.inf), not_finite)
    raws = lines(path)
    assert [raw["loss"] for raw in raws if raw["type"] == "step"] == [None, None]
    alerts = [raw["message"].split()[0] for raw in raws if raw["type"] == "alert"]
    assert alerts == ["step.loss", "step.grad_norm", "val.iou", "val.miou"]
    assert [raw["seq"] for raw in raws] == list(range(1, 8))


def test_names_that_are_not_utf8_are_escaped_and_long_texts_cut(tmp_path):
    with EventWriter(tmp_path / "e.jsonl") as writer:
        writer.alert("data", os.fsdecode(b"caf\xe9.png is damaged"))
        writer.alert("data", "end" * 10**6)
    first, second = EventReader(tmp_path / "e.jsonl").read()
    assert first.message == r"caf\xe9.png is damaged"
    assert second.message == ("end" * 10**6)[:4000]


def test_several_threads_write_whole_lines(tmp_path):
    path = tmp_path / "e.jsonl"
    with EventWriter(path) as writer, ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: [writer.write(Heartbeat(pid=1)) for _ in range(200)], range(4)))
    assert [raw["seq"] for raw in lines(path)] == list(range(1, 801))


# -- a full disk --------------------------------------------------------------------------------------------------


def test_full_disk_loses_no_event_and_raises_nothing(tmp_path):
    path = tmp_path / "e.jsonl"
    writer = EventWriter(path)
    writer.write(step(1))
    failpoints.arm("events.before_write=raise:ENOSPC")
    for number in range(2, 6):
        writer.write(step(number))
    assert writer.problem == os.strerror(errno.ENOSPC)
    assert writer.num_pending == 4
    assert not writer.flush()
    failpoints.arm("")
    assert writer.flush()
    writer.close()
    raws = lines(path)
    assert [raw["step"] for raw in raws if raw["type"] == "step"] == [1, 2, 3, 4, 5]
    assert raws[-1]["kind"] == "storage"
    assert [raw["seq"] for raw in raws] == list(range(1, 7))


def test_step_events_are_dropped_first_from_a_full_queue(tmp_path):
    path = tmp_path / "e.jsonl"
    writer = EventWriter(path, max_pending=4)
    failpoints.arm("events.before_write=raise:ENOSPC")
    writer.alert("data", "older than all steps")
    for number in range(1, 6):
        writer.write(step(number))
    for status in ("applied", "rejected"):
        writer.write(CommandAnswer(id=status, command="pause", by="me", status=status))
    failpoints.arm("")
    writer.close()
    raws = lines(path)
    assert [raw["type"] for raw in raws] == ["alert", "step", "command", "command", "alert"]
    assert raws[1]["step"] == 3, "an event that may be dropped does not replace an earlier one"
    assert "; 4 events were dropped" in raws[-1]["message"]


def test_each_full_disk_counts_its_own_dropped_events(tmp_path):
    path = tmp_path / "e.jsonl"
    with EventWriter(path, max_pending=2) as writer:
        for num_steps in (5, 4, 2):  # of which 3, 2 and none are dropped
            failpoints.arm("events.before_write=raise:ENOSPC")
            for number in range(num_steps):
                writer.write(step(number))
            failpoints.arm("")
            assert writer.flush()
    said = [raw["message"].split("; ")[1:] for raw in lines(path) if raw["type"] == "alert"]
    assert said == [["3 events were dropped"], ["2 events were dropped"], []]


def test_partial_line_of_a_full_disk_is_truncated(tmp_path):
    path, (_, hard) = tmp_path / "e.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    write_steps(path, 1)
    path.write_bytes(path.read_bytes()[:-1])  # the end of the line is missing
    with EventWriter(path) as writer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, hard))
        try:
            writer.write(step(2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert writer.problem
        assert writer.flush()
        writer.write(step(3))
    assert [raw.get("step") for raw in lines(path)] == [1, 2, None, 3]


def test_unwritable_folder_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        EventWriter(tmp_path / "file" / "e.jsonl")


# -- rewinding ---------------------------------------------------------------------------------------------------


def interrupted_run(path: Path) -> list[dict]:
    """Write two epochs of three steps, with evaluation and checkpoint after each; killed at step 8."""
    events = [EXAMPLES[0]]
    for number in range(1, 9):
        if number % 3 == 1:
            events.append(EpochStart(epoch=1 + number // 3, lr=0.1))
        events.append(step(number, epoch=1 + (number - 1) // 3))
        if number % 3 == 0:
            events.append(Val(epoch=number // 3, step=number, loss=0.1, miou=0.5, iou=[0.5]))
            events.append(Checkpoint(path="last.pt", epoch=number // 3, step=number, sha256=f"hash{number}"))
    write(path, *events, CommandAnswer(id="x", command="pause", by="me", status="applied"))
    return lines(path)


@pytest.mark.parametrize(
    ("back_to", "sha256", "num_gone"), [(6, "hash6", 3), (6, None, 3), (7, None, 1), (3, "hash3", 9), (8, "x", 0)]
)
def test_rewind_gives_the_events_of_an_uninterrupted_run(tmp_path, back_to, sha256, num_gone):
    path = tmp_path / "e.jsonl"
    before = interrupted_run(path)
    reader = EventReader(path)
    reader.read()
    writer = EventWriter(path)
    assert writer.rewind(back_to, epoch=1 + back_to // 3, batch=back_to % 3, sha256=sha256) == num_gone
    for number in range(back_to + 1, 9):
        writer.write(step(number))
    writer.close()
    after = lines(path)
    assert [raw["step"] for raw in after if raw["type"] == "step"] == list(range(1, 9))
    assert [raw["seq"] for raw in after] == list(range(1, len(after) + 1))
    assert [raw for raw in after if raw["type"] == "command"], "an answer is never taken back"
    assert [raw["epoch"] for raw in after if raw["type"] == "val"] == list(range(1, back_to // 3 + 1))
    assert reader.generation == 0
    assert len(reader.read_raw()) == (len(after) if num_gone else 0)
    assert reader.generation == (1 if num_gone else 0)
    if num_gone:
        gone = lines(tmp_path / "events.rewound.jsonl")
        assert len(gone) == num_gone
        assert all(raw in before for raw in gone)


@pytest.mark.parametrize(
    ("raw", "batch", "is_after_own", "is_evaluated", "gone"),
    [
        ({"type": "checkpoint", "step": 5}, 0, True, False, False),
        ({"type": "checkpoint", "step": 6}, 0, False, False, False),
        ({"type": "checkpoint", "step": 6}, 0, True, False, True),
        ({"type": "checkpoint", "step": 7}, 0, False, False, True),
        ({"type": "step", "step": 6}, 0, False, False, False),
        ({"type": "step", "step": 7}, 0, False, False, True),
        ({"type": "step", "step": None}, 0, False, False, False),
        ({"type": "epoch_start", "epoch": 2}, 0, False, False, False),
        ({"type": "epoch_start", "epoch": 3}, 0, False, False, True),  # the third epoch begins anew
        ({"type": "epoch_start", "epoch": 3}, 1, False, False, False),  # it goes on
        ({"type": "epoch_start", "epoch": 4}, 1, False, False, True),
        ({"type": "val", "epoch": 2, "step": 6}, 0, False, False, False),
        ({"type": "val", "epoch": 3, "step": 5}, 1, False, False, False),
        ({"type": "val", "epoch": 3, "step": 6}, 1, False, False, True),
        ({"type": "val", "epoch": 3, "step": 6}, 1, False, True, False),
        ({"type": "val", "epoch": 3, "step": 7}, 1, False, True, True),
        ({"type": "val", "epoch": 3}, 0, False, True, True),
        ({"type": "settings", "step": 7}, 0, False, False, False),  # a resume reads the fallbacks
        ({"type": "alert", "step": 9, "epoch": 9}, 0, False, False, False),
    ],
)
def test_events_that_training_repeats_from_step_6(raw, batch, is_after_own, is_evaluated, gone):
    point = RewindPoint(6, epoch=3, batch=batch, is_evaluated=is_evaluated)
    assert is_repeated(raw, point, is_after_own=is_after_own) == gone


def test_rewind_drops_steps_logged_before_checkpoint_event(tmp_path):
    path = tmp_path / "e.jsonl"
    first = [EpochStart(epoch=1, lr=0.1), *map(step, (1, 2, 3)), Val(epoch=1, step=3, loss=0.1, miou=0.5, iou=[0.5])]
    saved = [Checkpoint(path="last.pt", epoch=1, step=2, sha256=sha256) for sha256 in ("two", "saved again")]
    before = [Alert(kind="data", message=4000 * "x")] * 300  # more than is copied at once
    write(path, *before, *first, EpochStart(epoch=2, lr=0.1), step(4, epoch=2), *saved)
    with EventWriter(path) as writer:
        assert writer.rewind(2, epoch=1, batch=2, sha256="two") == 5
    after = lines(path)
    kept = [("epoch_start", None, 301), ("step", 1, 302), ("step", 2, 303), ("checkpoint", 2, 304)]
    assert [(raw["type"], raw.get("step"), raw["seq"]) for raw in after[300:]] == kept


def test_failed_rewind_keeps_the_old_events(tmp_path):
    path = tmp_path / "e.jsonl"
    before = interrupted_run(path)
    writer = EventWriter(path)
    failpoints.arm("events.rewind.before_rename=raise:ENOSPC")
    assert writer.rewind(6, epoch=3, batch=0) == 0
    writer.write(step(9))
    *old, alert, new = lines(path)
    assert old == before
    assert (alert["kind"], new["step"]) == ("storage", 9)
    assert not list(tmp_path.glob(".tmp-*"))


# -- reading ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_byte_prefix_gives_exactly_its_complete_lines(tmp_path, data):
    if not (tmp_path / "whole.jsonl").exists():
        write(tmp_path / "whole.jsonl", *EXAMPLES * 3)
    whole = (tmp_path / "whole.jsonl").read_bytes()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), min_size=1, max_size=5)))
    path = tmp_path / "growing.jsonl"
    path.write_bytes(b"")
    reader = EventReader(path)
    seen = []
    for cut in cuts:
        path.write_bytes(whole[:cut])
        seen += reader.read(data.draw(st.sampled_from([None, 1, 100])))
        while more := reader.read(100):
            seen += more
        assert [event.seq for event in seen] == list(range(1, whole[:cut].count(b"\n") + 1))
    assert reader.num_bad == reader.generation == 0


def test_unknown_lines_are_skipped_and_damage_is_counted(tmp_path):
    path = tmp_path / "e.jsonl"
    frame = '"seq":1,"t":1.0,"type"'
    path.write_text(
        f'{{"v":1,{frame}:"heartbeat"}}\n{{"v":1,{frame}:"later"}}\n{{"v":2,{frame}:"heartbeat"}}\n'
        f'nonsense\n[]\n{{"v":1,{frame}:"step"}}\n{{"v":1,{frame}:"heartbeat","x":NaN}}\n' + "[" * 100_000 + "\n"
    )
    reader = EventReader(path)
    assert [event.type for event in reader.read()] == ["heartbeat"]
    assert reader.num_bad == 5


def test_events_are_written_and_read_without_standard_input(tmp_path):
    """The first file that a process without standard input opens gets the number 0."""
    path, standard_input = tmp_path / "e.jsonl", os.dup(0)
    os.close(0)
    try:
        reader = EventReader(path)
        assert reader.read() == []
        write_steps(path, 2)
        assert [event.step for event in reader.read()] == [1, 2]
        num_open = len(os.listdir("/proc/self/fd"))
        assert reader.read() == []
        write_steps(tmp_path / "new.jsonl", 3)
        os.replace(tmp_path / "new.jsonl", path)
        assert [event.step for event in reader.read()] == [1, 2, 3]
        assert len(os.listdir("/proc/self/fd")) == num_open
        path.unlink()
        assert reader.read() == []
        assert reader.generation == 2
        write_steps(path, 2)
        assert [event.step for event in reader.read()] == [1, 2]
        path.write_bytes(b"")
        assert reader.read() == []
        assert reader.generation == 3
    finally:
        os.dup2(standard_input, 0)
        os.close(standard_input)


def test_endless_line_is_read_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("segapp.run.events.reader.MAX_LINE_BYTES", 2**20)
    path = tmp_path / "e.jsonl"
    with open(path, "wb") as file:
        # What follows the last block of the line reads as an event and is none.
        file.write(b"x" * (40 * 2**20) + 2 * b'{"v":1,"seq":1,"t":1.0,"type":"heartbeat"}\n')
    reader, interrupted = EventReader(path), EventReader(path)
    assert len(reader.read()) == 1
    assert reader.num_bad == 1
    assert interrupted.read(2**21) == []
    write_steps(tmp_path / "new.jsonl", 2)
    os.replace(tmp_path / "new.jsonl", path)
    assert [event.step for event in interrupted.read()] == [1, 2], "the new file begins with a whole line"


@pytest.mark.parametrize("junk", [b"\n", b"x\n", b"{}" * 2**19 + b"\n"], ids=["empty", "short", "long"])
def test_last_event_before_damaged_lines_is_found_in_few_reads(tmp_path, monkeypatch, junk):
    path, read, sizes = tmp_path / "events.jsonl", os.pread, []
    last = b'{"v":1,"seq":41,"t":1.0,"type":"heartbeat"}\n'
    path.write_bytes(last.replace(b"41", b"40") + last + junk * (5 * 2**18 // len(junk)))
    monkeypatch.setattr(os, "pread", lambda fd, size, at: sizes.append(size) or read(fd, size, at))
    with EventWriter(path) as writer:
        assert writer.last_seq == 41
    assert sum(sizes) <= 1.1 * path.stat().st_size


def test_answers_hold_only_final_statuses(tmp_path):
    path = tmp_path / "e.jsonl"
    writer = EventWriter(path)
    writer.write(CommandAnswer(id="old", command="pause", by="me", status="applied"))
    writer.write(CommandAnswer(id="new", command="stop", by="me", status="accepted"))
    assert read_answers(EventReader(path).read_raw()) == {"old": "applied"}
    writer.write(CommandAnswer(id="new", command="stop", by="me", status="rejected", reason="so"))
    assert read_answers(EventReader(path).read_raw()) == {"old": "applied", "new": "rejected"}
