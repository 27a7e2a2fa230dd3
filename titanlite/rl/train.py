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
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite.batch import Batch
from titanlite.checkpoint.folder import checkpoint_folder
from titanlite.checkpoint.state import model_state
from titanlite.checkpoint.store import load, save
from titanlite.config import Config, Origins
from titanlite.data.tokenizer import Tokenizer, build_tokenizer, check_vocab
from titanlite.launch import run_as_command
from titanlite.losses import cross_entropy, label_logprobs
from titanlite.models import get_args, get_model, get_plan
from titanlite.observe.metrics import MetricsLogger
from titanlite.parallel.collective import gathered, on_rank_0
from titanlite.parallel.compat import set_timeout
from titanlite.parallel.forward_backward import forward_only
from titanlite.parallel.parallelize import allocate
from titanlite.resume import Saver, find_checkpoint, setup_from
from titanlite.rl.generator import EmbeddedGenerator
from titanlite.rl.policy import SIGNALS, Figures, build_policy_loss
from titanlite.rl.rewards import RewardPool, build_rewards
from titanlite.rl.rollouts import Encode, Rollout, build_encode, collect, demonstrations, groups_of, minibatches_of
from titanlite.rl.tasks import Task, build_task
from titanlite.rl.weights import inference_copy
from titanlite.run_folder import open_run_folder, record_start
from titanlite.trainer import Run, StepMetrics, join, place, step_record, train_step
from titanlite.utils import EXIT_DONE, EXIT_FAULT, EXIT_STOPPED, ConfigError, Fault, logger
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
    reference: torch.nn.Module | None = None  # weights that the policy should stay near

    @property
    def unit(self) -> int:
        """Rows of a step are a multiple of it."""
        p, t, degrees = self.run.cfg.parallelism, self.run.cfg.training, self.run.mesh.degrees
        rows = t.local_batch_size if degrees.pp == 1 else math.lcm(t.local_batch_size, p.pipeline_parallel_microbatch_size * 2 * degrees.pp)
        return rows * degrees.batch


def train(cfg: Config, _: Origins) -> int:
    """Trains up to `training.steps`, from the run's newest checkpoint where there is one. Returns the exit code."""
    mesh = join(cfg)
    _check(cfg)
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
        run, positions = setup_from(cfg, mesh, checkpoints, start, rows, f"{cfg.rl.task} {' '.join(cfg.rl.task_options)}")
        frontier = Frontier(0 if positions is None else int(positions[0, 0]), rows // mesh.degrees.batch)
        pool = build_rewards(cfg)
        stack.callback(pool.close)
        record_start(folder, cfg, mesh)
        policy = Policy(run, task, tokenizer, pool, frontier, folder, Figures.empty(mesh.device), build_encode(cfg, tokenizer))
        saver = Saver(run, frontier, checkpoints, data=f"{cfg.rl.task} {' '.join(cfg.rl.task_options)}") if cfg.checkpoint.enable else None
        if saver:
            stack.callback(saver.close)
        return _loop(policy, saver)


def _check(cfg: Config) -> None:
    """Raises ConfigError where reinforcement cannot do what is asked."""
    rl = cfg.rl
    for key, least in (("group_size", 1), ("prompts_per_step", 1), ("max_new_tokens", 1), ("n_slots", 1), ("minibatches", 1), ("most_refills", 0), ("reward_workers", 1), ("reward_memory_gb", 0)):
        if getattr(rl, key) < least:
            raise ConfigError(f"rl.{key}={getattr(rl, key)}: must be at least {least}", f"rl.{key}")
    if not rl.temperature > 0:
        raise ConfigError(f"rl.temperature={rl.temperature}: samples are drawn: it must be above 0", "rl.temperature")
    if cfg.training.loss_chunk_tokens:
        raise ConfigError("training.loss_chunk_tokens makes no logprobs of single tokens: set it to 0", "training.loss_chunk_tokens")
    if cfg.parallelism.pipeline_parallel_degree > 1 and rl.minibatches > 1:
        raise ConfigError(
            f"rl.minibatches={rl.minibatches} needs logprobs of before the first update, which a pipeline does not make: use 1", "rl.minibatches"
        )
    if rl.group_size == 1 and rl.baseline != "none":
        raise ConfigError(f"rl.group_size=1 has nothing to compare with (rl.baseline={rl.baseline!r}): use 2 or more", "rl.group_size", "rl.baseline")
    if rl.prompts_per_step < rl.minibatches:
        raise ConfigError(f"rl.minibatches={rl.minibatches} share rl.prompts_per_step={rl.prompts_per_step} groups: use fewer", "rl.minibatches")


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
        measured = train_step(run, _mine(run, batch), cross_entropy, lr_scale=cfg.rl.warm_up_lr_scale)
        yield step_record(run, measured, time.perf_counter() - began, 0.0, None), measured
        return
    if cfg.rl.kl_loss != "none" and policy.reference is None:
        policy.reference = _reference(policy)
    rollouts, groups, times, counts = _sampled(policy)
    if failures := [rollout.failure for rollout in rollouts if rollout.failure]:
        logger.warning(f"step={run.step + 1} failed_rewards={len(failures)} of {len(rollouts)}, one of them: {failures[0]}")
    _keep(policy, rollouts)
    batches = minibatches_of(cfg.rl, groups, seq_len=cfg.training.seq_len, unit=policy.unit, end_id=policy.tokenizer.end_id)
    microbatches = [_with_logprobs(policy, _mine(run, batch), of_policy=i > 0) for i, batch in enumerate(batches)]
    loss_fn = build_policy_loss(cfg.rl, run.mesh, policy.figures)
    for i, part in enumerate(microbatches):
        measured = train_step(run, part, loss_fn)
        figures = policy.figures.means()
        seconds = time.perf_counter() - began
        record = step_record(run, measured, seconds, times["generate_s"], None) | figures
        yield (record | _told(rollouts, counts) | times | {"train_s": seconds - sum(times.values())} if i == 0 else record), measured
        if run.step >= cfg.training.steps:
            return


def _sampled(policy: Policy) -> tuple[list[Rollout], list, dict[str, float], dict[str, int]]:
    """(all ranks' samples, groups to train on, seconds, counts). Raises Fault where nothing can be learnt from for too long."""
    run, rl, mesh = policy.run, policy.run.cfg.rl, policy.run.mesh
    began = time.perf_counter()
    generator = _generator(policy)
    times, rollouts, groups, counts, rounds = {"sync_s": time.perf_counter() - began}, [], [], {"failed": 0, "alike": 0}, 0
    most = rl.most_refills if rl.dynamic_sampling else rl.most_barren_steps
    while not rounds or (len(groups) < rl.prompts_per_step and rl.dynamic_sampling or not groups) and rounds <= most:
        first, n = policy.frontier.next, rl.prompts_per_step - len(groups)
        mine = range(first + mesh.rank, first + n, mesh.world_size)
        problems = {number: policy.task.problem(number) for number in mine}
        found = collect(
            rl, policy.task, problems, policy.encode, policy.tokenizer, generator, policy.pool, seed=run.cfg.debug.seed, version=run.step
        )
        new = sorted((rollout for part in gathered(found) for rollout in part), key=lambda rollout: (rollout.ordinal, rollout.sample))
        policy.frontier.next += n
        kept, dropped = groups_of(rl, new)
        rollouts, groups = rollouts + new, groups + kept
        counts = {reason: counts[reason] + number for reason, number in dropped.items()}
        rounds += 1
    if not groups:
        failures = sorted({rollout.failure for rollout in rollouts if rollout.failure})
        raise Fault(
            f"step {run.step + 1}: {rounds} rounds of {rl.prompts_per_step} problems gave nothing to learn from: {counts['failed']} groups with failed "
            f"rewards ({'; '.join(failures[:3]) or 'none'}), {counts['alike']} whose samples all got the same"
        )
    times["generate_s"] = time.perf_counter() - began - times["sync_s"]
    return rollouts, groups, times, counts | {"groups": len(groups)}


def _validated(policy: Policy) -> dict[str, float]:
    """Mean reward of greedy answers to the held-out problems, and how many failed."""
    run, n = policy.run, policy.run.cfg.rl.validation_problems
    began = time.perf_counter()
    generator = _generator(policy)
    problems = {number: policy.task.held_out(number) for number in range(run.mesh.rank, n, run.mesh.world_size)}
    greedy = replace(run.cfg.rl, group_size=1, temperature=0.0)
    found = collect(greedy, policy.task, problems, policy.encode, policy.tokenizer, generator, policy.pool, seed=0, version=run.step)
    rewards = [rollout.reward for part in gathered(found) for rollout in part if rollout.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else math.nan
    return {"validation_reward": mean, "validation_failed": n - len(rewards), "validation_s": time.perf_counter() - began}


def _generator(policy: Policy) -> EmbeddedGenerator:
    run, t = policy.run, policy.run.cfg.training
    model = inference_copy(run, getattr(torch, t.mixed_precision_param))
    return EmbeddedGenerator(model, end_id=policy.tokenizer.end_id, n_slots=run.cfg.rl.n_slots, max_length=t.seq_len + 1)


def _mine(run: Run, batch: Batch) -> list[Batch]:
    """This rank's part of the rows, in microbatches."""
    n, size = len(batch.tokens) // run.mesh.degrees.batch, run.cfg.training.local_batch_size
    start = run.mesh.batch_rank * n
    return [place(run, Batch(*(None if x is None else x[i : i + size] for x in batch)))._replace(ahead=None) for i in range(start, start + n, size)]


@torch.no_grad()
def _with_logprobs(policy: Policy, microbatches: list[Batch], *, of_policy: bool) -> list[Batch]:
    """With logprobs of the reference, and of the policy before a step's first update where a later one compares with it."""
    run, temperature = policy.run, policy.run.cfg.rl.temperature
    done = []
    for batch in microbatches:
        signals = batch.signals.clone()
        if of_policy:
            old = forward_only(run.parts, run.mesh, batch, lambda logits, batch: label_logprobs(logits, batch.labels, temperature)[0])
            signals[..., SIGNALS.index("old")] = old.to(signals.dtype)
        if policy.reference is not None:
            logits = policy.reference(batch.tokens, batch.positions, batch.documents)
            signals[..., SIGNALS.index("reference")] = label_logprobs(logits, batch.labels, temperature)[0].to(signals.dtype)
        done.append(batch._replace(signals=signals))
    return done


def _reference(policy: Policy) -> torch.nn.Module:
    """The policy when reinforcement began: kept in the run's folder, so that a run that goes on has the same."""
    run, folder = policy.run, policy.folder / "reference"
    if run.mesh.degrees.cp > 1:
        raise ConfigError("rl.kl_loss needs the reference's logprobs of whole rows, which context parallel splits: use context_parallel_degree=1", "rl.kl_loss")
    if not (folder / "step-0").exists():
        save(folder, 0, model_state(run.parts), extra={"model_only": True}, keep_latest_k=0)
    dist.barrier()
    model = get_model(run.cfg.model, getattr(torch, run.cfg.training.dtype))
    allocate(model, get_plan(run.cfg.model), run.mesh.device)
    load(folder, 0, model_state([model]))
    return model.to(getattr(torch, run.cfg.training.mixed_precision_param)).eval()


def _told(rollouts: list[Rollout], counts: dict[str, int]) -> dict[str, float]:
    """What metrics say of a step's samples."""
    rewards = torch.tensor([rollout.reward for rollout in rollouts if rollout.reward is not None], dtype=torch.float64)
    lengths = torch.tensor([float(rollout.n_drawn) for rollout in rollouts], dtype=torch.float64)
    told = {
        "reward": rewards.mean().item() if len(rewards) else math.nan,
        "reward_std": rewards.std(correction=0).item() if len(rewards) else math.nan,
        "failed_rewards": sum(rollout.reward is None for rollout in rollouts),
        "groups_kept": counts["groups"],
        "groups_failed": counts["failed"],
        "groups_alike": counts["alike"],
        "sample_tokens": lengths.mean().item(),
        "cut_fraction": sum(not rollout.ended for rollout in rollouts) / len(rollouts),
    }
    for reason, n in Counter(rollout.failure.partition(":")[0] for rollout in rollouts if rollout.failure).items():
        told[f"failed_rewards_{reason}"] = n
    for source in sorted({rollout.source for rollout in rollouts}):
        of = [rollout.reward for rollout in rollouts if rollout.source == source and rollout.reward is not None]
        told[f"reward_{source}"] = sum(of) / len(of) if of else math.nan
    return told


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
