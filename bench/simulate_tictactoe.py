"""How fast could the example learn? The real learner on moves sampled in this process.

    python bench/simulate_tictactoe.py --lr 2e-3 --groups 32 --minibatches 2 --batches 30

A game is played token-exact as the agent plays it, but only the token of a move is sampled; the rest
of a call is taken as written. A token that is no cell makes a call that cannot be read: the agent says
so, and the game goes on. Prints training rows and, every `--every` batches, the evaluation games against
each opponent at `--temperature`. The last line is JSON. What it leaves out: the tokens around a move, and
what else could go wrong in them, and the closing reply.
"""

import argparse
import json
import random
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLE = Path(__file__).parent.parent / "examples" / "tictactoe"
sys.path[:0] = [str(EXAMPLE), str(EXAMPLE.parent.parent)]

from agent import NO_CALL, TOOLS, opening  # noqa: E402
from game import Game  # noqa: E402
from reward import OUTCOMES, WEIGHTS  # noqa: E402

from capture.types import Rollout, Sample, Span  # noqa: E402
from learner.advantage import advantages  # noqa: E402
from learner.groups import Member, member  # noqa: E402
from learner.model import Model  # noqa: E402
from learner.settings import Settings  # noqa: E402
from learner.update import update  # noqa: E402

CALL = '<tool_call>\n{"name": "play", "arguments": {"cell": '
CALL_END = "}}\n</tool_call>"
ROWS = 64  # games of one forward pass
Move = tuple[int, int, float]  # position, token, logprob


class Player:
    """The policy as an engine would serve it: the base with the adapter merged."""

    def __init__(self, model: Model, base: str) -> None:
        self.model = model
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        self.network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        self.base = {name: tensor.clone() for name, tensor in self.network.state_dict().items()}
        self.cells = self.tokenizer.convert_tokens_to_ids(list("012345678"))

    @torch.no_grad()
    def merge(self) -> None:
        """Give the network the adapter's present weights (alpha = rank: scale 1)."""
        weights, adapter = self.network.state_dict(), self.model.parameters
        for name, a in adapter.items():
            if "lora_A" in name:
                target = name.replace("base_model.model.", "").replace(".lora_A", "")
                weights[target].copy_(self.base[target] + adapter[name.replace("lora_A", "lora_B")] @ a)

    def ids(self, messages: list[Any]) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            messages, tools=TOOLS, add_generation_prompt=True, tokenize=False
        )
        return list(self.tokenizer(text + CALL, add_special_tokens=False)["input_ids"])

    @torch.no_grad()
    def next_logprobs(self, prompts: list[list[int]], temperature: float) -> list[torch.Tensor]:
        found = []
        for start in range(0, len(prompts), ROWS):
            part = prompts[start : start + ROWS]
            width = max(map(len, part))
            ids = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in part])
            logits = self.network(input_ids=ids).logits / temperature  # padding stands right of everything
            found += [logits[row, len(prompt) - 1].log_softmax(-1) for row, prompt in enumerate(part)]
        return found

    def play(
        self, scenarios: list[dict[str, Any]], temperature: float = 1.0
    ) -> list[tuple[Game, list[int], list[Move]]]:
        """One game a scenario: the game, all token ids, and the moves that were sampled."""
        self.merge()
        games = [Game(seed=one["seed"], p=one["p"], x_starts=one["x_starts"]) for one in scenarios]
        talks: list[list[Any]] = [list(opening(game)) for game in games]
        prompts = [self.ids(talk) for talk in talks]
        moves: list[list[Move]] = [[] for _ in games]
        live = list(range(len(games)))
        while live:
            for index, logprobs in zip(
                live, self.next_logprobs([prompts[i] for i in live], temperature), strict=True
            ):
                token = int(torch.multinomial(logprobs.exp(), 1))
                moves[index].append((len(prompts[index]), token, float(logprobs[token])))
                prompts[index].append(token)
                talks[index] += self.turn(games[index], token)
                if not games[index].result:
                    longer = self.ids(talks[index])
                    if longer[: len(prompts[index])] != prompts[index]:  # an odd token is written as others
                        games[index].result = "loss"
                        continue
                    prompts[index] = longer
            live = [index for index in live if not games[index].result]
        return list(zip(games, prompts, moves, strict=True))

    def turn(self, game: Game, token: int) -> list[dict[str, Any]]:
        """The call with this token as its cell, and what the agent answers."""
        if token in self.cells:
            cell = self.cells.index(token)
            call = {"function": {"name": "play", "arguments": {"cell": cell}}}
            return [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": game.play(cell)},
            ]
        text = CALL + self.tokenizer.decode([token]) + CALL_END
        return [{"role": "assistant", "content": text}, {"role": "user", "content": game.error(NO_CALL)}]

    def reward(self, game: Game, moves: list[Move]) -> float:
        """As `reward.py` has it."""
        assert game.result is not None
        well_formed = sum(token in self.cells for _, token, _ in moves) / len(moves)
        return (
            OUTCOMES[game.result] + WEIGHTS["format"] * well_formed + WEIGHTS["invalid"] * (game.errors > 0)
        )


def sample_of(name: str, ids: list[int], moves: list[Move], temperature: float) -> Sample:
    mask, logprobs = [False] * len(ids), [0.0] * len(ids)
    for position, _, logprob in moves:
        mask[position], logprobs[position] = True, logprob
    spans = [Span(position, position + 1, name, 0, temperature) for position, _, _ in moves]
    return Sample(rollout_id=name, token_ids=ids, loss_mask=mask, sampled_logprobs=logprobs, spans=spans)


def grouped(
    player: Player,
    played: list[tuple[Game, list[int], list[Move]]],
    size: int,
    temperature: float,
    estimator: Any,
) -> list[list[Member]]:
    groups = []
    for start in range(0, len(played), size):
        part = played[start : start + size]
        rewards = [player.reward(game, moves) for game, _, moves in part]
        found = advantages(rewards, estimator)
        groups.append(
            [
                member(
                    Rollout(id=f"r{start + i}", key_id="bench", mode="train", reward=rewards[i]),
                    [sample_of(f"r{start + i}", ids, moves, temperature)],
                    advantage,
                )
                for i, ((_, ids, moves), advantage) in enumerate(zip(part, found, strict=True))
            ]
        )
    return groups


def tally(games: list[Game]) -> dict[str, int]:
    counts = {result: sum(game.result == result for game in games) for result in OUTCOMES}
    return counts | {"invalid": sum(game.errors > 0 for game in games)}


def scenarios(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXAMPLE / f"{name}.jsonl").read_text().splitlines()]


def evaluate(player: Player, temperature: float) -> dict[str, dict[str, int]]:
    return {
        opponent: tally([game for game, _, _ in player.play(scenarios(f"eval_{opponent}"), temperature)])
        for opponent in ("random", "optimal")
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=0, help="steps over which the learning rate rises")
    parser.add_argument("--clip", type=float, default=1.0, help="gradient norm")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--minibatches", type=int, default=1)
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--stale", type=int, default=0, help="batches between a game and its update")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--decay", action="store_true", help="learning rate falls linearly to zero")
    parser.add_argument("--targets", help="linear layers with LoRA, comma-separated; absent: all")
    parser.add_argument("--base", default=str(EXAMPLE / "base"))
    parser.add_argument(
        "--p",
        type=float,
        nargs=2,
        action="append",
        metavar=("MIN", "MAX"),
        help="other opponents in training; several ranges share the scenarios",
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="of the evaluation")
    parser.add_argument("--explore", type=float, default=1.0, help="temperature of the training games")
    parser.add_argument("--advantage", default="centred", help="or grpo, leave_one_out")
    parser.add_argument("--kl", type=float, default=0.0, help="coefficient of the KL to the base")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    settings = Settings(
        base_model=args.base,
        targets=args.targets.split(",") if args.targets else "all-linear",
        lora_rank=args.rank,
        lr=args.lr,
        minibatches=args.minibatches,
        passes=args.passes,
        lr_schedule="linear" if args.decay else "constant",
        lr_warmup_steps=args.warmup,
        clip_grad=args.clip,
        kl_coef=args.kl,
        steps_max=args.batches * args.minibatches * args.passes,
        seed=args.seed,
    )
    model = Model(settings)
    player = Player(model, settings.base_model)
    optimizer = torch.optim.AdamW(
        model.parameters.values(), lr=args.lr, betas=settings.betas, weight_decay=0.0
    )
    train = scenarios("train")
    if args.p:
        low, high = min(one["p"] for one in train), max(one["p"] for one in train)
        for one in train:
            least, most = args.p[one["seed"] // 2 % len(args.p)]
            one["p"] = least + (one["p"] - low) / (high - low) * (most - least)
    random.Random(args.seed).shuffle(train)
    steps, waiting = 0, deque[list[list[Member]]]()
    began, rows = time.monotonic(), [{"games": 0, **evaluate(player, args.temperature)}]
    print(json.dumps(rows[0]), flush=True)
    for batch in range(args.batches):
        chosen = [train[(batch * args.groups + i) % len(train)] for i in range(args.groups)]
        played = player.play([one for one in chosen for _ in range(args.size)], args.explore)
        waiting.append(grouped(player, played, args.size, args.explore, args.advantage))
        if len(waiting) <= args.stale:
            continue
        sums = update(settings, model, optimizer, waiting.popleft(), lambda: False, steps)
        steps += sums.steps
        counts = tally([game for game, _, _ in played])
        shares = "  ".join(f"{name} {count / len(played):.2f}" for name, count in counts.items())
        numbers = sums.numbers()
        measured = (
            f"entropy {numbers['entropy']:.2f}  norm {numbers['grad_norm']:.3f}  kl {numbers['kl']:.2f}"
        )
        print(f"batch {batch + 1}  {shares}  {measured}  {time.monotonic() - began:.0f} s", flush=True)
        if (batch + 1) % args.every == 0:
            rows.append({"games": (batch + 1) * len(played), **evaluate(player, args.temperature)})
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"settings": vars(args), "evaluations": rows}))


if __name__ == "__main__":
    main()
