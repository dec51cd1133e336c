"""``python -m replace_zoo.count``: write what ``torchkiln.replace`` finds in models to counts.json.

It prints each kind of replacement that the old file has and this run does not find.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torchkiln

FILE = Path(__file__).with_name("counts.json")


def counts(report: Any) -> dict[str, int]:
    """Numbers of replaced modules by kind; ``residual`` counts sums before norms."""
    found: Counter[str] = Counter()
    for row in report.changed:
        found[row.kind] += 1
        found["sums"] += row.now.count("add_layer_norm at") + row.now.count("add_rms_norm at")
        found["linear with act"] += row.now.count("linear(")
    return {name: count for name, count in sorted(found.items()) if count}


def main() -> None:
    """Count the replaced modules of all models of transformers, and write counts.json."""
    import transformers  # noqa: PLC0415

    from replace_zoo import models  # noqa: PLC0415

    before = json.loads(FILE.read_text())["models"] if FILE.exists() else {}
    found: dict[str, dict[str, int]] = {}
    classes: dict[str, set[str]] = {}
    for kind in models.families():
        try:
            _, report = models.outcome(kind, torchkiln.replace)
        except Exception as error:
            print(f"{kind}: {type(error).__name__}: {str(error)[:100]!r}")
            continue
        found[kind] = counts(report)
        for row in report.changed:
            classes.setdefault(row.kind, set()).add(row.was)
        lost = {n: (c, found[kind].get(n, 0)) for n, c in before.get(kind, {}).items()}
        lost = {n: pair for n, pair in lost.items() if pair[0] != pair[1]}
        print(f"{kind}: {found[kind]}", f"before and now: {lost}" if lost else "")
    total: Counter[str] = Counter()
    for count in found.values():
        total.update(count)
    lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(found.items()))
    head = {
        "transformers": transformers.__version__,
        "modules": dict(sorted(total.items())),
        "classes": {name: len(names) for name, names in sorted(classes.items())},
    }
    text = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in head.items())
    FILE.write_text(f'{{\n{text},\n "models": {{\n{lines}\n }}\n}}\n')


if __name__ == "__main__":
    main()
