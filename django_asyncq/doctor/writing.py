"""Fill the form of a line to write from the source: values are converted; what cannot be seen stays as written.

A form is a text with parts in braces. `{it}` is the object of a call, `{args}` the arguments of the task, `{inner}`
those of the call before, `{steps}` and `{list}` what a chain or a group is of, `{first}` the first parameter of a task,
`{value}` a value. Any other part is a *slot*, with what the options of a call add to it: `{task}` becomes "(…)" and
`{using}` ".using(…)", and both are "" when nothing was added.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Callable, Iterable, Mapping
from io import StringIO

# A line is for reading; a longer one is cut where it is shown.
MAY_BE_EMPTY = frozenset(("args", "arguments", "command", "retry", "task", "using", "wait"))
WRAPPED = {"task": "({})", "using": ".using({})"}


def literal(node: ast.AST | None) -> object:
    """Return the value of a plain literal, a negative number included; `...` for anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = literal(node.operand)
        return -number if isinstance(number, int | float) else ...
    return node.value if isinstance(node, ast.Constant) else ...


def _plus_one(node: ast.expr, text: str) -> str:
    value = literal(node)
    return str(value + 1) if type(value) is int else f"{text} + 1"


def _rate(node: ast.expr, text: str) -> str:
    """Return a rate; to Celery a number is that of starts in a second."""
    value = literal(node)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        return text
    per_day = round(value * 86_400)
    seconds = [1, 60, 3_600, 86_400]
    units = dict(zip(seconds, "smhd", strict=True))
    fits = [each for each in seconds if per_day * each % 86_400 == 0] or seconds[-1:]
    return f'"{max(per_day * fits[0] // 86_400, 1)}/{units[fits[0]]}"'


def _times(factor: float) -> Callable[[ast.expr, str], str]:
    def convert(node: ast.expr, text: str) -> str:
        value = literal(node)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return f"{value * factor:g}"
        return f"({text}) * {factor:g}" if factor > 1 or 1 / factor % 1 else f"({text}) / {1 / factor:g}"

    return convert


def _negated(node: ast.expr, text: str) -> str:
    value = literal(node)
    return str(-value) if isinstance(value, int | float) else f"-({text})"


def _is_duration(text: str) -> bool:
    return bool(re.match(r"(?:datetime\.)?timedelta\(", text))


def _seconds(node: ast.expr, text: str) -> str:
    return text if _is_duration(text) else f"timedelta(seconds={text})"


def _milliseconds(node: ast.expr, text: str) -> str:
    if _is_duration(text):
        return text
    value = literal(node)
    if isinstance(value, int | float):
        return f"timedelta(seconds={value / 1000:g})"
    return f"timedelta(milliseconds={text})"


def _spread(node: ast.expr, text: str) -> str:
    if isinstance(node, ast.Tuple | ast.List):
        parsed = ast.parse(text, mode="eval").body
        if isinstance(parsed, ast.Tuple | ast.List):
            return ", ".join(map(ast.unparse, parsed.elts))
    return f"*{text}"


def _spread_named(node: ast.expr, text: str) -> str:
    if isinstance(node, ast.Dict):
        parsed = ast.parse(text, mode="eval").body
        if isinstance(parsed, ast.Dict):
            pairs = [(literal(key), ast.unparse(value)) for key, value in zip(parsed.keys, parsed.values, strict=True)]
            if all(isinstance(key, str) and key.isidentifier() for key, _ in pairs):
                return ", ".join(f"{key}={value}" for key, value in pairs)
    return f"**{text}"


def _quoted(node: ast.expr, text: str) -> str:
    value = literal(node)
    return quoted(value) if isinstance(value, str) else text


def _options(node: ast.expr, text: str) -> str:
    """Return what a value was written as, when that is options of a call; "" for what cannot be seen."""
    return text if re.match(r"\w+=", text) else ""


def _function(node: ast.expr, text: str) -> str:
    """Return a function by its name, where it is given by the text of its path."""
    value = literal(node)
    return value.rpartition(".")[2] if isinstance(value, str) else text


def quoted(text: str) -> str:
    """Return a text as it is written in Python, in double quotes."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _listed(node: ast.expr, text: str) -> str:
    """Return several results as a list, and one as a list of one."""
    return text if isinstance(node, ast.List | ast.Tuple | ast.ListComp) else f"[{text}]"


def _schedule(node: ast.expr, text: str) -> str:
    """Return what makes a schedule: a number of seconds and a duration become an interval."""
    if isinstance(node, ast.Constant):
        return f"every(seconds={text})"
    return f"every({text})" if _is_duration(text) else text


def _retry_options(node: ast.expr, text: str) -> str:
    """Return the options for `{"max_retries": 3, "countdown": 5}`; "" for what is no dictionary of these."""
    if not isinstance(node, ast.Dict):
        return ""
    given = {literal(key): value for key, value in zip(node.keys, node.values, strict=True)}
    parts = []
    if "max_retries" in given:
        parts.append(f"max_attempts={_plus_one(given['max_retries'], ast.unparse(given['max_retries']))}")
    if "countdown" in given:
        parts.append(f"backoff={_seconds(given['countdown'], ast.unparse(given['countdown']))}")
    return ", ".join(parts)


def _kilobytes(node: ast.expr, text: str) -> str:
    value = literal(node)
    number = value if isinstance(value, int) else int(text) if text.isdecimal() else None
    return f"({text}) // 1024" if number is None else str(max(number // 1024, 1))


# What a value becomes, by the word behind its colon.
CONVERTERS: Mapping[str, Callable[[ast.expr, str], str]] = {
    "": lambda _, text: text,
    "quoted": _quoted,
    "function": _function,
    "options": _options,
    "plus_one": _plus_one,
    "rate": _rate,
    "negated": _negated,
    "seconds": _seconds,
    "milliseconds": _milliseconds,
    "ms_as_seconds": _times(0.001),
    "minutes_as_seconds": _times(60),
    "spread": _spread,
    "spread_named": _spread_named,
    "listed": _listed,
    "schedule": _schedule,
    "retry_options": _retry_options,
    "kilobytes_as_megabytes": _kilobytes,
}


def in_double_quotes(source: str) -> str:
    """Return a source with its texts in double quotes, as formatters write them; unchanged where that is unsafe."""
    code, mark, comment = source.partition("  # ")
    if mark:
        return f"{in_double_quotes(code)}{mark}{in_double_quotes(comment)}"
    if "'" not in source:
        return source
    try:
        tokens = list(tokenize.generate_tokens(StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError):
        return source
    for token in reversed(tokens):
        is_plain = token.type == tokenize.STRING and token.string[0] == "'" and token.start[0] == 1 == token.end[0]
        if is_plain and '"' not in token.string and "\\" not in token.string and not token.string.startswith("'''"):
            source = f'{source[: token.start[1]]}"{token.string[1:-1]}"{source[token.end[1] :]}'
    return source


class Text:
    """A value of the source, which a form converts by the word behind its colon."""

    def __init__(self, node: ast.expr, text: str) -> None:
        self.node = node
        self.text = text

    def __format__(self, word: str) -> str:
        return CONVERTERS[word](self.node, self.text)


class Slots(dict[str, object]):
    """The parts of a form; one that nothing was added to is empty, or a gap that the reader fills."""

    def __missing__(self, name: str) -> str:
        return "" if name in MAY_BE_EMPTY else "task" if name in ("function", "task_name") else "…"

    def add(self, slot: str, text: str) -> None:
        """Add a text to a slot; an empty one says that there is nothing to write."""
        if not text:
            return
        texts = self.setdefault(slot, [])
        assert isinstance(texts, list)  # noqa: S101 - the names of slots are not those of other parts
        texts.append(text)

    def fill(self, form: str) -> str:
        """Return the form with its parts."""
        filled = Slots(
            {
                name: WRAPPED.get(name, "{}").format(_joined(part)) if isinstance(part, list) else part
                for name, part in self.items()
            }
        )
        text = form.format_map(filled)
        return in_double_quotes(text)


def _joined(parts: Iterable[str]) -> str:
    """Return arguments in an order that Python allows: those with a name come last."""
    return ", ".join(sorted(filter(None, parts), key=lambda part: bool(re.match(r"\*\*|\w+=[^=]", part))))


# Celery and huey give a day of the week by its name, too; cron knows its first three letters.
DAYS = re.compile(r"\b(sun|mon|tue|wed|thu|fri|sat)[a-z]*", re.IGNORECASE)


def cron_text(fields: Iterable[ast.expr | None]) -> str:
    """Return the cron expression of five fields; "" when one cannot be seen. A missing one is "*"."""
    values: list[object] = []
    for node in fields:
        values.append("*" if node is None else literal(node))
    if any(not isinstance(value, int | str) for value in values):
        return ""
    return " ".join(DAYS.sub(lambda found: found[1].upper(), re.sub(r"\s+", "", str(value))) for value in values)
