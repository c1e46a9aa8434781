"""The fuzzer's targets hold on their seeds, on mutations of them, and on every input that was once a finding.

Mutated folders of every converter are converted or refused, within 1 GiB of memory and 20 s.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segapp.run.events import EventReader
from segapp.view.view import EventFold, View
from tests.fuzz.converters import SAMPLES, convert_mutations
from tests.fuzz.targets import TARGETS, mutate
from tests.support.limits import outcome

FINDINGS = {
    "a TIFF whose directory lacks its sides": (
        "mask",
        bytes.fromhex(
            "49492a0008000000090000010400010000000900000001010400010000000700000002010300010000000800000003010300010000"
            "000100000006010300010000000100000011010400010000007a00000016010400010000000700000017010400010000003f000000"
            "1c010301010400010000000100000001"
        ),
    ),
    "a GIF that ends in the header of its next frame": (
        "mask",
        bytes.fromhex("474946383761010202020000002c00000101010202020000002c"),
    ),
    "the root itself in a list": ("list", b".\t./80.png\n"),
    "a link out of the root in a list": ("list", b"80.png out/passwd\n"),
    "a TIFF with two heights": (
        "mask",
        bytes.fromhex(
            "49492a00080000000900000104000100000009000000010104000100000007000000020103000100000008000000010103000100"
            "00000100000006010300010000000100000011010400010000007a00000016010400010000000700000017010400010000003f00"
            "00001c01030001655849660000000100000000000000000102000102000102000102000102000102000102000102000102000102"
            "000102000102000102000102000102000102000102000102000102000102000102"
        ),
    ),
}


@pytest.mark.parametrize("name", TARGETS)
def test_fuzz_target_holds_on_seeds_and_mutations(name: str) -> None:
    target = TARGETS[name]
    seeds, rng = target.seeds(), random.Random(0)
    for data in [*seeds, *(mutate(rng.choice(seeds), rng, target.words) for _ in range(150))]:
        target.run(data)


@pytest.mark.parametrize("what", FINDINGS)
def test_inputs_of_fixed_defects_hold(what: str) -> None:
    name, data = FINDINGS[what]
    TARGETS[name].run(data)


def test_step_that_turns_into_something_else_is_folded(tmp_path: Path) -> None:
    line = b'{"v":1,"seq":4,"t":0,"type":"step","epoch":1,"step":2,"loss":0.1,"type":"memory","devices":[{"":""}]}\n'
    (tmp_path / "events.jsonl").write_bytes(line)
    EventFold(view := View()).add(EventReader(tmp_path / "events.jsonl").read_skimmed())
    assert view.num_events == 1


@given(st.binary(max_size=300))
def test_fuzz_target_refuses_or_holds_on_any_bytes(data: bytes) -> None:
    for target in TARGETS.values():
        target.run(data)


@pytest.mark.parametrize("title", SAMPLES)
def test_mutated_folder_is_converted_or_refused(title: str) -> None:
    assert outcome(convert_mutations, title, range(10), limit_s=200.0) == ("done", [])
