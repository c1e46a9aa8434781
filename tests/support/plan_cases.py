"""What the small loss saves by model family, simulated. Prints one JSON object."""

import json
import warnings

from segapp.config import validate_config
from segapp.memory.peaks import SimulationJob
from segapp.training.planning.simulate import build_simulator

FAMILIES = [
    ("LR-ASPP MobileNetV3-L", {"name": "lraspp_mobilenet_v3_large"}, (768, 768), 19, 8),
    ("DeepLabV3 ResNet-50", {"name": "deeplabv3_resnet50"}, (768, 768), 19, 4),
    ("PSPNet ResNet-50", {"library": "smp", "name": "PSPNet", "encoder": "resnet50"}, (768, 768), 19, 8),
    ("UPerNet ResNet-50", {"library": "smp", "name": "UPerNet", "encoder": "resnet50"}, (512, 512), 150, 4),
    ("SegFormer-B0", {"library": "smp", "name": "Segformer", "encoder": "mit_b0"}, (512, 512), 150, 8),
    ("Unet ResNet-34", {"library": "smp", "name": "Unet", "encoder": "resnet34"}, (768, 768), 19, 4),
]
PRECISIONS = ("fp32", "amp-bf16")
STYLES = ("upsampled", "small")


def simulator(model, crop_px, num_classes, precision="fp32"):
    return build_simulator(
        validate_config(
            {
                "name": "case",
                "data": {
                    "format": "folder",
                    "root": "nowhere",
                    "classes": [f"c{i}" for i in range(num_classes)],
                    "crop_px": crop_px,
                },
                "model": model,
                "train": {"precision": precision},
                "parallel": {"sync_bn": False},
            }
        )
    )


def families():
    """Peak of one device by family, precision and loss."""
    rows = []
    for name, model, crop_px, num_classes, samples in FAMILIES:
        for precision in PRECISIONS:
            own = simulator(model, crop_px, num_classes, precision)
            peaks = {style: own.run(SimulationJob("single", (samples,), loss=style)).peak_mib()[0] for style in STYLES}
            rows.append({"family": name, "precision": precision, "crop": crop_px[0], "classes": num_classes, **peaks})
    return rows


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(families()))
