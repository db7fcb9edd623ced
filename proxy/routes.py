"""Model name -> where its calls go. Pure."""

from collections.abc import Mapping

import msgspec

from capture.errors import ConfigError
from proxy.refusal import Refused
from proxy.settings import Route, Settings

_HOPS_MAX = 8


class ToPolicy(msgspec.Struct, frozen=True):
    """The model that is trained, on our engines, under its versioned name."""

    name: str  # the route's own name: a label
    policy: str
    fallbacks: tuple["Target", ...] = ()


class ToUpstream(msgspec.Struct, frozen=True, kw_only=True):
    """An OpenAI-compatible server that is relayed to."""

    name: str
    url: str  # ends before /chat/completions
    model: str | None  # what to ask it for; None: what the agent asked for
    key: str | None  # bearer key to send; never the agent's
    passthrough: bool  # send the agent's own key instead
    fallbacks: tuple["Target", ...] = ()


Target = ToPolicy | ToUpstream


class Routes:
    """The configured routes, resolved once. `ConfigError` names a route that cannot work."""

    def __init__(self, settings: Settings, secrets: Mapping[str, str]) -> None:
        self._policy = settings.policy
        self._routes = settings.routes
        self._targets: dict[str, Target | Refused] = {
            name: self._with_fallbacks(name, secrets) for name in settings.routes
        }
        if settings.policy is not None:
            self._targets.setdefault(settings.policy, ToPolicy(settings.policy, settings.policy))

    def target(self, model: str) -> Target:
        """Where calls to `model` go. `Refused` 404 for no such model, 501 for a provider route."""
        found = self._targets.get(model) or self._targets.get("*")
        if found is None:
            raise Refused(
                404, "model_not_found", f"There is no model {model[:200]!r} here.", param="model", retry=False
            )
        if isinstance(found, Refused):
            raise found
        return found

    @property
    def urls(self) -> set[str]:
        """Every upstream that a call may go to."""
        return {target.url for target in self._targets.values() if isinstance(target, ToUpstream)}

    def names(self) -> list[str]:
        """Every model that can be asked for by name."""
        return sorted(name for name in self._targets if name != "*")

    def _with_fallbacks(self, name: str, secrets: Mapping[str, str]) -> Target | Refused:
        """The route's target with what is tried after it: its own fallbacks, else those of where it leads."""
        target, names = self._resolve(name, secrets)
        if isinstance(target, Refused):
            return target
        fallbacks = tuple(self._fallback(name, other, secrets) for other in names)
        return msgspec.structs.replace(target, fallbacks=fallbacks)

    def _fallback(self, name: str, other: str, secrets: Mapping[str, str]) -> Target:
        if other in (name, "*") or (other not in self._routes and other != self._policy):
            raise ConfigError(f"routes.{name!r}.fallbacks: there is no other route or policy named {other!r}")
        target, _ = self._resolve(other, secrets)
        if isinstance(target, Refused):
            raise ConfigError(f"routes.{name!r}.fallbacks: {target.message}")
        return target

    def _resolve(self, name: str, secrets: Mapping[str, str]) -> tuple[Target | Refused, tuple[str, ...]]:
        """Where a name leads in the end, and the fallbacks of the first route on the way that has some."""
        fallbacks: tuple[str, ...] = ()
        at = name
        for _ in range(_HOPS_MAX):
            route = self._routes.get(at)
            if route is None and at == self._policy:
                return ToPolicy(name, at), fallbacks
            if route is None:
                raise ConfigError(f"routes.{name!r}: there is no route or policy named {at!r}")
            _check(name, route)
            fallbacks = fallbacks or route.fallbacks
            if route.to is None:
                return self._end(name, route, secrets), fallbacks
            if route.to == at == self._policy:  # its route only says what it falls back to
                return ToPolicy(name, at), fallbacks
            at = route.to
        raise ConfigError(f"routes.{name!r}: the routes lead in a circle")

    def _end(self, name: str, route: Route, secrets: Mapping[str, str]) -> Target | Refused:
        if route.provider is not None:
            return Refused(
                501,
                "provider_not_supported",
                f"routes.{name!r} has provider = {route.provider!r}, which this version cannot serve: "
                "give the route an OpenAI-compatible `url` instead.",
                retry=False,
            )
        if route.key_env is not None and route.key_env not in secrets:
            raise ConfigError(f"routes.{name!r}.key_env: {route.key_env} is not set")
        assert route.url is not None
        return ToUpstream(
            name=name,
            url=route.url.rstrip("/"),
            model=route.model,
            key=None if route.key_env is None else secrets[route.key_env],
            passthrough=route.auth == "passthrough",
        )


def _check(name: str, route: Route) -> None:
    if sum(field is not None for field in (route.to, route.url, route.provider)) != 1:
        raise ConfigError(f"routes.{name!r} needs exactly one of to, url and provider")
    if route.url is not None and not route.url.startswith(("http://", "https://")):
        raise ConfigError(f"routes.{name!r}.url must start with http:// or https://")
    if route.auth == "passthrough" and route.key_env is not None:
        raise ConfigError(f"routes.{name!r}: auth = passthrough and key_env exclude each other")
