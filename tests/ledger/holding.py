"""Keeps the ledger's writing thread busy, so that what comes meanwhile is written together."""

from __future__ import annotations

import threading

from quietmax.ledger import NewAnswers


def held(ledger):
    """Hold the writing thread in a callback until the returned event is set, so that a group gathers."""
    gate, reached = threading.Event(), threading.Event()

    def hold(_):
        reached.set()
        gate.wait(20)

    ledger.submit_answers(NewAnswers(), hold)
    assert reached.wait(10)
    return gate
