"""A listing for notebooks."""

import html
import importlib.util
from collections.abc import Sequence
from typing import Any

from ._sparkline import has_range

STYLE = "white-space: pre; font-family: monospace; overflow-x: auto; line-height: 1.4"


def as_html(rows: Sequence[str], values: Sequence[Sequence[Any]]) -> str:
    """The header and the lines as they are printed; those that have values open as heat maps."""
    if not any(values) or importlib.util.find_spec("treescope") is None:
        header, *lines = map(html.escape, rows)
        text = "\n".join([f"<b>{header}</b>", *lines])
        return f'<pre style="{STYLE}">{text}</pre>'
    return _with_heat_maps(rows, values)


def _with_heat_maps(rows: Sequence[str], values: Sequence[Sequence[Any]]) -> str:
    from treescope import figures, render_array
    from treescope import rendering_parts as parts

    header, *lines = rows
    nodes = [figures.treescope_part_from_display_object(figures.bolded(header))]
    for line, arrays in zip(lines, values, strict=True):
        maps = [render_array(array) for array in arrays if has_range(array)]
        if not maps:
            nodes.append(parts.build_one_line_tree_node(parts.text(line)).renderable)
            continue
        inside = parts.on_separate_lines(
            [figures.treescope_part_from_display_object(heat) for heat in maps]
        )
        node = parts.build_custom_foldable_tree_node(
            label=parts.text(line),
            contents=parts.fold_condition(expanded=parts.indented_children([inside])),
            expand_state=parts.ExpandState.COLLAPSED,
        )
        nodes.append(node.renderable)
    whole = parts.custom_style(parts.on_separate_lines(nodes), STYLE)
    return figures.figure_from_treescope_rendering_part(whole)._repr_html_()
