"""Units as numbers in the account's currency, for answers and pages; the ledger itself counts whole units."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from quietmax._io import atomic_write
from quietmax.accounting.budget import LIMIT
from quietmax.accounting.conversions import epsilon_of
from quietmax.accounting.costs import Cost, PureCost
from quietmax.accounting.guarantee import Guarantee
from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.ledger.accounts import AccountState, Part, Terms
from quietmax.ledger.journal import START
from quietmax.ledger.ledger import TRAINING_CLIENT, Ledger
from quietmax.ledger.transactions import Charge, Charged, Failed, Refused, Store
from quietmax.server.repository import Named, Servable, folder_digest
from quietmax.spending import BudgetExhausted

_SLACK = 2.0**-50


def shown_cost(total: Cost, units: int) -> float:
    """What units cost, rounded up: epsilon, or mu."""
    return _amount(total, units) * (1 + _SLACK)


def shown_left(total: Cost, units: int) -> float:
    """What units are still worth, rounded down."""
    return _amount(total, max(units, 0)) * (1 - _SLACK)


def currency_name(total: Cost) -> str:
    """``epsilon`` or ``mu``: what the numbers mean."""
    return "epsilon" if isinstance(total, PureCost) else "mu"


def _amount(total: Cost, units: int) -> float:
    part = units / LIMIT
    return total.epsilon * part if isinstance(total, PureCost) else total.mu * math.sqrt(part)


def budget_json(account: AccountState, parts: list[Part], client: str, all_clients: bool) -> dict[str, Any]:
    """An account for the budget endpoint: the whole, and the caller's part (an administrator sees everyone's)."""
    total = _amount(account.total, account.limit_units)
    shown = [part for part in parts if all_clients or part.client == client]
    return {
        "account": account.name,
        "currency": currency_name(account.total),
        "terms": account.terms.to_json(),
        "total": total,
        "spent": min(shown_cost(account.total, account.spent_units), total),
        "remaining": shown_left(account.total, account.left_units),
        "spent_fraction": account.spent_units / account.limit_units if account.limit_units else 1.0,
        "spent_in_epsilon": _in_epsilon(account),
        "clients": [
            {
                "client": part.client,
                "spent_fraction": part.spent_units / account.limit_units if account.limit_units else 0.0,
                "quota_fraction": (
                    None
                    if part.limit_units is None
                    else (part.limit_units / account.limit_units if account.limit_units else 0.0)
                ),
                "refused": part.refused,
            }
            for part in shown
        ],
    }


def _in_epsilon(account: AccountState) -> float | None:
    """What was spent as an epsilon at the delta of the terms; None where the terms have no delta to read a mu at."""
    spent = account.spent
    if isinstance(spent, PureCost):
        return spent.epsilon
    if account.terms.delta == 0 or account.terms.reading != "proven":
        return None
    return epsilon_of(spent.mu, account.terms.delta) if spent.mu else 0.0


def answers_left(left_units: int, unit_cost: int) -> int:
    """How many further answers the units pay for."""
    return max(left_units, 0) // unit_cost


_MOVED = "moved.txt"


@dataclass(frozen=True, eq=False)
class Deployment:
    """A servable that is bound to its account. `unit_cost` is what one answer takes; 0 if it was paid at training."""

    name: str
    version: str
    servable: Servable
    account: AccountState
    unit_cost: int

    @property
    def label(self) -> str:
        """``name/version``."""
        return f"{self.name}/{self.version}"

    @property
    def status(self) -> str:
        """The status of its guarantee."""
        return self.servable.claim.status

    def guarantee(self, account: AccountState) -> Guarantee:
        """What is claimed of all answers together, once the whole budget of the account, as it stands, is spent."""
        claim = self.servable.claim
        if self.servable.cost is None:
            return claim
        return Guarantee.of(
            account.limit,
            status=claim.status,
            because=claim.because,
            parameters=claim.parameters,
            assumptions=claim.assumptions,
        )

    @property
    def warning(self) -> str | None:
        """What every answer says when the guarantee is not proven."""
        if self.servable.proven:
            return None
        return f"No proven guarantee ({self.status}): {self.servable.claim.because}"


class Deployments:
    """All offers by name and version; an unversioned name means the highest version."""

    def __init__(self, deployments: Sequence[Deployment]) -> None:
        self._deployments = {(deployment.name, deployment.version): deployment for deployment in deployments}
        self._newest: dict[str, Deployment] = {}
        for deployment in sorted(deployments, key=lambda deployment: _order(deployment.version)):
            self._newest[deployment.name] = deployment

    def find(self, name: str, version: str | None) -> Deployment | None:
        """The offer of that name, and version if given."""
        return self._newest.get(name) if version is None else self._deployments.get((name, version))

    def versions(self, name: str) -> list[str]:
        """All versions of a name, in order."""
        return sorted((version for known, version in self._deployments if known == name), key=_order)

    def __iter__(self) -> Iterator[Deployment]:
        return iter(self._deployments.values())

    def __len__(self) -> int:
        return len(self._deployments)


def _order(version: str) -> list[tuple[int, int | str]]:
    """Numbers within versions count as numbers: 10 comes after 9."""
    parts: list[str] = re.findall(r"\d+|\D+", version)
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]


def deploy(
    ledger: Ledger,
    models: Iterable[Named],
    *,
    budget: Terms | None = None,
    account: str | None = None,
    because: str | None = None,
) -> Deployments:
    """Open or find the account of every model. `account` and `because` are the owner's words, if any.

    Models in the Gaussian currency come first: a Gaussian account can pay pure costs too, not the other way round.
    """
    ordered = sorted(models, key=lambda named: _currency(named.servable) != "gaussian")
    return Deployments([_bound(ledger, named, budget, account, because) for named in ordered])


def _currency(servable: Servable) -> str:
    cost = servable.cost or servable.training_cost
    return "pure" if cost is None else cost.currency


def account_name(dataset: str) -> str:
    """A data set's name as that of an account.

    >>> account_name("my people.csv")
    'my-people.csv'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", dataset).strip("-._")[:64] or "records"


def _bound(
    ledger: Ledger, named: Named, budget: Terms | None, account: str | None, because: str | None
) -> Deployment:
    servable = named.servable
    name = account_name(servable.dataset) if account is None else account
    records = hashlib.sha256(f"data set {servable.dataset}".encode()).hexdigest()
    found = ledger.find_account(name, None if account is not None else records)
    total, terms = _total(servable, name, budget, found)
    state = found or AccountState(0, name, total, terms, LIMIT, 0, 0, START, 0)
    unit_cost = _unit_cost(named, state)
    if servable.cost is None and servable.training_cost is None:
        _check_alone(named, state.terms)
    if found is None:
        _check_fits(named, state, unit_cost)  # before an account is opened that would stay behind
    state = ledger.open_account(
        name, total, terms, digest=records, named_by_owner=account is not None, because=because
    )
    if servable.cost is None:
        _charge_training(ledger, named, state)
    if servable.migrated_budget is not None:
        _migrate_budget(ledger, named, state, unit_cost)
    if not servable.proven:
        ledger.note_unproven(state, named.label, servable.claim.status)
    return Deployment(named.name, named.version, servable, ledger.account(state.name), unit_cost)


def _total(
    servable: Servable, name: str, budget: Terms | None, found: AccountState | None
) -> tuple[Cost, Terms]:
    """What the account of the model's data set is, or will be, opened with."""
    if budget is not None:
        reading = "proven" if servable.terms is None else servable.terms.reading
        terms = Terms(budget.epsilon, budget.delta, reading)
        return terms.total(found.total.currency if found is not None else _currency(servable)), terms
    if found is not None:
        return found.total, found.terms
    if servable.terms is not None:
        return servable.training_cost or servable.terms.total(_currency(servable)), servable.terms
    raise InvalidInput(
        f"There is no account {name!r} yet and the model brings no budget along; give --budget and --delta."
    )


def _unit_cost(named: Named, state: AccountState) -> int:
    """What one answer takes from the account; 0 if it was paid at training."""
    servable = named.servable
    try:
        unit_cost = 0 if servable.cost is None else state.units(servable.cost)
        if servable.training_cost is not None:
            state.units(servable.training_cost)
    except InvalidInput as problem:
        raise InvalidInput(
            f"The model {named.label} cannot be paid from the account {state.name!r}; give it one of its own with "
            f"--account, --because and --budget: {problem}"
        ) from problem
    if servable.cost is not None and unit_cost == 0:
        raise InvalidInput(
            f"The model {named.label} states that an answer costs nothing; train one with a positive epsilon."
        )
    return unit_cost


def _check_fits(named: Named, state: AccountState, unit_cost: int) -> None:
    """Refuse a model that has spent more than a new account would hold."""
    servable = named.servable
    spent = 0 if servable.training_cost is None else state.units(servable.training_cost)
    if servable.migrated_budget is not None:
        spent += servable.migrated_budget.account.answered * unit_cost
    if spent > state.limit_units:
        raise QuietmaxError(
            f"The model {named.label} has spent more than the budget of {_shown(state.terms)} asked for; give the "
            "budget that it was trained for, or train it with less."
        )


def _charge_training(ledger: Ledger, named: Named, state: AccountState) -> None:
    """What training spent. A guarantee in neither currency adds up with no other: it takes the whole account, alone."""
    servable = named.servable
    ledger.charge_training(state, named.label, servable.digest.hex(), servable.training_cost or "all")


def _check_alone(named: Named, terms: Terms) -> None:
    """Refuse a model whose (epsilon, delta) guarantee is weaker than what the account promises."""
    claim = named.servable.claim
    assert claim.epsilon is not None
    assert claim.delta is not None
    if claim.epsilon > terms.epsilon or claim.delta + claim.extra_delta > terms.delta:
        raise InvalidInput(
            f"The model {named.label} is trained for epsilon {claim.epsilon:g} and delta {claim.delta:g}, more than "
            f"{_shown(terms)}, which its account promises; train it for less, or give it an account of its own."
        )


def _shown(terms: Terms) -> str:
    return f"epsilon {terms.epsilon:g} and delta {terms.delta:g}"


def _migrate_budget(ledger: Ledger, named: Named, state: AccountState, unit_cost: int) -> None:
    """Move the account of the model folder into the ledger: charge what was answered, and leave nothing in the folder.

    The folder is emptied after the ledger was charged; an answer given from the folder in between is charged too. A
    mark in the folder says that this was done to this model, wherever the folder may lie later; it counts only while
    the folder's account is empty. An account that was put back after it had been moved is charged once more.
    """
    carried = named.servable.migrated_budget
    assert carried is not None
    folder = carried.account.path.resolve().parent
    digest = folder_digest(folder, "").hex()
    mark = folder / _MOVED
    text = ledger.request_key(0, f"carried over {state.id} {digest}").hex() + "\n"
    moved = mark.is_file() and mark.read_text(encoding="utf-8", errors="replace") == text
    request = hashlib.sha256(f"carried over {state.id} {folder} {digest}".encode()).digest()
    client = ledger.client(TRAINING_CLIENT)
    while True:
        answered = carried.account.answered
        if moved and answered >= carried.limit:
            with suppress(OSError):  # without the mark, the folder is known by where it lies
                atomic_write(mark, lambda staging: staging.write_text(text, encoding="utf-8"))
            return
        outcome = ledger.charge(
            Charge(
                state.id, client, named.label, unit_cost, rows=answered, request=request, kind="carried over"
            )
        )
        if isinstance(outcome, Refused):
            raise QuietmaxError(
                f"The model {named.label} has answered {answered} queries outside of the ledger, more than what is "
                f"left of the account {state.name!r}; raise its budget with 'quietmax ledger grant'."
            )
        if isinstance(outcome, Failed):
            raise outcome.problem
        if isinstance(outcome, Charged):
            try:
                carried.account.charge(max(carried.limit - answered, 0), carried.limit)
            except BudgetExhausted:
                continue
            ledger.store(Store(request=request, answer=b"moved"))
        else:
            request = hashlib.sha256(
                request
            ).digest()  # was moved before: for an account that was put back since
        moved = True
