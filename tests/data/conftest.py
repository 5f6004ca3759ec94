from __future__ import annotations

from collections.abc import Callable

import pytest

from quietmax.errors import QuietmaxError


@pytest.fixture(scope="session")
def refusal() -> Callable[[Callable[[], object], type[QuietmaxError]], str]:
    """Return the sentence with which a call is refused, after checking that it is one sentence."""

    def refused(call: Callable[[], object], kind: type[QuietmaxError]) -> str:
        with pytest.raises(kind) as caught:
            call()
        sentence = str(caught.value)
        assert "\n" not in sentence
        assert sentence.endswith((".", "?"))
        assert ". " not in sentence.replace("...", "")
        return sentence

    return refused
