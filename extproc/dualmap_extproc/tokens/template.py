"""Renders chat templates of models in a sandbox, with the filters and functions that Hugging Face's templates use.

The template is a file of the model, which the router's operator installed. Messages come from clients. The sandbox
keeps a template from reaching Python's internals through a message.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Final

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dualmap_extproc.tokens.messages import Json, UnsupportedRequest, prepared_messages, prepared_tools

FAILURES_MAX: Final = 5
"""A template that fails for so many requests before it renders one does not work."""
# The function that the router adds to templates.
_CHECK_TIME: Final = "_check_time"


class TemplateFault(Exception):
    """A template that cannot be compiled."""


class ChatTemplate:
    """A compiled chat template. ``names`` are the special tokens that the template may insert, by name."""

    def __init__(self, source: str, names: Mapping[str, object]) -> None:
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._wrap_parts = _reads_parts(tree)
            _check_time_in_loops(tree, environment)
            self._template = environment.from_string(tree)
        except TemplateError as error:
            raise TemplateFault(f"the chat template is invalid: {error.message}") from error
        self._names = dict(names)
        self.problem = ""
        """Why the template does not work; empty if it works, or as long as too few requests have failed."""
        self._works = False
        self._failures = 0

    def render(self, body: Mapping[str, object], within_s: float = math.inf) -> str:
        """Return the prompt text of a chat request. Raises UnsupportedRequest if it cannot be computed.

        ``within_s`` is the most CPU time of the thread. It is checked in inner loops and in macros.
        """
        settings = body.get("chat_template_kwargs") or {}
        if not isinstance(settings, dict):
            raise UnsupportedRequest("chat_template_kwargs is not an object")
        given: Json = {"documents": body.get("documents"), "add_generation_prompt": True}
        for name in ("add_generation_prompt", "reasoning_effort"):
            if body.get(name) is not None:
                given[name] = body[name]
        messages = prepared_messages(body.get("messages"), wrap_parts=self._wrap_parts)
        values = {**self._names, **given, **settings, "tools": prepared_tools(body.get("tools"))}
        try:
            text = self._template.render({**values, "messages": messages, _CHECK_TIME: _time_check(within_s)})
        except Exception as error:
            # A template may fail in any way, for example for an unexpected order of roles.
            self._count_failure(error)
            raise UnsupportedRequest(f"the chat template failed: {error}") from error
        self._works, self.problem = True, ""
        return text

    def _count_failure(self, error: Exception) -> None:
        self._failures += 1
        if not self._works and self._failures == FAILURES_MAX:
            # Only the error's name, because its text may contain text of the request.
            named = type(error).__name__
            self.problem = f"the chat template failed for the first {FAILURES_MAX} chat requests ({named})"


def _environment() -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _as_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


class _Generation(Extension):
    """The block ``generation``, which marks assistants' text for training and does not change the text."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it without ClassVar

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements inside the block."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _check_time_in_loops(template: nodes.Template, environment: Environment) -> None:
    """Add a check of the time to each macro of a template, and to each loop inside of a macro or another loop.

    These can make a small request slow. The time of other loops is in proportion to the request's size, and the check
    would add half of it.
    """
    macros = set(template.find_all(nodes.Macro))
    outer: set[nodes.For | nodes.Macro] = {*template.find_all(nodes.For), *macros}
    checked = macros.union(*(each.find_all(nodes.For) for each in outer))
    for each in checked:
        check = nodes.Call(nodes.Name(_CHECK_TIME, "load"), [], [], None, None)
        statement = nodes.ExprStmt(check).set_lineno(each.lineno).set_environment(environment)
        each.body.insert(0, statement)


def _time_check(within_s: float) -> Callable[[], None]:
    until_s = time.thread_time() + within_s

    def check() -> None:
        if time.thread_time() > until_s:
            raise TimeoutError("it takes too long")

    return check


def _as_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Unlike jinja2's own filter, this one escapes no characters of HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(layout: str) -> str:
    # Templates show the engine's local date. Engines and routers run in UTC unless their pods say otherwise.
    return datetime.now().strftime(layout)  # noqa: DTZ005


def _reads_parts(template: nodes.Template) -> bool:
    """Return whether a template loops over the parts of a message's content, and not over its text."""
    messages = _aliases(template, "messages")
    loops = list(template.find_all(nodes.For))
    items = {_name(each.target) for each in loops if _name(each.iter) in messages} - {None}
    return any(_content_owner(each.iter) in items for each in loops)


def _aliases(template: nodes.Template, name: str) -> set[str]:
    """Return the names of the variables that are, directly or through others, the value of ``name`` or a part of it."""
    found = {name}
    assigned = [(_name(each.target), _name(each.node)) for each in template.find_all(nodes.Assign)]
    while more := {target for target, value in assigned if target is not None and value in found} - found:
        found |= more
    return found


def _unfiltered(node: nodes.Node | None) -> nodes.Node | None:
    """Return an expression without filters, tests and slices around it."""
    while True:
        if isinstance(node, nodes.Filter | nodes.Test) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
        else:
            return node


def _name(node: nodes.Node | None) -> str | None:
    node = _unfiltered(node)
    return node.name if isinstance(node, nodes.Name) else None


def _content_owner(node: nodes.Node | None) -> str | None:
    """Return the variable ``x`` of the expression ``x.content``; None for any other expression."""
    node = _unfiltered(node)
    if isinstance(node, nodes.Getitem):
        key = node.arg.value if isinstance(node.arg, nodes.Const) else None
    elif isinstance(node, nodes.Getattr):
        key = node.attr
    else:
        return None
    return _name(node.node) if key == "content" else None
