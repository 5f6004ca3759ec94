"""Fixtures of the data tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quietmax.errors import QuietmaxError

ErrorMessage = Callable[[Callable[[], object], type[QuietmaxError]], str]


@pytest.fixture(scope="session")
def error_message() -> ErrorMessage:
    """Return a function that calls something, checks the type of its error and returns the error's message."""

    def message_of(call: Callable[[], object], kind: type[QuietmaxError]) -> str:
        with pytest.raises(kind) as caught:
            call()
        message = str(caught.value)
        assert "\n" not in message
        assert message.endswith((".", "?"))
        return message

    return message_of
