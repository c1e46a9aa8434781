"""The split of a resumed training with another number of devices, and what is said about it."""

from __future__ import annotations

from typing import Any

import pytest

from segapp.config import RunConfig, validate_config
from segapp.training.context import DeviceLocations, first_split, shares_note, topology_event


def config_of(**parallel: Any) -> RunConfig:
    data = {"format": "folder", "root": "nowhere", "classes": ["a", "b"]}
    return validate_config({"name": "r", "data": data, "train": {"batch_size": 8}, "parallel": parallel})


def locations(names: str, num_machines: int = 1) -> DeviceLocations:
    return DeviceLocations(tuple(names), num_machines)


def state_of(names: str, split: list[int] | None, **settings: Any) -> dict[str, Any]:
    """Return what a checkpoint says of the devices and the settings in force."""
    known = {"gpu0_bsz": None, "gpu0_bsz_auto": False, "shares": None, **settings}
    return {"topology": locations(names).to_state(split), "settings": known}


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
        ({"gpu0_bsz": 1}, state_of("abc", [1, 4, 3], gpu0_bsz=1), "a", (None, None)),
        ({}, state_of("abc", [4, 2, 2], shares=[4, 2, 2]), "bc", (None, [4, 4])),  # by a command
        ({"gpu0_bsz": 2}, {"settings": {}}, "abc", (2, None)),  # a checkpoint of an earlier version
    ],
)  # fmt: skip
def test_split_is_planned_anew_for_another_number_of_devices(
    parallel: dict[str, Any], state: dict[str, Any] | None, names: str, expected: tuple[Any, Any]
) -> None:
    assert first_split(config_of(**parallel), None, state, locations(names)) == expected


def test_topology_names_devices_that_are_gone_and_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    saved = locations("abb", 2).to_state([3, 3, 2])
    event = topology_event(saved, locations("bc"), (4, 4), 12)
    assert event is not None
    told = (event.step, event.ranks, event.machines, event.old_ranks, event.old_machines, event.round)
    assert told == (12, 2, 1, 3, 2, 2)
    assert (event.reason, event.split) == ("without a, b; with c", [4, 4])
    assert topology_event(saved, locations("bab", 2), (3, 3, 2), 12) is None
    assert topology_event(locations("a").to_state(None), locations("b"), None, 12) is None, (
        "one device instead of another"
    )
    assert topology_event(None, locations("ab"), (4, 4), 12) is None


def test_list_for_another_number_is_a_note() -> None:
    assert shares_note(config_of(shares=[4, 4]), locations("ab"), (4, 4)) is None
    note = shares_note(config_of(shares=[4, 2, 2]), locations("ab"), (5, 3))
    assert note == (
        "parallel.shares = [4, 2, 2] is for 3 devices, and this resume has 2: split [5, 3] is planned from the last one"
    )
