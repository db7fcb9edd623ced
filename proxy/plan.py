"""What brings engines and versions to where they should be. Pure: looks in, a plan out."""

from collections.abc import Mapping, Sequence

import msgspec

from proxy.engines import View
from proxy.settings import Engines


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """What `plan` needs of one engine."""

    incarnation: str
    healthy: bool
    usable: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()
    loaded: frozenset[int] = frozenset()
    in_flight: Mapping[int, int] = {}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to do now; engines by incarnation."""

    load: list[tuple[str, int]] = []
    activate: int | None = None
    promote: int | None = None  # the promotion that is asked for: `Promotion.n`
    refuse: int | None = None  # the same, where no engine can
    expire: list[int] = []  # versions whose training pins must go to make room
    unload: list[tuple[str, int]] = []
    retire: list[int] = []


class Memory(msgspec.Struct):
    """What the activator remembers between looks; losing it costs time only. Monotonic seconds."""

    first_seen: dict[int, float] = {}  # published version -> when
    asked_since: dict[int, float] = {}  # `Promotion.n` -> when
    unneeded_since: dict[int, float] = {}
    expired: set[int] = set()


def plan(view: View, engines: Sequence[EngineView], memory: Memory, settings: Engines, now: float) -> Plan:
    """Decide what brings engines and versions to where they should be."""
    adapters = {row.version: row for row in view.versions.values() if row.path is not None}
    fresh = sorted(
        v
        for v, row in adapters.items()
        if row.state == "published" and row.lineage == view.lineage and v > view.active
    )
    needed = (view.named | {v for v, pins in view.pinned.items() if pins}) & adapters.keys()
    for version in fresh:
        memory.first_seen.setdefault(version, now)
    up = [engine for engine in engines if engine.healthy]
    order = [*sorted(needed, reverse=True), *(v for v in fresh if v not in needed)]
    unload = _unload(engines, needed | set(fresh), memory, settings.unload_grace_s, now)
    proven = _proven(view, up, memory, settings.activate_timeout_s, now)
    return Plan(
        load=[(e.incarnation, v) for v in order for e in up if v not in e.usable and v not in e.failed],
        activate=_next_active(fresh, up, memory, settings.activate_timeout_s, now),
        promote=view.asked.n if view.asked and proven is True else None,
        refuse=view.asked.n if view.asked and proven is False else None,
        expire=_expire(view, needed, fresh, memory, settings.versions_max),
        unload=unload,
        retire=[v for v in fresh if up and all(v in e.failed for e in up)]
        + [v for v, row in adapters.items() if row.state == "active" and v not in needed and v < view.active],
    )


def _next_active(
    fresh: Sequence[int], up: Sequence[EngineView], memory: Memory, timeout_s: float, now: float
) -> int | None:
    """The oldest published version that an engine proved, once the others are done or out of time."""
    for version in fresh:
        if any(version in engine.usable for engine in up):
            done = all(version in engine.usable | engine.failed for engine in up)
            if done or now - memory.first_seen[version] >= timeout_s:
                return version
            return None
    return None


def _proven(
    view: View, up: Sequence[EngineView], memory: Memory, timeout_s: float, now: float
) -> bool | None:
    """Whether the version that shall be promoted can be served: by an engine that proved it, once the others
    are done or out of time. False: all that are up failed with it; None: not decided yet."""
    if view.asked is None or not up:
        return None
    since = memory.asked_since.setdefault(view.asked.n, now)
    version = view.asked.version
    if view.is_base(version):
        return True
    usable = [engine for engine in up if version in engine.usable]
    left = [engine for engine in up if version not in engine.usable | engine.failed]
    if usable and (not left or now - since >= timeout_s):
        return True
    return None if usable or left else False


def _expire(
    view: View, needed: set[int], fresh: Sequence[int], memory: Memory, versions_max: int
) -> list[int]:
    """The oldest training pins, as many as live versions are too many with the next one."""
    excess = len(needed) + len(fresh[:1]) - versions_max
    old = sorted(needed - view.named - memory.expired)
    return old[: max(0, excess)]


def _unload(
    engines: Sequence[EngineView], wanted: set[int], memory: Memory, grace_s: float, now: float
) -> list[tuple[str, int]]:
    """Loaded versions that nobody has needed for the grace period and nothing is in flight for."""
    loaded = {version for engine in engines for version in engine.loaded}
    for version in wanted | (memory.unneeded_since.keys() - loaded):
        memory.unneeded_since.pop(version, None)
    for version in loaded - wanted:
        memory.unneeded_since.setdefault(version, now)
    ripe = {version for version, since in memory.unneeded_since.items() if now - since >= grace_s}
    return [
        (engine.incarnation, version)
        for engine in engines
        if engine.healthy
        for version in sorted(engine.loaded & ripe)
        if not engine.in_flight.get(version)
    ]
