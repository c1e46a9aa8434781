import contextlib
import errno
import hashlib
import json
import os
import random
import shutil
import signal
import sys
from collections import OrderedDict, defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from segapp import failpoints
from segapp.accelerator import Accelerator
from segapp.checkpoint.snapshot import capture_rng, hold_own_state, num_tensor_bytes, restore_rng, snapshot
from segapp.checkpoint.training_state import (
    LoadedCheckpoint,
    load_checkpoint,
    load_to_resume,
    require_finite,
    save_checkpoint,
)
from segapp.errors import CheckpointError, NonFiniteError, StorageError
from segapp.parallel.distributed import Ranks
from segapp.run.checkpoints import CheckpointFacts, CheckpointFolder
from tests.support.runs import differing

_NAMES = """start opened write before_fsync after_fsync before_rename after_rename manifest.before_write
manifest.before_fsync manifest.before_rename manifest.after_rename committed before_link before_name_rename
after_name_rename before_retire retired_name retired_object end"""
SAVE_POINTS = [f"ckpt.{name}" for name in _NAMES.split()]
BEFORE_COMMIT = SAVE_POINTS[: SAVE_POINTS.index("ckpt.manifest.before_rename") + 1]


def state_of(step: int) -> dict:
    """A state whose every number says its step."""
    return {
        "model": {"weight": torch.full((37, 53), float(step)), "steps": torch.tensor(step)},
        "optimizer": {"state": {0: {"exp_avg": torch.full((37, 53), step / 2)}}, "param_groups": [{"lr": 0.1}]},
        "rng": [step, None],
    }


def save(folder: Path, step: int, *, metric=None, **options):
    return save_checkpoint(folder, state_of(step), facts(step, 1 + step // 10, metric=metric), **options)


def resume(folder: Path) -> LoadedCheckpoint:
    """Load as a training that holds the lock of the run with this folder of checkpoints."""
    return load_to_resume(Ranks(), SimpleNamespace(checkpoints=folder), is_resumed=True)


def facts(step: int, epoch: int, **others) -> CheckpointFacts:
    return CheckpointFacts(step=step, epoch=epoch, **others)


def assert_is_whole(state: dict) -> int:
    """Every number in a state says the same step; returns it."""
    step = state["rng"][0]
    assert torch.equal(state["model"]["weight"], torch.full((37, 53), float(step)))
    assert torch.equal(state["optimizer"]["state"][0]["exp_avg"], torch.full((37, 53), step / 2))
    return step


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in ("objects", "manifest.json"))


def problems(folder: Path) -> list[str]:
    return [status.problem for status in CheckpointFolder(folder).verify() if status.problem]


def damage(path: Path, how: str) -> None:
    """Changes a file in place, so that every hard link of it is changed."""
    size = path.stat().st_size
    with open(path, "r+b") as file:
        if how == "flip":
            file.seek(size // 3)  # within the first tensor
            byte = file.read(1)[0]
            file.seek(size // 3)
            file.write(bytes([byte ^ 16]))
        elif how == "zeros":
            file.seek(size // 3 // 4096 * 4096)
            file.write(bytes(4096))
        else:
            file.truncate({"empty": 0, "half": size // 2, "-1": size - 1}[how])


# -- what is saved ------------------------------------------------------------------------------------------------


def test_training_state_is_read_back_bit_for_bit(tmp_path):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 9, 7)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": capture_rng()}
    expected = snapshot(state)
    save_checkpoint(tmp_path, state, facts(7, 2, position=3, metric=0.5))
    loaded = load_checkpoint(tmp_path)
    assert (loaded.step, loaded.facts.epoch, loaded.facts.position, loaded.messages) == (7, 2, 3, ())
    facts_of_file = {"step": 7, "epoch": 2, "position": 3, "metric": 0.5}
    assert loaded.state.pop("checkpoint") == {"format": 1, **facts_of_file}
    entry = json.loads((tmp_path / "manifest.json").read_text())["entries"][0]
    assert {key: entry[key] for key in entry.keys() - {"seq", "object", "sha256", "size_bytes"}} == facts_of_file
    assert differing(loaded.state, expected) == []
    assert torch.load(tmp_path / "last.pt", weights_only=True)["checkpoint"]["step"] == 7


def test_manifest_lists_every_file_with_sha256_and_size(tmp_path):
    one, _ = save(tmp_path, 3, finished_epoch=1, metric=0.1, is_best=True)
    again, _ = save(tmp_path / "another", 3, finished_epoch=7, metric=0.1)
    assert one.sha256 == again.sha256, "equal states have equal bytes under any name"
    shutil.rmtree(tmp_path / "another")
    save(tmp_path, 5)
    raw = json.loads((tmp_path / "manifest.json").read_text())
    assert sorted(raw["names"]) == names(tmp_path) == ["best.pt", "epoch_0001.pt", "last.pt"]
    for name, sha256 in raw["names"].items():
        content = (tmp_path / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == sha256
        [size] = [entry["size_bytes"] for entry in raw["entries"] if entry["sha256"] == sha256]
        assert size == len(content)
    assert [(entry["step"], entry["epoch"]) for entry in raw["entries"]] == [(5, 1), (3, 1)]


@pytest.mark.parametrize(
    ("value", "kind"),
    [(np.float64(0.5), "numpy.float64"), ({1, 2}, "set"), (defaultdict(list), "collections.defaultdict")],
)
def test_unsupported_value_is_refused_with_its_path_and_type(tmp_path, value, kind):
    state = {**state_of(1), "best": {"miou": [0.5, value]}}
    for take in (snapshot, lambda s: save_checkpoint(tmp_path, s, facts(1, 1))):
        with pytest.raises(TypeError, match=r"state\['best'\]\['miou'\]\[1\]") as caught:
            take(state)
        assert kind in str(caught.value)
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize(
    ("part", "dtype", "bad"),
    [
        ("model", torch.float16, float("nan")),
        ("ema", torch.float64, float("inf")),
        ("optimizer", torch.bfloat16, -float("inf")),
        ("distillation", torch.complex64, float("nan")),
    ],
)
def test_non_finite_number_is_found_anywhere(part, dtype, bad):
    """The largest finite numbers, whose norm overflows, are finite, and so are integers of the same state."""
    largest = torch.full((33, 5), torch.finfo(dtype).max, dtype=dtype)
    state = {"model": {"layer": {"weight": torch.ones(4), "steps": torch.tensor(2**40)}}, "ema": None}
    state[part] = {"layer": {"weight": largest, "lr": 0.1, "mask": torch.tensor([True, False])}}
    require_finite(state)
    largest[31, 4] = bad
    with pytest.raises(NonFiniteError, match=rf"{part}\.layer\.weight is not finite"):
        require_finite(state)
    state[part] = {"layer": {"lr": bad}}
    with pytest.raises(NonFiniteError, match=rf"{part}\.layer\.lr is not finite"):
        require_finite(state)


def test_non_finite_metric_is_never_best(tmp_path):
    save(tmp_path, 1, metric=0.5, is_best=True)
    entry, _ = save(tmp_path, 2, metric=float("nan"), is_best=True)
    assert entry.metric is None
    assert load_checkpoint(tmp_path, "best").step == 1


# -- snapshot -----------------------------------------------------------------------------------------------------

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
tensors = st.builds(
    lambda shape, dtype: torch.ones(shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64]),
)
states = st.recursive(
    plain | tensors,
    lambda child: (
        st.lists(child, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(), child, max_size=3)
        | st.tuples(child, child)
    ),
    max_leaves=8,
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(states)
def test_any_snapshot_is_read_back_with_weights_only(tmp_path, state):
    """`repr` has the types of all parts, and the type, shape and numbers of these small tensors."""
    assert repr(snapshot(state)) == repr(state)
    save_checkpoint(tmp_path, {"model": {}, "any": state}, facts(1, 1))
    assert repr(load_checkpoint(tmp_path).state["any"]) == repr(state)


class LateCopies(Accelerator):
    """A device whose copies to the host arrive when it is waited for; the host can lock memory for some of them."""

    can_pin = True

    def __init__(self, num_lockable):
        super().__init__("cpu")
        self.num_lockable, self.num_waits, self._late = num_lockable, 0, []

    def copy_to_host(self, tensor):
        if not self.num_lockable:
            raise RuntimeError("CUDA error: out of memory")
        self.num_lockable -= 1
        host = torch.zeros_like(tensor)
        self._late.append((host, tensor))
        return host, lambda: False

    def synchronize(self, device):
        self.num_waits += 1
        for host, tensor in self._late:
            host.copy_(tensor)


@pytest.mark.parametrize("num_lockable", [9, 1, 0])
def test_snapshot_waits_for_its_device_once(num_lockable, monkeypatch):
    device = LateCopies(num_lockable)
    monkeypatch.setattr("segapp.checkpoint.snapshot.accelerator_of", lambda _: device)
    weight = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state = {"a": weight, "b": [weight, torch.arange(6).view(2, 3).t()], "c": 7}
    copied = snapshot(state)
    assert repr(copied) == repr(state)
    assert copied["a"] is copied["b"][0]
    assert copied["a"].stride() == weight.stride()
    assert copied["a"].data_ptr() != weight.data_ptr()
    assert device.num_waits == (num_lockable > 0)


def test_snapshot_stays_fixed_and_keeps_shared_weights_shared():
    weight = nn.Parameter(torch.arange(9.0).view(3, 3))
    model = OrderedDict(a=weight, b=weight, turned=weight.t(), row=weight[1])
    model._metadata = {"": {"version": 2}}
    assert num_tensor_bytes(model) == 4 * (9 + 9 + 3), "the other views are stored as tensors of their own"
    copy = snapshot({"model": model})
    expected = weight.detach().clone()
    with torch.no_grad():
        weight.zero_()
    for name, value in (("a", expected), ("turned", expected.t()), ("row", expected[1])):
        assert torch.equal(copy["model"][name], value), name
    assert copy["model"]["a"] is copy["model"]["b"]
    assert not copy["model"]["a"].requires_grad
    assert copy["model"]._metadata == {"": {"version": 2}}


def test_random_numbers_continue_after_restore(tmp_path):
    def draws():
        return [random.gauss(), np.random.normal(), random.random(), *np.random.rand(3), *torch.rand(3).tolist()]

    random.gauss(), np.random.normal()  # both keep the second number of a pair
    save_checkpoint(tmp_path, {"model": {}, "rng": capture_rng()}, facts(1, 1))
    expected = draws()
    restore_rng(load_checkpoint(tmp_path).state["rng"])
    assert draws() == expected
    with pytest.raises(ValueError, match="random generators"):
        restore_rng({"python": 3})


# -- a crash at any point -----------------------------------------------------------------------------------------


def killed_save(folder: Path, armed: str) -> bool:
    """Saves step 50 in a process of its own with a failpoint; whether it was killed by it."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            failpoints.arm(armed)
            save(folder, 50, finished_epoch=5, metric=0.9, is_best=True, keep=2)
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.sampled(2)
@pytest.mark.parametrize("point", SAVE_POINTS)
def test_sigkill_at_any_point_leaves_old_or_new_checkpoint(tmp_path, point):
    num_kills = 0
    for visit in range(1, 400, 5 if point == "ckpt.write" else 1):
        folder = tmp_path / str(visit)
        for step in (10, 20, 30, 40):
            save(folder, step, finished_epoch=step // 10, metric=step / 100, is_best=step == 20, keep=2)
        if not killed_save(folder, f"{point}={visit}:kill"):
            break
        num_kills += 1
        assert problems(folder) == []
        last, best = (40, 20) if point in BEFORE_COMMIT else (50, 50)
        assert [load_checkpoint(folder, which).step for which in ("best", "epoch_0004")] == [best, 40]
        for load in (load_checkpoint, resume):
            loaded = load(folder)
            assert (assert_is_whole(loaded.state), loaded.messages) == (last, ())
        assert assert_is_whole(torch.load(folder / "last.pt", weights_only=True)) == last
        # The next save works, tidies up, and nothing is left over.
        save(folder, 60, finished_epoch=6, keep=2)
        assert names(folder) == ["best.pt", f"epoch_000{last // 10}.pt", "epoch_0006.pt", "last.pt"]
        assert len(list((folder / "objects").iterdir())) == len(CheckpointFolder(folder).verify())
        assert problems(folder) == []
    else:
        pytest.fail("the sweep did not end")
    assert num_kills > 0, "the point was never reached"


@pytest.mark.parametrize("point", BEFORE_COMMIT)
def test_error_before_commit_is_storage_error_without_leftovers(tmp_path, point):
    save(tmp_path, 10)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    error, words = [("ENOSPC", "No space"), ("EIO", "error"), ("EROFS", "writable")][BEFORE_COMMIT.index(point) % 3]
    failpoints.arm(f"{point}=raise:{error}")
    with pytest.raises(StorageError, match=f"cannot write a checkpoint in .*{words}"):
        save(tmp_path, 20)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    failpoints.arm("")
    save(tmp_path, 30)
    assert load_checkpoint(tmp_path).step == 30


@pytest.mark.parametrize("point", ["ckpt.before_link", "ckpt.before_name_rename"])
def test_error_after_commit_is_reported_and_repaired_later(tmp_path, point):
    save(tmp_path, 10)
    failpoints.arm(f"{point}=raise:EIO")
    _, messages = save(tmp_path, 20)
    assert any("last.pt could not be pointed" in message for message in messages)
    failpoints.arm("")
    loaded = resume(tmp_path)
    assert (loaded.step, loaded.messages) == (20, ())
    assert torch.load(tmp_path / "last.pt", weights_only=True)["checkpoint"]["step"] == 20


# -- damage -------------------------------------------------------------------------------------------------------


@pytest.fixture
def newest(tmp_path) -> Path:
    """The object of the newest of three checkpoints, the last commit and not the highest step; it has two aliases."""
    for step in (30, 20):
        save(tmp_path, step)
    save(tmp_path, 10, finished_epoch=1)
    (found,) = (tmp_path / "objects").glob("00000010*")
    return found


@pytest.mark.parametrize("how", ["empty", "half", "-1", "flip", "zeros"])
def test_damaged_last_falls_back_and_is_kept_aside(tmp_path, newest, how):
    damage(tmp_path / "last.pt", how)
    assert [status.problem is None for status in CheckpointFolder(tmp_path).verify()] == [False, True]
    viewer = load_checkpoint(tmp_path)
    assert viewer.step == assert_is_whole(viewer.state) == 20
    assert names(tmp_path) == ["epoch_0001.pt", "last.pt"], "a reader changes nothing"
    loaded = resume(tmp_path)
    assert loaded.step == 20
    assert "last.pt (epoch 1, step 10) is damaged" in loaded.messages[0]
    assert names(tmp_path) == ["epoch_0001.pt.corrupt", "last.pt", "last.pt.corrupt"]
    assert problems(tmp_path) == []
    again = resume(tmp_path)
    assert (again.step, again.messages) == (20, ())
    assert assert_is_whole(torch.load(tmp_path / "last.pt", weights_only=True)) == 20
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(tmp_path / "last.pt.corrupt")


def test_two_damaged_newest_fall_back_to_third_then_none(tmp_path):
    for epoch in (1, 2, 3):
        save(tmp_path, epoch * 10, finished_epoch=epoch)
    damage(tmp_path / "epoch_0003.pt", "flip")
    damage(tmp_path / "epoch_0002.pt", "half")
    loaded = load_checkpoint(tmp_path)
    assert loaded.step == 10
    assert "step 30) is damaged: its sha256" in loaded.messages[0]
    assert "step 20) is damaged: it has" in loaded.messages[1]
    assert "went back to epoch_0001.pt" in loaded.messages[2]
    damage(tmp_path / "epoch_0001.pt", "flip")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="none of the 3 checkpoints") as caught:
        resume(tmp_path)
    assert str(caught.value).count("is damaged") == 3
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "put",
    [lambda path: path.write_bytes(b"rubbish"), os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")],
    ids=["rubbish", "pipe", "folder", "link"],
)
def test_overwritten_last_is_detected_and_its_object_loads(tmp_path, newest, put):
    aliases = ["last.pt", "epoch_0001.pt"]
    for name in aliases:
        (tmp_path / name).unlink()
        put(tmp_path / name)
    assert "last.pt is damaged; epoch_0001.pt is damaged" in CheckpointFolder(tmp_path).verify()[0].problem
    loaded = resume(tmp_path)
    assert loaded.step == 10
    assert [message.partition(" is damaged")[0] for message in loaded.messages] == aliases
    assert names(tmp_path) == sorted([*aliases, *(f"{name}.corrupt" for name in aliases)])
    assert problems(tmp_path) == []


def test_damaged_best_is_an_error_without_fallback(tmp_path):
    save(tmp_path, 10, metric=0.5, is_best=True)
    save(tmp_path, 20)
    damage(tmp_path / "best.pt", "flip")
    with pytest.raises(CheckpointError, match=r"best\.pt is damaged"):
        load_checkpoint(tmp_path, "best")
    assert load_checkpoint(tmp_path).step == 20


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: "",
        lambda raw: "[]",
        lambda raw: json.dumps({**raw, "entries": [{**raw["entries"][0], "object": "../../x.pt"}], "names": {}}),
        lambda raw: json.dumps({**raw, "entries": [{**raw["entries"][0], "size_bytes": "many", "step": None}]}),
    ],
    ids=["empty", "list", "outside", "size"],
)
def test_damaged_manifest_is_refused_and_objects_are_kept(tmp_path, change):
    save(tmp_path, 10)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(change(json.loads(manifest.read_text())))
    with pytest.raises(CheckpointError, match=r"manifest|sha256|none of the 1"):
        resume(tmp_path)
    [kept] = [path.read_bytes() for path in (tmp_path / "objects").iterdir()]
    # A person names the file: it is read on its own checksums, and later saves do not remove what was there.
    shutil.copy(tmp_path / "last.pt", tmp_path / "mine.pt")
    assert load_checkpoint(tmp_path / "mine.pt").step == 10
    for step in (20, 30, 40, 50):
        save(tmp_path, step)
    assert kept in [path.read_bytes() for path in (tmp_path / "objects").iterdir()]


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("sha256", "0" * 64, "its sha256 is not the one"),
        ("size_bytes", 5, "bytes instead of 5"),
        ("step", 11, "says step 11, epoch 2, position 0, the file says step 10, epoch 2, position 0"),
        ("epoch", 9, "says step 10, epoch 9, position 0, the file says step 10, epoch 2, position 0"),
        ("position", 4, "says step 10, epoch 2, position 4, the file says step 10, epoch 2, position 0"),
    ],
)
def test_manifest_contradicting_its_file_is_refused(tmp_path, newest, field, value, problem):
    raw = json.loads((tmp_path / "manifest.json").read_text())
    raw["entries"][0][field] = value
    (tmp_path / "manifest.json").write_text(json.dumps(raw))
    loaded = load_checkpoint(tmp_path)
    assert loaded.step == 20
    assert problem in loaded.messages[0]
    assert loaded.messages[1].startswith("went back to objects/")


def test_missing_or_newer_manifest_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="nothing is committed"):
        load_checkpoint(tmp_path)
    save(tmp_path, 10, finished_epoch=1)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 2}))
    for use in (load_checkpoint, lambda folder: CheckpointFolder(folder).verify(), lambda folder: save(folder, 20)):
        with pytest.raises(CheckpointError, match="newer segapp"):
            use(tmp_path)
    manifest.unlink()
    with pytest.raises(CheckpointError, match=r"epoch_0001\.pt, last\.pt"):
        load_checkpoint(tmp_path)
    assert load_checkpoint(tmp_path / "epoch_0001.pt").messages


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("use", ["load", "save"])
def test_object_that_is_gone_is_restored_from_its_alias(tmp_path, newest, use, is_copied):
    content = newest.read_bytes()
    newest.unlink()
    missing, intact = CheckpointFolder(tmp_path).verify()
    assert (missing.problem or "").startswith(f"objects/{newest.name} is missing")
    assert intact.problem is None
    (tmp_path / "epoch_0001.pt").unlink()
    (tmp_path / "epoch_0001.pt").write_bytes(b"damage")
    if is_copied:  # as on a file system without hard links
        (tmp_path / "last.pt").unlink()
        (tmp_path / "last.pt").write_bytes(content)
    if use == "load":
        loaded = resume(tmp_path)
        said = f"objects/{newest.name} was missing and is restored from last.pt"
        assert (loaded.step, loaded.messages) == (10, ("epoch_0001.pt is damaged; step 10 itself is intact", said))
    else:
        save(tmp_path, 40)
    assert newest.read_bytes() == content
    assert problems(tmp_path) == []
    steps = [row.entry.step for row in CheckpointFolder(tmp_path).verify()]
    assert steps == ([10, 20] if use == "load" else [40, 10])
    assert [path.name for path in tmp_path.rglob("*.corrupt")] == ["epoch_0001.pt.corrupt"] * (use == "load")


@pytest.mark.parametrize("is_there", [False, True])
def test_object_is_not_restored_from_a_damaged_alias(tmp_path, newest, is_there):
    newest.unlink()
    for name in ("epoch_0001.pt", "last.pt"):
        (tmp_path / name).unlink()
        if is_there:
            (tmp_path / name).write_bytes(b"x")
    loaded = resume(tmp_path)
    assert loaded.step == 20
    assert ("is damaged" if is_there else "is missing") in loaded.messages[0], loaded.messages
    assert not newest.exists()


# -- files from elsewhere -----------------------------------------------------------------------------------------


def test_file_without_manifest_loads_with_warning(tmp_path):
    save(tmp_path / "run" / "checkpoints", 10)
    shutil.copy(tmp_path / "run" / "checkpoints" / "last.pt", tmp_path / "copy.pt")
    loaded = load_checkpoint(tmp_path / "copy.pt")
    assert loaded.step == 10
    assert "no manifest" in loaded.messages[0]
    assert not load_checkpoint(tmp_path / "run").messages
    assert not load_checkpoint(tmp_path / "run" / "checkpoints" / "last.pt").messages
    damage(tmp_path / "copy.pt", "flip")
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(tmp_path / "copy.pt")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.write_bytes(b""), "damaged or no checkpoint"),
        (lambda path: torch.save({"weight": torch.ones(1)}, path), "not a checkpoint of segapp"),
        (lambda path: torch.save([1], path), "not a checkpoint of segapp"),
        (lambda path: torch.save({"model": {}, "x": path}, path), "pathlib.*could run code"),
        (lambda path: torch.save({"model": {}, "checkpoint": {"format": 99}}, path), "format 99"),
        (lambda path: torch.save({"model": {}, "checkpoint": {"format": 1}}, path), "step, epoch and position"),
        (os.mkfifo, "no such file"),
        (lambda path: None, "no such file"),
    ],
    ids=["empty", "weights", "list", "code", "newer", "no position", "pipe", "absent"],
)
def test_foreign_file_is_one_clear_error(tmp_path, make, says):
    make(tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=says):
        load_checkpoint(tmp_path / "x.pt")


def test_unknown_checkpoint_name_error_lists_committed_ones(tmp_path):
    save(tmp_path, 10, finished_epoch=1)
    known = r"there is no such checkpoint: did you mean last\.pt\? use one of epoch_0001\.pt, last\.pt"
    with pytest.raises(CheckpointError, match=known):
        load_checkpoint(tmp_path, "best")


# -- space and retention ------------------------------------------------------------------------------------------


def test_retention_keeps_n_epochs_best_and_two_newest(tmp_path):
    save(tmp_path, 0)
    for name in ("notes.txt", "epoch_9999.pt"):  # of the user
        (tmp_path / name).write_text(name)
    for epoch in (1, 3, 4, 5, 6):
        save(tmp_path, epoch * 10, finished_epoch=epoch, metric=1.0 if epoch == 3 else 0.1, is_best=epoch == 3, keep=2)
        if epoch == 5:
            save(tmp_path, 55, keep=2)
    assert names(tmp_path) == ["best.pt", "epoch_0005.pt", "epoch_0006.pt", "epoch_9999.pt", "last.pt", "notes.txt"]
    assert load_checkpoint(tmp_path, "best").step == 30
    assert [row.entry.step for row in CheckpointFolder(tmp_path).verify()] == [60, 55, 50, 30]
    assert len(list((tmp_path / "objects").iterdir())) == 4
    inode = (tmp_path / "last.pt").stat().st_ino
    assert inode == (tmp_path / "epoch_0006.pt").stat().st_ino, "kept copies cost no space"


def test_names_are_copies_without_hard_links(tmp_path, monkeypatch):
    def no_links(*_args, **_kwargs):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_links)
    for epoch in (1, 2, 3, 4):
        save(tmp_path, epoch * 10, finished_epoch=epoch, metric=0.1 * epoch, is_best=epoch == 2, keep=2)
    assert names(tmp_path) == ["best.pt", "epoch_0003.pt", "epoch_0004.pt", "last.pt"]
    assert problems(tmp_path) == []
    for entry in list((tmp_path / "objects").iterdir()):
        if entry.name.startswith("00000040"):
            damage(entry, "flip")
    assert load_checkpoint(tmp_path).step == 40, "its copy under last.pt is intact"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_optimizer_does_not_keep_the_mapped_file(tmp_path):
    """It keeps the tensors that it loads, until they get memory of their own."""

    def is_mapped():
        return str(tmp_path) in Path("/proc/self/maps").read_text()

    first, second = (torch.optim.AdamW([nn.Parameter(torch.ones(1000))]) for _ in range(2))
    first.param_groups[0]["params"][0].grad = torch.ones(1000)
    first.step()
    state = first.state_dict()
    save_checkpoint(tmp_path, {"model": {}, "optimizer": state}, facts(1, 1))
    second.load_state_dict(load_checkpoint(tmp_path, is_mapped=True).state["optimizer"])
    assert is_mapped()
    hold_own_state(second)
    assert not is_mapped()
    assert torch.equal(second.state_dict()["state"][0]["exp_avg"], state["state"][0]["exp_avg"])


def test_file_that_cannot_be_mapped_is_read(tmp_path, monkeypatch):
    def from_file(*_args, **_options):
        raise RuntimeError("unable to mmap 4096 bytes from file: No such device (19)")

    save(tmp_path, 7)
    monkeypatch.setattr(torch.UntypedStorage, "from_file", from_file)
    assert assert_is_whole(load_checkpoint(tmp_path, is_mapped=True).state) == 7
