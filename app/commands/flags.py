"""Flags made from the fields of `Settings`: one description serves `--help`, the README's table and the messages."""

import argparse
import types
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from app.settings import PREFIX, Settings

MiB = 1024 * 1024
_DEST = "settings."  # keeps them apart from a command's own flags, of which one may have the same name


class Option(NamedTuple):
    """One field of `Settings` in words."""

    name: str
    flag: str
    variable: str
    value: str  # what the flag takes: INT, FLOAT, TEXT or the allowed words; empty for a switch
    default: str  # empty where the description itself says in brackets what happens without
    description: str


def options(names: Iterable[str] | None = None) -> Iterator[Option]:
    """Every option, or the named ones, in the order of `Settings`."""
    wanted = None if names is None else set(names)
    for name, field in Settings.model_fields.items():
        if wanted is None or name in wanted:
            yield Option(
                name=name,
                flag=f"--{name.replace('_', '-')}",
                variable=f"{PREFIX}{name.upper()}",
                value=_value(field.annotation),
                default=_default(name, field),
                description=field.description or "",
            )


def add_settings_flags(parser: argparse._ActionsContainer, names: Iterable[str] | None = None) -> None:
    """Add a flag per option. A flag that is not given leaves no trace, so that its variable still counts."""
    for option in options(names):
        text = option.description + (f" [{option.default}]" if option.default else "")
        escaped = text.replace("%", "%%")
        if option.value:
            parser.add_argument(
                option.flag, dest=_DEST + option.name, default=argparse.SUPPRESS, metavar=option.value, help=escaped
            )
        else:
            parser.add_argument(
                option.flag,
                dest=_DEST + option.name,
                default=argparse.SUPPRESS,
                action=argparse.BooleanOptionalAction,
                help=escaped,
            )


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings among the parsed flags, as text: `Settings` itself converts and checks."""
    return {name.removeprefix(_DEST): value for name, value in vars(args).items() if name.startswith(_DEST)}


def _value(annotation: Any) -> str:
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(arg for arg in get_args(annotation) if arg is not type(None))
    if get_origin(annotation) is Literal:
        return "{" + ",".join(get_args(annotation)) + "}"
    if annotation is bool:
        return ""
    return {int: "INT", float: "FLOAT"}.get(annotation, "TEXT")


def _default(name: str, field: FieldInfo) -> str:
    default = field.default
    if default is None or default == ():
        return ""
    if isinstance(default, bool):
        return "yes" if default else "no"
    if name.endswith("_bytes") and default % MiB == 0:
        return f"{default // MiB} MiB"
    return str(default)
