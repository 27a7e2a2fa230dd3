"""Losses as sums over labels: the step divides by the global count of labels, so any padding or packing is right.

Letters: N tokens (all rows), D model width, V vocabulary; v this rank's part of the vocabulary under tensor parallel.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from titanlite.batch import IGNORE, Batch


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """logits [B, S, V] -> next-token loss in nats, summed over labels that are not IGNORE, fp32 (fp64 for fp64 logits).

    Logits that are split over the vocabulary (a DTensor) are never gathered.
    """
    labels = batch.labels.flatten()
    if isinstance(logits, DTensor):
        return _SplitCrossEntropy.apply(logits.to_local().flatten(0, 1), labels, *_split_of(logits, -1))
    logits = logits.flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")


def label_logprobs(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """logits [B, S, V] -> (log p of each label [B, S], entropy in nats [B, S]) of logits / temperature, in fp32 at least.

    Where a label is IGNORE both are 0. Logits that are split over the vocabulary (a DTensor) are never gathered.
    """
    if isinstance(logits, DTensor):
        first, group = _split_of(logits, -1)
        found = _SplitLogprobs.apply(logits.to_local().flatten(0, 1), labels.flatten(), first, group, temperature)
        return found[0].view_as(labels), found[1].view_as(labels)
    counted = labels != IGNORE
    log_p = tempered(logits, temperature)
    logprobs = log_p.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return logprobs * counted, -(log_p.exp() * log_p).sum(-1) * counted


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """[..., V] log p of logits / temperature, in fp32 at least."""
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)


def linear_cross_entropy(hidden: Tensor, batch: Batch, *, head: nn.Linear, chunk_tokens: int) -> Tensor:
    """`cross_entropy(head(hidden), batch)` for hidden [B, S, D], with logits of `chunk_tokens` tokens at a time.

    Gradients are made along with the loss, so no logits are kept (Liger kernel, arXiv 2410.10989); the head's weight may
    be split over the vocabulary, hidden is whole.
    """
    weight, first, group = head.weight, 0, None
    if isinstance(weight, DTensor):
        first, group = _split_of(weight, 0)
        weight = weight.to_local()
        hidden = hidden.to_local(grad_placements=[Partial()])  # every rank adds what its part of the vocabulary gives
    return _LinearCrossEntropy.apply(hidden.flatten(0, 1), weight, batch.labels.flatten(), first, group, chunk_tokens)


def multi_token_loss(output: Tensor, batch: Batch, *, loss_fn: Callable[[Tensor, Batch], Tensor], weight: float, total: Tensor) -> Tensor:
    """`loss_fn` of the next tokens, with the gradient of `weight` times that of tokens further ahead too (arXiv 2412.19437, eq. 24 and 25).

    output [(1 + K) * B, ...], the next tokens' first; the mean over k of the further losses is added to `total`.
    """
    if batch.ahead is None:
        return loss_fn(output, batch)
    loss, *further = output.split(len(batch.tokens))
    labels = batch.ahead[..., 1].unbind(-1)
    extra = sum(loss_fn(part, batch._replace(labels=labels_BS)) for part, labels_BS in zip(further, labels)) / len(labels)
    total += extra.detach()
    return loss_fn(loss, batch) + weight * (extra - extra.detach())


def chunk_loss(head: nn.Linear, chunk_tokens: int) -> partial:
    """The loss that makes the head's logits itself, chunk by chunk: from now on the head hands its input through."""
    head.forward = lambda hidden: hidden
    return partial(linear_cross_entropy, head=head, chunk_tokens=chunk_tokens)


def _split_of(tensor: DTensor, dim: int) -> tuple[int, dist.ProcessGroup]:
    """(index of this rank's first entry along `dim`, group over which that dimension is split)."""
    mesh = tensor.device_mesh
    per_rank = -(-tensor.shape[dim] // mesh.size())
    return mesh.get_local_rank() * per_rank, mesh.get_group()


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_Nv: Tensor, labels_N: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        loss, gradient_Nv = _loss_and_gradient(logits_Nv, labels_N, first, group)
        ctx.save_for_backward(gradient_Nv.to(logits_Nv.dtype))
        return loss

    @staticmethod
    def backward(ctx, scale: Tensor) -> tuple:
        return ctx.saved_tensors[0] * scale, None, None, None


class _SplitLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_Nv: Tensor, labels_N: Tensor, first: int, group: dist.ProcessGroup, temperature: float) -> tuple[Tensor, Tensor]:
        logits = logits_Nv.to(torch.promote_types(logits_Nv.dtype, torch.float32)) / temperature
        highest = logits.amax(-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        logits = logits - highest[:, None]
        counted = labels_N != IGNORE
        local = labels_N - first
        here = counted & (local >= 0) & (local < logits.shape[1])
        index = local.clamp(0, logits.shape[1] - 1)[:, None]
        exp = logits.exp()
        sums = torch.stack([exp.sum(-1), (exp * logits).sum(-1), logits.gather(1, index).squeeze(1) * here])
        dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        entropies = (log_sum - sums[1] / sums[0]) * counted
        ctx.save_for_backward(logits - log_sum[:, None], index, here, counted, entropies)
        ctx.temperature, ctx.dtype = temperature, logits_Nv.dtype
        return (sums[2] - log_sum) * counted, entropies

    @staticmethod
    def backward(ctx, d_logprobs: Tensor, d_entropies: Tensor) -> tuple:
        log_p, index, here, counted, entropies = ctx.saved_tensors
        p = log_p.exp()
        gradient = -p * (d_logprobs * counted)[:, None]
        gradient.scatter_add_(1, index, (d_logprobs * here)[:, None])
        gradient -= p * (log_p + entropies[:, None]) * (d_entropies * counted)[:, None]
        return (gradient / ctx.temperature).to(ctx.dtype), None, None, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_vD, labels_N, first, group, chunk_tokens) -> Tensor:
        total, wanted = 0.0, any(ctx.needs_input_grad)
        accumulate = torch.promote_types(weight_vD.dtype, torch.float32)
        d_hidden = torch.empty_like(hidden_ND) if wanted else None
        d_weight = torch.zeros_like(weight_vD, dtype=accumulate) if wanted else None
        for i in range(0, len(hidden_ND), chunk_tokens):
            hidden = hidden_ND[i : i + chunk_tokens]
            loss, gradient = _loss_and_gradient(hidden @ weight_vD.T, labels_N[i : i + chunk_tokens], first, group)
            total = total + loss
            if wanted:
                gradient = gradient.to(hidden.dtype)
                d_hidden[i : i + chunk_tokens] = gradient @ weight_vD
                d_weight += gradient.T @ hidden
        if wanted:
            ctx.save_for_backward(d_hidden, d_weight.to(weight_vD.dtype))
        return total

    @staticmethod
    def backward(ctx, scale: Tensor) -> tuple:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * scale, d_weight * scale, None, None, None, None


@torch.compiler.disable
def _loss_and_gradient(
    logits_Nv: Tensor, labels_N: Tensor, first: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """(loss summed over labels, its gradient by the logits [N, v]), in fp32 at least.

    This rank's logits are those of the vocabulary from `first` on. The loss is the same on all ranks of the group.
    """
    logits = logits_Nv.to(torch.promote_types(logits_Nv.dtype, torch.float32), copy=True)
    highest = logits.amax(-1)
    if group is not None:
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    logits -= highest[:, None]
    counted = labels_N != IGNORE
    local = labels_N - first
    here = (counted & (local >= 0) & (local < logits.shape[1]))[:, None]
    index = local.clamp(0, logits.shape[1] - 1)[:, None]
    label_logit = (logits.gather(1, index) * here).squeeze(1)
    gradient = logits.exp_()
    sums = torch.stack([gradient.sum(-1), label_logit])
    if group is not None:
        dist.all_reduce(sums, group=group)
    loss = ((sums[0].log() - sums[1]) * counted).sum()
    gradient *= (counted / sums[0])[:, None]
    gradient.scatter_add_(1, index, -here.to(gradient.dtype))
    return loss, gradient
