"""The temperature of probabilities against scipy, torchmetrics and a case whose temperature is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from segapp.build.network import build_network
from segapp.config import validate_config
from segapp.errors import DataError
from segapp.export.network import ExportNetwork
from segapp.inference import calibration
from segapp.inference.calibration import ScoredPixels, fit_temperature, negative_log_likelihood, reliability
from tests.support.runs import merged, segapp, train


def drawn(temperature: float, num_px: int = 20_000, seed: int = 0) -> ScoredPixels:
    """Return pixels whose classes follow the probabilities at a temperature."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(num_px, 5, generator=generator)
    targets = (logits / temperature).softmax(1).multinomial(1, generator=generator).flatten()
    return ScoredPixels(logits.log_softmax(1), targets)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.5])
def test_temperature_of_drawn_classes_is_found(temperature: float) -> None:
    pixels = drawn(temperature)
    found = fit_temperature(pixels)
    assert found == pytest.approx(temperature, rel=0.03)
    if temperature != 1.0:
        assert reliability(pixels, found).error < 0.5 * reliability(pixels).error
    assert reliability(pixels, found).error < 0.02


@settings(max_examples=10, deadline=None)
@given(st.floats(0.4, 4), st.integers(0, 1000))
def test_fit_is_the_minimum_that_scipy_finds(temperature: float, seed: int) -> None:
    pixels = drawn(temperature, 500, seed)

    def mean(scale: float) -> float:
        values = pixels.log_probabilities.double() * scale
        return float(torch.nn.functional.cross_entropy(values, pixels.targets))

    expected = 1 / minimize_scalar(mean, bounds=(0.06, 19), method="bounded", options={"xatol": 1e-10}).x
    assert fit_temperature(pixels) == pytest.approx(expected, rel=1e-5)


def test_parts_of_the_pixels_have_the_same_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = drawn(1.7, 1000)
    whole = fit_temperature(pixels), negative_log_likelihood(pixels, 1.3), reliability(pixels, 1.3).error
    monkeypatch.setattr(calibration, "_CHUNK", 7)
    parts = fit_temperature(pixels), negative_log_likelihood(pixels, 1.3), reliability(pixels, 1.3).error
    assert parts == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
def test_calibration_error_equals_torchmetrics(temperature: float) -> None:
    from torchmetrics.functional.classification import multiclass_calibration_error  # seconds for every worker

    pixels = drawn(1.5, 5000)
    probabilities = (pixels.log_probabilities / temperature).softmax(1)
    expected = multiclass_calibration_error(probabilities, pixels.targets, 5, n_bins=15, norm="l1")
    assert reliability(pixels, temperature).error == pytest.approx(float(expected), abs=1e-5)


def test_pixels_that_are_all_right_have_no_temperature() -> None:
    values = torch.eye(3).repeat(20, 1).log_softmax(1)
    with pytest.raises(DataError, match=r"below 0\.05"):
        fit_temperature(ScoredPixels(values, values.argmax(1)))


@pytest.mark.slow
def test_calibrated_run_predicts_and_exports_its_temperature(tiny: dict[str, Any], tmp_path: Path) -> None:
    """The probabilities are the former ones to the power of 1 / T; another checkpoint has no temperature."""
    assert train(merged(tiny, train={"epochs": 2}, checkpoint={"keep": 2}), tmp_path / "run") == 0
    cv2.imwrite(str(tmp_path / "one.png"), np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8))

    def probabilities(network: str, out: str) -> np.ndarray:
        result = segapp("predict", network, "one.png", "--out", out, "--save", "labels,probabilities", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        return np.load(tmp_path / out / "probabilities" / "one.npz")["probabilities"] / 65_535

    before = probabilities("run", "before")
    result = segapp("calibrate", "run", "--picture", "reliability.svg", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "run" / "calibration.json").read_text())
    assert f"temperature {found['temperature']:.3f}" in result.stdout
    assert found["nll"][1] < found["nll"][0]
    assert found["temperature"] != pytest.approx(1, abs=1e-3)
    assert "expected calibration error" in result.stdout
    assert (tmp_path / "reliability.svg").read_text().count("<title>") >= 2
    expected = before ** (1 / found["temperature"])
    expected /= expected.sum(-1, keepdims=True)
    np.testing.assert_allclose(probabilities("run", "after"), expected, atol=2e-4)
    labels = [(tmp_path / name / "labels" / "one.png").read_bytes() for name in ("before", "after")]
    assert labels[0] == labels[1]
    result = segapp("export", "run", "--out", "run.safetensors", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    np.testing.assert_allclose(probabilities("run.safetensors", "of weights"), expected, atol=3e-4)
    other = tmp_path / "run" / "checkpoints" / f"epoch_000{1 if found['step'] == 10 else 2}.pt"
    result = segapp("predict", str(other), "one.png", "--out", "other", cwd=tmp_path)
    assert "is not calibrated: calibration.json was fitted to the checkpoint of step" in result.stderr


def test_exported_network_divides_its_logits(tiny: dict[str, Any], tmp_path: Path) -> None:
    model = build_network(validate_config(tiny).model, 3, with_weights=False).eval()
    images = torch.randint(0, 256, (1, 32, 48, 3), dtype=torch.uint8)
    plain, cooler = (ExportNetwork(model, [0.5] * 3, [0.2] * 3, temperature=t).eval() for t in (1.0, 2.0))
    with torch.no_grad():
        assert torch.equal(cooler(images), plain(images) / 2)


def test_network_outside_a_run_is_not_calibrated(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"")
    result = segapp("calibrate", "weights.safetensors", cwd=tmp_path)
    assert result.returncode in (2, 4)
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
