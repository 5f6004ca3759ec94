"""Puts the examples of docstrings into fences, so that Markdown shows them as code."""

from __future__ import annotations

from typing import Any

import griffe

from quietmax.estimators.base import filled


def fenced(text: str) -> str:
    """Return the text with every run of doctest lines in a fence.

    >>> fenced("Half.\\n\\n>>> half(2)\\n1\\n\\nSee there.").splitlines()
    ['Half.', '', '```pycon', '>>> half(2)', '1', '```', '', 'See there.']
    """
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith(">>>") and not inside:
            lines.append("```pycon")
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line)
    return "\n".join([*lines, *(["```"] if inside else [])])


class DoctestFences(griffe.Extension):
    """A step of mkdocstrings: every docstring gets its shared parts, and passes through `fenced`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(filled(obj.docstring.value))
