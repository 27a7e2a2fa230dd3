"""How a row's sequence is dealt to context-parallel ranks; what they compute is `verify`'s to say."""

import pytest
import torch
from torch.nn.attention import flex_attention

from tests.ranks import run_ranks
from tests.runs import rows, small_config, step_of, worst_error
from titanlite import trainer
from titanlite.config import Config, Parallelism
from titanlite.parallel.context import _in_rank_order, _in_row_order, _whole, sequence_index
from titanlite.parallel.degrees import resolve_degrees
from titanlite.trainer import join


def _index(cfg: Config, seq_len: int) -> list[int]:
    return sequence_index(seq_len, join(cfg), cfg.parallelism).tolist()


@pytest.mark.parametrize("balancer", ["headtail", "none"])
@pytest.mark.parametrize("cp", [2, 4])
def test_every_token_of_a_row_goes_to_one_rank(cp, balancer):
    cfg = Config(parallelism=Parallelism(context_parallel_degree=cp, context_parallel_load_balancer=balancer))
    parts = run_ranks(_index, cp, cfg, 32)
    assert sorted(sum(parts, [])) == list(range(32))
    assert {len(part) for part in parts} == {32 // cp}


def test_head_and_tail_give_every_rank_as_many_keys():
    cfg = Config(parallelism=Parallelism(context_parallel_degree=4))
    keys = [sum(i + 1 for i in part) for part in run_ranks(_index, 4, cfg, 32)]
    assert len(set(keys)) == 1 and sum(keys) == torch.arange(1, 33).sum()


def _flex_step(cfg, batch):
    """FlexAttention, whose backward PyTorch refuses on CPU but can compute there when it is not compiled."""
    flex_attention._validate_device = lambda *_: None
    trainer.validate = lambda cfg, world_size: resolve_degrees(cfg.parallelism, world_size)
    return step_of(cfg, batch)


@pytest.mark.parametrize("kind", ["even", "packed"])
@pytest.mark.parametrize("options", [(), ("--parallelism.context_parallel_degree", "2"), ("--parallelism.context_parallel_degree", "2", "--parallelism.context_parallel_method", "ulysses")])
def test_flex_attention_gives_the_gradients_of_one_rank_with_masks_whole(tmp_path, kind, options):
    batch = rows(kind, 4)
    (expected,) = run_ranks(step_of, 1, small_config(tmp_path), batch)
    for ours in run_ranks(_flex_step, 2 if options else 1, small_config(tmp_path, "--model.attention", "flex", *options), batch):
        assert worst_error(ours["gradients"], expected["gradients"]) < 1e-12  # fp64, sums in another order
        assert abs(ours["loss"] / expected["loss"] - 1) < 1e-12


def _orders(cfg, seq_len):
    mesh = join(cfg)
    cp = mesh.data["cp"]
    headtail = cfg.parallelism.context_parallel_load_balancer == "headtail"
    row = torch.arange(seq_len).repeat(2, 1)
    gathered = _whole(cp, row[:, sequence_index(seq_len, mesh, cfg.parallelism)])
    back = _in_rank_order(cp, headtail, _in_row_order(cp, headtail, gathered))
    return _in_row_order(cp, headtail, gathered).tolist() == row.tolist() and back.tolist() == gathered.tolist()


@pytest.mark.parametrize("balancer", ["headtail", "none"])
@pytest.mark.parametrize("cp", [2, 4])
def test_gathered_parts_are_put_back_into_the_order_of_the_row(cp, balancer):
    cfg = Config(parallelism=Parallelism(context_parallel_degree=cp, context_parallel_load_balancer=balancer))
    assert run_ranks(_orders, cp, cfg, 32) == [True] * cp


@pytest.mark.parametrize("method", ["allgather", "ring", "ulysses"])
def test_rows_of_one_document_whose_masks_are_left_out_give_the_gradients_of_one_rank(tmp_path, method):
    batch = rows("even", 4)
    (expected,) = run_ranks(step_of, 1, small_config(tmp_path), batch)
    cp = ("--parallelism.context_parallel_degree", "2", "--parallelism.context_parallel_method", method)
    for ours in run_ranks(step_of, 2, small_config(tmp_path, *cp), batch):
        assert worst_error(ours["gradients"], expected["gradients"]) < 1e-12  # fp64, sums in another order
