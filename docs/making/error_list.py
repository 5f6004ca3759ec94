"""Lists every refusal a user can provoke, read from the sources, for the page `errors.md`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parents[2] / "src" / "quietmax"
MARKER = "<!-- the list of errors -->"
KINDS = {
    "InvalidInput",
    "DataUnavailable",
    "QuietmaxError",
    "BudgetExhausted",
    "EndpointError",
    "HttpError",
    "LedgerDamaged",
    "LedgerUnavailable",
}


@dataclass(frozen=True)
class Refusal:
    """One place that refuses: its module, the error, the HTTP status if any, and the sentence with … for values."""

    module: str
    place: str
    kind: str
    status: int | None
    sentence: str


def refusals(sources: Path = SOURCES) -> list[Refusal]:
    """All places that raise one of `KINDS`, or return one, with a sentence written there."""
    return sorted(
        (refusal for path in sorted(sources.rglob("*.py")) for refusal in _of_file(path, sources)),
        key=lambda refusal: refusal.place,
    )


def _of_file(path: Path, sources: Path) -> Iterator[Refusal]:
    relative = path.relative_to(sources)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        call = (
            node.exc if isinstance(node, ast.Raise) else node.value if isinstance(node, ast.Return) else None
        )
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            continue
        if call.func.id not in KINDS:
            continue
        status, arguments = None, list(call.args)
        if arguments and isinstance(arguments[0], ast.Constant) and isinstance(arguments[0].value, int):
            status, arguments = arguments[0].value, arguments[1:]
        sentence = _text(arguments[0]) if arguments else None
        if sentence is not None and len(sentence) > 1:
            yield Refusal(
                ".".join(relative.with_suffix("").parts).removesuffix(".__init__"),
                f"{relative.as_posix()}:{node.lineno:05d}",
                call.func.id,
                status,
                sentence,
            )


def _text(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else _value(part) for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return f"{left or '…'}{right or '…'}"
    return None


def _value(part: ast.expr) -> str:
    """What stands for a value in the list: one mark, whatever is computed there."""
    return "…" if isinstance(part, ast.FormattedValue) else ""


def as_markdown(found: list[Refusal]) -> str:
    """The list by module."""
    lines: list[str] = []
    for module in sorted({refusal.module for refusal in found}):
        lines += ["", f"### {module}", ""]
        for refusal in found:
            if refusal.module == module:
                kind = f"HTTP {refusal.status}" if refusal.status else f"`{refusal.kind}`"
                sentence = refusal.sentence.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
                lines.append(f"- {kind}: {sentence}")
    return "\n".join(lines)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this for every page; the list replaces its marker."""
    return markdown.replace(MARKER, as_markdown(refusals())) if MARKER in markdown else markdown
