"""The documents say what is there: links resolve, commands exist, snippets parse, words are kept."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md")]
)
ROOMS = ("capture", "proxy", "rewards", "learner", "rollouts", "hone")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_snippets_parse(page: Path) -> None:
    for snippet in blocks(page, "python"):
        ast.parse(snippet)
    for snippet in blocks(page, "toml"):
        tomllib.loads(snippet)


def test_every_hone_verb_in_the_documents_exists() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "hone.cli.main", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for page in PAGES:
        for block in blocks(page, "bash"):
            for verb in re.findall(r"(?:^|/)hone ([a-z]+)", block, re.MULTILINE):
                assert re.search(rf"\b{verb}\b", shown), f"{page.name}: hone {verb}"


def test_every_make_target_in_the_documents_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"`?\bmake ([a-z]+(?:-[a-z]+)*)`?", "\n".join(blocks(page, "bash"))):
            assert target in targets, f"{page.name}: make {target}"


@pytest.mark.parametrize("word", ["episode", "datum"])
def test_one_word_per_thing(word: str) -> None:
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            assert word not in file.read_text().lower(), f"{file.relative_to(ROOT)} says {word!r}"


def test_lock_files_leave_out_what_does_not_load_beside_the_cpu_torch() -> None:
    pins = (ROOT / "requirements" / "cpu.txt").read_text()
    assert not re.search(r"^(torchvision|torchaudio|torchcodec)==", pins, re.MULTILINE)
    proxy = (ROOT / "requirements" / "proxy.txt").read_text()
    assert not re.search(r"^(torch|transformers|vllm|litellm)", proxy, re.MULTILINE)
