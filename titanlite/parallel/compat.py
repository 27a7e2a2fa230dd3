"""Every private PyTorch API in use, in one place."""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def unflatten(mesh: DeviceMesh, names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
    """A view of the one-dimensional `mesh` with the given axes. All views of one root may be used together."""
    return mesh._unflatten(0, sizes, names)


def set_timeout(timeout_s: int, group: dist.ProcessGroup) -> None:
    """Bounds every later collective of the group."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
