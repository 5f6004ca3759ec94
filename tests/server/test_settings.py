"""Limits of the service."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from quietmax.errors import InvalidInput
from quietmax.server import Settings

LIMITS = [
    each.name
    for each in fields(Settings)
    if isinstance(each.default, int | float) and not isinstance(each.default, bool)
]


@pytest.mark.parametrize("name", [*LIMITS, "rate_limit"])
@pytest.mark.parametrize("limit", [0, -1, float("nan")])
def test_a_limit_must_be_positive(name: str, limit: float) -> None:
    with pytest.raises(InvalidInput, match=f"{name} must be greater than 0"):
        Settings(**{name: limit})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "issuer",
    ["https://login.example.org", "https://example.org/realms/a", "http://127.0.0.1:80", "http://localhost"],
)
def test_an_issuer_is_reached_over_https_or_on_this_machine(issuer: str) -> None:
    assert Settings(oidc_issuer=issuer, oidc_audience="quietmax").oidc_client_claim == "sub"


@pytest.mark.parametrize(
    "issuer",
    [
        *("", "login.example.org", "http://login.example.org", "http://127.0.0.1.example.org", "https://"),
        *("https://me@login.example.org", "https://login.example.org?x", "https://login.example.org#x"),
        *("https://login example.org", "https://[::1", "ftp://localhost", "https://" + "x" * 191),
    ],
)
def test_any_other_issuer_is_refused(issuer: str) -> None:
    with pytest.raises(InvalidInput, match="`oidc_issuer` must be a URL with https"):
        Settings(oidc_issuer=issuer, oidc_audience="quietmax")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"audience": None}, "`oidc_issuer` requires `oidc_audience`"),
        ({"issuer": None}, "require `oidc_issuer`"),
        ({"audience": ""}, "must not be empty"),
        ({"client_claim": ""}, "must not be empty"),
        ({"admin_claim": "role"}, "require each other"),
    ],
)
def test_the_settings_of_tokens_must_be_complete(options: dict[str, Any], message: str) -> None:
    given = {"issuer": "https://login.example.org", "audience": "quietmax", **options}
    with pytest.raises(InvalidInput, match=message):
        Settings(**{f"oidc_{name}": value for name, value in given.items()})
