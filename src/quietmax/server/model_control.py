"""Models that are loaded and unloaded while the service runs, in all its worker processes.

One file, shared by the workers, says which version of which model they serve. The worker that gets a request to load a
model reads the folder, binds it to its account (which charges its training once), and writes the file. The others
follow within a fraction of a second, each from the same folder, and confirm. A worker that was restarted begins with
the file. A model that cannot be loaded changes nothing. A worker that cannot follow keeps what it has and tries again.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quietmax._io import atomic_write
from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.ledger.ledger import Ledger
from quietmax.server.deployment import Deployment
from quietmax.server.errors import HttpError, unavailable

if TYPE_CHECKING:
    from quietmax.server.repository import ModelRepository

_CONFIRM_TIMEOUT = 60.0
_POLL_SECONDS = 0.05
_MAX_RETRY_SECONDS = 60.0

Load = Callable[[str], Deployment]
"""Reads ``NAME/VERSION=FOLDER``."""
Bind = Callable[[Ledger, Iterable[Deployment]], list[Deployment]]
"""Binds models to their accounts, as `deploy` does."""


@dataclass(frozen=True)
class LoadedVersion:
    """The version of a model that all workers serve."""

    version: str  # The version
    digest: str  # Digest of the deployment, in hexadecimal digits: every worker must have read the same files
    signature: str  # Changes when the files of the folder change; see `ModelRepository.signature`


@dataclass(frozen=True)
class DesiredModels:
    """What all workers of a service should serve."""

    revision: int  # Grows with every change
    models: dict[str, LoadedVersion | None]  # The models of the repository by name. None: unloaded on request


class SharedState:
    """The desired models, and who has confirmed them, in a folder that all workers of a service share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "models.json"
        self.write(DesiredModels(0, {}))

    def read(self) -> DesiredModels:
        """Read the desired models."""
        document = json.loads(self._file.read_text(encoding="utf-8"))
        models = {
            name: None if version is None else LoadedVersion(**version)
            for name, version in document["models"].items()
        }
        return DesiredModels(document["revision"], models)

    def marker(self) -> tuple[int, int]:
        """Return numbers that change when the file is written; much cheaper than to read it."""
        state = self._file.stat()
        return state.st_ino, state.st_mtime_ns

    def write(self, desired: DesiredModels) -> None:
        """Replace the desired models."""
        models = {
            name: None if version is None else vars(version) for name, version in desired.models.items()
        }
        text = json.dumps({"revision": desired.revision, "models": models})
        atomic_write(self._file, lambda staging: staging.write_text(text, encoding="utf-8"))

    def confirm(self, revision: int, errors: Mapping[str, str]) -> None:
        """Say that this process serves a revision."""
        text = json.dumps({"revision": revision, "errors": dict(errors)})
        file = self._folder / f"worker-{os.getpid()}"
        atomic_write(file, lambda staging: staging.write_text(text, encoding="utf-8"))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Let only one process at a time change the models; the lock of a killed process is free at once."""
        with (self._folder / "lock").open("w") as file:
            until = time.monotonic() + _CONFIRM_TIMEOUT
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise unavailable("Another change of the models is in progress.") from None
                    time.sleep(_POLL_SECONDS)
                else:
                    break
            yield

    def wait(self, revision: int, name: str) -> tuple[int, int, str | None]:
        """Wait until all workers have confirmed a revision."""
        until = time.monotonic() + _CONFIRM_TIMEOUT
        while True:
            found = self._confirmations()
            reached = [each for each in found if each["revision"] >= revision]
            if len(reached) == len(found) or time.monotonic() > until:
                failures = [each["errors"][name] for each in reached if name in each["errors"]]
                return len(reached) - len(failures), len(found), failures[0] if failures else None
            time.sleep(_POLL_SECONDS)

    def _confirmations(self) -> list[dict[str, Any]]:
        """What each worker that lives has confirmed."""
        found = []
        for file in self._folder.glob("worker-*"):
            try:
                os.kill(int(file.name.removeprefix("worker-")), 0)
                found.append(json.loads(file.read_text(encoding="utf-8")))
            except (ProcessLookupError, FileNotFoundError):
                file.unlink(missing_ok=True)
        return found


class ModelControl:
    """Loads and unloads the models of a repository. Created before the workers are started, used in each of them."""

    def __init__(
        self,
        repository: ModelRepository,
        state: SharedState,
        load: Load,
        bind: Bind,
        reserved: Iterable[str] = (),
    ) -> None:
        self._repository = repository
        self._state = state
        self._load = load
        self._bind = bind
        self._reserved = frozenset(reserved)
        self._changing = threading.Lock()
        self._errors: dict[str, str] = {}
        self._failed: dict[str, str] = {}
        self._failures = 0
        self._retry_at = math.inf
        self._seen = (0, 0)
        read = {name: self._read_highest(name) for name in repository.names()}
        self._models = {name: deployment for name, (deployment, _) in read.items()}
        self._desired = DesiredModels(1, {name: version for name, (_, version) in read.items()})
        state.write(self._desired)

    def start(self) -> list[Deployment]:
        """Return the models that this process serves first, without accounts.

        A model that was loaded by another process is read from its folder. If that fails, the model is left out, and
        `follow` tries again.
        """
        desired = self._state.read()
        followed = list(self._follow(desired))
        self._models = {name: model for name, model, _ in followed if model is not None}
        self._note_failures({name: error for name, _, error in followed if error is not None})
        self._desired = desired
        return list(self._models.values())

    def serve(self, ledger: Ledger, deployments: Iterable[Deployment], use: Callable[[], None]) -> None:
        """Begin to follow what other workers load."""
        self._ledger = ledger
        self._use = use
        self._models = {each.name: each for each in deployments if each.name in self._models}

    def confirm(self) -> None:
        """Say that this process now answers requests, and that others must wait for it when they change the models."""
        self._confirm(self._desired)

    @property
    def is_behind(self) -> bool:
        """Whether `follow` should be called: another worker has changed the models, or it is time to try again."""
        return self._state.marker() != self._seen or time.monotonic() >= self._retry_at

    @property
    def deployments(self) -> list[Deployment]:
        """The models of the repository that this process serves."""
        return list(self._models.values())

    def index(self) -> list[dict[str, str]]:
        """Describe every version in the repository: its name, version, state, and why it is not served."""
        served = {each.label for each in self.deployments}
        rows = []
        for name in self._repository.names():
            for version in self._repository.versions(name):
                ready = f"{name}/{version}" in served
                reason = "" if ready else self._errors.get(name, "not loaded")
                state = "READY" if ready else "UNAVAILABLE"
                rows.append({"name": name, "version": version, "state": state, "reason": reason})
        return rows

    def load(self, name: str) -> Deployment:
        """Serve the highest version of a model in all workers. The version before it goes once this one is ready."""
        self._check_name(name)
        with self._change() as desired:
            bound, version = self._read_and_bind(name)
            self._publish(desired, name, bound, version)
        self._wait(name, f"The model {bound.label} was loaded")
        return bound

    def unload(self, name: str) -> None:
        """Stop serving a model in all workers. What it has cost stays charged."""
        with self._change() as desired:
            if name not in desired.models:
                self._check_name(name)
            self._publish(desired, name, None, None)
        self._wait(name, f"The model {name} was unloaded")

    def reload(self) -> tuple[list[str], dict[str, str]]:
        """Load what is new in the repository: models, versions and changed folders. Unloaded models stay unloaded."""
        loaded, failed = [], {}
        for name in self._repository.names():
            try:
                with self._change() as desired:
                    if not self._is_new(name, desired):
                        continue
                    bound, version = self._read_and_bind(name)
                    self._publish(desired, name, bound, version)
                loaded.append(bound.label)
            except QuietmaxError as error:
                failed[name] = str(error)
        return loaded, failed

    def follow(self) -> list[str]:
        """Serve what another worker has loaded or unloaded; return what failed.

        A model that cannot be loaded here stays as it was, and is tried again after 2, 4, 8, ... seconds.
        """
        with self._changing:
            seen = self._state.marker()
            desired = self._state.read()
            failed = []
            if self._failed or desired.revision != self._desired.revision:
                failed = self._catch_up(desired)
            self._seen = seen
            return failed

    def _is_new(self, name: str, desired: DesiredModels) -> bool:
        if name in self._reserved or (name in desired.models and desired.models[name] is None):
            return False
        version = self._repository.versions(name)[-1]
        current = desired.models.get(name)
        return current is None or (current.version, current.signature) != (
            version,
            self._repository.signature(name, version),
        )

    def _check_name(self, name: str) -> None:
        if name in self._reserved:
            raise InvalidInput(
                f"The model {name} was named at the start, so it is not loaded from the repository."
            )
        if not self._repository.versions(name):
            raise HttpError(
                404, "The model repository has no such model. POST /v2/repository/index lists all."
            )

    @contextmanager
    def _change(self) -> Iterator[DesiredModels]:
        """Let nobody else change the models, here or in another worker, and begin with what they have changed."""
        with self._state.lock(), self._changing:
            desired = self._state.read()
            if desired.revision != self._desired.revision:
                self._catch_up(desired)
            yield desired

    def _publish(
        self, desired: DesiredModels, name: str, bound: Deployment | None, version: LoadedVersion | None
    ) -> None:
        """Serve a model here, or none of its name, and tell the other workers."""
        self._errors.pop(name, None)
        self._note_failures({known: error for known, error in self._failed.items() if known != name})
        models = {known: model for known, model in self._models.items() if known != name}
        self._models = models if bound is None else {**models, name: bound}
        self._desired = DesiredModels(desired.revision + 1, {**desired.models, name: version})
        self._use()
        self._state.write(self._desired)
        self._confirm(self._desired)

    def _wait(self, name: str, done: str) -> None:
        confirmed, workers, error = self._state.wait(self._desired.revision, name)
        if error is not None:
            raise unavailable(f"{done} by {confirmed} of {workers} workers; the others try again: {error}")
        if confirmed < workers:
            raise unavailable(
                f"{done} by {confirmed} of {workers} workers; the others have not confirmed it within "
                f"{_CONFIRM_TIMEOUT:g} seconds."
            )

    def _catch_up(self, desired: DesiredModels) -> list[str]:
        models: dict[str, Deployment] = {}
        failed: dict[str, str] = {}
        for name, model, error in self._follow(desired):
            if model is not None and model.bound_account is None:
                try:
                    (model,) = self._bind(self._ledger, [model])
                except QuietmaxError as problem:
                    model, error = None, str(problem)
            kept = model or (self._models.get(name) if error else None)
            if kept is not None:
                models[name] = kept
            if error is not None:
                failed[name] = error
        self._models = models
        self._note_failures(failed)
        self._desired = desired
        self._use()
        self._confirm(desired)
        return list(failed.values())

    def _note_failures(self, failed: dict[str, str]) -> None:
        """Remember which models could not be loaded here, and when to try again."""
        self._errors.update(failed)
        self._failed = failed
        self._failures = self._failures + 1 if failed else 0
        wait = min(2.0**self._failures, _MAX_RETRY_SECONDS) if failed else math.inf
        self._retry_at = time.monotonic() + wait

    def _follow(self, desired: DesiredModels) -> Iterator[tuple[str, Deployment | None, str | None]]:
        """The desired models: those that this process has, and the others from their folders, or why not."""
        for name, version in desired.models.items():
            if version is None:
                yield name, None, None
                continue
            known = self._models.get(name)
            if known is not None and (known.version, known.digest.hex()) == (version.version, version.digest):
                yield name, known, None
                continue
            try:
                model = self._read(name, version.version)
                if model.digest.hex() != version.digest:
                    raise QuietmaxError(
                        f"The folder of {name}/{version.version} has changed since it was loaded. Load it again."
                    )
                yield name, model, None
            except QuietmaxError as error:
                yield name, None, str(error)

    def _read_and_bind(self, name: str) -> tuple[Deployment, LoadedVersion]:
        try:
            model, version = self._read_highest(name)
            (bound,) = self._bind(self._ledger, [model])
        except QuietmaxError as error:
            self._errors[name] = str(error)
            raise
        return bound, version

    def _read_highest(self, name: str) -> tuple[Deployment, LoadedVersion]:
        if name in self._reserved:
            raise InvalidInput(f"Model names must be unique, but {name} is also in the model repository.")
        version = self._repository.versions(name)[-1]
        signature = self._repository.signature(name, version)
        model = self._read(name, version)
        return model, LoadedVersion(version, model.digest.hex(), signature)

    def _read(self, name: str, version: str) -> Deployment:
        try:
            return self._load(f"{name}/{version}={self._repository.folder(name, version)}")
        except QuietmaxError:
            raise
        except Exception as error:
            raise QuietmaxError(
                f"The model {name}/{version} cannot be read ({type(error).__name__})."
            ) from error

    def _confirm(self, desired: DesiredModels) -> None:
        with suppress(OSError):  # a full disk: the request waits in vain, but the model is served
            self._state.confirm(desired.revision, self._failed)
