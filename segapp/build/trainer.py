"""Build the trainer of a config: sections become plain arguments and objects here, and in `segapp.build`."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import torch

from segapp.build.class_weights import cached_frequencies, class_weights
from segapp.build.criterion import needs_distances
from segapp.build.data import build_dataset, build_load_options, build_order
from segapp.build.devices import DevicePlan
from segapp.build.network import build_inference
from segapp.build.optimizer import build_plateau, build_schedule, describe_groups
from segapp.build.own_parts import part_hashes
from segapp.build.pairs import build_scheme, check_splits_apart, split_names
from segapp.build.step import StepAssembler
from segapp.build.trained import read_trained
from segapp.checkpoint.training_state import CheckpointStore, LoadedCheckpoint
from segapp.config import LiveSettings, RunConfig, config_hash
from segapp.datasets.dataset import OwnDataset, SegmentationDataset, compute_class_frequencies
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.loader import EvalLoader, TrainLoader
from segapp.datasets.targets import ClassFrequencies
from segapp.errors import ConfigError, OutOfMemoryError
from segapp.memory.plan import SavedMemoryPlan
from segapp.parallel.ranks import Ranks
from segapp.run.starting import announce
from segapp.scores import SCORES
from segapp.training.control.batch_split import BatchSplitController
from segapp.training.control.commands import CommandController
from segapp.training.planning.auto import planned_advice
from segapp.training.planning.host_memory import check_host_memory
from segapp.training.process.context import RunContext
from segapp.training.process.inbox import applied_after
from segapp.training.recovery.fallbacks import fallbacks_after
from segapp.training.recovery.memory_limit import build_memory_limit
from segapp.training.recovery.out_of_memory import OomHandler
from segapp.training.recovery.policy import BatchSizes, OomPolicy
from segapp.training.reporting import TrainerParts
from segapp.training.request import ImageLimit
from segapp.training.saving.saver import SaveRules
from segapp.training.settings import RunFacts, TrainerSettings
from segapp.training.start_checks import StartFacts, run_length, start_alerts, start_notes
from segapp.training.step.engine import StepEngine
from segapp.training.step.layout import build_layout
from segapp.training.step.precise_bn import PreciseBatchNorm
from segapp.training.telemetry.sample_images import SamplePictures
from segapp.training.trainer import Trainer
from segapp.training.validation import Validation


def _announce(ranks: Ranks, what: str) -> None:
    if ranks.is_main:
        announce(what)


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's global generators (weights, dropout)."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def build_trainer(
    config: RunConfig,
    context: RunContext,
    devices: DevicePlan,
    *,
    checkpoint: LoadedCheckpoint | None = None,
    saved_plan: SavedMemoryPlan | None = None,
    limit: ImageLimit | None = None,
) -> Trainer:
    """Build everything that a training needs.

    Args:
        config: the complete config.
        context: of the run.
        devices: which devices, in which mode; in ddp this rank's own.
        checkpoint: that the training continues from; it is not loaded here, but pretrained weights are then not read.
        saved_plan: the memory plan that the run began with.
        limit: use only so many images; None: all.

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
    is_second_trial = limit is not None and checkpoint is not None  # the first one has looked at, and said, everything
    if devices.devices[0].type == "cpu" and not is_second_trial:
        _check_host_memory(config, len(train_set), ranks)
    _announce(ranks, f"building the model for {len(train_set):,} training and {len(val_set):,} validation images")
    engine = _build_engine(config, context, devices, train_set, first_gpu0_bsz(config, saved_plan), checkpoint)
    controller = build_controller(config, context, devices, engine, saved_plan)
    step = 0 if checkpoint is None else checkpoint.step
    controller.schedule_replay(ranks.from_main(applied_after(context.folder.events, step) if ranks.is_main else None))
    inference = build_inference(config.data, config.eval, engine.model, engine.precision, config.loss.align_corners)
    torch.manual_seed(config.seed + ranks.rank)  # every rank drops out other pixels
    train_loader, val_loader = _build_loaders(config, ranks, (train_set, val_set), engine.device, limit)
    if engine.rank_split is not None:
        train_loader.divide = engine.rank_split.plan
    samples = SamplePictures(context.folder.samples, val_set, inference, engine.device) if ranks.is_main else None
    precise_bn = PreciseBatchNorm(train_loader, config.train.precise_bn) if config.train.precise_bn else None
    oom_policy = OomPolicy(
        OomHandler(context, lambda: planned_advice(config, devices, context.device_memory.devices, saved_plan)),
        engine,
        controller,
        inference,
        BatchSizes(config.train.batch_size, config.train.accumulate, config.eval.batch_size, config.data.crop_px),
        limit=build_memory_limit(config.parallel.memory_budget_mib, devices.devices, engine, context.device_memory),
        later=ranks.from_main(fallbacks_after(context.folder, step) if ranks.is_main else None),
    )
    parts = TrainerParts(
        engine,
        train_loader,
        Validation(engine, val_loader, inference, scheme, precise_bn=precise_bn, samples=samples),
        controller,
        oom_policy,
        CheckpointStore(context.folder.checkpoints, keep=config.checkpoint.keep, config_hash=config_hash(config)),
        build_plateau(
            config.schedule, config.optim.lr, larger_is_better=SCORES[config.checkpoint.monitor].larger_is_better
        ),
    )
    groups = describe_groups(config.optim, engine.model)
    num_batches = len(train_loader) if limit is None else None
    known = StartFacts(
        config, scheme, train_set.targets, val_set.targets, train_set.largest_px, num_batches, engine.device.type
    )
    facts = RunFacts(
        classes=list(scheme.names),
        palette=[(int(r), int(g), int(b)) for r, g, b in scheme.palette],
        num_params=sum(p.numel() for p in engine.model.parameters()),
        devices=_device_facts(context, devices),
        num_train=len(train_set),
        num_val=len(val_set),
        config=config.model_dump(mode="json"),
        num_trainable=sum(group.num_params for group in groups),
        freeze_epochs=config.model.freeze_epochs,
        param_groups=groups,
        mode=devices.mode,
        mode_reason=devices.mode_reason or None,
        parts=part_hashes(config),
        alerts=() if is_second_trial else start_alerts(known),
        notes=() if is_second_trial else start_notes(known),
    )
    return Trainer(context, build_settings(config, len(train_loader)), parts, facts)


def _check_host_memory(config: RunConfig, num_train: int, ranks: Ranks) -> None:
    """Refuse a step that does not fit into this machine's memory; the main rank predicts for all.

    Raises:
        OutOfMemoryError: it does not fit.
    """
    problem: OutOfMemoryError | None = None
    if ranks.is_main:
        try:
            check_host_memory(config, min(config.train.batch_size, num_train))
        except OutOfMemoryError as error:
            problem = error
    problem = ranks.from_main(problem)
    if problem is not None:
        raise problem


def build_settings(config: RunConfig, num_batches: int) -> TrainerSettings:
    """Return the fixed numbers of a training with `num_batches` micro-batches an epoch."""
    train, optim, checkpoint = config.train, config.optim, config.checkpoint
    epochs, total, steps_per_epoch = run_length(train, num_batches)
    return TrainerSettings(
        epochs=epochs,
        total_steps=train.steps,
        batch_size=train.batch_size,
        accumulate=train.accumulate,
        base_lr=optim.lr,
        learning_rate=build_schedule(config.schedule, optim.lr, total_steps=total, steps_per_epoch=steps_per_epoch),
        save_rules=SaveRules(checkpoint.every_steps, checkpoint.every_minutes, checkpoint.grace_s),
        save_every_epochs=checkpoint.every_epochs,
        monitor=checkpoint.monitor,
        eval_every_epochs=config.eval.every_epochs,
        eval_every_steps=config.eval.every_steps,
        freeze_epochs=config.model.freeze_epochs,
        early_stop=train.early_stop,
        max_bad_steps=train.max_bad_steps,
        log_every_steps=config.log.every_steps,
    )


def first_gpu0_bsz(config: RunConfig, saved_plan: SavedMemoryPlan | None) -> int | None:
    """Return `gpu0_bsz` of the first epoch: as the config says, or of the plan where it says `auto`."""
    wanted = config.parallel.gpu0_bsz
    if wanted == "auto":
        return None if saved_plan is None else saved_plan.gpu0_bsz
    return wanted


def build_controller(
    config: RunConfig, context: RunContext, devices: DevicePlan, engine: StepEngine, saved_plan: SavedMemoryPlan | None
) -> CommandController:
    """Build what handles commands, with the settings that the config begins with."""
    parallel = config.parallel
    batch_split = BatchSplitController(
        engine.rank_split or engine.network,
        config.train.batch_size,
        devices.mode,
        engine.smallest_chunk,
        saved_plan,
        engine.ranks,
        engine.needs_samples,
    )
    gpu0_bsz = first_gpu0_bsz(config, saved_plan)
    settings = LiveSettings(gpu0_bsz=gpu0_bsz, gpu0_bsz_auto=parallel.gpu0_bsz == "auto", shares=parallel.shares)
    return CommandController(context.inbox, context.event_log, batch_split, context.device_memory, settings)


def _build_datasets(
    config: RunConfig, scheme: ClassScheme, ranks: Ranks, limit: ImageLimit | None
) -> tuple[SegmentationDataset, SegmentationDataset]:
    """Build the training and the validation set."""
    train_split, val_split = split_names(config.data)
    num_train = None if limit is None else limit.num_batches * config.train.batch_size
    num_val = None if limit is None else limit.num_val
    train_set = build_dataset(
        config.data, scheme, train_split, is_training=True, seed=config.seed, most=num_train, ranks=ranks
    )
    if len(train_set) < ranks.world_size:
        raise ConfigError(
            f"parallel: {ranks.world_size} ranks cannot share {len(train_set)} training images: use one each"
        )
    val_set = build_dataset(
        config.data, scheme, val_split, is_training=False, seed=config.seed, most=num_val, ranks=ranks
    )
    train_set.has_distances = val_set.has_distances = needs_distances(config.loss)
    check_splits_apart(config.data, train_set.pairs, val_set.pairs)
    return train_set, val_set


def _build_engine(
    config: RunConfig,
    context: RunContext,
    devices: DevicePlan,
    train_set: SegmentationDataset,
    gpu0_bsz: int | None,
    checkpoint: LoadedCheckpoint | None,
) -> StepEngine:
    scheme, ranks = train_set.scheme, context.ranks
    teacher = None if config.distill is None else read_trained(config.distill.teacher)
    assembler = StepAssembler(config, scheme, teacher)
    layout = build_layout(config, devices, gpu0_bsz)
    parts = assembler.build_parts(
        layout, lambda rule: class_weights(rule, _frequencies(train_set, scheme)), with_weights=checkpoint is None
    )
    return assembler.assemble(parts, layout, ranks=ranks, device_memory=context.device_memory)


def _build_loaders(
    config: RunConfig,
    ranks: Ranks,
    datasets: tuple[SegmentationDataset, SegmentationDataset],
    device: torch.device,
    limit: ImageLimit | None,
) -> tuple[TrainLoader, EvalLoader]:
    train_set, val_set = datasets
    rank, world_size = ranks.rank, ranks.world_size
    options = build_load_options(config.data, train_set, device, -(-config.train.batch_size // world_size))
    train_loader = TrainLoader(
        train_set,
        config.train.batch_size,
        seed=config.seed,
        options=options,
        rank=rank,
        world_size=world_size,
    )
    if config.data.sampling != "uniform" and limit is None:  # a few images need not have the classes to aim at
        counts = _frequencies(train_set, train_set.scheme)
        train_loader.order = build_order(config.data, train_set, counts, config.seed)
    val_loader = EvalLoader(
        val_set,
        options=options,
        batch_size=config.eval.batch_size,
        rank=rank,
        world_size=world_size,
    )
    return train_loader, val_loader


def _device_facts(context: RunContext, devices: DevicePlan) -> list[Any]:
    known = context.device_memory.devices
    if known:
        return [
            {"device": each.device, "name": each.name, "uuid": each.uuid, "total_mib": each.total_mib} for each in known
        ]
    return [str(device) for theirs in context.ranks.gather(devices.devices) for device in theirs]


def _frequencies(dataset: SegmentationDataset, scheme: ClassScheme) -> ClassFrequencies:
    targets = dataset.targets
    if targets is not None and targets.is_complete and targets.num_masks == len(dataset):
        return targets.frequencies
    if isinstance(dataset, OwnDataset):
        return compute_class_frequencies(dataset)
    masks = [path for pair in dataset.pairs for path in pair.masks]
    return cached_frequencies(masks, repr(dataclasses.astuple(scheme)), lambda: compute_class_frequencies(dataset))
