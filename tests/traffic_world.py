"""A store with rollouts of conversations, as control would leave them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capture_makers import POLICY, model_call, raw_call, rollout

from capture import graph
from capture.frames import pack
from capture.sqlite import SqliteStore
from capture.types import ModelCall

SYSTEM = {"role": "system", "content": "You sort books."}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def talk(*answers: str, asked: str = "go", **fields: Any) -> list[dict[str, Any]]:
    """The fields of calls that go on from one another, in text and in tokens; answer n (from 3) is n0, n1."""
    messages, prompt, made = [SYSTEM, user(asked)], [1, 2], []
    for number, answer in enumerate(answers, 3):
        sampled = [10 * number, 10 * number + 1]
        made.append(
            {
                "messages": messages,
                "response": assistant(answer),
                "prompt_ids": prompt,
                "sampled_ids": sampled,
                "tools": [TOOL],
                **fields,
            }
        )
        messages, prompt = [*messages, assistant(answer), user("and?")], [*prompt, *sampled, 3]
    return made


class World:
    """Calls are named by their rollout and number: `r_1` has `c_r_1_1`, `c_r_1_2`…"""

    def __init__(self, path: Path) -> None:
        self.store = SqliteStore(path)
        self.store.start_run("run", POLICY, {})

    def add(
        self,
        id: str,
        calls: Sequence[dict[str, Any]],
        *,
        reward: float | None = None,
        sealed: bool = True,
        late: Sequence[dict[str, Any]] = (),
        **fields: Any,
    ) -> None:
        """A rollout with these calls (fields of ModelCall), sealed, settled and scored where that is said."""
        self.store.open_rollout(rollout(id=id, **fields))
        for number, call in enumerate(calls, 1):
            self._call(id, number, call)
        if not sealed:
            return
        self.store.seal_rollout(id, "completed")
        for number, call in enumerate(late, len(calls) + 1):
            self._call(id, number, {**call, "late": True})
        self.store.settle(id, graph.fates(graph.build(self.store.calls(id))))
        if reward is not None:
            self.store.save_score(id, reward, {}, "script")

    def _call(self, rollout_id: str, number: int, fields: dict[str, Any]) -> None:
        call: ModelCall = model_call(
            rollout_id,
            id=f"c_{rollout_id}_{number}",
            started_at=float(number),
            model=fields.get("model", POLICY),
            **{key: value for key, value in fields.items() if key != "model"},
        )
        raw = raw_call(
            rollout_id,
            id=call.id,
            policy=call.policy,
            policy_version=call.policy_version,
            retry_count=call.retry_count,
            body_hash=call.body_hash,
        )
        self.store.commit_calls(pack([raw]), [raw], [])
        self.store.save_calls([call], {})
