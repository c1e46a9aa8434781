"""Coverage-guided fuzzing of the readers of foreign bytes, with atheris (libFuzzer for Python).

uv run --group fuzz python -m tests.fuzz.run_fuzzer config --minutes 5 [--corpus DIR] [--findings DIR]

Ends at the first finding: its input is in the findings folder, and its traceback on stderr. `--replay FILE` runs one
input again.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", help="config, mask, weights or list")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--corpus", type=Path, help="kept between runs; a temporary folder if left out")
    parser.add_argument("--findings", type=Path, default=Path(tempfile.gettempdir()) / "segapp-findings")
    parser.add_argument("--replay", type=Path, help="run this input once and leave")
    arguments = parser.parse_args()
    if arguments.replay is not None:
        from tests.fuzz.targets import TARGETS

        TARGETS[arguments.target].run(arguments.replay.read_bytes())
        return
    fuzz(arguments.target, arguments.minutes, arguments.corpus, arguments.findings)


def fuzz(name: str, minutes: float, corpus: Path | None, findings: Path) -> None:
    """Fuzzes one target until the time is over or something is found."""
    try:
        import atheris
    except ImportError:
        sys.exit("atheris is missing: uv run --group fuzz python -m tests.fuzz.run_fuzzer ...")
    with atheris.instrument_imports(include=["segapp", "yaml", "PIL", "zipfile"]):
        from tests.fuzz.targets import TARGETS, mutate, with_checksums

    target = TARGETS[name]
    corpus = corpus or Path(tempfile.mkdtemp(prefix="segapp-corpus-"))
    corpus.mkdir(parents=True, exist_ok=True)
    findings.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(target.seeds()):
        (corpus / f"seed-{i}").write_bytes(seed)

    def mutator(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.3:
            return mutate(data, rng, target.words)[:max_size]
        changed = bytes(atheris.Mutate(data, max_size))
        return with_checksums(changed)[:max_size] if rng.random() < 0.7 else changed

    options = [f"-max_total_time={round(60 * minutes)}", f"-artifact_prefix={findings}/{name}-", "-timeout=900"]
    options += ["-rss_limit_mb=4096", "-print_final_stats=1", "-max_len=32768"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], target.run, custom_mutator=mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
