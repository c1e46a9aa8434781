"""The resolution at which the criteria of a file are computed."""

from collections.abc import Iterator

import pytest
import torch

from segapp.losses.fused import pixel_sums
from tests.support.loss_cases import cut_into_bands


@pytest.fixture(params=["whole", "bands"], scope="module")
def resolution(request: pytest.FixtureRequest) -> Iterator[str]:
    """Compute logits of any size at full resolution, or on bands in two threads."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "bands":
            cut_into_bands(patch)
            torch.set_num_threads(2)
        else:
            patch.setattr(pixel_sums, "FULL_BYTES", 1 << 60)
        yield request.param
    torch.set_num_threads(before)
