"""The checks of tests/gpu on logical CPUs, so that every line of them has run."""

import pytest

from tests.support.replica_checks import check_channels_last, check_step, check_threads


@pytest.mark.parametrize("sync_bn", [True, False])
def test_step_matches_one_device_and_repeats_bitwise(sync_bn):
    check_step(["cpu"] * 3, "cpu", sync_bn=sync_bn, cudnn_benchmark=True)


def test_replicas_keep_their_threads_and_devices():
    check_threads(["cpu"] * 3, "cpu")


def test_replicas_and_gradients_keep_channels_last():
    check_channels_last(["cpu"] * 3, "cpu")
