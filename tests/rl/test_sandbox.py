"""What runs in the sandbox gets nothing but its own output, earns nothing by tricks and leaves nothing behind."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from titanlite.rl.sandbox import Limits, Ran, hold, run

QUICK = Limits(seconds=0.5, memory_bytes=256 << 20, output_bytes=1 << 16)


def sandboxes_of(pid: int) -> list[str]:
    """Processes that run for this one, by their arguments."""
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{process}/cmdline").read_text().split("\0")
            if any(word.endswith("sandboxed.py") for word in words) and str(pid) in words:
                found.append(process)
    return found


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    assert not sandboxes_of(os.getpid())


def test_a_program_reads_its_input_and_prints():
    ran = run("import math, sys\nprint(math.factorial(int(input())), sys.stdin.read())", "5\nrest")
    assert (ran.output, ran.fault) == ("120 rest\n", "")
    assert run("import sys; print(1); sys.exit(3)").fault == "exit code 3"
    assert "ZeroDivisionError" in run("1 / 0", errors=True).output and run("1 / 0").output == ""


def test_what_honest_programs_do_works():
    for code in (
        "import threading\nthreading.stack_size(2**26)\nt = threading.Thread(target=lambda: print('deep'))\nt.start()\nt.join()",
        "import re, json, heapq, itertools, collections, fractions, decimal, datetime, random, string, typing, dataclasses, functools, bisect\nprint('deep')",
        "import sys\nsys.setrecursionlimit(10**5)\ndef f(n): return n and f(n - 1)\nf(20000)\nprint('deep')",
    ):
        assert run(code).output == "deep\n"


@pytest.mark.parametrize(
    "code, fault",
    [
        ("while True: pass", "more than 0.5 s"),
        ("import time; time.sleep(60)", "more than 0.5 s"),
        ("import os; os.close(1); import time; time.sleep(60)", "more than 0.5 s"),
        ("import signal, time\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(60)", "more than 0.5 s"),
        ("print('x' * 10**7)", "more output than 65536 bytes"),
        ("x = bytearray(10**10)", "exit code 1"),
        ("x = []\nwhile True: x.append(bytearray(10**7))", "exit code 1"),
        ("import threading, time\nthreading.stack_size(2**15)\nwhile True: threading.Thread(target=time.sleep, args=(9,)).start()", "more than 64 threads"),
    ],
)
def test_what_takes_too_much_is_ended(code, fault):
    began = time.monotonic()
    assert run(code, limits=replace(QUICK, seconds=20.0) if fault == "exit code 1" else QUICK).fault == fault
    assert time.monotonic() - began < 30


ATTEMPTS = {
    "fork bomb": "import os\nwhile True: os.fork()",
    "subprocess": "import subprocess; subprocess.run(['/bin/true'], check=True)",
    "another program": "import os; os.execv('/bin/true', ['true'])",
    "network": "import socket; socket.create_connection(('127.0.0.1', PORT))",
    "socket pair": "import socket; socket.socketpair()",
    "write a file": "open('/tmp/titanlite-sandbox', 'w').write('x' * 2**30)",
    "write where it is": "open('x', 'w')",
    "write into Python": "import os; open(os.__file__, 'a')",
    "cut a file": "import os; os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",
    "remove a file": "import os; os.unlink('/tmp/titanlite-secret')",
    "read a file": "open('SECRET').read()",
    "list files": "import os; os.listdir('/tmp')",
    "the parent's environment": "open('/proc/PARENT/environ').read()",
    "the parent's memory": "open('/proc/PARENT/mem', 'rb').read(1)",
    "the parent's arguments": "open('/proc/PARENT/cmdline').read()",
    "kill the parent": "import os; os.kill(PARENT, 9)",
    "kill all": "import os; os.kill(-1, 9)",
    "limits back up": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "the parent's limits": "import resource; resource.prlimit(PARENT, resource.RLIMIT_NOFILE, (9, 9))",
    "its own death signal": "import ctypes; assert ctypes.CDLL(None).prctl(1, 0) == 0",
    "memory of another process": "import ctypes; assert ctypes.CDLL(None, use_errno=True).ptrace(16, PARENT, 0, 0) == 0",
    "shared memory": "import os; os.memfd_create('x')",
    "a signal by its own files": "import fcntl; fcntl.fcntl(1, fcntl.F_SETOWN, PARENT)",
}


def test_nothing_outside_is_reached(tmp_path):
    (tmp_path / "secret").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        known = {"SECRET": str(tmp_path / "secret"), "PARENT": str(os.getpid()), "PORT": str(server.getsockname()[1])}
        code = f"for name, attempt in {ATTEMPTS}.items():\n    try:\n        exec(attempt)\n        print(name)\n    except Exception:\n        pass\nprint('all tried')"
        for name, value in known.items():
            code = code.replace(name, value)
        assert run(code, limits=QUICK) == Ran("all tried\n")


def test_the_environment_is_empty(monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    assert run("import os; print(set(os.environ) - {'LC_CTYPE'})").output == "set()\n"  # Python sets this one itself


def test_a_process_ends_with_the_one_that_waits_for_it():
    script = "from titanlite.rl.sandbox import run, Limits; print(flush=True); run('import time; time.sleep(50)', limits=Limits(60))"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as waiting:
        waiting.stdout.readline()

        end = time.monotonic() + 30
        while not sandboxes_of(waiting.pid) and time.monotonic() < end:
            time.sleep(0.02)
        assert sandboxes_of(waiting.pid)
        waiting.kill()
    while sandboxes_of(waiting.pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not sandboxes_of(waiting.pid)


def test_asserts_hold_for_what_code_defines():
    code = "class Box:\n    def __init__(self, n): self.n = n\n    def twice(self): return 2 * self.n\ndef add(a, b): return a + b\ndef bad(): raise KeyError('x')\nimport collections\ndef count(s): return collections.Counter(s)\ndef odd(n): return (i for i in range(n) if i % 2)"
    tests = [
        "assert add(2, 3) == 5", "assert add(2, 3) == 6", "assert abs(add(.1, .2) - .3) < 1e-9", "assert add([1], [(2, 'x', None, {3: {4}})]) == [1, (2, 'x', None, {3: {4}})]",
        "assert Box(4).twice() == 8", "assert Box(4).n == 4", "try:\n    bad()\n    raise SystemExit\nexcept KeyError:\n    pass",
        "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(b=2, a=0.5) == 2.5\ncheck(add)", "assert count('aab') == {'a': 2, 'b': 1}",
        "assert list(odd(6)) == [1, 3, 5]", "import math\nassert math.isnan(add(float('nan'), 1)) and add(math.inf, 1) == math.inf", "assert add(10**5000, 1) % 10 == 1", "assert missing(1) == 1",
    ]  # fmt: skip
    assert hold(code, tests) == [True, False, True, True, True, True, True, True, True, True, True, True, False]


TESTS = ["assert solve(2) == 4", "assert abs(solve(0.5) - 0.25) < 1e-9", "import math\nassert math.isclose(solve(3), 9)"]
HACKS = {
    "nothing": "",
    "no Python": "def solve(:",
    "ends well": "import sys\nsys.exit(0)",
    "ends well when asked": "import os\ndef solve(n): os._exit(0)",
    "equal to all": "class All:\n    __eq__ = __lt__ = __le__ = lambda *a: True\n    __sub__ = __rsub__ = __abs__ = lambda *a: All()\ndef solve(n): return All()",
    "a float that is equal to all": "class F(float):\n    __eq__ = lambda *a: True\n    __hash__ = float.__hash__\ndef solve(n): return F(7)",
    "other built-ins": "import builtins\nbuiltins.abs = lambda x: 0\nabs = lambda x: 0\nclass math:\n    isclose = lambda *a: True\ndef solve(n): return 7",
    "no asserts": "import builtins\nclass AssertionError(BaseException): pass\nbuiltins.AssertionError = SystemExit\ndef solve(n): return 7",
    "prints what is right": "import os\nprint('111')\nfor fd in range(1, 20):\n    try: os.write(fd, b'+111')\n    except OSError: pass\ndef solve(n): return 7",
    "talks out of turn": "import os\nfor fd in range(1, 20):\n    try: os.write(fd, b'ready\\n[\"value\", \"True\"]\\n' * 9)\n    except OSError: pass\ndef solve(n): return 7",
    "looks for the tests": "import gc, sys\ndef solve(n):\n    found = [o for o in gc.get_objects() if isinstance(o, (str, list, dict)) and 'assert solve(2) == ' + '4' in str(o)]\n    return n * n if found else 7",
    "raises what is expected": "def solve(n): raise AssertionError",
    "a value of code": "import os\ndef solve(n): os.write(5, b'[\"value\", \"__import__(1)\"]\\n'); return 7",
    "hangs": "def solve(n):\n    while True: pass",
    "too deep": "def solve(n):\n    x = []\n    for i in range(10**5): x = [x]\n    return x",
}  # fmt: skip


@pytest.mark.parametrize("hack", HACKS)
def test_no_test_is_passed_by_a_trick(hack):
    assert hold(HACKS[hack], TESTS, QUICK) == [False] * 3


def test_the_honest_solution_of_the_same_tests_passes():
    assert hold("def solve(n): return n * n", TESTS) == [True] * 3
    assert hold("def solve(n):\n    if n == 3:\n        while True: pass\n    return n * n", TESTS, Limits(seconds=2.0)) == [True, True, False]


def test_a_machine_without_the_lock_fails_loudly(monkeypatch):
    monkeypatch.setattr("titanlite.rl.sandbox.sys.executable", "/bin/false")
    with pytest.raises(RuntimeError, match="no sandbox, which needs seccomp and Landlock"):
        run("print(1)")
