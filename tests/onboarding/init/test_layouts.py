"""`segapp init` on every drawn layout: what training would read is what was drawn, or the question has that answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.layouts import LAYOUTS, ROOMS, UNMENDED, names
from tests.support.layouts.judge import answered, judged, problems
from tests.support.layouts.layout import Ask

RIGHT_FROM_THE_BEGINNING = names(
    """
    a_suffix; a_jpgpng; a_prefix; a_prefixsame; a_samefolder; h_mixed; a_jpgmask; l_aa; b_kaggle_camvid;
    b_rgb_nofile; l_rgba; d_cvat_mask11; e_palette; c_binary; c_1bit; c_carvana; l_bin3; m_drive; l_binsmall;
    d_voc; m_voctrainlist; m_lip; m_imgdir; m_isaid; m_cocostuff; m_testsplit; n_nested; n_scene; m_bdd;
    m_city_trainids; g_16bit; g_png16rgb; g_tiff3_u16; g_tiff4_u16; g_tiff4_f32; g_tiff8_u16; g_gray; g_rgba;
    g_16mask; j_coco; j_labelme; j_yolo; j_yolo_sem; j_roboflow; l_idgaps; l_onebased; e_corrupt; e_htmljpg; e_zero;
    e_size; e_nomask
    """
)
"""Known layouts that never needed a question; nor does any of the usual ones."""


@pytest.fixture
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files need not survive a power cut here, and a tenth of the time is spent waiting for the disk."""
    monkeypatch.setattr("os.fsync", lambda _: None)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("_no_sync")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.xfail(strict=True)] * (name in UNMENDED) + [pytest.mark.slow] * (number % 3 == 2),
        )
        for number, name in enumerate(LAYOUTS)
    ],
)
def test_layout_is_read_as_it_was_drawn(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    truth, verdict = judged(layout, tmp_path)
    print(verdict.said)
    assert problems(layout, verdict) == []
    if isinstance(layout.expected, Ask) and verdict.question is not None:
        assert answered(layout, truth, tmp_path, verdict) is not None, "no answer gives what was drawn"


def test_layouts_right_from_the_beginning_need_no_question() -> None:
    known = [*RIGHT_FROM_THE_BEGINNING, *(layout.name for layout in ROOMS["usual"])]
    assert (len(RIGHT_FROM_THE_BEGINNING), len(set(known))) == (51, 51 + 51)
    assert [name for name in known if isinstance(LAYOUTS[name].expected, Ask)] == []
