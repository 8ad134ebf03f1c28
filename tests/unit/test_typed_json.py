"""JSON from anywhere becomes values of the types that are asked for, or an error with the path to what is wrong."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from wholestep.typed_json import MalformedError, parse, read


@dataclass(frozen=True)
class Inner:
    size: int
    share: float = 1.0


@dataclass(frozen=True)
class Outer:
    name: str
    parts: tuple[Inner, ...] = ()
    pair: tuple[int, str] | None = None
    by_name: Mapping[str, bool] | None = None
    kind: Literal["a", "b"] | int = "a"


def test_a_value_is_read_by_the_types_of_its_fields() -> None:
    text = '{"name": "x", "parts": [[1, 2], {"size": 3}], "pair": [1, "y"], "by_name": {"z": true}, "kind": 4}'
    made = read(Outer, parse(text))
    assert made == Outer("x", (Inner(1, 2.0), Inner(3)), (1, "y"), {"z": True}, 4)
    assert isinstance(made.parts[0].share, float)


@pytest.mark.parametrize(
    ("text", "found", "needed"),
    [
        ("[" * 100_000, "stand too deep inside each other", "at most 64 levels"),
        ("[" * 70 + "]" * 70, "stand too deep inside each other", "at most 64 levels"),
        ("1" * 5000, "the text is not JSON", "JSON"),
        ("{", "the text is not JSON", "JSON"),
        (b"\xff\xfe\xfd", "the file is not text", "JSON in UTF-8"),
        ("[]", r"the file is \[\]", "a list of 5: name, parts"),
        ("3", "the file is 3", "an object"),
        ("{}", "field name is missing", "a text"),
        ('{"name": 1}', "name is 1", "a text"),
        ('{"name": "\\ud800"}', "name is .*ud800", "text in UTF-8"),
        ('{"name": "x", "nam": 1}', "unknown field nam", "one of name, parts"),
        ('{"name": "x", "parts": [{"size": true}]}', r"parts\[0\].size is True", "a whole number"),
        ('{"name": "x", "parts": [{"size": 1.0}]}', r"parts\[0\].size is 1.0", "a whole number"),
        ('{"name": "x", "parts": [{"size": 1e400}]}', r"parts\[0\].size is inf", "a whole number"),
        ('{"name": "x", "parts": [[1, NaN]]}', r"parts\[0\].share is nan", "a finite number"),
        (f'{{"name": "x", "parts": [[{"9" * 4000}]]}}', r"parts\[0\] is \[9999", "a list of 2: size, share"),
        (f'{{"name": "x", "parts": [[{"9" * 4000}, 1]]}}', r"size is a number of \d+ bits: needed", "at most 64 bits"),
        ('{"name": "x", "pair": [1]}', r"pair is \[1\]", "a list of 2"),
        ('{"name": "x", "by_name": {"y": 0}}', r"by_name\['y'\] is 0", "true or false"),
        ('{"name": "x", "kind": "c"}', "kind is 'c'", "one of 'a', 'b' or a whole number"),
    ],
)
def test_what_does_not_belong_is_named(text: Any, found: str, needed: str) -> None:
    with pytest.raises(MalformedError, match=found) as caught:
        read(Outer, parse(text))
    assert needed in str(caught.value)
