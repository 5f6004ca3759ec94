from __future__ import annotations

import json

from tests.cli.conftest import Run


def test_all_thirteen_data_sets_and_six_stand_ins_are_listed(run: Run) -> None:
    code, out, _ = run("datasets", "--json")
    assert code == 0
    names = [entry["name"] for entry in json.loads(out)]
    assert len(names) == 19
    assert {"fair", "mnist-5k"} <= set(names)
    code, out, _ = run("datasets")
    assert code == 0
    assert all(name in " ".join(out.split()) for name in names)
