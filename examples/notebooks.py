"""Makes a notebook of each experiment, runs it, and puts it and its figure into the documentation.

    python -m examples.notebooks [NAME ...]

The cells are what is in the file of the experiment, in its order, and then what its `main` does,
step by step: so there is one source of both.
"""

import ast
import base64
import io
import os
import pathlib
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from PIL import Image

from . import EXPERIMENTS

FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "experiments"


def cells(name: str) -> list[tuple[str, str]]:
    """What is in the notebook of an experiment: pairs of `markdown` or `code`, and the text."""
    source = pathlib.Path(__file__).with_name(f"{name}.py").read_text()
    tree = ast.parse(source)
    main = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main")
    docstring = ast.get_docstring(tree)
    assert docstring is not None, f"`{name}` has no docstring"
    title, _, text = docstring.partition("\n")
    text = text.replace(f"\n    python -m examples.{name}\n", "").strip()
    origin = f"*Made from `examples/{name}.py`, which `python -m examples.{name}` runs.*"
    made = [("markdown", f"# {title.rstrip('.')}\n\n{text}\n\n{origin}")]
    groups: list[list[ast.stmt]] = [[]]
    for node in tree.body[1:]:
        if node is main or isinstance(node, ast.If):
            continue
        is_block = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if is_block or (groups[-1] and _gap(source, groups[-1][-1], node) > 1):
            groups.append([])
        groups[-1].append(node)
    made += [("code", _text(source, group)) for group in groups if group]
    return made + _steps(source, main)


def _steps(source: str, main: ast.FunctionDef) -> list[tuple[str, str]]:
    """The body of `main`, a cell for each step."""
    defaults = zip(main.args.args, main.args.defaults, strict=True)
    values = [(arg.arg, ast.get_source_segment(source, value)) for arg, value in defaults]
    first = "\n".join(f"{name} = {value}" for name, value in values)
    made, group = [], []
    body = main.body[1:]  # without the docstring
    for node, following in zip(body, [*body[1:], None], strict=True):
        group.append(node)
        if following is None or _gap(source, node, following) > 0:
            text = _text(source, group)
            shown = "report.finish()\nassert not report.wrong"
            made.append(("code", text.replace("return report.finish()", shown)))
            group = []
    kind, text = made[0]
    return [(kind, f"{first}\n{text}"), *made[1:]]


def _text(source: str, nodes: list[ast.stmt]) -> str:
    lines = source.splitlines()[_start(nodes[0]) - 1 : nodes[-1].end_lineno]
    text = textwrap.dedent("\n".join(lines))
    text = re.sub(r"^from \. import", "from examples import", text, flags=re.MULTILINE)
    return re.sub(r"^from \.(\w)", r"from examples.\1", text, flags=re.MULTILINE)


def _start(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


def _gap(source: str, before: ast.stmt, after: ast.stmt) -> int:
    """How many lines are empty between two statements."""
    between = source.splitlines()[before.end_lineno : _start(after) - 1]
    return sum(not line.strip() for line in between)


def main(names: list[str]) -> None:
    """Writes the notebooks of these experiments, or of all."""
    import nbclient
    import nbformat
    from nbformat import v4

    FOLDER.mkdir(exist_ok=True)
    os.environ |= {"COLUMNS": "100", "TTY_COMPATIBLE": "0"}  # tables, and nothing that moves
    for name in names or EXPERIMENTS:
        new = {"markdown": v4.new_markdown_cell, "code": v4.new_code_cell}
        made = [new[kind](text, id=f"{name}-{i}") for i, (kind, text) in enumerate(cells(name))]
        notebook = v4.new_notebook(cells=made)
        client = nbclient.NotebookClient(notebook, timeout=None, cwd=FOLDER.parents[1])
        client.execute()
        for cell in notebook.cells:  # progress bars go to the standard error
            outputs = cell.get("outputs", [])
            cell["outputs"] = [o for o in outputs if o.get("name") != "stderr"]
            cell.metadata.clear()  # when it ran
        (figure,) = _figures(notebook.cells)
        image = _smaller(base64.b64decode(figure["image/png"]))
        figure["image/png"] = base64.b64encode(image).decode()
        (FOLDER / f"{name}.png").write_bytes(image)
        nbformat.write(notebook, FOLDER / f"{name}.ipynb")
        print(f"Wrote {name}.ipynb")


def _figures(cells: Sequence[Any]) -> list[dict[str, str]]:
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return [output["data"] for output in outputs if "image/png" in output.get("data", {})]


def _smaller(png: bytes) -> bytes:
    """The same image, in at most 240 colours."""
    out = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(240).save(out, "png", optimize=True)
    return out.getvalue()


if __name__ == "__main__":
    main(sys.argv[1:])
