"""One training step and one evaluation of a config on simulated devices: the real model, criterion, optimizer, engine.

What is not the real thing, because it does not run on tensors without numbers: DistributedDataParallel. Its buckets are
made by hooks that do what its reducer does (`Buckets`). Runs in a process of its own: `python -m
segapp.train.planning.simulate` reads one job a line and answers each with one line.
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from segapp.build.criterion import build_criterion
from segapp.build.data import build_pairs, build_scheme, split_names
from segapp.build.network import (
    build_inference,
    build_network,
    check_sizes,
    set_batchnorm_momentum,
)
from segapp.build.optimizer import build_optimizer, build_parameter_groups
from segapp.build.trained import TrainedState, read_trained
from segapp.config import RunConfig, validate_config
from segapp.datasets.dataset import image_sizes
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.loader import Batch
from segapp.errors import ConfigError, DataError, SegappError
from segapp.inference.evaluate import EvaluationSettings, evaluate
from segapp.inference.normalize import NormalizedInput, Normalizer
from segapp.losses import AdditiveCriterion
from segapp.memory.simulation.backend import BACKEND, CHANGE_IN_PLACE, place, simulation, skeleton
from segapp.memory.simulation.buckets import Buckets
from segapp.memory.simulation.jobs import EVAL, PHASES, LossStyle, PhasePeak, SimulationJob, SimulationResult
from segapp.memory.simulation.recorder import CUDA_GRANULE_BYTES, PeakMoment, PhaseMarks, Recorder
from segapp.models import Critic, SegmentationModel
from segapp.optim import WeightAverage
from segapp.parallel import (
    BalancedDataParallel,
    DataParallelModel,
    check_split,
    convert_sync_batchnorm,
    place_stages,
    plan_stages,
    smallest_chunk,
)
from segapp.parallel.ranks import Ranks
from segapp.precision import Precision, half_except_norm
from segapp.train.step.build_distill import (
    build_critic,
    build_distillation,
    build_distilled_input,
    build_teacher,
    check_teacher,
    distilled_criterion,
)
from segapp.train.step.engine import StepEngine

MIB = 2**20
MAX_HEADERS = 500
KNOWN_SIZES = {"cityscapes": (1024, 2048), "camvid": (720, 960), "voc": (500, 500), "ade20k": (768, 1024)}
"""Height and width that an evaluation has to reckon with, pixels."""


class _Done(Exception):  # noqa: N818  # no error: enough has been seen
    """Ends an evaluation after its first batches."""


class Upsampled(nn.Module):
    """A model whose outputs are upsampled to the images' size, as torchvision's own models do it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """(N, C, H, W) logits, the auxiliary ones after the main ones."""
        size = images.shape[-2:]
        return tuple(F.interpolate(logits, size, mode="bilinear", align_corners=False) for logits in self.model(images))


class Simulator:
    """Simulates a config on any number of devices; the model is built once.

    Args:
        config: the complete config.

    Raises:
        ConfigError: the model, or its sizes, do not fit together.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.scheme: ClassScheme = build_scheme(config.data)
        model = build_network(config.model, self.scheme.num_classes, with_weights=False)
        check_sizes(config, model)
        set_batchnorm_momentum(model, config.train.bn_momentum)
        if config.train.channels_last:
            model.to(memory_format=torch.channels_last)
        model.train()
        self._fixed_size, self._suitable_size = model.fixed_size_px, model.suitable_size
        self.min_train_batch = model.min_train_batch
        self.num_params = sum(p.numel() for p in model.parameters())
        self._plain = skeleton(model)
        self._teacher: TrainedState | None = None
        self._critic: Critic | None = None
        if config.distill is not None:
            self._teacher = read_trained(config.distill.teacher)
            check_teacher(config, self._teacher, self.scheme)
            Precision(config.train.precision, torch.device("cpu")).prepare(self._teacher.model)
            self._critic = build_critic(config, self.scheme.num_classes, torch.device("cpu"), is_synced=False)

    @property
    def smaller_crop_px(self) -> tuple[int, int] | None:
        """Height and width of a crop of about three quarters that the network takes; None where it takes no other."""
        if self._fixed_size:
            return None
        height, width = self.config.data.crop_px
        return self._suitable_size(height * 3 // 4, width * 3 // 4)

    def split_on(self, num_devices: int) -> tuple[int, ...]:
        """How the config divides its batch over so many devices.

        Raises:
            ConfigError: it cannot.
        """
        section, batch_size = self.config.parallel, self.config.train.batch_size
        gpu0_bsz = None if section.gpu0_bsz == "auto" else section.gpu0_bsz
        check = check_split(
            batch_size, num_devices, gpu0_bsz, shares=section.shares, smallest_chunk=self.smallest_chunk
        )
        if check.split is None:
            raise ConfigError(f"parallel: {check.reasons[0]}")
        return check.split

    @property
    def smallest_chunk(self) -> int:
        """Samples that every busy device needs where BatchNorm is not synchronised."""
        if self.config.parallel.sync_bn:
            return 1
        return smallest_chunk(self._plain, torch.zeros(2, 3, *self.config.data.crop_px, device="meta"))

    def run(
        self,
        job: SimulationJob,
        devices: Sequence[str] | None = None,
        *,
        granule_bytes: int = CUDA_GRANULE_BYTES,
        is_host_batch: bool = True,
    ) -> SimulationResult:
        """One job: a training step as every later one, then an evaluation.

        Args:
            job: what to simulate.
            devices: other simulated devices than one a part of the split; repetitions are logical devices.
            granule_bytes: what the devices' allocator rounds up to.
            is_host_batch: batches come from the host, as a loader's do; else they lie on device 0.
        """
        devices = devices or [f"{BACKEND}:{i}" for i in range(len(job.split))]
        recorder = Recorder(granule_bytes, CHANGE_IN_PLACE)
        source = self._skeleton(is_synced=job.mode in ("dp", "ddp") and max(job.num_ranks, len(job.split)) > 1)
        stages = self._stages(devices) if job.mode == "model" else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with simulation(recorder):
                model = _placed(source, stages, recorder)
                engine, end_backward = self.build_engine(job, model, devices, stages, recorder, _put(recorder))
                batches = [
                    self.batch(sum(job.split), device="cpu" if is_host_batch else devices[0])
                    for _ in range(min(job.accumulate, 2))
                ]
                first_mark = recorder.num_marks
                run_step(engine, batches, recorder)
                end_backward()
                recorder.mark("idle")
                if job.eval_px is not None and job.loss == "small":
                    recorder.mark(EVAL)
                    self.evaluate_black(engine, job.eval_px)
                    recorder.mark("idle")
        return _result(job, devices, recorder, first_mark)

    def _skeleton(self, is_synced: bool) -> nn.Module:
        """The model as the trainer prepares it, without memory."""
        source: nn.Module = copy.deepcopy(self._plain)
        if is_synced and self.config.parallel.sync_bn:
            source = convert_sync_batchnorm(source)
        return half_except_norm(source) if self.config.train.precision == "fp16" else source

    def _stages(self, devices: Sequence[str]) -> dict[str, str]:
        """`parallel.stages` on simulated devices, or stages balanced by memory as the trainer balances them."""
        wished = self.config.parallel.stages
        if wished:
            order = list(dict.fromkeys(map(str, wished.values())))
            if len(order) > len(devices):
                raise ConfigError(f"parallel.stages names {len(order)} devices and --gpus {len(devices)}: name as many")
            return {name: devices[order.index(str(device))] for name, device in wished.items()}
        recorder = Recorder()
        with simulation(recorder):
            model = _placed(self._plain, {}, recorder)
            outputs = model(torch.empty(2, 3, *self.config.data.crop_px, device=f"{BACKEND}:0"))
            saved = recorder.alive_by_module()
            del outputs
        costs = {
            name: sum(size for part, size in saved.items() if part.partition(".")[0] == name)
            + 2 * sum(p.numel() * p.element_size() for p in part.parameters())
            for name, part in self._plain.named_children()
        }
        order_of_use = list(dict.fromkeys(name for seen in recorder.modules_seen if (name := seen.partition(".")[0])))
        numbers = plan_stages([costs[name] for name in order_of_use], len(devices))
        return {name: devices[number] for name, number in zip(order_of_use, numbers, strict=True)}

    def build_engine(
        self,
        job: SimulationJob,
        model: SegmentationModel,
        devices: Sequence[str],
        stages: Mapping[str, str],
        recorder: Recorder,
        put: Callable[[nn.Module, torch.device], Any] = lambda module, device: copy.deepcopy(module).to(device),
    ) -> tuple[StepEngine, Callable[[], None]]:
        """The engine that the trainer would use, and what is to be called after a step.

        Args:
            job: mode, split and loss.
            model: on its devices.
            devices: simulated or real ones, in the order of the split.
            stages: part of the model -> device, in mode model.
            recorder: is told what the tensors are for.
            put: makes a copy of a module on a device.
        """
        config, device = self.config, torch.device(devices[0])
        precision = Precision(config.train.precision, device)
        normalizer = Normalizer(config.data.mean, config.data.std, precision.input_dtype).to(device)
        inner: Any = model if job.loss in ("small", "full") else Upsampled(model)
        wrapped = NormalizedInput(inner, normalizer, channels_last=config.train.channels_last)
        taught = None
        if self._teacher is not None and job.loss == "small":
            critic = None if self._critic is None else put(self._critic, device)
            teacher = build_teacher(self._teacher, [torch.device(each) for each in devices], precision.input_dtype, put)
            wrapped = taught = build_distilled_input(config, model, normalizer, teacher, critic, device)
        network: nn.Module = wrapped
        if job.mode == "dp":
            options: Any = {"shares": job.split, "mode": "lockstep"}
            if job.loss == "gathered":
                network = BalancedDataParallel(None, wrapped, list(devices), **options)
            else:
                network = DataParallelModel(wrapped, list(devices), **options)
        elif job.mode == "model":
            place_stages(wrapped, {f"model.{name}": where for name, where in stages.items()}, device, device)
        optimizer = build_optimizer(config.optim, build_parameter_groups(config.optim, model, precision))
        recorder.tag(
            (
                p
                for group in optimizer.param_groups
                for p in group["params"]
                if p.dtype == torch.float32 and recorder.kind_of(p) != "weights"
            ),
            "masters",
        )
        buckets = None
        if job.mode == "ddp":
            buckets = Buckets(
                model.parameters(),
                as_views=config.parallel.gradient_as_bucket_view,
                is_lazy="lazy_bucket_allocation" in signature(DistributedDataParallel.__init__).parameters,
                recorder=recorder,
            )
        average = None
        if config.train.ema is not None:
            average = WeightAverage(model, config.train.ema)
            recorder.tag((*average.module.parameters(), *average.module.buffers()), "average")
        task = self._criterion(job.loss)
        engine = StepEngine(
            model,
            network,
            (distilled_criterion(config, task) if taught is not None else task).to(device),
            optimizer,
            precision,
            average=average,
            device=device,
            clip_grad_norm=config.optim.clip_grad_norm,
            distillation=None if taught is None else build_distillation(config, network, taught, device, Ranks()),
        )
        recorder.tag(engine.guard.kept, "buffers")
        optimizers = [optimizer, *([] if engine.critic is None else [engine.critic.optimizer])]
        states = [state for each in optimizers for state in each.state.values()]
        recorder.tag((t for state in states for t in state.values() if isinstance(t, Tensor)), "optimizer")
        return engine, _nothing if buckets is None else buckets.end_backward

    def _criterion(self, style: LossStyle) -> AdditiveCriterion:
        criterion = build_criterion(
            self.config.loss,
            self.scheme.num_classes,
            self.scheme.ignore_index,
            lambda _: [1.0] * self.scheme.num_classes,
        )
        if style != "small":
            for part in criterion.modules():
                if hasattr(part, "implementation"):
                    part.implementation = "reference"  # type: ignore[assignment]
        return criterion

    def batch(self, num_samples: int, size: tuple[int, int] | None = None, *, device: str = "cpu") -> Batch:
        """A batch of nothing, of a crop's size or another."""
        size = size or self.config.data.crop_px
        top = max(self.scheme.num_classes - 1, self.scheme.ignore_index)
        dtype = torch.uint8 if self.scheme.ignore_index >= 0 and top < 256 else torch.int16
        images = torch.zeros(num_samples, 3, *size, dtype=torch.uint8, device=device)
        return Batch(images, torch.zeros(num_samples, *size, dtype=dtype, device=device), tuple(range(num_samples)))

    def evaluate_black(self, engine: StepEngine, size: tuple[int, int]) -> None:
        """An evaluation of two batches of black images.

        Args:
            engine: whose model, or average, is evaluated.
            size: height and width of the images.
        """
        config = self.config
        inference = build_inference(config.data, config.eval, engine.model, engine.precision, config.loss.align_corners)

        def batches() -> Iterator[Batch]:
            for _ in range(2):
                yield self.batch(config.eval.batch_size, size=size)
            raise _Done  # the scores would need numbers

        model = engine.model if engine.average is None else engine.average.module
        try:
            evaluate(
                model,
                batches(),
                EvaluationSettings(
                    inference,
                    self.scheme.num_classes,
                    self.scheme.ignore_index,
                    engine.device,
                    engine.criterion.task,
                ),
            )
        except _Done:
            return


def _put(recorder: Recorder) -> Callable[[nn.Module, torch.device], nn.Module]:
    """What puts copies of modules on simulated devices."""

    def put(module: nn.Module, device: torch.device) -> nn.Module:
        with _disable_current_modes():
            plain = skeleton(copy.deepcopy(module))
        placed = place(plain, lambda _: str(device))
        recorder.tag((*placed.parameters(), *placed.buffers()), "weights")
        return placed

    return put


def _nothing() -> None:
    """There is nothing to be done."""


def run_step(engine: StepEngine, batches: Sequence[Batch], recorder: Recorder) -> None:
    """One step, its phases marked; afterwards the gradients are gone."""
    PhaseMarks(recorder.mark).attach(engine.network, engine.precision)
    engine.network.train()
    recorder.mark("forward")
    engine.step(batches)


def _placed(source: nn.Module, stages: Mapping[str, str], recorder: Recorder) -> Any:
    """The skeleton's parameters on their devices, and followed."""

    def device_of(name: str) -> str:
        holders = [stage for stage in stages if name == stage or name.startswith(f"{stage}.")]
        return stages[max(holders, key=len)] if holders else f"{BACKEND}:0"

    model = place(source, device_of)
    recorder.tag(model.parameters(), "weights")
    recorder.tag(model.buffers(), "buffers")
    for parameter in model.parameters():
        if parameter.requires_grad:
            hook: Any = parameter.register_post_accumulate_grad_hook
            hook(lambda p: recorder.tag([p.grad], "gradients"))
    watch_modules(model, recorder, depth=2)
    return model


def watch_modules(model: nn.Module, recorder: Recorder, depth: int) -> None:
    """Tells the recorder which part of the model is running.

    Args:
        model: its parts get hooks.
        recorder: its `module` is set.
        depth: dots in the names of the parts that are told apart, plus one.
    """
    for name, part in model.named_modules():
        if name and name.count(".") < depth:
            part.register_forward_pre_hook(lambda *_, name=name: recorder.enter(name))
            part.register_forward_hook(lambda *_: recorder.leave())


KIND_OF_PHASE = {"forward": "activations", "backward": "temporaries", "step": "temporaries", EVAL: "evaluation"}
"""What a storage is for that nobody tagged, by the phase it was made in."""


def _result(job: SimulationJob, devices: Sequence[str], recorder: Recorder, first_mark: int) -> SimulationResult:
    peaks = recorder.peaks(first_mark)
    found = [peaks.get(device, {}) for device in devices]
    return SimulationResult(job.split, tuple(phase_peaks(phases) for phases in found))


def phase_peaks(moments: Mapping[str, PeakMoment]) -> dict[str, PhasePeak]:
    """A device's moments by phase, in MiB, without what is no phase of a training."""
    return {phase: _in_mib(moment) for phase, moment in moments.items() if phase in PHASES}


def _in_mib(moment: PeakMoment) -> PhasePeak:
    by_kind: Counter[str] = Counter()
    for kind, num_bytes in moment.by_kind.items():
        by_kind[KIND_OF_PHASE.get(kind, kind)] += num_bytes
    kinds = {kind: round(by_kind[kind] / MIB, 2) for kind in sorted(by_kind)}
    largest = tuple((round(a.num_bytes / MIB, 2), a.what, a.module) for a in moment.largest[:5])
    return PhasePeak(round(moment.num_bytes / MIB, 3), kinds, largest)


def eval_size(config: RunConfig) -> tuple[tuple[int, int], str]:
    """Height and width of the largest image that evaluation meets, and how that is known.

    Images that are on this machine are looked at (their headers); else it is what the data set is known for.
    """
    data = config.data
    if data.resize_px is not None:
        return data.resize_px, "data.resize_px"
    try:
        pairs = build_pairs(data, split_names(data)[1])
        sizes = image_sizes(pairs[:MAX_HEADERS])
    except (DataError, OSError):
        sizes = []
    if sizes:
        return max(sizes, key=lambda size: size[0] * size[1]), f"the largest of {len(sizes)} validation images"
    if data.format in KNOWN_SIZES:
        return KNOWN_SIZES[data.format], f"usual for {data.format}: its images are not here"
    return data.crop_px, "data.crop_px: the images are not here"


def changed(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """The config with some dotted keys replaced."""
    raw = config.model_dump(mode="json")
    for key, value in changes.items():
        section, _, name = key.partition(".")
        raw[section][name] = value
    return validate_config(raw)


def main() -> None:
    """Reads a config and then jobs, one JSON object a line; answers each with one line."""
    config = validate_config(json.loads(sys.stdin.readline()))
    simulators: dict[str, Simulator] = {}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["ask"] == "facts":
                answer: Any = _facts(config, simulators)
            else:
                job = SimulationJob.from_json(request["job"])
                answer = _simulator(config, job.changes, simulators).run(job).to_json()
            reply = {"ok": answer}
        except SegappError as error:
            reply = {"error": str(error), "code": error.exit_code}
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            first = str(error).partition("\n")[0]
            reply = {"error": f"{type(error).__name__}: {first}", "code": 1, "trace": traceback.format_exc()}
        print(json.dumps(reply), flush=True)


def _simulator(config: RunConfig, changes: Mapping[str, Any], simulators: dict[str, Simulator]) -> Simulator:
    key = json.dumps(changes, sort_keys=True)
    if key not in simulators:
        simulators[key] = Simulator(changed(config, changes))
    return simulators[key]


def _facts(config: RunConfig, simulators: dict[str, Simulator]) -> dict[str, Any]:
    simulator = _simulator(config, {}, simulators)
    size, how = eval_size(config)
    return {
        "num_params": simulator.num_params,
        "smallest_chunk": simulator.smallest_chunk,
        "min_train_batch": simulator.min_train_batch,
        "smaller_crop_px": simulator.smaller_crop_px,
        "eval_px": size,
        "eval_px_from": how,
    }


if __name__ == "__main__":
    main()
