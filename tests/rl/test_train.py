"""Runs of reinforcement: what they record, that they go on exactly, and that they end loudly where nothing can be learnt."""

import json

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
    assert {"generate_s", "sync_s", "train_s", "entropy", "cut_fraction", "reward_std"} <= last.keys()
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


def test_without_a_learning_rate_trainer_and_generator_stay_the_same(train):
    options = ("--training.steps", 50, "--lr_scheduler.total_steps", 50, "--optimizer.lr", 0, "--rl.warm_up_steps", 0, "--checkpoint.no-enable")
    assert train("still", *options, ranks=2) == 0
    # fp32 logprobs of order 5, of two orders of sums: gaps of 1e-6, whose k3 is half their square.
    assert max(record["kl_rollout"] for record in records(train.folder / "still")) < 1e-10


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


@pytest.mark.parametrize(
    "options, message",
    [
        (("--rl.task", "tests.rl.slow_tasks:Broken"), "failed rewards (RuntimeError: the verifier is down), 0 whose samples all got the same"),
        (("--rl.task", "tests.rl.slow_tasks:Alike", "--rl.dynamic_sampling"), "0 groups with failed rewards (none), 12 whose samples all got the same"),
    ],
)
def test_a_run_that_cannot_learn_ends_loudly(train, options, message):
    outcome = train("run", *options, "--rl.most_refills", 2, "--rl.most_barren_steps", 2, "--rl.warm_up_steps", 0, ranks=2)
    assert outcome.startswith("step 1: 3 rounds of 4 problems gave nothing to learn from: ") and outcome.endswith(message)


@pytest.mark.parametrize(
    "options, message",
    [
        (("--rl.temperature", 0), "rl.temperature=0.0: samples are drawn: it must be above 0"),
        (("--rl.group_size", 1), "rl.group_size=1 has nothing to compare with (rl.baseline='mean'): use 2 or more"),
        (("--rl.minibatches", 9), "rl.minibatches=9 share rl.prompts_per_step=4 groups: use fewer"),
        (("--training.loss_chunk_tokens", 8), "training.loss_chunk_tokens makes no logprobs of single tokens: set it to 0"),
    ],
)
def test_what_reinforcement_cannot_do_is_refused(train, options, message):
    assert train("run", *options) == message
