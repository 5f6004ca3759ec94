"""Lists every option of `quietmax serve` with its other names, read from the command itself."""

from __future__ import annotations

import html
import re
from typing import Any

from quietmax.cli import load_command
from quietmax.cli.serve import ServeOption, options_of

MARKER = "<!-- the options of serve -->"


def as_markdown() -> str:
    """The table: flag, environment variable, key, default, meaning."""
    lines = [
        "| command line | environment | TOML key | default | meaning |",
        "| --- | --- | --- | --- | --- |",
    ]
    for setting in options_of(load_command("serve")):
        option = setting.option
        flags = " ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))
        if option.param_type_name == "argument":
            flags = f"`{setting.key.upper()}...`"
        variable = "" if setting.variable is None else f"`{setting.variable}`"
        key = f"`{setting.key}`" if setting.in_file else ""
        lines.append(f"| {flags} | {variable} | {key} | {_default(setting)} | {_meaning(setting)} |")
    return "\n".join(lines)


def _default(setting: ServeOption) -> str:
    value = setting.option.default
    if value is None or value == []:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _meaning(setting: ServeOption) -> str:
    text = html.escape(setting.option.help.replace("\\[", "["), quote=False).replace("|", "\\|")
    return re.sub(r"(--[a-z][a-z-]+)", r"`\1`", text)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this for every page; the table replaces its marker."""
    return markdown.replace(MARKER, as_markdown()) if MARKER in markdown else markdown
