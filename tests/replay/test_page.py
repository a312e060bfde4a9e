# SPDX-License-Identifier: Apache-2.0
"""docs/bundle.md is right: its example runs, and it describes every key of the contract."""

import json
import re
from pathlib import Path

import pytest

from tests.world.events import validate

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "bundle.md").read_text(encoding="utf-8")


def test_the_bundle_written_by_hand_replays_as_the_page_shows(single, tmp_path):
    script = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    command, shown = re.search(r"```console\n\$ python -m gradloc.replay (.*?)\n(.*?)```", PAGE, re.DOTALL).groups()
    (done,) = single.run("tests.replay.scenarios.run_page", script=script, argv=command.split(), folder=str(tmp_path))
    assert (done["code"], done["err"]) == (0, "")
    # seconds and last digits are the machine's; the words are not
    assert _words(done["out"]) == _words(shown)
    for figure in (r"replay ([\d,.]+), threshold", r"explained; norm ([\d.]+) \(error", r"recall (\d+)%, \d+ false"):
        found, written = (float(re.search(figure, text)[1].replace(",", "")) for text in (done["out"], shown))
        assert found == pytest.approx(written, rel=1e-3), figure
    validate("bundle", json.loads((tmp_path / "bundle" / "meta.json").read_text()))


def _words(text):
    return re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "#", re.sub(r" +", " ", text)).strip()


@pytest.mark.parametrize("section", ["batch.safetensors", "meta.json"])
def test_every_key_of_a_real_bundle_is_on_the_page(event, section):
    from safetensors import safe_open

    folder = event("spike")
    if section == "meta.json":
        schema = json.loads((ROOT / "schema" / "bundle.v2.schema.json").read_text())
        names = {*schema["properties"], *json.loads((folder / "meta.json").read_text())}
    else:
        with safe_open(folder / "batch.safetensors", "pt") as file:
            names = {*file.keys()}
    assert {name for name in names if f"| `{name}` |" not in PAGE} == set()
