"""`segapp check` and `segapp init` on images of other bands or types: the measured ranges are numpy's percentiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import yaml

from segapp.assembly.data import build_dataset
from segapp.assembly.pairs import build_scheme
from segapp.commands.check import check_data
from segapp.config import load_config, validate_config
from segapp.errors import ConfigError, DataError
from segapp.onboarding.init import InitRequest, propose_config
from tests.support.band_data import write_band_data

pytest.importorskip("rasterio", reason="the extra geo is not installed")


def percentiles(root: Path) -> list[list[int]]:
    values = np.concatenate(
        [tifffile.imread(path).reshape(-1, 4) for path in sorted((root / "images/train").iterdir())]
    )
    low, high = np.percentile(values, (0.5, 99.5), axis=0)
    return [[int(np.floor(a)), int(np.ceil(b))] for a, b in zip(low, high, strict=True)]


@pytest.mark.parametrize("known", [[], ["bands", "dtype"]])
def test_check_prints_the_lines_that_the_training_asks_for(
    known: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_band_data(tmp_path / "data", num_images=2)
    for key in {"bands", "dtype", "value_range"} - set(known):
        data.pop(key)
    config = validate_config({"name": "bands", "data": data})
    with pytest.raises((ConfigError, DataError), match="value_range"):
        build_dataset(config.data, build_scheme(config.data), "train", is_training=True, seed=0)
    assert check_data(config, as_json=False) == 3
    out = capsys.readouterr().out
    lines: dict[str, Any] = yaml.safe_load(out[out.index("  bands: ", out.index("pixels: uint16 of 4 bands")) :])
    assert lines == {"bands": [1, 2, 3, 4], "dtype": "uint16", "value_range": percentiles(tmp_path / "data")}
    whole = validate_config({"name": "bands", "data": {**data, **lines}})
    assert check_data(whole, as_json=True) == 0
    pixels = json.loads(capsys.readouterr().out)["pixels"]
    assert (pixels["dtype"], pixels["value_range"]) == ("uint16", lines["value_range"])
    build_dataset(whole.data, build_scheme(whole.data), "train", is_training=True, seed=0)


def test_init_writes_bands_type_and_range(tmp_path: Path) -> None:
    write_band_data(tmp_path / "data", num_images=3)
    result = propose_config(InitRequest(tmp_path / "data", tmp_path / "bands.yaml"))
    data = load_config(result.configs[0]).data
    assert (data.bands, data.dtype) == ((1, 2, 3, 4), "uint16")
    assert data.value_range is not None
    assert [list(map(int, pair)) for pair in data.value_range] == percentiles(tmp_path / "data")
