"""True launches, each of which costs seconds: what holds inside one gang is tested in tests/test_train.py.

They run over NCCL where every rank finds a device, else on gloo.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

DEBUG = Path(__file__).parents[2] / "train_configs" / "debug.toml"
STEPS = 12


def environment(nproc: int) -> dict[str, str]:
    """One thread a rank; the devices that tests/conftest.py hides where each rank finds one; what determinism needs there."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if len(list(Path("/dev").glob("nvidia[0-9]*"))) >= nproc:
        del env["CUDA_VISIBLE_DEVICES"]
    return env


def start(*words, nproc: int = 2, **options) -> subprocess.Popen:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment(nproc)} | options
    return subprocess.Popen([sys.executable, "-m", *map(str, words)], **options)


def torchrun(nproc: int, *words) -> tuple[int, str]:
    gang = start(
        "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}", "-m", "titanlite.train", *words, nproc=nproc
    )
    output, _ = gang.communicate(timeout=180)
    return gang.returncode, output


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps(folder: Path) -> list[tuple]:
    keys = ("step", "loss", "grad_norm", "lr", "tokens")
    return [tuple(r[key] for key in keys) for r in records(folder) if "event" not in r]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("torchrun")


def recipe(outputs: Path, name: str) -> list:
    return [
        DEBUG, "--job.dump_folder", outputs, "--job.name", name, "--training.steps", STEPS, "--training.seq_len", 128,
        "--metrics.log_freq", 1, "--checkpoint.enable", "--checkpoint.async_mode", "async", "--validation.steps", 2,
        "--training.dataloader.num_workers", 2, "--debug.deterministic",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(outputs) -> Path:
    """The folder of a run on two ranks, each with two data workers, under plain torchrun."""
    code, output = torchrun(2, *recipe(outputs, "undisturbed"))
    assert code == 0, output
    assert output.count(f"step {STEPS}/{STEPS}") == 1  # rank 0 alone writes to the console
    return outputs / "undisturbed"


@pytest.fixture(scope="module")
def interrupted(outputs) -> dict:
    """The same run under `titanlite train --nproc 2`, signalled after the first step; a second start meanwhile, a third after.

    Rank 0 is halted until the second start has been refused and the signal sent: however slow the machine, there are
    steps left.
    """
    folder, lines = outputs / "interrupted", []
    gang = start("titanlite.cli", "train", *recipe(outputs, "interrupted"), "--nproc", 2, start_new_session=True)
    for line in gang.stdout:
        lines.append(line)
        if re.match(r"step +1/", line):
            break
    owner = json.loads((folder / "lock").read_text())["pid"]
    os.kill(owner, signal.SIGSTOP)
    second = start("titanlite.cli", "train", *recipe(outputs, "interrupted"), nproc=1)
    refusal, _ = second.communicate(timeout=120)
    os.killpg(gang.pid, signal.SIGTERM)  # to the launcher: its ranks lead sessions of their own
    os.kill(owner, signal.SIGCONT)
    rest, _ = gang.communicate(timeout=120)
    stopped_at = steps(folder)[-1][0]
    third = start("titanlite.cli", "train", "--nproc=2", *recipe(outputs, "interrupted"))
    again, _ = third.communicate(timeout=120)
    return {
        "folder": folder,
        "code": gang.returncode,
        "output": "".join(lines) + rest,
        "stopped at": stopped_at,
        "second": (second.returncode, refusal),
        "third": (third.returncode, again),
        "owner": owner,
    }


def test_torchrun_trains_and_leaves_a_whole_folder(undisturbed):
    assert [s[0] for s in steps(undisturbed)] == list(range(1, STEPS + 1))
    names = {"checkpoint", "config.toml", "env.json", "lock", "logs", "metrics.jsonl", "tb"}
    assert {path.name for path in undisturbed.iterdir()} == names
    assert (undisturbed / "checkpoint" / f"step-{STEPS}" / "MANIFEST.json").is_file()
    assert {path.name for path in (undisturbed / "logs").iterdir()} == {"rank_0.log", "rank_1.log"}
    assert json.loads((undisturbed / "env.json").read_text())["world_size"] == 2
    assert records(undisturbed)[-2]["validation_loss"] > 0


def test_a_signal_to_the_launcher_ends_the_gang_with_75_and_everything_saved(interrupted):
    assert interrupted["code"] == 75, interrupted["output"]
    assert "Traceback" not in interrupted["output"]
    assert 1 <= interrupted["stopped at"] < STEPS
    assert (interrupted["folder"] / "checkpoint" / f"step-{interrupted['stopped at']}" / "MANIFEST.json").is_file()
    assert f"stopped by a signal: step={interrupted['stopped at']} of {STEPS}" in interrupted["output"]


def test_the_next_start_goes_on_at_that_step_bit_for_bit(interrupted, undisturbed):
    code, output = interrupted["third"]
    assert code == 0, output
    assert f"step-{interrupted['stopped at']} step={interrupted['stopped at']} tokens=" in output
    assert steps(interrupted["folder"]) == steps(undisturbed)


def test_a_second_gang_on_the_folder_is_refused_by_name_while_the_first_goes_on(interrupted):
    code, message = interrupted["second"]
    assert code == 2
    assert f"{interrupted['folder']} is being written by process {interrupted['owner']} on " in message
    assert "Traceback" not in message


def test_a_mistake_under_torchrun_with_four_ranks_is_told_once_without_a_traceback_of_ours(tmp_path):
    (tmp_path / "run.toml").write_text("[training]\nsteps = 3\nglobal_batch_size = 7\n")
    code, output = torchrun(4, tmp_path / "run.toml")
    assert code == 1  # torchrun's own code; rank 0 left 2
    assert output.count("training.global_batch_size=7 must divide by training.local_batch_size=8 * 4") == 1
    assert output.count(f"training.global_batch_size is set at {tmp_path}/run.toml:3") == 1
    package = DEBUG.parents[1] / "titanlite"
    assert "exitcode  : 2" in output and f'File "{package}/' not in output


def test_generate_works_from_the_run(undisturbed):
    generate = start("titanlite.cli", "generate", undisturbed, "-p", "def ", "--json", "--max_new_tokens", 5, nproc=1)
    output, _ = generate.communicate(timeout=120)
    found = json.loads(output.splitlines()[-1])
    assert generate.returncode == 0 and found["prompt_ids"] == [256, *b"def "] and found["step"] == STEPS
