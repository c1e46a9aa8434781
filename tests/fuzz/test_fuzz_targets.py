"""The fuzzer's targets hold on their seeds, on mutations of them, and on every input that was once a finding."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segapp.run.events import EventReader
from segapp.view.view import EventFold, View
from tests.fuzz.targets import TARGETS, mutate, with_checksums

FINDINGS = {
    "a step that turns into something else behind its first fields": (
        "events",
        b'{"v":1,"seq":4,"t":0,"type":"step","epoch":1,"step":2,"loss":0.1,"type":"memory","devices":[{"":""}]}\n',
    ),
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


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_fuzz_target_holds_on_many_mutations(name: str) -> None:
    target = TARGETS[name]
    seeds, rng = target.seeds(), random.Random(1)
    for _ in range(4_000 if name == "config" else 20_000):
        target.run(mutate(rng.choice(seeds), rng, target.words))


@pytest.mark.parametrize("what", FINDINGS)
def test_inputs_of_fixed_defects_hold(what: str) -> None:
    name, data = FINDINGS[what]
    TARGETS[name].run(data)


@given(st.binary(max_size=300))
def test_fuzz_target_refuses_or_holds_on_any_bytes(data: bytes) -> None:
    for target in TARGETS.values():
        target.run(data)


def test_checksums_of_a_mutated_image_are_corrected() -> None:
    (png, *_) = TARGETS["mask"].seeds()
    damaged = bytearray(png)
    damaged[20] ^= 1  # width, in IHDR
    assert with_checksums(bytes(damaged))[20] == damaged[20]
    assert with_checksums(bytes(damaged)) != bytes(damaged)
    assert with_checksums(png) == png


def test_any_prefix_of_events_folds_like_a_run_at_that_point(tmp_path: Path) -> None:
    (whole, *_) = TARGETS["events"].seeds()
    path = tmp_path / "events.jsonl"
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        view = View()
        EventFold(view).add(EventReader(path).read_raw())
        steps = [json.loads(line) for line in whole[:end].split(b"\n")[:-1]]
        assert view.num_events == len(steps)
        last = [event["step"] for event in steps if event["type"] == "step"]
        assert (view.step.step if view.step else None) == (last[-1] if last else None)
