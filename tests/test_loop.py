"""The whole loop through the real vLLM: agents that know nothing of Hone, and a model that changes."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Engine
from stack import Stack

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture
def stack(request: pytest.FixtureRequest, tmp_path: Path, engine: Engine) -> Iterator[Stack]:
    running = Stack(
        tmp_path, policy="loop-" + request.node.name[5:25], engine_url=engine.url, steps=3, ahead=1
    )
    yield running
    running.stop()


def processes_of(root: Path) -> list[str]:
    """Command lines of the processes that name this run's directory in their arguments or environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            text = command + (entry / "environ").read_bytes()
        except OSError:
            continue
        if str(root).encode() in text and command:
            found.append(command.replace(b"\0", b" ").decode())
    return found


def test_a_run_trains_publishes_and_activates_every_step(stack: Stack) -> None:
    stack.start()
    stack.finish()
    with stack.store() as store:
        run_id = store.latest_run()
        assert run_id is not None
        steps = store.steps(run_id)
        versions = [version for version in store.versions(stack.policy) if version.version > 0]
        assert [row.version for row in steps if row.version] == [version.version for version in versions]
        assert len({version.sha256 for version in versions}) == len(versions)
        assert all(version.activated_at for version in versions)
        newest = store.active_version(stack.policy)
        assert newest is not None
        assert newest.version == versions[-1].version

        assert max(row.metrics["mismatch_max"] for row in steps) <= 1e-3
        assert sum(row.metrics["mismatch_tokens"] for row in steps) > 0
        assert all(row.metrics["rollouts"] == 16 for row in steps)

        trained = store.rollouts(run_id=run_id, states=["trained"])
        assert len(trained) == stack.steps * 16
        assert {"outcome", "format", "invalid"} <= trained[0].scores.keys()
        first_versions = {rollout.policy_version for rollout in trained}
        assert len(first_versions) >= 2, "every rollout was sampled from the starting policy"
        calls = [call for rollout in trained for call in store.calls(rollout.id)]
        assert {call.policy_version for call in calls} == first_versions
        assert all(len(call.sampled_ids) == call.completion_tokens for call in calls)
    assert not processes_of(stack.root)


def test_sigterm_stops_everything_and_the_run_goes_on_later(stack: Stack) -> None:
    stack.start()
    stack.wait_for(lambda store: store.counts().calls >= 20, "calls")
    assert stack.process is not None
    stack.process.send_signal(signal.SIGTERM)
    assert stack.process.wait(60) == 130
    assert not processes_of(stack.root)
    with stack.store() as store:
        assert store.verify() == []
        assert all(version.version == 0 or version.path for version in store.versions(stack.policy))
    stack.start()
    stack.finish()
