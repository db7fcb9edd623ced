"""The command line as its users meet it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hone.cli.main import VERBS, main, usage
from hone.config import load

ROOT = Path(__file__).parent.parent
TICTACTOE = str(ROOT / "examples" / "tictactoe" / "hone.toml")

HELP = """\
usage: hone VERB [options]

  init       write a commented hone.toml
  up         serve: engine, proxy and control, without training
  train      train: learner and runner beside a running `hone up`, or everything
  eval       run the agent on evaluation scenarios and report its scores
  sft        fine-tune the adapter on stored rollouts or on a file of conversations
  demo       train the tic-tac-toe agent end to end and show what it learned
  status     one screen, and one sentence on what training waits for
  doctor     check this machine and the settings
  rollouts   look at stored rollouts: ls, show, explain, export
  reward     a reward script on stored rollouts: test, rescore
  scenarios  make a scenario set of what agents asked: from-rollouts
  adapters   the versions of the policy, and which one is served: ls, promote, rollback, export
  keys       make API keys for the proxy, and list those that are configured: new, ls
  proxy      run the proxy alone
  control    run control alone: ingest, seal, score, group
  learn      run the learner alone
  runner     run the runner alone
  engine     become vLLM with the settings' command line

`hone VERB --help` lists a verb's options.
"""


def hone(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hone.cli.main", *words],
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
        cwd=ROOT,
        timeout=60,
    )


def test_help_lists_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert usage() == HELP
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == HELP


def test_no_verb_and_a_wrong_verb_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["trian"]) == 2
    assert "no verb 'trian'; did you mean 'train'?" in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: hone {verb}")


def test_help_is_quick_and_imports_no_room() -> None:
    code = (
        "import sys, time; began = time.process_time(); from hone.cli.main import main; main(['--help']);"
        "print(time.process_time() - began);"
        "print([n for n in sys.modules if n.split('.')[0] in"
        " ('msgspec', 'aiohttp', 'apsw', 'torch', 'proxy', 'learner', 'rollouts', 'rewards', 'capture')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    *_, seconds, modules = done.stdout.splitlines()
    assert float(seconds) < 0.2
    assert modules == "[]"


def test_without_the_learners_packages_a_verb_names_the_extra(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from hone.cli.main import main;"
        f"sys.exit(main(['sft', '--out', {str(tmp_path / 'sft')!r}, '-c', {str(TICTACTOE)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert done.stderr == "hone sft: torch is not installed; pip install 'hone[learner]' brings it\n"


def test_init_writes_a_file_that_loads_and_does_not_overwrite_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hone.toml"
    assert main(["init", str(path)]) == 0
    assert load(path, {}, "cpu").policy.base_model == "Qwen/Qwen3-8B"
    path.write_text("# mine\n")
    assert main(["init", str(path)]) == 1
    assert "is there already; --force replaces it" in capsys.readouterr().err
    assert path.read_text() == "# mine\n"
    assert main(["init", str(path), "--force"]) == 0
    assert "[policy]" in path.read_text()


def test_engine_prints_the_command_that_it_would_become() -> None:
    done = hone("engine", "--print", "-c", TICTACTOE)
    assert done.returncode == 0
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" in done.stdout
    assert "-m vllm.entrypoints.openai.api_server --model" in done.stdout
    assert "--max-lora-rank 8" in done.stdout


def test_a_wrong_setting_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "hone.toml"
    path.write_text("[policy]\nbase_model = 'x'\n[train]\ngroup_sise = 3\n")
    done = hone("status", "-c", str(path))
    assert done.returncode == 1
    assert done.stderr == "hone status: unknown setting train.group_sise; did you mean train.group_size?\n"


def test_status_without_anything_running(tmp_path: Path) -> None:
    done = hone("status", "-c", TICTACTOE, HONE_RUN__DIR=str(tmp_path))
    assert done.returncode == 0
    assert done.stdout == "Nothing runs here: start with `hone up` or `hone train`.\n"
    as_json = hone("status", "--json", "-c", TICTACTOE, HONE_RUN__DIR=str(tmp_path))
    assert json.loads(as_json.stdout)["waiting_for"].startswith("Nothing runs here")


def test_reading_verbs_say_that_there_is_no_store(tmp_path: Path) -> None:
    for words in (["rollouts", "ls"], ["rollouts", "show", "r_1"], ["adapters", "ls"], ["reward", "test"]):
        done = hone(*words, "-c", TICTACTOE, HONE_RUN__DIR=str(tmp_path))
        assert done.returncode == 1
        assert "nothing has run with these settings yet" in done.stderr


def test_reading_verbs_read_the_store(tmp_path: Path) -> None:
    from capture.sqlite import SqliteStore
    from capture.types import Rollout

    store = SqliteStore(tmp_path / "hone.db")
    store.start_run("one", "policy", {})
    store.open_rollout(
        Rollout(
            id="r_1",
            key_id="k",
            mode="train",
            run_id="one",
            policy="policy",
            scenario_id="s1",
            created_at=time.time(),
        )
    )
    store.close()
    where = {"HONE_RUN__DIR": str(tmp_path)}
    listed = json.loads(hone("rollouts", "ls", "--json", "-c", TICTACTOE, **where).stdout)
    assert [(one["id"], one["scenario_id"]) for one in listed] == [("r_1", "s1")]
    assert hone("rollouts", "ls", "-c", TICTACTOE, **where).stdout.startswith("r_1  train   open")
    shown = hone("rollouts", "show", "r_1", "-c", TICTACTOE, **where).stdout.splitlines()
    assert shown[0].startswith("Not yet: it is still open, with no call so far;")
    assert shown[1].startswith("r_1: train, open, no version yet")
    versions = json.loads(hone("adapters", "ls", "--json", "-c", TICTACTOE, **where).stdout)["versions"]
    assert [(one["version"], one["state"]) for one in versions] == [(0, "active")]


def test_doctor_names_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "hone.toml"
    path.write_text("[policy]\nbase_model = './missing'\n[rewards]\nscript = 'reward.py'\n")
    done = hone("doctor", "--json", "-c", str(path))
    assert done.returncode == 1
    report = json.loads(done.stdout)
    failed = {check["name"] for check in report["checks"] if not check["ok"]}
    assert {"policy.base_model", "rewards.script", "train.scenarios"} <= failed
    assert report["settings"]["train"]["group_size"] == 8
