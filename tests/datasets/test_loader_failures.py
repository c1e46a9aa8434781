"""Every failure while data are loaded is raised as one error that names the file; none hangs."""

import errno
import gc
import os
import pickle
import re
import select
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


SIZES = [(20, 40)] * 3 + [(20, 41)] + [(20, 40)] * 4
Misbehave = Callable[[Callable[[], object]], SegmentationDataset]
pytestmark = pytest.mark.usefixtures("no_worker_is_left")


@pytest.fixture
def misbehave(write_pairs: WritePairs, scheme: ClassScheme) -> Misbehave:
    """Return eight images, of which number 3, 013.png, calls a function."""
    pairs = write_pairs(SIZES)
    return lambda act: SegmentationDataset(pairs, scheme, Misbehaving(act))


def consume(dataset: SegmentationDataset, workers: int, **options: Any) -> Exception:
    """Return the error that ends an epoch."""
    with pytest.raises((DataError, WorkerError)) as error:
        list(TrainLoader(dataset, 2, options=LoadOptions(workers, **options)).epoch(0))
    return error.value


def raise_local_error() -> None:
    class LocalError(Exception):
        """A local class, which cannot be pickled."""

        def __init__(self, one: int, two: int) -> None:
            super().__init__("local")
            self.unpicklable = lambda: None

    raise LocalError(1, 2)


def cut(pair: ImagePair) -> None:
    pair.image.write_bytes(pair.image.read_bytes()[:200])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("index", "damage", "words"),
    [
        (5, cut, r"^\S+/019\.png: cannot be decoded \(truncated PNG"),
        (2, np.zeros((20, 39), np.uint8), r"010_mask\.png: the mask has 39x20 pixels, its image \S+010\.png has 40x20"),
        (6, np.full((20, 40), 5, np.uint8), r"022_mask\.png: the mask holds ids outside the 5 classes: 5 \(800 px\)"),
    ],
    ids=["damaged", "another size", "unknown ids"],
)
def test_bad_file_is_named_without_a_traceback(
    index: int, damage: Any, words: str, workers: int, misbehave: Misbehave
) -> None:
    dataset = misbehave(lambda: None)
    pair = dataset.pairs[index]
    damage(pair) if callable(damage) else Image.fromarray(damage).save(pair.masks[0])
    error = consume(dataset, workers)
    assert isinstance(error, DataError)
    assert re.search(words, str(error))
    assert "\n" not in str(error)
    assert "Traceback" in error.__notes__[0]  # for the log
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@case("F40", how="an item raises an exception that cannot be pickled", passes="exit 3 naming the item, no hang")
@pytest.mark.parametrize("workers", [0, 2])
def test_unpicklable_worker_error_is_reported(workers: int, misbehave: Misbehave) -> None:
    dataset = misbehave(raise_local_error)
    error = consume(dataset, workers)
    assert isinstance(error, DataError)
    assert re.search(
        r"013\.png: the augmentation failed with LocalError: local \(.*test_loader_failures\.py, line \d+\)", str(error)
    )
    with pytest.raises(DataError, match=r"013\.png"):
        list(EvalLoader(dataset, options=LoadOptions(workers)))


@case("F40", how="an item leaves the worker", passes="an error that names the file, no hang")
@pytest.mark.parametrize("exception", [SystemExit(3), KeyboardInterrupt(), MemoryError("no memory")])
def test_worker_exit_is_an_error_naming_the_file(exception: BaseException, misbehave: Misbehave) -> None:
    def leave() -> None:
        raise exception

    message = str(consume(misbehave(leave), 2))
    assert "013.png: " in message
    assert type(exception).__name__ in message


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(60)
def test_worker_killed_with_torchs_lock_is_reported(misbehave: Misbehave) -> None:
    """Workers look at torch's event between two batches, and the trainer sets it: each takes its lock."""

    def kill_with_the_lock() -> None:
        frame = sys._getframe()
        while frame.f_code.co_name != "_worker_loop":
            assert frame.f_back is not None
            frame = frame.f_back
        assert frame.f_locals["done_event"]._cond.acquire()
        kill()

    error = consume(misbehave(kill_with_the_lock), 2, timeout_s=120)
    assert isinstance(error, WorkerError)
    assert error.exit_code == 7
    assert "ended by SIGKILL while reading" in str(error)
    assert "013.png" in str(error)


def test_hanging_worker_is_reported_after_its_timeout(misbehave: Misbehave) -> None:
    start = time.monotonic()
    error = consume(misbehave(lambda: time.sleep(600)), 2, timeout_s=2)
    assert isinstance(error, WorkerError)
    assert re.search(r"no batch arrived from the data workers for 2 s, at \S+013\.png", str(error))
    assert 2 <= time.monotonic() - start < 15


def test_slow_worker_within_timeout_succeeds(misbehave: Misbehave) -> None:
    for timeout_s in (30.0, 0.0):
        loader = TrainLoader(misbehave(lambda: time.sleep(1.1)), 2, options=LoadOptions(2, timeout_s))
        assert len(list(loader.epoch(0))) == 4
        loader.close()


def test_worker_prints_no_traceback_for_a_trainer_that_left(
    misbehave: Misbehave, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(get_temp_dir())  # of this process and its workers
    before, num_asked = set(folder.glob("listener-*")), 0
    for batch in EvalLoader(misbehave(lambda: None), options=LoadOptions(2)):  # workers of a ring have no sockets
        assert batch is not None
        for path in set(folder.glob("listener-*")) - before if num_asked < 2 else ():
            with socket.socket(socket.AF_UNIX) as trainer:  # one that asks for a batch and is killed
                trainer.connect(str(path))
            num_asked += 1
    assert num_asked >= 2
    assert "Traceback" not in capfd.readouterr().err


def test_worker_killed_while_sending_is_reported(misbehave: Misbehave, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is read through a connection to its worker, which is reset if the worker dies before that."""
    killed = []

    def reset(iterator: Any) -> Any:
        killed.append(iterator._workers[0].pid)
        os.kill(killed[-1], signal.SIGKILL)
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    monkeypatch.setattr(torch.utils.data.dataloader._MultiProcessingDataLoaderIter, "_next_data", reset)
    error = consume(misbehave(lambda: None), 2)
    assert isinstance(error, WorkerError)
    assert len(killed) == 2, "the workers are started again once"
    assert f"data worker 0 (process {killed[1]}) ended by SIGKILL" in str(error)


def test_hanging_start_of_workers_names_the_first_image(misbehave: Misbehave) -> None:
    pool = BatchPool(misbehave(lambda: None), LoadOptions(2, 5.0), 4)
    error = pool._timeout_error([SampleKey(0, 6), SampleKey(0, 7)])
    assert re.search(r"no batch arrived from the data workers for 5 s, at \S+022\.png: check", str(error))


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


@case("F43", how="shared memory refused", passes="says /dev/shm")
def test_full_shared_memory_is_explained(misbehave: Misbehave, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object) -> None:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(torch.UntypedStorage, "share_memory_", full)
    with pytest.raises(WorkerError, match="/dev/shm"):
        list(EvalLoader(misbehave(lambda: None), options=LoadOptions(1)))
    loader = TrainLoader(misbehave(lambda: None), 2, options=LoadOptions(1))
    assert len(list(loader.epoch(0))) == 4, "a ring needs none"
    loader.close()


# --- signals


def test_workers_ignore_ctrl_c_and_use_one_thread(misbehave: Misbehave) -> None:
    """They also end by SIGTERM: handlers of the trainer must not be inherited."""

    def check() -> None:
        found = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        if found != (signal.SIG_IGN, signal.SIG_DFL) or (torch.get_num_threads(), cv2.getNumThreads()) != (1, 1):
            raise ValueError(f"{found}, threads: {torch.get_num_threads()}, {cv2.getNumThreads()}")

    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        loader = TrainLoader(misbehave(check), 2, options=LoadOptions(2))
        assert len(list(loader.epoch(0))) == 4
        loader.close()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_dying_worker_raises_only_in_the_loader(misbehave: Misbehave) -> None:
    """torch's SIGCHLD handler raises in the main thread, even while a checkpoint is written."""
    before = signal.getsignal(signal.SIGCHLD)
    reading, writing = os.pipe()
    dataset = misbehave(lambda: os.write(writing, b"!") and kill())
    seed = next(seed for seed in range(99) if sample_order(8, seed, 0)[-1] == 3)  # after six batches ahead
    batches = TrainLoader(dataset, 1, options=LoadOptions(1), seed=seed).epoch(0)
    next(batches), next(batches)
    assert signal.getsignal(signal.SIGCHLD) == before
    os.read(reading, 1)
    for _ in range(4):  # the worker dies now, and nothing is raised here
        time.sleep(0.05)
    with pytest.raises(WorkerError):
        list(batches)
    os.close(reading)
    os.close(writing)


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
    assert select.select([reading], [], [], 20)[0], "the process lives"
    assert os.read(reading, 100) == b""
    os.close(reading)


@case(
    "F42", how="8 and 50 starts and stops of workers that use OpenCV", passes="no hang, no process, no descriptor left"
)
@pytest.mark.parametrize("times", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_repeated_starts_leave_no_process_or_descriptor(
    write_pairs: WritePairs, scheme: ClassScheme, times: int
) -> None:
    dataset = SegmentationDataset(write_pairs([(40, 50)] * 4), scheme, TrainTransform((16, 16)))

    def num_shared() -> int:
        return Path("/proc/self/maps").read_text().count("/dev/zero")

    gc.collect()  # loaders of other tests
    num_files, num_before = len(os.listdir("/proc/self/fd")), num_shared()
    for _ in range(times):
        loader = TrainLoader(dataset, 2, options=LoadOptions(2))
        next(loader.epoch(0))
        assert num_shared() == num_before + 2, "images and targets of the ring"
        loader.close()
        assert num_shared() == num_before
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
