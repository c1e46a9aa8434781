"""The command line in processes of its own: help, errors, exit codes, signals, output."""

from __future__ import annotations

import json
import os
import re
import signal
import site
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from segapp.__main__ import main
from segapp.cli import with_resume_value
from segapp.config import load_config
from segapp.run.words import ESCAPED
from tests.support import ROOT
from tests.support.drawn_folders import IDS, draw
from tests.support.runs import events, segapp


@pytest.fixture
def config_file(tiny: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny))
    return path


def assert_one_clear_error(result: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    assert result.returncode == code, result.stderr
    assert result.stderr.startswith("error: "), result.stderr
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr, result.stderr


def test_whole_run_from_the_command_line_writes_its_files(config_file: Path, tmp_path: Path) -> None:
    result = segapp("train", "--config", "tiny.yaml", "train.epochs=2", "log.tensorboard=true", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    precision_of_a_cpu = "M parameters, 3 classes, batch 2, fp32, 2 epochs"
    for part in ("run folder: runs/tiny", precision_of_a_cpu, "data wait", "eta", "val  mIoU", "(best)", "finished"):
        assert part in result.stdout
    run = tmp_path / "runs" / "tiny"
    names = {"run.json", "config.yaml", "events.jsonl", "commands", "checkpoints", "lock"}
    assert {p.name for p in run.iterdir()} >= names
    assert any((run / "tensorboard").iterdir())
    saved = {"last.pt", "best.pt", "epoch_0001.pt", "epoch_0002.pt"}
    assert {p.name for p in (run / "checkpoints").glob("*.pt")} == saved
    kinds = [event["type"] for event in events(run) if event["type"] != "heartbeat"]
    assert (kinds[0], kinds[-1]) == ("run_start", "run_end")
    start, step = events(run, "run_start")[0], events(run, "step")[0]
    assert (start["epochs"], start["steps_per_epoch"], start["batch_size"]) == (2, 5, 2)
    assert {"epoch", "step", "loss", "lr", "images_per_s", "data_wait_frac", "grad_norm", "split"} <= step.keys()

    again = segapp("train", "--config", "tiny.yaml", "--resume", "train.epochs=2", cwd=tmp_path)
    assert (again.returncode, "already complete" in again.stdout) == (0, True)
    listed = segapp("ls", "--json", cwd=tmp_path)
    assert [row["state"] for row in json.loads(listed.stdout)] == ["finished"]
    status = json.loads(segapp("status", "tiny", "--json", cwd=tmp_path).stdout)
    assert (status["epoch"], status["step"], status["state"]) == (2, 10, "finished")
    verified = segapp("ckpt", "verify", "tiny", cwd=tmp_path)
    assert verified.returncode == 0, verified.stderr
    (row,) = [line.split() for line in verified.stdout.splitlines() if "epoch_0002.pt" in line]
    assert row[-5:-3] == ["2", "10"]  # EPOCH and STEP
    evaluated = segapp("eval", "tiny", "--split", "train", "--json", cwd=tmp_path)
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads(evaluated.stdout)["num_images"] == 10


def test_failed_start_in_an_existing_folder_is_listed(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "tiny").mkdir(parents=True)
    where = ("--run", "elsewhere/tiny")
    for _ in range(2):
        result = segapp("train", "--config", "tiny.yaml", "model.name=nowhere", *where, cwd=tmp_path)
        assert result.returncode == 2
        assert (result.stdout + result.stderr).count("model.name") == 1, result.stdout + result.stderr
    listed = segapp("ls", "elsewhere", cwd=tmp_path).stdout.splitlines()
    assert len(listed) == 2
    assert "failed" in listed[1]
    assert "model.name" in listed[1]


DDP = "parallel.mode=ddp parallel.devices=[cpu,cpu]"


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        ("train", 2, ["--config FILE is missing"]),
        ("train --config absent.yaml", 2, ["'absent.yaml' not found"]),
        ("train --config tiny.yaml data.root=nowhere", 3, ["nowhere", "images/<split>/"]),
        ("train --config tiny.yaml model.name=fcnn", 2, ["fcnn", "fcn"]),
        ("train --config tiny.yaml model.weights=lost.pt", 4, ["lost.pt"]),
        ("train --config tiny.yaml parallel.devices=cuda:7", 2, ["cuda:7"]),
        ("train --config tiny.yaml data.classes=[ground,box]", 3, [".png", "2"]),
        ("train --config tiny.yaml --resume nothing", 2, ["nothing: no such run"]),
        ("train --config tiny.yaml --config tiny.yaml", 2, ["--config is given more than once"]),
        ("train --config tiny.yaml --epochs 5", 2, ["--epochs is no option", "train.epochs=5"]),
        ("check --config tiny.yaml --batch-size=3", 2, ["train.batch_size=3 or eval.batch_size=3"]),
        ("plan --config tiny.yaml --optim.lr 0.5 --gpus 1x1GiB", 2, ["optim.lr=0.5"]),
        ("sweep --config tiny.yaml --gpu 0", 2, ["parallel.devices=0"]),
        (
            "train --config tiny.yaml --cfg-options train.epochs=5 seed=3",
            2,
            ["--cfg-options is no option", "write train.epochs=5 seed=3 without it"],
        ),
        pytest.param("train --config tiny.yaml data.root=no --detach", 3, ["no"], marks=pytest.mark.slow),
        pytest.param(f"train --config tiny.yaml data.root=no {DDP}", 3, ["no"], marks=pytest.mark.slow),
    ],
)
def test_user_error_gives_one_line_its_exit_code_and_no_run(
    config_file: Path, tmp_path: Path, arguments: str, code: int, parts: list[str]
) -> None:
    assert_one_clear_error(segapp(*arguments.split(), cwd=tmp_path), code, *parts)
    assert not list(tmp_path.glob("runs/*"))


def test_last_override_of_a_key_counts_and_a_line_says_so(config_file: Path, tmp_path: Path) -> None:
    words = ("optim.lr=0.5", "seed=3", "optim.lr=0.25", "seed=7", "name=x", "optim.lr=0.125")
    printed = segapp("train", "--config", "tiny.yaml", *words, "--print-config", cwd=tmp_path)
    assert yaml.safe_load(printed.stdout)["optim"]["lr"] == 0.125
    assert printed.stderr.splitlines() == [
        "note: optim.lr is given more than once: optim.lr=0.125 counts",
        "note: seed is given more than once: seed=7 counts",
    ]


def test_print_config_and_schema_are_valid(config_file: Path, tmp_path: Path) -> None:
    printed = segapp("train", "--config", "tiny.yaml", "optim.lr=0.5", "--print-config", cwd=tmp_path)
    assert yaml.safe_load(printed.stdout)["optim"]["lr"] == 0.5
    assert not (tmp_path / "runs").exists()
    segapp("schema", "--out", "schema.json", cwd=tmp_path)
    assert "DataConfig" in json.loads((tmp_path / "schema.json").read_text())["$defs"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["train", "--resume"], ["train", "--resume", "auto"]),
        (["train", "--resume", "--plain"], ["train", "--resume", "auto", "--plain"]),
        (["train", "--resume", "train.epochs=3"], ["train", "--resume", "auto", "train.epochs=3"]),
        (["train", "--resume", "demo"], ["train", "--resume", "demo"]),
        (
            ["train", "--resume", "a=" + "b" * 300],
            ["train", "--resume", "auto", "a=" + "b" * 300],
        ),  # too long for a file
        (["train", "--config", "x"], ["train", "--config", "x"]),
    ],
)
def test_resume_option_may_have_no_value(given: list[str], expected: list[str]) -> None:
    assert with_resume_value(given) == expected


def test_a_missing_library_is_one_line(config_file: Path, tmp_path: Path) -> None:
    """As of an OpenCV that needs libGL, on a machine without it. A fault of segapp keeps its traceback."""
    fails = (
        "import sys\nclass Finder:\n    def find_spec(self, name, path=None, target=None):\n        if name == {!r}:\n"
    )
    fails += "            raise ImportError('libGL.so.1: cannot open shared object file', name=name)\n"
    fails += "sys.meta_path.insert(0, Finder())\nfrom segapp.__main__ import main\nmain(sys.argv[1:])\n"
    train = ["train", "--config", "tiny.yaml", "--plain", "--run", "run"]
    results = {}
    for module in ("cv2", "segapp.assembly.pairs"):
        command = [sys.executable, "-c", fails.format(module), *train]
        results[module] = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert_one_clear_error(
        results["cv2"], 1, "cannot be imported (libGL.so.1: cannot open", "segapp doctor says what to install"
    )
    assert results["cv2"].stderr.count("\n") == 1
    assert "Traceback" in results["segapp.assembly.pairs"].stderr


@pytest.mark.parametrize("module", ["typer", "torch"])
def test_interrupt_during_an_import_is_no_traceback(config_file: Path, tmp_path: Path, module: str) -> None:
    (tmp_path / "interrupted.py").write_text(
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process inherits SIG_IGN\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            print('importing', name, flush=True)\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "from segapp.__main__ import main\n"
        "sys.meta_path.insert(0, Finder())\n"
        "main(['train', '--config', 'tiny.yaml', '--plain', '--run', 'run'])\n"
    )
    result = subprocess.run([sys.executable, "interrupted.py"], cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == f"importing {module}"
    assert (result.returncode, result.stderr) == (130, "stopped by SIGINT\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("place", ["watch_signals", "_with_home", "announce_torch", "trusting", "lines_while"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_signal_before_the_command_is_no_traceback(tmp_path: Path, place: str, name: str) -> None:
    code = (
        "import signal, segapp.__main__ as program\n"
        f"signal.signal(signal.{name}, signal.SIG_DFL)  # a background process may inherit SIG_IGN\n"
        "def stop(*arguments):\n"
        f"    print('in', {place!r}, flush=True)\n"
        f"    signal.raise_signal(signal.{name})\n"
        f"program.{place} = stop\n"
        "program.main(['--version'])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout == f"in {place}\n"
    assert (result.returncode, result.stderr) == (128 + signal.Signals[name], f"stopped by {name}\n")


@pytest.mark.parametrize(("name", "handler"), [("SIGTERM", "SIG_DFL"), ("SIGINT", "default_int_handler")])
def test_signal_while_python_exits_is_no_traceback(tmp_path: Path, name: str, handler: str) -> None:
    code = (
        "import atexit, signal, sys, segapp.__main__ as program\n"
        f"signal.signal(signal.{name}, signal.{handler})\n"
        f"atexit.register(lambda: (print('exits', flush=True), signal.raise_signal(signal.{name})))\n"
        "sys.argv[1:] = ['--version']\n"
        "program.main()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "exits"
    assert (result.returncode, result.stderr) == (-signal.Signals[name], "")


@pytest.mark.parametrize(
    "words",
    [
        ("no\u202esuch",),
        ("train", "--no\u202esuch"),
        ("train", "--detatch\u202e"),
        ("predict", "a", "b", "--out", "c", "--save", "d", "--no\u202esuch"),
        ("ls", "a", "b\u2066\x1b[2J\x9b\u200b\U000e0041"),
        ("ctl",),
    ],
)
def test_usage_errors_escape_what_hides_text(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = segapp(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: ")
    assert not set(done.stderr) & set("\u202e\u2066\x1b\x9b\u200b\U000e0041")
    assert words == ("ctl",) or "\\u20" in done.stderr, done.stderr


COMMANDS = """
import sys
sys.path += sys.argv[1].split(":")
import segapp.onboarding.init
from segapp.__main__ import main
segapp.onboarding.init.weights_problem = lambda name: "not looked for"  # by importing torch and timm
for words in sys.argv[2].split("|"):
    try:
        main(words.split(","))
    except SystemExit as end:
        print("ended with", end.code, flush=True)
"""


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({"LC_ALL": "C", "PYTHONUTF8": "0"}, "Stra\\xdfe \\u2603"),  # file names in ASCII, too
        pytest.param({"PYTHONIOENCODING": "cp1252"}, "Straße \\u2603", marks=pytest.mark.slow),
    ],
)
def test_stream_of_another_encoding_gets_escapes(environ: dict[str, str], shown: str, tmp_path: Path) -> None:
    folder = tmp_path / "Straße ☃"
    draw(folder, ["ä ☃ 1", "ä ☃ 22", "ä ☃ 333"], "images/{}.png", "masks/{}.png", IDS)
    (folder / "classes.txt").write_text("Himmel\nStraße ☃\nGrün\n", encoding="utf-8")
    commands = (["init", folder.name, "--out", "é.yaml"], ["check", "--config", "é.yaml"], ["status", folder.name])
    words = "|".join(map(",".join, commands))
    # Without `site`, which reads the place of the clone in another encoding.
    done = subprocess.run(
        [sys.executable, "-S", "-c", COMMANDS, os.pathsep.join([str(ROOT), *site.getsitepackages()]), words],
        cwd=tmp_path, env={**os.environ, **environ}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=280,
    )  # fmt: skip
    said = done.stdout.decode(environ.get("PYTHONIOENCODING", "ascii"))
    assert re.findall(r"ended with (\S+)", said) == ["0", "0", "2"], said
    out, checked, error = said.split("ended with ")[:3]
    assert f"classes: Himmel, {shown}, " in out
    assert f"\n{shown} " in checked
    assert f"error: {shown}: no such run" in error
    assert "written: " in out
    assert (tmp_path / "é.yaml").is_file()
    config = load_config(tmp_path / "é.yaml")
    assert config.data.classes == ["Himmel", "Straße ☃", "Grün"]  # the file is UTF-8 in every locale


def test_signs_without_an_encoding_become_similar_ones() -> None:
    assert "a → b · 3 ± 1 … é\udce9".encode("ascii", ESCAPED) == b"a > b . 3 ~ 1 ~ \\xe9\\udce9"
    assert "→é".encode("latin-1", ESCAPED) == b">\xe9"


def test_home_is_expanded_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("a~").mkdir()
    for word, written in (("--out=~/a=b", tmp_path / "a=b"), ("--out=./~", Path("~")), ("--out=a~/b", Path("a~/b"))):
        assert exit_code(["schema", word]) == 0
        assert written.is_file()
    assert exit_code(["schema", "--out", "~/c"]) == 0
    assert (tmp_path / "c").is_file()


def exit_code(words: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)
