"""Closed forms of the estimators: a bandit with two arms, and every sequence of a tiny policy, enumerated in fp64."""

import itertools
import math

import pytest
import torch

from titanlite.rl.algorithms import (
    cispo_loss,
    gae,
    group_advantages,
    is_clipped,
    kl_estimate,
    kl_loss,
    log_ratio,
    off_policy_mask,
    overlong_penalty,
    ppo_loss,
    reinforce_loss,
    returns,
    rollout_weights,
    sequence_mean,
    sequence_ratio,
    tells_apart,
    token_weights,
    value_loss,
    whitened,
)

EXACT = {"rtol": 0, "atol": 1e-12}  # fp64 sums of some thousand terms of order one


# A bandit: p = sigma(theta), reward 1 for one arm and 0 for the other


def expected_gradient(p: float, G: int, **options) -> float:
    """Of one group's mean of A d(log pi)/d(theta), over all outcomes: k of G samples take the arm that is rewarded."""
    total = 0.0
    for k in range(G + 1):
        rewards = torch.tensor([[1.0] * k + [0.0] * (G - k)], dtype=torch.float64)
        advantages = group_advantages(rewards, **options)[0]
        d_log = torch.tensor([1 - p] * k + [-p] * (G - k), dtype=torch.float64)
        total += math.comb(G, k) * p**k * (1 - p) ** (G - k) * (advantages * d_log).mean().item()
    return total


@pytest.mark.parametrize(
    "options, gradient",
    [
        ({"baseline": "none", "deviation": "none"}, 0.21),  # p (1 - p), the gradient of the expected reward
        ({"baseline": "leave_one_out", "deviation": "none"}, 0.21),
        ({"baseline": "mean", "deviation": "none"}, 0.18375),  # times (G - 1) / G
        ({"baseline": "mean", "deviation": "population", "eps": 0.0}, None),  # 0 / 0 in groups that are all alike
        ({"baseline": "mean", "deviation": "population", "eps": 1e-12}, 0.412172),
        ({"baseline": "mean", "deviation": "sample", "eps": 1e-6}, 0.385550),
    ],
)
def test_expected_gradients_of_a_bandit(options, gradient):
    found = expected_gradient(0.3, 8, **options)
    assert math.isnan(found) if gradient is None else found == pytest.approx(gradient, abs=5e-7)


@pytest.mark.parametrize(
    "options, advantage",
    [
        ({"deviation": "population", "eps": 0.0}, 1.732051),
        ({"deviation": "sample", "eps": 1e-6}, 1.620182),
        ({"baseline": "leave_one_out", "deviation": "none"}, 0.857143),
        ({"deviation": "none"}, 0.75),
    ],
)
def test_what_a_winner_gets_when_two_of_eight_are_right(options, advantage):
    rewards = torch.tensor([[1.0, 1, 0, 0, 0, 0, 0, 0]], dtype=torch.float64)
    assert group_advantages(rewards, **options)[0, 0].item() == pytest.approx(advantage, abs=5e-7)


def test_dynamic_sampling_keeps_a_group_as_often_as_its_samples_differ():
    p, G = 0.3, 8
    outcomes = torch.tensor(list(itertools.product((0.0, 1.0), repeat=G)), dtype=torch.float64)
    probability = (outcomes * p + (1 - outcomes) * (1 - p)).prod(1)
    assert (probability * tells_apart(outcomes)).sum().item() == pytest.approx(0.942286, abs=5e-7)


@pytest.mark.parametrize("options", [{"baseline": "leave_one_out", "deviation": "none"}, {"deviation": "sample"}, {"deviation": "population"}])
def test_a_group_of_one_and_a_group_all_alike_have_no_advantage(options):
    assert group_advantages(torch.tensor([[3.0]]), **options).item() == 0
    assert group_advantages(torch.full((2, 4), 0.5), **options).eq(0).all()


# A policy of three tokens from a vocabulary of four: all 64 sequences


V, L = 4, 3


class Policy:
    """Logits of a token depend on the two before it; parameters in fp64."""

    def __init__(self, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(L, V + 1, V + 1, V, dtype=torch.float64, generator=generator).requires_grad_()
        self.sequences = torch.tensor(list(itertools.product(range(V), repeat=L)))

    def logprobs(self, sequences: torch.Tensor) -> torch.Tensor:
        """[N, L]"""
        before = torch.cat([torch.full((len(sequences), 2), V), sequences], 1)
        columns = [self.table[t, before[:, t], before[:, t + 1]].log_softmax(-1).gather(1, sequences[:, t : t + 1]) for t in range(L)]
        return torch.cat(columns, 1)

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, self.table, retain_graph=True)[0]


@pytest.fixture(scope="module")
def policy():
    return Policy(0)


REWARDS = torch.linspace(0, 1, V**L, dtype=torch.float64).sin() + torch.arange(V**L) % 3
OF = torch.arange(V**L).repeat_interleave(L)  # which sequence a token is of
LENGTHS = torch.full((V**L,), L)


def true_gradient(policy: Policy, fn) -> torch.Tensor:
    """Of sum over sequences of fn(logprobs [N, L]) [N]."""
    return policy.gradient(fn(policy.logprobs(policy.sequences)).sum())


def expected(policy: Policy, losses: torch.Tensor) -> torch.Tensor:
    """Gradient of the expected loss [N, L], summed over tokens, where sequences are the policy's own and their probability has none."""
    with torch.no_grad():
        probability = policy.logprobs(policy.sequences).sum(1).exp()
    return policy.gradient((probability[:, None] * losses).sum())


def test_reinforce_and_leave_one_out_have_the_gradient_of_the_expected_reward(policy):
    truth = -true_gradient(policy, lambda logprobs: logprobs.sum(1).exp() * REWARDS)
    logprobs = policy.logprobs(policy.sequences)
    torch.testing.assert_close(expected(policy, reinforce_loss(logprobs, REWARDS[:, None])), truth, **EXACT)
    # Of all pairs of samples: each gets its reward less the other's.
    with torch.no_grad():
        probability = logprobs.sum(1).exp()
        pairs = torch.stack(torch.broadcast_tensors(REWARDS[:, None], REWARDS), -1).flatten(0, 1)
        advantages = group_advantages(pairs, baseline="leave_one_out", deviation="none")[:, 0].view(V**L, V**L) @ probability
    torch.testing.assert_close(expected(policy, reinforce_loss(logprobs, advantages[:, None])), truth, **EXACT)


def test_on_policy_ppo_cispo_and_truncated_sampling_are_reinforce(policy):
    logprobs = policy.logprobs(policy.sequences)
    old, A = logprobs.detach(), (REWARDS - REWARDS.mean())[:, None]
    ratio = log_ratio(logprobs, old).exp()
    truth = policy.gradient(reinforce_loss(logprobs, A).sum())
    for loss in (
        ppo_loss(ratio, A),
        ppo_loss(ratio, A, clip_low=0.2, clip_high=0.28, dual_clip=3.0),
        cispo_loss(logprobs, ratio, A),
        reinforce_loss(logprobs, A) * rollout_weights(old, old, "truncate"),
        reinforce_loss(logprobs, A) * rollout_weights(old, old, "mask"),
    ):
        torch.testing.assert_close(policy.gradient(loss.sum()), truth, **EXACT)


@pytest.mark.parametrize("form", ["sequence", "token"])
def test_on_policy_sequence_ratios_are_reinforce_under_sequence_means(policy, form):
    logprobs = policy.logprobs(policy.sequences).flatten()
    A, weights = (REWARDS - REWARDS.mean())[OF], token_weights(OF, LENGTHS, "sequence")
    ratio = sequence_ratio(logprobs, logprobs.detach(), OF, LENGTHS, form=form)
    ours = policy.gradient((weights * ppo_loss(ratio, A, clip_low=3e-4, clip_high=4e-4)).sum())
    truth = policy.gradient((weights * reinforce_loss(policy.logprobs(policy.sequences).flatten(), A)).sum())
    torch.testing.assert_close(ours, truth, **EXACT)


def kl(policy: Policy, other: Policy, *, reverse: bool = False) -> torch.Tensor:
    """Gradient by `policy` of KL(policy || other), or of KL(other || policy)."""
    logprobs, theirs = policy.logprobs(policy.sequences).sum(1), other.logprobs(policy.sequences).sum(1).detach()
    return policy.gradient((theirs.exp() * (theirs - logprobs)).sum() if reverse else (logprobs.exp() * (logprobs - theirs)).sum())


def test_penalties_in_the_loss_have_the_gradients_that_they_say(policy):
    """Of sequences, taken as one token each: for those the estimators are of the whole distribution."""
    other = Policy(1)
    logprobs, theirs = policy.logprobs(policy.sequences).sum(1, keepdim=True), other.logprobs(policy.sequences).sum(1, keepdim=True).detach()
    for kind, truth in (("k2", kl(policy, other)), ("k3", kl(policy, other, reverse=True)), ("k3_weighted", kl(policy, other))):
        found = expected(policy, kl_loss(logprobs, theirs, kind, old=logprobs.detach()))
        torch.testing.assert_close(found, truth, **EXACT)
    torch.testing.assert_close(expected(policy, kl_estimate(logprobs, theirs, "k1")), torch.zeros_like(policy.table), **EXACT)
    old = Policy(2).logprobs(policy.sequences).sum(1, keepdim=True).detach()  # another policy drew them
    found = policy.gradient((old.exp() * kl_loss(logprobs, theirs, "k3_weighted", old=old)).sum())
    torch.testing.assert_close(found, kl(policy, other), **EXACT)


def test_penalties_in_the_reward_estimate_the_divergence(policy):
    other = Policy(1)
    with torch.no_grad():
        logprobs, theirs = policy.logprobs(policy.sequences).sum(1), other.logprobs(policy.sequences).sum(1)
        truth = (logprobs.exp() * (logprobs - theirs)).sum()
        assert [round(((logprobs.exp() * kl_estimate(logprobs, theirs, k)).sum() - truth).abs().item(), 12) for k in ("k1", "k3")] == [0, 0]
        assert (kl_estimate(logprobs, theirs, "k3") >= 0).all() and (kl_estimate(logprobs, theirs, "k2") >= 0).all()


@pytest.mark.parametrize("way", ["returns", "whole"])
def test_a_divergence_in_the_reward_makes_the_gradient_of_what_is_earned_less_it(policy, way):
    """beta KL(policy || other) less: k1 as a number at each token, the reward at the last; each token is worth what follows it, or all of it."""
    other, beta = Policy(1), 0.7
    logprobs = policy.logprobs(policy.sequences)
    k1 = kl_estimate(logprobs.detach(), other.logprobs(policy.sequences).detach(), "k1")
    rewards = -beta * k1
    rewards[:, -1] += REWARDS
    worth = returns(rewards.flatten(), [L] * V**L).view(-1, L) if way == "returns" else rewards.sum(1, keepdim=True)
    truth = -true_gradient(policy, lambda logprobs: logprobs.sum(1).exp() * REWARDS) + beta * kl(policy, other)
    torch.testing.assert_close(expected(policy, reinforce_loss(logprobs, worth)), truth, **EXACT)


@pytest.mark.parametrize("lam", [1.0, 0.6])
def test_a_critics_advantages_have_the_gradient_of_the_expected_reward(policy, lam):
    """With lambda 1 whatever the critic foretells; with less where it foretells what is to come."""
    logprobs = policy.logprobs(policy.sequences)
    with torch.no_grad():
        probability = logprobs.sum(1).exp()
        values = torch.empty(V**L, L, dtype=torch.float64)
        for t in range(L):  # sequences that begin alike stand one after another
            earned, likely = ((probability * x).view(V**t, -1).sum(1) for x in (REWARDS, torch.ones(V**L)))
            foretold = earned / likely if lam < 1 else torch.linspace(-1, 1, V**t, dtype=torch.float64).cos()
            values[:, t] = foretold.repeat_interleave(V ** (L - t))
    rewards = torch.zeros(V**L, L, dtype=torch.float64)
    rewards[:, -1] = REWARDS
    advantages, targets = gae(rewards.flatten(), values.flatten(), [L] * V**L, lam=lam)
    truth = -true_gradient(policy, lambda logprobs: logprobs.sum(1).exp() * REWARDS)
    torch.testing.assert_close(expected(policy, ppo_loss(log_ratio(logprobs, logprobs.detach()).exp(), advantages.view(-1, L))), truth, **EXACT)
    if lam == 1:
        torch.testing.assert_close(targets.view(-1, L), REWARDS[:, None].expand(-1, L), **EXACT)
    else:  # and a critic that is right stays where it is: its gradient is 0 at each prefix
        errors = (probability[:, None] * (values - targets.view(-1, L))).unbind(1)
        for t, error in enumerate(errors):
            torch.testing.assert_close(error.view(V**t, -1).sum(1), torch.zeros(V**t, dtype=torch.float64), **EXACT)


def test_a_bandit_and_its_critic_learn_together():
    """Expected steps on both losses: the advantage's gradient is p (1 - p) whatever is foretold, and what is foretold goes to p."""
    theta, value = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (-1.0, 0.0))
    for _ in range(400):
        p = theta.sigmoid()
        logprobs, rewards = torch.stack([p.log(), (1 - p).log()]), torch.tensor([1.0, 0.0], dtype=torch.float64)
        advantages, targets = gae(rewards, value.detach().expand(2), [1, 1])
        chances = logprobs.detach().exp()
        (slope,) = torch.autograd.grad((chances * ppo_loss(log_ratio(logprobs, logprobs.detach()).exp(), advantages)).sum(), theta)
        assert slope.item() == pytest.approx(-(p * (1 - p)).item(), abs=1e-12)
        (error,) = torch.autograd.grad((chances * value_loss(value.expand(2), value.detach().expand(2), targets)).sum(), value)
        assert error.item() == pytest.approx((value - p).item(), abs=1e-12)
        with torch.no_grad():
            theta -= 0.1 * slope
            value -= 0.5 * error
    assert p > 0.9 and abs(value - p) < 0.01


def test_a_far_reference_gives_finite_penalties_and_gradients():
    logprobs = torch.tensor([-500.0, -1.0], requires_grad=True)
    kl_loss(logprobs, torch.tensor([-1.0, -500.0]), "k3").sum().backward()
    assert logprobs.grad.isfinite().all()


# Clips


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_clipping_takes_the_gradient_away_exactly_where_the_paper_says(advantage, dual_clip):
    options = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": dual_clip}
    for value in (0.1, 0.79, 0.81, 1.0, 1.27, 1.29, 2.9, 3.1, 9.0):
        ratio = torch.tensor(value, dtype=torch.float64, requires_grad=True)
        A = torch.tensor(advantage, dtype=torch.float64)
        loss = ppo_loss(ratio, A, **options)
        (gradient,) = torch.autograd.grad(loss, ratio)
        beyond = value > 1.28 if advantage > 0 else value < 0.8 or (dual_clip is not None and value > 3)
        assert gradient.item() == (0.0 if beyond else -advantage), value
        assert is_clipped(ratio, A, **options).item() == beyond
        written = min(value * advantage, min(max(value, 0.8), 1.28) * advantage)
        assert loss.item() == pytest.approx(-max(written, 3 * advantage) if dual_clip and advantage < 0 else -written)


def test_cispo_keeps_every_gradient_with_a_bounded_weight():
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    ratio = torch.tensor([0.5, 1.5, 9.0])
    cispo_loss(logprobs, ratio, torch.tensor(2.0), clip_low=0.2, clip_high=0.28).sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-1.6, -2.56, -2.56]))


def test_sequence_ratios_are_geometric_means_and_forms_differ_in_their_gradient_only():
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0], dtype=torch.float64, requires_grad=True)
    old, of, lengths = logprobs.detach() - torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]), torch.tensor([0, 0, 1, 1, 1]), torch.tensor([2, 3])
    both = {form: sequence_ratio(logprobs, old, of, lengths, form=form) for form in ("sequence", "token")}
    means = torch.tensor([0.15, 0.15, 0.4, 0.4, 0.4], dtype=torch.float64).exp()
    torch.testing.assert_close(both["sequence"], means, rtol=0, atol=1e-7)  # old is written in fp32
    torch.testing.assert_close(both["token"], both["sequence"], **EXACT)
    A, weights = torch.tensor([1.0, 1.0, -2.0, -2.0, -2.0], dtype=torch.float64), token_weights(of, lengths, "sequence")
    gradients = [torch.autograd.grad((weights * r * A).sum(), logprobs)[0] for r in both.values()]
    torch.testing.assert_close(*gradients, **EXACT)  # alike where a sequence has one advantage
    gradients = [torch.autograd.grad((weights * r * A * torch.arange(5)).sum(), logprobs, retain_graph=True)[0]
                 for r in (sequence_ratio(logprobs, old, of, lengths, form=form) for form in both)]  # fmt: skip
    assert (gradients[0] - gradients[1]).abs().max() > 0.01


# Sums


@pytest.mark.parametrize(
    "kind, weights",
    [("token", [1 / 6] * 6), ("sequence", [1 / 2] + [1 / 10] * 5), ("constant", [1 / 16] * 6)],
)
def test_weights_make_one_sum_of_each_mean(kind, weights):
    found = token_weights(torch.tensor([0, 1, 1, 1, 1, 1]), torch.tensor([1, 5]), kind, most_tokens=8)
    torch.testing.assert_close(found, torch.tensor(weights, dtype=torch.float64), **EXACT)


def test_weights_do_not_depend_on_which_tokens_are_here():
    lengths = torch.tensor([2, 3, 0, 4])
    of = torch.arange(4).repeat_interleave(lengths)
    for kind in ("token", "sequence", "constant"):
        whole = token_weights(of, lengths, kind, most_tokens=5)
        parts = [token_weights(part, lengths, kind, most_tokens=5) for part in of.split([1, 5, 3])]
        assert torch.equal(torch.cat(parts), whole)
        assert whole.sum().item() == pytest.approx({"token": 1.0, "sequence": 3 / 4, "constant": 9 / 20}[kind])


def test_a_mean_over_a_sequence_adds_up_its_parts():
    values = torch.tensor([1.0, 2.0, 3.0, 7.0])
    here = sequence_mean(values, torch.tensor([0, 0, 1, 1]), torch.tensor([4, 2]), lambda sums: sums + torch.tensor([9.0, 0.0]))
    assert here.tolist() == [3.0, 3.0, 5.0, 5.0]


# The rest


def test_gae_is_the_sum_of_discounted_errors_and_stops_at_a_sequences_end():
    rewards, values = torch.tensor([0.0, 1.0, 0.5, 2.0]), torch.tensor([0.3, 0.2, 0.1, 0.4])
    advantages, targets = gae(rewards, values, [2, 2], gamma=0.9, lam=0.8)
    errors = [0.0 + 0.9 * 0.2 - 0.3, 1.0 - 0.2, 0.5 + 0.9 * 0.4 - 0.1, 2.0 - 0.4]
    written = torch.tensor([errors[0] + 0.72 * errors[1], errors[1], errors[2] + 0.72 * errors[3], errors[3]])
    torch.testing.assert_close(advantages, written)
    torch.testing.assert_close(targets, written + values)
    torch.testing.assert_close(returns(rewards, [2, 2], gamma=0.5), torch.tensor([0.5, 1.0, 1.5, 2.0]))


def test_whitened_values_have_mean_0_and_deviation_1():
    values = whitened(torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64))
    assert values.mean().item() == pytest.approx(0) and values.std(correction=0).item() == pytest.approx(1)


def test_overlong_answers_lose_up_to_one():
    lengths = torch.tensor([10, 80, 90, 100, 110])
    assert overlong_penalty(lengths, most_tokens=100, buffer_tokens=20).tolist() == [0, 0, -0.5, -1, -1]


def test_rollout_weights_are_cut_or_masked():
    old, rollout = torch.tensor([0.0, 0.0, 0.0, 0.0]), torch.tensor([0.0, -2.0, 2.0, -0.5])
    assert rollout_weights(old, rollout, "none").tolist() == [1, 1, 1, 1]
    torch.testing.assert_close(rollout_weights(old, rollout, "truncate", high=2.0), torch.tensor([1.0, 2.0, math.exp(-2), math.exp(0.5)]))
    torch.testing.assert_close(rollout_weights(old, rollout, "mask", low=0.5, high=2.0), torch.tensor([1.0, 0.0, 0.0, math.exp(0.5)]))
    of, lengths = torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2])  # means of the logarithm: 1 and -0.75
    means = rollout_weights(old, rollout, "mask", low=0.4, high=2.0, sequences=of, lengths=lengths)
    torch.testing.assert_close(means, torch.tensor([0.0, 0.0, math.exp(-0.75), math.exp(-0.75)]))


def test_sequences_that_drifted_are_left_out_where_they_are_bad():
    logprobs, rollout = torch.tensor([-3.0, -3.0, -3.0, -3.0, -1.0]), torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0])
    of, lengths = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([2, 2, 1])
    A = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0])
    assert off_policy_mask(logprobs, rollout, A, of, lengths, most_kl=0.5).tolist() == [0, 0, 1, 1, 1]


def test_a_critic_earns_nothing_by_moving_beyond_the_clip():
    values = torch.tensor([0.5, 0.1, -0.5], requires_grad=True)
    loss = value_loss(values, torch.zeros(3), torch.tensor([1.0, 1.0, 1.0]), clip=0.2)
    torch.testing.assert_close(loss.detach(), torch.tensor([0.64, 0.81, 2.25]) / 2)
    loss.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([0.0, -0.9, -1.5]))
