"""`hone adapters export`: what is exported is what was trained, and loads elsewhere."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from learner_world import VOCABULARY, World, make_base, random_group, settings
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from capture.adapters import read_manifest
from hone.cli.main import main
from learner.model import fingerprint
from learner.train import run

ROOT = Path(__file__).parent.parent
TOKENS = torch.arange(2, VOCABULARY)[None]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `hone.toml`, whose store has v1 and v2."""
    scratch = tmp_path_factory.mktemp("trained")
    base = make_base(scratch / "base")
    (base / "chat_template.jinja").write_text("{{ messages }}")
    world = World(scratch / "hone.db")
    for seed in (1, 2):
        world.add_group(random_group(random.Random(seed)))
    config = settings(base, scratch, groups_per_batch=1, steps_max=2, lr=0.05)
    run(config, world.path, world.run_id, world.policy, lambda: False)
    world.store.close()
    text = f"[policy]\nbase_model = '{base}'\n[capture]\npath = '{world.path}'\n[train]\nlora_rank = 4\n"
    (scratch / "hone.toml").write_text(text)
    return scratch


def export(trained: Path, *words: str) -> int:
    return main(["adapters", "export", *words, "-c", str(trained / "hone.toml")])


def logits_of_v2(trained: Path) -> torch.Tensor:
    base = AutoModelForCausalLM.from_pretrained(trained / "base")
    with torch.no_grad():
        before = base(TOKENS).logits
        after = PeftModel.from_pretrained(base, trained / "adapters" / "policy@v2")(TOKENS).logits
    assert (after - before).abs().max() > 0.05  # the adapter does something
    return after


def test_merged_it_loads_as_a_model_and_says_the_same(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "merged"
    assert export(trained, "v2", "--to", str(out), "--merge", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    merged = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS).logits, logits_of_v2(trained), rtol=0, atol=2e-5)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.encode("w7 w9") == [7, 9]
    assert tokenizer.chat_template == "{{ messages }}"
    origin = json.loads((out / "hone.json").read_text())
    assert (origin["version"], origin["merged"], told["to"]) == (2, True, str(out))
    assert origin["fingerprint"] == fingerprint(out) != fingerprint(trained / "base")
    assert origin["base_fingerprint"] == fingerprint(trained / "base")
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]  # nothing temporary is left


def test_the_adapter_loads_with_peft(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "adapter"
    assert export(trained, "2", "--to", str(out)) == 0
    named = json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(trained / "base")
    with torch.no_grad():
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(named), out)
        assert torch.equal(loaded(TOKENS).logits, logits_of_v2(trained))
    assert read_manifest(out) == read_manifest(trained / "adapters" / "policy@v2")


def test_half_precision_is_the_sum_rounded_once(trained: Path, tmp_path: Path) -> None:
    assert export(trained, "2", "--to", str(tmp_path / "half"), "--merge", "--dtype", "bfloat16") == 0
    assert export(trained, "2", "--to", str(tmp_path / "full"), "--merge") == 0
    half, full = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("half", "full"))
    assert (half.dtype, full.dtype) == (torch.bfloat16, torch.float32)
    pairs = zip(half.parameters(), full.parameters(), strict=True)
    assert all(torch.equal(a, b.bfloat16()) for a, b in pairs)


def test_what_cannot_be_exported_is_said(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        assert export(trained, *words) == 1
        return capsys.readouterr().err

    new = str(tmp_path / "new")
    assert "policy policy has no version 9; `hone adapters ls`" in refused("9", "--to", new)
    assert "policy@v0 is the base model itself: it has no adapter" in refused("0", "--to", new)
    assert "--to ftp://host/x: a directory, or a URL that begins" in refused("1", "--to", "ftp://host/x")
    full = tmp_path / "full"
    full.mkdir()
    (full / "kept").write_text("mine")
    assert f"{full} is there already" in refused("1", "--to", str(full))
    assert "is there already" in refused("1", "--to", str(full / "kept"), "--merge")
    assert (full / "kept").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert export(trained, "1", "--to", str(tmp_path / "empty")) == 0
    assert not Path(new).exists()


def test_a_damaged_adapter_and_another_base_are_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (trained / "hone.toml").read_text()
    other = make_base(tmp_path / "other", seed=2)
    (trained / "other.toml").write_text(text.replace(str(trained / "base"), str(other)))
    words = ["adapters", "export", "1", "--to", str(tmp_path / "x"), "--merge"]
    assert main([*words, "-c", str(trained / "other.toml")]) == 1
    assert "is not the model that v1 was trained on" in capsys.readouterr().err
    weights = trained / "adapters" / "policy@v1" / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        assert export(trained, "1", "--to", str(tmp_path / "x")) == 1
        assert "adapter_model.safetensors is damaged" in capsys.readouterr().err
    finally:
        weights.write_bytes(whole)
    assert list(tmp_path.iterdir()) == [other]


def test_without_torch_the_adapter_goes_and_a_merge_names_the_extra(trained: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from hone.cli.main import main; sys.exit(main())"
    words = ["adapters", "export", "1", "-c", str(trained / "hone.toml"), "--to"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    def hone(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *words, *more]
        return subprocess.run(command, capture_output=True, text=True, env=env, check=False)

    merged = hone(str(tmp_path / "merged"), "--merge")
    assert (merged.returncode, merged.stdout) == (1, "")
    assert "pip install 'hone[learner]'" in merged.stderr
    assert hone(str(tmp_path / "adapter")).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
