"""Which modules lie in which stage on which rank, and what is refused."""

import dataclasses

import pytest

from titanlite.config import Config, override
from titanlite.parallel.stages import blocks_a_stage, modules_of_stages, most_stages, stage_ranks
from titanlite.utils import ConfigError
from titanlite.validate import validate

PIPELINE = Config().parallelism


def pipeline(**values):
    names = {f.name for f in dataclasses.fields(PIPELINE)}
    return dataclasses.replace(PIPELINE, **{k if k in names else f"pipeline_parallel_{k}": v for k, v in values.items()})


@pytest.mark.parametrize(
    "values, n_blocks, ranks",
    [
        ({"degree": 4}, 8, (0, 1, 2, 3)),
        ({"degree": 2, "schedule": "Interleaved1F1B"}, 8, (0, 1, 0, 1)),
        ({"degree": 2, "schedule": "LoopedBFS", "layers_per_stage": 1}, 4, (0, 1, 0, 1, 0, 1)),
        ({"degree": 3, "schedule": "ZBVZeroBubble"}, 8, (0, 1, 2, 2, 1, 0)),
        ({"degree": 2, "schedule": "DualPipeV"}, 8, (0, 1, 1, 0)),
    ],
)
def test_stages_go_round_the_ranks_or_forth_and_back(values, n_blocks, ranks):
    assert stage_ranks(pipeline(**values), n_blocks) == ranks


@pytest.mark.parametrize(
    "n_blocks, n_stages, less, counts",
    [
        (4, 2, (1, 1), [2, 2]),
        (4, 4, (1, 1), [1, 2, 1, 0]),
        (126, 16, (1, 1), [7] + [8] * 14 + [7]),  # Llama 405B
        (6, 2, (0, 0), [3, 3]),
        (7, 3, (2, 0), [1, 3, 3]),
        (8, 2, (0, 2), [5, 3]),
    ],
)
def test_blocks_are_dealt_out_evenly_with_less_on_the_first_and_last_stage(n_blocks, n_stages, less, counts):
    cfg = pipeline(first_stage_less_layers=less[0], last_stage_less_layers=less[1])
    assert blocks_a_stage(cfg, n_blocks, n_stages) == counts
    assert sum(counts) == n_blocks


@pytest.mark.parametrize("n_blocks", range(1, 12))
@pytest.mark.parametrize("less", [(0, 0), (1, 1), (2, 1), (0, 3)])
def test_what_is_said_to_be_the_most_stages_is(n_blocks, less):
    cfg = pipeline(first_stage_less_layers=less[0], last_stage_less_layers=less[1])
    most = most_stages(cfg, n_blocks)
    if most > 1:
        assert sum(blocks_a_stage(cfg, n_blocks, most)) == n_blocks
    with pytest.raises(ConfigError, match=f"use at most {most} stages"):
        blocks_a_stage(cfg, n_blocks, most + 1)


def test_a_stage_has_what_comes_before_and_after_the_blocks_where_it_is_first_or_last():
    stages = modules_of_stages(["embed"], ["b.0", "b.1", "b.2"], ["norm", "head"], pipeline(degree=2), 2)
    assert stages == [{"embed", "b.0", "b.1"}, {"b.2", "norm", "head"}]


def test_stages_may_be_given_by_name():
    cfg = pipeline(degree=2, module_fqns_per_model_part=(("embed",), ("b.0", "b.1", "norm", "head")))
    assert stage_ranks(cfg, 2) == (0, 1)
    assert modules_of_stages(["embed"], ["b.0", "b.1"], ["norm", "head"], cfg, 2) == [{"embed"}, {"b.0", "b.1", "norm", "head"}]


BASE = {
    "activation_checkpoint.mode": "none",
    "parallelism.pipeline_parallel_degree": 2,
}
LAYERS = ("tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3", "norm", "output")


@pytest.mark.parametrize(
    "world_size, values, message",
    [
        (3, {}, "pipeline_parallel_degree=2 must divide the world size 3: use one of [1, 3]"),
        (8, {"degree": 8}, "4 blocks and 1 + 1 that the first and last stage have less"),
        (8, {"degree": 8}, "do not fill 8 stages: use at most 6 stages"),
        (2, {"schedule": "ZBVZeroBubble", "layers_per_stage": 1},
         "pipeline_parallel_layers_per_stage=1 makes 6 stages, parallelism.pipeline_parallel_schedule='ZBVZeroBubble' on "
         "parallelism.pipeline_parallel_degree=2 ranks takes two stages a rank: leave it out"),
        (2, {"layers_per_stage": 2}, "takes one stage a rank: use 3, 4, 5, or leave it out"),
        (2, {"schedule": "Interleaved1F1B", "layers_per_stage": 6}, "makes 1 stages"),
        (2, {"microbatch_size": 3}, "pipeline_parallel_microbatch_size=3 must divide the 8 rows that a rank has in a step: use one of [1, 2, 4, 8]"),
        (2, {"microbatch_size": 0}, "pipeline_parallel_microbatch_size=0 must divide the 8 rows"),
        (2, {"microbatch_size": 8}, "needs at least 2 microbatches a step, but 8 rows in microbatches of 8 "
         "(parallelism.pipeline_parallel_microbatch_size) are 1: use parallelism.pipeline_parallel_microbatch_size=4, or "
         "training.local_batch_size=16 or more"),
        (2, {"schedule": "DualPipeV", "microbatch_size": 4}, "needs at least 4 microbatches a step"),
        (2, {"schedule": "Interleaved1F1B", "training.local_batch_size": 5}, "takes microbatches in 2 rounds, one of each "
         "parallelism.pipeline_parallel_degree=2 ranks: 5 microbatches do not divide by 2; use 4 or 6"),
        (2, {"module_fqns_per_model_part": (LAYERS[:2], LAYERS[2:-1] + ("outputs",))}, "the model has no 'outputs'; did you mean 'output'?"),
        (2, {"module_fqns_per_model_part": (LAYERS[:2], LAYERS[3:])}, "in the order in which they run: where 'layers.2' stands, 'layers.1' is expected"),
        (2, {"module_fqns_per_model_part": (LAYERS[:2], LAYERS[2:-1])}, "where the end stands, 'output' is expected"),
        (2, {"module_fqns_per_model_part": (LAYERS[:2], LAYERS[2:4], LAYERS[4:])}, "module_fqns_per_model_part makes 3 stages"),
        (4, {"schedule": "ZBVZeroBubble", "parallelism.fsdp_reshard_after_forward": "always"}, "between which parameters must stay gathered"),
        (2, {"schedule": "InterleavedZeroBubble", "compile.enable": True}, "which compiled blocks cannot: use compile.enable=false"),
        (2, {"schedule": "DualPipeV", "activation_checkpoint.mode": "selective"}, "use 'none', or parallelism.pipeline_parallel_force_recompute=true"),
        (2, {"schedule_csv": "nowhere.csv"}, "pipeline_parallel_schedule_csv='nowhere.csv' is not a schedule: [Errno 2] No such file"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_answered_with_the_arithmetic_and_what_is_legal(world_size, values, message):
    keys = {key if "." in key else f"parallelism.{key}" if key.startswith("module") else f"parallelism.pipeline_parallel_{key}": v for key, v in values.items()}
    with pytest.raises(ConfigError) as error:
        validate(override(Config(), BASE | keys), world_size)
    assert message in str(error.value)
    assert error.value.keys


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "is not a schedule: it has no action"),
        ("hello,world\n", "is not a schedule:"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", None),
        ("0F0,0F1,0B0,0B1\n", "has 1 ranks: set parallelism.pipeline_parallel_degree=1, it is 2"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n", "is not a schedule:"),  # a backward is missing
        ("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n", "is not a schedule:"),  # each rank waits for the other
        ("0F1,0F0,0B1,0B0\n1F1,1F0,1B1,1B0\n", "the last stage runs forward in the order [1, 0]: microbatches must ascend there"),
        ("0F0,0B0\n1F0,1B0\n", "has 1 microbatches, of parallelism.pipeline_parallel_microbatch_size=4 rows each: "
         "training.local_batch_size must give a rank 4 rows a step, it gives 8"),
    ],
)  # fmt: skip
def test_a_csv_file_is_read_as_a_schedule_or_refused(tmp_path, text, message):
    (tmp_path / "schedule.csv").write_text(text)
    values = {"parallelism.pipeline_parallel_schedule_csv": str(tmp_path / "schedule.csv"), "parallelism.pipeline_parallel_microbatch_size": 4}
    cfg = override(Config(), BASE | values)
    if message is None:
        assert validate(cfg, 2).pp == 2
        return
    with pytest.raises(ConfigError) as error:
        validate(cfg, 2)
    assert message in str(error.value)


def test_recompute_under_a_split_backward_may_be_forced():
    values = {"parallelism.pipeline_parallel_schedule": "ZBVZeroBubble", "activation_checkpoint.mode": "full"}
    assert validate(override(Config(), BASE | values | {"parallelism.pipeline_parallel_force_recompute": True}), 2).pp == 2
