from collections.abc import Iterator

import pytest
import torch
from torch import nn

from segapp.parallel.replica_threads import keep_workers


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def _kept_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keeps the replicas' threads between the tests of a file, except in files about the end of threads.

    A new thread first makes as many autograd nodes as this process has made before (`_advance_sequence_number`): for
    three replicas that takes longer than most tests.
    """
    user = nn.Identity()
    if request.path.stem not in ("test_workers", "test_replica_threads"):
        keep_workers(user)
    yield
    del user
