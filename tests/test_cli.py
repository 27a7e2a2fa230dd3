import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from titanlite import cli
from titanlite.checkpoint.integrity import SCHEMA, seal_manifest
from titanlite.cli import main
from titanlite.config import KEYS, load_config, override, to_toml

DEBUG = str(Path(__file__).parents[1] / "train_configs" / "debug.toml")
COMMANDS = ("train", "config", "verify", "generate")


def run(*argv, capsys) -> tuple[int, str, str]:
    try:
        code = main([str(word) for word in argv])
    except SystemExit as e:  # argparse
        code = e.code
    return code, *capsys.readouterr()


# Help, without torch


def without_torch(program: str) -> str:
    """What `program` prints, in an interpreter that may import neither torch nor numpy."""
    block = """
import sys
class Blocked:
    def find_spec(name, *_):
        assert name not in ("torch", "numpy"), f"{name} is imported"
sys.meta_path.insert(0, Blocked)
"""
    ended = subprocess.run([sys.executable, "-c", block + program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_titanlite_its_configuration_and_its_command_import_no_torch():
    without_torch("import titanlite, titanlite.cli, titanlite.rl.show, titanlite.config, titanlite.launch, titanlite.parallel.degrees")


def test_every_subcommand_has_help_without_torch():
    program = f"""
from titanlite.cli import main
for words in [[], ['-h'], ['--help'], *([command, help] for command in {COMMANDS!r} for help in ('-h', '--help'))]:
    try:
        assert main(words) == 0
    except SystemExit as e:
        assert e.code == 0
    print('== next')
"""
    helps = without_torch(program).split("== next\n")
    assert all(command in helps[0] for command in COMMANDS) and helps[0] == helps[1] == helps[2]
    for i, command in enumerate(COMMANDS):
        short, long = helps[3 + 2 * i : 5 + 2 * i]
        assert short == long and f"usage: titanlite {command}" in short
    assert all(f"--{key}" in helps[3] for key in KEYS if key != "data.sources")  # which only a file has


def test_configuration_mistakes_and_the_configuration_itself_need_no_torch(tmp_path):
    (tmp_path / "bad.toml").write_text("[training]\nstep = 3\n")
    program = f"""
from titanlite.cli import main
assert main(['train', {str(tmp_path / "bad.toml")!r}]) == 2
assert main(['train', {DEBUG!r}, '--nproc', '3', '--parallelism.data_parallel_shard_degree', '2']) == 2
assert main(['config', {DEBUG!r}]) == 0
"""
    without_torch(program)


def test_help_of_a_recipe_shows_its_values_and_starts_nothing(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_torchrun", lambda *_: pytest.fail("a gang was started"))
    for words in (["-h"], ["--help"], ["--nproc", "2", "-h"], ["--nproc=2", "--help"]):
        code, out, _ = run("train", DEBUG, *words, capsys=capsys)
        assert code == 0 and f"(default: {load_config(DEBUG)[0].training.steps})" in out


# titanlite config


def test_config_prints_every_key_its_value_and_where_it_comes_from(tmp_path, capsys):
    (tmp_path / "base.toml").write_text("[optimizer]\nlr = 1e-8\n")
    path = tmp_path / "mine.toml"
    path.write_text('extends = "base.toml"\n[job]\ndescription = "a # \\"b\\""\n')
    code, out, err = run("config", path, "--training.steps", "7", "--checkpoint.enable", capsys=capsys)
    lines = dict(line.split(" = ", 1) for line in out.splitlines())
    assert code == 0 and err == "" and list(lines) == list(KEYS)
    assert lines["optimizer.lr"].split() == ["1e-08", "#", f"{tmp_path}/base.toml:2"]
    assert lines["job.description"].endswith(f'"a # \\"b\\""  # {path}:3'.split("  ")[-1])
    assert lines["training.steps"].split(maxsplit=2) == ["7", "#", "the command line"]
    assert lines["checkpoint.enable"].split(maxsplit=2) == ["true", "#", "the command line"]
    assert lines["model.vocab_size"].split(maxsplit=2) == ["null", "#", "default"]
    assert len({line.rindex("  # ") for line in out.splitlines()}) == 1


# Mistakes


@pytest.mark.parametrize(
    "argv, message",
    [
        (["trian"], "unknown command 'trian': expected one of train, config, verify, generate, checkpoint, import, export, tokenize, rl, rollouts; did you mean 'train'?"),
        (["--nproc", "2"], "unknown command '--nproc'"),
        (["train"], "the TOML file is missing. usage: titanlite train CONFIG.toml"),
        (["train", "--training.steps", "3"], "the TOML file is missing"),
        (["train", "nope.toml"], "cannot read the configuration nope.toml: No such file or directory"),
        (["config"], "the TOML file is missing. usage: titanlite config [--from-torchtitan] CONFIG.toml"),
        (["config", DEBUG, "--training.stepz", "3"], "unknown option --training.stepz; did you mean 'training.steps'?"),
        (["train", DEBUG, "--nproc"], "--nproc: expected a number of processes, at least 1"),
        (["train", DEBUG, "--nproc", "0"], "--nproc 0: expected a number of processes, at least 1"),
        (["train", DEBUG, "--nproc=-1"], "--nproc -1: expected"),
        (["train", DEBUG, "--nproc", "two"], "--nproc two: expected"),
        (["train", DEBUG, "--nproc", "²"], "--nproc ²: expected"),
        (["train", DEBUG, "--nproc", "2", "--nproc", "2"], "unknown option --nproc"),
        (["train", DEBUG, "--nproc", "2", "--parallelism.tensor_parallel_degree", "3"], "parallelism.tensor_parallel_degree=3"),
    ],
)  # fmt: skip
def test_a_mistake_is_answered_before_anything_is_started(monkeypatch, capsys, argv, message):
    monkeypatch.setattr(cli, "_torchrun", lambda *_: pytest.fail("a gang was started"))
    code, out, err = run(*argv, capsys=capsys)
    assert (code, out) == (2, "") and err.startswith(f"titanlite: error: {message}") and "Traceback" not in err


def test_where_a_wrong_key_was_set_is_added(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text("[parallelism]\ndata_parallel_shard_degree = 3\n")
    code, _, err = run("train", path, "--nproc", "2", capsys=capsys)
    assert code == 2 and f"\n  parallelism.data_parallel_shard_degree is set at {path}:2\n" in err


@pytest.mark.parametrize("argv", [["generate"], ["generate", "run", "--step", "x"], ["generate", "run", "--nope"]])
def test_argparse_mistakes_have_exit_code_2_too(capsys, argv):
    code, out, err = run(*argv, capsys=capsys)
    assert code == 2 and out == "" and "error: " in err


# --nproc


@pytest.mark.parametrize(
    "words",
    [[DEBUG, "--nproc", "2", "--training.steps", "3"], [DEBUG, "--training.steps", "3", "--nproc=2"], ["--nproc", "2", DEBUG, "--training.steps", "3"]],
)  # fmt: skip
def test_nproc_may_stand_anywhere_and_is_not_handed_on(monkeypatch, words):
    started = []
    monkeypatch.setattr(cli, "_torchrun", lambda nproc, timeout_s, args: started.append((nproc, timeout_s, args)) or 75)
    assert main(["train", *words]) == 75
    assert started == [(2, 30, ["-m", "titanlite.train", DEBUG, "--training.steps", "3"])]


@pytest.fixture
def gang():
    """The exit code that titanlite makes of two ranks of torchrun, each running a program with `rank` and `code_file`."""
    start = "import os, sys\nrank, code_file = int(os.environ['RANK']), os.environ['TITANLITE_EXIT_CODE_FILE']\n"
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    yield lambda program, timeout_s=30: cli._torchrun(2, timeout_s, ["--no-python", sys.executable, "-c", start + program])
    for number, handler in handlers.items():  # torchrun's stay behind
        signal.signal(number, handler)


def test_a_gangs_exit_code_is_that_of_rank_0_unless_another_rank_failed(gang):
    assert gang("pass") == 0
    # Rank 1 waits, or torchrun might end rank 0, which does not handle its signal here, before it has written.
    wait = "while rank == 1 and not (os.path.exists(code_file) and os.path.getsize(code_file)): pass\n"
    assert gang(f"if rank == 0: open(code_file, 'w').write('75')\n{wait}sys.exit(75)") == 75
    assert gang(f"if rank == 0: open(code_file, 'w').write('0')\n{wait}sys.exit(3 * rank)") == 1
    assert gang("os.kill(os.getpid(), 9)") == 1


def test_a_signalled_gang_gets_twice_the_time_of_its_last_step_and_saves(tmp_path):
    cfg = override(load_config(DEBUG)[0], {"job.dump_folder": str(tmp_path)})
    assert cli.shutdown_timeout_s(cfg) == 30
    folder = tmp_path / "debug" / "checkpoint" / "step-5"
    folder.mkdir(parents=True)
    seal_manifest(folder, {"schema": SCHEMA, "files": {}, "save_s": 40.5})
    assert cli.shutdown_timeout_s(cfg) == 30  # no step is known: this is no run's folder
    (tmp_path / "debug" / "metrics.jsonl").write_text('{"step": 5, "step_time_s": 7.25}\n{"event": "stopped"}\n')
    assert cli.shutdown_timeout_s(cfg) == 10 + 14.5 + 162 + 0.5
    (folder / "MANIFEST.json").write_text("{}")
    assert cli.shutdown_timeout_s(cfg) == 30


@pytest.mark.parametrize("timeout_s, code", [(1, 1), (20, 75)])
def test_a_signalled_gang_has_as_long_to_save_as_its_last_save_took(gang, timeout_s, code):
    """One that is killed leaves no code of its own: a fault."""
    program = """
import signal, time
def save(*_):
    time.sleep(4)
    if rank == 0: open(code_file, 'w').write('75')
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
if rank == 0: os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
"""
    assert gang(program, timeout_s) == code


def test_the_saved_configuration_and_the_printed_one_agree(tmp_path, capsys):
    saved = tmp_path / "config.toml"
    saved.write_text(to_toml(load_config(DEBUG)[0]))
    values = [
        [line.split("  #")[0].strip() for line in run("config", path, capsys=capsys)[1].splitlines()] for path in (DEBUG, saved)
    ]
    assert values[0] == values[1]
    assert json.loads(values[0][0].split(" = ")[1]) == "debug"
