"""Samples to be imitated: packed, split into what trains and what is held out, dealt into batches."""

import random
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import msgspec

from capture.tokens import packed, unpacked
from capture.types import Sample

HELD_OUT_FROM = 20  # lessons; with fewer nothing is held out


class Lesson(msgspec.Struct, frozen=True):
    """A sample in five bytes a token, and the scenario that it must be held out together with."""

    scenario: str
    tokens: bytes  # as `capture.tokens.packed`
    mask: bytes  # a byte a token: 1 where it has loss

    def __len__(self) -> int:
        return len(self.mask)

    @property
    def owned(self) -> int:
        """Tokens that have loss."""
        return self.mask.count(1)

    def sample(self) -> Sample:
        """Whole again; without spans its tokens are scored at temperature 1."""
        return Sample(
            rollout_id="",
            token_ids=unpacked(self.tokens),
            loss_mask=list(map(bool, self.mask)),
            sampled_logprobs=[0.0] * len(self.mask),
            spans=[],
        )


def lesson(scenario: str, sample: Sample) -> Lesson:
    """The sample, packed."""
    return Lesson(scenario, packed(sample.token_ids), bytes(sample.loss_mask))


def hold_out(lessons: Sequence[Lesson], share: float, seed: int) -> tuple[list[Lesson], list[Lesson]]:
    """What trains, and what is held out: about `share` of all, whole scenarios at a time.

    Nothing is held out of fewer than `HELD_OUT_FROM` lessons, nor where all have one scenario. Which are
    held out is a function of the scenarios' names and the seed.
    """
    names = sorted({one.scenario for one in lessons}, key=lambda name: _rank(name, seed))
    if len(lessons) < HELD_OUT_FROM or len(names) < 2 or not share:
        return list(lessons), []
    sizes: dict[str, int] = {}
    for one in lessons:
        sizes[one.scenario] = sizes.get(one.scenario, 0) + 1
    held: set[str] = set()
    count = 0
    for name in names[:-1]:
        if count >= share * len(lessons):
            break
        held.add(name)
        count += sizes[name]
    training = [one for one in lessons if one.scenario not in held]
    return training, [one for one in lessons if one.scenario in held]


def batches(lessons: Sequence[Lesson], tokens_max: int, *, epoch: int, seed: int) -> list[list[int]]:
    """Indexes of each step's lessons: shuffled, filled up to `tokens_max`; a longer one goes alone."""
    order = list(range(len(lessons)))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    dealt: list[list[int]] = []
    size = tokens_max
    for index in order:
        if size + len(lessons[index]) > tokens_max:
            dealt.append([])
            size = 0
        dealt[-1].append(index)
        size += len(lessons[index])
    return dealt


def owned_tokens(lessons: Iterable[Lesson]) -> int:
    """Tokens that have loss, of all of them."""
    return sum(one.owned for one in lessons)


def _rank(name: str, seed: int) -> bytes:
    return blake2b(f"{seed}:{name}".encode()).digest()
