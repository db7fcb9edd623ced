"""What is said of promotions: by `hone adapters` and `hone status`. Pure."""

import time
from collections.abc import Sequence

from capture.types import EngineVersion, Promotion, Version

SHOWN_MAX = 5  # promotions in a listing, newest last


def listing(
    versions: Sequence[Version],
    engines: Sequence[EngineVersion],
    active: Version | None,
    promoted: Version | None,
    history: Sequence[Promotion],
) -> list[str]:
    """One line a version, with what it is to training and users, and the newest promotions below."""
    roles: dict[int, list[str]] = {}
    for role, named in (("active", active), ("promoted", promoted)):
        if named is not None:
            roles.setdefault(named.version, []).append(role)
    for asked in (past for past in history if past.is_open):
        roles.setdefault(asked.version, []).append("asked for")
    shown = []
    for one in versions:
        mark = f"<- {', '.join(roles[one.version])}" if one.version in roles else ""
        states = ", ".join(f"{row.engine} {row.state}" for row in engines if row.version == one.version)
        line = f"v{one.version:<6}step {one.step:<6}{one.state:<11}{mark:<21}{states}"
        shown.append(line.rstrip())
    if history:
        shown += ["", "promotions", *(f"  {_row(one)}" for one in history[-SHOWN_MAX:])]
    return shown


def _row(one: Promotion) -> str:
    what = f"{moment(one.asked_at)}  {one.kind:<9} v{one.version}"
    if one.served_at is not None:
        return f"{what} in place of v{one.replaced}, served from {moment(one.served_at)}"
    return f"{what} not served: {one.reason}" if one.reason else f"{what} waits for an engine to prove it"


def standing(promoted: Version | None, newest: Promotion | None) -> str | None:
    """The line of `hone status`; None where nothing was ever promoted."""
    if promoted is None or newest is None:
        return None
    served = f"v{promoted.version}"
    if newest.served_at is not None:
        return f"{served} since {moment(newest.served_at)}, before it v{newest.replaced}"
    if newest.reason is None:
        return f"{served}; v{newest.version} is asked for and served once an engine has proved it"
    return f"{served}; v{newest.version} was not promoted: {newest.reason}"


def answer(policy: str, asked: Promotion | None, served: int, *, proxy: bool, waited_s: float) -> str:
    """What came of asking for a promotion; `served` is the promoted version, `proxy` whether one runs."""
    if asked is None:
        return f"{policy}@v{served} is promoted already"
    name = f"{policy}@v{asked.version}"
    if asked.served_at is not None:
        return f"{name} is promoted, in place of v{asked.replaced}"
    if asked.reason is not None:
        return (
            f"{name} is not promoted, v{served} stays: {asked.reason}. An engine that failed with a version "
            "tries it again only after a restart"
        )
    if not proxy:
        return (
            f"{name} is asked for. No proxy with engines runs now: the next one serves v{served} until an "
            f"engine has proved v{asked.version}"
        )
    return (
        f"{name} is asked for, but no engine has proved it after {waited_s:g} s: v{served} is served until "
        "one has; `hone status` says when"
    )


def moment(at: float) -> str:
    """Unix seconds as local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
