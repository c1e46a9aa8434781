"""The heads of every recipe, as the loss meets them in a simulated step: a script that prints one JSON object.

    python -m tests.support.recipe_heads [CONFIG ...]

Config name -> [[C, h, w, H, W, dtype, implementation] of each head].
"""

import json
import sys
import warnings

from segapp.config import load_config
from segapp.losses import cross_entropy
from segapp.memory.peaks import SimulationJob
from segapp.planning.simulate import build_simulator
from tests.support import ROOT


def heads_of_recipe(path):
    """Return the heads of one config, in the order in which a step first meets them."""
    seen = []
    compute = cross_entropy.upsample_cross_entropy

    def spy(logits, target, **options):
        chosen = cross_entropy.choose_implementation(logits, target)
        head = [*logits.shape[1:], *target.shape[1:], str(logits.dtype).removeprefix("torch."), chosen]
        if head not in seen:
            seen.append(head)
        return compute(logits, target, **options)

    cross_entropy.upsample_cross_entropy = spy
    try:
        build_simulator(load_config(path)).run(SimulationJob("single", (2,)))
    finally:
        cross_entropy.upsample_cross_entropy = compute
    return seen


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    names = sys.argv[1:] or sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    print(json.dumps({name: heads_of_recipe(ROOT / "configs" / f"{name}.yaml") for name in names}))
