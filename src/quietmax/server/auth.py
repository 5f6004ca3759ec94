"""Authentication: API keys and tokens in the Authorization header, sessions of the dashboard, anonymous access.

API keys are read from the ledger and kept for a second, so that a revoked key stops working within that time; a charge
checks its key once more in its own transaction, or the expiry of its token. A session is a signed statement of a key's
id, an id of its own and an end; no cookie holds the key itself. The signature covers the hash of the key and needs a
secret that is not in the ledger, so that a copy of the ledger signs nothing. A session that was closed is listed in the
ledger until it expires.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import math
import secrets
import time
from dataclasses import dataclass

from starlette.types import Scope

from quietmax.errors import QuietmaxError
from quietmax.ledger.accounts import ApiKey, find_key, token_client_name
from quietmax.ledger.ledger import Ledger
from quietmax.server.errors import HttpError, ledger_error, unauthorized
from quietmax.server.rate_limit import RateLimiter
from quietmax.server.settings import ANONYMOUS, OidcSettings, Settings, is_loopback

Headers = list[tuple[bytes, bytes]]
SESSION_SECONDS = 8 * 3600
_FRESH_SECONDS = 1.0
_MAX_CLIENT_IDS = 65_536
_PROXY_HEADERS = (b"forwarded", b"via", b"x-real-ip", b"x-client-ip", b"cf-connecting-ip", b"true-client-ip")
_INVALID_KEY = "The API key is wrong, revoked or expired."
_MICROSECONDS = 1_000_000
_FAILED_LOGIN_RATE, _FAILED_LOGIN_BURST = 0.2, 10
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


@dataclass(frozen=True, slots=True)
class _Session:
    """A session of the dashboard: its id, its key, and its end in seconds since 1970."""

    id: str
    key: ApiKey
    end: int


class Authenticator:
    """Finds out who sends a request."""

    def __init__(self, ledger: Ledger, settings: Settings) -> None:
        self._ledger = ledger
        self._settings = settings
        self._keys: dict[str, ApiKey] = {}
        self._ended_sessions: frozenset[str] = frozenset()
        self._ended_here: set[str] = set()  # those that a read in flight may not have seen
        self._read_at = -_FRESH_SECONDS
        self._reading: asyncio.Task[None] | None = None
        self._rate_limiter = (
            None if settings.rate_limit is None else RateLimiter(settings.rate_limit, settings.rate_burst)
        )
        self._page_limiter = (
            None
            if settings.rate_limit is None
            else RateLimiter(max(settings.rate_limit, _PAGE_RATE), max(settings.rate_burst or 0, _PAGE_BURST))
        )
        self._failed_logins = RateLimiter(_FAILED_LOGIN_RATE, _FAILED_LOGIN_BURST)
        self._tokens = (
            None if settings.oidc is None else _TokenCallers(settings.oidc, ledger, settings.timeout)
        )
        self._anonymous = (
            Caller(ANONYMOUS, ledger.client(ANONYMOUS), None, admin=False) if settings.anonymous else None
        )

    async def authenticate(
        self, headers: Headers, *, local: bool = False, allow_stale: bool = False
    ) -> Caller:
        """Return the caller of an API request, and count it against the client's rate limit."""
        caller = await self._authenticate(headers, local, allow_stale)
        self.check_rate(caller)
        return caller

    def check_rate(self, caller: Caller) -> None:
        """Count a request against the rate limit of a client."""
        if self._rate_limiter is not None:
            self._rate_limiter.check(caller.client_id)

    def check_page_rate(self, caller: Caller) -> None:
        """Count a request of the page against a limit of its own, so that an open page uses up no other requests."""
        if self._page_limiter is not None:
            self._page_limiter.check(caller.client_id)

    async def _authenticate(self, headers: Headers, local: bool, allow_stale: bool) -> Caller:
        authorization = dict(headers).get(b"authorization")
        scheme, _, presented = (authorization or b"").decode("latin-1").partition(" ")
        bearer = presented.strip() if scheme.lower() == "bearer" else ""
        if self._tokens is not None and bearer.count(".") == 2:  # a JWT; API keys have no dots
            return await self._tokens.caller(bearer)
        try:
            await self._refresh()
        except HttpError:
            if not allow_stale:
                raise
        if authorization is None:
            return self._anonymous_caller(headers, local)
        return self._caller_of_key(bearer)

    def check_login(self, address: str | None) -> None:
        """Raise if too many logins from an address have failed."""
        wait = self._failed_logins.remaining_wait(_network(address))
        if wait:
            raise HttpError(
                429,
                "Too many logins from this address have failed.",
                headers={"retry-after": str(math.ceil(wait))},
            )

    async def login(self, key: str, address: str | None = None) -> tuple[str, Caller]:
        """Open a session."""
        self.check_login(address)
        await self._refresh(force=True)
        try:
            caller = self._caller_of_key(key)
        except HttpError:
            self._failed_logins.wait(_network(address))
            raise
        self.check_page_rate(caller)
        content = f"{caller.key}.{secrets.token_hex(16)}.{int(time.time()) + SESSION_SECONDS}"
        return f"{content}.{self._signature(content, self._keys[str(caller.key)])}", caller

    async def logout(self, cookie: str | None) -> None:
        """Close a session, for all processes that share the ledger."""
        await self._refresh()
        session = self._session(cookie)
        if session is None:
            return
        self.check_page_rate(_caller(session.key))
        self._ended_here.add(session.id)
        try:
            await asyncio.wait_for(
                asyncio.to_thread(self._ledger.end_session, session.id, session.end * _MICROSECONDS),
                self._settings.timeout,
            )
        except (QuietmaxError, TimeoutError) as error:
            raise ledger_error(error) from error

    async def authenticate_session(
        self, cookie: str | None, headers: Headers, *, local: bool = False
    ) -> Caller | None:
        """Return the caller of a dashboard request."""
        await self._refresh()
        session = self._session(cookie)
        if session is not None:
            return _caller(session.key)
        return None if self._anonymous is None else self._anonymous_caller(headers, local)

    def _session(self, cookie: str | None) -> _Session | None:
        """Return the session of a cookie, if it is genuine, open and of a valid key."""
        content, _, signature = (cookie or "").rpartition(".")
        key_id, _, rest = content.partition(".")
        session_id, _, end = rest.partition(".")
        key = self._keys.get(key_id)
        if key is None or not hmac.compare_digest(signature.encode(), self._signature(content, key).encode()):
            return None
        session = _Session(session_id, key, int(end))
        if session.end <= time.time() or session.id in self._ended_sessions | self._ended_here:
            return None
        return session if key.is_valid(time.time_ns() // 1000) else None

    def _caller_of_key(self, token: str) -> Caller:
        key = find_key(self._keys, token.strip(), time.time_ns() // 1000)
        if key is None:
            raise unauthorized(_INVALID_KEY)
        return _caller(key)

    def _anonymous_caller(self, headers: Headers, local: bool) -> Caller:
        if self._anonymous is None:
            raise unauthorized("An API key is required: 'Authorization: Bearer qm_...'.")
        if is_cross_site(headers):
            raise HttpError(403, "Anonymous access is not allowed from pages of other sites.")
        if not local:
            raise HttpError(403, "Anonymous access requires HTTP/1.1 from this machine.")
        if any(name in _PROXY_HEADERS or name.startswith(b"x-forwarded-") for name, _ in headers):
            raise HttpError(403, "Anonymous access is not allowed through a proxy.")
        host = dict(headers).get(b"host")
        if host is not None and not is_loopback(_host_name(host.decode("latin-1"))):
            raise HttpError(403, "Anonymous access requires a loopback address as the Host header.")
        return self._anonymous

    async def _refresh(self, *, force: bool = False) -> None:
        """Read the keys again if they are not fresh. Concurrent calls share one read."""
        if not force and time.monotonic() - self._read_at <= _FRESH_SECONDS:
            return
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read_keys())
            self._reading.add_done_callback(self._finish_reading)
        try:
            await asyncio.wait_for(asyncio.shield(self._reading), self._settings.timeout)
        except (QuietmaxError, TimeoutError) as error:
            raise ledger_error(error) from error

    def _finish_reading(self, task: asyncio.Task[None]) -> None:
        self._reading = None
        if not task.cancelled():
            task.exception()

    async def _read_keys(self) -> None:
        started = time.monotonic()
        keys, ended = await asyncio.to_thread(lambda: (self._ledger.keys(), self._ledger.ended_sessions()))
        self._keys = {key.id: key for key in keys}
        self._ended_sessions = ended
        self._ended_here -= ended
        self._read_at = started

    def _signature(self, content: str, key: ApiKey) -> str:
        signed = f"{content}.{key.secret_hash}".encode()
        return hmac.new(self._settings.session_secret, signed, hashlib.sha256).hexdigest()


class _TokenCallers:
    """The clients of an identity provider, and their ids in the ledger."""

    def __init__(self, settings: OidcSettings, ledger: Ledger, timeout: float) -> None:
        from quietmax.server.oidc import TokenVerifier  # an optional dependency

        self._issuer = settings.issuer
        self._verifier = TokenVerifier(settings)
        self._ledger = ledger
        self._timeout = timeout
        self._client_ids: dict[str, int] = {}

    async def caller(self, token: str) -> Caller:
        """Return the caller that a token states; a new client is created in the ledger."""
        identity = await self._verifier.verify(token)
        name = token_client_name(self._issuer, identity.subject)
        if name is None:
            raise unauthorized("The client that the token names must be 1 to 255 printable ASCII characters.")
        number = self._client_ids.get(name)
        if number is None:
            number = await self._read_id(name)
            if len(self._client_ids) >= _MAX_CLIENT_IDS:
                del self._client_ids[next(iter(self._client_ids))]
            self._client_ids[name] = number
        return Caller(name, number, None, identity.admin, identity.expires)

    async def _read_id(self, name: str) -> int:
        try:
            return await asyncio.wait_for(asyncio.to_thread(self._ledger.client, name), self._timeout)
        except (QuietmaxError, TimeoutError) as error:
            raise ledger_error(error) from error


def is_local(scope: Scope) -> bool:
    """Tell whether a request comes from this machine, as far as that can be known.

    HTTP/1.0 and requests without a Host do not count: proxies send them, and local clients do not. A proxy on this
    machine that speaks HTTP/1.1 and adds no header cannot be told from a local client.
    """
    client = scope.get("client")
    return (
        client is not None
        and is_loopback(client[0])
        and scope.get("http_version") == "1.1"
        and b"host" in dict(scope["headers"])
    )


def is_cross_site(headers: Headers) -> bool:
    """Tell whether a page of another site has sent a request, as browsers state it."""
    values = dict(headers)
    origin, site = values.get(b"origin"), values.get(b"sec-fetch-site")
    return (site is not None and site not in (b"same-origin", b"none")) or (
        origin is not None and origin.partition(b"://")[2] != values.get(b"host")
    )


def _network(address: str | None) -> str | None:
    """Return the address, or for IPv6 the network that belongs to one customer.

    >>> _network("192.0.2.7"), _network("2001:db8::1:2"), _network(None)
    ('192.0.2.7', '2001:db8::/64', None)
    """
    if address is None or ":" not in address:
        return address
    return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))


def _caller(key: ApiKey) -> Caller:
    return Caller(key.client, key.client_id, key.id, admin=key.role == "admin")


def _host_name(host: str) -> str:
    """Return a Host header without its port.

    >>> _host_name("[::1]:8080"), _host_name("localhost:8080")
    ('[::1]', 'localhost')
    """
    return host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
