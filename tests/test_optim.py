import functools
import math

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks
from tests.runs import rows, small_config, step_of, worst_error
from titanlite.config import LRScheduler, Optimizer
from titanlite.optim import build_optimizer, lr_factor


def factors(steps: int, **settings) -> list[float]:
    """Of step 1 to `steps`."""
    return [lr_factor(step, LRScheduler(**settings), steps) for step in range(1, steps + 1)]


# The schedule


def test_warm_up_is_linear_and_ends_at_the_full_rate():
    assert factors(100, warmup_steps=10)[:10] == [s / 10 for s in range(1, 11)]


def test_without_a_decay_ratio_all_of_the_rest_decays_and_the_last_step_has_the_lowest_rate():
    found = factors(100, warmup_steps=10, min_lr_factor=0.2)
    assert found[10:] == pytest.approx([0.2 + 0.8 * (100 - s) / 90 for s in range(11, 101)], rel=1e-12)
    assert found[-1] == 0.2


def test_what_lies_between_warm_up_and_decay_is_stable():
    found = factors(100, warmup_steps=10, decay_ratio=0.3)
    assert found[9:70] == [1.0] * 61
    assert found[70:] == pytest.approx([(100 - s) / 30 for s in range(71, 101)], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    "decay_type, closed_form",
    [
        ("linear", lambda done: 1 - done),
        ("sqrt", lambda done: 1 - math.sqrt(done)),
        ("cosine", lambda done: 0.5 + 0.5 * math.cos(math.pi * done)),
    ],
)
@pytest.mark.parametrize("lowest", [0.0, 0.1])
def test_each_decay_follows_its_closed_form(decay_type, closed_form, lowest):
    found = factors(50, warmup_steps=0, decay_ratio=0.5, decay_type=decay_type, min_lr_factor=lowest)
    expected = [lowest + (1 - lowest) * closed_form((s - 25) / 25) for s in range(26, 51)]
    assert found[25:] == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_without_warm_up_the_first_step_has_the_rate_of_its_place():
    assert factors(10, warmup_steps=0) == pytest.approx([(10 - s) / 10 for s in range(1, 11)], abs=1e-12)
    assert factors(10, warmup_steps=0, decay_ratio=0.0) == [1.0] * 10


@pytest.mark.parametrize("warmup", [10, 11, 1000])
@pytest.mark.parametrize("ratio", [None, 0.0, 0.5, 1.0])
def test_a_warm_up_as_long_as_the_run_leaves_nothing_to_decay(warmup, ratio):
    assert factors(10, warmup_steps=warmup, decay_ratio=ratio) == [s / 10 for s in range(1, 11)]


def test_a_decay_ratio_of_one_decays_all_that_the_warm_up_leaves():
    assert factors(20, warmup_steps=5, decay_ratio=1.0) == factors(20, warmup_steps=5)


def test_total_steps_fixes_the_schedule_whatever_the_number_of_steps():
    whole = factors(40, warmup_steps=4, decay_ratio=0.5)
    assert factors(10, warmup_steps=4, decay_ratio=0.5, total_steps=40) == whole[:10]
    assert factors(60, warmup_steps=4, decay_ratio=0.5, total_steps=40, min_lr_factor=0.25)[39:] == [0.25] * 21


@pytest.mark.parametrize("settings", [{"decay_ratio": 0.0, "warmup_steps": 2}, {"warmup_steps": 10}])
def test_a_schedule_without_decay_goes_on_at_the_full_rate_after_its_end(settings):
    assert factors(20, total_steps=10, **settings)[10:] == [1.0] * 10


# The optimizer


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_the_optimizer_has_the_settings_given_and_leaves_out_what_is_frozen(implementation):
    part = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    part[0].requires_grad_(False)
    cfg = Optimizer(lr=0.5, beta1=0.6, beta2=0.7, eps=0.25, weight_decay=0.125, implementation=implementation)
    optimizer = build_optimizer([part], cfg)
    (group,) = optimizer.param_groups
    assert group["params"] == list(part[1].parameters())
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.5, (0.6, 0.7), 0.25, 0.125)
    chosen = {name for name in ("foreach", "fused") if group[name]}
    assert chosen == {implementation} - {"for-loop"}


# The global norm


ROWS, MAX_NORM = 4, 0.125
LAYOUTS = {
    "one rank": (1, ()),
    "fsdp 2": (2, ()),
    "replicate 2": (2, ("--parallelism.data_parallel_replicate_degree", "2")),
    "hsdp 2x2": (4, ("--parallelism.data_parallel_replicate_degree", "2")),
}
TIES = {"untied": (), "tied": ("--model.tie_embeddings", "true")}


def _steps(cases: dict) -> dict:
    return {name: step_of(cfg, rows("packed", ROWS)) for name, cfg in cases.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("optim")


@functools.cache  # one gang a layout
def ranks_of(layout: str, folder) -> list[dict]:
    world_size, options = LAYOUTS[layout]
    size = ("--training.local_batch_size", str(ROWS // world_size))
    cases = {
        (tie, max_norm): small_config(folder, *size, *options, *TIES[tie], "--training.max_norm", str(max_norm))
        for tie in TIES
        for max_norm in (0.0, MAX_NORM, 1e9, math.inf)
    }
    return run_ranks(_steps, world_size, cases)


def clipped_by_torch(gradients: dict, max_norm: float) -> tuple[float, dict]:
    parameters = {name: nn.Parameter(torch.empty(g.shape, dtype=torch.float64)) for name, g in gradients.items()}
    for name, p in parameters.items():
        p.grad = torch.from_numpy(gradients[name].copy())
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), max_norm)
    return norm.item(), {name: p.grad.numpy() for name, p in parameters.items()}


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_clipping_is_torchs_on_the_whole_gradients_of_one_rank(folder, layout, tie):
    """Tied embeddings, and a vocabulary of 257 that no layout divides evenly, count once."""
    whole = ranks_of("one rank", folder)[0][tie, 0.0]["gradients"]
    norm, expected = clipped_by_torch(whole, MAX_NORM)
    assert norm > 2 * MAX_NORM
    for rank in ranks_of(layout, folder):
        assert rank[tie, MAX_NORM]["norm"] == pytest.approx(norm, rel=1e-12)  # fp64, before clipping
        # torch divides by norm + 1e-6; the factor that is meant is exact.
        assert worst_error(rank[tie, MAX_NORM]["gradients"], expected) < 1.01e-6 / norm
        exact = {name: g * (MAX_NORM / norm) for name, g in whole.items()}
        assert worst_error(rank[tie, MAX_NORM]["gradients"], exact) < 1e-12


@pytest.mark.parametrize("max_norm", [0.0, 1e9, math.inf])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_below_the_norm_are_left_alone_and_0_never_clips(folder, layout, max_norm):
    whole = ranks_of("one rank", folder)[0]["untied", 0.0]
    for rank in ranks_of(layout, folder):
        assert rank["untied", max_norm]["norm"] == pytest.approx(whole["norm"], rel=1e-12)
        assert worst_error(rank["untied", max_norm]["gradients"], whole["gradients"]) < 1e-12
