"""How a guarantee is printed: its status first and in colour."""

from __future__ import annotations

from quietmax.accounting import Guarantee
from quietmax.cli.output import console


def print_guarantee(guarantee: Guarantee) -> None:
    """Print what is claimed, and what it assumes."""
    colour = {"proven": "green", "conditional": "yellow", "refuted": "red"}[guarantee.status]
    console.print("Guarantee:", style="bold", end=" ")
    console.print(str(guarantee), style=colour, markup=False, highlight=False)
    for assumption in guarantee.assumptions:
        console.print(f"  assumes: {assumption}", markup=False, highlight=False)
