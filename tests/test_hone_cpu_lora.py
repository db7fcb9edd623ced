"""LoRA by adapter on the CPU: every row of a mixed batch gets its own adapter, and the base none."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from proxy_world import CANARY, write_adapter

pytestmark = pytest.mark.engine

ADAPTERS = 8  # as many as the engine holds at once: every slot is used
EACH = 3
EQUAL, DIFFERENT = 1e-4, 1e-2  # nats, of the worst token


async def complete(client: aiohttp.ClientSession, url: str, model: str) -> dict[str, Any]:
    body = {"model": model, "prompt": CANARY, "max_tokens": 24, "logprobs": 0, "return_token_ids": True}
    async with client.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return (await response.json())["choices"][0]


async def sampled(url: str, paths: dict[str, Path]) -> dict[str, list[dict[str, Any]]]:
    """Completions of the base and of each adapter, all in flight at once."""
    async with aiohttp.ClientSession() as client:
        for name, path in paths.items():
            named = {"lora_name": name, "lora_path": str(path)}
            async with client.post(f"{url}/v1/load_lora_adapter", json=named) as response:
                assert response.status == 200, await response.text()
        try:
            models = ["policy@base", *paths]
            found = await asyncio.gather(*(complete(client, url, model) for model in models * EACH))
        finally:
            for name in paths:
                await client.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": name})
    return {model: found[index :: len(models)] for index, model in enumerate(models)}


def distance(model: Any, choice: dict[str, Any]) -> float:
    """The largest |difference| of a completion's logprobs to those of a transformers model, in nats."""
    import torch

    ids = choice["token_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([CANARY + ids])).logits[0, len(CANARY) - 1 : -1]
    expected = torch.log_softmax(logits, -1)[range(len(ids)), ids]
    return float((expected - torch.tensor(choice["logprobs"]["token_logprobs"])).abs().max())


def test_every_row_of_a_batch_has_its_own_adapter_and_the_base_none(engine: Any, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    paths = {f"grouped-{seed}": tmp_path / f"grouped-{seed}" for seed in range(ADAPTERS)}
    for seed, path in enumerate(paths.values()):
        write_adapter(path, engine.base_dir, seed)
    found = asyncio.run(sampled(engine.url, paths))
    assert "Using GroupedLora" in engine.log.read_text()

    def model(path: Path | None) -> Any:
        base = AutoModelForCausalLM.from_pretrained(engine.base_dir, dtype=torch.float32)
        return base if path is None else PeftModel.from_pretrained(base, str(path))

    models = {"policy@base": model(None)} | {name: model(path) for name, path in paths.items()}
    names = list(models)
    for index, (name, choices) in enumerate(found.items()):
        assert max(distance(models[name], choice) for choice in choices) <= EQUAL
        other = models[names[index - 1]]
        assert max(distance(other, choice) for choice in choices) >= DIFFERENT
