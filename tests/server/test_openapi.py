"""The OpenAPI document describes the service: all routes, all responses."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from quietmax.server.app import _create_api
from tests.server.running_service import (
    Running,
)


def test_the_openapi_document_lists_every_route_and_no_other(plain: Running) -> None:
    document = plain.http.get("/openapi.json").json()
    routes = {
        (path, method.lower())
        for route in _create_api(plain.service).routes
        if (path := getattr(route, "path", None)) and path != "/openapi.json"
        for method in getattr(route, "methods", ())
    }
    described = {(path, method) for path, operations in document["paths"].items() for method in operations}
    assert described == routes
    assert len(described) >= 16


def test_the_document_describes_the_body_of_every_request_that_has_one(plain: Running) -> None:
    document = plain.http.get("/openapi.json").json()
    posted = {path: each["post"] for path, each in document["paths"].items() if "post" in each}
    assert {path for path, each in posted.items() if "requestBody" not in each} == {"/logout"}
    for path, names in (
        ("/v2/repository/index", {"ready"}),
        ("/v2/repository/models/{name}/load", {"parameters"}),
        ("/v2/repository/models/{name}/unload", {"parameters"}),
    ):
        body = posted[path]["requestBody"]
        reference = body["content"]["application/json"]["schema"]["$ref"]
        assert not body["required"]
        assert set(document["components"]["schemas"][reference.rpartition("/")[2]]["properties"]) == names
        assert {"408", "413", "429"} <= set(posted[path]["responses"])


@pytest.mark.slow
def test_schemathesis_finds_no_server_error_and_no_undocumented_answer(plain: Running) -> None:
    _schemathesis(plain, examples=60)


def test_schemathesis_finds_nothing_in_a_short_search(plain: Running) -> None:
    _schemathesis(plain, examples=5)


def test_schemathesis_finds_nothing_in_a_short_search_of_a_table(table: Running) -> None:
    _schemathesis(table, examples=5, model="table")


def _schemathesis(service: Running, examples: int, model: str = "plain") -> None:
    """Send valid and invalid requests to every operation, half of those to models for the one that exists."""
    schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json")
    checks = [
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
    ]
    statuses: set[int] = set()
    tried = 0
    for result in schema.get_all_operations():
        operation: Any = result.ok()  # type: ignore[union-attr]
        cases: Any = st.one_of(  # type: ignore[call-overload]
            operation.as_strategy(generation_mode=mode)
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        )

        @settings(
            max_examples=examples,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases, real=st.booleans())
        def search(case: Any, real: bool) -> None:
            if real and case.path_parameters:
                case.path_parameters = {"name": model, "version": "1"}
            response = case.call(headers={"Authorization": f"Bearer {service.key}"})
            case.validate_response(response, checks=checks)
            statuses.add(response.status_code)

        search()
        tried += 1
    assert tried >= 16
    assert {200, 404} <= statuses
