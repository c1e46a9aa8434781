"""Every failure while data are loaded is raised as one error that names the file; none hangs."""

import contextlib
import errno
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from segapp.datasets.augment import TrainTransform
from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.files import ImagePair
from segapp.datasets.layouts.formats import class_scheme
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.loader import EvalLoader, TrainLoader
from segapp.datasets.own_data import OwnData
from segapp.datasets.pool import BatchPool, LoadOptions
from segapp.datasets.resources import ThreadPool
from segapp.datasets.sampling import SampleKey, sample_order
from segapp.errors import DataError, WorkerError
from segapp.parallel.launch import signal_when_parent_dies
from tests.support.drawn_data import draw_mask
from tests.support.fault_table import case

WritePairs = Callable[..., tuple[ImagePair, ...]]


class Misbehaving:
    """A transform that calls a function for images of one width."""

    crop_px = (8, 8)

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def __call__(
        self, image: np.ndarray, mask: np.ndarray, seed: int, aim: object = None
    ) -> tuple[np.ndarray, np.ndarray]:
        if image.shape[1] == 41:
            self.act()
        return image[:8, :8].copy(), mask[:8, :8].copy()


@pytest.fixture
def misbehave(write_pairs: WritePairs, scheme: ClassScheme) -> Callable[[Callable[[], object]], SegmentationDataset]:
    pairs = write_pairs([(20, 40), (20, 40), (20, 40), (20, 41), (20, 40), (20, 40), (20, 40), (20, 40)])
    return lambda act: SegmentationDataset(pairs, scheme, Misbehaving(act))


def consume(dataset: SegmentationDataset, workers: int, **options: Any) -> Exception:
    """Return the error that ends an epoch, and check that no worker is left."""
    loader = TrainLoader(dataset, 2, options=LoadOptions(workers, **options))
    with pytest.raises((DataError, WorkerError)) as error:
        list(loader.epoch(0))
    assert_no_children()
    return error.value


def children() -> set[str]:
    """Return the process ids of this process's children, zombies included."""
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found.update((task / "children").read_text().split())
    return found


BEFORE: set[str] = set()


@pytest.fixture(autouse=True)
def _remember_children() -> None:
    """Other tests may have left a process that a library keeps."""
    BEFORE.clear()
    BEFORE.update(children())


def assert_no_children() -> None:
    """Check that no worker process is left."""
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        if children() <= BEFORE:
            return
        time.sleep(0.02)
    raise AssertionError("a worker process is left")


def raise_local_error() -> None:
    class LocalError(Exception):
        """A local class, which cannot be pickled."""

        def __init__(self, one: int, two: int) -> None:
            super().__init__("local")
            self.unpicklable = lambda: None

    raise LocalError(1, 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_file_is_named_without_a_traceback(workers: int, misbehave: Callable[..., SegmentationDataset]) -> None:
    dataset = misbehave(lambda: None)
    path = dataset.pairs[5].image
    path.write_bytes(path.read_bytes()[:200])
    error = consume(dataset, workers)
    assert isinstance(error, DataError)
    assert str(error).startswith(f"{path}: cannot be decoded (truncated PNG")
    assert "Traceback" not in str(error)
    assert "\n" not in str(error)
    assert "Traceback" in error.__notes__[0]  # for the log
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("workers", [0, 2])
def test_mask_of_another_size_is_named(workers: int, misbehave: Callable[..., SegmentationDataset]) -> None:
    dataset = misbehave(lambda: None)
    Image.fromarray(draw_mask(0, 20, 39)).save(dataset.pairs[2].mask)
    message = str(consume(dataset, workers))
    assert "002_mask.png: the mask has 39x20 pixels, its image" in message
    assert "002.png has 40x20" in message


@pytest.mark.parametrize("workers", [0, 2])
def test_ids_outside_the_classes_are_named_by_the_loader(
    workers: int, misbehave: Callable[..., SegmentationDataset]
) -> None:
    dataset = misbehave(lambda: None)
    Image.fromarray(np.full((20, 40), 5, np.uint8)).save(dataset.pairs[6].mask)
    assert "006_mask.png: the mask holds ids outside the 5 classes: 5 (800 px)" in str(consume(dataset, workers))


@pytest.mark.parametrize("is_ours", [True, False])
def test_worker_prints_no_traceback_for_a_trainer_that_left(
    is_ours: bool,
    misbehave: Callable[..., SegmentationDataset],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not is_ours:
        monkeypatch.setattr("segapp.datasets.pool._report_unless_trainer_left", sys.__excepthook__)
    dataset = misbehave(lambda: None)
    folder = Path(get_temp_dir())  # of this process and its workers
    before, num_asked = set(folder.glob("listener-*")), 0
    for batch in TrainLoader(dataset, 1, options=LoadOptions(2)).epoch(0):
        assert batch is not None
        for path in set(folder.glob("listener-*")) - before if num_asked < 2 else ():
            with socket.socket(socket.AF_UNIX) as trainer:  # one that asks for a batch and is killed
                trainer.connect(str(path))
            num_asked += 1
    assert num_asked >= 2
    assert_no_children()
    assert ("Traceback" in capfd.readouterr().err) == (not is_ours)


@case("F40", how="an item raises an exception that cannot be pickled", passes="exit 3 naming the item, no hang")
@pytest.mark.parametrize("workers", [0, 2])
def test_unpicklable_worker_error_is_reported(workers: int, misbehave: Callable[..., SegmentationDataset]) -> None:
    error = consume(misbehave(raise_local_error), workers)
    assert isinstance(error, DataError)
    assert re.search(
        r"003\.png: the augmentation failed with LocalError: local \(.*test_loader_failures\.py, line \d+\)", str(error)
    )


@case("F40", how="an item leaves the worker", passes="an error that names the file, no hang")
@pytest.mark.parametrize("exception", [SystemExit(3), KeyboardInterrupt(), MemoryError("no memory")])
def test_worker_exit_is_an_error_naming_the_file(
    exception: BaseException, misbehave: Callable[..., SegmentationDataset]
) -> None:
    def leave() -> None:
        raise exception

    message = str(consume(misbehave(leave), 2))
    assert "003.png: " in message
    assert type(exception).__name__ in message


def test_killed_worker_is_reported_with_its_file(misbehave: Callable[..., SegmentationDataset]) -> None:
    start = time.monotonic()
    error = consume(misbehave(lambda: os.kill(os.getpid(), signal.SIGKILL)), 2)
    assert isinstance(error, WorkerError)
    assert error.exit_code == 7
    assert "ended by SIGKILL while reading" in str(error)
    assert "003.png" in str(error)
    assert time.monotonic() - start < 10


def test_worker_killed_while_sending_is_reported(
    misbehave: Callable[..., SegmentationDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch is read through a connection to its worker, which is reset if the worker dies before that."""
    killed = []

    def reset(iterator: Any) -> Any:
        killed.append(iterator._workers[0].pid)
        os.kill(killed[-1], signal.SIGKILL)
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    monkeypatch.setattr(torch.utils.data.dataloader._MultiProcessingDataLoaderIter, "_next_data", reset)
    error = consume(misbehave(lambda: None), 2)
    assert isinstance(error, WorkerError)
    assert f"data worker 0 (process {killed[0]}) ended by SIGKILL" in str(error)


@pytest.mark.timeout(60)
def test_worker_killed_with_a_lock_of_torch_is_reported(
    misbehave: Callable[..., SegmentationDataset],
) -> None:
    """Workers look at torch's event between two batches, and the trainer sets it: each takes its lock."""

    def die() -> None:
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_name != "_worker_loop":
            frame = frame.f_back
        assert frame is not None
        assert frame.f_locals["done_event"]._cond.acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    start = time.monotonic()
    error = consume(misbehave(die), 2)
    assert isinstance(error, WorkerError)
    assert "ended by SIGKILL while reading" in str(error)
    assert "003.png" in str(error)
    assert time.monotonic() - start < 20


def test_hanging_worker_is_reported_with_its_file(misbehave: Callable[..., SegmentationDataset]) -> None:
    start = time.monotonic()
    error = consume(misbehave(lambda: time.sleep(600)), 2, timeout_s=2)
    assert isinstance(error, WorkerError)
    assert "no batch arrived from the data workers for 2 s, at " in str(error)
    assert "003.png" in str(error)
    assert 2 <= time.monotonic() - start < 12


def test_hanging_start_of_workers_names_the_first_image(misbehave: Callable[..., SegmentationDataset]) -> None:
    pool = BatchPool(misbehave(lambda: None), LoadOptions(2, 5.0), 4)
    error = pool._timeout_error([SampleKey(0, 6), SampleKey(0, 7)])
    assert re.search(r"no batch arrived from the data workers for 5 s, at \S+006\.png: check", str(error))


def test_slow_worker_within_timeout_succeeds(misbehave: Callable[..., SegmentationDataset]) -> None:
    for timeout_s in (30.0, 0.0):
        loader = TrainLoader(misbehave(lambda: time.sleep(1.5)), 2, options=LoadOptions(2, timeout_s))
        assert len(list(loader.epoch(0))) == 4
        loader.close()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="lists threads by /proc")
def test_no_thread_that_read_is_left_where_workers_are_forked() -> None:
    """A thread that ends frees OpenCV's data of it under a lock, which a worker forked in that moment never gets."""
    ids: set[int] = set()
    mask = np.zeros((300, 80), np.uint8)

    def count(_: int) -> None:
        ids.add(threading.get_native_id())
        cv2.calcHist([mask], [0], None, [256], [0, 256])

    for _ in range(60):
        with ThreadPool(4) as pool:
            list(pool.map(count, range(8)))
        assert not [number for number in ids if Path(f"/proc/self/task/{number}").exists()]
    assert len(ids) >= 60


def test_stopped_worker_does_not_block_shutdown(misbehave: Callable[..., SegmentationDataset]) -> None:
    start = time.monotonic()
    error = consume(misbehave(lambda: os.kill(os.getpid(), signal.SIGSTOP)), 1, timeout_s=1)
    assert isinstance(error, WorkerError)
    assert time.monotonic() - start < 15


def test_loader_works_again_after_an_error(misbehave: Callable[..., SegmentationDataset]) -> None:
    acts = [True]
    dataset = misbehave(lambda: os.kill(os.getpid(), signal.SIGKILL) if acts else None)
    loader = TrainLoader(dataset, 2, options=LoadOptions(2))
    with pytest.raises(WorkerError):
        list(loader.epoch(0))
    acts.clear()
    assert sorted(index for batch in loader.epoch(0) for index in batch.indices) == list(range(8))
    loader.close()


def test_evaluation_loader_reports_errors_alike(misbehave: Callable[..., SegmentationDataset]) -> None:
    dataset = misbehave(raise_local_error)
    for workers in (0, 2):
        loader = EvalLoader(dataset, options=LoadOptions(workers))
        with pytest.raises(DataError, match=r"003\.png"):
            list(loader)
    assert_no_children()


@case("F43", how="shared memory refused", passes="says /dev/shm")
def test_full_shared_memory_is_explained(
    misbehave: Callable[..., SegmentationDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def full(self: object) -> None:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(torch.UntypedStorage, "share_memory_", full)
    error = consume(misbehave(lambda: None), 1)
    assert isinstance(error, WorkerError)
    assert "/dev/shm" in str(error)


# --- signals


def test_workers_ignore_ctrl_c_and_end_on_sigterm(misbehave: Callable[..., SegmentationDataset]) -> None:
    dispositions = []

    def note() -> None:
        dispositions.append(1)
        wanted = (signal.SIG_IGN, signal.SIG_DFL)
        if (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) != wanted:
            raise ValueError("wrong handlers")

    before = signal.signal(signal.SIGTERM, lambda *_: None)  # handlers of the trainer must not be inherited by workers
    try:
        loader = TrainLoader(misbehave(note), 2, options=LoadOptions(2))
        assert len(list(loader.epoch(0))) == 4
        loader.close()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_dying_worker_raises_only_in_the_loader(misbehave: Callable[..., SegmentationDataset]) -> None:
    """torch's SIGCHLD handler raises in the main thread, even while a checkpoint is written."""
    before = signal.getsignal(signal.SIGCHLD)
    dataset = misbehave(lambda: os.kill(os.getpid(), signal.SIGKILL))
    seed = next(seed for seed in range(99) if sample_order(8, seed, 0).index(3) in {4, 5})
    batches = TrainLoader(dataset, 2, options=LoadOptions(1), seed=seed).epoch(0)
    next(batches)
    assert signal.getsignal(signal.SIGCHLD) == before
    for _ in range(40):
        time.sleep(0.05)
    with pytest.raises(WorkerError):
        list(batches)


def test_hanging_workers_end_with_a_killed_trainer(misbehave: Callable[..., SegmentationDataset]) -> None:
    """torch's workers look after their parent only between two samples; one that hangs in a sample would stay."""
    reading, writing = os.pipe()

    def hang() -> None:
        os.write(writing, f"{os.getpid()}\n".encode())
        time.sleep(60)

    dataset = misbehave(hang)
    trainer = os.fork()
    if trainer == 0:
        with contextlib.suppress(BaseException):
            list(TrainLoader(dataset, 2, options=LoadOptions(2)).epoch(0))
        os._exit(1)
    os.read(reading, 1)  # one hangs; the other may still be starting
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)
    os.close(writing)
    assert _text_until_closed(reading) is not None, "a worker outlived its trainer"


def test_worker_whose_trainer_died_while_it_started_ends() -> None:
    reading, writing = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        trainer = os.getpid()
        if os.fork() == 0:
            while os.getppid() == trainer:
                time.sleep(0.01)
            signal_when_parent_dies(signal.SIGKILL, parent=trainer)
            os.write(writing, b"it lives")
        os._exit(0)
    os.waitpid(trainer, 0)
    os.close(writing)
    assert _text_until_closed(reading) == b""


def _text_until_closed(reading: int, within_s: float = 20.0) -> bytes | None:
    """Return what comes out of a pipe until no process holds its other end; None if one still does."""
    deadline, text = time.monotonic() + within_s, b""
    os.set_blocking(reading, False)
    with open(reading, "rb", buffering=0) as pipe:
        while (part := pipe.read(100)) != b"" and time.monotonic() < deadline:
            text += part or b""
            time.sleep(0.01)
    return text if part == b"" else None


def test_workers_use_one_thread(write_pairs: WritePairs, scheme: ClassScheme) -> None:
    import cv2
    import torch

    def check() -> None:
        if (torch.get_num_threads(), cv2.getNumThreads()) != (1, 1):
            raise ValueError(f"threads: {torch.get_num_threads()}, {cv2.getNumThreads()}")

    dataset = SegmentationDataset(write_pairs([(20, 41)] * 4), scheme, Misbehaving(check))
    loader = TrainLoader(dataset, 2, options=LoadOptions(2))
    assert len(list(loader.epoch(0))) == 2
    loader.close()


@case(
    "F42", how="8 and 50 starts and stops of workers that use OpenCV", passes="no hang, no process, no descriptor left"
)
@pytest.mark.parametrize("times", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_repeated_starts_leave_no_process_or_descriptor(
    write_pairs: WritePairs, scheme: ClassScheme, times: int
) -> None:
    dataset = SegmentationDataset(write_pairs([(40, 50)] * 4), scheme, TrainTransform((16, 16)))
    num_files = len(os.listdir("/proc/self/fd"))
    for _ in range(times):
        loader = TrainLoader(dataset, 2, options=LoadOptions(2))
        next(loader.epoch(0))
        loader.close()
    assert_no_children()
    assert len(os.listdir("/proc/self/fd")) <= num_files + 4


class FailingSource:
    """A data source with a mistake."""

    def __len__(self) -> int:
        return 2

    def image_and_mask(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        raise KeyError("no such key")


def test_error_of_own_data_names_component_file_and_line() -> None:
    data = OwnData(FailingSource(), "own:FailingSource", "train")
    with pytest.raises(DataError) as raised:
        data.read(1, class_scheme("list", classes=("a", "b")))
    assert re.search(
        r"image_and_mask\(1\) of data\.format = own:FailingSource fails with KeyError: 'no such key' "
        r"\(.*test_loader_failures\.py, line \d+\): correct it; segapp check-part --config FILE",
        str(raised.value),
    )
