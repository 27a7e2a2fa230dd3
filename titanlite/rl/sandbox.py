"""Runs code that nobody trusts, in processes of its own that can do nothing but compute: `sandboxed.py` says how."""

import ast
import builtins
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MOST_THREADS = 64
LOOKED_S = 0.05  # between looks at what a process has grown to
START_S = 60


@dataclass(frozen=True)
class Limits:
    seconds: float = 5.0  # from when the code begins
    memory_bytes: int = 512 << 20
    output_bytes: int = 1 << 20


LIMITS = Limits()


@dataclass(frozen=True)
class Ran:
    output: str
    fault: str = ""  # why it did not end by itself and well


def run(code: str, stdin: str = "", limits: Limits = LIMITS, *, errors: bool = False) -> Ran:
    """Runs a program; with `errors` what it writes to stderr is part of the output. Raises RuntimeError where it cannot be locked in."""
    with tempfile.TemporaryFile() as given:
        given.write(stdin.encode())
        given.seek(0)
        process = _start({"mode": "run", "code": code, "shown": errors}, limits, stdin=given)
    return _finished([process], limits)


def hold(code: str, tests: Sequence[str], limits: Limits = LIMITS) -> list[bool]:
    """Whether each test, a piece of Python with asserts, holds for what `code` defines.

    Code and tests run in two processes: what tests call is called over there, and only plain data come back. So no answer sees what is
    expected of it, changes what compares, or ends the tests well. Raises RuntimeError where they cannot be locked in.
    """
    names = sorted({name for test in tests for name in _asked(test)})
    pipes = os.pipe() + os.pipe()
    try:
        ends = (pipes[1], pipes[2]), (pipes[0], pipes[3])  # (requests, answers) of each
        jobs = {"mode": "check", "tests": list(tests), "names": names, "shown": False}, {"mode": "serve", "code": code, "names": names, "shown": False}
        processes = [_start(job, limits, fds=fds) for job, fds in zip(jobs, ends)]
    finally:
        for fd in pipes:
            os.close(fd)
    said = _finished(processes, limits).output
    return [said[i : i + 1] == "1" for i in range(len(tests))]


def _asked(test: str) -> set[str]:
    """Names that a test uses and which neither it nor Python defines. Raises SyntaxError."""
    nodes = list(ast.walk(ast.parse(test)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    made = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    made |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.ExceptHandler))} | {node.arg for node in nodes if isinstance(node, ast.arg)}
    return names - made - set(dir(builtins))


def _start(job: dict, limits: Limits, *, stdin: object = subprocess.DEVNULL, fds: tuple[int, ...] = ()) -> subprocess.Popen:
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(job).encode())
        file.seek(0)
        numbers = (file.fileno(), *(fds or (-1, -1)), os.getpid(), limits.memory_bytes, int(limits.seconds) + 1)
        script = str(Path(__file__).with_name("sandboxed.py"))
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", script, *map(str, numbers)], env={}, cwd="/", start_new_session=True,
            pass_fds=(file.fileno(), *fds), stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip


def _finished(processes: list[subprocess.Popen], limits: Limits) -> Ran:
    """What the first of them says until it ends. None is left after."""
    said, end, began, fault = [b""] * len(processes), time.monotonic() + START_S, False, ""
    try:
        with selectors.DefaultSelector() as selector:
            for i, process in enumerate(processes):
                selector.register(process.stdout, selectors.EVENT_READ, i)
            while not fault and processes[0].stdout in (key.fileobj for key in selector.get_map().values()):
                for key, _ in selector.select(LOOKED_S):
                    piece = os.read(key.fd, 1 << 16)
                    said[key.data] += piece
                    if not piece:
                        selector.unregister(key.fileobj)
                if not began and all(said):
                    end, began = time.monotonic() + limits.seconds, True
                fault = _too_much(processes, said, end, limits)
        if not fault:
            code = processes[0].wait(max(end - time.monotonic(), 0))
            fault = f"exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        fault = f"more than {limits.seconds:g} s"
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()
    for text in said:
        if text[:1] != b"+":
            why = text.decode(errors="replace").strip()[-300:] or fault
            raise RuntimeError(f"no sandbox, which needs seccomp and Landlock (Linux 5.13) on x86_64 or aarch64: {why}")
    return Ran(said[0][1 : 1 + limits.output_bytes].decode(errors="replace"), fault)


def _too_much(processes: list[subprocess.Popen], said: list[bytes], end: float, limits: Limits) -> str:
    if time.monotonic() > end:
        return f"more than {limits.seconds:g} s"
    if max(map(len, said)) > limits.output_bytes + 1:
        return f"more output than {limits.output_bytes} bytes"
    for process in processes:
        try:
            if len(os.listdir(f"/proc/{process.pid}/task")) > MOST_THREADS:
                return f"more than {MOST_THREADS} threads"
        except FileNotFoundError:  # it has ended
            continue
    return ""
