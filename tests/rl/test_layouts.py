"""A step's samples give one rank's gradients, losses and figures, in fp64: whatever the loss, the ranks, the microbatches and the rows.

From samples with their rewards to what the optimizers get, by the trainer's own functions. The second half of the rows has no label, so there
are ranks without one. Weights move between scoring and training, so ratios of a later minibatch and a critic's moves are not trivial.
"""

import functools
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.runs import full, small_config
from titanlite.batch import IGNORE, Batch
from titanlite.config import Config, override
from titanlite.rl.critic import build_policy
from titanlite.rl.metrics import Figures
from titanlite.rl.policy import POLICY_FIGURES, uses_reference
from titanlite.rl.rollouts import Minibatch, Rollout, groups_of, minibatches_of
from titanlite.rl.score import microbatches_of, scored
from titanlite.rl.train import Policy, _update
from titanlite.trainer import Run, join, setup
from titanlite.verify.gang import Gang

SEQ_LEN, VOCAB, GROUPS, SIZE = 32, 63, 5, 4
UNIT = 8  # rows; a multiple of what each layout needs, so that all of them train on the same ones

LOSSES = {
    "GRPO": {"aggregation": "sequence", "kl_loss": "k3", "kl_coef": 0.1},
    "Dr. GRPO": {"deviation": "none", "aggregation": "constant"},
    "RLOO": {"baseline": "leave_one_out", "deviation": "none", "policy_loss": "reinforce", "aggregation": "sequence"},
    "REINFORCE++": {"advantage": "returns", "baseline": "none", "deviation": "none", "whiten": True, "gamma": 0.9, "kl_reward": "k1", "kl_reward_coef": 0.1},
    "REINFORCE++ with a baseline": {"deviation": "none", "whiten": True, "kl_loss": "k2", "kl_coef": 0.1},
    "PPO": {"advantage": "gae", "whiten": True, "kl_reward": "k1", "kl_reward_coef": 0.1, "value_clip": 0.05},
    "DAPO": {"clip_high": 0.14, "dual_clip": 1.02, "dynamic_sampling": True, "overlong_buffer_tokens": 6, "overlong_filter": True},
    "GSPO": {"policy_loss": "gspo", "aggregation": "sequence", "clip_low": 0.05, "clip_high": 0.04},
    "GSPO of tokens": {"policy_loss": "gspo_token", "aggregation": "sequence", "clip_low": 0.05, "clip_high": 0.04, "entropy_coef": 0.01, "temperature": 0.7},
    "CISPO": {"policy_loss": "cispo", "rollout_correction": "truncate", "rollout_high": 1.2},
    "IcePop": {"rollout_correction": "mask", "rollout_low": 0.5, "rollout_high": 2.0, "kl_loss": "k3_weighted", "kl_coef": 0.1},
    "masks of sequences": {"rollout_correction": "mask", "rollout_correction_of": "sequence", "rollout_low": 0.6, "rollout_high": 1.5, "off_policy_kl": 0.1},
}

tp, cp, pp, ep, shard, replicas, rows = (
    lambda n, key=key: (f"--{key}", str(n))
    for key in (
        "parallelism.tensor_parallel_degree", "parallelism.context_parallel_degree", "parallelism.pipeline_parallel_degree", "parallelism.expert_parallel_degree",
        "parallelism.data_parallel_shard_degree", "parallelism.data_parallel_replicate_degree", "training.local_batch_size",
    )
)  # fmt: skip
EXPERTS = ("--model.flavor", "experts")

LAYOUTS = {  # ranks, options with one microbatch a rank of packed rows, with two
    "one": (1, (*rows(8),), (*rows(4),)),
    "fsdp 2": (2, (*rows(4),), (*rows(3),)),  # the second microbatch has a single row
    "fsdp 4": (4, (*rows(3),), (*rows(1),)),  # ranks have 2 rows: fewer than a microbatch may have
    "hsdp 2x2": (4, (*replicas(2), *shard(2), *rows(2)), (*replicas(2), *shard(2), *rows(1))),
    "tp 2": (2, (*tp(2), *rows(8)), (*tp(2), *rows(4))),
    "cp 2": (2, (*cp(2), *rows(8)), (*cp(2), *rows(4))),
    "pp 2": (2, (*pp(2), *rows(8)), (*pp(2), *rows(4), "--parallelism.pipeline_parallel_microbatch_size", "2")),
    "tp 2, fsdp 2": (4, (*tp(2), *rows(4)), (*tp(2), *rows(2))),
    "one, experts": (1, (*EXPERTS, *rows(8)), (*EXPERTS, *rows(4))),
    "ep 2": (2, (*EXPERTS, *ep(2), *rows(4)), (*EXPERTS, *ep(2), *rows(2))),
}  # fmt: skip


def samples() -> list[Rollout]:
    """Five groups of four answers of 1 to 12 tokens. One was cut, one group's rewards are alike, in two answers a tool says three tokens."""
    generator, found = torch.Generator().manual_seed(3), []
    for g in range(GROUPS):
        for i in range(SIZE):
            n = 1 + (5 * g + 7 * i) % 12
            drawn = [False] * 3 + [not (n > 9 and 3 <= t < 6) for t in range(n)]
            logprobs = (-4.2 + 0.3 * torch.randn(n + 3, dtype=torch.float64, generator=generator)) * torch.tensor(drawn)
            ids = torch.randint(0, VOCAB, (n + 3,), generator=generator).tolist()
            reward = 1.0 if g == 4 else float((g + i) % 2) + 0.1 * i
            found.append(Rollout(g, i, tuple(ids), tuple(drawn), tuple(logprobs.tolist()), "", n != 12, "x", 0, reward))
    return found


def padded(batch: Batch) -> Batch:
    """The samples of packed rows, each in a row of its own; as many rows again hold nothing."""
    places = [(r, d) for r, row in enumerate(batch.documents) for d in range(int(row.max()) + 1) if (batch.labels[r][row == d] != IGNORE).any()]
    n = -(-2 * len(places) // UNIT) * UNIT
    wide = Batch(*(torch.zeros(n, *x.shape[1:], dtype=x.dtype) if x is not None else None for x in batch))
    wide.labels.fill_(IGNORE)
    wide.positions.copy_(torch.arange(SEQ_LEN))
    for i, (r, d) in enumerate(places):
        here = batch.documents[r] == d
        length = int(here.sum())
        for x, y in zip(wide, batch):
            if x is not None:
                x[i, :length] = y[r, here]
        wide.documents[i] = torch.arange(SEQ_LEN) >= length
        wide.positions[i, length:] = torch.arange(SEQ_LEN - length)
    return wide


def scale(run: Run, by: float) -> None:
    """Moves all weights, those of a name by the same factor under any layout."""
    for part in run.parts:
        for name, p in part.named_parameters():
            p.data.mul_(1 + by * (zlib.crc32(name.encode()) % 7 - 3))


def a_step(cfg: Config, kind: str, losses: dict[str, dict] = LOSSES) -> dict[tuple[str, int], tuple[dict[str, np.ndarray], dict[str, float]]]:
    """{(loss, minibatch): (this rank's gradients by name, the losses' figures)}"""
    run = build_policy(cfg, join(cfg))
    reference, critic, seen = setup(cfg, run.mesh), run.critic, {}
    scale(reference, 0.03)
    for of, one in (("", run), ("critic ", critic)):
        take = lambda *_, of=of, one=one: seen.update({of + name: full(p.grad) for part in one.parts for name, p in part.named_parameters()})  # noqa: E731
        one.optimizer.register_step_pre_hook(take)
    home = [(p, p.detach().clone()) for one in (run, critic) for p in one.parameters()]
    found = {}
    for name, values in losses.items():
        rl = override(cfg, {f"rl.{key}": value for key, value in ({"advantage": "group", "clip_low": 0.1, "clip_high": 0.1} | values).items()}).rl
        run.cfg, run.step, critic.step = replace(cfg, rl=rl), 0, 0
        run.critic = critic if rl.advantage == "gae" else None
        with torch.no_grad():
            for p, start in home:
                p.copy_(start)
        groups, _ = groups_of(rl, samples())
        minibatches = minibatches_of(rl, groups, seq_len=SEQ_LEN, unit=UNIT, end_id=0)
        if kind == "padded":
            minibatches = [Minibatch(padded(minibatch.batch), minibatch.samples) for minibatch in minibatches]
        batches, figures = scored(run, groups, minibatches, reference.parts if uses_reference(rl) else None)
        for one in (run, critic):
            scale(one, 0.07)
        policy = Policy(run, None, None, None, None, None, Figures.empty(run.mesh.device, **POLICY_FIGURES), None)
        for i, batch in enumerate(batches):
            assert (batch.labels[len(batch.labels) // 2 :] == IGNORE).all()  # of the last ranks
            seen.clear()
            measured, told = _update(policy, microbatches_of(run, batch))
            found[name, i] = dict(seen), told | figures | {"loss": measured.loss, "grad_norm": measured.grad_norm}
    return found


def configured(folder: Path, *options: str) -> Config:
    values = {"rl.advantage": "gae", "rl.minibatches": 2, "rl.group_size": SIZE, "rl.max_new_tokens": 12, "optimizer.lr": 0.0, "rl.critic_lr": 0.0}
    return override(small_config(folder, "--model.name", "tests.rl.models", "--model.flavor", "dense", *options), values)


def worst(ours: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> tuple[str, float]:
    """(the gradient that is off furthest, by how much, over its largest entry), of those that are here."""
    errors = {name: float(np.abs(ours[name] - expected[name]).max() / np.abs(expected[name]).max()) for name in ours}
    return max(errors.items(), key=lambda error: error[1])


@pytest.fixture(scope="module")
def stepped(tmp_path_factory):
    folder, gangs = tmp_path_factory.mktemp("layouts"), {}

    @functools.cache
    def of(ranks: int, options: tuple, kind: str):
        return gangs.setdefault(ranks, Gang(ranks, timeout_s=300)).run(a_step, configured(folder, *options), kind)

    yield of
    for gang in gangs.values():
        gang.close()


DEFAULT = {("fsdp 2", 2), ("hsdp 2x2", 1), ("tp 2", 1), ("cp 2", 1), ("pp 2", 2), ("ep 2", 1)}  # each axis once, packed
CASES = [
    pytest.param(layout, n, kind, marks=() if LAYOUTS[layout][0] == 1 or (layout, n) in DEFAULT and kind == "packed" else pytest.mark.full)
    for layout in LAYOUTS for n in (1, 2) for kind in ("packed", "padded")
]  # fmt: skip


@pytest.mark.parametrize("layout, microbatches, kind", CASES)
def test_gradients_and_figures_are_those_of_one_rank(stepped, layout, microbatches, kind):
    ranks, *options = LAYOUTS[layout]
    expected = alone(stepped, EXPERTS if EXPERTS[1] in options[0] else ())
    everywhere = stepped(ranks, options[microbatches - 1], kind)
    for (loss, i), (gradients, figures) in expected.items():
        assert gradients.keys() == set().union(*(ours[loss, i][0] for ours in everywhere))
        for ours in everywhere:
            mine, told = ours[loss, i]
            name, error = worst(mine, gradients)
            assert error < 1e-12, f"{loss}, minibatch {i}: {name} is off by {error}"  # sums of some thousand terms in other orders
            assert told == pytest.approx(figures, rel=1e-10, abs=1e-12), f"{loss}, minibatch {i}"


def alone(stepped, options: tuple = ()) -> dict:
    return stepped(1, (*options, *rows(8)), "packed")[0]


def test_what_is_compared_clips_masks_and_corrects_some_tokens(stepped):
    found = {loss: figures for (loss, i), (_, figures) in alone(stepped).items() if i == 1}
    clipped = [found[loss]["clip_fraction"] for loss in LOSSES if loss != "RLOO"]
    others = [found["PPO"]["value_clip_fraction"], found["CISPO"]["corrected_fraction"], found["IcePop"]["corrected_fraction"]]
    others += [found["masks of sequences"][name] for name in ("corrected_fraction", "masked_fraction")]
    assert all(0 < fraction < 1 for fraction in clipped + others)
