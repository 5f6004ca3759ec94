"""Authentication: API keys and tokens in the Authorization header, and anonymous access.

API keys are read from the ledger and kept for a second, so that a revoked key stops working within that time; a charge
checks its key once more in its own transaction, or the expiry of its token. The page sends its key like any other
client, and keeps it in its memory alone: there are no cookies and no sessions.

Tokens are JWTs, checked against the keys that an OpenID Connect issuer publishes. Keys come only from the issuer's
discovery document, never from what a token names (`jku`, `x5u`, `jwk`). They are fetched again when they are five
minutes old, and at most every ten seconds for a token whose key is unknown, so that forged tokens cannot make the
service flood the issuer. While the issuer is unavailable, the last keys work for an hour; then tokens get 503.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import urllib.request
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

from quietmax._lazy import lazy_module
from quietmax.errors import QuietmaxError
from quietmax.ledger.accounts import ApiKey, find_key, token_client_name
from quietmax.ledger.ledger import Ledger
from quietmax.server.errors import HttpError, _from_ledger, _ledger_error
from quietmax.server.settings import ANONYMOUS, Settings, _is_loopback, _is_private_url
from quietmax.server.telemetry import Headers

if TYPE_CHECKING:
    import jwt
else:
    jwt = lazy_module("jwt")

_FRESH_SECONDS = 1.0
_MAX_CLIENT_IDS = 65_536
_PROXY_HEADERS = (b"forwarded", b"via", b"x-real-ip", b"x-client-ip", b"cf-connecting-ip", b"true-client-ip")
_INVALID_KEY = "The API key is wrong, revoked or expired."
_PAGE_RATE, _PAGE_BURST = 5.0, 20
"""The page asks for its contents every two seconds, whatever the rate limit of the client."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request."""

    client: str  # Name of the client that is charged
    client_id: int  # Its number in the ledger
    key: str | None  # Id of the API key. None: anonymous access, or a token
    admin: bool  # Whether the client may see the spending of others
    expires: int | None = None  # When the token expires, in microseconds since 1970. None: there is no token


class Authenticator:
    """Finds out who sends a request."""

    def __init__(self, ledger: Ledger, settings: Settings) -> None:
        self._ledger = ledger
        self._settings = settings
        self._keys: dict[str, ApiKey] = {}
        self._read_at = -_FRESH_SECONDS
        self._reading: asyncio.Task[None] | None = None
        rate, burst = settings.rate_limit, settings.rate_burst
        self._rate_limiter = RateLimiter(rate, burst)
        self._page_limiter = RateLimiter(rate and max(rate, _PAGE_RATE), max(burst or 0, _PAGE_BURST))
        self._tokens = None if settings.oidc_issuer is None else TokenVerifier(settings)
        self._client_ids: dict[str, int] = {}  # of tokens
        self._anonymous = (
            Caller(ANONYMOUS, ledger.client(ANONYMOUS), None, admin=False) if settings.anonymous else None
        )

    async def authenticate(
        self, headers: Headers, *, local: bool = False, allow_stale: bool = False, page: bool = False
    ) -> Caller:
        """Return the caller of a request, and count it against the client's rate limit.

        What the page asks every two seconds has a limit of its own, so that an open page uses up no other requests.
        """
        caller = await self._authenticate(headers, local, allow_stale)
        (self._page_limiter if page else self._rate_limiter)._check(caller.client_id)
        return caller

    async def _authenticate(self, headers: Headers, local: bool, allow_stale: bool) -> Caller:
        authorization = dict(headers).get(b"authorization")
        scheme, _, presented = (authorization or b"").decode("latin-1").partition(" ")
        bearer = presented.strip() if scheme.lower() == "bearer" else ""
        if self._tokens is not None and bearer.count(".") == 2:  # a JWT; API keys have no dots
            return await self._caller_of_token(self._tokens, bearer)
        try:
            await self._refresh()
        except HttpError:
            if not allow_stale:
                raise
        if authorization is None:
            return self._anonymous_caller(headers, local)
        return self._caller_of_key(bearer)

    async def _caller_of_token(self, tokens: TokenVerifier, token: str) -> Caller:
        """Return the caller that a token states; a new client is created in the ledger."""
        identity = await tokens._verify(token)
        name = token_client_name(tokens.issuer, identity.subject)
        if name is None:
            raise HttpError(
                401, "The client that the token names must be 1 to 255 printable ASCII characters."
            )
        number = self._client_ids.get(name)
        if number is None:
            number = await _from_ledger(self._settings.timeout, self._ledger.client, name)
            if len(self._client_ids) >= _MAX_CLIENT_IDS:
                self._client_ids.clear()
            self._client_ids[name] = number
        return Caller(name, number, None, identity.admin, identity.expires)

    def _caller_of_key(self, token: str) -> Caller:
        key = find_key(self._keys, token.strip(), time.time_ns() // 1000)
        if key is None:
            raise HttpError(401, _INVALID_KEY)
        return Caller(key.client, key.client_id, key.id, admin=key.role == "admin")

    def _anonymous_caller(self, headers: Headers, local: bool) -> Caller:
        if self._anonymous is None:
            raise HttpError(401, "An API key is required: 'Authorization: Bearer qm_...'.")
        if _is_cross_site(headers):
            raise HttpError(403, "Anonymous access is not allowed from pages of other sites.")
        if not local:
            raise HttpError(403, "Anonymous access requires HTTP/1.1 from this machine.")
        if any(name in _PROXY_HEADERS or name.startswith(b"x-forwarded-") for name, _ in headers):
            raise HttpError(403, "Anonymous access is not allowed through a proxy.")
        host = dict(headers).get(b"host")
        if host is not None and not _is_loopback(_host_name(host.decode("latin-1"))):
            raise HttpError(403, "Anonymous access requires a loopback address as the Host header.")
        return self._anonymous

    async def _refresh(self) -> None:
        """Read the keys again if they are not fresh. Concurrent calls share one read."""
        if time.monotonic() - self._read_at <= _FRESH_SECONDS:
            return
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read_keys())
            self._reading.add_done_callback(self._finish_reading)
        try:
            await asyncio.wait_for(asyncio.shield(self._reading), self._settings.timeout)
        except (QuietmaxError, TimeoutError) as error:
            raise _ledger_error(error) from error

    def _finish_reading(self, task: asyncio.Task[None]) -> None:
        self._reading = None
        if not task.cancelled():
            task.exception()

    async def _read_keys(self) -> None:
        started = time.monotonic()
        keys = await asyncio.to_thread(self._ledger.keys)
        self._keys = {key.id: key for key in keys}
        self._read_at = started


def _is_cross_site(headers: Headers) -> bool:
    """Tell whether a page of another site has sent a request, as browsers state it."""
    values = dict(headers)
    origin, site = values.get(b"origin"), values.get(b"sec-fetch-site")
    return (site is not None and site not in (b"same-origin", b"none")) or (
        origin is not None and origin.partition(b"://")[2] != values.get(b"host")
    )


def _host_name(host: str) -> str:
    """Return a Host header without its port.

    >>> _host_name("[::1]:8080"), _host_name("localhost:8080")
    ('[::1]', 'localhost')
    """
    return host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]


REFRESH_SECONDS = 300.0
"""Age at which the issuer's keys are fetched again: how long a key that the issuer withdrew may still work."""
MAX_AGE_SECONDS = 3600.0
"""How long the last keys work while the issuer is unavailable."""
MIN_INTERVAL_SECONDS = 10.0
"""Least time between two fetches."""
LEEWAY_SECONDS = 30
"""Difference of clocks that is accepted for `exp`, `nbf` and `iat`."""
ALGORITHMS: dict[str, tuple[str, str | None]] = {
    **{f"{family}{bits}": ("RSA", None) for family in ("RS", "PS") for bits in (256, 384, 512)},
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
}
"""The algorithms that are allowed, each with the `kty` and `crv` of its keys. All are asymmetric."""
_FETCH_TIMEOUT = 5.0
_MAX_DOCUMENT_BYTES = 2**20
_MAX_TOKEN_LENGTH = 2**14
_SPACE_SEPARATED = ("scope", "scp")

_log = logging.getLogger(__name__)

Fetch = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Identity:
    """What a valid token states."""

    subject: str  # The client's name at the issuer
    admin: bool  # Whether the token states the administrator's claim
    expires: int  # When the token expires, with the leeway, in microseconds since 1970


class IssuerKeys:
    """The keys of an issuer, fetched when needed."""

    def __init__(
        self, issuer: str, fetch: Fetch | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._issuer = issuer
        self._fetch = fetch or _fetch_json
        self._clock = clock
        self._keys: list[dict[str, Any]] = []
        self._prepared: dict[tuple[str | None, str], jwt.PyJWK] = {}
        self._fetched_at = self._attempted_at = -float("inf")
        self._task: asyncio.Task[None] | None = None
        self._failing = False

    async def find(self, kid: str | None, algorithm: str, *, again: bool = False) -> jwt.PyJWK:
        """Return the key of a token; fetch the keys if they are old, it is unknown, or the one found was wrong."""
        if self._clock() - self._fetched_at >= REFRESH_SECONDS:
            await self._fetch_keys(wait=not (self._failing and self._usable))
        found = self._find(kid, algorithm)
        if (found is None or again) and self._usable:
            await self._fetch_keys(wait=True)
            found = self._find(kid, algorithm)
        if not self._usable or (found is None and self._failing):
            raise HttpError(503, "The keys of the token's issuer cannot be fetched. Nothing was charged.")
        if found is None:
            raise HttpError(401, "The token is signed with a key that its issuer does not publish.")
        return found

    @property
    def _usable(self) -> bool:
        return self._clock() - self._fetched_at < MAX_AGE_SECONDS

    def _find(self, kid: str | None, algorithm: str) -> jwt.PyJWK | None:
        prepared = self._prepared.get((kid, algorithm))
        if prepared is not None:
            return prepared
        fitting = [key for key in self._keys if _fits(key, kid, algorithm)]
        if len(fitting) != 1:
            return None
        try:
            found = jwt.PyJWK(fitting[0], algorithm)
        except jwt.PyJWTError:
            return None
        self._prepared[kid, algorithm] = found
        return found

    async def _fetch_keys(self, *, wait: bool) -> None:
        """Fetch the keys, at most once in the interval. Concurrent calls share one fetch."""
        if self._task is None:
            if self._clock() - self._attempted_at < MIN_INTERVAL_SECONDS:
                return
            self._attempted_at = self._clock()
            self._task = asyncio.ensure_future(self._fetch_once())
            self._task.add_done_callback(self._finish)
        if wait:
            await asyncio.shield(self._task)

    def _finish(self, _: asyncio.Task[None]) -> None:
        self._task = None

    async def _fetch_once(self) -> None:
        started = self._clock()
        try:
            keys = await asyncio.to_thread(self._read_keys)
        except Exception as error:  # whatever the issuer's documents make the parsers raise
            _log.warning(
                "The keys of the issuer %s cannot be fetched: %s: %s",
                self._issuer,
                type(error).__name__,
                error,
            )
            self._failing = True
            return
        self._failing = False
        self._fetched_at = started
        if keys != self._keys:
            self._keys, self._prepared = keys, {}

    def _read_keys(self) -> list[dict[str, Any]]:
        document = self._fetch(f"{self._issuer.rstrip('/')}/.well-known/openid-configuration")
        if document["issuer"] != self._issuer:
            raise QuietmaxError(f"The discovery document is of another issuer than {self._issuer}.")
        if not _is_private_url(document["jwks_uri"]):
            raise QuietmaxError("The discovery document must name an https address of the keys.")
        keys = self._fetch(document["jwks_uri"])["keys"]
        return [key for key in keys if isinstance(key, dict)]


class TokenVerifier:
    """Checks bearer tokens."""

    def __init__(self, settings: Settings, keys: IssuerKeys | None = None) -> None:
        if find_spec("jwt") is None:
            raise QuietmaxError("OIDC requires the package PyJWT. Install: pip install 'quietmax[oidc]'.")
        self.issuer = str(settings.oidc_issuer)
        self._settings = settings
        self._keys = keys or IssuerKeys(self.issuer)

    async def _verify(self, token: str) -> Identity:
        if len(token) > _MAX_TOKEN_LENGTH:
            raise HttpError(401, f"The token must have at most {_MAX_TOKEN_LENGTH} characters.")
        kid, algorithm = _header(token)
        key = await self._keys.find(kid, algorithm)
        try:
            try:
                claims = self._decode(token, key)
            except jwt.InvalidSignatureError:
                if kid is not None:
                    raise
                # Without a key id, a key that the issuer has replaced seems to fit.
                claims = self._decode(token, await self._keys.find(None, algorithm, again=True))
            return self._identity(claims)
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError, OverflowError) as error:
            raise HttpError(401, _reason(error)) from None

    def _decode(self, token: str, key: jwt.PyJWK) -> dict[str, Any]:
        """Check signature, issuer, audience and times of a token; return its claims."""
        claims: dict[str, Any] = jwt.decode(
            token,
            key,
            algorithms=list(ALGORITHMS),  # and only that which the key was found for
            audience=self._settings.oidc_audience,
            issuer=self.issuer,
            leeway=LEEWAY_SECONDS,
            options={"require": ["exp", "iss", "aud"], "enforce_minimum_key_length": True},
        )
        return claims

    def _identity(self, claims: dict[str, Any]) -> Identity:
        subject = _claim(claims, self._settings.oidc_client_claim)
        if not isinstance(subject, str):
            raise HttpError(401, "The token does not name a client.")
        expires = (int(claims["exp"]) + LEEWAY_SECONDS) * 1_000_000
        return Identity(subject, self._is_admin(claims), expires)

    def _is_admin(self, claims: dict[str, Any]) -> bool:
        name, wanted = self._settings.oidc_admin_claim, self._settings.oidc_admin_value
        if name is None:
            return False
        value = _claim(claims, name)
        if isinstance(value, str) and name in _SPACE_SEPARATED:
            value = value.split(" ")
        return wanted in value if isinstance(value, list) else value == wanted


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: keys come from the address that was checked."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _fetch_json(url: str) -> Any:
    """Return the JSON document at a URL, without redirects, within a few seconds and of at most 1 MiB."""
    handlers: list[urllib.request.BaseHandler] = [_NoRedirects()]
    if _is_loopback(urlsplit(url).hostname or ""):
        handlers.append(urllib.request.ProxyHandler({}))
    opener = urllib.request.build_opener(*handlers)
    deadline = time.monotonic() + _FETCH_TIMEOUT
    request = urllib.request.Request(url, headers={"accept": "application/json", "user-agent": "quietmax"})
    with opener.open(request, timeout=_FETCH_TIMEOUT) as response:
        return json.loads(_read(response, deadline))


def _read(response: IO[bytes], deadline: float) -> bytes:
    """Read a response to its end; raise if it is too long or too slow."""
    content = b""
    while part := response.read1(2**16):  # type: ignore[attr-defined]
        content += part
        if len(content) > _MAX_DOCUMENT_BYTES or time.monotonic() > deadline:
            raise QuietmaxError("The issuer's document is too long or arrives too slowly.")
    return content


def _fits(key: dict[str, Any], kid: str | None, algorithm: str) -> bool:
    """Tell whether a published key can verify a token with this key id and algorithm."""
    kty, crv = ALGORITHMS[algorithm]
    operations = key.get("key_ops")
    return (
        (kid is None or key.get("kid") == kid)
        and key.get("kty") == kty
        and (crv is None or key.get("crv") == crv)
        and key.get("alg", algorithm) == algorithm
        and key.get("use", "sig") == "sig"
        and (operations is None or (isinstance(operations, list) and "verify" in operations))
    )


def _header(token: str) -> tuple[str | None, str]:
    """Return key id and algorithm of a token whose signature is not checked yet."""
    try:
        header = jwt.get_unverified_header(token)
    except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
        raise HttpError(401, "The bearer token is neither an API key nor a valid JWT.") from None
    algorithm = header.get("alg")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise HttpError(401, f"The token must be signed with one of {', '.join(ALGORITHMS)}.")
    if "crit" in header:
        raise HttpError(401, "Tokens with critical header parameters are not supported.")
    return header.get("kid"), algorithm


def _claim(claims: dict[str, Any], name: str) -> Any:
    """Return a claim by its name, or by a path with dots such as ``realm_access.roles``."""
    if name in claims:
        return claims[name]
    value: Any = claims
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _reason(error: Exception) -> str:
    """Say why a token is not valid, without what it contains or what this service expects."""
    reasons: dict[type[Exception], str] = {
        jwt.ExpiredSignatureError: "The token has expired.",
        jwt.ImmatureSignatureError: "The token is not valid yet.",
        jwt.InvalidAudienceError: "The token was issued for another audience.",
        jwt.InvalidIssuerError: "The token was issued by another issuer.",
        jwt.MissingRequiredClaimError: "The token must have the claims exp, iss and aud.",
        jwt.InvalidSignatureError: "The signature of the token is wrong.",
    }
    return next(
        (reason for kind, reason in reasons.items() if isinstance(error, kind)), "The token is not valid."
    )


class RateLimiter:
    """Limits the requests of each client, by one number for each: when its last request would end at the full rate.

    A client whose time is past has its whole burst again and needs no memory. Of very many busy clients, the half that
    waited longest is forgotten, which only gives it its burst again.
    """

    def __init__(
        self, rate: float | None, burst: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = rate or math.inf  # None: no limit
        self._interval = 1 / self._rate
        self._tolerance = ((burst or max(math.floor(rate or 1), 1)) - 1) * self._interval
        self._clock = clock
        self._busy_until: dict[Hashable, float] = {}

    def _wait(self, client: Hashable) -> float:
        """Count a request; return 0 if it is within the limit, else the seconds until one would be."""
        now = self._clock()
        wait = self._busy_until.get(client, now) - now - self._tolerance
        if wait > 1e-9:
            return wait
        if len(self._busy_until) >= _MAX_CLIENT_IDS and client not in self._busy_until:
            self._forget(now)
        self._busy_until[client] = max(self._busy_until.get(client, now), now) + self._interval
        return 0.0

    def _check(self, client: Hashable) -> None:
        wait = 0.0 if self._rate == math.inf else self._wait(client)
        if wait > 0:
            raise HttpError(
                429,
                f"Too many requests: a client may send {self._rate:g} per second. Nothing was charged.",
                headers={"retry-after": str(math.ceil(wait))},
            )

    def _forget(self, now: float) -> None:
        """Forget the clients that have their burst again, or else the half that has it soonest."""
        busy = {client: until for client, until in self._busy_until.items() if until > now}
        if len(busy) >= _MAX_CLIENT_IDS:
            latest = sorted(busy, key=busy.__getitem__)[len(busy) // 2 :]
            busy = {client: busy[client] for client in latest}
        self._busy_until = busy
