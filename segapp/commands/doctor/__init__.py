"""`segapp doctor`: what this machine offers for training, what is missing, and the command that gets it.

`imports` imports torch and its neighbours in a child process, `collect` reads the system, `findings` decides. Only the
standard library is needed, so that it works in a broken installation as long as typer starts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from segapp.commands.doctor.collect import collect_facts
from segapp.commands.doctor.facts import Facts
from segapp.commands.doctor.findings import Finding, can_train, evaluate_machine
from segapp.run.text import printable

CANNOT_TRAIN = 1
JSON_VERSION = 1


def print_doctor(*, as_json: bool) -> int:
    """Print what this machine offers.

    Returns:
        The exit code: 0 if training can run here, 1 if something that it requires is missing.
    """
    facts = collect_facts()
    findings = evaluate_machine(facts)
    if as_json:
        print(json.dumps(as_plain_values(facts, findings), indent=2))
    else:
        print("\n".join(report_lines(findings)))
    return 0 if can_train(findings) else CANNOT_TRAIN


def as_plain_values(facts: Facts, findings: Sequence[Finding]) -> dict[str, Any]:
    """The report as values for JSON."""
    return {
        "v": JSON_VERSION,
        "can_train": can_train(findings),
        "findings": [asdict(finding) for finding in findings],
        "facts": asdict(facts),
    }


def report_lines(findings: Sequence[Finding]) -> list[str]:
    """The report for a person: a line for each finding, then what to do, then the result."""
    width = max(len(finding.name) for finding in findings)
    lines = [printable(f"{each.name:<{width}}  {each.state:<7}  {each.found}{_affected(each)}") for each in findings]
    to_do = [finding for finding in findings if finding.fix]
    if to_do:
        lines += ["", "to do:"]
    for finding in to_do:
        label = "required" if finding.is_required and finding.state == "missing" else f"for {finding.needed_for}"
        lines += [printable(f"  {finding.name} ({label}):"), printable(f"    {finding.fix}")]
    lines += ["", _result(findings)]
    return lines


def _affected(finding: Finding) -> str:
    """Return the affected feature where there is nothing to do; else it stands with the command."""
    return f" (affects {finding.needed_for})" if finding.needed_for and not finding.fix else ""


def _result(findings: Sequence[Finding]) -> str:
    if can_train(findings):
        gpus = sum(finding.name.startswith("cuda:") and finding.state == "ok" for finding in findings)
        return f"training can run here, on {f'{gpus} GPU' + ('s' if gpus > 1 else '') if gpus else 'the CPU'}"
    missing = [each.name for each in findings if each.is_required and each.state == "missing"]
    return f"training cannot run here: {', '.join(missing)} missing"
