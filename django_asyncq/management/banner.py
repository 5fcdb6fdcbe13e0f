"""What `runworkers` prints when it starts: where its tasks come from, and how many run at once. No secrets."""

from __future__ import annotations

from collections.abc import Sequence

from .. import __version__, conf
from ..broker.clients import server_identity
from ..prefixes import prefix_of
from ..worker.options import WorkerOptions
from .wording import counted, name_of_database


def banner(
    options: WorkerOptions, *, processes: int, single_instance: bool | None, names: Sequence[str], with_names: bool
) -> str:
    """Return the text. names: of the registered tasks. with_names: whether to list them, besides their number."""
    settings = conf.current()
    each = " with " if processes == 1 else ", each with "
    slots = counted(processes, "process", "processes") + each + counted(options.concurrency, "slot")
    is_single = settings.single_instance_mode if single_instance is None else single_instance
    parts = {
        "queues": _queues(options),
        "redis": f"{server_identity()}, keys begin with {prefix_of(options.backend)}:",
        "database": name_of_database(),
        "workers": slots,
        "tasks": f"{counted(len(names), 'task')} registered",
        "mode": "single instance (one host)" if is_single else "multi instance (one host or several)",
    }
    lines = [f"django_asyncq {__version__} runs the tasks of TASKS[{options.backend!r}]"]
    lines += [f"  {name:<9}{text}" for name, text in parts.items()]
    if with_names:
        lines += [f"    {name}" for name in names]
    return "\n".join(lines)


def _queues(options: WorkerOptions) -> str:
    if not options.queues:
        return "all that there are"
    weights = ", ".join(f"{name}={weight}" for name, weight in options.queues.items())
    return f"{weights} (strict: the highest weight first)" if options.strict else weights
