"""The script's hash and the weighted sum."""

from pathlib import Path

import pytest

from capture.errors import ConfigError
from rewards.script import Scored, combine, digest, sources


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "reward.py"


def test_the_hash_covers_neighbours_and_nothing_else(tmp_path: Path) -> None:
    files = {
        "reward.py": "import json\nfrom game import Game\ndef reward(t):\n    from tools.late import x\n",
        "game.py": "import board\nclass Game: ...\n",
        "board.py": "",
        "tools/__init__.py": "",
        "tools/late.py": "from . import helper\nfrom .deep.er import y\n",
        "tools/helper.py": "",
        "tools/deep/__init__.py": "",
        "tools/deep/er.py": "from ... import nothing\nfrom ..other import z\n",
        "tools/other.py": "",
        "unused.py": "",
    }
    script = write(tmp_path, files)
    names = {path.relative_to(tmp_path).as_posix() for path in sources(script)}
    assert names == files.keys() - {"unused.py"}
    before = digest(script)
    (tmp_path / "unused.py").write_text("x = 1")
    assert digest(script) == before
    (tmp_path / "tools/other.py").write_text("z = 2")
    assert digest(script) != before


def test_the_hash_does_not_depend_on_where_the_script_lies(tmp_path: Path) -> None:
    for place in ("one", "two"):
        write(tmp_path / place, {"reward.py": "import game", "game.py": "x = 1"})
    assert digest(tmp_path / "one/reward.py") == digest(tmp_path / "two/reward.py")


def test_a_script_that_does_not_parse_still_has_a_hash(tmp_path: Path) -> None:
    assert len(digest(write(tmp_path, {"reward.py": "def ("}))) == 64


def test_a_missing_script_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rewards\.script"):
        digest(tmp_path / "reward.py")


def test_weighted_sum() -> None:
    scored = Scored({"outcome": 0.5, "format": 1.0, "note": 7.0}, {"format": 0.2, "note": 0.0}, "h")
    reward, scores = combine(scored, {"thumbs": 1.0, "format": 9.0}, {"thumbs": 0.5, "format": 3.0})
    assert reward == pytest.approx(0.5 + 0.2 + 0.0 + 0.5)
    assert scores == {"thumbs": 1.0, "format": 1.0, "outcome": 0.5, "note": 7.0}


def test_a_sum_that_overflows_is_refused() -> None:
    with pytest.raises(ValueError, match="inf"):
        combine(Scored({"a": 1.7e308, "b": 1.7e308}, {}, "h"), {}, {})
