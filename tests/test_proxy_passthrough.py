"""Whose key goes where: the agent's own to `auth = "passthrough"` alone, Hone's to nobody."""

import hashlib
from pathlib import Path

from proxy_world import USER, FakeUpstream, capture_settings, completion, world

from proxy.settings import Key, Route

CHAT = "/v1/chat/completions"


def key(name: str) -> Key:
    digest = hashlib.sha256(f"sk-hone-{name}".encode()).hexdigest()
    return Key(id=name, sha256=digest, scopes=("infer", "train"))


async def test_where_keys_are_configured_the_agents_own_goes_beside_hones(tmp_path: Path) -> None:
    async with FakeUpstream(completion).listening() as upstream:
        routes = {
            "plain": Route(url=upstream.url),
            "theirs": Route(url=upstream.url, auth="passthrough"),
            "backed": Route(url="http://127.0.0.1:9/v1", fallbacks=("theirs", "plain")),
        }
        settings = capture_settings(upstream.url, keys=(key("ann"), key("bob")), routes=routes)
        async with world(settings, tmp_path) as hone:

            async def sent(model: str, authorization: str, own: str = "") -> str | None:
                headers = {"Authorization": f"Bearer {authorization}"} | ({"X-Hone-Key": own} if own else {})
                status, answer, _ = await hone.post(CHAT, {"model": model, "messages": [USER]}, headers)
                assert status == 200, answer
                assert not any(
                    "hone" in f"{name} {value}".lower() for name, value in upstream.headers[-1].items()
                )
                return upstream.headers[-1].get("Authorization")

            opened = await hone.post("/rollouts", {"mode": "eval"}, {"X-Hone-Key": "sk-hone-ann"})
            rollout_key = opened[1]["api_key"]
            assert await sent("theirs", "sk-hone-ann") is None
            assert await sent("theirs", "sk-theirs", own="sk-hone-ann") == "Bearer sk-theirs"
            assert await sent("theirs", "sk-theirs", own=rollout_key) == "Bearer sk-theirs"
            assert await sent("theirs", "sk-hone-bob", own="sk-hone-ann") is None
            assert await sent("theirs", rollout_key, own="sk-hone-ann") is None
            assert await sent("plain", "sk-theirs", own="sk-hone-ann") is None
            assert await sent("backed", "sk-theirs", own="sk-hone-ann") == "Bearer sk-theirs"
            status, _, _ = await hone.post(
                CHAT, {"model": "theirs", "messages": [USER]}, {"Authorization": "Bearer sk-theirs"}
            )
            assert status == 401
    for file in tmp_path.iterdir():
        stored = file.read_bytes()
        assert b"sk-theirs" not in stored
        assert b"sk-hone-" not in stored
