"""Messages about names: how many are listed, and in which order."""

from __future__ import annotations

import pytest

from segapp.assembly.optimizer import layer_depths
from segapp.errors import ConfigError, some_names
from segapp.models.names import check_options, unknown_name

TWENTY = [f"n{i:02}" for i in range(20)]


@pytest.mark.parametrize(
    ("value", "known", "message"),
    [
        ("x", [], "key: 'x' is not a thing: none exists"),
        ("x", ["b", "a"], "key: 'x' is not a thing: use one of a, b"),
        ("ZZ", TWENTY, f"key: 'ZZ' is not a thing: use one of {', '.join(TWENTY)}"),
        ("ZZ", [*TWENTY, "n20"], f"key: 'ZZ' is not a thing: there are 21, such as {', '.join(TWENTY)}"),
        ("UNET", [*TWENTY, "Unet", "UnetPlusPlus"], "key: 'UNET' is not a thing: did you mean Unet or UnetPlusPlus?"),
    ],
)
def test_unknown_name_is_shown_with_those_that_exist(value, known, message):
    assert str(unknown_name("key", value, "a thing", known)) == message


def test_first_option_that_is_not_taken_is_named():
    check_options(["a", "b"], ["b", "a"], "Net")
    with pytest.raises(ConfigError, match="'c' is not an option of Net: use one of a, b"):
        check_options(["a", "c", "d"], ["b", "a"], "Net")


def test_names_beyond_the_first_are_counted():
    assert [some_names(TWENTY[:count]) for count in (1, 2, 4)] == ["n00", "n00, n01", "n00, n01 and 2 more"]
    assert some_names(TWENTY[:4], 3) == "n00, n01, n02 and 1 more"


def test_depths_of_stages_by_hand():
    """Two stages of two blocks and one: depths 1, 2 and 3; the end of a stage belongs to its last block."""
    depths = {
        "patch_embed.proj.weight": 0,
        "layers.0.blocks.0.norm1.weight": 1,
        "layers.0.blocks.1.norm1.weight": 2,
        "layers_0.norm.weight": 2,
        "layers.1.downsample.norm.weight": 3,
        "layers.1.blocks.0.norm1.weight": 3,
        "norm.bias": 3,
    }
    assert layer_depths(depths) == (depths, 4)
    assert layer_depths(["cls_token"]) == "cls_token"
    assert layer_depths([]) == "no parameter"
