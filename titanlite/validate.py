"""Rejects every illegal combination before any device work, with the key, the arithmetic and the nearest legal values."""

import functools
import importlib.util
import math
import re
from pathlib import Path
from typing import Any

import torch

from titanlite.config import Config, DataSource, Model, Profiling, training_sources
from titanlite.models import get_args, get_hf, get_model, get_plan
from titanlite.models.hf import config_from
from titanlite.parallel.compat import read_csv_schedule
from titanlite.parallel.degrees import Degrees, divisors, resolve_degrees
from titanlite.parallel.stages import SPLIT_BACKWARD, check_microbatches, modules_of_stages, stage_ranks
from titanlite.utils import ConfigError

_BITS = {"bfloat16": 16, "float32": 32, "float64": 64}


def validate(cfg: Config, world_size: int) -> Degrees:
    """The parallel degrees of a legal configuration. Raises ConfigError otherwise."""
    degrees = resolve_degrees(cfg.parallelism, world_size)
    _check_tensor_parallel(cfg, degrees)
    _check_experts(cfg, degrees)
    _check_sequence(cfg, degrees)
    _check_ranges(cfg)
    rows = global_batch_size(cfg, degrees) // degrees.batch
    if degrees.pp > 1:
        _check_pipeline(cfg, rows)

    t, ac = cfg.training, cfg.activation_checkpoint
    if _BITS[t.mixed_precision_param] > _BITS[t.dtype]:
        raise ConfigError(
            f"training.mixed_precision_param={t.mixed_precision_param!r} is wider than training.dtype={t.dtype!r}: "
            f"set both to {t.dtype!r}, or a wider training.dtype",
            "training.mixed_precision_param",
            "training.dtype",
        )
    if t.loss_chunk_tokens and cfg.parallelism.fsdp_reshard_after_forward == "always":
        raise ConfigError(
            f"training.loss_chunk_tokens={t.loss_chunk_tokens} needs the head's weight after the forward pass, which "
            f"parallelism.fsdp_reshard_after_forward='always' drops: use 'default'",
            "training.loss_chunk_tokens",
            "parallelism.fsdp_reshard_after_forward",
        )
    if cfg.parallelism.data_parallel_sharding != "zero3" and cfg.parallelism.fsdp_reshard_after_forward == "always":
        raise ConfigError(
            f"parallelism.data_parallel_sharding={cfg.parallelism.data_parallel_sharding!r} keeps parameters gathered, "
            f"parallelism.fsdp_reshard_after_forward='always' drops them: use 'zero3', or 'default'",
            "parallelism.data_parallel_sharding",
            "parallelism.fsdp_reshard_after_forward",
        )
    if cfg.checkpoint.load_step != -1 and not cfg.checkpoint.enable:
        raise ConfigError(
            f"checkpoint.load_step={cfg.checkpoint.load_step} needs checkpoint.enable=true",
            "checkpoint.load_step",
            "checkpoint.enable",
        )
    _check_hugging_face(cfg)
    _check_profiling(cfg.profiling)
    _check_data(cfg)
    option = ac.selective_ac_option
    if ac.mode == "selective" and option != "op" and not (option.isdecimal() and int(option) > 0):
        raise ConfigError(
            f"activation_checkpoint.selective_ac_option={option!r}: expected 'op' or a number N of at least 1 "
            f"(every N-th block is recomputed)",
            "activation_checkpoint.selective_ac_option",
        )
    s = cfg.lr_scheduler
    if s.decay_ratio is not None and not 0 <= s.decay_ratio <= 1:
        raise ConfigError(f"lr_scheduler.decay_ratio={s.decay_ratio}: expected a share from 0 to 1", "lr_scheduler.decay_ratio")
    if s.total_steps is not None and s.total_steps < t.steps and s.min_lr_factor == 0 and s.decay_ratio != 0:
        raise ConfigError(
            f"lr_scheduler.total_steps={s.total_steps} ends the schedule at learning rate 0, before training.steps={t.steps}: "
            f"the steps after it would change nothing; set lr_scheduler.total_steps={t.steps} or lr_scheduler.min_lr_factor",
            "lr_scheduler.total_steps",
            "training.steps",
            "lr_scheduler.min_lr_factor",
        )
    return degrees


def _check_profiling(cfg: Profiling) -> None:
    keys = [f"profiling.{name}" for name in ("profile_freq", "profiler_warmup", "profiler_active")]
    if cfg.enable_profiling and cfg.profile_freq < cfg.profiler_warmup + cfg.profiler_active:
        raise ConfigError(
            f"{keys[0]}={cfg.profile_freq} must be at least {keys[1]}={cfg.profiler_warmup} + {keys[2]}={cfg.profiler_active} = "
            f"{cfg.profiler_warmup + cfg.profiler_active}",
            *keys,
        )
    if cfg.enable_memory_snapshot and not torch.cuda.is_available():
        key = "profiling.enable_memory_snapshot"
        raise ConfigError(f"{key}=true needs CUDA devices: PyTorch keeps no history of other memory; use false", key)


def _check_hugging_face(cfg: Config) -> None:
    c = cfg.checkpoint
    if c.initial_load_in_hf and not c.initial_load_path and not cfg.model.hf_assets_path:
        raise ConfigError(
            "checkpoint.initial_load_in_hf=true needs a Hugging Face folder: set checkpoint.initial_load_path or model.hf_assets_path",
            "checkpoint.initial_load_in_hf",
        )
    if c.initial_load_path and not c.initial_load_in_hf and not re.fullmatch(r"step-\d+", Path(c.initial_load_path).name):
        raise ConfigError(
            f"checkpoint.initial_load_path={c.initial_load_path!r} is not a checkpoint's folder .../step-N: is it a Hugging Face folder? then set "
            f"checkpoint.initial_load_in_hf=true",
            "checkpoint.initial_load_path",
        )
    if c.last_save_in_hf:
        if not c.enable:
            raise ConfigError("checkpoint.last_save_in_hf=true needs checkpoint.enable=true", "checkpoint.last_save_in_hf", "checkpoint.enable")
        config_from(get_args(cfg.model), get_hf(cfg.model))  # now, not at the end


def _check_data(cfg: Config) -> None:
    d, t = cfg.data, cfg.training
    if d.sources and (t.dataset != "stdlib" or t.dataset_path is not None):
        raise ConfigError(
            f"training.dataset={t.dataset!r} and training.dataset_path={t.dataset_path!r} are the short form of one [[data.sources]] entry, "
            f"and {len(d.sources)} are given: use one form",
            "training.dataset",
            "training.dataset_path",
            "data.sources",
        )
    for i, source in enumerate(d.sources):
        if not 0 < source.weight < math.inf:
            raise ConfigError(f"data.sources[{i}].weight={source.weight}: must be above 0 and finite", "data.sources")
    if d.epochs is not None and any(source.is_stream for source in training_sources(cfg)):
        raise ConfigError(f"data.epochs={d.epochs}: the end of a stream is not known: use format hf, or let training.steps end the run", "data.epochs")
    v = cfg.validation
    if v.enable and v.steps < 0 and DataSource(v.dataset, v.dataset_path).is_stream:
        raise ConfigError(
            f"validation.dataset={v.dataset} is a stream, whose end is not known: set validation.steps to the batches of a validation",
            "validation.dataset",
            "validation.steps",
        )
    if d.epochs is not None and len(d.sources) > 1:
        raise ConfigError(
            f"data.epochs={d.epochs} with {len(d.sources)} data.sources: sources of other weights than sizes end at different times; "
            f"let training.steps end the run, or give one source",
            "data.epochs",
            "data.sources",
        )


def _check_tensor_parallel(cfg: Config, degrees: Degrees) -> None:
    args, tp = get_args(cfg.model), degrees.tp
    key = "parallelism.tensor_parallel_degree"
    plan = get_plan(cfg.model)
    if tp > 1 and not plan.tensor:
        raise ConfigError(f"{key}={tp}: {cfg.model.name} has no tensor-parallel plan: use 1", key)
    names = ("hidden_dim",) if plan.heads and plan.cores else ("n_heads", "n_kv_heads", "hidden_dim")
    sizes = {name: getattr(args, name) for name in names if hasattr(args, name)}
    for name, size in sizes.items():
        if size % tp:
            raise ConfigError(
                f"{key}={tp} must divide {cfg.model.title}'s {name}={size}: "
                f"use one of {divisors(math.gcd(*sizes.values()))}",
                key,
            )
    if args.vocab_size % tp and degrees.fsdp > 2:
        # PyTorch's DTensor cuts a dimension that is split twice, unevenly, in other places than FSDP2 does.
        fitting = -(-args.vocab_size // tp) * tp
        raise ConfigError(
            f"model.vocab_size={args.vocab_size} must divide by {key}={tp} where parameters are sharded over more than 2 ranks "
            f"(here {degrees.fsdp}): use {fitting} (a vocabulary may be larger than the tokenizer's)",
            "model.vocab_size",
            key,
        )
    if cfg.parallelism.enable_async_tensor_parallel and not (cfg.compile.enable and torch.cuda.is_available()):
        raise ConfigError(
            "parallelism.enable_async_tensor_parallel=true needs compile.enable=true and CUDA devices",
            "parallelism.enable_async_tensor_parallel",
            "compile.enable",
        )


def _check_experts(cfg: Config, degrees: Degrees) -> None:
    model, moe = cfg.model, getattr(get_args(cfg.model), "moe", None)
    keys = ("parallelism.expert_parallel_degree", "parallelism.expert_tensor_parallel_degree")
    if moe is None:
        if degrees.ep * degrees.etp > 1:
            raise ConfigError(f"{keys[0]}={degrees.ep}, {keys[1]}={degrees.etp}: {model.name} {model.flavor} has no experts: set both to 1", *keys)
        return
    if moe.capacity_factor is not None and (moe.capacity_factor <= 0 or degrees.etp > 1):
        raise ConfigError(
            f"model.moe_capacity_factor={moe.capacity_factor} must be above 0, and {keys[1]}={degrees.etp} be 1: ranks that share experts' "
            f"widths must have equally many rows",
            "model.moe_capacity_factor",
            keys[1],
        )
    if cfg.parallelism.expert_parallel_comm_backend == "deepep":
        _check_deepep(cfg, degrees)
    for key, degree, what, size in (
        (keys[0], degrees.ep, "experts", moe.n_experts),
        (keys[1], degrees.etp, "of an expert's width", moe.hidden_dim),
    ):
        if size % degree:
            raise ConfigError(f"{key}={degree} must divide the {size} {what} of {model.name} {model.flavor}: use one of {divisors(size)}", key)


def _check_deepep(cfg: Config, degrees: Degrees) -> None:
    backend, t = "parallelism.expert_parallel_comm_backend", cfg.training
    lacking = {
        "parallelism.expert_parallel_degree above 1": degrees.ep > 1,
        "parallelism.expert_tensor_parallel_degree=1": degrees.etp == 1,
        "training.mixed_precision_param='bfloat16'": t.mixed_precision_param == "bfloat16",
        "no model.moe_capacity_factor": cfg.model.moe_capacity_factor is None,
        "CUDA devices": torch.cuda.is_available(),
        "the package deep_ep": importlib.util.find_spec("deep_ep") is not None,
    }
    if missing := [what for what, there in lacking.items() if not there]:
        raise ConfigError(f"{backend}='deepep' needs {', '.join(missing)}: use 'standard', or see to these", backend)


def _check_sequence(cfg: Config, degrees: Degrees) -> None:
    p, cp, tp = cfg.parallelism, degrees.cp, degrees.tp
    keys = {"parallelism.context_parallel_degree": cp, "parallelism.tensor_parallel_degree": tp}
    pieces = 2 * cp * tp if cp > 1 and p.context_parallel_load_balancer == "headtail" else cp * tp
    terms = ["2 (head and tail)"] * (pieces > cp * tp) + [f"{key}={n}" for key, n in keys.items() if n > 1]
    for section in ("training", "validation") if cfg.validation.enable else ("training",):
        seq_len = getattr(cfg, section).seq_len
        if seq_len % pieces:
            below, above = seq_len // pieces * pieces, (seq_len // pieces + 1) * pieces
            product = f"{' * '.join(terms)} = {pieces}" if len(terms) > 1 else terms[0]
            raise ConfigError(
                f"{section}.seq_len={seq_len} must divide by {product}: use {f'{below} or ' if below else ''}{above}",
                f"{section}.seq_len",
                *keys,
            )
    if cfg.model.attention == "flex":
        if not torch.cuda.is_available():
            raise ConfigError("model.attention='flex' needs CUDA devices, PyTorch has its backward pass for no other: use 'sdpa'", "model.attention")
        if cp > 1 and p.context_parallel_method == "ring":
            raise ConfigError(
                "parallelism.context_parallel_method='ring' has attention kernels of its own: use model.attention='sdpa', or method 'allgather'",
                "model.attention",
                "parallelism.context_parallel_method",
            )
    args = get_args(cfg.model)
    if cp > 1 and p.context_parallel_method == "ring" and (getattr(args, "window", None) or getattr(args, "sinks", False)):
        raise ConfigError(
            f"parallelism.context_parallel_method='ring' has attention kernels of its own, without the windows and sinks of "
            f"{cfg.model.name}: use 'allgather' or 'ulysses'",
            "parallelism.context_parallel_method",
            "model.name",
        )
    if cp == 1:
        return
    if not get_plan(cfg.model).cores:
        raise ConfigError(f"parallelism.context_parallel_degree={cp}: {cfg.model.name}'s plan names no attention cores: use 1", *keys)
    if p.context_parallel_method == "ring" and cfg.compile.enable and "model" in cfg.compile.components:
        raise ConfigError(
            "parallelism.context_parallel_method='ring' sends and receives inside attention, which compile.enable cannot take in: "
            "use 'allgather' or 'ulysses', or compile.enable=false",
            "parallelism.context_parallel_method",
            "compile.enable",
        )
    args = get_args(cfg.model)
    heads, kv_heads = (n // (tp if get_plan(cfg.model).splits_heads(tp) else 1) for n in (args.n_heads, args.n_kv_heads))
    if getattr(args, "full_attention_every", None) and heads % cp:
        raise ConfigError(
            f"parallelism.context_parallel_degree={cp}: lightning attention trades sequence for heads, so it must divide the {heads} heads "
            f"of a tensor-parallel rank: use one of {divisors(heads)}",
            "parallelism.context_parallel_degree",
            "parallelism.tensor_parallel_degree",
        )
    if p.context_parallel_method == "ulysses" and (heads % cp or (kv_heads % cp and cp % kv_heads)):
        legal = [d for d in divisors(heads) if kv_heads % d == 0 or d % kv_heads == 0]
        raise ConfigError(
            f"parallelism.context_parallel_degree={cp} with method 'ulysses' trades sequence for heads: it must divide the {heads} heads "
            f"and fit the {kv_heads} key-value heads of a tensor-parallel rank: use one of {legal}, or method 'allgather'",
            "parallelism.context_parallel_degree",
            "parallelism.context_parallel_method",
        )


@functools.cache
def _blocks(cfg: Model) -> list[str]:
    return list(get_plan(cfg).blocks_of(get_model(cfg, torch.float32)))


def _check_pipeline(cfg: Config, rows: int) -> None:
    p = cfg.parallelism
    schedule_key, csv_key = "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_schedule_csv"
    plan, blocks = get_plan(cfg.model), _blocks(cfg.model)
    if p.pipeline_parallel_schedule_csv:
        key, splits_backward = csv_key, False
        try:
            actions, ranks, microbatches, splits_backward = read_csv_schedule(p.pipeline_parallel_schedule_csv)
        except (OSError, ValueError, RuntimeError) as e:
            raise ConfigError(
                f"{csv_key}={p.pipeline_parallel_schedule_csv!r} is not a schedule: {e} (a line a rank, cells like 0F1: stage 0, forward F "
                f"or backward B, or I and W, microbatch 1)",
                csv_key,
            ) from e
        if len(actions) != p.pipeline_parallel_degree:
            raise ConfigError(
                f"{csv_key}={p.pipeline_parallel_schedule_csv!r} has {len(actions)} ranks: set "
                f"parallelism.pipeline_parallel_degree={len(actions)}, it is {p.pipeline_parallel_degree}",
                csv_key,
                "parallelism.pipeline_parallel_degree",
            )
        size = p.pipeline_parallel_microbatch_size
        if size < 1 or rows != microbatches * size:
            raise ConfigError(
                f"{csv_key}={p.pipeline_parallel_schedule_csv!r} has {microbatches} microbatches, of "
                f"parallelism.pipeline_parallel_microbatch_size={size} rows each: training.local_batch_size must give a rank "
                f"{microbatches * size} rows a step, it gives {rows}",
                csv_key,
                "training.local_batch_size",
                "parallelism.pipeline_parallel_microbatch_size",
            )
    else:
        key, splits_backward = schedule_key, p.pipeline_parallel_schedule in SPLIT_BACKWARD
        ranks = stage_ranks(p, len(blocks))
        check_microbatches(p, rows, len(ranks))
    stages = modules_of_stages(list(plan.first), blocks, list(plan.last), p, len(ranks))
    if elsewhere := [block for block in plan.with_last if block not in stages[-1]]:
        raise ConfigError(
            f"model.mtp_depth={len(plan.with_last)}: {', '.join(elsewhere)} must lie in the last pipeline stage, with the head, but it holds "
            f"{len(stages[-1].intersection(blocks))} of {len(blocks)} blocks: use fewer stages (parallelism.pipeline_parallel_degree, "
            "pipeline_parallel_layers_per_stage), a smaller parallelism.pipeline_parallel_last_stage_less_layers, or "
            f"model.mtp_depth={len(plan.with_last) - len(elsewhere)}",
            "model.mtp_depth",
            "parallelism.pipeline_parallel_degree",
        )
    if not splits_backward:
        return
    value = f"{key}={getattr(p, key.rsplit('.')[-1])!r} makes gradients of inputs and weights at two times"
    if p.fsdp_reshard_after_forward == "always":
        raise ConfigError(
            f"{value}, between which parameters must stay gathered: use parallelism.fsdp_reshard_after_forward='never' or 'default'",
            key,
            "parallelism.fsdp_reshard_after_forward",
        )
    if cfg.compile.enable and "model" in cfg.compile.components:
        raise ConfigError(f"{value}, which compiled blocks cannot: use compile.enable=false, or a schedule like 'Interleaved1F1B'", key, "compile.enable")
    if cfg.activation_checkpoint.mode != "none" and not p.pipeline_parallel_force_recompute:
        raise ConfigError(
            f"{value}: with activation_checkpoint.mode={cfg.activation_checkpoint.mode!r} blocks would be computed again several times over; "
            f"use 'none', or parallelism.pipeline_parallel_force_recompute=true to do so all the same",
            key,
            "activation_checkpoint.mode",
        )


def global_batch_size(cfg: Config, degrees: Degrees) -> int:
    """Rows a step over all ranks. Raises ConfigError where they don't divide into microbatches."""
    t = cfg.training
    rows = t.local_batch_size * degrees.batch
    if t.global_batch_size == -1:
        return rows
    if t.global_batch_size < 1 or t.global_batch_size % rows:
        below, above = t.global_batch_size // rows * rows, (max(t.global_batch_size, 0) // rows + 1) * rows
        legal = f"{below} or {above}" if below > 0 else f"{above}"
        raise ConfigError(
            f"training.global_batch_size={t.global_batch_size} must divide by training.local_batch_size={t.local_batch_size} "
            f"* {degrees.batch} data-parallel ranks = {rows}: use {legal}, or -1 for {rows}",
            "training.global_batch_size",
            "training.local_batch_size",
        )
    return t.global_batch_size


_AT_LEAST = {
    "training.local_batch_size": 1, "training.seq_len": 1, "training.max_norm": 0, "training.loss_chunk_tokens": 0, "training.steps": 1, "training.gc_freq": 1,
    "training.dataloader.num_workers": 0, "validation.local_batch_size": 1, "validation.seq_len": 1, "validation.freq": 1,
    "training.dataloader.prefetch_factor": 1, "optimizer.lr": 0, "optimizer.eps": 0, "optimizer.weight_decay": 0,
    "lr_scheduler.warmup_steps": 0, "lr_scheduler.total_steps": 1, "lr_scheduler.min_lr_factor": 0, "checkpoint.interval": 1,
    "checkpoint.keep_latest_k": 0, "checkpoint.max_failed_saves": 0, "checkpoint.load_step": -1, "metrics.log_freq": 1, "comm.init_timeout_seconds": 1, "comm.train_timeout_seconds": 1,
    "data.epochs": 1,
    "profiling.profile_freq": 1, "profiling.profiler_active": 1, "profiling.profiler_warmup": 0, "model.vocab_size": 2, "model.mtp_depth": 0, "model.rope_theta": 1, "model.rope_scaling_factor": 1, "model.rope_original_seq_len": 1,
    "training.mtp_loss_weight": 0, "debug.seed": 0, "parallelism.pipeline_parallel_layers_per_stage": 1,
    "parallelism.pipeline_parallel_first_stage_less_layers": 0, "parallelism.pipeline_parallel_last_stage_less_layers": 0,
}  # fmt: skip


def _check_ranges(cfg: Config) -> None:
    for key, least in _AT_LEAST.items():
        value: Any = cfg
        for name in key.split("."):
            value = getattr(value, name)
        if value is not None and not value >= least:  # NaN is not
            raise ConfigError(f"{key}={value}: must be at least {least}", key)
        if value == math.inf and key != "training.max_norm":
            raise ConfigError(f"{key}={value}: must be finite", key)
    for key in ("beta1", "beta2"):
        if not 0 <= getattr(cfg.optimizer, key) < 1:
            raise ConfigError(f"optimizer.{key}={getattr(cfg.optimizer, key)}: must be in [0, 1)", f"optimizer.{key}")
