"""Does an engine serve the adapter that it says it serves? Pure.

The learner put canary tokens into the manifest, chosen to move most between a version and its
parent, with their logprobs under this version, its parent and the base. The engine's own
logprobs of the same tokens must be nearest to this version's.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

PROBES = 16  # canary positions that an engine is asked about


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Mean absolute differences in nats, and what follows from them."""

    state: Literal["verified", "indistinguishable", "failed"]
    child: float  # engine to this version
    parent: float  # engine to its parent
    base: float
    moved: float  # this version to the nearer of parent and base
    floor: float

    @property
    def detail(self) -> str:
        """One line for a person."""
        return (
            f"{self.state}: engine is {self.child:.2g} from this version, {self.parent:.2g} from its parent, "
            f"{self.base:.2g} from the base; the version moved {self.moved:.2g}; floor {self.floor:.2g}"
        )


def distance(left: Sequence[float], right: Sequence[float]) -> float:
    """Mean absolute difference. Both have one entry a canary position; `ValueError` otherwise."""
    if len(left) != len(right) or not left:
        raise ValueError(f"canary logprobs of different length: {len(left)} and {len(right)}")
    return sum(abs(a - b) for a, b in zip(left, right, strict=True)) / len(left)


def judge(
    measured: Sequence[float],
    child: Sequence[float],
    parent: Sequence[float],
    base: Sequence[float],
    floor: float,
) -> Verdict:
    """Compare what the engine says with the three candidates; all in nats, one entry a position.

    `verified`: nearer to this version than to parent and base, and near it in absolute terms (within
    twice the floor or half of what the version moved). `indistinguishable`: near, but the version
    moved less than the floor, so parent or base would look the same. `failed`: anything else, NaN too.
    """
    to_child, to_parent, to_base = (distance(measured, other) for other in (child, parent, base))
    moved = min(distance(child, parent), distance(child, base))
    near = to_child <= max(2 * floor, moved / 2)
    if near and moved < floor:
        state: Literal["verified", "indistinguishable", "failed"] = "indistinguishable"
    elif near and to_child < to_parent and to_child < to_base:
        state = "verified"
    else:
        state = "failed"
    return Verdict(state=state, child=to_child, parent=to_parent, base=to_base, moved=moved, floor=floor)


def probes(child: Sequence[float], parent: Sequence[float]) -> list[int]:
    """The canary positions (1 and on) to ask about: those that the version moved most, ascending.

    `child[i]` and `parent[i]` belong to position i + 1.
    """
    moved = sorted(range(len(child)), key=lambda i: -abs(child[i] - parent[i]))
    return sorted(i + 1 for i in moved[:PROBES])


def at(logprobs: Sequence[float], positions: Sequence[int]) -> list[float]:
    """The entries of these positions; `ValueError` if there are none for them."""
    try:
        return [logprobs[position - 1] for position in positions]
    except IndexError:
        raise ValueError(f"{len(logprobs)} canary logprobs, position {max(positions)} asked") from None


def question(model: str, ids: Sequence[int], positions: Sequence[int]) -> dict[str, Any]:
    """A completion request whose answer holds the logprobs of `ids` at `positions` (each >= 1).

    One prompt for each position, one token sampled after it, and the logprobs of the canary's tokens
    asked by id. vLLM's `prompt_logprobs` would need one prompt only, but with an adapter in the batch
    it kills vLLM's CPU engine (0.32: the LoRA logits layer expects one row a request).
    """
    tokens = sorted({ids[position] for position in positions})
    return {
        "model": model,
        "prompt": [list(ids[:position]) for position in positions],
        "max_tokens": 1,
        "temperature": 1,
        "logprobs": len(tokens),
        "logprob_token_ids": tokens,
        "return_tokens_as_token_ids": True,
    }


def answers(answer: Any, ids: Sequence[int], positions: Sequence[int]) -> list[float]:
    """The logprobs out of the answer to `question`; `ValueError` if one is missing."""
    try:
        choices = {choice["index"]: choice["logprobs"]["top_logprobs"][0] for choice in answer["choices"]}
        return [float(choices[i][f"token_id:{ids[p]}"]) for i, p in enumerate(positions)]
    except (LookupError, TypeError) as error:
        raise ValueError(f"the engine's answer lacks a canary logprob: {error!r}") from None
