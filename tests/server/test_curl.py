"""The curl examples of the README and of the service's page work as they stand."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from running_service import FEATURES, running

from quietmax.ledger import Terms

ROOT = Path(__file__).parents[2]


def _examples(page):
    """The curl commands of a page's blocks, each with its line breaks."""
    blocks = re.findall(
        r"^```sh\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return [
        command
        for block in blocks
        for command in re.split(r"^(?=curl )", block, flags=re.MULTILINE)
        if command.startswith("curl ")
    ]


@pytest.mark.parametrize("page", ["README.md", "docs/service.md"])
def test_the_curl_examples_of_a_page_work(page, models, tmp_path):
    if shutil.which("curl") is None or shutil.which("bash") is None:
        pytest.skip("curl is missing; install it with: apt-get install -y curl")
    examples = _examples(page)
    assert any("/infer" in example for example in examples)
    with running(
        f"sqlite:///{tmp_path / 'ledger.sqlite'}",
        [f"digits={models / 'plain'}"],
        budget=Terms(10.0),
        queries=5,
    ) as service:
        for example in examples:
            command = example.replace("http://127.0.0.1:8080", service.url).replace("784", str(FEATURES))
            done = subprocess.run(
                ["bash", "-c", command],
                env={**os.environ, "KEY": service.key, "NO_PROXY": "*"},
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            )
            told = json.loads(done.stdout)
            assert "error" not in told, (command, told)
            if "/infer" in command:
                assert told["parameters"]["remaining_answers"] == 4
                assert [tensor["name"] for tensor in told["outputs"]] == ["label", "probabilities"]
