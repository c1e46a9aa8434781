"""Build the trainer of a config from its sections, with the other modules of `segapp.assembly`."""

import contextlib
import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from segapp.assembly.data import build_dataset, build_load_options, build_order, image_sizes_of
from segapp.assembly.devices import DevicePlan
from segapp.assembly.network import build_inference, fill_in_base, suited_momentum
from segapp.assembly.optimizer import build_plateau, build_schedule
from segapp.assembly.own_parts import part_hashes
from segapp.assembly.pairs import build_scheme, check_splits_apart, count_images, split_names
from segapp.assembly.trained import read_trained
from segapp.checkpoint.saver import SaveRules
from segapp.checkpoint.training_state import LoadedCheckpoint
from segapp.chunks import EVEN
from segapp.config import DataConfig, RunConfig, dump_config
from segapp.custom.names import is_component
from segapp.datasets.dataset import SegmentationDataset, compute_class_frequencies
from segapp.datasets.inspection import check_ranges
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.loader import EvalLoader, TrainLoader
from segapp.datasets.own_data import OwnPair
from segapp.datasets.sampling import Order, num_batches
from segapp.datasets.targets import ClassFrequencies, cached_frequencies, class_weights
from segapp.errors import ConfigError, DataError, SegappError
from segapp.memory.plan import SavedMemoryPlan
from segapp.models.network import BaseReference, SegmentationModel
from segapp.models.own_generator import own_generator
from segapp.parallel.distributed import Ranks
from segapp.planning.auto import check_host_memory
from segapp.run.events import Alert, Device, RunStart
from segapp.run.words import announce
from segapp.scores import score_named
from segapp.session.request import ImageLimit
from segapp.session.start_checks import check_crop, run_length, start_alerts, start_notes
from segapp.training.context import RunContext, TrainerSettings, TrainingFacts
from segapp.training.inbox import Inbox
from segapp.training.live.apply import BatchSplit, RecomputableBlocks
from segapp.training.live.changes import Replay
from segapp.training.live.controller import CommandController
from segapp.training.live.oom import OomPolicy
from segapp.training.live.replay import applied_after, fallbacks_after, reverted_splits
from segapp.training.live.start import Start, start_of
from segapp.training.progress import Timetable
from segapp.training.pulse import Liveness
from segapp.training.reporting import cache_notes
from segapp.training.step.assembler import StepAssembler, StepLayout, StepParts, set_momentum
from segapp.training.step.engine import StepEngine
from segapp.training.trainer import Trainer
from segapp.training.validation import SamplePictures, Validation


def _announce(ranks: Ranks, what: str) -> None:
    if ranks.is_main:
        announce(what)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def build_trainer(
    config: RunConfig,
    context: RunContext,
    devices: DevicePlan,
    liveness: Liveness,
    *,
    checkpoint: LoadedCheckpoint | None = None,
    saved_plan: SavedMemoryPlan | None = None,
    limit: ImageLimit | None = None,
) -> Trainer:
    """Build everything that a training needs.

    Args:
        config: the complete config.
        context: context of the run.
        devices: the devices and the mode; in ddp this rank's own.
        liveness: signs of life of this process, to report to.
        checkpoint: checkpoint to resume. It is not loaded here, but the model is then built without pretrained weights.
        saved_plan: memory plan from the start of the run.
        limit: use only this number of images; None: all.

    Raises:
        ConfigError: a section does not fit the data, the model or this machine.
        DataError: the data cannot be used.
        CheckpointError: a weights file cannot be used.
    """
    ranks = context.ranks
    seed_everything(config.seed)
    scheme = build_scheme(config.data)
    _announce(ranks, "finding the images")
    train_set, val_set = _build_datasets(config, scheme, ranks, limit)
    context.signals.check()
    is_second_trial = limit is not None and checkpoint is not None  # the first trial has printed every message
    _announce(ranks, f"building the model for {len(train_set):,} training and {len(val_set):,} validation images")
    start, failed = _start_of(config, context, saved_plan, checkpoint)
    with own_generator(config.seed):  # threads of the caller may draw from the process's generator meanwhile
        assembler, parts, layout = _build_parts(config, ranks, devices, train_set, saved_plan, checkpoint, start)
    memory_note = momentum_note = None
    largest_px = None if is_second_trial else _largest_px(config.data, train_set, limit)
    if checkpoint is None:
        check_crop(config.data, largest_px, parts.model)
    if devices.devices[0].type == "cpu":
        num_images, eval_px = min(config.train.batch_size, len(train_set)), val_set.largest_px or config.data.crop_px
        memory_note = check_host_memory(config, num_images, math.prod(eval_px), ranks)
    if config.train.bn_momentum == "auto":
        config, momentum_note = _with_momentum(config, parts.model, len(train_set))
        if ranks.is_main:
            context.folder.write_config(dump_config(config))
    engine = assembler.assemble(parts, layout, ranks=ranks, mark=liveness.mark)
    controller = build_controller(config, context, devices, engine, saved_plan, start)
    for split in failed:
        controller.batch_split.record_failure(split)
    inference = build_inference(config.data, config.eval, engine.model, engine.precision, config.loss.is_aligned)
    torch.manual_seed(config.seed + ranks.rank)  # each rank has its own numbers for a network that draws them itself
    train_loader, val_loader = _build_loaders(config, ranks, (train_set, val_set), engine, limit)
    samples = SamplePictures(context.folder.samples, val_set, inference, engine.device) if ranks.is_main else None
    oom_policy = OomPolicy(
        context,
        engine,
        controller,
        inference,
        accumulate=config.train.accumulate,
        eval_batch_size=config.eval.batch_size,
        crop_px=config.data.crop_px,
    )
    facts = _facts(config, context, devices, engine, train_loader, len(val_set))
    facts = dataclasses.replace(facts, is_trial=limit is not None)
    if not is_second_trial:
        alerts = start_alerts(
            config,
            scheme,
            train_set.targets,
            val_set.targets,
            largest_px=largest_px,
            num_images=len(train_set),
            num_batches=len(train_loader) if limit is None else 0,
            device_type=engine.device.type,
        )
        alerts += [Alert(kind="memory", message=memory_note)] if memory_note else []
        notes = start_notes(scheme, (train_set.targets, val_set.targets))
        notes += [*cache_notes("training", train_set.cache), *cache_notes("validation", val_set.cache)]
        notes += filter(None, (train_set.cache_note, val_set.cache_note))
        notes += [momentum_note] if momentum_note else []
        notes += _base_notes(config, engine.model.base, is_new=checkpoint is None)
        facts = dataclasses.replace(facts, alerts=alerts, notes=notes)
    return Trainer(
        context,
        build_settings(config, len(train_loader)),
        facts,
        liveness,
        engine=engine,
        train_loader=train_loader,
        validation=Validation(engine, val_loader, inference, scheme, samples=samples),
        controller=controller,
        oom_policy=oom_policy,
        plateau=build_plateau(
            config.schedule, config.optim.lr, larger_is_better=score_named(config.checkpoint.monitor).larger_is_better
        ),
    )


def _with_momentum(config: RunConfig, model: SegmentationModel, num_images: int) -> tuple[RunConfig, str | None]:
    """Set the momentum that suits the run in a model; return the config with it, and a note on a raised one."""
    train, note = config.train, None
    per_epoch = num_batches(num_images, train.batch_size)
    num_passes = run_length(train, per_epoch)[1] * train.accumulate
    momentum = suited_momentum(model, num_passes, is_thawed=config.model.freeze_epochs is not None)
    if momentum is not None:
        set_momentum(model, momentum)
        note = (
            f"train.bn_momentum = {momentum:g}, because the model's own would average the statistics of BatchNorm over "
            f"too many of the {num_passes} forward passes of this run"
        )
    return config.model_copy(update={"train": train.model_copy(update={"bn_momentum": momentum})}), note


def common_momentum(configs: Sequence[RunConfig]) -> float | None:
    """Return the momentum for all runs of a sweep with `train.bn_momentum: auto`: the one that suits the shortest."""
    found: list[float] = []
    for config in configs:
        with contextlib.suppress(SegappError):  # reported by the run
            model = StepAssembler(config, build_scheme(config.data)).build_model(with_weights=False)
            resolved, _ = _with_momentum(config, model, count_images(config.data, split_names(config.data)[0]))
            found += [each for each in (resolved.train.bn_momentum,) if isinstance(each, float)]
    return max(found, default=None)


def _base_notes(config: RunConfig, base: BaseReference | None, *, is_new: bool) -> list[str]:
    """Return notes on the tensors that checkpoints leave out below adapters, or on why they leave none out."""
    if config.model.adapters is None:
        return []
    if base is not None:
        sources = ", ".join(base.sources)
        return [
            f"checkpoints hold adapters and head; {len(base.names)} tensors of the backbone come from {sources} "
            f"(sha256 {base.sha256[:16]}): keep it"
        ]
    why = (
        "no weights file gives it, so that it cannot be referred to"
        if is_new
        else "the checkpoint it continues from does"
    )
    return [f"checkpoints hold the whole model, the frozen backbone too: {why}"]


def _facts(
    config: RunConfig, context: RunContext, devices: DevicePlan, engine: StepEngine, loader: TrainLoader, num_val: int
) -> TrainingFacts:
    scheme = loader.dataset.scheme
    epochs, _, steps_per_epoch = run_length(config.train, len(loader))
    start = RunStart(
        classes=list(scheme.names),
        monitor=config.checkpoint.monitor,
        has_background=bool(scheme.foreground),
        palette=[(int(r), int(g), int(b)) for r, g, b in scheme.palette],
        num_params=sum(p.numel() for p in engine.model.parameters()),
        devices=[Device.model_validate(each, from_attributes=True) for each in context.device_memory.devices],
        num_train=len(loader.dataset),
        num_val=num_val,
        num_trainable=sum(p.numel() for p in engine.model.parameters() if p.requires_grad),
        freeze_epochs=config.model.freeze_epochs,
        mode=devices.mode,
        mode_reason=devices.mode_reason or None,
        batch_size=config.train.batch_size,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        steps=config.train.steps,
        precision=engine.precision.name,
        acquired_s=None if (holder := context.folder.read_holder()) is None else holder.acquired_s,
    )
    return TrainingFacts(start, config.model_dump(mode="json"), part_hashes(config))


def build_timetable(config: RunConfig, num_batches: int) -> Timetable:
    epochs, _, steps_per_epoch = run_length(config.train, num_batches)
    return Timetable(epochs, steps_per_epoch, config.train.steps, config.eval.every_epochs, config.eval.every_steps)


def build_settings(config: RunConfig, num_batches: int) -> TrainerSettings:
    """Return the fixed numbers of a training with `num_batches` micro-batches per epoch."""
    train, optim, checkpoint = config.train, config.optim, config.checkpoint
    _, total, steps_per_epoch = run_length(train, num_batches)
    return TrainerSettings(
        timetable=build_timetable(config, num_batches),
        batch_size=train.batch_size,
        accumulate=train.accumulate,
        base_lr=optim.lr,
        learning_rate=build_schedule(config.schedule, optim.lr, total_steps=total, steps_per_epoch=steps_per_epoch),
        save_rules=SaveRules(
            checkpoint.every_epochs,
            checkpoint.every_steps,
            checkpoint.every_minutes,
            checkpoint.keep,
            checkpoint.grace_s,
        ),
        monitor=checkpoint.monitor,
        freeze_epochs=config.model.freeze_epochs,
        early_stop=train.early_stop,
        log_every_steps=config.log.every_steps,
    )


def build_controller(
    config: RunConfig,
    context: RunContext,
    devices: DevicePlan,
    engine: StepEngine,
    saved_plan: SavedMemoryPlan | None,
    start: Start,
) -> CommandController:
    """Build the handler of commands, with the settings that the training begins with."""
    return CommandController(
        Inbox(context.folder if context.ranks.is_main else None, context.event_log),
        context.event_log,
        BatchSplit(engine.network, config.train.batch_size, devices.mode, saved_plan),
        context.device_memory,
        start,
        blocks=RecomputableBlocks(
            engine.model, len(engine.network.devices), "train.compile is on" if config.train.compile else None
        ),
    )


def _start_of(
    config: RunConfig, context: RunContext, saved_plan: SavedMemoryPlan | None, checkpoint: LoadedCheckpoint | None
) -> tuple[Start, set[tuple[int, ...]]]:
    """Return the settings of the first step, and the splits of as many ranks that have failed since the checkpoint."""
    step, folder, ranks = 0 if checkpoint is None else checkpoint.step, context.folder, context.ranks
    # The main rank reads, because files on a network file system may look older on another machine.
    fallbacks = ranks.from_main(fallbacks_after(folder, step) if ranks.is_main else None)
    changes = ranks.from_main(applied_after(folder.events, step) if ranks.is_main else None)
    failed = {split for each in fallbacks if (split := each.failed_split) and len(split) == ranks.world_size}
    start = start_of(
        config,
        EVEN if saved_plan is None else saved_plan.request,
        context.locations,
        None if checkpoint is None else checkpoint.state,
        [*changes, *(Replay(each.step, each.fallbacks) for each in fallbacks)],
        ranks.from_main(reverted_splits(folder.events) if ranks.is_main else None),
    )
    return start, failed


def _largest_px(data: DataConfig, train_set: SegmentationDataset, limit: ImageLimit | None) -> tuple[int, int] | None:
    """Return the largest height and width of all training images, also in a trial with a few of them."""
    if limit is None or is_component(data.format):
        return train_set.largest_px
    heights, widths = zip(*image_sizes_of(data, split_names(data)[0]), strict=True)
    return max(heights), max(widths)


def _build_datasets(
    config: RunConfig, scheme: ClassScheme, ranks: Ranks, limit: ImageLimit | None
) -> tuple[SegmentationDataset, SegmentationDataset]:
    train_split, val_split = split_names(config.data)
    num_train = None if limit is None else limit.num_batches * config.train.batch_size
    num_val = None if limit is None else limit.num_val
    common: Any = {"seed": config.seed, "ranks": ranks}
    train_set = build_dataset(config.data, scheme, train_split, is_training=True, most=num_train, **common)
    if len(train_set) < ranks.world_size:
        raise ConfigError(
            f"parallel: {ranks.world_size} ranks cannot share {len(train_set)} training images: "
            "start at most one rank per image",
            key="parallel.devices",
        )
    # This memory is still free, but the first epoch will take it.
    if train_set.cache is not None and train_set.cache.files.kind == "ram":
        common["promised_bytes"] = train_set.cache.state().missing_bytes
    val_set = build_dataset(config.data, scheme, val_split, is_training=False, most=num_val, **common)
    check_splits_apart(config.data, train_set.pairs, val_set.pairs)
    for split, dataset in ((train_split, train_set), (val_split, val_set)):
        for problem in check_ranges(split, dataset.pairs, scheme, dataset.pixels):
            if problem.severity == "error":
                raise DataError(problem.message, key="data.value_range")
            dataset.notes = [*dataset.notes, problem.message]
    return train_set, val_set


def _build_parts(
    config: RunConfig,
    ranks: Ranks,
    devices: DevicePlan,
    train_set: SegmentationDataset,
    saved_plan: SavedMemoryPlan | None,
    checkpoint: LoadedCheckpoint | None,
    start: Start,
) -> tuple[StepAssembler, StepParts, StepLayout]:
    """Build the modules of a step, with the frozen base of a checkpoint, and say how a step is divided."""
    scheme = train_set.scheme
    assembler = StepAssembler(config, scheme, None if config.distill is None else read_trained(config.distill.teacher))
    sets = saved_plan.recompute if saved_plan is not None and config.train.recompute == "auto" else None
    if sets is not None and devices.mode == "ddp":
        # The plan has the blocks of all ranks.
        sets = (sets[ranks.rank],)
    layout = StepLayout(devices.mode, devices.devices, start.configured.split, sets)
    parts = assembler.build_parts(
        layout,
        lambda rule: class_weights(rule, _frequencies(train_set, scheme)),
        # A checkpoint has all weights except the frozen base below adapters.
        with_weights=checkpoint is None or "base" in checkpoint.state,
    )
    if checkpoint is not None:
        fill_in_base(checkpoint, parts.model)
    return assembler, parts, layout


def _build_loaders(
    config: RunConfig,
    ranks: Ranks,
    datasets: tuple[SegmentationDataset, SegmentationDataset],
    engine: StepEngine,
    limit: ImageLimit | None,
) -> tuple[TrainLoader, EvalLoader]:
    train_set, val_set = datasets
    rank, world_size = ranks.rank, ranks.world_size
    val_px = config.eval.batch_size * math.prod(val_set.largest_px or config.data.crop_px)
    batch_size = -(-config.train.batch_size // world_size)
    options = build_load_options(config, train_set, engine.device, batch_size, further_px=val_px)
    order: Order | None = None
    if config.data.sampling != "uniform" and limit is None:  # a few images may lack the classes to sample for
        order = build_order(config.data, train_set, _frequencies(train_set, train_set.scheme), config.seed)
    train_loader = TrainLoader(
        train_set,
        config.train.batch_size,
        seed=config.seed,
        options=dataclasses.replace(options, accumulate=config.train.accumulate),
        rank=rank,
        world_size=world_size,
        order=order,
        divide=None if world_size == 1 else engine.network.split_of,
    )
    val_loader = EvalLoader(
        val_set,
        options=options,
        batch_size=config.eval.batch_size,
        rank=rank,
        world_size=world_size,
    )
    return train_loader, val_loader


def _frequencies(dataset: SegmentationDataset, scheme: ClassScheme) -> ClassFrequencies:
    targets = dataset.targets
    if targets is not None and targets.is_complete and targets.num_masks == len(dataset):
        return targets.frequencies
    if isinstance(dataset.pairs[0], OwnPair):
        return compute_class_frequencies(dataset)
    files = [path for pair in dataset.pairs for path in pair.files]
    key = repr((scheme, dataset.pixels.bands))
    return cached_frequencies(files, key, lambda: compute_class_frequencies(dataset))
