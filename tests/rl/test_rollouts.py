"""From samples to rows: what was drawn is trained, and nothing else."""

from dataclasses import replace

import pytest
import torch

from titanlite.batch import IGNORE
from titanlite.config import RL, Config
from titanlite.data.tokenizer import ByteTokenizer
from titanlite.rl.generator import Sample
from titanlite.rl.math_answers import Math
from titanlite.rl.rewards import Reward
from titanlite.rl.rollouts import (
    Group,
    Rollout,
    build_encode,
    collect,
    demonstrations,
    groups_of,
    minibatches_of,
    with_advantages,
)
from titanlite.rl.signals import SIGNALS
from titanlite.rl.tasks import Calculator, Problem

END = 256


class Scripted:
    """A generator that says what it is told to, turn by turn."""

    def __init__(self, *turns: str):
        self.turns, self.asked = list(turns), []

    def generate(self, requests, *, temperature, seed, version):
        said = self.turns.pop(0)
        for request in requests:
            self.asked.append(request)
            for sample in request.samples:
                ids = (*said.encode(), END)[: request.max_new_tokens]
                yield Sample(request.ordinal, sample, request.prompt, ids, tuple(-0.1 * (i + 1) for i in range(len(ids))), ids[-1] == END, version)


class Sums:
    def __init__(self):
        self.texts = []

    def submit(self, problem, text):
        self.texts.append(text)

    def results(self):
        return [Reward(float(text.endswith(" 6"))) for text in self.texts]


class OneTwoThree(Calculator):
    def problem(self, number):
        return Problem("1+2+3? ", [1, 2, 3], "calculator")


def _collect(cfg, generator, *, version=0, task=None):
    task, tokenizer = task or OneTwoThree(0), ByteTokenizer()
    problems, encode = {5: task.problem(5)}, build_encode(Config(), tokenizer)
    found, seconds = collect(cfg, task, problems, encode, tokenizer, generator, Sums(), seed=0, version=version)
    assert seconds >= 0
    return found


def test_turns_and_replies_are_kept_as_tokens_and_replies_are_not_trained():
    cfg = RL(group_size=2, max_new_tokens=40)
    generator = Scripted("1+2;", "3+3;", "6")
    found = _collect(cfg, generator, version=9)
    assert [(r.ordinal, r.sample, r.text, r.ended, r.reward, r.version) for r in found] == [(5, i, "1+2;=3 3+3;=6 6", True, 1.0, 9) for i in (0, 1)]
    first = found[0]
    spoken = [END, *b"1+2+3? ", *b"1+2;", END, *b"=3 ", *b"3+3;", END, *b"=6 ", *b"6", END]
    assert list(first.ids) == spoken
    drawn = [False] * 8 + [True] * 5 + [False] * 3 + [True] * 5 + [False] * 3 + [True] * 2
    assert list(first.drawn) == drawn and [p < 0 for p in first.logprobs] == drawn
    assert generator.asked[1].prompt == tuple(spoken[:16]) and generator.asked[1].max_new_tokens == 40 - 8


def test_a_sample_without_room_for_another_turn_ends():
    cfg = RL(group_size=1, baseline="none", max_new_tokens=8)
    (found,) = _collect(cfg, Scripted("1+2;"))
    assert found.text == "1+2;" and found.reward == 0.0 and not found.ended  # its turn has ended, the sample was cut


def test_a_sandbox_is_a_tool_whose_output_is_put_in_and_not_trained():
    class Ask(Math):
        def problem(self, number):
            return Problem("6*7?", "42", "math")

    task = Ask(0, path="unused.jsonl", tool_calls=1)
    code = "```python\nprint(6 * 7)\n```"
    generator = Scripted(code, "\\boxed{42}")
    (found,) = _collect(RL(group_size=1, baseline="none", max_new_tokens=99), generator, task=task)
    output = "\n```output\n42\n\n```\n"
    assert found.text == f"{code}{output}\\boxed{{42}}" and task.reward(task.problem(0), found.text) == 1
    put_in = bytes(token for token, drawn in zip(found.ids, found.drawn) if not drawn and token != END)
    assert put_in.decode() == f"6*7?{output}" and found.n_drawn == len(code) + len("\\boxed{42}") + 2
    assert task.reply(task.problem(0), f"{found.text}\n{code}") is None
    assert "ZeroDivisionError" in task.reply(task.problem(0), "```\n1/0\n```") and task.reply(task.problem(0), "42") is None


def a_group(*rewards: float | None, ordinal: int = 0, tokens: int = 3, ended: bool = True) -> list[Rollout]:
    return [
        Rollout(ordinal, i, (END, 65, *[66 + i] * tokens), (False, False, *[True] * tokens), (0.0, 0.0, *[-0.5] * tokens), "", ended, "x", 0, reward)
        for i, reward in enumerate(rewards)
    ]


def test_groups_are_dropped_for_a_failed_reward_or_where_all_are_alike_or_all_were_cut():
    rollouts = a_group(1, 0, 0, ordinal=3) + a_group(1, None, 0, ordinal=4) + a_group(1, 1, 1, ordinal=5) + a_group(1, 0, ordinal=6, ended=False)
    kept, dropped = groups_of(RL(dynamic_sampling=True, overlong_filter=True), rollouts)
    assert [group.rollouts[0].ordinal for group in kept] == [3] and dropped == {"failed": 1, "alike": 1, "cut": 1}
    assert kept[0].rewards == (1, 0, 0)
    kept, dropped = groups_of(RL(), rollouts)
    assert [group.rollouts[0].ordinal for group in kept] == [3, 5, 6] and dropped == {"failed": 1, "alike": 0, "cut": 0}


def test_what_length_costs_makes_no_group_that_is_all_wrong_worth_training():
    """DAPO's filter is on right and wrong alone; what is kept is trained on with the penalty, of all tokens after the prompt."""
    cfg = RL(dynamic_sampling=True, max_new_tokens=8, overlong_buffer_tokens=4)
    short, long = a_group(0, ordinal=0, tokens=3) + a_group(0, ordinal=0, tokens=7), a_group(1, ordinal=1, tokens=3) + a_group(0, ordinal=1, tokens=7)
    kept, dropped = groups_of(cfg, short + long)
    assert [group.rewards for group in kept] == [(1.0, -0.75)] and dropped["alike"] == 1
    said = replace(long[1], drawn=(False, False, True, True, *[False] * 4, True))  # a tool said four of the seven
    assert groups_of(cfg, [long[0], said])[0][0].rewards == (1.0, -0.75)


def test_rows_hold_each_drawn_token_once_with_its_signals():
    groups, _ = groups_of(RL(), a_group(1, 0, ordinal=0, tokens=4) + a_group(0, 1, ordinal=1, tokens=9))
    (minibatch,) = minibatches_of(RL(), groups, seq_len=16, unit=3, end_id=END)
    (batch,) = with_advantages(RL(), groups, [minibatch])
    assert batch.tokens.shape == (3, 16)
    trained = batch.labels != IGNORE
    assert trained.sum() == 2 * 4 + 2 * 9
    assert sorted(batch.labels[trained].tolist()) == sorted([66] * 13 + [67] * 13)
    assert (batch.tokens[:, 1:][trained[:, :-1]] == batch.labels[:, :-1][trained[:, :-1]]).float().mean() > 0.8  # but a sample's last
    signal = dict(zip(SIGNALS, batch.signals.unbind(-1)))
    assert set(signal["rollout"][trained].tolist()) == {-0.5} and signal["old"][trained].isnan().all()
    assert (signal["weight"][trained].sum() / trained.sum()).item() == pytest.approx(1)
    assert set(signal["length"][trained].tolist()) == {4, 9}
    assert (signal["advantage"][trained] * (batch.labels[trained] == 66)).sum().item() == pytest.approx(4 * 1 - 9 * 1, abs=1e-4)
    assert (batch.positions[trained] > 0).all() and not trained[2].any()  # the last row is padding


def test_minibatches_share_groups_and_weigh_their_own_tokens():
    groups = [Group(tuple(a_group(1, 0, ordinal=i, tokens=2 + i)), (1.0, -1.0)) for i in range(3)]
    minibatches = minibatches_of(RL(minibatches=2, aggregation="sequence"), groups, seq_len=16, unit=1, end_id=END)
    counts = [(minibatch.batch.labels != IGNORE).sum().item() for minibatch in minibatches]
    assert counts == [2 * 2 + 2 * 4, 2 * 3] and [minibatch.samples for minibatch in minibatches] == [[(2, 0), (2, 1), (0, 0), (0, 1)], [(1, 0), (1, 1)]]
    for batch, n in zip([minibatch.batch for minibatch in minibatches], counts):
        assert (batch.signals[..., 0].sum() / n).item() == pytest.approx(1 + (batch.signals[..., 0] * (batch.labels == IGNORE)).sum().item() / n)


def test_fewer_groups_than_minibatches_make_fewer_steps():
    groups = [Group(tuple(a_group(1, 0)), (1.0, 0.0))]
    assert len(minibatches_of(RL(minibatches=3), groups, seq_len=16, unit=1, end_id=END)) == 1


def test_cut_samples_are_left_out_where_asked_and_count_in_their_group():
    cfg = RL(overlong_filter=True, deviation="none")
    groups = [Group((*a_group(1), *a_group(0, ended=False)), (1.0, 0.0))]
    (minibatch,) = minibatches_of(cfg, groups, seq_len=16, unit=1, end_id=END)
    (batch,) = with_advantages(cfg, groups, [minibatch])
    trained = batch.labels != IGNORE
    assert minibatch.samples == [(0, 0)] and trained.sum() == 3
    assert set(batch.signals[trained][:, SIGNALS.index("advantage")].tolist()) == {0.5}


# Advantages of tokens: two groups of two samples, of 2, 4, 3 and 5 drawn tokens with a tool's in the last one


WORTH = {(0, 0): 1.0, (0, 1): 0.0, (1, 0): 0.25, (1, 1): 2.0}


def tokenwise(**options):
    """({(group, sample): [its tokens' (divergence, forecast)]}, the same of (advantage, target)) after `with_advantages`."""
    cfg = RL(minibatches=2, **options)
    samples = a_group(1, tokens=2) + a_group(0, tokens=4), a_group(0.25, tokens=3) + a_group(2, tokens=5)
    samples[1][1] = replace(samples[1][1], drawn=(False, False, True, True, False, True, True))  # 4 of the 5
    groups = [Group(tuple(pair), tuple(WORTH[g, i] for i in (0, 1))) for g, pair in enumerate(samples)]
    minibatches = minibatches_of(cfg, groups, seq_len=16, unit=1, end_id=END)
    generator = torch.Generator().manual_seed(0)
    kl, values = ([torch.rand(m.batch.labels.shape, dtype=torch.float64, generator=generator) for m in minibatches] for _ in range(2))
    batches = with_advantages(cfg, groups, minibatches, kl=kl if cfg.kl_reward != "none" else (), values=values)
    given, made = {}, {}
    for m, batch, *known in zip(minibatches, batches, kl, values):
        for k, name in enumerate(m.samples):
            here = (batch.labels != IGNORE) & (batch.documents == k)  # both are in one row
            given[name] = torch.stack([x[here] for x in known], 1).tolist()
            made[name] = batch.signals[here][:, [SIGNALS.index("advantage"), SIGNALS.index("returns")]].tolist()
    assert {name: len(tokens) for name, tokens in made.items()} == {(0, 0): 2, (0, 1): 4, (1, 0): 3, (1, 1): 4}
    return given, made


def test_a_divergence_in_the_reward_counts_in_a_samples_whole_reward_before_groups_are_compared():
    given, made = tokenwise(kl_reward="k1", kl_reward_coef=0.5, deviation="none")
    total = {name: WORTH[name] - 0.5 * sum(kl for kl, _ in tokens) for name, tokens in given.items()}
    for (g, i), tokens in made.items():
        assert [a for a, _ in tokens] == pytest.approx([total[g, i] - (total[g, 0] + total[g, 1]) / 2] * len(tokens), abs=1e-12)


@pytest.mark.parametrize("baseline", ["none", "mean"])
def test_returns_are_rewards_to_come_and_are_whitened_over_all_tokens(baseline):
    options = {"advantage": "returns", "baseline": baseline, "deviation": "none", "kl_reward": "k1", "kl_reward_coef": 0.5, "gamma": 0.9}
    given, made = tokenwise(**options)
    expected = {}
    for (g, i), tokens in given.items():
        worth = WORTH[g, i] - (0 if baseline == "none" else (WORTH[g, 0] + WORTH[g, 1]) / 2)
        n = len(tokens)
        expected[g, i] = [0.9 ** (n - 1 - t) * worth - sum(0.9 ** (u - t) * 0.5 * tokens[u][0] for u in range(t, n)) for t in range(n)]
        assert [a for a, _ in made[g, i]] == pytest.approx(expected[g, i], abs=1e-12)
    flat = torch.tensor(sum(expected.values(), []), dtype=torch.float64)
    _, white = tokenwise(**options, whiten=True)
    for name, tokens in white.items():
        ours = (torch.tensor(expected[name], dtype=torch.float64) - flat.mean()) / flat.std(correction=0)
        assert [a for a, _ in tokens] == pytest.approx(ours.tolist(), abs=1e-7)  # 1e-8 is added to the deviation


def test_a_critics_advantages_are_the_explicit_sums_of_its_errors():
    given, made = tokenwise(advantage="gae", kl_reward="k1", kl_reward_coef=0.5, gamma=0.9, gae_lambda=0.8)
    for name, tokens in given.items():
        n, kl, V = len(tokens), [k for k, _ in tokens], [v for _, v in tokens] + [0.0]
        rewards = [-0.5 * kl[t] + (WORTH[name] if t == n - 1 else 0) for t in range(n)]
        errors = [rewards[t] + 0.9 * V[t + 1] - V[t] for t in range(n)]
        A = [sum((0.9 * 0.8) ** (u - t) * errors[u] for u in range(t, n)) for t in range(n)]
        assert [a for a, _ in made[name]] == pytest.approx(A, abs=1e-12)
        assert [r for _, r in made[name]] == pytest.approx([a + v for a, v in zip(A, V)], abs=1e-12)


def test_demonstrations_train_turns_and_not_replies():
    batch = demonstrations(OneTwoThree(0), build_encode(Config(), ByteTokenizer()), ByteTokenizer(), [0], RL(), seq_len=48, unit=1)
    ids = batch.labels[batch.labels != IGNORE].tolist()
    assert ids == [*b"1+2;", END, *b"3+3;", END, *b"6", END]
    assert torch.equal(batch.labels[0, 7:12], torch.tensor([*b"1+2;", END]))
