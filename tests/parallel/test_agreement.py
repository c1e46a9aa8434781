"""What the machines of a job bring is compared: what differs is named with its machines, and decides the exit code."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from segapp.parallel.agreement import Agreement, MachineFacts, compare

OWN = MachineFacts(
    "node1",
    {"optim.lr": "0.014", "loss.options.gamma": "2.0", "the version of torch": "2.11.0"},
    {"the number of files of train": "144", "the content of a.png": "10 bytes with SHA-256 aa"},
    {"numpy": "2.4.0", "torch": "2.11.0+cu128"},
)


def other(machine: str = "node2", **changed: dict[str, str]) -> MachineFacts:
    """Return the facts of another machine with some values replaced; None removes one."""
    words = {name: {**getattr(OWN, name), **values} for name, values in changed.items()}
    return replace(OWN, machine=machine, **{k: {n: v for n, v in each.items() if v} for k, each in words.items()})


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize(
    ("changed", "code", "said"),
    [
        (
            {"settings": {"optim.lr": "0.5"}},
            2,
            "optim.lr is 0.5 on node2 and 0.014 on node1, node3: start all machines",
        ),
        (
            {"settings": {"loss.options.gamma": ""}},
            2,
            "loss.options.gamma is not there on node2 and 2.0 on node1, node3: start all",
        ),
        ({"settings": {"the version of torch": "2.15.0"}}, 2, "the version of torch is 2.15.0 on node2 and 2.11.0 on"),
        (
            {"data": {"the number of files of train": "141"}},
            3,
            "files of train is 141 on node2 and 144 on node1, node3",
        ),
        (
            {"data": {"the content of a.png": "10 bytes with SHA-256 bb"}},
            3,
            "the content of a.png is 10 bytes with SHA",
        ),
        ({"data": {"the content of b.png": "1 bytes"}}, 3, "the content of b.png is 1 bytes on node2 and not there on"),
        ({"others": {"numpy": "2.3.0"}}, 0, ""),
    ],
)
def test_difference_names_values_and_machines(
    changed: dict[str, dict[str, str]], code: int, said: str, is_first: bool
) -> None:
    machines = [OWN, replace(OWN, machine="node3")]
    machines.insert(0 if is_first else 2, other(**changed))
    agreement = compare(machines)
    assert agreement.code == code
    assert agreement.reason.startswith(said) or said in agreement.reason
    advice = {
        2: "start all machines with the same settings and versions",
        3: "copy the data again, or correct data.root",
    }
    assert advice.get(code, "") in agreement.reason
    if code == 0:
        assert agreement.note == (
            "the machines have different versions, which may change the results: numpy is 2.3.0 on node2 and 2.4.0 on "
            "node1, node3"
        )
    else:
        assert agreement.note is None


def test_machines_that_bring_the_same_agree() -> None:
    assert compare([OWN]) == compare([OWN, replace(OWN, machine="node1")]) == Agreement(0, "", None)


def test_error_of_a_machine_decides_before_differences() -> None:
    broken = MachineFacts("node2", {"optim.lr": "0.5"}, problem=(3, "data/train does not exist"))
    assert compare([OWN, broken, replace(broken, machine="node3", problem=(2, "no key"))]) == Agreement(
        3, "node2: data/train does not exist; node3: no key", None
    )


def test_settings_decide_before_the_data() -> None:
    agreement = compare([OWN, other(settings={"optim.lr": "1"}, data={"the number of files of train": "1"})])
    assert (agreement.code, "files" in agreement.reason) == (2, False)


def test_equal_host_names_are_told_apart_and_lines_stay_short() -> None:
    many = {f"key{i}": "1" for i in range(7)}
    agreement = compare([OWN, other("node1", settings=many)])
    assert agreement.reason.startswith("key0 is 1 on node1 (machine 1) and not there on node1 (machine 0); key1 is")
    assert "key4" in agreement.reason
    assert "key5" not in agreement.reason
    assert "; 2 more differ: start all" in agreement.reason


def test_facts_are_read_as_they_were_told() -> None:
    facts = replace(OWN, problem=(3, "no ümlaut: \x00"))
    assert MachineFacts.from_json(facts.as_json()) == facts
    assert MachineFacts.from_json(OWN.as_json()) == OWN
    other = json.dumps({"machine": "node2", "settings": {"the version of segapp": "0.9"}, "features": []})
    assert compare([OWN, MachineFacts.from_json(other)]).code == 2, "another version has other fields"
