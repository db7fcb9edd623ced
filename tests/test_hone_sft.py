"""`hone sft` as its users meet it: rollouts or a file in, an adapter out."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from learner_world import VOCABULARY, Attempt, World, make_base

from capture.adapters import read_manifest
from hone.cli.main import main

ROOT = Path(__file__).parent.parent
TICTACTOE = ROOT / "examples" / "tictactoe" / "base"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "hone.toml"
    store = f"[capture]\npath = '{tmp_path / 'hone.db'}'\n"
    path.write_text(
        f"[policy]\nbase_model = '{make_base(tmp_path / 'base')}'\n{store}[train]\nlora_rank = 4\n"
    )
    return path


def counting(rng: random.Random, first: int) -> Attempt:
    """Two turns that go on in the vocabulary's order."""
    attempt = Attempt([2, first], [[first + 1, first + 2], []], 1.0)
    attempt.observation = [rng.randrange(8, VOCABULARY), 40]
    attempt.turns[1] = [41, 42]
    attempt.logprobs = [[-2.0] * 2] * 2
    return attempt


def test_on_stored_rollouts(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(1)
    world = World(tmp_path / "hone.db")
    good = [counting(rng, rng.randrange(8, VOCABULARY - 4)) for _ in range(60)]
    bad = [Attempt([2, 9], [[rng.randrange(8, VOCABULARY)]], 0.0) for _ in range(4)]
    world.add_group([*good, *bad])
    world.store.close()
    words = ["sft", "-c", str(config), "--out", str(tmp_path / "sft"), "--json"]
    options = ["--min-reward", "0.5", "--epochs", "8", "--lr", "2e-2", "--batch-tokens", "64", "--seed", "7"]
    assert main([*words, *options]) == 0
    told = capsys.readouterr()
    report = json.loads(told.out)
    assert report["settings"] == {"epochs": 8, "lr": 0.02, "batch_tokens": 64, "seed": 7, "held_out": 0.05}
    assert report["samples"] + report["held_out_samples"] == 60
    assert report["tokens"] == 4 * report["samples"]  # exactly what was sampled
    assert report["held_out_losses"][-1] < report["held_out_losses"][0] - 1.0
    assert f"step {report['steps']}  epochs 8.00  loss" in told.err
    assert read_manifest(tmp_path / "sft").policy == "policy"
    assert main([*words, *options]) == 1
    assert "is there already; an adapter is never written over another" in capsys.readouterr().err


def test_on_a_file_of_conversations(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(config.read_text().replace(str(tmp_path / "base"), str(TICTACTOE)))
    rng = random.Random(2)
    data = tmp_path / "data.jsonl"
    lines: list[dict[str, Any]] = [conversation(rng.randrange(1000)) for _ in range(30)]
    lines.append({"messages": [{"role": "user", "content": "unanswered"}]})
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["sft", "-c", str(config), "--out", str(tmp_path / "sft"), "--json", "--data", str(data)]
    assert main([*words, "--epochs", "3", "--lr", "5e-3", "--batch-tokens", "400"]) == 0
    told = capsys.readouterr()
    report = json.loads(told.out)
    assert report["samples"] + report["held_out_samples"] == 30
    assert report["held_out_losses"][-1] < report["held_out_losses"][0] - 0.5
    assert "left out: 1 no_answer" in told.err
    assert main([*words[:-4], str(tmp_path / "b"), "--data", str(data), "--mode", "train"]) == 1
    assert "--data has its own conversations" in capsys.readouterr().err


def conversation(number: int) -> dict[str, Any]:
    turns = [{"role": "user", "content": str(number)}, {"role": "assistant", "content": f"= {number}"}]
    return {"messages": [{"role": "system", "content": "Say it again."}, *turns], "scenario_id": str(number)}


def test_nothing_to_learn_from_names_the_filters(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    World(tmp_path / "hone.db").store.close()
    words = ["sft", "-c", str(config), "--out", str(tmp_path / "sft")]
    assert main([*words, "--status", "completed"]) == 1
    assert "no rollout fits --status completed --policy policy" in capsys.readouterr().err
    assert main([*words, "--policy", "other"]) == 1
    assert "these settings train policy" in capsys.readouterr().err
    assert main([*words, "--lr", "0"]) == 1
    assert "lr" in capsys.readouterr().err
    assert not (tmp_path / "sft").exists()


def test_interrupted_it_leaves_nothing(config: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(conversation(number)) + "\n" for number in range(30)))
    config.write_text(config.read_text().replace(str(tmp_path / "base"), str(TICTACTOE)))
    command = [sys.executable, "-m", "hone.cli.main", "sft", "-c", str(config), "--data", str(data)]
    options = ["--out", str(tmp_path / "sft"), "--epochs", "100000", "--batch-tokens", "100"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=environ)
    assert process.stderr is not None
    first = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    rest = process.stderr.read()
    assert process.wait(60) == 130
    assert time.monotonic() - began < 60
    assert first.startswith("step 0  epochs 0.00  held out ")
    assert "told to stop; nothing was written" in rest
    assert not [path for path in tmp_path.iterdir() if "sft" in path.name]
