"""Assemble a training step from a config: model, criterion, optimizer, parallel wrapper and engine.

Training, the memory planner, the smoke run and the automatic batch all build their engine here, so
the plan describes the real training. `RealDevices` has the operations that the planner's devices override.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from segapp.assembly.devices import build_precision, uses_channels_last
from segapp.assembly.network import build_network, check_sizes, put_adapters
from segapp.assembly.optimizer import build_optimizer, build_parameter_groups, criterion_of
from segapp.assembly.pairs import build_pixels
from segapp.assembly.trained import TrainedState
from segapp.chunks import EVEN, Mode, SplitRequest
from segapp.compat.torch import BatchNorm
from segapp.config import RunConfig
from segapp.config.modes import check_mode
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.preprocessing import Preprocessing, padded
from segapp.errors import ConfigError
from segapp.inference.sliding import NormalizedInput
from segapp.losses import AdditiveCriterion, CriterionDistilled
from segapp.models import Critic, SegmentationModel, critic_size
from segapp.models.blocks import block_names
from segapp.models.surgery import replace_adaptive_pooling
from segapp.optim import WeightAverage
from segapp.parallel import DataParallelModel, SampleMasks, convert_sync_batchnorm, mask_by_sample, set_recompute
from segapp.parallel.batchnorm_guard import no_samples_problem, smallest_chunk, unused_parameters
from segapp.parallel.distributed import Ranks, wrap_ddp
from segapp.parallel.model_parallel import balance_stages, place_stages
from segapp.precision import Precision
from segapp.training.step.distill import (
    PAIR_WISE,
    DistilledInput,
    Teacher,
    build_critic,
    build_distillation,
    check_frame,
    factors_of,
)
from segapp.training.step.divided import RankNetwork, ReplicatedNetwork, TrainedNetwork
from segapp.training.step.engine import StepEngine, StepParticipant
from segapp.training.step.update import WeightUpdate


@dataclass(frozen=True)
class StepLayout:
    """The division of a step over devices.

    Attributes:
        mode: how the devices work together.
        devices: devices of this process; the first one holds the weights.
        split: samples of a full batch on each device or rank, in dp and ddp.
        recompute: blocks that are recomputed in the backward pass, one set per device in dp, else one; None: the blocks
            that the config names, none with `auto`.
    """

    mode: Mode
    devices: tuple[torch.device, ...]
    split: SplitRequest = EVEN
    recompute: tuple[tuple[str, ...], ...] | None = None


@dataclass(frozen=True)
class StepParts:
    """The modules that an engine is assembled from."""

    model: SegmentationModel
    """Prepared by `StepAssembler.prepare`, on its device."""
    criterion: AdditiveCriterion
    """Criterion of the task, without distillation."""
    critic: Critic | None = None
    """Critic of the holistic term, on the first device; None without that term."""


class RealDevices:
    """The devices of this machine; the planner's simulated ones override the operations that differ.

    `tag` is called with tensors and their purpose (a kind of `segapp.memory.peaks.KINDS`).
    """

    has_values = True
    """False if tensors have no storage, so no decision can depend on the values of a module's output."""

    def __init__(
        self,
        *,
        gradient_as_bucket_view: bool = True,
        tag: Callable[[Iterable[Tensor], str], None] = lambda tensors, kind: None,
    ) -> None:
        self._as_views, self.tag = gradient_as_bucket_view, tag

    def copy_to(self, module: nn.Module, device: torch.device) -> Any:
        return copy.deepcopy(module).to(device)

    def stages(self, model: nn.Module, layout: StepLayout, example: Tensor) -> Mapping[str, Any]:
        """Return the device of each part of a prepared model, in mode model, balanced by the memory of a step.

        The devices of the layout are filled in order; only shape and dtype of the example input are used.
        """
        return balance_stages(model, layout.devices, example)

    def replica_mode(self, devices: Sequence[torch.device]) -> Any:
        """Return "threads"; logical devices share a generator, so there one replica at a time draws from it."""
        return "threads" if len(set(devices)) == len(devices) else "lockstep"

    def wrap_ddp(self, network: nn.Module, device: torch.device, example: Tensor) -> nn.Module:
        """Return the network in `DistributedDataParallel`, which looks for unused parameters if there are any."""
        has_unused = bool(unused_parameters(network, example))
        return wrap_ddp(network, device, gradient_as_bucket_view=self._as_views, find_unused_parameters=has_unused)


def set_momentum(model: nn.Module, momentum: float) -> None:
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.momentum = momentum


def _check_teacher(config: RunConfig, trained: TrainedState, scheme: ClassScheme) -> None:
    """Raise ConfigError if the teacher does not suit the student: its classes, its library, its images."""
    found = trained.path
    if list(trained.scheme.names) != list(scheme.names):
        pairs = zip(trained.scheme.names, scheme.names, strict=False)
        other = next((f"{a!r} for {b!r}" for a, b in pairs if a != b), "more or fewer")
        raise ConfigError(
            f"distill.teacher: {found} has other classes ({trained.scheme.num_classes} of them, {other}) than this "
            f"data ({scheme.num_classes}): use a teacher of the same classes in the same order",
            key="distill.teacher",
        )
    is_pair_wise = config.distill is not None and PAIR_WISE in factors_of(config.distill)
    for key, library in (("model", config.model.library), ("distill.teacher", trained.config.model.library)):
        if library == "python" and is_pair_wise:
            raise ConfigError(
                f"{key} is a custom model, whose features before the last layer distill.pair_wise cannot find: use a "
                "model of torchvision or smp, or set distill.pair_wise=0",
                key=key,
            )
    own, taught = build_pixels(config.data), build_pixels(trained.config.data)
    if (own.bands, own.dtype) != (taught.bands, taught.dtype):
        raise ConfigError(
            f"distill.teacher: {found} was trained on {taught.layout}, and this data is {own.layout}: use a teacher of "
            "the same data.bands and data.dtype",
            key="distill.teacher",
        )


def _teacher_of(
    trained: TrainedState,
    devices: Sequence[torch.device],
    input_dtype: torch.dtype,
    put: Callable[[nn.Module, torch.device], Any],
) -> Teacher:
    """Return the teacher in the training's precision; `put` makes one copy of it per device.

    Logical devices on one real device share a copy.
    """
    model, data = trained.model.eval().requires_grad_(False), trained.config.data
    copies = {
        device: (put(model, device), Preprocessing(build_pixels(data), input_dtype).to(device))
        for device in dict.fromkeys(devices)
    }
    return Teacher(copies, trained.sha256, align_corners=trained.config.loss.is_aligned)


class StepAssembler:
    """Builds the training step of a config, on any devices.

    Args:
        config: the complete config, with a resolved `train.precision`.
        scheme: the classes.
        teacher: of `distill`; needed if the config has that section. Its model is cast in place.

    Raises:
        ConfigError: the teacher does not suit the student.
    """

    def __init__(self, config: RunConfig, scheme: ClassScheme, teacher: TrainedState | None = None) -> None:
        self.config, self.scheme, self.teacher = config, scheme, teacher
        self.pixels = build_pixels(config.data)
        if teacher is not None:
            _check_teacher(config, teacher, scheme)
            build_precision(config, torch.device("cpu")).prepare(teacher.model)

    def build_model(self, *, with_weights: bool) -> SegmentationModel:
        """Build the model in fp32 on the CPU, with its pretrained weights unless a checkpoint will replace them.

        Raises:
            ConfigError: the crop, the batch size or `model.freeze` does not fit the model.
        """
        model = build_network(
            self.config.model,
            self.scheme.num_classes,
            num_bands=self.pixels.num_bands,
            with_weights=with_weights,
            class_names=self.scheme.names,
        )
        check_sizes(self.config, model)
        if self.teacher is not None:
            check_frame(self.config.data.crop_px, model, self.teacher.model)
        if isinstance(self.config.train.bn_momentum, float):  # auto waits for the length of the run
            set_momentum(model, self.config.train.bn_momentum)
        put_adapters(self.config.model, model)
        if self.config.model.freeze:
            model.freeze(self.config.model.freeze)
        return model

    def prepare(self, model: SegmentationModel, layout: StepLayout) -> SegmentationModel:
        """Prepare the model for the step, in place.

        This sets SyncBatchNorm, dropout masks per sample, precision, memory format and recomputed blocks.

        Raises:
            ConfigError: `train.deterministic` is set and distillation has no deterministic form on CUDA, or
                `train.recompute` names a block that the model does not have.
        """
        if self.config.train.deterministic:
            replace_adaptive_pooling(model)  # its backward pass adds in random order on CUDA
            if layout.devices[0].type == "cuda" and self.config.distill is not None and self.config.distill.pair_wise:
                raise ConfigError(
                    "train.deterministic = true, but distill.pair_wise pools with adaptive_max_pool2d, which has no "
                    "deterministic form on CUDA: use distill.pair_wise=0, or train.deterministic=false",
                    key="train.deterministic",
                )
        if self._is_synced(layout):
            try:
                convert_sync_batchnorm(model)
            except TypeError as error:
                raise ConfigError(f"{error}, or set parallel.sync_bn=false", key="parallel.sync_bn") from error
        mask_by_sample(model)
        build_precision(self.config, torch.device("cpu")).prepare(model)
        if uses_channels_last(self.config.train, model, layout.devices[0]):
            model.to(memory_format=torch.channels_last)
        self._set_blocks(model, layout)
        return model

    def _set_blocks(self, model: SegmentationModel, layout: StepLayout) -> None:
        wanted, num_devices = self.config.train.recompute, len(layout.devices) if layout.mode == "dp" else 1
        recomputed = layout.recompute
        if recomputed is None and wanted in ("off", "auto"):
            recomputed = ()
        elif recomputed is None:
            recomputed = (block_names(model, None if isinstance(wanted, str) else wanted),) * num_devices
        set_recompute(model, recomputed)

    def build_criterion(self, class_weights: Callable[[str], list[float]]) -> Any:
        """Build the criterion of the task; `class_weights` returns the weights (C) of a named rule."""
        return criterion_of(self.config, self.scheme, class_weights)

    def build_critic(self, layout: StepLayout, device: torch.device) -> Critic | None:
        """Return the critic of the distillation; None without one."""
        section = self.config.distill
        if section is None:
            return None
        return build_critic(
            section,
            self.pixels.num_bands + self.scheme.num_classes,
            self.config.data.crop_px,
            self._critic_precision(device),
            device,
            is_synced=self._is_synced(layout),
        )

    def _critic_precision(self, device: torch.device) -> Precision:
        """Return the critic's precision: the student's autocast, but fp32 weights, as half ones lose small updates."""
        is_half = self.config.train.precision == "fp16"
        return Precision("amp-fp16", device) if is_half else build_precision(self.config, device)

    def build_parts(
        self, layout: StepLayout, class_weights: Callable[[str], list[float]], *, with_weights: bool
    ) -> StepParts:
        """Build all modules of a step on the first of real devices.

        In mode model, the model stays on the host until its stages are placed, because it may not fit on any one
        device.
        """
        device = layout.devices[0]
        model = self.prepare(self.build_model(with_weights=with_weights), layout)
        if layout.mode != "model":
            model.to(device)
        critic = self.build_critic(layout, device)
        return StepParts(model, self.build_criterion(class_weights), critic)

    def _is_synced(self, layout: StepLayout) -> bool:
        """Return True if BatchNorm is synchronized, because it sees only a part of the batch on each device."""
        is_divided = layout.mode == "ddp" or (layout.mode == "dp" and len(layout.devices) > 1)
        return self.config.parallel.sync_bn and is_divided

    def assemble(
        self,
        parts: StepParts,
        layout: StepLayout,
        backend: RealDevices | None = None,
        *,
        ranks: Ranks | None = None,
        mark: Callable[[str], None] = lambda phase: None,
    ) -> StepEngine:
        """Assemble the engine.

        Args:
            parts: the modules, on their devices.
            layout: how a step is divided.
            backend: backend of the devices; None: the real devices of this machine.
            ranks: the processes that share every step.
            mark: called with the name of each phase of a step as it begins.

        Raises:
            ConfigError: the split, the batch, or a stage does not suit the model or the devices.
        """
        config, device, model = self.config, layout.devices[0], parts.model
        # dp on one device runs the bare network, so features that exclude dp are possible.
        is_one_device = layout.mode == "dp" and len(layout.devices) == 1
        check_mode(config, "single" if is_one_device else layout.mode)
        if backend is None:
            backend = RealDevices(gradient_as_bucket_view=config.parallel.gradient_as_bucket_view)
        precision = build_precision(config, device)
        preprocessing = Preprocessing(build_pixels(config.data), precision.input_dtype).to(device)
        inner = self._inner(parts, layout, backend, preprocessing)
        criterion, participants = parts.criterion, list[StepParticipant]()
        if config.distill is not None:
            criterion = CriterionDistilled(criterion, factors_of(config.distill))
        criterion = criterion.to(device)
        network = self._network(model, inner, layout, backend, ranks or Ranks(), criterion, precision)
        update = WeightUpdate(
            model,
            build_optimizer(config.optim, build_parameter_groups(config.optim, model, precision)),
            precision,
            average=self._average(model),
            clip_grad_norm=config.optim.clip_grad_norm,
            groups_of=partial(build_parameter_groups, config.optim, model, precision),
        )
        if config.distill is not None and isinstance(inner, DistilledInput):
            of_critic = self._critic_precision(network.device)
            participants = build_distillation(
                config.distill, network, inner, of_critic, base_lr=config.optim.lr, seed=config.seed
            )
        engine = StepEngine(
            network,
            criterion,
            update,
            participants=participants,
            masks=SampleMasks(model, config.seed) if backend.has_values else None,
            pad_target=partial(padded, size=model.suitable_size(*config.data.crop_px), value=self.scheme.ignore_index),
            mark=mark,
        )
        _tag_state(engine, backend)
        return engine

    def _average(self, model: SegmentationModel) -> WeightAverage[SegmentationModel] | None:
        """Return the average of the weights, which shares the frozen base of adapters with the model."""
        if self.config.train.ema is None:
            return None
        named = [] if self.config.model.adapters is None else model.named_parameters()
        base = [p for name, p in named if not p.requires_grad and name not in model.frozen_parameters]
        return WeightAverage(model, self.config.train.ema, base)

    def _inner(
        self, parts: StepParts, layout: StepLayout, backend: RealDevices, preprocessing: Preprocessing
    ) -> NormalizedInput:
        """Return the network of one device, which takes stored images (N, B, H, W)."""
        config, model, device = self.config, parts.model, layout.devices[0]
        channels_last = uses_channels_last(config.train, model, device)
        if self.teacher is None or config.distill is None:
            return NormalizedInput(model, preprocessing, channels_last=channels_last)
        return DistilledInput(
            model,
            preprocessing,
            _teacher_of(self.teacher, layout.devices, preprocessing.dtype, backend.copy_to),
            parts.critic,
            factors=factors_of(config.distill),
            temperature=config.distill.temperature,
            align_corners=config.loss.is_aligned,
            critic_size=critic_size(config.data.crop_px),
            channels_last=channels_last,
            autocast=self._critic_precision(device).autocast,
        )

    def _network(
        self,
        model: SegmentationModel,
        inner: NormalizedInput,
        layout: StepLayout,
        backend: RealDevices,
        ranks: Ranks,
        criterion: AdditiveCriterion,
        precision: Precision,
    ) -> TrainedNetwork:
        device, batch_size = layout.devices[0], self.config.train.batch_size
        network: TrainedNetwork
        try:
            if layout.mode == "ddp":
                if batch_size < ranks.world_size:
                    raise ConfigError(
                        f"parallel: {ranks.world_size} ranks cannot share train.batch_size = {batch_size}: "
                        f"use {ranks.world_size} or more",
                        key="train.batch_size",
                        value=batch_size,
                    )
                wrap = partial(backend.wrap_ddp, inner, device, self._example())
                has_masters = precision.name == "fp16"
                network = RankNetwork(model, wrap, device, ranks, layout.split, batch_size, has_masters=has_masters)
            elif layout.mode == "model":
                # On the model, because evaluation calls it without `inner`.
                example = self._example().to(inner.preprocessing.dtype).expand(2, -1, -1, -1)
                is_thawed = self.config.model.freeze_epochs is not None
                if is_thawed:  # the stages stay where they are, and the later epochs need more memory
                    model.unfreeze()
                stages = backend.stages(model, layout, example)
                if is_thawed:
                    model.freeze(self.config.model.freeze)
                place_stages(model, stages, rest=device, output_device=device)
                network = TrainedNetwork(model, inner, device)
            else:
                replicas = DataParallelModel(inner, layout.devices, mode=backend.replica_mode(layout.devices))
                replicas.divide(layout.split, batch_size if layout.split.shares is None else None)
                network = ReplicatedNetwork(model, replicas, device)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"parallel: {error}", key="parallel") from None
        if backend.has_values and layout.mode != "model":
            self._check_chunks(network, inner, criterion, precision)
        if self.config.train.compile and backend.has_values:  # after the checks, which use the network otherwise
            inner.compile_training(as_cuda_graphs=self.config.train.compile == "reduce-overhead")
        return network

    def _check_chunks(
        self, network: TrainedNetwork, inner: NormalizedInput, criterion: AdditiveCriterion, precision: Precision
    ) -> None:
        """Set how many samples each device needs; ConfigError if the split gives one fewer."""
        split = network.split_of(self.config.train.batch_size)
        # Synchronized layers see the whole batch, so one sample on a device is enough.
        if not self.config.parallel.sync_bn:
            network.smallest_chunk = smallest_chunk(
                NormalizedInput(network.model, inner.preprocessing), self._example()
            )
        if any(0 < size < network.smallest_chunk for size in split):
            raise ConfigError(
                f"parallel: split {split} leaves a BatchNorm layer a single value per channel: set "
                "parallel.sync_bn to true, or give 2 samples or more to every device that has any",
                key="parallel",
            )
        if isinstance(network, RankNetwork):
            network.needs_samples = self._needs_samples(inner, criterion, precision)
            if network.needs_samples is not None and 0 in split:
                raise ConfigError(
                    f"parallel: split {split} leaves a rank without samples, and {network.needs_samples}: give every "
                    "rank one, or use parallel.mode=dp",
                    key="parallel.mode",
                    value="ddp",
                )

    def _needs_samples(self, inner: NormalizedInput, criterion: AdditiveCriterion, precision: Precision) -> str | None:
        """Return why every rank needs samples in each step; None if it need not."""
        target = torch.zeros(
            0, *self.config.data.crop_px, dtype=getattr(torch, self.scheme.dtype.name), device=precision.device
        )

        def loss(outputs: Any) -> Tensor:
            first, *others = (part.sum() for part in criterion.statistics(outputs, target))
            return sum(others, first)

        example = self._example().to(next(inner.parameters()).device)
        return no_samples_problem(inner, example, autocast=precision.autocast, loss=loss)

    def _example(self) -> Tensor:
        return torch.zeros(1, self.pixels.num_bands, *self.config.data.crop_px, dtype=self.pixels.torch_dtype)


def _tag_state(engine: StepEngine, backend: RealDevices) -> None:
    """Tag the tensors that an engine holds between two steps in addition to the weights."""
    update, own = engine.update, {id(parameter) for parameter in engine.model.parameters()}
    optimizers = [update.optimizer, *(each for p in engine.participants for each in p.optimizers())]
    backend.tag((p for p in update.parameters() if id(p) not in own), "masters")
    if update.average is not None:
        backend.tag((*update.average.module.parameters(), *update.average.module.buffers()), "average")
        backend.tag(engine.model.parameters(), "weights")  # the average may share some of them
    backend.tag((*engine.model.buffers(), *engine.guard.kept), "buffers")
    states = [state for each in optimizers for state in each.state.values()]
    backend.tag((tensor for state in states for tensor in state.values() if isinstance(tensor, Tensor)), "optimizer")
