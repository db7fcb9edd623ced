from pathlib import Path

import pytest

from capture.errors import ConfigError
from rollouts.scenarios import Deck, Scenario, content_id, epoch_order, read_scenarios


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "set.jsonl"
    path.write_text(text)
    return path


def test_ids_are_given_or_hashed(tmp_path: Path) -> None:
    path = written(tmp_path, '{"id": "a", "x": 1}\n\n{"x": 2, "y": 3}\n{"id": 7}\n')
    first, second, third = read_scenarios(path)
    assert (first.id, first.content) == ("a", {"id": "a", "x": 1})
    assert second.id == content_id({"y": 3, "x": 2})
    assert second.id.startswith("s_")
    assert third.id == "7"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"a": 1}\n{"a": \n', r"set\.jsonl:2: not JSON"),
        ('{"a": 1}\n\n[1]\n', r"set\.jsonl:3: a scenario is a JSON object, this is a list"),
        ('{"id": ""}\n', r"set\.jsonl:1: `id` must be"),
        ('{"id": "a"}\n{"id": "a"}\n', "number 2 repeats the id 'a'"),
        ("\n", "has none"),
    ],
)
def test_a_bad_set_names_the_place(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        read_scenarios(written(tmp_path, text))


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_scenarios(tmp_path / "none.jsonl")


def plain(count: int) -> list[Scenario]:
    return [Scenario(f"{number:03d}", {}) for number in range(count)]


def test_order_is_a_function_of_ids_seed_and_epoch() -> None:
    order = epoch_order(plain(50), seed=42, epoch=0)
    assert order == epoch_order(plain(50)[::-1], seed=42, epoch=0)
    assert sorted(order, key=lambda one: one.id) == plain(50)
    assert order != epoch_order(plain(50), seed=42, epoch=1)
    assert order != epoch_order(plain(50), seed=43, epoch=0)


def test_strata_take_turns() -> None:
    easy = [Scenario(f"e{number}", {"stratum": "easy"}) for number in range(4)]
    hard = [Scenario(f"h{number}", {"stratum": "hard"}) for number in range(2)]
    order = epoch_order(easy + hard, seed=1, epoch=0)
    assert [scenario.stratum for scenario in order] == ["easy", "hard", "easy", "hard", "easy", "easy"]


def test_the_deck_deals_every_scenario_once_an_epoch() -> None:
    deck = Deck(plain(5), seed=42, epochs=2)
    dealt = [deck.draw(ordinal).id for ordinal in range(10)]
    assert sorted(dealt[:5]) == sorted(dealt[5:]) == [one.id for one in plain(5)]
    assert deck.draw(3).id == dealt[3]  # going back gives the same again
    with pytest.raises(IndexError):
        deck.draw(10)
