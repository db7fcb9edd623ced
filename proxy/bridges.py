"""Carries `proxy.continuity` out: finds what a training call goes on from, has the engine render it.

The ids go in with the ordinary request (vLLM takes the ids of an earlier stage in
`kv_transfer_params.prompt_token_ids` and then neither renders nor tokenises), so the answer, streamed or
not, with its tool calls, is made and captured as ever. The engine reports the ids that it used, and
they are compared.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

import msgspec
from msgspec import Raw

from capture.errors import StoreError, UpstreamError
from capture.settings import Continuity
from proxy import continuity
from proxy.call import Call
from proxy.continuity import (
    DRIFTED,
    EXACT,
    FAITHFUL,
    IGNORED,
    PROMPT_FIELDS,
    STRIPPED,
    UNKNOWN,
    UNRENDERED,
    UNSUPPORTED,
    Onward,
    Unproven,
    bridge,
    listed,
    read_ids,
    without_thought,
)
from proxy.dialects import chat
from proxy.dialects.chat import FALSE, TRUE, Fields
from proxy.engines import Engine
from proxy.metrics import Metrics
from proxy.template import PROBES, Template, learn
from proxy.tips import Tips
from proxy.upstream import Upstream

log = logging.getLogger("hone.proxy")

RENDER = "/v1/chat/completions/render"
RENDER_TIMEOUT_S = 10.0  # of one rendering; then the call goes as it came
LOOKING_S = 600.0  # `auto` goes on looking for that long after it last saw a drift
IDS = "kv_transfer_params"  # the request's key that they go in


class _Rendered(msgspec.Struct):
    token_ids: list[int]


class _Answered(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class _Unfit(Exception):
    """Exact continuity cannot be had with an engine; says why."""


class Bridges:
    """Prepares calls, and learns from their answers what later ones may go on from."""

    def __init__(self, continuity: Continuity, upstream: Upstream, tips: Tips, metrics: Metrics) -> None:
        self._continuity = continuity
        self._upstream = upstream
        self._tips = tips
        self._metrics = metrics
        self._looking_until = 0.0  # monotonic seconds
        self._templates: dict[str, Template | None] = {}  # by engine incarnation; None: leave it alone
        self._learning = asyncio.Lock()
        self._learn_after = (
            0.0  # monotonic seconds: an engine that does not answer is not asked at once again
        )

    def read(self, call: Call) -> None:
        """Take down what a call says, before its request is changed."""
        if self._continuity != "off" and call.mode == "train":
            call.conversation = continuity.read(call.fields, self._tips.latest(call.head.rollout.id))

    async def prepare(self, call: Call, engine: Engine) -> None:
        """Give the engine the prompt's ids, if somebody looks and they are proven.

        Whatever goes wrong leaves the request as it was; it is counted once the call is answered.
        """
        conversation = call.conversation
        if conversation is None or not conversation.answers or call.onward is not None:
            return
        rollout_id, looking = call.head.rollout.id, self._is_looking()
        found = self._tips.find(rollout_id, conversation)
        if looking and (found is None or found[0] != conversation.last):
            try:
                if await self._tips.read(rollout_id):
                    found = self._tips.find(rollout_id, conversation)
            except StoreError as error:
                self._metrics.note("continuity", error)
        if found is None:
            call.onward = Onward(tip=None, outcome=UNKNOWN)
            return
        place, tip = found
        call.onward = Onward(tip=tip)
        if looking:
            try:
                await self._look(call, call.onward, place, engine)
            except Unproven as unproven:
                call.onward.outcome = unproven.reason
            except UpstreamError:
                call.onward.outcome = UNRENDERED

    def withdraw(self, call: Call) -> bool:
        """Take the ids out of a request that the engine refused; False if there are none."""
        if call.onward is None or call.onward.ids is None:
            return False
        call.onward.ids, call.onward.outcome = None, UNRENDERED
        del call.fields[IDS]
        call.changed.pop(IDS, None)
        return True

    def answered(self, call: Call, *, redacted: bool) -> None:
        """A durable call was answered with 200, and its agent has not seen the whole answer yet.

        One that redaction changed is not gone on from: its ids would spell in later calls, whose own text
        need not say it any more, what was taken out. So it is to whoever reads the store.
        """
        if call.conversation is None:
            return
        said = call.said()
        if said is None:
            return
        if call.onward is not None:
            self._count(call, call.onward, listed(said.prompt_ids))
        if redacted:
            self._tips.leave_out(call.head.rollout.id, call.id)
        else:
            self._tips.remember(call.head.rollout.id, call.id, call.conversation, said)

    # -- looking ---------------------------------------------------------------------------------

    def _is_looking(self) -> bool:
        return self._continuity == "exact" or time.monotonic() < self._looking_until

    def _drifts(self) -> None:
        self._looking_until = time.monotonic() + LOOKING_S

    async def _look(self, call: Call, onward: Onward, place: int, engine: Engine) -> None:
        """Have the engine render the call, and prove how it goes on. `Unproven`, `UpstreamError`."""
        assert onward.tip is not None
        assert call.conversation is not None
        template = await self._template(engine)
        if template is None or (template.rewrites and self._continuity == "auto"):
            raise Unproven(UNSUPPORTED)
        tip = read_ids(onward.tip.ids)
        messages = call.conversation.messages()
        thoughts = self._tips.thoughts(call.head.rollout.id, call.conversation)
        for at, reply in thoughts:  # what the agent left out again, or a template that drops it would pass
            messages[at] = reply
        whole = await self._render(engine, call.fields, messages, TRUE)
        if whole[: len(tip)] == tip:
            ids, onward.outcome = whole, EXACT if thoughts else FAITHFUL
        else:
            self._drifts()
            upto = await self._render(engine, call.fields, messages[: place + 1], FALSE)
            if onward.tip.thought is not None:
                messages[place] = without_thought(onward.tip.thought)
                if upto == await self._render(engine, call.fields, messages[: place + 1], FALSE):
                    raise Unproven(STRIPPED)
            ids = [*tip, *bridge(template, tip, upto, whole, engine.max_model_len)]
            onward.outcome = EXACT
        onward.ids = ids
        call.fields[IDS] = Raw(_ENCODE({"prompt_token_ids": ids}))
        if onward.outcome == EXACT:
            said = f"the {len(tip)} of {onward.tip.call_id} and {len(ids) - len(tip)} more"
            call.changed[IDS] = {"prompt_token_ids": said}

    def _count(self, call: Call, onward: Onward, prompt_ids: bytes) -> None:
        """What became of the call, now that the prompt's ids are known."""
        if onward.ids is not None and prompt_ids != listed(_ENCODE(onward.ids)):
            onward.outcome = IGNORED
            self._give_up(call.upstream, "it used other ids than those that it was given")
        elif onward.outcome is None and onward.tip is not None:
            went_on = prompt_ids.startswith(onward.tip.ids)
            onward.outcome = FAITHFUL if went_on else DRIFTED
            if not went_on:
                self._drifts()
        if onward.outcome is not None:
            self._metrics.count(self._metrics.continuity, onward.outcome)

    # -- the engine ------------------------------------------------------------------------------

    async def _template(self, engine: Engine) -> Template | None:
        """The engine's template; None if exact continuity cannot be had there. `UpstreamError`."""
        async with self._learning:
            if engine.incarnation not in self._templates:
                await self._meet(engine)
            return self._templates[engine.incarnation]

    async def _meet(self, engine: Engine) -> None:
        """A new engine, or one that was restarted: the one before is gone."""
        if time.monotonic() < self._learn_after:
            raise UpstreamError("the engine did not answer a moment ago")
        for incarnation in [known for known in self._templates if known.startswith(f"{engine.url}#")]:
            del self._templates[incarnation]
        try:
            self._templates[engine.incarnation] = await self._learn(engine)
        except _Unfit as unfit:
            self._give_up(engine.incarnation, str(unfit))
        except UpstreamError:
            self._learn_after = time.monotonic() + RENDER_TIMEOUT_S
            raise

    async def _learn(self, engine: Engine) -> Template:
        """Have the engine render what a template is known by. `_Unfit`, `UpstreamError`."""
        if engine.base is None:
            raise UpstreamError("the engine has not said yet what it serves")
        rendered = {}
        for name, messages in PROBES.items():
            body = {"model": engine.base, "messages": messages, "max_tokens": 1}
            status, answer = await self._ask(
                engine, RENDER, _ENCODE({**body, "add_generation_prompt": False})
            )
            if status in (403, 404, 405):
                why = f"it answers {status} to {RENDER} (start it with --enable-scale-out)"
                raise _Unfit(why)
            if status == 200:
                rendered[name] = _ids(answer)
        template = learn(rendered)
        if template is None:
            raise _Unfit("its template does not end replies in a token of their own")
        given = rendered["yes"]
        body = {"model": engine.base, "messages": PROBES["no"], "max_tokens": 1, "return_token_ids": True}
        body[IDS] = {"prompt_token_ids": given}
        status, answer = await self._ask(engine, "/v1/chat/completions", _ENCODE(body))
        if status != 200 or _ANSWERED.decode(answer).prompt_token_ids != given:
            raise _Unfit(f"it does not take a prompt's ids in {IDS}")
        if template.rewrites and self._continuity == "auto":
            log.warning(
                "continuity: %s writes earlier turns without their reasoning: auto is off", engine.incarnation
            )
        return template

    def _give_up(self, incarnation: str, why: str) -> None:
        self._templates[incarnation] = None
        log.warning("continuity: off with %s: %s", incarnation, why)

    async def _render(
        self, engine: Engine, fields: Fields, messages: Sequence[Raw], generation: Raw
    ) -> list[int]:
        """The ids of these messages in the request's own template arguments. `UpstreamError`."""
        asked = {name: fields[name] for name in (*PROMPT_FIELDS, "model") if name in fields}
        asked |= {"messages": Raw(_ENCODE(messages)), "add_generation_prompt": generation, "max_tokens": _ONE}
        status, answer = await self._ask(engine, RENDER, chat.encode(asked))
        if status != 200:
            raise UpstreamError(f"{RENDER} answered {status}")
        return _ids(answer)

    async def _ask(self, engine: Engine, path: str, body: bytes) -> tuple[int, bytes]:
        return await self._upstream.ask(engine.url + path, body, RENDER_TIMEOUT_S)


_ENCODE = msgspec.json.Encoder().encode
_ONE = Raw(b"1")


def _ids(answer: bytes) -> list[int]:
    try:
        return _RENDERED.decode(answer).token_ids
    except msgspec.DecodeError as error:
        raise UpstreamError(f"{RENDER} answered garbage: {error}") from None


_RENDERED = msgspec.json.Decoder(_Rendered)
_ANSWERED = msgspec.json.Decoder(_Answered)
