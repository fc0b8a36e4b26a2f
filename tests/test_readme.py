"""The Python in the documents runs, and the commands they name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"(?ms)^```(\w*)\n(.*?)^```")


def sections():
    """Blocks that share their names: those under a heading of the README, those of another page."""
    cases = []
    for path in DOCUMENTS:
        text = path.read_text()
        found = {}
        for block in FENCE.finditer(text):
            if block[1] == "python":
                headings = re.findall(r"(?m)^#+ (.*)$", FENCE.sub("", text[: block.start()]))
                heading = headings[-1 if path.stem == "README" else 0]
                line = text[: block.start(2)].count("\n")
                found.setdefault(heading, []).append((line, block[2]))
        for heading, blocks in found.items():
            title = re.sub(r"\W+", "_", heading.lower()).strip("_")
            cases.append(pytest.param(path, blocks, id=f"{path.stem.lower()}-{title}"))
    return cases


@pytest.mark.parametrize(("path", "blocks"), sections())
def test_snippets(path, blocks):
    names = {"__name__": "snippet"}
    for line, code in blocks:
        # Blank lines in front, so that a traceback names the line of the document.
        exec(compile("\n" * line + code, path, "exec"), names)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem.lower())
def test_commands_exist(path):
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    text = path.read_text()
    code = [block[2] for block in FENCE.finditer(text) if block[1] != "python"]
    code += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    named = {target for c in code for target in re.findall(r"\bmake ([a-z-]+)", c)}
    assert named <= targets, named - targets


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem.lower())
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target
