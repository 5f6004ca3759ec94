"""The OpenAPI document. Its schemas are written by hand, since the inference endpoint has no pydantic models."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from quietmax.server.codec import COLUMN_DATATYPES

_STRING = {"type": "string"}
_NUMBER = {"type": "number"}
_INTEGER = {"type": "integer"}
_BOOLEAN = {"type": "boolean"}


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        **more,
    }


def _list(of: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": of, **more}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


_MEASURE = _one_of("pure", "gaussian")
_STATUS = _one_of("proven", "conditional", "refuted")
_TENSORS = _list(_object({"name": _STRING, "datatype": _STRING, "shape": _list(_INTEGER)}))
_PARAMETERS = {"type": "object", "additionalProperties": True}
_INPUT = _object(
    {
        "name": {"type": "string", "description": "`features`, or a column of the table."},
        "shape": _list({"type": "integer", "minimum": 0}, minItems=1, maxItems=8),
        "datatype": _one_of(*COLUMN_DATATYPES),
    },
    {"data": _list({}), "parameters": _PARAMETERS},
)
SCHEMAS: dict[str, dict[str, Any]] = {
    "Error": _object({"error": _STRING}, {"remaining": _NUMBER, "remaining_answers": _INTEGER}),
    "Live": _object({"live": _BOOLEAN}),
    "Ready": _object({"ready": _BOOLEAN}),
    "ServerMetadata": _object({"name": _STRING, "version": _STRING, "extensions": _list(_STRING)}),
    "RepositoryIndex": _list(
        _object(
            {
                "name": _STRING,
                "version": _STRING,
                "state": _one_of("READY", "UNAVAILABLE"),
                "reason": _STRING,
            }
        )
    ),
    "Changed": _object({}),
    "ModelList": _object({"models": _list(_object({"name": _STRING, "version": _STRING}))}),
    "ModelMetadata": _object(
        {
            "name": _STRING,
            "versions": _list(_STRING),
            "platform": _STRING,
            "inputs": _TENSORS,
            "outputs": _TENSORS,
            "parameters": _object(
                {
                    "classes": _list(_STRING),
                    "mechanism": _STRING,
                    "guarantee_status": _STATUS,
                    "guarantee": {"type": "object"},
                    "measure": _MEASURE,
                    "cost_per_answer": _NUMBER,
                    "paid_at_training": _BOOLEAN,
                    "max_rows": _INTEGER,
                },
                {
                    "warning": _STRING,
                    "kind": _STRING,
                    "encoding": {"type": "object"},
                    "encoded_input": {"type": "object"},
                },
            ),
        }
    ),
    "Budget": _object(
        {
            "account": _STRING,
            "measure": _MEASURE,
            "terms": {"type": "object"},
            "total": _NUMBER,
            "spent": _NUMBER,
            "remaining": _NUMBER,
            "spent_fraction": _NUMBER,
            "spent_in_epsilon": {"type": ["number", "null"]},
            "cost_per_answer": _NUMBER,
            "remaining_answers": {"type": ["integer", "null"]},
            "note": _STRING,
            "unproven_models": _list(_STRING),
            "clients": _list(
                _object(
                    {
                        "client": _STRING,
                        "spent_fraction": _NUMBER,
                        "quota_fraction": {"type": ["number", "null"]},
                        "refused": _INTEGER,
                    }
                )
            ),
        }
    ),
    "InferenceRequest": _object(
        {"inputs": _list(_INPUT, minItems=1)},
        {
            "id": {
                "type": "string",
                "maxLength": 128,
                "description": "A retry with the same id gets the same answer and is not charged.",
            },
            "parameters": _PARAMETERS,
            "outputs": _list(
                _object({"name": _one_of("label", "probabilities")}, {"parameters": _PARAMETERS}),
                maxItems=2,
            ),
        },
    ),
    "InferenceResponse": _object(
        {
            "model_name": _STRING,
            "model_version": _STRING,
            "outputs": _list(
                _object(
                    {"name": _STRING, "datatype": _STRING, "shape": _list(_INTEGER)},
                    {"data": _list({"type": ["number", "string"]}), "parameters": _PARAMETERS},
                )
            ),
            "parameters": _object(
                {
                    "guarantee_status": _STATUS,
                    "measure": _MEASURE,
                    "cost": _NUMBER,
                    "new_answers": _INTEGER,
                },
                {
                    "remaining": _NUMBER,
                    "remaining_answers": _INTEGER,
                    "paid_at_training": _BOOLEAN,
                    "warning": _STRING,
                    "unknown_values": _INTEGER,
                    "unknown_columns": _STRING,
                },
            ),
        },
        {"id": _STRING},
    ),
    "RepositoryIndexRequest": _object(
        {}, {"ready": {"type": "boolean", "description": "Leave out the models that are not served."}}
    ),
    "RepositoryLoadRequest": _object(
        {}, {"parameters": {"type": "object", "maxProperties": 0, "description": "Not supported."}}
    ),
    "RepositoryUnloadRequest": _object({}, {"parameters": _PARAMETERS}),
    "DashboardState": {"type": "object"},
    "Login": _object({"key": {"type": "string", "description": "An API key."}}),
}
_BODIES = {
    "/v2/repository/index": ("application/json", "RepositoryIndexRequest", False),
    "/v2/repository/models/{name}/load": ("application/json", "RepositoryLoadRequest", False),
    "/v2/repository/models/{name}/unload": ("application/json", "RepositoryUnloadRequest", False),
    "/login": ("application/x-www-form-urlencoded", "Login", True),
}
"""Media type and schema of the bodies of other requests, and whether they are required."""
_DESCRIPTIONS = {
    400: "Not an inference request. Nothing was charged.",
    401: "No API key, or one that is wrong, revoked or expired.",
    403: "The budget or quota is exhausted (see `remaining`), or the key has no permission.",
    404: "No such model or version.",
    408: "The body did not arrive in time.",
    409: "The request id was used with another body. Nothing was charged.",
    413: "Too many bytes or rows. Nothing was charged.",
    415: "The body is compressed.",
    422: "An inference request that does not fit the model. Nothing was charged.",
    429: "More requests than the rate limit of a client allows. Nothing was charged.",
    503: "The service or its ledger is unavailable.",
}


def _reference(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def error_responses(*statuses: int) -> dict[int | str, Any]:
    """Describe the errors of an endpoint, for its `responses` in FastAPI."""
    return {
        status: {
            "description": _DESCRIPTIONS[status],
            "content": {"application/json": {"schema": _reference("Error")}},
        }
        for status in statuses
    }


def responses(schema: str, *statuses: int) -> dict[int | str, Any]:
    """Describe the success and the errors of an endpoint, for its `responses` in FastAPI."""
    return {
        200: {"description": "Success.", "content": {"application/json": {"schema": _reference(schema)}}},
        **error_responses(*statuses),
    }


def add_document(app: FastAPI) -> None:
    """Make FastAPI's OpenAPI document complete: schemas, API keys and the body of inference requests."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            schema["components"] = {
                "schemas": SCHEMAS,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            }
            schema["security"] = [{"key": []}]
            for path, operations in schema["paths"].items():
                for operation in operations.values():
                    _complete(path, operation)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _complete(path: str, operation: dict[str, Any]) -> None:
    """Add what FastAPI does not know about an operation."""
    described = operation["responses"]
    if "422" in described and described["422"].get("description") != _DESCRIPTIONS[422]:
        del described["422"]  # path parameters are any strings: FastAPI never refuses one
    if path.endswith("/infer") or path == "/try":
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _reference("InferenceRequest")}},
        }
    elif path in _BODIES:
        media_type, schema, required = _BODIES[path]
        operation["requestBody"] = {
            "required": required,
            "content": {media_type: {"schema": _reference(schema)}},
        }
    if path == "/metrics":
        described["200"] = {
            "description": "Success.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        }
    if path in ("/v2", "/v2/health/live", "/v2/health/ready", "/"):
        operation["security"] = []
