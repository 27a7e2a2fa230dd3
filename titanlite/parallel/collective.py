"""Work that ranks do for, or with, each other. Where there is no process group it is done by this process alone."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from titanlite.utils import ConfigError

T = TypeVar("T")
Group = dist.ProcessGroup | None


def added_up(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over the ranks of a mesh with one axis, on all of them; so is its gradient, of which each rank has a part."""
    parts = DTensor.from_local(tensor, mesh, [Partial()], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def rank_in(group: Group = None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def size_of(group: Group = None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def gathered(mine: T, group: Group = None) -> list[T]:
    """Every rank's, on every rank."""
    everyone = [mine] * size_of(group)
    if dist.is_initialized():
        dist.all_gather_object(everyone, mine, group=group)
    return everyone


def gathered_on_rank_0(mine: T, group: Group = None) -> list[T]:
    """Every rank's, on rank 0; nothing elsewhere."""
    if not dist.is_initialized():
        return [mine]
    everyone = [mine] * size_of(group) if rank_in(group) == 0 else None
    dist.gather_object(mine, everyone, group=group, group_dst=0)
    return everyone or []


def on_rank_0(fn: Callable[[], T], group: Group = None) -> T:
    """What `fn()` returns on rank 0, on every rank; an exception it raises there is raised by every rank."""
    outcome: list[Any] = [None, None]
    if rank_in(group) == 0:
        try:
            outcome[0] = fn()
        except Exception as e:
            outcome[1] = e
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, group=group, group_src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def on_all_ranks(fn: Callable[[], T], group: Group = None, *, errors: type[Exception] = ConfigError) -> T:
    """`fn()`, run by every rank. If some rank raises one of `errors`, all ranks raise the first one, so none waits."""
    result, error = None, None
    try:
        result = fn()
    except errors as e:
        error = e
    for first in gathered(error, group):
        if first is not None:
            raise first
    return result


def on_shares(items: Iterable[str], fn: Callable[[list[str]], T], group: Group = None) -> list[T]:
    """What `fn` makes of each rank's share of `items`, on every rank."""
    return gathered(fn(sorted(items)[rank_in(group) :: size_of(group)]), group)


def rank_0_first(fn: Callable[[], T]) -> T:
    """`fn()` on rank 0, then on the others, which find what rank 0 left (a cache, a file)."""
    first = rank_in() == 0
    result = on_all_ranks(lambda: fn() if first else None)
    return on_all_ranks(lambda: result if first else fn())
