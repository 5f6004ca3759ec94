"""Bearer tokens of an OpenID Connect issuer: signed JWTs, checked against the keys that the issuer publishes.

Keys come only from the issuer's discovery document, never from what a token names (`jku`, `x5u`, `jwk`). They are
fetched again when they are five minutes old, and at most every ten seconds for a token whose key is unknown, so that
forged tokens cannot make the service flood the issuer. While the issuer is unavailable, the last keys work for an
hour; then tokens get 503.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any
from urllib.parse import urlsplit

from quietmax.errors import QuietmaxError
from quietmax.server.errors import unauthorized, unavailable
from quietmax.server.settings import OidcSettings, is_loopback, is_private_url

try:
    import jwt
except ModuleNotFoundError as error:  # pragma: no cover - depends on what is installed
    raise QuietmaxError("OIDC requires the package PyJWT. Install: pip install 'quietmax[oidc]'.") from error

REFRESH_SECONDS = 300.0
"""Age at which the issuer's keys are fetched again: how long a key that the issuer withdrew may still work."""
MAX_AGE_SECONDS = 3600.0
"""How long the last keys work while the issuer is unavailable."""
MIN_INTERVAL_SECONDS = 10.0
"""Least time between two fetches."""
LEEWAY_SECONDS = 30
"""Difference of clocks that is accepted for `exp`, `nbf` and `iat`."""
ALGORITHMS = {
    "RS256": ("RSA", None),
    "RS384": ("RSA", None),
    "RS512": ("RSA", None),
    "PS256": ("RSA", None),
    "PS384": ("RSA", None),
    "PS512": ("RSA", None),
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
}
"""The algorithms that are allowed, each with the `kty` and `crv` of its keys. All are asymmetric."""
_FETCH_TIMEOUT = 5.0
_MAX_DOCUMENT_BYTES = 2**20
_MAX_TOKEN_LENGTH = 2**14
_MAX_VERIFIED = 4096
_SPACE_SEPARATED = ("scope", "scp")

_log = logging.getLogger(__name__)

Fetch = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Identity:
    """What a valid token states.

    Parameters
    ----------
    subject : str
        The client's name at the issuer.
    admin : bool
        Whether the token states the administrator's claim.
    expires : int
        When the token expires, with the leeway, in microseconds since 1970.
    """

    subject: str
    admin: bool
    expires: int


class IssuerKeys:
    """The keys of an issuer, fetched when needed."""

    def __init__(
        self, issuer: str, fetch: Fetch | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._issuer = issuer
        self._fetch = fetch or fetch_json
        self._clock = clock
        self._keys: list[dict[str, Any]] = []
        self._prepared: dict[tuple[str | None, str], jwt.PyJWK] = {}
        self._fetched_at = self._attempted_at = -float("inf")
        self._task: asyncio.Task[None] | None = None
        self._failing = False
        self.generation = 0

    async def refresh(self) -> None:
        """Fetch the keys if they are old."""
        if self._clock() - self._fetched_at < REFRESH_SECONDS:
            return
        await self._fetch_keys(wait=not (self._failing and self._usable))
        if not self._usable:
            raise unavailable("The keys of the token's issuer cannot be fetched. Nothing was charged.")

    async def find(self, kid: str | None, algorithm: str) -> jwt.PyJWK:
        """Return the key of a token; fetch the keys if it is unknown."""
        found = self._find(kid, algorithm)
        if found is None:
            await self._fetch_keys(wait=True)
            found = self._find(kid, algorithm)
        if found is None and self._failing:
            raise unavailable("The keys of the token's issuer cannot be fetched. Nothing was charged.")
        if found is None:
            raise unauthorized("The token is signed with a key that its issuer does not publish.")
        return found

    async def fetch_again(self) -> bool:
        """Fetch the keys, if the last fetch is long enough ago; return whether they have changed."""
        before = self.generation
        await self._fetch_keys(wait=True)
        return self.generation != before

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
            self._keys = keys
            self._prepared = {}
            self.generation += 1

    def _read_keys(self) -> list[dict[str, Any]]:
        document = self._fetch(f"{self._issuer.rstrip('/')}/.well-known/openid-configuration")
        if document["issuer"] != self._issuer:
            raise QuietmaxError(f"The discovery document is of another issuer than {self._issuer}.")
        if not is_private_url(document["jwks_uri"]):
            raise QuietmaxError("The discovery document must name an https address of the keys.")
        keys = self._fetch(document["jwks_uri"])["keys"]
        return [key for key in keys if isinstance(key, dict)]


class TokenVerifier:
    """Checks bearer tokens. Tokens that were found valid are remembered by their digest."""

    def __init__(self, settings: OidcSettings, keys: IssuerKeys | None = None) -> None:
        self._settings = settings
        self._keys = keys or IssuerKeys(settings.issuer)
        self._verified: dict[bytes, Identity] = {}
        self._generation = 0

    async def verify(self, token: str) -> Identity:
        """Return what a token states, if it is valid."""
        if len(token) > _MAX_TOKEN_LENGTH:
            raise unauthorized(f"The token must have at most {_MAX_TOKEN_LENGTH} characters.")
        await self._keys.refresh()
        if self._generation != self._keys.generation:
            self._verified.clear()
            self._generation = self._keys.generation
        digest = hashlib.sha256(token.encode()).digest()
        identity = self._verified.get(digest)
        if identity is None:
            identity = self._identity(await self._claims(token))
            if self._generation == self._keys.generation:
                if len(self._verified) >= _MAX_VERIFIED:
                    del self._verified[next(iter(self._verified))]
                self._verified[digest] = identity
        if identity.expires <= time.time_ns() // 1000:
            raise unauthorized("The token has expired.")
        return identity

    async def _claims(self, token: str) -> dict[str, Any]:
        kid, algorithm = _header(token)
        key = await self._keys.find(kid, algorithm)
        try:
            try:
                return self._decode(token, key)
            except jwt.InvalidSignatureError:
                # Without a key id, a new key shows only by its signatures.
                if kid is not None or not await self._keys.fetch_again():
                    raise
                return self._decode(token, await self._keys.find(kid, algorithm))
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError, OverflowError) as error:
            raise unauthorized(_reason(error)) from None

    def _decode(self, token: str, key: jwt.PyJWK) -> dict[str, Any]:
        """Check signature, issuer, audience and times of a token; return its claims."""
        claims: dict[str, Any] = jwt.decode(
            token,
            key,
            algorithms=list(ALGORITHMS),  # and only that which the key was found for
            audience=self._settings.audience,
            issuer=self._settings.issuer,
            leeway=LEEWAY_SECONDS,
            options={"require": ["exp", "iss", "aud"], "enforce_minimum_key_length": True},
        )
        return claims

    def _identity(self, claims: dict[str, Any]) -> Identity:
        subject = _claim(claims, self._settings.client_claim)
        if not isinstance(subject, str):
            raise unauthorized("The token does not name a client.")
        expires = (int(claims["exp"]) + LEEWAY_SECONDS) * 1_000_000
        return Identity(subject, self._is_admin(claims), expires)

    def _is_admin(self, claims: dict[str, Any]) -> bool:
        name, wanted = self._settings.admin_claim, self._settings.admin_value
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


def fetch_json(url: str) -> Any:
    """Return the JSON document at a URL, without redirects, within a few seconds and of at most 1 MiB."""
    handlers: list[urllib.request.BaseHandler] = [_NoRedirects()]
    if is_loopback(urlsplit(url).hostname or ""):
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
        raise unauthorized("The bearer token is neither an API key nor a valid JWT.") from None
    algorithm = header.get("alg")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise unauthorized(f"The token must be signed with one of {', '.join(ALGORITHMS)}.")
    if "crit" in header:
        raise unauthorized("Tokens with critical header parameters are not supported.")
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
    reasons: list[tuple[type[Exception], str]] = [
        (jwt.ExpiredSignatureError, "The token has expired."),
        (jwt.ImmatureSignatureError, "The token is not valid yet."),
        (jwt.InvalidAudienceError, "The token was issued for another audience."),
        (jwt.InvalidIssuerError, "The token was issued by another issuer."),
        (jwt.MissingRequiredClaimError, "The token must have the claims exp, iss and aud."),
        (jwt.InvalidSignatureError, "The signature of the token is wrong."),
    ]
    for kind, reason in reasons:
        if isinstance(error, kind):
            return reason
    return "The token is not valid."
