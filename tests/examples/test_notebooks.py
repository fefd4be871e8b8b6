"""The notebooks in the documentation are those of the experiments as they are."""

import base64

import nbformat
import pytest

from examples import EXPERIMENTS, notebooks


def read(name):
    return nbformat.read(notebooks.FOLDER / f"{name}.ipynb", as_version=4)


def test_there_is_one_for_each_experiment():
    assert {p.stem for p in notebooks.FOLDER.glob("*.ipynb")} == {*EXPERIMENTS}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_notebook_is_what_its_experiment_does(name):
    cells = [(cell.cell_type, cell.source) for cell in read(name).cells]
    assert cells == notebooks.cells(name), f"make it anew: python -m examples.notebooks {name}"
    compile("\n".join(text for kind, text in cells if kind == "code"), name, "exec")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_notebook_was_run_to_its_end(name):
    cells = [cell for cell in read(name).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell.outputs]
    assert "error" not in {output.output_type for output in outputs}
    printed = "".join(output.get("text", "") for output in outputs)
    assert " ok " in printed and " NO " not in printed
    (figure,) = [o.data["image/png"] for o in outputs if "image/png" in o.get("data", {})]
    image = notebooks.FOLDER / f"{name}.png"
    assert image.read_bytes() == base64.b64decode(figure)
    assert image.stat().st_size < 200_000  # bytes
