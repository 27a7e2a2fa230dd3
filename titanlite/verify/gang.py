"""A gang of ranks forked from this process, which has only imported torch: it takes one task after another."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from titanlite.config import Comm
from titanlite.parallel.mesh import init_distributed
from titanlite.utils import ConfigError


class RankFailed(RuntimeError):
    """A rank raised or died: holds the first one's traceback. The gang starts anew with its next task."""


class Gang:
    """`world_size` processes of this machine: on its accelerators where it has them, else gloo with one thread each.

    What a task returns must be plain data or numpy: a tensor's memory dies with its sender.
    """

    def __init__(self, world_size: int, *, timeout_s: float = 300):
        self.world_size, self.timeout_s = world_size, timeout_s
        self._ranks: list[tuple[multiprocessing.Process, Connection]] = []
        self._folder: tempfile.TemporaryDirectory | None = None

    def run(self, fn: Callable, *args: Any) -> list[Any]:
        """[fn(*args) of rank 0, of rank 1, ...]. Raises RankFailed, or the ConfigError that a rank raised."""
        try:
            if not self._ranks:
                self._start()
            pending = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
            for connection in pending:
                connection.send((fn, args))
            results: list[Any] = [None] * self.world_size
            while pending:
                ready = wait(list(pending), self.timeout_s)
                if not ready:
                    raise RankFailed(f"ranks {sorted(pending.values())} of {self.world_size}: no result in {self.timeout_s} s")
                for connection in ready:
                    rank = pending.pop(connection)
                    error, failure, results[rank] = connection.recv()
                    if error is not None:
                        raise error
                    if failure is not None:
                        raise RankFailed(f"rank {rank} of {self.world_size}:\n{failure}")
            return results
        except (EOFError, BrokenPipeError, ConnectionResetError) as e:
            self.close()
            raise RankFailed(f"a rank of {self.world_size} died") from e
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._ranks = []
        if self._folder:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(theirs, rank, self.world_size, self._folder.name), daemon=True
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours))


def _rank_main(tasks: Connection, rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    try:
        init_distributed(Comm(), store=dist.FileStore(os.path.join(folder, "store"), world_size))
    except ConfigError as e:
        tasks.send((e, None, None))
    while True:
        try:
            fn, args = tasks.recv()
        except EOFError:  # the parent is gone
            os._exit(0)
        outcome = (None, None, None)
        try:
            outcome = (None, None, fn(*args))
        except ConfigError as e:
            outcome = (e, None, None)
        except BaseException:
            outcome = (None, traceback.format_exc(), None)
        tasks.send(outcome)
