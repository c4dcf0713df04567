"""Settings: TOML files and key=value words to frozen dataclasses, with errors that name the nearest key.

Knows no setting itself: each config class stands beside the code that uses it and checks its own values.
"""

import ast
import difflib
import inspect
import itertools
import json
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from txl.errors import ConfigError


def load(path: str | Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Read a TOML file, the files it extends, and "section.key=value" words, later ones winning.

        extends = "base.toml"       a file beside this one, whose settings come first

    Returns:
        The settings as nested dicts, not yet checked: from_dict does that.

    Raises:
        ConfigError: a file is missing or not TOML, files extend each other in a circle, a word has no "=".
    """
    settings = _read(Path(path), ())
    for word in overrides:
        merge(settings, parse_override(word))
    return settings


def parse_override(word: str) -> dict[str, Any]:
    """ "train.steps=10" -> {"train": {"steps": Word("10")}}; the type of the field decides how the text is read."""
    key, equals, value = word.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f'expected section.key=value on the command line, got "{word}"')
    changes = Word(value)
    for name in reversed(names):
        changes = {name: changes}
    return changes


class Word(str):
    """A value as it was typed on the command line."""

    __slots__ = ()

    def parse(self, hint) -> Any:
        """Read as TOML, or as it stands: for a text field anything but a quoted string, elsewhere what is not TOML."""
        try:
            value = tomllib.loads(f"value = {self}")["value"]
        except tomllib.TOMLDecodeError:
            return str(self)
        return str(self) if hint is str and not isinstance(value, str) else value


def merge(settings: dict[str, Any], changes: dict[str, Any]) -> None:
    """Put changes into settings, section by section."""
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(settings.get(key), dict):
            merge(settings[key], value)
        else:
            settings[key] = value


def from_dict(cls: type, settings: dict[str, Any], where: str, section: str = "", known: list[str] | None = None):
    """An instance of a config dataclass.

    Args:
        cls: a dataclass whose fields are bool, int, float, str, lists (tuples) of them, or such dataclasses.
        settings: names and values.
        where: the file or command, for messages.
        section: dotted name of this class's section, for messages.
        known: names to suggest for an unknown one; those of this class unless given.

    Raises:
        ConfigError: unknown key (with the nearest name), wrong type, or what the class itself refuses.
    """
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in settings.items():
        name = f"{section}.{key}" if section else key
        if key not in hints:
            raise ConfigError(f"{where}: unknown setting {name}{_nearest(name, known or _all_names(cls, section))}")
        values[key] = _typed(hints[key], value, name, where, known or _all_names(cls, section))
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") if where not in str(error) else error from error


def to_toml(config: Any, section: str = "") -> str:
    """The TOML text of a config dataclass; absent (None) settings are left out. from_dict reads it back equal."""
    lines, below = [], []
    for field in fields(config):
        name, value = f"{section}.{field.name}" if section else field.name, getattr(config, field.name)
        if is_dataclass(value):
            below.append(f"[{name}]\n{to_toml(value, name)}")
        elif value is not None:
            lines.append(f"{field.name} = {_toml_value(value)}\n")
    return "\n".join(["".join(lines), *below] if lines else below)


def describe(cls: type, section: str = "") -> str:
    """Help text: every setting with its default and the docstring under its field."""
    docs, lines, hints = _field_docs(cls), [], typing.get_type_hints(cls)
    for field in fields(cls):
        name = f"{section}.{field.name}" if section else field.name
        if is_dataclass(hints[field.name]):
            lines += ["", describe(hints[field.name], name)]
            continue
        default = "absent" if field.default is None else _toml_value(field.default)
        head = f"  {name} = {default}"
        text = textwrap.wrap(docs[field.name], 78, initial_indent=" " * 6, subsequent_indent=" " * 6)
        lines += [head, *text]
    return "\n".join(lines)


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in seen:
        raise ConfigError(f"{path}: files extend each other in a circle")
    if not path.is_file():
        near = _nearest(path.name, [p.name for p in path.parent.glob("*.toml")] if path.parent.is_dir() else [])
        raise ConfigError(f"no config file {path}{near}")
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    base = settings.pop("extends", None)
    if base is None:
        return settings
    if not isinstance(base, str):
        raise ConfigError(f"{path}: extends must be the name of a file, got {base!r}")
    below = _read(path.parent / base, (*seen, path.resolve()))
    merge(below, settings)
    return below


def _typed(hint, value, name: str, where: str, known: list[str]):
    """The value as the field's type wants it: whole numbers serve as floats, lists become tuples."""
    if isinstance(hint, types.UnionType):
        hint = next(option for option in typing.get_args(hint) if option is not types.NoneType)
        if value is None:
            return None
    if is_dataclass(hint):
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: {name} is a section, expected {name}.key=value, got {value!r}")
        return from_dict(hint, value, where, name, known)
    if isinstance(value, Word):
        value = value.parse(hint)
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where}: {name} must be a list of {_words(inner)}, got {value!r}")
        return tuple(_typed(inner, item, name, where, known) for item in value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ConfigError(f"{where}: {name} must be {_words(hint)}, got {value!r}")
    return value


def _words(hint: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]


def _nearest(name: str, known: list[str]) -> str:
    """ "; did you mean X?": the same key of another section, or else the nearest name; nothing when none is near."""
    last = name.rpartition(".")[2]
    match = [full for full in known if full.rpartition(".")[2] == last] or difflib.get_close_matches(name, known, 1)
    return f"; did you mean {match[0]}?" if match else ""


def _all_names(cls: type, section: str) -> list[str]:
    """Dotted names of all settings and sections below a config class."""
    hints, names = typing.get_type_hints(cls), []
    for field in fields(cls):
        name = f"{section}.{field.name}" if section else field.name
        names += [name, *(_all_names(hints[field.name], name) if is_dataclass(hints[field.name]) else [])]
    return names


def _field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field, which only the source holds."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    docs = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            docs[field.target.id] = " ".join(str(text.value.value).split())
    return docs


def _toml_value(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, (str, bool)):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
