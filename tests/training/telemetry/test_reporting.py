"""What a training reports of its activities, its data and its remaining time, on clocks that the test moves."""

from __future__ import annotations

import types
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from segapp import failpoints
from segapp.datasets import cache as cache_module
from segapp.datasets.augment import TrainTransform
from segapp.datasets.cache import PixelCache, disk_files
from segapp.datasets.dataset import SegmentationDataset, image_sizes
from segapp.datasets.files import ImagePair
from segapp.datasets.layouts.formats import class_scheme
from segapp.datasets.loader import TrainLoader
from segapp.training import pulse, reporting
from segapp.training.progress import Best, Timetable
from segapp.training.reporting import Clock, DataWatch, RemainingTime, cache_notes
from tests.support.drawn_data import draw_image, draw_mask
from tests.support.runs import alerts, events, merged, train


def test_clock_leaves_pauses_out_of_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, paused_s = 100.0, 20.0
    monkeypatch.setattr(reporting, "time", types.SimpleNamespace(perf_counter=lambda: now_s))
    clock = Clock(lambda: paused_s)
    now_s, clock.num_steps, clock.wait_s = 150.0, 3, 4.5
    assert clock.elapsed_s() == 50.0
    clock.restart()
    assert (clock.num_steps, clock.num_images, clock.wait_s) == (0, 0, 0.0)
    now_s, paused_s = 1180.0, 1020.0
    assert clock.elapsed_s() == 30.0
    clock.restart()
    now_s += 7.0
    assert clock.elapsed_s() == 7.0


def test_evaluations_and_saves_are_told_at_their_begin_and_end(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "PROGRESS_S", 0.0)
    monkeypatch.setattr(DataWatch, "after_interval", lambda *_: ["it waits"])
    config = merged(tiny, train={"epochs": 2, "batch_size": 5, "ema": None}, eval={"batch_size": 1})
    assert train(config, tmp_path / "run") == 0
    told = [event for event in events(tmp_path / "run", "heartbeat") if event.get("pid") is None]
    phases = [event["phase"] for event in told]
    expected = ["save", "train", *["eval", "train", "save", "train"] * 2]  # first, before any evaluation
    assert [b for a, b in pairwise(["train", *phases]) if a != b] == expected
    done = [event["num_evaluated"] for event in told if event.get("num_evaluated") is not None]
    assert done == [1, 2, 3, 4] * 2
    assert {event["num_images"] for event in told if "num_evaluated" in event} <= {4, None}
    kinds = [(e["type"], e.get("phase")) for e in events(tmp_path / "run") if e["type"] in ("heartbeat", "val")]
    assert kinds.index(("heartbeat", "eval")) < kinds.index(("val", None))
    told_alerts = [(event["kind"], event["message"], event["step"]) for event in alerts(tmp_path / "run")]
    assert told_alerts == [("data", "it waits", event["step"]) for event in events(tmp_path / "run", "step")]
    last = events(tmp_path / "run", "step")[-1]
    assert 0 < last["eta_epoch_s"] == last["eta_run_s"] < 60  # the evaluation and the save of the end


def test_time_of_an_evaluation_is_the_mean_of_all(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[float] = []
    monkeypatch.setattr(pulse.Liveness, "spent_s", lambda _, activity: {"eval": 600.0}.get(activity, 0.0))
    monkeypatch.setattr(RemainingTime, "etas_s", lambda _, *at: (found.append(at[-1]), (1.0, 1.0))[1])
    assert train(merged(tiny, train={"epochs": 4, "batch_size": 10, "ema": None}), tmp_path / "run") == 0
    assert found == [600.0, 600.0, 300.0, 200.0]  # none, 1, 2 and 3 of them are done


Place = tuple[int, int, int]
"""Epoch, finished steps, steps left in the epoch."""


def happenings(timetable: Timetable) -> Iterator[tuple[str, Place]]:
    """Yield what a training does, in its order, by the rules of the loop: `step`, `eval`."""
    epoch, step = 1, 0
    while step < timetable.num_steps:
        in_epoch = timetable.steps_per_epoch
        while in_epoch and step < timetable.num_steps:
            step, in_epoch = step + 1, in_epoch - 1
            yield "step", (epoch, step, in_epoch)
            if timetable.is_evaluation_due(epoch, step, is_epoch_end=not in_epoch):
                yield "eval", (epoch, step, in_epoch)
        epoch += 1


some = st.integers(1, 7)
timetables = st.builds(
    Timetable,
    epochs=some,
    steps_per_epoch=st.integers(1, 12),
    eval_every_epochs=some,
    eval_every_steps=st.none() | some,
)


def cut_off(timetable: Timetable, cut: int | None) -> Timetable:
    """Return a training that ends `cut` steps before the end of its last epoch."""
    if cut is None:
        return timetable
    fields: dict[str, Any] = {**vars(timetable), "total_steps": timetable.num_steps - cut % timetable.steps_per_epoch}
    return Timetable(**fields)


@given(timetables, st.none() | st.integers(1, 12), st.data())
@example(Timetable(3, 5, eval_every_epochs=2), None, None)
def test_steps_and_evaluations_equal_what_the_loop_still_does(timetable: Timetable, cut: int | None, data: Any) -> None:
    """A step takes 1 s and an evaluation 100 s."""
    timetable = cut_off(timetable, cut)
    course = list(happenings(timetable))
    steps = [i for i, (what, _) in enumerate(course) if what == "step"]
    at = data.draw(st.sampled_from(steps)) if data is not None else steps[4]
    place, later = course[at][1], course[at + 1 :]
    estimate = RemainingTime(timetable)
    estimate.observe(3, 3.0)

    def seconds(of: list[tuple[str, Place]]) -> float:
        return sum({"step": 1.0, "eval": 100.0}[what] for what, _ in of)

    within = [each for each in later if each[1][0] == place[0]]
    assert estimate.etas_s(*place, 100.0) == (seconds(within), seconds(later))
    assert timetable.num_evaluations() == sum(what == "eval" for what, _ in course)


def test_median_ignores_slow_steps_and_forgets_other_settings() -> None:
    estimate = RemainingTime(Timetable(1, 100))
    for seconds in (400.0, 20.0, 21.0, 300.0, 22.0):
        estimate.observe(10, seconds)
    assert estimate.etas_s(1, 50, 50, 7.0) == (50 * 2.2 + 7.0,) * 2
    estimate.observe(10, 50.0, "in pieces")
    assert estimate.etas_s(1, 60, 40, 7.0) == (40 * 5.0 + 7.0,) * 2


SCHEME = class_scheme("folder", classes=list("abcde"))


@pytest.fixture
def pairs(tmp_path: Path) -> list[ImagePair]:
    pairs = []
    for i in range(8):
        image, mask = tmp_path / f"{i}.png", tmp_path / f"{i}_mask.png"
        Image.fromarray(draw_image(i, 40, 50)).save(image)
        Image.fromarray(draw_mask(i, 40, 50)).save(mask)
        pairs.append(ImagePair(image, mask, str(i)))
    return pairs


@pytest.fixture
def cached(tmp_path: Path, pairs: list[ImagePair], monkeypatch: pytest.MonkeyPatch) -> SegmentationDataset:
    monkeypatch.setattr(cache_module, "RESERVE_BYTES", 0)
    files = disk_files(tmp_path / "cache", "root", "train", SCHEME)
    cache = PixelCache(files, pairs, image_sizes(pairs), SCHEME.dtype)
    return SegmentationDataset(pairs, SCHEME, TrainTransform((24, 32)), cache=cache)


def watch_of(dataset: SegmentationDataset, pairs: list[ImagePair]) -> DataWatch:
    validation = SegmentationDataset(pairs, SCHEME, notes=["a note", "another"])
    return DataWatch(TrainLoader(dataset, 2), validation, cores=8)


def test_cache_on_disk_is_announced(cached: SegmentationDataset, pairs: list[ImagePair]) -> None:
    watch = watch_of(cached, pairs)
    assert watch.at_start() == ["a note", "another"]  # the place of a cache is no alert
    (start,) = cache_notes("training", cached.cache)
    assert start.startswith("data.cache = disk: 0 of 8 training images are in ")
    assert "cache/train-" in start
    assert "(0.0 MiB); the others are stored when they are first read, 0.1 MiB of " in start
    for index in range(8):
        cached.read(index)
        assert watch.after_interval(0, 1) == []
    assert cache_notes("training", cached.cache) == []  # complete
    assert cache_notes("validation", None) == []


def test_damaged_records_and_a_full_disk_are_told_once(cached: SegmentationDataset, pairs: list[ImagePair]) -> None:
    """Each time the number of damaged ones since the last message; the last of them finds no room either."""
    watch = watch_of(cached, pairs)
    for index in range(5):
        cached.read(index)
    watch.at_start()
    for record in Path(cached.cache.files.path).iterdir():  # type: ignore[union-attr]
        with record.open("r+b") as file:
            file.seek(100)
            file.write(b"damage")
    for indices in ((0,), (3, 4), (1, 5)):
        if 5 in indices:
            failpoints.arm("cache.before_pixels=raise:ENOSPC")
        for index in indices:
            cached.read(index)
        message, *full = watch.after_interval(0, 1)
        assert message.startswith(f"data.cache: {len({*indices} - {5})} damaged training images in ")
        assert len(full) == (5 in indices)
        assert watch.after_interval(0, 1) == []
    assert full[0].startswith("data.cache = disk has no room in ")
    assert "for 4 of 8 training images, 0.0 MiB (No space left on device)" in full[0]
    assert full[0].endswith("name a folder on another disk in XDG_CACHE_HOME")


def test_waiting_for_data_is_told_once_it_costs(pairs: list[ImagePair]) -> None:
    watch = watch_of(SegmentationDataset(pairs, SCHEME, TrainTransform((24, 32))), pairs)
    watch.at_start()
    assert watch.after_interval(5, 10) == []  # too little to speak of
    (message,) = watch.after_interval(5, 10)
    assert message.startswith("the device waits for data 50% of the time (0 data workers, 8 processors)")
    assert watch.after_interval(50, 50) == []
    busy = watch_of(SegmentationDataset(pairs, SCHEME, TrainTransform((24, 32))), pairs)
    assert busy.after_interval(15, 100) == []


def test_evaluations_since_the_best_are_counted_by_hand() -> None:
    best = Best()
    assert best.evaluations_since == 0
    course = [(0.2, True, 0), (0.2, False, 1), (None, False, 2), (0.1, False, 3), (0.3, True, 0), (0.2, False, 1)]
    for epoch, (value, is_best, since) in enumerate(course, 1):
        assert (best.note(value, epoch), best.evaluations_since) == (is_best, since)
    assert (best.value, best.epoch) == (0.3, 5)
