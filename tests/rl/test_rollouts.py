"""From samples to rows: what was drawn is trained, and nothing else."""

import math

import pytest
import torch

from titanlite.batch import IGNORE
from titanlite.config import RL, Config
from titanlite.data.tokenizer import ByteTokenizer
from titanlite.rl.generator import Sample
from titanlite.rl.math_answers import Math
from titanlite.rl.policy import SIGNALS
from titanlite.rl.rewards import Reward
from titanlite.rl.rollouts import Group, Rollout, build_encode, collect, demonstrations, groups_of, minibatches_of
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
    return collect(cfg, task, {5: task.problem(5)}, build_encode(Config(), tokenizer), tokenizer, generator, Sums(), seed=0, version=version)


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
    assert found.text == "1+2;" and found.reward == 0.0


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


def test_groups_are_dropped_for_a_failed_reward_or_where_all_are_alike():
    rollouts = a_group(1, 0, 0, ordinal=3) + a_group(1, None, 0, ordinal=4) + a_group(1, 1, 1, ordinal=5)
    kept, dropped = groups_of(RL(dynamic_sampling=True), rollouts)
    assert [group.rollouts[0].ordinal for group in kept] == [3] and dropped == {"failed": 1, "alike": 1}
    assert kept[0].advantages == pytest.approx((math.sqrt(2), -math.sqrt(0.5), -math.sqrt(0.5)), abs=1e-4)
    kept, dropped = groups_of(RL(), rollouts)
    assert [group.rollouts[0].ordinal for group in kept] == [3, 5] and dropped == {"failed": 1, "alike": 0}


def test_rows_hold_each_drawn_token_once_with_its_signals():
    groups, _ = groups_of(RL(), a_group(1, 0, ordinal=0, tokens=4) + a_group(0, 1, ordinal=1, tokens=9))
    (batch,) = minibatches_of(RL(), groups, seq_len=16, unit=3, end_id=END)
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
    batches = minibatches_of(RL(minibatches=2, aggregation="sequence"), groups, seq_len=16, unit=1, end_id=END)
    counts = [(batch.labels != IGNORE).sum().item() for batch in batches]
    assert counts == [2 * 2 + 2 * 4, 2 * 3]
    for batch, n in zip(batches, counts):
        assert (batch.signals[..., 0].sum() / n).item() == pytest.approx(1 + (batch.signals[..., 0] * (batch.labels == IGNORE)).sum().item() / n)


def test_cut_samples_are_left_out_where_asked():
    groups = [Group(tuple(a_group(1, 0, ended=False)), (1.0, -1.0))]
    (batch,) = minibatches_of(RL(overlong_filter=True), groups, seq_len=16, unit=1, end_id=END)
    assert (batch.labels == IGNORE).all()


def test_demonstrations_train_turns_and_not_replies():
    batch = demonstrations(OneTwoThree(0), build_encode(Config(), ByteTokenizer()), ByteTokenizer(), [0], RL(), seq_len=48, unit=1)
    ids = batch.labels[batch.labels != IGNORE].tolist()
    assert ids == [*b"1+2;", END, *b"3+3;", END, *b"6", END]
    assert torch.equal(batch.labels[0, 7:12], torch.tensor([*b"1+2;", END]))
