"""What runs a step's microbatches forward and backward, and what runs forward only."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from titanlite.batch import Batch
from titanlite.parallel.data_parallel import fsdp_modules
from titanlite.parallel.mesh import Mesh

LossFn = Callable[[Tensor, Batch], Tensor]  # logits [B, S, V], batch -> loss summed over labels, a scalar in fp32 or fp64
ForwardBackward = Callable[[list[Batch], LossFn, Tensor], Tensor]


def build_forward_backward(parts: list[nn.Module], mesh: Mesh) -> ForwardBackward:
    """`forward_backward(microbatches, loss_fn, denominator)`: gradients of sum(losses) / denominator are added to .grad.

    Returns this rank's share of that loss, detached. `denominator` is the global label count of the whole step.
    """
    (model,) = parts
    wrapped = fsdp_modules(model)
    replicated = mesh.degrees.fsdp == 1

    def forward_backward(microbatches: list[Batch], loss_fn: LossFn, denominator: Tensor) -> Tensor:
        total = torch.zeros_like(denominator)
        for i, batch in enumerate(microbatches):
            is_last = i == len(microbatches) - 1
            for module in wrapped:  # shards are reduced at once (memory), replicas when the last microbatch is in
                module.set_requires_gradient_sync(is_last or not replicated, recurse=False)
                module.set_requires_all_reduce(is_last, recurse=False)
            loss = loss_fn(model(batch.tokens, batch.positions, batch.documents), batch) / denominator
            loss.backward()
            total += loss.detach()
        return total

    return forward_backward


@torch.no_grad()
def forward_only(parts: list[nn.Module], batch: Batch) -> Tensor:
    """Logits [B, S, V]. Afterwards every FSDP module is resharded, or later weight updates would be ignored."""
    (model,) = parts
    logits = model(batch.tokens, batch.positions, batch.documents)
    for module in fsdp_modules(model):
        module.reshard()
    return logits
