"""Whether an evaluation is good enough to promote its version (`[promote]`). `verdict` decides, purely."""

import math
from collections.abc import Mapping, Sequence

from capture.errors import Conflict
from capture.evaluations import newest, recorded
from capture.store import Store
from capture.types import Rollout
from hone.settings import PromoteSettings
from rollouts.compare import interval

Rewards = Mapping[tuple[str, str], Sequence[float]]
"""(scenario file, scenario) -> the rewards of its rollouts."""


def verdict(settings: PromoteSettings, new: Rewards, old: Rewards) -> tuple[bool, str]:
    """Whether `new` is better, and the sentence that says why. Scenario by scenario: how hard one is does not
    matter."""
    shared = sorted(new.keys() & old.keys())
    counts = [sum(len(side[key]) for key in shared) for side in (new, old)]
    if len(shared) < 2 or min(counts) < settings.rollouts_min:
        return False, (
            f"{counts[0]} against {counts[1]} scored rollouts on {len(shared)} scenarios that both played "
            f"are too few (promote.rollouts_min = {settings.rollouts_min})"
        )
    found = interval([_mean(new[key]) - _mean(old[key]) for key in shared])
    told = f"the reward differs by {found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
    if found.low > settings.margin:
        return True, f"{told}, more than promote.margin = {settings.margin:g}"
    return False, f"{told}: not surely more than promote.margin = {settings.margin:g}"


def consider(store: Store, policy: str, settings: PromoteSettings, run_id: str, version: int) -> str:
    """Ask that the version be promoted if its newest evaluations pass; the sentence that says what came of
    it."""
    promoted = store.promoted_version(policy)
    held = promoted.version if promoted else 0
    if version == held:
        return f"v{version} is promoted already"
    everything = recorded(store, run_id)
    new, old = newest(everything, version), newest(everything, held)
    missing = sorted(new.keys() - old.keys())
    if missing:
        return (
            f"v{version} is not promoted: v{held}, which is, has no evaluation on {missing[0]} to compare "
            f"with; `hone eval --version {held}` makes one"
        )
    sides = [
        rewards({name: [store.rollout(id) for id in side[name].rollouts] for name in new})
        for side in (new, old)
    ]
    passed, why = verdict(settings, *sides)
    if not passed:
        return f"v{version} is not promoted in place of v{held}: {why}"
    try:
        store.ask_promotion(policy, version, "promote")
    except Conflict as error:
        return f"v{version} passed ({why}) but cannot be promoted: {error}"
    return f"v{version} passed and is asked for in place of v{held}: {why}"


def rewards(rollouts: Mapping[str, Sequence[Rollout]]) -> dict[tuple[str, str], list[float]]:
    """By file and scenario; rollouts without a reward are left out."""
    found: dict[tuple[str, str], list[float]] = {}
    for name, members in rollouts.items():
        for one in members:
            if one.reward is not None and one.state == "scored":
                found.setdefault((name, one.scenario_id or ""), []).append(one.reward)
    return found


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
