"""Trains a policy by reinforcement: torchrun --nproc_per_node=2 -m titanlite.rl.train train_configs/rl_debug.toml

The ranks that train also generate. A step: the weights are copied, problems are dealt out to the ranks and sampled, samples get rewards,
every rank sees all of them and packs its own rows, and the trainer's step does the rest.
"""

import contextlib
import gc
import json
import math
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from titanlite.batch import Batch
from titanlite.checkpoint.folder import checkpoint_folder
from titanlite.config import Config, Origins
from titanlite.data.tokenizer import Tokenizer, build_tokenizer, check_vocab
from titanlite.launch import run_as_command
from titanlite.losses import cross_entropy
from titanlite.models import get_args
from titanlite.observe.metrics import MetricsLogger
from titanlite.parallel.collective import gathered, on_rank_0
from titanlite.parallel.compat import set_timeout
from titanlite.resume import Saver, find_checkpoint, setup_from
from titanlite.rl.critic import CRITIC_FIGURES, build_critic_loss, build_policy, start_critic
from titanlite.rl.generator import EmbeddedGenerator
from titanlite.rl.metrics import Figures, of_rollouts
from titanlite.rl.policy import POLICY_FIGURES, build_policy_loss
from titanlite.rl.rewards import RewardPool, build_rewards
from titanlite.rl.rollouts import (
    Encode,
    Group,
    Rollout,
    build_encode,
    collect,
    demonstrations,
    groups_of,
    minibatches_of,
)
from titanlite.rl.score import load_reference, microbatches_of, scored
from titanlite.rl.tasks import Task, build_task
from titanlite.rl.validate import validate_rl
from titanlite.rl.weights import inference_copy
from titanlite.run_folder import open_run_folder, record_start
from titanlite.trainer import Run, StepMetrics, TrainingFault, join, step_record, train_step
from titanlite.utils import EXIT_DONE, EXIT_FAULT, EXIT_STOPPED, Fault, logger
from titanlite.validate import global_batch_size


@dataclass
class Frontier:
    """The next problem's number, in the form in which a checkpoint keeps where data stand."""

    next: int
    rows: int  # of this batch rank

    @property
    def positions(self) -> torch.Tensor:
        return torch.tensor([[self.next, 0]]).repeat(self.rows, 1)


@dataclass
class Policy:
    """What reinforcement needs besides the run."""

    run: Run
    task: Task
    tokenizer: Tokenizer
    pool: RewardPool
    frontier: Frontier
    folder: Path
    figures: Figures
    encode: Encode
    reference: list[torch.nn.Module] | None = None  # weights that the policy should stay near

    @property
    def unit(self) -> int:
        """Rows of a step are a multiple of it."""
        degrees = self.run.mesh.degrees
        return degrees.batch if degrees.pp == 1 else degrees.batch * self.run.cfg.parallelism.pipeline_parallel_microbatch_size * 2 * degrees.pp


def train(cfg: Config, _: Origins) -> int:
    """Trains up to `training.steps`, from the run's newest checkpoint where there is one. Returns the exit code."""
    validate_rl(cfg)
    mesh = join(cfg)
    with open_run_folder(cfg, mesh) as folder, contextlib.ExitStack() as stack:
        checkpoints = checkpoint_folder(cfg, folder)
        start = find_checkpoint(cfg, checkpoints) if cfg.checkpoint.enable else None
        if start is not None and start >= cfg.training.steps:
            logger.info(f"run={folder} is finished: step {start} of {cfg.training.steps}; a higher --training.steps prolongs it")
            return EXIT_DONE
        task = build_task(cfg.rl.task, cfg.rl.task_options, cfg.debug.seed)
        task.problem(0)  # what is wrong with its data is told before anything is made
        tokenizer = on_rank_0(lambda: build_tokenizer(cfg.model, folder, None))
        check_vocab(tokenizer, get_args(cfg.model).vocab_size)
        rows = global_batch_size(cfg, mesh.degrees)
        run, positions = setup_from(cfg, mesh, checkpoints, start, rows, f"{cfg.rl.task} {' '.join(cfg.rl.task_options)}", build_policy)
        if run.critic is not None and "critic" not in cfg.checkpoint.exclude_from_loading:
            run.critic.step = max(run.step - cfg.rl.warm_up_steps, 0)
        frontier = Frontier(0 if positions is None else int(positions[0, 0]), rows // mesh.degrees.batch)
        pool = build_rewards(cfg)
        stack.callback(pool.close)
        record_start(folder, cfg, mesh)
        policy = Policy(run, task, tokenizer, pool, frontier, folder, Figures.empty(mesh.device, **POLICY_FIGURES), build_encode(cfg, tokenizer))
        saver = Saver(run, frontier, checkpoints, data=f"{cfg.rl.task} {' '.join(cfg.rl.task_options)}") if cfg.checkpoint.enable else None
        if saver:
            stack.callback(saver.close)
        return _loop(policy, saver)


def _loop(policy: Policy, saver: Saver | None) -> int:
    run, cfg = policy.run, policy.run.cfg
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: setattr(run, "stop_asked", True))
    gc.disable()
    metrics = _metrics(run, policy.folder) if run.mesh.rank == 0 else None
    first_step, saved, stop = run.step + 1, True, False
    if cfg.rl.validation_problems and run.step == 0:
        figures = _validated(policy)
        if metrics:
            metrics.event("validation", step=0, **figures)
    while run.step < cfg.training.steps and not stop:
        before = run.step // max(cfg.checkpoint.interval, 1)
        for record, measured in _steps(policy):
            stop |= measured.stop
            if cfg.rl.validation_problems and (run.step % cfg.rl.validation_freq == 0 or run.step == cfg.training.steps):
                record |= _validated(policy)
            if metrics:
                metrics.step(record)
        last = stop or run.step >= cfg.training.steps
        if saver and (run.step // cfg.checkpoint.interval > before or last):
            saved = saver.save(last=last)
        if run.step >= first_step and first_step:
            first_step = 0
            for group in run.mesh.groups():
                set_timeout(cfg.comm.train_timeout_seconds, group)
        gc.collect(1)
    done = run.step >= cfg.training.steps
    if metrics:
        metrics.event("done" if done else "stopped", step=run.step)
        metrics.close()
    logger.info(f"{'done' if done else 'stopped by a signal'}: step={run.step} of {cfg.training.steps} run={policy.folder}")
    return EXIT_FAULT if not saved else EXIT_DONE if done else EXIT_STOPPED


def _metrics(run: Run, folder: Path) -> MetricsLogger:
    m = run.cfg.metrics
    tensorboard_folder = folder / m.save_tb_folder if m.enable_tensorboard else None
    return MetricsLogger(folder, tensorboard_folder=tensorboard_folder, start_step=run.step, total_steps=run.cfg.training.steps)


def _steps(policy: Policy) -> Iterator[tuple[dict, StepMetrics]]:
    """One supervised step, or the optimizer steps that one batch of rollouts gives."""
    run, cfg = policy.run, policy.run.cfg
    began = time.perf_counter()
    if run.step < cfg.rl.warm_up_steps:
        n = cfg.rl.group_size * cfg.rl.prompts_per_step
        numbers = [-1 - (run.step * n + i) for i in range(n)]  # below 0: no problem that is sampled later
        batch = demonstrations(policy.task, policy.encode, policy.tokenizer, numbers, cfg.rl, seq_len=cfg.training.seq_len, unit=policy.unit)
        measured = train_step(run, microbatches_of(run, batch), cross_entropy, lr_scale=cfg.rl.warm_up_lr_scale)
        yield step_record(run, measured, time.perf_counter() - began, 0.0, None), measured
        return
    if policy.reference is None:
        policy.reference = load_reference(run, policy.folder / "reference")
    if run.critic is not None and run.critic.step == 0:
        start_critic(run)
    rollouts, groups, times, counts = _sampled(policy)
    if failures := [rollout.failure for rollout in rollouts if rollout.failure]:
        logger.warning(f"step={run.step + 1} failed_rewards={len(failures)} of {len(rollouts)}, one of them: {failures[0]}")
    _keep(policy, rollouts)
    told = of_rollouts(rollouts, counts, times["generate_s"])
    before_s = time.perf_counter() - began
    minibatches = minibatches_of(cfg.rl, groups, seq_len=cfg.training.seq_len, unit=policy.unit, end_id=policy.tokenizer.end_id)
    batches, scores = scored(run, groups, minibatches, policy.reference)
    times["score_s"] = time.perf_counter() - began - before_s
    for i, batch in enumerate(batches):
        measured, figures = _update(policy, microbatches_of(run, batch))
        seconds = time.perf_counter() - began
        record = step_record(run, measured, seconds, times["generate_s"] if i == 0 else 0.0, None) | figures
        if i == 0:
            times["train_s"] = seconds - sum(times.values())
            record |= told | scores | times | {f"{name.removesuffix('_s')}_share": spent / seconds for name, spent in times.items()}
        yield record, measured
        began = time.perf_counter()
        if run.step >= cfg.training.steps:
            return


def _update(policy: Policy, microbatches: list[Batch]) -> tuple[StepMetrics, dict[str, float]]:
    """An optimizer step of the critic, if there is one, and of the policy; and what metrics say of the losses."""
    run, rl, told, lr_scale = policy.run, policy.run.cfg.rl, {}, 1.0
    if run.critic is not None:
        figures = Figures.empty(run.mesh.device, means=CRITIC_FIGURES)
        try:
            measured = train_step(run.critic, microbatches, build_critic_loss(rl, figures))
        except TrainingFault as fault:
            raise TrainingFault(f"the critic: {fault}") from fault
        told = figures.take() | {"critic_grad_norm": measured.grad_norm, "critic_lr": measured.lr}
        lr_scale = float(run.step - rl.warm_up_steps >= rl.critic_warm_up_steps)
    measured = train_step(run, microbatches, build_policy_loss(rl, run.mesh, policy.figures), lr_scale=lr_scale)
    return measured, policy.figures.take() | told


def _sampled(policy: Policy) -> tuple[list[Rollout], list[Group], dict[str, float], dict[str, int]]:
    """(all ranks' samples, groups to train on, seconds, counts). Raises Fault where nothing can be learnt from for too long."""
    run, rl, mesh = policy.run, policy.run.cfg.rl, policy.run.mesh
    began = time.perf_counter()
    generator = _generator(policy)
    times, rollouts, groups, counts, rounds = {"sync_s": time.perf_counter() - began, "reward_s": 0.0}, [], [], {"failed": 0, "alike": 0, "cut": 0}, 0
    began_at = policy.frontier.next
    most = rl.most_refills if rl.dynamic_sampling else rl.most_barren_steps
    while not rounds or (len(groups) < rl.prompts_per_step and rl.dynamic_sampling or not groups) and rounds <= most:
        missing, asked = rl.prompts_per_step - len(groups), policy.frontier.next - began_at
        n = min(rl.prompts_per_step, math.ceil(missing * max(asked, 1) / max(len(groups), 1)))  # as many as the missing ones are likely to take
        first = policy.frontier.next
        mine = range(first + mesh.rank, first + n, mesh.world_size)
        problems = {number: policy.task.problem(number) for number in mine}
        found = collect(
            rl, policy.task, problems, policy.encode, policy.tokenizer, generator, policy.pool, seed=run.cfg.debug.seed, version=run.step
        )
        parts, reward_s = zip(*gathered(found))
        new = sorted((rollout for part in parts for rollout in part), key=lambda rollout: (rollout.ordinal, rollout.sample))
        policy.frontier.next += n
        times["reward_s"] += max(reward_s)
        kept, dropped = groups_of(rl, new)
        rollouts, groups = rollouts + new, groups + kept
        counts = {reason: counts[reason] + number for reason, number in dropped.items()}
        rounds += 1
    if not groups:
        failures = sorted({rollout.failure for rollout in rollouts if rollout.failure})
        raise Fault(
            f"step {run.step + 1}: {rounds} rounds of {rl.prompts_per_step} problems gave nothing to learn from: {counts['failed']} groups with failed "
            f"rewards ({'; '.join(failures[:3]) or 'none'}), {counts['alike']} whose samples all got the same, {counts['cut']} whose samples were all cut"
        )
    if len(groups) < rl.prompts_per_step and rl.dynamic_sampling:
        logger.warning(
            f"step={run.step + 1} trains on {len(groups)} of {rl.prompts_per_step} groups: rl.most_refills={rl.most_refills} rounds of replacing gave no more"
        )
    times["generate_s"] = time.perf_counter() - began - sum(times.values())
    groups, surplus = groups[: rl.prompts_per_step], groups[rl.prompts_per_step :]
    return rollouts, groups, times, counts | {"kept": len(groups), "surplus": len(surplus)}


def _validated(policy: Policy) -> dict[str, float]:
    """Mean reward of greedy answers to the held-out problems, and how many failed."""
    run, n = policy.run, policy.run.cfg.rl.validation_problems
    began = time.perf_counter()
    generator = _generator(policy)
    problems = {number: policy.task.held_out(number) for number in range(run.mesh.rank, n, run.mesh.world_size)}
    greedy = replace(run.cfg.rl, group_size=1, temperature=0.0)
    found, _ = collect(greedy, policy.task, problems, policy.encode, policy.tokenizer, generator, policy.pool, seed=0, version=run.step)
    rewards = [rollout.reward for part in gathered(found) for rollout in part if rollout.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else math.nan
    return {"validation_reward": mean, "validation_failed": n - len(rewards), "validation_s": time.perf_counter() - began}


def _generator(policy: Policy) -> EmbeddedGenerator:
    run, t = policy.run, policy.run.cfg.training
    model = inference_copy(run, getattr(torch, t.mixed_precision_param))
    return EmbeddedGenerator(model, end_id=policy.tokenizer.end_id, n_slots=run.cfg.rl.n_slots, max_length=t.seq_len + 1)



def _keep(policy: Policy, rollouts: list[Rollout]) -> None:
    """rollouts/step-N.jsonl: a sample a line. What cannot be written is told: training goes on."""
    if policy.run.mesh.rank != 0:
        return
    file = policy.folder / "rollouts" / f"step-{policy.run.step + 1}.jsonl"
    try:
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(asdict(rollout)) + "\n" for rollout in rollouts))
    except OSError as e:
        logger.warning(f"rollouts_failed file={file} {e}: training goes on without them")


def main() -> int:
    return run_as_command(train, sys.argv[1:], "torchrun -m titanlite.rl.train CONFIG.toml [--section.key value ...]")


if __name__ == "__main__":
    sys.exit(main())
