"""How a row's sequence is dealt to context-parallel ranks; what they compute is `verify`'s to say."""

import pytest
import torch

from tests.ranks import run_ranks
from titanlite.config import Config, Parallelism
from titanlite.parallel.context import sequence_index
from titanlite.trainer import join


def _index(cfg: Config, seq_len: int) -> list[int]:
    return sequence_index(seq_len, join(cfg), cfg.parallelism).tolist()


@pytest.mark.parametrize("balancer", ["headtail", None])
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
