"""What the other tests judge by sees a history that is wrong, in each of the ways in which one can be."""

import json

import pytest
import torch

import titanlite.resume
import titanlite.train
from tests.faults.gang import differences
from titanlite.data.loader import TrainLoader


@pytest.fixture
def run(golden, tmp_path):
    return golden().copy(tmp_path)


def rewrite(run, change):
    records = run.records()
    change(records)
    (run.base / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def swap_samples(records):
    records[20]["samples"], records[21]["samples"] = records[21]["samples"], records[20]["samples"]


@pytest.mark.parametrize(
    "change, found",
    [
        (lambda records: records[16].update(loss=(float.fromhex(records[16]["loss"]) * (1 + 2**-52)).hex()), "step 17: loss is another"),
        (lambda records: records[16].update(fingerprint="0"), "step 17: fingerprint is another"),
        (lambda records: records.pop(16), "step 17 was never recorded"),
        (lambda records: records.append({**records[16], "fingerprint": "0"}), "step 17: fingerprint is another"),
        (lambda records: records[39].update(samples=records[38]["samples"]), "step 40: samples is another"),
        (swap_samples, "step 22: samples is another"),
    ],
)
def test_a_record_that_differs_is_seen(run, golden, change, found):
    assert differences(run, golden()) == []
    rewrite(run, change)
    assert found in differences(run, golden())


def test_a_sample_that_stands_twice_is_seen(run, golden):
    sample = run.records()[38]["samples"][0]
    rewrite(run, lambda records: records[39]["samples"].insert(0, sample))
    assert f"sample {sample} was trained on 2 times" in differences(run, golden())


def goes_on_after_35(run, golden):
    (run.checkpoints / "step-40").rename(run.base / "step-40")
    assert run.leg() == 0
    return set(differences(run, golden()))


def test_a_run_that_goes_on_from_a_mix_of_two_steps_is_seen(run, golden, monkeypatch):
    """After titanlite's own check, which sees a mix in the files."""
    plain = titanlite.resume.load

    def load(folder, step, state, **options):
        manifest = plain(folder, step, state, **options)
        plain(folder, step - 5, {key: tensor for key, tensor in state.items() if key.startswith("optimizer.")})
        return manifest

    monkeypatch.setattr(titanlite.resume, "load", load)
    assert {f"step {step}: fingerprint is another" for step in range(36, 41)} <= goes_on_after_35(run, golden)


def test_a_run_that_skips_a_row_is_seen(run, golden, monkeypatch):
    plain = TrainLoader.__next__
    monkeypatch.setattr(TrainLoader, "__next__", lambda self: plain(self) and plain(self))
    assert "step 36: samples is another" in goes_on_after_35(run, golden)


def test_one_weight_that_is_off_by_its_last_bit_is_seen(run, golden, monkeypatch):
    plain = titanlite.train.train_step

    def train_step(run, *args):
        measured = plain(run, *args)
        if run.step == 38 and run.mesh.rank == 1:
            run.parts[0].tok_embeddings.weight.detach().to_local().view(torch.int32)[7, 7] ^= 1
        return measured

    monkeypatch.setattr(titanlite.train, "train_step", train_step)
    found = goes_on_after_35(run, golden)
    assert "step 38: fingerprint is another" in found and not any(f.startswith("step 37") for f in found)
