"""The documents are true: code runs and prints what it says, links resolve, names exist."""

import ast
import contextlib
import importlib.util
import inspect
import io
import itertools
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

import sbnet_cupy

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOLDERS = (".", "cuda_src", "benchmarks", "examples", "docs", "docs/design")
DOCUMENTS = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))
COMMANDS = [
    'pip install -e ".[demo]" && sbnet-cupy demo', 'pip install -e ".[test]" && pytest -n auto'
]  # fmt: skip
REFERENCE, GEOMETRY = "docs/reference.md", "docs/operations.md"
SBNET, SPCONV = "docs/coming_from_sbnet.md", "docs/coming_from_spconv.md"
OPTIONAL = {"cupy": "gpu", "torch": "torch", "jax": "jax", "tensorflow": "tensorflow"}


def code_blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def without_code(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


BLOCKS = code_blocks(README, "python")


def section(title, document="README.md"):
    """Return what stands under a heading of a document, up to the next of its level."""
    level = title.partition(" ")[0]
    text = "\n" + without_code((ROOT / document).read_text(encoding="utf-8"))
    rest = text.partition(f"\n{title}\n")[2]
    return re.split(rf"^#{{1,{len(level)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def rows(text):
    """Return the cells of a table's rows, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


# ------------------------------------------------------------------------------------------ code


def library_of(code):
    """Return the optional library that a block imports, or None."""
    return next((name for name in OPTIONAL if re.search(rf"^import {name}\b", code, re.M)), None)


def promised(code):
    """Return what a block's comments say that it prints: after a print, or on the line below."""
    return re.findall(r"^print\(.*\)(?: {2,}|\n)# (.+)$", code, re.MULTILINE)


def run(blocks, library, name):
    """Run the blocks that need NumPy or this library; return how many lines they print."""
    namespace, count = {}, 0
    for code in blocks:
        if library_of(code) not in (None, library):
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, name, "exec"), namespace)
        assert code.count("print(") == len(promised(code))
        assert printed.getvalue().splitlines() == promised(code)
        count += len(promised(code))
    return count


@pytest.mark.parametrize("library", sorted(set(map(library_of, BLOCKS)), key=str))
def test_the_code_runs_and_prints_what_it_says(library, require):
    """Run the blocks in their order: those that need NumPy alone, then one library's own."""
    if library is not None:
        require(OPTIONAL[library])
    assert run(BLOCKS, library, "README.md") >= 5


GUIDES = {
    name: code_blocks((ROOT / "docs" / name).read_text(encoding="utf-8"), "python")
    for name in ("coming_from_spconv.md", "operations.md", "sites.md", "stack.md")
}
CALLS = [
    (name, lib) for name, code in GUIDES.items() for lib in dict.fromkeys(map(library_of, code))
]


@pytest.mark.parametrize(("name", "library"), CALLS)
def test_the_code_of_a_guide_runs(name, library, require):
    """Each guide of docs/ runs from its own first line: NumPy alone, and with each library."""
    if library is not None:
        require(OPTIONAL[library])
    assert run(GUIDES[name], library, name) >= (2 if library is None else 3)


def test_each_guide_with_code_is_run():
    with_code = [
        p.name for p in (ROOT / "docs").glob("*.md") if code_blocks(p.read_text(), "python")
    ]
    assert sorted(with_code) == sorted(GUIDES)


def test_the_readme_shows_numpy_cupy_and_torch():
    libraries = [library_of(code) for code in BLOCKS]
    assert libraries[0] is None and {"cupy", "torch"} <= set(libraries)


# ------------------------------------------------------------------------------------------ text


def test_the_first_screen():
    """What it is, how fast a network is, the picture, and the two commands, spelled exactly."""
    first = README.partition("\n## ")[0]
    picture = re.search(r"!\[.+\]\((.+\.png)\)", first)
    sentences = re.findall(r"\.(?=\s)", first[: picture.start()].replace("et al. ", ""))
    assert len(sentences) == 4 and "benchmarks.networks.bench_networks" in first
    assert [line for block in code_blocks(first, "sh") for line in block.splitlines()] == COMMANDS


@pytest.mark.parametrize("picture", sorted((ROOT / "examples" / "images").glob("*")), ids=str)
def test_pictures_are_small(picture):
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) < 300_000


def anchor(heading):
    """Return the anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(path):
    text = without_code(path.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("https://"):
            continue
        name, _, mark = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists() and target.is_relative_to(ROOT), link
        if mark:
            headings = re.findall(r"^#+ (.+)$", without_code(target.read_text("utf-8")), re.M)
            assert mark in map(anchor, headings), link


def test_every_public_name_is_mentioned():
    text = section("## Functions", REFERENCE) + section("## Errors", REFERENCE)
    names = set(re.findall(r"`(\w+)[`(.]", text))
    assert set(sbnet_cupy.__all__) <= names
    functions = [line for line in text.splitlines() if line.startswith("| `masks` |")]
    (makers,) = (line.strip("|").partition("|")[2] for line in functions)
    assert sorted(re.findall(r"`(\w+)`", makers)) == sorted(sbnet_cupy.masks.__all__)


def test_the_extras_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [name for cells in rows(section("## Install")) for name in cells[0].split(", ")]
    assert sorted(name.strip("`") for name in named) == sorted(project["optional-dependencies"])


def test_the_arguments_are_those_of_the_ops():
    ops = [getattr(sbnet_cupy, n) for n in ("reduce_mask", "sparse_gather", "sparse_scatter")]
    known = {name for op in ops for name in inspect.signature(op).parameters}
    cells = [cells[0] for cells in rows(section("## What the arguments mean", GEOMETRY))]
    named = set(re.findall(r"`(\w+)`", " ".join(cells)))
    assert named == known - {"mask", "x", "blocks"}


@pytest.mark.parametrize(
    ("old", "new", "why"), rows(section("# Coming from SBNet", SBNET)), ids=lambda cell: cell[:40]
)
def test_coming_from_sbnet(old, new, why):
    check_name(old, new, why, sbnet_cupy)


@pytest.mark.parametrize(
    ("old", "new", "why"), rows(section("# Coming from spconv", SPCONV)), ids=lambda cell: cell[:40]
)
def test_coming_from_spconv(old, new, why, torch):
    import sbnet_cupy.torch as st

    check_name(old, new, why, sbnet_cupy if "SparseTensor." in new else st)


def check_name(old, new, why, package):
    """Check that a new name exists and takes the arguments that the table passes."""
    assert old and why.endswith(".")
    if new in ("none", "none yet"):
        return
    (node,) = ast.parse(new.strip("`")).body
    if isinstance(node, ast.Import):
        assert node.names[0].name == "sbnet_cupy"
        return
    call = node.value
    target = package
    for name in ast.unparse(call.func if isinstance(call, ast.Call) else call).split("."):
        fields = getattr(target, "__dataclass_fields__", {})
        target = fields[name] if name in fields else getattr(target, name)
    if isinstance(call, ast.Call):
        keywords = dict.fromkeys(keyword.arg for keyword in call.keywords)
        inspect.signature(target).bind(*call.args, **keywords)


# ------------------------------------------------------------------------------------------ limits


def test_the_limits_are_still_there():
    """What the README says is missing is missing: when it comes, the README must change."""
    x, weights = np.ones((1, 6, 6, 2), np.float32), sbnet_cupy.BottleneckWeights.random(2, 2)
    project = np.ones((1, 1, 2, 2), np.float32)
    params = sbnet_cupy.calc_block_params_res_block(x.shape, 4, [1, 3, 1])
    active = sbnet_cupy.reduce_mask(np.ones((1, 6, 6), bool), params.bcount, bsize=2)
    for limit in ({"out": x}, {"w_project": project}):
        with pytest.raises(NotImplementedError):
            sbnet_cupy.sparse_res_block_bottleneck(
                x, weights, active, params, method="fused", **limit
            )
    for name in ("torch", "jax", "tensorflow"):
        assert f"`sbnet_cupy.{name}`" in section("## Status and limits")
        assert importlib.util.find_spec(f"sbnet_cupy.{name}") is not None


def test_a_tensor_that_requires_grad_is_refused(torch):
    with pytest.raises(sbnet_cupy.DTypeError, match=r"sbnet_cupy\.torch"):
        sbnet_cupy.reduce_mask(torch.ones(1, 4, 4, requires_grad=True), 2, bsize=2)


# ------------------------------------------------------------------------------------- the house


def drawn():
    """Return the paths that the drawing in ARCHITECTURE.md shows, by their indentation."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    folders = []
    for line in code_blocks(text, "text")[0].splitlines():
        folders[(len(line) - len(line.lstrip())) // 2 :] = []
        for name in itertools.takewhile(re.compile(r"\.?[\w<>]+(\.\w+|/)").fullmatch, line.split()):
            yield "/".join([*folders, name.rstrip("/")])
            if name.endswith("/"):
                folders.append(name.rstrip("/"))


def test_the_house_stands_as_it_is_drawn():
    """Every path of the drawing exists, and every module of the package is in it."""
    paths = {path for path in drawn() if "<" not in path}
    assert not [path for path in paths if not (ROOT / path).exists()]
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "sbnet_cupy").rglob("*.py")}
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "cuda_src").rglob("*.cu*")}
    assert not {p for p in modules | sources if not p.endswith("/__init__.py")} - paths
