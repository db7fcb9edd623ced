"""A tiny base model and ready samples for the learner's tests."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from capture import graph
from capture.frames import pack
from capture.sqlite import SqliteStore
from capture.types import ModelCall, RawCall, Rollout, Sample, Span
from learner.batch import Scored, micro_batches
from learner.model import Model, Tensors
from learner.settings import Settings

VOCABULARY = 64


def make_base(directory: Path, seed: int = 1) -> Path:
    """A random Qwen3 of 30 thousand parameters with logits of spread ~1, and a tokenizer."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w0").save_pretrained(
        directory
    )
    return directory


def settings(base: Path, scratch: Path, **changes: object) -> Settings:
    values: dict[str, object] = {
        "base_model": str(base),
        "adapter_dir": str(scratch / "adapters"),
        "checkpoint_dir": str(scratch / "checkpoints"),
        "metrics_port": None,
        "lora_rank": 4,
        "lr": 1e-2,
        "groups_per_batch": 2,
        "batch_wait_s": 0.0,
        "poll_s": 0.01,
        **changes,
    }
    return Settings(**values)


def make_sample(
    ids: Sequence[int],
    owned: Sequence[int],
    *,
    rollout_id: str = "r_1",
    version: int = 0,
    temperature: float = 1.0,
    logprob: float = -2.0,
) -> Sample:
    """A sample that owns the tokens at the positions `owned`."""
    return Sample(
        rollout_id=rollout_id,
        token_ids=list(ids),
        loss_mask=[i in owned for i in range(len(ids))],
        sampled_logprobs=[logprob if i in owned else 0.0 for i in range(len(ids))],
        spans=[Span(i, i + 1, f"c_{i}", version, temperature) for i in owned],
    )


def random_samples(count: int, seed: int) -> list[Sample]:
    """Ragged samples, many of which share prefixes of several depths; owned tokens in two places."""
    rng = random.Random(seed)
    samples: list[Sample] = []
    for index in range(count):
        ids = [5, 6, 7, 8]
        if samples and rng.random() < 0.7:
            other = rng.choice(samples).token_ids
            ids = other[: rng.randint(4, len(other))]
        ids = ids + [rng.randrange(2, VOCABULARY) for _ in range(rng.randint(1, 20))]
        owned = sorted(rng.sample(range(3, len(ids)), min(5, len(ids) - 3)))
        samples.append(
            make_sample(
                ids,
                owned,
                rollout_id=f"r_{index}",
                temperature=rng.choice([0.7, 1.0]),
                logprob=-rng.uniform(1.0, 5.0),
            )
        )
    return samples


def read_json(path: Path) -> dict[str, object]:
    found = json.loads(path.read_text())
    assert isinstance(found, dict)
    return found


class Attempt:
    """What a rollout sampled, to be put into a store: calls that extend one another, and a reward."""

    def __init__(self, prompt: Sequence[int], turns: Sequence[Sequence[int]], reward: float) -> None:
        self.prompt, self.turns, self.reward = list(prompt), [list(turn) for turn in turns], reward
        self.scores: dict[str, float] = {"win": reward}
        self.logprobs: list[list[float]] = [[-2.0] * len(turn) for turn in turns]
        self.version = 0
        self.temperature = 1.0
        self.observation = [3, 4]  # tokens between turns
        self.finish_reason = "stop"  # of the last turn

    def sampled_by(
        self, model: Model, adapter: Tensors | None, version: int, temperature: float
    ) -> "Attempt":
        """The logprobs that an engine serving `adapter` would have given."""
        self.version, self.temperature = version, temperature
        for turn, (prompt, sampled) in enumerate(self.calls()):
            self.logprobs[turn] = logprobs_under(model, adapter, prompt, sampled, temperature)
        return self

    def at_version(self, version: int) -> "Attempt":
        """As if that version had sampled it."""
        self.version = version
        return self

    def calls(self) -> list[tuple[list[int], list[int]]]:
        """Prompt and sampled ids of each call."""
        found, prompt = [], self.prompt
        for turn in self.turns:
            found.append((prompt, turn))
            prompt = prompt + turn + self.observation
        return found


def logprobs_under(
    model: Model, adapter: Tensors | None, prompt: list[int], sampled: list[int], temperature: float
) -> list[float]:
    """The logprob of each sampled token after the prompt and the tokens before it."""
    sample = make_sample(
        prompt + sampled, range(len(prompt), len(prompt) + len(sampled)), temperature=temperature
    )
    return scores_under(model, adapter, [sample])


def scores_under(model: Model, adapter: Tensors | None, samples: Sequence[Sample]) -> list[float]:
    """The logprobs of all owned tokens, samples in the order of their tokens."""
    with model.under(adapter):
        micros = micro_batches([Scored(sample, 0.0) for sample in samples], 9999)
        return [logprob for micro in micros for logprob in model.logprobs(micro).tolist()]


class World:
    """A store with a run, into which groups of attempts are put as control would leave them."""

    def __init__(
        self, path: Path, policy: str = "policy", run_id: str = "run", start_version: int = 0, made: int = 0
    ) -> None:
        self.path, self.policy, self.run_id = path, policy, run_id
        self.store = SqliteStore(path)
        self.store.start_run(run_id, policy, {}, start_version=start_version)
        self.made = made  # rollouts

    def add_group(
        self, attempts: Sequence[Attempt], scenario_id: str | None = None, key_id: str = "k"
    ) -> list[str]:
        """Ids of the rollouts, scored and in a closed group."""
        group_id = f"g_{self.run_id}_{self.store.group_count(self.run_id):06d}"
        members = [self._add(attempt, group_id, len(attempts), scenario_id, key_id) for attempt in attempts]
        self.store.close_group(group_id, members, {})
        return members

    def _add(self, attempt: Attempt, group_id: str, size: int, scenario_id: str | None, key_id: str) -> str:
        self.made += 1
        rollout_id = f"r_{self.made:06d}"
        self.store.open_rollout(
            Rollout(
                id=rollout_id,
                key_id=key_id,
                mode="train",
                run_id=self.run_id,
                group_id=group_id,
                scenario_id=scenario_id,
                policy=self.policy,
                policy_version=attempt.version,
            ),
            group_size=size,
        )
        for turn, (prompt, sampled) in enumerate(attempt.calls()):
            self._add_call(rollout_id, f"c_{self.made:06d}_{turn}", attempt, turn, prompt, sampled)
        self.store.seal_rollout(rollout_id, "completed")
        self.store.settle(rollout_id, graph.fates(graph.build(self.store.calls(rollout_id))))
        self.store.save_score(rollout_id, attempt.reward, attempt.scores, "script")
        return rollout_id

    def _add_call(
        self,
        rollout_id: str,
        call_id: str,
        attempt: Attempt,
        turn: int,
        prompt: list[int],
        sampled: list[int],
    ) -> None:
        raw = RawCall(
            id=call_id,
            rollout_id=rollout_id,
            key_id="k",
            mode="train",
            attribution="path",
            route=self.policy,
            upstream="engine",
            policy=self.policy,
            policy_version=attempt.version,
            started_at=float(turn),
            ended_at=turn + 0.5,
            status=200,
            request=b"{}",
            response=b"{}",
            body_hash=call_id.encode(),
        )
        self.store.commit_calls(pack([raw]), [raw], [])
        call = ModelCall(
            id=call_id,
            rollout_id=rollout_id,
            policy=self.policy,
            policy_version=attempt.version,
            started_at=raw.started_at,
            ended_at=raw.ended_at,
            status=200,
            temperature=attempt.temperature,
            prompt_ids=prompt,
            sampled_ids=sampled,
            sampled_logprobs=attempt.logprobs[turn],
            prompt_tokens=len(prompt),
            completion_tokens=len(sampled),
            finish_reason=attempt.finish_reason if turn == len(attempt.turns) - 1 else "stop",
            body_hash=raw.body_hash,
        )
        self.store.save_calls([call], {})


def random_group(rng: random.Random, size: int = 4) -> list[Attempt]:
    """Attempts at one scenario, with one to three turns and rewards that differ."""
    prompt = [5, 6, 7, rng.randrange(2, VOCABULARY)]
    return [
        Attempt(
            prompt,
            [
                [rng.randrange(2, VOCABULARY) for _ in range(rng.randint(1, 6))]
                for _ in range(rng.randint(1, 3))
            ],
            float(index % 3),
        )
        for index in range(size)
    ]
