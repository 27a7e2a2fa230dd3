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


def _one_step(cfg) -> dict:
    found = step_of(cfg, rows("packed", ROWS))
    return {"norm": found["norm"], "gradients": found["gradients"]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """{tie: norm and unclipped gradients of one rank}."""
    folder = tmp_path_factory.mktemp("whole")
    options = ("--training.local_batch_size", str(ROWS))
    return {tie: run_ranks(_one_step, 1, small_config(folder, *options, *words))[0] for tie, words in TIES.items()}


def clipped_by_torch(gradients: dict, max_norm: float) -> tuple[float, dict]:
    parameters = {name: nn.Parameter(torch.empty(g.shape, dtype=torch.float64)) for name, g in gradients.items()}
    for name, p in parameters.items():
        p.grad = torch.from_numpy(gradients[name].copy())
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), max_norm)
    return norm.item(), {name: p.grad.numpy() for name, p in parameters.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_clipping_is_torchs_on_the_whole_gradients_of_one_rank(whole, layout, tmp_path):
    """Tied embeddings, and a vocabulary of 257 that no layout divides evenly, count once."""
    world_size, options = LAYOUTS[layout]
    options = ("--training.local_batch_size", str(ROWS // world_size), "--training.max_norm", str(MAX_NORM), *options)
    cases = {tie: (small_config(tmp_path, *options, *words), whole[tie]["gradients"]) for tie, words in TIES.items()}

    def compare() -> dict:
        results = {}
        for tie, (cfg, gradients) in cases.items():
            norm, expected = clipped_by_torch(gradients, MAX_NORM)
            exact = {name: g * (MAX_NORM / norm) for name, g in gradients.items()}
            found = _one_step(cfg)
            errors = worst_error(found["gradients"], expected), worst_error(found["gradients"], exact)
            results[tie] = norm, found["norm"], *errors
        return results

    for rank in run_ranks(compare, world_size):
        for norm, found, from_torch, from_exact in rank.values():
            assert norm > 2 * MAX_NORM
            assert found == pytest.approx(norm, rel=1e-12)  # fp64, before clipping
            # torch divides by norm + 1e-6; the factor that is meant is exact.
            assert from_torch < 1.01e-6 / norm and from_exact < 1e-12


def test_gradients_below_the_norm_are_left_alone_and_0_never_clips(whole, tmp_path):
    options = ("--training.local_batch_size", str(ROWS // 2), "--training.max_norm")
    cases = [small_config(tmp_path, *options, max_norm) for max_norm in ("0", "1e9", "inf")]
    expected = whole["untied"]

    def compare() -> list:
        found = [_one_step(cfg) for cfg in cases]
        return [(f["norm"], worst_error(f["gradients"], expected["gradients"])) for f in found]

    for rank in run_ranks(compare, 2):
        for norm, error in rank:
            assert norm == pytest.approx(expected["norm"], rel=1e-12) and error < 1e-12
