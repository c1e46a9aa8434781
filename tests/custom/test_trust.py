"""Code that a config names: it runs if the user named it here; a stranger's is refused before it is imported."""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import py_compile
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import segapp
from segapp.__main__ import main
from segapp.config import check_code, load_config, load_runnable, validate_config
from segapp.config.trust import named_code
from segapp.custom.loading import load_part
from segapp.custom.trust import NamedCode, UnknownCodeError, accept_code, check_known, trusting
from segapp.errors import ConfigError
from tests.support import ROOT
from tests.support.programs import segapp as run_segapp
from tests.support.runs import events
from tests.support.terminals import terminal

FILE = """
from pathlib import Path
from neighbor_of_it import Plain

Path({marker!r}).touch()

def Net(num_classes, width=4, zoom=1):
    return Plain(num_classes, width)
"""


@pytest.fixture(autouse=True)
def _no_trust(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SEGAPP_TRUST_PARTS", "")
    monkeypatch.syspath_prepend(str(tmp_path / "none"))  # what is imported from a folder is not found by other tests


@pytest.fixture
def project(tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stranger's folder, entered: `run.yaml` names `./net_of_it.py:Net`, whose import makes the file `marker`."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "net_of_it.py").write_text(FILE.format(marker=str(tmp_path / "marker")))
    (folder / "neighbor_of_it.py").write_text("from tests.support.own_parts import Net as Plain")
    write(folder / "run.yaml", tiny, library="python", name="./net_of_it.py:Net", options={"width": 4, "zoom": 2})
    monkeypatch.chdir(folder)
    return folder


def write(path: Path, tiny: dict[str, Any], **model: Any) -> Path:
    """Writes a config of one epoch with a model section."""
    path.write_text(yaml.safe_dump({**tiny, "model": model, "train": {"epochs": 1, "batch_size": 2}}))
    return path


def call(marker: Path) -> dict[str, Any]:
    """A model section whose factory would make a file."""
    return {"library": "python", "name": "subprocess:getoutput", "options": {"cmd": f"touch {marker}"}}


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets what only this process and its children know; the record stays."""
    monkeypatch.setenv("SEGAPP_TRUST_PARTS", "")


COMMANDS = [
    "train --plain --config run.yaml train.epochs=1",
    "train --detach --config run.yaml",
    "train --smoke --config run.yaml",
    "train --plain --config run.yaml parallel.mode=ddp parallel.devices=[cpu,cpu]",
    "plan --config run.yaml seed=1 --gpus 2x8GiB",
    "check --config run.yaml",
    "check-part --config run.yaml",
    "sweep --config run.yaml seed=1,2",
    "eval weights.safetensors --config run.yaml",
    "predict weights.safetensors image.png --config run.yaml --out out",
    "export weights.safetensors --config run.yaml --out out.onnx",
    "launch --nnodes 1 --nproc-per-node 2 -- train --config run.yaml --run there",
]


@pytest.mark.parametrize(
    ("command", "kind"), [*((command, "file") for command in COMMANDS), (COMMANDS[0], "call"), (COMMANDS[5], "call")]
)
def test_command_without_a_terminal_refuses_a_strangers_code(
    command: str,
    kind: str,
    project: Path,
    tiny: dict[str, Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("weights.safetensors", "image.png"):
        (project / name).write_bytes(b"")
    if kind == "call":
        section = call(tmp_path / "marker")
        write(project / "run.yaml", tiny, **section)
    if command.startswith("check "):  # it reads only the data
        config = yaml.safe_load((project / "run.yaml").read_text())
        model = config.pop("model")
        config["data"] |= {"format": model["name"], "options": model["options"]}
        (project / "run.yaml").write_text(yaml.safe_dump(config))
    for name in ("PYTHONSAFEPATH", "TORCH_CPP_LOG_LEVEL"):  # which the program sets for its children
        monkeypatch.setenv(name, os.environ.get(name, ""))
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    said = capfd.readouterr().err
    assert ended.value.code == 2, said
    assert "names code that would run: " in said
    assert ("net_of_it.py:Net(width=4, zoom=2)" if kind == "file" else "subprocess:getoutput(cmd=") in said
    assert "add --trust-parts" in said
    assert not (tmp_path / "marker").exists()
    assert not (project / "runs").exists()


def test_terminal_asks_once_and_the_record_answers_afterwards(project: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    words = ("check-part", "--config", "run.yaml")
    for answer, code in (("\r", 2), ("y\r", 0)):
        assert not marker.exists()
        with terminal(*words, cwd=project) as screen:
            screen.wait_for("Run it? [y/N]")
            assert b"model.name = net_of_it.py:Net(width=4, zoom=2)" in screen.output
            files = f"{project / 'net_of_it.py'} with neighbor_of_it.py\r\n"
            assert files.replace("\r\n", "").encode() in screen.output.replace(b"\r\n", b"")
            screen.type(answer)
            assert screen.wait(60) == code
    assert marker.exists()
    load_runnable("run.yaml")


def test_question_is_escaped_and_a_long_one_is_not_asked(project: Path, tiny: dict[str, Any], tmp_path: Path) -> None:
    section = call(tmp_path / "marker")
    section["options"]["cmd"] += " \x1b[2J\u202e"
    write(project / "run.yaml", tiny, **section)
    with terminal("check-part", "--config", "run.yaml", cwd=project) as screen:
        screen.wait_for("Run it? [y/N]")
        assert b"\x1b[2J" not in screen.output
        assert "\u202e".encode() not in screen.output
        screen.type("n\r")
        assert screen.wait(60) == 2
    section["options"]["cmd"] = "echo hello" + " " * 1000 + section["options"]["cmd"]
    write(project / "run.yaml", {**tiny, "loss": {"name": "os:putenv", "options": {"a": " " * 900}}}, **section)
    with terminal("check-part", "--config", "run.yaml", cwd=project) as screen:
        assert screen.wait(60) == 2
    assert b"Run it?" not in screen.output, "what is out of sight would be accepted too"


def test_code_on_the_command_line_is_the_users_own(project: Path, tiny: dict[str, Any], tmp_path: Path) -> None:
    write(project / "plain.yaml", tiny, library="torchvision", name="lraspp", encoder="mobilenet_v3_small")
    own = ["model.library=python", "model.name=./net_of_it.py:Net", "model.encoder=null"]
    load_runnable("plain.yaml", own)
    assert run_segapp("check-part", "net_of_it.py:Net", "--as", "model", cwd=project).returncode == 0
    assert (tmp_path / "marker").exists()
    config = validate_config({**tiny, "optim": {"name": "torch.optim:RMSprop"}})
    with pytest.raises(UnknownCodeError, match=r"torch\.optim:RMSprop"):
        check_code(config, Path("run.yaml"), own)


def test_call_that_was_accepted_runs_with_no_other_options(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "run.yaml", tiny, **call(tmp_path / "one"))
    with trusting(True):
        load_runnable(path)
    another_process(monkeypatch)
    load_runnable(path)
    another_process(monkeypatch)
    write(path, tiny, **call(tmp_path / "another"))
    with pytest.raises(UnknownCodeError, match="another"):
        load_runnable(path)
    about = {"format": 1, "step": 1, "epoch": 1, "position": 0}
    stored = {"config": load_config(path).model_dump(mode="json"), "classes": tiny["data"]["classes"]}
    state = {**stored, "model": {}, "checkpoint": about}
    torch.save(state, tmp_path / "evil.pt")
    done = run_segapp("eval", tmp_path / "evil.pt", cwd=tmp_path)
    assert (done.returncode, "names code that would run" in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "another").exists()


def test_transforms_and_losses_are_asked_with_their_options(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(cmd: str) -> Any:
        entry = {"OneOf": {"transforms": [{"subprocess:getoutput": {"cmd": cmd}}]}}
        loss = {"plus": [{"name": "subprocess:getoutput", "options": {"cmd": cmd}}]}
        return validate_config({**tiny, "loss": loss, "data": {**tiny["data"], "augment": ["HorizontalFlip", entry]}})

    accept_code(named_code(config("true")).values())
    another_process(monkeypatch)
    check_code(config("true"), tmp_path)
    another_process(monkeypatch)
    with pytest.raises(UnknownCodeError) as raised:
        check_code(config("false"), tmp_path)
    assert sorted(raised.value.named) == ["data.augment[1].OneOf.transforms[0]", "loss.plus.0.name"]


@pytest.mark.parametrize(
    "entry",
    [
        {"a:f": {}, "b:g": {}},
        {"OneOf": [{"a:f": {}, "b:g": {}}]},
        {"A.B": {"a:f": {}}, "A": {"B": {"b:g": {}}}},
        {"a:f": {"b:g": {}}},
    ],
)
def test_no_transform_hides_another(entry: Any, tiny: dict[str, Any]) -> None:
    config = validate_config(tiny)
    data = config.data.model_copy(update={"augment": ["HorizontalFlip", entry]})
    found = named_code(config.model_copy(update={"data": data}))
    assert {code.name for code in found.values()} == {"a:f", "b:g"}
    assert all(key.startswith("data.augment[1]") for key in found)


def accepted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Accepts the code of `run.yaml`, and returns the config; then another process begins."""
    with trusting(True):
        config = load_runnable("run.yaml")
    another_process(monkeypatch)
    return config


def change_file(monkeypatch: pytest.MonkeyPatch, name: str = "net_of_it.py") -> None:
    """Changes the file of the code; then another process begins."""
    with open(name, "a") as file:
        file.write("# changed\n")
    another_process(monkeypatch)


def test_ones_own_file_and_options_may_change_in_ones_own_config(
    project: Path, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = accepted(monkeypatch)
    change_file(monkeypatch)
    with pytest.raises(UnknownCodeError):
        check_code(stored, project / "run" / "config.yaml")  # in a run or a checkpoint, the content must be equal
    load_runnable("run.yaml", ["model.options.width=8"])
    another_process(monkeypatch)
    check_code(load_config("run.yaml", ["model.options.width=8"]), project / "run")  # what a run of it has stored
    write(project / "other.yaml", tiny, library="python", name="./net_of_it.py:Net", options={"width": 16})
    another_process(monkeypatch)
    with pytest.raises(UnknownCodeError):
        load_runnable("other.yaml")  # another config has not named it with these options


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("net_of_it.py", "mode"),
        ("neighbor_of_it.py", "mode"),
        ("run.yaml", "mode"),
        ("run.yaml", "owner"),
        ("net_of_it.py", "group"),
    ],
)
def test_file_that_others_may_write_must_not_change(
    project: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: str
) -> None:
    accepted(monkeypatch)
    if change != "mode" and os.getuid() != 0:
        pytest.skip("only root gives a file to another user or group")
    (project / name).chmod(0o666 if change == "mode" else 0o664)
    if change != "mode":
        os.chown(project / name, 65534 if change == "owner" else -1, 65534)
    load_runnable("run.yaml")
    change_file(monkeypatch)
    with pytest.raises(UnknownCodeError):
        load_runnable("run.yaml")


@pytest.mark.usefixtures("project")
def test_group_of_ones_own_may_write_ones_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The umask 002 of many systems, where each user has a group."""
    user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(os.getgid())
    if user.pw_name != group.gr_name or {*group.gr_mem} - {user.pw_name}:
        pytest.skip("this user has no group of their own")
    accepted(monkeypatch)
    for name in ("net_of_it.py", "run.yaml"):
        Path(name).chmod(0o664)
    change_file(monkeypatch)
    load_runnable("run.yaml")


OPTIONS = {"command": "touch MARKER"}
SECTIONS: dict[str, Any] = {
    "model": lambda name: {"model": {"library": "python", "name": name, "options": OPTIONS}},
    "loss": lambda name: {"loss": {"name": name, "options": OPTIONS}},
    "optim": lambda name: {"optim": {"name": name, "options": OPTIONS}},
    "schedule": lambda name: {"schedule": {"name": name, "options": OPTIONS}},
    "data.format": lambda name: {"data": {"format": name, "options": OPTIONS}},
    "data.augment": lambda name: {"data": {"augment": [{name: OPTIONS}]}},
}
"""What names code in a config."""


NAMES = [
    "segapp.losses.overlap:torch.os.system",
    "segapp.losses.cross_entropy:CriterionCE",
    "segapp.losses.d/x.py:f",
    "segapp.custom.loading:load_part",
    "torch.hub:load",
]


@pytest.mark.parametrize(
    ("section", "name"), [*((section, NAMES[0]) for section in SECTIONS), *(("model", name) for name in NAMES[1:])]
)
def test_names_within_installed_packages_are_not_known(
    project: Path, tiny: dict[str, Any], section: str, name: str
) -> None:
    (project / "segapp.losses.d").mkdir()
    (project / "segapp.losses.d" / "x.py").write_text("from pathlib import Path; Path('MARKER').touch()\ndef f(): ...")
    changes = SECTIONS[section](name)
    data = {**tiny["data"], **changes.get("data", {})}
    (project / "evil.yaml").write_text(yaml.safe_dump({**tiny, **changes, "data": data}))
    with pytest.raises(UnknownCodeError, match=f"{section}.*{re.escape(name)}"):
        load_runnable("evil.yaml")
    with pytest.raises(ConfigError, match="was not accepted"):
        load_part(name, section)
    assert not (project / "MARKER").exists()


def test_file_is_known_by_all_its_names(project: Path) -> None:
    accept_code([NamedCode("./net_of_it.py:Net", {"width": 4})])
    for name in ("net_of_it.py:Net", "../project/net_of_it.py:Net", f"{project}/net_of_it.py:Net"):
        assert NamedCode(name, {"width": 4}).marks == NamedCode("./net_of_it.py:Net", {"width": 4}).marks
        assert NamedCode(name, {"width": 5}).marks[1:] != NamedCode("./net_of_it.py:Net", {"width": 4}).marks[1:]
    assert NamedCode("./net_of_it.py:Other", {}).marks[0] != NamedCode("./net_of_it.py:Net", {}).marks[0]


def test_file_outside_or_in_another_folder_is_other_code(
    project: Path, tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted(monkeypatch)
    other = tmp_path / "other\nproject subprocess:getoutput"
    other.mkdir()
    for name in ("run.yaml", "net_of_it.py"):
        (other / name).write_bytes((project / name).read_bytes())
    monkeypatch.chdir(other)
    with pytest.raises(UnknownCodeError):
        load_runnable("run.yaml")
    outside = tmp_path / "outside.py"
    outside.write_text("def Net(num_classes): pass\n")
    write(other / "run.yaml", tiny, library="python", name=f"{outside}:Net")
    accepted(monkeypatch)
    change_file(monkeypatch, str(outside))
    with pytest.raises(UnknownCodeError):
        load_runnable("run.yaml")


@pytest.mark.usefixtures("project")
def test_record_belongs_to_the_user_only(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        accepted(monkeypatch)
    finally:
        os.umask(before)
    path = Path(os.environ["HOME"]) / ".local" / "state" / "segapp" / "parts"
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    path.write_text("os:system\t\nx\n[1\n" + path.read_text())  # of an older version, torn
    load_runnable("run.yaml")
    path.parent.chmod(0o777)  # anyone could have written it
    another_process(monkeypatch)
    with pytest.raises(UnknownCodeError):
        load_runnable("run.yaml")


def test_children_know_the_answer_without_a_record(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    config = load_config("run.yaml")
    with pytest.raises(UnknownCodeError):
        load_runnable("run.yaml")
    accept_code(named_code(config).values(), project / "run.yaml")
    check_code(config, project / "run")
    with pytest.raises(ConfigError, match="was not accepted"):
        load_part("subprocess:getoutput", "model.name")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    for options, is_known in (("", True), (", ['model.options.width=5']", False)):
        code = f"from segapp.config import load_runnable; load_runnable('run.yaml'{options})"
        done = subprocess.run([sys.executable, "-c", code], env=environ, check=False, capture_output=True, text=True)
        assert ("UnknownCodeError" in done.stderr, done.returncode == 0) == (not is_known, is_known)


@pytest.mark.parametrize(
    "words", ["--plain parallel.mode=ddp parallel.devices=[cpu,cpu]", "--detach"], ids=["ranks", "detached"]
)
def test_children_of_a_training_know_the_answer(words: str, project: Path, tmp_path: Path) -> None:
    command = ("train", "--config", "run.yaml", "--run", "there", "--trust-parts", *words.split())
    done = run_segapp(*command, cwd=project, SEGAPP_TEST_FORK="1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "marker").exists()
    deadline_s = time.monotonic() + 60
    while not (ends := events(project / "there", "run_end")):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    assert ends[-1]["status"] == "finished"


def test_python_refuses_a_file_and_trusts_its_own_values(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnknownCodeError, match="trust_parts=True"):
        segapp.train("run.yaml", run="one", progress=False)
    assert not (tmp_path / "marker").exists()
    segapp.train("run.yaml", run="one", progress=False, trust_parts=True)
    assert (tmp_path / "marker").exists()
    assert "1" not in os.environ["SEGAPP_TRUST_PARTS"].split(), "it holds for one call"
    values = load_config("run.yaml", ["model.options.width=5"]).model_dump(mode="json")
    segapp.train(values, run="two", progress=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    another_process(monkeypatch)
    with pytest.raises(UnknownCodeError):
        segapp.load("two")
    assert segapp.load("two", trust_parts=True).classes


def test_local_file_that_hides_a_shipped_config_is_reported(project: Path) -> None:
    (project / "demo.yaml").write_text(json.dumps({"name": "planted"}))
    done = run_segapp("train", "--config", "demo.yaml", "--print-config", cwd=project)
    assert "note: reading demo.yaml in this folder, not the shipped config" in done.stderr
    done = run_segapp("train", "--config", "camvid.yaml", "--print-config", cwd=project)
    assert "note: reading" not in done.stderr


# --- what runs is what was compared

OWN = {
    "own_part.py": "import own_neighbor\nmake = own_neighbor.make\ndef late():\n    from own_late import make as m\n"
    "    return m()",
    "own_neighbor.py": "make = lambda: 'accepted'",
    "own_late.py": "make = lambda: 'accepted'",
}
PLANTED = "make = late = lambda: 'planted'"
CALLS = "print(*(load_part(f'own_part.py:{name}', 'loss.name')() for name in ('make', 'late')))"
LOAD = f"from segapp.custom.loading import load_part; {CALLS}"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[NamedCode]:
    """A current folder with a file that imports two neighbors, one of them late, and its two components."""
    monkeypatch.chdir(tmp_path)
    for name, text in OWN.items():
        (tmp_path / name).write_text(text)
    return [NamedCode(f"own_part.py:{name}", {}) for name in ("make", "late")]


def output_of(code: str, *words: str, is_safe: bool = True) -> str:
    """Runs code in a child; without `is_safe`, the current folder is on its path. Returns what it prints."""
    command = [sys.executable, *(["-P"] if is_safe else []), "-c", code, *words]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, check=False, capture_output=True, text=True, timeout=280)
    return done.stdout.strip() or done.stderr


@pytest.mark.parametrize("name", OWN)
def test_compiled_module_next_to_accepted_code_does_not_run(name: str, own: list[NamedCode]) -> None:
    Path(name).write_text(PLANTED)
    py_compile.compile(name, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    Path(name).write_text(OWN[name])
    python = output_of("import own_part; print(own_part.make(), own_part.late())", is_safe=False)
    assert "planted" in python, "Python itself runs the compiled one"
    accept_code(own)
    assert output_of(LOAD) == "accepted accepted"


CHECK = """
from pathlib import Path
from segapp.custom.trust import NamedCode, check_known
named = {'loss.name': NamedCode('own_part.py:make', {})}
check_known(named, Path('c.yaml').resolve(), ['own_part.py:make'], is_stored=False)
"""
CHANGED = f"""
import os, subprocess, sys
from pathlib import Path
from segapp.custom.loading import load_part
from segapp.custom.trust import NamedCode, accept_code
config = Path('c.yaml').resolve()
config.touch()
accept_code([NamedCode('own_part.py:make', {{}}), NamedCode('own_part.py:late', {{}})], config)
Path(sys.argv[1]).parent.mkdir(exist_ok=True)
Path(sys.argv[1]).write_text({PLANTED!r})
{CALLS}
os.environ['SEGAPP_TRUST_PARTS'] += ' 1'
for code in ({LOAD!r}, {CHECK!r}):
    print(subprocess.run([sys.executable, '-P', '-c', code], capture_output=True, text=True).stderr)
"""


@pytest.mark.parametrize("name", [*OWN, "own_neighbor/__init__.py", "own_late/__init__.py"])
@pytest.mark.usefixtures("own")
def test_content_that_changes_after_the_comparison_does_not_run(name: str) -> None:
    """Neither in this process nor in a child, although that accepts any code of which its parent has no content."""
    here, child = output_of(CHANGED, name).split("\n", 1)
    assert here == "accepted accepted"
    said = "own_part.py:make has changed since it was accepted, so it does not run: start again"
    assert child.count(f"ConfigError: {said}") == 2, "neither is it the user's own edit"
    assert "planted" in output_of("import own_part; print(own_part.make(), own_part.late())", is_safe=False)


def test_neighbors_are_compared_and_other_files_are_not(own: list[NamedCode], monkeypatch: pytest.MonkeyPatch) -> None:
    def is_known() -> bool:
        another_process(monkeypatch)
        with contextlib.suppress(UnknownCodeError):
            check_known({"loss.name": NamedCode(own[1].name, {})}, Path("c.yaml").resolve(), [], is_stored=True)
            return True
        return False

    accept_code(own, Path("c.yaml"))
    Path("other.py").write_text(PLANTED)
    assert is_known()
    Path("own_late.py").write_text(PLANTED)
    assert not is_known()
    Path("own_late.py").write_text(OWN["own_late.py"])
    assert is_known()
    Path("own_neighbor").mkdir()
    assert is_known(), "a folder without modules comes after a file"
    Path("own_neighbor", "__init__.py").write_text(PLANTED)
    assert not is_known()


EDITED = """
from pathlib import Path
from segapp.custom.loading import load_part
from segapp.custom.trust import NamedCode, accept_code, trusting
for text in ("first", "second"):
    Path("own_neighbor.py").write_text(f"make = lambda: {text!r}")
    accept_code([NamedCode("own_part.py:make", {})])
    print(load_part("own_part.py:make", "loss.name")())
Path("other").mkdir()
Path("other/another.py").write_text("def make(): import own_late")
Path("other/own_late.py").touch()
with trusting(True):
    try:
        load_part("other/another.py:make", "loss.name")
    except Exception as error:
        print(error)
"""


@pytest.mark.usefixtures("own")
def test_edited_code_is_imported_again_but_no_namesake() -> None:
    first, second, error = output_of(EDITED).splitlines()
    assert (first, second) == ("first", "second")
    assert "Python finds another module own_late" in error, "which no function has imported yet"


def test_file_is_not_confused_with_another_of_its_name(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own" / "net_of_it.py"
    own.parent.mkdir()
    own.write_text("def make(): return 1\n")
    accept_code([NamedCode(f"{own}:make", {})])
    monkeypatch.syspath_prepend(str(project))
    with pytest.raises(ConfigError, match="Python finds another module net_of_it"):
        load_part(f"{own}:make", "model.name")
    assert not (tmp_path / "marker").exists(), "the other file was imported"
