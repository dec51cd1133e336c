"""Usage: check_templates.py FOLDER

Writes a package from each template of `torchkiln new` into FOLDER, installs it beside torchkiln,
and runs its `nox -s tests` in this environment, since a new one might have another torch. Then the
package's op is judged as a candidate for its own spec.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from torchkiln.new import TEMPLATES

# The first template runs its whole contract; the others, with the same Python code, a part of it,
# which takes less time than starting workers.
WHOLE = ("-n", "auto")
PART = ("-m", "not slow", "-k", "(values or grad or opcheck or meta or export) and not autocast")


def run(folder: Path, *command: str) -> None:
    subprocess.run(command, cwd=folder, check=True)


def main() -> None:
    folder = Path(sys.argv[1])
    for template in TEMPLATES:
        package = folder / template
        shutil.rmtree(package, ignore_errors=True)
        words = (f"new_{template}", f"--template={template}", f"--out={package}")
        run(folder, "torchkiln", "new", *words)
        run(
            package, "python", "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check"
        )
        (built,) = (package / "dist").glob("*.whl")
        pip = ("python", "-m", "pip", "install", "--no-deps", "--force-reinstall", str(built))
        run(package, *pip)
        chosen = WHOLE if template == next(iter(TEMPLATES)) else PART
        run(package, "nox", "--no-venv", "--no-install", "-s", "tests", "--", *chosen)
        judge(package, f"new_{template}")


def judge(package: Path, name: str) -> None:
    """Run the command of `torchkiln judge` from the package's README."""
    (package / "candidate.py").write_text(f"from {name} import {name}\n")
    run(package, "torchkiln", "judge", "candidate.py", f"--op={name}", f"--specs={name}.spec")


if __name__ == "__main__":
    main()
