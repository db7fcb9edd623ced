"""Who holds a key, and what it allows. Pure."""

import hashlib
import hmac
from collections.abc import Sequence

import msgspec

from capture.types import Rollout, Scope
from proxy.refusal import Refused
from proxy.settings import Key

LOCAL = "local"  # the key id of everybody where no key is configured
ALL: frozenset[Scope] = frozenset({"infer", "reward", "train", "admin"})
ROLLOUT_KEY: frozenset[Scope] = frozenset({"infer"})


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Whoever sent a request: the namespace of its ids and what it may do."""

    key_id: str
    scopes: frozenset[Scope]
    rollout_id: str | None = None  # set for a rollout's own key, which is good for that rollout only

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


def rollout_of(key: str) -> tuple[str, str] | None:
    """`(rollout id, secret)` of a key that has a rollout key's form."""
    rollout_id, dot, secret = key.partition(".")
    return (rollout_id, secret) if dot and secret and rollout_id.startswith("r_") else None


def hash_secret(secret: str) -> bytes:
    """What is stored of a secret."""
    return hashlib.sha256(secret.encode()).digest()


def opens(secret: str, rollout: Rollout) -> bool:
    """Whether `secret` is the rollout's, in time that does not depend on where they differ."""
    return rollout.secret_hash is not None and hmac.compare_digest(hash_secret(secret), rollout.secret_hash)


def identify(key: str, keys: Sequence[Key]) -> Caller:
    """The holder of a configured key, or of any key where none is configured. `Refused` 401."""
    if not keys:
        return Caller(key_id=LOCAL, scopes=ALL)
    digest = hashlib.sha256(key.encode()).hexdigest()
    found = [entry for entry in keys if hmac.compare_digest(digest, entry.sha256.lower())]
    if not key or not found:
        raise Refused(401, "invalid_api_key", "No key, or a key that is not known here.")
    scopes = ALL if "admin" in found[0].scopes else frozenset(found[0].scopes)
    return Caller(key_id=found[0].id, scopes=scopes)
