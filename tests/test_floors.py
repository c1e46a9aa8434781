"""Imports look down, each heavy library has its door, and the map is true."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import segapp
from tests.support import ROOT
from tests.support.import_graph import circles, import_graph
from tests.support.recorded_runs import RecordedRun
from tests.support.roads import broken_links, hops, roads

SCREEN_PACKAGES = {
    "segapp", "textual", "rich", "platformdirs", "numpy", "pydantic", "pydantic_core", "annotated_types",
    "typing_extensions", "typing_inspection",
}  # fmt: skip
MOST_SCREEN_MODULES = 650
"""596 at the time of writing, in 0.4 s of processor time."""


def loaded_by(*statements: str, after: str = "") -> list[set[str]]:
    """The modules that each statement loads in a new process, those that `after` has loaded before it left out."""
    code = f"""if True:
        import json, os, sys
        {after}
        before = set(sys.modules)
        for statement in {statements!r}:
            if os.fork() == 0:
                exec(statement)
                print(json.dumps(sorted(sys.modules.keys() - before)), flush=True)
                os._exit(0)
            assert os.wait()[1] == 0, statement"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def beyond_torch() -> dict[str, set[str]]:
    """The modules that packages which import torch load beyond it."""
    packages = ("segapp.parallel", "segapp.losses", "segapp.session.session")
    loaded = loaded_by(*(f"import {package}" for package in packages), after="import torch")
    return dict(zip(packages, loaded, strict=True))


BESIDE = ("segapp.accelerator", "segapp.chunks", "segapp.compat", "segapp.places", "segapp.waiting")
"""Small modules that the libraries share."""


@pytest.mark.parametrize("package", ["segapp.parallel", "segapp.losses"])
def test_libraries_load_nothing_beyond_torch(package: str, beyond_torch: dict[str, set[str]]) -> None:
    beyond = beyond_torch[package]
    assert {name for name in beyond if not name.startswith((package, "torch", "segapp"))} <= set(
        sys.stdlib_module_names
    )
    assert not {name for name in beyond if name.startswith("segapp.") and not name.startswith((package, *BESIDE))}


VIEWERS = (
    *("segapp.run", "segapp.config", "segapp.session.request", "segapp.commands.runs", "segapp.commands.spawn"),
    *("segapp.commands.plan", "segapp.commands.sweep", "segapp.memory.split_check", "segapp.memory.plan", "segapp.cli"),
)
LIGHT = {
    "viewers": (f"import {', '.join(VIEWERS)}", {"torch", "torchvision", "albumentations", "textual"}),
    "functions": (
        "import inspect, segapp; dir(segapp); segapp.evaluate; inspect.signature(segapp.train)", {"torch", "textual"},
    ),
    "help": (
        "import segapp.__main__, contextlib, io\nwith contextlib.suppress(SystemExit), "
        "contextlib.redirect_stdout(io.StringIO()) as said: segapp.__main__.main(['--help'])\n"
        "assert 'predict' in said.getvalue()",
        {"torch", "pydantic", "yaml", "textual"},
    ),
    "screen": ("import segapp.tui.app", {"torch", "textual.widgets._markdown", "markdown_it"}),
}  # fmt: skip
"""What shows something at once -> a statement for it, and what that must not load."""


@pytest.fixture(scope="module")
def light() -> dict[str, set[str]]:
    """The modules that each statement of `LIGHT` loads."""
    return dict(zip(LIGHT, loaded_by(*(statement for statement, _ in LIGHT.values())), strict=True))


@pytest.mark.parametrize("name", LIGHT)
def test_what_shows_something_at_once_loads_no_torch(name: str, light: dict[str, set[str]]) -> None:
    assert not LIGHT[name][1] & light[name]


def test_screen_loads_few_packages_and_modules(light: dict[str, set[str]]) -> None:
    assert "textual" in light["screen"]
    packages = {name.partition(".")[0] for name in light["screen"] if not name.startswith("_")}
    assert packages - sys.stdlib_module_names <= SCREEN_PACKAGES
    assert len(light["screen"]) <= MOST_SCREEN_MODULES, "it is to be seen within a second: import where it is used"


COMMANDS_ON_FILES = """
import sys
from pathlib import Path
from segapp.__main__ import main
if {folder!r}:
    from segapp.onboarding.init import InitRequest, propose_config
    print(*propose_config(InitRequest(Path({folder!r}), Path("own.yaml"))).lines)
for words in {commands}:
    try:
        main(words)
    except SystemExit as end:
        assert not end.code, words
print(*({heavy} & sys.modules.keys()), file=sys.stderr)
"""


def test_init_and_check_of_png_folders_load_no_torch(tiny_root: Path) -> None:
    """Except for the steps that the command times."""
    check = ["check", "--config", "own.yaml"]
    commands = [check, [*check, "--json"]]
    heavy = {"torch", "torchvision", "albumentations", "timm", "segmentation_models_pytorch", "jinja2"}
    code = COMMANDS_ON_FILES.format(folder=str(tiny_root), commands=commands, heavy=heavy)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "layout: masks" in done.stdout
    assert "no problems found" in done.stdout
    assert done.stderr.splitlines()[-1] == "", "the names of the libraries that were imported"


def test_reports_without_images_load_no_torch(tmp_path: Path) -> None:
    names = [str(tmp_path / "runs" / name) for name in ("a", "b", "c")]
    for name in names:
        RecordedRun(Path(name), steps_per_epoch=5).epoch()
    pages = [str(tmp_path / "report.html"), str(tmp_path / "compare.html")]
    commands = [
        ["report", names[0], "--no-images", "--out", pages[0]],
        ["compare", *names, "--no-images", "--html", pages[1]],
    ]
    code = COMMANDS_ON_FILES.format(
        folder="", commands=commands, heavy={"torch", "torchvision", "albumentations", "cv2"}
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "", "the names of the libraries that were imported"
    assert all("<svg" in Path(page).read_text() for page in pages)


LIBRARIES = {"torchvision", "albumentations", "timm", "segmentation_models_pytorch", "scipy", "jinja2", "tensorboard"}

RUN_COMMANDS = f"""
        import contextlib, torch, segapp.commands.evaluate, segapp.commands.predict
        from segapp.__main__ import main
        assert not {LIBRARIES} & sys.modules.keys()
        def run(*words):
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    main(list(words))
            except SystemExit as end:
                assert not end.code, words
"""


@pytest.mark.slow
def test_evaluation_loads_only_the_library_of_the_model(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Nor does it load the library of augmentation; timm imports torchvision itself."""
    models = {
        "own": {"library": "python", "name": "tests.support.own_parts:Net"},
        "torchvision": {"library": "torchvision", "name": "lraspp", "encoder": "mobilenet_v3_small"},
        "smp": {"library": "smp", "name": "Unet", "encoder": "resnet18"},
    }
    commands = []
    for name, model in models.items():
        run = segapp.train({**tiny, "model": model}, {"train.steps": 1}, run=tmp_path / name, progress=False).run
        photos, out = f"{tiny['data']['root']}/images/val", f"{tmp_path}/{name}-out"
        commands.append(f"run('predict', '{run}', '{photos}', '--out', '{out}', '--save', 'labels')")
        if name == "own":
            commands.append(f"run('eval', '{run}')")
    loaded = [modules & LIBRARIES for modules in loaded_by(*commands, after=RUN_COMMANDS)]
    of_smp = {"segmentation_models_pytorch", "timm", "torchvision"}
    assert loaded == [set(), set(), {"torchvision"}, of_smp]


def test_trainer_loads_no_textual(beyond_torch: dict[str, set[str]]) -> None:
    assert "textual" not in beyond_torch["segapp.session.session"]


def test_imports_have_no_circle() -> None:
    assert circles(import_graph()) == []


MOST_HOPS = {
    "Config to objects": 8,
    "Batch to update": 11,
    "Metric to screen": 8,
    "Command to answer": 9,
    "Checkpoint to resume": 8,
}


@pytest.mark.parametrize("flow", MOST_HOPS)
def test_flow_of_the_map_is_short_and_unbroken(flow: str) -> None:
    found = roads(flow)
    assert [problem for stops in found.values() for problem in broken_links(stops)] == []
    assert len(found) >= 2
    assert sum(hops(stops) for stops in found.values()) <= MOST_HOPS[flow]
