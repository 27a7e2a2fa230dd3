"""Losses and gradients are those of verl 0.9.1 (core_algos) and TRL 1.16 (GRPOTrainer._compute_loss), whose numbers oracle.json keeps.

Six sequences of 5, 3, 1, 4, 5 and 2 tokens in fp64; the first three and the last three are groups. Where conventions differ, a test says so.
"""

import json
from pathlib import Path

import pytest
import torch

from titanlite.losses import label_logprobs
from titanlite.rl.algorithms import (
    cispo_loss,
    gae,
    group_advantages,
    kl_estimate,
    kl_loss,
    log_ratio,
    off_policy_mask,
    ppo_loss,
    reinforce_loss,
    returns,
    rollout_weights,
    sequence_ratio,
    token_weights,
    value_loss,
    whitened,
)

ORACLE = json.loads((Path(__file__).parent / "oracle.json").read_text())
LENGTHS = torch.tensor(ORACLE["lengths"])
OF = torch.arange(6).repeat_interleave(LENGTHS)
# verl adds 1e-8 to the number of tokens of a sequence, of which there are one to five, and to variances.
CLOSE = {"rtol": 2e-8, "atol": 2e-8}


def flat(rows: list) -> torch.Tensor:
    """[T] the tokens of [N, T] rows with padding, or a sequence's value for each of its tokens."""
    rows = torch.tensor(rows, dtype=torch.float64)
    return rows[OF] if rows.ndim == 1 else torch.cat([row[:n] for row, n in zip(rows, LENGTHS.tolist())])


DATA = {name: flat(rows) for name, rows in ORACLE["inputs"].items()}
OLD, REFERENCE, ROLLOUT, A = (DATA[name] for name in ("old", "reference", "rollout", "advantages"))


def ppo(logprobs: torch.Tensor, **options) -> torch.Tensor:
    return ppo_loss(log_ratio(logprobs, OLD).exp(), A, **{"clip_low": 0.2, "clip_high": 0.28} | options)


def gspo(logprobs: torch.Tensor, form: str) -> torch.Tensor:
    return ppo_loss(sequence_ratio(logprobs, OLD, OF, LENGTHS, form=form), A, clip_low=0.1, clip_high=0.12)


def cispo(logprobs: torch.Tensor, **clips) -> torch.Tensor:
    return cispo_loss(logprobs, log_ratio(logprobs, OLD).exp(), A, **clips)


LOSSES = {
    ("verl", "ppo token-mean"): ("token", lambda x: ppo(x, dual_clip=3.0)),
    ("verl", "ppo seq-mean-token-mean"): ("sequence", lambda x: ppo(x, dual_clip=3.0)),
    ("verl", "ppo seq-mean-token-sum-norm"): ("constant", lambda x: ppo(x, dual_clip=3.0)),
    ("verl", "ppo dual 1.1"): ("token", lambda x: ppo(x, dual_clip=1.1)),
    ("verl", "ppo truncated"): ("token", lambda x: ppo(x, dual_clip=3.0) * rollout_weights(OLD, ROLLOUT, "truncate", high=1.2)),
    ("verl", "gspo"): ("sequence", lambda x: gspo(x, "token")),
    ("verl", "reinforce"): ("sequence", lambda x: reinforce_loss(x, A)),
    ("verl", "k3+"): ("token", lambda x: kl_loss(x, REFERENCE, "k2")),  # its gradient: verl shows k3's value with it
    ("verl", "cispo"): ("token", lambda x: cispo(x, clip_low=0.3, clip_high=0.25)),
    ("trl", "grpo"): ("sequence", ppo),
    ("trl", "grpo, delta"): ("sequence", lambda x: ppo(x, dual_clip=1.35)),
    ("trl", "dapo"): ("token", ppo),
    ("trl", "bnpo"): ("token", ppo),
    ("trl", "dr_grpo"): ("constant", ppo),
    ("trl", "gspo"): ("sequence", lambda x: gspo(x, "sequence")),
    ("trl", "cispo"): ("token", lambda x: cispo(x, clip_low=1.0, clip_high=0.25)),  # its bound is 1.25 itself, and there is none below
    ("trl", "grpo, k3 in the loss"): ("sequence", lambda x: ppo(x) + 0.3 * kl_loss(x, REFERENCE, "k3")),
    ("trl", "grpo, k3 weighted"): ("sequence", lambda x: ppo(x) + 0.3 * kl_loss(x, REFERENCE, "k3_weighted", old=OLD)),
    ("trl", "grpo, off-policy mask"): ("sequence", lambda x: ppo(x) * off_policy_mask(x, ROLLOUT, A, OF, LENGTHS, most_kl=0.02)),
}


@pytest.mark.parametrize("where, name", LOSSES)
def test_losses_and_gradients_are_those_of_others(where, name):
    kind, loss_of = LOSSES[where, name]
    logprobs = DATA["logprobs"].clone().requires_grad_()
    loss = (token_weights(OF, LENGTHS, kind, most_tokens=5) * loss_of(logprobs)).sum()
    loss.backward()
    theirs = ORACLE[where][name]
    if name != "k3+":
        torch.testing.assert_close(loss.item(), theirs["loss"], **CLOSE)
    torch.testing.assert_close(logprobs.grad, flat(theirs["gradient"]), **CLOSE)


def test_every_number_that_is_kept_is_compared():
    assert {name for where, name in LOSSES if where == "trl"} == set(ORACLE["trl"])
    assert {name for where, name in LOSSES if where == "verl"} == {name for name, value in ORACLE["verl"].items() if isinstance(value, dict)} - {"value", "entropy"}


def test_the_critics_loss_is_verls():
    values = DATA["values"].clone().requires_grad_()
    loss = (token_weights(OF, LENGTHS, "token") * value_loss(values, DATA["old_values"], DATA["targets"], clip=0.2)).sum()
    loss.backward()
    torch.testing.assert_close(loss.item(), ORACLE["verl"]["value"]["loss"], **CLOSE)
    torch.testing.assert_close(values.grad, flat(ORACLE["verl"]["value"]["gradient"]), **CLOSE)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_estimates_of_the_divergence_are_verls(kind):
    torch.testing.assert_close(kl_estimate(DATA["logprobs"], REFERENCE, kind), flat(ORACLE["verl"][kind]), **CLOSE)


def test_entropies_and_their_gradients_are_verls():
    theirs = {name: torch.tensor(values, dtype=torch.float64) for name, values in ORACLE["verl"]["entropy"].items()}
    logits, labels = theirs["logits"].requires_grad_(), torch.zeros(1, 3, dtype=torch.int64)
    found = label_logprobs(logits[None], labels)[1][0]
    torch.testing.assert_close(found, theirs["values"], **CLOSE)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), logits)[0], theirs["gradient"], **CLOSE)


def test_corrections_of_the_generator_are_verls():
    bounds, of = {"low": 0.8, "high": 1.2}, {"sequences": OF, "lengths": LENGTHS}
    torch.testing.assert_close(rollout_weights(OLD, ROLLOUT, "truncate", **bounds), flat(ORACLE["verl"]["weights truncated"]), **CLOSE)
    torch.testing.assert_close(rollout_weights(OLD, ROLLOUT, "mask", **bounds), flat(ORACLE["verl"]["weights in bounds"]), **CLOSE)
    kept = rollout_weights(OLD, ROLLOUT, "mask", low=1 / 1.1, high=1 / 0.9, **of) > 0  # verl's bounds, 0.9 and 1.1, are on the inverse ratio
    assert torch.equal(kept.double(), flat(ORACLE["verl"]["sequences in bounds"])) and 0 < kept.double().mean() < 1


def test_advantages_are_verls():
    rewards = torch.tensor(ORACLE["inputs"]["rewards"], dtype=torch.float64).view(2, 3)
    grpo = group_advantages(rewards, deviation="sample", eps=1e-6)
    torch.testing.assert_close(grpo.flatten(), torch.tensor(ORACLE["verl"]["grpo"], dtype=torch.float64), **CLOSE)
    rloo = group_advantages(rewards, baseline="leave_one_out", deviation="none")
    torch.testing.assert_close(rloo.flatten(), torch.tensor(ORACLE["verl"]["rloo"], dtype=torch.float64), **CLOSE)
    centred = group_advantages(rewards, deviation="none")
    torch.testing.assert_close(centred.flatten(), torch.tensor(ORACLE["verl"]["dr_grpo"], dtype=torch.float64), **CLOSE)


def test_rewards_along_a_sequence_are_verls():
    rewards = torch.zeros(20, dtype=torch.float64)
    rewards[LENGTHS.cumsum(0) - 1] = torch.tensor(ORACLE["inputs"]["rewards"], dtype=torch.float64)
    advantages, targets = gae(rewards, DATA["values"], LENGTHS.tolist(), gamma=0.95, lam=0.9)
    torch.testing.assert_close(targets, flat(ORACLE["verl"]["gae returns"]), **CLOSE)
    # verl whitens with the sample deviation, over T - 1.
    unbiased = (19 / 20) ** 0.5
    torch.testing.assert_close(whitened(advantages) * unbiased, flat(ORACLE["verl"]["gae whitened"]), **CLOSE)
    torch.testing.assert_close(whitened(returns(rewards, LENGTHS.tolist(), gamma=0.9)) * unbiased, flat(ORACLE["verl"]["reinforce++"]), **CLOSE)
    baseline = group_advantages(torch.tensor(ORACLE["inputs"]["rewards"], dtype=torch.float64).view(2, 3), deviation="none").flatten()[OF]
    torch.testing.assert_close(whitened(baseline) * unbiased, flat(ORACLE["verl"]["reinforce++ baseline"]), **CLOSE)
