"""Runs the Python blocks of the pages and of the public docstrings, as a reader would."""

import inspect
import linecache
import re
import types
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from sybil import Document
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer

import harvest
import harvest.internal

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
}
# Looser than what the parser accepts, so that a block it would skip is found out.
FENCE = re.compile(
    r"^[ \t>]*(?:`{3,}|~{3,})[ \t]*\{?[ \t]*\.?py(?:thon|con)?3?\b", re.MULTILINE | re.IGNORECASE
)
# After the language there may be options, of a block that is run as the pages are built.
FENCED = FencedCodeBlockLexer(r"python(?: [^\n]*)?", mapping={"source": "source"})
EVALUATE = PythonEvaluator()


def public(module: types.ModuleType) -> Iterator[tuple[str, object]]:
    """Each public name with its object; of a public module its own names."""
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, types.ModuleType):
            yield from public(value)
        elif not name.startswith("__"):
            yield f"{module.__name__}.{name}", value


def docstrings() -> Iterator[tuple[str, str]]:
    """The docstrings of the public objects, and of what the public classes define."""
    for name, value in PUBLIC.items():
        yield name, inspect.cleandoc(value.__doc__ or "")
        if isinstance(value, type):
            for member, definition in vars(value).items():
                if isinstance(definition, (types.FunctionType, classmethod, property)):
                    yield f"{name}.{member}", inspect.cleandoc(definition.__doc__ or "")


PUBLIC = dict(public(harvest)) | dict(public(harvest.internal))
DOCSTRINGS = dict(docstrings())


def with_blocks(texts: dict[str, str]) -> list[str]:
    return [name for name, text in texts.items() if FENCE.search(text)]


def run_blocks(text: str, path: str) -> None:
    """Runs the blocks of `text` in order and in one namespace; errors have lines of `path`."""
    document = Document(text, path)
    document.namespace["__name__"] = "__main__"
    for region in FENCED(document):
        region.parsed, region.evaluator = region.lexemes["source"], EVALUATE
        document.add(region)
    blocks = list(document)
    assert len(blocks) == len(FENCE.findall(text)), "a block that does not open with ```python"
    for block in blocks:
        block.evaluate()


@pytest.fixture(autouse=True)
def as_a_reader(tmp_path, monkeypatch):
    """JAX as it comes, and a folder to write to."""
    monkeypatch.chdir(tmp_path)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_there_are_blocks_to_run():
    assert {"README.md", "docs/index.md"} <= set(with_blocks(PAGES))
    assert PUBLIC and with_blocks(DOCSTRINGS)


@pytest.mark.parametrize("page", with_blocks(PAGES))
def test_page(page):
    run_blocks(PAGES[page], str(ROOT / page))


@pytest.mark.parametrize("name", with_blocks(DOCSTRINGS))
def test_docstring(name):
    text, path = DOCSTRINGS[name], f"<docstring of {name}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    run_blocks(text, path)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_has_an_example(name):
    assert FENCE.search(DOCSTRINGS[name]), f"the docstring of `{name}` has no ```python block"


def test_public_names_are_on_the_api_pages():
    pages = "\n".join(PAGES[page] for page in PAGES if page.startswith("docs/api"))
    assert set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE)) == set(PUBLIC)


@pytest.mark.parametrize(
    "text, match",
    [
        ("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", None),
        ("```py\nx = 1\n```\n", "does not open with"),
        ("```pycon\n>>> x = 1\n```\n", "does not open with"),
        ('```python exec="on" session="s"\nassert 1 == 2\n```\n', None),
    ],
)
def test_a_wrong_or_skipped_block_fails(text, match):
    with pytest.raises(AssertionError, match=match):
        run_blocks(text, "page.md")
