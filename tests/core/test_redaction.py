"""Secrets are masked by their key, in values and in free text; nothing else is changed."""

from __future__ import annotations

import time
from typing import Any

import pytest

from django_asyncq.core.redaction import MASK, Masker, is_sensitive, mask, mask_positional, mask_text
from django_asyncq.tasks import task

DECLARED = "tests.core.test_redaction.reset_password"


@task
def reset_password() -> None:
    """A task whose path looks like the key of a secret."""


@pytest.mark.parametrize(
    ("key", "secret"),
    [
        ("password", True),
        ("PASSWORD", True),
        ("user_passwd", True),
        ("accessToken", True),
        ("client-secret", True),
        ("card_number", True),
        ("Authorization", True),
        ("api_key", True),
        ("apikey", True),
        ("AWS_CREDENTIALS", True),
        ("name", False),
        ("pass_through", False),
        ("", False),
    ],
)
def test_key_is_secret_when_the_setting_matches_any_part(key: str, secret: bool) -> None:
    """The setting matches any part of the key, in any case."""
    assert is_sensitive(key) is secret


def test_masks_values_under_secret_keys_at_any_depth() -> None:
    """The whole value of a secret key is masked, whatever its type; other values do not change."""
    value: Any = {
        "user": "ann",
        "password": "hunter2",
        "nested": [{"token": {"a": 1}}, [{"deep": {"SECRET": [1, 2]}}], None, 3.5, True],
    }
    assert mask(value) == {
        "user": "ann",
        "password": MASK,
        "nested": [{"token": MASK}, [{"deep": {"SECRET": MASK}}], None, 3.5, True],
    }
    assert value["password"] == "hunter2"


@pytest.mark.parametrize("value", [None, 0, "token", [], {}, [1, "x"], 1.5])
def test_leaves_values_without_keys_alone(value: Any) -> None:
    """A value that only looks like a key is not masked."""
    assert mask(value) == value


@pytest.mark.parametrize(
    ("values", "names", "shown"),
    [
        (["ann", "hunter2"], ["user", "password"], ["ann", MASK]),
        (["ann", {"token": 1}], ["user"], ["ann", {"token": MASK}]),
        ([1, 2, 3], [], [1, 2, 3]),
        ([], ["password"], []),
        ({"not": "a list", "token": 1}, ["password"], {"not": "a list", "token": MASK}),
    ],
)
def test_masks_positional_arguments_by_their_parameters(values: Any, names: list[str], shown: Any) -> None:
    """The key of an argument is the name of its parameter; arguments beyond the names have none."""
    assert mask_positional(values, names) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("token=abc", f"token={MASK}"),
        ("password = 'a b' and more", f"password = {MASK} and more"),
        ('{"password": "a\\"b", "x": 1}', f'{{"password": {MASK}, "x": 1}}'),
        ("{'password': b'abc', 'k': 2}", f"{{'password': {MASK}, 'k': 2}}"),
        ("Authorization: Bearer abc.def", f"Authorization: {MASK}"),
        ("https://x.test/?a=1&token=zzz&b=2", f"https://x.test/?a=1&token={MASK}&b=2"),
        ("redis://:pw@host/0", f"redis://:{MASK}@host/0"),
        ("redis://user:pw@host:6379/0", f"redis://user:{MASK}@host:6379/0"),
        ("url=https://x.test?token=q", f"url=https://x.test?token={MASK}"),
        ("x" * 200 + "_token=abc", "x" * 200 + f"_token={MASK}"),
        ('my_token: "never closed', f"my_token: {MASK}"),
        ("{'x-api-key': 'abc'}", f"{{'x-api-key': {MASK}}}"),
        (r'{"body": "{\"password\": \"a b\", \"n\": 1}"}', rf'{{"body": "{{\"password\": {MASK}", \"n\": 1}}"}}'),
        (r'{"body": "{\"password\": \"a\\\"b\"}"}', rf'{{"body": "{{\"password\": {MASK}"}}"}}'),
        (r"'{\'token\': \'a b\'}'", rf"'{{\'token\': {MASK}'}}'"),
        ("one\ntoken: 1\ntwo", f"one\ntoken: {MASK}\ntwo"),
    ],
)
def test_masks_secrets_in_text(text: str, shown: str) -> None:
    """Secrets are found in assignments, JSON, Python reprs, headers, query strings and URLs."""
    assert mask_text(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "",
        "KeyError: 'token'",
        'if token == "abc":',
        "http://host:8000/path",
        "ratio=3 name='x'",
        "the secret of success",
        "12:30:00",
    ],
)
def test_leaves_other_text_alone(text: str) -> None:
    """A secret key without a value is not masked."""
    assert mask_text(text) == text


def test_the_path_of_a_task_is_no_key() -> None:
    """Log lines say `shop.tasks.reset_password: attempt 1 of 2 failed`. A key with dots that is no task stays one."""
    assert reset_password.module_path == DECLARED
    line = f"task 1 {DECLARED}: attempt 1 of 2 failed: password: hunter2"
    assert mask_text(line) == line.replace("hunter2", MASK)
    assert mask_text("user.password: hunter2") == f"user.password: {MASK}"
    assert mask_text("tests.core.test_redaction.password: hunter2") == f"tests.core.test_redaction.password: {MASK}"
    assert mask_text("reset_password: hunter2") == f"reset_password: {MASK}"
    # One that this code does not have, where the line is about it. Without a dot it is a key like any other.
    assert mask_text("gone.new_token: attempt 1", ["gone.new_token"]) == "gone.new_token: attempt 1"
    assert mask_text("gone.new_token: attempt 1", ["gone.other_token"]) == f"gone.new_token: {MASK} 1"
    assert mask_text("token: attempt 1", ["token"]) == f"token: {MASK} 1"
    assert Masker(task="gone.new_token").text("gone.new_token: attempt 1") == "gone.new_token: attempt 1"


@pytest.mark.parametrize(
    "text",
    [
        "a" * 10**6,
        "token" * 200_000,
        'token="' * 150_000,
        "token='\\" * 125_000,
        "://a:" * 200_000,
        "token= " * 150_000,
        'token=\\"' * 125_000,
        'token=\\"' + '\\\\\\"' * 300_000,
        "token" + "\\" * 10**6,
    ],
)
def test_hostile_text_takes_linear_time(text: str) -> None:
    """A megabyte of text made to provoke backtracking takes seconds at most, even on a slow machine."""
    began = time.monotonic()
    mask_text(text)
    assert time.monotonic() - began < 5


def test_setting_replaces_the_default_keys(settings: Any) -> None:
    """The regular expression of the setting replaces the default and takes effect at once."""
    settings.ASYNCQ = {**settings.ASYNCQ, "SENSITIVE_KEYS": r"^iban$"}
    assert mask({"iban": "DE1", "my_iban": "DE2", "token": "t"}) == {"iban": MASK, "my_iban": "DE2", "token": "t"}
