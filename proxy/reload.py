"""Reading hone.toml again while calls are served: the whole file is checked, then all of it counts at once.

What takes hold are keys, their limits and routes. A file that cannot work changes nothing. Calls in
flight keep what they started with; everything else in the file waits for a restart, and is named.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from capture.errors import ConfigError, HoneError
from proxy.metrics import Metrics
from proxy.rules import Live, Rules, rules
from proxy.settings import Settings

log = logging.getLogger("hone.proxy")

_LIVE = frozenset({"keys", "key_limits", "routes"})  # of `Settings`


class Source(msgspec.Struct, frozen=True):
    """Where settings come from: `read` gives them anew, with the routes' secrets, or raises `HoneError`."""

    path: Path
    read: Callable[[], tuple[Settings, Mapping[str, str]]]


class Reloader:
    """Reads the source again when it is told to, or when its file has changed."""

    def __init__(
        self,
        source: Source,
        started: Settings,
        live: Live,
        metrics: Metrics,
        applied: Callable[[Rules], None],
    ) -> None:
        self._source = source
        self._started = started
        self._live = live
        self._metrics = metrics
        self._applied = applied  # told of the new rules, once they count
        self._one = asyncio.Lock()

    async def reload(self) -> bool:
        """Whether the file could be read and now counts."""
        async with self._one:
            try:
                settings, secrets = await asyncio.to_thread(self._source.read)
                fresh = rules(settings, secrets)
                if fresh.keyring.is_open and not self._live.rules.keyring.is_open:
                    raise ConfigError("proxy.keys: without any key everybody could use it; restart for that")
            except (HoneError, OSError) as error:
                self._metrics.count(self._metrics.reloads, "invalid")
                log.error("%s is not used, what was read before stays: %s", self._source.path, error)
                return False
            self._live.rules = fresh
            self._applied(fresh)
            self._metrics.count(self._metrics.reloads, "applied")
            log.info("%s was read again: keys, limits and routes count from now on", self._source.path)
            if waiting := _waiting(self._started, settings):
                log.warning("these changes wait for a restart: %s", ", ".join(waiting))
            return True

    async def watch(self, interval_s: float) -> None:
        """Reload when the file has changed and then stayed as it is for one look: nobody is still writing."""
        used = seen = _look(self._source.path)
        while True:
            await asyncio.sleep(interval_s)
            now = _look(self._source.path)
            if now is not None and now == seen != used:
                used = now
                await self.reload()
            seen = now


def _look(path: Path) -> tuple[int, int, int] | None:
    """What changes with a file's content; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _waiting(old: Settings, new: Settings) -> list[str]:
    """Names of the proxy's settings that differ and do not take hold."""
    names = (name for name in Settings.__struct_fields__ if name not in _LIVE)
    return [f"proxy.{name}" for name in names if getattr(old, name) != getattr(new, name)]
