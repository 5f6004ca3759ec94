"""`quietmax datasets`: which data sets there are, and which are present."""

from __future__ import annotations

from quietmax.cli._options import DataDir, Json
from quietmax.cli._output import print_json, print_table
from quietmax.data.registry import dataset_status, datasets


def command(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the data sets: the paper's eleven configurations and the embedded digits.

    Example: quietmax datasets
    """
    found = {name: dataset_status(name, data_dir) for name in datasets()}
    if as_json:
        print_json(
            [
                {
                    "name": name,
                    "title": each.title,
                    "records": each.records,
                    "features": each.features,
                    "classes": each.classes,
                    "shadow_models": each.shadow_models,
                    "alpha": each.alpha,
                    "present": found[name].present,
                    "sentence": found[name].sentence,
                }
                for name, each in datasets().items()
            ]
        )
        return
    print_table(
        "Data sets (records: of the training part, and as many of the test part)",
        ("name", "records", "features", "classes", "shadow models", "alpha", "present"),
        (
            (
                name,
                f"{each.records:,}",
                f"{each.features:,}",
                str(each.classes),
                str(each.shadow_models),
                f"{each.alpha:g}",
                "yes" if found[name].present else "no",
            )
            for name, each in datasets().items()
        ),
    )
    for each in found.values():
        if not each.present:
            print(each.sentence)
