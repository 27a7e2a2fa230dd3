"""What a step must know before it moves anything: logprobs of the policy and of its reference, a critic's forecasts."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.batch import Batch
from titanlite.checkpoint.folder import remove
from titanlite.checkpoint.state import copy_tied, model_state
from titanlite.checkpoint.store import load, save
from titanlite.losses import label_logprobs
from titanlite.parallel.collective import on_rank_0
from titanlite.parallel.context import sequence_index
from titanlite.parallel.forward_backward import forward_only
from titanlite.rl.algorithms import kl_estimate
from titanlite.rl.critic import values_of
from titanlite.rl.policy import uses_reference
from titanlite.rl.rollouts import Group, Minibatch, with_advantages
from titanlite.rl.signals import SIGNALS, with_signals
from titanlite.trainer import Run, place, setup
from titanlite.utils import ConfigError


def microbatches_of(run: Run, batch: Batch) -> list[Batch]:
    """This rank's part of the rows of all ranks, in microbatches."""
    n, size = len(batch.tokens) // run.mesh.degrees.batch, run.cfg.training.local_batch_size
    mine = Batch(*(None if x is None else x[run.mesh.batch_rank * n :][:n] for x in batch))
    return [place(run, Batch(*(None if x is None else x[i : i + size] for x in mine)))._replace(ahead=None) for i in range(0, n, size)]


def on_rows(parts: list[nn.Module], run: Run, batch: Batch, fn: Callable[[Tensor, Batch], Tensor]) -> Tensor:
    """[n, S] fp64 on all ranks, of the rows of all ranks: what `fn(output, microbatch)` -> [B, S / cp] makes of each. Collective."""
    mesh, size = run.mesh, run.cfg.training.local_batch_size
    whole = torch.zeros(batch.tokens.shape, dtype=torch.float64, device=mesh.device)
    n = len(batch.tokens) // mesh.degrees.batch
    columns = slice(None) if mesh.degrees.cp == 1 else sequence_index(batch.tokens.shape[1], mesh, run.cfg.parallelism).to(mesh.device)
    for i, part in enumerate(microbatches_of(run, batch)):
        found = forward_only(parts, mesh, part, fn)
        if found is not None and mesh.counts_loss:
            start = mesh.batch_rank * n + i * size
            whole[start : start + len(found), columns] = found.double()
    dist.all_reduce(whole)  # all but one rank have zeros
    return whole.cpu()


def scored(
    run: Run, groups: Sequence[Group], minibatches: Sequence[Minibatch], reference: list[nn.Module] | None
) -> tuple[list[Batch], dict[str, float]]:
    """(the minibatches' rows with all their signals, what metrics say of it). Collective.

    `old` stays NaN in the first one: the policy is where it was when that is trained.
    """
    rl = run.cfg.rl
    logprobs = lambda logits, batch: label_logprobs(logits, batch.labels, rl.temperature)[0]  # noqa: E731
    batches, kl, values = [], [], []
    for i, minibatch in enumerate(minibatches):
        batch, signals = minibatch.batch, {}
        old = on_rows(run.parts, run, batch, logprobs) if i > 0 or rl.kl_reward != "none" else None
        if i > 0:
            signals["old"] = old
        if reference is not None:
            signals["reference"] = on_rows(reference, run, batch, logprobs)
        if rl.kl_reward != "none":
            kl.append(kl_estimate(old, signals["reference"], rl.kl_reward))
        if run.critic is not None:
            signals["value"] = on_rows(run.critic.parts, run, batch, values_of)
            values.append(signals["value"])
        batches.append(Minibatch(with_signals(batch, **signals), minibatch.samples))
    batches = with_advantages(rl, groups, batches, kl=kl, values=values)
    tokens = torch.cat([batch.signals[batch.labels >= 0] for batch in batches])
    figures = {}
    if kl:
        figures["kl_reward"] = sum(one.sum().item() for one in kl) / len(tokens)
    if values:
        foretold, returns = (tokens[:, SIGNALS.index(name)] for name in ("value", "returns"))
        figures |= {"return": returns.mean().item(), "explained_variance": 1 - ((returns - foretold).var() / returns.var()).item()}
    return batches, figures


def load_reference(run: Run, folder: Path) -> list[nn.Module] | None:
    """The policy when reinforcement began, in the policy's own layout; kept in `folder`, so that a run that goes on has the same.

    None where it is not needed.
    """
    if not uses_reference(run.cfg.rl):
        return None
    if run.step == run.cfg.rl.warm_up_steps:
        on_rank_0(lambda: remove(folder / "step-0"))  # of a run that went back to before
        save(folder, 0, model_state(run.parts), extra={"model_only": True}, keep_latest_k=0)
    elif not on_rank_0((folder / "step-0").exists):
        raise ConfigError(
            f"{folder} has no reference: it is kept when reinforcement begins, at step {run.cfg.rl.warm_up_steps}, and this run is at {run.step}; "
            f"begin with rl.kl_loss or rl.kl_reward under another --job.name, from this run's step by checkpoint.initial_load_path",
            "rl.kl_loss",
            "rl.kl_reward",
        )
    reference = setup(run.cfg, run.mesh)
    load(folder, 0, model_state(reference.parts, copies=True), counted=model_state(reference.parts))
    copy_tied(reference.parts, reference.optimizer)
    return reference.parts
