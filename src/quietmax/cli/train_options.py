"""Which options of `quietmax train` each kind of training reads; any other that is given is refused, never ignored."""

from __future__ import annotations

from collections.abc import Mapping

from quietmax.errors import InvalidInput

_BUDGET = {"epsilon", "delta", "declared_size", "features"}
_NETWORK = {"hidden", "activation", "learning_rate", "l2"}
_NOISY = {"accountant", "reading", "configuration", "sampling_rate", "steps", "clip", "optimiser"}
_PRIVATE = {
    "head": _BUDGET | {"queries", "route"},
    "teachers": _BUDGET | {"queries", "teachers"},
    "dpsgd": _BUDGET | _NETWORK | _NOISY,
}
_PLAIN = _NETWORK | {"loss", "alpha", "averaged_over", "epochs", "batch_size"}


def check_options(private: str | None, given: Mapping[str, object]) -> None:
    """Refuse what the chosen training would not read; ``given`` has every option, None (or nothing) if left out."""
    present = [name for name, value in given.items() if value is not None and value != []]
    if private is None:
        unread = [name for name in present if name not in _PLAIN]
        if unread and _NOISY.issuperset(unread):
            raise InvalidInput(
                f"Only --private dpsgd reads {_listed(unread)}; add it, or leave that out to train without privacy."
            )
        if unread:
            raise InvalidInput(
                f"Only private training reads {_listed(unread)}; add --private head, teachers or dpsgd, or leave that "
                "out to train without privacy."
            )
        return
    if private not in _PRIVATE:
        raise InvalidInput(f"--private {private!r} is not known; choose head, teachers or dpsgd.")
    unread = [name for name in present if name not in _PRIVATE[private]]
    if private == "dpsgd" and "queries" in unread:
        raise InvalidInput("DP-SGD releases its weights for any number of answers; leave --queries out.")
    if private == "dpsgd" and {"epochs", "batch_size"}.intersection(unread):
        raise InvalidInput(
            "DP-SGD draws random samples, not epochs of batches; give --sampling-rate (batch/records) and --steps."
        )
    if unread and _NOISY.issuperset(unread):
        raise InvalidInput(f"Only --private dpsgd reads {_listed(unread)}; leave that out, or train with it.")
    if unread:
        raise InvalidInput(
            f"--private {private} does not read {_listed(unread)}; leave that out, or choose another training."
        )
    if private == "head" and "queries" in present and given["route"] not in (None, "output"):
        raise InvalidInput(
            f"A head with --queries has the route output, but --route is {given['route']}; leave one of the two out."
        )


def _listed(names: list[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)
