import pytest

from segapp.commands.plan import parse_gpus
from segapp.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("3x24220MiB", [24220.0] * 3),
        ("24220MiB,24220MiB,11019MiB", [24220.0, 24220.0, 11019.0]),
        ("2x24GiB, 1x11GiB", [24576.0, 24576.0, 11264.0]),
        ("80gb", [80e9 / 2**20]),
        ("4096MB", [4096e6 / 2**20]),
        ("1.5GiB", [1536.0]),
    ],
)
def test_gpu_sizes_are_parsed(text, mib):
    assert [gpu.total_mib for gpu in parse_gpus(text)] == pytest.approx(mib)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "''"),
        ("3x", "'3x'"),
        ("3x24220TiB", "'3x24220TiB' is not a size above 0 with MiB or GiB"),
        ("0x24220MiB", "'0x24220MiB' is not a size above 0 with MiB or GiB"),
        ("2x0MiB", "'2x0MiB' is not a size above 0 with MiB or GiB"),
        ("8GiB,,8GiB", "''"),
        ("100x8GiB", "64"),
    ],
)
def test_bad_gpu_list_error_gives_an_example(text, named):
    with pytest.raises(ConfigError) as caught:
        parse_gpus(text)
    message = str(caught.value)
    assert named in message
    assert "\n" not in message
    assert caught.value.exit_code == 2
