"""What a demonstration showed: its figures, the thresholds they must reach, and its tables. Pure."""

from collections.abc import Iterable, Mapping

import msgspec

from rollouts.compare import wilson

GAMES_MIN = 200
WIN_POINTS = 30.0
DRAW_POINTS = 20.0
INVALID_SHARE_MAX = 0.25
ADAPTERS_MIN = 20
INDISTINGUISHABLE_MAX = 2
LOGPROB_DIFF_MAX = 1e-3
COMPARED_SHARE_MIN = 0.05


class Games(msgspec.Struct, frozen=True, kw_only=True):
    """Results of an evaluation against one opponent; the three add up to the games."""

    wins: int
    draws: int
    losses: int
    invalid: int  # games with at least one rejected move, whatever their result

    @property
    def games(self) -> int:
        """How many were played."""
        return self.wins + self.draws + self.losses

    def points(self, name: str) -> float:
        """A count as per cent of the games; 0 without games."""
        return 100.0 * getattr(self, name) / self.games if self.games else 0.0


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the policy against both opponents."""

    random: Games
    optimal: Games
    version: int = 0


class FailedRequests(msgspec.Struct, frozen=True, kw_only=True):
    """Failed attempts, retries included, as each side of the wire counted them."""

    client: int  # by the proxy, the engine's only client
    engine: int  # by the engine: refused, aborted or failed generations
    agent: int  # calls that agents saw fail, for whatever reason
    client_detail: dict[str, int] = {}
    engine_detail: dict[str, int] = {}


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """Engine against learner, each token under the version that sampled it, in nats."""

    max_abs_logprob_diff: float
    mean_abs_logprob_diff: float
    compared_tokens: int
    trained_tokens: int
    versions_trained_on: int  # distinct versions that sampled trained tokens
    versions_skipped: int  # in how many batches some such version was not compared
    wrong_adapter_diff: float | None  # largest difference under another version; None: never tried

    @property
    def compared_share(self) -> float:
        """Compared tokens over trained ones."""
        return self.compared_tokens / self.trained_tokens if self.trained_tokens else 0.0


class Adapters(msgspec.Struct, frozen=True, kw_only=True):
    """What the engines served; every count is of distinct weights (by hash)."""

    published: int
    activated: int
    activated_in_flight: int  # activated while the engine was answering a request
    sampled_from: int  # activated, and some call was answered by it
    qualified: int  # both
    indistinguishable: int  # moved less than the floor, so verified only by name


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """The token balance, each term from its own rows."""

    sampled: int
    trained: int
    zero_advantage: int
    dropped: dict[str, int]
    untrainable: dict[str, int]
    not_for_training: dict[str, int]
    pending: int
    exact: bool


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a demonstration reports."""

    before: Column
    after: Column
    positions: int  # distinct ones in the evaluation games after training
    positions_seen_share: float  # of them, met in training too
    steps: int
    rollouts: int
    calls: int
    wall_s: float
    cold_s: float  # of it, until every part was ready
    adapters: Adapters
    failed_requests: FailedRequests
    mismatch: Mismatch
    tokens: Tokens
    rollouts_in_ledger_twice: int
    store_faults: list[str] = []


def flat(summary: Summary) -> dict[str, object]:
    """The summary as it is written: headline figures on top, their details beside them."""
    return {
        **msgspec.to_builtins(summary),
        "adapters_activated": summary.adapters.qualified,
        "failed_requests": max(summary.failed_requests.client, summary.failed_requests.engine),
        "failed_requests_detail": msgspec.to_builtins(summary.failed_requests),
        "max_abs_logprob_diff": summary.mismatch.max_abs_logprob_diff,
        "compared_tokens": summary.mismatch.compared_tokens,
        "sampled_tokens": summary.tokens.sampled,
        "misses": misses(summary),
    }


def misses(summary: Summary) -> list[str]:
    """Every threshold that was missed, in words; empty means shown."""
    return [
        *_learning(summary.before, summary.after),
        *_swaps(summary.adapters),
        *_requests(summary.failed_requests),
        *_exactness(summary.mismatch),
        *_books(summary),
    ]


def exactness_misses(summary: Summary) -> list[str]:
    """Those that hold for a run of any length: nothing failed, nothing drifted, the books balance."""
    return [
        *_requests(summary.failed_requests),
        *_exactness(summary.mismatch),
        *_books(summary),
    ]


def _learning(before: Column, after: Column) -> Iterable[str]:
    for name, column in (("before", before), ("after", after)):
        for opponent in ("random", "optimal"):
            games = getattr(column, opponent).games
            if games < GAMES_MIN:
                yield f"{name}.{opponent}: {games} games, {GAMES_MIN} are needed"
    wins = after.random.points("wins") - before.random.points("wins")
    if wins < WIN_POINTS:
        yield f"wins against random: {wins:+.1f} points, {WIN_POINTS:+.0f} are needed"
    draws = after.optimal.points("draws") - before.optimal.points("draws")
    if draws < DRAW_POINTS:
        yield f"draws against optimal: {draws:+.1f} points, {DRAW_POINTS:+.0f} are needed"
    was = before.random.invalid + before.optimal.invalid
    now = after.random.invalid + after.optimal.invalid
    if now > INVALID_SHARE_MAX * was:
        yield f"invalid games: {now} after {was}, at most a quarter is allowed"


def _swaps(adapters: Adapters) -> Iterable[str]:
    if adapters.qualified < ADAPTERS_MIN:
        yield (
            f"adapters activated: {adapters.qualified} under traffic and sampled from "
            f"(of {adapters.activated}), {ADAPTERS_MIN} are needed"
        )
    if adapters.indistinguishable > INDISTINGUISHABLE_MAX:
        yield f"indistinguishable adapters: {adapters.indistinguishable}, at most {INDISTINGUISHABLE_MAX}"


def _requests(failed: FailedRequests) -> Iterable[str]:
    if failed.client != failed.engine:
        yield f"failed requests: the proxy counted {failed.client}, the engine {failed.engine}"
    if failed.client or failed.engine:
        yield f"failed requests: {max(failed.client, failed.engine)}, none is allowed"
    if failed.agent:
        yield f"failed calls: agents saw {failed.agent}, none is allowed"


def _exactness(mismatch: Mismatch) -> Iterable[str]:
    largest = mismatch.max_abs_logprob_diff
    if not largest <= LOGPROB_DIFF_MAX:  # NaN misses too
        yield f"engine against learner: {largest:.2g} nats apart, at most {LOGPROB_DIFF_MAX:g}"
    if mismatch.compared_share < COMPARED_SHARE_MIN:
        share = f"{mismatch.compared_share:.1%} of the trained ones"
        yield f"compared tokens: {share}, {COMPARED_SHARE_MIN:.0%} are needed"
    if mismatch.versions_skipped:
        yield f"compared tokens: in {mismatch.versions_skipped} batches not from every version trained on"
    if mismatch.wrong_adapter_diff is None:
        yield "wrong adapter: never compared"
    elif not mismatch.wrong_adapter_diff > max(LOGPROB_DIFF_MAX, largest):
        yield f"wrong adapter: {mismatch.wrong_adapter_diff:.2g} nats apart, no more than the right one"


def _books(summary: Summary) -> Iterable[str]:
    if not summary.tokens.exact:
        yield "token balance: the terms do not add up to the sampled tokens"
    if summary.tokens.pending:
        yield f"token balance: {summary.tokens.pending} tokens pending"
    if summary.rollouts_in_ledger_twice:
        yield f"ledger: {summary.rollouts_in_ledger_twice} rollouts stand in it twice"
    for fault in summary.store_faults:
        yield f"store: {fault}"


def table(summary: Summary) -> str:
    """Before and after in per cent with 95 % intervals (Wilson's)."""
    rows = [_row("", "vs random", "vs optimal")]
    for name, column in (("before", summary.before), ("after", summary.after)):
        label = f"{name} (v{column.version})"
        rows.append(_row(label, _cell(column.random), _cell(column.optimal)))
    rows.append("")
    rows.append(_row("95 % intervals", "vs random", "vs optimal"))
    for name, column in (("before", summary.before), ("after", summary.after)):
        for outcome in ("wins", "draws", "losses", "invalid"):
            cells = (_interval(games, outcome) for games in (column.random, column.optimal))
            rows.append(_row(f"{name} {outcome}", *cells))
    return "\n".join(rows)


def _row(label: str, *cells: str) -> str:
    return f"  {label:<18}" + "".join(f"{cell:<26}" for cell in cells).rstrip()


def _cell(games: Games) -> str:
    shares = "/".join(f"{games.points(name):.0f}" for name in ("wins", "draws", "losses"))
    return f"{shares}, {games.points('invalid'):.0f} invalid"


def _interval(games: Games, name: str) -> str:
    if not games.games:
        return "no games"
    interval = wilson(getattr(games, name), games.games)
    return f"{100 * interval.mean:5.1f} [{100 * interval.low:5.1f}, {100 * interval.high:5.1f}]"


def games_of(scores: Iterable[Mapping[str, float]]) -> Games:
    """Count the named scores `win`, `draw`, `loss` and `invalid` of one evaluation's rollouts."""
    counts = dict.fromkeys(("win", "draw", "loss", "invalid"), 0)
    for named in scores:
        for name in counts:
            counts[name] += named.get(name, 0.0) > 0.5
    return Games(wins=counts["win"], draws=counts["draw"], losses=counts["loss"], invalid=counts["invalid"])
