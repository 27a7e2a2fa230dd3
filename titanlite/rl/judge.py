"""Rewards over HTTP: of a reward model, rl.task = "http", or of a language model that judges, rl.task = "judge"."""

import json
import os
import re
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from titanlite.rl.problems import Problems
from titanlite.rl.tasks import Problem
from titanlite.utils import ConfigError

TEMPLATE = """Question:
{prompt}

Right answer:
{answer}

An answer to be judged:
{response}

Is it right? Say why in one sentence; then, on a line of its own, "Score: 1" where it is and "Score: 0" where it is not."""


class Http:
    """Problems of a file; POST {"prompt", "response", "answer", "source"} to `url` is answered with {"reward": number}.

    Of a time-out, a lost connection, 429 and 5xx there are `tries`, after waits of 1, 2, 4, ... s or what Retry-After says; then, as after
    any other answer, the reward has failed. `token_env` names an environment variable with a bearer token.
    """

    def __init__(self, seed: int, *, url: str, timeout_s: float = 30.0, tries: int = 4, token_env: str = "", **data: Any):
        self.problems = Problems(seed, **data)
        self.post = _Post(url, timeout_s, tries, token_env)

    def problem(self, number: int) -> Problem:
        return _problem(self.problems, self.problems.row(number), "http")

    def held_out(self, number: int) -> Problem:
        return _problem(self.problems, self.problems.held_out(number), "http")

    def demonstration(self, number: int) -> list[str]:
        return [self.problem(number).answer]

    def reward(self, problem: Problem, answer: str) -> float:
        said = self.post({"prompt": problem.prompt, "response": answer, "answer": problem.answer, "source": problem.source})
        if not isinstance(said, dict) or isinstance(said.get("reward"), bool) or not isinstance(said.get("reward"), (int, float)):
            raise ValueError(f'expected {{"reward": number}}, not {str(said)[:200]}')
        return said["reward"]

    def reply(self, problem: Problem, answer: str) -> None:
        return None


class Judge:
    """Problems of a file; a model behind an OpenAI-compatible `url` (.../v1) is asked by `template`, a file with {prompt}, {response} and {answer}.

    The reward is the number that `score`, a regular expression with one group, finds last in what it says, over `best`; without one it has failed.
    """

    def __init__(
        self, seed: int, *, url: str, model: str, template: str = "", score: str = r"Score:\s*(-?\d+(?:\.\d+)?)", best: float = 1.0,
        max_tokens: int = 512, timeout_s: float = 30.0, tries: int = 4, token_env: str = "", **data: Any,
    ):  # fmt: skip
        self.problems = Problems(seed, **data)
        self.post = _Post(f"{url.rstrip('/')}/chat/completions", timeout_s, tries, token_env)
        self.template = Path(template).read_text() if template else TEMPLATE
        self.model, self.score, self.best, self.max_tokens = model, re.compile(score), best, max_tokens

    def problem(self, number: int) -> Problem:
        return _problem(self.problems, self.problems.row(number), "judge")

    def held_out(self, number: int) -> Problem:
        return _problem(self.problems, self.problems.held_out(number), "judge")

    def demonstration(self, number: int) -> list[str]:
        return [self.problem(number).answer]

    def reward(self, problem: Problem, answer: str) -> float:
        values = {"prompt": problem.prompt, "response": answer, "answer": problem.answer}
        asked = re.sub(r"\{(prompt|response|answer)\}", lambda found: values[found[1]], self.template)
        said = self.post({"model": self.model, "messages": [{"role": "user", "content": asked}], "temperature": 0, "max_tokens": self.max_tokens})
        text = said["choices"][0]["message"]["content"]
        found = self.score.findall(text)
        if not found:
            raise ValueError(f"no score in what the judge said: {text[-200:]!r}")
        return float(found[-1]) / self.best

    def reply(self, problem: Problem, answer: str) -> None:
        return None


def _problem(problems: Problems, row: dict, source: str) -> Problem:
    return Problem(problems.asked(row), str(row[problems.answer_key]) if problems.answer_key else "", problems.source(row, source))


class _Post:
    """A JSON object sent, the JSON that comes back."""

    def __init__(self, url: str, timeout_s: float, tries: int, token_env: str):
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"rl.task_options: url={url}: expected http:// or https://", "rl.task_options")
        if token_env and token_env not in os.environ:
            raise ConfigError(f"rl.task_options: token_env={token_env}: no such environment variable", "rl.task_options")
        self.url, self.timeout_s, self.tries = url, timeout_s, tries
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {os.environ[token_env]}"} if token_env else {})

    def __call__(self, message: dict) -> Any:
        request = urllib.request.Request(self.url, json.dumps(message).encode(), self.headers)
        for left in reversed(range(self.tries)):
            wait_s = 2.0 ** (self.tries - 1 - left)
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                if error.code != 429 and error.code < 500 or not left:
                    raise
                after = error.headers.get("Retry-After", "")
                wait_s = float(after) if after.isdecimal() else wait_s
            except OSError:  # URLError and time-outs
                if not left:
                    raise
            time.sleep(wait_s)
