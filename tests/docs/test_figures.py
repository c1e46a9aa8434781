"""The figures of the pages are what the code draws."""

import numpy as np
from PIL import Image

from tests.support.mask_figure import FIGURE, figure


def test_figure_of_masks_shows_the_demo_data() -> None:
    assert np.array_equal(np.array(Image.open(FIGURE)), figure())
