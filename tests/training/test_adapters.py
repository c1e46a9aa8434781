"""LoRA: what is trained, at any split; what checkpoints hold; networks with merged adapters; what is refused."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from segapp.assembly.network import build_network, find_checkpoint, network_state
from segapp.assembly.optimizer import group_settings
from segapp.assembly.pairs import build_scheme
from segapp.assembly.trained import read_trained
from segapp.commands.export import export_target
from segapp.config import RunConfig
from segapp.errors import CheckpointError, ConfigError
from segapp.memory.peaks import SimulationJob
from segapp.models import SegmentationModel, build_model
from segapp.models.adapters import add_adapters, merge_adapters
from segapp.planning.simulate import build_simulator
from segapp.training.step.assembler import StepAssembler
from tests.support.golden_runs import float64
from tests.support.runs import events, final_state, losses, merged, resume, train

VIT = {"encoder": "tu-vit_tiny_patch16_224", "name": "eomt", "library": "segapp"}
SMALL = {"depth": 3, "embed_dim": 48, "num_heads": 3, "num_queries": 6, "num_blocks": 2}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A weights file of the backbone."""
    torch.manual_seed(7)
    path = tmp_path_factory.mktemp("weights") / "backbone.pt"
    torch.save(
        build_model("segapp", "eomt", 3, encoder=VIT["encoder"], options=SMALL).backbone_module.state_dict(), path
    )
    return path


@pytest.fixture(scope="module")
def lora(base: dict[str, Any], backbone: Path) -> dict[str, Any]:
    """EoMT on a small ViT with adapters; two steps an epoch."""
    return {
        **base,
        "data": {**base["data"], "crop_px": [32, 48]},
        "model": {**VIT, "options": SMALL, "weights_backbone": str(backbone), "adapters": 4},
        "loss": {"name": "mask_classification"},
        "optim": {"name": "adamw", "lr": 0.001},
        "train": {"epochs": 2, "batch_size": 5, "ema": 0.9},
    }


@pytest.fixture(scope="module")
def run(lora: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "run"
    assert train(merged(lora), folder) == 0
    return folder


def test_checkpoint_holds_adapters_head_and_their_average(lora: dict[str, Any], run: Path) -> None:
    small, names = final_state(run), list(assembled(lora)[1].state_dict())
    trained = [name for name in names if ".lora_" in name or not name.startswith("encoder.")]
    assert list(small["model"]) == list(small["ema"]["module"]) == trained
    assert small["base"]["num_tensors"] == len(names) - len(trained)
    assert len(small["optimizer"]["state"]) == len(trained) - sum("num_updates" in name for name in trained)
    (start,) = events(run, "run_start")
    num_trained = sum(small["model"][name].numel() for name in trained)
    assert start["num_trainable"] == num_trained
    states = 4 * 4 * num_trained  # weights, their average and two of AdamW, each of float32
    assert states < (run / "checkpoints" / "last.pt").stat().st_size < 1.3 * states + 100_000


def test_dp_trains_adapters_as_one_device(lora: dict[str, Any], tmp_path: Path) -> None:
    """In float64: what differs is the order of the sums."""
    dp = {"mode": "dp", "devices": ["cpu", "cpu", "cpu"], "shares": [0, 1, 4]}
    with float64():
        assert train(merged(lora, train={"epochs": 1}), tmp_path / "single") == 0
        assert train(merged(lora, train={"epochs": 1}, parallel=dp), tmp_path / "dp") == 0
    assert losses(tmp_path / "dp") == pytest.approx(losses(tmp_path / "single"), rel=1e-12)
    assert len(losses(tmp_path / "dp")) == 2


@pytest.mark.slow
def test_other_base_is_refused_at_resume_and_by_readers(lora: dict[str, Any], run: Path, tmp_path: Path) -> None:
    """The same content in another file continues the run."""
    same, other, own = tmp_path / "same.pt", tmp_path / "other.pt", Path(lora["model"]["weights_backbone"])
    shutil.copytree(run, tmp_path / "run")
    weights = torch.load(own, weights_only=True)
    torch.save(weights, same)
    weights["blocks.0.norm1.weight"][0] += 1e-6
    torch.save(weights, other)
    config_of = lambda path: merged(lora, model={"weights_backbone": str(path)}, train={"epochs": 3})  # noqa: E731
    with pytest.raises(CheckpointError, match=r"only adapters and head.*backbone.pt with sha256 \w{16}, and sha256"):
        resume(config_of(other), tmp_path / "run")
    assert resume(config_of(same), tmp_path / "run") == 0
    assert read_trained(str(tmp_path / "run")).step == 6
    same.unlink()
    with pytest.raises(CheckpointError, match=r"epoch_0003.pt holds only adapters and head, their base: .*no"):
        read_trained(str(tmp_path / "run" / "checkpoints" / "epoch_0003.pt"))


def test_random_base_is_saved_whole_and_said(lora: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    config = merged(lora, model={"weights_backbone": None}, train={"epochs": 1})
    assert train(config, tmp_path / "run") == 0
    assert "checkpoints hold the whole model, the frozen backbone too: no weights file" in capsys.readouterr().out
    state = final_state(tmp_path / "run")
    assert "base" not in state
    assert "encoder.blocks.0.attn.qkv.base_layer.weight" in state["model"]
    assert read_trained(str(tmp_path / "run")).step == 2


NETWORKS = [
    ("segapp", "eomt", "tu-vit_tiny_patch16_224", SMALL),
    ("smp", "Segformer", "mit_b0", {"decoder_segmentation_channels": 16}),
    ("smp", "DPT", "tu-vit_tiny_patch16_224", {"decoder_fusion_channels": 16}),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("library", "name", "encoder", "options"), NETWORKS)
def test_merged_network_computes_what_the_adapted_did(library: str, name: str, encoder: str, options: Any) -> None:
    """In float64, with adapters that have an effect: those of the initialisation have none."""
    torch.manual_seed(0)
    model, plain = (build_model(library, name, 3, encoder=encoder, options=options).eval().double() for _ in range(2))
    add_adapters(model, 4)
    for key, parameter in model.named_parameters():
        if ".lora_B." in key:
            nn.init.normal_(parameter, std=0.05)
    model.double()
    images = torch.randn(2, 3, *model.suitable_size(64, 64), dtype=torch.float64)
    with torch.no_grad():
        wanted = model(images)[0]
        plain.load_state_dict(merge_adapters(model).state_dict())
        torch.testing.assert_close(plain(images)[0], wanted, rtol=0, atol=1e-13 * float(wanted.abs().max()))


@pytest.mark.slow
def test_predict_export_and_from_run_use_the_merged_network(lora: dict[str, Any], run: Path, tmp_path: Path) -> None:
    assembler = StepAssembler(merged(lora), build_scheme(merged(lora).data))
    adapted = assembler.build_model(with_weights=True)
    adapted.load_state_dict(network_state(find_checkpoint(str(run)).state), strict=False)
    images = torch.randn(2, 3, 32, 48)
    with torch.no_grad():
        wanted = adapted.eval()(images)[0]
        assert not torch.equal(wanted, assembler.build_model(with_weights=True).eval()(images)[0])
        export_target(str(run), tmp_path / "net.safetensors", format=None, argmax=False)
        plain = merged(lora, model={"adapters": None, "weights_backbone": None}).model
        others = [
            read_trained(str(run)).model,
            read_trained(str(tmp_path / "net.safetensors")).model,
            build_network(plain.model_copy(update={"weights": str(run)}), 3),
            build_network(plain.model_copy(update={"weights": str(run / "checkpoints" / "best.pt")}), 3),
        ]
        for model in others:
            assert not any("lora" in name for name in model.state_dict())
            assert float((model.eval()(images)[0] - wanted).abs().max()) < 1e-6


@pytest.mark.slow
def test_plan_counts_gradients_and_state_of_adapters_only(lora: dict[str, Any]) -> None:
    """AdamW's two states of float32, and no second copy of the backbone in the average of the weights."""
    simulator = build_simulator(merged(lora, model={"weights_backbone": None}))
    (phases,) = simulator.run(SimulationJob("single", (2,)), alloc_unit_bytes=1).devices
    model = simulator.assembler.build_model(with_weights=False)
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    mib = {kind: phases["step"].by_kind[kind] * 2**20 / 4 for kind in ("optimizer", "average", "gradients")}
    assert mib["optimizer"] == pytest.approx(2 * num_trained, rel=0.01)  # and counts of steps
    assert mib["average"] == pytest.approx(num_trained, rel=0.01)
    assert mib["gradients"] == pytest.approx(num_trained, rel=0.01)


def assembled(lora: dict[str, Any], **sections: Any) -> tuple[RunConfig, SegmentationModel]:
    config = merged(lora, **sections)
    return config, StepAssembler(config, build_scheme(config.data)).build_model(with_weights=False)


def test_freeze_thaw_and_layer_decay_apply_to_adapters(lora: dict[str, Any]) -> None:
    freeze = {"freeze": ["encoder.blocks.0", "decoder"], "freeze_epochs": 1}
    config, model = assembled(lora, model=freeze, optim={"layer_decay": 0.5})
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert not any(name.startswith(("encoder.blocks.0.", "decoder.")) for name in trained)
    thawed = set(model.unfreeze())
    now = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert now == trained | thawed
    assert all(".lora_" in name for name in now if name.startswith("encoder."))
    factors = {name: each.lr_factor for name, each in group_settings(config.optim, model).items() if name in now}
    for number in range(3):
        of_block = {factor for name, factor in factors.items() if name.startswith(f"encoder.blocks.{number}.")}
        assert of_block == {0.5 ** (3 - number)}


def test_backbone_without_a_layer_to_adapt_is_refused() -> None:
    model = build_model("smp", "FPN", 3, encoder="tu-test_resnet")
    with pytest.raises(
        ConfigError, match=r"backbone tu-test_resnet has no linear layer of a transformer's attention or MLP"
    ):
        add_adapters(model, 4)


def test_layer_that_is_never_called_is_not_adapted() -> None:
    """timm's BEiT reads the weight of `qkv` without calling the layer: an adapter there would change nothing."""
    options = {"embed_dim": 48, "num_heads": 3, "decoder_fusion_channels": 16}
    model = build_model("smp", "DPT", 3, encoder="tu-beit_base_patch16_224", options=options)
    add_adapters(model, 4)
    layers = {
        name.partition(".lora_A")[0].rpartition(".")[2] for name, _ in model.named_parameters() if ".lora_A" in name
    }
    assert layers == {"proj", "fc1", "fc2"}


def test_missing_peft_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("segapp", "eomt", 3, encoder=VIT["encoder"], options=SMALL)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package peft: run `uv sync --extra lora`"):
        add_adapters(model, 4)
