"""A scenario set: a JSONL file, one JSON object a line, read once and put in a fixed order."""

import hashlib
import random
from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import msgspec

from capture.errors import ConfigError

SCENARIOS_MAX = 10_000_000
LINE_BYTES_MAX = 16 * 1024 * 1024


class Scenario(msgspec.Struct, frozen=True):
    """One task. `id` is the object's own `id`, else a hash of its content."""

    id: str
    content: dict[str, Any]  # the object as it stands in the file

    @property
    def stratum(self) -> str | None:
        """The object's optional `stratum`: every stretch of the order mixes them."""
        value = self.content.get("stratum")
        return None if value is None else str(value)


def read_scenarios(path: Path) -> list[Scenario]:
    """The set in file order. `ConfigError` naming the line for anything but distinct objects."""
    try:
        with path.open("rb") as lines:
            scenarios = [
                parse_scenario(line, f"{path}:{number}")
                for number, line in enumerate(lines, start=1)
                if line.strip()
            ]
    except OSError as error:
        raise ConfigError(f"scenarios: cannot read {path}: {error.strerror}") from error
    if not scenarios:
        raise ConfigError(f"scenarios: {path} has none")
    if len(scenarios) > SCENARIOS_MAX:
        raise ConfigError(f"scenarios: {path} has more than {SCENARIOS_MAX}")
    _refuse_doubles(scenarios, path)
    return scenarios


def parse_scenario(line: bytes, where: str) -> Scenario:
    """One line of the file; `where` names it in the error."""
    if len(line) > LINE_BYTES_MAX:
        raise ConfigError(f"{where}: a scenario may have {LINE_BYTES_MAX} bytes, this one has {len(line)}")
    try:
        content = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: a scenario is a JSON object, this is a {type(content).__name__}")
    given = content.get("id")
    if given is None:
        return Scenario(id=content_id(content), content=content)
    if not isinstance(given, str | int) or isinstance(given, bool) or given == "":
        raise ConfigError(f"{where}: `id` must be a text or a whole number")
    return Scenario(id=str(given), content=content)


def content_id(content: dict[str, Any]) -> str:
    """`s_` and 16 hex digits of SHA-256 over the object with sorted keys."""
    canonical = msgspec.json.encode(content, order="sorted")
    return "s_" + hashlib.sha256(canonical).hexdigest()[:16]


def epoch_order(scenarios: Sequence[Scenario], *, seed: int, epoch: int) -> list[Scenario]:
    """The set in this epoch's order: a function of its ids, `seed` and `epoch` alone.

    Each stratum is shuffled by itself, then the strata take turns, so that neighbours (a batch)
    hold of each as long as it lasts.
    """
    shuffler = random.Random(f"{seed}:{epoch}")
    strata: dict[str | None, list[Scenario]] = {}
    for scenario in sorted(scenarios, key=lambda one: one.id):
        strata.setdefault(scenario.stratum, []).append(scenario)
    for members in strata.values():
        shuffler.shuffle(members)
    turns = chain.from_iterable(zip_longest(*strata.values()))
    return [scenario for scenario in turns if scenario is not None]


class Deck:
    """Scenarios by ordinal over all epochs: ordinal n is place n mod len of epoch n // len."""

    def __init__(self, scenarios: Sequence[Scenario], *, seed: int, epochs: int) -> None:
        self._scenarios = scenarios
        self._seed = seed
        self._epoch = -1
        self._order: list[Scenario] = []
        self.total = epochs * len(scenarios)

    def draw(self, ordinal: int) -> Scenario:
        """The scenario of group number `ordinal`; `IndexError` past the last epoch."""
        if not 0 <= ordinal < self.total:
            raise IndexError(f"ordinal {ordinal} of {self.total}")
        epoch, place = divmod(ordinal, len(self._scenarios))
        if epoch != self._epoch:
            self._order = epoch_order(self._scenarios, seed=self._seed, epoch=epoch)
            self._epoch = epoch
        return self._order[place]


def _refuse_doubles(scenarios: Sequence[Scenario], path: Path) -> None:
    seen: set[str] = set()
    for number, scenario in enumerate(scenarios, start=1):
        if scenario.id in seen:
            raise ConfigError(f"scenarios: {path}: number {number} repeats the id {scenario.id!r}")
        seen.add(scenario.id)
