"""What the simulated devices' autocast makes of dtypes, in a process of its own; prints one JSON object."""

import json
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from segapp.memory.ledger import StorageLedger
from segapp.memory.simulated_devices import simulation

DEVICE = "simgpu:0"


def dtype_of(call: Callable[[], Tensor]) -> str:
    """Return the dtype of a result, or the name of its error."""
    try:
        return str(call().dtype).removeprefix("torch.")
    except RuntimeError as error:
        return type(error).__name__


def casts(ledger: StorageLedger, call: Callable[[], object]) -> int:
    """Return how many casts two calls record."""
    first = len(ledger.allocations)
    call()
    call()
    return sum(each.what.startswith("_to_copy") for each in ledger.allocations[first:])


def main() -> None:
    """Print the dtype of each result."""
    ledger = StorageLedger(alloc_unit_bytes=1)
    with simulation(ledger):
        single = torch.zeros(2, 3, 8, 8, device=DEVICE)
        half, double, whole = single.bfloat16(), single.double(), single.int()
        table = torch.zeros(8, 8, device=DEVICE, requires_grad=True)  # such as of relative positions
        grid, weight = torch.zeros(2, 4, 4, 2, device=DEVICE), torch.zeros(8, 8, device=DEVICE, requires_grad=True)
        half_weight = torch.zeros(8, 8, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        with torch.autocast("simgpu", torch.bfloat16):
            calls: dict[str, Callable[[], Tensor]] = {
                "matmul": lambda: single @ single,
                "einsum": lambda: torch.einsum("abcd,abde->abce", single, half),
                "matmul of float64": lambda: double @ double,
                "interpolate": lambda: F.interpolate(half, scale_factor=2, mode="bilinear"),
                "nearest": lambda: F.interpolate(half, scale_factor=2),
                "bicubic": lambda: F.interpolate(half, scale_factor=2, mode="bicubic"),
                "exp": half.exp,
                "exp of float64": double.exp,
                "exp of integers": whole.exp,
                "softmax": lambda: half.softmax(1),
                "softmax with a dtype": lambda: half.softmax(1, torch.bfloat16),
                "sum": half.sum,
                "sum with a dtype": lambda: half.sum((1, 2), dtype=torch.bfloat16),
                "sum of float64": double.sum,
                "sum of integers": whole.sum,
                "norm": lambda: torch.ops.aten.norm.Scalar(half, 2),
                "norm over a dimension": lambda: torch.ops.aten.norm.ScalarOpt_dim(half, 2, [1]),
                "gradient of an attention mask": lambda: torch.autograd.grad(
                    F.scaled_dot_product_attention(half, half, half, table).sum(), table
                )[0],
                "addcmul of half": lambda: torch.addcmul(half, half, half),
                "addcmul with one float32": lambda: torch.addcmul(half, half, single),
                "grid_sample": lambda: F.grid_sample(half, grid),
                "gelu": lambda: F.gelu(half),
                "binary_cross_entropy": lambda: F.binary_cross_entropy(single, single),
            }
            found: dict[str, object] = {name: dtype_of(call) for name, call in calls.items()}
            found["casts of a weight"] = casts(ledger, lambda: half.matmul(weight))
            found["casts of an activation"] = casts(ledger, lambda: half.matmul(single))
            computed = weight.tanh()  # requires a gradient, but is no weight
            found["casts of a computed weight"] = casts(ledger, lambda: half.matmul(computed))
            found["casts of a weight to float32"] = casts(ledger, half_weight.exp)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
