"""Turns the list of parameters in a docstring into fields, which Sphinx shows together with their types."""

import re
from collections.abc import Collection, Sequence

_ITEM = re.compile(r"- ((?:``\w+``, )*``\w+``): (.*)")


def listed(lines: Sequence[str], names: Collection[str], shared: Sequence[str] = ()) -> list[str]:
    """Return a docstring with a field for each item ``- ``name``: text`` whose names are some of ``names``.

    ``shared`` is the docstring that describes arguments which several classes have.
    """
    kept, fields = _read(lines, names)
    if not fields and not shared:
        return kept
    fields = _read(shared, names)[1] | fields
    in_order = [name for name in names if name not in {"self", "cls"}]
    return [*kept, "", *(f":param {name}: {fields.get(name, '')}" for name in in_order), ""]


def _read(lines: Sequence[str], names: Collection[str]) -> tuple[list[str], dict[str, str]]:
    kept: list[str] = []
    fields: dict[str, str] = {}
    current: list[str] = []
    for line in lines:
        item = _ITEM.match(line)
        if item and set(item[1].replace("`", "").split(", ")) <= set(names):
            current = item[1].replace("`", "").split(", ")
            fields.update(dict.fromkeys(current, item[2]))
        elif current and line.startswith("  "):
            fields.update({name: f"{fields[name]} {line.strip()}" for name in current})
        else:
            current = []
            kept.append(line)
    return kept, fields
