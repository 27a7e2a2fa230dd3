"""Data parallel, recompute and compile against one rank on the same global batch: loss, norm and every gradient."""

import functools

import pytest

from tests.ranks import run_ranks
from tests.runs import rows, small_config, step_of, worst_error

ROWS = 16
FP32 = ("--training.dtype", "float32", "--training.mixed_precision_param", "float32")
LAYOUTS = {
    "one rank": (1, ()),
    "replicate 2": (2, ("--parallelism.data_parallel_replicate_degree", "2")),
    "fsdp 2": (2, ()),
    "hsdp 2x2": (4, ("--parallelism.data_parallel_replicate_degree", "2")),
}
# fp64: sums of a few thousand terms in another order differ by about 1e-15 of the largest; 1e-12 leaves room for
# cancellation and none for a missing or doubled term. fp32: 5e-6 is 40 ulp, the same margin in that format's terms
# for sums over 512 tokens.
TOLERANCE = {"float64": 1e-12, "float32": 5e-6}


KINDS, ACCUMULATIONS, DTYPES = ("even", "padded", "packed"), (1, 4), {"float64": (), "float32": FP32}


def _steps(cases: dict) -> dict:
    results = {name: step_of(cfg, rows(kind, ROWS)) for name, (cfg, kind) in cases.items()}
    for result in results.values():
        del result["parameters"]
    return results


def _results_of(layout: str, folder) -> list[dict]:
    """A result for each case, of each rank. One gang runs all cases of a layout: starting one costs more than a step."""
    ranks, options = LAYOUTS[layout]
    cases = {
        (accumulation, kind, dtype): (
            small_config(folder, "--training.local_batch_size", str(ROWS // ranks // accumulation), *options, *DTYPES[dtype]),
            kind,
        )
        for accumulation in ACCUMULATIONS
        for kind in KINDS
        for dtype in DTYPES
    }
    return run_ranks(_steps, ranks, cases)


@functools.cache
def reference(folder) -> dict:
    (results,) = _results_of("one rank", folder)
    return {(kind, dtype): results[1, kind, dtype] for kind in KINDS for dtype in DTYPES}


@functools.cache  # errors only: gradients of every rank and case would make this process, and so each fork of it, large
def errors_of(layout: str, folder) -> dict:
    results = _results_of(layout, folder)
    return {case: max(error(rank[case], reference(folder)[case[1:]]) for rank in results) for case in results[0]}


def error(result: dict, expected: dict) -> float:
    """The largest relative error of loss, norm and gradients."""
    scalars = [abs(result[key] - expected[key]) / abs(expected[key]) for key in ("loss", "norm")]
    return max(*scalars, worst_error(result["gradients"], expected["gradients"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gradients")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_data_parallel_with_accumulation_gives_the_gradients_of_one_rank(folder, layout, accumulation, kind, dtype):
    assert errors_of(layout, folder)[accumulation, kind, dtype] <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    "options",
    [
        ("--parallelism.fsdp_reshard_after_forward", "never"),
        ("--parallelism.fsdp_reshard_after_forward", "always"),
        ("--training.enable_cpu_offload",),
        ("--model.tie_embeddings", "True"),
        ("--activation_checkpoint.mode", "full", "--activation_checkpoint.selective_ac_option", "op"),
        ("--activation_checkpoint.mode", "selective"),
        ("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op"),
        ("--compile.enable", "--compile.backend", "aot_eager"),
        ("--compile.enable", "--compile.backend", "aot_eager", "--activation_checkpoint.mode", "full"),
        ("--compile.enable", "--compile.backend", "aot_eager", "--activation_checkpoint.mode", "selective",
         "--activation_checkpoint.selective_ac_option", "op"),
        ("--optimizer.implementation", "foreach"),
        ("--optimizer.implementation", "for-loop"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_each_option_of_a_pass_gives_the_step_of_one_rank(folder, options):
    """Gradients and, since fp64 leaves AdamW's division well conditioned, the updated parameters."""
    plain = tuple(o for o in options if "tie" in o or o == "True")
    # A gang of its own even for one rank: this process must never hold a process group, or the forks would inherit it.
    expected = run_ranks(step_of, 1, small_config(folder, "--training.local_batch_size", "8", *plain), rows("packed", 8))[0]
    results = run_ranks(step_of, 2, small_config(folder, "--training.local_batch_size", "2", *options), rows("packed", 8))
    for result in results:
        assert error(result, expected) <= 1e-12
        assert worst_error(result["parameters"], expected["parameters"]) <= 1e-10
