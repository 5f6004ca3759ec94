"""Training a private head on a table that does not fit into memory: peak memory, time of a pass, and growth.

    python benchmarks/out_of_core.py FOLDER [--rows 20000000] [--json docs/results/large-table.json]
    python benchmarks/out_of_core.py --quick

Makes Parquet files of 50 columns (numbers, categories, booleans) in FOLDER, 200 bytes per row, and removes them at the
end. A child process trains `PrivateHead(1.0, 1e-5)` on them with its defaults. Reported are

- its peak memory (VmHWM, libraries included) and the size of its cache on disk;
- the time of one gradient step beside two things that no training can do without: reading the files once, and one pass
  in float32 over a matrix of the same number of rows and features, which is in memory. They alternate in one run: the
  child waits after a step while its parent reads the files and multiplies;
- how time and memory grow with the number of rows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from quietmax._threads import parallel_map
from quietmax.data import Schema
from quietmax.estimators import PrivateHead
from quietmax.estimators.blocks import Blocks, LocalEngine
from quietmax.estimators.head import training
from ratios import report

ROWS_PER_FILE, ROWS_AT_ONCE = 1_000_000, 100_000
NUMBERS = tuple(f"number {place}" for place in range(22))
COUNTS = tuple(f"count {place}" for place in range(7))
CATEGORIES = {
    f"kind {place}": tuple(f"kind {place} is {value}" for value in range(3 + place % 4))
    for place in range(13)
}
FLAGS = tuple(f"flag {place}" for place in range(8))
INCOMPLETE = NUMBERS[:6]
MISSING = 0.05
SCHEMA = Schema(
    label="label",
    classes=("no", "yes"),
    bounds=dict.fromkeys(NUMBERS, (-5.0, 5.0)) | dict.fromkeys(COUNTS, (0, 1000)),
    categories=CATEGORIES | dict.fromkeys(FLAGS, ("false", "true")),
    complete=tuple(name for name in (*NUMBERS, *COUNTS, *CATEGORIES, *FLAGS) if name not in INCOMPLETE),
)
COMPARED_STEPS = (2, 5, 8, 11, 14)
"""After these steps the child waits, and the parent measures what the step is compared with."""
STEP, RESULT = "step ", "result "


def batch(rows: int, rng: np.random.Generator) -> pa.Table:
    """Make some rows; the label follows a logistic model of all columns."""
    public = np.random.default_rng(2026)
    columns: dict[str, Any] = {}
    logits = np.zeros(rows)
    for name in NUMBERS:
        values = rng.standard_normal(rows)
        logits += public.normal() * values
        empty = rng.random(rows) < MISSING if name in INCOMPLETE else None
        columns[name] = pa.array(values, mask=empty)
    for name in COUNTS:
        counts = rng.poisson(rng.gamma(2.0, 20.0, rows)).astype(np.int32)
        logits += public.normal() * (counts / 40.0 - 1.0)
        columns[name] = counts
    for name, values in CATEGORIES.items():
        chosen = rng.choice(len(values), rows, p=public.dirichlet(np.ones(len(values)))).astype(np.int8)
        logits += public.normal(size=len(values))[chosen]
        columns[name] = pa.DictionaryArray.from_arrays(chosen, list(values)).cast(pa.string())
    for name in FLAGS:
        flags = rng.random(rows) < public.random()
        logits += public.normal() * flags
        columns[name] = flags
    ill = rng.random(rows) < 1 / (1 + np.exp(-(logits - 2.0) / 4.0))
    columns["label"] = pa.array(np.where(ill, "yes", "no"))
    return pa.table(columns)


def make_files(folder: Path, rows: int, seed: int) -> Path:
    """Write Parquet files of at most a million rows each; only a part of the rows is in memory."""
    folder.mkdir(parents=True)
    for number, start in enumerate(range(0, rows, ROWS_PER_FILE)):
        rng = np.random.default_rng([seed, number])
        left, writer = min(ROWS_PER_FILE, rows - start), None
        path = folder / f"part-{number:04}.parquet"
        while left:
            made = batch(min(ROWS_AT_ONCE, left), rng)
            writer = writer or pq.ParquetWriter(path, made.schema)
            writer.write_table(made)
            left -= made.num_rows
        assert writer is not None
        writer.close()
    return folder


def peak_kib() -> int:
    """The peak resident memory of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0])


# --- The child --------------------------------------------------------------------------------------------------------


def timed_calls(owner: Any, name: str, seconds: list[tuple[str, float]], label: str) -> None:
    """Note the seconds of every call of a function."""
    function = getattr(owner, name)

    def timed(*arguments: Any, **named: Any) -> Any:
        started = time.perf_counter()
        found = function(*arguments, **named)
        seconds.append((label, time.perf_counter() - started))
        return found

    setattr(owner, name, timed)


def fit(source: str, cache: str, compared: bool) -> None:
    """Train once; after some steps, tell the parent and wait for its answer."""
    libraries = peak_kib()
    seconds: list[tuple[str, float]] = []
    for name, label in (("read", "read and encode"), ("update", "change rows"), ("sum", "sum")):
        timed_calls(Blocks, name, seconds, label)
    waited = 0.0
    steps = 0
    gradient_sum = training.gradient_sum

    def stepped(*arguments: Any, **named: Any) -> Any:
        nonlocal steps, waited
        started = time.perf_counter()
        found = gradient_sum(*arguments, **named)
        taken = time.perf_counter() - started
        steps += 1
        if compared and steps in COMPARED_STEPS:
            features = arguments[0].features
            print(f"{STEP}{json.dumps({'seconds': taken, 'features': features})}", flush=True)
            started = time.perf_counter()
            sys.stdin.readline()
            waited += time.perf_counter() - started
        return found

    training.gradient_sum = stepped
    started = time.perf_counter()
    head = PrivateHead(1.0, 1e-5, schema=SCHEMA, engine=LocalEngine(cache_dir=cache)).fit(source)
    whole = time.perf_counter() - started - waited
    assert head.guarantee_.status == "proven"
    found = {
        "seconds": whole,
        "peak_kib": peak_kib(),
        "libraries_kib": libraries,
        "size": head.size_,
        "features": int(head.coef_.shape[1]),
        "feature_map": head.feature_map_.kind,
        "whitening": head.guarantee_.parameters["whitening"],
        "steps": steps,
        "passes": seconds,
        "step_seconds": [taken for label, taken in seconds if label == "sum"][-steps:],
    }
    print(RESULT + json.dumps(found), flush=True)


# --- The parent -------------------------------------------------------------------------------------------------------


def read_once(files: list[Path]) -> float:
    """Read all columns of all files, batch by batch; return the seconds."""
    started = time.perf_counter()
    for file in files:
        with pq.ParquetFile(file) as content:
            for _ in content.iter_batches(2**16):
                pass
    return time.perf_counter() - started


def float32_pass(rows: int, matrix: NDArray[np.float32]) -> float:
    """Compute logits and a gradient in float32, chunk by chunk on all threads, for all rows; return the seconds."""
    block = torch.from_numpy(matrix)
    weights = torch.zeros((2, block.shape[1]))

    def block_pass(number: int) -> None:
        for start in range(0, min(len(block), rows - number * len(block)), 4096):
            part = block[start : start + 4096]
            torch.softmax(weights @ part.T, dim=0) @ part

    started = time.perf_counter()
    parallel_map(block_pass, -(-rows // len(block)))
    return time.perf_counter() - started


def measured(source: Path, files: list[Path], rows: int, cache: Path, *, compared: bool) -> dict[str, Any]:
    """Train in a child process; with `compared`, measure its steps beside reading and multiplying."""
    cache.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--fit", str(source), "--cache", str(cache)]
    child = subprocess.Popen(
        [*command, "--compared"] if compared else command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    turns: list[dict[str, float]] = []
    found: dict[str, Any] = {}
    for line in child.stdout:
        if line.startswith(STEP):
            step = json.loads(line.removeprefix(STEP))
            features = step["features"]
            matrix = np.ones((max(512, 2**23 // features), features), np.float32)
            stored = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
            turns.append(
                {
                    "step": step["seconds"],
                    "reading": read_once(files),
                    "float32_pass": float32_pass(rows, matrix),
                    "cache_bytes": stored,
                }
            )
            print(f"    {turns[-1]}", flush=True)
            child.stdin.write("\n")
            child.stdin.flush()
        elif line.startswith(RESULT):
            found = json.loads(line.removeprefix(RESULT))
    if child.wait() != 0:
        raise SystemExit("The training failed.")
    left = [path.name for path in cache.iterdir()]
    assert not left, left
    return found | ({"turns": turns} if turns else {})


def exponent(sizes: list[int], values: list[float]) -> float:
    """The slope on double logarithmic axes."""
    return float(np.polyfit([math.log(size) for size in sizes], [math.log(value) for value in values], 1)[0])


def run(folder: Path, rows: int, sizes: list[int], store: Callable[[dict[str, Any]], None]) -> None:
    """Make the files, measure, and remove them."""
    results: dict[str, Any] = {"columns": 50, "threads": torch.get_num_threads(), "fits": {}}
    folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="quietmax-benchmark-", dir=folder))
    try:
        started = time.perf_counter()
        full = make_files(folder / "people", rows, seed=0)
        files = sorted(full.iterdir())
        results["rows"] = rows
        results["files"] = len(files)
        results["file_bytes"] = sum(file.stat().st_size for file in files)
        results["seconds_to_make"] = time.perf_counter() - started
        print(f"{rows:,} rows in {len(files)} files, {results['file_bytes'] / 1e9:.2f} GB", flush=True)
        for size in [*sizes, rows]:
            own = full if size == rows else make_files(folder / f"people-{size}", size, seed=0)
            found = measured(own, files, size, folder / "cache", compared=size == rows)
            results["fits"][str(size)] = found
            report("out_of_core", f"fit, {size:,} rows", [found["seconds"]], "s")
            report("out_of_core", f"peak memory, {size:,} rows", [found["peak_kib"] / 2**20], "GiB")
            if own != full:
                shutil.rmtree(own)
            store(results)
        turns = results["fits"][str(rows)].get("turns", [])
        if turns:
            report(
                "out_of_core",
                f"one gradient step, {rows:,} rows",
                [turn["step"] for turn in turns],
                "s",
                peer="reading + float32 pass",
                theirs=[turn["reading"] + turn["float32_pass"] for turn in turns],
            )
            results["step_over_reading_and_float32_pass"] = statistics.median(
                turn["step"] / (turn["reading"] + turn["float32_pass"]) for turn in turns
            )
        fitted = [*sizes, rows]
        for least in (fitted[0], 100_000):
            kept = [size for size in fitted if size >= least]
            if len(kept) > 1:
                fits = [results["fits"][str(size)] for size in kept]
                results[f"exponents_from_{least}"] = {
                    "fit": exponent(kept, [found["seconds"] for found in fits]),
                    "step": exponent(kept, [statistics.median(found["step_seconds"]) for found in fits]),
                    "peak_memory": exponent(kept, [found["peak_kib"] for found in fits]),
                }
                print(f"    exponents from {least:,} rows on: {results[f'exponents_from_{least}']}")
        store(results)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", nargs="?", type=Path, help="Where the files are made; by default a temporary one."
    )
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--sizes", type=int, nargs="*", default=[10_000, 100_000, 1_000_000, 5_000_000])
    parser.add_argument("--quick", action="store_true", help="20,000 rows, and 10,000 for the growth.")
    parser.add_argument("--json", type=Path, help="Add the figures to this file, as `out_of_core`.")
    parser.add_argument("--fit", help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    parser.add_argument("--compared", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fit:
        fit(options.fit, options.cache, options.compared)
        return

    def store(results: dict[str, Any]) -> None:
        if options.json is not None:
            kept = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else {}
            kept["out_of_core"] = results
            options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")

    rows, sizes = (20_000, [10_000]) if options.quick else (options.rows, options.sizes)
    run(options.folder or Path(os.environ.get("TMPDIR", tempfile.gettempdir())), rows, sizes, store)


if __name__ == "__main__":
    main()
