"""Make the notebooks of examples/ from their scripts: pair, execute, and keep what is small.

    python .ci/execute_notebooks.py [examples/01_the_ops.py ...]

Times and identifiers are left out, so that a notebook changes when its results do; pictures are
reduced to a palette. Needs the extra ``examples``, and what a script imports.
"""

import base64
import io
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
COLOURS = 48


def main(names):
    """Execute the named scripts, or all of them."""
    for path in map(Path, names or sorted((ROOT / "examples").glob("*.py"))):
        notebook = jupytext.read(path)
        NotebookClient(notebook, timeout=600, kernel_name="python3").execute(cwd=str(ROOT))
        for number, cell in enumerate(notebook.cells):
            cell.id, cell.metadata = f"cell-{number:02}", {}
            for output in cell.get("outputs", []):
                _shrink(output.get("data", {}))
        kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
        pairing = {"formats": "ipynb,py:percent"}
        notebook.metadata = {"kernelspec": kernel, "jupytext": pairing}
        target = path.with_suffix(".ipynb")
        nbformat.write(notebook, target)
        print(f"{target.name}: {target.stat().st_size} bytes")


def _shrink(data):
    if "image/png" in data:
        picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).convert("RGB")
        small = io.BytesIO()
        picture.quantize(COLOURS, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
        data["image/png"] = base64.b64encode(small.getvalue()).decode() + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
