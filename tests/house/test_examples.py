"""The notebooks: made of the scripts beside them, without errors, small; and the scripts run."""

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NEEDED = ("torch", "jax", "sklearn")  # besides what the demo needs
MOST_BYTES = 150_000

every_example = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


def script_cells(script):
    """Return kind and source of each cell of a percent script."""
    text = script.read_text(encoding="utf-8").split("\n# ---\n", 1)[1]  # past jupytext's head
    for cell in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        head, _, source = cell.partition("\n")
        if head.strip() == "[markdown]":
            yield "markdown", re.sub(r"^# ?", "", source.strip("\n"), flags=re.MULTILINE)
        else:
            yield "code", source.strip("\n")


def notebook(script):
    return json.loads(script.with_suffix(".ipynb").read_text(encoding="utf-8"))


def outputs(script):
    return [output for cell in notebook(script)["cells"] for output in cell.get("outputs", [])]


def test_every_notebook_has_a_script():
    assert SCRIPTS
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == {path.stem for path in SCRIPTS}


@every_example
def test_the_notebook_is_its_script(script):
    found = notebook(script)
    cells = [(cell["cell_type"], "".join(cell["source"]).strip("\n")) for cell in found["cells"]]
    assert cells == list(script_cells(script))
    assert found["metadata"]["jupytext"] == {"formats": "ipynb,py:percent"}


@every_example
def test_the_notebook_was_executed_from_the_top(script):
    counts = [c["execution_count"] for c in notebook(script)["cells"] if c["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    kinds = [output["output_type"] for output in outputs(script)]
    assert "error" not in kinds and "stream" in kinds
    assert all(output.get("name", "stdout") == "stdout" for output in outputs(script))  # no warning


@every_example
def test_the_notebook_ends_in_a_picture_and_is_small(script):
    picture = outputs(script)[-1]["data"]["image/png"]
    assert base64.b64decode("".join(picture)).startswith(b"\x89PNG\r\n\x1a\n")
    assert script.with_suffix(".ipynb").stat().st_size < MOST_BYTES


@every_example
def test_no_output_names_a_path(script):
    for output in outputs(script):
        text = "".join(output.get("text", output.get("data", {}).get("text/plain", "")))
        assert not re.search(r"(^|\s|['\"])(/\w+){2}|[A-Z]:\\", text), text


@every_example
def test_the_script_runs(script, require, tmp_path):
    require("demo")
    code = script.read_text(encoding="utf-8")
    for name in NEEDED:
        if re.search(rf"^(import|from) {name}\b", code, re.MULTILINE):
            require(name)
    environment = os.environ | {"MPLBACKEND": "Agg", "PYTHONPATH": str(EXAMPLES.parent)}
    environment.pop("SBNET_POINTS", None)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
