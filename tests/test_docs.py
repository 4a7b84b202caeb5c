"""What the documents name exists, and what they tell a newcomer to run works."""

import importlib.util
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import mla_cute

ROOT = Path(__file__).parent.parent
DOCS = ("README.md", "CONTRIBUTING.md")
TRACKED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=False, capture_output=True, text=True
).stdout.split("\n")


def code_spans(name: str) -> list[str]:
    text = (ROOT / name).read_text()
    fenced = re.findall(r"```\w*\n(.*?)```", text, re.S)
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S)) + "\n".join(fenced).split("\n")


@pytest.mark.parametrize("name", DOCS)
def test_named_paths_exist(name):
    paths = {p for span in code_spans(name) for p in re.findall(r"[\w./-]+\.(?:py|md|toml|json)\b", span)}
    assert len(paths) >= 3
    for path in paths:
        assert (ROOT / path).exists() or (ROOT / "mla_cute" / path).exists(), path


def test_every_document_is_in_the_readmes_table():
    table = [line.split("|")[1] for line in (ROOT / "README.md").read_text().split("\n") if line.startswith("| `")]
    for path in TRACKED:
        if path.startswith("docs/"):
            assert any(f"`{path}`" in cell for cell in table), path


@pytest.mark.parametrize("name", DOCS)
def test_named_make_targets_exist(name):
    targets = {t for span in code_spans(name) for t in re.findall(r"\bmake (\w+)", span)}
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), target


def test_readme_example_runs():
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    values = {}
    exec(snippet, values)
    out, lse = mla_cute.reference.sparse_decode(values["q"], values["kv_cache"], values["indices"])
    assert (values["out"].float() - out.float()).abs().max() < 1e-3
    assert (values["lse"] - lse).abs().max() < 1e-3


def test_public_names_in_docs_exist():
    for name in DOCS:
        for path in re.findall(r"\bmla_cute\.((?:[a-z_]\w*)(?:\.[a-z_]\w*)*)", " ".join(code_spans(name))):
            found = mla_cute
            for part in path.split("."):
                if not hasattr(found, part):
                    __import__(f"{found.__name__}.{part}")
                found = getattr(found, part)


def test_ci_runs_the_readmes_test_command():
    assert "make test" in (ROOT / "README.md").read_text()
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("make test")


def test_versions_agree():
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{mla_cute.__version__}"' in project
    assert f"nvidia-cutlass-dsl[cu13]=={metadata.version('nvidia-cutlass-dsl')}" in project


@pytest.mark.parametrize("name", DOCS)
def test_named_modules_exist(name):
    for module in {m for span in code_spans(name) for m in re.findall(r"python\S* -m ([\w.]+)", span)}:
        assert importlib.util.find_spec(module), module


def test_no_absolute_paths_nor_registry_hosts():
    files = [ROOT / name for name in TRACKED if name.endswith((".py", ".md", ".toml", "Makefile", ".json", ".ci/run"))]
    assert len(files) > 20 or not TRACKED[0]
    hosts = "|".join(["py" + "pi", "python" + "hosted"])  # in two pieces: this file is looked at too
    for file in filter(Path.exists, files):  # a file just deleted is still in the index
        text = file.read_text()
        assert not re.search(r"[\"'`( ]/(?:work|root|home)/", text), file
        assert not re.search(rf"\b(?:{hosts})\.(?:org|io)", text), file


def test_import_is_light():
    """No torch, no DSL, no GPU at `import mla_cute`."""
    code = "import sys, mla_cute; print(sorted({'torch', 'cutlass', 'tvm_ffi'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).strip() == "[]"
