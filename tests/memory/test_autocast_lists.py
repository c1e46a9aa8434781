"""The simulated devices' autocast beside the installed torch: its header, its registrations, and the casts by hand."""

import re
from pathlib import Path

import torch

from segapp.compat.torch import autocast_operators
from segapp.memory.simulated_devices import AUTOCAST
from tests.support.gpu import autocast_rules
from tests.support.own_process import printed_json

MACROS = {
    "LOWER_PRECISION_FP": "lower",
    "FP32": "float32",
    "FP32_SET_OPT_DTYPE": "dtype",
    "DIFFERENT_REDISPATCH_SIGNATURE": "dtype",
    "PROMOTE": "widest",
}
WITHOUT_MACRO = {"cudnn_convolution": "lower", "cudnn_convolution_transpose": "lower", "binary_cross_entropy": "banned"}
"""Registered in ATen/autocast_mode.cpp, which torch does not ship."""
NOT_SIMULATED = {"_cudnn_rnn", "linalg_matrix_sqrth"}
"""Registered outside of both files; no segmentation network of the package calls them."""


def kinds_of_torch():
    """Return operator -> kind, as the installed torch's header says."""
    text = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    found = {}
    for macro, kind in MACROS.items():
        body = re.search(rf"#define AT_FORALL_{macro}\(_\)(.*?[^\\])\n", text, re.DOTALL)[1]
        quoted = re.findall(r'"([\w.]+)"', body)
        names = quoted or [".".join(filter(None, each)) for each in re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body)]
        found |= dict.fromkeys(names, kind)
    return found


def own_kinds():
    return {name: kind for kind, names in AUTOCAST.items() for name in names.split()}


def test_every_operator_has_the_kind_of_the_installed_torch():
    wanted = {**kinds_of_torch(), **WITHOUT_MACRO}
    assert len(wanted) > 100
    assert own_kinds() == wanted


def test_no_operator_that_torch_registers_is_missing():
    assert autocast_operators() - own_kinds().keys() == NOT_SIMULATED & autocast_operators()


def test_each_kind_casts_as_cuda_does():
    half, single, double = "bfloat16", "float32", "float64"
    assert printed_json(autocast_rules.main) == {
        "matmul": half,
        "einsum": half,
        "matmul of float64": double,
        "interpolate": single,
        "nearest": single,
        "bicubic": single,
        "exp": single,
        "exp of float64": double,
        "exp of integers": single,
        "softmax": single,
        "softmax with a dtype": half,
        "sum": single,
        "sum with a dtype": half,
        "sum of float64": double,
        "sum of integers": "int64",
        "norm": single,
        "norm over a dimension": single,
        "gradient of an attention mask": single,
        "addcmul of half": half,
        "addcmul with one float32": single,
        "grid_sample": single,
        "gelu": half,
        "binary_cross_entropy": "RuntimeError",
        "casts of a weight": 1,
        "casts of an activation": 2,
        "casts of a computed weight": 2,
        "casts of a weight to float32": 2,
    }
