"""Run the Python examples of the docs: `python -m tests.docs_runner` prints a line of JSON for each page.

The blocks of a page run in their order, each in a module of its own that knows the names of those before it. `BEFORE`
makes what a page takes for granted, such as a request or a function of the project; `AFTER` calls what it only defines.
Tasks have rows in an SQLite database in memory, under the test kit's backend. There is a Valkey for what needs one.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import tempfile
import textwrap
import traceback
import types
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import django

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^( *)```python\n(.*?)```", re.DOTALL | re.MULTILINE)
PLACE = re.compile(r"# ([\w/]+)\.py")
APPS = ("contenttypes", "auth", "admin")
ADDRESS = "redis://127.0.0.1:6379"
# As the pages say it for Django 5.2.
FRAMEWORK = "django.tasks" if django.VERSION >= (6, 0) else "django_tasks"
# Those whose examples other tests run, as files of a project.
FOLLOWED = {"both-queues", "getting-started", "moving-over", "testing"}

# What all pages may take for granted.
COMMON = """
import os
from types import SimpleNamespace
from unittest import mock

from django.contrib.auth.models import User
from django.core.cache import cache
from django_asyncq import task
from django_asyncq.testing import run_tasks

request = SimpleNamespace(user=User.objects.get_or_create(username="ada")[0], headers={"traceparent": "00-1-2-03"})
"""
SHOP = """
@task
def send_receipt(order_id): return order_id
@task
def render_invoice(number): return f"{number}.pdf"
@task
def charge(order_id=0): ...
"""
BEFORE = {
    "README": """
from django.conf import settings
INSTALLED_APPS, DATABASES = [], {"default": {}}
""",
    "docs/explanation/leadership": """
download = lambda: None
Catalogue = mock.MagicMock()
refresh_prices = mock.Mock(side_effect=KeyboardInterrupt)
""",
    "docs/guides/admin": "from django.contrib.admin import AdminSite as OfficeAdminSite",
    "docs/guides/cancelling": """
from datetime import timedelta
from django.utils import timezone
@task
def render(film_id): ...
film_id, user_id, end_of_offer = 7, 7, timezone.now() + timedelta(days=1)
frames_of = pages_of = lambda id: [1, 2]
draw = write = lambda one: None
""",
    "docs/guides/choosing-limits": "ask_provider = lambda id: SimpleNamespace(status=200, text='yes', headers={})",
    "docs/guides/exactly-once": """
Order = mock.MagicMock()
fetch = lambda url: [1, 2]
@task
def notify(order_id): ...
""",
    "docs/guides/isolated": "encode = lambda id: None",
    "docs/guides/redis": "CACHES = {}",
    "docs/guides/replace-and-follow": "site_id = 7",
    "docs/guides/results": """
from shop.tasks import send_receipt
result_id = send_receipt.enqueue(1).id
run_tasks()
read_rows = lambda path: [1, 2]
save = lambda row: None
""",
    "docs/guides/tasks": """
class Order:
    class DoesNotExist(Exception): ...
account_is_ready = lambda id: True
provider_is_down = lambda: False
save_account = lambda id: None
@task
def sync_account(account_id): ...
""",
    "docs/guides/typed-arguments": """
from django.contrib.auth.models import User as Order
order = Order.objects.create(username="someone", email="someone@example.com")
sent = []
send_mail = lambda *mail: sent.append(mail)
""",
    "docs/reference/failpoints": """
Order = Payment = mock.MagicMock()
Payment.objects.filter.return_value.count.return_value = 1
@task
def charge(order_id): ...
""",
    "docs/reference/pytest": """
@task
def send_confirmation(id): ...
""",
}
AFTER = {
    "docs/guides/typed-arguments": """
run_tasks()
assert sent == [("someone@example.com", "Your order is due on 24 December")]
""",
    "README": "assert submit(request).status_code == 202",
    "docs/explanation/leadership": """
try:
    lead()
except KeyboardInterrupt:
    coordinator.release("prices")
""",
    "docs/guides/batches": "record('a')",
    "docs/guides/cancelling": """
for one in (render, export):
    one.enqueue(7)
run_tasks()
""",
    "docs/guides/exactly-once": """
for one in (pay_out, import_orders):
    one.enqueue("7")
assert all(str(each.status) == "SUCCESSFUL" for each in run_tasks())
""",
    "docs/guides/fairness": """
export.enqueue_many([("a", year) for year in range(9)])
send_invoice.enqueue(tenant_id="b", invoice_id=1)
ship.enqueue({"shop": 7})
report.enqueue(tenant_id="c", plan="company")
assert [each.args[:1] or each.kwargs.get("tenant_id") for each in run_tasks()[:4]] == ["c", ["a"], "b", [{"shop": 7}]]
""",
    "docs/guides/gates": "assert submit(request).status_code == 202",
    "docs/guides/logging": """
assert trace_headers() == {}
checkout(request)
line = JsonFormatter().format(logging.LogRecord("a", 20, "a.py", 1, "text", (), None))
assert json.loads(line)["message"] == "text"
assert bound_headers(charge) == {}
""",
    "docs/guides/monitoring": """
from django.test import RequestFactory
assert health_view(RequestFactory().get("/")).status_code in (200, 503)
sentry_sdk.init()
""",
    "docs/guides/once-only": "assert press(request).status_code == 202 and press(request).status_code == 409",
    "docs/guides/results": """
import_rows.enqueue("a.csv")
import_catalogue.enqueue("a.csv")
sync_orders.enqueue(7)
assert all(str(each.status) == "SUCCESSFUL" for each in run_tasks())
""",
    "docs/guides/inbox": "send_mail.enqueue(7) and take_order.enqueue({}) and keep_line.enqueue('') and run_tasks()",
    "docs/guides/sharing-queues": "send_invoice.enqueue(7) and run_tasks()",
    "docs/guides/tasks": """
sync_account.enqueue(7)
assert {str(each.status) for each in run_tasks()} == {"SUCCESSFUL"}
""",
    "docs/guides/workflows": """
assert begin("May").id and begin_all("May", ["rows", "prices"]).id and tell_in_any_case().id
album = import_album.enqueue("a")
run_tasks()
album.refresh()
assert str(album.status) == "SUCCESSFUL", album.errors
""",
    "docs/guides/workflow-recipes": """
from django_asyncq.models import FailureReason, TaskState
from shop.albums import report_failure
from shop.orders import ship
for one in (import_file("a"), campaign([1, 2]), split.enqueue(7), nightly.enqueue()):
    run_tasks()
    one.refresh()
    assert str(one.status) == "SUCCESSFUL", one.errors

def seen(one):
    row = TaskRecord.objects.get(id=one.id)
    return TaskState(row.state).name, FailureReason(row.reason).name if row.reason else "", row.return_value

# All parts succeed: the join has their values, in their order.
both = publish("May", ["a.jpg", "b.jpg"])
run_tasks()
assert [seen(one)[::2] for one in both] == [("SUCCEEDED", "May: small-a.jpg, small-b.jpg"), ("FAILED", None)]
assert seen(both[1])[1] == "DISCARDED"
# A part fails: the join does not run, and the failure branch names the part.
page, failure = publish("June", ["c.jpg", "d.pdf", "e.jpg"])
run_tasks()
assert seen(page) == ("FAILED", "PARENT_FAILED", None)
assert seen(failure) == ("SUCCEEDED", "", "June: d.pdf")
parts = {row.args[0]: row for row in TaskRecord.objects.filter(name=shrink.module_path).order_by("id")}
states = [TaskState(parts[name].state).name for name in ("c.jpg", "d.pdf", "e.jpg")]
assert states == ["SUCCEEDED", "FAILED", "SUCCEEDED"]
# A retry of the part revives the join, and nothing else runs again.
broken = parts["d.pdf"]
TaskRecord.objects.filter(id=broken.id).update(args=["d.jpg"])
assert Inspector().tasks.retry([broken.id]).done == [broken.id]
assert seen(page)[0] == "QUEUED"
assert sorted(result.task.name for result in run_tasks()) == ["join", "shrink"]
assert seen(page) == ("SUCCEEDED", "", "June: small-c.jpg, small-d.jpg, small-e.jpg")
assert seen(failure) == ("SUCCEEDED", "", "June: d.pdf")

order = place(7)
run_tasks()
assert str(ship.get_result(order.id).status) == "FAILED"
assert approve(7).done
run_tasks()
assert str(ship.get_result(order.id).status) == "SUCCESSFUL"
""",
    "docs/reference/signals": """
@task
def fails():
    raise ValueError("no")
fails.enqueue()
run_tasks()
assert task_state_changed.disconnect(report_failures)
""",
}
# Written for a running worker or another program, which is not here: what takes its place.
INSTEAD = {
    "docs/guides/sharing-queues": [("result.wait()", "assert str(result.status) == 'READY'")],
    "docs/reference/failpoints": [("from shop.settings import *", "import shop.settings")],
    "docs/guides/monitoring": [("BatchSpanProcessor(OTLPSpanExporter())", "BatchSpanProcessor(mock.MagicMock())")],
}


def pages() -> dict[str, list[str]]:
    """Return the Python blocks of each page that this runs."""
    found = {}
    for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))):
        name = path.relative_to(ROOT).with_suffix("").as_posix()
        blocks = [textwrap.dedent(indent + code) for indent, code in BLOCK.findall(path.read_text())]
        if blocks and path.stem not in FOLLOWED and "coming-from" not in path.parts:
            found[name] = blocks
    return found


def set_up(address: str) -> None:
    """Set Django up, with tables in memory and a Redis at this address."""
    from django.conf import settings
    from django.core.management import call_command

    backport = [] if FRAMEWORK == "django.tasks" else [FRAMEWORK]
    settings.configure(
        SECRET_KEY="docs" * 20,
        USE_TZ=True,
        ALLOWED_HOSTS=["*"],
        INSTALLED_APPS=[
            *backport,
            *(f"django.contrib.{name}" for name in ("contenttypes", "auth", "admin")),
            "django_asyncq",
        ],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        CACHES={"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": f"{address}/0"}},
        TASKS={"default": {"BACKEND": "django_asyncq.testing.TestBackend", "QUEUES": []}},
        ASYNCQ={"REDIS_IS_FOR_TESTS": True, "MONITOR_TOKEN": "docs" * 10},
    )
    django.setup()
    call_command("migrate", verbosity=0)


def run_page(name: str, blocks: list[str], address: str, folder: Path) -> None:
    """Run the blocks of a page, as files in a folder. Raises: whatever one of them raises."""
    from django_asyncq.core import registry
    from django_asyncq.models import TaskRecord

    TaskRecord.objects.all().delete()
    registry._registry.clear()
    for module in [each for each in sys.modules if each.split(".")[0] in ("shop", "renders")]:
        del sys.modules[module]
    names: dict[str, Any] = {}
    for package in ("shop", "renders"):
        run(package, "", names, folder)
    run("shop.settings", "", names, folder)
    run("shop.tasks", COMMON + SHOP if all("# shop/tasks.py" not in each for each in blocks) else "", names, folder)
    run("examples.before", COMMON + BEFORE.get(name, ""), names, folder)
    for number, block in enumerate(blocks):
        for old, new in INSTEAD.get(name, ()):
            block = block.replace(old, new)
        place = PLACE.match(block)
        module = (
            place[1].replace("/", ".") if place else f"examples.{name.replace('/', '_').replace('-', '_')}_{number}"
        )
        run(module, block.replace("from django.tasks ", f"from {FRAMEWORK} ").replace(ADDRESS, address), names, folder)
    run("examples.after", AFTER.get(name, ""), names, folder)


def run(module: str, code: str, names: dict[str, Any], folder: Path) -> None:
    """Run code as a module that knows some names, and add its own to them; `await` may stand at its top.

    It is a file too, below the folder, since a worker must be able to import the function of a task.
    """
    path = folder / f"{module.replace('.', '/')}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    made = types.ModuleType(module)
    made.__file__ = str(path)
    if module in ("shop", "renders", "examples"):
        made.__path__ = []
    sys.modules[module] = made
    vars(made).update({key: value for key, value in names.items() if not key.startswith("__")})
    tree = ast.parse(code)
    if any(isinstance(each, ast.Expr) and isinstance(each.value, ast.Await) for each in tree.body):
        vars(made)["run_awaitable"] = run_awaitable
        tree = ast.fix_missing_locations(TopLevelAwaits().visit(tree))
    exec(compile(tree, str(path), "exec"), vars(made))
    names.update({key: value for key, value in vars(made).items() if not key.startswith("__")})


class TopLevelAwaits(ast.NodeTransformer):
    """Has `await` at the top of a module run in the caller's thread, beside code that is not asynchronous."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Leave functions as they are."""
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AsyncFunctionDef:
        """Leave functions as they are."""
        return node

    def visit_Await(self, node: ast.Await) -> ast.Call:
        """Call `run_awaitable` with what is awaited."""
        return ast.Call(ast.Name("run_awaitable", ast.Load()), [node.value], [])


def run_awaitable(awaitable: Awaitable[Any]) -> Any:
    """Await it, with what it does to the database on this thread, which has the connection."""
    from asgiref.sync import async_to_sync

    async def awaited() -> Any:
        return await awaitable

    return async_to_sync(awaited)()


def main() -> None:
    """Run every page, and print what became of it."""
    os.environ.update(
        ALERT_WEBHOOK="https://example.com", MONITOR_TOKEN="x", SECRET_KEY="x", ALLOWED_HOSTS="a", REDIS_URL="redis://a"
    )
    sys.modules["examples"] = types.ModuleType("examples")
    from django_asyncq.testing.redis_server import EmbeddedRedis

    with EmbeddedRedis() as server, tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        address = server.url.rpartition("/")[0] if server.url.count("/") > 2 else server.url
        set_up(address)
        for name, blocks in pages().items():
            error = ""
            try:
                run_page(name, blocks, address, folder / name)
            except BaseException:  # noqa: BLE001 - the test shows it
                error = traceback.format_exc()
            print(json.dumps({"page": name, "blocks": len(blocks), "error": error}))


if __name__ == "__main__":
    main()
