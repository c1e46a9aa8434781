"""What a training is built of."""

from __future__ import annotations

from typing import Any

import pytest

from segapp.assembly.pairs import build_scheme
from segapp.errors import ConfigError
from segapp.parallel.distributed import Ranks
from segapp.session.trainer import _build_datasets
from tests.support.runs import merged


def test_every_rank_needs_a_training_image(tiny: dict[str, Any]) -> None:
    config, ranks = merged(tiny), Ranks()
    scheme = build_scheme(config.data)
    num_images = ranks.world_size = len(_build_datasets(config, scheme, ranks, None)[0])
    assert len(_build_datasets(config, scheme, ranks, None)[0]) == num_images
    ranks.world_size += 1
    with pytest.raises(ConfigError, match=f"{num_images + 1} ranks cannot share {num_images} training images"):
        _build_datasets(config, scheme, ranks, None)
