"""`setup(cfg)` builds a run from its configuration; `train_step` takes it one optimizer step further."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from titanlite.batch import IGNORE, Batch, with_ahead
from titanlite.config import Config
from titanlite.losses import chunk_loss, cross_entropy, multi_token_loss
from titanlite.models import get_args, get_family, get_model, get_plan
from titanlite.observe.metrics import peak_memory_bytes, peak_tflops
from titanlite.optim import build_optimizer, finish_gradients, local_gradients, local_square_sum, lr_factor
from titanlite.parallel.context import local_batch
from titanlite.parallel.expert import mixtures_of, set_loss_scale, update_routers
from titanlite.parallel.forward_backward import ForwardBackward, LossFn, build_forward_backward, forward_only
from titanlite.parallel.mesh import Mesh, build_mesh, init_distributed
from titanlite.parallel.parallelize import materialize, parallelize
from titanlite.parallel.pipeline import copies, head_of
from titanlite.parallel.plan import ParallelPlan
from titanlite.utils import ConfigError, Fault, logger
from titanlite.validate import global_batch_size, validate


class TrainingFault(Fault):
    """Training cannot go on; nothing bad was applied."""


@dataclass
class Run:
    """A model being trained. `step` and `tokens` say how far it is; the rest does not change."""

    cfg: Config
    mesh: Mesh
    parts: list[nn.Module]
    optimizer: torch.optim.Optimizer
    forward_backward: ForwardBackward
    loss_fn: LossFn
    flops_per_token: int
    counted: list[nn.Parameter]  # in the gradient norm: without copies of tied parameters that other pipeline stages hold
    mtp_depth: int  # tokens beyond the next one that are predicted
    mtp_loss: torch.Tensor  # of those, this rank's sum over the step's labels so far
    critic: "Run | None" = None  # trained beside it in reinforcement, and saved with it
    step: int = 0
    tokens: int = 0  # labels trained on, over all ranks
    stop_asked: bool = False  # a signal came in on this rank
    has_more: bool = True  # this rank has rows for another step
    data_error: Exception | None = None  # this rank could not read its rows

    def parameters(self) -> Iterator[nn.Parameter]:
        return (p for part in self.parts for p in part.parameters())


@dataclass(frozen=True)
class StepMetrics:
    loss: float  # nats a label, over the whole step
    grad_norm: float  # global, before clipping
    lr: float
    tokens: int  # labels of the step, over all ranks
    stop: bool  # a rank was asked to stop
    figures: dict[str, float] = field(default_factory=dict)  # that only some models have: mtp_loss, and what update_routers tells
    data_ended: bool = False  # no rank has rows for another step


def join(cfg: Config) -> Mesh:
    """Joins the gang and checks the configuration against its size, before any device work."""
    if cfg.debug.deterministic:
        torch.use_deterministic_algorithms(True)
    device = init_distributed(cfg.comm)
    return build_mesh(validate(cfg, dist.get_world_size()), device, experts=bool(get_plan(cfg.model).experts))


def setup(cfg: Config, mesh: Mesh, other: tuple[nn.Module, ParallelPlan] | None = None) -> Run:
    """The model of the configuration, or another one on meta with its plan, with its initial weights, sharded, and what trains it."""
    model, plan = other or (get_model(cfg.model, getattr(torch, cfg.training.dtype)), get_plan(cfg.model))
    n_parameters = sum(p.numel() for p in model.parameters())
    parts = parallelize(model, mesh, plan, cfg)
    materialize(parts, mesh, plan, cfg)
    if cfg.debug.moe_force_load_balance:
        for moe in (moe for part in parts for moe in mixtures_of(part)):
            moe.router.choose = moe.router.balanced
    loss_fn = cross_entropy
    head = head_of(parts, plan)
    if cfg.training.loss_chunk_tokens and head is not None:
        loss_fn = chunk_loss(head, cfg.training.loss_chunk_tokens)
    elif cfg.compile.enable and "loss" in cfg.compile.components:
        loss_fn = torch.compile(cross_entropy, backend=cfg.compile.backend)
    args, twice = get_args(cfg.model), copies(parts)
    mtp_depth, mtp_loss = getattr(args, "mtp_depth", 0), torch.zeros((), dtype=torch.float64, device=mesh.device)
    if mtp_depth:
        loss_fn = partial(multi_token_loss, loss_fn=loss_fn, weight=cfg.training.mtp_loss_weight, total=mtp_loss)
    run = Run(
        cfg=cfg,
        mesh=mesh,
        parts=parts,
        optimizer=build_optimizer(parts, cfg.optimizer),
        forward_backward=build_forward_backward(parts, mesh, cfg.parallelism),
        loss_fn=loss_fn,
        mtp_depth=mtp_depth,
        mtp_loss=mtp_loss,
        counted=[p for part in parts for name, p in part.named_parameters() if name not in twice],
        flops_per_token=get_family(cfg.model).flops_per_token(args, cfg.training.seq_len),
    )
    logger.info(
        f"model={cfg.model.title!r} parameters={n_parameters:,} "
        f"world_size={mesh.world_size} {mesh.degrees} device={mesh.device.type}"
    )
    return run


def train_step(run: Run, microbatches: list[Batch], loss_fn: LossFn, *, lr_scale: float = 1.0) -> StepMetrics:
    """One optimizer step over this rank's microbatches, which may have any padding: the loss is a mean over all labels.
    `lr_scale` is over what the schedule says.

    Raises TrainingFault on all ranks, before the optimizer has moved, where loss or gradient norm is not finite or a
    rank could not read its data.
    """
    cfg, mesh = run.cfg, run.mesh
    labels = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for batch in microbatches if mesh.counts_labels else []:
        labels += (batch.labels != IGNORE).sum()
    dist.all_reduce(labels)
    denominator = labels.clamp(min=1)
    set_loss_scale(run.parts, 1 / denominator)
    loss = run.forward_backward(microbatches, loss_fn, denominator)

    parameters = list(run.parameters())  # walking the modules again takes half a percent of a small step
    finish_gradients(parameters)
    # The control word: one all-reduce, waited for once, so that no rank ever decides alone.
    loss = loss if mesh.counts_loss else torch.zeros_like(loss)
    squares = local_square_sum(run.counted, mesh.world_size // mesh.degrees.pp)
    flags = torch.tensor([run.stop_asked, run.has_more, run.data_error is not None], dtype=torch.float64)
    word = torch.cat([torch.stack([loss, squares.to(loss.device)]), flags.to(loss.device)])
    dist.all_reduce(word)
    loss, square_sum, stop, has_more, data_error = word.tolist()
    if data_error:
        _raise_data_error(run)
    if not math.isfinite(loss) or not math.isfinite(square_sum):
        raise TrainingFault(
            f"step {run.step + 1}: loss {loss}, gradient norm {math.sqrt(square_sum)}: not finite, nothing was applied. "
            f"Gradients that are not finite: {_non_finite_parameters(run) or 'none'}"
        )

    grad_norm = math.sqrt(square_sum)
    if 0 < cfg.training.max_norm < grad_norm:
        torch._foreach_mul_(local_gradients(parameters), cfg.training.max_norm / grad_norm)
    lr = lr_scale * cfg.optimizer.lr * lr_factor(run.step + 1, cfg.lr_scheduler, cfg.training.steps)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    run.optimizer.step()
    run.optimizer.zero_grad()
    figures = update_routers(run.parts, mesh) if mesh.stages is not None else {}
    if run.mtp_depth:
        total = run.mtp_loss if mesh.counts_loss else torch.zeros_like(run.mtp_loss)
        dist.all_reduce(total)
        figures["mtp_loss"] = (total / denominator).item()
        run.mtp_loss.zero_()
    run.step += 1
    run.tokens += int(labels.item())
    return StepMetrics(loss, grad_norm, lr, int(labels.item()), bool(stop), figures, data_ended=not has_more)


def step_record(
    run: Run, measured: StepMetrics, step_time_s: float, data_time_s: float, heldout_loss: float | None
) -> dict[str, float | int | None]:
    """What metrics.jsonl says of a step; times are means since the last record."""
    tokens_per_s = measured.tokens / step_time_s
    tflops = tokens_per_s * run.flops_per_token / run.mesh.world_size / 1e12  # of one device
    peak = peak_tflops(run.mesh.device)
    record = {
        "step": run.step,
        "loss": measured.loss,
        "grad_norm": measured.grad_norm,
        "lr": measured.lr,
        "tokens": run.tokens,
        "tokens_per_s": tokens_per_s,
        "tflops": tflops,
        "mfu": None if peak is None else tflops / peak,
        "memory_gib": peak_memory_bytes(run.mesh.device) / 2**30,
        "step_time_s": step_time_s,
        "data_time_s": data_time_s,
        **measured.figures,
    }
    return record if heldout_loss is None else record | {"validation_loss": heldout_loss}


def validation_loss(run: Run, batches: Iterator[Batch]) -> float | None:
    """Mean loss in nats over all labels of all ranks' batches; every rank passes equally many batches.

    None where a rank was asked to stop before the end. Raises on all ranks what the first one that could not read its data met.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=run.mesh.device)
    while True:
        batch, stop = _next_on_all_ranks(run, batches)
        if stop:
            return None
        if batch is None:
            break
        batch = place(run, batch)._replace(ahead=None)
        loss = forward_only(run.parts, run.mesh, batch, run.loss_fn)
        if loss is not None and run.mesh.counts_loss:
            sums[0] += loss
        if run.mesh.counts_labels:
            sums[1] += (batch.labels != IGNORE).sum()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def _next_on_all_ranks(run: Run, batches: Iterator[Batch]) -> tuple[Batch | None, bool]:
    """(this rank's next batch, whether a rank was asked to stop)."""
    batch = None
    try:
        batch = next(batches, None)
    except Exception as e:
        run.data_error = e
    word = torch.tensor([run.data_error is not None, run.stop_asked], dtype=torch.float32, device=run.mesh.device)
    dist.all_reduce(word)
    failed, stop = word.tolist()
    if failed:
        _raise_data_error(run)
    return batch, bool(stop)


def next_microbatches(run: Run, loader: Iterator[list[Batch]]) -> list[Batch]:
    """This rank's microbatches of the next step, on its device.

    A rank that cannot read its data still goes through the step, with nothing to train on: the others are waiting for it
    in collectives, and learn of it by the control word.
    """
    t = run.cfg.training
    try:
        microbatches = next(loader)
    except Exception as e:
        run.data_error = e
        shape = (t.local_batch_size, t.seq_len)
        nothing = Batch(torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORE), torch.arange(t.seq_len).expand(shape), None)
        microbatches = [nothing] * (global_batch_size(run.cfg, run.mesh.degrees) // (run.mesh.degrees.batch * t.local_batch_size))
    return [place(run, batch) for batch in microbatches]


def place(run: Run, batch: Batch) -> Batch:
    """This rank's part of the rows, on its device."""
    batch = local_batch(with_ahead(batch, run.mtp_depth), run.mesh, run.cfg.parallelism)
    return Batch(*(None if x is None else x.to(run.mesh.device, non_blocking=True) for x in batch))


def _raise_data_error(run: Run) -> None:
    """All ranks raise what the first rank with a data error met."""
    errors: list[Exception | None] = [None] * run.mesh.world_size
    mine = run.data_error
    if not isinstance(mine, ConfigError | None):
        logger.error("this rank's data cannot be read", exc_info=mine)  # into its log: the message holds no traceback
        mine = TrainingFault(f"rank {run.mesh.rank} cannot read its data: {mine!r}")
    dist.all_gather_object(errors, mine)
    raise next(e for e in errors if e is not None)


def _non_finite_parameters(run: Run, most: int = 5) -> str:
    bad = [
        name
        for part in run.parts
        for name, p in part.named_parameters()
        if p.grad is not None and not all(g.isfinite().all() for g in local_gradients([p]))
    ]
    everywhere: list[list[str]] = [[]] * run.mesh.world_size
    dist.all_gather_object(everywhere, bad)
    names = list(dict.fromkeys(name for names in everywhere for name in names))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
