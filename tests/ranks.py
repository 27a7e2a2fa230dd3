"""Runs a function on N ranks of this machine, forked from this process, which has only imported torch."""

from collections.abc import Callable
from typing import Any

from titanlite.verify.gang import Gang

_task: list[Any] = []  # inherited by the fork, so that it may be a closure, which cannot be pickled


def run_ranks(fn: Callable, world_size: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """[fn(*args) of rank 0, rank 1, ...], which must be plain data or numpy; see Gang. The ranks end with the call."""
    _task[:] = [fn, args]
    gang = Gang(world_size, timeout_s=timeout_s)
    try:
        return gang.run(_run_task)
    finally:
        gang.close()
        _task.clear()


def _run_task() -> Any:
    fn, args = _task
    return fn(*args)
