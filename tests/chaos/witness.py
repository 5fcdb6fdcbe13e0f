"""The witness in the database: triggers that log every change of a task's state, fence and gate, in order.

The package cannot influence them. They see what a statement did, not what its caller meant.
"""

from __future__ import annotations

from django.db import connection

from .checker import Transition, plain

TABLE = "chaos_transitions"
COLUMNS = "task, old_state, new_state, old_fence, new_fence, gate, waits"
INSERTED = "NEW.id, NULL, NEW.state, 0, NEW.fence, NEW.gate, {no}"
UPDATED = "NEW.id, OLD.state, NEW.state, OLD.fence, NEW.fence, NEW.gate, OLD.retry_at IS NOT NULL"
DELETED = "OLD.id, OLD.state, NULL, OLD.fence, OLD.fence, OLD.gate, {no}"

# The columns of the table, and the words around a trigger's statement, on the databases whose triggers are statements.
TYPES = {
    "sqlite": f"seq INTEGER PRIMARY KEY AUTOINCREMENT, {COLUMNS}",
    # In the order of the statements: an id is given out while the task's row is locked.
    "mysql": (
        "seq bigint AUTO_INCREMENT PRIMARY KEY, task varchar(36), old_state int, new_state int, "
        "old_fence bigint, new_fence bigint, gate varchar(200), waits boolean"
    ),
}
BODIES = {"sqlite": ("BEGIN", "; END"), "mysql": ("FOR EACH ROW", "")}


def install_witness() -> None:
    """Create the table of transitions and the triggers that fill it."""
    remove_witness()
    from django_asyncq.models import TaskRecord

    rows = TaskRecord._meta.db_table
    with connection.cursor() as cursor:
        if connection.vendor != "postgresql":
            begin, end = BODIES[connection.vendor]
            cursor.execute(f"CREATE TABLE {TABLE} ({TYPES[connection.vendor]})")
            for verb, values in (("INSERT", INSERTED), ("UPDATE", UPDATED), ("DELETE", DELETED)):
                cursor.execute(
                    f"CREATE TRIGGER chaos_{verb.lower()} AFTER {verb} ON {rows} {begin} "
                    f"INSERT INTO {TABLE} ({COLUMNS}) VALUES ({values.format(no=0)}){end}"
                )
            return
        cursor.execute(
            f"CREATE TABLE {TABLE} (seq bigserial PRIMARY KEY, task text, old_state int, new_state int, "
            f"old_fence bigint, new_fence bigint, gate text, waits boolean)"
        )
        branches = " ".join(
            f"IF TG_OP = '{verb}' THEN INSERT INTO {TABLE} ({COLUMNS}) VALUES ({values.format(no='false')}); END IF;"
            for verb, values in (("INSERT", INSERTED), ("UPDATE", UPDATED), ("DELETE", DELETED))
        )
        cursor.execute(
            f"CREATE FUNCTION chaos_witness() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN {branches} RETURN NULL; END $$"
        )
        cursor.execute(
            f"CREATE TRIGGER chaos_witness AFTER INSERT OR UPDATE OR DELETE ON {rows} "
            f"FOR EACH ROW EXECUTE FUNCTION chaos_witness()"
        )


def remove_witness() -> None:
    """Drop what `install_witness` created, if it exists."""
    from django_asyncq.models import TaskRecord

    with connection.cursor() as cursor:
        if connection.vendor != "postgresql":
            for verb in ("insert", "update", "delete"):
                cursor.execute(f"DROP TRIGGER IF EXISTS chaos_{verb}")
        else:
            cursor.execute(f"DROP TRIGGER IF EXISTS chaos_witness ON {TaskRecord._meta.db_table}")
            cursor.execute("DROP FUNCTION IF EXISTS chaos_witness")
        cursor.execute(f"DROP TABLE IF EXISTS {TABLE}")


def clear_witness() -> None:
    """Delete the rows and transitions of an earlier case."""
    from django_asyncq.models import Gate, TaskRecord

    TaskRecord.objects.all()._raw_delete(TaskRecord.objects.db)
    Gate.objects.all()._raw_delete(Gate.objects.db)
    with connection.cursor() as cursor:
        cursor.execute(f"DELETE FROM {TABLE}")


def transitions() -> list[Transition]:
    """Return what the triggers saw, in order."""
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {COLUMNS} FROM {TABLE} ORDER BY seq")
        rows = cursor.fetchall()
    return [Transition(plain(row[0]), row[1], row[2], row[3], row[4], row[5], bool(row[6])) for row in rows]
