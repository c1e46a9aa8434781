"""What a machine brings to a job: every key of the config that is not its own, and what its files are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from segapp.config import RunConfig, load_config, validate_config
from segapp.parallel.agreement import compare
from segapp.session import machine_facts
from segapp.session.machine_facts import MAY_DIFFER, facts_of
from tests.support.runs import merged

PART = "class Net:\n    pass\n"


def changed(config: RunConfig, key: str, value: Any) -> RunConfig:
    """Return a config with another value of a dotted key, not validated again."""
    section, _, name = key.rpartition(".")
    raw = config.model_dump(mode="json")
    (raw[section] if section else raw)[name] = value
    return validate_config(raw)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optim.lr", 0.5),
        ("seed", 7),
        ("data.hflip", 0.25),
        ("train.batch_size", 3),
        ("eval.tta", True),
        ("data.train_split", "val"),
        ("checkpoint.keep", 9),
    ],
)
def test_other_setting_is_a_difference(tiny: dict[str, Any], key: str, value: Any) -> None:
    config = validate_config(merged(tiny).model_dump(mode="json")) if isinstance(tiny, RunConfig) else merged(tiny)
    agreement = compare([facts_of(config), facts_of(changed(config, key, value))])
    assert agreement.code == 2
    assert agreement.reason.startswith(f"{key} is {value} on ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.workers", 3),
        ("data.cache", "none"),
        ("parallel.devices", ["cpu", "cpu"]),
        ("parallel.memory_budget_mib", [100]),
        ("log.every_steps", 77),
        ("log.tensorboard", False),
    ],
)
def test_setting_of_a_machine_may_differ(tiny: dict[str, Any], key: str, value: Any) -> None:
    config = merged(tiny)
    assert compare([facts_of(config), facts_of(changed(config, key, value))]).code == 0
    assert key in MAY_DIFFER or key.partition(".")[0] in MAY_DIFFER


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
        "content": f"the content of {image.relative_to(tmp_path / 'other' / 'there')} is ",
        "shorter": f"the content of {image.relative_to(tmp_path / 'other' / 'there')} is ",
    }[change]
    assert agreement.reason.startswith(said)


def test_data_that_are_not_there_are_the_problem(tiny: dict[str, Any], tmp_path: Path) -> None:
    facts = facts_of(changed(merged(tiny), "data.root", str(tmp_path / "nothing")))
    assert facts.problem is not None
    assert facts.problem[0] == 3
    assert f"{tmp_path / 'nothing'} does not exist" in facts.problem[1]


def test_source_of_a_component_counts_and_its_folder_does_not(tiny: dict[str, Any], tmp_path: Path) -> None:
    configs = {}
    for name, text in (("a", PART), ("b", PART), ("c", PART + "# other\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "net.py").write_text(text)
        model = {"library": "python", "name": f"{tmp_path / name / 'net.py'}:Net", "encoder": None, "options": {}}
        configs[name] = merged(tiny, model=model)
    facts = {name: facts_of(config) for name, config in configs.items()}
    assert compare([facts["a"], facts["b"]]).code == 0
    agreement = compare([facts["a"], facts["c"]])
    assert agreement.code == 2
    assert agreement.reason.startswith("the source of net.py:Net is ")
    assert facts["a"].settings["model.name"] == "net.py:Net"


def test_weights_are_compared_by_their_content(tiny: dict[str, Any], tmp_path: Path) -> None:
    for name, content in (("a.pt", b"one"), ("b.pt", b"one"), ("c.pt", b"two")):
        (tmp_path / name).write_bytes(content)
    a, b, c = (facts_of(changed(merged(tiny), "model.weights", str(tmp_path / f"{name}.pt"))) for name in "abc")
    assert compare([a, b]).code == 0
    assert compare([b, c]).reason.startswith("model.weights is a file with SHA-256 ")


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


def test_shipped_config_says_all_that_must_agree() -> None:
    settings = facts_of(load_config("demo.yaml")).settings
    assert {"optim.lr", "the version of segapp", "the version of torch", "model.name"} <= settings.keys()
    assert not {"data.root", "data.workers", "log.every_steps"} & settings.keys()
