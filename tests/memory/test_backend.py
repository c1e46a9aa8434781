"""Tensors on simulated devices have the devices, dtypes, casts and copies of real ones, by hand."""

import pytest

from tests.support.gpu import simulated_devices
from tests.support.own_process import printed_json


@pytest.mark.slow
def test_simulated_tensors_are_those_of_a_device():
    first, second = "simgpu:0", "simgpu:1"
    assert printed_json(simulated_devices.main) == {
        "placed": {
            "0.weight": [first, "float32", [2, 2, 1, 1], True],
            "1.weight": [second, "float32", [2], False],
            "1.bias": [second, "float32", [2], False],
            "1.running_mean": [second, "float32", [2], False],
            "1.running_var": [second, "float32", [2], False],
            "1.num_batches_tracked": [second, "int64", [], False],
        },
        "is shared": True,
        "autocast": [[first, "bfloat16"], [first, "float32"]],
        "casts": [1, 2],  # once for both convolutions, and again in the next context
        "without autocast": [first, "float32"],
        "gradient": [first, "float32", [2, 2, 1, 1], False],
        "channels last": [[18, 1, 6, 2], [18, 1, 6, 2]],  # both, as by cuDNN
        "copied": [
            [first, "float32", [2, 2, 1, 1], True],
            [second, "float32", [2], False],
            [second, "float32", [2], False],
        ],
        "of the copy": [first, "float32"],
        "is copied": True,
        "is shared in half": True,
        "half": [
            [first, "float16", [2, 2, 1, 1], True],
            [second, "float16", [2], False],
            [second, "int64", [], False],
        ],
        "made": [[first, "float32", [2], False], ["cpu", "int64", [1], False]],
        "real weight": [second, "float32", [2], False],
        # Two states of random numbers, 32 numbers (20 tokens, padded) for each head, the output (2 x 20 x 8 floats);
        # and a mask of 20 rows of 32.
        "attention": [[8, 8, 256, 1280], [8, 8, 256, 1280, 2560]],
        # Images and each convolution's output are 384 bytes, a weight 16. Four convolutions move 784 bytes each at 800
        # GB/s, a sum 388, after 4 us of launch.
        "seconds": {"forward": 4 * 4.00098e-6, "loss": 4.000485e-6},
    }
