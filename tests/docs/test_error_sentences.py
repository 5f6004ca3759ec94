"""Every refusal a user can provoke is a sentence that ends, and says what to do."""

from __future__ import annotations

import re

from scripts import script

error_list = script("docs/making/error_list.py")
REFUSALS = error_list.refusals()
# What to do stands after a semicolon, a colon, a comma or a full stop, and has one of these verbs.
ADVICE = re.compile(
    r"[;:.,] ?[^;:.]*\b(add|allow|answer|apply|ask|audit|build|call|change|check|choose|copy|correct|count|create|"
    r"declare|delete|download|encode|fetch|fit|get|give|grant|remove|install|keep|leave|let|list|load|log|lower|make|name|"
    r"open|pass|pick|point|put|raise|regularise|rename|replace|reshape|restart|restore|retry|return|run|save|say|see|"
    r"send|serve|set|shorten|split|start|state|supply|take|tell|train|try|turn|unpack|use|wait|write)\b",
    re.IGNORECASE,
)


def test_the_list_of_errors_is_long_and_shows_no_python():
    assert len(REFUSALS) > 300
    for refusal in REFUSALS:
        assert "{" not in refusal.sentence.replace("{'", "").replace("={", ""), refusal


def test_every_refusal_says_what_to_do():
    silent = [
        f"{refusal.place}: {refusal.sentence}"
        for refusal in REFUSALS
        if not (ADVICE.search(refusal.sentence) and refusal.sentence.rstrip()[-1] in ".?…")
    ]
    assert not silent, "\n".join(silent)


def test_a_silent_sentence_is_recognised():
    assert not ADVICE.search("The value is wrong.")
    assert ADVICE.search("The value is 3, but must be 1 or 2; choose one.")
