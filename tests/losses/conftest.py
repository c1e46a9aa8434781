"""The resolution at which the criteria of a file are computed, and the number of threads of a test."""

from collections.abc import Callable, Iterator

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


@pytest.fixture
def set_full_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Give the function that sets below how many bytes logits are upsampled at once, not band by band."""
    return lambda num_bytes: monkeypatch.setattr(pixel_sums, "FULL_BYTES", num_bytes)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Give the function that sets torch's number of threads, which is as before after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
