"""Offers: servables bound to the ledger's accounts.

A training set's account is found or opened, what training or earlier answers spent is charged, and the cost of one
answer becomes a number of units.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from quietmax.account import BudgetExhausted
from quietmax.accounting import Cost, Guarantee
from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.ledger import AccountState, Charge, Charged, Failed, Ledger, Refused, Store, Terms
from quietmax.ledger.ledger import TRAINING_CLIENT
from quietmax.server.loading import Named
from quietmax.server.servable import Servable, folder_digest


@dataclass(frozen=True, eq=False)
class Offer:
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


class Offers:
    """All offers by name and version; an unversioned name means the highest version."""

    def __init__(self, offers: Sequence[Offer]) -> None:
        self._offers = {(offer.name, offer.version): offer for offer in offers}
        self._newest: dict[str, Offer] = {}
        for offer in sorted(offers, key=lambda offer: _order(offer.version)):
            self._newest[offer.name] = offer

    def find(self, name: str, version: str | None) -> Offer | None:
        """The offer of that name, and version if given."""
        return self._newest.get(name) if version is None else self._offers.get((name, version))

    def versions(self, name: str) -> list[str]:
        """All versions of a name, in order."""
        return sorted((version for known, version in self._offers if known == name), key=_order)

    def __iter__(self) -> Iterator[Offer]:
        return iter(self._offers.values())

    def __len__(self) -> int:
        return len(self._offers)


def _order(version: str) -> list[tuple[int, int | str]]:
    """Numbers within versions count as numbers: 10 comes after 9."""
    parts: list[str] = re.findall(r"\d+|\D+", version)
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]


def bind(
    ledger: Ledger,
    models: Iterable[Named],
    *,
    budget: Terms | None = None,
    account: str | None = None,
    because: str | None = None,
) -> Offers:
    """Open or find the account of every model. `account` and `because` are the owner's words, if any.

    Models in the Gaussian currency come first: a Gaussian account can pay pure costs too, not the other way round.
    """
    ordered = sorted(models, key=lambda named: _currency(named.servable) != "gaussian")
    return Offers([_bound(ledger, named, budget, account, because) for named in ordered])


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
) -> Offer:
    servable = named.servable
    name = account_name(servable.dataset) if account is None else account
    state = _account(ledger, servable, name, budget, named_by_owner=account is not None, because=because)
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
    if servable.cost is None:
        _charge_training(ledger, named, state)
    if servable.carried_over is not None:
        _carry_over(ledger, named, state, unit_cost)
    if not servable.proven:
        ledger.note_unproven(state, named.label, servable.claim.status)
    return Offer(named.name, named.version, servable, ledger.account(state.name), unit_cost)


def _account(
    ledger: Ledger,
    servable: Servable,
    name: str,
    budget: Terms | None,
    *,
    named_by_owner: bool,
    because: str | None,
) -> AccountState:
    """The account of the model's data set, wherever the ledger counts it; another one only with a reason in words."""
    records = hashlib.sha256(f"data set {servable.dataset}".encode()).hexdigest()
    found = ledger.find_account(name, None if named_by_owner else records)
    total: Cost
    if budget is not None:
        reading = "proven" if servable.terms is None else servable.terms.reading
        terms = Terms(budget.epsilon, budget.delta, reading)
        currency = found.total.currency if found is not None else _currency(servable)
        total = terms.total(currency)
    elif found is not None:
        terms, total = found.terms, found.total
    elif servable.terms is not None:
        terms = servable.terms
        total = servable.training_cost or terms.total(_currency(servable))
    else:
        raise InvalidInput(
            f"There is no account {name!r} yet and the model brings no budget along; give --budget and --delta."
        )
    return ledger.open_account(
        name, total, terms, digest=records, named_by_owner=named_by_owner, because=because
    )


def _charge_training(ledger: Ledger, named: Named, state: AccountState) -> None:
    """What training spent; a guarantee in neither currency takes the whole account, as nothing adds up with it."""
    cost = named.servable.training_cost or state.total
    ledger.charge_training(state, named.label, named.servable.digest.hex(), cost)


def _carry_over(ledger: Ledger, named: Named, state: AccountState, unit_cost: int) -> None:
    """Move the account of the model folder into the ledger: charge what was answered, and leave nothing in the folder.

    The folder is emptied after the ledger was charged; an answer given from the folder in between is charged too.
    """
    carried = named.servable.carried_over
    assert carried is not None
    folder = carried.account.path.resolve().parent
    place = f"{state.id} {folder} {folder_digest(folder, '').hex()}"
    request = hashlib.sha256(f"carried over {place}".encode()).digest()
    client = ledger.client(TRAINING_CLIENT)
    while True:
        answered = carried.account.answered
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
        if not isinstance(outcome, Charged):
            return  # moved before
        try:
            carried.account.charge(max(carried.limit - answered, 0), carried.limit)
        except BudgetExhausted:
            continue
        ledger.store(Store(request=request, answer=b"moved"))
        return
