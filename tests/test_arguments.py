"""What public names say about arguments that they do not take."""

from __future__ import annotations

import inspect
import re

import pytest

import strideweave as sw
from strideweave import LRU, S3FIFO

CLASSES = [
    cls
    for name in sw.__all__
    if inspect.isclass(cls := getattr(sw, name)) and not issubclass(cls, BaseException)
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_about_arguments_names_a_public_class(cls):
    wrong = [
        lambda: cls(*[object()] * 30),
        lambda: cls(no_such_option=1),
        lambda: cls(*[object()] * 30, no_such_option=1),
    ]
    for call in wrong:
        with pytest.raises(TypeError) as caught:
            call()
        for named in re.findall(r"(\w+)\.__(?:init|new)__\(\)", str(caught.value)):
            assert named in sw.__all__


@pytest.mark.parametrize("policy", [LRU, S3FIFO])
@pytest.mark.parametrize(("bounds", "options"), [((16,), {}), ((16, 2), {}), ((16,), {"max_tiles": 16})])
def test_a_bound_without_a_name_is_refused_with_the_names_there_are(policy, bounds, options):
    name, got = policy.__name__, ", ".join(map(str, bounds))
    with pytest.raises(TypeError) as caught:
        policy(*bounds, **options)
    assert str(caught.value) == (
        f"{name} takes its bound by name, {name}(max_tiles=...) or {name}(max_bytes=...); got {name}({got})"
    )
