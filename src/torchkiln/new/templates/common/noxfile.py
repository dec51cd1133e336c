"""Sessions: ``nox -s tests``, ``nox -s lint``, ``nox -s bench``.

The variable TORCHKILN is an argument for pip that installs torchkiln, such as the file of a wheel;
TORCHKILN_TORCH is a version of torch. ``nox --no-venv --no-install -s tests`` runs in the current
environment, in which the package must be installed.
"""

from __future__ import annotations

import os

import nox

nox.options.sessions = ["lint", "tests"]

PYPROJECT = nox.project.load_toml("pyproject.toml")
TORCHKILN = os.environ.get("TORCHKILN")
TORCH = os.environ.get("TORCHKILN_TORCH")


def group(name: str) -> list[str]:
    return list(nox.project.dependency_groups(PYPROJECT, name))


def install_package(session: nox.Session) -> None:
    """Builds against the session's torchkiln and torch; the build folder is kept between runs."""
    # A file must come first, else pip takes torchkiln from its index.
    chosen = [TORCHKILN] if TORCHKILN else []
    if TORCH:
        chosen.append(f"torch=={TORCH}")
    session.install(*chosen, *PYPROJECT["project"]["dependencies"], *group("build"))
    session.install(
        ".", "--no-deps", "--no-build-isolation", f"-Cbuild-dir=build/nox/{session.name}"
    )


@nox.session
def tests(session: nox.Session) -> None:
    """The contract of the op, on the CPU and on a GPU if there is one."""
    install_package(session)
    session.install(*group("test"))
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Formatting and types."""
    install_package(session)
    session.install(*group("lint"), *group("test"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")


@nox.session
def bench(session: nox.Session) -> None:
    """Times of the op, of eager torch, of torch.compile and of the device's limits."""
    install_package(session)
    module = f"--specs={PYPROJECT['project']['name']}.spec"
    session.run("python", "-m", "torchkiln", "bench", module, *session.posargs)
