"""The call graph against what agents did, and against its own definition written down without any art.

`Agents` is a world in which every sampled token is another number and agents do what agents do; what must
come of each call is noted when it is made. `call_sets` are calls over two tokens: they collide, and the
definition alone says what is right.
"""

import itertools
import random

import msgspec
from capture_makers import model_call
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from capture.graph import build, fates, samples


def whole(call):
    return call.prompt_ids + call.sampled_ids


def order(call):
    return call.started_at, call.id


# -- the definition --------------------------------------------------------------------------------


def slow_parent(call, calls):
    """The longest call whose prompt and sampled tokens this one's prompt begins with."""
    able = [
        one
        for one in calls
        if one.prompt_ids and one.sampled_ids  # a call without tokens is continued by nobody
        if (call.late or not one.late) and call.prompt_ids[: len(whole(one))] == whole(one)
    ]
    longest = max((len(whole(one)) for one in able), default=0)
    equal = sorted((one for one in able if len(whole(one)) == longest), key=order)
    equal = [one for one in equal if order(one) < order(call)] or equal
    equal = [one for one in equal if one.untrainable is None and not one.undelivered] or equal
    return equal[-1] if equal else None


def slow_path(call, calls):
    """The call, its parent, and so on."""
    parent = slow_parent(call, calls)
    return [call] if parent is None else [call, *slow_path(parent, calls)]


def slow_excluded(call, calls):
    if call.untrainable:
        return call.untrainable
    on_time = [one for one in calls if not one.late]
    went_on = [
        parent.id
        for one in on_time
        if (parent := slow_parent(one, calls)) is not None and order(parent) < order(one)
    ]
    if call.id in went_on:
        return None
    like = [
        one
        for one in on_time
        if (one.body_hash, one.idempotency_key) == (call.body_hash, call.idempotency_key)
    ]
    if call.idempotency_key is not None:
        last = max(like, key=lambda one: (one.retry_count, order(one)))
        if call is not last:
            return "superseded"
    elif call in slow_repeated(call, like, went_on):
        return "superseded"
    return "undelivered" if call.undelivered else None


def slow_repeated(call, like, went_on):
    """Of the calls with this one's count, those that must have been repeated: as many as came again."""
    higher = [one for one in like if one.retry_count > call.retry_count]
    counts = [one.retry_count for one in higher]
    places = max((counts.count(count) for count in counts), default=0)
    rivals = [one for one in like if one.retry_count == call.retry_count and one.id not in went_on]
    rivals = [one for one in rivals if any(order(one) < order(later) for later in higher)]
    found = []
    for is_next in (
        lambda one: one.untrainable in ("error", "partial", "unparsable"),
        lambda one: one.untrainable == "superseded",
        lambda one: one.untrainable is None and one.undelivered,
        lambda one: one.untrainable is None,
        lambda one: True,
    ):
        found += sorted((one for one in rivals if is_next(one) and one not in found), key=order)
    return found[:places]


def slow_owner(call, calls):
    """The leaf of the sample that trains the call: the earliest of those it leads to."""
    trainable = [one for one in calls if slow_excluded(one, calls) is None]
    inner = {above.id for one in trainable for above in slow_path(one, calls)[1:]}
    leaves = [one for one in trainable if one.id not in inner]
    return min((leaf for leaf in leaves if call in slow_path(leaf, calls)), key=order)


def check_samples(graph, calls):
    """Every sampled token of a trainable call is trained once, where it was sampled; nothing else is."""
    by_id = {call.id: call for call in calls}
    trained = []
    for sample in samples(graph):
        owned = set()
        for span in sample.spans:
            call = by_id[span.call_id]
            trained.append(call.id)
            assert sample.token_ids[: span.start] == call.prompt_ids
            assert sample.token_ids[span.start : span.end] == call.sampled_ids
            assert sample.sampled_logprobs[span.start : span.end] == call.sampled_logprobs
            assert (span.policy_version, span.temperature) == (call.policy_version, call.temperature)
            places = set(range(span.start, span.end))
            assert places
            assert not places & owned
            owned |= places
        assert owned
        assert sample.loss_mask == [place in owned for place in range(len(sample.token_ids))]
    trainable = [fate.call_id for fate in fates(graph) if fate.excluded is None]
    assert sorted(trained) == sorted(id for id in trainable if by_id[id].sampled_ids)


@st.composite
def call_sets(draw):
    """Random agents over an alphabet of two tokens: many continue, collide, retry, repeat, drift."""
    calls = []
    for index in range(draw(st.integers(1, 9))):
        tokens = st.lists(st.integers(0, 1), min_size=1, max_size=3)
        before = draw(st.sampled_from([None, *calls]))
        prompt = draw(tokens)
        if before is not None:
            kind = draw(st.sampled_from(["continue", "repeat", "exact", "drift"]))
            prompt = {
                "continue": whole(before) + prompt,
                "repeat": before.prompt_ids,
                "exact": whole(before),
                "drift": [*whole(before)[:-1], 1 - whole(before)[-1], *prompt] if whole(before) else prompt,
            }[kind]
        call = model_call(
            id=f"c_{index}",
            started_at=draw(st.sampled_from([1.0, 2.0, 3.0])),
            prompt_ids=prompt,
            sampled_ids=draw(tokens),
            body_hash=bytes([draw(st.integers(0, 2))]),
            retry_count=draw(st.integers(0, 2)),
            idempotency_key=draw(st.sampled_from([None, None, "k"])),
            undelivered=draw(st.booleans()),
            untrainable=draw(st.sampled_from([None, None, None, "grammar", "partial"])),
        )
        if draw(st.integers(0, 5)) == 0:
            known = draw(st.sampled_from(["late", None]))  # as ingest reads it, or as it came
            call = msgspec.structs.replace(call, late=True, untrainable=known)
        if draw(st.integers(0, 7)) == 0:
            call = msgspec.structs.replace(call, prompt_ids=[], sampled_ids=[], untrainable="error")
        calls.append(call)
    return calls


@given(call_sets(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_graph_is_what_its_definition_says(calls, rng):
    graph = build(rng.sample(calls, len(calls)))
    assert graph == build(calls)  # a function of the set
    assert list(graph.nodes) == [call.id for call in sorted(calls, key=order)]
    for call in calls:
        path = [one.id for one in reversed(graph.path(call.id))]
        assert path == [one.id for one in slow_path(call, calls)]
        node = graph.nodes[call.id]
        before = [one for one in calls if order(one) < order(call) and (call.late or not one.late)]
        siblings = [one for one in before if graph.nodes[one.id].parent == node.parent]
        assert (node.fork is None) == (node.parent is not None and not siblings)
        if node.near is not None:
            near = whole(graph.nodes[node.near].call)
            assert call.prompt_ids[: node.shared] == near[: node.shared]
            assert call.prompt_ids[node.shared :][:1] != near[node.shared :][:1] or not near[node.shared :]
    assert {fate.call_id: fate.excluded for fate in fates(graph)} == {
        call.id: ("late" if call.late and call.untrainable is None else slow_excluded(call, calls))
        for call in calls
    }


@given(call_sets())
@settings(deadline=None)
def test_every_token_is_trained_in_the_earliest_branch_that_holds_its_call(calls):
    calls = [one for one in calls if not one.late]
    graph = build(calls)
    check_samples(graph, calls)
    for sample in samples(graph):
        for span in sample.spans:
            owner = slow_owner(graph.nodes[span.call_id].call, calls)
            assert sample.token_ids == whole(owner)


@given(call_sets())
@settings(deadline=None)
def test_settling_is_stable(calls):
    """Once the fates are written down, the graph of what was stored gives the same fates and samples."""
    before = build(calls)
    settled = []
    for call, fate in zip(before.nodes.values(), fates(before), strict=True):
        undelivered = fate.excluded == "undelivered"
        settled.append(msgspec.structs.replace(call.call, untrainable=fate.excluded, undelivered=undelivered))
    random.Random(0).shuffle(settled)
    after = build(settled)
    assert fates(after) == fates(before)
    assert samples(after) == samples(before)


@given(call_sets())
@settings(deadline=None)
def test_late_calls_change_no_sample(calls):
    on_time = [call for call in calls if not call.late]
    assert samples(build(calls)) == samples(build(on_time))
    graph, without = build(calls), build(on_time)
    assert {id: node for id, node in graph.nodes.items() if not node.call.late} == without.nodes


# -- agents ----------------------------------------------------------------------------------------


class Part(msgspec.Struct, frozen=True):
    """A message of a conversation, and the tokens that a template makes of it."""

    message: dict
    tokens: list[int]
    thought: int = 0  # leading tokens that are reasoning


class Agent(msgspec.Struct):
    """What an agent holds: its conversation, and where it stands in the call graph."""

    system: Part
    tools: list[dict]
    said: list[Part]
    at: str | None = None  # the call whose prompt and sampled tokens `said` begins with, the longest
    asked: str | None = None  # the call that was made last, until its answer is used
    alone: bool = True  # no other call was made with the same request


class Agents(RuleBasedStateMachine):
    """Each rule is something that agents, SDKs, clients and engines do."""

    def __init__(self):
        super().__init__()
        self.numbers = itertools.count(100)
        self.clock = 0.0
        self.sealed = False
        self.agents = []
        self.calls = {}
        self.answers = {}  # of calls: the response as a part
        self.length = {}  # of calls: parts of the conversation with its answer
        self.parent, self.fork, self.fate = {}, {}, {}  # what must come of each call

    # -- what rules are made of

    def text(self, role, count=1, thought=0):
        """A message that nobody said before, in tokens that nobody saw before."""
        number = next(self.numbers)
        message = {"role": role, "content": f"say {number}"}
        if thought:
            message["reasoning"] = "hm"
        return Part(message, [next(self.numbers) for _ in range(count)], thought)

    def call(self, agent, fork=None, parent=None, answer=None, **fields):
        """The agent asks; ``fork`` is why a branch must begin here if ``parent`` was continued before."""
        answer = answer or self.text("assistant", count=3)
        id = f"c_{len(self.calls):03}"
        late = {"late": True, "untrainable": "late"} if self.sealed else {}
        call = model_call(
            **{
                "id": id,
                "started_at": self.clock,
                "messages": [agent.system.message, *(part.message for part in agent.said)],
                "tools": agent.tools,
                "response": answer.message,
                "prompt_ids": agent.system.tokens + [id for part in agent.said for id in part.tokens],
                "sampled_ids": answer.tokens,
                "body_hash": repr((agent.system, agent.tools, agent.said)).encode(),
                **late,
                **fields,
            }
        )
        known = [one for one in self.calls.values() if one.prompt_ids or one.response]
        first = parent is not None and parent not in self.parent.values()
        self.calls[id], self.answers[id] = call, answer
        self.length[id] = len(agent.said) + 1
        self.parent[id] = parent
        self.fork[id] = None if first else (fork or "sub_agent") if known else "root"
        self.fate[id] = call.untrainable
        if not call.prompt_ids:
            self.parent[id], self.fork[id] = None, "no_tokens"
        elif not self.sealed and parent is not None and self.fate[parent] == "undelivered":
            self.fate[parent] = None  # it was there after all
        self.clock += 1.0
        agent.asked = id
        return id

    def ask(self, agent, question=True, **fields):
        """Use the answer to the last request, if there is one, and go on."""
        self.use(agent)
        if question:
            agent.said.append(self.text("user"))
        agent.alone = True
        return self.call(agent, parent=agent.at, **fields)

    def use(self, agent):
        if agent.asked is not None:
            agent.said.append(self.answers[agent.asked])
            agent.at = agent.asked if self.calls[agent.asked].prompt_ids else agent.at
            agent.asked = None

    def told(self, agent, count):
        """The deepest call that the first ``count`` parts of the agent's conversation hold whole."""
        at = agent.at
        while at is not None and self.length[at] > count:
            at = self.parent[at]
        return at

    def pick(self, data, wanted=lambda agent: True):
        able = [agent for agent in self.agents if wanted(agent)]
        return data.draw(st.sampled_from(able)) if able else None

    def ready(self, data, turns=1):
        """An agent with an answer at hand and so many turns behind it."""
        agent = self.pick(data, lambda one: one.asked is not None and len(one.said) >= 2 * turns - 1)
        if agent is None or self.calls[agent.asked].response is None:
            return None
        return agent

    # -- agents

    @initialize(thinks=st.booleans())
    def first(self, thinks):
        self.begin(thinks)

    @precondition(lambda self: len(self.agents) < 3)
    @rule(thinks=st.booleans())
    def begin(self, thinks):
        """A new agent, or a sub-agent of one that is there: it shares nothing with it."""
        agent = Agent(self.text("system"), [], [self.text("user")])
        self.call(agent, "sub_agent", answer=self.text("assistant", 4, 2) if thinks else None)
        self.agents.append(agent)

    @rule(data=st.data(), finish=st.sampled_from(["stop", "length"]), thinks=st.booleans())
    def go_on(self, data, finish, thinks):
        agent = self.ready(data)
        if agent is not None:
            answer = self.text("assistant", 4, 2) if thinks else None
            self.ask(agent, fork="branched", finish_reason=finish, answer=answer)

    @rule(data=st.data(), count=st.integers(1, 3), keyed=st.booleans())
    def ask_in_parallel(self, data, count, keyed):
        """The same request several times at once; each answer is gone on with by itself."""
        agent = self.ready(data)
        if agent is None:
            return
        self.use(agent)
        agent.said.append(self.text("user"))
        agent.alone = keyed
        for number in range(count + 1):
            key = f"k{next(self.numbers)}" if keyed else None
            self.clock -= 1.0 if number else 0.0
            other = agent if number == 0 else Agent(agent.system, agent.tools, list(agent.said), agent.at)
            other.alone = keyed
            self.call(other, "repeated", agent.at, idempotency_key=key)
            if number:
                self.agents.append(other)

    @rule(data=st.data(), same=st.booleans())
    def step_back(self, data, same):
        """A search over the conversation: on from an earlier answer, with the same question or another."""
        agent = self.ready(data, turns=2)
        if agent is None:
            return
        count = 2 * data.draw(st.integers(1, (len(agent.said) - 1) // 2))
        at = self.told(agent, count)
        if at is None or self.length[at] != count:
            return
        question = agent.said[count] if same else self.text("user")
        other = Agent(agent.system, agent.tools, [*agent.said[:count], question], at, alone=False)
        self.call(other, "repeated" if same else "branched", at)
        self.agents.append(other)

    @rule(data=st.data(), system=st.booleans(), tools=st.booleans())
    def hand_off(self, data, system, tools):
        agent = self.ready(data)
        if agent is None or not (system or tools):
            return
        self.use(agent)
        was = agent.system
        told = self.text("system")
        # Tools stand in the system's part of the prompt, as in most templates.
        agent.system = told if system else Part(was.message, told.tokens)
        agent.tools = (
            [{"type": "function", "function": {"name": str(next(self.numbers))}}] if tools else agent.tools
        )
        agent.at, agent.alone = None, True
        agent.said.append(self.text("user"))
        reason = "handoff" if system and tools else "new_system_prompt" if system else "changed_tools"
        self.call(agent, reason)

    @rule(data=st.data())
    def strip_the_reasoning(self, data):
        agent = self.ready(data)
        if agent is None or not self.answers[agent.asked].thought:
            return
        self.use(agent)
        part = agent.said[-1]
        message = {name: value for name, value in part.message.items() if name != "reasoning"}
        self.replace_last(agent, Part(message, part.tokens[part.thought :]), "stripped_reasoning")

    @rule(data=st.data())
    def tokenise_anew(self, data):
        agent = self.ready(data)
        if agent is not None and not self.reasoned(agent):
            self.use(agent)
            part = agent.said[-1]
            drifted = Part(part.message, [*part.tokens[:-1], next(self.numbers)])
            self.replace_last(agent, drifted, "retokenised")

    @rule(data=st.data())
    def rewrite_the_response(self, data):
        agent = self.ready(data)
        if agent is not None:
            self.use(agent)
            self.replace_last(agent, self.text("assistant", 3), "rewritten_response")

    def reasoned(self, agent):
        """Whether anything in the conversation was thought: then that explains a difference in tokens."""
        parts = [*agent.said, self.answers[agent.asked]]
        return any("reasoning" in part.message for part in parts)

    def replace_last(self, agent, part, reason):
        agent.said[-1] = part
        agent.at = self.told(agent, len(agent.said) - 1)
        agent.alone = True
        agent.said.append(self.text("user"))
        self.call(agent, reason, agent.at)

    @rule(data=st.data())
    def rewrite_history(self, data):
        """A message before the last response is another now."""
        agent = self.ready(data, turns=2)
        if agent is None:
            return
        self.use(agent)
        place = data.draw(st.integers(0, len(agent.said) - 3))
        agent.said[place] = self.text(agent.said[place].message["role"])
        agent.at = self.told(agent, place)
        agent.alone = True
        agent.said.append(self.text("user"))
        self.call(agent, "rewritten_history" if agent.at is None else "branched", agent.at)

    @rule(data=st.data(), kept=st.integers(0, 1))
    def compact(self, data, kept):
        """The conversation is summarised, but for its first question or its first turn."""
        agent = self.ready(data, turns=3)
        if agent is None:
            return
        self.use(agent)
        agent.at = self.told(agent, 2 * kept)
        agent.said = [*agent.said[: 2 * kept or 1], self.text("user")]
        agent.alone = True
        self.call(agent, "compacted" if agent.at is None else "branched", agent.at)

    # -- clients and engines

    @rule(data=st.data())
    def hang_up(self, data):
        """The connection broke after the engine's end; whether the agent had the answer shows later."""
        agent = self.pick(data, lambda one: one.asked is not None)
        if agent is None or self.sealed:
            return
        call = self.calls[agent.asked]
        if sum(answer is self.answers[call.id] for answer in self.answers.values()) > 1:
            return  # sampled twice alike: which of the two the agent had, nobody can tell
        self.calls[agent.asked] = msgspec.structs.replace(call, undelivered=True)
        if self.fate[agent.asked] is None:
            self.fate[agent.asked] = "undelivered"

    @rule(data=st.data(), untrainable=st.sampled_from(["error", "partial"]), keyed=st.booleans())
    def fail(self, data, untrainable, keyed):
        """The upstream breaks the call, before or after its first token; its answer is no use."""
        agent = self.ready(data)
        if agent is None:
            return
        nothing = {"prompt_ids": [], "sampled_ids": [], "response": None} if untrainable == "error" else {}
        key = f"k{next(self.numbers)}" if keyed else None
        self.ask(agent, fork="branched", untrainable=untrainable, idempotency_key=key, **nothing)

    @rule(data=st.data())
    def mask(self, data):
        """A call with a forced tool: it is gone on with, and not trained."""
        agent = self.ready(data)
        if agent is not None:
            self.ask(agent, fork="branched", untrainable="grammar")

    @rule(data=st.data(), same=st.booleans())
    def ask_again(self, data, same):
        """The SDK repeats the last request, by its count or under its key, and uses the new answer."""
        agent = self.pick(data, lambda one: one.asked is not None and one.alone)
        if agent is None:
            return
        first = self.calls[agent.asked]
        answer = self.answers[first.id] if same and first.sampled_ids and not first.undelivered else None
        again = {"idempotency_key": first.idempotency_key}
        if first.idempotency_key is None:
            again["retry_count"] = first.retry_count + 1
        self.call(agent, "repeated" if first.prompt_ids else "branched", agent.at, answer=answer, **again)
        if not first.prompt_ids and agent.at is None:
            self.fork.pop(
                agent.asked
            )  # the first to be answered of a new conversation, or of a handed-off one
        if self.fate[first.id] in (None, "undelivered") and not self.sealed:
            self.fate[first.id] = "superseded"

    @rule(sure=st.integers(0, 7))
    @precondition(lambda self: not self.sealed and len(self.calls) > 6)
    def seal(self, sure):
        self.sealed = sure == 0
        # What was asked before and comes again after is no repetition that counts.

    # -- what must hold

    @invariant()
    def everything_is_explained(self):
        calls = list(self.calls.values())
        random.Random(len(calls)).shuffle(calls)
        graph = build(calls)
        verdicts = {fate.call_id: fate.excluded for fate in fates(graph)}
        for id, node in graph.nodes.items():
            found = (node.parent, node.fork, verdicts[id])
            assert found == (self.parent[id], self.fork[id], self.fate[id]), id
        check_samples(graph, calls)
        for call in calls:
            assert [one.id for one in reversed(graph.path(call.id))] == [
                one.id for one in slow_path(call, calls)
            ]

    def teardown(self):
        for reason in {fork for fork in self.fork.values() if fork}:
            event(f"fork: {reason}")
        for fate in {fate for fate in self.fate.values() if fate}:
            event(f"fate: {fate}")


Agents.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
test_agents = Agents.TestCase
