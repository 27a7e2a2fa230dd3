import errno
import fcntl
import json
import multiprocessing
import os
import signal
import socket
import threading
import time

import pytest

from titanlite.checkpoint import lock
from titanlite.checkpoint.lock import RunLock
from titanlite.utils import ConfigError


def start_owner(run_dir, *, with_child=False):
    """A process that holds the lock -> (process, pid of the child it forked while holding it)."""
    ours, theirs = multiprocessing.Pipe()

    def own():
        RunLock(run_dir).acquire()
        child = os.fork() if with_child else None
        if child == 0:
            time.sleep(60)
            os._exit(0)
        theirs.send(child)
        time.sleep(60)

    process = multiprocessing.get_context("fork").Process(target=own)
    process.start()
    assert ours.poll(20)
    return process, ours.recv()


def kill(process):
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def write_owner(run_dir, **owner):
    run_dir.mkdir(exist_ok=True)
    (run_dir / "lock").write_text(json.dumps({"host": "elsewhere", "pid": 7, "started": "2026-01-02T03:04:05"} | owner))


def keep_touching(path):
    stop = threading.Event()

    def touch():
        while not stop.wait(0.02):
            os.utime(path)

    threading.Thread(target=touch, daemon=True).start()
    return stop


def test_a_second_process_is_refused_with_the_name_of_the_first(tmp_path):
    owner, _ = start_owner(tmp_path / "run")
    try:
        second = RunLock(tmp_path / "run")
        with pytest.raises(ConfigError) as refusal:
            second.acquire()
        second.release()
    finally:
        kill(owner)
    assert json.loads((tmp_path / "run" / "lock").read_text())["pid"] == owner.pid
    for part in (
        str(tmp_path / "run"),
        f"process {owner.pid} on {socket.gethostname()}",
        "--job.name",
        "--job.dump_folder",
    ):
        assert part in str(refusal.value)


def test_a_killed_owner_does_not_block_the_next_start(tmp_path):
    owner, _ = start_owner(tmp_path)
    kill(owner)
    run_lock = RunLock(tmp_path)  # patience 60 s: this test would not end in time if it were needed
    run_lock.acquire()
    run_lock.release()


def test_a_child_of_a_killed_owner_does_not_block_the_next_start(tmp_path):
    owner, child = start_owner(tmp_path, with_child=True)
    kill(owner)
    try:
        os.kill(child, 0)
        run_lock = RunLock(tmp_path)
        run_lock.acquire()
        run_lock.release()
    finally:
        os.kill(child, signal.SIGKILL)


def test_release_empties_the_file_and_lets_the_next_process_in(tmp_path):
    run_lock = RunLock(tmp_path)
    run_lock.acquire()
    run_lock.release()
    assert (tmp_path / "lock").read_text() == ""
    kill(start_owner(tmp_path)[0])


def test_an_owner_on_another_host_that_no_longer_touches_the_file_is_replaced(tmp_path):
    write_owner(tmp_path)
    run_lock = RunLock(tmp_path, patience_s=0.2)
    run_lock.acquire()
    assert json.loads(os.pread(run_lock._fd, 4096, 0))["pid"] == os.getpid()
    run_lock.release()


def test_an_owner_on_another_host_that_touches_the_file_is_respected(tmp_path):
    write_owner(tmp_path)
    stop = keep_touching(tmp_path / "lock")
    with pytest.raises(ConfigError, match="process 7 on elsewhere since 2026-01-02T03:04:05"):
        RunLock(tmp_path, patience_s=20).acquire()
    stop.set()
    assert json.loads((tmp_path / "lock").read_text())["host"] == "elsewhere"


def test_the_owner_touches_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.02)
    run_lock = RunLock(tmp_path)
    run_lock.acquire()
    before, deadline = os.stat(run_lock.path).st_mtime_ns, time.monotonic() + 20
    while os.stat(run_lock.path).st_mtime_ns == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert os.stat(run_lock.path).st_mtime_ns != before
    run_lock.release()


def test_without_file_locks_a_dead_process_is_replaced_and_a_live_one_respected(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    ended = multiprocessing.get_context("fork").Process(target=int)
    ended.start()
    ended.join()
    write_owner(tmp_path, host=socket.gethostname(), pid=ended.pid)
    run_lock = RunLock(tmp_path)
    run_lock.acquire()
    run_lock.release()

    write_owner(tmp_path, host=socket.gethostname(), pid=os.getppid())
    stop = keep_touching(tmp_path / "lock")
    with pytest.raises(ConfigError, match=f"process {os.getppid()}"):
        RunLock(tmp_path, patience_s=20).acquire()
    stop.set()


def test_a_file_of_junk_is_taken_over(tmp_path):
    (tmp_path / "lock").write_text('{"host": ')
    run_lock = RunLock(tmp_path)
    run_lock.acquire()
    run_lock.release()


def test_a_folder_that_cannot_be_written_is_the_users_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"{tmp_path / 'file' / 'run' / 'lock'}.*--job.dump_folder"):
        RunLock(tmp_path / "file" / "run").acquire()


def test_a_full_disk_is_the_users_error_and_leaves_the_run_free(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(ConfigError, match=f"{tmp_path / 'lock'}: No space left"):
            RunLock(tmp_path).acquire()
    kill(start_owner(tmp_path)[0])
