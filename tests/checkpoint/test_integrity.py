"""Damage of every kind is found, and a fingerprint is the same under every layout and sees what moved."""

import json
import random
import shutil

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.ranks import run_ranks
from titanlite.checkpoint.fingerprint import fingerprints
from titanlite.checkpoint.store import list_steps, quarantine, save, verify_step
from titanlite.cli import main


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A step of two ranks' files."""
    folder = tmp_path_factory.mktemp("good")

    def write():
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
        state = {"model.w": distribute_tensor(whole, mesh, [Shard(0)]), f"rng_{dist.get_rank()}.cpu": torch.arange(3)}
        save(folder, 1, state, extra={}, keep_latest_k=0)

    run_ranks(write, 2)
    return folder / "step-1"


@pytest.fixture
def step(original, tmp_path):
    return shutil.copytree(original, tmp_path / "step-1")


def flip(path, seed):
    generator = random.Random(seed)
    data = bytearray(path.read_bytes())
    data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    path.write_bytes(data)


def test_a_good_step_has_no_problems(step):
    assert verify_step(step) == []


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", ".metadata", "MANIFEST.json", "MANIFEST.crc32"])
def test_every_one_of_40_flipped_bits_is_found(step, file):
    good = (step / file).read_bytes()
    for seed in range(40):
        flip(step / file, seed)
        problems = verify_step(step)
        assert problems and file in problems[0], seed
        (step / file).write_bytes(good)
    assert verify_step(step) == []


def zero_block(step):
    data = bytearray((step / "__0_0.distcp").read_bytes())
    data[512:1024] = bytes(512)
    (step / "__0_0.distcp").write_bytes(data)


def truncate(step):
    data = (step / "__1_0.distcp").read_bytes()
    (step / "__1_0.distcp").write_bytes(data[:-1])


def swap(step):
    a, b = step / "__0_0.distcp", step / "__1_0.distcp"
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)


def edit_manifest(step):
    manifest = json.loads((step / "MANIFEST.json").read_text())
    (step / "MANIFEST.json").write_text(json.dumps(manifest | {"step": 2}))


def lose_file(step):
    (step / "__0_0.distcp").unlink()


def add_file(step):
    (step / "__2_0.distcp").write_bytes(b"of another save")


@pytest.mark.parametrize("damage", [zero_block, truncate, swap, edit_manifest, lose_file, add_file])
def test_damage_is_found_by_the_library_and_by_the_command_and_named(step, damage, capsys):
    assert main(["checkpoint", "verify", str(step.parent)]) == 0
    assert "1 steps, 0 damaged" in capsys.readouterr().out
    damage(step)
    assert verify_step(step)
    assert main(["checkpoint", "verify", str(step.parent)]) == 1
    assert "step-1       DAMAGED" in capsys.readouterr().out


def test_ranks_share_the_reading_and_all_learn_what_is_wrong(step):
    flip(step / "__0_0.distcp", 1)
    flip(step / "__1_0.distcp", 1)
    for problems in run_ranks(verify_step, 3, step):
        assert len(problems) == 2


def test_a_quarantined_step_is_no_checkpoint_any_more_and_the_reason_lies_beside_it(step):
    quarantine(step.parent, 1, ["it is broken", "badly"])
    assert list_steps(step.parent) == []
    assert (step.parent / "quarantine-step-1-1.txt").read_text() == "it is broken\nbadly\n"
    assert (step.parent / "quarantine-step-1-1" / "MANIFEST.json").is_file()


def _w(n=0, **_):
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(n))


def fingerprint(tensor):
    return fingerprints({"x": tensor}, ["x"], None)["x"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_a_fingerprint_sees_every_flipped_bit(dtype):
    tensor = (_w() * 10).to(dtype)
    before = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == before
    raw = tensor.view(torch.uint8) if dtype is not torch.bool else None
    for i in range(0 if raw is None else raw.numel()):
        for bit in range(8):
            raw.view(-1)[i] ^= 1 << bit
            assert fingerprint(tensor) != before
            raw.view(-1)[i] ^= 1 << bit
    if raw is None:
        tensor[3, 3] = ~tensor[3, 3]
        assert fingerprint(tensor) != before


def test_a_fingerprint_sees_permutations_along_any_dimension_and_another_shape():
    tensor = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    seen = {fingerprint(tensor)}
    for dim in range(3):
        for shift in range(1, tensor.shape[dim]):
            seen.add(fingerprint(tensor.roll(shift, dim)))
    assert len(seen) == 1 + 3 + 2 + 4
    assert fingerprint(torch.arange(5)) != fingerprint(torch.arange(5).flip(0))
    assert fingerprint(tensor.transpose(0, 2)) == fingerprint(tensor.transpose(0, 2).contiguous())


LAYOUTS = {
    "one": (1, [Replicate()]),
    "rows": (2, [Shard(0)]),
    "uneven rows": (4, [Shard(0)]),
    "columns": (3, [Shard(1)]),
    "copies": (3, [Replicate()]),
}


def test_a_fingerprint_is_the_same_under_every_layout():
    def of(world_size, placements):
        mesh = init_device_mesh("cpu", (world_size,))
        whole = {key: _w(n).to(dtype) for n, (key, dtype) in enumerate({"a": torch.float32, "b": torch.bfloat16}.items())}
        state = {key: distribute_tensor(value, mesh, placements) for key, value in whole.items()}
        return fingerprints(state | {"plain": torch.arange(4)}, ["a", "b", "plain"], None)

    def of_two_axes():
        mesh = init_device_mesh("cpu", (2, 2))
        whole = {key: _w(n).to(dtype) for n, (key, dtype) in enumerate({"a": torch.float32, "b": torch.bfloat16}.items())}
        state = {"a": distribute_tensor(whole["a"], mesh, [Shard(0), Shard(1)]), "b": distribute_tensor(whole["b"], mesh, [Replicate(), Shard(0)])}
        return fingerprints(state | {"plain": torch.arange(4)}, ["a", "b", "plain"], None)

    expected = run_ranks(of, *LAYOUTS["one"][:1], *LAYOUTS["one"])[0]
    for world_size, placements in LAYOUTS.values():
        assert run_ranks(of, world_size, world_size, placements) == [expected] * world_size
    assert run_ranks(of_two_axes, 4) == [expected] * 4


def test_diff_names_what_two_steps_do_not_have_alike(tmp_path, capsys):
    state = {"model.w": _w(), "model.v": torch.zeros(2), "train.step": torch.tensor(1)}
    save(tmp_path, 1, state, extra={}, keep_latest_k=0)
    save(tmp_path, 2, state | {"train.step": torch.tensor(2), "model.v": torch.zeros(3)}, extra={}, keep_latest_k=0)
    a, b = str(tmp_path / "step-1"), str(tmp_path / "step-2")
    assert main(["checkpoint", "diff", a, a]) == 0
    assert main(["checkpoint", "diff", a, b]) == 1
    out = capsys.readouterr().out
    assert "model.v: shape [2] and [3]" in out and "train.step: fingerprint" in out and "3 tensors, 2 differ" in out and "model.w" not in out


def test_prune_keeps_the_newest_good_steps_and_never_the_last_one_goes(tmp_path, capsys):
    for step in (1, 2, 3):
        save(tmp_path, step, {"model.w": _w(step)}, extra={}, keep_latest_k=0)
    flip(tmp_path / "step-3" / "__0_0.distcp", 0)
    assert main(["checkpoint", "prune", str(tmp_path), "--keep", "1"]) == 0
    assert list_steps(tmp_path) == [2] and "deleted step-3 (damaged)" in capsys.readouterr().out
    flip(tmp_path / "step-2" / "__0_0.distcp", 0)
    assert main(["checkpoint", "prune", str(tmp_path)]) == 1
    assert (tmp_path / "step-2").is_dir()
    assert main(["checkpoint", "prune", str(tmp_path), "--keep", "0"]) == 2
    assert main(["checkpoint", "list", str(tmp_path / "nowhere")]) == 2
