"""Health check of the image: ask the service of this container whether it is ready.

Port, address and TLS are those of the running service, however they were set: on its command line, by environment
variables or in the file of --config.
"""

from __future__ import annotations

import ssl
import sys
import urllib.request
from pathlib import Path

from quietmax.cli import load_command

_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # listens on all; the check asks on loopback


def url_of(command_line: list[str]) -> str:
    """Return the URL of the readiness of the service that a command line starts, in this environment."""
    options = command_line[command_line.index("serve") + 1 :]
    set_to = load_command("serve").make_context("serve", options).params
    scheme = "http" if set_to["tls_certificate"] is None else "https"
    host = _ANY_ADDRESS.get(set_to["host"], set_to["host"])
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{set_to['port']}/v2/health/ready"


def main(process: int = 1) -> None:
    """Ask; an error ends the program with another exit code than 0."""
    command_line = Path(f"/proc/{process}/cmdline").read_text().split("\0")[:-1]
    context = ssl.create_default_context()
    context.check_hostname = False  # the certificate names the service as clients know it, not this address
    context.verify_mode = ssl.CERT_NONE
    handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    urllib.request.build_opener(*handlers).open(url_of(command_line), timeout=2)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
