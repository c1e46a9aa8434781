"""Segmentation networks of torchvision and segmentation_models_pytorch behind one `build_model`.

Every network returns a tuple: logits at the resolution of its head and, in training mode, the auxiliary head's logits.
Nothing is upsampled to the input size here; the criterion and the evaluator do that.
"""

from segapp.models.by_name import build_model
from segapp.models.critic import Critic, critic_input, critic_size
from segapp.models.network import SegmentationModel

__all__ = [
    "Critic",
    "SegmentationModel",
    "build_model",
    "critic_input",
    "critic_size",
]
