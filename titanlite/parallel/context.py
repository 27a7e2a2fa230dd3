"""Context parallel: each rank holds a part of every row's sequence, and attention reaches across the parts.

Nothing but the attention core knows of it: everything else works token by token, with `positions` saying where a token
stands. Keys come in any order, because what a query sees is decided by positions and documents.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from titanlite.batch import Batch
from titanlite.config import Parallelism
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.plan import ParallelPlan, matching
from titanlite.parallel.ring import ring_attention
from titanlite.utils import logger


def sequence_index(seq_len: int, mesh: Mesh, cfg: Parallelism) -> Tensor:
    """[seq_len / cp] int64: which tokens of a row this rank holds, in its order.

    With the `headtail` balancer a rank has two pieces of 2 * cp, one from each end, so that all see equally many keys.
    """
    cp, rank = mesh.degrees.cp, mesh.data.get_local_rank("cp")
    if cfg.context_parallel_load_balancer == "none":
        return torch.arange(seq_len).chunk(cp)[rank]
    pieces = torch.arange(seq_len).chunk(2 * cp)
    return torch.cat([pieces[rank], pieces[2 * cp - 1 - rank]])


def local_batch(batch: Batch, mesh: Mesh, cfg: Parallelism) -> Batch:
    """The part [B, S / cp] of the rows' sequences that this rank works on."""
    if mesh.degrees.cp == 1:
        return batch
    index = sequence_index(batch.tokens.shape[1], mesh, cfg).to(batch.tokens.device)
    return Batch(*(None if x is None else x[:, index] for x in batch))


def apply_cp(part: nn.Module, mesh: Mesh, plan: ParallelPlan, cfg: Parallelism) -> None:
    """Replaces the forward of every attention core that the plan names."""
    if mesh.degrees.cp == 1:
        return
    forward = {"allgather": gather_attention, "ring": ring_attention, "ulysses": ulysses_attention}[cfg.context_parallel_method]
    cores = matching(part, plan.cores)
    for core in cores.values():
        core.forward = partial(forward, mesh.data["cp"], core.attend)
    logger.info(f"context_parallel={mesh.degrees.cp} method={cfg.context_parallel_method} cores={len(cores)}")


def gather_attention(
    cp: DeviceMesh, attend: Callable, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, positions: Tensor, documents: Tensor | None
) -> Tensor:
    """Every rank gathers all keys and values (Llama 3, arXiv 2407.21783): cheap where key-value heads are few."""
    # A rank's queries give a part of each key's gradient: Partial adds the parts up.
    k, v = (_over(cp, x, 1).redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]) for x in (k_BSKE, v_BSKE))
    return attend(q_BSHE, k, v, (positions, documents), (_whole(cp, positions), _whole(cp, documents)))


def ulysses_attention(
    cp: DeviceMesh, attend: Callable, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, positions: Tensor, documents: Tensor | None
) -> Tensor:
    """Ranks trade parts of the sequence for heads, attend over whole rows, and trade back (DeepSpeed-Ulysses, arXiv 2309.14509).

    Key-value heads are repeated where there are fewer than ranks.
    """
    missing = max(1, cp.size() // k_BSKE.shape[2])
    k, v = (x.repeat_interleave(missing, 2) for x in (k_BSKE, v_BSKE))
    q, k, v = (_over(cp, x, 1).redistribute(placements=[Shard(2)]).to_local() for x in (q_BSHE, k, v))
    places = _whole(cp, positions), _whole(cp, documents)
    return _over(cp, attend(q, k, v, places, places), 2).redistribute(placements=[Shard(1)]).to_local()


def _over(cp: DeviceMesh, part: Tensor, dim: int) -> DTensor:
    return DTensor.from_local(part, cp, [Shard(dim)], run_check=False)


def _whole(cp: DeviceMesh, part: Tensor | None) -> Tensor | None:
    return None if part is None else _over(cp, part, 1).full_tensor()
