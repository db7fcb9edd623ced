"""What agents and routes may see of the environment."""

from collections.abc import Mapping

from hone.config import Config
from hone.process import MARKER
from hone.sections import ENV_PREFIX


def for_agents(environ: Mapping[str, str]) -> dict[str, str]:
    """Without Hone's own variables, but with the mark by which strays are found."""
    return {
        name: value for name, value in environ.items() if name == MARKER or not name.startswith(ENV_PREFIX)
    }


def route_secrets(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """The values of the routes' `key_env` names, where they are set."""
    names = {route.key_env for route in config.proxy.routes.values() if route.key_env}
    return {name: environ[name] for name in sorted(names) if name in environ}


def proxy_url(config: Config) -> str:
    """Where the runner finds the proxy."""
    host = "127.0.0.1" if config.proxy.host in ("0.0.0.0", "::", "") else config.proxy.host
    return f"http://{host}:{config.proxy.port}"
