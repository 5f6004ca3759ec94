"""The privacy card in forms that reviewers know: a deployments registry, and a checklist after NIST SP 800-226.

`registry_entry` has the fields of the Differential Privacy Deployments Registry of OpenDP, as the entries in its public
repository had them in 2025 (`product`, `dp_flavor`, `privacy_loss`, `model`, `accounting`, `implementation`,
`resources`). `nist_checklist` follows the factors of NIST SP 800-226 (March 2025). Both were written from public
documentation; neither publisher has reviewed them. They are filled from the model folder and, if one is given, from the
ledger. What the software cannot know is marked, for people to fill in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from quietmax import __version__
from quietmax.errors import InvalidInput, counted
from quietmax.privacy_card import PrivacyCard

BLANK = "[to be filled in]"
"""Stands wherever the software cannot know the answer."""
NOT_IN_LEDGER = "The ledger has no account for this training set yet."
_YES_PERSON = "Yes: all rows of a person count together."
_YES_EXACT = "Yes: sums and noise are multiples of a public grid and are added without rounding."
_FLAVORS = {"pure": "Pure DP", "approximate": "Approximate DP", "gaussian": "Gaussian DP"}


@dataclass(frozen=True)
class LedgerRecord:
    """What the ledger of the service states about the training set of a model."""

    account: Mapping[str, Any] | None  # The account that pays, as `quietmax ledger status --json` shows it
    models: tuple[str, ...]  # The models that the account has paid for, as `name/version`
    clients: int  # The number of clients that have spent something of it
    administrators: int  # The number of valid API keys of administrators, and of all clients together
    keys: int
    heads: tuple[str, ...]

    def budget(self) -> str:
        """Return what was promised, spent and is left, in a sentence."""
        if self.account is None:
            return NOT_IN_LEDGER
        terms = self.account["terms"]
        amounts = ", ".join(
            f"{name} {_amount(self.account[name])}" for name in ("budget", "spent", "remaining")
        )
        return (
            f"Account {self.account['account']}, opened with epsilon {terms['epsilon']:g} and delta "
            f"{terms['delta']:g}: {amounts}; {counted(self.clients, 'client')}."
        )

    def releases(self) -> str:
        """Return what else the account has paid for."""
        if self.account is None:
            return NOT_IN_LEDGER
        return f"Of the same account: {', '.join(self.models) or 'none'}."

    def access(self) -> str:
        """Return who can query, and what proves later that the audit log was not changed."""
        log = f" Audit log at the time of this form: {', '.join(self.heads)}." if self.heads else ""
        return f"{counted(self.keys, 'valid API key')}, {self.administrators} of them of administrators.{log}"


class Item(NamedTuple):
    """One line of the checklist."""

    topic: str  # The factor that the line belongs to
    question: str  # What a reviewer asks
    answer: str  # What the model folder and the ledger say, or `BLANK`


def registry_entry(card: PrivacyCard, ledger: LedgerRecord | None = None) -> dict[str, Any]:
    """Return an entry for the Differential Privacy Deployments Registry."""
    claim = _guarantee(card)
    parameters = (
        {}
        if card.epsilon_at_delta is None
        else {"epsilon": card.epsilon_at_delta, "delta": card.delta or 0.0}
    )
    return {
        "url_slug": BLANK,
        "status": "Draft",
        "tier": BLANK,
        "deployment": {
            "product": {
                "name": BLANK,
                "data_curators": [BLANK],
                "intended_use": BLANK,
                "data_product_type": "Machine learning model",
                "data_product_region": BLANK,
                "description": f"A classifier ({card.kind}) trained on {card.dataset}. {BLANK}",
                "publication_date": BLANK,
                "data_product_sector": BLANK,
            },
            "dp_flavor": {
                "name": _FLAVORS[claim["definition"]],
                "data_domain": BLANK,
                "unprotected_quantities": " ".join(claim["assumptions"]) or "None.",
            },
            "privacy_loss": {
                "privacy_unit": claim["unit"],
                "privacy_unit_description": card.to_json()["protects"]
                + ". Neighbouring data sets differ by one added "
                f"or removed {claim['unit']}.",
                "privacy_parameters": parameters,
                "privacy_parameters_description": f"Status: {claim['status']}. {claim['because']}",
            },
            "model": {
                "model_name": "Central",
                "actors": BLANK,
                "release_type": BLANK,
                "data_source_type": "Static",
                "access_type": "Non-interactive" if card.queries is None else "Interactive",
                "access_type_description": _join(_access(card), ledger.budget() if ledger else ""),
            },
            "accounting": {
                "post_processing": "Answers are computed from what was released, without further noise."
                if card.queries is None
                else BLANK,
                "composition": _join(claim["because"], ledger.releases() if ledger else ""),
            },
            "implementation": {
                "pre_processing_eda_hyperparameter_tuning": BLANK,
                "mechanisms": f"Quietmax {__version__}. {_noise(claim['parameters'])}",
                "justification": BLANK,
            },
            "resources": {"sources": BLANK, "registry_authors": [BLANK]},
        },
    }


def nist_checklist(card: PrivacyCard, ledger: LedgerRecord | None = None) -> list[Item]:
    """Return a checklist after NIST SP 800-226, from the guarantee down to the collection of the data."""
    claim = _guarantee(card)
    facts = claim["parameters"]
    accuracy = BLANK if card.evaluation is None else f"accuracy {card.evaluation.accuracy}"
    epsilon = (
        ""
        if card.epsilon_at_delta is None
        else f"epsilon {card.epsilon_at_delta:.4g} at delta {card.delta:g}"
    )
    assumptions = " ".join(claim["assumptions"]) or "none"
    rows = [
        (
            "Privacy parameters",
            "Which definition, and how large is epsilon?",
            f"{claim['definition']}: {epsilon}",
        ),
        ("Privacy parameters", "Is the claim proven?", f"{claim['status']}: {claim['because']}"),
        ("Privacy parameters", "What does it mean for one person?", " ".join(card.in_words())),
        ("Privacy parameters", "Why is this epsilon adequate for the purpose?", BLANK),
        ("Unit of privacy", "What is protected?", str(card.to_json()["protects"])),
        (
            "Unit of privacy",
            "Does one person have one such unit?",
            _YES_PERSON if claim["unit"] == "person" else BLANK,
        ),
        ("Bounds", "Are bounds, categories and classes public?", assumptions),
        ("Sensitivity", "How is the influence of one unit limited?", _sensitivity(facts)),
        ("Noise", "Which noise, from which source?", _noise(facts)),
        ("Noise", "Are floating-point attacks excluded?", _floating_point(facts)),
        (
            "Budget",
            "What is charged, and what is left?",
            _join(_access(card), ledger.budget() if ledger else ""),
        ),
        (
            "Budget",
            "Which other releases use data of the same people?",
            BLANK if ledger is None else f"{ledger.releases()} Outside the ledger: {BLANK}",
        ),
        ("Utility", "How good is the model?", accuracy),
        ("Utility", "Is the error acceptable for small groups?", BLANK),
        ("Trust model", "Who sees the data before noise is added?", "The curator (central model). " + BLANK),
        ("Side channels", "Do running time, errors or logs depend on the data?", BLANK),
        (
            "Security",
            "Who has access to the training data and to the ledger?",
            BLANK if ledger is None else f"{ledger.access()} The data and the database: {BLANK}",
        ),
        ("Data collection", "On which legal basis and with which consent was the data collected?", BLANK),
        ("Data collection", "Is the data minimised, and when is it deleted?", BLANK),
    ]
    return [Item(*row) for row in rows]


def _join(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


def _amount(cost: Mapping[str, Any]) -> str:
    """Return a cost of JSON values with its symbol: epsilon or mu."""
    return " ".join(f"{name} {value:.6g}" for name, value in cost.items() if name != "measure")


def _guarantee(card: PrivacyCard) -> dict[str, Any]:
    """Return the guarantee of everything that was released, as JSON values."""
    total = card.guarantee if card.released is None else card.released
    if total is None:
        raise InvalidInput("This form is for private models; an ordinary network has no guarantee.")
    parameters = card.guarantee.parameters if card.guarantee is not None else {}
    return {**total.to_json(), "because": total.reason, "parameters": dict(parameters)}


def _access(card: PrivacyCard) -> str:
    """Return what answers cost."""
    if card.queries is None:
        return "Paid at training; any number of answers."
    if card.moved:
        return f"Charged by a ledger since the model was served; the guarantee is for {card.queries}."
    return f"{card.answered or 0:,} of {counted(card.queries, 'answer')} charged so far."


def _noise(facts: Mapping[str, Any]) -> str:
    """Return where the noise comes from."""
    source = facts.get("noise_source", {})
    if source.get("exact"):
        return "Exact samplers, with randomness from the operating system."
    return "Seeded noise, for experiments only." if source else BLANK


def _floating_point(facts: Mapping[str, Any]) -> str:
    """Return what is known about rounding; only released weights of a head are added on a grid, without rounding."""
    released = facts.get("estimator") == "head" and facts.get("release") != "query"
    return _YES_EXACT if released and facts.get("noise_source", {}).get("exact") else BLANK


def _sensitivity(facts: Mapping[str, Any]) -> str:
    """Return the bound on the influence of one unit."""
    names = ("sensitivity", "max_grad_norm", "radius")
    return "; ".join(f"{name} {facts[name]:.6g}" for name in names if facts.get(name) is not None) or BLANK
