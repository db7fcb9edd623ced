"""The tic-tac-toe example: rules, agent, reward and base model. Needs no engine."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "tictactoe"
BASE = EXAMPLE / "base"
sys.path.insert(0, str(EXAMPLE))

import agent  # noqa: E402
import game  # noqa: E402
import reward  # noqa: E402
from openai import OpenAI  # noqa: E402

SCENARIO = {"id": "test", "seed": 3, "p": 0.0, "x_starts": True}


def new_game(*, seed: int = 3, p: float = 0.0, x_starts: bool = True) -> game.Game:
    return game.Game(seed=seed, p=p, x_starts=x_starts)


def read_scenarios(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXAMPLE / f"{name}.jsonl").read_text().splitlines()]


def call_turn(cell: object) -> dict[str, Any]:
    call = {"name": "play", "arguments": {"cell": cell}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def trace_of(*turns: dict[str, Any], scenario: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"scenario": scenario or SCENARIO, "turns": list(turns)}


def total(scores: dict[str, float]) -> float:
    return sum(reward.WEIGHTS[name] * score for name, score in scores.items())


def winning_cells(scenario: dict[str, Any]) -> list[int]:
    """Moves that win the scenario, by search over X's choices."""
    fields = {key: scenario[key] for key in ("seed", "p", "x_starts")}

    def search(cells: list[int]) -> list[int] | None:
        trial = game.Game(**fields)
        for cell in cells:
            trial.play(cell)
        if trial.result:
            return cells if trial.result == "win" else None
        found = (search([*cells, cell]) for cell in game.legal_moves(trial.board))
        return next(filter(None, found), None)

    cells = search([])
    assert cells is not None
    return cells


# Rules


def test_winner_finds_rows_columns_and_diagonals() -> None:
    assert game.winner("XXX.O.O..") == "X"
    assert game.winner("OX.OX.O.X") == "O"
    assert game.winner("X.O.O.OXX") == "O"
    assert game.winner("XOXXOOOXX") is None


def test_minimax_takes_the_win_then_the_block() -> None:
    assert game.best_moves("OO.XX....", "O") == (2,)
    assert game.best_moves("X...X.O..", "O") == (8,)


def test_minimax_keeps_all_equally_good_moves() -> None:
    assert game.best_moves("....X....", "O") == (0, 2, 6, 8)
    assert game.best_moves("X........", "O") == (4,)
    assert game.best_moves(game.EMPTY, "X") == tuple(range(9))


def test_opponent_is_a_function_of_seed_and_board() -> None:
    board = "....X...."
    for p in (0.0, 0.5, 1.0):
        assert len({game.opponent_move(board, 5, p) for _ in range(5)}) == 1
    assert {game.opponent_move(board, seed, 0.0) for seed in range(60)} == {0, 2, 6, 8}
    random_moves = {game.opponent_move(board, seed, 1.0) for seed in range(200)}
    assert random_moves == {0, 1, 2, 3, 5, 6, 7, 8}


def test_opponent_replies_are_the_same_on_every_machine() -> None:
    assert [game.opponent_move("....X....", seed, 0.0) for seed in range(6)] == [0, 6, 0, 0, 8, 8]


def test_share_of_random_moves_is_p() -> None:
    board = "OO.XX...."  # one minimax move among five: a random move finds it once in five
    best = sum(game.opponent_move(board, seed, 0.5) == 2 for seed in range(2000))
    assert best / 2000 == pytest.approx(0.5 + 0.5 / 5, abs=0.04)


def test_opponent_opens_where_x_does_not_start() -> None:
    assert new_game(x_starts=True).board.count("O") == 0
    assert new_game(x_starts=False).board.count("O") == 1


def test_free_cells_show_their_number() -> None:
    assert game.show("X.O.X...O") == "X1O\n3X5\n67O"


def test_a_move_is_answered_with_the_board_after_the_reply() -> None:
    board = game.place(game.place(game.EMPTY, 4, "X"), game.opponent_move("....X....", 3, 0.0), "O")
    assert new_game().play(4) == game.show(board)


def test_a_won_game_says_so_and_is_over() -> None:
    played = new_game(p=1.0)
    cells = winning_cells({"seed": 3, "p": 1.0, "x_starts": True})
    answers = [played.play(cell) for cell in cells]
    assert answers[-1].endswith("\nYou win.")
    assert played.result == "win"
    assert played.play(0) == "The game is over."
    assert played.call("sing", None) == "The game is over."
    assert played.errors == 0


def test_perfect_play_draws_against_minimax() -> None:
    played = new_game()
    while not played.result:
        played.play(game.best_moves(played.board, "X")[0])
    assert played.result == "draw"
    assert played.view().endswith("\nDraw.")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("play", {"cell": 9}),
        ("play", {"cell": -1}),
        ("play", {"cell": "4"}),
        ("play", {"cell": 4.0}),
        ("play", {"cell": True}),
        ("play", {"cell": 4, "mark": "X"}),
        ("play", {}),
        ("play", [4]),
        ("play", "{cell: 4"),
        ("play", None),
        ("move", {"cell": 4}),
    ],
)
def test_a_bad_call_is_an_error_and_the_game_goes_on(name: str, arguments: object) -> None:
    played = new_game()
    played.call(name, arguments)
    assert (played.errors, played.board, played.result) == (1, game.EMPTY, None)


def test_an_occupied_cell_is_an_error() -> None:
    played = new_game()
    played.play(4)
    board = played.board
    assert played.play(4) == f"Illegal move.\n{game.show(board)}"
    assert (played.errors, played.board) == (1, board)


def test_the_third_error_loses() -> None:
    played = new_game()
    played.call("play", {"cell": 9})
    played.error("No call.")
    assert played.result is None
    assert played.call("sing", {}).endswith("\nYou lose.")
    assert (played.errors, played.result) == (3, "loss")


# Reward


def test_a_won_game_earns_outcome_and_format() -> None:
    scenario = {**SCENARIO, "p": 1.0}
    turns = [call_turn(cell) for cell in winning_cells(scenario)]
    scores = reward.reward(trace_of(*turns, {"role": "assistant", "content": "Done."}, scenario=scenario))
    assert scores == {
        "outcome": 1.0,
        "format": 1.0,
        "invalid": 0.0,
        "win": 1.0,
        "draw": 0.0,
        "loss": 0.0,
    }
    assert total(scores) == pytest.approx(1.2)


def test_the_agents_and_the_tools_claims_count_for_nothing() -> None:
    trace = trace_of(
        call_turn(4),
        {"role": "tool", "content": "XXX\n...\n...\nYou win."},
        {"role": "assistant", "content": "I won."},
    )
    trace |= {"stdout": '{"result": "win", "errors": 0}', "metrics": {"win": 1}}
    scores = reward.reward(trace)
    assert (scores["win"], scores["loss"], scores["outcome"]) == (0.0, 1.0, 0.0)
    assert scores["format"] == 0.5  # the closing reply came while the game ran
    assert scores["invalid"] == 1.0


def test_an_unfinished_game_is_lost() -> None:
    scores = reward.reward(trace_of(call_turn(4)))
    assert (scores["outcome"], scores["loss"], scores["invalid"]) == (0.0, 1.0, 0.0)
    assert total(scores) == pytest.approx(0.2)


def test_a_rollout_without_calls_earns_nothing() -> None:
    scores = reward.reward(trace_of())
    assert (scores["loss"], scores["format"], total(scores)) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("arguments", [None, '{"cell": ', [4], {"cell": "4"}])
def test_malformed_arguments_cost_format_and_validity(arguments: object) -> None:
    bad = {"role": "assistant", "tool_calls": [{"name": "play", "arguments": arguments}]}
    scores = reward.reward(trace_of(bad, call_turn(4)))
    assert (scores["format"], scores["invalid"]) == (0.5, 1.0)
    assert total(scores) == pytest.approx(0.2 * 0.5 - 0.1)


def test_an_illegal_move_is_well_formed_but_invalid() -> None:
    scores = reward.reward(trace_of(call_turn(4), call_turn(4)))
    assert (scores["format"], scores["invalid"]) == (1.0, 1.0)


def test_calls_of_one_reply_are_played_in_order() -> None:
    scenario = {**SCENARIO, "p": 1.0}
    cells = winning_cells(scenario)
    calls = [{"name": "play", "arguments": {"cell": cell}} for cell in cells]
    scores = reward.reward(trace_of({"role": "assistant", "tool_calls": calls}, scenario=scenario))
    assert scores["win"] == 1.0


# Scenarios


def test_scenario_sets_are_disjoint() -> None:
    sets = [read_scenarios(name) for name in ("train", "eval_random", "eval_optimal")]
    everything = [scenario for scenarios in sets for scenario in scenarios]
    assert len({scenario["seed"] for scenario in everything}) == len(everything)
    assert len({scenario["id"] for scenario in everything}) == len(everything)


def test_training_scenarios_are_stratified() -> None:
    train = read_scenarios("train")
    for start in range(0, len(train), 32):
        batch = train[start : start + 32]
        assert sum(scenario["x_starts"] for scenario in batch) == 16
        assert sum(scenario["p"] for scenario in batch) / 32 == pytest.approx(0.5, abs=0.05)
        assert all(0.1 <= scenario["p"] <= 0.9 for scenario in batch)


@pytest.mark.parametrize(("name", "p"), [("eval_random", 1.0), ("eval_optimal", 0.0)])
def test_evaluation_sets(name: str, p: float) -> None:
    scenarios = read_scenarios(name)
    assert len(scenarios) >= 200
    assert {scenario["p"] for scenario in scenarios} == {p}
    assert sum(scenario["x_starts"] for scenario in scenarios) * 2 == len(scenarios)


# Agent


class Scripted(BaseHTTPRequestHandler):
    """Answers chat completions with the server's replies, in order, and keeps the requests."""

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        self.server.requests.append(json.loads(self.rfile.read(length)))
        message = self.server.replies.pop(0)
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        body = {"id": "c", "object": "chat.completion", "created": 0, "model": "policy"}
        data = json.dumps({**body, "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Keep test output quiet."""


@pytest.fixture
def upstream() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    server.requests, server.replies = [], []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def reply(*arguments: str, name: str = "play") -> dict[str, Any]:
    calls = [
        {"id": f"call-{index}", "type": "function", "function": {"name": name, "arguments": text}}
        for index, text in enumerate(arguments)
    ]
    return {"role": "assistant", "content": None if calls else "Done.", "tool_calls": calls}


def play(upstream: Any, scenario: dict[str, Any]) -> game.Game:
    url = f"http://127.0.0.1:{upstream.server_port}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        return agent.play_game(client, "policy", scenario)


def test_the_agent_plays_until_the_model_stops_calling(upstream: Any) -> None:
    scenario = {**SCENARIO, "p": 1.0}
    cells = winning_cells(scenario)
    upstream.replies = [*(reply(json.dumps({"cell": cell})) for cell in cells), reply()]
    played = play(upstream, scenario)
    assert (played.result, played.errors) == ("win", 0)
    last = upstream.requests[-1]
    assert last["messages"][-1]["role"] == "tool"
    assert last["messages"][-1]["content"].endswith("You win.")
    assert not {"tool_choice", "temperature"} & set(last)


def test_the_agent_answers_mistakes_and_goes_on(upstream: Any) -> None:
    upstream.replies = [reply(), reply('{"cell": '), reply('{"cell": 4}', '{"cell": 4}'), reply()]
    played = play(upstream, SCENARIO)
    assert (played.result, played.errors) == ("loss", 3)
    sent = upstream.requests[-1]["messages"]
    assert [message["role"] for message in sent] == [
        *("system", "user", "assistant", "user", "assistant", "tool"),
        *("assistant", "tool", "tool"),
    ]
    assert sent[3]["content"].startswith("No call.")
    assert sent[5]["content"].startswith("Malformed call.")
    assert "tool_calls" not in sent[2]


def test_the_agent_stops_at_its_cap(upstream: Any) -> None:
    upstream.replies = [reply('{"cell": 4}')] * 20
    assert play(upstream, SCENARIO).result == "loss"
    assert len(upstream.requests) == agent.CALLS_MAX


def test_reward_agrees_with_the_agents_game(upstream: Any) -> None:
    upstream.replies = [reply('{"cell": 4}'), reply(), reply('{"cell": 4}'), reply("4"), reply()]
    played = play(upstream, SCENARIO)
    turns = [agent_turn(message) for message in upstream.requests[-1]["messages"]]
    scores = reward.reward(trace_of(*turns))
    assert scores["loss"] == float(played.result == "loss") == 1.0
    assert scores["format"] == 0.5
    assert scores["invalid"] == 1.0


def agent_turn(message: dict[str, Any]) -> dict[str, Any]:
    """A message of the wire as a turn of a trace."""
    calls = [
        {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
        for call in message.get("tool_calls", [])
    ]
    return {**message, "tool_calls": calls}


# Base model


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(BASE)


def prompt(tokenizer: Any, messages: list[Any]) -> list[int]:
    text = tokenizer.apply_chat_template(
        messages, tools=agent.TOOLS, add_generation_prompt=True, tokenize=False
    )
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


@pytest.mark.parametrize("parsed", [False, True])
def test_prompts_extend_what_was_sampled(tokenizer: Any, parsed: bool) -> None:
    """Arguments come back as text from clients and as objects from an engine that parsed them."""
    played = new_game()
    messages: list[Any] = list(agent.opening(played))
    for cell in (4, 4, 0, 8):
        before = prompt(tokenizer, messages)
        text = f'<tool_call>\n{{"name": "play", "arguments": {{"cell": {cell}}}}}\n</tool_call>'
        sampled = tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
        arguments = {"cell": cell} if parsed else json.dumps({"cell": cell})
        call = {"type": "function", "function": {"name": "play", "arguments": arguments}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": played.play(cell)})
        after = prompt(tokenizer, messages)
        assert after[: len(before) + len(sampled)] == before + sampled
        assert tokenizer.decode(after[len(before) + len(sampled)]) == "\n"


def test_prompts_extend_a_reply_without_call(tokenizer: Any) -> None:
    played = new_game()
    messages: list[Any] = list(agent.opening(played))
    before = prompt(tokenizer, messages)
    sampled = tokenizer.encode("Done.<|im_end|>", add_special_tokens=False)
    messages.append({"role": "assistant", "content": "Done."})
    messages.append({"role": "user", "content": played.error(agent.NO_CALL)})
    assert prompt(tokenizer, messages)[: len(before) + len(sampled)] == before + sampled


def test_tags_survive_decoding(tokenizer: Any) -> None:
    ids = tokenizer.encode("<tool_call></tool_call><|im_end|>", add_special_tokens=False)
    assert len(ids) == 3
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call></tool_call>"
    assert ids[2] == tokenizer.eos_token_id


def test_tokens_of_boards_and_calls(tokenizer: Any) -> None:
    assert len(tokenizer.encode("X1O\n3X5\n67O", add_special_tokens=False)) == 11
    call = '<tool_call>\n{"name": "play", "arguments": {"cell": 3}}\n</tool_call><|im_end|>'
    assert len(tokenizer.encode(call, add_special_tokens=False)) == 8


def test_tokenizer_keeps_any_text(tokenizer: Any) -> None:
    text = "Grüße, 世界\n\tX"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_base_model_is_small() -> None:
    assert sum(path.stat().st_size for path in BASE.rglob("*")) <= 6_000_000
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        path.name for path in BASE.iterdir()
    }
