"""Import of own parts: where modules are found, what their errors say, and how options are checked."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.assembly.own_parts import own_criterion, own_optimizer, own_schedule
from segapp.assembly.pairs import own_data
from segapp.config import DataConfig, LossTerm, OptimConfig, ScheduleConfig
from segapp.custom.loading import ARGUMENTS, build_part, load_part
from segapp.custom.names import find_source, is_component
from segapp.custom.sources import read_sources
from segapp.datasets.augment import TrainTransform
from segapp.errors import ConfigError
from segapp.models import build_model

pytestmark = pytest.mark.usefixtures("trusted_code")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder of its own; the Python path is restored afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "none"))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a.b:C", True), ("./a.py:C.make", True), ("ce", False), ("a:", False), (":C", False), ("a b:C", False)],
)
def test_part_names_have_a_module_and_a_factory(name: str, expected: bool) -> None:
    assert is_component(name) is expected


def test_part_of_an_installed_package_is_imported() -> None:
    assert load_part("torch.optim:RMSprop", "optim.name") is torch.optim.RMSprop


def test_module_of_the_current_folder_is_imported(folder: Path) -> None:
    (folder / "parts_in_folder.py").write_text("def make(width): return width")
    assert load_part("parts_in_folder:make", "model.name")(width=3) == 3


FILES = {
    "nets/own_file.py": "import blocks_of_file.conv.small as small\nclass Net:\n    class Wide: width = small.WIDTH\n"
    "def late():\n    from late_of_file import DEPTH\n    return DEPTH",
    "nets/helper_of_file.py": "WIDTH = 4",
    "nets/blocks_of_file/__init__.py": "from .conv import *",
    "nets/blocks_of_file/conv/small.py": "from helper_of_file import WIDTH\nimport json, torch",
    "nets/late_of_file.py": "DEPTH = 3",
    "nets/json.py": "raise SystemExit",
    "nets/torch.py": "raise SystemExit",
    "nets/unused_of_file.py": "raise SystemExit",
}
UNUSED = {"nets/json.py", "nets/torch.py", "nets/unused_of_file.py"}


def write(folder: Path, files: dict[str, str]) -> None:
    """Writes files by their names."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_file_may_import_its_neighbors_at_any_time(folder: Path) -> None:
    """Also from packages, with and without `__init__.py`, and in a function; installed modules come first."""
    write(folder, FILES)
    assert load_part("nets/own_file.py:Net.Wide", "model.name").width == 4
    assert load_part("nets/own_file.py:late", "model.name")() == 3
    (folder / "nets" / "blocks_of_file" / "planted.py").touch()
    for name in ("unused_of_file", "blocks_of_file.planted", "blocks_of_file.conv.planted"):
        assert importlib.util.find_spec(name) is None
    kept = read_sources("nets/own_file.py:Net")
    assert kept is not None
    assert {str(path.relative_to(folder)) for path in kept.paths} == FILES.keys() - UNUSED


def test_source_is_found_without_an_import(folder: Path) -> None:
    package = folder / "fails_on_import"
    package.mkdir()
    for name in ("__init__.py", "inner.py"):
        (package / name).write_text("raise SystemExit")
    assert find_source("fails_on_import.inner:f") == (package / "inner.py").resolve()
    assert find_source("nowhere.inner:f") is None


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "no_such_module_here:f", "no module no_such_module_here on the Python path or in the current folder"),
        ("", "missing.py:f", "there is no file missing.py"),
        ("import no_such_module_here", "own_a:f", "importing it needs the module no_such_module_here"),
        ("def f(:", "own_b:f", "SyntaxError: .*own_b.py, line 1"),
        ("1 / 0", "own_c:f", "ZeroDivisionError: division by zero .own_c.py, line 1"),
        ("raise SystemExit(3)", "own_d:f", "importing it fails with SystemExit: 3"),
        ("def make(): pass", "own_e:mak", "has no 'mak': did you mean make?"),
        ("WIDTH = 3", "own_f:WIDTH", "is a int: name a class or a function"),
        ("x = 1", "own-g.py:x", "rename the file"),
        ("x = 1", "__main__.py:x", "rename the file"),
        ("x = 1", "random.py:x", "Python finds another module random .* before .*random.py: rename the file"),
        ("open('own_j.py', 'w').close(); __import__('own_j')", "own_h:f", "own_j: .* name it in an import statement"),
        ("#" * 2**24 + "\nx = 1", "own_i.py:x", "own_i.py: .* more than 16 MiB: install them as a package"),
    ],
)
def test_import_problems_name_the_next_move(folder: Path, text: str, name: str, message: str) -> None:
    stem = name.partition(":")[0].removesuffix(".py")
    if not stem.startswith(("no_such", "missing")):
        (folder / f"{stem}.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_part(name, "model.name")


def test_all_wrong_options_are_named_at_once(folder: Path) -> None:
    (folder / "own_options.py").write_text("def make(num_classes, *, width, depth=1, scale): pass")
    with pytest.raises(ConfigError) as error:
        build_part(
            "own_options:make", "model.name", {"widht": 3, "num_classes": 2, "scale": 1}, offered={"num_classes": 5}
        )
    for problem in ("model.options.widht is not an argument", "did you mean width?", "num_classes is given by segapp"):
        assert problem in str(error.value)
    assert "model.options.width is missing" in str(error.value)


def test_factory_gets_only_what_it_takes(folder: Path) -> None:
    (folder / "own_offers.py").write_text("def make(first, *, width=1): return first, width")
    assert build_part("own_offers:make", "loss.name", {"width": 2}, 7, offered={"ignore_index": 255}) == (7, 2)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('no width')", "ValueError: no width"),
        ("assert num_classes < 2", "AssertionError: assert num_classes < 2"),
    ],
)
def test_failing_factory_is_a_config_error(folder: Path, body: str, message: str) -> None:
    name = f"own_failing_{body[0]}"
    (folder / f"{name}.py").write_text(f"def make(num_classes):\n    {body}")
    with pytest.raises(ConfigError, match=rf"creating it fails with {message} \({name}.py, line 2\)"):
        build_part(f"{name}:make", "model.name", {}, offered={"num_classes": 3})


# --- the contracts name the arguments that segapp gives

NAME = f"{__name__}:record"
given: dict[str, Any] = {}


def record(
    groups: Any = None, *, num_classes: Any = None, in_channels: Any = None, ignore_index: Any = None,
    align_corners: Any = None, aux_weight: Any = None, weight: Any = None, root: Any = None, split: Any = None,
    lr: Any = None, total_steps: Any = None, steps_per_epoch: Any = None, crop_px: Any = None,
) -> Callable[[int], float]:  # fmt: skip
    """A factory that takes everything and notes what it is given."""
    given.update({name: value for name, value in locals().items() if value is not None})
    return lambda _: 1.0


SHARED = torch.nn.Conv2d(3, 2, 1)


def shared_loss() -> torch.nn.Module:
    """A factory whose module others may use too."""
    return SHARED


def test_loss_of_a_training_is_a_frozen_copy() -> None:
    criterion = own_criterion(LossTerm(name=f"{__name__}:shared_loss"), 3, 255, None)
    for own, shared in zip(criterion.parameters(), SHARED.parameters(), strict=True):
        assert torch.equal(own, shared)
        assert (own is shared, own.requires_grad, shared.requires_grad) == (False, False, True)


USES: dict[str, Callable[[], Any]] = {
    "model": lambda: build_model("python", NAME, 3),
    "loss": lambda: own_criterion(LossTerm(name=NAME), 3, 255, torch.ones(3)),
    "data": lambda: own_data(DataConfig(format=NAME, root="there", crop_px=(8, 8)), "train"),
    "optim": lambda: own_optimizer(OptimConfig(name=NAME, lr=0.1), [{"params": []}]),
    "schedule": lambda: own_schedule(ScheduleConfig(name=NAME), total_steps=5, steps_per_epoch=2),
    "transform": lambda: TrainTransform((32, 32), [{NAME: {}}], ignore_index=255),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_contract_names_what_a_factory_is_given(kind: str) -> None:
    given.clear()
    with contextlib.suppress(ConfigError):  # what the factory makes is no network, ...
        USES[kind]()
    names, num_positional = ARGUMENTS[kind]
    assert set(given) - {"groups"} == set(names)
    assert ("groups" in given) == bool(num_positional)
