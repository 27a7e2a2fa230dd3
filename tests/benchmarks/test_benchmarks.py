"""Each benchmark runs on CPU with tiny sizes and prints what it should; none of them asserts time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

WITHOUT_PACKAGES = """
import importlib.abc, runpy, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {"torchdata", "tomli", "tyro", "datasets", "tensorboard", "tokenizers", "safetensors"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
sys.argv[0] = script = sys.argv.pop(1)
runpy.run_path(script, run_name="__main__")
"""


def run(*args: str, cwd: Path = ROOT) -> str:
    result = subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_gpu_benchmark_needs_torch_only_and_measures_every_case(tmp_path):
    script = str(ROOT / "benchmarks" / "gpu.py")
    printed = run("-c", WITHOUT_PACKAGES, script, "--tiny", "--json", "gpu.json", cwd=tmp_path).splitlines()
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert printed[0].startswith("device=cpu") and "matmul=" in printed[0] and "copy=" in printed[0]
    assert result["matmul_tflops"] > 0 and result["copy_gb_per_s"] > 0 and result["peak_tflops"] is None
    cases = {(row["seq_len"], row["recompute"], row["compile"]) for row in result["rows"]}
    assert cases == {(s, r, c) for s in (32, 64) for r in ("none", "op", "full") for c in ("off", "on")}
    for row in result["rows"]:
        assert row["step_ms"] > 0 and row["tokens_per_s"] > 0 and row["of_matmul"] > 0
        assert row["mfu"] is None and row["allocated_gib"] is None  # known on a GPU only
    assert printed[-2].startswith("12 of 12 rows") and printed[-1].startswith("best: ")


def test_the_gpu_benchmark_goes_on_after_a_case_that_is_too_large_and_stops_at_its_budget(
    tmp_path, monkeypatch, capsys
):
    from benchmarks import gpu

    def too_large(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(gpu, "measure", too_large)
    assert gpu.main(["--tiny", "--compile", "off", "--json", str(tmp_path / "gpu.json")]) == 0
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert len(rows) == 6 and {row["outcome"] for row in rows} == {"out of memory"}
    assert capsys.readouterr().out.count("out of memory") == 6

    assert gpu.main(["--tiny", "--compile", "off", "--budget_s", "0", "--json", str(tmp_path / "gpu.json")]) == 0
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert len(rows) == 6 and all(row["outcome"].startswith("skipped") for row in rows)


def test_the_benchmark_of_experts_prints_a_ratio_at_equal_active_flops():
    small = ("--dim", "64", "--n_layers", "1", "--rows", "2", "--seq_len", "16", "--rounds", "1", "--repeats", "1")
    head, *lines = run("benchmarks/moe.py", *small).splitlines()
    assert 1 < float(head.split()[-1]) < 1.1 and [line.split()[0] for line in lines] == ["float32", "bfloat16"]


def test_the_train_step_benchmark_prints_a_ratio_and_the_noise_for_each_dtype():
    lines = run("benchmarks/train_step.py", "--tiny").splitlines()
    losses = {}
    for line in lines[2:-2]:
        dtype, n_tokens, *name, cpu_ms, ratio, loss = line.split()
        assert n_tokens == "32" and float(cpu_ms) > 0 and float(ratio) > 0
        losses[dtype, " ".join(name)] = float(loss)
    # The loops do the same work: 4 steps from the same weights, printed to 4 places.
    assert abs(losses["float32", "titanlite"] - losses["float32", "bare"]) < 2e-4
    assert abs(losses["bfloat16", "titanlite"] - losses["bfloat16", "bare, bf16 copy"]) < 1e-2  # bf16 keeps 8 bits
    for dtype, line in zip(("float32", "bfloat16"), lines[-2:]):
        assert line.startswith(f"{dtype} 32 tokens a step: titanlite / bare") and "bare again / bare = " in line


@pytest.mark.full  # five launches
def test_the_start_up_benchmark_prints_what_titanlite_takes_over_a_bare_script():
    lines = run("benchmarks/startup.py", "--rounds", "1").splitlines()
    assert lines[0].startswith("imports: bare ")
    assert [line.split()[0] for line in lines[-4:-1]] == ["bare", "bare", "titanlite"]
    assert lines[-1].startswith("titanlite over bare to the end of step 1: ") and "target at most 1.2 s" in lines[-1]


def test_the_pipeline_benchmark_prints_idle_time_and_its_closed_form_for_each_schedule():
    lines = run("benchmarks/pipeline.py", "--size", "tiny", "--microbatches", "4", "--steps", "1").splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert list(rows) == ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
    for schedule, row in rows.items():
        forward, backward, inputs, weights = map(float, row[1:5])
        assert forward > 0 and (backward > 0 or inputs + weights > 0), schedule
        assert 0 < float(row[5].rstrip("%")) < 100 and 0 <= float(row[6].rstrip("%")) < 100


def test_idle_time_and_closed_forms_are_those_of_a_schedule_worked_out_by_hand():
    from benchmarks.pipeline import closed_form, idle

    # 1F1B on 2 ranks, 2 microbatches, F 1 s and B 2 s: each rank computes for 6 s of 9.
    first = [("F", 0, 1), ("F", 1, 2), ("B", 4, 6), ("B", 7, 9)]
    second = [("F", 1, 2), ("B", 2, 4), ("F", 4, 5), ("B", 5, 7)]
    share, means = idle([first, second])
    assert share == pytest.approx(3 / 9) and means["F"] == 1 and means["B"] == 2
    assert closed_form("1F1B", 2, means) == pytest.approx(3 / 9)
    split = {"F": 1.0, "B": 0.0, "I": 1.0, "W": 1.0, "busy": 12.0}
    assert closed_form("ZBVZeroBubble", 2, split) == 0 and closed_form("InterleavedZeroBubble", 2, split) == pytest.approx(1 / 13)


def test_the_context_benchmark_prints_both_ratios_for_each_method():
    lines = run("benchmarks/context.py", "--size", "tiny", "--rounds", "1", "--steps", "1").splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["allgather", "ring", "ulysses"]
    assert all(float(x) > 0 for line in lines[1:] for x in line.split()[1:])


def test_checkpoints_are_compared_with_plain_dcp_and_a_copy():
    lines = run("benchmarks/checkpoint.py", "--gib", "0.01", "--dim", "256", "--rounds", "1").splitlines()
    assert [line.split()[0] for line in lines if line.startswith(("save", "load"))] == ["save", "load"]
    assert [line.split(",")[0] for line in lines if "Saver" in line] == ["ThreadSaver"] * 2 + ["ProcessSaver"] * 2


def test_the_loader_benchmark_measures_every_case(tmp_path):
    printed = run("benchmarks/loader.py", "--seconds", "0.1", "--documents", "100")
    for case in ("memmap split", "memmap best_fit", "jsonl, bpe, 2 workers", "titanlite tokenize / tokenizers' encode_batch"):
        (line,) = [line for line in printed.splitlines() if line.startswith(case)]
        assert float(line.removeprefix(case).split()[0]) > 0
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "data_time_s": 0.5, "step_time_s": 2}\n{"event": "done"}\n')
    assert "data wait / step 0.2500" in run("benchmarks/loader.py", "--run", str(tmp_path))


def test_the_benchmark_of_hugging_face_folders_prints_time_and_memory_over_plain_ones(tmp_path):
    printed = run("benchmarks/hf.py", "--gib", "0.1", "--dtype", "bfloat16", "--files", "2", "--rounds", "1", "--folder", str(tmp_path)).splitlines()
    assert "bfloat16 in 2 files" in printed[0]
    rows = {row.split()[0]: [float(x) for x in row.split()[1:]] for row in printed[2:]}
    assert list(rows) == ["import", "export"] and all(len(row) == 8 and min(row) > 0 for row in rows.values())
    assert not list(tmp_path.iterdir())
