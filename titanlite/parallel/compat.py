"""Every private PyTorch API in use, in one place."""

import csv
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# Renamed after torch 2.11.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def unflatten(mesh: DeviceMesh, names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
    """A view of the one-dimensional `mesh` with the given axes. All views of one root may be used together."""
    return mesh._unflatten(0, sizes, names)


def silent_mesh(ranks: Tensor) -> DeviceMesh:
    """A mesh of CPU ranks that says who is where, and makes no process group."""
    return DeviceMesh("cpu", ranks, _init_backend=False)


def in_backward() -> bool:
    """Whether this is called by a backward pass, as where a block is computed again."""
    return torch._C._current_graph_task_id() != -1


def set_timeout(timeout_s: int, group: dist.ProcessGroup) -> None:
    """Bounds every later collective of the group."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def read_csv_schedule(path: str) -> tuple[dict[int, list], tuple[int, ...], int, bool]:
    """(rank -> actions, rank of each stage, microbatches, whether a backward is split in two) of a pipeline schedule in
    PyTorch's CSV format: a line a rank, cells like 0F1 (stage 0, forward, microbatch 1), B, I, W. Raises ValueError if it is none.
    """
    from torch.distributed.pipelining import schedules as torch_schedules

    with open(path, newline="") as file:
        lines = list(csv.reader(file))
    actions = {rank: [torch_schedules._Action.from_str(cell.strip()) for cell in line] for rank, line in enumerate(lines)}
    flat = [a for line in actions.values() for cell in line if cell is not None for a in (cell.sub_actions or (cell,))]
    if not flat:
        raise ValueError("it has no action")
    n_stages = 1 + max(a.stage_index for a in flat)
    n_microbatches = 1 + max(a.microbatch_index if a.microbatch_index is not None else -1 for a in flat)
    try:
        ranks = torch_schedules._validate_schedule(actions, len(actions), n_stages, n_microbatches)
        order = {rank: torch_schedules._add_reduce_grad(torch_schedules._add_unshard_reshard(line), n_microbatches) for rank, line in actions.items()}
        torch_schedules._add_send_recv(order, stage_to_rank=lambda stage: ranks[stage], num_stages=n_stages)  # finds deadlocks
    except (AssertionError, KeyError) as e:
        raise ValueError(str(e).strip().splitlines()[0] if str(e) else repr(e)) from e
    forwards = [a.microbatch_index for a in flat if a.stage_index == n_stages - 1 and a.computation_type == torch_schedules.FORWARD]
    if forwards != sorted(forwards):  # PyTorch would take one microbatch's loss for another's
        raise ValueError(f"the last stage runs forward in the order {forwards}: microbatches must ascend there")
    split = any(a.computation_type in (torch_schedules.BACKWARD_INPUT, torch_schedules.BACKWARD_WEIGHT) for a in flat)
    return actions, tuple(ranks[stage] for stage in range(n_stages)), n_microbatches, split


def csv_schedule(path: str, stages: list, n_microbatches: int, **options: object) -> object:
    """What runs the schedule of a CSV file."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    schedule = _PipelineScheduleRuntime(stages, n_microbatches, **options)
    schedule._load_csv(path)
    return schedule
