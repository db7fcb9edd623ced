"""Which processes `hone up` and `hone train` consist of. Pure."""

from collections.abc import Mapping, Sequence

from hone.config import Config
from hone.supervisor import Part


def serving(config: Config, python: str, env: Mapping[str, str] | None = None) -> list[Part]:
    """Engine (where a model is trained and none is given by URL), proxy, control."""
    proxy, control = config.proxy, config.control
    given = config.engine.urls or config.capture_only
    parts = [] if given else [_engine(config, python, env or {})]
    parts.append(
        Part(
            name="proxy",
            command=command(config, python, "proxy"),
            env=dict(env or {}),
            ready_url=f"http://{_reachable(proxy.host)}:{proxy.port}/ready",
            ready_timeout_s=120.0,
            after=tuple(part.name for part in parts),
            stop_timeout_s=proxy.unready_s + proxy.drain_s + 5.0,
        )
    )
    parts.append(
        Part(
            name="control",
            command=command(config, python, "control"),
            env=dict(env or {}),
            ready_url=f"http://{_reachable(control.host)}:{control.port}/health",
        )
    )
    return parts


def training(
    config: Config, python: str, run_id: str, *, after: Sequence[str], env: Mapping[str, str] | None = None
) -> list[Part]:
    """Learner and runner of one run; both end by themselves."""
    port = config.learner.metrics_port
    return [
        Part(
            name="learn",
            command=command(config, python, "learn", "--run", run_id),
            env=dict(env or {}),
            ready_url=f"http://{_reachable(config.learner.metrics_host)}:{port}/metrics" if port else None,
            ready_timeout_s=300.0,
            after=tuple(name for name in after if name == "engine"),  # vLLM measures a GPU that is its own
            finite=True,
            stop_timeout_s=30.0,
        ),
        Part(
            name="runner",
            command=command(config, python, "runner", "--run", run_id),
            env=dict(env or {}),
            after=(*after, "learn"),
            finite=True,
        ),
    ]


def command(config: Config, python: str, *words: str) -> list[str]:
    """One part's command line."""
    return [python, "-m", "hone.cli.main", *words, "--config", str(config.path)]


def _engine(config: Config, python: str, env: Mapping[str, str]) -> Part:
    return Part(
        name="engine",
        command=command(config, python, "engine"),
        env=dict(env),
        ready_url=f"http://{_reachable(config.engine.host)}:{config.engine.port}/health",
        ready_timeout_s=config.engine.ready_timeout_s,
        stop_timeout_s=15.0,
    )


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
