from __future__ import annotations

import pytest

import quietmax


def test_all_public_names_are_reached_through_the_package() -> None:
    assert set(quietmax.__all__) <= set(dir(quietmax))
    for name in quietmax.__all__:
        assert getattr(quietmax, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = quietmax.nonsense  # type: ignore[attr-defined]
