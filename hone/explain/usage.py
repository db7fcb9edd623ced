"""How much of what was sampled is usable for training, and why the rest is not. Pure."""

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from capture.reasons import DROPPED, NOT_FOR_TRAINING, UNTRAINABLE
from capture.store import FateCounts
from capture.types import Balance
from hone.explain.facts import PENDING, TRAINED, ZERO_ADVANTAGE
from hone.explain.words import SETTINGS, count

USABLE = (TRAINED, PENDING)
ELSEWHERE = ("eval", "observe")  # modes of rollouts that are not for training
WHYS = {
    TRAINED: "A batch with them was committed.",
    PENDING: "Their rollout is open, or waits for its score, its group or a batch.",
    ZERO_ADVANTAGE: "The rewards of their group were all equal, or theirs was its mean.",
    "no_tokens": "Rollouts in a batch that sampled no token that may be trained.",
    "run_ended": "The run ended before a batch with them was committed.",
}


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that met the same fate."""

    fate: str  # trained, pending, zero_advantage, eval, observe, a drop reason or an untrainable reason
    tokens: int
    share: float | None  # of those sampled for training; None: they were not
    met_by: int  # how many
    of: Literal["rollout", "call"]  # a fate of whole rollouts, or of single calls
    why: str
    setting: str | None  # the setting that would change it


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that a policy sampled, by what became of them."""

    sentence: str
    sampled: int
    for_training: int  # of them, those of train rollouts
    usable: float  # the share of these that is trained or may still be
    shares: list[Share]  # trained and pending, then the losses, the largest first, then the others


def usage(policy: str, balance: Balance, counts: FateCounts) -> Usage | None:
    """None where nothing was sampled and nothing was lost."""
    for_training = balance.sampled - sum(balance.not_for_training.get(mode, 0) for mode in ELSEWHERE)
    shares = sorted(
        _shares(balance, counts, for_training),
        key=lambda one: (_rank(one.fate), -one.tokens, -one.met_by),
    )
    if not shares:
        return None
    return Usage(
        sentence=_sentence(policy, balance, for_training, shares),
        sampled=balance.sampled,
        for_training=for_training,
        usable=(balance.trained + balance.pending) / for_training if for_training else 0.0,
        shares=shares,
    )


def _rank(fate: str) -> int:
    return 0 if fate in USABLE else 2 if fate in ELSEWHERE else 1


def _shares(balance: Balance, counts: FateCounts, for_training: int) -> Iterator[Share]:
    """One for every fate that some token, call or rollout met."""
    of_calls = dict(balance.untrainable)
    of_rollouts = {
        TRAINED: balance.trained,
        PENDING: balance.pending,
        ZERO_ADVANTAGE: balance.zero_advantage,
        **balance.dropped,
    }
    for fate, tokens in balance.not_for_training.items():  # whole rollouts, and calls that a retry superseded
        (of_rollouts if fate in ELSEWHERE else of_calls)[fate] = tokens
    yield from _table("rollout", of_rollouts, counts.rollouts, for_training)
    yield from _table("call", of_calls, counts.calls, for_training)


def _table(
    of: Literal["rollout", "call"], tokens: Mapping[str, int], met_by: Mapping[str, int], for_training: int
) -> Iterator[Share]:
    for fate in dict.fromkeys([*tokens, *met_by]):
        amount, many = tokens.get(fate, 0), met_by.get(fate, 0)
        if amount or many:
            yield Share(
                fate=fate,
                tokens=amount,
                share=None if fate in ELSEWHERE or not for_training else amount / for_training,
                met_by=many,
                of=of,
                why=_why(fate),
                setting=SETTINGS.get(fate),
            )


def _why(fate: str) -> str:
    known: list[Mapping[str, str]] = [WHYS, UNTRAINABLE, NOT_FOR_TRAINING, DROPPED]
    return next((sentences[fate] for sentences in known if fate in sentences), "")


def _sentence(policy: str, balance: Balance, for_training: int, shares: list[Share]) -> str:
    if not for_training:
        most = next((one for one in shares if one.fate not in USABLE), None)
        why = f"; the most common fate is {_loss(most)}" if most else ""
        return f"Usable: nothing yet, {policy} sampled no token for training{why}."
    usable = percent((balance.trained + balance.pending) / for_training)
    terms = f"{balance.trained} trained, {balance.pending} pending"
    lost = next((one for one in shares if _rank(one.fate) == 1), None)
    return (
        f"Usable: {usable} of the {count(for_training, 'token')} that {policy} sampled for training ({terms})"
        f"{'; the largest loss is ' + _loss(lost) if lost else ''}."
    )


def _loss(share: Share) -> str:
    """`grammar, 14 tokens: a grammar masked the sampling (sampling.grammar)`."""
    why = f": {share.why[:1].lower()}{share.why[1:].removesuffix('.')}" if share.why else ""
    return f"{share.fate}, {_amount(share)}{why}{f' ({share.setting})' if share.setting else ''}"


def _amount(share: Share) -> str:
    return count(share.tokens, "token") if share.tokens else count(share.met_by, share.of)


def percent(share: float) -> str:
    """`75 %`, and neither 0 nor 100 where it is not exactly that."""
    if 0 < share < 0.01:
        return "<1 %"
    return ">99 %" if 0.99 < share < 1 else f"{100 * share:.0f} %"


def lines(usage: Usage) -> Iterator[str]:
    """A table with a line for each fate."""
    fates = max(len(one.fate) for one in usage.shares)
    digits = max(len(str(one.tokens)) for one in usage.shares)
    for one in usage.shares:
        share = "" if one.share is None else percent(one.share)
        why = "" if one.fate in USABLE or not one.why else f": {one.why.removesuffix('.')}"
        why += f" ({one.setting})" if one.setting else ""
        yield f"  {one.tokens:>{digits}} {share:>6}  {one.fate:<{fates}}  {count(one.met_by, one.of)}{why}"
