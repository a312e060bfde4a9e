# SPDX-License-Identifier: Apache-2.0
"""Write documents that all count alike, but for one."""

import json
import random
import sys
from pathlib import Path

NUMBERS, LENGTH, DOCUMENTS, PLANTED = 40, 12, 120, 70
"""Words of a document, words that are damaged, documents in all, and the damaged one."""


def main(folder: Path) -> None:
    draw = random.Random(3)
    documents = [[*range(NUMBERS)] for _ in range(DOCUMENTS)]
    documents[PLANTED][20 : 20 + LENGTH] = [draw.randrange(64) for _ in range(LENGTH)]
    texts = [" ".join(f"w{number}" for number in document) for document in documents]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
