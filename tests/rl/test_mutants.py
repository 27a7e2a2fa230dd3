"""Faults that trainers by reinforcement shipped, planted into this one: a check finds each, and passes without it.

Those of asynchronous trainers (prompts in flight at a resume, bursts after it, a limit of staleness) are here as far as colocated placement has them.
"""

import contextlib
import itertools
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.rl import test_algorithms, test_generator, test_layouts, test_rollouts
from tests.rl.test_layouts import LOSSES, a_step, cp, rows, tp
from tests.rl.test_train import BASE
from titanlite.batch import IGNORE
from titanlite.config import load_config
from titanlite.losses import label_logprobs
from titanlite.parallel.mesh import Mesh
from titanlite.rl import algorithms, generator, policy, rewards, rollouts, train
from titanlite.rl.rewards import Reward, RewardPool
from titanlite.rl.signals import SIGNALS, with_signals
from titanlite.rl.tasks import Problem
from titanlite.utils import Fault
from titanlite.verify.gang import Gang
from titanlite.verify.mutants import _around_forward_backward

# Checks


@contextlib.contextmanager
def within(seconds: int):
    def late(*_):
        raise AssertionError(f"no end within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


names = itertools.count()


def run(folder: Path, *words: Any, name: str | None = None) -> list[dict]:
    """Records of a run of a tiny model in fp64, with its samples as `samples`."""
    (folder / "base.toml").write_text(BASE.format(folder=folder))
    name = name or f"run-{next(names)}"
    options = ("--job.name", name, "--model.name", "tests.faults.model", "--model.flavor", "tiny", "--rl.warm_up_steps", 0, "--rl.task", "tests.rl.slow_tasks:OddFirst")
    options += ("--training.dtype", "float64", "--training.mixed_precision_param", "float64", "--optimizer.lr", 0.01, "--training.steps", 4)
    try:
        code = train.train(*load_config(folder / "base.toml", tuple(map(str, (*options, *words)))))
    except (Fault, RuntimeError) as error:
        raise AssertionError(f"the run ended with {error!r}") from error
    assert code == 0
    found = [record for record in map(json.loads, (folder / "outputs" / name / "metrics.jsonl").read_text().splitlines()) if "event" not in record]
    for record in found:
        file = folder / "outputs" / name / "rollouts" / f"step-{record['step']}.jsonl"
        record["samples"] = [json.loads(line) for line in file.read_text().splitlines()]
    return found


def weights_and_temperature_are_the_trainers(folder: Path) -> None:
    for record in run(folder, "--rl.temperature", 0.6, "--checkpoint.no-enable"):
        assert record["logprob_gap_max"] < 1e-9  # fp64; a step moves logprobs by 1e-2


def the_first_ratio_is_1(folder: Path) -> None:
    options = ("--training.dtype", "float32", "--training.mixed_precision_param", "bfloat16", "--training.local_batch_size", 8, "--rl.group_size", 16)
    assert {(record["ratio"], record["kl_old"]) for record in run(folder, *options, "--checkpoint.no-enable")} == {(1, 0)}


def two_layouts_agree(folder: Path, *pair: tuple) -> None:
    losses = {name: LOSSES[name] for name in ("GRPO", "GSPO")}
    mine = folder / os.environ["RANK"]  # a file that another rank writes may be half there
    mine.mkdir()
    one, other = (a_step(test_layouts.configured(mine, *options), "packed", losses) for options in pair)
    for key, (gradients, figures) in one.items():
        assert test_layouts.worst(other[key][0], gradients)[1] < 1e-12
        assert other[key][1] == pytest.approx(figures, rel=1e-10, abs=1e-12)


def microbatches_do_not_count(folder: Path) -> None:
    two_layouts_agree(folder, rows(8), rows(4))


def ranks_of_data_and_tensors_agree(folder: Path) -> None:
    two_layouts_agree(folder, tuple(rows(4)), (*tp(2), *rows(8)))


def ranks_of_context_and_tensors_agree(folder: Path) -> None:
    two_layouts_agree(folder, (*cp(2), *rows(8)), (*tp(2), *rows(8)))


def a_late_verifier_is_killed(_: Path) -> None:
    pool = RewardPool(("tests.rl.slow_tasks:Unruly", (), 0), n_workers=1, timeout_s=0.5)
    try:
        with within(5):
            assert [r.value for r in pool.rewards([(Problem("1+1=", "2", "sum"), answer) for answer in ("sleep", "a")])] == [None, 1]
    finally:
        pool.close()


def a_verifier_that_fails_is_told_and_counts_nothing(folder: Path) -> None:
    for record in run(folder, "--rl.task", "tests.rl.slow_tasks:HalfBroken", "--checkpoint.no-enable", "--training.steps", 2):
        values = [sample["reward"] for sample in record["samples"]]
        known = [value for value in values if value is not None]
        assert 0 < len(known) < len(values) and record["failed_rewards"] == record["failed_rewards_RuntimeError"] == len(values) - len(known)
        assert record["groups_failed"] + record["groups_kept"] == 4 and record["reward"] == pytest.approx(sum(known) / len(known))


DYNAMIC = ("--rl.dynamic_sampling", "--rl.group_size", 2)


def a_step_has_as_many_groups_as_asked(folder: Path) -> None:
    found = run(folder, *DYNAMIC, "--checkpoint.no-enable", "--training.steps", 2)
    assert [record["groups_kept"] for record in found] == [4, 4] and sum(record["groups_alike"] for record in found) > 0


def a_run_without_signal_ends(folder: Path) -> None:
    with within(10), pytest.raises(AssertionError, match="3 rounds of 4 problems gave nothing to learn from"):
        run(folder, *DYNAMIC, "--rl.task", "tests.rl.slow_tasks:Alike", "--rl.most_refills", 2, "--checkpoint.no-enable")


def a_run_that_goes_on_asks_each_problem_once(folder: Path) -> None:
    name = f"run-{next(names)}"
    run(folder, *DYNAMIC, "--training.steps", 2, name=name)
    found = run(folder, *DYNAMIC, "--lr_scheduler.total_steps", 4, name=name)
    asked = [sample["ordinal"] for record in found for sample in record["samples"]]
    assert asked == [ordinal for ordinal in range(len(asked) // 2) for _ in range(2)]
    assert [{sample["version"] for sample in record["samples"]} for record in found] == [{0}, {1}, {2}, {3}]


def penalties_have_their_gradients(_: Path) -> None:
    test_algorithms.test_penalties_in_the_loss_have_the_gradients_that_they_say(test_algorithms.Policy(0))


def far_references_are_finite(_: Path) -> None:
    test_algorithms.test_a_far_reference_gives_finite_penalties_and_gradients()


def replies_are_not_trained(_: Path) -> None:
    test_rollouts.test_turns_and_replies_are_kept_as_tokens_and_replies_are_not_trained()
    test_rollouts.test_demonstrations_train_turns_and_not_replies()


def the_generator_says_what_the_whole_forward_says(_: Path) -> None:
    test_generator.test_every_token_has_the_logprob_of_the_whole_forward("llama3")


# Mutants


def replaced(owner: Any, name: str, value: Any) -> Callable[[], contextlib.AbstractContextManager]:
    return lambda: mock.patch.object(owner, name, value)


def around(owner: Any, name: str, change: Callable) -> Callable[[], contextlib.AbstractContextManager]:
    """`change(original, *args, **options)` in place of it."""
    original = getattr(owner, name)
    return replaced(owner, name, lambda *args, **options: change(original, *args, **options))


def kept_generator(choose: Callable) -> Callable[[], contextlib.AbstractContextManager]:
    """`choose(generators of the steps so far)`."""
    return lambda made=[]: mock.patch.object(train, "_generator", lambda policy, new=train._generator: choose(made, made.append(new(policy))))  # noqa: B006


def with_old_cache(made: list, _: None) -> generator.EmbeddedGenerator:
    for now, new in zip(made[0].model.parameters(), made[-1].model.parameters()):
        now.data.copy_(new)
    return made[0]


def scored_with_old(original: Callable, *args: Any) -> Any:
    batches, figures = original(*args)
    return [with_signals(batches[0], old=batches[0].signals[..., SIGNALS.index("rollout")]), *batches[1:]], figures


def mean_of_microbatches(original: Callable, run: Any, microbatches: list, loss_fn: Callable, **options: Any) -> Any:
    n = sum(int((batch.labels != IGNORE).sum()) for batch in microbatches)
    return original(
        run, microbatches, lambda out, b: loss_fn(out, b) * n / len(microbatches) / max(int((b.labels != IGNORE).sum()), 1), **options
    )


def mean_of_ranks(inner: Callable, mesh: Mesh, batches: list, loss_fn: Callable, denominator: torch.Tensor) -> torch.Tensor:
    mine = max(sum(int((batch.labels != IGNORE).sum()) for batch in batches), 1)
    return inner(batches, loss_fn, torch.full_like(denominator, mine * mesh.degrees.batch))


def with_replies(rollout: rollouts.Rollout) -> rollouts.Rollout:
    return replace(rollout, drawn=tuple(i >= rollout.drawn.index(True) for i in range(len(rollout.ids))))


def sampled_with(original: Callable, policy: train.Policy, **values: Any) -> Any:
    run, cfg = policy.run, policy.run.cfg
    run.cfg = replace(cfg, rl=replace(cfg.rl, **values))
    try:
        return original(policy)
    finally:
        run.cfg = cfg


def abort_where_short(original: Callable, policy: train.Policy) -> Any:
    found = sampled_with(original, policy, most_refills=0)
    if len(found[1]) < policy.run.cfg.rl.prompts_per_step:
        raise Fault("too few groups")
    return found


def raise_failures(original: Callable, pool: RewardPool) -> list[Reward]:
    found = original(pool)
    if failed := [reward.failure for reward in found if reward.value is None]:
        raise RuntimeError(failed[0])
    return found


class NeverLate:
    monotonic = staticmethod(lambda: 0.0)


@dataclass(frozen=True)
class Mutant:
    fault: str  # and where it was reported
    check: Callable[[Path], None]
    patch: Callable[[], contextlib.AbstractContextManager]
    ranks: int = 1


MUTANTS = {
    "a failed reward is 0": Mutant(
        "the verifier's exception is swallowed and all rewards are 0 (verl 3407)", a_verifier_that_fails_is_told_and_counts_nothing,
        around(RewardPool, "results", lambda results, pool: [replace(reward, value=reward.value or 0.0, failure="") for reward in results(pool)]),
    ),
    "no time-out": Mutant("rewards hang once time-outs are off (verl 5839)", a_late_verifier_is_killed, replaced(rewards, "time", NeverLate)),
    "a failed reward ends the run": Mutant(
        "a server's error stops one rank, the others wait (TRL 6796)", a_verifier_that_fails_is_told_and_counts_nothing,
        around(RewardPool, "results", raise_failures),
    ),
    "the trainer's logprobs are untempered": Mutant(
        "logprobs of another distribution than the samples' (TRL 4159)", weights_and_temperature_are_the_trainers,
        replaced(policy, "label_logprobs", lambda logits, labels, _: label_logprobs(logits, labels)),
    ),
    "the generator's logprobs are untempered": Mutant(
        "the same on the other side (TRL 4159)", the_generator_says_what_the_whole_forward_says,
        replaced(generator, "tempered", lambda logits, _, tempered=generator.tempered: tempered(logits, 1.0)),
    ),
    "the first old is of another forward": Mutant(
        "the on-policy ratio is not 1, as where microbatches' sizes differ (verl 6280)", the_first_ratio_is_1, around(train, "scored", scored_with_old)
    ),
    "divided by microbatches": Mutant(
        "the loss is divided by accumulation steps once more (ms-swift 10116)", microbatches_do_not_count,
        around(train, "train_step", lambda step, run, mbs, loss_fn, **options: step(run, mbs, lambda out, b: loss_fn(out, b) / len(mbs), **options)),
    ),
    "a mean of microbatches' means": Mutant(
        "token means are taken of each microbatch (TRL 3231)", microbatches_do_not_count, around(train, "train_step", mean_of_microbatches)
    ),
    "a mean of ranks' means": Mutant(
        "the same of ranks (torchtitan 1842, 2206)", ranks_of_data_and_tensors_agree, _around_forward_backward(mean_of_ranks), ranks=2
    ),
    "scores are added up over tensor parallel ranks": Mutant(
        "what is alike on ranks counts once for each", ranks_of_data_and_tensors_agree, replaced(Mesh, "counts_loss", True), ranks=2
    ),
    "a sample's ratio is of a rank's part of it": Mutant(
        "the context-parallel reduction is left out (torchtitan 3329, 3280)", ranks_of_context_and_tensors_agree,
        replaced(policy, "added_up", lambda sums, _: sums), ranks=2,
    ),
    "k1 in the loss": Mutant(
        "its gradient is 0 on average (NeMo-RL 2506, TRL 6503)", penalties_have_their_gradients,
        around(algorithms, "kl_estimate", lambda estimate, logprobs, reference, kind: estimate(logprobs, reference, "k1")),
    ),
    "k3 in the loss without the ratio": Mutant(
        "its gradient is of the divergence the other way round (NeMo-RL 2506, TRL 6503)", penalties_have_their_gradients,
        around(test_algorithms, "kl_loss", lambda loss, logprobs, reference, kind, *, old: loss(logprobs, reference, kind[:2], old=old)),
    ),
    "k3 overflows": Mutant("infinite exponentials make NaN in backward (verl 891)", far_references_are_finite, replaced(algorithms, "MOST_LOG_RATIO", torch.inf)),
    "replies are trained": Mutant(
        "forced and tool tokens are trained as if sampled (Agent-R1 30)", replies_are_not_trained,
        around(rollouts, "_rows", lambda make, cfg, some, *args: make(cfg, [with_replies(rollout) for rollout in some], *args)),
    ),
    "replies count as drawn": Mutant(
        "the same, from where they are put in (Agent-R1 30)", replies_are_not_trained,
        around(rollouts, "replace", lambda put, rollout, **new: put(rollout, **new) if "ended" in new or "ids" not in new else with_replies(put(rollout, **new))),
    ),
    "dynamic sampling never ends": Mutant(
        "it waits for groups that do not come (verl 953)", a_run_without_signal_ends,
        around(train, "_sampled", lambda sampled, policy: sampled_with(sampled, policy, most_refills=10**9)),
    ),
    "dynamic sampling aborts": Mutant("a round with too few groups ends the run (verl 953)", a_step_has_as_many_groups_as_asked, around(train, "_sampled", abort_where_short)),
    "what is filtered is not replaced": Mutant(
        "a step trains on what a filter left (AReaL 450)", a_step_has_as_many_groups_as_asked,
        around(train, "_sampled", lambda sampled, policy: sampled_with(sampled, policy, most_refills=0)),
    ),
    "keys and values outlive their weights": Mutant(
        "a shared prefix's cache is of weights before the update (NeMo-RL 4018)", weights_and_temperature_are_the_trainers, kept_generator(with_old_cache)
    ),
    "the first weights generate": Mutant("an update does not arrive (NeMo-RL 4018)", weights_and_temperature_are_the_trainers, kept_generator(lambda made, _: made[0])),
    "weights of a step before": Mutant(
        "on-policy is one step off (verl 4449)", weights_and_temperature_are_the_trainers, kept_generator(lambda made, _: made[max(len(made) - 2, 0)])
    ),
    "a resume leaves problems out": Mutant(
        "prompts are lost (NeMo-RL 3599)", a_run_that_goes_on_asks_each_problem_once,
        replaced(train.Frontier, "positions", property(lambda frontier: torch.tensor([[frontier.next + 3, 0]]).repeat(frontier.rows, 1))),
    ),
    "a resume starts over": Mutant(
        "problems are asked again (torchtitan 3008)", a_run_that_goes_on_asks_each_problem_once,
        replaced(train.Frontier, "positions", property(lambda frontier: torch.zeros(frontier.rows, 2, dtype=torch.int64))),
    ),
    "versions jump": Mutant(
        "samples bear another version than their weights' (AReaL 1345)", a_run_that_goes_on_asks_each_problem_once,
        around(train, "collect", lambda collect, *args, version, **options: collect(*args, version=version + 7, **options)),
    ),
}  # fmt: skip

CHECKS = {(mutant.check.__name__, mutant.ranks): mutant.check for mutant in MUTANTS.values()}


def found(check: Callable[[Path], None], folder: Path, name: str | None) -> str:
    """What the check says, with the fault in place, or without any."""
    with MUTANTS[name].patch() if name else contextlib.nullcontext():
        try:
            check(folder)
        except (AssertionError, Fault) as error:
            return str(error) or repr(error)
    return ""


@pytest.fixture(scope="module")
def gangs():
    started = {ranks: Gang(ranks, timeout_s=120) for ranks in (1, 2)}
    yield started
    for gang in started.values():
        gang.close()


@pytest.mark.parametrize("check, ranks", CHECKS)
def test_nothing_is_found_where_nothing_is_planted(gangs, tmp_path, check, ranks):
    assert not any(gangs[ranks].run(found, CHECKS[check, ranks], tmp_path, None))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_found(gangs, tmp_path, name):
    mutant = MUTANTS[name]
    assert any(gangs[mutant.ranks].run(found, mutant.check, tmp_path, name)), mutant.fault
