"""Large layouts, a rank at a time, on a fake process group: what a rank holds follows from the degrees, and a step's shapes fit."""

import logging
import multiprocessing

import pytest
import torch

from benchmarks.scale import fake_rank, fake_step, measure
from titanlite.config import Config, override
from titanlite.models.llama.model import FLAVORS
from titanlite.parallel.data_parallel import padding_of


def in_a_process(fn, *args):
    """DTensor remembers the meshes of worlds that are gone: each world needs a process."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply_async(fn, args).get(120)


def config(flavor: str, seq_len: int = 8192, rows: int = 8, **degrees: int) -> Config:
    values = {f"parallelism.{axis}_degree": n for axis, n in degrees.items()}
    sizes = {"model.flavor": flavor, "training.seq_len": seq_len, "training.local_batch_size": rows, "activation_checkpoint.mode": "full"}
    return override(Config(), sizes | values)


TP, PP, CP, REPLICAS, WORLD = 8, 4, 2, 4, 2048
FSDP = WORLD // (TP * PP * REPLICAS)  # over data-parallel shards and context parallel


@pytest.mark.parametrize("rank, stage, blocks", [(0, 0, 4), (WORLD // 2, 2, 4), (WORLD - 1, 3, 3)])
def test_first_middle_and_last_stage_of_a_1b_on_2048_ranks_hold_their_shards_and_step(rank, stage, blocks):
    cfg = config("1B", tensor_parallel=TP, pipeline_parallel=PP, context_parallel=CP, data_parallel_replicate=REPLICAS, rows=PP)
    found = in_a_process(measure, cfg, WORLD, rank)
    args, shapes = FLAVORS["1B"], found["shapes"]
    assert found["stages"] == [stage]
    assert len({name.split(".")[1] for name in shapes if name.startswith("layers.")}) == blocks
    first = next(name.rsplit(".attention", 1)[0] for name in shapes if "attention.wq" in name)
    head_dim, kv = args.dim // args.n_heads, args.n_kv_heads
    assert shapes[f"{first}.attention.wq.weight"] == [args.dim // TP // FSDP, args.dim]
    assert shapes[f"{first}.attention.wk.weight"] == [-(-kv * head_dim // TP // FSDP), args.dim]
    assert shapes[f"{first}.attention.wo.weight"] == [args.dim // FSDP, args.dim // TP]
    assert shapes[f"{first}.feed_forward.w2.weight"] == [args.dim // FSDP, args.hidden_dim // TP]
    assert shapes[f"{first}.ffn_norm.weight"] == [args.dim // FSDP]
    assert ("tok_embeddings.weight" in shapes) == (stage == 0) and ("output.weight" in shapes) == (stage == PP - 1)
    if stage == 0:
        assert shapes["tok_embeddings.weight"] == [args.vocab_size // TP // FSDP, args.dim]


def _attended(cfg: Config, world_size: int) -> tuple:
    """Shapes of queries and keys in the first block's attention."""
    seen = []
    with fake_rank(cfg, world_size, 0) as (parts, mesh):
        core = parts[0].layers["0"].attention.core
        core.register_forward_pre_hook(lambda _, inputs: seen.append([tuple(x.shape) for x in inputs[:2]]))
        fake_step(parts, mesh, cfg)
    return seen[0]


@pytest.mark.parametrize("method, cp", [("allgather", 32), ("ulysses", 4)])
def test_a_million_tokens_step_and_a_rank_sees_its_part_of_them_and_its_heads(method, cp):
    cfg = override(config("1B", 2**20, 1, tensor_parallel=2, context_parallel=cp), {"parallelism.context_parallel_method": method})
    queries, keys = in_a_process(_attended, cfg, 64)
    assert queries == (1, 2**20 // cp, 32 // 2, 64) and keys == (1, 2**20 // cp, 8 // 2, 64)


def _warnings(cfg: Config, world_size: int) -> list[str]:
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("titanlite").addHandler(handler)
    with fake_rank(cfg, world_size, 0):
        return [text for text in said if text.startswith("padding=")]


def test_shards_so_many_that_padding_inflates_are_told_with_the_split_that_cures_it():
    """8B with tensor parallel 8: wk and wv, 4 % of a block, have 128 rows a rank; 512 shards would quadruple them and 1,792 rows of w1
    would become 2,048."""
    (warning,) = in_a_process(_warnings, config("8B", rows=1, tensor_parallel=8), 4096)
    assert "over 512 ranks" in warning
    assert "parallelism.data_parallel_shard_degree=256 and parallelism.data_parallel_replicate_degree=2 cures it" in warning
    cured = config("8B", rows=1, tensor_parallel=8, data_parallel_shard=256, data_parallel_replicate=2)
    assert in_a_process(_warnings, cured, 4096) == []


def test_padding_is_what_equal_pieces_take_over_what_there_is():
    assert padding_of([torch.Size([6, 10])], 4) == 8 / 6
    assert padding_of([torch.Size([8, 10]), torch.Size([1])], 4) == (80 + 4) / 81
