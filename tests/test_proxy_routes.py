"""Routes and settings: what leads where, and which settings cannot work."""

import pytest

from capture.errors import ConfigError
from proxy.refusal import Refused
from proxy.routes import Routes, ToPolicy, ToUpstream
from proxy.settings import Key, Route, Sampling, Settings, check, is_loopback


def routes(secrets: dict[str, str] | None = None, **table: Route) -> Routes:
    return Routes(
        Settings(routes={name.replace("star", "*"): route for name, route in table.items()}), secrets or {}
    )


def test_names_lead_to_policy_upstream_and_star() -> None:
    table = routes(
        {"JUDGE_KEY": "s3cret"},
        judge=Route(url="http://judge/v1/", model="big", key_env="JUDGE_KEY"),
        open=Route(url="https://api/v1", auth="passthrough"),
        alias=Route(to="judge"),
        star=Route(to="policy"),
    )
    assert table.target("policy") == ToPolicy("policy", "policy")
    assert table.target("gpt-4o") == ToPolicy("*", "policy")
    judge = ToUpstream(name="judge", url="http://judge/v1", model="big", key="s3cret", passthrough=False)
    assert table.target("judge") == judge
    alias = table.target("alias")
    assert isinstance(alias, ToUpstream)
    assert (alias.name, alias.url, alias.key) == ("alias", "http://judge/v1", "s3cret")
    opened = table.target("open")
    assert isinstance(opened, ToUpstream)
    assert (opened.passthrough, opened.key, opened.model) == (True, None, None)
    assert table.names() == ["alias", "judge", "open", "policy"]


def test_an_unknown_model_is_404_and_a_provider_501_naming_the_setting() -> None:
    table = routes(claude=Route(provider="anthropic/claude"))
    with pytest.raises(Refused) as missing:
        table.target("gpt-4o")
    assert (missing.value.status, missing.value.code) == (404, "model_not_found")
    with pytest.raises(Refused, match=r"routes.'claude'.*provider = 'anthropic/claude'") as provider:
        table.target("claude")
    assert (provider.value.status, provider.value.retry) == (501, False)


@pytest.mark.parametrize(
    ("route", "says"),
    [
        (Route(), "exactly one"),
        (Route(to="policy", url="http://x"), "exactly one"),
        (Route(to="nobody"), "no route or policy named 'nobody'"),
        (Route(to="bad"), "circle"),
        (Route(url="ftp://x"), "http://"),
        (Route(url="http://x", key_env="MISSING"), "MISSING is not set"),
        (Route(url="http://x", key_env="K", auth="passthrough"), "exclude"),
    ],
)
def test_a_route_that_cannot_work_is_a_config_error_that_names_it(route: Route, says: str) -> None:
    with pytest.raises(ConfigError, match=r"routes.'bad'") as caught:
        routes({"K": "v"}, bad=route)
    assert says in str(caught.value)


def test_binding_beyond_loopback_needs_keys() -> None:
    with pytest.raises(ConfigError, match=r"proxy\.keys"):
        check(Settings(host="0.0.0.0"))
    check(Settings(host="0.0.0.0", keys=(Key(id="a", sha256="0" * 64),)))
    check(Settings(host="localhost"))
    assert [is_loopback(host) for host in ("127.0.0.2", "::1", "10.0.0.1", "example.org")] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    "settings",
    [
        Settings(keys=(Key(id="a", sha256="short"),)),
        Settings(keys=(Key(id="a", sha256="0" * 64), Key(id="a", sha256="1" * 64))),
        Settings(sampling=Sampling(temperature=0)),
        Settings(sampling=Sampling(max_tokens=0)),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Settings) -> None:
    with pytest.raises(ConfigError, match=r"proxy\."):
        check(settings)
