"""Runs of reinforcement: what they record, that they go on exactly, and that they end loudly where nothing can be learnt."""

import json
import shutil

import pytest

from titanlite.checkpoint.command import checkpoint_command
from titanlite.config import load_config
from titanlite.rl.train import train as train_rl
from titanlite.utils import ConfigError, Fault
from titanlite.verify.gang import Gang

BASE = """
[rl]
task = "arithmetic"
group_size = 4
prompts_per_step = 4
max_new_tokens = 3
warm_up_steps = 2
n_slots = 8
[training]
local_batch_size = 1
seq_len = 32
steps = 5
mixed_precision_param = "float32"
[optimizer]
lr = 1e-3
[lr_scheduler]
warmup_steps = 0
total_steps = 20
[job]
dump_folder = "{folder}/outputs"
[activation_checkpoint]
mode = "none"
[checkpoint]
enable = true
interval = 1
keep_latest_k = 0
[metrics]
enable_tensorboard = false
[comm]
train_timeout_seconds = 60
"""


def _train(path: str, words: tuple) -> int | str:
    try:
        return train_rl(*load_config(path, words))
    except (ConfigError, Fault) as error:
        return str(error)


@pytest.fixture(scope="module")
def gangs():
    started = {}

    def of(ranks):
        return started.setdefault(ranks, Gang(ranks, timeout_s=120))

    yield of
    for gang in started.values():
        gang.close()


@pytest.fixture
def train(gangs, tmp_path):
    (tmp_path / "base.toml").write_text(BASE.format(folder=tmp_path))

    def run(name, *words, ranks=1):
        (outcome,) = set(gangs(ranks).run(_train, str(tmp_path / "base.toml"), ("--job.name", name, *map(str, words))))
        return outcome

    run.folder = tmp_path / "outputs"
    return run


def records(run) -> list[dict]:
    return [record for record in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "event" not in record]


def test_a_run_records_rewards_and_keeps_its_samples(train, capsys):
    assert train("run", ranks=2) == 0
    found = records(train.folder / "run")
    assert [("reward" in record) for record in found] == [False, False, True, True, True]
    last = found[-1]
    assert 0 <= last["reward"] <= 1 and last["groups_kept"] == 4 and last["failed_rewards"] == 0 and 1 <= last["sample_tokens"] <= 3
    assert last["kl_rollout"] < 1e-6 and last["ratio"] == 1 and last["kl_old"] == 0 and last["clip_fraction"] == 0
    parts = ("generate", "reward", "score", "sync", "train")
    assert sum(last[f"{part}_share"] for part in parts) == pytest.approx(1) and sum(last[f"{part}_s"] for part in parts) == pytest.approx(last["step_time_s"])
    assert {"entropy", "cut_fraction", "reward_std", "groups_failed", "groups_alike", "groups_cut", "generated_tokens_per_s", "logprob_gap"} <= last.keys()
    assert last["sample_tokens_min"] <= last["sample_tokens"] <= last["sample_tokens_max"] and 0 < last["logprob_gap"] <= last["logprob_gap_max"] < 1e-4
    samples = [json.loads(line) for line in (train.folder / "run" / "rollouts" / "step-5.jsonl").read_text().splitlines()]
    assert [(s["ordinal"], s["sample"]) for s in samples] == [(8 + i, j) for i in range(4) for j in range(4)] and {s["version"] for s in samples} == {4}


def test_a_run_that_was_stopped_goes_on_bit_for_bit_with_other_ranks_reading_the_same_problems(train):
    assert train("whole", ranks=2) == 0
    assert train("parts", "--training.steps", 3, ranks=2) == 0 and train("parts", ranks=2) == 0
    whole, parts = (train.folder / name / "checkpoint" / "step-5" for name in ("whole", "parts"))
    assert checkpoint_command(["diff", str(whole), str(parts)]) == 0
    losses = [{r["step"]: r["loss"] for r in records(train.folder / name)} for name in ("whole", "parts")]
    assert losses[0] == losses[1]
    texts = [(train.folder / name / "rollouts" / "step-5.jsonl").read_text() for name in ("whole", "parts")]
    assert texts[0] == texts[1]


def test_what_the_ranks_are_changes_no_problem_and_no_draw(train):
    """The first step's samples: from the same weights but for the order of sums in the two steps before."""
    assert train("one", "--training.steps", 3, "--training.dtype", "float64", "--training.mixed_precision_param", "float64") == 0
    assert train("two", "--training.steps", 3, "--training.dtype", "float64", "--training.mixed_precision_param", "float64", ranks=2) == 0
    ids = [
        [json.loads(line)["ids"] for line in (train.folder / name / "rollouts" / "step-3.jsonl").read_text().splitlines()] for name in ("one", "two")
    ]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "dtype, gap",
    [
        ("float32", 1e-5),  # logprobs of order 5, over a temperature of 0.7, of two orders of sums: some units of 6e-8 times 7
        # Logits of up to 4 are rounded to 2^-9 of themselves, so two of them in a log p, over 0.7, may differ by 0.022 by their own rounding alone; four
        # blocks' come in before. A wrong temperature is off by more than 1.
        ("bfloat16", 0.1),
    ],
)
def test_without_a_learning_rate_trainer_and_generator_stay_the_same(train, ranks, dtype, gap):
    options = ("--training.steps", 50, "--lr_scheduler.total_steps", 50, "--optimizer.lr", 0, "--rl.warm_up_steps", 0, "--checkpoint.no-enable")
    options += ("--rl.temperature", 0.7, "--rl.prompts_per_step", 2, "--training.mixed_precision_param", dtype)
    assert train("still", *options, ranks=ranks) == 0
    found = records(train.folder / "still")
    assert len(found) == 50 and {(record["ratio"], record["kl_old"]) for record in found} == {(1, 0)}
    assert 0 < max(record["logprob_gap_max"] for record in found) < gap and max(record["kl_rollout"] for record in found) < gap**2 / 2 + 1e-7


def test_minibatches_are_steps_and_a_later_one_is_off_policy(train):
    assert train("run", "--rl.minibatches", 2, "--rl.warm_up_steps", 0, "--training.steps", 4, ranks=2) == 0
    found = records(train.folder / "run")
    assert ["reward" in record for record in found] == [True, False, True, False]
    assert [record["kl_old"] == 0 for record in found] == [True, False, True, False]


def test_a_reference_holds_the_policy_back_and_is_kept(train):
    options = ("--rl.kl_loss", "k3", "--rl.kl_coef", 0.1, "--rl.warm_up_steps", 0)
    assert train("run", *options, "--training.steps", 2, ranks=2) == 0 and train("run", *options, "--training.steps", 4, ranks=2) == 0
    found = records(train.folder / "run")
    assert found[0]["kl_reference"] < 1e-12 and all(record["kl_reference"] > 1e-9 for record in found[1:])
    shutil.rmtree(train.folder / "run" / "reference")
    assert "has no reference: it is kept when reinforcement begins, at step 0, and this run is at 4" in train("run", *options, ranks=2)


def test_groups_that_are_alike_are_replaced_until_there_are_as_many_as_asked(train):
    options = ("--rl.task", "tests.rl.slow_tasks:OddFirst", "--rl.dynamic_sampling", "--rl.group_size", 2, "--rl.warm_up_steps", 0, "--training.steps", 2)
    assert train("full", *options, ranks=2) == 0
    found = records(train.folder / "full")
    assert all(r["groups_kept"] == 4 for r in found) and sum(r["groups_alike"] for r in found) > 0
    for r in found:
        samples = [json.loads(line) for line in (train.folder / "full" / "rollouts" / f"step-{r['step']}.jsonl").read_text().splitlines()]
        assert len(samples) == 2 * (4 + r["groups_alike"] + r["groups_surplus"])  # also those that were dropped are kept there, each problem once
        assert len({(s["ordinal"], s["sample"]) for s in samples}) == len(samples)
    assert train("short", *options, "--rl.most_refills", 0, "--training.steps", 1, ranks=2) == 0
    (record,) = records(train.folder / "short")
    assert 0 < record["groups_kept"] < 4 and record["groups_kept"] + record["groups_alike"] == 4


CRITIC = ("--rl.advantage", "gae", "--rl.critic_lr", 1e-3, "--rl.kl_reward", "k1", "--rl.kl_reward_coef", 0.01, "--rl.minibatches", 2, "--rl.task", "tests.rl.slow_tasks:OddFirst")


def test_a_run_with_a_critic_goes_on_bit_for_bit(train):
    """It is stopped in the supervised steps, in the critic's warm-up and after."""
    options = (*CRITIC, "--rl.warm_up_steps", 1, "--rl.critic_warm_up_steps", 3)
    assert train("whole", *options, ranks=2) == 0
    for steps in (1, 3, 5):
        assert train("parts", *options, "--training.steps", steps, ranks=2) == 0
    whole, parts = (train.folder / name / "checkpoint" / "step-5" for name in ("whole", "parts"))
    assert checkpoint_command(["diff", str(whole), str(parts)]) == 0
    tensors = json.loads((whole / "MANIFEST.json").read_text())["tensors"]
    assert {"critic.model.output.weight", "critic.optimizer.output.weight.exp_avg"} <= tensors.keys() and tensors["critic.model.output.weight"]["shape"] == [1, 128]
    found = [{r["step"]: (r["loss"], r.get("value_loss")) for r in records(train.folder / name)} for name in ("whole", "parts")]
    assert found[0] == found[1] and [value is None for _, value in found[0].values()] == [True, False, False, False, False]
    by_step = {r["step"]: r for r in records(train.folder / "whole")}
    assert by_step[2]["value"] == 0 and all(by_step[step]["value"] != 0 for step in (3, 4, 5))  # a head of zeros, until it has moved
    assert [by_step[step]["lr"] > 0 for step in (2, 3, 4, 5)] == [False, False, False, True] and by_step[2]["critic_lr"] > 0
    assert {"explained_variance", "return", "kl_reward", "value_clip_fraction"} <= by_step[2].keys() and by_step[2]["kl_reward"] == 0


def test_steps_with_a_critic_and_a_reference_are_one_ranks_under_every_layout(train):
    """Four of two batches, from the same weights, in fp64: all figures of the losses."""
    options = (*CRITIC, "--rl.warm_up_steps", 0, "--rl.kl_loss", "k2", "--training.steps", 4, "--checkpoint.no-enable", "--model.vocab_size", 258)
    options += ("--training.dtype", "float64", "--training.mixed_precision_param", "float64")
    layouts = {"tensor": (), "context": (), "pipeline": ("--training.local_batch_size", 4)}
    assert train("one", *options) == 0
    names = ("loss", "grad_norm", "value_loss", "critic_grad_norm", "entropy", "ratio", "ratio_max", "kl_old", "kl_reference", "value")
    for layout, further in layouts.items():
        assert train(layout, *options, f"--parallelism.{layout}_parallel_degree", 2, *further, ranks=2) == 0
        for ours, theirs in zip(records(train.folder / layout), records(train.folder / "one"), strict=True):
            # Of order one. AdamW's first steps turn gradients' rounding, 1e-16 over its eps of 1e-8, into moves of 1e-11 of a weight.
            assert {name: ours[name] for name in names} == pytest.approx({name: theirs[name] for name in names}, rel=1e-7, abs=1e-9)


@pytest.mark.parametrize(
    "options, message",
    [
        (("--rl.task", "tests.rl.slow_tasks:Broken"), "failed rewards (RuntimeError: the verifier is down), 0 whose samples all got the same, 0 whose samples were all cut"),
        (("--rl.task", "tests.rl.slow_tasks:Alike", "--rl.dynamic_sampling"), "0 groups with failed rewards (none), 12 whose samples all got the same, 0 whose samples were all cut"),
    ],
)
def test_a_run_that_cannot_learn_ends_loudly(train, options, message):
    outcome = train("run", *options, "--rl.most_refills", 2, "--rl.most_barren_steps", 2, "--rl.warm_up_steps", 0, ranks=2)
    assert outcome.startswith("step 1: 3 rounds of 4 problems gave nothing to learn from: ") and outcome.endswith(message)


@pytest.mark.parametrize(
    "options, message",
    [
        (("--rl.group_size", 1), "rl.group_size=1 has nothing to compare with (rl.baseline='mean'): use 2 or more"),
        (("--rl.minibatches", 9), "rl.minibatches=9 share rl.prompts_per_step=4 groups: use fewer"),
    ],
)
def test_what_reinforcement_cannot_do_is_refused(train, options, message):
    assert train("run", *options) == message
