"""`quietmax datasets`: the registered data sets, and which of them are present."""

from __future__ import annotations

from quietmax.cli._options import DataDir, with_groups
from quietmax.cli._output import console, print_json, print_table


@with_groups
def command(data_dir: DataDir = None) -> None:
    """List the data sets, their sizes and whether their files are present.

    Example: quietmax datasets
    """
    from quietmax.data.registry import dataset_status, datasets

    found = {name: (each, dataset_status(name, data_dir)) for name, each in datasets().items()}
    facts = ("title", "records", "holdout", "features", "classes", "shadow_models", "alpha")
    print_json(
        [
            {"name": name, **{fact: getattr(each, fact) for fact in facts}, **status._asdict()}
            for name, (each, status) in found.items()
        ]
    )
    rows = [
        (
            name,
            f"{each.records:,}" if each.holdout is None else f"all but {each.holdout:.0%}",
            f"{each.features:,}",
            str(each.classes),
            str(each.shadow_models),
            f"{each.alpha:g}",
            "yes" if status.present else "no",
        )
        for name, (each, status) in sorted(found.items(), key=lambda entry: not entry[1][1].present)
    ]
    print_table(
        "Data sets (records: size of the training part, and of the test part)",
        ("name", "records", "features", "classes", "shadow models", "alpha", "present"),
        rows,
        optional=("alpha", "shadow models"),
    )
    missing: dict[str, list[str]] = {}
    for name, (_, status) in found.items():
        if not status.present:
            missing.setdefault(status.message.partition(" needs ")[2], []).append(name)
    if missing:
        console.print("Missing files; the option --download of other commands fetches official ones:")
    for files, names in missing.items():
        console.print(f"  {', '.join(names)}: {files}", soft_wrap=True)
