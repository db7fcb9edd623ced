"""What the proxy can be told. `hone/config.py` fills these from `hone.toml`; nothing here reads it."""

import ipaddress
import re
from datetime import datetime
from typing import Annotated, Literal

import msgspec

from capture.errors import ConfigError
from capture.parameters import TEMPERATURE_MIN
from capture.types import Scope

Count = Annotated[int, msgspec.Meta(ge=1)]
Rate = Annotated[float, msgspec.Meta(gt=0)]
Moment = Annotated[datetime, msgspec.Meta(tz=True)]
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one key may use of the model calls, those of its rollouts' own keys included. None: no limit.

    Rates and concurrency are counted by each proxy process for itself, `tokens_total` in the store.
    """

    requests_per_s: Rate | None = None  # in the long run
    burst: Count | None = None  # at once, if there was none for a while; None: one second's worth
    concurrency: Count | None = None  # being answered at one time
    tokens_per_minute: Count | None = None  # of prompts and answers; what is running may overdraw it
    tokens_total: Count | None = None  # the same, ever; then 429 until it is raised
    body_bytes_max: Count | None = None  # of a request
    n_max: Count | None = None  # answers to one request
    max_tokens: Count | None = None  # of each answer; a request that names no number gets this one


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An API key: only the hash of it is configured. `hone keys new` makes one."""

    id: str  # the namespace that every rollout, session and call of this key lives in
    sha256: str | tuple[str, ...]  # hex SHA-256 of a secret of at least 128 random bits; several: all open it
    scopes: tuple[Scope, ...] = ("infer",)
    expires: Moment | None = None  # with time zone; opens nothing from then on
    limits: KeyLimits | None = None  # None: those of proxy.key_limits

    @property
    def hashes(self) -> tuple[str, ...]:
        """Every hash that opens it."""
        return (self.sha256,) if isinstance(self.sha256, str) else self.sha256


class Route(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a model name leads: exactly one of `to`, `url` and `provider`."""

    to: str | None = None  # another route or the policy
    url: str | None = None  # an OpenAI-compatible server, with its /v1
    model: str | None = None  # the name it is asked for there; None: the name the agent used
    key_env: str | None = None  # name of the secret that is sent to it as bearer key
    auth: Literal["none", "passthrough"] = "none"  # passthrough: the agent's own key is sent to it
    provider: str | None = None  # a LiteLLM model name
    fallbacks: tuple[str, ...] = ()  # routes to try, in order, where this one fails before its first byte


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How training rollouts sample; eval and observe sample as the agent asks."""

    temperature: float = 1.0  # at least 0.01: below that vLLM samples at 0.01, or greedily
    max_tokens: int = 2048  # cap a call; clamped to what the engine can hold
    grammar: Literal["honour", "strip"] = "honour"  # honour: served, but such a call is not trainable


class Deadlines(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long an upstream may take, in seconds."""

    connect_s: float = 5.0  # until a connection stands
    first_byte_s: float = 300.0  # until an answer begins; one that is no stream begins when it is ready
    idle_s: float = 120.0  # between any two reads of it
    total_s: float = (
        900.0  # until its last byte, from the arrival of the call: retries and fallbacks included
    )
    retries: int = 2  # further attempts where nothing was generated and nothing was sent downstream
    retry_pause_s: float = 0.1  # upper bound of the random pause before the first one; doubles


class Health(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When calls stop going to an engine or another upstream that fails, and how they return.

    Only what is the upstream's fault counts: no connection, a deadline, a 5xx, an answer that breaks off.
    """

    failures_max: Count = 5  # in a row, then nothing is sent to it for a while
    pause_s: Rate = 1.0  # that while; doubles each time the first call after it fails too
    pause_max_s: Rate = 30.0
    return_calls: Count = 32  # at once, growing from one with each success, until calls are unlimited again


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds on everything that a peer controls."""

    body_bytes_max: int = 16 << 20  # of a request
    response_bytes_max: int = 64 << 20  # of an upstream's answer, streams included
    chunk_bytes_max: int = 4 << 20  # of one server-sent chunk
    connections_max: int = 1024  # to all upstreams together
    rollouts_cached: int = 10_000  # heads kept in memory over the store
    tips_bytes_max: int = 64 << 20  # of sampled conversations kept in memory over the store
    max_calls: int = 30  # a training or eval rollout that did not say


class Engines(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The vLLM servers of the policy and how new versions reach them."""

    urls: tuple[str, ...] = ()  # without /v1
    health_interval_s: float = 1.0  # between looks at one engine
    health_timeout_s: float = 5.0  # of one look
    engine_wait_s: float = 30.0  # a call waits that long for an engine that serves its version, then 503
    poll_s: float = 0.1  # between looks at the store for new versions
    load_timeout_s: float = 60.0  # of one load, verify or unload request
    load_attempts: int = 3  # failed loads of one version on one engine before it counts as failed
    activate_timeout_s: float = 30.0  # then a version activates without the engines that are not done
    versions_max: int = 6  # adapters live at once; at most the engine's --max-loras
    unload_grace_s: float = 5.0  # a version that nobody needs stays loaded that long
    verify_floor: float = 1e-3  # nats; least mean |difference| of canary logprobs that means anything
    verify_floor_max: float = 0.1  # a base further than this from the learner's base is another model


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything `hone proxy` can be told."""

    host: str = "127.0.0.1"  # beyond loopback only with keys
    port: int = 8000  # 0: any free one
    public_url: str | None = None  # what `base_url` of an opened rollout starts with; None: the Host header
    keys: tuple[Key, ...] = ()  # none: everything is one tenant, on loopback only
    key_limits: KeyLimits = KeyLimits()  # of every key that has none of its own, and of that one tenant
    watch_s: float = 1.0  # between looks at whether hone.toml has changed; 0: only SIGHUP makes it read again
    policy: str | None = "policy"  # the model that is trained; None: capture only
    routes: dict[str, Route] = {}  # model name -> where it leads; "*" catches every other name
    sampling: Sampling = Sampling()
    deadlines: Deadlines = Deadlines()
    limits: Limits = Limits()
    health: Health = Health()
    engines: Engines = Engines()
    commit_timeout_s: float = 10.0  # a call that is not durable by then is refused (observe: served)
    unready_s: float = 0.3  # after SIGTERM calls are still taken that long, while /ready says 503
    drain_s: float = 10.0  # then calls in flight get this long
    in_flight_interval_s: float = 1.0  # between records of the rollouts that have calls in flight
    head_ttl_s: float = 1.0  # a cached rollout head is read again after this
    finish_wait_s: float = 2.0  # finishing waits this long for the rollout's calls in flight
    stitch_retention_s: float = 604_800.0  # a call that names no rollout is recognised for that long
    lease_ttl_s: float = 5.0  # of the activator lease and of the in-flight record


def check(settings: Settings) -> None:
    """Raise `ConfigError`, naming the setting, for what cannot work."""
    if not settings.keys and not is_loopback(settings.host):
        raise ConfigError(
            f"proxy.host = {settings.host!r} is reachable from other machines, and without proxy.keys "
            "anybody there could use it: configure proxy.keys, or bind to 127.0.0.1"
        )
    _check_keys(settings.keys)
    if settings.sampling.temperature < TEMPERATURE_MIN:
        raise ConfigError(
            f"proxy.sampling.temperature must be at least {TEMPERATURE_MIN}: below it the engine samples "
            "greedily, and that cannot be trained"
        )
    if settings.sampling.max_tokens < 1:
        raise ConfigError("proxy.sampling.max_tokens must be at least 1")


def _check_keys(keys: tuple[Key, ...]) -> None:
    seen: dict[str, str] = {}
    for key in keys:
        if not key.id:
            raise ConfigError("proxy.keys: a key needs an id")
        if not key.hashes or not all(map(_SHA256.fullmatch, key.hashes)):
            raise ConfigError(f"proxy.keys: the key {key.id!r} needs sha256 as 64 hex digits")
        for digest in {digest.lower() for digest in key.hashes}:
            if (other := seen.setdefault(digest, key.id)) != key.id:
                raise ConfigError(f"proxy.keys: the keys {other!r} and {key.id!r} have one sha256")
    if len({key.id for key in keys}) != len(keys):
        raise ConfigError("proxy.keys: two keys have one id; one key may have several hashes in sha256")


def is_loopback(host: str) -> bool:
    """True iff `host` names this machine's loopback interface."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
