"""Initial weights are a function of (seed, parameter name), whatever the layout."""

import functools
import hashlib
import weakref

import numpy as np
import pytest
import torch

from tests.ranks import run_ranks
from tests.runs import full, small_config
from titanlite.models.layers import rope_frequencies
from titanlite.models.llama.model import FLAVORS, Llama
from titanlite.trainer import join, setup

ARGS = FLAVORS["debugmodel"]  # 257 rows of embeddings: no layout of these divides them evenly
LAYOUTS = {
    "one rank": (1, ()),
    "fsdp 2": (2, ()),
    "fsdp 3": (3, ()),
    "replicate 2": (2, ("--parallelism.data_parallel_replicate_degree", "2")),
    "hsdp 2x2": (4, ("--parallelism.data_parallel_replicate_degree", "2")),
}
CASES = {
    "untied": (),
    "tied": ("--model.tie_embeddings", "true"),
    "another seed": ("--debug.seed", "1"),
    "bfloat16": ("--training.dtype", "bfloat16", "--training.mixed_precision_param", "bfloat16"),
    "mixed": ("--training.mixed_precision_param", "bfloat16"),
    "offload": ("--training.enable_cpu_offload",),
}


def digest(whole: np.ndarray) -> str:
    return hashlib.sha256(whole.tobytes()).hexdigest()


def _weights_of(cases: dict) -> dict:
    """{case: {name: whole parameter}} of the one rank, else {case: {name: its digest}}; and what must not be."""
    weights, wrong = {}, []
    for case, cfg in cases.items():
        whole = []  # every parameter that init_parameter was ever given
        plain = Llama.init_parameter

        def watched(self, name, tensor, generator, plain=plain, whole=whole, wrong=wrong):
            whole.append(weakref.ref(tensor))
            if sum(ref() is not None for ref in whole) > 1:
                wrong.append(f"{name} is made while another whole parameter is alive")
            plain(self, name, tensor, generator)

        Llama.init_parameter = watched
        run = setup(cfg, join(cfg))
        Llama.init_parameter = plain
        (model,) = run.parts
        wrong += [f"{name} is on meta" for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
        if (model.output.weight is model.tok_embeddings.weight) != bool(cfg.model.tie_embeddings):
            wrong.append("a tie came apart, or was made")
        expected = rope_frequencies(ARGS.head_width, ARGS.rope_theta)
        wrong += [f"{n} is {t}" for n, t in model.named_buffers() if not torch.equal(t.float(), expected)]
        keep = (lambda whole: whole) if run.mesh.world_size == 1 else digest
        weights[case] = {name: keep(full(p)) for name, p in model.named_parameters()}
    return {"weights": weights, "wrong": wrong}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("init")


@functools.cache  # one gang a layout
def ranks_of(layout: str, folder) -> list[dict]:
    world_size, options = LAYOUTS[layout]
    fp32 = ("--training.dtype", "float32", "--training.mixed_precision_param", "float32")
    cases = {case: small_config(folder, *fp32, *options, *more) for case, more in CASES.items()}
    return run_ranks(_weights_of, world_size, cases)


def weights(case: str, folder) -> dict[str, np.ndarray]:
    return ranks_of("one rank", folder)[0]["weights"][case]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "one rank"])
def test_every_layout_starts_bit_equal_to_one_rank(folder, layout, case):
    expected = {name: digest(whole) for name, whole in weights(case, folder).items()}
    for rank in ranks_of(layout, folder):
        assert rank["weights"][case] == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_stays_on_meta_ties_hold_buffers_are_right_and_one_whole_parameter_lives_at_a_time(folder, layout):
    for rank in ranks_of(layout, folder):
        assert rank["wrong"] == []


def test_another_seed_gives_other_weights(folder):
    one, other = weights("untied", folder), weights("another seed", folder)
    assert [name for name in one if "norm" not in name and np.array_equal(one[name], other[name])] == []


def test_no_two_parameters_of_a_shape_are_alike(folder):
    seen = {}
    for name, value in weights("untied", folder).items():
        if "norm" not in name:
            assert value.tobytes() not in seen, f"{name} is {seen[value.tobytes()]}"
            seen[value.tobytes()] = name


def test_mixed_precision_and_offload_change_no_weight_and_a_narrower_dtype_rounds_it(folder):
    expected = weights("untied", folder)
    rounded = weights("bfloat16", folder)
    for name, value in expected.items():
        assert np.array_equal(weights("mixed", folder)[name], value)
        assert np.array_equal(weights("offload", folder)[name], value)
        assert np.array_equal(rounded[name], torch.from_numpy(value).bfloat16().double().numpy())


def documented_std(name: str) -> float:
    if name in ("tok_embeddings.weight", "output.weight"):
        std = ARGS.dim**-0.5
    else:
        depth = int(name.split(".")[1]) + 1
        std = 0.02 / ((2 * depth) ** 0.5 if name.endswith(("wo.weight", "w2.weight")) else 1)
    return 0.9866 * std  # what a normal distribution cut at 3 standard deviations has


@pytest.mark.parametrize("case", ["untied", "tied"])
def test_weights_have_mean_zero_and_the_documented_spread(folder, case):
    for name, value in weights(case, folder).items():
        if "norm" in name:
            assert (value == 1).all()
            continue
        std = documented_std(name)
        # Over n >= 8,192 draws the standard errors are std / sqrt(n) and std / sqrt(2n): 1.1 % and 0.8 %. Five of them.
        assert abs(value.mean()) < 0.055 * std and abs(value.std() / std - 1) < 0.04, name
        assert np.abs(value).max() <= 3 * std / 0.9866
