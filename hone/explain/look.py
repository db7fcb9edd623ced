"""Reading what is to be explained: the only module here that touches the store."""

from collections.abc import Mapping
from typing import Any

from capture.store import Store
from capture.types import ModelCall
from hone.explain.facts import Facts, gather


def look(store: Store, text: str, settings: Mapping[str, Mapping[str, Any]]) -> tuple[Facts, list[ModelCall]]:
    """The facts of the rollout that an id means (see `Store.find_rollout`), and its calls.

    `settings` are today's sections. Those that the rollout's run was started with go before them: they
    decided, whatever the file says now.
    """
    history = store.history(store.find_rollout(text))
    rollout = history.rollout
    versions = store.versions(rollout.policy) if rollout.policy else []
    sections: dict[str, Any] = dict(settings)
    if history.lineage is not None:
        for section, table in store.run_settings(history.lineage.run_id).items():
            sections[section] = {**sections.get(section, {}), **table} if isinstance(table, dict) else table
    calls = store.calls(rollout.id)
    return gather(history, calls, versions, sections, store.now()), calls
