"""Agents that say nothing of who they are, in any order, through two proxies over one store.

The model beside it is slow and obvious: it knows each agent, and writes down which rollouts were given
which conversation. No rollout ever holds calls of two agents; an agent whose conversation one rollout
alone was given goes on there.
"""

import asyncio
import hashlib
import json
import tempfile
import uuid
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from replaying_clients import CLIENTS, TOOL_CLIENTS

from capture.frames import pack
from capture.ids import new_id
from capture.sqlite import SqliteStore
from capture.types import RawCall, Stitch
from proxy.attribution import Attributor, Found, first_of
from proxy.dialects import chat
from proxy.heads import Heads
from proxy.keys import Caller
from proxy.rules import Live, rules
from proxy.settings import Settings
from proxy.stitch import AMBIGUOUS, NO_HISTORY, PREFIX, TOOL_CALL, UNKNOWN
from proxy.stitches import Stitches
from proxy.storage import Storage

KEYS = [Caller(key_id=name, scopes=frozenset({"infer"})) for name in ("ann", "bob")]
PROXIES = (0, 1)
SAYS = st.sampled_from(["a", " a\n", "b"]) | st.integers(0, 1)
MORE = st.sampled_from(["on", "else"])


class Agent:
    """Somebody who calls: what it was told so far, and how its client writes that down."""

    def __init__(self, name: str, caller: Caller, client: str, has_random_ids: bool) -> None:
        self.name = name
        self.caller = caller
        self.client = CLIENTS[client]
        self.calls_tools = client in TOOL_CLIENTS
        self.has_random_ids = has_random_ids
        self.turns: list[dict[str, Any]] = []


class Pending(msgspec.Struct, kw_only=True):
    """A call on its way."""

    agent: Agent
    turns: list[dict[str, Any]]
    body: bytes
    retry_count: int
    found: Found


class Given(msgspec.Struct):
    """Which rollouts (by the first of those that continue each other) were given a conversation."""

    rollouts: set[str]
    last: RawCall
    undelivered: bool = False


class Strangers(RuleBasedStateMachine):
    """What is attributed is checked where it happens, in `_attribute`."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "store.sqlite"
        self.store = SqliteStore(self.path)
        self.store._db.execute("PRAGMA synchronous = OFF")  # nothing here is about losing power
        self.proxies = [self._proxy() for _ in PROXIES]
        self.agents: list[Agent] = []
        self.pending: list[Pending] = []
        self.owner: dict[str, str] = {}  # rollout -> agent
        self.root: dict[str, str] = {}  # rollout -> the first of those that it continues
        self.given: dict[tuple[str, str], Given] = {}  # (key, conversation) -> rollouts
        self.gave: dict[tuple[str, str], str] = {}  # (key, random tool call id) -> root rollout

    def teardown(self) -> None:
        assert self.store.verify() == []
        for _, storage in self.proxies:
            self.runner.run(storage.close())
        self.store.close()
        self.runner.close()
        self.directory.cleanup()

    def _proxy(self) -> tuple[Attributor, Storage]:
        storage = Storage(SqliteStore(self.path))
        return Attributor(
            Live(rules(Settings(), {})), Heads(storage, 100, 0.0), Stitches(storage, 100)
        ), storage

    # -- agents ----------------------------------------------------------------------------------

    @initialize(clients=st.lists(st.sampled_from(sorted(CLIENTS)), min_size=3, max_size=3))
    def begin(self, clients: list[str]) -> None:
        for n, client in enumerate(clients):
            self.arrive(KEYS[0], client, n == 2, 0)

    @rule(
        caller=st.sampled_from([KEYS[0], KEYS[0], KEYS[0], KEYS[1]]),
        client=st.sampled_from(sorted(CLIENTS)),
        has_random_ids=st.booleans(),
        proxy=st.sampled_from(PROXIES),
    )
    def arrive(self, caller: Caller, client: str, has_random_ids: bool, proxy: int) -> None:
        agent = Agent(f"a{len(self.agents)}", caller, client, has_random_ids)
        agent.turns = [{"user": "go"}]
        self.agents.append(agent)
        self._call(agent, proxy)

    @rule(data=st.data(), proxy=st.sampled_from(PROXIES))
    def call(self, data: st.DataObject, proxy: int) -> None:
        """The next call of an agent, also while an earlier one of it is on its way."""
        self._call(data.draw(st.sampled_from(self.agents)), proxy)

    @rule(data=st.data(), more=MORE)
    def go_back(self, data: st.DataObject, more: str) -> None:
        """An agent takes up an earlier point of its conversation again."""
        agent = data.draw(st.sampled_from(self.agents))
        answers = [n for n, turn in enumerate(agent.turns) if "answer" in turn]
        if answers:
            end = data.draw(st.sampled_from(answers))
            agent.turns = [*agent.turns[: end + 1], _next(agent.turns[end]["answer"], more)]

    # -- answers ---------------------------------------------------------------------------------

    @precondition(lambda self: self.pending)
    @rule(
        data=st.data(),
        says=SAYS,
        streamed=st.booleans(),
        more=MORE,
    )
    def answer(self, data: st.DataObject, says: str | int, streamed: bool, more: str) -> None:
        pending = data.draw(st.sampled_from(self.pending))
        given = self._commit(pending, says, 200, streamed)
        pending.agent.turns = [*pending.turns, {"answer": given}, _next(given, more)]

    @rule(
        data=st.data(),
        proxies=st.lists(st.sampled_from(PROXIES), min_size=1, max_size=4),
        says=SAYS,
        more=MORE,
    )
    def converse(self, data: st.DataObject, proxies: list[int], says: str | int, more: str) -> None:
        """Some turns of one agent, one after the other."""
        agent = data.draw(st.sampled_from(self.agents))
        for proxy in proxies:
            self._call(agent, proxy)
            turns = agent.turns
            given = self._commit(self.pending[-1], says, 200, False)
            agent.turns = [*turns, {"answer": given}, _next(given, more)]

    @precondition(lambda self: self.pending)
    @rule(
        data=st.data(), says=st.sampled_from(["a", "b"]), marked=st.booleans(), proxy=st.sampled_from(PROXIES)
    )
    def lose_the_answer(self, data: st.DataObject, says: str, marked: bool, proxy: int) -> None:
        """It was durable, and did not arrive: the client asks again, and says so or not."""
        pending = data.draw(st.sampled_from(self.pending))
        self._commit(pending, says, 200, False)
        self.store.mark_undelivered([self.last.id])
        for given in self.given.values():
            given.undelivered |= given.last.id == self.last.id
        self._again(pending, marked, proxy)

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), marked=st.booleans(), proxy=st.sampled_from(PROXIES))
    def fail(self, data: st.DataObject, marked: bool, proxy: int) -> None:
        pending = data.draw(st.sampled_from(self.pending))
        self._commit(pending, None, 502, False)
        self._again(pending, marked, proxy)

    @rule(proxy=st.sampled_from(PROXIES), data=st.data())
    def restart(self, proxy: int, data: st.DataObject) -> None:
        """A proxy dies with all it remembered; half of what was on its way is asked again."""
        self.runner.run(self.proxies[proxy][1].close())
        self.proxies[proxy] = self._proxy()
        for pending in [one for one in self.pending if data.draw(st.booleans())]:
            self.pending.remove(pending)
            self._again(pending, data.draw(st.booleans()), proxy)

    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        found = self.store.rollouts(states=["open"])
        if found:
            self.store.seal_rollout(data.draw(st.sampled_from(found)).id, "completed")

    # -- what every call goes through --------------------------------------------------------------

    def _call(self, agent: Agent, proxy: int, body: bytes = b"", retry_count: int = 0) -> None:
        messages = agent.client(agent.turns)
        body = body or json.dumps({"model": "m", "messages": messages}).encode()
        found = self._attribute(agent, proxy, chat.parse(body)["messages"])
        found.head.begin()
        pending = Pending(agent=agent, turns=agent.turns, body=body, retry_count=retry_count, found=found)
        self.pending.append(pending)

    def _again(self, pending: Pending, marked: bool, proxy: int) -> None:
        agent = pending.agent
        turns, agent.turns = agent.turns, pending.turns
        self._call(agent, proxy, pending.body, pending.retry_count + 1 if marked else 0)
        agent.turns = turns

    def _attribute(self, agent: Agent, proxy: int, messages: bytes) -> Found:
        expected = self._expected(agent)
        found = self.runner.run(self.proxies[proxy][0].attribute(agent.caller, None, {}, messages))
        rollout = found.head.rollout
        assert (rollout.mode, rollout.headless, rollout.group_id, rollout.key_id) == (
            "observe",
            True,
            None,
            agent.caller.key_id,
        )
        assert found.head.is_open
        if found.opened:
            assert rollout.id not in self.owner
            continued = (rollout.metadata or {}).get("continues")
            assert continued is None or self.owner[continued] == agent.name
            self.owner[rollout.id] = agent.name
            self.root[rollout.id] = self.root.get(continued, rollout.id)
        assert self.owner[rollout.id] == agent.name, "strangers were merged"
        reason, root = expected
        assert found.reason == reason
        if root is None:
            assert (found.attribution, found.opened) == ("headless", True)
        else:
            assert found.attribution == "stitched"
            assert self.root[rollout.id] == root
        event(f"{found.attribution}: {reason}")
        return found

    def _expected(self, agent: Agent) -> tuple[str, str | None]:
        """Reason, and the root of the rollout that an agent must come to; None: a new one."""
        answers = [n for n, turn in enumerate(agent.turns) if "answer" in turn]
        if not answers:
            return NO_HISTORY, None
        key = agent.caller.key_id
        for n in reversed(answers):
            if ids := [id for id in _ids(agent.turns[n]["answer"]) if (key, id) in self.gave]:
                return TOOL_CALL, self.gave[key, ids[0]]
        given = self.given.get((key, _meaning(agent, agent.turns[: answers[-1] + 1])))
        if given is None:
            return UNKNOWN, None
        return (PREFIX, next(iter(given.rollouts))) if len(given.rollouts) == 1 else (AMBIGUOUS, None)

    def _commit(
        self, pending: Pending, says: str | int | None, status: int, streamed: bool
    ) -> dict[str, Any]:
        """A call on its way gets its answer, and becomes durable."""
        self.pending.remove(pending)
        agent, head, trail = pending.agent, pending.found.head, pending.found.trail
        assert trail is not None
        answer = _answer(agent, says)
        if status != 200:
            answers = []
        elif streamed:
            stream = chat.Stream(chat.Asked(model="m", stream=True), None, gather=True)
            for chunk in _chunks(answer):
                stream.take(chunk)
            answers = stream.answers()
        else:
            answers = chat.Whole(json.dumps({"choices": [{"message": answer}]}).encode()).answers()
        first = first_of(head.rollout)
        stitches = [Stitch(digest, first) for one in answers for digest in trail.then(one)]
        self.last = raw = self._raw(pending, status)
        self.store.commit_calls(pack([raw]), [raw], [head.rollout] if head.is_new else [], {raw.id: stitches})
        head.end(captured=True)
        if status == 200:
            self._note(agent, raw, [*pending.turns, {"answer": answer}])
        return answer

    def _raw(self, pending: Pending, status: int) -> RawCall:
        return RawCall(
            id=new_id("c"),
            rollout_id=pending.found.head.rollout.id,
            key_id=pending.agent.caller.key_id,
            mode="observe",
            attribution=pending.found.attribution,
            route="m",
            upstream="u",
            started_at=1.0,
            ended_at=2.0,
            status=status,
            request=pending.body,
            response=b"",
            retry_count=pending.retry_count,
            body_hash=hashlib.blake2b(pending.body, digest_size=16).digest(),
        )

    def _note(self, agent: Agent, raw: RawCall, turns: list[dict[str, Any]]) -> None:
        key, root = agent.caller.key_id, self.root[raw.rollout_id]
        self.gave.update({(key, id): root for id in _ids(turns[-1]["answer"])})
        place = (key, _meaning(agent, turns))
        before = self.given.get(place)
        is_superseded = (
            before is not None
            and len(before.rollouts) == 1
            and before.undelivered
            and before.last.body_hash == raw.body_hash
            and before.last.retry_count < raw.retry_count
        )
        rollouts = set() if before is None or is_superseded else before.rollouts
        self.given[place] = Given(rollouts | {root}, raw)


def _answer(agent: Agent, says: str | int | None) -> dict[str, Any]:
    if not isinstance(says, int) or not agent.calls_tools:
        return {"role": "assistant", "content": str(says)}
    id = f"chatcmpl-tool-{uuid.uuid4().hex}" if agent.has_random_ids else "call_0"
    function = {"name": "play", "arguments": f'{{"cell": {says}}}'}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": id, "type": "function", "function": function}],
    }


def _chunks(answer: dict[str, Any]) -> list[bytes]:
    """The answer in two halves, and its end."""
    if answer.get("tool_calls"):
        (call,) = answer["tool_calls"]
        text = call["function"]["arguments"]
        rest = {"index": 0, "function": {"arguments": text[4:]}}
        call = {**call, "index": 0, "function": {**call["function"], "arguments": text[:4]}}
        deltas = [{"role": "assistant", "tool_calls": [call]}, {"tool_calls": [rest]}, {}]
    else:
        deltas = [
            {"role": "assistant", "content": answer["content"][:1]},
            {"content": answer["content"][1:]},
            {},
        ]
    return [b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode() for delta in deltas]


def _next(answer: dict[str, Any], more: str) -> dict[str, Any]:
    """What an agent adds to an answer: a tool's result, or what its user says."""
    calls = answer.get("tool_calls")
    return {"result": more, "id": calls[0]["id"]} if calls else {"user": more}


def _ids(answer: dict[str, Any]) -> list[str]:
    return [call["id"] for call in answer.get("tool_calls", ()) if call["id"] != "call_0"]


def _meaning(agent: Agent, turns: list[dict[str, Any]]) -> str:
    """What was said, without how; smolagents' messages differ from everybody's but its own."""
    is_text = agent.client is CLIENTS["smolagents"]
    said = []
    for turn in turns:
        if "answer" in turn:
            calls = turn["answer"].get("tool_calls")
            said.append(calls[0]["function"]["arguments"] if calls else turn["answer"]["content"].strip())
        else:
            said.append(
                ["smolagents" if is_text else sorted(turn)[-1], turn.get("user") or turn.get("result")]
            )
    return json.dumps(said)


Strangers.TestCase.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_strangers = Strangers.TestCase
