"""A critic beside the policy: its start, and its gradients under every layout."""

import functools

import numpy as np
import pytest
import torch

from tests.rl.test_policy import LAYOUTS, ROWS, a_batch, difference
from tests.runs import full, microbatches_of, small_config
from titanlite.checkpoint.state import model_state
from titanlite.config import override
from titanlite.parallel.collective import gathered
from titanlite.rl.critic import CRITIC_FIGURES, build_critic_loss, build_policy, start_critic
from titanlite.rl.metrics import Figures
from titanlite.rl.signals import with_signals
from titanlite.trainer import join
from titanlite.verify.gang import Gang


def gradients(cfg) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Of the critic, whose head still has the weights that a policy's would have; and its figures."""
    critic = build_policy(cfg, join(cfg)).critic
    batch, generator = a_batch("packed"), torch.Generator().manual_seed(4)
    old, returns = torch.randn(2, *batch.labels.shape, dtype=torch.float64, generator=generator).unbind(0)
    figures = Figures.empty(critic.mesh.device, means=CRITIC_FIGURES)
    loss_fn = build_critic_loss(cfg.rl, figures)
    rows = microbatches_of(critic, with_signals(batch, value=old, returns=returns))
    critic.forward_backward(rows, loss_fn, torch.tensor(1.0, dtype=torch.float64))
    return {name: full(p.grad) for part in critic.parts for name, p in part.named_parameters()}, figures.take()


@pytest.fixture(scope="module")
def configured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("critic")
    values = {"rl.advantage": "gae", "rl.value_clip": 1.0, "training.global_batch_size": 2 * ROWS}
    return lambda *options: override(small_config(folder, *options), values)


@pytest.fixture(scope="module")
def run_ranks():
    gangs = functools.cache(lambda ranks: Gang(ranks, timeout_s=120))
    yield lambda fn, ranks, *args: gangs(ranks).run(fn, *args)
    for ranks in (1, 2, 4):
        gangs(ranks).close()


@pytest.fixture(scope="module")
def alone(configured, run_ranks):
    return functools.cache(lambda *options: run_ranks(gradients, 1, configured(*options))[0])


EXPERTS = {"experts over 2": (2, ("--parallelism.expert_parallel_degree", "2", "--model.name", "qwen3_moe"))}


@pytest.mark.parametrize("layout", LAYOUTS | EXPERTS)
def test_a_critics_gradients_are_those_of_one_rank(configured, run_ranks, alone, layout):
    ranks, options = (LAYOUTS | EXPERTS)[layout]
    expected, told = alone(*(options[-2:] if options[-2:][:1] in (("--model.vocab_size",), ("--model.name",)) else ()))
    assert 0.05 < told["value_clip_fraction"] < 0.95
    for ours, figures in run_ranks(gradients, ranks, configured(*options)):
        assert difference(ours, expected) < 1e-12
        assert figures == pytest.approx(told, rel=1e-12)


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
def test_a_critic_starts_as_the_policy_with_a_head_of_zeros(configured, run_ranks, ranks, options):
    for tied in ("true", "false"):
        for different, names, zero in run_ranks(started, ranks, configured(*options, "--model.tie_embeddings", tied, "--training.local_batch_size", "8")):
            assert different <= {"model.output.weight"} <= names and zero
