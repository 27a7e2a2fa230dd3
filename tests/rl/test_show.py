"""`titanlite rollouts`: samples for the eye."""

import json

import pytest

from titanlite.cli import main


def sample(ordinal=0, reward=1.0, tokens=2, **more):
    drawn = [False] * 3 + [True] * tokens
    return {"ordinal": ordinal, "sample": 0, "ids": [0] * len(drawn), "drawn": drawn, "text": f"text {ordinal}", "ended": True, "source": "sum", "reward": reward, "failure": "", "prompt": f"{ordinal}?"} | more  # fmt: skip


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "outputs" / "first" / "rollouts"
    folder.mkdir(parents=True)
    steps = {
        3: [sample(0, 1.0), sample(1, 0.0)],
        12: [
            sample(4, 0.5, 7, text="long \x1b[31mred\nlines"),
            sample(5, 1.0, 3, source="difference"),
            sample(4, 0.75, 3, sample=1),
            sample(6, None, 2, failure="timeout: no answer within 2 s", ended=False),
        ],
    }
    for step, samples in steps.items():
        (folder / f"step-{step}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    return folder.parent


def shown(capsys, *words) -> list[str]:
    assert main(["rollouts", *map(str, words)]) == 0
    return capsys.readouterr().out.splitlines()


def heads(lines: list[str]) -> list[str]:
    return [line.split()[1] for line in lines if line.startswith("---")]


def test_every_step_has_a_line_and_the_newest_is_shown(run, capsys):
    lines = shown(capsys, run)
    assert [line.split() for line in lines[1:3]] == [["3", "2", "0.500", "0.500", "2.0", "2", "0", "0"], ["12", "4", "0.750", "0.204", "3.8", "7", "1", "1"]]
    assert lines[4:8] == ["--- problem=4 sample=0 source=sum reward=0.5 (-0.125 against its group) tokens=7 ended", "4?", ">>> long \\x1b[31mred", "lines"]
    assert "reward=1 (+0 against its group) tokens=3 ended" in lines[9] and "reward=failed (timeout: no answer within 2 s) tokens=2 cut" in lines[17]


def test_samples_are_chosen_and_sorted(run, capsys):
    assert heads(shown(capsys, run, "--step", 3)) == ["problem=0", "problem=1"]
    assert heads(shown(capsys, run, "--sort", "reward")) == ["problem=5", "problem=4", "problem=4", "problem=6"]
    assert heads(shown(capsys, run, "--sort", "length", "--limit", 1)) == ["problem=4"]
    assert heads(shown(capsys, run, "--source", "difference")) == ["problem=5"] and heads(shown(capsys, run, "--failed")) == ["problem=6"]


def test_a_damaged_line_is_named_and_left_out(run, capsys):
    file = run / "rollouts" / "step-12.jsonl"
    file.write_text(file.read_text()[:-20] + '\n[]\n{"text": "x"}\n')
    assert main(["rollouts", str(run)]) == 0
    out, err = capsys.readouterr()
    assert heads(out.splitlines()) == ["problem=4", "problem=5", "problem=4"]
    assert [line.split(" is damaged")[0] for line in err.splitlines()] == [f"{file}:{n}" for n in (4, 5, 6)]


@pytest.mark.parametrize(
    "words, message",
    [
        (["outputs/frist"], "outputs/frist is no run's folder; did you mean 'first'?"),
        (["outputs"], "outputs/rollouts holds no samples: titanlite rl keeps them there, a file a step"),
        (["outputs/first", "--step", "10"], "--step=10: no samples of it are kept: the nearest is step 12, the last 12"),
        (["outputs/first", "--source", "sums"], "--source=sums: step 12 has difference, sum; did you mean 'sum'?"),
    ],
)
def test_a_mistake_is_answered_with_one_message(run, capsys, monkeypatch, words, message):
    monkeypatch.chdir(run.parent.parent)
    assert main(["rollouts", *words]) == 2
    assert capsys.readouterr().err == f"titanlite: error: {message}\n"
