"""Say what to write in place of a name that does not exist: an option, an argument of a call, an attribute.

The words of other task queues are asked first. By its letters alone, `rate_limit` would be taken for `queue_limit`,
which means something else.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

from .names import did_you_mean

F = TypeVar("F", bound=Callable[..., Any])


def by_word(*groups: tuple[str, str]) -> dict[str, str]:
    """Return a table of single words. groups: words with the same answer, separated by spaces, and that answer."""
    return {word: answer for words, answer in groups for word in words.split()}


LATER = "write task.using(run_after=timedelta(seconds=60)).enqueue(…), or an aware datetime for run_after"
ENQUEUE = "write task.enqueue(…), in asynchronous code await task.aenqueue(…)"
WITH_USING = (
    "arguments go to task.enqueue(…), options to using(): "
    'write task.using(run_after=timedelta(seconds=60), queue_name="mails").enqueue(…)'
)
APPLY_ASYNC = (
    "write task.enqueue(7) for apply_async((7,)). Options come first: task.using(run_after=timedelta(seconds=60))"
    ".enqueue(7) for countdown=60, run_after= for eta=, queue_name= for queue=; expires=, priority= and headers= stay"
)
WORKFLOW = "write next_task.using(after=[result]).enqueue(…), or chain(task.step(1), next_task.step()).enqueue()"
FAILED = "write a receiver of the signal: @receiver(task_failed), from django_asyncq.signals"
KEPT = "a result is always stored: write @task(retention=Retention(succeeded=3600, failed=86_400)) for how long"
CONTEXT = "write @task(takes_context=True); the first parameter of the function is then called context"
ALWAYS = "remove it: a task whose worker dies always runs again"
NAMED = "remove it: the name of a task is the path of its function"
ATTEMPTS = "write @task(max_attempts=4): attempts in all, the first one included"
BACKOFF = "write @task(backoff=timedelta(seconds=30)), or a callable (exception, result) that returns the time"
AROUND = 'name a function that returns a context manager in the settings: ASYNCQ = {"AROUND": ["shop.around.timed"]}'

# Those that people write as an option of `@task` or `using`, or as an argument of `enqueue`. None is an option of ours.
OPTIONS = by_word(
    ("countdown eta delay schedule_in schedule_at scheduled_at enqueue_in enqueue_at at in_seconds", LATER),
    ("rate_limit", 'write @task(rate="10/m"): at most so many starts, for all workers together'),
    ("bind context include_context pass_context", CONTEXT),
    ("acks_late acks_on_failure_or_timeout reject_on_worker_lost task_reject_on_worker_lost ack_failure", ALWAYS),
    ("autoretry_for retry_when retry_for", "write @task(retry_on=(OSError,), max_attempts=4)"),
    ("dont_autoretry_for throws", "write @task(give_up_on=(ValueError,))"),
    ("max_retries retries retry num_retries", ATTEMPTS),
    (
        "default_retry_delay retry_delay retry_backoff retry_backoff_max retry_jitter retry_kwargs min_backoff "
        "max_backoff interval",
        BACKOFF,
    ),
    ("time_limit job_timeout", "write @task(timeout=60)"),
    ("soft_time_limit", "write @task(soft_timeout=50, takes_context=True), and context.check() in the function"),
    ("max_age ttl", "write task.using(expires=60).enqueue(…), or @task(expires=60)"),
    ("queue routing_key exchange", 'write @task(queue_name="mails"), or task.using(queue_name="mails").enqueue(…)'),
    ("at_front", "write task.using(priority=100).enqueue(…); higher comes first"),
    ("ignore_result store_results result_ttl result_expires failure_ttl store_errors_even_if_ignored", KEPT),
    ("link depends_on chain pipe_target on_success", WORKFLOW),
    ("link_error on_failure on_retry_exhausted errback", FAILED),
    ("name actor_name shared_name", NAMED),
    ("task_id job_id message_id", 'each call has an id of its own; write @task(unique="{order_id}") for one at a time'),
    ("once queueing_lock unique_for lock_ttl", 'write @task(unique="{order_id}", unique_until="end")'),
    (
        "lock singleton concurrency_limit",
        'write @task(gate="export-{user_id}", queue_limit=1), and on_full="wait" to have others wait',
    ),
    ("periodic repeat cron crontab", 'write @task(schedule=cron("0 6 * * *")), or schedule=every(minutes=5)'),
    ("meta tags description", 'write task.using(headers={"tenant": "north"}).enqueue(…)'),
    ("base", AROUND),
    ("notify_shutdown", f"{CONTEXT}; context.should_stop says it"),
    ("enqueue_on_commit on_commit", "remove it: the row of a call is part of the caller's transaction"),
    ("serializer compression", "remove it: arguments and results are JSON"),
)
OF_TASK = by_word(
    ("delay send defer perform_async delay_on_commit", ENQUEUE),
    ("apply_async apply_async_on_commit", APPLY_ASYNC),
    ("send_with_options options configure set", WITH_USING),
    ("send_at send_in perform_in perform_at enqueue_in enqueue_at", LATER),
    ("s si signature subtask message message_with_options pipeline then chain chord link link_error", WORKFLOW),
    ("map starmap chunks", "write task.enqueue_many([(1,), (2,)]), and wait_all(results) for the values"),
    ("apply run call_local fn", "write task.func(…) to call the function here and now, as plain Python"),
    ("AsyncResult fetch", "write task.get_result(result_id)"),
    ("request", f"{CONTEXT}; context.attempt and context.task_result.id are there"),
    ("update_state", f"{CONTEXT}; write context.progress(done, total, message)"),
    ("retry", f"{CONTEXT}; write context.retry(in_=30)"),
    ("revoke", "write result.cancel(); enqueue returns the result"),
    ("periodic_task", OPTIONS["periodic"]),
)
OF_RESULT = by_word(
    ("get get_result maybe_throw wait_for blocking", "write result.wait(timeout=10), which returns the value"),
    ("join get_many", "write wait_all([result, …], timeout=10), from django_asyncq"),
    ("ready", "write result.refresh(), and read result.is_finished"),
    ("state get_status successful failed is_failed is_queued", "write result.refresh(), and read result.status"),
    ("result", "write result.wait(), or result.refresh() and read result.return_value"),
    ("info meta", "write result.refresh(), and read result.progress"),
    ("traceback exc_info exception", "read result.errors[-1].traceback"),
    ("revoke abort kill stop", "write result.cancel()"),
    ("forget delete", KEPT),
    ("task_id message_id job_id get_id", "read result.id"),
    ("requeue retry", "write result.task.enqueue(*result.args, **result.kwargs); the admin has an action too"),
    ("children parent then", WORKFLOW),
)
OF_CONTEXT = by_word(
    ("request", "read context.attempt, context.headers, context.task_result.id and context.task_result.args"),
    ("update_state save_meta meta", "write context.progress(done, total, message)"),
    ("is_aborted is_revoked", "read context.should_stop, or call context.check()"),
    ("job", "read context.task_result"),
)
# What a retry can be told elsewhere.
OF_RETRY = by_word(
    ("countdown delay eta seconds", "write context.retry(in_=30)"),
    ("exc", "remove it, or let the exception leave the function: an exception of retry_on is retried"),
    ("max_retries", ATTEMPTS),
)


def refuse_unknown(
    call: str, given: Iterable[str], known: Collection[str], elsewhere: Mapping[str, str] | None = None
) -> None:
    """Refuse options that a call does not have.

    call: as it is written, such as "task()". elsewhere: what to write for options that belong to another call.
    Raises: TypeError, which says what to write instead.
    """
    for option in sorted(set(given).difference(known)):
        answer = (elsewhere or {}).get(option) or OPTIONS.get(option)
        remedy = answer or f"{did_you_mean(option, known, most=1)}it has {', '.join(sorted(known))}"
        raise TypeError(f"{call} has no option {option!r}: {remedy[0].lower()}{remedy[1:]}")


def options_of(function: Callable[..., Any]) -> set[str]:
    """Return the names of the options that a function takes, as keywords only and each with a default."""
    return set(inspect.unwrap(function).__kwdefaults__ or ())


def refusing_unknown(call: str, elsewhere: Mapping[str, str]) -> Callable[[F], F]:
    """Have a method that takes options alone refuse unknown ones as `refuse_unknown` does, and Python none."""

    def decorate(method: F) -> F:
        known = options_of(method)

        @wraps(method)
        def checked(self: Any, **options: Any) -> Any:
            if not known.issuperset(options):
                refuse_unknown(call, options, known, elsewhere)
            return method(self, **options)

        return cast("F", checked)

    return decorate


def no_attribute(owner: object, name: str, words: Mapping[str, str], called: str = "task") -> AttributeError:
    """Return the error for an attribute that an object does not have.

    words: those of other task queues. called: the name in the reader's code of the task that their answers are about.
    """
    text = f"{type(owner).__name__!r} object has no attribute {name!r}"
    if answer := words.get(name):
        answer = re.sub(r"\btask\.", f"{called}.", answer)
        # Without the object: Python would add one that is spelled alike.
        return AttributeError(f"{text}: {answer}", name=name)
    return AttributeError(text, name=name, obj=owner)


def about_arguments(task: Any, names: Iterable[str]) -> str:
    """Return what to write in place of arguments that are options; "" for other names.

    names: of the keyword arguments that the function does not take.
    """
    of_call = options_of(type(task).using)
    for name in names:
        if name in of_call:
            return f". {name!r} is an option of the call: write task.using({name}=…).enqueue(…)"
        if answer := OPTIONS.get(name):
            return f". {name!r} is no option here: {answer}"
    return ""
