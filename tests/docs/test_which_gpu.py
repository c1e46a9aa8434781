"""The table "which GPU" of `platforms`: its rows fit the shipped configs, and with `-m slow` the memory plan."""

from __future__ import annotations

import re

import pytest
import yaml

from segapp.commands.plan import parse_gpus
from segapp.config import load_config
from segapp.docs.pages import find_page
from segapp.planning.plan import plan_memory
from tests.support import ROOT

ROWS = re.findall(
    r"^\| `([\w-]+)\.yaml` \| ([\d x]+) \| (\d+) \| (.+) \|$", find_page("platforms")[0].text(), re.MULTILINE
)
GIB = (8, 11, 24, 80)
WORDS = ("as it is", "recompute", "no")


def test_table_has_every_config_that_trains_on_its_own() -> None:
    shipped = {path.stem for path in (ROOT / "configs").glob("*.yaml")}
    assert {name for name, *_ in ROWS} == shipped - {"camvid-distill"}


@pytest.mark.parametrize(("name", "images", "mib", "ways"), ROWS, ids=lambda value: str(value)[:30])
def test_every_way_keeps_the_images_of_a_step(name: str, images: str, mib: str, ways: str) -> None:
    train = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())["train"]
    batch, accumulate = train["batch_size"], train.get("accumulate", 1)
    assert images == (str(batch) if accumulate == 1 else f"{batch} x {accumulate}")
    for gib, way in zip(GIB, ways.split(" | "), strict=True):
        assert (int(mib) <= 1024 * gib) == (way == "as it is")
        if way not in WORDS:
            own_batch, own_accumulate = (int(part) for part in way.split(" x "))
            assert own_batch * own_accumulate == batch * accumulate
            assert own_batch < batch


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "images", "mib", "ways"), ROWS, ids=lambda value: str(value)[:30])
def test_plan_says_the_same_memory(
    name: str, images: str, mib: str, ways: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # the demo's images are there
    peaks: dict[str, float] = {}
    for gib, way in zip(GIB, ways.split(" | "), strict=True):
        batch, _, accumulate = way.partition(" x ")
        split = [f"train.batch_size={batch}", f"train.accumulate={accumulate}"] if accumulate else []
        words = ["train.recompute=all"] if way in ("recompute", "no") else split
        if str(words) not in peaks:
            config = load_config(ROOT / "configs" / f"{name}.yaml", words)
            plan = plan_memory(config, parse_gpus(f"{GIB[-1]}GiB"))
            assert plan.current is not None
            (peaks[str(words)],) = plan.current.peak_mib
        peak = peaks[str(words)]
        assert (peak <= 1024 * gib) == (way != "no"), f"{way} on {gib} GiB: {peak:.0f} MiB"
        assert way != "as it is" or peak == pytest.approx(float(mib), abs=2)
