"""Make the base model of the example: a small Qwen3 that knows the form of the game, not the game.

    python make_base.py

It learns from transcripts of random legal play, so it calls the tool and mostly takes free cells,
without any idea which, and has never seen an error. Like any language model it learns to expect the
whole text, boards and verdicts included: it has seen lines being completed, but never a player who
preferred that. Everything follows from `SEED`; takes minutes on one core and writes `base/`.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from agent import TOOLS, opening
from game import Game, legal_moves
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
SEED = 7
VOCABULARY_MAX = 512
TRANSCRIPTS_FOR_TOKENIZER = 2000
STEPS = 1600
BATCH = 16
BATCHES_SORTED = 16  # drawn at once and sorted by length, against padding
PEAK_LR = 2e-3
SMOOTHING = 0.2  # label smoothing of moves over the nine cells: it doubts what it knows of legality
TAGS = ("<tool_call>", "</tool_call>")
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PIECES = r"[0-9XO]|\n|[^0-9XO\n]+"  # cells stay single tokens wherever they stand
HEADER = 3  # tokens before a message's content: start, role, newline

Message = dict[str, Any]


@dataclass(frozen=True)
class Transcript:
    """A conversation; for each message the moves it may make, () if it makes none."""

    messages: list[Message]
    targets: list[tuple[int, ...]]


@dataclass(frozen=True)
class Batch:
    """Padded conversations and what the model should say in them.

    `ids` is [BATCH, longest]. The goals are parallel [n]: the logits at `rows, positions` should
    favour `tokens`, each as much as its share in `weights`.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    tokens: torch.Tensor
    weights: torch.Tensor


Goal = tuple[int, int, float]


def tool_call(cell: int) -> Message:
    """An assistant's reply that plays `cell`."""
    call = {"name": "play", "arguments": {"cell": cell}}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}


def transcript(rng: random.Random) -> Transcript:
    """One game of random legal moves against an opponent of random strength."""
    game = Game(seed=rng.getrandbits(32), p=rng.random(), x_starts=rng.random() < 0.5)
    messages: list[Message] = [dict(message) for message in opening(game)]
    targets: list[tuple[int, ...]] = [(), ()]
    while not game.result:
        moves = legal_moves(game.board)
        cell = rng.choice(moves)
        messages += [tool_call(cell), {"role": "tool", "content": game.play(cell)}]
        targets += [moves, ()]
    return Transcript([*messages, {"role": "assistant", "content": "Done."}], [*targets, ()])


def make_tokenizer(rng: random.Random) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on rendered transcripts, with the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    fast = wrap(tokenizer)
    texts = (render(fast, transcript(rng).messages) for _ in range(TRANSCRIPTS_FOR_TOKENIZER))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_MAX - len(TAGS),
        special_tokens=list(CONTROLS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((without_markers(text) for text in texts), trainer)
    # Special tokens are cut from what an engine returns; the tool parser must see the tags.
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return wrap(tokenizer)


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers loads and saves it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=(HERE / "chat_template.jinja").read_text(),
        clean_up_tokenization_spaces=False,
    )


def without_markers(text: str) -> str:
    """The text without tags and controls, which are tokens of their own and take no merges."""
    for marker in (*TAGS, *CONTROLS):
        text = text.replace(marker, "\n")
    return text


def render(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> str:
    """The messages as the model reads them."""
    return str(tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False))


def encode(tokenizer: PreTrainedTokenizerFast, item: Transcript) -> tuple[list[int], list[Goal]]:
    """Token ids, and goals for the tokens of every message.

    A goal is the position of the logits, a token, its weight. A move shares its weight with the
    other legal ones (the mean over all transcripts, without their noise) and, smoothed, with all
    cells. A message's start and the newline after its end belong to the template: no goals.
    """
    ids = tokenizer.encode(render(tokenizer, item.messages), add_special_tokens=False)
    digits = tokenizer.convert_tokens_to_ids(list("012345678"))
    opens = tokenizer.convert_tokens_to_ids("<|im_start|>")
    starts = [position for position, token in enumerate(ids) if token == opens]
    goals: list[Goal] = []
    for start, end, moves in zip(starts, [*starts[1:], len(ids)], item.targets, strict=True):
        for position in range(start + HEADER, end - 1):
            token = ids[position]
            if moves and token in digits:
                shares = move_shares(moves)
                goals += [(position - 1, digits[cell], share) for cell, share in shares.items()]
            else:
                goals.append((position - 1, token, 1.0))
    return ids, goals


def move_shares(moves: Sequence[int]) -> dict[int, float]:
    """The target of a move: uniform over the legal cells, smoothed over all of them."""
    doubt = SMOOTHING / 9
    return {cell: doubt + (1 - SMOOTHING) / len(moves) * (cell in moves) for cell in range(9)}


def batches(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Iterator[Batch]:
    """Endless batches of conversations of similar lengths."""
    while True:
        items = [encode(tokenizer, transcript(rng)) for _ in range(BATCH * BATCHES_SORTED)]
        items.sort(key=lambda item: len(item[0]))
        for index in rng.sample(range(BATCHES_SORTED), BATCHES_SORTED):
            yield collate(items[index * BATCH : (index + 1) * BATCH], tokenizer.pad_token_id)


def collate(items: Sequence[tuple[list[int], list[Goal]]], pad: int) -> Batch:
    """One batch of encoded conversations, padded on the right."""
    longest = max(len(ids) for ids, _ in items)
    goals = [(row, *goal) for row, (_, goals) in enumerate(items) for goal in goals]
    rows, positions, tokens, weights = (torch.tensor(column) for column in zip(*goals, strict=True))
    ids = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in items])
    return Batch(ids, rows, positions, tokens, weights)


def cross_entropy(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy of the goals under `logits` [BATCH, longest, vocabulary]."""
    logprobs = logits[batch.rows, batch.positions].log_softmax(-1)
    chosen = logprobs.gather(1, batch.tokens[:, None])[:, 0]
    return -(batch.weights * chosen).sum() / batch.weights.sum()


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """An untrained Qwen3 of 0.84 M parameters."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
    """AdamW, one cycle."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=STEPS)
    started = time.monotonic()
    for step, batch in zip(range(1, STEPS + 1), batches(tokenizer, rng), strict=False):
        # Padding stands right of everything, so causal attention alone hides it.
        loss = cross_entropy(model(input_ids=batch.ids).logits, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            elapsed = time.monotonic() - started
            print(f"step {step}/{STEPS} loss {loss.item():.3f} {elapsed:.0f} s", flush=True)


def main() -> None:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    rng = random.Random(SEED)
    tokenizer = make_tokenizer(rng)
    model = make_model(tokenizer)
    train(model, tokenizer, rng)
    model.save_pretrained(HERE / "base")
    tokenizer.save_pretrained(HERE / "base")


if __name__ == "__main__":
    main()
