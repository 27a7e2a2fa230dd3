"""The process that runs code nobody trusts: python -I -S -B sandboxed.py, which `sandbox.py` starts. It imports no titanlite.

Before the code begins, the process has given up for good everything but its memory, the files of Python and the pipes that it was
given: Landlock leaves it nothing else to read, and seccomp no system call that is not listed here: no socket, no process, no
signal, no other program, no file to write.
"""

import ast
import builtins
import ctypes
import io
import json
import os
import resource
import signal
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterator, MappingView

# System calls: (number on x86_64, on aarch64); None where there is none.
CALLS = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "newfstatat": (262, 79), "stat": (4, None), "lstat": (6, None),
    "lseek": (8, 62), "pread64": (17, 67), "readv": (19, 65), "writev": (20, 66), "access": (21, None), "faccessat": (269, 48), "statx": (332, 291),
    "getdents64": (217, 61), "readlink": (89, None), "readlinkat": (267, 78), "getcwd": (79, 17), "dup": (32, 23), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216), "madvise": (28, 233), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132), "restart_syscall": (219, 128), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169), "times": (100, 153),
    "getrusage": (98, 165), "sysinfo": (99, 179), "uname": (63, 160), "getpid": (39, 172), "gettid": (186, 178), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293),
    "getrandom": (318, 278), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
CLONE, OPENAT = (56, 220), (257, 56)  # of threads; for reading
CLONE_THREAD, WRITES = 0x10000, os.O_ACCMODE | os.O_CREAT | os.O_TRUNC
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # AUDIT_ARCH_*

libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _read_only_python() -> None:
    """Landlock (kernel.org/doc/html/latest/userspace-api/landlock.html): nothing can be opened but Python's and the system's libraries."""
    create, add, restrict = 444, 445, 446  # on every architecture
    rights = struct.pack("Q", (1 << 13) - 1)  # every right of the first version; seccomp stops what later ones would
    ruleset = _checked(libc.syscall(create, rights, len(rights), 0), "landlock_create_ruleset")
    for path in {sys.base_prefix, sys.base_exec_prefix, "/usr", "/lib", "/lib64", "/dev/urandom", "/dev/null"}:
        if os.path.exists(path):
            handle = os.open(path, os.O_PATH)
            rule = struct.pack("=Qi", 0b1100 if os.path.isdir(path) else 0b0100, handle)  # READ_FILE, READ_DIR
            _checked(libc.syscall(add, ruleset, 1, rule, 0), "landlock_add_rule")
            os.close(handle)
    _checked(libc.syscall(restrict, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _few_calls() -> None:
    """A seccomp filter (seccomp(2), mode SECCOMP_SET_MODE_FILTER): a call that is not listed is answered ENOSYS."""
    which, architecture = ARCHITECTURES[os.uname().machine]
    load, equal, all_bits, answer = 0x20, 0x15, 0x54, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_ALU|AND|K, BPF_RET|K
    allow, refuse, kill = 0x7FFF0000, 0x00050000 | 38, 0x80000000  # ERRNO ENOSYS: C libraries then try what is allowed
    number, argument = 0, lambda i: 16 + 8 * i  # offsets in seccomp_data; low words
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, kill), (load, 0, 0, number)]
    for numbers in CALLS.values():
        if numbers[which] is not None:
            program += [(equal, 0, 1, numbers[which]), (answer, 0, 0, allow)]
    for (call, at, bits, wanted) in ((CLONE, 0, CLONE_THREAD, CLONE_THREAD), (OPENAT, 2, WRITES, os.O_RDONLY)):
        program += [(equal, 0, 5, call[which]), (load, 0, 0, argument(at)), (all_bits, 0, 0, bits), (equal, 0, 1, wanted), (answer, 0, 0, allow), (answer, 0, 0, refuse)]
    program += [(answer, 0, 0, refuse)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    filter_ = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    _checked(libc.prctl(22, 2, filter_, 0, 0), "PR_SET_SECCOMP")


def locked(parent: int, memory_bytes: int, cpu_s: int) -> None:
    """Gives up what the module's docstring says. Raises OSError, KeyError where this machine has no such lock."""
    libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_ulong]
    libc.prctl(1, signal.SIGKILL, None, 0, 0)  # PR_SET_PDEATHSIG: it ends with whoever waits for it
    if os.getppid() != parent:
        os._exit(1)
    limits = {"CORE": 0, "FSIZE": 0, "NOFILE": 64, "AS": memory_bytes, "CPU": cpu_s}
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    _checked(libc.prctl(38, 1, None, 0, 0), "PR_SET_NO_NEW_PRIVS")
    _read_only_python()
    _few_calls()


def _plain(value: object, kept: list) -> list:
    """What goes through a pipe for it: plain data as they are, of anything else that it is object number n of `kept`."""
    if value is None or isinstance(value, (bool, int, str, bytes)):
        return ["value", repr(value)]
    if isinstance(value, (float, complex)):  # with infinities, which are no literals
        return ["number", str(value)]
    if isinstance(value, dict):
        return ["dict", [[_plain(k, kept), _plain(v, kept)] for k, v in value.items()]]
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [_plain(item, kept) for item in value]]
    if isinstance(value, (list, deque, range, Iterator, MappingView)):
        return ["list", [_plain(item, kept) for item in value]]
    kept.append(value)
    return ["kept", len(kept) - 1]


def _value(sent: list, kept_as: Callable) -> object:
    """The other way round. `kept_as(n)` is what stands for the other side's, or is, object n."""
    kind, data = sent
    if kind == "value":
        return ast.literal_eval(data)
    if kind == "number":
        return complex(data) if "j" in data else float(data)
    if kind == "dict":
        return {_value(k, kept_as): _value(v, kept_as) for k, v in data}
    if kind == "kept":
        return kept_as(data)
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](_value(item, kept_as) for item in data)


class Theirs:
    """An object of the other process: it can be called and asked for its attributes, and is equal to nothing."""

    def __init__(self, ask, number: int):
        self.__dict__.update(_ask=ask, _number=number)

    def __call__(self, *args, **kwargs):
        return self._ask("call", self._number, args, kwargs)

    def __getattr__(self, name: str):
        return self._ask("attribute", self._number, (name,), {})

    def __bool__(self):
        raise TypeError("neither true nor false: no plain data")


def serve(code: str, names: list[str], requests: io.TextIOBase, answers: io.TextIOBase) -> None:
    """Runs `code`; then does what `check` asks for, with what the code named. It may answer whatever it likes: it has never seen what is expected."""
    space = {"__name__": "answer"}
    exec(compile(code, "<answer>", "exec"), space)
    kept = [space.get(name) for name in names]
    answers.write("ready\n")
    answers.flush()
    for line in requests:
        what, number, args, kwargs = json.loads(line)
        try:
            args, kwargs = _value(args, kept.__getitem__), _value(kwargs, kept.__getitem__)
            said = _plain(getattr(kept[number], *args) if what == "attribute" else kept[number](*args, **kwargs), kept)
        except Exception as error:
            said = ["raised", type(error).__name__]
        answers.write(json.dumps(said) + "\n")
        answers.flush()


def check(tests: list[str], names: list[str], requests: io.TextIOBase, answers: io.TextIOBase) -> Iterator[bool]:
    """Whether each test holds. They run here, where the code under test is not: `names` are asked of the process that has it."""

    def ask(what: str, number: int, args: tuple, kwargs: dict) -> object:
        mine = []
        message = json.dumps([what, number, _plain(args, mine), _plain(kwargs, mine)])
        if mine:
            raise TypeError("only plain data can be passed to the code under test")
        requests.write(message + "\n")
        requests.flush()
        said = json.loads(answers.readline())
        if said[0] == "raised":
            kind = getattr(builtins, str(said[1]), None)
            raise kind("of the code under test") if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError(said[1])
        return _value(said, lambda n: Theirs(ask, n))

    space = {"__name__": "tests"}
    for number, name in enumerate(names):
        space[name] = __import__(name) if name in sys.stdlib_module_names else Theirs(ask, number)
    alive = answers.readline() == "ready\n"
    for test in tests if alive else ():
        try:
            exec(compile(test, "<test>", "exec"), space)
            held = True
        except BaseException:  # SystemExit too
            held = False
        yield held


def main() -> None:
    job_fd, request_fd, answer_fd, parent, memory_bytes, cpu_s = map(int, sys.argv[1:])
    with open(job_fd) as file:
        job = json.load(file)
    asks = job["mode"] == "check"
    if request_fd >= 0:
        requests, answers = os.fdopen(request_fd, "w" if asks else "r"), os.fdopen(answer_fd, "r" if asks else "w")
    sys.set_int_max_str_digits(0)
    locked(parent, memory_bytes, cpu_s)
    os.write(1, b"+")  # all that follows is the code's own doing
    if not job["shown"]:
        sys.stderr = io.StringIO()
    if job["mode"] == "run":
        exec(compile(job["code"], "<answer>", "exec"), {"__name__": "__main__"})
        return
    sys.stdout = io.StringIO()
    if asks:
        for held in check(job["tests"], job["names"], requests, answers):
            os.write(1, b"1" if held else b"0")
    else:
        serve(job["code"], job["names"], requests, answers)


if __name__ == "__main__":
    main()
