"""Tasks for tests: rewards that misbehave, and rewards that an untrained policy gets."""

import os
import time

from titanlite.rl.tasks import Arithmetic, Problem


class Unruly(Arithmetic):
    """What an answer says is done: `sleep`, `die`, `raise`, `hog`, `nan`; anything else is worth 1."""

    def reward(self, problem: Problem, answer: str) -> float:
        if answer == "sleep":
            time.sleep(60)
        if answer == "die":
            os._exit(7)
        if answer == "raise":
            raise ValueError("no such number")
        if answer == "hog":
            bytearray(10**10)
        return float("nan") if answer == "nan" else 1.0


class Alike(Arithmetic):
    def reward(self, problem: Problem, answer: str) -> float:
        return 0.0


class Broken(Arithmetic):
    def reward(self, problem: Problem, answer: str) -> float:
        raise RuntimeError("the verifier is down")


class OddFirst(Arithmetic):
    """1 where the first character's number is odd: also what an untrained policy says is right now and then."""

    def reward(self, problem: Problem, answer: str) -> float:
        return float(bool(answer) and ord(answer[0]) % 2)


class HalfBroken(OddFirst):
    """As OddFirst, with a verifier that is down for every other right answer."""

    def reward(self, problem: Problem, answer: str) -> float:
        if int(problem.answer) % 2:
            raise RuntimeError("the verifier is down")
        return super().reward(problem, answer)
