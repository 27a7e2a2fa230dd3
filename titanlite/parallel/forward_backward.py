"""What runs a step's microbatches forward and backward, and what runs forward only."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from titanlite.batch import Batch
from titanlite.config import Parallelism
from titanlite.parallel.data_parallel import computing, fsdp_modules, set_step_policy
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.pipeline import further, pipeline_forward, pipeline_forward_backward

LossFn = Callable[[Tensor, Batch], Tensor]  # model output, batch -> loss summed over labels, fp32 or fp64
ForwardBackward = Callable[[list[Batch], LossFn, Tensor], Tensor]


def build_forward_backward(parts: list[nn.Module], mesh: Mesh, cfg: Parallelism) -> ForwardBackward:
    """`forward_backward(microbatches, loss_fn, denominator)`: gradients of sum(losses) / denominator are added to .grad.

    Returns this rank's share of that loss, detached; 0 where a pipeline has its last stage on other ranks. `denominator` is
    the global label count of the whole step.
    """
    if mesh.degrees.pp > 1:
        return pipeline_forward_backward(parts, mesh, cfg)
    (model,) = parts
    wrapped = fsdp_modules(model)

    def forward_backward(microbatches: list[Batch], loss_fn: LossFn, denominator: Tensor) -> Tensor:
        total = torch.zeros_like(denominator)
        for i, batch in enumerate(microbatches):
            set_step_policy(wrapped, mesh, cfg, is_last=i == len(microbatches) - 1)
            with computing(model):
                loss = loss_fn(model(batch.tokens, batch.positions, batch.documents, **further(batch)), batch) / denominator
                loss.backward()
            total += loss.detach()
        return total

    return forward_backward


@torch.no_grad()
def forward_only(parts: list[nn.Module], mesh: Mesh, batch: Batch, fn: LossFn) -> Tensor | None:
    """`fn(logits, batch)`, or None where a pipeline has its last stage on other ranks.

    Afterwards every FSDP module is resharded, or later weight updates would be ignored.
    """
    if mesh.degrees.pp > 1:
        result = pipeline_forward(parts, mesh, batch, fn)
    else:
        (model,) = parts
        with computing(model):
            result = fn(model(batch.tokens, batch.positions, batch.documents), batch)
    for part in parts:
        for module in fsdp_modules(part):
            module.reshard()
    return result
