"""Tokens of an OpenID Connect issuer: which are accepted, and when the issuer's keys are fetched."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import io
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives import serialization

from quietmax.accounting.costs import LIMIT
from quietmax.ledger import Charge, ChargeResult
from quietmax.ledger.transactions import ChargeBatch
from quietmax.server import Settings
from quietmax.server import auth as oidc
from quietmax.server.auth import ALGORITHMS, Identity, IssuerKeys, TokenVerifier, _fetch_json
from quietmax.server.errors import HttpError
from quietmax.server.telemetry import Log, _libraries_logged
from tests.server.running_service import Running, Start, check_message, run_async, some_rows, until
from tests.server.token_issuer import AUDIENCE, TokenIssuer, serving


@pytest.fixture(scope="module")
def _keys() -> dict[str, tuple[str, Any]]:
    issuer = TokenIssuer()
    issuer.add_key("ec")
    issuer.add_key("rsa", "RS256")
    issuer.add_key("ed", "EdDSA")
    issuer.add_key("p384", "ES384")
    issuer.add_key("p521", "ES512")
    issuer.add_key("weak", "RS256", bits=1024)
    return issuer.keys


@pytest.fixture
def issuer(_keys: dict[str, tuple[str, Any]]) -> TokenIssuer:
    made = TokenIssuer()
    made.keys = dict(_keys)
    return made


def _settings(issuer: str, **claims: str) -> Settings:
    return Settings(
        oidc_issuer=issuer,
        oidc_audience=AUDIENCE,
        **{f"oidc_{name}": value for name, value in claims.items()},  # type: ignore[arg-type]
    )


class _Verification:
    """A verifier with a clock that tests turn."""

    def __init__(self, issuer: TokenIssuer, **settings: Any) -> None:
        self.now = 1000.0
        keys = IssuerKeys(issuer.url, issuer.fetch, lambda: self.now)
        self.verifier = TokenVerifier(_settings(issuer.url, **settings), keys)

    async def verify(self, token: str) -> Identity:
        return await self.verifier._verify(token)

    def identity(self, token: str) -> Identity:
        return run_async(self.verify(token))

    def status(self, token: str, sentence: str = "") -> int:
        """The status of the error; its message tells nothing secret."""
        with pytest.raises(HttpError) as raised:
            self.identity(token)
        message = raised.value.message
        assert sentence in message
        assert message.endswith(".")
        assert not [secret for secret in ("\n", "example.org", AUDIENCE) if secret in message]
        assert raised.value.status != 503 or raised.value.headers["retry-after"] == "1"
        return raised.value.status


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_every_asymmetric_algorithm_is_accepted_with_a_key_of_its_kind(
    issuer: TokenIssuer, algorithm: str
) -> None:
    kid = {"E": "ec", "R": "rsa", "P": "rsa"}[algorithm[0]]
    kid = {"EdDSA": "ed", "ES384": "p384", "ES512": "p521"}.get(algorithm, kid)
    exp = int(time.time()) + 60
    identity = _Verification(issuer).identity(issuer.token(kid, {"exp": exp}, algorithm=algorithm))
    assert identity == Identity("ann", False, (exp + oidc.LEEWAY_SECONDS) * 10**6)


def _unsigned(issuer: TokenIssuer, **header: Any) -> str:
    parts = [
        {"typ": "JWT", "kid": "rsa", **header},
        {"iss": issuer.url, "aud": AUDIENCE, "sub": "ann", "exp": time.time() + 600},
    ]
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts]
    return ".".join([*encoded, ""])


def _hmac_with_the_public_key(issuer: TokenIssuer) -> str:
    public = issuer.keys["rsa"][1].public_key()
    pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    signed = _unsigned(issuer, alg="HS256").rstrip(".")
    signature = hmac.new(pem, signed.encode(), hashlib.sha256).digest()
    return f"{signed}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


def _other_payload(issuer: TokenIssuer) -> str:
    head, _, signature = issuer.token("ec").split(".")
    return ".".join([head, issuer.token("ec", {"sub": "bob"}).split(".")[1], signature])


_NOW = time.time()
_REFUSED: dict[str, tuple[Callable[[TokenIssuer], str], str]] = {
    "no algorithm": (lambda issuer: _unsigned(issuer), "signed with one of"),
    "none": (lambda issuer: _unsigned(issuer, alg="none"), "signed with one of"),
    "None": (lambda issuer: _unsigned(issuer, alg="NonE"), "signed with one of"),
    "a list": (lambda issuer: _unsigned(issuer, alg=["RS256"]), "signed with one of"),
    "empty signature": (lambda issuer: _unsigned(issuer, alg="RS256"), "signature of the token is wrong"),
    "the public key as a secret": (_hmac_with_the_public_key, "signed with one of"),
    "another payload": (_other_payload, "signature of the token is wrong"),
    "key of another kind": (
        lambda issuer: issuer.token("rsa", headers={"kid": "ec"}),
        "a key that its issuer does not publish",
    ),
    "key of another token": (
        lambda issuer: issuer.token("ec", headers={"kid": "p384"}),
        "a key that its issuer does not publish",
    ),
    "curve of another algorithm": (
        lambda issuer: issuer.token("ec", key=issuer.keys["ec"][1], headers={"kid": "p521"}),
        "a key that its issuer does not publish",
    ),
    "unknown key": (lambda issuer: issuer.token("ec", headers={"kid": "x"}), "does not publish"),
    "short RSA key": (lambda issuer: issuer.token("weak"), "The token is not valid"),
    "own key in the header": (
        lambda issuer: issuer.token("ec", headers={"kid": "x", "jku": "https://evil.example", "jwk": {}}),
        "does not publish",
    ),
    "critical extension": (
        lambda issuer: issuer.token("ec", headers={"crit": ["exp"], "exp": 1}),
        "neither an API key nor a valid JWT",
    ),
    "expired": (lambda issuer: issuer.token("ec", {"exp": _NOW - 31}), "has expired"),
    "not yet valid": (lambda issuer: issuer.token("ec", {"nbf": time.time() + 40}), "not valid yet"),
    "issued in the future": (lambda issuer: issuer.token("ec", {"iat": time.time() + 40}), "not valid yet"),
    "another issuer": (lambda issuer: issuer.token("ec", {"iss": issuer.url + "/"}), "another issuer"),
    "another audience": (lambda issuer: issuer.token("ec", {"aud": ["a", "b"]}), "another audience"),
    "no expiry": (lambda issuer: issuer.token("ec", {"exp": None}), "exp, iss and aud"),
    "no audience": (lambda issuer: issuer.token("ec", {"aud": None}), "exp, iss and aud"),
    "no issuer": (lambda issuer: issuer.token("ec", {"iss": None}), "exp, iss and aud"),
    "an infinite expiry": (lambda issuer: issuer.token("ec", {"exp": float("inf")}), "not valid"),
    "no subject": (lambda issuer: issuer.token("ec", {"sub": None}), "does not name a client"),
    "no JSON": (lambda _: "a.b.c", "neither an API key nor a valid JWT"),
    "not ASCII": (lambda _: "ü.ü.ü", "neither an API key nor a valid JWT"),
    "nested": (
        lambda _: f"{base64.urlsafe_b64encode(b'[' * 6000).decode()}.e30.e30",
        "neither an API key nor a valid JWT",
    ),
    "too long": (lambda issuer: issuer.token("ec", {"x": "x" * 2**14}), "at most 16384 characters"),
}


@pytest.mark.parametrize("kind", sorted(_REFUSED))
def test_a_token_is_refused_with_one_sentence_that_tells_nothing_secret(
    issuer: TokenIssuer, kind: str
) -> None:
    make, sentence = _REFUSED[kind]
    assert _Verification(issuer).status(make(issuer), sentence) == 401
    assert all(path in ("/.well-known/openid-configuration", "/keys") for path in issuer.requests)


def test_clocks_may_differ_by_the_leeway_and_a_token_may_name_several_audiences(issuer: TokenIssuer) -> None:
    now = time.time()
    claims = {"exp": now - 20, "nbf": now + 20, "iat": now + 20, "aud": ["a", AUDIENCE]}
    assert _Verification(issuer).identity(issuer.token("ec", claims)).subject == "ann"


def test_no_change_of_one_character_leaves_a_token_valid(issuer: TokenIssuer) -> None:
    token = issuer.token("ec")
    verification = _Verification(issuer)
    statuses: set[int] = set()

    async def change() -> None:
        await verification.verify(token)
        for place, character in enumerate(token):
            if character == "." or place == len(token) - 1:  # the last one has bits without a meaning
                continue
            changed = token[:place] + ("A" if character != "A" else "B") + token[place + 1 :]
            with pytest.raises(HttpError) as refused:
                await verification.verify(changed)
            statuses.add(refused.value.status)

    run_async(change())
    assert statuses == {401}
    assert len(issuer.requests) <= 4, "unknown key ids do not make the service ask the issuer again and again"


def test_a_token_without_a_key_id_needs_an_issuer_with_one_key_of_its_kind(issuer: TokenIssuer) -> None:
    claims = {"iss": issuer.url, "aud": AUDIENCE, "sub": "ann", "exp": time.time() + 60}
    bare = jwt.encode(claims, issuer.keys["ec"][1], "ES256")
    verification = _Verification(issuer)
    assert verification.identity(bare).subject == "ann"
    del issuer.keys["ec"]
    issuer.add_key("new")
    verification.now += oidc.MIN_INTERVAL_SECONDS
    assert verification.identity(jwt.encode(claims, issuer.keys["new"][1], "ES256")).subject == "ann"
    for _ in range(9):
        assert verification.status(bare) == 401
    assert issuer.requests.count("/keys") == 2, "not once for each"
    issuer.add_key("another")
    assert _Verification(issuer).status(bare) == 401


def test_keys_for_encryption_verify_nothing_and_unusable_ones_are_as_good_as_none(
    issuer: TokenIssuer,
) -> None:
    broken = {"kty": "RSA", "kid": "rsa", "n": "?", "e": "?"}
    changes = ({"use": "enc"}, {"key_ops": ["encrypt"]}, {"alg": "RS512"})
    others = ([{**key, **change} for key in issuer.public_keys()] for change in changes)
    for keys in ([], [None, 1, {}], [broken], *others):
        issuer.documents["/keys"] = {"keys": keys}
        assert _Verification(issuer).status(issuer.token("rsa")) == 401, keys


@pytest.mark.parametrize(
    ("claim", "value", "claims", "admin"),
    [
        ("role", "admin", {"role": "admin"}, True),
        ("role", "admin", {"role": "not admin"}, False),
        ("role", "admin", {"role": ["user", "admin"]}, True),
        ("role", "admin", {"role": ["administrator"]}, False),
        ("role", "admin", {}, False),
        ("role", "admin", {"role": {"admin": True}}, False),
        ("scope", "quietmax:admin", {"scope": "openid quietmax:admin"}, True),
        ("scope", "quietmax:admin", {"scope": "openid quietmax:administer"}, False),
        ("realm_access.roles", "admin", {"realm_access": {"roles": ["admin"]}}, True),
        ("realm_access.roles", "admin", {"realm_access": "roles"}, False),
        ("https://example.org/roles", "admin", {"https://example.org/roles": ["admin"]}, True),
    ],
)
def test_the_administrators_claim_is_equal_to_the_value_or_contains_it(
    issuer: TokenIssuer, claim: str, value: str, claims: dict[str, Any], admin: bool
) -> None:
    token = issuer.token("ec", claims)
    assert _Verification(issuer, admin_claim=claim, admin_value=value).identity(token).admin is admin
    assert _Verification(issuer).identity(token).admin is False


def test_another_claim_may_name_the_client(issuer: TokenIssuer) -> None:
    verification = _Verification(issuer, client_claim="azp")
    assert verification.identity(issuer.token("ec", {"azp": "batch-job"})).subject == "batch-job"
    for claims in ({}, {"azp": 7}):
        assert verification.status(issuer.token("ec", claims)) == 401


def test_tokens_with_random_key_ids_cause_one_fetch_in_ten_seconds(issuer: TokenIssuer) -> None:
    verification = _Verification(issuer)
    verification.identity(issuer.token("ec"))
    for number in range(50):
        assert verification.status(issuer.token("ec", headers={"kid": f"k{number}"})) == 401
    assert issuer.requests.count("/keys") == 1
    verification.now += oidc.MIN_INTERVAL_SECONDS
    forged = [issuer.token("ec", headers={"kid": f"x{number}"}) for number in range(50)]

    async def flood() -> list[Any]:
        return await asyncio.gather(*map(verification.verify, forged), return_exceptions=True)

    assert {each.status for each in run_async(flood())} == {401}
    assert issuer.requests.count("/keys") == 2


def test_a_new_key_works_at_once_and_a_withdrawn_one_stops(issuer: TokenIssuer) -> None:
    verification = _Verification(issuer)
    old = issuer.token("ec")
    verification.identity(old)
    issuer.add_key("new")
    del issuer.keys["ec"]
    verification.now += oidc.MIN_INTERVAL_SECONDS
    verification.identity(old)  # nobody knows yet that the key was withdrawn
    verification.identity(issuer.token("new"))
    assert verification.status(old) == 401


def test_a_withdrawn_key_stops_within_five_minutes_even_if_no_new_one_is_used(issuer: TokenIssuer) -> None:
    verification = _Verification(issuer)
    token = issuer.token("ec")
    verification.identity(token)
    del issuer.keys["ec"]
    verification.now += oidc.REFRESH_SECONDS - 1
    verification.identity(token)
    verification.now += 1
    assert verification.status(token) == 401


def test_the_last_keys_work_for_an_hour_while_the_issuer_is_down(issuer: TokenIssuer) -> None:
    verification = _Verification(issuer)
    token = issuer.token("ec")

    async def verify_and_fetch() -> None:
        await verification.verify(token)
        await asyncio.sleep(0.05)  # this fetch was not waited for

    verification.identity(token)
    issuer.down = True
    verification.now += oidc.REFRESH_SECONDS
    verification.identity(token)
    assert verification.status(issuer.token("ec", headers={"kid": "new"})) == 503
    verification.now += oidc.MAX_AGE_SECONDS - oidc.REFRESH_SECONDS - 1
    run_async(verify_and_fetch())
    verification.now += 1
    assert verification.status(token) == 503
    issuer.down = False
    assert verification.status(token) == 503, "the next attempt is due in ten seconds"
    verification.now += oidc.MIN_INTERVAL_SECONDS
    verification.identity(token)


def test_requests_do_not_wait_for_an_issuer_that_is_known_to_be_down(issuer: TokenIssuer) -> None:
    verification = _Verification(issuer)
    fetching, ended = threading.Event(), threading.Event()
    token = issuer.token("ec")
    verification.identity(token)
    issuer.down = True
    verification.now += oidc.REFRESH_SECONDS
    verification.identity(token)

    def hang(_: str) -> None:
        fetching.set()
        ended.wait(30)

    async def verify_twice() -> None:
        await verification.verify(token)
        assert await asyncio.to_thread(fetching.wait, 30)
        await verification.verify(token)
        ended.set()

    verification.verifier._keys._fetch = hang
    verification.now += oidc.MIN_INTERVAL_SECONDS
    begun = time.monotonic()
    run_async(verify_twice())
    assert time.monotonic() - begun < 20


def test_the_log_says_why_the_issuer_cannot_be_reached() -> None:
    stream = io.BytesIO()
    log = Log(stream)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with _libraries_logged(log), suppress(HttpError):
            run_async(IssuerKeys(url).find("ec", "ES256"))
    assert log.flush(10)
    (line,) = map(json.loads, stream.getvalue().splitlines())
    assert line["message"].startswith(f"The keys of the issuer {url} cannot be fetched: ")
    assert "refused" in line["message"].lower()


@pytest.mark.parametrize(
    "document",
    [
        {"issuer": "https://evil.example", "jwks_uri": "https://login.example.org/keys"},
        {"issuer": "https://login.example.org/", "jwks_uri": "https://login.example.org/keys"},
        {"issuer": "https://login.example.org", "jwks_uri": "http://login.example.org/keys"},
        {"issuer": "https://login.example.org", "jwks_uri": "file:///keys"},
        {"issuer": "https://login.example.org"},
        {},
        [],
        None,
    ],
)
def test_keys_come_only_from_a_discovery_document_of_the_issuer_over_https(
    issuer: TokenIssuer, document: Any
) -> None:
    issuer.documents["/.well-known/openid-configuration"] = document
    assert _Verification(issuer).status(issuer.token("ec")) == 503
    assert issuer.requests == ["/.well-known/openid-configuration"]


def test_documents_are_fetched_without_redirects_and_only_up_to_a_size_and_a_time(
    issuer: TokenIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(issuer):
        assert _fetch_json(f"{issuer.url}/keys") == {"keys": issuer.public_keys()}
        issuer.documents.update({"/moved": 302, "/large": b" " * (2**20 + 1), "/text": b"keys"})
        for path in ("/moved", "/large", "/text"):
            with pytest.raises(Exception):  # noqa: B017
                _fetch_json(issuer.url + path)
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        _fetch_json(f"{issuer.url}/keys")
        monkeypatch.setattr(oidc, "_FETCH_TIMEOUT", 1e-9)
        with pytest.raises(Exception):  # noqa: B017
            _fetch_json(f"{issuer.url}/keys")
    assert issuer.requests[:4] == ["/keys", "/moved", "/large", "/text"]


# In a service


@pytest.fixture
def serving_issuer(issuer: TokenIssuer) -> Iterator[TokenIssuer]:
    with serving(issuer):
        yield issuer


@pytest.fixture
def with_tokens(serving_issuer: TokenIssuer, start: Start) -> Iterator[Running]:
    """An ordinary model with a budget for 20 answers that accepts tokens."""
    settings = _settings(serving_issuer.url, admin_claim="role", admin_value="admin")
    with start("plain", settings=settings) as service:
        yield service


def _infer(service: Running, token: str, row: int = 0, **more: Any) -> httpx.Response:
    return service.infer(some_rows(1, row), key=token, **more)


def test_a_token_is_charged_as_a_client_of_its_own_beside_api_keys(
    with_tokens: Running, serving_issuer: TokenIssuer
) -> None:
    def clients(token: str) -> list[str]:
        budget = with_tokens.get("/v2/models/plain/budget", token).json()
        return [each["client"] for each in budget["clients"]]

    token = serving_issuer.token("ec")
    assert _infer(with_tokens, token).json()["parameters"]["new_answers"] == 1
    assert _infer(with_tokens, with_tokens.key, 1).status_code == 200
    spent = with_tokens.ledger.subaccounts(with_tokens.ledger.account("people"))
    name = f"oidc:ann@{serving_issuer.url}"
    assert {each.client: each.spent_units for each in spent} == {"ann": LIMIT // 20, name: LIMIT // 20}
    assert clients(token) == [name]
    administrator = serving_issuer.token("ec", {"sub": "root", "role": "admin"})
    assert sorted(clients(administrator)) == ["ann", name]
    entry = list(with_tokens.ledger.export("people"))[-2]
    assert (entry.kind, with_tokens.ledger.client_names()[entry.client]) == ("charge", name)
    assert with_tokens.ledger.verify().sound


def test_the_request_ids_of_a_token_are_its_own(with_tokens: Running, serving_issuer: TokenIssuer) -> None:
    token = serving_issuer.token("ec")
    first = _infer(with_tokens, token, id="one").json()
    again = _infer(with_tokens, serving_issuer.token("rsa"), id="one").json()
    assert again["parameters"]["new_answers"] == 0
    assert again["outputs"] == first["outputs"]
    assert _infer(with_tokens, with_tokens.key, 1, id="one").json()["parameters"]["new_answers"] == 1


def test_a_quota_holds_for_a_client_with_tokens_from_its_first_request_on(
    with_tokens: Running, serving_issuer: TokenIssuer
) -> None:
    with_tokens.ledger.set_quota("people", f"oidc:ann@{serving_issuer.url}", 0.1, "a test of quotas")
    token = serving_issuer.token("ec")
    assert [_infer(with_tokens, token, row).status_code for row in range(3)] == [200, 200, 403]
    assert _infer(with_tokens, serving_issuer.token("ec", {"sub": "bob"}), 3).status_code == 200


def test_an_invalid_token_is_401_and_costs_nothing(with_tokens: Running, serving_issuer: TokenIssuer) -> None:
    for token in (
        serving_issuer.token("ec", {"exp": time.time() - 60}),
        serving_issuer.token("ec", {"sub": "a b"}),
        serving_issuer.token("ec", {"sub": "ann\n"}),
        serving_issuer.token("ec", {"sub": ""}),
        serving_issuer.token("ec", {"sub": "ä"}),
        serving_issuer.token("ec", {"sub": "x" * 256}),
        "a.b.c",
    ):
        refused = _infer(with_tokens, token)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        check_message(refused)
    assert with_tokens.ledger.account("people").spent_units == 0


def test_a_token_that_expires_before_its_charge_pays_nothing(
    with_tokens: Running, serving_issuer: TokenIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The expiry is checked in the transaction too: it is over by the time that the charge is decided."""
    token = serving_issuer.token("ec")
    assert _infer(with_tokens, token).status_code == 200
    assert with_tokens.service.auth._tokens is not None
    identity = run_async(with_tokens.service.auth._tokens._verify(token))
    decided = ChargeBatch._decide

    def late(batch: ChargeBatch, charge: Charge) -> ChargeResult:
        batch._now = identity.expires
        return decided(batch, charge)

    monkeypatch.setattr(ChargeBatch, "_decide", late)
    refused = _infer(with_tokens, token, 1)
    assert refused.status_code == 401
    assert "token has expired" in refused.json()["error"]
    assert with_tokens.ledger.account("people").spent_units == LIMIT // 20


def test_without_an_issuer_a_token_is_a_wrong_key(plain: Running, issuer: TokenIssuer) -> None:
    refused = _infer(plain, issuer.token("ec"))
    assert (refused.status_code, refused.json()["error"]) == (
        401,
        "The API key is wrong, revoked or expired.",
    )


def test_tokens_get_503_and_api_keys_go_on_while_the_issuer_was_never_reached(start: Start) -> None:
    made = TokenIssuer("http://127.0.0.1:9")
    made.add_key("ec")
    with start("plain", settings=_settings(made.url)) as service:
        refused = _infer(service, made.token("ec"))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert _infer(service, service.key).status_code == 200


# With a real issuer: authorization code flow, restart, rotation


@contextmanager
def _provider(port: int) -> Iterator[None]:
    """Run the OpenID provider of the package oidc-provider-mock; each start makes a new signing key."""
    command = [sys.executable, "-m", "oidc_provider_mock", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    document = f"http://localhost:{port}/.well-known/openid-configuration"
    try:
        until(lambda: httpx.get(document).is_success)
        yield
    finally:
        process.terminate()
        process.wait(10)


def _id_token(url: str, user: str) -> str:
    """Log a user in by the authorization code flow, as a web application would."""
    where = {
        "client_id": AUDIENCE,
        "redirect_uri": "http://localhost/back",
        "response_type": "code",
        "scope": "openid",
        "state": "s",
    }
    back = httpx.post(f"{url}/oauth2/authorize", params=where, data={"sub": user})
    code = parse_qs(urlsplit(back.headers["location"]).query)["code"][0]
    answer = httpx.post(
        f"{url}/oauth2/token",
        data={"grant_type": "authorization_code", "code": code, "redirect_uri": where["redirect_uri"]},
        auth=(AUDIENCE, "any"),
    )
    return str(answer.raise_for_status().json()["id_token"])


@pytest.mark.slow
def test_the_tokens_of_a_real_issuer_work_across_its_restart_and_the_rotation_of_its_key(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc, "MIN_INTERVAL_SECONDS", 0.2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://localhost:{port}"
    settings = _settings(url, admin_claim="role", admin_value="admin")
    with start("plain", settings=settings) as service:
        with _provider(port):
            httpx.put(f"{url}/users/root", json={"role": "admin"}).raise_for_status()
            first = _id_token(url, "ann")
            assert _infer(service, first).json()["parameters"]["new_answers"] == 1
            assert _infer(service, _id_token(url, "root"), 1).status_code == 200
            admin = service.get("/v2/models/plain/budget", _id_token(url, "root")).json()
            assert {each["client"] for each in admin["clients"]} == {f"oidc:ann@{url}", f"oidc:root@{url}"}
        assert _infer(service, first, 2).status_code == 200, "the issuer is down, its last keys work"
        time.sleep(0.3)
        with _provider(port):
            second = _id_token(url, "ann")
            assert _infer(service, second, 3).status_code == 200, "signed with a key from after the restart"
            assert _infer(service, first, 4).status_code == 401, "the old key is not published any more"
        spent = service.ledger.subaccounts(service.ledger.account("people"))
        assert {each.client: each.spent_units * 20 // LIMIT for each in spent} == {
            f"oidc:ann@{url}": 3,
            f"oidc:root@{url}": 1,
        }
