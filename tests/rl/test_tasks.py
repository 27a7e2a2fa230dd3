"""Problems, verifiers and the processes that they run in."""

import pytest

from titanlite.rl.rewards import RewardPool
from titanlite.rl.tasks import Arithmetic, Calculator, Problem, Sorting, build_task
from titanlite.utils import ConfigError

# A labelled set for each verifier: right, wrong, cut, hedged and written otherwise.
LABELLED = {
    "arithmetic": (Problem("7+5=", "12", "sum"), {"12": 1, " 12 ": 1, "13": 0, "1": 0, "": 0, "12 or 13": 0, "twelve": 0, "012": 0, "12.0": 0, "112": 0}),
    "sorting": (Problem("sort 3 1 2: ", [1, 2, 3], "sorting"), {"1 2 3": 1, "1  2 3": 1, "3 1 2": 0, "1 2": 0, "1 2 3 3": 0, "1,2,3": 0, "": 0, "1 3 2": 1 / 3}),
    "calculator": (Problem("1+2+3? ", [1, 2, 3], "calculator"), {"1+2;=3 3+3;=6 6": 1, "6": 1, "1+2;=3 5": 0, "": 0, "6 7": 0, "66": 0, "1+2;=3 ": 0}),
}


@pytest.mark.parametrize("name", LABELLED)
def test_a_verifier_takes_no_wrong_answer_and_every_right_one(name):
    task, (problem, answers) = build_task(name, (), 0), LABELLED[name]
    assert {answer: task.reward(problem, answer) for answer in answers} == answers


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
