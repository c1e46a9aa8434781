"""One process per device: ranks on one or several machines, with the loss of a single device.

The exact loss of a step is `finalize(allreduce(*statistics))`, which is the same scalar on every rank. The derivative
of a sum over ranks is the sum of the ranks' gradients. So the *mean* over ranks of the parameters' gradients, which
`DistributedDataParallel` and `all_reduce_gradients` compute, is the gradient of that scalar. The mean of the ranks' own
means is not. With accumulation, a rank scales its own sum instead: `world_size * loss_sum / total_weight`, where the
weight is summed over all micro-batches of all ranks.
"""

import atexit
import contextlib
import gc
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from inspect import signature
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from segapp.compat.torch import set_group_timeout
from segapp.parallel.launch import STORE_VARIABLE, die_with_parent, signal_children
from segapp.parallel.meeting import (
    MeetingError,
    hosted_store,
    is_here,
    joined_store,
    listening_address,
    local_address,
    resolved,
)
from segapp.parallel.reductions import layers_group, use_layers_group
from segapp.parallel.replicas import check_parameters
from segapp.parallel.scatter_gather import DeviceLike, buckets, resolve_devices
from segapp.parallel.sync_batchnorm import plain_batchnorms

JOIN_S = 600.0
"""Maximum time to wait for the other ranks."""
_LOOK_S = 0.2
"""Seconds between two looks for missing ranks."""
_BUCKET_BYTES = 25 * 2**20  # the size of DDP's buckets
_LAUNCH = "start the program with `torchrun --nproc-per-node N ...`, or let segapp start the ranks itself"


class DistributedSetupError(RuntimeError):
    """The process group cannot be set up because of a variable, an address or a device."""


@dataclass(frozen=True)
class RankInfo:
    """Rank of this process.

    Attributes:
        rank: 0 to world_size - 1, over all machines.
        local_rank: rank on this machine, from 0.
        backend: "nccl" or "gloo".
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    start_timeout_s: float = JOIN_S


def is_launched(environ: Mapping[str, str] | None = None) -> bool:
    """Return True if torchrun or a similar launcher started this process as a rank, by the environment variables."""
    environ = os.environ if environ is None else environ
    return "RANK" in environ and "WORLD_SIZE" in environ


def init_from_env(
    *,
    device: DeviceLike | None = None,
    backend: str | None = None,
    start_timeout_s: float = JOIN_S,
    note: Callable[[str], None] = lambda _: None,
) -> RankInfo:
    """Join the process group of the ranks, and end this process when its launcher dies.

    Args:
        device: the device of this rank; by default CUDA device LOCAL_RANK, or the CPU if there is none.
        backend: "nccl" or "gloo"; by default nccl on CUDA, which refuses two ranks on one GPU.
        start_timeout_s: seconds to wait for the other ranks, whose imports, caches and compilers differ by minutes, and
            for any exchange until `Ranks.tighten_timeout`.
        note: called with the reason while this rank still waits.

    Raises:
        DistributedSetupError: a variable is missing or wrong, the device does not exist, or the other ranks did not
            join in time.
    """
    rank, world_size, local_rank = read_rank(os.environ)
    rank_device = _rank_device(local_rank, device)
    chosen = backend or ("nccl" if rank_device.type == "cuda" and dist.is_nccl_available() else "gloo")
    die_with_parent()
    if rank_device.type == "cuda":
        torch.cuda.set_device(rank_device)
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")  # two groups work on one GPU
    store, address = None, f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        if file := os.environ.get(STORE_VARIABLE):
            store, address = dist.FileStore(file), file  # type: ignore[attr-defined]  # documented, but not in __all__
            store.set_timeout(timedelta(seconds=start_timeout_s))
        elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # torchrun's agents share theirs
            store = _meeting_store(rank, world_size, start_timeout_s, note)
        dist.init_process_group(
            chosen,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=start_timeout_s),
            device_id=rank_device if chosen == "nccl" else None,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        reason = str(error) if isinstance(error, MeetingError) else f"{type(error).__name__}: {error}"
        raise DistributedSetupError(
            f"rank {rank} of {world_size} could not join the others at {address} within {start_timeout_s:g} s"
            f" ({reason}): check that every rank runs and reaches that address"
        ) from error
    if chosen == "nccl" and world_size > 1:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        group = dist.new_group(timeout=timedelta(seconds=start_timeout_s), pg_options=options)
        use_layers_group(cast(dist.ProcessGroup, group))
    return RankInfo(rank, world_size, local_rank, rank_device, chosen, start_timeout_s)


def _meeting_store(rank: int, world_size: int, limit_s: float, note: Callable[[str], None]) -> Any:
    """Return the store of the ranks once all of them are there: rank 0 makes it, on one address if it can.

    Raises:
        MeetingError: rank 0 cannot make it, or another rank does not come in time.
    """
    host, port, deadline_s = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), time.monotonic() + limit_s
    store: Any = None
    if rank == 0:
        store = hosted_store(address := _address_to_listen_on(host, port), port, limit_s)
        if store is None:
            raise MeetingError(f"port {port} is in use at {address}: set MASTER_PORT to a free one")
    else:
        store = joined_store(host, port, limit_s=limit_s, read_s=limit_s, note=note)
    # Each rank signs in, so that a long wait can name the missing ones.
    store.set(f"rank/{rank}", "")
    unknown = "" if rank or is_here(host) or resolved(host) else f"{host} is no known host name; "
    while missing := [other for other in range(world_size) if not store.check([f"rank/{other}"])]:
        shown = f"{', '.join(map(str, missing[:8]))}{', ...' if len(missing) > 8 else ''}"
        note(line := f"{unknown}missing: {'rank' if len(missing) == 1 else 'ranks'} {shown}")
        if time.monotonic() > deadline_s:
            raise MeetingError(line)
        time.sleep(_LOOK_S)
    return store


def _address_to_listen_on(host: str, port: int) -> str:
    """Return the address of this machine at which rank 0 is expected; all of them if it has no such name."""
    with contextlib.suppress(ValueError):
        if is_here(host):
            return listening_address(host, local_address(host, port))
    found = resolved(host)
    return "::" if found and all(":" in address for address in found) else "0.0.0.0"


def shutdown() -> None:
    """Leave the process group, if there is one, so that the process can end cleanly."""
    if not dist.is_initialized():
        return
    use_layers_group(None)
    dist.destroy_process_group()
    # gloo's worker threads release the last exchange's tensors after it is done, and need the interpreter for this; if
    # the interpreter is shutting down then, the process aborts. Collecting the group joins the threads; if something
    # still refers to the group, the sleep gives them time.
    gc.collect()
    time.sleep(0.1)


def abandon(exit_code: int) -> None:
    """Let this process end with a status, without leaving the process group, after a failure only on this rank.

    Destroying an NCCL group waits for its operations, which wait for the other ranks, which wait for this one.
    """
    atexit.register(_end_now, exit_code)


def _end_now(exit_code: int) -> None:
    """End this process and its children immediately."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    signal_children(signal.SIGKILL)
    os._exit(exit_code)


def read_rank(environ: Mapping[str, str]) -> tuple[int, int, int]:
    """Return rank, world size and local rank; raise DistributedSetupError if a variable is missing or wrong."""
    meeting = () if environ.get(STORE_VARIABLE) else ("MASTER_ADDR", "MASTER_PORT")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", *meeting)
    if environ.get("WORLD_SIZE") == "1" or torch.cuda.device_count() == 1:
        environ = {"LOCAL_RANK": "0", **environ}  # a container with one GPU needs no number for it
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise DistributedSetupError(f"{', '.join(missing)} not set in the environment: {_LAUNCH}")
    for name in (name for name in (*names, "LOCAL_WORLD_SIZE") if name != "MASTER_ADDR" and environ.get(name)):
        if not environ[name].isdecimal():
            raise DistributedSetupError(f"{name}={environ[name]!r} is not a number: {_LAUNCH}")
    rank, world_size, local_rank = (int(environ[name]) for name in names[:3])
    if rank >= world_size:
        raise DistributedSetupError(f"RANK={rank} does not fit WORLD_SIZE={world_size}: ranks count from 0: {_LAUNCH}")
    return rank, world_size, local_rank


def _rank_device(local_rank: int, device: DeviceLike | None) -> torch.device:
    count = torch.cuda.device_count()
    if device is None and count and local_rank >= count:
        raise DistributedSetupError(
            f"LOCAL_RANK={local_rank} has no device of its own: {count} CUDA devices are visible: use"
            f" --nproc-per-node {count}, or name the device"
        )
    wanted: DeviceLike = device if device is not None else (local_rank if count else "cpu")
    try:
        return resolve_devices([wanted])[0]
    except ValueError as error:
        raise DistributedSetupError(f"rank device: {error}") from error


def wrap_ddp(
    module: nn.Module,
    device: torch.device | None = None,
    *,
    gradient_as_bucket_view: bool = True,
    lazy_bucket_allocation: bool = True,
    find_unused_parameters: bool = False,
    bucket_cap_mb: float | None = None,
) -> DistributedDataParallel:
    """Return the module in `DistributedDataParallel`, with the memory-saving options that this torch supports.

    `gradient_as_bucket_view` saves a copy of the gradients; `lazy_bucket_allocation` delays the buckets' memory until
    the first backward pass. The memory, in parameter sizes, is 1 after wrapping and 2 in the backward pass, instead of
    2 and 3.

    Do not wrap a module whose gradients come from `torch.autograd.grad(create_graph=True)`, such as a critic with a
    gradient penalty: a parameter without gradient silently leaves its bucket unreduced. Use the bare module and
    `all_reduce_gradients`.

    The device is None on the CPU; the other options are parameters of `DistributedDataParallel`.
    """
    # The running statistics of plain BatchNorm differ between ranks: copy rank 0's buffers in every forward pass.
    sync_buffers = bool(plain_batchnorms(module))
    known = signature(DistributedDataParallel.__init__).parameters
    chosen: dict[str, Any] = {}
    if "lazy_bucket_allocation" in known:
        chosen["lazy_bucket_allocation"] = lazy_bucket_allocation
    chosen["forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"] = sync_buffers
    return DistributedDataParallel(
        module,
        device_ids=[device] if device is not None and device.type == "cuda" else None,
        gradient_as_bucket_view=gradient_as_bucket_view,
        find_unused_parameters=find_unused_parameters,
        bucket_cap_mb=bucket_cap_mb,
        **chosen,
    )


@torch.no_grad()
def all_reduce_gradients(parameters: Iterable[Tensor], *, average: bool = True) -> None:
    """Replace every rank's gradients by their mean (or sum) over all ranks, in place; every rank must call it.

    Use it for modules that cannot be wrapped in `DistributedDataParallel`; see `wrap_ddp`. A gradient that exists only
    on some ranks counts as 0 on the others; one that exists on none stays None.

    Args:
        parameters: the same parameters in the same order on every rank; frozen ones are skipped.
        average: divide by the number of ranks, for losses `finalize(allreduce(*statistics))`; False for a loss that
            each rank has already divided by the global count.

    Raises:
        TypeError: a module or a single tensor instead of parameters.
    """
    active = [parameter for parameter in check_parameters(parameters) if parameter.requires_grad]
    if not active or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    # Ranks may lack different gradients, but must add the same ones in the same order.
    has_grad = torch.tensor([p.grad is not None for p in active], dtype=torch.int32, device=active[0].device)
    dist.all_reduce(has_grad)
    grads = []
    for parameter, count in zip(active, has_grad.tolist(), strict=True):
        if count:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            grads.append(parameter.grad)
    for indices in buckets(grads, _BUCKET_BYTES):
        bucket = [grads[i] for i in indices]
        flat = torch.cat([grad.reshape(-1) for grad in bucket])
        dist.all_reduce(flat)
        if average:
            flat /= dist.get_world_size()
        for grad, part in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):  # type: ignore[no-untyped-call]
            grad.copy_(part.view(grad.shape))


class PeerOutOfMemoryError(torch.OutOfMemoryError):
    """Another rank ran out of memory; raised on every rank, so that all ranks handle it in the same way."""


class Ranks:
    """This process's rank, and collective operations on Python values and tensors.

    Every method except `is_main` is collective: all ranks must call it. Python values use gloo on the host, so they
    never wait for a GPU; with one rank, nothing is sent. They come from a socket, so they are read as tensors and plain
    values (`torch.load` with `weights_only`), and never unpickled.

    Args:
        info: result of `init_from_env`; None for a single process.
        step_timeout_s: timeout of the exchanges from `tighten_timeout` on.
        classes: further classes that the values may contain.
    """

    def __init__(
        self, info: RankInfo | None = None, *, step_timeout_s: float = 120.0, classes: Iterable[Any] = ()
    ) -> None:
        self._step_timeout_s, self._classes = step_timeout_s, [*classes]
        self.rank = 0 if info is None else info.rank
        self.world_size = 1 if info is None else info.world_size
        self._host_group: Any = None  # the default group
        if info is not None and info.world_size > 1 and info.backend != "gloo":
            self._host_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=info.start_timeout_s))

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes what is written once."""
        return self.rank == 0

    def tighten_timeout(self) -> None:
        """Set the timeout of all exchanges, once the first step has been made; it is a barrier."""
        if self.world_size > 1:
            dist.barrier()
            for group in {None, layers_group(), self._host_group}:
                set_group_timeout(timedelta(seconds=self._step_timeout_s), group)

    def any_of(self, *flags: bool) -> tuple[bool, ...]:
        """Return, for each flag, True if any rank sets it; one exchange."""
        if self.world_size == 1:
            return flags
        counts = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(counts, group=self._host_group)
        return tuple(bool(count) for count in counts.tolist())

    def from_main(self, value: Any) -> Any:
        """Return the main rank's value, on every rank."""
        return self.gather(value if self.is_main else None)[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        buffer = io.BytesIO()
        torch.save(value, buffer)
        payload = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([payload.numel()]), group=self._host_group)
        longest = int(max(sizes))
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(parts, nn.functional.pad(payload, (0, longest - payload.numel())), group=self._host_group)
        files = [io.BytesIO(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]
        with torch.serialization.safe_globals(self._classes):
            return [torch.load(file, weights_only=True) for file in files]

    def first_of(self, value: Any) -> Any:
        """Return the value of the first rank whose value is not None, on every rank; None if there is none."""
        return next((other for other in self.gather(value) if other is not None), None)

    @torch.no_grad()
    def sums(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the sums of the ranks' tensors, without gradient, in one exchange; they are added in float64."""
        if self.world_size == 1:
            return tensors
        flat = torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])
        dist.all_reduce(flat)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        return tuple(part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True))
