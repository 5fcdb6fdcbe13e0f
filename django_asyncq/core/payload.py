"""Check that JSON can carry a task's arguments and return value exactly, and copy them into plain values.

Mappings and sequences become dict and list, and UTF-8 bytes become text, as in Django's own `normalize_json`. A value
of a subclass of str, int or float becomes the plain value that it equals. Any other value that would come back changed,
or that a supported database cannot store, is refused. `fields` says what a database would change by itself.
"""

from __future__ import annotations

import json
import math
import re
import traceback
from base64 import b64encode
from collections import OrderedDict, UserString
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import date, time, timedelta
from decimal import Decimal
from io import IOBase
from pathlib import PurePath
from typing import Any, Final, NamedTuple, final
from uuid import UUID

from django.utils.functional import Promise

from .. import conf
from ..exceptions import InvalidArguments, InvalidOption, InvalidResult
from .guard import attempt, class_name

# MySQL stores whole numbers exactly only if they fit 64 bits; its JSON turns larger ones into doubles.
SMALLEST_INTEGER = -(2**63)
LARGEST_INTEGER = 2**64 - 1
# As JSON: `{"args":[],"kwargs":{}}`; a control character as \u001f; quotes, comma and colon; -1.7976931348623157e+308.
EMPTY_PAYLOAD_BYTES = 24
LONGEST_CHARACTER_BYTES = 6
PUNCTUATION_BYTES = 4
LONGEST_NUMBER_BYTES = 28
# Sequences that would come back as lists of numbers or of letters.
IMITATIONS = (bytearray, memoryview, UserString)
PLAIN_ITEMS = (dict.items, OrderedDict.items)
TRACEBACK_CHARACTERS = 65_536
MESSAGE_CHARACTERS = 4_096
# How deep arguments and return values may be nested. Python's own parser gives up at about 1,000 levels, and whoever
# nests deeper than this stores a structure of his own, which belongs into a table.
MAX_DEPTH = 64
# Of a task's progress: it is written once a second to Redis, and read with every look at the row.
MAX_PROGRESS_BYTES = 4_096
# Of a checkpoint: each one writes the row, and each look at the row reads it.
MAX_CHECKPOINT_BYTES = 4_096

# Returns the JSON of a value that JSON does not have, None if it has none either; the text is its path (see `typed`).
Carry = Callable[[Any, str], Any]

OR_TYPED = ", or declare the task with typed_arguments=True"

# Made once: `json.dumps` with options makes a new encoder at each call.
_compact = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_sorted = json.JSONEncoder(sort_keys=True)


class Payload(NamedTuple):
    """A call's arguments as plain JSON values."""

    args: list[Any]
    kwargs: dict[str, Any]


def of_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], names: Set[str] | None = None, carry: Carry | None = None
) -> Payload:
    """Copy the arguments into plain JSON values.

    names: of parameters, which are plain texts. carry: of a task with typed arguments.
    Raises: InvalidArguments, with the path, when JSON cannot carry them exactly or they are too large.
    """
    settings = conf.current()
    plain_args = [
        value if _is_plain(value) else plain(value, f"args[{index}]", MAX_DEPTH, carry)
        for index, value in enumerate(args)
    ]
    # The names of parameters need no copy.
    plain_kwargs = (
        {
            key: value if _is_plain(value) else plain(value, f"kwargs[{key!r}]", MAX_DEPTH, carry)
            for key, value in kwargs.items()
        }
        if names is not None and kwargs.keys() <= names
        else _plain_mapping(kwargs, "kwargs", MAX_DEPTH + 1, carry)
    )
    found = Payload(plain_args, plain_kwargs)
    if not certainly_fits(found, settings.max_arguments_bytes):
        size = len(json_bytes(found._asdict()))
        if size > settings.max_arguments_bytes:
            raise InvalidArguments(
                f"arguments take {size:,} bytes as JSON, more than ASYNCQ['MAX_ARGUMENTS_BYTES'] = "
                f"{settings.max_arguments_bytes:,}: store the data and pass its key",
                path="args",
                is_json=True,
            )
    return found


def certainly_fits(found: Payload, largest_bytes: int) -> bool:
    """Return whether a payload fits without encoding it: most are a few numbers and short texts. False when unsure."""
    size = EMPTY_PAYLOAD_BYTES
    for value in (*found.args, *found.kwargs, *found.kwargs.values()):
        if type(value) is str:
            size += LONGEST_CHARACTER_BYTES * len(value) + PUNCTUATION_BYTES
        elif type(value) is list or type(value) is dict:
            return False
        else:
            size += LONGEST_NUMBER_BYTES
    return size <= largest_bytes


def json_bytes(value: Any) -> bytes:
    """Encode plain values as compact JSON in UTF-8."""
    return _compact.encode(value).encode()


def as_base64(data: bytes) -> dict[str, str]:
    """Return bytes in the form in which JSON can hold them."""
    return {"base64": b64encode(data).decode()}


def is_same(first: Any, second: Any) -> bool:
    """Return whether two plain values are the same JSON: `1`, `1.0` and `True` differ, the order of keys is free."""
    return _sorted.encode(first) == _sorted.encode(second)


def copied(value: Any) -> Any:
    """Return a deep copy of plain values that the caller may change."""
    # A plain value is of exactly these types.
    if type(value) is list:
        return [copied(item) if type(item) in (list, dict) else item for item in value]
    if type(value) is dict:
        return {key: copied(item) if type(item) in (list, dict) else item for key, item in value.items()}
    return value


def plain(value: Any, path: str, depth_left: int, carry: Carry | None = None) -> Any:
    """Return a copy of `value` made of dict, list, str, int, float, bool and None only.

    path: where the value is, for the error. carry: asked about whatever is no text and no number.
    Raises: InvalidArguments.
    """
    if _is_plain(value):
        return value
    # The type that the value has, not the one that it claims: a lazy object claims to be what it wraps.
    kind = type(value)
    if issubclass(kind, str):
        return _plain_text(value, path)
    if issubclass(kind, int):
        return _plain_integer(value, path)
    if issubclass(kind, float):
        # A subclass may convert to another number.
        number = float.__float__(value)
        if not math.isfinite(number):
            raise InvalidArguments(f"{path} is {number!r}, which JSON does not have: pass None or a text", path=path)
        return number
    if issubclass(kind, bytes):
        return _plain_bytes(value, path)
    if carry is not None and (form := carry(value, path)) is not None:
        return form
    if depth_left <= 0:
        raise InvalidArguments(
            f"{path} is nested deeper than {MAX_DEPTH} levels: store the data and pass its key",
            path=path,
            is_json=True,
        )
    if issubclass(kind, dict) or issubclass(kind, Mapping):  # the first is a tenth of the second
        return _plain_mapping(value, path, depth_left, carry)
    if issubclass(kind, Sequence) and not issubclass(kind, IMITATIONS):
        return [
            item if _is_plain(item) else plain(item, f"{path}[{index}]", depth_left - 1, carry)
            for index, item in enumerate(value)
        ]
    raise InvalidArguments(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which JSON cannot carry: {_remedy(kind)}", path=path
    )


def _remedy(kind: type) -> str:
    """Say what to pass instead of a value of this type."""
    # Not imported at the top: the models' module is large, and arguments are refused seldom.
    from django.core.files.base import File
    from django.db.models import Model, QuerySet

    if issubclass(kind, Model):
        return f"pass its `pk`, and load the object in the task{OR_TYPED}"
    if issubclass(kind, QuerySet):
        return "pass a list of the primary keys"
    if issubclass(kind, File | IOBase):
        return "store it, and pass the `name` that it has in its storage"
    if issubclass(kind, date | time):
        return f"pass its `isoformat()`, and read it with `fromisoformat` in the task{OR_TYPED}"
    if issubclass(kind, timedelta):
        return f"pass its `total_seconds()`{OR_TYPED}"
    if issubclass(kind, Decimal):
        return f"pass `str()` of it, and make it a Decimal again in the task{OR_TYPED}"
    if issubclass(kind, UUID):
        return f"pass `str()` of it{OR_TYPED}"
    if issubclass(kind, Promise | UserString | PurePath):
        return "pass `str()` of it"
    if issubclass(kind, set | frozenset):
        return "pass a list of it"
    if issubclass(kind, bytearray | memoryview):
        return "pass base64 text of it"
    return "pass a key, a string or a number instead"


def _plain_mapping(value: Mapping[Any, Any], path: str, depth_left: int, carry: Carry | None) -> dict[str, Any]:
    kind = type(value)
    if kind is not dict and issubclass(kind, dict) and not _reads_as_it_holds(kind):
        raise InvalidArguments(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, a dict that does not read as what it holds, so JSON "
            f"cannot carry it: pass a plain dict of what the task needs",
            path=path,
        )
    found = {
        _plain_key(key, path): item if _is_plain(item) else plain(item, f"{path}[{key!r}]", depth_left - 1, carry)
        for key, item in value.items()
    }
    if len(found) < len(value):
        raise InvalidArguments(
            f"{path} holds two values with the same key, of which JSON can carry one: pass a list of pairs", path=path
        )
    return found


def _reads_as_it_holds(kind: type[dict[Any, Any]]) -> bool:
    """Return whether a subclass of dict reads like a dict.

    Django's MultiValueDict holds lists and shows the last value of each.
    """
    return kind.items in PLAIN_ITEMS and kind.__getitem__ is dict.__getitem__


def check_depth(value: Any, path: str, levels: int, limit: str) -> None:
    """Refuse plain values with more lists and dicts within each other than a store allows.

    path: where the value is. levels: how many are left. limit: words for the error. Raises: InvalidArguments.
    """
    if not isinstance(value, list | dict):
        return
    if levels <= 0:
        raise InvalidArguments(
            f"{path} is nested deeper than {limit}: store the data and pass its key, or pass it as JSON text",
            path=path,
            is_json=True,
        )
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(item, list | dict):
            check_depth(item, f"{path}[{key!r}]", levels - 1, limit)


def _is_plain(value: Any) -> bool:
    """Return whether the value is of a common kind that needs no copy; cheaper than formatting its path for `plain`."""
    kind = type(value)
    return (
        (kind is str and value.isascii() and "\x00" not in value)
        or (kind is int and SMALLEST_INTEGER <= value <= LARGEST_INTEGER)
        or kind is bool
        or value is None
    )


def _plain_text(value: str, path: str) -> str:
    # A subclass may override every method.
    value = str.__str__(value)
    if "\x00" in value:
        raise InvalidArguments(
            f"{path} holds a NUL character, which PostgreSQL cannot store: remove it or pass base64 text",
            path=path,
            is_json=True,
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArguments(
            f"{path} holds a lone surrogate, which is not valid text: pass base64 text of the bytes",
            path=path,
            is_json=True,
        ) from error
    return value


def _plain_integer(value: int, path: str) -> int:
    if not SMALLEST_INTEGER <= value <= LARGEST_INTEGER:
        raise InvalidArguments(
            f"{path} is a whole number beyond 64 bits, which JSON databases round: pass it as a string",
            path=path,
            is_json=True,
        )
    # A subclass may convert to another number.
    return int.__int__(value)


def _plain_bytes(value: bytes, path: str) -> str:
    try:
        return _plain_text(bytes.decode(value), path)
    except UnicodeDecodeError as error:
        raise InvalidArguments(
            f"{path} holds bytes that are not UTF-8: encode them as base64 text", path=path
        ) from error


def _plain_key(key: object, path: str) -> str:
    if type(key) is str and _is_plain(key):
        return key
    if not isinstance(key, str):
        raise InvalidArguments(
            f"{path} has the key {key!r} of type {type(key).__qualname__}; JSON keys are text, so it would come back "
            f"as another key: pass str(…) of it, or a list of pairs",
            path=path,
        )
    return _plain_text(key, f"{path} (a key)")


def storable_result(value: Any) -> Any:
    """Return the return value in a form that can be stored, or a note instead when it is too large for the database.

    The note also stands for characters and digits that not every database stores: the task has succeeded all the same.
    Raises: InvalidResult when JSON cannot hold the value, or reading it raises anything.
    """
    if value is None:
        return None
    settings = conf.current()
    result, error = attempt(plain, value, "return value", MAX_DEPTH)
    if error is None:
        size, error = attempt(lambda: len(json_bytes(result)))
    if type(error) is InvalidArguments and error.is_json:
        return {"result_not_stored": str(error)}
    if error is not None:  # an object that imitates a mapping may raise anything
        is_known = type(error) is InvalidArguments
        reason = str(error) if is_known else f"return value could not be read: {class_name(error)}"
        raise InvalidResult(f"the function had finished, but {reason}") from (None if is_known else error)
    if size > settings.max_result_bytes:
        return {
            "result_not_stored": f"return value takes {size:,} bytes as JSON, more than "
            f"ASYNCQ['MAX_RESULT_BYTES'] = {settings.max_result_bytes:,}"
        }
    return result


def storable_text(text: str, characters: int) -> str:
    """Return text that every database and a protobuf can store; cut its middle out if it exceeds `characters`."""
    # A subclass may override every method; and text is cut before it is copied, because it may be huge.
    text = str.__str__(text)
    if len(text) <= characters:
        return _clean(text)
    half = characters // 2
    return f"{_clean(text[:half])}\n… {len(text) - 2 * half:,} characters cut …\n{_clean(text[-half:])}"


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode().replace("\x00", "\N{REPLACEMENT CHARACTER}")


# --- The texts of an exception of the project's code, which may be hostile.
#
# Its `__str__`, `__notes__`, `__class__` or its metaclass may raise anything, and its text may be huge. None of
# that may end the thread that writes the row.

NAME_CHARACTERS = 512


def class_path(exception: BaseException) -> str:
    """Return the dotted path of its class."""
    kind = type(exception)
    path = attempt(lambda: f"{kind.__module__}.{kind.__qualname__}").value
    return storable_text(path if path is not None else class_name(exception), NAME_CHARACTERS)


def text_of(exception: BaseException) -> str:
    """Return its text, or a note that says why there is none."""
    text, error = attempt(str, exception)
    if error is not None:
        return f"<no message: its __str__ raised {class_name(error)}>"
    return storable_text(text, MESSAGE_CHARACTERS)


def traceback_of(exception: BaseException) -> str:
    """Return its traceback with those of its causes, or a note that says why there is none."""
    text, error = attempt(lambda: "".join(traceback.format_exception(exception)))
    if error is not None:
        return f"<no traceback: formatting it raised {class_name(error)}>"
    return storable_text(text, TRACEBACK_CHARACTERS)


# --- Parse JSON that others may have written, such as what is read from Redis. It never raises and uses bounded memory.


@final
class Unreadable:
    """The type of UNREADABLE, which is false like None and, unlike None, is no value of JSON."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "UNREADABLE"


UNREADABLE: Final = Unreadable()

# A string, so that brackets within it are not counted, or a bracket. The closing quote is optional: without one the
# string lasts to the end of the text, and the match needs no second attempt.
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)


def loads_untrusted(text: str | bytes, *, max_bytes: int, max_depth: int) -> Any:
    """Parse JSON; return UNREADABLE when it is not JSON in UTF-8, is too large or is nested too deeply.

    max_depth: how many lists and objects may lie within each other; checked before the parser, which would run out
    of stack. NaN and Infinity are refused, as are escapes of half a character, since no database stores them.
    """
    if len(text) > max_bytes:
        return UNREADABLE
    try:
        found = text.decode() if isinstance(text, bytes) else text
        if len(found.encode()) > max_bytes or _is_deeper(found, max_depth):
            return UNREADABLE
        value = json.loads(found, parse_constant=_refuse, parse_float=_finite)
        if "\\u" in found:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return UNREADABLE
    return value


def _is_deeper(text: str, max_depth: int) -> bool:
    """Return whether lists and objects are nested deeper than `max_depth`."""
    if text.count("[") + text.count("{") <= max_depth:
        return False
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        bracket = match[0]
        if bracket in "[{":
            depth += 1
            if depth > max_depth:
                return True
        elif bracket in "]}":
            depth -= 1
    return False


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{digits} is too large")
    return value


# --- What a task reports of its progress: checked where the body reports it, and read back from rows and from Redis.
#
# A value is never changed once it is made, so that threads may share it without a lock.

# MariaDB stores 31 levels, of which `data` and the whole take one each.
DEEPEST = 20
# A text of ASCII letters that certainly fits needs no encoding: 6 bytes a letter, and 100 for the rest.
LONGEST_LETTER_BYTES = 6
OTHER_BYTES = 100
# Of a run that has reported nothing yet, in a row where an earlier run has: null would keep what is there.
CLEARED: dict[str, Any] = {"done": None}


def progress_value(done: float, total: float | None, message: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return the progress as it is stored: {"done", "total", "message", "data"}. Raises: InvalidOption."""
    _check_number("done", done)
    if total is not None:
        _check_number("total", total)
        if done > total:
            raise InvalidOption(f"progress(done={done!r}, total={total!r}) is not valid: done is above total")
    if not isinstance(message, str):
        raise InvalidOption(f"progress(message=…) is a {type(message).__qualname__}: give a text, such as str(…) of it")
    value = {"done": done, "total": total, "message": message, "data": data}
    if not data and _is_plain_text(message) and LONGEST_LETTER_BYTES * len(message) + OTHER_BYTES <= MAX_PROGRESS_BYTES:
        return value
    try:
        value["message"] = plain(message, "message", 1)
        value["data"] = {name: plain(item, name, DEEPEST) for name, item in data.items()}
    except InvalidArguments as error:
        raise InvalidOption(f"progress(…): {error}") from error
    if (size := len(json_bytes(value))) > MAX_PROGRESS_BYTES:
        raise InvalidOption(
            f"progress(…) takes {size:,} bytes as JSON, more than {MAX_PROGRESS_BYTES:,}: "
            f"shorten the message, or store the data and report its key"
        )
    return value


def shown_progress(value: Any) -> dict[str, Any] | None:
    """Return the progress that a row or Redis holds, for its reader; None when there is none."""
    if not isinstance(value, dict) or value.get("done") is None:
        return None
    return {
        "done": value["done"],
        "total": value.get("total"),
        "message": value.get("message") or "",
        "data": value.get("data") or {},
    }


def _check_number(name: str, value: object) -> None:
    # Not `isinstance`: True is no amount, and a subclass may compare as it likes.
    if type(value) not in (int, float) or not 0 <= value < math.inf or value >= 2**63:  # type: ignore[operator]
        raise InvalidOption(f"progress({name}={value!r}) is not valid: give a number, 0 or more")


def _is_plain_text(text: str) -> bool:
    return type(text) is str and text.isascii() and "\x00" not in text


# --- Where a run goes on when the task runs again.


def checkpoint_value(value: Any) -> Any:
    """Return a checkpoint as it is stored: a copy made of plain JSON values. Raises: InvalidOption."""
    try:
        stored = plain(value, "value", DEEPEST)
    except InvalidArguments as error:
        raise InvalidOption(f"checkpoint(…): {error}") from error
    if (size := len(json_bytes(stored))) > MAX_CHECKPOINT_BYTES:
        raise InvalidOption(
            f"checkpoint(…) takes {size:,} bytes as JSON, more than {MAX_CHECKPOINT_BYTES:,}: "
            f"store the data in a table, and give what finds it there, such as the key of the last row"
        )
    return stored
