"""Whose call it is: path, rollout key, header, else what it goes on from, in this order.

The decision is `decide`, pure; `Attributor` carries it out with cached look-ups. Ids are never
credentials, and every id is meaningful only within the namespace of the key that owns it.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from capture.errors import NotFound, StoreError
from capture.ids import new_id
from capture.redact import Redactor
from capture.types import Attribution, Rollout, Stitch
from proxy import replay
from proxy.heads import Head, Heads
from proxy.keys import Caller, opens, presented, rollout_of
from proxy.refusal import Refused
from proxy.replay import Trail
from proxy.rules import Live, Rules
from proxy.stitch import STORE, UNKNOWN, UNREADABLE, Apart, Stitched
from proxy.stitches import Stitches

VALUE_CHARS_MAX = 256  # of an id in a header
NAMED = "named"  # the reason of a call that said whose it is
_CONTINUES = "continues:"  # begins the session of rollouts that continue a sealed one


class ById(msgspec.Struct, frozen=True):
    """An existing rollout is named; a header's unknown name may open a session instead."""

    rollout_id: str
    how: Attribution


class BySession(msgspec.Struct, frozen=True):
    """The open observe rollout of a session in the caller's namespace."""

    session: str


class Nobody(msgspec.Struct, frozen=True):
    """No identity at all: stitched to what it goes on from, or a rollout of its own."""


Claim = ById | BySession | Nobody


def decide(caller: Caller, path_id: str | None, headers: Mapping[str, str]) -> Claim:
    """What the request says of whose call it is. `Refused` 403 where path and rollout key disagree."""
    if path_id is not None:
        if caller.rollout_id not in (None, path_id):
            raise Refused(403, "rollout_mismatch", "The key belongs to another rollout than the path.")
        return ById(path_id, "path")
    if caller.rollout_id is not None:
        return ById(caller.rollout_id, "key")
    if rollout_id := _value(headers, "X-Rollout-ID"):
        return ById(rollout_id, "header")
    if session := _value(headers, "X-Session-ID"):
        return BySession(session)
    return Nobody()


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The rollout of a call, and how it was found."""

    head: Head
    attribution: Attribution
    reason: str = NAMED  # or one of `proxy.stitch.REASONS`
    opened: bool = False  # by this call
    trail: Trail | None = None  # of a call that named no rollout: its answers must be recognised later


def fresh(
    caller: Caller,
    headers: Mapping[str, str],
    *,
    session: str | None = None,
    continues: Rollout | None = None,
) -> Rollout:
    """A new observe rollout for a call that nobody opened one for."""
    metadata: dict[str, Any] = {}
    if group := _value(headers, "X-Group-ID"):
        metadata["group_id"] = group  # a wish of the agent; groups are declared by who may train
    if continues is not None:
        metadata["continues"] = continues.id
    return Rollout(
        id=new_id("r"),
        key_id=caller.key_id if continues is None else continues.key_id,
        mode="observe",
        scenario_id=_value(headers, "X-Scenario-ID"),
        session=session,
        headless=session is None if continues is None else continues.headless,
        created_at=time.time(),
        metadata=metadata or None,
    )


def first_of(rollout: Rollout) -> str:
    """The first of the rollouts that this one continues, its own id if it continues none."""
    session = rollout.session or ""
    return session.removeprefix(_CONTINUES) if session.startswith(_CONTINUES) else rollout.id


class Attributor:
    """Identifies callers and finds their rollouts, through the cached heads."""

    def __init__(
        self, live: Live, heads: Heads, stitches: Stitches, redactor: Redactor | None = None
    ) -> None:
        self._redactor = redactor or Redactor(())
        self._live = live
        self._heads = heads
        self._stitches = stitches

    async def caller(self, headers: Mapping[str, str], rules: Rules | None = None) -> Caller:
        """Who sent these headers, by `rules` or those of now. `Refused` 401 for a key that opens nothing."""
        keyring = (rules or self._live.rules).keyring
        key = presented(headers)
        parts = rollout_of(key)
        if parts is not None:
            rollout_id, secret = parts
            try:
                rollout = (await self._heads.get(rollout_id)).rollout
            except NotFound:
                return keyring.identify(key)
            if not opens(secret, rollout):
                raise Refused(401, "invalid_api_key", "This is not the key of that rollout.")
            return keyring.of_rollout(rollout)
        return keyring.identify(key)

    async def owned(self, caller: Caller, rollout_id: str) -> Head:
        """A rollout of the caller's namespace. `Refused` 404 where there is none."""
        try:
            head = await self._heads.get(rollout_id)
        except NotFound:
            head = None
        if head is None or (head.rollout.key_id != caller.key_id and "admin" not in caller.scopes):
            raise Refused(404, "rollout_not_found", f"There is no rollout {rollout_id[:VALUE_CHARS_MAX]!r}.")
        if caller.rollout_id not in (None, rollout_id):
            raise Refused(403, "rollout_mismatch", "The key belongs to another rollout.")
        return head

    async def attribute(
        self, caller: Caller, path_id: str | None, headers: Mapping[str, str], messages: bytes
    ) -> Found:
        """The rollout that this call belongs to, open and with a call to spare; `messages` is JSON.

        `Refused`: 404 unknown path id, 403 path against key, 409 `rollout_sealed`, 429 `max_calls`.
        """
        caller.need("infer")
        match decide(caller, path_id, headers):
            case ById(rollout_id, "header"):
                try:
                    head = await self.owned(caller, rollout_id)
                except Refused:
                    return await self._session(caller, f"rollout:{rollout_id}", headers)
                return await self._usable(caller, head, headers, Found(head=head, attribution="header"))
            case ById(rollout_id, how):
                head = await self.owned(caller, rollout_id)
                return await self._usable(caller, head, headers, Found(head=head, attribution=how))
            case BySession(session):
                return await self._session(caller, session, headers)
            case Nobody():
                return await self._stitched(caller, headers, replay.read(messages))

    def uncaptured(self, key_id: str, stitches: Sequence[Stitch]) -> None:
        """An agent got an answer that was not captured: nobody may be taken for it later."""
        self._stitches.uncaptured(key_id, stitches)

    async def _session(self, caller: Caller, session: str, headers: Mapping[str, str]) -> Found:
        session = self._redactor.name(session)
        new = self._fresh(caller, headers, session=session)
        head = await self._heads.session(caller.key_id, session, new)
        return Found(head=head, attribution="header", opened=head.rollout.id == new.id)

    def _fresh(self, caller: Caller, headers: Mapping[str, str], **fields: Any) -> Rollout:
        """A new observe rollout, with names that may be stored."""
        names = ("X-Group-ID", "X-Scenario-ID")
        kept = {name: self._redactor.name(value) for name in names if (value := _value(headers, name))}
        return fresh(caller, kept, **fields)

    async def _stitched(self, caller: Caller, headers: Mapping[str, str], trail: Trail | None) -> Found:
        """By the conversation that the call goes on with; in doubt a rollout of its own."""
        place: Stitched | Apart = Apart(UNREADABLE)
        try:
            if trail is not None:
                place = await self._stitches.find(caller.key_id, trail)
            if isinstance(place, Stitched):
                head = await self._heads.get(place.rollout_id)
                found = Found(head=head, attribution="stitched", reason=place.reason, trail=trail)
                return await self._usable(caller, head, headers, found)
        except NotFound:
            place = Apart(UNKNOWN)
        except StoreError:  # served all the same, as observed calls are when they cannot be captured
            place = Apart(STORE)
        head = self._heads.add(self._fresh(caller, headers))
        return Found(head=head, attribution="headless", reason=place.reason, opened=True, trail=trail)

    async def _usable(self, caller: Caller, head: Head, headers: Mapping[str, str], found: Found) -> Found:
        """What was found if its rollout takes another call, or the observe rollout that continues it.

        All that continue one rollout, directly or not, are one session: whichever of them a call
        remembers, it comes to the one that is open.
        """
        rollout = head.rollout
        if head.is_open and not head.is_full:
            return found
        if rollout.mode == "observe":
            session = _CONTINUES + first_of(rollout)
            new = self._fresh(caller, headers, session=session, continues=rollout)
            head = await self._heads.session(rollout.key_id, session, new)
            return msgspec.structs.replace(found, head=head, opened=head.rollout.id == new.id)
        if head.is_open:
            raise Refused(
                429,
                "max_calls",
                f"Rollout {rollout.id} has made all of its {rollout.max_calls} calls.",
                retry=False,
            )
        reason = rollout.drop_reason or rollout.status or rollout.state
        raise Refused(409, "rollout_sealed", f"Rollout {rollout.id} has ended ({reason}).", retry=False)


def _value(headers: Mapping[str, str], name: str) -> str | None:
    value = headers.get(name)
    if value is not None and len(value) > VALUE_CHARS_MAX:
        raise Refused(400, "header_too_long", f"{name} is longer than {VALUE_CHARS_MAX} characters.")
    return value or None
