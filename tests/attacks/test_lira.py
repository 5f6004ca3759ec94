"""LiRA and RMIA beside an independent implementation in plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

import quietmax as qm
from quietmax.attacks import RMIA, LiRA, ShadowPool
from quietmax.attacks.lira import bernoulli_distribution, gaussian_distribution
from quietmax.attacks.shadow_models import candidate_rows, leftover_rows
from quietmax.errors import InvalidInput


def naive_probabilities(network, features, label):
    """The probability one network gives one record's true class, and all others together."""
    logits = network.logits(features[None]).double()[0].tolist()
    weights = [math.exp(logit - max(logits)) for logit in logits]
    return weights[label] / sum(weights), (sum(weights) - weights[label]) / sum(weights)


def naive_table(networks, data, rows):
    """Own and other classes' probability for every network and record, one at a time."""
    records = data.records
    return [
        [naive_probabilities(network, records.features[row], records.labels[row]) for row in rows]
        for network in networks
    ]


def naive_lira(target, networks, inside, *, online, fixed):
    """``target`` and each of ``networks`` hold (own, others) per record; ``inside`` tells who trained on whom."""
    records = range(len(target))

    def scaled(entry):
        own, others = entry
        return math.log(own) - math.log(others)

    groups = {
        member: [
            [scaled(net[i]) for net, seen in zip(networks, inside, strict=True) if seen[i] == member]
            for i in records
        ]
        for member in (True, False)
    }

    def spread(member, i):
        if not fixed:
            return math.sqrt(np.var(groups[member][i], ddof=1))
        squares = sum(sum((v - np.mean(group)) ** 2 for v in group) for group in groups[member])
        return math.sqrt(squares / sum(len(group) - 1 for group in groups[member]))

    fixed_spread = {member: spread(member, 0) for member in (True, False) if fixed and groups[member][0]}
    scores = []
    for i in records:
        value = scaled(target[i])
        sds = {
            member: fixed_spread[member] if fixed else spread(member, i)
            for member in (True, False)
            if groups[member][i]
        }
        if online:
            inner = norm.logpdf(value, np.mean(groups[True][i]), sds[True])
            scores.append(inner - norm.logpdf(value, np.mean(groups[False][i]), sds[False]))
        else:
            scores.append((value - np.mean(groups[False][i])) / sds[False])
    return scores


def naive_rmia(target, networks, inside, candidates, *, gamma, offset):
    """The pairwise definition: for every x, count the z with LR(x, z) >= gamma."""

    def normaliser(i):
        outs = [net[i][0] for net, seen in zip(networks, inside, strict=True) if not seen[i]]
        ins = [net[i][0] for net, seen in zip(networks, inside, strict=True) if seen[i]]
        if offset is not None:
            return ((1 + offset) * np.mean(outs) + 1 - offset) / 2
        return (np.mean(ins) + np.mean(outs)) / 2 if ins else np.mean(outs)

    ratios = [target[i][0] / normaliser(i) for i in range(len(target))]
    population = ratios[candidates:]
    return [sum(x / z >= gamma for z in population) / len(population) for x in ratios[:candidates]]


def naive_view(model, data, pool, rows):
    inside = pool.inside[:, rows].tolist()
    return naive_table([model.network], data, rows)[0], naive_table(pool.each(), data, rows), inside


@pytest.mark.parametrize("variance", ["fixed", "per-example"])
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_lira_equals_the_loops(memorised, overfitted, around_pool, mode, variance):
    attack = LiRA(mode=mode, variance=variance)
    asked = attack.ask(overfitted, memorised)
    scores = attack.fit(around_pool, "probabilities").scores(asked.answers)
    view = naive_view(overfitted, memorised, around_pool, candidate_rows(memorised))
    expected = naive_lira(*view, online=mode == "online", fixed=variance == "fixed")
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)


def test_offline_lira_learns_from_networks_outside_alone(memorised, overfitted, outside_pool):
    attack = LiRA(mode="offline")
    scores = attack.fit(outside_pool, "probabilities").scores(attack.ask(overfitted, memorised).answers)
    view = naive_view(overfitted, memorised, outside_pool, candidate_rows(memorised))
    np.testing.assert_allclose(scores, naive_lira(*view, online=False, fixed=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offset", [None, 0.0, 0.3, 1.0])
def test_rmia_equals_the_pairwise_loops(memorised, overfitted, around_pool, offset):
    attack = RMIA(mode="online" if offset is None else "offline", offset=offset, population=60)
    fitted = attack.fit(around_pool, "probabilities")
    scores = fitted.scores(attack.ask(overfitted, memorised).answers)
    rows = np.concatenate([candidate_rows(memorised), leftover_rows(memorised, 60, 0)])
    view = naive_view(overfitted, memorised, around_pool, rows)
    expected = naive_rmia(*view, 200, gamma=2.0, offset=offset)
    # A ratio at gamma within rounding may fall either way: one of 60 population records.
    np.testing.assert_allclose(scores, expected, atol=1.01 / 60)
    assert np.mean(scores == pytest.approx(expected)) > 0.98


def test_leaving_a_network_out_equals_fitting_the_others():
    generator = np.random.default_rng(0)
    values, counted = generator.normal(5, 2, (7, 9)), generator.random((7, 9)) < 0.6
    for variance in ("fixed", "per-example"):
        together = gaussian_distribution(values, counted, variance, leave_one_out=True)
        for index in range(7):
            others = np.arange(7) != index
            alone = gaussian_distribution(values[others], counted[others], variance, leave_one_out=False)
            known = together.known[index]
            np.testing.assert_array_equal(known, alone.known)
            np.testing.assert_allclose(together.mean[index][known], alone.mean[known])
            np.testing.assert_allclose(together.variance[index][known], alone.variance[known])
    right = (values > 5).astype(float)
    together = bernoulli_distribution(right, counted, leave_one_out=True)
    alone = bernoulli_distribution(right[1:], counted[1:], leave_one_out=False)
    np.testing.assert_allclose(together.probability[0], alone.probability)


@pytest.mark.parametrize("attack", [LiRA(), LiRA(mode="offline"), RMIA(), RMIA(mode="offline")])
def test_what_was_learned_by_heart_is_told_apart(memorised, overfitted, around_pool, attack):
    report = attack.run(overfitted, memorised, pool=around_pool)
    assert report.auc.low > 0.9
    assert report.leakage.low > 0.5
    assert report.advantage.value == report.leakage.value


@pytest.mark.parametrize("attack", [LiRA(), LiRA(mode="offline"), RMIA(), RMIA(mode="offline")])
@pytest.mark.parametrize("released", ["probabilities", "labels"])
def test_a_network_that_saw_nothing_leaks_nothing(memorised, untrained, around_pool, attack, released):
    target = untrained if released == "probabilities" else untrained.predict
    report = attack.run(untrained, memorised, pool=around_pool, target=target)
    assert report.released == released
    # Under no difference the AUC of 100 and 100 has standard deviation 0.041: 0.21 is more than five of them.
    assert abs(report.auc.value - 0.5) < 0.21
    assert abs(report.leakage.value) < 0.36


@pytest.mark.parametrize("attack", [LiRA(), LiRA(mode="offline"), RMIA(), RMIA(mode="offline")])
def test_labels_alone_still_tell_memorised_records(memorised, overfitted, around_pool, attack):
    report = attack.run(overfitted, memorised, pool=around_pool, target=overfitted.predict)
    assert report.released == "labels"
    assert report.auc.value > 0.75


def test_bernoulli_laws_give_the_likelihood_ratio_of_the_label(memorised, overfitted, around_pool):
    attack = LiRA()
    fitted = attack.fit(around_pool, "labels")
    answers = attack.ask(overfitted.predict, memorised).answers
    scores = fitted.scores(answers)
    candidates = candidate_rows(memorised)
    features, labels = memorised.records.features[candidates], memorised.records.labels[candidates]
    right = [
        [int(net.logits(features[i][None]).argmax()) == labels[i] for i in range(20)]
        for net in around_pool.each()
    ]
    for i in range(20):
        seen = [
            net[i] for net, inside in zip(right, around_pool.inside[:, candidates], strict=True) if inside[i]
        ]
        unseen = [
            net[i]
            for net, inside in zip(right, around_pool.inside[:, candidates], strict=True)
            if not inside[i]
        ]
        p, q = (sum(seen) + 0.5) / 7, (sum(unseen) + 0.5) / 7
        hit = answers.labels[i] == labels[i]
        assert scores[i] == pytest.approx(math.log(p / q) if hit else math.log((1 - p) / (1 - q)))


def test_the_population_is_asked_too_and_counted(memorised, overfitted, around_pool):
    report = RMIA(population=50).run(overfitted, memorised, pool=around_pool)
    assert report.queries == 250
    assert (report.members, report.nonmembers) == (100, 100)


def test_without_leftover_records_candidates_are_compared_with_each_other(memorised, overfitted):
    everything = qm.Split(
        memorised.records, memorised.train_rows, memorised.test_rows, memorised.pool_rows[:0], 0
    )
    pool = ShadowPool.around(everything, overfitted.settings, 8)
    report = RMIA().run(overfitted, everything, pool=pool)
    assert report.queries == 200
    assert "compared with each other" in report.notes[-1]
    assert report.auc.value > 0.9


@pytest.mark.parametrize("attack", [LiRA(), RMIA()])
def test_online_attacks_refuse_networks_that_saw_no_candidate(memorised, overfitted, outside_pool, attack):
    with pytest.raises(InvalidInput, match="needs a shadow pool of design around"):
        attack.run(overfitted, memorised, pool=outside_pool)


@pytest.mark.parametrize("attack", [LiRA(), LiRA(variance="per-example"), RMIA(), RMIA(mode="offline")])
def test_too_few_reference_networks_are_refused(memorised, overfitted, attack):
    pool = ShadowPool.around(memorised, overfitted.settings, 2)
    with pytest.raises(InvalidInput, match="too few"):
        attack.run(overfitted, memorised, pool=pool)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LiRA(mode="sideways"),
        lambda: LiRA(variance="none"),
        lambda: RMIA(mode="sideways"),
        lambda: RMIA(gamma=0.0),
        lambda: RMIA(offset=2.0),
        lambda: RMIA(population=0),
    ],
)
def test_wrong_words_and_numbers_are_refused(make):
    with pytest.raises(InvalidInput):
        make()


def naive_training(features, labels, classes, settings, seed):
    """An ordinary network trained in an ordinary loop with automatic differentiation."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    network = torch.nn.Sequential(
        torch.nn.Linear(features.shape[1], settings.hidden[0]),
        torch.nn.Tanh(),
        torch.nn.Linear(settings.hidden[0], classes),
    )
    kernels, biases = [network[0].weight, network[2].weight], [network[0].bias, network[2].bias]
    groups = [{"params": kernels, "weight_decay": 2 * settings.l2}, {"params": biases}]
    optimizer = torch.optim.Adam(groups, lr=settings.learning_rate)
    for _ in range(settings.epochs):
        for batch in torch.randperm(len(features), generator=generator).split(settings.batch_size):
            optimizer.zero_grad()
            qm.models.losses.value(settings.loss, network(features[batch]), labels[batch]).backward()
            optimizer.step()
    return network


@pytest.mark.slow
def test_on_location_the_areas_are_those_of_an_independent_implementation(real_data):
    """Own random halves, own training loop, own formulas, 16 reference networks each."""
    data = qm.load("location", data_dir=real_data)
    model = qm.train(data)
    ours = ShadowPool.around(data, model.settings, 16)
    rows = np.concatenate([candidate_rows(data), leftover_rows(data, 2500, 0)])
    features, labels = (
        torch.from_numpy(data.records.features[rows]),
        torch.from_numpy(data.records.labels[rows]),
    )
    generator = np.random.default_rng(99)
    networks, inside = [], []
    for pair in range(8):
        chosen = generator.permutation(2400)
        for half, own in enumerate((chosen[:1200], chosen[1200:])):
            network = naive_training(features[own], labels[own], 30, model.settings, 100 + 2 * pair + half)
            with torch.no_grad():
                probabilities = torch.softmax(network(features).double(), -1)
            truth = probabilities[torch.arange(len(rows)), labels]
            networks.append(torch.stack([truth, probabilities.sum(-1) - truth], 1).clamp(1e-300).tolist())
            inside.append(np.isin(np.arange(len(rows)), own).tolist())
    answers = torch.softmax(torch.from_numpy(model.logits(data.records.features[rows])), -1)
    truth = answers[torch.arange(len(rows)), labels]
    target = torch.stack([truth, answers.sum(-1) - truth], 1).clamp(1e-300).tolist()
    members = np.repeat([1, 0], 1200)

    def compare(attack, naive_scores):
        found = attack.run(model, data, pool=ours).auc.value
        assert found == pytest.approx(roc_auc_score(members, naive_scores), abs=0.02)
        return found

    candidates = [entry[:2400] for entry in networks], [seen[:2400] for seen in inside]
    for mode in ("online", "offline"):
        scores = naive_lira(target[:2400], *candidates, online=mode == "online", fixed=True)
        assert compare(LiRA(mode=mode), scores) > 0.85
    scores = naive_rmia(target, networks, inside, 2400, gamma=2.0, offset=None)
    assert compare(RMIA(), scores) > 0.85
