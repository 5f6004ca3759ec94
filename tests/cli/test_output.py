from __future__ import annotations

import json
import math
from typing import Any

import pytest
from rich.color import ColorSystem

from quietmax.accounting.guarantee import Guarantee
from quietmax.cli._output import (
    as_document,
    console,
    errors,
    print_guarantee,
    print_json,
    print_table,
    progress_bar,
)


def test_titles_captions_and_progress_are_printed_without_reading_markup(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_table("[/title] :100:", ("[/column]", ":x:"), [("[red]", ":x:")], caption="[/caption]")
    out = capsys.readouterr().out
    assert all(each in out for each in ("[/title] :100:", "[/column]", ":x:", "[red]", "[/caption]"))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(errors, "_force_terminal", True)
    monkeypatch.setattr(errors, "_width", 120)
    monkeypatch.setattr(errors, "is_interactive", True)
    with progress_bar("training [/x]") as progress:
        progress(1, 2)
    assert "training [/x]" in capsys.readouterr().err


def test_long_entries_of_a_table_are_wrapped_and_not_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_width", 34)
    print_table("title", ("x", "y"), [("a" * 50, "b" * 50)])
    out = capsys.readouterr().out
    assert (out.count("a"), out.count("b")) == (50, 50)
    assert "…" not in out


def compared(capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    """A table like that of `compare`, which needs 100 columns."""
    columns = (
        "method",
        "guarantee",
        "eps",
        "answers",
        "accuracy",
        "loss",
        "shadow",
        "lira",
        "audited",
        "fit, s",
    )
    entries = ("algorithm1-gaussian", "refuted", "0.1", "1,000", "0.849", "-0.009", "-0.002")
    print_table("title", columns, [(*entries, "-0.031", "12.34", "100.1")] * 2, **options)
    return capsys.readouterr().out


def test_numbers_are_not_broken_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_width", 80)
    out = compared(capsys, optional=("fit, s", "audited", "answers"))
    assert max(map(len, out.splitlines())) <= 80
    for number in ("0.1", "0.849", "-0.009", "-0.002", "-0.031"):
        assert sum(number in line.split() for line in out.replace("│", " ").splitlines()) == 2
    assert out.count("algorithm1-gaussian") == 2
    assert "Left out, the terminal is too narrow: fit, s; audited; answers." in out
    monkeypatch.setattr(console, "_width", 160)
    wide = compared(capsys, optional=("fit, s", "audited", "answers"))
    assert "100.1" in wide
    assert "Left out" not in wide


def test_json_holds_what_objects_say_of_themselves_and_no_infinities(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Point:
        def to_json(self) -> dict[str, float]:
            return {"x": math.inf}

    with as_document(wanted=True):
        print_json({"point": Point(), "list": (1, math.nan), 3: None})
    assert json.loads(capsys.readouterr().out) == {"point": {"x": None}, "list": [1, None], "3": None}


def test_a_guarantee_is_printed_with_its_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    guarantee = Guarantee(
        definition="pure", epsilon=1.0, status="conditional", because="Reasons [1].", assumptions=("First.",)
    )
    print_guarantee(guarantee)
    out = capsys.readouterr().out
    assert "Guarantee: conditional" in out
    assert "Reasons [1]." in " ".join(out.split())
    assert "assumes: First." in out


def test_a_table_that_fits_if_phrases_are_broken_is_not_wider_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "_width", 34)
    print_table("", ("unbreakable", "two words or three"), [("x" * 16, "some longer phrase")])
    lines = capsys.readouterr().out.rstrip("\n").splitlines()
    assert all(len(line) <= 34 for line in lines)
    assert all(line.rstrip()[-1] in "┓┃┩│┘" for line in lines[-4:]), "the right border is there"
    assert "x" * 16 in "\n".join(lines)


@pytest.mark.parametrize(
    ("accuracy", "code", "words"),
    [
        (0.749, "32", "moderate protection [##-]"),
        (0.751, "38;5;208", "weak protection [#--]"),
        (0.951, "31", "no protection [---]"),
    ],
)
def test_a_guarantee_is_green_only_if_an_adversary_is_right_at_most_three_times_in_four(
    accuracy: float,
    code: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(console, "_width", 300)
    monkeypatch.setattr(console, "_force_terminal", True)
    monkeypatch.setattr(console, "_color_system", ColorSystem.EIGHT_BIT)
    monkeypatch.setattr(console, "no_color", False)
    epsilon = math.log((accuracy - 1e-9) / (1 - accuracy + 1e-9))
    print_guarantee(Guarantee("pure", epsilon=epsilon, status="proven", because="Reasons."))
    right = f"a guess whether one record is in the data is right at most {100 * accuracy:.1f}% of the time"
    told = capsys.readouterr().out
    assert f"\x1b[{code}mproven, {words}: {right}\x1b[0m. {epsilon:.4g}-differential privacy" in told
