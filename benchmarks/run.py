"""Runs the benchmarks and writes `docs/benchmarks.md`: ratios with their spread, machine, versions, date.

    python benchmarks/run.py [--only noise growth] [--quick] [--page docs/benchmarks.md]

Each benchmark is a script that can be run alone. Peers whose requirements are not ours (IBM ART, diffprivlib) get an
environment of their own under `build/`. `--quick` is a small version that shows that everything runs; its figures mean
nothing, and the page says so. The page keeps the parts of benchmarks that were not run this time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / "build" / "peers"
SHOWN_PACKAGES = ("quietmax", "torch", "numpy", "scikit-learn", "opendp", "opacus", "uvicorn", "SQLAlchemy")


@dataclass(frozen=True)
class Benchmark:
    """A script, the arguments of a full and of a quick run, what it shows, what it needs, and a page of its own."""

    name: str
    shows: str
    full: tuple[str, ...] = ()
    quick: tuple[str, ...] = ("--quick",)
    needs_data: bool = False
    stored: str = ""


BENCHMARKS = (
    Benchmark("noise", "Exact noise beside OpenDP's exact samplers"),
    Benchmark("stacked_training", "K networks at once beside a plain PyTorch loop"),
    Benchmark("algorithm1", "Private answers beside the plain forward pass"),
    Benchmark(
        "dpsgd",
        "A sweep of DP-SGD networks beside Opacus",
        ("--rounds", "5"),
        ("--rounds", "1", "--epochs", "1"),
    ),
    Benchmark(
        "head",
        "The private head beside diffprivlib and scikit-learn's logistic regression",
        ("--splits", "5", "--diffprivlib", str(ENVIRONMENTS / "diffprivlib" / "bin" / "python")),
        needs_data=True,
    ),
    Benchmark(
        "table_accuracy",
        "Private heads on tables of people beside models without privacy",
        quick=("--seeds", "0", "--tables", "fair", "--output", os.devnull),
        needs_data=True,
        stored="results/table-accuracy.md",
    ),
    Benchmark(
        "image_accuracy",
        "Private heads on images beside models without privacy",
        ("build/image-accuracy", "--output", "docs/results/image-accuracy.json"),
        ("build/image-accuracy", "--sets", "mnist-5k", "--records", "500", "--epsilons", "1", "--seeds", "1"),
        needs_data=True,
        stored="results/image-accuracy.md",
    ),
    Benchmark(
        "text_accuracy",
        "Private heads on texts beside logistic regression",
        quick=("--seeds", "2", "--rows", "120", "--output", "build"),
        stored="results/text-accuracy.md",
    ),
    Benchmark(
        "training_rule",
        "The head's training rule over data sets, sizes and epsilons",
        ("build/training-rule",),
        ("build/training-rule", "--sets", "fair", "--output", os.devnull),
        needs_data=True,
        stored="results/training-rule.md",
    ),
    Benchmark(
        "dpsgd_beside_head",
        "DP-SGD beside the private head, the same features and the same guarantee",
        ("build/image-accuracy",),
        (
            "build/image-accuracy",
            "--sets",
            "mnist-5k",
            "--records",
            "500",
            "--seeds",
            "1",
            "--output",
            os.devnull,
        ),
        needs_data=True,
        stored="results/dpsgd-beside-head.md",
    ),
    Benchmark("private_answers", "Accuracy per number of queries", ("--splits", "5"), needs_data=True),
    Benchmark(
        "shadow_attack",
        "The shadow attack beside IBM ART",
        ("--rounds", "5", "--art-python", str(ENVIRONMENTS / "art" / "bin" / "python")),
        needs_data=True,
    ),
    Benchmark(
        "serving",
        "The service beside MLServer, and beside itself without privacy and ledger",
        ("--turns", "5"),
        ("--turns", "1", "--seconds", "0.5", "--without-mlserver"),
    ),
    Benchmark(
        "soak",
        "Two million requests: memory, open files and charges",
        ("--json", "docs/results/soak.json"),
        ("--requests", "2000"),
        stored="results/service-reliability.md",
    ),
    Benchmark(
        "malformed",
        "100,000 malformed requests over HTTP and gRPC: no error of the service, nothing spent, memory and open files",
        ("--json", "docs/results/malformed.json"),
        ("--http", "500", "--grpc", "500"),
        stored="results/service-reliability.md",
    ),
    Benchmark(
        "observed",
        "Observed changes beside certified bounds",
        quick=("--dataset", "mnist-5k", "--records", "300", "--removals", "2"),
        needs_data=True,
    ),
    Benchmark(
        "person_audit",
        "Audits for a person with 30 rows, of training by persons and by records",
        quick=("--times", "64", "--output", os.devnull),
        stored="results/person-audit.md",
    ),
    Benchmark(
        "ray_scaling",
        "Teachers and shadow networks on 2 Ray workers beside 1",
        stored="results/large-table.md",
    ),
    Benchmark(
        "out_of_core",
        "A private head on 20 million rows in files: memory, time of a pass, growth",
        ("build", "--json", "docs/results/large-table.json"),
        stored="results/large-table.md",
    ),
    Benchmark("growth", "How the cost grows with records, networks, classes, queries and replicas"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[each.name for each in BENCHMARKS])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "benchmarks.md")
    options = parser.parse_args()
    parts = kept_parts(options.page)
    failed = []
    for benchmark in BENCHMARKS:
        if options.only and benchmark.name not in options.only:
            continue
        print(f"== {benchmark.name}", flush=True)
        rows, printed, problem = measured(benchmark, options.quick)
        parts[benchmark.name] = part(benchmark, rows, printed, problem, options.quick)
        if problem:
            failed.append(f"{benchmark.name}: {problem}")
        options.page.write_text(page(parts), encoding="utf-8")
    print(f"Written: {options.page}")
    if failed:
        sys.exit("\n".join(failed))


def measured(benchmark: Benchmark, quick: bool) -> tuple[list[dict[str, Any]], str, str | None]:
    """Run one benchmark; return its rows, what it printed, and why it failed, if it did."""
    if benchmark.needs_data and not quick and "QUIETMAX_DATA" not in os.environ:
        return [], "", "not run: it needs the official data files; set QUIETMAX_DATA"
    if benchmark.name == "head" and not quick:
        prepare_diffprivlib()
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "rows.jsonl"
        run = subprocess.run(
            [
                sys.executable,
                f"benchmarks/{benchmark.name}.py",
                *(benchmark.quick if quick else benchmark.full),
            ],
            cwd=ROOT,
            env={**os.environ, "QUIETMAX_BENCH_ROWS": str(kept)},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        print(run.stdout, flush=True)
        rows = (
            [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]
            if kept.exists()
            else []
        )
    return rows, run.stdout, None if run.returncode == 0 else f"ended with exit code {run.returncode}"


def prepare_diffprivlib() -> None:
    """diffprivlib 0.6.6 does not work with scikit-learn 1.7 or later."""
    python = ENVIRONMENTS / "diffprivlib" / "bin" / "python"
    if not python.exists():
        venv.create(python.parent.parent, with_pip=True)
        wanted = ["diffprivlib==0.6.6", "scikit-learn==1.5.2"]
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True)


def part(
    benchmark: Benchmark, rows: list[dict[str, Any]], printed: str, problem: str | None, quick: bool
) -> str:
    """The part of the page about one benchmark."""
    how = f"`python benchmarks/{benchmark.name}.py`, {datetime.now(UTC):%Y-%m-%d}; {machine()}."
    lines = [f"## {benchmark.shows}", "", how]
    if quick:
        lines += ["", "**A quick run: it shows that the benchmark works; its figures mean nothing.**"]
    if problem:
        lines += ["", f"*{problem}*"]
    if rows:
        lines += ["", "| case | ours | | peer | peer's | ratio | spread | runs |"]
        lines += ["| --- | ---: | --- | --- | ---: | ---: | --- | ---: |"]
        lines += [_line(row) for row in rows]
    elif "| --- |" in printed:
        lines += ["", printed.strip()]
    elif printed.strip():
        lines += ["", "```text", printed.strip(), "```"]
    if benchmark.name == "growth" and not problem:
        lines += ["", "![Growth on double logarithmic axes](figures/growth.png)"]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    trials = [row["case"], f"{row['ours']:.4g}", row["unit"]]
    if row["ratio"] is None:
        trials += ["", "", "", ""]
    else:
        spread = f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}"
        trials += [row["peer"], f"{row['theirs']:.4g}", f"**{row['ratio']:.2f}**", spread]
    return f"| {' | '.join(trials)} | {row['runs']} |"


def machine() -> str:
    """Cores, processor and versions."""
    found = []
    for name in SHOWN_PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    processor = platform.machine()
    cpus = Path("/proc/cpuinfo")
    if cpus.exists() and (named := re.search(r"model name\s*: (.*)", cpus.read_text(encoding="utf-8"))):
        processor = named.group(1)
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    return (
        f"{os.cpu_count()} cores ({processor}), threads: {threads}, {platform.system()}, "
        f"Python {platform.python_version()}, {', '.join(found)}"
    )


def kept_parts(path: Path) -> dict[str, str]:
    """The parts of the page as it is, by benchmark."""
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    return {
        match.group(1): match.group(2).strip()
        for match in re.finditer(r"<!-- begin (\w+) -->\n(.*?)\n<!-- end -->", text, re.DOTALL)
    }


def page(parts: dict[str, str]) -> str:
    """The whole page, in the order of the benchmarks."""
    top = """# Benchmarks

`make bench` runs everything in `benchmarks/` and writes this page; `make bench QUICK=1` shows that it works. Both sides
of a comparison run in turns on the same machine; *ratio* is the peer's time divided by ours within one run (above 1:
we are faster), its median and spread over the runs. Accuracies are on the [results page](results.md).
"""
    bodies = [
        f"<!-- begin {each.name} -->\n{parts.get(each.name, _missing(each))}\n<!-- end -->"
        for each in BENCHMARKS
    ]
    return top + "\n" + "\n\n".join(bodies) + "\n"


def _missing(benchmark: Benchmark) -> str:
    found = f"Measured on [a page of its own]({benchmark.stored})" if benchmark.stored else "Not measured yet"
    return f"## {benchmark.shows}\n\n{found}: `python benchmarks/run.py --only {benchmark.name}`."


if __name__ == "__main__":
    main()
