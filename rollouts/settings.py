"""Settings of the runner: what an agent is, how many run at once, how far they may get ahead."""

from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]
Wait = Annotated[float, msgspec.Meta(gt=0)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How agents are launched and admitted.

    `agent` is split like a shell would, without a shell. A bare `python` or `python3` is the
    interpreter that runs Hone; any other first word is looked up as it stands.
    """

    agent: str = "python agent.py"  # the command that attempts one scenario
    cwd: str = "."  # where the agent runs
    env: dict[str, str] = {}  # extra variables for every agent
    eval_env: dict[str, str] = {}  # more of them for evaluation (a lower temperature, for instance)
    model_name: str = "policy"  # MODEL_NAME of the agents
    concurrency: Count = 64  # agents that run at once
    max_calls: Count = 30  # calls a rollout may make; more get a 4xx
    timeout_s: Wait = 600.0  # an agent that runs longer is killed and its rollout is a timeout
    group_size: Count = 8  # rollouts of one scenario compared with each other; 1: with its mean so far
    groups_per_batch: Count = 8  # groups of one take by the learner
    batches_outstanding_max: Annotated[float, msgspec.Meta(ge=1)] = (
        2.0  # that agents are ahead; 1: almost none
    )
    epochs: Count = 1  # passes over the scenario set
    seed: int = 42  # of the order of the scenarios
    infrastructure_retries: Annotated[int, msgspec.Meta(ge=0)] = 2  # of a rollout that our side broke
    retry_wait_s: Wait = 1.0  # before the first of them; doubled for each further one
    redact: tuple[str, ...] = ()  # those of capture.redact: an agent's last words go to the log
    stdout_bytes_max: Annotated[int, msgspec.Meta(ge=0)] = 65_536  # kept of an agent's output: its end
    launch: Literal["auto", "fork", "command"] = "auto"  # auto: Python files from a fork server
    prepare_tls: bool = True  # fork server: read the certificate store before the fork, not in each agent
    preload_s: Wait = 60.0  # the fork server may take this long to import and warm up
    request_timeout_s: Wait = 30.0  # one request to the proxy's rollouts API
    proxy_wait_s: Wait = 60.0  # a proxy that gives no answer for so long ends the runner
    poll_s: Wait = 0.1  # between two looks at the store
    score_wait_s: Wait = 300.0  # evaluation: the longest time without any new score
    runner_metrics_port: int = 0  # Prometheus on 127.0.0.1; 0: none
