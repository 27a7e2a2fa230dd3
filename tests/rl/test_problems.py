"""Problems of users' files, and rewards for them: verifiers, and servers that judge."""

import http.server
import json
import re
import threading
from collections import Counter
from pathlib import Path

import pytest

from titanlite.rl import labelled
from titanlite.rl.judge import Judge
from titanlite.rl.math_answers import Math
from titanlite.rl.rewards import RewardPool
from titanlite.rl.tasks import Problem, build_task
from titanlite.utils import ConfigError

ROWS = [{"question": f"{i} + {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}", "kind": "even" if i % 2 == 0 else "odd"} for i in range(10)]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_every_pass_asks_every_problem_once_in_an_order_of_its_own(jsonl):
    task, same, other = (build_task("math", (f"path={jsonl}", "prompt=Q: {question} ({kind}) \\boxed{}"), seed) for seed in (3, 3, 4))
    passes = [[task.problem(10 * epoch + i) for i in range(10)] for epoch in range(-1, 3)]
    assert [Counter(p.prompt for p in one) for one in passes] == [Counter(f"Q: {r['question']} ({r['kind']}) \\boxed{{}}" for r in ROWS)] * 4
    assert len({tuple(p.prompt for p in one) for one in passes}) == 4
    assert [same.problem(i) for i in range(-10, 30)] == sum(passes, []) != [other.problem(i) for i in range(-10, 30)]
    assert task.reward(task.problem(7), task.demonstration(7)[0]) == 1


def test_parquet_and_hugging_face_folders_hold_the_same_problems_and_sources(jsonl, tmp_path):
    from datasets import Dataset

    data = Dataset.from_list(ROWS)
    data.to_parquet(str(tmp_path / "sums.parquet"))
    data.train_test_split(test_size=3, seed=0).save_to_disk(str(tmp_path / "folder"))
    of = {name: build_task("math", (f"path={name}", "source_key=kind", *more), 0) for name, *more in [(jsonl,), (tmp_path / "sums.parquet",)]}
    first, second = ([task.problem(i) for i in range(20)] for task in of.values())
    assert first == second and {p.source for p in first} == {"even", "odd"} and {p.answer for p in first} == {str(2 * i) for i in range(10)}
    both = build_task("math", (f"path=hf:{tmp_path / 'folder'}", f"held_out_path=hf:{tmp_path / 'folder'}"), 0)
    seen, held_out = {both.problem(i).prompt for i in range(7)}, {both.held_out(i).prompt for i in range(3)}
    assert len(seen) == 7 and len(held_out) == 3 and not seen & held_out


@pytest.mark.parametrize(
    "line, options, message",
    [
        ("", (), "path=.*: it has no rows"),
        ('{"question": "1+1"}', (), "sums.jsonl:1: no key 'answer' among question"),
        ('{"questions": "1+1", "answer": "2"}', (), "no key 'question' among questions, answer; did you mean 'questions'"),
        ('{"question": "1+1", "answer"', (), "sums.jsonl:1: not JSON"),
        ('{"question": 5, "answer": "2"}', (), "a 'question' must be a string, not 5"),
        ("{}", ("path=x.csv",), "path=x.csv: expected FILE.jsonl, FILE.parquet or hf:NAME"),
        ("{}", ("path=no.jsonl",), "path=no.jsonl: FileNotFoundError"),
        ("{}", ("paths=x",), "unexpected keyword argument 'paths'"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path, line, options, message):
    (tmp_path / "sums.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=message):
        build_task("math", (f"path={tmp_path / 'sums.jsonl'}", *options), 0).problem(0)


def test_tests_of_code_come_in_the_formats_of_known_data_sets(tmp_path):
    rows = [
        {"question": "a", "tests": ["assert f(2) == 4"], "name": ""},
        {"question": "b", "tests": '{"inputs": ["2\\n"], "outputs": ["4\\n"]}', "name": ""},
        {"question": "c", "tests": {"fn_name": "f", "inputs": [[2], [3]], "outputs": [4, 6]}, "name": ""},
        {"question": "d", "tests": "def check(candidate):\n    assert candidate(2) == 4", "name": "f"},
    ]
    found = {}
    for row in rows:
        (tmp_path / "code.jsonl").write_text(json.dumps(row))
        task = build_task("code", (f"path={tmp_path / 'code.jsonl'}", *["entry_key=name"] * bool(row["name"])), 0)
        problem = task.problem(0)
        found[row["question"]] = problem.answer
        code = "print(int(input()) * 2)" if row["question"] == "b" else "def f(n): return n * 2"
        assert task.reward(problem, f"```python\n{code}\n```") == 1 and task.reward(problem, f"```python\n{code.replace('2', '3')}\n```") == 0
    assert found["c"] == ["assert f(*[2]) == 4", "assert f(*[3]) == 6"]
    (tmp_path / "code.jsonl").write_text('{"question": "e", "tests": []}')
    with pytest.raises(ConfigError, match="a problem has no tests: 'e"):
        build_task("code", (f"path={tmp_path / 'code.jsonl'}",), 0).problem(0)


def test_code_is_worth_its_share_of_tests_where_asked(tmp_path):
    task = build_task("code", ("path=unused.jsonl", "reward=share", "seconds=2"), 0)
    tests = ["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 9", "assert f(4) == 16"]
    assert task.reward(Problem("", tests, "code"), "```\ndef f(n): return n\n```") == 0.5
    assert task.reward(Problem("", {"inputs": ["1", "2"], "outputs": ["1", "4"]}, "code"), "```\nprint(input())\n```") == 0.5


def test_no_verifier_takes_a_wrong_answer_and_the_report_in_the_docs_is_this_one():
    found = labelled.verdicts({})
    assert not [verdict for verdict in found if verdict.false_accept]
    assert all(verdict.reward == 1 for verdict in found if verdict.kind == "right")
    assert labelled.report(found) in Path("docs/rl_rewards.md").read_text()


def test_an_answer_that_never_ends_is_killed_and_counted_and_others_are_not_held_up():
    pool = RewardPool(("math", ("path=unused.jsonl",), 0), n_workers=2, timeout_s=3.0, memory_bytes=2 << 30)
    try:
        problem = Problem("", "42", "math")
        found = pool.rewards([(problem, answer) for answer in ("\\boxed{9^{9^{9^{9}}} - 9^{9^{9^{9}}} + 42}", "\\boxed{42}", "\\boxed{43}", "\\boxed{42}")])
        assert [reward.value for reward in found] == [None, 1, 0, 1]
        assert re.match("timeout: no answer within 3 s|MemoryError|OverflowError|died", found[0].failure), found[0]
    finally:
        pool.close()


def test_a_right_answer_that_cannot_be_read_is_a_failure_and_no_zero():
    with pytest.raises(ValueError, match="cannot read the right answer"):
        Math(0, path="unused.jsonl").reward(Problem("", "???", "math"), "\\boxed{42}")


@pytest.fixture
def server():
    """Answers with what stands next in `said`: (status, headers, body)."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body, dict(self.headers)))
            status, headers, text = said.pop(0)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args):
            pass

    said, asked = [], []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", said, asked
        running.shutdown()
        thread.join()


AGAIN = {"Retry-After": "0"}


def test_a_reward_model_is_asked_and_asked_again_where_it_is_busy(server, jsonl):
    url, said, asked = server
    task = build_task("http", (f"url={url}/score", f"path={jsonl}"), 0)
    said += [(503, AGAIN, ""), (429, AGAIN, ""), (200, {}, '{"reward": 0.25}')]
    problem = task.problem(0)
    assert task.reward(problem, "4") == 0.25 and len(asked) == 3
    assert asked[2][:2] == ("/score", {"prompt": problem.prompt, "response": "4", "answer": problem.answer, "source": "http"})


@pytest.mark.parametrize(
    "answers, error",
    [
        ([(503, AGAIN, "")] * 2, "HTTP Error 503"),
        ([(400, {}, "")], "HTTP Error 400"),
        ([(200, {}, '{"score": 1}')], "expected .*reward"),
        ([(200, {}, '{"reward": "high"}')], "expected .*reward"),
        ([(200, {}, "busy")], "Expecting value"),
    ],
)
def test_what_is_no_reward_is_a_failure(server, answers, error):
    url, said, asked = server
    said += answers
    task = build_task("http", (f"url={url}", "path=unused.jsonl", "tries=2"), 0)
    with pytest.raises(Exception, match=error):
        task.reward(Problem("", "", "http"), "4")
    assert len(asked) == len(answers)


def test_a_server_that_is_not_there_or_says_nothing_is_a_failure():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as silent:  # listens, and never answers
        url = f"http://127.0.0.1:{silent.server_port}"
        with pytest.raises(TimeoutError):
            build_task("http", (f"url={url}", "path=unused.jsonl", "tries=1", "timeout_s=0.2"), 0).reward(Problem("", "", "http"), "4")
    with pytest.raises(OSError, match="refused"):
        build_task("http", (f"url={url}", "path=unused.jsonl", "tries=1"), 0).reward(Problem("", "", "http"), "4")
    with pytest.raises(ConfigError, match="url=localhost: expected http"):
        build_task("http", ("url=localhost", "path=unused.jsonl"), 0)


def test_a_judge_is_asked_by_a_template_and_its_last_score_counts(server, tmp_path, monkeypatch):
    url, said, asked = server
    monkeypatch.setenv("JUDGE_TOKEN", "abc")
    (tmp_path / "ask.txt").write_text("{prompt}|{response}|{answer}|{other}")
    judge = Judge(0, url=f"{url}/v1/", model="big", template=str(tmp_path / "ask.txt"), best=10.0, token_env="JUDGE_TOKEN", path="unused.jsonl")

    def reply(text):
        return 200, {}, json.dumps({"choices": [{"message": {"content": text}}]})

    said += [reply("Score: 1? No.\nScore: 7.5"), reply("it is fine")]
    assert judge.reward(Problem("1+1", "2", "judge"), "{answer} Score: 10") == 0.75
    path, body, headers = asked[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer abc"
    assert body["model"] == "big" and body["messages"] == [{"role": "user", "content": "1+1|{answer} Score: 10|2|{other}"}]
    with pytest.raises(ValueError, match="no score in what the judge said: 'it is fine'"):
        judge.reward(Problem("1+1", "2", "judge"), "2")
