"""Simulate a training step and an evaluation of a config with the real model, criterion, optimizer and engine.

The engine is the training's (`StepAssembler`), on a backend whose tensors have no storage. Only DistributedDataParallel
cannot run there; `Buckets` makes its gradient buckets in hooks. Simulations run in separate processes
(`segapp.planning.plan`).
"""

import contextlib
import copy
import functools
import pickle
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from segapp.assembly.devices import build_precision, with_precision
from segapp.assembly.network import largest_phase
from segapp.assembly.own_parts import fp32_part, plain_loss_note
from segapp.assembly.pairs import build_pixels, build_scheme
from segapp.assembly.trained import read_trained
from segapp.chunks import Mode, SplitRequest
from segapp.compat.torch import without_dispatch_modes
from segapp.config import RunConfig, validate_config
from segapp.custom.names import is_component
from segapp.datasets.pool import Batch
from segapp.datasets.preprocessing import Preprocessing
from segapp.errors import RunError, SegappError
from segapp.inference.sliding import NormalizedInput
from segapp.memory.ledger import CUDA_ALLOC_UNIT_BYTES, StorageLedger
from segapp.memory.peaks import EVAL, PHASES, NetworkFacts, PhasePeak, SimulationJob, SimulationResult
from segapp.memory.simulated_devices import BACKEND, Buckets, place, set_up, simulated_ledger, simulation, skeleton
from segapp.models.blocks import find_blocks
from segapp.parallel.batchnorm_guard import no_samples_problem, smallest_chunk
from segapp.parallel.model_parallel import balance_stages, home_of
from segapp.parallel.recompute import is_recomputable
from segapp.planning.trial import blank_batch, evaluate_blank, evaluation_size
from segapp.run.words import first_line
from segapp.training.step.assembler import RealDevices, StepAssembler, StepLayout, StepParts
from segapp.training.step.engine import StepEngine

MIB = 2**20


class SimulatedDevices(RealDevices):
    """The planner's devices, whose tensors have shapes and lifetimes but no values."""

    has_values = False

    def __init__(self, ledger: StorageLedger, stages: Mapping[str, str], *, gradient_as_bucket_view: bool) -> None:
        super().__init__(gradient_as_bucket_view=gradient_as_bucket_view, tag=ledger.tag)
        self._ledger, self._stages = ledger, stages
        self._buckets: Buckets | None = None

    def copy_to(self, module: nn.Module, device: torch.device) -> Any:
        with without_dispatch_modes():
            plain = skeleton(copy.deepcopy(module))
        placed = place(plain, lambda _: str(device))
        self._ledger.tag((*placed.parameters(), *placed.buffers()), "weights")
        return placed

    def stages(self, model: nn.Module, layout: StepLayout, example: Tensor) -> Mapping[str, Any]:
        return self._stages

    def replica_mode(self, devices: Sequence[torch.device]) -> Any:
        """Return "lockstep", because the ledger can track only one replica at a time."""
        return "lockstep"

    def wrap_ddp(self, network: nn.Module, device: torch.device, example: Tensor) -> nn.Module:
        """Return the network itself, with hooks that fill gradient buckets as DDP's reducer does."""
        is_lazy = "lazy_bucket_allocation" in signature(DistributedDataParallel.__init__).parameters
        parameters = (p for p in network.parameters() if p.requires_grad)
        self._buckets = Buckets(parameters, as_views=self._as_views, is_lazy=is_lazy, ledger=self._ledger)
        return network

    def end_backward(self) -> None:
        """Free the buckets, which live as long as the gradients of a step."""
        if self._buckets is not None:
            self._buckets.end_backward()


class Simulator:
    """Simulates the step of a config on any number of devices; the model is built once."""

    def __init__(self, assembler: StepAssembler) -> None:
        self.assembler = assembler
        self._crop_px = assembler.config.data.crop_px
        self._plain: Any = skeleton(assembler.build_model(with_weights=False).train())

    def facts(self, mode: Mode) -> NetworkFacts:
        """Return the facts about the network, its crops and the images of an evaluation on which a plan is based."""
        config, model = self.assembler.config, self._plain
        height, width = self._crop_px
        size, how = evaluation_size(config)
        images = torch.zeros(2, self.assembler.pixels.num_bands, height, width, device="meta")
        is_synced = config.parallel.sync_bn
        return NetworkFacts(
            blocks={
                name: sum(p.numel() for p in block.parameters())
                for name, block in find_blocks(model).items()
                if is_recomputable(block)
            },
            num_params=sum(p.numel() for p in model.parameters()),
            smallest_chunk=1 if is_synced else smallest_chunk(model, images),
            needs_samples=self._needs_samples(images) if mode == "ddp" else None,
            min_train_batch=model.min_train_batch,
            eval_px=size,
            eval_px_from=how,
            precision=config.train.precision,
            fp32_part=fp32_part(config),
            loss_note=plain_loss_note(config, self.assembler.build_criterion(self._equal_weights)),
        )

    def _needs_samples(self, images: Tensor) -> str | None:
        """Return why a rank of ddp cannot be without samples; None if it can."""
        config, layout = self.assembler.config, StepLayout("ddp", (torch.device("meta"),))
        dtype = build_precision(config, torch.device("cpu")).input_dtype
        network = self.assembler.prepare(copy.deepcopy(self._plain), layout)
        inner = NormalizedInput(network, Preprocessing(build_pixels(config.data), dtype).to("meta"))
        return no_samples_problem(inner, images)

    def run(
        self,
        job: SimulationJob,
        devices: Sequence[str] | None = None,
        *,
        alloc_unit_bytes: int = CUDA_ALLOC_UNIT_BYTES,
        is_host_batch: bool = True,
    ) -> SimulationResult:
        """Simulate one job: a training step like every later one, then an evaluation.

        By default there is one simulated device per part of the split; repeated names are logical devices. Batches come
        from the host, like a loader's, or are on device 0.
        """
        devices = devices or [f"{BACKEND}:{i}" for i in range(len(job.split))]
        ledger = simulated_ledger(alloc_unit_bytes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with self.prepared(job, devices, ledger) as (engine, backend):
                workspaces = self._blas_workspaces(job, devices)
                ledger.tag(workspaces, "workspaces")
                batches = [
                    self.batch(sum(job.split), device="cpu" if is_host_batch else devices[0])
                    for _ in range(min(job.accumulate, 2))
                ]
                if is_component(self.assembler.config.optim.name):  # its first step allocates its state
                    run_step(engine, batches, ledger)
                    backend.end_backward()
                    ledger.mark("idle")
                first_mark = ledger.num_marks
                run_step(engine, batches, ledger)
                backend.end_backward()
                ledger.mark("idle")
                if job.eval_px is not None:
                    ledger.mark(EVAL)
                    evaluate_blank(engine, self.assembler.config, self.assembler.scheme, job.eval_px)
                    ledger.mark("idle")
        peaks = ledger.peaks(first_mark)
        devices_peaks = tuple(
            {phase: _phase_peak(by_kind) for phase, by_kind in peaks.get(device, {}).items() if phase in PHASES}
            for device in devices
        )
        return SimulationResult(devices_peaks)

    def _blas_workspaces(self, job: SimulationJob, devices: Sequence[str]) -> list[Tensor]:
        """Return cuBLAS's workspaces: one for the thread of the forward pass, one for autograd's.

        In dp, an evaluation has threads of its own.
        """
        num_bytes = int(job.blas_mib * MIB)
        names = (name for name in devices for _ in range(3 if job.mode == "dp" else 2) if num_bytes)
        return [torch.empty(num_bytes, dtype=torch.uint8, device=name) for name in names]

    @contextlib.contextmanager
    def prepared(
        self, job: SimulationJob, devices: Sequence[str], ledger: StorageLedger
    ) -> Iterator[tuple[StepEngine, SimulatedDevices]]:
        """Enter a simulation with the engine of a job, assembled as in training."""
        assembler = self.assembler
        set_up()  # torch knows the devices by name from here on
        layout = StepLayout(
            job.mode,
            tuple(torch.device(device) for device in devices),
            SplitRequest(shares=job.split if job.mode == "dp" else None),
            job.recompute,
        )
        source = assembler.prepare(copy.deepcopy(self._plain), layout)
        stages = self._stages(source, devices) if job.mode == "model" else {}
        critic = assembler.build_critic(layout, torch.device("cpu"))
        criterion = assembler.build_criterion(self._equal_weights)
        as_views = assembler.config.parallel.gradient_as_bucket_view
        backend = SimulatedDevices(ledger, stages, gradient_as_bucket_view=as_views)
        with simulation(ledger):
            placed = None if critic is None else backend.copy_to(critic, layout.devices[0])
            parts = StepParts(_placed(source, stages, ledger), criterion, placed)
            yield assembler.assemble(parts, layout, backend, mark=ledger.mark), backend

    def batch(self, num_samples: int, *, device: str = "cpu") -> Batch:
        scheme, pixels = self.assembler.scheme, self.assembler.pixels
        return blank_batch(scheme, num_samples, self._crop_px, pixels, device=device)

    def _equal_weights(self, _rule: str) -> list[float]:
        return [1.0] * self.assembler.scheme.num_classes

    def _stages(self, source: nn.Module, devices: Sequence[str]) -> dict[str, str]:
        dtype = build_precision(self.assembler.config, torch.device("cpu")).input_dtype
        example = torch.empty(2, self.assembler.pixels.num_bands, *self._crop_px, dtype=dtype, device="meta")
        balanced = balance_stages(source, devices, example)
        return {name: str(device) for name, device in balanced.items()}


def build_simulator(config: RunConfig) -> Simulator:
    config = with_precision(largest_phase(config), ())
    teacher = None if config.distill is None else read_trained(config.distill.teacher)
    return Simulator(StepAssembler(config, build_scheme(config.data), teacher))


def run_step(engine: StepEngine, batches: Sequence[Batch], ledger: StorageLedger) -> None:
    """Run one step of an engine whose `mark` is the ledger's; it leaves no gradients."""
    engine.network.module.train()
    ledger.mark("forward")
    engine.step(batches)


def _placed(source: nn.Module, stages: Mapping[str, str], ledger: StorageLedger) -> Any:
    """Return a copy of the skeleton on its devices, tracked by the ledger."""
    model = place(source, lambda name: home_of(name, stages, f"{BACKEND}:0"))
    ledger.tag(model.parameters(), "weights")
    ledger.tag(model.buffers(), "buffers")
    for parameter in model.parameters():
        if parameter.requires_grad:
            hook: Any = parameter.register_post_accumulate_grad_hook
            hook(lambda p: ledger.tag([p.grad], "gradients"))
    for name, part in model.named_modules():
        if name and name.count(".") < 2:  # the ledger needs to know that a module runs, not which one within it
            part.register_forward_pre_hook(lambda *_, name=name: ledger.modules.append(name))
            part.register_forward_hook(lambda *_: ledger.modules.pop() and None)
    return model


_KIND_OF_PHASE = {"forward": "activations", "backward": "temporaries", "step": "temporaries", EVAL: "evaluation"}
"""Kind of a storage without a tag, by the phase in which it was created."""


def _phase_peak(num_bytes: Mapping[str, int]) -> PhasePeak:
    """Return a peak in MiB, from kind -> bytes of a ledger."""
    by_kind = Counter[str]()
    for kind, amount in num_bytes.items():
        by_kind[_KIND_OF_PHASE.get(kind, kind)] += amount
    kinds = {kind: round(by_kind[kind] / MIB, 2) for kind in sorted(by_kind)}
    return PhasePeak(round(by_kind.total() / MIB, 3), kinds)


def main() -> None:
    """Read a pickled config and then requests; answer each with its result or its error, and print nothing else."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.redirect_stdout(sys.stderr):  # custom components may print
        config = validate_config(pickle.load(requests))
        simulator = functools.cache(lambda: build_simulator(config))
        with contextlib.suppress(EOFError):
            while True:
                pickle.dump(_answer(pickle.load(requests), simulator), answers)
                answers.flush()


def _answer(request: Mode | SimulationJob, simulator: Callable[[], Simulator]) -> Any:
    try:
        if isinstance(request, SimulationJob):
            return simulator().run(request)
        return simulator().facts(request)
    except SegappError as error:
        return error
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        return RunError(f"{type(error).__name__}: {first_line(error)}")


if __name__ == "__main__":
    main()
