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


class ToUpstream(msgspec.Struct, frozen=True, kw_only=True):
    """An OpenAI-compatible server that is relayed to."""

    name: str
    url: str  # ends before /chat/completions
    model: str | None  # what to ask it for; None: what the agent asked for
    key: str | None  # bearer key to send; never the agent's
    passthrough: bool  # send the agent's own key instead


Target = ToPolicy | ToUpstream


class Routes:
    """The configured routes, resolved once. `ConfigError` names a route that cannot work."""

    def __init__(self, settings: Settings, secrets: Mapping[str, str]) -> None:
        self._policy = settings.policy
        self._routes = settings.routes
        self._targets: dict[str, Target | Refused] = {
            name: self._resolve(name, secrets) for name in settings.routes
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

    def names(self) -> list[str]:
        """Every model that can be asked for by name."""
        return sorted(name for name in self._targets if name != "*")

    def _resolve(self, name: str, secrets: Mapping[str, str]) -> Target | Refused:
        route = self._routes[name]
        for _ in range(_HOPS_MAX):
            _check(name, route)
            if route.to is None:
                return self._end(name, route, secrets)
            if route.to in self._routes:
                route = self._routes[route.to]
            elif self._policy is not None and route.to == self._policy:
                return ToPolicy(name, self._policy)
            else:
                raise ConfigError(f"routes.{name!r}: there is no route or policy named {route.to!r}")
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
