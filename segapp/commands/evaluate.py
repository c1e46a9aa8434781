"""`segapp eval`: scores of a run, or of the mean of several, as a table or JSON."""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from segapp.assembly.data import build_load_options
from segapp.assembly.devices import choose_devices
from segapp.assembly.optimizer import criterion_of
from segapp.assembly.pairs import build_groups, build_pairs, split_names
from segapp.assembly.trained import TrainedModel, load_trained
from segapp.commands.predict import predictor_of
from segapp.config import RunConfig
from segapp.custom.names import is_component
from segapp.custom.trust import using_copies
from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.loader import EvalLoader
from segapp.errors import ConfigError, SegappError
from segapp.inference.evaluate import EnsembleEvaluator, Evaluation, EvaluationSettings, Evaluator, copy_to, evaluate
from segapp.inference.predict.predictor import EnsemblePredictor, TrainedPredictor
from segapp.inference.workspace import HostLimit
from segapp.metrics import SegmentationScores, group_iou, mean_of_known
from segapp.parallel.scatter_gather import DeviceLike
from segapp.run.words import printable
from segapp.scores import count_scored, of_classes, scores_text
from segapp.training.console import iou_table, worst_first
from segapp.waiting import progress_bar

_USES = ("model.", "data.format", "loss.")
"""Beginnings of the keys whose custom components an evaluation needs."""


@dataclass(frozen=True)
class EvalOptions:
    """Options of `segapp eval`; if `split` is None, the run's validation split is used.

    For `is_shown` see `progress_bar`.
    """

    split: str | None = None
    slide: bool = False
    tta: bool = False
    data_root: str | None = None
    devices: Sequence[DeviceLike] | None = None
    config: str | RunConfig | None = None
    is_shown: bool | None = None


@dataclass(frozen=True)
class ScoredSplit:
    """Scores of a network, or of the mean of several, on a split, and the inputs of the evaluation.

    Attributes:
        networks: by name; the first one's data set is evaluated.
        groups: name of each group of classes -> their ids.
    """

    found: Evaluation
    networks: dict[str, TrainedModel]
    groups: dict[str, tuple[int, ...]]
    split: str


def evaluate_target(targets: Sequence[str], options: EvalOptions, *, is_json: bool = False) -> None:
    """Evaluate a network, or the mean of several, and print the table of classes or JSON."""
    scored = score_target(targets, options)
    content = json.dumps(as_json(scored), indent=2, allow_nan=False)
    print(content if is_json else "\n".join(score_lines(scored)))


def score_target(targets: Sequence[str], options: EvalOptions) -> ScoredSplit:
    """Evaluate a run or checkpoint, or the mean of several, and print notes on stderr.

    Raises:
        ConfigError: an option has an invalid value, or several networks cannot be averaged.
    """
    ensemble: EnsemblePredictor | None = None
    if len(targets) > 1:
        networks, ensemble = _load_ensemble(targets, options)
    else:
        loaded = load_trained(targets[0], options.config, slide=options.slide, tta=options.tta, uses=_USES)
        networks = [(targets[0], loaded)]
    trained = networks[0][1]
    config, scheme = trained.config, trained.scheme
    data = config.data.model_copy(update={} if options.data_root is None else {"root": options.data_root})
    groups = build_groups(data, scheme)
    split = options.split or split_names(data)[1]
    dataset = trained.dataset(split, data)
    _note_training_images(networks, dataset)
    settings = _build_settings(trained, ensemble, options)
    loader = EvalLoader(
        dataset,
        options=build_load_options(config, dataset, settings.device, config.eval.batch_size),
        batch_size=config.eval.batch_size,
    )
    counter = Evaluator if ensemble is None else partial(EnsembleEvaluator, ensemble)
    batches = loader.batches(reads_windows=ensemble is None and settings.reads_windows)
    with contextlib.closing(loader), progress_bar(len(dataset), "evaluating", is_shown=options.is_shown) as progress:
        model = copy_to(trained.model, settings.device)
        found = evaluate(model, batches, settings, counter=counter, progress=progress)
    for note in found.notes:
        print(f"note: {printable(note)}", file=sys.stderr)
    names = [name if targets.count(name) == 1 else f"{name} ({at})" for at, name in enumerate(targets, start=1)]
    by_name = {name: network for name, (_, network) in zip(names, networks, strict=True)}
    return ScoredSplit(found, by_name, groups, split)


def _load_ensemble(
    targets: Sequence[str], options: EvalOptions
) -> tuple[list[tuple[str, TrainedModel]], EnsemblePredictor]:
    """Return several networks and the mean of their probabilities; ConfigError if they cannot be averaged."""
    for option, value in (("--config", options.config), ("--devices", options.devices)):
        if value is not None:
            raise ConfigError(f"{option} is for one model, and {len(targets)} are named: leave it out")
    networks: list[tuple[str, TrainedModel]] = []

    def members() -> Iterator[tuple[str, TrainedPredictor]]:
        for name in targets:  # the mean has no loss, and the data are of the first one
            uses = _USES[:1] if networks else _USES[:2]
            networks.append((name, load_trained(name, slide=options.slide, tta=options.tta, uses=uses)))
            yield name, predictor_of(networks[-1][1])

    ensemble = EnsemblePredictor(members())
    return networks, ensemble


def _note_training_images(networks: Sequence[tuple[str, TrainedModel]], dataset: SegmentationDataset) -> None:
    """Print a note if a further network was trained on images of the split, which makes the scores too good.

    This is the case for the networks of a cross-validation: each was trained on images that validate the others.
    """
    data = networks[0][1].config.data
    others = [(name, trained.config.data) for name, trained in networks[1:] if trained.config.data != data]
    for name, own in others:
        if is_component(own.format) or is_component(data.format):
            continue
        try:
            seen = {pair.image.resolve() for pair in build_pairs(own, split_names(own)[0])}
        except (SegappError, OSError):
            print(f"note: the training images of {printable(name)} cannot be found to compare them", file=sys.stderr)
            continue
        evaluated = {pair.image.resolve() for pair in dataset.pairs}
        if common := len(evaluated & seen):
            print(
                f"note: {printable(name)} was trained on {common} of the {len(evaluated)} images evaluated here: the "
                "scores are too good",
                file=sys.stderr,
            )


def _build_settings(
    trained: TrainedModel, ensemble: EnsemblePredictor | None, options: EvalOptions
) -> EvaluationSettings:
    settings = EvaluationSettings(
        trained.inference, trained.scheme.num_classes, trained.scheme.ignore_index, trained.device
    )
    if ensemble is not None:
        return settings
    devices = [trained.device]
    if options.devices is not None:
        if not options.devices:
            raise ConfigError("--devices names no device: give at least one, such as 0 or cpu")
        devices = choose_devices(options.devices, "--devices")[0]
    with using_copies(trained.copies):
        criterion = criterion_of(trained.config, trained.scheme, lambda _: [1.0] * trained.scheme.num_classes)
    if trained.criterion is not None:
        criterion.load_state_dict(trained.criterion)  # includes the class weights of the training
    settings = replace(settings, criterion=criterion.task.to(trained.device), host=HostLimit(len(devices)))
    return replace(settings.on(devices[0]), other_devices=tuple(devices[1:]))


def score_lines(scored: ScoredSplit) -> list[str]:
    found, trained, groups, split = scored.found, next(iter(scored.networks.values())), scored.groups, scored.split
    lines = class_table(trained.scheme.names, found.scores)
    if groups:
        iou = group_iou(found.matrix, tuple(groups.values()))
        over = of_classes(count_scored(iou), len(iou), "groups")
        lines.append(f"groups: mIoU {_cell(mean_of_known(iou))} over {over}")
        lines += [f"  {line}" for line in iou_table(tuple(groups), iou)]
    foreground, has_loss = list(map(printable, trained.scheme.foreground)), len(scored.networks) == 1
    scores = scores_text(found.values(trained.scheme), found.scores.iou, foreground, has_loss=has_loss)
    made_by = f"{printable(trained.path.name)}, step {trained.step}"
    if len(scored.networks) > 1:
        made_by = f"mean of {len(scored.networks)}: {', '.join(map(printable, scored.networks))}"
    return [*lines, f"{printable(split)}: {scores}  {found.num_images} images  ({made_by})"]


def class_table(classes: Sequence[str], scores: SegmentationScores) -> list[str]:
    """Return a heading and one aligned line per class with its scores, worst IoU first, and a line of the means."""
    means = (scores.miou, scores.mean_dice, scores.mean_precision, scores.mean_recall)
    rows = [
        (printable(classes[i]), (scores.iou[i], scores.dice[i], scores.precision[i], scores.recall[i]))
        for i in worst_first(scores.iou)
    ]
    rows.append(("mean", means))
    width = max(len(name) for name, _ in rows)
    heading = f"{'':<{width}}     IoU    Dice  precision  recall"
    return [heading] + [
        f"{name:<{width}}  {_cell(iou, 'absent'):>6}  {_cell(dice):>6}  {_cell(precision):>9}  {_cell(recall):>6}"
        for name, (iou, dice, precision, recall) in rows
    ]


def _cell(value: float | None, missing: str = "-") -> str:
    return missing if value is None else f"{value:.4f}"


def as_json(scored: ScoredSplit) -> dict[str, Any]:
    """Return the result as plain values; of several networks, `checkpoint`, `epoch` and `step` are None."""
    found, trained, groups = scored.found, next(iter(scored.networks.values())), scored.groups
    is_one = len(scored.networks) == 1
    result: dict[str, Any] = {
        "split": scored.split,
        "checkpoint": str(trained.path) if is_one else None,
        "epoch": trained.epoch if is_one else None,
        "step": trained.step if is_one else None,
        "networks": [
            {"name": name, "checkpoint": str(each.path), "epoch": each.epoch, "step": each.step}
            for name, each in scored.networks.items()
        ],
        "num_images": found.num_images,
        **found.values(trained.scheme),
        "num_scored": count_scored(found.scores.iou),
        "num_classes": len(found.scores.iou),
        "classes": list(trained.scheme.names),
        **{name: list(getattr(found.scores, name)) for name in ("iou", "dice", "precision", "recall")},
        "confusion": found.matrix.tolist(),
    }
    if groups:
        iou = group_iou(found.matrix, tuple(groups.values()))
        result |= {"groups": dict(zip(groups, iou, strict=True)), "groups_miou": mean_of_known(iou)}
    return result
