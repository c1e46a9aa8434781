"""A password in an address is refused before anything is written, and no message repeats it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import segapp
from segapp.config import dump_config, load_config, validate_config
from segapp.errors import ConfigError, without_secrets
from segapp.report.page import read_run_report
from segapp.run.folder import RunFolder
from tests.support.fault_runs import tiny_config
from tests.support.programs import segapp as program

WITH_SECRETS = {
    "http://bob:hunter2@box:5000": "http://box:5000",
    "https://hunter2@box/mlflow": "https://box/mlflow",
    "HTTP://bob:hunter2@box": "HTTP://box",
    "http://bob:a@hunter2@box": "http://box",
    "http://bob:@box": "http://box",
    "postgresql+psycopg2://bob:hunter2@box/mlflow": "postgresql+psycopg2://bob@box/mlflow",
    "mysql://bob:a/hunter2@box/mlflow": "mysql://bob@box/mlflow",
    "postgresql://box/mlflow?user=bob&password=hunter2": "postgresql://box/mlflow?user=bob&",
    "https://box/mlflow?token=hunter2": "https://box/mlflow?",
    "https://box/mlflow?api_key=hunter2&a=1": "https://box/mlflow?&a=1",
    "mssql+pyodbc:///?odbc_connect=DRIVER%3DX%3BPWD%3Dhunter2": "mssql+pyodbc:///?odbc_connect=DRIVER%3DX%3B",
    "see http://bob:hunter2@box for it": "see http://box for it",
}

FOR_MLFLOW = [
    *("http://box:5000", "http://box:5000/a@b", "http://box:5000/#/experiments/a@b", "http://[::1]:5000/a@b"),
    *("postgresql://bob@box/mlflow", "sqlite:///mlflow.db", "file:///home/bob/mlruns", "databricks://scope:prefix"),
    *("HTTPS://box/a", "mlruns", "/data/jürgen", "sqlite:////data/a@b/c.db", "databricks", "mssql+pyodbc:///?a=b"),
    *("mysql://bob%40box@box/a", "arn:aws:sagemaker:us-east-1:1:mlflow-tracking-server/a", "azureml://box/a"),
    *("postgresql://box/a?sslkey=client.key", "a//b c"),
]
WITHOUT = [*FOR_MLFLOW, "git@box:a/b", "./parts.py:loss", "a//b c:d@e", "s3://a/b@v2"]
NOT_PLAIN = [
    *("bob:hunter2@box:5000", "http://bob:hunter2＠box", "http:\\\\bob:hunter2@box", "\\\\hunter2@box", "hunter2@box"),
    *("http:bob:hunter2@box", "htp://hunter2@box", "https://bob%3Ahunter2%40box", "http://hunter2;box"),
    *("bob：hunter2﹫box", "//bob/hunter2@box", "sqlite://hunter2@box/a", "file://hunter2@box", "ftp://hunter2"),
    *("postgresql://bob%3Ahunter2@box/a", "https://box\\hunter2", "http://box:hunter2", "mysql://a@box/a@hunter2"),
]


@pytest.mark.parametrize("text", WITH_SECRETS)
def test_secrets_are_removed(text: str) -> None:
    assert without_secrets(text) == WITH_SECRETS[text]
    assert without_secrets(WITH_SECRETS[text]) == WITH_SECRETS[text]


@pytest.mark.parametrize("text", WITHOUT)
def test_other_addresses_are_unchanged(text: str) -> None:
    assert without_secrets(text) == text


@pytest.mark.parametrize("part", ["//:", "//x:y", "?api", "http://a@", "?a=", "?pass", "%3B"])
def test_time_grows_with_the_length_of_the_text(part: str) -> None:
    began_s = time.process_time()
    without_secrets(part * (2**20 // len(part)))
    assert time.process_time() - began_s < 10


@pytest.fixture
def config(tiny_root: Path, tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(tiny_config(tiny_root)))
    return path


@pytest.mark.parametrize("address", NOT_PLAIN)
def test_address_of_mlflow_has_a_known_scheme_and_no_user(address: str, config: Path) -> None:
    assert without_secrets(address) == address
    with pytest.raises(
        ConfigError, match=r"line: log\.mlflow is no plain address .*: write http://HOST:PORT"
    ) as caught:
        load_config(config, [f"log.mlflow={json.dumps(address)}"])
    assert "hunter2" not in json.dumps(caught.value.as_json())


def test_plain_addresses_of_mlflow_are_kept(config: Path) -> None:
    for address in FOR_MLFLOW:
        assert load_config(config, [f"log.mlflow={json.dumps(address)}"]).log.mlflow == address


KEYS = ["log.mlflow", "log.wandb", "data.root", "model.options.where", "model.weights", "data.options.a", "name"]


@pytest.mark.parametrize("key", KEYS)
def test_secret_in_any_key_is_refused(key: str, config: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config, [f"{key}=http://bob:hunter2@box"])
    assert key in str(caught.value)
    assert "command line" in str(caught.value)
    assert "MLFLOW_TRACKING_PASSWORD" in str(caught.value)
    assert "WANDB_API_KEY" in str(caught.value)
    assert "hunter2" not in json.dumps(caught.value.as_json())


def test_secret_in_a_file_is_refused_with_its_line(config: Path) -> None:
    config.write_text(config.read_text().replace("mlflow: null", "mlflow: http://bob:hunter2@box"))
    line = next(i for i, text in enumerate(config.read_text().splitlines(), 1) if "hunter2" in text)
    with pytest.raises(ConfigError, match=rf"config\.yaml:{line}: log\.mlflow holds a password"):
        load_config(config)


def test_secret_in_values_of_python_is_refused(tiny_root: Path, tmp_path: Path) -> None:
    raw: Any = tiny_config(tiny_root).model_dump(mode="json")
    raw["log"]["mlflow"] = "http://bob:hunter2@box"
    for given in (raw, validate_config(raw)):
        with pytest.raises(ConfigError, match="holds a password"):
            segapp.train(given, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


WORDS: list[list[str]] = [
    ["train", "--plain", "--config", "config.yaml", "log.mlflow=http://bob:hunter2@box"],
    ["train", "--detach", "--config", "config.yaml", "log={mlflow: 'http://bob:hunter2@box'}"],
    ["train", "--plain", "--config", "http://bob:hunter2@box/config.yaml"],
    ["train", "--plain", "--config", "config.yaml", "http://bob:hunter2@box"],
    ["sweep", "s", "--config", "config.yaml", "log.mlflow=bob:hunter2@box:5000,null"],
    ["plan", "--config", "config.yaml", "--json", "log.mlflow=[hunter2@box]"],
]


@pytest.mark.parametrize("words", WORDS, ids=lambda words: words[0])
def test_commands_write_nothing_and_repeat_no_secret(words: list[str], config: Path) -> None:
    done = program(*words, cwd=config.parent)
    assert done.returncode == 2
    assert "hunter2" not in done.stdout + done.stderr
    assert [path.name for path in config.parent.iterdir()] == ["config.yaml"]


def test_old_run_with_a_secret_is_not_resumed_or_shown(config: Path) -> None:
    done = program("train", "--plain", "--config", "config.yaml", "--run", "run", "train.epochs=1", cwd=config.parent)
    assert done.returncode == 0, done.stderr
    own = config.parent / "run" / "config.yaml"
    own.write_text(own.read_text().replace("mlflow: null", "mlflow: http://bob:hunter2@box"))
    before = own.read_bytes()
    done = program("train", "--plain", "--resume", "run", "train.epochs=2", cwd=config.parent)
    assert done.returncode == 2
    assert "config.yaml" in done.stderr
    assert "hunter2" not in done.stderr
    assert own.read_bytes() == before
    assert "hunter2" not in (read_run_report(config.parent / "run").config_text or "")


def test_arguments_of_the_program_are_recorded_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["my.py", "--db", "postgresql://bob:hunter2@box/a"])
    folder = RunFolder.create(path=tmp_path / "run")
    with folder:
        folder.write_info()
    assert json.loads(folder.run_json.read_text())["argv"] == ["my.py", "--db", "postgresql://bob@box/a"]
