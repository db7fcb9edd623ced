"""The published adapter inside the real vLLM: the same logprobs as the learner's."""

import json
import random
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pytest
from learner_world import Attempt, World, logprobs_under, settings

from capture.adapters import read_manifest
from learner import canary
from learner.files import read_tensors
from learner.model import Model, Tensors
from learner.settings import Settings
from learner.train import run

POLICY = "learner"  # the engine is shared with tests of other policies
PROMPT_TOKENS = 24


class Engine(Protocol):
    url: str
    base_dir: Path
    adapter_dir: Path


def never() -> bool:
    return False


def post(engine: Engine, path: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(
        engine.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        content: bytes = response.read()
    return content


def sample(
    engine: Engine, model: str, prompt: list[int], temperature: float
) -> tuple[list[int], list[float]]:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 30,
        "temperature": temperature,
        "logprobs": 0,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    (choice,) = json.loads(post(engine, "/v1/completions", body))["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def attempts(rng: random.Random, vocabulary: int) -> list[Attempt]:
    """A group of random tokens, with rewards that differ."""
    prompt = [rng.randrange(vocabulary) for _ in range(PROMPT_TOKENS)]
    return [
        Attempt(prompt, [[rng.randrange(vocabulary) for _ in range(20)]], float(index)) for index in range(4)
    ]


def largest_gap(
    model: Model, adapter: Tensors | None, sampled: list[tuple[list[int], list[int], list[float]]], t: float
) -> float:
    gaps = []
    for prompt, ids, logprobs in sampled:
        mine = logprobs_under(model, adapter, prompt, ids, t)
        gaps += [abs(a - b) for a, b in zip(mine, logprobs, strict=True)]
    return max(gaps)


@dataclass(frozen=True)
class Published:
    """A world whose version 1 the engine has loaded."""

    world: World
    config: Settings
    model: Model
    path: Path
    name: str


@pytest.fixture(scope="module")
def published(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Published:
    scratch = tmp_path_factory.mktemp("engine")
    world = World(scratch / "db", policy=POLICY)
    config = settings(
        engine.base_dir,
        scratch,
        adapter_dir=str(engine.adapter_dir),
        lora_rank=8,
        lr=5e-3,
        groups_per_batch=1,
        steps_max=1,
    )
    model = Model(config)
    world.add_group(attempts(random.Random(0), model.vocabulary))
    run(config, world.path, world.run_id, POLICY, never)
    name = f"{POLICY}@v1"
    path = engine.adapter_dir / name
    post(engine, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
    return Published(world, config, model, path, name)


@pytest.mark.engine
def test_engine_and_learner_agree_on_a_published_adapter(engine: Engine, published: Published) -> None:
    world, model, name = published.world, published.model, published.name
    adapter = read_tensors(published.path / "adapter_model.safetensors")
    rng = random.Random(1)
    vocabulary = model.vocabulary
    group: list[Attempt] = []
    for temperature in (0.7, 1.0):
        sampled = []
        for _ in range(4):
            prompt = [rng.randrange(vocabulary) for _ in range(PROMPT_TOKENS)]
            sampled.append((prompt, *sample(engine, name, prompt, temperature)))
        assert largest_gap(model, adapter, sampled, temperature) < 1e-3
        assert largest_gap(model, None, sampled, temperature) > 1e-2  # the wrong adapter
        assert largest_gap(model, adapter, sampled, temperature + 0.3) > 1e-2  # the wrong temperature
        for index, (prompt, ids, logprobs) in enumerate(sampled):
            attempt = Attempt(prompt, [ids], float(index))
            attempt.logprobs, attempt.version, attempt.temperature = [logprobs], 1, temperature
            group.append(attempt)

    world.add_group(group)
    again = msgspec.structs.replace(published.config, steps_max=2)
    run(again, world.path, world.run_id, POLICY, never)
    numbers = world.store.steps(world.run_id)[-1].metrics
    assert numbers["mismatch_tokens"] >= 0.05 * numbers["trained_tokens"]
    assert numbers["mismatch_max"] < 1e-3 < numbers["mismatch_wrong_adapter_max"]
    assert numbers["ratio_max"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.engine
def test_canary_proves_the_version_and_not_its_parent(engine: Engine, published: Published) -> None:
    manifest = read_manifest(published.path)
    body = {
        "model": published.name,
        "prompt": manifest.canary_ids,
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
    }
    (choice,) = json.loads(post(engine, "/v1/completions", body))["choices"]
    found = [
        entry[str(token)]["logprob"]
        for token, entry in zip(manifest.canary_ids[1:], choice["prompt_logprobs"][1:], strict=True)
    ]
    pairs = zip(found, manifest.canary_logprobs, manifest.parent_logprobs, strict=True)
    gaps = [(abs(engine_says - own), abs(engine_says - parent)) for engine_says, own, parent in pairs]
    assert max(own for own, _ in gaps) < 1e-3
    assert max(parent for _, parent in gaps) > 1e-2
    assert canary.score(published.model, manifest.canary_ids, None) == pytest.approx(
        manifest.base_logprobs, abs=1e-5
    )
