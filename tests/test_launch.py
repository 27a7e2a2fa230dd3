import os
import signal
import time
from pathlib import Path

import pytest

from titanlite import launch
from titanlite.launch import EXIT_CODE_FILE, run_as_command
from titanlite.utils import ConfigError, Fault

DEBUG = str(Path(__file__).parents[1] / "train_configs" / "debug.toml")


@pytest.fixture
def outcome(monkeypatch, tmp_path, capsys):
    """(exit code, stdout, stderr, what rank 0 left for the launcher or None) of a function run as a command."""
    before = signal.getsignal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "another test left its handler"

    def of(fn, *argv, rank=0):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv(EXIT_CODE_FILE, str(tmp_path / "code"))
        code = run_as_command(fn, argv or [DEBUG], "the usage")
        left = (tmp_path / "code").read_text() if (tmp_path / "code").exists() else None
        return code, *capsys.readouterr(), left

    yield of
    signal.signal(signal.SIGTERM, before)


def mistake(cfg, origins):
    raise ConfigError("it does not fit", "training.seq_len", "training.gc_freq")


def test_what_the_function_returns_is_the_exit_code_and_is_left_for_the_launcher(outcome):
    assert outcome(lambda cfg, origins: 75) == (75, "", "", "75")


def test_a_fault_is_told_by_rank_0_without_a_traceback(outcome):
    def fault(cfg, origins):
        raise Fault("the disk is gone")

    assert outcome(fault) == (1, "", "titanlite: error: the disk is gone\n", "1")


def test_a_mistake_is_told_by_rank_0_with_where_its_keys_were_set(outcome):
    code, out, err, left = outcome(mistake)
    assert (code, out, left) == (2, "", "2")
    first, second = err.splitlines()
    assert first == "titanlite: error: it does not fit" and second.startswith(f"  training.seq_len is set at {DEBUG}:")


def test_a_mistake_is_not_told_by_other_ranks_which_leave_rank_0_the_time_to_tell_it(outcome, monkeypatch):
    waited = []
    monkeypatch.setattr(launch.time, "sleep", waited.append)
    assert outcome(mistake, rank=1) == (2, "", "", None)
    assert waited == [10]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # the launcher ends it meanwhile, without a word


def test_a_fault_keeps_its_traceback_and_leaves_1(outcome, tmp_path):
    with pytest.raises(ZeroDivisionError):
        outcome(lambda cfg, origins: 1 // 0)
    assert (tmp_path / "code").read_text() == "1"


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_function_handles_it_ends_with_75_and_one_line(outcome, sent):
    def interrupted(cfg, origins):
        os.kill(os.getpid(), sent)
        time.sleep(30)

    code, out, err, left = outcome(interrupted)
    assert (code, out, left) == (75, "", "75") and len(err.splitlines()) == 1


@pytest.mark.parametrize("argv", [["-h"], ["--help"], [DEBUG, "--help"]])
def test_help_is_printed_by_rank_0_only(outcome, argv):
    code, out, err, _ = outcome(mistake, *argv)
    assert code == 0 and out.startswith("usage: the usage\n") and err == ""
    assert outcome(mistake, *argv, rank=1)[:3] == (0, "", "")
