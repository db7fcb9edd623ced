"""What keys may use: rates, concurrency, tokens, sizes. `Limiter` keeps one meter for each key."""

import time
from collections.abc import Callable, Collection

from proxy.dialects.chat import NULL, Asked, Fields
from proxy.refusal import Refused
from proxy.settings import KeyLimits
from proxy.storage import Storage

BUSY_RETRY_S = 1.0  # after a call that was one too many at a time: when one ends is not known
_BYTES_PER_TOKEN = 4  # of a request whose tokens nobody counted
_CAPS = ("max_completion_tokens", "max_tokens")


class Limited(Refused):
    """More than the key may use; `limit` is the setting's name."""

    def __init__(
        self,
        limit: str,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        wait_s: float | None = None,
    ) -> None:
        super().__init__(
            status, code, message, param=param, retry=None if wait_s else False, retry_after_s=wait_s
        )
        self.limit = limit


class Bucket:
    """What fills up with time and may be overdrawn: a token bucket. Times are monotonic seconds."""

    __slots__ = ("_at", "_level", "_rate", "_size")

    def __init__(self, rate: float, size: float, now: float) -> None:
        self._rate = rate  # a second
        self._size = size
        self._level = size
        self._at = now

    def resize(self, rate: float, size: float, now: float) -> None:
        """Fill otherwise from now on; what is in it stays, as far as it fits."""
        self._fill(now)
        self._rate, self._size, self._level = rate, size, min(self._level, size)

    def wait_s(self, need: float, now: float) -> float:
        """How long until it holds `need`; 0 if it does."""
        self._fill(now)
        return max(0.0, (need - self._level) / self._rate)

    def take(self, amount: float) -> None:
        """Take it out, there or not."""
        self._level -= amount

    def _fill(self, now: float) -> None:
        self._level = min(self._size, self._level + (now - self._at) * self._rate)
        self._at = now


class Meter:
    """What one key uses. It outlives a change of the key's limits."""

    __slots__ = ("_requests", "_tokens", "in_flight", "limits", "spent")

    def __init__(self) -> None:
        self.limits: KeyLimits | None = None  # that the buckets are made for
        self.in_flight = 0
        self.spent: int | None = None  # tokens, as the store last said, and ours since; None: not known
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None

    def enter(self, limits: KeyLimits, now: float) -> None:
        """One call more; `Limited` 429 says which limit it is over, and then it does not count."""
        if limits is not self.limits:
            self._set(limits, now)
        if limits.tokens_total is not None and (self.spent or 0) >= limits.tokens_total:
            raise Limited(
                "tokens_total",
                429,
                f"This key has used all of its {limits.tokens_total} tokens.",
                code="insufficient_quota",
            )
        if limits.concurrency is not None and self.in_flight >= limits.concurrency:
            message = f"This key has {limits.concurrency} calls in flight, and may not have more."
            raise Limited("concurrency", 429, message, code="concurrency_limit_exceeded", wait_s=BUSY_RETRY_S)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(1.0, now)) > 0:
            raise Limited(
                "tokens_per_minute",
                429,
                f"This key may use {limits.tokens_per_minute} tokens a minute.",
                code="rate_limit_exceeded",
                wait_s=wait_s,
            )
        if self._requests is not None:
            if (wait_s := self._requests.wait_s(1.0, now)) > 0:
                raise Limited(
                    "requests_per_s",
                    429,
                    f"This key may make {limits.requests_per_s:g} calls a second.",
                    code="rate_limit_exceeded",
                    wait_s=wait_s,
                )
            self._requests.take(1.0)
        self.in_flight += 1

    def leave(self) -> None:
        """A call that had entered has ended."""
        self.in_flight -= 1

    def charge(self, tokens: int) -> None:
        """A call used these: by what it entered with, or by the limits that have come since."""
        if self._tokens is not None:
            self._tokens.take(tokens)
        if self.spent is not None:
            self.spent += tokens

    def _set(self, limits: KeyLimits, now: float) -> None:
        rate, minute = limits.requests_per_s, limits.tokens_per_minute
        burst = 0.0 if rate is None else float(limits.burst or max(1.0, rate))
        self._requests = _bucket(self._requests, rate, burst, now)
        self._tokens = _bucket(self._tokens, None if minute is None else minute / 60, float(minute or 0), now)
        self.limits = limits


def _bucket(old: Bucket | None, rate: float | None, size: float, now: float) -> Bucket | None:
    if rate is None:
        return None
    if old is None:
        return Bucket(rate, size, now)
    old.resize(rate, size, now)
    return old


class Limiter:
    """A meter for every key that has called, in this process; budgets are summed up by the store."""

    def __init__(self, storage: Storage, clock: Callable[[], float] = time.monotonic) -> None:
        self._storage = storage
        self._clock = clock
        self._meters: dict[str, Meter] = {}

    async def enter(self, key_id: str, limits: KeyLimits) -> Meter:
        """One call of this key more, to be left by whoever entered. `Limited`; `StoreError`."""
        meter = self._meters.get(key_id)
        if meter is None:
            meter = self._meters[key_id] = Meter()
        if limits.tokens_total is not None and meter.spent is None:
            spent = await self._storage.call(self._storage.store.key_tokens, [key_id])
            meter.spent = spent.get(key_id, 0)
        meter.enter(limits, self._clock())
        return meter

    async def refresh(self, storage: Storage) -> None:
        """Read again what the keys with a budget have used, through all proxies together. `StoreError`."""
        known = [key_id for key_id, meter in self._meters.items() if meter.spent is not None]
        if not known:
            return
        spent = await storage.call(storage.store.key_tokens, known)
        for key_id in known:
            if (meter := self._meters.get(key_id)) is not None:
                meter.spent = spent.get(key_id, 0)

    def keep(self, key_ids: Collection[str]) -> None:
        """Forget the idle meters of all other keys."""
        self._meters = {
            key_id: meter for key_id, meter in self._meters.items() if key_id in key_ids or meter.in_flight
        }


def counts_tokens(limits: KeyLimits) -> bool:
    """Whether somebody must know how many tokens a call used."""
    return limits.tokens_per_minute is not None or limits.tokens_total is not None


def check_request(limits: KeyLimits, asked: Asked, fields: Fields) -> int | None:
    """The cap to put into a request that names none, where the key has one. `Limited` 400."""
    if limits.n_max is not None and asked.choices > limits.n_max:
        message = f"This key may ask for {limits.n_max} answers to a request, not {asked.choices}."
        raise Limited("n_max", 400, message, code="n_too_large", param="n")
    if limits.max_tokens is None:
        return None
    named = [name for name in _CAPS if fields.get(name, NULL) != NULL]
    for name in named:
        raw = bytes(fields[name])
        if not raw.isdigit() or len(raw) > 18:
            raise Refused(400, "invalid_type", f"{name!r} must be a positive integer.", param=name)
        if int(raw) > limits.max_tokens:
            message = f"This key may ask for {limits.max_tokens} tokens an answer, not {int(raw)}."
            raise Limited("max_tokens", 400, message, code="max_tokens_too_large", param=name)
    return None if named else limits.max_tokens


def body_too_large(limit: int) -> Limited:
    """The refusal of a body over `limit` bytes."""
    return Limited("body_bytes_max", 413, f"The body is longer than {limit} bytes.", code="body_too_large")


def estimate(request: bytes, response: bytes) -> int:
    """Tokens of a call that nobody counted: a token for 4 bytes asked and for each chunk answered."""
    return len(request) // _BYTES_PER_TOKEN + response.count(b"\n\n")
