"""What generates has the trainer's weights: every one of them, whatever layout they come from."""

import numpy as np
import pytest
import torch

from tests.parallel.test_expert import config
from tests.ranks import run_ranks
from tests.runs import full
from titanlite.batch import Batch
from titanlite.checkpoint.state import model_state
from titanlite.parallel.collective import gathered
from titanlite.parallel.forward_backward import forward_only
from titanlite.rl.weights import inference_copy
from titanlite.trainer import join, place, setup


def copied(cfg, layout: str) -> tuple[list[str], float]:
    """(parameters whose copy differs, largest difference of logits), after every weight of the trainer was moved."""
    run = setup(cfg, join(cfg))
    with torch.no_grad():
        for i, tensor in enumerate(model_state(run.parts, copies=True).values()):
            tensor.mul_(1.0 + 0.01 * (i % 7)).add_(0.001 * (i % 5))
        for part in run.parts if "tied" in layout else ():  # two copies, which are always equal
            for name in {"tok_embeddings.weight", "output.weight"} & dict(part.named_parameters()).keys():
                part.get_parameter(name).fill_(0.02)
    model = inference_copy(run, torch.float64)
    theirs = {name: tensor.numpy() for name, tensor in model_state([model]).items()}
    ours = {name: full(tensor) for name, tensor in model_state(run.parts).items()}
    different = [name for name, tensor in ours.items() if not np.array_equal(tensor, theirs[name])]
    missing = theirs.keys() - set().union(*gathered(set(ours)))
    rows = torch.arange(64).view(2, 32)
    batch = Batch(rows, rows, torch.arange(32).expand(2, 32), torch.zeros(2, 32, dtype=torch.int64))
    logits = forward_only(run.parts, run.mesh, place(run, batch)._replace(ahead=None), lambda logits, _: logits)
    error = 0.0
    if logits is not None:
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        expected = model(rows, batch.positions, batch.documents)
        if run.mesh.degrees.cp > 1:
            from titanlite.parallel.context import sequence_index

            expected = expected[:, sequence_index(32, run.mesh, cfg.parallelism)]
        error = (logits - expected).abs().max().item()
    return sorted(different) + sorted(missing), error


@pytest.mark.parametrize(
    "family, layout, ranks",
    [
        ("deepseek_v3", "", 1),
        ("deepseek_v3", "ep=2,hsdp=2x2", 4),
        ("gpt_oss", "etp=2,tp=2,fsdp=2", 4),
        ("qwen3_moe", "pp=2,schedule=ZBVZeroBubble,fsdp=2", 4),
        ("qwen3_moe", "pp=2,tied=true", 2),
        ("minimax", "cp=2,tp=2", 4),
    ],
)
def test_every_weight_arrives_and_outputs_follow(family, layout, ranks):
    for wrong, error in run_ranks(copied, ranks, config(family, layout), layout):
        assert wrong == [] and error < 1e-10  # fp64; a weight that stayed behind is off by 1e-3 and more
