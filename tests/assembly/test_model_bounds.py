"""Networks and values in strangers' checkpoints and configs take memory in proportion to the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.assembly.network import build_network, restored_network
from segapp.bounds import check_values
from segapp.checkpoint.training_state import load_checkpoint
from segapp.config import load_config, validate_config
from segapp.errors import CheckpointError, ConfigError
from segapp.models.weights import read_weights_file
from tests.support.limits import outcome

CONFIG: dict[str, Any] = {
    "name": "x",
    "data": {"format": "list", "root": "d", "classes": ["a", "b"]},
    "model": {"library": "smp", "name": "Unet", "encoder": "resnet18", "weights_backbone": None},
}


def checkpoint(path: Path, config: Any) -> Path:
    """Writes a checkpoint whose network has one small tensor."""
    about = {"format": 1, "step": 1, "epoch": 1, "position": 0}
    state = {"model": {"w": torch.zeros(3)}, "checkpoint": about, "classes": ["a", "b"], "data": {}, "config": config}
    torch.save(state, path)
    return path


def repeated(value: Any) -> Any:
    """A list of 10^9 references to a value."""
    for _ in range(9):
        value = [value] * 10
    return value


def restored(path: Path) -> None:
    restored_network(load_checkpoint(path))


@pytest.mark.parametrize("position", [4, pytest.param(0, marks=pytest.mark.slow)])
def test_network_of_a_checkpoint_is_no_larger_than_its_tensors(position: int, tmp_path: Path) -> None:
    channels = [256, 128, 64, 32, 16]
    channels[position] = 2_000_000
    config = {**CONFIG, "model": {**CONFIG["model"], "options": {"decoder_channels": channels}}}
    kind, said = outcome(restored, checkpoint(tmp_path / "a.pt", config), limit_s=120)  # it imports smp
    assert kind == "refused", said
    assert "the model needs more than 256 MiB of memory" in said


@pytest.mark.parametrize("key", ["loss", "name"])
def test_repeated_references_in_a_saved_config_are_refused(key: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "a.pt", {**CONFIG, key: repeated("x")})
    assert path.stat().st_size < 10_000
    kind, said = outcome(restored, path)
    assert kind == "refused", said
    assert "its values are repeated or nested too often" in said


@pytest.mark.parametrize("content", [repeated(0), repeated("x" * 1000), {"a": {"b": repeated({})}}])
def test_repeated_references_in_a_file_of_tensors_are_refused(content: Any, tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.zeros(3)}, "optimizer": content}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="repeated or nested too often"):
        read_weights_file(tmp_path / "a.pt")


def test_values_that_refer_to_themselves_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="repeated or nested"):
        check_values(loop, 100)


def test_repeated_text_in_a_config_is_refused() -> None:
    text = "x" * 2**17
    with pytest.raises(ConfigError, match="the config cannot be read: its values are repeated"):
        validate_config({**CONFIG, "data": {**CONFIG["data"], "classes": [text] * 20}})


def test_network_larger_than_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    section = validate_config(CONFIG).model
    assert build_network(section, 3).num_classes == 3
    monkeypatch.setattr("segapp.assembly.network.available_bytes", lambda: 40 << 20)
    with pytest.raises(ConfigError, match=r"needs more than 40\.0 MiB of memory, which is all that is free"):
        build_network(section, 3)


def test_config_of_many_values_is_read(tmp_path: Path) -> None:
    palette = [[number % 256, number // 256, 7] for number in range(1000)]
    names = [f"class_{number}" for number in range(1000)]
    data = f"{{format: list, root: d, classes: {names}, palette: {palette}, rgb_masks: true}}"
    (tmp_path / "a.yaml").write_text(f"name: x\ndata: {data}\n")
    assert len(load_config(tmp_path / "a.yaml").data.palette or ()) == 1000
