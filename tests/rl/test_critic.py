"""A critic beside the policy starts as the policy; see test_layouts for its gradients."""

import numpy as np
import pytest
import torch

from tests.ranks import run_ranks
from tests.runs import full, small_config
from titanlite.checkpoint.state import model_state
from titanlite.config import override
from titanlite.parallel.collective import gathered
from titanlite.rl.critic import build_policy, start_critic
from titanlite.trainer import join


def started(cfg) -> tuple[set[str], set[str], bool]:
    """(names of the critic's tensors that differ from the policy's, of those that the critic has, whether its head is 0)."""
    run = build_policy(cfg, join(cfg))
    with torch.no_grad():
        for tensor in model_state(run.parts).values():
            tensor.mul_(1.5)
    start_critic(run)
    policy, critic = ({name: full(tensor) for name, tensor in model_state(parts).items()} for parts in (run.parts, run.critic.parts))
    head = critic.get("model.output.weight")
    return {name for name in critic if not np.array_equal(critic[name], policy.get(name))}, set().union(*gathered(set(critic))), head is None or not head.any()


@pytest.mark.parametrize("ranks, options", [(1, ()), (2, ("--parallelism.tensor_parallel_degree", "2")), (2, ("--parallelism.pipeline_parallel_degree", "2"))])
def test_a_critic_starts_as_the_policy_with_a_head_of_zeros(tmp_path, ranks, options):
    for tied in ("true", "false"):
        words = (*options, "--model.tie_embeddings", tied, "--training.local_batch_size", "8")
        for different, names, zero in run_ranks(started, ranks, override(small_config(tmp_path, *words), {"rl.advantage": "gae"})):
            assert different <= {"model.output.weight"} <= names and zero
