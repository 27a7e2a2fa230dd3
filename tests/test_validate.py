import math
from dataclasses import replace

import pytest

from titanlite.config import Config, DataSource, override
from titanlite.models import get_plan
from titanlite.parallel.degrees import Degrees
from titanlite.utils import ConfigError
from titanlite.validate import global_batch_size, validate


def mistake(world_size: int = 1, **values) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        validate(with_values(**values), world_size)
    return caught.value


def with_values(**values) -> Config:
    return override(Config(), {key.replace("__", "."): value for key, value in values.items()})


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_the_defaults_are_legal_on_any_number_of_ranks(world_size):
    degrees = validate(Config(), world_size)
    assert (degrees.dp_shard, degrees.batch, degrees.fsdp) == (world_size, world_size, world_size)


def test_minus_one_takes_the_ranks_that_are_left():
    cfg = with_values(parallelism__data_parallel_replicate_degree=2, parallelism__tensor_parallel_degree=2)
    assert validate(cfg, 8) == Degrees(pp=1, dp_replicate=2, dp_shard=2, cp=1, tp=2)


@pytest.mark.parametrize(
    "world_size, values, message",
    [
        (4, {"data_parallel_replicate_degree": 3}, "parallelism.data_parallel_replicate_degree=3 must divide the world size 4: use one of [1, 2, 4]"),
        (4, {"data_parallel_replicate_degree": 0}, "parallelism.data_parallel_replicate_degree=0 must be at least 1"),
        (4, {"data_parallel_shard_degree": 0}, "parallelism.data_parallel_shard_degree=0 must be at least 1, or -1 for all ranks that are left"),
        (4, {"data_parallel_shard_degree": 3}, "parallelism.data_parallel_shard_degree=3 = 3 ranks, but the world size is 4: "
         "launch 3 processes, or set parallelism.data_parallel_shard_degree=-1 for all that are left"),
        (4, {"data_parallel_shard_degree": 4, "tensor_parallel_degree": 2}, "parallelism.tensor_parallel_degree=2 * "
         "parallelism.data_parallel_shard_degree=4 = 8 ranks, but the world size is 4: launch 8 processes, or set "
         "parallelism.data_parallel_shard_degree=-1 for all that are left"),
        (4, {"tensor_parallel_degree": 3}, "parallelism.tensor_parallel_degree=3 must divide the world size 4: use one of [1, 2, 4]"),
        (3, {"tensor_parallel_degree": 3}, "parallelism.tensor_parallel_degree=3 must divide llama3 debugmodel's hidden_dim=352: use one of "
         "[1, 2, 4, 8, 11, 16, 22, 32, 44, 88, 176, 352]"),
        (6, {"tensor_parallel_degree": 2, "data_parallel_replicate_degree": 2}, "parallelism.data_parallel_replicate_degree=2 * "
         "parallelism.tensor_parallel_degree=2 = 4 must divide the world size 6"),
    ],
)  # fmt: skip
def test_degrees_that_do_not_fit_are_answered_with_the_arithmetic_and_what_is_legal(world_size, values, message):
    error = mistake(world_size, **{f"parallelism__{key}": value for key, value in values.items()})
    assert str(error) == message and error.keys and set(error.keys) <= {f"parallelism.{key}" for key in vars(Config().parallelism)}


def test_heads_need_not_divide_unless_a_plan_does_not_say_how_many_there_are(monkeypatch):
    assert validate(with_values(parallelism__tensor_parallel_degree=4), 4).tp == 4
    monkeypatch.setattr("titanlite.validate.get_plan", lambda cfg: replace(get_plan(cfg), heads=()))
    assert "tensor_parallel_degree=4 must divide llama3 debugmodel's n_kv_heads=2: use one of [1, 2]" in str(mistake(4, parallelism__tensor_parallel_degree=4))


@pytest.mark.parametrize("seq_len, legal", [(33, "32 or 34"), (1, "2")])
@pytest.mark.parametrize("section", ["training", "validation"])
def test_a_sequence_that_tensor_parallel_cannot_split_is_answered_with_the_nearest_lengths(section, seq_len, legal):
    values = {"parallelism__tensor_parallel_degree": 2, f"{section}__seq_len": seq_len, "validation__enable": True}
    error = mistake(2, **values)
    assert str(error) == f"{section}.seq_len={seq_len} must divide by parallelism.tensor_parallel_degree=2: use {legal}"
    assert {f"{section}.seq_len", "parallelism.tensor_parallel_degree"} <= set(error.keys)


@pytest.mark.parametrize("rows, legal", [(12, "8 or 16"), (7, "8"), (0, "8"), (-2, "8")])
def test_a_global_batch_that_does_not_divide_is_answered_with_the_nearest_sizes(rows, legal):
    error = mistake(2, training__global_batch_size=rows, training__local_batch_size=4)
    assert str(error) == (
        f"training.global_batch_size={rows} must divide by training.local_batch_size=4 * 2 data-parallel ranks = 8: "
        f"use {legal}, or -1 for 8"
    )


@pytest.mark.parametrize("given, rows", [(-1, 8), (8, 8), (24, 24)])
def test_the_global_batch_is_that_given_or_one_microbatch_a_rank(given, rows):
    cfg = with_values(training__global_batch_size=given, training__local_batch_size=4)
    assert global_batch_size(cfg, validate(cfg, 2)) == rows


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("training.seq_len", 0, "must be at least 1"),
        ("training.local_batch_size", 0, "must be at least 1"),
        ("training.steps", 0, "must be at least 1"),
        ("training.max_norm", -1.0, "must be at least 0"),
        ("training.max_norm", math.nan, "must be at least 0"),
        ("optimizer.lr", math.nan, "must be at least 0"),
        ("optimizer.lr", math.inf, "must be finite"),
        ("optimizer.eps", -1e-8, "must be at least 0"),
        ("optimizer.beta1", 1.0, "must be in [0, 1)"),
        ("optimizer.beta2", math.nan, "must be in [0, 1)"),
        ("lr_scheduler.decay_ratio", 1.5, "expected a share from 0 to 1"),
        ("lr_scheduler.decay_ratio", math.nan, "expected a share from 0 to 1"),
        ("lr_scheduler.total_steps", 0, "must be at least 1"),
        ("validation.freq", 0, "must be at least 1"),
        ("checkpoint.interval", 0, "must be at least 1"),
        ("checkpoint.load_step", -2, "must be at least -1"),
        ("metrics.log_freq", 0, "must be at least 1"),
        ("debug.seed", -1, "must be at least 0"),
        ("training.dataloader.num_workers", -1, "must be at least 0"),
        ("training.dataloader.prefetch_factor", 0, "must be at least 1"),
    ],
)
def test_a_value_out_of_range_is_answered_with_the_range(key, value, message):
    error = mistake(**{key.replace(".", "__"): value})
    assert str(error) == f"{key}={value}: {message}" and error.keys == (key,)


def test_no_clipping_may_be_said_as_an_infinite_norm():
    validate(with_values(training__max_norm=math.inf), 1)


def test_a_step_to_load_without_checkpoints_is_refused():
    assert str(mistake(checkpoint__load_step=3)) == "checkpoint.load_step=3 needs checkpoint.enable=true"


@pytest.mark.parametrize("option", ["0", "-1", "two", "", "²"])
def test_selective_recompute_takes_op_or_a_number(option):
    error = mistake(activation_checkpoint__selective_ac_option=option)
    assert str(error).startswith(f"activation_checkpoint.selective_ac_option={option!r}: expected 'op' or a number N")


def test_a_forward_pass_wider_than_the_parameters_is_refused():
    error = mistake(training__dtype="bfloat16", training__mixed_precision_param="float32")
    assert "training.mixed_precision_param='float32' is wider than training.dtype='bfloat16'" in str(error)


def test_steps_after_a_schedule_that_ends_at_rate_0_are_refused_and_after_another_allowed():
    error = mistake(lr_scheduler__total_steps=10, training__steps=12)
    assert str(error).startswith("lr_scheduler.total_steps=10 ends the schedule at learning rate 0, before training.steps=12")
    for values in ({"min_lr_factor": 0.1}, {"decay_ratio": 0.0}, {"total_steps": 12}):
        options = {"total_steps": 10} | values
        validate(with_values(training__steps=12, **{f"lr_scheduler__{key}": value for key, value in options.items()}), 1)


@pytest.mark.parametrize(
    "world_size, values, message",
    [
        (2, {"expert_parallel_degree": 2}, "expert_parallel_degree=2, parallelism.expert_tensor_parallel_degree=1: llama3 debugmodel has no experts"),
        (2, {"expert_parallel_degree": 0}, "expert_parallel_degree=0 must be at least 1"),
        (6, {"expert_parallel_degree": 4}, "must divide the 6 ranks of parallelism.data_parallel_shard_degree"),
        (4, {"expert_parallel_degree": 4, "data_parallel_replicate_degree": 2}, "use parallelism.expert_parallel_degree of [1, 2]"),
        (3, {"model": "qwen3_moe", "expert_parallel_degree": 3}, "expert_parallel_degree=3 must divide the 8 experts of qwen3_moe debugmodel: use one of [1, 2, 4, 8]"),
        (5, {"model": "qwen3_moe", "expert_tensor_parallel_degree": 5}, "must divide the 48 of an expert's width of qwen3_moe debugmodel"),
    ],
)
def test_experts_that_cannot_be_spread_are_refused_with_what_can(world_size, values, message):
    values = dict(values)
    name = values.pop("model", "llama3")
    assert message in str(mistake(world_size, model__name=name, **{f"parallelism__{key}": value for key, value in values.items()}))


def test_flex_attention_is_refused_where_it_has_no_backward_and_in_the_ring(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "model.attention='flex' needs CUDA devices" in str(mistake(model__attention="flex"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    ring = {"parallelism__context_parallel_degree": 2, "parallelism__context_parallel_method": "ring", "model__attention": "flex"}
    assert "has attention kernels of its own: use model.attention='sdpa'" in str(mistake(2, **ring))


TWO = (DataSource("text", "a"), DataSource("text", "b"))


@pytest.mark.parametrize(
    "values, message",
    [
        ({"data__sources": TWO, "training__dataset_path": "c"}, "training.dataset='stdlib' and training.dataset_path='c' are the short form of one [[data.sources]] entry, and 2 are given"),
        ({"data__sources": TWO, "training__dataset": "text"}, "training.dataset='text' and training.dataset_path=None are the short form"),
        ({"data__sources": (TWO[0], DataSource("text", "b", weight=0.0))}, "data.sources[1].weight=0.0: must be above 0 and finite"),
        ({"data__sources": (DataSource("text", "b", weight=math.nan),)}, "data.sources[0].weight=nan: must be above 0"),
        ({"data__sources": TWO, "data__epochs": 1}, "data.epochs=1 with 2 data.sources: sources of other weights than sizes end at different times"),
        ({"training__dataset": "hf_stream", "data__epochs": 1}, "data.epochs=1: the end of a stream is not known"),
        ({"training__dataset": "c4", "data__epochs": 1}, "data.epochs=1: the end of a stream is not known"),
        ({"validation__enable": True, "validation__dataset": "c4_validation"}, "validation.dataset=c4_validation is a stream, whose end is not known: set validation.steps"),
        ({"data__epochs": 0}, "data.epochs=0: must be at least 1"),
    ],
)  # fmt: skip
def test_data_that_contradict_each_other_are_refused(values, message):
    assert str(mistake(**values)).startswith(message)
