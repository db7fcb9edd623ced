"""`hone rollouts show` and `explain` as their users meet them: the conversation, each token, JSON."""

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from capture_makers import request, response
from explain_world import World
from rich.console import Console
from rich.text import Text

from capture.sqlite import SqliteStore
from hone.cli.main import main
from hone.cli.rollouts import call_numbers
from hone.explain.conversation import turns
from hone.explain.explanation import explain
from hone.explain.look import look
from hone.explain.screen import clean, explained, runs
from hone.explain.tokenizer import no_text, token_texts
from hone.explain.transcript import conversation

SYSTEM = {"role": "system", "content": "Play."}
GO = {"role": "user", "content": "go\nnow"}
HI = {"role": "assistant", "content": "hi"}
MORE = {"role": "user", "content": "more"}
BASE = Path(__file__).parent.parent / "examples" / "tictactoe" / "base"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def world(tmp_path: Path) -> World:
    """`r_a` trained: two calls, the second re-tokenised, the third with a grammar. `r_b` its like."""
    world = World(SqliteStore(tmp_path / "hone.db"), policy={"base_model": str(BASE)})
    world.open("r_a")
    world.call("r_a", [1, 2], [3, 4], request=request([SYSTEM, GO]))
    world.call("r_a", [1, 2, 9, 5], [6], request=request([SYSTEM, GO, HI, MORE]))
    world.call(
        "r_a",
        [1, 2, 9, 5, 6, 7],
        [8],
        request=request([SYSTEM, GO, HI, MORE, HI, GO], tool_choice="required"),
    )
    world.finish("r_a")
    world.ingest()
    world.score("r_a", 1.0)
    world.played("r_b", 0.0)
    world.group()
    world.train()
    return world


@pytest.fixture
def hone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """`hone rollouts ...` on the store of the world: exit status, stdout, stderr."""
    config = tmp_path / "hone.toml"
    config.write_text(f'[policy]\nbase_model = "{BASE}"\n[capture]\npath = "{tmp_path}/hone.db"\n')

    def run(*words: str) -> tuple[int, str, str]:
        status = main(["rollouts", *words, "-c", str(config)])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


def test_explain_says_the_sentence_first_and_then_what_it_rests_on(world: World, hone: Run) -> None:
    status, out, err = hone("explain", "r_a")
    assert (status, err) == (0, "")
    batch = world.store.rollout("r_a").batch_id
    lines = out.splitlines()
    assert lines[:2] == [
        f"Trained: 3 of 4 sampled tokens in batch {batch} (step 1, which made v1), advantage +0.5; 1 token "
        "of call 3 (grammar) was not: a grammar (forced tool choice, response format, structured output) "
        "masked the sampling (sampling.grammar = honour).",
        'The setting to look at: sampling.grammar, which is "honour".',
    ]
    assert lines[3:8] == [
        "r_a: train, trained, completed, v0, run run1, 3 calls",
        "  reward     1  (reward 1)",
        "  group      g_1, trained, 2 attempts, advantage +0.5",
        "  staleness  0 versions",
        "  tokens     4 sampled = 3 trained + 1 grammar",
    ]
    assert lines[lines.index("calls") + 1 :] == [
        "       1  c_r_a_1  begins a conversation  2 tokens v0 trained",
        "       2  c_r_a_2  new branch (retokenised)  1 token v0 trained",
        "       3  c_r_a_3  continues 2  1 token v0 grammar",
        "",
        "  retokenised: It goes on with the same messages, but their tokens are not the sampled ones.",
        "  grammar: A grammar (forced tool choice, response format, structured output) masked the sampling.",
    ]


def test_show_prints_of_each_call_what_was_new(world: World, hone: Run) -> None:
    status, out, _ = hone("show", "c_r_a_2")
    assert status == 0
    lines = out.splitlines()
    assert lines[0].startswith("Trained: 3 of 4 sampled tokens")
    assert lines[lines.index("") + 1 :] == [
        "── call 1  c_r_a_1  begins a conversation  v0  2 tokens  trained",
        "  [system] Play.",
        "  [user] go",
        "    now",
        "  [assistant] hi",
        "",
        "── call 2  c_r_a_2  new branch (retokenised)  v0  1 token  trained",
        "  (3 messages as in call 1)",
        "  [user] more",
        "  [assistant] hi",
        "",
        "── call 3  c_r_a_3  continues 2  v0  1 token  grammar",
        "  (5 messages as in call 2)",
        "  [user] go",
        "    now",
        "  [assistant] hi",
    ]


def test_show_prints_each_token(world: World, hone: Run) -> None:
    out = hone("show", "r_a", "--tokens", "--calls", "2-3", "--chars", "2")[1]
    assert "[user] mo … (2 more characters: --chars 0)" in out
    assert "2 of 3 calls shown; --calls 1- shows all, --calls 7-12 some of them." in out
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit() and '"' in line]
    assert [row[:6] for row in rows] == [
        ["6", "-0.7500", "1", "v0", "2/2", "+0.5"],  # call 2 in sample 2; token i has logprob -i/8
        ["8", "-1.0000", "0", "v0", "-", "-"],  # no loss, so no owner and no advantage
    ]


def test_json_has_it_all(world: World, hone: Run) -> None:
    shown = json.loads(hone("show", "r_a", "--json", "--tokens")[1])
    assert shown["explanation"] == json.loads(hone("explain", "r_a", "--json")[1])
    assert "secret_hash" not in shown["rollout"]
    first, second, third = shown["calls"]
    assert [one["call"]["fork"] for one in shown["calls"]] == ["root", "retokenised", None]
    assert (third["call"]["parent"], third["like"], third["like_messages"]) == (2, 2, 5)
    assert (first["messages"], second["messages"], third["messages"]) == ([SYSTEM, GO], [MORE], [GO])
    assert first["tokens"][0] == {
        "id": 3,
        "text": "!",
        "logprob": -0.375,
        "mask": 1,
        "version": 0,
        "owner": "c_r_a_1",
        "branch": 1,
        "advantage": 0.5,
    }
    assert {key: third["tokens"][0][key] for key in ("mask", "owner", "branch", "advantage")} == {
        "mask": 0,
        "owner": None,
        "branch": None,
        "advantage": None,
    }
    assert shown["explanation"]["reasons"].keys() == {"root", "retokenised", "grammar"}


def test_a_call_that_was_not_read_yet_is_shown(world: World, hone: Run) -> None:
    world.open("r_c", "g_2")
    world.call("r_c", [1, 2], [3, 4])
    assert hone("show", "r_c")[1].splitlines()[-1] == "  c_r_c_1  not read yet (status 200)"
    assert json.loads(hone("show", "r_c", "--json")[1])["waiting"][0]["id"] == "c_r_c_1"


def test_a_rollout_that_is_not_there_is_one_clear_line(world: World, hone: Run) -> None:
    for verb in ("show", "explain"):
        assert hone(verb, "r_zzz") == (1, "", "hone rollouts: no rollout or call 'r_zzz'\n")
        assert hone(verb, "r_", "--json") == (
            1,
            "",
            "hone rollouts: r_ could be r_a, r_b: give more of the id\n",
        )


def test_a_store_that_is_not_there_is_one_clear_line(tmp_path: Path, hone: Run) -> None:
    status, out, err = hone("explain", "r_a")
    assert (status, out) == (1, "")
    assert err == f"hone rollouts: no store at {tmp_path}/hone.db: nothing has run with these settings yet\n"


# -- screens ---------------------------------------------------------------------------------------


def coloured(lines: list[Text]) -> str:
    console = Console(file=StringIO(), force_terminal=True, color_system="standard", width=200)
    console.print(Text("\n").join(lines), soft_wrap=True)
    out = console.file
    assert isinstance(out, StringIO)
    return out.getvalue()


def test_the_colour_of_an_answer_is_that_of_its_tokens_fate(world: World) -> None:
    facts, calls = look(world.store, "r_a", world.settings)
    shown = list(conversation(turns(calls, facts.calls, numbers=range(1, 4)), chars_max=0, tokens=False))
    answers = [line for line in coloured(shown).splitlines() if "assistant" in line]
    green, red = (f"\x1b[{code}m  [assistant] \x1b[0m\x1b[{code}mhi\x1b[0m" for code in (32, 31))
    assert answers == [green, green, red]  # trained, trained, grammar
    sentence = coloured(list(explained(explain(facts)))).splitlines()[0]
    assert sentence.startswith("\x1b[1;32mTrained: ")


def test_what_a_model_says_cannot_drive_the_terminal(world: World) -> None:
    evil = "\x1b]0;owned\x07\x9b31m red [bold]not markup[/bold]"
    world.open("r_c", "g_2")
    world.call("r_c", [1, 2], [3, 4], request=request([GO]), response=response([1, 2], [3, 4], evil))
    world.ingest()
    facts, calls = look(world.store, "r_c", world.settings)
    shown = coloured(
        list(conversation(turns(calls, facts.calls, numbers=range(1, 9)), chars_max=0, tokens=False))
    )
    assert r"\x1b]0;owned\x07\x9b31m red [bold]not markup[/bold]" in shown
    assert "\x1b]" not in shown
    assert clean("a\tb\nc\r") == "a\tb\nc\\x0d"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"role": "assistant", "content": None}, "  [assistant] "),
        ({"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}, None),
        (
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "play", "arguments": '{"cell": 3}'}}, "odd"],
            },
            '  [assistant] → play({"cell": 3})\n  [assistant] → "odd"',
        ),
        (
            {"role": "assistant", "content": "yes", "reasoning_content": "hm"},
            "  [assistant] (reasoning) hm\n  [assistant] yes",
        ),
        ({"content": {"odd": 1}}, '  [?] {"odd":1}'),
    ],
)
def test_messages_of_every_shape(world: World, message: dict[str, Any], shown: str | None) -> None:
    world.open("r_c", "g_2")
    world.call("r_c", [1, 2], [3, 4], request=request([message]))
    world.ingest()
    facts, calls = look(world.store, "r_c", world.settings)
    lines = list(conversation(turns(calls, facts.calls, numbers=range(1, 2)), chars_max=0, tokens=False))
    text = "\n".join(line.plain for line in lines[2:-1])  # between the head of the call and its answer
    assert text == (shown or "  [tool] a\n    <image_url>")


@pytest.mark.parametrize(("text", "numbers"), [("7", [7]), ("7-9", [7, 8, 9]), ("0", [0]), ("9-7", [])])
def test_numbers_of_calls(text: str, numbers: list[int]) -> None:
    assert list(call_numbers(text)) == numbers


def test_a_long_conversation_is_one_line_of_calls(world: World) -> None:
    world.open("r_c", "g_2")
    prompt = [1]
    for turn in range(30):
        version = 0 if turn < 20 else 1  # never in one rollout; it would break the line if it were
        world.call("r_c", prompt, [7, 8], policy_version=version)
        prompt = [*prompt, 7, 8, 9]
    world.ingest()
    facts, calls = look(world.store, "r_c", world.settings)
    assert [[run[0].number, run[-1].number] for run in runs(facts.calls)] == [[1, 20], [21, 30]]
    assert len(calls) == 30
    assert explain(facts).tokens.pending == 60


def test_texts_of_tokens() -> None:
    texts = token_texts(str(BASE), [3, 3, 4])
    assert texts is not None
    assert [texts(3), texts(4)] == ["!", '"']
    assert token_texts(str(BASE), [3, 10**6]) is None  # another model's tokens
    assert token_texts("no/such-model", [3]) is None
    assert token_texts("", []) is None
    assert no_text(3) is None


def test_tokens_of_another_model_are_shown_without_texts(world: World, hone: Run) -> None:
    world.open("r_c", "g_2")
    world.call("r_c", [1, 2], [3, 600])  # the example has 512 tokens
    world.ingest()
    *_, row, last, _, said = hone("show", "r_c", "--tokens")[1].splitlines()
    assert row.split() == ["3", "-0.3750", "1", "v0", "1/1", "-"]
    assert last.split()[:2] == ["600", "-75.0000"]
    assert said == f"The tokenizer of these tokens ({BASE}) is not here."
