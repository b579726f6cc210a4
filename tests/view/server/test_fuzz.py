"""Anything that the API's own description allows, and much that it forbids: no answer is a server error, and every one
is as described."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

from tests.helpers.kinds import lenses
from tests.helpers.live import PATIENCE, live

CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
OPERATIONS = {
    "models": ("/api/models", "GET"),
    "start": ("/api/analyses", "POST"),
    "status": ("/api/analyses/{id}", "GET"),
    "cancel": ("/api/analyses/{id}", "DELETE"),
    "header": ("/api/analyses/{id}/header", "GET"),
    "cells": ("/api/analyses/{id}/cells", "GET"),
    "explain": ("/api/explanations", "POST"),
    "explanation": ("/api/explanations/{id}", "GET"),
    "stop explanation": ("/api/explanations/{id}", "DELETE"),
}


@pytest.fixture(scope="module")
def described() -> Iterator[Any]:
    """The API of a server of tiny models, as it describes itself, and the id of an analysis."""
    with live(lenses(), waiting=500) as server:
        known = server.start(model="tiny-encoder", text="the cat")["id"]
        yield schemathesis.openapi.from_url(f"{server.address}/api/openapi.json"), known


def test_no_operation_is_left_out(described: Any) -> None:
    schema, _ = described
    found = {(result.ok().path, result.ok().method.upper()) for result in schema.get_all_operations()}
    assert found == set(OPERATIONS.values())


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (name, mode)
        for name in OPERATIONS
        for mode in ("positive", "negative")
        if (name, mode) != ("models", "negative")
    ],
)
def test_every_answer_is_as_described(described: Any, name: str, mode: str) -> None:
    schema, known = described
    path, method = OPERATIONS[name]
    operation = schema[path][method]
    turn = 0

    @given(case=operation.as_strategy(GenerationMode(mode)))
    @settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    def ask(case: Any) -> None:
        nonlocal turn
        turn += 1
        query = case.query if isinstance(case.query, dict) else {}
        if isinstance(query.get("wait"), int | float):
            query["wait"] = min(query["wait"], 0.1)
        if turn % 2 and isinstance(case.path_parameters, dict) and "id" in case.path_parameters:
            case.path_parameters["id"] = known
        if turn % 2 and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "tiny-encoder" if turn % 4 == 1 else "tiny-causal"  # without and with a head
        case.call_and_validate(checks=CHECKS, timeout=PATIENCE)

    ask()
