"""Signed bundles: the SHA-256 of every file of a model folder, signed with Ed25519, and the signatures of witnesses.

A signed entry is a JSON object with `content` (JSON as text: the signature is over these very bytes), `public_key` and
`signature`. `docs/specification.md` describes it; `verify/verify.py` checks it without Quietmax.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quietmax._io import atomic_write
from quietmax.errors import DataUnavailable, InvalidInput, QuietmaxError
from quietmax.models.serialization import read_description
from quietmax.spending import ACCOUNT_FILE, ACCOUNT_ID, MOVED_FILE, FileAccount

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def signing_key(path: Path) -> Ed25519PrivateKey:
    """Read an Ed25519 key from a PEM file; if there is none, one is created that is by its owner only."""
    from cryptography.hazmat.primitives import serialization as pem
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        if not path.exists():
            plain = pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption()
            text = Ed25519PrivateKey.generate().private_bytes(*plain)
            with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(text)
        key = pem.load_pem_private_key(path.read_bytes(), None)
    except OSError as problem:
        raise QuietmaxError(f"The key {path} cannot be read or written ({problem.strerror}).") from problem
    except (TypeError, ValueError) as problem:
        raise InvalidInput(
            f"The key {path} must be an Ed25519 key in a PEM file without a password."
        ) from problem
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidInput(f"The key {path} must be an Ed25519 key.")
    return key


def signed(content: Mapping[str, Any], key: Ed25519PrivateKey) -> dict[str, str]:
    """Return a signed entry."""
    text = json.dumps(content, sort_keys=True)
    public = key.public_key().public_bytes_raw().hex()
    return {"content": text, "public_key": public, "signature": key.sign(text.encode()).hex()}


def write_bundle(folder: Path, key: Path, output: Path) -> dict[str, str]:
    """Sign the files of a model folder. The count of paid answers may grow, so it is stated beside them."""
    description = read_description(folder)
    if output.resolve().parent == folder.resolve():
        raise InvalidInput("`output` must be outside of the model folder, whose files it signs.")
    if key.resolve().parent == folder.resolve():
        raise InvalidInput("`key` must be outside of the model folder, which may be published.")
    if not output.resolve().parent.is_dir():
        raise QuietmaxError(f"The bundle cannot be written to {output} (there is no such folder).")
    account = folder / ACCOUNT_FILE
    paid = ACCOUNT_ID in description
    try:
        files = {
            each.name: hashlib.sha256(each.read_bytes()).hexdigest()
            for each in sorted(folder.iterdir())
            if each.name not in (ACCOUNT_FILE, MOVED_FILE)
        }
    except OSError as problem:
        raise DataUnavailable(f"The model in {folder} cannot be read ({problem.strerror}).") from problem
    answered = FileAccount(account, identity=description[ACCOUNT_ID]).answered if paid else None
    entry = signed({"format": "quietmax bundle", "files": files, "answered": answered}, signing_key(key))
    try:
        atomic_write(output, lambda staging: staging.write_text(json.dumps(entry) + "\n", encoding="utf-8"))
    except OSError as problem:
        raise QuietmaxError(f"The bundle cannot be written to {output} ({problem.strerror}).") from problem
    return entry
