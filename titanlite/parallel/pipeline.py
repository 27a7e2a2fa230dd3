"""Pipeline parallel on torch.distributed.pipelining: the model cut into stages, and the schedules that run them.

GPipe (arXiv 1811.06965), 1F1B and its interleaved form (arXiv 2104.04473), looped breadth-first (arXiv 2211.05953), zero bubble
and ZB-V (arXiv 2401.10241), DualPipeV (DeepSeek-V3, arXiv 2412.19437).
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.batch import Batch
from titanlite.config import Parallelism, Training
from titanlite.parallel.compat import csv_schedule, read_csv_schedule
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.plan import ParallelPlan, is_tied, matching
from titanlite.parallel.stages import ONE_STAGE, modules_of_stages, stage_ranks
from titanlite.utils import logger


@dataclass(frozen=True)
class Tie:
    """A parameter and the canonical one whose values it shares, in another stage: two copies that are kept equal."""

    name: str
    stage: int
    canonical: str
    canonical_stage: int


@dataclass(frozen=True)
class Stage:
    """Which stage a part is. Between stages travel hidden states [B, S / (cp * tp), width] in `dtype`."""

    index: int
    ranks: tuple[int, ...]  # pipeline rank of each stage
    width: int
    dtype: torch.dtype
    ties: tuple[Tie, ...]

    @property
    def is_last(self) -> bool:
        return self.index == len(self.ranks) - 1


def apply_pp(model: nn.Module, mesh: Mesh, plan: ParallelPlan, cfg: Parallelism, training: Training) -> list[nn.Module]:
    """This rank's stages, each a copy of the model without the modules of other stages, with `.pipeline_stage` set.

    It comes before every other pass: a copy of a model with replaced forwards would run the original's weights.
    """
    if mesh.degrees.pp == 1:
        return [model]
    blocks = list(plan.blocks_of(model))
    ranks = read_csv_schedule(cfg.pipeline_parallel_schedule_csv)[1] if cfg.pipeline_parallel_schedule_csv else stage_ranks(cfg, len(blocks))
    names = modules_of_stages(list(plan.first), blocks, list(plan.last), cfg, len(ranks))
    holds = lambda index, parameter: any(parameter.startswith(f"{name}.") for name in names[index])  # noqa: E731
    stage_of = lambda parameter: next(i for i in range(len(ranks)) if holds(i, parameter))  # noqa: E731
    ties = tuple(
        Tie(name, stage_of(name), canonical, stage_of(canonical)) for name, canonical in plan.tied if is_tied(model, name, canonical)
    )
    width, dtype = _hidden_width(model, plan), getattr(torch, training.mixed_precision_param)
    parts = []
    for index in [i for i, rank in enumerate(ranks) if rank == mesh.pp_rank]:
        part = copy.deepcopy(model)
        for name in blocks:
            if name not in names[index]:
                owner, _, attribute = name.rpartition(".")
                delattr(part.get_submodule(owner), attribute)
        for name in (*plan.first, *plan.last):
            if name not in names[index]:
                owner, _, attribute = name.rpartition(".")
                setattr(part.get_submodule(owner), attribute, None)
        part.pipeline_stage = Stage(index, ranks, width, dtype, tuple(tie for tie in ties if tie.stage != tie.canonical_stage))
        parts.append(part)
    logger.info(
        f"pipeline_parallel={mesh.degrees.pp} schedule={cfg.pipeline_parallel_schedule_csv or cfg.pipeline_parallel_schedule} "
        f"stages={len(ranks)} blocks={'+'.join(str(len(stage.intersection(blocks))) for stage in names)}"
    )
    return parts


class _Reached(Exception):
    pass


def _hidden_width(model: nn.Module, plan: ParallelPlan) -> int:
    """Last dimension of what goes into the first block of a model on meta."""

    def stop(_: nn.Module, inputs: tuple) -> None:
        raise _Reached(inputs[0].shape[-1])

    hook = next(iter(plan.blocks_of(model).values())).register_forward_pre_hook(stop)
    token = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    try:
        model(token, token, None)
    except _Reached as reached:
        return reached.args[0]
    finally:
        hook.remove()
    raise AssertionError(f"{type(model).__name__}'s forward runs no block")


def pipeline_forward_backward(parts: list[nn.Module], mesh: Mesh, cfg: Parallelism) -> Callable:
    """`build_forward_backward` for a pipeline: the step's rows run in microbatches of `pipeline_parallel_microbatch_size`."""
    # NCCL makes a group's communicator with its first batch of messages, to which all ranks must come; later ones are of pairs.
    dist.all_reduce(torch.zeros(1, device=mesh.device), group=mesh.data.get_group("pp"))
    schedules: dict[tuple, object] = {}
    step: list = []  # the microbatches, loss function and denominator of the step that runs

    def loss_of(output: Tensor, index: Tensor) -> Tensor:
        batches, loss_fn, denominator = step
        # The microbatch's number, read without data, which a step with fake tensors does not have.
        return loss_fn(output, batches[index.storage_offset()]) / denominator

    def forward_backward(microbatches: list[Batch], loss_fn: Callable, denominator: Tensor) -> Tensor:
        rows = _joined(microbatches)
        batches = _split(rows, cfg.pipeline_parallel_microbatch_size)
        shape = (len(batches), *batches[0].tokens.shape)
        if shape not in schedules:
            schedules.clear()
            schedules[shape] = _build_schedule(parts, mesh, cfg, loss_of, *shape)
        step[:] = batches, loss_fn, denominator
        losses: list[Tensor] = []
        schedules[shape].step(
            *([rows.tokens] if parts[0].pipeline_stage.index == 0 else []),
            target=torch.arange(len(batches)),
            losses=losses,
            return_outputs=False,
            positions=rows.positions,
            **({} if rows.documents is None else {"documents": rows.documents}),
            **further(rows),
        )
        step.clear()
        _add_tied_gradients(parts, mesh)
        return sum((loss.detach() for loss in losses), torch.zeros_like(denominator))

    return forward_backward


def further(batch: Batch) -> dict[str, Tensor]:
    """What only a model that predicts further tokens takes."""
    return {} if batch.ahead is None else {"ahead": batch.ahead}


def _joined(microbatches: list[Batch]) -> Batch:
    if any(batch.documents is not None for batch in microbatches):
        microbatches = [b if b.documents is not None else b._replace(documents=torch.zeros_like(b.tokens)) for b in microbatches]
    return Batch(*(None if x[0] is None else torch.cat(x) for x in zip(*microbatches)))


def _split(rows: Batch, size: int) -> list[Batch]:
    return [Batch(*(None if x is None else x[i : i + size] for x in rows)) for i in range(0, len(rows.tokens), size)]


def _build_schedule(
    parts: list[nn.Module], mesh: Mesh, cfg: Parallelism, loss_of: Callable, n_microbatches: int, rows: int, seq_len: int
) -> object:
    from torch.distributed.pipelining import PipelineStage  # costs more than a second
    from torch.distributed.pipelining.schedules import get_schedule_class

    tokens = torch.empty(rows, seq_len, dtype=torch.int64, device="meta")
    stages = []
    for part in parts:
        stage = part.pipeline_stage
        # Shapes are given: to find them, PyTorch would run a real forward. The last stage's output goes nowhere.
        hidden = torch.empty(_hidden_shape(stage, tokens, mesh), dtype=stage.dtype, device="meta", requires_grad=True)
        stages.append(
            PipelineStage(
                part,
                stage.index,
                len(stage.ranks),
                mesh.device,
                input_args=tokens if stage.index == 0 else hidden,
                output_args=hidden,
                group=mesh.data.get_group("pp"),
            )
        )
    options = {"loss_fn": loss_of, "scale_grads": False}
    if cfg.pipeline_parallel_schedule_csv:
        return csv_schedule(cfg.pipeline_parallel_schedule_csv, stages, n_microbatches, **options)
    schedule = get_schedule_class(cfg.pipeline_parallel_schedule)
    return schedule(stages[0] if cfg.pipeline_parallel_schedule in ONE_STAGE else stages, n_microbatches, **options)


def _hidden_shape(stage: Stage, tokens: Tensor, mesh: Mesh) -> tuple[int, int, int]:
    return tokens.shape[0], tokens.shape[1] // mesh.degrees.tp, stage.width


def pipeline_forward(parts: list[nn.Module], mesh: Mesh, batch: Batch, fn: Callable) -> Tensor | None:
    """`fn(logits, batch)` on ranks that hold the last stage, None on others."""
    group, result, x = mesh.data.get_group("pp"), None, batch.tokens
    for part in parts:
        stage = part.pipeline_stage
        if stage.index > 0 and (before := stage.ranks[stage.index - 1]) != mesh.pp_rank:
            x = torch.empty(_hidden_shape(stage, batch.tokens, mesh), dtype=stage.dtype, device=mesh.device)
            dist.recv(x, group=group, group_src=before)
        x = part(x, batch.positions, batch.documents)
        if stage.is_last:
            result = fn(x, batch)
        elif (after := stage.ranks[stage.index + 1]) != mesh.pp_rank:
            dist.send(x.contiguous(), group=group, group_dst=after)
    return result


def _add_tied_gradients(parts: list[nn.Module], mesh: Mesh) -> None:
    """Gives both copies of a tied parameter the sum of their gradients. Addition commutes, so they stay bit-equal."""
    by_stage = {part.pipeline_stage.index: part for part in parts}
    for tie in parts[0].pipeline_stage.ties:
        grads = [
            _local_gradient(by_stage[stage].get_parameter(name))
            for stage, name in ((tie.canonical_stage, tie.canonical), (tie.stage, tie.name))
            if stage in by_stage
        ]
        if len(grads) == 2:
            grads[0] += grads[1]
            grads[1].copy_(grads[0])
        elif grads:
            group, ranks = mesh.data.get_group("pp"), parts[0].pipeline_stage.ranks
            other = ranks[tie.stage if tie.canonical_stage in by_stage else tie.canonical_stage]
            theirs = torch.empty_like(grads[0])
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, grads[0].contiguous(), group=group, group_peer=other),
                    dist.P2POp(dist.irecv, theirs, group=group, group_peer=other),
                ]
            )
            for work in works:
                work.wait()
            grads[0] += theirs


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "a tied parameter got no gradient"
    if not isinstance(parameter.grad, DTensor):
        return parameter.grad
    if parameter.grad.placements != parameter.placements:  # under tensor parallel without FSDP
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    return parameter.grad.to_local()


def copies(parts: list[nn.Module]) -> dict[str, str]:
    """Name of each parameter here that is a copy -> the canonical name, which another stage holds."""
    stages = [part.pipeline_stage for part in parts if hasattr(part, "pipeline_stage")]
    return {tie.name: tie.canonical for stage in stages for tie in stage.ties if tie.stage == stage.index}


def head_of(parts: list[nn.Module], plan: ParallelPlan) -> nn.Module | None:
    """The module that makes logits, where this rank has it."""
    return next((module for part in parts for module in matching(part, plan.head).values()), None)
