"""The arithmetic of pipeline stages: which rank has which, and which modules lie in each. No torch."""

from titanlite.config import Parallelism
from titanlite.utils import ConfigError, nearest

ONE_STAGE = ("GPipe", "1F1B")  # a rank
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # ranks forth and back: the first one has the first and the last stage
SPLIT_BACKWARD = ("InterleavedZeroBubble", *V_SHAPED)  # gradients of inputs and of weights are made at two times

_KEY = "parallelism.pipeline_parallel_"


def stage_ranks(cfg: Parallelism, n_blocks: int) -> tuple[int, ...]:
    """The pipeline rank of each stage. Raises ConfigError where the stages don't fit the ranks or the schedule."""
    pp, schedule = cfg.pipeline_parallel_degree, cfg.pipeline_parallel_schedule
    layers = cfg.pipeline_parallel_layers_per_stage
    if cfg.module_fqns_per_model_part:
        n, said = len(cfg.module_fqns_per_model_part), "parallelism.module_fqns_per_model_part"
    elif layers:
        n, said = -(-_places(cfg, n_blocks) // layers), f"{_KEY}layers_per_stage={layers}"
    else:
        n, said = pp if schedule in ONE_STAGE else 2 * pp, f"{_KEY}schedule={schedule!r}"
    wanted = "one stage" if schedule in ONE_STAGE else "two stages" if schedule in V_SHAPED else "two stages or more, equally many,"
    legal = [pp] if schedule in ONE_STAGE else [2 * pp] if schedule in V_SHAPED else [k * pp for k in range(2, max(n // pp, 2) + 2)]
    if n not in legal:
        fix = f"make it {' or '.join(map(str, legal))}"
        if layers and not cfg.module_fqns_per_model_part:
            places = _places(cfg, n_blocks)
            fitting = ", ".join(str(k) for k in range(1, places + 1) if -(-places // k) in legal)
            fix = f"use {fitting}, or leave it out" if fitting else "leave it out"
        raise ConfigError(
            f"{said} makes {n} stages, {_KEY}schedule={schedule!r} on {_KEY}degree={pp} ranks takes {wanted} a rank: {fix}",
            said.split("=")[0],
            f"{_KEY}schedule",
            f"{_KEY}degree",
        )
    if schedule in V_SHAPED:
        return (*range(pp), *reversed(range(pp)))
    return tuple(stage % pp for stage in range(n))


def _places(cfg: Parallelism, n_blocks: int) -> int:
    """What is dealt out to stages: the blocks, and what embedding and head stand for."""
    return n_blocks + cfg.pipeline_parallel_first_stage_less_layers + cfg.pipeline_parallel_last_stage_less_layers


def blocks_a_stage(cfg: Parallelism, n_blocks: int, n_stages: int) -> list[int]:
    """How many blocks each stage has: as equal as can be, less on the first and last. Raises ConfigError if one is left without."""
    counts = _counts(cfg, n_blocks, n_stages)
    if counts is None:
        first, last = cfg.pipeline_parallel_first_stage_less_layers, cfg.pipeline_parallel_last_stage_less_layers
        raise ConfigError(
            f"{n_blocks} blocks and {first} + {last} that the first and last stage have less ({_KEY}first_stage_less_layers, "
            f"{_KEY}last_stage_less_layers) do not fill {n_stages} stages: use at most {most_stages(cfg, n_blocks)} stages "
            f"({_KEY}degree, or {_KEY}layers_per_stage)",
            f"{_KEY}degree",
            f"{_KEY}layers_per_stage",
            f"{_KEY}first_stage_less_layers",
            f"{_KEY}last_stage_less_layers",
        )
    return counts


def most_stages(cfg: Parallelism, n_blocks: int) -> int:
    """The largest number of stages that `blocks_a_stage` can fill."""
    return max(n for n in range(1, n_blocks + 3) if _counts(cfg, n_blocks, n))


def _counts(cfg: Parallelism, n_blocks: int, n_stages: int) -> list[int] | None:
    each, more = divmod(_places(cfg, n_blocks), n_stages)
    counts = [each + (stage < more) for stage in range(n_stages)]
    counts[0] -= cfg.pipeline_parallel_first_stage_less_layers
    counts[-1] -= cfg.pipeline_parallel_last_stage_less_layers
    return counts if min(counts) >= 0 and all(counts[1:-1]) else None


def modules_of_stages(first: list[str], blocks: list[str], last: list[str], cfg: Parallelism, n_stages: int) -> list[set[str]]:
    """The names in each stage. Raises ConfigError where module_fqns_per_model_part is not the model cut into pieces, in order."""
    whole = [*first, *blocks, *last]
    if cfg.module_fqns_per_model_part is None:
        counts = blocks_a_stage(cfg, len(blocks), n_stages)
        ends = [sum(counts[: i + 1]) for i in range(n_stages)]
        stages = [set(blocks[end - count : end]) for end, count in zip(ends, counts)]
        stages[0] |= set(first)
        stages[-1] |= set(last)
        return stages
    key = "parallelism.module_fqns_per_model_part"
    given = [name for names in cfg.module_fqns_per_model_part for name in names]
    for name in given:
        if name not in whole:
            raise ConfigError(f"{key}: the model has no {name!r}{nearest(name, whole)}; a stage is made of {', '.join(whole)}", key)
    if given != whole:
        wrong = next((a, b) for a, b in zip([*given, None], [*whole, None]) if a != b)
        raise ConfigError(
            f"{key} must name every module once and in the order in which they run: where {_said(wrong[0])} stands, {_said(wrong[1])} is expected", key
        )
    return [set(names) for names in cfg.module_fqns_per_model_part]


def check_microbatches(cfg: Parallelism, rows: int, n_stages: int) -> None:
    """Raises ConfigError where a step's `rows` of a rank don't make microbatches that the schedule can run."""
    size, pp, schedule = cfg.pipeline_parallel_microbatch_size, cfg.pipeline_parallel_degree, cfg.pipeline_parallel_schedule
    keys = (f"{_KEY}microbatch_size", "training.local_batch_size", "training.global_batch_size")
    if size < 1 or rows % size:
        legal = [d for d in range(1, rows + 1) if rows % d == 0]
        raise ConfigError(f"{_KEY}microbatch_size={size} must divide the {rows} rows that a rank has in a step: use one of {legal}", *keys)
    n, least = rows // size, n_stages if schedule == "DualPipeV" else pp
    if n < least:
        fix = f"{_KEY}microbatch_size={rows // least}, or " if rows >= least else ""
        raise ConfigError(
            f"{_KEY}schedule={schedule!r} on {_KEY}degree={pp} needs at least {least} microbatches a step, but {rows} rows in microbatches of "
            f"{size} ({_KEY}microbatch_size) are {n}: use {fix}training.local_batch_size={least * size} or more",
            *keys,
        )
    rounds = max(1, n // pp)
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and n % rounds:
        fitting = [m for m in range(n - n % pp, n + pp + 1) if m and m % max(1, m // pp) == 0]
        raise ConfigError(
            f"{_KEY}schedule={schedule!r} takes microbatches in {rounds} rounds, one of each {_KEY}degree={pp} ranks: {n} microbatches do not "
            f"divide by {rounds}; use {' or '.join(map(str, fitting))} (training.global_batch_size)",
            *keys,
        )


def _said(name: str | None) -> str:
    return "the end" if name is None else repr(name)
