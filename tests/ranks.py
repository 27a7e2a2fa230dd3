"""Runs a function on N ranks of this machine, forked from this process, which has only imported torch."""

from collections.abc import Callable
from typing import Any

from titanlite.verify.gang import Gang


def run_ranks(fn: Callable, world_size: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """[fn(*args) of rank 0, rank 1, ...], which must be plain data or numpy; see Gang. The ranks end with the call."""
    gang = Gang(world_size, timeout_s=timeout_s)
    try:
        return gang.run(fn, *args)
    finally:
        gang.close()
