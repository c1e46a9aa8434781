"""Tensors on simulated devices have the devices, dtypes, casts and copies of real ones, by hand."""

import json
import subprocess
import sys

import pytest

from tests.support import ROOT


@pytest.mark.slow
def test_simulated_tensors_are_those_of_a_device():
    command = [sys.executable, "-m", "tests.support.gpu.simulated_devices"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = "simgpu:0", "simgpu:1"
    assert json.loads(done.stdout.splitlines()[-1]) == {
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
        # Images and each convolution's output 384 bytes, weights 64 in all. A block keeps the output of its first
        # convolution. Each convolution moves 784 bytes at 800 GB/s after 4 us of launch.
        "trace": {
            "kept/0000/a": 384.0,
            "kept/0001/b": 384.0,
            "seconds/0000/a": 8.002,
            "seconds/0001/b": 8.002,
            "at/0000/forward 0": 64.0 + 3 * 384,
            "at/0001/after 0": 64.0 + 3 * 384,
            "at/0001/forward 1": 64.0 + 5 * 384,
            "at/0002/after 1": 64.0 + 5 * 384,
            "at/0002/loss": 64.0 + 5 * 384 + 4,
            "at/0002/backward": 64.0 + 5 * 384 + 4 + 4,
            "at/0001/backward 1": 2408.0,  # what autograd adds is not worked out by hand
            "at/0000/backward 0": 2040.0,
            "at/0000/step": 64.0 + 64 + 2 * 384 + 4,  # weights, gradients, images, output and loss
        },
    }
