"""Runs the benchmarks and writes `benchmarks/results.md`: ratios with their spread, machine, versions, date.

    python benchmarks/run.py [--only noise growth | --all] [--quick] [--page benchmarks/results.md]

A few cases of each are shown in `docs/benchmarks.md`. By default it runs the ratios beside other libraries, in about 30
minutes. The long runs about accuracy and reliability have pages of their own; `--only NAME` or `--all` runs them.

Each benchmark is a script that can be run alone. Peers whose requirements are not ours (IBM ART, diffprivlib, MLServer)
get an environment of their own under `build/peers`. `--quick` is a small version that shows that everything runs; its
figures mean nothing, the page says so, and it is written to `build/benchmarks.md`. The page keeps the parts of
benchmarks that were not run this time, that failed, or that were stopped.
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
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SHOWN_PACKAGES = ("quietmax", "torch", "numpy", "scikit-learn", "opendp", "opacus", "uvicorn", "SQLAlchemy")


@dataclass(frozen=True)
class Benchmark:
    """A script, the arguments of a full and of a quick run, what it shows, what it needs, and a page of its own.

    `glance` names the cases whose ratios are shown at the top of the page.
    """

    name: str
    shows: str
    full: tuple[str, ...] = ()
    quick: tuple[str, ...] = ("--quick",)
    needs_data: bool = False
    stored: str = ""
    glance: tuple[str, ...] = ()


BENCHMARKS = (
    Benchmark(
        "noise",
        "Exact noise beside OpenDP's exact samplers",
        glance=(
            "gaussian noise, 1 values",
            "gaussian noise, 1,000,000 values",
            "laplace noise, 1 values",
            "laplace noise, 1,000,000 values",
        ),
    ),
    Benchmark(
        "stacked_training",
        "K networks at once beside a plain PyTorch loop",
        glance=("location, 31 at once", "adult, 21 at once", "mnist, 11 at once"),
    ),
    Benchmark(
        "algorithm1",
        "Private answers beside the plain forward pass",
        glance=("10,000 answers, private, exact source",),
    ),
    Benchmark(
        "dpsgd",
        "A sweep of DP-SGD networks beside Opacus",
        ("--rounds", "5"),
        ("--rounds", "1", "--epochs", "1"),
        glance=("44 networks, 100 epochs",),
    ),
    Benchmark(
        "head",
        "The private head beside diffprivlib and scikit-learn's logistic regression",
        ("--splits", "5"),
        needs_data=True,
        glance=(
            "100,000 rows, arrays",
            "100,000 rows, frame",
            "1,000,000 rows, arrays",
            "1,000,000 rows, frame",
        ),
    ),
    Benchmark(
        "series",
        "A series of heads on a table that grows beside one training on everybody",
        ("accuracy", "--every", "20"),
        ("accuracy", "--months", "3", "--people", "500", "--seeds", "0", "--output", os.devnull),
        needs_data=True,
        stored="results.md#a-table-that-grows",
    ),
    Benchmark(
        "table_accuracy",
        "Private heads on tables of people beside models without privacy",
        quick=("--seeds", "0", "--tables", "fair", "--output", os.devnull),
        needs_data=True,
        stored="results/table-accuracy.md",
    ),
    Benchmark(
        "tables",
        "Private heads on 27 real tables beside other private classifiers",
        ("run",),
        (
            "run",
            "--methods",
            "head",
            "--tables",
            "adult",
            "--epsilons",
            "1",
            "--seeds",
            "0",
            "--output",
            "build/tables.json",
        ),
        needs_data=True,
        stored="results/table-accuracy.md",
    ),
    Benchmark(
        "forecast",
        "The forecast of a head beside its accuracy on 15 real tables",
        ("run",),
        ("run", "--tables", "email", "--output", "build/forecast.json"),
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
        stored="results/table-accuracy.md#columns-of-free-text",
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
        stored="dpsgd.md",
    ),
    Benchmark("private_answers", "Accuracy per number of queries", ("--splits", "3"), needs_data=True),
    Benchmark(
        "shadow_attack",
        "The shadow attack beside IBM ART",
        ("--rounds", "3"),
        needs_data=True,
        glance=("location, 30 shadow networks",),
    ),
    Benchmark(
        "serving",
        "The service beside MLServer, and beside itself without privacy and ledger",
        ("--turns", "5"),
        ("--turns", "1", "--seconds", "0.5", "--without-mlserver"),
        glance=(
            "1 row, columns, table head",
            "100 rows, columns, table head",
            "1 row, JSON, private",
            "100 rows, JSON, private",
            "100 rows, JSON, private, 2 workers",
        ),
    ),
    Benchmark(
        "soak",
        "Two million requests: memory, open files and charges",
        ("--json", "docs/results/soak.json"),
        ("--requests", "2000"),
        stored="service.md#measured",
    ),
    Benchmark(
        "malformed",
        "100,000 malformed requests over HTTP and gRPC: no error of the service, nothing spent, memory and open files",
        ("--json", "docs/results/malformed.json"),
        ("--http", "500", "--grpc", "500"),
        stored="service.md#measured",
    ),
    Benchmark(
        "hostile",
        "Attacks on the service beside an honest client",
        ("--json", "docs/results/hostile.json"),
        ("--quick", "--only", "request smuggling"),
        stored="service.md#measured",
    ),
    Benchmark(
        "outage",
        "A database that is slow, cut off and stopped under load",
        ("--json", "docs/results/outage.json"),
        stored="service.md#measured",
    ),
    Benchmark(
        "observed",
        "Observed changes beside certified bounds",
        quick=("--dataset", "mnist-5k", "--records", "300", "--removals", "2"),
        needs_data=True,
    ),
    Benchmark(
        "worst_case_audit",
        "Audits on training sets made to be told apart, with all and with half of the noise",
        stored="audit.md#would-it-notice-half-the-noise",
    ),
    Benchmark(
        "person_audit",
        "Audits for a person with 30 rows, of training by persons and by records",
        quick=("--times", "64", "--output", os.devnull),
        stored="audit.md#one-person-30-rows",
    ),
    Benchmark(
        "one_run_audit",
        "Audits in one training, whose canaries' signals are summed, and of answers",
        quick=("--seeds", "1", "--draws", "20000", "--output", os.devnull),
        stored="audit.md#one-training-most-of-the-claim",
    ),
    Benchmark(
        "ray_scaling",
        "Teachers and shadow networks on 2 Ray workers beside 1",
        stored="how-to/large-data.md#measured",
    ),
    Benchmark(
        "out_of_core",
        "A private head on 20 million rows in files: memory, time of a pass, growth",
        ("build", "--json", "docs/results/large-table.json"),
        stored="how-to/large-data.md#measured",
    ),
    Benchmark(
        "growth",
        "How the cost grows with records, networks, classes, queries and replicas",
        glance=(
            "private head, fit, 16,000 records beside 1,000",
            "networks trained at once, 32 networks beside 1",
            "1,000 private answers, 1,000 classes beside 2",
            "charges in one ledger, 6,400 queries beside 100",
            "800 charges shared by replicas, 8 replicas beside 1",
        ),
    ),
)


RESULTS, QUICK_PAGE = ROOT / "benchmarks" / "results.md", ROOT / "build" / "benchmarks.md"
GLANCE = ROOT / "docs" / "benchmarks.md"
TABLE = (
    "| case | ours | | peer | peer's | ratio | spread | runs |",
    "| --- | ---: | --- | --- | ---: | ---: | --- | ---: |",
)
QUICK = "A quick run: it shows that the benchmark works; its figures mean nothing."


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Runs the benchmarks and writes benchmarks/results.md and docs/benchmarks.md. By default the "
        "ratios beside other libraries (about 30 minutes); long runs about accuracy and reliability have "
        "pages of their own and need --only or --all."
    )
    some = parser.add_mutually_exclusive_group()
    some.add_argument(
        "--only", nargs="+", choices=[each.name for each in BENCHMARKS], help="Only these benchmarks."
    )
    some.add_argument(
        "--all", action="store_true", help="Also the benchmarks that have pages of their own: many hours."
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"Small versions; writes {QUICK_PAGE.relative_to(ROOT)}."
    )
    parser.add_argument(
        "--page", type=Path, help=f"The page to write, instead of {RESULTS.relative_to(ROOT)}."
    )
    options = parser.parse_args()
    path = options.page or (QUICK_PAGE if options.quick else RESULTS)
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = kept_parts(path)
    problems = []
    for benchmark in chosen(options.only, everything=options.all):
        print(f"== {benchmark.name}", file=sys.stderr, flush=True)
        begun = time.monotonic()
        try:
            rows, printed, problem = measured(benchmark, options.quick)
        except KeyboardInterrupt:
            sys.exit(f"Stopped during {benchmark.name}; {path} has the parts that were finished.")
        print(f"== {benchmark.name}: {(time.monotonic() - begun) / 60:.1f} minutes", file=sys.stderr)
        if problem:
            problems.append(f"{benchmark.name}: {problem}")
            continue
        missing = set(benchmark.glance) - {row["case"] for row in rows}
        if missing and not options.quick:
            problems.append(f"{benchmark.name}: no row for {', '.join(sorted(missing))}")
        parts[benchmark.name] = part(benchmark, rows, printed, options.quick)
        path.write_text(page(parts), encoding="utf-8")
        if path == RESULTS:
            GLANCE.write_text(summary(parts), encoding="utf-8")
    print(f"Written: {path}")
    if problems:
        sys.exit("\n".join(problems))


def chosen(only: list[str] | None, *, everything: bool) -> list[Benchmark]:
    """The benchmarks to run: by default those that have no page of their own."""
    if only:
        return [each for each in BENCHMARKS if each.name in only]
    return [each for each in BENCHMARKS if everything or not each.stored]


def measured(benchmark: Benchmark, quick: bool) -> tuple[list[dict[str, Any]], str, str | None]:
    """Run one benchmark; return its rows, what it printed, and why it failed, if it did."""
    if benchmark.needs_data and not quick and "QUIETMAX_DATA" not in os.environ:
        return [], "", "not run: it needs the official data files; set QUIETMAX_DATA"
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


def part(benchmark: Benchmark, rows: list[dict[str, Any]], printed: str, quick: bool) -> str:
    """The part of the page about one benchmark: its rows, then what else it printed."""
    how = f"`python benchmarks/{benchmark.name}.py`, {datetime.now(UTC):%Y-%m-%d}; {machine()}."
    lines = [f"## {benchmark.shows}", "", how]
    if quick:
        lines += ["", f"**{QUICK}**"]
    if rows:
        lines += ["", *TABLE, *(_line(row) for row in rows)]
    if "| --- |" in printed:
        lines += ["", printed.strip()]
    elif printed.strip():
        lines += ["", "```text", printed.strip(), "```"]
    if benchmark.name == "growth" and not quick:
        lines += ["", "![Growth on double logarithmic axes](../docs/figures/growth.png)"]
    return "\n".join(lines)


def at_a_glance(parts: dict[str, str]) -> list[str]:
    """The rows of the first table: figures and dates as the parts of the page show them."""
    found = []
    for benchmark in BENCHMARKS:
        body = parts.get(benchmark.name, "")
        date = re.search(rf"`python benchmarks/{benchmark.name}\.py`, (\d{{4}}-\d\d-\d\d);", body)
        if date is None or TABLE[0] not in body:
            continue
        shown = date.group(1) + (", a quick run" if QUICK in body else "")
        for line in body.split("\n".join(TABLE) + "\n", 1)[1].splitlines():
            if not line.startswith("|"):
                break
            case, _, _, peer, _, ratio, spread, _ = (cell.strip() for cell in line.strip("|").split("|"))
            if ratio and case in benchmark.glance:
                found.append(f"| `{benchmark.name}` | {case} | {peer} | {ratio} | {spread} | {shown} |")
    return found


def _line(row: dict[str, Any]) -> str:
    trials = [row["case"], f"{row['ours']:.4g}", row["unit"]]
    if row["ratio"] is None:
        trials += ["", "", "", ""]
    else:
        spread = f"{_ratio(row['ratio_low'])} to {_ratio(row['ratio_high'])}"
        trials += [row["peer"], f"{row['theirs']:.4g}", f"**{_ratio(row['ratio'])}**", spread]
    return f"| {' | '.join(trials)} | {row['runs']} |"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


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
    """All parts, in the order of the benchmarks."""
    bodies = [
        f"<!-- begin {each.name} -->\n{parts.get(each.name, _missing(each))}\n<!-- end -->"
        for each in BENCHMARKS
    ]
    return "# Results of the benchmarks\n\n" + "\n\n".join(bodies) + "\n"


def summary(parts: dict[str, str]) -> str:
    """The page of the documentation: the cases that were chosen before the run."""
    return """# Benchmarks

`make bench` runs these benchmarks in about 30 minutes and writes this page; `make bench QUICK=1` shows that they
work. All cases, with machine and versions, are in `benchmarks/results.md`. Both sides of a comparison run in turns on
the same machine. *Ratio* is the peer's time divided by ours within one run (above 1: we are faster), its median and
spread over the runs. In the rows of `growth`, the peer is the same work at the smallest size, per record (network,
class, query; of replicas, in all): 1 means that the cost grows in proportion. Accuracies are on the [results
page](results.md); long runs are listed by `python benchmarks/run.py --help`.

| benchmark | case | peer | ratio | spread | date |
| --- | --- | --- | ---: | --- | --- |
""" + "".join(f"{line}\n" for line in at_a_glance(parts))


def _missing(benchmark: Benchmark) -> str:
    found = (
        f"Measured on [a page of its own](../docs/{benchmark.stored})"
        if benchmark.stored
        else "Not measured yet"
    )
    return f"## {benchmark.shows}\n\n{found}: `python benchmarks/run.py --only {benchmark.name}`."


if __name__ == "__main__":
    main()
