"""A step on the CPU that exceeds the memory of a machine is refused before it is made; what fits is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from segapp.config import load_config
from segapp.datasets import resources
from segapp.datasets.layouts.formats import DATASETS
from segapp.errors import ConfigError, RunError
from segapp.memory.peaks import PhasePeak, SimulationJob, SimulationResult
from segapp.parallel.distributed import Ranks
from segapp.planning import auto
from segapp.planning.auto import check_host_memory
from segapp.session.start_checks import check_crop
from tests.session.test_start_checks import Network
from tests.support.runs import events, merged, train

CONFIGS = Path(__file__).parents[2] / "configs"
MIB = 2**20


class OneOf(Ranks):
    """The main rank of several, whose machines have memory (total, free) in MiB."""

    def __init__(self, machines: Sequence[tuple[str, int, int]]) -> None:
        super().__init__()
        self._machines, self.world_size = machines, len(machines)

    def gather(self, value: Any) -> list[Any]:
        return [(name, total * MIB, free * MIB) for name, total, free in self._machines]

    def from_main(self, value: Any) -> Any:
        return value


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[SimulationJob]:
    """The jobs of a pool in which every image takes 100 MiB; 13 images cannot be simulated."""
    jobs: list[SimulationJob] = []

    class Pool:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None: ...
        def simulate(self, given: Sequence[SimulationJob]) -> list[SimulationResult]:
            jobs.extend(given)
            if sum(given[0].split) == 13:
                raise RunError("data-dependent shapes")
            return [SimulationResult(({"loss": PhasePeak(100.0 * sum(job.split))},)) for job in given]

    monkeypatch.setattr(auto, "SimulationPool", Pool)
    return jobs


ONE, THREE = [("a", 4000, 3000)], [("a", 9000, 2500), ("b", 4000, 3000), ("b", 4000, 3000)]


@pytest.mark.parametrize(
    ("num_images", "machines", "workers", "words", "is_refused"),
    [  # 2 evaluated images of 1 Mpx and 4 bytes are loaded; with 2 workers, 5 times as much and 24.6 MiB of the ring
        (29, ONE, 0, None, False),
        (30, ONE, 0, "needs about 3,000 MiB, and batches that are loaded ahead 8 MiB; of 4,000 MiB of", False),
        (48, ONE, 0, "MiB are free: lower data.crop_px, or set train.batch_size to 24 or less, or end other", False),
        (49, ONE, 0, "3,000 MiB are free: lower data.crop_px, or set train.batch_size to 32 or less", True),
        (30, ONE, 2, "loaded ahead 65 MiB; of 4,000", False),
        (43, THREE, 0, "needs about 3,000 MiB, and batches that are loaded ahead 16 MiB; of 4,000 MiB", False),
        (42, THREE, 0, None, False),
        (72, THREE, 0, "a step of 72 crops of 520 x 516 px needs about 4,800 MiB", False),
        (75, THREE, 0, "a step of 75 crops of 520 x 516 px needs about 5,000 MiB", True),
        (13, ONE, 0, None, False),
    ],
)
def test_memory_of_a_step_is_compared_with_each_machine(tiny, asked, num_images, machines, workers, words, is_refused):
    data = {"crop_px": [520, 516], "workers": workers}
    config = merged(tiny, data=data, train={"batch_size": 3}, eval={"batch_size": 2})

    def said() -> str | None:
        return check_host_memory(config, num_images, MIB, OneOf(machines))

    if is_refused:
        with pytest.raises(ConfigError) as caught:
            said()
        assert words in str(caught.value)
        assert "or end other programs" not in str(caught.value)
    else:
        found = said()
        assert found is None if words is None else words in (found or "")
    assert [job.split for job in asked] == [(math.ceil(num_images / len(machines)),)]


@pytest.mark.parametrize(("free_mib", "is_simulated"), [(41, False), (40, True)])
def test_a_small_step_is_not_simulated(tiny, asked, free_mib, is_simulated):
    """2 crops of 32 x 32 px at 16 KiB are 32 MiB; 3 evaluated images of 3 x 2^18 px and 4 bytes are 9 MiB."""
    config = merged(tiny, data={"crop_px": [32, 32]}, eval={"batch_size": 3})
    check_host_memory(config, 2, 3 * 2**18, OneOf([("a", 4000, free_mib)]))
    assert bool(asked) == is_simulated


def test_evaluated_batches_are_named_if_they_need_more(tiny, asked):
    config = merged(tiny, data={"crop_px": [520, 516], "workers": 3}, eval={"batch_size": 11})
    with pytest.raises(ConfigError, match=r"loaded ahead 6,1\d\d MiB; .*: lower eval.batch_size or data.workers$"):
        check_host_memory(config, 5, 20 * MIB, OneOf(ONE))


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_no_packaged_config_is_refused_at_its_own_sizes(name, asked):
    config = load_config(CONFIGS / name)
    largest_px = DATASETS[config.data.format].usual_px if config.data.format in DATASETS else None
    check_crop(config.data, largest_px, Network())
    num_images = min(config.train.batch_size or 2, 13)
    assert check_host_memory(config, num_images, 2 * MIB, OneOf([("a", 24_000, 20_000)])) is None


def limited(folder: Path, total_mib: int, used_mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this process the control group of a container."""
    values = {"memory.max": total_mib * MIB, "memory.current": used_mib * MIB, "memory.stat": "file 0\nshmem 0"}
    folder.mkdir()
    for name, value in values.items():
        (folder / name).write_text(f"{value}\n")
    monkeypatch.setattr(resources, "_GROUP", folder)
    monkeypatch.setattr(resources, "_OWN_GROUPS", folder / "none")
    monkeypatch.setattr(resources.psutil, "swap_memory", lambda: type("Swap", (), {"total": 0}))


CONTAINER: dict[str, Any] = {"data": {"crop_px": [96, 120]}, "train": {"batch_size": 3, "steps": 1, "epochs": 1}}


@pytest.mark.slow
def test_a_real_step_of_three_crops_is_predicted_and_refused(tiny, tmp_path, monkeypatch):
    """It needs more than 4 MiB."""
    limited(tmp_path / "small", 5, 1, monkeypatch)
    with pytest.raises(ConfigError, match=r"a step of 3 crops of 96 x 120 px .* of 5 MiB of memory, 4 MiB") as caught:
        train(merged(tiny, **CONTAINER), tmp_path / "run")
    assert caught.value.topic == "out-of-memory"
    assert not (tmp_path / "run").exists()


def test_a_run_in_a_small_container_ends_before_its_first_step(tiny, asked, tmp_path, monkeypatch):
    limited(tmp_path / "small", 100, 10, monkeypatch)
    accumulated = merged(tiny, **CONTAINER | {"train": {"batch_size": 3, "accumulate": 2}})
    with pytest.raises(
        ConfigError, match=r"a step of 3 crops of 96 x 120 px .* of 100 MiB of memory, 90 MiB"
    ) as caught:
        train(accumulated, tmp_path / "run")
    assert caught.value.topic == "out-of-memory"
    assert not (tmp_path / "run").exists()
    assert asked == [SimulationJob("single", (3,), 2)]


def test_a_run_in_a_full_container_begins_with_an_alert(tiny, asked, tmp_path, monkeypatch):
    limited(tmp_path / "full", 4000, 3990, monkeypatch)
    assert train(merged(tiny, **CONTAINER), tmp_path / "run") == 0
    (alert,) = [event for event in events(tmp_path / "run", "alert") if event["kind"] == "memory"]
    assert "of 4,000 MiB of memory, 10 MiB are free: lower data.crop_px, or end other programs" in alert["message"]
    assert [job.split for job in asked] == [(3,)]
