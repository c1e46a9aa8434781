"""Configs and command lines as people, and others, write them (C01 to C05)."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from segapp.config import RunConfig, dump_config, load_config
from segapp.config.words import known_keys
from segapp.errors import ConfigError
from segapp.run.words import printable
from tests.support.fault_runs import case
from tests.support.hostile_files import CONTROL, MARKUP, is_inert
from tests.support.runs import segapp

pytestmark = pytest.mark.faults

BASE = "name: x\ndata: {format: camvid, root: d}\n"


def refused(tmp_path: Path, text: str | bytes, *words: str, overrides: Sequence[str] = ()) -> None:
    """A config is refused in words that a terminal can be shown; the program ends with exit code 2 then."""
    path = tmp_path / "c.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert ConfigError.exit_code == 2
    assert is_inert(printable(str(caught.value)))
    for word in words:
        assert word in str(caught.value)


def program(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`train --print-config`: it needs neither data nor torch."""
    done = segapp("train", "--print-config", *words, cwd=tmp_path, timeout_s=60)
    assert "Traceback" not in done.stdout + done.stderr
    assert is_inert(done.stderr)
    return done


@case("C01", how="an unknown key at three levels", passes="exit 2, key path, nearest known key")
@case("F23", how="a key of a later segapp in a run's own config", passes="exit 2, file, line and key; checkpoints stay")
def test_unknown_key_is_refused_with_the_nearest(tmp_path: Path) -> None:
    refused(tmp_path, BASE + "epoch: 3\n", "c.yaml:3: unknown key epoch", "did you mean")
    refused(tmp_path, BASE + "optim: {momentm: 0.9}\n", "unknown key optim.momentm", "optim.momentum")
    refused(tmp_path, BASE + "loss: {plus: [{name: dice, wieght: 1}]}\n", "loss.plus.0.wieght", "weight")
    newer = BASE + "train: {epochs: 3, tomorrow: 1}\nversion: 99\n"
    refused(tmp_path, newer, "c.yaml:3", "train.tomorrow", "c.yaml:4", "version", "unknown key")
    done = program(tmp_path, "--config", "c.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")


@case("C02", how="1e-3, 5e-4, '0.01', nan, .inf, -1, 010, 12:30, off, class no", passes="the right number, or exit 2")
def test_numbers_in_any_notation_are_read(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    for text, value in {"1e-3": 1e-3, "5e-4": 5e-4, "010": 10.0, "1.": 1.0, "+.5": 0.5, '"0.01"': 0.01}.items():
        path.write_text(BASE + f"optim: {{lr: {text}}}\nschedule: {{min_lr: 0}}\n")
        assert load_config(path).optim.lr == value
    for text in ("nan", ".nan", ".inf", "-1", "12:30", "off", "true", "null", "[1]", "0x1", "2024-01-01"):
        refused(tmp_path, BASE + f"optim: {{lr: {text}}}\n", "optim.lr")
    names = "name: x\ndata: {format: folder, root: d, classes: [no, off, yes, 010, 1e3]}\n"
    refused(tmp_path, names, "data.classes.3", "text is expected")  # a word is a word; numbers need quotes


BOMBS: dict[str, bytes] = {
    "twice": BASE.encode() + b"seed: 1\nseed: 2\n",
    "tab": b"name: x\n\tdata: 1\n",
    "documents": BASE.encode() + b"---\nname: y\n",
    "empty": b"",
    "list": b"- name\n",
    "deep": b"name: " + b"[" * 3000 + b"]" * 3000,
    "deeper": b"name: " + b"{a: " * 100_000,
    "aliases": b"a: &a [x,x]\n" + b"".join(b"%c: &%c [*%c,*%c]\n" % (i + 1, i + 1, i, i) for i in range(97, 115)),
    "large": b"#" * 50_000_000,
    "values": b"name: [" + b"1," * 500_000 + b"]",
    "UTF-16": BASE.encode("utf-16"),
    "NUL": b"name: \0\n",
    "apply": b"name: !!python/object/apply:os.system ['touch canary']\n",
    "new": b"name: !!python/object/new:os.system ['touch canary']\n",
    "module": b"name: !!python/module:os.system\n",
    "merge": BASE.encode() + b"<<: {seed: 3}\n",
    "binary": b"name: !!binary aGk=\n",
    "digits": BASE.encode() + b"seed: " + b"9" * 500_000,
    "control": b"name: \x1b[2J\n",
}


@case(
    "C03",
    how="double keys, tab, 3000 deep, aliases, 50 MB, UTF-16, NUL, python tags",
    passes="exit 2 in 2 s; inert",
)
@pytest.mark.parametrize("what", BOMBS)
def test_yaml_bomb_is_refused_within_a_second(tmp_path: Path, what: str) -> None:
    start_s = time.process_time()
    sum(i * i for i in range(2_000_000))
    slowness = max(1.0, (time.process_time() - start_s) / 0.15)  # against the machine of the limit
    start_s = time.process_time()
    refused(tmp_path, BOMBS[what], "c.yaml" if what != "empty" else "name is missing")
    assert time.process_time() - start_s < 2 * slowness
    assert not (tmp_path / "canary").exists()


@case("C03", how="a FIFO, a folder, a device, a link loop in place of the file", passes="exit 2 at once")
def test_config_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "dir.yaml").mkdir()
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    for name in ("fifo.yaml", "dir.yaml", "loop.yaml", "/dev/zero", "/dev/stdin", "\x1b[2J", "[/]", "a" * 300):
        says = "is a pipe or a device" if name in ("fifo.yaml", "/dev/zero", "/dev/stdin") else "not found"
        with pytest.raises(ConfigError, match=says):
            load_config(tmp_path / name)
    done = program(tmp_path, "--config", "\x1b[2J")
    assert done.returncode == 2


@case("C03", how="overrides: code, tags, aliases, dunders, controls, bombs", passes="text or exit 2; inert")
def test_hostile_override_is_refused_without_running_code(tmp_path: Path) -> None:
    for word in (
        "seed=!!python/object/apply:os.system ['touch canary']",
        "seed=__import__('os').system('touch canary')",
        "__class__.__init__=1",
        "seed.__class__=1",
        "model.options={a: &x 1, b: *x }",
        "seed=" + "[" * 10_000,
        "=3",
        "..=3",
        "seed",
        *(f"data.root={text}" for text in CONTROL[:4]),
        *(f"{text}=1" for text in (*CONTROL[:4], *MARKUP)),
    ):
        refused(tmp_path, BASE, overrides=[word])
    words = ["data.root=$(touch canary);`touch canary`", "model.options={a: $(touch canary)}"]
    done = program(tmp_path, "--config", "c.yaml", *words)
    assert done.returncode == 0, done.stderr
    assert (
        program(tmp_path, "--config", "c.yaml", "seed=!!python/object/apply:os.system ['touch canary']").returncode == 2
    )
    assert not (tmp_path / "canary").exists()


@case(
    "C04",
    how="crop > 67 Mpx, 1 class, ignored id a class, epochs 0, workers -1 and 10000",
    passes="exit 2",
)
def test_contradictory_config_is_refused(tmp_path: Path) -> None:
    for override, word in {
        "data.crop_px=[100000, 100000]": "megapixels",
        "train.epochs=0": "train.epochs",
        "train.batch_size=0": "train.batch_size",
        "train.batch_size=99999999": "train.batch_size",
        "train.batch_size=65537.0": "train.batch_size",
        "data.workers=-1": "data.workers",
        "data.workers=10000": "data.workers",
        "parallel.gpu0_bsz=99": "above train.batch_size",
        "seed=-1": "seed",
    }.items():
        refused(tmp_path, BASE, word, overrides=[override])
    refused(tmp_path, BASE, "data.classes", overrides=["data.format=folder", "data.classes=[one]"])
    for part in ("train", "trainannot", "val", "valannot"):
        (tmp_path / "d" / part).mkdir(parents=True)
        (tmp_path / "d" / part / "a.png").touch()
    words = ["train", "--config", "c.yaml", "--plain", "data.ignore_index=3"]  # what the format knows, before the data
    done = segapp(*words, cwd=tmp_path, timeout_s=60)
    assert done.returncode == 2
    assert "ignore_index" in done.stderr


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-3, 300), max_size=4),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
    st.sampled_from(["auto", "ce", "dice", "sgd", "adamw", "poly", "dp", "fp16", "folder", "ram"]),
)


@pytest.mark.slow
@case("C05", how="500 configs of random keys and values, as files", passes="reads back equal, or ConfigError")
def test_random_config_is_accepted_or_refused(tmp_path: Path) -> None:
    path, again = tmp_path / "c.yaml", tmp_path / "again.yaml"
    keys = [key for key in known_keys(RunConfig) if len(key) > 1]

    @settings(max_examples=500, deadline=None, database=None)
    @given(st.lists(st.tuples(st.sampled_from(keys), _VALUES), max_size=4))
    def holds(changes: list[tuple[tuple[str, ...], Any]]) -> None:
        raw: dict[str, Any] = yaml.safe_load(BASE)
        for (*sections, key), value in changes:
            node = raw
            for section in sections:
                if not isinstance(node.get(section), dict):  # an earlier change may have put a value there
                    node[section] = {}
                node = node[section]
            node[key] = value
        path.write_text(yaml.safe_dump(raw, allow_unicode=True), encoding="utf-8", errors="surrogatepass")
        try:
            config = load_config(path)
        except ConfigError as error:
            assert str(error)  # noqa: PT017
            return
        again.write_text(dump_config(config), encoding="utf-8")
        assert load_config(again) == config

    holds()
