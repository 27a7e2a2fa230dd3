"""Problems, verifiers and the processes that they run in."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from titanlite.rl.rewards import Reward, RewardPool
from titanlite.rl.tasks import Arithmetic, Calculator, Problem, Sorting, build_task
from titanlite.utils import ConfigError


@pytest.mark.parametrize("task", [Arithmetic(3, digits=2), Sorting(3), Calculator(3)])
def test_demonstrations_are_right_and_problems_depend_on_seed_and_number_only(task):
    for number in (-5, 0, 1, 12345):
        problem, text = task.problem(number), ""
        for turn in task.demonstration(number):
            text += turn
            text += task.reply(problem, text) or ""
        assert task.reward(problem, text) == 1 and task.problem(number) == problem
    other = type(task)(4)
    assert [task.problem(i).prompt for i in range(9)] != [other.problem(i).prompt for i in range(9)]


def test_noise_spoils_as_many_demonstrations_as_it_says():
    task = Arithmetic(0, noise=0.5)
    right = sum(task.reward(task.problem(i), task.demonstration(i)[0]) for i in range(2000)) / 2000
    assert 0.45 < right < 0.6  # a random answer is right now and then


def test_a_calculator_answers_calls_and_only_twice():
    task, problem = Calculator(0), Problem("1+2+3? ", [1, 2, 3], "calculator")
    assert task.reply(problem, "1+2;") == "=3 " and task.reply(problem, "1+2;=3 3+3;") == "=6 "
    assert task.reply(problem, "6") is None and task.reply(problem, "1+2;=3 3+3;=6 6+1;") is None and task.reply(problem, "1+2") is None


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("arithmetics", (), "rl.task='arithmetics': expected one of arithmetic, sorting, calculator, .*; did you mean 'arithmetic'"),
        ("arithmetic", ("digit=3",), "unexpected keyword argument 'digit'"),
        ("arithmetic", ("digits",), "rl.task_options: 'digits': expected name=value"),
        ("no_such_package:Task", (), "No module named 'no_such_package'"),
        ("tests.rl.slow_tasks:Nothing", (), "has no attribute 'Nothing'"),
    ],
)
def test_a_task_that_is_not_there_is_answered_with_what_is(name, options, message):
    with pytest.raises(ConfigError, match=message):
        build_task(name, options, 0)


@pytest.fixture(scope="module")
def pool():
    pool = RewardPool(("tests.rl.slow_tasks:Unruly", (), 0), n_workers=2, timeout_s=2.0)
    yield pool
    pool.close()


def test_rewards_come_in_order_and_what_fails_has_a_reason_and_no_value(pool):
    problem = Problem("1+1=", "2", "sum")
    answers = ["a", "raise", "sleep", "b", "die", "c", "d"]
    found = pool.rewards([(problem, answer) for answer in answers])
    assert [reward.value for reward in found] == [1, None, None, 1, None, 1, 1]
    assert [found[i].failure for i in (1, 2, 4)] == ["ValueError: no such number", "timeout: no answer within 2 s", "died: its process ended with 7"]
    assert [reward.value for reward in pool.rewards([(problem, "e")] * 5)] == [1] * 5  # those that ended were replaced


def test_rewards_are_made_while_others_are_still_to_come(pool):
    problem = Problem("1+1=", "2", "sum")
    pool.submit(problem, "a")
    end = time.monotonic() + 30
    while pool.found[0] is None and time.monotonic() < end:
        pool.submit(problem, "b")
        time.sleep(0.05)
    assert pool.found[0] == Reward(1.0)
    assert {reward.value for reward in pool.results()} == {1} and pool.results() == []


def test_a_process_for_rewards_holds_no_more_than_it_may_and_ends_with_the_trainer():
    script = "from titanlite.rl.rewards import *\npool = RewardPool(('tests.rl.slow_tasks:Unruly', (), 0), n_workers=1, timeout_s=60, memory_bytes=10**9)\n"
    script += "print(pool.rewards([(Problem('', '', ''), a) for a in ('hog', 'nan', 'a')]), pool.workers[0].process.pid, flush=True)\n"
    script += "pool.submit(Problem('', '', ''), 'sleep')\nprint(flush=True)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as trainer:
        told, pid = trainer.stdout.readline().rsplit(maxsplit=1)
        trainer.stdout.readline()
        trainer.kill()
    assert told == "[Reward(value=None, failure='MemoryError: '), Reward(value=None, failure='not finite: nan'), Reward(value=1.0, failure='')]"
    end = time.monotonic() + 30
    while Path(f"/proc/{pid}/stat").exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}/stat").exists()


@pytest.mark.parametrize("name", ["chain_sum", "gcd", "letter_counting", "number_sorting", "prime_factorization", "syllogism", "leg_counting"])
def test_reasoning_gym_takes_its_own_answers_and_no_others_and_holds_questions_out(name):
    task = build_task(f"reasoning_gym:{name}", (), 3)
    problems = [task.problem(number) for number in range(8)]
    for number, problem in enumerate(problems):
        assert task.reward(problem, task.demonstration(number)[0]) == 1 and task.reward(problem, "nobody knows") < 1
    assert not {problem.prompt for problem in problems} & {task.held_out(number).prompt for number in range(8)}
    assert problems == [build_task(f"reasoning_gym:{name}", (), 3).problem(number) for number in range(8)]
