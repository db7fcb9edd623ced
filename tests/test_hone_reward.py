"""`hone reward` as its users meet it: real processes over a real store."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from explain_world import World

from capture.sqlite import SqliteStore
from hone.cli.main import main
from hone.config import load

ROOT = Path(__file__).parent.parent
SCRIPT = """
WEIGHTS = {"parity": 1.0, "length": 0.0}

def reward(trace):
    number = int(trace["rollout_id"][-1])
    if number == 9:
        raise KeyError("nine")
    return {"parity": number % 2, "length": len(trace["turns"])}
"""
SETTINGS = """
[policy]
base_model = "org/model"
[run]
dir = "run"
[rewards]
script = "reward.py"
timeout_s = 60
[train]
group_size = 2
"""

Hone = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A project with six finished rollouts in three groups of two, and one under way."""
    (tmp_path / "hone.toml").write_text(SETTINGS)
    (tmp_path / "reward.py").write_text(SCRIPT)
    (tmp_path / "run").mkdir()
    store = SqliteStore(tmp_path / "run" / "hone.db")
    world = World(store)
    for number in range(1, 7):
        world.played(f"r_{number}", 0.5, group=f"g_{(number + 1) // 2}", scenario_id=f"s{(number + 1) // 2}")
    world.open("r_7", "g_4")
    world.group()
    store.close()
    yield tmp_path
    store = SqliteStore(tmp_path / "run" / "hone.db")
    assert store.verify() == []
    store.close()


@pytest.fixture
def hone(folder: Path) -> Hone:
    def run(*words: str, **environ: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "hone.cli.main", "reward", *words, "-c", str(folder / "hone.toml")],
            capture_output=True,
            text=True,
            env={**os.environ, **environ},
            cwd=ROOT,
            timeout=250,
        )

    return run


def rewards(folder: Path) -> dict[str, float | None]:
    store = SqliteStore(folder / "run" / "hone.db")
    found = {rollout.id: rollout.reward for rollout in store.rollouts()}
    store.close()
    return found


def test_a_script_is_tested_and_nothing_is_stored(folder: Path, hone: Hone) -> None:
    before = rewards(folder)
    done = hone("test", "--plot", str(folder / "rewards.png"))
    assert (done.returncode, done.stderr) == (0, f"drawn: {folder}/rewards.png\n")
    lines = done.stdout.splitlines()
    assert lines[0] == f"{folder}/reward.py: 6 of 6 rollouts scored"
    assert lines[1] == "left out: 1 (open, or some of their calls are not read yet)"
    assert "   0.000  ████████████████████████████████████████ 3" in lines
    assert "   1.000  ████████████████████████████████████████ 3" in lines
    assert any(line.startswith("parity  mean   0.500  std  0.500") for line in lines)
    assert any(line.startswith("length") and line.endswith("metric") for line in lines)
    assert "3 scenarios, 3 attempted more than once, 0 of these without spread" in lines
    assert "groups with signal: 3 of 3 (100%); 3 as they were" in lines
    assert lines[-1] == "* Nothing speaks against training with this script."
    assert (folder / "rewards.png").read_bytes().startswith(b"\x89PNG")
    assert rewards(folder) == before


def test_failures_have_their_traceback_and_an_exit_status(folder: Path, hone: Hone) -> None:
    other = folder / "other.py"
    other.write_text(SCRIPT.replace("== 9", "> 4"))
    done = hone("test", str(other))
    assert done.returncode == 1
    assert f"{other}: 4 of 6 rollouts scored, the script failed on 2" in done.stdout
    assert "failed 2 times (r_5, r_6):" in done.stdout
    assert f'File "{other}", line 7, in reward' in done.stdout
    assert "* The script failed on 2 of 6 rollouts:" in done.stdout


def test_json_filters_and_limit(folder: Path, hone: Hone) -> None:
    found = json.loads(hone("test", "--json", "--scenario", "s1", "--scenario", "s2", "--limit", "3").stdout)
    assert [(row["rollout_id"], row["reward"]) for row in found["rows"]] == [
        ("r_2", 0.0),
        ("r_3", 1.0),
        ("r_4", 0.0),
    ]
    assert found["left_out"] == {"older": 1}
    assert found["report"]["weights"] == {"parity": 1.0, "length": 0.0}
    assert found["report"]["latency"]["max_s"] > 0
    assert found["advice"][0].startswith("1 scenario had no reward above 0 so far;")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["test", "nowhere.py"], "there is no file nowhere.py"),
        (["test", "--scenario", "none"], "no rollout fits --scenario none"),
        (["test", "--state", "open"], "no rollout can be scored: 1 left out (open, or some of their calls"),
        (["rescore", "--scenario", "none"], "no rollout fits --scenario none"),
    ],
)
def test_bad_words_are_one_sentence(hone: Hone, words: list[str], said: str) -> None:
    done = hone(*words)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


def test_a_script_that_does_not_load_says_why(folder: Path, hone: Hone) -> None:
    (folder / "reward.py").write_text("import nowhere_to_be_found")
    for verb in ("test", "rescore"):
        done = hone(verb)
        assert done.returncode == 1
        assert "ModuleNotFoundError: No module named 'nowhere_to_be_found'" in done.stderr


def test_rescore(folder: Path, hone: Hone) -> None:
    before = rewards(folder)
    dry = hone("rescore", "--dry-run")
    assert (
        dry.stdout.splitlines()[0] == f"would score 6 rollouts with {folder}/reward.py, 3 groups among them"
    )
    assert rewards(folder) == before
    done = hone("rescore")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        f"scored 6 rollouts with {folder}/reward.py, 3 groups among them",
        "6 rewards changed; mean 0.500 before, 0.500 now",
        "left alone: 1 (it is not through yet: control scores it)",
    ]
    assert rewards(folder) == {f"r_{n}": float(n % 2) for n in range(1, 7)} | {"r_7": None}
    again = json.loads(hone("rescore", "--json").stdout)["result"]
    assert (again["rollouts"], again["left_alone"]) == (0, {"current": 6, "unfinished": 1})
    (folder / "reward.py").write_text(SCRIPT.replace("== 9", "== 3"))
    broken = hone("rescore")
    assert broken.returncode == 1
    assert "left alone: 2 (the script failed on it, or on another member of its group" in broken.stdout
    assert 'raise KeyError("nine")' in broken.stdout


def test_settings_name_the_interpreter_beside_them(folder: Path) -> None:
    def python(value: str) -> str:
        (folder / "hone.toml").write_text(SETTINGS.replace("[train]", f"python = '{value}'\n[train]"))
        return load(folder / "hone.toml", {}, "cpu").rewards.python

    assert python(".venv/bin/python") == f"{folder}/.venv/bin/python"
    assert python("python3") == "python3"
    assert python("/usr/bin/python3") == "/usr/bin/python3"


def test_without_a_script_there_is_nothing_to_do(folder: Path, capsys: pytest.CaptureFixture[Any]) -> None:
    (folder / "hone.toml").write_text(SETTINGS.replace('script = "reward.py"', ""))
    for verb in ("test", "rescore"):
        assert main(["reward", verb, "-c", str(folder / "hone.toml")]) == 1
        assert "rewards.script is not set" in capsys.readouterr().err
