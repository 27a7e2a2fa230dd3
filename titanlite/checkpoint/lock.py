"""One writer a run: a lock file in the run's folder, which a killed owner never leaves locked."""

import errno
import fcntl
import json
import os
import socket
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

from titanlite.utils import ConfigError, logger

HEARTBEAT_S = 10


class RunLock:
    """Taken by rank 0 before the run's folder is touched, and held to the end.

    It is a POSIX record lock, which forked children do not inherit: with flock, the data workers of a killed owner
    would go on holding it. It is lost when this process closes ANY descriptor of the file, so nothing else may open it.
    On a network file system it may not reach other hosts. So the owner also touches the file, and a start that finds
    another host's name in it watches for `patience_s` whether the file moves.
    """

    def __init__(self, run_dir: Path, *, patience_s: float = 60):
        self.path = Path(run_dir) / "lock"
        self.patience_s = patience_s
        self._fd: int | None = None
        self._released = threading.Event()
        self._heartbeat = threading.Thread(target=self._beat, name="run-lock", daemon=True)

    def acquire(self) -> None:
        """Raises ConfigError if another process holds the run, or if the file cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                self._claim()
            except BaseException:
                self._close()
                raise
        except OSError as error:
            raise ConfigError(
                f"cannot write {self.path}: {error.strerror}; choose another --job.dump_folder", "job.dump_folder"
            ) from error
        self._heartbeat.start()

    def release(self) -> None:
        """Does nothing if the lock is not held."""
        if self._fd is not None:
            self._released.set()
            self._heartbeat.join()
            # Not deleted: one start could lock the deleted file while another makes a new one.
            os.ftruncate(self._fd, 0)
            self._close()

    def _close(self) -> None:
        os.close(self._fd)
        self._fd = None

    def _claim(self) -> None:
        locked, host = True, socket.gethostname()
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise self._refusal() from error
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            locked = False  # the file system has no locks
        if owner := self._owner():
            gone = owner["host"] == host and (locked or not _is_running(owner["pid"]))
            if not gone and self._moves():
                raise self._refusal()
            logger.info(f"run_lock=taken_over previous_host={owner['host']} previous_pid={owner['pid']}")
        me = {"host": host, "pid": os.getpid(), "started": datetime.now(UTC).isoformat(timespec="seconds")}
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(me).encode(), 0)
        os.fsync(self._fd)

    def _owner(self) -> dict | None:
        try:
            owner = json.loads(os.pread(self._fd, 4096, 0))
            return {key: owner[key] for key in ("host", "pid", "started")}
        except (ValueError, KeyError, TypeError):  # released, or killed while it wrote its name
            return None

    def _moves(self) -> bool:
        first, end = os.fstat(self._fd).st_mtime_ns, time.monotonic() + self.patience_s
        while time.monotonic() < end:
            time.sleep(min(1, self.patience_s / 10))
            if os.fstat(self._fd).st_mtime_ns != first:
                return True
        return False

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_S):
            os.utime(self._fd)

    def _refusal(self) -> ConfigError:
        owner = self._owner()
        who = "process {pid} on {host} since {started}".format_map(owner) if owner else "another process"
        return ConfigError(
            f"{self.path.parent} is being written by {who}: "
            "stop that process, or give this run another --job.name or --job.dump_folder",
            "job.name",
            "job.dump_folder",
        )


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True
