"""Who holds a key, and what it allows. Pure."""

import hashlib
import hmac
import time
from collections.abc import Mapping, Sequence

import msgspec

from capture.types import Rollout, Scope
from proxy.refusal import Refused
from proxy.settings import Key, KeyLimits

LOCAL = "local"  # the key id of everybody where no key is configured
ALL: frozenset[Scope] = frozenset({"infer", "reward", "train", "admin"})
ROLLOUT_KEY: frozenset[Scope] = frozenset({"infer"})
OWN_HEADER = "X-Hone-Key"  # Hone's key, where Authorization is meant for the upstream

_PREFIX_BYTES = 8  # of a digest, that keys are looked up by
_UNLIMITED = KeyLimits()


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Whoever sent a request: the namespace of its ids, what it may do and how much of it."""

    key_id: str
    scopes: frozenset[Scope]
    rollout_id: str | None = None  # set for a rollout's own key, which is good for that rollout only
    limits: KeyLimits | None = None  # None: nothing is limited

    def need(self, *scopes: Scope) -> None:
        """`Refused` 403 unless the caller has one of `scopes`."""
        if not self.scopes.intersection(scopes):
            raise Refused(
                403,
                "scope",
                f"This key may not do that: it needs the scope {' or '.join(scopes)}.",
            )


def bearer(authorization: str | None) -> str:
    """The key of an Authorization header; empty if there is none."""
    if not authorization:
        return ""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def presented(headers: Mapping[str, str]) -> str:
    """The key that a request shows to Hone; empty if there is none."""
    return headers.get(OWN_HEADER) or bearer(headers.get("Authorization"))


def rollout_of(key: str) -> tuple[str, str] | None:
    """`(rollout id, secret)` of a key that has a rollout key's form."""
    rollout_id, dot, secret = key.partition(".")
    return (rollout_id, secret) if dot and secret and rollout_id.startswith("r_") else None


def hash_secret(secret: str) -> bytes:
    """What is stored of a secret."""
    return hashlib.sha256(secret.encode(errors="surrogateescape")).digest()


def opens(secret: str, rollout: Rollout) -> bool:
    """Whether `secret` is the rollout's, in time that does not depend on where they differ."""
    return rollout.secret_hash is not None and hmac.compare_digest(hash_secret(secret), rollout.secret_hash)


class _Holder(msgspec.Struct, frozen=True):
    """A configured key, ready to be asked for."""

    caller: Caller
    expires_at: float | None  # Unix seconds

    def now(self) -> Caller:
        """Its caller; `Refused` 401 once it has expired."""
        if self.expires_at is not None and time.time() >= self.expires_at:
            raise Refused(401, "key_expired", "This key has expired.", retry=False)
        return self.caller


class Keyring:
    """The configured keys. Asking takes the same work however many there are.

    A secret is looked up by the beginning of its hash, and the whole hash is then compared in constant
    time: how long the look-up takes tells something of hashes only, which nobody can choose.
    """

    def __init__(self, keys: Sequence[Key], limits: KeyLimits = _UNLIMITED) -> None:
        self._local = Caller(key_id=LOCAL, scopes=ALL, limits=_some(limits))
        self._holders = {key.id: _holder(key, limits) for key in keys}
        self._found: dict[bytes, list[tuple[bytes, _Holder]]] = {}
        for key in keys:
            for digest in map(bytes.fromhex, key.hashes):
                entry = (digest, self._holders[key.id])
                self._found.setdefault(digest[:_PREFIX_BYTES], []).append(entry)

    @property
    def is_open(self) -> bool:
        """No key is configured: whoever reaches the proxy may use it."""
        return not self._holders

    @property
    def ids(self) -> frozenset[str]:
        """Every namespace there is."""
        return frozenset(self._holders) or frozenset({LOCAL})

    def identify(self, key: str) -> Caller:
        """The holder of a configured key, or of any key where none is configured. `Refused` 401."""
        if not self._holders:
            return self._local
        holder = self._holder(key)
        if holder is None:
            raise Refused(401, "invalid_api_key", "No key, or a key that is not known here.")
        return holder.now()

    def of_rollout(self, rollout: Rollout) -> Caller:
        """The holder of a rollout's own key, which lives as long as the key that owns it. `Refused` 401."""
        if not self._holders:
            owner = self._local
        elif (holder := self._holders.get(rollout.key_id)) is not None:
            owner = holder.now()
        else:
            raise Refused(401, "invalid_api_key", "The key that opened this rollout is not known any more.")
        return Caller(key_id=rollout.key_id, scopes=ROLLOUT_KEY, rollout_id=rollout.id, limits=owner.limits)

    def for_upstream(self, headers: Mapping[str, str]) -> str | None:
        """The caller's own key for an upstream: its Authorization, unless that opens something here."""
        key = bearer(headers.get("Authorization"))
        if not key or rollout_of(key) is not None or self._holder(key) is not None:
            return None
        return key

    def _holder(self, key: str) -> _Holder | None:
        if not key:
            return None
        digest = hash_secret(key)
        for whole, holder in self._found.get(digest[:_PREFIX_BYTES], ()):
            if hmac.compare_digest(digest, whole):
                return holder
        return None


def _holder(key: Key, limits: KeyLimits) -> _Holder:
    scopes = ALL if "admin" in key.scopes else frozenset(key.scopes)
    caller = Caller(key_id=key.id, scopes=scopes, limits=_some(key.limits or limits))
    return _Holder(caller, None if key.expires is None else key.expires.timestamp())


def _some(limits: KeyLimits) -> KeyLimits | None:
    return None if limits == _UNLIMITED else limits
