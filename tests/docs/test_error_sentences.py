"""Every error a user can cause is one plain sentence."""

from __future__ import annotations

from tests.docs.scripts import script

error_list = script("docs/making/error_list.py")
REFUSALS = error_list.refusals()


def test_the_list_of_errors_is_long_and_shows_no_python():
    assert len(REFUSALS) > 300
    for refusal in REFUSALS:
        assert "{" not in refusal.sentence.replace("{'", "").replace("={", ""), refusal


def test_every_error_is_a_sentence_that_ends():
    unfinished = [
        f"{each.place}: {each.sentence}" for each in REFUSALS if each.sentence.rstrip()[-1] not in ".?…"
    ]
    assert not unfinished, "\n".join(unfinished)
