"""What a machine brings to a job: every key of the config that is not its own, and what its files are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from segapp.config import RunConfig, load_config, validate_config
from segapp.errors import DataError, StorageError
from segapp.parallel.agreement import compare
from segapp.run.checkpoints import CheckpointFacts, CheckpointFolder
from segapp.run.folder import RunFolder
from segapp.session import machine_facts
from segapp.session.machine_facts import facts_of
from tests.support.runs import merged

PART = "class Net:\n    pass\n"


def changed(config: RunConfig, key: str, value: Any) -> RunConfig:
    """Return a config with another value of a dotted key, not validated again."""
    section, _, name = key.rpartition(".")
    raw = config.model_dump(mode="json")
    (raw[section] if section else raw)[name] = value
    return validate_config(raw)


@pytest.mark.parametrize(
    ("key", "value", "differs"),
    [
        ("optim.lr", 0.5, True),
        ("seed", 7, True),
        ("data.train_split", "val", True),
        ("data.cache", "none", False),
        ("parallel.devices", ["cpu", "cpu"], False),
        ("log.every_steps", 77, False),
    ],
)
def test_only_settings_of_a_machine_may_differ(tiny: dict[str, Any], key: str, value: Any, differs: bool) -> None:
    config = merged(tiny)
    agreement = compare([facts_of(config), facts_of(changed(config, key, value))])
    assert agreement.code == (2 if differs else 0)
    assert agreement.reason.startswith(f"{key} is {value} on " if differs else "")


def copied(tiny: dict[str, Any], folder: Path) -> RunConfig:
    """Return the config with a copy of its data in a folder."""
    config = merged(tiny)
    shutil.copytree(config.data.root, folder)
    return changed(config, "data.root", str(folder))


@pytest.mark.parametrize("change", ["nothing", "missing", "renamed", "content", "shorter"])
def test_data_are_compared_wherever_they_are(tiny: dict[str, Any], tmp_path: Path, change: str) -> None:
    here, there = copied(tiny, tmp_path / "here"), copied(tiny, tmp_path / "other" / "there")
    image = sorted((tmp_path / "other" / "there").rglob("train/**/*.png"))[2]
    match change:
        case "missing":
            for path in (tmp_path / "other" / "there").rglob(f"{image.stem}.*"):
                path.unlink()
        case "renamed":
            for path in [*(tmp_path / "other" / "there").rglob(f"{image.stem}.*")]:
                path.rename(path.with_stem(f"{image.stem}-b"))
        case "content":
            shutil.copy(sorted((tmp_path / "other" / "there").rglob("train/**/*.png"))[1], image)
        case "shorter":
            image.write_bytes(image.read_bytes()[:-1])
    agreement = compare([facts_of(here), facts_of(there)])
    assert agreement.code == (0 if change == "nothing" else 3)
    said = {
        "nothing": "",
        "missing": "the number of files of train is ",
        "renamed": "the SHA-256 of the file names of train is ",
        "content": f"the content of train image {image.name} is ",
        "shorter": f"the content of train image {image.name} is ",
    }[change]
    assert agreement.reason.startswith(said)


def test_folders_of_the_data_may_have_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of an image and its mask are equal, and so are those of both splits."""
    for root, images, masks in (("data", "images", "masks/{}"), ("other/data", "imgs", "labels/{}/fine")):
        for kind, folder in (("image", images), ("road", masks.format("road")), ("snow", masks.format("snow"))):
            for split in ("train", "val"):
                (tmp_path / root / folder / split / "b").mkdir(parents=True)
                for name in ("1.png", "b/1.png"):
                    (tmp_path / root / folder / split / name).write_text(f"{kind} {split} {name}")
        (tmp_path / root / "fov.png").write_text("everywhere")
    monkeypatch.chdir(tmp_path)
    raw = {"name": "run", "model": {"name": "fcn_resnet50"}, "data": {"format": "folder", "classes": ["road", "snow"]}}
    raw["data"] |= {"valid_area": "fov.png", "multilabel": "files", "mask_dir": "masks/{class}"}
    raw["loss"] = {"name": "bce"}
    folders = [
        {"root": "data"},
        {"root": "./data"},
        {"root": "other/../data"},
        {"root": str(tmp_path / "data")},
        {"root": "other/data", "image_dir": "imgs", "mask_dir": "labels/{class}/fine"},
    ]
    facts = [facts_of(validate_config({**raw, "data": raw["data"] | where})) for where in folders]
    assert compare(facts).reason == ""
    assert facts[0].data["the number of files of train"] == "7"
    assert len([name for name in facts[0].data if name.startswith("the content of ")]) == 14
    (tmp_path / "other/data/labels/snow/fine/val/b/1.png").write_text("snow val b/2.png")
    changed = facts_of(validate_config({**raw, "data": raw["data"] | folders[-1]}))
    assert compare([facts[0], changed]).reason.startswith("the content of val mask 1 b/1.png is ")


def test_files_that_cannot_be_read_are_the_problem(tiny: dict[str, Any]) -> None:
    for key, path, error, words in (
        ("data.root", "/nothing", DataError, "/nothing does not exist"),
        ("model.weights", "/proc/self/mem", StorageError, "cannot read /proc/self/mem"),  # a file that nobody reads
    ):
        problem = facts_of(changed(merged(tiny), key, path)).problem
        assert problem is not None
        assert (problem[0], words in problem[1]) == (error.exit_code, True)


def test_source_of_a_component_counts_and_its_folder_does_not(tiny: dict[str, Any], tmp_path: Path) -> None:
    configs = {}
    for name, text in (("a", PART), ("b", PART), ("c", PART + "# other\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "net.py").write_text(text)
        (tmp_path / name / "loss.py").write_text("def build():\n    pass\n")
        model = {"library": "python", "name": f"{tmp_path / name / 'net.py'}:Net", "encoder": None, "options": {}}
        configs[name] = merged(tiny, model=model, loss={"name": f"{tmp_path / name / 'loss.py'}:build"})
    facts = {name: facts_of(config) for name, config in configs.items()}
    assert compare([facts["a"], facts["b"]]).code == 0
    agreement = compare([facts["a"], facts["c"]])
    assert agreement.code == 2
    assert agreement.reason.startswith("the source of net.py:Net is ")
    assert [facts["a"].settings[key] for key in ("model.name", "loss.name")] == ["net.py:Net", "loss.py:build"]
    assert "the source of loss.py:build" in facts["a"].settings


def test_weights_of_a_run_are_those_that_it_gives(tiny: dict[str, Any], tmp_path: Path) -> None:
    """They are the best ones; files are compared by their content."""
    with RunFolder.create(path=tmp_path / "run") as run:
        run.write_info()
        for step in (1, 2, 3):
            CheckpointFolder(run.checkpoints).commit(
                lambda file, step=step: file.write(b"state %d" % step),
                CheckpointFacts(step=step, epoch=1),
                is_best=step == 2,
                keep=1,
                need_bytes=9,
            )
    shutil.copy(run.checkpoints / "best.pt", tmp_path / "copy.pt")
    names = (run.path, tmp_path / "copy.pt", run.checkpoints / "last.pt")
    of_run, of_copy, last = (facts_of(changed(merged(tiny), "model.weights", str(name))) for name in names)
    assert compare([of_run, of_copy]).code == 0
    assert compare([of_run, last]).code == 2
    assert compare([of_copy, last]).reason.startswith("model.weights is a file with SHA-256 ")


def test_only_some_files_of_a_large_set_are_read(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = copied(tiny, tmp_path / "data")
    monkeypatch.setattr(machine_facts, "_NUM_SAMPLES", 3)
    read = [name for name in facts_of(config).data if name.startswith("the content of ")]
    assert len(read) == 3
    shutil.move(tmp_path / "data", tmp_path / "moved")
    moved = facts_of(changed(config, "data.root", str(tmp_path / "moved"))).data
    assert [name for name in moved if name.startswith("the content of ")] == read, "chosen by names below the root"


OF_A_MACHINE = [
    "data.root",
    "data.image_dir",
    "data.mask_dir",
    "data.list_dir",
    "data.valid_area",
    "data.workers",
    "data.cache",
    "parallel.devices",
    "parallel.gpu0_bsz",
    "parallel.memory_budget_mib",
    "parallel.shares",
]


def test_every_other_key_of_a_config_must_agree() -> None:
    config = load_config("demo.yaml")
    keys = {
        f"{section}.{key}"
        for section, values in config.model_dump(mode="json").items()
        if isinstance(values, dict)
        for key, value in values.items()
        if section != "log" and not isinstance(value, dict | list)
    }
    settings = facts_of(config).settings
    assert keys - settings.keys() == {key for key in OF_A_MACHINE if key in keys}
    assert not {key for key in settings if key in OF_A_MACHINE or key.startswith("log.")}
    assert {"seed", "the version of segapp", "the version of torch"} <= settings.keys()
