"""Process groups: the device, the launch environment and the named views of one root mesh."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.config import Comm
from titanlite.parallel.compat import unflatten
from titanlite.parallel.degrees import Degrees
from titanlite.utils import ConfigError


@dataclass(frozen=True)
class Mesh:
    """Views of one root: FSDP takes a mesh of a foreign root without complaint, so there is only one.

    data   (pp, batch, cp, tp): who reads which rows
    dense  (pp, dp_replicate, fsdp, tp): how parameters are laid out; fsdp = dp_shard * cp
    sparse (pp, dp_replicate, efsdp, ep, etp): how experts are; efsdp = dp_shard * cp * tp / (ep * etp)
    rows   (pp, batch, row): who holds parts of the same rows
    stages (pp, stage): who holds the same layers

    The last three are for models of experts.
    """

    degrees: Degrees
    device: torch.device
    data: DeviceMesh
    dense: DeviceMesh
    sparse: DeviceMesh | None = None
    rows: DeviceMesh | None = None
    stages: DeviceMesh | None = None

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    def groups(self) -> list[dist.ProcessGroup]:
        """Those that training communicates over."""
        views = [view for view in (self.data, self.dense, self.sparse, self.rows, self.stages) if view is not None]
        return [dist.group.WORLD, *(group for view in views for group in view.get_all_groups())]

    @property
    def batch_rank(self) -> int:
        """Ranks of one batch rank read the same rows."""
        return self.data.get_local_rank("batch")

    @property
    def pp_rank(self) -> int:
        return self.data.get_local_rank("pp")

    @property
    def counts_loss(self) -> bool:
        """One rank among those that compute the same loss; without the last pipeline stage it has none to count."""
        return self.data.get_local_rank("tp") == 0

    @property
    def counts_labels(self) -> bool:
        """One rank among those that hold the same labels."""
        return self.counts_loss and self.pp_rank == 0


def init_distributed(comm: Comm, *, store: dist.Store | None = None) -> torch.device:
    """Joins the gang that torchrun started, or makes one of this process alone; returns this rank's device.

    With a store, its ranks meet there instead of at torchrun's.
    """
    timeout = timedelta(seconds=comm.init_timeout_seconds)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        if device.index >= torch.accelerator.device_count():
            raise ConfigError(f"local rank {device.index} has no device: this machine has {torch.accelerator.device_count()}")
        torch.accelerator.set_device_index(device.index)
    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl" if device.type == "cuda" else None
        rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
        if store is None and "RANK" not in os.environ:
            store = dist.HashStore()
        meet = {} if store is None else {"store": store, "rank": rank, "world_size": world_size}
        dist.init_process_group(backend, timeout=timeout, **meet)
    return device


def build_mesh(degrees: Degrees, device: torch.device, *, experts: bool = False) -> Mesh:
    """The named views over all ranks, tp innermost so that its ranks are neighbours on one node; for a model of experts, theirs."""
    world = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("world",))
    d = degrees
    return Mesh(
        degrees=d,
        device=device,
        data=unflatten(world, ("pp", "batch", "cp", "tp"), (d.pp, d.batch, d.cp, d.tp)),
        dense=unflatten(world, ("pp", "dp_replicate", "fsdp", "tp"), (d.pp, d.dp_replicate, d.fsdp, d.tp)),
        sparse=unflatten(world, ("pp", "dp_replicate", "efsdp", "ep", "etp"), (d.pp, d.dp_replicate, d.efsdp, d.ep, d.etp)) if experts else None,
        rows=unflatten(world, ("pp", "batch", "row"), (d.pp, d.batch, d.cp * d.tp)) if experts else None,
        stages=unflatten(world, ("pp", "stage"), (d.pp, d.batch * d.cp * d.tp)) if experts else None,
    )
