"""What a running proxy can be told anew: keys, their limits, and routes; all of it or nothing."""

from collections.abc import Mapping

import msgspec

from proxy.keys import Keyring
from proxy.routes import Routes
from proxy.settings import Settings, check


class Rules(msgspec.Struct, frozen=True):
    """Keys with their limits, and routes: made together, replaced together."""

    keyring: Keyring
    routes: Routes


class Live:
    """The rules of now. A call takes them once, when it arrives, and keeps them to its end."""

    __slots__ = ("rules",)

    def __init__(self, rules: Rules) -> None:
        self.rules = rules


def rules(settings: Settings, secrets: Mapping[str, str]) -> Rules:
    """The rules that settings make; `ConfigError` names the setting that cannot work."""
    check(settings)
    return Rules(Keyring(settings.keys, settings.key_limits), Routes(settings, secrets))
