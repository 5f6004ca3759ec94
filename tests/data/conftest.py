"""What the data tests share: an empty current folder, and the check of an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quietmax.errors import QuietmaxError


@pytest.fixture(autouse=True)
def in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def problem_of(
    kind: type[QuietmaxError], function: Callable[..., object], *given: Any, **options: Any
) -> str:
    """The message of the error that a call must raise: one sentence or more on one line."""
    with pytest.raises(kind) as caught:
        function(*given, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith((".", "?"))
    return message
