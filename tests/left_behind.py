"""What a step leaves in Redis: read, written as a capture in the form of asynq's, and compared place by place.

A *place* is one thing that can differ: a key with its type, its TTL, a field of a hash, a field of a message, a member
of a set. `python -m tests.capture` makes the captures of our own steps anew.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import redis

from django_asyncq.broker.message import decode_message, decode_running, decode_server

from .interop.test_fixtures import FOLDER, NEAR_SECONDS, raw

OWN_FOLDER = FOLDER.parent / "own"
TIMES_IN_MESSAGE = ("last_failed_at", "completed_at")
ROW_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")
# Not of the step: which queues the project has, since when Redis remembers, and how long runs took.
OF_THE_PROJECT = re.compile(r"asynq:(own-queues|alive|owner)|\{asynq:\w+\}:.*|asynq:\{\w+\}:runs\b.*")
OF_SERVERS = re.compile(r"asynq:(servers|workers|worker-info)\b.*")
# Texts that are others each time: ids, fences, the row that paused a queue, when a retry is due, hour and minute.
VARYING = (
    (ROW_ID, "<id>"),
    (re.compile(r"\b1[789]\d{14}\b"), "<fence>"),
    (re.compile(r"^\d+\.<fence>$"), "<mark>"),
    (re.compile(r"^retry \d{10}$"), "retry <due>"),
    (re.compile(r"(:minutes:).{13}"), r"\1<hour>"),
    (re.compile(r"(<hour>\.[pf])\d+$"), r"\1<minute>"),
)

Places = dict[str, Any]


def put(database: redis.Redis, fixture: dict[str, Any], *, is_paused: bool = False) -> None:
    """Do again what the client of a capture did, up to the first take; times are as long ago, or ahead, as there.

    is_paused: also pause the queue, where the capture has it paused.
    """
    later = int(time.time() - fixture["captured_at_unix"])
    for command in fixture["redis_commands"]:
        if any(key.endswith(":active") for key in command.get("script", {"keys": ()})["keys"]):
            break
        calls = [[raw(word) for word in call] for call in command.get("calls_inside", ())]
        if any(call[0] == b"HSET" and b"msg" in call for call in calls):
            for call in calls:
                if call[0] == b"ZADD":
                    call[2] = b"%d" % (int(call[2]) + later)
                if b"pending_since" in call:
                    call[call.index(b"pending_since") + 1] = b"%d" % time.time_ns()
                database.execute_command(*call)
    _put_unrecorded(database, fixture, is_paused)


def _put_unrecorded(database: redis.Redis, fixture: dict[str, Any], is_paused: bool) -> None:
    """Do what the commands of a capture lack: register and pause the queue; add the second of two tasks."""
    recorded = json.dumps(fixture["redis_commands"])
    for item in fixture["keys"]:
        if item["key"] == "asynq:queues":
            database.sadd(item["key"], *[raw(each) for each in item["members"]])
        elif item["key"].endswith(":paused") and is_paused:
            database.set(item["key"], int(time.time()))
        elif ":t:" in item["key"] and raw(item["fields"]["msg"]).hex() not in recorded:
            base, id = item["key"].split("t:", 1)
            database.hset(item["key"], mapping={name: raw(value) for name, value in item["fields"].items()})
            database.hset(item["key"], "pending_since", time.time_ns())
            database.lpush(f"{base}pending", id)


# --- reading, in the form of a capture


def read(database: redis.Redis) -> list[dict[str, Any]]:
    """Return all keys of a database, in the form of `keys` in a capture."""
    return [_item(database, key) for key in sorted(database.scan_iter("*")) if not key.endswith(b"}:wake")]


def _item(database: redis.Redis, key: bytes) -> dict[str, Any]:
    kind, ttl = database.type(key).decode(), database.pttl(key)
    item: dict[str, Any] = {"key": key.decode(), "type": kind, "ttl_ms": None if ttl < 0 else ttl}
    match kind:
        case "string":
            item["value"] = _shown(database.get(key))
        case "hash":
            item["fields"] = {name.decode(): _shown(value) for name, value in sorted(database.hgetall(key).items())}
        case "list":
            item["items_left_to_right"] = [_shown(each) for each in database.lrange(key, 0, -1)]
        case "set":
            item["members"] = [_shown(each) for each in sorted(database.smembers(key))]
        case _:
            found = database.zrange(key, 0, -1, withscores=True)
            item["members"] = [{"member": _shown(member), "score": score} for member, score in found]
    return item


def _shown(value: bytes) -> dict[str, str]:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return {"hex": value.hex()}
    return {"hex": value.hex(), "text": text} if text.isprintable() else {"hex": value.hex()}


def capture(database: redis.Redis, name: str, shows: str, of_asynq: str) -> dict[str, Any]:
    """Return what a step of ours has left as a capture."""
    return {
        "name": name,
        "shows": shows,
        "of_asynq": of_asynq,
        "redis": database.info("server")["redis_version"],
        "captured_at_unix": round(time.time(), 3),
        "keys": read(database),
    }


def load_own(name: str) -> dict[str, Any]:
    """Return a capture of ours."""
    found: dict[str, Any] = json.loads((OWN_FOLDER / f"{name}.json").read_text())
    return found


def write_own(found: dict[str, Any]) -> Path:
    """Write a capture of ours."""
    path = OWN_FOLDER / f"{found['name']}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    return path


# --- comparing


def places(found: dict[str, Any], names: dict[str, str] | None = None) -> Places:
    """Return every place of a capture with its value: times are seconds from the moment of the capture.

    names: texts that are replaced everywhere, such as the ids of ours by those of asynq's capture.
    """
    flat: Places = {}
    for item in found["keys"]:
        if not OF_THE_PROJECT.fullmatch(item["key"]):
            flat |= _places_of(item, found["captured_at_unix"])
    return {_named(place, names): _named(value, names) for place, value in flat.items()}


def of_servers(found: Places) -> Places:
    """Return the places that tell of servers only."""
    return {place: value for place, value in found.items() if OF_SERVERS.match(place)}


def of_tasks(found: Places) -> Places:
    """Return the other places."""
    return {place: value for place, value in found.items() if not OF_SERVERS.match(place)}


def _places_of(item: dict[str, Any], now: float) -> Places:
    # The hour of a count of minutes stays, for `VARYING`.
    key, kind = re.sub(r"\d{4}-\d\d-\d\d$", "<day>", item["key"]), item["type"]
    ttl = item["ttl_ms"]
    flat: Places = {key: kind, f"{key} ttl": None if ttl is None else ttl / 1000}
    match kind:
        case "string":
            flat |= (
                _server(key, raw(item["value"]))
                if ":servers:" in key
                else {f"{key} value": _plain(raw(item["value"]), now)}
            )
        case "hash":
            for name, value in item["fields"].items():
                flat |= _field(f"{key}.{name}", name, raw(value), now)
        case "list":
            flat[f"{key} items"] = [raw(each).decode() for each in item["items_left_to_right"]]
        case "set":
            flat |= {f"{key}[{raw(each).decode()}]": True for each in item["members"]}
        case _:
            flat |= {f"{key}[{raw(each['member']).decode()}]": _moment(each["score"]) - now for each in item["members"]}
    return flat


def _field(place: str, name: str, value: bytes, now: float) -> Places:
    if ":workers:" in place:
        return {f"{place}.{part}": _cut(each) for part, each in asdict(decode_running(value)).items()}
    if name == "pending_since":
        return {place: int(value) / 1e9 - now}
    if name != "msg":
        return {place: _plain(value, now)}
    message = decode_message(value)
    return {
        f"{place}.{part}": float(content - now) if part in TIMES_IN_MESSAGE and content else content
        for part, content in message._asdict().items()
    }


def _server(key: str, value: bytes) -> Places:
    return {f"{key}.{part}": _cut(each) for part, each in asdict(decode_server(value)).items()}


def _cut(value: object) -> object:
    return value.isoformat() if isinstance(value, datetime) else value


def _moment(score: float) -> float:
    """Return Unix seconds, of milliseconds too."""
    return score / 1000 if score > 1e11 else score


def _plain(value: bytes, now: float) -> object:
    """Return a text; Unix seconds of today as seconds from now."""
    text = value.decode("utf-8", "backslashreplace")
    return float(int(text) - now) if re.fullmatch(r"1[789]\d{8}", text) else text


def _named(value: Any, names: dict[str, str] | None) -> Any:
    if isinstance(value, list):
        return [_named(each, names) for each in value]
    if not isinstance(value, str):
        return value
    for text, name in (names or {}).items():
        value = value.replace(text, name)
    for pattern, name in VARYING:
        value = pattern.sub(name, value)
    return value


def differences(ours: Places, theirs: Places) -> dict[str, tuple[object, object]]:
    """Return the places that differ, each with our value and theirs; "-" where there is none."""
    found = {}
    for place in sorted({*ours, *theirs}):
        pair = ours.get(place, "-"), theirs.get(place, "-")
        if pair[0] == pair[1] or _are_near(*pair):
            continue
        found[place] = pair
    return found


def _are_near(one: object, other: object) -> bool:
    is_time = isinstance(one, float) and isinstance(other, float)
    return is_time and abs(float(str(one)) - float(str(other))) <= NEAR_SECONDS
