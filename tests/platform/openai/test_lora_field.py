"""What `model` and `lora` name, and what they may not be."""

from __future__ import annotations

import pytest

from loraplex.adapters.errors import InvalidRequestError
from loraplex.platform.adapters.resolution import RequestedAdapter
from loraplex.platform.errors import NotFoundError
from loraplex.platform.openai.lora_field import ABSENT, Address, LoraConflictError, parse_address

SQL = RequestedAdapter(name="sql")


def parse(model: str | None = None, lora: object = ABSENT) -> Address:
    return parse_address(model, lora, served_name="org/base")


@pytest.mark.parametrize("model", [None, "org/base"])
@pytest.mark.parametrize("lora", [ABSENT, None])
def test_base_is_what_names_no_adapter(model: str | None, lora: object) -> None:
    assert parse(model, lora) == Address(model="org/base")


@pytest.mark.parametrize("model", ["sql", "org/base:sql"])
def test_model_may_name_the_adapter_and_is_kept_as_written(model: str) -> None:
    assert parse(model) == Address(model=model, adapters=(SQL,))


@pytest.mark.parametrize(
    ("lora", "adapter"),
    [
        ("sql", SQL),
        ("sql@3", RequestedAdapter(name="sql", version=3)),
        ("sql@prod", RequestedAdapter(name="sql", alias="prod")),
        ({"name": "sql"}, SQL),
        ({"name": "sql", "version": 3}, RequestedAdapter(name="sql", version=3)),
        ({"name": "sql", "alias": "prod"}, RequestedAdapter(name="sql", alias="prod")),
        ({"name": "sql", "weight": -2}, RequestedAdapter(name="sql", weight=-2.0)),
        ({"name": "sql", "version": None, "alias": None}, SQL),
    ],
)
def test_every_way_to_write_one_adapter(lora: object, adapter: RequestedAdapter) -> None:
    assert parse(lora=lora).adapters == (adapter,)
    assert parse(lora=[lora]).adapters == (adapter,)


def test_list_is_a_mix_in_its_order() -> None:
    assert parse(lora=[{"name": "sql", "weight": 0.7}, "chat@2"]).adapters == (
        RequestedAdapter(name="sql", weight=0.7),
        RequestedAdapter(name="chat", version=2),
    )


@pytest.mark.parametrize(
    ("model", "lora"),
    [
        ("sql", "sql"),
        ("sql", "sql@default"),
        ("org/base:sql@3", {"name": "sql", "version": 3}),
        ("sql", {"name": "sql", "weight": 0.5}),
    ],
)
def test_model_and_lora_may_name_the_same_adapter(model: str, lora: object) -> None:
    assert parse(model, lora).adapters == parse(lora=lora).adapters


@pytest.mark.parametrize("lora", [None, "chat", "sql@2", "sql@latest", ["sql", "chat"], ["sql", "sql"]])
def test_model_and_lora_that_disagree_conflict(lora: object) -> None:
    with pytest.raises(LoraConflictError) as caught:
        parse("sql", lora)
    assert caught.value.code == "lora_conflict"


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "sql ",
        "SQL",
        "../../etc",
        "/etc",
        "..%2f",
        "a/../b",
        "a\0b",
        "x" * 10_000,
        "\u0455ql",
        "sql@",
        "sql@0",
        "sql@03",
        "sql@-1",
        "sql@Prod",
        "sql@9999999999",
        "sql@prod@2",
        "other:sql",
        "sql:chat",
    ],
)
def test_name_that_no_adapter_can_have_is_not_found_wherever_it_stands(name: str) -> None:
    for model, lora in ((name, ABSENT), (None, name)):
        with pytest.raises(NotFoundError) as caught:
            parse(model, lora)
        assert len(caught.value.message) < 200


@pytest.mark.parametrize("model", ["org/base:", "org/base:org/base", "org/base:a:b", ":sql", "org/base "])
def test_colon_joins_base_and_adapter_and_nothing_else(model: str) -> None:
    with pytest.raises(NotFoundError):
        parse(model)


@pytest.mark.parametrize(
    ("lora", "param"),
    [
        (3, "lora"),
        (True, "lora"),
        ([], "lora"),
        ([["sql"]], "lora[0]"),
        ([None], "lora[0]"),
        ({}, "lora.name"),
        ({"name": None}, "lora.name"),
        ({"name": 3}, "lora.name"),
        ({"name": "sql@3"}, "lora.name"),
        ({"name": "sql", "version": "3"}, "lora.version"),
        ({"name": "sql", "version": True}, "lora.version"),
        ({"name": "sql", "version": 3.0}, "lora.version"),
        ({"name": "sql", "alias": 3}, "lora.alias"),
        ({"name": "sql", "version": 3, "alias": "prod"}, "lora"),
        ({"name": "sql", "weight": "1"}, "lora.weight"),
        ({"name": "sql", "weight": None}, "lora.weight"),
        ({"name": "sql", "weight": False}, "lora.weight"),
        (["sql", {"name": "chat", "weight": []}], "lora[1].weight"),
    ],
)
def test_wrong_types_are_refused_by_place(lora: object, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(lora=lora)
    assert caught.value.param == param


def test_unknown_key_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(InvalidRequestError, match=r'"scale".*name, version, alias, weight'):
        parse(lora={"name": "sql", "scale": 1.0})


def test_integer_weight_beyond_every_float_is_infinite_not_an_error_of_ours() -> None:
    assert parse(lora={"name": "sql", "weight": 10**400}).adapters[0].weight == float("inf")
