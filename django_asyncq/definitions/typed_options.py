"""The types of the options of `@task`, for type checkers and editors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypedDict

from ..durations import Duration
from .backoff import Backoff
from .retention_policy import Retention
from .schedules import Declaration
from .wire_names import PayloadKind

GateSource = str | Callable[..., str]
UniqueKey = bool | str | Callable[..., str]
UniqueUntil = Literal["end", "start"]
OnDuplicate = Literal["reject", "return", "replace", "follow"]


class TaskOptions(TypedDict, total=False):
    """The options of `@task`, for type checkers and editors; `Task` says what each means.

    Not here: `batch`, with which the function takes something else than its callers pass.
    """

    priority: int
    queue_name: str
    backend: str
    max_attempts: int | None
    backoff: Backoff | None
    retry_on: type[BaseException] | tuple[type[BaseException], ...]
    give_up_on: type[BaseException] | tuple[type[BaseException], ...]
    timeout: Duration | None
    gate: GateSource | None
    queue_limit: int | None
    expected_seconds: Duration | None
    schedule: Declaration | tuple[Declaration, ...] | None
    schedulable: bool
    retention: Retention | None
    atomic: bool
    expires: Duration | None
    soft_timeout: Duration | None
    isolated: bool
    unique: UniqueKey | None
    unique_until: UniqueUntil | Duration
    on_duplicate: OnDuplicate
    keep_logs: int | None
    sensitive: str | tuple[str, ...]
    wire_name: str | None
    payload: PayloadKind
    inbox: bool
