#!/usr/bin/env python3
"""Check a model folder of Quietmax, and what belongs to it, without Quietmax.

    python verify.py FOLDER [--ledger EXPORT --served-as NAME/VERSION] [--bundle FILE] [--witness FILE] [--key HEX]

The guarantee is recomputed from the facts that the folder states, as docs/specification.md says; its sections are named
below. Begin to read at `main`, at the end. A check that fails adds a sentence to `fails`; then the exit code is 1.
"""

import argparse
import cmath
import json
import math
import struct
import sys
from fractions import Fraction
from hashlib import sha256
from pathlib import Path

UNITS, ROUNDING, UP = 5040 * 10**12, 2.0**-53, 1 + 2.0**-40  # a budget; of a float; of computed sensitivities
holds, assumed, fails = [], [], []  # the report: three lists of sentences

def need(condition, otherwise):
    """Add a sentence to what fails, unless a condition holds."""
    if not condition:
        fails.append(otherwise)
    return condition
def same(what, stated, computed):
    """Need a stated value to be the computed one; numbers may differ by 1e-9 of themselves."""
    def alike(one, two):
        if type(one) is list and type(two) is list:
            return len(one) == len(two) and all(map(alike, one, two))
        numbers = {type(one), type(two)} <= {int, float}
        return math.isclose(one, two, rel_tol=1e-9) if numbers else type(one) is type(two) and one == two
    need(alike(stated, computed), f"{what}: stated {stated!r}, but it follows {computed!r}")

def decimal(number):
    """The decimal number that a float prints as. Costs are exact fractions of these."""
    if type(number) not in (int, float) or not 0 < number < math.inf:
        raise ValueError(f"{number!r} is not a positive number")
    return Fraction(repr(float(number)))
def delta_of(mu, epsilon):
    """The delta at which mu-Gaussian privacy is (epsilon, delta)-differential privacy."""
    low, x = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    mills = math.sqrt(math.pi / 2) * math.exp(x * x / 2) * math.erfc(x / math.sqrt(2)) if x < 25 else x / (1 + x * x)
    return math.erfc(low / math.sqrt(2)) / 2 - math.exp(-low * low / 2) / math.sqrt(2 * math.pi) * mills
def first_true(condition, low, high):
    """The smallest positive number in a range from which on a condition is true, by bisection."""
    for _ in range(70):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if condition(middle) else (middle, high)
    return high
def budget(epsilon, delta, gaussian):
    """What adds up: epsilon, or the square of the largest mu within (epsilon, delta)."""
    mu = gaussian and first_true(lambda mu: delta_of(mu, epsilon) > delta, 1e-8, 1e4)
    return decimal(mu) ** 2 if gaussian else decimal(epsilon)

# Section 4.3: an upper bound on the delta of Poisson-sampled Gaussian steps, in six functions.
def transform(values, sign):
    """The Fourier transform of complex numbers, whose count is a power of two (Cooley and Tukey)."""
    half = len(values) // 2
    if not half:
        return values
    even, odd = transform(values[::2], sign), transform(values[1::2], sign)
    turned = [cmath.exp(sign * 1j * math.pi * place / half) * each for place, each in enumerate(odd)]
    return [a + b for a, b in zip(even, turned)] + [a - b for a, b in zip(even, turned)]
def loss_at(x, sigma, rate):
    """The log ratio of densities at x: (1 - rate) N(0, sigma^2) + rate N(1, sigma^2) over N(0, sigma^2)."""
    y = (2 * x - 1) / (2 * sigma**2)
    return y + math.log(rate + (1 - rate) * math.exp(-y)) if y > 0 else math.log1p(rate * math.expm1(y))
def one_step(sigma, rate, grid, removed):
    """The losses of one step as multiples of a grid: the first multiple, and the probability of each.
    P is the output with the record, Q without, or the other way round if it is added. Both masses of a grid interval
    are split between its ends so that they are kept. This never lowers delta.
    """
    def mass(start, end, mean):
        start, end = (start - mean) / sigma / math.sqrt(2), (end - mean) / sigma / math.sqrt(2)
        return (math.erfc(start) - math.erfc(end) if start > 0 else math.erfc(-end) - math.erfc(-start)) / 2
    low, high = -12 * sigma, 12 * sigma + removed  # less than 1e-32 is outside
    first, last = math.ceil(loss_at(low, sigma, rate) / grid), math.floor(loss_at(high, sigma, rate) / grid)
    inner = (sigma**2 * math.log((math.expm1(k * grid) + rate) / rate) + 0.5 for k in range(first, last + 1))
    edges = [low, *(min(max(x, low), high) for x in inner), high]
    cells, masses = len(edges) - 1, [0.0] * len(edges)
    for cell in range(cells):
        without = mass(edges[cell], edges[cell + 1], 0.0)
        taken = (1 - rate) * without + rate * mass(edges[cell], edges[cell + 1], 1.0)
        p, q, place, lower = taken, without, cell, first - 1 + cell
        if not removed:
            p, q, place, lower = without, taken, cells - 1 - cell, -(first + cell)
        upper_mass = (p - q * math.exp(lower * grid)) / -math.expm1(-grid)
        upper_mass = min(max(upper_mass, 0.0) + 1e-6 * p, p)  # 1e-6 covers the rounding of the difference
        masses[place + 1] += upper_mass
        masses[place] += p - upper_mass
    return (first - 1 if removed else -(first + cells - 1)), masses
def mean_and_spread(masses):
    mean = math.fsum(place * each for place, each in enumerate(masses))
    return mean, math.sqrt(math.fsum(each * (place - mean) ** 2 for place, each in enumerate(masses)))

def composed_delta(first, masses, grid, steps, epsilon):
    """An upper bound on E[max(0, 1 - exp(epsilon - L))], L the sum of so many independent losses.
    Masses are multiplied by exp(t * loss) before they are convolved, so that rounding is small beside delta; at the end
    the factor is taken out again, which is exact for every t.
    """
    losses = [(first + place) * grid for place in range(len(masses))]
    epsilon -= steps * 1e-14 * (1 + max(map(abs, losses)))  # the rounding of losses
    def tilted(t):  # the logarithm of the sum of the multiplied masses, and their shares of it
        top = max(t * loss for loss in losses)
        weights = [mass * math.exp(t * loss - top) for mass, loss in zip(masses, losses)]
        whole = math.fsum(weights)
        return top + math.log(whole), [weight / whole for weight in weights]
    t = first_true(lambda t: (mean_and_spread(tilted(t)[1])[0] + first) * grid * steps >= epsilon, 1e-9, 1e4)
    level, shares = tilted(t)
    mean, spread = mean_and_spread(shares)
    spread = 1 + spread * math.sqrt(steps)
    size = 2 ** math.ceil(math.log2(max(len(masses), min(24 * spread, 2**18))))
    # The sums from place `base` on; what wraps around from below only adds to delta.
    base = min(int(steps * mean - 10 * spread), int(epsilon // grid) - steps * first)
    front = transform([complex(each) for each in shares] + [0j] * (size - len(shares)), -1)
    powers = [cmath.exp(steps * cmath.log(each)) if each else 0j for each in front]
    sums = [each.real / size for each in transform(powers, 1)]
    above = [max((steps * first + base + place) * grid - epsilon, 0.0) for place in range(size)]
    gains = [math.exp(-t * each) * -math.expm1(-each) for each in above]
    delta = math.fsum(sums[(base + place) % size] * gains[place] for place in range(size))
    # Each entry of a transform is off by at most 8 log2(size) roundings (Higham 2002, section 24.1).
    delta += (steps + 1) * (8 * math.log2(size) + 24) * ROUNDING * math.fsum(gains)
    top = (steps * first + base + size) * grid  # what is above the last place is bounded by Chernoff's inequality
    beyond = steps * (tilted(t + 8 / (spread * grid))[0] - level) - 8 / (spread * grid) * top
    delta += math.exp(min(0.0, beyond) - t * (top - epsilon))
    return math.exp(steps * level - t * epsilon) * delta * (1 + steps * 1e-11) + steps * 1e-31

def sampled_delta(sigma, rate, steps, epsilon):
    """An upper bound on the delta of Poisson-sampled steps, whether a record is removed or added."""
    unsampled = delta_of(math.sqrt(steps) / sigma, epsilon)
    width = loss_at(12 * sigma + 1, sigma, rate) - loss_at(-12 * sigma, sigma, rate)
    if rate == 1 or width > 600:  # a sampled step never costs more than a whole one
        return unsampled
    grid = width / 2**12
    for _ in range(3):  # from a coarse grid to one that is fine for the losses and coarse enough for their sum
        both = [one_step(sigma, rate, grid, removed) for removed in (True, False)]
        narrow, wide = sorted(grid * mean_and_spread(masses)[1] for _, masses in both)
        grid, used = max(narrow / 48, width / 2**15, 20 * wide * math.sqrt(steps) / 2**17), grid
    return min(unsampled, max(composed_delta(*each, used, steps, epsilon) for each in both))

BATCHED = "random-fourier scattering patches mirrored turned joined reduced encoder".split()
MAPS = ["identity", "scaling", "one-hot", "unit-norm", "table", "cells", "embedding", "pipeline", *BATCHED]
class Folder:
    """A model folder: `said` is its description, `claim` the guarantee, `facts` what the guarantee rests on."""
    def __init__(self, path):
        self.path = Path(path)
        self.said = said = json.loads((self.path / "model.json").read_text(encoding="utf-8"))
        self.claim, self.facts, self.map = said["guarantee"], said["guarantee"]["parameters"], said["features"]
        self.kind, self.classes, self.encoding = said["kind"], len(said["classes"]), said["encoding"]
        self.released = self.kind == "dpsgd" or self.facts.get("release") == "weights"
        self.maps = [self.map or {"kind": "identity"}]
        for each in self.maps:  # and the maps inside of maps
            self.maps += each.get("maps", ())
        self.cells = self.maps[0]["kind"] == "cells"
        content = (self.path / "weights.safetensors").read_bytes()
        need(sha256(content).hexdigest() == said["weights_sha256"], "the weights have another SHA-256")
        (length,) = struct.unpack("<Q", content[:8])
        self.tensors, self.body = json.loads(content[8 : 8 + length]), content[8 + length :]
    def shapes(self, **shapes):
        """Need these tensors, with these shapes, and no others."""
        found = {name: tuple(each["shape"]) for name, each in self.tensors.items() if name != "__metadata__"}
        need(found == shapes, f"the tensors have the shapes {found}, but must have {shapes}")
    def numbers(self, name):
        start, end = self.tensors[name]["data_offsets"]
        return struct.unpack(f"<{(end - start) // 8}d", self.body[start:end])
    def sizes(self):
        """The number of cells of each column, then of each cross of two columns (section 2.2)."""
        parts, numbers = self.map["parts"], self.map["numbers"]
        sizes = [last - first + 1 for first, last in parts]
        crossed = [9 if place in numbers else size for place, size in enumerate(sizes)]
        own = [self.map["levels"] + 1 if place in numbers else size for place, size in enumerate(sizes)]
        return own + [crossed[one] * crossed[other] for one, other in self.map["crosses"]]
    def check_common(self):
        """What folders of all kinds have in common (section 2.1)."""
        said, facts, claim = self.said, self.facts, self.claim
        stated = [said["format"], said["format_version"], said["unit"], facts.get("unit", said["unit"])]
        same("the format and the unit", stated, ["quietmax model", 4, claim["unit"], claim["unit"]])
        same("classes and size", [facts["classes"], facts["declared_size"]], [self.classes, said["declared_size"]])
        if self.kind != "teachers" and self.maps[0]["kind"] in MAPS:
            same("the feature map", facts["features"], self.map)
        stated = [facts.get("holdout"), claim["neighbours"], claim["extra_delta"]]
        same("holdout, neighbours, extra_delta", stated, [said["holdout"], "add-remove", 0.0])
        if self.encoding is not None:
            persons = self.encoding["person"] is None or said["unit"] == "person"
            same("the classes and persons of it", [len(self.encoding["classes"]), persons], [self.classes, True])
        for each in (each for each in self.maps if each["kind"] == "encoder"):
            name = f"encoder-{each['sha256'][:16]}{Path(each['file']).suffix.lower()}"
            same(f"the SHA-256 of {name}", each["sha256"], sha256((self.path / name).read_bytes()).hexdigest())

def head(folder):
    """Sections 4.1 (released weights) and 4.2 (answers from weights that are not released)."""
    facts, said, classes = folder.facts, folder.said, folder.classes
    gradient, width = facts["training_method"] == "gradient", folder.tensors["weights"]["shape"][1]
    whitening = folder.tensors.get("whitening", {"shape": ()})["shape"]
    kind, shapes = ("none", "centre", "moments")[len(whitening)], {"whitening": (width,) * len(whitening)}
    if folder.cells:
        width = 1 + sum(folder.sizes())
        kind, shapes = "cells", {"noise": (width,)}
    folder.shapes(weights=(classes, width), centre=(width - 1,), **(shapes if kind != "none" else {}))
    dimension, outputs = facts["dimension"], facts.get("outputs", classes)
    fits = outputs in (classes, 1 if classes == 2 else classes) and (folder.cells or dimension == width)
    need(fits, "the dimension and the outputs are not those of the weights and the classes")
    paid = {name for name in facts if name.startswith("mu_") and facts[name] is not None}
    check_releases(folder, kind, paid)
    if gradient:
        grid = 2.0**-30 * 2 ** max(0, math.ceil(math.log2(facts["declared_size"] / 2**22)))
        same("the loss and the grid", [facts["loss"], facts.get("grid", grid)], ["cross-entropy", grid])
        moved = facts["max_grad_norm"] + math.sqrt(outputs * dimension) * grid
    else:
        moved, longest = minimiser(facts, classes)
    same("released, and the sensitivity", [said["released"], facts["sensitivity"]], [folder.released, moved * UP])
    if not folder.released:
        need(not gradient, "answers are paid one by one with the output method only")
        length = math.hypot(*folder.numbers("weights"))
        need(length <= longest * (1 + 1e-9), "the weights are longer than a minimiser is")
        vector = moved * UP * (1 + 2.0**-20) + 4 * (width + 2) * ROUNDING * longest * math.sqrt(classes)
        bounds = [vector * math.sqrt(1 - 1 / classes) * UP, vector * UP]
        same("the bounds", [said["bounds"][each]["value"] for each in ("one", "vector")], bounds)
        return answers(folder, "permute-and-flip", bounds)
    own = decimal(facts["mu_training"]) ** 2 * (1 + Fraction(gradient, 2**48))
    own += sum(decimal(facts[name]) ** 2 for name in paid - {"mu_training", "mu_version"})
    mu, epsilon, delta = math.sqrt(own), said["epsilon"], said["delta"]
    same("mu_version", facts.get("mu_version"), mu if "cohort" in facts else None)
    agree = delta_of(mu * (1 - 2e-6), epsilon) < delta < delta_of(mu * (1 + 2e-6), epsilon)
    need(agree, f"the training has mu {mu:.6g}, which is not what epsilon {epsilon} and delta {delta} mean")
    return {"definition": "gaussian", "mu": math.sqrt(most_expensive_cohort(facts, own))}

def check_releases(folder, whitening, paid):
    """Section 4.1: what only a release can explain was paid for."""
    facts = folder.facts
    weights, noisy = facts.get("class_weights"), "noisy sizes" if "mu_class_sizes" in paid else "stated"
    follow = [whitening, "noisy count" if "mu_size" in paid else "declared", None if weights is None else noisy]
    stated = [facts.get("whitening", whitening), facts["size_from"], facts.get("class_weights_from")]
    same("whitening, size and weights of classes", stated, follow)
    need((whitening == "moments") == ("mu_moments" in paid), "second moments and what paid for them must go together")
    need(("scale" in facts) == ("mu_calibration" in paid), "the scale and what paid for it must go together")
    need(weights is None or 0 < min(weights) <= max(weights) == 1, "the weights of the classes must be from 0 to 1")
    if "mu_centring" not in paid and not facts.get("series"):
        centre = folder.numbers("centre")
        even = [1 / size for size in folder.sizes() for _ in range(size)] if folder.cells else [0.0] * len(centre)
        need(list(centre) == even and whitening != "centre", "there is a centre that nothing paid for")
def minimiser(facts, classes):
    """Section 4.2: how far one unit moves the minimiser, and how long the minimiser can be."""
    penalty, tolerance, size = facts["regularisation"], facts["tolerance"], facts["declared_size"]
    tilted = facts["loss"] == "convexified"
    least = 1e-6 if tilted else 0.005 * math.sqrt(2) / size
    need(tolerance >= least * (1 - 1e-9), f"the tolerance is {tolerance:g}, but training reaches {least:g} at best")
    ratio = 1 if tilted else 2  # of the true size to the declared one, at most
    longest = min(math.sqrt(2 * ratio * math.log(classes) / penalty), ratio * math.sqrt(2) / penalty)
    moved = math.sqrt(2) / size / penalty
    if tilted:
        weight = math.exp(facts["alpha"] * (math.log(classes) + math.sqrt(2) * longest)) / facts["mass"]
        moved = min((math.sqrt(2) / penalty + longest) * weight / (1 + weight), 2 * longest)
    return moved + 2 * tolerance / penalty, (longest + tolerance / penalty) * UP
def answers(folder, method, bounds):
    """Section 4.4: what all answers cost that are paid one by one."""
    facts, said = folder.facts, folder.said
    same("the bounds on scores", [facts["one_score"], facts["score_vector_l2"]], bounds)
    named = ["gaussian", None] if said.get("soft") else ["noisy-max", method]
    stated = [facts["queries"], facts["mechanism"], facts.get("method")]
    same("the number of answers and the method", stated, [said["queries"], *named])
    need(method in ("exponential", "permute-and-flip", "gaussian", "gaussian probabilities"), f"no method {method!r}")
    gaussian, queries = method.startswith("gaussian"), said["queries"]
    folder.each = Fraction(UNITS // queries, UNITS) * budget(said["epsilon"], said["delta"], gaussian)
    spent = {"mu": math.sqrt(folder.each * queries)} if gaussian else {"epsilon": float(folder.each * queries)}
    return {"definition": "gaussian" if gaussian else "pure", **spent}

def teachers(folder):
    """Section 4.4: one unit changes the vote of one teacher."""
    stated, soft = [folder.facts["teachers"], folder.said["soft"]], folder.said["method"] == "gaussian probabilities"
    same("the number of teachers, and soft", stated, [networks(folder), soft])
    return answers(folder, folder.said["method"], [1 + 2.0**-30, math.sqrt(2) * (1 + 2.0**-30)])
def networks(folder, **shapes):
    """Check the tensors of a stack of networks, and return how many they are."""
    widths, count = folder.said["widths"], folder.tensors["kernel.0"]["shape"][0]
    for layer, inner in enumerate(widths[:-1]):
        outer, last = widths[layer + 1], layer == len(widths) - 2
        shapes |= {f"kernel.{layer}": (count, outer, inner) if last else (count, inner, outer)}
        shapes |= {f"bias.{layer}": (count, 1, outer)}
    folder.shapes(**shapes)
    same("the outputs of the network", widths[-1], folder.classes)
    return count
def dpsgd(folder):
    """Section 4.3: Gaussian noise on clipped sums over samples."""
    facts, said = folder.facts, folder.said
    width = sum(folder.sizes()) if folder.cells else said["widths"][0]
    centred, proven = facts.get("centring_steps", 0) > 0, facts["analysis"] == "proven"
    released = {"centre": (width,)} if centred else {}
    released |= {"scale": (width + 1,)} if facts.get("inputs") == "scaled" else {}
    if folder.cells:
        folder.shapes(weights=(folder.classes, width + 1), **released)
    same("the number of networks", 1, 1 if folder.cells else networks(folder, **released))
    need(("scale" in facts) == (facts.get("calibration_steps", 0) > 0), "the scale and its steps must go together")
    epsilon, delta, sigma = said["epsilon"], said["delta"], facts["noise_multiplier"]
    rate, steps = facts["sampling_rate"], facts["steps"]
    stated = [facts["dimension"], facts["epsilon"], facts["delta"], facts["sampling"]]
    same("the settings", stated, [width, epsilon, delta, "poisson" if proven else "shuffled"])
    need(0 < rate <= 1 and type(steps) is int and steps >= 1, "there is no such sampling rate or number of steps")
    if proven or facts["accountant"] == "rdp":
        bound = sampled_delta(sigma, rate, steps, epsilon)
    else:  # each epoch counts as one Gaussian mechanism
        bound = delta_of(math.sqrt(rate * steps) / sigma, epsilon)
    need(bound <= 1.01 * delta, f"the noise gives delta {bound:.3g} at epsilon {epsilon}, but {delta:g} is claimed")
    holds.append(f"{steps} steps give delta <= {bound:.4g} at epsilon {epsilon:g} (claim {bound / delta - 1:+.2%}).")
    gaussian, point = {"mu": math.sqrt(steps) / sigma}, {"epsilon": epsilon, "delta": delta}
    return {"definition": "gaussian", **gaussian} if proven and rate == 1 else {"definition": "approximate", **point}
def most_expensive_cohort(facts, own):
    """Section 4.5: each person is in one cohort, so the most expensive cohort bounds all versions of a series."""
    series, cohort = facts.get("series", []), facts.get("cohort", {"version": 1, "name": None})
    numbers = [each["version"] for each in [*series, cohort]]
    same("the versions of the series", numbers, [*range(1, len(numbers) + 1)])
    spent = {cohort["name"]: own}
    for each in series:
        spent[each["cohort"]] = spent.get(each["cohort"], 0) + decimal(each["mu"]) ** 2
    return max(spent.values())

def check_status(folder):
    """Need the status that follows, and one assumption for each reason, known by some of its words."""
    facts, encoding, series = folder.facts, folder.encoding or {}, folder.facts.get("series") or ()
    kinds, counting = {each["kind"] for each in folder.maps}, facts.get("accountant")
    published, sampled = facts.get("analysis") == "published", facts.get("sampling_rate", 1) < 1
    conditions = {  # the status is conditional if one of these applies
        "Nobody knows the seed": facts["noise_source"]["exact"] is not True,
        "The set of classes is public": facts["classes_declared"] is not True,
        "is public: it was read off them": facts.get("size_declared", True) is not True,
        "What was read off the records is public": encoding.get("inferred"), "own feature map": not kinds <= {*MAPS},
        "This code computes each record": facts.get("own_code"), "What these steps learned": facts.get("fitted_steps"),
        "Shuffled batches protect" if counting == "rdp" else "leaves the other": published,
        "the guarantees of the earlier versions": any(each.get("status", "proven") != "proven" for each in series),
    }
    files = [each["sha256"] for each in folder.maps if each["kind"] == "encoder"]
    files += dict(encoding.get("encoders", ())).values()
    reasons = conditions | {f"(SHA-256 {each})": True for each in files} | {
        "What the owner declared or chose": True, "All rows of one person": folder.said["unit"] == "person",
        "texts are embedded one by one": encoding.get("encoders"), "embeddings in the records": "embedding" in kinds,
        "rounds a record's features": kinds & {*BATCHED}, "every network of a stack": folder.kind == "teachers",
        "Fourier transform": sampled and not published and counting == "pld", "cohort": series,
        "Renyi divergences of": not published and counting == "rdp", "erasure list": facts.get("erasure_list"),
    }
    words, stated = [each for each, applies in reasons.items() if applies], folder.claim["assumptions"]
    missing = [each for each in words if not any(each in sentence for sentence in stated)]
    need(not missing and len(stated) == len(words), f"not the {len(words)} assumptions that follow; missing: {missing}")
    same("the status", folder.claim["status"], "conditional" if any(conditions.values()) else "proven")
    assumed.extend([*stated, "The training did what the facts state. A folder cannot show this; audits test it."])

def check_account(folder):
    """Paid answers are counted in account.json; evaluations of released models are listed in evaluation.json."""
    path, said = folder.path / "account.json", folder.said
    if folder.released:
        need(not path.exists(), "the weights are released, but there is an account of paid answers")
        stored = json.loads((folder.path / "evaluation.json").read_text(encoding="utf-8"))
        same("the id of the evaluations", stored["id"], said["evaluation_id"])
        folder.evaluations, spent = stored["evaluations"], {"parallel": 0, "sequential": 0}
        for each in folder.evaluations:
            spent[each["composition"]] += decimal(each["mu"]) ** 2
        mu = math.sqrt(max(decimal(folder.claim["mu"] or 1) ** 2, spent["parallel"]) + spent["sequential"])
        if folder.claim["mu"]:
            holds.append(f"The model and its {len(folder.evaluations)} evaluations together: mu {mu:.6g}.")
        return
    account, moved = json.loads(path.read_text(encoding="utf-8")), (folder.path / "moved.txt").exists()
    same("the id of the account", account["id"], said["account_id"])
    folder.answered = int(account["answered"])
    holds.append(f"{folder.answered} of {said['queries']} answers were given, according to account.json.")
    need(folder.answered <= said["queries"], "more answers were given than were paid for")
    need(not moved or folder.answered == said["queries"], "a ledger has the budget, but the folder can spend it too")

COLUMNS = "account sequence time kind client model answers units spent_units limit_units detail previous".split()

def check_ledger(rows):
    """Follow the hash chain and the balance of each account; return the total of each account."""
    totals, last, parts, paid = {}, {}, {}, {}
    for row in rows:
        number, kind, where = row["account"], row["kind"], f"row {row['sequence']} of account {row['account']}"
        detail, units = json.loads(row["detail"] or "{}"), row["units"]
        sequence, head, balance, limit = last.get(number, (0, "0" * 64, 0, UNITS if kind == "open" else 0))
        need((row["sequence"], row["previous"]) == (sequence + 1, head), f"{where} follows no row")
        text = json.dumps([row[name] for name in COLUMNS], ensure_ascii=False, separators=(",", ":"))
        need(sha256(text.encode()).hexdigest() == row["hash"], f"{where} was edited: its SHA-256 is another")
        limit = row["spent_units"] if kind == "revoke" and not row["client"] else limit
        if kind == "open":
            mu = detail["total"].get("mu")
            totals[number] = (decimal(mu) ** 2 if mu else decimal(detail["total"]["epsilon"])), mu is not None
        if kind == "grant":
            total, gaussian = totals[number]
            limit = math.floor(budget(detail["terms"]["epsilon"], detail["terms"]["delta"], gaussian) * UNITS / total)
        need(abs(row["limit_units"] - limit) <= 1e-9 * limit, f"{where} changes the budget")
        need(0 <= balance <= balance + units == row["spent_units"] <= row["limit_units"], f"{where} does not add up")
        if kind in ("training", "evaluation") and "units" in detail:
            spent, part = parts.setdefault(number, {}), tuple(detail.get(name) for name in ("cohort", "split", "side"))
            earlier, spent[part] = parallel(spent), spent.get(part, 0) + detail["units"]
            need(units == parallel(spent) - earlier, f"{where} does not charge what its part of the account costs")
        if (request := (number, detail.get("request")))[1] is not None:
            need(detail.get("paid") == paid.get(request), f"{where} charges for a request that was charged before")
            paid[request] = paid.get(request, 0) + detail.get("units", units)
        last[number] = row["sequence"], row["hash"], row["spent_units"], row["limit_units"]
    holds.append(f"The ledger's {len(rows)} rows are chained, and the balances of {len(totals)} accounts add up.")
    return totals
def parallel(spent):
    """What parts cost together: the most expensive cohort; of each split, the larger side (section 6.2)."""
    found = [0]
    for cohort in {None, *(part[0] for part in spent)}:
        larger = {}
        for split, side in {part[1:] for part in spent}:
            units = spent.get((cohort, split, side), 0) + (spent.get((None, split, side), 0) if cohort else 0)
            larger[split] = max(units, larger.get(split, 0))
        found.append(sum(larger.values()))
    return max(found)

def recount(folder, rows, totals, label):
    """Section 6.3: compare what the ledger charged for this model with its answers, training and evaluations."""
    need(label in {row["model"] for row in rows}, f"the ledger has no rows of {label} (--served-as)")
    rows = [row for row in rows if row["model"] == label]
    kinds, mu = {row["kind"] for row in rows}, folder.facts.get("mu_version", folder.claim["mu"])
    for row in rows:
        detail, (total, measure) = json.loads(row["detail"] or "{}"), totals[row["account"]]
        charged = due = detail.get("units", row["units"])
        if row["kind"] in ("charge", "migrated-budget") and measure == (mu is not None):
            due = row["answers"] * math.ceil(folder.each * UNITS / total) - (detail.get("paid") or 0)
        if row["kind"] == "training" and measure == (mu is not None):
            due = math.ceil(decimal(mu) ** 2 * UNITS / total)
        need(abs(charged - max(due, 0)) <= 1e-9 * due, f"a row charges {charged} units for what costs {due}: {row}")
    if folder.released:
        need("training" in kinds and "charge" not in kinds, "the ledger did not charge for the training, and only once")
        for each in folder.evaluations:
            name = f"evaluation {rows[0]['account']} {each['id']} {each['mu']!r} {each['composition']}"
            need(each["reserved"] or sha256(name.encode()).hexdigest() in str(rows), "an evaluation was not charged")
    elif "migrated-budget" in kinds:
        need(folder.answered == folder.said["queries"], "a ledger has the budget, but the folder can spend it too")
    holds.append(f"The ledger charged {label} as its guarantee requires, in {len(rows)} rows.")

def signed(entry, key):
    """The content of a signed entry; its signature must be that of the given key, or of the key it names."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    need(key in (None, entry["public_key"]), "an entry was signed with another key than the given one")
    public, content = Ed25519PublicKey.from_public_bytes(bytes.fromhex(entry["public_key"])), entry["content"]
    public.verify(bytes.fromhex(entry["signature"]), content.encode())  # raises InvalidSignature
    return json.loads(content)
def check_bundle(folder, path, key):
    content = signed(json.loads(Path(path).read_text(encoding="utf-8")), key)
    files = {each.name: sha256(each.read_bytes()).hexdigest() for each in folder.path.iterdir()}
    for name in {*files, *content["files"]} - {"account.json", "moved.txt"}:
        need(files.get(name) == content["files"].get(name), f"the file {name} is not the one that was signed")
    need(getattr(folder, "answered", 0) >= (content["answered"] or 0), "answers that the bundle counts are forgotten")
    holds.append("The files are those that were signed.")
def check_witness(folder, rows, path, key):
    """What a second place wrote down must still be there: a ledger or a folder that went back is noticed."""
    before, heads, counted, places = "", {}, 0, set()
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        content = signed(json.loads(line), key)
        need((content["number"], content["previous"]) == (number, before), f"line {number} of it follows no line")
        before, account = sha256(line.encode()).hexdigest(), folder.said.get("account_id")
        heads |= {(chain, sequence): head for chain, sequence, head in content["heads"]}
        for answered, place in (each[1:] for each in content["folders"] if each[0] == account):
            need(answered >= counted, "the folder's account went back between two visits of the witness")
            counted, places = answered, places | {place}
    need(len(places) < 2, f"the witness saw this model at several places, where it could be spent twice: {places}")
    need(counted <= getattr(folder, "answered", counted), "the witness saw more answers than the folder counts")
    found = {(row["account"], row["sequence"]): row["hash"] for row in rows}
    lost = sorted({chain for (chain, row), head in heads.items() if rows and found.get((chain, row)) != head})
    need(not lost, f"rows that the witness saw are not in the ledger: it went back or was forked (accounts {lost})")
    holds.append(f"The {len(heads)} heads of the ledger and {counted} answers that the witness saw are still there.")

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("folder", "--ledger", "--served-as", "--bundle", "--witness", "--key"):
        parser.add_argument(name)
    given = parser.parse_args()
    try:
        folder = Folder(given.folder)
        folder.check_common()
        follows = {"head": head, "teachers": teachers, "dpsgd": dpsgd}[folder.kind](folder)
        for name in ("definition", "epsilon", "mu", "delta"):
            same(f"the {name} of the guarantee", folder.claim.get(name), follows.get(name))
        check_status(folder)
        check_account(folder)
        lines = Path(given.ledger).read_text(encoding="utf-8").splitlines() if given.ledger else []
        rows = [json.loads(line) for line in lines]
        if given.ledger:
            recount(folder, rows, check_ledger(rows), given.served_as)
        if given.bundle:
            check_bundle(folder, given.bundle, given.key)
        if given.witness:
            check_witness(folder, rows, given.witness, given.key)
        holds.extend([] if fails else ["Digests and shapes are as stated; status and numbers follow from the facts."])
        unknown = (given.bundle or given.witness) and not given.key
        assumed.extend(["The key that signed is the right one: --key names it."] if unknown else [])
        numbers = ", ".join(f"{name} {value:.6g}" for name, value in follows.items() if name != "definition")
        claim = f"{folder.claim['status']}: {follows['definition']} with {numbers}, for one {folder.said['unit']}"
    except Exception as problem:  # whatever cannot be read or computed fails
        fails.append(f"it is not as the specification says ({type(problem).__name__}: {problem})")
    for title, sentences in {"HOLDS": holds, "ASSUMED": assumed, "FAILS": fails}.items():
        print(f"{title}:", *(f"\n  - {each}" for each in sentences or ["nothing"]), sep="")
    print(f"VERDICT: {'does not hold' if fails else claim}")
    sys.exit(1 if fails else 0)

if __name__ == "__main__":
    main()
