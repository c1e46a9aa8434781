"""Findings of `segapp check`, grouped by kind and split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from segapp.datasets.inspection import Comparison, DataProblem, SplitReport
from segapp.datasets.masks import summary_of_ids

KINDS = {
    "pairs": "images without a mask",
    "pixels": "images of pixels that the config does not say",
    "ids": "masks with ids outside the classes",
    "unreadable": "images that cannot be read",
    "damaged": "images with damaged data",
    "mask": "masks that cannot be read",
    "size": "masks of another size than their image",
    "leak": "images that also occur in another split",
    "group": "groups in both splits",
    "lookalike": "images that look like a training image",
    "all_ignored": "masks with ignored pixels only",
    "duplicate": "images that occur twice in one split",
    "class": "classes",
    "split": "splits",
    "crop": "image sizes smaller than the crop",
    "link": "links",
    "file": "files that are not used",
}
"""Kinds of findings and their descriptions, in the order of the report."""


@dataclass(frozen=True)
class Group:
    """Findings of one kind in one split, those with the most wrong pixels first."""

    severity: str
    split: str
    kind: str
    findings: tuple[DataProblem, ...]
    summary: str


def grouped(reports: Sequence[SplitReport], before: Sequence[DataProblem] = ()) -> list[Group]:
    """Group findings by kind and split: errors first, then in the order of `KINDS`."""
    found: dict[tuple[str, str, str], list[DataProblem]] = {}
    for finding in (*before, *(f for report in reports for f in report.findings)):
        found.setdefault((finding.severity, finding.kind, finding.split), []).append(finding)
    unknown = {report.split: report.unknown_ids for report in reports}
    sizes = {report.split: report.num_pairs for report in reports}
    order = list(KINDS)
    groups = []
    for (severity, kind, split), findings in sorted(found.items(), key=lambda i: (i[0][0], order.index(i[0][1]))):
        ids = unknown.get(split)
        if kind == "ids" and ids is not None:
            summary = summary_of_ids(ids)
        elif kind == "lookalike":
            summary = (
                f"{len(findings)} of {sizes[split]} images ({len(findings) / sizes[split]:.0%}) look like a training "
                f"image: scores on {split} are too good; keep the images of a scene together with segapp init --group"
            )
        else:
            summary = findings[0].message if len(findings) == 1 else f"{len(findings)} {KINDS[kind]}"
        worst_first = tuple(sorted(findings, key=lambda finding: -finding.num_px))
        groups.append(Group(severity, split, kind, worst_first, summary))
    return groups


def comparison_lines(split: str, comparison: Comparison) -> list[str]:
    """Return how many images of a split look like training images, and which look-alikes cannot be seen."""
    plain = f"; {comparison.num_plain} are too plain to compare" if comparison.num_plain else ""
    return [
        f"look-alikes: {comparison.num_alike} of {comparison.num_images} {split} images look like one of "
        f"{comparison.num_others} training images{plain}",
        "  compared: copies in another size, compression or brightness, overlapping tiles, still video frames",
        "  not seen: flipped or zoomed parts, and other views of the same patient or scene: name those with "
        "segapp init --group REGEX",
    ]
