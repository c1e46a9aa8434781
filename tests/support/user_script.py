"""A script of a user with every public name, for the type checker; it is not run.

mypy checks it with `--strict`, which refuses to ignore an error that does not exist: each `type: ignore` is a mistake
that an editor shows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import assert_type

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import segapp
from segapp import errors, losses, memory, metrics, parallel, precision
from segapp.losses import CriterionCE, CriterionDice, CriterionSum
from segapp.metrics import ConfusionMatrix, LabelCounts
from segapp.parallel import BalancedDataParallel, DataParallelCriterion, DataParallelModel


def watch(event: segapp.Event) -> None:
    if event.type == "step" and event.loss is None:
        raise segapp.StopTraining("the loss is not finite")
    event.los  # type: ignore[union-attr]


def trains(config: segapp.RunConfig) -> segapp.History:
    result = segapp.train(config, {"train.epochs": 2, "optim.lr": 1e-3}, run=Path("runs/a"), on_event=watch)
    segapp.train("demo.yaml", ["train.epochs=2"], progress=False, handle_signals=True, trust_parts=True)
    assert_type(result, segapp.TrainResult)
    again = segapp.train(resume=result.run)
    if again.val is not None:
        assert_type(again.val, segapp.Evaluated)
        assert_type(again.val.miou, float | None)
        again.val.mIoU  # type: ignore[attr-defined]
    again.lossss  # type: ignore[attr-defined]
    result.history[0].mean_dise  # type: ignore[attr-defined]
    segapp.train("demo.yaml", epochs=2)  # type: ignore[call-arg]
    segapp.train("demo.yaml", 3)  # type: ignore[arg-type]
    segapp.train("demo.yaml", "train.epochs=2")  # type: ignore[arg-type]
    config.train.epoch  # type: ignore[attr-defined]
    config.train.epochs = 3  # type: ignore[misc]
    print(result.plot().get_title(), result.is_finished, result.reason, result.step)
    return assert_type(result.history[-3:] + segapp.history("demo"), segapp.History)


def evaluates(config: Path) -> dict[str, float | None]:
    result = segapp.evaluate(["a", Path("b")], split="val", devices=[0, "cpu", torch.device("cpu")], config=config)
    assert_type(result, segapp.EvalResult)
    assert_type(result.confusion, NDArray[np.int64])
    segapp.evaluate("a", devise=[0])  # type: ignore[call-arg]
    segapp.evaluate(3)  # type: ignore[arg-type]
    result.mean_iou  # type: ignore[attr-defined]
    return result.iou


def predicts(image: NDArray[np.uint8]) -> NDArray[np.float32]:
    network = segapp.load("demo", device=0, slide=True)
    assert_type(network, segapp.Network)
    labels, batch = network.predict(image), network.predict([image, "photo.jpg", Path("b.png")])
    print(labels.shape, len(batch), batch[0].dtype, network.classes[0], network.module.training, network.device.type)
    network.predict(3.5)  # type: ignore[call-overload]
    names: list[str] = ["a.png"]
    print(network.predict(names), network.probabilities([image]))
    network.predict(image).shap  # type: ignore[attr-defined]
    network.predicts(image)  # type: ignore[attr-defined]
    done = segapp.predict("demo", ["a.png"], "out", save=["labels", "overlay"], polygons="geojson", device="cpu")
    assert_type(done, segapp.PredictResult)
    segapp.predict("demo", "a.png", "out", save=["lables"])  # type: ignore[list-item]
    segapp.predict("demo", "a.png", "out", polygons="geojsn")  # type: ignore[arg-type]
    return network.probabilities(image)


def has_own_loop(net: nn.Module, images: Tensor, target: Tensor) -> Tensor:
    model = DataParallelModel(parallel.convert_sync_batchnorm(net), ["cpu", "cpu"], gpu0_bsz=1, mode="threads")
    DataParallelModel(net, mode="thread")  # type: ignore[arg-type]
    model.gpu0_bsz = 2
    gathered: Tensor = BalancedDataParallel(1, net, device_ids=[0, 1])(images)
    criterion = DataParallelCriterion(CriterionSum([(1.0, CriterionCE(ignore_index=255)), (0.5, CriterionDice())]))
    CriterionCE(label_smoothin=0.1)  # type: ignore[call-arg]
    losses.CriterionLovasz(classes="presents")  # type: ignore[arg-type]
    loss: Tensor = criterion(model(images), target)
    mode = precision.Precision("amp-bf16", "cpu")
    precision.Precision("fp17", "cpu")  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(mode.master_weights(mode.prepare(net).parameters()))
    mode.backward(loss)
    mode.step(optimizer, is_bad=~mode.finish_gradients(optimizer, clip_grad_norm=1.0).isfinite())
    confusion, labels = ConfusionMatrix(19, ignore_index=255, device="cpu"), LabelCounts(3)
    ConfusionMatrix(19, ignore_idx=0)  # type: ignore[call-arg]
    confusion.update(losses.upsample_argmax(gathered, target.shape[-2:]), target)
    assert_type(confusion.scores(), metrics.SegmentationScores)
    print(confusion.compute()["miou"], labels.to("cpu"), losses.upsample_probabilities(gathered, (8, 8)))
    confusion.scores().mIoU  # type: ignore[attr-defined]
    sums = losses.upsample_confusion(gathered, target)
    assert_type(sums, losses.ConfusionSums)
    loss_sum, weight_sum = losses.upsample_cross_entropy(gathered, target)
    return loss_sum / weight_sum + sums.loss_sum


def has_ranks(net: nn.Module, critic: Callable[[Tensor], Tensor], real: Tensor, target: Tensor) -> Tensor:
    criterion: losses.AdditiveCriterion = CriterionCE()
    outputs: losses.ModelOutputs = net(real)
    statistics: losses.LossStatistics = criterion.statistics(outputs, target)
    totals = parallel.allreduce(*statistics)
    losses.surrogate(criterion, statistics, totals, average=True)
    parallel.all_reduce_gradients(net.parameters())
    penalty = parallel.gradient_penalty(critic, real, real.flip(0), kind="wgan-gp")
    parallel.gradient_penalty(critic, real, real, kind="wgan")  # type: ignore[arg-type]
    parallel.mask_by_sample(net)
    masks = parallel.SampleMasks(net, seed=3)
    with parallel.sample_masks(masks.keys(epoch=1, first=0, count=len(real))):
        net(real)
    parallel.set_recompute(net, [["0"]])
    parallel.place_stages(net, parallel.balance_stages(net, ["cpu", "cpu"], real))
    print(parallel.plan_chunks(8, 3, 1), parallel.recomputed_blocks(net), parallel.current_replica())
    print(parallel.SyncBatchNorm(8), parallel.ReplicaOutputs([real]), parallel.revert_sync_batchnorm(net))
    return criterion.finalize(totals) + penalty


def has_other_criteria(student: Tensor, teacher: Tensor, task: CriterionCE) -> list[nn.Module]:
    nodes = losses.node_features(student, (2, 3))
    print(losses.pair_wise_difference(nodes, nodes), losses.pixel_wise_divergence(student, teacher))
    print(losses.heads_of({"out": student, "aux": teacher}), precision.half_except_batchnorm(nn.Linear(2, 3)))
    return [
        losses.CriterionBCE(), losses.CriterionFocal(gamma=2.0), losses.CriterionLovasz(classes="present"),
        losses.CriterionMaskClassification(5, 3), losses.CriterionOHEM(), losses.CriterionTversky(alpha=0.3),
        losses.CriterionDistilled(task, {"pixel_wise": 1.0}), losses.PlainCriterion(nn.CrossEntropyLoss()),
        precision.LossScaler(torch.device("cpu")),
    ]  # fmt: skip


def watches_memory() -> str:
    tracker = memory.DeviceMemoryTracker([memory.DeviceInfo("cpu")])
    tracker.mark("forward")
    tracker.mrak("forward")  # type: ignore[attr-defined]
    counts: metrics.Counts = ConfusionMatrix(3)
    try:
        counts.merge(counts)
    except (errors.SegappError, parallel.ReplicaDesyncError, losses.KernelError) as error:
        return str(error)
    except errors.ConfigErr:  # type: ignore[attr-defined]
        return ""
    return segapp.__version__
