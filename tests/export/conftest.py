from __future__ import annotations

from pathlib import Path

import pytest

from tests.export.people import train


@pytest.fixture(scope="session")
def table_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a head that was trained on a table with all kinds of columns."""
    return train(tmp_path_factory.mktemp("export") / "head")
