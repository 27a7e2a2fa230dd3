"""Ring attention (arXiv 2310.01889) with document masks: keys and values go round the context-parallel ranks, none holds all.

Shapes: queries [B, H, S, E], keys and values [B, K, S, E], S being this rank's part of the sequence.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def ring_attention(
    forward: Callable, attend: Callable, cp: DeviceMesh, headtail: bool,
    q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, positions: Tensor, documents: Tensor | None,
) -> Tensor:  # fmt: skip
    """Returns [B, S, H, E]. Its kernels are its own: those of the core cannot say how much a part of the keys weighs."""
    group = cp.get_group()
    mine = torch.stack([positions, torch.zeros_like(positions) if documents is None else documents])
    places = [torch.empty_like(mine) for _ in range(cp.size())]  # of every rank's tokens: (positions, documents)
    dist.all_gather(places, mine.contiguous(), group=group)
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q_BSHE, k_BSKE, v_BSKE))
    return _Ring.apply(q, k, v, torch.stack(places), group).transpose(1, 2)


class _Ring(torch.autograd.Function):
    """One pass of the keys round the ring forward, two backward: partial gradients of keys travel along with them."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, places: Tensor, group: dist.ProcessGroup) -> Tensor:
        rank, size, kv = dist.get_rank(group), dist.get_world_size(group), torch.stack([k, v])
        out = lse = None
        for step in range(size):
            arriving = _pass_on(kv, group) if step < size - 1 else None
            visible = _visible(places, rank, (rank - step) % size)
            part, part_lse = _attend(q, kv, visible)
            # A query that sees nothing of this part: kernels disagree on its log-sum-exp.
            part_lse = torch.where(visible.any(-1), part_lse, -torch.inf)
            if step == 0:  # every query sees itself, so this one is finite
                out, lse = part.to(part_lse.dtype), part_lse
            else:
                total = torch.logaddexp(lse, part_lse)
                out = out * (lse - total).exp()[..., None] + part.nan_to_num() * (part_lse - total).exp()[..., None]
                lse = total
            kv = arriving() if arriving else kv
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, places)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple:
        q, k, v, out, lse, places = ctx.saved_tensors
        rank, size, kv = dist.get_rank(ctx.group), dist.get_world_size(ctx.group), torch.stack([k, v])
        d_q, d_kv = torch.zeros_like(q), torch.zeros_like(kv)
        for step in range(size):
            arriving = _pass_on(kv, ctx.group)
            visible = _visible(places, rank, (rank - step) % size)
            part_q, part_kv = _attend_backward(d_out.contiguous(), q, kv, out, lse, visible)
            d_q += part_q
            d_kv = _pass_on(d_kv + part_kv, ctx.group)()
            kv = arriving()
        return d_q, d_kv[0], d_kv[1], None, None


def _pass_on(tensor: Tensor, group: dist.ProcessGroup):
    """Starts sending to the next rank; the result, called, waits for what comes from the rank before."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    received = torch.empty_like(tensor)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor.contiguous(), group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
        ]
    )

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return received

    return wait


def _visible(places: Tensor, queries: int, keys: int) -> Tensor:
    """[B, 1, S, S] bool: same document, at the query's position or before."""
    (positions_q, documents_q), (positions_k, documents_k) = places[queries], places[keys]
    same = documents_q[:, :, None] == documents_k[:, None, :]
    return (same & (positions_q[:, :, None] >= positions_k[:, None, :]))[:, None]


def _bias(q: Tensor, visible: Tensor) -> Tensor:
    bias = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, -torch.inf)
    return bias.expand(-1, q.shape[1], -1, -1)


def _attend(q: Tensor, kv: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """(output [B, H, S, E], log-sum-exp of the scores [B, H, S])."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in kv)
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=_bias(q, visible))
    out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, _bias(q, visible), True)
    return out, lse[..., : q.shape[2]]  # its rows are padded


def _attend_backward(
    d_out: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, visible: Tensor
) -> tuple[Tensor, Tensor]:
    """What these keys contribute to the gradients of queries, and of keys and values; `out` and `lse` are over all keys."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in kv)
    if q.device.type == "cpu":
        d_q, *d_kv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, q, k, v, out, lse, 0.0, False, attn_mask=_bias(q, visible)
        )
    else:
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, which is off
        d_q, *d_kv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            d_out, q, k, v, _bias(q, visible), out, lse, seed, seed, 0.0, [True, True, True, False]
        )
    return d_q, torch.stack([d.unflatten(1, (kv.shape[2], -1)).sum(2) for d in d_kv])
