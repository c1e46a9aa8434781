"""The cache of decoded images: equal samples, one copy for all processes, and what kills, damage and full disks do."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import pickle
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from segapp import failpoints
from segapp.assembly import data as data_module
from segapp.assembly.data import build_dataset
from segapp.assembly.pairs import build_scheme
from segapp.config import DataConfig
from segapp.datasets import cache as cache_module
from segapp.datasets import dataset as dataset_module
from segapp.datasets.augment import TrainTransform
from segapp.datasets.cache import CacheFiles, CacheState, PixelCache, choose_cache, disk_files, memory_files
from segapp.datasets.dataset import SegmentationDataset, image_sizes
from segapp.datasets.files import ImagePair
from segapp.datasets.layouts.formats import class_scheme
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.loader import TrainLoader
from segapp.datasets.pool import LoadOptions
from segapp.errors import ConfigError
from segapp.parallel.distributed import Ranks
from tests.support.drawn_data import LABEL_MAP, draw_image, draw_mask
from tests.support.drawn_folders import exif_of

NUM_IMAGES = 9


@pytest.fixture(autouse=True)
def small_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "RESERVE_BYTES", 0)


def cache_of(dataset: SegmentationDataset) -> PixelCache:
    assert dataset.cache is not None
    return dataset.cache


def state(dataset: SegmentationDataset) -> CacheState:
    return cache_of(dataset).state()


class Caches:
    """Makes data sets over one cache, as one process after the other would."""

    def __init__(self, folder: Path, pairs: tuple[ImagePair, ...], scheme: ClassScheme) -> None:
        self.folder, self.pairs, self.scheme = folder, pairs, scheme

    def files(self, kind: str = "disk") -> CacheFiles:
        return memory_files() if kind == "ram" else disk_files(self.folder, "root", "train", self.scheme)

    def dataset(self, kind: str = "disk", pairs: tuple[ImagePair, ...] | None = None) -> SegmentationDataset:
        pairs = self.pairs if pairs is None else pairs
        cache = None
        if kind != "none":
            cache = PixelCache(self.files(kind), pairs, image_sizes(pairs), self.scheme.dtype)
        return SegmentationDataset(pairs, self.scheme, TrainTransform((24, 32)), seed=5, cache=cache)

    def records(self) -> list[Path]:
        return sorted(Path(self.files().path).iterdir())

    def record(self, index: int) -> Path:
        return cache_of(self.dataset())._records[index]


@pytest.fixture
def caches(tmp_path: Path, pairs: tuple[ImagePair, ...], scheme: ClassScheme) -> Caches:
    return Caches(tmp_path / "cache", pairs[:NUM_IMAGES], scheme)


def fill(dataset: SegmentationDataset, indices: range = range(NUM_IMAGES)) -> None:
    for index in indices:
        dataset.read(index)


def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by the name of each image file that is decoded."""
    names: list[str] = []
    original = dataset_module.read_with_nodata
    monkeypatch.setattr(
        dataset_module, "read_with_nodata", lambda path, *how: names.append(path.name) or original(path, *how)
    )
    return names


def assert_equal_to_none(dataset: SegmentationDataset, caches: Caches) -> None:
    plain = caches.dataset("none", dataset.pairs)
    for epoch in range(2):
        for index in range(len(plain)):
            ours, truth = dataset[epoch, index], plain[epoch, index]
            assert torch.equal(ours.image, truth.image)
            assert torch.equal(ours.target, truth.target)
            assert ours.target.dtype == truth.target.dtype


@pytest.mark.parametrize("kind", ["disk", "ram"])
def test_cached_samples_equal_decoded_ones(kind: str, caches: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stored pixels cannot be written to; those of a sample can."""
    dataset = caches.dataset(kind)
    assert_equal_to_none(dataset, caches)
    assert [pixels.flags.writeable for pixels in dataset.read(0)] == [False, False]
    dataset[0, 0].target.zero_()
    assert_equal_to_none(dataset, caches)
    names = decoded(monkeypatch)
    fill(dataset)
    if kind == "disk":
        fill(caches.dataset())  # another process
    assert names == []
    assert state(dataset).num_stored == NUM_IMAGES


def test_cache_holds_what_the_readers_return(tmp_path: Path, pairs: tuple[ImagePair, ...]) -> None:
    """A grey image, a turned one, ids mapped to int16, and an image without mask."""
    Image.open(pairs[0].image).convert("L").save(pairs[0].image)
    size = Image.open(pairs[1].image).size[::-1]
    Image.open(pairs[1].image).resize(size).save(pairs[1].image, exif=exif_of(6))
    scheme = class_scheme("folder", classes=list("abcde"), ignore_index=-1, label_map={**LABEL_MAP, 255: -1})
    caches = Caches(tmp_path / "cache", (*pairs[:2], ImagePair(pairs[2].image, None, "c")), scheme)
    for _ in range(2):
        assert_equal_to_none(caches.dataset(), caches)
    image, mask = caches.dataset().read(1)
    assert image.shape == (*size, 3) == (*mask.shape, 3)
    assert mask.dtype == np.int16


def test_a_changed_image_is_decoded_again_alone(caches: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(caches.dataset())
    Image.fromarray(draw_image(50, 8, 9)).save(caches.pairs[2].image)
    Image.fromarray(draw_mask(50, 8, 9)).save(caches.pairs[2].mask or "")
    os.utime(caches.pairs[4].mask or "", ns=(1, 1))
    names = decoded(monkeypatch)
    dataset = caches.dataset()
    assert len(caches.records()) == NUM_IMAGES - 2, "those of the earlier state are removed"
    fill(dataset)
    assert names == ["010.png", "016.png"]
    assert len(caches.records()) == NUM_IMAGES
    names.clear()
    dataset = caches.dataset()
    fill(dataset)
    assert names == []
    assert_equal_to_none(dataset, caches)
    second = caches.pairs[5].mask or Path()
    caches.pairs = (replace(caches.pairs[4], others=(second,)),)
    before = caches.record(0)
    os.utime(second, ns=(1, 1))
    assert caches.record(0) != before, "the mask of a second class is a part of the state"


def test_a_change_during_the_run_is_not_stored(caches: Caches) -> None:
    dataset = caches.dataset()
    Image.fromarray(draw_image(50, 8, 9)).save(caches.pairs[0].image)
    Image.fromarray(draw_mask(50, 8, 9)).save(caches.pairs[0].mask or "")
    assert dataset.read(0)[0].shape == (8, 9, 3)
    assert state(dataset).num_stored == 0


def test_a_larger_split_keeps_what_is_stored(caches: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(caches.dataset("disk", caches.pairs[2:6]), range(4))
    names = decoded(monkeypatch)
    fill(caches.dataset())
    assert names == [caches.pairs[i].image.name for i in (0, 1, 6, 7, 8)]


def test_other_classes_have_a_cache_of_their_own(caches: Caches, tmp_path: Path) -> None:
    fill(caches.dataset())
    scheme = class_scheme("folder", classes=list("abcde"), label_map={**LABEL_MAP, 0: 1})
    other = Caches(caches.folder, caches.pairs, scheme)
    assert_equal_to_none(other.dataset(), other)
    assert other.files().path != caches.files().path


# --- kills


@contextlib.contextmanager
def armed(failpoint: str) -> Iterator[None]:
    failpoints.arm(failpoint)
    try:
        yield
    finally:
        failpoints.arm("")


def fork(action: Callable[[], object]) -> int:
    """Run in a forked process and return its number."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            os._exit(0)
    return pid


def exit_code(pid: int) -> int:
    """Return the exit code of a process after its end, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("place", ["cache.before_pixels", "cache.before_seal"])
def test_a_killed_builder_is_continued(place: str, caches: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> None:
        failpoints.arm(f"{place}=4:kill")
        fill(caches.dataset())

    assert exit_code(fork(build)) == -signal.SIGKILL
    num_written = len(caches.records())
    names = decoded(monkeypatch)
    dataset = caches.dataset()
    assert state(dataset).num_stored == len(caches.records()) == 3
    assert num_written == 4, "the part that it left is removed"
    fill(dataset)
    assert len(names) == NUM_IMAGES - 3
    assert_equal_to_none(caches.dataset(), caches)


@pytest.mark.parametrize("kind", ["disk", "ram"])
def test_builders_side_by_side_share_the_records(kind: str, caches: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that opens the files by name, as another rank does, reads what this one stored; seals begin with 0."""
    monkeypatch.setattr(cache_module, "_seal", lambda *pixels, own=cache_module._seal: own(*pixels) >> 8 << 8)
    dataset = caches.dataset(kind)
    fill(dataset, range(4))
    pickled = pickle.dumps(dataset)

    def build() -> None:
        theirs = pickle.loads(pickled)
        num_stored = theirs.cache.state().num_stored
        fill(theirs)
        os._exit(100 + (num_stored >= 4))

    pids = [fork(build) for _ in range(4)]
    assert [exit_code(pid) for pid in pids] == [101] * 4
    assert state(dataset).num_stored == NUM_IMAGES
    if kind == "disk":
        assert len(caches.records()) == NUM_IMAGES
    assert_equal_to_none(dataset, caches)
    assert cache_of(dataset).num_damaged == 0


def test_run_that_starts_while_a_record_is_written_is_no_error(caches: Caches) -> None:
    dataset = caches.dataset()
    with armed("cache.before_seal=raise:ENOENT"):  # as for a file that the other run removed
        fill(dataset)
    assert state(dataset).stopped is None
    fill(dataset)
    assert state(dataset).num_stored == NUM_IMAGES


# --- damage


@pytest.mark.parametrize(
    ("damage", "is_noticed"),
    [
        (lambda record: record[:3000], True),
        (lambda record: b"", False),
        (None, False),
        (lambda record: record[:3] + bytes([record[3] ^ 255]) + record[4:], True),
        (lambda record: record[:100] + bytes([record[100] ^ 255]) + record[101:], True),
        (lambda record: record[:-70] + bytes([record[-70] ^ 255]) + record[-69:], True),
        (lambda record: bytes(8) + record[8:], False),
        (lambda record: record[:100] + bytes(500) + record[600:], True),
    ],
    ids=["short", "empty", "gone", "seal", "image", "mask", "no seal", "zeros"],
)
def test_a_damaged_record_is_decoded_again_alone(
    damage: Callable[[bytes], bytes] | None, is_noticed: bool, caches: Caches, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(caches.dataset())
    record = caches.record(3)
    record.unlink() if damage is None else record.write_bytes(damage(record.read_bytes()))
    names = decoded(monkeypatch)
    dataset = caches.dataset()
    fill(dataset)
    assert names == ["013.png"]
    assert cache_of(dataset).num_damaged == is_noticed
    assert state(dataset).num_stored == NUM_IMAGES
    names.clear()
    fill(dataset)
    fill(caches.dataset())
    assert names == []
    assert_equal_to_none(dataset, caches)


def test_damaged_memory_is_noticed_at_the_first_read(caches: Caches) -> None:
    dataset = caches.dataset("ram")
    fill(dataset)
    with open(cache_of(dataset).files.path, "r+b") as file:
        file.seek(100)
        file.write(b"damage")
    other = pickle.loads(pickle.dumps(dataset))
    assert_equal_to_none(other, caches)
    assert cache_of(other).num_damaged == 1
    assert state(other).num_stored == NUM_IMAGES


def test_records_cut_or_removed_during_a_run_are_no_crash(caches: Caches) -> None:
    dataset = caches.dataset()
    fill(dataset, range(4))
    for record in caches.records():
        os.truncate(record, 1000)
    assert_equal_to_none(dataset, caches)
    shutil.rmtree(cache_of(dataset).files.path)
    assert_equal_to_none(dataset, caches)
    assert state(dataset).num_stored == 0


# --- room


def test_a_full_disk_ends_the_storing_not_the_run(caches: Caches) -> None:
    with armed("cache.before_seal=3:raise:EDQUOT"):
        dataset = caches.dataset()
        assert_equal_to_none(dataset, caches)
    assert (state(dataset).num_stored, state(dataset).stopped) == (2, os.strerror(errno.EDQUOT))


def test_workers_tell_the_trainer_of_a_full_disk(caches: Caches) -> None:
    with armed("cache.before_pixels=raise:ENOSPC"):
        dataset = caches.dataset()
        loader = TrainLoader(dataset, 3, options=LoadOptions(2))
        assert len(list(loader.epoch(0))) == 3
        loader.close()
    assert state(dataset).stopped == os.strerror(errno.ENOSPC)


@pytest.mark.parametrize("kind", ["disk", "ram"])
def test_the_reserve_stays_free(kind: str, caches: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is stored if the rest does not fit, and nothing more if others fill the disk meanwhile."""
    cache = cache_of(caches.dataset(kind))
    monkeypatch.setattr(cache_module, "RESERVE_BYTES", 70_000)
    free = [cache.state().missing_bytes + 70_000 - 1]
    monkeypatch.setattr(CacheFiles, "free_bytes", lambda self: free[0])  # a disk of this size is only made here
    dataset = caches.dataset(kind)
    assert_equal_to_none(dataset, caches)
    assert state(dataset).num_stored == 0
    assert "GiB are free there" in (state(dataset).stopped or "")
    free[0] += 1
    dataset = caches.dataset(kind)
    fill(dataset, range(3))
    free[0] = 70_000 + 5000  # less than a record more
    assert_equal_to_none(dataset, caches)
    assert state(dataset).num_stored == 3


def mappings() -> int:
    """Return the number of mappings of images in memory, and of descriptors for them, of this process."""
    files = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    return sum("segapp-pixels" in line for line in [*Path("/proc/self/maps").read_text().splitlines(), *files])


def test_memory_is_mapped_once_and_freed_at_the_end(caches: Caches) -> None:
    gc.collect()
    before = mappings()
    dataset = caches.dataset("ram")
    whole = mappings()
    fill(dataset)
    held = [dataset.read(index) for index in (1, 4, 7, 4)]
    assert mappings() == whole
    with pytest.raises(PermissionError):  # a process that reads a page that is gone ends
        os.truncate(cache_of(dataset).files.path, 100)
    del dataset
    assert mappings() > before, "the views are used"
    image, mask = caches.dataset("none").read(7)
    np.testing.assert_array_equal(held[2][0], image)
    np.testing.assert_array_equal(held[2][1], mask)
    held.clear()
    gc.collect()
    assert mappings() == before


# --- the choice of data.cache: auto


@pytest.mark.parametrize(
    ("free_mib", "needed_mib", "promised_mib", "choice", "most_mib"),
    [
        (8000, 2000, 0, "ram", 2000),
        (8000, 2001, 0, "none", 2000),
        (8000, 1500, 500, "ram", 1500),
        (8000, 1500, 501, "none", 1499),
        (1200, 176, 0, "ram", 176),  # less than 25 %, because 1 GiB stays free
        (1200, 177, 0, "none", 176),
        (1200, 77, 100, "none", 76),
        (900, 1, 0, "none", 0),
        (None, 1, 0, "none", 0),
    ],
)
def test_choice_of_the_cache_by_hand(
    free_mib: int | None,
    needed_mib: int,
    promised_mib: int,
    choice: str,
    most_mib: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_module, "RESERVE_BYTES", 2**30)
    monkeypatch.setattr(cache_module, "available_bytes", lambda: None if free_mib is None else free_mib << 20)
    found, said = choose_cache("validation", needed_mib << 20, promised_mib << 20)
    assert found == choice
    expected = (
        f"data.cache = {choice}: decoded, the validation images take {needed_mib:,} MiB, and {most_mib:,} of "
        f"{free_mib or 0:,} MiB of free memory are for them"
    )
    assert said == expected + ("; data.cache: disk decodes each image only once" if choice == "none" else "")


# --- ranks and other processes


def of_config(caches: Caches, cache: str, ranks: Ranks) -> SegmentationDataset:
    """Return the training images of a config; the images themselves are those of the other tests."""
    root = caches.pairs[0].image.parent
    (root / "train.txt").write_text("".join(f"{pair.name}.png {pair.name}_mask.png\n" for pair in caches.pairs))
    keys = {"format": "list", "root": str(root), "classes": list("abcde"), "label_map": LABEL_MAP}
    data = DataConfig.model_validate({**keys, "crop_px": [24, 32], "cache": cache})
    return build_dataset(data, build_scheme(data), "train", is_training=True, seed=0, ranks=ranks)


class TwoRanks(Ranks):
    """One of two ranks on this machine, whose exchanges are those of a recorded first rank."""

    def __init__(self, rank: int, exchanged: list[object]) -> None:
        super().__init__()
        self.rank, self.world_size, self.exchanged = rank, 2, exchanged

    def gather(self, value: object) -> list[object]:
        if self.rank == 0:
            self.exchanged.append(value)
            return [value, value]
        return [pickle.loads(pickle.dumps(self.exchanged.pop(0))), value]


def test_ranks_share_one_ram_cache(caches: Caches) -> None:
    exchanged: list[object] = []
    first, second = (of_config(caches, "ram", TwoRanks(rank, exchanged)) for rank in (0, 1))
    fill(first)
    assert state(second).num_stored == NUM_IMAGES


class ThreeRanks(Ranks):
    """One of three ranks, of which the last two share a machine; `given` has what the earlier ranks have exchanged."""

    def __init__(self, rank: int, given: list[object]) -> None:
        super().__init__()
        self.rank, self.world_size, self.given, self.num_exchanges = rank, 3, given, 0

    def gather(self, value: object) -> list[object]:
        self.num_exchanges += 1
        if self.num_exchanges == 1:
            return ["node1", "node2", "node2"]
        self.given.append(value)
        return [*map(pickle.loads, map(pickle.dumps, self.given)), None, None][:3]


def test_first_rank_of_each_machine_chooses(caches: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    sizes: list[int] = []

    def choose(name: str, num_bytes: int, promised_bytes: int) -> tuple[str, str]:
        sizes.append(num_bytes)
        return ["none", "ram", "none"][len(sizes) - 1], "chosen"

    monkeypatch.setattr(data_module, "choose_cache", choose)
    places = []
    for rank in range(3):
        dataset = of_config(caches, "auto", ThreeRanks(rank, given))
        places.append(None if dataset.cache is None else dataset.cache.files.path)
        assert dataset.cache_note == "chosen"
    assert (places[0], places[1] is not None, places[2]) == (None, True, places[1])
    pixels = sum(height * width for height, width in image_sizes(caches.pairs))
    assert sizes == [(3 + 1) * pixels] * 3, "three bands of an image and its mask, one byte each"


def test_disk_cache_in_the_data_set_is_refused(caches: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches.pairs[0].image.parent))
    with pytest.raises(ConfigError, match=r"data.cache = disk: .* lies in the data folder"):
        of_config(caches, "disk", Ranks())


def test_unusable_cache_folder_is_noted(caches: Caches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "segapp" / "pixels").mkdir(parents=True)
    (tmp_path / "segapp" / "pixels").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    dataset = of_config(caches, "disk", Ranks())
    assert dataset.cache is None
    assert "other users can write to" in dataset.notes[0]
    assert "every image is decoded each time" in dataset.notes[0]
    assert dataset.read(0)[0].ndim == 3
