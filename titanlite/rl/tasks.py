"""What a policy is asked, and what its answers are worth. A problem is a pure function of (seed, its number). No torch: rewards run elsewhere."""

import importlib
import random
import re
import zlib
from dataclasses import dataclass
from typing import Any, Protocol

from titanlite.rl.answers import NUMBER, final_number
from titanlite.utils import ConfigError, nearest


@dataclass(frozen=True)
class Problem:
    prompt: str
    answer: Any  # what a verifier needs; plain data
    source: str  # metrics are told for each


class Task(Protocol):
    def problem(self, number: int) -> Problem: ...

    def held_out(self, number: int) -> Problem:
        """Of problems to be judged by."""

    def demonstration(self, number: int) -> list[str]:
        """The turns of a sample that answers `problem(number)`: for steps that teach the format before."""

    def reward(self, problem: Problem, answer: str) -> float:
        """What a sample's text, its turns and the replies to them, is worth. Runs in a process that may be killed; whatever it raises is a failure, not a 0."""

    def reply(self, problem: Problem, answer: str) -> str | None:
        """What a tool says to a sample's text so far, whose turn has just ended; None where the sample has ended with it."""


class Arithmetic:
    """`17+5=` and the sum, or the difference, of numbers with up to `digits` digits; the answer is what stands before the first space or end.

    Demonstrations are wrong as often as `noise` says: a policy that learns from them has something left to learn.
    """

    def __init__(self, seed: int, *, digits: int = 1, noise: float = 0.0):
        self.seed, self.digits, self.noise = seed, digits, noise

    def problem(self, number: int | str) -> Problem:
        draw = random.Random(f"{self.seed}/{number}")
        a, b = (draw.randrange(10**self.digits) for _ in range(2))
        if draw.random() < 0.5:
            return Problem(f"{a}+{b}=", str(a + b), "sum")
        return Problem(f"{max(a, b)}-{min(a, b)}=", str(max(a, b) - min(a, b)), "difference")

    def held_out(self, number: int) -> Problem:
        return self.problem(f"held out {number}")

    def demonstration(self, number: int) -> list[str]:
        draw = random.Random(f"{self.seed}/{number}/shown")
        return [str(draw.randrange(2 * 10**self.digits - 1)) if draw.random() < self.noise else self.problem(number).answer]

    def reward(self, problem: Problem, answer: str) -> float:
        return float(answer.strip() == problem.answer)

    def reply(self, problem: Problem, answer: str) -> None:
        return None


class Sorting:
    """`sort 3 1 2:` and the numbers in order; the reward is the share of places that are right."""

    def __init__(self, seed: int, *, length: int = 4):
        self.seed, self.length = seed, length

    def problem(self, number: int | str) -> Problem:
        draw = random.Random(f"{self.seed}/{number}")
        numbers = [draw.randrange(10) for _ in range(self.length)]
        return Problem(f"sort {' '.join(map(str, numbers))}: ", sorted(numbers), "sorting")

    def held_out(self, number: int) -> Problem:
        return self.problem(f"held out {number}")

    def demonstration(self, number: int) -> list[str]:
        return [" ".join(map(str, self.problem(number).answer))]

    def reward(self, problem: Problem, answer: str) -> float:
        words = answer.split()
        if len(words) != len(problem.answer):
            return 0.0
        return sum(word == str(right) for word, right in zip(words, problem.answer)) / len(words)

    def reply(self, problem: Problem, answer: str) -> None:
        return None


class Calculator:
    """A sum of three numbers with a tool: a turn that ends with `a+b;` gets `=c ` for a reply, twice at most; then the policy says the result."""

    CALL = re.compile(r"(\d{1,9})\+(\d{1,9});$")
    WHOLE = re.compile(r"(?:\d+\+\d+;=\d+ )*\s*(\d+)\s*")

    def __init__(self, seed: int, *, digits: int = 2):
        self.seed, self.digits = seed, digits

    def problem(self, number: int | str) -> Problem:
        draw = random.Random(f"{self.seed}/{number}")
        numbers = [draw.randrange(10**self.digits) for _ in range(3)]
        return Problem(f"{'+'.join(map(str, numbers))}? ", numbers, "calculator")

    def held_out(self, number: int) -> Problem:
        return self.problem(f"held out {number}")

    def demonstration(self, number: int) -> list[str]:
        a, b, c = self.problem(number).answer
        return [f"{a}+{b};", f"{a + b}+{c};", f"{a + b + c}"]

    def reward(self, problem: Problem, answer: str) -> float:
        said = self.WHOLE.fullmatch(answer)
        return float(said is not None and said[1] == str(sum(problem.answer)))

    def reply(self, problem: Problem, answer: str) -> str | None:
        call = self.CALL.search(answer)
        return f"={int(call[1]) + int(call[2])} " if call and answer.count("=") < 2 else None


class ReasoningGym:
    """A generator of the package reasoning-gym with its own scorer; options are the generator's.

    A question is held out, or is not, wherever it comes up: by its own hash.
    """

    HELD_OUT = 8  # one question in so many
    STRIDE = 1_000_003  # a prime: from an item of the wrong kind to the next

    def __init__(self, seed: int, name: str, **options: Any):
        try:
            import reasoning_gym
        except ImportError as e:
            raise ConfigError('rl.task="reasoning_gym:NAME" needs the package reasoning-gym: pip install "titanlite[rl]"', "rl.task") from e
        self.name = name
        # Item i of a data set is made from (seed, i) alone.
        self.data = reasoning_gym.create_dataset(name, seed=seed, size=2**31 - 1, **options)

    def problem(self, number: int) -> Problem:
        return self._item(number, held_out=False)

    def held_out(self, number: int) -> Problem:
        return self._item(number, held_out=True)

    def _item(self, number: int, held_out: bool) -> Problem:
        for k in range(1000):
            i = (number + k * self.STRIDE) % self.data.size
            item = self.data[i]
            if (zlib.crc32(item["question"].encode()) % self.HELD_OUT == 0) == held_out:
                return Problem(item["question"], {"answer": item["answer"], "number": i}, self.name)
        raise ValueError(f"reasoning_gym:{self.name} has too few questions for some to be held out")

    def demonstration(self, number: int) -> list[str]:
        return [str(self.problem(number).answer["answer"])]

    def reward(self, problem: Problem, answer: str) -> float:
        entry, right = self.data[problem.answer["number"]], problem.answer["answer"]
        said = final_number(answer) if NUMBER.fullmatch(str(right)) else answer.strip()
        try:
            return float(self.data.score_answer(answer=said, entry=entry))
        except Exception:
            if self.data.score_answer(answer=right, entry=entry) != 1:
                raise
            return 0.0  # some scorers fail at what they cannot read

    def reply(self, problem: Problem, answer: str) -> None:
        return None


TASKS = {
    "arithmetic": "titanlite.rl.tasks:Arithmetic",
    "sorting": "titanlite.rl.tasks:Sorting",
    "calculator": "titanlite.rl.tasks:Calculator",
    "math": "titanlite.rl.math_answers:Math",
    "code": "titanlite.rl.code:Code",
    "http": "titanlite.rl.judge:Http",
    "judge": "titanlite.rl.judge:Judge",
}


def build_task(name: str, options: tuple[str, ...], seed: int) -> Task:
    """The task that `rl.task` names. Raises ConfigError where there is none, or where it takes no such option."""
    key = "rl.task"
    try:
        values = dict(_option(option) for option in options)
        if name.startswith("reasoning_gym:"):
            return ReasoningGym(seed, name.removeprefix("reasoning_gym:"), **values)
        if name not in TASKS and ":" not in name:
            raise ConfigError(f"{key}={name!r}: expected one of {', '.join(TASKS)}, reasoning_gym:NAME or my_pkg.my_tasks:MyTask{nearest(name, TASKS)}", key)
        module, _, attribute = TASKS.get(name, name).partition(":")
        return getattr(importlib.import_module(module), attribute)(seed, **values)
    except ConfigError:
        raise
    except Exception as e:
        raise ConfigError(f"{key}={name!r} with rl.task_options={list(options)}: {type(e).__name__}: {e}", key, "rl.task_options") from e


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"rl.task_options: {text!r}: expected name=value", "rl.task_options")
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value


