"""The mode that `parallel.mode: auto` takes, and the same rule in `segapp plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.assembly import devices as module
from segapp.assembly.devices import choose_devices, plan_devices
from segapp.config import RunConfig, validate_config
from segapp.config.modes import FEATURES, Feature
from segapp.errors import ConfigError
from segapp.memory.gpus import visible_gpus
from segapp.planning.plan import choose_mode
from tests.support.fake_smi import FOUR, smi_of
from tests.support.gpu.fake_cuda import FakeCuda, FakeGpu


@pytest.fixture(autouse=True)
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every name of a CUDA device resolve, and `auto` find three of them and NCCL."""

    def choose(requested: Any) -> tuple[list[torch.device], str]:
        names = ["cuda:0", "cuda:1", "cuda:2"] if requested == "auto" else requested
        return [torch.device(name) for name in names], "as the test says"

    monkeypatch.setattr(module, "choose_devices", choose)
    monkeypatch.setattr(module.dist, "is_nccl_available", lambda: True)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def config_of(parallel: dict[str, Any] | None = None, batch_size: int = 8, **sections: Any) -> RunConfig:
    raw = {"name": "x", "data": {"format": "camvid", "root": "."}, "train": {"batch_size": batch_size}}
    return validate_config({**raw, "parallel": parallel or {}, **sections})


@pytest.mark.parametrize(
    ("section", "mode", "why"),
    [
        ({}, "ddp", "one process for each GPU"),
        ({"gpu0_bsz": 2}, "dp", "the batch split is set"),
        ({"gpu0_bsz": "auto"}, "dp", "the batch split is set"),
        ({"shares": [2, 3, 3]}, "dp", "the batch split is set"),
        ({"devices": ["cpu", "cpu"]}, "dp", "logical devices"),
        ({"devices": ["cuda:0", "cuda:0"]}, "dp", "logical devices"),
        ({"devices": ["cuda:1"]}, "single", ""),
        ({"mode": "dp"}, "dp", ""),
        ({"mode": "ddp", "gpu0_bsz": 2}, "ddp", ""),
        ({"mode": "model"}, "model", ""),
    ],
)
def test_mode_of_a_section_and_the_reason_for_it(section: dict[str, Any], mode: str, why: str) -> None:
    config = config_of(section)
    found = plan_devices(config)
    assert found.mode == mode
    if "devices" not in section:
        assert choose_mode(config, 3) == mode, "segapp plan"
    assert why in found.mode_reason
    assert bool(why) == bool(found.mode_reason)
    assert f"mode {mode}" in found.description


def test_auto_takes_dp_where_ranks_are_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    for batch_size, mode in ((2, "dp"), (3, "ddp")):
        config = config_of(batch_size=batch_size)
        assert plan_devices(config).mode == choose_mode(config, 3) == mode
    assert plan_devices(config_of(), is_one_process=True).mode == "dp"
    monkeypatch.setattr(module.dist, "is_nccl_available", lambda: False)
    assert plan_devices(config_of()).mode == "dp"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert plan_devices(config_of()).mode == "ddp"


COMPILED = {"train": {"compile": True}}
DISTILLED = {"distill": {"teacher": "t"}}
EOMT = {
    "model": {"library": "segapp", "name": "eomt", "encoder": "tu-vit"},
    "loss": {"name": "mask_classification"},
}


def test_split_in_a_mode_that_cannot_do_the_rest_is_refused() -> None:
    for config in (config_of({"gpu0_bsz": 2}, **COMPILED), config_of({"devices": ["cpu", "cpu"]}, **COMPILED)):
        with pytest.raises(ConfigError, match=r"train\.compile does not support parallel\.mode: dp: use single or ddp"):
            plan_devices(config)
    assert plan_devices(config_of({"gpu0_bsz": 2, "mode": "ddp"}, **COMPILED)).mode == "ddp"
    with pytest.raises(
        ConfigError, match=r"parallel\.mode = dp on mps:0, mps:1: only CUDA and CPU devices work together"
    ):
        plan_devices(config_of({"devices": ["cpu", "mps:0", "mps:1"], "mode": "dp"}))


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.key)
def test_config_planner_and_training_refuse_the_same_modes(feature: Feature) -> None:
    asked: dict[str, dict[str, Any]] = {
        "train.compile": COMPILED,
        "train.compile reduce-overhead": {"train": {"compile": "reduce-overhead"}},
        "distill": DISTILLED,
        "model.name eomt": EOMT,
    }
    own = asked[f"{feature.key} {feature.value}".strip()]
    for mode in ("single", "dp", "ddp", "model"):
        config = config_of({}, **own)  # `auto`, so that no check has been made yet
        forced = config.model_copy(update={"parallel": config.parallel.model_copy(update={"mode": mode})})
        num_gpus = 1 if mode == "single" else 3
        if mode in feature.modes:
            assert config_of({"mode": mode}, **own)
            assert plan_devices(forced).mode == choose_mode(forced, num_gpus) == mode
            continue
        for act in (
            lambda mode=mode: config_of({"mode": mode}, **own),
            lambda forced=forced: plan_devices(forced),
            lambda forced=forced, num_gpus=num_gpus: choose_mode(forced, num_gpus),
        ):
            with pytest.raises(ConfigError, match=f"{feature.key}:? {feature.problem(mode)}"):
                act()


@pytest.mark.parametrize("value", ["mtia", ["hpu:0"], "meta", ["foo"], ["cpuu", "foo"]], ids=str)
def test_device_of_an_unknown_kind_is_refused_by_its_key(value: str | list[str | int]) -> None:
    first = value if isinstance(value, str) else value[0]
    hint = r" \(did you mean cpu\?\)" if first == "cpuu" else ""
    with pytest.raises(
        ConfigError, match=f"^parallel.devices: device '{first}' .*: use 'cpu', 'cuda:0' or[^(]*{hint}"
    ) as caught:
        choose_devices(value)
    assert caught.value.exit_code == 2


FACTS = {"1a4e": 49140, "1b77": 12288, "2c05": 12037, "9d31": 24576}


@pytest.mark.parametrize(
    ("visible", "uuids", "indices", "free_mib", "note"),
    [
        ("GPU-2,GPU-9,GPU-1a", ["2c05", "9d31", "1a4e"], [2, 1, 0], [48840, 23876, 10537], ""),
        ("3,7", ["9d31"], [0], [23876], "; CUDA_VISIBLE_DEVICES='3,7' ends for CUDA at '7', which names no GPU: name "),
        ("NoDevFiles", [], [], [], "; CUDA_VISIBLE_DEVICES='NoDevFiles' hides every GPU: unset it"),
        ("2", ["9d31"], [0], [23876], "CUDA may count the fastest GPU first"),  # torch sees another than nvidia-smi's 2
    ],
)
def test_auto_orders_what_torch_sees_and_says_what_is_hidden(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fake_cuda: FakeCuda,
    visible: str,
    uuids: list[str],
    indices: list[int],
    free_mib: list[int],
    note: str,
) -> None:
    smi_of(tmp_path, FOUR, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    fake_cuda.gpus = [FakeGpu(uuid, total=FACTS[uuid] << 20) for uuid in uuids]
    devices, reason = choose_devices("auto")
    assert devices == ([torch.device("cuda", index) for index in indices] or [torch.device("cpu")])
    places = zip(indices, free_mib, strict=True)
    assert ", ".join(f"cuda:{index} {mib} MiB free" for index, mib in places) in reason
    assert note in reason
    assert ("CUDA_VISIBLE_DEVICES" in reason) == bool(note)
    assert ({gpu.uuid for gpu in visible_gpus().gpus} == set(uuids)) == (visible != "2")


@pytest.mark.usefixtures("fake_cuda")
def test_hidden_gpu_of_a_config_is_refused_with_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi_of(tmp_path, FOUR, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "NoDevFiles")
    with pytest.raises(ConfigError, match=r"no CUDA device is visible here.*CUDA_VISIBLE_DEVICES='NoDevFiles' hides"):
        choose_devices([1])
