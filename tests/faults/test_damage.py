"""Damage of any kind to a run's newest step is found, and the run goes on from the one before as if that had been the newest."""

import json
import random
import re
import shutil

import pytest

from tests.faults.gang import differences
from titanlite.checkpoint.command import checkpoint_command
from titanlite.checkpoint.integrity import MANIFEST, file_checksum, seal_manifest

SHARDS = ("__0_0.distcp", "__1_0.distcp")


def files(step):
    return sorted(path for path in step.rglob("*") if path.is_file())


def flip(path, generator):
    data = bytearray(path.read_bytes())
    data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    path.write_bytes(data)


def zero_a_block(step):
    path = step / SHARDS[0]
    data = bytearray(path.read_bytes())
    data[8192:12288] = bytes(4096)
    assert data != path.read_bytes()
    path.write_bytes(data)


def truncate(step):
    path = step / SHARDS[1]
    path.write_bytes(path.read_bytes()[:-1])


def swap_shards(step):
    a, b = (step / name for name in SHARDS)
    a.rename(step / "a")
    b.rename(a)
    (step / "a").rename(b)


def edit_the_manifest(step):
    path = step / MANIFEST
    path.write_text(path.read_text().replace('"step": 35', '"step": 40'))


def add_a_file(step):
    (step / "__2_0.distcp").write_bytes(b"0")


def lose_a_file(step):
    (step / SHARDS[1]).unlink()


KINDS = [zero_a_block, truncate, swap_shards, edit_the_manifest, add_a_file, lose_a_file]


@pytest.fixture
def run(golden, tmp_path):
    """The golden run with steps 30 and 35."""
    run = golden().copy(tmp_path)
    shutil.rmtree(run.checkpoints / "step-40")
    return run


@pytest.fixture
def damaged(run, capsys):
    """Makes a function that says which steps `titanlite checkpoint verify` finds damaged."""

    def steps():
        code = checkpoint_command(["verify", str(run.folder)])
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines[:-1]] == ["step-30", "step-35"]
        found = [line.split()[0] for line in lines if " DAMAGED " in line]
        assert code == bool(found)
        return found

    return steps


def goes_on_from_the_step_before(run, golden):
    assert run.leg() == 0
    assert (run.checkpoints / "quarantine-step-35-1.txt").read_text()
    assert [record["step"] for record in run.records()[40:]] == list(range(31, 41))
    assert differences(run, golden()) == []


def test_each_of_200_flipped_bits_is_found(run, damaged):
    assert damaged() == []
    generator = random.Random(0)
    missed = []
    for i in range(200):
        path = files(run.checkpoints / "step-35")[i % len(files(run.checkpoints / "step-35"))]
        good = path.read_bytes()
        flip(path, generator)
        if damaged() != ["step-35"]:
            missed.append(path.name)
        path.write_bytes(good)
    assert damaged() == [] and missed == []


@pytest.mark.parametrize("damage", KINDS)
def test_damage_is_found_and_the_run_goes_on_from_the_step_before(run, golden, damaged, damage):
    damage(run.checkpoints / "step-35")
    assert damaged() == ["step-35"]
    goes_on_from_the_step_before(run, golden)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 10))])
def test_a_run_goes_on_from_the_step_before_one_with_a_flipped_bit(run, golden, seed):
    generator = random.Random(seed)
    flip(generator.choice(files(run.checkpoints / "step-35")), generator)
    goes_on_from_the_step_before(run, golden)


def test_a_step_mixed_from_two_whose_checksums_were_made_anew_is_found_when_it_is_loaded(run, golden):
    step = run.checkpoints / "step-35"
    shutil.copy(run.checkpoints / "step-30" / SHARDS[1], step)
    manifest = json.loads((step / MANIFEST).read_text())
    manifest["files"][SHARDS[1]]["crc32"] = file_checksum(step / SHARDS[1])
    seal_manifest(step, manifest)
    assert checkpoint_command(["verify", str(run.folder)]) == 0
    goes_on_from_the_step_before(run, golden)


def test_a_run_whose_steps_are_all_damaged_stops_and_never_starts_anew(run):
    before = (run.folder / "metrics.jsonl").read_bytes()
    for step in (30, 35):
        flip(run.checkpoints / f"step-{step}" / SHARDS[0], random.Random(step))
    for _ in range(2):  # the second time they are quarantined already
        assert run.leg() == 1
    assert (run.folder / "metrics.jsonl").read_bytes() == before and len(run.records()) == 40
    assert len([path for path in run.checkpoints.iterdir() if re.fullmatch(r"quarantine-step-\d+-1", path.name)]) == 2
