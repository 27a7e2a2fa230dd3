"""A run that goes on under one layout after the other is the run that was never stopped."""

import json
import sys

import pytest

from tests.test_train import BASE, steps
from titanlite.checkpoint.integrity import read_manifest
from titanlite.checkpoint.state import model_state, optimizer_state
from titanlite.checkpoint.store import read_rank_states, save
from titanlite.config import load_config
from titanlite.resume import find_checkpoint, rank_state, setup_from
from titanlite.train import train
from titanlite.trainer import join
from titanlite.utils import ConfigError
from titanlite.verify.gang import Gang

# In fp64: sums in another order differ by 1e-15, which AdamW's division may amplify a thousandfold a step.
OPTIONS = ["--training.dtype", "float64", "--training.mixed_precision_param", "float64", "--training.global_batch_size", "12", "--training.local_batch_size", "1", "--checkpoint.interval", "1", "--checkpoint.keep_latest_k", "0", "--model.tie_embeddings", "true"]
LAYOUTS = {
    "one rank": (1, ""),
    "fsdp=2": (2, ""),
    "tp=2": (2, "tensor_parallel_degree 2"),
    "pp=2": (2, "pipeline_parallel_degree 2"),
    "cp=2": (2, "context_parallel_degree 2"),
    "hsdp=2x2": (4, "data_parallel_replicate_degree 2"),
    "fsdp=3": (3, ""),
    "fsdp=2, pp=2, zero bubble": (4, "pipeline_parallel_degree 2 pipeline_parallel_schedule ZBVZeroBubble"),
    "replicate=2, tp=2": (4, "data_parallel_replicate_degree 2 data_parallel_shard_degree 1 tensor_parallel_degree 2"),
}


@pytest.fixture(scope="module")
def run_as(tmp_path_factory):
    """Runs a function of (configuration) on the ranks of a layout, for run `name` up to `steps`."""
    folder = tmp_path_factory.mktemp("elastic")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("".join(f"line {i}: {i * i}\n" for i in range(4000)))
    (folder / "base.toml").write_text(BASE.format(folder=folder))
    gangs = {ranks: Gang(ranks, timeout_s=120) for ranks in (1, 2, 3, 4)}

    def of(fn, layout, name, n_steps, *args, words=()):
        ranks, keys = LAYOUTS[layout]
        words = [*words, *(f"--parallelism.{w}" if "_" in w else w for w in keys.split())]
        options = [*OPTIONS, "--job.name", name, "--training.steps", str(n_steps), *words]
        cfg, _ = load_config(folder / "base.toml", options)
        return gangs[ranks].run(fn, cfg, *args)[0]

    of.folder = folder / "outputs"
    yield of
    for gang in gangs.values():
        gang.close()


def _train(cfg, *path):
    sys.path[:0] = path
    return train(cfg, {})


FAMILY = """
from dataclasses import asdict, dataclass, replace
from titanlite.models.llama import FLAVORS as LLAMAS, LlamaArgs, Model as Llama, flops_per_token, plan

@dataclass(frozen=True)
class Args(LlamaArgs):
    frozen: bool = False

class Model(Llama):
    def __init__(self, args):
        super().__init__(args)
        self.tok_embeddings.requires_grad_(not args.frozen)

trained = Args(**asdict(LLAMAS["debugmodel"]))
FLAVORS = {"frozen": replace(trained, frozen=True), "trained": trained}
"""


def _load_and_save(cfg, checkpoints, again):
    """Writes what this layout makes of the newest step into another folder, under this layout."""
    manifest = read_manifest(checkpoints / f"step-{find_checkpoint(cfg, checkpoints)}")
    run, positions = setup_from(cfg, join(cfg), checkpoints, manifest["step"], 12, manifest["data"])
    mine = positions.chunk(run.mesh.degrees.batch)[run.mesh.batch_rank]
    state = model_state(run.parts) | optimizer_state(run.optimizer, run.parts)
    save(again, run.step, state, extra={}, keep_latest_k=0, rank_state=rank_state(run.mesh, mine))


@pytest.fixture(scope="module")
def straight(run_as):
    assert run_as(_train, "one rank", "straight", len(LAYOUTS)) == 0
    return run_as.folder / "straight"


@pytest.fixture(scope="module")
def elastic(run_as, straight):
    """A run of one step under each layout."""
    for n, layout in enumerate(LAYOUTS, 1):
        assert run_as(_train, layout, "elastic", n) == 0
    return run_as.folder / "elastic"


def test_losses_gradient_norms_rates_and_counts_are_those_of_one_rank(straight, elastic):
    expected = steps(straight)
    assert [s[0] for s in expected] == list(range(1, len(LAYOUTS) + 1))
    for ours, theirs in zip(steps(elastic), expected, strict=True):
        assert ours[3:5] == theirs[3:5]
        assert ours[1:3] == pytest.approx(theirs[1:3], rel=1e-10)


def _rows(run, step):
    path = run / "checkpoint" / f"step-{step}"
    states = read_rank_states(path, read_manifest(path))
    return sorted((int(row), place) for one in states.values() for row, place in one["rows"].items())


def test_every_row_of_every_step_is_read_once_and_in_the_same_order(straight, elastic):
    for step in range(1, len(LAYOUTS) + 1):
        assert dict(_rows(elastic, step)) == dict(_rows(straight, step))
        assert [row for row, _ in dict(_rows(elastic, step)).items()] == list(range(12))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_has_the_same_fingerprint_after_loading_and_saving_under(run_as, elastic, tmp_path, layout):
    run_as(_load_and_save, layout, "elastic", len(LAYOUTS), elastic / "checkpoint", tmp_path)
    name = f"step-{len(LAYOUTS)}"
    first, again = (json.loads((f / name / "MANIFEST.json").read_text()) for f in (elastic / "checkpoint", tmp_path))
    assert again["tensors"] == first["tensors"] and len(first["tensors"]) > 20
    assert again["world_size"] == LAYOUTS[layout][0]


def test_parameters_that_are_frozen_and_then_trained_and_frozen_again_are_those_of_one_rank(run_as, tmp_path):
    """And so on every layout: in the middle the embedding begins with fresh optimizer state."""
    (tmp_path / "forks").mkdir()
    (tmp_path / "forks" / "thawing.py").write_text(FAMILY)
    for name, layouts in (("thaw_one", ["one rank"] * 3), ("thaw", ["fsdp=2", "tp=2", "pp=2"])):
        for n_steps, (layout, flavor) in enumerate(zip(layouts, ("frozen", "trained", "frozen")), 1):
            words = ("--model.name", "forks.thawing", "--model.flavor", flavor, "--model.tie_embeddings", "false")
            assert run_as(_train, layout, name, 2 * n_steps, str(tmp_path), words=words) == 0
    one, many = (steps(run_as.folder / name) for name in ("thaw_one", "thaw"))
    assert len(one) == 6
    for ours, theirs in zip(many, one, strict=True):
        assert ours[1:3] == pytest.approx(theirs[1:3], rel=1e-10)
    tensors = [read_manifest(run_as.folder / "thaw" / "checkpoint" / f"step-{n}")["tensors"] for n in range(1, 7)]
    embedding = [t["model.tok_embeddings.weight"]["fingerprint"] for t in tensors]
    assert embedding[0] == embedding[1] != embedding[2] != embedding[3] == embedding[4] == embedding[5]
    assert ["optimizer.tok_embeddings.weight.step" in t for t in tensors] == [False, False, True, True, False, False]


@pytest.mark.parametrize("first, then", [("true", "false"), ("false", "true")])
def test_a_parameter_that_is_added_or_removed_is_refused_and_then_excluded(run_as, first, then):
    name = f"tied_{first}"
    assert run_as(_train, "fsdp=2", name, 2, words=("--model.tie_embeddings", first)) == 0
    with pytest.raises(ConfigError, match=r"model.output.weight.*\n.*optimizer.output.weight.exp_avg(.|\n)*checkpoint.exclude_from_loading"):
        run_as(_train, "tp=2", name, 3, words=("--model.tie_embeddings", then))
    exclude = ("--checkpoint.exclude_from_loading", "model.output", "optimizer.output")
    assert run_as(_train, "tp=2", name, 3, words=("--model.tie_embeddings", then, *exclude)) == 0
    assert [s[0] for s in steps(run_as.folder / name)] == [1, 2, 3]
