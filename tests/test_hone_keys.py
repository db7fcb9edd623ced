"""`hone keys`: what it prints opens a proxy, and what is configured is listed."""

import hashlib
import json
import tomllib
from pathlib import Path

import msgspec
import pytest

from hone.cli.main import main
from hone.config import load
from proxy.keys import Keyring
from proxy.settings import KeyLimits

TOML = '[routes]\n"*" = { url = "http://127.0.0.1:9/v1" }\n'


def test_a_new_key_is_a_secret_and_the_toml_of_its_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "new", "agents", "--scopes", "infer,train", "--days", "30"]) == 0
    secret, _, text = capsys.readouterr().out.partition("\n")
    assert secret not in text
    assert len(secret) >= 5 + 43  # 256 random bits
    (path := tmp_path / "hone.toml").write_text(TOML + text)
    (key,) = load(path, {}, "cpu").proxy.keys
    assert (key.id, key.scopes, key.limits) == ("agents", ("infer", "train"), None)
    caller = Keyring((key,)).identify(secret)
    assert (caller.key_id, caller.scopes) == ("agents", {"infer", "train"})
    assert key.expires is not None


def test_two_keys_are_two_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    made = []
    for _ in range(2):
        assert main(["keys", "new", "a", "--json"]) == 0
        made.append(json.loads(capsys.readouterr().out))
    assert made[0]["secret"] != made[1]["secret"]
    for one in made:
        assert one["key"]["sha256"] == hashlib.sha256(one["secret"].encode()).hexdigest()
        assert one["key"]["scopes"] == ["infer"]


@pytest.mark.parametrize("words", [["bad id"], ["a", "--scopes", "infer,root"], ["a", "--days", "0"], [""]])
def test_what_cannot_be_a_key(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["keys", "new", *words])
    except SystemExit as error:
        code = int(str(error.code))
    assert code in (1, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_keys_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hone.toml"
    path.write_text(
        TOML
        + f"""
[proxy.key_limits]
requests_per_s = 2
[[proxy.keys]]
id = "ann"
sha256 = ["{"a" * 64}", "{"b" * 64}"]
expires = 2030-01-01T00:00:00Z
limits = {{ concurrency = 4, tokens_per_minute = 1000 }}
[[proxy.keys]]
id = "bob"
sha256 = "{"c" * 64}"
"""
    )
    ann, bob = load(path, {}, "cpu").proxy.keys
    assert ann.limits == KeyLimits(concurrency=4, tokens_per_minute=1000)
    assert (len(ann.hashes), len(bob.hashes), bob.limits) == (2, 1, None)
    assert ann.expires is not None
    assert ann.expires.isoformat() == "2030-01-01T00:00:00+00:00"
    assert main(["keys", "ls", "--config", str(path), "--json"]) == 0
    rows = msgspec.json.decode(capsys.readouterr().out)
    assert [row["limits"] for row in rows] == [
        {"concurrency": 4, "tokens_per_minute": 1000},
        {"requests_per_s": 2.0},
    ]
    assert main(["keys", "ls", "--config", str(path)]) == 0
    assert capsys.readouterr().out == (
        "ann: infer; 2 secret(s), expires 2030-01-01T00:00:00+00:00; concurrency 4, tokens_per_minute 1000\n"
        "bob: infer; 1 secret(s); requests_per_s 2\n"
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[proxy.key_limits]\nrequests_per_s = 0", "proxy.key_limits.requests_per_s: expected `float` > 0"),
        ("[proxy.key_limits]\nconcurency = 1", "did you mean proxy.key_limits.concurrency?"),
        ('[[proxy.keys]]\nid = "a"\nsha256 = "x"\nexpires = 2030-01-01T00:00:00', "timezone"),
    ],
)
def test_what_is_wrong_with_a_limit_or_a_key(tmp_path: Path, text: str, says: str) -> None:
    from capture.errors import ConfigError

    (path := tmp_path / "hone.toml").write_text(text)
    tomllib.loads(text)
    with pytest.raises(ConfigError) as caught:
        load(path, {}, "cpu")
    assert says in str(caught.value)
