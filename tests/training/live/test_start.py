"""The settings with which a training starts or resumes, on the same or other devices, and what is said about them."""

from __future__ import annotations

from typing import Any

import pytest

from segapp.chunks import SplitRequest
from segapp.config import LiveSettings, RunConfig, validate_config
from segapp.run.events import Topology
from segapp.training.context import DeviceLocations
from segapp.training.live.changes import Change, Replay, Trial
from segapp.training.live.start import Start, other_devices, shares_note, start_of


def config_of(recompute: str = "off", **parallel: Any) -> RunConfig:
    data = {"format": "folder", "root": "nowhere", "classes": ["a", "b"]}
    train = {"batch_size": 8, "recompute": recompute}
    return validate_config({"name": "r", "data": data, "train": train, "parallel": parallel})


def locations(names: str, num_machines: int = 1) -> DeviceLocations:
    return DeviceLocations(tuple(names), num_machines)


def state_of(names: str, split: list[int] | None, **settings: Any) -> dict[str, Any]:
    """Return what a checkpoint says of the devices and the settings in force."""
    known = {"gpu0_bsz": None, "gpu0_bsz_auto": False, "shares": None, **settings}
    return {"live": {"devices": locations(names).to_state(split), "settings": known, "trial": None}}


def resumed(
    now: RunConfig,
    state: dict[str, Any],
    before: RunConfig,
    names: str,
    *replays: Replay,
    reverted: set[tuple[int, str | None]] = frozenset(),  # type: ignore[assignment]
) -> Start:
    state = {**state, "config": before.model_dump(mode="json")}
    return start_of(now, SplitRequest(3), locations(names), state, replays, reverted)


@pytest.mark.parametrize(
    ("parallel", "state", "names", "expected"),
    [
        ({"shares": [4, 4]}, None, "abc", (None, [4, 4])),  # a new run: refused where the network is divided
        ({"gpu0_bsz": 2}, None, "ab", (2, None)),
        ({"gpu0_bsz": 2}, state_of("ab", [2, 6], gpu0_bsz=2), "ab", (2, None)),
        ({}, state_of("abc", [2, 3, 3]), "ab", (None, None)),
        ({"shares": [4, 2, 2]}, state_of("abc", [4, 2, 2], shares=[4, 2, 2]), "ab", (None, [5, 3])),
        ({"shares": [4, 2, 2]}, state_of("ab", [5, 3], shares=[5, 3]), "ab", (None, [5, 3])),  # restarted once more
        ({"shares": [4, 2, 2]}, state_of("ab", [5, 3], shares=[5, 3]), "abc", (None, [4, 2, 2])),  # all are back
        ({"shares": [4, 2, 2]}, state_of("abc", [4, 2, 2], shares=[4, 2, 2]), "a", (None, None)),
        ({"shares": [4, 2, 2]}, state_of("a", None), "ab", (None, None)),
        ({"gpu0_bsz": 2}, state_of("abcd", [2, 2, 2, 2], gpu0_bsz=2), "ab", (4, None)),  # in proportion
        ({"gpu0_bsz": 1}, state_of("abc", [1, 4, 3], gpu0_bsz=1), "ab", (2, None)),
        ({"gpu0_bsz": 1}, state_of("abc", [1, 4, 3], gpu0_bsz=1), "a", (None, None)),
        ({}, state_of("abc", [4, 2, 2], shares=[4, 2, 2]), "bc", (None, [4, 4])),  # by a command
        ({"gpu0_bsz": "auto"}, state_of("abc", [2, 3, 3], gpu0_bsz=2, gpu0_bsz_auto=True), "ab", (3, None)),
        ({"gpu0_bsz": "auto"}, state_of("abc", [2, 3, 3], gpu0_bsz=2, gpu0_bsz_auto=True), "a", (None, None)),
        ({"gpu0_bsz": 1}, state_of("abc", [2, 3, 3], gpu0_bsz=2, gpu0_bsz_auto=True), "ab", (1, None)),  # by a command
        ({"gpu0_bsz": "auto"}, state_of("abc", [2, 3, 3], gpu0_bsz=2), "ab", (3, None)),  # a command switched it off
    ],
)  # fmt: skip
def test_split_is_planned_anew_for_another_number_of_devices(
    parallel: dict[str, Any], state: dict[str, Any] | None, names: str, expected: tuple[Any, Any]
) -> None:
    config = config_of(**parallel)
    start = (
        start_of(config, SplitRequest(3), locations(names)) if state is None else resumed(config, state, config, names)
    )
    assert (start.configured.gpu0_bsz, start.configured.shares) == expected
    if state is not None and len(state["live"]["devices"]["names"]) != len(names):
        assert start.record.settings == start.configured
        assert start.configured.is_auto == state["live"]["settings"]["gpu0_bsz_auto"]


CHANGES = Replay(20, {"gpu0_bsz": 6, "lr_factor": 0.25, "recompute": "all"}), Replay(30, {"shares": [1, 3, 4]})
FALLBACK = Replay(24, {"num_pieces": 2, "is_recomputed": True})


def test_new_split_in_config_overrides_saved_setting() -> None:
    before = config_of(gpu0_bsz=2)
    state = state_of("abc", [5, 2, 1], gpu0_bsz=5, lr_factor=0.5)
    same = resumed(before, state, before, "abc", *CHANGES)
    assert (same.record.settings.gpu0_bsz, same.record.settings.lr_factor) == (5, 0.5)
    assert same.record.replays == CHANGES
    other = resumed(config_of(gpu0_bsz=1), state, before, "abc", *CHANGES)
    assert (other.record.settings.gpu0_bsz, other.record.settings.lr_factor) == (1, 0.5)
    assert other.record.replays == (Replay(20, {"lr_factor": 0.25, "recompute": "all"}),)
    assert resumed(config_of(shares=[4, 2, 2]), state, before, "abc").record.settings.shares == [4, 2, 2]
    for parallel, expected in (
        ({"gpu0_bsz": 1}, (1, None, False)),
        ({"gpu0_bsz": "auto"}, (3, None, True)),
        ({"shares": [7, 1]}, (None, [7, 1], False)),
        ({"shares": [4, 2, 2]}, (6, None, False)),  # for three devices: the last split in proportion
    ):
        live = resumed(config_of(**parallel), state, before, "ab", *CHANGES).record.settings
        assert (live.gpu0_bsz, live.shares, live.is_auto) == expected, "also on other devices than before"


def test_new_blocks_in_config_override_saved_fallback() -> None:
    before = config_of(gpu0_bsz=2)
    state = state_of("abc", [5, 2, 1], recompute="all", is_recomputed=True, num_pieces=4, gpu0_bsz=5)
    same = resumed(before, state, before, "abc", *CHANGES, FALLBACK)
    assert (same.record.settings.recompute, same.record.settings.is_recomputed) == ("all", True)
    other = resumed(config_of("auto", gpu0_bsz=2), state, before, "abc", *CHANGES, FALLBACK)
    live = other.record.settings
    assert (live.recompute, live.is_recomputed, live.num_pieces) == ("config", False, 4)
    assert (other.configured.recompute, other.configured.gpu0_bsz, live.gpu0_bsz) == ("config", 2, 5)
    later = Replay(20, {"gpu0_bsz": 6, "lr_factor": 0.25}), CHANGES[1], Replay(24, {"num_pieces": 2})
    assert other.record.replays == later, "the config is newer than the command and the fallback"


def test_split_on_trial_is_kept_or_reverted_by_a_resume() -> None:
    """The trial of a checkpoint continues, unless its split was reverted since, or the config has another."""
    before, old = config_of(gpu0_bsz=2), LiveSettings(gpu0_bsz=2, lr_factor=0.5)
    change = Change({"gpu0_bsz": 5}, received=None, id="c7", split=(5, 2, 1))
    trial = Trial(change, old, (2, 3, 3), epoch=4, step=15, steps_left=11, is_measured=True)
    state = state_of("abc", [5, 2, 1], gpu0_bsz=5, lr_factor=3)
    state["live"]["trial"] = trial.to_state()
    assert resumed(before, state, before, "abc").record.trial == trial
    assert resumed(before, state, before, "abc", reverted={(4, "c6"), (3, "c7")}).record.trial == trial
    reverted = resumed(before, state, before, "abc", reverted={(4, "c7")}).record
    assert (reverted.trial, reverted.settings.gpu0_bsz, reverted.settings.lr_factor) == (None, 2, 3)
    other = resumed(config_of(gpu0_bsz=1), state, before, "abc", reverted={(4, "c7")}).record
    assert (other.trial, other.settings.gpu0_bsz) == (None, 1)
    again, effects, _ = resumed(before, state, before, "abc").record.revert((5, 2, 1), "full") or (None, [], "")
    assert again is not None
    assert [(event.status, event.id, event.old) for event in effects] == [("reverted", "c7", 2)]  # type: ignore[union-attr]


def test_event_names_devices_that_are_gone_and_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    saved = locations("abb", 2).to_state([3, 3, 2])
    event = other_devices(saved, locations("bc"), (4, 4), 12)
    assert event is not None
    assert event.topology == Topology(ranks=2, machines=1, old_ranks=3, old_machines=2, round=2)
    assert (event.step, event.reason, event.split) == (12, "without a, b; with c", [4, 4])
    assert other_devices(saved, locations("bab", 2), (3, 3, 2), 12) is None
    assert other_devices(locations("a").to_state(None), locations("b"), None, 12) is None, (
        "one device instead of another"
    )


def test_list_for_another_number_is_a_note() -> None:
    assert shares_note(config_of(shares=[4, 4]), locations("ab"), (4, 4)) is None
    note = shares_note(config_of(shares=[4, 2, 2]), locations("ab"), (5, 3))
    assert note == (
        "parallel.shares = [4, 2, 2] is for 3 devices, and this resume has 2: split [5, 3] is planned from the last one"
    )
