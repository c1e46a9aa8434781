"""The compiled loss against float64, with one compilation per batch, and its fallback without a compiler."""

import shutil

import pytest
import torch

from segapp.losses import upsample_cross_entropy
from segapp.losses.fused import compiled as cells
from segapp.losses.fused.bands_cross_entropy import CrossEntropyOptions
from tests.support.loss_cases import class_weight, draw, relative_error


@pytest.fixture
def _fresh(monkeypatch):
    monkeypatch.setattr(cells, "_failures", [])
    cells._warn_once.cache_clear()


@pytest.mark.parametrize("sigma", [2.0, 300.0])
@pytest.mark.parametrize("chunk_bytes", [1, 20_000, 4 << 20])
def test_compiled_loss_matches_reference_for_any_chunk(chunk_bytes, sigma, monkeypatch):
    monkeypatch.setattr(cells, "CHUNK_BYTES", chunk_bytes)
    logits, target = draw(3, low=(7, 6), high=(33, 41), sigma=sigma)
    options = CrossEntropyOptions(False, 255, 0.1)
    loss_sum, weight_sum, gradient = cells.cross_entropy_on_cells(
        logits, target, class_weight(), options, with_gradient=True, compiled=False
    )
    x = logits.clone().requires_grad_()
    expected = upsample_cross_entropy(
        x,
        target,
        weight=class_weight(),
        label_smoothing=0.1,
        align_corners=False,
        implementation="reference",
    )
    expected[0].backward()
    assert relative_error(loss_sum, expected[0].detach()) < 1e-12
    assert relative_error(weight_sum, expected[1]) < 1e-12
    assert relative_error(gradient, x.grad) < 1e-12


@pytest.mark.usefixtures("_fresh")
def test_bands_replace_missing_compiler_with_one_warning(monkeypatch, recwarn):
    def broken(*_):
        raise OSError("no such file: c++")

    monkeypatch.setattr(cells, "_compiled", lambda: broken)
    logits, target = draw()
    expected, _ = upsample_cross_entropy(logits, target, implementation="bands")
    for _ in range(2):
        loss_sum, _ = upsample_cross_entropy(logits, target, implementation="compiled")
        assert torch.equal(loss_sum, expected)
    messages = [str(w.message) for w in recwarn if "compiled loss" in str(w.message)]
    assert messages == ["the compiled loss is not available, using bands: OSError: no such file: c++"]


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_loss_compiles_once_and_matches(dtype, monkeypatch):
    monkeypatch.setattr(cells, "CHUNK_BYTES", 20_000)
    torch._dynamo.reset()
    logits, target = draw(3, low=(7, 6), high=(33, 41), dtype=dtype)
    graphs_before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    x, y = logits.clone().requires_grad_(), logits.double().requires_grad_()
    for _ in range(2):
        x.grad = None
        loss_sum, _ = upsample_cross_entropy(x, target.to(torch.uint8), implementation="compiled")
        loss_sum.backward()
    expected, _ = upsample_cross_entropy(y, target, implementation="reference")
    expected.backward()
    assert not cells._failures
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs_before + 1
    assert relative_error(loss_sum.detach(), expected.detach()) < 1e-6
    assert relative_error(x.grad, y.grad) < (1e-6 if dtype == torch.float32 else 8e-3)
