"""Settings as text: without secrets, and as a file that says the same."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from capture.patterns import NAMED

REDACTED = "[redacted]"
SECRET_NAME = re.compile(r"(secret|password|token|api_?key|credential)s?$", re.IGNORECASE)


def redacted(sections: Mapping[str, Any]) -> dict[str, Any]:
    """The same without secrets: settings named like one, passwords inside URLs, what is to be redacted."""
    return {key: _redact(key, value) for key, value in sections.items()}


def _redact(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return redacted(value)
    if isinstance(value, list | tuple):
        return [_redact(key, one) for one in value]
    if isinstance(value, str) and value:
        if SECRET_NAME.search(key) or (key == "redact" and value not in NAMED):
            return REDACTED
        return re.sub(r"(://[^/@:]+:)[^/@]+@", rf"\1{REDACTED}@", value)
    return value


def to_toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """The sections as a file; settings without a value are left out, as TOML has none."""
    lines: list[str] = []
    for section, table in sections.items():
        lines += [f"[{section}]", *(_toml_lines(table)), ""]
    return "\n".join(lines)


def to_toml_array(name: str, table: Mapping[str, Any]) -> str:
    """One element of an array of tables."""
    return "\n".join([f"[[{name}]]", *_toml_lines(table)])


def _toml_lines(table: Mapping[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        if value is not None:
            yield f"{_toml_key(key)} = {_toml_value(value)}"


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(_toml_lines(value)) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return msgspec.json.encode(value).decode()
