"""An OpenID Connect issuer with only what a resource server reads: a discovery document and keys, on a real port."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import get_default_algorithms

AUDIENCE = "quietmax-test"
_CURVES: dict[str, ec.EllipticCurve] = {
    "ES256": ec.SECP256R1(),
    "ES384": ec.SECP384R1(),
    "ES512": ec.SECP521R1(),
}


class TokenIssuer:
    """Signs tokens with its keys and publishes them; `requests` are the paths that were fetched."""

    def __init__(self, url: str = "https://login.example.org") -> None:
        self.url = url
        self.keys: dict[str, tuple[str, Any]] = {}
        self.requests: list[str] = []
        self.documents: dict[str, Any] = {}
        self.down = False

    def add_key(self, kid: str, algorithm: str = "ES256", bits: int = 2048) -> None:
        private: Any
        if algorithm == "EdDSA":
            private = ed25519.Ed25519PrivateKey.generate()
        elif algorithm in _CURVES:
            private = ec.generate_private_key(_CURVES[algorithm])
        else:
            private = rsa.generate_private_key(65537, bits)
        self.keys[kid] = (algorithm, private)

    def public_keys(self) -> list[dict[str, Any]]:
        return [
            {
                **json.loads(get_default_algorithms()[algorithm].to_jwk(private.public_key())),
                "kid": kid,
                "use": "sig",
            }
            for kid, (algorithm, private) in self.keys.items()
        ]

    def token(
        self,
        kid: str,
        claims: dict[str, Any] | None = None,
        headers: dict[str, Any] | None = None,
        **sign: Any,
    ) -> str:
        algorithm, private = self.keys[kid]
        content = {"iss": self.url, "aud": AUDIENCE, "sub": "ann", "exp": time.time() + 600, **(claims or {})}
        content = {name: value for name, value in content.items() if value is not None}
        return jwt.encode(
            content,
            sign.get("key", private),
            sign.get("algorithm", algorithm),
            {"kid": kid, **(headers or {})},
        )

    def fetch(self, url: str) -> Any:
        """Return a document as the service would fetch it, without a network."""
        path = url.removeprefix(self.url)
        self.requests.append(path)
        if self.down:
            raise OSError("Connection refused")
        return self.document(path)

    def document(self, path: str) -> Any:
        if path in self.documents:
            return self.documents[path]
        if path == "/.well-known/openid-configuration":
            return {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}
        assert path == "/keys", path
        return {"keys": self.public_keys()}


@contextmanager
def serving(issuer: TokenIssuer, port: int = 0) -> Iterator[TokenIssuer]:
    """Serve the documents of an issuer on a port of this machine; its URL changes to that port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            issuer.requests.append(self.path)
            content = issuer.document(self.path)
            if isinstance(content, int):  # a redirect
                self.send_response(content)
                self.send_header("location", f"{issuer.url}/keys")
                self.end_headers()
                return
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    issuer.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield issuer
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
