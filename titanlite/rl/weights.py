"""From the trained shards to a model that generates: colocated placement, where the ranks that train also generate.

Any layout of the trainer can be copied from: FSDP, ZeRO, HSDP, tensor, context, pipeline and expert parallel. The copy is whole on each rank.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.state import model_state
from titanlite.models import get_model, get_plan
from titanlite.parallel.collective import gathered
from titanlite.parallel.parallelize import allocate
from titanlite.trainer import Run


@torch.no_grad()
def inference_copy(run: Run, dtype: torch.dtype) -> nn.Module:
    """The whole model with the weights of this moment, on every rank, in evaluation. Collective; the caller lets go of it before it trains."""
    model = get_model(run.cfg.model, dtype)
    allocate(model, get_plan(run.cfg.model), run.mesh.device)
    model.requires_grad_(False)
    mine = model_state(run.parts)
    pp = run.mesh.data.get_group("pp") if run.mesh.degrees.pp > 1 else None
    holders = [mine.keys()] if pp is None else gathered(set(mine), pp)
    for name, target in model_state([model]).items():
        holder = next((i for i, names in enumerate(holders) if name in names), None)
        assert holder is not None, f"no rank holds {name}"
        if name in mine:
            target.copy_(_whole(mine[name], target.device))
        if pp is not None:
            dist.broadcast(target, group=pp, group_src=holder)
    return model.eval()


def _whole(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device).full_tensor() if isinstance(tensor, DTensor) else tensor
