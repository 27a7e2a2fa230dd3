"""Rewards, in processes that are killed where they take too long: a failure is told and counted, and is never a 0."""

import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from titanlite.rl.tasks import Problem, build_task

START_S = 120


@dataclass(frozen=True)
class Reward:
    value: float | None
    failure: str = ""  # why there is no value


@dataclass
class _Worker:
    process: subprocess.Popen
    pipe: Connection
    job: int = -1
    since: float = 0.0


class RewardPool:
    """Processes with the task that `spec`, the arguments of `build_task`, names."""

    def __init__(self, spec: tuple[str, tuple[str, ...], int], *, n_workers: int, timeout_s: float):
        self.spec, self.timeout_s = spec, timeout_s
        self.workers = [self._start() for _ in range(n_workers)]

    def _start(self) -> _Worker:
        ours, theirs = socket.socketpair()
        # A process of its own from the start: a fork of one with threads may hang.
        process = subprocess.Popen([sys.executable, "-m", "titanlite.rl.rewards", str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        pipe = Connection(ours.detach())
        pipe.send(self.spec)
        if not pipe.poll(START_S) or pipe.recv() != "ready":
            raise RuntimeError(f"a process for rewards did not start within {START_S} s")
        return _Worker(process, pipe)

    def rewards(self, answers: Sequence[tuple[Problem, str]]) -> list[Reward]:
        """One for each (problem, sample's text), in their order."""
        found: list[Reward | None] = [None] * len(answers)
        waiting = list(reversed(range(len(answers))))
        while waiting or any(worker.job >= 0 for worker in self.workers):
            for worker in self.workers:
                if worker.job < 0 and waiting:
                    worker.job, worker.since = waiting.pop(), time.monotonic()
                    worker.pipe.send(answers[worker.job])
            busy = [worker for worker in self.workers if worker.job >= 0]
            left = min(worker.since for worker in busy) + self.timeout_s - time.monotonic()
            ready = wait([worker.pipe for worker in busy], timeout=max(left, 0))
            for worker in busy:
                if worker.pipe in ready:
                    try:
                        found[worker.job], worker.job = worker.pipe.recv(), -1
                    except (EOFError, ConnectionResetError):
                        found[worker.job] = Reward(None, f"its process ended with {self._replace(worker)}")
                elif time.monotonic() - worker.since >= self.timeout_s:
                    job = worker.job
                    worker.process.kill()
                    self._replace(worker)
                    found[job] = Reward(None, f"no answer within {self.timeout_s:g} s")
        return found

    def _replace(self, worker: _Worker) -> int | None:
        code = worker.process.wait()
        worker.pipe.close()
        self.workers[self.workers.index(worker)] = self._start()
        return code

    def close(self) -> None:
        for worker in self.workers:
            worker.process.kill()
            worker.process.wait()
            worker.pipe.close()


def _work(pipe: Connection) -> None:
    task = build_task(*pipe.recv())
    pipe.send("ready")
    while True:
        try:
            problem, answer = pipe.recv()
        except (EOFError, ConnectionResetError):  # the trainer has ended
            return
        try:
            pipe.send(Reward(float(task.reward(problem, answer))))
        except Exception as error:
            pipe.send(Reward(None, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    from titanlite.rl import rewards  # what is sent must be of the module, not of this script

    rewards._work(Connection(int(sys.argv[1])))
