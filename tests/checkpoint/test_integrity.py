"""Damage of every kind is found, and a fingerprint is the same under every layout and sees what moved."""

import itertools
import json
import math
import random
import shutil

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.ranks import run_ranks
from titanlite.checkpoint.fingerprint import fingerprints
from titanlite.checkpoint.folder import list_steps, quarantine
from titanlite.checkpoint.integrity import DamagedStep, problems_of
from titanlite.checkpoint.store import load, save
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
    assert problems_of(step) == []


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", ".metadata", "MANIFEST.json", "MANIFEST.crc32"])
def test_every_one_of_40_flipped_bits_is_found(step, file):
    good = (step / file).read_bytes()
    for seed in range(40):
        flip(step / file, seed)
        problems = problems_of(step)
        assert problems and file in problems[0], seed
        (step / file).write_bytes(good)
    assert problems_of(step) == []


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
    assert problems_of(step)
    assert main(["checkpoint", "verify", str(step.parent)]) == 1
    assert "step-1       DAMAGED" in capsys.readouterr().out


def test_ranks_share_the_reading_when_they_load_and_all_learn_what_is_wrong(step):
    flip(step / "__0_0.distcp", 1)
    flip(step / "__1_0.distcp", 1)

    def read():
        with pytest.raises(DamagedStep) as damage:
            load(step.parent, 1, {"model.w": torch.zeros(64, 48)})
        return str(damage.value)

    for problems in run_ranks(read, 3):
        assert "__0_0.distcp has checksum" in problems and "__1_0.distcp has checksum" in problems


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", ".metadata", "MANIFEST.json", "MANIFEST.crc32"])
def test_a_load_itself_finds_every_one_of_20_flipped_bits(step, file):
    good = (step / file).read_bytes()
    for seed in range(20):
        flip(step / file, seed)
        with pytest.raises(DamagedStep):
            load(step.parent, 1, {"model.w": torch.zeros(64, 48)})
        (step / file).write_bytes(good)
    load(step.parent, 1, {"model.w": torch.zeros(64, 48)})


def test_a_quarantined_step_is_no_checkpoint_any_more_and_the_reason_lies_beside_it(step):
    quarantine(step.parent, 1, ["it is broken", "badly"])
    assert list_steps(step.parent) == []
    assert (step.parent / "quarantine-step-1-1.txt").read_text() == "it is broken\nbadly\n"
    assert (step.parent / "quarantine-step-1-1" / "MANIFEST.json").is_file()


def _w(n=0):
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(n))


def fingerprint(tensor):
    return fingerprints({"x": tensor}, ["x"], None)["x"]


DTYPES = [getattr(torch, name) for name in ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "complex64", "int64", "int16", "uint8", "bool"]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fingerprint_sees_every_flipped_bit(dtype):
    tensor = (_w() * 10).to(dtype)
    before = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == before
    raw = tensor.view(torch.uint8).view(-1)
    for i in range(len(raw)):
        for bit in range(1 if dtype is torch.bool else 8):
            raw[i] ^= 1 << bit
            assert fingerprint(tensor) != before
            raw[i] ^= 1 << bit
    assert fingerprint(tensor) == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_fingerprint_sees_two_flipped_signs(dtype):
    tensor = _w().to(dtype)
    before, flat = fingerprint(tensor), tensor.view(-1)
    for i, j in itertools.combinations(range(30), 2):  # of 435 pairs one in 2^16 would cancel, and the weights are fixed
        flat[[i, j]] *= -1
        assert fingerprint(tensor) != before
        flat[[i, j]] *= -1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fingerprint_sees_permutations_along_any_dimension(dtype):
    tensor = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    seen = {fingerprint(tensor)}
    for dim in range(3):
        for order in itertools.permutations(range(tensor.shape[dim])):
            seen.add(fingerprint(tensor.index_select(dim, torch.tensor(order))))
    assert len(seen) == 1 + (24 - 1) + (6 - 1) + (120 - 1)
    seen = {fingerprint(torch.arange(5000).roll(shift)) for shift in (0, 1, 1024, 2048, 3976)}
    assert len(seen) == 5
    square = tensor.view(4, 15)[:, :4]
    assert fingerprint(square) != fingerprint(square.t())


def test_a_fingerprint_is_of_the_elements_and_not_of_how_they_lie_in_memory():
    tensor = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    assert fingerprint(tensor.transpose(0, 2)) == fingerprint(tensor.transpose(0, 2).contiguous())
    for dtype in (torch.bfloat16, torch.uint8):
        row = (10 * tensor.abs()).to(dtype).view(-1)
        for start in range(1, 5):  # an address that is not one of a whole word
            assert fingerprint(row[start:]) == fingerprint(row[start:].clone())
    assert fingerprint(torch.ones(3, 1).as_strided((3, 1), (1, 7))) == fingerprint(torch.ones(3, 1))
    assert fingerprint(torch.tensor(2.5)) not in (fingerprint(torch.tensor(-2.5)), fingerprint(torch.tensor(0.0)))
    assert fingerprint(torch.empty(0, 3)) == fingerprint(torch.empty(3, 0)) == fingerprint(torch.zeros(4)) == "0" * 16


LAYOUTS = [  # degrees of the mesh, placements
    ((1,), [Replicate()]),
    ((2,), [Replicate()]),
    ((2,), [Shard(0)]),
    ((2,), [Shard(1)]),
    ((3,), [Shard(0)]),
    ((3,), [Shard(1)]),
    ((4,), [Shard(0)]),  # 6 rows: one rank has none
    ((4,), [Shard(1)]),  # 5 columns: 2, 2, 1, none
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [Shard(1), Shard(1)]),
    ((2, 2), [Shard(1), Shard(0)]),
    ((2, 2), [Replicate(), Shard(1)]),
    ((2, 2), [Shard(0), Replicate()]),
]


def test_a_fingerprint_is_the_same_under_every_layout():
    whole = {str(dtype): (10 * _w(n)).to(dtype) for n, dtype in enumerate(DTYPES)}
    whole["cube"] = torch.randn(7, 3, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole["long"] = torch.randn(2, 300_001, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole["tall"] = torch.randn(2_001, 300, generator=torch.Generator().manual_seed(0))
    plain = {key: fingerprint(value) for key, value in whole.items()} | {"plain": fingerprint(torch.arange(4))}

    def of_layouts():
        found = []
        for degrees, placements in LAYOUTS:
            mesh, state = DeviceMesh("cpu", torch.arange(math.prod(degrees)).view(degrees)), {}
            if mesh.get_coordinate() is not None:
                state = {key: distribute_tensor(value, mesh, placements, src_data_rank=None) for key, value in whole.items()}
                state["plain"] = torch.arange(4)
            found.append(fingerprints(state, list(plain), None))
        return found

    for found in run_ranks(of_layouts, 4):
        for layout, prints in zip(LAYOUTS, found, strict=True):
            assert prints == plain, layout


def test_a_fingerprint_of_fsdp_over_tensor_parallel_is_that_of_the_whole():
    whole = torch.randn(12, 10, generator=torch.Generator().manual_seed(0)).bfloat16()

    def of_both():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        found = []
        for style in (ColwiseParallel(), RowwiseParallel()):
            layer = nn.Linear(10, 12, bias=False, dtype=torch.bfloat16)
            layer.weight.data.copy_(whole)
            fully_shard(parallelize_module(layer, mesh["tp"], style), mesh=mesh["fsdp"])
            found.append((str(layer.weight.placements), fingerprints({"x": layer.weight}, ["x"], None)["x"]))
        return found

    for colwise, rowwise in run_ranks(of_both, 4):
        assert "_StridedShard(dim=0" in colwise[0] and "Shard(dim=1)" in rowwise[0]
        assert colwise[1] == rowwise[1] == fingerprint(whole)


def test_a_rank_may_hold_some_of_the_keys():
    def of_two():
        mine = "ab"[dist.get_rank()]
        return fingerprints({mine: _w(), "both": _w(1)}, ["a", "b", "both"], None)

    expected = {"a": fingerprint(_w()), "b": fingerprint(_w()), "both": fingerprint(_w(1))}
    assert run_ranks(of_two, 2) == [expected] * 2


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
