#!/usr/bin/env python3
"""Check a model folder of Quietmax, and what belongs to it, without Quietmax.

    python verify.py FOLDER [--ledger EXPORT] [--served-as NAME/VERSION] [--bundle FILE] [--witness FILE] [--key HEX]

The guarantee is recomputed from the facts that the folder states, as docs/specification.md says; its sections are named
below. Python 3.11 is enough, with the package `cryptography` for signatures. The last lines of this file are the place
to begin: `main` runs the checks in order. A check that fails adds a sentence to `fails`, and the exit code is 1.
"""

import argparse
import cmath
import hashlib
import json
import math
import struct
import sys
from fractions import Fraction
from pathlib import Path

UNITS = 5040 * 10**12  # a whole budget (section 1)
ROUNDING = 2.0**-53
UP = 1 + 2.0**-40  # computed sensitivities are widened by this
BROKEN = (KeyError, ValueError, TypeError, IndexError, AttributeError, ArithmeticError, OSError, RecursionError)
holds, assumed, fails = [], [], []  # the report: three lists of sentences


def need(condition, otherwise):
    """Add a sentence to what fails, unless a condition holds."""
    if not condition:
        fails.append(otherwise)
    return condition


def same(what, stated, computed, within=1e-9):
    """Need a stated value to be the computed one; numbers may differ by a relative error."""
    need(alike(stated, computed, within), f"{what} is stated as {stated!r}, but follows to be {computed!r}")


def alike(one, two, within):
    number = type(one) in (int, float) and type(two) in (int, float)
    if type(one) is list and type(two) is list:
        return len(one) == len(two) and all(alike(*each, within) for each in zip(one, two))
    return math.isclose(one, two, rel_tol=within) if number else type(one) is type(two) and one == two


def sha256(content):
    return hashlib.sha256(content).hexdigest()


# --- Section 1: costs -------------------------------------------------------------------------------------------------


def decimal(number):
    """The decimal number that a float prints as. Costs are exact fractions of these."""
    if type(number) not in (int, float) or not 0 < number < math.inf:
        raise ValueError(f"{number!r} is not a positive number")
    return Fraction(repr(float(number)))


def charged_units(amount, total):
    return math.ceil(amount * UNITS / total)


def share(total, releases):
    """The amount (epsilon, or mu squared) that each of several releases may take of a total."""
    return Fraction(UNITS // releases, UNITS) * total


def mills(x):
    """P(N > x) / density(x) of a standard normal variable."""
    if x < 25:
        return math.sqrt(math.pi / 2) * math.exp(x * x / 2) * math.erfc(x / math.sqrt(2))
    return 1 / (x + 1 / (x + 2 / (x + 3 / (x + 4 / x))))


def delta_of(mu, epsilon):
    """The delta at which mu-Gaussian privacy is (epsilon, delta)-differential privacy."""
    low, high = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    return math.erfc(low / math.sqrt(2)) / 2 - math.exp(-low * low / 2) / math.sqrt(2 * math.pi) * mills(high)


def first_true(condition, low, high):
    """The smallest positive number in a range from which on a condition is true, by bisection."""
    for _ in range(70):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if condition(middle) else (middle, high)
    return high


def mu_of(epsilon, delta):
    return first_true(lambda mu: delta_of(mu, epsilon) > delta, 1e-8, 1e4)


def epsilon_of(mu, delta):
    return first_true(lambda epsilon: delta_of(mu, epsilon) <= delta, 1e-12, 1e8)


# --- Section 4.3: an upper bound on the delta of Poisson-sampled Gaussian steps ----------------------------------------


def transform(values, sign):
    """The Fourier transform of complex numbers, whose count is a power of two (Cooley and Tukey)."""
    size, width = len(values), 1
    bits = size.bit_length() - 1
    found = [values[int(f"{place:0{bits}b}"[::-1], 2)] for place in range(size)]
    while width < size:
        turns = [cmath.exp(sign * 1j * math.pi * each / width) for each in range(width)]
        for start in range(0, size, 2 * width):
            for place, turn in enumerate(turns, start):
                other = found[place + width] * turn
                found[place + width] = found[place] - other
                found[place] += other
        width *= 2
    return found


def loss_at(x, sigma, rate):
    """The logarithm of the ratio of densities at x: (1 - rate) N(0, sigma^2) + rate N(1, sigma^2) over N(0, sigma^2)."""
    y = (2 * x - 1) / (2 * sigma**2)
    return y + math.log(rate + (1 - rate) * math.exp(-y)) if y > 0 else math.log1p(rate * math.expm1(y))


def one_step(sigma, rate, grid, removed):
    """The losses of one step as multiples of a grid: the first multiple, and the probability of each.

    P is the output with the record and Q without, or the other way round if it is added. The P-mass and the Q-mass of
    each grid interval are split between its two ends so that both masses are kept. This never lowers delta.
    """

    def mass(start, end, mean):
        start, end = (start - mean) / sigma / math.sqrt(2), (end - mean) / sigma / math.sqrt(2)
        return (math.erfc(start) - math.erfc(end) if start > 0 else math.erfc(-end) - math.erfc(-start)) / 2

    low, high = -12 * sigma, 12 * sigma + removed  # less than 1e-32 is outside
    first, last = math.ceil(loss_at(low, sigma, rate) / grid), math.floor(loss_at(high, sigma, rate) / grid)
    inner = (sigma**2 * math.log((math.expm1(k * grid) + rate) / rate) + 0.5 for k in range(first, last + 1))
    edges = [low, *(min(max(x, low), high) for x in inner), high]
    cells = len(edges) - 1
    masses = [0.0] * (cells + 1)
    for cell in range(cells):
        without = mass(edges[cell], edges[cell + 1], 0.0)
        taken = (1 - rate) * without + rate * mass(edges[cell], edges[cell + 1], 1.0)
        p, q = (taken, without) if removed else (without, taken)
        lower = first - 1 + cell if removed else -(first + cell)
        upper_mass = (p - q * math.exp(lower * grid)) / -math.expm1(-grid)
        upper_mass = min(max(upper_mass, 0.0) + 1e-6 * p, p)  # 1e-6 covers the rounding of the difference
        place = cell if removed else cells - 1 - cell
        masses[place + 1] += upper_mass
        masses[place] += p - upper_mass
    return (first - 1 if removed else -(first + cells - 1)), masses


def composed_delta(first, masses, grid, steps, epsilon):
    """An upper bound on E[max(0, 1 - exp(epsilon - L))], L the sum of so many independent losses.

    The masses are multiplied by exp(t * loss) before they are convolved, so that sums near epsilon are likely and
    rounding is small beside delta. At the end the factor is taken out again; this is exact for every t.
    """
    losses = [(first + place) * grid for place in range(len(masses))]
    epsilon -= steps * 1e-14 * (1 + max(map(abs, losses)))  # the rounding of losses

    def tilted(t):
        """The logarithm of the sum of the multiplied masses, and their shares of it."""
        top = max(t * loss for loss in losses)
        weights = [mass * math.exp(t * loss - top) for mass, loss in zip(masses, losses)]
        whole = math.fsum(weights)
        return top + math.log(whole), [weight / whole for weight in weights]

    def mean(t):
        return math.fsum(place * each for place, each in enumerate(tilted(t)[1]))

    wanted = epsilon / grid / steps - first
    if wanted >= len(masses) - 1:
        return steps * 1e-31  # no sum is above epsilon
    t = 0.0 if mean(0.0) >= wanted else first_true(lambda t: mean(t) >= wanted, 1e-6, 1e6)
    (level, shares), centre = tilted(t), mean(t)
    spread = 1 + math.sqrt(steps * math.fsum(each * (place - centre) ** 2 for place, each in enumerate(shares)))
    places = steps * (len(masses) - 1) + 1
    size = 2 ** math.ceil(math.log2(max(len(masses), min(places, 24 * spread, 2**18))))
    # The transform holds the places from `base` on; what wraps around from below only adds to delta.
    base = 0 if places <= size else min(int(steps * centre - 10 * spread), int(epsilon // grid) - steps * first)

    front = transform([complex(each) for each in shares] + [0j] * (size - len(shares)), -1)
    powers = [cmath.exp(steps * cmath.log(each)) if each else 0j for each in front]
    sums = [each.real / size for each in transform(powers, 1)]
    above = [max((steps * first + base + place) * grid - epsilon, 0.0) for place in range(size)]
    gains = [math.exp(-t * each) * -math.expm1(-each) for each in above]
    delta = math.fsum(sums[(base + place) % size] * gains[place] for place in range(size))
    # Each entry of a transform is off by at most `off` (Higham 2002, section 24.1); Parseval's identity adds this up.
    off = 8 * math.log2(size) * ROUNDING
    errors = [steps * (24 * ROUNDING * (abs(each) + off) + off) * (abs(each) + off) ** (steps - 1) for each in front]
    delta += math.sqrt(math.fsum(each**2 for each in errors) / size * math.fsum(each**2 for each in gains))
    delta += 2 * off * math.fsum(map(abs, powers)) / size * math.fsum(gains)
    if places > size:  # Chernoff's bound on what is above the last place
        top = (steps * first + base + size) * grid
        tries = [each / (spread * grid) for each in (0.5, 1, 2, 4, 8, 16)]
        beyond = min(steps * (tilted(t + each)[0] - level) - each * top for each in tries)
        delta += math.exp(min(0.0, beyond) - t * (top - epsilon))
    return math.exp(steps * level - t * epsilon) * delta * (1 + steps * 1e-11) + steps * 1e-31


def sampled_delta(sigma, rate, steps, epsilon):
    """An upper bound on the delta of Poisson-sampled steps, whether a record is removed or added."""
    unsampled = delta_of(math.sqrt(steps) / sigma, epsilon)
    low, high = loss_at(-12 * sigma, sigma, rate), loss_at(12 * sigma + 1, sigma, rate)
    if rate == 1 or high > 600:  # a sampled step never costs more than a whole one
        return unsampled
    points = [place / 80 for place in range(-480, 481)]
    bell = [math.exp(-point * point / 2) for point in points]

    def moments(shift):
        found = [loss_at(sigma * point + shift, sigma, rate) for point in points]
        mean = math.fsum(map(float.__mul__, bell, found)) / math.fsum(bell)
        return mean, math.fsum(each * (loss - mean) ** 2 for each, loss in zip(bell, found)) / math.fsum(bell)

    (without, narrow), (taken, wide) = moments(0), moments(1)
    wide = narrow + rate * (wide + (taken - without) ** 2)
    grid = max(math.sqrt(narrow) / 48, (high - low) / 2**15, 20 * math.sqrt(wide * steps) / 2**17)
    both = (composed_delta(*one_step(sigma, rate, grid, each), grid, steps, epsilon) for each in (True, False))
    return min(unsampled, max(both))
