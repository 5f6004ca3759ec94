from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from quietmax.accounting import LIMIT
from quietmax.ledger import Terms
from quietmax.mechanisms import Answerer
from quietmax.server import Settings
from tests.server.running_service import CLASSES, FEATURES, inference, running, some_rows


def test_an_answer_carries_its_tensors_its_cost_and_what_is_left(plain):
    told = plain.infer(some_rows(2)).json()
    assert (told["model_name"], told["model_version"]) == ("plain", "1")
    label, probabilities = told["outputs"]
    assert (label["name"], label["datatype"], label["shape"]) == ("label", "INT64", [2])
    assert (probabilities["name"], probabilities["datatype"], probabilities["shape"]) == (
        "probabilities",
        "FP32",
        [2, CLASSES],
    )
    table = np.array(probabilities["data"]).reshape(2, CLASSES)
    np.testing.assert_allclose(table.sum(1), 1, atol=1e-5)
    assert label["data"] == table.argmax(1).tolist()
    assert told["parameters"]["remaining_answers"] == 18
    assert told["parameters"]["new_answers"] == 2
    assert told["parameters"]["cost"] == pytest.approx(10 * (2 / 20) ** 0.5)
    assert told["parameters"]["remaining"] == pytest.approx(10 * (18 / 20) ** 0.5)


def test_an_unproven_guarantee_is_said_in_every_answer_in_the_metadata_and_on_the_page(plain):
    assert "refuted" in plain.infer(some_rows(1)).json()["parameters"]["warning"]
    metadata = plain.http.get("/v2/models/plain").json()["parameters"]
    assert metadata["guarantee_status"] == "refuted"
    assert "THEORY 2.1" in metadata["warning"]
    login = plain.http.post("/login", data={"key": plain.admin})
    page = plain.http.get("/", headers={"cookie": login.headers["set-cookie"].partition(";")[0]}).text
    assert "No proven guarantee (refuted)" in page
    assert "plain/1 (refuted) answers from this account without a proven guarantee" in page
    assert plain.http.get("/v2/models/plain/budget").json()["unproven_models"] == ["plain/1 (refuted)"]


def test_the_budget_is_spent_to_the_last_answer_and_then_refused_with_what_remains(plain):
    for number in range(4):
        assert plain.infer(some_rows(5, number)).status_code == 200
    refused = plain.infer(some_rows(1, 99))
    assert refused.status_code == 403
    assert refused.json()["remaining_answers"] == 0
    assert refused.json()["remaining"] == 0
    assert "nothing was spent" in refused.json()["error"]
    assert plain.ledger.account("people").spent_units == LIMIT
    assert plain.infer(some_rows(5, 0)).status_code == 200, "stored answers stay free"


def test_a_batch_larger_than_what_is_left_is_refused_whole(plain):
    assert plain.infer(some_rows(18)).status_code == 200
    refused = plain.infer(some_rows(3, 1))
    assert (refused.status_code, refused.json()["remaining_answers"]) == (403, 2)
    assert plain.infer(some_rows(2, 1)).status_code == 200


def test_a_quota_refuses_one_client_and_not_another(plain):
    plain.ledger.set_quota("people", "ann", 0.1, "two answers for ann")
    assert plain.infer(some_rows(2)).json()["parameters"]["remaining_answers"] == 0
    refused = plain.infer(some_rows(1, 1))
    assert (refused.status_code, "your quota" in refused.json()["error"]) == (403, True)
    other = plain.http.post(
        "/v2/models/plain/infer",
        json=inference(some_rows(1, 1)),
        headers={"authorization": f"Bearer {plain.admin}"},
    )
    assert other.status_code == 200


def test_the_same_query_again_gets_the_same_answer_at_no_cost(plain):
    rows = some_rows(3)
    first = plain.infer(rows).json()
    mixed = plain.infer(np.vstack([rows[::-1], some_rows(1, 7), rows[:1]])).json()
    before = np.array(first["outputs"][1]["data"]).reshape(3, CLASSES)
    after = np.array(mixed["outputs"][1]["data"]).reshape(5, CLASSES)
    np.testing.assert_array_equal(after[[2, 1, 0, 4]], before[[0, 1, 2, 0]])
    assert mixed["parameters"]["new_answers"] == 1
    assert mixed["parameters"]["remaining_answers"] == 16


def test_answers_drawn_together_are_stored_each_under_its_own_query(plain):
    queries = [some_rows(1 + number % 2, number) for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        first = [response.json()["outputs"] for response in pool.map(plain.infer, queries)]
    for rows, outputs in zip(queries, first, strict=True):
        again = plain.infer(rows).json()
        assert again["outputs"] == outputs
        assert again["parameters"]["new_answers"] == 0


def test_stored_answers_outlive_the_process(start):
    with start("plain", budget=Terms(10.0), queries=20) as service:
        first = service.infer(some_rows(1)).json()["outputs"]
    with start("plain", budget=Terms(10.0), queries=20) as service:
        again = service.infer(some_rows(1)).json()
        assert again["outputs"] == first
        assert again["parameters"]["cost"] == 0
        assert again["parameters"]["remaining_answers"] == 19


def test_stored_answers_can_be_turned_off(start):
    with start("plain", budget=Terms(10.0), queries=20, settings=Settings(stored_answers=False)) as service:
        tables = [service.infer(some_rows(1)).json()["outputs"][1]["data"] for _ in range(4)]
        assert len({tuple(table) for table in tables}) == 4
        assert service.ledger.account("people").spent_units == 4 * LIMIT // 20


def test_a_retry_with_the_same_id_is_free_and_another_body_is_refused_with_409(start):
    with start("plain", budget=Terms(10.0), queries=20, settings=Settings(stored_answers=False)) as service:
        first = service.infer(some_rows(2), id="mine")
        again = service.infer(some_rows(2), id="mine")
        assert first.json()["id"] == again.json()["id"] == "mine"
        assert first.json()["outputs"] == again.json()["outputs"]
        assert again.json()["parameters"]["cost"] == 0
        other = service.infer(some_rows(2, 5), id="mine")
        assert (other.status_code, "another request" in other.json()["error"]) == (409, True)
        assert service.ledger.account("people").spent_units == 2 * LIMIT // 20
        elsewhere = service.http.post(
            "/v2/models/plain/infer",
            json=inference(some_rows(1), id="mine"),
            headers={"authorization": f"Bearer {service.admin}"},
        )
        assert elsewhere.status_code == 200, "ids of different clients do not meet"


def test_many_retries_at_once_are_paid_once_and_all_get_one_answer(start):
    with (
        start("plain", budget=Terms(10.0), queries=20, settings=Settings(stored_answers=False)) as service,
        ThreadPoolExecutor(12) as pool,
    ):
        responses = list(pool.map(lambda _: service.infer(some_rows(1), id="same"), range(12)))
        assert {response.status_code for response in responses} == {200}
        assert len({response.json()["outputs"][1]["data"][0] for response in responses}) == 1
        assert service.ledger.account("people").spent_units == LIMIT // 20


def test_teachers_answer_as_often_as_their_own_budget_pays_for(start):
    with start("teachers") as service:
        told = service.infer(some_rows(30), "teachers").json()
        assert [output["name"] for output in told["outputs"]] == ["label"]
        assert told["parameters"]["guarantee_status"] == "proven"
        assert "warning" not in told["parameters"]
        assert told["parameters"]["remaining_answers"] == 10
        assert service.infer(some_rows(11, 1), "teachers").status_code == 403
        assert service.infer(some_rows(10, 1), "teachers").status_code == 200
        assert service.http.get("/v2/models/teachers/budget").json()["remaining_answers"] == 0


def test_a_head_of_released_weights_answers_any_number_of_queries_at_no_further_cost(start):
    with start("head") as service:
        for seed in range(5):
            told = service.infer(some_rows(100, seed), "head").json()
            assert told["parameters"]["cost"] == 0
            assert told["parameters"]["paid_at_training"] is True
        budget = service.http.get("/v2/models/head/budget").json()
        assert budget["spent_fraction"] == 1.0
        assert budget["remaining"] == 0
        assert budget["remaining_answers"] is None
        assert "paid at training" in budget["note"]
        assert [row.kind for row in service.ledger.export("visitors")] == ["open", "training"]


def test_a_head_gives_the_same_answer_as_the_estimator(start, models):
    from quietmax.estimators import open_private

    rows = some_rows(7)
    with start("head") as service:
        told = service.infer(rows, "head").json()
    expected = open_private(models / "head").predict_proba(rows.astype(np.float32))
    np.testing.assert_allclose(np.array(told["outputs"][1]["data"]).reshape(7, CLASSES), expected, atol=1e-6)


def test_a_head_that_answers_per_query_releases_labels_or_with_sampled_neuron_probabilities(start):
    with start("asked") as service:
        told = service.infer(some_rows(1), "asked").json()
        assert [output["name"] for output in told["outputs"]] == ["label"]
        assert told["parameters"]["remaining_answers"] == 39
    with start("asked", mechanism="sampled-neuron") as service:
        told = service.infer(some_rows(1), "asked").json()
        assert [output["name"] for output in told["outputs"]] == ["label", "probabilities"]
        assert told["parameters"]["guarantee_status"] == "proven"
        assert told["parameters"]["remaining_answers"] == 38


def test_several_models_and_versions_are_served_and_the_highest_version_by_default(tmp_path, models):
    names = [
        f"people/9={models / 'plain'}",
        f"people/10={models / 'plain'}",
        f"head={models / 'head'}",
    ]
    with running(
        f"sqlite:///{tmp_path / 'l.sqlite'}", names, budget=Terms(10.0, 1e-5), queries=20
    ) as service:
        assert service.http.get("/v2/models/people").json()["versions"] == ["9", "10"]
        assert service.infer(some_rows(1), "people").json()["model_version"] == "10"
        assert service.infer(some_rows(1), "people/versions/9").json()["model_version"] == "9"
        assert service.infer(some_rows(1), "people/versions/8").status_code == 404
        assert service.infer(some_rows(1), "nobody").status_code == 404
        listed = service.http.get("/v2/models").json()["models"]
        assert {(model["name"], model["version"]) for model in listed} == {
            ("people", "9"),
            ("people", "10"),
            ("head", "1"),
        }


def test_outputs_can_be_chosen_and_images_and_whole_numbers_are_taken(plain):
    request = inference(some_rows(1), outputs=[{"name": "label"}])
    told = plain.http.post("/v2/models/plain/infer", json=request).json()
    assert [output["name"] for output in told["outputs"]] == ["label"]
    nested = inference(some_rows(2, 1))
    nested["inputs"][0]["data"] = np.array(nested["inputs"][0]["data"]).reshape(2, FEATURES).tolist()
    assert plain.http.post("/v2/models/plain/infer", json=nested).status_code == 200
    whole = inference(np.arange(FEATURES)[None])
    whole["inputs"][0].update(datatype="UINT8", data=list(range(FEATURES)))
    assert plain.http.post("/v2/models/plain/infer", json=whole).status_code == 200


def test_equal_queries_in_other_number_formats_share_their_answer(plain):
    row = np.arange(FEATURES, dtype=np.float64)[None]
    first = plain.infer(row).json()
    whole = inference(row)
    whole["inputs"][0].update(datatype="INT64", data=[-0.0, 1, 2, 3, 4, 5])
    again = plain.http.post("/v2/models/plain/infer", json=whole).json()
    assert again["outputs"] == first["outputs"]
    assert again["parameters"]["cost"] == 0


def test_stored_answers_follow_their_rows_in_any_order_with_copies_and_signs_of_zero(start):
    rows = some_rows(4)
    rows[3] = 0.0
    with start("asked") as service:

        def labels(asked):
            told = service.infer(asked, "asked").json()
            return told["outputs"][0]["data"], told["parameters"]["new_answers"]

        first, new = labels(rows)
        assert new == 4
        order = [3, 1, 1, 0, 2, 3, 0]
        assert labels(rows[order]) == ([first[row] for row in order], 0)
        assert labels(-rows[3:]) == (first[3:], 0)
        assert labels(np.full((1, rows.shape[1]), 1e-46)) == (first[3:], 0)  # zero as a 32-bit number
        assert [labels(rows[row : row + 1]) for row in range(4)] == [([label], 0) for label in first]


def test_every_answer_is_paid_before_noise_is_drawn(plain, monkeypatch):
    balances = []
    original = Answerer.release

    def watched(self, scores):
        balances.append(plain.ledger.account("people").spent_units)
        return original(self, scores)

    monkeypatch.setattr(Answerer, "release", watched)
    for number in range(3):
        plain.infer(some_rows(1, number))
    assert balances == [LIMIT // 20, 2 * LIMIT // 20, 3 * LIMIT // 20]


def test_a_request_with_an_id_is_answered_only_after_its_answer_is_stored(plain, monkeypatch):
    order = []
    ledger = plain.ledger
    original = ledger.submit_answers

    def watched(store, done):
        def told(kept):
            order.append("stored")
            time.sleep(0.05)
            done(kept)

        original(store, told)

    monkeypatch.setattr(ledger, "submit_answers", watched)
    plain.infer(some_rows(1), id="x")
    order.append("answered")
    assert order == ["stored", "answered"]


def test_a_model_that_fails_after_the_charge_answers_503_and_the_service_goes_on(plain, monkeypatch):
    def broken(*_):
        raise RuntimeError("secret inner detail")

    with monkeypatch.context() as patch:
        patch.setattr(Answerer, "release", broken)
        failed = plain.infer(some_rows(1))
    assert failed.status_code == 503
    assert "secret inner detail" not in failed.text
    assert plain.infer(some_rows(1, 1)).status_code == 200


def test_scores_that_are_not_finite_count_as_undecided_not_as_an_error():
    from quietmax.accounting import PureCost
    from quietmax.estimators.teachers import VOTE_BOUNDS
    from quietmax.mechanisms import NoisyMax

    class Overflowing:
        classes = 3

        def scores(self, _):
            return np.array([[np.nan, 0, 0], [np.inf, 0, 0], [1e6, 0, 0]])

    mechanism = NoisyMax("exponential", bounds=VOTE_BOUNDS, per_query=PureCost(1.0))
    answerer = Answerer(Overflowing(), mechanism, non_finite="undecided")
    labels = answerer.answer(np.zeros((3, 2), np.float32)).labels
    assert len(labels) == 3
    assert labels[2] == 0


def test_only_exact_noise_can_be_drawn_by_the_service(models, monkeypatch):
    """Wherever a mechanism is asked to release, the source is the exact one; no option or file names another."""
    import inspect

    from quietmax.cli.serve import command
    from quietmax.mechanisms import Algorithm1
    from quietmax.noise import ExactNoise
    from quietmax.server import load_servables
    from quietmax.server.repository import Folder, paid_at_training, per_answer

    sources = []
    original = Algorithm1.release

    def watched(self, scores, source):
        sources.append(source)
        return original(self, scores, source)

    monkeypatch.setattr(Algorithm1, "release", watched)
    named = load_servables([str(models / "plain")], budget=Terms(1.0), accept_unproven=True)
    named[0].servable.answer(np.zeros((2, FEATURES), np.float32))
    assert sources
    assert all(type(source) is ExactNoise and source.exact for source in sources)
    for entry in (command, load_servables, per_answer, paid_at_training, Folder, Settings):
        assert not {"seed", "seeded", "source", "random_state"} & set(inspect.signature(entry).parameters)


def test_the_metadata_claim_what_the_account_pays_for_after_a_grant(plain):
    plain.ledger.grant("people", Terms(50.0, analysis="published"), "five times as many answers")
    assert plain.http.get("/v2/models/plain").json()["parameters"]["guarantee"]["mu"] == pytest.approx(50.0)
