"""Each line below `Raises:` and `Attributes:` of a public name has a row here, and holds."""

from __future__ import annotations

import builtins
import doctest
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import segapp
from segapp import errors, losses, memory, metrics, parallel, precision
from segapp.docs.pages import find_page
from tests.support import ROOT
from tests.support.runs import events

PUBLIC = {
    **{name: getattr(segapp, name) for name in segapp.__all__ if name not in segapp._PACKAGES},
    **{
        f"{package.__name__.removeprefix('segapp.')}.{name}": getattr(package, name)
        for package in (losses, memory, metrics, parallel, precision)
        for name in package.__all__
    },
}


MEMBERS = types.FunctionType, property, classmethod, staticmethod


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield name and docstring of public names, their methods and properties."""
    for name, item in PUBLIC.items():
        own = vars(item) if inspect.isclass(item) else {}
        members = {f"{name}.{key}": own[key] for key in own if key[0] != "_" and isinstance(own[key], MEMBERS)}
        for path, each in {name: item, **members}.items():
            yield path, inspect.cleandoc(getattr(each, "__doc__", None) or "")


def documented(section: str) -> Iterator[tuple[str, str]]:
    """Yield name and first word of each line of a section."""
    for path, text in docstrings():
        if found := re.search(rf"^{section}:\n((?:    .*\n?|\n)+)", text, re.MULTILINE):
            yield from ((path, word) for word in re.findall(r"^    ([\w, ]+):", found[1], re.MULTILINE))


LOGITS = torch.tensor([[[[4.0, 4.0]], [[1.0, 4.0]], [[0.0, 5.0]]]])  # predicts 0 and 2
TARGET = torch.tensor([[[1, 2]]])


@pytest.fixture(scope="module")
def run(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two epochs of five steps."""
    config = {
        "name": "tiny",
        "data": {"format": "folder", "root": str(tiny_root), "classes": ["ground", "box", "disc"], "crop_px": [24, 40]},
        "model": {"library": "python", "name": "tests.support.own_parts:Net"},
        "optim": {"name": "adamw", "lr": 0.05},
        "train": {"epochs": 2, "batch_size": 2},
        "log": {"every_steps": 1, "tensorboard": False},
    }
    return segapp.train(config, {"data.workers": 0}, run=tmp_path_factory.mktemp("runs") / "run", progress=False).run


def called(row: Callable[..., Any], run: Path) -> Any:
    """Return the result of a row, which may need the run."""
    return row(run) if inspect.signature(row).parameters else row()


def of_training(run: Path) -> tuple[Any, dict[str, Any]]:
    result = segapp.train(resume=run, overrides={"train.epochs": 2}, progress=False)
    steps, history = [event["step"] for event in events(run, "step")], segapp.history(run)
    facts = {"run": run, "is_finished": True, "reason": "already complete", "step": max(steps), "history": history}
    return result, facts


def of_validation(run: Path) -> tuple[Any, dict[str, Any]]:
    losses = [event["loss"] for event in events(run, "step") if event["epoch"] == 2]
    facts = {"epoch": 2, "step": 10, "train_loss": pytest.approx(sum(losses) / 5)}
    return segapp.history(run)[-1], {**facts, "val_s": events(run, "val")[-1]["val_s"]}


def of_evaluation(run: Path) -> tuple[Any, dict[str, Any]]:
    result, network = segapp.evaluate(run, progress=False), segapp.load(run)
    root = Path(network.trained.config.data.root)
    counts = np.zeros((3, 3), np.int64)
    for path in sorted((root / "images" / "val").iterdir()):
        mask = cv2.imread(str(root / "masks" / "val" / path.name), cv2.IMREAD_UNCHANGED)
        np.add.at(counts, (mask[mask < 255], network.predict(path)[mask < 255]), 1)
    hits, in_target, in_prediction = np.diag(counts), counts.sum(1), counts.sum(0)
    facts: dict[str, Any] = {"split": "val", "confusion": counts, "groups": {}}
    for name, ratio in (
        ("dice", 2 * hits / (in_target + in_prediction)),
        ("precision", hits / in_prediction),
        ("recall", hits / in_target),
    ):
        facts[name] = pytest.approx(dict(zip(network.classes, ratio, strict=True)))
    return result, {**facts, "checkpoints": [run / "checkpoints" / "best.pt"]}


def of_prediction(run: Path) -> tuple[Any, dict[str, Any]]:
    photos, out = run.parent / "photos", run.parent / "out"
    photos.mkdir(exist_ok=True)
    for name, size in (("b", (31, 17)), ("a", (40, 52))):
        pixels = np.random.default_rng(3).integers(0, 256, (*size, 3), np.uint8)
        Image.fromarray(pixels).save(photos / f"{name}.png")
    (photos / "c.png").write_bytes(b"no image")
    (photos / "d.txt").touch()
    result = segapp.predict(run, photos, out, save="labels", progress=False)
    facts = {"paths": [out / "labels" / f"{name}.png" for name in "ab"], "num_images": 2, "num_px": 31 * 17 + 40 * 52}
    words = {"problems": contains("c.png"), "notes": contains("(.txt) not read")}
    return result, {**facts, **words, "seconds": pytest.approx(5, abs=5)}


class contains:  # noqa: N801 - reads like a function
    """Equal to a list of one sentence with these words."""

    def __init__(self, words: str) -> None:
        self.words = words

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and len(other) == 1 and self.words in other[0]


def of_network(run: Path) -> tuple[Any, dict[str, Any]]:
    network, best = segapp.load(run, device="cpu"), run / "checkpoints" / "best.pt"
    trained = network.trained
    found = (trained.path, trained.step, trained.config.optim.lr, trained.device)
    last = [event["step"] for event in events(run, "checkpoint") if event["is_best"]][-1]
    assert found == (best, last, 0.05, torch.device("cpu"))
    return network, {"classes": ("ground", "box", "disc"), "trained": trained}


def without_matplotlib(call: Callable[[], Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        call()


# Name and error -> a call, which may need the run, that raises it, and words of its message.
RAISES: dict[tuple[str, str], tuple[Callable[..., Any], str]] = {
    ("train", "SegappError"): (lambda: segapp.train({"name": 3}), "name"),
    ("history", "ConfigError"): (lambda: segapp.history("no-such"), "no-such: no such run"),
    ("evaluate", "SegappError"): (lambda run: segapp.evaluate(run, data_root="gone"), "gone"),
    ("predict", "SegappError"): (lambda run: segapp.predict(run, "gone.png", "out"), "gone.png is neither a file"),
    ("load", "SegappError"): (lambda run: segapp.load(run, device="cuda:9"), "device 'cuda:9'"),
    ("Network.predict", "DataError"): (lambda run: segapp.load(run).predict("gone.png"), "gone.png is not a file"),
    ("Network.predict", "ValueError"): (
        lambda run: segapp.load(run).predict(np.zeros((4, 5, 3))),
        r"float64 of shape \(4, 5, 3\): give uint8 RGB",
    ),
    ("Network.probabilities", "DataError"): (lambda run: segapp.load(run).probabilities(run), "run is not a file"),
    ("Network.probabilities", "ValueError"): (
        lambda run: segapp.load(run).probabilities(np.zeros((4, 5), np.uint8)),
        r"uint8 of shape \(4, 5\): give uint8 RGB of shape \(H, W, 3\)",
    ),
    ("History.plot", "SegappError"): (lambda: without_matplotlib(segapp.History().plot), r"plot\(\) needs matplotlib"),
    ("EvalResult.plot", "SegappError"): (
        lambda run: without_matplotlib(segapp.evaluate(run, progress=False).plot),
        r"run `pip install matplotlib`",
    ),
    ("losses.AdditiveCriterion.target_statistics", "TypeError"): (
        lambda: losses.CriterionDice().target_statistics(TARGET),
        "CriterionDice is not linear: its statistics need the logits"),
    ("losses.CriterionBCE", "ValueError"): (lambda: losses.CriterionBCE(pos_weight=0.0),
        "pos_weight=0.0: give a number above 0"),
    ("losses.CriterionCE", "ValueError"): (lambda: losses.CriterionCE(label_smoothing=1.5),
        "label_smoothing=1.5: give a number from 0 to 1"),
    ("losses.CriterionDice", "ValueError"): (lambda: losses.CriterionDice(classes="macro"),  # type: ignore[arg-type]
        "classes='macro': give one of present, all"),
    ("losses.CriterionFocal", "ValueError"): (lambda: losses.CriterionFocal(gamma=-1.0),
        "gamma=-1.0: give a number of at least 0"),
    ("losses.CriterionLovasz", "ValueError"): (
        lambda: losses.CriterionLovasz(classes="macro"),  # type: ignore[arg-type]
        "classes='macro': give one of present, all"),
    ("losses.CriterionMaskClassification", "ValueError"): (
        lambda: losses.CriterionMaskClassification(4, 3, bce_factor=-2.0),
        "bce_factor=-2.0: give a number of at least 0"),
    ("losses.CriterionMaskClassification.statistics", "ValueError"): (
        lambda: losses.CriterionMaskClassification(3, 3).statistics((LOGITS, torch.zeros(1, 3, 4)), TARGET[:, :, :1]),
        "masks of 1x2 do not divide a target of 1x1: pad the images"),
    ("losses.CriterionOHEM", "ValueError"): (lambda: losses.CriterionOHEM(min_kept=-1),
        "min_kept=-1 is too small: use 0 or more"),
    ("losses.CriterionSum", "TypeError"): (
        lambda: losses.CriterionSum([(1.0, torch.nn.CrossEntropyLoss())]),  # type: ignore[list-item]
        r"the term \(float, CrossEntropyLoss\): give .* PlainCriterion"),
    ("losses.CriterionSum", "ValueError"): (lambda: losses.CriterionSum([]), "CriterionSum has no terms: give"),
    ("losses.CriterionTversky", "ValueError"): (lambda: losses.CriterionTversky(alpha=0.3, beta=-0.7),
        "beta=-0.7: give a number of at least 0"),
    ("losses.heads_of", "TypeError"): (lambda: losses.heads_of({"aux": LOGITS}), r"keys \['aux'\]: .* under \"out\""),
    ("losses.heads_of", "ValueError"): (lambda: losses.heads_of(()), "outputs are an empty sequence: the first"),
    ("losses.pair_wise_difference", "ValueError"): (
        lambda: losses.pair_wise_difference(torch.ones(2, 3, 4), torch.ones(2, 3, 6)),
        r"nodes \(2, 3, 4\) and teacher \(2, 3, 6\): use one grid"),
    ("losses.pixel_wise_divergence", "ValueError"): (lambda: losses.pixel_wise_divergence(LOGITS, LOGITS[:, :2]),
        r"\(1, 3, 1, 2\), teacher's \(1, 2, 1, 2\): N and C must agree"),
    ("losses.upsample_confusion", "TypeError"): (lambda: losses.upsample_confusion(LOGITS, TARGET.float()),
        "target is torch.float32: give class ids"),
    ("losses.upsample_confusion", "ValueError"): (lambda: losses.upsample_confusion(LOGITS, TARGET + 1),
        "ids 3: classes are 0 to 2"),
    ("losses.upsample_cross_entropy", "KernelError"): (
        lambda: losses.upsample_cross_entropy(LOGITS, TARGET, implementation="triton"),
        r"cannot run on cpu: .* `segapp doctor` .* implementation=\"auto\""),
    ("losses.upsample_cross_entropy", "TypeError"): (lambda: losses.upsample_cross_entropy(LOGITS.long(), TARGET),
        "logits are torch.int64: give a floating-point"),
    ("losses.upsample_cross_entropy", "ValueError"): (lambda: losses.upsample_cross_entropy(LOGITS, TARGET - 2),
        "ids -1: classes are 0 to 2"),
    ("metrics.ConfusionMatrix.from_matrix", "ValueError"): (lambda: metrics.ConfusionMatrix.from_matrix(torch.eye(3)),
        r"counts of shape \(3, 3\) and torch.float32 on cpu: give .* int64 \(3, 3\)"),
    ("metrics.Counts", "TypeError"): (lambda: metrics.ConfusionMatrix(4.0),  # type: ignore[arg-type]
        "num_classes=4.0: give an integer"),
    ("metrics.Counts", "ValueError"): (lambda: metrics.LabelCounts(3, device="gpu"),
        "device='gpu' cannot hold counts"),
    ("metrics.Counts.load_state_dict", "ValueError"): (
        lambda: metrics.ConfusionMatrix(3).load_state_dict(metrics.LabelCounts(3).state_dict()),
        r"state of LabelCounts\(3, ignore_index=-1\) does not fit ConfusionMatrix\(3, ignore_index=255\)"),
    ("metrics.Counts.merge", "ValueError"): (lambda: metrics.ConfusionMatrix(3).merge(metrics.ConfusionMatrix(4)),
        r"ConfusionMatrix\(3, ignore_index=255\) cannot take ConfusionMatrix\(4, ignore_index=255\)"),
    ("metrics.Counts.to", "ValueError"): (lambda: metrics.LabelCounts(3).to("meta"),
        "device='meta' cannot hold counts"),
    ("metrics.Counts.update", "TypeError"): (
        lambda: metrics.LabelCounts(3).update(TARGET.numpy(), TARGET),  # type: ignore[arg-type]
        "prediction of type ndarray: give a tensor"),
    ("metrics.Counts.update", "ValueError"): (lambda: metrics.LabelCounts(3).update(TARGET, TARGET[0]),
        r"\(1, 1, 2\), target of shape \(1, 2\): they must have the same"),
    ("metrics.LabelCounts", "ValueError"): (lambda: metrics.LabelCounts(64),
        "num_classes=64: an int64 holds sets of at most 63 classes"),
}  # fmt: skip

# Name -> an object, which may need the run, and the expected value of each attribute.
ATTRIBUTES: dict[str, Callable[..., tuple[Any, dict[str, Any]]]] = {
    "EvalResult": of_evaluation,
    "Evaluated": of_validation,
    "Network": of_network,
    "PredictResult": of_prediction,
    "TrainResult": of_training,
    "losses.AdditiveCriterion": lambda: (
        losses.CriterionSum([(2.0, losses.CriterionBCE()), (0.5, losses.CriterionOHEM())]),
        {"is_sigmoid": True, "is_linear": False, "num_statistics": 5, "takes_any_aspect": False},
    ),
    "losses.ConfusionSums": lambda: (
        losses.upsample_confusion(LOGITS, TARGET),
        {
            "confusion": torch.tensor([[0, 0, 0], [1, 0, 0], [0, 0, 1]]),
            "loss_sum": pytest.approx(float(F.cross_entropy(LOGITS, TARGET, reduction="sum"))),
            "weight_sum": 2.0,
        },
    ),
    "losses.KernelError": lambda: (
        losses.KernelError(torch.device("cpu"), OSError("error:\n no compiler\nis found")),
        {"reason": "OSError: error: ... is found"},
    ),
    "metrics.Counts": lambda: (
        metrics.ConfusionMatrix(2).merge(torch.tensor([[5, 0], [2, 3]])),
        {"counts": torch.tensor([5, 0, 2, 3])},
    ),
}


# Of `parallel` and `precision`.
CPUS, IMAGES = ["cpu"] * 3, torch.arange(70.0).view(5, 2, 7)


class Step(nn.Module):
    """What a forward pass does, to a layer that may be recomputed."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.norm, self.block, self.call = parallel.SyncBatchNorm(2), nn.BatchNorm1d(2), call
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        return self.call(self, x)


def replicas(call: Callable[..., Any], x: Tensor = IMAGES, **options: Any) -> Any:
    return parallel.DataParallelModel(Step(call), CPUS, **options)(x)


def recompute(net: nn.Module, *names: str) -> nn.Module:
    parallel.set_recompute(net, [names])
    return net


def count(net: Any, x: Tensor) -> Tensor:
    net.calls = net.calls + 1
    return x.relu()


def half_loop(num_finished: int = 1, **options: Any) -> Any:
    ours, weight = precision.Precision("amp-fp16", "cpu"), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD(ours.master_weights([weight]))
    ours.backward(weight.sum())
    for _ in range(num_finished):
        ours.finish_gradients(optimizer, **options)
    ours.backward(weight.sum())


def unequal(net: Any, x: Tensor) -> Any:
    return parallel.allreduce(x) if len(x) == 2 else x


RAISES |= {
    ("parallel.DataParallelCriterion", "TypeError"): (
        lambda: parallel.DataParallelCriterion(type("Sums", (), {"statistics": len})()), "Sums has no finalize"),
    ("parallel.DataParallelCriterion.statistics", "ValueError"): (
        lambda: parallel.DataParallelCriterion(losses.CriterionCE()).statistics(replicas(count), IMAGES[:4, 0]),
        r"4 samples and the outputs have \[1, 2, 2\]: pass the target of the model's batch"),
    ("parallel.DataParallelCriterion.statistics", "TypeError"): (
        lambda: parallel.DataParallelCriterion(SimpleNamespace(statistics=lambda x, t: [x], finalize=sum)).statistics(
            replicas(count), IMAGES), r"statistics\(\) returned list: return a tuple of tensors"),
    ("parallel.DataParallelModel", "TypeError"): (
        lambda: parallel.DataParallelModel(torch.compile(nn.ReLU()), CPUS), "is compiled.*: use one device"),
    ("parallel.DataParallelModel", "ValueError"): (
        lambda: parallel.DataParallelModel(nn.ReLU(), ["cpu:0", "abacus"]), "device 'abacus' is not known: use 'cpu'"),
    ("parallel.DataParallelModel", "AttributeError"): (
        lambda: setattr(parallel.BalancedDataParallel(1, nn.ReLU(), CPUS), "device_ids", [0]), "wrap the module again"),
    ("parallel.DataParallelModel.forward", "ValueError"): (
        lambda: replicas(count, dim=3), "cannot be cut along dim 3, which none of its tensors has"),
    ("parallel.DataParallelModel.forward", "TypeError"): (
        lambda: replicas(count, torch.eye(5).to_sparse()), "a nested or sparse tensor cannot be cut .*: pass padded"),
    ("parallel.ReplicaOutputs", "ValueError"): (
        lambda: parallel.ReplicaOutputs([IMAGES, torch.tensor(3)]), "no tensor with samples: pass the result"),
    ("parallel.ReplicaOutputs", "TypeError"): (lambda: replicas(count).reverse(), "number and order .* are fixed"),
    ("parallel.SyncBatchNorm", "ValueError"): (
        lambda: replicas(lambda net, x: net.norm(x), IMAGES[:1, :, 0]), "more than 1 value per channel"),
    ("parallel.SyncBatchNorm", "TypeError"): (lambda: parallel.SyncBatchNorm(2)(IMAGES.numpy()), "got a ndarray: give"),
    ("parallel.SyncBatchNorm", "RuntimeError"): (
        lambda: replicas(lambda net, x: net.norm)[1](IMAGES), "outside its replica's forward .*: use segapp.parallel"),
    ("parallel.allreduce", "TypeError"): (lambda: parallel.allreduce(IMAGES, 3), "got a int: give tensors"),
    ("parallel.allreduce", "ValueError"): (
        lambda: replicas(lambda net, x: parallel.allreduce(x)), "different shapes from the replicas: .*: give"),
    ("parallel.allreduce", "ReplicaDesyncError"): (
        lambda: replicas(unequal), "every replica must run the same synchronized layers"),
    ("parallel.all_reduce_gradients", "TypeError"): (lambda: parallel.all_reduce_gradients(IMAGES), "given as Tensor"),
    ("parallel.balance_stages", "ValueError"): (
        lambda: parallel.balance_stages(Step(lambda net, x: net.norm(x * x.sum().item())), CPUS, IMAGES),
        "Step cannot be measured without values .*: name the device of each stage"),
    ("parallel.convert_sync_batchnorm", "TypeError"): (
        lambda: parallel.convert_sync_batchnorm(recompute(Step(count), "block")), "set_recompute after the conversion"),
    ("parallel.gradient_penalty", "ValueError"): (
        lambda: parallel.gradient_penalty(torch.sum, IMAGES, kind="dragan", alpha=IMAGES), "does not use alpha: leave"),
    ("parallel.gradient_penalty", "TypeError"): (
        lambda: parallel.gradient_penalty(DistributedDataParallel.__new__(DistributedDataParallel), IMAGES, IMAGES),
        "does not reduce all gradients of a penalty: pass its module"),
    ("parallel.place_stages", "ValueError"): (
        lambda: parallel.place_stages(Step(count), {"blok": "cpu", "nrm": "cpu"}), "no submodule 'blok': name one of"),
    ("parallel.place_stages", "TypeError"): (
        lambda: parallel.place_stages(torch.compile(Step(count)), {"norm": "cpu"}), "is compiled"),
    ("parallel.plan_chunks", "ValueError"): (
        lambda: parallel.plan_chunks(9, 3, 1, shares=[1, 5, 3]), "gpu0_bsz=1 and shares=.* exclude each other"),
    ("parallel.plan_chunks", "TypeError"): (
        lambda: parallel.plan_chunks(9, 3, full_batch=9.0), "full_batch=9.0 is not a whole number: use 1 or more"),
    ("parallel.set_recompute", "TypeError"): (
        lambda: parallel.set_recompute(Step(count), [["norm"], "block"]), "got 'block' instead"),
    ("parallel.set_recompute", "ValueError"): (
        lambda: recompute(Step(count), "norm", "blok"), "no block 'blok': the nearest name is 'block'"),
    ("parallel.set_recompute", "RuntimeError"): (
        lambda: recompute(nn.Sequential(Step(count)), "0")(IMAGES.clone().requires_grad_()), "0.calls is a buffer"),
    ("precision.Precision.backward", "RuntimeError"): (lambda: half_loop(), r"finished gradients, .*: first call step"),
    ("precision.Precision.finish_gradients", "RuntimeError"): (lambda: half_loop(2), "was called before: first call"),
    ("precision.Precision.finish_gradients", "TypeError"): (
        lambda: precision.Precision("fp16", "cpu").finish_gradients([]), "optimizer given as list"),  # type: ignore[arg-type]
    ("precision.Precision.finish_gradients", "ValueError"): (
        lambda: half_loop(clip_grad_norm=-1), "clip_grad_norm=-1: give a number above 0"),
    ("precision.Precision.load_state_dict", "ValueError"): (
        lambda: precision.Precision("fp32", 0).load_state_dict(precision.Precision("fp16", "cpu").state_dict()),
        "missing in precision fp32: load a state of the same mode"),
}  # fmt: skip
ATTRIBUTES |= {
    "parallel.DataParallelModel": lambda: (
        [model := parallel.DataParallelModel(nn.ReLU(), CPUS, shares=[4, 0, 6]), model(IMAGES)][0],
        {"last_split": (2, 0, 3)}),
    "parallel.ReplicaOutputs": lambda: (
        parallel.DataParallelModel(nn.ReLU(), CPUS, shares=[0, 6, 8], dim=2, mode="lockstep")(IMAGES),
        {"sizes": (3, 4), "devices": (torch.device("cpu"),) * 2, "main_device": torch.device("cpu"), "dim": 2,
         "mode": "lockstep", "positions": (1, 2)}),
}  # fmt: skip


def test_each_documented_line_has_a_row(run: Path) -> None:
    assert sorted(documented("Raises")) == sorted(RAISES), "RAISES has a row for each documented error"
    attributes = [(name, word) for name, row in ATTRIBUTES.items() for word in called(row, run)[1]]
    assert sorted(documented("Attributes")) == sorted(attributes)


@pytest.mark.parametrize(("name", "error"), RAISES)
def test_error_is_raised(name: str, error: str, run: Path) -> None:
    kind = next(vars(place)[error] for place in (builtins, errors, parallel, losses) if error in vars(place))
    call, words = RAISES[name, error]
    with pytest.raises(kind, match=words):
        called(call, run)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attribute_means_what_it_says(name: str, run: Path) -> None:
    found, expected = called(ATTRIBUTES[name], run)
    for attribute, value in expected.items():
        own = getattr(found, attribute)
        assert np.array_equal(own, value) if isinstance(value, torch.Tensor | np.ndarray) else own == value, attribute


EXAMPLES = {name: text for name, text in docstrings() if ">>> " in text}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_a_docstring_run_alone(name: str) -> None:
    """They begin with their imports; examples with `+SKIP` need a run or a data set, so they are only compiled."""
    examples, output = doctest.DocTestParser().get_examples(EXAMPLES[name]), list[str]()
    assert examples[0].source.startswith(("import ", "from "))
    for example in examples:
        compile(example.source, name, "single")
    test = doctest.DocTest(examples, {}, name, None, None, None)
    assert doctest.DocTestRunner().run(test, out=output.append).failed == 0, "".join(output)


@pytest.mark.parametrize("package", [parallel, losses], ids=["parallel", "losses"])
def test_names_for_an_own_loop_are_on_the_page(package: types.ModuleType) -> None:
    names = package.__all__
    assert dir(package) == names == sorted(names)
    assert len(names) < 28, "names of the trainer are imported from the modules"
    page = find_page("own-loop")[0].text()
    assert [name for name in names if f"`{name}`" not in page] == [], "name them on the page own-loop"
    assert all(inspect.getdoc(getattr(package, name)) for name in names)


# Options that may be given by position, and why.
CONTRACT, OF_TORCH = "the design document fixes the call", "the class or method that it replaces in torch takes them so"
POSITIONAL = {
    "losses.CriterionCE.__init__": ("ignore_index weight align_corners label_smoothing aux_weight", CONTRACT),
    "parallel.BalancedDataParallel.__init__": ("device_ids output_device dim", CONTRACT),
    "parallel.BalancedDataParallel.load_state_dict": ("strict assign", OF_TORCH),
    "parallel.DataParallelCriterion.__init__": ("device_ids", CONTRACT),
    "parallel.DataParallelModel.__init__": ("device_ids", CONTRACT),
    "parallel.DataParallelModel.load_state_dict": ("strict assign", OF_TORCH),
    "parallel.gradient_penalty": ("fake kind", CONTRACT),
    "parallel.plan_chunks": ("gpu0_bsz", CONTRACT),
    "train": ("config overrides", "a file and keys, as on the command line"),
}


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the functions of public names; of classes, the constructor and the public methods, inherited ones too."""
    for name, item in PUBLIC.items():
        parts = [key for key in dir(item) if key[0] != "_" or key == "__init__"] if inspect.isclass(item) else []
        members = [(f"{name}.{key}", inspect.getattr_static(item, key)) for key in parts] or [(name, item)]
        for path, member in members:
            function = inspect.unwrap(getattr(member, "__func__", member))
            if inspect.isfunction(function) and function.__module__.startswith("segapp"):
                yield path, function


def test_options_are_keywords() -> None:
    """A parameter with a default is an option; arguments without one may be given by position."""
    found = {
        name: " ".join(
            each.name
            for each in inspect.signature(function).parameters.values()
            if each.kind is each.POSITIONAL_OR_KEYWORD and each.default is not each.empty
        )
        for name, function in public_functions()
    }
    found = {name: options for name, options in found.items() if options}
    assert found == {name: options for name, (options, _) in POSITIONAL.items()}


def test_script_for_the_type_checker_has_every_name() -> None:
    """mypy checks it in the gate, with its mistakes; see pyproject.toml."""
    text = (ROOT / "tests" / "support" / "user_script.py").read_text()
    missing = [name for name in PUBLIC if not re.search(rf"\b{name.split('.')[-1]}\b", text)]
    assert missing == [], "call them in tests/support/user_script.py"
    assert text.count("# type: ignore[") >= 20
