"""Whether an upstream may be called: a circuit breaker that lets calls return slowly. Pure.

What is the caller's fault (a 4xx, a hang-up) counts neither for nor against an upstream. After
`failures_max` failures in a row nothing is sent to it for `pause_s`; then one call at a time, with
each success one more, and after `return_calls` as many as come.
"""

import time
from collections.abc import Callable, Collection
from typing import Literal

from proxy.settings import Health

Verdict = Literal["good", "bad", "neither"]

FULL_RETRY_S = 1.0  # for who finds all calls that may return already there

OK, CLIENT_ERROR, HUNG_UP = "ok", "client_error", "hung_up"
_NEITHER = frozenset({CLIENT_ERROR, HUNG_UP, "stale", "too_long", "lost_adapter"})


def verdict(outcome: str) -> Verdict:
    """What the outcome of an attempt says of the upstream."""
    if outcome == OK:
        return "good"
    return "neither" if outcome in _NEITHER else "bad"


class Breaker:
    """One upstream's. Times are monotonic seconds."""

    __slots__ = ("_clock", "_failures", "_in_flight", "_pauses", "_settings", "_until", "room")

    def __init__(self, settings: Health, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._failures = 0  # in a row
        self._in_flight = 0
        self._pauses = 0  # since it last worked as it should
        self._until = 0.0  # nothing is sent before
        self.room: int | None = None  # calls at once while they return; None: any number

    def wait_s(self) -> float:
        """0 if a call may be sent now, else how long that will at least take."""
        if self.room is None:
            return 0.0
        left = self._until - self._clock()
        if left > 0:
            return left
        return FULL_RETRY_S if self._in_flight >= self.room else 0.0

    @property
    def share(self) -> float:
        """Of all calls, that may be sent: 1 as it should be, 0 during a pause."""
        if self.room is None:
            return 1.0
        return 0.0 if self._until > self._clock() else self.room / (self._settings.return_calls + 1)

    def begin(self) -> None:
        """A call is sent."""
        self._in_flight += 1

    def end(self, found: Verdict) -> bool:
        """It has ended; True if a pause begins with it."""
        self._in_flight -= 1
        if found == "good":
            self._failures = 0
            if self.room is not None and self._until <= self._clock():
                self._grow(self.room + 1)
        elif found == "bad":
            return self._fail()
        return False

    def returns(self) -> None:
        """It was away and is there again: calls return one by one."""
        self._failures = 0
        self._until = self._clock()
        self.room = 1

    def _grow(self, room: int) -> None:
        if room > self._settings.return_calls:
            self.room, self._pauses = None, 0
        else:
            self.room = room

    def _fail(self) -> bool:
        now = self._clock()
        if self.room is not None and now < self._until:  # it had been sent before the pause
            return False
        self._failures += 1
        if self._failures < self._settings.failures_max and self.room != 1:
            self.room = None if self.room is None else self.room // 2
            return False
        pause_s = min(self._settings.pause_max_s, self._settings.pause_s * 2.0**self._pauses)
        self._until = now + pause_s
        self._pauses = min(self._pauses + 1, 30)
        self._failures, self.room = 0, 1
        return True


class Breakers:
    """Those of the upstreams that routes lead to, by URL."""

    def __init__(self, settings: Health) -> None:
        self._settings = settings
        self._breakers: dict[str, Breaker] = {}

    def of(self, url: str) -> Breaker:
        """The breaker of an upstream."""
        found = self._breakers.get(url)
        if found is None:
            found = self._breakers[url] = Breaker(self._settings)
        return found

    def shares(self) -> dict[str, float]:
        """`Breaker.share` by URL."""
        return {url: breaker.share for url, breaker in self._breakers.items()}

    def keep(self, urls: Collection[str]) -> None:
        """Forget all others."""
        self._breakers = {url: breaker for url, breaker in self._breakers.items() if url in urls}
