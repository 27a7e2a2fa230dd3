"""Whole runs of `titanlite.train.train`, its folder, resuming and refusals, on gangs that stay for the module."""

import dataclasses
import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import titanlite.train
import titanlite.trainer
from titanlite.checkpoint.folder import list_steps
from titanlite.checkpoint.lock import RunLock
from titanlite.config import load_config
from titanlite.generate import generate, load_run
from titanlite.utils import ConfigError, Fault
from titanlite.verify.gang import Gang

BASE = """
[training]
dataset = "text"
dataset_path = "{folder}/text"
local_batch_size = 2
seq_len = 32
steps = 4
mixed_precision_param = "float32"
[optimizer]
lr = 1e-3
[lr_scheduler]
warmup_steps = 2
total_steps = 12
[job]
dump_folder = "{folder}/outputs"
[activation_checkpoint]
mode = "none"
[checkpoint]
enable = true
interval = 3
[metrics]
log_freq = 1
enable_tensorboard = false
"""
VALIDATE = ("--validation.enable", "--validation.dataset", "stdlib_heldout", "--validation.seq_len", "32")
VALIDATE += ("--validation.steps", "2", "--validation.freq", "4")


def _train(path: str, words: tuple, signalled: tuple[int, int] | None, most_bytes: int | None) -> int | str:
    """Exit code, or the user's mistake. `signalled` (rank, step) gets SIGTERM; no file may have more than `most_bytes`."""
    plain = titanlite.train.train_step
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def train_step(run, *args):
        if signalled == (run.mesh.rank, run.step + 1):
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(run, *args)

    titanlite.train.train_step = train_step
    if most_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, unlimited[1]))
    try:
        return titanlite.train.train(*load_config(path, words))
    except (ConfigError, Fault) as error:
        return str(error)
    finally:
        titanlite.train.train_step = plain
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


@pytest.fixture(scope="module")
def gangs():
    started = {}

    def of(ranks):
        return started.setdefault(ranks, Gang(ranks, timeout_s=120))

    yield of
    for gang in started.values():
        gang.close()


@pytest.fixture(scope="module")
def train_in(gangs):
    """Makes a function that trains run `name` under folder/outputs and returns what all ranks return: an exit code or the
    message of a mistake."""

    def of(folder):
        (folder / "text").mkdir()
        (folder / "text" / "a.txt").write_text("".join(f"line {i}: {i * i}\n" for i in range(4000)))
        (folder / "base.toml").write_text(BASE.format(folder=folder))

        def train(name, *words, ranks=1, signalled=None, most_bytes=None):
            words = ("--job.name", name, *map(str, words))
            (outcome,) = set(gangs(ranks).run(_train, str(folder / "base.toml"), words, signalled, most_bytes))
            return outcome

        train.folder = folder / "outputs"
        return train

    return of


@pytest.fixture
def train(train_in, tmp_path):
    return train_in(tmp_path)


@pytest.fixture(scope="module")
def original(train_in, tmp_path_factory):
    train = train_in(tmp_path_factory.mktemp("finished"))
    assert train("run", ranks=2) == 0
    return train.folder / "run"


@pytest.fixture
def finished(original, train):
    """The folder of a run of 4 steps on two ranks, with checkpoints 3 and 4."""
    return Path(shutil.copytree(original, train.folder / "run"))


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps(folder: Path, first: int = 1) -> list[tuple]:
    """(step, loss, grad_norm, lr, tokens, validation loss) of every logged step, in order."""
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "validation_loss")
    return [tuple(r.get(key) for key in keys) for r in records(folder) if "event" not in r and r["step"] >= first]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and "logs" not in p.parts}


# The run's folder


def test_a_run_leaves_all_that_its_folder_promises(train):
    assert train("run", *VALIDATE, "--metrics.enable_tensorboard", ranks=2) == 0
    folder = train.folder / "run"
    assert sorted(p.name for p in folder.iterdir()) == [
        "checkpoint", "config.toml", "env.json", "lock", "logs", "metrics.jsonl", "tb"
    ]  # fmt: skip
    assert list_steps(folder / "checkpoint") == [3, 4]
    assert sorted(p.name for p in (folder / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
    assert list((folder / "tb").glob("events.out.tfevents.*"))
    assert (folder / "lock").read_text() == ""
    environment = json.loads((folder / "env.json").read_text())
    assert {"titanlite", "git", "python", "packages", "command", "world_size", "degrees"} <= environment.keys()
    assert environment["world_size"] == 2 and "torch" in environment["packages"]
    assert [r.get("event", r.get("step")) for r in records(folder)] == ["start", 1, 2, 3, 4, "done"]
    assert [r["step"] for r in records(folder) if r.get("validation_loss")] == [4]


def test_the_saved_configuration_runs_again_as_it_is(train, gangs):
    assert train("run", "--training.steps", 2) == 0
    saved = train.folder / "run" / "config.toml"
    before = saved.read_text()
    assert load_config(saved)[0].training.steps == 2
    shutil.rmtree(train.folder / "run" / "checkpoint")
    first = steps(train.folder / "run")
    assert gangs(1).run(_train, str(saved), (), None, None) == [0]
    assert saved.read_text() == before
    assert steps(train.folder / "run") == first * 2


def test_steps_are_logged_at_log_freq_and_at_the_first_and_the_last(train):
    train("run", "--metrics.log_freq", 3, "--training.steps", 7)
    assert [s[0] for s in steps(train.folder / "run")] == [1, 3, 6, 7]


# Resuming


@pytest.mark.parametrize("degree, mode", [(1, "disabled"), (1, "async"), (2, "async")], ids=["fsdp", "fsdp, async", "replicate, async"])
def test_a_run_in_two_halves_equals_one_in_one_go_bit_for_bit(train, degree, mode, ranks=2):
    options = (*VALIDATE, "--checkpoint.async_mode", mode, "--parallelism.data_parallel_replicate_degree", degree)
    assert train("one", *options, "--training.steps", 9, ranks=ranks) == 0
    assert train("two", *options, "--training.steps", 5, ranks=ranks) == 0
    assert train("two", *options, "--training.steps", 9, ranks=ranks) == 0
    one, two = steps(train.folder / "one"), steps(train.folder / "two")
    assert len(one) == 9 and one[4][-1] is None and one[7][-1] is not None
    two[4] = (*two[4][:-1], None)  # its first half ended there with a validation
    assert one == two
    assert records(train.folder / "two")[7]["event"] == "resume"


def test_a_run_that_goes_back_to_a_step_repeats_the_rest_and_abandons_later_steps(train, finished):
    first = steps(finished)
    assert train("run", "--training.steps", 5, "--checkpoint.load_step", 3, ranks=2) == 0
    assert steps(finished)[:5] == [*first, first[3]] and len(steps(finished)) == 6
    assert list_steps(finished / "checkpoint") == [3, 5]
    assert [p.name for p in (finished / "checkpoint" / "abandoned").iterdir()] == ["step-4-1"]


def _damage(step: Path) -> None:
    file = max(step.glob("*.distcp"), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_damaged_checkpoint_is_quarantined_and_the_run_goes_on_from_the_one_before_bit_for_bit(train, finished):
    _damage(finished / "checkpoint" / "step-4")
    assert train("run", "--training.steps", 6, ranks=2) == 0
    assert train("straight", "--training.steps", 6, ranks=2) == 0
    assert steps(finished)[4:] == steps(train.folder / "straight", first=4)  # step 4 again, from step 3
    assert (finished / "checkpoint" / "quarantine-step-4-1").is_dir()
    assert "has checksum" in (finished / "checkpoint" / "quarantine-step-4-1.txt").read_text()
    assert list_steps(finished / "checkpoint")[-1] == 6


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew(train, finished):
    for step in (3, 4):
        _damage(finished / "checkpoint" / f"step-{step}")
    for _ in range(2):  # the second time they are quarantined already
        assert "holds checkpoints, and none is as it was written" in train("run", "--training.steps", 6, ranks=2)
    assert [s[0] for s in steps(finished)] == [1, 2, 3, 4]


def test_a_shard_that_is_loaded_as_another_is_found_and_the_step_before_is_loaded_into_a_new_run(train, finished, monkeypatch):
    """Its bytes on disk are right: both ranks take the first one's shard."""
    plain, name, loads = dcp.DefaultLoadPlanner.create_local_plan, "model.layers.0.attention.wq.weight", []

    def create_local_plan(self):
        plan = plain(self)
        loads.append(None)
        for i, item in enumerate(plan.items):
            if len(loads) == 1 and item.dest_index.fqn == name:
                first = dataclasses.replace(item.storage_index, offset=torch.Size([0, 0]), index=0)
                plan.items[i] = dataclasses.replace(item, storage_index=first)
        return plan

    monkeypatch.setattr(dcp.DefaultLoadPlanner, "create_local_plan", create_local_plan)
    fresh = Gang(2)  # it has the patch
    try:
        words = ("--job.name", "run", "--training.steps", "6")
        assert fresh.run(_train, str(train.folder.parent / "base.toml"), words, None, None) == [0, 0]
    finally:
        fresh.close()
    why = (finished / "checkpoint" / "quarantine-step-4-1.txt").read_text()
    assert f"{name} is not what was written, although the files are" in why
    assert train("straight", "--training.steps", 6, ranks=2) == 0
    assert steps(finished)[4:] == steps(train.folder / "straight", first=4)


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2)])
def test_a_run_goes_on_with_the_same_rows_on_another_number_of_ranks(train, before, after):
    """In fp64: sums in another order differ by 1e-15, which AdamW's division may amplify a thousandfold a step."""
    options = ("--training.dtype", "float64", "--training.mixed_precision_param", "float64", "--training.global_batch_size", 4)
    assert train("one", *options, "--training.steps", 9, ranks=before) == 0
    assert train("two", *options, "--training.steps", 5, ranks=before) == 0
    assert train("two", *options, "--training.steps", 9, ranks=after) == 0
    for ours, expected in zip(steps(train.folder / "two"), steps(train.folder / "one"), strict=True):
        assert ours[:1] + ours[3:] == expected[:1] + expected[3:]
        assert ours[1:3] == pytest.approx(expected[1:3], rel=1e-10)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_pipeline_with_tied_embeddings_goes_on_on_one_rank_and_back_and_its_checkpoint_generates(train, schedule):
    """In fp64, as above."""
    options = ("--training.dtype", "float64", "--training.mixed_precision_param", "float64", "--training.global_batch_size", 4, *VALIDATE)
    options += ("--training.local_batch_size", 4, "--model.tie_embeddings", "true")
    pipeline = ("--parallelism.pipeline_parallel_degree", 2, "--parallelism.pipeline_parallel_schedule", schedule)
    assert train("one", *options, "--training.steps", 9) == 0
    assert train("two", *options, *pipeline, "--training.steps", 3, ranks=2) == 0
    assert train("two", *options, "--training.steps", 6) == 0
    assert train("two", *options, *pipeline, "--training.steps", 9, ranks=2) == 0
    found = {s[0]: s for s in steps(train.folder / "two")}
    for expected in steps(train.folder / "one"):
        ours = found[expected[0]]
        assert ours[3:5] == expected[3:5]
        assert ours[1:3] == pytest.approx(expected[1:3], rel=1e-10)
        if expected[5] is not None:
            assert ours[5] == pytest.approx(expected[5], rel=1e-10)
    model, tokenizer, step = load_run(train.folder / "two", None)
    assert step == 9 and model.output.weight is model.tok_embeddings.weight
    assert len(list(generate(model, tokenizer.encode_prompt("line"), max_new_tokens=5, end_id=-1))) == 5


def test_another_number_of_ranks_without_a_fixed_global_batch_is_refused_with_the_size_to_fix(train, finished):
    message = train("run", "--training.steps", 6)
    assert "was written with 4 rows a step, this run has 2" in message and "set training.global_batch_size=4" in message


def test_a_finished_run_says_so_and_changes_nothing_but_can_be_prolonged(train, finished):
    before = tree(finished)
    for n in (4, 2):
        assert train("run", "--training.steps", n, ranks=2) == 0
        assert f"is finished: step 4 of {n}" in (finished / "logs" / "rank_0.log").read_text()
    assert tree(finished) == before
    assert train("run", "--training.steps", 6, ranks=2) == 0
    assert [s[0] for s in steps(finished)] == [1, 2, 3, 4, 5, 6]


def test_uneven_data_that_end_stop_all_ranks_on_one_step_saved_and_can_be_read_once_more(train, tmp_path):
    text = "".join(f"{i}\n" for i in range(4000))  # 19 kB: five documents, so that the first of four rows has two
    (tmp_path / "five.txt").write_text(text)
    options = ("--training.dataset_path", tmp_path / "five.txt", "--training.seq_len", 1024, "--training.global_batch_size", 4)
    options += ("--training.steps", 100, "--lr_scheduler.total_steps", 100)
    assert train("run", *options, "--data.epochs", 1, ranks=2) == 0
    folder = train.folder / "run"
    last = steps(folder)[-1]
    assert last[4] == len(text) + 5 and list_steps(folder / "checkpoint")[-1] == last[0]
    assert f"data_ended step={last[0]} epochs=1" in (folder / "logs" / "rank_0.log").read_text()
    before = tree(folder)
    assert train("run", *options, "--data.epochs", 1) == 0
    assert f"is finished: data.epochs=1 were read at step {last[0]}" in (folder / "logs" / "rank_0.log").read_text()
    assert {k: v for k, v in tree(folder).items() if k not in ("config.toml", "env.json")} == {k: v for k, v in before.items() if k not in ("config.toml", "env.json")}
    assert train("run", *options, "--data.epochs", 2) == 0
    assert steps(folder)[-1][4] == 2 * last[4]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_on_any_rank_stops_all_with_everything_saved_and_the_next_start_goes_on_bit_for_bit(train, rank):
    options = (*VALIDATE, "--validation.freq", 1, "--training.steps", 7)
    assert train("one", *options, ranks=2) == 0
    assert train("two", *options, ranks=2, signalled=(rank, 5)) == 75
    folder = train.folder / "two"
    assert list_steps(folder / "checkpoint")[-1] == 5
    assert records(folder)[-1]["event"] == "stopped" and records(folder)[-2].get("validation_loss") is None
    assert train("two", *options, ranks=2) == 0
    one = steps(train.folder / "one")
    one[4] = (*one[4][:-1], None)  # a run that is asked to stop does not validate first
    assert steps(folder) == one


def test_a_signal_in_the_middle_of_validation_stops_there_with_everything_saved(train, monkeypatch):
    options = (*VALIDATE, "--validation.steps", -1, "--training.steps", 8)
    plain = titanlite.trainer.forward_only
    asked = []

    def forward_only(parts, mesh, *args):
        asked.append(None)
        if mesh.rank == 0 and len(asked) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        assert len(asked) <= 4, "validation goes on"
        return plain(parts, mesh, *args)

    monkeypatch.setattr(titanlite.trainer, "forward_only", forward_only)
    fresh = Gang(2)  # it has the patch
    try:
        words = ("--job.name", "run", *map(str, options))
        assert fresh.run(_train, str(train.folder.parent / "base.toml"), words, None, None) == [75, 75]
    finally:
        fresh.close()
    assert [s[0] for s in steps(train.folder / "run")] == [1, 2, 3, 4]
    assert list_steps(train.folder / "run" / "checkpoint")[-1] == 4


def test_a_signal_at_the_last_step_leaves_a_finished_run(train):
    assert train("run", ranks=2, signalled=(0, 4)) == 0
    assert records(train.folder / "run")[-1]["event"] == "done"


def test_only_the_newest_checkpoints_are_kept(train):
    assert train("run", "--checkpoint.interval", 1, "--checkpoint.keep_latest_k", 2, "--training.steps", 5) == 0
    assert list_steps(train.folder / "run" / "checkpoint") == [4, 5]


def test_a_last_checkpoint_of_the_model_only_cannot_be_trained_on_but_the_one_before_can(train):
    assert train("run", "--checkpoint.last_save_model_only") == 0
    assert "step-4 holds the model only" in train("run", "--training.steps", 6)
    assert train("run", "--training.steps", 6, "--checkpoint.load_step", 3) == 0


def test_a_bpe_tokenizer_is_trained_once_and_a_resume_with_it_is_exact(train):
    options = ("--model.tokenizer", "bpe", "--model.vocab_size", 280)
    assert train("one", *options, "--training.steps", 6, ranks=2) == 0
    assert train("two", *options, "--training.steps", 3, ranks=2) == 0
    file = train.folder / "two" / "tokenizer.json"
    made = file.stat()
    assert train("two", *options, "--training.steps", 6, ranks=2) == 0
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == (made.st_mtime_ns, made.st_ino)
    assert steps(train.folder / "one") == steps(train.folder / "two")


# Refusals


@pytest.mark.parametrize(
    "words, message",
    [
        (("--model.tie_embeddings",), "step-4 holds another model; "),
        (("--model.vocab_size", "300"), "step-4 holds another model; "),
        (("--training.dtype", "bfloat16", "--training.mixed_precision_param", "bfloat16"), "step-4 holds another model; "),
        (("--training.local_batch_size", "4"), "step-4 was written with 4 rows a step, this run has 8"),
        (("--debug.seed", "1"), "step-4 was written with debug.seed=0, this run has 1"),
        (("--training.dataset_path", "{folder}/other.txt"), "step-4 was written while training on other data"),
        (("--checkpoint.load_step", "2"), "checkpoint.load_step=2: {folder}/outputs/run/checkpoint holds 3, 4"),
    ],
)
def test_a_run_of_other_settings_is_refused_and_leaves_the_folder_as_it_was(train, finished, tmp_path, words, message):
    (tmp_path / "other.txt").write_text("other data\n" * 100)
    before = tree(finished)
    words = [word.format(folder=tmp_path) for word in words]
    assert message.format(folder=tmp_path) in train("run", "--training.steps", 6, *words, ranks=2)
    assert tree(finished) == before


def test_a_run_folder_in_use_is_refused_by_name_and_left_alone(train, finished):
    before = tree(finished)
    lock = RunLock(finished)
    lock.acquire()
    try:
        message = train("run", "--training.steps", 6, ranks=2)
    finally:
        lock.release()
    assert message.startswith(f"{train.folder}/run is being written by process {os.getpid()} on ")
    assert tree(finished) == before
    assert train("run", "--training.steps", 6, ranks=2) == 0


@pytest.mark.parametrize(
    "words, message",
    [
        (("--job.dump_folder", "{folder}/text/a.txt"), "cannot write to the run's folder {folder}/text/a.txt/run: Not a directory"),
        (("--training.dataset_path", "nope.txt"), "training.dataset_path=nope.txt: nope.txt: No such file or directory"),
        (("--training.dataset_path", "{folder}/empty"), "training.dataset_path={folder}/empty: no documents: all is empty"),
        (("--training.dataset_path", "{folder}/latin.txt"), "{folder}/latin.txt:2: byte 7 (0xe9) is not UTF-8"),
        (("--training.dataset", "jsonl", "--training.dataset_path", "{folder}/bad.jsonl"), "{folder}/bad.jsonl:2: not JSON"),
        (("--training.dataset_path", "None"), "training.dataset=text needs training.dataset_path"),
        (("--model.vocab_size", "200"), "model.vocab_size=200 is smaller than the tokenizer's 257 tokens: set model.vocab_size=257"),
        (("--training.global_batch_size", "5"), "training.global_batch_size=5 must divide by training.local_batch_size=2 * 2 "
         "data-parallel ranks = 4: use 4 or 8, or -1 for 4"),
        (("--parallelism.data_parallel_shard_degree", "3"), "= 3 ranks, but the world size is 2"),
        (("--training.dataloader.num_workers", "3"), "num_workers=3 must divide the 2 rows that a rank reads a step"),
        ((*VALIDATE, "--validation.dataset", "text", "--validation.dataset_path", "{folder}/empty"), "validation.dataset_path={folder}/empty"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message_on_all_ranks_before_the_first_step(train, tmp_path, words, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").touch()
    (tmp_path / "latin.txt").write_bytes("a line\né".encode("latin-1"))
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"text": \n')
    found = train("run", *(word.format(folder=tmp_path) for word in words), ranks=2)
    assert isinstance(found, str) and message.format(folder=tmp_path) in found
    assert not list(tmp_path.rglob("metrics.jsonl")) and not list(tmp_path.rglob("config.toml"))


def test_a_broken_record_is_skipped_and_counted_where_the_configuration_says_so(train, tmp_path):
    (tmp_path / "some.jsonl").write_text('{"text": "good enough to train on"}\n{"text": \n')
    data = ("--training.dataset", "jsonl", "--training.dataset_path", tmp_path / "some.jsonl")
    assert train("run", *data, "--training.skip_bad_records", ranks=2) == 0
    assert "skipped_records=1" in (train.folder / "run" / "logs" / "rank_0.log").read_text()


def test_a_full_disk_leaves_the_last_good_checkpoint_and_exit_code_1(train):
    assert train("one", "--training.steps", 8, ranks=2) == 0
    assert train("two", "--training.steps", 3, ranks=2) == 0
    assert train("two", "--training.steps", 6, ranks=2, most_bytes=1_000_000) == 1
    folder = train.folder / "two"
    assert [p.name for p in (folder / "checkpoint").iterdir()] == ["step-3"]
    log = (folder / "logs" / "rank_0.log").read_text()
    assert "checkpoint_failed step=6" in log and "its last step is NOT saved" in log
    assert train("two", "--training.steps", 8, ranks=2) == 0
    assert steps(folder)[6:] == steps(train.folder / "one")[3:]


def test_what_has_no_effect_is_told_when_a_run_starts(train):
    base = train.folder.parent / "base.toml"
    base.write_text(base.read_text() + "enable_wandb = false\n")
    assert train("run", "--training.steps", 1) == 0
    assert "metrics.enable_wandb has no effect: metrics go to metrics.jsonl" in (train.folder / "run" / "logs" / "rank_0.log").read_text()


def test_steps_are_traced_as_often_as_asked(train):
    options = ("--profiling.enable_profiling", "--profiling.profile_freq", 3, "--profiling.profiler_warmup", 1, "--checkpoint.no-enable")
    assert train("run", *options, "--training.steps", 7, ranks=2) == 0
    traces = sorted(str(path.relative_to(train.folder / "run")) for path in (train.folder / "run" / "profile_traces").rglob("*.json"))
    assert traces == [f"profile_traces/iteration_{n}/rank{r}_trace.json" for n in (3, 6) for r in (0, 1)]
    events = json.loads((train.folder / "run" / traces[0]).read_text())["traceEvents"]
    assert any(event["name"] == "aten::mm" for event in events)


def test_a_full_disk_costs_traces_but_not_the_run(train):
    options = ("--profiling.enable_profiling", "--profiling.profile_freq", 4, "--metrics.log_freq", 100, "--checkpoint.no-enable")
    assert train("run", *options, most_bytes=20_000) == 0
    assert "profiling_failed" in (train.folder / "run" / "logs" / "rank_0.log").read_text()


def test_a_full_disk_costs_lines_of_metrics_but_not_the_run(train):
    options = ("--checkpoint.no-enable", "--metrics.enable_tensorboard", "--training.steps", 40, "--lr_scheduler.total_steps", 40)
    assert train("run", *options, most_bytes=6000) == 0
    logged = [r["step"] for r in records(train.folder / "run") if "event" not in r]  # whole lines only
    assert logged == sorted(set(logged)) and logged[:6] == [1, 2, 3, 4, 5, 6] and len(logged) < 40  # a shorter line may still fit


def test_a_failed_asynchronous_save_does_not_keep_later_ones_from_being_tried(train):
    assert train("run", "--checkpoint.async_mode", "async", "--training.steps", 7, ranks=2, most_bytes=1_000_000) == 1
    log = (train.folder / "run" / "logs" / "rank_0.log").read_text()
    assert [f".tmp-step-{step} " in log for step in (3, 6, 7)] == [True, True, True]
    assert list((train.folder / "run" / "checkpoint").iterdir()) == []


def test_an_unwritable_tensorboard_folder_is_the_users_mistake(train):
    (train.folder / "run").mkdir(parents=True)
    (train.folder / "run" / "tb").touch()
    assert "cannot write to " in train("run", "--metrics.enable_tensorboard")


@pytest.mark.parametrize("text", ["ab", "a" * 31])
def test_tiny_data_and_rows_of_one_token_train(train, tmp_path, text):
    (tmp_path / "tiny.txt").write_text(text)
    data = ("--training.dataset_path", tmp_path / "tiny.txt", "--training.seq_len", 1, *VALIDATE)
    data += ("--validation.dataset", "text", "--validation.dataset_path", tmp_path / "tiny.txt", "--validation.local_batch_size", 64)
    assert train("run", *data, ranks=2) == 0
    last = steps(train.folder / "run")[-1]
    assert last[4] == 4 * 4 and 0 < last[5] < 8


def test_more_failed_saves_in_a_row_than_allowed_stop_the_run_and_a_good_one_begins_the_count_anew(train):
    assert train("run", "--training.steps", 2) == 0
    options = ("--checkpoint.interval", 1, "--checkpoint.max_failed_saves", 2, "--training.steps", 9)
    message = train("run", *options, most_bytes=100_000)
    assert "checkpoint_failed step=5 failures=3" in message and "more than checkpoint.max_failed_saves=2 in a row" in message
    assert [s[0] for s in steps(train.folder / "run")] == [1, 2, 3, 4, 5]
    assert list_steps(train.folder / "run" / "checkpoint") == [2]
    assert train("run", *options) == 0
    assert [s[0] for s in steps(train.folder / "run")] == [1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9]


def test_data_and_optimizer_can_be_left_out_when_a_run_goes_on(train, finished, tmp_path):
    (tmp_path / "other.txt").write_text("other data\n" * 1000)
    options = ("--training.steps", 6, "--training.dataset_path", tmp_path / "other.txt")
    assert train("run", *options, "--checkpoint.exclude_from_loading", "data", "optimizer", ranks=2) == 0
    assert [s[0] for s in steps(finished)] == [1, 2, 3, 4, 5, 6]
