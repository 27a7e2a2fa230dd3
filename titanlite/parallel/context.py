"""Context parallel: each rank holds a part of every row's sequence, and attention reaches across the parts.

Nothing but the attention core knows of it: everything else works token by token, with `positions` saying where a token
stands. What a query sees is decided by positions and documents; in its row it is never a later token.
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
    cp, headtail = mesh.data["cp"], cfg.context_parallel_load_balancer == "headtail"
    for core in cores.values():
        if hasattr(core, "attend"):
            core.forward = partial(forward, core.forward, core.attend, cp, headtail)
        else:
            core.hold(cp.get_local_rank(), cp.size())
            core.forward = partial(ulysses_attention, core.forward, None, cp, headtail)
    logger.info(f"context_parallel={mesh.degrees.cp} method={cfg.context_parallel_method} cores={len(cores)}")


def gather_attention(
    forward: Callable, attend: Callable, cp: DeviceMesh, headtail: bool,
    q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, positions: Tensor, documents: Tensor | None,
) -> Tensor:  # fmt: skip
    """Every rank gathers all keys and values (Llama 3, arXiv 2407.21783): cheap where key-value heads are few.

    A piece of the sequence attends to what lies before its end in the row, so that no more is computed than on one rank.
    """
    # A rank's queries give a part of each key's gradient: Partial adds the parts up.
    k, v = (_over(cp, x, 1).redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]) for x in (k_BSKE, v_BSKE))
    places = positions, documents
    k, v, *places_k = (_in_row_order(cp, headtail, x) for x in (k, v, *(_whole(cp, x) for x in places)))
    rank, pieces = cp.get_local_rank(), [cp.get_local_rank()]
    if headtail:
        pieces.append(2 * cp.size() - 1 - rank)
    n = q_BSHE.shape[1] // len(pieces)
    outs = []
    for i, piece in enumerate(pieces):
        q = q_BSHE[:, i * n :][:, :n]
        places_q = tuple(None if x is None else x[:, i * n :][:, :n] for x in places)
        end = (piece + 1) * n
        outs.append(attend(q, k[:, :end], v[:, :end], places_q, tuple(None if x is None else x[:, :end] for x in places_k)))
    return torch.cat(outs, 1)


def ulysses_attention(
    forward: Callable, attend: Callable | None, cp: DeviceMesh, headtail: bool,
    q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, positions: Tensor, documents: Tensor | None,
) -> Tensor:  # fmt: skip
    """Ranks trade parts of the sequence for heads, attend over whole rows, and trade back (DeepSpeed-Ulysses, arXiv 2309.14509).

    Key-value heads are repeated where there are fewer than ranks.
    """
    missing = max(1, cp.size() // k_BSKE.shape[2])
    k, v = (x.repeat_interleave(missing, 2) for x in (k_BSKE, v_BSKE))
    whole = (_over(cp, x, 1).redistribute(placements=[Shard(2)]).to_local() for x in (q_BSHE, k, v))
    whole = (*whole, _whole(cp, positions), _whole(cp, documents))
    out = forward(*(_in_row_order(cp, headtail, x) for x in whole))
    return _over(cp, _in_rank_order(cp, headtail, out), 2).redistribute(placements=[Shard(1)]).to_local()


def _in_row_order(cp: DeviceMesh, headtail: bool, x: Tensor | None) -> Tensor | None:
    """Whole rows [B, S, ...], put together rank by rank, as they were before `local_batch`."""
    if x is None or not headtail:
        return x
    head, tail = x.unflatten(1, (cp.size(), 2, -1)).unbind(2)
    return torch.cat([head, tail.flip(1)], 1).flatten(1, 2)


def _in_rank_order(cp: DeviceMesh, headtail: bool, x: Tensor) -> Tensor:
    """Undoes `_in_row_order`."""
    if not headtail:
        return x
    head, tail = x.unflatten(1, (2, cp.size(), -1)).unbind(1)
    return torch.stack([head, tail.flip(1)], 2).flatten(1, 3)


def _over(cp: DeviceMesh, part: Tensor, dim: int) -> DTensor:
    return DTensor.from_local(part, cp, [Shard(dim)], run_check=False)


def _whole(cp: DeviceMesh, part: Tensor | None) -> Tensor | None:
    return None if part is None else _over(cp, part, 1).full_tensor()
