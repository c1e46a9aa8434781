"""Pool of processes that simulate one config. No torch here."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from segapp.chunks import Mode
from segapp.config import RunConfig
from segapp.errors import RunError
from segapp.memory.peaks import NetworkFacts, SimulationJob, SimulationResult
from segapp.places import keep_compiled_code
from segapp.training.console import progress_bar

NUM_PROCESSES = 2

_TIMEOUT_S = 600.0


class SimulationPool:
    """Context manager: processes that simulate one config; each runs `python -P -m segapp.planning.simulate`.

    A process reads the config and then requests, and answers each with a result or an error, all of them pickled.
    """

    def __init__(self, config: RunConfig, num_processes: int = NUM_PROCESSES) -> None:
        keep_compiled_code()  # of a parent that imports torch only later
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
        command, pipe = [sys.executable, "-P", "-m", "segapp.planning.simulate"], subprocess.PIPE
        self._processes = [
            subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environ) for _ in range(num_processes)
        ]
        self._threads = ThreadPoolExecutor(num_processes)
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        for process in self._processes:
            _send(process, config.model_dump(mode="json"))
            self._idle.put(process)

    def __enter__(self) -> SimulationPool:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._threads.shutdown()  # before the pipes are closed, which its threads may still read
        for process in self._processes:
            for pipe in (process.stdin, process.stdout, process.stderr):
                with suppress(OSError):
                    assert pipe is not None
                    pipe.close()

    def facts(self, mode: Mode) -> NetworkFacts:
        """Return the facts about the network; meanwhile every process builds its model."""
        facts: NetworkFacts = self._ask([mode] * len(self._processes), "memory plan: building the model")[0]
        return facts

    def simulate(self, jobs: Sequence[SimulationJob]) -> list[SimulationResult]:
        """Run jobs and return the results in the same order.

        Raises:
            ConfigError: the config cannot be built.
            RunError: a simulation failed or exceeded the timeout.
        """
        return self._ask(jobs, "memory plan: simulated steps")

    def _ask(self, requests: Sequence[Mode | SimulationJob], label: str) -> list[Any]:
        answers: list[Any] = []
        try:
            with progress_bar(len(requests), label, unit="job") as progress:
                for answer in self._threads.map(self._exchange, requests, timeout=_TIMEOUT_S):
                    answers.append(answer)
                    progress(len(answers))
        except TimeoutError:
            raise RunError(
                f"a memory simulation did not answer within {_TIMEOUT_S:.0f} s: try a smaller model"
            ) from None
        return answers

    def _exchange(self, request: Mode | SimulationJob) -> Any:
        process = self._idle.get()
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            _send(process, request)
            answer = pickle.load(process.stdout)
        except (EOFError, pickle.UnpicklingError):
            last = (process.stderr.read().decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
            raise RunError(f"the memory simulation ended: {last}") from None
        finally:
            self._idle.put(process)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _send(process: subprocess.Popen[bytes], value: Any) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # `_exchange` reports why the process ended
        pickle.dump(value, process.stdin)
        process.stdin.flush()
