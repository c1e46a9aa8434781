"""`train.compile`: equal losses, unchanged checkpoints, exact resume, and an error that names the key."""

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import codecache

from segapp.assembly.optimizer import criterion_of
from segapp.assembly.pairs import build_scheme
from segapp.config import load_config
from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.preprocessing import Preprocessing
from segapp.errors import RunError
from segapp.inference.sliding import NormalizedInput
from segapp.memory.oom import release
from segapp.planning.plan import _notes
from segapp.training.step.assembler import StepAssembler
from tests.support import ROOT
from tests.support.runs import differing, final_state, losses, merged, train
from tests.training.test_resume import stopped_and_resumed


def compiled(num_bands: int = 3, **options: Any) -> NormalizedInput:
    model: Any = nn.Conv2d(num_bands, 2, 1)
    model.suitable_size = lambda *size: size
    network = NormalizedInput(model, Preprocessing(PixelFormat(mean=(0.5,) * 3, std=(0.2,) * 3)))
    keys = list(network.state_dict())
    network.compile_training(**options)
    assert list(network.state_dict()) == keys
    return network


def images(num_images: int) -> torch.Tensor:
    return torch.zeros(num_images, 3, 4, 4, dtype=torch.uint8)


def test_model_that_cannot_be_compiled_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(_images: Any) -> Any:
        raise RuntimeError("a worker failed") from torch._dynamo.exc.Unsupported("no C++ compiler")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: call)
    network = compiled()
    with pytest.raises(RunError, match=r"train\.compile: .*\(RuntimeError: a worker failed\): set it to false"):
        network(images(1))
    assert network.eval()(images(1)).shape == (1, 2, 4, 4), "an evaluation is not compiled"


def test_only_training_with_samples_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """And compiled code, with the parts that ignore TORCHINDUCTOR_CACHE_DIR, is where only this user can write."""
    calls = []
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    for name in ("_HEADER_DIR", "_HEADER_LOCK_DIR"):  # as if another training of this process had compiled before
        monkeypatch.setattr(codecache, name, f"{tempfile.gettempdir()}/torchinductor_me/headers")
    monkeypatch.setattr(torch, "compile", lambda call: lambda images: calls.append(len(images)) or call(images))
    network = compiled()
    for size, is_training in ((2, True), (0, True), (3, False)):
        network.train(is_training)(images(size))
    assert calls == [2]
    own = str(Path.home() / ".cache" / "segapp" / "compiled" / "inductor")
    modules = [module for name, module in sys.modules.items() if name.startswith("torch._inductor")]
    texts = {value for module in modules for value in vars(module).values() if isinstance(value, str)}
    assert {f"{own}/precompiled_headers", f"{own}/precompiled_headers/locks"} <= texts
    assert not [text for text in texts if text.startswith(f"{tempfile.gettempdir()}/torchinductor_")]
    defaults = [module.default_cache_dir() for module in modules if hasattr(module, "default_cache_dir")]
    assert (len(defaults) >= 3, {*defaults}) == (True, {own})
    with pytest.raises(RuntimeError, match="expected input"):  # errors of the network are not hidden
        compiled(num_bands=4)(images(1))


def test_cuda_graphs_are_of_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The short last batch and the pieces after an out-of-memory error run without; so does the evaluation."""
    calls: list[Any] = []

    def compile_(call: Any, **options: Any) -> Any:
        calls.append(options)
        return lambda images: calls.append(len(images)) or call(images)

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: calls.append("step"))
    network = compiled(as_cuda_graphs=True)
    for size, is_training in ((3, True), (2, True), (1, True), (3, False), (3, True)):
        assert len(network.train(is_training)(images(size))) == size
    assert calls == [{"mode": "reduce-overhead", "dynamic": False}, "step", 3, "step", "step", "step", 3]


def test_memory_of_graphs_is_freed_after_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    trees = SimpleNamespace(reset_cudagraph_trees=lambda: calls.append("reset"))
    release(RuntimeError("out of memory"), torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    release(RuntimeError("out of memory"), torch.device("cpu"))
    assert calls == ["reset"]


def test_plan_says_that_the_memory_of_graphs_is_not_counted(base: dict[str, Any]) -> None:
    names = {"eval_px_from": "drawn", "precision": "fp32", "fp32_part": None, "loss_note": None}
    facts: Any = SimpleNamespace(eval_px=(3, 5), num_params=7, **names)
    planner: Any = SimpleNamespace(model=SimpleNamespace(mode="single"))
    notes = [
        _notes(merged(base, train={"compile": way}), planner, facts, None)[1:] for way in (True, "reduce-overhead")
    ]
    assert notes == [(), ("train.compile = reduce-overhead: the memory of its CUDA graphs is not counted",)]


FAMILIES = {
    (config.model.library, config.model.name, config.model.encoder): path
    for path in sorted((ROOT / "configs").glob("*.yaml"), key=lambda path: (path.stem != "demo", path))
    for config in [load_config(path)]
}


@pytest.mark.sampled(12)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", FAMILIES.values(), ids=lambda path: path.stem)
def test_forward_and_loss_compile_into_one_graph(path: Path) -> None:
    """The loss of mask classification reads values, so only its forward pass is one graph."""
    config = load_config(path, ["model.weights=null", "model.weights_backbone=null"])
    scheme = build_scheme(config.data)
    model = StepAssembler(config, scheme).build_model(with_weights=False).train()
    criterion = criterion_of(config, scheme, lambda _: [1.0] * scheme.num_classes)
    size = model.suitable_size(64, 96)
    images, target = torch.zeros(2, 3, *size), torch.zeros(2, *size, dtype=torch.uint8)
    graphs: list[Any] = []

    def run(images: torch.Tensor) -> Any:
        outputs = model(images)
        has_one_graph = config.loss.name != "mask_classification"
        return criterion.finalize(criterion.statistics(outputs, target)) if has_one_graph else outputs

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compile(run, backend=lambda graph, _: graphs.append(graph) or graph.forward)(images)
    assert (len(graphs), dict(torch._dynamo.utils.counters["graph_break"])) == (1, {})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_training_equals_eager_and_resumes_bitwise(base: dict[str, Any], tmp_path: Path) -> None:
    compiled = merged(base, train={"batch_size": 5, "compile": True})
    assert train(merged(base, train={"batch_size": 5}), tmp_path / "eager") == 0
    assert train(compiled, tmp_path / "compiled") == 0
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), rel=1e-3)
    eager, whole = final_state(tmp_path / "eager"), final_state(tmp_path / "compiled")
    assert list(eager["model"]) == list(whole["model"])
    stopped_and_resumed(compiled, tmp_path / "resumed", "train.step=3")
    for part in ("model", "optimizer"):
        assert differing(final_state(tmp_path / "resumed")[part], whole[part]) == []
